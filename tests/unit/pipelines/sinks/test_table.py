from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import DataFrame

from penstock.errors import PenstockError, StorageError
from penstock.pipelines.sinks.table import Table, commits, files
from penstock.pipelines.state_dir.layout import write_json


def commit(table: Path, batch: int, *names: str, writer: str = "rows", query: str = "q1") -> None:
    for name in names:
        (table / name).parent.mkdir(parents=True, exist_ok=True)
        (table / name).write_bytes(b"")
    body = {"writer": writer, "batch": batch, "query": query, "rows": len(names), "files": list(names)}
    write_json(table / "_commits" / f"{writer}-{batch}.json", body)


def test_a_table_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert files(tmp_path / "none") == []


def test_only_committed_files_count_in_the_order_of_their_batches(tmp_path: Path) -> None:
    for batch in (10, 9, 2):
        commit(tmp_path, batch, f"writer=rows/batch={batch}/part-0.parquet")
    (tmp_path / "writer=rows" / "batch=11").mkdir()
    (tmp_path / "writer=rows" / "batch=11" / "part-0.parquet").write_bytes(b"half")
    assert [path.parent.name for path in files(tmp_path)] == ["batch=2", "batch=9", "batch=10"]


def test_a_commit_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    commit(tmp_path, 1, "writer=rows/batch=1/a.parquet")
    (tmp_path / "_commits" / ".rows-2.json.tmp").write_text("{")
    assert [c.batch for c in commits(tmp_path)] == [1]


def test_a_committed_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    commit(tmp_path, 1, "writer=rows/batch=1/a.parquet")
    (tmp_path / "writer=rows/batch=1/a.parquet").unlink()
    with pytest.raises(StorageError, match="batch 1 of 'rows' lacks its file"):
        files(tmp_path)


def test_a_relative_path_is_that_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Table(Path("lake/rows"), "rows", "q1").path == tmp_path / "lake" / "rows"


def test_a_writer_refuses_its_own_batches_of_another_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, 4, "a.parquet", query="old")
    with pytest.raises(PenstockError, match="another checkpoint"):
        Table(tmp_path, "rows", "new")
    Table(tmp_path, "rows", "old")
    Table(tmp_path, "others", "new")


def test_an_invalid_commit_is_an_error(tmp_path: Path) -> None:
    write_json(tmp_path / "_commits" / "rows-1.json", {"batch": 1})
    with pytest.raises(StorageError, match="not a commit of a table"):
        commits(tmp_path)


class Rows:
    """Writes one file, as Spark does; ``meanwhile`` happens before the file is there."""

    def __init__(self, name: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._name = name
        self._meanwhile = meanwhile

    def coalesce(self, _parts: int) -> Rows:
        return self

    @property
    def write(self) -> Rows:
        return self

    def parquet(self, directory: str) -> None:
        self._meanwhile()
        Path(directory).mkdir(parents=True)
        (Path(directory) / f"part-{self._name}.parquet").write_bytes(self._name.encode())
        (Path(directory) / "_SUCCESS").touch()


def rows(name: str, meanwhile: Callable[[], object] = lambda: None) -> DataFrame:
    return cast("DataFrame", Rows(name, meanwhile))


def test_a_batch_is_written_once(tmp_path: Path) -> None:
    table = Table(tmp_path, "rows", "q1")
    assert table.write(0, rows("a"), 3) == 3
    assert table.write(0, rows("b"), 3) == 3
    assert table.write(1, rows("c"), 0) == 0
    assert [path.read_bytes() for path in files(tmp_path)] == [b"a"]


def test_a_run_that_was_paused_removes_nothing_of_the_one_that_took_over(tmp_path: Path) -> None:
    def take_over() -> None:
        assert Table(tmp_path, "rows", "q1").write(7, rows("new"), 2) == 2

    assert Table(tmp_path, "rows", "q1").write(7, rows("old", take_over), 5) == 2
    assert [path.read_bytes() for path in files(tmp_path)] == [b"new"]
    assert sorted(path.name for path in tmp_path.rglob("*.parquet")) == ["part-new.parquet"]


def test_files_of_a_failed_attempt_do_not_count(tmp_path: Path) -> None:
    left = tmp_path / "writer=rows" / "batch=0" / "part-half.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"PAR1")
    assert Table(tmp_path, "rows", "q1").write(0, rows("a"), 1) == 1
    assert [path.name for path in files(tmp_path)] == ["part-a.parquet"]
