"""A node of a cluster with the MQTT broker and the state store of production, in virtual time.

As in :mod:`tests.simulation.node`, a connection begins above its socket. The node's loop runs in the main thread of its
process; commits and loading have threads of their own. Bytes that arrive, and ends of connections, reach a paused
process when it continues.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.persistence import Persistence
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.link import ServerLink
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.mqtt.transport.listener_state import ListenerState
from penstock.node.cluster.standby_data import StandbyData
from penstock.runtime.io import loop as runtime_loop
from penstock.runtime.io.clock import SteppedClock
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue
from penstock.statestore.hlc import MAX_DRIFT_MS
from penstock.statestore.service.preload import PreloadedKeys, PreloadedStorage
from penstock.statestore.service.service import StateStoreService
from tests.simulation.cluster.history import HistoryEnded
from tests.simulation.cluster.loop import ClientLoop, ProcessLoop, VirtualQueue
from tests.simulation.cluster.mqtt_history import MqttClusterHistory
from tests.simulation.cluster.node import HOLD_S, Member, Node, Service, SimulatedData, SimulatedLog
from tests.simulation.cluster.threads import THREADING, Simulator
from tests.simulation.node import Connection, NetworkClient, SimulatedNode

__all__ = ["ActiveNode", "MqttNode", "RefusedConnection", "ThreadedCommitQueue"]

SHORT_TURN_WORK = 16
"""A small share of a loop turn, of every other node."""


class PreloadingMember(Member):
    """The membership of a node whose standby preloads the keys of the state store."""

    def _standby_data(self) -> PreloadingData:
        return PreloadingData(self)


class PreloadingData(SimulatedData):
    """Environments of such a node."""

    def _preloads(self) -> Mapping[str, PreloadedKeys]:
        return StandbyData._preloads(self)


class MqttNode(Node):
    """A machine with a node, whose service is that of production."""

    member_type = PreloadingMember
    active_type: type[ActiveNode]
    on_elected: Callable[[], None]
    """Called before an elected node loads its data."""
    gathers: bool
    """Whether commits wait for the clients that have just got answers, as those of production do."""

    def _open_service(self, member: Member) -> Service:
        self.on_elected()
        return self.active_type(self, member, gathers=self.gathers)

    def _end_process(self) -> None:
        service = self.service
        super()._end_process()
        if service is not None:
            cast(ActiveNode, service).process_ended()


class ActiveNode(Service):
    """The parts of an active node, composed as :class:`penstock.node.node.Node` does."""

    def __init__(self, node: Node, member: Member, *, gathers: bool) -> None:
        self.term = member.term
        self.connections: list[ClusterConnection] = []
        self.client_loop = ClientLoop(node.simulator)
        self.process = node.process
        self.loop = ProcessLoop(node.simulator)
        # Stalls are measured on the clock of the process, which says nothing about virtual time.
        self._stalls = runtime_loop._watches[self.loop] = runtime_loop.StallWatch(self.loop, self.loop.time)
        self._node, self._member, self._gathers = node, member, gathers
        self._stopped = asyncio.Event()
        self._ports = 10_000
        self._listener = ListenerState(ListenerSettings(), BrokerLimits())
        member._loop = member.commits._loop = self.loop
        self._clock: SteppedClock
        self.server: MqttServer
        self.store: StateStoreService
        self.persistence: Persistence
        try:
            self.loop.run_until_complete(self._start())
        except BaseException:  # also if the process is killed meanwhile
            self.loop.close()
            raise

    async def _start(self) -> None:
        member, node = self._member, self._node
        clock = self._clock = member.clock.version_clock(HOLD_S)
        turn_work = SHORT_TURN_WORK if node.name == "one" else BrokerLimits().max_turn_work
        server = self.server = MqttServer(limits=BrokerLimits(max_turn_work=turn_work), clock=clock)
        clock.start()
        logs = await asyncio.to_thread(member.logs)
        keys = member.keys
        storage = PreloadedStorage(node.config.data_dir, logs["statestore"], keys)
        environment = SimulatedLog(member.environment_at("statestore"), log=logs["statestore"])
        storage._environment, storage._tables, storage.path = environment, environment.tables, environment.path
        path = environment.path
        store = self.store = StateStoreService(path, clock=clock, steady=member.clock.now, storage=storage)
        store._writer.queue = ThreadedCommitQueue("statestore", store._writer, gathers=self._gathers)
        await store.start(server.outlet)
        server.add_service(store)
        log = SimulatedLog(member.environment_at("mqtt"), log=logs["mqtt"])
        persistence = self.persistence = Persistence(log.path, log=logs["mqtt"])
        persistence._store._environment, persistence._store._tables = log, log.tables
        persistence._queue = ThreadedCommitQueue("mqtt", persistence, gathers=self._gathers)
        await server.recover(persistence, steady=store.steady)
        member.check_clock()
        if not member.clock.runs and abs(clock.now() - node.etcd.true_ms()) > MAX_DRIFT_MS:
            raise HistoryEnded(
                "as after a reboot, versions follow the system clock, which is wrong: requests are refused"
            )
        assert store.recovered is not None
        history = cast(MqttClusterHistory, node.history)
        records = {record.key: record.version for record in store.recovered.records}
        history.active(node.name, member.term, records, node.etcd.true_ms())
        member.started([store.environment, persistence.environment])
        server.gate(member.may_send)

    @property
    def problem(self) -> str | None:
        """Why the node commits nothing any more."""
        failure = self.store.failure or self.persistence.failure
        return None if failure is None else str(failure)

    def run(self, stops: Callable[[], bool]) -> None:
        """Run the loop [Service]."""
        try:
            while not stops():
                self.loop.run_until_complete(self._stopped.wait())
        except BaseException:
            self.loop.close()
            raise

    def stop(self) -> None:
        """Wake up the main thread [Service]."""
        self.loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """Commit and acknowledge what was accepted, then end the connections [Service]."""
        try:
            self.loop.run_until_complete(self._close())
        finally:
            self.loop.close()

    async def _close(self) -> None:
        self.lost()
        self.server.stop_receiving()
        self._clock.close()
        await self.store.close()
        await self.server.close()

    def process_ended(self) -> None:
        """The process has ended: so have its connections."""
        for connection in self.connections:
            connection.server_ended()

    def lost(self) -> None:
        """End the connections for those that follow: another node was elected, or this one publishes wills and
        stops."""
        for connection in self.connections:
            connection.lost()

    def call(self, call: Callable[..., object], *args: object) -> None:
        """Call in the node's loop, when its process runs; not at all if it has ended."""
        if self.process.is_alive and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, *args)

    def accept(self, client: NetworkClient) -> ClusterConnection:
        """A connection of ``client``."""
        self._ports += 1
        link = ServerLink(self.server, self._listener, "192.0.2.1", self._ports, "192.0.2.1")
        connection = ClusterConnection(self, link, client)
        self.connections = [each for each in self.connections if not each.is_cut]
        self.connections.append(connection)
        self.call(self._accepted, link, connection)
        return connection

    def _accepted(self, link: ServerLink, connection: ClusterConnection) -> None:
        self.server.arrived(link)
        link.connection_made(connection.transport)


MqttNode.active_type = ActiveNode


class ClusterConnection(Connection):
    """A connection whose server runs in a process of its own."""

    def __init__(self, service: ActiveNode, link: ServerLink, client: NetworkClient) -> None:
        self._service = service
        front = SimpleNamespace(loop=service.client_loop)
        super().__init__(cast(SimulatedNode, front), cast(ServerLink, _LinkInLoop(service, link)), client)

    def lost(self) -> None:
        """It has ended for the node that is active now."""
        self._end()

    def resume(self) -> None:
        self._service.call(super().resume)

    def server_ended(self) -> None:
        """The process of the server has ended. What it has sent arrives, unless its machine has failed."""
        if self.is_cut:
            return
        self._end()
        random = self._loop.random
        if random.random() < 0.5:
            self.is_silent = True
        self.has_ended = self.transport.closing = True
        self._loop.call_at(self._arrival[False] + 0.001 + 0.3 * random.random() ** 3, self._client_notices)

    def _client_notices(self) -> None:
        if not self.is_cut:
            self.is_cut = self.is_silent = True  # the server will not notice it
            self._client.connection_lost()

    def _to_server(self, data: bytes) -> None:
        self._service.call(super()._to_server, data)

    def _read(self, data: bytes) -> None:
        if data:
            self._link.data_received(data)
        elif not self._link.eof_received():
            self.transport.close()


class RefusedConnection(Connection):
    """A connection that nobody accepts."""

    def __init__(self, loop: ClientLoop, client: NetworkClient) -> None:
        super().__init__(cast(SimulatedNode, SimpleNamespace(loop=loop)), cast(ServerLink, self), client)
        self._end()
        self.transport.closing = True
        loop.call_later(0.05 + 0.3 * loop.random.random(), self._refused)

    def connection_lost(self, _error: Exception | None) -> None:
        """There is no server that could notice it."""

    def _refused(self) -> None:
        if not self.is_cut:
            self.is_cut = self.is_silent = True
            self._client.connection_lost()


class _LinkInLoop:
    """A link whose end is reported in the node's loop; the other calls come from there."""

    def __init__(self, service: ActiveNode, link: ServerLink) -> None:
        self._service, self._link = service, link
        self.data_received = link.data_received
        self.eof_received = link.eof_received

    def connection_lost(self, error: Exception | None) -> None:
        self._service.call(self._link.connection_lost, error)


class ThreadedCommitQueue(CommitQueue[Any]):
    """A commit queue whose thread runs in virtual time."""

    def __init__(self, name: str, client: CommitClient[Any], *, gathers: bool) -> None:
        super().__init__(name, client)
        self.gathers = gathers
        self.clock = lambda: Simulator.running.now_s

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs = cast(Any, VirtualQueue())
        self._worker = cast(threading.Thread, THREADING.Thread(self._work))
        self._worker.start()
