"""`penstock bench`: measure rate and latency of a state store, an MQTT broker, a TubeMQ topic or a pipeline."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.bench_operations import Operation, print_operations, show_progress
from penstock.cli.bench_pipeline import pipeline
from penstock.cli.options import (
    BrokerOptions,
    Commands,
    Json,
    StateStoreOptions,
    connects_to_broker,
    connects_to_store,
    duration_option,
    local_node,
    size_option,
)
from penstock.cli.output import note, shown_rate
from penstock.cli.tube.access import MasterOptions, Topic, check_topic, connects_to_master, run_client
from penstock.errors import PenstockError, UnavailableError

if TYPE_CHECKING:
    from penstock.mqtt.codec.packets import Publish
    from penstock.tube.codec.strings import Partition
    from penstock.tube.consumer import Consumer

__all__ = ["app"]

_STAMP_BYTES = 8
_DRAIN_S = 10.0
"""Longest wait for messages that were published, but not received."""
_ASSIGNED_S = 30.0
_POLL_S = 0.05

app = Commands("Measure rate and latency, with load from this command.")

Seconds = Annotated[
    float, duration_option("--duration", text="Duration of the measurement.", at_least_s=0.1, default="5s")
]
Size = Annotated[int, size_option("--size", text="Bytes of each value.", default="100")]
Clients = Annotated[int, typer.Option(help="Number of clients.", min=1, metavar="N")]


class Measurement:
    """Runs work for ``seconds`` and reports it. Operations are counted after a tenth of that time, at most a second."""

    def __init__(self, *operations: Operation, seconds: float, as_json: bool) -> None:
        self.operations = operations
        self._seconds = seconds
        self._as_json = as_json
        self._warm_up = min(1.0, seconds / 10)
        self.began = self.until = self.counted_from = self._counted_until = self._cpu_s = 0.0

    async def run(self, workers: Sequence[Callable[[], Awaitable[None]]], *, count: int = 1) -> None:
        """Run ``count`` loops of each worker until the time is over. The first error of a worker ends its loop; if no
        operation succeeds, it is raised."""
        self.began = time.perf_counter()
        self.counted_from = self.began + self._warm_up
        self.until = self.counted_from + self._seconds
        cpu = time.process_time()
        progress = asyncio.create_task(self._progress())
        tasks = [asyncio.create_task(self._loop(worker)) for worker in workers for _ in range(count)]
        try:
            failures = [failure for failure in await asyncio.gather(*tasks) if failure is not None]
        finally:
            progress.cancel()
            for task in tasks:
                task.cancel()
        self._counted_until = min(time.perf_counter(), self.until)
        self._cpu_s = (time.process_time() - cpu) / (time.perf_counter() - self.began)
        if failures and not any(operation.latencies.count for operation in self.operations):
            raise failures[0]

    async def _loop(self, worker: Callable[[], Awaitable[None]]) -> PenstockError | None:
        try:
            while time.perf_counter() < self.until:
                await worker()
        except PenstockError as error:
            self.operations[0].errors[error.what] += 1
            return error
        return None

    def counts(self, started: float) -> bool:
        """True if an operation that began at ``started`` belongs to the measurement."""
        return self.counted_from <= started < self.until

    async def _progress(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(1)
            done = sum(operation.latencies.count for operation in self.operations)
            left = max(0.0, self.until - time.perf_counter())
            show_progress(f"{shown_rate(done - before, 'operations')}, {left:.0f} s left", as_json=self._as_json)
            before = done

    def report(self, settings: dict[str, object]) -> None:
        """Print the result. ``settings``: the load, and what is known about the server."""
        for operation in self.operations:
            operation.seconds = self._counted_until - self.counted_from
        print_operations(self.operations, settings, client_cpu=self._cpu_s, as_json=self._as_json)


def _durability(url: str) -> str | None:
    """The durability of the node of this machine that listens on ``url``; None if it is another server."""
    found = local_node(url)
    return None if found is None else str(found["durability"])


def _stamped(started: float, size: int) -> bytes:
    """A payload of ``size`` bytes, at least 8, that begins with a time of ``perf_counter``."""
    return round(started * 1e9).to_bytes(_STAMP_BYTES, "big") + bytes(max(0, size - _STAMP_BYTES))


def _stamp(payload: bytes) -> float:
    return int.from_bytes(payload[:_STAMP_BYTES], "big") / 1e9


# State store


@app.add("penstock bench kv", "penstock bench kv --clients 50 --reads 90 --duration 30s")
@connects_to_store
def kv(
    clients: Clients = 10,
    in_flight: Annotated[
        int, typer.Option("--in-flight", help="Requests of a client that wait for their answers.", min=1, metavar="N")
    ] = 1,
    reads: Annotated[
        int, typer.Option(help="Percentage of GETs; the others are SETs.", min=0, max=100, metavar="N")
    ] = 50,
    keys: Annotated[int, typer.Option("--key-count", help="Number of keys.", min=1, max=1_000_000, metavar="N")] = 1000,
    size: Size = 100,
    duration: Seconds = 5.0,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Measure SET and GET of a state store, from a request to its answer.

    The keys begin with penstock-bench/ and are deleted at the end.
    """
    import random

    from penstock.statestore.client.client import StateStoreClient

    sets, gets = Operation("SET"), Operation("GET")
    names = {0: [sets], 100: [gets]}.get(reads, [sets, gets])
    measured = Measurement(*names, seconds=duration, as_json=as_json)
    prefix = f"penstock-bench/{secrets.token_hex(4)}/"
    choose = random.Random(0)  # noqa: S311 - the same load each time
    value = bytes(size)

    def worker(store: StateStoreClient) -> Callable[[], Awaitable[None]]:
        async def request() -> None:
            key = f"{prefix}{choose.randrange(keys)}"
            read = choose.randrange(100) < reads
            started = time.perf_counter()
            await (store.get(key) if read else store.set(key, value))
            if measured.counts(started):
                (gets if read else sets).done(started, size)

        return request

    async def run() -> None:
        async with AsyncExitStack() as stack:
            stores = [
                await stack.enter_async_context(
                    options.opened(
                        StateStoreClient.connect(
                            options.broker,
                            client_id=f"penstock-bench-{secrets.token_hex(6)}",
                            timeout_s=options.timeout,
                            **options.credentials(),
                        )
                    )
                )
                for _ in range(clients)
            ]
            every = [f"{prefix}{n}" for n in range(keys)]
            try:
                await _in_chunks(every, lambda key: stores[0].set(key, value))
                await measured.run([worker(store) for store in stores], count=in_flight)
            finally:
                await _in_chunks(every, stores[0].delete)

    run_client(run())
    measured.report(
        {
            "server": options.broker, "durability": _durability(options.broker), "clients": clients,
            "in_flight": in_flight, "keys": keys, "size": size,
        }
    )  # fmt: skip


async def _in_chunks(keys: Sequence[str], call: Callable[[str], Awaitable[object]]) -> None:
    for first in range(0, len(keys), 64):
        await asyncio.gather(*(call(key) for key in keys[first : first + 64]))


# MQTT


@app.add("penstock bench mqtt", "penstock bench mqtt --publishers 10 --subscribers 10 --qos 0 --rate 5000")
@connects_to_broker
def mqtt(
    publishers: Annotated[int, typer.Option(help="Number of publishers, each with its topic.", min=1, metavar="N")] = 1,
    subscribers: Annotated[
        int, typer.Option(help="Number of subscribers, each of which gets every message.", min=0, metavar="N")
    ] = 1,
    qos: Annotated[int, typer.Option("--qos", "-q", help="Quality of service.", min=0, max=2, metavar="N")] = 1,
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight", help="Messages of a publisher that wait for their acknowledgement.", min=1, metavar="N"
        ),
    ] = 64,
    rate: Annotated[
        int, typer.Option(help="Messages per second of all publishers; 0: as many as possible.", min=0, metavar="N")
    ] = 0,
    size: Size = 100,
    duration: Seconds = 5.0,
    as_json: Json = False,
    *,
    access: BrokerOptions,
) -> None:
    """Measure an MQTT broker: from a publication to its acknowledgement, and to its delivery.

    Topics begin with penstock-bench/. A payload has at least 8 bytes: the time of its publication, or with --rate the
    time at which it was due.
    """
    from penstock.mqtt.client import MqttClient

    published, delivered = Operation("publish"), Operation("deliver")
    operations = [published, *([delivered] if subscribers else [])]
    measured = Measurement(*operations, seconds=duration, as_json=as_json)
    topic = f"penstock-bench/{secrets.token_hex(4)}"
    planned = sent = received = 0

    def client() -> MqttClient:
        return MqttClient(access.broker, client_id=f"penstock-bench-{secrets.token_hex(6)}", **access.credentials())

    def publisher(number: int, source: MqttClient) -> Callable[[], Awaitable[None]]:
        async def publish() -> None:
            nonlocal planned, sent
            started = time.perf_counter()
            if rate:
                # Latencies count from the planned time: a broker that is slow for a moment delays all that follow.
                started = measured.began + planned / rate
                planned += 1
                await asyncio.sleep(started - time.perf_counter())
            payload = _stamped(started, size)
            await source.publish(f"{topic}/{number}", payload, qos=qos)
            sent += 1
            if measured.counts(started):
                published.done(started, len(payload))

        return publish

    def receive(message: Publish) -> None:
        nonlocal received
        received += 1
        started = _stamp(message.payload)
        if measured.counts(started):
            delivered.done(started, len(message.payload))

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(subscribers):
                receiver = await stack.enter_async_context(access.opened(client()))
                receiver.listen(f"{topic}/#", receive)
                await receiver.subscribe(f"{topic}/#", qos=qos)
            sources = [await stack.enter_async_context(access.opened(client())) for _ in range(publishers)]
            await measured.run([publisher(n, source) for n, source in enumerate(sources)], count=in_flight)
            await _until(lambda: received >= sent * subscribers, _DRAIN_S)

    run_client(run())
    missing = sent * subscribers - received
    measured.report(
        {
            "server": access.broker, "durability": _durability(access.broker), "publishers": publishers,
            "subscribers": subscribers, "qos": qos, "in_flight": in_flight, "rate": rate or None, "size": size,
            "missing": missing if subscribers else None,
        }
    )  # fmt: skip
    if missing > 0:
        note(f"{missing} of {sent * subscribers} messages were not received within {_DRAIN_S:g} s")


# TubeMQ


@app.add("penstock bench tube telemetry", "penstock bench tube telemetry --producers 4 --consumers 0 --size 1KiB")
@connects_to_master
def tube(
    topic: Topic,
    producers: Annotated[int, typer.Option(help="Number of producers.", min=1, metavar="N")] = 1,
    consumers: Annotated[
        int, typer.Option(help="Number of consumers of one group, which share the partitions.", min=0, metavar="N")
    ] = 1,
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight", help="Records of a producer that wait for their acknowledgement.", min=1, metavar="N"
        ),
    ] = 1000,
    size: Size = 100,
    duration: Seconds = 5.0,
    as_json: Json = False,
    *,
    master: MasterOptions,
) -> None:
    """Measure a TubeMQ topic: from a record to its acknowledgement, and to its arrival at a consumer.

    The records stay in TOPIC until its retention deletes them, and so does the group of the consumers: use a topic of
    its own.
    """
    from penstock.tube.consumer import Consumer
    from penstock.tube.producer import Producer

    check_topic(topic)
    produced, consumed = Operation("produce"), Operation("consume")
    operations = [produced, *([consumed] if consumers else [])]
    measured = Measurement(*operations, seconds=duration, as_json=as_json)
    login = master.client()
    group = f"penstock_bench_{secrets.token_hex(4)}"
    sent = received = 0

    def worker(producer: Producer) -> Callable[[], Awaitable[None]]:
        async def produce() -> None:
            nonlocal sent
            started = time.perf_counter()
            value = _stamped(started, size)
            await producer.send(topic, value)
            sent += 1
            if measured.counts(started):
                produced.done(started, len(value))

        return produce

    async def consume(consumer: Consumer) -> None:
        nonlocal received
        async for message in consumer:
            received += 1
            value = message.record.value
            started = _stamp(value)
            if measured.counts(started):
                consumed.done(started, len(value))

    async def run() -> None:
        async with AsyncExitStack() as stack:
            sources = [
                await stack.enter_async_context(Producer(master.tube_master, max_in_flight=in_flight, **login))
                for _ in range(producers)
            ]
            for source in sources:
                await source.publish(topic)
            readers = [
                await stack.enter_async_context(Consumer(master.tube_master, group, [topic], start="latest", **login))
                for _ in range(consumers)
            ]
            tasks = [asyncio.create_task(consume(reader)) for reader in readers]
            try:
                if readers:
                    await _assigned(readers, await sources[0].partitions(topic))
                await measured.run([worker(source) for source in sources], count=in_flight)
                await _until(lambda: not consumers or received >= sent, _DRAIN_S)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    run_client(run())
    measured.report(
        {
            "server": master.tube_master, "topic": topic, "producers": producers, "consumers": consumers,
            "in_flight": in_flight, "size": size, "group": group if consumers else None,
        }
    )  # fmt: skip
    if consumers and received < sent:
        note(f"{sent - received} of {sent} records were not consumed within {_DRAIN_S:g} s")


async def _assigned(consumers: Sequence[Consumer], partitions: Sequence[Partition]) -> None:
    """Wait until the consumers read all partitions. Raises UnavailableError after 30 s."""

    def read() -> int:
        found = {part.key for each in consumers for part, place in each.offsets.items() if place.offset >= 0}
        return len(found.intersection(part.key for part in partitions))

    if not await _until(lambda: read() == len(partitions), _ASSIGNED_S):
        raise UnavailableError(
            f"the consumers read {read()} of {len(partitions)} partitions after {_ASSIGNED_S:g} s",
            applied=False,
            hint="check the brokers: penstock tube broker list",
        )


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; False if it is not met in time."""
    for _ in range(round(seconds / _POLL_S)):
        if condition():
            return True
        await asyncio.sleep(_POLL_S)
    return condition()


# Pipeline

app.add(
    "penstock bench pipeline",
    "penstock bench pipeline --rate 1000 --table-format parquet --sinks 3",
    name="pipeline",
)(pipeline)
