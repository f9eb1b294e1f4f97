"""Places in a log as people write them: where to read from and up to, where to move a group, which partitions.

One grammar for all commands: ``earliest``, ``latest``, a time or how long ago, ``+N`` or ``-N`` messages, an offset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from penstock.cli.tube_common import UNKNOWN_USER
from penstock.errors import ConfigError, RefusedError

if TYPE_CHECKING:
    from penstock.tube.reader import RangeReader

__all__ = ["ENTRY", "MOST", "WHERE", "Counted", "Log", "Part", "Where", "counting", "parse_part", "parse_where", "pick"]

ENTRY = 28
"""Offsets are bytes of a store's index, so many a message; the partitions of a store share it."""
MOST = (1 << 31) - 1
WHERE = "earliest, latest, a time (2026-01-31T12:00, or 90s, 15m, 2h, 3d ago), +N or -N messages, an offset"

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d{1,12})([smhd])", re.ASCII)
_SHIFT = re.compile(r"[+-]\d{1,18}", re.ASCII)
_OFFSET = re.compile(r"\d{1,19}", re.ASCII)
_PART = re.compile(r"(?:(\d{1,10}):)?(\d{1,10})", re.ASCII)


class Log(NamedTuple):
    """What one partition holds now, of the half-open range of its store; ``source`` answers questions about it."""

    source: RangeReader
    broker_id: int
    topic: str
    partition: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Where:
    """A place in every log. Exactly one of the fields is set; :func:`parse_where` makes it."""

    option: str
    text: str
    word: str | None = None
    time_ms: int | None = None
    shift: int | None = None
    exact: int | None = None

    def offset(self, log: Log, here: int | None = None) -> int:
        """The offset that is meant in ``log``. Messages are counted from ``here``; else from the log's first or end.

        Raises:
            ConfigError: an offset that the log does not have; a time, and the broker keeps none.
            PenstockError: the broker does not answer, or refuses.
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
                f"{self.option}: partition {log.broker_id}:{log.partition} of {log.topic} has no offset {self.exact}",
                option=self.option,
                why=f"it holds {log.first} to {log.end}",
                do="choose the partition that is meant with --partition",
            )
        return self.exact

    def _at_time(self, log: Log, time_ms: int) -> int:
        try:
            return log.source.offset_at(log.topic, log.partition, time_ms)
        except RefusedError as error:
            if error.code == UNKNOWN_USER:
                raise
            raise ConfigError(
                f"{self.option}: broker {log.broker_id} does not find offsets by time",
                option=self.option,
                why=error.why or error.text,
                do="on Apache's broker use its own: broker.htm?method=admin_set_offset_by_time",
            ) from error


def parse_where(text: str, option: str) -> Where:
    """What ``text`` says, the value of ``option``. Times are local unless they say otherwise. Raises ConfigError."""
    if text in {"earliest", "latest"}:
        return Where(option, text, word=text)
    if _SHIFT.fullmatch(text):
        return Where(option, text, shift=int(text))
    if _OFFSET.fullmatch(text):
        offset = int(text)
        if offset % ENTRY:
            raise ConfigError(
                f"{option}: {offset} is no offset",
                option=option,
                why=f"offsets count {ENTRY} a message",
                do=f"write a multiple of {ENTRY}; for a number of messages +N or -N",
            )
        return Where(option, text, exact=offset)
    try:
        if ago := _AGO.fullmatch(text):
            found = datetime.now().astimezone() - timedelta(seconds=int(ago[1]) * _UNITS_S[ago[2]])
        else:
            found = datetime.fromisoformat(text)
        return Where(option, text, time_ms=int(found.timestamp() * 1000))
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}: got {text!r}", option=option, do=f"write one of: {WHERE}") from None


class Part(NamedTuple):
    """Partitions by number: of one broker, or (None) of each."""

    broker_id: int | None
    partition: int

    def __str__(self) -> str:
        return str(self.partition) if self.broker_id is None else f"{self.broker_id}:{self.partition}"

    def means(self, broker_id: int, partition: int) -> bool:
        return partition == self.partition and self.broker_id in {None, broker_id}


def parse_part(text: str, option: str = "--partition") -> Part:
    """What ``[BROKER:]N`` means. Raises ConfigError."""
    match = _PART.fullmatch(text)
    if match is None:
        do = "write a partition, 0, or with its broker, 1:0, as consume shows it"
        raise ConfigError(f"{option}: got {text!r}", option=option, do=do)
    return Part(None if match[1] is None else int(match[1]), int(match[2]))


def pick(parts: Iterable[Part], topic: str, places: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of ``places`` (broker id, partition) that ``parts`` mean; without parts all.

    Raises:
        RefusedError: one means none.
    """
    there, chosen = sorted(places), set[tuple[int, int]]()
    for part in parts:
        meant = {place for place in there if part.means(*place)}
        if not meant:
            names = ", ".join(f"{broker}:{number}" for broker, number in there)
            raise RefusedError(f"topic {topic!r} has no partition {part}", why=f"it has {names}")
        chosen |= meant
    return chosen or set(there)


Counted = Callable[[int, int, int], tuple[int, int]]
"""(start, end, most) to (end of the longest range with at most so many messages, how many it has)."""


def counting(log: Log) -> Counted:
    """Counts a partition's own messages; of a broker that cannot, those of the store."""

    def count(start: int, end: int, most: int) -> tuple[int, int]:
        if start >= end:
            return end, 0
        try:
            return log.source.plan(log.topic, log.partition, start, end, most)
        except RefusedError as error:
            if error.code == UNKNOWN_USER:
                raise
            there = min((end - start) // ENTRY, most)
            return start + there * ENTRY, there

    return count


def _shifted(log: Log, here: int, by: int) -> int:
    """The offset ``by`` messages from ``here``, within what is kept."""
    count = counting(log)
    if by > 0:
        return count(here, log.end, by)[0]
    before = count(log.first, here, MOST)[1]
    return log.first if -by >= before else count(log.first, here, before + by)[0]
