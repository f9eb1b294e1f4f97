"""Whether a topic can be written to, asked before a job is started."""

from __future__ import annotations

import asyncio

from penstock.spark.tube.sink_options import SinkOptions
from penstock.tube.producer import Producer

__all__ = ["TOPIC_S", "look"]

TOPIC_S = 10.0
"""How long the masters may take to announce a topic that exists."""


def look(options: SinkOptions, timeout_s: float) -> None:
    """Register where ``options`` say, and publish their topic if they name one.

    Raises:
        UnavailableError: no master answers.
        RefusedError: who writes is not wanted there, or within ``timeout_s`` nobody announced such a topic.
        ConfigError: a file of the login cannot be used.
    """
    asyncio.run(_look(options, timeout_s))


async def _look(options: SinkOptions, timeout_s: float) -> None:
    async with Producer(options.masters, topic_timeout_s=timeout_s, **options.login.client()) as producer:
        if options.topic is not None:
            await producer.publish(options.topic)
