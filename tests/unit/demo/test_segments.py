from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from penstock.demo import data
from penstock.demo.data import AbnormalSegment, Alarm, expected_segments, join_alarms, parse_alarm

HOUR = timedelta(hours=1)
START = datetime(2022, 3, 24, 6, tzinfo=UTC)


def alarm(
    window: int, kind: str = "low", *, first: int = 0, last: int = 2, readings: int = 3, extreme: float = 24.0
) -> Alarm:
    """The alarm of the window of three hours with this number; ``first`` and ``last`` are hours in it."""
    start = START + 3 * window * HOUR
    return Alarm(kind, start, start + 3 * HOUR, start + first * HOUR, start + last * HOUR, readings, extreme)


def test_neighbouring_windows_are_one_segment_from_first_to_last_abnormal_reading() -> None:
    alarms = [alarm(1, extreme=20.0), alarm(0, first=2, readings=1, extreme=50.0), alarm(2, last=0, readings=1)]
    assert join_alarms(alarms) == [AbnormalSegment("low", START + 2 * HOUR, START + 6 * HOUR, 5, 20.0)]


def test_a_window_between_or_another_kind_separates() -> None:
    assert len(join_alarms([alarm(0), alarm(2)])) == 2
    assert [s.kind for s in join_alarms([alarm(0), alarm(1, "high", extreme=120.0), alarm(2)])] == [
        "low",
        "high",
        "low",
    ]


def test_no_alarms_no_segments() -> None:
    assert join_alarms([]) == []


def test_an_alarm_is_read_as_the_pipeline_writes_it() -> None:
    value = {
        "window_start": "2022-03-24T06:00:00.000Z",
        "window_end": "2022-03-24T09:00:00.000Z",
        "branch": "main",
        "readings": 3,
        "flow_min": 51.53,
        "flow_max": 100.1,
        "low": 1,
        "high": 0,
        "abnormal_from": "2022-03-24T08:00:00.000Z",
        "abnormal_to": "2022-03-24T08:00:00.000Z",
        "kind": "low",
    }
    found = parse_alarm(json.dumps(value).encode())
    assert found == alarm(0, first=2, last=2, readings=1, extreme=51.53)
    assert str(found) == "low  flow 51.53 l/s in 2022-03-24 06:00-09:00 UTC"


@pytest.mark.parametrize("value", [b"", b"{}", b"nope"])
def test_an_invalid_alarm_is_an_error(value: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_alarm(value)


def test_the_data_has_three_low_segments_and_one_peak() -> None:
    readings = data.read(data.example("water-flow.csv"))
    found = [segment.to_json() for segment in expected_segments(readings, data.limits(readings), 3 * HOUR)]
    assert found == [
        {
            "kind": "low",
            "start": "2022-03-24T08:00:00Z",
            "end": "2022-03-24T22:00:00Z",
            "readings": 15,
            "flow_min": 24.26,
        },
        {
            "kind": "low",
            "start": "2022-03-29T07:00:00Z",
            "end": "2022-03-29T16:00:00Z",
            "readings": 10,
            "flow_min": 24.25,
        },
        {
            "kind": "high",
            "start": "2022-04-03T04:00:00Z",
            "end": "2022-04-03T04:00:00Z",
            "readings": 1,
            "flow_max": 109.68,
        },
        {
            "kind": "low",
            "start": "2022-04-27T14:00:00Z",
            "end": "2022-04-28T02:00:00Z",
            "readings": 13,
            "flow_min": 24.24,
        },
    ]
