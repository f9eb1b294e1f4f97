"""`penstock tube produce`: arguments and input to calls. Servers and clients are stand-ins."""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
import threading
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from penstock.cli import record_reader
from penstock.cli.tube import produce as tube_produce
from penstock.errors import RefusedError
from penstock.tube import producer
from penstock.tube.codec.strings import Partition
from penstock.tube.producer import SendResult
from penstock.tube.reader import TopicUnavailableError
from penstock.tube.record import Record
from tests.unit.cli.conftest import Command


class Producer:
    sent: ClassVar[list[tuple[str, Record, int | Partition | None]]]
    masters: ClassVar[str]

    options: ClassVar[dict[str, Any]]

    def __init__(self, masters: str, **options: Any) -> None:
        Producer.masters = masters
        Producer.sent = []
        Producer.options = {name: value for name, value in options.items() if value is not None}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def queue(
        self, topic: str, record: Record, partition: int | Partition | None = None
    ) -> asyncio.Future[SendResult]:
        Producer.sent.append((topic, record, partition))
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        future.set_result(SendResult(100 + len(Producer.sent), 1_700_000_000_000, 28 * len(Producer.sent), 2, 1))
        return future


@pytest.fixture
def _producer(_master: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Producer.sent = []
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
    assert (Producer.masters, Producer.options["idempotent"]) == ("127.0.0.1:8715", False)


@pytest.mark.usefixtures("_producer")
def test_produce_to_a_partition_of_one_broker(penstock: Command) -> None:
    assert penstock("tube", "produce", "water", "v", "--partition", "3:1").status == 0
    target = Producer.sent[0][2]
    assert isinstance(target, Partition)
    assert (target.broker.id, target.topic, target.id) == (3, "water", 1)


@pytest.mark.usefixtures("_producer")
def test_produce_with_the_key_in_a_field(penstock: Command) -> None:
    values = [b'{"at": {"line": "l\xc3\xa9-1"}, "v": 1}', b'{"at": {"line": 7}}', b'{"at": {"line": true}}']
    done = penstock("tube", "produce", "water", "--key-field", "at.line", stdin=b"\n".join(values))
    assert done.status == 0, done.err
    assert [record.key for _, record, _ in Producer.sent] == ["lé-1".encode(), b"7", b"true"]
    assert [record.value for _, record, _ in Producer.sent] == values


@pytest.mark.usefixtures("_producer")
@pytest.mark.parametrize("line", [b"x", b"[]", b"{}", b'{"at": 1}', b'{"at": {"line": {}}}', b'{"at": {"line": null}}'])
def test_a_value_without_the_field_is_named(penstock: Command, line: bytes) -> None:
    done = penstock("tube", "produce", "water", "--key-field", "at.line", stdin=b'{"at": {"line": 1}}\n' + line)
    assert (done.status, len(Producer.sent)) == (2, 1)
    assert "1 record produced to water before the failure" in done.err
    assert "record 2: --key-field" in done.err
    assert "at.line" in done.err


@pytest.mark.usefixtures("_producer")
def test_produce_a_file(penstock: Command, tmp_path: Path) -> None:
    file = tmp_path / "records"
    file.write_bytes(b"a=1\nno key\nb=x=y")
    done = penstock("tube", "produce", "water", "--file", str(file), "--key-separator", "=", "--idempotent")
    assert done == (0, "", "3 records produced to water\n")
    assert [(record.key, record.value) for _, record, _ in Producer.sent] == [
        (b"a", b"1"),
        (None, b"no key"),
        (b"b", b"x=y"),
    ]
    assert Producer.options["idempotent"] is True
    assert penstock("tube", "produce", "water", "v", "--file", str(file)).status == 2


@pytest.mark.usefixtures("_producer")
def test_produce_values_behind_their_length(penstock: Command) -> None:
    data = b"".join(struct.pack(">I", len(value)) + value for value in (b"a\nb", b"", b"\xff"))
    done = penstock("tube", "produce", "water", "--format", "length", stdin=data)
    assert done.err == "3 records produced to water\n"
    assert [record.value for _, record, _ in Producer.sent] == [b"a\nb", b"", b"\xff"]
    for broken, message in (
        (data[:-1], "record 2: the input ends after 0 of 1 bytes"),
        (data + b"\0", "record 3: the bytes 00 are not a length"),
    ):
        done = penstock("tube", "produce", "water", "--format", "length", stdin=broken)
        assert done.status == 2
        assert message in done.err


@pytest.mark.usefixtures("_producer")
def test_produce_the_whole_input_as_one_record(penstock: Command) -> None:
    data = b"a\nb\r\n\0\xff\n"
    done = penstock("tube", "produce", "water", "--format", "whole", stdin=data)
    assert done.err == "1 record produced to water\n"
    assert [record.value for _, record, _ in Producer.sent] == [data]
    assert penstock("tube", "produce", "water", "--format", "whole", stdin=b"").err == "0 records produced to water\n"


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


@pytest.mark.usefixtures("_producer")
def test_produce_lines_of_a_terminal(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"one\ntwo words\n\x04")  # the last is Ctrl-D
    with os.fdopen(terminal, encoding="utf-8") as stream:
        monkeypatch.setattr("tests.unit.cli.conftest.Stdin", lambda _: stream)
        done = penstock("tube", "produce", "water")
    os.close(keyboard)
    assert [record.value for _, record, _ in Producer.sent] == [b"one", b"two words"]
    assert (done.status, done.out) == (0, "")
    assert done.err == "each line is a record, sent at its end; Ctrl-D ends the input\n2 records produced to water\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["water", "--format", "length"], "tube produce: no values"),
        (["water", "v", "--header", "x"], "--header: got 'x'"),
        (["water", "v", "--header", "=x"], "--header: got '=x'"),
        (["water", "v", "--partition", "-1"], "--partition: got '-1'"),
        (["water", "v", "--partition", "a:1"], "--partition: got 'a:1'"),
        (["water", "v", "--key", "a", "--key-field", "b"], "exclude each other"),
        (["water", "v", "--key-separator", "=", "--key-field", "b"], "exclude each other"),
    ],
)
def test_misuse_of_produce(penstock: Command, args: list[str], message: str) -> None:
    done = penstock("tube", "produce", *args)
    assert (done.status, done.out) == (2, "")
    assert message in done.err


@pytest.mark.usefixtures("_producer")
def test_produce_what_consume_prints(penstock: Command) -> None:
    rows = [
        {"value": "a b", "key": "k", "headers": [["h", "1"]], "mqtt_topic": "t/1", "content_type": "text/plain",
         "event_time_ms": 7, "id": "x-1", "msg_type": "flow", "broker_id": 1, "partition": 2, "offset": 28},
        {"value": None, "value_base64": "/w==", "key": None, "key_base64": "AA==", "headers": []},
    ]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    done = penstock("tube", "produce", "water", "--format", "json", stdin=lines)
    assert done == (0, "", "2 records produced to water\n")
    assert [record for _, record, _ in Producer.sent] == [
        Record(b"a b", b"k", [("h", "1")], "t/1", 7, "x-1", "flow", "text/plain"),
        Record(b"\xff", b"\0"),
    ]
    assert penstock("tube", "produce", "water", "--format", "json", "--key", "k", stdin=lines).status == 2


@pytest.mark.usefixtures("_producer")
@pytest.mark.parametrize("line", [b"x", b"[]", b"{}", b'{"value": null}', b'{"value": 3}', b'{"value_base64": "?"}'])
def test_a_line_that_is_no_record_is_named(penstock: Command, line: bytes) -> None:
    done = penstock("tube", "produce", "water", "--format", "json", stdin=b'{"value": "v"}\n' + line + b"\n")
    assert done.status == 2
    assert done.err.startswith(
        "1 record produced to water before the failure\npenstock: record 2: the line is not a record"
    )
    assert [record.value for _, record, _ in Producer.sent] == [b"v"], "what came before it is stored"


@pytest.mark.usefixtures("_producer")
def test_a_record_that_fails_ends_it_while_the_input_is_silent(
    penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more comes, and the pipe is not closed."""

    async def refuse(*_: object, **__: object) -> asyncio.Future[SendResult]:
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        future.set_exception(RefusedError("the log is closed"))
        return future

    monkeypatch.setattr(Producer, "queue", refuse)
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe:
        os.write(theirs, b"a\n")
        monkeypatch.setattr(tube_produce, "chunks", lambda _: record_reader.chunks(pipe))
        done = penstock("tube", "produce", "water", stdin=b"")
        os.close(theirs)
        for thread in threading.enumerate():
            if thread.name == "reads input":
                thread.join(60)
    assert (done.status, done.out) == (1, "")
    assert done.err == "0 records produced to water before the failure\npenstock: the log is closed\n"


@pytest.mark.usefixtures("_producer")
def test_produce_reports_missing_acknowledgements_once(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    unanswered: list[asyncio.Future[SendResult]] = []
    notes: list[str] = []

    async def queue(
        self: Producer, topic: str, record: Record, partition: int | Partition | None = None
    ) -> asyncio.Future[SendResult]:
        unanswered.append(asyncio.get_running_loop().create_future())
        return unanswered[-1]

    def note(text: str) -> None:
        """What is said brings the answers."""
        notes.append(text)
        for future in unanswered:
            if not future.done():
                future.set_result(SendResult(1, 1, 28, 2, 1))

    monkeypatch.setattr(Producer, "queue", queue)
    monkeypatch.setattr(tube_produce, "SILENT_S", 0.02)
    monkeypatch.setattr(tube_produce, "note", note)
    assert penstock("tube", "produce", "water", "v1", "v2").status == 0
    assert [text.partition(":")[0] for text in notes] == [
        "no acknowledgement for 0.02 s",
        "2 records produced to water",
    ]


@pytest.mark.usefixtures("_producer")
def test_an_unknown_topic_is_an_error_at_once(penstock: Command) -> None:
    done = penstock("tube", "produce", "nope", "v")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("penstock: topic 'nope' does not exist at the master")
    assert "penstock tube topic create nope" in done.err
    assert Producer.sent == []


@pytest.mark.usefixtures("_producer")
@pytest.mark.parametrize(("wait", "limit", "timeout_s"), [("30s", " up to 30 s", 30.0), ("forever", "", math.inf)])
def test_produce_waits_for_an_unknown_topic_if_asked_to(
    penstock: Command, wait: str, limit: str, timeout_s: float
) -> None:
    done = penstock("tube", "produce", "nope", "v", "--wait", wait)
    assert done.err.startswith(f"waiting{limit} for topic nope: it does not exist (create it: penstock tube topic ")
    assert (Producer.options["topic_timeout_s"], Producer.options["await_topic"]) == (timeout_s, True)
    assert len(Producer.sent) == 1


@pytest.mark.usefixtures("_producer")
def test_produce_waits_for_the_brokers_of_a_topic(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(*_: object) -> None:
        raise TopicUnavailableError("tube: not known yet", applied=False, why="broker 1 is not registered")

    monkeypatch.setattr(tube_produce, "partitions", starting)
    done = penstock("tube", "produce", "water", "v")
    assert done == (
        0,
        "",
        "waiting up to 10 s for topic water: broker 1 is not registered\n1 record produced to water\n",
    )
    assert Producer.options["topic_timeout_s"] == 10
