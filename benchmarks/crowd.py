"""Many MQTT clients in one event loop, which connect, publish to themselves, and reconnect after a restart.

A client is a protocol of the loop with a decoder, so that ten thousand of them cost this process less than the broker.
A connection that is refused or closed before CONNACK is retried after a random delay, as real clients do.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import random
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Auth, ConnAck, Connect, Packet, PubAck, Publish, SubAck, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties

__all__ = ["Crowd", "User", "connect", "traffic"]

CONNECTING: Final = 500
"""Number of connections that are opened at the same time."""
SHORTEST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0
"""Limits of the random delay before a connection is retried."""
SCRAM: Final = "SCRAM-SHA-256"


@dataclass
class User:
    """A user that authenticates with SCRAM-SHA-256. The key is derived once for all clients."""

    name: str
    password: str
    _salted: dict[tuple[bytes, int], bytes] = field(default_factory=dict)

    def first(self, nonce: str) -> str:
        """The client-first message without its header [RFC 5802 section 7]."""
        return f"n={self.name},r={nonce}"

    def proof(self, first: str, challenge: str) -> bytes:
        """The client-final message that answers the server's ``challenge``."""
        parts = dict(part.split("=", 1) for part in challenge.split(","))
        of_key = (base64.b64decode(parts["s"]), int(parts["i"]))
        if of_key not in self._salted:
            self._salted[of_key] = hashlib.pbkdf2_hmac("sha256", self.password.encode(), *of_key)
        key = hmac.digest(self._salted[of_key], b"Client Key", "sha256")
        final = f"c=biws,r={parts['r']}"
        signed = hmac.digest(hashlib.sha256(key).digest(), f"{first},{challenge},{final}".encode(), "sha256")
        proof = bytes(a ^ b for a, b in zip(key, signed, strict=True))
        return f"{final},p={base64.b64encode(proof).decode()}".encode()


@dataclass
class Crowd:
    """The clients ``crowd-00000`` and so on of one broker, and their results."""

    address: str
    tls: ssl.SSLContext | None = None
    user: User | None = None
    session_s: int = 3600
    """Session Expiry Interval of the clients; 0: their sessions end with their connections."""
    present: int = 0
    """Number of sessions that the broker still had."""
    clients: list[_Client] = field(default_factory=list)
    """The connected clients."""

    def leave(self) -> None:
        """Close all connections, without DISCONNECT."""
        for client in self.clients:
            client.transport.abort()
        self.clients.clear()


class _Client(asyncio.Protocol):
    """One connection. ``ready`` gets Session Present after the client has subscribed to its own topic."""

    transport: asyncio.Transport

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.number = number
        self.topic = f"crowd/{number}"
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.sent: dict[int, float] = {}
        """Times of messages that have not arrived yet, by packet identifier."""
        self.latencies: list[float] = []
        self._crowd = crowd
        self._decoder = Decoder(role=Role.CLIENT)
        self._first = ""
        self._present = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        properties = Properties(session_expiry_interval=self._crowd.session_s)
        if (user := self._crowd.user) is not None:
            self._first = user.first(f"{random.getrandbits(96):x}")
            properties.authentication_method = SCRAM
            properties.authentication_data = f"n,,{self._first}".encode()
        self._send(Connect(f"crowd-{self.number:05d}", clean_start=False, keep_alive=0, properties=properties))

    def data_received(self, data: bytes) -> None:
        for packet in self._decoder.feed(data):
            self._handle(packet)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc or "closed"))

    def publish(self, packet_id: int) -> None:
        """Publish a message of QoS 1 that the broker delivers to this client."""
        self.sent[packet_id] = time.perf_counter()
        self._send(Publish(self.topic, packet_id.to_bytes(2, "big"), 1, packet_id=packet_id))

    def _handle(self, packet: Packet) -> None:
        match packet:
            case Publish():
                sent = self.sent.pop(int.from_bytes(packet.payload, "big"))
                self.latencies.append(time.perf_counter() - sent)
                self._send(PubAck(packet.packet_id))
            case Auth():
                user, challenge = self._crowd.user, packet.properties.authentication_data
                assert user is not None
                assert challenge is not None
                data = user.proof(self._first, challenge.decode())
                self._send(Auth(0x18, Properties(authentication_method=SCRAM, authentication_data=data)))
            case ConnAck():
                self._present = packet.session_present
                if packet.reason_code:
                    self._fail(f"CONNACK with 0x{packet.reason_code:02x}")
                elif packet.session_present:
                    self._is_ready()
                else:
                    self._send(Subscribe(1, [Subscription(self.topic, 1)]))
            case SubAck():
                self._is_ready()

    def _is_ready(self) -> None:
        if not self.ready.done():
            self.ready.set_result(self._present)

    def _fail(self, reason: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(reason))

    def _send(self, packet: Packet) -> None:
        self.transport.write(encode(packet))


async def connect(crowd: Crowd, numbers: Sequence[int], deadline_s: float = 120) -> None:
    """Connect the clients of these ``numbers``, ``CONNECTING`` at a time; return when all have their session.

    Raises:
        SystemExit: not all are connected in time.
    """
    turn = asyncio.Semaphore(CONNECTING)
    try:
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(*(_connect(crowd, number, turn) for number in numbers))
    except TimeoutError:
        raise SystemExit(f"{len(crowd.clients)} of {len(numbers)} clients connected in {deadline_s:g} s") from None


async def _connect(crowd: Crowd, number: int, turn: asyncio.Semaphore) -> None:
    loop = asyncio.get_running_loop()
    host, _, port = crowd.address.rpartition(":")
    server = host if crowd.tls is not None else None
    while True:
        async with turn:
            try:
                _, client = await loop.create_connection(
                    lambda: _Client(crowd, number), host, int(port), ssl=crowd.tls, server_hostname=server
                )
                was_present = await client.ready
            except OSError:
                pass
            else:
                crowd.present += was_present
                crowd.clients.append(client)
                return
        await asyncio.sleep(random.uniform(SHORTEST_DELAY_S, LONGEST_DELAY_S))


async def traffic(clients: Sequence[_Client], seconds: float) -> list[float]:
    """Have each client publish to itself every second, evenly distributed; the latencies in ms, sorted.

    Raises:
        SystemExit: messages did not arrive within ten seconds.
    """
    pause, end, packet_id = 1 / len(clients), time.perf_counter() + seconds, 0
    for client in clients:
        client.latencies.clear()
    due = time.perf_counter()
    while due < end:
        packet_id = packet_id % 60_000 + 1
        for client in clients:
            client.publish(packet_id)
            due += pause
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
    for _ in range(100):
        if not any(client.sent for client in clients):
            return sorted(1000 * latency for client in clients for latency in client.latencies)
        await asyncio.sleep(0.1)
    raise SystemExit(f"{sum(len(client.sent) for client in clients)} messages were not delivered")
