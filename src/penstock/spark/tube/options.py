"""Options of the tubemq source and sink: Kafka's names for options of Kafka's connector, ``tubemq.*`` for the client.

Validation, errors and the reference page use the tables below. Spark passes option names in lower case and values as
strings, so names are case-insensitive.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeVar

from penstock.errors import ConfigError
from penstock.runtime.io.tls import ANONYMOUS_LOGIN, Login
from penstock.spark import option_parsing
from penstock.spark.option_parsing import LOGIN_OPTIONS, parse_login
from penstock.spark.tube.offsets import (
    OffsetSpec,
    PartitionValues,
    TimeSpec,
    TopicPartition,
    is_selected,
    parse_offset_spec,
    parse_times,
)
from penstock.statestore import hlc
from penstock.statestore.hlc import Hlc

__all__ = [
    "COLUMNS",
    "DEFAULT_GROUP",
    "HEADERS",
    "HEADER_PREFIX",
    "READ_OPTIONS",
    "UNSUPPORTED",
    "UNSUPPORTED_IN_SINK",
    "WITH_HEADERS",
    "WRITE_OPTIONS",
    "ConnectionOptions",
    "DeliveryGuarantee",
    "SinkOptions",
    "SourceOptions",
    "Transaction",
    "canonical_names",
    "check_masters",
    "header_of",
]

T = TypeVar("T")

DEFAULT_GROUP = "spark-tubemq"
DEFAULT_HTTP_PORT = 8080

COLUMNS = ("key", "value", "topic", "partition", "broker", "offset", "timestamp", "timestampType")
"""The default columns of the source, in order."""
HEADERS = "headers"
WITH_HEADERS = (*COLUMNS, HEADERS)
HEADER_PREFIX = "header."
"""Prefix of a column name that selects one header."""

READ_OPTIONS: Mapping[str, str] = {
    "tubemq.master": "addresses of the TubeMQ masters, HOST:PORT[,HOST:PORT...] (required)",
    "tubemq.timeoutMs": "how long to retry while TubeMQ does not respond, in ms; then the read fails (60000)",
    **LOGIN_OPTIONS,
    "tubemq.http": "HOST:PORT of the master's HTTP administration, for subscribePattern and Apache's "
    "brokers (port 8080 of the first master)",
    "tubemq.group": "consumer group that publishes the offsets of a stream, for example to `penstock tube "
    "group lag`; several, separated by commas; empty: none (derived from groupIdPrefix)",
    "tubemq.batchBytes": "maximum bytes of one response of penstock's brokers, 1 to 4194304 (2097152)",
    "subscribe": "topics to read, comma-separated (one of subscribe, subscribePattern and assign is required)",
    "subscribePattern": "topics to read, as a Python regular expression for the whole name; new topics are "
    "included (see subscribe)",
    "assign": 'partitions to read, as JSON: {"topic": ["<brokerId>:<partitionId>", ...]} (see subscribe)',
    "startingOffsets": "start of a batch or a new query: earliest, latest (streams only), or an offset per "
    'partition, -2 for earliest and -1 for latest, as JSON: {"topic": '
    '{"<brokerId>:<partitionId>": 28}} (earliest for a batch, latest for a stream)',
    "endingOffsets": "end of a batch: latest, or offsets as in startingOffsets, without -2; a stream stops "
    "at offsets without -1 and -2 (latest for a batch, none for a stream)",
    "startingTimestamp": "start at the first message that was appended at this time or later, in ms since "
    "1970; overrides startingOffsetsByTimestamp, which overrides startingOffsets (none)",
    "endingTimestamp": "end before the first message that was appended at this time or later, in ms since "
    "1970; batches only (none)",
    "startingOffsetsByTimestamp": 'startingTimestamp per partition: {"topic": {"<brokerId>:<partitionId>": ms}} (none)',
    "endingOffsetsByTimestamp": "endingTimestamp per partition; batches only (none)",
    "startingOffsetsByTimestampStrategy": "if a partition has no message at that time: error or latest (error)",
    "maxOffsetsPerTrigger": "maximum messages per micro-batch; streams only (no limit)",
    "minOffsetsPerTrigger": "minimum messages per micro-batch; not for the first one of a run, and not with "
    "availableNow (none)",
    "maxTriggerDelay": "maximum wait for minOffsetsPerTrigger, such as 500ms, 30s, 15m, 2h or 1d; a number "
    "alone is in ms (15m)",
    "minPartitions": "minimum number of tasks; ranges are split if there are fewer partitions (one task "
    "per partition; partitions with few messages share a task)",
    "maxRecordsPerPartition": "maximum messages per task; larger ranges are split (no limit)",
    "groupIdPrefix": "prefix of the group name, before a digest of the topics (spark-tubemq)",
    "filter": "message types ($msgType$) to read, comma-separated; the broker filters (all)",
    "columns": "columns to read, comma-separated, in this order; others are not computed. "
    "header.NAME is the first header NAME as text, or null (all except header.NAME)",
    "failOnDataLoss": "true: fail if records of the range no longer exist; false: continue at the oldest record (true)",
    "includeHeaders": "true: add the column headers, array<struct<key: string, value: binary>> (false)",
}
"""Description of each option, by its documented name."""

UNSUPPORTED: Mapping[str, str] = {
    "fetchOffset.numRetries": "set tubemq.timeoutMs",
    "fetchOffset.retryIntervalMs": "set tubemq.timeoutMs",
    "kafkaConsumer.pollTimeoutMs": "set tubemq.timeoutMs",
    "kafka.bootstrap.servers": "set tubemq.master",
    "kafka.group.id": "set tubemq.group",
    "kafka.*": "remove it; set user, password file and TLS with tubemq.*",
    "path": "set subscribe",
    "topic": "set subscribe",
}
"""Options of Kafka's connector that this source does not support, with the replacement."""

_DEFAULT_TIMEOUT_MS = 60_000
MOST_BATCH_BYTES = 4 << 20
"""Maximum size of one response of a broker."""
_DEFAULT_DELAY_MS = 15 * 60_000
_TOPIC = re.compile(r"\w+", re.ASCII)
_ADDRESS = re.compile(r"(?:\[[^\]]+\]|[^:,\s]+):(?P<port>\d{1,5})")


class ConnectionOptions(NamedTuple):
    """Masters and login of a cluster.

    ``http`` is the HTTP administration of a master; None: port 8080 of the first of ``masters``. ``group`` is the
    prefix of group names for brokers that require a group.
    """

    masters: str
    login: Login = ANONYMOUS_LOGIN
    http: str | None = None
    group: str = DEFAULT_GROUP
    batch_bytes: int | None = None

    @property
    def administration(self) -> str:
        """Address of the masters' administration."""
        return self.http or f"{self.masters.split(',', 1)[0].rpartition(':')[0]}:{DEFAULT_HTTP_PORT}"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Validated options of one read. Whether topics and partitions exist is checked later, at a master.

    ``topics`` are in the given order without duplicates, and empty with ``pattern``. ``assigned`` has the partition
    keys in the user's spelling, by topic; None without ``assign``. ``starting`` and ``ending`` are None if the option
    is not set, because the defaults of batches and streams differ. ``types`` is empty to read all message types.
    ``group`` is empty if the query does not publish its offsets.
    """

    masters: str
    topics: tuple[str, ...]
    assigned: dict[str, tuple[str, ...]] | None = None
    starting: OffsetSpec | None = None
    ending: OffsetSpec | None = None
    max_messages: int | None = None
    min_messages: int | None = None
    max_delay_ms: int = _DEFAULT_DELAY_MS
    min_partitions: int | None = None
    max_records: int | None = None
    fail_on_data_loss: bool = True
    timeout_ms: int = _DEFAULT_TIMEOUT_MS
    login: Login = ANONYMOUS_LOGIN
    pattern: str | None = None
    http: str | None = None
    group: str = ""
    batch_bytes: int | None = None
    types: tuple[str, ...] = ()
    columns: tuple[str, ...] = COLUMNS

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Validate ``options`` as Spark passes them.

        Raises:
            ConfigError: an option is unknown or not supported, or its value is invalid.
        """
        given = canonical_names(options)
        topics, assigned, pattern = _selection(given)
        columns = _columns(given)
        return cls(
            masters=check_masters(given),
            topics=topics,
            assigned=assigned,
            # for_batch and for_stream check these again, because a batch and a stream accept different values.
            starting=_starting(given),
            ending=_ending(given),
            max_messages=_parsed(given, "maxOffsetsPerTrigger", _positive("maxOffsetsPerTrigger")),
            min_messages=_min_messages(given),
            max_delay_ms=_parsed(given, "maxTriggerDelay", _duration("maxTriggerDelay")) or _DEFAULT_DELAY_MS,
            max_records=_parsed(given, "maxRecordsPerPartition", _positive("maxRecordsPerPartition")),
            min_partitions=_parsed(given, "minPartitions", _positive("minPartitions")),
            fail_on_data_loss=_parsed(given, "failOnDataLoss", _boolean("failOnDataLoss")) is not False,
            timeout_ms=_parsed(given, "tubemq.timeoutMs", _positive("tubemq.timeoutMs", option_parsing.MOST_MS))
            or _DEFAULT_TIMEOUT_MS,
            login=parse_login(given),
            pattern=pattern,
            http=given.get("tubemq.http") or None,
            group=_group(given),
            batch_bytes=_parsed(given, "tubemq.batchBytes", _positive("tubemq.batchBytes", MOST_BATCH_BYTES)),
            types=_list(given, "filter", "types"),
            columns=columns,
        )

    @property
    def connection(self) -> ConnectionOptions:
        """Masters and login."""
        return ConnectionOptions(self.masters, self.login, self.http, self.group or DEFAULT_GROUP, self.batch_bytes)

    def selects(self, partition: TopicPartition) -> bool:
        """Return True if the options select ``partition``."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, partition.topic) is not None
        return is_selected(partition, self.topics, self.assigned)

    def for_batch(self) -> tuple[OffsetSpec, OffsetSpec]:
        """Return the start and end of a batch.

        Raises:
            ConfigError: the batch would start at the latest offset.
        """
        starting = "earliest" if self.starting is None else self.starting
        codes = [code for named in starting.values() for code in named.values()] if isinstance(starting, dict) else []
        if starting == "latest" or -1 in codes:
            raise ConfigError(
                "startingOffsets: a batch cannot start at latest, because it would read nothing",
                option="startingOffsets",
                hint="remove it (default: earliest), set offsets, or read a stream",
            )
        return starting, "latest" if self.ending is None else self.ending

    def for_stream(self) -> OffsetSpec:
        """Return the start of a new query. A query with a checkpoint ignores it and continues from the checkpoint.

        Raises:
            ConfigError: the end of the stream is not set as explicit offsets.
        """
        if self.ending is not None and self.stop_offsets() is None:
            raise ConfigError(
                "the end of a stream (endingOffsets, endingTimestamp) must be explicit offsets",
                option="endingOffsets",
                why="names and timestamps resolve to different offsets in each batch",
                hint="set offsets as JSON; to stop at the current end, use trigger(availableNow=True)",
            )
        return "latest" if self.starting is None else self.starting

    def stop_offsets(self) -> PartitionValues | None:
        """Return the end of a stream, which then reads only the partitions listed in it; None: no end."""
        if not isinstance(self.ending, dict):
            return None
        codes = [code for named in self.ending.values() for code in named.values() if code < 0]
        return None if codes else self.ending


def canonical_names(options: Mapping[str, str]) -> dict[str, str]:
    """Return ``options`` with the documented spelling of every name.

    Raises:
        ConfigError: an option is unknown or not supported.
    """
    return option_parsing.canonical("tubemq", options, READ_OPTIONS, UNSUPPORTED)


def header_of(column: str) -> str:
    """Return the name of the header that a column ``header.NAME`` contains."""
    return column.removeprefix(HEADER_PREFIX)


def _starting(given: Mapping[str, str]) -> OffsetSpec | None:
    """Return the start; precedence as in Kafka's connector: a time for all partitions, times per partition, offsets."""
    option = "startingOffsetsByTimestampStrategy"
    strategy = given.get(option, "error").strip().lower()
    if strategy not in {"error", "latest"}:
        raise ConfigError(
            f"{option} {given[option]!r} is neither error nor latest", option=option, hint=READ_OPTIONS[option]
        )
    times = _times(given, "startingTimestamp", "startingOffsetsByTimestamp", or_latest=strategy == "latest")
    if times is not None:
        return times
    return _parsed(given, "startingOffsets", lambda text: parse_offset_spec(text, "startingOffsets"))


def _ending(given: Mapping[str, str]) -> OffsetSpec | None:
    times = _times(given, "endingTimestamp", "endingOffsetsByTimestamp", or_latest=True)
    if times is not None:
        return times
    return _parsed(given, "endingOffsets", lambda text: parse_offset_spec(text, "endingOffsets", earliest=False))


def _times(given: Mapping[str, str], of_all: str, of_each: str, *, or_latest: bool) -> TimeSpec | None:
    if of_all in given:
        text = given[of_all].strip()
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(
                f"{of_all} {given[of_all]!r} is not a time in ms", option=of_all, hint=READ_OPTIONS[of_all]
            )
        return TimeSpec(int(text), or_latest)
    return TimeSpec(parse_times(given[of_each], of_each), or_latest) if of_each in given else None


def _parsed(given: Mapping[str, str], option: str, parse: Callable[[str], T]) -> T | None:
    return parse(given[option]) if option in given else None


def check_masters(given: Mapping[str, str]) -> str:
    """Return the masters in ``tubemq.master``; ConfigError if it is not set or not a list of addresses."""
    text = given.get("tubemq.master", "")
    addresses = [address.strip() for address in text.split(",")]
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match["port"]) < 65536:
            what = f"tubemq.master {text!r}: {address!r} is not HOST:PORT" if text else "tubemq.master is not set"
            raise ConfigError(
                what, option="tubemq.master", hint='set it to "HOST:PORT[,HOST:PORT...]", for example 127.0.0.1:8715'
            )
    return ",".join(addresses)


def _selection(
    given: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]] | None, str | None]:
    chosen = [name for name in ("subscribe", "subscribePattern", "assign") if name in given]
    if len(chosen) != 1:
        raise ConfigError(
            f"{' and '.join(chosen)} are set" if chosen else "none of subscribe, subscribePattern, assign is set",
            option="subscribe",
            hint='set one: subscribe="topic_a,topic_b", subscribePattern="topic_.*" or '
            'assign=\'{"topic_a": ["<brokerId>:<partitionId>"]}\'',
        )
    if "assign" in given:
        assigned = _assigned(given["assign"])
        return _topics("assign", assigned), assigned, None
    if "subscribePattern" in given:
        pattern = given["subscribePattern"]
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"subscribePattern {pattern!r} is not a regular expression: {error}",
                option="subscribePattern",
                hint=READ_OPTIONS["subscribePattern"],
            ) from None
        return (), None, pattern
    return _topics("subscribe", _list(given, "subscribe", "topic_a,topic_b")), None, None


def _topics(option: str, given: Iterable[str]) -> tuple[str, ...]:
    """Return ``given`` if all are valid names of TubeMQ topics, which, unlike Kafka's, have no dots and hyphens."""
    topics = tuple(given)
    for name in topics:
        if _TOPIC.fullmatch(name) is None:
            raise ConfigError(
                f"{option}: {name!r} is not a valid topic name",
                option=option,
                why="a topic name has 2 to 64 letters, digits and '_', and begins with a letter",
                hint="correct the name, or use subscribePattern for a pattern of names",
            )
    return topics


def _list(given: Mapping[str, str], option: str, example: str) -> tuple[str, ...]:
    """Return the names in ``option``, trimmed and without duplicates; empty if it is not set."""
    if option not in given:
        return ()
    names_given = tuple(dict.fromkeys(name.strip() for name in given[option].split(",")))
    if not all(names_given):
        what = "topic" if option == "subscribe" else "name"
        raise ConfigError(f"{option} {given[option]!r} has an empty {what}", option=option, hint=f"use {example}")
    return names_given


def _columns(given: Mapping[str, str]) -> tuple[str, ...]:
    headers = _parsed(given, "includeHeaders", _boolean("includeHeaders")) is True
    if "columns" not in given:
        return (*COLUMNS, *((HEADERS,) if headers else ()))
    known = {name.lower(): name for name in (*COLUMNS, HEADERS)}
    chosen = []
    for name in _list(given, "columns", "key,value,offset"):
        if name.startswith(HEADER_PREFIX) and name != HEADER_PREFIX:
            chosen.append(name)
            continue
        if name.lower() not in known:
            raise ConfigError(
                f"columns {given['columns']!r}: {name!r} is not a column of the source",
                option="columns",
                hint=f"use {', '.join(known.values())} or {HEADER_PREFIX}NAME",
            )
        chosen.append(known[name.lower()])
    if headers and HEADERS not in chosen:
        chosen.append(HEADERS)
    return tuple(dict.fromkeys(chosen))


def _group(given: Mapping[str, str]) -> str:
    """Return the group's name, derived from the options only, so that every run of a query has the same group."""
    if "tubemq.group" in given:
        return given["tubemq.group"].strip()
    what = {name: given[name] for name in ("subscribe", "subscribePattern", "assign", "filter") if name in given}
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
    prefix = given.get("groupIdPrefix", DEFAULT_GROUP).strip()
    if not prefix:
        raise ConfigError("groupIdPrefix is empty", option="groupIdPrefix", hint=READ_OPTIONS["groupIdPrefix"])
    return f"{prefix}-{digest}"


def _assigned(text: str) -> dict[str, tuple[str, ...]]:
    error = ConfigError(
        f"assign {text[:200]!r} is not a JSON object of topics with lists of partitions",
        option="assign",
        hint='use {"topic": ["<brokerId>:<partitionId>", ...]}; the broker may be omitted if only one has the topic',
    )
    try:
        parsed = option_parsing.json_value(text)
    except ValueError:
        raise error from None
    if not isinstance(parsed, dict) or not parsed:
        raise error
    assigned: dict[str, tuple[str, ...]] = {}
    for topic, partitions in parsed.items():
        if not isinstance(partitions, list) or not partitions:
            raise error
        # Kafka's connector has plain numbers here; both forms are accepted.
        given = [str(name) if isinstance(name, int) and not isinstance(name, bool) else name for name in partitions]
        if not all(isinstance(name, str) and re.fullmatch(r"(\d+:)?\d+", name, re.ASCII) for name in given):
            raise error
        assigned[topic] = tuple(dict.fromkeys(given))
    return assigned


def _min_messages(given: Mapping[str, str]) -> int | None:
    least = _parsed(given, "minOffsetsPerTrigger", _positive("minOffsetsPerTrigger"))
    if least is None and "maxTriggerDelay" in given:
        raise ConfigError(
            "maxTriggerDelay is set without minOffsetsPerTrigger",
            option="maxTriggerDelay",
            why="it limits how long a batch waits for minOffsetsPerTrigger",
            hint="set minOffsetsPerTrigger as well, or remove both",
        )
    most = _parsed(given, "maxOffsetsPerTrigger", _positive("maxOffsetsPerTrigger"))
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"minOffsetsPerTrigger {least} is more than maxOffsetsPerTrigger {most}",
            option="minOffsetsPerTrigger",
            hint=f"set it to {most} or less",
        )
    return least


def _duration(option: str) -> Callable[[str], int]:
    return lambda text: option_parsing.duration_ms(option, text, READ_OPTIONS[option])


def _positive(option: str, most: int = option_parsing.MOST) -> Callable[[str], int]:
    return lambda text: option_parsing.positive(option, text, READ_OPTIONS[option], most=most)


def _boolean(option: str) -> Callable[[str], bool]:
    return lambda text: option_parsing.boolean(option, text, READ_OPTIONS[option])


class DeliveryGuarantee(StrEnum):
    """Values of the option ``deliveryGuarantee``."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


WRITE_OPTIONS: Mapping[str, str] = {
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
"""Description of each option, by its documented name."""

UNSUPPORTED_IN_SINK: Mapping[str, str] = {
    "kafka.bootstrap.servers": "set tubemq.master",
    "kafka.*": "remove it; set user, password file and TLS with tubemq.*",
    "path": "set topic",
    "subscribe": "set topic",
}
"""Options of Kafka's connector that this sink does not support, with the replacement."""

_DEFAULT_SINK_TIMEOUT_MS = 60_000
_LONGEST_NAME = 512


@dataclass(frozen=True, slots=True)
class Transaction:
    """Identity of a batch write, for deduplication: each ``app_id`` and ``version`` is committed once."""

    app_id: str
    version: int


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Validated options of one write."""

    masters: str
    topic: str | None = None
    timeout_s: float = _DEFAULT_SINK_TIMEOUT_MS / 1000
    login: Login = ANONYMOUS_LOGIN
    delivery: DeliveryGuarantee | None = None
    transaction: Transaction | None = None
    token: Hlc | None = None
    partition: int | None = None
    include_headers: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Validate ``options`` as Spark passes them.

        Raises:
            ConfigError: an option is unknown or not supported, or its value is invalid.
        """
        given = option_parsing.canonical("tubemq", options, WRITE_OPTIONS, UNSUPPORTED_IN_SINK, kind="sink")
        topic = given.get("topic")
        if topic is not None and not topic.strip():
            raise ConfigError("topic is empty", option="topic", hint=WRITE_OPTIONS["topic"])
        text = given.get("tubemq.timeoutMs", str(_DEFAULT_SINK_TIMEOUT_MS))
        timeout_ms = option_parsing.positive(
            "tubemq.timeoutMs", text, WRITE_OPTIONS["tubemq.timeoutMs"], most=option_parsing.MOST_MS
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
            option_parsing.boolean(
                "includeHeaders", given.get("includeHeaders", "true"), WRITE_OPTIONS["includeHeaders"]
            ),
        )


def _partition(given: Mapping[str, str]) -> int | None:
    text = given.get("partition", "").strip()
    if "partition" not in given:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 31:
        raise ConfigError(f"partition {text!r} is not a number", option="partition", hint=WRITE_OPTIONS["partition"])
    return int(text)


def _delivery(given: Mapping[str, str]) -> DeliveryGuarantee | None:
    text = given.get("deliveryGuarantee")
    if text is None:
        return None
    if text.strip().lower() not in set(DeliveryGuarantee):
        raise ConfigError(
            f"deliveryGuarantee {text!r} is not a delivery guarantee",
            option="deliveryGuarantee",
            hint=WRITE_OPTIONS["deliveryGuarantee"],
        )
    return DeliveryGuarantee(text.strip().lower())


def _transaction(given: Mapping[str, str]) -> Transaction | None:
    name, number = given.get("txnAppId"), given.get("txnVersion")
    if name is None and number is None:
        return None
    if not name or number is None or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"txnAppId {name!r} and txnVersion {number!r} do not identify a write",
            option="txnVersion" if name else "txnAppId",
            hint=f"set both, with 1 to {_LONGEST_NAME} characters in txnAppId, or neither",
        )
    if not (number.isascii() and number.isdecimal()) or int(number) >= 1 << 63:
        raise ConfigError(
            f"txnVersion {number!r} is not a number", option="txnVersion", hint=WRITE_OPTIONS["txnVersion"]
        )
    if _delivery(given) is DeliveryGuarantee.AT_LEAST_ONCE:
        raise ConfigError(
            "txnAppId cannot be combined with deliveryGuarantee at-least-once",
            option="txnAppId",
            hint="remove one of them",
        )
    return Transaction(name, int(number))


def _token(given: Mapping[str, str]) -> Hlc | None:
    text = given.get("fencingToken")
    token = None if text is None else hlc.parse(text)
    if text is not None and token is None:
        raise ConfigError(
            f"fencingToken {text!r} is not a version", option="fencingToken", hint=WRITE_OPTIONS["fencingToken"]
        )
    return token
