"""Configuration of a Kafka topic as the target of a rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from penstock.errors import ConfigError
from penstock.node.config.listeners import Section
from penstock.runtime.io.network import parse_address

__all__ = ["KafkaCompression", "KafkaSasl", "KafkaSection", "KafkaTls", "SaslMechanism", "needs_kafka"]


@contextmanager
def needs_kafka() -> Iterator[None]:
    """Translate a failed import of the extra `kafka` inside the block.

    Raises:
        ConfigError: the library of the extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            "rules: the client of Kafka is not installed",
            option="rules",
            why=str(error),
            do='pip install ".[kafka]" in a clone of penstock',
        ) from error


def _server(value: str) -> str:
    if "://" in value:
        raise ValueError("expected HOST:PORT without a scheme; TLS is set by `tls`")
    parse_address(value)
    return value


class SaslMechanism(StrEnum):
    """Mechanism with which the node authenticates at Kafka."""

    PLAIN = "PLAIN"
    """User and password, unchanged: use it with TLS only."""
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    """User and password, which are not sent."""
    SCRAM_SHA_512 = "SCRAM-SHA-512"
    """The same with SHA-512."""
    OAUTHBEARER = "OAUTHBEARER"
    """A token (JWT)."""


class KafkaCompression(StrEnum):
    """Compression of batches."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class KafkaTls(Section):
    """TLS of the connections to Kafka."""

    ca: Path | None = Field(default=None, description="PEM file: trusted authorities; default: those of the system")
    certificate: Path | None = Field(default=None, description="PEM file: client certificate")
    key: Path | None = Field(
        default=None, description="PEM file: private key, not encrypted; default: in `certificate`"
    )


class KafkaSasl(Section):
    """Authentication at Kafka. Files are read when the node starts, a token file at each authentication."""

    mechanism: SaslMechanism = Field(description="SASL mechanism")
    user: str | None = Field(default=None, description="user of PLAIN and SCRAM; `$ConnectionString` for Event Hubs")
    password_file: Path | None = Field(
        default=None, description="file whose first line is the password of `user`, or the connection string"
    )
    token_file: Path | None = Field(
        default=None, description="file with the token of OAUTHBEARER (JWT), which another program renews"
    )

    @model_validator(mode="after")
    def _complete(self) -> KafkaSasl:
        if self.mechanism is SaslMechanism.OAUTHBEARER:
            if self.token_file is None or self.user is not None or self.password_file is not None:
                raise ValueError("OAUTHBEARER needs `token_file`, and neither `user` nor `password_file`")
        elif self.user is None or self.password_file is None or self.token_file is not None:
            raise ValueError(f"{self.mechanism.value} needs `user` and `password_file`, and no `token_file`")
        return self


class KafkaSection(Section):
    """Topic of a Kafka cluster, or of another server with its protocol, as the target of a rule."""

    bootstrap: list[Annotated[str, AfterValidator(_server)]] = Field(
        min_length=1, description="HOST:PORT of brokers from which the others are found"
    )
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$", description="topic, which must exist or be created by Kafka")
    compression: KafkaCompression = Field(default=KafkaCompression.NONE, description="compression of batches")
    tls: KafkaTls | None = Field(default=None, description="TLS of the connections; default: plain TCP")
    sasl: KafkaSasl | None = Field(default=None, description="authentication; default: none")
