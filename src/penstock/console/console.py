"""The console of a node: combines the views of its parts, samples their counters once a second, and stores events.

The parts are set when they start; until then their views are missing, and the health has the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from penstock.console.cluster import ClusterViews
from penstock.console.events import EventRing
from penstock.console.mqtt import MqttViews
from penstock.console.pages import Pages
from penstock.console.payload_schemas import NO_SCHEMAS, PayloadSchemas
from penstock.console.pipelines import PipelineViews
from penstock.console.rates import Rates
from penstock.console.snapshots import (
    ClusterSnapshot,
    Health,
    Hop,
    ListenerSnapshot,
    Load,
    NodeSnapshot,
    Overview,
    Rule,
)
from penstock.console.statestore import StateStoreViews
from penstock.console.tube import TubeViews
from penstock.mqtt.server import MqttServer
from penstock.statestore.service.service import StateStoreService
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.master.master import TubeMaster

__all__ = ["Console"]

SAMPLE_S: Final = 1.0
TOPIC_SAMPLE_S: Final = 5
"""Seconds between samples of the counts of all topics."""
SLOW_COMMIT_S: Final = 0.2
"""Duration in seconds above which a commit is logged as an event."""
EVENT_EVERY_S: Final = 10
"""Seconds between two events of the same limit or slow commit."""

_HISTORY: Final = ("mqtt_in", "mqtt_out", "rules_logged", "log_in", "log_out", "statestore_requests", "cpu_s", "queued")
"""Names of the series in the history."""

_LIMITS: Final[Mapping[str, str]] = {
    "connections_refused": "MQTT connections refused: see the log for the reasons",
    "refused_address": "MQTT connections refused: max_connections_per_address",
    "refused_listener": "MQTT connections refused: max_connections of the listener",
    "refused_rate": "MQTT connections refused: connect_rate_per_address",
    "evicted_unauthenticated": "MQTT connections without CONNECT closed: max_unauthenticated",
    "dropped_queue_full": "MQTT messages dropped: max_queued_messages or max_queued_bytes of a client",
    "dropped_too_large": "MQTT messages dropped: larger than the receiver's Maximum Packet Size",
    "refused_queue_full": "MQTT messages refused: the queue of a receiver is full",
    "refused_subscriptions": "MQTT subscriptions refused: max_subscriptions or max_total_subscriptions",
    "refused_out_of_space": "MQTT messages refused: out of disk space",
    "refused_unauthorized": "MQTT messages or subscriptions refused by access control",
    "rate_exceeded": "MQTT messages above max_publish_rate",
    "write_stalls": "MQTT clients disconnected: they did not read for write_stall_ms",
    "observers_disconnected": "state store observers disconnected: their queues are full",
    "protocol_errors": "MQTT connections closed: protocol errors of clients",
    "statestore_refused": "state store requests refused",
    "statestore_denied": "state store commands denied by the policies",
    "refused_quota": "state store SETs refused: max_keys or max_bytes",
    "refused_share": "state store SETs refused: principal_share",
    "rules_refused": "messages refused by the log in rules",
    "tube_refused": "TubeMQ requests refused",
    "stalls": "the process did not run for more than 1.5 s",
}
"""Counters of limits and refusals: an increase is an event."""

_CONNECTION_LIMITS: Final = ("refused_address", "refused_listener", "refused_rate", "evicted_unauthenticated")
_MQTT_ERRORS: Final = ("connections_refused", "refused_unauthorized", "refused_queue_full", "refused_out_of_space",
                       "rate_exceeded", "protocol_errors")  # fmt: skip
_MQTT_LOSSES: Final = ("dropped_queue_full", "dropped_too_large", "write_stalls", "observers_disconnected")
_MQTT_LIMITS: Final = (*_MQTT_ERRORS, *_MQTT_LOSSES, "refused_subscriptions")


class Console:
    """Views of a node. ``node``, ``health``, ``listeners`` and ``rules`` return the current state; ``stalls`` returns a
    counter.

    ``disk``: bytes used by the data directory and free on its file system. ``managed``: names of the pipelines whose
    dead letters the node manages. ``schemas``: those of the values of records.
    """

    def __init__(
        self,
        *,
        node: Callable[[], NodeSnapshot],
        health: Callable[[], Health],
        listeners: Callable[[], tuple[ListenerSnapshot, ...]],
        rules: Callable[[], tuple[Rule, ...]],
        disk: Callable[[], tuple[int, int]],
        stalls: Callable[[], int] = lambda: 0,
        managed: Callable[[], Collection[str]] = tuple,
        schemas: PayloadSchemas = NO_SCHEMAS,
    ) -> None:
        self.events = EventRing()
        self.pages = Pages()
        self.rates = Rates(self._counters, gauges=("queued",))
        self.node = node
        self.health = health
        self.listeners = listeners
        self.rules = rules
        self.mqtt: MqttViews | None = None
        self.statestore: StateStoreViews | None = None
        self.pipelines: PipelineViews | None = None
        self.tube: TubeViews | None = None
        self.cluster: ClusterViews | None = None
        """The cluster of the node; None: the node is not in one."""
        self._disk = disk
        self._stalls = stalls
        self._managed = managed
        self._schemas = schemas
        self._server: MqttServer | None = None
        self._store: StateStoreService | None = None
        self._broker: TubeBroker | None = None
        self._commits: dict[str, Callable[[], float]] = {}
        self._topics = Rates(self._topic_counts)
        self._samples = 0
        self._delay_s = 0.0
        self._reported_at: dict[str, float] = {}
        self._pending: dict[str, float] = {}
        """Increases of limits that are not reported yet."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to collect events and samples."""
        logging.getLogger("penstock").addHandler(self.events)
        self._sample(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Stop collecting; may be called twice."""
        logging.getLogger("penstock").removeHandler(self.events)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def show_mqtt(self, server: MqttServer, commit_s: Callable[[], float]) -> None:
        """Add the views of the MQTT broker, which has started. ``commit_s``: duration of its commits."""
        self._server = server
        self._commits["mqtt"] = commit_s
        self.mqtt = MqttViews(server, self.pages)

    def show_statestore(self, store: StateStoreService) -> None:
        """Add the views of the state store, which has started."""
        self._store = store
        self._commits["statestore"] = lambda: store.commit_s
        self.statestore = StateStoreViews(store, self.pages)
        self.pipelines = PipelineViews(store, self.pages, self._managed)

    def show_tube(self, master: TubeMaster, broker: TubeBroker) -> None:
        """Add the views of TubeMQ, which has started."""
        self._broker = broker
        self._commits["tube"] = lambda: broker.commits.queue.longest_s
        self.tube = TubeViews(master, broker, self.pages, rate=self._topics.rate, schemas=self._schemas)

    def show_cluster(self, read: Callable[[], ClusterSnapshot]) -> None:
        """Add the view of the cluster, see :class:`ClusterViews`; before the node starts."""
        self.cluster = ClusterViews(read)

    async def refresh_metrics(self) -> None:
        """Compute the metrics that are not counted all the time: the lags of groups."""
        if self.tube is not None:
            await self.tube.refresh_lags()

    def group_metrics(self) -> Iterable[tuple[Sequence[str], Mapping[str, int | float]]]:
        """Return the lags of the consumer groups by name."""
        return () if self.tube is None else self.tube.lag_metrics()

    async def overview(self) -> Overview:
        """Return the data of the first page."""
        return Overview(self.node(), self.health(), self.listeners(), self.load(), await self.hops())

    def load(self) -> Load:
        """Return the load of the process."""
        used, free = self._disk()
        return Load(
            cpu=self.rates.rate("cpu_s"),
            memory_bytes=_resident_bytes(),
            loop_delay_s=self._delay_s,
            disk_used_bytes=used,
            disk_free_bytes=free,
            commit_s={part: commit_s() for part, commit_s in self._commits.items()},
        )

    async def hops(self) -> tuple[Hop, ...]:
        """Return the hops of the data path with their rates and lags."""
        now, rate = self.rates.latest, self.rates.rate

        def count(*names: str) -> int:
            return int(sum(now.get(name, 0) for name in names))

        def errors(*names: str) -> tuple[int, float]:
            return count(*names), sum(rate(name) for name in names)

        pipelines = () if self.pipelines is None else await self.pipelines.hops()
        hops = [
            Hop("publishers", "MQTT publishers", "messages", rate("mqtt_in"), count("mqtt_in"), *errors(*_MQTT_ERRORS),
                to=("subscribers", "rules", "statestore")),
            Hop("subscribers", "MQTT subscribers", "messages", rate("mqtt_out"), count("mqtt_out"),
                *errors(*_MQTT_LOSSES), lag_records=count("queued")),
            Hop("rules", "Rules", "messages", rate("rules_logged"), count("rules_logged"), *errors("rules_refused"),
                lag_records=count("rules_waiting"), to=("log",)),
            Hop("statestore", "State store", "requests", rate("statestore_requests"), count("statestore_requests"),
                *errors("statestore_refused"), lag_records=count("statestore_waiting")),
            Hop("log", "TubeMQ log", "records", rate("log_in"), count("log_in"), *errors("tube_refused"),
                to=("groups", "pipelines") if pipelines else ("groups",)),
        ]  # fmt: skip
        lag, age_s, exact = (0, 0.0, True) if self.tube is None else await self.tube.total_lag()
        hops.append(
            Hop("groups", "Consumer groups", "records", rate("log_out"), count("log_out"),
                lag_records=lag, lag_s=age_s, lag_exact=exact)
        )  # fmt: skip
        return (*hops, *pipelines)

    def history(self, since_ms: int = 0) -> tuple[list[int], dict[str, list[float]]]:
        """Return the times of the samples after ``since_ms``, in ms since 1970 by the current system clock, and the
        rates at these times."""
        offset_s = time.time() - time.monotonic()
        times, series = self.rates.history(_HISTORY, since_ms / 1000 - offset_s)
        return [round((at_s + offset_s) * 1000) for at_s in times], series

    # Sampling

    def _sample(self, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._delay_s = max(0.0, now_s - due_s)
        before = self.rates.latest
        at_s = time.monotonic()  # rates must not depend on steps of the system clock
        now = self.rates.sample(at_s)
        if self._samples % TOPIC_SAMPLE_S == 0:
            self._topics.sample(at_s)
        self._samples += 1
        if before:
            self._report_limits(before, now, now_s)
        self._report_slow_commits(now_s)
        if self.pipelines is not None:
            self.pipelines.follow_letters()
        self.health()  # stores the start time of each reason
        due_s = max(due_s + SAMPLE_S, now_s)
        self._timer = loop.call_at(due_s, self._sample, due_s)

    def _report_limits(self, before: Mapping[str, float], now: Mapping[str, float], now_s: float) -> None:
        pending = self._pending
        for name, text in _LIMITS.items():
            if (more := now.get(name, 0) - before.get(name, 0)) > 0:
                pending[name] = pending.get(name, 0) + more
            if name in pending and now_s >= self._reported_at.get(name, 0.0):
                self._reported_at[name] = now_s + EVENT_EVERY_S
                self.events.add("warning", "limits", f"{text} (+{pending.pop(name):.0f})")

    def _report_slow_commits(self, now_s: float) -> None:
        for part, commit_s in self._commits.items():
            took_s = commit_s()
            if took_s >= SLOW_COMMIT_S and now_s >= self._reported_at.get(part, 0.0):
                self._reported_at[part] = now_s + EVENT_EVERY_S
                self.events.add("warning", part, f"slow commit: {took_s:.2f} s; the disk delays acknowledgements")

    def _counters(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found: dict[str, float] = {"cpu_s": usage.ru_utime + usage.ru_stime, "stalls": self._stalls()}
        server, store, broker = self._server, self._store, self._broker
        if server is not None:
            stats, limits = server.broker.stats, server.connection_limit_stats
            found |= {name: getattr(stats, name) for name in _MQTT_LIMITS}
            found |= {name: getattr(limits, name) for name in _CONNECTION_LIMITS}
            found["mqtt_in"] = stats.publishes_received
            found["mqtt_out"] = stats.publishes_sent
            found["queued"] = server.broker.queue_totals.messages
        if store is not None:
            quotas = store.quota_metrics()
            found |= {
                "statestore_requests": store.stats.requests,
                "statestore_refused": store.stats.refused,
                "statestore_denied": sum(store.stats.denied.values()),
                "statestore_waiting": store.pending,
                "refused_quota": quotas["refused_quota"],
                "refused_share": quotas["refused_share"],
            }
        if broker is not None:
            engine = broker.engine
            found |= {
                "log_in": engine.produce.messages,
                "log_out": engine.fetch.messages,
                "tube_refused": engine.checks.refused,
            }
        rules = self.rules()
        found["rules_logged"] = sum(rule.logged for rule in rules)
        found["rules_refused"] = sum(rule.refused + rule.dropped for rule in rules)
        found["rules_waiting"] = sum(rule.waiting for rule in rules)
        return found

    def _topic_counts(self) -> dict[str, float]:
        return {} if self.tube is None else self.tube.counted()


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - once per request, without an object for the path
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
