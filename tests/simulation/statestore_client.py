"""Clients of the state store, with several requests in flight each."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple, Protocol

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Disconnect, PubAck, Publish, SubAck, Subscribe, Subscription
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.statestore.binding import client_response_topic, key_of_notification, notify_filter, request
from penstock.statestore.codec.resp3 import decode_array
from penstock.statestore.hlc import Hlc, parse
from tests.simulation.history import DEL, GET, OBSERVE, SET, History, Operation, Violation
from tests.simulation.loop import WALL_MS, VirtualLoop
from tests.simulation.node import Connection, SimulatedNode

__all__ = ["CLIENTS", "KEYS", "StoreClient", "StoreStep", "store_step"]

CLIENTS = 5
KEYS = [b"key-%02d" % number for number in range(16)]
FENCED = frozenset(KEYS[-4:])
"""Keys whose changes have fencing tokens, most of them."""
WINDOW = 4
"""Requests of a client that wait for their answers at the same time."""


class StoreStep(NamedTuple):
    """An operation, and the client that sends it."""

    client: int
    kind: str
    key: bytes
    value: bytes = b""
    px: int = 0
    only_new: bool = False
    token: Hlc | None = None


def store_step(random: Random, number: int) -> StoreStep:
    """A random operation of a random client; ``number`` names its value."""
    client, key = random.randrange(CLIENTS), random.choice(KEYS)
    kind = random.choices((SET, GET, DEL, OBSERVE), (50, 30, 12, 8))[0]
    token = None
    if key in FENCED and kind in {SET, DEL} and random.random() < 0.9:
        # Tokens grow with the schedule; a client whose lease was lost uses a lower one.
        token = Hlc(WALL_MS + number - random.choice((0, 0, 0, 50, 500)), 0, "lease")
    if kind != SET:
        return StoreStep(client, kind, key, token=token)
    value = b"value-%d" % number + b"." * random.choice((0, 0, 10, 700, 3_000))
    px = random.choice((0, 0, 0, 0, 0, 5, 50, 400, 3_000))
    return StoreStep(client, kind, key, value, px, random.random() < 0.2, token)


class Simulation(Protocol):
    """What clients need of the simulation."""

    history: History
    loop: VirtualLoop
    node: SimulatedNode

    def step(self, number: int, client: StoreClient) -> None: ...

    def check_done(self) -> None: ...


class StoreClient:
    """A client that keeps up to ``WINDOW`` requests in flight, and connects again when its connection is lost."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.steps: deque[tuple[int, Operation]] = deque()
        self._simulation = simulation
        self._connection: Connection | None = None
        self._decoder = Decoder(role=Role.CLIENT)
        self._pending: dict[bytes, Operation] = {}
        self._lost: dict[bytes, Operation] = {}
        """Requests whose connection was lost. An answer that waits for its commit is sent to the next connection."""
        self._ready = False
        self._requests = 0
        self._notified: dict[bytes, Hlc] = {}

    @property
    def is_done(self) -> bool:
        return not (self.steps or self._pending)

    def connect(self) -> None:
        self._decoder = Decoder(role=Role.CLIENT)
        self._notified.clear()
        self._connection = self._simulation.node.accept(self)
        filters = [Subscription(client_response_topic(self.name), 1), Subscription(notify_filter(self.name), 1)]
        self._connection.send(encode(Connect(self.name)) + encode(Subscribe(1, filters)))

    def power_lost(self) -> None:
        """The node has ended, and nobody is told."""
        self._forget()
        self._lost.clear()

    def _forget(self) -> None:
        """Do not wait for the answers to what is in flight."""
        self._connection = None
        self._lost.update(self._pending)
        self._ready = False
        self._pending.clear()

    def cut(self) -> None:
        if self._connection is not None:
            self._connection.cut()

    def end(self) -> None:
        """End this direction of the connection: answers still arrive until the server closes it."""
        if self._connection is not None:
            self._connection.end()

    def connection_lost(self) -> None:
        self._forget()
        self._simulation.loop.soon(0.2, self.connect)
        self._simulation.check_done()

    def data_received(self, data: bytes) -> None:
        for packet in self._decoder.feed(data):
            if isinstance(packet, SubAck):
                self._ready = True
            elif isinstance(packet, Publish):
                self._received(packet)
            elif isinstance(packet, Disconnect) and packet.reason_code == ReasonCode.SERVER_SHUTTING_DOWN:
                pass  # the connection ends
            elif not isinstance(packet, ConnAck | PubAck):
                raise Violation(f"{self.name} received {packet}")
        if self._decoder.error is not None:
            raise Violation(f"{self.name} cannot read: {self._decoder.error}")
        self.send_next()

    def send_next(self) -> None:
        simulation = self._simulation
        while self._ready and self._connection is not None and self.steps and len(self._pending) < WINDOW:
            if self._connection.has_ended:
                return
            number, operation = self.steps.popleft()
            simulation.step(number, self)
            if self._connection.is_cut or self._connection.has_ended:
                return
            self._send(operation)

    def _send(self, operation: Operation) -> None:
        now_ms = self._simulation.loop.true_ms()
        self._simulation.history.sent(operation, now_ms)
        args = [operation.kind.encode(), operation.key]
        if operation.kind == SET:
            args.append(operation.value)
            args += [b"NX"] * operation.only_new
            if operation.px:
                args += [b"PX", b"%d" % operation.px]
        self._requests += 1
        correlation = b"%015d" % self._requests
        publish = request(
            args, self.name, correlation, Hlc(now_ms, 0, self.name), fencing_token=operation.token, expiry_s=100_000
        )
        publish.packet_id = self._requests % 65_535 + 1
        self._pending[correlation] = operation
        assert self._connection is not None
        self._connection.send(encode(publish))

    def _received(self, publish: Publish) -> None:
        assert self._connection is not None
        self._connection.send(encode(PubAck(publish.packet_id)))
        now_ms = self._simulation.loop.true_ms()
        version = parse(publish.properties.user_property("__ts") or "")
        history = self._simulation.history
        key = key_of_notification(publish.topic)
        if key is not None:
            assert version is not None
            words = decode_array(publish.payload)
            value = words[3] if words[1] == b"SET" else None
            history.notification(key, value, version, self._notified.get(key), now_ms)
            if value is not None:
                self._notified[key] = version
            return
        correlation = publish.properties.correlation_data or b""
        operation = self._pending.pop(correlation, None)
        if operation is None:
            operation = self._lost.pop(correlation, None)
        if operation is None:
            raise Violation(f"{self.name} received an answer to no request: {publish}")
        history.answer(operation, publish.payload, version, now_ms)
        self._simulation.check_done()
