"""Bugs that the simulation must find, planted one at a time: ``python -m tests.simulation.mutations`` prints a table.

Modules of the compiled core cannot be patched, so the bugs in ``ENGINE`` exist in the interpreted form only.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from penstock import compiled
from penstock.console.mqtt import MqttViews
from penstock.errors import StorageError
from penstock.mqtt import storage as mqtt_storage
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.broker import Broker
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.inflight import Inflight
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.message_queue import MessageQueue
from penstock.mqtt.engine.sessions.retained import Retained
from penstock.mqtt.engine.sessions.session_manager import SessionManager
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.link import ServerLink
from penstock.node.rules import RuleService
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import PUT, RowChanges
from penstock.runtime.observability.metrics import Metrics
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.engine import requests, store
from penstock.statestore.engine.quotas import Quotas
from penstock.statestore.hlc import Hlc, StoreClock
from penstock.statestore.service.storage import Storage
from penstock.tube.broker import maintenance
from penstock.tube.broker.commits import Commits
from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.broker.group_offsets import GroupOffsets
from penstock.tube.engine.broker.registrations import Registrations
from penstock.tube.master.master import TubeMaster
from tests.simulation import node
from tests.simulation.history import Violation
from tests.simulation.node import SimulatedCommitQueue, SimulatedLog, SimulatedNode
from tests.simulation.run import simulate
from tests.unit.runtime.recorded_disk import MemoryFile

__all__ = ["ANY_FORM", "ENGINE", "FOUND_BY", "HTTP", "LOG", "MOST_SEEDS", "seeds_needed"]

MOST_SEEDS = 20
FOUND_BY = {
    "lost_wake_up": 8,
    "expiry_by_wall_clock": 6,
    "lost_fence": 8,
    "captured_early": 1,
    "lost_subscription": 1,
    "client_not_listed": 1,
    "message_expired_early": 18,
    "administered_early": 10,
    "always_ready": 16,
    "sent_before_commit": 3,
    "sequences_forgotten": 2,
    "quota_not_checked": 4,
    "queue_not_bounded": 4,
    "retained_not_bounded": 4,
}
"""The first seed that finds a bug which many seeds miss. The tests try it before the others; if it has become wrong,
they take longer."""
Plant = Callable[[pytest.MonkeyPatch], None]


# In storage, logs and clocks: in either form of the core


def answered_early(patch: pytest.MonkeyPatch) -> None:
    """The state store answers before its commit."""

    class LateStorage(Storage):
        def commit(self, *args: Any, **options: Any) -> None:
            asyncio.get_running_loop().call_later(0.02, self.commit_now, args, options)

        def commit_now(self, args: Any, options: Any) -> None:
            with suppress(StorageError):  # a full or failed disk, which is not the bug
                super().commit(*args, **options)

    patch.setattr(node, "Storage", LateStorage)


def acknowledged_early(patch: pytest.MonkeyPatch) -> None:
    """The broker acknowledges before its commit."""
    commit = mqtt_storage.SessionStore.commit

    def later(self: mqtt_storage.SessionStore, batch: Any) -> None:
        def commit_now() -> None:
            with suppress(StorageError):
                commit(self, batch)

        asyncio.get_running_loop().call_later(0.02, commit_now)

    patch.setattr(mqtt_storage.SessionStore, "commit", later)


def without_fsync(patch: pytest.MonkeyPatch) -> None:
    """Files are written and not synced."""
    patch.setattr(MemoryFile, "sync", lambda _self: None)


def recovered_in_part(patch: pytest.MonkeyPatch) -> None:
    """Recovery leaves out every other row."""
    write = LoggedEnvironment._write

    def in_part(self: LoggedEnvironment, transaction: Any, changes: RowChanges) -> None:
        if self._follower is None:  # it recovers
            for table, rows in changes.tables.items():
                changes.tables[table] = dict(list(rows.items())[1::2])
        write(self, transaction, changes)

    patch.setattr(SimulatedLog, "_write", in_part)


def log_released_early(patch: pytest.MonkeyPatch) -> None:
    """Frames that LMDB does not contain are taken for applied."""
    patch.setattr(SimulatedLog, "_write", lambda *_args: None)


def frame_applied_twice(patch: pytest.MonkeyPatch) -> None:
    """Changes are applied to LMDB once more after the next ones."""
    write = LoggedEnvironment._write
    earlier: dict[int, RowChanges] = {}

    def twice(self: LoggedEnvironment, transaction: Any, changes: RowChanges) -> None:
        write(self, transaction, changes)
        write(self, transaction, earlier.get(id(self), RowChanges()))
        earlier[id(self)] = changes

    patch.setattr(SimulatedLog, "_write", twice)


def first_operation_wins(patch: pytest.MonkeyPatch) -> None:
    """Of several changes of a row the first one is applied, not the last."""
    write = LoggedEnvironment._write
    first: dict[tuple[int, int, bytes], bytes | None] = {}

    def write_first(self: LoggedEnvironment, transaction: Any, changes: RowChanges) -> None:
        for table, rows in changes.tables.items():
            for key, value in rows.items():
                rows[key] = first.setdefault((id(self), table, key), value)
        write(self, transaction, changes)

    patch.setattr(SimulatedLog, "_write", write_first)


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    """A commit that found no disk space is not tried again."""
    patch.setattr(SimulatedCommitQueue, "_try_again", lambda *_args: None, raising=False)


def key_expired_early(patch: pytest.MonkeyPatch) -> None:
    """The clock of expiry runs at twice the speed."""
    patch.setattr(SimulatedNode, "steady_ms", lambda self: 2 * self.machine.steady_ms())


def expiry_by_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """The clock of expiry jumps with the wall clock."""
    patch.setattr(SimulatedNode, "steady_ms", lambda self: self.machine.wall_ns() // 1_000_000)


def lost_fence(patch: pytest.MonkeyPatch) -> None:
    """Fencing tokens are not stored with their keys."""

    class WithoutFences(Storage):
        def commit(self, changes: Any, **options: Any) -> None:
            fenced = [(change.record, change.record.fence) for change in changes if change.record is not None]
            for record, _ in fenced:
                record.fence = None
            try:
                super().commit(changes, **options)
            finally:
                for record, fence in fenced:
                    record.fence = fence

    patch.setattr(node, "Storage", WithoutFences)


def message_expired_early(patch: pytest.MonkeyPatch) -> None:
    """Stored messages are ten minutes older than they are."""
    encode = mqtt_storage._message
    patch.setattr(mqtt_storage, "_message", lambda message, offset: encode(message, offset - 600_000))


def _rows(patch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Change the operations on a table of the broker; None: they are lost."""
    operations = mqtt_storage._operations
    index = mqtt_storage.TABLES.index(name)

    def changed(batch: Any) -> list[Any]:
        rows = [change(row) if row[1] == index else row for row in operations(batch)]
        return [row for row in rows if row is not None]

    patch.setattr(mqtt_storage, "_operations", changed)


def lost_retained(patch: pytest.MonkeyPatch) -> None:
    """Retained messages are not stored."""
    _rows(patch, "retained", lambda _row: None)


def lost_subscription(patch: pytest.MonkeyPatch) -> None:
    """Subscriptions are not stored."""
    _rows(patch, "subscriptions", lambda _row: None)


def lost_identifier(patch: pytest.MonkeyPatch) -> None:
    """Identifiers of received QoS 2 messages are not stored."""
    _rows(patch, "incoming", lambda _row: None)


def lost_release(patch: pytest.MonkeyPatch) -> None:
    """That a QoS 2 message was released is not stored: it is sent again."""
    _rows(patch, "progress", lambda _row: None)
    delete = mqtt_storage.TABLES.index("deliveries")
    operations = mqtt_storage._operations
    patch.setattr(
        mqtt_storage,
        "_operations",
        lambda batch: [row for row in operations(batch) if row[1] != delete or row[0] == PUT],
    )


def session_stored_late(patch: pytest.MonkeyPatch) -> None:
    """Sessions are stored some commits after the one that their CONNACK waits for."""
    operations = mqtt_storage._operations
    open_store = mqtt_storage.SessionStore.open
    index = mqtt_storage.TABLES.index("sessions")
    held: deque[list[Any]] = deque()

    def opened(self: mqtt_storage.SessionStore, wall_offset: int) -> Any:
        held.clear()  # a node that was killed has forgotten them
        return open_store(self, wall_offset)

    def late(batch: Any) -> list[Any]:
        rows = operations(batch)
        held.append([row for row in rows if row[1] == index])
        due = held.popleft() if len(held) > 20 else []
        return [row for row in rows if row[1] != index] + due

    patch.setattr(mqtt_storage, "_operations", late)
    patch.setattr(mqtt_storage.SessionStore, "open", opened)


def deliveries_swapped(patch: pytest.MonkeyPatch) -> None:
    """Stored messages change places with others near to them."""

    def swapped(row: Any) -> Any:
        return row[0], row[1], row[2][:-1] + bytes((row[2][-1] ^ 31,)), row[3]

    _rows(patch, "deliveries", swapped)
    _rows(patch, "progress", swapped)


def lost_will(patch: pytest.MonkeyPatch) -> None:
    """Wills are not stored with their sessions."""
    encode = mqtt_storage.encode_session
    patch.setattr(mqtt_storage, "encode_session", lambda row, offset: encode(row._replace(will=None), offset))


def log_without_fsync(patch: pytest.MonkeyPatch) -> None:
    """Segments of the log are written and not synced."""
    sync = MemoryFile.sync

    def not_of_segments(self: MemoryFile) -> None:
        if self._path.suffix != ".tube":
            sync(self)

    patch.setattr(MemoryFile, "sync", not_of_segments)


def sent_before_commit(patch: pytest.MonkeyPatch) -> None:
    """Sends to the log are acknowledged before their commit."""

    def at_once(self: Commits, connection: Any, serials: Any, method: int, bodies: Any, _expires: int) -> None:
        connection.put_all(serials, bodies)
        asyncio.get_running_loop().call_soon(connection.flush)
        if method != MethodId.SEND_MESSAGE:
            self._offsets_due = True
        self.schedule()

    patch.setattr(Commits, "wait", at_once)


def offset_confirmed_early(patch: pytest.MonkeyPatch) -> None:
    """The offset of a group moves when messages are delivered."""
    end_get = GroupOffsets.end_get

    def confirm(self: GroupOffsets, key: Any, size: int, **options: Any) -> None:
        end_get(self, key, size, **options)
        self.commit(key, consumed=True)

    patch.setattr(GroupOffsets, "end_get", confirm)


def offsets_not_stored(patch: pytest.MonkeyPatch) -> None:
    """Confirmed offsets of groups are not stored."""
    patch.setattr(GroupOffsets, "take_dirty", lambda self: self.dirty.clear() or [])


def partition_owned_twice(patch: pytest.MonkeyPatch) -> None:
    """A broker lets two members of a group read a partition."""
    patch.setattr(Registrations, "_occupied", lambda *_args: None)


def sequences_forgotten(patch: pytest.MonkeyPatch) -> None:
    """After a restart the broker does not know which numbered messages it has stored."""
    patch.setattr(maintenance, "read_sequences", lambda *_args: [])


def captured_early(patch: pytest.MonkeyPatch) -> None:
    """Rules acknowledge a message before the log has it."""
    submit = RuleService._submit

    def settle(self: RuleService, item: Any) -> None:
        settle_message = item.message.settle
        settle_message()
        submit(self, item)

    patch.setattr(RuleService, "_submit", settle)


def captured_twice(patch: pytest.MonkeyPatch) -> None:
    """Rules append every tenth message twice."""
    submit = RuleService._submit

    def twice(self: RuleService, item: Any) -> None:
        submit(self, item)
        if item.number % 10 == 0:
            self._target.append(item.prepared, lambda _result: None)

    patch.setattr(RuleService, "_submit", twice)


# In the engines: interpreted only


def will_without_delay(patch: pytest.MonkeyPatch) -> None:
    """Wills are published when their connection ends."""
    ended = SessionManager.connection_ended

    def at_once(self: SessionManager, connection: Any, now: int) -> None:
        if connection.session is not None and connection.session.will is not None:
            connection.session.will.properties.will_delay_interval = None
        ended(self, connection, now)

    patch.setattr(SessionManager, "connection_ended", at_once)


def session_expired_early(patch: pytest.MonkeyPatch) -> None:
    """A session expires after a thousandth of its interval."""
    ended = SessionManager.connection_ended

    def early(self: SessionManager, connection: Any, now: int) -> None:
        session = connection.session
        ended(self, connection, now)
        if session is not None and session.ends_at:
            session.ends_at = now + session.expiry_s
            self.broker.timers.arm(session, session.ends_at)

    patch.setattr(SessionManager, "connection_ended", early)


def identifier_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A session that is resumed forgets the identifiers of received QoS 2 messages."""
    resume = SessionManager.resume_or_create

    def forgetful(self: SessionManager, *args: Any, **options: Any) -> Any:
        session, existed = resume(self, *args, **options)
        session.incoming.clear()
        return session, existed

    patch.setattr(SessionManager, "resume_or_create", forgetful)


def sent_again_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """Messages in flight are sent again in reverse."""
    values = Inflight.values
    patch.setattr(Inflight, "values", lambda self: values(self)[::-1])


def retained_kept(patch: pytest.MonkeyPatch) -> None:
    """A retained message is not replaced by the next one."""
    store = Retained.store

    def first(self: Any, topic: str, message: Any, *args: Any) -> bool:
        return bool(message.payload and self.get(topic) is not None) or store(self, topic, message, *args)

    patch.setattr(Retained, "store", first)


def fence_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A lower fencing token is accepted."""
    check = requests.fence_error

    def unless_lower(*args: Any) -> StoreError | None:
        error = check(*args)
        return None if error is StoreError.FENCE_LOWER else error

    patch.setattr(store, "fence_error", unless_lower)


def handled_twice(patch: pytest.MonkeyPatch) -> None:
    """Bytes that wait for another share of a loop turn are handled twice."""
    receive = ServerLink.receive_early
    patch.setattr(ServerLink, "receive_early", lambda self, data: receive(self, data + data))


def whole_read_at_once(patch: pytest.MonkeyPatch) -> None:
    """A connection handles all that it has received in one turn."""
    receive = BrokerConnection.receive

    def all_of_it(self: BrokerConnection, data: bytes, now: int, wall_ms: int) -> None:
        receive(self, data, now, wall_ms)
        while self.unread:
            self.proceed(now, wall_ms)

    patch.setattr(BrokerConnection, "receive", all_of_it)


def share_without_debt(patch: pytest.MonkeyPatch) -> None:
    """Connections that wait for another share get all of them in one turn."""
    take_turn = MqttServer._take_turn

    def all_of_them(self: MqttServer, link: ServerLink) -> bool:
        while take_turn(self, link):
            pass
        return False

    patch.setattr(MqttServer, "_take_turn", all_of_them)


def version_compared_wrongly(patch: pytest.MonkeyPatch) -> None:
    """A version is the time, also if the last one is not older."""

    def next_version(self: StoreClock, now_ms: int, *_seen: int) -> Hlc:
        self.wall_ms, self.counter = now_ms, 1
        return Hlc(now_ms, 1, self.node)

    patch.setattr(StoreClock, "next", next_version)


def quota_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The state store sets keys beyond its quota."""
    patch.setattr(Quotas, "are_exceeded", lambda *_args: False)


def queue_not_bounded(patch: pytest.MonkeyPatch) -> None:
    """The queue of a session has no limit of messages."""
    init = MessageQueue.__init__

    def unbounded(self: MessageQueue, limits: BrokerLimits, *args: Any) -> None:
        init(self, replace(limits, max_queued_messages=1_000_000), *args)

    patch.setattr(MessageQueue, "__init__", unbounded)


def retained_not_bounded(patch: pytest.MonkeyPatch) -> None:
    """There is always room for another retained message."""
    patch.setattr(Retained, "_has_room", lambda *_args: True)


# In HTTP, the console and the master: in either form


def administered_early(patch: pytest.MonkeyPatch) -> None:
    """Changes of topics are answered, and shown, before their commit."""

    async def at_once(self: TubeMaster, settings: Any) -> None:
        for setting in settings:
            self.engine.stored(setting, self._clock())

        async def store() -> None:
            await asyncio.sleep(0.05)
            await persist(self, settings)

        store_task = asyncio.ensure_future(store())
        tasks.append(store_task)

    tasks: list[Any] = []
    persist = TubeMaster._persist
    patch.setattr(TubeMaster, "_persist", at_once)


def client_not_listed(patch: pytest.MonkeyPatch) -> None:
    """A page of clients leaves out the first one after the cursor."""
    page = MqttViews.clients

    async def shorter(self: MqttViews, query: Any, state: str) -> Any:
        found = await page(self, query, state)
        return replace(found, rows=found.rows[1:]) if query.after is not None else found

    patch.setattr(MqttViews, "clients", shorter)


def not_disconnected(patch: pytest.MonkeyPatch) -> None:
    """An administrator's request does not end the connection of a client."""
    disconnect = Broker.disconnect

    def unless_asked(self: Broker, client_id: str, reason_code: int, *args: Any) -> None:
        if reason_code != ReasonCode.ADMINISTRATIVE_ACTION:
            disconnect(self, client_id, reason_code, *args)

    patch.setattr(Broker, "disconnect", unless_asked)


def always_ready(patch: pytest.MonkeyPatch) -> None:
    """``/readyz`` does not look at the parts of the node."""
    patch.setattr(SimulatedNode, "_problems", lambda _self: [])


def counter_falls(patch: pytest.MonkeyPatch) -> None:
    """A scrape resets the counters."""
    collect = Metrics.collect

    def once(self: Metrics) -> Any:
        families = list(collect(self))
        self._sources = [(name, dict, meanings, labels) for name, _, meanings, labels in self._sources]
        return families

    patch.setattr(Metrics, "collect", once)


ANY_FORM: list[Plant] = [
    answered_early,
    acknowledged_early,
    without_fsync,
    recovered_in_part,
    log_released_early,
    frame_applied_twice,
    first_operation_wins,
    lost_wake_up,
    key_expired_early,
    expiry_by_wall_clock,
    lost_fence,
    message_expired_early,
    lost_retained,
    lost_subscription,
    lost_identifier,
    lost_release,
    session_stored_late,
    deliveries_swapped,
    lost_will,
]
HTTP: list[Plant] = [administered_early, client_not_listed, always_ready, counter_falls]
"""In HTTP and administration, in either form."""
LOG: list[Plant] = [
    log_without_fsync,
    sent_before_commit,
    offset_confirmed_early,
    offsets_not_stored,
    partition_owned_twice,
    sequences_forgotten,
    captured_early,
    captured_twice,
]
"""In TubeMQ and rules, in either form."""


def end_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A connection whose client has ended its direction stays open if its end waits for a later turn."""
    patch.setattr(ServerLink, "_close_ended", lambda _self: None)


ENGINE: list[Plant] = [
    will_without_delay,
    session_expired_early,
    identifier_forgotten,
    sent_again_in_reverse,
    retained_kept,
    fence_not_checked,
    version_compared_wrongly,
    handled_twice,
    whole_read_at_once,
    share_without_debt,
    not_disconnected,
    end_forgotten,
    quota_not_checked,
    queue_not_bounded,
    retained_not_bounded,
]


def seeds_needed(plant: Plant, first: int = 0) -> tuple[int, str]:
    """The number of seeds until one finds the bug, and the rule that was broken; 0: none did. The order is ``first``,
    then all from 0 on."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for count, seed in enumerate([first, *(n for n in range(MOST_SEEDS) if n != first)], 1):
            try:
                simulate(seed)
            except Violation as violation:
                return count, str(violation)
    return 0, "not found"


def main() -> int:
    """Print the table."""
    plants = ANY_FORM + HTTP + LOG + (ENGINE if compiled.form() == "interpreted" else [])
    print("| planted bug | seeds | found by |\n| --- | --- | --- |")
    missed = 0
    for plant in plants:
        seeds, rule = seeds_needed(plant)
        missed += not seeds
        print(f"| {(plant.__doc__ or '').rstrip('.')} | {seeds or 'none'} | {rule[:140]} |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
