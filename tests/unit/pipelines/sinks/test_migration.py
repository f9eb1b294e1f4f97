"""Parquet tables become Delta tables: no row is lost or doubled, and batches continue."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.errors import ConfigError, PenstockError, StorageError
from penstock.pipelines.sinks.delta import DeltaWriter, delta_writers
from penstock.pipelines.sinks.migration import migrate
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA
from penstock.pipelines.sinks.table import Table
from penstock.pipelines.spec.sinks import stored_format

Columns = dict[str, tuple[str, Any]]


def commit(table: Table | DeltaWriter, batch: int, columns: Columns, *, metadata: bool = True) -> None:
    """Write a batch of one row; each column has its type in Spark's JSON, and its value."""
    attempt = table.new_attempt(batch)
    assert isinstance(attempt, Path)
    attempt.mkdir(parents=True)
    rows = pa.table({name: [value] for name, (_, value) in columns.items()})
    fields = [{"name": name, "type": kind, "nullable": False, "metadata": {}} for name, (kind, _) in columns.items()]
    with pq.ParquetWriter(attempt / "part.parquet", rows.schema, store_schema=False) as file:
        if metadata:
            file.add_key_value_metadata({SPARKS_SCHEMA.decode(): json.dumps({"type": "struct", "fields": fields})})
        file.write(rows)
    table.commit(batch, attempt, ["part.parquet"], 1)


def number(n: int) -> Columns:
    return {"n": ("long", n)}


def numbers(path: Path) -> list[int]:
    return sorted(n for n in DeltaTable(path).to_pyarrow_table()["n"].to_pylist() if n is not None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of two sinks; batch 2 of the first had no rows."""
    table = Table(tmp_path / "t", "rows", "q1")
    for batch in (0, 1, 3):
        commit(table, batch, number(batch))
    commit(Table(tmp_path / "t", "late", "q2"), 5, {"n": ("long", 10), "more": ("string", "x")})
    # What an attempt left that was not committed.
    (tmp_path / "t" / "writer=rows" / "batch=4").mkdir()
    pq.write_table(pa.table({"n": [99]}), tmp_path / "t" / "writer=rows" / "batch=4" / "part.parquet")
    return tmp_path / "t"


def test_rows_stay_and_batches_continue(path: Path) -> None:
    assert migrate(path, dry_run=True) == (4, 4, 4)
    assert stored_format(str(path)) == "parquet"
    assert migrate(path) == (4, 4, 4)
    assert stored_format(str(path)) == "delta"
    assert numbers(path) == [0, 1, 3, 10]
    assert delta_writers(path) == {"rows": {"q1": 3}, "late": {"q2": 5}}
    writer = DeltaWriter(path, "rows", "q1")
    for batch in (0, 2, 3, 4):
        commit(writer, batch, number(batch))
    commit(DeltaWriter(path, "late", "q2"), 5, number(5))
    assert numbers(path) == [0, 1, 3, 4, 10]
    with pytest.raises(PenstockError, match="another checkpoint"):
        DeltaWriter(path, "rows", "q9")


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_leaves_one_of_the_two_tables(path: Path, *, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def crash(old: Path, new: Path) -> None:
        if after:
            rename(old, new)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            migrate(path)
    assert stored_format(str(path)) == ("delta" if after else "parquet")
    if not after:
        commit(Table(path, "rows", "q1"), 4, number(4))
        migrate(path)
    assert numbers(path) == ([0, 1, 3, 10] if after else [0, 1, 3, 4, 10])


def test_a_table_is_migrated_once(path: Path) -> None:
    migrate(path)
    with pytest.raises(ConfigError, match="is a Delta table already"):
        migrate(path)
    with pytest.raises(ConfigError, match="has no Parquet table"):
        migrate(path / "none")


@pytest.mark.parametrize(
    ("column", "error"),
    [
        ({"n": ("string", "x")}, "column 'n' is STRING now"),
        ({"N": ("long", 1)}, "has the columns 'n' and 'N'"),
        ({"v": ("variant", b"x")}, "cannot be a column of a Delta table"),
    ],
)
def test_columns_that_delta_does_not_have_are_refused(path: Path, column: Columns, error: str) -> None:
    commit(Table(path, "rows", "q1"), 6, column)
    with pytest.raises(ConfigError, match=error):
        migrate(path)
    assert stored_format(str(path)) == "parquet"


def test_a_missing_file_and_one_without_a_schema_are_errors(path: Path) -> None:
    commit(Table(path, "rows", "q1"), 6, number(6), metadata=False)
    with pytest.raises(StorageError, match="has no schema of Spark"):
        migrate(path)
    shutil.rmtree(path / "writer=rows" / "batch=1")
    with pytest.raises(StorageError, match="lacks its file"):
        migrate(path)
