"""Broker and state store in one process without sockets: what a request costs, in processor time or in instructions.

Usage: python -m benchmarks.in_process [--case set] [--durability memory] [--window 16] [--instructions [--top N]]

One client; each read holds ``--window`` requests as the SDKs write them, and the PUBACKs of the answers to the previous
read. Measured is what the shell calls for a read, in memory; a durable request also has its part of the commit.
``fanout`` is a broker alone: messages of one client to 50 others, whose PUBACKs come back; measured is one delivery.
``--instructions`` runs the same under ``valgrind --tool=callgrind`` and prints instructions per request and function:
what else runs on the machine does not move them. It needs the compiled core and valgrind.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock import compiled
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Publish, Subscribe, Subscription
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.connections.output import PacketWriter, Sink
from penstock.mqtt.engine.outlet import BrokerOutlet
from penstock.runtime.io.files import Durability
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
    "vdel": lambda key: [b"VDEL", key, b"other"],
    "nx": lambda key: [b"SET", key, VALUE, b"NX", b"PX", b"60000"],
    "fenced": lambda key: [b"SET", key, VALUE],
    "notify": lambda key: [b"KEYNOTIFY", key],
    "qos1": lambda key: [key],
}
"""Cases: the commands; ``fenced``: a SET with a fencing token; ``qos1``: a message that one client receives."""
FANOUT: Final = "fanout"
RECEIVERS: Final = 50
"""Subscribers of ``fanout``."""
KEYS: Final = 1000
MEASURED: Final = "CPyDef_*connection___BrokerConnection___receive"
"""The function in the C that mypyc makes that handles one read."""


class _Transport(Sink):
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
                if kind == 3:
                    topic = int.from_bytes(data[body : body + 2], "big")
                    found.append(b"\x40\x02" + data[body + 2 + topic : body + 4 + topic])
                position = body + size
        self.data.clear()
        return len(found), b"".join(found)


async def measure(case: str, durability: Durability, window: int, reads: int, warm_up: int) -> float:
    """Processor time of a request in us: the median of the reads."""
    with tempfile.TemporaryDirectory() as folder:
        store = StateStoreService(Path(folder) / "store", durability)
        broker = Broker(services=[store], new_client_id=lambda: "generated")
        clock = store.clock
        transport = _Transport()

        def flush() -> None:
            for _, output, _ in broker.flush(time.monotonic_ns() // 1_000_000):
                transport.send_now(output)

        await store.start(BrokerOutlet(broker, lambda: time.monotonic_ns() // 1_000_000, flush))
        connection = broker.open("in-process", time.monotonic_ns() // 1_000_000)
        assert connection is not None
        connection.sink = transport

        def receive(data: bytes) -> None:
            broker.outbound.reading = connection
            connection.receive(data, time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)
            broker.outbound.end_read()
            flush()

        receive(encode(Connect(CLIENT, keep_alive=0)))
        topics = [Subscription(client_response_topic(CLIENT)), Subscription("plant/#")]
        receive(encode(Subscribe(1, topics)))
        transport.data.clear()
        gc.collect()
        gc.freeze()
        number, acknowledgements, times = 0, b"", []
        arguments = ARGUMENTS[case]
        for turn in range(warm_up + reads):
            stamp, packets = clock(), [acknowledgements]
            for _ in range(window):
                number += 1
                if case == "qos1":
                    publish = Publish("plant/line/1", VALUE, 1)
                else:
                    publish = request(
                        arguments(b"key-%06d" % (number % KEYS)),
                        CLIENT,
                        number.to_bytes(16, "big"),
                        Hlc(stamp, number % 1000, CLIENT),
                        fencing_token=Hlc(stamp, 1, CLIENT) if case == "fenced" else None,
                        expiry_s=10,
                    )
                publish.packet_id = 1 + number % 65_535
                packets.append(encode(publish))
            read = b"".join(packets)
            started = time.process_time_ns()
            receive(read)
            answered, acknowledgements = transport.acknowledgements()
            while answered < window:
                await asyncio.sleep(0.0002)  # not busily: that would count as the request's
                flush()
                more, rest = transport.acknowledgements()
                answered += more
                acknowledgements += rest
            if turn >= warm_up:
                times.append(time.process_time_ns() - started)
        connection.lost(time.monotonic_ns() // 1_000_000)
        await store.close()
        return sorted(times)[len(times) // 2] / window / 1000


def fan_out(window: int, reads: int, warm_up: int) -> float:
    """Processor time of a delivery in us: the median of the reads of the publisher."""
    broker = Broker(new_client_id=lambda: "generated")

    def connect(client_id: str) -> tuple[BrokerConnection, _Transport]:
        connection = broker.open("in-process", 1)
        assert connection is not None
        connection.sink = transport = _Transport()
        connection.receive(encode(Connect(client_id, keep_alive=0)), 1, 1)
        return connection, transport

    def receive(connection: BrokerConnection, data: bytes, now: int) -> None:
        broker.outbound.reading = connection
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


def instructions(options: argparse.Namespace) -> int:
    """Run this module under callgrind and print what it found."""
    with tempfile.TemporaryDirectory() as folder:
        files: list[list[str]] = []
        for reads in (options.warm_up, options.warm_up + options.reads):
            # Two runs: the difference is what the measured reads cost.
            out = Path(folder) / f"callgrind.{reads}"
            command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--collect-atstart=no"]
            command += [f"--toggle-collect={MEASURED}", sys.executable, "-m", "benchmarks.in_process"]
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
    parser.add_argument("--case", choices=[*ARGUMENTS, FANOUT, "all"], default="set")
    parser.add_argument("--durability", choices=[each.value for each in Durability], default="memory")
    parser.add_argument("--window", type=int, default=16, help="requests in a read")
    parser.add_argument("--reads", type=int, default=0, help="default: 2000, with --instructions 40")
    parser.add_argument("--warm-up", type=int, default=100, help="reads before those that are measured")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--top", type=int, default=40, help="functions to print")
    options = parser.parse_args()
    if options.instructions:
        options.reads = options.reads or 40
        return instructions(options)
    reads = options.reads or 2000
    for case in [*ARGUMENTS, FANOUT] if options.case == "all" else [options.case]:
        if case == FANOUT:
            us = fan_out(options.window, reads, options.warm_up)
        else:
            us = asyncio.run(measure(case, Durability(options.durability), options.window, reads, options.warm_up))
        print(f"{case}, {options.durability}, {compiled.form()}: {us:.2f} us of processor time per request")
    return 0


if __name__ == "__main__":
    sys.exit(main())
