"""Connection of a broker to its master: registration, heartbeats, reconnection, failover to the next master, commands.

The master's answers contain commands: serve or remove topics, stop reading or writing, limit consumers
(`MasterCommands`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.errors import ConfigError, PenstockError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.observability.logs import error_fields
from penstock.tube.broker.commits import Commits
from penstock.tube.broker.maintenance import Maintenance
from penstock.tube.client.arguments import credentials
from penstock.tube.client.connection import ClientConnection
from penstock.tube.codec.methods import ServiceType
from penstock.tube.codec.proto.shared_pb2 import MasterCertificateInfo
from penstock.tube.engine.broker.flow_control import parse_rules
from penstock.tube.engine.broker.membership import BrokerMembership, MasterUpdate
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.storage.broker_storage import BrokerStorage

__all__ = ["MasterCommands", "MasterConnection"]

_log = logging.getLogger("penstock.tube.broker.broker")

TOKENS_KNOWN_MS = 120_000
"""Time after a registration after which every client has a visit token that this broker accepts."""

_RETRY_S = 0.2
_RETRY_MOST_S = 5.0
_SOON_S = 0.02
_SAY_AGAIN_MS = 30_000


class MasterConnection:
    """Keeps a broker registered at one of ``masters()``. ``apply(update)`` is called in the loop for each response.

    ``masters`` returns the current addresses; none if no master is active at present. ``lost()`` is called after each
    failed attempt to reach a master, and when the connection is lost.
    """

    def __init__(
        self,
        membership: BrokerMembership,
        masters: Callable[[], Sequence[tuple[str, int]]],
        apply: Callable[[MasterUpdate], None],
        status: Callable[[], tuple[int, int, str | None]],
        *,
        lost: Callable[[], None] = lambda: None,
        heartbeat_s: float,
        user: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._credentials = None if user is None else credentials(*user)
        self._tls = tls
        self.membership = membership
        self.heartbeats = 0
        self.registered = asyncio.Event()
        self._masters = masters
        self._master: tuple[str, int] | None = None
        self._apply = apply
        self._status = status
        self._lost = lost
        self._heartbeat_s = heartbeat_s
        self._wake = asyncio.Event()
        self._connection: ClientConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._said: dict[str, str] = {}
        self._said_ms = 0

    def start(self) -> None:
        """Start the connection in the background; ``registered`` is set after the first registration."""
        self._task = asyncio.create_task(self._run(), name=f"tube broker {self.membership.broker_id} membership")

    def heartbeat_now(self) -> None:
        """Send a heartbeat immediately."""
        self._wake.set()

    def masters_changed(self) -> None:
        """Try the masters again immediately, and leave the current one if it is not among them any more."""
        if self._connection is not None and self._master not in self._masters():
            self._connection.abort()
        self._wake.set()

    async def close(self) -> None:
        """Stop; the master is notified if it is reachable."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        connection = self._connection
        if connection is None:
            return
        if self.membership.registered:
            with suppress(PenstockError):
                await connection.exchange(
                    ServiceType.MASTER, *self.membership.close_request(self._signed()), timeout_s=1
                )
        connection.abort()

    def _signed(self) -> MasterCertificateInfo | None:
        """Credentials of the broker, signed with the current time: a signature is valid for seconds."""
        return None if self._credentials is None else self._credentials.certificate()

    async def _run(self) -> None:
        place = 0
        backoff = Backoff(_RETRY_S, _RETRY_MOST_S, random.random)
        while True:
            if masters := sorted(self._masters()):
                host, port = self._master = masters[place % len(masters)]
                try:
                    await self._serve(host, port)
                except PenstockError as error:
                    if self.membership.registered:
                        backoff.reset()
                    self._report(f"{host}:{port}", error)
                    self.membership.lost()
                    self._lost()
            if self._connection is not None:
                self._connection.abort()
            self._connection = None
            place += 1
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.failed()):
                    await self._wake.wait()

    def _report(self, master: str, error: PenstockError) -> None:
        """Log why no master is connected: immediately for a lost master or a new error, otherwise at intervals."""
        now = wall_clock_ms()
        lost = self.membership.registered
        if not lost and self._said.get(master) == error.what and now < self._said_ms + _SAY_AGAIN_MS:
            return
        self._said[master] = error.what
        self._said_ms = now
        fields = {"broker_id": self.membership.broker_id, "master": master, **error_fields(error)}
        _log.warning("tube broker lost its master" if lost else "tube broker has no master", extra={"fields": fields})

    async def _serve(self, host: str, port: int) -> None:
        self._connection = await ClientConnection.connect((host, port), tls=self._tls)
        while True:
            method, payload = self.membership.next_request(*self._status(), signed=self._signed())
            update = self.membership.receive(
                method, await self._connection.exchange(ServiceType.MASTER, method, payload)
            )
            self._apply(update)
            self.heartbeats += 1
            if self.membership.registered and not self.registered.is_set():
                self.registered.set()
                self._said.clear()
                fields = {"broker_id": self.membership.broker_id, "master": f"{host}:{port}"}
                _log.info("tube broker registered", extra={"fields": fields})
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SOON_S if update.soon else self._heartbeat_s):
                    await self._wake.wait()


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
        """Apply ``update``; durable parts are written with the next commit."""
        engine = self._engine
        engine.checks.read_stopped = update.stop_read
        engine.checks.write_stopped = update.stop_write
        engine.checks.add_tokens(update.tokens)
        if update.check_tokens is not None:  # the broker has registered
            self._tokens_asked = update.check_tokens
            self._tokens_due = self._clock() + TOKENS_KNOWN_MS
        engine.checks.check_tokens = self._tokens_asked and self._clock() >= self._tokens_due
        if update.max_message_bytes is not None:
            topics = engine.topics
            topics.cluster_bytes = update.max_message_bytes
            topics.apply(topics.default, [topic.config for topic in topics.by_name.values()])
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
        """Accept any visit token while no master responds, because clients may have newer ones than this broker."""
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
