"""Flow control rules of the protocol: the amount that a consumer may read per minute.

The rules are a JSON text, an array of ``{"type": t, "rule": [...]}``. A broker enforces type 0 of the cluster's rules:
a volume by lag and time of day (GMT+8). The other types are evaluated by clients, which get the text unchanged.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from penstock.errors import ConfigError

__all__ = ["FlowRules", "Limit", "ReadWindow", "parse_rules"]

_TIME = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)", re.ASCII)
_GMT8_MS = 8 * 3_600_000
_DAY_MINUTES = 24 * 60
_EVALUATE_MS = 60_000
_WINDOW_MS = 5000
_WINDOWS = 12
_MAX_TYPE = 3
_MAX_FREQUENCY_MS = 300_000
_LEAST_LAG_MB = 20
_LEAST_FREQUENCY_MS = 200


class Limit(NamedTuple):
    """A volume per minute for consumers that lag more than ``lag_bytes``, within a part of the day."""

    start: int
    end: int
    lag_bytes: int
    bytes_a_minute: int
    wait_ms: int


class FlowRules(NamedTuple):
    """The type 0 rules of a text."""

    limits: tuple[Limit, ...] = ()

    def limit(self, behind_bytes: int, now_ms: int) -> Limit | None:
        """Return the applicable rule: of the rules for this time of day, the one with the greatest exceeded lag."""
        minute = (now_ms + _GMT8_MS) // 60_000 % _DAY_MINUTES
        found = None
        for limit in self.limits:
            fits = limit.start <= minute < limit.end and behind_bytes > limit.lag_bytes
            if fits and (found is None or limit.lag_bytes > found.lag_bytes):
                found = limit
        return found


class ReadWindow:
    """Bytes that one registration read in the current window of five seconds."""

    __slots__ = ("_bytes", "_evaluated_at", "_limit", "_window_at")

    def __init__(self) -> None:
        self._limit: Limit | None = None
        self._evaluated_at = 0
        self._window_at = 0
        self._bytes = 0

    def wait_ms(self, rules: FlowRules, behind_bytes: int, now_ms: int) -> int:
        """Return the time in ms that the consumer must wait before its next get; 0: none."""
        if now_ms - self._evaluated_at >= _EVALUATE_MS:
            self._evaluated_at = now_ms
            self._limit = rules.limit(behind_bytes, now_ms)
        if now_ms - self._window_at >= _WINDOW_MS:
            self._window_at = now_ms
            self._bytes = 0
        limit = self._limit
        if limit is None or (self._bytes < max(limit.bytes_a_minute // _WINDOWS, 1) and limit.bytes_a_minute):
            return 0
        return limit.wait_ms

    def count(self, size: int) -> None:
        """Count ``size`` bytes that were sent."""
        self._bytes += size


def parse_rules(text: str) -> FlowRules:
    """Parse rules; a blank text has none.

    Raises:
        ConfigError: not JSON, or a rule is out of the limits of its type.
    """
    if not text.strip():
        return FlowRules()
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tube: flow control rules are not JSON: {error}", hint="see the reference page") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("tube: flow control rules are not a list of objects", hint="see the reference page")
    limits: list[Limit] = []
    for row in rows:
        kind, items = row.get("type"), row.get("rule", [])
        if kind not in range(_MAX_TYPE + 1) or isinstance(kind, bool) or not isinstance(items, list):
            raise ConfigError(f"tube: flow control type {kind!r}: expected 0 to {_MAX_TYPE} with a list of rules")
        for item in items:
            if not isinstance(item, dict):
                raise ConfigError(f"tube: flow control rule {item!r} is not an object")
            if kind == 0:
                limits.append(_limit(item))
            elif kind == 1:
                _number(item, "zeroCnt", 1)
                _number(item, "freqInMs", 0)
            elif kind == _MAX_TYPE:
                _frequencies(item, len(items))
    return FlowRules(tuple(sorted(limits)))


def _limit(item: dict[str, Any]) -> Limit:
    start, end = _minute(item, "start"), _minute(item, "end")
    if start >= end:
        raise ConfigError(
            f"tube: flow control rule from {item['start']} to {item['end']}: the start must be before the end"
        )
    lag = _number(item, "dltInM", _LEAST_LAG_MB + 1)
    volume = _number(item, "limitInM", 0)
    return Limit(start, end, lag << 20, volume << 20, _number(item, "freqInMs", _LEAST_FREQUENCY_MS))


def _frequencies(item: dict[str, Any], count: int) -> None:
    if count > 1:
        raise ConfigError("tube: flow control type 3 has at most one rule")
    values = [_number(item, key, 0) for key in ("normFreqInMs", "filterFreqInMs", "minDataFilterFreqInMs")]
    if max(values) > _MAX_FREQUENCY_MS or values[2] < values[1]:
        raise ConfigError(
            f"tube: flow control frequencies {values}: expected 0 to {_MAX_FREQUENCY_MS} ms,"
            " and minDataFilterFreqInMs not below filterFreqInMs"
        )


def _minute(item: dict[str, Any], key: str) -> int:
    match = _TIME.fullmatch(str(item.get(key, "")))
    if match is None:
        raise ConfigError(f"tube: flow control {key} {item.get(key)!r}: expected HH:mm from 00:00 to 24:00")
    return min(int(match[1]) * 60 + int(match[2]), _DAY_MINUTES)


def _number(item: dict[str, Any], key: str, least: int) -> int:
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"tube: flow control {key} {value!r}: expected a number of at least {least}")
    return value
