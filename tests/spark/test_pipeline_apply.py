"""`penstock pipeline apply`: another version of a file in a run that continues, under load."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.cli.main import main
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.run import run as running
from penstock.pipelines.sinks.table import files
from penstock.pipelines.spec import loader
from penstock.pipelines.state_dir.versions import current_version, file_of, stored_version
from penstock.spark.environment import jars
from penstock.tube.record import Record
from tests.end_to_end.nodes import PENSTOCK
from tests.object_storage import ObjectStorage
from tests.spark.node import Node
from tests.spark.pipelines import Setup
from tests.spark.processes import Driver, until
from tests.tools import skip_or_fail

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 20}}}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
steps:
  - name: parsed
    parse: {{schema: "n INT NOT NULL"}}
  - name: judged
    map: {{compute: {{rule: "'RULE'"}}}}
sinks:
  - name: rows
    from: judged
    table: {{path: "{lake}/rows"}}
  - name: odd
    from: judged
    table: {{path: "{lake}/odd", format: parquet}}
"""
MORE = """\
  - name: copies
    from: parsed
    table: {{path: "{lake}/copies"}}
"""
FAILS = """\
  - name: checked
    expect: [{{name: none, expression: n < 0, on_violation: fail}}]
sinks:"""
pytestmark = pytest.mark.timeout(600)


class Applied:
    """A pipeline that runs in a thread, and files with other versions of it."""

    def __init__(self, setup: Setup, directory: Path) -> None:
        self.setup = setup
        self._directory = directory
        self.sent = 0
        self.errors: list[Exception] = []

    def file(self, name: str, text: str) -> str:
        """Write a version of the file; return its path."""
        node, path = self.setup.node, self._directory / f"{name}.yaml"
        places = {"name": self.setup.topic, "topic": self.setup.topic, "master": node.master, "broker": node.mqtt}
        path.write_text(text.format(lake=self.setup.lake, **places))
        return str(path)

    def send(self, count: int) -> None:
        for _ in range(count):
            self.setup.send(record(self.sent))
            self.sent += 1

    def apply(self, *options: str) -> int:
        return main(["pipeline", "apply", *options, "--state-dir", str(self.setup.state), "--yes"])

    @contextmanager
    def runs(self, file: str) -> Iterator[None]:
        """Run the version in ``file`` in a thread."""
        pipeline, stop = loader.load(file), threading.Event()
        options = running.RunOptions(file=file_of(Path(file), pipeline), progress_s=0)

        def run() -> None:
            try:
                running.run(pipeline, state=self.setup.state, options=options, emit=self.setup.events.append, stop=stop)
            except Exception as error:  # noqa: BLE001 - the test raises it
                self.errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if self.errors:
            raise self.errors[0]

    @contextmanager
    def load(self) -> Iterator[None]:
        """Send records until the block ends."""
        done = threading.Event()

        def send() -> None:
            while not done.wait(0.02):
                self.send(1)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def read(self, sink: str) -> int:
        return sum(event["read"] for event in self.setup.events if event["event"] == "batch" and event["sink"] == sink)

    def wait(self, *sinks: str) -> None:
        """Wait until ``sinks`` have read all records that were sent."""
        until(
            lambda: all(self.read(sink) >= self.sent for sink in sinks),
            "all records are read",
            alive=lambda: str(self.errors[0]) if self.errors else None,
        )


def record(n: int) -> Record:
    return Record(json.dumps({"n": n}).encode(), key=b"k", id=f"m{n}")


def rows_of(table: Path, column: str) -> dict[int, Any]:
    """Return the column by record; fail if a record has two rows."""
    found: dict[int, Any] = {}
    for path in files(table):
        rows = pq.ParquetFile(path).read(["n", column]).to_pydict()
        for n, value in zip(rows["n"], rows[column], strict=True):
            assert n not in found
            found[n] = value
    return found


@pytest.fixture
def applied(setup_of: Callable[..., Setup], tmp_path: Path) -> Applied:
    return Applied(setup_of(FILE, 1), tmp_path)


@pytest.mark.parametrize("refused", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_version_replaces_another_one_under_load(
    applied: Applied, capsys: pytest.CaptureFixture[str], refused: bool
) -> None:
    """``refused``: two more versions, one whose trial fails and one that cannot be built."""
    first = applied.file("first", FILE.replace("RULE", "first"))
    second = applied.file("second", FILE.replace("RULE", "second") + MORE)
    failing = applied.file("failing", FILE.replace("sinks:", FAILS).replace("from: judged", "from: checked"))
    unknown = applied.file("unknown", FILE.replace("'RULE'", "no_such_function(n)"))
    state = applied.setup.state
    applied.send(30)
    with applied.runs(first):
        applied.wait("rows", "odd")
        with applied.load():
            assert applied.apply(second) == 0
            until(lambda: applied.read("copies") >= 30, "the new sink has begun")
            if refused:
                assert applied.apply(failing) == 1
                assert "version 2 is in operation again" in capsys.readouterr().err
                assert applied.apply(unknown) == 1
                assert "version 4 was not applied" in capsys.readouterr().err
        applied.wait("rows", "odd", "copies")
        assert applied.apply(applied.setup.topic, "--rollback") == 0
        current = current_version(state)
        assert current is not None
        assert (current.version, current.over, current.trial) == (1, 2, False)
        applied.send(5)
        applied.wait("rows", "odd")
    numbers = range(applied.sent)
    rules = {1: "first", 2: "second"}
    for sink in ("rows", "odd"):
        entries = applied.setup.ledger.entries(sink)
        found = rows_of(applied.setup.lake / sink, "rule")
        assert sorted(found) == list(numbers)
        # Each batch has the rule of the version in its ledger entry.
        expected = [rules[entry.version or 0] for entry in entries for _ in range(entry.read)]
        assert [found[n] for n in numbers] == expected
        assert {entry.version for entry in entries} == {1, 2}
    assert sorted(rows_of(applied.setup.lake / "copies", "n")) == list(numbers)[:-5]
    pipeline = loader.load(first)
    for account in reconcile(pipeline, state, source_count(pipeline, state)):
        assert (account.off, account.unknown) == ((), ())


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_during_a_change_continues_with_one_version(node: Node, tmp_path: Path) -> None:
    """kill -9 while the run finishes its batches, right after the pointer was written, and after the trial."""
    node.create_topic("applied", 1)
    places = {"name": "applied", "topic": "applied", "master": node.master, "broker": node.mqtt}
    files_of = {rule: tmp_path / f"{rule}.yaml" for rule in ("first", "second")}
    for rule, path in files_of.items():
        path.write_text(FILE.replace("RULE", rule).format(lake=tmp_path / "lake", **places))
    state, sent, in_operation = tmp_path / "state", 0, "first"
    arguments = (f"--state-dir={state}", "--spark-master=local[1]")
    for event in ("applying", "queries", "applied"):
        # Always with the first file: it is replaced from the first change on.
        with Driver(tmp_path, files_of["first"], *arguments) as driver:
            driver.await_event("started")
            node.append("applied", [(0, record(n)) for n in range(sent, sent + 400)])
            sent += 400
            driver.await_event("batch", 2, sink="odd")
            other = "second" if in_operation == "first" else "first"
            command = [*PENSTOCK, "pipeline", "apply", str(files_of[other]), arguments[0], "--yes"]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as applying:
                driver.await_event(event)
                driver.kill()
                applying.wait(60)
            current = current_version(state)
            assert current is not None
            in_operation = "first" if "'first'" in stored_version(state, current.version).text else "second"
    with Driver(tmp_path, files_of["first"], *arguments, command=("run", "--once")) as driver:
        driver.await_event("stopped")
    ledger = Ledger(state / "ledger")
    for sink in ("rows", "odd"):
        found = rows_of(tmp_path / "lake" / sink, "rule")
        assert sorted(found) == list(range(sent))
        rules = [
            rule
            for entry in ledger.entries(sink)
            for rule in ["first" if "'first'" in stored_version(state, entry.version or 0).text else "second"]
            for _ in range(entry.read)
        ]
        assert [found[n] for n in range(sent)] == rules
    pipeline = loader.load(files_of["first"])
    for account in reconcile(pipeline, state, source_count(pipeline, state)):
        assert (account.off, account.unknown) == ((), ())


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_one_of_several_pipelines_with_state_in_a_bucket_is_changed(
    node: Node, object_storage: ObjectStorage, tmp_path: Path
) -> None:
    if not jars.is_s3a_set_up():
        skip_or_fail("the jars of s3a are not set up: `make jars` does")
    home, lake = tmp_path / "pipelines", tmp_path / "lake"
    home.mkdir()
    names = ("applied_a", "applied_b")

    def write(name: str, rule: str) -> Path:
        places = {"name": name, "topic": name, "master": node.master, "broker": node.mqtt, "lake": lake / name}
        file = home / f"{name}.yaml"
        file.write_text(FILE.replace("RULE", rule).format(**places))
        return file

    def send(*numbers: int) -> None:
        for name in names:
            node.append(name, [(0, record(n)) for n in numbers])

    def rules(name: str) -> dict[int, Any]:
        return {} if not (lake / name / "rows").exists() else rows_of(lake / name / "rows", "rule")

    for name in names:
        node.create_topic(name, 1)
        write(name, "first")
    send(*range(10))
    states = f"{object_storage.url}/states"
    with Driver(tmp_path, home, "--state-dir", states) as driver:
        until(lambda: all(len(rules(name)) == 10 for name in names), "the first records", alive=driver.trouble)
        file = write("applied_a", "second")
        assert main(["pipeline", "apply", str(file), "--state-dir", f"{states}/applied_a", "--yes"]) == 0
        send(*range(10, 20))
        until(lambda: all(len(rules(name)) == 20 for name in names), "the others", alive=driver.trouble)
        assert main(["pipeline", "apply", "applied_a", "--rollback", "--state-dir", f"{states}/applied_a"]) == 0
        send(20)
        until(lambda: all(len(rules(name)) == 21 for name in names), "the last one", alive=driver.trouble)
        driver.terminate()
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
    assert rules("applied_a") == {n: "second" if 10 <= n < 20 else "first" for n in range(21)}
    assert rules("applied_b") == dict.fromkeys(range(21), "first")
