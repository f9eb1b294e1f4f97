"""The ten traps over real sockets, with clients that subscribe as the SDKs do, and what else only a broker can show."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import RefusedError
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Packet, PubAck, Publish, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.statestore.binding import INVOKE, notify_filter, request
from penstock.statestore.hlc import Hlc, parse
from tests.conformance.statestore.node import PlainClient, StoreNode
from tests.vectors.statestore import vectors

TOPICS = vectors()["topics"]
ANSWER_TOPICS = TOPICS["response_topic_by_client_for_client_id_client-id1"]


def version(message: Publish) -> Hlc | None:
    return parse(message.properties.user_property("__ts") or "")


async def test_trap_1_observers_are_notified_once_with_and_without_a_subscription(node: StoreNode) -> None:
    dotnet = f"{TOPICS['notify_for_client-id1_key_SOMEKEY'].rpartition('/command')[0]}/command/notify"
    for filters in ((), (notify_filter("client-id1"),), (dotnet,), (notify_filter("client-id1"), "clients/#", "#")):
        async with PlainClient(node, subscribe=filters) as observer, PlainClient(node, "writer") as writer:
            await observer.ask("KEYNOTIFY SOMEKEY")
            for words in ("SET SOMEKEY 1", "SET SOMEKEY 2", "DEL SOMEKEY"):
                await writer.ask(words)
            await observer.settle()
            told = observer.notifications()
            assert [m.topic for m in told] == [TOPICS["notify_for_client-id1_key_SOMEKEY"]] * 3, filters
            assert [version(m) for m in told] == sorted(version(m) for m in told)  # type: ignore[type-var]


async def test_traps_2_and_7_condition_not_met_returns_the_stored_version(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        stored = await client.ask("SET k v NEX PX 60000")
        refused = await client.ask("SET k w NEX PX 60000")
        assert (refused.payload, version(refused)) == (b":-1\r\n", version(stored))
        assert (await client.ask("VDEL k w")).payload == b":-1\r\n"
        renewed = await client.ask("SET k v NEX PX 60000")
        assert (version(renewed) or Hlc(0, 0, "")) > (version(stored) or Hlc(0, 0, ""))


async def test_traps_3_8_and_9_expiry_is_a_delete_with_a_version_unprompted(node: StoreNode) -> None:
    async with PlainClient(node) as observer:
        await observer.ask([b"KEYNOTIFY", b"\xab\xcd"])
        await observer.ask([b"SET", b"\xab\xcd", b"v", b"PX", b"100"])
        deleted = await observer.wait_for(lambda m: m.payload == b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n")
        assert deleted.topic.endswith("/636C69656E742D696431/command/notify/ABCD")
        written = observer.notifications()[0]
        assert (version(deleted) or Hlc(0, 0, "")) > (version(written) or Hlc(0, 0, ""))


async def test_traps_4_5_and_6_missing_key_fencing_text_and_status(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        missing = await client.ask("GET k")
        assert missing.payload == b"$-1\r\n"
        assert missing.properties.user_property("__ts") is None
        assert missing.properties.user_property("__stat") == "200"
        await client.ask("SET k v", ft=Hlc(2, 0, "n"))
        refused = await client.ask("SET k v", ft=Hlc(1, 0, "n"))
        assert b"lower version than the fencing token" in refused.payload
        assert refused.properties.user_property("__stat") == "200"


@pytest.mark.parametrize("topic", [*ANSWER_TOPICS.values()])
async def test_trap_10_no_local_does_not_suppress_the_answer(node: StoreNode, topic: str) -> None:
    subscription = Subscription(topic, 1, no_local=True)
    async with PlainClient(node, subscribe=[subscription], response_topic=topic) as client:
        assert (await client.ask("SET k v")).payload == b"+OK\r\n"
        await client.settle()
        # The answer came once.
        assert client.messages == []


async def test_requests_answers_and_notifications_reach_no_other_client(node: StoreNode) -> None:
    filters = ["#", "statestore/#", "clients/#", INVOKE]
    async with PlainClient(node, "spy", subscribe=filters) as spy, PlainClient(node) as client:
        answers = [await client.ask(words) for words in ("KEYNOTIFY k", "SET k v", "GET k")]
        assert len(client.notifications()) == 1
        await spy.settle()
        assert len(answers) == 3
        assert spy.messages == []


async def test_a_client_that_did_not_subscribe_gets_no_answer_and_neither_does_another(node: StoreNode) -> None:
    topic = "clients/pair/response"
    async with (
        PlainClient(node, "asks", response_topic=topic, listens=False) as asks,
        PlainClient(node, "listens", response_topic=topic) as listens,
    ):
        await asks.send("SET k v")
        assert (await listens.ask("GET k")).payload == b"$1\r\nv\r\n"
        assert listens.messages == []
        await asks.mqtt.subscribe("later")
        await listens.mqtt.publish("later", b"")
        # What came before it would be here by now.
        await asks.wait_for(lambda m: m.topic == "later")
        assert asks.messages == []


async def test_a_request_is_not_retained(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        await client.ask("SET k v")
    async with PlainClient(node, subscribe=["#"]) as later:
        await later.settle()
        assert later.messages == []


async def test_observations_end_with_the_connection(node: StoreNode) -> None:
    async with PlainClient(node) as observer:
        await observer.ask("KEYNOTIFY k")
        assert node.service.observations == 1
    async with asyncio.timeout(60):
        while node.service.observations:
            await asyncio.sleep(0)


async def test_a_forbidden_response_topic_ends_the_connection(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        request = asyncio.create_task(client.send("SET k v", response_topic=INVOKE))
        async with asyncio.timeout(60):
            error = await client.ended
        assert "0x90" in str(error)
        assert "response topic" in str(error)
        with pytest.raises(Exception, match="was closed before"):
            await request


async def test_without_a_response_topic_the_puback_refuses(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        with pytest.raises(RefusedError, match="response topic") as raised:
            await client.send("SET k v", response_topic=None)
        assert raised.value.code == 0x83
        assert (await client.ask("GET k")).payload == b"$-1\r\n"


async def test_qos_0_is_answered_with_status_400(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        correlation = await client.send("SET k v", qos=0)
        answer = await client.wait_for(lambda m: m.properties.correlation_data == correlation)
        assert answer.properties.user_property("__stat") == "400"
        assert (await client.ask("GET k")).payload == b"$-1\r\n"


async def test_qos_2_is_refused_in_its_pubrec_and_answered_with_status_400(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        with pytest.raises(RefusedError, match="QoS 1") as raised:
            await client.send("SET k v", qos=2, correlation=b"0123456789abcdef")
        assert raised.value.code == 0x83
        answer = await client.wait_for(lambda m: m.properties.correlation_data == b"0123456789abcdef")
        assert answer.properties.user_property("__stat") == "400"
        assert "QoS 1" in (answer.properties.user_property("__stMsg") or "")
        assert (await client.ask("GET k")).payload == b"$-1\r\n"


async def test_binary_keys_and_values_survive_a_restart(node: StoreNode) -> None:
    key, value = b"\x00\xff\r\nkey" * 300, bytes(range(256)) * 100
    async with PlainClient(node) as client:
        stored = await client.ask([b"SET", key, value])
        await client.ask("SET gone v PX 1")
    await node.restart()
    async with PlainClient(node) as client:
        found = await client.ask([b"GET", key])
        assert found.payload == b"$25600\r\n" + value + b"\r\n"
        assert version(found) == version(stored)
        assert (await client.ask("GET gone")).payload == b"$-1\r\n"


async def test_answers_of_a_burst_come_in_the_order_of_the_requests(node: StoreNode) -> None:
    async with PlainClient(node) as client:
        requests = ["SET k1 v", "GET k1", "GET other", "SET k2 v", "GET k2", "DEL k1", "GET k1"] * 5
        order = await asyncio.gather(*(client.send(words) for words in requests))
        await client.settle()
        assert [m.properties.correlation_data for m in client.messages] == order


async def test_writes_under_way_when_the_connection_breaks_are_carried_out_once(node: StoreNode) -> None:
    """What a client with a session does: it sends what was not acknowledged again, and finds the answers waiting.

    The later ones of the plain SETs go the quick way.
    """
    words = [[b"SET", b"key-%d" % number, b"mine"] for number in range(8)]
    words += [[b"SET", b"lock", b"mine", b"NX"], [b"VDEL", b"lock", b"mine"], [b"DEL", b"key-0"]]
    requests = [
        request(args, "cut", b"%016d" % number, Hlc(1, number, "cut"), expiry_s=60)
        for number, args in enumerate(words, 1)
    ]
    topic = requests[0].properties.response_topic
    assert topic is not None

    async def resume(writes: list[Publish], answers: int, *, dup: bool) -> dict[bytes | None, bytes]:
        """Connect, send ``writes`` and break the connection once so many answers are there; none is acknowledged."""
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        connect = Connect("cut", clean_start=False, properties=Properties(session_expiry_interval=60))
        sent: list[Packet] = [connect] if dup else [connect, Subscribe(1, [Subscription(topic, 1)])]
        for packet_id, write in enumerate(writes, 10):
            sent.append(Publish(INVOKE, write.payload, 1, dup=dup, packet_id=packet_id, properties=write.properties))
        writer.write(b"".join(encode(packet) for packet in sent))
        decoder, got = Decoder(role=Role.CLIENT), list[Packet]()
        async with asyncio.timeout(60):
            while sum(isinstance(packet, Publish | PubAck) for packet in got) < answers + len(writes):
                data = await reader.read(65_536)
                assert data, "the server ended the connection"
                got += decoder.feed(data)
        writer.transport.abort()
        (accepted,) = (packet for packet in got if isinstance(packet, ConnAck))
        assert accepted.session_present is dup
        assert {packet.reason_code for packet in got if isinstance(packet, PubAck)} == {0}
        found = [packet for packet in got if isinstance(packet, Publish)]
        assert len(found) == answers
        return {packet.properties.correlation_data: packet.payload for packet in found}

    first = await resume(requests, len(requests), dup=False)
    assert [*first.values()] == [*[b"+OK\r\n"] * 9, b":1\r\n", b":1\r\n"]
    async with PlainClient(node, "other") as other:
        assert (await other.ask("SET key-7 theirs")).payload == b"+OK\r\n"
        assert await resume(requests, len(requests), dup=True) == first
        assert node.service.stats.repeated == len(requests)
        assert (await other.ask("GET key-7")).payload == b"$6\r\ntheirs\r\n"
        assert (await other.ask("GET key-0")).payload == b"$-1\r\n"
