"""TubeMQ: penstock's client and Apache's Java client, each on penstock and on Apache's Java server, in one run.

Apache's server acknowledges from memory and writes later. penstock is measured with ``--durability``, and once more
with durability ``memory``: the ratio of the two is the cost of durability. Without a JDK, Maven or the jars, only
penstock's client on penstock is measured.
"""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop

from benchmarks import servers
from benchmarks.connections import resident_bytes
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.generator import Load
from benchmarks.machine import cpu_seconds
from benchmarks.tube_loads import JavaLoads, Measured, OurLoads, fill, fill_each, first_send
from penstock.tube.client.web import WebLogin, call
from tests.interop.tube_java.clients import JavaClients
from tests.interop.tube_java.jars import prepare
from tests.interop.tube_java.server import JavaTube

__all__ = ["APACHE", "IN_MEMORY", "Peer", "apache", "tube"]

APACHE = "Apache TubeMQ"
IN_MEMORY = "penstock, memory"
_CHANGE = {"createUser": "bench"}
SIZES = (100, 1024)
PRODUCERS = (1, 4)
JUST_WRITTEN = {100: 80_000, 1024: 12_000}
"""Number of messages that penstock's broker still has in memory (16 MiB of records)."""
OLD = 50_000
PARTITIONS = 1_000

Loads = OurLoads | JavaLoads


class Peer(NamedTuple):
    """A server: its master, and the processes whose time is measured; none if it is not on this machine."""

    master: str
    pids: list[int]


def tube(settings: Settings) -> list[Figure]:
    """Measure produce, consume, latency and first message of two clients on two servers."""
    topics = ["sync", "latency", *(f"{kind}{size}" for kind in ("s", "m", "old") for size in SIZES)]
    figures: list[Figure] = []
    with ExitStack() as stack:
        ready = stack.enter_context(servers.penstock(settings.durability, topics=topics))
        peers = {"penstock": Peer(ready["tube_master"], [int(ready["pid"])])}
        clients: dict[str, Loads] = {"": OurLoads()}
        if settings.tube_peer is not None:
            peers[APACHE] = Peer(settings.tube_peer, [])
        elif (found := stack.enter_context(apache(topics))) is not None:
            clients[", Java client"] = JavaLoads(found[0])
            peers[APACHE] = found[1]
        compare = partial(_compare, settings, figures)
        memory: dict[str, Peer] = {}
        if settings.durability != "memory":
            again = stack.enter_context(servers.penstock("memory", topics=topics))
            memory[IN_MEMORY] = Peer(again["tube_master"], [int(again["pid"])])
        for name, client in clients.items():
            if isinstance(client, JavaLoads):
                for peer in (peers | memory).values():
                    client.warm("sync", peer.master)
            for size in SIZES:
                for count in PRODUCERS:
                    written = peers | memory if count == 1 else peers
                    some = f"{size} B, {count} producer{'s' * (count > 1)}{name}"
                    compare(f"produce {some}", "messages/s", written, partial(client.produce, f"s{size}", size, count))
                    some = f"produce one at a time {some}"
                    compare(some, "messages/s", written, partial(client.one_by_one, "sync", size, count))
        for size, count in JUST_WRITTEN.items():
            for peer in peers.values():
                uvloop.run(fill(peer.master, f"m{size}", size, count))
            for name, client in clients.items():
                read = partial(client.consume, f"m{size}", count)
                compare(f"consume {size} B just written{name}", "messages/s", peers, read)
        for name, client in clients.items():
            compare(f"end to end at 500/s{name}", "us, median", peers, partial(client.latency, "latency"))
            compare(f"group's start to first message{name}", "ms", peers, partial(client.first, "m100"))
        for size in SIZES:
            figures += _from_files(settings, clients, peers, size)
        figures += _of_penstock_alone(settings, clients)
    return figures


def _compare(
    settings: Settings,
    figures: list[Figure],
    case: str,
    unit: str,
    peers: Mapping[str, Peer],
    run: Callable[[str], Measured],
) -> None:
    """Run the servers alternately, with their processor time per message."""

    def measured(peer: Peer) -> Load:
        before = cpu_seconds(peer.pids)
        found = run(peer.master)
        used = (cpu_seconds(peer.pids) - before) / found.messages * 1e6 if found.messages and peer.pids else None
        return Load(found.value, found.p50_us, found.p99_us, 0.0, used)

    figures += alternate(settings, case, unit, {name: partial(measured, peer) for name, peer in peers.items()})


def _from_files(settings: Settings, clients: Mapping[str, Loads], peers: Mapping[str, Peer], size: int) -> list[Figure]:
    """Measure reads of messages that no server has in memory: penstock was restarted, Apache's server caches 3 MB of
    written messages."""
    figures: list[Figure] = []
    topic = f"old{size}"
    with tempfile.TemporaryDirectory() as folder:
        with servers.penstock_in(folder, settings.durability, [topic]) as ready:
            uvloop.run(fill(ready["tube_master"], topic, size, OLD))
        if APACHE in peers:
            uvloop.run(fill(peers[APACHE].master, topic, size, OLD))
        for name, client in clients.items():

            def ours(client: Loads = client) -> float:
                with servers.penstock_in(folder, settings.durability, [topic]) as again:
                    return client.consume(topic, OLD, again["tube_master"]).value

            runners: dict[str, Callable[[], float]] = {"penstock": ours}
            if APACHE in peers:

                def theirs(client: Loads = client) -> float:
                    return client.consume(topic, OLD, peers[APACHE].master).value

                runners[APACHE] = theirs
            figures += alternate(settings, f"consume {size} B from files{name}", "messages/s", runners)
    return figures


def _of_penstock_alone(settings: Settings, clients: Mapping[str, Loads]) -> list[Figure]:
    """Measure penstock alone: the first message of a new topic, for which Apache's server takes a fixed 35 seconds, and
    memory, which in Apache's server depends on the size of its heap."""
    figures: list[Figure] = []
    with servers.penstock(settings.durability, topics=["small"]) as ready:
        for name, client in clients.items():
            new = {"penstock": partial(_new_topic, ready, client)}
            figures += alternate(settings, f"new topic to its first message{name}", "ms", new)
        pid = int(ready["pid"])
        before = resident_bytes(pid)
        change = {**_CHANGE, "topicName": "wide", "numPartitions": str(PARTITIONS)}
        call(ready["http"], "admin_add_new_topic_record", change, login=_login(ready))
        uvloop.run(fill_each(ready["tube_master"], "wide", PARTITIONS))
        used = (resident_bytes(pid) - before) / 1024
    return [*figures, Figure(f"memory of {PARTITIONS} partitions in use", "penstock", "KiB", [used])]


def _login(ready: Mapping[str, str]) -> WebLogin:
    return WebLogin(Path(ready["admin_token_file"]).read_text(encoding="ascii").strip())


def _new_topic(ready: Mapping[str, str], client: Loads) -> float:
    """Return the milliseconds from the creation of a topic to the first acknowledged message."""
    topic = f"new_{uuid.uuid4().hex[:8]}"
    started = time.perf_counter()
    call(ready["http"], "admin_add_new_topic_record", {**_CHANGE, "topicName": topic}, login=_login(ready))
    if isinstance(client, JavaLoads):
        client.first_send(ready["tube_master"], topic)
    else:
        uvloop.run(first_send(ready["tube_master"], topic))
    return (time.perf_counter() - started) * 1000


@contextmanager
def apache(topics: Sequence[str]) -> Iterator[tuple[JavaClients, Peer] | None]:
    """Yield Apache's client and server; None, with the reason on standard error, if they are not available."""
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
                master = server.ready()
                yield clients, Peer(master, server.pids)
            finally:
                clients.close()
        finally:
            server.close()
