"""Observations begin without a gap, whatever comes right behind the store's answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.statestore.binding import notification
from penstock.statestore.client.observations import Entry, Observations, SharedKeys
from penstock.statestore.client.requests import RequestSender
from penstock.statestore.codec.dialects import SDK
from penstock.statestore.engine.record import Change as Written
from penstock.statestore.engine.record import Record
from penstock.statestore.errors import InvalidRequestError
from penstock.statestore.hlc import Hlc, parse

OK = (b"+OK\r\n", Hlc(10, 0, "store"))


class Store:
    """Answers KEYNOTIFY; a change of the key comes with the answer, before whoever waits for it can go on."""

    def __init__(self) -> None:
        self.clock = SimpleNamespace(receive=parse)
        self.observations = Observations(cast(RequestSender, self), self.read, SharedKeys())
        self.entry = Entry(b"new", Hlc(11, 0, "store"))

    async def call(self, words: list[bytes], **_: object) -> tuple[bytes, Hlc]:
        if b"STOP" not in words:
            change = Written(b"line/1", Record(b"line/1", b"new", self.entry.version), self.entry.version)
            self.observations.receive_notification(notification(change, "me", SDK))
        return OK

    async def read(self, key: bytes) -> Entry:
        assert key == b"line/1"
        return self.entry


async def test_a_change_right_after_the_answer_reaches_the_observer_of_a_prefix() -> None:
    store = Store()
    async with store.observations.observe(b"line/", prefix=True) as changes:
        assert changes.entry is None
        async with asyncio.timeout(60):
            change = await anext(aiter(changes))
    assert (change.key, change.operation, change.value) == (b"line/1", "SET", b"new")


async def test_an_observation_of_a_single_key_starts_with_its_value() -> None:
    store = Store()
    async with store.observations.observe(b"line/1") as changes:
        assert changes.entry == store.entry
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(aiter(changes))


class ChangedBehindTheRead(Store):
    """The key is missing at each GET, and is set before whoever waits for the answer goes on; does not resume."""

    async def call(self, words: list[bytes], **_: object) -> tuple[bytes, Hlc]:
        if b"AFTER" in words:
            raise InvalidRequestError("no such option", text="syntax error")
        return OK

    async def read(self, key: bytes) -> Entry | None:  # type: ignore[override]
        change = Written(key, Record(key, b"new", self.entry.version), self.entry.version)
        self.observations.receive_notification(notification(change, "me", SDK))
        return None


async def test_a_change_right_after_the_answer_that_the_key_is_missing_is_the_entry() -> None:
    store = ChangedBehindTheRead()
    async with store.observations.observe(b"line/1") as changes:
        assert changes.entry == store.entry
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(aiter(changes))


async def test_it_is_no_deletion_after_a_reconnect() -> None:
    store = ChangedBehindTheRead()
    async with store.observations.observe(b"line/1") as changes:
        store.entry = Entry(b"newer", Hlc(12, 0, "store"))
        await store.observations.restore()
        assert changes.entry is not None
        assert changes.entry.version == store.entry.version
        async with asyncio.timeout(60):
            change = await anext(aiter(changes))
        assert (change.operation, change.version) == ("SET", store.entry.version)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(aiter(changes))


async def test_an_observation_that_begins_while_others_end_gets_the_changes() -> None:
    """The first block ends, the second is cancelled while it waits for that, then the third begins."""
    stopping, stopped = asyncio.Event(), asyncio.Event()

    class SlowStop(Store):
        async def call(self, words: list[bytes], **_: object) -> tuple[bytes, Hlc]:
            if b"STOP" in words:
                stopping.set()
                await stopped.wait()
            return OK

    store = SlowStop()
    began, read = asyncio.Event(), asyncio.Event()

    async def observe() -> list[str]:
        async with store.observations.observe(b"line/1") as changes:
            began.set()
            await read.wait()
            changes.close()
            return [change.operation async for change in changes]

    read.set()
    async with asyncio.timeout(60):
        first = asyncio.create_task(observe())
        store.observations.open = True
        await stopping.wait()
        second = asyncio.create_task(observe())
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        began.clear()
        read.clear()
        stopped.set()
        third = asyncio.create_task(observe())
        await began.wait()
        await asyncio.wait([first, second])
        change = Written(b"line/1", None, Hlc(20, 0, "store"), previous=Hlc(11, 0, "store"))
        store.observations.receive_notification(notification(change, "me", SDK))
        read.set()
        assert await third == ["DELETE"]
    assert not store.observations._keys
