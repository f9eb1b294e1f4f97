"""Settings of librdkafka for a connection to Kafka."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.runtime.io.tls import read_password
from penstock.runtime.kafka.config import KafkaSasl, KafkaTls, SaslMechanism

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

__all__ = [
    "LARGEST_BYTES",
    "LARGEST_MESSAGE",
    "FatalErrors",
    "KafkaConnection",
    "KafkaTopic",
    "KafkaTopics",
    "token_expiry",
]

TOKEN_S: Final = 300.0
"""Validity of a token without an expiry time."""
LARGEST_BYTES: Final = 100 << 20
"""Maximum size of a message in a producer: the limit of the topic decides."""
LARGEST_MESSAGE: Final = 1_000_000
"""Maximum size of a key and a value for which topics have room, with headers [max.message.bytes is 1,048,588 by
default]."""


class FatalErrors:
    """Context manager that ends its block at a fatal error of a client; ``why`` is its text, None without one.

    Any call that calls callbacks may raise one. The library raises it with a type that is not an exception, so that no
    ``except`` clause with a type catches it [confluent-kafka 2.16]; Python 3.12 replaces it by SystemError, and
    ``error`` is None. Translate it after the block: it would be the context of an exception that is raised here, whose
    traceback could not be formatted then. Close the client: Python does not free what the error refers to.
    """

    def __init__(self) -> None:
        self.error: KafkaError | None = None
        self.why: str | None = None

    def __enter__(self) -> None:
        # Not in __exit__, where it may raise, and handle, exceptions with the error as their context.
        from confluent_kafka import KafkaError

        self._type = KafkaError

    def __exit__(self, _kind: object, value: object, _trace: object) -> bool:
        if not isinstance(value, (self._type, SystemError)):
            return False
        self.error = value if isinstance(value, self._type) else None
        self.why = str(value) if self.error is None else self.error.str()
        return True


class KafkaConnection(NamedTuple):
    """Brokers, TLS and authentication of a connection."""

    bootstrap: Sequence[str]
    tls: KafkaTls | None = None
    sasl: KafkaSasl | None = None

    @property
    def shown(self) -> str:
        """The brokers, for messages."""
        return f"Kafka at {', '.join(self.bootstrap)}"

    def settings(self) -> dict[str, Any]:
        """Return settings for any client. Reads password files. Raises ConfigError: one cannot be read."""
        settings: dict[str, Any] = {
            "bootstrap.servers": ",".join(self.bootstrap),
            "client.id": "penstock",
            "reconnect.backoff.max.ms": 2000,
            "security.protocol": f"{'sasl_' if self.sasl else ''}{'plaintext' if self.tls is None else 'ssl'}",
        }
        if (tls := self.tls) is not None:
            files = {
                "ssl.ca.location": tls.ca,
                "ssl.certificate.location": tls.certificate,
                "ssl.key.location": tls.key or tls.certificate,
            }
            settings |= {name: str(path) for name, path in files.items() if path is not None}
        return settings if self.sasl is None else settings | _authentication(self.sasl)


class KafkaTopic(NamedTuple):
    """A topic, how to connect to it, and how to write: ``max_bytes`` of a message without headers, time in seconds."""

    connection: KafkaConnection
    topic: str
    compression: str = "none"
    max_bytes: int = LARGEST_MESSAGE
    transaction_s: float = 300.0

    @property
    def shown(self) -> str:
        """The topic, for messages."""
        return f"topic {self.topic!r} of {self.connection.shown}"


class KafkaTopics(NamedTuple):
    """Topics, how to connect, and how to read. It has paths of password files, no passwords."""

    connection: KafkaConnection
    topics: tuple[str, ...]
    isolation: str
    max_records: int

    def as_texts(self) -> dict[str, str]:
        """Return the options of the format."""
        connection = self.connection
        texts = {
            "bootstrap": ",".join(connection.bootstrap),
            "topics": ",".join(self.topics),
            "isolation": self.isolation,
            "maxRecords": str(self.max_records),
        }
        if connection.tls is not None:
            texts["tls"] = connection.tls.model_dump_json()
        if connection.sasl is not None:
            texts["sasl"] = connection.sasl.model_dump_json()
        return texts

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> KafkaTopics:
        """Return what ``as_texts`` has written; Spark passes names in lower case."""
        tls, sasl = options.get("tls"), options.get("sasl")
        connection = KafkaConnection(
            tuple(options["bootstrap"].split(",")),
            None if tls is None else KafkaTls.model_validate_json(tls),
            None if sasl is None else KafkaSasl.model_validate_json(sasl),
        )
        return cls(connection, tuple(options["topics"].split(",")), options["isolation"], int(options["maxrecords"]))


def _authentication(sasl: KafkaSasl) -> dict[str, Any]:
    settings: dict[str, Any] = {"sasl.mechanism": sasl.mechanism.value}
    if (oidc := sasl.oidc) is not None:
        more = {"sasl.oauthbearer.scope": oidc.scope, "https.ca.location": oidc.ca}
        return settings | {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": oidc.token_url,
            "sasl.oauthbearer.client.id": oidc.client_id,
            "sasl.oauthbearer.client.secret": read_password(oidc.client_secret_file, "client_secret_file"),
            **{name: str(value) for name, value in more.items() if value is not None},
        }
    if (file := sasl.token_file) is not None:

        def token(_: str) -> tuple[str, float]:
            found = read_password(file, "token_file")
            return found, token_expiry(found)

        return settings | {"oauth_cb": token}
    assert sasl.mechanism is not SaslMechanism.OAUTHBEARER
    assert sasl.password_file is not None
    return settings | {"sasl.username": sasl.user, "sasl.password": read_password(sasl.password_file)}


def token_expiry(token: str) -> float:
    """Return the time (s since 1970) at which a JWT expires; without one, five minutes from now."""
    parts = token.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (IndexError, ValueError, KeyError, TypeError):
        return time.time() + TOKEN_S
