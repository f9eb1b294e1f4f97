"""One segment: a data file and an index file over the same range of messages, rolled and expired together.

The newest segment of a store grows in memory; its files are read only for messages that are no longer in memory. Older
segments are closed: their index is loaded on demand and dropped when least recently used.
"""

from __future__ import annotations

import errno
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.runtime.io.files import File, Files
from penstock.tube.storage.index import INDEX_RECORD, INDEX_RECORD_BYTES, IndexArray, as_array
from penstock.tube.storage.record import COMPILED, EncodedRun, messages_at, messages_joined

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["PartitionPart", "Segment"]

# Reads from disk: records closer together than this are fetched with one read call, because copying the bytes in
# between costs less than a call. The second number is the maximum size of a read.
_GAP_BYTES = 16 << 10
_RUN_BYTES = 4 << 20
_GONE = frozenset((errno.ENOENT, errno.EIO))

Numbers: TypeAlias = npt.NDArray[np.int64]


class PartitionPart:
    """The messages of one partition in one segment, in order; the newest of them encoded in memory.

    ``ordinals[k]`` is the ordinal in the segment of the partition's k-th message, ``ends[k]`` the sum of the record
    sizes up to and including it, ``keys[k]`` its key code; ``wire[k - wire_from]`` is the encoded message, for k >=
    wire_from.
    """

    __slots__ = ("ends", "keys", "ordinals", "wire", "wire_from")

    def __init__(self) -> None:
        self.ordinals: array[int] = array("I")
        self.ends: array[int] = array("Q")
        self.keys: array[int] = array("i")
        self.wire: list[bytes] = []
        self.wire_from = 0

    def drop_below(self, ordinal: int) -> int:
        """Drop encoded messages below ``ordinal``, which are on disk; returns the bytes that were freed."""
        count = bisect_left(self.ordinals, ordinal) - self.wire_from
        if count <= 0:
            return 0
        freed = sum(map(len, self.wire[:count]))
        del self.wire[:count]
        self.wire_from += count
        return freed


class Segment:
    """A range of a store's log that starts at index offset ``start`` and data offset ``data_start``."""

    __slots__ = (
        "_index",
        "_parts",
        "count",
        "data_bytes",
        "data_file",
        "data_start",
        "directory",
        "index_file",
        "last_time",
        "sealed",
        "start",
        "wire_bytes",
    )

    def __init__(self, directory: Path, start: int, data_start: int) -> None:
        self.directory = directory
        self.start = start
        self.data_start = data_start
        self.count = 0
        self.data_bytes = 0
        self.last_time = 0
        self.wire_bytes = 0
        self.sealed = False
        """True if the segment is closed, completely durable, and followed by another segment."""
        self.data_file: File | None = None
        self.index_file: File | None = None
        self._index: bytes | bytearray | None = bytearray()
        self._parts: dict[int, PartitionPart] | None = {}

    @property
    def end(self) -> int:
        """Index offset after the last message."""
        return self.start + self.count * INDEX_RECORD_BYTES

    @property
    def data_end(self) -> int:
        """Data offset after the last message."""
        return self.data_start + self.data_bytes

    @property
    def data_path(self) -> Path:
        return self.directory / f"{self.start:020d}-{self.data_start:020d}.tube"

    @property
    def index_path(self) -> Path:
        return self.directory / f"{self.start:020d}.index"

    def add(self, partition_id: int, run: EncodedRun, keys: list[int], time_ms: int) -> None:
        """Add the next messages, of one partition, with their append time.

        The first record begins at ``data_end``. Only the newest segment grows.
        """
        index, parts = self._index, self._parts
        assert parts is not None
        assert isinstance(index, bytearray)
        index += run.entries
        part = parts.get(partition_id)
        if part is None:
            part = parts[partition_id] = PartitionPart()
        count = len(run.sizes)
        before: i64 = part.ends[-1] if part.ends else 0
        ends: list[int] = []
        for size in run.sizes:
            before += size
            ends.append(before)
        part.ordinals.extend(range(self.count, self.count + count))
        part.ends.extend(ends)
        part.keys.extend(keys)
        part.wire += run.messages
        wire_bytes: i64 = 0
        for message in run.messages:
            wire_bytes += len(message)
        self.wire_bytes += wire_bytes
        self.last_time = time_ms
        self.count += count
        self.data_bytes += run.size

    def index_bytes(self, first: int, end: int) -> bytes:
        """Return the index records of the ordinals ``[first, end)`` of a growing segment."""
        assert self._index is not None
        return bytes(self._index[first * INDEX_RECORD_BYTES : end * INDEX_RECORD_BYTES])

    def adopt(self, index: bytes, data_bytes: int, *, growing: bool = False) -> None:
        """Use an index that was read or rebuilt, and drop all data derived from an earlier index."""
        self._index = bytearray(index) if growing else index
        self.count = len(index) // INDEX_RECORD_BYTES
        self.data_bytes = data_bytes
        self.wire_bytes = 0
        if self.count:
            self.last_time = INDEX_RECORD.unpack_from(index, len(index) - INDEX_RECORD_BYTES)[4]
        self._parts = {}
        if growing and self.count:
            records = as_array(index)
            for partition in np.unique(records["partition"]).tolist():
                if partition >= 0:
                    self._parts[partition] = _part_of(records, partition)

    @property
    def loaded(self) -> bool:
        """True if the index is in memory."""
        return self._index is not None

    def unload(self) -> None:
        """Drop data that can be read again. Only for closed segments without encoded messages in memory."""
        self._index = None
        self._parts = None

    def index(self) -> IndexArray:
        """The index records; release the view after use, because the index cannot grow while a view exists."""
        assert self._index is not None
        return as_array(self._index)

    def part(self, partition_id: int, *, growing: bool) -> PartitionPart | None:
        """Return the messages of one partition; None without any."""
        assert self._parts is not None
        part = self._parts.get(partition_id)
        if part is None and not growing:
            part = self._parts[partition_id] = _part_of(self.index(), partition_id)
        return part

    def parts(self) -> Sequence[PartitionPart]:
        """Return the partitions that were read so far."""
        return list(self._parts.values()) if self._parts else []

    def fetch(self, files: Files, ordinals: Sequence[int]) -> tuple[list[bytes | None], int]:
        """Read and verify encoded messages at ``ordinals`` (ascending); return them, None for damaged ones, and the
        number of damaged ones.

        A file that is missing or unreadable counts as damage of everything requested. Raises OSError for temporary
        failures (too many open files, no memory): if they counted as damage, existing messages would be skipped.
        """
        starts, ends = self._places(ordinals)
        out: list[bytes | None] = []
        try:
            with self._opened(files) as file:
                at = 0
                while at < len(starts):
                    # Reads a limited number of bytes at a time; a larger message is read separately.
                    stop = max(at + 1, int(np.searchsorted(ends, starts[at] + _RUN_BYTES, side="right")))
                    buffer, positions = _gather(file, starts[at:stop], ends[at:stop])
                    out += messages_at(buffer, positions, ordinals[at:stop], starts[at:stop] + self.data_start)
                    at = stop
        except OSError as error:
            if error.errno not in _GONE:
                raise
            out.extend([None] * (len(starts) - len(out)))
        return out, out.count(None)

    def fetch_joined(self, files: Files, ordinals: Sequence[int]) -> bytes | None:
        """Join what :meth:`fetch` returns; None if a message is damaged, or they are far apart in the file."""
        starts, ends = self._places(ordinals)
        if not COMPILED or ends[-1] - starts[0] > _RUN_BYTES:
            return None
        try:
            with self._opened(files) as file:
                buffer, positions = _gather(file, starts, ends)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return None
        seeds = (starts + self.data_start) & 0xFFFFFFFF
        return messages_joined(buffer, positions.tolist(), list(ordinals), seeds.tolist())

    def records(self, files: Files, ordinals: Sequence[int]) -> tuple[bytes, Numbers, Numbers] | None:
        """Return the records at ``ordinals`` (ascending), concatenated, with their sizes and data offsets.

        The receiver must verify them. None if the file is missing or unreadable; OSError as in :meth:`fetch`.
        """
        starts, ends = self._places(ordinals)
        sizes = ends - starts
        try:
            with self._opened(files) as file:
                buffer, positions = _gather(file, starts, ends)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return None
        if len(buffer) != int(sizes.sum()):
            # There are records of other partitions in between.
            run = np.flatnonzero(positions[1:] != positions[:-1] + sizes[:-1]) + 1
            firsts, lasts = np.concatenate(([0], run)), np.concatenate((run - 1, [len(sizes) - 1]))
            pieces = zip(positions[firsts].tolist(), (positions[lasts] + sizes[lasts]).tolist(), strict=True)
            view = memoryview(buffer)
            buffer = b"".join([view[start:end] for start, end in pieces])
        return buffer, sizes, starts + self.data_start

    def _places(self, ordinals: Sequence[int]) -> tuple[Numbers, Numbers]:
        """Return start and end of the records at ``ordinals`` in the data file."""
        index, chosen = self.index(), np.asarray(ordinals, dtype=np.int64)
        starts = (
            index["position"][chosen].astype(np.int64) - self.data_start
        )  # selecting complete index records is slow
        return starts, starts + index["size"][chosen]

    @contextmanager
    def _opened(self, files: Files) -> Iterator[File]:
        """Open the data file for the block; it is closed afterwards if it was closed before."""
        if self.data_file is not None:
            yield self.data_file
            return
        file = files.open(self.data_path)
        try:
            yield file
        finally:
            file.close()

    def close(self) -> None:
        """Release the files."""
        for file in (self.data_file, self.index_file):
            if file is not None:
                file.close()
        self.data_file = self.index_file = None


def _gather(file: File, starts: Numbers, ends: Numbers) -> tuple[bytes, Numbers]:
    """Read the records at ``[starts, ends)`` (ascending), nearby ones with one call; return them and their new
    starts."""
    first = np.flatnonzero(starts[1:] - ends[:-1] > _GAP_BYTES) + 1
    begins = starts[np.concatenate(([0], first))]
    lengths = ends[np.concatenate((first - 1, [len(ends) - 1]))] - begins
    parts = [file.read(begin, length) for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)]
    if len(parts) == 1:
        return parts[0], starts - begins[0]
    # Only at the end of the file fewer bytes than requested are read.
    before = np.concatenate(([0], np.cumsum(lengths[:-1])))
    return b"".join(parts), starts - np.repeat(begins - before, np.diff([0, *first.tolist(), len(starts)]))


def _part_of(records: IndexArray, partition: int) -> PartitionPart:
    ordinals = np.flatnonzero(records["partition"] == partition)
    part = PartitionPart()
    part.ordinals = array("I", ordinals.astype(np.uint32).tobytes())
    part.ends = array("Q", np.cumsum(records["size"][ordinals], dtype=np.uint64).tobytes())
    part.keys = array("i", records["key"][ordinals].astype(np.int32).tobytes())
    part.wire_from = len(ordinals)
    return part
