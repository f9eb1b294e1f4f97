"""Options of the tubemq sink. The tables are the one description of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import ConfigError
from penstock.runtime.io.credentials import ANONYMOUS_LOGIN, Login
from penstock.spark import option_parsing
from penstock.spark.option_parsing import LOGIN_OPTIONS, parse_login
from penstock.spark.tube.options import check_masters
from penstock.statestore import hlc
from penstock.statestore.hlc import Hlc

__all__ = ["OPTIONS", "UNSUPPORTED", "DeliveryGuarantee", "SinkOptions", "Transaction"]


class DeliveryGuarantee(StrEnum):
    """Delivery guarantee of a write."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


OPTIONS: Mapping[str, str] = {
    "tubemq.master": "addresses of the TubeMQ masters, HOST:PORT[,HOST:PORT...] (required)",
    "tubemq.timeoutMs": "timeout of an acknowledgement in ms; then the task fails (60000)",
    **LOGIN_OPTIONS,
    "topic": "topic of rows without a value in the column topic (none)",
    "partition": "partition number of rows without a value in the column partition (selected by the "
    "key; distributed without a key)",
    "includeHeaders": "true: write the column headers; false: ignore it (true)",
    "deliveryGuarantee": "exactly-once (an error with Apache's brokers) or at-least-once (exactly-once with "
    "penstock's brokers, at-least-once with others)",
    "txnAppId": "batch writes, with txnVersion: name of the writer, 1 to 512 characters; a number "
    "that was committed under this name is not written again, as in Delta; in "
    "foreachBatch the query's id and a name (none)",
    "txnVersion": "batch writes, with txnAppId: increasing number of this write; in foreachBatch the "
    "batch number (none)",
    "fencingToken": "version of the run's lease, MILLISECONDS:COUNTER:NODE, which orders runs of a query "
    "or txnAppId; an older run is refused (none: an unknown run is the newest)",
}
"""Every option, as its user writes it, with its meaning."""

UNSUPPORTED: Mapping[str, str] = {
    "kafka.bootstrap.servers": "set tubemq.master",
    "kafka.*": "remove it; set user, password file and TLS with tubemq.*",
    "path": "set topic",
    "subscribe": "set topic",
}
"""Options of Kafka's connector that this sink does not have, and what to do instead."""

_DEFAULT_TIMEOUT_MS = 60_000
_LONGEST_NAME = 512


@dataclass(frozen=True, slots=True)
class Transaction:
    """Identity of a batch write: the same name and number are written once."""

    app_id: str
    version: int


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one write, checked."""

    masters: str
    topic: str | None = None
    timeout_s: float = _DEFAULT_TIMEOUT_MS / 1000
    login: Login = ANONYMOUS_LOGIN
    delivery: DeliveryGuarantee | None = None
    transaction: Transaction | None = None
    token: Hlc | None = None
    partition: int | None = None
    include_headers: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Check ``options`` as Spark hands them over.

        Raises:
            ConfigError: an unknown or unsupported option, or a value that cannot be used; names what is accepted.
        """
        given = option_parsing.canonical("tubemq", options, OPTIONS, UNSUPPORTED, kind="sink")
        topic = given.get("topic")
        if topic is not None and not topic.strip():
            raise ConfigError("topic is empty", option="topic", do=OPTIONS["topic"])
        text = given.get("tubemq.timeoutMs", str(_DEFAULT_TIMEOUT_MS))
        timeout_ms = option_parsing.positive(
            "tubemq.timeoutMs", text, OPTIONS["tubemq.timeoutMs"], most=option_parsing.MOST_MS
        )
        return cls(
            check_masters(given),
            topic,
            timeout_ms / 1000,
            parse_login(given),
            _delivery(given),
            _transaction(given),
            _token(given),
            _partition(given),
            option_parsing.boolean("includeHeaders", given.get("includeHeaders", "true"), OPTIONS["includeHeaders"]),
        )


def _partition(given: Mapping[str, str]) -> int | None:
    text = given.get("partition", "").strip()
    if "partition" not in given:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 31:
        raise ConfigError(f"partition {text!r} is not a number", option="partition", do=OPTIONS["partition"])
    return int(text)


def _delivery(given: Mapping[str, str]) -> DeliveryGuarantee | None:
    text = given.get("deliveryGuarantee")
    if text is None:
        return None
    if text.strip().lower() not in set(DeliveryGuarantee):
        raise ConfigError(
            f"deliveryGuarantee {text!r} is not known", option="deliveryGuarantee", do=OPTIONS["deliveryGuarantee"]
        )
    return DeliveryGuarantee(text.strip().lower())


def _transaction(given: Mapping[str, str]) -> Transaction | None:
    name, number = given.get("txnAppId"), given.get("txnVersion")
    if name is None and number is None:
        return None
    if not name or number is None or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"txnAppId {name!r} with txnVersion {number!r} names no write",
            option="txnVersion" if name else "txnAppId",
            do=f"give both, the name with 1 to {_LONGEST_NAME} characters, or neither",
        )
    if not (number.isascii() and number.isdecimal()) or int(number) >= 1 << 63:
        raise ConfigError(f"txnVersion {number!r} is not a number", option="txnVersion", do=OPTIONS["txnVersion"])
    if _delivery(given) is DeliveryGuarantee.AT_LEAST_ONCE:
        raise ConfigError(
            "txnAppId has no meaning with deliveryGuarantee at-least-once",
            option="txnAppId",
            do="leave one of them out",
        )
    return Transaction(name, int(number))


def _token(given: Mapping[str, str]) -> Hlc | None:
    text = given.get("fencingToken")
    token = None if text is None else hlc.parse(text)
    if text is not None and token is None:
        raise ConfigError(f"fencingToken {text!r} is not a version", option="fencingToken", do=OPTIONS["fencingToken"])
    return token
