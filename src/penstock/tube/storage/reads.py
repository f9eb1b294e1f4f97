"""Reading of a store: messages of a partition from an offset, with or without filters, from memory and disk.

This base class of `Store` modifies nothing except the set of indexes in memory. It runs in the loop's thread.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set

import numpy as np

from penstock.runtime.io.files import Files
from penstock.tube.engine.interfaces import LogRead, LogRecords, LogStore
from penstock.tube.storage.index import FILLER, INDEX_RECORD_BYTES
from penstock.tube.storage.recovery import Loss, Recovery, check_segment
from penstock.tube.storage.segment import PartitionPart, Segment

__all__ = ["LogReads", "MessageSelection", "StoredMessages", "select_messages"]


class MessageSelection:
    """Indexes of messages in a partition part, ascending. ``full``: a limit stopped the selection at ``reached``."""

    __slots__ = ("full", "places", "reached")

    def __init__(self, places: range | list[int], reached: int, *, full: bool) -> None:
        self.places = places
        self.reached = reached
        self.full = full

    def __len__(self) -> int:
        return len(self.places)


def select_messages(
    part: PartitionPart,
    first: int,
    stop: int,
    keys: Set[int] | None,
    room: int,
    most: int,
    started: bool,  # noqa: FBT001 - positional on the hot path
) -> tuple[MessageSelection, int]:
    """Select messages with indexes in ``[first, stop)``: the matching ones, up to ``room`` bytes and ``most`` messages.

    The first message of a read (``started`` false) is selected regardless of its size.
    """
    ends = part.ends
    before = ends[first - 1] if first else 0
    if keys is None:
        last = min(bisect_right(ends, before + room, first, stop), first + most)
        if last == first and not started and most > 0:
            last = first + 1
        taken = ends[last - 1] - before if last > first else 0
        reached = part.ordinals[last - 1] + 1 if last > first else part.ordinals[first]
        return MessageSelection(range(first, last), reached, full=last < stop), taken
    window = np.frombuffer(part.keys, np.int32, stop - first, first * 4)
    matching = np.flatnonzero(np.isin(window, list(keys))) + first
    del window
    if not len(matching):
        return MessageSelection([], 0, full=False), 0
    all_ends = np.frombuffer(part.ends, np.uint64)
    sizes = all_ends[matching].astype(np.int64) - np.where(matching > 0, all_ends[matching - 1].astype(np.int64), 0)
    del all_ends
    sums = np.cumsum(sizes)
    count = min(int(np.searchsorted(sums, room, side="right")), most)
    if count == 0 and not started and most > 0:
        count = 1
    places: list[int] = matching[:count].tolist()
    reached = part.ordinals[places[-1]] + 1 if places else part.ordinals[first]
    return MessageSelection(places, reached, full=count < len(matching)), int(sums[count - 1]) if count else 0


# Maximum messages of a partition that a filtered read examines, so that a filter without matches does not block the
# loop for long; the reached offset is returned.
_FILTER_WINDOW = 65_536
_FILTER_MOST = 262_144
_INDEXES_KEPT = 4
_DAMAGE_REMEMBERED = 10_000
_SCAN_RECORDS = 4096


class StoredMessages(LogRead):
    """Result of a read of segments; `offsets` is computed from the base offsets and ordinals of the messages."""

    __slots__ = ("_places", "count", "damaged", "data_end", "from_disk", "joined", "messages", "next_offset")

    def __init__(self, *, joined: bool) -> None:
        self.joined = joined
        self.count = 0
        self.messages: list[bytes] = []
        self._places: list[tuple[int, array[int]]] = []
        self.next_offset = 0
        self.data_end = 0
        self.damaged: list[int] = []
        self.from_disk = False

    @property
    def offsets(self) -> list[int]:
        out: list[int] = []
        for base, ordinals in self._places:
            out += (np.asarray(ordinals, np.int64) * INDEX_RECORD_BYTES + base).tolist()
        return out

    def add(self, base: int, ordinals: array[int], messages: list[bytes]) -> None:
        """Add ``messages`` with these ``ordinals`` in the segment that starts at offset ``base``."""
        self._places.append((base, ordinals))
        self.count += len(ordinals)
        self.messages += messages


class LogReads(LogStore):
    """The reading methods of a store; they modify nothing except the set of indexes in memory."""

    def __init__(self, files: Files, store_id: int, on_loss: Callable[[Loss], None]) -> None:
        self.store_id = store_id
        self.damaged_reads = 0
        self.durable_end = 0
        self.durable_data_end = 0
        self.recovery = Recovery()
        self._files = files
        self._on_loss = on_loss
        self._known_damage: set[int] = set()
        self._segments: list[Segment] = []
        self._starts: list[int] = []
        self._recent: deque[Segment] = deque()

    def _touch_index(self, segment: Segment) -> None:
        """Register the use of a closed segment's index, and drop the least recently used indexes."""
        recent = self._recent
        if recent and recent[-1] is segment:
            return
        if segment in recent:
            recent.remove(segment)
        recent.append(segment)
        for _ in range(len(recent) - _INDEXES_KEPT):
            oldest = recent.popleft()
            # A segment with messages in memory or unwritten messages keeps its index.
            if oldest.wire_bytes or not oldest.sealed:
                recent.append(oldest)
            else:
                oldest.close()
                oldest.unload()

    def _load_index(self, segment: Segment) -> bool:
        """Load the index of ``segment`` if necessary; return whether the segment is the active one."""
        if segment is self._segments[-1]:
            return True
        if not segment.loaded:
            found = check_segment(self._files, segment, self.store_id)
            self.recovery.losses += found.losses
            self.recovery.rebuilt_indexes += found.rebuilt_indexes
            for loss in found.losses:
                self._on_loss(loss)
        self._touch_index(segment)
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
        joined: bool = False,
    ) -> StoredMessages:
        limit = self.durable_end if end is None else min(end, self.durable_end)
        read = StoredMessages(joined=joined)
        room = max_bytes
        examined = 0
        place = self._from(start)
        while place < len(self._segments):
            segment = self._segments[place]
            if segment.start >= limit:
                break
            place += 1
            growing = self._load_index(segment)
            part = segment.part(partition_id, growing=growing)
            if part is None:
                continue
            first = bisect_left(part.ordinals, max(start - segment.start, 0) // INDEX_RECORD_BYTES)
            last = bisect_left(part.ordinals, (min(limit, segment.end) - segment.start) // INDEX_RECORD_BYTES)
            while first < last:
                stop = last if keys is None else min(last, first + _FILTER_WINDOW)
                chosen, taken = select_messages(
                    part, first, stop, keys, room, max_messages - read.count, read.count > 0
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

    def records(
        self, partition_id: int, start: int, *, end: int, max_bytes: int, max_messages: int
    ) -> LogRecords | None:
        limit = min(end, self.durable_end)
        place = self._from(start)
        segment = self._segments[place] if place < len(self._segments) else None
        if segment is None or segment.start >= limit:
            return None
        part = segment.part(partition_id, growing=self._load_index(segment))
        if part is None:
            return None
        first = bisect_left(part.ordinals, max(start - segment.start, 0) // INDEX_RECORD_BYTES)
        last = bisect_left(part.ordinals, (min(limit, segment.end) - segment.start) // INDEX_RECORD_BYTES)
        last = min(last, part.wire_from)
        if first >= last:
            return None
        chosen, _ = select_messages(part, first, last, None, max_bytes, max_messages, started=False)
        ordinals = _ordinals(part, chosen.places)
        behind = first + len(ordinals)
        following = part.ordinals[behind] if behind < len(part.ordinals) else segment.count
        reached = min(limit, segment.start + following * INDEX_RECORD_BYTES)
        found = segment.records(self._files, ordinals) if self.first_gap(start, reached) is None else None
        if found is None:
            return None
        data, sizes, positions = found
        numbers = np.asarray(ordinals, np.int64)
        times = segment.index()["time"][numbers].astype(np.int64)
        offsets = numbers * INDEX_RECORD_BYTES + segment.start
        return LogRecords(data, offsets, times, positions, sizes, reached)

    def _reached(self, read: StoredMessages, offset: int) -> StoredMessages:
        read.next_offset = offset
        read.data_end = self.data_offset(offset)
        return read

    def data_offset(self, offset: int) -> int:
        if offset >= self.durable_end:
            return self.durable_data_end
        segment = self._segments[self._from(offset)]
        if offset >= segment.end:
            return segment.data_end
        self._load_index(segment)
        return int(segment.index()["position"][max(offset - segment.start, 0) // INDEX_RECORD_BYTES])

    def _gather(self, segment: Segment, part: PartitionPart, chosen: MessageSelection, read: StoredMessages) -> None:
        """Append the selected messages of one segment to ``read``, from memory or, if they are older, from disk."""
        base, places, wire_from = segment.start, chosen.places, part.wire_from
        cold = bisect_left(places, wire_from)
        if cold:
            read.from_disk = True
            wanted = _ordinals(part, places[:cold])
            data = segment.fetch_joined(self._files, wanted) if read.joined else None
            if data is None:
                self._fetch(segment, wanted, read)
            else:
                read.add(base, wanted, [data])
        warm = places[cold:]
        if warm:
            if isinstance(warm, range):
                in_memory = part.wire[warm.start - wire_from : warm.stop - wire_from]
            else:
                in_memory = [part.wire[k - wire_from] for k in warm]
            read.add(base, _ordinals(part, warm), in_memory)

    def _fetch(self, segment: Segment, wanted: array[int], read: StoredMessages) -> None:
        """Append the messages of these ordinals to ``read``, from disk, and report damaged ones."""
        messages, damaged = segment.fetch(self._files, wanted)
        if damaged:
            self._note_damage(segment, wanted, messages, read)
            wanted = array("I", [at for at, message in zip(wanted, messages, strict=True) if message is not None])
        read.add(segment.start, wanted, [message for message in messages if message is not None])

    def _note_damage(
        self, segment: Segment, ordinals: Sequence[int], messages: Sequence[bytes | None], read: StoredMessages
    ) -> None:
        for ordinal, message in zip(ordinals, messages, strict=True):
            if message is None:
                self.damaged_reads += 1
                read.damaged.append(segment.start + ordinal * INDEX_RECORD_BYTES)
                self._damaged(segment, ordinal)

    def _damaged(self, segment: Segment, ordinal: int) -> None:
        """Report a message that cannot be read, once."""
        offset = segment.start + ordinal * INDEX_RECORD_BYTES
        if offset not in self._known_damage:
            if len(self._known_damage) >= _DAMAGE_REMEMBERED:
                self._known_damage.clear()
            self._known_damage.add(offset)
            position = int(segment.index()["position"][ordinal]) - segment.data_start
            self._on_loss(Loss(str(segment.data_path), position, offset, offset + INDEX_RECORD_BYTES, None))

    def first_gap(self, start: int, end: int) -> tuple[int, int] | None:
        for segment in self._segments[self._from(start) :]:
            if segment.start >= end:
                break
            fillers = segment.part(FILLER, growing=self._load_index(segment))
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
        out: list[int] = []
        done = 0
        while done < len(offsets):
            segment = self._segments[self._from(offsets[done])]
            self._load_index(segment)
            stop = bisect_left(offsets, segment.end, done)
            ordinals = (np.asarray(offsets[done:stop], dtype=np.int64) - segment.start) // INDEX_RECORD_BYTES
            out += segment.index()["time"][ordinals].tolist()
            done = stop
        return out

    def plan(self, partition_id: int, start: int, end: int | None, max_messages: int) -> tuple[int, int]:
        limit = self.durable_end if end is None else min(end, self.durable_end)
        count = 0
        for segment in self._segments[self._from(start) :]:
            if segment.start >= limit:
                break
            growing = self._load_index(segment)
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

    def lag(self, partition_id: int, start: int) -> tuple[int, int, bool]:
        count, oldest, exact = 0, 0, True
        limit = self.durable_end
        previous = 0
        for segment in self._segments[self._from(start) :]:
            if segment.start >= limit:
                break
            begin = max(start - segment.start, 0) // INDEX_RECORD_BYTES
            end = (min(limit, segment.end) - segment.start) // INDEX_RECORD_BYTES
            growing = segment is self._segments[-1]
            if not (growing or segment.loaded):
                if end > begin:
                    exact = False
                    count += end - begin
                    oldest = oldest or previous or segment.last_time
            else:
                part = segment.part(partition_id, growing=growing)
                if part is not None:
                    first = bisect_left(part.ordinals, begin)
                    last = bisect_left(part.ordinals, end)
                    count += last - first
                    if last > first and not oldest:
                        oldest = int(segment.index()["time"][part.ordinals[first]])
            previous = segment.last_time
        return count, oldest, exact

    def stored(self, start: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Iterate over offset, partition id, append time and encoded message of all messages from offset ``start``.

        Damaged messages are skipped. Raises OSError if the disk fails.
        """
        for segment in self._segments[self._from(start) :]:
            self._load_index(segment)
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
        for segment in self._segments:
            if segment.count and segment.last_time >= time_ms:
                self._load_index(segment)
                ordinal = int(np.searchsorted(segment.index()["time"], time_ms))
                return min(segment.start + ordinal * INDEX_RECORD_BYTES, self.durable_end)
        return self.durable_end


def _ordinals(part: PartitionPart, places: range | list[int]) -> array[int]:
    if isinstance(places, range):
        return part.ordinals[places.start : places.stop]
    return array("I", [part.ordinals[k] for k in places])
