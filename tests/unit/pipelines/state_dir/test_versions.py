"""Versions of a pipeline's file: which one a run starts with, after a crash at any point of a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import PenstockError, RefusedError, StorageError
from penstock.pipelines.spec import loader
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.versions import (
    CurrentVersion,
    PipelineFile,
    current_version,
    end_trial,
    file_of,
    put_into_operation,
    register,
    replaced_by,
    store_version,
    stored_version,
)
from penstock.spark.files.object_storage import StoragePath, storage_path
from tests.object_storage import ObjectStorage

FILE = """\
name: water
source: {topics: [flow]}
statestore: {broker: "mqtt://${file:host.txt}:1883"}
steps:
  - name: parsed
    parse: {schema_file: columns.ddl}
  - name: judged
    python: {file: ../code/judge.py, schema: "hot BOOLEAN"}
sinks:
  - name: rows
    table: {path: lake/rows}
"""
FIRST, SECOND, THIRD = (f"00000000000000{n}:00001:node" for n in "123")


@pytest.fixture
def state(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    if getattr(request, "param", "directory") == "directory":
        return tmp_path / "state"
    storage: ObjectStorage = request.getfixturevalue("object_storage")
    return storage_path(f"{storage.url}/state")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., PipelineFile]:
    """Writes a pipeline file, and the files that it names, and returns what is stored of them."""
    home, code = tmp_path / "home", tmp_path / "code"
    home.mkdir()
    code.mkdir()
    (home / "host.txt").write_text("reader\n")

    def make(columns: str = "celsius DOUBLE", text: str = FILE) -> PipelineFile:
        (home / "columns.ddl").write_text(columns)
        (code / "judge.py").write_text("def transform(batch): ...\n")
        (home / "p.yaml").write_text(text)
        return file_of(home / "p.yaml", loader.load(home / "p.yaml"))

    return make


def test_a_version_is_loaded_with_the_files_as_they_were(
    state: StoragePath, write: Callable[..., PipelineFile]
) -> None:
    file = write()
    number = store_version(state, file)
    later = write("other STRING")
    assert later.digest != file.digest
    found = stored_version(state, number)
    assert found == file
    pipeline = found.load()
    assert pipeline.steps[0].parse is not None
    assert pipeline.steps[0].parse.columns == "celsius DOUBLE"
    assert pipeline.steps[1].python is not None
    assert "transform" in pipeline.steps[1].python.code
    # The stored text has no secret.
    assert "reader" not in layout.read_bytes(layout.applied(state) / f"{number}.json").decode()
    with pytest.raises(StorageError, match="version 7 of the pipeline does not exist"):
        stored_version(state, 7)


def test_a_run_registers_its_file_and_a_changed_file_is_a_new_version(
    state: StoragePath, write: Callable[..., PipelineFile]
) -> None:
    first = write()
    assert register(state, first, FIRST, "run1") == CurrentVersion(version=1, token=FIRST, run="run1")
    assert register(state, first, SECOND, "run2") == CurrentVersion(version=1, token=SECOND, run="run2")
    changed = register(state, write("n INT"), THIRD, "run3")
    assert (changed.version, changed.over, changed.trial) == (2, 1, False)
    # Without `apply`, the previous file is not replaced: a run with it takes it back.
    assert replaced_by(state, first) is None


def begun(state: StoragePath, write: Callable[..., PipelineFile]) -> tuple[PipelineFile, PipelineFile]:
    first, second = write(), write("n INT")
    register(state, first, FIRST, "run1")
    assert store_version(state, second) == 2
    return first, second


def switched(state: StoragePath) -> None:
    put_into_operation(state, 2, token=FIRST, run="run1", trial=True)


def proved(state: StoragePath) -> None:
    switched(state)
    end_trial(state, token=FIRST, run="run1", works=True)


def rolled_back(state: StoragePath) -> None:
    switched(state)
    end_trial(state, token=FIRST, run="run1", works=False)


@pytest.mark.parametrize("state", ["directory", "bucket"], indirect=True)
@pytest.mark.parametrize(
    ("crashed", "version", "trial", "replaced"),
    [
        (lambda _: None, 1, False, None),
        (switched, 2, True, 2),
        (proved, 2, False, 2),
        (rolled_back, 1, False, None),
    ],
    ids=["stored", "switched", "proved", "rolled back"],
)
def test_after_a_crash_a_run_with_the_old_file_starts_with_the_version_in_operation(
    crashed: Callable[[StoragePath], None],
    version: int,
    trial: bool,
    replaced: int | None,
    state: StoragePath,
    write: Callable[..., PipelineFile],
) -> None:
    first, second = begun(state, write)
    crashed(state)
    assert replaced_by(state, first) == replaced
    file = first if replaced is None else stored_version(state, replaced)
    found = register(state, file, SECOND, "run2")
    assert (found.version, found.trial, found.token, found.run) == (version, trial, SECOND, "run2")
    assert (replaced_by(state, second) == 1) == (crashed is rolled_back)
    # The run that was believed dead changes nothing any more.
    for change in (switched, lambda where: end_trial(where, token=FIRST, run="run1", works=True)):
        with pytest.raises(RefusedError, match="a later run has the lease"):
            change(state)
    assert current_version(state) == found


def test_a_roll_back_leaves_the_version_before_as_it_was(
    state: StoragePath, write: Callable[..., PipelineFile]
) -> None:
    begun(state, write)
    proved(state)
    assert store_version(state, write("m INT")) == 3
    put_into_operation(state, 3, token=FIRST, run="run1", trial=True)
    found = end_trial(state, token=FIRST, run="run1", works=False)
    assert (found.version, found.over, len(found.replaced)) == (2, 1, 2)
    # A roll back by hand exchanges the two.
    found = put_into_operation(state, 1, token=FIRST, run="run1")
    assert (found.version, found.over) == (1, 2)
    assert replaced_by(state, write()) is None


def test_a_run_that_starts_during_a_change_is_refused(state: StoragePath, write: Callable[..., PipelineFile]) -> None:
    first, _ = begun(state, write)
    proved(state)
    with pytest.raises(PenstockError, match="version 2 of the pipeline was applied while this run started"):
        register(state, first, SECOND, "run2")


def test_a_pointer_of_another_format_is_an_error(state: StoragePath) -> None:
    layout.write_json(layout.applied(state) / "current.json", {"version": 1})
    with pytest.raises(StorageError, match="does not name a version"):
        current_version(state)
