"""The processes of the demo: each in a group of its own, so that its end is the end of everything it started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import UnavailableError

__all__ = ["Child"]

STOP_S = 30.0
"""A pipeline drains within a batch or two; after this it is not going to."""
TAIL_LINES = 15
_LINE_LIMIT = 1 << 20
_START = "import sys; from penstock.cli.main import main; sys.exit(main())"


class Child:
    """A penstock command as a child process that reports in JSON lines.

    ``on_event`` gets each line of its standard output that is a JSON object. Standard error goes into the file
    ``log``, after what is there from an earlier start.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        on_event: Callable[[dict[str, Any]], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._log = log
        self._on_event = on_event
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Start it; its process id, which is also its group's."""
        with self._log.open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-c", _START, *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                limit=_LINE_LIMIT,
                env={**os.environ, **self._environment},
            )
        self._reader = asyncio.create_task(self._read(self._process), name=f"{self.name}-events")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True if it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> int:
        """Wait until it ends; its exit status, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill -9 it and its group, and wait for its end."""
        if self._process is None:
            return
        # The group outlives its leader as long as a member lives, and then still has the leader's id.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._drained()

    async def stop(self) -> int:
        """Ask it to end, wait, and kill what is left; its exit status (0 where it was not started)."""
        if self._process is None:
            return 0
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
        await self.kill()
        assert self._process.returncode is not None
        return self._process.returncode

    def failure(self) -> UnavailableError:
        """Error for a process that ended unexpectedly."""
        status = self._process.returncode if self._process is not None else None
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        said = "\n       ".join(lines[-TAIL_LINES:]) or "it said nothing"
        return UnavailableError(
            f"the {self.name} ended with status {status}", applied=None, why=said, do=f"see {self._log}"
        )

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                self._on_event(event)

    async def _drained(self) -> None:
        if self._reader is not None:
            # A grandchild that left the group could hold the pipe open; its words are not needed.
            with suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._reader
