"""A rule: records made of messages, PUBACK after the log, refusals by kind, bounded waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, StorageError, UnavailableError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import Inbound
from penstock.node.config import Rule
from penstock.node.rules import Identities, RuleService
from penstock.node.template import Template
from penstock.tube.codec.codes import ErrCode
from penstock.tube.record import Record


class Log:
    """A tube that keeps what it is given and answers when told."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int | None, Record, str | None]] = []
        self.waiting: list[Callable[[object], None]] = []
        self.raises: PenstockError | None = None

    def append(
        self,
        topic: str,
        partition: int | None,
        data: bytes,
        flag: int,
        msg_type: str | None,
        done: Callable[[object], None],
    ) -> None:
        if self.raises is not None:
            raise self.raises
        self.records.append((topic, partition, Record.decode(data, flag), msg_type))
        self.waiting.append(done)


class Connection:
    """The network connection of a client; as the broker's, it ends once."""

    def __init__(self) -> None:
        self.closing = False
        self.ends: list[tuple[int, str]] = []

    def end(self, reason_code: int, reason_string: str) -> None:
        if not self.closing:
            self.closing = True
            self.ends.append((reason_code, reason_string))


class Broker:
    """What the MQTT broker would have done: settled messages and ended connections."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.settled: list[tuple[int, str]] = []

    @property
    def disconnected(self) -> list[tuple[int, str]]:
        return self.connection.ends

    def inbound(self, publish: Publish, *, client_id: str = "dev", version: int = 5) -> Inbound:
        return Inbound(
            publish,
            client_id,
            1_700_000_000_000,
            protocol_version=version,
            connection=self.connection,
            settle=lambda code, text: self.settled.append((code, text)),
        )


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def broker() -> Broker:
    return Broker()


def service(log: Log, broker: Broker, rule: Rule | None = None, partitions: tuple[int, ...] = (0, 1, 2)) -> RuleService:
    return RuleService(
        rule or Rule(filter="plant/#", topic="water"),
        log.append,
        partitions=partitions,
        identities=Identities("r1"),
    )


def test_the_puback_waits_for_the_log(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/7/flow", b"42", 1)))
    assert broker.settled == []
    assert (rule.stats.received, rule.stats.pending, rule.stats.logged) == (1, 1, 0)
    log.waiting.pop()(object())
    assert broker.settled == [(0, "")]
    assert (rule.stats.pending, rule.stats.pending_bytes, rule.stats.logged, rule.stats.bytes_received) == (0, 0, 1, 2)


def test_a_record_carries_the_message(log: Log, broker: Broker) -> None:
    properties = Properties()
    properties.content_type = "application/json"
    properties.user_properties.append(("line", "3"))
    properties.user_properties.append(("id", "m-1"))
    properties.user_properties.append(("event-time", "1700000000123"))
    service(log, broker).receive(broker.inbound(Publish("plant/7/flow", b"{}", 1, properties=properties)))
    topic, partition, record, msg_type = log.records[0]
    assert (topic, msg_type) == ("water", "flow")
    assert partition in {0, 1, 2}
    assert record == Record(
        b"{}",
        b"plant/7/flow",
        [("line", "3")],
        "plant/7/flow",
        1_700_000_000_123,
        "m-1",
        "flow",
        "application/json",
    )


def test_key_and_type_come_from_templates_and_the_partition_from_the_setting(log: Log, broker: Broker) -> None:
    rule = Rule(filter="#", topic="water", key=Template("{level.2}"), msg_type=Template("{client_id}"), partition=2)
    service(log, broker, rule).receive(broker.inbound(Publish("plant/7/flow", b"", 1)))
    _, partition, record, msg_type = log.records[0]
    assert (partition, record.key, msg_type) == (2, b"7", "dev")


def test_one_key_stays_in_one_partition_and_keys_spread(log: Log, broker: Broker) -> None:
    rule = service(log, broker, partitions=(0, 1, 10_000, 10_001))
    for n in range(200):
        rule.receive(broker.inbound(Publish(f"plant/{n % 50}/flow", b"", 0)))
    places: dict[bytes | None, set[int | None]] = {}
    for _, partition, record, _ in log.records:
        places.setdefault(record.key, set()).add(partition)
    assert all(len(partitions) == 1 for partitions in places.values())
    assert set().union(*places.values()) == {0, 1, 10_000, 10_001}


def test_ids_repeat_neither_within_a_run_nor_in_the_next(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    for _ in range(3):
        rule.receive(broker.inbound(Publish("plant/a", b"", 1)))
    rule.receive(broker.inbound(Publish("plant/a", b"", 1), client_id="other"))
    ids = [record.id for _, _, record, _ in log.records]
    assert ids == ["dev/r1-1", "dev/r1-2", "dev/r1-3", "other/r1-4"]
    assert Identities("r2").next("dev") not in ids


REFUSED = [
    (RefusedError("full", code=ErrCode.SERVER_RECEIVE_OVERFLOW), ReasonCode.QUOTA_EXCEEDED),
    (RefusedError("no such topic", code=ErrCode.FORBIDDEN), ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR),
    (LocalProtocolError("too long"), ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR),
]
AWAY = [StorageError("disk gone"), UnavailableError("closing", applied=False)]


@pytest.mark.parametrize(("error", "code"), REFUSED)
@pytest.mark.parametrize("how", ["raised", "answered"])
def test_a_refusal_is_a_failure_code_with_its_reason(
    log: Log, broker: Broker, error: PenstockError, code: int, how: str
) -> None:
    rule = service(log, broker)
    log.raises = error if how == "raised" else None
    rule.receive(broker.inbound(Publish("plant/a", b"", 1)))
    if how == "answered":
        log.waiting.pop()(error)
    assert broker.settled == [(code, error.what)]
    assert broker.disconnected == []
    assert (rule.stats.refused, rule.stats.pending, rule.stats.pending_bytes) == (1, 0, 0)


@pytest.mark.parametrize("error", AWAY)
def test_a_log_that_is_away_ends_the_connection_so_that_the_publisher_keeps_the_message(
    log: Log, broker: Broker, error: PenstockError
) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"", 1)))
    log.waiting.pop()(error)
    assert broker.settled == []
    assert broker.disconnected == [(ReasonCode.SERVER_UNAVAILABLE, error.what)]


def test_a_client_that_came_back_is_not_thrown_out_for_a_message_of_its_old_connection(
    log: Log, broker: Broker
) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"x", 1)))
    broker.connection.closing = True
    log.waiting[0](StorageError("the disk is gone"))
    assert (broker.settled, broker.disconnected) == ([], [])
    assert (rule.stats.refused, rule.stats.pending, rule.stats.pending_bytes) == (1, 0, 0)


def test_mqtt_3_has_no_failure_codes_so_every_refusal_ends_the_connection(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"", 1), version=4))
    log.waiting.pop()(RefusedError("full", code=ErrCode.SERVER_RECEIVE_OVERFLOW))
    assert broker.settled == []
    assert broker.disconnected == [(ReasonCode.QUOTA_EXCEEDED, "full")]


def test_at_qos_0_what_is_not_taken_is_counted(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"", 0)))
    log.waiting.pop()(StorageError("disk gone"))
    assert broker.disconnected == []
    assert (rule.stats.dropped, rule.stats.refused) == (1, 0)


def test_waiting_messages_are_bounded(log: Log, broker: Broker) -> None:
    rule = service(log, broker, Rule(filter="#", topic="water", max_pending_bytes=2000))
    for _ in range(3):
        rule.receive(broker.inbound(Publish("a", b"x" * 400, 1)))
    assert len(log.records) == 2
    assert broker.settled == [(ReasonCode.QUOTA_EXCEEDED, "rule water: 2 messages wait for the log")]
    log.waiting.pop()(object())
    rule.receive(broker.inbound(Publish("a", b"x" * 400, 1)))
    assert len(log.records) == 3
    rule.disconnected("dev")
