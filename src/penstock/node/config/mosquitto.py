"""Converts a configuration of Mosquitto: ``mosquitto.conf`` with its ACL and password files.

The result is a configuration of a node, a policy file, and a list of the lines that were left out, each with its
reason. Nothing is left out without an entry. Options are those of Mosquitto 2; a path that is not absolute is relative
to the directory of ``mosquitto.conf``.

The result allows nothing that Mosquitto did not allow, unless the reason of a line in the list names it. Rules of a
policy file only allow: a ``deny`` of an ACL file becomes an exception of the other rules of its user, and of the rules
of each ``pattern``, which applies to all users; the latter is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.node.config.mqtt import MqttLimits
from penstock.security.policy import TopicPattern

__all__ = ["NOT_NEEDED", "PASSWORDS", "POLICIES", "Conversion", "LeftOut", "convert"]

PASSWORDS: Final = "passwords"  # a file name
POLICIES: Final = "policies.yaml"
NOT_NEEDED: Final = "not needed"
"""Beginning of the reason of a line without which the node does the same."""


class LeftOut(NamedTuple):
    """A line that was not converted, or that has another effect now."""

    file: str
    line: int
    text: str
    reason: str


class _Line(NamedTuple):
    """A line with an option: its name, and the rest of the line."""

    file: Path
    number: int
    option: str
    value: str

    def seen_from(self, other: _Line | None) -> str:
        """Return its place, for the reason of another line."""
        return f"line {self.number}" if other is None or other.file == self.file else f"{self.file}:{self.number}"


@dataclass(slots=True)
class Conversion:
    """``config`` and ``policy`` are contents of YAML files; ``secrets`` of further files, by name; ``users`` need new
    passwords."""

    config: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] | None = None
    secrets: dict[str, str] = field(default_factory=dict)
    users: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


_DURABLE: Final = "not needed: acknowledged messages are on disk, in data_dir"
_USER: Final = "not needed: set the user of the process in its service"
_PID: Final = "not needed: `penstock status` shows the process id, which is in the file lock of data_dir"
_NO_LOG: Final = "not needed: log lines go to standard error, see log_level and log_format"
_BRIDGE: Final = "not supported: bridges have no such setting"
_BRIDGE_5: Final = "not needed: bridges use MQTT 5.0, with No Local and Retain As Published"
_ONLY_5: Final = "not supported: bridges use MQTT 5.0, which the other broker must support"
_PLUGIN: Final = (
    "not supported: plugins; if it authenticates clients or restricts topics, nothing does so here until you create "
    "users (penstock user create) and write a policy file"
)
_PSK: Final = "not supported: TLS with pre-shared keys; use client certificates or passwords"
_OPENSSL: Final = "not supported: ciphers are those of OpenSSL's defaults for the TLS version"
_QOS: Final = "not supported: QoS 0, 1 and 2 are always available"
_NO_CLIENT_CERTIFICATE: Final = "not needed: without require_certificate true no certificate is requested"
_CHAIN: Final = (
    "not carried over: no certificate of a client is requested; but Mosquitto also takes certificates of intermediate "
    "authorities for its own chain from it: certfile must have them, as fullchain.pem of Let's Encrypt"
)
_IDENTIFIER: Final = "not needed: a client without an identifier receives one with the prefix penstock-"


def _reasons() -> Mapping[str, str]:
    options = {
        _DURABLE: "persistence persistence_file persistence_location autosave_on_changes autosave_interval",
        _USER: "user",
        _PID: "pid_file",
        _NO_LOG: "log_dest log_facility log_timestamp log_timestamp_format log_type connection_messages "
        "websockets_log_level",
        _PLUGIN: "plugin global_plugin auth_plugin auth_plugin_deny_special_chars plugin_load plugin_use",
        _PSK: "psk_file psk_hint bridge_identity bridge_psk",
        _OPENSSL: "ciphers ciphers_tls1.3 dhparamfile tls_engine tls_engine_kpass_sha1 tls_keyform",
        _QOS: "maximum_qos max_qos",
        _IDENTIFIER: "allow_zero_length_clientid auto_id_prefix",
        _BRIDGE_5: "try_private bridge_attempt_unsubscribe",
        _ONLY_5: "bridge_protocol_version",
        "not supported: retained messages are sent as retained": "bridge_outgoing_retain",
        _BRIDGE: "start_type restart_timeout idle_timeout threshold round_robin bridge_bind_address "
        "bridge_max_packet_size bridge_receive_maximum bridge_max_topic_alias bridge_alpn bridge_require_ocsp "
        "bridge_tls_version bridge_tcp_keepalive bridge_tcp_user_timeout bridge_reload_type local_clientid "
        "local_cleansession local_username local_password bridge_ciphers bridge_ciphers_tls1.3",
        NOT_NEEDED: "set_tcp_nodelay socket_domain websockets_headers_size allow_duplicate_messages",
        "not supported: only mqtt.limits.max_packet_size limits the size": "message_size_limit",
        "not supported: topics of this listener are shared with all others": "mount_point",
        "not supported: grant Connect to clientIds with this prefix in the policy file": "clientid_prefixes",
        "not supported: grant Connect to clientIds: ['{user}'] in the policy file": "use_username_as_clientid",
        "not supported: set the address of the interface as bind": "bind_interface",
        "not supported: retained messages are always available; limit them by policies": "retain_available",
        "not supported: use the Message Expiry Interval of the publisher": "retain_expiry_interval",
        "not supported: QoS 0 messages are not queued for disconnected clients": "queue_qos0_messages",
        "not supported: the QoS is the smaller one of publisher and subscription": "upgrade_outgoing_qos",
        "not carried over: mqtt.limits.max_inflight_bytes has a default": "max_inflight_bytes",
        "not supported: limit the queues by mqtt.limits, and the memory of the process": "memory_limit",
        "not supported: the listener serves no files": "http_dir",
        "not supported: put the authorities into one file": "capath",
        "not supported": "tls_version_max enable_control_api",
        "not supported: listeners accept MQTT 5.0 and 3.1.1": "accept_protocol_versions",
        "not supported: the name in the server's certificate is always checked; set tls.server_name": "bridge_insecure",
    }
    return {name: reason for reason, names in options.items() for name in names.split()}


_REASONS: Final = _reasons()
"""Options that are left out, and why."""
_THE_SAME: Final = frozenset(
    {
        ("allow_zero_length_clientid", "true"),
        ("bridge_outgoing_retain", "true"),
        ("bridge_protocol_version", "mqttv50"),
        ("bridge_tls_use_os_certs", "false"),
        ("max_qos", "2"),
        ("maximum_qos", "2"),
        ("memory_limit", "0"),
        ("queue_qos0_messages", "false"),
        ("retain_available", "true"),
        ("round_robin", "false"),
        ("start_type", "automatic"),
        ("upgrade_outgoing_qos", "false"),
        ("use_username_as_clientid", "false"),
    }
)
"""Options with the value that a node has always."""
_SECRET: Final = re.compile(r"^(plugin|auth)_opt_|pass|secret|token|psk$")
"""Options that may have a password."""
_SYSTEM_AUTHORITIES: Final = "/etc/ssl/certs"

_LIMITS: Final[Mapping[str, str]] = {
    "max_inflight_messages": "max_inflight",
    "max_queued_messages": "max_queued_messages",
    "max_queued_bytes": "max_queued_bytes",
    "max_packet_size": "max_packet_size",
    "max_keepalive": "max_keep_alive_s",
    "max_topic_alias": "max_topic_aliases",
    "sys_interval": "sys_interval_s",
    "global_max_connections": "max_connections",
}
_MOST_LEVELS: Final = 10
"""Directories that include each other, as in Mosquitto."""
_UNITS_S: Final = {"h": 3600, "d": 86_400, "w": 7 * 86_400, "m": 30 * 86_400, "y": 365 * 86_400}


@dataclass(slots=True)
class _Listener:
    line: _Line | None
    port: int = 1883
    address: str = "0.0.0.0"  # noqa: S104 - Mosquitto's default
    websockets: bool = False
    anonymous: bool | None = None
    max_connections: int = 0
    tls: dict[str, Any] = field(default_factory=dict)
    require_certificate: bool = False
    shared_keys: bool = False
    """Whether clients need a pre-shared key."""
    certificate_is_user: bool = False
    """Whether the name in a client certificate replaces user name and password."""
    origins: list[str] = field(default_factory=list)
    certificate_lines: list[_Line] = field(default_factory=list)
    """Lines about client certificates."""
    files: set[str] = field(default_factory=set)
    """``password_file`` and ``acl_file``, if they are set for this listener only."""


@dataclass(slots=True)
class _Bridge:
    line: _Line
    name: str
    host: str = ""
    port: int | None = None
    topics: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    uses_tls: bool = False
    tls: dict[str, Any] = field(default_factory=dict)
    shared_key: bool = False
    """Whether the bridge has a pre-shared key."""
    password: str | None = None
    status_topic: str = ""
    notifies: bool = True
    """False if the option is: the other broker gets no state of the bridge."""
    local_status: bool = False
    """True if the state is published on this node only."""


def convert(path: Path) -> Conversion:
    """Convert the file at ``path``.

    Raises:
        ConfigError: a file cannot be read.
    """
    return _Converter(path).run()


class _Converter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = Conversion()
        self._limits: dict[str, Any] = {}
        self._security: dict[str, Any] = {}
        self._default = _Listener(None, address="127.0.0.1")
        self._listeners: list[_Listener] = []
        self._listener_line: _Line | None = None
        """The last line that opens a listener, also one that is left out; without it Mosquitto is local only."""
        self._bridges: list[_Bridge] = []
        self._files: dict[str, _Line] = {}
        """The lines of password_file and acl_file."""
        self._anonymous: bool | None = None
        self._per_listener = False
        """Whether security options apply to one listener; otherwise to all, wherever they are in the file."""
        self._listener: _Listener | None = self._default
        """The last listener, to which its options belong also after a bridge; None after one that was left out."""
        self._bridge: _Bridge | None = None
        """The last bridge, to which its options belong also after a listener; None after one that was left out."""
        self._skips = False
        """Whether the newest listener or bridge was left out."""

    def run(self) -> Conversion:
        for line in self._read(self._path):
            try:
                self._convert(line)
            except (ValueError, IndexError) as error:
                self._leave_out(line, str(error) or "the value is not valid")
        self._add_listeners()
        self._add_bridges()
        self._add_users()
        self._add_acl()
        mqtt = self._done.config.setdefault("mqtt", {})
        if self._limits:
            mqtt["limits"] = self._limits
        if self._security:
            self._done.config["security"] = self._security
        self._done.left_out.sort(key=lambda each: (each.file != str(self._path), each.file, each.line))
        return self._done

    def _leave_out(self, line: _Line, reason: str) -> None:
        text = f"{line.option} {line.value}".strip()
        if _SECRET.search(line.option) and not line.option.endswith("_file"):
            text = f"{line.option} ***"
        self._done.left_out.append(LeftOut(str(line.file), line.number, text, reason))

    def _read(self, path: Path, level: int = 0) -> Iterator[_Line]:
        if level > _MOST_LEVELS:
            raise ConfigError(f"{path} is not read", why=f"include_dir has more than {_MOST_LEVELS} levels")
        for line in _lines(path):
            if line.option != "include_dir":
                yield line
                continue
            directory = self._absolute(line.value)
            # In the order of Mosquitto.
            for each in sorted(directory.glob("*.conf")):
                yield from self._read(each, level + 1)
            if not directory.is_dir():
                self._leave_out(line, f"the directory {directory} does not exist")

    def _absolute(self, text: str) -> Path:
        return self._path.parent.absolute() / text

    # Options

    def _convert(self, line: _Line) -> None:
        option = line.option
        if option == "listener":
            self._listener, self._listener_line, self._skips = None, line, True
            self._listener = self._new_listener(line)
            self._skips = self._listener is None
        elif option == "connection":
            self._bridge, self._skips = None, True
            self._bridge = self._new_bridge(line)
            self._skips = self._bridge is None
        elif (
            (self._bridge is not None and self._bridge_option(self._bridge, line))
            or self._broker_option(line)
            or (self._listener is not None and self._listener_option(self._listener, line))
        ):
            pass
        elif option.startswith(("plugin_opt_", "auth_opt_")):
            self._leave_out(line, "belongs to a plugin that is left out")
        else:
            reason = "belongs to a listener or bridge that is left out" if self._skips else "unknown option"
            same = (option, line.value.lower()) in _THE_SAME
            self._leave_out(line, f"{NOT_NEEDED}: the node does the same" if same else _REASONS.get(option, reason))

    def _broker_option(self, line: _Line) -> bool:
        """Convert an option of the whole broker, which may follow any listener or bridge."""
        option, value = line.option, line.value
        listener_options = {"password_file", "acl_file", "allow_anonymous"}
        if option in listener_options and self._per_listener and self._listener is None:
            return False
        if option in {"port", "bind_address"}:
            self._open_default(line)
        elif option in _LIMITS:
            self._limit(_LIMITS[option], int(value))
        elif option == "persistent_client_expiration":
            self._limit("max_session_expiry_s", _expiration_s(value))
        elif option == "per_listener_settings":
            self._per_listener = _flag(value)
        elif option == "check_retain_source":
            self._security["check_retain_source"] = _flag(value)
        elif option in {"password_file", "acl_file"}:
            self._file(line)
        elif option == "allow_anonymous" and not self._per_listener:
            self._anonymous = _flag(value)
        else:
            return False
        return True

    def _open_default(self, line: _Line) -> None:
        """Open the listener without a line of its own, by ``port`` or ``bind_address``."""
        self._listener_line = self._default.line = line
        if self._default not in self._listeners:
            self._listeners.insert(0, self._default)
            self._default.address = _Listener(None).address
        if line.option == "port":
            self._default.port = int(line.value)
        else:
            self._default.address = line.value

    def _limit(self, name: str, value: int) -> None:
        if value == 0 and name in {"max_inflight", "max_queued_messages", "max_queued_bytes"}:
            raise ValueError(f"not supported: without a limit; mqtt.limits.{name} has a default")
        if name == "max_connections" and value == -1:
            return  # no limit
        try:
            MqttLimits(**{name: value})
        except ValidationError as error:
            raise ValueError(f"mqtt.limits.{name}: {error.errors()[0]['msg']}") from None
        self._limits[name] = value

    def _file(self, line: _Line) -> None:
        if self._per_listener and self._listener is not None:
            self._listener.files.add(line.option)
        first = self._files.setdefault(line.option, line)
        if first.value != line.value:
            reason = f"a node has one file for all listeners; {first.seen_from(line)} names {first.value}"
            self._leave_out(line, reason)

    def _new_listener(self, line: _Line) -> _Listener | None:
        words = line.value.split()
        port = int(words[0])
        if port == 0:
            self._leave_out(line, "not supported: sockets of the file system")
            return None
        found = _Listener(line, port, words[1] if len(words) > 1 else _Listener(None).address)
        self._listeners.append(found)
        return found

    def _listener_option(self, listener: _Listener, line: _Line) -> bool:
        option, value = line.option, line.value
        if option in {"allow_anonymous", "listener_allow_anonymous"}:
            listener.anonymous = _flag(value)
        elif option == "max_connections":
            listener.max_connections = max(0, int(value))
        elif option == "protocol":
            if value not in {"mqtt", "websockets"}:
                raise ValueError("expected mqtt or websockets")
            listener.websockets = value == "websockets"
            if listener.websockets:
                self._leave_out(line, "converted, with the path /mqtt only; browsers also need origins")
        elif option == "websockets_origin":
            listener.origins.append(value)
        elif option in {"certfile", "keyfile", "cafile", "crlfile"}:
            names = {"certfile": "certificate", "keyfile": "key", "cafile": "client_ca", "crlfile": "revoked"}
            listener.tls[names[option]] = str(self._absolute(value))
            if option in {"cafile", "crlfile"}:
                listener.certificate_lines.append(line)
        elif option == "psk_hint":
            listener.shared_keys = True
            self._leave_out(line, _PSK)
        elif option == "require_certificate":
            listener.require_certificate = _flag(value)
        elif option == "use_identity_as_username":
            listener.certificate_is_user |= _flag(value)
        elif option == "use_subject_as_username":
            listener.certificate_is_user |= _flag(value)
            listener.tls |= {"name": "subject"} if _flag(value) else {}
        elif option == "tls_version":
            if value not in {"tlsv1.2", "tlsv1.3"}:
                raise ValueError("not supported: the least version is tlsv1.2")
            listener.tls |= {"minimum_version": value.removeprefix("tlsv")}
        else:
            return False
        return True

    def _add_listeners(self) -> None:
        """Add the listeners to the configuration, the first as the default listener of the node."""
        for listener in self._listeners[:]:
            complete = {"certificate", "key", "client_ca"} <= listener.tls.keys()
            if listener.shared_keys:
                reason = "psk_hint is not supported"
            elif listener.require_certificate and not complete:
                reason = "require_certificate needs certfile, keyfile and cafile"
            elif self._is_closed(listener):
                users = self._files["password_file"].seen_from(listener.line)
                reason = f"without a password_file it accepts no client, but the users of {users} could connect"
            else:
                continue
            if listener.line is not None:
                self._leave_out(listener.line, f"{reason}: it is left out")
                self._listeners.remove(listener)
        if not self._listeners and self._listener_line is not None:
            # A node has at least one listener. Mosquitto has none at this address, so it accepts no anonymous clients.
            self._listeners = [_Listener(None, address="127.0.0.1", anonymous=False)]
            self._leave_out(
                self._listener_line,
                "no listener is left: the node has one on 127.0.0.1:1883, for users with a password",
            )
        for index, listener in enumerate(self._listeners or [self._default]):
            allowed = listener.anonymous if listener.anonymous is not None else self._anonymous
            section: dict[str, Any] = {"bind": _bind(listener.address, listener.port)}
            tls = listener.tls
            if not listener.require_certificate:
                tls = {key: value for key, value in tls.items() if key not in {"client_ca", "revoked", "name"}}
                for line in listener.certificate_lines:
                    chain = line.option == "cafile" and "certificate" in tls
                    self._leave_out(line, _CHAIN if chain else _NO_CLIENT_CERTIFICATE)
            encrypted = {"certificate", "key"} <= tls.keys()
            if tls and not encrypted and listener.line is not None:
                self._leave_out(listener.line, "TLS needs certfile and keyfile: it is left out of this listener")
            if transport := {(True, True): "wss", (True, False): "ws", (False, True): "tls"}.get(
                (listener.websockets, encrypted)
            ):
                section["transport"] = transport
            if encrypted:
                section["tls"] = tls
            if listener.origins:
                section["origins"] = listener.origins
            if listener.max_connections:
                section["max_connections"] = listener.max_connections
            accepted = allowed if allowed is not None else self._listener_line is None
            if listener.require_certificate and not listener.certificate_is_user:
                # The certificate is needed, but the identity is that of user name and password.
                only_anonymous = accepted and "password_file" not in self._files
                section["authentication"] = ["anonymous"] if only_anonymous else ["password", "scram"]
            if accepted:
                section["anonymous"] = "allow"
            elif "password_file" not in self._files and not listener.certificate_is_user:
                # Without users no client may connect, and a node does not start with such a listener.
                self._security.setdefault("passwords", PASSWORDS)
            mqtt = self._done.config.setdefault("mqtt", {})
            if index == 0:
                mqtt.update(section)
            else:
                mqtt.setdefault("listeners", {})[f"listener-{listener.port}-{index}"] = section

        access = self._files.get("acl_file") if self._per_listener else None
        for listener in self._listeners:
            if access is not None and listener.line is not None and "acl_file" not in listener.files:
                of = access.seen_from(listener.line)
                reason = f"converted; a node has one access control: that of {of} applies here, too"
                self._leave_out(listener.line, reason)

    def _is_closed(self, listener: _Listener) -> bool:
        """Whether no client can connect to a listener, because only others have users."""
        return (
            self._per_listener
            and "password_file" in self._files
            and "password_file" not in listener.files
            and not (self._anonymous if listener.anonymous is None else listener.anonymous)
            and not (listener.require_certificate and listener.certificate_is_user)
        )

    # Bridges

    def _new_bridge(self, line: _Line) -> _Bridge | None:
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", line.value)[:64]
        if not name or any(each.name == name for each in self._bridges):
            self._leave_out(line, "another bridge has this name" if name else "expected a name")
            return None
        if name != line.value:
            self._leave_out(line, f"converted, with the name {name}: it has letters, digits, dots, - and _, at most 64")
        found = _Bridge(line, name)
        self._bridges.append(found)
        return found

    def _bridge_option(self, bridge: _Bridge, line: _Line) -> bool:
        option, value = line.option, line.value
        if option in {"address", "addresses"}:
            first, *others = value.split()
            host, _, port = first.rpartition(":")
            bridge.host, bridge.port = (host, int(port)) if host else (first, None)
            if others:
                self._leave_out(line, f"a bridge has one address: {first} is used")
        elif option == "topic":
            bridge.topics.append(_bridge_topic(value))
        elif option in {"remote_username", "username"}:
            bridge.settings["username"] = value
        elif option in {"remote_password", "password"}:
            bridge.password = value
        elif option in {"remote_clientid", "clientid"}:
            bridge.settings["client_id"] = value
        elif option == "cleansession":
            if _flag(value):
                bridge.settings["session_expiry_s"] = 0
        elif option == "bridge_session_expiry_interval":
            bridge.settings["session_expiry_s"] = int(value)
        elif option == "keepalive_interval":
            bridge.settings["keep_alive_s"] = int(value)
        elif option == "notifications":
            if not _flag(value):
                bridge.notifies = False
                raise ValueError(
                    "converted: the state is published on this node only, by default below $SYS/broker/bridge"
                )
        elif option == "notifications_local_only":
            bridge.local_status = _flag(value)
        elif option == "notification_topic":
            bridge.status_topic = value
        elif option == "bridge_insecure" and not _flag(value):
            pass  # the name in the server's certificate is checked
        elif option in {"bridge_cafile", "bridge_certfile", "bridge_keyfile"}:
            names = {"bridge_cafile": "ca", "bridge_certfile": "certificate", "bridge_keyfile": "key"}
            bridge.tls[names[option]] = str(self._absolute(value))
            bridge.uses_tls = True
        elif option == "bridge_capath":
            bridge.uses_tls = True
            if value.rstrip("/") != _SYSTEM_AUTHORITIES:
                self._leave_out(
                    line, "converted: the system's authorities are trusted; to trust others, set tls.ca to a file"
                )
        elif option == "bridge_tls_use_os_certs" and _flag(value):
            bridge.uses_tls = True
        elif option == "bridge_psk":
            bridge.shared_key = True
            self._leave_out(line, _PSK)
        else:
            return False
        return True

    def _add_bridges(self) -> None:
        for bridge in self._bridges:
            if not bridge.host or not bridge.topics:
                self._leave_out(bridge.line, "a bridge needs address and topic")
                continue
            if bridge.shared_key:
                self._leave_out(bridge.line, "bridge_psk is not supported: it is left out")
                continue
            if (bridge.password is None) != ("username" not in bridge.settings):
                self._leave_out(bridge.line, "user name and password belong together: neither is used")
                bridge.settings.pop("username", None)
                bridge.password = None
            section = {"name": bridge.name, "url": _bridge_url(bridge), **bridge.settings}
            if bridge.password is not None:
                section["password_file"] = f"bridge-{bridge.name}.secret"
                self._done.secrets[section["password_file"]] = bridge.password + "\n"
            if bridge.tls:
                section["tls"] = bridge.tls
            if bridge.status_topic:
                section["status_topic"] = bridge.status_topic
                if bridge.notifies and not bridge.local_status:
                    section["remote_status_topic"] = bridge.status_topic
            self._done.config.setdefault("bridges", []).append({**section, "topics": bridge.topics})

    # Users and access

    def _add_users(self) -> None:
        line = self._files.get("password_file")
        if line is None:
            return
        self._security["passwords"] = PASSWORDS
        for number, text in _texts(self._absolute(line.value), line):
            name, _, secret = text.partition(":")
            known = {"$6$": "SHA-512", "$7$": "PBKDF2", "$a": "Argon2"}
            kind = next((kind for prefix, kind in known.items() if secret.startswith(prefix)), "unknown")
            self._done.users.append(name)
            self._done.left_out.append(
                LeftOut(
                    str(self._absolute(line.value)),
                    number,
                    f"{name}:***",
                    f"the password hash ({kind}) cannot be converted: set the password again",
                )
            )

    def _add_acl(self) -> None:
        line = self._files.get("acl_file")
        if line is None:
            return
        self._security["policies"] = POLICIES
        certified = any(each.require_certificate and each.certificate_is_user for each in self._listeners)
        self._done.policy = _Acl(
            _lines(self._absolute(line.value), line), self._leave_out, certified=certified
        ).policy()


class _Acl:
    """Rules for anonymous clients, each user and all clients, and topics that each must not use."""

    def __init__(self, lines: list[_Line], leave_out: Callable[[_Line, str], None], *, certified: bool) -> None:
        self._leave_out = leave_out
        self._certified = certified
        self._allowed: dict[str | None, dict[str, list[str]]] = {}
        """Topics by user (None: anonymous clients) and method."""
        self._denied: dict[str | None, list[str]] = {}
        self._denied_by_patterns: list[str] = []
        self._patterns: dict[str, list[str]] = {"Publish": [], "Subscribe": []}
        denials: list[_Line] = []
        user: str | None = None
        skipped = False
        for line in lines:
            if line.option == "user":
                user, skipped = line.value, bool(re.search(r"[*?\[\]]", line.value))
                if skipped:
                    self._leave_out(line, "the name would be a pattern in a policy file; so are its topics left out")
            elif line.option not in {"topic", "pattern"}:
                self._leave_out(line, "expected user, topic or pattern")
            elif skipped and line.option == "topic" and not line.value.startswith("deny "):
                self._leave_out(line, "belongs to a user that is left out")
            else:
                try:
                    denials += [line] if self._add(user, line) else []
                except ValueError as error:
                    self._leave_out(line, str(error))
        if any(self._patterns.values()):
            for line in denials:
                self._leave_out(
                    line, "converted; what patterns of the file allow, it denies to the other users as well"
                )

    def _add(self, user: str | None, line: _Line) -> bool:
        """Add a line. Returns True if it denies a topic to one user. Raises ValueError."""
        word, _, rest = line.value.partition(" ")
        access, topic = (
            (word, rest.strip()) if word in {"read", "write", "readwrite", "deny"} else ("readwrite", line.value)
        )
        is_pattern = line.option == "pattern"
        if access == "deny":
            special = r"[{}]|%[cu]" if is_pattern else r"[{}]"
            denied = "/".join("+" if re.search(special, level) else level for level in topic.split("/"))
            TopicPattern(denied)
            (self._denied_by_patterns if is_pattern else self._denied.setdefault(user, [])).append(denied)
            if denied != topic:
                self._leave_out(line, f"converted as a denial of {denied}: exceptions have no placeholders and braces")
            return not is_pattern
        if "{" in topic or "}" in topic:
            raise ValueError("not supported: braces would be a placeholder in a policy file")
        if is_pattern:
            topic = topic.replace("%c", "{clientId}").replace("%u", "{user}")
        TopicPattern(topic)
        methods = {"read": ["Subscribe"], "write": ["Publish"]}.get(access, ["Publish", "Subscribe"])
        allowed = self._patterns if is_pattern else self._allowed.setdefault(user, {"Publish": [], "Subscribe": []})
        for method in methods:
            allowed[method].append(topic)
        return False

    def policy(self) -> dict[str, Any]:
        """Return the content of the policy file."""
        everyone = {"anonymous": True, "clientIds": ["*"]}
        rules: list[dict[str, Any]] = [
            {"name": "all clients may connect", "principals": everyone, "brokerResources": [{"method": "Connect"}]}
        ]
        if resources := self._resources(self._patterns, [each for topics in self._denied.values() for each in topics]):
            rules.append({"name": "patterns", "principals": everyone, "brokerResources": resources})
        for user, allowed in self._allowed.items():
            if resources := self._resources(allowed, self._denied.get(user, [])):
                subjects: dict[str, Any] = {"anonymous": True} if user is None else {"usernames": [user]}
                if user is not None and self._certified:
                    subjects["certificates"] = [user]
                rules.append({"principals": subjects, "brokerResources": resources})
        return {"rules": rules}

    def _resources(self, allowed: Mapping[str, list[str]], denied: list[str]) -> list[dict[str, Any]]:
        exceptions = list(dict.fromkeys([*denied, *self._denied_by_patterns]))
        return [
            {"method": method, "topics": topics, **({"exceptTopics": exceptions} if exceptions else {})}
            for method, topics in allowed.items()
            if topics
        ]


def _texts(path: Path, named: _Line | None = None) -> Iterator[tuple[int, str]]:
    """Return the lines of a file that are not empty and no comments, with their numbers. Raises ConfigError.

    ``named``: the line that names the file, for the error.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError):
            reason, hint = error.strerror, "correct the path"
        else:
            reason, hint = f"byte {error.start} is not UTF-8", "save the file as UTF-8"
        where = "" if named is None else f"{named.file}:{named.number}: {named.option}: "
        raise ConfigError(f"{where}{path} cannot be read", why=reason, hint=hint) from error
    for number, line in enumerate(text.split("\n"), 1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped


def _lines(path: Path, named: _Line | None = None) -> list[_Line]:
    found = []
    for number, text in _texts(path, named):
        option, _, value = text.partition(" ")
        found.append(_Line(path, number, option, value.strip()))
    return found


def _flag(value: str) -> bool:
    if value.lower() not in {"true", "false", "1", "0"}:
        raise ValueError("expected true or false")
    return value.lower() in {"true", "1"}


def _expiration_s(value: str) -> int:
    match = re.fullmatch(r"(\d+)([hdwmy])", value)
    if match is None:
        raise ValueError("expected a number with h, d, w, m or y")
    return int(match[1]) * _UNITS_S[match[2]]


def _bind(address: str, port: int) -> str:
    host = "127.0.0.1" if address == "localhost" else address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bridge_topic(value: str) -> dict[str, Any]:
    """Convert PATTERN [DIRECTION [QOS [LOCAL-PREFIX [REMOTE-PREFIX]]]]. Raises ValueError."""
    pattern, *rest = ["" if word == '""' else word for word in value.split()]
    if not pattern:
        raise ValueError(
            'not supported: the topic "", which maps one topic to another; use a rule with the whole topic'
        )
    if len(rest) > 4:
        raise ValueError("expected PATTERN [DIRECTION [QOS [LOCAL-PREFIX [REMOTE-PREFIX]]]]")
    direction, qos, local, remote = [*rest, *["out", "0", "", ""][len(rest) :]]
    if direction not in {"in", "out", "both"}:
        raise ValueError("expected the direction in, out or both")
    if qos not in {"0", "1", "2"}:
        raise ValueError("expected QoS 0, 1 or 2")
    topic = {"filter": pattern, "direction": direction, "qos": int(qos)}
    return topic | {name: text for name, text in (("local_prefix", local), ("remote_prefix", remote)) if text}


def _bridge_url(bridge: _Bridge) -> str:
    scheme, default = ("mqtts", 8883) if bridge.uses_tls else ("mqtt", 1883)
    # Mosquitto's default port is 1883, also with TLS.
    port = 1883 if bridge.port is None else bridge.port
    host = f"[{bridge.host}]" if ":" in bridge.host else bridge.host
    return f"{scheme}://{host}" + ("" if port == default else f":{port}")
