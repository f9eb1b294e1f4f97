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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.routing import Route

import penstock
from penstock.cluster.client import EtcdClient, EtcdDeniedError, EtcdUnavailableError
from penstock.cluster.leadership import Leadership
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
from penstock.cluster.standby import applied_by_members
from penstock.cluster.watch import KeyWatch
from penstock.console.cluster import member_reasons
from penstock.console.snapshots import ClusterMember, ClusterSnapshot, Reason
from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError
from penstock.mqtt.server import MqttServer
from penstock.node.backup import Backups
from penstock.node.cluster.clock import ClusterClock
from penstock.node.cluster.commit_state import CommitState
from penstock.node.cluster.etcd_members import EtcdMembers
from penstock.node.cluster.handover import HandoverRequests, handover_key
from penstock.node.cluster.process import HANDED_OVER, write_in_time
from penstock.node.cluster.redirection import RedirectingAccess, Redirection
from penstock.node.cluster.report import INTERVAL_S, MemberReport
from penstock.node.cluster.settings import settings_checksums
from penstock.node.cluster.snapshot import snapshot_route
from penstock.node.cluster.snapshot_recovery import SnapshotRecovery, line_of
from penstock.node.cluster.standby_data import StandbyData
from penstock.node.cluster.state import (
    LOGS,
    ActiveNode,
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
from penstock.node.http import health_routes
from penstock.node.metric_help import METRICS, add_metrics
from penstock.node.node_broker import reachable
from penstock.node.security import NodeSecurity
from penstock.runtime.io.commit_log import CommitLog, LogPosition
from penstock.runtime.io.files import DirectFiles
from penstock.runtime.io.loop import freeze_memory
from penstock.runtime.io.network import bind_error
from penstock.runtime.io.wal import SEGMENT_BYTES, LoggedEnvironment
from penstock.runtime.io.wal_segments import SegmentLog
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.metrics import Metrics
from penstock.statestore.service.preload import PreloadedKeys
from penstock.tube.engine.master.master import MasterPeer
from penstock.tube.master.admin_token import load_or_create_token

__all__ = ["ClusterMembership"]

_log = logging.getLogger("penstock.cluster")

_LOOK_S: Final = 0.2
"""Maximum seconds between two reads of the leadership key by a standby, and between two checks of an active node; a
watch of the keys makes them earlier."""


class ClusterMembership:
    """This node in its cluster. Call :meth:`become_active`, run the node with :attr:`logs`, :attr:`clock`,
    :attr:`commits` and :attr:`tube`, then :meth:`close`.

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
        self._directory: DataDirectory | None = None
        self._settings = settings_checksums(config)
        self._names = logs_of(section)
        """Names of the logs that this node has."""
        self._reports: list[dict[str, Any]] = []
        """The last reports of all members, of an active node."""
        self._handover = threading.Event()
        self._resigned = False
        self._denied_s = 0.0
        """When etcd began to deny requests of the active node."""
        self._fencing = threading.Lock()
        self._active_environments: list[LoggedEnvironment] = []
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
        self._data = self._standby_data()
        self._snapshots = SnapshotRecovery(
            self._client,
            self.prefix,
            self.node,
            self._data_dir,
            None if config.http.tls is None else section.http_tls.options.context(),
            self._data.release,
        )
        self._snapshot_secret = secrets.token_urlsafe(32)
        """Credential of the members for a snapshot while this node is active."""
        self._offers_snapshots = False
        self._report = MemberReport(self._client, self.prefix, self.node, f"{socket.gethostname()}:{self._data_dir}")
        self._leadership: Leadership | None = None
        self._logs: EtcdLogs | None = None
        self._handovers = HandoverRequests(self._client, section)
        self.tube = MemberTube(config, self._client, self.prefix, self._closing, self._tell)
        """Broker and standby master of this node, which runs none without ``cluster.tubemq``."""
        self._thread: threading.Thread | None = None
        self._elected = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.commits = CommitState(self._loop)
        """Whether commits of an active node wait for etcd, and what is refused meanwhile."""
        self._failure: Exception | None = None

    def _connect(self) -> EtcdClient:
        return EtcdClient(self._section.etcd, self._section.login())

    def _standby_data(self) -> StandbyData:
        return StandbyData(self._client, self._section, self._data_dir, self.clock)

    @property
    def keys(self) -> PreloadedKeys | None:
        """Keys of the state store that the standby of an elected node had; None if it did not follow."""
        return self._data.keys

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
            self._directory = DataDirectory(config.data_dir, [LOGS[name] for name in self._names])
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
            bound = await http.start("http", config.http.bind)
            # Commands with this data directory learn from the standby which node is active.
            web: dict[str, object] = {"http": _address(config.http), "http_local": str(reachable(bound))}
            await asyncio.to_thread(
                self.directory.announce, web | ({} if config.http.tls is None else {"http_tls": True})
            )
            server = MqttServer()
            parts.push_async_callback(server.close)
            for name in security.listeners:
                settings = replace(security.settings(name), access=RedirectingAccess(name, self.other_active))
                try:
                    await server.listen(settings)
                except OSError as error:
                    raise bind_error(error, name, security.listeners[name].bind) from error
            parts.push_async_callback(asyncio.to_thread, self._close_data)
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
        """Warnings about the members of the cluster, of an active node."""
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
                self._close_data()
                self._pause(INTERVAL_S)
            except Exception as bug:  # noqa: BLE001 - raised by become_active
                self._failure = bug
                break
        self._snapshots.close()
        self._loop.call_soon_threadsafe(self._elected.set)

    def _look(self) -> bool:
        """Read etcd once; returns True if this node was elected."""
        if not self._snapshots.is_loading:
            self._data.complete_replacement()
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
            if not self._snapshots.is_loading and existing and existing != self._data.names:
                self._close_data()
                self._data.follow(existing)
            if self._data.measure_lag(heads, stamp_ms):
                self._snapshots.has_all_commits()
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
        standby = self._data.standby
        if standby is not None and standby.failure is not None:
            unloaded = None if active is None else self._snapshots.failure
            self._tell(unloaded or line_of(standby.failure))
            self._pause()
            return False
        if (lack := self._data.lack) is not None:
            self._tell(line_of(lack))
            self._pause()
            return False
        if active is not None:
            if standby is not None:
                self._tell(None)
            self._pause()
            return False
        if (reason := self._data.why_not_eligible(has_log=has_log)) is not None:
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
        if not snapshots.proceed(active, self._data.standby):
            return False
        if snapshots.is_loading:
            self.problem = snapshots.progress  # not logged
        elif snapshots.failure is not None:
            self._tell(snapshots.failure)
        if was_loading != snapshots.is_loading:
            self._report.hasten()  # follow and report with the next look
        return True

    def _close_data(self) -> None:
        self._data.close(elected=self._leadership is not None)

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
        self.commits.use(logs)
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
        # While etcd is full the node refuses what it stores itself, as the subscriptions of a bridge.
        refuses = self._logs is not None and self._logs.full is not None
        cause: BaseException | None = error
        while cause is not None:
            etcd_is_full = isinstance(cause, RefusedError) and (refuses or is_full(cause))
            if etcd_is_full or isinstance(cause, EtcdUnavailableError | EtcdDeniedError | FencedError):
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

    def snapshot(self) -> ClusterSnapshot:
        """Read the state of the cluster from etcd, of an active node; blocks. Raises UnavailableError, RefusedError."""
        return read_cluster(self._section, self._console_client, self.commits.wait_s)

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
            "lag_commits": 0 if active else self._data.lag_commits,
            "lag_seconds": 0 if active else self._data.lag_s,
            "ready_standbys": self._ready_standbys() if active else 0,
            "commit_wait_seconds": self.commits.wait_s,
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
            self.commits.refuse_while_full()
            try:
                if self._handover.is_set():
                    self._hand_over()
                elif self._handover_requested():
                    self._handovers.record(self.trail)
                    self._hand_over()
                if self._report.is_due:
                    self._put_report()
                    self._reports = read_reports(self._client, self.prefix)
                    if not self._offers_snapshots:
                        self._offer_snapshots()
                    self.commits.denied = None
            except EtcdDeniedError as error:
                self._denied(error)
            except (UnavailableError, RefusedError) as error:
                _log.warning("etcd does not answer: %s", error)

    def _denied(self, error: EtcdDeniedError) -> None:
        """Restart as a standby if etcd has denied the requests of this active node for the time of the lease, which
        etcd renews nevertheless: no other node could take over."""
        if self.commits.denied is None:
            self._denied_s = time.monotonic()
            _log.error("etcd denies requests of the active node, commits wait: %s", error)
        self.commits.denied = error
        if time.monotonic() - self._denied_s > self._section.lease_s:
            self._fence(f"etcd denies its requests: {line_of(error)}")

    def _handover_requested(self) -> bool:
        assert self._leadership is not None
        assert self._watch is not None
        requested = self._handovers.is_requested(self._leadership.term)
        self._watch.follow_endpoint()
        return requested

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
        self._resigned = True  # before the event loop finds that the lease has ended
        self._leadership.resign()
        self._fence(HANDED_OVER)

    def _fence(self, reason: str) -> None:
        if self._closing.is_set():
            return
        if self._resigned:
            reason = HANDED_OVER
        with self._fencing:  # others wait here for the end of the process
            self._save_in_time()
            if self._draining:
                _log.error("this node is not active any more and stops without draining: %s", reason)
                os._exit(1)
            self._restart(reason)

    def _save_in_time(self) -> None:
        """Call :meth:`_save` for a limited time: a disk may hang.

        If the event loop finds that this node was fenced, this blocks the loop: nothing may be answered any more.
        """
        write_in_time(self._save)

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
        report = {
            "version": penstock.__version__,
            "mqtt": _address(self._config.mqtt),
            "http": _address(self._config.http),
            "tube_master": self._tube_master(),
            "applied": self._data.applied(),
            "seen_ms": self._data.seen_ms,
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


def _address(listener: ListenerSection) -> str:
    return str(listener.bind if listener.advertise is None else listener.advertise)
