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
def recording(pid: int, log: Path) -> Iterator[None]:
    """Record the calls of a running process while the context is open."""
    said = log.with_suffix(".stderr")
    options = [option for option in recorded(log) if option != "--seccomp-bpf"]
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


def test_a_file_of_a_checkpoint_survives_a_power_loss_once_it_is_written(spark: SparkSession, tmp_path: Path) -> None:
    java: Any = spark.sparkContext._jvm
    settings: Any = spark._jsparkSession.sessionState().newHadoopConf()
    root = tmp_path / "state"

    def path(*names: str) -> Any:
        return java.org.apache.hadoop.fs.Path(str(root.joinpath(*names)))

    manager = getattr(java, f"{STREAMING}.checkpointing.CheckpointFileManager").create(path(), settings)

    def write(*names: str, overwrite: bool) -> None:
        output = manager.createAtomic(path(*names), overwrite)
        output.write(ord("a"))
        output.close()

    with recording(java.java.lang.ProcessHandle.current().pid(), tmp_path / "strace"):
        manager.mkdirs(path("own", "offsets"))
        write("own", "offsets", "0", overwrite=False)
        # A power loss may have left the checksum of a plan whose name was lost.
        (root / "own" / "offsets" / ".1.crc").write_bytes(b"older")
        write("own", "offsets", "1", overwrite=False)
        for _ in range(2):
            write("own", "1.changelog", overwrite=True)
        path().getFileSystem(settings).copyFromLocalFile(path("own", "offsets", "0"), path("own", "SSTs", "0.sst"))
        for names in (("shared", "kept"), ("x.transient",), ("shared", "x.transient")):
            manager.mkdirs(path(*names))
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
    transient = {"shared/x.transient/0", "shared/x.transient/.0.crc"}
    assert {os.path.relpath(name, root) for name in unsynced.names} == {"shared/x.transient", *transient}
    assert {os.path.relpath(name, root) for name in unsynced.contents} == transient
    assert {str(root / "own" / "SSTs" / name) for name in ("0.sst", ".0.sst.crc")} <= unsynced.synced
    assert (root / "own" / "offsets" / ".1.crc").read_bytes() != b"older"
    with pytest.raises(Py4JJavaError, match="FileAlreadyExists"):
        write("own", "offsets", "1", overwrite=False)
