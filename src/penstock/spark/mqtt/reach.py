"""Whether an MQTT broker can be published to, asked before a job is started."""

from __future__ import annotations

import asyncio

from penstock.mqtt.client import MqttClient

__all__ = ["look"]


def look(broker: str, timeout_s: float) -> None:
    """Connect to the ``broker`` (its URL) and leave it again.

    Raises:
        UnavailableError: nobody answers there within ``timeout_s``.
        RefusedError: who connects is not wanted there.
    """
    asyncio.run(_look(broker, timeout_s))


async def _look(broker: str, timeout_s: float) -> None:
    async with MqttClient(broker, connect_timeout_s=timeout_s, reconnect=False):
        pass
