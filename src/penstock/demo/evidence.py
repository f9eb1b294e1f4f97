"""Reads what the proof looks at: the log itself, the tables by their commit logs, the ledger, the alarms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from penstock.demo.data import Branch
from penstock.demo.proof import Logged
from penstock.demo.segments import Alarm, parse_alarm
from penstock.pipelines.sinks.table import files
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.spark.tube.cluster import Tube
from penstock.spark.tube.offsets import Slice, from_json, to_json
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.record import Record

__all__ = ["LogReader", "read_alarms", "read_table"]

TIMEOUT_MS = 20_000


class LogReader:
    """The records of one tube topic, over the broker's own wire; blocking. Use it in a ``with`` block."""

    def __init__(self, masters: str, topic: str) -> None:
        self._tube = Tube(masters, TIMEOUT_MS)
        self._topic = topic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tube.close()

    def end(self) -> Offsets:
        """Current end offsets of the log."""
        bounds = self._tube.bounds(self._tube.partitions([self._topic]))
        return to_json({partition: bound.end for partition, bound in bounds.items()})

    def count(self, start: Offsets) -> int:
        """Number of records in the log from ``start`` on."""
        return sum(self._tube.count(piece) for piece in self._pieces(start))

    def records(self, start: Offsets) -> list[Logged]:
        """All records from ``start`` on."""
        found = []
        for piece in self._pieces(start):
            for batch in self._tube.read(piece):
                for offset, flag, payload in zip(batch.offsets, batch.flags, batch.payloads, strict=True):
                    record = Record.decode(bytes(payload), flag)
                    partition = piece.partition
                    time = _event_time_ms(record.value)
                    found.append(Logged(record.id or "", partition.topic, partition.key, int(offset), time))
        return found

    def _pieces(self, start: Offsets) -> list[Slice]:
        begin = from_json(start)
        ends = from_json(self.end())
        return [Slice(partition, begin.get(partition, 0), end) for partition, end in sorted(ends.items())]


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """``columns`` of every committed row of the table at ``path``; no rows where nothing was committed."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for file in files(path):
        rows += pq.ParquetFile(file).read(list(columns)).to_pylist()
    return rows


async def read_alarms(store: StateStoreClient, branch: Branch, starts: Sequence[datetime]) -> list[Alarm]:
    """The alarms that stand in the state store for the windows that start at ``starts``."""
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
