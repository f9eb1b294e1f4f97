"""The lock of a redrive: it ends with its process, and is kept by one that is paused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.pipelines.ledger.redrive_lock import redriving
from penstock.spark.files.object_storage import ObjectPath, storage_path
from tests.object_storage import ObjectStorage

HOLD = """
import sys
from pathlib import Path
from penstock.pipelines.ledger.redrive_lock import redriving

with redriving(Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_paused_redrive_keeps_the_lock_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with redriving(tmp_path / "none"):
        assert not (tmp_path / "none").exists()
    table = tmp_path / "dead"
    table.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, table], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        os.kill(other.pid, signal.SIGSTOP)
        with (
            pytest.raises(PenstockError, match=rf"process {other.pid} on \S+ since 2\S+ holds the lock"),
            redriving(table),
        ):
            pass
        other.kill()
        other.wait(60)
        with redriving(table):
            pass
    with redriving(table):
        pass


def test_a_table_in_a_bucket_has_an_object_during_a_redrive(object_storage: ObjectStorage) -> None:
    table = storage_path(f"{object_storage.url}/dead", object_storage.endpoint)
    assert isinstance(table, ObjectPath)
    held = rf"process {os.getpid()} on \S+ since 2\S+ holds the lock"
    with redriving(table), pytest.raises(PenstockError, match=held) as refused, redriving(table):
        pass
    assert refused.value.hint is not None
    assert f"if that process was killed, remove {table}/_sending/lock" in refused.value.hint
    with redriving(table):
        pass
    lock = table / "_sending" / "lock"
    assert not lock.exists()
    # The user has removed it although the redrive still runs: it leaves that of the next one.
    with redriving(table):
        lock.write_bytes(b"another")
    assert lock.read_bytes() == b"another"
