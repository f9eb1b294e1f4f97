"""When a member loads a snapshot of the active node, and how long it waits after an attempt.

Only a member that lacks commits which etcd has deleted loads one, and only if each of its logs is the one in etcd and
not ahead of it: a node that is blocked for another reason may have commits that no other node has. Before the snapshot
replaces the data, this is compared again, with the snapshot as well.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from penstock.cluster.client import EtcdClient
from penstock.cluster.leadership import is_too_far_behind, may_replace
from penstock.cluster.log import RESTORED, LogKeys, MissingCommitsError, read_head
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.standby import Standby
from penstock.errors import PenstockError, StorageError
from penstock.node.cluster.snapshot import SnapshotLoader, SnapshotSource
from penstock.node.cluster.state import LOGS, ActiveNode, decode_object, snapshot_key
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.commit_log import LogPosition

__all__ = ["SnapshotRecovery", "line_of"]

_log = logging.getLogger("penstock.cluster")

_PAUSE_S: Final = 60.0
"""Maximum seconds between two attempts to load a snapshot."""
_OFFER_S: Final = 1.0
"""Seconds until a missing offer of the active node is looked for again."""

Positions = Mapping[str, LogPosition | None]
"""Position of each log by its name; None: the environment does not exist, or never had one."""


class SnapshotRecovery:
    """Loads snapshots into the data directory ``path`` of ``node`` while it lacks commits; in the thread of a member.

    ``tls``: of the connection to the active node, None for plain HTTP. ``release`` is called before a load: it closes
    the environments, and returns their positions.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        node: str,
        path: Path,
        tls: ssl.SSLContext | None,
        release: Callable[[], Positions],
    ) -> None:
        self.failure: str | None = None
        """The reason why the last snapshot was not loaded."""
        self.loaded = self.failed = 0
        """Number of snapshots that were loaded, and that were not."""
        self._client = client
        self._prefix = prefix
        self._node = node
        self._path = path
        self._tls = tls
        self._release = release
        self._loader: SnapshotLoader | None = None
        self._pauses = Backoff(1.0, _PAUSE_S)
        self._next_s = 0.0
        """Time of the monotonic clock before which no other snapshot is loaded."""

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot is being loaded; then no environment is open."""
        return self._loader is not None

    @property
    def progress(self) -> str | None:
        """The progress of the load, as a phrase for people."""
        return None if self._loader is None else self._loader.progress

    def proceed(self, active: ActiveNode | None, standby: Standby | None) -> bool:
        """Begin a load if ``standby`` lacks deleted commits, or handle the end of one; returns True if this is what the
        member does at present. Raises UnavailableError, RefusedError, StorageError."""
        loader = self._loader
        if loader is not None:
            if loader.ended:
                self._end(loader.failure)
            return True
        if (
            standby is None
            or not isinstance(standby.failure, MissingCommitsError)
            or active is None
            or active.node == self._node
            or time.monotonic() < self._next_s
            or not is_too_far_behind(self._client, self._prefix, standby.positions)
        ):
            return False
        self._begin(active)
        return True

    def has_all_commits(self) -> None:
        """The member follows: the next load, if one is needed, begins immediately."""
        self._pauses.reset()

    def close(self) -> None:
        """End a load."""
        if self._loader is not None:
            self._loader.close()

    def _begin(self, active: ActiveNode) -> None:
        request = pb.RangeRequest(key=snapshot_key(self._prefix))
        offers = self._client.call("KV/Range", request, pb.RangeResponse, within_s=1.0).kvs
        offer = decode_object(offers[0].value) if offers else {}
        if offer.get("term") != active.term:
            self.failure = (
                f"the active node {active.node} offers no snapshot: it is starting, or its version has none; then"
                " upgrade it, or copy its data directory"
            )
            self._next_s = time.monotonic() + _OFFER_S
            return
        stored = self._release()
        source = SnapshotSource(active.node, active.http, str(offer.get("secret")), self._tls)
        _log.info("loading a snapshot: etcd has deleted commits that this node lacks")
        check = partial(self._check, stored)
        self._loader = SnapshotLoader(source, self._path, [LOGS[name] for name in stored], self._node, check)
        self._loader.start()

    def _end(self, failure: PenstockError | None) -> None:
        self._loader = None
        pause_s = self._pauses.failed()  # the log may have passed the snapshot meanwhile
        self._next_s = time.monotonic() + pause_s
        if failure is None:
            self.loaded += 1
            self.failure = None
            _log.info("a snapshot of the active node was loaded")
        else:
            self.failed += 1
            self.failure = f"no snapshot was loaded: {line_of(failure)}; the next attempt is in {pause_s:g} s"

    def _check(self, stored: Positions, found: Mapping[str, LogPosition]) -> None:
        """Check that a snapshot with the positions ``found``, by environment, has all commits of this node, and that
        etcd has all commits of the snapshot; in the thread of the load.

        Raises:
            StorageError: it does not.
            UnavailableError, RefusedError: etcd does not answer.
        """
        for name, position in stored.items():
            new, head = found[LOGS[name]], read_head(self._client, LogKeys(self._prefix, name))
            if (
                head is None
                or not may_replace(position, new)
                or not may_replace(new, LogPosition(head.identity, 0, head.sequence))
            ):
                raise StorageError(
                    f"{name}: the snapshot ends with commit {new.sequence}, the data of this node with"
                    f" {0 if position is None else position.sequence}, and the log in etcd with"
                    f" {'none' if head is None else head.sequence}, or they are of different logs",
                    why="etcd was restored from a backup or emptied",
                    hint=RESTORED,
                )


def line_of(error: PenstockError) -> str:
    """The error with cause and remedy, in one line."""
    return "; ".join(" ".join(line.split()) for line in str(error).splitlines())
