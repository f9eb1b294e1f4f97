"""Loads of TubeMQ clients on a server: penstock's client, and Apache's in a JVM. Each run is one number."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from typing import NamedTuple

import uvloop

from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from tests.interop.tube_java.clients import JavaClients

__all__ = ["MESSAGES", "JavaLoads", "Measured", "OurLoads", "fill", "fill_each", "first_send"]

MESSAGES = 50_000
SENT = 30_000
SINGLE = 500
PROBES = 200
WINDOW = 1_000
"""Number of messages of the Java client in flight."""
TIMEOUT_S = 300


class Measured(NamedTuple):
    """A run: its figure, the messages that the server handled, and latencies if they are measured."""

    value: float
    messages: int = 0
    p50_us: float | None = None
    p99_us: float | None = None


class OurLoads:
    """Penstock's client."""

    def produce(self, topic: str, size: int, producers: int, master: str) -> Measured:
        """Produce at full speed, in batches if the server supports them."""
        return uvloop.run(_together(master, topic, size, producers, SENT, ahead=True))

    def one_by_one(self, topic: str, size: int, producers: int, master: str) -> Measured:
        """Produce, waiting for each acknowledgement."""
        return uvloop.run(_together(master, topic, size, producers, SINGLE, ahead=False))

    def consume(self, topic: str, count: int, master: str) -> Measured:
        """Consume with a new group from the earliest message on; measured from the first message to the last of
        ``count``."""
        return uvloop.run(_drain(master, topic, count))

    def latency(self, topic: str, master: str) -> Measured:
        """Measure the latency from send to the consumer, at 500 messages per second."""
        return uvloop.run(_latency(master, topic, 100))

    def first(self, topic: str, master: str) -> Measured:
        """Measure the milliseconds from the start of a consumer of a new group to its first message."""
        return Measured(uvloop.run(_first_message(master, topic)))


class JavaLoads:
    """Apache's client; its methods measure the same as those of :class:`OurLoads`."""

    def __init__(self, java: JavaClients) -> None:
        self._java = java

    def warm(self, topic: str, master: str) -> None:
        """Let the JVM compile the code of sending, which would otherwise slow down the first server."""
        for count, window in ((SENT, WINDOW), (2 * SINGLE, 0)):
            self._together(master, topic, 100, 1, count, window)

    def produce(self, topic: str, size: int, producers: int, master: str) -> Measured:
        return self._together(master, topic, size, producers, SENT, WINDOW)

    def one_by_one(self, topic: str, size: int, producers: int, master: str) -> Measured:
        return self._together(master, topic, size, producers, SINGLE, 0)

    def consume(self, topic: str, count: int, master: str) -> Measured:
        # Bodies of other producers are not checked.
        answer = self._java.measure(master, _group(), topic, count, unchecked="", timeout_ms=200_000)
        return Measured(count / _times(answer.result(TIMEOUT_S))["seconds"], count)

    def latency(self, topic: str, master: str) -> Measured:
        times = _times(self._java.latency(master, _group(), topic, PROBES).result(TIMEOUT_S))
        return Measured(times["median_us"], 0, times["median_us"], times["p99_us"])

    def first(self, topic: str, master: str) -> Measured:
        answer = self._java.measure(master, _group(), topic, 1, unchecked="", timeout_ms=60_000)
        return Measured(_times(answer.result(TIMEOUT_S))["first_s"] * 1000)

    def first_send(self, master: str, topic: str) -> None:
        """Return when a message is acknowledged."""
        self._java.produce(master, topic, 1, publish_attempts=1000).result(TIMEOUT_S)

    def _together(self, master: str, topic: str, size: int, producers: int, count: int, window: int) -> Measured:
        each = count // producers
        options = {"size": size, "window": window // producers}
        running = [self._java.produce(master, topic, each, **options) for _ in range(producers)]
        seconds = max(_times(answer.result(TIMEOUT_S))["seconds"] for answer in running)
        return Measured(each * producers / seconds, each * producers)


async def fill(master: str, topic: str, size: int, count: int = MESSAGES) -> None:
    """Send ``count`` messages. Messages that are refused for lack of room are sent again."""
    async with Producer(master, reorder=True) as producer:
        await producer.send_all(topic, (bytes(size) for _ in range(count)))


async def fill_each(master: str, topic: str, partitions: int) -> None:
    """Send a message to every partition."""
    async with Producer(master) as producer, asyncio.TaskGroup() as group:
        for partition in range(partitions):
            group.create_task(producer.send(topic, bytes(100), partition=partition))


async def first_send(master: str, topic: str) -> None:
    """Return when a message is acknowledged."""
    async with Producer(master) as producer:
        await producer.send(topic, b"x")


async def _together(master: str, topic: str, size: int, producers: int, count: int, *, ahead: bool) -> Measured:
    """Run several producers, each with its own connections; ``ahead``: they do not wait for acknowledgements."""
    body = bytes(size)
    each = count // producers
    running = [Producer(master, reorder=True) for _ in range(producers)]

    async def send(producer: Producer) -> None:
        if ahead:
            await producer.send_all(topic, (body for _ in range(each)))
        else:
            for _ in range(each):
                await producer.send(topic, body)

    try:
        for producer in running:
            await producer.start()
            await producer.send(topic, body)
        started = time.perf_counter()
        await asyncio.gather(*map(send, running))
        return Measured(each * producers / (time.perf_counter() - started), each * producers)
    finally:
        for producer in running:
            await producer.close()


async def _drain(master: str, topic: str, count: int) -> Measured:
    seen, started = 0, 0.0
    async with Consumer(master, _group(), [topic], heartbeat_s=0.5) as consumer:
        async for messages in consumer.batches():
            started = started or time.perf_counter()
            seen += len(messages)
            if seen >= count:
                break
        return Measured(seen / (time.perf_counter() - started), seen)


async def _latency(master: str, topic: str, size: int) -> Measured:
    times: list[float] = []
    async with Consumer(master, _group(), [topic], start="latest", heartbeat_s=0.2) as consumer:
        while len(consumer.assignment) < 3:  # noqa: ASYNC110 - the consumer tells nobody
            await asyncio.sleep(0.01)

        async def read() -> None:
            async for message in consumer:
                times.append((time.perf_counter() - float(message.data)) * 1e6)
                if len(times) == PROBES:
                    return

        reading = asyncio.create_task(read())
        async with Producer(master) as producer:
            await producer.publish(topic)
            for _ in range(PROBES):
                await producer.send(topic, repr(time.perf_counter()).encode().ljust(size))
                await asyncio.sleep(0.002)
            await reading
    median = statistics.median(times)
    return Measured(median, 0, median, sorted(times)[len(times) * 99 // 100])


async def _first_message(master: str, topic: str) -> float:
    started = time.perf_counter()
    async with Consumer(master, _group(), [topic], heartbeat_s=1.0) as consumer:
        await anext(consumer)
        return (time.perf_counter() - started) * 1000


def _group() -> str:
    return f"bench_{uuid.uuid4().hex[:8]}"


def _times(answer: str) -> dict[str, float]:
    return {name: float(value) for name, value in (part.split("=") for part in answer.split())}
