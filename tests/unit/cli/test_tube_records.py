"""`penstock tube consume`: arguments to calls, records to lines. Servers and clients are stand-ins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest

from penstock.cli.pipeline import files
from penstock.cli.tube import consume as tube_records
from penstock.errors import RefusedError, UnavailableError
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.sources import TubeSource
from penstock.pipelines.testing.cases import load_cases
from penstock.spark.kafka.source import KafkaLog, KafkaRange
from penstock.tube import consumer, reader
from penstock.tube.reader import MessageBatch, PartitionInfo
from penstock.tube.record import Record
from tests.unit.cli.conftest import BROKER, Command, Web


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

    def plan(self, topic: str, partition: int, start: int, end: int, most: int) -> tuple[int, int]:
        own = range(start, end, 28)
        return (end, len(own)) if len(own) <= most else (own[most], most)

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[MessageBatch]:
        assert (start, end) == (0, 84)
        for offset, time_ms, value in self.data[partition]:
            data, flag, _ = Record(value, b"k", [("h", "1")], id="i").encode()
            yield MessageBatch.from_payloads([offset], [time_ms], [flag], [data])


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
    assert penstock("tube", "consume", "water", "--msg-type", "none").out == ""
    raw = penstock("tube", "consume", "water", "--raw", "--format", "length", "--count", "1").out
    assert raw == "\x00\x00\x00\x01a"
    raw = penstock("tube", "consume", "water", "--raw", "--key-separator", "=", "--count", "1").out
    assert raw == "k=a\n"


@pytest.mark.usefixtures("_reader")
def test_the_columns_of_the_newest_records(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [b'{"machine": "press", "celsius": 93.5}', b"nope", b'{"machine": "pump"}']
    monkeypatch.setattr(Reader, "data", {0: [(0, 10, values[0]), (56, 30, values[1])], 1: [(28, 20, values[2])]})
    done = penstock("pipeline", "infer", "--topic", "water", "--records", "3")
    assert (done.status, done.out) == (0, "machine STRING NOT NULL,\ncelsius DOUBLE\n")
    assert done.err.startswith("1 of 3 records left out, the first: 1:0@56: ")
    monkeypatch.setattr(Reader, "data", {0: [(0, 10, b"nope")], 1: []})
    done = penstock("pipeline", "infer", "--topic", "water", "--records", "3")
    assert done.status == 2
    assert "topic 'water' has no JSON object with columns" in done.err
    done = penstock("pipeline", "infer", "--topic", "fire")
    assert (done.status, "topic 'fire' does not exist" in done.err) == (1, True)
    for arguments in ((), ("-", "--topic", "water")):
        done = penstock("pipeline", "infer", *arguments)
        assert (done.status, "a FILE, --topic or --pipeline, or a --registry, and only one of them" in done.err) == (
            2,
            True,
        )


@pytest.mark.usefixtures("_reader")
@pytest.mark.parametrize("secured", [False, True])
def test_a_pipeline_for_the_records_of_a_topic(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secured: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "password").write_text("secret\n", encoding="utf-8")
    login = ["--username", "ann", "--password-file", "password"] if secured else []
    values = [
        b'{"a b": "x", "n": 1.5, "of": {"deep": 1}, "time": "2026-01-01T00:00:00Z"}', b"nope",
        b'{"a b": "{y}: $", "n": "n/a", "of": {"deep": 2}, "time": "2026-01-01T00:00:01Z"}',
    ]  # fmt: skip
    monkeypatch.setattr(Reader, "data", {0: [(0, 10, values[0]), (56, 30, values[1])], 1: [(28, 20, values[2])]})
    done = penstock("pipeline", "init", "p.yaml", "--topic", "water", *login)
    assert (done.status, done.err) == (
        0,
        "1 of 3 records are not JSON objects: 1:0@56: Expecting value: line 1 column 1 (char 0)\n",
    )
    assert done.out.endswith("next: penstock pipeline test p.yaml, then penstock pipeline run p.yaml\n")
    pipeline = load(tmp_path / "p.yaml")
    assert [step.name for step in pipeline.steps] == ["water"]
    assert pipeline.steps[0].parse is not None
    assert pipeline.steps[0].parse.columns == (
        "`a b` STRING NOT NULL, n STRING NOT NULL, of STRUCT<deep: BIGINT> NOT NULL, time TIMESTAMP NOT NULL"
    )
    source = pipeline.inputs["source"]
    assert isinstance(source, TubeSource)
    options = source.all_options()
    assert (options["subscribe"], options.get("tubemq.user")) == ("water", "ann" if secured else None)
    assert pipeline.statestore.username == ("ann" if secured else None)
    assert "# n has values of several kinds" in (tmp_path / "p.yaml").read_text(encoding="utf-8")
    (case,) = load_cases(tmp_path / "p.test.yaml", pipeline)
    assert case.expect["water"] == [{"a b": "{y}: $", "n": "n/a"}]
    for arguments, status, error in (
        (("--topic", "fire"), 1, "topic 'fire' does not exist"),
        (("--topic", "water", "--source", "files"), 2, "--topic and --source files exclude each other"),
    ):
        done = penstock("pipeline", "init", "other.yaml", *arguments)
        assert (done.status, error in done.err) == (status, True), done.err
    monkeypatch.setattr(Reader, "data", {0: [(0, 10, b"nope")], 1: []})
    done = penstock("pipeline", "init", "other.yaml", "--topic", "water")
    assert (done.status, "topic 'water' has no JSON object with columns" in done.err) == (2, True)
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.usefixtures("_reader")
@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([b'{"a": "${HOME} $${x} ${NO_SUCH_VARIABLE}", "n": 1}'], {"a": "${HOME} $${x} ${NO_SUCH_VARIABLE}", "n": 1}),
        ([b'{"a": "${file:password}"}'], {"a": "${file:password}"}),
        ([b'{"${HOME}": "x", "# : [": true}'], {"${HOME}": "x", "# : [": True}),
        (['{"a": "\x7f\x85\u2028\ufeff\U0001f600"}'.encode()], {"a": "\x7f\x85\u2028\ufeff\U0001f600"}),
        ([rb'{"a\u007f\u2028\n": "x"}'], {"a\x7f\u2028\n": "x"}),
        ([rb'{"a": "\ud800", "n": 1}'], {"n": 1}),
        ([rb'{"a": 5, "n": 1}', '{"a": "\x7f\ufeff", "n": 1}'.encode(), rb'{"a": "\ud800", "n": 2}'], {"n": 2}),
        ([b'{"time": "2026-01-01T00:00:00Z", "of": {"deep": 1}}'], {}),
        ([b'{"a": 1.5}', b'{"a": NaN}', b'{"a": 2.5, "a": 3.5}', b"[" * 100_000], {"a": 1.5}),
        ([b'{"a": 1.5}', b'{"a": 1e400}'], {"a": 1.5}),
    ],
)
def test_the_test_case_for_a_topic_has_any_record_unchanged(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, values: list[bytes], row: dict[str, object]
) -> None:
    """Variables in a record are not replaced, and files that it names not read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "password").write_text("secret\n", encoding="utf-8")
    monkeypatch.setattr(Reader, "data", {0: [(28 * n, 10, value) for n, value in enumerate(values)], 1: []})
    done = penstock("pipeline", "init", "p.yaml", "--topic", "water")
    assert done.status == 0, done.err
    pipeline = load(tmp_path / "p.yaml")
    parsed = pipeline.steps[0].parse
    assert parsed is not None
    assert {column.name for column in parse_ddl(parsed.columns or "")} >= row.keys()
    (case,) = load_cases(tmp_path / "p.test.yaml", pipeline)
    assert case.input[0].payload in values
    assert case.expect == {"water": [row]}


@pytest.mark.parametrize(("topic", "name"), [("source", "records"), ("Plant-1", "plant_1"), ("7", "records")])
def test_the_name_of_the_step_for_a_topic(topic: str, name: str) -> None:
    assert files._step_name(topic) == name


def test_the_columns_of_the_newest_records_of_kafka(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def message(offset: int, value: bytes | None) -> SimpleNamespace:
        return SimpleNamespace(offset=lambda: offset, value=lambda: value)

    def read(_log: KafkaLog, place: KafkaRange) -> Iterator[list[SimpleNamespace]]:
        assert (place.topic, place.partition, place.start, place.end) == ("water", 0, 2, 5)
        yield [message(2, b'{"machine": "press", "celsius": 93.5}'), message(3, None)]
        yield [message(4, b"nope")]

    monkeypatch.setattr(KafkaLog, "bounds", lambda _: ({"water": {"0": 1, "1": 7}}, {"water": {"0": 5, "1": 7}}))
    monkeypatch.setattr(KafkaLog, "read", read)
    file = tmp_path / "p.yaml"
    kafka = "{format: kafka, bootstrap: ['h:1'], topics: [water]}"
    file.write_text(f"name: p\nsource: {kafka}\nsinks: [{{name: shown, console: {{}}}}]\n")
    done = penstock("pipeline", "infer", "--pipeline", str(file), "--records", "3")
    assert (done.status, done.out) == (0, "machine STRING NOT NULL,\ncelsius DOUBLE NOT NULL\n")
    assert done.err.startswith("1 of 2 records left out, the first: water:0@4: ")
    file.write_text(
        f"name: p\nsources: {{a: {kafka}, b: {{topics: [fire]}}}}\n"
        "sinks: [{name: one, from: a, console: {}}, {name: two, from: b, console: {}}]\n"
    )
    assert penstock("pipeline", "infer", "--pipeline", str(file), "--from-source", "a", "--records", "3").status == 0
    for arguments, error in (
        ((), "has several sources"),
        (("--from-source", "c"), "has no source 'c'"),
        (("--from-source", "b"), "penstock pipeline infer --topic fire"),
    ):
        done = penstock("pipeline", "infer", "--pipeline", str(file), *arguments)
        assert (done.status, error in done.err) == (2, True), done.err
    assert penstock("pipeline", "infer", "-", "--from-source", "a").status == 2


@pytest.mark.usefixtures("_reader")
def test_a_time_after_the_last_record_is_reported(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "offset_at", lambda *_: 84)
    monkeypatch.setattr(Reader, "read", lambda *_: iter(()))
    done = penstock("tube", "consume", "water", "--from", "2199-01-31T12:00Z")
    assert (done.status, done.out) == (0, "")
    assert done.err.startswith("no records: --from (2199-0")
    assert done.err.endswith(") is later than the last record\n")


@pytest.mark.usefixtures("_reader")
def test_an_unavailable_broker_is_left_out_and_reported(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "broker 1 at 127.0.0.1:8123 does not respond (Connection refused): partitions 0, 1 of water skipped\n"
    )
    asked.clear()
    dead = 99
    done = penstock("tube", "consume", "water")
    assert (done.status, done.out) == (1, "")
    assert "no connection" in done.err


@pytest.mark.usefixtures("_reader")
def test_consume_of_a_range(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def read(self: Reader, topic: str, partition: int, start: int, end: int) -> Iterator[MessageBatch]:
        asked.append((partition, start, end))
        yield from ()

    monkeypatch.setattr(Reader, "read", read)
    done = penstock("tube", "consume", "water", "--from", "28", "--until", "-1", "--partition", "1")
    assert (done, asked) == ((0, "", ""), [(1, 28, 56)])
    asked.clear()
    assert penstock("tube", "consume", "water", "--from", "-2", "--until", "2h").status == 0
    assert asked == [(0, 28, 0), (1, 28, 0)]
    done = penstock("tube", "consume", "water", "--partition", "2:0")
    assert (done.status, "topic 'water' has no partition 2:0" in done.err) == (1, True)
    done = penstock("tube", "consume", "water", "--from", "112")
    assert (done.status, "offset 112 is not stored in partition 1:0 of water" in done.err) == (2, True)


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
def test_a_topic_without_a_broker_is_exit_status_1(penstock: Command, how: list[str]) -> None:
    done = penstock("tube", "consume", "nope", *how)
    assert (done.status, done.out) == (1, "")
    assert "topic 'nope' does not exist" in done.err
    assert "penstock tube topic create" in done.err


@pytest.mark.parametrize("args", [["produce", "water", "v"], ["consume", "water"], ["consume", "water", "--follow"]])
def test_the_hint_names_the_option_if_no_master_answers(
    monkeypatch: pytest.MonkeyPatch, penstock: Command, args: list[str]
) -> None:
    def partitions(masters: str, topic: str, **_: object) -> list[PartitionInfo]:
        raise UnavailableError(f"tube: no connection to {masters}", why="refused")

    monkeypatch.setattr(reader, "partitions", partitions)
    hint = ", or the data directory of a node that runs here: PENSTOCK_DATA_DIR=DIR\n"
    assert penstock("tube", *args).err.endswith(f"--tube-master HOST:PORT{hint}")
    done = penstock("tube", *args, "--tube-master", "edge:1")
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        "penstock: tube: no connection to edge:1\n  why: refused\n"
        "  hint: start a node (penstock up), or set the address of its TubeMQ master: --tube-master HOST:PORT\n"
    )


class Message:
    topic, broker_id, partition = "water", 1, 10_000
    offset = append_time_ms = None

    def __init__(self, value: bytes) -> None:
        self.record = Record(value)


class Consumer:
    made: ClassVar[list[tuple[Any, ...]]]
    confirmed: ClassVar[list[int]]
    assigned: ClassVar[list[str] | None]
    looks: ClassVar[int] = 0
    """How often the master has not yet given it a partition."""

    def __init__(self, *args: Any, **options: Any) -> None:
        Consumer.made = [(args, {name: value for name, value in options.items() if value is not None})]
        Consumer.confirmed = []
        Consumer.assigned = None
        self.given = 0

    async def assign(self, keys: Iterable[str]) -> None:
        Consumer.assigned = sorted(keys)

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
    assert done.err.count("waiting for the master to assign partitions") == 1
    monkeypatch.setattr(tube_records, "ASSIGNED_S", 0.05)
    monkeypatch.setattr(Consumer, "looks", 1_000_000)
    done = penstock("tube", "consume", "water", "--group", "lake")
    assert (done.status, done.out) == (1, "")
    assert "got no partition within" in done.err


@pytest.mark.usefixtures("_consumer")
def test_consume_with_filters(penstock: Command) -> None:
    penstock("tube", "consume", "water", "--group", "lake", "--msg-type", "b", "--msg-type", "a")
    assert Consumer.made[0][1]["filters"] == ["a", "b"]
    done = penstock("tube", "consume", "water", "--group", "lake", "--from", "1h")
    assert done.status == 2
    assert "penstock tube offset reset" in done.err


@pytest.mark.usefixtures("_consumer")
def test_consume_follows_as_a_group_of_its_own_and_has_it_forgotten(penstock: Command, web: Web) -> None:
    web.answers = {"admin_query_broker_run_status": [BROKER], "admin_rmv_offset": []}
    done = penstock("tube", "consume", "water", "--follow", "--json")
    assert [json.loads(line)["value"] for line in done.out.splitlines()] == ["a", "b", "c"]
    group = Consumer.made[0][0][1]
    assert group.startswith("penstock_cli_")
    assert Consumer.confirmed == [3]
    assert web.calls[-1] == ("127.0.0.1:8081", "admin_rmv_offset", {"groupName": group, "modifyUser": "penstock"})
    web.calls.clear()
    penstock("tube", "consume", "water", "--group", "lake")
    assert web.calls == []


@pytest.mark.usefixtures("_consumer")
def test_a_group_of_another_machine_is_forgotten_only_where_its_administration_is_named(
    penstock: Command, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "partitions", lambda *_, **__: [])
    web.answers = {"admin_query_broker_run_status": [BROKER], "admin_rmv_offset": []}
    penstock("tube", "consume", "water", "--follow", "--tube-master", "plant:8715")
    assert web.calls == []
    penstock("tube", "consume", "water", "--follow", "--tube-master", "plant:8715", "--http", "plant:8080")
    assert [method for _, method, _ in web.calls] == ["admin_query_broker_run_status", "admin_rmv_offset"]


@pytest.mark.usefixtures("_consumer", "_reader", "web")
def test_consume_follows_from_places(penstock: Command) -> None:
    penstock("tube", "consume", "water", "--follow", "--from", "-1")
    options = Consumer.made[0][1]
    assert (options["start_offsets"], options.get("balance")) == ({"1:water:0": 56, "1:water:1": 56}, None)
    penstock("tube", "consume", "water", "--follow", "--from", "28", "--partition", "1:1")
    options = Consumer.made[0][1]
    assert (options["start_offsets"], options["balance"]) == ({"1:water:1": 28}, "client")
    assert Consumer.assigned == ["1:water:1"]
    penstock("tube", "consume", "water", "--follow", "--from", "latest", "--partition", "1")
    options = Consumer.made[0][1]
    assert (options["start"], "start_offsets" in options, Consumer.assigned) == ("latest", False, ["1:water:1"])


@pytest.mark.usefixtures("_consumer", "_reader", "web")
def test_apaches_brokers_are_read_as_a_group(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def bounds(*_: object) -> tuple[int, int]:
        raise RefusedError("tube: broker does not support exact ranges", code=411, why="it is not a penstock broker")

    monkeypatch.setattr(Reader, "bounds", bounds)
    done = penstock("tube", "consume", "water", "--raw", "--from", "28")
    assert (done.status, done.out) == (0, "a\nb\nc\n")
    assert Consumer.made[0][1]["start_offsets"] == {"1:water:0": 28, "1:water:1": 28}
    for args in (["--until", "latest"], ["--from", "-1"]):
        done = penstock("tube", "consume", "water", *args)
        assert (done.out, "it is not a penstock broker" in done.err) == ("", True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--group", "lake", "--partition", "1"], "--partition and --group exclude each other"),
        (["--group", "lake", "--until", "1h"], "--until excludes --group"),
        (["--raw", "--json"], "--raw and --json exclude each other"),
        (["--format", "length"], "--format is set without --raw"),
        (["--key-separator", "="], "--key-separator is set without --raw"),
        (["--follow", "--until", "1h"], "--until excludes --group and --follow"),
        (["--group", "lake", "--from", "-1"], "a group starts at its committed offsets"),
        (["--from", "sometime"], "write one of: earliest, latest, a time"),
        (["--until", "3"], "a multiple of 28"),
    ],
)
def test_incompatible_options_are_refused(penstock: Command, args: list[str], words: str) -> None:
    done = penstock("tube", "consume", "water", *args)
    assert (done.status, words in done.err) == (2, True), done.err


@pytest.mark.usefixtures("_reader")
def test_search_prints_the_places_of_the_records_that_pass(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [b'{"machine": "press", "celsius": 93.5}', b"nope", b'{"machine": "pump", "celsius": 21}']
    monkeypatch.setattr(Reader, "data", {0: [(0, 10, values[0]), (56, 30, values[1])], 1: [(28, 20, values[2])]})
    search = "tube", "topic", "search", "water"
    done = penstock(*search, "--path", "celsius > 90")
    assert done == (0, '1:0@0  k  {"machine": "press", "celsius": 93.5}\n', "1 of 3 records\n")
    assert penstock(*search, "--text", "P", "--count", "2") == (
        0,
        f"1:0@0  k  {values[0].decode()}\n1:1@28  k  {values[2].decode()}\n",
        "2 of 2 records\n",
    )
    assert penstock(*search, "--key", "k", "--attribute", "h=1", "--text", "nope").out == "1:0@56  k  nope\n"
    assert penstock(*search, "--key", "x*").err == "0 of 3 records\n"
    row = json.loads(penstock(*search, "--text", "nope", "--json").out)
    assert (row["partition"], row["offset"], row["value"]) == (0, 56, "nope")
    wrong = penstock(*search, "--path", "celsius is 90")
    assert (wrong.status, wrong.out) == (2, "")
    assert "'celsius is 90' is not a path in JSON with a comparison" in wrong.err
    assert "no filter is set" in penstock(*search).err


@pytest.mark.usefixtures("_reader")
def test_a_search_says_what_it_did_not_compare(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    search = "tube", "topic", "search", "water", "--text", "k"

    def read(_: Reader, __: str, partition: int, *___: int) -> Iterator[MessageBatch]:
        data, flag, _id = Record(b"a", b"k").encode()
        if partition == 0:  # an attribute block that is longer than the message
            yield MessageBatch.from_payloads([0, 28], [10, 20], [1, flag], [b"\0\0\xff\xff", data])
        else:
            yield MessageBatch.from_payloads([56], [30], [flag], [data])
            raise stop

    monkeypatch.setattr(Reader, "read", read)
    infos = [PartitionInfo(broker, "127.0.0.1", 8123, broker - 1) for broker in (1, 2)]
    monkeypatch.setattr(reader, "partitions", lambda *_, **__: infos)
    lines = "1:0@28  k  a\n2:1@56  k  a\n"
    stop: BaseException = UnavailableError("tube: no connection", why="it was closed")
    done = penstock(*search)
    assert (done.status, done.out) == (1, lines)
    assert done.err == (
        "broker 2 at 127.0.0.1:8123 does not respond (it was closed): partition 1 of water skipped\n"
        "2 of 2 records\n1 more cannot be decoded, the first: 1:0@0\n"
    )
    stop = KeyboardInterrupt()
    assert penstock(*search) == (130, lines, "interrupted: 2 of 2 records so far\n")
    stop = RefusedError("tube: refused", code=reader.NO_RANGES, why="Apache's broker")
    done = penstock(*search)
    assert done.status == 1
    assert "the brokers of 'water' cannot be searched\n  why: Apache's broker\n" in done.err
    assert "no filter is set" in penstock(*search[:4], "--path", " ").err
    assert penstock(*search[:4], "--key", "x" * 1001).err.startswith("penstock: key: longer than 1000 characters\n")


@pytest.mark.usefixtures("_reader", "_consumer")
def test_damaged_records_are_left_out_and_reported(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = b"\0\0\xff\xff"  # an attribute block that is longer than the message

    def read(_: Reader, __: str, partition: int, *___: int) -> Iterator[MessageBatch]:
        data, flag, _id = value.encode()
        yield MessageBatch.from_payloads([0, 28], [10, 20], [1, flag], [damaged, data])

    value = Record(b"a", b"k")
    monkeypatch.setattr(Reader, "read", read)
    done = penstock("tube", "consume", "water")
    assert done == (1, "1:0  k  a\n1:1  k  a\n", "2 left out that cannot be decoded, the first: 1:0@0\n")
    value = Record(b'{"x": 1}')
    done = penstock("pipeline", "infer", "--topic", "water")
    assert (done.status, done.out) == (0, "x BIGINT NOT NULL\n")
    assert done.err == "2 left out that cannot be decoded, the first: 1:0@0\n"

    class Damaged:
        topic, broker_id, partition, offset, append_time_ms = "water", 1, 2, 28, 5

        @property
        def record(self) -> Record:
            return Record.decode(damaged, 1)

    async def messages(_: Consumer) -> AsyncIterator[Message | Damaged]:
        for message in (Message(b"a"), Damaged(), Message(b"b")):
            yield message

    monkeypatch.setattr(Consumer, "_messages", messages)
    done = penstock("tube", "consume", "water", "--group", "lake")
    assert (done.status, done.out) == (1, "1:10000  -  a\n1:10000  -  b\n")
    assert done.err == ("consuming water as group lake\n1 left out that cannot be decoded, the first: 1:2@28\n")
    assert len(Consumer.confirmed) == 1
