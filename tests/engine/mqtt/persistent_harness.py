"""A broker engine with persistent sessions in a real store; commits and crashes are triggered by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.mqtt.codec.packets import Packet, Subscription
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.model.access import Rights
from penstock.mqtt.engine.model.journal import Journal, Recovered
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.recovery import restore
from penstock.mqtt.engine.sessions.session import SessionConnection
from penstock.mqtt.storage import SessionStore
from penstock.runtime.io.files import Durability

from .harness import Bench, Peer, RecordingService

__all__ = ["HOUR", "PersistentBench", "back", "reader"]

HOUR = 3600

WALL = 1_000_000
"""Wall clock minus the bench's clock, as its peers say it."""


class PersistentBench(Bench):
    """Commits at every flush; not while ``stalled``, as if the disk took its time."""

    def __init__(
        self,
        path: Path,
        *services: RecordingService,
        limits: BrokerLimits | None = None,
        durable_acknowledgements: bool = True,
    ) -> None:
        self.path = path
        self.limits = limits
        self.durable_acknowledgements = durable_acknowledgements
        self.stalled = False
        self.commits = 0
        self.recall: Callable[[str, str], Rights | None] | None = None
        self.refused_wills: list[tuple[str, str, str]] = []
        self.store = SessionStore(path, Durability.FLUSHED)
        super().__init__(*services, limits=limits)
        self._start(*services)

    def _start(self, *services: RecordingService) -> None:
        self.journal = Journal(durable_acknowledgements=self.durable_acknowledgements)
        self.broker = Broker(
            self.limits,
            services=services,
            journal=self.journal,
            new_client_id=lambda: "assigned",
            report=lambda _connection, code, _why: self.ended.append(code),
        )
        self.broker.report_will = lambda *refused: self.refused_wills.append(refused)
        self.broker.recall = self.recall
        self.peers: dict[SessionConnection, Peer] = {}
        self.found: Recovered = self.store.open(WALL)
        self.journal.start_at(self.found.next_number)
        restore(self.broker, self.found, self.now)
        self.broker.tick(self.now)

    def flush(self) -> None:
        if not self.stalled:
            self.commit()
        super().flush()
        super().flush()  # for goodbyes that the first one wrote

    def commit(self) -> None:
        """Make everything recorded durable, and let what waited for it go."""
        while self.journal.waiting or self.journal.urgent:
            batch = self.journal.cut(WALL)
            self.store.commit(batch)
            self.commits += bool(batch)
            self.journal.committed = batch.number
        super().flush()

    def crash(self, *services: RecordingService, down_ms: int = 0) -> None:
        """The process is gone, with all that was not committed; it starts again on what there is."""
        self.store.close()
        self.stalled = False
        self.now += down_ms
        self.store = SessionStore(self.path, Durability.FLUSHED)
        self._start(*services)


def reader(bench: PersistentBench, client_id: str = "reader", **more: Any) -> None:
    """A kept session with a subscription to everything, offline."""
    peer = bench.connect(client_id, expiry=HOUR, **more)
    peer.subscribe(Subscription("#", 2))
    peer.drop()


def back(bench: PersistentBench, client_id: str = "reader") -> list[Packet]:
    """The reader connects again; what it is sent."""
    peer = bench.connect(client_id, clean_start=False, expiry=HOUR)
    assert bench.connack.session_present
    return peer.take()
