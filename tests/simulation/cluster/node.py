"""A node of a cluster in virtual time: membership, leadership, logs in etcd and standby are those of production.

Its service is small: keys with versions and expiry times, of which each write waits for its commit, as in the state
store. It has two environments, because a node has several logs. LMDB is replaced by the tables of
:mod:`tests.simulation.disk`, which obey its contract.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, Protocol, cast

import lmdb
import pytest

from penstock.cluster import client, follow, leadership, log, standby, watch
from penstock.cluster.client import EtcdClient
from penstock.cluster.leadership import Leadership
from penstock.cluster.log import EtcdLogs, leader_key
from penstock.errors import OutOfSpaceError, PenstockError, StorageError
from penstock.mqtt.storage import SCHEMA as MQTT_SCHEMA
from penstock.mqtt.storage import TABLES as MQTT_TABLES
from penstock.node.cluster import (
    clock,
    commit_state,
    membership,
    process,
    report,
    snapshot_recovery,
    standby_data,
)
from penstock.node.cluster.handover import handover_key
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.cluster.standby_data import StandbyData
from penstock.node.cluster.state import ActiveNode
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.node import NodeConfig
from penstock.runtime.io.clock import SteppedClock
from penstock.runtime.io.commit_log import LogPosition, decode_position
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import PUT, Operation
from penstock.statestore.hlc import Hlc, StoreClock
from penstock.statestore.service.preload import PreloadedKeys
from penstock.statestore.service.rows import TABLES
from penstock.statestore.service.storage import SCHEMA
from tests.simulation.cluster.etcd import MEMBERS, Channel, Etcd, Link
from tests.simulation.cluster.history import ClusterHistory
from tests.simulation.cluster.threads import THREADING, TIME, Event, Process, Simulator, boot_ms, wall_ms
from tests.simulation.disk import SimulatedDisk, TableEnvironment
from tests.simulation.history import SET, Violation
from tests.simulation.history import Operation as ClientOperation
from tests.simulation.loop import MachineClock

__all__ = [
    "BACKLOG_BYTES",
    "HOLD_S",
    "LOG_BYTES",
    "PREFIX",
    "Member",
    "Node",
    "Request",
    "Service",
    "SimulatedLog",
    "virtual",
]

NAME: Final = "plant"
PREFIX: Final = f"/penstock/{NAME}/"
LOGS: Final = {"statestore": (TABLES, SCHEMA), "mqtt": (MQTT_TABLES, MQTT_SCHEMA)}
OK: Final = b"+OK\r\n"
ABSENT: Final = b"$-1\r\n"
LOG_BYTES: Final = 6_000
"""Bytes of the logs in etcd: a node that was away for some seconds lacks deleted commits."""
BACKLOG_BYTES: Final = 1_500
HOLD_S: Final = 300.0

Answer = Callable[[bytes | None, Hlc | None], None]
"""Receives payload and version of an answer; payload None: this node is not active."""


@dataclass
class Request:
    """An operation of a client, and what is called with its answer."""

    operation: ClientOperation
    answer: Answer


Waiting = tuple[Request, bytes, Hlc | None]
"""An answer that has not been sent: payload and version."""


@dataclass
class Row:
    value: bytes
    version: Hlc
    expiry_ms: int
    """On the clock of the cluster; 0: never."""

    def encode(self) -> bytes:
        return json.dumps([self.value.decode(), self.version.wall_ms, self.version.counter, self.expiry_ms]).encode()

    @classmethod
    def decode(cls, stored: bytes) -> Row:
        value, wall, counter, expiry_ms = json.loads(stored)
        return cls(value.encode(), Hlc(wall, counter, "StateStore"), expiry_ms)


class Service(Protocol):
    """What an active node serves."""

    def run(self, stops: Callable[[], bool]) -> None:
        """Serve, in the main thread, until ``stops``, which :meth:`stop` has asked to be called."""

    def stop(self) -> None:
        """Ask :meth:`run` to look whether it stops; outside of all threads."""

    def close(self) -> None:
        """End in order, in the main thread."""


class Node:
    """A machine with a data directory and a node, which is started again after each end of its process."""

    member_type: type[Member]

    def __init__(
        self,
        simulator: Simulator,
        etcd: Etcd,
        history: ClusterHistory,
        name: str,
        machine: MachineClock,
        boot_id: str,
        lease_s: int,
    ) -> None:
        self.name = name
        self.machine = machine
        self.boot_id = boot_id
        self.link = Link()
        self.etcd = etcd
        self.disk = SimulatedDisk(simulator.random)
        self.member: Member
        self.service: Service | None = None
        """The service of an active node."""
        self.process = Process(simulator, name, machine)
        self.process.is_alive = False
        section = ClusterSection(name=NAME, node=name, etcd=[*MEMBERS], lease_s=lease_s)
        self.config = NodeConfig(data_dir=Path(f"/simulated/{name}"), cluster=section)
        self.history = history
        self.simulator = simulator
        self.is_held = False
        """Whether an operator lets it stay stopped once it has ended."""
        self.kills = 0
        """Number of SIGKILLs so far."""
        self._stop = False

    def start(self) -> None:
        """Start the process, unless it runs."""
        self.service = None
        self.process = Process(self.simulator, self.name, self.machine)
        self.process.start_thread(self._live)

    def kill(self) -> None:
        """SIGKILL."""
        self.kills += 1
        self.history.killed(self.name)
        self._end_process()

    def end(self) -> None:
        """The process ends, without a promise that depends on what it leaves."""
        self._end_process()

    def set_new_log(self, *, begin: bool) -> None:
        """Set ``cluster.new_log`` in the configuration."""
        section = self.config.cluster
        assert section is not None
        self.config = self.config.model_copy(update={"cluster": section.model_copy(update={"new_log": begin})})

    def copy_data(self, source: Node) -> None:
        """Replace the data of this node by those of ``source``; its process does not run."""
        tables, target = source.disk.tables, self.config.data_dir.absolute()
        self.disk.tables = {target / path.name: deepcopy(rows) for path, rows in tables.items()}

    def _end_process(self) -> None:
        self.service = None
        self.process.kill()

    def restart(self, after_s: float) -> None:
        """Start the node again later; its process has ended, or ends now."""
        self._end_process()
        self.simulator.later(after_s, self._start_again, self.process)

    def _start_again(self, ended: Process) -> None:
        if self.process is ended and not self.is_held:
            self.start()

    def stop(self) -> None:
        """SIGTERM; the service manager starts the node again."""
        self._stop = True
        if self.service is not None:
            self.service.stop()

    def replace_process(self, reason: str) -> None:
        """What happens instead of ``exec``, in a thread of the process; does not return."""
        self.history.note(f"{self.name} restarts: {reason}")
        self._end(0.3)

    def _end(self, restart_s: float) -> None:
        simulator = self.simulator
        simulator.later(0.0, self._restart_ended, self.process, restart_s)
        while True:
            simulator.wait(None)

    def _restart_ended(self, process: Process, after_s: float) -> None:
        if self.process is process and process.is_alive:
            self.restart(after_s)

    def send(self, request: Request) -> None:
        """A request arrives at this machine."""
        service = self.service
        if not self.process.is_alive or service is None:
            request.answer(None, None)
        else:
            cast(KeyService, service).send(request)

    def _open_service(self, member: Member) -> Service:
        """Load the data, and be active. Raises PenstockError."""
        return KeyService(self, member)

    def _live(self) -> None:
        """The main thread of a process."""
        self._stop = False
        self.member = member = self.member_type(self)
        member.elect()
        try:
            self.simulator.wait(self.simulator.random.choice((0.01, 0.1, 0.5)))  # it loads
            service = self._open_service(member)
        except PenstockError as error:
            # The process ends with this error, and the service manager starts it again.
            self.history.note(f"{self.name} does not start: {error}")
            member._leave()
            self._end(1.0)
            raise AssertionError from None
        self.service = service
        service.run(lambda: self._stop)
        self.service = None
        member.closing()
        service.close()
        member._leave()
        self._end(1.0)


class Member(ClusterMembership):
    """The membership of a node, without servers: :meth:`elect` is :meth:`become_active`."""

    def __init__(self, node: Node) -> None:
        self.simulated = node
        super().__init__(node.config, node.replace_process)

    def _connect(self) -> EtcdClient:
        return SimulatedClient(self.simulated)

    def elect(self) -> None:
        """Follow the active node until this one is elected."""
        self._watch = watch.KeyWatch(self._client, [leader_key(self.prefix), handover_key(self.prefix)], self._wake.set)
        self._thread = THREADING.Thread(target=self._stand_by, name="cluster member", daemon=True)
        self._thread.start()
        cast(Event, self._elected).wait()
        if self._failure is not None:
            raise self._failure
        self._thread.join()
        self._close_data()

    def _standby_data(self) -> SimulatedData:
        return SimulatedData(self)

    def _offer_snapshots(self) -> None:
        """Nothing: the operator of the simulation copies the data."""
        self._offers_snapshots = True

    def _loads_snapshot(self, active: ActiveNode | None) -> bool:
        return False

    def holds(self) -> bool:
        """Check the answer against the leadership key at this instant."""
        if not super().holds():
            return False
        node = self.simulated
        holder, lease_s = node.etcd.holder(leader_key(PREFIX)), self._section.lease_s
        node.history.leads(node.name, self.term, holder, node.etcd.true_ms(), lease_s)
        return True

    def check_clock(self) -> None:
        """Tell the history how the clock of an elected node continues."""
        node = self.simulated
        behind_ms = node.etcd.true_ms() - node.machine.elapsed_ns() // 1_000_000 - (self.clock.offset_ms or 0)
        node.history.clock_set(behind_ms, continues=self.clock.runs)

    @property
    def term(self) -> int:
        """The term of an elected node."""
        assert self._leadership is not None
        return self._leadership.term

    @property
    def follows(self) -> bool:
        """Whether this standby has nothing that prevents it from following or being elected."""
        standby = self._data.standby
        return standby is not None and standby.failure is None and self.problem is None

    def environment_at(self, name: str) -> LmdbEnvironment:
        """Return the environment of a log, which is not opened."""
        return self._data.environment_at(name)


class SimulatedData(StandbyData):
    """Environments on the simulated disk of the node of ``member``."""

    def __init__(self, member: Member) -> None:
        super().__init__(member._client, member._section, member._data_dir, member.clock)
        self.simulated = member.simulated

    def _preloads(self) -> Mapping[str, PreloadedKeys]:
        return {}  # the rows are those of the service below

    def environment_at(self, name: str) -> LmdbEnvironment:
        tables, schema = LOGS[name]
        return TableEnvironment(self.simulated.disk, self._path / name, tables, schema=schema)

    def stored_position(self, name: str) -> LogPosition | None:
        tables = self.simulated.disk.tables.get(self._path / name)
        stored = None if tables is None else tables["meta"].get(b"log")
        return None if stored is None else decode_position(stored)


Node.member_type = Member


class SimulatedClient(EtcdClient):
    """A client of the model."""

    def __init__(self, node: Node) -> None:
        super().__init__(MEMBERS)
        self._node, self._process = node, node.process

    def _connect(self, endpoint: str) -> Any:
        return Channel(self._node.etcd, self._process, self._node.link, endpoint)


class SimulatedLog(LoggedEnvironment):
    """An environment whose thread runs in virtual time, and updates the tables at any time."""

    def _start_thread(self) -> None:
        self._haste = cast(Any, Event())
        thread = cast(Any, THREADING.Thread(self._follow_tables))
        self._follower = thread
        thread.start()

    def _follow_tables(self) -> None:
        random = Simulator.running.random
        while True:
            hasty = self._haste.wait(random.choice((0.05, 0.5, 5.0, 60.0)))
            self._haste.clear()
            if self._closing or not self._write_back(hasty=hasty):
                return


class KeyService(Service):
    """The keys of an active node. Requests are handled by one thread, and each environment has one for its commits."""

    def __init__(self, node: Node, member: Member) -> None:
        self.requests: deque[Request] = deque()
        self.arrived = Event()
        self._node, self._member = node, member
        self._versions = member.clock.version_clock(HOLD_S)
        logs = member.logs()
        self._rows: dict[bytes, Row] = {}
        self._environments: dict[str, SimulatedLog] = {}
        for name, each in logs.items():
            environment = self._environments[name] = SimulatedLog(member.environment_at(name), log=each)
            environment.open(partial(self._load, environment))
        self._commits = {name: _Commits(self, each) for name, each in self._environments.items()}
        newest = max((row.version for row in self._rows.values()), default=Hlc(0, 0, "StateStore"))
        self._clock = StoreClock(newest)
        self._ended: deque[list[Waiting]] = deque()
        member.check_clock()
        node.history.started(node.name, member.term, {key: row.version for key, row in self._rows.items()})
        member.started([*self._environments.values()])
        THREADING.Thread(self._check_clock).start()

    def _load(self, environment: LoggedEnvironment, transaction: lmdb.Transaction[bytes]) -> None:
        name = environment._names[0]
        for key, stored in transaction.cursor(db=environment.tables[name]):
            self._rows[bytes(key)] = Row.decode(stored)

    def _check_clock(self) -> None:
        while True:
            self._versions.check()
            Simulator.running.wait(1.0)

    def send(self, request: Request) -> None:
        """A request arrives."""
        self.requests.append(request)
        self.arrived.set()

    def run(self, stops: Callable[[], bool]) -> None:
        """Handle requests and ends of commits [Service]."""
        while not stops():
            self.arrived.wait()
            self.arrived.clear()
            while self._ended:
                for request, payload, version in self._ended.popleft():
                    self._respond(request, payload, version)
            while self.requests:
                self._handle(self.requests.popleft())

    def stop(self) -> None:
        """Wake up the main thread [Service]."""
        self.arrived.set()

    def close(self) -> None:
        """End after the last commit: what was committed is in the tables [Service]."""
        while any(commits.is_busy for commits in self._commits.values()):
            Simulator.running.wait(0.01)
        for environment in self._environments.values():
            environment.close()

    def committed(self, answers: list[Waiting]) -> None:
        """A commit has ended, in its thread."""
        self._ended.append(answers)
        self.arrived.set()

    def _handle(self, request: Request) -> None:
        operation = request.operation
        commits = self._commits["mqtt" if operation.key.startswith(b"m") else "statestore"]
        now_ms = self._member.clock.now()
        row = self._rows.get(operation.key)
        if operation.kind == SET:
            version = self._clock.next(self._versions.now())
            row = Row(operation.value, version, now_ms + operation.px if operation.px else 0)
            self._rows[operation.key] = row
            commits.add((PUT, 0, operation.key, row.encode()), (request, OK, version))
            return
        answer: Waiting = request, ABSENT, None
        if row is not None and not 0 < row.expiry_ms <= now_ms:
            answer = request, b"$%d\r\n%b\r\n" % (len(row.value), row.value), row.version
        if not commits.wait(operation.key, answer):
            self._respond(*answer)

    def _respond(self, request: Request, payload: bytes, version: Hlc | None) -> None:
        if self._member.may_send():
            node = self._node
            node.history.answers(node.name, request.operation.key, version)
            request.answer(payload, version)


class _Commits:
    """Commits of one environment, of all changes that have come meanwhile."""

    def __init__(self, service: KeyService, environment: LoggedEnvironment) -> None:
        self._service, self._environment = service, environment
        self._wanted = Event()
        self._operations: list[Operation] = []
        self._answers: list[Waiting] = []
        self._running: set[bytes] = set()
        self._waiting: list[Waiting] = []
        """Answers to reads of keys in the running commit."""
        THREADING.Thread(self._run).start()

    @property
    def is_busy(self) -> bool:
        """Whether a commit runs, or is wanted."""
        return bool(self._operations or self._running)

    def add(self, operation: Operation, answer: Waiting) -> None:
        """Add a change to the next commit."""
        self._operations.append(operation)
        self._answers.append(answer)
        self._wanted.set()

    def wait(self, key: bytes, answer: Waiting) -> bool:
        """Answer a read after the commit of its key; False if the key is committed."""
        if any(operation[2] == key for operation in self._operations):
            self._answers.append(answer)
        elif key in self._running:
            self._waiting.append(answer)
        else:
            return False
        return True

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            operations, self._operations = self._operations, []
            answers, self._answers = self._answers, []
            self._running = {operation[2] for operation in operations}
            while operations:
                try:
                    self._environment.commit(operations, "a commit")
                    break
                except OutOfSpaceError:
                    Simulator.running.wait(1.0)
                except StorageError as error:
                    raise Violation(f"a commit failed: {error}") from error
            self._running = set()
            waiting, self._waiting = self._waiting, []
            self._service.committed([*answers, *waiting])


def _stepped_clock(**options: Any) -> SteppedClock:
    machine = _node().machine
    return SteppedClock(**{"wall": machine.wall_ns, "elapsed": machine.elapsed_ns, **options})


def _node() -> Node:
    """The node of the thread that runs."""
    thread = Simulator.running.thread
    assert thread is not None
    return _nodes[thread.process.name]


_nodes: dict[str, Node] = {}


def _leave_process(_status: int) -> None:
    _node()._end(1.0)


@contextmanager
def virtual(
    random: Random, nodes: Mapping[str, Node], *, log_bytes: int = LOG_BYTES, backlog_bytes: int = BACKLOG_BYTES
) -> Iterator[None]:
    """Let the code of clusters run in virtual time, with ``nodes`` by name, and so many bytes of each log in etcd."""
    _nodes.clear()
    loop = SimpleNamespace(call_soon_threadsafe=lambda call, *args: call(*args))
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            *(client, follow, leadership, log, standby, watch),
            *(membership, standby_data, commit_state, process, clock, report, snapshot_recovery),
        ):
            for name, value in (
                ("threading", THREADING),
                ("time", TIME),
                ("boot_ms", boot_ms),
                ("wall_clock_ms", wall_ms),
            ):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        patch.setattr(log, "secrets", SimpleNamespace(token_bytes=random.randbytes))
        patch.setattr(membership, "asyncio", SimpleNamespace(Event=Event, get_running_loop=lambda: loop))
        patch.setattr(membership, "os", SimpleNamespace(_exit=_leave_process))
        patch.setattr(clock, "boot_id", lambda: _node().boot_id)
        patch.setattr(clock, "SteppedClock", _stepped_clock)
        patch.setattr(standby_data, "LoggedEnvironment", SimulatedLog)
        for function, name, default in (
            (Leadership.__init__, "clock", boot_ms),
            (EtcdLogs.__init__, "most_bytes", log_bytes),
            (EtcdLogs.__init__, "backlog_bytes", backlog_bytes),
        ):
            patch.setitem(cast(dict[str, Any], function.__kwdefaults__), name, default)
        _nodes.update(nodes)
        yield
    _nodes.clear()
