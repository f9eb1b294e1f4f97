"""Whole nodes: the faults of two nodes, with the clients of MQTT and the state store.

Clients connect to a node as through a load balancer: most often to the one that was elected last, at times to another
one, and they leave a node that does not answer after some seconds. Their operations are spread over the time of the
faults. Then all faults end, and everything must be answered and delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, cast

from tests.simulation import mqtt_client, statestore_client
from tests.simulation.cluster.loop import ClientLoop
from tests.simulation.cluster.mqtt_history import MqttClusterHistory
from tests.simulation.cluster.mqtt_node import ActiveNode, MqttNode, RefusedConnection
from tests.simulation.cluster.new_log import start_new_log
from tests.simulation.cluster.run import FAULTS as FAULTS_OF_TWO
from tests.simulation.cluster.run import FAULTS_S, Result, Simulation
from tests.simulation.history import Operation, Violation
from tests.simulation.mqtt_client import MqttClient, RetainedReader, mqtt_step
from tests.simulation.mqtt_history import MqttHistory
from tests.simulation.node import Connection, NetworkClient
from tests.simulation.run import _Errors
from tests.simulation.seeds import SeededSimulation
from tests.simulation.statestore_client import StoreClient, store_step
from tests.simulation.tube_client import LogHistory

__all__ = ["FAULTS", "NEW_LOG", "TWO_WHOLE_NODES", "MqttSimulation", "run_to_end", "simulate"]

NEW_LOG: Final = "new log"
"""A backup of etcd is restored while both nodes are stopped, and a new log begins."""
FAULTS: Final = (*FAULTS_OF_TWO, NEW_LOG)
OPERATIONS: Final = 500
AMPLE_MS: Final = 45_000
"""Time in which a node delivers what it has to a connected client."""
CALM_S: Final = 75.0
AWAY_S: Final = 15.0
"""Longest time that a client stays away."""
TAKEOVER_S: Final = 40.0
"""Time by which an election delays what the node before it had to notice."""
READ_S: Final = 15.0


class ClusterReader(RetainedReader):
    """Reads all retained messages after each election."""

    WAIT_S = READ_S


class MqttSimulation(Simulation):
    """One run of a seed."""

    node_type = MqttNode
    quota_bytes = (10_000_000,)
    log_bytes = 120_000
    backlog_bytes = 30_000
    calm_s = CALM_S
    history: MqttClusterHistory

    def __init__(self, seed: int, faults: tuple[str, ...]) -> None:
        super().__init__(seed, faults)
        self.loop = ClientLoop(self.simulator)
        self.mqtt = MqttHistory(AMPLE_MS)
        self.tube = LogHistory(self.history, ())
        self.paused_s = 0.0
        simulation = cast(Any, self)
        random = self.random
        self._store_clients = [
            StoreClient(simulation, f"client-{number}") for number in range(statestore_client.CLIENTS)
        ]
        self._mqtt_clients = [
            MqttClient(simulation, f"mqtt-{number}", expiry_s, random)
            for number, expiry_s in enumerate(mqtt_client.EXPIRY_S)
        ]
        self._clients_of_nodes: list[StoreClient | MqttClient] = [*self._store_clients, *self._mqtt_clients]
        self._reader = ClusterReader(simulation)
        """That of the last election: an earlier one may still be connected to its node."""
        gathers = seed % 5 in {0, 3}  # the others find what a wait would hide
        for node in self.nodes:
            each = cast(MqttNode, node)
            each.on_elected, each.gathers = self._elected, gathers

    def _new_history(self) -> MqttClusterHistory:
        return MqttClusterHistory()

    def _start_clients(self) -> None:
        for client in self._clients_of_nodes:
            self.loop.soon(0.5, client.connect)
        random, loop = self.random, self.loop
        for number, at_s in enumerate(sorted(random.uniform(0.5, FAULTS_S) for _ in range(OPERATIONS))):
            if random.random() < 0.4:
                step = store_step(random, number)
                operation = Operation(step.kind, step.key, step.value, step.px, step.only_new, step.token)
                loop.call_later(at_s, self._ask, self._store_clients[step.client], number, operation)
            elif (wanted := mqtt_step(random)).kind not in {"flood", "crowd"}:
                wanted = wanted._replace(away_s=min(wanted.away_s, AWAY_S))
                loop.call_later(at_s, self._add, self._mqtt_clients[wanted.client], wanted)

    def _ask(self, client: StoreClient, number: int, operation: Operation) -> None:
        client.steps.append((number, operation))
        client.send_next()

    def _add(self, client: MqttClient, step: mqtt_client.MqttStep) -> None:
        client.steps.append(step)
        client.go_on()

    # For clients

    @property
    def node(self) -> MqttSimulation:
        """What clients connect to."""
        return self

    def accept(self, client: NetworkClient) -> Connection:
        """Connect ``client`` to a node."""
        service = self._last
        if self.random.random() < 0.1:
            service = cast(ActiveNode | None, self.random.choice(self.nodes).service)
        if service is None:
            return RefusedConnection(self.loop, client)
        connection = service.accept(client)
        self.loop.call_later(1.0, self._look, service, connection)
        return connection

    def _look(self, service: ActiveNode, connection: Connection) -> None:
        """Leave a node at times that does not answer."""
        if connection.is_cut:
            return
        answers = service is self._last and service.process.resumed_s <= self.simulator.now_s
        if not answers and self.random.random() < 0.3:
            connection.cut()
        else:
            self.loop.call_later(1.0, self._look, service, connection)

    @property
    def _last(self) -> ActiveNode | None:
        """The active node of the last term."""
        services = [cast(ActiveNode, node.service) for node in self.nodes if node.service is not None]
        return max(services, key=lambda service: service.term, default=None)

    def step(self, number: int, client: StoreClient) -> None:
        """``client`` is about to send the operation ``number``."""
        if number % 100 == 7:
            client.cut()
        elif number % 100 == 57:
            client.end()

    def check_done(self) -> None:
        """The simulation ends at its time."""

    def check_failed(self) -> None:
        """A node that commits nothing is found at the end."""

    # Nodes

    def _begin(self, fault: str) -> None:
        if fault != NEW_LOG:
            super()._begin(fault)
        elif NEW_LOG not in self.happened:
            self.history.note(f"{self.simulator.now_s:.6f} {fault}")
            self.happened.append(fault)
            self._clients.start_thread(start_new_log, self.etcd, self.nodes, self.happened)

    def _elected(self) -> None:
        """A node was elected: what only the memory of the node before it had is lost, and its connections have ended,
        although its clients may not have noticed."""
        now_ms = self.loop.true_ms()
        for node in self.nodes:
            if node.service is not None:
                cast(ActiveNode, node.service).lost()
        for client in self._mqtt_clients:
            attachment = client.attachment
            if attachment is not None and attachment.disconnects:  # its will may not be withdrawn
                attachment.connection.fall_silent()
                client.connection_lost()
        self.mqtt.power_lost(now_ms)
        self.paused_s += TAKEOVER_S
        self._reader.connection_lost()
        reader = self._reader = ClusterReader(cast(Any, self))
        self.loop.call_later(0.5, reader.connect)

    def _check_end(self) -> None:
        self._last_answer_s = self.end_s
        super()._check_end()
        if self._is_restored:
            return
        waiting = [client.name for client in self._clients_of_nodes if not client.is_done]
        service = self._last
        assert service is not None
        if waiting or service.problem is not None:
            raise Violation(f"requests are not answered: {', '.join(waiting)} {service.problem or ''}")
        self.mqtt.check_delivered(self.loop.true_ms())


def simulate(seed: int, faults: Iterable[str] = FAULTS) -> Result:
    """Run a seed with faults of these kinds.

    Raises:
        Violation: a rule was broken.
    """
    return run_to_end(MqttSimulation(seed, tuple(faults)))


def run_to_end(simulation: MqttSimulation) -> Result:
    """Run ``simulation``. Raises Violation: a rule was broken, or a part of a node logged an internal error."""
    errors = _Errors()
    log = logging.getLogger("penstock")
    level, propagate = log.level, log.propagate
    log.addHandler(errors)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        result = simulation.run()
    finally:
        log.removeHandler(errors)
        log.setLevel(level)
        log.propagate = propagate
    if errors.first:
        raise Violation(errors.first)
    return replace(result, acknowledged=simulation.mqtt.acknowledged, delivered=simulation.mqtt.delivered)


TWO_WHOLE_NODES: Final = SeededSimulation("two whole nodes", simulate)
