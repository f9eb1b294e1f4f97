"""Latency of one client while another one floods the broker: penstock and Mosquitto alternately.

The client publishes 50 messages of QoS 1 per second to a separate topic; measured is the time from PUBLISH to delivery.
Floods run in separate processes: see :data:`LOADS`.

On two cores the clients of a flood leave the broker little of the processors: a p99 is then mostly the time in which
the broker or the measured client waits for one. ``isolation-remote`` is about clients that run elsewhere: those of the
flood have a lower priority than the broker, and the measured client a higher one.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import select
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import servers
from benchmarks.connections import connections_possible
from benchmarks.crowd import Crowd, connect
from benchmarks.figures import Figure, Settings
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Packet, PubAck, Publish, Subscribe, Subscription, Unsubscribe
from penstock.security.passwords import edit_passwords, make_credential
from penstock.statestore.blocking import Client
from penstock.tube.blocking import Consumer, Producer

__all__ = ["isolation", "isolation_remote"]

INTERVAL_S: Final = 0.02
"""Interval of the measured client's messages."""
LATE_S: Final = 10.0
"""Time after which an undelivered message is an error."""
PAYLOAD: Final = b"x" * 1024
FLOOD_NICE: Final = 10
"""Nice value of the clients of a flood that should not take the processor from the broker."""
SCANNED: Final = 10_000
"""Keys of the load that scans them."""
RETAINED: Final = 20_000
"""Retained messages of the load that subscribes to all of them."""
CROWD: Final = 10_000
"""Clients of the load that connects as many as a restart brings back."""
RECORDS: Final = 100_000
"""Records of 1 KiB that the load of a consumer reads repeatedly."""
USER: Final = "ann"
"""The user whose password the load of wrong passwords does not know."""


class Peer:
    """A connected client with a blocking socket."""

    def __init__(self, address: str, client_id: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = Decoder(role=Role.CLIENT)
        self.send(Connect(client_id, keep_alive=0))
        (answer,) = self.receive()
        assert isinstance(answer, ConnAck)
        self.receive_maximum = answer.properties.receive_maximum or 65_535
        """Messages of QoS 1 that the broker accepts without acknowledgement."""

    def send(self, *packets: Packet) -> None:
        """Send packets in one piece."""
        self.socket.sendall(b"".join(map(encode, packets)))

    def receive(self) -> list[Packet]:
        """Wait for bytes; return the complete packets.

        Raises:
            ConnectionError: the broker closed the connection.
        """
        data = self.socket.recv(256 * 1024)
        if not data:
            raise ConnectionError("the broker closed the connection")
        return self._decoder.feed(data)


def flood_qos0(address: str, _window: int) -> None:
    """Send messages of QoS 0 without a pause."""
    peer = Peer(address, "flood")
    data = encode(Publish("flood/x", PAYLOAD)) * 32
    while True:
        peer.socket.sendall(data)


def flood_qos1(address: str, window: int) -> None:
    """Keep ``window`` messages of QoS 1 in flight, or as many as the broker accepts."""
    peer = Peer(address, "flood")
    packet_id, free = 0, min(window, peer.receive_maximum)
    while True:
        numbers = [(packet_id + n) % 60_000 + 1 for n in range(free)]
        packet_id = (packet_id + free) % 60_000
        peer.send(*(Publish("flood/x", PAYLOAD, 1, packet_id=number) for number in numbers))
        free = sum(isinstance(packet, PubAck) for packet in peer.receive())


def flood_subscriptions(address: str, _window: int) -> None:
    """Subscribe and unsubscribe, 100 filters in flight."""
    peer = Peer(address, "flood")
    filters = [f"flood/{n}/+" for n in range(100)]
    changes = [Subscribe(n + 1, [Subscription(name)]) for n, name in enumerate(filters)]
    undo = [Unsubscribe(n + 1, [name]) for n, name in enumerate(filters)]
    while True:
        for packets in (changes, undo):
            peer.send(*packets)
            answers = 0
            while answers < len(packets):
                answers += len(peer.receive())


def flood_retained(address: str, _window: int) -> None:
    """Store retained messages, then subscribe to all of them repeatedly."""
    peer = Peer(address, "flood")
    for n in range(RETAINED):
        peer.send(Publish(f"retained/{n}", b"x" * 64, retain=True))
    while True:
        peer.send(Subscribe(1, [Subscription("retained/#")]))
        received = 0
        while received < RETAINED:
            received += sum(isinstance(packet, Publish) for packet in peer.receive())


def flood_connects(address: str, count: int) -> None:
    """Connect ``count`` clients at the same time, close them, repeatedly."""
    host, _, port = address.rpartition(":")
    requests = [encode(Connect(f"flood-{n}")) for n in range(count)]
    while True:
        with ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection((host, int(port)), LATE_S)) for _ in range(count)
            ]
            for connection, request in zip(connections, requests, strict=True):
                connection.sendall(request)
            for connection in connections:
                if connection.recv(256)[:1] != b"\x20":
                    raise ConnectionError("no CONNACK")


def flood_crowd(address: str, count: int) -> None:
    """Connect and subscribe ``count`` clients, as fast as the broker accepts them, close them, repeatedly."""
    if connections_possible(count) < count:
        raise SystemExit(f"this process may not open {count} connections: raise `ulimit -n`")

    async def run() -> None:
        while True:
            crowd = Crowd(address, session_s=0)
            await connect(crowd, range(count))
            crowd.leave()

    asyncio.run(run())


def flood_passwords(address: str, count: int) -> None:
    """Connect with a wrong password over and over, ``count`` connections at a time."""
    host, _, port = address.rpartition(":")
    request = encode(Connect("flood", username=USER, password=b"wrong"))
    while True:
        with ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection((host, int(port)), LATE_S)) for _ in range(count)
            ]
            for connection in connections:
                connection.sendall(request)
            for connection in connections:
                answer = connection.recv(256)
                if answer[:1] != b"\x20" or not answer[3]:
                    raise ConnectionError(f"no CONNACK that refuses: {answer!r}")


def flood_filters(address: str, count: int) -> None:
    """Subscribe to ``count`` filters in one packet, and unsubscribe."""
    peer = Peer(address, "flood")
    filters = [f"flood/{n}/+" for n in range(count)]
    packets = Subscribe(1, [Subscription(name) for name in filters]), Unsubscribe(2, filters)
    while True:
        for packet in packets:
            peer.send(packet)
            while not peer.receive():
                pass


def flood_sets(address: str, size: int) -> None:
    """Set a value of ``size`` bytes, one request in flight."""
    with Client(f"mqtt://{address}") as store:
        while True:
            store.set("flood", b"x" * size)


def set_keys(address: str, count: int) -> None:
    """Set ``count`` keys."""
    with Client(f"mqtt://{address}") as store:
        for n in range(count):
            store.set(f"flood-{n}", b"x")


def flood_scans(address: str, count: int) -> None:
    """Scan all of the ``count`` keys that :func:`set_keys` has set, repeatedly."""
    with Client(f"mqtt://{address}") as store:
        while True:
            if sum(1 for _ in store.scan("flood-*")) != count:
                raise SystemExit("a SCAN did not find all keys")


def flood_log(address: str, _window: int) -> None:
    """Append records of 1 KiB to a topic as fast as the broker accepts them."""
    with Producer(address) as producer:
        producer.send_all("flood", itertools.repeat(PAYLOAD))


def write_records(address: str, count: int) -> None:
    """Append ``count`` records of 1 KiB."""
    with Producer(address) as producer:
        producer.send_all("flood", itertools.repeat(PAYLOAD, count))


def flood_consumption(address: str, count: int) -> None:
    """Read the ``count`` records that :func:`write_records` has written, as a new group each time."""
    for number in itertools.count():
        with Consumer(address, f"flood-{number}", ["flood"]) as consumer:
            for _ in itertools.islice(consumer, count):
                pass


def flood_http(address: str, _window: int) -> None:
    """Request all metrics, without a pause."""
    while True:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=LATE_S) as response:
            response.read()


def read_flood(address: str, pause_ms: int) -> None:
    """Subscribe to the flood, and pause between reads."""
    peer = Peer(address, f"subscriber-{pause_ms}")
    peer.send(Subscribe(1, [Subscription("flood/#")]))
    while peer.socket.recv(64 * 1024):
        time.sleep(pause_ms / 1000)


class Load(NamedTuple):
    """A flood: the function of its client, its window or size, whether a fast and a slow client subscribe to it, and
    the listener that it is for: ``mqtt`` or, without a peer, another one or the state store of penstock. ``prepare`` is
    called before, with the same arguments. With ``users``, which is for penstock only, clients may have a password."""

    flood: Callable[[str, int], None]
    window: int = 0
    subscribers: bool = False
    listener: str = "mqtt"
    prepare: Callable[[str, int], None] | None = None
    users: bool = False

    @property
    def has_peer(self) -> bool:
        """Whether Mosquitto can have this load, too."""
        return self.listener == "mqtt" and not self.users


LOADS: Final = {
    "QoS 0": Load(flood_qos0),
    "QoS 0, a slow and a fast subscriber": Load(flood_qos0, subscribers=True),
    "QoS 1, 20 in flight": Load(flood_qos1, 20),
    "QoS 1, 1,000 in flight": Load(flood_qos1, 1_000),
    "QoS 1, 1,000 in flight, a slow and a fast subscriber": Load(flood_qos1, 1_000, subscribers=True),
    "SUBSCRIBE and UNSUBSCRIBE": Load(flood_subscriptions),
    f"SUBSCRIBE to {RETAINED:,} retained messages": Load(flood_retained),
    "SUBSCRIBE and UNSUBSCRIBE with 1,000 filters": Load(flood_filters, 1_000),
    "500 clients connect at once": Load(flood_connects, 500),
    f"{CROWD:,} clients connect at once": Load(flood_crowd, CROWD),
    "16 clients with a wrong password": Load(flood_passwords, 16, users=True),
    "SETs of 256 KiB": Load(flood_sets, 256 * 1024, listener="store"),
    f"SCANs of {SCANNED:,} keys": Load(flood_scans, SCANNED, listener="store", prepare=set_keys),
    "TubeMQ sends of 1 KiB": Load(flood_log, listener="tube_master"),
    f"a TubeMQ consumer reads {RECORDS:,} records": Load(
        flood_consumption, RECORDS, listener="tube_master", prepare=write_records
    ),
    "HTTP requests of all metrics": Load(flood_http, listener="http"),
}


def _run(function: Callable[[str, int], None], address: str, argument: int, nice: int, started: Event) -> None:
    os.nice(nice)
    started.set()
    function(address, argument)


def _check_alive(processes: Iterable[BaseProcess]) -> None:
    if not all(process.is_alive() for process in processes):
        raise SystemExit("a client of the flood has ended")


@contextmanager
def flooding(address: str, load: Load, nice: int = 0) -> Iterator[None]:
    """Run the clients of a load, with this nice value."""
    if load.prepare is not None:
        load.prepare(address, load.window)
    clients = [(load.flood, load.window)]
    if load.subscribers:
        clients += [(read_flood, 0), (read_flood, 50)]
    context = multiprocessing.get_context("fork")
    processes = []
    for function, argument in clients:
        started = context.Event()
        process = context.Process(target=_run, args=(function, address, argument, nice, started), daemon=True)
        process.start()
        started.wait(LATE_S)
        processes.append(process)
    try:
        time.sleep(1)  # let the flood fill the buffers
        _check_alive(processes)
        yield
        _check_alive(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def latencies(
    address: str, seconds: float, interval_s: float = INTERVAL_S, *, running: Callable[[], bool] = lambda: True
) -> list[float]:
    """Times from PUBLISH to delivery in ms, sorted; ends earlier if ``running()`` is false."""
    peer = Peer(address, "measured")
    peer.send(Subscribe(1, [Subscription("measured/x", 1)]))
    peer.receive()
    sent: dict[int, float] = {}
    found: list[float] = []
    due = time.perf_counter()
    end = due + seconds
    number = 0
    while due < end or sent:
        now = time.perf_counter()
        if not running():
            end = due
            if not sent:
                break
        if now >= due and due < end:
            number += 1
            sent[number] = now
            peer.send(Publish("measured/x", number.to_bytes(4, "big"), 1, packet_id=number % 60_000 + 1))
            due += interval_s
        wait = due - now if due < end else LATE_S
        if not select.select([peer.socket], [], [], max(0.0, wait))[0]:
            if wait == LATE_S:
                raise SystemExit(f"{len(sent)} messages were not delivered within {LATE_S:g} s")
            continue
        for packet in peer.receive():
            if isinstance(packet, Publish):
                found.append(1000 * (time.perf_counter() - sent.pop(int.from_bytes(packet.payload, "big"))))
                peer.send(PubAck(packet.packet_id))
    peer.socket.close()
    return sorted(found)


@contextmanager
def real_time() -> Iterator[None]:
    """Run this process before all others that want a processor.

    Raises:
        SystemExit: the user must not do this.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        raise SystemExit(
            "isolation-remote: this user may not have real-time priority; run it as root, in a control group with "
            "real-time runtime (cpu.rt_runtime_us)"
        ) from None
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def isolation(settings: Settings) -> list[Figure]:
    """The p50 and p99 of each load, in memory, a new server for each run."""
    return _isolation(settings, LOADS, nullcontext, 0)


def isolation_remote(settings: Settings) -> list[Figure]:
    """The same for the loads of MQTT if the processors belong first to the measured client, then to the broker."""
    loads = {name: load for name, load in LOADS.items() if load.has_peer}
    return _isolation(settings, loads, real_time, FLOOD_NICE)


def _with_users(folder: str) -> dict[str, Any]:
    """Sections of the configuration of a node with a user, that accepts clients without credentials, too."""
    path = Path(folder) / "passwords"
    edit_passwords(path, lambda _: {USER: make_credential(USER, b"right")})
    names = ("mqtt", "tube_master", "tube_broker", "http", "tube_broker_http")
    return {"security": {"passwords": str(path)}, **{name: {"anonymous": "allow"} for name in names}}


def _isolation(
    settings: Settings, loads: Mapping[str, Load], measured: Callable[[], AbstractContextManager[None]], nice: int
) -> list[Figure]:
    figures: list[Figure] = []
    for name, load in loads.items():
        names = ("penstock", "mosquitto") if load.has_peer else ("penstock",)
        of_load = {(server, unit): Figure(name, server, unit) for unit in ("p50 ms", "p99 ms") for server in names}
        for _ in range(settings.repeats):
            for server in names:
                with ExitStack() as stack:
                    if server == "penstock":
                        sections = _with_users(stack.enter_context(tempfile.TemporaryDirectory())) if load.users else {}
                        ready = stack.enter_context(servers.penstock("memory", ["flood"], **sections))
                        address, flooded = ready["mqtt"], ready.get(load.listener, ready["mqtt"])
                    else:
                        address, _ = stack.enter_context(servers.mosquitto_process("max_inflight_messages 1024\n"))
                        flooded = address
                    stack.enter_context(flooding(flooded, load, nice))
                    with measured():
                        times = latencies(address, settings.seconds)
                for unit, share in (("p50 ms", 0.5), ("p99 ms", 0.99)):
                    of_load[server, unit].runs.append(times[int(len(times) * share)])
        figures += of_load.values()
    return figures
