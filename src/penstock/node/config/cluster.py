"""Configuration of a cluster: the active node and its standbys, with the log of their commits in etcd."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from penstock.node.config.client_tls import ClientTls, NamedClientTls
from penstock.node.config.listeners import Section
from penstock.runtime.extras import needs_extra
from penstock.runtime.io.network import parse_address
from penstock.runtime.io.tls import ANONYMOUS_LOGIN, Login

__all__ = ["ClusterSection", "needs_cluster"]

_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


def needs_cluster() -> AbstractContextManager[None]:
    """Translate a failed import of the extra `cluster` inside the block.

    Raises:
        ConfigError: a library of the extra is not installed.
    """
    return needs_extra("cluster", "cluster: a library is not installed", "cluster")


def _endpoint(value: str) -> str:
    if "://" in value:
        raise ValueError("expected HOST:PORT without a scheme; TLS is set by `cluster.tls`")
    parse_address(value)
    return value


class ClusterSection(Section):
    """Cluster of nodes: one is active, the others are standbys. MQTT sessions, retained messages, the state store, and
    topics and settings of TubeMQ are replicated with etcd; records of TubeMQ are not."""

    name: str = Field(
        pattern=_NAME, description="name of the cluster; its keys in etcd begin with `/penstock/` and the name"
    )
    node: str = Field(pattern=_NAME, description="name of this node, unique in the cluster")
    etcd: list[Annotated[str, AfterValidator(_endpoint)]] = Field(
        min_length=1, description="HOST:PORT of every member of etcd"
    )
    tls: NamedClientTls | None = Field(
        default=None,
        description="TLS of the connections to etcd; default: plain TCP. With `--client-cert-auth` the CN of the "
        "client certificate is the user in etcd",
    )
    user: str | None = Field(default=None, description="user in etcd")
    password_file: Path | None = Field(default=None, description="file whose first line is the password of `user`")
    http_tls: ClientTls = Field(
        default=ClientTls(),
        description="TLS of the connection to the HTTP listener of the active node, from which a member that is too "
        "far behind loads a snapshot; HTTPS is used if this node has `http.tls`, with a client certificate if the "
        "active node has `http.tls.client_ca`",
    )
    tubemq: bool = Field(
        default=False,
        description="run TubeMQ: a broker on each node, with its own `tube.broker_id`, and the master of the active "
        "node. Records are not replicated. The same on all nodes",
    )
    lease_s: int = Field(
        default=3,
        ge=2,
        le=60,
        description="seconds after which a standby takes over from an active node that does not renew its lease",
    )
    new_log: bool = Field(
        default=False,
        description="begin new logs in etcd from the data directory of this node if etcd has none, after etcd lost its "
        "data. Only on the node with the newest data",
    )

    @model_validator(mode="after")
    def _login(self) -> ClusterSection:
        if (self.user is None) != (self.password_file is None):
            raise ValueError("set both `user` and `password_file`, or neither")
        return self

    @property
    def prefix(self) -> str:
        """Prefix of the keys of the cluster in etcd."""
        return f"/penstock/{self.name}/"

    def login(self) -> Login:
        """User and TLS files for etcd."""
        tls = self.tls
        if tls is None and self.user is None:
            return ANONYMOUS_LOGIN
        return Login(self.user, self.password_file, None if tls is None else tls.options)
