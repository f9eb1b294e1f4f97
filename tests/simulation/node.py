"""A node in a virtual loop, on a simulated disk, and the network to its MQTT clients.

The listener accepts real sockets and writes to their descriptors, which no loop can replace. The network therefore
begins one layer above: a connection is a ``ServerLink`` with a transport in memory, and without a descriptor, so that
the link writes to the transport. Everything behind the socket is the code of production.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from starlette.applications import Starlette
from uvicorn.server import ServerState

from penstock.console.console import Console
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.subscribing import FILTER_WORK
from penstock.mqtt.persistence import Persistence
from penstock.mqtt.server import MqttServer
from penstock.mqtt.storage import SCHEMA as MQTT_SCHEMA
from penstock.mqtt.storage import TABLES as MQTT_TABLES
from penstock.mqtt.transport.link import ServerLink
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.mqtt.transport.listener_state import ListenerState
from penstock.node.api import api_routes
from penstock.node.config.node import RuleSection
from penstock.node.http import HttpAccess, HttpConnection, audited, master_app, server_config
from penstock.node.metric_help import add_metrics
from penstock.node.node import _store_metrics
from penstock.node.pipeline_commands import PipelineCommands
from penstock.node.rules import Identities, RuleService, TubeTarget
from penstock.runtime.io import loop as runtime_loop
from penstock.runtime.io.clock import SteppedClock
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.metrics import Metrics, counters_of
from penstock.runtime.turns import TURN_SHARES
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.rows import TABLES
from penstock.statestore.service.service import StateStoreService
from penstock.statestore.service.storage import SCHEMA, Storage
from penstock.tube.admin.master import is_protected
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.master.master import TubeMaster
from penstock.tube.master.metadata import SCHEMA as SETTING_SCHEMA
from penstock.tube.master.metadata import TABLES as SETTING_TABLES
from penstock.tube.master.metadata import SettingStore
from penstock.tube.storage.meta import SCHEMA as META_SCHEMA
from penstock.tube.storage.meta import TABLES as META_TABLES
from penstock.tube.storage.meta import MetaStore
from tests.simulation.disk import SimulatedDisk, TableEnvironment
from tests.simulation.history import Violation
from tests.simulation.loop import MachineClock, VirtualLoop
from tests.simulation.network import Peer, check_closed, sent
from tests.simulation.tube_client import BROKER, CAPTURED, CAPTURED_TOPICS, MASTER, PARTITIONS

__all__ = ["HTTP", "TOKEN", "Connection", "NetworkClient", "SimulatedNode"]

PATH = Path("/simulated/statestore")
MQTT_PATH = Path("/simulated/mqtt")
TUBE_PATH = Path("/simulated")
SEGMENT_BYTES = 16 << 10
"""Small, so that segments are used again, and some commits fit into none."""


LOG_SEGMENT_BYTES = 64 << 10
"""Of the TubeMQ log."""
LARGEST_WORK = 64 + FILTER_WORK
"""Work of the largest packet: a CONNECT counts 64 units, and may publish a will, which counts one for every eight
receivers."""
WAITING_SHARES = 3 * TURN_SHARES
"""Shares of an iteration for connections that wait: those with unread packets, those with queued messages, and those
whose CONNECT or end waits."""
HTTP = (MASTER[0], 8080)
TOKEN = "token of the administration"


class NetworkClient(Protocol):
    """The client's end of a connection."""

    def data_received(self, data: bytes) -> None: ...

    def connection_lost(self) -> None: ...


class SimulatedNode:
    """One life of a node. It ends with the loop: nothing of it is closed, as when power is lost."""

    def __init__(
        self,
        loop: VirtualLoop,
        disk: SimulatedDisk,
        machine: MachineClock,
        *,
        limits: BrokerLimits,
        options: StoreOptions,
    ) -> None:
        self.loop = loop
        self.disk = disk
        self.machine = machine
        self.clock = SteppedClock(wall=machine.wall_ns, elapsed=machine.elapsed_ns)
        environment = SimulatedLog(loop, TableEnvironment(disk, PATH, TABLES, schema=SCHEMA), disk)
        self.service = StateStoreService(
            PATH,
            clock=self.clock,
            steady=self.steady_ms,
            options=options,
            storage=Storage(PATH, environment=environment),
        )
        writer = self.service._writer
        writer.queue = SimulatedCommitQueue(loop, disk, "statestore", writer)
        self.persistence = persistence = Persistence(MQTT_PATH)
        log = SimulatedLog(loop, TableEnvironment(disk, MQTT_PATH, MQTT_TABLES, schema=MQTT_SCHEMA), disk)
        persistence._store._environment = log
        persistence._store._tables = log.tables
        persistence._queue = SimulatedCommitQueue(loop, disk, "mqtt", persistence)
        self.server = MqttServer(services=[self.service], limits=limits, clock=self.clock)
        self.broker, self.master = self._tube(loop, disk)
        self._pages = server_config(self._http())
        self._listener = ListenerState(ListenerSettings(), self.server.limits)
        self._share = limits.max_turn_work
        self.reads = 0
        """Reads of MQTT connections in this iteration of the loop."""
        self._work = 0
        self._quotas, self._options = self.service._engine.quotas, self.service.options
        loop.on_turn(self._check_turn)
        self._ports = 10_000
        # Stalls are measured on the clock of the process, which says nothing about virtual time.
        self._stalls = runtime_loop._watches[loop] = runtime_loop.StallWatch(loop, loop.time)

    def _tube(self, loop: VirtualLoop, disk: SimulatedDisk) -> tuple[TubeBroker, TubeMaster]:
        """Broker and master of the log; neither is started."""

        def meta(path: Path) -> MetaStore:
            tables = TableEnvironment(disk, path, META_TABLES, schema=META_SCHEMA)
            return MetaStore(path, environment=SimulatedLog(loop, tables, disk))

        def settings(path: Path) -> SettingStore:
            tables = TableEnvironment(disk, path, SETTING_TABLES, schema=SETTING_SCHEMA)
            return SettingStore(path, environment=SimulatedLog(loop, tables, disk))

        def commit_queue(name: str, client: CommitClient[Any]) -> CommitQueue[Any]:
            return SimulatedCommitQueue(loop, disk, name, client)

        broker = TubeBroker(
            TUBE_PATH,
            masters=[f"{MASTER[0]}:{MASTER[1]}"],
            limits=TubeLimits(segment_bytes=LOG_SEGMENT_BYTES, cached_bytes=LOG_SEGMENT_BYTES),
            heartbeat_s=5.0,
            files=disk,
            clock=self.steady_ms,
            open_meta=meta,
            commit_queue=commit_queue,
        )
        master = TubeMaster(
            TUBE_PATH / "master",
            admin_token=TOKEN,
            clock=self.steady_ms,
            open_settings=settings,
            commit_queue=commit_queue,
        )
        master.on_change = broker.heartbeat_now
        return broker, master

    def _http(self) -> Starlette:
        """The pages of the HTTP listener."""
        server, service, broker = self.server, self.service, self.broker
        metrics = Metrics()
        add_metrics(metrics, "mqtt", lambda: counters_of(server.stats))
        add_metrics(metrics, "statestore", lambda: _store_metrics(service))
        add_metrics(metrics, "tube", lambda: broker.stats)
        console = Console(node=_not_simulated, health=_not_simulated, listeners=tuple, rules=tuple, disk=_not_simulated)
        console.show_mqtt(server, lambda: 0.0)
        console.show_statestore(service)
        trail, identify = AuditList(), HttpAccess(TOKEN)
        return master_app(
            self._problems,
            metrics,
            audited(self.master.webapi, "master", trail, TOKEN, is_protected),
            identify=identify,
            more=api_routes(console, server, identify, trail, (), lambda: None, PipelineCommands({})),
        )

    def _problems(self) -> list[str]:
        """Why the node is not ready."""
        parts = (self.service, self.persistence, self.broker)
        return [str(problem) for part in parts if (problem := part.failure or part.stalled) is not None]

    def _accept_http(self) -> HttpConnection:
        return HttpConnection(self._pages, ServerState(), {}, self.loop)

    def steady_ms(self) -> int:
        """The clock of expiry."""
        return self.machine.steady_ms()

    @property
    def has_failed(self) -> bool:
        """Whether a part of the node commits nothing any more."""
        failures = (self.service.failure, self.persistence.failure, self.broker.failure)
        return any(failure is not None for failure in failures)

    @property
    def is_stalled(self) -> bool:
        """Whether a part of the node waits for disk space."""
        return any(part.stalled is not None for part in (self.service, self.persistence, self.broker))

    async def start(self) -> None:
        self.clock.start()
        await self._start_log()
        await self.service.start(self.server.outlet)
        await self.server.recover(self.persistence, steady=self.steady_ms)
        self.loop.network.listen(HTTP, cast(Callable[[], Peer], self._accept_http))

    async def _start_log(self) -> None:
        """Start the log, with its topics, and the rules that write to one of them."""
        await self.master.start(*MASTER)
        await self.broker.start(*BROKER)
        registered = self.broker.registered
        assert registered is not None
        await registered.wait()
        known = {topic.name for topic in self.master.topics()}
        for topic, partitions in PARTITIONS.items():
            if topic not in known:
                await self.master.create_topic(topic, partitions)
            await self.master.wait_topic(topic, 60.0)
        identities = Identities(f"{self.loop.true_ms():x}")
        for mqtt_topic in CAPTURED_TOPICS:
            section = RuleSection(filter=mqtt_topic, topic=CAPTURED)
            rule = RuleService(
                section,
                TubeTarget(section, self.broker.append, partial(self.broker.shape_of, CAPTURED)),
                identities=identities,
                later=self.loop.call_later,
            )
            self.server.add_service(rule)

    def _check_turn(self) -> None:
        """An iteration handles a share of each read, and those of connections that wait for another one; the node never
        contains more than its limits. Runs after each iteration, most of which do nothing that counts."""
        done, reads = self.server.broker.work, self.reads
        if done != self._work:
            work, self._work = done - self._work, done
            if work > WAITING_SHARES * self._share:
                self.check_work(work, reads + WAITING_SHARES, f"an iteration of the loop with {reads} reads")
            self._check_queues()
        self.reads = 0
        store, options = self._quotas, self._options
        if store.keys > options.max_keys or store.size > options.max_bytes:
            _check_limit("keys", store.keys, options.max_keys)
            _check_limit("bytes of keys", store.size, options.max_bytes)

    def check_work(self, work: int, shares: int, what: str) -> None:
        """Check that ``work`` is at most that of so many shares, or of a shared queue whose session has ended.

        That queue is given to the other members of the group as a whole.
        """
        share = self.server.limits.max_turn_work
        if work <= shares * share + LARGEST_WORK:
            return
        sessions = self.server.broker.sessions.values()
        queued = sum(len(session.waiting) + session.inflight.count for session in sessions)
        if work > shares * share + LARGEST_WORK + queued:
            raise Violation(f"{what} took {work} units; a share of a turn is {share}, and {queued} messages are queued")

    def _check_queues(self) -> None:
        """The broker never contains more than its limits; nothing is retained or queued without work."""
        broker, limits = self.server.broker, self.server.limits
        _check_limit("retained messages", broker.retained.count, limits.max_retained_messages)
        _check_limit("bytes of retained messages", broker.retained.bytes, limits.max_retained_bytes)
        messages, size, subscriptions = limits.max_queued_messages, limits.max_queued_bytes, limits.max_subscriptions
        for session in broker.sessions.values():
            waiting = session.waiting
            if len(waiting) > messages or waiting.bytes > size or len(session.subscriptions) > subscriptions:
                _check_limit("queued messages of a session", len(waiting), messages)
                _check_limit("queued bytes of a session", waiting.bytes, size)
                _check_limit("subscriptions of a session", len(session.subscriptions), subscriptions)

    def accept(self, client: NetworkClient) -> Connection:
        """A connection of ``client``, open at once."""
        self._ports += 1
        link = ServerLink(self.server, self._listener, "192.0.2.1", self._ports, "192.0.2.1")
        connection = Connection(self, link, client)
        self.server.arrived(link)
        link.connection_made(connection.transport)
        return connection


def _check_limit(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise Violation(f"the node contains {count} {what}; the limit is {limit}")


def _not_simulated() -> Any:
    raise AssertionError("no client asks for it")


class AuditList(AuditTrail):
    """An audit trail in memory."""

    def __init__(self) -> None:
        super().__init__(TUBE_PATH)

    def _append(self, line: bytes) -> None:
        """Forget the entry: the trail has tests of its own."""


class Connection:
    """Two directions of bytes with random delays and cuts between reads. Order is kept, until the connection is cut."""

    def __init__(self, node: SimulatedNode, link: ServerLink, client: NetworkClient) -> None:
        self._loop = loop = node.loop
        self._node = node
        self._link = link
        self._client = client
        self._arrival = {True: loop.time(), False: loop.time()}
        """When the last bytes in each direction arrive; True: to the server."""
        self._waiting: deque[bytes] = deque()
        """Bytes that arrived while the server does not read; empty: the client sends nothing more."""
        self.reading = True
        self.has_ended = False
        """Whether the client sends nothing more."""
        self.is_cut = False
        self.is_silent = False
        self.ended_ms: int | None = None
        """When either end, or the network, ended the connection."""
        self.closed_by_server = False
        self.transport = MemoryTransport(self)

    def send(self, data: bytes) -> None:
        """Send to the server; no effect after :meth:`end`."""
        if not self.has_ended:
            self._send(data, self._to_server, to_server=True)

    def end(self) -> None:
        """Send nothing more; what the server sends still arrives."""
        if not self.has_ended:
            self.has_ended = True
            arrival = self._arrival[True] = max(self._arrival[True] + 1e-6, self._loop.time())
            self._loop.call_at(arrival, self._to_server, b"")

    def send_to_client(self, data: bytes) -> None:
        self._send(data, self._to_client, to_server=False)

    def cut(self) -> None:
        """Drop what is under way; both ends notice, each in its time."""
        if not self.is_cut:
            self.is_cut = True
            self._end()
            self.transport.closing = True
            self._loop.soon(0.05, self._link.connection_lost, None)
            self._loop.soon(0.05, self._client.connection_lost)

    def fall_silent(self) -> None:
        """Drop what is under way and whatever is sent from now on; neither end notices."""
        self.is_silent = True
        self._end()

    def close(self) -> None:
        """The server closes: what it has sent still arrives."""
        if not self.transport.closing:
            self.transport.closing = True
            self.closed_by_server = True
            self._end()
            self._loop.call_at(self._arrival[False] + 0.001, self.cut)

    def resume(self) -> None:
        self.reading = True
        while self.reading and self._waiting:
            self._read(self._waiting.popleft())

    def _end(self) -> None:
        if self.ended_ms is None:
            self.ended_ms = self._loop.true_ms()

    def _send(self, data: bytes, deliver: Callable[[bytes], None], *, to_server: bool) -> None:
        loop, arrivals = self._loop, self._arrival
        for piece, delay_s in sent(loop.random, data):
            # A little later than the last: timers of the same time have no order.
            arrival = max(arrivals[to_server] + 1e-6, loop.time() + delay_s)
            arrivals[to_server] = arrival
            loop.call_at(arrival, deliver, piece)

    def _to_server(self, data: bytes) -> None:
        if self.is_cut or self.is_silent or self.transport.closing:
            return
        if self.reading and not self._waiting:
            self._read(data)
        else:
            self._waiting.append(data)

    def _read(self, data: bytes) -> None:
        node = self._node
        if not data:
            if not self._link.eof_received():
                self.transport.close()
            check_closed(self._loop, lambda: self.transport.closing, "a connection of MQTT")
            return
        node.reads += 1
        work = node.server.broker.work
        self._link.data_received(data)
        node.check_work(node.server.broker.work - work, 1, "a read of a connection")

    def _to_client(self, data: bytes) -> None:
        if not (self.is_cut or self.is_silent):
            self._client.data_received(data)


class MemoryTransport(asyncio.Transport):
    """The server's end of a connection; what is written has left."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self.closing = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        if not self.closing:
            self._connection.send_to_client(bytes(data))

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self._connection.close()

    def abort(self) -> None:
        self._connection.cut()

    def is_reading(self) -> bool:
        return self._connection.reading

    def pause_reading(self) -> None:
        self._connection.reading = False

    def resume_reading(self) -> None:
        self._connection.reading = True
        self._connection._loop.call_soon(self._connection.resume)


class SimulatedCommitQueue(CommitQueue[Any]):
    """A commit queue with a task of the loop as its thread.

    A commit in the loop takes no virtual time; one in the thread ends after the time that its operations took.
    """

    def __init__(self, loop: VirtualLoop, disk: SimulatedDisk, name: str, client: CommitClient[Any]) -> None:
        super().__init__(name, client)
        self._simulated = loop
        self.clock = lambda: disk.spent_s

    def start(self) -> None:
        self._loop = self._simulated
        self._jobs = cast(Any, self)
        self._worker = cast(threading.Thread, self)

    def put(self, batch: Any) -> None:
        """Take a job of the thread."""
        self._simulated.soon(0.002, self._work_on, batch)

    def _work_on(self, batch: Any) -> None:
        failure, seconds = self._write(batch)
        self._simulated.call_later(seconds, self._end_commit, batch, failure, seconds)


class SimulatedLog(LoggedEnvironment):
    """A write-ahead log with a task of the loop as its thread."""

    def __init__(self, loop: VirtualLoop, tables: TableEnvironment, disk: SimulatedDisk) -> None:
        super().__init__(tables, files=disk, segment_bytes=SEGMENT_BYTES)
        self._loop = loop
        self._hasty = False

    def _start_thread(self) -> None:
        self._follower = cast(threading.Thread, self)
        self._haste = cast(threading.Event, self)

    def set(self) -> None:
        """Have the log applied soon [threading.Event]."""
        if not self._hasty:
            self._hasty = True
            self._loop.soon(0.05, self._follow_once)

    def _follow_once(self) -> None:
        self._hasty = False
        if self._write_back(hasty=True) and self.lack is not None:
            self._loop.call_later(1.0, self.set)
