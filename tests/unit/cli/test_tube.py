"""`penstock tube`: arguments to calls, records to lines. Servers and clients are stand-ins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, ClassVar, Self

import pytest

from penstock.cli import webapi
from penstock.errors import UnavailableError
from penstock.tube import consumer, producer, reader
from penstock.tube.producer import SendResult
from penstock.tube.reader import Batch, PartitionInfo
from penstock.tube.record import Record
from tests.unit.cli.conftest import Command


class Web:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, str]]] = []
        self.rows: list[dict[str, Any]] = []

    def call(self, address: str, method: str, parameters: Mapping[str, str]) -> list[dict[str, Any]]:
        self.calls.append((address, method, dict(parameters)))
        return self.rows


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    web = Web()
    monkeypatch.setattr(webapi, "call", web.call)
    return web


def test_topics_lists_them(web: Web, penstock: Command) -> None:
    web.rows = [
        {
            "topicName": "water",
            "topicInfo": [{"numPartitions": 3, "numTopicStores": 2}],
            "isSrvAcceptPublish": True,
            "isSrvAcceptSubscribe": False,
        },
        {"topicName": "empty", "topicInfo": [], "isSrvAcceptPublish": False, "isSrvAcceptSubscribe": False},
    ]
    table = (
        "TOPIC  PARTITIONS  STORES  BROKERS  PUBLISH  SUBSCRIBE\n"
        "water           3       2        1  yes      no\n"
        "empty           0       0        0  no       no\n"
    )
    assert penstock("tube", "topics") == penstock("tube", "topics", "list") == (0, table, "")
    assert web.calls[0] == ("127.0.0.1:8080", "admin_query_topic_info", {})
    done = penstock("tube", "topics", "--http", "edge:1", "--json")
    assert web.calls[-1][0] == "edge:1"
    assert json.loads(done.out.splitlines()[0]) == {
        "topic": "water",
        "partitions": 3,
        "stores": 2,
        "brokers": 1,
        "publish": True,
        "subscribe": False,
    }


def test_topics_create(web: Web, penstock: Command) -> None:
    web.rows = [{"success": True}]
    done = penstock("tube", "topics", "create", "water", "--partitions", "5", "--stores", "2", "--json")
    assert json.loads(done.out) == {"topic": "water", "partitions": 5, "stores": 2, "brokers": 1}
    address, method, parameters = web.calls[0]
    assert (address, method) == ("127.0.0.1:8080", "admin_add_new_topic_record")
    assert parameters == {
        "topicName": "water",
        "numPartitions": "5",
        "numTopicStores": "2",
        "createUser": "penstock",
        "confModAuthToken": "abc",
    }


class Producer:
    sent: ClassVar[list[tuple[str, Record, int | None]]]
    masters: ClassVar[str]

    def __init__(self, masters: str) -> None:
        Producer.masters = masters
        Producer.sent = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def send(self, topic: str, record: Record, partition: int | None = None) -> SendResult:
        Producer.sent.append((topic, record, partition))
        return SendResult(100 + len(Producer.sent), 1_700_000_000_000, 28 * len(Producer.sent), 2, 1)


@pytest.fixture
def _master(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that announces the topic `water`."""

    def partitions(masters: str, topic: str) -> list[PartitionInfo]:
        assert masters == "127.0.0.1:8715"
        return [PartitionInfo(1, "127.0.0.1", 8123, n) for n in (0, 1)] if topic == "water" else []

    monkeypatch.setattr(reader, "partitions", partitions)


@pytest.fixture
def _producer(_master: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "Producer", Producer)


@pytest.mark.usefixtures("_producer")
def test_produce_values_with_key_headers_and_partition(penstock: Command) -> None:
    args = ["--key", "k", "--header", "a=1", "--header", "b=x=y", "--partition", "2", "--msg-type", "flow"]
    assert penstock("tube", "produce", "water", "v1", "v2", *args) == (0, "", "2 records produced to water\n")
    headers: list[tuple[str, str | bytes]] = [("a", "1"), ("b", "x=y")]
    assert Producer.sent == [
        ("water", Record(b"v1", b"k", headers, msg_type="flow"), 2),
        ("water", Record(b"v2", b"k", headers, msg_type="flow"), 2),
    ]
    assert Producer.masters == "127.0.0.1:8715"


@pytest.mark.usefixtures("_producer")
def test_produce_lines_of_standard_input_and_answer_in_json(penstock: Command) -> None:
    done = penstock("tube", "produce", "water", "--json", stdin=b"one\r\n\xff\n\nlast")
    assert [record.value for _, record, _ in Producer.sent] == [b"one", b"\xff", b"", b"last"]
    assert (done.status, done.err) == (0, "")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert len(rows) == 4
    assert rows[0] == {
        "topic": "water",
        "broker_id": 1,
        "partition": 2,
        "offset": 28,
        "message_id": 101,
        "append_time_ms": 1_700_000_000_000,
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["water"], "tube produce: no values"),
        (["water", "v", "--header", "x"], "--header: got 'x', expected NAME=VALUE"),
        (["water", "v", "--header", "=x"], "--header: got '=x', expected NAME=VALUE"),
        (["water", "v", "--partition", "-1"], "Invalid value for '--partition'"),
    ],
)
def test_misuse_of_produce(penstock: Command, args: list[str], message: str) -> None:
    done = penstock("tube", "produce", *args)
    assert (done.status, done.out) == (2, "")
    assert message in done.err


class Reader:
    """Two partitions whose records arrived in turn."""

    data: ClassVar = {0: [(0, 10, b"a"), (56, 30, b"c\x1b")], 1: [(28, 20, b"\xff")]}

    def __init__(self, host: str, port: int) -> None:
        assert (host, port) == ("127.0.0.1", 8123)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        assert topic == "water"
        return 0, 84

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Batch]:
        assert (start, end) == (0, 84)
        for offset, time_ms, value in self.data[partition]:
            data, flag, _ = Record(value, b"k", [("h", "1")], id="i").encode()
            yield Batch([offset], [time_ms], [flag], [data])


@pytest.fixture
def _reader(_master: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RangeReader", Reader)


@pytest.mark.usefixtures("_reader")
def test_consume_prints_what_the_log_holds_in_the_order_of_arrival(penstock: Command) -> None:
    done = penstock("tube", "consume", "water")
    assert done == (0, "1:0  k  a\n1:1  k  \\xff\n1:0  k  c\\x1b\n", "")
    assert penstock("tube", "consume", "water", "--count", "1").out == "1:0  k  a\n"
    assert penstock("tube", "consume", "water", "--from", "latest").out == ""


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


@pytest.mark.usefixtures("_reader", "_consumer")
@pytest.mark.parametrize("how", [[], ["--follow"], ["--group", "lake"]])
def test_a_topic_that_nobody_serves_is_status_1(penstock: Command, how: list[str]) -> None:
    done = penstock("tube", "consume", "nope", *how)
    assert (done.status, done.out) == (1, "")
    assert "the master announces no topic 'nope'" in done.err
    assert "penstock tube topics create" in done.err


@pytest.mark.usefixtures("_producer")
def test_produce_says_that_it_waits_for_a_topic(penstock: Command) -> None:
    done = penstock("tube", "produce", "nope", "v")
    assert done.err.startswith("waiting for topic nope: ")
    assert "penstock tube topics create" in done.err


@pytest.mark.parametrize("args", [["produce", "water", "v"], ["consume", "water"], ["consume", "water", "--follow"]])
def test_where_no_master_answers_the_remedy_names_the_option(
    monkeypatch: pytest.MonkeyPatch, penstock: Command, args: list[str]
) -> None:
    def partitions(masters: str, topic: str) -> list[PartitionInfo]:
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

    def __init__(self, value: bytes) -> None:
        self.record = Record(value)


class Consumer:
    made: ClassVar[list[tuple[Any, ...]]]
    confirmed: ClassVar[list[int]]

    def __init__(self, *args: Any, **options: Any) -> None:
        Consumer.made = [(args, options)]
        Consumer.confirmed = []
        self.given = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

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
    assert Consumer.made == [(("127.0.0.1:8715", "lake", ["water"]), {"start": "latest"})]
    assert Consumer.confirmed == [2]


@pytest.mark.usefixtures("_consumer")
def test_consume_follows_as_a_group_of_its_own(penstock: Command) -> None:
    done = penstock("tube", "consume", "water", "--follow", "--json")
    assert [json.loads(line)["value"] for line in done.out.splitlines()] == ["a", "b", "c"]
    assert Consumer.made[0][0][1].startswith("penstock_cli_")
    assert Consumer.confirmed == [3]
