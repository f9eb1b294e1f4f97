"""Reader of logs in etcd for a standby: new commits in order, without gaps.

A watch of the heads wakes up the reader, which then reads the commits. The heads are also read every second, because a
watch may miss changes: its member is stopped, an event is lost (etcd 3.4.23), or etcd was restored from a backup.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping

import grpc

from penstock.cluster.client import EtcdClient, Watch
from penstock.cluster.commit import CommitFrame
from penstock.cluster.log import LogKeys, read_frames, read_head
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import PenstockError, StorageError
from penstock.runtime.io.commit_log import LogPosition

__all__ = ["LogFollower"]

LOOK_S = 1.0
"""Maximum seconds between two reads of the heads."""
MOST_FRAMES = 256
"""Maximum frames of a log that are read in one step."""

_log = logging.getLogger("penstock.cluster")


class LogFollower:
    """Follows the logs of a cluster from the positions ``applied``, by name. Must be closed."""

    def __init__(self, client: EtcdClient, prefix: str, applied: Mapping[str, LogPosition]) -> None:
        self.positions = dict(applied)
        """The last commit of each log that was returned."""
        self._client = client
        self._keys = {name: LogKeys(prefix, name) for name in applied}
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._watch_heads, name="cluster watch", daemon=True)
        self._thread.start()

    def next(self, wait_s: float = LOOK_S) -> dict[str, list[CommitFrame]]:
        """Return new commits by log, at most 256 of each; waits up to ``wait_s`` for some.

        Raises:
            StorageError: etcd has deleted commits that were not read, or has another log, or an earlier state of it.
            UnavailableError, RefusedError: etcd does not answer; the next call continues.
        """
        found = self._read()
        if not found and self._changed.wait(wait_s):
            self._changed.clear()
            found = self._read()
        return found

    def close(self) -> None:
        """Stop watching, and end a wait of :meth:`next`; from any thread."""
        self._closed.set()
        self._changed.set()
        self._leave_watch()
        self._thread.join()

    def _leave_watch(self) -> None:
        watch = self._watch
        if watch is not None and (self._closed.is_set() or watch.endpoint != self._client.endpoint):
            watch.cancel()

    def _read(self) -> dict[str, list[CommitFrame]]:
        found = {}
        for name, keys in self._keys.items():
            position = self.positions[name]
            head = read_head(self._client, keys)
            if head is None or head.identity != position.identity or head.sequence < position.sequence:
                end = "no log" if head is None else f"a log that ends with commit {head.sequence}"
                raise StorageError(
                    f"{name}: this node has commit {position.sequence}, and etcd has {end}"
                    + ("" if head is None or head.identity == position.identity else " of another cluster"),
                    why="etcd was restored from a backup or emptied",
                    do="start the node whose data directory has the newest commits, with a new prefix in etcd",
                )
            end_sequence = min(head.sequence, position.sequence + MOST_FRAMES)
            if end_sequence > position.sequence:
                frames = found[name] = list(read_frames(self._client, keys, position.sequence, end_sequence))
                self.positions[name] = position._replace(sequence=frames[-1].sequence)
        # Reads have switched to another endpoint; the watch at the old one may remain open without events.
        self._leave_watch()
        return found

    def _watch_heads(self) -> None:
        """Set ``_changed`` at each commit; runs in the thread."""
        while not self._closed.is_set():
            ended = threading.Event()
            try:
                watch = self._watch = self._client.watch(self._requests(ended))
                self._leave_watch()
                for response in watch.responses:
                    if response.events:
                        self._changed.set()
                    if response.canceled:
                        break
            except grpc.RpcError as error:
                _log.info("the watch of the cluster is opened again: %s", error.details())
            except PenstockError as failure:
                _log.info("the watch of the cluster is opened again: %s", failure)
            ended.set()
            self._closed.wait(0.1)

    def _requests(self, ended: threading.Event) -> Iterator[pb.WatchRequest]:
        """Requests of one watch, which stays open until it has ``ended``."""
        for keys in self._keys.values():
            yield pb.WatchRequest(create_request=pb.WatchCreateRequest(key=keys.head))
        while not ended.wait(LOOK_S) and not self._closed.is_set():
            pass
