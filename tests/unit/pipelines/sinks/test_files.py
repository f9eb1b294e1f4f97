"""Files for other programs: each batch is one file, whole and once, after crashes, power losses and lost leases."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.sinks import files as module
from penstock.pipelines.sinks.files import FileBatches
from penstock.pipelines.spec.sinks import FilesSink
from penstock.pipelines.state_dir import layout
from penstock.spark.files.object_storage import ObjectPath, StoragePath, storage_path
from tests.object_storage import ObjectStorage
from tests.spark.power_loss import Unsynced
from tests.unit.pipelines.files import parse

QUERY = "0f3e9a1c-0000"


def files_of(path: StoragePath, state: StoragePath, query: str = QUERY) -> FileBatches:
    return FileBatches(path, ("p", "s"), query, state, ".json")


def text(number: int) -> Callable[[StoragePath], None]:
    """Return a function that writes one file, as Spark does, with ``number``."""

    def write(attempt: StoragePath) -> None:
        assert isinstance(attempt, Path), "Spark may not have the jars of s3a"
        attempt.mkdir(parents=True)
        (attempt / "_SUCCESS").touch()
        (attempt / "part-0.json").write_text(str(number))

    return write


def seen(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(path.glob("*.json"))}


def test_a_batch_is_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    batches = files_of(out, tmp_path / "state")
    assert batches.write(0, 2, text(1)) == 2
    assert batches.write(1, 0, text(2)) == 0
    assert batches.write(2, 1, text(3)) == 1
    assert seen(out) == {"p-s-0f3e9a1c-0000000000.json": "1", "p-s-0f3e9a1c-0000000002.json": "3"}
    assert list((out / ".penstock").iterdir()) == []


def test_a_repeated_batch_makes_no_second_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    files_of(out, tmp_path / "state").write(0, 2, text(1))
    # A program has taken the file away, and a lookup has another value now.
    (out / "p-s-0f3e9a1c-0000000000.json").unlink()
    assert files_of(out, tmp_path / "state").write(0, 3, text(2)) == 2
    assert files_of(out, tmp_path / "state").write(0, 0, text(2)) == 2
    assert seen(out) == {}


def test_another_checkpoint_replaces_no_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    files_of(out, tmp_path / "state").write(0, 1, text(1))
    files_of(out, tmp_path / "state", "1111aaaa-0000").write(0, 1, text(2))
    assert seen(out) == {"p-s-0f3e9a1c-0000000000.json": "1", "p-s-1111aaaa-0000000000.json": "2"}


def test_a_run_without_its_lease_makes_no_file(tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "state"

    def write(attempt: StoragePath) -> None:
        # The run is paused here, and another one writes the batch and the next one.
        later = files_of(out, state)
        assert later.write(0, 1, text(1)) == 1
        assert later.write(1, 1, text(2)) == 1
        (out / "p-s-0f3e9a1c-0000000000.json").unlink()
        text(3)(attempt)

    assert files_of(out, state).write(0, 5, write) == 1
    assert seen(out) == {"p-s-0f3e9a1c-0000000001.json": "2"}
    assert list((out / ".penstock").iterdir()) == []


def test_notes_of_old_batches_and_other_checkpoints_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_NOTES", 3)
    notes = layout.file_batches(tmp_path / "state", "s")
    files_of(tmp_path / "out", tmp_path / "state", "old").write(9, 1, text(0))
    batches = files_of(tmp_path / "out", tmp_path / "state")
    for batch in range(6):
        batches.write(batch, 1, text(batch))
    assert sorted(path.name for path in notes.iterdir()) == [f"{QUERY}-{batch}.json" for batch in (3, 4, 5)]


def test_an_attempt_without_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="sink 's': batch 0 was written as 0 files instead of one"):
        files_of(tmp_path / "out", tmp_path / "state").write(0, 1, lambda path: Path(str(path)).mkdir(parents=True))


def test_a_file_appears_although_the_path_was_changed_after_a_crash(tmp_path: Path) -> None:
    before, after, state = tmp_path / "before", tmp_path / "after", tmp_path / "state"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(FileBatches, "_place", crash)
        with pytest.raises(PowerLoss):
            files_of(before, state).write(0, 2, text(1))
    assert files_of(after, state).write(0, 3, text(2)) == 2
    assert files_of(after, state).write(1, 1, text(3)) == 1
    # The batch was begun for this directory.
    assert seen(before) == {"p-s-0f3e9a1c-0000000000.json": "1"}
    assert seen(after) == {"p-s-0f3e9a1c-0000000001.json": "3"}


def test_failed_attempts_do_not_fill_the_disk(tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "state"

    def broken(attempt: StoragePath) -> None:
        text(0)(attempt)
        raise StorageError("no space left", path="out")

    for fault in (broken, text(0)):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(module, "first_json", fail_to_write)
            for _ in range(3):
                with pytest.raises(StorageError):
                    files_of(out, state).write(0, 1, fault)
    # Without a note an attempt may be the file of the batch: the answer to the request may be lost.
    assert len(list((out / ".penstock").iterdir())) == 3
    # Another sink and another pipeline have attempts in this directory.
    others = [FileBatches(out, ("p", "s-0"), QUERY, state, ".json"), files_of(out, tmp_path / "other", "1111-0000")]
    for other in others:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(FileBatches, "_place", crash)
            with pytest.raises(PowerLoss):
                other.write(0, 1, text(4))
    assert files_of(out, state).write(0, 1, text(1)) == 1
    assert len(list((out / ".penstock").iterdir())) == 2
    for other in others:
        assert other.write(0, 1, text(5)) == 1
    assert sorted(seen(out).values()) == ["1", "4", "4"]
    assert list((out / ".penstock").iterdir()) == []


def fail_to_write(*_: object) -> None:
    raise StorageError("no space left", path="state")


class PowerLoss(BaseException):
    """The machine has lost power."""


def crash(*_: object) -> None:
    raise PowerLoss


def lost_at(root: Path, last: int | None) -> tuple[int, list[str]]:
    """Write three batches and take their files away, with a power loss at the step ``last``; then write them again.

    Returns the number of steps, and the contents of the files that were taken.
    """
    out, state = root / "out", root / "state"
    root.mkdir()
    unsynced = Unsynced(root)
    taken: list[str] = []
    moved: dict[str, str] = {}
    steps = 0

    def step() -> None:
        nonlocal steps
        if steps == last:
            raise PowerLoss
        steps += 1

    def take() -> None:
        for file in sorted(out.glob("*.json")):
            taken.append(file.read_text())
            file.unlink()
            unsynced.names.discard(str(file))

    def named(call: Callable[..., Any], *, is_directory: bool) -> Callable[..., Any]:
        def made(*given: Any, **options: Any) -> None:
            step()
            call(*given, **options)
            path = given[0] if is_directory else given[1]
            unsynced.name(str(path), None if is_directory else str(given[0]))
            if call is os_rename:
                moved[str(path)] = str(given[0])

        return made

    def synced(descriptor: int) -> None:
        step()
        unsynced.sync(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    os_rename = os.rename
    with pytest.MonkeyPatch.context() as patches:
        for name in ("link", "replace", "rename", "mkdir"):
            patches.setattr(os, name, named(getattr(os, name), is_directory=name == "mkdir"))
        patches.setattr(os, "fsync", synced)
        with suppress(PowerLoss):
            for batch in range(3):
                files_of(out, state).write(batch, 1, text(batch))
                take()
    for path, source in moved.items():
        # A file that was moved to another directory has one of its names, not none.
        if path in unsynced.names and Path(path).exists():
            Path(path).rename(source)
    unsynced.lose()
    take()
    # The ledger has the batches that were acknowledged; the last one is repeated.
    for batch in range(max(0, len(taken) - 1), 3):
        assert files_of(out, state).write(batch, 1, text(batch)) == 1
        take()
    return steps, taken


def test_after_a_power_loss_at_any_step_each_batch_was_one_file(tmp_path: Path) -> None:
    steps, taken = lost_at(tmp_path / "none", None)
    assert taken == ["0", "1", "2"]
    for last in range(steps):
        _, taken = lost_at(tmp_path / str(last), last)
        assert Counter(taken) == Counter(["0", "1", "2"]), last


def test_a_file_in_a_bucket_appears_once(object_storage: ObjectStorage, tmp_path: Path) -> None:
    out = storage_path(f"{object_storage.url}/out")
    assert isinstance(out, ObjectPath)
    name = "p-s-0f3e9a1c-0000000000.json"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ObjectPath, "write_blocks", crash)
        with pytest.raises(PowerLoss):
            files_of(out, tmp_path / "state").write(0, 2, text(1))
    assert out.names() == []
    # The attempt that was noted is the file, not that of the repeated batch.
    assert files_of(out, tmp_path / "state").write(0, 3, text(2)) == 2
    assert out.names() == [name]
    assert (out / name).read_bytes() == b"1"
    (out / name).unlink(missing_ok=True)
    assert files_of(out, tmp_path / "state").write(0, 3, text(2)) == 2
    assert out.names() == []


def test_a_file_appears_in_a_directory_that_replaces_a_bucket(object_storage: ObjectStorage, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ObjectPath, "write_blocks", crash)
        with pytest.raises(PowerLoss):
            files_of(storage_path(f"{object_storage.url}/out"), tmp_path / "state").write(0, 2, text(1))
    assert files_of(tmp_path / "out", tmp_path / "state").write(0, 3, text(2)) == 2
    assert seen(tmp_path / "out") == {"p-s-0f3e9a1c-0000000000.json": "1"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"path": "hdfs://h/x"}, "expected a directory or s3://bucket/key, found 'hdfs://h/x'"),
        ({"path": "s3://"}, "bucket"),
        ({"path": "out", "region": "eu-west-1"}, "expected endpoint and region only with `path: s3://bucket/key`"),
        ({"path": "out", "header": False}, "expected header and delimiter only with `format: csv`"),
        *(
            ({"path": "out", "format": "csv", "delimiter": each}, "expected a delimiter other than")
            for each in '"\\\r\n'
        ),
        ({"path": "out", "columns": ["a", "A"]}, "expected different columns, in any case"),
    ],
)
def test_wrong_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        FilesSink(**options)


def test_columns_without_a_form_in_csv_are_refused_before_the_start() -> None:
    head = 'name: p\nsource: {topics: [t]}\nsteps: [{name: a, parse: {schema: "x INT, tags ARRAY<STRING>"}}]\n'
    sink = "sinks: [{name: s, files: {path: out, format: csv%s}}]\n"
    with pytest.raises(ConfigError, match=r"tags is ARRAY<STRING>: convert it, or use `format: json`"):
        parse(head + sink % "")
    assert parse(head + sink % ", columns: [x]").sinks[0].files is not None


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("out", True),
        ("./out/*.json", True),
        ("*/p-*", True),
        ("out/*.csv", False),
        ("in/*.json", False),
        ("out/*/*.json", False),
    ],
)
def test_a_pipeline_that_would_read_what_it_writes_is_refused(source: str, *, reads: bool) -> None:
    text = f"""
name: p
source: {{format: files, path: "{source}"}}
steps: [{{name: a, parse: {{schema: x INT}}}}]
sinks: [{{name: s, files: {{path: out}}}}]
"""
    if not reads:
        assert parse(text).sinks[0].files is not None
        return
    with pytest.raises(ConfigError, match="expected another directory: the pipeline would read what it writes"):
        parse(text)
