"""The broker server: listeners, timers, commits, and its membership at a master.

A send is answered when its commit has returned (durability "durable": after fsync). All messages of one loop turn share
a commit; messages that arrive while a commit runs share the next one. After a failed commit nothing is acknowledged:
sends and commits of offsets are answered with 503 and the reason, reads continue.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import PenstockError, RemoteProtocolError, StorageError
from penstock.runtime.io.clock import steady_clock
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue
from penstock.runtime.io.files import Durability, Files
from penstock.runtime.io.network import parse_address
from penstock.runtime.observability.logs import error_fields
from penstock.tube.admin import broker as broker_admin
from penstock.tube.admin.request import UNKNOWN, Caller
from penstock.tube.broker.commits import AppendDone, Commits
from penstock.tube.broker.maintenance import Maintenance, OpenedLogs, TopicDurability, newest_message, open_logs
from penstock.tube.broker.master_connection import MasterCommands, MasterConnection
from penstock.tube.broker.timers import BrokerTimers
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import Request, decode_request, encode_error
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.strings import DEFAULT_BROKER_TLS_PORT, TopicConfig
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.broker.group_offsets import GroupOffsets
from penstock.tube.engine.broker.membership import BrokerConfig, BrokerMembership
from penstock.tube.engine.broker.send_decoder import SendCollector
from penstock.tube.engine.broker.topics import Topics
from penstock.tube.engine.broker_engine import AppendResult, BrokerEngine
from penstock.tube.engine.limits import DEFAULT_LIMITS, TubeLimits
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.engine.transactions.staging import StagingLimits
from penstock.tube.rpc import REQUEST_WORK, Listeners, OpenConnections, ServerConnection
from penstock.tube.storage.broker_storage import BrokerStorage
from penstock.tube.storage.meta import MetaStore
from penstock.tube.storage.store import Store, StoreLimits

__all__ = ["AppendDone", "AppendResult", "TubeBroker", "TubeBrokerConnection"]

_log = logging.getLogger("penstock.tube.broker.broker")


class TubeBroker:
    """One broker over one data directory. All methods are called in the loop that `start` ran in.

    ``masters``: ``host:port`` texts, or a function that returns the current ones (then call `masters_changed`); empty:
    a standalone broker, whose topics come from `create_topic` only.
    ``advertise``: ``host:port`` for clients, if it differs from the bound address. ``web_address``: ``host:port`` of
    its administration, which the master reports to clients. ``access``: users and their rights.
    ``master_user``: name and password with which the broker itself signs. ``master_tls``: TLS for the masters;
    ``masters`` then has their TLS ports. None: no TLS. ``topic_durability`` overrides ``durability`` for single topics.
    ``staging``: limits of staged rows. ``files``, ``clock`` (ms since 1970, without steps), ``open_meta`` and
    ``commit_queue`` are replaced by the simulator.
    """

    def __init__(
        self,
        data_dir: Path,
        durability: Durability = Durability.DURABLE,
        broker_id: int = 1,
        masters: Sequence[str] | Callable[[], Sequence[str]] = (),
        advertise: str | None = None,
        *,
        topic_durability: Mapping[str, Durability] | None = None,
        limits: TubeLimits = DEFAULT_LIMITS,
        max_store_bytes: int | None = None,
        staging: StagingLimits | None = None,
        session_ms: int = 30_000,
        heartbeat_s: float = 0.5,
        web_address: str | None = None,
        admin_token: str | None = None,
        access: ClientAccess | None = None,
        master_user: tuple[str, str] | None = None,
        master_tls: ssl.SSLContext | None = None,
        files: Files | None = None,
        clock: Callable[[], int] | None = None,
        open_meta: Callable[[Path], MetaStore] | None = None,
        commit_queue: Callable[[str, CommitClient[Any]], CommitQueue[Any]] = CommitQueue,
    ) -> None:
        self.broker_id = broker_id
        self.durability = durability
        self.on_failure: Callable[[StorageError], None] | None = None
        self.clock = clock if clock is not None else steady_clock()
        self.connections = OpenConnections(f"broker {broker_id}", limits)
        self.bytes_in = 0
        self.bytes_out = 0
        self.requests = 0
        self._directory = data_dir / "tube" / f"broker-{broker_id}"
        self._masters = masters if callable(masters) else [parse_address(text) for text in masters]
        self._advertise = advertise
        self._topic_durability = dict(topic_durability or {})
        self._limits = limits
        self._max_store_bytes = max_store_bytes
        self._staging_limits = staging if staging is not None else StagingLimits()
        self._session_ms = session_ms
        self._heartbeat_s = heartbeat_s
        self._web_address = web_address
        self._admin_token = admin_token
        self._access = access
        self._master_user = master_user
        self._master_tls = master_tls
        self._files = files
        self._open_meta = open_meta
        self._commit_queue = commit_queue
        self._storage: BrokerStorage | None = None
        self._engine: BrokerEngine | None = None
        self._commits: Commits | None = None
        self._commands: MasterCommands | None = None
        self._listeners = Listeners(lambda: TubeBrokerConnection(self))
        self._member: MasterConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._maintenance: Maintenance | None = None
        self._timers: BrokerTimers | None = None
        self.look: Callable[[], None] = _noop
        """Called before requests are answered, to detect a pause of the process."""

    @property
    def engine(self) -> BrokerEngine:
        """The state machine behind the connections; for administration and tests."""
        assert self._engine is not None, "call start() first"
        return self._engine

    @property
    def commits(self) -> Commits:
        """The commits of the broker; for its connections."""
        assert self._commits is not None, "call start() first"
        return self._commits

    @property
    def failure(self) -> StorageError | None:
        """Reason why messages cannot be stored any more; None while the broker stores messages."""
        return None if self._commits is None else self._commits.failure

    @property
    def stalled(self) -> StorageError | None:
        """Reason why responses wait for disk space or a file descriptor; None while they do not."""
        return None if self._commits is None else self._commits.stalled

    @property
    def storage(self) -> BrokerStorage:
        """The stores; for administration and tests."""
        assert self._storage is not None, "call start() first"
        return self._storage

    @property
    def access(self) -> ClientAccess | None:
        """Users and their rights; None if every client has all rights."""
        return self._access

    @property
    def tls_bound(self) -> tuple[str, int] | None:
        """Address of the TLS listener; None without one."""
        return self._listeners.tls_bound

    @property
    def maintenance(self) -> Maintenance:
        """The periodic work; for administration and tests."""
        assert self._maintenance is not None, "call start() first"
        return self._maintenance

    @property
    def _running(self) -> BrokerTimers:
        assert self._timers is not None, "call start() first"
        return self._timers

    @property
    def commands(self) -> MasterCommands:
        """Applies a master's commands; for tests."""
        assert self._commands is not None, "call start() first"
        return self._commands

    @property
    def registered(self) -> asyncio.Event | None:
        """Set once a master has accepted the broker; None without masters."""
        return self._member.registered if self._member else None

    @property
    def stats(self) -> dict[str, int]:
        """Counters and gauges as plain integers."""
        engine, storage, commits = self.engine, self.storage, self.commits
        stores = list(storage.stores.values())
        return {
            "connections": len(self.connections.open),
            "refused_connections": self.connections.refused,
            "requests": self.requests,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "produced_messages": engine.produce.messages,
            "produced_bytes": engine.produce.bytes,
            "produced_duplicates": engine.produce.duplicates,
            "fetched_messages": engine.fetch.messages,
            "gets": engine.gets,
            "waiting_gets": engine.fetch.waiting_count,
            **self.maintenance.staged_stats(),
            "refused": engine.checks.refused,
            "dropped_late": engine.dropped_late,
            "registrations": len(engine.registrations),
            "topics": len(engine.topics.by_name),
            "stores": len(stores),
            "stored_bytes": sum(store.data_end - store.min_data_offset for store in stores),
            "unwritten_bytes": sum(store.unwritten_bytes for store in stores),
            "damaged_reads": sum(store.damaged_reads for store in stores),
            "recovered_torn_bytes": storage.recovery.torn_bytes,
            "recovered_losses": sum(len(store.recovery.losses) for store in stores),
            "commits": commits.count,
            "failed": int(self.failure is not None),
        }

    async def start(
        self, host: str, port: int, *, tls: ssl.SSLContext | None = None, tls_port: int | None = None
    ) -> tuple[str, int]:
        """Recover, listen and register; returns the bound address. Port 0 selects a free port.

        With ``tls`` the broker listens on ``tls_port`` (default 8124) of ``host`` as well, see `tls_bound`.

        Raises:
            StorageError: the directory is in use or cannot be read. OSError: the address cannot be bound.
        """
        loop = self._loop = asyncio.get_running_loop()
        durability = TopicDurability(self.durability, self._topic_durability)
        opening = loop.run_in_executor(None, lambda: self._open(durability))
        try:
            opened = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be stopped: what it has opened is closed, also if the wait for it is cancelled.
            opening.add_done_callback(_close_unused)
            await asyncio.wait([opening])
            raise
        self._storage = opened.storage
        try:
            offsets, config = self._create_engine(opened)
            self._report_recovery(self._storage)
            tls_place = DEFAULT_BROKER_TLS_PORT if tls_port is None else tls_port
            bound = await self._listeners.start(host, port, tls, tls_place)
        except BaseException:
            self._storage.close(clean=True)
            self._storage = None
            raise
        storage, engine, maintenance = self.storage, self.engine, self.maintenance
        self._commits = Commits(
            storage, engine, maintenance, name=f"tube-{self.broker_id}", clock=self.clock,
            failed=self._failed, lost=self._lost, commit_queue=self._commit_queue,
        )  # fmt: skip
        self._timers = BrokerTimers(engine, self._commits, maintenance, self.clock)
        self.look = self._timers.look
        self._commands = MasterCommands(storage, engine, maintenance, self._commits, self.broker_id, self.clock)
        self._commits.schedule()  # continues publications of an earlier process
        for key, offset, end in maintenance.reset_beyond_end(offsets):
            text = f"group {key[0]} was at offset {offset} of partition {key[2]} of {key[1]}, but the log ends at {end}"
            self._lost(text)
        self._commits.changed()
        if self._masters:
            self._join(bound, config)
        return bound

    def _create_engine(self, opened: OpenedLogs) -> tuple[GroupOffsets, BrokerConfig]:
        """Create engine and maintenance from the opened logs; returns group offsets and the stored configuration."""
        storage = opened.storage
        offsets = GroupOffsets(
            ((item.group, item.topic, item.partition), item.offset)
            for item in storage.meta.offsets()
            if item.offset is not None
        )
        last_time = max((store.last_time for store in storage.stores.values()), default=0)
        engine = self._engine = BrokerEngine(
            Topics(self._store),
            offsets,
            session_ms=self._session_ms,
            limits=self._limits,
            last_time=last_time,
            staging=opened.staging,
        )
        engine.checks.access = self._access
        config = self._stored_config()
        self._maintenance = Maintenance(storage, engine, self.broker_id, self._max_store_bytes)
        for topic, rows in opened.producers:
            known = [row for row in rows if engine.transactions.restored(row[1])]
            engine.produce.producers.restore(topic, known)
        engine.produce.producers.changed.clear()
        return offsets, config

    def _join(self, bound: tuple[str, int], config: BrokerConfig) -> None:
        """Become a member of the cluster, with the address for clients."""
        address = self._advertise or f"{bound[0]}:{bound[1]}"
        bound_tls = self.tls_bound
        membership = BrokerMembership(
            self.broker_id, address, f"penstock-{penstock.__version__}", config,
            tls_port=None if bound_tls is None else bound_tls[1], web_address=self._web_address,
            is_removing=self.storage.is_removing,
        )  # fmt: skip
        self._member = MasterConnection(
            membership, self._current_masters, self.commands.apply, self.commands.status,
            lost=self.commands.without_master, heartbeat_s=self._heartbeat_s, user=self._master_user,
            tls=self._master_tls,
        )  # fmt: skip
        self._member.start()

    def access_changed(self) -> None:
        """End the registrations of consumers that may no longer read, after a change of users or rights."""
        if self._engine is not None:
            self._engine.registrations.access_changed()

    async def close(self) -> None:
        """Leave the cluster, answer received requests, sync and close. May be called twice."""
        if self._storage is None or self._commits is None:
            return
        if self._member is not None:
            await self._member.close()
        self._listeners.stop()
        self._running.stop()
        for connection in self.connections.open:
            connection.stop()
        await self._commits.close()
        await self.connections.close()
        await self._listeners.closed()
        storage, self._storage = self._storage, None
        clean = self.failure is None
        await asyncio.get_running_loop().run_in_executor(None, lambda: storage.close(clean=clean))

    def append(
        self, topic: str, partition: int | None, data: bytes, flag: int, msg_type: str | None, done: AppendDone
    ) -> None:
        """Store a message from inside the node; ``done`` gets the result after its commit, or the error: the
        StorageError if this or an earlier commit failed.

        ``done`` never runs before this returns. ``partition`` None: round-robin.
        """
        assert self._loop is not None, "call start() first"
        engine = self.engine
        try:
            result = engine.append(topic, partition, data, flag, msg_type, self.clock())
        except PenstockError as error:
            # After a failed commit repetitions fail, too: a rule must not keep the message.
            self._loop.call_soon(done, self.failure or error)
            return
        if self.durability_of(topic) is Durability.MEMORY:
            self._loop.call_soon(done, result)
        else:
            self.commits.call_after_commit(done, result)
        self.commits.changed()

    def append_run(
        self,
        topic: str,
        partition: int,
        messages: Sequence[tuple[bytes, int, str | None]],
        done: Callable[[int, PenstockError | None], None],
    ) -> None:
        """Store messages (data, flag, type) in order; the first one that is rejected ends the run.

        After their commit ``done`` gets the number of stored messages, and the error of the first rejected one. After
        an error of the log it gets 0, and it is unknown which messages were stored. It never runs before this returns.
        """
        assert self._loop is not None, "call start() first"
        stored = 0
        result: AppendResult | None = None
        refused: PenstockError | None = None
        for data, flag, msg_type in messages:
            try:
                result = self.engine.append(topic, partition, data, flag, msg_type, self.clock())
            except PenstockError as error:
                refused = error
                break
            stored += 1
        if result is None or self.durability_of(topic) is Durability.MEMORY:
            self._loop.call_soon(done, stored, refused)
        else:

            def committed(outcome: AppendResult | PenstockError) -> None:
                if isinstance(outcome, PenstockError):
                    done(0, outcome)
                else:
                    done(stored, refused)

            self.commits.call_after_commit(committed, result)
        if stored:
            self.commits.changed()

    def newest_message(self, topic: str, partition: int) -> tuple[bytes, int] | None:
        """Return data and flag of the last durable message of a partition; None if there is none."""
        return newest_message(self.engine.topics, topic, partition)

    async def committed(self) -> None:
        """Wait until all changes so far are durable. Raises StorageError after a failed commit."""
        await self.commits.committed()

    async def webapi(self, params: Mapping[str, str], caller: Caller = UNKNOWN) -> dict[str, Any]:
        """Answer a request of ``caller`` to ``/broker.htm``; changes are durable when this returns."""
        admin = broker_admin.BrokerAdmin(self.engine, self.broker_id, lambda: self.stats, self.clock())
        answer, changed = broker_admin.handle(admin, params, self._admin_token, caller)
        if changed:
            try:
                await self.committed()
            except StorageError as error:
                return {"result": False, "errCode": 500, "errMsg": error.what}
        return answer

    def refuse_growth(self, reason: str) -> None:
        """Reject sends (419) from now on with ``reason``; "": accept them again. Call after `start`."""
        self.engine.checks.out_of_space = reason

    def create_topic(self, name: str, partitions: int = 3, stores: int = 1) -> None:
        """Serve a topic without a master (standalone brokers, and tests)."""
        config = TopicConfig(name, partitions=partitions, stores=stores)
        self.engine.topics.apply(self.engine.topics.default, [config])
        self.commits.schedule()

    def shape_of(self, topic: str) -> tuple[int, int]:
        """Return the numbers of partitions per store and of stores of a topic here; (1, 1) if it is unknown."""
        served = self.engine.topics.by_name.get(topic)
        return (1, 1) if served is None else (served.config.partitions or 1, served.config.stores or 1)

    def heartbeat_now(self) -> None:
        """Send a heartbeat to the master now, for example because a topic was created at the master."""
        if self._member is not None:
            self._member.heartbeat_now()

    def masters_changed(self) -> None:
        """Connect to the current masters now, and leave one that is not among them any more."""
        if self._member is not None:
            self._member.masters_changed()

    def _current_masters(self) -> Sequence[tuple[str, int]]:
        masters = self._masters
        return [parse_address(text) for text in masters()] if callable(masters) else masters

    def durability_of(self, topic: str) -> Durability:
        """Return the durability of acknowledged messages of ``topic``."""
        return self._topic_durability.get(topic, self.durability)

    # Opening

    def _open(self, durability: TopicDurability) -> OpenedLogs:
        return open_logs(
            self._directory,
            durability,
            files=self._files,
            limits=StoreLimits(
                segment_bytes=self._limits.segment_bytes,
                segment_records=self._limits.segment_messages,
                tail_bytes=self._limits.cached_bytes,
            ),
            staging_limits=self._staging_limits,
            on_loss=self._lost,
            open_meta=self._open_meta,
        )

    def _store(self, topic: str, number: int) -> Store:
        store = self.storage.open_store(topic, number)
        durability = self.durability_of(topic)
        store.immediate = durability is Durability.MEMORY
        store.synced = durability is Durability.DURABLE
        self.maintenance.opened(topic, number, store)
        return store

    def _stored_config(self) -> BrokerConfig:
        data = self.storage.meta.config()
        if data is None:
            return BrokerConfig()
        config = BrokerConfig.from_json(data)
        self.engine.topics.apply(*config.parsed())
        return config

    def _report_recovery(self, storage: BrokerStorage) -> None:
        found = storage.recovery
        fields = {"broker_id": self.broker_id, "records": found.records, "torn_bytes": found.torn_bytes}
        _log.info("tube log opened", extra={"fields": {**fields, "rebuilt_indexes": found.rebuilt_indexes}})
        for text in storage.meta.damaged:
            self._lost(text)

    def _lost(self, what: object) -> None:
        _log.error("tube data lost", extra={"fields": {"broker_id": self.broker_id, "what": str(what)}})

    def _failed(self, error: StorageError) -> None:
        fields = {"broker_id": self.broker_id, **error_fields(error)}
        _log.error("tube broker does not store messages any more", extra={"fields": fields})
        if self.on_failure is not None:
            self.on_failure(error)
        self.heartbeat_now()

    # Time

    def arm(self) -> None:
        """Make sure that the timer runs at the engine's next deadline."""
        self._running.arm()

    def retain(self, now_ms: int) -> None:
        """Remove expired segments, write the offset history, store producer sequences; called every minute."""
        self._running.retain(now_ms)


def _noop() -> None:
    """Default before the start: does nothing."""


class TubeBrokerConnection(ServerConnection):
    """One client of a broker: passes requests to the engine and sends the responses, some after a commit.

    The messages of one turn are stored together per partition: storing each separately costs three times as much.
    """

    def __init__(self, broker: TubeBroker) -> None:
        super().__init__(broker.connections)
        self._broker = broker
        self._sends = SendCollector(broker.engine.produce.reader)

    def now_ms(self) -> int:
        return self._broker.clock()

    def ended(self) -> None:
        self._broker.engine.connection_closed(self)

    def data_received(self, data: bytes) -> None:
        self._broker.look()
        self._broker.bytes_in += len(data)
        super().data_received(data)

    def receive_frames(self, frames: deque[tuple[int, bytes]], end: int) -> None:
        broker, connections = self._broker, self._connections
        while frames and connections.work < end:
            sends = self._sends.collect(frames, end - connections.work)
            broker.requests += sends
            connections.work += sends
            if frames and connections.work < end:
                serial, body = frames.popleft()
                connections.work += REQUEST_WORK + (len(body) >> 8)
                self.receive(serial, body)

    def receive(self, serial: int, body: bytes) -> None:
        broker, sends = self._broker, self._sends
        broker.requests += 1
        try:
            request = decode_request(serial, body)
        except RemoteProtocolError as error:
            self.put(serial, encode_error(exceptions.EXCEPTION, error.what, fatal=True))
            return
        found = broker.engine.send_of(request, body)
        if found is None:
            self._answer(request)
            return
        send, data = found
        if send.timeout != sends.timeout:
            self.answer_collected()
            sends.timeout = send.timeout
        sends.add(serial, send, data)

    def _answer(self, request: Request) -> None:
        """Answer a request other than a send of one message."""
        broker, serial = self._broker, request.serial
        self.answer_collected()  # requests are answered in their order
        context = RequestContext(broker.clock(), self.peer, self, serial)
        answer = broker.engine.receive(request, context, self.arrived_ms)
        if answer is None:
            return
        if answer.wait:
            broker.commits.wait(self, [serial], request.method, [answer.body], self._expires_ms(request.timeout))
        else:
            self.put_parts(serial, answer.parts, one_block=answer.one_block)

    def _expires_ms(self, timeout: int | None) -> int:
        return self.arrived_ms + timeout if timeout else 0

    def answer_collected(self) -> None:
        runs = self._sends.drain()
        if not runs:
            return
        broker = self._broker
        engine, expires_ms = broker.engine, self._expires_ms(self._sends.timeout)
        context = RequestContext(broker.clock(), self.peer, self)
        for run in runs:
            if expires_ms and context.now_ms > expires_ms:
                engine.dropped_late += len(run.serials)
                continue
            bodies, wait = engine.receive_sends(run.sends, run.datas, context)
            if wait:
                broker.commits.wait(self, run.serials, MethodId.SEND_MESSAGE, bodies, expires_ms)
            else:
                self.put_all(run.serials, bodies)

    def on_turn_end(self) -> None:
        broker = self._broker
        broker.bytes_out += self.bytes_out
        self.bytes_out = 0
        broker.commits.changed()
        broker.arm()


def _close_unused(opening: asyncio.Future[OpenedLogs]) -> None:
    """Close what was opened for a broker whose start was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().storage.close(clean=True)
