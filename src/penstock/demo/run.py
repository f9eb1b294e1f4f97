"""Run the demo: start the stack, send the telemetry, and prove the delivery."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.demo import data
from penstock.demo.data import AbnormalSegment, Branch, Reading, Telemetry, expected_segments, join_alarms, parse_alarm
from penstock.demo.proof import Evidence, LogReader, Proof, prove, read_alarms, read_table
from penstock.demo.stack import DemoOptions, Stack
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.properties import Properties
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.spark.tube.offsets import from_json
from penstock.statestore.client.client import StateStoreClient

__all__ = ["DemoDisplay", "DemoResult", "HopCounts", "TelemetrySender", "chaos", "run_demo"]

MAX_IN_FLIGHT = 20
"""Messages in flight: enough that a kill of the node interrupts some, few enough to keep the order."""
NO_SUBSCRIBERS = 0x10
TUBE_TOPIC = "water_flow"
ROWS, WINDOWS = "readings", "alarms"
"""The sinks of examples/water/pipeline.yaml."""
WINDOW = timedelta(hours=3)
"""The duration of its windows."""

RATE = 120.0
CHAOS_RATE = 45.0
"""Messages per second: about ten seconds for all; with kills, slow enough to be interrupted."""
LONGEST_STEP_S = 180.0
POLL_S = 0.1

T = TypeVar("T")


class TelemetrySender:
    """Publishes with QoS 1 through ``client``, which repeats unacknowledged messages after a reconnect.

    ``sent`` and ``acknowledged`` contain each id once, in order.
    """

    def __init__(self, client: MqttClient, topic: str, rate: float) -> None:
        self.sent: list[str] = []
        self.acknowledged: list[str] = []
        self._client = client
        self._topic = topic
        self._interval_s = 1.0 / rate
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._flowing = asyncio.Event()
        self._flowing.set()

    def hold(self) -> None:
        """Pause sending."""
        self._flowing.clear()

    def release(self) -> None:
        """Continue sending."""
        self._flowing.set()

    async def send_all(self, messages: Sequence[Telemetry]) -> None:
        """Send ``messages`` in order; returns when all are acknowledged.

        Raises:
            RefusedError: the node rejected one, or has no matching rule.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for message in messages:
                await self._flowing.wait()
                await self._slots.acquire()
                # After a pause the rate continues, without a burst.
                due = max(due + self._interval_s, loop.time())
                await asyncio.sleep(due - loop.time())
                group.create_task(self._send_one(message), name=f"send-{message.id}")

    async def send(self, message: Telemetry) -> None:
        """Send one message and wait for its acknowledgement."""
        await self._slots.acquire()
        await self._send_one(message)

    async def _send_one(self, message: Telemetry) -> None:
        try:
            self.sent.append(message.id)
            properties = Properties(content_type="application/json", user_properties=[("id", message.id)])
            answer = await self._client.publish(self._topic, message.payload, qos=1, properties=properties)
            if answer == NO_SUBSCRIBERS:
                raise RefusedError(
                    f"message {message.id!r} on MQTT topic {self._topic!r} has no receiver",
                    code=NO_SUBSCRIBERS,
                    why="the node has no rule for water/+/flow",
                    hint="start it with examples/water/penstock.yaml, or let the demo start a node",
                )
            self.acknowledged.append(message.id)
        finally:
            self._slots.release()


@dataclass(slots=True)
class HopCounts:
    """Messages per hop. ``batches`` has the latest counts of each batch of the pipeline."""

    total: int
    sent: int = 0
    acknowledged: int = 0
    logged: int = 0
    alarms: int = 0
    batches: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def record_batch(self, event: dict[str, Any]) -> None:
        """Record a ``batch`` event; a repeated batch counts once."""
        self.batches[event["sink"], event["batch"]] = event

    def read(self, sink: str) -> int:
        """Messages that the query of ``sink`` has read."""
        return self._sum(sink, "read")

    def watermark_ms(self, sink: str) -> int:
        """The newest watermark of ``sink``'s query."""
        return max((event["watermark_ms"] for (name, _), event in self.batches.items() if name == sink), default=0)

    def rows(self) -> list[tuple[str, int, int]]:
        """Return for each hop its name, the messages that have reached it, and the messages that have not."""
        hops = [
            ("sent over MQTT", self.sent),
            ("acknowledged", self.acknowledged),
            ("in the TubeMQ log", self.logged),
            ("through to the table", self.read(ROWS)),
            ("through to the windows", self.read(WINDOWS)),
        ]
        behind = [self.total, *(count for _, count in hops)]
        return [
            (name, count, max(before - count, 0)) for (name, count), before in zip(hops, _before(behind), strict=True)
        ]

    def _sum(self, sink: str, what: str) -> int:
        return sum(event[what] or 0 for (name, _), event in self.batches.items() if name == sink)


def _before(counts: list[int]) -> list[int]:
    """Return for each hop the count of the previous one; table and windows both follow the log."""
    total, sent, acknowledged, logged, _, _ = counts
    return [total, sent, acknowledged, logged, logged]


class DemoDisplay(Protocol):
    """Output of the demo while it runs."""

    def say(self, text: str) -> None:
        """Show a step."""

    def alarm(self, text: str) -> None:
        """Show an alarm."""

    def show(self, hops: HopCounts, *, at_once: bool = False) -> None:
        """Show the progress, several times a second; ``at_once`` without rate limit."""


class DemoResult(NamedTuple):
    """Result of the demo and its files."""

    proof: Proof
    segments: list[AbnormalSegment]
    readings: list[Reading]
    limits: data.Limits
    table: Path
    seconds: float


class _DemoRun:
    """State shared by the steps of one demo."""

    def __init__(self, options: DemoOptions, screen: DemoDisplay) -> None:
        self.readings = data.read(data.example("water-flow.csv"))
        self.limits = data.limits(self.readings)
        self.hops = HopCounts(total=len(self.readings) + 2)
        self.screen = screen
        self.stack = Stack(options, screen.say, self.hops.record_batch)
        self.ledger = Ledger(self.stack.state / "ledger")
        self.run_id = uuid.uuid4().hex[:8]
        # A node of the demo has no other clients; on a shared node the branch must differ from that of another demo.
        self.branch = Branch("main" if options.attach is None else f"demo-{self.run_id}")
        self.start: Offsets = {}

    async def prepare(self) -> None:
        """Start the node, write the reference data, and start the pipeline."""
        options = self.stack.options
        if options.attach is None:
            await self.stack.start_node()
        async with self.connect_store("setup") as store:
            await store.set(self.branch.limits_key, self.limits.to_json())
        self.screen.say(f"state store: {self.branch.limits_key} = {self.limits.to_json().decode()}")
        self.screen.say("starting Spark and the pipeline; this takes up to half a minute")
        # Read before the first message: existing records of the log are not part of the demo.
        if options.attach is not None:
            try:
                self.start = await self.of_log(LogReader.end_offsets)
            except (ConfigError, RefusedError) as error:
                raise ConfigError(
                    error.what,
                    why="the node has no rule for water/+/flow",
                    hint=f"start it with --config {data.example('penstock.yaml')}, or leave out --attach",
                ) from error
        await self.stack.start_driver()

    async def send(self, sender: TelemetrySender) -> None:
        """Send all measurements in order, with the malformed message among them, then the late one."""
        messages = self.branch.messages(self.readings)
        messages.insert(len(messages) // 2, self.branch.malformed())
        await sender.send_all(messages)
        late_ms = int(data.LATE.time.timestamp() * 1000)
        await self.reached(lambda: self.hops.watermark_ms(WINDOWS) > late_ms, "the watermark to pass the late event")
        await sender.send(self.branch.late())
        self.screen.say(f"all sent; the last one is late, its time is {data.iso(data.LATE.time)}")

    async def observe(self, watching: asyncio.Event) -> None:
        """Print alarms from notifications of the state store, once per window."""
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
        """Update the display repeatedly."""
        while True:
            # A node that is being restarted does not answer; the next attempt will succeed.
            with contextlib.suppress(PenstockError):
                await self.look(sender)
            self.screen.show(self.hops)
            await asyncio.sleep(5 * POLL_S)

    async def look(self, sender: TelemetrySender) -> None:
        """Count the messages in the log; the batches of the pipeline are reported by events."""
        self.hops.sent, self.hops.acknowledged = len(sender.sent), len(sender.acknowledged)
        self.hops.logged = await self.of_log(lambda log: log.count(self.start))

    async def caught_up(self) -> None:
        """Wait until both queries have processed all records that are currently in the log."""
        end = from_json(await self.of_log(LogReader.end_offsets))

        def done() -> bool:
            entries = [self.ledger.entries(sink) for sink in (ROWS, WINDOWS)]
            return all(found and from_json(found[-1].end) == end for found in entries)

        await self.reached(done, "the pipeline to catch up with the log")

    async def gather(self, sender: TelemetrySender) -> Evidence:
        """Read the evidence."""
        lake = self.stack.lake
        rows = read_table(lake / ROWS, ["_id", "time", "flow"])
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
            segments=join_alarms(alarms),
        )

    def prove(self, evidence: Evidence) -> Proof:
        """Compare the evidence with the input."""
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
            segments=expected_segments(self.readings, self.limits, WINDOW),
            chaos=self.stack.options.chaos,
        )

    async def of_log(self, question: Callable[[LogReader], T]) -> T:
        """Read the log in a thread, since its reader blocks."""

        def ask() -> T:
            with LogReader(self.stack.addresses.tube_master, TUBE_TOPIC) as log:
                return question(log)

        return await asyncio.to_thread(ask)

    async def reached(self, condition: Callable[[], bool], text: str) -> None:
        """Wait until ``condition`` is true."""
        deadline = time.monotonic() + LONGEST_STEP_S
        while not condition():
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"waited {LONGEST_STEP_S:g} s for {text}", hint=f"see the logs in {self.stack.options.directory}"
                )
            await asyncio.sleep(POLL_S)

    def connect_store(self, role: str) -> contextlib.AbstractAsyncContextManager[StateStoreClient]:
        """Return a client of the state store with a client identifier for ``role``."""
        return StateStoreClient.connect(self.stack.addresses.broker, client_id=f"demo-{role}-{self.run_id}")


async def run_demo(options: DemoOptions, screen: DemoDisplay) -> DemoResult:
    """Run the demo in ``options.directory`` and its proof. Ends all processes that it started.

    Raises:
        PenstockError: something did not start, ended, or took too long; logs are in the directory.
    """
    began = time.monotonic()
    demo = _DemoRun(options, screen)
    try:
        await demo.prepare()
        async with MqttClient.from_url(demo.stack.addresses.broker, client_id=f"demo-meter-{demo.run_id}") as client:
            sender = TelemetrySender(client, demo.branch.topic, CHAOS_RATE if options.chaos else RATE)
            await _play(demo, sender)
        await demo.stack.stop_driver()
        await demo.look(sender)
        screen.show(demo.hops, at_once=True)
        screen.say("pipeline stopped; reading log, table, ledger and alarms")
        evidence = await demo.gather(sender)
    finally:
        await demo.stack.close()
    proof = demo.prove(evidence)
    seconds = time.monotonic() - began
    table = demo.stack.lake / ROWS
    return DemoResult(proof, list(evidence.segments), demo.readings, demo.limits, table, seconds)


async def _play(demo: _DemoRun, sender: TelemetrySender) -> None:
    """Send all messages and wait until the pipeline has caught up, with monitoring tasks in parallel. The first failure
    ends all."""
    watching = asyncio.Event()
    background = [
        asyncio.create_task(demo.observe(watching), name="observe"),
        asyncio.create_task(demo.show(sender), name="show"),
        asyncio.create_task(demo.stack.watch(), name="watch"),
    ]
    act = asyncio.create_task(_act(demo, sender, watching), name="act")
    try:
        await asyncio.wait([act, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in (*background, act):
            if task.done():
                await task
    finally:
        for task in (act, *background):
            task.cancel()
        await asyncio.gather(act, *background, return_exceptions=True)


async def _act(demo: _DemoRun, sender: TelemetrySender, watching: asyncio.Event) -> None:
    await watching.wait()
    stack = demo.stack
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(demo.send(sender), name="send")
            if stack.options.chaos:
                work = chaos(
                    sender,
                    len(demo.readings),
                    reached=demo.reached,
                    batches=lambda: len(demo.hops.batches),
                    kill_driver=stack.kill_driver,
                    restart_driver=stack.start_driver,
                    kill_node=stack.kill_node,
                    restart_node=stack.start_node,
                )
                group.create_task(work, name="chaos")
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    await demo.caught_up()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that caused the others."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


FIRST_PART = 0.25
DRIVER_AT = 0.4
SECOND_PART = 0.6
NODE_AT = 0.75

Reached = Callable[[Callable[[], bool], str], Awaitable[None]]
"""Function that waits until the condition is true; the text describes the condition."""


async def chaos(
    sender: TelemetrySender,
    total: int,
    *,
    reached: Reached,
    batches: Callable[[], int],
    kill_driver: Callable[[], Awaitable[None]],
    restart_driver: Callable[[], Coroutine[Any, Any, None]],
    kill_node: Callable[[], Awaitable[None]],
    restart_node: Callable[[], Awaitable[None]],
) -> None:
    """Kill both processes during the run; ``batches`` returns the number of batches of the pipeline.

    Sending pauses twice until the pipeline works: otherwise all messages would be sent while Spark starts, and none
    during the kills. Messages continue while the driver is down.
    """
    await _hold_until(sender, FIRST_PART * total, reached, lambda: batches() > 0, "the first batch")
    await reached(lambda: len(sender.acknowledged) >= DRIVER_AT * total, "messages before the driver is killed")
    await kill_driver()
    before = batches()
    back = asyncio.create_task(restart_driver(), name="restart-driver")
    try:
        await _hold_until(
            sender,
            SECOND_PART * total,
            reached,
            lambda: back.done() and batches() > before,
            "a batch of the new driver",
        )
        await back
    finally:
        back.cancel()
    await reached(lambda: len(sender.acknowledged) >= NODE_AT * total, "messages before the node is killed")
    await kill_node()
    await restart_node()


async def _hold_until(
    sender: TelemetrySender, count: float, reached: Reached, condition: Callable[[], bool], text: str
) -> None:
    """Pause the sender after ``count`` messages until ``condition`` is true."""
    try:
        await reached(lambda: len(sender.sent) >= count, "messages to be sent")
        sender.hold()
        await reached(condition, text)
    finally:
        sender.release()
