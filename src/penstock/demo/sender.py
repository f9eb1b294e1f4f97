"""The meter: publishes messages in order at a fixed rate, and records acknowledged ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.demo.data import Telemetry
from penstock.errors import RefusedError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.properties import Properties

__all__ = ["TelemetrySender"]

WINDOW = 20
"""Messages in flight: enough to be interrupted by a kill of the node, few enough to keep the order."""
NO_SUBSCRIBERS = 0x10


class TelemetrySender:
    """Publishes with QoS 1 through ``client``, which repeats unacknowledged messages after a reconnect.

    ``sent`` and ``acknowledged`` have each id once, in order. ``hold`` and ``release`` pause and continue.
    """

    def __init__(self, client: MqttClient, topic: str, rate: float) -> None:
        self.sent: list[str] = []
        self.acknowledged: list[str] = []
        self._client = client
        self._topic = topic
        self._interval_s = 1.0 / rate
        self._slots = asyncio.Semaphore(WINDOW)
        self._flowing = asyncio.Event()
        self._flowing.set()

    def hold(self) -> None:
        """Pause."""
        self._flowing.clear()

    def release(self) -> None:
        """Continue."""
        self._flowing.set()

    async def send_all(self, messages: Sequence[Telemetry]) -> None:
        """Send ``messages`` in order; returns when all are acknowledged.

        Raises:
            RefusedError: the node rejected one, or has no matching rule.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for message in messages:
                await self._flowing.wait()
                await self._slots.acquire()
                # After a pause the rate continues, without a burst.
                due = max(due + self._interval_s, loop.time())
                await asyncio.sleep(due - loop.time())
                group.create_task(self._send_one(message), name=f"send-{message.id}")

    async def send(self, message: Telemetry) -> None:
        """Send one message and wait for its acknowledgement."""
        await self._slots.acquire()
        await self._send_one(message)

    async def _send_one(self, message: Telemetry) -> None:
        try:
            self.sent.append(message.id)
            properties = Properties(content_type="application/json", user_properties=[("id", message.id)])
            answer = await self._client.publish(self._topic, message.payload, qos=1, properties=properties)
            if answer == NO_SUBSCRIBERS:
                raise RefusedError(
                    f"nobody took {message.id!r} on MQTT topic {self._topic!r}",
                    code=NO_SUBSCRIBERS,
                    why="the node has no rule for water/+/flow",
                    do="start it with examples/water/penstock.yaml, or let the demo start a node of its own",
                )
            self.acknowledged.append(message.id)
        finally:
            self._slots.release()
