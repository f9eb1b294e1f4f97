"""The proof of the demo: evidence from the log, the table, the ledger and the state store, and its checks.

:class:`LogReader`, :func:`read_table` and :func:`read_alarms` read the evidence; :func:`prove` does no IO. The sender
counts only the sent and the acknowledged ids.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.demo.data import AbnormalSegment, Alarm, Branch, parse_alarm
from penstock.pipelines.ledger.ledger import LedgerEntry
from penstock.pipelines.sinks.table import files
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.spark.tube.offsets import Slice, from_json, to_json
from penstock.spark.tube.tube_client import TubeClient
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.record import Record

__all__ = [
    "Check",
    "Evidence",
    "LogReader",
    "LoggedRecord",
    "Proof",
    "last_line",
    "late_ids",
    "prove",
    "read_alarms",
    "read_table",
]


class LoggedRecord(NamedTuple):
    """A record of the log: id, offset, and event time if its payload has one."""

    id: str
    topic: str
    partition: str
    offset: int
    event_time_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence for the proof.

    ``table`` and ``measured`` map ids to (time, flow); an id that occurs twice in the table is in ``table_ids`` twice.
    """

    sent: Collection[str]
    acknowledged: Collection[str]
    log: Sequence[LoggedRecord]
    table_ids: Sequence[str]
    table: Mapping[str, tuple[datetime, float]]
    dead_ids: Sequence[str]
    rows_ledger: Sequence[LedgerEntry]
    windows_ledger: Sequence[LedgerEntry]
    segments: Sequence[AbnormalSegment]


class Check(NamedTuple):
    """A claim of the proof, and the contradiction if it is not true."""

    claim: str
    holds: bool
    found: str


class Proof(NamedTuple):
    """The checks, and the counts for the last line."""

    checks: list[Check]
    counts: dict[str, int]

    @property
    def holds(self) -> bool:
        """True if all claims are true."""
        return all(check.holds for check in self.checks)


def late_ids(log: Sequence[LoggedRecord], ledger: Sequence[LedgerEntry]) -> set[str]:
    """Return the ids of events that the windows dropped as late: the watermark had passed when their first copy was
    read.

    Only the first copy counts; later copies are duplicates of a counted event.
    """
    first: dict[str, tuple[int, bool]] = {}
    for record in log:
        for entry in ledger:
            start = entry.start.get(record.topic, {}).get(record.partition)
            end = entry.end.get(record.topic, {}).get(record.partition)
            if start is None or end is None or not start <= record.offset < end:
                continue
            if record.event_time_ms is not None:
                is_late = bool(entry.late_watermark_ms) and record.event_time_ms <= entry.late_watermark_ms
                if record.id not in first or entry.batch < first[record.id][0]:
                    first[record.id] = (entry.batch, is_late)
            break
    return {name for name, (_, is_late) in first.items() if is_late}


def prove(
    evidence: Evidence,
    *,
    measured: Mapping[str, tuple[datetime, float]],
    malformed: Collection[str],
    late: Collection[str],
    segments: Sequence[AbnormalSegment],
    chaos: bool,
) -> Proof:
    """Compare ``evidence`` with the input. ``measured`` includes late readings."""
    e = evidence
    logged = Counter(record.id for record in e.log)
    in_table = Counter(e.table_ids)
    dead = set(e.dead_ids)
    redelivered = len(e.log) - len(logged)
    filtered = _sum(e.rows_ledger, "filtered")
    found_late = late_ids(e.log, e.windows_ledger)
    expected_ids = {*measured, *malformed}
    doubled = sorted(name for name, count in in_table.items() if count > 1)
    wrong = sorted(name for name in in_table.keys() & measured.keys() if e.table.get(name) != measured[name])
    kept = len(in_table) + len(dead) + filtered
    checks = [
        _equal("the expected ids were sent", set(e.sent), expected_ids),
        _equal("ids acknowledged are those sent", set(e.acknowledged), set(e.sent)),
        _equal("distinct ids in the log are those sent", set(logged), set(e.sent)),
        Check("every id is in the table once", not doubled, f"duplicated: {_some(doubled)}"),
        _equal("the table holds every reading", set(in_table), set(measured)),
        Check("the table holds every reading's time and flow", not wrong, f"different: {_some(wrong)}"),
        _equal("the dead letters are the malformed messages", dead, set(malformed)),
        Check("each dead letter exists once", len(e.dead_ids) == len(dead), f"{len(e.dead_ids)} rows"),
        Check(
            "distinct ids in the log = table rows + dead letters + filtered",
            kept == len(logged),
            f"{len(logged)} != {len(in_table)} + {len(dead)} + {filtered}",
        ),
        *_ledger_checks(e, redelivered, sum(in_table.values())),
        _equal("the late events are the delayed ones", found_late, set(late)),
        Check(
            "the segments found are those in the data",
            list(e.segments) == list(segments),
            "found " + ("; ".join(map(_short, e.segments)) or "none"),
        ),
        Check("no message was redelivered", chaos or redelivered == 0, f"{redelivered} duplicates"),
    ]
    counts = {
        "sent": len(set(e.sent)),
        "acknowledged": len(set(e.acknowledged)),
        "logged": len(logged),
        "redelivered": redelivered,
        "table_rows": len(in_table),
        "dead_letters": len(dead),
        "filtered": filtered,
        "late": len(found_late),
    }
    return Proof(checks, counts)


def _ledger_checks(e: Evidence, redelivered: int, rows: int) -> list[Check]:
    """Compare the ledger with log and table, batch by batch."""
    read, out = _sum(e.rows_ledger, "read"), _sum(e.rows_ledger, "out")
    duplicates = _sum(e.rows_ledger, "duplicates")
    return [
        Check("records read in the ledger = records in the log", read == len(e.log), f"{read} != {len(e.log)}"),
        Check("rows written in the ledger = rows in the table", out == rows, f"{out} != {rows}"),
        Check(
            "duplicates in the ledger = redelivered messages",
            duplicates == redelivered,
            f"{duplicates} != {redelivered}",
        ),
        Check("batches of rows are contiguous", not _holes(e.rows_ledger), _some(_holes(e.rows_ledger))),
        Check("batches of windows are contiguous", not _holes(e.windows_ledger), _some(_holes(e.windows_ledger))),
        Check(
            "records read by the windows = records in the log",
            _sum(e.windows_ledger, "read") == len(e.log),
            f"{_sum(e.windows_ledger, 'read')} != {len(e.log)}",
        ),
    ]


def _holes(entries: Sequence[LedgerEntry]) -> list[str]:
    """Return the batches that do not start at the end of the previous one."""
    return [
        f"batch {after.batch}"
        for before, after in itertools.pairwise(entries)
        if after.batch != before.batch + 1 or after.start != before.end
    ]


def _sum(entries: Sequence[LedgerEntry], name: str) -> int:
    return sum(getattr(entry, name) or 0 for entry in entries)


def _equal(claim: str, found: set[str], wanted: set[str]) -> Check:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    return Check(claim, found == wanted, f"missing: {_some(missing)}; not expected: {_some(extra)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def _short(segment: AbnormalSegment) -> str:
    return f"{segment.kind} {segment.start:%d %b %H:%M} to {segment.end:%d %b %H:%M} ({segment.readings})"


def last_line(proof: Proof, segments: Sequence[AbnormalSegment], seconds: float) -> dict[str, Any]:
    """Return the last line of ``--json``."""
    return {
        "ok": proof.holds,
        **proof.counts,
        "segments": [segment.to_json() for segment in segments],
        "seconds": round(seconds, 1),
    }


TIMEOUT_MS = 20_000


class LogReader:
    """Reads the records of a TubeMQ topic from the broker; blocking. Context manager."""

    def __init__(self, masters: str, topic: str) -> None:
        self._tube = TubeClient(masters, TIMEOUT_MS)
        self._topic = topic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tube.close()

    def end_offsets(self) -> Offsets:
        """Return the current end offsets of the log."""
        bounds = self._tube.bounds(self._tube.partitions([self._topic]))
        return to_json({partition: bound.end for partition, bound in bounds.items()})

    def count(self, start: Offsets) -> int:
        """Return the number of records in the log from ``start`` on."""
        return sum(self._tube.count(piece) for piece in self._pieces(start))

    def records(self, start: Offsets) -> list[LoggedRecord]:
        """Return all records from ``start`` on."""
        found = []
        for piece in self._pieces(start):
            for batch in self._tube.read(piece):
                for offset, flag, payload in zip(batch.offsets, batch.flags, batch.payloads, strict=True):
                    record = Record.decode(bytes(payload), flag)
                    partition = piece.partition
                    time = _event_time_ms(record.value)
                    found.append(LoggedRecord(record.id or "", partition.topic, partition.key, int(offset), time))
        return found

    def _pieces(self, start: Offsets) -> list[Slice]:
        begin = from_json(start)
        ends = from_json(self.end_offsets())
        return [Slice(partition, begin.get(partition, 0), end) for partition, end in sorted(ends.items())]


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return ``columns`` of all committed rows of the table at ``path``; empty if nothing was committed."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for file in files(path):
        rows += pq.ParquetFile(file).read(list(columns)).to_pylist()
    return rows


async def read_alarms(store: StateStoreClient, branch: Branch, starts: Sequence[datetime]) -> list[Alarm]:
    """Read the alarms in the state store for windows that start at ``starts``."""
    found = []
    for start in starts:
        entry = await store.get(branch.window_key(start))
        if entry is not None:
            found.append(parse_alarm(bytes(entry.value)))
    return found


def _event_time_ms(payload: bytes) -> int | None:
    try:
        time = datetime.fromisoformat(json.loads(payload)["time"])
    except (ValueError, KeyError, TypeError):
        return None
    return (time.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
