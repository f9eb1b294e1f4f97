"""``python -m benchmarks.steady MASTERS TOPIC RATE SECONDS``: a producer at a steady rate; each message contains its
send time. ``kafka://HOST:PORT`` instead of masters of TubeMQ: a producer to Kafka that sends immediately."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from penstock.cli.bench_operations import paced
from penstock.tube.producer import Producer

__all__ = ["steady", "steady_kafka"]

KAFKA = "kafka://"
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


async def steady_kafka(address: str, topic: str, rate: float, seconds: float) -> None:
    """The same for a topic of Kafka.

    Raises:
        KafkaException: it is not reachable, or its queue is full because it is slower than ``rate``.
    """
    from confluent_kafka import Producer as KafkaProducer

    until = time.perf_counter() + seconds
    producer = KafkaProducer({"bootstrap.servers": address, "linger.ms": 0})
    async for due in paced(rate, turn_s=TURN_S):
        if due >= until:
            break
        producer.produce(topic, b"%.6f" % time.time())
        producer.poll(0)
    producer.flush()


if __name__ == "__main__":
    _, masters, topic, rate, seconds = sys.argv
    work = steady_kafka if masters.startswith(KAFKA) else steady
    uvloop.run(work(masters.removeprefix(KAFKA), topic, float(rate), float(seconds)))
