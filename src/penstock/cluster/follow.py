"""Reader of logs in etcd for a standby: new commits in order, without gaps.

A watch of the heads wakes up the reader, which then reads heads and commits of all logs in one transaction, because for
each request that reads the members of etcd confirm their leader. They are also read every second, because a watch may
miss changes (see :mod:`penstock.cluster.watch`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import CommitFrame, Head
from penstock.cluster.log import LAST, OTHER_LOG, PAGE, RESTORED, LogKeys, frames_of, head_of, read_head
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.watch import KeyWatch
from penstock.errors import RefusedError, StorageError, UnavailableError
from penstock.runtime.io.commit_log import LogPosition

__all__ = ["LOOK_S", "LogFollower"]

LOOK_S = 1.0
"""Maximum seconds between two reads of the heads."""
GATHER_S = 0.01
"""Seconds from a change to the read: while commits follow each other, a read has those of this time."""


class LogFollower:
    """Follows the logs ``names`` of a cluster. Must be closed."""

    def __init__(self, client: EtcdClient, prefix: str, names: Iterable[str]) -> None:
        self._client = client
        self._keys = {name: LogKeys(prefix, name) for name in names}
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._is_behind = True
        """Whether etcd may have commits that were not read."""
        self._page = PAGE
        """Commits of each log in a read: half as many after a failure, because the large ones of all logs may take
        longer than the deadline of a call, and one more after each answer."""
        self._watch = KeyWatch(client, [keys.head for keys in self._keys.values()], self._changed.set)

    def next(self, applied: Mapping[str, LogPosition], wait_s: float = LOOK_S) -> dict[str, list[CommitFrame]]:
        """Return the commits after those in ``applied`` by log, at most 16 of each; waits up to ``wait_s`` for some.

        The caller says what it has: commits that were read before an error are not returned, and read again.

        Raises:
            StorageError: etcd has deleted commits that were not read, or has another log, or an earlier state of it.
            UnavailableError, RefusedError: etcd does not answer; call again.
        """
        if not self._is_behind and self._changed.wait(wait_s):
            self._closing.wait(GATHER_S)
        self._changed.clear()
        self._is_behind = True
        try:
            found = self._read(applied)
        except (UnavailableError, RefusedError):
            self._page = max(1, self._page // 2)
            raise
        self._is_behind = any(len(frames) == self._page for frames in found.values())
        self._page = min(PAGE, self._page + 1)
        return found

    def close(self) -> None:
        """Stop watching, and end a wait of :meth:`next`; from any thread."""
        self._closing.set()
        self._changed.set()
        self._watch.close()

    def _read(self, applied: Mapping[str, LogPosition]) -> dict[str, list[CommitFrame]]:
        request = pb.TxnRequest()
        for name, keys in self._keys.items():
            request.success.add().request_range.key = keys.head
            commits = request.success.add().request_range
            commits.key, commits.range_end, commits.limit = (
                keys.frame(applied[name].sequence + 1),
                keys.frame(LAST),
                self._page,
            )
        answers = iter(self._client.call("KV/Txn", request, pb.TxnResponse).responses)
        found = {}
        for name, keys in self._keys.items():
            position = applied[name]
            head, commits_found = head_of(next(answers).response_range), next(answers).response_range
            if head is None or head.identity != position.identity or head.sequence < position.sequence:
                raise _restored(name, f"this node has commit {position.sequence}", head, position)
            if head.sequence > position.sequence:
                try:
                    found[name] = list(frames_of(self._client, keys, commits_found, position.sequence))
                except StorageError:  # parts are read later than their frame
                    now = read_head(self._client, keys)
                    if now is None or now.identity != head.identity or now.sequence < head.sequence:
                        raise _restored(name, f"etcd had commit {head.sequence}", now, position) from None
                    raise
        self._watch.follow_endpoint()
        return found


def _restored(name: str, before: str, head: Head | None, position: LogPosition) -> StorageError:
    """Return the error of a log that lacks a commit which exists; ``before`` says of whom, ``head`` is the log's."""
    if head is not None and head.identity != position.identity:
        return StorageError(
            f"{name}: {before}, and etcd has another log, which ends with commit {head.sequence}",
            why="a new log was begun with the data of another node, or etcd or this data directory was restored from a "
            "backup",
            hint=OTHER_LOG,
        )
    return StorageError(
        f"{name}: {before}, and etcd has "
        + ("no log" if head is None else f"a log that ends with commit {head.sequence}"),
        why="etcd was restored from a backup or emptied",
        hint=RESTORED,
    )
