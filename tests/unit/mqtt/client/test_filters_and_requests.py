"""Topic filters of a call, and the correlation of responses with requests."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError, UnavailableError
from penstock.mqtt.client.client import Filters, PendingRequests, subscriptions
from penstock.mqtt.codec.packets import Publish, Subscription
from penstock.mqtt.codec.properties import Properties

OPTIONS = Subscription("", 1, no_local=True, retain_handling=2)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("a/#", [Subscription("a/#", 1, no_local=True, retain_handling=2)]),
        (Subscription("b", 2), [Subscription("b", 2)]),
        (["a", Subscription("b", 0)], [Subscription("a", 1, no_local=True, retain_handling=2), Subscription("b", 0)]),
        ((), []),
    ],
    ids=str,
)
def test_text_has_the_options_of_the_call(filters: Filters, expected: list[Subscription]) -> None:
    assert subscriptions(filters, OPTIONS) == expected


@pytest.mark.parametrize("filters", ["a/#/b", "", Subscription("a", 3)], ids=str)
def test_invalid_subscriptions_are_refused(filters: Filters) -> None:
    with pytest.raises(LocalProtocolError):
        subscriptions(filters, OPTIONS)


def response(correlation: bytes | None) -> Publish:
    return Publish("r", b"", properties=Properties(correlation_data=correlation))


async def test_each_request_gets_its_own_response() -> None:
    requests = PendingRequests()
    (one, first), (two, second) = requests.add(), requests.add()
    assert one != two
    assert PendingRequests().add()[0] != one, "another client's are others"
    answer = response(two)
    for message in (Publish("r"), response(None), response(b"unknown"), answer, answer):
        requests.receive(message)
    assert await second is answer
    requests.remove(one)
    requests.receive(response(one))
    assert not first.done()
    assert len(requests) == 0


async def test_none_comes_any_more() -> None:
    requests = PendingRequests()
    _, future = requests.add()
    requests.fail(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await future
