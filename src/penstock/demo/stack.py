"""The processes of the demo: a node and a pipeline, which can be killed and restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.demo.data import example
from penstock.demo.processes import Child
from penstock.errors import UnavailableError

__all__ = ["Addresses", "Options", "Stack"]

START_S = 120.0
"""A machine under load needs most of a minute for Spark; the lease of a killed run takes ten seconds to expire."""
RESTARTS = 3
POLL_S = 0.1

SHORT_RUN = ("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
"""Java's second compiler pays off after minutes: without it the demo needs half the processor time (75 s, now 48)."""

_LISTENERS = ("mqtt", "tube_master", "tube_broker", "tube_broker_http", "http")


class Addresses(NamedTuple):
    """Addresses of a node: URL of its MQTT broker, HOST:PORT of its TubeMQ master."""

    broker: str
    tube_master: str


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command. ``attach`` is the node to use; None: the demo starts one."""

    directory: Path
    attach: Addresses | None = None
    chaos: bool = False


class Stack:
    """Node and pipeline. ``say`` gets steps for people, ``on_batch`` the pipeline's ``batch`` events."""

    def __init__(
        self, options: Options, say: Callable[[str], None], on_batch: Callable[[dict[str, Any]], None]
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
        """Start the node; on the ports that it had, where it ran before."""
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
                # A node that others use has records of others in its log.
                "WATER_START": "earliest" if self.options.attach is None else "latest",
            },
        )
        self._started = False
        await self._driver.start()
        await self._until(self._driver, lambda: self._started, "the pipeline to run")
        self._driver_is_due = True

    async def kill_driver(self) -> None:
        """Kill -9 the Spark driver and all that it started."""
        assert self._driver is not None
        self._driver_is_due = False
        await self._driver.kill()
        self._say("CHAOS  the Spark driver was killed (-9)")

    async def kill_node(self) -> None:
        """Kill -9 the node."""
        assert self._node is not None
        await self._node.kill()
        self._say("CHAOS  the node was killed (-9)")

    async def stop_driver(self) -> None:
        """Let the pipeline end between two batches.

        Raises:
            UnavailableError: it ended in another way.
        """
        assert self._driver is not None
        self._driver_is_due = False
        if await self._driver.stop() != 0:
            raise self._driver.failure()

    async def watch(self) -> None:
        """Never returns. A pipeline that ends by itself is started again in chaos; otherwise that is the end.

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
            self._say(f"{said.what} and is started again, as a supervisor would; it said: {said.why}")
            await self.start_driver()

    async def close(self) -> None:
        """End what still runs."""
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
                    f"waited {START_S:g} s for {text}", do=f"see the logs in {self.options.directory}"
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
                self._say(f"pipeline: {event['sink']} tries again: {str(event['why']).splitlines()[0]}")

    def _durability(self) -> str:
        return str(self._ready["durability"])
