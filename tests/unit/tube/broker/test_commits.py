"""Commits in the event loop or in a thread, and data that is written behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.io.files import DirectFile, DirectFiles, Durability
from penstock.tube.storage.meta import MetaStore
from tests.unit.tube.broker_client import running

NEVER_S = 3600.0


class Watched(DirectFiles):
    """Notes which thread synced a file."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def open(self, path: Path) -> Any:
        return self._watch(super().open(path))

    def create(self, path: Path) -> Any:
        return self._watch(super().create(path))

    def _watch(self, file: Any) -> Any:
        threads = self.threads

        class WatchedFile(DirectFile):
            __slots__ = ()

            def sync(self) -> None:
                threads.append(threading.current_thread().name)
                super().sync()

        watched = WatchedFile(file._fd)
        file._fd = -1
        return watched


async def test_small_appends_are_committed_in_the_loop_and_all_else_in_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, thread = threading.current_thread().name, "commit-tube-1"
    files = Watched()
    async with running(tmp_path, files=files) as (broker, client):
        broker.commits.queue.inline_s = NEVER_S  # however slow the disk is

        async def sent(data: bytes) -> list[str]:
            files.threads.clear()
            assert (await client.answer(client.send(data))).success
            return files.threads

        assert set(await sent(b"makes the files")) == {thread}
        assert await sent(b"small") == [loop]
        assert await sent(bytes(65_000)) == [loop]
        assert await sent(bytes(66_000)) == [thread]
        while await sent(bytes(60_000)) == [loop]:
            pass
        assert files.threads == [thread], "it did not fit into what is filled with zeros"
        assert await sent(b"small") == [loop]
        await client.register()
        await client.get()
        before = broker.commits.queue.inline_commits
        await client.confirm()
        assert broker.commits.queue.inline_commits == before + 1, "a position goes to a log, too"
        monkeypatch.setattr(MetaStore, "may_wait", lambda _: True)
        await client.answer(client.send(b"one more"))
        before = broker.commits.queue.inline_commits
        await client.get()
        await client.confirm()
        assert broker.commits.queue.inline_commits == before, "that log is nearly full"


async def test_no_commit_waits_for_a_position_that_only_a_get_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tube.broker.commits.OFFSETS_S", NEVER_S)

    async with running(tmp_path) as (broker, client):

        def stored() -> int | None:
            return next((row.offset for row in broker.storage.meta.offsets()), None)

        await client.answer(client.send(b"first"))
        await client.register()
        await broker.committed()
        await client.get()
        await client.answer(client.send(b"second"))
        await client.get(consumed=True)
        await client.answer(client.send(b"third"))
        assert stored() == 0, "that the group is there is stored at once; for the rest each send would have waited"
        await client.get(consumed=True)
        await client.confirm()
        assert stored() == 84, "who confirms is told when it is stored"
        await client.answer(client.send(b"fourth"))
        await client.get()
        await client.get(consumed=True)
    async with running(tmp_path) as (broker, client):
        assert broker.engine.offsets.committed(("group", "demo", 0)) == 112, "stored at the end"
        monkeypatch.setattr("penstock.tube.broker.commits.OFFSETS_S", 0.001)
        await client.answer(client.send(b"fifth"))
        await client.register()
        await client.get()
        await client.get(consumed=True)
        async with asyncio.timeout(60):
            while next(row.offset for row in broker.storage.meta.offsets()) != 140:
                await asyncio.sleep(0)


async def test_acknowledgements_from_memory_do_not_wait_for_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tube.broker.commits.WRITE_BEHIND_S", NEVER_S)
    async with running(tmp_path, durability=Durability.MEMORY) as (broker, client):
        await broker.committed()
        before = broker.commits.count
        for n in range(20):
            await client.answer(client.send(b"%d" % n))
        assert broker.commits.count == before
        assert broker.stats["unwritten_bytes"] > 0
        await broker.committed()
        assert (broker.commits.count, broker.stats["unwritten_bytes"]) == (before + 1, 0)
        await client.answer(client.send(b"written at the end"))
    async with running(tmp_path, durability=Durability.MEMORY) as (broker, client):
        assert broker.storage.recovery.records == 21


@pytest.mark.parametrize("setting", [("WRITE_BEHIND_S", 0.001), ("WRITE_BEHIND_BYTES", 0)])
async def test_memory_topics_are_written_after_a_delay_or_a_size(
    setting: tuple[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tube.broker.commits.WRITE_BEHIND_S", NEVER_S)
    monkeypatch.setattr(f"penstock.tube.broker.commits.{setting[0]}", setting[1])
    async with running(tmp_path, durability=Durability.MEMORY) as (broker, client):
        for n in range(3):
            await client.answer(client.send(b"%d" % n))
            async with asyncio.timeout(60):
                while broker.stats["unwritten_bytes"]:
                    await asyncio.sleep(0)


async def test_a_durable_topic_does_not_wait_for_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tube.broker.commits.WRITE_BEHIND_S", NEVER_S)
    durable = {"safe": Durability.DURABLE}
    async with running(tmp_path, durability=Durability.MEMORY, topic_durability=durable) as (broker, client):
        broker.create_topic("safe")
        await client.answer(client.send(b"from memory"))
        async with asyncio.timeout(60):
            assert (await client.answer(client.send(b"synced", topic="safe"))).success
        assert broker.stats["unwritten_bytes"] == 0


async def test_only_commits_of_durable_topics_are_synced(tmp_path: Path) -> None:
    files = Watched()
    kinds = {"safe": Durability.DURABLE, "quick": Durability.MEMORY}
    async with running(tmp_path, durability=Durability.FLUSHED, topic_durability=kinds, files=files) as (
        broker,
        client,
    ):
        for topic in kinds:
            broker.create_topic(topic)

        async def synced(topic: str) -> int:
            await client.answer(client.send(b"makes the files, or goes to those that are there", topic=topic))
            await broker.committed()
            count = len(files.threads)
            await client.answer(client.send(b"goes to the files that are there", topic=topic))
            await broker.committed()
            return len(files.threads) - count

        assert [await synced(topic) for topic in ("demo", "safe", "quick")] == [0, 1, 0]
