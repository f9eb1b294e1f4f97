"""The rules for two nodes, in addition to those for the answers to clients (:class:`tests.simulation.history.History`):

* A node that becomes active has recovered everything that any client has learned.
* A node takes itself for active only while its leadership key exists: it checks that before each answer.
* Each term has one node, and no node is active in a term after a later one has begun.
* The log in etcd has no gap, and no commit twice: each head follows the one before it, also that of a restored backup.
* A commit fails only if another node is active, or etcd was restored.

After a backup of etcd was restored, commits are lost that only the other node has: it refuses to become active, but if
it cannot reach etcd, the first one does, since nothing tells it. So a node must have recovered what it knew itself, and
the history ends with the first node for which that is less than what clients have learned.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.cluster.commit import Head, decode_head
from penstock.statestore.hlc import Hlc
from tests.simulation.history import History, Violation

__all__ = ["ClusterHistory", "HistoryEnded"]


class HistoryEnded(Exception):
    """A promise does not hold any more, as documented: the rest of the simulation shows nothing."""


class ClusterHistory(History):
    """What happened to the clients and the nodes of one simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[int, str] = {}
        """The node of each term since the last restore."""
        self.elections = 0
        self._heads: dict[bytes, Head] = {}
        self._known: dict[str, dict[bytes, Hlc]] = {}
        """The versions that each node has recovered or answered with."""
        self._restored_ms: int | None = None
        self._behind_ms: int | None = None

    def started(self, node: str, term: int, rows: Mapping[bytes, Hlc]) -> None:
        """``node`` was elected, and has recovered ``rows`` with their versions."""
        self.note(f"{node} is active in term {term}")
        self.elections += 1
        known = self._known.setdefault(node, {})
        for key, version in known.items():
            if key not in rows or rows[key] < version:
                raise Violation(f"{node} has recovered {rows.get(key)} of {key!r}, and it had {version}")
        for key, shown in self._newest.items():
            found = rows.get(key)
            if shown.version is not None and (found is None or found < shown.version):
                if self._restored_ms is not None:
                    raise HistoryEnded("commits were lost with the restore")
                raise Violation(f"{node} has recovered {found} of {key!r}, and {shown.version} of {shown} was shown")
        known.update(rows)

    def clock_set(self, behind_ms: int, *, continues: bool) -> None:
        """An elected node has set the cluster's clock, which is ``behind_ms`` behind the true time. If it does not
        continue the clock of the node before it, it follows its system clock, as documented."""
        earlier_ms, self._behind_ms = self._behind_ms, behind_ms
        if not continues and earlier_ms is not None and behind_ms < earlier_ms:
            raise HistoryEnded("as after a reboot, expiry times follow the system clock, which is ahead of theirs")

    def killed(self, node: str) -> None:
        """``node`` was killed: what only etcd had may be lost with the restore of a backup."""
        self._known.pop(node, None)

    def answers(self, node: str, key: bytes, version: Hlc | None) -> None:
        """``node`` sends an answer with a version of ``key``."""
        if version is not None:
            self._known[node][key] = version

    def leads(self, node: str, term: int, holder: int, now_ms: int, lease_s: int) -> None:
        """``node`` takes itself for active; ``holder``: the revision of the leadership key at this instant.

        A restored backup may have another leadership key, which the active node notices within its lease.
        """
        if self._restored_ms is not None and now_ms < self._restored_ms + 1000 * lease_s:
            return
        if holder != term:
            raise Violation(f"{node} is active in term {term}, and the leadership key has revision {holder}")
        if self.terms.setdefault(term, node) != node:
            raise Violation(f"{node} and {self.terms[term]} are active in term {term}")
        if term < max(self.terms):
            raise Violation(f"{node} is active in term {term}, after term {max(self.terms)} has begun")

    def changed(self, key: bytes, value: bytes | None) -> None:
        """A key of etcd was put or deleted."""
        if value is None or not key.endswith(b"/head"):
            return
        head, before = decode_head(value, 0), self._heads.get(key)
        self._heads[key] = head
        # A new term puts the head of the last commit once more.
        if before is not None and (
            head.identity != before.identity
            or head.sequence != before.sequence + (head.term == before.term)
            or head.term < before.term
        ):
            raise Violation(f"{key!r}: {head} was put after {before}")

    def emptied(self) -> None:
        """A backup of etcd was restored and its keys are deleted, while no node runs: new logs begin with the data of a
        node that has all commits, and the revisions that follow are those of an earlier time."""
        self._heads.clear()
        self.terms.clear()

    def restored(self, now_ms: int, values: Mapping[bytes, bytes]) -> None:
        """A backup of etcd with these keys was restored: each log continues from its head in the backup, and the
        revisions that follow are those of an earlier time."""
        self._restored_ms = now_ms
        self._heads = {key: decode_head(value, 0) for key, value in values.items() if key.endswith(b"/head")}
        self.terms.clear()
