from __future__ import annotations

import pickle
from collections.abc import Iterable

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from penstock.errors import ConfigError, DataLossError, PenstockError
from penstock.node.capture import record_of
from penstock.spark.statestore import source as store_source
from penstock.spark.statestore.options import SnapshotOptions, StoreReadOptions
from penstock.spark.statestore.source import SNAPSHOT_DONE, KeysPartition, StoreStreamReader
from penstock.spark.tube import source as tube
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from tests.unit.spark.fake_tube import FakeBroker, FakeTube

BASE = {
    "tubemq.master": "127.0.0.1:8715",
    "tubemq.topic": "changes",
    "tubemq.timeoutMs": "1",
    "statestore.broker": "mqtt://127.0.0.1:1",
}
Offset = dict[str, dict[str, int]]


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker(1, 8123, logs={"changes": []}, partitions={"changes": 1}, flag=1)


@pytest.fixture
def fake(broker: FakeBroker) -> FakeTube:
    return FakeTube(broker)


@pytest.fixture(autouse=True)
def look_for_new_partitions_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tube, "_DISCOVERY_S", 0.0)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that a snapshot finds."""
    found = [b"k/1", b"k/2"]

    def plan(options: SnapshotOptions) -> list[KeysPartition]:
        assert options.broker == BASE["statestore.broker"]
        return [KeysPartition([key]) for key in found]

    monkeypatch.setattr(store_source, "plan_keys", plan)
    return found


def version(number: int) -> Hlc:
    """Two changes a millisecond."""
    return Hlc(1_700_000_000_000 + number // 2, number % 2, "StateStore")


def append(broker: FakeBroker, count: int) -> None:
    log = broker.logs["changes"]
    for _ in range(count):
        at = version(len(log))
        key = b"k/%d" % len(log)
        data, flag, _ = record_of(Change(key, Record(key, b"v", at), at, writer="me")).encode()
        assert flag == broker.flag
        log.append((0, data))


def stream(fake: FakeTube, **options: str) -> StoreStreamReader:
    return StoreStreamReader(StoreReadOptions.parse(BASE | options).for_stream(), fake)


def numbers(reader: StoreStreamReader, partitions: Iterable[InputPartition]) -> list[int]:
    """The numbers in the keys that were changed."""
    copy = pickle.loads(pickle.dumps(partitions))
    return [
        int(key.as_py()[2:])
        for part in copy
        if not isinstance(part, KeysPartition)
        for made in reader.read(part)
        for key in made["key"]
    ]


def test_a_snapshot_comes_first_and_then_what_changed_since(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 3)
    reader = stream(fake)
    start = reader.initialOffset()
    assert start == {"changes": {"1:0": 84}, SNAPSHOT_DONE: {"done": 0}} == reader.initialOffset()
    append(broker, 2)
    first = reader.latestOffset(start, ReadAllAvailable())
    assert first == {"changes": {"1:0": 84}, SNAPSHOT_DONE: {"done": 1}}
    assert [part.keys for part in reader.partitions(start, first) if isinstance(part, KeysPartition)] == [
        [b"k/1"],
        [b"k/2"],
    ]
    second = reader.latestOffset(first, ReadAllAvailable())
    assert second == {"changes": {"1:0": 140}, SNAPSHOT_DONE: {"done": 1}} == reader.reportLatestOffset()
    parts = reader.partitions(first, second)
    assert numbers(reader, parts) == [3, 4] == numbers(reader, parts)
    assert reader.latestOffset(second, ReadAllAvailable()) == second


def test_a_continued_query_reads_no_snapshot_again(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 3)
    here: Offset = {"changes": {"1:0": 28}, SNAPSHOT_DONE: {"done": 1}}
    reader = stream(fake)
    assert reader.partitions(here, here) == []
    end = reader.latestOffset(here, ReadMaxRows(1))
    assert end == {"changes": {"1:0": 56}, SNAPSHOT_DONE: {"done": 1}}
    assert numbers(reader, reader.partitions(here, end)) == [1]


def test_a_first_batch_that_failed_is_read_again(fake: FakeTube, broker: FakeBroker) -> None:
    """Spark knows where it ended and asks again where it began: then the snapshot is of now, the changes of then."""
    append(broker, 2)
    ended: Offset = {"changes": {"1:0": 28}, SNAPSHOT_DONE: {"done": 1}}
    reader = stream(fake)
    start = reader.initialOffset()
    parts = reader.partitions(start, ended)
    assert [type(part) for part in parts] == [KeysPartition, KeysPartition]
    assert numbers(reader, reader.partitions(ended, reader.latestOffset(ended, ReadAllAvailable()))) == [1]


def test_an_available_now_run_ends_behind_the_snapshot(fake: FakeTube, broker: FakeBroker) -> None:
    """Spark says that a run ends before it asks where it begins, or goes on where the checkpoint ends."""
    append(broker, 1)
    reader = stream(fake)
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    append(broker, 2)
    first = reader.latestOffset(start, ReadAllAvailable())
    assert reader.latestOffset(first, ReadAllAvailable()) == first
    restarted = stream(fake)
    restarted.prepareForTriggerAvailableNow()
    append(broker, 3)
    second = restarted.latestOffset(first, ReadAllAvailable())
    assert numbers(restarted, restarted.partitions(first, second)) == [1, 2]
    assert restarted.latestOffset(second, ReadAllAvailable()) == second


def test_spark_4_1_does_not_say_where_the_query_is(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 2)
    reader = stream(fake)
    start = reader.initialOffset()
    first = reader.latestOffset()
    assert len(reader.partitions(start, first)) == 2
    append(broker, 1)
    second = reader.latestOffset()
    assert numbers(reader, reader.partitions(first, second)) == [2]
    restarted = stream(fake)
    restarted.partitions(first, first)
    assert restarted.latestOffset() == second


def test_a_stream_from_the_latest_has_changes_only(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 2)
    reader = stream(fake, startingVersion="latest")
    start = reader.initialOffset()
    assert start == {"changes": {"1:0": 56}} == reader.latestOffset(start, ReadAllAvailable())
    append(broker, 1)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert numbers(reader, reader.partitions(start, end)) == [2]


@pytest.mark.parametrize("first", [0, 1, 6, 9, 10, 12])
def test_a_stream_from_a_version(fake: FakeTube, broker: FakeBroker, first: int) -> None:
    append(broker, 10)
    reader = stream(fake, startingVersion=str(version(first)))
    start = reader.initialOffset()
    append(broker, 3)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert numbers(reader, reader.partitions(start, end)) == list(range(min(first, 10), 13))


def test_a_stream_from_a_time(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 10)
    reader = stream(fake, startingVersion="1700000000003", keys="k/[78]")
    start = reader.initialOffset()
    assert start == {"changes": {"1:0": 6 * 28}}
    assert numbers(reader, reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))) == [7, 8]


def test_changes_that_are_gone_are_a_loss(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 10)
    broker.oldest["changes"] = 4
    with pytest.raises(DataLossError, match=r"changes from version 17\S+ on are no longer stored \(oldest version:"):
        stream(fake, startingVersion=str(version(3))).initialOffset()
    assert stream(fake, startingVersion=str(version(4))).initialOffset() == {"changes": {"1:0": 4 * 28}}
    lenient = stream(fake, startingVersion="1", failOnDataLoss="false")
    assert lenient.initialOffset() == {"changes": {"1:0": 4 * 28}}


@pytest.mark.parametrize("starting", ["snapshot", "earliest", "latest", "12:0:n"])
def test_a_node_without_capture_is_reported(fake: FakeTube, broker: FakeBroker, starting: str) -> None:
    broker.partitions.clear()
    with pytest.raises(ConfigError, match=r"'changes' does not exist[\s\S]*set statestore.capture_topic: changes"):
        stream(fake, startingVersion=starting).initialOffset()
    with pytest.raises(ConfigError, match=r"set statestore\.capture_topic: changes"):
        stream(fake, startingVersion=starting).prepareForTriggerAvailableNow()


def test_records_of_another_writer_are_reported(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 1)
    broker.logs["changes"].append((0, b"\0\0\0\0something else"))
    reader = stream(fake, startingVersion="earliest")
    start = reader.initialOffset()
    parts = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    with pytest.raises(PenstockError, match="offset 28: the record is not a change"):
        numbers(reader, parts)


def test_a_checkpoint_at_the_snapshot_needs_one(fake: FakeTube) -> None:
    reader = stream(fake, startingVersion="latest")
    with pytest.raises(ConfigError, match="the checkpoint is from a query with a snapshot"):
        reader.partitions({"changes": {"1:0": 0}}, {"changes": {"1:0": 0}, SNAPSHOT_DONE: {"done": 1}})
