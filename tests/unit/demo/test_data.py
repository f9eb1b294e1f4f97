from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta

import pytest

from penstock.demo import data
from penstock.errors import ConfigError

READINGS = data.read(data.example("water-flow.csv"))


def test_the_measurements_are_those_of_the_note() -> None:
    assert len(READINGS) == 1268
    assert sorted(READINGS) == READINGS
    steps = [after.time - before.time for before, after in itertools.pairwise(READINGS)]
    gaps = [step for step in steps if step != timedelta(hours=1)]
    assert len(gaps) == 10
    assert (min(gaps), max(gaps)) == (timedelta(hours=2), timedelta(hours=32))


def test_times_are_utc_over_the_change_to_summer_time() -> None:
    around = [reading.time for reading in READINGS if reading.time.date() == datetime(2022, 3, 27, tzinfo=UTC).date()]
    assert [time.hour for time in around] == list(range(24))


def test_the_late_event_is_of_an_hour_that_the_data_lacks() -> None:
    assert data.LATE.time not in {reading.time for reading in READINGS}
    assert READINGS[0].time < data.LATE.time < READINGS[-1].time


def test_the_limits_stand_clear_of_the_data() -> None:
    low, high, baseline = data.limits(READINGS)
    assert baseline == 102.34
    assert not [r for r in READINGS if abs(r.flow - low) < 3 or abs(r.flow - high) < 0.7]


def test_every_message_has_an_id_of_its_own() -> None:
    branch = data.Branch("main")
    messages = [*branch.messages(READINGS), branch.malformed(), branch.late()]
    assert len({message.id for message in messages}) == len(messages) == 1270
    assert json.loads(messages[0].payload) == {"branch": "main", "time": "2022-03-20T10:00:00Z", "flow": 100.59}
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(branch.malformed().payload)


def test_names_of_a_branch() -> None:
    branch = data.Branch("b")
    assert branch.topic == "water/b/flow"
    assert branch.window_key(READINGS[0].time) == "water/alarms/b/2022-03-20T10:00:00Z"


def test_window_starts_cover_the_data() -> None:
    starts = data.window_starts(READINGS, timedelta(hours=3))
    assert starts[0] == datetime(2022, 3, 20, 9, tzinfo=UTC)
    assert starts[-1] <= READINGS[-1].time < starts[-1] + timedelta(hours=3)
    assert len(starts) == 460


def test_an_example_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"examples/water/nope\.yaml"):
        data.example("nope.yaml")
