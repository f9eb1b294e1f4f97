"""Processes of the demo: a node and a pipeline, which can be killed and restarted while messages flow.

Each process has its own process group, so that its child processes end with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.demo.data import example
from penstock.errors import UnavailableError
from penstock.spark.environment.java import SHORT_LIVED

__all__ = ["Addresses", "Child", "DemoOptions", "Stack"]

STOP_S = 30.0
"""Time limit of a shutdown in seconds; a pipeline ends within two batches."""
TAIL_LINES = 15
_LINE_LIMIT = 1 << 20
_COMMAND = ("-m", "penstock.cli")
"""Arguments of the interpreter that run penstock."""


class Child:
    """A penstock command as a child process that prints JSON lines.

    ``on_event`` gets each JSON object of its standard output. Standard error is appended to the file ``log``.
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
        """Start the process; returns its id, which is also the id of its group."""
        with self._log.open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *(*_COMMAND, *self._arguments),
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
        """True if the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> int:
        """Wait for the end of the process; returns its exit status, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill (SIGKILL) the process and its group, and wait for the end."""
        if self._process is None:
            return
        # The group exists with the id of its leader while any member lives.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._drained()

    async def stop(self) -> int:
        """Stop the process, wait, and kill the rest of its group; returns the exit status (0 if it was not started)."""
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
        """Return the error for a process that ended unexpectedly."""
        status = self._process.returncode if self._process is not None else None
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        said = "\n       ".join(lines[-TAIL_LINES:]) or "it printed no error"
        return UnavailableError(
            f"the {self.name} ended with status {status}", applied=None, why=said, hint=f"see {self._log}"
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
            # A grandchild that left the group could keep the pipe open; its output is not needed.
            with suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._reader


START_S = 120.0
"""Time limit of a start: a loaded machine needs most of a minute for Spark, and the lease of a killed run expires after
ten seconds."""
RESTARTS = 3
POLL_S = 0.1

SHORT_RUN = ("--conf", f"spark.driver.extraJavaOptions={SHORT_LIVED}")
"""Without Java's second compiler, the demo needs half the processor time (48 s instead of 75 s)."""

_LISTENERS = ("mqtt", "tube_master", "tube_broker", "tube_broker_http", "http")


class Addresses(NamedTuple):
    """Addresses of a node: URL of its MQTT broker, HOST:PORT of its TubeMQ master."""

    broker: str
    tube_master: str


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the command. ``attach`` is the node to use; None: the demo starts one."""

    directory: Path
    attach: Addresses | None = None
    chaos: bool = False


class Stack:
    """Node and pipeline. ``say`` is called with messages for the user, ``on_batch`` with the pipeline's batches."""

    def __init__(
        self, options: DemoOptions, say: Callable[[str], None], on_batch: Callable[[dict[str, Any]], None]
    ) -> None:
        self.options = options
        self.state = options.directory / "state"
        self.lake = options.directory / "lake"
        self._say = say
        self._on_batch = on_batch
        self._addresses = options.attach
        self._ports: dict[str, str] = dict.fromkeys(_LISTENERS, "127.0.0.1:0")
        self._node: Child | None = None
        self._driver: Child | None = None
        self._ready: dict[str, Any] = {}
        self._started = False
        self._driver_is_due = False

    @property
    def addresses(self) -> Addresses:
        """Addresses of the node."""
        assert self._addresses is not None
        return self._addresses

    async def start_node(self) -> None:
        """Start the node, on its previous ports after a kill."""
        listeners = [f"--{name.replace('_', '-')}={address}" for name, address in self._ports.items()]
        given = [f"--config={example('penstock.yaml')}", f"--data-dir={self.options.directory / 'node'}"]
        self._node = Child(
            "node",
            ["up", "--json", *given, *listeners],
            log=self.options.directory / "node.log",
            on_event=self._node_event,
        )
        self._ready = {}
        await self._node.start()
        await self._until(self._node, lambda: bool(self._ready), "the node to be ready")
        self._ports = {name: self._ready[name] for name in _LISTENERS}
        self._addresses = Addresses(f"mqtt://{self._ready['mqtt']}", self._ready["tube_master"])
        self._say(f"node ready: MQTT {self._ready['mqtt']}, tube {self._ready['tube_master']}, {self._durability()}")

    async def start_driver(self) -> None:
        """Start the pipeline and wait until its queries run."""
        self._driver = Child(
            "pipeline",
            ["pipeline", "run", str(example("pipeline.yaml")), "--json", f"--state-dir={self.state}", *SHORT_RUN],
            log=self.options.directory / "pipeline.log",
            on_event=self._driver_event,
            environment={
                "PENSTOCK_BROKER": self.addresses.broker,
                "PENSTOCK_TUBE_MASTER": self.addresses.tube_master,
                "WATER_LAKE": str(self.lake),
                # The log of a shared node has records of other clients.
                "WATER_START": "earliest" if self.options.attach is None else "latest",
            },
        )
        self._started = False
        await self._driver.start()
        await self._until(self._driver, lambda: self._started, "the pipeline to run")
        self._driver_is_due = True

    async def kill_driver(self) -> None:
        """Kill the Spark driver and its child processes (SIGKILL)."""
        assert self._driver is not None
        self._driver_is_due = False
        await self._driver.kill()
        self._say("CHAOS  the Spark driver was killed (-9)")

    async def kill_node(self) -> None:
        """Kill the node (SIGKILL)."""
        assert self._node is not None
        await self._node.kill()
        self._say("CHAOS  the node was killed (-9)")

    async def stop_driver(self) -> None:
        """Stop the pipeline between two batches.

        Raises:
            UnavailableError: it ended with an error.
        """
        assert self._driver is not None
        self._driver_is_due = False
        if await self._driver.stop() != 0:
            raise self._driver.failure()

    async def watch(self) -> None:
        """Watch the pipeline; never returns. In chaos mode it is restarted if it ends.

        Raises:
            UnavailableError: the pipeline or the node ended.
        """
        restarts = 0
        while True:
            await asyncio.sleep(POLL_S)
            if self._driver is None or self._driver.is_running or not self._driver_is_due:
                continue
            if not self.options.chaos or restarts == RESTARTS:
                raise self._driver.failure()
            restarts += 1
            self._driver_is_due = False
            said = self._driver.failure()
            self._say(f"{said.what} and is restarted, as by a supervisor; its error: {said.why}")
            await self.start_driver()

    async def close(self) -> None:
        """Stop the processes."""
        self._driver_is_due = False
        if self._driver is not None:
            await self._driver.kill()
        if self._node is not None:
            await self._node.stop()

    async def _until(self, child: Child, condition: Callable[[], bool], text: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if not child.is_running:
                raise child.failure()
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"waited {START_S:g} s for {text}", hint=f"see the logs in {self.options.directory}"
                )
            await asyncio.sleep(POLL_S / 2)

    def _node_event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "ready":
            self._ready = event

    def _driver_event(self, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "started":
                self._started = True
                self._say(f"pipeline running, fencing token {event['fencing_token']}")
            case "batch":
                self._on_batch(event)
            case "retry":
                self._say(f"pipeline: {event['sink']} retries: {str(event['why']).splitlines()[0]}")
            case "sinks_failed":
                self._say(f"pipeline: {str(event['error']).splitlines()[0]}")

    def _durability(self) -> str:
        return str(self._ready["durability"])
