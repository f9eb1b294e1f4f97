"""A broker in a process of its own, and two clients that keep their half of the protocol over its deaths.

The clients record a history.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Subscription,
)
from penstock.mqtt.codec.properties import Properties
from tests.histories.mqtt import MqttRecorder

__all__ = ["BrokerProcess", "Peer", "Reader", "Writer"]

DEADLINE_S = 30
FULL_S = 0.05
"""Time after which a client sends again to a broker that has no space."""

SERVER = """
import asyncio, json, resource, signal, sys
from pathlib import Path
from penstock.mqtt.persistence import Persistence
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability

async def main() -> None:
    if int(sys.argv[3]):
        # No file may grow beyond it: a write fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
    server = MqttServer()
    await server.recover(Persistence(Path(sys.argv[1]), Durability(sys.argv[2])))
    host, port = await server.start("127.0.0.1", 0)
    print(json.dumps({"port": port, "sessions": server.stats.sessions}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class BrokerProcess:
    """``penstock``'s MQTT server over a directory. ``largest_file``: bytes beyond which the disk is full, 0 = never."""

    def __init__(self, path: Path, durability: str) -> None:
        self.path = path
        self.durability = durability
        self.process: asyncio.subprocess.Process | None = None
        self.port = 0

    async def start(self, largest_file: int = 0) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SERVER,
            str(self.path),
            self.durability,
            str(largest_file),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            self.port = json.loads(await self.process.stdout.readline())["port"]

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        assert await self.process.wait() == -signal.SIGKILL


class Peer:
    """One client with a session that lasts; ``run`` ends with its connection."""

    def __init__(self, history: MqttRecorder, client_id: str) -> None:
        self.history = history
        self.client_id = client_id
        self.seen_before = False
        self.goodbye: Disconnect | None = None
        self.refused = 0
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, port: int) -> None:
        """Connect and talk until the connection ends."""
        try:
            reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        decoder = Decoder(role=Role.CLIENT)
        properties = Properties(session_expiry_interval=3600)
        self.send(Connect(self.client_id, clean_start=False, properties=properties))
        try:
            while data := await reader.read(65_536):
                for packet in decoder.feed(data):
                    if isinstance(packet, ConnAck):
                        if packet.reason_code:
                            self.refused = packet.reason_code
                            continue
                        # What CONNACK promised once is there after every death.
                        assert packet.session_present or not self.seen_before
                        self.seen_before = True
                        self.connected()
                    elif isinstance(packet, Disconnect):
                        self.goodbye = packet
                    else:
                        self.handle(packet)
        except ConnectionError:
            pass
        finally:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()

    def close(self) -> None:
        """Leave without a word."""
        if self._writer is not None:
            self._writer.close()

    def send(self, *packets: Packet) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(b"".join(map(encode, packets)))

    def connected(self) -> None:
        raise NotImplementedError

    def handle(self, packet: Packet) -> None:
        raise NotImplementedError


class Writer(Peer):
    """Publishes numbered messages, QoS 1 and 2 in turn, ``window`` at a time; resends what has no answer.

    ``acknowledged`` are the messages that the broker took over: PUBACK or PUBREC came.
    """

    def __init__(self, history: MqttRecorder, client_id: str, window: int = 8, topic: str = "t") -> None:
        super().__init__(history, client_id)
        self.topic = topic
        self.window = window
        self.number = 0
        self.last = 0
        """Stop there; 0: never."""
        self.acknowledged: set[str] = set()
        self.open: dict[int, Publish | None] = {}
        """Packet identifier -> the message, None after PUBREC."""
        self.may_be_full = False
        """Whether the broker may refuse messages with 0x97."""
        self.pause_s = 0.0
        """Between the end of a message and the next one, for faults that last: it saves processor time."""

    def connected(self) -> None:
        for packet_id, publish in self.open.items():
            if publish is None:
                self.send(PubRel(packet_id))
            else:
                publish.dup = True
                self.send(publish)
        self._fill()

    def handle(self, packet: Packet) -> None:
        assert isinstance(packet, PubAck | PubRec | PubComp), packet
        packet_id = packet.packet_id
        if packet.reason_code == 0x97 and self.may_be_full:
            del self.open[packet_id]
            asyncio.get_running_loop().call_later(FULL_S, self._fill)
            return
        # 0x92 answers a PUBREL that comes again, when the broker died between its commit and its PUBCOMP.
        assert packet.reason_code < 0x80 or (isinstance(packet, PubComp) and packet.reason_code == 0x92), packet
        if not isinstance(packet, PubComp):
            publish = self.open[packet_id]
            if publish is not None:
                text = publish.payload.decode()
                self.acknowledged.add(text)
                self.history.note("acknowledge", self.client_id, message=text)
        if isinstance(packet, PubRec):
            self.open[packet_id] = None
            self.send(PubRel(packet_id))
        else:
            del self.open[packet_id]
            if self.pause_s:
                asyncio.get_running_loop().call_later(self.pause_s, self._fill)
            else:
                self._fill()

    def _fill(self) -> None:
        for packet_id in self._free_ids():
            if len(self.open) >= self.window or (self.last and self.number >= self.last):
                return
            self.number += 1
            qos = 1 + self.number % 2
            text = f"{self.client_id} {qos} {self.number}"
            self.history.note("publish", self.client_id, message=text, topic=self.topic, qos=qos)
            publish = self.open[packet_id] = Publish(self.topic, text.encode(), qos, packet_id=packet_id)
            self.send(publish)

    def _free_ids(self) -> Iterator[int]:
        # Few identifiers, used again soon: a broker that forgot a PUBREL would take a new message for a repeat.
        return (packet_id for packet_id in range(1, self.window + 3) if packet_id not in self.open)


class Reader(Peer):
    """Receives at QoS 2, and knows a repeat by its identifier until PUBREL."""

    def __init__(self, history: MqttRecorder, client_id: str, topic_filter: str = "#") -> None:
        super().__init__(history, client_id)
        self.topic_filter = topic_filter
        self.received: list[str] = []
        self.unreleased: set[int] = set()
        self.subscribed = asyncio.Event()

    def connected(self) -> None:
        if not self.subscribed.is_set():
            self.history.note("subscribe", self.client_id, filter=self.topic_filter, qos=2)
        self.send(Subscribe(1, [Subscription(self.topic_filter, 2, retain_handling=2)]))

    def handle(self, packet: Packet) -> None:
        if isinstance(packet, Publish):
            if packet.qos == 1:
                self._receive(packet)
                self.send(PubAck(packet.packet_id))
                return
            if packet.packet_id not in self.unreleased:
                self.unreleased.add(packet.packet_id)
                self._receive(packet)
            self.send(PubRec(packet.packet_id))
        elif isinstance(packet, PubRel):
            self.unreleased.discard(packet.packet_id)
            self.send(PubComp(packet.packet_id))
        else:
            assert isinstance(packet, SubAck), packet
            if not self.subscribed.is_set():
                self.history.note("confirm", self.client_id)
                self.subscribed.set()

    def _receive(self, publish: Publish) -> None:
        text = publish.payload.decode()
        self.received.append(text)
        self.history.note("receive", self.client_id, message=text, topic=publish.topic, qos=publish.qos)
