from __future__ import annotations

import json
import pickle
from collections.abc import Iterable

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, DataLossError
from penstock.spark.tube import source as tube
from penstock.spark.tube.offsets import from_json
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.source import MinBatchWait, RangePartition, TubeDataSource, TubeReader, TubeStreamReader
from penstock.spark.tube.tube_client import count_rows, header_values
from penstock.tube.record import Record
from tests.unit.spark.fake_tube import FIRST_MS, FakeBroker, FakeTube

BASE = {"tubemq.master": "127.0.0.1:8715", "subscribe": "a", "tubemq.timeoutMs": "1"}
Offset = dict[str, dict[str, int]]


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker(1, 8123, logs={"a": []}, partitions={"a": 2})


@pytest.fixture
def fake(broker: FakeBroker) -> FakeTube:
    return FakeTube(broker)


@pytest.fixture(autouse=True)
def look_for_new_partitions_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tube, "_DISCOVERY_S", 0.0)


def append(broker: FakeBroker, *partitions: int) -> None:
    log = broker.logs["a"]
    log.extend([(partition, b"%d" % (len(log) + index)) for index, partition in enumerate(partitions)])


def stream(fake: FakeTube, **options: str) -> TubeStreamReader:
    return TubeStreamReader(SourceOptions.parse(BASE | {"startingOffsets": "earliest"} | options), fake)


def batch(fake: FakeTube, **options: str) -> TubeReader:
    return TubeReader(SourceOptions.parse(BASE | options), fake)


def values(reader: TubeReader | TubeStreamReader, partitions: Iterable[InputPartition]) -> list[bytes]:
    return [value.as_py() for part in partitions for made in reader.read(part) for value in made["value"]]


def drain(reader: TubeStreamReader, start: Offset, limit: ReadLimit) -> list[tuple[Offset, list[bytes]]]:
    """What Spark does, batch by batch, until nothing is new."""
    batches = []
    while (end := reader.latestOffset(start, limit)) != start:
        batches.append((end, values(reader, reader.partitions(start, end))))
        start = end
    return batches


def test_a_batch_between_two_times(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0, 1, 1)
    reader = batch(fake, startingTimestamp=f"{FIRST_MS + 28}", endingTimestamp=f"{FIRST_MS + 29}")
    assert values(reader, reader.partitions()) == [b"1"]
    times = {"a": {"1:0": FIRST_MS + 30, "1": FIRST_MS}}
    reader = batch(fake, startingOffsetsByTimestamp=json.dumps(times), startingOffsets="earliest")
    assert values(reader, reader.partitions()) == [b"2", b"1", b"3", b"4"]
    reader = batch(fake, endingOffsetsByTimestamp=json.dumps(times))
    assert values(reader, reader.partitions()) == [b"0"]
    reader = batch(fake, startingTimestamp="0", endingTimestamp=f"{FIRST_MS * 2}")
    assert len(values(reader, reader.partitions())) == 5


def test_a_time_that_nothing_is_as_new_as(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1)
    with pytest.raises(ConfigError, match=r"no message was written at \d+ ms or later[\s\S]*Strategy=latest"):
        batch(fake, startingTimestamp=f"{FIRST_MS + 29}").partitions()
    late = {"startingTimestamp": f"{FIRST_MS + 29}", "startingOffsetsByTimestampStrategy": "latest"}
    assert batch(fake, **late).partitions() == []
    with pytest.raises(ConfigError, match=r"startingOffsetsByTimestamp lacks topic 'a' partition 1:1"):
        batch(fake, startingOffsetsByTimestamp='{"a": {"0": 1}}').partitions()


def test_a_stream_from_a_time(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0)
    reader = stream(fake, startingTimestamp=f"{FIRST_MS + 1}")
    start = reader.initialOffset()
    assert start == {"a": {"1:0": 28, "1:1": 28}}
    assert [found for _, found in drain(reader, start, ReadAllAvailable())] == [[b"2", b"1"]]
    # As the first batch of a query that is repeated when a broker was away at first.
    assert [repr(part) for part in reader.partitions({"a": {}}, {"a": {"1:0": 84, "1:1": 84}})] == [
        "topic 'a' partition 1:0 [28, 84), topic 'a' partition 1:1 [28, 84)"
    ]


def test_a_batch_reads_everything_there_is(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0, 1, 1)
    reader = batch(fake)
    planned = reader.partitions()
    assert [repr(part) for part in planned] == ["topic 'a' partition 1:0 [0, 140), topic 'a' partition 1:1 [0, 140)"]
    append(broker, 0, 1)
    assert values(reader, planned) == [b"0", b"2", b"1", b"3", b"4"]
    assert values(reader, planned) == values(reader, pickle.loads(pickle.dumps(planned)))


def test_a_batch_between_positions(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0, 1, 1)
    options = {"startingOffsets": '{"a": {"0": 30, "1": -2}}', "endingOffsets": '{"a": {"1:0": 84, "1:1": 55}}'}
    assert values(batch(fake), batch(fake, **options).partitions()) == [b"2"]


def test_a_batch_is_cut_into_more_tasks(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0] * 9)
    reader = TubeReader(
        SourceOptions.parse({"tubemq.master": "127.0.0.1:8715", "assign": '{"a": ["0"]}', "minPartitions": "3"}),
        fake,
    )
    planned = reader.partitions()
    assert len(planned) == 3
    assert values(reader, planned) == [b"%d" % record for record in range(9)]


def test_a_batch_without_data_has_no_tasks_and_sparks_stand_in_no_rows(fake: FakeTube) -> None:
    reader = batch(fake)
    assert reader.partitions() == []
    assert values(reader, [InputPartition(None)]) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"startingOffsets": '{"a": {"0": 56, "1": 56}}'}, DataLossError, "offset 56 is no longer stored"),
        ({"endingOffsets": '{"a": {"0": 308, "1": 280}}'}, DataLossError, "offset 308 is beyond the end"),
        (
            {"startingOffsets": '{"a": {"0": 140, "1": 140}}', "endingOffsets": '{"a": {"0": 112, "1": 112}}'},
            ConfigError,
            "startingOffsets 140 is after endingOffsets 112",
        ),
        ({"startingOffsets": '{"a": {"0": 140}}'}, ConfigError, "lacks topic 'a' partition 1:1"),
        ({"subscribe": "b"}, ConfigError, "topic 'b' does not exist"),
    ],
)
def test_a_batch_that_cannot_be_read(
    fake: FakeTube, broker: FakeBroker, options: dict[str, str], error: type[Exception], words: str
) -> None:
    append(broker, *[0, 1] * 5)
    broker.oldest["a"] = 4
    with pytest.raises(error, match=words):
        batch(fake, **options).partitions()


def test_a_batch_may_accept_gaps(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0, 1] * 5)
    broker.oldest["a"] = 4
    reader = batch(fake, startingOffsets='{"a": {"0": 0, "1": 0}}', failOnDataLoss="false")
    assert values(reader, reader.partitions()) == [b"4", b"6", b"8", b"5", b"7", b"9"]


def test_a_stream_from_the_earliest(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0)
    reader = stream(fake)
    start = reader.initialOffset()
    assert start == {"a": {"1:0": 0, "1:1": 0}}
    [(end, read)] = drain(reader, start, ReadAllAvailable())
    assert end == {"a": {"1:0": 84, "1:1": 84}}
    assert read == [b"0", b"2", b"1"]
    append(broker, 1)
    assert [read for _, read in drain(reader, end, ReadAllAvailable())] == [[b"3"]]
    assert reader.reportLatestOffset() == {"a": {"1:0": 112, "1:1": 112}}


def test_a_stream_from_the_latest_writes_down_where_it_began(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1)
    reader = stream(fake, startingOffsets="latest")
    start = reader.initialOffset()
    append(broker, 0)
    assert reader.initialOffset() == start == {"a": {"1:0": 56, "1:1": 56}}
    # Batch 0 is empty and puts the start into the checkpoint.
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    assert [read for _, read in drain(reader, start, ReadAllAvailable())] == [[b"2"]]

    # Killed before batch 0 was done: the start is asked for again and is a later one; batch 0 stays empty.
    restarted = stream(fake, startingOffsets="latest")
    later = restarted.initialOffset()
    assert later == {"a": {"1:0": 84, "1:1": 84}}
    assert restarted.partitions(later, start) == []
    assert [read for _, read in drain(restarted, start, ReadAllAvailable())] == [[b"2"]]


def test_a_limit_counts_own_messages_of_each_partition(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0, 0, 0, 1] * 10)
    reader = stream(fake, maxOffsetsPerTrigger="8")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(8)
    batches = drain(reader, reader.initialOffset(), limit)
    assert [len(read) for _, read in batches] == [8] * 5
    assert sorted(value for _, read in batches for value in read) == sorted(value for _, value in broker.logs["a"])
    assert [sum(int(value) % 4 == 3 for value in read) for _, read in batches] == [2] * 5
    assert isinstance(stream(fake).getDefaultReadLimit(), ReadAllAvailable)


def test_a_limit_is_reached_where_the_broker_counts_its_store(fake: FakeTube, broker: FakeBroker) -> None:
    broker.http = "127.0.0.1:8081"
    broker.partitions["a"] = 3
    append(broker, *[0, 1, 2, 2] * 10)
    reader = stream(fake, maxOffsetsPerTrigger="8")
    limit = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    batches = drain(reader, start, limit)
    assert [len(read) for _, read in batches] == [8] * 5
    assert sorted(value for _, read in batches for value in read) == sorted(value for _, value in broker.logs["a"])
    # Partitions that do not stand at one place: none goes back, none is left behind, no batch has too much.
    apart = {"a": {**start["a"], "1:0": 20 * 28, "1:1": 3 * 28}}
    later = drain(reader, apart, limit)
    assert [end["a"]["1:0"] // 28 for end, _ in later] == [20, 20, 24, 32, 40]
    assert [end["a"]["1:1"] // 28 for end, _ in later] == [8, 16, 24, 32, 40]
    assert all(len(read) <= 8 for _, read in later)
    assert sum(len(read) for _, read in later) == 5 + 9 + 20


def test_a_batch_waits_for_enough_messages_or_long_enough(fake: FakeTube, broker: FakeBroker) -> None:
    now = 0.0
    append(broker, 0)
    reader = stream(fake, minOffsetsPerTrigger="3", maxOffsetsPerTrigger="4", maxTriggerDelay="10s")
    assert reader._min_wait is not None
    reader._min_wait = MinBatchWait(3, 10.0, lambda: now)
    start, limit = reader.initialOffset(), reader.getDefaultReadLimit()
    [(end, _)] = drain(reader, start, limit)  # the first one does not wait
    append(broker, 0, 1)
    assert drain(reader, end, limit) == []
    assert reader.latestOffset(end, limit) == end
    append(broker, 1, 1, 0)
    [(end, read)] = drain(reader, end, limit)
    assert len(read) == 4  # and what is left over waits again
    now = 10.0
    [(end, read)] = drain(reader, end, limit)
    assert len(read) == 1
    append(broker, 0)
    assert drain(reader, end, limit) == []
    # What is available now is taken, however little.
    ended = stream(fake, minOffsetsPerTrigger="3")
    ended.prepareForTriggerAvailableNow()
    assert [len(read) for _, read in drain(ended, end, ReadAllAvailable())] == [1]
    pickle.loads(pickle.dumps(ended))


def test_tasks_hold_no_more_than_is_allowed(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0] * 25)
    reader = batch(fake, maxRecordsPerPartition="10")
    parts = reader.partitions()
    ranges = [range_.piece for part in parts if isinstance(part, RangePartition) for range_ in part.ranges]
    assert [(piece.start // 28, piece.end // 28) for piece in ranges if not piece.partition.partition] == [
        (0, 8),
        (8, 16),
        (16, 25),
    ]
    assert values(reader, parts) == [b"%d" % number for number in range(25)]


def test_the_same_range_is_the_same_rows_on_another_reader(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0, 1, 1] * 7)
    reader = stream(fake)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(10))
    first = values(reader, reader.partitions(start, end))
    append(broker, *[0, 1, 1] * 7)
    other = stream(fake)
    assert values(other, other.partitions(json.loads(json.dumps(start)), json.loads(json.dumps(end)))) == first
    assert len(first) == 10


def test_available_now_ends_where_the_log_ended_when_it_began(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0, 1] * 5)
    reader = stream(fake, maxOffsetsPerTrigger="4")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    append(broker, *[0, 1] * 5)
    batches = drain(reader, start, reader.getDefaultReadLimit())
    assert [len(read) for _, read in batches] == [4, 4, 2]
    assert batches[-1][0] == {"a": {"1:0": 280, "1:1": 280}}
    assert reader.reportLatestOffset() == {"a": {"1:0": 560, "1:1": 560}}


def test_a_new_broker_is_read_from_its_beginning(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0)
    reader = stream(fake)
    [(end, _)] = drain(reader, reader.initialOffset(), ReadAllAvailable())
    fake.brokers.append(FakeBroker(2, 8124, logs={"a": [(0, b"gone"), (0, b"x"), (0, b"y")]}, partitions={"a": 1}))
    fake.brokers[1].oldest["a"] = 1
    batches = drain(reader, end, ReadMaxRows(1))
    # First the position is written down, so that every later batch is a function of its offsets; then it is read.
    assert [read for _, read in batches] == [[], [b"x"], [b"y"]]
    assert batches[0][0] == {"a": {"1:0": 28, "1:1": 28, "2:0": 28}}


def test_new_partitions_of_a_running_query_are_read_from_their_beginning(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0)
    reader = stream(fake, startingOffsets="latest")
    start = reader.initialOffset()
    assert drain(reader, start, ReadAllAvailable()) == []
    broker.partitions["a"] = 3
    append(broker, 2, 0, 2)
    batches = drain(reader, start, ReadAllAvailable())
    assert sorted(value for _, part in batches for value in part) == [b"1", b"2", b"3"]


def test_available_now_leaves_partitions_that_came_later_for_the_next_run(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0)
    reader = stream(fake)
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    broker.partitions["a"] = 3
    append(broker, 2)
    assert [read for _, read in drain(reader, start, ReadAllAvailable())] == [[b"0"]]


def test_an_unavailable_broker_is_an_error_and_is_not_skipped(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0)
    reader = stream(fake)
    start = reader.initialOffset()
    fake.hidden = {1}
    with pytest.raises(Exception, match="topic 'a' partition 1:0, topic 'a' partition 1:1: unknown to tube master"):
        reader.latestOffset(start, ReadAllAvailable())
    fake.hidden = set()
    assert [read for _, read in drain(reader, start, ReadAllAvailable())] == [[b"0"]]


def test_offsets_of_topics_no_longer_read_are_kept(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0)
    start = {"a": {"1:0": 0, "1:1": 0}, "old": {"5:0": 280}}
    [(end, read)] = drain(stream(fake), start, ReadAllAvailable())
    assert end == {"a": {"1:0": 28, "1:1": 28}, "old": {"5:0": 280}}
    assert read == [b"0"]


def test_data_loss_in_a_stream(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0, 1] * 5)
    broker.oldest["a"] = 4
    start = {"a": {"1:0": 0, "1:1": 28}}
    with pytest.raises(DataLossError, match=r"topic 'a' partition 1:0: offset 0 is no longer stored \(oldest: 112\)"):
        stream(fake).latestOffset(start, ReadAllAvailable())
    forgiving = stream(fake, failOnDataLoss="false")
    assert [len(read) for _, read in drain(forgiving, start, ReadMaxRows(4))] == [4, 2]


def test_a_log_that_lost_its_end(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1)
    start = {"a": {"1:0": 84, "1:1": 84}}
    with pytest.raises(DataLossError, match=r"offset 84 is beyond the end of the log \(56\)"):
        stream(fake).latestOffset(start, ReadAllAvailable())
    forgiving = stream(fake, failOnDataLoss="false")
    assert forgiving.latestOffset(start, ReadAllAvailable()) == start
    append(broker, 0, 1)
    assert [read for _, read in drain(forgiving, start, ReadAllAvailable())] == [[b"3"]]


def test_spark_4_1_gives_neither_start_nor_limit(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0, 1] * 5)
    reader = stream(fake, maxOffsetsPerTrigger="4")
    start = reader.initialOffset()
    end = reader.latestOffset()
    assert len(values(reader, reader.partitions(start, end))) == 4
    # After a restart it asks for the partitions of an empty range first.
    restarted = stream(fake, maxOffsetsPerTrigger="4")
    assert restarted.partitions(end, end) == []
    assert len(values(restarted, restarted.partitions(end, restarted.latestOffset()))) == 4


def test_a_first_batch_is_repeated_although_a_broker_was_unavailable_at_the_restart(
    fake: FakeTube, broker: FakeBroker
) -> None:
    append(broker, 0, 1)
    end = {"a": {"1:0": 56, "1:1": 56}}
    reader = stream(fake)
    assert values(reader, reader.partitions({"a": {"1:1": 0}}, end)) == [b"0", b"1"]
    latest = stream(fake, startingOffsets="latest")
    assert latest.partitions({"a": {"1:1": 56}}, end) == []


def test_the_stream_reader_travels_without_its_connections(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0)
    reader = stream(fake)
    reader.initialOffset()
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.__dict__["_tube"] is None
    reader.commit({"a": {"1:0": 28}})
    reader.stop()
    assert fake.closed == fake.connections == 1
    reader.stop()


def test_rows_of_a_range_are_counted(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, *[0, 0, 1] * 4)
    start, end = {"a": {"1:0": 56}}, {"a": {"1:0": 336, "1:1": 336}}
    assert count_rows(BASE, start, end, fake) == 6
    assert count_rows(BASE, json.dumps({"a": {"1:0": 0, "1:1": 0}}), json.dumps(end), fake) == 12


def test_headers_of_the_first_records_of_each_partition_are_read(fake: FakeTube, broker: FakeBroker) -> None:
    log = broker.logs["a"]
    for number in range(6):
        data, broker.flag, _ = Record(b"name=value", headers=[("name", f"{number}"), ("other", "name=")]).encode()
        log.append((number % 2, data))
    options = SourceOptions.parse(BASE)
    start, end = from_json({"a": {"1:0": 28}}), from_json({"a": {"1:0": 168, "1:1": 168}})
    assert header_values(options, start, end, "name", max_records=9, servers=fake) == ["2", "4"]
    assert header_values(options, start, end, "name", max_records=1, servers=fake) == ["2"]
    assert header_values(options, start, end, "absent", max_records=9, servers=fake) == []
    broker.http = "127.0.0.1:8081"  # a broker of Apache's
    assert header_values(options, start, end, "name", max_records=9, servers=fake) == []
    assert fake.closed == fake.connections > 0


def test_the_data_source() -> None:
    assert TubeDataSource.name() == "tubemq"
    assert TubeDataSource(BASE).schema().simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,broker:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int>"
    )
    with_headers = TubeDataSource(BASE | {"includeHeaders": "true"})
    schema = with_headers.schema()
    assert schema["headers"].simpleString() == "headers:array<struct<key:string,value:binary>>"
    assert isinstance(with_headers.reader(schema), TubeReader)
    assert isinstance(with_headers.streamReader(schema), TubeStreamReader)
    with pytest.raises(ConfigError, match="cannot read into the schema struct<value:string>"):
        with_headers.reader(StructType().add("value", "string"))
    with pytest.raises(ConfigError, match="did you mean subscribe"):
        TubeDataSource({"subscibe": "a"}).schema()


def test_a_task_is_described_by_its_range(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0)
    assert [repr(task) for task in batch(fake, minPartitions="1").partitions()] == [
        "topic 'a' partition 1:0 [0, 28)",
        "topic 'a' partition 1:1 [0, 28)",
    ]
    assert [repr(task) for task in batch(fake).partitions()] == [
        "topic 'a' partition 1:0 [0, 28), topic 'a' partition 1:1 [0, 28)"
    ]


def test_topics_by_pattern(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1)
    options = BASE | {"subscribePattern": "a|b.*", "startingOffsets": "earliest"}
    del options["subscribe"]
    reader = TubeStreamReader(SourceOptions.parse(options), fake)
    start = reader.initialOffset()
    assert list(start) == ["a"]
    # A topic that is created while the query runs, and one that the pattern does not match as a whole.
    broker.partitions |= {"b2": 1, "cb": 1}
    broker.logs |= {"b2": [(0, b"new")], "cb": [(0, b"other")]}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end == {"a": {"1:0": 56, "1:1": 56}, "b2": {"1:0": 0}}
    later = reader.latestOffset(end, ReadAllAvailable())
    assert values(reader, reader.partitions(end, later)) == [b"new"]
    # A topic that is removed.
    del broker.partitions["b2"]
    with pytest.raises(DataLossError, match="topic 'b2', which matched subscribePattern, no longer exists"):
        reader.latestOffset(later, ReadAllAvailable())
    tolerant = TubeStreamReader(SourceOptions.parse(options | {"failOnDataLoss": "false"}), fake)
    append(broker, 0)
    assert values(tolerant, tolerant.partitions(later, tolerant.latestOffset(later, ReadAllAvailable()))) == [b"2"]


def test_no_topic_matches_yet(fake: FakeTube) -> None:
    options = {name: value for name, value in BASE.items() if name != "subscribe"} | {"subscribePattern": "z.*"}
    assert TubeReader(SourceOptions.parse(options), fake).partitions() == []


def test_a_batch_of_a_broker_without_ranges(fake: FakeTube, broker: FakeBroker) -> None:
    broker.http = "127.0.0.1:8081"
    append(broker, 0, 1, 0)
    reader = batch(fake)
    planned = reader.partitions()
    [task] = planned
    assert isinstance(task, RangePartition)
    assert [range_[1:] for range_ in task.ranges] == [(("127.0.0.1", 8123, "127.0.0.1:8081"), 0, None)] * 2
    assert values(reader, planned) == [b"0", b"2", b"1"]
    broker.oldest_data = 1  # data expire between plan and read, the index does not
    with pytest.raises(DataLossError, match="data are gone"):
        values(reader, planned)
    assert values(batch(fake, failOnDataLoss="false"), planned) == [b"0", b"2", b"1"]


def test_a_stream_keeps_marks_with_its_offsets(fake: FakeTube, broker: FakeBroker) -> None:
    broker.http = "127.0.0.1:8081"
    append(broker, 0, 1, 0)
    reader = stream(fake)
    start = reader.initialOffset()
    assert start == {"a": {"1:0": 0, "1:0@data": 0, "1:1": 0, "1:1@data": 0}}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end == {"a": {"1:0": 84, "1:0@data": 3, "1:1": 84, "1:1@data": 3}}
    assert reader.latestOffset(end, ReadAllAvailable()) == end, "nothing new is nothing new"
    assert reader.reportLatestOffset() == {"a": {"1:0": 84, "1:1": 84}}
    append(broker, 1, 0, 0)
    limited = reader.latestOffset(end, ReadMaxRows(2))
    assert limited["a"]["1:0@data"] == 3, "the last end that was seen before"
    # The driver dies; while it is away data expire that nobody has read, the index keeps its entries.
    broker.oldest_data = 4
    with pytest.raises(DataLossError, match="partition 1:0: data from offset 84 on is no longer stored"):
        stream(fake).latestOffset(end, ReadAllAvailable())
    whole = stream(fake, failOnDataLoss="false").latestOffset(end, ReadAllAvailable())
    assert whole["a"]["1:0"] == 168


def test_committed_offsets_are_shown_as_the_group_of_the_query(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0)
    reader = stream(fake, **{"tubemq.group": "lake"})
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    reader.commit(end)
    assert pickle.loads(pickle.dumps(stream(fake)))._progress is None
    reader.stop()
    assert {(group, partition.key): at for (group, partition), at in fake.groups.items()} == {
        ("lake", "1:0"): 84, ("lake", "1:1"): 84,
    }  # fmt: skip
    silent = stream(fake, **{"tubemq.group": ""})
    silent.commit(end)
    silent.stop()
    assert len(fake.groups) == 2


def published(fake: FakeTube) -> dict[tuple[str, str], int]:
    return {(group, partition.key): at for (group, partition), at in fake.groups.items()}


def test_a_query_that_has_read_everything_is_shown_at_the_end(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0)
    reader = stream(fake, **{"tubemq.group": "lake"})
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    reader.partitions(start, end)
    # Spark asks for more, finds nothing, and ends: it commits a batch only when it has another one.
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()
    assert published(fake) == {("lake", "1:0"): 84, ("lake", "1:1"): 84}


def test_a_batch_that_fails_is_not_shown(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0)
    reader = stream(fake, **{"tubemq.group": "lake"})
    start = reader.initialOffset()
    reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    reader.stop()
    assert published(fake) == {("lake", "1:0"): 0, ("lake", "1:1"): 0}


def test_a_query_of_an_older_spark_is_shown_at_the_end(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0)
    reader = stream(fake, **{"tubemq.group": "lake"})
    start = reader.initialOffset()
    end = reader.latestOffset()
    reader.partitions(start, end)
    reader.latestOffset()
    reader.stop()
    assert published(fake) == {("lake", "1:0"): 84, ("lake", "1:1"): 84}


def test_rows_by_type_are_counted_by_reading(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 0, 1)
    options = BASE | {"filter": "flow"}
    assert count_rows(options, {"a": {"1:0": 0}}, {"a": {"1:0": 84}}, fake) == 0
    assert count_rows(options, {"a": {"1:0": 0}}, {"a": {"1:0": 84}}, fake, exact=False) == 2
    broker.http = "127.0.0.1:8081"
    assert count_rows(BASE, {"a": {"1:0": 0}}, {"a": {"1:0": 84}}, fake) == 2


def test_only_the_columns_asked_for(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1)
    reader = batch(fake, columns="offset,value")
    [first] = reader.partitions()
    assert [made.to_pydict() for made in reader.read(first)] == [
        {"offset": [0], "value": [b"0"]},
        {"offset": [28], "value": [b"1"]},
    ]


def test_a_stream_with_an_end_reads_up_to_it_and_no_other_partition(fake: FakeTube, broker: FakeBroker) -> None:
    append(broker, 0, 1, 0, 1, 0)
    reader = stream(fake, endingOffsets=json.dumps({"a": {"1:0": 84, "1:1": 56}}))
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    assert [row for _, rows in drain(reader, start, ReadMaxRows(2)) for row in rows] == [b"0", b"1", b"2"]
    append(broker, 0, 1)
    assert drain(reader, {"a": {"1:0": 84, "1:1": 56}}, ReadAllAvailable()) == []
    # Positions as people write them: without the broker, and between two messages.
    loose = stream(fake, endingOffsets=json.dumps({"a": {"0": 85, "1": 57}}))
    assert [row for _, rows in drain(loose, start, ReadAllAvailable()) for row in rows] == [b"0", b"2", b"1"]
    fake.brokers.append(FakeBroker(2, 8124, logs={"a": []}, partitions={"a": 1}))
    with pytest.raises(ConfigError, match=r"endingOffsets contains topic 'a' partition 0 without a broker"):
        stream(fake, endingOffsets=json.dumps({"a": {"0": 85}})).latestOffset(start, ReadAllAvailable())
    fake.brokers.pop()
    only = stream(fake, endingOffsets=json.dumps({"a": {"1:1": 140}}))
    assert [row for _, rows in drain(only, only.initialOffset(), ReadAllAvailable()) for row in rows] == [b"1", b"3"]
