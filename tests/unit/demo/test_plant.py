"""The model of the plant, without a node."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from penstock.demo.plant import (
    FAULTS,
    Machine,
    Plant,
    PlantMessage,
    faults_in_turn,
    parse_faults,
    parse_limits,
    parse_setpoint,
)

START = datetime(2026, 1, 5, 8, tzinfo=UTC)


def run(plant: Plant, machine: Machine, first: int, last: int) -> list[PlantMessage]:
    """What the machine sends from second ``first`` to ``last``, with a reading in each."""
    return [message for second in range(first, last + 1) for message in plant.messages(machine, float(second))]


def with_fault(fault: str) -> tuple[Plant, Machine]:
    plant = Plant(1, START)
    machine = plant.faulty[fault]
    run(plant, machine, 1, 10)
    plant.switch(frozenset([fault]), 10.0)
    return plant, machine


def test_a_seed_determines_all_messages() -> None:
    def everything(seed: int) -> list[PlantMessage]:
        plant = Plant(seed, START)
        found = []
        for second in range(1, 150, 5):
            plant.switch(faults_in_turn(second), second)
            found += [message for machine in plant.machines for message in plant.messages(machine, float(second))]
        return found

    first = everything(7)
    assert first == everything(7)
    assert first != everything(8)


def test_readings_are_believable() -> None:
    plant = Plant(3, START)
    states: Counter[str] = Counter()
    for machine in plant.machines:
        readings = [json.loads(message.payload) for message in run(plant, machine, 1, 600)]
        assert {message["machine"] for message in readings} == {machine.name}
        assert [datetime.fromisoformat(each["time"]) for each in readings[:2]] == [
            START + timedelta(seconds=1), START + timedelta(seconds=2),
        ]  # fmt: skip
        running = [each for each in readings if each["state"] == "running"]
        assert all(abs(each["vibration"] / machine.usual.vibration - 1) < 0.5 for each in running)
        assert all(abs(each["pressure"] / machine.usual.pressure - 1) < 0.2 for each in running)
        assert all(0.75 < each["temperature"] / machine.setpoint < 1.05 for each in readings)
        counts = [each["good"] + each["scrap"] for each in readings]
        assert counts == sorted(counts)
        assert counts[-1] == pytest.approx(len(running) / 2, abs=10)
        assert machine.alarm is None
        states.update(each["state"] for each in readings)
    assert 0.02 < states["idle"] / states.total() < 0.4


def test_every_fault_has_a_machine_of_its_own() -> None:
    assert len({machine.path for machine in Plant(0, START).faulty.values()}) == len(FAULTS)


def test_a_drifting_sensor_raises_an_alarm_which_ends_with_the_fault() -> None:
    plant, machine = with_fault("drift")
    values = [json.loads(message.payload)["temperature"] for message in run(plant, machine, 11, 25)]
    assert values[-1] - values[0] == pytest.approx(28, abs=3)
    assert machine.alarm == "temperature"
    plant.switch(frozenset(), 25.0)
    run(plant, machine, 26, 26)
    assert machine.alarm is None


def test_a_higher_set_point_raises_an_alarm_and_a_higher_limit_ends_it() -> None:
    plant = Plant(1, START)
    machine = plant.machines[0]
    machine.setpoint += 40
    run(plant, machine, 1, 60)
    assert machine.alarm == "temperature"
    machine.limits = {"temperature": 500.0}
    run(plant, machine, 61, 61)
    assert machine.alarm is None


def test_a_stuck_sensor_repeats_a_value_and_the_others_change() -> None:
    plant, machine = with_fault("stuck")
    readings = [json.loads(message.payload) for message in run(plant, machine, 11, 20)]
    assert len({each["temperature"] for each in readings}) == 1
    assert len({each["vibration"] for each in readings}) > 1
    plant.switch(frozenset(), 20.0)
    after = [json.loads(message.payload) for message in run(plant, machine, 21, 25)]
    assert len({each["temperature"] for each in after}) > 1


def test_a_dead_machine_sends_nothing() -> None:
    plant, machine = with_fault("dead")
    assert run(plant, machine, 11, 20) == []
    plant.switch(frozenset(), 20.0)
    assert len(run(plant, machine, 21, 25)) == 5


def test_a_burst_has_readings_of_the_time_between() -> None:
    plant, machine = with_fault("burst")
    found = run(plant, machine, 11, 12)
    assert len({message.id for message in found}) == 40
    times = [datetime.fromisoformat(json.loads(message.payload)["time"]) for message in found]
    assert times == sorted(set(times))
    assert (times[0], times[-1]) == (START + timedelta(seconds=10.05), START + timedelta(seconds=12))


def test_late_readings_come_ten_seconds_after_they_were_taken() -> None:
    plant, machine = with_fault("late")
    assert run(plant, machine, 11, 20) == []
    plant.switch(frozenset(), 20.0)
    found = run(plant, machine, 21, 21)
    assert [json.loads(message.payload)["time"] for message in found] == [
        "2026-01-05T08:00:11.000Z", "2026-01-05T08:00:21.000Z",
    ]  # fmt: skip


def test_duplicates_have_the_same_id() -> None:
    plant, machine = with_fault("duplicate")
    assert set(Counter(run(plant, machine, 11, 20)).values()) == {2}


def test_every_second_payload_is_broken_in_one_of_three_ways() -> None:
    plant, machine = with_fault("broken")
    seen: Counter[str] = Counter()
    for message in run(plant, machine, 11, 22):
        try:
            seen["valid" if isinstance(json.loads(message.payload)["temperature"], float) else "wrong type"] += 1
        except ValueError as error:
            seen[type(error).__name__] += 1
    assert seen == {"valid": 6, "wrong type": 2, "JSONDecodeError": 2, "UnicodeDecodeError": 2}


def test_each_fault_has_its_turn() -> None:
    assert faults_in_turn(4.9) == frozenset()
    turns = [faults_in_turn(20.0 * turn + 10) for turn in range(8)]
    assert turns == [frozenset([name]) for name in [*FAULTS, "drift"]]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("turns", None),
        ("none", frozenset()),
        ("", frozenset()),
        ("drift", frozenset(["drift"])),
        ("drift, stuck dead", frozenset(["drift", "stuck", "dead"])),
        ("all", frozenset(FAULTS)),
    ],
)
def test_names_of_faults(text: str, faults: frozenset[str] | None) -> None:
    assert parse_faults(text) == faults


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"fire: expected drift, stuck, dead, .* all, none or turns"):
        parse_faults("drift fire")


def test_values_of_operators() -> None:
    assert parse_setpoint(b"61.5") == 61.5
    assert parse_limits(b'{"temperature": 90, "flow": 1.5}') == {"temperature": 90, "flow": 1.5}


@pytest.mark.parametrize("value", [b"warm", b"nan", b"inf", b""])
def test_an_invalid_set_point_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"number|float"):
        parse_setpoint(value)


@pytest.mark.parametrize("value", [b"90", b"{", b'{"speed": 1}', b'{"flow": "1"}', b'{"flow": true}', b"\xff"])
def test_invalid_limits_are_refused(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the texts differ
        parse_limits(value)
