"""Whole nodes of which one lacks deleted commits: it was away, or has an empty disk, and loads a snapshot.

While it does, the connection breaks, is silent or changes a byte, the loading node is killed before any step, the
active node is killed, paused or fenced, and disk and network are slow. In the end the loading node is often the one
that takes over, and the rows of both nodes are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from penstock.mqtt.storage import _Loader
from penstock.runtime.io.wal import LoggedEnvironment
from tests.simulation.cluster.mqtt_run import MqttSimulation, run_to_end
from tests.simulation.cluster.node import LOGS
from tests.simulation.cluster.peer_network import Plan
from tests.simulation.cluster.run import Result
from tests.simulation.cluster.snapshot_node import LoadingNode, SnapshotServer, loading
from tests.simulation.disk import TableTransaction
from tests.simulation.history import Violation
from tests.simulation.seeds import SeededSimulation

__all__ = ["FAULTS", "LOADING_NODES", "LOAD_FAULTS", "simulate"]

FAULTS: Final = (
    *("away", "away", "away", "fresh", "fresh", "fresh"),
    *("kill", "stop", "pause", "cut", "slow", "member", "handover"),
)
LOAD_FAULTS: Final = (
    *("", "", "slow disk", "slow network", "receiver", "receiver", "receiver"),
    *("reset", "silence", "damage", "truncate", "kill", "pause", "handover"),
)
"""What happens to a load, a connection at a time."""
MOST_STEPS: Final = 52
"""Steps of a load on the disk, and bytes of a small snapshot: a fault comes before the end of most."""
MOST_BYTES: Final = 16_000


class LoadingSimulation(MqttSimulation):
    """One run of a seed."""

    node_type = LoadingNode
    log_bytes = 8_000
    backlog_bytes = 2_000
    nodes: list[LoadingNode]  # type: ignore[assignment]  # of this type

    def __init__(self, seed: int, faults: tuple[str, ...], load_faults: tuple[str, ...]) -> None:
        super().__init__(seed, faults)
        self._load_faults = load_faults
        self.faults[0] = self.random.choice(("away", "fresh"))
        self.takeovers = 0
        self._contents: dict[tuple[str, str], dict[str, dict[bytes, bytes]]] = {}
        self._compared: set[str] = set()
        for node in self.nodes:
            node.plan = partial(self._plan, node)
            node.on_load_fault = partial(self._load_fault, node)
            node.on_active = partial(self._count_takeover, node)
            node.on_load = partial(self._loaded, node)

    def run(self) -> Result:
        with TemporaryDirectory() as root:
            for node in self.nodes:
                node.set_up(Path(root))
            with loading({node.name: node for node in self.nodes}):
                result = super().run()
        return replace(result, loads=sum(node.loads for node in self.nodes), takeovers=self.takeovers)

    # Faults

    def _begin(self, fault: str) -> None:
        if fault not in {"away", "fresh"}:
            super()._begin(fault)
            return
        active = self._active()
        if active is None:
            return
        (standby,) = (node for node in self.nodes if node is not active)
        self.history.note(f"{self.simulator.now_s:.6f} {fault} {standby.name}")
        self.happened.append(fault)
        if standby.process.is_alive:
            standby.kill()
            if fault == "fresh":
                standby.wipe()
            standby.restart(self.random.choice((0.3, 2.0)) if fault == "fresh" else self.random.choice((3.0, 6.0)))

    def _plan(self, sender: LoadingNode) -> Plan:
        """What happens to the next load from ``sender``."""
        random = self.random
        (receiver,) = (node for node in self.nodes if node is not sender)
        disk = receiver.disk
        disk.steps, disk.step_s, disk.on_step = 0, 0.0005, lambda _kind: None
        if not self.has_faults:
            return Plan()
        fault = random.choice(self._load_faults)
        self.history.note(f"load: {fault}")
        plan = Plan(after=random.randrange(MOST_BYTES), delay_s=random.choice((0.0005, 0.005)))
        if fault == "slow disk":
            disk.step_s = random.choice((0.05, 0.5))
            self.happened.append(fault)
        elif fault == "slow network":
            plan.delay_s = 0.1
            self.happened.append(fault)
        elif fault == "receiver":
            last = random.randrange(MOST_STEPS)

            def end(kind: str) -> None:
                if disk.steps == last:
                    self.happened.append(f"receiver: {kind}")
                    self.simulator.later(0.0, self._kill, receiver)

            disk.on_step = end
        else:
            plan.fault = fault
        return plan

    def _load_fault(self, sender: LoadingNode, fault: str) -> None:
        self.happened.append(f"sender: {fault}")
        match fault:
            case "kill":
                self.simulator.later(0.0, self._kill, sender)
            case "pause":
                sender.process.pause(self.random.choice((2.0, 9.0)))
            case "handover":
                self._request_handover()

    def _kill(self, node: LoadingNode) -> None:
        if node.process.is_alive:
            node.kill()
            node.restart(self.random.choice((0.1, 1.0, 3.0)))

    def _loaded(self, node: LoadingNode) -> None:
        if self.random.random() < 0.7:
            self.simulator.later(self.random.choice((0.5, 1.0, 3.0)), self._take_over, node)

    def _take_over(self, node: LoadingNode) -> None:
        """End the active node, so that ``node``, which has loaded a snapshot, is elected."""
        active = self._active()
        if active is None or active is node or not node.process.is_alive or not node.member.follows:
            return
        if self.random.random() < 0.5:
            active.kill()
            active.restart(8.0)
        else:
            self._request_handover()

    def _count_takeover(self, node: LoadingNode) -> None:
        self.takeovers += node.loads > 0

    def _operate(self) -> None:
        """End the alarm of a full etcd; nobody copies data directories."""
        self.simulator.later(1.0, self._operate)
        if self.etcd.is_full:
            self.etcd.end_alarm()

    # The rows of both nodes

    def _end_faults(self) -> None:
        super()._end_faults()
        self.simulator.later(20.0, self._compare)

    def _compare(self) -> None:
        self.simulator.later(3.0, self._compare)
        active = self._active()
        if active is None:
            return
        (standby,) = (node for node in self.nodes if node is not active)
        if not standby.process.is_alive or not standby.member.follows:
            return
        self._contents.clear()
        service = cast(SnapshotServer, active.service)
        environments = {"statestore": service.store.environment, "mqtt": service.persistence.environment}
        for node, opened in ((active, environments), (standby, standby.member._data.environments)):
            for name, environment in opened.items():
                node.process.start_thread(self._read, node, name, environment)
        self.simulator.later(1.0, self._check_equal)

    def _read(self, node: LoadingNode, name: str, environment: LoggedEnvironment) -> None:
        environment.read(lambda _: None)
        tables = self._contents[node.name, name] = deepcopy(node.disk.tables[environment.path])
        if name == "mqtt":  # a start removes rows of sessions that have ended, without the log
            loader = _Loader(cast(Any, TableTransaction(tables)), cast(Any, {table: table for table in tables}), 0)
            loader.load()

    def _check_equal(self) -> None:
        """Environments that end with the same commit have the same rows."""
        for name in LOGS:
            found = [self._contents.get((node.name, name)) for node in self.nodes]
            one, two = found
            if one is None or two is None or one["meta"].get(b"log") != two["meta"].get(b"log"):
                continue
            for table in one:
                if one[table] != two[table]:
                    keys = sorted(key for key in one[table] | two[table] if one[table].get(key) != two[table].get(key))
                    raise Violation(f"{name}, {table}: the rows of both nodes differ in {keys[:5]}")
            self._compared.add(name)

    def _check_end(self) -> None:
        super()._check_end()
        if self._compared != set(LOGS):
            raise Violation(f"the rows of both nodes were compared for {self._compared} only")


def simulate(seed: int, faults: Iterable[str] = FAULTS, load_faults: Iterable[str] = LOAD_FAULTS) -> Result:
    """Run a seed with faults of these kinds, of nodes and of loads.

    Raises:
        Violation: a rule was broken.
    """
    return run_to_end(LoadingSimulation(seed, tuple(faults), tuple(load_faults)))


LOADING_NODES: Final = SeededSimulation("two nodes that load snapshots", simulate)
