"""Kafka as a source of pipelines, with a real broker: transactions, new partitions, repeated batches, deletions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.ledger.dead_letters import letters, redrive
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import files
from tests.interop.kafka import KafkaBroker
from tests.spark.pipelines import Setup

FILE = """\
name: {name}
source: {{format: kafka, bootstrap: ["ADDRESS"], topics: [plant], max_records: 7}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL, topic STRING"}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows", format: parquet}}
"""


def written(setup: Setup) -> dict[int, dict[str, Any]]:
    import pyarrow.parquet as pq

    rows = [row for file in files(setup.lake / "rows") for row in pq.ParquetFile(file).read().to_pylist()]
    found = {int(row["n"]): row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.timeout(600)
async def test_records_are_read_once(setup_of: Callable[..., Setup], tmp_path_factory: pytest.TempPathFactory) -> None:
    kafka = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    kafka.start()
    try:
        await read_all(setup_of(FILE.replace("ADDRESS", kafka.address), 1), kafka.address)
    finally:
        kafka.stop()


async def read_all(setup: Setup, address: str) -> None:
    with pytest.raises(ConfigError, match="has no topic 'plant'"):
        setup.run()
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("plant", 2, 1)])["plant"].result(60)
    plain = Producer({"bootstrap.servers": address})
    writer = Producer({"bootstrap.servers": address, "transactional.id": "writer"})
    writer.init_transactions(60)

    def send(*numbers: int, partition: int = 0) -> None:
        # A new client, since one learns of a new partition late.
        plain = Producer({"bootstrap.servers": address})
        for n in numbers:
            plain.produce("plant", json.dumps({"n": n}), b"k", partition=partition, headers={"unit": b"C"})
        assert plain.flush(60) == 0

    def transaction(*numbers: int, commit: bool) -> None:
        writer.begin_transaction()
        for n in numbers:
            writer.produce("plant", json.dumps({"n": n}), partition=0)
        assert writer.flush(60) == 0
        (writer.commit_transaction if commit else writer.abort_transaction)(60)

    # Markers and aborted records are between, and behind, the records of a batch: a batch of 7 offsets may be empty.
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
    with pytest.raises(PenstockError, match="its topics belong to other programs"):
        await redrive(setup.lake / "dead", list(letters(setup.lake / "dead")), setup.pipeline, setup.state)

    # As after a crash between the sink and Spark's commit; meanwhile there are a new partition and an open transaction.
    setup.forget_the_last_commit("rows")
    admin.create_partitions([NewPartitions("plant", 3)])["plant"].result(60)
    send(*range(20, 30), partition=2)
    writer.begin_transaction()
    writer.produce("plant", b'{"n": 50}', partition=0)
    assert writer.flush(60) == 0
    send(40)
    setup.run()
    assert sorted(written(setup)) == list(range(30))
    writer.commit_transaction(60)
    setup.run()
    assert sorted(written(setup)) == [*range(30), 40, 50]
    (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert (account.off, account.unknown) == ((), ())

    send(60, 61, 62)
    gone = TopicPartition("plant", 0, -1)
    admin.delete_records([gone])[gone].result(60)
    with pytest.raises(PenstockError, match=r"plant:0 of Kafka at .* has no records from offset") as caught:
        setup.run()
    assert "run with a new state directory" in str(caught.value.hint)
    assert sorted(written(setup)) == [*range(30), 40, 50]
