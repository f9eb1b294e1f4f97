"""A store: one data log and one index log that the partitions of a store share.

Two threads meet here and share no mutable state but the files. The loop's thread appends (in memory), reads and moves
the durable end; the committing thread writes what it was handed and syncs:

    store.append(...)                 # loop: gives the message its offset, nobody can read it yet
    work = store.take()               # loop: hands over what was appended since the last time
    store.write(work); store.sync(work)   # committing thread
    store.written(work)               # loop: from now on readers see it

Readers see messages below ``durable_end`` only, so no offset that anyone ever saw can come to mean another message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.tube.codec.message import encode_stored
from penstock.tube.storage.files import Files
from penstock.tube.storage.index import FILLER, INDEX_RECORD_BYTES
from penstock.tube.storage.record import encode_record
from penstock.tube.storage.recovery import Loss, check_segment, recover
from penstock.tube.storage.retention import Retention, expired
from penstock.tube.storage.segment import PartitionPart, Segment
from penstock.tube.storage.selection import Chosen, choose

__all__ = ["Read", "Store", "StoreLimits", "Work"]

# A filtered read looks at no more own messages than this, so that a filter that matches nothing cannot stop the loop
# for long; the position it reached is returned all the same.
_FILTER_WINDOW = 65_536
_FILTER_MOST = 262_144
_INDEXES_KEPT = 4
_TAIL_STEP = 256 << 10
_DAMAGE_REMEMBERED = 10_000
_LEAST_TAIL = 64
_SCAN_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Sizes of a store.

    A segment closes once an append reached ``segment_bytes`` of data or ``segment_records`` index records (the
    reference: 1 GiB, 700,000; ours is smaller because the newest one is read in full after a crash). The file is filled
    with zeros ahead, from ``fill_bytes_least`` up to ``fill_bytes_most`` at a time: an fdatasync inside a filled file
    takes half the time of one that grows it. ``tail_bytes`` of the newest messages stay in memory.
    """

    segment_bytes: int = 64 << 20
    segment_records: int = 700_000
    fill_bytes_least: int = 256 << 10
    fill_bytes_most: int = 4 << 20
    tail_bytes: int = 16 << 20


class Work:
    """What a commit has to write of one store: pieces of segments in order, and where the log ends then."""

    __slots__ = ("data_end", "end", "pieces", "size")

    def __init__(self, pieces: list[_Piece], end: int, data_end: int, size: int) -> None:
        self.pieces = pieces
        self.end = end
        self.data_end = data_end
        self.size = size


class _Piece:
    """Consecutive records of one segment; ``before`` is the segment to close first when this one is new."""

    __slots__ = ("before", "data_from", "index", "ordinal_from", "records", "segment")

    def __init__(self, segment: Segment, before: Segment | None) -> None:
        self.segment = segment
        self.before = before
        self.ordinal_from = segment.count
        self.data_from = segment.data_bytes
        self.records: list[bytes] = []
        self.index = b""


class Read:
    """What a read found: messages as field 4 of a get response, their offsets, and where the walk stopped."""

    __slots__ = ("damaged", "data_end", "messages", "next_offset", "offsets")

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.offsets: list[int] = []
        self.next_offset = 0
        self.data_end = 0
        """Data offset up to which the log was walked."""
        self.damaged: list[int] = []
        """Offsets that were due but cannot be read (verification failed); they are not in ``offsets``."""


class Store:
    """See the module. Offsets are byte positions in the index log, multiples of 28."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        store_id: int,
        *,
        limits: StoreLimits = StoreLimits(),
        deep: bool = False,
        on_loss: Callable[[Loss], None] = lambda _: None,
    ) -> None:
        """Open the store in ``directory`` and recover it; nothing is created before the first write.

        ``on_loss`` hears of every loss, found now or later, once. Raises OSError when the disk fails.
        """
        self.directory = directory
        self.store_id = store_id
        self.limits = limits
        self.immediate = False
        """Whether readers see messages before they are written (durability "memory")."""
        self.epochs: list[tuple[int, int]] = []
        """(epoch, end of the log when it began), rising: a restart began one when messages that had been readable may
        be gone. Kept by whoever opens the store."""
        self.damaged_reads = 0
        self.removed_segments = 0
        self.unwritten_bytes = 0
        """Bytes appended whose commit has not returned; whoever appends bounds it."""
        self._files = files
        self._on_loss = on_loss
        self._known_damage: set[int] = set()
        segments, self.recovery = recover(files, directory, store_id, deep=deep)
        for loss in self.recovery.losses:
            on_loss(loss)
        self._segments = segments
        self._starts = [segment.start for segment in segments]
        self._filled = segments[-1].data_bytes if segments else 0
        self._pieces: list[_Piece] = []
        self._pending_bytes = 0
        self._marks: deque[int] = deque()
        self._unmarked = 0
        self._recent: deque[Segment] = deque()
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
        """Data offset of the oldest message kept."""
        return self._segments[0].data_start if self._segments else 0

    @property
    def written_end(self) -> int:
        """Offset below which everything is in the files."""
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
        """Add a message in memory; its index offset and its append time (never before an earlier message's).

        It is durable, and readable, after the next `take`, `write`, `sync` and `written`. ``marker``: which producer
        sent it and the ones behind it (`codec.message.encode_marker`).
        """
        segment = self._segments[-1] if self._segments else None
        piece = self._pieces[-1] if self._pieces else None
        limits = self.limits
        if segment is None or segment.data_bytes >= limits.segment_bytes or segment.count >= limits.segment_records:
            segment = self._roll()
            piece = self._pieces[-1]
        elif piece is None:
            piece = _Piece(segment, None)
            self._pieces.append(piece)
        time_ms = max(self.last_time, now_ms)
        self.last_time = time_ms
        message = encode_stored(message_id, checksum, data, flag, marker)
        unacknowledged = (self.end_offset - max(self.durable_end, segment.start)) // INDEX_RECORD_BYTES
        record, size = encode_record(
            message, len(data), self.data_end, segment.count, partition_id % 10000, key_code, time_ms, unacknowledged
        )
        assert piece is not None
        piece.records.append(record)
        segment.add(partition_id, size, key_code, time_ms, message)
        offset = self.end_offset
        self.end_offset = offset + INDEX_RECORD_BYTES
        self.data_end += size
        self._pending_bytes += size
        self.unwritten_bytes += size
        self._unmarked += size
        if self._unmarked >= _TAIL_STEP:
            self._unmarked = 0
            self._marks.append(self.end_offset)
            self._cut_tail()
        if self.immediate:
            self.durable_end = self.end_offset
            self.durable_data_end = self.data_end
        return offset, time_ms

    def _roll(self) -> Segment:
        before = self._segments[-1] if self._segments else None
        segment = Segment(self.directory, self.end_offset, self.data_end)
        self._segments.append(segment)
        self._starts.append(segment.start)
        self._pieces.append(_Piece(segment, before))
        if before is not None:
            self._keep_index(before)
        return segment

    def roll(self) -> None:
        """Begin a new segment, so that the present one can expire; takes effect with the next commit."""
        if self._segments and self._segments[-1].count:
            self._roll()

    @property
    def dirty(self) -> bool:
        """Whether `take` has something to hand over."""
        return bool(self._pieces)

    def take(self) -> Work:
        """What was appended since the last call, for the committing thread."""
        for piece in self._pieces:
            piece.index = piece.segment.index_bytes(piece.ordinal_from, piece.ordinal_from + len(piece.records))
        work = Work(self._pieces, self.end_offset, self.data_end, self._pending_bytes)
        self._pieces = []
        self._pending_bytes = 0
        return work

    def write(self, work: Work) -> None:
        """Write ``work`` to the files (page cache). Committing thread.

        Raises OSError; then nothing more may be written.
        """
        for piece in work.pieces:
            segment = piece.segment
            if segment.data_file is None:
                self._begin(segment, piece.before)
            if not piece.records:
                continue
            data = b"".join(piece.records)
            self._fill(segment, piece.data_from + len(data))
            assert segment.data_file is not None
            assert segment.index_file is not None
            segment.data_file.write(piece.data_from, data)
            # Not synced with each commit: recovery makes the newest index agree with the data.
            segment.index_file.write(piece.ordinal_from * INDEX_RECORD_BYTES, piece.index)

    def sync(self, work: Work) -> None:
        """Make ``work``, which was written, durable. Committing thread.

        Raises OSError; then nothing may be acknowledged any more.
        """
        # Segments before the last one became durable when the last one was begun.
        file = work.pieces[-1].segment.data_file if work.pieces else None
        if file is not None:
            file.sync()

    def written(self, work: Work) -> None:
        """The commit of ``work`` returned: let readers see it."""
        self.unwritten_bytes -= work.size
        self._written_end = work.end
        if work.end > self.durable_end:
            self.durable_end = work.end
            self.durable_data_end = work.data_end
        self._cut_tail()

    def _begin(self, segment: Segment, before: Segment | None) -> None:
        # The older segment becomes durable before the newer one exists: then whatever recovery finds wrong with a
        # segment that has a successor is damage, never an interrupted write.
        if before is None:
            self._files.make_dir(self.directory)
        else:
            self._seal(before)
        segment.data_file = self._files.create(segment.data_path)
        segment.index_file = self._files.create(segment.index_path)
        self._files.sync_dir(self.directory)
        self._filled = 0
        if before is not None:
            before.sealed = True

    def _seal(self, segment: Segment) -> None:
        if segment.data_file is None or segment.index_file is None:
            return
        # All messages first: the file must not end with the last of them while one before is still on its way.
        segment.data_file.sync()
        segment.data_file.truncate(segment.data_bytes)
        segment.data_file.sync()
        segment.index_file.sync()

    def _fill(self, segment: Segment, need: int) -> None:
        if need <= self._filled:
            return
        step = min(max(self._filled, self.limits.fill_bytes_least), self.limits.fill_bytes_most)
        # Never exactly full: a file that ends with its last message was closed in order, recovery takes it for that.
        filled = max(min(need + step, self.limits.segment_bytes), need + _LEAST_TAIL)
        assert segment.data_file is not None
        segment.data_file.write(self._filled, bytes(filled - self._filled))
        self._filled = filled

    def close(self) -> None:
        """Cut the filled tail, sync and release the files. Everything handed out by `take` must have been written."""
        if self._segments:
            self._seal(self._segments[-1])
        self.abandon()

    def abandon(self) -> None:
        """Release the files as they are, after a failed commit or to delete them."""
        for segment in self._segments:
            segment.close()

    def _cut_tail(self) -> None:
        """Keep the newest messages in memory, within ``tail_bytes``; what is not written yet always stays."""
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

    def _keep_index(self, segment: Segment) -> None:
        """Note the use of a closed segment's index; the ones not used for longest are dropped."""
        recent = self._recent
        if recent and recent[-1] is segment:
            return
        if segment in recent:
            recent.remove(segment)
        recent.append(segment)
        for _ in range(len(recent) - _INDEXES_KEPT):
            oldest = recent.popleft()
            # A segment with messages still in memory, or still being written, must keep what leads to them.
            if oldest.wire_bytes or not oldest.sealed:
                recent.append(oldest)
            else:
                oldest.close()
                oldest.unload()

    def _use(self, segment: Segment) -> bool:
        """Make the index of ``segment`` available; whether the segment is the growing one."""
        if segment is self._segments[-1]:
            return True
        if not segment.loaded:
            found = check_segment(self._files, segment, self.store_id)
            self.recovery.losses += found.losses
            self.recovery.rebuilt_indexes += found.rebuilt_indexes
            for loss in found.losses:
                self._on_loss(loss)
        self._keep_index(segment)
        return False

    def _from(self, offset: int) -> int:
        return max(bisect_right(self._starts, offset) - 1, 0)

    def read(
        self,
        partition_id: int,
        start: int,
        *,
        end: int | None = None,
        keys: Set[int] | None = None,
        max_bytes: int = 512 << 10,
        max_messages: int = 1 << 31,
    ) -> Read:
        """Messages of one partition from index offset ``start``, before ``end`` (default and most: the durable end).

        At most ``max_bytes`` (in the reference's record sizes) and ``max_messages``, but at least one message if there
        is one; only those whose key code is in ``keys`` when given. ``next_offset`` is where to go on: behind the last
        message when a limit stopped the walk, else ``end``. ``start`` must be within ``[min_offset, durable_end]``.
        """
        limit = self.durable_end if end is None else min(end, self.durable_end)
        read = Read()
        room = max_bytes
        examined = 0
        place = self._from(start)
        while place < len(self._segments):
            segment = self._segments[place]
            if segment.start >= limit:
                break
            place += 1
            growing = self._use(segment)
            part = segment.part(partition_id, growing=growing)
            if part is None:
                continue
            first = bisect_left(part.ordinals, max(start - segment.start, 0) // INDEX_RECORD_BYTES)
            last = bisect_left(part.ordinals, (min(limit, segment.end) - segment.start) // INDEX_RECORD_BYTES)
            while first < last:
                stop = last if keys is None else min(last, first + _FILTER_WINDOW)
                chosen, taken = choose(
                    part, first, stop, keys, room, max_messages - len(read.offsets), bool(read.offsets)
                )
                if chosen:
                    self._gather(segment, part, chosen, read)
                room -= taken
                examined += stop - first
                if chosen.full or (keys is not None and examined >= _FILTER_MOST):
                    reached = chosen.reached if chosen.full else part.ordinals[stop - 1] + 1
                    return self._reached(read, segment.start + reached * INDEX_RECORD_BYTES)
                first = stop
        return self._reached(read, max(limit, start))

    def _reached(self, read: Read, offset: int) -> Read:
        read.next_offset = offset
        read.data_end = self.data_position(offset)
        return read

    def data_position(self, offset: int) -> int:
        """The data offset that belongs to index offset ``offset`` (at most the durable end)."""
        if offset >= self.durable_end:
            return self.durable_data_end
        segment = self._segments[self._from(offset)]
        if offset >= segment.end:
            return segment.data_end
        self._use(segment)
        return int(segment.index()["position"][max(offset - segment.start, 0) // INDEX_RECORD_BYTES])

    def _gather(self, segment: Segment, part: PartitionPart, chosen: Chosen, read: Read) -> None:
        """Append the chosen messages of one segment to ``read``: from memory, and from disk where they are older."""
        base = segment.start
        ordinals = part.ordinals
        wire, wire_from = part.wire, part.wire_from
        places = chosen.places
        cold = bisect_left(places, wire_from)
        if cold:
            wanted = (
                ordinals[places[0] : places[cold - 1] + 1]
                if isinstance(places, range)
                else array("I", [ordinals[k] for k in places[:cold]])
            )
            messages, damaged = segment.fetch(self._files, wanted)
            self.damaged_reads += damaged
            offsets: list[int] = (np.asarray(wanted, np.int64) * INDEX_RECORD_BYTES + base).tolist()
            if damaged:
                for ordinal, offset, message in zip(wanted, offsets, messages, strict=True):
                    if message is None:
                        read.damaged.append(offset)
                        self._damaged(segment, ordinal)
                lost = set(read.damaged)
                offsets = [offset for offset in offsets if offset not in lost]
            read.offsets += offsets
            read.messages += [message for message in messages if message is not None]
        if cold < len(places):
            if isinstance(places, range):
                begin, stop = places[cold], places[-1] + 1
                read.messages += wire[begin - wire_from : stop - wire_from]
                chosen_ordinals = np.frombuffer(ordinals, np.uint32, stop - begin, begin * 4).astype(np.int64)
                read.offsets += (chosen_ordinals * INDEX_RECORD_BYTES + base).tolist()
            else:
                read.messages += [wire[k - wire_from] for k in places[cold:]]
                read.offsets += [base + ordinals[k] * INDEX_RECORD_BYTES for k in places[cold:]]

    def _damaged(self, segment: Segment, ordinal: int) -> None:
        """Tell of a message that cannot be read: once, however often it is asked for."""
        offset = segment.start + ordinal * INDEX_RECORD_BYTES
        if offset not in self._known_damage:
            if len(self._known_damage) >= _DAMAGE_REMEMBERED:
                self._known_damage.clear()
            self._known_damage.add(offset)
            position = int(segment.index()["position"][ordinal]) - segment.data_start
            self._on_loss(Loss(str(segment.data_path), position, offset, offset + INDEX_RECORD_BYTES, None))

    def first_gap(self, start: int, end: int) -> tuple[int, int] | None:
        """The first run ``[from, to)`` of lost messages within ``[start, end)``; None if nothing is missing there.

        Which partition they were of is not known any more.
        """
        for segment in self._segments[self._from(start) :]:
            if segment.start >= end:
                break
            fillers = segment.part(FILLER, growing=self._use(segment))
            if fillers is None:
                continue
            ordinals = fillers.ordinals
            place = bisect_left(ordinals, max(start - segment.start, 0) // INDEX_RECORD_BYTES)
            if place < len(ordinals) and segment.start + ordinals[place] * INDEX_RECORD_BYTES < end:
                first = stop = ordinals[place]
                while place < len(ordinals) and ordinals[place] == stop:
                    place, stop = place + 1, stop + 1
                gap_end = segment.start + stop * INDEX_RECORD_BYTES
                return segment.start + first * INDEX_RECORD_BYTES, min(gap_end, end)
        return None

    def times(self, offsets: Sequence[int]) -> list[int]:
        """Append times (ms) of the messages at ``offsets`` (rising, each below the durable end)."""
        out: list[int] = []
        done = 0
        while done < len(offsets):
            segment = self._segments[self._from(offsets[done])]
            self._use(segment)
            stop = bisect_left(offsets, segment.end, done)
            ordinals = (np.asarray(offsets[done:stop], dtype=np.int64) - segment.start) // INDEX_RECORD_BYTES
            out += segment.index()["time"][ordinals].tolist()
            done = stop
        return out

    def plan(self, partition_id: int, start: int, end: int | None, max_messages: int) -> tuple[int, int]:
        """The longest range from ``start`` (up to ``end``) with at most ``max_messages`` own messages: (end, count).

        The end returned is ``end`` (or the durable end) when everything fits, else the offset of the first message that
        does not.
        """
        limit = self.durable_end if end is None else min(end, self.durable_end)
        count = 0
        for segment in self._segments[self._from(start) :]:
            if segment.start >= limit:
                break
            growing = self._use(segment)
            part = segment.part(partition_id, growing=growing)
            if part is None:
                continue
            first = bisect_left(part.ordinals, max(start - segment.start, 0) // INDEX_RECORD_BYTES)
            last = bisect_left(part.ordinals, (min(limit, segment.end) - segment.start) // INDEX_RECORD_BYTES)
            if count + last - first > max_messages:
                beyond = part.ordinals[first + max_messages - count]
                return segment.start + beyond * INDEX_RECORD_BYTES, max_messages
            count += last - first
        return max(limit, start), count

    def stored(self, start: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Offset, partition id, append time and encoded message of all that is stored from offset ``start`` on.

        Damaged messages are left out. Raises OSError when the disk fails.
        """
        for segment in self._segments[self._from(start) :]:
            self._use(segment)
            first = max(start - segment.start, 0) // INDEX_RECORD_BYTES
            for begin in range(first, segment.count, _SCAN_RECORDS):
                ordinals = range(begin, min(begin + _SCAN_RECORDS, segment.count))
                rows = segment.index()[begin : ordinals.stop]
                partitions: list[int] = rows["partition"].tolist()
                times: list[int] = rows["time"].tolist()
                del rows
                messages, _ = segment.fetch(self._files, ordinals)
                for k, message in enumerate(messages):
                    if message is not None and partitions[k] != FILLER:
                        yield segment.start + (begin + k) * INDEX_RECORD_BYTES, partitions[k], times[k], message

    def offset_at(self, time_ms: int) -> int:
        """Offset of the first message appended at ``time_ms`` or later; the durable end if there is none."""
        for segment in self._segments:
            if segment.count and segment.last_time >= time_ms:
                self._use(segment)
                ordinal = int(np.searchsorted(segment.index()["time"], time_ms))
                return min(segment.start + ordinal * INDEX_RECORD_BYTES, self.durable_end)
        return self.durable_end

    def expire(self, retention: Retention, now_ms: int) -> list[Segment]:
        """Take expired segments out of the store; pass them to `remove` in the committing thread.

        A newest segment whose messages are all too old is closed, so that it goes the next time.
        """
        if not self._segments:
            return []
        newest = self._segments[-1]
        if newest.count and newest.last_time < now_ms - retention.max_age_ms and newest.end <= self._written_end:
            self._roll()
        # The file name of the newest segment keeps the end of the log. Until that file exists the segment before it
        # does, and is not sealed.
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
            self.removed_segments += count
        return gone

    def remove(self, segments: Sequence[Segment]) -> None:
        """Delete the files of segments that `expire` returned. Committing thread. Raises OSError."""
        for segment in segments:
            segment.close()
            # The data first: an index without data is set aside by recovery, never served.
            self._files.remove(segment.data_path)
            self._files.remove(segment.index_path)
            # One after the other also on the disk: were a newer one gone and an older one back after a loss of power,
            # what retention removed would look like damage.
            self._files.sync_dir(self.directory)

    def destroy(self) -> None:
        """Delete all files of the store: its topic was removed."""
        self.abandon()
        for name in self._files.names(self.directory):
            self._files.remove(self.directory / name)
        self._files.sync_dir(self.directory)
