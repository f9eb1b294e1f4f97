"""A store: one data log and one index log that its partitions share.

Two threads use it and share only the files as mutable state. The loop's thread appends (in memory), reads, and moves
the durable end; the committing thread writes and syncs the passed work:

    store.append(...)                     # loop: assigns the offset; the message is not readable yet
    work = store.take_unwritten()                   # loop: takes all messages appended since the last call
    store.write(work); store.sync(work)   # committing thread
    store.written(work)                   # loop: from now on it is readable

Only messages below ``durable_end`` are readable, so the message at an offset that a consumer has read never changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.io.files import Files
from penstock.tube.storage.index import INDEX_RECORD_BYTES
from penstock.tube.storage.reads import LogReads
from penstock.tube.storage.record import EncodedRun, encode_run
from penstock.tube.storage.recovery import Loss, recover
from penstock.tube.storage.retention import Retention, expired
from penstock.tube.storage.segment import Segment

__all__ = ["LogWrite", "Store", "StoreLimits"]

_TAIL_STEP = 256 << 10
_LEAST_TAIL = 64


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Sizes of a store.

    A segment is closed after an append reached ``segment_bytes`` of data or ``segment_records`` index records (the
    reference: 1 GiB, 700,000; penstock's segments are smaller because the newest one is read completely after a crash).
    The file is filled with zeros in advance, from ``fill_bytes_least`` up to ``fill_bytes_most`` at a time: an
    fdatasync takes half the time if the file is not extended. During commits of ``fill_below_bytes`` and more, blocks
    are only allocated, because writing zeros would cost more than it saves. ``tail_bytes`` of the newest messages stay
    in memory.
    """

    segment_bytes: int = 64 << 20
    segment_records: int = 700_000
    fill_bytes_least: int = 256 << 10
    fill_bytes_most: int = 4 << 20
    fill_below_bytes: int = 64 << 10
    tail_bytes: int = 16 << 20


class LogWrite:
    """Work of a commit for one store: writes to segments in order, and the end of the log afterwards."""

    __slots__ = ("data_end", "end", "pieces", "size")

    def __init__(self, pieces: list[_SegmentWrite], end: int, data_end: int, size: int) -> None:
        self.pieces = pieces
        self.end = end
        self.data_end = data_end
        self.size = size


class _SegmentWrite:
    """Consecutive records of one segment; ``before`` is the segment to close first if this one is new."""

    __slots__ = ("before", "data_from", "index", "ordinal_from", "parts", "segment")

    def __init__(self, segment: Segment, before: Segment | None) -> None:
        self.segment = segment
        self.before = before
        self.ordinal_from = segment.count
        self.data_from = segment.data_bytes
        self.parts: list[bytes] = []
        self.index = b""


class Store(LogReads):
    """The log of one store on disk. Offsets are byte positions in the index log, multiples of 28."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        store_id: int,
        *,
        limits: StoreLimits = StoreLimits(),
        deep: bool = False,
        clean: bool = False,
        on_loss: Callable[[Loss], None] = lambda _: None,
    ) -> None:
        """Open the store in ``directory`` and recover it; nothing is created before the first write.

        ``on_loss`` is called once for every loss, during recovery or later. ``deep`` and ``clean``: see `recover`.
        Raises OSError if the disk fails.
        """
        super().__init__(files, store_id, on_loss)
        self.directory = directory
        self.limits = limits
        self.immediate = False
        self.synced = True
        """True if commits are synced (durability "durable")."""
        self.epochs: list[tuple[int, int]] = []
        self.unwritten_bytes = 0
        segments, self.recovery = recover(files, directory, store_id, deep=deep, clean=clean)
        for loss in self.recovery.losses:
            on_loss(loss)
        self._segments = segments
        self._starts = [segment.start for segment in segments]
        # Newest file: end of the filled part and of the file. Size of recent commits (a decaying maximum).
        self._filled = self._extended = segments[-1].data_bytes if segments else 0
        self._commit_bytes = 0
        self._pieces: list[_SegmentWrite] = []
        self._pending_bytes = 0
        self._marks: deque[int] = deque()
        self._unmarked = 0
        newest = segments[-1] if segments else None
        self.min_offset = segments[0].start if segments else 0
        self.end_offset = newest.end if newest else 0
        self.data_end = newest.data_end if newest else 0
        self.durable_end = self.end_offset
        self.durable_data_end = self.data_end
        self._written_end = self.end_offset
        self.last_time = max((segment.last_time for segment in segments), default=0)

    @property
    def min_data_offset(self) -> int:
        return self._segments[0].data_start if self._segments else 0

    @property
    def written_end(self) -> int:
        """Offset below which all messages are in the files."""
        return self._written_end

    def append(
        self,
        partition_id: int,
        data: bytes,
        flag: int,
        checksum: int,
        key_code: int,
        message_id: int,
        now_ms: int,
        marker: bytes = b"",
    ) -> tuple[int, int]:
        """Append a message in memory; returns its index offset and append time, which never decreases.

        It is durable and readable after the next `take_unwritten`, `write`, `sync` and `written`. ``checksum``: CRC-32
        of ``data``. ``marker``: the producer of this message and the following ones (`codec.message.encode_marker`).
        """
        return self.append_many(partition_id, [data], [checksum], [flag], [key_code], message_id, now_ms, marker)

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
        offset = self.end_offset
        time_ms = self.last_time = max(self.last_time, now_ms)
        limits = self.limits
        count, done = len(datas), 0
        while done < count:
            segment = self._segments[-1] if self._segments else None
            if segment is None or segment.data_bytes >= limits.segment_bytes or segment.count >= limits.segment_records:
                segment = self._roll()
            elif not self._pieces:
                self._pieces.append(_SegmentWrite(segment, None))
            run = encode_run(
                datas,
                sums,
                flags,
                keys,
                done,
                message_id + done,
                marker,
                self.data_end,
                segment.count,
                segment.data_start + limits.segment_bytes,
                limits.segment_records,
                partition_id,
                time_ms,
                (self.end_offset - max(self.durable_end, segment.start)) // INDEX_RECORD_BYTES,
                self.immediate,
            )
            self._pieces[-1].parts += run.parts
            encoded = len(run.sizes)
            segment.add(partition_id, run, keys if encoded == count else keys[done : done + encoded], time_ms)
            self._appended(run)
            # The rest begins the next segment.
            done += encoded
            marker = b""
        return offset, time_ms

    def _appended(self, run: EncodedRun) -> None:
        """Advance the ends of the log by the records of ``run``."""
        size = run.size
        self.data_end += size
        self._pending_bytes += size
        self.unwritten_bytes += size
        end = self.end_offset
        self.end_offset = end + len(run.sizes) * INDEX_RECORD_BYTES
        if self._unmarked + size < _TAIL_STEP:
            self._unmarked += size
        else:
            self._mark(end, run.sizes)
        if self.immediate:
            self.durable_end = self.end_offset
            self.durable_data_end = self.data_end

    def _mark(self, end: int, sizes: list[int]) -> None:
        """Store offsets at which the messages in memory may be dropped, and drop the oldest ones."""
        unmarked = self._unmarked
        for one in sizes:
            end += INDEX_RECORD_BYTES
            unmarked += one
            if unmarked >= _TAIL_STEP:
                unmarked = 0
                self._marks.append(end)
        self._unmarked = unmarked
        self._cut_tail()

    def _roll(self) -> Segment:
        before = self._segments[-1] if self._segments else None
        segment = Segment(self.directory, self.end_offset, self.data_end)
        self._segments.append(segment)
        self._starts.append(segment.start)
        self._pieces.append(_SegmentWrite(segment, before))
        if before is not None:
            self._touch_index(before)
        return segment

    @property
    def dirty(self) -> bool:
        """Whether `take_unwritten` has work to return."""
        return bool(self._pieces)

    def take_unwritten(self) -> LogWrite:
        """Return messages appended since the last call as work for the committing thread."""
        for piece in self._pieces:
            # All pieces but the last belong to complete segments.
            piece.index = piece.segment.index_bytes(piece.ordinal_from, piece.segment.count)
        work = LogWrite(self._pieces, self.end_offset, self.data_end, self._pending_bytes)
        self._pieces = []
        self._pending_bytes = 0
        return work

    def has_room(self, work: LogWrite) -> bool:
        """Return whether the file of ``work`` exists and is filled up to the end of the write. Call while no commit
        runs."""
        for piece in work.pieces:
            if piece.segment.data_file is None or piece.data_from + work.size > self._filled:
                return False
        return True

    def write(self, work: LogWrite) -> None:
        """Write ``work`` to the files (page cache). Called in the committing thread.

        Raises DiskFullError or NoDescriptorError: the same ``work`` may be written again. Other OSError: the store must
        not be written any more.
        """
        for piece in work.pieces:
            segment = piece.segment
            if segment.data_file is None:
                self._begin(segment, piece.before)
            if not piece.parts:
                continue
            data = b"".join(piece.parts)
            self._fill(segment, piece.data_from, len(data))
            assert segment.data_file is not None
            assert segment.index_file is not None
            segment.data_file.write(piece.data_from, data)
            # Not synced with each commit: recovery makes the newest index agree with the data.
            segment.index_file.write(piece.ordinal_from * INDEX_RECORD_BYTES, piece.index)

    def sync(self, work: LogWrite) -> None:
        """Make ``work``, which was written, durable. Called in the committing thread.

        Raises OSError: afterwards the broker must not acknowledge messages.
        """
        # Earlier segments became durable when the last one was created.
        file = work.pieces[-1].segment.data_file if work.pieces else None
        if file is not None:
            file.sync()

    def written(self, work: LogWrite) -> None:
        """Make the messages of committed ``work`` readable."""
        self.unwritten_bytes -= work.size
        self._written_end = work.end
        if work.end > self.durable_end:
            self.durable_end = work.end
            self.durable_data_end = work.data_end
        self._cut_tail()

    def _begin(self, segment: Segment, before: Segment | None) -> None:
        # The older segment becomes durable before the newer one exists. So any defect that recovery finds in a segment
        # with a successor is damage, never an interrupted write.
        if before is None:
            self._files.make_dir(self.directory)
        else:
            self._seal(before)
        data_file = self._files.create(segment.data_path)
        index_file = self._files.create(segment.index_path)
        self._files.sync_dir(self.directory)
        # At the end: if one of the steps has no space or no descriptor, the next attempt repeats all of them.
        segment.data_file, segment.index_file = data_file, index_file
        self._filled = self._extended = 0
        if before is not None:
            before.sealed = True

    def _seal(self, segment: Segment) -> None:
        if segment.data_file is None or segment.index_file is None:
            return
        # Complete all messages first: the file must not end with the last message while an earlier one is being
        # written.
        segment.data_file.sync()
        segment.data_file.truncate(segment.data_bytes)
        segment.data_file.sync()
        segment.index_file.sync()

    def _fill(self, segment: Segment, begin: int, size: int) -> None:
        """Extend the file for a following write of ``size`` bytes at ``begin``."""
        end = begin + size
        self._commit_bytes = max(size, self._commit_bytes * 7 // 8)
        if end <= self._filled:
            return
        limits, file = self.limits, segment.data_file
        assert file is not None
        large = self._commit_bytes >= limits.fill_below_bytes
        if large and end + _LEAST_TAIL <= self._extended:
            return
        step = min(max(self._extended, limits.fill_bytes_least), limits.fill_bytes_most)
        # Never fill exactly: for recovery, a file that ends with its last message was closed.
        extended = max(min(end + step, limits.segment_bytes), end + _LEAST_TAIL)
        if large:
            file.allocate(begin, extended - begin)
        else:
            file.write(end, bytes(extended - end))
            self._filled = extended
        self._extended = max(extended, self._extended)

    def written_segments(self) -> list[tuple[Segment, int, int]]:
        """Return the segments that have files, oldest first, with the bytes of their data and index that are written.

        Call while no commit runs, or use only those that are ``sealed``.
        """
        found = []
        for segment in self._segments:
            if not segment.sealed and segment.data_file is None:
                continue
            count = min(segment.count, (self._written_end - segment.start) // INDEX_RECORD_BYTES)
            data_bytes = segment.data_bytes
            if count < segment.count:
                data_bytes = int(segment.index()["position"][count]) - segment.data_start
            found.append((segment, data_bytes, count * INDEX_RECORD_BYTES))
        return found

    def close(self) -> None:
        """Truncate the filled tail, sync and close the files, after all work of `take_unwritten` was written."""
        if self._segments:
            self._seal(self._segments[-1])
        self.abandon()

    def abandon(self) -> None:
        """Close the files without changes, after a failed commit or before deleting them."""
        for segment in self._segments:
            segment.close()

    def _cut_tail(self) -> None:
        """Keep the newest messages in memory, within ``tail_bytes``; unwritten messages are always kept."""
        marks = self._marks
        keep = self.limits.tail_bytes // _TAIL_STEP
        while len(marks) > keep and marks[0] <= self._written_end:
            cut = marks.popleft()
            for segment in self._segments:
                if segment.start >= cut:
                    break
                if segment.wire_bytes:
                    ordinal = (min(cut, segment.end) - segment.start) // INDEX_RECORD_BYTES
                    segment.wire_bytes -= sum(part.drop_below(ordinal) for part in segment.parts())

    def expire(self, retention: Retention, now_ms: int) -> list[Segment]:
        """Remove expired segments from the store and return them; pass them to `remove` in the committing thread.

        A newest segment whose messages are all too old is closed, so that it expires the next time.
        """
        if not self._segments:
            return []
        newest = self._segments[-1]
        if newest.count and newest.last_time < now_ms - retention.max_age_ms and newest.end <= self._written_end:
            self._roll()
        # The file name of the newest segment keeps the end of the log. Until that file exists, the name of the previous
        # segment does, and that segment is not sealed.
        closed = [segment for segment in self._segments[:-1] if segment.sealed]
        count = expired(closed, self._segments[-1], retention, now_ms)
        gone = self._segments[:count]
        if gone:
            del self._segments[:count]
            del self._starts[:count]
            self.min_offset = self._starts[0]
            for segment in gone:
                if segment in self._recent:
                    self._recent.remove(segment)
        return gone

    def remove(self, segments: Sequence[Segment]) -> None:
        """Delete the files of segments that `expire` returned. Called in the committing thread. Raises OSError."""
        for segment in segments:
            segment.close()
            # Delete the data first: recovery quarantines an index without data.
            self._files.remove(segment.data_path)
            self._files.remove(segment.index_path)
            # Sync each removal, so that they are durable in order: if a power loss undid only the removal of an older
            # segment, the gap would look like damage.
            self._files.sync_dir(self.directory)
