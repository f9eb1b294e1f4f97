"""Clients of the state store, faults, and what is done about a seed that breaks a rule.

A seed has a schedule of operations, of cuts of connections and of faults of the disk. It is made before the simulation
starts, from a generator of its own, so that a prefix of the schedule is the same test with fewer operations.

In each simulation power is lost twice: at a random operation of the disk, and after the last answer. After each restart
every key is read before the clients continue.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, PubAck, Publish, SubAck, Subscribe, Subscription
from penstock.statestore.binding import client_response_topic, key_of_notification, notify_filter, request
from penstock.statestore.codec.resp3 import decode_array
from penstock.statestore.hlc import Hlc, parse
from tests.simulation.disk import PowerLoss, SimulatedDisk
from tests.simulation.history import DEL, GET, OBSERVE, SET, History, Operation, Violation
from tests.simulation.loop import Deadlock, VirtualLoop
from tests.simulation.node import Connection, SimulatedNode

__all__ = ["OPERATIONS", "Result", "failure", "report", "simulate"]

OPERATIONS = 2_000
CLIENTS = 5
KEYS = [b"key-%02d" % number for number in range(16)]
WINDOW = 4
"""Requests of a client that wait for their answers at the same time."""
LIFE_S = 1_800.0
"""Virtual time after which requests still without an answer have been forgotten."""


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation that broke no rule."""

    seed: int
    trace: str
    answered: int
    notified: int
    cuts: int
    faults: Sequence[str]


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke a rule, and the shortest prefix of its schedule that was found to break one."""

    seed: int
    operations: int
    reason: str

    def __str__(self) -> str:
        return f"seed {self.seed}, the first {self.operations} operations of its schedule: {self.reason}"


class Step(NamedTuple):
    """An operation of the schedule, and the client that sends it."""

    client: int
    kind: str
    key: bytes
    value: bytes = b""
    px: int = 0
    only_new: bool = False


class Schedule:
    """What a seed does; ``cuts`` are the numbers of the operations before which their connection is cut."""

    def __init__(self, seed: int) -> None:
        random = Random(f"schedule {seed}")
        self.steps = [_step(random, number) for number in range(OPERATIONS)]
        self.cuts = {number for number in range(OPERATIONS) if random.random() < 0.005}
        self.power_loss_at = random.randrange(30, 400)  # all operations need 500 to 2,000 of the disk
        fault = random.choice(("none", "slow", "full", "failing"))
        begin = random.randrange(20, self.power_loss_at)
        self.fault = fault
        # Commits run in the thread of a slow disk, and in the loop on a fast one.
        self.speed = random.choice((1.0, 1.0, 20.0))
        # After a failed sync nothing is written, so power would never be lost: it is, with the first request.
        self.range = range(begin, begin + random.randrange(5, 40))


def _step(random: Random, number: int) -> Step:
    client, key = random.randrange(CLIENTS), random.choice(KEYS)
    kind = random.choices((SET, GET, DEL, OBSERVE), (50, 30, 12, 8))[0]
    if kind != SET:
        return Step(client, kind, key)
    value = b"value-%d" % number + b"." * random.choice((0, 0, 10, 700, 3_000))
    px = random.choice((0, 0, 0, 0, 0, 5, 50, 400, 3_000))
    return Step(client, kind, key, value, px, random.random() < 0.2)


class Client:
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
            elif not isinstance(packet, ConnAck | PubAck):
                raise Violation(f"{self.name} received {packet}")
        if self._decoder.error is not None:
            raise Violation(f"{self.name} cannot read: {self._decoder.error}")
        self.send_next()

    def send_next(self) -> None:
        simulation = self._simulation
        while self._ready and self._connection is not None and self.steps and len(self._pending) < WINDOW:
            number, operation = self.steps.popleft()
            simulation.step(number, self)
            if self._connection.is_cut:
                return
            self._send(operation)

    def _send(self, operation: Operation) -> None:
        now_ms = self._simulation.loop.wall_ms()
        self._simulation.history.sent(operation, now_ms)
        args = [operation.kind.encode(), operation.key]
        if operation.kind == SET:
            args.append(operation.value)
            args += [b"NX"] * operation.only_new
            if operation.px:
                args += [b"PX", b"%d" % operation.px]
        self._requests += 1
        correlation = b"%015d" % self._requests
        publish = request(args, self.name, correlation, Hlc(now_ms, 0, self.name), expiry_s=100_000)
        publish.packet_id = self._requests % 65_535 + 1
        self._pending[correlation] = operation
        assert self._connection is not None
        self._connection.send(encode(publish))

    def _received(self, publish: Publish) -> None:
        assert self._connection is not None
        self._connection.send(encode(PubAck(publish.packet_id)))
        now_ms = self._simulation.loop.wall_ms()
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


class Simulation:
    """One run of the first ``operations`` of a schedule."""

    def __init__(self, seed: int, operations: int) -> None:
        self.history = History()
        self.cuts = 0
        self._random = Random(seed)
        self._schedule = schedule = Schedule(seed)
        self._seed = seed
        self._clients = [Client(self, f"client-{number}") for number in range(CLIENTS)]
        self._auditor = Client(self, "auditor")
        for number, step in enumerate(schedule.steps[:operations]):
            operation = Operation(step.kind, step.key, step.value, step.px, step.only_new)
            self._clients[step.client].steps.append((number, operation))
        self.loop = VirtualLoop(self._random)
        self.disk = SimulatedDisk(self._random)
        self.faults: list[str] = []
        if schedule.fault != "none":
            setattr(self.disk, schedule.fault, schedule.range)
            self.faults.append(schedule.fault)
        self.disk.power_loss_at = schedule.power_loss_at
        self.disk.speed = schedule.speed
        self.node: SimulatedNode

    def run(self) -> Result:
        self._live()
        while not self._is_done:
            self._lose_power()
            self._live()
        self._lose_power()  # once more, after the last answer
        self._live()
        history = self.history
        return Result(self._seed, history.trace, history.answered, history.notified, self.cuts, self.faults)

    def step(self, number: int, client: Client) -> None:
        """``client`` is about to send the operation ``number``."""
        if number in self._schedule.cuts:
            self.cuts += 1
            self.history.note(f"cut {client.name}")
            client.cut()
        if self.node.service.failure is not None and self.disk.power_loss_at is not None:
            raise PowerLoss("after a failure of the disk")

    def check_done(self) -> None:
        """End this life of the node if everything was answered."""
        if self._is_done:
            self.loop.stop()

    @property
    def _is_done(self) -> bool:
        return self._auditor.is_done and all(client.is_done for client in self._clients)

    def _live(self) -> None:
        """One life of the node, until power is lost or everything is answered."""
        loop, disk = self.loop, self.disk
        disk.on_operation = lambda kind: self.history.note(f"disk {kind}")
        try:
            self.node = SimulatedNode(loop, disk)
            try:
                loop.run_until_complete(self.node.start())
            except PenstockError as error:
                raise Violation(f"the node does not start: {error}") from error
            self._auditor.steps.extend((-1, Operation(GET, key)) for key in KEYS)
            self._auditor.connect()
            for client in self._clients:
                loop.soon(0.05, client.connect)
            loop.call_later(LIFE_S, self._forgotten)
            loop.run_forever()
        except PowerLoss as loss:
            self.history.note(f"power lost {loss}")
        except Deadlock:
            self._forgotten()
        if loop.failures:
            raise Violation(loop.failures[0])

    def _lose_power(self) -> None:
        for client in (*self._clients, self._auditor):
            client.power_lost()
        start_s = self.loop.time() + self._random.choice((0.1, 5.0))
        self.loop.close()
        self.loop = VirtualLoop(self._random, start_s)
        self.disk = self.disk.after_power_loss()
        self.disk.speed = self._schedule.speed

    def _forgotten(self) -> None:
        raise Violation("requests are not answered")


def simulate(seed: int, operations: int = OPERATIONS) -> Result:
    """Run a seed.

    Raises:
        Violation: a rule was broken.
    """
    errors = _Errors()
    log = logging.getLogger("penstock")
    level, propagate = log.level, log.propagate
    log.addHandler(errors)
    log.setLevel(logging.WARNING)
    log.propagate = False
    simulation = Simulation(seed, operations)
    try:
        result = simulation.run()
    finally:
        simulation.loop.close()
        log.removeHandler(errors)
        log.setLevel(level)
        log.propagate = propagate
    if errors.first:
        raise Violation(errors.first)
    return result


class _Errors(logging.Handler):
    """Keeps the first internal error that a part of the node logged instead of raising it."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not self.first:
            self.first = f"{record.getMessage()}: {record.exc_info[1]!r}"


def failure(seed: int, *, search_s: float = 20.0) -> Failure | None:
    """Run a seed; if it breaks a rule, search for a short prefix of its schedule for ``search_s``."""
    reason = _violation(seed, OPERATIONS)
    if reason is None:
        return None
    shortest, passed = OPERATIONS, 0
    deadline = time.monotonic() + search_s
    # A prefix of one that passes may fail, since it meets the faults in another state: the short ones come first, which
    # also take the least time. Between the last that passed and the first that failed, the search halves.
    size = 5
    while shortest - passed > 1 and time.monotonic() < deadline:
        found = _violation(seed, size)
        if found is None:
            passed = size
        else:
            shortest, reason = size, found
        size = (shortest + passed) // 2
        if shortest == OPERATIONS:
            size = min(size, 2 * passed)
    return Failure(seed, shortest, reason)


def _violation(seed: int, operations: int) -> str | None:
    try:
        simulate(seed, operations)
    except Violation as violation:
        return str(violation)
    return None


def report(seeds: Sequence[int], *, limit_s: float | None = None, tell: Callable[[str], None] = print) -> bool:
    """Run ``seeds``, at most for ``limit_s``; False at the first that fails, with its shortest known schedule."""
    started = time.monotonic()
    count = 0
    for seed in seeds:
        if limit_s is not None and time.monotonic() - started > limit_s:
            break
        failed = failure(seed)
        if failed is not None:
            tell(str(failed))
            return False
        count += 1
    tell(f"{count} seeds, {count * OPERATIONS} operations: no rule was broken")
    return True
