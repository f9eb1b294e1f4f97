"""The lease: exclusion, waiting, renewal, loss and the token that stays the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock.statestore.client.locks
from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.client.client import SetResult, StateStoreClient
from penstock.statestore.client.locks import LeaderElection, Lease
from penstock.statestore.errors import FencingError, LeaseLostError, LockHeldError, NoStateStoreError
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.attach import Attachment
from penstock.statestore.service.service import StateStoreService
from tests.conformance.statestore.node import StoreNode


def is_held(lease: Lease) -> bool:
    return lease.token is not None


@asynccontextmanager
async def without_session(node: StoreNode) -> AsyncIterator[tuple[StateStoreClient, Callable[[], None]]]:
    """A client without a session, and a function after which it loses its connection instead of the next answer."""
    loses = False
    links: set[asyncio.Task[None]] = set()

    def lose() -> None:
        nonlocal loses
        loses = True

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        nonlocal loses
        with suppress(OSError):
            while data := await reader.read(65_536):
                if answers and loses and b"__stat" in data:
                    loses = False
                    break
                writer.write(data)
        writer.transport.abort()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_node, to_node = await asyncio.open_connection("127.0.0.1", node.port)
        for pair, answers in (((reader, to_node), False), ((from_node, writer), True)):
            links.add(asyncio.create_task(copy(*pair, answers=answers)))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with StateStoreClient.connect(url, client_id="a", session_expiry_s=0, timeout_s=60) as client:
        yield client, lose
    assert not loses
    server.close()
    await asyncio.wait(links)


async def test_a_lock_repeats_a_request_whose_answer_was_lost_without_a_session(
    node: StoreNode, other: StateStoreClient
) -> None:
    """A second execution for the same holder changes nothing for others."""
    async with without_session(node) as (client, lose):
        lease = Lease(client, "lock", holder="me", ttl_ms=60_000)
        for acquire in (lease.acquire, partial(lease.acquire, timeout_s=0), lease.try_acquire):
            lose()
            token = await acquire()
            assert token is not None
            assert await other.get("lock") == (b"me", token)
            lose()
            await lease.release()
            assert await other.get("lock") is None
        election = LeaderElection(client, "leader", candidate="me", ttl_ms=60_000)

        async def work(token: Hlc) -> Hlc:
            return token

        lose()
        assert isinstance(await election.run(work), Hlc)
        assert await election.leader() is None


async def test_an_attempt_without_an_answer_does_not_leave_the_lock_held(
    store: StateStoreClient, other: StateStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def executed(*args: object, **given: Any) -> None:
        await other.set("lock", "me", ttl_ms=60_000)
        raise UnavailableError("no answer", applied=None)

    monkeypatch.setattr(store, "set", executed)
    lease = Lease(store, "lock", holder="me", ttl_ms=60_000)
    for acquire in (partial(lease.acquire, timeout_s=0.05), lease.try_acquire):
        with pytest.raises(UnavailableError, match=r"no answer|was not acquired within"):
            await acquire()
        assert await other.get("lock") is None


@pytest.mark.parametrize("limit_s", [None, 60.0])
async def test_a_cancelled_attempt_does_not_leave_the_lock_held(
    store: StateStoreClient, other: StateStoreClient, monkeypatch: pytest.MonkeyPatch, limit_s: float | None
) -> None:
    set_key, executed = store.set, asyncio.Event()

    async def unanswered(*args: Any, **options: Any) -> Any:
        await set_key(*args, **options)
        executed.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "set", unanswered)
    lease = Lease(store, "lock", holder="me", ttl_ms=600_000)
    for acquire in (partial(lease.acquire, timeout_s=limit_s), partial(lease.try_acquire, timeout_s=limit_s)):
        executed.clear()
        waiting = asyncio.create_task(acquire())
        await executed.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await other.get("lock"), lease.token) == (None, None)


async def test_a_cancelled_wait_does_not_leave_the_lock_held_that_it_has_just_acquired(
    store: StateStoreClient, other: StateStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe, waits, acquired = store.observe, asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow_to_end(*args: Any, **options: Any) -> AsyncIterator[Any]:
        async with observe(*args, **options) as changes:
            waits.set()
            yield changes
            acquired.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(store, "observe", slow_to_end)
    theirs, lease = Lease(other, "lock", holder="other"), Lease(store, "lock", holder="me", ttl_ms=600_000)
    await theirs.acquire()
    waiting = asyncio.create_task(lease.acquire())
    await waits.wait()
    await theirs.release()
    await acquired.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await other.get("lock"), lease.token) == (None, None)


async def test_acquire_release_and_acquire_again(store: StateStoreClient) -> None:
    lease = Lease(store, "lock", holder="me")
    first = await lease.acquire(timeout_s=60)
    assert lease.token == first
    assert (await store.get("lock")) == (b"me", first)
    with pytest.raises(LocalProtocolError, match="already held"):
        await lease.acquire()
    await lease.release()
    assert await store.get("lock") is None
    assert not is_held(lease)
    await lease.release()
    assert await lease.acquire() > first
    await lease.release()
    assert not lease.lost.is_set()


async def test_a_second_holder_waits_for_the_release(store: StateStoreClient, other: StateStoreClient) -> None:
    mine, theirs = Lease(store, "lock", holder="a", ttl_ms=60_000), Lease(other, "lock", holder="b", ttl_ms=60_000)
    first = await mine.acquire()
    with pytest.raises(LockHeldError, match="lock 'lock' was not acquired within") as raised:
        await theirs.acquire(timeout_s=0.05)
    assert raised.value.applied is False
    assert (raised.value.name, raised.value.holder) == (b"lock", b"a")
    assert (raised.value.why or "").startswith("'a' holds it; last acquired or renewed at ")
    waiting = asyncio.create_task(theirs.acquire(timeout_s=60))
    async with asyncio.timeout(60):
        while not other._observations._keys:
            await asyncio.sleep(0)
    await mine.release()
    assert await waiting > first
    await theirs.release()


async def test_a_lock_whose_holder_died_is_taken_over_at_its_expiry(
    store: StateStoreClient, other: StateStoreClient
) -> None:
    await store.set("lock", "dead", ttl_ms=100)
    async with Lease(other, "lock", holder="b") as lease:
        assert lease.token is not None
        assert (await store.get("lock") or (None,))[0] == b"b"


async def test_renewals_keep_the_lock_and_leave_the_token_alone(
    store: StateStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Often, yet held for long: a busy machine must not lose the lease in between.
    monkeypatch.setattr(penstock.statestore.client.locks, "_RENEWALS_PER_TTL", 600)
    async with Lease(store, "lock", holder="me", ttl_ms=30_000) as lease, store.observe("lock") as changes:
        token = lease.token
        assert token is not None
        versions = []
        async with asyncio.timeout(60):
            async for change in changes:
                assert change.operation == "SET"
                versions.append(change.version)
                if len(versions) == 4:
                    break
        assert lease.token == token
        assert not lease.lost.is_set()
        assert versions == sorted(versions, key=lambda version: version or token)
        assert all(version is not None and version > token for version in versions)
        await store.set("protected", "v", fencing_token=lease.token)


async def test_the_token_of_a_former_holder_is_refused(store: StateStoreClient, other: StateStoreClient) -> None:
    async with Lease(store, "lock", holder="a") as lease:
        old = lease.token
    async with Lease(other, "lock", holder="b") as lease:
        await other.set("protected", "v", fencing_token=lease.token)
        with pytest.raises(RefusedError, match="lower version"):
            await store.set("protected", "late", fencing_token=old)


async def test_a_refused_renewal_loses_the_lease(store: StateStoreClient, other: StateStoreClient) -> None:
    lease = Lease(store, "lock", holder="me", ttl_ms=90)
    await lease.acquire()
    await other.set("lock", "thief")
    async with asyncio.timeout(60):
        await lease.lost.wait()
    assert lease.token is None
    # Not ours any more, so it stays.
    await lease.release()
    assert (await other.get("lock") or (None,))[0] == b"thief"
    await other.delete("lock")
    await lease.acquire(timeout_s=60)
    assert not lease.lost.is_set()
    await lease.release()


async def test_a_renewal_without_an_answer_does_not_hold_a_lock_that_was_lost(
    store: StateStoreClient, other: StateStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_key = store.set

    async def unanswered(*args: Any, **options: Any) -> None:
        await set_key(*args, **{**options, "ttl_ms": 600_000})
        raise UnavailableError("no answer", applied=None)

    lease = Lease(store, "lock", holder="me", ttl_ms=90)
    for again in (False, True):
        await lease.acquire(timeout_s=60)
        monkeypatch.setattr(store, "set", unanswered)
        async with asyncio.timeout(60):
            await lease.lost.wait()
            monkeypatch.undo()
            if again:  # this request is not undone
                lease.ttl_ms = 600_000
                token = await lease.acquire()
                assert await store.get("lock") == (b"me", token)
                await lease.release()
            while await other.get("lock") is not None:
                await asyncio.sleep(0.01)


async def test_a_store_out_of_reach_loses_the_lease_within_its_time(node: StoreNode) -> None:
    """Not only once the request that renews it has gone without an answer."""
    async with StateStoreClient.connect(node.url, timeout_s=600) as store:
        lease = Lease(store, "lock", holder="me", ttl_ms=150)
        await lease.acquire()
        await node.server.close()
        async with asyncio.timeout(30):
            await lease.lost.wait()
        store.timeout_s = 0.05
        with pytest.raises(UnavailableError):
            await lease.release()


async def test_waiting_continues_while_the_store_is_unreachable(node: StoreNode) -> None:
    async with StateStoreClient.connect(node.url) as store:
        await node.close()
        store.timeout_s = 0.1
        lease = Lease(store, "lock", holder="me")
        with pytest.raises(UnavailableError, match="not acquired") as raised:
            await lease.acquire(timeout_s=0.25)
        assert "no answer" in (raised.value.why or "")
        with pytest.raises(UnavailableError, match="no answer"):
            await lease.acquire(timeout_s=0)
        waiting = asyncio.create_task(lease.acquire(timeout_s=60))
        await node.start()
        store.timeout_s = 10.0
        assert await waiting is not None
        await lease.release()


async def test_without_a_time_limit_an_outage_only_delays_a_lock_and_an_election(
    node: StoreNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with StateStoreClient.connect(node.url) as store:
        attempts = 0
        set_key = store.set

        async def attempt(*args: Any, **options: Any) -> SetResult:
            nonlocal attempts
            attempts += 1
            return await set_key(*args, **options)

        monkeypatch.setattr(store, "set", attempt)
        election = LeaderElection(store, "leader", candidate="me", ttl_ms=60_000)
        lease = Lease(store, "lock", holder="me", ttl_ms=60_000)
        await node.close()
        store.timeout_s = 0.05

        async def lead(token: Hlc) -> Hlc:
            return token

        waiting = [asyncio.create_task(work) for work in (election.run(lead), lease.acquire())]
        while attempts < 6:
            await asyncio.sleep(0.01)
            assert [task for task in waiting if task.done()] == []
        assert "no answer to SET" in caplog.text
        await node.start()
        store.timeout_s = 10.0
        assert all(await asyncio.gather(*waiting))
        await lease.release()
    assert caplog.text.count("lock not acquired yet") == 2, "an outage is reported once"


async def test_a_broker_that_never_had_a_store_ends_the_wait_for_a_lock() -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}", timeout_s=0.5) as client:
        for acquire in (
            Lease(client, "lock", holder="me").acquire,
            partial(Lease(client, "lock", holder="me").acquire, timeout_s=60),
            LeaderElection(client, "leader", candidate="me").campaign,
        ):
            with pytest.raises(NoStateStoreError, match=r"no answer to SET") as raised:
                await acquire()
            assert "the broker has no subscriber" in (raised.value.why or "")
            assert "penstock statestore attach" in (raised.value.hint or "")
    await server.close()


async def test_an_attached_store_that_restarts_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    url = f"mqtt://127.0.0.1:{port}"

    def without_session(**options: Any) -> MqttClient:
        """As if the broker had lost the session, in which it queues requests."""
        return MqttClient(url, **{**options, "clean_start": True, "session_expiry_s": 0})

    def attached() -> Attachment:
        service = StateStoreService(tmp_path / "attached", Durability.FLUSHED)
        return Attachment(service, without_session, client_id="store", lease_s=3600)

    async with StateStoreClient.connect(url) as client:
        async with attached():
            await client.get("lock")
        client.timeout_s = 0.05
        lease = Lease(client, "lock", holder="me")
        waiting = asyncio.create_task(lease.acquire())
        while "lock not acquired yet" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        client.timeout_s = 10.0
        async with attached():
            await waiting
            await lease.release()
    await server.close()


async def test_a_client_that_is_closed_ends_the_wait_for_a_lock(
    node: StoreNode, caplog: pytest.LogCaptureFixture
) -> None:
    client = StateStoreClient.connect(node.url)
    async with client:
        await node.close()
        client.timeout_s = 0.05
        waiting = asyncio.create_task(Lease(client, "lock", holder="me").acquire())
        while "lock not acquired yet" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not waiting.done()
    with pytest.raises(UnavailableError):
        await waiting
    await node.start()


async def test_a_store_that_does_not_answer_in_the_time_given_is_no_other_holder(node: StoreNode) -> None:
    async with StateStoreClient.connect(node.url) as store:
        await node.close()
        with pytest.raises(UnavailableError, match=r"not acquired within 0\.05 s") as raised:
            await Lease(store, "lock", holder="me").acquire(timeout_s=0.05)
        assert not isinstance(raised.value, LockHeldError)
        assert "no answer" in (raised.value.why or "")
    await node.start()


async def test_an_mqtt_client_that_is_over_is_no_busy_loop(node: StoreNode) -> None:
    client = StateStoreClient.connect(node.url, reconnect=False)
    async with client:
        await node.close()
        with pytest.raises(PenstockError, match=r"mqtt|state store"):
            await Lease(client, "lock", holder="me").acquire()
    await node.start()


async def test_leaving_the_block_without_a_connection_is_no_error(
    node: StoreNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with StateStoreClient.connect(node.url) as store:
        async with Lease(store, "lock", holder="me", ttl_ms=60_000):
            store.timeout_s = 0.05
            await node.close()
        assert "lease not released" in caplog.text
    await node.start()


async def test_only_one_of_many_holds_it(store: StateStoreClient, other: StateStoreClient) -> None:
    inside = 0
    tokens = []

    async def work(client: StateStoreClient, holder: str) -> None:
        nonlocal inside
        async with Lease(client, "lock", holder=holder) as lease:
            inside += 1
            assert inside == 1
            tokens.append(lease.token)
            await client.get("lock")
            inside -= 1

    async with asyncio.timeout(30):
        await asyncio.gather(*(work(store if n % 2 else other, f"h{n}") for n in range(8)))
    assert tokens == sorted(tokens, key=str)
    assert len(set(tokens)) == 8


async def test_ttl_must_be_positive(store: StateStoreClient) -> None:
    with pytest.raises(LocalProtocolError):
        Lease(store, "lock", holder="me", ttl_ms=0)


async def test_try_acquire_asks_once(store: StateStoreClient, other: StateStoreClient) -> None:
    mine, theirs = Lease(store, "lock", holder="a"), Lease(other, "lock", holder="b")
    assert await mine.current_holder() is None
    token = await mine.try_acquire()
    assert token == mine.token
    assert await theirs.try_acquire() is None
    assert await theirs.current_holder() == b"a"
    await mine.release()
    assert await theirs.try_acquire() is not None
    await theirs.release()


async def test_run_gives_what_the_work_gave_and_releases(store: StateStoreClient) -> None:
    lease = Lease(store, "lock", holder="me")

    async def work(token: Hlc) -> Hlc:
        assert await lease.current_holder() == b"me"
        return token

    assert isinstance(await lease.run(work), Hlc)
    assert await store.get("lock") is None

    async def fail(_: Hlc) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await lease.run(fail)
    assert await store.get("lock") is None


async def test_run_cancels_the_work_when_the_lease_is_lost(
    store: StateStoreClient, other: StateStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock.statestore.client.locks, "_RENEWALS_PER_TTL", 600)
    lease = Lease(store, "lock", holder="me", ttl_ms=30_000)
    ended = asyncio.Event()

    async def work(_: Hlc) -> None:
        await other.set("lock", "thief")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(LeaseLostError, match="lock 'lock' was lost") as raised:
        await lease.run(work)
    assert ended.is_set()
    assert raised.value.why == "another client holds it"
    assert (await other.get("lock") or (None,))[0] == b"thief"


async def test_run_that_is_cancelled_twice_releases_the_lock(store: StateStoreClient) -> None:
    lease = Lease(store, "lock", holder="a", ttl_ms=600_000)
    began, ending, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(_token: Hlc) -> None:
        try:
            began.set()
            await ended.wait()
        finally:
            ending.set()
            await ended.wait()

    async with asyncio.timeout(60):
        running = asyncio.create_task(lease.run(work))
        await began.wait()
        running.cancel()
        await ending.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        ended.set()
    assert not is_held(lease)
    assert await lease.current_holder() is None


async def test_edit_reads_and_writes_under_the_lock(store: StateStoreClient, other: StateStoreClient) -> None:
    async def count(client: StateStoreClient, holder: str) -> None:
        lease = Lease(client, "lock", holder=holder)
        for _ in range(5):
            await lease.edit("n", lambda entry: b"%d" % (int(entry.value if entry else b"0") + 1))

    async with asyncio.timeout(30):
        await asyncio.gather(count(store, "a"), count(other, "b"))
    assert (await store.get("n") or (None,))[0] == b"10"
    with pytest.raises(FencingError):
        await store.set("n", "without the lock")
    await Lease(store, "lock", holder="a").edit("n", lambda _: None)
    assert await store.get("n") is None


async def test_edit_of_a_key_under_another_lock_is_refused(store: StateStoreClient) -> None:
    lease = Lease(store, "lock", holder="a")
    token = await lease.acquire()
    ahead = Hlc(token.wall_ms + 30_000, 0, "other")
    await store.set("n", "v", fencing_token=ahead)
    await lease.release()
    with pytest.raises(FencingError):
        await lease.edit("n", lambda _: "w")
    assert await store.get("lock") is None
