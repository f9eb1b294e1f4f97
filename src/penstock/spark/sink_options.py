"""Options of the tubemq sink. The tables are the one description of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.runtime.login import ANYBODY, Login
from penstock.spark import names
from penstock.spark.login_options import LOGIN_OPTIONS, parse_login
from penstock.spark.options import check_masters

__all__ = ["OPTIONS", "UNSUPPORTED", "SinkOptions"]

OPTIONS: Mapping[str, str] = {
    "tubemq.master": "HOST:PORT[,HOST:PORT...] of the tube's masters (required)",
    "tubemq.timeoutMs": "how long a message may take to be acknowledged, in ms; then the task fails (60000)",
    **LOGIN_OPTIONS,
    "topic": "topic of all rows; rows may have a column topic instead, and this is for those where it is null",
}
"""Every option, as its user writes it, with its meaning."""

UNSUPPORTED: Mapping[str, str] = {
    "kafka.bootstrap.servers": "set tubemq.master",
    "includeHeaders": "leave it out: headers are written where the rows have a column headers",
    "path": "name the topic in topic",
}
"""Options of Kafka's connector that this sink does not have, and what to do instead."""

_DEFAULT_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write, checked."""

    masters: str
    topic: str | None = None
    timeout_s: float = _DEFAULT_TIMEOUT_MS / 1000
    login: Login = ANYBODY

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Check ``options`` as Spark hands them over.

        Raises:
            ConfigError: an unknown or unsupported option, or a value that cannot be used; names what is accepted.
        """
        given = names.canonical("tubemq", options, OPTIONS, UNSUPPORTED, kind="sink")
        topic = given.get("topic")
        if topic is not None and not topic.strip():
            raise ConfigError("topic is empty", option="topic", do=OPTIONS["topic"])
        text = given.get("tubemq.timeoutMs", str(_DEFAULT_TIMEOUT_MS))
        timeout_ms = names.positive("tubemq.timeoutMs", text, OPTIONS["tubemq.timeoutMs"])
        return cls(check_masters(given), topic, timeout_ms / 1000, parse_login(given))
