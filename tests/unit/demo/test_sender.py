from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.demo.data import Telemetry
from penstock.demo.run import TelemetrySender
from penstock.errors import RefusedError

MESSAGES = [Telemetry(f"m{n}", b"%d" % n) for n in range(50)]


class Client:
    """Acknowledges what it is told to; ``answers`` holds reason codes by payload."""

    def __init__(self, answers: dict[bytes, int] | None = None) -> None:
        self.published: list[tuple[str, bytes, Any]] = []
        self.answers = answers or {}
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def publish(self, topic: str, payload: bytes, *, qos: int, properties: Any) -> int:
        assert qos == 1
        self.published.append((topic, payload, properties))
        await self.may_answer.wait()
        return self.answers.get(payload, 0)


def sender(client: Any) -> TelemetrySender:
    return TelemetrySender(client, "water/b/flow", 100_000.0)


async def test_messages_go_in_order_with_their_ids() -> None:
    client = Client()
    meter = sender(client)
    await meter.send_all(MESSAGES)
    assert [payload for _, payload, _ in client.published] == [message.payload for message in MESSAGES]
    assert client.published[3][2].user_properties == [("id", "m3")]
    assert meter.sent == [message.id for message in MESSAGES]
    assert sorted(meter.acknowledged) == sorted(meter.sent)


async def test_only_so_many_are_under_way_and_unacknowledged_ones_are_not_acknowledged() -> None:
    client = Client()
    client.may_answer.clear()
    meter = sender(client)
    sending = asyncio.create_task(meter.send_all(MESSAGES))
    async with asyncio.timeout(60):
        while len(client.published) < 20:
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(client.published) == 20
    assert meter.acknowledged == []
    client.may_answer.set()
    await sending
    assert len(meter.acknowledged) == 50


async def test_hold_stops_new_messages_until_release() -> None:
    client = Client()
    meter = sender(client)
    meter.hold()
    sending = asyncio.create_task(meter.send_all(MESSAGES))
    for _ in range(100):
        await asyncio.sleep(0)
    assert client.published == []
    meter.release()
    await sending
    assert len(client.published) == 50


async def test_a_node_without_the_rule_is_an_error() -> None:
    meter = sender(Client({b"0": 0x10}))
    with pytest.raises(RefusedError, match="no rule for water"):
        await meter.send(MESSAGES[0])
    assert meter.acknowledged == []
    with pytest.raises(BaseExceptionGroup, match="unhandled"):
        await sender(Client({b"7": 0x10})).send_all(MESSAGES)
