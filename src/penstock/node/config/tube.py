"""Parts of the section ``tube`` of ``penstock.yaml``: authentication, TLS, and the limits of master and broker."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from penstock.mqtt.transport.tls import ServerTls
from penstock.node.config.listeners import Section
from penstock.node.config.mqtt import TlsSection, limits_section
from penstock.tube.engine.limits import TubeLimits

__all__ = ["Start", "TubeAccess", "TubeCertificates", "TubeLimitOptions", "TubeTls", "tube_limits"]

Start = Callable[..., Awaitable[tuple[str, int]]]
"""``start`` of a master or broker: host, port, and the keywords ``tls`` and ``tls_port``; returns the plain address."""


def _network(value: object) -> object:
    if isinstance(value, str):
        try:
            return str(ipaddress.ip_network(value))
        except ValueError as error:
            raise ValueError(f"expected a network like 10.1.0.0/16: {error}") from None
    return value


class TubeAccess(Section):
    """TubeMQ clients that need not sign although the node has users, because Apache's Java consumers cannot
    sign."""

    networks: list[Annotated[str, BeforeValidator(_network)]] = Field(
        default_factory=list, description="networks whose clients need not sign, such as `10.1.0.0/16`"
    )
    groups: list[str] = Field(default_factory=list, description="consumer groups whose members need not sign")

    @model_validator(mode="before")
    @classmethod
    def _one_file(cls, value: object) -> object:
        if isinstance(value, dict) and "users" in value:
            raise ValueError("users: TubeMQ clients sign as users of `security.passwords` (penstock user create)")
        return value


class TubeTls(TlsSection):
    """TLS listeners of master and broker, on the same addresses as the plain ones. SIGHUP reloads the files."""

    client_ca: Path | None = Field(
        default=None, description="PEM file: authorities of client certificates, which all clients then need"
    )
    master_port: int = Field(default=8716, ge=0, le=65535, description="TLS port of the master; 0 selects a free port")
    broker_port: int = Field(default=8124, ge=0, le=65535, description="TLS port of the broker; 0 selects a free port")

    def read(self) -> ServerTls:
        """Read the files. Raises ConfigError if one cannot be used."""
        return ServerTls(self.files(), protocol="tubemq")


class TubeCertificates:
    """Certificates of the TLS listeners of a master or broker; ``tls`` None: there are no such listeners."""

    def __init__(self, tls: TubeTls | None) -> None:
        """Read the files. Raises ConfigError if one cannot be used."""
        self.used = None if tls is None else tls.read()
        """The certificates of new connections."""
        self._context = None if self.used is None else self.used.context

    def beside(self, start: Start, port: int) -> Start:
        """Return ``start`` with the arguments of a TLS listener on ``port``, if there are certificates."""
        context = self._context
        return start if context is None else lambda host, plain: start(host, plain, tls=context, tls_port=port)

    def use(self, read: ServerTls | None) -> None:
        """Use these certificates for new connections, if there are listeners."""
        if self._context is not None and read is not None:
            self.used = read
            self._context.replace(read.context)


TubeLimitOptions = limits_section("TubeLimitOptions", "Limits of the node's master and broker.", TubeLimits)


def tube_limits(section: Any) -> TubeLimits:
    """Return the limits of a section, for master and broker."""
    return TubeLimits(**{field.name: getattr(section, field.name) for field in dataclasses.fields(TubeLimits)})
