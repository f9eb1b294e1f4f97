"""One process per data directory, a format that can be told, and errors an operator can act on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import StorageError, UnavailableError
from penstock.node.data_dir import ADDRESSES, DataDirectory, announced_broker, running_broker, running_node
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment


def test_a_new_directory_is_made_locked_and_marked(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with DataDirectory(path) as directory:
        assert json.loads((path / "format.json").read_text()) == {"format": 1}
        assert (path / "lock").read_text() == f"{os.getpid()}\n"
        assert (directory.statestore, directory.tube) == (path / "statestore", path / "tube")
        with pytest.raises(UnavailableError, match=f"is in use by process {os.getpid()}") as caught:
            DataDirectory(path)
        assert "--data-dir" in str(caught.value.hint)
    DataDirectory(path).close()


def test_data_files_are_not_accessible_to_other_users(tmp_path: Path) -> None:
    path = tmp_path / "data"
    umask = os.umask(0)
    try:
        with DataDirectory(path) as directory:
            environment(directory.statestore)
    finally:
        os.umask(umask)
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in (path, *directory.statestore.iterdir())} == {
        "data": 0o750,
        "data.mdb": 0o640,
        "lock.mdb": 0o640,
    }


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.node.data_dir import DataDirectory;"
        "d = DataDirectory(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UnavailableError, match=f"process {process.pid}"):
            DataDirectory(tmp_path)
        process.kill()
    DataDirectory(tmp_path).close()


def test_a_running_node_is_found_by_its_lock(tmp_path: Path) -> None:
    with DataDirectory(tmp_path) as directory:
        addresses = {"http": "127.0.0.1:1", "tube_broker_http": "127.0.0.1:2"}
        directory.announce(addresses)
        assert (running_node(tmp_path), running_broker(tmp_path)) == (addresses, None)
        with announced_broker(tmp_path, "127.0.0.1:3"):
            assert (running_node(tmp_path), running_broker(tmp_path)) == (None, "127.0.0.1:3")
    (tmp_path / ADDRESSES).write_text('{"http": "127.0.0.1:1"}')
    assert running_node(tmp_path) is None
    with DataDirectory(tmp_path):
        assert running_node(tmp_path) is None, "the addresses are those of a killed node"


def test_a_lock_without_a_known_holder_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    DataDirectory(tmp_path).close()
    monkeypatch.setattr(os, "pwrite", full)
    with DataDirectory(tmp_path), pytest.raises(UnavailableError, match="in use by another process"):
        DataDirectory(tmp_path)


def test_a_directory_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(StorageError, match=r"contains 'thesis.txt' and no format.json"):
        DataDirectory(tmp_path)
    assert not (tmp_path / "format.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 2}', "has format 2, this version knows 1"),
        ('{"format": "x"}', "has format 'x', this version knows 1"),
        ("{}", "has no format version"),
        ("[]", "has no format version"),
        ('{"format": 1, "environments": 4}', "has no format version"),
        ("{", "has no format version"),
    ],
)
def test_an_unknown_format_is_left_alone(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "format.json").write_text(text)
    with pytest.raises(StorageError, match=message):
        DataDirectory(tmp_path)
    assert (tmp_path / "format.json").read_text() == text
    (tmp_path / "format.json").write_text('{"format": 1}')
    DataDirectory(tmp_path).close()


def environment(path: Path) -> None:
    made = LmdbEnvironment(path, "keys", "store", ["meta"], schema=1, durability=Durability.MEMORY)
    made.open(lambda _: None)
    made.close()


@pytest.mark.parametrize("whole", [False, True], ids=["the file", "its directory"])
def test_a_lost_environment_is_no_new_one(tmp_path: Path, *, whole: bool) -> None:
    with DataDirectory(tmp_path) as directory:
        master = directory.tube_master
        environment(directory.mqtt)
        environment(master)
        directory.keep([master, directory.mqtt])
    if whole:
        shutil.rmtree(master)
    else:
        (master / "data.mdb").unlink()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"has lost tube/master/data\.mdb") as caught:
            DataDirectory(tmp_path)
    assert not (master / "data.mdb").exists()
    assert f"remove 'tube/master' from the list in {tmp_path / 'format.json'}" in str(caught.value.hint)
    # As the operator is told.
    (tmp_path / "format.json").write_text('{"format": 1, "environments": ["mqtt"]}')
    with DataDirectory(tmp_path) as directory:
        environment(master)
        directory.keep([master, directory.mqtt])
    assert json.loads((tmp_path / "format.json").read_text())["environments"] == ["mqtt", "tube/master"]


def test_environments_are_recorded_once_in_the_format_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A directory of an earlier version, which notes nothing.
    (tmp_path / "format.json").write_text('{"format": 1}')
    with DataDirectory(tmp_path) as directory:
        environment(directory.mqtt)
        directory.keep([directory.mqtt])
    text = (tmp_path / "format.json").read_text()
    assert json.loads(text) == {"format": 1, "environments": ["mqtt"]}
    with DataDirectory(tmp_path) as directory:
        monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("it was known"))
        directory.keep([directory.mqtt])
        monkeypatch.undo()
        # The state store may have the directory for itself in between.
        environment(directory.statestore)
        directory.keep([directory.statestore])
    assert json.loads((tmp_path / "format.json").read_text())["environments"] == ["mqtt", "statestore"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"cannot be used") as caught:
        DataDirectory(tmp_path / "file" / "data")
    assert caught.value.why == f"{tmp_path / 'file'} is a file"


def test_a_directory_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(tmp_path / "lock"))

    # The tests may run as root, whom no mode bits stop.
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="Permission denied") as caught:
        DataDirectory(tmp_path)
    assert "--data-dir" in str(caught.value.hint)
