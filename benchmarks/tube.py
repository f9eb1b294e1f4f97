"""The tube: penstock's client and Apache's Java client, each on penstock and on Apache's Java server, in one run.

Apache's server acknowledges from memory and writes later; penstock acknowledges as ``--durability`` says. Where no JDK
or Maven is present, or the jars cannot be had, only penstock's client on penstock is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import uvloop

from benchmarks import servers
from benchmarks.connections import resident_bytes
from benchmarks.figures import Figure, Settings, alternate
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from penstock.tube.web import call
from tests.interop.tube_java.clients import JavaClients
from tests.interop.tube_java.jars import prepare
from tests.interop.tube_java.server import JavaTube

__all__ = ["fill", "tube"]

APACHE = "Apache TubeMQ"
_CHANGE = {"createUser": "bench", "confModAuthToken": "abc"}
MESSAGES = 50_000
SINGLE = 2_000
PROBES = 200
PRODUCERS = 4
PARTITIONS = 1_000


def tube(settings: Settings) -> list[Figure]:
    """Produce, consume, latency, first message: two clients on two servers."""
    sizes = {f"s{size}": size for size in (100, 1024)}
    topics = [*sizes, "single", "latency"]
    figures: list[Figure] = []
    with ExitStack() as stack:
        ready = stack.enter_context(servers.penstock(settings.durability, topics=topics))
        masters = {"penstock": ready["tube_master"]}
        java: JavaClients | None = None
        if settings.tube_peer is not None:
            masters[APACHE] = settings.tube_peer
        elif (apache := stack.enter_context(_apache(topics))) is not None:
            java, masters[APACHE] = apache
        note = f"{settings.durability}; {APACHE}: memory"

        def compare(case: str, unit: str, run: Callable[[str], float], *, repeats: int | None = None) -> None:
            chosen = settings if repeats is None else Settings(settings.durability, repeats, settings.seconds)
            runners: Mapping[str, Callable[[], float]] = {name: partial(run, at) for name, at in masters.items()}
            figures.extend(alternate(chosen, case, unit, runners))

        for topic, size in sizes.items():
            compare(f"produce {size} B ({note})", "messages/s", partial(_run, fill, topic, size))
            if java is not None:
                compare(f"produce {size} B, Java client ({note})", "messages/s", partial(_java_fill, java, topic, size))
            compare(
                f"produce {size} B, {PRODUCERS} producers ({note})",
                "messages/s",
                partial(_run, fill_together, topic, size),
            )
            compare(f"consume {size} B", "messages/s", partial(_run, drain, topic, size))
            if java is not None:
                compare(f"consume {size} B, Java client", "messages/s", partial(_java_drain, java, topic))
        compare(f"produce 1024 B, one at a time ({note})", "messages/s", partial(_run, one_by_one, "single", 1024))
        if java is not None:
            compare(
                f"produce 1024 B, one at a time, Java client ({note})",
                "messages/s",
                partial(_java_one_by_one, java),
            )
        compare("end to end, median", "us", partial(_run, latency, "latency", 100))
        compare("group's start to first message", "ms", partial(_run, first_message, "s100", 100))
        if java is not None:
            compare("group's start to first message, Java client", "ms", partial(_java_first, java), repeats=1)
            compare("end to end, median, Java client", "us", partial(_java_latency, java))
        figures += [*_from_files(settings, java, masters), *_of_penstock_alone(settings)]
    return figures


def _from_files(settings: Settings, java: JavaClients | None, masters: Mapping[str, str]) -> list[Figure]:
    """Reading what no server has in memory: ours was started anew, Apache's keeps 3 MB of the 50 that were written."""
    figures: list[Figure] = []
    clients: dict[str, Callable[[str], float]] = {"": partial(_run, drain, "s1024", 1024)}
    if java is not None:
        clients[", Java client"] = partial(_java_drain, java, "s1024")
    with tempfile.TemporaryDirectory() as folder:
        with servers.penstock_in(folder, settings.durability, ["s1024"]) as ready:
            _run(fill, "s1024", 1024, ready["tube_master"])
        for name, read in clients.items():

            def ours(read: Callable[[str], float] = read) -> float:
                with servers.penstock_in(folder, settings.durability, ["s1024"]) as again:
                    return read(again["tube_master"])

            runners: dict[str, Callable[[], float]] = {"penstock": ours}
            if APACHE in masters:
                runners[APACHE] = partial(read, masters[APACHE])
            figures += alternate(settings, f"consume 1024 B from files{name}", "messages/s", runners)
    return figures


def _of_penstock_alone(settings: Settings) -> list[Figure]:
    """What Apache's server takes its fixed 35 seconds for, and memory that its heap's size decides."""
    with servers.penstock(settings.durability, topics=["small"]) as ready:
        new = alternate(settings, "new topic to its first message", "ms", {"penstock": partial(_new_topic, ready)})
        pid = int(ready["pid"])
        before = resident_bytes(pid)
        call(
            ready["http"],
            "admin_add_new_topic_record",
            {**_CHANGE, "topicName": "wide", "numPartitions": str(PARTITIONS)},
        )
        uvloop.run(fill_each(ready["tube_master"], "wide", PARTITIONS))
        used = (resident_bytes(pid) - before) / 1024
    return [*new, Figure(f"memory of {PARTITIONS} partitions in use", "penstock", "KiB", [used])]


def _new_topic(ready: Mapping[str, str]) -> float:
    """Milliseconds from creating a topic to a message of it that is acknowledged."""
    topic = f"new_{uuid.uuid4().hex[:8]}"

    async def first() -> None:
        async with Producer(ready["tube_master"]) as producer:
            await producer.send(topic, b"x")

    started = time.perf_counter()
    call(ready["http"], "admin_add_new_topic_record", {**_CHANGE, "topicName": topic})
    uvloop.run(first())
    return (time.perf_counter() - started) * 1000


@contextmanager
def _apache(topics: list[str]) -> Iterator[tuple[JavaClients, str] | None]:
    """Apache's server and client; None, with the reason on standard error, where they cannot be had."""
    try:
        jars = prepare()
    except pytest.skip.Exception as reason:
        print(f"tube: {APACHE} is not measured: {reason}", file=sys.stderr)
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        server = JavaTube(jars, Path(folder), topics, [], heap="1g")
        try:
            clients = JavaClients(jars, Path(folder) / "clients.log")
            try:
                yield clients, server.ready()
            finally:
                clients.close()
        finally:
            server.close()


def _run(load: Callable[[str, str, int], object], topic: str, size: int, master: str) -> float:
    return float(uvloop.run(load(master, topic, size)))  # type: ignore[arg-type]


async def fill(master: str, topic: str, size: int, *, warm: bool = True) -> float:
    """Messages a second of one producer; ``warm``: it has sent one before. What has no room is sent again."""
    body = bytes(size)
    async with Producer(master, reorder=True) as producer:
        if warm:
            await producer.send(topic, body)
        started = time.perf_counter()
        await producer.send_all(topic, (body for _ in range(MESSAGES)))
        return MESSAGES / (time.perf_counter() - started)


async def fill_together(master: str, topic: str, size: int) -> float:
    """Messages a second of several producers, each with its own connections."""
    body = bytes(size)
    each = MESSAGES // PRODUCERS
    producers = [Producer(master, reorder=True) for _ in range(PRODUCERS)]
    try:
        for producer in producers:
            await producer.start()
            await producer.send(topic, body)
        started = time.perf_counter()
        await asyncio.gather(*(producer.send_all(topic, (body for _ in range(each))) for producer in producers))
        return MESSAGES / (time.perf_counter() - started)
    finally:
        for producer in producers:
            await producer.close()


async def fill_each(master: str, topic: str, partitions: int) -> None:
    """A message in every partition."""
    async with Producer(master) as producer, asyncio.TaskGroup() as group:
        for partition in range(partitions):
            group.create_task(producer.send(topic, bytes(100), partition=partition))


async def one_by_one(master: str, topic: str, size: int) -> float:
    """Messages a second of one producer that waits for each acknowledgement."""
    body = bytes(size)
    async with Producer(master) as producer:
        await producer.send(topic, body)
        started = time.perf_counter()
        for _ in range(SINGLE):
            await producer.send(topic, body)
        return SINGLE / (time.perf_counter() - started)


async def drain(master: str, topic: str, _size: int) -> float:
    """Messages a second of one consumer of a group that is new, from the earliest message on."""
    seen, started = 0, 0.0
    async with Consumer(master, _group(), [topic], heartbeat_s=0.5) as consumer:
        async for messages in consumer.batches():
            started = started or time.perf_counter()
            seen += len(messages)
            if seen >= MESSAGES:
                break
        return seen / (time.perf_counter() - started)


async def latency(master: str, topic: str, size: int) -> float:
    """Microseconds from send to the consumer, the median, at 500 messages a second."""
    times: list[float] = []
    async with Consumer(master, _group(), [topic], start="latest", heartbeat_s=0.2) as consumer:
        while len(consumer.assignment) < 3:  # noqa: ASYNC110 - the consumer tells nobody
            await asyncio.sleep(0.01)

        async def read() -> None:
            async for message in consumer:
                times.append(time.perf_counter() - float(message.data))
                if len(times) == PROBES:
                    return

        reading = asyncio.create_task(read())
        async with Producer(master) as producer:
            await producer.publish(topic)
            for _ in range(PROBES):
                await producer.send(topic, repr(time.perf_counter()).encode().ljust(size))
                await asyncio.sleep(0.002)
            await reading
    return statistics.median(times) * 1e6


async def first_message(master: str, topic: str, _size: int) -> float:
    """Milliseconds from starting a consumer of a new group to its first message."""
    started = time.perf_counter()
    async with Consumer(master, _group(), [topic], heartbeat_s=1.0) as consumer:
        await anext(consumer)
        return (time.perf_counter() - started) * 1000


def _group() -> str:
    return f"bench_{uuid.uuid4().hex[:8]}"


def _times(answer: str) -> dict[str, float]:
    return {name: float(value) for name, value in (part.split("=") for part in answer.split())}


def _java_fill(java: JavaClients, topic: str, size: int, master: str) -> float:
    answer = java.produce(master, topic, MESSAGES, size=size, window=1000).result(300)
    return MESSAGES / _times(answer)["seconds"]


def _java_one_by_one(java: JavaClients, master: str) -> float:
    return SINGLE / _times(java.produce(master, "single", SINGLE, size=1024).result(300))["seconds"]


def _java_drain(java: JavaClients, topic: str, master: str) -> float:
    # Numbered bodies of the Java producer only: another size was written by ours, so a topic holds both.
    answer = java.measure(master, _group(), topic, MESSAGES, unchecked="", timeout_ms=200_000).result(300)
    return MESSAGES / _times(answer)["seconds"]


def _java_latency(java: JavaClients, master: str) -> float:
    return _times(java.latency(master, _group(), "latency", PROBES).result(300))["median_us"]


def _java_first(java: JavaClients, master: str) -> float:
    answer = java.measure(master, _group(), "s100", 1, unchecked="", timeout_ms=60_000).result(100)
    return _times(answer)["first_s"] * 1000
