"""The delivery rules accept what a correct broker may do, and nothing else."""

from __future__ import annotations

import pytest

from tests.simulation.history import Violation
from tests.simulation.mqtt_history import AMPLE_MS, Message, MqttHistory, Wanted, Window, matches

ID = 100


def history(topic_filter: str = "t/0", qos: int = 2) -> MqttHistory:
    """One with a subscription that was confirmed at 2."""
    made = MqttHistory()
    wanted = made.subscribe(Wanted(ID, "c", topic_filter, qos, 1, windows=[Window(0)]))
    wanted.confirmed_ms = 2
    return made


def sent(made: MqttHistory, number: int = 1, qos: int = 2, *, at: int = 10, retain: bool = False) -> Message:
    return made.publish(Message(number, "p", "t/0", qos, retain), at)


def received(made: MqttHistory, number: int = 1, qos: int = 2, *, at: int = 20, retained: bool = False) -> None:
    made.receive("c", number, [ID], qos, at, retained=retained, topic="t/0")


@pytest.mark.parametrize(
    ("topic_filter", "expected"),
    [("t/0", True), ("t/1", False), ("t/+", True), ("t/#", True), ("u/#", False), ("$share/g/t/+", True)],
)
def test_filters(topic_filter: str, expected: bool) -> None:
    assert matches(topic_filter, "t/0") == expected


@pytest.mark.parametrize("topic_filter", ["t/0", "$share/g/t/#"])
def test_acknowledged_messages_arrive(topic_filter: str) -> None:
    made = history(topic_filter)
    message = sent(made)
    made.check_delivered(AMPLE_MS * 2)
    made.acknowledge(message, 15)
    made.check_delivered(AMPLE_MS)  # there was not enough time
    with pytest.raises(Violation, match="never arrived"):
        made.check_delivered(AMPLE_MS * 2)
    received(made)
    made.check_delivered(AMPLE_MS * 2)


def test_expired_messages_arrive_if_there_was_time() -> None:
    made = history()
    message = sent(made)
    made.acknowledge(message, 15)
    message.expiry_s = 10
    made.check_delivered(AMPLE_MS * 2)
    message.expiry_s = 600
    with pytest.raises(Violation, match="never arrived"):
        made.check_delivered(AMPLE_MS * 2)


def test_qos_2_arrives_once_and_qos_1_may_be_repeated() -> None:
    made = history()
    sent(made, 1, 2)
    sent(made, 2, 1)
    sent(made, 3, 0)
    received(made, 1, 2)
    received(made, 2, 1)
    received(made, 2, 1)
    received(made, 3, 0)
    with pytest.raises(Violation, match="delivered again"):
        received(made, 1, 2)
    with pytest.raises(Violation, match="delivered again"):
        received(made, 3, 0)


def test_after_a_loss_of_power_an_unacknowledged_qos_2_message_may_be_repeated_with_qos_0() -> None:
    made = history()
    sent(made, 1, 2)
    received(made, 1, 0)
    made.power_lost(11)
    received(made, 1, 0)
    made.acknowledge(made.messages[1], 12)
    made.power_lost(13)
    with pytest.raises(Violation, match="delivered again"):
        received(made, 1, 0)


def test_first_deliveries_are_in_order() -> None:
    made = history()
    for number in (1, 2):
        sent(made, number, 1)
    received(made, 2, 1)
    with pytest.raises(Violation, match="after message 2"):
        received(made, 1, 1)


def test_the_first_qos_0_delivery_to_a_disconnected_client_may_be_a_repetition() -> None:
    made = history()
    made.subscriptions[ID].windows[:] = [Window(15)]
    for number in (1, 2):
        sent(made, number, 1)
    received(made, 2, 0)
    received(made, 1, 0)
    made.subscriptions[ID].windows[:] = [Window(0)]
    sent(made, 3, 1)
    sent(made, 4, 1)
    received(made, 4, 0)
    with pytest.raises(Violation, match="after message 4"):
        received(made, 3, 0)


def test_only_a_subscription_brings_a_message() -> None:
    made = history(qos=1)
    message = sent(made)
    made.acknowledge(message, 15)
    with pytest.raises(Violation, match="without a subscription"):
        made.receive("c", 1, [], 1, 20, retained=False, topic="t/0")
    with pytest.raises(Violation, match="for subscription"):
        made.receive("other", 1, [ID], 1, 20, retained=False, topic="t/0")
    with pytest.raises(Violation, match="with QoS 2"):
        received(made)
    made.subscriptions[ID].ended_ms = 5
    with pytest.raises(Violation, match="was not there"):
        received(made, qos=1)
    made.subscriptions[ID].ended_ms, made.subscriptions[ID].sent_ms = None, 16
    with pytest.raises(Violation, match="was not there"):
        received(made, qos=1)


def test_a_retained_message_is_the_last_one() -> None:
    made = history()
    made.acknowledge(sent(made, 1, 1, at=3, retain=True), 4)
    with pytest.raises(Violation, match="no message is retained"):
        made.check_missing_retained(["t/0"], 10)
    made.acknowledge(sent(made, 2, 1, at=5, retain=True), 6)
    made.subscriptions[ID].sent_ms = 10
    received(made, 2, 1, retained=True)
    with pytest.raises(Violation, match="was acknowledged before"):
        received(made, 1, 1, retained=True)
    cleared = sent(made, 3, 1, at=12, retain=True)
    cleared.clear = True
    made.check_missing_retained(["t/0"], 13)


def test_a_will_waits_for_the_end_of_its_connection() -> None:
    made = history()
    will = made.publish(Message(1, "p", "t/0", 2, is_will=True), None)
    with pytest.raises(Violation, match="its client is connected"):
        received(made)
    will.ended = lambda: 30
    with pytest.raises(Violation, match="before 30"):
        received(made)
    received(made, at=30)
    with pytest.raises(Violation, match="delivered again"):
        received(made, at=31)


def test_a_withdrawn_will_may_come_back_with_a_loss_of_power() -> None:
    made = history()
    will = made.publish(Message(1, "p", "t/0", 2, is_will=True), None)
    will.sent_ms, will.why_not = 10, "it was withdrawn"
    with pytest.raises(Violation, match="withdrawn"):
        received(made)
    made.power_lost(11)
    received(made)
