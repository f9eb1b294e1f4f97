"""The interface of the log in front of an LMDB environment: a commit is durable in the log before LMDB contains it.

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

_POSITION: Final = Struct(">8sIQ")  # followed by their CRC-32


class LogPosition(NamedTuple):
    """Position of a commit in a log. LMDB stores the position of the last commit it contains, in the transaction of the
    rows.

    ``identity``: 8 random bytes of the log. ``epoch``: number of the opening of the segments; 0 in etcd. ``sequence``
    counts commits from 1: in segments per epoch, in etcd per log.
    """

    identity: bytes
    epoch: int
    sequence: int

    def encode(self) -> bytes:
        """Encode the position in its stored form, with a checksum."""
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
    """A log of commits. One thread calls :meth:`append`; another one may call :meth:`release` and :meth:`grow`
    meanwhile.

    Order of the calls: :meth:`recover`, :meth:`start`, then the others. It is a base class instead of a Protocol so
    that compiled code calls its methods directly.
    """

    def recover(self, applied: LogPosition | None) -> tuple[list[bytes], LogPosition]:
        """Return the bodies of the commits after ``applied``, in order, and the position that LMDB has with them.

        ``applied`` None: LMDB is new. May be called repeatedly, and before ``start`` only.

        Raises:
            StorageError: a commit is missing, or LMDB belongs to another log.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Accept commits after the recovered ones, which LMDB now contains. Raises OSError, StorageError."""

    def append(self, sequence: int, body: bytes) -> bool:
        """Make the commit ``sequence`` durable. Returns False and writes nothing if the commit must be written to LMDB
        instead.

        Raises:
            DiskFullError, ShortageError: only the same commit may be retried. OSError: it is unknown how much was
            written. StorageError: no further commit is possible.
        """
        raise NotImplementedError

    def release(self, sequence: int) -> None:
        """Report that LMDB durably contains all commits up to ``sequence``."""

    def may_wait(self) -> bool:
        """True if the next commit may take long: it must not run in the event loop."""
        return False

    def is_scarce(self) -> bool:
        """True if the log is nearly full: LMDB should be updated, and the log should grow."""
        return False

    def grow(self) -> None:
        """Make room for commits unless there is enough. Raises OSError if there is no disk space."""

    def exists(self) -> bool:
        """True if there is a log that an environment without one must apply and remove."""
        return False

    def remove(self) -> None:
        """Remove the log after LMDB contains all of it; not after ``start``. Raises OSError."""

    def close(self) -> None:
        """Close files and connections; the log is not deleted."""
