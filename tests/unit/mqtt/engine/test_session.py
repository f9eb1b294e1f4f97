"""A session without a connection: what waits, what is dropped, and that the sizes add up."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from penstock.mqtt.engine.model.message import message_of
from penstock.mqtt.engine.sessions.session import Session


def offline(**limits: Any) -> Session:
    broker = Broker(BrokerLimits(**limits), new_client_id=lambda: "c")
    return Session(broker, "c", broker.limits, broker.stats)


def put(session: Session, *payloads: bytes, qos: int = 1) -> None:
    for payload in payloads:
        session.deliver(message_of(Publish("a", payload, qos), 0), qos, 0, b"", 0)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [(QueueOverflowPolicy.DROP_NEWEST, [b"1", b"2"]), (QueueOverflowPolicy.DROP_OLDEST, [b"2", b"3"])],
)
def test_a_full_queue_and_its_bytes(policy: QueueOverflowPolicy, kept: list[bytes]) -> None:
    session = offline(max_queued_messages=2, queue_overflow=policy)
    put(session, b"1", b"2", b"3")
    assert [delivery.message.payload for delivery in session.waiting.reliable] == kept
    assert session.waiting.bytes == sum(delivery.message.size for delivery in session.waiting.reliable)
    session.clear()
    assert (session.waiting.bytes, len(session.waiting)) == (0, 0)


def test_qos_0_is_not_queued_for_disconnected_clients() -> None:
    session = offline()
    put(session, b"x", qos=0)
    assert (len(session.waiting.qos0), session.waiting.bytes) == (0, 0)


def test_acknowledgements_of_nothing() -> None:
    session = offline()
    assert not session.acknowledge(7, 0)
    session.send_waiting(0)
