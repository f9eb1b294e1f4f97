"""The interface between an LMDB environment and the log in front of it: where commits are durable before LMDB has them.

Implementations: :class:`~penstock.runtime.io.wal_segments.SegmentLog`, files next to the environment, and
:class:`penstock.cluster.log.EtcdLog`, an etcd cluster. The log of each environment is independent of the others: its
frames have sequences of their own.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from mypy_extensions import mypyc_attr

__all__ = ["CommitLog", "LogPosition", "decode_position"]

_POSITION: Final = Struct(">8sIQ")  # the crc32 of these follows


class LogPosition(NamedTuple):
    """A commit of a log. LMDB stores the last one it contains, in the transaction of the rows.

    ``identity``: 8 random bytes of the log. ``epoch``: one opening of segments; 0 in etcd. ``sequence`` counts commits:
    of an epoch from 1, in etcd of the log.
    """

    identity: bytes
    epoch: int
    sequence: int

    def encode(self) -> bytes:
        """Encode it as it is stored, with its checksum."""
        stored = _POSITION.pack(*self)
        return stored + crc32(stored).to_bytes(4, "big")


def decode_position(stored: bytes) -> LogPosition | None:
    """Decode a stored position; None if it is damaged."""
    if len(stored) != _POSITION.size + 4:
        return None
    position = LogPosition(*_POSITION.unpack_from(stored))
    return position if position.encode() == stored else None


@mypyc_attr(allow_interpreted_subclasses=True)
class CommitLog:
    """A log of commits. One thread calls :meth:`append`; another one may release and grow meanwhile.

    Order of the calls: :meth:`recover`, :meth:`start`, then the others. A base class and no Protocol: compiled code
    calls its methods directly.
    """

    def recover(self, applied: LogPosition | None) -> tuple[list[bytes], LogPosition]:
        """Return the bodies of the commits after ``applied``, in order, and the position that LMDB has with them.

        ``applied`` None: LMDB is new. May be called repeatedly, and before ``start`` only.

        Raises:
            StorageError: a commit is missing, or LMDB belongs to another log.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Accept commits after the recovered ones, which LMDB now contains. OSError, StorageError."""

    def append(self, sequence: int, body: bytes) -> bool:
        """Make the commit ``sequence`` durable; False, and nothing is written, if LMDB has to take it at once.

        Raises:
            DiskFullError, OutOfSpaceError: the same commit may be repeated, and no other.
            OSError: what was written is unknown.
            StorageError: nothing can be committed any more.
        """
        raise NotImplementedError

    def release(self, sequence: int) -> None:
        """LMDB contains all commits up to ``sequence``, durably."""

    def may_wait(self) -> bool:
        """True if the next commit may take long: it must not run in the event loop."""
        return False

    def is_scarce(self) -> bool:
        """True if there will soon be no room: LMDB should be updated, and the log should grow."""
        return False

    def grow(self) -> None:
        """Make room for commits, unless there is enough. OSError: there is no disk space."""

    def exists(self) -> bool:
        """True if there is a log that an environment without one must apply and remove."""
        return False

    def remove(self) -> None:
        """Remove the log, all of which LMDB contains; not after ``start``. OSError."""

    def close(self) -> None:
        """Close files and connections; the log is kept."""
