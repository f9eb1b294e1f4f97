"""The broker: connections, the timer, the commits, and its membership at a master.

A send is answered when the commit that holds it returned (durability "durable": after fsync). Everything one loop turn
brought shares a commit, and what comes while a commit runs shares the next one. After a failed commit nothing is
acknowledged any more: sends and commits of positions are answered 503 with the reason, reads go on.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import ConfigError, PenstockError, StorageError
from penstock.runtime.addresses import parse_address
from penstock.runtime.clock import steady_clock
from penstock.runtime.committer import GroupCommitter
from penstock.runtime.durability import Durability
from penstock.runtime.logs import error_fields
from penstock.tube.admin import broker as broker_admin
from penstock.tube.broker_connection import BrokerConnection
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import encode_response
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import DEFAULT_BROKER_TLS_PORT, TopicConfig
from penstock.tube.engine.access import Access
from penstock.tube.engine.broker import AppendResult, BrokerEngine
from penstock.tube.engine.flow import parse_rules
from penstock.tube.engine.membership import BrokerConfig, Membership, Orders
from penstock.tube.engine.offsets import GroupOffsets
from penstock.tube.engine.publishing import Publication
from penstock.tube.engine.staging import StagingLimits
from penstock.tube.engine.topics import Topics
from penstock.tube.listeners import Listeners
from penstock.tube.member import Member
from penstock.tube.rpc import Peers
from penstock.tube.storage.disk import Commit, Disk
from penstock.tube.storage.files import Files
from penstock.tube.storage.meta import GroupOffset
from penstock.tube.storage.store import Store, StoreLimits, Work
from penstock.tube.upkeep import DurabilityOf, Opened, Upkeep, open_logs

__all__ = ["AppendDone", "AppendResult", "TubeBroker"]

_log = logging.getLogger("penstock.tube.broker")

AppendDone = Callable[["AppendResult | PenstockError"], None]

_RETENTION_S = 60.0


class _Waiting:
    """What leaves, or is told, when the commit of this turn returned."""

    __slots__ = ("appended", "futures", "replies")

    def __init__(self) -> None:
        # (connection, serial, method, body, expires at or 0)
        self.replies: list[tuple[BrokerConnection, int, int, bytes, int]] = []
        self.appended: list[tuple[AppendDone, AppendResult]] = []
        self.futures: list[asyncio.Future[None]] = []


class TubeBroker:
    """One broker over one data directory. All methods are called in the loop that `start` ran in.

    ``masters``: ``host:port`` texts; empty = a broker by itself, its topics come from `create_topic` only.
    ``advertise``: ``host:port`` that clients shall use, where it differs from the address that is bound.
    ``web_address``: ``host:port`` of its administration, which the master tells who asks.
    ``access``: users that clients have to be; ``master_user``: name and password with which the broker itself signs.
    ``master_tls``: how it reaches the masters, whose TLS ports ``masters`` then names; None: without TLS.
    ``topic_durability`` overrides ``durability`` for single topics. ``staging``: bounds of what tasks stage.
    """

    def __init__(
        self,
        data_dir: Path,
        durability: Durability = Durability.DURABLE,
        broker_id: int = 1,
        masters: Sequence[str] = (),
        advertise: str | None = None,
        *,
        topic_durability: Mapping[str, Durability] | None = None,
        limits: StoreLimits | None = None,
        max_store_bytes: int | None = None,
        staging: StagingLimits | None = None,
        session_ms: int = 30_000,
        heartbeat_s: float = 0.5,
        web_address: str | None = None,
        access: Access | None = None,
        master_user: tuple[str, str] | None = None,
        master_tls: ssl.SSLContext | None = None,
        files: Files | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.broker_id = broker_id
        self.durability = durability
        self.failure: StorageError | None = None
        self.on_failure: Callable[[StorageError], None] | None = None
        self.clock = clock if clock is not None else steady_clock()
        self.peers = Peers(f"broker {broker_id}")
        self.bytes_in = 0
        self.bytes_out = 0
        self.requests = 0
        self._directory = data_dir / "tube" / f"broker-{broker_id}"
        self._masters = [parse_address(text) for text in masters]
        self._advertise = advertise
        self._topic_durability = dict(topic_durability or {})
        self._limits = limits
        self._max_store_bytes = max_store_bytes
        self._staging_limits = staging if staging is not None else StagingLimits()
        self._session_ms = session_ms
        self._heartbeat_s = heartbeat_s
        self._web_address = web_address
        self._access = access
        self._master_user = master_user
        self._master_tls = master_tls
        self._files = files
        self._disk: Disk | None = None
        self._engine: BrokerEngine | None = None
        self._committer: GroupCommitter[Commit] | None = None
        self._listeners = Listeners(lambda: BrokerConnection(self))
        self._member: Member | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = _Waiting()
        self._next = Commit()
        self._snapshot_due = False
        self._upkeep: Upkeep | None = None
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._retention_timer: asyncio.TimerHandle | None = None

    @property
    def engine(self) -> BrokerEngine:
        """The state behind the connections; for administration and tests."""
        assert self._engine is not None, "start() comes first"
        return self._engine

    @property
    def disk(self) -> Disk:
        """The stores; for administration and tests."""
        assert self._disk is not None, "start() comes first"
        return self._disk

    @property
    def tls_bound(self) -> tuple[str, int] | None:
        """Where the broker listens with TLS; None if it does not."""
        return self._listeners.tls_bound

    @property
    def upkeep(self) -> Upkeep:
        """The periodic work; for administration and tests."""
        assert self._upkeep is not None, "start() comes first"
        return self._upkeep

    @property
    def registered(self) -> asyncio.Event | None:
        """Set once a master took this broker; None without masters."""
        return self._member.registered if self._member else None

    @property
    def stats(self) -> dict[str, int]:
        """Counters and gauges as plain integers."""
        engine, committer, disk = self.engine, self._committer, self.disk
        stores = list(disk.stores.values())
        return {
            "connections": len(self.peers.open),
            "refused_connections": self.peers.refused,
            "requests": self.requests,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "produced_messages": engine.sending.messages,
            "produced_bytes": engine.sending.bytes,
            "produced_duplicates": engine.sending.duplicates,
            "fetched_messages": engine.reading.messages,
            "gets": engine.gets,
            "waiting_gets": engine.reading.parked,
            **self.upkeep.staged_stats(),
            "refused": engine.refused,
            "dropped_late": engine.dropped_late,
            "registrations": engine.registrations,
            "topics": len(engine.topics.by_name),
            "stores": len(stores),
            "stored_bytes": sum(store.data_end - store.min_data_offset for store in stores),
            "unwritten_bytes": sum(store.unwritten_bytes for store in stores),
            "damaged_reads": sum(store.damaged_reads for store in stores),
            "recovered_torn_bytes": disk.recovery.torn_bytes,
            "recovered_losses": sum(len(store.recovery.losses) for store in stores),
            "commits": committer.commits if committer else 0,
            "failed": int(self.failure is not None),
        }

    async def start(
        self, host: str, port: int, *, tls: ssl.SSLContext | None = None, tls_port: int | None = None
    ) -> tuple[str, int]:
        """Recover, listen, register; the bound address. Port 0 takes a free one.

        With ``tls`` the broker listens on ``tls_port`` (default 8124) of ``host`` as well, see `tls_bound`.

        Raises:
            StorageError: the directory is in use or cannot be read. OSError: the address cannot be listened on.
        """
        loop = self._loop = asyncio.get_running_loop()
        durability = DurabilityOf(self.durability, self._topic_durability)
        opened = await loop.run_in_executor(None, lambda: self._open(durability))
        self._disk = opened.disk
        try:
            stored = ((item.group, item.topic, item.partition, item.offset) for item in self._disk.meta.offsets())
            offsets = GroupOffsets(((g, t, p), o) for g, t, p, o in stored if o is not None)
            last_time = max((store.last_time for store in self._disk.stores.values()), default=0)
            self._engine = BrokerEngine(
                Topics(self._store),
                offsets,
                session_ms=self._session_ms,
                last_time=last_time,
                staging=opened.staging,
            )
            self._engine.access = self._access
            config = self._stored_config()
            self._upkeep = Upkeep(self._disk, self._engine, self.broker_id, self._max_store_bytes)
            for topic, rows in opened.producers:
                known = [row for row in rows if self._engine.transactions.restored(row[1])]
                self._engine.sending.producers.restore(topic, known)
            self._engine.sending.producers.changed.clear()
            self._report_recovery(self._disk)
            tls_place = DEFAULT_BROKER_TLS_PORT if tls_port is None else tls_port
            bound = await self._listeners.start(host, port, tls, tls_place)
        except BaseException:
            self._disk.close(clean=True)
            self._disk = None
            raise
        self._committer = GroupCommitter(self._disk.commit, name=f"tube-{self.broker_id}", on_failure=self._failed)
        self._committer.start()
        self._retention_timer = loop.call_later(_RETENTION_S, self._retain)
        self.schedule()  # what was being published when an earlier process ended goes on
        for key, offset, end in self.upkeep.reset_beyond_end(offsets):
            text = f"group {key[0]} stood at offset {offset} of partition {key[2]} of {key[1]}, the log ends at {end}"
            self._lost(text)
        if self._masters:
            address = self._advertise or f"{bound[0]}:{bound[1]}"
            bound_tls = self.tls_bound
            membership = Membership(
                self.broker_id,
                address,
                f"penstock-{penstock.__version__}",
                config,
                tls_port=None if bound_tls is None else bound_tls[1],
                web_address=self._web_address,
            )
            self._member = Member(
                membership,
                self._masters,
                self._obey,
                self._status,
                heartbeat_s=self._heartbeat_s,
                user=self._master_user,
                tls=self._master_tls,
            )
            self._member.start()
        return bound

    async def close(self) -> None:
        """Leave the cluster, answer what was received, sync and close. Twice is harmless."""
        if self._disk is None or self._committer is None:
            return
        if self._member is not None:
            await self._member.close()
        self._listeners.stop()
        for timer in (self._timer, self._retention_timer):
            if timer is not None:
                timer.cancel()
        for connection in self.peers.open:
            connection.stop()
        if self._engine is not None and self._engine.sending.producers.changed and self.failure is None:
            self._snapshot_due = self._scheduled = True
        if self._scheduled:
            self._flush()
        await self._committer.close()
        for connection in list(self.peers.open):
            connection.close()
        await self._listeners.closed()
        disk, self._disk, self._committer = self._disk, None, None
        clean = self.failure is None
        await asyncio.get_running_loop().run_in_executor(None, lambda: disk.close(clean=clean))

    def append(
        self, topic: str, partition: int | None, data: bytes, flag: int, msg_type: str | None, done: AppendDone
    ) -> None:
        """Store a message from inside the node; ``done`` gets the result after its commit, or the error.

        ``done`` never runs before this returns. ``partition`` None: the topic's partitions here in turn.
        """
        assert self._loop is not None, "start() comes first"
        engine = self.engine
        try:
            result = engine.append(topic, partition, data, flag, msg_type, self.clock())
        except PenstockError as error:
            self._loop.call_soon(done, error)
            return
        if self.durability_of(topic) is Durability.MEMORY:
            self._loop.call_soon(done, result)
        else:
            self._waiting.appended.append((done, result))
        self.schedule()

    def append_run(
        self,
        topic: str,
        partition: int,
        messages: Sequence[tuple[bytes, int, str | None]],
        done: Callable[[int, PenstockError | None], None],
    ) -> None:
        """Store messages (data, flag, type) that must stay in order: the first that is refused ends the run.

        ``done`` gets, after their commit, how many of the first were stored, and the error that stopped the rest; after
        an error of the log itself 0, and what was stored is not known. It never runs before this returns.
        """
        assert self._loop is not None, "start() comes first"
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

            self._waiting.appended.append((committed, result))
        if stored:
            self.schedule()

    def newest(self, topic: str, partition: int) -> tuple[bytes, int] | None:
        """Data and flag of the last durable message of a partition; None where there is none."""
        topics = self.engine.topics
        served = topics.by_name.get(topic)
        if served is None or not served.has(partition):
            return None
        store = topics.store(served, partition)
        assert isinstance(store, Store)
        _, count = store.plan(partition, store.min_offset, None, 1 << 62)
        if not count:
            return None
        start, _ = store.plan(partition, store.min_offset, None, count - 1)
        found = store.read(partition, start, max_messages=1)
        if not found.messages:
            raise StorageError(
                f"tube: the last message of topic {topic!r}, partition {partition}, cannot be read",
                path=str(store.directory),
                do="run penstock tube fsck on the data directory",
            )
        (message,) = pb.GetMessageResponseB2C.FromString(found.messages[0]).messages
        return message.payLoadData, message.flag

    async def committed(self) -> None:
        """Return when all that was changed until now is durable. Raises StorageError when it cannot be made so."""
        assert self._loop is not None, "start() comes first"
        if self.failure is not None:
            raise self.failure
        if self._committer is None:
            raise StorageError("tube: the broker is closed")
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.futures.append(future)
        self.schedule()
        await future

    async def webapi(self, params: Mapping[str, str]) -> dict[str, Any]:
        """Answer a request to ``/broker.htm``; changes are durable when this returns."""
        desk = broker_admin.Desk(self.engine, self.broker_id, lambda: self.stats, self.clock())
        answer, changed = broker_admin.handle(desk, params)
        if changed:
            try:
                await self.committed()
            except StorageError as error:
                return {"result": False, "errCode": 500, "errMsg": error.what}
        return answer

    def create_topic(self, name: str, partitions: int = 3, stores: int = 1) -> None:
        """Serve a topic that no master announced (a broker by itself, and tests)."""
        config = TopicConfig(name, partitions=partitions, stores=stores)
        self.engine.topics.apply(self.engine.topics.default, [config])
        self.schedule()

    def poke(self) -> None:
        """Heartbeat to the master now, for example because a topic was created there."""
        if self._member is not None:
            self._member.poke()

    def durability_of(self, topic: str) -> Durability:
        """What an acknowledgement of a message of ``topic`` means."""
        return self._topic_durability.get(topic, self.durability)

    # Opening

    def _open(self, durability: DurabilityOf) -> Opened:
        return open_logs(
            self._directory,
            durability,
            files=self._files,
            limits=self._limits,
            staging_limits=self._staging_limits,
            on_loss=self._lost,
        )

    def _store(self, topic: str, number: int) -> Store:
        store = self.disk.open_store(topic, number)
        store.immediate = self.durability_of(topic) is Durability.MEMORY
        return store

    def _stored_config(self) -> BrokerConfig:
        data = self.disk.meta.config()
        if data is None:
            return BrokerConfig()
        config = BrokerConfig.from_json(data)
        self.engine.topics.apply(*config.parsed())
        return config

    def _report_recovery(self, disk: Disk) -> None:
        found = disk.recovery
        fields = {"broker_id": self.broker_id, "records": found.records, "torn_bytes": found.torn_bytes}
        _log.info("tube log opened", extra={"fields": {**fields, "rebuilt_indexes": found.rebuilt_indexes}})
        for text in disk.meta.damaged:
            self._lost(text)

    def _lost(self, what: object) -> None:
        _log.error("tube data lost", extra={"fields": {"broker_id": self.broker_id, "what": str(what)}})

    # Commits

    def wait(self, connection: BrokerConnection, serial: int, method: int, body: bytes, expires_ms: int) -> None:
        """Send ``body`` after the commit of this loop turn."""
        self._waiting.replies.append((connection, serial, method, body, expires_ms))
        self.schedule()

    def schedule(self) -> None:
        """Commit at the end of this loop turn what it changed."""
        if not self._scheduled:
            self._scheduled = True
            assert self._loop is not None
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._committer is None:
            return
        engine = self.engine
        commit, self._next = self._next, Commit()
        if self.failure is None:
            self._publish()
        decided = self.upkeep.take_staged(commit)
        if engine.sending.producers.changed:
            self.upkeep.note_producers(commit)
        works: list[tuple[Store, Work]] = []
        # A dict keeps the order of first use, so the same run writes the same way again.
        for store in engine.dirty_stores:
            assert isinstance(store, Store)
            works.append((store, store.take()))
        engine.dirty_stores.clear()
        commit.works += [(store, work, self._must_sync(store)) for store, work in works]
        if self._snapshot_due:
            self._snapshot_due = False
            self.upkeep.snapshot_producers(commit, self.clock())
        now = self.clock()
        engine.readable([store for store, _ in works if store.immediate], now)
        commit.offsets = [GroupOffset(*key, offset, now) for key, offset in engine.offsets.take_dirty()]
        waiting, self._waiting = self._waiting, _Waiting()
        self._answer_committed(waiting)
        touched: dict[BrokerConnection, None] = {}
        self._answer_ready(touched)
        for connection in touched:
            connection.flush()
        try:
            self._committer.submit(commit, lambda error: self._committed(works, waiting, error, commit, decided))
        except StorageError as error:  # closing: what came too late is told so
            self._committed(works, waiting, error, commit, decided)

    def _publish(self) -> None:
        try:
            self.engine.transactions.publish(self.clock())
        except OSError as error:
            # Decided, and not to be read: nothing may come behind it; a restart carries it out.
            what = f"tube: staged rows cannot be read: {error.strerror}"
            self._failed(StorageError(what, path=str(error.filename or self._directory)))

    def _must_sync(self, store: Store) -> bool:
        topic = store.directory.name.rpartition("-")[0]
        return self.durability_of(topic) is Durability.DURABLE

    def _answer_committed(self, waiting: _Waiting) -> None:
        """Answers to commits of staged rows leave with the commit of their last rows."""
        transactions = self.engine.transactions
        for address, serial, body in transactions.answered:
            if isinstance(address, BrokerConnection):
                waiting.replies.append((address, serial, MethodId.SEND_MESSAGE, body, 0))
        transactions.answered.clear()
        publishing = transactions.publishing
        if publishing is not None and publishing.lost:
            for text in publishing.lost:
                self._lost(text)
            publishing.lost.clear()

    def _committed(
        self,
        works: list[tuple[Store, Work]],
        waiting: _Waiting,
        error: StorageError | None,
        commit: Commit,
        decided: list[Publication],
    ) -> None:
        if error is None:
            for store, work in works:
                store.written(work)
            self.upkeep.staged(commit, decided)
            if self.engine.transactions.dirty:
                self.schedule()
        now = self.clock()
        if error is None and works:
            self.engine.readable([store for store, _ in works], now)
        touched: dict[BrokerConnection, None] = {}
        self._answer_ready(touched)
        for connection, serial, method, body, expires_ms in waiting.replies:
            if expires_ms and now >= expires_ms:
                self.engine.dropped_late += 1
                continue
            answer = body if error is None else _unavailable(method, error)
            connection.put(serial, answer)
            touched[connection] = None
        for connection in touched:
            connection.flush()
            connection.turned()
        for done, result in waiting.appended:
            done(result if error is None else error)
        for future in waiting.futures:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _answer_ready(self, touched: dict[BrokerConnection, None]) -> None:
        """Collect the answers to gets that waited; the connections they are for go into ``touched``."""
        for address, serial, answer in self.engine.ready:
            assert isinstance(address, BrokerConnection)
            address.put(serial, answer.body)
            touched[address] = None
        self.engine.ready.clear()

    def _failed(self, error: StorageError) -> None:
        self.failure = self.engine.failure = error
        fields = {"broker_id": self.broker_id, **error_fields(error)}
        _log.error("tube broker stores nothing any more", extra={"fields": fields})
        if self.on_failure is not None:
            self.on_failure(error)
        self.poke()

    # Time

    def arm(self) -> None:
        """Make sure that the timer runs for the engine's next deadline."""
        deadline = self.engine.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(deadline - self.clock(), 0) / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.engine.tick(self.clock())
        touched: dict[BrokerConnection, None] = {}
        self._answer_ready(touched)
        for connection in touched:
            connection.flush()
            connection.turned()
        if self.engine.offsets.dirty:
            self.schedule()
        self.arm()

    def _retain(self) -> None:
        assert self._loop is not None
        self._retention_timer = self._loop.call_later(_RETENTION_S, self._retain)
        if self.failure is None:
            self.retain(self.clock())

    def retain(self, now_ms: int) -> None:
        """Let expired segments go, write the offset history, note what producers sent; called every minute."""
        wrote = self.upkeep.write_history(now_ms)
        if self.upkeep.let_staged_go(now_ms):
            self.schedule()
        if self.engine.sending.producers.changed:
            self._snapshot_due = True
        if self.upkeep.retain(self._next, now_ms) or wrote or self._snapshot_due:
            self.schedule()

    # Membership

    def _status(self) -> tuple[int, int]:
        engine = self.engine
        return int(engine.read_stopped), -1 if self.failure is not None else int(engine.write_stopped)

    def _obey(self, orders: Orders) -> None:
        engine = self.engine
        engine.read_stopped = orders.stop_read
        engine.write_stopped = orders.stop_write
        engine.add_tokens(orders.tokens)
        if orders.check_tokens is not None:
            engine.check_tokens = orders.check_tokens
        if orders.max_message_bytes is not None:
            engine.topics.cluster_bytes = orders.max_message_bytes
        if orders.flow_rules is not None:
            self._limit_readers(orders.flow_rules)
        if orders.config is not None:
            engine.topics.apply(*orders.config.parsed())
            self._next.config = orders.config.to_json()
            fields = {"broker_id": self.broker_id, "topics": len(orders.config.topics)}
            _log.info("tube broker configured", extra={"fields": fields})
            self.schedule()
        for name in orders.removed_topics:
            if name in engine.topics.by_name:
                self._remove_topic(name)

    def _limit_readers(self, text: str) -> None:
        try:
            self.engine.reading.rules = parse_rules(text)
        except ConfigError as error:
            _log.error("flow control rules are not in force", extra={"fields": {"error": error.what}})

    def _remove_topic(self, name: str) -> None:
        self.upkeep.forget(name, self._next)
        self.engine.remove_topic(name, self.clock())
        self._next.removed_topics.append((name, self.disk.forget(name)))
        self.schedule()
        _log.info("tube topic removed", extra={"fields": {"broker_id": self.broker_id, "topic": name}})


def _unavailable(method: int, error: StorageError) -> bytes:
    """The answer to a request whose commit failed: whether it reached the disk is unknown."""
    response = METHODS[method].response(success=False, errCode=ErrCode.SERVICE_UNAVAILABLE, errMsg=error.what)
    return encode_response(method, response.SerializeToString())
