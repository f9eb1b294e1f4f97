"""Scale: resource usage and latency of a broker with many clients, keys and topics, and the time of reconnects.

There are two loads, each next to Mosquitto if it supports them; for a million keys see ``statestore-keys``.

* ``steady``: 1,000 clients that each publish once a second to themselves, alone and next to 9,000 idle clients, 10,000
  retained topics and (penstock) ``--keys`` keys that expire; then all of them are removed. Latency is in the case
  ``scale``, memory and descriptors in the case ``memory``.
* ``reconnect``: the broker is killed and started while 10,000 clients reconnect: anonymous, with a client certificate,
  with SCRAM (penstock). penstock is durable, so that sessions and subscriptions survive.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import uvloop

from benchmarks import generator, servers
from benchmarks.connections import connections_possible
from benchmarks.crowd import Crowd, User, connect, traffic
from benchmarks.figures import Figure, Settings
from benchmarks.isolation import Peer
from benchmarks.machine import cpu_seconds
from benchmarks.statestore import own_memory
from penstock.mqtt.codec.packets import Disconnect, Publish
from penstock.runtime.io.memory import INTERVAL_S
from penstock.security.passwords import edit_passwords, make_credential
from tests.ports import free_port

T = TypeVar("T")

__all__ = [
    "BUSY",
    "IDLE",
    "RELEASED_S",
    "USER",
    "Process",
    "Return",
    "Steady",
    "Usage",
    "client_tls",
    "memory",
    "memory_node",
    "node",
    "reconnect",
    "scale",
    "steady",
    "usage",
]

BUSY: Final = 1_000
"""Number of clients that publish."""
IDLE: Final = 9_000
"""Number of idle clients."""
LIMITS: Final = {"max_connections": 11_000}
"""More than the default of 10,000: the clients that fill the store and the topics are connected at the same time."""
TOPICS: Final = 10_000
USER: Final = User("operator", "correct horse battery staple")
KEY_EXPIRY_S: Final = 10.0
"""Expiry of the keys, in addition to the time for setting them at ``FILLED_PER_S`` keys per second."""
FILLED_PER_S: Final = 50_000
SETTLE_S: Final = 3.0
"""Seconds between the end of the clients and the measurement of memory and descriptors."""
CLOSED_S: Final = 60
"""Longest time, after that, until the broker has closed the connections of the clients."""
RELEASED_S: Final = 2.5 * INTERVAL_S
"""The same if the node must have returned free memory, which takes an idle interval after the last busy one."""


class Process(NamedTuple):
    """A broker: host:port of its MQTT listener, and its process."""

    address: str
    pid: int


class Usage(NamedTuple):
    """Resources of a broker: resident memory without pages of files in bytes, file descriptors, threads."""

    memory: int
    descriptors: int
    threads: int


def usage(pid: int) -> Usage:
    """Return the current resources of the process."""
    process = Path(f"/proc/{pid}")
    return Usage(own_memory(pid), len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


class Steady(NamedTuple):
    """Latencies in ms of the busy clients, alone and among all others; usage before, during and after."""

    alone: list[float]
    among: list[float]
    before: Usage
    during: Usage
    after: Usage


def steady(
    server: Process, *, idle: int, busy: int, topics: int, keys: int, seconds: float, settle_s: float = SETTLE_S
) -> Steady:
    """Run one round, with keys that expire during the round. The second round on a server shows what the first one left
    behind."""
    return _run(_steady(server, idle=idle, busy=busy, topics=topics, keys=keys, seconds=seconds, settle_s=settle_s))


async def _steady(
    server: Process, *, idle: int, busy: int, topics: int, keys: int, seconds: float, settle_s: float
) -> Steady:
    before = usage(server.pid)
    crowd = Crowd(server.address, session_s=0)
    await connect(crowd, range(busy))
    clients = list(crowd.clients)
    alone = await traffic(clients, seconds)
    _retain(server.address, topics, b"x" * 64)
    await connect(crowd, range(busy, busy + idle))
    expiry_s = 0.0
    if keys:
        expiry_s = KEY_EXPIRY_S + keys / FILLED_PER_S
        options = {"op": "fill", "clients": 20, "window": 50, "keys": keys, "expiry": int(expiry_s * 1000)}
        await asyncio.to_thread(partial(generator.measure, server.address, "statestore", **options))
    last = time.perf_counter() + expiry_s
    during = usage(server.pid)
    among = await traffic(clients, seconds)
    crowd.leave()
    _retain(server.address, topics, b"")
    await asyncio.sleep(settle_s + max(0.0, last - time.perf_counter()))
    for _ in range(CLOSED_S):  # a node that gets little processor time has not yet closed all connections
        if usage(server.pid).descriptors <= before.descriptors:
            break
        await asyncio.sleep(1)
    return Steady(alone, among, before, during, usage(server.pid))


def _retain(address: str, topics: int, payload: bytes) -> None:
    """Store a retained message of ``payload`` in each topic; an empty one removes it."""
    peer = Peer(address, "retainer")
    for first in range(0, topics, 100):
        numbers = range(first, min(first + 100, topics))
        peer.send(*(Publish(f"topic/{n}", payload, 1, retain=True, packet_id=n - first + 1) for n in numbers))
        answered = 0
        while answered < len(numbers):
            answered += len(peer.receive())
    peer.send(Disconnect())
    peer.socket.close()


class Return(NamedTuple):
    """Reconnects of clients to a broker that was killed and started again."""

    seconds: float
    """Seconds from its start until all clients were connected, with clients on the same machine."""
    processor_s: float
    """Processor time of the broker since its start."""
    present: int
    """Clients that found their session."""


def reconnect(
    start: Callable[[], AbstractContextManager[Process]],
    count: int,
    *,
    tls: ssl.SSLContext | None = None,
    user: User | None = None,
) -> Return:
    """Connect ``count`` clients, kill the broker, start it again, and measure until all are connected.

    ``start`` starts a broker on the same data each time, and ends it.
    """
    return _run(_reconnect(start, count, tls, user))


async def _reconnect(
    start: Callable[[], AbstractContextManager[Process]], count: int, tls: ssl.SSLContext | None, user: User | None
) -> Return:
    with start() as server:
        crowd = Crowd(server.address, tls, user)
        await connect(crowd, range(count))
        os.kill(server.pid, 9)
    crowd.leave()
    began = time.perf_counter()
    with start() as server:
        crowd = Crowd(server.address, tls, user)
        await connect(crowd, range(count))
        seconds = time.perf_counter() - began
        found = Return(seconds, cpu_seconds([server.pid]), crowd.present)
        crowd.leave()
    return found


def memory(settings: Settings) -> list[Figure]:
    """Measure memory and descriptors of one server over two rounds; each run uses a new server."""
    figures: dict[tuple[str, str, str], Figure] = {}
    idle = connections_possible(BUSY + IDLE) - BUSY
    for _ in range(settings.repeats):
        for name, start, keys in (("penstock", memory_node, settings.keys), ("mosquitto", _mosquitto, 0)):
            with start() as server:
                work = partial(
                    steady, server, idle=idle, busy=BUSY, topics=TOPICS, keys=keys, seconds=settings.seconds,
                    settle_s=RELEASED_S,
                )  # fmt: skip
                first, second = work(), work()
            for case, found in (
                ("before", first.before),
                ("with all", first.during),
                ("after all have left", first.after),
                ("with all, a second time", second.during),
                ("after a second time", second.after),
            ):
                _add(figures, f"memory {case}", name, "MB", found.memory / 1e6)
                _add(figures, f"descriptors {case}", name, "descriptors", found.descriptors)
    return list(figures.values())


def scale(settings: Settings) -> list[Figure]:
    """Measure latencies, and times until all clients are connected again; each run uses a new server."""
    figures: dict[tuple[str, str, str], Figure] = {}
    idle = connections_possible(BUSY + IDLE) - BUSY
    for _ in range(settings.repeats):
        for name, start, keys in (("penstock", memory_node, settings.keys), ("mosquitto", _mosquitto, 0)):
            with start() as server:
                found = steady(server, idle=idle, busy=BUSY, topics=TOPICS, keys=keys, seconds=settings.seconds)
            for case, times in (("1,000 busy clients", found.alone), ("the same among all others", found.among)):
                for unit, share in (("p50 ms", 0.5), ("p99 ms", 0.99)):
                    _add(figures, case, name, unit, times[int(len(times) * share)])
        for case, name, run in _reconnects():
            returned = run()
            _add(figures, f"{BUSY + IDLE:,} {case} clients are back", name, "s", returned.seconds)
            if name == "penstock" and returned.present != BUSY + IDLE:
                raise SystemExit(f"{case}: {returned.present} of {BUSY + IDLE} sessions were there after the restart")
    return list(figures.values())


def _add(figures: dict[tuple[str, str, str], Figure], case: str, server: str, unit: str, value: float) -> None:
    figures.setdefault((case, server, unit), Figure(case, server, unit)).runs.append(value)


def _reconnects() -> Iterator[tuple[str, str, Callable[[], Return]]]:
    """Yield each authentication method with each server that supports it; the files of a run exist until the next
    one."""
    count = connections_possible(BUSY + IDLE)
    for case in ("anonymous", "certificate", "SCRAM"):
        for name in ("penstock", "mosquitto"):
            if case == "SCRAM" and name == "mosquitto":
                continue
            with tempfile.TemporaryDirectory() as folder:
                made = servers.certificates(folder)
                port = free_port()
                tls = client_tls(made) if case == "certificate" else None
                user = USER if case == "SCRAM" else None
                if name == "penstock":
                    start = partial(node, folder, port, case, made)
                else:
                    start = partial(_restarted_mosquitto, port, made, secure=tls is not None)
                yield case, name, partial(reconnect, start, count, tls=tls, user=user)


def client_tls(made: servers.Certificates) -> ssl.SSLContext:
    """Return the TLS context of a client with a certificate of the authority, which it trusts."""
    tls = ssl.create_default_context(cafile=made.authority)
    tls.load_cert_chain(made.server)
    return tls


@contextmanager
def memory_node() -> Iterator[Process]:
    """Run a node in memory mode."""
    with servers.penstock("memory", mqtt={"limits": LIMITS}) as ready:
        yield Process(ready["mqtt"], int(ready["pid"]))


@contextmanager
def _mosquitto() -> Iterator[Process]:
    with servers.mosquitto_process() as found:
        yield Process(*found)


@contextmanager
def node(folder: str, port: int, case: str, made: servers.Certificates) -> Iterator[Process]:
    """Run a durable node on ``folder``, with this port, whose clients authenticate as in ``case``."""
    listener: dict[str, object] = {"bind": f"127.0.0.1:{port}"}
    security: dict[str, object] = {}
    if case == "certificate":
        listener["transport"] = "tls"
        listener["tls"] = {"certificate": made.server, "key": made.server, "client_ca": made.authority}
    if case == "SCRAM":
        path = Path(folder) / "passwords"
        if not path.exists():
            edit_passwords(path, lambda _: {USER.name: make_credential(USER.name, USER.password.encode())})
        security["passwords"] = str(path)
        listener["authentication"] = ["scram"]
    with servers.penstock_in(folder, "durable", mqtt={"listeners": {"crowd": listener}}, security=security) as ready:
        yield Process(f"127.0.0.1:{port}", int(ready["pid"]))


@contextmanager
def _restarted_mosquitto(port: int, made: servers.Certificates, *, secure: bool) -> Iterator[Process]:
    listener = f"listener {port} 127.0.0.1\n"
    if secure:
        listener += (
            f"certfile {made.server}\nkeyfile {made.server}\ncafile {made.authority}\nrequire_certificate true\n"
        )
    with servers.mosquitto_process(listener) as (_, pid):
        yield Process(f"127.0.0.1:{port}", pid)


def _run(work: Coroutine[None, None, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
