"""Mosquitto's clients against our broker, our client against Mosquitto's broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.errors import UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from tests.ports import free_port
from tests.tools import require_tool

DEADLINE_S = 60


async def run(program: str, *arguments: str) -> tuple[int, str, str]:
    """Run a client program to its end."""
    process = await asyncio.create_subprocess_exec(
        require_tool(program), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def until_subscribed(server: MqttServer, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while server.stats.subscriptions < count:
            await asyncio.sleep(0.01)


@pytest.fixture
async def server() -> AsyncIterator[tuple[MqttServer, list[str]]]:
    """Our broker, and the arguments that lead a Mosquitto client to it."""
    broker = MqttServer()
    host, port = await broker.start("127.0.0.1", 0)
    yield broker, ["-V", "5", "-h", host, "-p", str(port)]
    await broker.close()


async def test_mosquitto_clients_on_our_broker(server: tuple[MqttServer, list[str]]) -> None:
    broker, where = server
    subscriber = asyncio.create_task(
        run(
            "mosquitto_sub",
            *where,
            "-q",
            "1",
            "-t",
            "line/+/flow",
            "-C",
            "3",
            "-W",
            "10",
            "-F",
            "%t|%p|%q|%r|%P|%C|%R|%D",
        )
    )
    await until_subscribed(broker, 1)
    pub = ("mosquitto_pub", *where, "-t", "line/3/flow", "-m")
    assert (await run(*pub, "zero", "-q", "0"))[0] == 0
    properties = ["-D", "publish", "content-type", "text/plain", "-D", "publish", "response-topic", "r/1"]
    properties += ["-D", "publish", "correlation-data", "c1", "-D", "publish", "user-property", "k", "v"]
    assert (await run(*pub, "one", "-q", "1", *properties))[0] == 0
    assert (await run(*pub, "kept", "-q", "1", "-r"))[0] == 0
    code, out, err = await subscriber
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "line/3/flow|zero|0|0||||",
        "line/3/flow|one|1|0|k:v|text/plain|r/1|c1",
        "line/3/flow|kept|1|0||||",
    ]
    code, out, _ = await run("mosquitto_sub", *where, "-t", "#", "-C", "1", "-W", "60", "-F", "%t %p %r")
    assert (code, out) == (0, "line/3/flow kept 1\n")


@pytest.mark.parametrize("version", ["5", "311"])
@pytest.mark.parametrize("qos", ["0", "1", "2"])
async def test_every_version_and_qos(server: tuple[MqttServer, list[str]], version: str, qos: str) -> None:
    broker, where = server
    where = ["-V", version, *where[2:]]
    subscriber = asyncio.create_task(
        run("mosquitto_sub", *where, "-q", qos, "-t", "lines/+", "-C", "3", "-W", "10", "-F", "%t %p %q")
    )
    await until_subscribed(broker, 1)
    process = await asyncio.create_subprocess_exec(
        require_tool("mosquitto_pub"), *where, "-q", qos, "-t", "lines/é", "-l", stdin=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        await process.communicate(b"one\ntwo\nthree\n")
    assert process.returncode == 0
    code, out, err = await subscriber
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"lines/é {text} {qos}" for text in ("one", "two", "three")]


async def test_mosquitto_session_survives(server: tuple[MqttServer, list[str]]) -> None:
    _, where = server
    session = [*where, "-q", "1", "-t", "a", "-i", "s1", "-c", "-x", "60"]
    assert (await run("mosquitto_sub", *session, "-E"))[0] == 0
    for n in range(5):
        assert (await run("mosquitto_pub", *where, "-t", "a", "-q", "1", "-m", str(n)))[0] == 0
    code, out, _ = await run("mosquitto_sub", *session, "-C", "5", "-W", "60")
    assert (code, out.split()) == (0, list("01234"))


async def test_mosquitto_request_and_response(server: tuple[MqttServer, list[str]]) -> None:
    broker, where = server
    host, port = where[3], int(where[5])
    async with MqttClient(host, port) as responder:

        def answer(request: Publish) -> None:
            topic = request.properties.response_topic
            assert topic is not None
            properties = Properties(correlation_data=request.properties.correlation_data)
            broker.outlet.publish(Publish(topic, request.payload.upper(), 1, properties=properties))

        responder.listen("ask", answer)
        await responder.subscribe("ask")
        code, out, err = await run(
            "mosquitto_rr", *where, "-t", "ask", "-e", "reply/1", "-m", "hello", "-q", "1", "-W", "10"
        )
    assert (code, out, err) == (0, "HELLO\n", "")


async def test_mosquitto_receives_reason_codes(server: tuple[MqttServer, list[str]]) -> None:
    _, where = server
    _, _, err = await run("mosquitto_sub", *where, "-t", "a/" * 200, "-W", "60")
    assert "subscription" in err.lower(), "its exit code is 0 even then"
    code, _, err = await run("mosquitto_pub", "-V", "31", *where[2:], "-t", "a", "-m", "x")
    assert code != 0
    assert "protocol version" in err.lower()


@pytest.fixture
async def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, int]]:
    """A real Mosquitto broker on a free port."""
    program = require_tool("mosquitto")
    port = free_port()
    config = tmp_path_factory.mktemp("mosquitto") / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n")
    process = await asyncio.create_subprocess_exec(
        program, "-c", str(config), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    async with MqttClient("127.0.0.1", port):
                        break
                except UnavailableError:
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
        yield "127.0.0.1", port
    finally:
        process.terminate()
        await process.wait()


async def test_our_client_on_mosquitto(mosquitto: tuple[str, int]) -> None:
    host, port = mosquitto
    got: asyncio.Queue[Publish] = asyncio.Queue()
    async with MqttClient(
        host, port, client_id="ours", on_message=got.put_nowait, user_properties=[("k", "v")]
    ) as client:
        assert await client.publish("nobody", b"x") == 0x10
        assert await client.subscribe([Subscription("a/#", 1, no_local=False), Subscription("b", 0)], identifier=7) == [
            1,
            0,
        ]
        properties = Properties(
            user_properties=[("a", "1"), ("a", "2")],
            correlation_data=b"\x00\xff",
            response_topic="r",
            content_type="t",
            payload_format_indicator=0,
            message_expiry_interval=30,
        )
        assert await client.publish("a/1", b"payload", properties=properties) == 0
        async with asyncio.timeout(DEADLINE_S):
            message = await got.get()
        assert (message.topic, message.payload, message.qos) == ("a/1", b"payload", 1)
        assert message.properties.user_properties == [("a", "1"), ("a", "2")]
        assert message.properties.correlation_data == b"\x00\xff"
        assert message.properties.subscription_identifiers == [7]
        await asyncio.gather(*(client.publish("a/many", str(n)) for n in range(500)))
        async with asyncio.timeout(DEADLINE_S):
            assert [(await got.get()).payload for _ in range(500)] == [str(n).encode() for n in range(500)]
        assert await client.unsubscribe(["a/#", "never"]) == [0, 0x11]
        await client.publish("b", b"retained", qos=0, retain=True)
        async with asyncio.timeout(DEADLINE_S):
            assert (await got.get()).payload == b"retained"


async def test_our_client_resumes_its_session_on_mosquitto(mosquitto: tuple[str, int]) -> None:
    host, port = mosquitto
    async with MqttClient(host, port, client_id="s", session_expiry_s=60, clean_start=False) as client:
        await client.subscribe("a")
    async with MqttClient(host, port) as other:
        for n in range(3):
            await other.publish("a", str(n))
    client = MqttClient(host, port, client_id="s", session_expiry_s=60, clean_start=False)
    assert (await client.connect()).session_present
    async with asyncio.timeout(DEADLINE_S):
        messages = client.messages()
        assert [(await anext(messages)).payload for _ in range(3)] == [b"0", b"1", b"2"]
    await client.disconnect(session_expiry_s=0)
