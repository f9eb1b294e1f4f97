"""The load of the cases that compare a pipeline from TubeMQ with the same one from Kafka: topics, records, the file.

Both topics have the same records in the same partitions. The pipeline is the same but for its source: it parses
strictly, has dead letters and a ledger, and writes Delta tables. The rows of the Kafka source have seven columns of
Kafka, which a step drops, so that the tables are equal. The hand-written query reads Kafka with Spark's own connector,
which runs in the JVM, and writes one Parquet table; it has no strict parser, dead letters, ledger or exact commit.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import servers
from benchmarks.kafka_peer.broker import kafka_process, prepare
from benchmarks.machine import CpuByKind
from penstock.errors import PenstockError
from penstock.pipelines.run import run as running
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.sources import KafkaSource
from penstock.tube.producer import Producer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "FLIGHTS",
    "KAFKA",
    "PENSTOCK",
    "Peers",
    "Topic",
    "fill",
    "flights",
    "of_pipeline",
    "peers",
    "pipeline_file",
    "run_pipeline",
]

PENSTOCK, KAFKA = "penstock", "Kafka"
UNLIMITED = 1_000_000_000
_COLUMNS = [*KafkaSource.model_construct().columns]
_TEXTS = ("carrier", "flight", "tailnum", "origin", "dest", "gate", "status")
_NUMBERS = ("year", "month", "day", "dep_time", "arr_time", "air_time", "distance", "hour", "minute")
_FRACTIONS = ("dep_delay", "arr_delay", "fuel")
FLIGHTS = ", ".join(
    [*(f"{n} STRING" for n in _TEXTS), *(f"{n} INT" for n in _NUMBERS), *(f"{n} DOUBLE" for n in _FRACTIONS)]
)
"""The columns of :func:`flights`."""


def flights(count: int) -> Iterator[bytes]:
    """Yield JSON records of about 300 bytes."""
    for n in range(count):
        fields: dict[str, Any] = {name: f"{name[:2]}{n * 7919 % 9973}" for name in _TEXTS}
        fields |= dict.fromkeys(_NUMBERS, n * 31 % 2400)
        fields |= dict.fromkeys(_FRACTIONS, n % 977 / 8)
        yield json.dumps(fields).encode()


class Topic(NamedTuple):
    """A topic of both servers."""

    name: str
    partitions: int


class Peers(NamedTuple):
    """A node of penstock (its ready line) and a Kafka broker, each with the same topics."""

    node: Mapping[str, Any]
    kafka: str
    kafka_pid: int
    spark_jars: str

    def cpu(self, driver: int) -> CpuByKind:
        """Return the processor time from now on: of both servers, and of the kinds of Spark's processes."""
        return CpuByKind(driver, {int(self.node["pid"]): PENSTOCK, self.kafka_pid: KAFKA})

    def source(self, server: str, topic: str, batch: int | None = None) -> dict[str, Any]:
        """Return the source of a pipeline file, with at most ``batch`` records per batch."""
        if server == KAFKA:
            limit = {"max_records": batch or UNLIMITED}
            return {"format": "kafka", "bootstrap": [self.kafka], "topics": [topic], **limit}
        options = {} if batch is None else {"options": {"maxOffsetsPerTrigger": batch}}
        return {"topics": [topic], "master": self.node["tube_master"], **options}


def of_pipeline(spent: Mapping[str, float], server: str) -> dict[str, float]:
    """Return the seconds of a pipeline: of its ``server``, without the other one, which is idle, JVM and Python."""
    python = spent.get("driver", 0.0) + spent.get("workers", 0.0)
    return {"server": spent.get(server, 0.0), "JVM": spent.get("JVM", 0.0), "Python": python}


@contextmanager
def peers(topics: Sequence[Topic]) -> Iterator[Peers]:
    """Run both servers. Neither waits for the disk: both acknowledge from the page cache of the operating system.

    Raises:
        SystemExit: there are no jars of Kafka, and they cannot be fetched.
    """
    try:
        jars = prepare()
    except PenstockError as reason:
        raise SystemExit(f"the peer Kafka cannot be started: {reason.what}") from reason
    with ExitStack() as stack:
        named = {topic.name: {"partitions": topic.partitions} for topic in topics}
        node = stack.enter_context(servers.penstock("flushed", tube={"topics": named}))
        address, pid = stack.enter_context(kafka_process(jars))
        _create(address, topics)
        yield Peers(node, address, pid, jars.spark_jars)


def _create(address: str, topics: Sequence[Topic]) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    wanted = [NewTopic(topic.name, num_partitions=topic.partitions, replication_factor=1) for topic in topics]
    admin = AdminClient({"bootstrap.servers": address})
    for created in admin.create_topics(wanted).values():
        created.result()


def fill(ready: Peers, server: str, topic: Topic, records: Callable[[], Iterator[bytes]]) -> None:
    """Send ``records`` to the topic of a server, in turn to each partition."""
    if server == KAFKA:
        _fill_kafka(ready.kafka, topic, records())
    else:
        asyncio.run(_fill_tube(ready.node["tube_master"], topic, records()))


async def _fill_tube(master: str, topic: Topic, records: Iterator[bytes]) -> None:
    failed: list[BaseException] = []
    waiting: set[asyncio.Future[Any]] = set()

    def done(sent: asyncio.Future[Any]) -> None:
        waiting.discard(sent)
        if (error := sent.exception()) is not None:
            failed.append(error)

    async with Producer(master) as producer:
        places = await producer.partitions(topic.name)
        for number, record in enumerate(records):
            sent = await producer.queue(topic.name, record, partition=places[number % topic.partitions])
            waiting.add(sent)
            sent.add_done_callback(done)
            if failed:
                break
        await producer.flush()
    if failed:
        raise failed[0]


def _fill_kafka(address: str, topic: Topic, records: Iterator[bytes]) -> None:
    from confluent_kafka import Producer as KafkaProducer

    failed: list[Any] = []
    producer = KafkaProducer({"bootstrap.servers": address, "linger.ms": 5})

    def done(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)

    for number, record in enumerate(records):
        while True:
            try:
                producer.produce(topic.name, record, partition=number % topic.partitions, on_delivery=done)
            except BufferError:
                producer.poll(0.1)
            else:
                break
        if number % 1000 == 0:
            producer.poll(0)
        if failed:
            break
    producer.flush()
    if failed:
        raise RuntimeError(f"Kafka refused a record: {failed[0]}")


def pipeline_file(
    source: Mapping[str, Any],
    statestore: str,
    schema: str,
    folder: Path,
    *,
    steps: int = 0,
    tables: int = 1,
    payload: str = "json",
    first: Mapping[str, Any] | None = None,
    **more: Any,
) -> str:
    """Return a pipeline file (JSON, which is YAML): a parse step, the step ``first`` if given, then ``steps`` steps in
    a row, into each of ``tables`` tables ``folder/table0`` and so on.

    The steps alternate: an expression that makes another column of the first number of ``schema``, and a filter that
    keeps all rows. With several tables, all but the first one have a filter of their own.
    """
    number = next(column.split()[0] for column in schema.split(", ") if column.split()[1] != "STRING")
    chain: list[dict[str, Any]] = [{"name": "parsed", "parse": {"schema": schema, "format": payload}}]
    if source.get("format") == "kafka":
        chain.append({"name": "kept", "from": "parsed", "map": {"drop": _COLUMNS}})
    if first is not None:
        chain.append({"name": "first", "from": chain[-1]["name"], **first})
    for n in range(1, steps + 1):
        work: dict[str, Any] = (
            {"map": {"compute": {f"c{n}": f"{number} + {n}"}}} if n % 2 else {"filter": f"{number} <> -{n}"}
        )
        chain.append({"name": f"step{n}", "from": chain[-1]["name"], **work})
    last = chain[-1]["name"]
    filters = [{"name": f"rows{n}", "from": last, "filter": f"{number} <> -{100 + n}"} for n in range(1, tables)]
    sinks = [
        {"name": f"sink{n}", "from": f"rows{n}" if n else last, "table": {"path": f"{folder}/table{n}"}}
        for n in range(tables)
    ]
    return json.dumps(
        {
            "name": "benchmark",
            "source": source,
            "statestore": {"broker": f"mqtt://{statestore}"},
            "dead_letters": {"path": f"{folder}/dead"},
            "steps": [*chain, *filters],
            "sinks": sinks,
            **more,
        }
    )


def run_pipeline(spark: SparkSession, file: str, folder: Path, stop: threading.Event | None = None) -> None:
    """Run a pipeline in the session: on the records that exist now, or until ``stop`` is set."""
    running.execute(
        loader.parse(file, name="benchmark.yaml"),
        state=folder / "state",
        options=running.RunOptions(available_now=stop is None, session=lambda: spark),
        emit=_report,
        stop=stop or threading.Event(),
    )


def _report(event: Mapping[str, Any]) -> None:
    if event["event"] in {"warning", "retry"}:
        print(f"pipeline: {event}", file=sys.stderr)
