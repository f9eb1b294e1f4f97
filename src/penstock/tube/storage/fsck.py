"""Read-only check of a broker's directory, and its repair.

Every record of every segment is read and its CRC verified; every index record is compared with the data. The repair is
the recovery of a broker's start: it truncates torn tails, rebuilds indexes, and quarantines damaged bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.errors import StorageError
from penstock.runtime.io.directory_lock import DirectoryLock
from penstock.tube.storage.broker_storage import RUNNING, BrokerStorage
from penstock.tube.storage.index import FILLER, INDEX_RECORD_BYTES, as_array
from penstock.tube.storage.meta import MetaStore
from penstock.tube.storage.record import scan

__all__ = ["Finding", "Report", "check", "repair"]

_DATA_NAME = re.compile(r"(\d{20})-(\d{20})\.tube")


class Finding(NamedTuple):
    """A problem. ``lost``: number of messages that cannot be read; ``kind``: an identifier for programs."""

    path: str
    kind: str
    text: str
    lost: int = 0


@dataclass(slots=True)
class Report:
    """Contents of a directory, and its problems."""

    stores: int = 0
    segments: int = 0
    messages: int = 0
    bytes: int = 0
    positions: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Number of messages that cannot be read."""
        return sum(finding.lost for finding in self.findings)

    @property
    def ok(self) -> bool:
        """True if there is no problem. A torn tail after a crash is not a problem, because it was never readable."""
        return all(finding.kind in {"torn tail", "index behind", "set aside"} for finding in self.findings)


def check(directory: Path) -> Report:
    """Read everything in a broker's ``directory`` (with ``log`` and ``meta``), without changes.

    Raises:
        UnavailableError: a process uses the directory.
        StorageError: it is not a broker's directory, or cannot be read.
    """
    if not (directory / "log").is_dir() and not (directory / "meta").is_dir():
        inside = sorted(str(path) for path in directory.glob("tube/broker-*"))
        raise StorageError(
            f"tube: {directory} is not a broker's directory",
            path=str(directory),
            why="it has neither 'log' nor 'meta'",
            hint=f"name {' or '.join(inside)}" if inside else "name the directory tube/broker-N in the data directory",
        )
    lock = DirectoryLock(directory)
    report = Report()
    try:
        clean = _check_meta(directory / "meta", report)
        log = directory / "log"
        for store in sorted(path for path in log.iterdir() if path.is_dir()) if log.is_dir() else []:
            _check_store(store, report, clean=clean)
    except OSError as error:
        raise StorageError(
            f"tube: {error.filename or directory} cannot be read: {error.strerror}", path=str(error.filename)
        ) from error
    finally:
        lock.close()
    return report


def repair(directory: Path) -> Report:
    """Recover every segment as a broker does at its start; damaged bytes are moved to ``.bad`` files.

    Raises UnavailableError if a process uses the directory, StorageError if the disk fails.
    """
    before = check(directory)
    disk = BrokerStorage(directory, without_meta=True)
    try:
        for topic, number in disk.existing_stores():
            disk.open_store(topic, number, deep=True)
        report = Report(before.stores, before.segments, before.messages, before.bytes, before.positions)
        for loss in disk.recovery.losses:
            count = (loss.end - loss.start) // INDEX_RECORD_BYTES
            report.findings.append(Finding(loss.path, "damaged", str(loss), count))
        if disk.recovery.torn_bytes:
            text = f"{disk.recovery.torn_bytes} bytes of an unfinished commit were truncated"
            report.findings.append(Finding(str(directory), "torn tail", text))
        if disk.recovery.rebuilt_indexes:
            text = f"{disk.recovery.rebuilt_indexes} indexes were rebuilt from their data"
            report.findings.append(Finding(str(directory), "index", text))
    finally:
        disk.close(clean=True)
    return report


def _check_meta(path: Path, report: Report) -> bool:
    """Check group offsets and configuration, and whether the last process closed the directory."""
    if not path.is_dir():
        report.findings.append(Finding(str(path), "meta", "group offsets and the configuration are missing"))
        return False
    meta = MetaStore(path)
    try:
        report.positions = len(meta.offsets())
        meta.config()
        notes = meta.notes()
        report.findings += [Finding(str(path), "meta", text) for text in meta.damaged]
    finally:
        meta.close()
    return RUNNING not in notes


def _check_store(directory: Path, report: Report, *, clean: bool) -> None:
    report.stores += 1
    number = directory.name.rpartition("-")[2]
    names = sorted(entry.name for entry in directory.iterdir())
    segments = [match for match in map(_DATA_NAME.fullmatch, names) if match]
    for name in names:
        if name.endswith(".bad"):
            text = f"damaged bytes ({(directory / name).stat().st_size}) quarantined earlier"
            report.findings.append(Finding(str(directory / name), "set aside", text))
        elif name.endswith(".index") and f"{name[:20]}-" not in {match[0][:21] for match in segments}:
            report.findings.append(Finding(str(directory / name), "index", "an index without data"))
    for place, match in enumerate(segments):
        following = segments[place + 1] if place + 1 < len(segments) else None
        end = (int(following[1]), int(following[2])) if following else None
        report.segments += 1
        store_id = int(number) if number.isdecimal() else 0
        report.findings += _check_segment(directory / match[0], match, end, store_id, report, clean=clean)


def _check_segment(
    path: Path, match: re.Match[str], end: tuple[int, int] | None, store_id: int, report: Report, *, clean: bool
) -> Iterator[Finding]:
    start, data_start = int(match[1]), int(match[2])
    data = path.read_bytes()
    index_path = path.with_name(f"{match[1]}.index")
    index = index_path.read_bytes() if index_path.exists() else b""
    records = as_array(index)
    report.bytes += len(data)
    byte = ordinal = wrong = 0
    for found in scan(data, data_start):
        if found.position != byte or found.ordinal != ordinal:
            known = records["partition"][ordinal : found.ordinal].tolist()
            if known.count(FILLER) != found.ordinal - ordinal:
                lost = found.ordinal - ordinal
                yield Finding(str(path), "damaged", f"bytes {byte} to {found.position} cannot be read", lost)
        if found.ordinal < len(records):
            row = records[found.ordinal]
            expected = (store_id * 10000 + found.partition, data_start + found.position, found.size, found.key_code)
            wrong += (int(row[0]), int(row[1]), int(row[2]), int(row[3])) != expected or int(row[4]) != found.time_ms
        report.messages += 1
        byte, ordinal = found.position + found.size, found.ordinal + 1
    if wrong:
        yield Finding(str(index_path), "index", f"{wrong} records do not match the data; it can be rebuilt")
    if not index and data:
        yield Finding(str(index_path), "index", "the index is missing; it can be rebuilt")
    elif len(records) < ordinal:
        kind = "index" if end is not None or clean else "index behind"
        yield Finding(str(index_path), kind, f"{ordinal - len(records)} records are missing; they can be rebuilt")
    tail = len(data[byte:].rstrip(b"\0"))
    if end is not None:
        lost = (end[0] - start) // INDEX_RECORD_BYTES - ordinal
        fillers = records["partition"][ordinal:].tolist().count(FILLER)
        if lost > fillers or (data_start + byte < end[1] and not fillers):
            yield Finding(str(path), "damaged", f"it ends at byte {byte}, before the next segment begins", lost)
    elif clean and len(records) > ordinal:
        lost = len(records) - ordinal
        yield Finding(str(path), "damaged", f"closed cleanly, but nothing can be read from byte {byte} on", lost)
    elif clean and tail and not index:
        text = f"closed cleanly, but {tail} bytes from {byte} on cannot be read: at least one message"
        yield Finding(str(path), "damaged", text, 1)
    elif tail:
        yield Finding(str(path), "torn tail", f"{tail} bytes of an unfinished commit from byte {byte} on")
