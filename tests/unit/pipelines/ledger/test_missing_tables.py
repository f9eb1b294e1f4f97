"""Tables that were written and do not exist any more: a run refuses to create them again, unless the user agrees."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from penstock.cli.main import main
from penstock.errors import RefusedError, UnavailableError
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.missing_tables import MissingTable, missing_table, missing_tables
from penstock.pipelines.ledger.plan_changes import check_applicable, remember
from penstock.pipelines.run import application, run
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import check_shapes
from penstock.pipelines.state_dir.layout import claim, create_json, write_text
from tests.object_storage import ObjectStorage
from tests.unit.pipelines.files import FILE, parse
from tests.unit.pipelines.recorded_run import RecordedRun

TEXT = "sink rows: table 'lake/rows' does not exist, and the ledger has 2 batches with 7 rows in it"
STATELESS = """\
name: water
source: {topics: [water_flow]}
steps:
  - name: parsed
    parse: {schema: "branch STRING NOT NULL, flow DOUBLE"}
  - name: plausible
    filter: flow >= 0
sinks:
  - name: rows
    table: {path: lake/rows}
"""


class Ran:
    """State of a pipeline whose sink ``rows`` has finished three batches with 4, 0 and 3 rows; without its table."""

    def __init__(
        self, root: Path, table: str, *, committed: int = 3, rows: Sequence[int] = (4, 0, 3), text: str = FILE
    ) -> None:
        self.state, self.table = root / "penstock-pipelines" / "water", table
        self.text = text.replace("path: lake/rows", f"path: '{table}'").replace("lake/dead", str(root / "dead"))
        self.file = root / "p.yaml"
        self.file.write_text(self.text)
        pipeline = parse(self.text)
        claim(self.state, pipeline.name)
        check_shapes(pipeline, self.state)
        remember(pipeline, self.state)
        (entry, _) = RecordedRun(root / "recorded").entries
        for batch, out in enumerate(rows):
            Ledger(layout.ledger(self.state)).write(replace(entry, batch=batch, out=out, table=table))
        for sink in pipeline.sinks:
            for batch in range(committed):
                for log in ("offsets", "commits"):
                    write_text(layout.checkpoint(self.state, sink.name) / log / str(batch), "")

    def parsed(self, old: str = "", new: str = "") -> Pipeline:
        return parse(self.text.replace(old, new) if old else self.text)

    def missing(self, pipeline: Pipeline | None = None) -> dict[str, MissingTable]:
        return missing_tables(pipeline or self.parsed(), self.state)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recorded").mkdir()
    return Ran(tmp_path, "lake/rows")


@pytest.mark.parametrize("is_mounted", [False, True])
@pytest.mark.parametrize("options", ["", ", format: parquet", ", mode: merge, keys: [branch]"])
def test_a_table_that_was_written_and_does_not_exist_is_missing(ran: Ran, options: str, *, is_mounted: bool) -> None:
    if is_mounted:
        Path("lake/rows/_attempts").mkdir(parents=True)
    # The same directory in other words.
    for path in ("lake/rows", "./lake/rows/", str(Path("lake/rows").absolute())):
        pipeline = ran.parsed("path: 'lake/rows'", f"path: {path}{options}")
        assert ran.missing(pipeline) == {"rows": MissingTable("rows", path, 2, 7)}


def test_one_batch_with_one_row_is_singular() -> None:
    found = MissingTable("rows", "t", 1, 1).error()
    assert found.what == "table 't' does not exist, and the ledger has 1 batch with 1 row in it"


def test_a_table_that_exists_is_not_missing(ran: Ran) -> None:
    DeltaTable.create("lake/rows", pa.schema([("n", pa.int64())]))
    assert ran.missing() == {}
    shutil.rmtree("lake/rows")
    assert list(ran.missing()) == ["rows"]
    create_json(Path("lake/rows/_commits/rows-0.json"), {})
    assert ran.missing() == {}
    shutil.rmtree("lake/rows")
    create_json(Path("lake/rows/_commits/closed/rows-2.json"), {})
    assert ran.missing() == {}


def test_a_table_without_rows_of_the_sink_is_not_missing(ran: Ran, tmp_path: Path) -> None:
    # Another path, another name with another checkpoint, another state directory: the first run of a replay.
    assert ran.missing(ran.parsed("lake/rows", "lake/others")) == {}
    assert ran.missing(ran.parsed("name: rows", "name: lines")) == {}
    assert missing_tables(ran.parsed(), tmp_path / "none") == {}
    # A new start: the checkpoint was removed, and has finished one batch without rows since.
    checkpoint = layout.checkpoint(ran.state, "rows")
    shutil.rmtree(checkpoint)
    assert ran.missing() == {}
    (entry, *_) = Ledger(layout.ledger(ran.state)).entries("rows")
    Ledger(layout.ledger(ran.state)).write(replace(entry, out=0))
    for log in ("offsets", "commits"):
        write_text(checkpoint / log / "0", "")
    assert ran.missing() == {}


@pytest.mark.parametrize(("committed", "rows"), [(3, (0, 0, 0)), (0, (4,))], ids=["empty", "not committed"])
def test_batches_without_rows_and_those_that_are_repeated_do_not_count(
    committed: int, rows: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recorded").mkdir()
    assert Ran(tmp_path, "lake/rows", committed=committed, rows=rows).missing() == {}


def test_a_table_in_a_bucket(tmp_path: Path, object_storage: ObjectStorage) -> None:
    (tmp_path / "recorded").mkdir()
    ran = Ran(tmp_path, f"{object_storage.url}/rows")
    assert ran.missing() == {"rows": MissingTable("rows", ran.table, 2, 7)}
    table = ran.parsed().sinks[0].table
    assert table is not None
    options = table.location.options()  # type: ignore[union-attr]  # it is in a bucket
    DeltaTable.create(str(table.location), pa.schema([("n", pa.int64())]), storage_options=options)
    assert ran.missing() == {}


def test_plan_and_run_refuse_it(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "plan", "p.yaml"]) == 1
    shown = capsys.readouterr()
    assert "  ? sink rows: table 'lake/rows' does not exist, and the ledger has 2 batches" in shown.out
    error = TEXT.replace("sink rows", "sink 'rows'")
    assert f"{error}\n  why: it was removed, or its volume is not mounted; " in shown.err
    assert "  hint: mount the volume, or restore the table; if it was removed on purpose, add --yes" in shown.err
    assert main(["pipeline", "plan", "p.yaml", "--json"]) == 1
    change = json.loads(capsys.readouterr().out)["changes"][0]
    assert (change["mark"], change["what"]) == ("?", "sink rows")
    # There is no terminal to ask at.
    assert main(["pipeline", "run", "p.yaml"]) == 1
    shown = capsys.readouterr()
    assert f"{TEXT}\n  why: it was removed, or its volume is not mounted; " in shown.err
    assert not Path("lake").exists()


def test_apply_asks_before_a_table_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recorded").mkdir()
    ran = Ran(tmp_path, "lake/rows", text=STATELESS)
    before, after = ran.parsed(), ran.parsed("flow >= 0", "flow > 0")
    with pytest.raises(RefusedError, match="sink rows: table 'lake/rows' does not exist") as refused:
        check_applicable(before, after, ran.state)
    assert "mount the volume" in (refused.value.hint or "")
    check_applicable(before, after, ran.state, repeats=True)
    check_applicable(before, ran.parsed("lake/rows", "lake/others"), ran.state)


@pytest.mark.parametrize("answer", [False, True])
def test_the_question_at_a_terminal(ran: Ran, monkeypatch: pytest.MonkeyPatch, *, answer: bool) -> None:
    asked: list[str] = []

    def confirmed(question: str) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("penstock.cli.pipeline.apply.confirmed", confirmed)
    given: list[bool] = []

    def run_all(_members: object, *, options: run.RunOptions, **_: object) -> dict[str, Exception]:
        given.append(options.new_tables)
        return {}

    monkeypatch.setattr(application, "run_all", run_all)
    assert main(["pipeline", "run", str(ran.file.parent), "--state-dir", str(ran.state.parent)]) == int(not answer)
    assert asked == [f"{TEXT}. Create a new table?"]
    assert given == [True] * answer


def test_yes_lets_the_run_create_it(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []

    def run_all(_members: object, *, options: run.RunOptions, **_: object) -> dict[str, Exception]:
        given.append(options.new_tables)
        return {}

    monkeypatch.setattr(application, "run_all", run_all)
    Path("all").mkdir()
    ran.file.rename("all/p.yaml")
    states = str(ran.state.parent)
    assert main(["pipeline", "run", "all", "--state-dir", states]) == 1
    assert given == []
    assert main(["pipeline", "run", "all", "--state-dir", states, "--yes"]) == 0
    # A later run asks again if the table is still missing, and not if it exists.
    DeltaTable.create("lake/rows", pa.schema([("n", pa.int64())]))
    assert main(["pipeline", "run", "all", "--state-dir", states, "--yes"]) == 0
    assert given == [True, False]


def test_a_run_checks_it_before_it_connects_and_before_a_batch_creates_it(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ran.parsed()
    rows = pipeline.sinks[0]
    events: list[dict[str, Any]] = []

    def started(*, new_tables: bool) -> run._PipelineRun:
        options = run.RunOptions(new_tables=new_tables)
        return run._PipelineRun(pipeline, events.append, threading.Event(), options, ran.state)

    def connect(_: object) -> None:
        raise UnavailableError("no node")

    monkeypatch.setattr("penstock.pipelines.run.write_back.WriteBack.connect", connect)
    refusing, agreed = started(new_tables=False), started(new_tables=True)
    with pytest.raises(RefusedError, match="does not exist, and the ledger has"):
        refusing.execute()
    with pytest.raises(UnavailableError, match="no node"):
        agreed.execute()
    assert [event["event"] for event in events] == ["starting", "starting", "warning"]
    assert events[-1]["text"].endswith("with 7 rows in it; the run creates a new table")
    agreed._check_new_table(rows)
    # A table that disappears during a run.
    other = started(new_tables=True)
    with pytest.raises(RefusedError, match="does not exist, and the ledger has"):
        other._check_new_table(rows)
    assert missing_table(rows, ran.state) is not None
