"""A TubeMQ broker in one process without sockets: the cost of a message that a get returns, or that a client sends.

Usage: python -m benchmarks.tube_in_process [--case fetch] [--size 1024] [--instructions [--top N]]

``fetch``: gets of one consumer of messages in segment files, each with a full answer, and the read-ahead of the next.
``send``: 250 sends in a read, durability "memory". Measured is the work of the broker's connection from the received
bytes to the write, and the read-ahead. ``--instructions`` counts the instructions of two runs under callgrind, one with
twice the reads, and prints the difference per message.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from penstock import compiled
from penstock.runtime.io.files import Durability
from penstock.runtime.io.loop import tune_process
from penstock.tube.broker.broker import TubeBroker, TubeBrokerConnection
from penstock.tube.codec.envelope import Request, encode_request
from penstock.tube.codec.framing import encode_frame
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2 as pb

TOPIC: Final = "old"
GROUP: Final = "g"
CLIENT: Final = "g_127.0.0.1-1-1-1-Pull-2.4.0"
SENDS: Final = 250
"""Number of sends in a read."""


class _Transport(asyncio.Transport):
    """Collects the output of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[bytes] = []

    def write(self, data: Any) -> None:
        """Keep ``data``."""
        self.data.append(data)

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: no socket is open."""

    def pause_reading(self) -> None:
        """Do nothing: no socket is read."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default


def _frame(serial: int, method: int, service: int, message: Any) -> bytes:
    return encode_frame(serial, encode_request(Request(serial, service, method, message.SerializeToString())))


def _send(serial: int, size: int) -> bytes:
    message = pb.SendMessageRequestP2B(
        clientId=CLIENT, topicName=TOPIC, partitionId=0, data=bytes(size), flag=0, checkSum=-1, sentAddr=0
    )
    return _frame(serial, MethodId.SEND_MESSAGE, ServiceType.BROKER_WRITE, message)


class _Client:
    """One connection to ``broker``."""

    def __init__(self, broker: TubeBroker) -> None:
        self._broker = broker
        self._transport = _Transport()
        self._connection = TubeBrokerConnection(broker)
        self._connection.connection_made(self._transport)

    def request(self, data: bytes) -> bytes:
        """Pass ``data`` to the broker, and read ahead; returns its output."""
        self._connection.data_received(data)
        ahead = self._broker.engine.fetch.ahead
        while ahead.due:
            ahead.work()
        answer = self._transport.data
        written = answer[0] if len(answer) == 1 else b"".join(answer)
        answer.clear()
        return written


async def measure(case: str, size: int, reads: int, warm_up: int, stored: int) -> tuple[float, int]:
    """Return the processor time of a message in us, the median of the reads; and the messages of all reads."""
    with tempfile.TemporaryDirectory() as folder:
        if case == "send":
            return await _sends(Path(folder), size, reads, warm_up)
        per_answer = (512 << 10) // (size + 52)
        await _sends(Path(folder), size, -(-per_answer * (max(stored, reads) + warm_up + 2) // SENDS), 0)
        return await _gets(Path(folder), reads, warm_up)


async def _sends(folder: Path, size: int, reads: int, warm_up: int) -> tuple[float, int]:
    broker = await _broker(folder)
    client = _Client(broker)
    data = b"".join(_send(serial, size) for serial in range(SENDS))
    times: list[int] = []
    for _ in range(warm_up + reads):
        started = time.process_time_ns()
        client.request(data)
        times.append(time.process_time_ns() - started)
        await broker.committed()
    await broker.close()
    return _median(times[warm_up:]) / SENDS, reads * SENDS


async def _gets(folder: Path, reads: int, warm_up: int) -> tuple[float, int]:
    broker = await _broker(folder)  # restarted, so that no message is in memory
    client = _Client(broker)
    registration = pb.RegisterRequestC2B(
        opType=31, clientId=CLIENT, groupName=GROUP, topicName=TOPIC, partitionId=0, readStatus=0
    )
    client.request(_frame(1, MethodId.PARTITION_REGISTER, ServiceType.BROKER_READ, registration))
    message = pb.GetMessageRequestC2B(
        clientId=CLIENT, partitionId=0, groupName=GROUP, topicName=TOPIC, lastPackConsumed=True,
        manualCommitOffset=False,
    )  # fmt: skip
    get = _frame(2, MethodId.GET_MESSAGES, ServiceType.BROKER_READ, message)
    times: list[int] = []
    fetched = 0
    for turn in range(warm_up + reads):
        before = broker.engine.fetch.messages
        started = time.process_time_ns()
        client.request(get)
        times.append(time.process_time_ns() - started)
        if turn >= warm_up:
            fetched += broker.engine.fetch.messages - before
    await broker.close()
    return _median(times[warm_up:]) * reads / max(fetched, 1), fetched


async def _broker(folder: Path) -> TubeBroker:
    broker = TubeBroker(folder, Durability.MEMORY)
    await broker.start("127.0.0.1", 0)
    broker.create_topic(TOPIC, partitions=1)
    return broker


def _median(times: list[int]) -> float:
    return sorted(times)[len(times) // 2] / 1000 if times else 0.0


def instructions(options: argparse.Namespace) -> int:
    """Run this module under callgrind and print the results."""
    totals: list[tuple[int, int]] = []
    for reads in (options.reads, 2 * options.reads):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-m"]
        command += ["benchmarks.tube_in_process", "--case", options.case, "--size", str(options.size)]
        command += ["--warm-up", "4", "--reads", str(reads), "--stored", str(2 * options.reads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found, messages = re.search(r"Collected : (\d+)", done.stderr), re.search(r"(\d+) messages", done.stdout)
        if found is None or messages is None:
            print(done.stderr, file=sys.stderr)
            return 1
        totals.append((int(found[1]), int(messages[1])))
    (less, few), (more, many) = totals
    print(f"{options.case}, {options.size} B: {(more - less) / (many - few):,.0f} instructions per message")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["fetch", "send"], default="fetch")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a message")
    parser.add_argument("--reads", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=4, help="reads before those that are measured")
    parser.add_argument("--stored", type=int, default=0, help="answers that are stored; default: those that are read")
    parser.add_argument("--instructions", action="store_true")
    options = parser.parse_args()
    if options.instructions:
        return instructions(options)
    tune_process()
    us, messages = asyncio.run(measure(options.case, options.size, options.reads, options.warm_up, options.stored))
    form = compiled.form()
    print(f"{options.case}, {options.size} B, {form}: {us:.2f} us of processor time per message, {messages} messages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
