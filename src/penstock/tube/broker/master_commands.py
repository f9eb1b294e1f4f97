"""Commands of a master: serve or remove topics, stop reading or writing, limit consumers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.errors import ConfigError
from penstock.tube.broker.commits import Commits
from penstock.tube.broker.maintenance import Maintenance
from penstock.tube.engine.broker.flow_control import parse_rules
from penstock.tube.engine.broker.membership import MasterUpdate
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.storage.broker_storage import BrokerStorage

__all__ = ["MasterCommands"]

TOKENS_KNOWN_MS = 120_000
"""Time after a registration at which every client has a visit token that this broker knows."""
_log = logging.getLogger("penstock.tube.broker.broker")


class MasterCommands:
    """Applies the answers of a master, and reports the broker's status to it."""

    def __init__(
        self,
        storage: BrokerStorage,
        engine: BrokerEngine,
        maintenance: Maintenance,
        commits: Commits,
        broker_id: int,
        clock: Callable[[], int],
    ) -> None:
        self._storage = storage
        self._engine = engine
        self._maintenance = maintenance
        self._commits = commits
        self._broker_id = broker_id
        self._clock = clock
        self._tokens_asked = False
        self._tokens_due = 0

    def status(self) -> tuple[int, int, str | None]:
        """Status of reading and writing (0 normal, 1 stopped by the master, -1 disk failure), and the failure."""
        engine, failure = self._engine, self._commits.failure
        if failure is not None:
            return int(engine.checks.read_stopped), -1, failure.what
        return int(engine.checks.read_stopped), int(engine.checks.write_stopped), None

    def apply(self, update: MasterUpdate) -> None:
        """Apply ``update``; what must outlive a restart is part of the next commit."""
        engine = self._engine
        engine.checks.read_stopped = update.stop_read
        engine.checks.write_stopped = update.stop_write
        engine.checks.add_tokens(update.tokens)
        if update.check_tokens is not None:  # it registered
            self._tokens_asked = update.check_tokens
            self._tokens_due = self._clock() + TOKENS_KNOWN_MS
        engine.checks.check_tokens = self._tokens_asked and self._clock() >= self._tokens_due
        if update.max_message_bytes is not None:
            engine.topics.cluster_bytes = update.max_message_bytes
        if update.flow_rules is not None:
            self._limit_readers(update.flow_rules)
        if update.config is not None:
            engine.topics.apply(*update.config.parsed())
            self._commits.next.config = update.config.to_json()
            fields = {"broker_id": self._broker_id, "topics": len(update.config.topics)}
            _log.info("tube broker configured", extra={"fields": fields})
            self._commits.schedule()
        for name in update.removed_topics:
            if name in engine.topics.by_name:
                self._remove_topic(name)

    def without_master(self) -> None:
        """Accept any visit token while no master responds: clients may have new ones that this broker does not know."""
        self._engine.checks.check_tokens = False

    def _limit_readers(self, text: str) -> None:
        try:
            self._engine.fetch.rules = parse_rules(text)
        except ConfigError as error:
            _log.error("flow control rules are invalid and not applied", extra={"fields": {"error": error.what}})

    def _remove_topic(self, name: str) -> None:
        commit = self._commits.next
        self._maintenance.forget(name, commit)
        self._engine.remove_topic(name, self._clock())
        commit.removed_topics.append((name, self._storage.forget(name)))
        self._commits.schedule()
        _log.info("tube topic removed", extra={"fields": {"broker_id": self._broker_id, "topic": name}})
