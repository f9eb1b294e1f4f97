"""A schedule of faults for each seed, and the clients of two nodes.

Faults overlap: nodes are killed, stopped and paused, cut off from etcd in one direction or both, or see it late;
members of etcd end or stand still, the database is full, the wall clock of a machine steps, a machine boots with a
wrong one, a backup of etcd is restored. Then all faults end, and one node must be active, the other one follow it, and
every key be readable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from penstock.statestore.hlc import Hlc
from tests.simulation.cluster.etcd import MEMBERS, Etcd
from tests.simulation.cluster.history import ClusterHistory, HistoryEnded
from tests.simulation.cluster.node import BACKLOG_BYTES, LOG_BYTES, Node, Request, virtual
from tests.simulation.cluster.threads import Process, Simulator
from tests.simulation.history import GET, SET, Operation, Violation
from tests.simulation.loop import MachineClock
from tests.simulation.seeds import SeededSimulation

__all__ = ["FAULTS", "TWO_NODES", "Result", "simulate"]

FAULTS_S: Final = 20.0
"""Time in which faults begin."""
CALM_S: Final = 20.0
CLIENTS: Final = 4
KEYS: Final = [b"key-%d" % number for number in range(5)] + [b"mqtt-%d" % number for number in range(4)]
PATIENCE_S: Final = 2.0
"""Time after which a client does not wait for an answer any more."""
FAULTS: Final = (
    *("kill", "kill", "stop", "pause", "pause", "cut", "cut", "slow", "slow", "behind"),
    *("member", "pause member", "majority", "full", "clock", "handover", "restore", "reboot"),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation that broke no rule."""

    seed: int
    trace: str
    answered: int
    elections: int
    faults: tuple[str, ...]
    acknowledged: int = 0
    """QoS 1 and 2 messages of clients, of whole nodes."""
    delivered: int = 0
    loads: int = 0
    """Snapshots that nodes have loaded."""
    takeovers: int = 0
    """Elections of a node that has loaded a snapshot."""


class Client:
    """A client with one request at a time, which tries the nodes in turn."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation = simulation
        self._random = simulation.simulator.random
        self._node = simulation.nodes[number % 2]
        self._writes = 0.7 if number < CLIENTS // 2 else 0.0

    def run(self) -> None:
        """Send requests until the end; in a thread."""
        simulation, random = self._simulation, self._random
        while simulation.simulator.now_s < simulation.end_s:
            key = random.choice(KEYS)
            if random.random() < self._writes:
                px = random.choice((0, 0, 0, 200, 4_000, 15_000))
                operation = Operation(SET, key, b"value-%d" % simulation.next_number(), px)
            else:
                operation = Operation(GET, key)
            self.request(operation)
            pauses_s = (0.001, 0.1, 0.4) if self._writes else (0.001, 0.05, 0.1)
            simulation.simulator.wait(random.choice(pauses_s) if simulation.has_faults else 1.0)

    def request(self, operation: Operation) -> bool:
        """Send an operation until a node answers; False if none does in time: it may have been carried out."""
        simulation = self._simulation
        simulator = simulation.simulator
        simulation.history.sent(operation, simulation.etcd.true_ms())
        while simulator.now_s < simulation.end_s:
            outcome = self._ask(operation)
            if outcome != "standby":
                return outcome == "answered"
            self._node = next(node for node in simulation.nodes if node is not self._node)
            simulator.wait(0.05)
        return False

    def _ask(self, operation: Operation) -> str:
        simulation = self._simulation
        simulator = simulation.simulator
        thread = simulator.thread
        assert thread is not None
        outcome = ""

        def arrived(payload: bytes | None, version: Hlc | None) -> None:
            nonlocal outcome
            if payload is None:
                outcome = "standby"
            else:
                outcome = "answered"
                simulation.answered(operation, payload, version)
            simulator.wake(thread)

        def answer(payload: bytes | None, version: Hlc | None) -> None:
            simulator.later(self._delay_s(), arrived, payload, version)

        simulator.later(self._delay_s(), self._node.send, Request(operation, answer))
        end_s = simulator.now_s + PATIENCE_S
        while not outcome and simulator.now_s < end_s:
            simulator.wait(end_s - simulator.now_s)
        if not outcome:
            self._node = self._random.choice(simulation.nodes)
        return outcome

    def _delay_s(self) -> float:
        return 0.0001 + 0.004 * self._random.random() ** 4


class Simulation:
    """One run of a seed."""

    node_type: type[Node] = Node
    quota_bytes: tuple[int, ...] = (40_000, 1_000_000)
    """Of the database of etcd."""
    log_bytes: int = LOG_BYTES
    backlog_bytes: int = BACKLOG_BYTES
    calm_s: float = CALM_S
    """Time after all faults, in which the nodes recover."""

    def __init__(self, seed: int, faults: tuple[str, ...]) -> None:
        self.seed = seed
        self.random = random = Random(f"cluster {seed}")
        self.simulator = simulator = Simulator(random)
        self.history = self._new_history()
        self.etcd = etcd = Etcd(simulator, quota_bytes=random.choice(self.quota_bytes))
        etcd.on_change = self.history.changed
        same_machine = random.random() < 0.3
        clocks = [MachineClock(random.choice((0.0, 0.0001))) for _ in range(2)]
        if same_machine:
            clocks[1] = clocks[0]
        for clock in clocks:
            clock.true_s = lambda: simulator.now_s
        boots = ["one boot", "one boot" if same_machine else "another boot"]
        lease_s = random.choice((2, 3, 3, 5))
        self.nodes = [
            self.node_type(simulator, etcd, self.history, name, clock, boot, lease_s)
            for name, clock, boot in zip(("one", "two"), clocks, boots, strict=True)
        ]
        begin_s = simulator.now_s
        self.end_s = begin_s + FAULTS_S + self.calm_s
        self._calm_s = begin_s + FAULTS_S
        self.faults = random.choices(faults, k=random.randrange(3, 9))
        self.happened: list[str] = []
        self._numbers = 0
        self._last_answer_s = begin_s
        self._is_restored = False
        self._boots = 0
        self._clients = Process(simulator, "clients", MachineClock())

    def run(self) -> Result:
        simulator, random = self.simulator, self.random
        nodes = {node.name: node for node in self.nodes}
        with virtual(random, nodes, log_bytes=self.log_bytes, backlog_bytes=self.backlog_bytes):
            try:
                for node in self.nodes:
                    simulator.later(random.choice((0.0, 0.1, 3.0)), node.start)
                self._start_clients()
                times = sorted(simulator.now_s + random.uniform(3.0, FAULTS_S) for _ in self.faults)
                for at_s, fault in zip(times, self.faults, strict=True):
                    simulator.later(at_s - simulator.now_s, self._begin, fault)
                simulator.later(1.0, self._operate)
                simulator.run(self._calm_s)
                self._end_faults()
                simulator.run(self.end_s)
                self._check_end()
            except HistoryEnded as end:
                self.happened.append(str(end))
            finally:
                self._clients.kill()
                for node in self.nodes:
                    node.kill()
        history = self.history
        return Result(
            self.seed,
            history.trace,
            history.answered,
            history.elections,
            tuple(self.happened),
        )

    def _new_history(self) -> ClusterHistory:
        return ClusterHistory()

    def _start_clients(self) -> None:
        for number in range(CLIENTS):
            client = Client(self, number)
            self.simulator.later(0.0, self._clients.start_thread, client.run)

    # For clients

    @property
    def has_faults(self) -> bool:
        """Whether faults may still begin."""
        return self.simulator.now_s < self._calm_s

    def next_number(self) -> int:
        """A number that no value has."""
        self._numbers += 1
        return self._numbers

    def answered(self, operation: Operation, payload: bytes, version: Hlc | None) -> None:
        """An answer has arrived."""
        # The clock of expiry times has whole milliseconds, which begin at other times than those of the true time.
        self.history.answer(operation, payload, version, self.etcd.true_ms() + 1)
        self._last_answer_s = self.simulator.now_s

    # Faults

    def _active(self) -> Node | None:
        return next((node for node in self.nodes if node.service is not None), None)

    def _begin(self, fault: str) -> None:
        """Begin a fault, most often of the active node."""
        simulator, random, etcd = self.simulator, self.random, self.etcd
        active = self._active()
        node = active if active is not None and random.random() < 0.75 else random.choice(self.nodes)
        self.history.note(f"{simulator.now_s:.6f} {fault} {node.name}")
        self.happened.append(fault)
        seconds = random.choice((0.3, 1.0, 2.0, 4.0, 9.0))
        match fault:
            case "kill":
                if node.process.is_alive:
                    node.kill()
                    node.restart(seconds)
            case "stop":
                node.stop()
            case "pause":
                node.process.pause(seconds)
            case "cut":
                requests, answers = random.choice(((True, True), (True, False), (False, True)))
                node.link.cut(requests=requests, answers=answers)
                simulator.later(seconds, node.link.heal)
            case "slow":  # most often its end is a cut
                delay_s = random.choice((0.1, 0.4, 0.7))
                if random.random() < 0.7:
                    node.link.answer_s = delay_s
                else:
                    node.link.request_s = delay_s
                simulator.later(random.choice((1.0, 2.0, 4.0)), self._end_slow, node)
            case "behind":  # a standby lacks commits when the active node ends
                for standby in self.nodes:
                    if standby is not active:
                        standby.link.cut()
                        simulator.later(seconds, self._kill_for_long, active)
                        simulator.later(seconds, standby.link.heal)
            case "reboot":
                if active is not None:
                    self._reboot(active, seconds)
            case "member":
                etcd.kill(random.randrange(len(MEMBERS)), seconds)
            case "pause member":
                etcd.pause(random.randrange(len(MEMBERS)), seconds)
            case "majority":
                for member in random.sample(range(len(MEMBERS)), 2):
                    etcd.kill(member, seconds)
            case "full":
                etcd.fill()
                simulator.later(seconds, etcd.end_alarm)
            case "clock":
                step_s = random.choice((5.0, -5.0, 3_600.0, -3_600.0))
                node.machine.step(step_s)
            case "handover":
                self._request_handover()
            case "restore":
                backup = etcd.back_up()
                simulator.later(seconds, self._restore, backup)
            case _:
                raise AssertionError(fault)

    def _end_slow(self, node: Node) -> None:
        if self.random.random() < 0.2:
            node.link.heal()
        else:
            node.link.cut()
            self.simulator.later(self.random.choice((3.0, 6.0)), node.link.heal)

    def _reboot(self, node: Node, down_s: float) -> None:
        """Restart the machine of the active node, which is active again: the standby does not reach etcd, and then
        follows for a second term. The clock of this term is behind by the time without the machine, because its system
        clock is behind as well."""
        (standby,) = (each for each in self.nodes if each is not node)
        if node.machine is standby.machine or not node.process.is_alive:
            return
        node.kill()
        standby.link.cut()
        self._boots += 1
        node.boot_id = f"boot {self._boots}"
        node.machine.step(-20.0)
        node.restart(down_s)
        elected_s = down_s + 5.0
        self.simulator.later(elected_s, standby.link.heal)
        self.simulator.later(elected_s + self.random.choice((0.5, 3.0)), self._request_handover)
        self.simulator.later(elected_s + 5.0, node.machine.set_right)

    def _kill_for_long(self, node: Node | None) -> None:
        if node is not None and node.process.is_alive and self.has_faults:
            node.kill()
            node.restart(8.0)

    def _request_handover(self) -> None:
        active = self._active()
        if active is not None:
            active.member._handover.set()
            active.member._wake.set()

    def _restore(self, backup: tuple[object, ...]) -> None:
        self._is_restored = True
        self.etcd.restore(backup)
        self.history.restored(self.etcd.true_ms(), self.etcd.values())

    def _operate(self) -> None:
        """What an operator does: end the alarm of a full etcd, and copy the data directory for a node that is too far
        behind."""
        self.simulator.later(1.0, self._operate)
        active = self._active()
        if self.etcd.is_full and "full" not in self.happened:
            self.etcd.end_alarm()
        if active is None or self._is_restored:
            return
        (other,) = (node for node in self.nodes if node is not active)
        member = getattr(other, "member", None)
        if member is not None and other.process.is_alive and member.problem and "commit" in member.problem:
            self.history.note(f"{other.name} gets a copy: {member.problem}")
            other.kill()
            other.copy_data(active)
            other.start()

    def _end_faults(self) -> None:
        for node in self.nodes:
            node.link.heal()
            node.machine.set_right()
        self.etcd.end_alarm()
        self.etcd.quota_bytes = 1_000_000

    def _check_end(self) -> None:
        """One node is active, the other one follows, and clients get answers; after a restore no node may be."""
        if self._is_restored:
            return
        active = self._active()
        if active is None or self._last_answer_s < self.end_s - 5.0:
            problems = {node.name: node.member.problem for node in self.nodes}
            raise Violation(f"no node is active {self.calm_s} s after the faults {self.happened}: {problems}")
        (other,) = (node for node in self.nodes if node is not active)
        if not other.member.follows:
            raise Violation(f"{other.name} does not follow after the faults {self.happened}: {other.member.problem}")


def simulate(seed: int, faults: Iterable[str] = FAULTS) -> Result:
    """Run a seed with faults of these kinds.

    Raises:
        Violation: a rule was broken.
    """
    logger = logging.getLogger("penstock")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        return Simulation(seed, tuple(faults)).run()
    finally:
        logger.setLevel(level)


TWO_NODES: Final = SeededSimulation("two nodes", simulate)
