"""A node as a process of its own, and the commands against it, as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.ports import free_ports

__all__ = ["RunningNode", "environment", "wait_until"]

PENSTOCK = [sys.executable, "-m", "penstock.cli"]
DEADLINE_S = 180.0
LISTENERS = ("mqtt", "tube-master", "tube-broker", "tube-broker-http", "http")


def environment(**more: str) -> dict[str, str]:
    """The environment of this process without its penstock variables, and with ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


class RunningNode:
    """``penstock up --json`` on free ports in ``directory`` (its data directory is ``directory/data``).

    The ports are the same at every start, so that clients find the node again. ``program`` runs penstock's commands.
    """

    def __init__(self, directory: Path, config: str = "", *flags: str, program: Sequence[str] = PENSTOCK) -> None:
        self.directory = directory
        self._program = program
        self.flags = list(flags)
        self.ready: dict[str, Any] = {}
        self._listen = [
            part for name, port in zip(LISTENERS, free_ports(len(LISTENERS)), strict=True)
            for part in (f"--{name}", f"127.0.0.1:{port}")
        ]  # fmt: skip
        self.log = directory / "node.log"
        self.process: subprocess.Popen[str] | None = None
        (directory / "penstock.yaml").write_text("data_dir: data\n" + config, encoding="utf-8")

    def start(self) -> RunningNode:
        """Start the process and wait for its ready line."""
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*self._program, "up", "--json", *self._listen, *self.flags],
                cwd=self.directory,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.ready = json.loads(next(lines_of(self.process)))
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(DEADLINE_S)
        self._close()
        return status

    def kill(self) -> None:
        """kill -9."""
        assert self.stop(signal.SIGKILL) == -signal.SIGKILL

    def _close(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def __enter__(self) -> RunningNode:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(DEADLINE_S)
            self._close()

    @property
    def environment(self) -> dict[str, str]:
        """What makes the client commands find this node."""
        return environment(
            PENSTOCK_BROKER=f"mqtt://{self.ready['mqtt']}",
            PENSTOCK_TUBE_MASTER=self.ready["tube_master"],
            PENSTOCK_HTTP=self.ready["http"],
            PENSTOCK_DATA_DIR=self.ready["data_dir"],
        )

    def penstock(self, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a client command to its end."""
        return subprocess.run(
            [*PENSTOCK, *args], env=self.environment, input=stdin, capture_output=True, check=False, timeout=DEADLINE_S
        )

    def out(self, *args: str, stdin: bytes = b"") -> str:
        """Standard output of a client command that must succeed."""
        done = self.penstock(*args, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def rows(self, *args: str, stdin: bytes = b"") -> list[dict[str, Any]]:
        """The JSON lines of a client command that must succeed."""
        return [json.loads(line) for line in self.out(*args, "--json", stdin=stdin).splitlines()]

    @contextlib.contextmanager
    def running(self, *args: str, said: str) -> Iterator[Iterator[str]]:
        """A client command that goes on; the block begins once it has written ``said`` to standard error.

        Gives its lines of standard output. It is interrupted at the end as by Ctrl-C, and must then exit 0.
        """
        process = subprocess.Popen(
            [*PENSTOCK, *args], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with process:
            try:
                assert process.stderr is not None
                assert said in process.stderr.readline()
                yield lines_of(process)
                process.send_signal(signal.SIGINT)
                assert process.wait(DEADLINE_S) == 0, process.stderr.read()
            finally:
                process.kill()


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of a process's standard output; fails after ``DEADLINE_S`` without one, or when it ends."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    stdout = process.stdout
    assert stdout is not None

    def read() -> None:
        with contextlib.suppress(ValueError):  # closed by the test
            for line in stdout:
                lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        line = lines.get(timeout=DEADLINE_S)
        assert line, f"the process ended with {process.poll()}"
        yield line.rstrip("\n")


def wait_until(holds: Any, what: str) -> None:
    """Return once ``holds()`` is true; fails after ``DEADLINE_S``. For states that only polling can see."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, what
        pause.wait(0.02)
