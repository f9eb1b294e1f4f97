"""Kafka as a source of pipelines, with a real broker: transactions, new partitions, repeated batches, deletions."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from pyspark.sql import SparkSession

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.ledger import dead_letters
from penstock.pipelines.ledger.dead_letters import letters, redrive, redriven_copies
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.letter_states import LetterState, set_state
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run import run as running
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.values import REDRIVE
from penstock.pipelines.state_dir.replay import Copies, RedrivenCopy, plan_replay
from penstock.pipelines.testing.sample import check_steps, sample_steps
from tests.interop.kafka import KafkaBroker, committed
from tests.spark.node import Node
from tests.spark.pipelines import Setup
from tests.spark.processes import Driver, until

FILE = """\
name: {name}
source: {{format: kafka, bootstrap: ["ADDRESS"], topics: [plant], max_records: 20}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL, topic STRING"}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows", format: parquet}}
"""
COPIES = """\
  - name: copies
    table: {{path: "{lake}/copies", format: parquet}}
trigger: 50 milliseconds
"""
"""A sink that shares the query."""


def written(setup: Setup) -> dict[int, dict[str, Any]]:
    return table(setup.lake / "rows")


def table(path: Path) -> dict[int, dict[str, Any]]:
    """The rows by their number, each once."""
    rows = [row for file in files(path) for row in pq.ParquetFile(file).read().to_pylist()]
    found = {int(row["n"]): row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.timeout(600)
async def test_records_are_read_once(
    setup_of: Callable[..., Setup], spark: SparkSession, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = kafka.address
    setup = setup_of(FILE.replace("ADDRESS", address), 1)
    with pytest.raises(ConfigError, match="has no topic 'plant'"):
        setup.run()
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("plant", 2, 1)])["plant"].result(60)
    plain = Producer({"bootstrap.servers": address})
    writer = Producer({"bootstrap.servers": address, "transactional.id": "writer"})
    writer.init_transactions(60)

    def send(*numbers: int | None, partition: int = 0) -> None:
        # A new client, since one learns of a new partition late.
        plain = Producer({"bootstrap.servers": address})
        for n in numbers:
            value = b"nope" if n is None else json.dumps({"n": n}).encode()
            plain.produce("plant", value, b"k", partition=partition, headers={"unit": b"C"})
        assert plain.flush(60) == 0

    def transaction(*numbers: int, commit: bool) -> None:
        writer.begin_transaction()
        for n in numbers:
            writer.produce("plant", json.dumps({"n": n}), partition=0)
        assert writer.flush(60) == 0
        (writer.commit_transaction if commit else writer.abort_transaction)(60)

    # Markers and aborted records are between, and behind, the records of a batch: a batch of 20 offsets may be empty.
    send(0, 1)
    transaction(*range(1000, 1020), commit=False)
    transaction(2, 3, commit=True)
    send(*range(4, 20), partition=1)
    plain.produce("plant", b"nope", partition=1)
    plain.produce("plant", None, partition=1)
    assert plain.flush(60) == 0
    transaction(1020, commit=False)
    setup.run()
    first = written(setup)
    assert sorted(first) == list(range(20))
    row = first[4]
    assert (row["kafka_topic"], row["kafka_partition"], row["kafka_offset"]) == ("plant", 1, 0)
    assert (row["kafka_key"], row["kafka_headers"]) == (b"k", [{"key": "unit", "value": b"C"}])
    assert (row["kafka_timestamp_type"], row["topic"]) == (0, None)
    assert row["kafka_timestamp"] is not None
    dead = {letter["offset"]: (letter["topic"], letter["partition"], letter["value"]) for letter in setup.dead()}
    assert dead == {16: ("plant", 1, b"nope"), 17: ("plant", 1, b"")}
    counts = setup.ledger.counts("rows")
    assert (counts.read, counts.out, counts.dead) == (22, 20, 2)
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())
    with pytest.raises(ConfigError, match="it does not permit writing to its topics"):
        await redrive(setup.lake / "dead", list(letters(setup.lake / "dead")), setup.pipeline, setup.state)

    # As after a crash between the sink and Spark's commit; meanwhile there are a new partition and an open transaction.
    setup.forget_the_last_commit("rows")
    admin.create_partitions([NewPartitions("plant", 3)])["plant"].result(60)
    begin = time.time_ns() // 1_000_000
    send(*range(20, 30), None, partition=2)
    end = time.time_ns() // 1_000_000 + 1
    await asyncio.sleep(0.01)
    writer.begin_transaction()
    writer.produce("plant", b'{"n": 50}', partition=0)
    assert writer.flush(60) == 0
    send(40)
    setup.run()
    assert sorted(written(setup)) == list(range(30))
    copies = await redrive_after_a_crash(setup, monkeypatch)
    writer.commit_transaction(60)
    setup.run()
    assert sorted(written(setup)) == [*range(30), 40, 50, 200]
    row = written(setup)[200]
    assert (row["kafka_partition"], row["kafka_offset"], row["kafka_key"]) == (2, 11, b"k")
    assert begin <= row["kafka_timestamp"].timestamp() * 1000 < end
    headers = {header["key"]: header["value"] for header in row["kafka_headers"]}
    assert [headers[name] for name in ("id", "unit", REDRIVE)] == [b"plant/0:2@10", b"C", b"1"]
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())

    # What was sent first is not in the range, nor what was sent after it, in other partitions.
    replay = plan_replay(setup.pipeline, setup.lake.with_name("replay"), str(begin), str(end), live=False)
    options = running.RunOptions(available_now=True, span=replay.span, lease=replay.lease, redriven=copies)
    running.run(replay.pipeline, state=replay.state, options=options, emit=setup.events.append, stop=threading.Event())
    # Of the redriven record the copy, once.
    assert sorted(table(setup.lake.with_name("replay") / "tables" / "rows")) == [*range(20, 30), 200]
    counts = Ledger(replay.state / "ledger").counts("rows")
    assert (counts.read, counts.out, counts.dead, counts.filtered) == (12, 11, 0, 1)
    refused = plan_replay(setup.pipeline, setup.lake.with_name("refused"), '{"plant": {"1:0": 28}}', None, live=False)
    with pytest.raises(ConfigError, match="cannot be replayed from or to offsets: it reads Kafka"):
        running.run(
            refused.pipeline, state=refused.state, options=replace(options, span=refused.span),
            emit=setup.events.append, stop=threading.Event(),
        )  # fmt: skip
    (sample,) = sample_steps(spark, setup.pipeline, check_steps(setup.pipeline, []), 3, 20)
    assert {29, 200} <= {row["n"] for row in sample.rows}
    assert sample.live + sample.dead <= 9

    send(60, 61, 62)
    gone = TopicPartition("plant", 0, -1)
    admin.delete_records([gone])[gone].result(60)
    with pytest.raises(PenstockError, match=r"plant:0 of Kafka at .* has no records from offset") as caught:
        setup.run()
    assert "give the sink that failed a new name" in str(caught.value.hint)
    assert sorted(written(setup)) == [*range(30), 40, 50, 200]
    # With a new name the sink reads what exists, also what it has read of the other partitions.
    send(63)
    (sink,) = setup.pipeline.sinks
    assert sink.table is not None
    elsewhere = sink.table.model_copy(update={"path": str(setup.lake / "again")})
    again = sink.model_copy(update={"name": "rows_again", "table": elsewhere})
    setup.pipeline = setup.pipeline.model_copy(update={"sinks": [again]})
    setup.run()
    assert sorted(table(setup.lake / "again")) == [*range(4, 30), 63, 200]


async def redrive_after_a_crash(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Redrive the letter of partition 2, once more after a crash; return the coordinates of its copy."""
    dead = setup.lake / "dead"
    source = setup.pipeline.source
    assert source is not None
    pipeline = setup.pipeline.model_copy(update={"source": source.model_copy(update={"redrive": True})})
    chosen = [letter for letter in letters(dead) if letter.partition == 2]
    set_state(dead, chosen, LetterState.CORRECTED, b'{"n": 200}')

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as crashing:
        crashing.setattr(dead_letters, "_list_redriven", crash)
        with pytest.raises(KeyboardInterrupt):
            await redrive(dead, chosen, pipeline, setup.state)
    assert redriven_copies(dead) == {}
    assert await redrive(dead, chosen, pipeline, setup.state) == 1
    copies = redriven_copies(dead)
    (topic_id,) = {copy.topic_id for copy in copies.values()}
    assert topic_id
    assert copies == {chosen[0].place: RedrivenCopy(("plant", 0, 2, 11), "parsed", topic_id)}
    return copies


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_drivers(node: Node, tmp_path: Path) -> None:
    """Transactions are written and aborted, and a partition is added, while drivers of two tables are killed."""
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    rounds = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "4"))
    dice, pause, stop = random.Random(seed), threading.Event(), threading.Event()
    kafka = KafkaBroker(tmp_path)
    kafka.start()
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.create_topics([NewTopic("plant", 2, 1)])["plant"].result(60)
    writer = Producer({"bootstrap.servers": kafka.address, "transactional.id": "writer"})
    writer.init_transactions(60)
    number = 0

    def write(partitions: int) -> None:
        nonlocal number
        is_kept = dice.random() < 0.7
        writer.begin_transaction()
        for _ in range(dice.randrange(1, 8)):
            value = b"broken" if dice.random() < 0.05 else json.dumps({"n": number}).encode()
            writer.produce("plant", value, partition=dice.randrange(partitions))
            number += 1
        assert writer.flush(60) == 0
        (writer.commit_transaction if is_kept else writer.abort_transaction)(60)

    def keep_writing() -> None:
        while not stop.wait(0.1):
            write(2)

    lake, state, file = tmp_path / "lake", tmp_path / "state", tmp_path / "p.yaml"
    # Batches keep up with the writer.
    text = (FILE + COPIES).replace("ADDRESS", kafka.address).replace("max_records: 20", "max_records: 200")
    file.write_text(text.format(name="killed", broker=node.mqtt, lake=lake))
    ledger, thread = Ledger(state / "ledger"), threading.Thread(target=keep_writing)
    thread.start()
    try:
        with Driver(tmp_path, file, f"--state-dir={state}", "--spark-master=local[2]") as driver:
            for count in range(rounds):
                until(partial(driver.has_batch, len(driver.events)), "a batch after the last kill")
                pause.wait(dice.uniform(0.0, 1.0))
                driver.kill()
                if not count:
                    admin.create_partitions([NewPartitions("plant", 3)])["plant"].result(60)
                driver.start()
            stop.set()
            thread.join()
            until(lambda: _has_partition(writer), "the new partition")
            for _ in range(20):
                write(3)
            messages = committed(kafka.address, "plant")
            until(lambda: {ledger.counts(sink).read for sink in ("rows", "copies")} == {len(messages)}, "all records")
            driver.terminate()
            assert driver.wait() == 0, driver.log.read_text()[-3000:]
        expected = {
            json.loads(m.value() or b"")["n"]: (m.partition(), m.offset()) for m in messages if m.value() != b"broken"
        }
        for found in (table(lake / "rows"), table(lake / "copies")):
            assert {n: (row["kafka_partition"], row["kafka_offset"]) for n, row in found.items()} == expected
        dead = [row for each in files(lake / "dead") for row in pq.ParquetFile(each).read().to_pylist()]
        broken = sorted((m.partition(), m.offset()) for m in messages if m.value() == b"broken")
        assert sorted((row["partition"], row["offset"]) for row in dead) == broken
        pipeline = load(file)
        accounts = reconcile(pipeline, state, source_count(pipeline, state))
        assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 2
        started = [event["queries"] for event in driver.events if event["event"] == "started"]
        assert len(started) == rounds + 1
        assert ["rows", "copies"] in started[0]
        print(f"{len(messages)} records, {len(broken)} of them broken, {number} written with aborted ones")
    finally:
        stop.set()
        thread.join()
        kafka.stop()


def _has_partition(writer: Producer) -> bool:
    return len(writer.list_topics("plant", 10).topics["plant"].partitions) == 3
