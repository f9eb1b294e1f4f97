"""The quick way of plain GETs and SETs has the results of the full way, byte for byte, whatever is asked in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, PubAck, Publish, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.access import Access as MqttAccess
from penstock.mqtt.engine.access import Action, Answer, Credentials, Granted, Principal
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.carrying import carry
from penstock.mqtt.engine.connection import BrokerConnection
from penstock.mqtt.engine.encoded import EncodedMessage
from penstock.mqtt.engine.limits import BrokerLimits
from penstock.mqtt.service import Encoded, Inbound
from penstock.runtime.committer import GroupCommitter
from penstock.runtime.durability import Durability
from penstock.statestore.binding import INVOKE, OLDER_INVOKE
from penstock.statestore.codec.commands import Access, Extension
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.engine.answer import Context
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.prepared import PreparedRequests
from penstock.statestore.service.service import StateStoreService
from penstock.statestore.service.storage import Recovered, Storage
from tests.engine.statestore import NOW, ManualClock, ManualCommitter

_CLIENTS: Final = ("one", "two")


class _Rules:
    """May do everything but with the key ``secret``; rights of MQTT and answers are as told."""

    overheard = False

    def __init__(self) -> None:
        self.answers = True
        self.publishes = True

    def may_access(self, _context: Context, access: Access, key: bytes) -> bool:
        return key != b"secret" or access is Access.READ

    def may_answer_on(self, _context: Context, _topic: str) -> bool:
        return self.answers

    def owner(self, context: Context) -> str:
        return context.client_id

    def may_hurry(self, _context: Context) -> bool:
        return False

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        answer(Granted(_Principal(credentials.client_id)), now)

    def allowed(self, _principal: Principal, action: Action, _topic: str, _qos: int, *, retain: bool) -> bool:
        return self.publishes or action is not Action.PUBLISH


class _Principal(NamedTuple):
    name: str


class _Outlet:
    """The shell of a broker with a clock that stands still until told."""

    def __init__(self) -> None:
        self.broker: Broker | None = None
        self.now = 1_000

    @property
    def _broker(self) -> Broker:
        assert self.broker is not None
        return self.broker

    def publish(self, message: Publish) -> None:
        raise AssertionError(message)

    def respond(self, client_id: str, message: Publish, acknowledge: Callable[[], None] | None = None) -> bool:
        return self._broker.respond(client_id, message, self.now, acknowledge)

    def respond_encoded(self, client_id: str, message: Encoded, acknowledge: Callable[[], None] | None = None) -> bool:
        return self._broker.respond_encoded(client_id, message, self.now, acknowledge)

    def unheard(self, client_id: str, topic: str) -> str:
        return self._broker.unheard(client_id, topic)

    def deliver(self, client_id: str, message: Publish, *, deletes: bool) -> bool:
        return self._broker.deliver(client_id, message, self.now, deletes=deletes)

    def overhear(self, client_id: str, message: Publish) -> None:
        self._broker.overhear(client_id, message, self.now)

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        raise AssertionError((client_id, reason_code, reason_string))


class _NoStorage:
    """An empty store; the committer never writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Recovered:
        return Recovered([], None, [], [], None, None)

    def close(self) -> None: ...

    def trim(self, floor: Hlc) -> None: ...

    def when_failed(self, tell: Callable[[StorageError], None]) -> None: ...


class _Node:
    """A broker with a store, two clients of it, and all that they were sent."""

    def __init__(
        self,
        clock: ManualClock,
        rules: _Rules | None,
        limits: BrokerLimits,
        *,
        groups: bool = False,
        aliases: int | None = None,
    ) -> None:
        self.clock = clock
        self.aliases = aliases
        self.rules = rules
        self.limits = limits
        self.outlet = _Outlet()
        self.committer = ManualCommitter(groups=groups)
        self.connections: dict[str, BrokerConnection] = {}
        self.taken = 0

    async def start(self, path: Path, durability: Durability, options: StoreOptions, *, quick: bool) -> None:
        service = self.service = StateStoreService(
            path, durability, self.clock, options=options, policy=self.rules, quick=quick
        )
        self.committer.on_failure = service._failed
        service._writer.committer = cast("GroupCommitter[Sequence[Change]]", self.committer)
        service._storage = service._changelog._storage = cast("Storage", _NoStorage(path))
        await service.start(self.outlet)
        broker = self.outlet.broker = Broker(
            self.limits,
            services=[self.service],
            access=cast("MqttAccess | None", self.rules),
            new_client_id=lambda: "",
        )
        self.broker = broker
        for client_id in _CLIENTS:
            self.connect(client_id)

    def connect(self, client_id: str) -> None:
        connection = self.broker.open(client_id, self.outlet.now)
        assert connection is not None
        self.connections[client_id] = connection
        announced = Properties(topic_alias_maximum=self.aliases)
        self.receive(client_id, encode(Connect(client_id, clean_start=True, properties=announced)))
        topics = [Subscription(f"answers/{client_id}", qos=1)]
        self.receive(client_id, encode(Subscribe(1, topics)))

    def receive(self, client_id: str, data: bytes) -> None:
        connection = self.connections[client_id]
        carried = carry(connection, data, self.outlet.now)
        if carried < len(data):
            connection.receive(data[carried:], self.outlet.now, self.clock.now_ms)

    def said(self) -> list[tuple[str, bytes, bool]]:
        """What is written now, by client."""
        out = self.broker.flush(self.outlet.now)
        return sorted((connection.name, data, closing) for connection, data, closing in out)

    def state(self) -> tuple[object, ...]:
        """Everything that the two ways must agree on."""
        engine, stats = self.service._engine, self.service.stats
        counted = {name: getattr(stats, name) for name in stats.__slots__}
        counted |= {name: getattr(self.broker.stats, name) for name in ("publishes_received", "publishes_sent")}
        inflight = {name: list(c.session.inflight) if c.session else [] for name, c in self.connections.items()}
        records: dict[bytes, Record] = engine._records
        return (records, engine.clock, engine.size, counted, inflight, self.service.pending, self.committer.pending)


class _Asked(NamedTuple):
    """One step: what one client sends, and how much time passes before."""

    client: int
    command: bytes
    stamp: str
    form: str
    expiry: int | None
    token: bool
    flags: int
    wall_ms: int
    steady: int
    event: str


_KEYS = st.sampled_from([b"k", b"key2", b"secret", b"\r\n$5", b"k" * 1030])
_VALUES = st.sampled_from([b"", b"v", b"$3\r\nGET\r\n", bytes(64), b"x" * 1100])
_PLAIN = st.one_of(
    st.tuples(st.just(b"GET"), _KEYS),
    st.tuples(st.just(b"SET"), _KEYS, _VALUES),
)
_OTHERS = st.one_of(
    st.tuples(st.sampled_from([b"get", b"DEL", b"KEYNOTIFY", b"FOO", b"GET"]), st.sampled_from([b"k", b"key2", b""])),
    st.tuples(st.just(b"SET"), _KEYS, _VALUES, st.sampled_from([b"NX", b"NEX", b"nx"])),
    st.tuples(st.just(b"SET"), _KEYS, _VALUES, st.just(b"PX"), st.sampled_from([b"5", b"1000", b"0"])),
    st.tuples(st.just(b"KEYNOTIFY"), st.just(b"k"), st.just(b"STOP")),
)
_BROKEN = st.sampled_from(
    [b"", b"*2\r\n$3\r\nGET\r\n$1\r\nkk\r\n", b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\nx", b"*3\r\n$3\r\nSET\r\n"]
)
_COMMANDS = st.one_of(_PLAIN.map(encode_array), _PLAIN.map(encode_array), _OTHERS.map(encode_array), _BROKEN)
_USUAL: Final[dict[str, Any]] = {"stamp": "now", "form": "sdk", "expiry": None, "token": False, "flags": 0x32}
"""What nearly all requests of one client have in common, so that there is a shape to be learned."""
_ODD = st.fixed_dictionaries(
    {},
    optional={
        "stamp": st.sampled_from(["ahead", "edge", "behind", "bad", "short", "far", "none", "twice"]),
        "form": st.sampled_from(["sdk", "published", "older"]),
        "expiry": st.sampled_from([10, 1]),
        "token": st.booleans(),
        "flags": st.sampled_from([0x3A, 0x33, 0x30, 0x34]),
    },
)
_STAMPS = st.sampled_from(["now"] * 6 + ["ahead", "edge", "behind", "bad", "far"])


@st.composite
def _histories(draw: st.DrawFn) -> list[_Asked]:
    usual = _USUAL | {
        "form": draw(st.sampled_from(["sdk", "published", "older"])),
        "expiry": draw(st.sampled_from([None, 10, 1])),
    }
    steps = []
    for _ in range(draw(st.integers(10, 50))):
        one = usual | {"stamp": draw(_STAMPS)}
        if draw(st.integers(0, 7)) == 0:
            one |= draw(_ODD)
        steps.append(
            _Asked(
                client=int(draw(st.integers(0, 4)) == 0),
                command=draw(_COMMANDS),
                wall_ms=draw(st.sampled_from([0, 0, 1, 7, 1200, -5000])),
                steady=draw(st.sampled_from([0, 0, 1, 900])),
                event=draw(st.sampled_from(["", "", "", "commit", "commit", "acknowledge", "policy", "fail", "again"])),
                **one,
            )
        )
    return steps


def _packet(step: _Asked, number: int, now_ms: int) -> bytes:
    """The request as bytes: its properties have one length for all numbers, as those of the SDKs do."""
    client_id = _CLIENTS[step.client]
    wall = {"ahead": now_ms + 59_000, "edge": now_ms + 60_000, "far": now_ms + 60_001, "behind": 1}.get(
        step.stamp, now_ms
    )
    stamp = f"{wall:015}:{number:05}:{client_id}"
    if step.stamp == "bad":
        stamp = f"+{wall:014}:{number:05}:{client_id}"
    elif step.stamp == "short":
        stamp = f"{wall}:{number}:{client_id}"
    name = "Timestamp" if step.form == "older" else "__ts"
    user = [] if step.stamp == "none" else [(name, stamp)] * (2 if step.stamp == "twice" else 1)
    if step.form == "sdk":
        user += [("__protVer", "1.0"), ("__srcId", client_id)]
    if step.token:
        user.append(("FencingToken" if step.form == "older" else "__ft", f"{now_ms}:0:{client_id}"))
    properties = Properties(
        message_expiry_interval=step.expiry,
        response_topic=f"answers/{client_id}",
        correlation_data=number.to_bytes(16, "big"),
        user_properties=user,
    )
    qos = step.flags >> 1 & 3
    topic = OLDER_INVOKE if step.form == "older" else INVOKE
    publish = Publish(topic, step.command, qos, packet_id=number if qos else 0, properties=properties)
    publish.dup, publish.retain = step.flags & 8 != 0, step.flags & 1 != 0
    return encode(publish)


def _carry_out(node: _Node, step: _Asked, number: int) -> None:
    event, client_id = step.event, _CLIENTS[step.client]
    if event == "commit":
        node.committer.finish(1)
    elif event == "fail" and number % 7 == 0:
        node.committer.fail()
    elif event == "policy" and node.rules is not None and number % 3 == 0:
        node.rules.answers = not node.rules.answers
    elif event == "acknowledge":
        session = node.connections[client_id].session
        for packet_id in list(session.inflight) if session is not None else ():
            node.receive(client_id, encode(PubAck(packet_id)))
    elif event == "again" and number % 5 == 0:
        node.connections[client_id].lost(node.outlet.now)
        node.connect(client_id)
    data = _packet(step, number, node.clock.now_ms)
    if step.expiry is not None and step.wall_ms > 1000:
        node.clock.now_ms += 1  # the packet came in before the loop's turn came
    node.receive(client_id, data)


async def _compare(
    steps: list[_Asked],
    durability: Durability,
    options: StoreOptions,
    *,
    ruled: bool,
    limits: BrokerLimits,
    groups: bool = False,
    aliases: int | None = None,
) -> int:
    nodes = [
        _Node(ManualClock(), _Rules() if ruled else None, limits, groups=groups, aliases=aliases) for _ in range(2)
    ]
    for number, node in enumerate(nodes):
        await node.start(Path("nowhere"), durability, options, quick=number == 0)
    quick, full = nodes
    quick.taken = 0
    answers = PreparedRequests._answer

    def counting(self: PreparedRequests, *args: Any) -> None:
        quick.taken += 1
        answers(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedRequests, "_answer", counting)
        for number, step in enumerate(steps, 1):
            for node in nodes:
                node.clock.now_ms += step.wall_ms
                node.outlet.now += step.steady
                _carry_out(node, step, number)
            said = quick.said(), full.said()
            assert said[0] == said[1], (number, step)
            assert quick.state() == full.state(), (number, step)
    for node in nodes:
        node.committer.finish()
    assert quick.said() == full.said()
    assert quick.state() == full.state()
    for node in nodes:
        await node.service.close()
    return quick.taken


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DURABLE])
@pytest.mark.parametrize("ruled", [False, True])
@settings(max_examples=25)
@given(
    steps=_histories(),
    every=st.sampled_from(["plain", "quota", "history", "rate"]),
    groups=st.booleans(),
    aliases=st.sampled_from([None, 1, 32]),
)
def test_both_ways_say_and_keep_the_same(
    steps: list[_Asked],
    every: str,
    groups: bool,
    aliases: int | None,
    durability: Durability,
    ruled: bool,
) -> None:
    options = {
        "quota": StoreOptions(max_keys=2, max_bytes=1800),
        "history": StoreOptions(extensions=Extension.SCAN | Extension.RESUME | Extension.AS_OF),
    }.get(every, StoreOptions())
    limits = BrokerLimits(max_publish_rate=5, max_publish_burst=20) if every == "rate" else BrokerLimits()
    asyncio.run(_compare(steps, durability, options, ruled=ruled, limits=limits, groups=groups, aliases=aliases))


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DURABLE])
@pytest.mark.parametrize("form", ["sdk", "published", "older"])
@pytest.mark.parametrize("ruled", [False, True])
def test_plain_requests_in_a_row_do_take_the_quick_way(durability: Durability, form: str, *, ruled: bool) -> None:
    commands = [encode_array((b"SET", b"k", b"%d" % n)) if n % 2 else encode_array((b"GET", b"k")) for n in range(40)]
    event = "commit" if durability is Durability.DURABLE else ""
    steps = [_Asked(0, command, "now", form, 10, False, 0x32, 1, 0, event) for command in commands]
    taken = asyncio.run(_compare(steps, durability, StoreOptions(), ruled=ruled, limits=BrokerLimits()))
    assert taken >= 36


@pytest.mark.parametrize("command", [(b"SET", b"k", b"v"), (b"GET", b"k")])
async def test_many_requests_in_flight_take_the_quick_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[bytes, ...]
) -> None:
    """A client gives all requests that it sends at once the same time stamp; the next ones have another."""
    node = _Node(ManualClock(), None, BrokerLimits())
    await node.start(tmp_path, Durability.MEMORY, StoreOptions(), quick=True)
    taken = 0
    answer = PreparedRequests._answer

    def counting(self: PreparedRequests, *args: Any) -> None:
        nonlocal taken
        taken += 1
        answer(self, *args)

    monkeypatch.setattr(PreparedRequests, "_answer", counting)
    step = _Asked(0, encode_array(command), "now", "sdk", None, False, 0x32, 0, 0, "")
    for batch in range(20):
        numbers = range(16 * batch + 1, 16 * batch + 17)
        node.clock.now_ms += 3
        before = taken
        packets = [_packet(step, n, node.clock.now_ms).replace(b":%05d:" % n, b":00000:") for n in numbers]
        node.receive("one", b"".join(packets))
        node.receive("one", b"".join(encode(PubAck(packet_id)) for packet_id in range(1, 17)))
        assert batch < 6 or taken - before == 16, "the first hundred messages may be learned from"
    await node.service.close()


async def test_answers_to_a_client_with_topic_aliases_are_not_encoded_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """penstock's own client announces a Topic Alias Maximum."""
    node = _Node(ManualClock(), None, BrokerLimits(), aliases=32)
    await node.start(tmp_path, Durability.MEMORY, StoreOptions(), quick=True)
    completed = 0
    complete = EncodedMessage.complete

    def counting(self: EncodedMessage) -> None:
        nonlocal completed
        completed += 1
        complete(self)

    monkeypatch.setattr(EncodedMessage, "complete", counting)
    step = _Asked(0, encode_array((b"GET", b"k")), "now", "sdk", 10, False, 0x32, 0, 0, "")
    decoder = Decoder(role=Role.CLIENT)
    for number in range(1, 41):
        node.receive("one", _packet(step, number, node.clock.now_ms))
        node.receive("one", encode(PubAck(1)))
        packets = [packet for _, data, _ in node.said() for packet in decoder.feed(data)]
        (message,) = [packet for packet in packets if isinstance(packet, Publish)]
        assert (message.topic, message.properties.topic_alias) == ("answers/one" if number == 1 else "", 1)
        assert message.properties.correlation_data == number.to_bytes(16, "big")
    assert completed == 0
    await node.service.close()


async def test_a_message_that_a_rule_wants_too_goes_to_both(tmp_path: Path) -> None:
    node = _Node(ManualClock(), None, BrokerLimits())
    await node.start(tmp_path, Durability.MEMORY, StoreOptions(), quick=True)
    seen: list[bytes] = []

    class Rule:
        filters = ("#",)
        exclusive = False
        reserved = ()

        def receive(self, message: Inbound) -> None:
            seen.append(message.publish.payload)
            message.settle()

        def disconnected(self, client_id: str) -> None: ...

    get = encode_array((b"GET", b"k"))
    for number in range(1, 9):
        if number == 6:
            node.broker.add_service(Rule())
        step = _Asked(0, get, "now", "sdk", None, False, 0x32, 0, 0, "")
        node.receive("one", _packet(step, number, NOW))
    assert seen == [get] * 3
    assert node.service.stats.responses == 8
    await node.service.close()
