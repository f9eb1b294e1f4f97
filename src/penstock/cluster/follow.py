"""Reader of logs in etcd for a standby: new commits in order, without gaps.

A watch of the heads wakes up the reader, which then reads the commits. The heads are also read every second, because a
watch may miss changes (see :mod:`penstock.cluster.watch`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import CommitFrame, Head
from penstock.cluster.log import RESTORED, LogKeys, read_frames, read_head
from penstock.cluster.watch import KeyWatch
from penstock.errors import StorageError
from penstock.runtime.io.commit_log import LogPosition

__all__ = ["LOOK_S", "LogFollower"]

LOOK_S = 1.0
"""Maximum seconds between two reads of the heads."""
MOST_FRAMES = 256
"""Maximum frames of a log that are read in one step."""


class LogFollower:
    """Follows the logs ``names`` of a cluster. Must be closed."""

    def __init__(self, client: EtcdClient, prefix: str, names: Iterable[str]) -> None:
        self._client = client
        self._keys = {name: LogKeys(prefix, name) for name in names}
        self._changed = threading.Event()
        self._watch = KeyWatch(client, [keys.head for keys in self._keys.values()], self._changed.set)

    def next(self, applied: Mapping[str, LogPosition], wait_s: float = LOOK_S) -> dict[str, list[CommitFrame]]:
        """Return the commits after those in ``applied`` by log, at most 256 of each; waits up to ``wait_s`` for some.

        The caller says what it has: commits that were read before an error are not returned, and read again.

        Raises:
            StorageError: etcd has deleted commits that were not read, or has another log, or an earlier state of it.
            UnavailableError, RefusedError: etcd does not answer; call again.
        """
        found = self._read(applied)
        if not found and self._changed.wait(wait_s):
            self._changed.clear()
            found = self._read(applied)
        return found

    def close(self) -> None:
        """Stop watching, and end a wait of :meth:`next`; from any thread."""
        self._changed.set()
        self._watch.close()

    def _read(self, applied: Mapping[str, LogPosition]) -> dict[str, list[CommitFrame]]:
        found = {}
        for name, keys in self._keys.items():
            position = applied[name]
            head = read_head(self._client, keys)
            if head is None or head.identity != position.identity or head.sequence < position.sequence:
                raise _restored(name, f"this node has commit {position.sequence}", head, position)
            end_sequence = min(head.sequence, position.sequence + MOST_FRAMES)
            if end_sequence > position.sequence:
                try:
                    found[name] = list(read_frames(self._client, keys, position.sequence, end_sequence))
                except StorageError:
                    now = read_head(self._client, keys)
                    if now is None or now.identity != head.identity or now.sequence < head.sequence:
                        raise _restored(name, f"etcd had commit {head.sequence}", now, position) from None
                    raise
        self._watch.follow_endpoint()
        return found


def _restored(name: str, before: str, head: Head | None, position: LogPosition) -> StorageError:
    """Return the error of a log that lacks a commit which exists; ``before`` says of whom, ``head`` is the log's."""
    end = "no log" if head is None else f"a log that ends with commit {head.sequence}"
    return StorageError(
        f"{name}: {before}, and etcd has {end}"
        + ("" if head is None or head.identity == position.identity else " of another cluster"),
        why="etcd was restored from a backup or emptied",
        hint=RESTORED,
    )
