"""Recovery of a store when it is opened: complete records keep their offsets, other bytes are truncated or quarantined.

* The newest segment is read completely. The data are authoritative; the index, which is written but not synced while
  the segment grows, is corrected.
* Bytes after the last complete record were never acknowledged: they are truncated and counted (a torn tail).
* The same applies to records after a hole of an interrupted commit, whose writes reach the disk in any order; records
  contain the number of messages that were not acknowledged when they were written.
* A damaged range that is followed by complete records keeps its offsets as fillers. The damaged bytes are moved to a
  ``.bad`` file, the loss is reported, and a new segment is begun.
* A closed segment was durable before its successor was created, so any defect there is damage. It is read completely if
  its files do not fit each other; with ``deep`` every segment is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.runtime.io.files import File, Files
from penstock.tube.storage.index import INDEX_RECORD, INDEX_RECORD_BYTES, as_array, filler, is_sound
from penstock.tube.storage.record import scan
from penstock.tube.storage.segment import Segment

__all__ = ["Loss", "Recovery", "check_segment", "recover"]

_DATA_NAME = re.compile(r"(\d{20})-(\d{20})\.tube")
_INDEX_NAME = re.compile(r"(\d{20})\.index")


@dataclass(frozen=True, slots=True)
class Loss:
    """Lost messages: index offsets ``[start, end)``, position in the file, and the file with the damaged bytes."""

    path: str
    position: int
    start: int
    end: int
    kept: str | None

    def __str__(self) -> str:
        count = (self.end - self.start) // INDEX_RECORD_BYTES
        kept = f"; the damaged bytes are kept in {self.kept}" if self.kept else ""
        return f"{self.path}: byte {self.position}: {count} messages lost, offsets {self.start} to {self.end}{kept}"


@dataclass(slots=True)
class Recovery:
    """Result of opening a store."""

    records: int = 0
    torn_bytes: int = 0
    """Bytes truncated from the end of the newest segment: written, but not acknowledged as durable."""
    rebuilt_indexes: int = 0
    losses: list[Loss] = field(default_factory=list)

    def add(self, other: Recovery) -> None:
        self.records += other.records
        self.torn_bytes += other.torn_bytes
        self.rebuilt_indexes += other.rebuilt_indexes
        self.losses += other.losses


@dataclass(slots=True)
class _SegmentScan:
    index: bytearray
    end: int
    """Position after the last complete record."""
    holes: list[tuple[int, int, int, int]]
    """Damaged or missing ranges: (first byte, end byte, first ordinal, end ordinal)."""
    acknowledged: int = 0
    """Ordinal below which messages were acknowledged, according to the records."""

    def cut_unacknowledged(self) -> None:
        """Remove everything from the first hole whose messages were not acknowledged."""
        for place, (begin, _, first, _) in enumerate(self.holes):
            if first >= self.acknowledged:
                self.end = begin
                del self.index[first * INDEX_RECORD_BYTES :]
                del self.holes[place:]
                return


def recover(
    files: Files, directory: Path, store_id: int, *, deep: bool = False, clean: bool = False
) -> tuple[list[Segment], Recovery]:
    """Return the segments in ``directory``, oldest first, the last one with its files open for appending, and the
    result.

    ``clean``: the last writer closed the store, so missing data are a loss, not an interrupted write. There are no
    segments if the directory is empty or missing. Raises OSError if the disk fails.
    """
    report = Recovery()
    segments = _list(files, directory)
    for place, segment in enumerate(segments):
        if place + 1 < len(segments):
            count = (segments[place + 1].start - segment.start) // INDEX_RECORD_BYTES
            _open_closed(files, segment, count, segments[place + 1].data_start, store_id, report, deep=deep)
        else:
            _open_newest(files, segment, store_id, report, clean=clean)
    if segments and report.losses and segments[-1].count and _has_losses(report, segments[-1]):
        segments.append(_start_new_segment(files, segments[-1]))
    report.records = sum(segment.count for segment in segments)
    return segments, report


def check_segment(files: Files, segment: Segment, store_id: int) -> Recovery:
    """Load a closed segment's index; rebuild it from the data if they do not fit each other."""
    report = Recovery()
    data_end = segment.data_start + _size(files, segment.data_path)
    _open_closed(files, segment, segment.count, data_end, store_id, report, deep=False, load=True)
    return report


def _list(files: Files, directory: Path) -> list[Segment]:
    names = files.names(directory)
    segments = []
    starts = set()
    for name in names:
        if match := _DATA_NAME.fullmatch(name):
            segments.append(Segment(directory, int(match[1]), int(match[2])))
            starts.add(match[1])
    for name in names:
        if (match := _INDEX_NAME.fullmatch(name)) and match[1] not in starts:
            # The data file was not durable or is lost: an index without data is deleted.
            files.rename(directory / name, directory / f"{name}.bad")
    return sorted(segments, key=lambda segment: segment.start)


def _open_closed(
    files: Files,
    segment: Segment,
    count: int,
    data_end: int,
    store_id: int,
    report: Recovery,
    *,
    deep: bool,
    load: bool = False,
) -> None:
    data_bytes = _size(files, segment.data_path)
    index = _read(files, segment.index_path)
    fits = len(index) == count * INDEX_RECORD_BYTES and (
        is_sound(as_array(index), segment.data_start, data_bytes) if load else _edges_fit(index, segment, data_bytes)
    )
    if deep or not fits or segment.data_start + data_bytes != data_end:
        data = _read(files, segment.data_path)
        reading = _read_records(data, segment, store_id, count)
        lost_before = as_array(index)["partition"].tolist().count(-1) if fits else 0
        if reading.holes and sum(hole[3] - hole[2] for hole in reading.holes) != lost_before:
            _quarantine(files, segment, data, reading, report)
        if bytes(reading.index) != index:
            index = bytes(reading.index)
            _rewrite_index(files, segment, index, report)
    segment.adopt(index, data_bytes)
    segment.sealed = True
    if not load:
        segment.unload()


def _edges_fit(index: bytes, segment: Segment, data_bytes: int) -> bool:
    """Return True if the first and last index record agree with the data file. This is the only check of closed
    segments at a start."""
    if not index:
        return data_bytes == 0
    edges = as_array(index[:INDEX_RECORD_BYTES] + index[-INDEX_RECORD_BYTES:])
    starts: list[int] = edges["position"].tolist()
    sizes: list[int] = edges["size"].tolist()
    if edges["partition"][0] != -1 and starts[0] != segment.data_start:
        return False
    if edges["partition"][1] == -1:
        return sizes[1] == 0 and starts[1] <= segment.data_start + data_bytes
    return starts[1] + sizes[1] == segment.data_start + data_bytes


def _open_newest(files: Files, segment: Segment, store_id: int, report: Recovery, *, clean: bool) -> None:
    data_file = files.open(segment.data_path)
    data = data_file.read(0, data_file.size())
    found = _read(files, segment.index_path)
    if found and not len(found) % INDEX_RECORD_BYTES and _edges_fit(found, segment, len(data)):
        # The file ends with its last message: it was closed, so no write in it was interrupted.
        reading = _read_records(data, segment, store_id, len(found) // INDEX_RECORD_BYTES)
        reading.end = len(data)
    elif clean:
        reading = _read_closed(data, segment, store_id, len(found) // INDEX_RECORD_BYTES)
    else:
        reading = _read_records(data, segment, store_id, None)
        reading.cut_unacknowledged()
    torn = len(data[reading.end :].rstrip(b"\0"))
    report.torn_bytes += torn
    if len(data) != reading.end:
        data_file.truncate(reading.end)
        data_file.sync()
    if reading.holes:
        _quarantine(files, segment, data, reading, report)
    index = bytes(reading.index)
    segment.data_file = data_file
    segment.index_file = _agreeing_index(files, segment, index, report)
    segment.adopt(index, reading.end, growing=True)


def _read_closed(data: bytes, segment: Segment, store_id: int, indexed: int) -> _SegmentScan:
    """Read a cleanly closed store: its files are complete, with at least ``indexed`` messages."""
    reading = _read_records(data, segment, store_id, None)
    there = len(reading.index) // INDEX_RECORD_BYTES
    if not indexed and data[reading.end :].strip(b"\0"):
        indexed = there + 1  # the number of messages after the last complete one is unknown
    if indexed > there:
        reading = _read_records(data, segment, store_id, indexed)
        reading.end = len(data)
    return reading


def _read_records(data: bytes, segment: Segment, store_id: int, count: int | None) -> _SegmentScan:
    """Return the index records of all complete records in ``data``, with fillers for gaps, up to ``count`` records if
    given."""
    index = bytearray()
    holes = []
    end = 0
    ordinal = 0
    last_time = acknowledged = 0
    pack = INDEX_RECORD.pack
    for found in scan(data, segment.data_start):
        if count is not None and found.ordinal >= count:
            break
        if found.position != end or found.ordinal != ordinal:
            holes.append((end, found.position, ordinal, found.ordinal))
            index += filler(segment.data_start + end, last_time or found.time_ms) * (found.ordinal - ordinal)
        partition = store_id * 10000 + found.partition
        index += pack(partition, segment.data_start + found.position, found.size, found.key_code, found.time_ms)
        end = found.position + found.size
        ordinal = found.ordinal + 1
        last_time = found.time_ms
        acknowledged = max(acknowledged, found.acknowledged)
    if count is not None and ordinal < count:
        holes.append((end, len(data), ordinal, count))
        index += filler(segment.data_start + end, last_time) * (count - ordinal)
    return _SegmentScan(index, end, holes, acknowledged)


def _quarantine(files: Files, segment: Segment, data: bytes, reading: _SegmentScan, report: Recovery) -> None:
    for begin, end, first, stop in reading.holes:
        damaged = data[begin:end]
        kept: Path | None = None
        if damaged.strip(b"\0"):
            kept = segment.directory / f"{segment.data_path.name}.{begin}.bad"
            file = files.create(kept)
            file.write(0, damaged)
            file.sync()
            file.close()
            files.sync_dir(segment.directory)
        start = segment.start + first * INDEX_RECORD_BYTES
        stop_offset = segment.start + stop * INDEX_RECORD_BYTES
        report.losses.append(Loss(str(segment.data_path), begin, start, stop_offset, str(kept) if kept else None))


def _agreeing_index(files: Files, segment: Segment, index: bytes, report: Recovery) -> File:
    """Correct the index file of the newest segment."""
    exists = segment.index_path.name in files.names(segment.directory)
    file = files.open(segment.index_path) if exists else files.create(segment.index_path)
    found = file.read(0, file.size())
    if found != index:
        if found[: len(index)] != index:
            report.rebuilt_indexes += bool(found)
            file.write(0, index)
        file.truncate(len(index))
        file.sync()
    if not exists:
        files.sync_dir(segment.directory)
    return file


def _rewrite_index(files: Files, segment: Segment, index: bytes, report: Recovery) -> None:
    """Replace a closed segment's index atomically."""
    report.rebuilt_indexes += 1
    fresh = segment.index_path.with_suffix(".new")
    file = files.create(fresh)
    file.write(0, index)
    file.sync()
    file.close()
    files.rename(fresh, segment.index_path)
    files.sync_dir(segment.directory)


def _has_losses(report: Recovery, segment: Segment) -> bool:
    return any(loss.start >= segment.start for loss in report.losses)


def _start_new_segment(files: Files, damaged: Segment) -> Segment:
    """Close the damaged newest segment, so that it is not scanned and reported at every start, and start a new one."""
    assert damaged.data_file is not None
    assert damaged.index_file is not None
    damaged.data_file.sync()
    damaged.index_file.sync()
    damaged.close()
    damaged.sealed = True
    segment = Segment(damaged.directory, damaged.end, damaged.data_end)
    segment.data_file = files.create(segment.data_path)
    segment.index_file = files.create(segment.index_path)
    files.sync_dir(segment.directory)
    return segment


def _size(files: Files, path: Path) -> int:
    try:
        file = files.open(path)
    except FileNotFoundError:
        return 0
    try:
        return file.size()
    finally:
        file.close()


def _read(files: Files, path: Path) -> bytes:
    try:
        file = files.open(path)
    except FileNotFoundError:
        return b""
    try:
        return file.read(0, file.size())
    finally:
        file.close()
