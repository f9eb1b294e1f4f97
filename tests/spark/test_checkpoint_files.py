"""Files of a checkpoint are on the disk when Spark has written them: contents before the name, then the name."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from tests.spark.power_loss import Unsynced, recorded
from tests.spark.processes import until

STREAMING = "org.apache.spark.sql.execution.streaming"


@contextmanager
def recording(pid: int, log: Path, *more: str) -> Iterator[None]:
    """Record the calls of a running process while the context is open; ``more`` are options of strace."""
    said = log.with_suffix(".stderr")
    options = [*(option for option in recorded(log) if option != "--seccomp-bpf"), *more]
    with said.open("wb") as errors:
        strace = subprocess.Popen([*options, "-p", str(pid)], stderr=errors)
    try:
        until(lambda: "attached" in said.read_text() or strace.poll() is not None, "strace")
        if strace.poll() is not None:
            pytest.skip(f"strace may not trace here: {said.read_text().strip()}")
        yield
    finally:
        strace.send_signal(signal.SIGINT)
        strace.wait()


class Checkpoint:
    """The files of a checkpoint in ``root``, as Spark writes them."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.java: Any = spark.sparkContext._jvm
        self.settings: Any = spark._jsparkSession.sessionState().newHadoopConf()
        self._root = root
        manager = getattr(self.java, f"{STREAMING}.checkpointing.CheckpointFileManager")
        self.manager: Any = manager.create(self.path(), self.settings)

    def path(self, *names: str) -> Any:
        return self.java.org.apache.hadoop.fs.Path(str(self._root.joinpath(*names)))

    def write(self, *names: str, overwrite: bool) -> None:
        output = self.manager.createAtomic(self.path(*names), overwrite)
        output.write(ord("a"))
        output.close()

    @property
    def pid(self) -> int:
        return int(self.java.java.lang.ProcessHandle.current().pid())


def test_a_file_of_a_checkpoint_survives_a_power_loss_once_it_is_written(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "state"
    checkpoint = Checkpoint(spark, root)
    java, path, write = checkpoint.java, checkpoint.path, checkpoint.write
    with recording(checkpoint.pid, tmp_path / "strace"):
        checkpoint.manager.mkdirs(path("own", "offsets"))
        write("own", "offsets", "0", overwrite=False)
        # A power loss may have left the checksum of a plan whose name was lost.
        (root / "own" / "offsets" / ".1.crc").write_bytes(b"older")
        write("own", "offsets", "1", overwrite=False)
        for _ in range(2):
            write("own", "1.changelog", overwrite=True)
            (root / "own" / ".2.changelog.crc").write_bytes(b"older")
            write("own", "2.changelog", overwrite=True)
        files = path().getFileSystem(checkpoint.settings)
        files.copyFromLocalFile(path("own", "offsets", "0"), path("own", "SSTs", "0.sst"))
        for names in (("shared", "kept"), ("x.transient",), ("shared", "x.transient")):
            checkpoint.manager.mkdirs(path(*names))
            write(*names, "0", overwrite=True)
        # A query that is stopped has its thread interrupted, which Spark does not report as a failure.
        java.java.lang.Thread.currentThread().interrupt()
        with pytest.raises(Py4JJavaError, match="ClosedByInterruptException") as interrupted:
            write("own", "offsets", "2", overwrite=False)
        assert java.java.lang.Thread.interrupted()
    execution = getattr(java, f"{STREAMING}.runtime.StreamExecution")
    assert execution.isInterruptionException(interrupted.value.java_exception, spark._jsparkSession.sparkContext())
    assert not (root / "own" / "offsets" / "2").exists()
    unsynced = Unsynced(root, tmp_path / "strace")
    transient = {"shared/x.transient/0"}
    assert {os.path.relpath(name, root) for name in unsynced.names} == {"shared/x.transient", *transient}
    assert {os.path.relpath(name, root) for name in unsynced.contents} == transient
    assert {str(root / "own" / "SSTs" / name) for name in ("0.sst", ".0.sst.crc")} <= set(unsynced.synced)
    # Of each file once the contents, and once the directory.
    plans = str(root / "own" / "offsets")
    written = {
        name: count for name, count in unsynced.synced.items() if name.startswith((f"{plans}/.0.", f"{plans}/.1."))
    }
    assert (list(written.values()), unsynced.synced[plans]) == ([1, 1], 2)
    # Also an interface of Hadoop that verifies checksums reads what replaced a file of an older version.
    assert not list((root / "own").rglob(".[12]*.crc"))
    for names in ("offsets", "1"), ("2.changelog",):
        stream = files.open(path("own", *names))
        assert (stream.read(), stream.close()) == (ord("a"), None)
    with pytest.raises(Py4JJavaError, match="FileAlreadyExists"):
        write("own", "offsets", "1", overwrite=False)


def test_a_file_system_without_links(spark: SparkSession, tmp_path: Path) -> None:
    """Files are renamed: a copy would have its name before its contents."""
    root = tmp_path / "state"
    checkpoint = Checkpoint(spark, root)
    checkpoint.manager.mkdirs(checkpoint.path("offsets"))
    with recording(checkpoint.pid, tmp_path / "strace", "-e", "inject=link,linkat:error=EOPNOTSUPP"):
        checkpoint.write("offsets", "0", overwrite=False)
        with pytest.raises(Py4JJavaError, match="FileAlreadyExists"):
            checkpoint.write("offsets", "0", overwrite=False)
    calls = (tmp_path / "strace").read_text()
    assert calls.count("EOPNOTSUPP") == 2
    assert "rename" in calls
    unsynced = Unsynced(root, tmp_path / "strace")
    assert unsynced.names == unsynced.contents == set()
    assert unsynced.synced[str(root / "offsets")] == 1
    assert (root / "offsets" / "0").read_bytes() == b"a"
