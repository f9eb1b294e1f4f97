"""The demo's story from start to proof."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.demo import data
from penstock.demo.data import Branch, Reading
from penstock.demo.progress import Display, Hops
from penstock.demo.proof import Evidence, LogReader, Proof, prove, read_alarms, read_table
from penstock.demo.segments import AbnormalSegment, expected, join, parse_alarm
from penstock.demo.sender import TelemetrySender
from penstock.demo.stack import DemoOptions, Stack, chaos
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.statestore.client.client import StateStoreClient

__all__ = ["DemoResult", "tell"]

T = TypeVar("T")

TUBE_TOPIC = "water_flow"
ROWS, WINDOWS = "readings", "alarms"
"""The sinks of examples/water/pipeline.yaml."""
WINDOW = timedelta(hours=3)
"""The duration of its windows."""

RATE = 120.0
CHAOS_RATE = 45.0
"""Messages a second: some ten seconds for all of them; with kills in it, slow enough to be hit in the middle."""
LONGEST_STEP_S = 180.0
POLL_S = 0.1


class DemoResult(NamedTuple):
    """Result of the demo and its files."""

    proof: Proof
    segments: list[AbnormalSegment]
    readings: list[Reading]
    limits: data.Limits
    table: Path
    seconds: float


class _Story:
    """State shared by the steps of one demo."""

    def __init__(self, options: DemoOptions, screen: Display) -> None:
        self.readings = data.read(data.example("water-flow.csv"))
        self.limits = data.limits(self.readings)
        self.hops = Hops(total=len(self.readings) + 2)
        self.screen = screen
        self.stack = Stack(options, screen.say, self.hops.take)
        self.ledger = Ledger(self.stack.state / "ledger")
        self.run_id = uuid.uuid4().hex[:8]
        # On a node of its own nobody else writes; on a shared one the branch must not meet that of another demo.
        self.branch = Branch("main" if options.attach is None else f"demo-{self.run_id}")
        self.start: Offsets = {}

    async def set_the_stage(self) -> None:
        """Node, reference data, pipeline."""
        options = self.stack.options
        if options.attach is None:
            await self.stack.start_node()
        async with self.connect_store("setup") as store:
            await store.set(self.branch.limits_key, self.limits.to_json())
        self.screen.say(f"state store: {self.branch.limits_key} = {self.limits.to_json().decode()}")
        self.screen.say("starting Spark and the pipeline; this takes up to half a minute")
        # Before the first message: what the log held already is no part of the story.
        if options.attach is not None:
            try:
                self.start = await self.of_log(LogReader.end)
            except (ConfigError, RefusedError) as error:
                raise ConfigError(
                    error.what,
                    why="the node has no rule for water/+/flow",
                    do=f"start it with --config {data.example('penstock.yaml')}, or leave out --attach",
                ) from error
        await self.stack.start_driver()

    async def send(self, sender: TelemetrySender) -> None:
        """All measurements in order with the malformed message among them; then the late one."""
        messages = self.branch.messages(self.readings)
        messages.insert(len(messages) // 2, self.branch.malformed())
        await sender.send_all(messages)
        late_ms = int(data.LATE.time.timestamp() * 1000)
        await self.reached(lambda: self.hops.watermark_ms(WINDOWS) > late_ms, "the watermark to pass the late event")
        await sender.send(self.branch.late())
        self.screen.say(f"all sent; the last one is late, it is of {data.iso(data.LATE.time)}")

    async def observe(self, watching: asyncio.Event) -> None:
        """Print alarms as the state store notifies of them, each window's once."""
        shown = set()
        async with self.connect_store("watch") as store, store.observe(self.branch.alarm_key) as changes:
            watching.set()
            async for change in changes:
                if change.value is None:
                    continue
                alarm = parse_alarm(bytes(change.value))
                if (alarm.kind, alarm.window_start) not in shown:
                    shown.add((alarm.kind, alarm.window_start))
                    self.screen.alarm(str(alarm))

    async def show(self, sender: TelemetrySender) -> None:
        """Keep the display up to date."""
        while True:
            # A node that is being restarted does not answer; the next look will.
            with contextlib.suppress(PenstockError):
                await self.look(sender)
            self.screen.show(self.hops)
            await asyncio.sleep(5 * POLL_S)

    async def look(self, sender: TelemetrySender) -> None:
        """See how far the messages are; the pipeline's batches come by themselves."""
        self.hops.sent, self.hops.acknowledged = len(sender.sent), len(sender.acknowledged)
        self.hops.logged = await self.of_log(lambda log: log.count(self.start))

    async def caught_up(self) -> None:
        """Wait until both queries have finished what the log holds now."""
        end = await self.of_log(LogReader.end)

        def done() -> bool:
            entries = [self.ledger.entries(sink) for sink in (ROWS, WINDOWS)]
            return all(found and found[-1].end == end for found in entries)

        await self.reached(done, "the pipeline to catch up with the log")

    async def gather(self, sender: TelemetrySender) -> Evidence:
        """Read everything that the proof looks at."""
        lake = self.stack.lake
        rows = read_table(lake / "readings", ["_id", "time", "flow"])
        async with self.connect_store("proof") as store:
            alarms = await read_alarms(store, self.branch, data.window_starts(self.readings, WINDOW))
        return Evidence(
            sent=sender.sent,
            acknowledged=sender.acknowledged,
            log=await self.of_log(lambda log: log.records(self.start)),
            table_ids=[row["_id"] for row in rows],
            table={row["_id"]: (row["time"], row["flow"]) for row in rows},
            dead_ids=[row["id"] for row in read_table(lake / "dead_letters", ["id"])],
            rows_ledger=self.ledger.entries(ROWS),
            windows_ledger=self.ledger.entries(WINDOWS),
            segments=join(alarms),
        )

    def prove(self, evidence: Evidence) -> Proof:
        """Hold the evidence against what was put in."""
        late = self.branch.late()
        measured = {
            message.id: (reading.time, reading.flow)
            for message, reading in zip(self.branch.messages(self.readings), self.readings, strict=True)
        }
        return prove(
            evidence,
            measured={**measured, late.id: (data.LATE.time, data.LATE.flow)},
            malformed=[self.branch.malformed().id],
            late=[late.id],
            segments=expected(self.readings, self.limits, WINDOW),
            chaos=self.stack.options.chaos,
        )

    async def of_log(self, question: Callable[[LogReader], T]) -> T:
        """Ask the log, in a thread: its reader blocks."""

        def ask() -> T:
            with LogReader(self.stack.addresses.tube_master, TUBE_TOPIC) as log:
                return question(log)

        return await asyncio.to_thread(ask)

    async def reached(self, condition: Callable[[], bool], text: str) -> None:
        """Wait until ``condition`` holds."""
        deadline = time.monotonic() + LONGEST_STEP_S
        while not condition():
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"waited {LONGEST_STEP_S:g} s for {text}", do=f"see the logs in {self.stack.options.directory}"
                )
            await asyncio.sleep(POLL_S)

    def connect_store(self, role: str) -> contextlib.AbstractAsyncContextManager[StateStoreClient]:
        """A client of the state store for one purpose."""
        return StateStoreClient.connect(self.stack.addresses.broker, client_id=f"demo-{role}-{self.run_id}")


async def tell(options: DemoOptions, screen: Display) -> DemoResult:
    """Run the demo in ``options.directory`` and prove what happened. Ends every process that it started.

    Raises:
        PenstockError: something did not start, ended, or took too long; logs are in the directory.
    """
    began = time.monotonic()
    story = _Story(options, screen)
    try:
        await story.set_the_stage()
        async with MqttClient.from_url(story.stack.addresses.broker, client_id=f"demo-meter-{story.run_id}") as client:
            sender = TelemetrySender(client, story.branch.topic, CHAOS_RATE if options.chaos else RATE)
            await _play(story, sender)
        await story.stack.stop_driver()
        await story.look(sender)
        screen.show(story.hops, at_once=True)
        screen.say("pipeline stopped; reading log, table, ledger and alarms")
        evidence = await story.gather(sender)
    finally:
        await story.stack.close()
    proof = story.prove(evidence)
    seconds = time.monotonic() - began
    table = story.stack.lake / "readings"
    return DemoResult(proof, list(evidence.segments), story.readings, story.limits, table, seconds)


async def _play(story: _Story, sender: TelemetrySender) -> None:
    """Send everything while the rest watches, until the pipeline has caught up. The first failure ends it all."""
    watching = asyncio.Event()
    background = [
        asyncio.create_task(story.observe(watching), name="observe"),
        asyncio.create_task(story.show(sender), name="show"),
        asyncio.create_task(story.stack.watch(), name="watch"),
    ]
    act = asyncio.create_task(_act(story, sender, watching), name="act")
    try:
        await asyncio.wait([act, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in (*background, act):
            if task.done():
                await task
    finally:
        for task in (act, *background):
            task.cancel()
        await asyncio.gather(act, *background, return_exceptions=True)


async def _act(story: _Story, sender: TelemetrySender, watching: asyncio.Event) -> None:
    await watching.wait()
    stack = story.stack
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(story.send(sender), name="send")
            if stack.options.chaos:
                work = chaos(
                    sender,
                    len(story.readings),
                    reached=story.reached,
                    batches=lambda: len(story.hops.batches),
                    kill_driver=stack.kill_driver,
                    restart_driver=stack.start_driver,
                    kill_node=stack.kill_node,
                    restart_node=stack.start_node,
                )
                group.create_task(work, name="chaos")
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    await story.caught_up()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure that ended the others."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
