"""Options of the aio-statestore source and sink. The tables are the one description of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.spark import names
from penstock.statestore import hlc
from penstock.statestore.hlc import Hlc

__all__ = ["READ_OPTIONS", "UNSUPPORTED", "WRITE_OPTIONS", "StoreReadOptions", "StoreWriteOptions"]

_COMMON: Mapping[str, str] = {
    "statestore.broker": "URL of the MQTT broker that the state store answers on, mqtt://HOST:PORT (required)",
    "statestore.timeoutMs": "how long the state store may take for one answer, in ms; then the job fails (10000)",
}
READ_OPTIONS: Mapping[str, str] = {
    **_COMMON,
    "keys": "which keys: a glob, as device/*/state (*)",
    "minPartitions": "read the values in so many tasks (1)",
}
"""Options of the source."""

WRITE_OPTIONS: Mapping[str, str] = {
    **_COMMON,
    "orderBy": "column by which the last row of a key is told; without it two rows of one key in a batch are an error",
    "fencingToken": "version that protects what is written, as the run's lease gave it: MILLISECONDS:COUNTER:NODE",
}
"""Options of the sink."""

UNSUPPORTED: Mapping[str, str] = {
    "path": "name the broker in statestore.broker",
    "checkpointLocation": "give it to the stream (it is Spark's)",
}
"""What users may expect here, and what to do instead."""

_DEFAULT_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True)
class StoreReadOptions:
    """The options of one read, checked."""

    broker: str
    keys: str = "*"
    min_partitions: int = 1
    timeout_s: float = _DEFAULT_TIMEOUT_MS / 1000

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StoreReadOptions:
        """Check ``options`` as Spark hands them over.

        Raises:
            ConfigError: an unknown or unsupported option, or a value that cannot be used; names what is accepted.
        """
        given = names.canonical("aio-statestore", options, READ_OPTIONS, UNSUPPORTED)
        keys = given.get("keys", "*")
        if not keys:
            raise ConfigError("keys is empty", option="keys", do=READ_OPTIONS["keys"])
        at_least = given.get("minPartitions", "1")
        return cls(
            names.broker_url(given, "statestore.broker"),
            keys,
            names.positive("minPartitions", at_least, READ_OPTIONS["minPartitions"]),
            _timeout_s(given),
        )


@dataclass(frozen=True, slots=True)
class StoreWriteOptions:
    """The options of one write, checked."""

    broker: str
    order_by: str | None = None
    token: Hlc | None = None
    timeout_s: float = _DEFAULT_TIMEOUT_MS / 1000

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StoreWriteOptions:
        """Check ``options`` as Spark hands them over; raises as :meth:`StoreReadOptions.parse`."""
        given = names.canonical("aio-statestore", options, WRITE_OPTIONS, UNSUPPORTED, kind="sink")
        token = None
        if "fencingToken" in given:
            token = hlc.parse(given["fencingToken"])
            if token is None:
                raise ConfigError(
                    f"fencingToken {given['fencingToken']!r} is not a version",
                    option="fencingToken",
                    do=WRITE_OPTIONS["fencingToken"],
                )
        return cls(names.broker_url(given, "statestore.broker"), given.get("orderBy"), token, _timeout_s(given))


def _timeout_s(given: Mapping[str, str]) -> float:
    text = given.get("statestore.timeoutMs", str(_DEFAULT_TIMEOUT_MS))
    return names.positive("statestore.timeoutMs", text, _COMMON["statestore.timeoutMs"]) / 1000
