"""A broker engine and clients made of packets: no sockets, time by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Packet, Publish, SubAck, Subscribe, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.version311 import encode_311
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.access import LOCAL, Access, Origin
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.session import SessionConnection
from penstock.mqtt.service import Inbound, Service

__all__ = ["Bench", "Peer", "RecordingService"]


class RecordingService(Service):
    """Keeps what it is handed; the test settles."""

    def __init__(self, *filters: str, exclusive: bool = False, reserved: Sequence[str] = ()) -> None:
        self._filters = filters
        self._exclusive = exclusive
        self._reserved = reserved
        self.taken: list[Inbound] = []
        self.gone: list[str] = []

    @property
    def filters(self) -> Sequence[str]:
        return self._filters

    @property
    def exclusive(self) -> bool:
        return self._exclusive

    @property
    def reserved(self) -> Sequence[str]:
        return self._reserved

    def receive(self, message: Inbound) -> None:
        self.taken.append(message)

    def disconnected(self, client_id: str) -> None:
        self.gone.append(client_id)


class Peer:
    """One network connection as its client sees it."""

    def __init__(self, bench: Bench, connection: BrokerConnection) -> None:
        self.bench = bench
        self.connection = connection
        self.decoder = Decoder(role=Role.CLIENT)
        self.version = 5
        self.inbox: list[Packet] = []
        self.closed = False

    def send(self, *packets: Packet) -> Peer:
        """Send packets in one piece."""
        return self.send_bytes(b"".join(map(encode if self.version == 5 else encode_311, packets)))

    def speak_311(self) -> Peer:
        """Be a client of MQTT 3.1.1 from here on."""
        self.version = self.decoder.version = 4
        return self

    def send_bytes(self, data: bytes) -> Peer:
        """Send bytes; they are handled in as many turns as their work takes."""
        self.connection.receive(data, self.bench.now, 1_000_000 + self.bench.now)
        while self.connection.unread:
            self.connection.proceed(self.bench.now, 1_000_000 + self.bench.now)
        return self

    def take(self) -> list[Packet]:
        """What came since the last time, in order."""
        self.bench.flush()
        taken, self.inbox = self.inbox, []
        return taken

    def only(self) -> Packet:
        """The one packet that came."""
        (packet,) = self.take()
        return packet

    def publishes(self) -> list[Publish]:
        """What came, all of it messages."""
        taken = self.take()
        assert all(isinstance(packet, Publish) for packet in taken), taken
        return [packet for packet in taken if isinstance(packet, Publish)]

    def topics(self) -> list[str]:
        return [publish.topic for publish in self.publishes()]

    def subscribe(self, *filters: str | Subscription, identifier: int = 0) -> list[int]:
        wanted = [Subscription(f) if isinstance(f, str) else f for f in filters]
        properties = Properties(subscription_identifiers=[identifier] if identifier else [])
        self.send(Subscribe(next(self.bench.packet_ids) % 65_535 + 1, wanted, properties))
        self.bench.flush()
        ack = self.inbox.pop(0)
        assert isinstance(ack, SubAck), ack
        return ack.reason_codes

    def drop(self) -> None:
        """The network connection is gone without a word, after what was sent so far."""
        self.bench.flush()
        self.closed = True
        self.connection.lost(self.bench.now)


class Bench:
    """A broker and its time."""

    def __init__(
        self, *services: RecordingService, limits: BrokerLimits | None = None, access: Access | None = None
    ) -> None:
        self.now = 1_000
        self.ended: list[int] = []
        self.wakes = 0
        ids = count(1)
        self.packet_ids = count(1)
        self.broker = Broker(
            limits,
            services=services,
            access=access,
            new_client_id=lambda: f"assigned-{next(ids)}",
            wake=self._wake,
            report=lambda _connection, code, _why: self.ended.append(code),
        )
        self.peers: dict[SessionConnection, Peer] = {}

    def _wake(self) -> None:
        self.wakes += 1

    def flush(self) -> None:
        while outputs := self.broker.flush(self.now):
            for connection, data, close in outputs:
                peer = self.peers[connection]
                assert not peer.closed or not data, "nothing is sent after the close"
                peer.inbox += peer.decoder.feed(data)
                if peer.decoder.error is not None:
                    raise peer.decoder.error
                if close and not peer.closed:
                    peer.closed = True
                    peer.connection.lost(self.now)

    def advance(self, ms: int) -> None:
        """Let time pass, deadline by deadline."""
        end = self.now + ms
        while (deadline := self.broker.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.broker.tick(self.now)
        self.now = end
        self.flush()

    def open(self, origin: Origin = LOCAL) -> Peer:
        """A network connection without CONNECT."""
        connection = self.broker.open("test", self.now, origin=origin)
        assert connection is not None
        peer = Peer(self, connection)
        self.peers[connection] = peer
        return peer

    def connect(
        self,
        client_id: str = "c",
        *,
        clean_start: bool = True,
        expiry: int | None = None,
        keep_alive: int = 0,
        will: Will | None = None,
        username: str | None = None,
        version: int = 5,
        origin: Origin = LOCAL,
        **properties: int | str | bytes | None,
    ) -> Peer:
        """A connected client; its CONNACK is kept in ``bench.connack``.

        It wants no Reason Strings unless the test asks for them, so that packets compare by what matters.
        """
        peer = self.open(origin)
        if version != 5:
            peer.speak_311()
        given = Properties(session_expiry_interval=expiry, request_problem_information=0)
        for name, value in properties.items():
            setattr(given, name, value)
        peer.send(Connect(client_id, clean_start, keep_alive, username, None, will, given, version))
        self.flush()
        connack = peer.inbox.pop(0)
        assert isinstance(connack, ConnAck)
        assert connack.reason_code == 0, connack
        self.connack = connack
        return peer
