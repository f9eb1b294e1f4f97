"""Interfaces of the storage that the broker's engine uses: the log of a store, and files of staged rows.

`penstock.tube.storage` implements these classes; tests may implement them in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from penstock.tube.codec.range_columns import Numbers

__all__ = ["LeftoverFile", "LogRead", "LogRecords", "LogStore", "StagedFile", "StagingStore"]


class LogRead(ABC):
    """Result of a read: messages as field 4 of a get response, their offsets, and the end of the read."""

    __slots__ = ()

    messages: list[bytes]
    """Encoded messages: one item per message, or with ``joined`` in `LogStore.read` one for several messages."""
    count: int
    """Number of messages."""
    next_offset: int
    """Offset at which the next read continues."""
    data_end: int
    """Data offset up to which the log was read."""
    damaged: list[int]
    """Offsets of messages that cannot be read because their verification failed; they are not in ``offsets``."""
    from_disk: bool
    """True if a message was read from disk."""

    @property
    @abstractmethod
    def offsets(self) -> list[int]:
        """Offset of each message, computed on demand."""


class LogRecords(NamedTuple):
    """Consecutive records of one partition as stored in a data file, not verified.

    For each record: its index offset, its append time (ms since 1970), its data offset and its size in bytes.
    """

    data: bytes
    offsets: Numbers
    times: Numbers
    positions: Numbers
    sizes: Numbers
    next_offset: int


class LogStore(ABC):
    """The log of one store of a topic. Offsets are byte positions in its index, multiples of 28."""

    __slots__ = ()

    min_offset: int
    """Index offset of the oldest message stored."""
    durable_end: int
    """Index offset after the newest readable message, which has reached the topic's durability."""
    durable_data_end: int
    """The corresponding data offset in bytes."""
    unwritten_bytes: int
    """Appended bytes that are not committed; the caller of `append_many` limits them."""
    immediate: bool
    """Whether messages are readable before they are written (durability "memory")."""
    epochs: list[tuple[int, int]]
    """Pairs of epoch, a random number, and end of the log at its beginning, oldest first; a restart that may have lost
    readable messages begins an epoch."""

    @property
    @abstractmethod
    def min_data_offset(self) -> int:
        """Data offset of the oldest message stored."""

    @abstractmethod
    def append_many(
        self,
        partition_id: int,
        datas: list[bytes],
        sums: list[int],
        flags: list[int],
        keys: list[int],
        message_id: int,
        now_ms: int,
        marker: bytes = b"",
    ) -> tuple[int, int]:
        """Append messages in memory; returns the index offset of the first one and the append time (ms) of all.

        ``sums`` are CRC-32 of ``datas``. Message ids rise by one from ``message_id``; ``keys`` are filter codes, -1 for
        none. The append time is not less than that of any earlier message. ``marker`` identifies the idempotent
        producer of the first message (`codec.message.encode_marker`). The messages are durable after the next commit of
        the store.
        """

    @abstractmethod
    def read(
        self,
        partition_id: int,
        start: int,
        *,
        end: int | None = None,
        keys: Set[int] | None = None,
        max_bytes: int = 512 << 10,
        max_messages: int = 1 << 31,
        joined: bool = False,
    ) -> LogRead:
        """Read messages of one partition from offset ``start`` up to ``end`` (at most and by default the durable end).

        Reads at most ``max_bytes`` (in the reference's record sizes) and ``max_messages``, but at least one message if
        there is one; with ``keys`` only messages with one of these key codes. ``next_offset`` is the offset after the
        last message if a limit stopped the read, otherwise ``end``. ``start`` must be within ``[min_offset,
        durable_end]``. ``joined``: several messages may be returned as one item, which is faster.
        """

    @abstractmethod
    def records(
        self, partition_id: int, start: int, *, end: int, max_bytes: int, max_messages: int
    ) -> LogRecords | None:
        """Return the records that `read` would return without ``keys``, up to the end of their file.

        None if they are in memory, in an unreadable file, or one of the messages is lost.
        """

    @abstractmethod
    def first_gap(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first range ``[from, to)`` of lost messages within ``[start, end)``; None if no message is lost.

        The partition of lost messages is not known.
        """

    @abstractmethod
    def times(self, offsets: Sequence[int]) -> list[int]:
        """Return the append times (ms) of the messages at ``offsets``, which are ascending and below the durable
        end."""

    @abstractmethod
    def plan(self, partition_id: int, start: int, end: int | None, max_messages: int) -> tuple[int, int]:
        """Return end and message count of the longest range from ``start`` with at most ``max_messages`` of the
        partition.

        The end is ``end`` (or the durable end) if all messages fit, otherwise the offset of the first message that does
        not.
        """

    @abstractmethod
    def lag(self, partition_id: int, start: int) -> tuple[int, int, bool]:
        """Return the lag of a reader of a partition at offset ``start``.

        The result is the number of messages after ``start``, the append time (ms) of the first of them (0: there are
        none), and whether both are exact. No index is loaded: where it is not in memory, the messages of all partitions
        of the store are counted.
        """

    @abstractmethod
    def offset_at(self, time_ms: int) -> int:
        """Return the offset of the first message appended at ``time_ms`` or later; the durable end if there is none."""

    @abstractmethod
    def data_offset(self, offset: int) -> int:
        """Return the data offset of index offset ``offset``, which is at most the durable end."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StagedFile(ABC):
    """The rows that one attempt of a task staged.

    ``rows`` and ``size`` (bytes) count appended rows, ``durable_rows`` rows that survive a crash.
    """

    __slots__ = ()

    rows: int
    size: int
    durable_rows: int

    @abstractmethod
    def append(self, body: bytes, rows: int) -> None:
        """Append a record of ``rows`` rows in memory; it is durable after the next commit."""

    @abstractmethod
    def read(self) -> Iterator[tuple[bytes, int]]:
        """Return the bodies of the durable records after the first, each with its number of rows.

        Raises:
            StorageError: a record is damaged. OSError: the disk fails.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove the file with the next commit."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StagingStore(ABC):
    """The files of staged rows of one broker. ``unwritten_bytes``: appended, but not durable yet."""

    __slots__ = ()

    unwritten_bytes: int

    @abstractmethod
    def add(self, about: bytes) -> StagedFile:
        """Create a file whose first record is ``about``."""


class LeftoverFile(NamedTuple):
    """A staged file of an earlier process, and the body of its first record."""

    file: StagedFile
    about: bytes
