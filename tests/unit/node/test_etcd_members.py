"""Members of etcd that need attention: where an operator sees them, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.cluster.client import EtcdClient, EtcdStatus, EtcdUnavailableError
from penstock.console.snapshots import Reason, Severity
from penstock.errors import PenstockError
from penstock.node.cluster import etcd_members
from penstock.node.cluster.etcd_members import EtcdMembers
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.node import NodeConfig
from penstock.node.node import Node

ENDPOINTS = ("10.0.0.1:2379", "10.0.0.2:2379", "10.0.0.3:2379")
UP = tuple(EtcdStatus(endpoint, "3.6.1", endpoint == ENDPOINTS[0], 4096, 1 << 20) for endpoint in ENDPOINTS)


def down(endpoint: str, member_hint: str | None = None) -> EtcdUnavailableError:
    return EtcdUnavailableError(
        f"etcd {endpoint}: no answer to Maintenance/Status", why="Connection refused", member_hint=member_hint
    )


class Members(EtcdMembers):
    """Members with the given statuses."""

    def __init__(self) -> None:
        self.statuses: list[EtcdStatus | PenstockError] = [*UP]
        super().__init__(cast(EtcdClient, SimpleNamespace(endpoints=ENDPOINTS, statuses=lambda: self.statuses)))

    def up(self) -> list[int]:
        return [values["up"] for _, values in self.metric_rows()]


def test_a_member_that_is_silent_for_long_enough_is_a_warning_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    members = Members()
    members.look()
    assert (members.reasons, members.up()) == ((), [1, 1, 1])
    members.statuses[1] = down(ENDPOINTS[1])
    members.look()
    assert (members.reasons, members.up()) == ((), [1, 1, 1]), "it may be late"
    assert members.used_bytes == {ENDPOINTS[0]: 4096, ENDPOINTS[2]: 4096}
    monkeypatch.setattr(etcd_members, "SILENT_S", 0.0)
    for _ in range(2):
        members.look()
        (reason,) = members.reasons
        assert (reason.severity, reason.code) == (Severity.WARNING, "etcd_unavailable")
        assert (reason.what, reason.why) == ("etcd 10.0.0.2:2379 does not answer", "Connection refused")
        assert "the nodes continue with the other members" in (reason.hint or "")
        assert members.up() == [1, 0, 1]
    members.statuses[0] = down(ENDPOINTS[0])
    members.look()
    assert ["without a majority" in (each.hint or "") for each in members.reasons] == [True, True]
    members.statuses[:2] = UP[:2]
    members.look()
    assert (members.reasons, members.up()) == ((), [1, 1, 1])
    assert [record.getMessage() for record in caplog.records] == [
        "etcd 10.0.0.2:2379 does not answer: Connection refused",
        "etcd 10.0.0.1:2379 does not answer: Connection refused",
        "etcd 10.0.0.1:2379 answers again",
        "etcd 10.0.0.2:2379 answers again",
    ]


def test_a_member_is_a_warning_with_its_own_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_members, "SILENT_S", 0.0)
    members = Members()
    members.statuses[1] = down(ENDPOINTS[1], "check `cluster.tls.ca`")
    members.statuses[2] = UP[2]._replace(used_bytes=900 << 10, errors=("alarm:CORRUPT", "alarm:NOSPACE"))
    members.look()
    # NOSPACE is a reason why the active node is not ready.
    assert {each.code: each.hint for each in members.reasons} == {
        "etcd_unavailable": "check `cluster.tls.ca`",
        "etcd_quota": "check that nothing else writes to this etcd, or start it with a larger --quota-backend-bytes",
        "etcd_alarm": "see the logs of the members of etcd",
    }


def test_a_member_that_shows_its_status_to_root_only_answers() -> None:
    members = Members()
    members.statuses = [EtcdStatus(endpoint) for endpoint in ENDPOINTS]
    members.look()
    assert (members.reasons, members.up(), members.used_bytes) == ((), [1, 1, 1], {})


async def test_warnings_of_a_node_in_a_cluster(tmp_path: Path) -> None:
    section = ClusterSection(name="plant", node="one", etcd=list(ENDPOINTS))
    settings = NodeConfig(data_dir=tmp_path, cluster=section)
    member = ClusterMembership(settings, lambda _: None)
    member._etcd_members.reasons = (
        Reason(
            Severity.WARNING, "cluster", "etcd_unavailable", "etcd 10.0.0.2:2379 does not answer", "Connection refused",
            "start it again",
        ),
    )  # fmt: skip
    node = Node(settings, member)
    assert node.health.warnings() == [
        "etcd 10.0.0.2:2379 does not answer; why: Connection refused; hint: start it again"
    ]
    (reason,) = node.health.snapshot().reasons
    assert replace(reason, since_at=None) == member._etcd_members.reasons[0]
    await member.close()
