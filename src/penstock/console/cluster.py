"""The cluster of the node: its snapshot, which is read from etcd, and what needs attention in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.console.snapshots import ClusterMember, ClusterSnapshot, EtcdSnapshot, Reason, Severity
from penstock.errors import PenstockError

__all__ = ["ClusterViews", "cluster_reasons", "etcd_reasons", "member_reasons"]

REFRESH_S: Final = 1.0
"""Seconds for which a snapshot is shown to all requests: etcd is read once, whatever their number."""
LAG_S: Final = 10.0
"""Lag of a standby that needs attention; as in the alert rules."""
COMMIT_WAIT_S: Final = 1.0
"""Wait of a commit that needs attention; as in the health of the node."""
QUOTA_SHARE: Final = 0.8
"""Part of etcd's quota that needs attention if it is used."""


class ClusterViews:
    """The snapshot of a cluster. ``read`` reads it from etcd, blocking; it may raise PenstockError."""

    def __init__(self, read: Callable[[], ClusterSnapshot]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._found: ClusterSnapshot | PenstockError | None = None
        self._read_at = 0.0

    async def snapshot(self) -> ClusterSnapshot:
        """Return the snapshot, at most :data:`REFRESH_S` old. Raises PenstockError: that of ``read``."""
        async with self._reading:
            if self._found is None or time.monotonic() - self._read_at >= REFRESH_S:
                try:
                    self._found = await asyncio.to_thread(self._read)
                except PenstockError as error:  # else each of many waits for etcd in turn
                    self._found = error
                self._read_at = time.monotonic()
            if isinstance(self._found, ClusterSnapshot):
                return self._found
            raise self._found.with_traceback(None)


def cluster_reasons(state: ClusterSnapshot) -> tuple[Reason, ...]:
    """Return what needs attention in a cluster, with the next action."""
    return (*_node_reasons(state), *etcd_reasons(state.etcd))


def _reason(severity: Severity, code: str, what: str, why: str | None, hint: str) -> Reason:
    return Reason(severity, "cluster", code, what, why, hint)


def _node_reasons(state: ClusterSnapshot) -> Iterator[Reason]:
    if state.active is None:
        yield _reason(
            Severity.PROBLEM, "no_active", "no node is active", "no node was elected, so clients are refused",
            "start a node; if one runs, its log and /readyz have the reason",
        )  # fmt: skip
    if state.commit_wait_s is not None and state.commit_wait_s >= COMMIT_WAIT_S:
        yield _reason(
            Severity.PROBLEM, "commit_wait", f"commits have been waiting for etcd for {state.commit_wait_s:.0f} s",
            "no majority of the etcd members answers, or etcd is full",
            "check the etcd members; the node continues automatically",
        )  # fmt: skip
    yield from member_reasons(state.members)


def member_reasons(members: Sequence[ClusterMember]) -> Iterator[Reason]:
    """Return what needs attention in the nodes of a cluster, with the next action."""
    for member in members:
        if member.role == "blocked":
            yield _reason(
                Severity.WARNING, "blocked", f"{member.node} cannot become active", member.problem,
                "remove the cause; a node that lacks commits loads a snapshot when another one is active",
            )  # fmt: skip
        elif member.role == "loading":
            yield _reason(
                Severity.WARNING, "loading", f"{member.node} cannot become active yet", member.problem,
                "wait until it follows",
            )  # fmt: skip
        elif member.lag_s is not None and member.lag_s > LAG_S:
            yield _reason(
                Severity.WARNING, "lag", f"{member.node} is {member.lag_s:.0f} s behind ({member.lag_commits} commits)",
                "it applies commits more slowly than the active node makes them, or does not reach etcd",
                "check the processor and the disk of this node, and its connection to etcd",
            )  # fmt: skip
        if member.differs:
            listed = ", ".join(f"`{name}`" for name in member.differs)
            yield _reason(
                Severity.WARNING, "settings_differ", f"{member.node} has other settings than the active node: {listed}",
                "configurations are not replicated: after a takeover its own settings apply",
                "give all nodes the same settings, and restart a standby whose configuration you change",
            )  # fmt: skip
    if any(each.role == "active" for each in members) and not any(
        each.ready for each in members if each.role == "standby"
    ):
        yield _reason(
            Severity.WARNING, "no_standby", "no standby can take over",
            "none runs, or those that run are blocked or lag: if the active node fails, nothing is served",
            "start another node of the cluster, or wait until its lag is small",
        )  # fmt: skip


def etcd_reasons(members: Sequence[EtcdSnapshot]) -> Iterator[Reason]:
    """Return what needs attention in the members of etcd, with the next action."""
    silent = sum(member.problem is not None for member in members)
    remedy = (
        "start it again, correct its address in `cluster.etcd`, or replace it (etcdctl member remove, member add): the "
        "nodes continue with the other members"
        if 2 * silent < len(members)
        else "start this member: without a majority of them nothing is acknowledged"
    )
    for member in members:
        if member.problem is not None:
            yield _reason(
                Severity.WARNING, "etcd_unavailable", f"etcd {member.endpoint} does not answer", member.problem,
                member.hint or remedy,
            )  # fmt: skip
        if _is_almost_full(member):
            yield _reason(
                Severity.WARNING, "etcd_quota",
                f"etcd {member.endpoint} uses {member.used_bytes} of {member.quota_bytes} bytes",
                "at its quota etcd refuses commits and takeovers",
                "check that nothing else writes to this etcd, or start it with a larger --quota-backend-bytes",
            )  # fmt: skip
    for alarm in dict.fromkeys(alarm for member in members for alarm in member.alarms):  # each reports those of all
        full = "NOSPACE" in alarm
        yield _reason(
            Severity.PROBLEM if full else Severity.WARNING, "etcd_alarm", f"etcd reports {alarm.strip()!r}",
            "a database has reached its quota: what needs a commit is refused" if full else None,
            "run etcdctl defrag --cluster, etcdctl alarm disarm (without an active node first etcdctl compact)" if full
            else "see the logs of the members of etcd",
        )  # fmt: skip


def _is_almost_full(member: EtcdSnapshot) -> bool:
    return bool(member.used_bytes and member.quota_bytes and member.used_bytes >= QUOTA_SHARE * member.quota_bytes)
