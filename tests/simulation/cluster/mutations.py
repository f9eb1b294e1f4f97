"""Bugs that the simulation of two nodes must find, planted one at a time.

``python -m tests.simulation.cluster.mutations`` prints how many seeds each one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest

from penstock.cluster import log
from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import Head
from penstock.cluster.lease import LeaseClock
from penstock.cluster.log import EtcdLog
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.retention import EtcdRetention
from penstock.errors import RefusedError, UnavailableError
from penstock.node.cluster import standby_data
from penstock.node.cluster.membership import ClusterMembership
from tests.simulation.cluster.run import FAULTS, TWO_NODES
from tests.simulation.cluster.threads import boot_ms, wall_ms

__all__ = ["PLANTS", "Plant", "first_violation", "print_table", "seeds_needed"]

Plant = Callable[[pytest.MonkeyPatch], None]
MOST_SEEDS: Final = 60


def head_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A commit compares the leadership key only."""
    transaction = EtcdLog._transaction

    def without_head(self: EtcdLog, revision: int, head: Head, frame: bytes) -> pb.TxnRequest:
        request = transaction(self, revision, head, frame)
        del request.compare[1]
        return request

    patch.setattr(EtcdLog, "_transaction", without_head)


def lease_measured_late(patch: pytest.MonkeyPatch) -> None:
    """The lease is measured from the receipt of the answer to a keep-alive."""
    kept = LeaseClock.kept
    patch.setattr(LeaseClock, "kept", lambda self, _sent_ms, ttl_s: kept(self, boot_ms(), ttl_s))


def lease_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A node answers until etcd reports the end of its lease."""
    patch.setattr(LeaseClock, "holds", lambda self, _now_ms: not self.ended)


def doubt_is_failure(patch: pytest.MonkeyPatch) -> None:
    """A commit without an answer is reported as failed."""

    def answered(self: EtcdLog, request: pb.TxnRequest, _unanswered: object) -> pb.TxnResponse:
        try:
            return self._client.once("KV/Txn", request, pb.TxnResponse)
        except UnavailableError as error:
            raise RefusedError("no answer", code=0, text="", peer="") from error

    patch.setattr(EtcdLog, "_answered", answered)


def gap_ignored(patch: pytest.MonkeyPatch) -> None:
    """A standby that lacks deleted commits is elected, and continues after the gap."""
    patch.setattr(standby_data, "why_not_eligible", lambda *_args: None)
    read = log.read_frames

    def available(client: EtcdClient, keys: log.LogKeys, after: int, end: int) -> Any:
        oldest = log.read_oldest(client, keys)
        return read(client, keys, end if oldest is None else max(after, oldest.sequence - 1), end)

    patch.setattr(log, "read_frames", available)


def deleted_too_early(patch: pytest.MonkeyPatch) -> None:
    """Commits are deleted from etcd that LMDB does not contain."""
    committed = EtcdRetention.committed

    def commit(self: EtcdRetention, sequence: int, size: int) -> None:
        committed(self, sequence, size)
        self.release(sequence)

    patch.setattr(EtcdRetention, "committed", commit)


def watch_trusted(patch: pytest.MonkeyPatch) -> None:
    """Keys are read only when their watch reports a change."""

    def pause(self: ClusterMembership, _seconds: float = 0.0) -> None:
        self._wake.wait(3_600.0)
        self._wake.clear()

    patch.setattr(ClusterMembership, "_pause", pause)


def not_saved(patch: pytest.MonkeyPatch) -> None:
    """A node that restarts does not write its commits to LMDB, so that it lacks those that a restored etcd lacks."""
    patch.setattr(ClusterMembership, "_save", lambda _self: None)


def local_clock(patch: pytest.MonkeyPatch) -> None:
    """A new active node measures expiry with its own system clock."""

    def set_clock(self: ClusterMembership) -> None:
        self.clock.offset_ms = wall_ms() - boot_ms()

    patch.setattr(ClusterMembership, "_set_clock", set_clock)


def clock_of_earlier_term(patch: pytest.MonkeyPatch) -> None:
    """A standby keeps the clock of an earlier term, also if that of the last one is behind."""
    read_clock = ClusterMembership._read_clock

    def read(self: ClusterMembership, active: Any) -> int:
        before = self.clock.offset_ms
        time_ms = read_clock(self, active)
        if before is not None and self.clock.offset_ms is not None:
            self.clock.offset_ms = max(before, self.clock.offset_ms)
        return time_ms

    patch.setattr(ClusterMembership, "_read_clock", read)


def full_log_not_deleted(patch: pytest.MonkeyPatch) -> None:
    """A full log keeps its backlog: after a takeover that may be all of its commits, in one group."""
    delete = EtcdRetention.delete

    def delete_some(self: EtcdRetention, *args: Any, **options: Any) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(EtcdRetention, "is_full", False)
            return delete(self, *args, **options)

    patch.setattr(EtcdRetention, "delete", delete_some)


PLANTS: Final[dict[Plant, tuple[int, tuple[str, ...]]]] = {
    head_not_compared: (0, ("restore",)),
    lease_measured_late: (38, ("slow",)),
    lease_not_checked: (6, FAULTS),
    doubt_is_failure: (0, FAULTS),
    gap_ignored: (27, ("behind",)),
    deleted_too_early: (13, ("kill", "behind", "stop")),
    watch_trusted: (5, FAULTS),
    not_saved: (6, ("restore", "pause", "cut")),
    local_clock: (7, ("clock", "kill", "handover")),
    clock_of_earlier_term: (2, ("reboot", "kill", "handover")),
    full_log_not_deleted: (22, ("kill", "handover", "stop", "behind", "cut")),
}
"""For each bug a seed that finds it, and the kinds of fault that the simulations have. The tests try this seed before
the others; if it has become wrong, they take longer."""


def first_violation(plant: Plant, seeds: Iterable[int], run: Callable[[int], str | None]) -> tuple[int | None, str]:
    """Return the first of ``seeds`` that finds a bug (None: none does), and the rule that it broke."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in seeds:
            if (reason := run(seed)) is not None:
                return seed, reason
    return None, "no seed broke a rule"


def seeds_needed(plant: Plant) -> tuple[int | None, str]:
    """:func:`first_violation` of a bug in :data:`PLANTS`."""
    first, faults = PLANTS[plant]
    return first_violation(plant, [first, *range(MOST_SEEDS)], lambda seed: TWO_NODES.violation(seed, faults))


def print_table(plants: Iterable[Plant], needed: Callable[[Plant], tuple[int | None, str]]) -> None:
    """Print the seed that finds each bug, and the rule that it broke."""
    print("| planted bug | seed | found by |\n| --- | --- | --- |")
    for plant in plants:
        seed, reason = needed(plant)
        print(f"| {(plant.__doc__ or '').rstrip('.')} | {seed} | {' '.join(reason.split())[:140]} |", flush=True)


if __name__ == "__main__":
    print_table(PLANTS, seeds_needed)
