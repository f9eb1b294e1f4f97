"""A tube broker as a process of its own, at the master of another node: what a cluster has beside its first node."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import StorageError, UnavailableError
from penstock.mqtt.password_checks import PasswordChecks
from penstock.node.config.listeners import OpenListener, refuse_open_listeners
from penstock.node.config.tube import TubeTls
from penstock.node.http import HttpServer, broker_app, names_of
from penstock.node.http_access import HttpAccess, audited
from penstock.node.tube_users import may_administer, rights_of, signing_keys
from penstock.runtime.io.disk_space import DiskSpace, Writer
from penstock.runtime.io.files import Durability
from penstock.runtime.io.loop import freeze_memory, run, tune_process
from penstock.runtime.io.network import Address, bind_error
from penstock.runtime.io.signals import install_signal_handlers, run_until
from penstock.runtime.observability import logs
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.logs import LogFormat, LogLevel
from penstock.security.passwords import read_passwords
from penstock.security.policy_file import load_policy
from penstock.tube.admin import broker as broker_admin
from penstock.tube.admin.caller import Caller
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.transactions.staging import StagingLimits
from penstock.tube.master.admin_token import kept_token

__all__ = ["BrokerSettings", "ReadyBroker", "run_broker", "serve_broker"]

_log = logging.getLogger("penstock.node")


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """``masters``: of the cluster. ``advertise``: where clients reach the broker, if not where it listens.

    ``passwords``: password file of the users that clients have to be; ``policies``: policy file with their rights;
    ``user``: name and password with which the broker signs. ``anonymous``, ``http_anonymous``: clients without
    credentials are accepted at ``bind``, at ``http``.
    ``tls``: a TLS listener beside ``bind``; ``master_tls``: how it reaches the masters, at their TLS ports then.
    ``admin_token``: the administration token; None: that of the data directory, which the first start creates.
    ``consumer_session_s``: a silent consumer's partitions are free after so long.
    ``max_store_bytes`` of each store and ``staging``: how much is kept.
    ``register_s``: give up where no master takes it for so long; None: try until one does.
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
        """The line of ``penstock tube broker run --json``; without what there is not."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def run_broker(settings: BrokerSettings, *, log_level: LogLevel, on_ready: Callable[[ReadyBroker], None]) -> None:
    """Run a broker until SIGTERM or SIGINT; returns once it has drained.

    Raises:
        PenstockError: its directory is of something else, it could not start, or no master takes it.
    """
    logs.configure(log_level, LogFormat.TEXT)
    tune_process()
    run(serve_broker(settings, on_ready))


def _check_directory(path: Path) -> None:
    """Refuse a directory of something else, which a broker would leave as it is and start empty beside.

    Raises:
        StorageError: it has files, and none of penstock's.
    """
    found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if not found or "tube" in found:
        return
    apache = any((path / name / "index").is_dir() for name in found)
    raise StorageError(
        f"{path} is not a data directory of penstock: it holds {found[0]!r} and no 'tube'",
        path=str(path),
        why="it looks like that of Apache's broker, whose files are not read" if apache else None,
        do="choose an empty or a new directory: --data-dir PATH"
        + ("; penstock's how-to on moving from Apache TubeMQ says how messages come over" if apache else ""),
    )


async def serve_broker(settings: BrokerSettings, on_ready: Callable[[ReadyBroker], None]) -> None:
    """Start a broker, say so when its master has taken it, wait for a signal, close it."""
    _check_directory(settings.data_dir)
    stop = install_signal_handlers()
    async with AsyncExitStack() as parts:
        ready = await run_until(stop, _start(settings, parts))
        if ready is not None:
            freeze_memory()
            fields = {"broker_id": settings.broker_id, "tube_broker": ready.tube_broker}
            _log.info("ready", extra={"fields": fields})
            on_ready(ready)
            await stop.wait()


async def _start(settings: BrokerSettings, parts: AsyncExitStack) -> ReadyBroker:
    """Start what ``parts`` closes, and wait until a master has taken the broker."""
    told = settings.advertise
    started = asyncio.Event()

    async def webapi(params: Mapping[str, str], caller: Caller) -> dict[str, Any]:
        if not started.is_set():
            return {"result": False, "errCode": 503, "errMsg": "the broker has not started yet"}
        return await broker.webapi(params, caller)

    # Before the broker, which tells the master where its administration is.
    token = settings.admin_token or kept_token(settings.data_dir / "tube" / "admin-token")
    users = None if settings.passwords is None else read_passwords(settings.passwords)
    rights = rights_of(None if settings.policies is None else load_policy(settings.policies))
    if users is None:
        found = [("--tube-broker", settings.bind, "--tube-broker-anonymous", settings.anonymous)]
        found.append(("--tube-broker-http", settings.http, "--tube-broker-http-anonymous", settings.http_anonymous))
        listeners = [OpenListener(name, at, f"{flag} allow") for name, at, flag, allowed in found if not allowed]
        refuse_open_listeners(listeners, users="--passwords FILE")
    checks = PasswordChecks()
    parts.callback(checks.close)
    identify = HttpAccess(
        token, checks, lambda: users, lambda user: may_administer(rights, user), anonymous=settings.http_anonymous
    )
    access = None
    if users is not None or rights is not None:
        access = ClientAccess(signing_keys(users), anonymous=settings.anonymous or users is None, rights=rights)
    trail = AuditTrail(settings.data_dir / "audit")
    administer = audited(webapi, "broker", trail, token, broker_admin.is_protected)
    pages = broker_app(administer, names=names_of(settings.http, told), identify=identify)
    http = HttpServer(pages)
    web = await http.start("tube-broker-http", settings.http)
    parts.push_async_callback(http.close)
    broker = _broker(settings, str(_told(web, told)), token, access)
    start = broker.start if settings.tls is None else settings.tls.beside(broker.start, settings.tls.broker_port)
    try:
        _, port = await start(settings.bind.host, settings.bind.port)
    except OSError as error:
        raise bind_error(error, "tube-broker", settings.bind) from error
    parts.push_async_callback(broker.close)
    space = DiskSpace(settings.data_dir)
    parts.push_async_callback(space.close)
    space.add(Writer("TubeMQ sends", broker.refuse_growth, lambda: 0))
    await space.start()
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
        topic_durability=settings.topic_durability,
        staging=settings.staging,
        access=access,
        admin_token=token,
        master_user=settings.user,
        master_tls=settings.master_tls,
    )


def _told(web: Address, advertised: Address | None) -> Address:
    """Where others reach what listens at ``web``."""
    if not web.is_wildcard:
        return web
    return Address(socket.gethostname() if advertised is None else advertised.host, web.port)


async def _registered(broker: TubeBroker, settings: BrokerSettings) -> None:
    """Return when a master has taken the broker."""
    registered = broker.registered
    assert registered is not None, "it was given masters"
    try:
        async with asyncio.timeout(settings.register_s):
            await registered.wait()
    except TimeoutError:
        masters = ", ".join(map(str, settings.masters))
        raise UnavailableError(
            f"tube: broker {settings.broker_id} did not register at {masters} within {settings.register_s:g} s",
            why="the log above says what the master answered, or that none does",
            do="start the node with the master (penstock up); give each broker an id of its own",
        ) from None
