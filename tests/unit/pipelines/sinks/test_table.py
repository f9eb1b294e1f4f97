from __future__ import annotations

import fcntl
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

from penstock.errors import PenstockError, StorageError
from penstock.pipelines.sinks import table as table_module
from penstock.pipelines.sinks.parquet import read_file, write_file
from penstock.pipelines.sinks.table import Table, commits, delete_rows, files, has_table, writers
from penstock.pipelines.state_dir.layout import create_json, write_json, write_text


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


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of three commits, two at once."""
    monkeypatch.setattr(table_module, "SEGMENT", 3)
    monkeypatch.setattr(table_module, "_AT_ONCE", 2)


def names(table: Path) -> list[str]:
    return sorted(path.name for path in (table / "_commits").glob("*.json"))


def closed(table: Path) -> list[list[int]]:
    """The batches of each segment."""
    found = [json.loads(path.read_text()) for path in (table / "_commits" / "closed").glob("*.json")]
    return sorted([commit["batch"] for commit in each["commits"]] for each in found)


def state(table: Path) -> list[tuple[str, int, int, str]]:
    """Writer, batch, number of rows and first file of each commit."""
    return [(each.writer, each.batch, each.rows, Path(each.files[0]).name) for each in commits(table)]


def write_batches(table: Path, batches: Iterable[int], writer: str = "rows") -> None:
    target = Table(table, writer, "q1")
    for batch in batches:
        assert target.write(batch, rows(f"{writer}{batch}"), batch + 1) == batch + 1


def of_batches(batches: Iterable[int], writer: str = "rows") -> list[tuple[str, int, int, str]]:
    return [(writer, batch, batch + 1, f"part-{writer}{batch}.parquet") for batch in batches]


@pytest.mark.usefixtures("segments")
def test_old_commits_are_in_segments_and_nothing_of_them_is_lost(tmp_path: Path) -> None:
    # Batches without rows have no commit.
    numbers = [n for n in range(30) if n % 4]
    write_batches(tmp_path, numbers)
    write_batches(tmp_path, range(2), writer="late")
    assert state(tmp_path) == of_batches(range(2), "late") + of_batches(numbers)
    assert [path.name for path in files(tmp_path)][-1] == "part-rows29.parquet"
    assert len(names(tmp_path)) <= 2 * 3 - 1 + 2
    assert closed(tmp_path)[:2] == [[1, 2, 3], [5, 6, 7]]
    assert writers(tmp_path) == {"rows": len(numbers), "late": 2}
    # A checkpoint that was restored repeats old batches.
    table = Table(tmp_path, "rows", "q1")
    for batch in (2, 29):
        assert table.write(batch, rows("again"), 99) == batch + 1
    assert state(tmp_path) == of_batches(range(2), "late") + of_batches(numbers)
    with pytest.raises(PenstockError, match="another checkpoint"):
        Table(tmp_path, "rows", "q2")


def test_a_table_that_must_not_be_created_is_not(tmp_path: Path) -> None:
    path, refuses = tmp_path / "t", False

    def check() -> None:
        if refuses:
            raise PenstockError("no")

    table = Table(path, "rows", "q1", check_new=check)
    assert not has_table(path)
    assert table.write(0, rows("a"), 1) == 1
    assert has_table(path)
    refuses = True
    assert table.write(1, rows("b"), 1) == 1
    shutil.rmtree(path)
    for target in (table, Table(path, "rows", "q1", check_new=check)):
        with pytest.raises(PenstockError, match=r"^no$"):
            target.write(2, rows("c"), 1)
    assert not has_table(path)
    assert [each for each in path.rglob("*") if not each.is_dir()] == []


@pytest.mark.usefixtures("segments")
def test_a_crash_while_commits_are_put_together_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_batches(tmp_path, range(5))

    def kill(path: Path, text: str) -> None:
        write_text(path, text)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(table_module, "write_text", kill)
        with pytest.raises(KeyboardInterrupt):
            write_batches(tmp_path, [5])
    assert (closed(tmp_path), len(names(tmp_path))) == ([[0, 1, 2]], 6)
    assert state(tmp_path) == of_batches(range(6))
    write_batches(tmp_path, range(5, 12))
    assert state(tmp_path) == of_batches(range(12))
    assert sorted(batch for each in closed(tmp_path) for batch in each) == list(range(closed(tmp_path)[-1][-1] + 1))
    assert len(names(tmp_path)) < 6


@pytest.mark.usefixtures("segments")
def test_the_first_commit_of_a_batch_counts_if_it_is_in_a_segment(tmp_path: Path) -> None:
    """A run that was paused before its commit, and has lost its lease."""
    paused = Table(tmp_path, "rows", "q1")
    write_batches(tmp_path, range(8))
    assert paused.write(1, rows("late"), 99) == 2
    # The rows of the segment's commit are not removed, and those of the paused run are.
    assert "rows-1.json" in names(tmp_path)
    assert [path.name for path in files(tmp_path)] == listed(tmp_path) == [f"part-rows{n}.parquet" for n in range(8)]
    assert state(tmp_path) == of_batches(range(8))
    write_batches(tmp_path, range(8, 14))
    assert "rows-1.json" not in names(tmp_path)
    assert state(tmp_path) == of_batches(range(14))


@pytest.mark.usefixtures("segments")
def test_many_commits_of_an_older_version_are_put_together_in_several_batches(tmp_path: Path) -> None:
    for batch in range(20):
        commit(tmp_path, batch, f"writer=rows/batch={batch}/part-rows{batch}.parquet")
    before = state(tmp_path)
    write_batches(tmp_path, [20])
    assert closed(tmp_path) == [[0, 1, 2], [3, 4, 5]]
    write_batches(tmp_path, [21, 22])
    assert len(names(tmp_path)) == 20 + 3 - 3 * 2 * 3
    assert state(tmp_path)[:20] == before


@pytest.mark.usefixtures("segments")
def test_no_batch_fails_because_old_commits_cannot_be_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, _text: str) -> None:
        raise StorageError("the disk is full", path=str(path))

    with monkeypatch.context() as broken:
        broken.setattr(table_module, "write_text", full)
        write_batches(tmp_path, range(7))
    # Not for each batch: each attempt may read thousands of files.
    assert caplog.text.count("old commits of table") == 1
    assert (len(names(tmp_path)), closed(tmp_path)) == (7, [])
    with (tmp_path / "_commits" / "lock").open("a", encoding="utf-8") as other:
        # Rows are being deleted.
        fcntl.flock(other, fcntl.LOCK_EX)
        write_batches(tmp_path, [7])
        assert closed(tmp_path) == []
    write_batches(tmp_path, [8])
    assert closed(tmp_path) == [[0, 1, 2], [3, 4, 5]]
    assert state(tmp_path) == of_batches(range(9))


@pytest.mark.usefixtures("segments")
def test_rows_are_deleted_from_files_and_segments(tmp_path: Path) -> None:
    table = Table(tmp_path, "rows", "q1")
    for batch in range(8):
        attempt = table.new_attempt(batch)
        assert isinstance(attempt, Path)
        attempt.mkdir(parents=True)
        write_file(pa.table({"n": [batch, 100 + batch]}), attempt / f"part-{batch}.parquet")
        assert table.commit(batch, attempt, [f"part-{batch}.parquet"], 2) == 2
    assert closed(tmp_path) == [[0, 1, 2]]
    gone = {1, 101, 2, 7}
    assert delete_rows(tmp_path, lambda row: row["n"] in gone) == 4
    left = [n for path in files(tmp_path) for n in read_file(path)["n"].to_pylist()]
    assert left == [n for batch in range(8) for n in (batch, 100 + batch) if n not in gone]
    assert [(each.batch, each.rows, each.deleted) for each in commits(tmp_path) if each.deleted] == [
        (1, 2, 2),
        (2, 2, 1),
        (7, 2, 1),
    ]
    assert len(listed(tmp_path)) == 7
    assert delete_rows(tmp_path, lambda row: row["n"] in gone) == 0
    assert delete_rows(tmp_path / "none", lambda _: True) == 0


DELETION = ("rename", "_write_segment", "write_json", "unlink")
"""Steps of a deletion: a new file appears, commits are replaced, old files are removed."""


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("step", DELETION)
@pytest.mark.parametrize("is_after", [False, True])
def test_a_deletion_that_was_killed_leaves_whole_batches_and_the_next_one_removes_the_rest(
    step: str, is_after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {1, 101, 2, 6, 7}
    expected = [n for batch in range(8) for n in (batch, 100 + batch) if n not in gone]

    def killing(function: Callable[..., object], ends_at: int, calls: list[int]) -> Callable[..., object]:
        def called(*args: Any, **options: Any) -> object:
            calls.append(1)
            if len(calls) == ends_at and not is_after:
                raise KeyboardInterrupt
            done = function(*args, **options)
            if len(calls) == ends_at:
                raise KeyboardInterrupt
            return done

        return called

    ended = 0
    for ends_at in itertools.count(1):
        place, calls = tmp_path / str(ends_at), list[int]()
        table = Table(place, "rows", "q1")
        for batch in range(8):
            attempt = table.new_attempt(batch)
            assert isinstance(attempt, Path)
            attempt.mkdir(parents=True)
            write_file(pa.table({"n": [batch, 100 + batch]}), attempt / f"part-{batch}.parquet")
            table.commit(batch, attempt, [f"part-{batch}.parquet"], 2)
        owner: Any = Path if step in ("rename", "unlink") else table_module
        with monkeypatch.context() as broken:
            broken.setattr(owner, step, killing(getattr(owner, step), ends_at, calls))
            try:
                delete_rows(place, lambda row: row["n"] in gone)
            except KeyboardInterrupt:
                ended += 1
        # The rows of each batch are those before the deletion, or those after it.
        for commit in commits(place):
            found = {n for name in commit.files for n in read_file(place / name)["n"].to_pylist()}
            both = {commit.batch, 100 + commit.batch}
            assert found in (both, both - gone)
            assert commit.rows - commit.deleted == len(found)
        deleted = sum(commit.deleted for commit in commits(place))
        assert delete_rows(place, lambda row: row["n"] in gone) == len(gone) - deleted
        assert [n for path in files(place) for n in read_file(path)["n"].to_pylist()] == expected
        assert sorted(place.rglob("*.parquet*")) == sorted(map(Path, files(place)))
        if len(calls) < ends_at:
            break
    assert ended >= {"_write_segment": 1, "write_json": 2}.get(step, 3)


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


def listed(table: Path) -> list[str]:
    """The files that a reader of directories finds; those whose names begin with _ or . are hidden."""
    return sorted(
        path.name
        for path in table.rglob("*.parquet")
        if not any(part[0] in "_." for part in path.relative_to(table).parts)
    )


def test_files_of_a_failed_attempt_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was killed before its commit; the next attempt removes them for readers of directories."""
    table = Table(tmp_path, "rows", "q1")
    with monkeypatch.context() as killed:

        def kill(*_: object) -> bool:
            raise KeyboardInterrupt

        killed.setattr(table_module, "create_json", kill)
        with pytest.raises(KeyboardInterrupt):
            table.write(0, rows("half"), 1)
    assert (files(tmp_path), listed(tmp_path)) == ([], ["part-half.parquet"])
    assert Table(tmp_path, "rows", "q1").write(0, rows("a"), 1) == 1
    assert ([path.name for path in files(tmp_path)], listed(tmp_path)) == (["part-a.parquet"], ["part-a.parquet"])


def test_a_run_that_lost_its_lease_between_files_and_commit_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that took over has committed the batch, and removed the files of the paused one."""

    def paused(path: Path, value: Mapping[str, object]) -> bool:
        monkeypatch.setattr(table_module, "create_json", create_json)
        assert Table(tmp_path, "rows", "q1").write(7, rows("new"), 2) == 2
        return create_json(path, value)

    table = Table(tmp_path, "rows", "q1")
    monkeypatch.setattr(table_module, "create_json", paused)
    assert table.write(7, rows("old"), 5) == 2
    assert ([path.name for path in files(tmp_path)], listed(tmp_path)) == (["part-new.parquet"], ["part-new.parquet"])
