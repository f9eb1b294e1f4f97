"""Options of the tubemq source: Kafka's names where the meaning is Kafka's, ``tubemq.*`` for the client.

The tables below are the one description of them; the checks and the messages read them. Spark hands options over with
lower-cased names and text values, so names are compared without regard to case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import ConfigError
from penstock.runtime.login import ANYBODY, Login
from penstock.spark import names
from penstock.spark.login_options import LOGIN_OPTIONS, parse_login
from penstock.spark.offsets import Times, Wanted, parse_times, parse_wanted

__all__ = ["OPTIONS", "UNSUPPORTED", "SourceOptions", "canonical_names", "check_masters"]

T = TypeVar("T")

OPTIONS: Mapping[str, str] = {
    "tubemq.master": "HOST:PORT[,HOST:PORT...] of the tube's masters (required)",
    "tubemq.timeoutMs": "how long to try again while the tube does not answer, in ms; then the read fails (60000)",
    **LOGIN_OPTIONS,
    "subscribe": "topics to read, separated by commas",
    "assign": 'partitions to read, as JSON: {"topic": ["<brokerId>:<partitionId>", ...]}',
    "startingOffsets": "where a batch or a new query starts: earliest (batch), latest (stream) or JSON",
    "endingOffsets": "where a batch ends: latest (default) or JSON; batches only",
    "startingTimestamp": "start at the first message that the brokers took at this time or later, in ms since 1970",
    "endingTimestamp": "end before the first message that they took at this time or later; batches only",
    "startingOffsetsByTimestamp": 'the same for each partition: {"topic": {"<brokerId>:<partitionId>": ms}}',
    "endingOffsetsByTimestamp": "the same for each partition; batches only",
    "startingOffsetsByTimestampStrategy": "where a partition has nothing so new: error (default) or latest",
    "maxOffsetsPerTrigger": "at most so many messages a micro-batch; streams only",
    "minPartitions": "at least so many tasks, cutting ranges where there are fewer partitions",
    "failOnDataLoss": "true (default): fail where records that should be read are gone; false: go on at the oldest",
    "includeHeaders": "true: add the column headers, array<struct<key: string, value: binary>> (false)",
}
"""Every option, as its user writes it, with its meaning."""

UNSUPPORTED: Mapping[str, str] = {
    "subscribePattern": "name the topics in subscribe",
    "minOffsetsPerTrigger": "set the trigger's interval",
    "maxTriggerDelay": "set the trigger's interval",
    "maxRecordsPerPartition": "set minPartitions",
    "groupIdPrefix": "leave it out: reading ranges needs no consumer group",
    "fetchOffset.numRetries": "set tubemq.timeoutMs",
    "fetchOffset.retryIntervalMs": "set tubemq.timeoutMs",
    "kafkaConsumer.pollTimeoutMs": "set tubemq.timeoutMs",
    "kafka.bootstrap.servers": "set tubemq.master",
    "filter": "filter the data frame",
    "columns": "select from the data frame",
    "path": "name the topics in subscribe",
}
"""Options of Kafka's connector, or planned here, that this source does not have, and what to do instead."""

_DEFAULT_TIMEOUT_MS = 60_000
_ADDRESS = re.compile(r"(?:\[[^\]]+\]|[^:,\s]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one read, checked. What depends on the tube (do these partitions exist?) is not known here.

    ``topics`` are in the order given, without repeats. ``assigned`` are the partition names as written, by topic, None
    with ``subscribe``. ``starting`` and ``ending`` are None where the option was not given: the defaults differ
    between batch and stream.
    """

    masters: str
    topics: tuple[str, ...]
    assigned: dict[str, tuple[str, ...]] | None = None
    starting: Wanted | None = None
    ending: Wanted | None = None
    max_messages: int | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    timeout_ms: int = _DEFAULT_TIMEOUT_MS
    login: Login = ANYBODY

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check ``options`` as Spark hands them over.

        Raises:
            ConfigError: an unknown or unsupported option, or a value that cannot be used; names what is accepted.
        """
        given = canonical_names(options)
        topics, assigned = _selection(given)
        return cls(
            masters=check_masters(given),
            topics=topics,
            assigned=assigned,
            # Which of the words are allowed depends on batch or stream: for_batch and for_stream look again.
            starting=_starting(given),
            ending=_ending(given),
            max_messages=_parsed(given, "maxOffsetsPerTrigger", _positive("maxOffsetsPerTrigger")),
            min_partitions=_parsed(given, "minPartitions", _positive("minPartitions")),
            fail_on_data_loss=_parsed(given, "failOnDataLoss", _boolean("failOnDataLoss")) is not False,
            include_headers=_parsed(given, "includeHeaders", _boolean("includeHeaders")) is True,
            timeout_ms=_parsed(given, "tubemq.timeoutMs", _positive("tubemq.timeoutMs")) or _DEFAULT_TIMEOUT_MS,
            login=parse_login(given),
        )

    def for_batch(self) -> tuple[Wanted, Wanted]:
        """Where a batch starts and ends.

        Raises:
            ConfigError: it would start at the latest.
        """
        starting = "earliest" if self.starting is None else self.starting
        codes = [code for named in starting.values() for code in named.values()] if isinstance(starting, dict) else []
        if starting == "latest" or -1 in codes:
            raise ConfigError(
                "startingOffsets asks a batch to start at the latest, which would select nothing",
                option="startingOffsets",
                do="leave it out (earliest), give positions, or read a stream",
            )
        return starting, "latest" if self.ending is None else self.ending

    def for_stream(self) -> Wanted:
        """Where a new query starts. A query with a checkpoint goes on from there, whatever this says.

        Raises:
            ConfigError: an end was given.
        """
        if self.ending is not None:
            raise ConfigError(
                "an end (endingOffsets, endingTimestamp) has no meaning for a stream, which does not end",
                option="endingOffsets",
                do="leave it out; to stop at what is there now, use trigger(availableNow=True)",
            )
        return "latest" if self.starting is None else self.starting


def canonical_names(options: Mapping[str, str]) -> dict[str, str]:
    """``options`` with every name as documented.

    Raises:
        ConfigError: one that is not known or not supported.
    """
    return names.canonical("tubemq", options, OPTIONS, UNSUPPORTED)


def _starting(given: Mapping[str, str]) -> Wanted | None:
    """Kafka's order: one time for all partitions counts before times for each, and those before positions."""
    option = "startingOffsetsByTimestampStrategy"
    strategy = given.get(option, "error").strip().lower()
    if strategy not in {"error", "latest"}:
        raise ConfigError(f"{option} {given[option]!r} is neither error nor latest", option=option, do=OPTIONS[option])
    times = _times(given, "startingTimestamp", "startingOffsetsByTimestamp", or_latest=strategy == "latest")
    if times is not None:
        return times
    return _parsed(given, "startingOffsets", lambda text: parse_wanted(text, "startingOffsets"))


def _ending(given: Mapping[str, str]) -> Wanted | None:
    times = _times(given, "endingTimestamp", "endingOffsetsByTimestamp", or_latest=True)
    if times is not None:
        return times
    return _parsed(given, "endingOffsets", lambda text: parse_wanted(text, "endingOffsets", earliest=False))


def _times(given: Mapping[str, str], of_all: str, of_each: str, *, or_latest: bool) -> Times | None:
    if of_all in given:
        text = given[of_all].strip()
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"{of_all} {given[of_all]!r} is no time in ms", option=of_all, do=OPTIONS[of_all])
        return Times(int(text), or_latest)
    return Times(parse_times(given[of_each], of_each), or_latest) if of_each in given else None


def _parsed(given: Mapping[str, str], option: str, parse: Callable[[str], T]) -> T | None:
    return parse(given[option]) if option in given else None


def check_masters(given: Mapping[str, str]) -> str:
    """The masters in ``tubemq.master``; ConfigError where it is not set or not a list of addresses."""
    text = given.get("tubemq.master", "")
    addresses = [address.strip() for address in text.split(",")]
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match["port"]) < 65536:
            what = f"tubemq.master {text!r}: {address!r} is not HOST:PORT" if text else "tubemq.master is not set"
            raise ConfigError(
                what, option="tubemq.master", do='set it to "HOST:PORT[,HOST:PORT...]", as 127.0.0.1:8715'
            )
    return ",".join(addresses)


def _selection(given: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]] | None]:
    if ("subscribe" in given) == ("assign" in given):
        raise ConfigError(
            "both subscribe and assign are set" if "assign" in given else "neither subscribe nor assign is set",
            option="subscribe",
            do='set one: subscribe="topic-a,topic-b" or assign=\'{"topic-a": ["<brokerId>:<partitionId>"]}\'',
        )
    if "assign" in given:
        assigned = _assigned(given["assign"])
        return tuple(assigned), assigned
    topics = tuple(dict.fromkeys(topic.strip() for topic in given["subscribe"].split(",")))
    if not all(topics):
        raise ConfigError(
            f"subscribe {given['subscribe']!r} has an empty topic", option="subscribe", do="use topic-a,topic-b"
        )
    return topics, None


def _assigned(text: str) -> dict[str, tuple[str, ...]]:
    error = ConfigError(
        f"assign {text!r} is not a JSON object of topics with lists of partitions",
        option="assign",
        do='use {"topic": ["<brokerId>:<partitionId>", ...]}; the broker may be left out where one holds the topic',
    )
    try:
        parsed = json.loads(text)
    except ValueError:
        raise error from None
    if not isinstance(parsed, dict) or not parsed:
        raise error
    assigned: dict[str, tuple[str, ...]] = {}
    for topic, partitions in parsed.items():
        if not isinstance(partitions, list) or not partitions:
            raise error
        # Kafka's connector lists bare numbers here; both forms are taken.
        given = [str(name) if isinstance(name, int) and not isinstance(name, bool) else name for name in partitions]
        if not all(isinstance(name, str) and re.fullmatch(r"(\d+:)?\d+", name, re.ASCII) for name in given):
            raise error
        assigned[topic] = tuple(dict.fromkeys(given))
    return assigned


def _positive(option: str) -> Callable[[str], int]:
    return lambda text: names.positive(option, text, OPTIONS[option])


def _boolean(option: str) -> Callable[[str], bool]:
    return lambda text: names.boolean(option, text, OPTIONS[option])
