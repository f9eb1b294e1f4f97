"""Clients of TubeMQ: producers, the members of a consumer group, and a reader of the whole log.

They are callbacks around the state machines of the production clients, and outlive the node. A client whose connection
to the master or the broker ends loses both, and joins again as a process that was started anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message as Protobuf

from penstock.errors import PenstockError, UnavailableError
from penstock.tube.client.fetcher import Message, decode_messages
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import payload_of
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import BrokerInfo, Partition, partition_ids
from penstock.tube.engine.client.consumer_state import (
    FetchStep,
    GroupStart,
    Membership,
    PartitionConsumer,
    PartitionOrders,
)
from penstock.tube.engine.client.producer_state import Routes, SendEncoder
from penstock.tube.engine.client.request_session import Outcome, RequestSession
from tests.histories.tube import TubeHistory
from tests.simulation.disk import PowerLoss
from tests.simulation.history import History, Violation
from tests.simulation.loop import WALL_MS, VirtualLoop
from tests.simulation.network import Address, NetworkEnd

__all__ = [
    "BROKER",
    "CAPTURED",
    "CAPTURED_TOPICS",
    "LOG",
    "MASTER",
    "PARTITIONS",
    "PRODUCERS",
    "LogHistory",
    "TubeAuditor",
    "TubeConsumer",
    "TubeProducer",
    "TubeStep",
    "tube_step",
]

HOST = "192.0.2.2"
MASTER = (HOST, 8715)
BROKER = (HOST, 8123)
LOG = "log"
"""The topic of the producers."""
CAPTURED = "captured"
"""The topic that the rules write to."""
CAPTURED_TOPICS = ("t/0", "t/1")
"""Topics of MQTT that rules copy to it."""
PARTITIONS = {LOG: 3, CAPTURED: 1}
GROUP = "group"
REQUEST_S = 10.0
HEARTBEAT_S = 8.0
LEASE_S = 20.0
"""Time since its last answer in which a broker keeps a partition for a member that is connected."""
LONG_POLL_MS = 25_000
WINDOW = 4


class ProducerKind(NamedTuple):
    """``repeats``: send a message again whose answer is unknown; ``numbers``: the broker stores each number once."""

    name: str
    repeats: bool = False
    numbers: bool = False


PRODUCERS = [ProducerKind("once"), ProducerKind("repeating", repeats=True), ProducerKind("idempotent", numbers=True)]
CONSUMERS = 2


class TubeStep(NamedTuple):
    """One operation of a client; those of consumers have the numbers after the producers."""

    client: int
    kind: str
    partition: int = 0
    padding: int = 0
    away_s: float = 0.0


def tube_step(random: Random) -> TubeStep:
    """A random operation of a random client."""
    if random.random() < 0.03:
        client = len(PRODUCERS) + random.randrange(CONSUMERS)
        kind = random.choices(("cut", "end", "silence", "leave", "steal"), (1.5, 1.5, 1, 2, 4))[0]
        return TubeStep(client, kind, random.randrange(PARTITIONS[LOG]), away_s=random.choice((0.01, 1.0, 10.0, 50.0)))
    client = random.randrange(len(PRODUCERS))
    if random.random() < 0.01:
        return TubeStep(client, random.choice(("cut", "end", "silence")))
    return TubeStep(client, "send", random.randrange(PARTITIONS[LOG]), random.choice((0, 0, 10, 700, 3_000)))


class LogHistory(TubeHistory):
    """Messages of the log, and what its clients have read; every event is part of the trace.

    Messages of MQTT in ``captured_topics`` are among them: rules copy them to the log.
    """

    def __init__(self, history: History, captured_topics: tuple[str, ...]) -> None:
        super().__init__()
        self.captured_topics = captured_topics
        self._transmissions: Counter[tuple[str, int]] = Counter()
        """How often each captured message was sent to the MQTT broker."""
        self._history = history

    def transmit(self, client: str, number: int) -> None:
        """A message of a captured topic is sent to the MQTT broker, perhaps again."""
        if not self._transmissions[client, number]:
            self.send(client, number, repeats=True)
        self._transmissions[client, number] += 1

    def check_captured(self) -> None:
        """No captured message is in the log more often than it was sent."""
        for message, copies in Counter(self.stored.values()).items():
            sent = self._transmissions.get(message)
            if sent is not None and copies > sent:
                raise Violation(f"{message} was sent {sent} times, and is in the log {copies} times")

    def apply(self, event: dict[str, Any]) -> None:
        self._history.note(f"log {sorted(event.items())}")
        super().apply(event)


class Simulation(Protocol):
    """What clients need of the simulation."""

    history: History
    tube: LogHistory
    loop: VirtualLoop

    def check_done(self) -> None: ...

    def check_failed(self) -> None: ...


Done = Callable[[Outcome], None]
M = TypeVar("M", bound=Protobuf)


class _Connection:
    """One connection of a client, with requests in flight. ``lost`` is called when it has ended."""

    def __init__(self, loop: VirtualLoop, address: Address, lost: Callable[[], None]) -> None:
        self._loop = loop
        self._session: RequestSession[Done] = RequestSession(f"{address[0]}:{address[1]}")
        self._lost = lost
        self._is_watched = False
        self.end: NetworkEnd | None = None
        try:
            self.end = loop.network.connect(address, self)
        except ConnectionRefusedError:
            loop.soon(0.1, self.connection_lost, None)

    def request(self, service: int, method: int, payload: bytes, done: Done, wait_s: float = 0.0) -> None:
        """Send a request; ``done`` gets its response, or the reason why there is none."""
        timeout_s = REQUEST_S + wait_s
        _, frame = self._session.request(service, method, payload, done, timeout_s, self._loop.time())
        if not self._is_watched:
            self._is_watched = True
            self._loop.call_later(timeout_s, self._watch)
        if self.end is not None:
            self.end.write(frame)

    def call(
        self, service: int, method: MethodId, message: Protobuf, kind: type[M], done: Callable[[M], None],
        wait_s: float = 0.0,
    ) -> None:  # fmt: skip
        """As :meth:`request`, for messages; without a response the connection has ended."""

        def answered(outcome: Outcome) -> None:
            if not isinstance(outcome, PenstockError):
                done(decode(kind, payload_of(outcome, method, self._session.peer)))

        self.request(service, method, message.SerializeToString(), answered, wait_s)

    def cut(self) -> None:
        if self.end is not None:
            self.end.abort()

    def connection_made(self, _transport: asyncio.BaseTransport) -> None: ...

    def data_received(self, data: bytes) -> None:
        answered = iter(self._session.receive(data))
        try:
            for done, outcome in answered:
                done(outcome)
        except PowerLoss:
            # The session has forgotten the requests of the other responses: they would stay in flight for ever.
            for done, _ in answered:
                done(UnavailableError("the node lost power"))
            raise
        if self._session.error is not None:
            raise Violation(f"a client cannot read: {self._session.error}")

    def eof_received(self) -> None: ...

    def connection_lost(self, _exc: Exception | None) -> None:
        self.close()
        self._lost()

    def close(self) -> None:
        """Every request is without a response."""
        for done, outcome in self._session.close(UnavailableError("the connection ended")):
            done(outcome)

    def _watch(self) -> None:
        """Cut the connection if a request has no response in time."""
        deadline_s = self._session.next_deadline()
        self._is_watched = deadline_s is not None
        if deadline_s is None:
            return
        if deadline_s <= self._loop.time():
            self.cut()
        else:
            self._loop.call_at(deadline_s, self._watch)


class _Attachment:
    """The connections of one life of a client."""

    def __init__(self, client: _Client) -> None:
        self.client = client
        loop = client.simulation.loop
        self.master = _Connection(loop, MASTER, self.lost)
        self.broker = _Connection(loop, BROKER, self.lost)

    def lost(self) -> None:
        if self.client.attachment is self:
            self.client.connection_lost()


class _Client:
    """Joins, and joins again when a connection was lost."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.steps: deque[TubeStep] = deque()
        self.attachment: _Attachment | None = None
        self._away_s = 0.0

    @property
    def is_done(self) -> bool:
        return self.attachment is not None

    def connect(self) -> None:
        self.simulation.check_failed()
        self.attachment = attachment = _Attachment(self)
        self.simulation.history.note(f"{self.simulation.loop.true_ms()} {self.name} connects")
        self.join(attachment)

    def connection_lost(self) -> None:
        attachment, self.attachment = self.attachment, None
        if attachment is not None:
            for connection in (attachment.master, attachment.broker):
                connection.cut()
                connection.close()
        self.left()
        loop = self.simulation.loop
        loop.soon(self._away_s + 0.2, self._connect_unless_connected)
        self._away_s = 0.0

    def power_lost(self) -> None:
        """The node has ended; its last answers are lost."""
        attachment, self.attachment = self.attachment, None
        if attachment is not None:
            attachment.master.close()
            attachment.broker.close()
        self.left()

    def join(self, attachment: _Attachment) -> None:
        raise NotImplementedError

    def left(self) -> None:
        """The connections have ended."""

    def _connect_unless_connected(self) -> None:
        if self.attachment is None:
            self.connect()

    def _fault(self, attachment: _Attachment, step: TubeStep) -> None:
        """Cut the connection to the broker, end its direction, let it fall silent, or leave without a word."""
        self._away_s = step.away_s if step.kind == "leave" else 0.0
        end = attachment.broker.end
        if end is not None and step.kind == "silence":
            end.fall_silent()
        elif end is not None and step.kind == "end":
            end.write_eof()
        else:
            self.connection_lost()


class _Outgoing:
    """A message without an outcome."""

    __slots__ = ("data", "number", "partition", "sequence")

    def __init__(self, number: int, partition: int, data: bytes, sequence: int) -> None:
        self.number = number
        self.partition = partition
        self.data = data
        self.sequence = sequence


class TubeProducer(_Client):
    """A producer. Its messages are sent in order, one at a time if they are numbered."""

    def __init__(self, simulation: Simulation, kind: ProducerKind, number: int) -> None:
        super().__init__(simulation, kind.name)
        self._kind = kind
        self._id = number + 1
        self._routes = Routes(self.name, "192.0.2.1")
        self._encoder = SendEncoder(self.name, 0)
        self._numbers = 0
        self._sequences: Counter[int] = Counter()
        self._again: deque[_Outgoing] = deque()
        self._in_flight = 0
        self._is_held = False
        self._window = 1 if kind.numbers else WINDOW

    @property
    def is_done(self) -> bool:
        return self.attachment is not None and not (self.steps or self._again or self._in_flight)

    def join(self, attachment: _Attachment) -> None:
        routes = self._routes = Routes(self.name, "192.0.2.1")
        routes.topics.add(LOG)

        def registered(answer: master_pb2.RegisterResponseM2P) -> None:
            if answer.errCode == ErrCode.SUCCESS:
                routes.registered(answer)
                beat()
            else:
                attachment.lost()

        def beat() -> None:
            if self.attachment is attachment:
                attachment.master.call(
                    ServiceType.MASTER,
                    MethodId.PRODUCER_HEARTBEAT,
                    routes.heartbeat(),
                    master_pb2.HeartResponseM2P,
                    heard,
                )

        def heard(answer: master_pb2.HeartResponseM2P) -> None:
            if answer.errCode == ErrCode.HB_NO_NODE:
                attachment.lost()
            elif answer.errCode == ErrCode.SUCCESS:
                routes.heartbeat_answered(answer)
                self.send_next()
            self.simulation.loop.call_later(HEARTBEAT_S if routes.partitions(LOG) else 0.1, beat)

        attachment.master.call(
            ServiceType.MASTER,
            MethodId.PRODUCER_REGISTER,
            routes.register(),
            master_pb2.RegisterResponseM2P,
            registered,
        )

    def left(self) -> None:
        self._is_held = False
        self.simulation.check_done()

    def send_next(self) -> None:
        """Send while the window has room."""
        while self.attachment is not None and not self._is_held and self._in_flight < self._window:
            known = self._routes.partitions(LOG)
            if not known:
                return
            if self._again:
                self._send(self.attachment, self._again.popleft(), known)
            elif self.steps:
                self._step(self.attachment, self.steps.popleft(), known)
            else:
                self.simulation.check_done()
                return

    def _step(self, attachment: _Attachment, step: TubeStep, known: list[Partition]) -> None:
        self.simulation.check_failed()
        if step.kind != "send":
            self._fault(attachment, step)
            return
        self._numbers += 1
        partition = known[step.partition].id
        data = f"{self.name} {self._numbers} ".encode() + b"." * step.padding
        outgoing = _Outgoing(self._numbers, partition, data, self._sequences[partition])
        self._sequences[partition] += 1
        self.simulation.tube.send(self.name, self._numbers, f"{LOG}:{partition}", repeats=self._kind.repeats)
        self._send(attachment, outgoing, known)

    def _send(self, attachment: _Attachment, outgoing: _Outgoing, known: list[Partition]) -> None:
        target = next(partition for partition in known if partition.id == outgoing.partition)
        request = self._encoder.one(target, outgoing.data, 0, None, None, (self._routes.token, ""))
        if self._kind.numbers:
            request = self._encoder.numbered(request, self._id, outgoing.sequence, outgoing.sequence)
        self._in_flight += 1
        attachment.broker.request(
            ServiceType.BROKER_WRITE, MethodId.SEND_MESSAGE, request, lambda outcome: self._answered(outgoing, outcome)
        )

    def _answered(self, outgoing: _Outgoing, outcome: Outcome) -> None:
        self._in_flight -= 1
        if isinstance(outcome, PenstockError):
            if self._kind.repeats or self._kind.numbers:
                self._again.append(outgoing)
            return
        answer = decode(broker_pb2.SendMessageResponseB2P, payload_of(outcome, MethodId.SEND_MESSAGE, "broker"))
        if answer.errCode == ErrCode.SUCCESS:
            known = not answer.result.duplicates
            offset = answer.appendOffset if known else None
            partition = f"{LOG}:{outgoing.partition}"
            self.simulation.tube.acknowledge(self.name, outgoing.number, partition, offset)
        else:
            if self._kind.repeats or self._kind.numbers:
                self._again.append(outgoing)
            self._is_held = True
            self.simulation.loop.call_later(0.3, self._continue, self.attachment)
        self.send_next()

    def _continue(self, attachment: _Attachment | None) -> None:
        if self.attachment is attachment:
            self._is_held = False
            self.send_next()


class _Read:
    """One partition that a client reads, until its connections end or it is released."""

    def __init__(self, client: _Reader, attachment: _Attachment, consumer: PartitionConsumer) -> None:
        self.client = client
        self.attachment = attachment
        self.consumer = consumer
        self.ended = False
        self.heard_s = 0.0
        """When the broker last answered a request for it."""
        self.name = f"{consumer.partition.topic}:{consumer.partition.id}"

    def go_on(self) -> None:
        client, loop = self.client, self.client.simulation.loop
        if self.ended or client.attachment is not self.attachment:
            return
        consumer = self.consumer
        step = consumer.next_step(loop.true_ms())
        if step is FetchStep.WAIT:
            loop.call_later((consumer.ready_at - loop.true_ms()) / 1000 + 0.001, self.go_on)
        elif step is FetchStep.REGISTER:
            request = client.member.partition_register(
                consumer.partition, consumer.read_status, leave=False, offset=consumer.start_offset
            )
            sent_s = loop.time()
            self._call(
                MethodId.PARTITION_REGISTER, request, broker_pb2.RegisterResponseB2C,
                lambda answer: self._registered(answer, sent_s),
            )  # fmt: skip
        else:
            request_get = consumer.get_request(client.name, client.member.group)
            get_s = loop.time()
            self._call(
                MethodId.GET_MESSAGES, request_get, broker_pb2.GetMessageResponseB2C,
                lambda answer: self._got(answer, get_s), request_get.maxWaitMs / 1000,
            )  # fmt: skip

    def release(self) -> None:
        """Give the partition back."""
        self.ended = True
        request = self.client.member.partition_register(self.consumer.partition, 1, leave=True)
        self._call(MethodId.PARTITION_REGISTER, request, broker_pb2.RegisterResponseB2C, lambda _: None)

    def confirm(self, messages: list[Message], done: Callable[[], None]) -> None:
        """Store the offset after the last of ``messages``."""
        end = messages[-1].offset
        assert end is not None
        request = broker_pb2.CommitOffsetRequestC2B(
            clientId=self.client.name, topicName=self.consumer.partition.topic, lastPackConsumed=True,
            partitionId=self.consumer.partition.id, groupName=self.client.member.group,
            confirmedOffset=end + INDEX_RECORD_BYTES,
        )  # fmt: skip
        self.client.simulation.tube.confirm(self.client.reader, self.name, end, asked=True)

        def answered(answer: broker_pb2.CommitOffsetResponseB2C) -> None:
            history = self.client.simulation.history
            history.note(f"{self.client.name} confirms {self.name} {request.confirmedOffset}: {answer.errCode}")
            if answer.errCode == ErrCode.SUCCESS:
                self.client.simulation.tube.confirm(self.client.reader, self.name, end)
            done()

        self._call(MethodId.COMMIT_OFFSET, request, broker_pb2.CommitOffsetResponseB2C, answered)

    def _call(
        self, method: MethodId, request: Protobuf, kind: type[M], done: Callable[[M], None], wait_s: float = 0.0
    ) -> None:
        def answered(answer: M) -> None:
            self.heard_s = self.client.simulation.loop.time()
            if self.client.attachment is self.attachment:
                done(answer)

        self.attachment.broker.call(ServiceType.BROKER_READ, method, request, kind, answered, wait_s)

    def _registered(self, answer: broker_pb2.RegisterResponseB2C, sent_s: float) -> None:
        loop = self.client.simulation.loop
        client = self.client
        client.simulation.history.note(
            f"{loop.true_ms()} {client.name} registers {self.name}: {answer.errCode} {answer.currOffset}"
        )
        step = self.consumer.register_answer(answer, loop.true_ms())
        if self.ended:
            return
        if step is FetchStep.GET:
            self.client.registered(self, sent_s)
        self._follow(step)

    def _got(self, answer: broker_pb2.GetMessageResponseB2C, sent_s: float) -> None:
        step = self.consumer.get_answer(answer, self.client.simulation.loop.true_ms())
        if self.ended:
            return
        if step is FetchStep.DELIVER:
            messages, damaged = decode_messages(self.consumer.partition, answer, None)
            if damaged:
                raise Violation(f"{self.client.name} read {damaged} damaged messages of {self.name}")
            self.client.delivered(self, messages, sent_s)
        elif answer.errCode == ErrCode.NOT_FOUND and self.client.reads_once:
            self.ended = True
        else:
            self._follow(step)

    def _follow(self, step: FetchStep) -> None:
        if step is FetchStep.DROP:
            self.ended = True
            self.client.dropped(self)
        else:
            self.go_on()


class _Reader(_Client):
    """A client that reads partitions. ``reader``: its name in the history."""

    reads_once = False
    """Whether it stops at the end of each partition."""

    def __init__(self, simulation: Simulation, name: str, group: str) -> None:
        super().__init__(simulation, name)
        self.reader = group
        self.member = Membership(name, "192.0.2.1", group, PARTITIONS, {}, WALL_MS)

    def registered(self, read: _Read, sent_s: float) -> None:
        """A partition was registered at its broker, by a request sent at ``sent_s``."""
        self.simulation.tube.resume(self.reader, read.name)

    def delivered(self, read: _Read, messages: list[Message], sent_s: float) -> None:
        """Messages have arrived; the reader continues them."""
        tube = self.simulation.tube
        for message in messages:
            assert message.offset is not None
            tube.read(self.reader, read.name, message.offset, *_sent(message))

    def dropped(self, read: _Read) -> None:
        """The broker has refused a partition for good."""


def _sent(message: Message) -> tuple[str, int]:
    """Producer and number of a message."""
    if message.topic == LOG:
        name, number, _ = message.data.split(b" ", 2)
        return name.decode(), int(number)
    headers = dict(message.record.headers)
    return str(headers["publisher"]), int(headers["number"])


class TubeConsumer(_Reader):
    """A member of the group. It confirms most batches."""

    def __init__(self, simulation: Simulation, name: str, random: Random) -> None:
        super().__init__(simulation, name, GROUP)
        self.others: list[TubeConsumer] = []
        """All members."""
        self._random = random
        self._reads: dict[Partition, _Read] = {}

    def join(self, attachment: _Attachment) -> None:
        loop = self.simulation.loop
        member = self.member = Membership(self.name, "192.0.2.1", GROUP, PARTITIONS, {}, WALL_MS)

        def register() -> None:
            attachment.master.call(
                ServiceType.MASTER,
                MethodId.CONSUMER_REGISTER,
                member.register(),
                master_pb2.RegisterResponseM2C,
                registered,
            )

        def registered(answer: master_pb2.RegisterResponseM2C) -> None:
            if self.attachment is not attachment:
                return
            if answer.errCode != ErrCode.SUCCESS:
                attachment.lost()
                return
            member.registered(answer)
            beat()

        def beat() -> None:
            if self.attachment is attachment:
                request = member.heartbeat()
                attachment.master.call(
                    ServiceType.MASTER, MethodId.CONSUMER_HEARTBEAT, request, master_pb2.HeartResponseM2C,
                    lambda answer: heard(request, answer),
                )  # fmt: skip

        def heard(request: master_pb2.HeartRequestC2M, answer: master_pb2.HeartResponseM2C) -> None:
            if self.attachment is not attachment:
                return
            orders = member.heartbeat_answered(request, answer)
            if orders.register:
                register()
                return
            self._carry_out(attachment, orders)
            if orders.take or orders.release:
                member.finished()
                loop.soon(0.5, beat)
            else:
                loop.call_later(HEARTBEAT_S if member.held else 1.0, beat)
            held = sorted(partition for partition in member.held if partition in self._reads)
            if held:
                attachment.broker.call(
                    ServiceType.BROKER_READ, MethodId.PARTITION_HEARTBEAT, member.partition_heartbeat(held),
                    broker_pb2.HeartBeatResponseB2C, lambda _: None,
                )  # fmt: skip

        register()

    def left(self) -> None:
        self._reads.clear()

    def registered(self, read: _Read, sent_s: float) -> None:
        for other in self.others:
            if other is not self:
                other.check_lost(read.consumer.partition, self.name, sent_s)
        super().registered(read, sent_s)
        self.member.held.add(read.consumer.partition)

    def check_lost(self, partition: Partition, other: str, sent_s: float) -> None:
        """Another member has registered a partition: this one must not be reading it."""
        own = self._reads.get(partition)
        if own is None or own.ended or not own.consumer.registered or not own.heard_s < sent_s < own.heard_s + LEASE_S:
            return
        end = own.attachment.broker.end
        if end is not None and not (end.is_silent or end.is_closing()):
            raise Violation(f"{own.name} is read by {self.name}, and by {other} too")

    def delivered(self, read: _Read, messages: list[Message], sent_s: float) -> None:
        super().delivered(read, messages, sent_s)
        attachment = self.attachment
        if attachment is None:
            return
        step = self.steps.popleft() if self.steps else None
        if step is not None and step.kind == "steal":
            self._steal(attachment, step)
        if step is not None and step.kind != "steal":
            self._fault(attachment, step)
        elif self._random.random() < 0.7:
            read.confirm(messages, read.go_on)
        else:
            read.go_on()

    def dropped(self, read: _Read) -> None:
        self._reads.pop(read.consumer.partition, None)
        self.member.lost(read.consumer.partition)

    def _steal(self, attachment: _Attachment, step: TubeStep) -> None:
        """Register a partition under another name; the broker must refuse it while a member reads the partition."""
        loop = self.simulation.loop
        partition = Partition(BrokerInfo(1, *BROKER), LOG, partition_ids(PARTITIONS[LOG], 1)[step.partition])
        thief = Membership(f"{self.name}-thief", "192.0.2.1", GROUP, PARTITIONS, {}, WALL_MS)
        sent_s = loop.time()

        def call(request: Protobuf, done: Callable[[broker_pb2.RegisterResponseB2C], None]) -> None:
            attachment.broker.call(
                ServiceType.BROKER_READ, MethodId.PARTITION_REGISTER, request, broker_pb2.RegisterResponseB2C, done
            )

        def registered(answer: broker_pb2.RegisterResponseB2C) -> None:
            self.simulation.history.note(f"{loop.true_ms()} {thief.client_id} registers: {answer.errCode}")
            if answer.errCode == ErrCode.SUCCESS:
                for member in self.others:
                    member.check_lost(partition, thief.client_id, sent_s)
                call(thief.partition_register(partition, 1, leave=True), lambda _: None)

        call(thief.partition_register(partition, 0, leave=False), registered)

    def _carry_out(self, attachment: _Attachment, orders: PartitionOrders) -> None:
        for partition in orders.release:
            read = self._reads.pop(partition, None)
            if read is not None:
                read.release()
            self.member.held.discard(partition)
        for partition in orders.take:
            if partition not in self._reads:
                consumer = PartitionConsumer(
                    partition, GroupStart.EARLIEST, long_poll_ms=LONG_POLL_MS, want_offsets=True, explicit=True
                )
                read = self._reads[partition] = _Read(self, attachment, consumer)
                read.go_on()


class TubeAuditor(_Reader):
    """Reads the whole log once after each start of the node, in a group of its own."""

    reads_once = True

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "auditor", "audit-0")
        self._starts = 0

    def join(self, attachment: _Attachment) -> None:
        self._starts += 1
        self.reader = f"audit-{self._starts}"
        self.member = Membership(self.name, "192.0.2.1", self.reader, PARTITIONS, {}, WALL_MS)
        for topic, count in PARTITIONS.items():
            for number in partition_ids(count, 1):
                partition = Partition(BrokerInfo(1, *BROKER), topic, number)
                consumer = PartitionConsumer(partition, GroupStart.EARLIEST, want_offsets=True, explicit=True, offset=0)
                _Read(self, attachment, consumer).go_on()

    def delivered(self, read: _Read, messages: list[Message], sent_s: float) -> None:
        super().delivered(read, messages, sent_s)
        read.go_on()
