"""The client with what only our store has, on a real server that has it switched on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.node.config.statestore import StateStoreSection
from penstock.statestore.client.client import KeyChange, StateStoreClient, Write
from penstock.statestore.client.locks import Lease
from penstock.statestore.codec.commands import Extension
from penstock.statestore.errors import (
    FencingError,
    InvalidRequestError,
    LockHeldError,
    StateStoreError,
    WritesRefusedError,
)
from penstock.statestore.options import OPTIONAL_EXTENSIONS, extensions_named
from penstock.testing import LocalNode

ALL = list(OPTIONAL_EXTENSIONS)


@pytest.fixture
def node(tmp_path: Path) -> LocalNode:
    return LocalNode(tmp_path, durability="flushed", extensions=ALL)


@pytest.fixture
async def store(node: LocalNode) -> AsyncIterator[StateStoreClient]:
    with node:
        async with StateStoreClient.connect(node.url, client_id="a") as client:
            yield client


def test_extensions_have_names() -> None:
    assert extensions_named(ALL) == ~Extension.NONE
    with pytest.raises(ValueError, match="extension 'x' is not one of scan, mget, ttl"):
        extensions_named(["x"])


def test_each_extension_can_be_named_in_the_configuration_and_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert StateStoreSection(extensions=ALL).extensions == ALL
    for wrong in ("x", "scan"):
        with pytest.raises(ValueError, match=f"extension '{wrong}' is not one of mget, ttl"):
            StateStoreSection(extensions=[wrong])
    assert main(["statestore", "attach", "--extension", "x"]) == 2
    assert f"'x' is not one of {', '.join(ALL)}" in " ".join(capsys.readouterr().err.split())


async def test_reading(store: StateStoreClient) -> None:
    first = (await store.set("a", "1")).version
    assert first is not None
    second = await store.set("a", "2", ttl_ms=60_000)
    snapshot = await store.get_many(["a", "none"])
    assert snapshot.version is not None
    assert second.version is not None
    assert snapshot.entries == {b"a": (b"2", second.version), b"none": None}
    assert snapshot.version >= second.version
    assert await store.get_values(["a", b"none"]) == {b"a": b"2", b"none": None}
    assert await store.get("a", as_of=first) == (b"1", first)
    left = await store.expiry("a")
    assert left.exists
    assert left.left_ms is not None
    assert 0 < left.left_ms <= 60_000
    await store.set("a", "3")
    assert [await store.expiry("a"), await store.expiry("none")] == [(True, None), (False, None)]


async def test_writing_many(store: StateStoreClient) -> None:
    async with Lease(store, "run", holder="me") as lease, asyncio.timeout(60), store.observe_prefix("k") as changes:
        assert lease.token is not None
        await store.set("locked", "v", fencing_token=lease.token)
        writes = [Write.set(f"k{number}", str(number), ttl_ms=60_000) for number in range(1000)]
        assert await store.write_many(writes, fencing_token=lease.token) == [True] * 1000
        told = [await anext(changes) for _ in range(1000)]
        assert [(change.key, change.value) for change in told] == [(b"k%d" % n, b"%d" % n) for n in range(1000)]
        versions = [change.version for change in told if change.version is not None]
        assert versions == sorted(set(versions))
        assert (await store.get("k999"), (await store.expiry("k0")).left_ms is None) == ((b"999", versions[-1]), False)
        with pytest.raises(WritesRefusedError, match=r"DEL 'locked': a fencing token is required.*1 of 2 writes"):
            await store.write_many([Write.delete("locked"), Write.set("free", "v")])
        assert await store.get("free") is not None


async def test_a_prefix_fence_stops_a_zombie_that_writes_a_new_key(store: StateStoreClient) -> None:
    async with Lease(store, "run", holder="first") as lease:
        old = lease.token
    async with Lease(store, "run", holder="second") as lease:
        await store.set("out/started", "1", fencing_token=lease.token, fence_prefix="out/")
        with pytest.raises(FencingError):
            await store.set("out/never seen", "late", fencing_token=old)
        await store.set("out/never seen", "v", fencing_token=lease.token)


async def test_a_held_lock_reports_its_remaining_time(store: StateStoreClient) -> None:
    await store.set("lock", "somebody", ttl_ms=60_000)
    with pytest.raises(LockHeldError) as raised:
        await Lease(store, "lock", holder="me").acquire(timeout_s=0)
    told = re.match(r"'somebody' holds it, expires in (\d+\.\d) s unless renewed", raised.value.why or "")
    assert told is not None
    assert 30 < float(told[1]) <= 60


async def test_observing_a_prefix(store: StateStoreClient) -> None:
    async with asyncio.timeout(60), store.observe_prefix("line/") as changes, store.observe("line/1") as single:
        written = [(await store.set(key, "v")).version for key in ("line/1", "other", "line/2")]
        await store.delete("line/1")
        assert await anext(changes) == KeyChange(b"line/1", "SET", b"v", written[0])
        assert await anext(changes) == KeyChange(b"line/2", "SET", b"v", written[2])
        deleted = await anext(changes)
        assert (deleted.key, deleted.operation) == (b"line/1", "DELETE")
        assert [(await anext(single)).operation for _ in range(2)] == ["SET", "DELETE"]


async def missed(node: LocalNode, store: StateStoreClient) -> None:
    """KeyChange keys while the observer has no connection: it is cut, and what is written comes before it is back."""
    node.restart()
    async with StateStoreClient.connect(node.url) as other:
        for value in ("1", "2", "3"):
            await other.set("line/1", value)
    await store.get("line/1")


async def test_no_change_is_missed_across_a_reconnect(node: LocalNode, store: StateStoreClient) -> None:
    async with asyncio.timeout(60):
        await store.set("line/1", "0")
        async with store.observe("line/1") as single, store.observe_prefix("line/") as changes:
            await missed(node, store)
            for observation in (single, changes):
                told = [await anext(observation) for _ in range(3)]
                assert [change.value for change in told] == [b"1", b"2", b"3"]


async def test_without_resuming_an_observed_prefix_reports_possibly_missed_changes(tmp_path: Path) -> None:
    with LocalNode(tmp_path, extensions=["prefix-observe"]) as node:
        async with (
            asyncio.timeout(60),
            StateStoreClient.connect(node.url) as store,
            store.observe_prefix("line/") as changes,
        ):
            await missed(node, store)
            lost = await anext(changes)
            while lost.operation == "SET":  # what came after the observation was there again
                lost = await anext(changes)
            assert lost == KeyChange(b"line/", "LOST", None, None, missed=True)
            await store.set("line/9", "v")
            while (change := await anext(changes)).key != b"line/9":
                assert change.key == b"line/1"


async def test_a_store_without_extensions_raises_an_error(tmp_path: Path) -> None:
    with LocalNode(tmp_path) as node:
        async with StateStoreClient.connect(node.url) as store:
            written = (await store.set("k", "v")).version
            assert written is not None
            with pytest.raises(InvalidRequestError):
                await store.get_many(["k"])
            with pytest.raises(InvalidRequestError):
                await store.get("k", as_of=written)
            with pytest.raises(StateStoreError):
                await store.set("k", "v", fencing_token=written, fence_prefix="k")
            with pytest.raises(InvalidRequestError):
                await store.expiry("k")
            with pytest.raises(InvalidRequestError):
                await store.observe_prefix("k").__aenter__()
            assert store._observations._keys == {}
