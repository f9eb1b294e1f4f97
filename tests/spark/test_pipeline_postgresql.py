"""Sinks of PostgreSQL in whole pipelines: rows, upserts and windows, repeated batches, refused rows, outages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.ledger.plan_changes import check_table_types
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run.queries import ONE_FILE
from penstock.pipelines.spec import loader
from penstock.tube.record import Record
from tests.postgresql import PASSWORD, Postgres, running_postgres
from tests.spark.node import SEGMENT_RECORDS
from tests.spark.pipelines import Setup
from tests.spark.processes import DEADLINE_S, until

HEAD = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: MOST}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "place STRING, time TIMESTAMP NOT NULL, flow DOUBLE, tags ARRAY<STRING>"}}
"""
FILE = (
    HEAD
    + """\
sinks:
  - name: history
    from: parsed
    postgresql: {{url: "URL", password_file: "PASSWORD", table: History, create: true}}
  - name: newest
    from: parsed
    postgresql:
      url: "URL"
      password_file: "PASSWORD"
      table: public.newest
      mode: upsert
      key: [place]
      order_by: time
      delete_when: flow < 0
      create: true
"""
)
HOURS = """\
  - name: hours
    window: {{time: time, duration: 1 hour, watermark: 10 minutes, by: [place], aggregates: {{n: count(*)}}}}
sinks:
"""
COUNTS = """\
  - name: counts
    from: hours
    postgresql:
      {{url: "URL", password_file: "PASSWORD", table: counts, mode: upsert, key: [place, window_start], create: true}}
"""
WITH_WINDOWS = FILE.replace("sinks:\n", HOURS) + COUNTS
"""Also with a query of its own, which needs as much processor time again."""
NOON = datetime(2022, 3, 20, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


TAGS = ["a", None, "\\u0000"]
"""The last one is a backslash and five characters."""


def record(
    name: str, minute: int, place: str | None = "p", flow: float | None = 1.0, tags: Sequence[str | None] = TAGS
) -> Record:
    value = {"place": place, "time": (NOON + timedelta(minutes=minute)).isoformat(), "flow": flow, "tags": tags}
    return Record(json.dumps(value).encode(), id=name)


def filled(text: str, postgres: Postgres, most: int) -> str:
    text = text.replace("MOST", str(most))
    return text.replace("URL", postgres.url).replace('"PASSWORD"', f'"{postgres.password_file}"')


@pytest.mark.timeout(600)
@pytest.mark.parametrize("windows", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_rows_are_in_the_tables_once(setup_of: Callable[..., Setup], postgres: Postgres, windows: bool) -> None:
    if windows:  # by night they follow the other test
        postgres.execute('DROP TABLE IF EXISTS "History", newest, counts')
    setup = setup_of(filled(WITH_WINDOWS if windows else FILE, postgres, 100), 1)
    check_table_types(setup.pipeline)
    setup.send(record("a", 0), record("b", 1, "q", 2.0), record("c", 2, None), record("d", 3, "p\0"), b"nope")
    setup.send(record("e", 4, "p", 5.0), record("f", 5, "q", -1.0), record("k", 5, None, tags=["\\\0"]))
    setup.run()
    history = 'SELECT place, time, flow, tags FROM "History" ORDER BY time'

    def at(minute: int) -> datetime:
        return NOON + timedelta(minutes=minute)

    first = [("p", at(0), 1.0, TAGS), ("q", at(1), 2.0, TAGS), (None, at(2), 1.0, TAGS), ("p", at(4), 5.0, TAGS)]
    assert postgres.rows(history) == [*first, ("q", at(5), -1.0, TAGS)]
    assert postgres.rows("SELECT place, flow FROM newest") == [("p", 5.0)]
    counts = "SELECT place, window_start, n FROM counts ORDER BY place, window_start"
    # The window of a place that PostgreSQL does not store, and that without one, are dead letters of their sink.
    assert not windows or postgres.rows(counts) == [("p", NOON, 2), ("q", NOON, 2)]
    letters = sorted((letter["step"], letter["reason"]) for letter in setup.dead() if letter["step"] != "parsed")
    nul = "column place has U+0000 or invalid UTF-8, which PostgreSQL does not store"
    null = "column place of the key is null"
    assert letters == sorted([
        *(("sink:history", nul), ("sink:history", "column tags has U+0000, which PostgreSQL does not store")),
        *(("sink:newest", nul), ("sink:newest", null), ("sink:newest", null)),
        *(("sink:counts", reason) for reason in (nul, null) if windows),
    ])  # fmt: skip

    # As after a crash between the commit of PostgreSQL and that of the checkpoint: the batch is repeated.
    for sink in ("history", "newest"):
        setup.forget_the_last_data(sink)
    setup.send(record("g", 6, "r"), record("h", 70, "p", 7.0))
    setup.run()
    assert [row[:1] for row in postgres.rows(history)] == [("p",), ("q",), (None,), ("p",), ("q",), ("r",), ("p",)]
    assert postgres.rows("SELECT place, flow FROM newest ORDER BY place") == [("p", 7.0), ("r", 1.0)]
    assert not windows or postgres.rows(counts) == [
        ("p", NOON, 2),
        ("p", NOON + timedelta(hours=1), 1),
        ("q", NOON, 2),
        ("r", NOON, 1),
    ]
    accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert [(account.off, account.unknown) for account in accounts] == [((), ())] * (2 + windows)
    assert [setup.ledger.counts(sink).out for sink in ("history", "newest")] == [7, 6]
    assert all(name in ("penstock_batches", "History", "newest", "counts") for (name,) in postgres.rows(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    ))  # fmt: skip
    # Neither in the plan, nor in the ledger, nor in an event.
    told = json.dumps(setup.events) + "".join(
        path.read_text(errors="replace") for path in setup.state.rglob("*") if path.is_file()
    )
    assert PASSWORD not in told

    # The ledger is compared with what the server has.
    postgres.execute("UPDATE penstock_batches SET total_rows = 6 WHERE sink = 'history'")
    (off, *_) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert [text.partition("database")[2] for text in off.off] == [" 'plant' has written 6 rows, the ledger has 7 out"]

    # Another type of a column is refused before anything is read, with the statement that changes it.
    text = json.dumps(setup.pipeline.model_dump(mode="json", by_alias=True, exclude_none=True))
    changed = loader.parse(text.replace("flow DOUBLE", "flow DECIMAL(5,2)"), name="p.yaml")
    with pytest.raises(ConfigError) as refused:
        check_table_types(changed)
    assert refused.value.hint == (
        'ALTER TABLE "public"."History" ALTER COLUMN "flow" TYPE numeric(5,2), or cast it in the pipeline'
    )
    # A row that a constraint refuses stops the run, with its record.
    postgres.execute('ALTER TABLE "History" ADD CONSTRAINT low CHECK (flow < 10)')
    setup.send(record("i", 71, "p", 8.0), record("j", 72, "p", 11.0))
    with pytest.raises(PenstockError, match="refused a row of record 'j' of sink 'history'") as stopped:
        setup.run()
    assert 'violates check constraint "low"' in str(stopped.value)
    assert postgres.rows('SELECT count(*) FROM "History"') == [(7,)]


OUTAGE = (
    HEAD
    + """\
sinks:
  - name: history
    postgresql: {{url: "URL", password_file: "PASSWORD", table: after_outage, create: true}}
  - name: rows
    table: {{path: "{lake}/rows"}}
"""
)
MOST = 250
"""Records of a batch. After 100 batches the server lacks too many records for a single batch: see ``is_near``."""


BATCH_S = 12.0
"""Seconds that a batch may take on a busy machine."""


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(("batches", "deleted"), [(3, False), (100, True)])
def test_a_server_that_is_down_gets_everything_once_it_is_back(
    setup_of: Callable[..., Setup], postgres: Postgres, batches: int, deleted: bool
) -> None:
    """``deleted``: then another outage, in which retention deletes records that PostgreSQL lacks.

    By day: ``test_a_sink_that_fails_leaves_the_others_alone_and_joins_them_again``, with another kind of sink, and
    ``tests/unit/spark/postgresql/test_writes.py``, with a server that crashes and connections that break.
    """
    postgres.execute("DROP TABLE IF EXISTS after_outage")
    setup = setup_of(filled(OUTAGE, postgres, MOST), 1)
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        setup.send(*(record(f"r{n}", n) for n in range(sent, sent + count)))
        sent += count

    def wait_for(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        until(
            holds, what, alive=lambda: repr(run.exception()) if run.done() else None,
            deadline_s=max(deadline_s, DEADLINE_S),
        )  # fmt: skip

    def queries() -> list[list[str]]:
        found: list[list[list[str]]] = [event["queries"] for event in list(setup.events) if "queries" in event]
        return found[-1] if found else []

    def out(sink: str) -> int:
        return setup.ledger.counts(sink).out

    def warnings(part: str) -> list[str]:
        found = [event["text"] for event in list(setup.events) if event["event"] == "warning"]
        return [text for text in found if part in text]

    def failures() -> list[dict[str, Any]]:
        return [event for event in list(setup.events) if event["event"] == "sinks_failed"]

    send(MOST)
    with setup.running() as run:
        wait_for(lambda: out("history") == out("rows") == sent, "both sinks to have the first batch")
        before = setup.ledger.last("rows")
        postgres.stop("immediate")
        send(batches * MOST)
        # The other sink of the query does not wait.
        wait_for(lambda: out("rows") == sent, "the table to have all rows", deadline_s=BATCH_S * batches)
        after = setup.ledger.last("rows")
        assert before is not None
        assert after is not None
        assert after.batch - before.batch >= batches
        assert out("history") == MOST
        assert sorted(queries()) == [["history"], ["rows"]]
        postgres.start()
        # The newest segment, which retention keeps, has a quarter of its records.
        send(SEGMENT_RECORDS - sent % SEGMENT_RECORDS + SEGMENT_RECORDS // 4)
        wait_for(lambda: out("history") == out("rows") == sent, "PostgreSQL to have all rows", BATCH_S * batches)
        wait_for(lambda: queries() == [["history", "rows"]], "the sink to share the query again")
        assert postgres.rows("SELECT count(*), count(DISTINCT time) FROM after_outage") == [(sent, sent)]
        accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
        assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 2
        assert not warnings("retention")
        # In a query of its own until it lacks no more than one batch can have.
        own = sum(entry.read == MOST for entry in setup.ledger.entries("history"))
        assert own >= (batches * MOST - ONE_FILE) // MOST

        if not deleted:
            return
        # First a warning, then an error; the other sink continues.
        setup.node.expire_closed_segments()
        reached = sent
        postgres.stop("immediate")
        send(SEGMENT_RECORDS * 3 // 2)
        wait_for(lambda: out("rows") == sent, "the table to have all rows")
        wait_for(lambda: bool(warnings("retention")), "a warning that retention reaches the records")
        (warning,) = warnings("retention")
        assert warning.startswith("sink 'history' fails and has not read 86% of the records that a partition stores")
        setup.node.expire_closed_segments()
        postgres.start()
        wait_for(lambda: bool(failures()), "the sink to fail")
        send(MOST)
        wait_for(lambda: out("rows") == sent, "the table to have all rows")
    (failure,) = failures()
    assert failure["sinks"] == ["history"]
    assert "is no longer stored" in failure["error"]
    # An attempt may have read its records before they were deleted.
    assert out("history") in (reached, reached + MOST)
    assert postgres.rows("SELECT count(*), count(DISTINCT time) FROM after_outage") == [(out("history"),) * 2]
