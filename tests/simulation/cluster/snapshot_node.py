"""A whole node that loads snapshots. The transfer, the replacement of the environments, and the decision when are those
of production, over :mod:`~tests.simulation.cluster.peer_network` and :mod:`~tests.simulation.cluster.host_files`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.node import backup, backup_directory, replacement
from penstock.node.backup import Backups, BackupSource
from penstock.node.cluster import snapshot
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.cluster.report import MemberReport
from penstock.node.config.node import NodeConfig
from penstock.runtime.io.commit_log import LogPosition, decode_position
from penstock.runtime.io.commit_queue import CommitQueue
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.observability.audit import AuditTrail
from tests.simulation.cluster.host_files import (
    HostDisk,
    HostFiles,
    HostTables,
    host_disk,
    remove_tree,
    replace_on_host,
)
from tests.simulation.cluster.mqtt_node import ActiveNode, MqttNode, PreloadingData, PreloadingMember
from tests.simulation.cluster.node import LOGS, Node, SimulatedLog
from tests.simulation.cluster.peer_network import HTTP, Exchange, Plan, serve
from tests.simulation.cluster.threads import THREADING, TIME, Simulator, wall_ms
from tests.simulation.history import Violation

__all__ = ["LoadingMember", "LoadingNode", "loading"]


class LoadingMember(PreloadingMember):
    """The membership of a node that loads snapshots."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        # Otherwise the size of etcd's database would depend on this machine.
        self._report = MemberReport(self._client, self.prefix, self.node, node.name)
        vars(self)["trail"] = AuditTrail(node.config.data_dir / "audit")

    def _offer_snapshots(self) -> None:
        ClusterMembership._offer_snapshots(self)

    def _loads_snapshot(self, active: Any) -> bool:
        before = self._snapshots.loaded
        loads = ClusterMembership._loads_snapshot(self, active)
        if self._snapshots.loaded > before:
            cast(LoadingNode, self.simulated).on_loaded()
        return loads

    def _standby_data(self) -> LoadingData:
        return LoadingData(self)


class LoadingData(PreloadingData):
    """Environments of such a node, in real files."""

    def environment_at(self, name: str) -> LmdbEnvironment:
        tables, schema = LOGS[name]
        return HostTables(self._path / name, tables, schema=schema)

    def follow(self, names: Any) -> None:
        super().follow(names)
        assert self.standby is not None
        cast(LoadingNode, self.simulated).opened(self.standby.positions)


class LoadingNode(MqttNode):
    """A machine whose node loads snapshots into real files below ``root``."""

    member_type = LoadingMember
    disk: HostDisk
    plan: Callable[[], Plan]
    """Returns what happens to the next connection for a snapshot from this node."""
    on_load_fault: Callable[[str], None]
    on_active: Callable[[], None]
    on_load: Callable[[], None]

    def set_up(self, root: Path) -> None:
        """Put the data directory below ``root``; before the first start."""
        self.disk = HostDisk(self.simulator.random, self.name)
        section = self.config.cluster
        http = {"bind": "127.0.0.1:8080", "advertise": f"{self.name}:8080"}
        self.config = NodeConfig.model_validate({"data_dir": root / self.name, "cluster": section, "http": http})
        self.loads = 0
        self._positions: dict[str, LogPosition] = {}

    def wipe(self) -> None:
        """Replace the disk by an empty one; the process does not run."""
        self.disk.remove(self.config.data_dir)
        self._positions = {}

    def on_loaded(self) -> None:
        """A snapshot was loaded."""
        self.loads += 1
        self.history.note(f"{self.name} has loaded a snapshot")
        self.on_load()

    def opened(self, positions: Mapping[str, LogPosition]) -> None:
        """A standby has opened its environments: none went back, and all of a snapshot are there."""
        for name, position in positions.items():
            before = self._positions.get(name)
            if before is not None and position.sequence < before.sequence:
                raise Violation(f"{self.name}: {name} was at commit {before.sequence}, and is at {position.sequence}")
            self._positions[name] = position

    def stored(self, positions: Mapping[str, LogPosition]) -> None:
        """A snapshot becomes valid: the environments must have these positions at the next start."""
        self._positions |= positions

    def open_exchange(self, member: str) -> tuple[Exchange, Callable[..., None]]:
        """A connection of ``member`` arrives. Raises OSError."""
        service = self.service
        if not self.process.is_alive or service is None:
            raise ConnectionRefusedError(111, "Connection refused")
        active = cast(SnapshotServer, service)
        exchange = Exchange(member, active, self.plan())
        return exchange, active.accept_snapshot(exchange)


class SnapshotServer(ActiveNode):
    """An active node that members read snapshots from."""

    def __init__(self, node: LoadingNode, member: Any, *, gathers: bool) -> None:
        self._exchanges: list[Exchange] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._backups: Backups | None = None
        self._route = member.snapshot_route(lambda: self._backups)
        self.on_load_fault = node.on_load_fault
        super().__init__(node, member, gathers=gathers)

    async def _start(self) -> None:
        await super()._start()
        environments = {"statestore": self.store.environment, "mqtt": self.persistence.environment}
        queues: list[CommitQueue[Any]] = [self.store._writer.queue, self.persistence._queue]
        source = BackupSource(self._node.config.data_dir, environments, {}, queues)
        self._backups = Backups(source, list)
        cast(LoadingNode, self._node).on_active()

    def accept_snapshot(self, exchange: Exchange) -> Callable[..., None]:
        """Return the function that receives the request of a connection."""
        self._exchanges.append(exchange)

        def begin(path: str, headers: Mapping[str, str]) -> None:
            task = self.loop.create_task(serve(self._route, exchange, path, headers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return partial(self.call, begin)

    async def _close(self) -> None:
        if self._backups is not None:
            await self._backups.close()
        await super()._close()

    def process_ended(self) -> None:
        super().process_ended()
        for exchange in self._exchanges:
            if Simulator.running.random.random() < 0.5:  # otherwise its machine has failed
                exchange.fail(ConnectionResetError(104, "Connection reset by peer"))
            exchange.is_silent = True


LoadingNode.active_type = SnapshotServer


def _environment_at(name: str, path: Path, durability: Any) -> LmdbEnvironment:
    tables, schema = LOGS[name]
    return HostTables(path, tables, schema=schema, durability=durability)


@contextmanager
def loading(nodes: Mapping[str, LoadingNode]) -> Iterator[None]:
    """Let production's code for snapshots run on the simulated network and disks of ``nodes``."""
    HostDisk.of_process = {name: node.disk for name, node in nodes.items()}
    HTTP.hosts = dict(nodes)
    restore, begin = snapshot.__dict__["restore"], replacement.begin_replacement

    def restored(manifest: Any, target: Path, *, progress: Callable[[int], None]) -> Any:
        disk = host_disk()

        def step(size: int) -> None:
            disk.step("restore")
            progress(size)

        return restore(manifest, target, progress=step)

    def began(path: Path, names: Any) -> None:
        node = nodes[host_disk().name]
        tables = node.disk.tables
        new = {name: tables[replacement.new_environments(path) / name]["meta"][b"log"] for name in names}
        stored = {name: cast(LogPosition, decode_position(position)) for name, position in new.items()}
        node.disk.on_replaced = partial(node.stored, stored)
        begin(path, names)

    with pytest.MonkeyPatch.context() as patch:
        for module in (snapshot, backup, backup_directory, replacement):
            for name, value in (
                ("threading", THREADING),
                ("time", TIME),
                ("wall_clock_ms", wall_ms),
                ("DirectFiles", HostFiles),
                ("replace_file", replace_on_host),
                ("LoggedEnvironment", SimulatedLog),
            ):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
            if hasattr(module, "shutil"):
                tools = SimpleNamespace(rmtree=remove_tree, copyfileobj=module.shutil.copyfileobj)
                patch.setattr(module, "shutil", tools)
        patch.setattr(snapshot, "http", HTTP)
        patch.setattr(snapshot, "restore", restored)
        patch.setattr(snapshot, "begin_replacement", began)
        for name in LOGS:
            kind = backup._KINDS[name]
            patch.setitem(
                cast(dict[str, Any], backup._KINDS),
                name,
                kind._replace(environment_at=partial(_environment_at, name)),
            )
        yield
    HTTP.hosts = {}
