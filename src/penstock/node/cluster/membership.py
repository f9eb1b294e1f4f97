"""Membership of a node in a cluster: standby until it is elected, then active until it loses its lease.

A standby applies the commits of the active node to its data directory, refuses MQTT clients with the address of the
active node, and reports itself as not ready. When it is elected, :class:`~penstock.node.node.Node` starts on the same
data directory and addresses, with logs in etcd instead of files.

An active node that may have lost its lease does not try to continue: its memory may have changes that were not
committed. It replaces its process by a new one (``exec``), which is a standby. ``may_send`` decides this before each
write to a client, after the last read of the memory: so a process that was suspended sends nothing outdated.

The active node writes the cluster's clock with each commit and once a second: see :mod:`penstock.node.cluster.clock`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.routing import Route

import penstock
from penstock.cluster.client import EtcdClient, EtcdUnavailableError
from penstock.cluster.leadership import Leadership, why_not_eligible
from penstock.cluster.log import (
    EtcdLogs,
    FencedError,
    LogKeys,
    clock_key,
    is_full,
    leader_key,
    read_head,
)
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.standby import Standby, StandbyLog, applied_by_members
from penstock.cluster.watch import KeyWatch
from penstock.console.cluster import member_reasons
from penstock.console.snapshots import ClusterMember, ClusterSnapshot, Reason
from penstock.errors import OutOfSpaceError, PenstockError, RefusedError, StorageError, UnavailableError
from penstock.mqtt.server import MqttServer
from penstock.mqtt.storage import environment_at as mqtt_environment
from penstock.node.backup import Backups
from penstock.node.cluster.clock import ClusterClock
from penstock.node.cluster.etcd_members import EtcdMembers
from penstock.node.cluster.redirection import RedirectingAccess, Redirection
from penstock.node.cluster.report import INTERVAL_S, MemberReport
from penstock.node.cluster.settings import settings_checksums
from penstock.node.cluster.snapshot import snapshot_route
from penstock.node.cluster.snapshot_recovery import SnapshotRecovery, line_of
from penstock.node.cluster.state import (
    LOGS,
    ActiveNode,
    handover_key,
    handover_user_key,
    logs_of,
    members_of,
    read_cluster,
    read_reports,
    snapshot_key,
)
from penstock.node.cluster.tube import MemberTube
from penstock.node.config.listeners import ListenerSection
from penstock.node.config.node import NodeConfig
from penstock.node.data_dir import DataDirectory
from penstock.node.http import append_audit_entry, health_routes
from penstock.node.metric_help import METRICS, add_metrics
from penstock.node.node_broker import reachable
from penstock.node.replacement import complete_replacement
from penstock.node.security import NodeSecurity
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.commit_log import CommitLog, LogPosition, decode_position
from penstock.runtime.io.files import DirectFiles, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.loop import freeze_memory
from penstock.runtime.io.network import bind_error
from penstock.runtime.io.wal import SEGMENT_BYTES, LoggedEnvironment
from penstock.runtime.io.wal_segments import SegmentLog
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.metrics import Metrics
from penstock.statestore.service.preload import PreloadedKeys
from penstock.statestore.service.storage import environment_at as statestore_environment
from penstock.tube.engine.master.master import MasterPeer
from penstock.tube.master.admin_token import load_or_create_token
from penstock.tube.master.metadata import environment_at as tube_environment

__all__ = [
    "ClusterMembership",
    "restart_process",
]

_log = logging.getLogger("penstock.cluster")

REFUSAL: Final = "etcd is full: until it has space, nothing can be stored (see /readyz)"
"""Reason sent to clients."""

MAX_USER: Final = 256
"""Maximum characters of the user of a handover in the audit trail."""

_LOOK_S: Final = 0.2
"""Maximum seconds between two reads of the leadership key by a standby, and between two checks of an active node; a
watch of the keys makes them earlier."""
_SAVE_S: Final = 5.0
"""Maximum seconds that a node without leadership writes commits to LMDB before it restarts, and that a handover waits
for its entry of the audit trail."""
_HANDED_OVER: Final = "its leadership was handed over"


class ClusterMembership:
    """This node in its cluster. Call :meth:`become_active`, run the node with :attr:`logs`, :attr:`clock` and
    :attr:`tube`, then :meth:`close`.

    ``restart`` replaces the process and does not return; it is called in any thread, with the reason.

    Raises:
        ConfigError: an endpoint or a file of ``config.cluster``, or a file of ``tube.tls`` cannot be used.
    """

    def __init__(self, config: NodeConfig, restart: Callable[[str], None]) -> None:
        section = config.cluster
        assert section is not None
        self.node = section.node
        self.prefix = section.prefix
        self.active: ActiveNode | None = None
        """The active node, when etcd was last read by this standby."""
        self.problem: str | None = None
        """The reason why this node cannot become active."""
        self.role = "standby"
        self.clock = ClusterClock()
        """The clock of expiry times."""
        self.keys: PreloadedKeys | None = None
        """Keys of the state store that the standby of an elected node had; None if it did not follow."""
        self._directory: DataDirectory | None = None
        self._settings = settings_checksums(config)
        self._names = logs_of(section)
        """Names of the logs that this node has."""
        self._reports: list[dict[str, Any]] = []
        """The last reports of all members, of an active node."""
        self._handover = threading.Event()
        self._fencing = threading.Lock()
        self._refusals: list[Callable[[str], None]] = []
        self._full: RefusedError | None = None
        """The error of a full etcd while requests that need space are refused."""
        self._active_environments: list[LoggedEnvironment] = []
        self._lag_commits = self._lag_s = math.nan
        self._config = config
        self._section = section
        self._client = self._connect()
        self._console_client = self._connect()
        """Of console and warnings: a member that answers it late must not send commits to another one."""
        self._etcd_members = EtcdMembers(self._console_client)
        self._restart = restart
        self._data_dir = config.data_dir.absolute()
        self._closing = threading.Event()
        self._wake = threading.Event()
        """Ends a pause of the thread: a key that it reads has changed, or this node is to hand over or close."""
        self._watch: KeyWatch | None = None
        self._draining = False
        """True while the node is being closed: without a lease the process then ends instead of restarting."""
        self._standby: Standby | None = None
        self._standby_logs: dict[str, StandbyLog] = {}
        self._environments: dict[str, LoggedEnvironment] = {}
        self._stored: dict[str, LogPosition | None] | None = None
        """Position of each environment while they are not open."""
        self._snapshots = SnapshotRecovery(
            self._client,
            self.prefix,
            self.node,
            self._data_dir,
            None if config.http.tls is None else section.http_tls.options.context(),
            self._release_environments,
        )
        self._snapshot_secret = secrets.token_urlsafe(32)
        """Credential of the members for a snapshot while this node is active."""
        self._offers_snapshots = False
        self._report = MemberReport(self._client, self.prefix, self.node, f"{socket.gethostname()}:{self._data_dir}")
        self._leadership: Leadership | None = None
        self._logs: EtcdLogs | None = None
        self._seen_ms = 0
        """Time of the cluster's clock up to which this node has all commits."""
        self.tube = MemberTube(config, self._client, self.prefix, self._closing, self._tell)
        """Broker and standby master of this node, which runs none without ``cluster.tubemq``."""
        self._thread: threading.Thread | None = None
        self._elected = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._failure: Exception | None = None

    def _connect(self) -> EtcdClient:
        return EtcdClient(self._section.etcd, self._section.login())

    # Standby

    async def become_active(self, on_standby: Callable[[], None] = lambda: None) -> bool:
        """Follow the active node until this one is elected; returns True. ``on_standby`` is called when the standby
        answers clients.

        Raises:
            ConfigError: a file of a listener cannot be used.
            StorageError: the data directory cannot be used.
            UnavailableError: the data directory or an address is in use.
        """
        config = self._config
        async with AsyncExitStack() as parts:
            security = NodeSecurity(config)
            security.tube_denials, security.tube_certificates = self.tube.denials, self.tube.certificates
            parts.callback(security.close)
            security.check_certificates()
            self._directory = DataDirectory(config.data_dir)
            metrics = Metrics()
            self.add_metrics(metrics)
            routes = [
                *health_routes(
                    self.problems,
                    metrics,
                    warnings=lambda: [warning.line() for _, warning in self.warnings()],
                    identify=security.http_access(self._token(), config.http),
                    open_metrics=security.open_metrics,
                ),
                *Redirection(self.other_active, self.problems, "http" if config.http.tls is None else "https").routes(),
            ]
            http = security.http_server("http", Starlette(routes=routes))
            parts.push_async_callback(http.close)
            await http.start("http", config.http.bind)
            server = MqttServer()
            parts.push_async_callback(server.close)
            for name in security.listeners:
                settings = replace(security.settings(name), access=RedirectingAccess(name, self.other_active))
                try:
                    await server.listen(settings)
                except OSError as error:
                    raise bind_error(error, name, security.listeners[name].bind) from error
            parts.push_async_callback(asyncio.to_thread, self._close_standby)
            parts.push_async_callback(self._join)  # also ends the load of a snapshot
            if self._section.tubemq:
                await self.tube.start(security, parts, metrics, self._token(), self.trail)
            _log.info("standby is ready", extra={"fields": {"cluster": self._section.name, "node": self.node}})
            on_standby()
            freeze_memory()
            self._etcd_members.start()
            keys = [leader_key(self.prefix), handover_key(self.prefix)]
            self._watch = KeyWatch(self._client, keys, self._wake.set)
            self._thread = threading.Thread(target=self._stand_by, name="cluster member", daemon=True)
            self._thread.start()
            await self._elected.wait()
            if self._failure is not None:
                raise self._failure
        return True

    def reload(self, read: Callable[[], NodeConfig]) -> None:
        """Read the certificates of TubeMQ again, in a standby: its broker serves clients. Everything else is read when
        the node becomes active."""
        try:
            tls = read().tube.tls
            self.tube.certificates.use(None if tls is None else tls.read())
        except PenstockError as error:
            _log.error("reload failed, the previous certificates of TubeMQ remain: %s", error)
        else:
            _log.info("a standby reads its other files when it becomes active")

    async def _join(self) -> None:
        """Wait for the end of the thread, of a node that was elected or is closed."""
        if not self._elected.is_set():
            self._end_thread()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _end_thread(self) -> None:
        self._closing.set()
        self._wake.set()

    def _pause(self, seconds: float = _LOOK_S) -> None:
        """Wait until one of the watched keys may have changed; in the thread."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _token(self) -> str:
        """The administration token."""
        return self._config.tube.admin_token or load_or_create_token(self.directory.admin_token)

    def other_active(self) -> ActiveNode | None:
        """Return the active node, if it is not this one, whose leadership a restarted process may still find."""
        active = self.active  # read once: another thread sets it
        return None if active is None or (active.node == self.node and self._report.duplicate_at is None) else active

    @property
    def directory(self) -> DataDirectory:
        """The data directory, locked until :meth:`close`."""
        assert self._directory is not None, "call become_active() first"
        return self._directory

    @cached_property
    def trail(self) -> AuditTrail:
        """The audit trail, also that of an active node: two objects could rotate its files at the same time."""
        return AuditTrail(self.directory.audit)

    def problems(self) -> list[str]:
        """Reasons why a standby is not ready, beginning with its role."""
        active = self.other_active()
        if active is None:
            found = ["standby: no node of the cluster is active at present"]
        else:
            mqtt = active.mqtt.get("mqtt", "")
            found = [f"standby: the active node is {active.node} (mqtt {mqtt}, http {active.http})"]
        return found if self.problem is None else [*found, f"cluster: {self.problem}"]

    def warnings(self) -> list[tuple[str, PenstockError]]:
        """Warnings of a node in any role, each with its code."""
        reasons = self._etcd_members.reasons
        return [(each.code, PenstockError(each.what, why=each.why, hint=each.hint)) for each in reasons]

    def member_warnings(self) -> tuple[Reason, ...]:
        """What needs attention in the members of the cluster, of an active node."""
        return tuple(member_reasons(self.members()))

    def _stand_by(self) -> None:
        """Follow until this node is elected or closed; runs in the thread."""
        while not self._closing.is_set():
            try:
                if self._look():
                    break
            except (UnavailableError, RefusedError) as error:
                self.active = None
                refused = isinstance(error, RefusedError)
                self._tell(f"etcd {'refuses a request' if refused else 'does not answer'}: {line_of(error)}")
                self._pause()
            except StorageError as failure:
                self._tell(line_of(failure))
                self._close_standby()
                self._pause(INTERVAL_S)
            except Exception as bug:  # noqa: BLE001 - raised by become_active
                self._failure = bug
                break
        self._snapshots.close()
        self._loop.call_soon_threadsafe(self._elected.set)

    def _look(self) -> bool:
        """Read etcd once; returns True if this node was elected."""
        if not self._snapshots.is_loading:
            self._complete_replacement()
        active = self.active = ActiveNode.read(self._client, self.prefix)
        if self._watch is not None:
            self._watch.follow_endpoint()
        # Until the next one is known, consumers continue without a master.
        self.tube.use_masters([active.tube_master] if active is not None and active.tube_master else [])
        has_log = True
        if active is None or not self.clock.runs or self._report.is_due:
            stamp_ms = self._read_clock(active)
            heads = {name: read_head(self._client, LogKeys(self.prefix, name)) for name in self._names}
            existing = [name for name, head in heads.items() if head is not None]
            has_log = bool(existing)
            # Otherwise the active node has started another one, or a snapshot was loaded.
            if not self._snapshots.is_loading and existing and existing != list(self._standby_logs):
                self._close_standby()
                self._follow(existing)
            if self._standby is not None and self._standby.failure is None:
                positions = self._standby.positions
                lacks = [head.sequence - positions[name].sequence for name, head in heads.items() if head is not None]
                self._lag_commits = sum(max(0, count) for count in lacks)
                if not self._lag_commits:
                    self._seen_ms = stamp_ms
                    self._snapshots.has_all_commits()
                else:  # while commits follow each other, there are always some that it has not read
                    self._seen_ms = max(self._seen_ms, self._standby.applied_ms)
                self._lag_s = max(0, stamp_ms - self._seen_ms) / 1000 if self._seen_ms else math.nan
            else:
                self._lag_commits = self._lag_s = math.nan
            self._put_report()
        if self._report.duplicate_at is not None:
            self._tell(
                f"the cluster has another node with the id {self.node!r} ({self._report.duplicate_at}): give each node"
                " an id of its own, `cluster.node`"
            )
            self._pause()
            return False
        if self._loads_snapshot(active):
            self._pause()
            return False
        standby = self._standby
        if standby is not None and standby.failure is not None:
            unloaded = None if active is None else self._snapshots.failure
            self._tell(unloaded or line_of(standby.failure))
            self._pause()
            return False
        if active is not None:
            if self._standby is not None:
                self._tell(None)
            self._pause()
            return False
        if (reason := self._why_not(has_log=has_log)) is not None:
            self._tell(reason)
            self._pause()
            return False
        leadership = Leadership(
            self._client,
            self.prefix,
            self._description(),
            lease_s=self._section.lease_s,
            on_lost=lambda: self._fence("its lease has ended"),
        )
        if not leadership.campaign():
            return False
        self._leadership = leadership
        self.tube.use_masters([str(reachable(self._config.tube_master.bind))])
        self._tell(None)
        _log.info("elected", extra={"fields": {"cluster": self._section.name, "term": leadership.term}})
        return True

    def _loads_snapshot(self, active: ActiveNode | None) -> bool:
        """Load a snapshot if etcd has deleted commits that this node lacks; returns True while it does."""
        snapshots = self._snapshots
        was_loading = snapshots.is_loading
        if not snapshots.proceed(active, self._standby):
            return False
        if snapshots.is_loading:
            self.problem = snapshots.progress  # not logged
        elif snapshots.failure is not None:
            self._tell(snapshots.failure)
        if was_loading != snapshots.is_loading:
            self._report.hasten()  # follow and report with the next look
        return True

    def _release_environments(self) -> Mapping[str, LogPosition | None]:
        """Close the environments for a snapshot that replaces them; returns their positions."""
        names = list(self._standby_logs)
        self._close_standby()
        self._stored = None
        return {name: self._stored_position(name) for name in names}

    def _complete_replacement(self) -> None:
        """Before an environment is opened: one that is replaced later would go back. Raises StorageError."""
        try:
            complete_replacement(self._data_dir)
        except OSError as error:
            raise StorageError(
                f"a loaded snapshot cannot be put in its place: {error}",
                path=str(self._data_dir),
                hint="check the disk of this node; it continues automatically",
            ) from error

    def _follow(self, names: Sequence[str]) -> None:
        """Open the environments with the logs of the active node, and begin to follow."""
        self._standby_logs = {name: StandbyLog(self._client, self.prefix, name) for name in names}
        self._environments = {
            name: LoggedEnvironment(self._lmdb(name), log=log) for name, log in self._standby_logs.items()
        }
        preloads = {name: preload for name, preload in self._preloads().items() if name in names}
        for name, environment in self._environments.items():
            if (preload := preloads.get(name)) is None:
                environment.open(lambda _: None)
            else:
                preload.open(environment)
        self._standby = Standby(self._client, self.prefix, self.node, self._environments, self._standby_logs, preloads)
        self._standby.start()

    def _preloads(self) -> Mapping[str, PreloadedKeys]:
        """Memory that the standby fills for its election, by log."""
        self.keys = PreloadedKeys()
        return {"statestore": self.keys}

    def _lmdb(self, name: str) -> LmdbEnvironment:
        make = {"statestore": statestore_environment, "mqtt": mqtt_environment, "tube-master": tube_environment}[name]
        return make(self._data_dir / LOGS[name], Durability.DURABLE)

    def _close_standby(self) -> None:
        """Stop following; LMDB then has every commit that was received. Only an elected node uses what it preloaded."""
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()
            if self._leadership is not None:
                standby.catch_up()
            if standby.clock_offset is not None:
                self.clock.received(standby.clock_term, standby.clock_offset)
        if self._leadership is None:
            self.keys = None
        self._standby_logs = {}
        environments, self._environments = self._environments, {}
        for environment in environments.values():
            environment.close()

    def _why_not(self, *, has_log: bool) -> str | None:
        """Return the reason why this node may not stand for election; None if it may."""
        if self._standby is not None:
            return why_not_eligible(self._client, self.prefix, self._standby.positions)
        if self._stored is None:
            self._stored = {name: self._stored_position(name) for name in self._names}
        stored = self._stored
        if has_log:
            return why_not_eligible(self._client, self.prefix, stored)
        member = [name for name, position in stored.items() if position is not None and not position.epoch]
        if member and not self._section.new_log:
            return (
                f"etcd has no log of the cluster {self._section.name!r}, and this data directory belongs to a cluster:"
                " etcd was emptied, or `cluster.name` has changed; on the node with the newest data, set"
                " `cluster.new_log: true`"
            )
        return None

    def _stored_position(self, name: str) -> LogPosition | None:
        if not (self._data_dir / LOGS[name] / "data.mdb").exists():
            return None
        environment = self._lmdb(name)
        try:
            stored = environment.open(lambda transaction: transaction.get(b"log", db=environment.tables["meta"]))
        finally:
            environment.close()
        return None if stored is None else decode_position(stored)

    def _description(self) -> str:
        """The value of the leadership key."""
        return json.dumps(
            {
                "node": self.node,
                "http": _address(self._config.http),
                "url": self._config.http.url or "",
                "mqtt": self._mqtt(),
                "tube_master": self._tube_master(),
            }
        )

    def _tube_master(self) -> str:
        return _address(self._config.tube_master) if self._section.tubemq else ""

    def _mqtt(self) -> dict[str, str]:
        config = self._config
        listeners: dict[str, ListenerSection] = {"mqtt": config.mqtt, **config.mqtt.listeners}
        return {name: _address(listener) for name, listener in listeners.items()}

    def _tell(self, problem: str | None) -> None:
        if problem != self.problem:
            self.problem = problem
            self._report.hasten()  # report it with the next look
            if problem is not None:
                _log.warning("this node cannot become active for now: %s", problem)

    def _read_clock(self, active: ActiveNode | None) -> int:
        """Adjust this node's clock to that of the cluster, and return the time in etcd in ms (0: none); in a standby.
        Raises UnavailableError, RefusedError."""
        request = pb.RangeRequest(key=clock_key(self.prefix))
        answer = self._client.call("KV/Range", request, pb.RangeResponse, within_s=1.0)
        if not answer.kvs:
            return 0
        return self.clock.adjust(answer.kvs[0].value, None if active is None else active.term)

    def _set_clock(self) -> None:
        """Set the clock of this node, which is active from now on. Raises UnavailableError, RefusedError."""
        self._read_clock(None)  # another node may have been active between the last reading and the election
        self.clock.start()

    # Active

    def logs(self) -> Mapping[str, CommitLog]:
        """Return the logs of the elected node, by name; they are not started. Raises UnavailableError, RefusedError."""
        assert self._leadership is not None
        self._set_clock()
        logs = self._logs = EtcdLogs(
            self._client,
            self.prefix,
            self._leadership.term,
            self._names,
            earlier={
                name: SegmentLog(DirectFiles(), self._data_dir / LOGS[name], name, size=SEGMENT_BYTES)
                for name in self._names
            },
            clock=self.clock.now,
            stamp=partial(self.clock.stamp, self._leadership.term),
            on_fenced=self._fence,
        )
        return logs.logs

    def snapshot_route(self, backups: Callable[[], Backups | None]) -> Route:
        """Return the path of the snapshot for members that are too far behind, of an elected node."""

        def positions() -> dict[str, LogPosition]:
            assert self._logs is not None
            return {LOGS[name]: log.position for name, log in self._logs.logs.items()}

        return snapshot_route(self._snapshot_secret, self.trail, positions, backups)

    def _offer_snapshots(self) -> None:
        """Put the secret that members send for a snapshot; a full etcd refuses it. Raises UnavailableError,
        RefusedError."""
        assert self._leadership is not None
        assert self._logs is not None
        offer = {"term": self._leadership.term, "secret": self._snapshot_secret}
        put = pb.PutRequest(key=snapshot_key(self.prefix), value=json.dumps(offer).encode())
        request = pb.TxnRequest(compare=[self._logs.leads()], success=[pb.RequestOp(request_put=put)])
        self._client.call("KV/Txn", request, pb.TxnResponse, within_s=1.0)
        self._offers_snapshots = True

    def started(self, environments: Sequence[LoggedEnvironment]) -> None:
        """Begin to delete commits in etcd and to check the lease: the logs of ``environments`` have been started."""
        assert self._logs is not None
        self._active_environments = list(environments)
        self.role = "active"
        self._client.prefer_leader()
        self._logs.start(lambda: applied_by_members(self._client, self.prefix, self.node))
        self._thread = threading.Thread(target=self._stay_active, name="cluster member", daemon=True)
        self._thread.start()

    def start_failed(self, error: PenstockError) -> None:
        """Restart as a standby if the elected node could not start because of etcd, or had lost its lease; otherwise
        return, since the next start would fail, too."""
        cause: BaseException | None = error
        while cause is not None:
            etcd_is_full = isinstance(cause, RefusedError) and is_full(cause)
            if etcd_is_full or isinstance(cause, EtcdUnavailableError | FencedError):
                self._fence(f"it could not start: {line_of(error)}")
                return
            cause = cause.__cause__

    def reloaded(self, config: NodeConfig) -> None:
        """Report the limits of ``config``, which an active node has reloaded; everything else needs a restart."""
        self._settings |= {"mqtt.limits": settings_checksums(config)["mqtt.limits"]}

    def holds(self) -> bool:
        """Return True while no other node can be active."""
        leadership = self._leadership
        return leadership is not None and leadership.holds()

    def may_send(self) -> bool:
        """Return True while no other node can be active; otherwise restart, unless the node is closing."""
        if self.holds():
            return True
        self._fence("its lease may have expired")
        return False

    def failure(self) -> StorageError | None:
        """Return the reason why acknowledgements wait for etcd; None if they do not."""
        if (full := self._full) is not None:
            return OutOfSpaceError("cluster: etcd is full, commits wait", why=full.what, hint=full.hint)
        if (waited_s := self._wait_s()) < 1:
            return None
        return StorageError(
            f"cluster: commits have been waiting for etcd for {int(waited_s)} s",
            why="no majority of the etcd members answers",
            hint="check the etcd members; the node continues automatically",
        )

    def refusing(self, refuse: Callable[[str], None], refuse_changes: Callable[[str], None]) -> Callable[[str], None]:
        """Call ``refuse`` and ``refuse_changes`` with a reason while etcd is full, and return the function that calls
        ``refuse`` for a full disk, on which commits that need no space still end."""
        reasons = {"disk": "", "etcd": ""}

        def change(source: str, reason: str) -> None:
            reasons[source] = reason
            refuse(reasons["disk"] or reasons["etcd"])
            refuse_changes(reasons["etcd"])

        self._refusals.append(partial(change, "etcd"))
        return partial(change, "disk")

    def _refuse_while_full(self) -> None:
        """Refuse what needs space while etcd is full; the reason is shown after that, and removed after its end."""
        full = None if self._logs is None else self._logs.full
        if (full is None) != (self._full is None):
            for change in self._refusals:
                self._loop.call_soon_threadsafe(change, "" if full is None else REFUSAL)
            self._full = full

    def _wait_s(self) -> float:
        """Seconds that the oldest commit has been waiting for etcd."""
        waiting = [] if self._logs is None else [log.waiting_since_ms for log in self._logs.logs.values()]
        since = min((each for each in waiting if each is not None), default=None)
        return 0.0 if since is None else max(0, wall_clock_ms() - since) / 1000

    def snapshot(self) -> ClusterSnapshot:
        """Read the state of the cluster from etcd, of an active node; blocks. Raises UnavailableError, RefusedError."""
        return read_cluster(self._section, self._console_client, self._wait_s())

    def add_metrics(self, metrics: Metrics) -> None:
        """Add the metrics of a node in any role."""
        add_metrics(metrics, "cluster", self.metric_values)
        metrics.add_rows("etcd", self._etcd_members.metric_rows, METRICS["etcd"], ("endpoint",))

    def metric_values(self) -> Mapping[str, int | float]:
        """Values of the metrics of a node in any role."""
        active = self.role == "active"
        return {
            "active": int(active),
            "blocked": int(not active and self.problem is not None),
            "term": 0 if self._leadership is None else self._leadership.term,
            "lag_commits": 0 if active else self._lag_commits,
            "lag_seconds": 0 if active else self._lag_s,
            "ready_standbys": self._ready_standbys() if active else 0,
            "commit_wait_seconds": self._wait_s(),
            "snapshots": self._snapshots.loaded,
            "snapshots_failed": self._snapshots.failed,
            "log_bytes": 0 if self._logs is None else self._logs.stored_bytes(),
            "etcd_database_bytes": self._etcd_members.used_bytes.get(self._client.endpoint, math.nan),
        }

    def _stay_active(self) -> None:
        """Check lease and handover, and report this node; runs in the thread."""
        while True:
            self._pause()
            if self._closing.is_set():
                return
            self.may_send()
            self._refuse_while_full()
            try:
                if self._handover.is_set():
                    self._hand_over()
                elif self._handover_requested():
                    self._record_handover()
                    self._hand_over()
                if self._report.is_due:
                    self._put_report()
                    self._reports = read_reports(self._client, self.prefix)
                    if not self._offers_snapshots:
                        self._offer_snapshots()
            except (UnavailableError, RefusedError) as error:
                _log.warning("etcd does not answer: %s", error)

    def _handover_requested(self) -> bool:
        assert self._leadership is not None
        assert self._watch is not None
        answer = self._client.once("KV/Range", pb.RangeRequest(key=handover_key(self.prefix)), pb.RangeResponse)
        self._watch.follow_endpoint()
        return bool(answer.kvs) and answer.kvs[0].value == str(self._leadership.term).encode()

    def _record_handover(self) -> None:
        """Write an entry of the audit trail for a handover that was requested through etcd, whose user is the one that
        the command reported."""
        first, last = handover_key(self.prefix), handover_user_key(self.prefix)
        request = pb.RangeRequest(key=first, range_end=last + b"\0")
        found = {entry.key: entry for entry in self._client.once("KV/Range", request, pb.RangeResponse).kvs}
        asked, user = found.get(first), found.get(last)
        if asked is None or user is None or user.mod_revision != asked.mod_revision:
            user = None  # a command of an earlier version puts none, and that of an earlier handover is still there
        row = {
            "server": "node",
            "method": "handover",
            "credential": "etcd",
            "address": "",
            "user": user.value.decode(errors="replace")[:MAX_USER] if user is not None else "",
            "parameters": {"cluster": self._section.name, "node": self.node},
            "result": True,
        }
        _in_time(partial(append_audit_entry, self.trail, row))  # a hung disk is a reason for it

    def masters(self) -> list[MasterPeer]:
        """The TubeMQ masters of the cluster, of an active node."""
        found = {str(report.get("node")): str(report.get("tube_master") or "") for report in self._reports}
        found[self.node] = self._tube_master()
        return [MasterPeer(node, at, node == self.node) for node, at in sorted(found.items()) if at]

    def hand_over_soon(self) -> None:
        """Hand over to a standby at the end of the current task, which sends the response to the request.

        Raises:
            RefusedError: no standby is up to date.
        """
        if not self._ready_standbys():
            raise RefusedError(
                "cluster: no standby is up to date, so nothing was changed",
                hint="start a standby and wait until its lag is small: penstock cluster status",
            )
        request = asyncio.current_task()
        assert request is not None, "a request has a task"

        def hand_over(_: object) -> None:
            self._handover.set()
            self._wake.set()

        request.add_done_callback(hand_over)

    def members(self) -> tuple[ClusterMember, ...]:
        """The members by their last reports, of an active node; empty until it has read them."""
        logs = {} if self._logs is None else self._logs.logs
        commits = {name: log.sequence for name, log in logs.items()}
        return members_of(self._reports, self.node, commits, self.clock.now()) if self._reports else ()

    def _ready_standbys(self) -> int:
        """Number of standbys that can take over, of an active node."""
        return sum(member.role == "standby" and member.ready for member in self.members())

    def _hand_over(self) -> None:
        assert self._leadership is not None
        _log.info("handing over to a standby")
        # While clients are served: after the resignation they wait for the end of this process.
        self._save_in_time()
        self._leadership.resign()
        self._fence(_HANDED_OVER)

    def _fence(self, reason: str) -> None:
        if self._closing.is_set():
            return
        with self._fencing:  # others wait here for the end of the process
            self._save_in_time()
            if self._draining:
                _log.error("this node is not active any more and stops without draining: %s", reason)
                os._exit(1)
            self._restart(reason)

    def _save_in_time(self) -> None:
        """:meth:`_save`, for :data:`_SAVE_S` at most: a disk may hang.

        If the event loop finds that this node was fenced, this blocks the loop: nothing may be answered any more.
        """
        _in_time(self._save)

    def _save(self) -> None:
        """Write what was committed to LMDB: if etcd was restored from a backup, it has lost commits, and a node that
        lacks them as well would continue without them."""
        for environment in self._active_environments:
            try:
                environment.read(lambda _: None)
            except PenstockError as error:
                _log.error("commits were not written to LMDB: %s", error)

    # Both

    def _put_report(self) -> None:
        applied: dict[str, int] = {}
        if self._standby is not None and self._standby.has_read:
            applied = {name: position.sequence for name, position in self._standby.positions.items()}
        report = {
            "version": penstock.__version__,
            "mqtt": _address(self._config.mqtt),
            "http": _address(self._config.http),
            "tube_master": self._tube_master(),
            "applied": applied,
            "seen_ms": self._seen_ms,
            "problem": self.problem,
            "loading": self._snapshots.is_loading,
            "settings": self._settings,
        }
        self._report.put(report, active=self.role == "active")

    async def close(self) -> None:
        """Give up the leadership, so that a standby takes over immediately, and close the broker; after the node was
        closed."""
        await asyncio.to_thread(self._leave)
        await self.tube.close()
        if self._directory is not None:
            self._directory.close()

    def _leave(self) -> None:
        self._end_thread()
        if self._thread is not None:
            self._thread.join()
        if self._watch is not None:
            self._watch.close()
        if self._logs is not None:
            self._logs.close()
        if self._leadership is not None:
            self._leadership.resign()
        self._report.remove()
        self._etcd_members.close()
        self._client.close()
        self._console_client.close()

    def closing(self) -> None:
        """Begin to close: from now on a lost lease ends the process."""
        self._draining = True


def restart_process(reason: str) -> None:
    """Replace this process by a new one with the same arguments, in any thread; no other code of it runs any more."""
    level = logging.INFO if reason == _HANDED_OVER else logging.ERROR
    _log.log(level, "this node is not active any more and restarts as a standby: %s", reason)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - its own command line
    finally:  # the interpreter was removed: nothing may continue
        os._exit(1)


def _in_time(write: Callable[[], object]) -> None:
    """Call ``write`` in a thread, and wait :data:`_SAVE_S` at most: a disk may hang."""
    writing = threading.Thread(target=write, name="cluster save", daemon=True)
    writing.start()
    writing.join(_SAVE_S)


def _address(listener: ListenerSection) -> str:
    return str(listener.bind if listener.advertise is None else listener.advertise)
