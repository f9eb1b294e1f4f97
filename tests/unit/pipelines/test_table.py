from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import PenstockError, StorageError
from penstock.pipelines.durable import write_json
from penstock.pipelines.table import Table, commits, files


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


def test_a_writer_refuses_its_own_batches_of_another_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, 4, "a.parquet", query="old")
    with pytest.raises(PenstockError, match="another checkpoint"):
        Table(tmp_path, "rows", "new")
    Table(tmp_path, "rows", "old")
    Table(tmp_path, "others", "new")


def test_a_commit_that_is_none_is_an_error(tmp_path: Path) -> None:
    write_json(tmp_path / "_commits" / "rows-1.json", {"batch": 1})
    with pytest.raises(StorageError, match="not a commit of a table"):
        commits(tmp_path)
