"""The Parquet table of dead letters in a bucket: each batch once, letters that are read, closed and purged."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import PenstockError, StorageError
from penstock.pipelines.ledger.dead_letters import letters, purge
from penstock.pipelines.ledger.letter_states import LetterState, letter_states, set_state, status_of
from penstock.pipelines.ledger.reconcile import _parquet
from penstock.pipelines.sinks.parquet import FileTarget, FileWriter
from penstock.pipelines.sinks.table import Table, commits, files
from penstock.pipelines.spec.pipeline import DeadLetters
from penstock.spark.files.object_storage import ObjectPath
from tests.object_storage import ObjectStorage

FIELDS: dict[str, pa.DataType] = {
    **dict.fromkeys(("step", "code", "reason", "id", "source", "topic"), pa.string()),
    **dict.fromkeys(("broker", "partition", "offset"), pa.int64()),
    "timestamp": pa.timestamp("us", "UTC"),
    "key": pa.binary(),
    "headers": pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])),
    "value": pa.binary(),
    "part": pa.string(),
}


@pytest.fixture
def path(object_storage: ObjectStorage) -> ObjectPath:
    found = DeadLetters(path=f"{object_storage.url}/dead").location
    assert isinstance(found, ObjectPath)
    return found


def written(table: Table, batch: int, *offsets: int, directory: Path | None = None) -> tuple[Any, list[str]]:
    """Write letters as a task of an executor does, to ``directory`` or to their final path."""
    row = {"step": "s", "code": "c", "reason": "r", "id": "i", "topic": "t", "broker": 1, "partition": 0, "part": None}
    row |= {"source": "source", "timestamp": datetime(2024, 5, 1, tzinfo=UTC), "value": b"v", "key": None}
    rows = [{**row, "offset": offset, "headers": []} for offset in offsets]
    target = FileTarget(directory or table.new_attempt(batch), {})
    file = FileWriter(target)
    file.write(pa.RecordBatch.from_pylist(rows, pa.schema(FIELDS)))
    file.close()
    return target.directory, file.names


def offsets(path: ObjectPath) -> list[int]:
    return [letter.offset for letter in letters(path)]


@pytest.mark.parametrize("kind", ["lost", pytest.param("busy", marks=pytest.mark.nightly)])
def test_each_batch_is_in_the_table_once(object_storage: ObjectStorage, path: ObjectPath, kind: str) -> None:
    table = Table(path, "rows", "q")
    assert files(path) == []
    assert table.commit(0, *written(table, 0, 1, 2), 2) == 2
    object_storage.fail(kind, path="_commits")
    assert table.commit(1, *written(table, 1, 3), 1) == 1
    assert object_storage.repair() == 1
    # The run is repeated, and then a run that has lost its lease.
    assert Table(path, "rows", "q").commit(1, *written(table, 1, 4), 1) == 1
    assert offsets(path) == [1, 2, 3]
    assert len((path / "writer=rows" / "batch=1").names()) == 1
    assert list(_parquet(path, "rows", 3, "dead letters")) == []
    with pytest.raises(PenstockError, match="wrote with another checkpoint"):
        Table(path, "rows", "other")


def test_a_run_that_was_paused_before_its_commit_removes_its_own_files_only(
    path: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, later = Table(path, "rows", "q"), Table(path, "rows", "q")
    place = Table._place

    def pause(self: Table, *arguments: Any) -> Any:
        monkeypatch.setattr(Table, "_place", place)
        later.commit(0, *written(later, 0, 7), 1)
        return place(self, *arguments)

    monkeypatch.setattr(Table, "_place", pause)
    assert paused.commit(0, *written(paused, 0, 8, 9), 2) == 1
    assert offsets(path) == [7]
    assert len((path / "writer=rows" / "batch=0").names()) == 1


def test_files_that_spark_wrote_are_uploaded(path: ObjectPath, tmp_path: Path) -> None:
    table = Table(path, "rows", "q")
    attempt = tmp_path / "attempt"
    assert table.commit(0, *written(table, 0, 1, directory=attempt), 1) == 1
    assert not attempt.exists()
    assert offsets(path) == [1]


def test_letters_are_closed_and_purged(path: ObjectPath) -> None:
    table = Table(path, "rows", "q")
    table.commit(0, *written(table, 0, 1, 2), 2)
    table.commit(1, *written(table, 1, 3), 1)
    first, second, last = letters(path)
    set_state(path, [first, last], LetterState.DISCARDED)
    states = letter_states(path)
    assert [status_of(states, each).state for each in (first, second, last)] == [
        LetterState.DISCARDED,
        LetterState.OPEN,
        LetterState.DISCARDED,
    ]
    assert purge(path, [first, last]) == 2
    assert offsets(path) == [2]
    assert [(commit.rows, commit.deleted, len(commit.files)) for commit in commits(path)] == [(2, 1, 1), (1, 1, 0)]
    assert list(_parquet(path, "rows", 3, "dead letters")) == []
    files(path)[0].unlink(missing_ok=True)
    with pytest.raises(StorageError, match="lacks its file"):
        files(path)


def test_a_commit_that_is_not_valid_is_reported(path: ObjectPath) -> None:
    (path / "_commits" / "rows-0.json").write_bytes(json.dumps({"writer": "rows"}).encode())
    with pytest.raises(StorageError, match="is not a commit of a table"):
        commits(path)


@pytest.mark.parametrize("wrong", ["s3://lake", "s3://user:secret@lake/dead", "hdfs://host/dead"])
def test_other_urls_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not a path in a bucket|expected a local path") as refused:
        DeadLetters(path=wrong)
    assert "secret" not in str(refused.value).partition("[type=")[0]
