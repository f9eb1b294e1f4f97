"""Apache's Java client on a broker that only answers, next to penstock and Apache's server.

The floor is a broker of penstock whose connections answer most requests without handling them. A send is acknowledged
immediately with the same response; nothing is stored. The first full response to a get of a partition is stored with
its frame, and sent to every later get; likewise the response to the commit of an offset. Registrations, heartbeats and
the master are penstock's. So no broker on this event loop can serve the client in less time, and the client's rate is
its own limit.

Run as a program, it starts this server, prints the address of its master, and ends with its input; a topic with a size
has messages of that size: ``python -m benchmarks.tube_floor TOPIC[:SIZE] ...``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import servers
from benchmarks.figures import Figure, Settings
from benchmarks.machine import cpu_seconds
from benchmarks.tube import APACHE, IN_MEMORY, Peer, apache
from benchmarks.tube_loads import JavaLoads, Measured, fill
from penstock.runtime.io.files import Durability
from penstock.tube.broker.broker import TubeBroker, TubeBrokerConnection
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import decode_request, encode_response
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker.request_checks import OK
from penstock.tube.engine.broker.send_decoder import encode_sent
from penstock.tube.master.master import TubeMaster
from penstock.tube.rpc import Listeners

__all__ = ["tube_floor"]

FLOOR: Final = "floor"
SIZES: Final = (100, 1024)
CONSUMED: Final = {100: 200_000, 1024: 60_000}
"""Number of messages that a run consumes."""
STORED: Final = {100: 320_000, 1024: 80_000}
"""Number of messages in a topic: the consumed ones and more than the newest 16 MiB, which penstock has in memory."""
PARTITIONS: Final = 3
TOPICS: Final = ("sync", "s100", "s1024", "old100", "old1024")
WARM_UPS: Final = 2
FULL_BYTES: Final = 256 << 10
"""Minimum size of a response that is stored."""
_SENT: Final = bytes((8, MethodId.SEND_MESSAGE))
_ACKNOWLEDGED: Final = encode_sent(1 << 40, 1_700_000_000_000, 28 << 20, 1)[0]
_COMMITTED: Final = encode_response(
    MethodId.COMMIT_OFFSET,
    pb.CommitOffsetResponseB2C(
        success=True, errCode=ErrCode.SUCCESS, errMsg=OK, currOffset=28, maxOffset=28 << 20
    ).SerializeToString(),
)


class _FloorConnection(TubeBrokerConnection):
    """One client. ``kept``: frames of responses to gets, by topic and partition; all connections share them."""

    def __init__(self, broker: TubeBroker, kept: dict[tuple[str, int], bytearray]) -> None:
        super().__init__(broker)
        self._kept = kept

    def receive_frames(self, frames: deque[tuple[int, bytes]], end: int) -> None:
        serials: list[int] = []
        while frames:
            serial, body = frames.popleft()
            # The method follows the two heads and the length of a request, which is two bytes long for these sends.
            if body[10:12] == _SENT:
                serials.append(serial)
            else:
                self.receive(serial, body)
        if serials:
            self.put_all(serials, [_ACKNOWLEDGED] * len(serials))

    def receive(self, serial: int, body: bytes) -> None:
        request = decode_request(serial, body)
        if request.method == MethodId.COMMIT_OFFSET:
            self.put(serial, _COMMITTED)
        elif request.method == MethodId.GET_MESSAGES:
            self._get(serial, body, pb.GetMessageRequestC2B.FromString(request.payload))
        else:
            super().receive(serial, body)

    def _get(self, serial: int, body: bytes, request: pb.GetMessageRequestC2B) -> None:
        key = (request.topicName, request.partitionId)
        frame = self._kept.get(key)
        if frame is None:
            super().receive(serial, body)
            if self._out and len(self._out[-1]) >= FULL_BYTES:
                self._kept[key] = bytearray(self._out[-1])
        elif self._transport is not None:
            # A client sends the next request after it has received the response, so no part of the frame waits to be
            # sent.
            frame[4:8] = serial.to_bytes(4, "big")
            self._transport.write(frame)


class _FloorBroker(TubeBroker):
    """The broker of these connections."""

    def __init__(self, folder: Path, master: str) -> None:
        super().__init__(folder, Durability.MEMORY, masters=[master])
        kept: dict[tuple[str, int], bytearray] = {}
        self._listeners = Listeners(lambda: _FloorConnection(self, kept))


async def _serve(topics: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        master = TubeMaster(Path(folder) / "master")
        host, port = await master.start("127.0.0.1", 0)
        broker = _FloorBroker(Path(folder), f"{host}:{port}")
        await broker.start("127.0.0.1", 0)
        for text in topics:
            name, _, size = text.partition(":")
            await master.create_topic(name, partitions=PARTITIONS, ready_s=10)
            if size:
                messages = [(bytes(int(size)), 0, None)] * (2 * FULL_BYTES // int(size))
                for partition in range(PARTITIONS):
                    broker.append_run(name, partition, messages, lambda *_: None)
        await broker.committed()
        print(f"{host}:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await broker.close()
        await master.close()


@contextmanager
def _floor() -> Iterator[Peer]:
    """Run the server in a separate process."""
    topics = [f"{topic}:{topic.removeprefix('old')}" if topic.startswith("old") else topic for topic in TOPICS]
    command = [sys.executable, "-m", "benchmarks.tube_floor", *topics]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Peer(process.stdout.readline().strip(), [process.pid])
    finally:
        process.communicate(timeout=30)


def tube_floor(settings: Settings) -> list[Figure]:
    """Measure Apache's client on each server alternately: producing with 1,000 messages in flight, and consuming from
    files."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        found = stack.enter_context(apache(TOPICS))
        if found is None:
            return []
        java, theirs = found
        peers = {"penstock": stack.enter_context(_penstock(settings.durability))}
        if settings.durability != "memory":
            peers[IN_MEMORY] = stack.enter_context(_penstock("memory"))
        peers[FLOOR] = stack.enter_context(_floor())
        peers[APACHE] = theirs
        client = JavaLoads(java)
        for peer in peers.values():
            client.warm("sync", peer.master)

        compare = partial(_compare, settings.repeats, java.pid, peers)
        for size in SIZES:
            figures += compare(f"produce {size} B", partial(client.produce, f"s{size}", size, 1))
        for size in SIZES:
            for name, peer in peers.items():
                if name != FLOOR:
                    uvloop.run(fill(peer.master, f"old{size}", size, STORED[size]))
            figures += compare(f"consume {size} B from files", partial(client.consume, f"old{size}", CONSUMED[size]))
    return figures


@contextmanager
def _penstock(durability: str) -> Iterator[Peer]:
    with servers.penstock(durability, topics=TOPICS) as ready:
        yield Peer(ready["tube_master"], [int(ready["pid"])])


def _compare(
    repeats: int, client: int, peers: Mapping[str, Peer], case: str, run: Callable[[str], Measured]
) -> list[Figure]:
    """Warm up each server, then run them alternately, with the processor time of server and client per message."""
    figures = {name: Figure(case, name, "messages/s") for name in peers}
    for number in range(WARM_UPS + repeats):
        for name, peer in peers.items():
            server, both = cpu_seconds(peer.pids), cpu_seconds([client, *peer.pids])
            found = run(peer.master)
            if number >= WARM_UPS:
                figure = figures[name]
                figure.runs.append(found.value)
                figure.server_us.append((cpu_seconds(peer.pids) - server) / found.messages * 1e6)
                figure.cpu_us.append((cpu_seconds([client, *peer.pids]) - both) / found.messages * 1e6)
    return list(figures.values())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1:]))
