"""The sections ``mqtt`` and ``security``: listeners, TLS, authentication, limits, password and policy files.

The limits are defined once, in the engine of the broker and in the transport; options, checks and documentation follow.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_type_hints

from annotated_types import Ge
from pydantic import AfterValidator, BaseModel, Field, create_model, model_validator

from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.listener_access import AuthenticationMethod
from penstock.mqtt.transport.listener_settings import ConnectionLimits, PublishLimits, Transport
from penstock.mqtt.transport.tls import ClientCertificates, TlsFiles
from penstock.node.config.listeners import AddressText, ListenerSection, Section, bind
from penstock.security.certificates import CertificateName
from penstock.security.tokens import METHOD

__all__ = [
    "AdditionalMqttListener",
    "ListenerLimits",
    "MqttLimits",
    "MqttListener",
    "MqttListenerEntry",
    "Security",
    "Tls",
    "TlsSection",
    "broker_limits",
    "limits_section",
    "network_limits",
    "publish_limits",
]


def limits_section(name: str, doc: str, *kinds: type[Any]) -> type[BaseModel]:
    """A section with every field of dataclasses of limits.

    Their annotations have the accepted values (an integer without bounds is 0 or more), their docstrings the
    descriptions.
    """
    fields: dict[str, Any] = {}
    for kind in kinds:
        texts = _docstrings(kind)
        types = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            accepted = Annotated[int, Ge(0)] if types[field.name] is int else types[field.name]
            fields[field.name] = (accepted, Field(default=field.default, description=texts.get(field.name, "")))
    return cast("type[BaseModel]", create_model(name, __base__=Section, __doc__=doc, **fields))


def _docstrings(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass."""
    source = inspect.getsource(sys.modules[kind.__module__])
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == kind.__name__).body
    found: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


MqttLimits = limits_section("MqttLimits", "Limits of the broker.", BrokerLimits, ConnectionLimits)
ListenerLimits = limits_section(
    "ListenerLimits", "Limits of one listener, in addition to those of the broker.", ConnectionLimits, PublishLimits
)


def broker_limits(section: Any) -> BrokerLimits:
    """Return the limits that the engine enforces."""
    return BrokerLimits(**{field.name: getattr(section, field.name) for field in dataclasses.fields(BrokerLimits)})


def network_limits(section: Any) -> ConnectionLimits:
    """Return the limits of network connections."""
    return ConnectionLimits(
        **{field.name: getattr(section, field.name) for field in dataclasses.fields(ConnectionLimits)}
    )


def publish_limits(section: Any) -> PublishLimits:
    """Return the limits of the clients of one listener."""
    return PublishLimits(**{field.name: getattr(section, field.name) for field in dataclasses.fields(PublishLimits)})


class TlsSection(Section):
    """Certificates of a TLS listener."""

    certificate: Path = Field(description="PEM file: server certificate, followed by intermediate certificates")
    key: Path = Field(description="PEM file: private key, not encrypted")
    client_ca: Path | None = Field(default=None, description="PEM file: authorities of client certificates")
    revoked: Path | None = Field(
        default=None, description="PEM file: revocation lists, one for each authority of client certificates"
    )

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        if self.revoked is not None and self.client_ca is None:
            raise ValueError("`revoked` lists client certificates: it needs `client_ca`")
        return self

    def files(self) -> TlsFiles:
        """Certificate files of the listener; with ``client_ca`` it requires client certificates."""
        return TlsFiles(
            certificate=self.certificate,
            key=self.key,
            client_ca=self.client_ca,
            revoked=self.revoked,
            client_certificates=ClientCertificates.NONE if self.client_ca is None else ClientCertificates.REQUIRE,
        )


class Tls(TlsSection):
    """Certificates of a listener. SIGHUP reloads the files."""

    client_certificates: ClientCertificates = Field(
        default=ClientCertificates.REQUIRE,
        description="whether a client certificate is required, with `client_ca`",
    )
    name: CertificateName = Field(
        default=CertificateName.COMMON_NAME, description="part of a client certificate that identifies the client"
    )
    minimum_version: Literal["1.2", "1.3"] = Field(default="1.2", description="minimum TLS version")

    def files(self) -> TlsFiles:
        """Certificate files of the listener; without ``client_ca`` no client certificate is requested."""
        files = super().files()
        return dataclasses.replace(
            files,
            client_certificates=files.client_certificates if self.client_ca is None else self.client_certificates,
            name=self.name,
            minimum_version=self.minimum_version,
        )


def _path(value: str) -> str:
    if not value.startswith("/") or "?" in value or "#" in value:
        raise ValueError("expected a path that begins with /, as in /mqtt")
    return value


class MqttListenerEntry(ListenerSection):
    """One address for MQTT clients."""

    transport: Transport = Field(default=Transport.TCP, description="transport protocol")
    tls: Tls | None = Field(default=None, description="certificates, for `tls` and `wss`")
    authentication: list[AuthenticationMethod] | None = Field(
        default=None,
        description="accepted authentication methods; default: all that are configured with a file or "
        "`client_ca`, or `anonymous` if none is",
    )
    path: Annotated[str, AfterValidator(_path)] = Field(
        default="/mqtt", description="path of the endpoint, for `ws` and `wss`"
    )
    origins: list[str] = Field(
        default_factory=list,
        description="origins of web pages that may connect, for `ws` and `wss`, such as "
        "`https://hmi.example`; `*`: all",
    )
    max_connections: int = Field(
        default=0,
        ge=0,
        description="maximum number of connections of this listener; 0: only the limit of the broker applies",
    )

    @model_validator(mode="after")
    def _fits(self) -> MqttListenerEntry:
        if self.transport.encrypted and self.tls is None:
            raise ValueError(f"transport {self.transport} needs `tls` with `certificate` and `key`")
        if self.tls is not None and not self.transport.encrypted:
            raise ValueError(f"`tls` needs the transport tls or wss, not {self.transport}: add `transport: tls`")
        methods = self.authentication
        if methods is not None and not methods:
            raise ValueError("authentication: expected at least one method; `[anonymous]` accepts every client")
        if methods and AuthenticationMethod.CERTIFICATE in methods and (self.tls is None or self.tls.client_ca is None):
            raise ValueError("authentication: `certificate` needs `tls.client_ca`")
        return self


class AdditionalMqttListener(MqttListenerEntry):
    """Additional MQTT listener."""

    bind: AddressText = Field(description="HOST:PORT to listen on; port 0 selects a free port")
    limits: ListenerLimits = Field(  # type: ignore[valid-type] # a model that is created above
        default_factory=lambda: ListenerLimits(max_unauthenticated=0), description="limits of this listener"
    )


class MqttListener(MqttListenerEntry):
    """MQTT broker: default listener, additional listeners, and limits."""

    bind: AddressText = bind("127.0.0.1:1883")
    listeners: dict[str, AdditionalMqttListener] = Field(
        default_factory=dict, description="additional listeners by name, which logs and metrics use"
    )
    limits: MqttLimits = Field(default_factory=MqttLimits, description="limits of the broker")  # type: ignore[valid-type] # too

    @model_validator(mode="after")
    def _names(self) -> MqttListener:
        if "mqtt" in self.listeners:
            raise ValueError("listeners: the name mqtt is reserved for the default listener")
        for name, listener in self.listeners.items():
            if listener.advertise is not None and listener.advertise.is_wildcard:
                raise ValueError(f"listeners.{name}: advertise {listener.advertise}: no client can connect to it")
        return self


class Security(Section):
    """Files for authentication and authorization. SIGHUP reloads them; an invalid file changes nothing."""

    passwords: Path | None = Field(default=None, description="password file, see `penstock user`")
    tokens: Path | None = Field(default=None, description="token file")
    token_method: str = Field(default=METHOD, min_length=1, description="authentication method of clients with a token")
    policies: Path | None = Field(
        default=None, description="policy file; without it, every accepted client has all permissions"
    )
    administrators: list[str] | None = Field(
        default=None,
        description="users that may make changes and read message bodies by TubeMQ's HTTP administration, and do "
        "everything in the console; default: with policies, users with `Administer` for all topics, otherwise every "
        "user unless `operators` or `viewers` is set. The administration token is always accepted",
    )
    operators: list[str] = Field(
        default_factory=list,
        description="users that may read everything in the console and change data and clients there, but not topics: "
        "reset offsets, redrive dead letters, disconnect clients, publish, write keys. Contents of messages and keys "
        "are limited by their policies",
    )
    viewers: list[str] = Field(
        default_factory=list,
        description="users that may read everything in the console; contents of messages and keys are limited by their "
        "policies",
    )
    check_retain_source: bool = Field(
        default=True,
        description="with policies, deliver a retained message only while its publisher may publish it",
    )
    strict_read: bool = Field(
        default=False,
        description="require Read and Write for SET with NX or NEX and for VDEL, whose responses reveal "
        "the value of a key",
    )

    @property
    def names_roles(self) -> bool:
        """Whether operators or viewers are listed."""
        return bool(self.operators or self.viewers)

    def check(self, listeners: Mapping[str, MqttListenerEntry]) -> None:
        """Raise ValueError if a listener has an authentication method without its file."""
        for name, listener in listeners.items():
            place = "mqtt" if name == "mqtt" else f"mqtt.listeners.{name}"
            for method, path, option in (
                (AuthenticationMethod.PASSWORD, self.passwords, "passwords"),
                (AuthenticationMethod.SCRAM, self.passwords, "passwords"),
                (AuthenticationMethod.TOKEN, self.tokens, "tokens"),
            ):
                if method in (listener.authentication or ()) and path is None:
                    raise ValueError(f"{place}.authentication: `{method}` needs `security.{option}`")
