"""A schedule of operations and faults for each seed, and what is done about a seed that breaks a rule.

A schedule has operations of the clients of state store, MQTT, TubeMQ and HTTP, cuts of connections, clients that end
their direction of a connection, and faults of disk and clocks. It is made before the simulation starts, from a
generator of its own, so that a prefix of the schedule is the same test with fewer operations.

In each simulation power is lost twice: at a random operation of the disk, and after the last answer. After each restart
every key, every retained message and the whole log are read. At the end all clients are connected for so
long that everything must have been delivered.
"""

from __future__ import annotations

import logging
import os
import random as process_random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from random import Random

from penstock.errors import PenstockError
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from penstock.statestore.options import StoreOptions
from tests.simulation import mqtt_client, statestore_client, tube_client
from tests.simulation.disk import PowerLoss, SimulatedDisk
from tests.simulation.history import GET, History, Operation, Violation
from tests.simulation.http_client import HttpClient, HttpStep, http_step
from tests.simulation.loop import Deadlock, MachineClock, VirtualLoop
from tests.simulation.mqtt_client import MqttClient, MqttStep, RetainedReader, mqtt_step
from tests.simulation.mqtt_history import AMPLE_MS, MqttHistory
from tests.simulation.node import SimulatedNode
from tests.simulation.seeds import report_seeds
from tests.simulation.statestore_client import StoreClient, StoreStep, store_step
from tests.simulation.tube_client import (
    LogHistory,
    TubeAuditor,
    TubeConsumer,
    TubeProducer,
    TubeStep,
    tube_step,
)

__all__ = ["OPERATIONS", "Failure", "Result", "failure", "processes", "report", "simulate"]

OPERATIONS = 2_000
QUIET_S = 2 * AMPLE_MS / 1000
"""Virtual time from the last operation to the end, in which everything is delivered."""
SOON_S = (0.02, 0.05, 0.1, 0.2, 1.0, 5.0, 30.0, 100.0)
"""Times after a start, most of them while many operations are under way."""
PAUSES_S = (0.2, 3.0, 40.0)
STEPS_S = (5.0, -5.0, 25.0, -25.0, 3_600.0, -3_600.0)
"""Jumps of the wall clock. Those above 30 s are taken back after a minute, before they are followed."""
SMALL_LIMITS = BrokerLimits(
    max_subscriptions=3,
    max_retained_messages=4,
    max_retained_bytes=4_096,
    max_queued_messages=15,
    max_queued_bytes=8_192,
    queue_overflow=QueueOverflowPolicy.REFUSE,
)
SMALL_STORE = StoreOptions(max_keys=10, max_bytes=8_192)
LIFE_S = 10_000.0
"""Virtual time after which requests still without an answer have been forgotten."""


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation that broke no rule."""

    seed: int
    trace: str
    answered: int
    notified: int
    acknowledged: int
    """QoS 1 and 2 messages of clients."""
    delivered: int
    stored: int
    """Acknowledged messages of the log."""
    read: int
    """Messages of the log that clients have read."""
    administered: int
    """Answers of the HTTP server."""
    refused: int
    """Requests and messages that a limit of the node refused."""
    cuts: int
    faults: frozenset[str]
    """Their kinds: of the disk, of the clocks, of the network, and loss of power."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke a rule, and the shortest prefix of its schedule that was found to break one."""

    seed: int
    operations: int
    reason: str

    def __str__(self) -> str:
        return f"seed {self.seed}, the first {self.operations} operations of its schedule: {self.reason}"


Step = StoreStep | MqttStep | TubeStep | HttpStep


def _step(random: Random, number: int) -> Step:
    """A random operation of one of the protocols."""
    kind = random.random()
    if kind > 0.77:
        return tube_step(random)
    if kind > 0.75:
        return http_step(random)
    return store_step(random, number) if kind < 0.3 else mqtt_step(random)


_http_log = logging.getLogger("uvicorn.error")


class Schedule:
    """What a seed does; ``cuts`` are the numbers of the operations before which their connection is cut."""

    def __init__(self, seed: int) -> None:
        random = Random(f"schedule {seed}")
        self.steps = [_step(random, number) for number in range(OPERATIONS)]
        self.max_turn_work = 16 if seed % 2 else 256
        """Small shares of a loop turn in every other seed, so that most connections wait for another one."""
        self.has_quotas = seed % 5 == 4
        """Small limits in every fifth seed: the others have messages that must not be refused."""
        self.cuts = {number for number in range(OPERATIONS) if random.random() < 0.005}
        self.power_loss_at = random.randrange(60, 1_000)  # all operations need 1,500 to 3,000 of the disk
        fault = random.choice(("none", "slow", "full", "failing"))
        begin = random.randrange(40, self.power_loss_at)  # not during the first start, which has 35 operations
        self.fault = fault
        # Commits run in the thread of a slow disk, and in the loop on a fast one.
        self.speed = random.choice((1.0, 1.0, 20.0))
        # After a failed sync nothing is written, so power would never be lost: it is, with the first request.
        self.range = range(begin, begin + random.randrange(5, 40))
        self.slow_clock = random.choice((0.0, 0.0001))
        self.pauses = [(random.choice(SOON_S), random.choice(PAUSES_S)) for _ in range(random.randrange(1, 4))]
        self.steps_of_clock = [(random.choice(SOON_S), random.choice(STEPS_S)) for _ in range(random.randrange(1, 4))]


class Simulation:
    """One run of the first ``operations`` of a schedule."""

    def __init__(self, seed: int, operations: int) -> None:
        self.history = History()
        self.mqtt = MqttHistory()
        self.cuts = 0
        self.paused_s = 0.0
        """Time in which nothing ran."""
        self._numbers = 0
        self._random = random = Random(seed)
        self._schedule = schedule = Schedule(seed)
        self.history.has_quotas = self.mqtt.has_quotas = schedule.has_quotas
        self.tube = LogHistory(self.history, tube_client.CAPTURED_TOPICS)
        self._seed = seed
        self._store_clients = [StoreClient(self, f"client-{number}") for number in range(statestore_client.CLIENTS)]
        self._auditor = StoreClient(self, "auditor")
        self.mqtt_clients = [
            MqttClient(self, f"mqtt-{number}", expiry_s, random) for number, expiry_s in enumerate(mqtt_client.EXPIRY_S)
        ]
        self._reader = RetainedReader(self)
        self._producers = [TubeProducer(self, kind, number) for number, kind in enumerate(tube_client.PRODUCERS)]
        self._consumers = [TubeConsumer(self, f"member-{number}", random) for number in range(tube_client.CONSUMERS)]
        for member in self._consumers:
            member.others = self._consumers
        self._log_auditor = TubeAuditor(self)
        self._http = HttpClient(self)
        self._tube_clients: list[TubeProducer | TubeConsumer] = [*self._producers, *self._consumers]
        for number, step in enumerate(schedule.steps[:operations]):
            if isinstance(step, StoreStep):
                operation = Operation(step.kind, step.key, step.value, step.px, step.only_new, step.token)
                self._store_clients[step.client].steps.append((number, operation))
            elif isinstance(step, MqttStep):
                self.mqtt_clients[step.client].steps.append(step)
            elif isinstance(step, HttpStep):
                self._http.steps.append(step)
            else:
                self._tube_clients[step.client].steps.append(step)
        self._clients: list[StoreClient | MqttClient | TubeProducer | TubeConsumer] = [
            self._auditor,
            *self._store_clients,
            *self.mqtt_clients,
            *self._tube_clients,
        ]
        self._is_ending = False
        self.machine = MachineClock(schedule.slow_clock)
        self.loop = VirtualLoop(random)
        self.disk = SimulatedDisk(random)
        self.faults: set[str] = set()
        """Kinds that have happened."""
        if schedule.fault != "none":
            setattr(self.disk, schedule.fault, schedule.range)
            self.faults.add(schedule.fault)
        self.disk.power_loss_at = schedule.power_loss_at
        self.disk.speed = schedule.speed
        self.node: SimulatedNode

    def run(self) -> Result:
        while not self._live():
            self._lose_power()
        self._lose_power()  # once more, after everything was delivered
        if not self._live():
            raise Violation("power was lost again")
        self.tube.check_end()
        self.tube.check_captured()
        self.tube.check_complete([tube_client.GROUP, self._log_auditor.reader])
        history, mqtt = self.history, self.mqtt
        return Result(
            self._seed,
            history.trace,
            history.answered,
            history.notified,
            mqtt.acknowledged,
            mqtt.delivered,
            len(self.tube.acknowledged),
            self.tube.reads,
            self._http.answered,
            history.refused + mqtt.refused,
            self.cuts,
            frozenset(self.faults),
        )

    # For clients

    def next_number(self) -> int:
        """A number that no message and no subscription has."""
        self._numbers += 1
        return self._numbers

    def step(self, number: int, client: StoreClient) -> None:
        """``client`` is about to send the operation ``number``."""
        if number in self._schedule.cuts:
            self.cuts += 1
            self.faults.add("cut")
            if number % 2:
                self.history.note(f"end {client.name}")
                client.end()
            else:
                self.history.note(f"cut {client.name}")
                client.cut()
        self.check_failed()

    def check_failed(self) -> None:
        """End this life of a node that commits nothing any more."""
        if self.node.has_failed and self.disk.power_loss_at is not None:
            raise PowerLoss("after a failure of the disk")

    def check_done(self) -> None:
        """End this life of the node some time after everything was answered."""
        if not self._is_ending and self._is_done:
            self._is_ending = True
            self.loop.call_later(QUIET_S, self._quiet)

    @property
    def _is_done(self) -> bool:
        return self._http.is_done and all(client.is_done for client in self._clients)

    def _pause(self, seconds: float) -> None:
        self.paused_s += seconds
        self.faults.add("pause")
        self.loop.pause(seconds)

    def _step_clock(self, seconds: float) -> None:
        self.faults.add("clock step")
        self.machine.step(seconds)

    def _quiet(self) -> None:
        self._is_ending = False
        if self._is_done:
            self._has_ended = True
            self.loop.stop()
        # Else somebody had to connect again, and checks once more.

    # Lives of the node

    def _live(self) -> bool:
        """One life of the node; False: it ended with a loss of power, before everything was answered."""
        loop, disk = self.loop, self.disk
        disk.on_operation = lambda kind: self.history.note(f"disk {kind}")
        self._has_ended = self._is_ending = False
        try:
            self.machine.true_s = loop.time
            limits, options = BrokerLimits(), StoreOptions()
            if self._schedule.has_quotas:
                limits, options = replace(SMALL_LIMITS), SMALL_STORE
            limits.max_turn_work = self._schedule.max_turn_work
            self.node = SimulatedNode(loop, disk, self.machine, limits=limits, options=options)
            try:
                loop.run_until_complete(self.node.start())
            except PenstockError as error:
                raise Violation(f"the node does not start: {error}") from error
            self._auditor.steps.extend((-1, Operation(GET, key)) for key in statestore_client.KEYS)
            self._auditor.connect()
            self._reader.connect()
            self._log_auditor.connect()
            self._http.start()
            for client in self._clients[1:]:
                loop.soon(0.05, client.connect)
            for at_s, seconds in self._schedule.pauses:
                loop.call_later(at_s, self._pause, seconds)
            for at_s, seconds in self._schedule.steps_of_clock:
                loop.call_later(at_s, self._step_clock, seconds)
                loop.call_later(at_s + 60.0, self.machine.step, -seconds)
            loop.call_later(LIFE_S, self._forgotten)
            loop.run_forever()
        except PowerLoss as loss:
            self.history.note(f"power lost {loss}")
        except Deadlock:
            self._forgotten()
        if loop.failures:
            raise Violation(loop.failures[0])
        if self._has_ended:
            self.mqtt.check_delivered(loop.true_ms())
        return self._has_ended

    def _lose_power(self) -> None:
        self.faults.add("power loss")
        for client in self._clients:
            client.power_lost()
        # After the clients: a will that one of them withdrew on a connection whose end it had not noticed may come too.
        self.mqtt.power_lost(self.loop.true_ms())
        self._log_auditor.power_lost()
        self._http.power_lost()
        start_s = self.loop.time() + self._random.choice((0.1, 5.0))
        self.loop.close()
        self.machine.set_right()
        self.loop = VirtualLoop(self._random, start_s)
        self.disk = self.disk.after_power_loss()
        self.disk.speed = self._schedule.speed

    def _forgotten(self) -> None:
        waiting = [client.name for client in (*self._clients, self._http) if not client.is_done]
        raise Violation(f"requests are not answered: {', '.join(waiting)}")


def simulate(seed: int, operations: int = OPERATIONS) -> Result:
    """Run a seed.

    Raises:
        Violation: a rule was broken.
    """
    errors = _Errors()
    log = logging.getLogger("penstock")
    level, propagate = log.level, log.propagate
    for each in (log, _http_log):
        each.addHandler(errors)
    log.setLevel(logging.WARNING)
    log.propagate = False
    # The pauses of a broker without a master are drawn from the process's generator.
    random_state = process_random.getstate()
    process_random.seed(seed)
    simulation = Simulation(seed, operations)
    try:
        result = simulation.run()
    finally:
        simulation.loop.close()
        process_random.setstate(random_state)
        for each in (log, _http_log):
            each.removeHandler(errors)
        log.setLevel(level)
        log.propagate = propagate
    if errors.first:
        raise Violation(errors.first)
    return result


class _Errors(logging.Handler):
    """Keeps the first internal error that a part of the node logged instead of raising it."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not self.first and not isinstance(record.exc_info[1], GeneratorExit):
            self.first = f"{record.getMessage()}: {record.exc_info[1]!r}"


def failure(seed: int, *, search_s: float = 20.0) -> Failure | None:
    """Run a seed; if it breaks a rule, search for a short prefix of its schedule for ``search_s`` of processor
    time."""
    reason = _violation(seed, OPERATIONS)
    if reason is None:
        return None
    shortest, passed = OPERATIONS, 0
    deadline = time.process_time() + search_s  # the result does not depend on other processes
    # A prefix of one that passes may fail, since it meets the faults in another state: the short ones come first, which
    # also take the least time. Between the last that passed and the first that failed, the search halves.
    size = 5
    while shortest - passed > 1 and time.process_time() < deadline:
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


def processes() -> Executor:
    """Return a pool with a process for each core, for :func:`report`."""
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn"))


def report(seeds: Sequence[int], pool: Executor | None = None, *, tell: Callable[[str], None] = print) -> bool:
    """Run ``seeds``, in ``pool`` if given; False at the first that fails, with its shortest known schedule."""
    summary = f"{len(seeds)} seeds, {len(seeds) * OPERATIONS} operations: no rule was broken"
    return report_seeds(failure, seeds, pool, summary, tell)
