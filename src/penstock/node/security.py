"""Authentication and authorization of a node, from its configuration: created at the start, and again at each reload.

A reload is atomic: every file is read and checked first. If one is invalid, nothing changes, and the log, a metric and
``/readyz`` report it until a reload succeeds.
"""

from __future__ import annotations

import dataclasses
import logging
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from starlette.applications import Starlette

from penstock.errors import ConfigError, PenstockError
from penstock.mqtt.bridge import bridge_client_id
from penstock.mqtt.engine.model.access import UNKNOWN, Rights
from penstock.mqtt.engine.model.access import Access as MqttAccess
from penstock.mqtt.engine.model.client_events import ClientEvents
from penstock.mqtt.engine.model.journal import Source
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.in_process import AllowAll
from penstock.mqtt.listener_access import (
    AccessRules,
    AccessStats,
    AuthenticatedClient,
    AuthenticationMethod,
    InProcessAccess,
    ListenerAccess,
)
from penstock.mqtt.password_checks import PasswordChecks
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.listener import Listener
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.mqtt.transport.tls import ServerTls
from penstock.node.client_warnings import STORE_DENIED, TubeDenials
from penstock.node.config.bridges import BridgeEntry
from penstock.node.config.listeners import ListenerSection, OpenListener, refuse_open_listeners
from penstock.node.config.mqtt import (
    AdditionalMqttListener,
    MqttListenerEntry,
    Security,
    broker_limits,
    network_limits,
    publish_limits,
)
from penstock.node.config.node import LISTENERS, NodeConfig
from penstock.node.config.tube import TubeCertificates
from penstock.node.http import HttpAccess, HttpServer
from penstock.node.metric_help import add_metrics
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.network import Address
from penstock.runtime.observability.metrics import Metrics, counters_of
from penstock.security.passwords import Credential, read_passwords, read_salt_key
from penstock.security.policy import NOTHING, Permissions, Policy, Principal
from penstock.security.policy_file import load_policy
from penstock.security.tokens import load_tokens
from penstock.security.tube_key import tube_key
from penstock.statestore.binding import INVOKE, NOTIFY_TOPICS
from penstock.statestore.codec.commands import Access as KeyAccess
from penstock.statestore.engine.store import Context
from penstock.statestore.errors import as_text
from penstock.tube.admin.request import Role
from penstock.tube.engine.access import ClientAccess, RightsOf

__all__ = [
    "CONSOLE",
    "DEFAULT_LISTENER",
    "NodeSecurity",
    "StorePolicy",
    "expiring",
    "expiry_metrics",
    "may_administer",
    "reload_failed",
    "rights_of",
    "signing_keys",
]

_log = logging.getLogger("penstock.security")

DEFAULT_LISTENER: Final = "mqtt"

CONSOLE: Final = "$console/"
"""Owner of the MQTT sessions of the console, before the name of the user whose permissions apply."""

NODE_TOPICS: Final = NOTIFY_TOPICS
"""Topics of state store notifications, which only an observer with the right to read the key may receive. Clients
cannot publish to them."""

SOURCES_KEPT: Final = 1_000
"""Limit of cached permissions of publishers of retained messages. Each has up to 1 MB of cached decisions."""

_RESTART: Final = "restart the node"
_READ_ONCE: Final = ("max_retained_messages", "max_retained_bytes", "max_turn_work", "queue_overflow")
"""Limits that the engine reads at the start only."""

EXPIRY_WARNING_S: Final = 14 * 86_400
"""Time before the expiry of a certificate or revocation list at which the node begins to warn."""

_CERTIFICATE_EXPIRES: Final = "certificate_expires_timestamp_seconds"
_REVOCATIONS_EXPIRE: Final = "revocation_lists_expire_timestamp_seconds"


class NodeSecurity:
    """Access rules, access control of the listeners, and their reload.

    ``server`` is created here, since its limits come from the same configuration.
    """

    def __init__(self, config: NodeConfig, clock: Callable[[], int] = wall_clock_ms) -> None:
        """Read every file. ``clock``: wall clock in ms, for the server.

        Raises:
            ConfigError: a file cannot be used.
        """
        self.config = config
        self.failure: PenstockError | None = None
        """Error of the last reload; None if it succeeded, or before the first one."""
        self.waiting_for_restart: list[ConfigError] = []
        """Warnings about changes that the last reload read and that need a restart."""
        self.reloads = 0
        self.disconnected = 0
        """Number of clients that the last successful reload disconnected."""
        self.failed_reloads = 0
        self._started_with = config
        self.stats = AccessStats()
        self.access_rules = _read_access_rules(config.security)
        _refuse_open_listeners(config, self.access_rules)
        _warn_of_readers(config.security)
        limits = config.mqtt.limits
        self.server = MqttServer(limits=broker_limits(limits), connection_limits=network_limits(limits), clock=clock)
        self.checks = PasswordChecks(self.server.limits)
        self._listener_access = {name: self._access_of(entry) for name, entry in _entries(config).items()}
        self._warn_of_open_rules()
        self._parts: list[InProcessAccess] = []
        self.tube_certificates = TubeCertificates(config.tube.tls)
        """Certificates of the TLS listeners of the TubeMQ master and broker."""
        self._web: dict[str, HttpServer] = {}
        self._sources: OrderedDict[Source, Rights | None] = OrderedDict()
        """Cached permissions of publishers of retained messages, the least recently used first."""
        self._sources_rules = self.access_rules
        """The access rules from which the cached permissions were determined."""
        self.server.check_retained(self._may_still_publish)
        self.tube_denials = TubeDenials()
        self.store_denials = ClientEvents()
        """Denied commands of state store clients, for the node's warnings."""
        self._tube: list[tuple[ClientAccess, bool, tuple[str, str]]] = []

    @property
    def enforced(self) -> bool:
        """True if any authentication or authorization is configured."""
        return any(listener_access is not None for listener_access in self._listener_access.values())

    @property
    def requests_observed(self) -> bool:
        """Whether the policies permit any client to observe state store requests of others."""
        policy = self.access_rules.policy
        return policy is not None and policy.requests_observed

    def acting_as(self, user: str | None, bridge: str) -> MqttAccess | None:
        """Return the permissions of a bridge that acts as ``user``; None for all permissions."""
        if user is None:
            return None
        return self._part_gate(user, bridge_client_id(bridge))

    def _part_gate(self, user: str, part: str) -> InProcessAccess:
        gate = InProcessAccess(user, part, self.access_rules, self.checks, self.stats, self.server.now)
        self._parts.append(gate)
        return gate

    def http_server(self, option: str, app: Starlette) -> HttpServer:
        """Create the server of the HTTP listener ``option``, whose certificates are reloaded. Raises ConfigError."""
        server = self._web[option] = HttpServer(app, _web_tls(self.config, option))
        return server

    @property
    def open_metrics(self) -> bool:
        """True if ``/metrics`` needs no credentials."""
        http = self.config.http
        return http.anonymous_metrics or http.anonymous is not None or self.access_rules.users is None

    def http_access(self, token: str, listener: ListenerSection) -> HttpAccess:
        """Return the access rules of an HTTP listener; ``token`` is the administration token."""
        return HttpAccess(
            token,
            self.checks,
            lambda: self.access_rules.users,
            self._role,
            anonymous=listener.anonymous is not None,
        )

    def permissions_of(self, user: str) -> Permissions | None:
        """Return the permissions of a user by the policies; None without policies: all permissions."""
        policy = self.access_rules.policy
        return None if policy is None else policy.permissions(policy.describe(Principal("", user=user)))

    def console_access(self, user: str) -> MqttAccess | None:
        """Return the permissions of the console for a user; None for "": all permissions."""
        return self._console_gate(user) if user else None

    def console_account(self, user: str) -> object:
        """Return credential and role of a user of the console, to compare them after a reload; None for ""."""
        return ((self.access_rules.users or {}).get(user), self._role(user)) if user else None

    def _console_gate(self, user: str) -> InProcessAccess:
        part = CONSOLE + user
        found = next((gate for gate in self._parts if gate.part == part), None)
        return self._part_gate(user, part) if found is None else found

    def _role(self, user: str) -> Role:
        named = self.config.security
        if user in (named.administrators or ()):
            return Role.ADMINISTRATOR
        if user in named.operators:
            return Role.OPERATOR
        if user in named.viewers:
            return Role.VIEWER
        if named.administrators is None and (self.access_rules.policy is not None or not named.names_roles):
            return Role.ADMINISTRATOR if may_administer(rights_of(self.access_rules.policy), user) else Role.NONE
        return Role.NONE

    def tube_access(
        self, listener: ListenerSection, part: tuple[str, str], used: ClientAccess | None = None
    ) -> ClientAccess | None:
        """Return the access rules of a TubeMQ server of the node; None if every client has all permissions.

        ``part``: user and password of the node's own broker, which has all permissions. ``used``: the rules of a server
        that already runs, which are kept up to date from now on.
        """
        if self.access_rules.users is None and self.access_rules.policy is None:
            return None
        exempt = self.config.tube.access
        access = used or ClientAccess(
            {}, networks=exempt.networks, groups=exempt.groups, denied=self.tube_denials.count
        )
        self._tube.append((access, listener.anonymous is not None, part))
        self._change_tube()
        return access

    def _change_tube(self) -> None:
        users, policy = self.access_rules.users, self.access_rules.policy
        for access, anonymous, part in self._tube:
            keys = signing_keys(users, part)
            access.change(keys, rights_of(policy, part), anonymous=anonymous or users is None)

    def recall(self, owner: str, client_id: str) -> Rights | None:
        """Return the current permissions of the owner of a recovered session; None if no listener accepts the owner any
        more."""
        for entry in self.config.bridges:
            if bridge_client_id(entry.name) == owner:
                return self._recall_bridge(entry)
        if owner.startswith(CONSOLE):
            return self._recall_console(owner.removeprefix(CONSOLE), client_id)
        for listener_access in self._listener_access.values():
            if listener_access is None:
                if owner == "":
                    trusted = AllowAll(client_id)
                    return Rights(trusted, trusted.principal)
            elif (client := listener_access.recover_client(owner, client_id)) is not None:
                return Rights(listener_access, client)
        return None

    def _recall_console(self, user: str, client_id: str) -> Rights | None:
        if not user:
            trusted = AllowAll(CONSOLE)
            return Rights(trusted, trusted.principal)
        if user not in (self.access_rules.users or {}):
            return None
        gate = self._console_gate(user)
        return Rights(gate, gate.client(client_id))

    def _may_still_publish(self, source: Source, topic: str, qos: int) -> bool:
        """Return True if the current policies allow the publisher of a retained message to publish it."""
        if self.access_rules.policy is None or not self.config.security.check_retain_source:
            return True
        if self._sources_rules is not self.access_rules:
            self._sources.clear()
            self._sources_rules = self.access_rules
        if source in self._sources:
            self._sources.move_to_end(source)
        else:
            if len(self._sources) >= SOURCES_KEPT:
                self._sources.popitem(last=False)
            self._sources[source] = self.recall(*source)
        rights = self._sources[source]
        return rights is not None and rights.may_publish(topic, qos, retain=True)

    def _recall_bridge(self, entry: BridgeEntry) -> Rights:
        owner = bridge_client_id(entry.name)
        if entry.acts_as is None:
            trusted = AllowAll(owner)
            return Rights(trusted, trusted.principal)
        gate = next((gate for gate in self._parts if gate.part == owner), None)
        if gate is None:
            gate = self._part_gate(entry.acts_as, owner)
        return Rights(gate, gate.client(owner))

    def check_certificates(self) -> dict[Path, float]:
        """Read the certificate files of all listeners and clients, and return when those of listeners expire, in
        seconds since 1970. Raises ConfigError if one cannot be used."""
        read = [Listener.read_tls(self.settings(name)) for name in self.listeners]
        read += [_web_tls(self.config, option) for option in ("http", "tube_broker_http")]
        read.append(self.tube_certificates.used)
        for entry in self.config.bridges:
            entry.check_files()
        for rule in self.config.rules:
            if rule.to is not None:
                rule.to.section.check_files()
        if self.config.tracing is not None:
            self.config.tracing.check_files()
        if self.config.telemetry is not None:
            self.config.telemetry.check_files()
        return {path: end for tls in read if tls is not None for path, end in tls.expiry.items()}

    def settings(self, name: str) -> ListenerSettings:
        """The transport of the listener with that name."""
        return self._settings(name, _entries(self.config)[name])

    @property
    def listeners(self) -> Mapping[str, MqttListenerEntry]:
        """The listeners of the configuration; the default one comes first."""
        return _entries(self.config)

    def warnings(self) -> Iterator[tuple[str, PenstockError]]:
        """Yield the warnings of the node's health about its security, each with its code."""
        if self.failure is not None:
            yield "reload_failed", reload_failed(self.failure)
        for each in self.waiting_for_restart:
            yield "restart_needed", each
        for each in self.expiring(time.time()):
            yield "certificate_expires", each

    def expiring(self, now: float) -> list[ConfigError]:
        """Warnings about the listeners' certificates and revocation lists that expired by ``now`` (seconds since 1970)
        or expire soon, beginning with the file."""
        ends = {
            path: end
            for listener in self.server.listeners
            if listener.tls is not None
            for path, end in listener.tls.expiry.items()
        }
        others = [server.tls for server in self._web.values()] + [self.tube_certificates.used]
        ends |= {path: end for tls in others if tls is not None for path, end in tls.expiry.items()}
        return expiring(ends, now)

    def warn_of_expiry(self) -> None:
        """Log the warnings of :meth:`expiring`."""
        for warning in self.expiring(time.time()):
            _log.warning("%s", warning.line())

    def show(self, metrics: Metrics) -> None:
        """Add the metrics of access control and of each listener."""
        add_metrics(metrics, "access", self._metric_values)
        for listener in self.server.listeners:
            labels = {"listener": listener.name}
            add_metrics(metrics, "mqtt_listener", partial(_listener_metrics, listener), labels=labels)
        for name, server in self._web.items():
            if server.tls is not None:
                add_metrics(metrics, "listener", partial(_web_expiry, server), labels={"listener": name})
        if self.tube_certificates.used is not None:
            for name in ("tube_master", "tube_broker"):
                add_metrics(metrics, "listener", self._tube_expiry, labels={"listener": name})

    def reload(self, read: Callable[[], NodeConfig]) -> bool:
        """Reload the configuration and every file that it names; False if one is invalid.

        Clients that lost their access are disconnected, all others stay connected. Addresses, transports and settings
        outside MQTT and security change at a restart only, which is logged.
        """
        try:
            config = read()
            access_rules = _read_access_rules(config.security)
            _refuse_open_listeners(config, access_rules)
            entries = _entries(config)
            staying = [listener for listener in self.server.listeners if listener.name in entries]
            settings = {each.name: self._settings(each.name, entries[each.name]) for each in staying}
            tls = {name: Listener.read_tls(each) for name, each in settings.items()}
            tube_tls = None if config.tube.tls is None else config.tube.tls.read()
            pages = [
                (server, _web_tls(config, option)) for option, server in self._web.items() if server.tls is not None
            ]
        except PenstockError as error:
            self.failure = error
            self.failed_reloads += 1
            _log.error("reload failed, the previous settings remain: %s", error)
            return False
        self.waiting_for_restart = [
            *_late_files(self._started_with.security, config.security),
            *(
                ConfigError(f"{option} was changed after the start: the previous setting applies", hint=_RESTART)
                for option in _needs_restart(self._started_with, config)
            ),
        ]
        for warning in self.waiting_for_restart:
            _log.warning("%s", warning.line())
        self.access_rules = access_rules
        _warn_of_readers(config.security)
        for name, listener_access in self._listener_access.items():
            if listener_access is not None:
                listener_access.access_rules = access_rules
                if name in entries:
                    listener_access.methods = _methods(entries[name], access_rules)
        for gate in self._parts:
            gate.access_rules = access_rules
        self._change_tube()
        for listener in staying:
            listener.apply(settings[listener.name], tls[listener.name])
        for server, certificates in pages:
            if certificates is not None:
                server.replace_tls(certificates)
        self.tube_certificates.use(tube_tls)
        fresh = broker_limits(config.mqtt.limits)
        for field in dataclasses.fields(BrokerLimits):
            if field.name in _READ_ONCE:
                continue  # a part of the engine would use the new limit
            setattr(self.server.limits, field.name, getattr(fresh, field.name))
        self.server.connection_limiter.limits = network_limits(config.mqtt.limits)
        self.config = config
        self._warn_of_open_rules()
        self.failure = None
        self.reloads += 1
        self.disconnected = self.server.reauthorise() if self.server.listeners else 0
        self.stats.revoked += self.disconnected
        _log.info("reloaded", extra={"fields": {"disconnected": self.disconnected}})
        self.warn_of_expiry()
        return True

    def close(self) -> None:
        """Stop the threads that check passwords."""
        self.checks.close()

    # Private

    def _access_of(self, entry: MqttListenerEntry) -> ListenerAccess | None:
        methods = _methods(entry, self.access_rules)
        if (
            methods == {AuthenticationMethod.ANONYMOUS}
            and self.access_rules.policy is None
            and not _has_files(self.config.security)
        ):
            return None  # None means all permissions, without checks
        return ListenerAccess(
            methods, self.access_rules, self.checks, self.stats, now=self.server.now, node_topics=NODE_TOPICS
        )

    def _warn_of_open_rules(self) -> None:
        """Log the rules that apply to anonymous clients without naming them, if a listener accepts such clients."""
        policy = self.access_rules.policy
        keepers = self._listener_access.values()
        if policy is None or not any(k is not None and AuthenticationMethod.ANONYMOUS in k.methods for k in keepers):
            return
        for name in policy.open_to_anonymous:
            _log.warning(
                "this rule applies to anonymous clients as well: write `anonymous: true` if that is intended,"
                " or `usernames: ['*']`",
                extra={"fields": {"rule": name, "policies": str(self.config.security.policies)}},
            )

    def _settings(self, name: str, entry: MqttListenerEntry) -> ListenerSettings:
        advertise = entry.advertise
        more: dict[str, Any] = {}
        if isinstance(entry, AdditionalMqttListener):
            more = {"limits": network_limits(entry.limits), "publish_limits": publish_limits(entry.limits)}
        return ListenerSettings(
            name=name,
            host=entry.bind.host,
            port=entry.bind.port,
            transport=entry.transport,
            tls=None if entry.tls is None else entry.tls.files(),
            path=entry.path,
            origins=frozenset(entry.origins),
            advertised_host="" if advertise is None else advertise.host,
            max_connections=entry.max_connections,
            access=self._listener_access.get(name),
            **more,
        )

    def _tube_expiry(self) -> dict[str, int | float]:
        return expiry_metrics(self.tube_certificates.used)

    def _metric_values(self) -> dict[str, int | float]:
        checks = self.checks
        return {
            **counters_of(self.stats),
            **counters_of(self.server.connection_limit_stats),
            "reloads": self.reloads,
            "failed_reloads": self.failed_reloads,
            "failed": int(self.failure is not None),
            "password_checks": checks.hashed,
            "password_checks_remembered": checks.remembered,
            "password_checks_waiting": checks.waiting,
            "password_checks_withdrawn": checks.withdrawn,
            "unauthenticated": self.server.connection_limiter.unauthenticated,
        }


def _web_tls(config: NodeConfig, option: str) -> ServerTls | None:
    """Read the certificates of an HTTP listener; None without any. Raises ConfigError."""
    tls = config.http.tls if option == "http" else config.tube_broker_http.tls
    return None if tls is None else ServerTls(tls.files(), protocol="http/1.1")


_SHOWN_KEY: Final = 100
"""Maximum bytes of a denied key in the log: a client can choose 64 KiB for each of its requests."""


class StorePolicy:
    """Permissions of state store clients by the policies. Requests of the node itself are permitted.

    A will of a client that did not reconnect after a restart has no permissions: its user is no longer known.
    """

    def __init__(self, security: NodeSecurity) -> None:
        self._security = security

    @property
    def requests_observed(self) -> bool:
        """Whether the policies permit observing requests of other clients."""
        return self._security.requests_observed

    def may_access(self, context: Context, access: KeyAccess, key: bytes) -> bool:
        """True if the requester has these permissions for the key."""
        permissions = _permissions(context)
        return permissions is None or (
            (not access & KeyAccess.READ or permissions.may_read(key))
            and (not access & KeyAccess.WRITE or permissions.may_write(key))
        )

    def denied(self, context: Context, access: KeyAccess, key: bytes) -> None:
        """Count a denied command of a client for the log."""
        client = context.principal
        owner = client.name if isinstance(client, AuthenticatedClient) else ""
        needed = " and ".join(each.name.capitalize() for each in access if each.name is not None)
        shown = as_text(key[:_SHOWN_KEY]) + ("…" if len(key) > _SHOWN_KEY else "")
        self._security.store_denials.count(STORE_DENIED, context.client_id, owner, 1, f"{needed} on {shown}")

    def may_answer_on(self, context: Context, topic: str) -> bool:
        """True if the requester may subscribe to its response topic; other clients do not get the response there."""
        permissions = _permissions(context)
        return permissions is None or permissions.may_receive(topic)

    def owner(self, context: Context) -> str:
        """Return the name of the user or certificate; "" for an anonymous client."""
        client = context.principal
        return (
            client.principal.name if isinstance(client, AuthenticatedClient) and not client.principal.anonymous else ""
        )

    def has_high_priority(self, context: Context) -> bool:
        """True if ``$high_priority`` of the requester is honoured on the store's topic."""
        permissions = _permissions(context)
        return permissions is None or permissions.may_pass_first(INVOKE)


def _permissions(context: Context) -> Permissions | None:
    client = context.principal
    if client is UNKNOWN:
        return NOTHING
    return client.permissions if isinstance(client, AuthenticatedClient) else None


def _listener_metrics(listener: Listener) -> dict[str, int | float]:
    found: dict[str, int | float] = {
        **counters_of(listener.stats),
        **counters_of(listener.connection_limit_stats),
        "unauthenticated": listener.connection_limiter.unauthenticated,
    }
    return found | expiry_metrics(listener.tls)


def _web_expiry(server: HttpServer) -> dict[str, int | float]:
    return expiry_metrics(server.tls)


def expiry_metrics(tls: ServerTls | None) -> dict[str, int | float]:
    """Return the expiry of the certificate and of the revocation lists of a listener, for the metrics."""
    if tls is None:
        return {}
    files = ((_CERTIFICATE_EXPIRES, tls.files.certificate), (_REVOCATIONS_EXPIRE, tls.files.revoked))
    return {name: tls.expiry[path] for name, path in files if path is not None and path in tls.expiry}


def expiring(ends: Mapping[Path, float], now: float) -> list[ConfigError]:
    """Warnings about files that expired by ``now`` or expire soon; times in seconds since 1970."""
    return [_expiry(path, end, now) for path, end in ends.items() if end < now + EXPIRY_WARNING_S]


def _expiry(path: Path, end: float, now: float) -> ConfigError:
    day = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return ConfigError(f"{path}: {'ended' if end <= now else 'ends'} on {day}", hint="replace it and send SIGHUP")


def reload_failed(failure: PenstockError) -> ConfigError:
    """The warning after a reload with an invalid file."""
    return ConfigError(f"the last reload changed nothing: {failure.what}", why=failure.why, hint=failure.hint)


def _entries(config: NodeConfig) -> dict[str, MqttListenerEntry]:
    return {DEFAULT_LISTENER: config.mqtt, **config.mqtt.listeners}


def _refuse_open_listeners(config: NodeConfig, access_rules: AccessRules) -> None:
    """Raise ConfigError if a listener off loopback accepts anonymous clients without ``anonymous: allow``."""
    found: list[OpenListener] = []
    for name, entry in _entries(config).items():
        place = name if name == DEFAULT_LISTENER else f"mqtt.listeners.{name}"
        if entry.anonymous is not None or AuthenticationMethod.ANONYMOUS not in _methods(entry, access_rules):
            continue
        why = "" if entry.authentication is None else f"{place}.authentication has `anonymous`"
        found.append(_open(place, entry.bind, why))
        if name == DEFAULT_LISTENER and config.mqtt_faults is not None:
            found.append(_open(place, config.mqtt_faults, why or "mqtt_faults passes its clients to mqtt"))
    if access_rules.users is None:
        others = {name.replace("-", "_") for name in LISTENERS} - {DEFAULT_LISTENER}
        listeners = {name: getattr(config, name) for name in sorted(others)}
        found += [_open(name, part.bind) for name, part in listeners.items() if part.anonymous is None]
    refuse_open_listeners(found, users="security.passwords (--passwords FILE)")


def _open(place: str, address: Address, why: str = "") -> OpenListener:
    flag = place.replace("_", "-")
    told = f" (--{flag}-anonymous allow)" if flag in LISTENERS else ""
    return OpenListener(place, address, f"{place}.anonymous: allow{told}", why)


def _read_access_rules(security: Security) -> AccessRules:
    return AccessRules(
        users=None if security.passwords is None else read_passwords(security.passwords),
        tokens=None if security.tokens is None else load_tokens(security.tokens),
        policy=None if security.policies is None else load_policy(security.policies),
        token_method=security.token_method,
        salt_key=None if security.passwords is None else read_salt_key(security.passwords),
    )


def _has_files(security: Security) -> bool:
    return any(path is not None for path in (security.passwords, security.tokens, security.policies))


def _methods(entry: MqttListenerEntry, access_rules: AccessRules) -> frozenset[AuthenticationMethod]:
    """Return the authentication methods of the listener: the configured ones, otherwise all that have a file."""
    methods: set[AuthenticationMethod] = set() if entry.anonymous is None else {AuthenticationMethod.ANONYMOUS}
    if entry.authentication is not None:
        return frozenset(methods.union(entry.authentication))
    if entry.tls is not None and entry.tls.client_ca is not None:
        methods.add(AuthenticationMethod.CERTIFICATE)
    if access_rules.users is not None:
        methods |= {AuthenticationMethod.PASSWORD, AuthenticationMethod.SCRAM}
    if access_rules.tokens is not None:
        methods.add(AuthenticationMethod.TOKEN)
    return frozenset(methods or {AuthenticationMethod.ANONYMOUS})


def _needs_restart(old: NodeConfig, new: NodeConfig) -> list[str]:
    """Return the changed options that are read at the start only, except files of :func:`_late_files`."""
    others = [name for name in type(old).model_fields if name not in {"mqtt", "security"}]
    found = [name for name in others if _at_start(getattr(old, name)) != _at_start(getattr(new, name))]
    before, after = _entries(old), _entries(new)
    for name in {*before, *after}:
        if name not in before or name not in after:
            found.append(f"mqtt.listeners.{name}")
        elif (before[name].bind, before[name].transport) != (after[name].bind, after[name].transport):
            found.append("mqtt.bind" if name == DEFAULT_LISTENER else f"mqtt.listeners.{name}")
    if old.security.strict_read != new.security.strict_read:
        found.append("security.strict_read")
    found += [
        f"mqtt.limits.{name}" for name in _READ_ONCE if getattr(old.mqtt.limits, name) != getattr(new.mqtt.limits, name)
    ]
    return sorted(found)


def _at_start(section: object) -> object:
    """Return a section without the certificate files, which a reload reads."""
    tls = getattr(section, "tls", None)
    if not isinstance(section, BaseModel) or not isinstance(tls, BaseModel):
        return section
    return section.model_copy(update={"tls": tls.model_dump(exclude={"certificate", "key", "client_ca", "revoked"})})


def _late_files(start: Security, now: Security) -> list[ConfigError]:
    """Warnings about files that were added after the start, so that some parts do not use them."""
    added = [name for name in ("passwords", "tokens", "policies") if getattr(start, name) is None]
    added = [name for name in added if getattr(now, name) is not None]
    if _has_files(start):
        clients = "TubeMQ clients"
        added = [] if start.passwords or start.policies else [name for name in added if name != "tokens"]
    else:
        clients = "clients"
    return [
        ConfigError(
            f"security.{name} was added after the start: "
            + (
                f"{clients} still have all permissions"
                if name == "policies"
                else f"{clients} without credentials are still accepted"
            ),
            hint=_RESTART,
        )
        for name in added
    ]


def _warn_of_readers(security: Security) -> None:
    """Log secret files that other users of the machine can access."""
    for path in (security.passwords, security.tokens):
        if path is not None and _mode(path) & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
            _log.warning("other users can read or write this file: chmod 600", extra={"fields": {"path": str(path)}})


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0  # deleted since it was read; the next reload reports it


def signing_keys(users: Mapping[str, Credential] | None, part: tuple[str, str] | None = None) -> dict[str, str]:
    """Signing keys by user name. ``part``: name and password of a part of the node, known to this process only."""
    keys = {name: user.tube for name, user in (users or {}).items() if user.tube}
    if part is not None:
        keys[part[0]] = tube_key(part[0], part[1].encode())
    return keys


def rights_of(policy: Policy | None, part: tuple[str, str] | None = None) -> RightsOf | None:
    """Function from user name ("": anonymous) to permissions; None without a policy. ``part`` has all permissions."""
    if policy is None:
        return None

    def rights(user: str) -> Permissions | None:
        if part is not None and user == part[0]:
            return None
        return policy.permissions(policy.describe(Principal("", user=user or None)))

    return rights


def may_administer(rights: RightsOf | None, user: str) -> bool:
    """True if ``user`` may change the cluster."""
    granted = None if rights is None else rights(user)
    return granted is None or granted.may_administer()
