"""A rule: records made of messages, PUBACK after the log, refusals by kind, bounded waiting."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, StorageError, UnavailableError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import NO_ANSWER, Inbound
from penstock.node.config.node import RuleSection
from penstock.node.config.template import Template
from penstock.node.rules import PORTION, Identities, RuleService, TubeTarget
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.strings import partition_ids
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
        self.resumed = False
        self.ends: list[tuple[int, str]] = []
        self.holds = 0

    def hold(self) -> None:
        self.holds += 1

    def release(self) -> None:
        self.holds -= 1

    def disconnect_client(self, reason_code: int, reason_string: str) -> None:
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


class Later:
    """Timers that the test lets run."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, delay: float, callback: Callable[[], None], /) -> None:
        self.calls.append((delay, callback))

    def run(self) -> float:
        """Let the one timer run; how long it was set for."""
        ((delay, callback),) = self.calls
        self.calls.clear()
        callback()
        return delay


def service(
    log: Log,
    broker: Broker,
    rule: RuleSection | None = None,
    shape: Callable[[], tuple[int, int]] = lambda: (3, 1),
    later: Later | None = None,
) -> RuleService:
    rule = rule or RuleSection(filter="plant/#", topic="water")
    return RuleService(
        rule,
        TubeTarget(rule, log.append, shape),
        identities=Identities("r1"),
        later=later or (lambda _delay, callback: callback()),
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
    rule = RuleSection(
        filter="#", topic="water", key=Template("{level.2}"), msg_type=Template("{client_id}"), partition=2
    )
    service(log, broker, rule).receive(broker.inbound(Publish("plant/7/flow", b"", 1)))
    _, partition, record, msg_type = log.records[0]
    assert (partition, record.key, msg_type) == (2, b"7", "dev")


def test_one_key_stays_in_one_partition_and_keys_spread(log: Log, broker: Broker) -> None:
    rule = service(log, broker, shape=lambda: (2, 2))
    for n in range(200):
        rule.receive(broker.inbound(Publish(f"plant/{n % 50}/flow", b"", 0)))
    places: dict[bytes | None, set[int | None]] = {}
    for _, partition, record, _ in log.records:
        places.setdefault(record.key, set()).add(partition)
    assert all(len(partitions) == 1 for partitions in places.values())
    assert set().union(*places.values()) == {0, 1, 10_000, 10_001}


def test_new_partitions_of_the_topic_are_used_as_producers_do(log: Log, broker: Broker) -> None:
    shape = [1, 1]
    rule = service(log, broker, shape=lambda: (shape[0], shape[1]))
    shape[:] = 3, 2
    for n in range(50):
        rule.receive(broker.inbound(Publish(f"plant/{n}", b"", 0)))
    ids = partition_ids(3, 2)
    assert all(partition == ids[zlib.crc32(record.key or b"") % 6] for _, partition, record, _ in log.records)
    assert {partition for _, partition, _, _ in log.records} == set(ids)


def test_ids_repeat_neither_within_a_run_nor_in_the_next(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    for _ in range(3):
        rule.receive(broker.inbound(Publish("plant/a", b"", 1)))
    rule.receive(broker.inbound(Publish("plant/a", b"", 1), client_id="other"))
    ids = [record.id for _, _, record, _ in log.records]
    assert ids == ["dev/r1-1", "dev/r1-2", "dev/r1-3", "other/r1-4"]
    assert Identities("r2").next("dev") not in ids


REFUSED = [
    (RefusedError("no such topic", code=ErrCode.FORBIDDEN), ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR),
    (LocalProtocolError("too long"), ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR),
]
AWAY = [StorageError("disk gone"), UnavailableError("lost on the way", applied=None)]
FOR_NOW = [
    UnavailableError("full", applied=False, why="the disk does not keep up"),
    RefusedError("full", code=ErrCode.SERVER_RECEIVE_OVERFLOW),
]


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
def test_an_unavailable_log_ends_the_connection_so_that_the_publisher_keeps_the_message(
    log: Log, broker: Broker, error: PenstockError
) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"", 1)))
    log.waiting.pop()(error)
    assert broker.settled == [(NO_ANSWER, error.what)]
    assert broker.disconnected == [(ReasonCode.SERVER_BUSY, error.what)]


def test_a_client_that_came_back_is_not_thrown_out_for_a_message_of_its_old_connection(
    log: Log, broker: Broker
) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"x", 1)))
    broker.connection.closing = True
    log.waiting[0](StorageError("the disk is gone"))
    assert (broker.settled, broker.disconnected) == ([(NO_ANSWER, "the disk is gone")], [])
    assert (rule.stats.refused, rule.stats.pending, rule.stats.pending_bytes) == (1, 0, 0)


def test_mqtt_3_has_no_failure_codes_so_every_refusal_ends_the_connection(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"", 1), version=4))
    log.waiting.pop()(RefusedError("no such topic", code=ErrCode.FORBIDDEN))
    assert broker.settled == [(NO_ANSWER, "no such topic")]
    assert broker.disconnected == [(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, "no such topic")]


def test_refused_qos_0_messages_are_counted(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    rule.receive(broker.inbound(Publish("plant/a", b"", 0)))
    log.waiting.pop()(StorageError("disk gone"))
    assert broker.disconnected == []
    assert (rule.stats.dropped, rule.stats.refused) == (1, 0)


def test_a_will_that_the_log_refuses_is_counted(log: Log, broker: Broker) -> None:
    rule = service(log, broker)
    rule.receive(Inbound(Publish("plant/a", b"", 1), "dev", 0))
    log.waiting.pop()(StorageError("disk gone"))
    assert (rule.stats.dropped, rule.stats.refused) == (1, 0)


def test_attributes_come_from_templates_after_the_user_properties(log: Log, broker: Broker) -> None:
    rule = RuleSection(
        filter="#",
        topic="water",
        attributes={"site": Template("{level.1}"), "unit": Template("{user.unit|bar}"), "none": Template("{user.x}")},
    )
    properties = Properties(user_properties=[("line", "3")])
    service(log, broker, rule).receive(broker.inbound(Publish("plant/7", b"", 1, properties=properties)))
    assert log.records[0][2].headers == [("line", "3"), ("site", "plant"), ("unit", "bar")]


def small(**more: Any) -> RuleSection:
    return RuleSection.model_validate({"filter": "#", "topic": "water", "max_pending_bytes": 2000, **more})


def send(rule: RuleService, broker: Broker, text: str, size: int = 400, qos: int = 1, **properties: Any) -> None:
    given = Properties(**properties) if properties else None
    rule.receive(broker.inbound(Publish("a", text.encode().ljust(size, b"."), qos, properties=given)))


def texts(log: Log) -> str:
    return "".join(record.value[:1].decode() for _, _, record, _ in log.records)


def test_waiting_messages_are_bounded_and_refused_where_that_was_chosen(log: Log, broker: Broker) -> None:
    rule = service(log, broker, small(overflow="refuse"))
    for text in "abc":
        send(rule, broker, text)
    assert len(log.records) == 2
    assert broker.settled == [(ReasonCode.QUOTA_EXCEEDED, "rule water: 2 messages wait for the log")]
    assert broker.connection.holds == 0
    log.waiting.pop()(object())
    send(rule, broker, "d")
    assert len(log.records) == 3
    rule.disconnected("dev")


def test_user_properties_of_waiting_messages_count(log: Log, broker: Broker) -> None:
    rule = service(log, broker, small(overflow="refuse"))
    large = Properties(user_properties=[("n", "v" * 10_000)])
    rule.receive(broker.inbound(Publish("plant/1/a", b"", 1, packet_id=1, properties=large)))
    assert not log.records
    assert [code for code, _ in broker.settled] == [ReasonCode.QUOTA_EXCEEDED]


def test_a_publisher_with_too_many_pending_messages_is_paused_until_half_are_done(log: Log, broker: Broker) -> None:
    rule = service(log, broker, small())
    for text in "abcd":
        send(rule, broker, text)
    assert texts(log) == "abcd", "what was read is taken"
    assert (broker.connection.holds, rule.stats.held) == (1, 1)
    for waiting, holds in ((3, 1), (2, 1), (1, 0), (0, 0)):
        log.waiting.pop(0)(object())
        assert (rule.stats.pending, broker.connection.holds) == (waiting, holds)
    assert broker.settled == [(0, "")] * 4


def test_twice_the_bound_is_the_end_of_it(log: Log, broker: Broker) -> None:
    rule = service(log, broker, small())
    for text in "abcde":
        send(rule, broker, text)
    assert texts(log) == "abcd"
    assert broker.settled == [(ReasonCode.QUOTA_EXCEEDED, "rule water: 4 messages wait for the log")]


def test_high_priority_passes_without_its_connection_being_held(log: Log, broker: Broker) -> None:
    rule = service(log, broker, small())
    send(rule, broker, "a")
    send(rule, broker, "b")
    send(rule, broker, "c", user_properties=[("$high_priority", "")])
    assert (texts(log), broker.connection.holds) == ("abc", 0)


@pytest.mark.parametrize("error", FOR_NOW)
def test_a_log_that_is_full_for_now_is_tried_again_in_order(log: Log, broker: Broker, error: PenstockError) -> None:
    later = Later()
    rule = service(log, broker, later=later)
    for text in "abc":
        send(rule, broker, text)
    first = log.waiting.pop(0)
    first(error)
    send(rule, broker, "d")
    for _ in range(2):
        log.waiting.pop(0)(error)
    assert texts(log) == "abc"
    assert (rule.stats.waiting, rule.stats.pending, broker.settled) == (4, 4, [])
    # The oldest alone is tried, twice as late each time.
    assert later.run() == pytest.approx(0.02)
    assert texts(log) == "abca"
    send(rule, broker, "e")
    log.waiting.pop(0)(error)
    assert later.run() == pytest.approx(0.04)
    assert texts(log) == "abcaa"
    log.waiting.pop(0)(object())
    assert texts(log) == "abcaabcde"
    assert broker.settled == [(0, "")]
    for _ in range(4):
        log.waiting.pop(0)(object())
    assert broker.settled == [(0, "")] * 5
    assert (rule.stats.waiting, rule.stats.pending, rule.stats.pending_bytes, rule.stats.retried) == (0, 0, 0, 6)
    assert (later.calls, rule.stats.refused, rule.stats.dropped) == ([], 0, 0)


def test_a_backlog_is_appended_in_portions_and_in_order(log: Log, broker: Broker) -> None:
    """Other clients are served between the turns of the event loop."""
    later = Later()
    rule = service(log, broker, later=later)
    names = [f"{number:03}" for number in range(300)]
    for name in names:
        send(rule, broker, name, size=3)
    while log.waiting:
        log.waiting.pop(0)(FOR_NOW[0])
    log.records.clear()
    later.run()
    log.waiting.pop(0)(object())
    assert len(log.records) == 1 + PORTION
    send(rule, broker, "new", size=3)
    later.run()
    assert len(log.records) == 1 + 2 * PORTION
    log.waiting.pop(0)(FOR_NOW[0])  # full again: the next portion waits until the oldest message is accepted
    (_, drain), _ = later.calls
    del later.calls[0]
    drain()
    assert len(log.records) == 1 + 2 * PORTION
    later.run()
    log.waiting.pop()(object())
    appended = [len(log.records)]
    while later.calls:
        later.run()
        appended.append(len(log.records))
    assert all(after - before <= PORTION for before, after in pairwise(appended))
    assert [record.value.decode() for _, _, record, _ in log.records] == [
        *names[: 1 + 2 * PORTION], names[1], *names[1 + 2 * PORTION :], "new",
    ]  # fmt: skip


def test_a_message_that_was_not_accepted_is_not_overtaken(log: Log, broker: Broker) -> None:
    later = Later()
    rule = service(log, broker, later=later)
    log.raises = FOR_NOW[0]
    send(rule, broker, "a")
    log.raises = None
    send(rule, broker, "b")
    assert texts(log) == ""
    later.run()
    log.waiting.pop(0)(object())
    assert texts(log) == "ab"


def test_a_log_that_fills_up_again_keeps_the_order(log: Log, broker: Broker) -> None:
    later = Later()
    rule = service(log, broker, later=later)
    error = FOR_NOW[0]
    for text in "abc":
        send(rule, broker, text)
    for _ in range(3):
        log.waiting.pop(0)(error)
    later.run()
    log.waiting.pop(0)(object())
    for _ in range(2):
        log.waiting.pop(0)(error)
    later.run()
    log.waiting.pop(0)(object())
    log.waiting.pop(0)(object())
    assert texts(log) == "abcabcbc"
    assert broker.settled == [(0, "")] * 3


def test_the_retry_of_an_earlier_failure_does_not_overtake(log: Log, broker: Broker) -> None:
    """One message that was sent before the failure is accepted, so the log is available before the retry is due."""
    later = Later()
    rule = service(log, broker, later=later)
    send(rule, broker, "a")
    send(rule, broker, "x")
    log.waiting.pop(0)(FOR_NOW[0])
    (_, earlier), *_ = later.calls
    later.calls.clear()
    log.waiting.pop(0)(object())
    assert texts(log) == "axa"
    log.waiting.pop(0)(FOR_NOW[0])
    send(rule, broker, "b")
    later.run()
    earlier()
    assert texts(log) == "axaa", "only the oldest message is sent while the log is not available"
    log.waiting.pop(0)(object())
    assert texts(log) == "axaab"


@pytest.mark.parametrize("error", [*(error for error, _ in REFUSED), *AWAY])
def test_a_permanently_refused_retry_does_not_block_the_messages_behind_it(
    log: Log, broker: Broker, error: PenstockError
) -> None:
    later = Later()
    rule = service(log, broker, later=later)
    for text in "abc":
        send(rule, broker, text)
    for _ in range(3):
        log.waiting.pop(0)(FOR_NOW[0])
    later.run()
    log.waiting.pop(0)(error)
    assert texts(log) == "abcabc"
    log.waiting.pop(0)(object())
    log.waiting.pop(0)(object())
    send(rule, broker, "d")
    assert texts(log) == "abcabcd"
    assert (rule.stats.logged, rule.stats.refused, rule.stats.waiting, rule.stats.pending) == (2, 1, 0, 1)


def test_pauses_between_attempts_are_bounded(log: Log, broker: Broker) -> None:
    later = Later()
    rule = service(log, broker, later=later)
    send(rule, broker, "a")
    pauses = []
    for _ in range(9):
        log.waiting.pop(0)(FOR_NOW[0])
        pauses.append(later.run())
    assert pauses[0] == pytest.approx(0.02)
    assert pauses[-1] == pytest.approx(2.0)
    assert pauses == sorted(pauses)


def test_pending_messages_stay_with_their_publisher_at_shutdown(log: Log, broker: Broker) -> None:
    later = Later()
    rule = service(log, broker, later=later)
    send(rule, broker, "a")
    log.waiting.pop(0)(FOR_NOW[0])
    send(rule, broker, "b", qos=0)
    rule.close()
    assert broker.disconnected == [(ReasonCode.SERVER_BUSY, "the node is shutting down")]
    assert (rule.stats.refused, rule.stats.dropped, rule.stats.pending, rule.stats.waiting) == (1, 1, 0, 0)
    later.run()
    assert texts(log) == "a"
