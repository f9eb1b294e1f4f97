"""Change capture: records, order, refusals; and with a real store and a real log over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.node.capture import ChangeCapture, record_of, version_of
from penstock.runtime.durability import Durability
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.record import Record as Kept
from penstock.statestore.hlc import Hlc
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


def test_a_record_tells_everything_of_a_change() -> None:
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
    capture.resume([change(1), change(2)], trimmed.append)
    capture.take([change(3, None)])
    assert len(log.offered) == 1
    log.take()
    log.take()
    assert log.ids == [1, 2, 3]
    assert [version.wall_ms for version in trimmed] == [2, 3]
    assert (capture.stats.captured, capture.stats.waiting) == (3, 0)
    capture.take([change(4)])
    log.take()
    assert log.ids[-1] == 4


def test_what_the_topic_has_is_left_out_after_a_restart() -> None:
    log = Log()
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=Hlc(2, 0, "StateStore"))
    capture.resume([change(1), change(2), change(3)], lambda _: None)
    log.take()
    assert log.ids == [3]


def test_what_is_not_taken_is_offered_again_and_nothing_passes_it(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume([change(n) for n in range(1, 5)], lambda _: None)
    slow = UnavailableError("the disk does not keep up", applied=False)
    log.take(2, slow)
    capture.take([change(5)])
    assert log.offered == []
    log.later.pop()()
    log.take()
    assert log.ids == [1, 2, 3, 4, 5]
    assert (capture.stats.failures, capture.stats.waiting) == (1, 0)
    capture.take([change(6)])
    for _ in range(2):
        log.take(0, slow)
        log.later.pop()()
    assert len(caplog.records) == 2, "one for each series of failures"


def test_a_value_that_the_topic_never_takes_is_left_out_and_named() -> None:
    log = Log()
    capture = ChangeCapture("changes", 0, log.append_run, log.call_later, last=None)
    capture.resume([change(1), change(2, b"x" * 9), change(3)], lambda _: None)
    refused = RefusedError("too large", code=ErrCode.BAD_REQUEST, text="", peer="broker")
    log.take(1, refused)
    assert len(log.offered[0][0]) == 1
    log.take()
    log.take()
    assert log.ids == [1, 2, 3]
    assert (log.stored[1].value, dict(log.stored[1].headers)["omitted"]) == (b"", "9")


class Node:
    """A store and a log in one directory, as the node puts them together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def start(self) -> Peer:
        self.broker = TubeBroker(self.path)
        await self.broker.start("127.0.0.1", 0)
        self.broker.create_topic("changes", 1)
        newest = self.broker.newest("changes", 0)
        loop = asyncio.get_running_loop()
        self.capture = ChangeCapture(
            "changes",
            0,
            self.broker.append_run,
            loop.call_later,
            last=None if newest is None else version_of(*newest),
        )
        self.store = StateStoreService(self.path / "statestore", Durability.FLUSHED, capture=self.capture)
        outlet = FakeOutlet()
        await self.store.start(outlet)
        self.outlet = outlet
        return Peer(self.store, outlet, ManualClock(1_000))

    async def close(self) -> None:
        await self.store.close()
        await self.broker.close()

    async def captured(self, count: int) -> None:
        async with asyncio.timeout(20):
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
    async with asyncio.timeout(20):
        while len(node.outlet.settled) < 5:
            await asyncio.sleep(0.001)
    stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    run = [record_of(c).encode() for c in list(node.capture._waiting)[:taken]]
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


async def test_the_newest_message_of_a_partition(tmp_path: Path) -> None:
    broker = TubeBroker(tmp_path)
    await broker.start("127.0.0.1", 0)
    assert broker.newest("nothing", 0) is None
    broker.create_topic("demo", 2)
    assert broker.newest("demo", 1) is None
    done: asyncio.Future[tuple[int, PenstockError | None]] = asyncio.get_running_loop().create_future()
    messages = [(b"a", 0, None), (b"b", 0, "type"), (b"", 0, None), (b"c", 0, None)]
    broker.append_run("demo", 1, messages, lambda count, error: done.set_result((count, error)))
    assert not done.done()
    count, error = await done
    assert count == 2
    assert isinstance(error, RefusedError)
    assert broker.newest("demo", 1) == (b"b", 0)
    assert broker.newest("demo", 0) is None
    await broker.close()
