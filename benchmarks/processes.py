"""A mixed load on one process and on two: its TubeMQ topic on the node's broker, or on a broker in its own process.

Clients of TubeMQ send and fetch records of 1 KiB at full speed. Measured at the same time are the latency of an MQTT
client with 50 messages per second, messages of QoS 1 with 64 in flight, SETs of 50 clients, and the sent records; then
the processor time of each kind of request, by process. Decision 97 derives from it the load that more cores can
process.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings
from benchmarks.isolation import LATE_S, PAYLOAD, Load, flooding, latencies
from penstock.tube.blocking import Producer
from penstock.tube.consumer import Consumer

__all__ = ["processes"]

TOPIC: Final = "records"
RECORDS: Final = 50_000
"""Number of records for a measurement of processor time."""
SENT: Final = "penstock_tube_produced_messages_total"
"""Metric of the records that a broker appended."""

Add = Callable[[str, str, str, float | None], None]
"""Function that adds a run: case, server, unit, value."""


class Served(NamedTuple):
    """Addresses and process ids of the servers: ``node`` has MQTT, the state store and the master, ``broker`` the
    topic.

    ``metrics``: HTTP address of the broker's metrics.
    """

    mqtt: str
    tube_master: str
    metrics: str
    node: int
    broker: int


@contextmanager
def one_process(durability: str) -> Iterator[Served]:
    """Run a node."""
    with servers.penstock(durability, [TOPIC]) as ready:
        pid = int(ready["pid"])
        yield Served(ready["mqtt"], ready["tube_master"], ready["http"], pid, pid)


@contextmanager
def two_processes(durability: str) -> Iterator[Served]:
    """Run a node, and a broker in its own process, which is the only one with the topic."""
    with tempfile.TemporaryDirectory() as folder, servers.penstock(durability) as ready:
        argv = [str(Path(sys.executable).parent / "penstock"), "tube", "broker", "run", "--broker-id=2", "--json"]
        argv += [f"--data-dir={folder}", f"--tube-master={ready['tube_master']}", f"--durability={durability}"]
        process = subprocess.Popen([*argv, "--log-level=warning"], stdout=subprocess.PIPE)
        with servers.ended(process):
            assert process.stdout is not None
            with process.stdout:
                broker = json.loads(process.stdout.readline())
            _create_topic(ready)
            web = str(broker["tube_broker_http"])
            yield Served(ready["mqtt"], ready["tube_master"], web, int(ready["pid"]), process.pid)


def _create_topic(ready: dict[str, str]) -> None:
    """Create the topic on the second broker only."""
    token = Path(ready["admin_token_file"]).read_text(encoding="ascii").strip()
    fields = {"method": "admin_add_new_topic_record", "confModAuthToken": token, "topicName": TOPIC, "brokerId": "2"}
    fields |= {"createUser": "benchmark", "numPartitions": "3"}
    answer = json.loads(_get(f"{ready['http']}/webapi.htm?{urllib.parse.urlencode(fields)}"))
    if not answer["result"]:
        raise SystemExit(answer["errMsg"])


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}", timeout=LATE_S) as response:
        text: str = response.read().decode()
    return text


def _sent(served: Served) -> float:
    """Return the number of records that the broker has appended."""
    lines = _get(f"{served.metrics}/metrics").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(SENT))


def send(master: str, _: int) -> None:
    """Append records without a pause."""
    with Producer(master) as producer:
        producer.send_all(TOPIC, itertools.repeat(PAYLOAD))


def fetch(master: str, _: int) -> None:
    """Fetch all records, and then new ones."""
    uvloop.run(fetched(master, None))


async def fetched(master: str, count: int | None) -> int:
    """Fetch with a new group until at least ``count`` records have arrived; returns their number."""
    seen = 0
    async with Consumer(master, f"bench_{uuid.uuid4().hex[:8]}", [TOPIC]) as consumer:
        async for batch in consumer.batches():
            seen += len(batch)
            if count is not None and seen >= count:
                break
    return seen


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


SERVERS: Final = {"penstock": one_process, "two processes": two_processes}


def processes(settings: Settings) -> list[Figure]:
    """Measure latencies and rates next to clients of TubeMQ, and the processor time of each kind of request."""
    figures: dict[tuple[str, str, str], Figure] = {}

    def add(case: str, server: str, unit: str, value: float | None) -> None:
        assert value is not None
        figures.setdefault((case, server, unit), Figure(case, server, unit)).runs.append(value)

    for _ in range(settings.repeats):
        for name, start in SERVERS.items():
            with ExitStack() as stack:
                served = stack.enter_context(start(settings.durability))
                for client in (send, fetch):
                    stack.enter_context(flooding(served.tube_master, Load(client)))
                times = latencies(served.mqtt, settings.seconds)
                for unit, share in (("p50 ms", 0.5), ("p99 ms", 0.99)):
                    add("QoS 1, 50 messages/s, next to TubeMQ", name, unit, times[int(len(times) * share)])
                _rates(served, settings, name, add)
    with two_processes(settings.durability) as served:
        for _ in range(settings.repeats):
            _processor_times(served, settings, add)
    return list(figures.values())


def _rates(served: Served, settings: Settings, name: str, add: Add) -> None:
    """Measure rates of MQTT and of the state store, each next to TubeMQ, and of TubeMQ next to them."""
    for case, mode, unit, options in (
        ("QoS 1, 64 in flight", "qos1", "messages/s", {"window": 64, "size": 1024}),
        ("SET, 50 clients", "statestore", "requests/s", {"op": "set", "clients": 50, "keys": 1000}),
    ):
        sent, began = _sent(served), time.perf_counter()
        load = generator.measure(served.mqtt, mode, seconds=settings.seconds, **options)
        rate = (_sent(served) - sent) / (time.perf_counter() - began)
        add(f"{case}, next to TubeMQ", name, unit, load.per_s)
        add(f"TubeMQ sends, next to {case}", name, "records/s", rate)


def _processor_times(served: Served, settings: Settings, add: Add) -> None:
    """Measure the processor time of one request in the process that handles it, and in the node for a record of the
    other process."""
    options = {"seconds": settings.seconds, "pid": served.node}
    for window in (64, 1):
        load = generator.measure(served.mqtt, "qos1", window=window, size=1024, **options)
        add(f"QoS 1, {window} in flight, node", "penstock", "us of CPU/message", load.server_us)
    load = generator.measure(served.mqtt, "statestore", op="set", clients=50, keys=1000, **options)
    add("SET, 50 clients, node", "penstock", "us of CPU/request", load.server_us)
    pids = {"node": served.node, "broker": served.broker}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    with Producer(served.tube_master) as producer:
        producer.send_all(TOPIC, itertools.repeat(PAYLOAD, RECORDS))
    for name, pid in pids.items():
        add(f"TubeMQ send, {name}", "penstock", "us of CPU/record", 1e6 * (cpu_s(pid) - before[name]) / RECORDS)
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    count = uvloop.run(fetched(served.tube_master, RECORDS))
    for name, pid in pids.items():
        add(f"TubeMQ fetch, {name}", "penstock", "us of CPU/record", 1e6 * (cpu_s(pid) - before[name]) / count)
