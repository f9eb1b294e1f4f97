"""The cases: what is measured, how often, beside which peer. Each run is one number; peers take turns with penstock."""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from benchmarks import mqtt_load, servers
from benchmarks.connections import connections_possible, memory_of_connections
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["CASES", "Figure", "Settings"]

INVOKE = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"
SET = b"*3\r\n$3\r\nSET\r\n$9\r\nbenchmark\r\n$64\r\n" + bytes(64) + b"\r\n"
GET = b"*2\r\n$3\r\nGET\r\n$9\r\nbenchmark\r\n"
MESSAGES = 50_000


@dataclass
class Settings:
    """What the user chose: durability of penstock and of peers that have one, repeats, seconds of a run."""

    durability: str = "durable"
    repeats: int = 3
    seconds: float = 2.0
    tube_peer: str | None = None
    """Masters of an Apache TubeMQ with a topic ``demo``, HOST:PORT."""


@dataclass
class Figure:
    """One figure of one server: its runs, in the order in which they were made."""

    case: str
    server: str
    unit: str
    runs: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def alternate(settings: Settings, case: str, unit: str, runners: Mapping[str, Callable[[], float]]) -> list[Figure]:
    """Run each server in turn, ``repeats`` times over, so that a noisy minute hits all of them."""
    figures = {server: Figure(case, server, unit) for server in runners}
    for _ in range(settings.repeats):
        for server, run in runners.items():
            figures[server].runs.append(run())
    return list(figures.values())


def mqtt_qos1(settings: Settings) -> list[Figure]:
    """QoS 1, one publisher to one subscriber, 64 bytes; peer Mosquitto. Nothing is persisted by either."""
    figures = []
    with servers.penstock("memory") as ready, servers.mosquitto() as peer:
        for window in (1, 64):
            run = partial(mqtt_load.run_qos1_pair, window=window, size=64, seconds=settings.seconds)
            runners = {"penstock": partial(run, ready["mqtt"]), "mosquitto": partial(run, peer)}
            figures += alternate(settings, f"QoS 1, 1:1, window {window}", "deliveries/s", runners)
    return figures


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


def state_store(settings: Settings) -> list[Figure]:
    """SET and GET of 64 bytes over MQTT with the properties that the SDKs send; peer Redis (its own benchmark)."""
    figures = []
    now = int(time.time() * 1000)
    properties = [("__ts", f"{now:015d}:00000:bench"), ("__protVer", "1.0"), ("$partition", "bench")]
    with servers.penstock(settings.durability) as ready, servers.redis(settings.durability) as port:
        for clients in (1, 50):
            for name, payload in (("SET", SET), ("GET", GET)):
                ours = partial(run_requests, ready["mqtt"], clients, payload, properties, settings.seconds)
                redis = partial(redis_benchmark, port, name, clients)
                case = f"state store {name}, {clients} client{'s' * (clients > 1)}, {settings.durability}"
                figures += alternate(settings, case, "requests/s", {"penstock": ours, "redis": redis})
    return figures


def run_requests(
    address: str, clients: int, payload: bytes, properties: list[tuple[str, str]], seconds: float
) -> float:
    load = mqtt_load.request_response(
        address, clients=clients, payload=payload, invoke=INVOKE, properties=properties, seconds=seconds
    )
    return uvloop.run(load)["per_s"]


def redis_benchmark(port: int, command: str, clients: int) -> float:
    """Requests a second as redis-benchmark prints them."""
    program = servers.find("redis-benchmark")
    assert program is not None
    count = 5_000 if clients == 1 else 50_000
    arguments = ["-p", str(port), "-t", command.lower(), "-c", str(clients), "-n", str(count), "-d", "64", "--csv"]
    printed = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    found = re.search(rf'^"{command}","([0-9.]+)"', printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


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
    "mqtt": mqtt_qos1,
    "connections": connections,
    "statestore": state_store,
    "tube": tube,
    "spark": spark_source,
}
