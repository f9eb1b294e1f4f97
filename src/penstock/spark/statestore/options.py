"""Options of the aio-statestore source and sink. Validation, errors and the reference page use the tables below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError
from penstock.spark import option_parsing
from penstock.spark.option_parsing import LOGIN_OPTIONS
from penstock.spark.tube import options
from penstock.spark.tube.options import SourceOptions
from penstock.statestore import hlc
from penstock.statestore.hlc import Hlc

__all__ = [
    "READ_OPTIONS",
    "UNSUPPORTED",
    "WRITE_OPTIONS",
    "SnapshotOptions",
    "Starting",
    "StoreFeedOptions",
    "StoreReadOptions",
    "StoreWriteOptions",
]

_TIMEOUT: Mapping[str, str] = {
    "statestore.timeoutMs": "timeout of a request to the state store in ms; then the job fails (10000)",
}
_OF_TUBE = ("tubemq.master", "tubemq.timeoutMs", *LOGIN_OPTIONS, "maxOffsetsPerTrigger", "failOnDataLoss")
READ_OPTIONS: Mapping[str, str] = {
    "statestore.broker": "URL of the MQTT broker of the state store, mqtt://HOST:PORT (required for batches, "
    "and for streams that start with a snapshot)",
    **_TIMEOUT,
    "keys": "glob of keys, such as device/*/state (*)",
    "minPartitions": "number of tasks; a stream splits its ranges (1)",
    "includeExpiry": "true: batches and snapshots have expires_at, with one additional request per key; "
    "requires the extension ttl of the store (false)",
    "includeWriter": "true: batches and snapshots have writer, from the changes in tubemq.topic; null for "
    "older changes (false)",
    "startingVersion": "start of a new stream: snapshot (current keys, then changes), earliest, latest, or "
    "changes since a version MILLISECONDS:COUNTER:NODE or a time in ms since 1970 "
    "(snapshot)",
    "tubemq.topic": "TubeMQ topic with the changes, statestore.capture_topic of the node (required for streams)",
    **{name: options.READ_OPTIONS[name] for name in _OF_TUBE},
    "tubemq.master": "addresses of the TubeMQ masters, HOST:PORT[,HOST:PORT...] (required for streams)",
}
"""Options of the source."""

WRITE_OPTIONS: Mapping[str, str] = {
    "statestore.broker": "URL of the MQTT broker of the state store, mqtt://HOST:PORT (required)",
    **_TIMEOUT,
    "orderBy": "column that selects the last row of a key; without it two rows with one key in a "
    "batch are an error (none)",
    "fencingToken": "fencing token: version of the run's lease, MILLISECONDS:COUNTER:NODE (none)",
}
"""Options of the sink."""

UNSUPPORTED: Mapping[str, str] = {
    "path": "set statestore.broker",
    "checkpointLocation": "set it on the stream (it is an option of Spark)",
    "startingOffsets": "set startingVersion",
    "subscribe": "set tubemq.topic",
}
"""Unsupported options that users may expect, with the alternative."""

_DEFAULT_TIMEOUT_MS = 10_000

Starting = Literal["snapshot", "earliest", "latest"] | Hlc
"""Start of a stream; a version is the first one that is read."""


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """Options for reading the current keys."""

    broker: str
    keys: str = "*"
    tasks: int = 1
    timeout_s: float = _DEFAULT_TIMEOUT_MS / 1000
    include_expiry: bool = False
    changes: SourceOptions | None = None
    """Source of the changes that have the writers of keys; None if writers are not read."""


@dataclass(frozen=True, slots=True)
class StoreFeedOptions:
    """Options for reading changes; ``source`` has the options of the TubeMQ topic."""

    source: SourceOptions
    keys: str
    starting: Starting
    snapshot: SnapshotOptions | None


@dataclass(frozen=True, slots=True)
class StoreReadOptions:
    """Validated options of one read, without the checks that differ between batches and streams."""

    given: Mapping[str, str]
    keys: str
    tasks: int
    timeout_s: float
    include_expiry: bool
    include_writer: bool
    starting: Starting | None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StoreReadOptions:
        """Validate ``options`` as Spark passes them.

        Raises:
            ConfigError: an option is unknown or not supported, or its value is invalid.
        """
        given = option_parsing.canonical("aio-statestore", options, READ_OPTIONS, UNSUPPORTED)
        keys = given.get("keys", "*")
        if not keys:
            raise ConfigError("keys is empty", option="keys", hint=READ_OPTIONS["keys"])
        if "statestore.broker" in given:
            option_parsing.broker_url(given, "statestore.broker")
        return cls(
            given,
            keys,
            option_parsing.positive("minPartitions", given.get("minPartitions", "1"), READ_OPTIONS["minPartitions"]),
            _timeout_s(given),
            option_parsing.boolean("includeExpiry", given.get("includeExpiry", "false"), READ_OPTIONS["includeExpiry"]),
            option_parsing.boolean("includeWriter", given.get("includeWriter", "false"), READ_OPTIONS["includeWriter"]),
            _starting(given["startingVersion"]) if "startingVersion" in given else None,
        )

    def for_batch(self) -> SnapshotOptions:
        """Return the options of a batch, which reads the current keys.

        Raises:
            ConfigError: the broker is not set, or ``startingVersion`` is set.
        """
        if self.starting is not None:
            raise ConfigError(
                "startingVersion is not supported for a batch, which reads the current keys",
                option="startingVersion",
                hint="remove it, or read a stream",
            )
        return self._snapshot()

    def for_stream(self) -> StoreFeedOptions:
        """Return the options of a stream, which reads changes, after a snapshot if ``startingVersion`` is snapshot.

        Raises:
            ConfigError: the TubeMQ masters, the topic, or the broker for the snapshot are not set.
        """
        starting: Starting = "snapshot" if self.starting is None else self.starting
        source = self._changes("a stream reads the TubeMQ topic of its changes")
        return StoreFeedOptions(source, self.keys, starting, self._snapshot() if starting == "snapshot" else None)

    def _snapshot(self) -> SnapshotOptions:
        broker = option_parsing.broker_url(self.given, "statestore.broker")
        changes = self._changes("the TubeMQ topic of its changes has the writers") if self.include_writer else None
        return SnapshotOptions(broker, self.keys, self.tasks, self.timeout_s, self.include_expiry, changes)

    def _changes(self, why: str) -> SourceOptions:
        topic = self.given.get("tubemq.topic", "").strip()
        if not topic:
            raise ConfigError(
                "tubemq.topic is not set",
                option="tubemq.topic",
                why=f"the state store keeps no history for readers: {why}",
                hint="set statestore.capture_topic in the node's configuration, and tubemq.topic to the same topic",
            )
        of_tube = {name: self.given[name] for name in (*_OF_TUBE, "minPartitions") if name in self.given}
        return SourceOptions.parse(of_tube | {"subscribe": topic, "includeHeaders": "true"})


@dataclass(frozen=True, slots=True)
class StoreWriteOptions:
    """Validated options of one write."""

    broker: str
    order_by: str | None = None
    token: Hlc | None = None
    timeout_s: float = _DEFAULT_TIMEOUT_MS / 1000

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StoreWriteOptions:
        """Validate ``options`` as Spark passes them; raises as :meth:`StoreReadOptions.parse`."""
        given = option_parsing.canonical("aio-statestore", options, WRITE_OPTIONS, UNSUPPORTED, kind="sink")
        token = None
        if "fencingToken" in given:
            token = hlc.parse(given["fencingToken"])
            if token is None:
                raise ConfigError(
                    f"fencingToken {given['fencingToken']!r} is not a version",
                    option="fencingToken",
                    hint=WRITE_OPTIONS["fencingToken"],
                )
        return cls(
            option_parsing.broker_url(given, "statestore.broker"), given.get("orderBy"), token, _timeout_s(given)
        )


def _starting(text: str) -> Starting:
    word = text.strip()
    for known in ("snapshot", "earliest", "latest"):
        if word.lower() == known:
            return known
    if word.isascii() and word.isdecimal() and len(word) <= _TIME_DIGITS:
        return Hlc(int(word), 0, "")
    version = hlc.parse(word)
    if version is None:
        raise ConfigError(
            f"startingVersion {text!r} is neither a version nor one of snapshot, earliest, latest",
            option="startingVersion",
            hint=READ_OPTIONS["startingVersion"],
        )
    return version


_TIME_DIGITS = 15
"""Maximum digits of a time in ms; a longer number is probably not a time."""


def _timeout_s(given: Mapping[str, str]) -> float:
    text = given.get("statestore.timeoutMs", str(_DEFAULT_TIMEOUT_MS))
    return (
        option_parsing.positive(
            "statestore.timeoutMs", text, _TIMEOUT["statestore.timeoutMs"], most=option_parsing.MOST_MS
        )
        / 1000
    )
