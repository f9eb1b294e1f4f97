"""Commits of one log as a state machine: the meaning of etcd's answers, without etcd.

A commit is a transaction. It compares the revision of the leadership key with the term of this node, and the revision
of the log's head with that of the last commit; then it puts the frame and the head. If a comparison fails, the current
head and leadership key are read after it: the transaction does not read them, because etcd would have to store and
replicate these reads with each commit. One commit is in flight at a time.

Without an answer a commit is *in doubt*: etcd may have executed it, may do so later, or never. It is repeated with the
same sequence and the same comparisons, so that at most one of its attempts succeeds. The head shows whether one has
succeeded: no other node puts a head of this term.
"""

from __future__ import annotations

from enum import StrEnum
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from penstock.errors import StorageError

__all__ = ["FRAME_BYTES", "CommitFrame", "Head", "LogCommits", "Verdict", "decode_frame", "decode_head", "encode_frame"]

_HEAD: Final = Struct(">8sQQQ")
_FRAME: Final = Struct(">QQQQII")
"""Term, sequence, time in ms, bytes of all commits up to this one, parts, CRC-32 of the body."""
FRAME_BYTES: Final = _FRAME.size
"""Size of a frame without its body, in bytes."""


class Verdict(StrEnum):
    """The state of a commit after an answer."""

    ACCEPTED = "accepted"
    """The commit is durable in etcd."""
    FENCED = "fenced"
    """This node is not active any more and must stop serving."""
    DIVERGED = "diverged"
    """The log in etcd is not the one that this node wrote: a backup of etcd was restored."""


class Head(NamedTuple):
    """The newest commit of a log in etcd. ``revision``: revision of the key, which the next commit compares.

    ``total_bytes``: size of all commits of the log, including deleted ones.
    """

    identity: bytes
    sequence: int
    term: int
    revision: int = 0
    total_bytes: int = 0

    def encode(self) -> bytes:
        """Encode the value of the key."""
        stored = _HEAD.pack(self.identity, self.sequence, self.term, self.total_bytes)
        return stored + crc32(stored).to_bytes(4, "big")


def decode_head(value: bytes, revision: int) -> Head:
    """Decode the value of a head. Raises StorageError if it is damaged."""
    if len(value) != _HEAD.size + 4 or crc32(value[:-4]).to_bytes(4, "big") != value[-4:]:
        raise _damaged("the head of the log")
    identity, sequence, term, total_bytes = _HEAD.unpack_from(value)
    return Head(identity, sequence, term, revision, total_bytes)


class CommitFrame(NamedTuple):
    """A commit in its stored form. ``parts`` 0: ``body`` is complete; otherwise it is in that many other keys.

    ``time_ms``: time of the cluster's clock at which it was written. ``total_bytes``: size of all commits up to this
    one.
    """

    term: int
    sequence: int
    time_ms: int
    total_bytes: int
    parts: int
    checksum: int
    body: bytes


def encode_frame(head: Head, time_ms: int, body: bytes, parts: int = 0) -> bytes:
    """Encode the frame of the commit described by ``head``; if there are ``parts``, without the body."""
    fixed = _FRAME.pack(head.term, head.sequence, time_ms, head.total_bytes, parts, crc32(body))
    return fixed + (b"" if parts else body)


def decode_frame(value: bytes) -> CommitFrame:
    """Decode a frame. Raises StorageError if it is damaged."""
    if len(value) < _FRAME.size:
        raise _damaged("a commit of the log")
    term, sequence, time_ms, total_bytes, parts, checksum = _FRAME.unpack_from(value)
    frame = CommitFrame(term, sequence, time_ms, total_bytes, parts, checksum, value[_FRAME.size :])
    if not frame.parts and crc32(frame.body) != frame.checksum:
        raise _damaged(f"commit {frame.sequence} of the log")
    return frame


def _damaged(what: str) -> StorageError:
    return StorageError(
        f"etcd: {what} is damaged",
        why="its checksum is wrong: another program wrote the key, or the database of etcd is damaged",
        hint="restore etcd from a backup, or start from the data directory of the node that was active last",
    )


class LogCommits:
    """Commits of one log in one term, after ``head``. ``term``: revision of the leadership key of this node."""

    def __init__(self, term: int, head: Head) -> None:
        self.term = term
        self.head = head
        """The last accepted commit."""
        self.ended: Verdict | None = None
        """Reason why no further commit is possible."""
        self._in_flight: Head | None = None
        self._unanswered = False

    @property
    def in_doubt(self) -> bool:
        """True if etcd may have executed an attempt of the commit in flight."""
        return self._unanswered

    def begin(self, sequence: int, size: int) -> Head:
        """Begin a commit of ``size`` bytes, or repeat the commit in flight, for which etcd had no space.

        Returns the head that the commit puts.
        """
        assert self.ended is None
        assert sequence == self.head.sequence + 1, "commits have no gaps"
        if self._in_flight is None:
            self._in_flight = Head(self.head.identity, sequence, self.term, 0, self.head.total_bytes + size)
            self._unanswered = False
        return self._in_flight

    def unanswered(self) -> None:
        """Handle an attempt without an answer, or refused by a full or denying etcd: the caller then repeats the same
        transaction, of which an earlier attempt may have been executed."""
        assert self._in_flight is not None
        self._unanswered = True

    def accepted(self, revision: int) -> Verdict:
        """Handle a transaction whose comparisons succeeded."""
        assert self._in_flight is not None
        identity, sequence, term, _, total_bytes = self._in_flight
        self.head = Head(identity, sequence, term, revision, total_bytes)
        self._in_flight = None
        return Verdict.ACCEPTED

    def refused(self, head: Head | None, leader_revision: int) -> Verdict:
        """Handle a transaction of which a comparison failed; ``head`` and the leadership key (0: none) were read after
        it. A head of the commit in flight can only have been put by one of its attempts."""
        assert self._in_flight is not None
        mine = head is not None and head[:3] == self._in_flight[:3]
        if mine and self.in_doubt:
            assert head is not None
            return self.accepted(head.revision)
        self.ended = Verdict.FENCED if leader_revision != self.term else Verdict.DIVERGED
        return self.ended
