"""Sinks of messages, the console, and windows other than tumbling ones, in whole pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_STEP
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.pipelines import Setup

HEAD = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: MOST}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
steps:
  - name: parsed
    parse: {{schema: "place STRING, time TIMESTAMP NOT NULL, flow DOUBLE"}}
"""
MESSAGES = (
    'dead_letters: {{path: "{lake}/dead"}}\n'
    + HEAD.replace("MOST", "100")
    + """\
sinks:
  - name: records
    tubemq:
      topic: OUT
      key: "{{place}}"
      value: [place, flow]
      when: flow >= 0
      headers: {{place: "{{place}}"}}
  - name: alarms
    mqtt: {{topic: "{name}/{{place}}", retain: true, value: flow, order_by: time, properties: {{at: "{{time}}"}}}}
  - name: seen
    console: {{rows: 2}}
"""
)
DEDUPED = MESSAGES.replace("sinks:\n", "  - name: once\n    dedupe: {{within: 1 day}}\nsinks:\n")
"""With a query for each sink."""
WINDOWS = (
    HEAD.replace("MOST", "4")
    + """\
  - name: sliding
    window: {{time: time, duration: 20 minutes, slide: 10 minutes, watermark: 10 minutes, aggregates: {{n: count(*)}}}}
  - name: sessions
    from: parsed
    window: {{time: time, gap: 10 minutes, watermark: 10 minutes, by: [place], aggregates: {{n: count(*)}}}}
sinks:
  - name: slides
    from: sliding
    mqtt: {{topic: "{name}/{{window_start}}", retain: true, value: n}}
  - name: sessions
    from: sessions
    table: {{path: "{lake}/sessions"}}
"""
)
NOON = datetime(2022, 3, 20, 12, tzinfo=UTC)


def message(
    name: str, minute: int, place: str | None = "p", flow: float | None = 1.0, headers: Sequence[tuple[str, str]] = ()
) -> Record:
    value = {"place": place, "time": (NOON + timedelta(minutes=minute)).isoformat(), "flow": flow}
    return Record(json.dumps(value).encode(), id=name, headers=list(headers))


def sent(spark: SparkSession, node: Node, topic: str) -> list[Any]:
    read = spark.read.format("tubemq").option("tubemq.master", node.master).option("subscribe", topic)
    return read.option("includeHeaders", "true").load().orderBy("partition", "offset").collect()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("deduped", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_rows_become_messages_once(
    setup_of: Callable[..., Setup], spark: SparkSession, node: Node, new_topic: Callable[..., str], deduped: bool
) -> None:
    out = new_topic(1)
    setup = setup_of((DEDUPED if deduped else MESSAGES).replace("OUT", out), 1)
    name = setup.pipeline.name
    copies = [message("a", 0)] * deduped
    setup.send(message("a", 0), message("b", 1, "q", 2.0), *copies, message("c", 2, None))
    setup.send(message("d", 3, "q", -1.0), message("e", 4, "x/#"), message("f", 5, "q", None), b"nope")
    setup.run()

    first = sent(spark, node, out)
    ids = [{h["key"]: bytes(h["value"]).decode() for h in row["headers"]} for row in first]
    # Neither the one without a place nor those below nothing: its key and header are left out, the value says so.
    assert sorted(i["id"] for i in ids) == [f"{i}/{name}.records" for i in "abce"]
    by_id = {i["id"].partition("/")[0]: (row, i) for row, i in zip(first, ids, strict=True)}
    row, headers = by_id["b"]
    assert (bytes(row["key"]), json.loads(row["value"])) == (b"q", {"place": "q", "flow": 2.0})
    assert (headers["content-type"], headers["place"]) == ("application/json", "q")
    assert by_id["c"][0]["key"] is None
    assert "place" not in by_id["c"][1]

    retained = {m.topic: m for m in node.retained(f"{name}/#", 2)}
    assert {topic: float(m.payload) for topic, m in retained.items()} == {f"{name}/p": 1.0, f"{name}/q": -1.0}
    own = dict(retained[f"{name}/p"].properties.user_properties)
    assert own == {"id": f"a/{name}.alarms", "at": "2022-03-20T12:00:00Z"}

    letters = {(letter["id"], letter["step"]): letter["reason"] for letter in setup.dead() if letter["id"] in "abcdef"}
    assert letters == {
        ("c", "sink:alarms"): f"a column of the topic {name}/{{place}} is null",
        ("e", "sink:alarms"): f"{name}/x/# is not a valid topic",
        ("f", "sink:alarms"): "the value is null",
    }
    sums = {sink: setup.ledger.counts(sink) for sink in ("records", "alarms", "seen")}
    assert [(s.read - len(copies), s.out, s.dead, s.filtered, s.duplicates) for s in sums.values()] == [
        (7, 4, 1, 2, len(copies)),
        (7, 3, 4, 0, len(copies)),
        (7, 6, 1, 0, len(copies)),
    ]
    shown = [event for event in setup.events if event["event"] == "rows"]
    assert sum(len(event["rows"]) for event in shown) == 2
    assert json.loads(shown[0]["rows"][0]).keys() == {"place", "time", "flow"}
    accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert [account.off for account in accounts] == [(), (), ()]

    # As after a crash between the sink and the commit: the batch is run again, and the tube takes it once.
    setup.forget_the_last_data("records")
    if deduped:
        # And a letter of one sink, mended and sent again, is new for that sink alone.
        setup.send(message("c", 2, "r", headers=[(REDRIVE, "1"), (REDRIVE_STEP, "sink:alarms")]))
    setup.run()
    again = sent(spark, node, out)
    kept = [{h["key"]: bytes(h["value"]).decode() for h in row["headers"]}["id"] for row in again]
    assert kept == [i["id"] for i in ids]
    assert node.staged == 0
    if deduped:
        assert f"{name}/r" in {m.topic for m in node.retained(f"{name}/#", 3)}
        assert setup.ledger.counts("records").duplicates == 2


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_sliding_windows_and_sessions(setup_of: Callable[..., Setup], node: Node) -> None:
    setup = setup_of(WINDOWS, 1)
    name = setup.pipeline.name
    setup.send(message("a", 1), message("b", 5), message("c", 30), message("d", 31, "q"))
    # The watermark is 12:21 from here on, and events are compared with it from the batch after the next one on.
    setup.send(*(message(f"e{n}", 30) for n in range(4)))
    # 12:05 is in windows that have ended, 12:12 is in one that has not.
    setup.send(message("late", 5), message("not too late", 12), message("far", 90), message("farther", 120))
    setup.run()

    counts = {m.topic.rpartition("/")[2][11:16]: int(m.payload) for m in node.retained(f"{name}/#", 9)}
    assert counts == {
        "11:50": 2,
        "12:00": 2,
        "12:10": 1,
        "12:20": 6,
        "12:30": 6,
        "13:20": 1,
        "13:30": 1,
        "13:50": 1,
        "14:00": 1,
    }
    assert [setup.ledger.counts(sink).late for sink in ("slides", "sessions")] == [1, 1]
    rows = [row for file in files(setup.lake / "sessions") for row in pq.ParquetFile(file).read().to_pylist()]
    spans = sorted(
        (row["place"], f"{row['window_start']:%H:%M}", f"{row['window_end']:%H:%M}", row["n"]) for row in rows
    )
    assert spans == [
        ("p", "12:01", "12:15", 2),
        # The session before it had been closed when its event came.
        ("p", "12:12", "12:22", 1),
        ("p", "12:30", "12:40", 5),
        ("p", "13:30", "13:40", 1),
        ("q", "12:31", "12:41", 1),
    ]
