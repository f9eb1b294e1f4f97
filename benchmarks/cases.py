"""The cases: what is measured, how often, beside which peer. Each run is one number; peers take turns with penstock."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from benchmarks import servers
from benchmarks.connections import connections_possible, memory_of_connections
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.mqtt import mqtt
from benchmarks.statestore import state_store
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["CASES", "Figure", "Settings"]

MESSAGES = 50_000


def connections(settings: Settings) -> list[Figure]:
    """Resident memory per idle plain connection, 10,000 of them, without and with a subscription; peer Mosquitto.

    A new process for each run: what the last one freed would be used again.
    """
    count = connections_possible(10_000)

    def ours(*, subscribe: bool) -> float:
        with servers.penstock("memory") as ready:
            return memory_of_connections(ready["mqtt"], int(ready["pid"]), count, subscribe=subscribe)

    def theirs(*, subscribe: bool) -> float:
        with servers.mosquitto_process() as (address, pid):
            return memory_of_connections(address, pid, count, subscribe=subscribe)

    figures = []
    for words, subscribe in (("", False), (" with a subscription", True)):
        runners = {"penstock": partial(ours, subscribe=subscribe), "mosquitto": partial(theirs, subscribe=subscribe)}
        figures += alternate(settings, f"{count} idle connections{words}", "bytes/connection", runners)
    return figures


async def produce_all(master: str, topic: str, size: int) -> float:
    """Messages a second of one producer, 1,000 in flight."""
    body = bytes(size)
    async with Producer(master, max_in_flight=1_000) as producer:
        await producer.send(topic, body)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            share = MESSAGES // 1_000
            for _ in range(1_000):
                group.create_task(produce_some(producer, topic, body, share))
        return MESSAGES / (time.perf_counter() - started)


async def produce_some(producer: Producer, topic: str, body: bytes, count: int) -> None:
    for _ in range(count):
        await producer.send(topic, body)


async def consume_all(master: str, topic: str) -> float:
    """Messages a second of one consumer of a group that is new, from the earliest message on."""
    group = f"bench_{uuid.uuid4().hex[:8]}"
    seen, started = 0, 0.0
    async with Consumer(master, group, [topic], start="earliest") as consumer:
        async for _ in consumer:
            if not seen:
                started = time.perf_counter()
            seen += 1
            if seen == MESSAGES:
                break
        return seen / (time.perf_counter() - started)


def run_produce(master: str, topic: str, size: int) -> float:
    return uvloop.run(produce_all(master, topic, size))


def run_consume(master: str, topic: str) -> float:
    return uvloop.run(consume_all(master, topic))


def tube(settings: Settings) -> list[Figure]:
    """Produce and consume with penstock's client; peer Apache's Java server, where one was named."""
    figures = []
    with servers.penstock(settings.durability, topics=["demo"]) as ready:
        masters = {"penstock": ready["tube_master"]}
        if settings.tube_peer is not None:
            masters["Apache TubeMQ"] = settings.tube_peer
        for size in (100, 1024):
            produce = {server: partial(run_produce, master, "demo", size) for server, master in masters.items()}
            figures += alternate(settings, f"tube produce, {size} B, {settings.durability}", "messages/s", produce)
            consume = {server: partial(run_consume, master, "demo") for server, master in masters.items()}
            figures += alternate(settings, f"tube consume, up to {size} B", "messages/s", consume)
    return figures


def spark_source(settings: Settings) -> list[Figure]:
    """Rows a second of a batch read into nothing, 100 B; beside it the same rows from Parquet."""
    import tempfile

    from penstock.spark import session

    with servers.penstock("memory", topics=["demo"]) as ready, tempfile.TemporaryDirectory() as folder:
        for _ in range(4):
            uvloop.run(produce_all(ready["tube_master"], "demo", 100))
        spark = session("benchmarks")
        source = (
            spark.read.format("tubemq").option("tubemq.master", ready["tube_master"]).option("subscribe", "demo").load()
        )
        source.write.parquet(f"{folder}/rows")
        stored = spark.read.parquet(f"{folder}/rows")
        rows = stored.count()
        runners = {
            "penstock": partial(rows_per_second, source, rows),
            "Parquet": partial(rows_per_second, stored, rows),
        }
        for run in runners.values():
            run()
        figures = alternate(settings, f"Spark batch read, {rows} rows of 100 B", "rows/s", runners)
        spark.stop()
    return figures


def rows_per_second(frame: DataFrame, rows: int) -> float:
    """Read the whole frame into nothing."""
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - started)


CASES: dict[str, Callable[[Settings], list[Figure]]] = {
    "mqtt": mqtt,
    "connections": connections,
    "statestore": state_store,
    "tube": tube,
    "spark": spark_source,
}
