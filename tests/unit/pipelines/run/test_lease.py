"""The record of a run, its stop request and runs that wait for the lease, with a state store in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import RefusedError, UnavailableError
from penstock.mqtt.server import MqttServer
from penstock.pipelines.run import lease
from penstock.pipelines.run.lease import LeaseHolder, RunRecord, lease_holder, stop_run
from penstock.pipelines.run.write_back import WriteBack
from penstock.runtime.io.files import Durability
from penstock.statestore.service.service import StateStoreService


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker with a state store, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[MqttServer, StateStoreService, str]:
        store = StateStoreService(Path(tmp_path_factory.mktemp("store")), Durability.FLUSHED)
        server = MqttServer(services=[store])
        await store.start(server.outlet)
        host, port = await server.start("127.0.0.1", 0)
        return server, store, f"mqtt://{host}:{port}"

    async def close() -> None:
        await server.close()
        await store.close()

    server, store, url = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    yield url
    asyncio.run_coroutine_threadsafe(close(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


Runs = Callable[[], WriteBack]


@pytest.fixture
def new_run(broker: str, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Makes runs of the test's own pipeline, connected."""
    runs: list[WriteBack] = []

    def make() -> WriteBack:
        run = WriteBack(broker, request.node.name)
        runs.append(run)
        run.connect()
        return run

    yield make
    for run in runs:
        run.close()


def test_a_record_comes_back_and_others_are_none() -> None:
    record = RunRecord("abc", "edge-7", 42, "2024-05-01T00:00:00Z", progress={"sinks": {"rows": {"read": 1}}})
    assert RunRecord.decode(record.encode().encode()) == record
    # What a later version adds is left out.
    assert RunRecord.decode(b'{"run": "abc", "more": 1}') == RunRecord("abc")
    for other in (b"abc", b"[]", b'{"run": 5}', b"\xff", b"{}", b'{"state": "running"}', b"[" * 100_000):
        assert RunRecord.decode(other) is None
    assert str(LeaseHolder("abc", None, record)) == "run abc (host edge-7, process 42, since 2024-05-01T00:00:00Z)"
    assert (str(LeaseHolder("abc", None)), str(LeaseHolder(None, None))) == ("run abc", "no run")


def test_the_lease_holder_publishes_where_it_runs(broker: str, new_run: Runs, request: pytest.FixtureRequest) -> None:
    pipeline = request.node.name
    assert lease_holder(broker, pipeline, 10.0) == LeaseHolder(None, None)
    first, second = new_run(), new_run()
    assert first.try_acquire() is not None
    assert second.try_acquire() is None
    first.publish_last(RunRecord(first.run_id, "edge-7", 42))
    holder = second.holder()
    assert (holder.run, holder.record) == (first.run_id, RunRecord(first.run_id, "edge-7", 42))
    # The word of another run says nothing of this one.
    first.publish_last(RunRecord("earlier", "edge-6"))
    assert second.holder().record is None


def test_a_wait_that_is_broken_off_leaves_the_lease_free(new_run: Runs) -> None:
    first, second, third = new_run(), new_run(), new_run()
    first.acquire(10.0)
    waiting = second.acquiring(60.0)
    waiting.cancel()
    second.close()
    first.close()
    assert third.try_acquire() is not None


def test_a_run_is_asked_to_stop_and_waited_for(broker: str, new_run: Runs, request: pytest.FixtureRequest) -> None:
    run = new_run()
    run.acquire(10.0)
    run.publish_last(RunRecord(run.run_id))
    told: list[LeaseHolder] = []

    def work() -> None:
        assert run.stop_asked.wait(30.0)
        run.publish_last(RunRecord(run.run_id, state=lease.STOPPED))
        run.close()

    thread = threading.Thread(target=work)
    thread.start()
    stopped = stop_run(broker, request.node.name, timeout_s=30.0, answer_s=10.0, on_requested=told.append)
    thread.join()
    assert stopped == lease.StopResult(run.run_id, clean=True)
    assert [holder.run for holder in told] == [run.run_id]
    again = stop_run(broker, request.node.name, timeout_s=1.0, answer_s=10.0, on_requested=told.append)
    assert again == lease.StopResult(None, clean=True)
    other = stop_run(broker, f"{request.node.name}_other", timeout_s=1.0, answer_s=10.0, on_requested=told.append)
    assert other == lease.StopResult(None, clean=True, known=False)
    # The request was for that run alone.
    after = new_run()
    after.acquire(10.0)
    assert not after.stop_asked.wait(0.3)


def test_a_failed_or_running_run_is_reported(broker: str, new_run: Runs, request: pytest.FixtureRequest) -> None:
    pipeline = request.node.name
    run = new_run()
    run.acquire(10.0)
    with pytest.raises(UnavailableError, match="has not stopped within"):
        stop_run(broker, pipeline, timeout_s=0.2, answer_s=10.0, on_requested=lambda _: None)

    def fail() -> None:
        run.publish_last(RunRecord(run.run_id, state=lease.FAILED, why="the disk is full"))
        run.close()

    failing = threading.Thread(target=fail)
    stopped = stop_run(broker, pipeline, timeout_s=30.0, answer_s=10.0, on_requested=lambda _: failing.start())
    failing.join()
    assert stopped == lease.StopResult(run.run_id, clean=False, why="the disk is full")


def test_a_run_that_died_said_nothing(
    broker: str, new_run: Runs, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "FINAL_STATUS_S", 0.0)  # the answers of the store do not count
    run = new_run()
    run.acquire(10.0)
    run.publish_last(RunRecord(run.run_id))
    stopped = stop_run(broker, request.node.name, timeout_s=30.0, answer_s=10.0, on_requested=lambda _: run.close())
    assert (stopped.run, stopped.clean) == (run.run_id, False)
    assert "its lease expired" in stopped.why


def request_to(run: WriteBack) -> lease.ApplyRequest:
    """The request to ``run``, which gets it in another thread."""
    end = time.monotonic() + 30.0
    while (request := run.apply_asked) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return request


def answering(run: WriteBack, result: str) -> threading.Thread:
    """A thread that answers the request to ``run``."""

    def answer() -> None:
        request = request_to(run)
        run.accept(request)
        run.answer(lease.ApplyAnswer(request.id, request.version, result, "what", "why", "hint"))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_run_is_asked_for_a_version_and_answers(broker: str, new_run: Runs, request: pytest.FixtureRequest) -> None:
    run = new_run()
    run.acquire(10.0)
    for number, result in enumerate((lease.APPLIED, lease.REFUSED)):
        thread = answering(run, result)
        asked = lease.ApplyRequest(f"id{number}", run.run_id, 7)
        answer = lease.apply_version(broker, request.node.name, asked, timeout_s=30.0, answer_s=10.0)
        thread.join()
        assert answer == lease.ApplyAnswer(asked.id, 7, result, "what", "why", "hint")
        assert run.apply_asked is None


def test_a_run_without_an_answer_is_reported(
    broker: str, new_run: Runs, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "ASK_AGAIN_S", 0.05)
    pipeline, run = request.node.name, new_run()
    run.acquire(10.0)
    asked = lease.ApplyRequest("id", run.run_id, 2)
    with pytest.raises(UnavailableError, match=r"has not answered within 0\.3 s whether it uses version 2"):
        lease.apply_version(broker, pipeline, asked, timeout_s=0.3, answer_s=10.0)
    # It gets the request, which stays valid; a later run does not.
    assert request_to(run) == asked
    run.close()
    later = new_run()
    later.acquire(10.0)
    with pytest.raises(UnavailableError, match="ended before it answered"):
        lease.apply_version(broker, pipeline, asked, timeout_s=30.0, answer_s=10.0)
    assert later.apply_asked is None


@pytest.mark.parametrize("value", [None, b"", b"[]", b"{}", b'{"id": "a", "run": "r", "version": "1"}', b"\xff"])
def test_what_other_clients_write_is_no_request(value: bytes | None) -> None:
    assert lease.decode_request(value, "r") is None


def test_without_a_run_the_lease_guards_the_change(broker: str, new_run: Runs, request: pytest.FixtureRequest) -> None:
    tokens: list[str] = []
    lease.with_lease(broker, request.node.name, tokens.append, 10.0)
    run = new_run()
    assert str(run.acquire(10.0)) > tokens[0]
    with pytest.raises(RefusedError, match="has just started"):
        lease.with_lease(broker, request.node.name, tokens.append, 10.0)
    assert len(tokens) == 1
