"""Our client on Mosquitto's broker: QoS 2, streams, requests, topic aliases, TLS, WebSocket, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from penstock.errors import LocalProtocolError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient, TlsOptions
from penstock.mqtt.codec.packets import Publish, Will
from penstock.mqtt.codec.properties import Properties
from tests.interop.mosquitto import Mosquitto

DEADLINE_S = 60


@pytest.fixture
async def mosquitto(tmp_path: Path) -> AsyncIterator[Mosquitto]:
    broker = Mosquitto(tmp_path, "", "protocol websockets", persistent=True)
    await broker.start()
    yield broker
    await broker.stop()


async def test_qos_2_both_ways(mosquitto: Mosquitto) -> None:
    async with MqttClient(mosquitto.url) as client, asyncio.timeout(DEADLINE_S):
        async with client.subscription("line/#", qos=2) as messages:
            await asyncio.gather(*(client.publish("line/1", str(n), qos=2) for n in range(200)))
            got = [await anext(messages) for _ in range(200)]
        assert [int(m.payload) for m in got] == list(range(200))
        assert {m.qos for m in got} == {2}
        assert await client.publish("line/1") == 0x10, "the stream has unsubscribed"


async def test_streams_share_a_client_also_where_filters_overlap(mosquitto: Mosquitto) -> None:
    async with (
        MqttClient(mosquitto.url) as client,
        asyncio.timeout(DEADLINE_S),
        client.subscription("a/+") as some,
        client.subscription("#") as all_,
        client.subscription("a/+") as too,
    ):
        for topic in ("a/1", "b", "a/2"):
            await client.publish(topic)
        assert [(await anext(all_)).topic for _ in range(3)] == ["a/1", "b", "a/2"]
        for stream in (some, too):
            assert [(await anext(stream)).topic for _ in range(2)] == ["a/1", "a/2"]
            assert len(stream) == 0


async def test_messages_that_the_body_did_not_finish_are_redelivered(mosquitto: Mosquitto) -> None:
    session: dict[str, Any] = {"client_id": "s", "session_expiry_s": 60}
    async with MqttClient(mosquitto.url) as publisher, asyncio.timeout(DEADLINE_S):
        first = MqttClient(mosquitto.url, clean_start=True, **session)
        await first.connect()
        async with first.subscription("a") as messages:
            for n in range(3):
                await publisher.publish("a", str(n))
            assert (await anext(messages)).payload == b"0"
            assert (await anext(messages)).payload == b"1", "0 is done, 1 is not"
            await asyncio.sleep(0)
            await first.publish("nobody")  # what was acknowledged before it has left
            await first.disconnect()
        second = MqttClient(mosquitto.url, clean_start=False, **session)
        assert (await second.connect()).session_present
        again = second.messages()
        assert [(await anext(again)).payload for _ in range(2)] == [b"1", b"2"]
        await second.disconnect(session_expiry_s=0)


async def test_requests(mosquitto: Mosquitto) -> None:
    async with (
        MqttClient(mosquitto.url, client_id="asks") as client,
        MqttClient(mosquitto.url) as responder,
        asyncio.timeout(DEADLINE_S),
    ):
        with pytest.raises(UnavailableError, match="has no receiver") as caught:
            await client.request("ask/1", b"x")
        assert caught.value.applied is False
        async with responder.subscription("ask/+") as requests:

            async def serve() -> None:
                async for request in requests:
                    if request.payload != b"ignore":
                        await responder.respond(request, request.payload.upper())

            serving = asyncio.create_task(serve())
            answers = await asyncio.gather(*(client.request("ask/1", f"r{n}") for n in range(50)))
            assert [a.payload for a in answers] == [f"R{n}".encode() for n in range(50)]
            assert answers[0].topic == "clients/asks/response"
            with pytest.raises(UnavailableError, match="no response"):
                await client.request("ask/1", b"ignore", timeout=0.1)
            serving.cancel()
        with pytest.raises(LocalProtocolError):
            await responder.respond(Publish("a"))


async def test_a_body_that_publishes_does_not_wait_for_itself(mosquitto: Mosquitto) -> None:
    """More QoS 0 messages than may wait: reading pauses, and goes on for the PUBACK of what the body publishes."""
    async with (
        MqttClient(mosquitto.url) as client,
        MqttClient(mosquitto.url) as other,
        asyncio.timeout(DEADLINE_S),
        client.subscription("flood", qos=0) as messages,
    ):
        for n in range(3_000):
            await other.publish("flood", str(n), qos=0)
        async for message in messages:
            await client.publish("seen", message.payload)
            if message.payload == b"2999":
                break
        assert client.dropped == 0


async def test_topic_aliases_out(mosquitto: Mosquitto) -> None:
    async with MqttClient(mosquitto.url, topic_aliases=2) as client, asyncio.timeout(DEADLINE_S):
        async with client.subscription("#") as messages:
            topics = ["a/long/topic", "another/topic", "third/topic"] * 3
            for topic in topics:
                await client.publish(topic)
            assert [(await anext(messages)).topic for _ in topics] == topics
        with pytest.raises(LocalProtocolError, match="Topic Alias"):
            await client.publish("a", properties=Properties(topic_alias=1))


async def test_a_restart_of_the_server_loses_nothing_and_doubles_nothing(mosquitto: Mosquitto) -> None:
    # Mosquitto 2.0 forgets a session that began with Clean Start when it restarts.
    session: dict[str, Any] = {"session_expiry_s": 600, "clean_start": False, "jitter": lambda: 0.0}
    publisher = MqttClient(mosquitto.url, client_id="p", **session)
    subscriber = MqttClient(mosquitto.url, client_id="s", **session)
    async with asyncio.timeout(DEADLINE_S), publisher, subscriber, subscriber.subscription("a", qos=2) as messages:
        sent = [asyncio.create_task(publisher.publish("a", str(n), qos=2)) for n in range(50)]
        await asyncio.gather(*sent)
        await mosquitto.stop()
        waiting = [asyncio.create_task(publisher.publish("a", str(n), qos=2)) for n in range(50, 100)]
        await mosquitto.start()
        await asyncio.gather(*waiting)
        got = [int((await anext(messages)).payload) for _ in range(100)]
        assert got == list(range(100))
        assert await publisher.publish("a", b"end", qos=2) == 0
        assert (await anext(messages)).payload == b"end"


async def test_a_will_and_how_it_is_asked_for(mosquitto: Mosquitto) -> None:
    async with (
        MqttClient(mosquitto.url) as watcher,
        asyncio.timeout(DEADLINE_S),
        watcher.subscription("gone") as messages,
    ):
        for send in (False, True):
            client = MqttClient(mosquitto.url, will=Will("gone", b"%d" % send, 1))
            await client.connect()
            await client.disconnect(send_will=send)
        assert (await anext(messages)).payload == b"1"


async def test_websocket(mosquitto: Mosquitto) -> None:
    url = f"ws://127.0.0.1:{mosquitto.ports[1]}/mqtt"
    async with MqttClient(url) as client, asyncio.timeout(DEADLINE_S), client.subscription("a", qos=2) as messages:
        payloads = [bytes(size) for size in (0, 1, 125, 126, 10_000)]
        for payload in payloads:
            await client.publish("a", payload, qos=2)
        assert [(await anext(messages)).payload for _ in payloads] == payloads
    with pytest.raises(UnavailableError):
        await MqttClient(f"ws://127.0.0.1:{mosquitto.port}/mqtt", connect_timeout_s=0.5).connect()


async def test_tls_with_a_client_certificate(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "other_ca", "cert", "key", "client", "stranger")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    stranger.cert_pem.write_to_path(str(files["other_ca"]))
    server = authority.issue_cert("127.0.0.1", "plant.example")
    server.private_key_pem.write_to_path(str(files["key"]))
    server.cert_chain_pems[0].write_to_path(str(files["cert"]))
    authority.issue_cert("pump-3").private_key_and_cert_chain_pem.write_to_path(str(files["client"]))
    stranger.issue_cert("pump-3").private_key_and_cert_chain_pem.write_to_path(str(files["stranger"]))
    tls = f"cafile {files['ca']}\ncertfile {files['cert']}\nkeyfile {files['key']}\n"
    broker = Mosquitto(tmp_path, tls + "require_certificate true", tls + "protocol websockets", tls)
    await broker.start()
    try:
        ours = TlsOptions(files["ca"], files["client"])
        urls = (f"mqtts://127.0.0.1:{broker.port}", f"wss://127.0.0.1:{broker.ports[1]}/mqtt")
        async with asyncio.timeout(DEADLINE_S):
            for url in urls:
                async with MqttClient(url, tls=ours) as client, client.subscription("a") as messages:
                    await client.publish("a", bytes(10_000))
                    assert len((await anext(messages)).payload) == 10_000
            async with MqttClient(
                "127.0.0.1", broker.ports[2], tls=TlsOptions(files["ca"], server_name="plant.example")
            ):
                pass
            for options, words in (
                (TlsOptions(files["other_ca"], files["client"]), "does not trust the authority"),
                (TlsOptions(), "does not trust the authority"),
                (
                    TlsOptions(files["ca"], files["client"], server_name="other.example"),
                    "connect to a name in the certificate",
                ),
            ):
                with pytest.raises(UnavailableError, match=words):
                    await MqttClient(urls[0], tls=options).connect()
            for options in (TlsOptions(files["ca"]), TlsOptions(files["ca"], files["stranger"])):
                with pytest.raises(UnavailableError):
                    await MqttClient(urls[0], tls=options).connect()
            with pytest.raises(UnavailableError, match="uses TLS"):
                await MqttClient(f"mqtt://127.0.0.1:{broker.ports[2]}", connect_timeout_s=30).connect()
    finally:
        await broker.stop()


async def test_passwords(tmp_path: Path) -> None:
    from tests.tools import require_tool

    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    process = await asyncio.create_subprocess_exec(
        require_tool("mosquitto_passwd"), "-b", str(passwords), "pump", "s3:cret", stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    broker = Mosquitto(tmp_path, f"password_file {passwords}\nallow_anonymous false")
    await broker.start()
    try:
        where = f"127.0.0.1:{broker.port}"
        async with asyncio.timeout(DEADLINE_S), MqttClient(f"mqtt://pump:s3%3Acret@{where}") as client:
            assert await client.publish("a") == 0x10
        wrong: list[dict[str, Any]] = [{}, {"username": "pump", "password": "wrong"}]
        for options in wrong:
            with pytest.raises(RefusedError) as caught:
                await MqttClient(f"mqtt://{where}", **options).connect()
            assert caught.value.code in (0x86, 0x87)
            assert caught.value.hint is not None
    finally:
        await broker.stop()
