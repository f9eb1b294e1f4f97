"""The subscriptions that a caller asks for: topic filters as text or with options of their own, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.packets import Subscription
from penstock.mqtt.codec.topics import validate_topic_filter

__all__ = ["Filters", "subscriptions"]

Filters = str | Subscription | Sequence[str | Subscription]
"""What to subscribe to."""


def subscriptions(filters: Filters, options: Subscription) -> list[Subscription]:
    """What ``filters`` ask for; those that are text have the ``options``.

    Raises:
        LocalProtocolError: a topic filter or a QoS that is none.
    """
    given = [filters] if isinstance(filters, str | Subscription) else filters
    wanted = [replace(options, topic_filter=each) if isinstance(each, str) else each for each in given]
    for subscription in wanted:
        validate_topic_filter(subscription.topic_filter)
        if not 0 <= subscription.qos <= 2:
            raise LocalProtocolError(f"mqtt: QoS is 0, 1 or 2, not {subscription.qos}")
    return wanted
