"""Apache's broker as a source: exact ranges at rest and while producers write, Spark, and a pipeline."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock.spark
from penstock.errors import DataLossError, RefusedError
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run import driver
from penstock.pipelines.run import run as running
from penstock.pipelines.sinks.table import read as read_table
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.spark.environment.java import SHORT_LIVED
from penstock.spark.tube.offsets import Bounds, Slice, TopicPartition
from penstock.spark.tube.options import ConnectionOptions
from penstock.spark.tube.tube_client import TubeClient, count_rows
from penstock.tube import SendResult
from penstock.tube.client import web
from penstock.tube.client.apache_range_reader import broker_webs
from penstock.tube.codec.codes import ErrCode
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.interop.tube_java.server import JavaTube
from tests.spark.node import Node

ENTRY = 28
Sent = list[tuple[SendResult, bytes]]


@pytest.fixture
def peer(java_tube: JavaTube) -> ConnectionOptions:
    """Apache's master, when its topics can be used."""
    return ConnectionOptions(java_tube.ready(), http=java_tube.web, group="interop")


async def stored(producer: Producer, topic: str, record: bytes | Record) -> SendResult:
    """Sent again while the broker's memory is full: it has 3 MB a topic, and a disk that others use."""
    while True:
        try:
            return await producer.send(topic, record)
        except RefusedError as error:
            if error.code != ErrCode.SERVER_RECEIVE_OVERFLOW:
                raise
            await asyncio.sleep(0.02)


def send(peer: ConnectionOptions, topic: str, records: list[bytes | Record]) -> list[SendResult]:
    async def run() -> list[SendResult]:
        async with Producer(peer.masters, heartbeat_s=0.2) as producer:
            results: list[SendResult] = []
            for start in range(0, len(records), 200):
                part = records[start : start + 200]
                results += await asyncio.gather(*(stored(producer, topic, record) for record in part))
            return results

    return asyncio.run(run())


def values(tube: TubeClient, piece: Slice, mark: int | None = 0) -> list[bytes]:
    return [payload for batch in tube.read(piece, mark=mark) for payload in batch.payloads]


def positions(peer: ConnectionOptions, group: str) -> dict[tuple[str, int], int]:
    """Where the broker says that ``group`` stands."""
    [broker] = [http for number, http in broker_webs(peer.administration, timeout_s=60).items() if number == 1]
    return {
        (topic["topicName"], part["partitionId"]): part["curOffset"]
        for row in web.call_broker(broker, "admin_query_offset", {"groupName": group})
        for topic in row["subInfo"]
        for part in topic["offsets"]
        if row["groupName"] == group and part["curOffset"] >= 0  # of a name that it has seen: -2
    }


def left_behind(peer: ConnectionOptions, stem: str) -> set[str]:
    """Groups of readers that the broker keeps a position of."""
    broker = broker_webs(peer.administration, timeout_s=60)[1]
    return {
        row["groupName"]
        for row in web.call_broker(broker, "admin_query_offset", {})
        if row["groupName"].startswith(stem + "_")
        and any(part["curOffset"] >= 0 for topic in row["subInfo"] for part in topic["offsets"])
    }


def shown_by_and_by(peer: ConnectionOptions, group: str, expected: dict[tuple[str, int], int]) -> None:
    """The broker tells of a group's position when it has written it down, which it does every 10 s or so."""
    deadline = time.monotonic() + 90
    while positions(peer, group) != expected:
        assert time.monotonic() < deadline, positions(peer, group)
        time.sleep(0.2)


def test_any_range_holds_exactly_its_messages(peer: ConnectionOptions) -> None:
    chance = random.Random(7)
    # Large ones too: a get ends after half a MiB, so cuts fall anywhere.
    sizes = [chance.choice((0, 20, 900)) if n % 40 else 70_000 for n in range(4000)]
    data: list[bytes | Record] = [b"%06d" % n + bytes(size) for n, size in enumerate(sizes)]
    data[100] = b"000100" + bytes(700_000)
    own: dict[int, list[tuple[int, bytes]]] = {0: [], 1: [], 2: []}
    for result, body in zip(send(peer, "ranges", data), data, strict=True):
        own[result.partition].append((result.append_offset, body))  # type: ignore[arg-type]
    with TubeClient(peer, 20_000) as tube:
        partitions = tube.partitions(["ranges"])
        assert partitions == [TopicPartition("ranges", 1, n) for n in range(3)]
        bounds = tube.bounds(partitions)
        low, high, oldest, newest, epoch = bounds[partitions[0]]
        assert epoch is None
        assert (low, high, oldest) == (0, len(data) * ENTRY, 0)
        assert newest is not None
        assert newest > sum(map(len, data))  # type: ignore[arg-type]
        tube.commit_offset(partitions[1], "shown", 280)
        ranges = [(0, high), (high, high), (high - ENTRY, high), (0, 0)]
        ranges += [tuple(sorted(chance.randrange(len(data)) * ENTRY for _ in "se")) for _ in range(24)]  # type: ignore[misc]
        for start, end in ranges:
            partition = chance.choice(partitions)
            expected = [body for at, body in sorted(own[partition.partition]) if start <= at < end]
            for _ in range(2):
                assert values(tube, Slice(partition, start, end)) == expected, (partition, start, end)
        pieces = [Slice(partition, 0, high) for partition in partitions]
        assert sum(tube.count(piece) for piece in pieces) == len(data)
        with pytest.raises(DataLossError, match=f"the log ends at {high}, not at {high + ENTRY}"):
            values(tube, Slice(partitions[0], 0, high + ENTRY))
        with pytest.raises(DataLossError, match="begins at byte -1 of the store or later"):
            values(tube, Slice(partitions[0], 0, ENTRY), mark=-1)
        with pytest.raises(RefusedError, match="does not support offsets by time"):
            tube.offset_at(partitions[0], 0)
        shown_by_and_by(peer, "shown", {("ranges", 1): 280})
        # A name is forgotten by the first read after it was written down, also if that was after the last read here.
        deadline = time.monotonic() + 90
        while True:
            for piece in pieces:
                values(tube, piece)
            if not (names := left_behind(peer, "interop")):
                break
            assert time.monotonic() < deadline, names


def test_consecutive_ranges_while_producers_write(peer: ConnectionOptions) -> None:
    stop = threading.Event()
    sent: Sent = []

    async def write(number: int) -> None:
        async with Producer(peer.masters, heartbeat_s=0.2) as producer:
            n = 0
            while not stop.is_set():
                bodies = [b"%d-%d" % (number, n + k) for k in range(50)]
                n += 50
                results = await asyncio.gather(*(stored(producer, "follow", body) for body in bodies))
                sent.extend(zip(results, bodies, strict=True))

    async def write_all() -> None:
        await asyncio.gather(write(0), write(1))

    writer = threading.Thread(target=lambda: asyncio.run(write_all()))
    writer.start()
    found: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    places = [TopicPartition("follow", 1, n) for n in range(3)]
    try:
        with TubeClient(peer, 20_000) as tube:
            tube.partitions(["follow"])
            reached = dict.fromkeys(places, 0)

            def follow() -> None:
                for place, bound in tube.bounds(places).items():
                    assert isinstance(bound, Bounds)
                    found[place.partition] += values(tube, Slice(place, reached[place], bound.end))
                    reached[place] = bound.end

            for _ in range(25):
                follow()
            stop.set()
            writer.join(60)
            follow()
    finally:
        stop.set()
        writer.join(60)
    assert len(sent) > 500
    for number, got in found.items():
        own = sorted((result.append_offset, body) for result, body in sent if result.partition == number)
        assert got == [body for _, body in own], "each once, in order"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(Path(tmp_path_factory.mktemp("node"))) as node:
        yield node


PIPELINE = """\
name: from_apache
source:
  topics: [pipe]
  master: "{master}"
  options: {{tubemq.http: "{http}", maxOffsetsPerTrigger: 150}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL"}}
sinks:
  - name: rows
    from: parsed
    table: {{path: "{lake}/rows"}}
"""


@pytest.mark.nightly
@pytest.mark.timeout(400)  # starts of Python workers, where others use the machine
def test_spark_and_a_pipeline_read_from_apaches_servers(
    peer: ConnectionOptions, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session for both: it takes most of the time."""
    conf = {"spark.driver.extraJavaOptions": SHORT_LIVED}
    spark = penstock.spark.session("interop", "local[2]", conf=conf, log_level="OFF")
    try:
        _spark_job(peer, spark, tmp_path)
        monkeypatch.setattr(driver, "session", lambda *_args, **_options: _Unstopped(spark))
        _pipeline(peer, node, spark, tmp_path)
        # Committed offsets are shown as the group's, batch by batch; Apache's broker writes them down a while later.
        # One that a busy machine kept from being committed is followed by that of a later batch.
        sent = 600
        for _ in range(6):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                shown = positions(peer, "lake")
                if len(shown) == 3 and all(400 * ENTRY <= position <= sent * ENTRY for position in shown.values()):
                    break
                time.sleep(0.2)
            else:
                _drain(peer, spark, tmp_path, [b"%d" % n for n in range(sent, sent + 200)])
                sent += 200
                continue
            break
        assert {topic for topic, _ in shown} == {"spark"}
        assert len(shown) == 3
        assert all(400 * ENTRY <= position <= sent * ENTRY for position in shown.values()), shown
        _leaves_nothing(peer, spark)
    finally:
        spark.stop()


def _leaves_nothing(peer: ConnectionOptions, spark: Any) -> None:
    """Names that the broker has written down are forgotten after their next use, those of a short first read too."""
    options = {"tubemq.master": peer.masters, "tubemq.http": str(peer.http), "subscribe": "spark"}

    def read() -> None:
        spark.read.format("tubemq").options(**options, **{"tubemq.group": "brief"}).load().collect()

    read()
    deadline = time.monotonic() + 60
    while len(left_behind(peer, "brief")) < 3:
        assert time.monotonic() < deadline, "the broker writes positions down every few seconds"
        time.sleep(0.2)
    read()
    assert left_behind(peer, "brief") == set()


class _Unstopped:
    def __init__(self, spark: Any) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "stop" else getattr(self._spark, name)


def _drain(peer: ConnectionOptions, spark: Any, directory: Path, more: list[bytes | Record]) -> Any:
    """Send ``more``, then write all new rows to a table; the progress of the last batch."""
    if more:
        send(peer, "spark", more)
    options = {"tubemq.master": peer.masters, "tubemq.http": str(peer.http), "subscribe": "spark"}
    stream = spark.readStream.format("tubemq").options(
        **options, startingOffsets="earliest", maxOffsetsPerTrigger="150", **{"tubemq.group": "lake"}
    )
    query = (
        stream.load().writeStream.format("parquet").option("path", str(directory / "rows"))
        .option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    return query.lastProgress


def _spark_job(peer: ConnectionOptions, spark: Any, directory: Path) -> None:
    options = {"tubemq.master": peer.masters, "tubemq.http": str(peer.http), "subscribe": "spark"}
    kinds = ("flow", "heat")
    sent = send(peer, "spark", [Record(b"%d" % n, b"k%d" % n, msg_type=kinds[n % 2]) for n in range(400)])

    def rows(**more: str) -> list[Any]:
        frame = spark.read.format("tubemq").options(**options, **more).load()
        return sorted(frame.collect(), key=lambda row: int(row.value))

    found = rows(includeHeaders="true", minPartitions="6")
    assert [int(row.value) for row in found] == list(range(400))
    assert [bytes(row.key) for row in found] == [b"k%d" % n for n in range(400)]
    for row, result in zip(found, sent, strict=True):
        headers = {header.key: bytes(header.value) for header in row.headers}
        assert headers["tubemq.messageId"] == b"%d" % result.message_id
        assert row.offset <= result.append_offset
        assert (row.partition, row.broker, row.timestamp, row.timestampType) == (result.partition, 1, None, -1)
    assert [int(row.value) for row in rows(filter="heat", columns="value")] == list(range(1, 400, 2))

    _drain(peer, spark, directory, [])
    progress = _drain(peer, spark, directory, [b"%d" % n for n in range(400, 600)])
    stored = [int(row.value) for row in spark.read.parquet(str(directory / "rows")).select("value").collect()]
    assert sorted(stored) == list(range(600)), "each once, over two runs"
    ends = json.loads(progress.sources[0].endOffset)
    assert ends["spark"]["1:0"] == 600 * ENTRY
    assert ends["spark"]["1:0@data"] > 0
    assert count_rows(options, {"spark": {f"1:{n}": 0 for n in range(3)}}, ends) == 600


def _pipeline(peer: ConnectionOptions, node: Node, spark: Any, directory: Path) -> None:
    lake = directory / "lake"
    text = PIPELINE.format(master=peer.masters, http=peer.http, broker=node.mqtt, lake=lake)
    pipeline: Pipeline = loader.parse(text, name="p.yaml")
    events: list[dict[str, Any]] = []
    emit: Callable[[dict[str, Any]], None] = events.append

    def run() -> None:
        options = running.RunOptions(available_now=True)
        running.run(pipeline, state=directory / "state", options=options, emit=emit, stop=threading.Event())

    send(peer, "pipe", [b'{"n": %d}' % n for n in range(300)])
    run()
    send(peer, "pipe", [b"nonsense", *(b'{"n": %d}' % n for n in range(300, 400))])
    run()
    sums = Ledger(directory / "state" / "ledger").counts("rows")
    assert (sums.read, sums.out, sums.dead) == (401, 400, 1)
    assert sorted(row.n for row in read_table(spark, lake / "rows").select("n").collect()) == list(range(400))
    [account] = reconcile(pipeline, directory / "state", source_count(pipeline, directory / "state"))
    assert (account.off, account.unknown) == ((), ())
