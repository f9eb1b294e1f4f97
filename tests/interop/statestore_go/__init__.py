"""SETs of the Go SDK of Azure IoT Operations, as a process (see ``main.go``)."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

from tests.go_programs import prepare_program

__all__ = ["GoClient", "prepare"]


def prepare(*, download: bool = True) -> Path:
    """The program, built if its sources have changed; without ``download`` skips the test where it was never built."""
    return prepare_program("the Go SDK", "statestore_go", Path(__file__).parent, "statestore_go", download=download)


class GoClient:
    """A client at ``port`` that sends a SET of the key ``name`` every 0.1 s, and connects again by itself."""

    def __init__(self, port: int, name: str) -> None:
        command = [str(prepare(download=False)), str(port), name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._told = threading.Event()
        self._has_connected = False
        self._first_s = 0.0
        self._failures: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def begin(self) -> None:
        """Expect the next connection from now on."""
        self._has_connected = False
        self._told.clear()

    def first(self, within_s: float) -> float:
        """Return the time (of :func:`time.perf_counter`) of the first acknowledged SET after that connection.

        Raises TimeoutError.
        """
        if not self._told.wait(within_s):
            raise TimeoutError(f"the Go SDK: no SET was acknowledged within {within_s} s: {self._failures[-5:]}")
        return self._first_s

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word = line.split()[0]
            if word == "connected":
                self._has_connected = True
            elif word != "set":
                self._failures.append(line.strip())
            elif self._has_connected and not self._told.is_set():
                self._first_s = time.perf_counter()
                self._told.set()
