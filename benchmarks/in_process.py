"""Broker and state store in one process: what a request costs, in processor time or in instructions.

Usage: python -m benchmarks.in_process [--case set] [--window 16] [--through server] [--instructions [--top N]]

One client; each read holds ``--window`` requests as the SDKs write them, and the PUBACKs of the answers to the previous
read. Measured is what the shell calls for a read, in memory; a durable request also has its part of the commit.
``--through server`` sends the reads over a TCP connection and measures all that the event loop calls for them: how much
of it is outside of ``BrokerConnection.receive`` is printed, too.
``fanout`` is a broker alone: messages of one client to 50 others, whose PUBACKs come back; measured is one delivery.
``connect`` is a server to which another process connects, ``--window`` times at once: CONNECT, CONNACK, PINGREQ,
PINGRESP, DISCONNECT, end. Measured is everything that the process of the server executes for a connection; with
``--through floor`` it is a uvloop server that answers these packets and knows nothing else.
``--instructions`` runs the same under ``valgrind --tool=callgrind`` and prints instructions per request and function:
what else runs on the machine does not move them. It needs the compiled core and valgrind.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from benchmarks.floor import Accepting
from penstock import compiled
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Publish, Subscribe, Subscription
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.connections.output import OutputTransport, PacketWriter
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.outlet import BrokerOutlet
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.clock import SteppedClock, monotonic_ms
from penstock.runtime.io.files import Durability
from penstock.runtime.io.loop import run
from penstock.statestore.binding import client_response_topic, request
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.service import StateStoreService

__all__ = ["main"]

CLIENT: Final = "in-process-1"
VALUE: Final = b"x" * 64
ARGUMENTS: Final[dict[str, Callable[[bytes], list[bytes]]]] = {
    "set": lambda key: [b"SET", key, VALUE],
    "get": lambda key: [b"GET", key],
    "del": lambda key: [b"DEL", key],
    "vdel": lambda key: [b"VDEL", key, VALUE],
    "nx": lambda key: [b"SET", key, VALUE, b"NX", b"PX", b"60000"],
    "fenced": lambda key: [b"SET", key, VALUE],
    "notify": lambda key: [b"KEYNOTIFY", key],
    "qos1": lambda key: [key],
    "ping": lambda key: [key],
}
"""Cases: the commands; ``fenced``: a SET with a fencing token; ``qos1``: a message that one client receives; ``ping``:
PINGREQ. Keys are read and deleted that exist."""
FANOUT: Final = "fanout"
CONNECT: Final = "connect"
RECEIVERS: Final = 50
"""Subscribers of ``fanout``."""
KEYS: Final = 1000
DELETED_KEYS: Final = 4_000
"""Keys that can be deleted, which limits ``--reads``."""
SET_BEFORE: Final = {"get": KEYS, "del": DELETED_KEYS, "vdel": DELETED_KEYS}
"""Cases that need keys, and how many."""
RECEIVE: Final = "CPyDef_*connection___BrokerConnection___receive"
"""The function in the C that mypyc makes that handles one read."""
MEASURED: Final = {
    "engine": (RECEIVE,),
    "server": ("CPyPy_*ServerLink___data_received", "CPyPy_*MqttServer____next_turn"),
}
"""What is measured: the functions that the shell or the event loop calls."""
COMMIT: Final = "CPyPy_*CommitQueue____turn_ended"
"""The function of a durable commit that the event loop calls."""


class _Transport(OutputTransport):
    """Collects the output of a read."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[bytes] = []

    def send_now(self, data: bytes) -> None:
        """Keep ``data``."""
        self.data.append(data)

    def acknowledgements(self) -> tuple[int, bytes]:
        """How many PUBLISH packets were sent since the last call, and the PUBACKs for them."""
        found: list[bytes] = []
        for data in self.data:
            position = 0
            while position < len(data):
                kind, size, shift, body = data[position] >> 4, 0, 0, position + 1
                while True:
                    size |= (data[body] & 127) << shift
                    shift += 7
                    body += 1
                    if data[body - 1] < 128:
                        break
                if kind == 13:
                    found.append(b"")
                elif kind == 3:
                    topic = int.from_bytes(data[body : body + 2], "big")
                    found.append(b"\x40\x02" + data[body + 2 + topic : body + 4 + topic])
                position = body + size
        self.data.clear()
        return len(found), b"".join(found)


class _Engine:
    """A client of the broker that calls the engine."""

    def __init__(self, store: StateStoreService) -> None:
        self.broker = Broker(services=[store], new_client_id=lambda: "generated")
        self.outlet = BrokerOutlet(self.broker, monotonic_ms, self._flush)
        self.transport = _Transport()

    async def open(self) -> None:
        """Connect."""
        connection = self.broker.open("in-process", monotonic_ms())
        assert connection is not None
        connection.sink = self.transport
        self.connection = connection

    async def send(self, data: bytes) -> None:
        """Hand a read to the broker; its output is in ``transport``."""
        self.broker.outbound.begin_read(self.connection)
        self.connection.receive(data, monotonic_ms(), time.time_ns() // 1_000_000)
        self.broker.outbound.end_read()
        self._flush()

    async def wait(self) -> None:
        """Wait for more output."""
        await asyncio.sleep(0.0002)  # not busily: that would count as the request's
        self._flush()

    async def close(self) -> None:
        """Disconnect."""
        self.connection.lost(monotonic_ms())

    def _flush(self) -> None:
        for _, output, _ in self.broker.flush(monotonic_ms()):
            self.transport.send_now(output)


class _Server:
    """A client of the broker over TCP in the same event loop."""

    def __init__(self, store: StateStoreService) -> None:
        self.server = MqttServer(services=[store], clock=SteppedClock().now)
        self.outlet = self.server.outlet
        self.transport = _Transport()

    async def open(self) -> None:
        """Connect."""
        self.socket = socket.create_connection(await self.server.start("127.0.0.1", 0))
        self.socket.settimeout(0)

    async def send(self, data: bytes) -> None:
        """Send a read to the server and wait for the first of its output."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)
        await self.wait()

    async def wait(self) -> None:
        """Wait for more output; a read holds whole packets here, as the server sends them together."""
        self.transport.send_now(await asyncio.get_running_loop().sock_recv(self.socket, 1 << 20))

    async def close(self) -> None:
        """Disconnect."""
        self.socket.close()
        await self.server.close()


async def measure(case: str, options: argparse.Namespace) -> float:
    """Processor time of a request in us: the median of the reads."""
    window: int = options.window
    warm_up: int = options.warm_up
    reads: int = options.reads
    if case in ("del", "vdel"):
        reads = min(reads, DELETED_KEYS // window - warm_up)
    with tempfile.TemporaryDirectory() as folder:
        store = StateStoreService(Path(folder) / "store", Durability(options.durability))
        # Commits run in the loop, also where callgrind makes the disk look slow.
        store._writer.queue.inline_s = math.inf  # noqa: SLF001 - no setting of an operator
        client = _Server(store) if options.through == "server" else _Engine(store)
        await store.start(client.outlet)
        await client.open()
        await client.send(encode(Connect(CLIENT, keep_alive=0)))
        topics = [Subscription(client_response_topic(CLIENT)), Subscription("plant/#")]
        await client.send(encode(Subscribe(1, topics)))
        client.transport.data.clear()
        gc.collect()
        gc.freeze()
        times: list[int] = []
        acknowledgements = b""
        keys = SET_BEFORE.get(case, KEYS)
        turns = -(-SET_BEFORE.get(case, 0) // window)
        for turn in range(turns + warm_up + reads):
            stamp = store.clock()
            of_turn = "set" if turn < turns else case
            packets = [_packet(of_turn, turn * window + n, stamp, keys) for n in range(1, window + 1)]
            read = b"".join((acknowledgements, *packets))
            started = time.process_time_ns()
            await client.send(read)
            answered, acknowledgements = client.transport.acknowledgements()
            while answered < window:
                await client.wait()
                more, rest = client.transport.acknowledgements()
                answered += more
                acknowledgements += rest
            if turn >= turns + warm_up:
                times.append(time.process_time_ns() - started)
        await client.close()
        await store.close()
        return sorted(times)[len(times) // 2] / window / 1000


def _packet(case: str, number: int, stamp: int, keys: int) -> bytes:
    if case == "ping":
        return b"\xc0\x00"
    if case == "qos1":
        publish = Publish("plant/line/1", VALUE, 1)
    else:
        publish = request(
            ARGUMENTS[case](b"key-%06d" % (number % keys)),
            CLIENT,
            number.to_bytes(16, "big"),
            Hlc(stamp, number % 1000, CLIENT),
            fencing_token=Hlc(stamp, 1, CLIENT) if case == "fenced" else None,
            expiry_s=10,
        )
    publish.packet_id = 1 + number % 65_535
    return encode(publish)


def fan_out(window: int, reads: int, warm_up: int) -> float:
    """Processor time of a delivery in us: the median of the reads of the publisher."""
    limits = BrokerLimits(max_turn_work=window * RECEIVERS * 2)  # one share, so that one call of receive handles a read
    broker = Broker(limits, new_client_id=lambda: "generated")

    def connect(client_id: str) -> tuple[BrokerConnection, _Transport]:
        connection = broker.open("in-process", 1)
        assert connection is not None
        connection.sink = transport = _Transport()
        connection.receive(encode(Connect(client_id, keep_alive=0)), 1, 1)
        return connection, transport

    def receive(connection: BrokerConnection, data: bytes, now: int) -> None:
        broker.outbound.begin_read(connection)
        connection.receive(data, now, now)
        broker.outbound.end_read()

    publisher, _ = connect(CLIENT)
    receivers = [connect(f"receiver-{number}") for number in range(RECEIVERS)]
    for connection, _ in receivers:
        connection.receive(encode(Subscribe(1, [Subscription("plant/#")])), 1, 1)
    broker.flush(1)
    gc.collect()
    gc.freeze()
    transports: dict[PacketWriter, _Transport] = dict(receivers)
    read = b"".join(encode(Publish("plant/line/1", VALUE, 1, packet_id=number)) for number in range(1, window + 1))
    times = []
    for turn in range(2, 2 + warm_up + reads):
        started = time.process_time_ns()
        receive(publisher, read, turn)
        outputs = broker.flush(turn)
        spent = time.process_time_ns() - started
        answers = []
        for writer, output, _ in outputs:
            transports[writer].send_now(output)
        for connection, transport in receivers:
            count, acknowledgements = transport.acknowledgements()
            assert count == window
            answers.append((connection, acknowledgements))
        started = time.process_time_ns()
        for connection, acknowledgements in answers:
            receive(connection, acknowledgements, turn)
        if turn >= 2 + warm_up:
            times.append(spent + time.process_time_ns() - started)
    return sorted(times)[len(times) // 2] / window / RECEIVERS / 1000


async def connections(window: int, reads: int, warm_up: int, *, floor: bool) -> float:
    """Processor time of a connection in us, over all ``reads``."""
    if floor:
        listening = await asyncio.get_running_loop().create_server(Accepting, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
    else:
        server = MqttServer(clock=SteppedClock().now)
        _, port = await server.start("127.0.0.1", 0)
    command = [sys.executable, "-c", _CLIENTS, str(port), str(window), str(warm_up), str(reads)]
    clients = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert clients.stdin is not None
    assert clients.stdout is not None
    await clients.stdout.readline()  # the warm-up is over
    gc.collect()
    gc.freeze()
    started = time.process_time_ns()
    clients.stdin.write(b"\n")
    await clients.stdout.readline()
    spent = time.process_time_ns() - started
    clients.stdin.close()
    await clients.wait()
    if floor:
        listening.close()
    else:
        await server.close()
    return spent / window / max(1, reads) / 1000


_CLIENTS: Final = """
import socket, sys
port, window, warm_up, reads = map(int, sys.argv[1:])
connect = [b"\\x10\\x15\\x00\\x04MQTT\\x05\\x02\\x00\\x3c\\x00\\x00\\x08in-%05d" % number for number in range(window)]

def turn():
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(window)]
    for sent, kind in ((connect, 0x20), ([b"\\xc0\\x00"] * window, 0xd0)):
        for client, packet in zip(clients, sent):
            client.sendall(packet)
        for client in clients:
            assert client.recv(256)[0] == kind
    for client in clients:
        client.sendall(b"\\xe0\\x00")
        client.close()

for count in (warm_up, reads):
    for _ in range(count):
        turn()
    print(flush=True)
    sys.stdin.readline()
"""
"""The clients of ``connect``, as a process of their own, which valgrind does not follow."""


def instructions(options: argparse.Namespace) -> int:
    """Run this module under callgrind and print what it found."""
    with tempfile.TemporaryDirectory() as folder:
        files: list[list[str]] = []
        for reads in (options.warm_up, options.warm_up + options.reads):
            # Two runs: the difference is what the measured reads cost.
            out = Path(folder) / f"callgrind.{reads}"
            command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
            if options.case != CONNECT:
                measured = MEASURED[options.through] + (COMMIT,) * (options.durability == Durability.DURABLE)
                command += ["--collect-atstart=no"]
                command += [f"--toggle-collect={each}" for each in measured]
            command += [sys.executable, "-m", "benchmarks.in_process", "--through", options.through]
            command += ["--case", options.case, "--durability", options.durability, "--window", str(options.window)]
            command += ["--warm-up", "0", "--reads", str(reads)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            report = ["callgrind_annotate", "--threshold=100", "--auto=no", "--show-percs=no"]
            for inclusive in ("no", "yes"):
                shown = subprocess.run(
                    [*report, f"--inclusive={inclusive}", str(out)], capture_output=True, text=True, check=True
                )
                files.append(shown.stdout.splitlines())
        requests = options.reads * options.window * (RECEIVERS if options.case == FANOUT else 1)
        own, whole = (_difference(files[i], files[i + 2], requests) for i in (0, 1))
        print(f"{'own':>9} {'inclusive':>9}  function")
        for name in sorted(own, key=lambda name: -own[name])[: options.top]:
            print(f"{own[name]:9.0f} {whole.get(name, 0.0):9.0f}  {name}")
        print()
        for name in sorted(whole, key=lambda name: -whole[name])[: options.top]:
            if "CPyDef" in name:
                print(f"{own.get(name, 0.0):9.0f} {whole[name]:9.0f}  {name}")
        if options.through == "server" and options.case != CONNECT:
            inside = sum(count for name, count in whole.items() if fnmatch(name, RECEIVE))
            print(f"outside of the engine's receive: {sum(own.values()) - inside:,.0f} instructions per request")
        print(f"{options.case}: {sum(own.values()):,.0f} instructions per request ({requests} requests)")
    return 0


_ROW: Final = re.compile(r"^\s*([\d,]+)\s+(\S.*)$")


def _difference(before: list[str], after: list[str], requests: int) -> dict[str, float]:
    counts: dict[str, float] = {}
    for lines, sign in ((before, -1), (after, 1)):
        for line in lines:
            row = _ROW.match(line)
            if row and "PROGRAM TOTALS" not in line and ":" in line:
                name = re.sub(r"^\S*?:|\s*\[.*\]$|'\d+", "", row[2]).strip()
                counts[name] = counts.get(name, 0.0) + sign * int(row[1].replace(",", "")) / requests
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*ARGUMENTS, FANOUT, CONNECT, "all"], default="set")
    parser.add_argument("--durability", choices=[each.value for each in Durability], default="memory")
    parser.add_argument("--window", type=int, default=16, help="requests in a read")
    parser.add_argument("--reads", type=int, default=0, help="default: 2000, with --instructions 40")
    parser.add_argument("--warm-up", type=int, default=100, help="reads before those that are measured")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--top", type=int, default=40, help="functions to print")
    parser.add_argument("--through", choices=[*MEASURED, "floor"], default="engine", help="what is called for a read")
    options = parser.parse_args()
    if options.through == "floor" and options.case != CONNECT:
        parser.error("only the case connect has a floor")
    if options.instructions:
        options.reads = options.reads or 40
        return instructions(options)
    options.reads = options.reads or 2000
    for case in [*ARGUMENTS, FANOUT, CONNECT] if options.case == "all" else [options.case]:
        if case == FANOUT:
            us = fan_out(options.window, options.reads, options.warm_up)
        elif case == CONNECT:
            floor = options.through == "floor"
            us = run(connections(options.window, options.reads, options.warm_up, floor=floor))
        else:
            us = run(measure(case, options))
        print(f"{case}, {options.durability}, {compiled.form()}: {us:.2f} us of processor time per request")
    return 0


if __name__ == "__main__":
    sys.exit(main())
