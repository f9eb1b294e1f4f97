"""The asyncio client against our broker: operations, reconnects, errors."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient, ScramAuthentication, TokenAuthentication
from penstock.mqtt.client.link import ClientLink
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Publish, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import BrokerLimits, MqttServer
from penstock.mqtt.service import Inbound, Service
from tests.ports import free_port

DEADLINE_S = 60


async def test_a_server_with_tls_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x15\x03\x01\x00\x02\x02\x46")  # alert protocol_version, from OpenSSL
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match="does not speak MQTT without TLS") as caught:
            await MqttClient("127.0.0.1", port).connect()
    assert caught.value.hint == f"connect to mqtts://127.0.0.1:{port}"


async def test_an_http_server_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{port} does not speak MQTT") as caught:
            await MqttClient("127.0.0.1", port).connect()
    assert caught.value.why == "it answered CONNECT with HTTP: 'HTTP/1.1 400 Bad Request'"
    assert "MQTT listener" in str(caught.value.hint)


class Log(Service):
    """A service that takes ``log/#`` and holds messages until told."""

    filters = ("log/#",)
    exclusive = True
    reserved = ()

    def __init__(self) -> None:
        self.held: list[Inbound] = []
        self.came = asyncio.Event()

    def receive(self, message: Inbound) -> None:
        self.held.append(message)
        self.came.set()

    def disconnected(self, client_id: str) -> None: ...


@pytest.fixture
async def broker() -> AsyncIterator[tuple[MqttServer, str, int]]:
    server = MqttServer(limits=BrokerLimits(max_packet_size=100_000))
    host, port = await server.start("127.0.0.1", 0)
    yield server, host, port
    await server.close()


def client_on(broker: tuple[MqttServer, str, int], **options: Any) -> MqttClient:
    _, host, port = broker
    return MqttClient(host, port, jitter=lambda: 0.0, **options)


async def test_publish_subscribe_unsubscribe(broker: tuple[MqttServer, str, int]) -> None:
    async with client_on(broker) as client:
        assert client.client_id.startswith("penstock-")
        assert client.connected
        assert await client.publish("a") == 0x10
        assert await client.subscribe(["a", Subscription("b/#", 0)], qos=1, identifier=3) == [1, 0]
        assert await client.publish("a", "text", properties=Properties(content_type="t")) == 0
        assert await client.publish("b/1", b"raw", qos=0) == 0
        messages = client.messages()
        first, second = await anext(messages), await anext(messages)
        assert (first.payload, first.properties.content_type) == (b"text", "t")
        assert first.properties.subscription_identifiers == [3]
        assert (second.topic, second.qos) == ("b/1", 0)
        assert await client.unsubscribe("a") == [0]
        assert await client.unsubscribe(["a", "b/#"]) == [0x11, 0]
    assert not client.connected


async def test_listeners_share_a_client(broker: tuple[MqttServer, str, int]) -> None:
    rest: list[Publish] = []
    heard: list[Publish] = []
    both = asyncio.Event()

    def on_message(message: Publish) -> None:
        rest.append(message)
        both.set()

    async with client_on(broker, on_message=on_message) as client:
        remove = client.listen("a/+", heard.append)
        await client.subscribe("#")
        await client.publish("a/b")
        await client.publish("z")
        async with asyncio.timeout(DEADLINE_S):
            await both.wait()
        remove()
        both.clear()
        await client.publish("a/c")
        async with asyncio.timeout(DEADLINE_S):
            await both.wait()
    assert [m.topic for m in heard] == ["a/b"]
    assert [m.topic for m in rest] == ["z", "a/c"]


async def test_refusals(broker: tuple[MqttServer, str, int]) -> None:
    server, host, port = broker
    log = Log()
    server.add_service(log)
    async with client_on(broker) as client:
        sending = asyncio.create_task(client.publish("log/x"))
        async with asyncio.timeout(DEADLINE_S):
            await log.came.wait()
        log.held[0].settle(0x97, "full")
        with pytest.raises(RefusedError) as caught:
            await sending
        assert (caught.value.code, caught.value.text, caught.value.peer) == (0x97, "full", f"{host}:{port}")
        with pytest.raises(RefusedError) as caught:
            await client.subscribe(["ok", "/" * 300])
        assert caught.value.code == 0x8F
        for qos in (0, 1):
            with pytest.raises(LocalProtocolError, match="Maximum Packet Size is 100000"):
                await client.publish("a", bytes(200_000), qos=qos)
        assert client.connected, "the server would have closed the connection"
        assert client.connected


async def test_misuse_is_an_error_before_anything_is_sent(broker: tuple[MqttServer, str, int]) -> None:
    client = client_on(broker)
    with pytest.raises(LocalProtocolError):
        await client.publish("a")
    async with client:
        for bad in (client.publish("a/#"), client.publish("a", qos=3), client.subscribe("a/#/b")):
            with pytest.raises(LocalProtocolError):
                await bad
        with pytest.raises(LocalProtocolError, match="payload is 5, expected bytes or str, not int"):
            await client.publish("a", 5)  # type: ignore[arg-type] # misuse
        with pytest.raises(LocalProtocolError):
            await client.subscribe("a", qos=3)
        with pytest.raises(LocalProtocolError):
            await client.publish("a", properties=Properties(user_properties=[("\0", "")]))
        with pytest.raises(LocalProtocolError):
            await client.connect()
    with pytest.raises(LocalProtocolError):
        MqttClient(keep_alive_s=100_000)
    with pytest.raises(UnavailableError):
        await client.publish("a")


async def test_an_unreachable_broker_raises_unavailable() -> None:
    with pytest.raises(UnavailableError) as caught:
        await MqttClient("127.0.0.1", free_port()).connect()
    assert caught.value.applied is False


async def test_a_password_that_is_proved_is_not_sent() -> None:
    url = "mqtt://ann:secret@127.0.0.1:1"
    assert MqttClient(url)._engine.connect.password == b"secret"
    assert MqttClient(url, authentication=ScramAuthentication("ann", "secret"))._engine.connect.password is None


async def test_an_internal_error_ends_the_client_and_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> ClientLink:
        raise RuntimeError("a bug")

    client = MqttClient(opener=broken)
    with pytest.raises(LocalProtocolError, match="a bug"):
        await client.connect()
    with pytest.raises(LocalProtocolError, match="a bug"):
        await client.publish("a")
    assert "internal error" in caplog.text


async def test_a_server_that_does_not_answer() -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError):
            await MqttClient("127.0.0.1", port, connect_timeout_s=0.05).connect()
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()


async def test_a_connect_that_another_task_ends_is_not_cancelled() -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await reader.read()
        writer.close()

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        client = MqttClient("127.0.0.1", listener.sockets[0].getsockname()[1])
        connecting = asyncio.create_task(client.connect())
        await asked.wait()
        await client.disconnect()
        with pytest.raises(UnavailableError, match="the client was disconnected"):
            await connecting


async def test_publishes_without_puback_are_sent_again_after_a_reconnect(broker: tuple[MqttServer, str, int]) -> None:
    server, _, _ = broker
    log = Log()
    server.add_service(log)
    presents: list[bool] = []
    errors: list[PenstockError | None] = []
    async with client_on(broker, client_id="c", session_expiry_s=60) as client:
        client.on_connected(presents.append)
        client.on_disconnected(errors.append)
        sending = [asyncio.create_task(client.publish("log/x", str(n))) for n in range(3)]
        async with asyncio.timeout(DEADLINE_S):
            while len(log.held) < 3:
                log.came.clear()
                await log.came.wait()
        log.held[0].settle()
        assert await sending[0] == 0
        server.outlet.disconnect("c", 0x98)
        async with asyncio.timeout(DEADLINE_S):
            while len(log.held) < 5:
                log.came.clear()
                await log.came.wait()
        again = log.held[3:]
        assert [m.publish.payload for m in again] == [b"1", b"2"]
        assert [m.publish.dup for m in again] == [True, True]
        for message in again:
            message.settle()
        assert await asyncio.gather(*sending[1:]) == [0, 0]
    assert presents == [True]
    assert isinstance(errors[0], UnavailableError)
    assert errors[1:] == [None]


async def test_without_the_session_messages_go_as_new_and_subscriptions_are_made_again(
    broker: tuple[MqttServer, str, int],
) -> None:
    server, _, _ = broker
    log = Log()
    server.add_service(log)
    async with client_on(broker, client_id="c") as client:
        await client.subscribe("a", identifier=9)
        sending = asyncio.create_task(client.publish("log/x"))
        async with asyncio.timeout(DEADLINE_S):
            await log.came.wait()
        log.came.clear()
        server.outlet.disconnect("c", 0x98)
        async with asyncio.timeout(DEADLINE_S):
            await log.came.wait()
            assert not log.held[1].publish.dup
            log.held[1].settle()
            await sending
            assert await client.publish("a") == 0
            message = await anext(client.messages())
        assert message.properties.subscription_identifiers == [9]


async def test_a_server_that_accepts_and_closes_is_asked_ever_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    """A node whose disk has failed does so: each attempt is a connection, a login, and a line in its log."""
    caplog.set_level(logging.INFO, "penstock.mqtt")

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(encode(ConnAck()))
        writer.close()

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(accept, "127.0.0.1", 0) as listener:
        client = MqttClient("127.0.0.1", listener.sockets[0].getsockname()[1], jitter=lambda: 0.0)
        await client.connect()
        while not any("next try in 0.4 s" in record.getMessage() for record in caplog.records):
            await asyncio.sleep(0.01)
        await client.disconnect()


async def test_operations_wait_while_the_server_is_unavailable() -> None:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", free_port())
    client = MqttClient(host, port, jitter=lambda: 0.0)
    await client.connect()
    lost = asyncio.Event()
    client.on_disconnected(lambda _: lost.set())
    await server.close()
    async with asyncio.timeout(DEADLINE_S):
        await lost.wait()
    waiting = [
        asyncio.create_task(client.publish("a", "1")),
        asyncio.create_task(client.publish("b", qos=0)),
        asyncio.create_task(client.subscribe("a")),
        asyncio.create_task(client.unsubscribe("z")),
    ]
    server = MqttServer()
    await server.start(host, port)
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*waiting)
    assert results[1:] == [0, [1], [0x11]]
    await client.disconnect()
    await server.close()


async def test_a_request_and_the_end_of_a_subscription_do_not_wait_for_a_server_that_is_unavailable() -> None:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", free_port())
    got: list[str] = []
    client = MqttClient(host, port, client_id="c", jitter=lambda: 0.0, on_message=lambda m: got.append(m.topic))
    lost = asyncio.Event()
    client.on_disconnected(lambda _: lost.set())
    async with asyncio.timeout(DEADLINE_S), client:
        async with client.subscription("gone"):
            await server.close()
            await lost.wait()
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"within 0\.01 s") as caught:
                await client.request("a", timeout=0.01)
            assert caught.value.why == "the client is not connected"
        server = MqttServer()
        await server.start(host, port)
        assert await client.publish("gone") == 0x10, "not subscribed again"
        async with client.subscription("a") as requests:
            asked = asyncio.create_task(client.request("a", "?"))
            await client.respond(await anext(requests), "!")
            assert (await asked).payload == b"!"
    assert got == []
    await server.close()


async def test_a_request_that_waits_for_a_connection_fails_once(caplog: pytest.LogCaptureFixture) -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    lost = asyncio.Event()
    client = MqttClient("127.0.0.1", port)
    client.on_disconnected(lambda _: lost.set())
    async with asyncio.timeout(DEADLINE_S), client:
        await server.close()
        await lost.wait()
        asked = asyncio.create_task(client.request("a"))
        await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="the client was disconnected"):
        await asked
    del asked
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_disconnect_that_is_cancelled_ends_the_client_at_once() -> None:
    """The server does not read: the last bytes are never sent."""
    leaving = asyncio.Event()

    async def stalled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.write(b"\x20\x03\x00\x00\x00")
        await leaving.wait()
        writer.close()

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(stalled, "127.0.0.1", 0) as listener:
        client = MqttClient("127.0.0.1", listener.sockets[0].getsockname()[1])
        await client.connect()
        waiting = asyncio.create_task(client.publish("a", bytes(64 << 20)))
        await asyncio.sleep(0)
        disconnecting = asyncio.create_task(client.disconnect())
        await asyncio.sleep(0)
        disconnecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await disconnecting
        with pytest.raises(UnavailableError, match="closed"):
            await waiting
        assert client.closed
        leaving.set()


async def test_a_cancelled_subscription_is_not_created_again() -> None:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", free_port())
    lost = asyncio.Event()
    client = MqttClient(host, port, jitter=lambda: 0.0)
    client.on_disconnected(lambda _: lost.set())

    async def receive() -> None:
        async with client.subscription("a"):
            raise AssertionError("cancelled before SUBACK")

    async with asyncio.timeout(DEADLINE_S), client:
        receiving = asyncio.create_task(receive())
        while not client._engine.open_operations:
            await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert await client.publish("a") == 0x10
        await server.close()
        await lost.wait()
        server = MqttServer()
        await server.start(host, port)
        assert await client.publish("a") == 0x10
    await server.close()


async def test_without_reconnect_everything_fails_at_once(broker: tuple[MqttServer, str, int]) -> None:
    server, _, _ = broker
    server.add_service(Log())
    client = client_on(broker, client_id="c", reconnect=False)
    await client.connect()
    sending = asyncio.create_task(client.publish("log/x"))
    reading = asyncio.ensure_future(anext(client.messages()))
    await client.subscribe("a")
    server.outlet.disconnect("c", 0x98)
    for task in (sending, reading):
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(task, DEADLINE_S)
    with pytest.raises(UnavailableError):
        await client.publish("a")
    await client.disconnect()


async def test_taken_over_clients_do_not_fight(broker: tuple[MqttServer, str, int]) -> None:
    first = client_on(broker, client_id="same")
    await first.connect()
    ended: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
    first.on_disconnected(ended.set_result)
    async with client_on(broker, client_id="same") as second:
        error = await asyncio.wait_for(ended, DEADLINE_S)
        assert isinstance(error, RefusedError)
        assert error.code == 0x8E
        with pytest.raises(RefusedError):
            await first.publish("a")
        assert await second.publish("a") == 0x10
    await first.disconnect()


async def test_disconnect_fails_pending_operations(broker: tuple[MqttServer, str, int]) -> None:
    server, _, _ = broker
    log = Log()
    server.add_service(log)
    client = client_on(broker)
    await client.connect()
    sending = asyncio.create_task(client.publish("log/x"))
    async with asyncio.timeout(DEADLINE_S):
        await log.came.wait()
    await client.disconnect()
    with pytest.raises(UnavailableError) as caught:
        await sending
    assert caught.value.applied is None
    await client.disconnect()


async def test_messages_end_with_the_client(broker: tuple[MqttServer, str, int]) -> None:
    client = client_on(broker)
    await client.connect()

    async def read() -> list[Publish]:
        return [message async for message in client.messages()]

    reading = asyncio.create_task(read())
    await client.subscribe("a")
    await client.publish("a")
    await client.disconnect()
    assert len(await asyncio.wait_for(reading, DEADLINE_S)) == 1


async def test_a_slow_reader_stops_the_network_and_loses_nothing(broker: tuple[MqttServer, str, int]) -> None:
    async with client_on(broker) as reader, client_on(broker) as writer:
        await reader.subscribe("a")
        await asyncio.gather(*(writer.publish("a", str(n)) for n in range(3000)))
        messages = reader.messages()
        async with asyncio.timeout(DEADLINE_S):
            assert [int((await anext(messages)).payload) for _ in range(3000)] == list(range(3000))


async def test_keep_alive_pings(broker: tuple[MqttServer, str, int]) -> None:
    server, _, _ = broker
    async with client_on(broker, keep_alive_s=1) as client:
        before = server.stats.packets_received
        async with asyncio.timeout(DEADLINE_S):
            while server.stats.packets_received == before:
                await asyncio.sleep(0.05)
        assert client.connected


async def test_pending_publishes_are_bounded(broker: tuple[MqttServer, str, int]) -> None:
    server, _, _ = broker
    log = Log()
    server.add_service(log)
    async with client_on(broker, max_pending=2) as client:
        sending = [asyncio.create_task(client.publish("log/x", str(n))) for n in range(3)]
        async with asyncio.timeout(DEADLINE_S):
            while len(log.held) < 2:
                log.came.clear()
                await log.came.wait()
            await client.publish("other", qos=0)
            assert len(log.held) == 2
            for message in list(log.held):
                message.settle()
            while len(log.held) < 3:
                log.came.clear()
                await log.came.wait()
            log.held[2].settle()
            assert await asyncio.gather(*sending) == [0, 0, 0]


async def test_a_cancelled_publish_is_not_sent_later() -> None:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", free_port())
    got: list[str] = []
    client = MqttClient(host, port, jitter=lambda: 0.0, session_expiry_s=60, on_message=lambda m: got.append(m.topic))
    async with client:
        await client.subscribe("#")
        await server.close()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.publish("withdrawn")
        waiting = asyncio.create_task(client.publish("kept"))
        server = MqttServer()
        await server.start(host, port)
        async with asyncio.timeout(DEADLINE_S):
            await waiting
            while "kept" not in got:
                await asyncio.sleep(0.01)
    assert got == ["kept"]
    await server.close()


async def test_an_expired_publish_fails_while_the_server_is_unavailable() -> None:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", free_port())
    async with MqttClient(host, port, jitter=lambda: 0.0) as client:
        await server.close()
        with pytest.raises(UnavailableError, match="expired") as caught:
            async with asyncio.timeout(DEADLINE_S):
                await client.publish("a", properties=Properties(message_expiry_interval=1))
        assert caught.value.applied is False


async def test_qos_0_waits_for_room_instead_of_piling_up() -> None:
    """A server that reads nothing: the client keeps its transport's buffer and one turn, whatever it is given."""
    connected = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"\x20\x03\x00\x00\x00")
        await connected.wait()
        writer.transport.abort()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    client = MqttClient(*listener.sockets[0].getsockname()[:2], reconnect=False)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while True:
            await client.publish("a", bytes(10_000), qos=0)
            sent += 1

    async with client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await flood()
        assert 0 < sent < 5_000
        waiting = asyncio.create_task(client.publish("a", qos=0))
        connected.set()
        with pytest.raises(UnavailableError):
            await waiting
    listener.close()


async def test_a_listener_or_hook_that_fails_does_not_affect_others(
    broker: tuple[MqttServer, str, int], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("theirs")

    client = client_on(broker)
    client.on_connected(fail)
    client.on_disconnected(fail)
    async with client:
        client.listen("bad", fail)
        await client.subscribe("#")
        for topic in ("bad", "good"):
            await client.publish(topic)
        assert (await anext(client.messages())).topic == "good"
        assert client.connected
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "a hook of the client failed",
        "a listener failed on a message to 'bad'",
        "a hook of the client failed",
    ]


async def test_a_reauthentication_fails_if_the_connection_is_lost() -> None:
    """The client connects again, which authenticates it, too."""
    accepted = encode(ConnAck(properties=Properties(authentication_method="K8S-SAT")))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder(role=Role.SERVER)
        while packets := decoder.feed(await reader.read(1024)):
            if not isinstance(packets[0], Connect):
                break  # AUTH, or DISCONNECT
            writer.write(accepted)
        writer.close()

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        token = TokenAuthentication(lambda: b"token")
        async with MqttClient("127.0.0.1", port, authentication=token, jitter=lambda: 0.0) as client:
            for _ in range(2):
                with pytest.raises(UnavailableError, match="lost during the re-authentication"):
                    await client.reauthenticate()
                await client.wait_connected()


async def test_keep_alive_after_a_reconnect_with_a_message_that_expires_later() -> None:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", free_port())
    lost = asyncio.Event()
    client = MqttClient(host, port, keep_alive_s=20, jitter=lambda: 0.0)
    client.on_disconnected(lambda _: lost.set())
    async with asyncio.timeout(DEADLINE_S), client:
        await server.close()
        await lost.wait()
        waiting = asyncio.create_task(client.publish("a", properties=Properties(message_expiry_interval=3600)))
        while not client._engine.open_operations:
            await asyncio.sleep(0)
        server = MqttServer()
        await server.start(host, port)
        assert await waiting == 0x10
        timer = client._driver._timer
        assert timer is not None
        assert timer.when() - asyncio.get_running_loop().time() < 60
        await server.close()


@pytest.mark.parametrize("identifiers", [0, 1])
async def test_a_subscription_ends_with_the_last_stream_of_its_filter(
    broker: tuple[MqttServer, str, int], identifiers: int
) -> None:
    """Also on a server without subscription identifiers."""
    async with client_on(broker) as client, asyncio.timeout(DEADLINE_S):
        client.server.properties.subscription_identifier_available = identifiers
        async with client.subscription("a") as first:
            async with client.subscription("a") as second:
                assert await client.publish("a", b"both") == 0
                assert [(await anext(stream)).payload for stream in (first, second)] == [b"both"] * 2
            assert await client.publish("a", b"first") == 0
            assert (await anext(first)).payload == b"first"
        assert await client.publish("a") == 0x10


async def test_messages_that_arrive_after_their_stream_was_left_do_not_fill_receive_maximum() -> None:
    """The server had queued them; nobody reads them, unless another subscription matches."""
    server = MqttServer()
    host, port = await server.start("127.0.0.1", 0)
    async with (
        asyncio.timeout(DEADLINE_S),
        MqttClient(host, port, receive_maximum=5) as client,
        MqttClient(host, port) as other,
    ):
        for _ in range(2):
            async with client.subscription("a") as stream:
                for _ in range(20):
                    await other.publish("a")
                assert (await anext(stream)).topic == "a"
        await client.subscribe("b/#")
        async with client.subscription("b/1"):
            for _ in range(6):
                await other.publish("b/1")
        assert (await anext(client.messages())).topic == "b/1"
    await server.close()
