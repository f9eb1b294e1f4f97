"""A standby: LMDB environments that apply the commits of the active node.

Each environment has a :class:`StandbyLog`. It accepts commits that etcd already has, so that the environment applies
them like its own. A node that is elected closes them, and opens the environments again with logs in etcd.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import CommitFrame
from penstock.cluster.follow import LOOK_S, LogFollower
from penstock.cluster.log import LogKeys, MissingCommitsError, is_full, read_frames, read_head
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import PenstockError, RefusedError, ShortageError, StorageError, UnavailableError
from penstock.runtime.io.clock import boot_ms
from penstock.runtime.io.commit_log import CommitLog, LogPosition
from penstock.runtime.io.wal import LoggedEnvironment

__all__ = ["Preload", "Standby", "StandbyLog", "applied_by_members"]

PENDING_BYTES: Final = 64 << 20
"""Maximum bytes of commits in memory that LMDB does not contain; further commits wait for LMDB."""
MEMBER_S: Final = 10
"""Seconds without a report after which commits are deleted from etcd even if a standby lacks them."""

_log = logging.getLogger("penstock.cluster")


class StandbyLog(CommitLog):
    """The log ``name`` of a standby; see the module."""

    def __init__(self, client: EtcdClient, prefix: str, name: str) -> None:
        self.released = 0
        """The last commit that LMDB durably contains."""
        self.position = LogPosition(b"", 0, 0)
        """The last commit that the environment has."""
        self._client = client
        self._keys = LogKeys(prefix, name)
        self._name = name
        self._pending: deque[tuple[int, int]] = deque()
        """Sequence and bytes of the commits that LMDB does not contain."""
        self._pending_bytes = 0

    def recover(self, applied: LogPosition | None) -> tuple[list[bytes], LogPosition]:
        """Begin after ``applied``, or at the first commit of the log in etcd [CommitLog].

        Raises:
            StorageError: there is no log in etcd, or it cannot be read.
        """
        if applied is None:
            try:
                head = read_head(self._client, self._keys)
            except (UnavailableError, RefusedError) as error:
                raise StorageError(
                    f"{self._name}: the log in etcd cannot be read", why=error.what, hint=error.hint or "check etcd"
                ) from error
            if head is None:
                raise StorageError(f"{self._name}: etcd has no log to follow", hint="start the active node first")
            applied = LogPosition(head.identity, 0, 0)
        self.position = applied
        self.released = applied.sequence
        return [], applied

    def append(self, sequence: int, body: bytes) -> bool:
        """Accept a commit that etcd has [CommitLog].

        Returns False if LMDB is far behind: the environment then applies everything to LMDB.
        """
        assert sequence == self.position.sequence + 1, "commits have no gaps"
        if self._pending_bytes > PENDING_BYTES:
            return False
        self._pending.append((sequence, len(body)))
        self._pending_bytes += len(body)
        self.position = self.position._replace(sequence=sequence)
        return True

    def release(self, sequence: int) -> None:
        """Register the commits that LMDB contains [CommitLog]."""
        self.released = sequence
        while self._pending and self._pending[0][0] <= sequence:
            self._pending_bytes -= self._pending.popleft()[1]
        if sequence > self.position.sequence:  # of a commit that was not accepted
            self.position = self.position._replace(sequence=sequence)

    def may_wait(self) -> bool:
        """A commit always waits for the network [CommitLog]."""
        return True

    def is_scarce(self) -> bool:
        """Return False: LMDB is updated at intervals [CommitLog]."""
        return False

    def close(self) -> None:
        """Do nothing: it does not wait for etcd [CommitLog]."""


class Preload(Protocol):
    """Memory with the content of an environment, for the node that is elected."""

    def apply(self, body: bytes, position: LogPosition) -> None:
        """Apply a commit that the environment has at ``position``."""


class Standby:
    """Applies the commits of the cluster with ``prefix`` to ``environments``, which are open, each with a log of
    ``logs``, and to the ``preloads`` of some of them.

    ``node``: name of this node. Call :meth:`start`, then :meth:`close`.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        node: str,
        environments: Mapping[str, LoggedEnvironment],
        logs: Mapping[str, StandbyLog],
        preloads: Mapping[str, Preload] | None = None,
    ) -> None:
        self.failure: StorageError | None = None
        """Reason why the node cannot follow: it lacks commits that etcd has deleted, or LMDB failed."""
        self.has_read = False
        """Whether the logs were read since the start; before that this node may lack commits that etcd has deleted."""
        self.applied_ms = 0
        """Time of the cluster's clock of the last applied commits; 0 before the first ones."""
        self.clock_offset: int | None = None
        """Greatest difference between the time of a received commit of ``clock_term`` and :func:`boot_ms` at its
        receipt."""
        self.clock_term = 0
        """Term of the last received commit; the clock of the next term may be behind."""
        self._client = client
        self._prefix = prefix
        self._node = node
        self._environments = dict(environments)
        self._logs = dict(logs)
        self._preloads = dict(preloads or {})
        self._closed = threading.Event()
        self._lease: int | None = None
        self._follower: LogFollower | None = None
        self._obstacle = ""
        """The logged reason why this node does not follow or report for now: a kind of error, or "full"."""
        self._thread = threading.Thread(target=self._follow, name="cluster standby", daemon=True)

    @property
    def positions(self) -> dict[str, LogPosition]:
        """The last commit of each log that the environments have."""
        return {name: log.position for name, log in self._logs.items()}

    def start(self) -> None:
        """Begin to follow."""
        self._follower = LogFollower(self._client, self._prefix, self._logs)
        self._thread.start()

    def close(self) -> None:
        """Stop following. The environments are not closed."""
        self._closed.set()
        if self._follower is not None:
            self._follower.close()
        if self._thread.is_alive():
            self._thread.join()

    def catch_up(self) -> None:
        """Apply the last commits, of an elected node; after :meth:`close`.

        The start of the logs would apply them as well, but not to the preloads.
        """
        try:
            for name in self._preloads:
                log, keys = self._logs[name], LogKeys(self._prefix, name)
                head = read_head(self._client, keys)
                if head is not None and head.identity == log.position.identity:
                    for frame in read_frames(self._client, keys, log.position.sequence, head.sequence):
                        self._apply(name, [frame])
        except (StorageError, UnavailableError, RefusedError) as error:
            _log.info("the start of the logs reads the last commits: %s", error)

    def _apply(self, name: str, frames: Iterable[CommitFrame]) -> None:
        environment, log, preload = self._environments[name], self._logs[name], self._preloads.get(name)
        for frame in frames:
            # The environment counts its commits by itself: without this check, one that is missing would be lost.
            if frame.sequence != log.position.sequence + 1:
                raise StorageError(
                    f"{name}: commit {frame.sequence} was received after commit {log.position.sequence}",
                    why="commits between them are missing, which is a defect of penstock",
                    hint="restart this node, and report the defect",
                )
            while True:
                try:
                    environment.commit_body(frame.body, "following the active node")
                    break
                except ShortageError as lack:
                    self._note_obstacle(type(lack).__name__, "this node does not follow the active one for now", lack)
                    if self._closed.wait(1.0):
                        raise
            if preload is not None:
                preload.apply(frame.body, log.position)

    def _follow(self) -> None:
        """Apply commits and report them; runs in the thread."""
        assert self._follower is not None
        reported = 0.0
        is_reported = False
        while not self._closed.is_set():
            try:
                # Report first, so that etcd keeps the commits that this node is about to read.
                if time.monotonic() - reported > 1:
                    is_reported = self._report_unless_full()
                    reported = time.monotonic()
                found = self._follower.next(self.positions, LOOK_S if self.has_read else 0.0)
                self.has_read = True
                for name, frames in found.items():
                    self._note_clock(frames[-1])
                    self._apply(name, frames)
                if found:
                    self.applied_ms = min(frames[-1].time_ms for frames in found.values())
                if self._obstacle and is_reported:
                    _log.info("this node follows the active one again")
                    self._obstacle = ""
            except StorageError as failure:
                self.failure = failure
                # Without an error of this node, which then loads a snapshot.
                level = logging.WARNING if isinstance(failure, MissingCommitsError) else logging.CRITICAL
                _log.log(level, "this node cannot follow the active one: %s", failure)
                return
            except (UnavailableError, RefusedError) as error:
                self._note_obstacle(type(error).__name__, "this node does not follow the active one for now", error)
                self._closed.wait(0.1)

    def _note_obstacle(self, kind: str, what: str, error: PenstockError) -> None:
        """Log an error that may be repeated several times a second: once, until the node follows again."""
        if kind != self._obstacle:
            self._obstacle = kind
            _log.warning("%s: %s", what, error)

    def _report_unless_full(self) -> bool:
        """Report; a full etcd has no space for it, but commits can still be read. Returns whether it was reported."""
        try:
            self._report()
        except RefusedError as error:
            if not is_full(error):
                raise
            self._note_obstacle("full", "this node cannot report what it has, and follows the active one", error)
            return False
        return True

    def _note_clock(self, frame: CommitFrame) -> None:
        offset = frame.time_ms - boot_ms()
        if frame.term > self.clock_term:
            self.clock_term, self.clock_offset = frame.term, offset
        elif frame.term == self.clock_term and self.clock_offset is not None:
            self.clock_offset = max(self.clock_offset, offset)

    def _report(self) -> None:
        """Report to the active node which commits LMDB contains."""
        if self._lease is None or self._client.keep_alive(self._lease, deadline_s=1.0) <= 0:
            grant = pb.LeaseGrantRequest(TTL=MEMBER_S)
            self._lease = self._client.call("Lease/LeaseGrant", grant, pb.LeaseGrantResponse).ID
        value = json.dumps({name: log.released for name, log in self._logs.items()}).encode()
        put = pb.PutRequest(key=_member_key(self._prefix, self._node), value=value, lease=self._lease)
        self._client.call("KV/Txn", pb.TxnRequest(success=[pb.RequestOp(request_put=put)]), pb.TxnResponse)


def applied_by_members(client: EtcdClient, prefix: str, but: str) -> dict[str, list[int]]:
    """Return by log the last commit that each live standby has in LMDB; ``but``: a node to leave out.

    Raises:
        UnavailableError, RefusedError: etcd does not answer.
    """
    first = _member_key(prefix, "")
    request = pb.RangeRequest(key=first, range_end=first[:-1] + b"0")  # the byte after the slash
    found: dict[str, list[int]] = {}
    for entry in client.call("KV/Range", request, pb.RangeResponse, within_s=1.0).kvs:
        if entry.key == _member_key(prefix, but):
            continue
        try:
            positions = {str(name): int(sequence) for name, sequence in json.loads(entry.value).items()}
        except (ValueError, TypeError, AttributeError):
            _log.warning("the report of a standby cannot be read: %r", entry.key)
            continue
        for name, sequence in positions.items():
            found.setdefault(name, []).append(sequence)
    return found


def _member_key(prefix: str, node: str) -> bytes:
    return f"{prefix}member/{node}".encode()
