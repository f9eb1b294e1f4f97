"""The composition root: creates the parts of a node, starts and stops them in order. `process` runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock import compiled
from penstock.console.console import Console
from penstock.console.snapshots import ListenerSnapshot, NodeSnapshot, Rule
from penstock.errors import UnavailableError
from penstock.mqtt.bridge import Bridge, end_removed_bridges, expire_unlisted_bridges
from penstock.mqtt.faults import FaultListener
from penstock.mqtt.persistence import Persistence
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.listener_settings import Transport
from penstock.node.api import api_routes
from penstock.node.backup import Backups, BackupSource
from penstock.node.capture import CAPTURE_PARTITION, ChangeCapture, version_of
from penstock.node.client_warnings import ClientWarnings
from penstock.node.config.listeners import ListenerSection
from penstock.node.config.node import NodeConfig
from penstock.node.config.tracing import needs_otel
from penstock.node.config.tube import tube_limits
from penstock.node.console_clients import ConsoleClients
from penstock.node.data_dir import DataDirectory
from penstock.node.health import NodeHealth
from penstock.node.http import HttpServer, LeaseGate, audited, broker_app, master_app, names_of
from penstock.node.kafka import KafkaTarget
from penstock.node.metric_help import METRICS, add_metrics
from penstock.node.node_broker import advertised_address, node_broker, reachable
from penstock.node.pipeline_commands import PipelineCommands
from penstock.node.rules import Identities, RuleService, RuleTarget, TubeTarget
from penstock.node.security import DEFAULT_LISTENER, NodeSecurity, StorePolicy
from penstock.node.tube_broker import late_batches
from penstock.node.tube_cluster import TubeClusterTarget
from penstock.node.web import WebConsole
from penstock.runtime.io.clock import SteppedClock, monotonic_ms, wall_clock_ms
from penstock.runtime.io.commit_log import CommitLog
from penstock.runtime.io.commit_queue import CommitQueue
from penstock.runtime.io.disk_space import DiskSpace, Writer
from penstock.runtime.io.files import Durability
from penstock.runtime.io.loop import watch_stalls
from penstock.runtime.io.memory import IdleRelease
from penstock.runtime.io.network import Address, bind_error, in_use
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.metrics import Metrics, counters_of
from penstock.statestore.service.preload import PreloadedStorage
from penstock.statestore.service.service import StateStoreService
from penstock.tube.admin import broker as broker_admin
from penstock.tube.admin import master as master_admin
from penstock.tube.admin.request import Caller
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.master.admin_token import load_or_create_token
from penstock.tube.master.master import TubeMaster
from penstock.tube.master.metadata import SettingStore, environment_at
from penstock.tube.storage.broker_storage import BrokerStorage

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from penstock.node.cluster.membership import ClusterMembership
    from penstock.node.telemetry import NodeTelemetry
    from penstock.node.tracing import NodeTraces

__all__ = ["Node", "ReadyNode"]

_log = logging.getLogger("penstock.node")

READY_S = 30.0
"""Time limit in seconds for the registration of broker and topics, which takes about a second within the process."""

_SCHEMES = {Transport.TCP: "mqtt", Transport.TLS: "mqtts", Transport.WS: "ws", Transport.WSS: "wss"}


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """Addresses and settings of a ready node; addresses are HOST:PORT for clients, those of TubeMQ empty in a
    cluster without it."""

    version: str
    pid: int
    data_dir: str
    durability: str
    mqtt: str
    tube_master: str
    tube_broker: str
    tube_broker_http: str
    http: str
    tube_master_tls: str | None = None
    """Address of the master's TLS listener; None if there is none."""
    tube_broker_tls: str | None = None
    http_tls: bool | None = None
    """True: HTTPS; None: plain HTTP."""
    http_url: str | None = None
    """URL for browsers; None: that of ``http``."""
    tube_broker_http_tls: bool | None = None
    admin_token_file: str | None = None
    """File with the administration token; None if the configuration sets the token."""
    listeners: Mapping[str, str] = field(default_factory=dict)
    """URLs of the MQTT listeners by name."""

    def as_json(self) -> dict[str, object]:
        """The line of ``penstock up --json``."""
        return {"event": "ready", **{name: value for name, value in asdict(self).items() if value not in (None, "")}}


class Node:
    """All parts of a node on one data directory. Call ``close()`` also after a failed ``start()``.

    ``membership``: that of an elected node in its cluster, whose broker already runs; None: no cluster. ``on_reload``
    executes a reload that an administrator requests, as SIGHUP; default: :meth:`reload` with ``config``.
    """

    def __init__(
        self,
        config: NodeConfig,
        membership: ClusterMembership | None = None,
        on_reload: Callable[[], bool] | None = None,
    ) -> None:
        self.config = config
        self._on_reload = on_reload or (lambda: self.reload(lambda: config))
        self._membership = membership
        hold_s = config.clock_step_hold_s
        self.clock = SteppedClock(hold_s=hold_s) if membership is None else membership.clock.version_clock(hold_s)
        """Clock of versions and deadlines."""
        self.security = NodeSecurity(config, self.clock.now)
        self.metrics = Metrics()
        self._parts = AsyncExitStack()
        self._store: StateStoreService | None = None
        self._disk = DiskSpace(config.data_dir, config.disk.max_bytes, config.disk.min_free_bytes)
        self.health = NodeHealth()
        self._stalls = 0
        self._started = time.time()
        self._started_ms = monotonic_ms()
        self._rules: list[RuleService] = []
        self._bound: dict[str, Address] = {}
        self.console = Console(
            node=self._snapshot,
            health=self.health.snapshot,
            listeners=self._listeners,
            rules=lambda: tuple(map(_rule, self._rules)),
            disk=lambda: (self._disk.used_bytes, self._disk.free_bytes),
            stalls=lambda: self._stalls,
            managed=config.pipelines.keys,
            schemas=config.console.schemas,
        )
        self._backups: Backups | None = None
        self._persistence: Persistence | None = None
        self._tube_broker: TubeBroker | None = None
        self._console_clients: ConsoleClients | None = None
        self._token = ""
        self.health.add_warnings("security", self.security.warnings)
        self.health.add_warning("clock", "clock_stepped", self.clock.problem)
        if membership is not None:
            self.health.add_warnings("cluster", membership.warnings)
            self.health.members = membership.member_warnings
            self.console.show_cluster(membership.snapshot)
            self.security.tube_denials = membership.tube.denials
            membership.tube.certificates.use(self.security.tube_certificates.used)
            self.security.tube_certificates = membership.tube.certificates
        self._tube_user = (
            (f"penstock-broker-{config.tube.broker_id}", secrets.token_urlsafe(24))
            if membership is None
            else membership.tube.user
        )
        self._logs: Mapping[str, CommitLog] = {}
        """The logs in etcd, of a node in a cluster."""

    def reload(self, read: Callable[[], NodeConfig]) -> bool:
        """Reload the configuration and the files that it names; False if one is invalid."""
        done = self.security.reload(read)
        if self._console_clients is not None:
            self._console_clients.end_revoked()
        if self._store is not None:
            self._store.policies_changed()
        if self._tube_broker is not None:
            self._tube_broker.access_changed()
        return done

    def _reloaded(self) -> dict[str, object]:
        """Reload as on SIGHUP; return what changed. Raises PenstockError: nothing, the error of the file."""
        if not self._on_reload() and self.security.failure is not None:
            raise self.security.failure
        warnings = [warning.line() for warning in self.security.waiting_for_restart]
        return {"disconnected": self.security.disconnected, "warnings": warnings}

    async def start(self) -> ReadyNode:
        """Start every part; returns when all are ready.

        HTTP starts first, so that health can be queried during the recovery of the log; MQTT starts last, so that no
        message arrives before its receivers are ready.

        Raises:
            ConfigError: a certificate file cannot be used; nothing was started.
            StorageError: the data directory or a part of it cannot be used.
            UnavailableError: the data directory or an address is in use, or the TubeMQ broker did not register.
        """
        config = self.config
        self.security.check_certificates()
        self.clock.start()
        self._parts.callback(self.clock.close)
        self._parts.callback(watch_stalls(self._stalled).remove, self._stalled)
        membership = self._membership
        if membership is None:
            directory = DataDirectory(config.data_dir)
            self._parts.callback(directory.close)
        else:
            directory = membership.directory
            self._logs = await asyncio.to_thread(membership.logs)
        telemetry = await self._telemetry()
        await self._check_addresses()
        disk = self._disk
        self._parts.push_async_callback(disk.close)
        await disk.start()
        add_metrics(self.metrics, "disk", disk.metric_values)
        self.health.add_warning("disk", "out_of_space", disk.warning)
        self.metrics.add_rows("group", self.console.group_metrics, METRICS["group"], ("group",))
        self.console.start()
        self._parts.callback(self.console.close)
        self._token = config.tube.admin_token or load_or_create_token(directory.admin_token)
        master = self._master(directory) if membership is None or membership.tube.broker is not None else None
        trail = AuditTrail(directory.audit) if membership is None else membership.trail
        add_metrics(self.metrics, "audit", trail.metric_values)
        self.health.add_warning("audit", "audit_failed", lambda: trail.failure)
        await self._start_http(master, trail)
        if master is not None:
            await self._start_master(master, trail)
            await self._create_topics(master)  # first: a producer fails at once if its topic does not exist
            if membership is not None:
                master.engine.peers, master.engine.hand_over = membership.masters, membership.hand_over_soon
        self._parts.callback(self.security.close)
        # It is closed after the broker and the store, which send their last acknowledgements through it.
        server = self.security.server
        self._parts.push_async_callback(server.close)
        idle_release = IdleRelease(server.forget_routes)
        idle_release.start()
        self._parts.callback(idle_release.close)
        stored = [directory.mqtt, directory.statestore]
        broker = None
        if master is not None:
            broker = await self._broker()
            self.console.show_tube(master, broker)
            master.on_change = broker.heartbeat_now
            await self._await_topics(master)
            stored += [directory.tube_master, broker.storage.meta.path]
        mqtt = await self._mqtt(server, directory, master, broker)
        queues = self._commit_queues(master, broker)
        for part, queue in queues.items():
            queue.gathers = bool(self._logs) and part != "tube"  # a broker's log is in files, also in a cluster
            add_metrics(self.metrics, "commit", partial(dict, duration_seconds=queue.durations), labels={"part": part})
        self._backups = self._backup(directory, master, broker, list(queues.values()))
        # Closed first: it reads the other parts.
        self._parts.push_async_callback(self._backups.close)
        directory.keep(stored)
        faults = await self._faults(mqtt[DEFAULT_LISTENER])
        add_metrics(self.metrics, "node", self._metric_values)
        if telemetry is not None:
            telemetry.start()
            # Closed first: the last export reads the metrics of all parts.
            self._parts.push_async_callback(telemetry.close)
        self.health.state = "ready"
        ready = self._ready(directory, mqtt, faults, master, broker)
        local = str(reachable(self._bound["http"]))
        await asyncio.to_thread(directory.announce, ready.as_json() | {"http_local": local})
        return ready

    def _ready(
        self,
        directory: DataDirectory,
        mqtt: Mapping[str, Address],
        faults: Address | None,
        master: TubeMaster | None,
        broker: TubeBroker | None,
    ) -> ReadyNode:
        """Return the addresses and settings of the started node; ``mqtt``: the bound addresses of its listeners."""
        config = self.config
        return ReadyNode(
            version=penstock.__version__,
            pid=os.getpid(),
            data_dir=str(directory.path),
            durability=str(config.durability),
            mqtt=advertised_address(config.mqtt, mqtt[DEFAULT_LISTENER]),
            listeners={
                name: f"{_SCHEMES[entry.transport]}://{advertised_address(entry, mqtt[name])}"
                + (entry.path if entry.transport.websocket else "")
                for name, entry in self.security.listeners.items()
            }
            | ({} if faults is None else {"faults": f"mqtt://{faults}"}),
            tube_master=self._shown("tube-master", config.tube_master),
            tube_broker=self._shown("tube-broker", config.tube_broker),
            tube_master_tls=None if master is None else _beside(config.tube_master, master.tls_bound),
            tube_broker_tls=None if broker is None else _beside(config.tube_broker, broker.tls_bound),
            tube_broker_http=self._shown("tube-broker-http", config.tube_broker_http),
            http=advertised_address(config.http, self._bound["http"]),
            http_tls=None if config.http.tls is None else True,
            http_url=config.http.url,
            tube_broker_http_tls=None if config.tube_broker_http.tls is None else True,
            admin_token_file=None if config.tube.admin_token is not None else str(directory.admin_token),
        )

    async def close(self) -> None:
        """Stop accepting messages, commit and acknowledge the accepted ones, then disconnect clients and close the
        files."""
        self.health.state = "shutting down"
        await self._parts.aclose()

    async def _check_addresses(self) -> None:
        """Report all addresses that other processes use in one error.

        Raises:
            UnavailableError: at least one is in use.
        """
        wanted = self.config.addresses()
        if self._membership is not None:
            for option in ("tube-broker", "tube.tls.broker_port"):  # the broker already listens
                wanted.pop(option, None)
        taken = await asyncio.to_thread(
            lambda: {option: address for option, address in wanted.items() if address.port and in_use(address)}
        )
        if len(taken) > 1:  # a single address is reported when it is opened, with its option
            shown = ", ".join(f"{address} ({option})" for option, address in taken.items())
            raise UnavailableError(
                f"cannot listen on {len(taken)} addresses: {shown}",
                applied=False,
                why="other processes use them, perhaps another node",
                hint="stop them, or choose other ports: "
                + " ".join(f"--{option} {Address(a.host, 0)}" for option, a in taken.items() if "." not in option),
            )

    async def _http(self, option: str, listener: ListenerSection, server: HttpServer) -> Address:
        bound = await server.start(option, listener.bind)
        self._parts.push_async_callback(server.close)
        return bound

    async def _listen(
        self, option: str, listener: ListenerSection, start: Callable[[str, int], Awaitable[tuple[str, int]]]
    ) -> Address:
        try:
            _, port = await start(listener.bind.host, listener.bind.port)
        except OSError as error:
            raise bind_error(error, option, listener.bind) from error
        return Address(listener.bind.host, port)

    async def _broker_webapi(self, params: Mapping[str, str], caller: Caller) -> Mapping[str, object]:
        if self._tube_broker is None:
            return {"result": False, "errCode": 503, "errMsg": "the broker has not started yet"}
        return await self._tube_broker.webapi(params, caller)

    def _master(self, directory: DataDirectory) -> TubeMaster:
        tube, membership = self.config.tube, self._membership

        def open_replicated(path: Path) -> SettingStore:
            tables = environment_at(path, Durability.DURABLE)
            return SettingStore(path, environment=LoggedEnvironment(tables, log=self._logs["tube-master"]))

        return TubeMaster(
            directory.tube_master,
            config=MasterConfig(
                consumer_session_ms=tube.consumer_session_s * 1000,
                check_visit_tokens=tube.check_visit_tokens,
                limits=tube_limits(tube.limits),
            ),
            admin_token=self._token,
            access=self.security.tube_access(self.config.tube_master, self._tube_user),
            may_answer=_always if membership is None else membership.may_send,
            open_settings=SettingStore if membership is None else open_replicated,
        )

    async def _start_http(self, master: TubeMaster | None, trail: AuditTrail) -> None:
        """Start the HTTP listener: health, metrics, console and the administration of the master."""
        config, membership = self.config, self._membership
        identify = self.security.http_access(self._token, config.http)
        names = names_of(config.http.bind, config.http.advertise, url=config.http.url)
        webapi = _no_tube if master is None else master.webapi
        administer = audited(webapi, "master", trail, self._token, master_admin.is_protected)
        web = WebConsole(cluster=self.console.cluster is not None)
        commands = PipelineCommands(config.pipelines)
        self._console_clients = ConsoleClients(
            self.security.server, self.security.console_access, config.console.schemas, self.security.console_account
        )
        pages = master_app(
            self.health.problems, self.metrics, administer, warnings=self.health.warnings, names=names,
            identify=identify, open_metrics=self.security.open_metrics,
            more=[
                *api_routes(
                    self.console, self.security.server, identify, trail, names, lambda: self._backups,
                    commands, self.security.permissions_of,
                    self._console_clients,
                    self._reloaded,
                ),
                *([] if membership is None else [membership.snapshot_route(lambda: self._backups)]),
                *web.routes(),
            ],
            front=web.page if web.available else None, prepare=self.console.refresh_metrics,
        )  # fmt: skip
        if membership is not None:
            pages.add_middleware(LeaseGate, holds=membership.holds)
        self._bound["http"] = await self._http("http", config.http, self.security.http_server("http", pages))
        self._parts.push_async_callback(commands.close)

    async def _start_master(self, master: TubeMaster, trail: AuditTrail) -> None:
        """Start the master, and the HTTP administration of the broker."""
        config = self.config
        names = names_of(config.tube_broker_http.bind, config.tube_broker_http.advertise)
        identify = self.security.http_access(self._token, config.tube_broker_http)
        administer = audited(self._broker_webapi, "broker", trail, self._token, broker_admin.is_protected)
        # Without a LeaseGate: it shows and changes the state of this broker, which is the same in a standby.
        pages = broker_app(administer, names=names, identify=identify)
        self._bound["tube-broker-http"] = await self._http(
            "tube-broker-http", config.tube_broker_http, self.security.http_server("tube_broker_http", pages)
        )
        tls = config.tube.tls
        certificates = self.security.tube_certificates
        start = master.start if tls is None else certificates.beside(master.start, tls.master_port)
        self._bound["tube-master"] = await self._listen("tube-master", config.tube_master, start)
        self._parts.push_async_callback(master.close)

    def _shown(self, option: str, listener: ListenerSection) -> str:
        """Return the advertised address of a listener that the node may not have ("")."""
        return advertised_address(listener, self._bound[option]) if option in self._bound else ""

    async def _broker(self) -> TubeBroker:
        config = self.config
        tube_master, membership = self._bound["tube-master"], self._membership
        if membership is not None:
            assert membership.tube.broker is not None, "a node without TubeMQ has no broker"
            broker = membership.tube.broker
            self.security.tube_access(config.tube_broker, self._tube_user, broker.access)
            self._bound["tube-broker"] = config.tube_broker.bind
            broker.masters_changed()
        else:
            broker = node_broker(
                config,
                [str(reachable(tube_master))],
                web=self._bound["tube-broker-http"],
                token=self._token,
                access=self.security.tube_access(config.tube_broker, self._tube_user),
                user=self._tube_user,
            )
            tls = config.tube.tls
            certificates = self.security.tube_certificates
            start = broker.start if tls is None else certificates.beside(broker.start, tls.broker_port)
            self._bound["tube-broker"] = await self._listen("tube-broker", config.tube_broker, start)
            self._parts.push_async_callback(broker.close)
        self._tube_broker = broker
        self._disk.add(Writer("TubeMQ sends", broker.refuse_growth, lambda: 0))
        self.health.add_problem("tube", lambda: broker.failure or broker.stalled)
        self.health.add_warnings("tube", lambda: (("late_batches", warning) for warning in late_batches(broker)))
        add_metrics(self.metrics, "tube", lambda: broker.stats)
        registered = broker.registered
        assert registered is not None, "the broker has a master"
        try:
            async with asyncio.timeout(READY_S):
                await registered.wait()
        except TimeoutError:
            raise UnavailableError(
                f"tube: the broker did not register at its master {tube_master} within {READY_S:g} s",
                why="the log above has the response of the master",
                hint="restart; if it happens again, report it with the log",
            ) from None
        return broker

    async def _create_topics(self, master: TubeMaster) -> None:
        """Create the topics of the configuration that do not exist, and set the retention of the others."""
        known = {topic.name: topic for topic in master.topics()}
        for name, topic in self.config.topics().items():
            found = known.get(name)
            policy = None if topic.retention is None else f"delete,{topic.retention}"
            if found is not None and policy not in (None, found.delete_policy):
                await master.change_retention(name, policy)
            if found is None:
                await master.create_topic(name, topic.partitions, topic.stores, delete_policy=policy)
            elif name in self.config.tube.topics and (found.partitions, found.stores) != (
                topic.partitions,
                topic.stores,
            ):
                _log.warning(
                    "topic keeps its partitions and stores",
                    extra={"fields": {"topic": name, "partitions": found.partitions, "stores": found.stores}},
                )

    async def _await_topics(self, master: TubeMaster) -> None:
        """Wait until the broker serves all topics: clients may use them as soon as the node is ready."""
        wanted = self.config.topics()
        for topic in master.topics():
            if topic.name in wanted and topic.writable:
                await master.wait_topic(topic.name, READY_S)
            elif topic.name in wanted:
                _log.warning(
                    "topic does not accept records: it is closed or deleted", extra={"fields": {"topic": topic.name}}
                )
        await master.wait_taken_up([topic.name for topic in master.topics()])

    async def _mqtt(
        self, server: MqttServer, directory: DataDirectory, master: TubeMaster | None, broker: TubeBroker | None
    ) -> dict[str, Address]:
        """Start the state store, the rules and the listeners; return the bound addresses."""
        capture = None if broker is None else self._capture(broker)
        membership = self._membership
        traces = self._traces()
        store = await self._state_store(server, directory, capture, traces)
        self._start_rules(server, broker, traces)
        add_metrics(self.metrics, "mqtt", lambda: counters_of(server.stats))
        persistence = self._persistence = Persistence(
            directory.mqtt, self.config.durability, log=self._logs.get("mqtt")
        )
        add_metrics(self.metrics, "mqtt_storage", persistence.metric_values)
        self.health.add_problem("mqtt sessions", lambda: persistence.failure or persistence.stalled)
        # After the services, which may get wills of clients that disconnected while the node was down.
        recall = self.security.recall if self.security.enforced else None
        await server.recover(persistence, recall=recall, steady=store.steady)
        if membership is not None:
            replicated = [store.environment, persistence.environment]
            membership.started(replicated if master is None else [*replicated, master.environment])
            server.gate(membership.may_send)
            self.health.add_problem("cluster", membership.commits.failure)
            membership.add_metrics(self.metrics)
        self.console.show_mqtt(server, lambda: persistence.commit_s)
        refuse = (
            server.refuse_stored
            if membership is None
            else membership.commits.refusing(server.refuse_stored, server.refuse_changes)
        )
        self._disk.add(Writer("MQTT messages to store", refuse, persistence.reusable_bytes))
        tube_denials, store_denials = self.security.tube_denials, self.security.store_denials
        clients = ClientWarnings(
            lambda: [*server.collect_client_events(), *tube_denials.collect(), *store_denials.collect()], server.limits
        )
        clients.start()
        self._parts.callback(clients.close)
        self.health.add_warnings("mqtt", lambda: (("queue_full", warning) for warning in clients.warnings()))
        await self._bridges(server)
        bound: dict[str, Address] = {}
        for name, entry in self.security.listeners.items():
            bound[name] = self._bound[name] = await self._mqtt_listener(server, name, entry)
        self._parts.callback(server.stop_receiving)
        self.security.show(self.metrics)
        self.security.warn_of_expiry()
        return bound

    async def _state_store(
        self,
        server: MqttServer,
        directory: DataDirectory,
        capture: ChangeCapture | None,
        traces: NodeTraces | None,
    ) -> StateStoreService:
        """Start the state store, and add it to the broker."""
        membership = self._membership
        store = StateStoreService(
            directory.statestore,
            self.config.durability,
            self.clock,
            options=self.config.statestore.options(strict_read=self.config.security.strict_read),
            policy=StorePolicy(self.security) if self.security.enforced else None,
            capture=capture,
            steady=None if membership is None else membership.clock.now,
            storage=(
                None
                if membership is None
                else PreloadedStorage(directory.statestore, self._logs["statestore"], membership.keys)
            ),
            tracer=None if traces is None else traces.requests,
        )
        await store.start(server.outlet)
        self._store = store
        self.console.show_statestore(store)
        self._parts.push_async_callback(store.close)
        refuse = (
            store.refuse_growth
            if membership is None
            else membership.commits.refusing(store.refuse_growth, store.refuse_changes)
        )
        self._disk.add(Writer("state store writes that need space", refuse, store.reusable_bytes))
        self.health.add_problem("statestore", lambda: store.failure or store.stalled)
        self.health.add_problem("statestore", store.clock_problem, code="versions_ahead")
        add_metrics(self.metrics, "statestore", lambda: _store_metrics(store))
        self.metrics.add_rows(
            "statestore_denied",
            lambda: [((verb,), {"requests": count}) for verb, count in store.stats.denied.items()],
            METRICS["statestore_denied"],
            ("verb",),
        )
        server.add_service(store)
        return store

    def _start_rules(self, server: MqttServer, broker: TubeBroker | None, traces: NodeTraces | None) -> None:
        """Add the rules to the broker, and connect to the targets of those that write to other systems."""
        # From clock and entropy, so that it is unique even after a clock step or two starts in one millisecond.
        identities = Identities(f"{wall_clock_ms():x}{secrets.token_hex(3)}")
        for rule in self.config.rules:
            client: KafkaTarget | TubeClusterTarget | None = None
            if rule.to is not None and rule.to.kafka is not None:
                limit = 2 * rule.max_pending_bytes  # at which every message is rejected
                client = KafkaTarget(rule.to.kafka, max_bytes=limit, partition=rule.partition)
            elif rule.to is not None:
                assert rule.to.tube is not None, "a rule has one target"
                client = TubeClusterTarget(rule.to.tube, partition=rule.partition)
            if client is not None:
                target: RuleTarget = client
            else:
                assert broker is not None, "the configuration has no rules without TubeMQ"
                target = TubeTarget(rule, broker.append, partial(broker.shape_of, rule.target))
            later = asyncio.get_running_loop().call_later
            appends = target if traces is None else traces.traced(target, rule)
            service = RuleService(rule, appends, identities=identities, later=later)
            server.add_service(service)
            self._parts.callback(service.close)
            if client is not None:  # closed before the rule, which gets its last results
                client.start()
                self._parts.push_async_callback(client.close)
                self.health.add_warning(f"rule {rule.label}", "warning", client.warning)
            self._rules.append(service)
            self._show(service)

    def _traces(self) -> NodeTraces | None:
        """Start the export of spans; None without tracing."""
        section = self.config.tracing
        if section is None:
            return None
        with needs_otel("tracing"):
            from penstock.node.tracing import NodeTraces
            from penstock.runtime.observability.tracing import Tracing, TracingOptions
        options = TracingOptions(
            endpoint=section.endpoint,
            sample_ratio=section.sample_ratio,
            timeout_s=section.timeout_s,
            ca=section.ca,
        )
        tracing = Tracing(options, attributes={"host.name": socket.gethostname()})
        traces = NodeTraces(tracing)
        self._parts.push_async_callback(traces.close)
        self.health.add_warning("tracing", "export_failed", lambda: tracing.failure)
        add_metrics(self.metrics, "tracing", lambda: counters_of(tracing.stats))
        self.metrics.add_rows("span", tracing.stats.duration_rows, METRICS["span"], ("span",))
        return traces

    async def _telemetry(self) -> NodeTelemetry | None:
        """Start the export of log lines, and return that of metrics, which has not started; None if not configured."""
        section = self.config.telemetry
        if section is None:
            return None
        with needs_otel("telemetry"):
            from penstock.node.telemetry import NodeTelemetry
        telemetry = NodeTelemetry(section, self._families)
        self._parts.push_async_callback(telemetry.close_logs)
        self.health.add_warning("telemetry", "export_failed", lambda: telemetry.failure)
        add_metrics(self.metrics, "telemetry", lambda: counters_of(telemetry.stats))
        return telemetry

    async def _families(self) -> list[Family]:
        """Return the current metrics."""
        await self.console.refresh_metrics()
        return list(self.metrics.collect())

    async def _mqtt_listener(self, server: MqttServer, name: str, entry: ListenerSection) -> Address:
        settings = self.security.settings(name)
        return await self._listen(_listener_option(name), entry, lambda _host, _port: server.listen(settings))

    async def _faults(self, mqtt: Address) -> Address | None:
        """The listener with fault injection, if configured."""
        asked = self.config.mqtt_faults
        if asked is None:
            return None
        behind = reachable(mqtt)
        listener = FaultListener(behind.host, behind.port)
        bound = await self._listen("mqtt-faults", ListenerSection(bind=asked), listener.start)
        self._parts.push_async_callback(listener.close)
        _log.warning("fault injection is enabled: for tests only", extra={"fields": {"mqtt_faults": str(bound)}})
        return bound

    async def _bridges(self, server: MqttServer) -> None:
        """Start the bridges before the listeners, so that no message is missed; they are closed after them."""
        names = [entry.name for entry in self.config.bridges]
        if self._membership is None:
            await end_removed_bridges(server, names)
        else:
            self.health.add_warning("bridges", "bridge_not_configured", await expire_unlisted_bridges(server, names))
        for entry in self.config.bridges:
            bridge = Bridge(entry.settings(), server, self.security.acting_as(entry.acts_as, entry.name))
            await bridge.start()
            self._parts.push_async_callback(bridge.close)
            add_metrics(self.metrics, "bridge", partial(counters_of, bridge.stats), labels={"bridge": entry.name})

    def _commit_queues(self, master: TubeMaster | None, broker: TubeBroker | None) -> dict[str, CommitQueue[Any]]:
        """Return the queues of all commits, by the part of the node."""
        assert self._store is not None
        assert self._persistence is not None
        queues: dict[str, CommitQueue[Any]] = {"statestore": self._store.queue, "mqtt": self._persistence.queue}
        if master is not None:
            queues["master"] = master.queue
        if broker is not None:
            queues["tube"] = broker.commits.queue
        return queues

    def _backup(
        self,
        directory: DataDirectory,
        master: TubeMaster | None,
        broker: TubeBroker | None,
        queues: Sequence[CommitQueue[Any]],
    ) -> Backups:
        """The backups, after all parts have started."""
        assert self._store is not None
        assert self._persistence is not None
        environments: dict[str, LoggedEnvironment] = {
            "statestore": self._store.environment,
            "mqtt": self._persistence.environment,
        }
        brokers: dict[str, BrokerStorage] = {}
        if master is not None and broker is not None:
            storage = broker.storage
            name = storage.directory.relative_to(directory.path).as_posix()
            brokers[name] = storage
            environments["tube/master"] = master.environment
            environments[f"{name}/meta"] = storage.meta.environment
        source = BackupSource(directory.path, environments, brokers, queues)
        return Backups(source, self.health.problems)

    def _capture(self, broker: TubeBroker) -> ChangeCapture | None:
        """The change capture of the state store; None if it is not configured."""
        topic = self.config.statestore.capture_topic
        if topic is None:
            return None
        newest = broker.newest_message(topic, CAPTURE_PARTITION)
        last = None if newest is None else version_of(*newest)
        later = asyncio.get_running_loop().call_later
        capture = ChangeCapture(topic, CAPTURE_PARTITION, broker.append_run, later, last=last)
        add_metrics(self.metrics, "capture", capture.metric_values, labels={"topic": topic})
        self.health.add_warning("capture", "capture_behind", capture.warning)
        return capture

    def _show(self, service: RuleService) -> None:
        labels = {"filter": service.rule.filter, "topic": service.rule.target}
        add_metrics(self.metrics, "rule", lambda: counters_of(service.stats), labels=labels)

    def _snapshot(self) -> NodeSnapshot:
        config = self.config
        return NodeSnapshot(
            version=penstock.__version__,
            core=compiled.form(),
            pid=os.getpid(),
            data_dir=str(config.data_dir.absolute()),
            durability=str(config.durability),
            started_at=int(self._started * 1000),
            uptime_s=(monotonic_ms() - self._started_ms) / 1000,
            now_at=wall_clock_ms(),
        )

    def _listeners(self) -> tuple[ListenerSnapshot, ...]:
        """The listeners that accept connections: MQTT, TubeMQ, HTTP."""
        entries, bound = self.security.listeners, self._bound
        found = []
        for listener in self.security.server.listeners:
            stats, settings = listener.stats, listener.settings
            found.append(
                ListenerSnapshot(
                    settings.name,
                    _SCHEMES[settings.transport],
                    str(bound[settings.name]) if settings.name in bound else f"{settings.host}:{settings.port}",
                    stats.connections,
                    settings.max_connections,
                    stats.refused,
                    settings.access is None or entries[settings.name].anonymous is not None
                    if settings.name in entries
                    else None,
                )
            )
        broker = None if self._tube_broker is None else self._tube_broker.connections
        tls = {"http": self.config.http.tls, "tube-broker-http": self.config.tube_broker_http.tls}
        for name, protocol in (("tube-master", "tubemq"), ("tube-broker", "tubemq"), ("http", "http"),
                               ("tube-broker-http", "http")):  # fmt: skip
            if name in bound:
                at_broker = broker if name == "tube-broker" else None
                found.append(
                    ListenerSnapshot(
                        name,
                        protocol + ("s" if tls.get(name) is not None else ""),
                        str(bound[name]),
                        None if at_broker is None else len(at_broker.open),
                        None,
                        None if at_broker is None else at_broker.refused,
                    )
                )
        return tuple(found)

    def _stalled(self, _grace_ms: int) -> None:
        self._stalls += 1

    def _metric_values(self) -> dict[str, float]:
        return {
            "ready": int(not self.health.problems()),
            "start_time_seconds": self._started,
            "clock_offset_seconds": self.clock.offset_ms / 1000,
            "clock_steps": self.clock.steps,
            "stalls": self._stalls,
        }


async def _no_tube(_parameters: Mapping[str, str], _caller: Caller) -> Mapping[str, object]:
    """Answer administration requests of TubeMQ in a cluster without it."""
    return {"result": False, "errCode": 503, "errMsg": "this cluster does not run TubeMQ: set `cluster.tubemq: true`"}


def _always() -> bool:
    return True


def _listener_option(name: str) -> str:
    """Setting of an MQTT listener, for errors."""
    return name if name == DEFAULT_LISTENER else f"mqtt.listeners.{name}"


def _rule(service: RuleService) -> Rule:
    stats = service.stats
    return Rule(
        service.rule.filter,
        service.rule.target,
        stats.received,
        stats.logged,
        stats.refused,
        stats.dropped,
        stats.pending,
        stats.pending_bytes,
    )


def _store_metrics(store: StateStoreService) -> dict[str, int | float]:
    return {
        **counters_of(store.stats),
        "keys": store.keys,
        **store.quota_metrics(),
        "failed": int(store.failure is not None),
        "version_lead_seconds": store.version_lead_ms / 1000,
    }


def _beside(listener: ListenerSection, bound: tuple[str, int] | None) -> str | None:
    """Return the advertised address of the TLS listener of ``listener``; None if there is none."""
    if bound is None:
        return None
    host = listener.bind.host if listener.advertise is None else listener.advertise.host
    return advertised_address(ListenerSection(bind=listener.bind), Address(host, bound[1]))
