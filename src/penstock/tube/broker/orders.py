"""What a master's answers make a broker do: serve topics, remove them, stop, limit readers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.errors import ConfigError
from penstock.tube.broker.commits import Commits
from penstock.tube.broker.upkeep import Upkeep
from penstock.tube.engine.broker.flow_control import parse_rules
from penstock.tube.engine.broker.membership import MasterUpdate
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.storage.disk import Disk

__all__ = ["OrderDesk"]

TOKENS_KNOWN_MS = 120_000
"""After a registration: by then every client has heard from the master again, and has a token known here."""
_log = logging.getLogger("penstock.tube.broker.broker")


class OrderDesk:
    """Carries orders out, and says what the broker reports of itself."""

    def __init__(
        self,
        disk: Disk,
        engine: BrokerEngine,
        upkeep: Upkeep,
        commits: Commits,
        broker_id: int,
        clock: Callable[[], int],
    ) -> None:
        self._disk = disk
        self._engine = engine
        self._upkeep = upkeep
        self._commits = commits
        self._broker_id = broker_id
        self._clock = clock
        self._tokens_asked = False
        self._tokens_due = 0

    def status(self) -> tuple[int, int, str | None]:
        """Statuses of reading and writing: 0 normal, 1 stopped by order, -1 the disk has failed; and how it failed."""
        engine, failure = self._engine, self._commits.failure
        if failure is not None:
            return int(engine.checks.read_stopped), -1, failure.what
        return int(engine.checks.read_stopped), int(engine.checks.write_stopped), None

    def obey(self, orders: MasterUpdate) -> None:
        """Do what ``orders`` say; what of it has to last is in the next commit."""
        engine = self._engine
        engine.checks.read_stopped = orders.stop_read
        engine.checks.write_stopped = orders.stop_write
        engine.checks.add_tokens(orders.tokens)
        if orders.check_tokens is not None:  # it registered
            self._tokens_asked = orders.check_tokens
            self._tokens_due = self._clock() + TOKENS_KNOWN_MS
        engine.checks.check_tokens = self._tokens_asked and self._clock() >= self._tokens_due
        if orders.max_message_bytes is not None:
            engine.topics.cluster_bytes = orders.max_message_bytes
        if orders.flow_rules is not None:
            self._limit_readers(orders.flow_rules)
        if orders.config is not None:
            engine.topics.apply(*orders.config.parsed())
            self._commits.next.config = orders.config.to_json()
            fields = {"broker_id": self._broker_id, "topics": len(orders.config.topics)}
            _log.info("tube broker configured", extra={"fields": fields})
            self._commits.schedule()
        for name in orders.removed_topics:
            if name in engine.topics.by_name:
                self._remove_topic(name)

    def without_master(self) -> None:
        """The master does not answer: clients may have visit tokens by now that nobody told this broker."""
        self._engine.checks.check_tokens = False

    def _limit_readers(self, text: str) -> None:
        try:
            self._engine.fetch.rules = parse_rules(text)
        except ConfigError as error:
            _log.error("flow control rules are not in force", extra={"fields": {"error": error.what}})

    def _remove_topic(self, name: str) -> None:
        commit = self._commits.next
        self._upkeep.forget(name, commit)
        self._engine.remove_topic(name, self._clock())
        commit.removed_topics.append((name, self._disk.forget(name)))
        self._commits.schedule()
        _log.info("tube topic removed", extra={"fields": {"broker_id": self._broker_id, "topic": name}})
