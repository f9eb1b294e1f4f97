"""Metrics of the broker as retained messages below ``$SYS/``, updated while a client is subscribed to them.

The topic names are Mosquitto's, so that dashboards for Mosquitto work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import penstock
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.model.stats import BrokerStats
from penstock.mqtt.engine.model.timers import DeadlineOwner, Timers

__all__ = ["SYS_PREFIX", "SysTopics", "belongs_to_broker", "sys_messages"]

SYS_PREFIX: Final = "$SYS/"
"""Prefix of topics to which only the broker publishes, except for the states of bridges."""
_BRIDGES_PREFIX: Final = "$SYS/broker/connection/"


def belongs_to_broker(topic: str) -> bool:
    """Return whether only the broker may publish to ``topic``: below ``$SYS/``, except for a bridge's state.

    Bridges of Mosquitto publish their state as ``$SYS/broker/connection/NAME/state`` to both sides, retained: 1 while
    they are connected, and 0 as their will.
    """
    if not topic.startswith(SYS_PREFIX):
        return False
    name, slash, last = topic[len(_BRIDGES_PREFIX) :].partition("/")
    return not (topic.startswith(_BRIDGES_PREFIX) and name and slash and last == "state")


def sys_messages(stats: BrokerStats, uptime_s: int) -> list[tuple[str, str]]:
    """Return topic and text of every metric."""
    dropped = (
        stats.dropped_queue_full
        + stats.dropped_expired
        + stats.dropped_too_large
        + stats.dropped_offline
        + stats.dropped_refused
        + stats.dropped_unauthorized
    )
    numbers = {
        "clients/connected": stats.connections,
        "clients/total": stats.sessions,
        "clients/disconnected": max(0, stats.sessions - stats.connections),
        "subscriptions/count": stats.subscriptions,
        "retained messages/count": stats.retained,
        "retained messages/bytes": stats.retained_bytes,
        "store/messages/count": stats.queued,
        "store/messages/bytes": stats.queued_bytes,
        "messages/inflight": stats.inflight,
        "messages/received": stats.packets_received,
        "messages/sent": stats.packets_sent,
        "bytes/received": stats.bytes_received,
        "bytes/sent": stats.bytes_sent,
        "publish/messages/received": stats.publishes_received,
        "publish/messages/sent": stats.publishes_sent,
        "publish/messages/dropped": dropped,
        "connections/opened": stats.connections_opened,
        "connections/refused": stats.connections_refused,
        "connections/stalled": stats.write_stalls,
        "protocol errors": stats.protocol_errors,
        "refused/unauthorized": stats.refused_unauthorized,
        "refused/queue full": stats.refused_queue_full,
        "refused/subscriptions": stats.refused_subscriptions,
        "refused/rate": stats.rate_exceeded,
    }
    texts = {"version": f"penstock {penstock.__version__}", "uptime": f"{uptime_s} seconds"}
    texts.update((name, str(number)) for name, number in numbers.items())
    return [(f"{SYS_PREFIX}broker/{name}", text) for name, text in texts.items()]


class SysTopics(DeadlineOwner):
    """Publishes the metrics every ``sys_interval_s`` while ``wanted()``, each with ``publish(topic, text, now)``.

    While no client is subscribed, metrics are not read and no timer runs. Unchanged metrics are not sent again.
    """

    __slots__ = ("_last", "_limits", "_measure", "_publish", "_running", "_timers", "_wanted", "started_at")

    def __init__(
        self,
        timers: Timers,
        limits: BrokerLimits,
        *,
        wanted: Callable[[], bool],
        measure: Callable[[], BrokerStats],
        publish: Callable[[str, str, int], None],
    ) -> None:
        super().__init__()
        self._timers = timers
        self._limits = limits
        self._wanted = wanted
        self._measure = measure
        self._publish = publish
        self._running = False
        self._last: dict[str, str] = {}
        self.started_at: int | None = None

    def renew(self, now: int) -> None:
        """Publish the metrics for a new subscription, and periodically while there is one."""
        interval_s = self._limits.sys_interval_s
        if interval_s:
            self._publish_changes(now)
            self._running = True
            self._timers.arm(self, now + interval_s * 1000)

    def due(self, now: int) -> None:
        """Publish the metrics again, or stop without subscribers."""
        interval_s = self._limits.sys_interval_s
        if self._running and interval_s and self._wanted():
            self._publish_changes(now)
            self._timers.arm(self, now + interval_s * 1000)
        else:
            self._running = False

    def _publish_changes(self, now: int) -> None:
        uptime_s = 0 if self.started_at is None else (now - self.started_at) // 1000
        for topic, text in sys_messages(self._measure(), uptime_s):
            if self._last.get(topic) != text:
                self._last[topic] = text
                self._publish(topic, text, now)
