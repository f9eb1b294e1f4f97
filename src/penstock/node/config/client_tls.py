"""TLS options of the connections that a node opens: to etcd, other nodes, TubeMQ clusters and MQTT brokers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.node.config.listeners import Section
from penstock.runtime.io.tls import TlsOptions

__all__ = ["ClientTls", "NamedClientTls"]


class ClientTls(Section):
    """Files of a TLS client."""

    ca: Path | None = Field(default=None, description="PEM file: trusted authorities; default: those of the system")
    certificate: Path | None = Field(default=None, description="PEM file: client certificate, if the server wants one")
    key: Path | None = Field(
        default=None, description="PEM file: private key, not encrypted; default: in `certificate`"
    )

    @property
    def options(self) -> TlsOptions:
        """Options of the client."""
        return TlsOptions(self.ca, self.certificate, self.key)


class NamedClientTls(ClientTls):
    """Files of a TLS client, and the name of the server."""

    server_name: str | None = Field(default=None, description="name in the server's certificate; default: the host")

    @property
    def options(self) -> TlsOptions:
        """Options of the client."""
        return TlsOptions(self.ca, self.certificate, self.key, server_name=self.server_name)
