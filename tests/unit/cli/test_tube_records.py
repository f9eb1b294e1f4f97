"""`penstock tube consume`: arguments to calls, records to lines. Servers and clients are stand-ins."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any, ClassVar, Self

import pytest

from penstock.cli import tube_records
from penstock.cli.tube_records import parse_time
from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.tube import consumer, reader
from penstock.tube.reader import Batch, PartitionInfo
from penstock.tube.record import Record
from tests.unit.cli.conftest import Command


class Reader:
    """Two partitions whose records arrived in turn."""

    data: ClassVar = {0: [(0, 10, b"a"), (56, 30, b"c\x1b")], 1: [(28, 20, b"\xff")]}

    def __init__(self, host: str, port: int, **_: object) -> None:
        assert (host, port) == ("127.0.0.1", 8123)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        assert topic == "water"
        return 0, 84

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        assert (topic, partition) in {("water", 0), ("water", 1)}
        return 0

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        assert (start, end) == (0, 84)
        for offset, time_ms, value in self.data[partition]:
            data, flag, _ = Record(value, b"k", [("h", "1")], id="i").encode()
            yield Batch.of([offset], [time_ms], [flag], [data])


@pytest.fixture
def _reader(_master: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RangeReader", Reader)


@pytest.mark.usefixtures("_reader")
def test_consume_prints_what_the_log_holds_in_the_order_of_arrival(penstock: Command) -> None:
    done = penstock("tube", "consume", "water")
    assert done == (0, "1:0  k  a\n1:1  k  \\xff\n1:0  k  c\\x1b\n", "")
    assert penstock("tube", "consume", "water", "--count", "1").out == "1:0  k  a\n"
    assert penstock("tube", "consume", "water", "--from", "latest").out == ""
    assert penstock("tube", "consume", "water", "--from", "90s").out == done.out
    assert penstock("tube", "consume", "water", "--filter", "none").out == ""
    raw = penstock("tube", "consume", "water", "--raw", "--format", "length", "--count", "1").out
    assert raw == "\x00\x00\x00\x01a"


@pytest.mark.usefixtures("_reader")
def test_a_broker_that_is_away_is_left_out_and_told(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [PartitionInfo(broker, "127.0.0.1", 8123, n) for broker in (1, 2) for n in (0, 1)]
    monkeypatch.setattr(reader, "partitions", lambda *_, **__: infos)
    asked: list[int] = []

    def bounds(self: Reader, topic: str, partition: int) -> tuple[int, int]:
        asked.append(partition)
        if len(asked) <= dead:
            raise UnavailableError("tube: no connection", why="Connection refused")
        return 0, 84

    monkeypatch.setattr(Reader, "bounds", bounds)
    dead = 1  # the first that is asked is broker 1; its second partition is not tried
    done = penstock("tube", "consume", "water")
    assert (done.status, done.out) == (1, "2:0  k  a\n2:1  k  \\xff\n2:0  k  c\\x1b\n")
    assert done.err == (
        "broker 1 at 127.0.0.1:8123 does not answer (Connection refused): partitions 0, 1 of water left out\n"
    )
    asked.clear()
    dead = 99
    done = penstock("tube", "consume", "water")
    assert (done.status, done.out) == (1, "")
    assert "no connection" in done.err


def test_times() -> None:
    assert parse_time("2026-01-31T12:00:00Z", "--from") == 1_769_860_800_000
    assert parse_time("2026-01-31", "--from") == int(datetime(2026, 1, 31).astimezone().timestamp() * 1000)
    before = time.time_ns() // 1_000_000
    an_hour_ago = parse_time("1h", "--from")
    after = time.time_ns() // 1_000_000
    assert before - 1 <= an_hour_ago + 3_600_000 <= after  # floats may take a millisecond off
    for wrong in ("", "x", "5w", "h", "99999999999d"):
        with pytest.raises(ConfigError, match="no time"):
            parse_time(wrong, "--from")


@pytest.mark.usefixtures("_reader")
def test_consume_in_json(penstock: Command) -> None:
    rows = [json.loads(line) for line in penstock("tube", "consume", "water", "--json").out.splitlines()]
    assert rows[1] == {
        "topic": "water",
        "broker_id": 1,
        "partition": 1,
        "offset": 28,
        "append_time_ms": 20,
        "key": "k",
        "value": None,
        "value_base64": "/w==",
        "headers": [["h", "1"]],
        "mqtt_topic": None,
        "content_type": None,
        "event_time_ms": None,
        "id": "i",
        "msg_type": None,
    }


@pytest.mark.usefixtures("_consumer")
def test_a_group_reads_what_no_broker_takes_records_for(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is closed for producers, or whose broker has no space left."""
    monkeypatch.setattr(reader, "partitions", lambda *_, **__: [])
    done = penstock("tube", "consume", "water", "--group", "lake", "--count", "1", "--raw")
    assert (done.status, done.out != "") == (0, True)


@pytest.mark.usefixtures("_reader", "_consumer")
@pytest.mark.parametrize("how", [[], ["--follow"], ["--group", "lake"]])
def test_a_topic_that_nobody_serves_is_status_1(penstock: Command, how: list[str]) -> None:
    done = penstock("tube", "consume", "nope", *how)
    assert (done.status, done.out) == (1, "")
    assert "the master announces no topic 'nope'" in done.err
    assert "penstock tube topics create" in done.err


@pytest.mark.parametrize("args", [["produce", "water", "v"], ["consume", "water"], ["consume", "water", "--follow"]])
def test_where_no_master_answers_the_remedy_names_the_option(
    monkeypatch: pytest.MonkeyPatch, penstock: Command, args: list[str]
) -> None:
    def partitions(masters: str, topic: str, **_: object) -> list[PartitionInfo]:
        raise UnavailableError(f"tube: no connection to {masters}", why="refused")

    monkeypatch.setattr(reader, "partitions", partitions)
    done = penstock("tube", *args, "--tube-master", "edge:1")
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        "penstock: tube: no connection to edge:1\n  why: refused\n"
        "  do:  start a node (penstock up), or name its TubeMQ master: --tube-master HOST:PORT\n"
    )


class Message:
    topic, broker_id, partition = "water", 1, 10_000
    offset = append_time_ms = None

    def __init__(self, value: bytes) -> None:
        self.record = Record(value)


class Consumer:
    made: ClassVar[list[tuple[Any, ...]]]
    confirmed: ClassVar[list[int]]
    looks: ClassVar[int] = 0
    """How often the master has not yet given it a partition."""

    def __init__(self, *args: Any, **options: Any) -> None:
        Consumer.made = [(args, {name: value for name, value in options.items() if value is not None})]
        Consumer.confirmed = []
        self.given = 0

    async def __aenter__(self) -> Self:
        if self.made[0][0][2] == ["nope"]:
            raise RefusedError("not deployed", code=431)
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def assignment(self) -> frozenset[int]:
        Consumer.looks -= 1
        return frozenset() if Consumer.looks >= 0 else frozenset({0})

    async def _messages(self) -> AsyncIterator[Message]:
        for value in (b"a", b"b", b"c"):
            self.given += 1
            yield Message(value)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages()

    async def confirm(self) -> None:
        Consumer.confirmed.append(self.given)


@pytest.fixture
def _consumer(_master: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "Consumer", Consumer)


@pytest.mark.usefixtures("_consumer")
def test_consume_as_a_group_confirms_what_was_printed(penstock: Command) -> None:
    done = penstock("tube", "consume", "water", "--group", "lake", "--count", "2", "--from", "latest")
    assert done == (0, "1:10000  -  a\n1:10000  -  b\n", "consuming water as group lake\n")
    made = {"start": "latest", "with_offsets": True, "heartbeat_s": 1.0}
    assert Consumer.made == [(("127.0.0.1:8715", "lake", ["water"]), made)]
    assert Consumer.confirmed == [2]


@pytest.mark.usefixtures("_consumer")
def test_consume_waits_for_its_partitions(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apache's master gives them out once a minute: before that, that nothing comes does not mean that nothing is."""
    monkeypatch.setattr(tube_records, "IDLE_S", 0.05)
    monkeypatch.setattr(Consumer, "looks", 20)
    done = penstock("tube", "consume", "water", "--group", "lake")
    assert (done.status, len(done.out.splitlines())) == (0, 3)
    assert done.err.count("waiting for the master to give out partitions") == 1
    monkeypatch.setattr(tube_records, "ASSIGNED_S", 0.05)
    monkeypatch.setattr(Consumer, "looks", 1_000_000)
    done = penstock("tube", "consume", "water", "--group", "lake")
    assert (done.status, done.out) == (1, "")
    assert "got no partition within" in done.err


@pytest.mark.usefixtures("_consumer")
def test_consume_with_filters(penstock: Command) -> None:
    penstock("tube", "consume", "water", "--group", "lake", "--filter", "b", "--filter", "a")
    assert Consumer.made[0][1]["filters"] == ["a", "b"]
    done = penstock("tube", "consume", "water", "--group", "lake", "--from", "1h")
    assert done.status == 2
    assert "penstock tube offsets reset" in done.err


@pytest.mark.usefixtures("_consumer")
def test_consume_follows_as_a_group_of_its_own(penstock: Command) -> None:
    done = penstock("tube", "consume", "water", "--follow", "--json")
    assert [json.loads(line)["value"] for line in done.out.splitlines()] == ["a", "b", "c"]
    assert Consumer.made[0][0][1].startswith("penstock_cli_")
    assert Consumer.confirmed == [3]
