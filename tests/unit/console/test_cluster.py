"""The cluster in the console: what needs attention, and how often etcd is read."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.console.cluster import ClusterViews, cluster_reasons
from penstock.console.snapshots import ClusterMember, ClusterSnapshot, EtcdSnapshot, Severity
from penstock.errors import UnavailableError

ACTIVE = ClusterMember("one", "active", True, "0.1", "10.0.0.1:1883", "10.0.0.1:8080", 0, 0.0, None)
STANDBY = replace(ACTIVE, node="two", role="standby")
ETCD = EtcdSnapshot("10.0.0.1:2379", "3.6.1", True, 100, 1000)
HEALTHY = ClusterSnapshot("plant", "one", 7, (ACTIVE, STANDBY), {"mqtt": 3}, (ETCD,), 0.0)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"commit_wait_s": 0.9}, []),
        ({"commit_wait_s": None}, []),
        ({"commit_wait_s": 2.5}, [("problem", "commit_wait", "commits have been waiting for etcd for 2 s")]),
        ({"active": None, "members": (STANDBY,)}, [("problem", "no_active", "no node is active")]),
        ({"members": (ACTIVE,)}, [("warning", "no_standby", "no standby can take over")]),
        (
            {"members": (ACTIVE, replace(STANDBY, differs=("bridges", "rules")))},
            [("warning", "settings_differ", "two has other settings than the active node: `bridges`, `rules`")],
        ),
        (
            {"members": (ACTIVE, replace(STANDBY, role="blocked", ready=False, lag_commits=None, problem="no log"))},
            [
                ("warning", "blocked", "two cannot become active"),
                ("warning", "no_standby", "no standby can take over"),
            ],
        ),
        (
            {"members": (ACTIVE, STANDBY, replace(STANDBY, node="three", lag_commits=90, lag_s=12.0))},
            [("warning", "lag", "three is 12 s behind (90 commits)")],
        ),
        ({"etcd": (replace(ETCD, used_bytes=799),)}, []),
        ({"etcd": (replace(ETCD, used_bytes=900, quota_bytes=None),)}, []),
        (
            {"etcd": (replace(ETCD, used_bytes=800),)},
            [("warning", "etcd_quota", "etcd 10.0.0.1:2379 uses 800 of 1000 bytes")],
        ),
        (
            {
                "etcd": (
                    replace(ETCD, alarms=("memberID:1 alarm:NOSPACE ", "no leader")),
                    replace(ETCD, alarms=("memberID:1 alarm:NOSPACE ",)),
                )
            },
            [
                ("problem", "etcd_alarm", "etcd reports 'memberID:1 alarm:NOSPACE'"),
                ("warning", "etcd_alarm", "etcd reports 'no leader'"),
            ],
        ),
        (
            {"etcd": (ETCD, EtcdSnapshot("10.0.0.2:2379", problem="connection refused"))},
            [("warning", "etcd_unavailable", "etcd 10.0.0.2:2379 does not answer")],
        ),
    ],
)
def test_reasons_name_what_needs_attention(changes: dict[str, Any], wanted: list[tuple[str, str, str]]) -> None:
    found = cluster_reasons(replace(HEALTHY, **changes))
    assert [(each.severity, each.code, each.what) for each in found] == [
        (Severity(severity), code, what) for severity, code, what in wanted
    ]
    assert all(each.hint for each in found)


def test_the_cause_and_the_remedy_of_a_member_are_its_own() -> None:
    blocked = replace(STANDBY, role="blocked", ready=False, problem="mqtt: etcd has another log")
    silent = EtcdSnapshot("10.0.0.2:2379", problem="the TLS handshake failed", hint="check ca_file")
    found = {
        each.code: each
        for each in cluster_reasons(replace(HEALTHY, members=(ACTIVE, STANDBY, blocked), etcd=(silent,)))
    }
    assert found["blocked"].why == "mqtt: etcd has another log"
    assert (found["etcd_unavailable"].why, found["etcd_unavailable"].hint) == (
        "the TLS handshake failed", "check ca_file",
    )  # fmt: skip


@pytest.mark.parametrize(("others", "wanted"), [(2, "the nodes continue"), (1, "without a majority")])
def test_the_remedy_of_a_silent_member_depends_on_the_others(others: int, wanted: str) -> None:
    members = [replace(ETCD, endpoint=f"10.0.0.{number}:2379") for number in range(others)]
    silent = EtcdSnapshot("10.0.0.9:2379", problem="connection refused")
    (reason,) = cluster_reasons(replace(HEALTHY, etcd=(*members, silent)))
    assert wanted in (reason.hint or "")


async def test_requests_at_the_same_time_read_etcd_once_also_if_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = UnavailableError("etcd does not answer")
    answers: list[ClusterSnapshot | UnavailableError] = [failure, HEALTHY]

    def read() -> ClusterSnapshot:
        answer = answers.pop(0)
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    views = ClusterViews(read)
    found = await asyncio.gather(*(views.snapshot() for _ in range(5)), return_exceptions=True)
    assert found == [failure] * 5
    monkeypatch.setattr("penstock.console.cluster.REFRESH_S", 0.0)
    assert await views.snapshot() == HEALTHY
    monkeypatch.undo()
    assert await asyncio.gather(*(views.snapshot() for _ in range(5))) == [HEALTHY] * 5
    assert answers == []
