"""The client against a real server: every method, errors with their reason, observations across reconnects."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.packets import Connect, Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from penstock.mqtt.service import Inbound, Service
from penstock.runtime.io.clock import wall_clock_ms
from penstock.statestore.client.client import Condition, Entry, KeyChange, Observation, SetResult, StateStoreClient
from penstock.statestore.codec.resp3 import decode_array
from penstock.statestore.errors import ClockSkewError
from penstock.statestore.hlc import Hlc
from tests.conformance.statestore.node import StoreNode


def connect(node: StoreNode, client_id: str | None = None, **options: float) -> StateStoreClient:
    return StateStoreClient.connect(node.url, client_id=client_id, timeout_s=options.get("timeout_s", 10.0))


async def next_of(changes: Observation) -> KeyChange:
    async with asyncio.timeout(60):
        return await anext(changes)


async def test_set_get_delete(node: StoreNode) -> None:
    async with connect(node) as store:
        assert await store.get("k") is None
        written = await store.set("k", b"\x00v\r\n")
        assert written.applied
        entry = await store.get(b"k")
        assert entry == (b"\x00v\r\n", written.version)
        assert await store.vdelete("k", "other") == -1
        assert await store.vdelete("k", b"\x00v\r\n") == 1
        assert await store.vdelete("k", "v") == 0
        assert await store.delete("k") == 0
        await store.set("k", "")
        assert (await store.get("k") or (None,))[0] == b""
        assert await store.delete("k") == 1


async def test_a_value_above_the_maximum_packet_size_is_named(node: StoreNode) -> None:
    async with connect(node) as store:
        with pytest.raises(LocalProtocolError) as caught:
            await store.set("big", bytes(5 << 20))
    assert caught.value.what == "state store: the value of key 'big' is too large"
    assert (caught.value.why or "").startswith("the message has 52")
    assert caught.value.hint == "split it, or raise mqtt.limits.max_packet_size of the broker"


async def test_conditions(node: StoreNode) -> None:
    async with connect(node) as store:
        first = await store.set("k", "v", condition=Condition.NX)
        assert await store.set("k", "w", condition=Condition.NX) == SetResult(applied=False, version=first.version)
        assert not (await store.set("k", "w", condition=Condition.NEX)).applied
        again = await store.set("k", "v", condition=Condition.NEX, ttl_ms=60_000)
        assert again.applied
        assert again.version is not None
        assert first.version is not None
        assert again.version > first.version


async def test_fencing_token_and_hints(node: StoreNode) -> None:
    async with connect(node) as store:
        low = (await store.set("lock", "a")).version
        high = (await store.set("lock", "a")).version
        await store.set("k", "v", fencing_token=high)
        with pytest.raises(LocalProtocolError, match="fencing_token is 'abc', expected a version"):
            await store.set("k", "v", fencing_token="abc")  # type: ignore[arg-type] # misuse
        with pytest.raises(RefusedError, match="fencing token is required") as raised:
            await store.set("k", "w")
        assert raised.value.text == "a fencing token is required for this request"
        with pytest.raises(RefusedError, match="lower version") as raised:
            await store.delete("k", fencing_token=low)
        assert raised.value.hint is not None
        assert "later holder" in raised.value.hint
        assert await store.delete("k", fencing_token=high) == 1


async def test_a_clock_that_is_fast_is_explained(node: StoreNode) -> None:
    clock = iter(range(10**15, 10**16))
    async with MqttClient("127.0.0.1", node.port, client_id="fast") as mqtt:
        async with StateStoreClient(mqtt, clock=lambda: next(clock)) as store:
            with pytest.raises(RefusedError, match="too far in the future") as raised:
                await store.set("k", "v")
            assert "clock" in (raised.value.hint or "")
        # The MQTT client is the caller's: it is still connected.
        assert mqtt.connected


async def test_a_clock_that_is_slow_is_no_obstacle(node: StoreNode, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        MqttClient("127.0.0.1", node.port, client_id="slow") as mqtt,
        StateStoreClient(mqtt, clock=lambda: 1_000_000) as store,
    ):
        written = await store.set("k", "v")
        assert written.applied
        assert (await store.get("k") or (None, None))[1] == written.version
        assert "ahead of the local clock" in caplog.text


@pytest.mark.parametrize("bad", ["key", "ttl"])
async def test_misuse_is_refused_before_anything_is_sent(node: StoreNode, bad: str) -> None:
    async with connect(node) as store:
        with pytest.raises(LocalProtocolError):
            await (store.get("") if bad == "key" else store.set("k", "v", ttl_ms=0))
    assert node.service.stats.requests == 0


async def test_many_requests_at_once_find_their_own_answers(node: StoreNode) -> None:
    async with connect(node) as store:
        await asyncio.gather(*(store.set(f"k{n}", f"v{n}") for n in range(300)))
        entries = await asyncio.gather(*(store.get(f"k{n}") for n in range(300)))
        assert [entry and entry.value for entry in entries] == [f"v{n}".encode() for n in range(300)]


async def test_without_a_state_store_the_request_times_out() -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}") as store:
        store.timeout_s = 0.05  # of the request alone: the connection has its time
        with pytest.raises(UnavailableError, match=r"no answer to GET 'k' within 0\.05 s") as raised:
            await store.get("k")
        assert raised.value.applied is None
    await server.close()


async def test_the_client_announces_no_topic_aliases() -> None:
    """The broker sends an encoded response as it is only to clients without aliases."""
    received: asyncio.Future[Connect] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder(role=Role.SERVER)
        while not received.done():
            for packet in decoder.feed(await reader.read(1000)):
                assert isinstance(packet, Connect)
                received.set_result(packet)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UnavailableError):
        async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}"):
            pass
    assert (await received).properties.topic_alias_maximum is None
    server.close()
    await server.wait_closed()


async def test_an_unreachable_broker_raises_unavailable() -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    await server.close()
    with pytest.raises(UnavailableError):
        async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}"):
            pass


class OddStore(Service):
    """A store that answers every request with the same message."""

    filters = ("statestore/#",)
    exclusive = True
    reserved = ()

    def __init__(self, payload: bytes, user: list[tuple[str, str]]) -> None:
        self.payload = payload
        self.user = user
        self.server = MqttServer(services=[self])

    def receive(self, message: Inbound) -> None:
        publish, client_id = message.publish, message.client_id
        properties = Properties(correlation_data=publish.properties.correlation_data, user_properties=self.user)
        message.settle()
        self.server.outlet.deliver(
            client_id, Publish(publish.properties.response_topic or "", self.payload, 1, properties=properties)
        )

    def disconnected(self, client_id: str) -> None:
        """Nothing to forget."""


class SilentStore(Service):
    """A store that acknowledges requests and never answers."""

    filters = ("statestore/#",)
    exclusive = True
    reserved = ()

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.server = MqttServer(services=[self])

    def receive(self, message: Inbound) -> None:
        message.settle()
        self.asked.set()

    def disconnected(self, client_id: str) -> None:
        """Nothing to forget."""


@pytest.mark.parametrize("session_expiry_s", [0, 300])
async def test_a_session_that_the_broker_has_lost_is_noticed(session_expiry_s: int) -> None:
    first, second = SilentStore(), SilentStore()
    _, port = await first.server.start("127.0.0.1", 0)
    url, restored = f"mqtt://127.0.0.1:{port}", asyncio.Event()
    async with StateStoreClient.connect(url, session_expiry_s=session_expiry_s) as store:
        store.on_restored(lambda _: restored.set())
        request = asyncio.create_task(store.get("k", timeout_s=60))
        await first.asked.wait()
        await first.server.close()
        assert store._requests.lost_sessions == 0
        await second.server.start("127.0.0.1", port)
        await asyncio.wait_for(restored.wait(), 60)
        assert store._requests.lost_sessions == 1
        request.cancel()
    await second.server.close()


OK = [("__stat", "200")]


@pytest.mark.parametrize(
    ("payload", "user", "error", "text"),
    [
        (b"+OK\r\n", OK, RemoteProtocolError, "answer to GET was ok"),
        (b"$1\r\nv\r\n", OK, RemoteProtocolError, "answer to GET was value"),
        (b"", OK, RemoteProtocolError, "not a response"),
        (b"-ERR a new text\r\n", OK, RefusedError, "a new text"),
        (b"", [("__stat", "505"), ("__stMsg", "the version is not supported")], RefusedError, "version is not"),
        (b"", [("__stat", "500")], RefusedError, "status 500"),
        (b"$-1\r\n", [], RefusedError, "has no status"),
    ],
)
async def test_odd_answers(payload: bytes, user: list[tuple[str, str]], error: type[PenstockError], text: str) -> None:
    odd = OddStore(payload, user)
    _, port = await odd.server.start("127.0.0.1", 0)
    async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}") as store:
        with pytest.raises(error, match=text) as raised:
            await store.get("k")
        if isinstance(raised.value, RefusedError):
            assert raised.value.code == {"505": 505, "500": 500}.get(dict(user).get("__stat", ""), 0)
    await odd.server.close()


# Observations


async def test_observe(node: StoreNode) -> None:
    async with connect(node) as store, connect(node) as other:
        await store.set("k", "before")
        async with store.observe("k") as changes:
            first = await other.set("k", "1")
            second = await store.set("k", "2")
            await store.set("other", "x")
            await other.delete("k")
            assert await next_of(changes) == KeyChange(b"k", "SET", b"1", first.version)
            assert await next_of(changes) == KeyChange(b"k", "SET", b"2", second.version)
            deleted = await next_of(changes)
            assert (deleted.operation, deleted.value) == ("DELETE", None)
            assert deleted.version is not None
        assert node.service.observations == 0


async def test_observe_sees_an_expiry(node: StoreNode) -> None:
    async with connect(node) as store, store.observe("k") as changes:
        await store.set("k", "v", ttl_ms=50)
        assert [(await next_of(changes)).operation for _ in range(2)] == ["SET", "DELETE"]


async def test_two_observers_of_one_key_share_an_observation(node: StoreNode) -> None:
    async with connect(node) as store:
        async with store.observe("k") as one:
            async with store.observe("k") as two:
                await store.set("k", "v")
                assert await next_of(one) == await next_of(two)
                assert node.service.observations == 1
            assert node.service.observations == 1
            await store.set("k", "w")
            assert (await next_of(one)).value == b"w"
        assert node.service.observations == 0


async def test_an_observer_that_comes_while_the_last_one_leaves(node: StoreNode) -> None:
    async with connect(node) as store:

        async def look() -> None:
            async with store.observe("k") as changes:
                await store.set("k", "v")
                assert (await next_of(changes)).operation == "SET"

        for _ in range(5):
            await asyncio.gather(look(), look(), look())
        assert node.service.observations == 0
        assert store._observations._keys == {}


async def test_an_outage_and_possibly_missed_changes_are_reported(node: StoreNode) -> None:
    async with connect(node) as store:
        kept = await store.set("kept", "v")
        lost: list[str] = []
        restored: asyncio.Queue[bool] = asyncio.Queue()
        store.on_lost(lambda error: lost.append(error.what))
        store.on_restored(restored.put_nowait)
        async with store.observe("kept") as observation:
            await node.close()
            await node.start()
            async with asyncio.timeout(60):
                assert await restored.get(), "it has the version that it had"
            assert lost
            assert kept.version is not None
            assert observation.entry == Entry(b"v", kept.version)
        async with store.observe("never there") as observation:
            await node.close()
            await node.start()
            async with asyncio.timeout(60):
                assert not await restored.get(), "it may have come and gone"
            assert observation.entry is None


async def test_clients_of_one_connection_leave_nothing_behind(
    node: StoreNode, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs create a store client for each message (Azure/iot-operations-sdks #1312)."""
    told: asyncio.Queue[bool] = asyncio.Queue()

    def fails(_: object) -> None:
        raise ValueError

    async with MqttClient(node.url, session_expiry_s=60) as mqtt:
        client = StateStoreClient(mqtt)
        for _ in range(2):  # one client may be opened again, and does not restore twice
            async with client as store:
                await store.set("k", "v")
        assert (mqtt._driver.connected_hooks, mqtt._driver.disconnected_hooks) == ([], [])
        for hook in (fails, told.put_nowait):
            client.on_lost(fails)
            client.on_restored(hook)
        async with client, asyncio.timeout(60):
            await node.close()
            await node.start()
            await told.get()
            assert (await client.get("k") or (None,))[0] == b"v"
        assert told.empty()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "a hook of the client failed"
    ] * 3


async def test_an_observation_survives_a_restart_and_reports_missed_changes(node: StoreNode) -> None:
    async with connect(node) as store:
        await store.set("kept", "old")
        await store.set("gone", "old")
        await store.set("same", "old")
        async with (
            store.observe("kept") as kept,
            store.observe("gone") as gone,
            store.observe("same") as same,
            store.observe("new") as new,
        ):
            port, node.port = node.port, 0
            await node.close()
            # Behind a port of its own, where the observer does not find it yet.
            await node.start()
            async with connect(node) as other:
                await other.set("kept", "newer")
                newest = await other.set("kept", "newest")
                await other.delete("gone")
                created = await other.set("new", "v")
            await node.close()
            node.port = port
            await node.start()
            assert await next_of(kept) == KeyChange(b"kept", "SET", b"newest", newest.version, missed=True)
            assert await next_of(gone) == KeyChange(b"gone", "DELETE", None, None, missed=True)
            assert await next_of(new) == KeyChange(b"new", "SET", b"v", created.version, missed=True)
            # And what comes now is told as ever.
            async with asyncio.timeout(60):
                while node.service.observations < 4:
                    await asyncio.sleep(0.01)
            changed = await store.set("same", "now")
            assert await next_of(same) == KeyChange(b"same", "SET", b"now", changed.version)


async def test_requests_wait_for_the_connection_to_come_back(node: StoreNode) -> None:
    async with connect(node) as store:
        await store.set("k", "v")
        await node.close()
        waiting = asyncio.create_task(store.get("k"))
        await node.start()
        entry = await waiting
        assert entry is not None
        assert entry.value == b"v"


async def test_an_iteration_ends_when_the_client_is_closed(node: StoreNode) -> None:
    store = connect(node)
    await store.__aenter__()
    async with store.observe("k") as changes:
        await store.set("k", "v")
        await store.__aexit__(None, None, None)
        async with asyncio.timeout(60):
            assert [change.operation async for change in changes] == ["SET"]


async def test_an_iteration_ends_with_the_error_when_the_connection_is_gone_for_good(node: StoreNode) -> None:
    async with (
        connect(node, "twin") as store,
        store.observe("k") as changes,
        StateStoreClient.connect(node.url, client_id="twin"),
    ):
        with pytest.raises(RefusedError, match="session taken over"):
            await next_of(changes)
        with pytest.raises(PenstockError):
            await store.get("k")


class Pages(Service):
    """A store that answers SCAN page by page and keeps what it was asked."""

    filters = ("statestore/#",)
    exclusive = True
    reserved = ()

    def __init__(self, *pages: bytes) -> None:
        self.pages = list(pages)
        self.asked: list[list[bytes]] = []
        self.server = MqttServer(services=[self])

    def receive(self, message: Inbound) -> None:
        given = message.publish.properties
        self.asked.append(decode_array(message.publish.payload))
        message.settle()
        properties = Properties(correlation_data=given.correlation_data, user_properties=OK)
        assert given.response_topic is not None
        self.server.outlet.publish(Publish(given.response_topic, self.pages.pop(0), 1, properties=properties))

    def disconnected(self, client_id: str) -> None:
        """Nothing to forget."""


async def test_scan_reads_page_by_page_and_gives_the_token_back_unchanged() -> None:
    pages = Pages(
        b"*2\r\n*2\r\n$2\r\nk1\r\n$2\r\n\r\n\r\n$3\r\n\x00\xffx\r\n",
        b"*2\r\n*0\r\n$1\r\nt\r\n",
        b"*1\r\n*1\r\n$2\r\nk3\r\n",
    )
    _, port = await pages.server.start("127.0.0.1", 0)
    async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}") as store:
        assert [key async for key in store.scan("k*")] == [b"k1", b"\r\n", b"k3"]
        assert pages.asked == [[b"SCAN", b"k*"], [b"SCAN", b"k*", b"\x00\xffx"], [b"SCAN", b"k*", b"t"]]
        with pytest.raises(LocalProtocolError, match="empty pattern"):
            await anext(aiter(store.scan("")))
    await pages.server.close()


async def test_a_page_of_a_scan_is_requested_with_a_count() -> None:
    pages = Pages(b"*2\r\n*1\r\n$2\r\nk1\r\n$1\r\nt\r\n", b"*1\r\n*1\r\n$2\r\nk2\r\n", b"*1\r\n*0\r\n")
    _, port = await pages.server.start("127.0.0.1", 0)
    async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}") as store:
        assert await store.scan_page("k*", count=1) == ([b"k1"], b"t")
        assert await store.scan_page("k*", b"t", count=1) == ([b"k2"], None)
        assert await store.scan_page("k*") == ([], None)
        for count in (0, 1001):
            with pytest.raises(LocalProtocolError, match=f"count={count}"):
                await store.scan_page("k*", count=count)
    assert pages.asked == [
        [b"SCAN", b"k*", b"", b"COUNT", b"1"],
        [b"SCAN", b"k*", b"t", b"COUNT", b"1"],
        [b"SCAN", b"k*"],
    ]
    await pages.server.close()


async def test_extensions_use_their_wire_forms() -> None:
    """The wire forms of the extensions, answered by a script; the store itself has tests of its own."""
    at = b"001000000000000:00001:StateStore"
    pages = Pages(
        b"*4\r\n$1\r\nv\r\n$%d\r\n%b\r\n$-1\r\n$-1\r\n" % (len(at), at),
        *(b":1500\r\n", b":-1\r\n", b":-2\r\n", b"+OK\r\n", b"*2\r\n$-1\r\n$-1\r\n", b"$-1\r\n"),
    )
    _, port = await pages.server.start("127.0.0.1", 0)
    version = Hlc(1_000_000_000_000, 1, "StateStore")
    async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}") as store:
        snapshot = await store.get_many(["a", b"b"])
        assert snapshot.entries == {b"a": (b"v", version), b"b": None}
        assert [await store.expiry("k") for _ in range(3)] == [(True, 1500), (True, None), (False, None)]
        assert (await store.set("k", "v", fencing_token=version, fence_prefix="p/")).applied
        with pytest.raises(RemoteProtocolError, match="MGET of 2 keys has 2 elements"):
            await store.get_many(["a", "b"])
        assert await store.get("k", as_of=version) is None
        with pytest.raises(LocalProtocolError, match="needs a fencing token"):
            await store.set("k", "v", fence_prefix="p/")
        with pytest.raises(LocalProtocolError, match="without a key"):
            await store.get_many([])
    assert pages.asked[0] == [b"MGET", b"a", b"b"]
    assert pages.asked[1] == [b"PTTL", b"k"]
    assert pages.asked[-1] == [b"GET", b"k", b"ASOF", b"1000000000000:1:StateStore"]
    await pages.server.close()


async def test_the_persistence_and_priority_switches_are_user_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(b"+OK\r\n", b"+OK\r\n")
    seen: list[list[tuple[str, str]]] = []
    receive = pages.receive

    def remember(message: Inbound) -> None:
        seen.append(message.publish.properties.user_properties)
        receive(message)

    monkeypatch.setattr(pages, "receive", remember)
    _, port = await pages.server.start("127.0.0.1", 0)
    async with StateStoreClient.connect(f"mqtt://127.0.0.1:{port}", high_priority=True) as store:
        await store.set("k", "v", persist=True)
        await store.set("k", "v")
    assert ("aio-persistence", "true") in seen[0]
    assert ("$high_priority", "") in seen[0]
    assert "aio-persistence" not in dict(seen[1])
    await pages.server.close()


async def test_a_machine_with_a_wrong_clock_may_go_by_the_servers(node: StoreNode) -> None:
    async with (
        MqttClient("127.0.0.1", node.port, client_id="fast") as mqtt,
        StateStoreClient(mqtt, clock=lambda: 10**14, server_clock=True) as store,
    ):
        written = await store.set("k", "v")
        assert await store.get("k") == (b"v", written.version)
        assert store.clock_behind_ms is not None
        assert store.clock_behind_ms < 0


async def test_a_fast_clock_is_reported_with_its_skew(node: StoreNode) -> None:
    ahead = 0
    async with (
        MqttClient("127.0.0.1", node.port, client_id="fast") as mqtt,
        StateStoreClient(mqtt, clock=lambda: wall_clock_ms() + ahead) as store,
    ):
        await store.set("k", "v")
        ahead = 100_000
        with pytest.raises(ClockSkewError) as raised:
            await store.set("k", "v")
        assert raised.value.skew_ms is not None
        assert 100_000 <= raised.value.skew_ms < 110_000
        assert re.search(r"\b10\d s ahead of the newest version received", raised.value.why or "")
        ahead = 0
        assert (await store.set("k", "set back")).applied


async def test_values_survive_the_server(node: StoreNode, tmp_path: Path) -> None:
    async with connect(node) as store:
        written = await store.set("k", "v", fencing_token=Hlc(5, 5, "f"))
        await node.restart()
        assert (await store.get("k")) == (b"v", written.version)
        with pytest.raises(RefusedError, match="fencing token is required"):
            await store.delete("k")
    assert (tmp_path / "statestore" / "data.mdb").exists()


async def test_two_clients_of_one_connection_observe_a_key(node: StoreNode) -> None:
    """The store has one observation for both: the end of the first is not that of the second."""
    async with MqttClient("127.0.0.1", node.port) as mqtt, StateStoreClient(mqtt) as one, StateStoreClient(mqtt) as two:
        async with two.observe("k") as changes:
            async with one.observe("k") as others:
                await two.set("k", "1")
                assert (await next_of(others)).value == b"1"
            await two.set("k", "2")
            assert [(await next_of(changes)).value for _ in range(2)] == [b"1", b"2"]
            assert node.service.observations == 1
        assert node.service.observations == 0
