"""The end of a term: what the active node does before and after it gives up its leadership."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster.client import EtcdDeniedError, EtcdUnavailableError
from penstock.errors import ConfigError, RefusedError, StorageError, UnavailableError
from penstock.node.cluster.handover import HandoverRequests, handover_key, handover_user_key
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.node import NodeConfig
from penstock.runtime.observability.audit import AuditTrail


async def test_commits_are_written_to_lmdb_before_a_handover_and_after_it(tmp_path: Path) -> None:
    events: list[str] = []
    section = ClusterSection(name="c", node="n", etcd=["127.0.0.1:1"])
    config = NodeConfig(data_dir=tmp_path, cluster=section)
    member = ClusterMembership(config, lambda reason: events.append(f"restart: {reason}"))

    def read(_look: object) -> None:
        assert threading.current_thread().name == "cluster save"
        events.append("save")

    member._active_environments = cast(Any, [SimpleNamespace(read=read)])
    member._leadership = cast(Any, SimpleNamespace(resign=lambda: events.append("resign")))
    member._hand_over()
    assert events == ["save", "resign", "save", "restart: its leadership was handed over"]
    member._client.close()


async def test_a_handover_is_no_error_if_the_event_loop_notices_the_end_of_the_lease_first(tmp_path: Path) -> None:
    reasons: list[str] = []
    section = ClusterSection(name="c", node="n", etcd=["127.0.0.1:1"])
    member = ClusterMembership(NodeConfig(data_dir=tmp_path, cluster=section), reasons.append)
    member._leadership = cast(Any, SimpleNamespace(holds=lambda: False, resign=member.may_send))
    assert not member.may_send()
    member._hand_over()
    assert reasons == ["its lease may have expired", *["its leadership was handed over"] * 2]
    member._client.close()


@pytest.mark.parametrize(("revision", "user"), [(7, "operator@laptop"), (8, "")])
def test_a_disk_that_hangs_does_not_prevent_a_handover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: int, user: str
) -> None:
    """The user of an earlier handover (another revision) is not that of this one."""
    section = ClusterSection(name="c", node="n", etcd=["127.0.0.1:1"])
    rows: list[dict[str, Any]] = []
    hangs, called = threading.Event(), threading.Event()

    def append(_trail: object, row: dict[str, Any]) -> None:
        rows.append(row)
        called.set()
        hangs.wait()

    monkeypatch.setattr("penstock.node.cluster.process._SAVE_S", 0.01)
    monkeypatch.setattr("penstock.node.cluster.handover.append_audit_entry", append)
    keys = (
        (handover_key(section.prefix), b"3", revision),
        (handover_user_key(section.prefix), b"operator@laptop", 7),
    )
    found = [SimpleNamespace(key=key, value=value, mod_revision=revision) for key, value, revision in keys]
    client = cast(Any, SimpleNamespace(once=lambda *_: SimpleNamespace(kvs=found)))
    HandoverRequests(client, section).record(AuditTrail(tmp_path))
    assert called.wait(30)
    assert [row["user"] for row in rows] == [user]
    hangs.set()


async def test_an_elected_node_that_cannot_start_because_of_etcd_is_a_standby_again(tmp_path: Path) -> None:
    restarts: list[str] = []
    section = ClusterSection(name="c", node="n", etcd=["127.0.0.1:1"])
    member = ClusterMembership(NodeConfig(data_dir=tmp_path, cluster=section), restarts.append)
    member._leadership = cast(Any, SimpleNamespace(term=1))
    member.start_failed(ConfigError("http: the certificate cannot be read"))
    member.start_failed(UnavailableError("http: the address is in use"))
    assert restarts == []
    with pytest.raises(EtcdUnavailableError) as unavailable:
        member.logs()
    member.start_failed(unavailable.value)
    assert "no answer to KV/Range" in restarts.pop()
    unreadable = StorageError("mqtt: the log in etcd cannot be read")
    unreadable.__cause__ = unavailable.value
    member.start_failed(unreadable)
    assert "the log in etcd cannot be read" in restarts.pop()
    refused = RefusedError("mqtt: the broker refused the subscription")  # of a bridge, as of every client
    member.start_failed(refused)
    assert restarts == []
    unreadable.__cause__ = EtcdDeniedError("etcd: KV/Range was rejected: etcdserver: permission denied", code=7)
    member.start_failed(unreadable)
    assert "the log in etcd cannot be read" in restarts.pop()
    member._logs = cast(Any, SimpleNamespace(full=RefusedError("etcd: database space exceeded")))
    member.start_failed(refused)
    assert "refused the subscription" in restarts.pop()
    member._client.close()


async def test_an_active_node_that_etcd_denies_gives_up_after_the_time_of_its_lease(tmp_path: Path) -> None:
    """etcd renews the lease also of a user without rights, so that no other node could take over."""
    restarts: list[str] = []
    section = ClusterSection(name="c", node="n", etcd=["127.0.0.1:1"], lease_s=3)
    member = ClusterMembership(NodeConfig(data_dir=tmp_path, cluster=section), restarts.append)
    denials = 0

    def requested() -> bool:
        nonlocal denials
        denials += 1
        if denials == 3:  # a role that was granted again
            return False
        if denials == 5:
            member._denied_s -= 3.1
        if denials == 6:
            member._closing.set()
        raise EtcdDeniedError("etcd: KV/Range was rejected: etcdserver: permission denied", code=7)

    reported: list[StorageError | None] = []
    stub = cast(Any, member)
    stub._pause = lambda: reported.append(member.commits.failure())
    stub._leadership = SimpleNamespace(holds=lambda: True)
    stub._handover_requested = requested
    stub._put_report = lambda: None
    stub._offers_snapshots = True
    stub._client.call = lambda *_args, **_named: SimpleNamespace(kvs=[])
    member._stay_active()
    assert restarts == [
        "etcd denies its requests: etcd: KV/Range was rejected: etcdserver: permission denied",
    ]
    assert [failure is not None for failure in reported] == [False, True, True, False, True, True, True]
    assert "permission denied" in str(reported[1])
    member._client.close()
