"""Correlation of responses with requests."""

from __future__ import annotations

import pytest

from penstock.errors import UnavailableError
from penstock.mqtt.client.requests import PendingRequests
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties


def response(correlation: bytes | None) -> Publish:
    return Publish("r", b"", properties=Properties(correlation_data=correlation))


async def test_each_request_gets_its_own_response() -> None:
    requests = PendingRequests()
    (one, first), (two, second) = requests.begin(), requests.begin()
    assert one != two
    assert PendingRequests().begin()[0] != one, "another client's are others"
    answer = response(two)
    for message in (Publish("r"), response(None), response(b"unknown"), answer, answer):
        requests.response(message)
    assert await second is answer
    requests.end(one)
    requests.response(response(one))
    assert not first.done()
    assert len(requests) == 0


async def test_none_comes_any_more() -> None:
    requests = PendingRequests()
    _, future = requests.begin()
    requests.close(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await future
