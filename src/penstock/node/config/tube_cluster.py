"""Configuration of a topic of a TubeMQ cluster as the target of a rule."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock.node.config.client_files import check_client_files
from penstock.node.config.client_tls import ClientTls
from penstock.node.config.listeners import Section
from penstock.runtime.io.network import parse_address
from penstock.runtime.io.tls import read_password
from penstock.tube.codec.strings import valid_topic

__all__ = ["TopicName", "TubeClusterSection", "TubeLogin"]


def _tube_topic(value: str) -> str:
    if not valid_topic(value):
        raise ValueError("expected a TubeMQ topic: a letter, then letters, digits and _, 2 to 64 in all")
    return value


TopicName = Annotated[str, BeforeValidator(lambda value: _tube_topic(value) if isinstance(value, str) else value)]


def _master(value: str) -> str:
    parse_address(value)
    return value


class TubeLogin(NamedTuple):
    """User, password and TLS context of a producer."""

    user: str | None
    password: str | None
    tls: ssl.SSLContext | None


class TubeClusterSection(Section):
    """Topic of a TubeMQ cluster as the target of a rule: this node's cluster or another one."""

    masters: list[Annotated[str, AfterValidator(_master)]] = Field(
        min_length=1, description="HOST:PORT of all masters; with `tls` their TLS ports"
    )
    topic: TopicName = Field(description="topic, which must exist or be created later")
    user: str | None = Field(default=None, description="user, in a cluster with users")
    password_file: Path | None = Field(default=None, description="file whose first line is the password of `user`")
    tls: ClientTls | None = Field(default=None, description="TLS of the connections; default: plain TCP")

    @model_validator(mode="after")
    def _complete(self) -> TubeClusterSection:
        if (self.user is None) != (self.password_file is None):
            raise ValueError("set `user` and `password_file` together")
        return self

    def check_files(self) -> None:
        """Read the password and the certificates. Raises ConfigError: a file cannot be used."""
        if self.tls is not None:
            check_client_files(self.tls.options, f"rules: topic {self.topic!r} of TubeMQ")
        self._password()

    def login(self) -> TubeLogin:
        """Return user, password and TLS context. Raises ConfigError: a file cannot be used."""
        return TubeLogin(self.user, self._password(), None if self.tls is None else self.tls.options.context())

    def _password(self) -> str | None:
        return None if self.password_file is None else read_password(self.password_file)
