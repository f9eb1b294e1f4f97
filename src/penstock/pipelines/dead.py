"""Dead letters: what is in the table of a pipeline, and sending letters into their topic again.

A letter keeps the record as it was: value, key and headers. Sent again it has the same id, and a header that counts, so
that a dedupe lets it through once more. What was sent again is noted beside the table, after the tube has acknowledged
it: a crash between the two sends it once more, never not at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from penstock.pipelines.durable import read_json, write_json
from penstock.pipelines.table import files
from penstock.pipelines.values import REDRIVE, REDRIVE_STEP
from penstock.spark.headers import record_of
from penstock.tube.producer import Producer
from penstock.tube.record import Record

__all__ = ["Letter", "Place", "letters", "redrive", "redriven"]

Place = tuple[str, int, int, int]
"""Topic, broker, partition and offset of the record."""


class Letter(NamedTuple):
    """One record that a step could not process."""

    step: str
    reason: str
    id: str
    topic: str
    broker: int
    partition: int
    offset: int
    timestamp: datetime
    key: bytes | None
    headers: list[tuple[str, bytes]]
    value: bytes

    @property
    def place(self) -> Place:
        """Where the record stands in the tube."""
        return self.topic, self.broker, self.partition, self.offset


def letters(path: Path) -> Iterator[Letter]:
    """The letters of the dead letter table at ``path``, in the order in which they were written.

    Raises:
        StorageError: a committed file is gone.
    """
    import pyarrow.parquet as pq

    for file in files(path):
        for row in pq.ParquetFile(file).read().to_pylist():
            yield _letter(row)


def _letter(row: dict[str, Any]) -> Letter:
    headers = [(header["key"], header["value"] or b"") for header in row["headers"] or ()]
    # Tables of older versions have no key.
    values: list[Any] = [headers if name == "headers" else row.get(name) for name in Letter._fields]
    return Letter(*values)


def redriven(path: Path) -> set[Place]:
    """The places of the letters that were sent again."""
    found: set[Place] = set()
    for note in (path / "_redriven").glob("*.json"):
        found |= {(str(t), int(b), int(p), int(o)) for t, b, p, o in read_json(note)["places"]}
    return found


async def redrive(path: Path, chosen: Sequence[Letter], masters: str) -> int:
    """Send ``chosen`` into their topics again, with the ids they had; how many were acknowledged and noted.

    Raises:
        PenstockError: one was not acknowledged; nothing is noted, so all of them may be sent once more.
    """
    if not chosen:
        return 0
    async with Producer(masters) as producer:
        by_topic: dict[str, list[Record]] = {}
        for letter in chosen:
            by_topic.setdefault(letter.topic, []).append(_again(letter))
        for topic, records in by_topic.items():
            await producer.send_all(topic, records)
    note = path / "_redriven" / f"{time.time_ns()}.json"
    write_json(note, {"places": [letter.place for letter in chosen]})
    return len(chosen)


def _again(letter: Letter) -> Record:
    times = [int(value) for name, value in letter.headers if name == REDRIVE and value.isdigit()]
    kept = [(name, value) for name, value in letter.headers if name not in (REDRIVE, REDRIVE_STEP)]
    marks = [(REDRIVE, b"%d" % (max(times, default=0) + 1)), (REDRIVE_STEP, letter.step.encode())]
    record = record_of(letter.value, letter.key, [*kept, *marks])
    record.id = letter.id
    return record
