"""Logs of an active node in etcd: one per LMDB environment, under one leadership key.

Keys, below the prefix of the cluster:

``clock``                       time of the cluster's clock, once a second
``leader``                      the active node, with its lease; the revision of the key is the term
``log/NAME/head``               identity of the log, sequence and term of its newest commit
``log/NAME/frame/SEQUENCE``     a commit, or the number of its parts
``log/NAME/part/SEQUENCE/TERM/PART``  a part of a commit above 512 KiB; valid if its frame exists

Numbers in keys have 16 hexadecimal digits, so their order is that of the numbers.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final
from zlib import crc32

from penstock.cluster.client import EtcdClient, EtcdDeniedError
from penstock.cluster.commit import (
    FRAME_BYTES,
    CommitFrame,
    Head,
    LogCommits,
    Verdict,
    decode_frame,
    decode_head,
    encode_frame,
)
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.retention import BACKLOG_BYTES, MOST_BYTES, EtcdRetention
from penstock.errors import OutOfSpaceError, PenstockError, RefusedError, StorageError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.commit_log import CommitLog, LogPosition

__all__ = [
    "LAST",
    "OTHER_LOG",
    "PAGE",
    "RESTORED",
    "EtcdLog",
    "EtcdLogs",
    "FencedError",
    "LogKeys",
    "MissingCommitsError",
    "clock_key",
    "frames_of",
    "head_of",
    "is_full",
    "leader_key",
    "read_frames",
    "read_head",
    "read_oldest",
]

PART_BYTES: Final = 512 << 10
"""Largest body in a frame, and size of the parts of a larger one: a request has at most 1.5 MiB, and larger ones delay
all others."""
PAGE: Final = 16
"""Frames per read of a log: etcd can limit their number, but not their bytes."""
_ROOM_S: Final = 1.0
"""Maximum seconds that a commit without room waits for LMDB before the wait is reported."""

MAINTENANCE_S: Final = 1.0
"""Seconds between deletions and compactions: etcd compacts only every five minutes, when its database would be full."""

ANOTHER_ACTIVE: Final = "another node is active"
RESTORED: Final = (
    "stop all nodes, empty the prefix of the cluster in etcd, start the node with the newest commits once with "
    "`cluster.new_log: true`, and the other nodes with empty data directories, or with `cluster.tubemq` from copies of"
    " its statestore, mqtt and tube/master"
)
"""The remedy after a backup of etcd was restored."""
OTHER_LOG: Final = (
    "if another node continues the log in etcd, start this one with an empty data directory, or with `cluster.tubemq` "
    f"from copies of statestore, mqtt and tube/master of that node; otherwise {RESTORED}"
)
"""The remedy if etcd has a log that is not the one of a node."""

_log = logging.getLogger("penstock.cluster")


class FencedError(StorageError):
    """Another node is active: this node must stop answering, and restart as a standby."""


class MissingCommitsError(StorageError):
    """A log in etcd lacks commits that were to be read."""


class LogKeys:
    """The keys of a log ``name`` below ``prefix``."""

    def __init__(self, prefix: str, name: str) -> None:
        self._base = f"{prefix}log/{name}/"
        self.head = f"{self._base}head".encode()

    def frame(self, sequence: int) -> bytes:
        """Return the key of a commit."""
        return f"{self._base}frame/{sequence:016x}".encode()

    def part(self, sequence: int, term: int = 0, part: int = 0) -> bytes:
        """Return the key of a part, numbered from 1; without a part, the prefix of the commit's keys."""
        return f"{self._base}part/{sequence:016x}/{term:016x}/{part:016x}".encode()


LAST: Final = (1 << 64) - 1
"""A sequence after all others."""


def leader_key(prefix: str) -> bytes:
    """Return the leadership key of the cluster with ``prefix``."""
    return f"{prefix}leader".encode()


def clock_key(prefix: str) -> bytes:
    """Return the key with the time of the cluster's clock."""
    return f"{prefix}clock".encode()


def read_head(client: EtcdClient, keys: LogKeys) -> Head | None:
    """Read the newest commit of a log (linearizable); None if the log does not exist. Raises UnavailableError,
    RefusedError."""
    answer = client.call("KV/Range", pb.RangeRequest(key=keys.head), pb.RangeResponse)
    return head_of(answer)


def head_of(answer: pb.RangeResponse) -> Head | None:
    """Decode the head of a log; None if the answer has none."""
    return decode_head(answer.kvs[0].value, answer.kvs[0].mod_revision) if answer.kvs else None


def read_frames(client: EtcdClient, keys: LogKeys, after: int, end: int) -> Iterator[CommitFrame]:
    """Read the complete commits after the sequence ``after`` up to ``end``, in order, without gaps.

    Raises:
        StorageError: a commit is missing or damaged.
        UnavailableError, RefusedError: etcd does not answer.
    """
    while after < end:
        request = pb.RangeRequest(key=keys.frame(after + 1), range_end=keys.frame(end + 1), limit=PAGE)
        for frame in frames_of(client, keys, client.call("KV/Range", request, pb.RangeResponse), after):
            yield frame
            after = frame.sequence


def frames_of(client: EtcdClient, keys: LogKeys, answer: pb.RangeResponse, after: int) -> Iterator[CommitFrame]:
    """Decode the commits of an answer, which begin after the sequence ``after``, and read their parts. Raises as
    :func:`read_frames`."""
    if not answer.kvs:
        raise _missing(after + 1, None)
    for found in answer.kvs:
        frame = decode_frame(found.value)
        if frame.sequence != after + 1:
            raise _missing(after + 1, frame.sequence)
        yield _complete(client, keys, frame)
        after = frame.sequence


def read_oldest(client: EtcdClient, keys: LogKeys) -> CommitFrame | None:
    """Read the first commit of a log in etcd; None if there is none.

    Raises:
        StorageError: the commit is damaged.
        UnavailableError, RefusedError: etcd does not answer.
    """
    request = pb.RangeRequest(key=keys.frame(0), range_end=keys.frame(LAST), limit=1)
    answer = client.call("KV/Range", request, pb.RangeResponse)
    return _complete(client, keys, decode_frame(answer.kvs[0].value)) if answer.kvs else None


def _complete(client: EtcdClient, keys: LogKeys, frame: CommitFrame) -> CommitFrame:
    if not frame.parts:
        return frame
    body = bytearray()
    for part in range(1, frame.parts + 1):
        key = keys.part(frame.sequence, frame.term, part)
        answer = client.call("KV/Range", pb.RangeRequest(key=key), pb.RangeResponse)
        for found in answer.kvs:
            body += found.value
    if crc32(body) != frame.checksum:
        raise StorageError(
            f"etcd: commit {frame.sequence} is damaged",
            why="one of its parts is missing or damaged",
            hint="restore etcd from a backup, or start from the data directory of the node that was active last",
        )
    return frame._replace(parts=0, body=bytes(body))


def _missing(sequence: int, found: int | None) -> MissingCommitsError:
    return MissingCommitsError(
        f"etcd: commit {sequence} is not in the log" + ("" if found is None else f", which continues with {found}"),
        why="etcd has deleted commits that this node lacks: it is new, or was stopped for long",
        hint="wait: this node loads a snapshot from the active node; if no node is active, start the one that was last",
    )


class EtcdLogs:
    """The logs of the active node, of all environments. ``term``: revision of its leadership key.

    ``names``: names of the logs, which share ``most_bytes`` in etcd. ``earlier``: the previous logs of the
    environments; if etcd has no logs, new ones begin with the data of the environments, as when a node starts a new
    cluster. ``backlog_bytes``: the newest commits that stay in etcd for members that start later. ``clock``: ms of the
    cluster's clock; ``stamp``: the value of the key ``clock``, put at the start and every second. ``on_fenced``
    is called in a thread, possibly repeatedly, with the reason why this node can commit nothing more: another node is
    active, or etcd was restored.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        term: int,
        names: Sequence[str],
        *,
        most_bytes: int = MOST_BYTES,
        backlog_bytes: int = BACKLOG_BYTES,
        earlier: Mapping[str, CommitLog] | None = None,
        clock: Callable[[], int] = wall_clock_ms,
        stamp: Callable[[], bytes] | None = None,
        on_fenced: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.client = client
        self.full: RefusedError | None = None
        """The error of a full etcd; None while it has space."""
        self.prefix = prefix
        self.term = term
        self.earlier = dict(earlier or {})
        self.clock = clock
        self.stamp = stamp
        self.on_fenced = on_fenced
        share = len(names)
        self.logs = {name: EtcdLog(self, name, most_bytes // share, backlog_bytes // share) for name in names}
        self._compacted = 0
        self._urgent = threading.Event()
        """Set when a log uses half of its bytes."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, members: Callable[[], Mapping[str, Sequence[int]]] = dict) -> None:
        """Start to call :meth:`maintain`, now and every second, with the current result of ``members``."""
        self._thread = threading.Thread(target=self._maintain, args=(members,), name="cluster retention", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop calling :meth:`maintain`."""
        self._closed = True
        self._urgent.set()
        if self._thread is not None:
            self._thread.join()

    def hurry(self) -> None:
        """Request a call of :meth:`maintain`: commits that LMDB contains must be deleted to free space in etcd."""
        self._urgent.set()

    def _maintain(self, members: Callable[[], Mapping[str, Sequence[int]]]) -> None:
        while not self._closed:
            try:
                self.maintain(members())
            except FencedError:
                self.on_fenced(ANOTHER_ACTIVE)
                return  # the next commit raises it
            except PenstockError as error:
                _log.warning("commits in etcd are not deleted for now: %s", error)
                time.sleep(0.1)
            self._urgent.wait(MAINTENANCE_S)
            self._urgent.clear()

    def leads(self) -> pb.Compare:
        """Return the comparison that succeeds while this node is active."""
        return pb.Compare(target=pb.Compare.MOD, key=leader_key(self.prefix), mod_revision=self.term)

    def maintain(self, members: Mapping[str, Sequence[int]] | None = None) -> None:
        """Delete the commits that no member needs, and compact etcd; call it every second.

        ``members``: by log, the last commit that each other live member has in LMDB. No reader needs old revisions, so
        all of them are compacted.

        Raises:
            FencedError: another node is active.
            UnavailableError, RefusedError: etcd does not answer; the next call deletes the rest.
        """
        full = self.full
        deletions: list[pb.RequestOp] = []
        for name, log in self.logs.items():
            if (last := log.deletable((members or {}).get(name, ()), all_possible=full is not None)) is not None:
                ranges = ((log.keys.frame(0), log.keys.frame(last + 1)), (log.keys.part(0), log.keys.part(last + 1)))
                for start, end in ranges:
                    deletions.append(pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=start, range_end=end)))
        request = pb.TxnRequest(compare=[self.leads()], success=deletions)
        answer = self.client.call("KV/Txn", request, pb.TxnResponse, within_s=MAINTENANCE_S)
        if not answer.succeeded:
            raise _fenced()
        for log in self.logs.values():
            log.deletion_done()
        self._put_clock()
        revision = answer.header.revision
        if revision > self._compacted:
            try:
                self.client.call(
                    "KV/Compact", pb.CompactionRequest(revision=revision), pb.CompactionResponse, within_s=MAINTENANCE_S
                )
            except RefusedError as error:
                if "has been compacted" not in error.text:
                    raise
            self._compacted = revision

    def clock_put(self) -> pb.RequestOp:
        """Return the operation that puts the cluster's clock."""
        return _put(clock_key(self.prefix), b"" if self.stamp is None else self.stamp())

    def _put_clock(self) -> None:
        """Put the cluster's clock; a full etcd refuses this, but not deletions."""
        request = pb.TxnRequest(compare=[self.leads()], success=[self.clock_put()])
        try:
            self.client.call("KV/Txn", request, pb.TxnResponse, within_s=MAINTENANCE_S)
        except RefusedError as error:
            if not is_full(error):
                raise
            self.is_full(error)
        else:
            self.full = None

    def is_full(self, error: RefusedError) -> None:
        """Register that etcd refused a commit or the clock because its database is full."""
        if self.full is None:
            _log.error("etcd is full, commits wait: %s", error)
        self.full = error

    def stored_bytes(self) -> int:
        """Bytes of the commits in etcd."""
        return sum(log.stored_bytes for log in self.logs.values())


class EtcdLog(CommitLog):
    """A log in etcd, of the active node. See :class:`CommitLog`."""

    def __init__(self, logs: EtcdLogs, name: str, most_bytes: int, backlog_bytes: int) -> None:
        self.name = name
        self.keys = LogKeys(logs.prefix, name)
        self.waiting_since_ms: int | None = None
        """Time since which a commit has been waiting for etcd; None if no commit waits."""
        self._logs = logs
        self._client = logs.client
        self._leader = leader_key(logs.prefix)
        self._most_bytes = most_bytes
        self._backlog_bytes = backlog_bytes
        self._position = LogPosition(b"", 0, 0)
        self._head: Head | None = None
        self._commits: LogCommits | None = None
        self._retention = EtcdRetention(0, most_bytes, backlog_bytes)
        self._done = 0
        """The last commit whose deletion etcd has accepted."""
        self._room = threading.Condition()
        self._pauses = Backoff(0.02, 0.5)
        self._closed = threading.Event()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the commits in etcd."""
        return self._retention.stored_bytes

    @property
    def sequence(self) -> int:
        """Number of the last commit that etcd has accepted."""
        return self._position.sequence if self._commits is None else self._commits.head.sequence

    @property
    def position(self) -> LogPosition:
        """Position of the last commit that etcd has accepted."""
        return self._position._replace(sequence=self.sequence)

    def recover(self, applied: LogPosition | None) -> tuple[list[bytes], LogPosition]:
        """Read the commits after ``applied`` [CommitLog].

        Raises:
            StorageError: LMDB has commits of another log, or later ones than etcd, or etcd has deleted some.
        """
        try:
            head = self._head = read_head(self._client, self.keys)
            identity = head.identity if head is not None else secrets.token_bytes(8)
            last = head.sequence if head is not None else 0
            first = applied.sequence if applied is not None else 0
            earlier = self._logs.earlier.get(self.name)
            if head is None and applied is not None and earlier is not None:
                # The log has no frame with sequence 1: a node without this data cannot follow it before it has loaded a
                # snapshot.
                self._position = LogPosition(identity, 0, 1)
                self._count(1, [])
                return earlier.recover(applied)[0], self._position
            if applied is not None and (applied.identity != identity or applied.epoch):
                raise self._foreign("etcd has another log" if head is not None else "etcd has no log")
            if first > last:
                raise self._foreign(f"it has commit {first}, and the log in etcd ends with {last}")
            frames = list(read_frames(self._client, self.keys, first, last))
        except (UnavailableError, RefusedError) as error:
            raise StorageError(
                f"{self.name}: the log in etcd cannot be read", why=_reason(error), hint=error.hint or "check etcd"
            ) from error
        self._position = LogPosition(identity, 0, last)
        self._count(first, frames)
        return [frame.body for frame in frames], self._position

    def _count(self, first: int, frames: Sequence[CommitFrame]) -> None:
        """Count the commits in etcd: ``frames``, and the commits up to ``first``, which were not read."""
        oldest, head = read_oldest(self._client, self.keys), self._head
        self._retention = EtcdRetention(first, self._most_bytes, self._backlog_bytes)
        self._done = first
        if oldest is not None and head is not None:
            size = FRAME_BYTES + len(oldest.body)
            earlier = head.total_bytes - oldest.total_bytes + size
            self._done = oldest.sequence - 1
            self._retention = EtcdRetention(self._done, self._most_bytes, self._backlog_bytes)
            earlier -= sum(FRAME_BYTES + len(frame.body) for frame in frames)
            if oldest.sequence <= first:
                self._retention.committed(first, earlier)
        for frame in frames:
            self._retention.committed(frame.sequence, FRAME_BYTES + len(frame.body))

    def _foreign(self, what: str) -> StorageError:
        return StorageError(
            f"{self.name}: the data directory does not continue the log in etcd: {what}",
            why="etcd was restored from a backup or emptied, or the directory belongs to another cluster",
            hint=RESTORED,
        )

    def start(self, released: int | None = None) -> None:
        """Create the log if it does not exist, and remove parts that no frame refers to [CommitLog].

        ``released``: the last commit that LMDB contains durably, if it does not contain all recovered ones.
        """
        sequence = self._position.sequence
        before = self._head or Head(self._position.identity, sequence, 0)
        head, revision = before._replace(term=self._logs.term, revision=0), before.revision
        leftover = pb.DeleteRangeRequest(key=self.keys.part(sequence + 1), range_end=self.keys.part(LAST))
        request = pb.TxnRequest(
            compare=[self._logs.leads(), _unchanged(self.keys.head, revision)],
            # The clock first: a standby must know that of each term that has commits.
            success=[
                self._logs.clock_put(),
                _put(self.keys.head, head.encode()),
                pb.RequestOp(request_delete_range=leftover),
            ],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=self.keys.head))],
        )
        try:
            # An attempt without an answer may have put this head: no other node puts a head of this term.
            answer = self._client.call("KV/Txn", request, pb.TxnResponse)
        except (UnavailableError, RefusedError) as error:
            raise StorageError(
                f"{self.name}: the log in etcd cannot be started", why=_reason(error), hint=error.hint or "check etcd"
            ) from error
        if answer.succeeded:
            started = head._replace(revision=answer.header.revision)
        else:
            found = head_of(answer.responses[0].response_range)
            if found is None or found[:3] != head[:3]:
                raise _fenced()
            started = found
        self._commits = LogCommits(self._logs.term, started)
        self.release(sequence if released is None else released)

    def append(self, sequence: int, body: bytes) -> bool:
        """Commit to etcd; blocks while etcd does not answer, or does not admit the user [CommitLog].

        Raises:
            OutOfSpaceError: etcd's database is full, or LMDB is far behind; the same commit may be repeated.
            FencedError: another node is active.
            StorageError: etcd rejected the commit, or its log is not the one of this node.
        """
        commits = self._commits
        assert commits is not None, "start() comes first"
        if self._retention.is_full:  # only this thread adds commits
            self._wait_for_room()
        size = FRAME_BYTES + len(body)
        head = commits.begin(sequence, size)
        try:
            parts = self._put_parts(sequence, body) if len(body) > PART_BYTES else 0
            frame = encode_frame(head, self._logs.clock(), body, parts)
            verdict = self._commit(commits, self._transaction(commits.head.revision, head, frame))
        except RefusedError as error:
            if is_full(error):
                commits.unanswered()  # etcd executes the transaction with which its database becomes full
            raise self._refused(error) from error
        finally:
            self.waiting_since_ms = None
        if verdict is Verdict.FENCED:
            self._logs.on_fenced(ANOTHER_ACTIVE)
            raise _fenced()
        if verdict is Verdict.DIVERGED:
            # It must not keep its lease: nothing could be committed, and no other node could take over.
            self._logs.on_fenced("the log in etcd does not end with its last commit: etcd was restored or changed")
            raise self._foreign(f"its head is not commit {commits.head.sequence} of this node")
        with self._room:
            self._retention.committed(sequence, size)
        return True

    def _transaction(self, revision: int, head: Head, frame: bytes) -> pb.TxnRequest:
        """Return the transaction that puts ``frame`` and ``head`` if the head in etcd still has ``revision``."""
        # Messages that are passed to a constructor are copied, at three times the cost of adding them in place.
        request = pb.TxnRequest()
        request.compare.add(target=pb.Compare.MOD, key=self._leader, mod_revision=self._logs.term)
        request.compare.add(target=pb.Compare.MOD, key=self.keys.head, mod_revision=revision)
        put = request.success.add().request_put
        put.key, put.value = self.keys.frame(head.sequence), frame
        put = request.success.add().request_put
        put.key, put.value = self.keys.head, head.encode()
        return request

    def _commit(self, commits: LogCommits, request: pb.TxnRequest) -> Verdict:
        """Send the transaction until etcd executes it."""
        answer = self._answered(request, commits.unanswered)
        if answer.succeeded:
            return commits.accepted(answer.header.revision)
        reads = [pb.RangeRequest(key=self.keys.head), pb.RangeRequest(key=self._leader, keys_only=True)]
        request = pb.TxnRequest(success=[pb.RequestOp(request_range=read) for read in reads])
        found = self._answered(request, lambda: None)
        head, leader = (response.response_range for response in found.responses)
        return commits.refused(head_of(head), leader.kvs[0].mod_revision if leader.kvs else 0)

    def _answered(self, request: pb.TxnRequest, unanswered: Callable[[], None]) -> pb.TxnResponse:
        while True:
            try:
                return self._client.once("KV/Txn", request, pb.TxnResponse)
            except (UnavailableError, EtcdDeniedError) as error:
                unanswered()
                if self.waiting_since_ms is None:
                    self.waiting_since_ms = wall_clock_ms()
                    self._pauses.reset()
                    _log.warning("%s: a commit waits for etcd: %s", self.name, error)
                if self._closed.wait(self._pauses.failed()):
                    raise StorageError(
                        f"{self.name}: a commit is in doubt, the log is closing", why=_reason(error)
                    ) from error

    def _put_parts(self, sequence: int, body: bytes) -> int:
        """Put a large body in parts, which become valid with their frame; returns the number of parts."""
        count = -(-len(body) // PART_BYTES)
        for part in range(1, count + 1):
            value = body[(part - 1) * PART_BYTES : part * PART_BYTES]
            put = _put(self.keys.part(sequence, self._logs.term, part), value)
            answer = self._answered(pb.TxnRequest(compare=[self._logs.leads()], success=[put]), lambda: None)
            if not answer.succeeded:
                raise _fenced()
        return count

    def _refused(self, error: RefusedError) -> StorageError:
        if is_full(error):
            self._logs.is_full(error)
            return OutOfSpaceError(f"{self.name}: etcd is full, commits wait", why=_reason(error), hint=error.hint)
        return StorageError(f"{self.name}: etcd rejected a commit", why=_reason(error), hint=error.hint)

    def _wait_for_room(self) -> None:
        with self._room:
            if not self._room.wait_for(lambda: not self._retention.is_full, _ROOM_S):
                raise OutOfSpaceError(
                    f"{self.name}: the log in etcd has no room, commits wait",
                    why=f"its commits have {self._retention.stored_bytes} bytes, and LMDB does not contain them yet",
                    hint="check the disk of the data directory; commits then continue automatically",
                )

    def release(self, sequence: int) -> None:
        """Allow etcd to delete the commits up to ``sequence``, which LMDB contains [CommitLog]."""
        with self._room:
            self._retention.release(sequence)
            if self._retention.is_scarce:
                self._logs.hurry()

    def deletable(self, members: Sequence[int], *, all_possible: bool = False) -> int | None:
        """Return the last commit to delete; None if there is none."""
        with self._room:
            last = self._retention.delete(members, all_possible=all_possible)
        return last if last > self._done else None

    def deletion_done(self) -> None:
        """Register that etcd has deleted the commits that :meth:`deletable` returned."""
        with self._room:
            self._done = self._retention.deleted
            self._room.notify_all()

    def may_wait(self) -> bool:
        """Return True: a commit always waits for the network [CommitLog]."""
        return True

    def is_scarce(self) -> bool:
        """True if LMDB should be updated, so that commits can be deleted from etcd [CommitLog]."""
        return self._retention.is_scarce

    def close(self) -> None:
        """Stop waiting for etcd [CommitLog]."""
        self._closed.set()


def is_full(error: RefusedError) -> bool:
    """Return True if etcd refused a request because its database is full (NOSPACE)."""
    return "space exceeded" in error.text


def _fenced() -> FencedError:
    """Return the error of a node that is not active any more."""
    return FencedError(
        "cluster: this node is not active any more",
        why="its leadership ended: the lease expired, or it was handed over",
        hint="it restarts as a standby; clients connect to the active node",
    )


def _reason(error: PenstockError) -> str:
    """Return the text of an error as the cause of another one, which has the remedy."""
    return error.what if error.why is None else f"{error.what}: {error.why}"


def _put(key: bytes, value: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value))


def _unchanged(key: bytes, revision: int) -> pb.Compare:
    """Return the comparison that the key has this modification revision (0: it does not exist)."""
    return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=revision)
