"""Interval joins of two streams: rows and counts are those of a model, also after a crash and of one topic."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError, PenstockError, StorageError
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec import loader
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.pipelines import Setup
from tests.spark.processes import Driver, until

FILE = """\
name: {name}
sources:
  orders: {{topics: ["{topic}"], master: "{master}"}}
  payments: {{topics: ["PAYMENTS"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: ordered
    from: orders
    parse: {{schema: "n INT NOT NULL, part STRING, at TIMESTAMP"}}
  - name: received
    from: payments
    parse: {{schema: "n INT NOT NULL, part STRING, received_at TIMESTAMP"}}
  - name: large
    filter: n >= 0
  - name: paid
    from: ordered
    join:
      with: large
      on: [part]
      kind: left
      left_time: at
      right_time: received_at
      within: {{before: 5 seconds, after: 20 seconds}}
      watermark: 10 seconds
      late: dead_letter
      as: payment
  - name: checked
    map: {{compute: {{share: "100 / (n % 50)"}}}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows", format: parquet}}
"""
pytestmark = pytest.mark.timeout(900)
START = datetime(2026, 3, 1, tzinfo=UTC)
BEFORE, AFTER, DELAY = 5, 20, 10
EPOCH = -int(START.timestamp())
"""The year 1970, in seconds after ``START``: the watermark of Spark before the first one."""


class Row(NamedTuple):
    """A record of one side: its number, key, and time in seconds."""

    n: int
    part: str | None
    s: int


def record(row: Row, time: str) -> Record:
    value = {"n": row.n, "part": row.part, time: (START + timedelta(seconds=row.s)).isoformat()}
    return Record(json.dumps(value).encode(), key=b"k", id=f"{time[0]}{row.n}")


class Model:
    """Rows that Spark keeps, and the watermark, which advances with the slower side."""

    def __init__(self) -> None:
        self.kept: tuple[list[Row], list[Row]] = ([], [])
        self.late: tuple[list[Row], list[Row]] = ([], [])
        self.watermark = EPOCH

    def add(self, batch: tuple[list[Row], list[Row]]) -> None:
        for rows, kept, late in zip(batch, self.kept, self.late, strict=True):
            for row in rows:
                (late if row.s <= self.watermark else kept).append(row)
        self.watermark = max(self.watermark, min(max(row.s for row in rows) for rows in batch) - DELAY)

    def joined(self) -> list[tuple[int, int | None]]:
        """Return the rows of the left join, as DuckDB computes them."""
        database = duckdb.connect()
        for name, rows in zip(("l", "r"), self.kept, strict=True):
            database.execute(f"CREATE TABLE {name} (n INT, part VARCHAR, s INT)")
            database.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", [list(row) for row in rows])
        return database.execute(
            "SELECT l.n, r.n FROM l LEFT JOIN r ON l.part = r.part AND r.s BETWEEN l.s - ? AND l.s + ?", [BEFORE, AFTER]
        ).fetchall()


def generated(draw: random.Random, around: int, numbers: range) -> list[Row]:
    """Rows with times around one, some far behind, some without a key, and duplicates."""
    rows = []
    for n in numbers:
        part = None if draw.random() < 0.05 else f"p{draw.randrange(8)}"
        behind = draw.choice((0, 0, 0, 5, 9, 30, 120))
        rows.append(Row(n, part, around + draw.randrange(40) - behind))
    return rows + draw.sample(rows, 3)


def written(setup: Setup) -> list[dict[str, Any]]:
    return [row for file in files(setup.lake / "rows") for row in pq.ParquetFile(file).read().to_pylist()]


def full_disk(_ledger: Ledger, entry: LedgerEntry) -> None:
    assert entry.read
    raise StorageError("no space")


@pytest.mark.nightly
def test_rows_and_counts_are_those_of_a_model(
    setup_of: Callable[..., Setup], new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    payments = new_topic()
    setup = setup_of(FILE.replace("PAYMENTS", payments))
    draw = random.Random(7)
    model = Model()
    bad = [Record(b"nope", key=b"k", id="bad"), record(Row(-1, "p1", 0), "no_time"), record(Row(-2, "p1", 10**8), "at")]
    for round_ in range(3):
        numbers = range(100 * round_ + 1, 100 * round_ + 41)
        left, right = (generated(draw, 1_000 + 60 * round_, numbers) for _ in range(2))
        if round_ == 0:
            # The clock of the device is not set.
            left.append(Row(99, "p1", EPOCH))
        model.add((left, right))
        setup.send(*(record(row, "at") for row in left), *(bad if round_ == 1 else []))
        small = [Record(b'{"n": -1}', key=b"k", id="small")] * round_
        setup.node.append(payments, [(0, record(row, "received_at")) for row in right] + [(0, each) for each in small])
        if round_ == 1:
            # A crash between the sink and the ledger: the batch is repeated.
            with monkeypatch.context() as patched:
                patched.setattr(Ledger, "write", full_disk)
                with pytest.raises(PenstockError, match="no space"):
                    setup.run()
        if round_ == 2:
            # A crash between the ledger and Spark's commit of the batch without records, which wrote unmatched rows.
            setup.forget_the_last_commit("rows")
        setup.run()
    # Everything is complete when the watermark has passed it.
    last = (Row(1_000, "end", 10_000), Row(1_000, "end", 10_000))
    model.add(([last[0]], [last[1]]))
    setup.send(record(last[0], "at"))
    setup.node.append(payments, [(0, record(last[1], "received_at"))])
    setup.run()
    assert all(model.late)
    expected = model.joined()
    found = written(setup)
    # Rows on which the step behind the join fails are dead letters, with the joined row.
    pairs = Counter((n, None if m is None else m) for n, m in expected if n % 50)
    assert Counter((row["n"], None if row["payment"] is None else row["payment"]["n"]) for row in found) == pairs
    assert any(m is None for _, m in pairs)
    assert {row["_topic"] for row in found} == {setup.topic}
    assert {row["_id"] for row in found} == {f"a{n}" if m is None else f"a{n}|r{m}" for n, m in pairs}
    letters = setup.dead()
    assert Counter((letter["step"], letter["code"]) for letter in letters) == Counter(
        {
            ("ordered", "parse.not_json"): 1,
            ("paid", "event.no_time"): 1,
            ("paid", "event.ahead"): 1,
            ("paid", "event.late"): sum(map(len, model.late)),
            ("checked", "expression.failed"): len(expected) - pairs.total(),
        }
    )
    # A record has several joined rows, whose dead letters have states of their own.
    assert all(letter["part"] == (letter["id"] if letter["step"] == "checked" else None) for letter in letters)
    divided = [json.loads(letter["value"]) for letter in letters if letter["step"] == "checked"]
    assert divided
    assert all(not row["n"] % 50 and "payment" in row for row in divided)
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())
    join = account.counts.join
    matched = [{pair[side] for pair in expected if None not in pair} for side in (0, 1)]
    assert join == {
        "left": len(model.kept[0]),
        "right": len(model.kept[1]),
        "joined": sum(m is not None for _, m in expected),
        # The last rows are joined; they stay in the state.
        "unmatched_left": sum(m is None for _, m in expected),
        "unmatched_right": sum(row.n not in matched[1] for row in model.kept[1]),
        "late_left": len(model.late[0]),
        "late_right": len(model.late[1]),
    }
    assert account.counts.late == 0
    assert account.counts.out == pairs.total() == len(found)
    kinds = {kind for event in setup.events if event["event"] == "progress" for kind in state_kinds(event)}
    assert kinds <= {"join"}


def state_kinds(event: dict[str, Any]) -> list[str]:
    return [kind for sink in event["sinks"].values() for kind in sink["state_by_kind"]]


CYCLES = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL, kind STRING, at TIMESTAMP, tags ARRAY<INT>"}}
  - name: known
    expect: [{{name: kind, expression: "kind IN ('start', 'stop')"}}]
  - name: started
    filter: kind = 'start'
  - name: stopped
    from: known
    filter: kind = 'stop'
  - name: cycle
    from: started
    join:
      with: stopped
      on: [n]
      left_time: at
      right_time: at
      within: {{after: 1 minute}}
      watermark: 1 second
      as: stop
  - name: tagged
    explode: {{column: tags, as: tag}}
  - name: short
    expect: [{{name: fast, expression: "stop.at < at + INTERVAL '30' SECOND"}}]
sinks:
  - name: cycles
    console: {{rows: 100}}
"""


def test_streams_of_one_topic_are_joined_and_every_row_is_counted(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(CYCLES)

    def event(n: int, kind: str, s: int, *tags: int) -> Record:
        value = {"n": n, "kind": kind, "at": (START + timedelta(seconds=s)).isoformat(), "tags": tags}
        return Record(json.dumps(value).encode(), key=b"k", id=f"{kind}{n}")

    setup.send(event(1, "start", 0, 7, 8), event(1, "stop", 60), event(2, "start", 5, 9), b"nope", event(3, "odd", 5))
    setup.send(event(4, "stop", 6), event(5, "start", 7), event(5, "stop", 9), event(9, "start", 500, 1))
    setup.send(event(9, "stop", 510))
    setup.run()
    rows = [json.loads(row) for found in setup.events if found["event"] == "rows" for row in found["rows"]]
    assert sorted((row["n"], row["tag"], row["stop"]["at"][14:19]) for row in rows) == [
        (1, 7, "01:00"),
        (1, 8, "01:00"),
        (9, 1, "08:30"),
    ]
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())
    counts = account.counts
    # Each of the ten records is on both paths; the dead letter of the broken one is stored once.
    assert (counts.read, counts.dead, counts.letters, len(setup.dead())) == (20, 2, 1, 1)
    # Records of other kinds on each path, a row of each stream without a partner, and a pair without elements.
    assert counts.filtered == 5 + 5 + 1 + 1 + 1
    assert (counts.exploded, counts.out) == (1, 3)
    sums = {"left": 4, "right": 4, "joined": 3, "unmatched_left": 1, "unmatched_right": 1}
    assert counts.join == {**sums, "late_left": 0, "late_right": 0}
    checked = {name: (each.rows, each.violations) for name, each in counts.expectations.items()}
    assert checked == {"known.kind": (18, 2), "short.fast": (3, 2)}
    changed = CYCLES.replace("n INT NOT NULL", "n INT NOT NULL, more STRING")
    text = changed.format(
        name=setup.topic, topic=setup.topic, master=setup.node.master, broker=setup.node.mqtt, lake=setup.lake
    )
    setup.pipeline = loader.parse(text, name="p.yaml")
    setup.send(event(10, "start", 520))
    with pytest.raises(ConfigError, match="its join's columns changed since its checkpoint was created"):
        setup.run()


ROUNDS = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "6"))
MOST_LOTS = 12
"""Lots of records that are sent in a round, each with a few late ones."""


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_rows_are_exact_after_kills_of_the_driver(node: Node, new_topic: Callable[..., str], tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    draw, pause = random.Random(seed), threading.Event()
    topics = (new_topic(1), new_topic(1))
    text = FILE.replace("PAYMENTS", topics[1])
    setup = Setup(node, topics[0], tmp_path, text)
    file = tmp_path / "join.yaml"
    file.write_text(text.format(name=topics[0], topic=topics[0], master=node.master, broker=node.mqtt, lake=setup.lake))
    sent: tuple[dict[int, Row], dict[int, Row]] = ({}, {})
    lots = itertools.count(1)

    def send(rows: tuple[list[Row], list[Row]]) -> None:
        for topic, time_column, lot, known in zip(topics, ("at", "received_at"), rows, sent, strict=True):
            offsets = node.append(topic, [(0, record(row, time_column)) for row in lot])
            known.update(zip(offsets, lot, strict=True))

    def send_lot() -> None:
        number = next(lots)
        numbers = range(10 * number, 10 * number + 9)
        left, right = (generated(draw, 1_000 + 5 * number, numbers) for _ in topics)
        send((left, right))

    with Driver(tmp_path, file, "--state-dir", str(setup.state)) as driver:
        for round_ in range(ROUNDS):
            done = len(driver.events)
            send_lot()
            # Otherwise the driver may still be starting. It may be a repeated batch.
            until(partial(driver.has_batch, done), "a batch after the last kill", alive=driver.trouble)
            for _ in range(draw.randint(6, MOST_LOTS - 1)):
                send_lot()
                pause.wait(draw.uniform(0.0, 0.5))
            print(f"round {round_}: {len(setup.ledger.entries('rows'))} batches")
            driver.kill()
            driver.start()
        end = 40_000
        send(([Row(0, "end", end)], [Row(0, "end", end)]))
        flushed_ms = at_ms(end - DELAY)
        until(
            lambda: (last := setup.ledger.last("rows")) is not None and last.watermark_ms >= flushed_ms,
            "the end",
            alive=driver.trouble,
        )
        driver.terminate()
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
        driver.process = None
    model, entries = Model(), setup.ledger.entries("rows")
    for entry in entries:
        for side, stream in enumerate((f"orders/{topics[0]}", f"payments/{topics[1]}")):
            first, last = (next(iter(bound.get(stream, {"": 0}).values())) for bound in (entry.start, entry.end))
            for offset, row in sent[side].items():
                if first <= offset < last:
                    is_late = at_ms(row.s) <= entry.late_watermark_ms
                    (model.late if is_late else model.kept)[side].append(row)
    assert sum(map(len, (*model.kept, *model.late))) == sum(map(len, sent))
    assert all(model.late)
    expected = Counter((n, m) for n, m in model.joined() if n % 50)
    found = Counter((row["n"], None if row["payment"] is None else row["payment"]["n"]) for row in written(setup))
    assert found == expected
    late = Counter(letter["id"] for letter in setup.dead() if letter["code"] == "event.late")
    assert late == Counter(f"{name}{row.n}" for name, rows in zip("ar", model.late, strict=True) for row in rows)
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())
    print(f"{sum(map(len, sent))} records, {found.total()} rows, {len(entries)} batches, {ROUNDS} kills")


def at_ms(s: int) -> int:
    """A time in seconds after ``START`` in ms since 1970."""
    return (s - EPOCH) * 1000
