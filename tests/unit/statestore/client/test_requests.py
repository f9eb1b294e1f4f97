"""One request and its answer: what is said where none comes, and that late answers disturb nobody."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from penstock.errors import LocalProtocolError, UnavailableError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.statestore.client.requests import RequestClock, RequestSender
from penstock.statestore.errors import NoStateStoreError

OK = [("__stat", "200"), ("__ts", "5:0:StateStore")]


class Mqtt:
    """An MQTT client that keeps what it is to publish."""

    client_id = "me"

    def __init__(self) -> None:
        self.connected = True
        self.code = 0
        self.error: UnavailableError | None = None
        self.sent: list[tuple[str, bytes, Properties]] = []

    async def wait_connected(self) -> None:
        if not self.connected:
            await asyncio.Event().wait()

    async def publish(self, topic: str, payload: bytes, *, qos: int, properties: Properties, resend: bool) -> int:
        assert qos == 1
        assert resend == (b"GET" in payload)
        self.sent.append((topic, payload, properties))
        if self.error is not None:
            await asyncio.sleep(0)  # a reconnect, whose hook runs before the message fails
            raise self.error
        return self.code


@pytest.fixture
def mqtt() -> Mqtt:
    return Mqtt()


@pytest.fixture
async def requests(mqtt: Any) -> RequestSender:
    return RequestSender(mqtt, RequestClock("n", lambda: 1), 0.02, {"$high_priority": ""})


def answer(asked: Properties, payload: bytes) -> Publish:
    properties = Properties(correlation_data=asked.correlation_data, user_properties=OK)
    return Publish("a", payload, 1, properties=properties)


async def test_answers_find_their_requests(mqtt: Mqtt, requests: RequestSender) -> None:
    calls = [asyncio.create_task(requests.call([b"GET", b"%d" % n], timeout_s=5)) for n in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for topic, _, asked in reversed(mqtt.sent):
        assert topic.endswith("/command/invoke")
        assert asked.message_expiry_interval == 5
        assert ("$high_priority", "") in asked.user_properties
        requests.receive_response(answer(asked, b"+OK\r\n"))
        requests.receive_response(answer(asked, b"late"))
    assert [(await call)[0] for call in calls] == [b"+OK\r\n"] * 3
    requests.receive_response(answer(mqtt.sent[0][2], b"nobody waits"))
    requests.receive_response(Publish("a", b"without correlation", 1))
    stamps = [dict(asked.user_properties)["__ts"] for _, _, asked in mqtt.sent]
    assert stamps == sorted(set(stamps))


@pytest.mark.parametrize(
    ("connected", "code", "why"),
    [
        (True, 0, "no state store at this broker, or it is overloaded, or its disk is full or slow: see its /readyz"),
        (True, ReasonCode.NO_MATCHING_SUBSCRIBERS, "the broker has no subscriber"),
        (False, 0, "not connected to the broker"),
    ],
)
async def test_a_timeout_names_the_likely_cause(
    mqtt: Mqtt, requests: RequestSender, connected: bool, code: int, why: str
) -> None:
    mqtt.connected, mqtt.code = connected, code
    with pytest.raises(UnavailableError, match=r"no answer to GET 'k' within 0\.02 s") as raised:
        await requests.call([b"GET", b"k"])
    assert (raised.value.applied, raised.value.hint is None) == (None, False)
    assert why in (raised.value.why or "")


async def test_a_broker_without_subscriber_has_a_store_if_one_ever_answered(
    mqtt: Mqtt, requests: RequestSender
) -> None:
    mqtt.code = ReasonCode.NO_MATCHING_SUBSCRIBERS
    with pytest.raises(NoStateStoreError, match="no answer to GET 'k'"):
        await requests.call([b"GET", b"k"])
    call = asyncio.create_task(requests.call([b"GET", b"k"], timeout_s=5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    requests.receive_response(answer(mqtt.sent[-1][2], b"+OK\r\n"))
    await call
    with pytest.raises(UnavailableError, match="no answer to GET 'k'") as raised:
        await requests.call([b"GET", b"k"])
    assert type(raised.value) is UnavailableError
    assert "the broker has no subscriber" in (raised.value.why or "")


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan, 2**32, True, "5"])
async def test_a_timeout_that_is_no_time_is_refused(mqtt: Mqtt, requests: RequestSender, timeout_s: float) -> None:
    with pytest.raises(LocalProtocolError, match=f"timeout_s is {timeout_s!r}\n"):
        await requests.call([b"GET", b"k"], timeout_s=timeout_s)
    with pytest.raises(LocalProtocolError, match="timeout_s is"):
        RequestSender(mqtt, requests.clock, timeout_s, {})  # type: ignore[arg-type] # a double, and misuse
    assert mqtt.sent == []


async def test_a_timeout_after_a_lost_session_names_it(requests: RequestSender) -> None:
    requests.lost_sessions = 1  # before the request
    for lost, why in ((0, "no state store at this broker"), (1, "the broker has no session")):
        call = asyncio.create_task(requests.call([b"SET", b"k", b"v"]))
        await asyncio.sleep(0)
        requests.lost_sessions += lost
        with pytest.raises(UnavailableError, match="no answer to SET 'k'") as raised:
            await call
        assert raised.value.applied is None
        assert why in (raised.value.why or "")


async def test_a_write_whose_session_was_lost_has_an_unknown_outcome(mqtt: Mqtt, requests: RequestSender) -> None:
    mqtt.error = UnavailableError("mqtt: not sent again", applied=None)
    with pytest.raises(UnavailableError, match="not sent again"):
        await requests.call([b"DEL", b"k"], timeout_s=5)  # another failure of the connection
    call = asyncio.create_task(requests.call([b"DEL", b"k"], timeout_s=5))
    asyncio.get_running_loop().call_soon(setattr, requests, "lost_sessions", 1)
    with pytest.raises(UnavailableError, match="whether DEL 'k' was executed is unknown") as raised:
        await call
    assert raised.value.applied is None
    assert "the broker has no session" in (raised.value.why or "")
    mqtt.error = UnavailableError("mqtt: the message expired", applied=False)  # it was never sent
    call = asyncio.create_task(requests.call([b"DEL", b"k"], timeout_s=5))
    asyncio.get_running_loop().call_soon(setattr, requests, "lost_sessions", 2)
    with pytest.raises(UnavailableError, match="expired") as raised:
        await call
    assert raised.value.applied is False


async def test_giving_up_ends_every_wait(requests: RequestSender) -> None:
    call = asyncio.create_task(requests.call([b"GET", b"k"], timeout_s=5))
    await asyncio.sleep(0)
    requests.fail_all(UnavailableError("the broker is gone"))
    with pytest.raises(UnavailableError, match="the request was not answered") as raised:
        await call
    assert raised.value.why == "the broker is gone"
