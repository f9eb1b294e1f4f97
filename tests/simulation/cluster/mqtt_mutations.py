"""Bugs that the simulation of two whole nodes must find, planted one at a time.

``python -m tests.simulation.cluster.mqtt_mutations`` prints how many seeds each one needs. Modules of the compiled core
cannot be patched: these bugs are in storage, in the standby and in the membership.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest

from penstock.cluster.standby import Standby
from penstock.errors import OutOfSpaceError, StorageError
from penstock.mqtt import storage as mqtt_storage
from penstock.node.cluster.membership import ClusterMembership
from penstock.runtime.io.commit_queue import CommitQueue
from penstock.statestore.service.preload import PreloadedKeys, PreloadedStorage
from penstock.statestore.service.storage import Storage
from tests.simulation import mutations as of_one_node
from tests.simulation.cluster.loop import VirtualQueue
from tests.simulation.cluster.mqtt_node import ThreadedCommitQueue
from tests.simulation.cluster.mqtt_run import FAULTS, NEW_LOG, TWO_WHOLE_NODES
from tests.simulation.cluster.mutations import (
    Plant,
    first_violation,
    head_not_compared,
    lease_not_checked,
    local_clock,
    not_saved,
    print_table,
)
from tests.simulation.cluster.node import SimulatedLog
from tests.simulation.cluster.threads import THREADING, TIME

__all__ = ["PLANTS", "seeds_needed"]

TAKEOVERS: Final = ("kill", "stop", "handover", "pause")
MOST_SEEDS: Final = 30


def _later(store: Any, commit: Callable[[], object]) -> None:
    """Commit in another thread of ``store``, some time after the acknowledgement."""
    commits: VirtualQueue | None = getattr(store, "late_commits", None)
    if commits is None:
        commits = store.late_commits = VirtualQueue()
        THREADING.Thread(_commit_late, (commits,)).start()
    commits.put(commit)


def _commit_late(commits: VirtualQueue) -> None:
    while True:
        commit = commits.get()
        TIME.sleep(0.02)
        with suppress(StorageError):  # of a node that was fenced or ends
            commit()


def acknowledged_early(patch: pytest.MonkeyPatch) -> None:
    """The broker acknowledges before etcd has its commit."""
    commit = mqtt_storage.SessionStore.commit
    patch.setattr(mqtt_storage.SessionStore, "commit", lambda self, batch: _later(self, lambda: commit(self, batch)))


def answered_early(patch: pytest.MonkeyPatch) -> None:
    """The state store answers before etcd has its commit."""

    def commit(self: PreloadedStorage, *args: Any, **options: Any) -> None:
        _later(self, lambda: Storage.commit(self, *args, **options))

    patch.setattr(PreloadedStorage, "commit", commit, raising=False)


def sent_without_lease(patch: pytest.MonkeyPatch) -> None:
    """A node sends answers without looking at its lease."""
    patch.setattr(ClusterMembership, "may_send", lambda _self: True)


def full_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    """The broker acknowledges what a full etcd has refused."""
    commit = mqtt_storage.SessionStore.commit

    def commit_some(self: Any, batch: Any) -> None:
        with suppress(OutOfSpaceError):
            commit(self, batch)

    patch.setattr(mqtt_storage.SessionStore, "commit", commit_some)


def preload_not_compared(patch: pytest.MonkeyPatch) -> None:
    """An elected node uses its preloaded keys, although they lack commits that its environment has."""
    state_at = PreloadedKeys.state_at
    patch.setattr(PreloadedKeys, "state_at", lambda self, _position: state_at(self, self._position))
    patch.setattr(Standby, "catch_up", lambda _self: None)


def session_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """An elected node does not find its newest session."""
    load = mqtt_storage.SessionStore.open

    def open_store(self: Any, offset: int) -> Any:
        recovered = load(self, offset)
        return recovered._replace(
            sessions=[
                row._replace(client_id=f"lost {row.client_id}") if row is recovered.sessions[-1] else row
                for row in recovered.sessions
            ]
        )

    patch.setattr(mqtt_storage.SessionStore, "open", open_store)


def identifier_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """Identifiers of received QoS 2 messages are lost at a takeover."""
    of_one_node.lost_identifier(patch)


def release_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """That a QoS 2 message was released is lost at a takeover: it is sent again."""
    of_one_node.lost_release(patch)


def will_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """Wills are lost at a takeover."""
    of_one_node.lost_will(patch)


def retained_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """Retained messages are lost at a takeover."""
    of_one_node.lost_retained(patch)


def fence_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """Fencing tokens are lost at a takeover."""

    def commit(self: PreloadedStorage, changes: Any, **options: Any) -> None:
        fenced = [(change.record, change.record.fence) for change in changes if change.record is not None]
        for record, _ in fenced:
            record.fence = None
        try:
            Storage.commit(self, changes, **options)
        finally:
            for record, fence in fenced:
                record.fence = fence

    patch.setattr(PreloadedStorage, "commit", commit, raising=False)


def gathering_without_end(patch: pytest.MonkeyPatch) -> None:
    """A commit waits for the clients that have just got answers without a limit of time."""

    def gather(self: ThreadedCommitQueue, answered: int) -> bool:
        gathers = CommitQueue._gather(self, answered)
        if self._gather_timer is not None:
            self._gather_timer.cancel()
        return gathers

    patch.setattr(ThreadedCommitQueue, "_gather", gather, raising=False)


def request_while_acknowledging_lost(patch: pytest.MonkeyPatch) -> None:
    """A commit that is requested while the acknowledgements of the one before are sent never begins."""

    def gather(self: ThreadedCommitQueue, answered: int) -> bool:
        return CommitQueue._gather(self, answered) or self.name == "mqtt"

    patch.setattr(ThreadedCommitQueue, "_gather", gather, raising=False)


def stopped_behind(patch: pytest.MonkeyPatch) -> None:
    """A node that is stopped leaves its last commits in etcd, and does not write them to LMDB."""

    def close(self: SimulatedLog) -> None:
        self._closing = True
        self._haste.set()
        self._leave()

    patch.setattr(SimulatedLog, "close", close, raising=False)


PLANTS: Final[dict[Plant, tuple[int, tuple[str, ...]]]] = {
    head_not_compared: (0, ("restore",)),
    full_is_acknowledged: (6, ("full", *TAKEOVERS)),
    lease_not_checked: (3, FAULTS),
    local_clock: (29, ("clock", "kill", "handover")),
    acknowledged_early: (11, TAKEOVERS),
    answered_early: (2, TAKEOVERS),
    sent_without_lease: (7, ("pause", "slow", "cut")),
    preload_not_compared: (23, ("slow", "handover")),
    session_not_loaded: (0, TAKEOVERS),
    identifier_not_loaded: (12, TAKEOVERS),
    release_not_loaded: (5, TAKEOVERS),
    will_not_loaded: (1, TAKEOVERS),
    retained_not_loaded: (0, TAKEOVERS),
    fence_not_loaded: (0, TAKEOVERS),
    gathering_without_end: (3, TAKEOVERS),
    request_while_acknowledging_lost: (0, TAKEOVERS),
    stopped_behind: (0, (NEW_LOG,)),
    not_saved: (13, (NEW_LOG, "cut", "pause")),
}
"""For each bug a seed that finds it, and the kinds of fault that the simulations have."""


def seeds_needed(plant: Plant) -> tuple[int | None, str]:
    """Return the first seed that finds a bug (None: none does), and the rule that it broke."""
    first, faults = PLANTS[plant]
    return first_violation(plant, [first, *range(MOST_SEEDS)], lambda seed: TWO_WHOLE_NODES.violation(seed, faults))


if __name__ == "__main__":
    print_table(PLANTS, seeds_needed)
