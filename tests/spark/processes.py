"""Pipelines and a Spark standalone cluster as processes of their own, to be paused and killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyspark

from penstock.spark.environment.java import SHORT_LIVED, find_java
from tests.end_to_end.nodes import PENSTOCK, environment
from tests.spark.node import Node

__all__ = ["DEADLINE_S", "Cluster", "Driver", "descendants", "spark_environment", "until"]

DEADLINE_S = float(os.environ.get("PENSTOCK_TEST_DEADLINE_S", "240"))
"""A driver starts in 10 s on an idle machine, in more than a minute on a busy one."""


def until(
    holds: Callable[[], bool],
    what: str,
    *,
    alive: Callable[[], str | None] = lambda: None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Return once ``holds()``; fails after ``deadline_s``, or with what ``alive`` says is wrong."""
    deadline = time.monotonic() + deadline_s
    pause = threading.Event()
    while not holds():
        wrong = alive()
        assert wrong is None, f"{what}: {wrong}"
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s:g} s"
        pause.wait(0.05)


def spark_environment(node: Node) -> dict[str, str]:
    """Return the environment of Spark programs that read the topics of ``node``."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PENSTOCK_TUBE_MASTER": node.master,
    }


class Driver:
    """``penstock pipeline run FILE --json`` in a group of its own; ``events`` are those of all starts.

    ``prefix``: another program and its options, which runs it.
    """

    def __init__(
        self,
        directory: Path,
        file: Path,
        *arguments: str,
        command: Sequence[str] = ("run",),
        prefix: Sequence[str] = (),
    ) -> None:
        self.log = directory / f"{file.stem}.log"
        self.events: list[dict[str, Any]] = []
        self._argv = [*prefix, *PENSTOCK, "pipeline", command[0], str(file), *command[1:], "--json", *arguments]
        self._directory = directory
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> Driver:
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*self._argv, *more],
                cwd=self._directory,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        return self

    def __enter__(self) -> Driver:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def await_event(self, name: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The ``count``-th event ``name`` of all starts with these fields."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.events if e["event"] == name and fields.items() <= e.items()]

        until(lambda: len(found()) >= count, f"event {name} {fields}", alive=self.trouble)
        return found()[count - 1]

    def has_batch(self, after: int) -> bool:
        """Whether a batch was finished after the first ``after`` events."""
        return any(event["event"] == "batch" for event in self.events[after:])

    def send(self, number: int) -> None:
        """A signal to the driver and its JVM."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def terminate(self) -> None:
        """SIGTERM to the driver, its JVM and its Python workers, as a supervisor ends a service."""
        assert self.process is not None
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """kill -9, and wait."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def wait(self) -> int:
        """The exit status, once it has ended by itself."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def trouble(self) -> str | None:
        """Return how the driver has ended; None while it runs."""
        assert self.process is not None
        status = self.process.poll()
        return None if status is None else f"the driver ended with {status}: {self.log.read_text()[-3000:]}"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                try:
                    self.events.append(json.loads(line))
                except ValueError:  # spark-submit gives what the driver says on standard error as output, too
                    with self.log.open("a", encoding="utf-8") as log:
                        log.write(line)


class Cluster:
    """A Spark master and workers on loopback, out of the Python package of Spark.

    With ``hosts`` each worker has an address of its own: Spark starts no speculative attempt on the host of the first.
    ``python`` is the interpreter of its tasks; ``hidden`` are variables of this process that it does not get, and
    ``options`` are those of Java for its master and workers.
    """

    def __init__(
        self,
        directory: Path,
        workers: int = 2,
        *,
        python: str = sys.executable,
        hidden: Collection[str] = (),
        options: str = "",
        hosts: bool = False,
    ) -> None:
        self._directory = directory
        self._count = workers
        self._python = python
        self._hidden = hidden
        self._hosts = hosts
        self._options = f"{SHORT_LIVED} {options}".strip()
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> Cluster:
        try:
            self._master, log = self._start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
            self.url = self._said(log, r"Starting Spark master at (spark://\S+)")
            for _ in range(self._count):
                self.add_worker()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._workers, *([self._master] if self._master else [])]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)

    def add_worker(self) -> None:
        """Start a worker, and wait until the master has registered it."""
        number = len(self._workers)
        work = str(self._directory / f"work-{number}")
        host = f"127.0.0.{number + 1 if self._hosts else 1}"
        worker, log = self._start(
            "worker.Worker", self.url, "--host", host, "--cores", "1", "--memory", "1g",
            "--webui-port", "0", "--work-dir", work, name=f"worker-{number}",
        )  # fmt: skip
        self._workers.append(worker)
        self._said(log, r"Successfully registered with master (\S+)")

    def decommission(self) -> None:
        """Tell the first worker and its executors that their machine will go away, as cluster managers do (SIGPWR)."""
        os.kill(self._workers[0].pid, signal.SIGPWR)

    def executors(self) -> list[int]:
        """Process ids of the executors: children of our workers."""
        parents = {worker.pid for worker in self._workers}
        return [pid for pid, parent, words in _processes() if parent in parents and "CoarseGrainedExecutor" in words]

    def kill_executor(self) -> None:
        """Kill -9 of one executor, if there is any."""
        for pid in self.executors()[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, kind: str, *arguments: str, name: str = "master") -> tuple[subprocess.Popen[bytes], Path]:
        log = self._directory / f"spark-{name}.log"
        home = Path(pyspark.__file__).parent
        given = environment(
            JAVA_HOME=str(find_java().home),
            SPARK_LOCAL_IP="127.0.0.1",
            PYSPARK_PYTHON=self._python,
            # A driver that names no interpreter has its tasks run python3 of the nodes' own PATH.
            PATH=f"{Path(self._python).parent}:{os.environ['PATH']}",
            SPARK_DAEMON_JAVA_OPTS=self._options,
            SPARK_DAEMON_MEMORY="256m",
        )
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", *arguments],
                cwd=self._directory,
                env={name: value for name, value in given.items() if name not in self._hidden},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, log

    @staticmethod
    def _said(log: Path, pattern: str) -> str:
        found: list[str] = []

        def look() -> bool:
            found[:] = re.findall(pattern, log.read_text(encoding="utf-8", errors="replace"))
            return bool(found)

        until(look, f"{log.name}: {pattern}")
        return found[0]


def descendants(ancestor: int) -> list[int]:
    """Process ids of the children of ``ancestor``, of theirs, and so on."""
    family = [ancestor]
    children = list(_processes())
    for parent in family:
        family += [pid for pid, above, _ in children if above == parent]
    return family[1:]


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process id, parent and command line of everything that runs."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield int(entry.name), int(stat.rpartition(")")[2].split()[1]), words
