"""Ranges of topics of Kafka without a broker: offsets of batches, gaps, ends of partitions, deleted records."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import ConfigEntry, ConfigResource

from penstock.errors import ConfigError, DataLossError, RefusedError, UnavailableError
from penstock.runtime.kafka.client import KafkaConnection, KafkaTopics
from penstock.runtime.kafka.config import KafkaSasl, KafkaTls, SaslMechanism
from penstock.spark.kafka.source import KafkaLog, KafkaRange, KafkaStreamReader, next_offsets, ranges, record_batch

TOPICS = KafkaTopics(KafkaConnection(["h:1"]), ("a",), "read_committed", 10)


class Error(NamedTuple):
    code: str

    def name(self) -> str:
        return self.code

    def str(self) -> str:
        return self.code.lower()

    def retriable(self) -> bool:
        return self.code == "_RETRY"


class Message(NamedTuple):
    at: int
    code: str | None = None

    def offset(self) -> int:
        return self.at

    def error(self) -> Error | None:
        return None if self.code is None else Error(self.code)

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes | None:
        return None if self.at % 2 else b"v"

    def timestamp(self) -> tuple[int, int]:
        return (0, -1) if self.at == 0 else (self.at, 1_000)

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return None if self.at else [("a", b"1"), ("b", None)]


class Broker:
    """Answers ``consume`` with ``answers``, in order; then with nothing. As the client, it answers a call that may wait
    once it has the requested number of messages, or none come any more: with as many as an answer has."""

    def __init__(self, *answers: list[Message]) -> None:
        self.answers = [list(answer) for answer in answers]
        self.waits = 0
        """Calls that waited for more messages than there were."""

    def assign(self, partitions: object) -> None:
        pass

    def unassign(self) -> None:
        pass

    def consume(self, number: int, timeout: float) -> list[Message]:
        given, left = (self.answers[0][:number], self.answers[0][number:]) if self.answers else ([], [])
        if not left:
            self.answers = self.answers[1:]
        else:
            self.answers[0] = left
        self.waits += timeout > 0 and len(given) < number
        return given


def read(broker: Broker, start: int, end: int, timeout_s: float = 30.0) -> list[int]:
    log = KafkaLog(TOPICS, timeout_s)
    log._opened = cast(Any, broker)
    return [message.offset() or 0 for found in log.read(KafkaRange("a", 0, start, end)) for message in found]


def offsets(start: int, end: int, *answers: list[Message], timeout_s: float = 30.0) -> list[int]:
    return read(Broker(*answers), start, end, timeout_s)


def test_a_range_ends_at_its_end_in_spite_of_gaps() -> None:
    m = Message
    assert offsets(0, 3, [m(0), m(1), m(2), m(3), m(4)]) == [0, 1, 2]
    # The end is a gap: by compaction, or of a marker, with a record or nothing behind it.
    assert offsets(0, 3, [m(0)], [], [m(1), m(7)]) == [0, 1]
    assert offsets(0, 3, [m(0)], [m(3, "_PARTITION_EOF")]) == [0]
    assert offsets(0, 3, [m(9)]) == []
    assert offsets(0, 3, [m(0), m(1, "_TRANSPORT"), m(1, "_RETRY"), m(1)], [m(5, "_PARTITION_EOF")]) == [0, 1]


def test_a_range_at_the_end_of_its_partition_is_read_without_a_wait() -> None:
    whole = Broker([Message(0), Message(1)], [Message(2)])
    assert read(whole, 0, 3) == [0, 1, 2]
    assert whole.waits == 0
    # Behind the last record is the marker of a transaction.
    marked = Broker([Message(0), Message(1)], [Message(3, "_PARTITION_EOF")])
    assert read(marked, 0, 3) == [0, 1]
    assert marked.waits == 0
    # An error behind the last record of the range does not concern it.
    assert offsets(0, 2, [Message(0)], [Message(1), Message(2, "TOPIC_AUTHORIZATION_FAILED")]) == [0, 1]


def test_a_range_that_cannot_be_read_is_an_error() -> None:
    m = Message
    with pytest.raises(DataLossError, match="a:0 of Kafka at h:1 has no records from offset 3 on") as lost:
        offsets(0, 3, [m(0)], [m(2, "_PARTITION_EOF")])
    assert "the partition ends at offset 2" in str(lost.value.why)
    for code in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
        with pytest.raises(DataLossError, match="has no records from offset 0 on"):
            offsets(0, 3, [m(0, code)])
    with pytest.raises(RefusedError, match="topic 'a' of Kafka at h:1 cannot be read"):
        offsets(0, 3, [m(0, "TOPIC_AUTHORIZATION_FAILED")])
    with pytest.raises(UnavailableError, match="Kafka at h:1 does not answer"):
        offsets(0, 3, [m(0)], timeout_s=0.0)


def test_offsets_that_were_deleted_are_found_before_a_batch() -> None:
    log, low, end = KafkaLog(TOPICS), {"a": {"0": 5}}, {"a": {"0": 9}}
    log.check({"a": {"0": 5}}, low, end)
    log.check({"a": {"0": 9}}, low, end)
    for start, why in ({"0": 4}, "offsets 5 to 9"), ({"0": 10}, "offsets 5 to 9"), ({"1": 0}, "no longer exists"):
        with pytest.raises(DataLossError) as lost:
            log.check({"a": start}, low, end)
        assert why in str(lost.value.why)


@pytest.mark.parametrize("after", [-1, 12])
def test_a_time_is_that_of_the_first_record_at_or_after_it(after: int) -> None:
    """Without such a record (-1), and with one behind the last stable offset, it is the end."""

    times: list[list[int]] = []

    class Times:
        def offsets_for_times(self, asked: list[TopicPartition], _timeout: float) -> list[TopicPartition]:
            assert [(place.topic, place.partition) for place in asked] == [("a", 0), ("a", 1)]
            times.append([place.offset for place in asked])
            return [TopicPartition("a", 0, 3), TopicPartition("a", 1, after)]

    log = KafkaLog(TOPICS)
    log._opened = cast("Any", Times())
    for time_ms in (7, -1, 1 << 64):
        assert log.at(time_ms, {"a": {"0": 5, "1": 9}}) == {"a": {"0": 3, "1": 9}}
    # Kafka would read -1 as the end of the partition.
    assert times == [[7, 7], [0, 0], [(1 << 63) - 1] * 2]


def test_a_stream_with_an_end_reads_nothing_behind_it() -> None:
    options = {name.lower(): text for name, text in TOPICS.as_texts().items()}
    stream = KafkaStreamReader({**options, "start": '{"a": {"0": 2}}', "end": '{"a": {"0": 8}}'})
    log: Any = KafkaLog(TOPICS)
    log.bounds = lambda: ({"a": {"0": 0, "1": 0}}, {"a": {"0": 20, "1": 4}})
    stream._log = log
    stream.prepareForTriggerAvailableNow()
    assert stream.latestOffset({"a": {"0": 2}}) == {"a": {"0": 8}}
    assert stream.latestOffset({"a": {"0": 8}}) == {"a": {"0": 8}}


def test_spark_4_1_gives_no_start() -> None:
    """After a restart it first asks for the partitions of an empty range, see ``tests/spark/test_versions.py``."""
    options = {name.lower(): text for name, text in TOPICS._replace(max_records=3).as_texts().items()}

    def restarted() -> KafkaStreamReader:
        stream = KafkaStreamReader({**options, "start": '{"a": {"0": 0}}'})
        log: Any = KafkaLog(TOPICS)
        # Retention has deleted what the query has read long ago.
        log.bounds = lambda: ({"a": {"0": 9}}, {"a": {"0": 20}})
        stream._log = log
        return stream

    stream, end = restarted(), {"a": {"0": 10}}
    assert stream.partitions(end, end) == []
    assert stream.latestOffset() == {"a": {"0": 13}}
    stream.partitions(end, {"a": {"0": 13}})
    assert stream.latestOffset() == {"a": {"0": 16}}
    # A batch that is repeated comes first, too.
    stream = restarted()
    stream.partitions(end, end)
    stream.partitions({"a": {"0": 9}}, end)
    assert stream.latestOffset() == {"a": {"0": 13}}


def test_batches_have_at_most_the_configured_offsets_and_all_partitions() -> None:
    start = {"a": {"0": 10, "1": 0}}
    ends = {"a": {"0": 40, "1": 10, "2": 7}, "b": {"0": 3}}
    found = next_offsets(start, ends, 8)
    # A new partition is in the offsets before it is read.
    assert found == {"a": {"0": 16, "1": 2, "2": 0}, "b": {"0": 0}}
    read = [(r.topic, r.partition, r.start, r.end) for r in ranges(start, found)]
    assert read == [("a", 0, 10, 16), ("a", 1, 0, 2)]
    found = next_offsets(found, ends, 1_000)
    assert found == ends
    assert next_offsets(found, ends, 8) == ends
    # An end that is smaller than the start, as of a topic that was created again, does not turn the stream back.
    assert next_offsets(ends, {"a": {"0": 3}}, 8) == ends
    assert len(ranges({"a": {str(n): 0 for n in range(12)}}, {"a": {str(n): 1 for n in range(12)}})) == 12


def test_records_have_the_columns_of_the_source() -> None:
    messages: Any = [Message(0), Message(1), Message(2)]
    rows = record_batch("a", 3, messages).to_pylist()
    assert [row["value"] for row in rows] == [b"v", b"", b"v"]
    assert [(row["offset"], row["timestampType"], row["timestamp"] is None) for row in rows] == [
        *((0, -1, True), (1, 0, False), (2, 1, False)),
    ]
    assert rows[0]["headers"] == [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]
    assert rows[1]["headers"] == []
    assert (rows[1]["topic"], rows[1]["partition"], rows[1]["broker"], rows[1]["key"]) == ("a", 3, 0, None)
    assert rows[2]["timestamp"].timestamp() == 1.0


def test_options_reach_the_executors_without_passwords(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("hidden-text")
    sasl = KafkaSasl(mechanism=SaslMechanism.PLAIN, user="u", password_file=password)
    topics = KafkaTopics(
        KafkaConnection(("h:1", "i:2"), KafkaTls(ca=tmp_path / "ca"), sasl), ("a", "b"), "read_uncommitted", 3
    )
    texts = {name.lower(): text for name, text in topics.as_texts().items()}
    assert KafkaTopics.parse(texts) == topics
    reader = KafkaStreamReader(texts | {"start": '{"a": {"0": 1}}'})
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.initialOffset() == {"a": {"0": 1}}
    assert b"hidden-text" not in pickle.dumps(reader)


def test_marked_records_are_found_from_an_offset_on() -> None:
    """Partitions with deleted records are reported, and a partition without newer records is not read."""

    class Marked(Message):
        def headers(self) -> list[tuple[str, bytes | None]]:
            return [("other", b"x")] if self.at == 6 else [("mark", b"m%d" % self.at), ("mark", b"second")]

    log: Any = KafkaLog(TOPICS)
    log.bounds = lambda: ({"a": {"0": 5, "1": 0}}, {"a": {"0": 8, "1": 3}})
    log._opened = Broker([Marked(5), Marked(6), Marked(7)], [Message(8, "_PARTITION_EOF")])
    marked = {b"m5": ("a", 0, 5), b"m7": ("a", 0, 7)}
    assert log.find({"a": {"0": 5, "1": 3}}, "mark") == (marked, set())
    log._opened = Broker([Marked(5), Marked(6), Marked(7)], [Message(8, "_PARTITION_EOF")])
    gone = {"a": {"0": 2, "1": 4, "2": 0}, "b": {"0": 0}}
    assert log.find(gone, "mark") == (marked, {("a", 0), ("a", 1), ("a", 2), ("b", 0)})
    # Retention deletes while it is read.
    log._opened = Broker([Message(5, "_AUTO_OFFSET_RESET")])
    assert log.find({"a": {"0": 5}}, "mark") == ({}, {("a", 0)})


def test_records_without_a_value_are_not_those_with_an_empty_one() -> None:
    class Empty(Message):
        def value(self) -> bytes | None:
            return b""

    log: Any = KafkaLog(TOPICS)
    answers: list[Message] = [Empty(4), Message(5), Message(6, "_AUTO_OFFSET_RESET"), Empty(8), Message(8)]
    log._opened = Broker(*([each] for each in answers))
    # 6 was deleted, and 7 by compaction.
    assert log.without_value([("a", 0, offset) for offset in range(4, 9)]) == {("a", 0, n) for n in (5, 6, 7)}


class Named(NamedTuple):
    id: int


class Described(NamedTuple):
    partitions: list[Named]
    topic_id: str = "id"


class Found(NamedTuple):
    offset: int


class Admin:
    """Topics of three partitions; ``errors`` (empty: none) are the first answers, ``asked`` has the requests."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)
        self.asked: list[str] = []

    def poll(self, _timeout: float) -> int:
        return 0

    def describe_topics(self, wanted: TopicCollection, request_timeout: float) -> dict[str, Future[Described]]:
        assert request_timeout == 30
        self.asked.append("topics")
        return {topic: self._answer(Described([Named(2), Named(0), Named(1)])) for topic in ("a", "b")}

    def list_offsets(
        self, asked: Mapping[TopicPartition, object], isolation_level: IsolationLevel, request_timeout: float
    ) -> dict[TopicPartition, Future[Found]]:
        assert (isolation_level, request_timeout) == (IsolationLevel.READ_COMMITTED, 30)
        (which,) = {type(spec).__name__ == "LatestSpec" for spec in asked.values()}
        self.asked.append("ends" if which else "lows")
        return {place: self._answer(Found(place.partition + 10 * which)) for place in asked}

    def describe_configs(
        self, wanted: list[ConfigResource], request_timeout: float
    ) -> dict[ConfigResource, Future[dict[str, ConfigEntry]]]:
        assert request_timeout == 30
        return {each: self._answer({"cleanup.policy": ConfigEntry("cleanup.policy", "compact")}) for each in wanted}

    def _answer(self, result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if code := self.errors.pop(0) if self.errors else "":
            future.set_exception(KafkaException(Error(code)))
        else:
            future.set_result(result)
        return future


def test_the_offsets_of_all_partitions_are_one_request_each() -> None:
    log: Any = KafkaLog(TOPICS._replace(topics=("a", "b")))
    log._asking = admin = Admin()
    lows, ends = log.bounds()
    assert lows == {topic: {"0": 0, "1": 1, "2": 2} for topic in "ab"}
    assert ends == {topic: {"0": 10, "1": 11, "2": 12} for topic in "ab"}
    assert admin.asked == ["topics", "lows", "ends"]


def test_offsets_are_requested_again_while_leaders_change() -> None:
    log: Any = KafkaLog(TOPICS._replace(topics=("a", "b")))
    log._asking = admin = Admin("_TRANSPORT", "_RETRY")
    log.bounds()
    # The first request had an error for the first topic, the second one for the second.
    assert admin.asked == ["topics", "topics", "lows", "ends"]
    failing: list[tuple[str, type[Exception], str]] = [
        ("UNKNOWN_TOPIC_OR_PART", ConfigError, "Kafka at h:1 has no topic 'a'"),
        ("TOPIC_AUTHORIZATION_FAILED", RefusedError, "topic 'a' of Kafka at h:1 cannot be read"),
        ("_FAIL", UnavailableError, "Kafka at h:1 does not answer"),
    ]
    for code, kind, message in failing:
        log._asking = Admin(code)
        with pytest.raises(kind, match=message):
            log.bounds()
    # A new partition whose leader does not know it yet: the topic exists, as the first answer says.
    log._asking = admin = Admin(*[""] * 2, "UNKNOWN_TOPIC_OR_PART", *[""] * 11, "NOT_LEADER_FOR_PARTITION")
    log.bounds()
    assert admin.asked == ["topics", "lows", "lows", "ends", "ends"]


def test_a_topic_that_is_deleted_in_between_is_reported() -> None:
    log: Any = KafkaLog(TOPICS)
    log._asking = Admin("", "", *["UNKNOWN_TOPIC_OR_PART"] * 6)
    ended = iter([0.0, 0.0, 100.0, 200.0, 300.0])
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("penstock.spark.kafka.source.time.monotonic", lambda: next(ended))
        with pytest.raises(ConfigError, match="Kafka at h:1 has no topic 'a'"):
            log.bounds()


def test_the_settings_of_a_topic_are_unknown_without_permission() -> None:
    log: Any = KafkaLog(TOPICS)
    log._asking = Admin("_TRANSPORT")
    assert (log.setting("a", "cleanup.policy"), log.setting("a", "other")) == ("compact", None)
    assert log.topic_ids() == {"a": "id", "b": "id"}
    log._asking = Admin("TOPIC_AUTHORIZATION_FAILED")
    assert log.setting("a", "cleanup.policy") is None
    log._asking = Admin("UNKNOWN_TOPIC_OR_PART")
    with pytest.raises(ConfigError, match="has no topic 'c'"):
        log.setting("c", "cleanup.policy")
    log._asking = Admin("_AUTHENTICATION")
    log._errors.append(Error("_AUTHENTICATION"))
    with pytest.raises(RefusedError, match="Kafka at h:1 cannot be read"):
        log.setting("a", "cleanup.policy")
