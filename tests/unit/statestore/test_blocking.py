"""The façade without asyncio, against a real server that runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import LocalProtocolError, UnavailableError
from penstock.runtime.io.loop import LoopThread
from penstock.statestore.blocking import Client
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.errors import FencingError, LockHeldError
from tests.conformance.statestore.node import StoreNode


class Server:
    """A store that tests without a loop can use."""

    def __init__(self, path: Path) -> None:
        self.thread = LoopThread("server")
        self.node = StoreNode(path)
        self.thread.run(self.node.start())

    @property
    def url(self) -> str:
        return self.node.url

    def restart(self) -> None:
        self.thread.run(self.node.restart())

    def close(self) -> None:
        self.thread.run(self.node.close())
        self.thread.close()


NOT_BLOCKING = {"connect", "on_lost", "on_restored", "timeout_s"}
"""The constructor's part, and hooks, which run in the loop of the asyncio client."""


def test_every_method_of_the_client_exists() -> None:
    methods = {name for name in vars(StateStoreClient) if not name.startswith("_")}
    missing = methods - NOT_BLOCKING - set(dir(Client))
    assert not missing, f"add to BlockingCommands in statestore/client/client.py: {sorted(missing)}"
    assert methods >= NOT_BLOCKING


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "statestore")
    yield server
    server.close()


@pytest.fixture
def store(server: Server) -> Iterator[Client]:
    with Client(server.url, client_id="a") as client:
        yield client
    assert client.closed


def test_get_set_delete(store: Client) -> None:
    assert store.client_id == "a"
    assert not store.closed
    assert store.get("k") is None
    written = store.set("k", b"\x00")
    assert store.get("k") == (b"\x00", written.version)
    assert store.clock_behind_ms is not None
    assert (store.vdelete("k", "x"), store.delete("k"), store.delete("k")) == (-1, 1, 0)


def test_observe_is_an_iterator(store: Client, server: Server) -> None:
    store.set("k", "before")
    with Client(server.url) as other, store.observe("k") as changes:
        assert changes.entry is not None
        assert changes.entry.value == b"before"
        assert changes.next(timeout_s=0.01) is None
        other.set("k", "1")
        other.delete("k")
        first = next(changes)
        assert (first.operation, first.value) == ("SET", b"1")
        second = changes.next(timeout_s=60)
        assert second is not None
        assert (second.operation, changes.dropped) == ("DELETE", 0)
    assert server.node.service.observations == 0


def test_an_observation_survives_the_server(store: Client, server: Server) -> None:
    with store.observe("k") as changes:
        server.restart()
        store.set("k", "v")
        assert next(changes).value == b"v"


def test_an_iteration_ends_when_another_thread_closes_the_client(server: Server) -> None:
    client = Client(server.url).open()
    seen: list[str] = []
    ready = threading.Event()

    def watch() -> None:
        with client.observe("k") as changes:
            ready.set()
            seen.extend(change.operation for change in changes)

    watching = threading.Thread(target=watch)
    watching.start()
    assert ready.wait(60)
    client.set("k", "v")
    while not seen and watching.is_alive():
        client.get("k")
    client.close()
    watching.join(60)
    assert (seen, watching.is_alive()) == (["SET"], False)


def test_locks(store: Client, server: Server) -> None:
    with Client(server.url, client_id="b") as other, store.lock("lock", ttl_ms=60_000) as lease:
        assert (lease.name, lease.holder, lease.lost) == (b"lock", b"a", False)
        theirs = other.lock("lock")
        assert theirs.try_acquire() is None
        assert theirs.current_holder() == b"a"
        with pytest.raises(LockHeldError):
            theirs.acquire(timeout_s=0.02)
        old = lease.token
        lease.release()
        token = theirs.acquire(timeout_s=60)
        other.set("k", "v", fencing_token=token)
        with pytest.raises(FencingError):
            store.set("k", "late", fencing_token=old)
        theirs.release()
        assert theirs.edit("n", lambda entry: b"1" if entry is None else None) is not None


def test_elections(store: Client, server: Server) -> None:
    with Client(server.url, client_id="b") as other:
        mine, theirs = store.election("leader"), other.election("leader")
        with theirs.observe() as leaders:
            assert next(leaders).candidate is None
            assert mine.campaign() == mine.token
            assert next(leaders).candidate == b"a"
            assert (mine.is_leader, theirs.is_leader, theirs.leader()) == (True, False, b"a")
            mine.resign()
            assert next(leaders).candidate is None


def test_misuse_and_absence_are_explained(server: Server) -> None:
    client = Client(server.url)
    with pytest.raises(LocalProtocolError, match="not open"):
        client.get("k")
    with client, pytest.raises(LocalProtocolError, match="open already"):
        client.open()
    client.close()
    with pytest.raises(UnavailableError, match="no connection"):
        Client("mqtt://127.0.0.1:1").open()


def test_a_client_that_was_not_closed_warns(server: Server) -> None:
    client = Client(server.url).open()
    thread = client._thread
    with pytest.warns(ResourceWarning, match="unclosed state store client"):
        client.__del__()
    client.close()
    assert thread is not None
    with pytest.raises(LocalProtocolError):
        thread.run(_nothing())


async def _nothing() -> None:
    """Never run."""
