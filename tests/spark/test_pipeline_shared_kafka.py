"""Sinks that read Kafka share a query, with a real broker: outages, deletions, directories of older versions."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from penstock.errors import PenstockError, UnavailableError
from penstock.pipelines.run import errors, shared
from penstock.pipelines.sinks import delivery
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.spec.sinks import Sink
from tests.interop.kafka import KafkaBroker
from tests.spark.pipelines import Setup
from tests.spark.processes import until
from tests.spark.test_pipeline_shared import FILE, SINKS, check, column, groups, is_batch, is_read, positions, seen

pytestmark = pytest.mark.timeout(600)
TUBE = 'source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 20}}}}'
KAFKA = 'source: {{format: kafka, bootstrap: ["ADDRESS"], topics: ["{topic}"], max_records: 20}}'


class Topic:
    """A topic with two partitions, and a pipeline that writes it to three sinks."""

    def __init__(self, setup_of: Callable[..., Setup], kafka: KafkaBroker) -> None:
        assert TUBE in FILE
        self.setup = setup_of(FILE.replace(TUBE, KAFKA.replace("ADDRESS", kafka.address)))
        self.name = self.setup.topic
        self.sent = 0
        self.admin = AdminClient({"bootstrap.servers": kafka.address})
        self.admin.create_topics([NewTopic(self.name, 2, 1)])[self.name].result(60)
        self._address, self._partitions = kafka.address, 2

    def send(self, count: int, *others: bytes) -> None:
        """Send the next ``count`` numbers, and ``others``, to all partitions in turn."""
        # A new client, since one learns of a new partition late.
        producer = Producer({"bootstrap.servers": self._address})
        failed: list[KafkaError] = []
        values = [json.dumps({"n": n}).encode() for n in range(self.sent, self.sent + count)]
        for place, value in enumerate([*values, *others]):
            producer.produce(
                self.name,
                value,
                b"k",
                partition=place % self._partitions,
                on_delivery=lambda error, _: failed.append(error) if error is not None else None,
            )
        assert producer.flush(60) == 0
        assert failed == []
        self.sent += count

    def add_partition(self) -> None:
        self._partitions += 1
        self.admin.create_partitions([NewPartitions(self.name, self._partitions)])[self.name].result(60)
        until(
            lambda: len(self.admin.list_topics(self.name, 10).topics[self.name].partitions) == self._partitions,
            "the new partition",
        )

    def delete_all(self) -> None:
        places = [TopicPartition(self.name, number, -1) for number in range(self._partitions)]
        for deleted in self.admin.delete_records(places).values():
            deleted.result(60)


@pytest.fixture
def topic(setup_of: Callable[..., Setup], kafka: KafkaBroker) -> Topic:
    return Topic(setup_of, kafka)


@pytest.mark.nightly
@pytest.mark.parametrize("batches", [3, 100])
def test_a_sink_that_fails_leaves_the_query_and_joins_it_again(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """Meanwhile the topic gets a partition, which the sink has to find before it can join the others.

    By day: ``test_a_sink_that_fails_leaves_the_others_alone_and_joins_them_again``, from TubeMQ.
    """
    setup, stop = topic.setup, threading.Event()
    state = {"failing": False, "left": 0}
    printed = delivery.DELIVERY["console"]

    def write(writer: delivery.SinkWriter, sink: Sink, batch: delivery.SinkBatch) -> int:
        if state["failing"]:
            raise UnavailableError("the console does not answer", applied=False)
        return printed.write(writer, sink, batch)

    monkeypatch.setitem(cast("dict[str, Any]", delivery.DELIVERY), "console", printed._replace(write=write))
    monkeypatch.setattr(errors, "UNAVAILABLE", errors.UNAVAILABLE._replace(limit_s=600.0))

    class Events(list[dict[str, Any]]):
        """Sends records while batches are finished, and stops when the sink has joined the others and all is read."""

        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if is_batch(event, "rows"):
                state["failing"] = 2 <= event["batch"] < 2 + batches
                if event["batch"] == 3:
                    topic.add_partition()
                if event["batch"] < 5 + batches:
                    topic.send(6)
            if event["event"] == "queries":
                state["left"] += event["queries"] != [list(SINKS)]
            if state["left"] and self.queries() == [list(SINKS)] and is_read(setup, SINKS, topic.sent + 1):
                stop.set()

        def queries(self) -> list[list[str]]:
            found: list[list[str]] = [event["queries"] for event in self if "queries" in event][-1]
            return found

    setup.events = Events()
    topic.send(5, b"nope")
    setup.run(stop, available_now=False, progress_s=0.5)
    assert groups(setup) == [list(SINKS)]
    check(setup, range(topic.sent), dead=1)
    assert len(positions(setup)) == 1
    assert set(column(setup.lake / "rows", "kafka_partition")) == {0, 1, 2}
    assert [event for event in setup.events if event["event"] == "retry" and event["sink"] != "seen"] == []
    # While it failed, the others finished their batches.
    first = next(n for n, event in enumerate(setup.events) if event["event"] == "retry")
    again = next(n for n, event in enumerate(setup.events) if n > first and is_batch(event, "seen"))
    others = [event["batch"] for event in setup.events[first:again] if is_batch(event, "rows")]
    assert others == list(range(others[0], others[-1] + 1))
    assert others[-1] >= 2 + batches


@pytest.mark.nightly
def test_a_directory_of_an_earlier_version_is_continued_until_retention_deletes_records_of_a_sink(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had a query for each sink: Spark wrote their checkpoints, at different offsets, one with a batch begun.

    By day: ``tests/unit/pipelines/run/test_shared_kafka.py`` continues such directories from any point, and
    ``test_records_are_read_once`` deletes records of a real broker.
    """
    setup = topic.setup
    whole = setup.pipeline

    def run_without(name: str, count: int) -> None:
        setup.pipeline = whole.model_copy(update={"sinks": [sink for sink in whole.sinks if sink.name != name]})
        topic.send(count)
        setup.run()
        setup.pipeline = whole

    with monkeypatch.context() as alone:
        alone.setattr(shared, "query_groups", lambda pipeline: [(found,) for found in plan(pipeline)])
        topic.send(30)
        setup.run()
        assert groups(setup) == [[sink] for sink in SINKS]
        run_without("rows", 24)
    assert len(positions(setup)) == 2
    setup.forget_the_last_commit("halved")
    topic.send(6)
    setup.run()
    # The batch that was begun is the second one: it cannot be shared with a sink that has not reached its start.
    assert groups(setup) == [["rows"], ["halved", "seen"]]
    check(setup, range(60))
    topic.send(10)
    setup.run()
    assert groups(setup) == [list(SINKS)]
    check(setup, range(70))

    run_without("seen", 10)
    topic.delete_all()
    topic.send(4)
    with pytest.raises(PenstockError, match=rf"sink 'seen': {topic.name}:\d .* has no records from offset \d+"):
        setup.run()
    assert [event["sinks"] for event in setup.events if event["event"] == "sinks_failed"] in ([], [["seen"]])
    assert column(setup.lake / "rows", "n") == list(range(84))
    assert column(setup.lake / "halved", "half") == [n / 2 for n in range(84)]
    assert seen(setup) == [n for n in range(70) if n % 2]
    assert setup.ledger.counts("seen").read == 70
