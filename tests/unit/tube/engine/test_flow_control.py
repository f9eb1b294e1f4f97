"""Flow control rules: their syntax, the rule in force, and the messages of a consumer in its window."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.tube.engine.broker.flow_control import FlowRules, ReadWindow, parse_rules

NOON_GMT8 = 4 * 3_600_000  # 1970-01-01 12:00 in GMT+8
MB = 1 << 20


def volume(
    start: str = "00:00", end: str = "24:00", lag: int = 100, limit: int = 60, wait: int = 500
) -> dict[str, Any]:
    return {"start": start, "end": end, "dltInM": lag, "limitInM": limit, "freqInMs": wait}


def rules(*items: dict[str, Any], kind: int = 0) -> FlowRules:
    return parse_rules(json.dumps([{"type": kind, "rule": list(items)}]))


def test_blank_and_empty_texts_are_no_rules() -> None:
    assert parse_rules(" ") == parse_rules("[]") == FlowRules()


def test_the_rule_for_the_greatest_lag_exceeded_is_in_force() -> None:
    found = rules(volume(lag=100, limit=60), volume(lag=500, limit=12), volume("00:00", "06:00", lag=600, limit=1))
    assert found.limit(100 * MB, NOON_GMT8) is None
    limits = [
        found.limit(lag, at)
        for lag, at in ((100 * MB + 1, NOON_GMT8), (900 * MB, NOON_GMT8), (900 * MB, NOON_GMT8 + 13 * 3_600_000))
    ]
    assert [limit and limit.bytes_a_minute for limit in limits] == [60 * MB, 12 * MB, MB]


def test_a_window_of_five_seconds_gets_a_twelfth_of_a_minute() -> None:
    meter, found = ReadWindow(), rules(volume(limit=60))
    now = NOON_GMT8
    assert meter.wait_ms(found, 200 * MB, now) == 0
    meter.count(5 * MB - 1)
    assert meter.wait_ms(found, 200 * MB, now + 4000) == 0
    meter.count(1)
    assert meter.wait_ms(found, 200 * MB, now + 4999) == 500
    assert meter.wait_ms(found, 200 * MB, now + 5000) == 0
    # The lag is looked at once a minute.
    meter.count(5 * MB)
    assert meter.wait_ms(found, 0, now + 6000) == 500
    assert meter.wait_ms(found, 0, now + 60_000) == 0


def test_a_limit_of_nothing_stops_the_reader() -> None:
    assert ReadWindow().wait_ms(rules(volume(limit=0, wait=300)), 200 * MB, NOON_GMT8) == 300


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[1]",
        '[{"type": 4, "rule": []}]',
        '[{"type": true, "rule": []}]',
        '[{"type": 0, "rule": {}}]',
        '[{"type": 0, "rule": [1]}]',
        json.dumps([{"type": 0, "rule": [volume("10:00", "09:00")]}]),
        json.dumps([{"type": 0, "rule": [volume("25:00", "26:00")]}]),
        json.dumps([{"type": 0, "rule": [volume(lag=20)]}]),
        json.dumps([{"type": 0, "rule": [volume(limit=-1)]}]),
        json.dumps([{"type": 0, "rule": [volume(wait=199)]}]),
        json.dumps([{"type": 1, "rule": [{"zeroCnt": 0, "freqInMs": 5}]}]),
        json.dumps([{"type": 3, "rule": [{"normFreqInMs": 0, "filterFreqInMs": 9, "minDataFilterFreqInMs": 8}]}]),
        json.dumps([{"type": 3, "rule": [{}, {}]}]),
    ],
)
def test_invalid_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="flow control"):
        parse_rules(text)


def test_rules_for_clients_are_checked_and_kept_as_text_only() -> None:
    assert rules({"zeroCnt": 3, "freqInMs": 100}, kind=1) == FlowRules()
    assert rules({"normFreqInMs": 0, "filterFreqInMs": 8, "minDataFilterFreqInMs": 9}, kind=3) == FlowRules()
