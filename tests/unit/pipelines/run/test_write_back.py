from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.mqtt.server import MqttServer
from penstock.pipelines.run import lease, write_back
from penstock.pipelines.run.write_back import WriteBack
from penstock.runtime.io.files import Durability
from penstock.runtime.io.loop import LoopThread
from penstock.spark.statestore import writes
from penstock.spark.statestore.writes import write_rows
from penstock.statestore.blocking import Client
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.errors import FencingError, InvalidRequestError, QuotaExceededError
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.service import StateStoreService
from penstock.testing import LocalNode
from tests.ports import free_port


class Store:
    """Takes what is set; refuses prefixes with ``error``."""

    def __init__(self, error: RefusedError | None = None) -> None:
        self.error = error
        self.prefixes: list[str] = []

    async def set(self, _key: str, _value: str, *, fencing_token: Hlc, fence_prefix: str, resend: bool) -> None:
        assert fencing_token == Hlc(1, 0, "n")
        if self.error is not None:
            raise self.error
        self.prefixes.append(fence_prefix)


class HeldLease:
    """A lease, until it is lost."""

    lost_why = "no renewal succeeded in time"

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.token: Hlc | None = Hlc(1, 0, "n")

    def lose(self) -> None:
        self.token = None
        self.lost.set()


Held = Callable[[Any], WriteBack]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Makes runs that hold their lease."""

    def make(store: Any) -> WriteBack:
        run = WriteBack("mqtt://127.0.0.1:1", "p")
        monkeypatch.setattr(run, "_client", store)
        monkeypatch.setattr(run, "_token", Hlc(1, 0, "n"))
        monkeypatch.setattr(run, "_lease", HeldLease())
        return run

    return make


def fence(run: WriteBack, *prefixes: str) -> Any:
    return asyncio.run(run._fence(prefixes))


def test_prefixes_are_fenced_with_the_token_of_the_run(held: Held) -> None:
    store = Store()
    assert fence(held(store), "a/", "b/") == ["a/", "b/"] == store.prefixes


def test_a_store_that_fences_no_prefixes_is_told_and_a_later_run_is_an_error(held: Held) -> None:
    assert fence(held(Store(InvalidRequestError("refused", text="syntax error"))), "a/") == []
    with pytest.raises(FencingError):
        fence(held(Store(FencingError("refused", text="an older token"))), "a/")


def test_the_lease_holder_is_unknown_if_the_broker_is_unreachable() -> None:
    with pytest.raises(PenstockError) as caught:
        lease.lease_holder("mqtt://127.0.0.1:1", "p", 0.3)
    assert "PENSTOCK_BROKER" in str(caught.value.hint)


def test_a_full_store_is_named_as_the_cause_and_has_room_after_a_delete(tmp_path: Path) -> None:
    with LocalNode(tmp_path, max_keys=1) as node, Client(node.url) as store:
        store.set("a", "1")
        run = WriteBack(node.url, "p")
        run.connect()
        try:
            for acquire in (
                run.try_acquire,
                lambda: run.acquire(60.0),
                lambda: lease.with_lease(node.url, "p", lambda _: None, 60.0),
            ):
                with pytest.raises(QuotaExceededError) as caught:
                    acquire()
                assert caught.value.what == (
                    "the state store has no room for the lease of pipeline 'p': the quota has been exceeded"
                )
                assert "penstock/pipeline/p/lease would exceed max_keys" in str(caught.value.why)
            store.delete("a")
            assert run.try_acquire() is not None
        finally:
            run.close()


class Node:
    """An MQTT broker with the state store, in a thread of its own, that goes away and comes back."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = LoopThread("node")
        self._port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._thread.run(self._start())

    def stop(self) -> None:
        self._thread.run(self._stop())

    def close(self) -> None:
        self._thread.close()

    async def _start(self) -> None:
        self._store = StateStoreService(self._directory, Durability.FLUSHED)
        self._mqtt = MqttServer(services=[self._store])
        await self._store.start(self._mqtt.outlet)
        _, self._port = await self._mqtt.start("127.0.0.1", self._port)

    async def _stop(self) -> None:
        await self._mqtt.close()
        await self._store.close()


def change_batch(*changes: tuple[str, str | None]) -> pa.RecordBatch:
    keys, values = zip(*changes, strict=True)
    return pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.string()), "value": pa.array(values, pa.string())})


def written_by(run: WriteBack, *changes: tuple[str, str | None]) -> int:
    """Tries again, as the batch of a pipeline: a lease as short as in these tests may run out at any time."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return write_rows(run.target("s", 0), [change_batch(*changes)], 0)
        except UnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.stop()
    node.close()


@pytest.fixture
def run(node: Node) -> Iterator[WriteBack]:
    run = WriteBack(node.url, "p")
    run.connect()
    run.acquire(60.0)
    yield run
    run.close()


def value(url: str, key: str) -> bytes | None:
    async def read() -> bytes | None:
        async with StateStoreClient.connect(url) as store:
            found = await store.get(key)
            return None if found is None else found.value

    return asyncio.run(read())


def test_tasks_write_the_changes_of_a_key_in_order_in_chunks(
    node: Node, run: WriteBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "CHUNK_CHANGES", 7)
    rows: list[tuple[str, str | None]] = [(f"k{number // 4}", str(number)) for number in range(100)]
    batches = [change_batch(*rows[:50]), change_batch(*rows[50:], ("k24", None))]
    assert write_rows(run.target("s", 3), batches, 3) == 101
    assert [value(node.url, f"k{number}") for number in (0, 7, 23, 24)] == [b"3", b"31", b"95", None]
    assert write_rows(run.target("s", 3), [], 3) == 0


def test_a_task_of_a_run_without_its_lease_writes_nothing(node: Node, run: WriteBack) -> None:
    target = run.target("s", 0)
    other = target._replace(holder="another")
    for refused in (other, target._replace(lease="penstock/pipeline/none/lease")):
        with pytest.raises(UnavailableError, match="currently does not hold its lease"):
            write_rows(refused, [change_batch(("k", "1"))], 0)
    assert value(node.url, "k") is None


def test_a_replaced_attempt_of_a_task_cannot_write_any_more(
    node: Node, run: WriteBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same run and token: only the connection says which of them may write."""
    monkeypatch.setattr(writes, "CHUNK_CHANGES", 1)
    target = run.target("s", 0)

    def replaced() -> Iterator[pa.RecordBatch]:
        yield change_batch(("k", "old 1"))
        with ThreadPoolExecutor(1) as another:
            assert another.submit(write_rows, target, [change_batch(("k", "new"))], 0).result(60.0) == 1
        yield change_batch(("k", "old 2"))

    with pytest.raises(UnavailableError):
        write_rows(target, replaced(), 0)
    assert value(node.url, "k") == b"new"


def test_a_lease_that_ran_out_in_an_outage_is_taken_back_under_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "LEASE_MS", 300)
    said: queue.Queue[str] = queue.Queue()
    node = Node(tmp_path)
    run = WriteBack(node.url, "p", warn=said.put)
    try:
        run.connect()
        token = run.acquire(10.0)
        run.publish_last(lease.RunRecord(run.run_id, host="here"))
        node.stop()
        assert "was not renewed in time" in said.get(timeout=20.0)
        assert not run.lost.is_set()
        node.start()
        assert "no other run has held it" in said.get(timeout=20.0)
        assert run.token == token
        assert written_by(run, ("k", "1")) == 1
        holder = run.holder()
        assert holder.run == run.run_id
        assert holder.record is not None
        assert holder.record.host == "here"
        assert not run.lost.is_set()
    finally:
        run.close()
        node.stop()
        node.close()


class RanOut:
    """A lease that ran out, and the store behind it; ``refuse`` is what a write of the run's record meets."""

    lost_why = "no renewal succeeded in time"

    def __init__(self, *, free: bool, refuse: PenstockError | None = None) -> None:
        self.lost = asyncio.Event()
        self.lost.set()
        self.token: Hlc | None = None
        self._free = free
        self._refuse = refuse

    async def try_acquire(self, *, timeout_s: float) -> Hlc | None:
        assert timeout_s > 0
        self.token = Hlc(9, 0, "n") if self._free else None
        return self.token

    async def set(self, _key: str, _value: str, *, fencing_token: Hlc, timeout_s: float, resend: bool) -> None:
        assert (fencing_token, timeout_s > 0) == (Hlc(1, 0, "n"), True)
        if self._refuse is not None:
            raise self._refuse


@pytest.mark.parametrize(
    "lease",
    [
        pytest.param({"free": False}, id="held by another"),
        pytest.param({"free": True, "refuse": FencingError("refused", text="an older token")}, id="had by another"),
        pytest.param({"free": True, "refuse": UnavailableError("away")}, id="away for too long"),
    ],
)
def test_a_lease_that_another_run_has_had_is_lost(
    lease: dict[str, Any], held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "OUTAGE_S", 0.05)
    monkeypatch.setattr(write_back, "_ASK_AGAIN_S", 0.01)

    async def keep() -> bool:
        lost: Any = RanOut(**lease)
        run = held(lost)
        await run._keep(lost)
        return run.lost.is_set()

    assert asyncio.run(keep())
