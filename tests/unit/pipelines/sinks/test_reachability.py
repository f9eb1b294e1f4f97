"""Checks of a run's sinks before Spark is started."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.errors import PenstockError, StorageError
from penstock.pipelines.sinks import delivery
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import Pipeline
from tests.ports import free_port
from tests.spark.node import Node
from tests.unit.pipelines.files import parse


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as started:
        started.create_topic("out")
        yield started


def pipeline(node: Node, *sinks: str, dead: str = "") -> Pipeline:
    lines = "".join(f"  - {{name: s{number}, {sink}}}\n" for number, sink in enumerate(sinks))
    letters = f"dead_letters: {{path: {dead}}}\n" if dead else ""
    source = f"source: {{topics: [in], master: '{node.master}'}}\nstatestore: {{broker: '{node.mqtt}'}}\n"
    return parse(f"name: p\n{source}{letters}sinks:\n{lines}")


def test_sinks_that_can_be_written_to_leave_no_warning_and_no_trace(node: Node, tmp_path: Path) -> None:
    sinks = ["tubemq: {topic: out}", "mqtt: {topic: a}", "console: {}", f"table: {{path: '{tmp_path}/a/b'}}"]
    assert delivery.check_sinks(pipeline(node, *sinks, dead=str(tmp_path / "dead"))) == []
    assert list(tmp_path.iterdir()) == []


def test_a_topic_that_does_not_exist_is_an_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "CHECK_TIMEOUT_S", 0.3)
    with pytest.raises(PenstockError, match="sink 's1': tube: topic 'nowhere' does not exist") as caught:
        delivery.check_sinks(pipeline(node, "tubemq: {topic: out}", "tubemq: {topic: nowhere}"))
    assert "penstock tube topic create nowhere" in str(caught.value.hint)


@pytest.mark.parametrize("where", ["table: {path: 'FILE/rows'}", "table: {path: FILE}", "dead"])
def test_a_file_where_a_directory_should_be_is_an_error(where: str, node: Node, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    if where == "dead":
        made = pipeline(node, "console: {}", dead=f"{file}/dead")
    else:
        made = pipeline(node, where.replace("FILE", str(file)))
    with pytest.raises(StorageError, match="cannot write to") as caught:
        delivery.check_sinks(made)
    assert caught.value.why == f"{str(file)!r} is a file"


def test_a_file_system_that_refuses_directories_is_an_error(node: Node) -> None:
    # Not even root can create files here.
    with pytest.raises(StorageError, match="sink 's0': cannot write to '/proc/nowhere/rows'") as caught:
        delivery.check_sinks(pipeline(node, "table: {path: /proc/nowhere/rows}"))
    assert caught.value.why == "No such file or directory"


def test_an_unreachable_sink_is_a_warning(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "CHECK_TIMEOUT_S", 0.3)
    away = free_port()
    sinks = [
        f"tubemq: {{topic: out, master: '127.0.0.1:{away}'}}",
        f"mqtt: {{topic: a, broker: 'mqtt://127.0.0.1:{away}'}}",
    ]
    warnings = delivery.check_sinks(pipeline(node, *sinks))
    assert [text.split(":")[0] for text in warnings] == ["sink 's0'", "sink 's1'"]
    assert all(text.endswith("each batch is retried until the server is available") for text in warnings)


def test_checks_of_several_pipelines_do_not_remove_the_directories_of_each_other(tmp_path: Path) -> None:
    """All tables are in a directory that does not exist, and that each check creates and removes."""

    def check(number: int) -> list[str]:
        text = "name: p\nsource: {topics: [t]}\nsinks: [{name: rows, table: {path: PATH}}]\n"
        return delivery.check_sinks(loader.parse(text.replace("PATH", str(tmp_path / "lake" / f"t{number}")), name="p"))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(check, range(400))) == [[]] * 400
    assert not (tmp_path / "lake").exists()
