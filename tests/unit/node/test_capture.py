"""Change capture: records, order, refusals; and with a real store and a real log over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError
from penstock.node.capture import ChangeCapture, record_of, version_of
from penstock.runtime.io.files import Durability
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.record import Record as Kept
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.interfaces import LogPage, LogTail
from penstock.statestore.service.service import StateStoreService
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.codes import ErrCode
from penstock.tube.record import Record
from tests.engine.statestore import FakeOutlet, ManualClock, Peer

Run = Sequence[tuple[bytes, int, str | None]]
Done = Callable[[int, PenstockError | None], None]


def change(number: int, value: bytes | None = b"v") -> Change:
    version = Hlc(number, 0, "StateStore")
    record = None if value is None else Kept(b"k", value, version)
    return Change(b"k", record, version, writer="c")


NOTHING = LogTail(0, Hlc(0, 0, ""))


def no_log(version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
    raise AssertionError(f"everything after {version} is in memory, {done} waits for nothing")


class Outbox:
    """The store's log of changes, read when the test says so; ``page`` changes at once."""

    def __init__(self, changes: Sequence[Change] = (), page: int = 3) -> None:
        self.changes = list(changes)
        self.page = page
        self.asked: list[tuple[Hlc, Callable[[LogPage | StorageError], None]]] = []

    def after(self, version: Hlc) -> LogTail:
        rest = [change for change in self.changes if change.version.position > version.position]
        return LogTail(len(rest), rest[-1].version if rest else version)

    def read(self, version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
        self.asked.append((version, done))

    def answer(self, error: StorageError | None = None) -> None:
        """Read as the log is now."""
        version, done = self.asked.pop()
        if error is not None:
            done(error)
            return
        rest = [change for change in self.changes if change.version.position > version.position]
        found = rest[: self.page]
        done(LogPage(found, found[-1].version if found else version, len(rest) <= self.page))


class Log:
    """Takes runs when the test says so."""

    def __init__(self) -> None:
        self.stored: list[Record] = []
        self.offered: list[tuple[Run, Done]] = []
        self.later: list[Callable[[], object]] = []

    def append_run(self, topic: str, partition: int, messages: Run, done: Done) -> None:
        assert (topic, partition) == ("changes", 0)
        self.offered.append((messages, done))

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        assert delay > 0
        self.later.append(callback)

    def take(self, count: int = 1 << 30, error: PenstockError | None = None) -> None:
        run, done = self.offered.pop(0)
        self.stored += [Record.decode(data, flag) for data, flag, _ in run[:count]]
        done(len(run[:count]), error)

    @property
    def ids(self) -> list[int]:
        return [int((record.id or "").split(":")[0]) for record in self.stored]


def test_a_record_has_all_fields_of_a_change() -> None:
    version = Hlc(1_696_374_425_000, 7, "StateStore")
    kept = Kept(b"\x00\xff", b"value", version, Hlc(5, 6, "n"), 1_696_374_430_000)
    set_ = record_of(Change(kept.key, kept, version, writer="client ä,="))
    data, flag, msg_type = set_.encode()
    assert msg_type == "SET"
    assert Record.decode(data, flag) == Record(
        b"value",
        key=b"\x00\xff",
        headers=[
            ("operation", "SET"),
            ("version", "1696374425000:7:StateStore"),
            ("writer", "client ä,="),
            ("expires-at", "1696374430000"),
            ("fence", "5:6:n"),
        ],
        event_time_ms=1_696_374_425_000,
        id="001696374425000:00007:StateStore",
        msg_type="SET",
    )
    assert version_of(data, flag) == version
    gone = record_of(Change(b"k", None, version))
    assert (gone.value, gone.msg_type, dict(gone.headers)["writer"]) == (b"", "DELETE", "")
    assert version_of(*Record(b"somebody else's", id="x").encode()[:2]) is None


def test_changes_go_out_in_order_one_run_at_a_time() -> None:
    log = Log()
    trimmed: list[Hlc] = []
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume(NOTHING, no_log, trimmed.append)
    capture.append([change(1), change(2)])
    capture.append([change(3, None)])
    assert len(log.offered) == 1
    log.take()
    log.take()
    assert log.ids == [1, 2, 3]
    assert [version.wall_ms for version in trimmed] == [2, 3]
    assert (capture.stats.captured, capture.waiting) == (3, 0)
    capture.append([change(4)])
    log.take()
    assert log.ids[-1] == 4


def test_changes_already_in_the_topic_are_skipped_after_a_restart() -> None:
    log, outbox = Log(), Outbox([change(1), change(2), change(3), change(4)])
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=Hlc(2, 0, "StateStore"))
    assert capture.last == Hlc(2, 0, "StateStore")
    capture.resume(outbox.after(capture.last), outbox.read, lambda _: None)
    assert capture.waiting == 2
    outbox.answer()
    log.take()
    assert log.ids == [3, 4]


def test_failed_changes_are_retried_in_order(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume(NOTHING, no_log, lambda _: None)
    capture.append([change(n) for n in range(1, 5)])
    slow = UnavailableError("the disk does not keep up", applied=False)
    log.take(2, slow)
    capture.append([change(5)])
    assert log.offered == []
    log.later.pop()()
    log.take()
    assert log.ids == [1, 2, 3, 4, 5]
    assert (capture.stats.failures, capture.waiting) == (1, 0)
    capture.append([change(6)])
    for _ in range(2):
        log.take(0, slow)
        log.later.pop()()
    assert len(caplog.records) == 2, "one for each series of failures"


def test_a_value_that_the_topic_never_takes_is_left_out_and_named() -> None:
    log = Log()
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume(NOTHING, no_log, lambda _: None)
    capture.append([change(1), change(2, b"x" * 9), change(3)])
    refused = RefusedError("too large", code=ErrCode.BAD_REQUEST, text="", peer="broker")
    log.take(1, refused)
    assert len(log.offered[0][0]) == 1
    log.take()
    log.take()
    assert log.ids == [1, 2, 3]
    assert (log.stored[1].value, dict(log.stored[1].headers)["omitted"]) == (b"", "9")


def test_changes_beyond_the_memory_limit_wait_in_the_log() -> None:
    log, outbox = Log(), Outbox()
    size = change(1).held_bytes
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None, max_bytes=2 * size)
    capture.resume(NOTHING, outbox.read, lambda _: None)
    for number in range(1, 8):
        outbox.changes.append(change(number))
        capture.append(outbox.changes[-1:])
    figures = capture.metric_values()
    assert (figures["waiting"], figures["waiting_memory_bytes"]) == (7, 2 * size)
    assert figures["oldest_age_seconds"] > 1e9  # these are of 1970
    log.take()  # the first alone, which was offered before the others came
    log.take()
    assert (log.ids, log.offered) == ([1, 2], [])
    outbox.changes.append(change(8))
    outbox.answer()  # 3 to 5
    capture.append([change(8)])
    assert capture.waiting == 6
    log.take()
    outbox.answer()  # 6 to 8, which is more than fits
    outbox.changes.append(change(9))
    capture.append([change(9)])
    log.take()
    outbox.answer()
    capture.append([change(10)])
    log.take()
    log.take()
    assert log.ids == list(range(1, 11))
    assert (capture.waiting, capture.metric_values()["waiting_memory_bytes"], outbox.asked) == (0, 0, [])


def test_a_change_that_a_page_brings_before_it_is_announced_is_taken_once() -> None:
    log, outbox = Log(), Outbox([change(1), change(2), change(3)])
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume(LogTail(1, change(1).version), outbox.read, lambda _: None)
    outbox.answer()
    assert capture.waiting == 3
    capture.append([change(2), change(3), change(4)])
    log.take()
    log.take()
    assert log.ids == [1, 2, 3, 4]
    assert capture.waiting == 0


def test_a_damaged_end_of_the_log_does_not_keep_it_reading() -> None:
    log, outbox = Log(), Outbox([change(1)])
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume(LogTail(2, change(2).version), outbox.read, lambda _: None)
    outbox.answer()
    log.take()
    assert (log.ids, capture.waiting, outbox.asked, log.offered) == ([1], 0, [], [])
    capture.append([change(3)])
    log.take()
    assert log.ids == [1, 3]


def test_a_log_that_cannot_be_read_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    log, outbox = Log(), Outbox([change(1)])
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume(LogTail(1, change(1).version), outbox.read, lambda _: None)
    for _ in range(2):
        outbox.answer(StorageError("state store x cannot be read"))
        capture.append([change(2)])
        log.later.pop()()
    assert [record.getMessage() for record in caplog.records] == [
        "the log of the state store cannot be read; its changes wait: state store x cannot be read"
    ]
    outbox.changes.append(change(2))
    outbox.answer()
    log.take()
    assert (log.ids, capture.waiting, capture.stats.failures) == ([1, 2], 0, 2)


def test_a_stalled_capture_is_reported() -> None:
    log, clock = Log(), [100.0]
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None, now=lambda: clock[0])
    capture.resume(NOTHING, no_log, lambda _: None)
    clock[0] += 100
    assert capture.warning() is None, "nothing to do"
    capture.append([change(1), change(2), change(3)])
    clock[0] += 9
    assert capture.warning() is None
    clock[0] += 3
    silent = (
        "capture: topic 'changes' has accepted no change of the state store for 12 s, 3 wait in the log of the store"
    )
    warning = capture.warning()
    assert warning is not None
    assert (warning.what, warning.why) == (silent, "it does not answer")
    log.take(0, UnavailableError("the disk is full", applied=False))
    warning = capture.warning()
    assert warning is not None
    assert (warning.what, warning.why) == (silent, "the disk is full")
    log.later.pop()()
    log.take(1, UnavailableError("the disk is full", applied=False))
    assert capture.warning() is None, "it moves, if slowly"
    log.later.pop()()
    log.take()
    clock[0] += 100
    assert capture.warning() is None


class CaptureMachine(RuleBasedStateMachine):
    """A store that makes changes, a tube that takes some, now and then, and restarts; memory for few of them.

    The log has a change before the capture is told of it, and pages are read at any moment between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(page=8)
        self.topic: list[int] = []
        self.number = 0
        self.restart()

    @rule()
    def restart(self) -> None:
        self.log = Log()
        last = Hlc(self.topic[-1], 0, "StateStore") if self.topic else None
        size = change(1).held_bytes
        self.capture = ChangeCapture(
            "changes", 0, self.log.append_run, self.log.call_later, last=last, max_bytes=3 * size
        )
        self.outbox.asked.clear()
        self.told = self.number
        self.capture.resume(self.outbox.after(self.capture.last), self.outbox.read, self.trim)

    def trim(self, version: Hlc) -> None:
        assert version.wall_ms == self.topic[-1]
        self.outbox.changes = [change for change in self.outbox.changes if change.version > version]

    @rule(count=st.integers(1, 5))
    def make(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.outbox.changes.append(change(self.number))

    @rule(count=st.integers(1, 5))
    def tell(self, count: int) -> None:
        told = range(self.told + 1, min(self.told + count, self.number) + 1)
        self.told += len(told)
        self.capture.append([change(number) for number in told])

    @rule(count=st.integers(0, 4), fails=st.booleans())
    def go_on(self, count: int, *, fails: bool) -> None:
        """What the capture waits for happens, or fails: there is one thing at most."""
        if self.outbox.asked:
            self.outbox.answer(StorageError("no") if fails else None)
        elif self.log.later:
            self.log.later.pop()()
        elif self.log.offered:
            run, done = self.log.offered.pop()
            stored = run[:count] if fails else run
            self.topic += [int((Record.decode(data, flag).id or "").split(":")[0]) for data, flag, _ in stored]
            done(len(stored), UnavailableError("no", applied=False) if fails else None)

    @invariant()
    def every_change_is_there_once_and_in_order(self) -> None:
        assert self.topic == list(range(1, len(self.topic) + 1))
        figures = self.capture.metric_values()
        # What was announced, and what a page brought before it was.
        assert self.told - len(self.topic) <= figures["waiting"] <= self.number - len(self.topic)
        page = self.outbox.page
        assert figures["waiting_memory_bytes"] <= max(4, page) * change(1).held_bytes
        assert len(self.log.offered) + len(self.log.later) + len(self.outbox.asked) <= 1, "one thing at a time"

    def teardown(self) -> None:
        self.tell(self.number)
        while self.outbox.asked or self.log.offered or self.log.later:
            self.go_on(0, fails=False)
        assert self.topic == list(range(1, self.number + 1))
        assert self.capture.waiting == 0


TestCaptureMachine = CaptureMachine.TestCase
TestCaptureMachine.settings = settings(max_examples=50, stateful_step_count=30)


class Node:
    """A store and a log in one directory, as the node puts them together."""

    def __init__(self, path: Path, durability: Durability = Durability.FLUSHED, max_bytes: int = 1 << 20) -> None:
        self.path = path
        self.durability = durability
        self.max_bytes = max_bytes

    async def start(self) -> Peer:
        self.broker = TubeBroker(self.path)
        await self.broker.start("127.0.0.1", 0)
        self.broker.create_topic("changes", 1)
        newest = self.broker.newest_message("changes", 0)
        loop = asyncio.get_running_loop()
        self.capture = ChangeCapture(
            "changes",
            0,
            self.broker.append_run,
            loop.call_later,
            last=None if newest is None else version_of(*newest),
            max_bytes=self.max_bytes,
        )
        self.store = StateStoreService(self.path / "statestore", self.durability, capture=self.capture)
        outlet = FakeOutlet()
        await self.store.start(outlet)
        self.outlet = outlet
        return Peer(self.store, outlet, ManualClock(1_000))

    async def close(self) -> None:
        await self.store.close()
        await self.broker.close()

    async def captured(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.capture.stats.captured < count:
                await asyncio.sleep(0.001)

    def records(self) -> list[Record]:
        """Every record of the topic, read through the log itself."""
        from penstock.tube.codec.proto import broker_pb2 as pb
        from penstock.tube.storage.store import Store

        topics = self.broker.engine.topics
        store = topics.store(topics.by_name["changes"], 0)
        assert isinstance(store, Store)
        found = store.read(0, store.min_offset, max_bytes=1 << 30).messages
        messages = [pb.GetMessageResponseB2C.FromString(message).messages[0] for message in found]
        return [Record.decode(message.payLoadData, message.flag) for message in messages]


async def test_every_change_is_in_the_topic_once_and_in_order_over_restarts(tmp_path: Path) -> None:
    node = Node(tmp_path)
    peer = await node.start()
    for number in range(300):
        peer.send(f"SET k{number % 7} {number}")
    peer.send("DEL k3")
    await node.captured(301)
    await node.close()
    peer = await node.start()
    assert node.capture.stats.captured == 0
    peer.send("SET again v")
    await node.captured(1)
    records = node.records()
    await node.close()
    versions = [record.id or "" for record in records]
    assert len(versions) == 302
    assert versions == sorted(set(versions))
    assert [record.value for record in records[:300]] == [b"%d" % number for number in range(300)]
    assert [(record.key, record.msg_type) for record in records[300:]] == [(b"k3", "DELETE"), (b"again", "SET")]


@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_a_crash_between_commit_and_capture_loses_and_doubles_nothing(tmp_path: Path, taken: int) -> None:
    """The process dies after the store's commit, when the log of the topic has ``taken`` of the changes."""
    node = Node(tmp_path)
    peer = await node.start()
    held: list[tuple[Run, Done]] = []
    node.capture._append = lambda _topic, _partition, run, done: held.append((run, done))
    for number in range(5):
        peer.send(f"SET k {number}")
    async with asyncio.timeout(60):
        while len(node.outlet.settled) < 5:
            await asyncio.sleep(0.001)
    stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    run = [record_of(c).encode() for c in node.capture._backlog.first(taken)]
    if run:
        node.broker.append_run("changes", 0, run, lambda count, _: stored.set_result(count))
        assert await stored == taken
    # Nothing of it was told to the store, which therefore trims nothing.
    await node.close()
    await node.start()
    await node.captured(5 - taken)
    values = [record.value for record in node.records()]
    await node.close()
    assert values == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("durability", Durability)
async def test_a_tube_that_takes_nothing_for_a_while_gets_everything_then(
    tmp_path: Path, durability: Durability
) -> None:
    """Far more than fits into memory comes meanwhile; one restart lies within, and one comes after."""
    node = Node(tmp_path, durability, max_bytes=10_000)
    full = UnavailableError("the disk is full", applied=False)
    expected = [b"%d" % number for number in range(600)]

    async def changes(peer: Peer, of: range) -> None:
        def refused(topic: str, partition: int, messages: Run, done: Done) -> None:
            asyncio.get_running_loop().call_soon(done, 0, full)

        node.capture._append = refused
        before = node.capture.waiting
        for number in of:
            peer.send(f"SET k{number % 7} {number}")
        async with asyncio.timeout(60):
            while node.capture.waiting < before + len(of):
                await asyncio.sleep(0.001)

    peer = await node.start()
    await changes(peer, range(300))
    assert node.capture.metric_values()["waiting_memory_bytes"] < 12_000
    await node.close()
    peer = await node.start()
    await changes(peer, range(300, 600))
    node.capture._append = node.broker.append_run
    node.capture._later = lambda _, callback: asyncio.get_running_loop().call_soon(callback)
    if not node.capture._busy:
        pytest.fail("it offers what it has again and again")
    peer.send("SET last v")
    await node.captured(601)
    assert node.capture.waiting == 0
    await node.close()
    await node.start()
    assert node.capture.waiting == 0
    values = [record.value for record in node.records()]
    await node.close()
    assert values == [*expected, b"v"]


async def test_the_newest_message_of_a_partition(tmp_path: Path) -> None:
    broker = TubeBroker(tmp_path)
    await broker.start("127.0.0.1", 0)
    assert broker.newest_message("nothing", 0) is None
    broker.create_topic("demo", 2)
    assert broker.newest_message("demo", 1) is None
    done: asyncio.Future[tuple[int, PenstockError | None]] = asyncio.get_running_loop().create_future()
    messages = [(b"a", 0, None), (b"b", 0, "type"), (b"", 0, None), (b"c", 0, None)]
    broker.append_run("demo", 1, messages, lambda count, error: done.set_result((count, error)))
    assert not done.done()
    count, error = await done
    assert count == 2
    assert isinstance(error, RefusedError)
    assert broker.newest_message("demo", 1) == (b"b", 0)
    assert broker.newest_message("demo", 0) is None
    await broker.close()
