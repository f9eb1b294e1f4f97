"""``python -m benchmarks.steady MASTERS TOPIC RATE SECONDS``: a producer at a steady rate; each message contains its
send time."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from penstock.cli.bench_operations import paced
from penstock.tube.producer import Producer

__all__ = ["steady"]

TURN_S = 0.01
"""Messages are sent in groups, a hundred groups per second."""


async def steady(masters: str, topic: str, rate: float, seconds: float) -> None:
    """Send messages for ``seconds``; the body is the time in seconds since 1970, as text."""
    until = time.perf_counter() + seconds
    async with Producer(masters) as producer, asyncio.TaskGroup() as group:
        async for due in paced(rate, turn_s=TURN_S):
            if due >= until:
                break
            group.create_task(producer.send(topic, b"%.6f" % time.time()))


if __name__ == "__main__":
    uvloop.run(steady(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
