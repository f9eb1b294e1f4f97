"""Fault switches: read from packets, and obeyed on a listener of their own by a broker that knows nothing of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.errors import RefusedError, UnavailableError
from penstock.mqtt import faults
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    Publish,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.faults import Fault, FaultListener, Faults
from penstock.mqtt.server import MqttServer


def asks(**switches: str) -> Properties:
    return Properties(user_properties=[("other", "x"), *((f"fault:{name}", value) for name, value in switches.items())])


def answer(fault: Fault) -> Packet | None:
    return Decoder().feed(fault.answer)[0] if fault.answer is not None else None


def connect(properties: Properties) -> Connect:
    return Connect("c", True, 0, None, None, None, properties)


def test_the_switches_of_packets() -> None:
    found = Faults()
    assert found.fault_for(PingReq()) == Fault()
    assert found.fault_for(Publish("t", b"")) == Fault()
    assert found.fault_for(Publish("t", b"", properties=asks(delay="0.5"))) == Fault(0.5)
    rejected = answer(found.fault_for(connect(asks(rejectconnect="137"))))
    assert isinstance(rejected, ConnAck)
    assert rejected.reason_code == ReasonCode.SERVER_BUSY
    for packet in (
        connect(asks(disconnect="0x8B")),
        Publish("t", b"", properties=asks(disconnect="139", delay="1")),
        Subscribe(1, [Subscription("t")], asks(disconnect="139")),
        Unsubscribe(1, ["t"], asks(disconnect="139")),
    ):
        ended = answer(found.fault_for(packet))
        assert isinstance(ended, Disconnect)
        assert ended.reason_code == 139
    # Only a CONNECT can be rejected.
    assert found.fault_for(Publish("t", b"", properties=asks(rejectconnect="137"))) == Fault()


def test_a_request_id_has_its_fault_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Faults()
    packet = Publish("t", b"", properties=asks(delay="1", requestid="a"))
    assert found.fault_for(packet) == Fault(1.0)
    assert found.fault_for(packet) == Fault()
    assert found.fault_for(Publish("t", b"", properties=asks(delay="1", requestid="b"))) == Fault(1.0)
    monkeypatch.setattr(faults, "MAX_REQUEST_IDS", 2)
    found.fault_for(Publish("t", b"", properties=asks(delay="1", requestid="c")))
    assert found.fault_for(packet) == Fault(1.0)


@pytest.mark.parametrize("switches", [{"delay": "x"}, {"delay": "-1"}, {"delay": "nan"}, {"disconnect": "256"}])
def test_unreadable_fault_requests_cause_no_fault(switches: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert Faults().fault_for(Publish("t", b"", properties=asks(**switches))) == Fault()
    assert caplog.records


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = MqttServer()
    _, behind = await server.start("127.0.0.1", 0)
    listener = FaultListener("127.0.0.1", behind)
    _, bound = await listener.start("127.0.0.1", 0)
    yield bound
    await listener.close()
    await server.close()


async def test_without_switches_everything_passes(port: int) -> None:
    async with (
        MqttClient("127.0.0.1", port) as client,
        MqttClient("127.0.0.1", port) as other,
        other.subscription("t") as messages,
    ):
        for size in (0, 1, 127, 128, 300_000):
            await client.publish("t", b"x" * size)
            assert len((await anext(messages)).payload) == size


async def test_a_connect_can_be_rejected_once(port: int) -> None:
    switches = [("fault:rejectconnect", str(int(ReasonCode.SERVER_BUSY))), ("fault:requestid", "1")]
    with pytest.raises(RefusedError) as raised:
        await MqttClient("127.0.0.1", port, user_properties=switches).connect()
    assert raised.value.code == ReasonCode.SERVER_BUSY
    async with MqttClient("127.0.0.1", port, user_properties=switches) as client:
        assert client.connected


async def test_a_publish_can_end_the_connection_and_is_then_sent_again(port: int) -> None:
    async with MqttClient("127.0.0.1", port, clean_start=False, session_expiry_s=60) as client:
        ended: list[BaseException | None] = []
        client.on_disconnected(ended.append)
        async with asyncio.timeout(60):
            await client.publish("t", b"x", properties=asks(disconnect="139", requestid="1"))
        assert "server shutting down" in str(ended[0]).lower()


async def test_a_publish_can_be_delayed(port: int) -> None:
    async with MqttClient("127.0.0.1", port) as client:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await client.publish("t", b"x", properties=asks(delay="0.05"))
        assert loop.time() - before > 0.049  # the clock of uvloop has milliseconds


async def test_input_that_is_not_mqtt_reaches_the_broker_and_ends_the_connection(port: int) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x10\xff\xff\xff\xff\xff", b"\x10"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
    async with MqttClient("127.0.0.1", port) as client:
        await client.publish("t", b"still there")


async def test_closing_cuts_connections_and_nobody_behind_is_an_end() -> None:
    listener = FaultListener("127.0.0.1", 1)
    _, bound = await listener.start("127.0.0.1", 0)
    with pytest.raises(UnavailableError):
        await MqttClient("127.0.0.1", bound, reconnect=False).connect()
    await listener.close()
