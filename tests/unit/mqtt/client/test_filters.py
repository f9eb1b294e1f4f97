"""What a caller asks to subscribe to."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError
from penstock.mqtt.client.filters import Filters, subscriptions
from penstock.mqtt.codec.packets import Subscription

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
def test_what_is_none_is_refused(filters: Filters) -> None:
    with pytest.raises(LocalProtocolError):
        subscriptions(filters, OPTIONS)
