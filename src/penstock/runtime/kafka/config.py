"""Options of connections to Kafka and to schema registries: TLS, authentication, compression."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from penstock.runtime.extras import needs_extra
from penstock.runtime.io.network import Address, parse_address

__all__ = [
    "KafkaCompression",
    "KafkaOidc",
    "KafkaSasl",
    "KafkaServer",
    "KafkaTls",
    "SaslMechanism",
    "SchemaRegistry",
    "TopicName",
    "needs_kafka",
]


def needs_kafka(option: str) -> AbstractContextManager[None]:
    """Translate a failed import of the extra `kafka` inside the block. ``option``: the option that needs it.

    Raises:
        ConfigError: the library of the extra is not installed.
    """
    return needs_extra("kafka", f"{option}: the client of Kafka is not installed", option)


def _server(value: str) -> str:
    if "://" in value:
        raise ValueError("expected HOST:PORT without a scheme; TLS is set by `tls`")
    parse_address(value)
    return value


KafkaServer = Annotated[str, AfterValidator(_server)]
"""HOST:PORT of a broker."""
TopicName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]


def _secure_url(value: str) -> str:
    """Check a URL to which a client secret is sent."""
    found = urlsplit(value)
    if found.username is not None:  # warnings show the URL
        raise ValueError("expected a URL without credentials: set `client_id` and `client_secret_file`")
    if found.scheme == "https" and found.hostname:
        return value
    if found.scheme == "http" and found.hostname and Address(found.hostname, 0).is_loopback:
        return value
    raise ValueError("expected https://HOST/PATH: the client secret is sent to it")


def _registry_url(value: str) -> str:
    found = urlsplit(value)
    if found.username is not None:  # warnings show the URL
        raise ValueError("expected a URL without credentials: set `user` and `password_file`")
    if found.scheme not in ("http", "https") or not found.hostname or found.query or found.fragment:
        raise ValueError("expected http://HOST:PORT or https://HOST/PATH")
    _ = found.port  # ValueError: it is not one
    return value.rstrip("/")


class SaslMechanism(StrEnum):
    """Mechanism of authentication at Kafka."""

    PLAIN = "PLAIN"
    """User and password, unchanged: use it with TLS only."""
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    """User and password, which are not sent."""
    SCRAM_SHA_512 = "SCRAM-SHA-512"
    """The same with SHA-512."""
    OAUTHBEARER = "OAUTHBEARER"
    """A token (JWT), from a file or an identity provider."""


class KafkaCompression(StrEnum):
    """Compression of batches."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KafkaTls(_Section):
    """TLS of the connections to Kafka."""

    ca: Path | None = Field(default=None, description="PEM file: trusted authorities; default: those of the system")
    certificate: Path | None = Field(default=None, description="PEM file: client certificate")
    key: Path | None = Field(
        default=None, description="PEM file: private key, not encrypted; default: in `certificate`"
    )


class KafkaOidc(_Section):
    """Identity provider that issues tokens to a client (OAuth 2.0 client credentials). The client of Kafka gets a
    new one before the last one expires."""

    token_url: Annotated[str, AfterValidator(_secure_url)] = Field(
        description="URL of the token endpoint; https, or http on this machine"
    )
    client_id: str = Field(min_length=1, description="client id")
    client_secret_file: Path = Field(description="file whose first line is the client secret; read when connecting")
    scope: str | None = Field(
        default=None, description="requested scope, for example `https://NAMESPACE.servicebus.windows.net/.default`"
    )
    ca: Path | None = Field(
        default=None, description="PEM file: trusted authorities of the token endpoint; default: those of the system"
    )


class KafkaSasl(_Section):
    """Authentication at Kafka. Files are read when a client is created, a token file at each authentication."""

    mechanism: SaslMechanism = Field(description="SASL mechanism")
    user: str | None = Field(default=None, description="user of PLAIN and SCRAM; `$ConnectionString` for Event Hubs")
    password_file: Path | None = Field(
        default=None, description="file whose first line is the password of `user`, or the connection string"
    )
    token_file: Path | None = Field(
        default=None, description="file with the token of OAUTHBEARER (JWT), which another program renews"
    )
    oidc: KafkaOidc | None = Field(
        default=None, description="identity provider that issues the tokens of OAUTHBEARER, instead of `token_file`"
    )

    @model_validator(mode="after")
    def _complete(self) -> KafkaSasl:
        has_token = self.token_file is not None or self.oidc is not None
        if self.mechanism is SaslMechanism.OAUTHBEARER:
            if not has_token or self.user is not None or self.password_file is not None:
                raise ValueError("OAUTHBEARER needs `token_file` or `oidc`, and neither `user` nor `password_file`")
            if self.token_file is not None and self.oidc is not None:
                raise ValueError("set either `token_file` or `oidc`")
        elif self.user is None or self.password_file is None or has_token:
            raise ValueError(
                f"{self.mechanism.value} needs `user` and `password_file`, and neither `token_file` nor `oidc`"
            )
        return self


class SchemaRegistry(_Section):
    """Schema registry with the API of Confluent's: Confluent, Karapace, Apicurio (path `/apis/ccompat/v7`). Its files
    are read at each request, on the driver and on the executors."""

    url: Annotated[str, AfterValidator(_registry_url)] = Field(description="URL of the registry, `http` or `https`")
    user: str | None = Field(
        default=None, min_length=1, description="user of basic authentication; the key of an API key in Confluent Cloud"
    )
    password_file: Path | None = Field(default=None, description="file whose first line is the password of `user`")
    ca: Path | None = Field(
        default=None, description="PEM file: trusted authorities with `https`; default: those of the system"
    )

    def digest(self, form: str = "") -> str:
        """Return a short name for directories with schemas in a ``form``, another one for another URL: ids belong to a
        registry."""
        return hashlib.sha256(f"{self.url}{' ' if form else ''}{form}".encode()).hexdigest()[:12]

    @model_validator(mode="after")
    def _complete(self) -> SchemaRegistry:
        if (self.user is None) != (self.password_file is None):
            raise ValueError("user and password_file belong together: set both, or none of them")
        found = urlsplit(self.url)
        if self.user is not None and found.scheme == "http" and not Address(found.hostname or "", 0).is_loopback:
            raise ValueError("expected https with user: the password is sent to the registry")
        if self.ca is not None and found.scheme == "http":
            raise ValueError("expected ca only with https")
        return self
