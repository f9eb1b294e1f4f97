"""Parse offsets and partitions on the command line: one grammar for all commands of `penstock tube`.

An offset is ``earliest``, ``latest``, a time, a duration before now, ``+N`` or ``-N`` messages, or an index offset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from penstock.cli.tube.access import (
    UNKNOWN_USER,
)
from penstock.errors import ConfigError, RefusedError
from penstock.runtime.config.values import duration_ms

if TYPE_CHECKING:
    from penstock.tube.reader import RangeReader

__all__ = [
    "ENTRY",
    "MOST",
    "OFFSETS",
    "LogRange",
    "OffsetSpec",
    "PartitionSpec",
    "counter",
    "parse_offset",
    "parse_part",
    "pick",
]

ENTRY = 28
"""Bytes of an index entry: offsets of TubeMQ count bytes of a store's index, which its partitions share."""
MOST = (1 << 31) - 1
"""Largest number of messages that a broker can count: int32 on the wire."""
OFFSETS = (
    "earliest, latest, a time (2026-01-31T12:00 is local, 2026-01-31T12:00Z is UTC), a duration before now (15m, 2h, "
    "3d), +N or -N messages, an offset"
)

_AGO = re.compile(r"\d{1,12}(ms|s|m|h|d)", re.ASCII)
_SHIFT = re.compile(r"[+-]\d{1,18}", re.ASCII)
_OFFSET = re.compile(r"\d{1,19}", re.ASCII)
_PART = re.compile(r"(?:(\d{1,10}):)?(\d{1,10})", re.ASCII)


class LogRange(NamedTuple):
    """The stored offsets of one partition, ``first`` <= offset < ``end``; ``source`` reads from its broker."""

    source: RangeReader
    broker_id: int
    topic: str
    partition: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class OffsetSpec:
    """An offset specified by the user. :func:`parse_offset` sets exactly one of the last four fields."""

    option: str
    text: str
    word: str | None = None
    time_ms: int | None = None
    shift: int | None = None
    exact: int | None = None

    def offset(self, log: LogRange, here: int | None = None) -> int:
        """Return the offset in ``log``. Messages are counted from ``here``; by default from the first offset, or the
        end.

        Raises:
            ConfigError: the offset is not stored; or it is a time, which the broker does not support.
            PenstockError: the broker does not respond, or refuses.
        """
        if self.word is not None:
            return log.first if self.word == "earliest" else log.end
        if self.shift is not None:
            start = here if here is not None else log.first if self.shift >= 0 else log.end
            return _shifted(log, start, self.shift)
        if self.time_ms is not None:
            return self._at_time(log, self.time_ms)
        assert self.exact is not None
        if not log.first <= self.exact <= log.end:
            raise ConfigError(
                f"{self.option}: offset {self.exact} is not stored in partition {log.broker_id}:{log.partition} of "
                f"{log.topic}",
                option=self.option,
                why=f"it stores {log.first} to {log.end}",
                hint="choose an offset in this range, or only the partition that has it: --partition",
            )
        return self.exact

    def _at_time(self, log: LogRange, time_ms: int) -> int:
        try:
            return log.source.offset_at(log.topic, log.partition, time_ms)
        except RefusedError as error:
            if error.code == UNKNOWN_USER:
                raise
            raise ConfigError(
                f"{self.option}: broker {log.broker_id} does not support offsets by time",
                option=self.option,
                why=error.why or error.text,
                hint="with Apache's broker use its own method: broker.htm?method=admin_set_offset_by_time",
            ) from error


def parse_offset(text: str, option: str) -> OffsetSpec:
    """Parse ``text``, the value of ``option``. Times without a zone are local. Raises ConfigError."""
    if text in {"earliest", "latest"}:
        return OffsetSpec(option, text, word=text)
    if _SHIFT.fullmatch(text):
        return OffsetSpec(option, text, shift=int(text))
    if _OFFSET.fullmatch(text):
        offset = int(text)
        if offset % ENTRY:
            raise ConfigError(
                f"{option}: {offset} is not an offset",
                option=option,
                why=f"an offset is a multiple of {ENTRY}: each message takes {ENTRY} bytes of the index",
                hint=f"write a multiple of {ENTRY}; for a number of messages write +N or -N",
            )
        return OffsetSpec(option, text, exact=offset)
    try:
        if _AGO.fullmatch(text):
            found = datetime.now().astimezone() - timedelta(milliseconds=duration_ms(text, unit="s"))
        else:
            found = datetime.fromisoformat(text)
        return OffsetSpec(option, text, time_ms=int(found.timestamp() * 1000))
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}: got {text!r}", option=option, hint=f"write one of: {OFFSETS}") from None


class PartitionSpec(NamedTuple):
    """A partition number, of one broker or (None) of each."""

    broker_id: int | None
    partition: int

    def __str__(self) -> str:
        return str(self.partition) if self.broker_id is None else f"{self.broker_id}:{self.partition}"

    def matches(self, broker_id: int, partition: int) -> bool:
        """Return True if this is ``partition`` of the broker ``broker_id``."""
        return partition == self.partition and self.broker_id in {None, broker_id}


def parse_part(text: str) -> PartitionSpec:
    """Parse ``[BROKER:]N``. Raises ConfigError."""
    match = _PART.fullmatch(text)
    if match is None:
        hint = "write a partition such as 0, or with its broker 1:0"
        raise ConfigError(f"--partition: got {text!r}", option="--partition", hint=hint)
    return PartitionSpec(None if match[1] is None else int(match[1]), int(match[2]))


def pick(parts: Iterable[PartitionSpec], topic: str, places: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the ``places`` (broker id, partition) that match ``parts``; all of them without parts.

    Raises:
        RefusedError: a part matches none.
    """
    there, chosen = sorted(places), set[tuple[int, int]]()
    for part in parts:
        meant = {place for place in there if part.matches(*place)}
        if not meant:
            names = ", ".join(f"{broker}:{number}" for broker, number in there)
            raise RefusedError(
                f"topic {topic!r} has no partition {part}", why=f"it has {names}", hint="choose one of these"
            )
        chosen |= meant
    return chosen or set(there)


Counter = Callable[[int, int, int], tuple[int, int]]
"""(start, end, most) → (end of the longest range with at most ``most`` messages, number of its messages)."""


def counter(log: LogRange) -> Counter:
    """Return a function that counts messages of a partition, or of its store if the broker cannot count a partition."""

    def count(start: int, end: int, most: int) -> tuple[int, int]:
        if start >= end:
            return end, 0
        try:
            return log.source.plan(log.topic, log.partition, start, end, most)
        except RefusedError as error:
            if error.code == UNKNOWN_USER:
                raise
            # Apache's broker cannot count a partition: each message of its store has one entry.
            there = min((end - start) // ENTRY, most)
            return start + there * ENTRY, there

    return count


def _shifted(log: LogRange, here: int, by: int) -> int:
    """Return the offset ``by`` messages from ``here``, limited to the stored offsets."""
    count = counter(log)
    if by > 0:
        return count(here, log.end, by)[0]
    # A broker counts forward only: count all messages before ``here``, then find the end of the first ones.
    before = count(log.first, here, MOST)[1]
    return log.first if -by >= before else count(log.first, here, before + by)[0]
