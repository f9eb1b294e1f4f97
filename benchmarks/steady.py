"""``python -m benchmarks.steady MASTERS TOPIC RATE SECONDS``: a producer at a steady rate; each message contains its
send time."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from penstock.tube.producer import Producer

__all__ = ["steady"]

TURN_S = 0.01
"""Messages are sent in groups, a hundred groups per second."""


async def steady(masters: str, topic: str, rate: float, seconds: float) -> None:
    """Send messages for ``seconds``; the body is the time in seconds since 1970, as text."""
    started, sent = time.monotonic(), 0
    async with Producer(masters) as producer, asyncio.TaskGroup() as group:
        while (passed := time.monotonic() - started) < seconds:
            due = int(passed * rate)
            for _ in range(due - sent):
                group.create_task(producer.send(topic, b"%.6f" % time.time()))
            sent = due
            await asyncio.sleep(TURN_S)


if __name__ == "__main__":
    uvloop.run(steady(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
