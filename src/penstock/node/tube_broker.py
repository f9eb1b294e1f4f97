"""A TubeMQ broker in its own process: it registers at the master of a node, on the same machine or another one."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, StorageError, UnavailableError
from penstock.mqtt.password_checks import PasswordChecks
from penstock.node.api_access import ApiAccess, backup_route
from penstock.node.backup import Backups, BackupSource
from penstock.node.client_warnings import ClientWarnings, TubeDenials
from penstock.node.config.listeners import OpenListener, refuse_open_listeners
from penstock.node.config.tube import TubeCertificates, TubeTls
from penstock.node.data_dir import announced_broker, check_restored, withdraw
from penstock.node.http import HttpAccess, HttpServer, audited, broker_app, health_routes, names_of
from penstock.node.metric_help import add_metrics
from penstock.node.node_broker import reachable
from penstock.node.security import (
    expiring,
    expiry_metrics,
    may_administer,
    reload_failed,
    rights_of,
    signing_keys,
)
from penstock.runtime.io.directory_lock import DirectoryLock
from penstock.runtime.io.disk_space import DiskSpace, Writer
from penstock.runtime.io.files import Durability
from penstock.runtime.io.loop import freeze_memory, install_signal_handlers, run, run_until, tune_process
from penstock.runtime.io.memory import IdleRelease
from penstock.runtime.io.network import Address, bind_error
from penstock.runtime.observability import logs
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.logs import LogFormat, LogLevel
from penstock.runtime.observability.metrics import Metrics
from penstock.runtime.observability.systemd import ServiceNotifier
from penstock.security.passwords import read_passwords
from penstock.security.policy_file import load_policy
from penstock.tube.admin import broker as broker_admin
from penstock.tube.admin.request import Caller, Role
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.limits import DEFAULT_LIMITS, TubeLimits
from penstock.tube.engine.transactions.staging import StagingLimits
from penstock.tube.master.admin_token import load_or_create_token

__all__ = ["BrokerSettings", "ReadyBroker", "late_batches", "run_broker", "serve_broker"]

_log = logging.getLogger("penstock.node")


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Settings of the broker. ``advertise``: address for clients, if it differs from ``bind``.

    ``passwords``: password file of the clients' users; ``policies``: policy file with their permissions; ``user``: name
    and password with which the broker signs. ``anonymous``, ``http_anonymous``: accept clients without credentials at
    ``bind``, at ``http``. ``tls``: additional TLS listener; ``master_tls``: TLS context for connections to the masters,
    at their TLS ports. ``admin_token``: administration token; None for the token in the data directory, created at the
    first start. ``consumer_session_s``: timeout after which the partitions of a consumer without heartbeats are
    released. ``max_store_bytes`` (per store) and ``staging``: size limits. ``register_s``: timeout of the registration
    at a master; None for no timeout.
    """

    broker_id: int
    masters: Sequence[Address]
    data_dir: Path
    bind: Address
    http: Address
    advertise: Address | None = None
    durability: Durability = Durability.DURABLE
    register_s: float | None = None
    passwords: Path | None = None
    policies: Path | None = None
    anonymous: bool = False
    http_anonymous: bool = False
    user: tuple[str, str] | None = None
    tls: TubeTls | None = None
    master_tls: ssl.SSLContext | None = None
    admin_token: str | None = None
    max_store_bytes: int | None = None
    staging: StagingLimits = field(default_factory=StagingLimits)
    topic_durability: Mapping[str, Durability] = field(default_factory=dict)
    consumer_session_s: int = 30
    limits: TubeLimits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True)
class ReadyBroker:
    """Addresses of a running broker."""

    broker_id: int
    tube_broker: str
    tube_broker_http: str
    data_dir: str
    durability: str
    tube_broker_tls: str | None = None
    """Address of the TLS listener; None if there is none."""

    def as_json(self) -> dict[str, object]:
        """The line of ``penstock tube broker run --json``, without absent values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def run_broker(settings: BrokerSettings, *, log_level: LogLevel, on_ready: Callable[[ReadyBroker], None]) -> None:
    """Run a broker until SIGTERM or SIGINT; returns after the shutdown. SIGHUP reloads users, permissions and
    certificates.

    Raises:
        PenstockError: the directory belongs to another program, the broker could not start, or no master accepts it.
    """
    logs.configure(log_level, LogFormat.TEXT)
    tune_process()
    run(serve_broker(settings, on_ready))


def _check_directory(path: Path) -> None:
    """Refuse a directory with unknown files, in which a broker would start empty.

    Raises:
        StorageError: the directory has files, and none of penstock; or a restore of it was not completed.
    """
    check_restored(path)
    found = sorted(entry.name for entry in path.iterdir() if entry.name != "lock") if path.is_dir() else []
    if not found or "tube" in found:
        return
    apache = any((path / name / "index").is_dir() for name in found)
    raise StorageError(
        f"{path} is not a data directory of penstock: it contains {found[0]!r} and no 'tube'",
        path=str(path),
        why="it looks like a directory of Apache's broker, whose files cannot be read" if apache else None,
        hint="choose an empty or a new directory: --data-dir PATH"
        + ("; to move messages see the page 'Migrate from Apache TubeMQ'" if apache else ""),
    )


class _Security:
    """Users and permissions of the broker's clients, from the files of its settings.

    ``clients`` is None if every client has all permissions; ``failure`` is the error of the last reload.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        """Read the files. Raises ConfigError: one cannot be used."""
        self._settings = settings
        self.failure: PenstockError | None = None
        self.changed: Callable[[], None] = lambda: None
        """Callback after a reload."""
        self.certificates = TubeCertificates(settings.tls)
        self.denials = TubeDenials()
        self._read()
        self.clients = (
            None if self.users is None and self.rights is None else ClientAccess({}, denied=self.denials.count)
        )
        self._change()

    def reload(self) -> bool:
        """Read the files again; if one is invalid, the previous users and permissions remain, and it returns False."""
        try:
            self._read()
        except PenstockError as error:
            self.failure = error
            _log.error("reload failed, the previous settings remain: %s", error)
            return False
        self.failure = None
        self._change()
        self.changed()
        _log.info("reloaded")
        return True

    def expiry(self) -> dict[str, int | float]:
        """Expiry of the certificates, for the metrics."""
        return expiry_metrics(self.certificates.used)

    def _read(self) -> None:
        passwords, policies = self._settings.passwords, self._settings.policies
        users = None if passwords is None else read_passwords(passwords)
        rights = rights_of(None if policies is None else load_policy(policies))
        tls = None if self._settings.tls is None else self._settings.tls.read()
        self.users, self.rights = users, rights
        self.certificates.use(tls)

    def _change(self) -> None:
        if self.clients is not None:
            anonymous = self._settings.anonymous or self.users is None
            self.clients.change(signing_keys(self.users), self.rights, anonymous=anonymous)


async def serve_broker(settings: BrokerSettings, on_ready: Callable[[ReadyBroker], None]) -> None:
    """Start a broker, report when a master has accepted it, wait for a signal, close it. SIGHUP reloads the files of
    users, permissions and certificates."""
    _check_directory(settings.data_dir)
    stop = install_signal_handlers()
    security = _Security(settings)
    notifier = ServiceNotifier()

    def reload() -> None:
        notifier.reloading()
        notifier.reloaded(done=security.reload())

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    async with AsyncExitStack() as parts:
        parts.callback(DirectoryLock(settings.data_dir, "data directory").close)
        withdraw(settings.data_dir)
        ready = await run_until(stop, _start(settings, security, parts))
        if ready is not None:
            freeze_memory()
            fields = {"broker_id": settings.broker_id, "tube_broker": ready.tube_broker}
            _log.info("ready", extra={"fields": fields})
            on_ready(ready)
            notifier.ready(f"tube-broker {ready.tube_broker}, http {ready.tube_broker_http}")
            await stop.wait()
        notifier.stopping()


async def _start(settings: BrokerSettings, security: _Security, parts: AsyncExitStack) -> ReadyBroker:
    """Start the parts that ``parts`` closes, and wait for the registration at a master."""
    told = settings.advertise
    clients = ClientWarnings(security.denials.collect)
    clients.start()
    parts.callback(clients.close)
    idle_release = IdleRelease()
    idle_release.start()
    parts.callback(idle_release.close)
    started = asyncio.Event()
    backups: Backups | None = None
    space = DiskSpace(settings.data_dir)
    trail = AuditTrail(settings.data_dir / "audit")
    metrics = Metrics()

    async def webapi(params: Mapping[str, str], caller: Caller) -> dict[str, Any]:
        if not started.is_set():
            return {"result": False, "errCode": 503, "errMsg": "the broker has not started yet"}
        return await broker.webapi(params, caller)

    def problems() -> list[str]:
        if not started.is_set():
            return ["starting"]
        assert broker.registered is not None, "the broker has masters"
        if not broker.registered.is_set():
            return ["no master has accepted the broker yet"]
        return failures()

    def failures() -> list[str]:
        failure = broker.failure or broker.stalled
        return [] if failure is None else [f"tube: {failure.line()}"]

    def warnings() -> list[str]:
        used, failure = security.certificates.used, security.failure
        found: list[PenstockError | None] = [None if failure is None else reload_failed(failure)]
        found += [] if used is None else expiring(used.expiry, time.time())
        found += late_batches(broker) if started.is_set() else []
        found += [space.warning(), trail.failure]
        return [warning.line() for warning in found if warning is not None]

    # Started before the broker, which reports the address of its administration to the master.
    token = settings.admin_token or load_or_create_token(settings.data_dir / "tube" / "admin-token")
    if security.users is None:
        found = [("--tube-broker", settings.bind, "--tube-broker-anonymous", settings.anonymous)]
        found.append(("--tube-broker-http", settings.http, "--tube-broker-http-anonymous", settings.http_anonymous))
        listeners = [OpenListener(name, at, f"{flag} allow") for name, at, flag, allowed in found if not allowed]
        refuse_open_listeners(listeners, users="--passwords FILE")
    checks = PasswordChecks()
    parts.callback(checks.close)
    identify = HttpAccess(
        token,
        checks,
        lambda: security.users,
        lambda user: Role.ADMINISTRATOR if may_administer(security.rights, user) else Role.NONE,
        anonymous=settings.http_anonymous,
    )
    health = health_routes(
        problems,
        metrics,
        warnings=warnings,
        identify=identify,
        open_metrics=settings.http_anonymous or security.users is None,
        opened_by="--tube-broker-http-anonymous allow",
    )
    administer = audited(webapi, "broker", trail, token, broker_admin.is_protected)
    names = names_of(settings.http, told)
    promotion = "grant Administer to the user in the policy file, then SIGHUP"
    backup = backup_route(ApiAccess("broker", identify, trail, names, promotion), lambda: backups)
    pages = broker_app(administer, health=health, names=names, identify=identify, more=[backup])
    http = HttpServer(pages)
    web = await http.start("tube-broker-http", settings.http)
    parts.push_async_callback(http.close)
    broker = _broker(settings, str(_advertised_address(web, told)), token, security.clients)
    tls = settings.tls
    start = broker.start if tls is None else security.certificates.beside(broker.start, tls.broker_port)
    try:
        _, port = await start(settings.bind.host, settings.bind.port)
    except OSError as error:
        raise bind_error(error, "tube-broker", settings.bind) from error
    parts.push_async_callback(broker.close)
    parts.enter_context(announced_broker(settings.data_dir, str(reachable(web))))
    backups = Backups(_backup_source(settings.data_dir.absolute(), broker), failures)
    parts.push_async_callback(backups.close)
    security.changed = broker.access_changed
    parts.push_async_callback(space.close)
    space.add(Writer("TubeMQ sends", broker.refuse_growth, lambda: 0))
    await space.start()
    began = time.time()
    add_metrics(metrics, "node", lambda: {"ready": int(not problems()), "start_time_seconds": began})
    add_metrics(metrics, "tube", lambda: broker.stats)
    values = {"duration_seconds": broker.commits.queue.durations}
    add_metrics(metrics, "commit", lambda: values, labels={"part": "tube"})
    add_metrics(metrics, "disk", space.metric_values)
    add_metrics(metrics, "audit", trail.metric_values)
    if tls is not None:
        add_metrics(metrics, "listener", security.expiry, labels={"listener": "tube_broker"})
    started.set()
    await _registered(broker, settings)
    shown, secured = told or Address(settings.bind.host, port), broker.tls_bound
    return ReadyBroker(
        settings.broker_id,
        str(shown),
        str(web),
        str(settings.data_dir),
        str(settings.durability),
        None if secured is None else str(Address(shown.host, secured[1])),
    )


def _backup_source(path: Path, broker: TubeBroker) -> BackupSource:
    """Return the open parts of the data directory ``path``. They do not depend on a master, so a backup needs none."""
    storage = broker.storage
    name = storage.directory.absolute().relative_to(path).as_posix()
    return BackupSource(path, {f"{name}/meta": storage.meta.environment}, {name: storage}, [broker.commits.queue])


def late_batches(broker: TubeBroker) -> list[PenstockError]:
    """Warnings about prepared batches that were neither committed nor aborted in time."""
    return [
        PenstockError(
            f"tube: batch {item.batch} of query {item.query} is prepared, neither committed nor aborted",
            hint=f"start the query again, or: penstock tube staged resolve {item.query}",
        )
        for item in broker.maintenance.undecided.late
    ]


def _broker(settings: BrokerSettings, web_address: str, token: str, access: ClientAccess | None) -> TubeBroker:
    """The broker, not started."""
    return TubeBroker(
        settings.data_dir,
        settings.durability,
        settings.broker_id,
        masters=[str(address) for address in settings.masters],
        advertise=None if settings.advertise is None else str(settings.advertise),
        web_address=web_address,
        max_store_bytes=settings.max_store_bytes,
        session_ms=settings.consumer_session_s * 1000,
        limits=settings.limits,
        topic_durability=settings.topic_durability,
        staging=settings.staging,
        access=access,
        admin_token=token,
        master_user=settings.user,
        master_tls=settings.master_tls,
    )


def _advertised_address(web: Address, advertised: Address | None) -> Address:
    """Return the address of the HTTP listener ``web`` for other machines."""
    if not web.is_wildcard:
        return web
    return Address(socket.gethostname() if advertised is None else advertised.host, web.port)


async def _registered(broker: TubeBroker, settings: BrokerSettings) -> None:
    """Wait until a master has accepted the broker."""
    registered = broker.registered
    assert registered is not None, "the broker has masters"
    try:
        async with asyncio.timeout(settings.register_s):
            await registered.wait()
    except TimeoutError:
        masters = ", ".join(map(str, settings.masters))
        raise UnavailableError(
            f"tube: broker {settings.broker_id} did not register at {masters} within {settings.register_s:g} s",
            why="the log above has the response of the master, or the failed connections",
            hint="start the node with the master (penstock up); give each broker a unique id",
        ) from None
