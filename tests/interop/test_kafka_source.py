"""Records of topics of a real Kafka broker: over TLS with users, of compacted topics, and errors of connections."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.runtime.kafka.client import KafkaConnection, KafkaTopics
from penstock.runtime.kafka.config import KafkaSasl, KafkaTls, SaslMechanism
from penstock.spark.kafka.source import KafkaLog, ranges
from tests.interop.kafka import PASSWORD, USER, KafkaBroker
from tests.ports import free_ports


def read(topics: KafkaTopics) -> list[tuple[int, bytes | str | None]]:
    """The offsets and values of the first partition, from its first to its last record."""
    with KafkaLog(topics, 10) as log:
        lows, ends = log.bounds()
        found = [m for place in ranges(lows, ends) if not place.partition for each in log.read(place) for m in each]
    return [(message.offset() or 0, message.value()) for message in found]


def test_connections_are_secure_and_their_errors_name_the_cause(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    producer = Producer({"bootstrap.servers": kafka_broker.address})
    producer.produce("secured", b"x", partition=0)
    assert producer.flush(60) == 0
    password, wrong = tmp_path / "password", tmp_path / "wrong"
    password.write_text(PASSWORD)
    wrong.write_text("wrong")
    tls = KafkaTls(ca=kafka_broker.ca)

    def topics(file: Path, name: str = "secured") -> KafkaTopics:
        sasl = KafkaSasl(mechanism=SaslMechanism.SCRAM_SHA_512, user=USER, password_file=file)
        return KafkaTopics(KafkaConnection((kafka_broker.secure,), tls, sasl), (name,), "read_committed", 10)

    assert read(topics(password)) == [(0, b"x")]
    with pytest.raises(RefusedError, match="cannot be read") as refused:
        read(topics(wrong))
    assert "check `sasl` and `tls` of the source" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="has no topic 'missing'"):
        read(topics(password, "missing"))
    (port,) = free_ports(1)
    closed = KafkaTopics(KafkaConnection((f"127.0.0.1:{port}",)), ("a",), "read_committed", 10)
    with pytest.raises(UnavailableError, match="does not answer"), KafkaLog(closed, 2) as log:
        log.bounds()


def test_a_record_without_a_value_is_not_an_empty_one(kafka_broker: KafkaBroker) -> None:
    producer = Producer({"bootstrap.servers": kafka_broker.address})
    for value in (b"", None, b"x", None):
        producer.produce("empty", value, partition=0)
    assert producer.flush(60) == 0
    with KafkaLog(KafkaTopics(KafkaConnection((kafka_broker.address,)), ("empty",), "read_uncommitted", 10)) as log:
        places = [("empty", 0, offset) for offset in range(4)]
        assert log.without_value(places) == {("empty", 0, 1), ("empty", 0, 3)}
        assert log.without_value(places[:1]) == set()


def test_a_topic_with_many_partitions_needs_no_more_requests(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka_broker.address})
    for created in admin.create_topics([NewTopic("narrow", 1, 1), NewTopic("wide", 12, 1)]).values():
        created.result(60)
    with KafkaLog(
        KafkaTopics(KafkaConnection((kafka_broker.address,)), ("narrow", "wide"), "read_committed", 10)
    ) as log:
        log.bounds()  # waits for the leaders, with more requests
    statistics: list[str] = []
    settings = KafkaConnection.settings
    counted = {"statistics.interval.ms": 50, "stats_cb": statistics.append}
    monkeypatch.setattr(KafkaConnection, "settings", lambda connection: settings(connection) | counted)

    def requests(topic: str) -> int:
        with KafkaLog(KafkaTopics(KafkaConnection((kafka_broker.address,)), (topic,), "read_committed", 10)) as log:
            lows, ends = log.bounds()
            assert lows == ends == {topic: {str(n): 0 for n in range(12 if topic == "wide" else 1)}}
            statistics.clear()
            while not statistics:
                log._admin.poll(1)
        brokers = json.loads(statistics[0])["brokers"].values()
        return sum(broker["req"].get("ListOffsets", 0) for broker in brokers)

    assert [requests("narrow"), requests("wide")] == [2, 2]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_compacted_topic_has_gaps(kafka_broker: KafkaBroker) -> None:
    settings = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "100",
    }
    admin = AdminClient({"bootstrap.servers": kafka_broker.address})
    admin.create_topics([NewTopic("compacted", 1, 1, config=settings)])["compacted"].result(60)
    producer = Producer({"bootstrap.servers": kafka_broker.address})
    topics = KafkaTopics(KafkaConnection((kafka_broker.address,)), ("compacted",), "read_committed", 10)
    for n in range(100):
        producer.produce("compacted", b"%d" % n, b"%d" % (n % 3))
        if n % 10 == 9:
            assert producer.flush(60) == 0
    end, number = time.monotonic() + 120, 100
    while len(found := read(topics)) >= number:
        assert time.monotonic() < end, "the topic was not compacted"
        # A new record ends a segment, which makes the one before ready for compaction.
        producer.produce("compacted", b"%d" % number, b"%d" % (number % 3))
        assert producer.flush(60) == 0
        number += 1
        time.sleep(1)
    offsets = [offset for offset, _ in found]
    assert offsets == sorted(set(offsets))
    assert found[-1] == (number - 1, b"%d" % (number - 1))
    assert {int(value or b"") % 3 for _, value in found} == {0, 1, 2}
    assert all(value == b"%d" % offset for offset, value in found)
