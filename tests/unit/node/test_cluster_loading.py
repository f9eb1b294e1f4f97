"""When a member of a cluster loads a snapshot, what it reports meanwhile, and what it tries again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import Head, encode_frame
from penstock.cluster.leadership import is_too_far_behind, may_replace
from penstock.cluster.log import LogKeys, MissingCommitsError, clock_key, leader_key
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import OutOfSpaceError, PenstockError, RefusedError, StorageError
from penstock.node.cluster import snapshot_recovery, standby_data
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.cluster.snapshot import SnapshotSource
from penstock.node.cluster.standby_data import StandbyData
from penstock.node.cluster.state import ActiveNode, snapshot_key
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.node import NodeConfig
from penstock.runtime.io.commit_log import LogPosition
from tests.unit.node.test_cluster_snapshot import Etcd

SECTION = ClusterSection(name="plant", node="two", etcd=["127.0.0.1:1"])
PREFIX = SECTION.prefix
LOG = b"identity"
ACTIVE = ActiveNode("one", "127.0.0.1:8080", {}, 7)


def at(sequence: int, identity: bytes = LOG, epoch: int = 0) -> LogPosition:
    return LogPosition(identity, epoch, sequence)


def etcd(oldest: int | None = 51, last: int = 100, **more: object) -> Etcd:
    """The log of MQTT from ``oldest`` to ``last``; that of the state store is complete."""
    values = dict(cast(Mapping[bytes, bytes], more))
    for name, first, end in (("mqtt", oldest, last), ("statestore", 1, 1)):
        keys = LogKeys(PREFIX, name)
        values[keys.head] = Head(LOG, end, 7).encode()
        if first is not None:
            values[keys.frame(first)] = encode_frame(Head(LOG, first, 7), 0, b"")
    return Etcd(values, [])


@pytest.mark.parametrize(
    ("mqtt", "oldest", "expected"),
    [
        (at(49), 51, True),
        (at(0), 51, True),
        (None, 51, True),
        (at(50), 51, False),
        (at(100), None, False),
        (at(99), None, True),
        (at(101), 51, False),
        (at(49, b"another!"), 51, False),
        (at(49, epoch=3), 51, False),
    ],
)
def test_only_a_node_that_lacks_deleted_commits_of_its_own_log_is_too_far_behind(
    mqtt: LogPosition | None, oldest: int | None, *, expected: bool
) -> None:
    client = cast(EtcdClient, etcd(oldest))
    assert is_too_far_behind(client, PREFIX, {"mqtt": mqtt, "statestore": at(1)}) is expected
    ahead = {"mqtt": mqtt, "statestore": at(2)}
    assert not is_too_far_behind(client, PREFIX, ahead), "it has a commit that etcd does not have"
    assert not is_too_far_behind(client, PREFIX, {"mqtt": mqtt, "another": None}), "etcd has no such log"


def test_a_snapshot_replaces_no_later_and_no_other_data() -> None:
    assert may_replace(None, at(5))
    assert may_replace(at(5), at(5))
    assert not may_replace(at(6), at(5))
    assert not may_replace(at(1, b"another!"), at(5))
    assert not may_replace(at(1, epoch=1), at(5))


class Loader:
    """A load that ends when it is told to."""

    made: list[Loader]

    def __init__(self, source: SnapshotSource, path: Path, names: list[str], member: str, check: object) -> None:
        self.source, self.names, self.check = source, names, check
        self.ended = False
        self.failure: PenstockError | None = None
        self.progress = "loading a snapshot from the active node one: 1.0 MiB received"
        assert (member, path.is_absolute()) == ("two", True)
        Loader.made.append(self)

    def start(self) -> None: ...


async def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Etcd) -> ClusterMembership:
    monkeypatch.setattr(snapshot_recovery, "SnapshotLoader", Loader)
    monkeypatch.setattr(ClusterMembership, "_connect", lambda _: found)
    Loader.made = []
    node = ClusterMembership(NodeConfig(data_dir=tmp_path, cluster=SECTION), lambda _: None)
    follow(node)
    return node


def follow(node: ClusterMembership, failure: StorageError | None = None) -> None:
    """Have the standby lack commits, or fail otherwise."""
    standby = SimpleNamespace(
        failure=failure or MissingCommitsError("commit 50 is missing"),
        positions={"mqtt": at(49), "statestore": at(1)},
        close=lambda: None,
        clock_offset=None,
    )
    node._data.standby = cast(Any, standby)
    node._data.environments = cast(Any, dict.fromkeys(("statestore", "mqtt"), SimpleNamespace(close=lambda: None)))


def offer(term: int) -> dict[str, Any]:
    return {cast(Any, snapshot_key(PREFIX)): json.dumps({"term": term, "secret": "s"}).encode()}


def found(more: Mapping[Any, bytes]) -> Etcd:
    known = etcd()
    known._values.update(more)
    return known


def offered(node: ClusterMembership, more: Mapping[Any, bytes]) -> None:
    cast(Any, node._client)._values = found(more)._values


async def test_a_load_is_reported_and_repeated_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await member(tmp_path, monkeypatch, found(offer(7)))
    assert node._loads_snapshot(ACTIVE)
    (loader,) = Loader.made
    assert (loader.source, loader.names) == (
        SnapshotSource("one", "127.0.0.1:8080", "s", None), ["statestore", "mqtt"],
    )  # fmt: skip
    assert node._data.standby is None
    assert node._loads_snapshot(None), "the active node has ended, which the loader notices"
    assert node.problem == loader.progress
    assert f"cluster: {loader.progress}" in node.problems()
    loader.ended, loader.failure = True, StorageError("no space", hint="free space")
    assert node._loads_snapshot(ACTIVE)
    assert "no snapshot was loaded: no space; hint: free space; the next attempt is in 1 s" in str(node.problem)
    follow(node)
    assert not node._loads_snapshot(ACTIVE), "not before the pause has ended"
    node._snapshots._next_s = 0
    assert node._loads_snapshot(ACTIVE)
    Loader.made[1].ended = True
    assert node._loads_snapshot(ACTIVE)
    assert (node._snapshots.failure, len(Loader.made)) == (None, 2)
    assert {name: node.metric_values()[name] for name in ("snapshots", "snapshots_failed")} == {
        "snapshots": 1, "snapshots_failed": 1,
    }  # fmt: skip
    assert node._snapshots._next_s > 0, "also after a success: the log may have passed the snapshot"


async def test_what_is_no_reason_for_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await member(tmp_path, monkeypatch, found(offer(7)))
    assert not node._loads_snapshot(None), "no node is active"
    assert not node._loads_snapshot(ACTIVE._replace(node="two")), "the active node that was this one"
    follow(node, StorageError("LMDB failed"))
    assert not node._loads_snapshot(ACTIVE)
    follow(node)
    assert node._data.standby is not None
    node._data.standby.positions["statestore"] = at(2)
    assert not node._loads_snapshot(ACTIVE), "it has a commit that etcd does not have"
    follow(node)
    offered(node, offer(6))
    assert node._loads_snapshot(ACTIVE)
    assert "offers no snapshot" in str(node.problem)
    node._snapshots._next_s = 0
    offered(node, {})
    assert node._loads_snapshot(ACTIVE)
    assert not Loader.made
    assert node._data.standby is not None


async def test_data_that_etcd_does_not_have_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await member(tmp_path, monkeypatch, etcd())
    stored: dict[str, LogPosition | None] = {"mqtt": at(49), "statestore": None}
    node._snapshots._check(stored, {"mqtt": at(100), "statestore": at(1)})
    for mqtt in (at(48), at(101), at(60, b"another!")):
        with pytest.raises(StorageError, match="etcd was restored"):
            node._snapshots._check(stored, {"mqtt": mqtt, "statestore": at(1)})
    with pytest.raises(StorageError, match="etcd was restored"):
        node._snapshots._check({"mqtt": at(49, epoch=1)}, {"mqtt": at(100)})


async def test_no_environment_is_opened_before_a_replacement_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await member(tmp_path, monkeypatch, etcd())

    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(standby_data, "complete_replacement", refuse)
    monkeypatch.setattr(StandbyData, "follow", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(StorageError, match="a loaded snapshot cannot be put in its place"):
        node._look()


async def test_the_secret_is_put_by_the_active_node_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await member(tmp_path, monkeypatch, etcd())
    requests: list[pb.TxnRequest] = []

    def call(_method: str, request: pb.TxnRequest, *_: object, **__: object) -> None:
        requests.append(request)
        if len(requests) == 1:
            raise RefusedError("etcd is full")

    node._client = cast(Any, SimpleNamespace(call=call))
    node._leadership = cast(Any, SimpleNamespace(term=7))
    leads = pb.Compare(target=pb.Compare.MOD, key=leader_key(PREFIX), mod_revision=7)
    node._logs = cast(Any, SimpleNamespace(leads=lambda: leads))
    with pytest.raises(RefusedError):
        node._offer_snapshots()
    assert node._offers_snapshots is False, "it tries again"
    node._offer_snapshots()
    assert vars(node)["_offers_snapshots"] is True
    assert list(requests[1].compare) == [leads]
    put = requests[1].success[0].request_put
    assert json.loads(put.value) == {"term": 7, "secret": node._snapshot_secret}
    assert len(node._snapshot_secret) > 40


async def test_the_lag_of_a_standby_that_always_has_commits_to_read_is_the_age_of_its_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"term": 7, "time_ms": 62_000, "boot": "another", "offset_ms": 0, "versions_ms": 62_000}
    stored = {leader_key(PREFIX): b'{"node": "one"}', clock_key(PREFIX): json.dumps(clock).encode()}
    node = await member(tmp_path, monkeypatch, found(stored))
    monkeypatch.setattr(node, "_put_report", lambda: None)
    monkeypatch.setattr(node, "_pause", lambda: None)
    standby = SimpleNamespace(failure=None, positions={"statestore": at(1), "mqtt": at(90)}, applied_ms=61_500)
    node._data.standby = cast(Any, standby)
    space = SimpleNamespace(lack=None)
    node._data.environments = cast(Any, {"statestore": space, "mqtt": space})
    assert not node._look()
    values = node.metric_values()
    assert (values["lag_commits"], values["lag_seconds"]) == (10, 0.5)


async def test_a_node_whose_disk_is_full_is_not_elected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not start as the active node, and no other one would take over meanwhile."""
    node = await member(tmp_path, monkeypatch, found({}))
    monkeypatch.setattr(node, "_put_report", lambda: None)
    monkeypatch.setattr(node, "_pause", lambda: None)
    monkeypatch.setattr(node._data, "why_not_eligible", lambda **_: "it was eligible")
    positions = {"statestore": at(1), "mqtt": at(100)}
    node._data.standby = cast(Any, SimpleNamespace(failure=None, positions=positions, applied_ms=0))
    full = SimpleNamespace(lack=OutOfSpaceError("mqtt: applying the log waits for disk space", hint="free space"))
    node._data.environments = cast(Any, {"statestore": SimpleNamespace(lack=None), "mqtt": full})
    assert not node._look()
    assert node.problem == "mqtt: applying the log waits for disk space; hint: free space"
    full.lack = None
    assert not node._look()
    assert node.problem == "it was eligible"


async def test_a_member_that_lost_replicated_data_says_that_the_cluster_has_them(tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text(json.dumps({"format": 1, "environments": ["mqtt"]}))
    node = ClusterMembership(NodeConfig(data_dir=tmp_path, cluster=SECTION), lambda _: None)
    try:
        with pytest.raises(StorageError, match=r"has lost mqtt/data\.mdb") as caught:
            await node.become_active()
    finally:
        await node.close()
    hint = (
        f"remove 'mqtt' from the list in {tmp_path / 'format.json'}: the node then loads its content from the cluster"
    )
    assert caught.value.hint == hint
