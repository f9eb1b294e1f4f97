"""Places in a log as people write them."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from penstock.cli.tube.offset_spec import LogRange, PartitionSpec, counter, parse_offset, parse_part, pick
from penstock.errors import ConfigError, RefusedError

OWN = [28, 84, 140]
"""Offsets of the partition's messages; its store holds 28 to 196."""


class Source:
    """A broker of ours, or one that counts nothing and keeps no times."""

    def __init__(self, refusal: int | None = None) -> None:
        self.refusal = refusal

    def _ask(self) -> None:
        if self.refusal is not None:
            raise RefusedError(
                "tube: broker does not support exact ranges", code=self.refusal, why="it is not a penstock broker"
            )

    def plan(self, topic: str, partition: int, start: int, end: int, most: int) -> tuple[int, int]:
        self._ask()
        own = [offset for offset in OWN if start <= offset < end]
        return (end, len(own)) if len(own) <= most else (own[most], most)

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        self._ask()
        return 84


def log(refusal: int | None = None) -> LogRange:
    source: Any = Source(refusal)
    return LogRange(source, 1, "water", 0, 28, 196)


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("earliest", 28), ("latest", 196), ("84", 84), ("28", 28), ("196", 196),
        ("-1", 140), ("-2", 84), ("-99", 28), ("+1", 84), ("+3", 196), ("+0", 28),
        ("2h", 84), ("2026-01-31T12:00Z", 84), ("2026-01-31", 84),
    ],
)  # fmt: skip
def test_a_place_in_a_log(text: str, offset: int) -> None:
    assert parse_offset(text, "--from").offset(log()) == offset


def test_messages_are_counted_from_the_offset_of_the_group() -> None:
    assert parse_offset("+1", "--to").offset(log(), 84) == 140
    assert parse_offset("-1", "--to").offset(log(), 84) == 28


@pytest.mark.parametrize("text", ["0", "224"])
def test_an_offset_that_the_log_does_not_have(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--to: offset {text}") as caught:
        parse_offset(text, "--to").offset(log())
    assert caught.value.why == "it stores 28 to 196"


def test_messages_of_the_store_are_counted_for_apaches_broker() -> None:
    assert parse_offset("-2", "--to").offset(log(411)) == 140
    assert counter(log(411))(28, 196, 3) == (112, 3)
    with pytest.raises(ConfigError, match="broker 1 does not support offsets by time"):
        parse_offset("2h", "--to").offset(log(411))


@pytest.mark.parametrize("text", ["-1", "2h"])
def test_refused_credentials_are_an_error(text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_offset(text, "--to").offset(log(415))
    assert caught.value.code == 415


def test_times() -> None:
    assert parse_offset("2026-01-31T12:00:00Z", "--from").time_ms == 1_769_860_800_000
    noon = int(datetime(2026, 1, 31, 12).astimezone().timestamp() * 1000)
    assert parse_offset("2026-01-31T12:00", "--from").time_ms == noon
    before = time.time_ns() // 1_000_000
    an_hour_ago = parse_offset("1h", "--from").time_ms
    after = time.time_ns() // 1_000_000
    assert an_hour_ago is not None
    assert before - 1 <= an_hour_ago + 3_600_000 <= after  # floats may take a millisecond off


@pytest.mark.parametrize("text", ["", "x", "5w", "h", "999999999999d", "1.5h", "+", "Latest", "\u0661"])
def test_invalid_offsets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--from: got") as caught:
        parse_offset(text, "--from")
    assert "earliest, latest, a time" in (caught.value.hint or "")


def test_offsets_are_multiples() -> None:
    with pytest.raises(ConfigError, match="--from: 10 is not an offset") as caught:
        parse_offset("10", "--from")
    assert caught.value.hint == "write a multiple of 28; for a number of messages write +N or -N"


def test_partitions() -> None:
    assert parse_part("3") == PartitionSpec(None, 3)
    assert parse_part("2:10001") == PartitionSpec(2, 10001)
    for wrong in ("", ":1", "1:", "a", "-1", "1:2:3"):
        with pytest.raises(ConfigError, match="--partition: got"):
            parse_part(wrong)
    there = [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert pick([], "water", there) == set(there)
    assert pick([PartitionSpec(None, 1)], "water", there) == {(1, 1), (2, 1)}
    assert pick([PartitionSpec(2, 0), PartitionSpec(1, 1)], "water", there) == {(2, 0), (1, 1)}
    with pytest.raises(RefusedError, match="topic 'water' has no partition 3:0") as caught:
        pick([PartitionSpec(1, 0), PartitionSpec(3, 0)], "water", there)
    assert caught.value.why == "it has 1:0, 1:1, 2:0, 2:1"
