"""TubeMQ topics, partitions and consumer groups with their lag, as the broker of this node has them.

The lag of a group in a partition is the number of records after its committed offset, and the age of the oldest of
them. The lags of all groups are computed together, in shares of the event loop, and cached for some time, so that they
take at most a twentieth of the time regardless of the number of groups and requests.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from penstock.console.pages import MAX_LIMIT, Page, PageQuery, Pages
from penstock.console.payload_schemas import NO_SCHEMAS, PayloadSchemas
from penstock.console.records import RecordViews
from penstock.console.snapshots import (
    BrokerSnapshot,
    GroupDetail,
    GroupPartition,
    GroupSnapshot,
    MemberSnapshot,
    OffsetMove,
    OffsetReset,
    PartitionSnapshot,
    TopicDetail,
    TopicSnapshot,
)
from penstock.errors import LocalProtocolError, RefusedError
from penstock.tube.admin.brokers import all_brokers
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, PARTITIONS_PER_STORE, partition_ids, query_of_group
from penstock.tube.engine.broker.group_offsets import Key
from penstock.tube.engine.broker.topics import Topic as BrokerTopic
from penstock.tube.engine.interfaces import LogStore
from penstock.tube.engine.master.balance import Group as MasterGroup
from penstock.tube.engine.master.clients import ClientGroup
from penstock.tube.engine.master.settings import BrokerSetting
from penstock.tube.master.master import TubeMaster

__all__ = ["TubeViews"]

LAG_S: Final = 2.0
"""Minimum seconds for which computed lags are cached."""
LAG_SHARE: Final = 20
"""Computed lags are cached for at least this multiple of the time that computing them took."""
MAX_GROUPS: Final = 200
"""Maximum number of groups with metrics: each is a time series in Prometheus."""
SHARE_S: Final = 0.001
"""Time in seconds after which the computation pauses, so that other clients are served."""
SHIFT_RECORDS: Final = 1 << 16
"""Records of a store, of all its partitions, in which one step of a reset counts those of a partition."""
_SHIFT: Final = re.compile(r"[+-][0-9]{1,12}")
_EXACT: Final = re.compile(r"offset:([0-9]{1,18})")
_TIME: Final = re.compile(r"[0-9]{1,15}")


@dataclass
class _Lag:
    """The lag of a group (a sum), or the largest lag in a topic."""

    records: int = 0
    age_s: float = 0.0
    exact: bool = True
    partitions: int = 0
    topics: set[str] = field(default_factory=set)

    def add(self, topic: str, records: int, age_s: float, *, exact: bool) -> None:
        self.records += records
        self.age_s = max(self.age_s, age_s)
        self.exact = self.exact and exact
        self.partitions += 1
        self.topics.add(topic)


@dataclass
class _Lags:
    """Lags by group, and by topic and group, at one time."""

    until_s: float = 0.0
    groups: dict[str, _Lag] = field(default_factory=dict)
    topics: dict[str, dict[str, _Lag]] = field(default_factory=dict)
    offsets: dict[str, list[tuple[Key, int]]] = field(default_factory=dict)
    """Committed offsets by group."""


class TubeViews:
    """Views of ``broker`` and ``master``, both of this process; only :meth:`reset` changes state.

    ``rate``: records per second of a topic; None if it is not known. ``schemas``: those of the values of records.
    """

    def __init__(
        self,
        master: TubeMaster,
        broker: TubeBroker,
        pages: Pages,
        *,
        rate: Callable[[str], float | None] = lambda _: None,
        schemas: PayloadSchemas = NO_SCHEMAS,
    ) -> None:
        self._master = master
        self._broker = broker
        self._pages = pages
        self._rate = rate
        self._lags = _Lags()
        self.browser = RecordViews(broker, schemas)
        """Records of the topics."""

    def counted(self) -> dict[str, float]:
        """Return the number of records written to each topic since its creation, for rates."""
        return {
            name: sum(store.durable_end for store in topic.stores.values()) / INDEX_RECORD_BYTES
            for name, topic in self._broker.engine.topics.by_name.items()
        }

    async def total_lag(self) -> tuple[int, float, bool]:
        """Return the lag of all groups: records, age of the oldest in seconds, and whether it is exact."""
        groups = (await self._computed()).groups.values()
        return (
            sum(lag.records for lag in groups),
            max((lag.age_s for lag in groups), default=0.0),
            all(lag.exact for lag in groups),
        )

    async def refresh_lags(self) -> None:
        """Compute the lags of :meth:`lag_metrics` if they are older than some seconds."""
        await self._computed()

    def lag_metrics(self) -> Iterator[tuple[tuple[str], dict[str, int | float]]]:
        """Return the name of each group, and its last computed lag; of the :data:`MAX_GROUPS` with the largest lag."""
        groups = self._lags.groups
        for name in heapq.nlargest(MAX_GROUPS, groups, key=lambda name: (groups[name].records, name)):
            lag = groups[name]
            values = {"lag_records": lag.records, "lag_seconds": lag.age_s, "members": self._count(name)}
            yield (name,), values

    async def topics(self, query: PageQuery) -> Page[TopicSnapshot]:
        """Return a page of the topics of this broker, without the system topic."""
        lags = await self._computed()
        found = [topic for topic in self._broker.engine.topics.by_name.values() if topic.name != OFFSET_HISTORY_TOPIC]
        return await self._pages.page(
            found,
            query,
            columns={
                "topic": lambda topic: topic.name,
                "bytes": _bytes,
                "lag_records": lambda topic: _largest(lags.topics.get(topic.name, {})).records,
                "lag_s": lambda topic: _largest(lags.topics.get(topic.name, {})).age_s,
                "rate": lambda topic: self._rate(topic.name) or 0.0,
            },
            name=lambda topic: topic.name,
            row=lambda topic: self._topic(topic, lags),
        )

    async def topic(self, name: str) -> TopicDetail | None:
        """Return one topic with its partitions and groups; None if it is not on this broker."""
        lags = await self._computed()
        topic = self._broker.engine.topics.by_name.get(name)
        if topic is None:
            return None
        partitions = [self._partition(topic, number) for number in self._partitions(topic)[:MAX_LIMIT]]
        groups = sorted(lags.topics.get(name, {}))
        rows: list[GroupPartition] = []
        for group in groups:
            for key, offset in lags.offsets.get(group, ()):
                if key[1] == name and len(rows) < MAX_LIMIT:
                    rows.append(self._group_partition(key, offset))
            await self._pages.pause()
        return TopicDetail(self._topic(topic, lags), tuple(partitions), tuple(rows), tuple(groups))

    async def brokers(self, query: PageQuery) -> Page[BrokerSnapshot]:
        """Return a page of the brokers that the master knows, that of this node included."""
        return await self._pages.page(
            map(self._broker_row, all_brokers(self._master.engine).values()),
            query,
            columns={
                "broker": lambda row: row.broker,
                "state": lambda row: row.state,
                "topics": lambda row: row.topics,
            },
            name=lambda row: f"{row.broker} {row.address}",
            row=lambda row: row,
        )

    async def groups(self, query: PageQuery) -> Page[GroupSnapshot]:
        """Return a page of the groups that have members, or offsets at this broker."""
        lags = await self._computed()
        names = [*lags.groups, *(name for name in self._members() if name not in lags.groups)]
        return await self._pages.page(
            names,
            query,
            columns={
                "group": lambda name: name,
                "lag_records": lambda name: lags.groups.get(name, _NO_LAG).records,
                "lag_s": lambda name: lags.groups.get(name, _NO_LAG).age_s,
                "members": self._count,
            },
            name=lambda name: name,
            row=lambda name: self._group(name, lags),
        )

    async def group(self, name: str) -> GroupDetail | None:
        """Return one group with its partitions and members; None if it does not exist."""
        lags = await self._computed()
        if name not in lags.groups and name not in self._members():
            return None
        rows = [self._group_partition(key, offset) for key, offset in lags.offsets.get(name, ())[:MAX_LIMIT]]
        rows.sort(key=lambda row: (row.topic, row.partition))
        return GroupDetail(self._group(name, lags), tuple(rows), self._members_of(name))

    async def reset(
        self,
        name: str,
        to: str,
        *,
        dry_run: bool,
        topic: str | None = None,
        partition: int | None = None,
        expected: str | None = None,
    ) -> OffsetReset | None:
        """Reset the committed offsets of a group on this broker, or preview it; None if it has no such offsets.

        ``to``: earliest, latest, a time in ms since 1970 (the first record appended then or later), ``+N`` or ``-N``
        records of a partition from its committed offset, limited to the stored ones, or ``offset:N``. ``topic``,
        ``partition``: only these; ``offset:N`` needs both. ``expected``: the ``digest`` of a preview; offsets that are
        no longer those of the preview do not change, so that a repeated request does not shift them again. A reset is
        durable when this returns.

        Raises:
            LocalProtocolError: ``to`` is none of these, or the offset is not stored.
            RefusedError: the group has members, or belongs to a pipeline or Spark query, or its offsets changed
                meanwhile.
            StorageError: the reset could not be made durable.
        """
        if to not in {"earliest", "latest"} and not any(each.fullmatch(to) for each in (_TIME, _SHIFT, _EXACT)):
            raise LocalProtocolError(
                f"to={to[:40]!r}",
                hint="use earliest, latest, a time in ms since 1970, -N or +N records (in a URL %2BN), or offset:N",
            )
        if _EXACT.fullmatch(to) and (topic is None or partition is None):
            raise LocalProtocolError(
                f"to={to!r} without one partition",
                why="each partition has its own offsets",
                hint="set topic and partition",
            )
        # Not those of the lags: these may be older than the last commit of the group.
        keys = [
            key
            for key, _ in self._broker.engine.offsets.items()
            if key[0] == name and topic in (None, key[1]) and partition in (None, key[2])
        ]
        if not keys:
            return None
        self._refuse_reset(name)
        moves: list[OffsetMove] = []
        began_s = time.perf_counter()
        for key in keys:
            if (move := await self._planned(key, to)) is not None:
                moves.append(move)
            if time.perf_counter() - began_s >= SHARE_S:
                await self._pages.pause()
                began_s = time.perf_counter()
        digest = _digest(moves)
        if not dry_run:
            self._refuse_reset(name)  # a member may have joined meanwhile
            committed = self._broker.engine.offsets.committed
            unchanged = all(committed((name, move.topic, move.partition)) == move.from_offset for move in moves)
            if not unchanged or expected not in (None, digest):
                raise RefusedError(
                    f"the offsets of group {name!r} changed meanwhile",
                    why="another request reset them, or a member committed its own",
                    hint="preview the reset again",
                )
            for move in moves:
                self._broker.engine.offsets.set((name, move.topic, move.partition), move.to_offset)
            await self._broker.committed()
            self._lags.until_s = 0.0
        return OffsetReset(
            group=name,
            to=to,
            dry_run=dry_run,
            partitions=len(moves),
            read_again=sum(max(0, move.records) for move in moves),
            skipped=sum(max(0, -move.records) for move in moves),
            exact=all(move.exact for move in moves),
            moves=tuple(moves[:MAX_LIMIT]),
            digest=digest,
        )

    async def _planned(self, key: Key, to: str) -> OffsetMove | None:
        """Return the change of one offset; None if the partition has no records, or the offset was removed
        meanwhile."""
        store, now = self._store(key), self._broker.engine.offsets.committed(key)
        if store is None or now is None:
            return None
        if to == "earliest":
            target = store.min_offset
        elif to == "latest":
            target = store.durable_end
        elif _SHIFT.fullmatch(to):
            target = await self._shifted(store, key[2], max(now, store.min_offset), int(to))
        elif exact_offset := _EXACT.fullmatch(to):
            target = _stored(store, int(exact_offset[1]))
        else:
            target = store.offset_at(int(to))
        before, _, exact = store.lag(key[2], max(now, store.min_offset))
        after, _, exact_then = store.lag(key[2], target)
        return OffsetMove(key[1], key[2], now, target, after - before, exact and exact_then)

    async def _shifted(self, store: LogStore, partition: int, at: int, by: int) -> int:
        """Return the offset ``by`` records of the partition from ``at``, limited to the stored ones."""
        window, left = SHIFT_RECORDS * INDEX_RECORD_BYTES, abs(by)
        while left:
            start, end = (
                (at, min(at + window, store.durable_end)) if by > 0 else (max(at - window, store.min_offset), at)
            )
            if start >= end:
                break
            if by > 0:
                found, count = store.plan(partition, start, end, left)
            else:  # a store counts forward only: count all of them, then pass those before the wanted one
                count = store.plan(partition, start, end, SHIFT_RECORDS)[1]
                found = store.plan(partition, start, end, count - left)[0] if count >= left else start
            if count >= left:
                return found
            at, left = end if by > 0 else start, left - count
            await self._pages.pause()
        return max(at, store.min_offset)

    def _refuse_reset(self, name: str) -> None:
        if query_of_group(name) is not None:
            raise RefusedError(
                f"group {name!r} belongs to a pipeline or Spark query",
                why="it continues from its checkpoint; the offsets of the group are published for information",
                hint="process records again with penstock pipeline run --from, or a new checkpoint",
            )
        if count := self._count(name):
            raise RefusedError(
                f"group {name!r} has {count} member{'s' if count > 1 else ''}",
                why="messages that they have fetched would be added to the new offsets",
                hint="stop them first",
            )

    # Private

    def _members(self) -> dict[str, MasterGroup | ClientGroup]:
        engine = self._master.engine
        return {**engine.groups, **engine.client_groups}

    def _members_of(self, name: str) -> tuple[MemberSnapshot, ...]:
        engine, now = self._master.engine, self._broker.clock()
        found: list[MemberSnapshot] = []
        group, client_group = engine.groups.get(name), engine.client_groups.get(name)
        if group is not None:
            found += [
                MemberSnapshot(each.id, each.origin.host, len(each.held), max(0, now - each.last_seen) / 1000)
                for each in group.members.values()
            ]
        if client_group is not None:
            # Each text lists the partitions of one topic: topic#broker:partition,broker:partition
            found += [
                MemberSnapshot(
                    each.id,
                    each.origin.host,
                    sum(text.count(",") + 1 for text in each.partitions),
                    max(0, now - each.last_seen) / 1000,
                )
                for each in client_group.members.values()
            ]
        return tuple(found[:MAX_LIMIT])

    def _broker_row(self, setting: BrokerSetting) -> BrokerSnapshot:
        broker = self._master.engine.cluster.brokers.get(setting.id)
        if broker is None:
            return BrokerSnapshot(
                broker=setting.id,
                address=f"{setting.host}:{setting.port}",
                tls_port=None,
                http=None,
                state="never registered",
                accepts_records=False,
                accepts_consumers=False,
                topics=0,
                silent_s=None,
                failure=None,
            )
        silent_ms = max(0, self._broker.clock() - broker.last_seen)
        return BrokerSnapshot(
            broker=setting.id,
            address=f"{broker.info.host}:{broker.info.port}",
            tls_port=(broker.tls_port or None) if broker.tls else None,
            http=broker.web_address or None,
            state="running" if broker.online else "offline",
            accepts_records=broker.online and not broker.stop_write and not broker.write_status,
            accepts_consumers=broker.online and not broker.stop_read and not broker.read_status,
            topics=len(broker.serving) - (OFFSET_HISTORY_TOPIC in broker.serving),
            silent_s=silent_ms / 1000 if broker.last_seen else None,
            failure=broker.failure or None,
        )

    def _count(self, name: str) -> int:
        engine = self._master.engine
        found = engine.groups.get(name) or engine.client_groups.get(name)
        return 0 if found is None else len(found.members)

    async def _computed(self) -> _Lags:
        """Return the lags of all groups, computed within the last seconds."""
        if time.monotonic() < self._lags.until_s:
            return self._lags
        async with self._pages.lock:
            if time.monotonic() < self._lags.until_s:
                return self._lags  # computed while this request waited
            lags = _Lags()
            worked_s = 0.0
            offsets = self._broker.engine.offsets.items()
            began_s = time.perf_counter()
            for key, offset in offsets:
                self._add(lags, key, offset)
                share_s = time.perf_counter() - began_s
                if share_s >= SHARE_S:
                    worked_s += share_s
                    await self._pages.pause()
                    began_s = time.perf_counter()
            worked_s += time.perf_counter() - began_s
            lags.until_s = time.monotonic() + max(LAG_S, LAG_SHARE * worked_s)
            self._lags = lags
            return lags

    def _add(self, lags: _Lags, key: Key, offset: int) -> None:
        group, topic, _ = key
        store = self._store(key)
        records, age_s, exact = (0, 0.0, True) if store is None else self._lag(store, key[2], offset)
        lags.groups.setdefault(group, _Lag()).add(topic, records, age_s, exact=exact)
        lags.topics.setdefault(topic, {}).setdefault(group, _Lag()).add(topic, records, age_s, exact=exact)
        lags.offsets.setdefault(group, []).append((key, offset))

    def _lag(self, store: LogStore, partition: int, offset: int) -> tuple[int, float, bool]:
        records, oldest, exact = store.lag(partition, max(offset, store.min_offset))
        return records, max(0, self._broker.clock() - oldest) / 1000 if records and oldest else 0.0, exact

    def _store(self, key: Key) -> LogStore | None:
        """Return the store of a partition; None if it has never stored a record. A store is not opened for this."""
        return self._broker.storage.stores.get((key[1], key[2] // PARTITIONS_PER_STORE))

    def _group(self, name: str, lags: _Lags) -> GroupSnapshot:
        lag = lags.groups.get(name, _NO_LAG)
        members = self._members().get(name)
        topics = set(lag.topics) | (set() if members is None else set(members.topics))
        count = 0 if members is None else len(members.members)
        return GroupSnapshot(
            group=name,
            state="active" if count else "without members",
            members=count,
            topics=tuple(sorted(topics)),
            partitions=lag.partitions,
            lag_records=lag.records,
            lag_s=lag.age_s,
            lag_exact=lag.exact,
        )

    def _group_partition(self, key: Key, offset: int) -> GroupPartition:
        _, topic, partition = key
        store = self._store(key)
        records, age_s, exact = (0, 0.0, True) if store is None else self._lag(store, partition, offset)
        held = self._broker.engine.registrations.get(key)
        return GroupPartition(
            topic=topic,
            partition=partition,
            offset=offset,
            first_offset=0 if store is None else store.min_offset,
            end_offset=0 if store is None else store.durable_end,
            lag_records=records,
            lag_s=age_s,
            lag_exact=exact,
            member=None if held is None else held.client_id,
        )

    def _partitions(self, topic: BrokerTopic) -> list[int]:
        return partition_ids(topic.config.partitions or 1, topic.config.stores or 1)

    def _partition(self, topic: BrokerTopic, number: int) -> PartitionSnapshot:
        store = self._store(("", topic.name, number))
        if store is None:
            return PartitionSnapshot(number, 0, records_exact=True, first_offset=0, end_offset=0)
        records, _, exact = store.lag(number, store.min_offset)
        return PartitionSnapshot(number, records, exact, store.min_offset, store.durable_end)

    def _topic(self, topic: BrokerTopic, lags: _Lags) -> TopicSnapshot:
        groups = lags.topics.get(topic.name, {})
        largest = _largest(groups)
        stores = [store for store in topic.stores.values() if store.durable_end > store.min_offset]
        ends: Sequence[int] = [
            time_ms for store in stores for time_ms in store.times([store.durable_end - INDEX_RECORD_BYTES])
        ]
        return TopicSnapshot(
            topic=topic.name,
            partitions=len(self._partitions(topic)),
            bytes=_bytes(topic),
            rate=self._rate(topic.name),
            last_at=max(ends, default=None),
            retention=topic.config.delete_policy,
            accepts_records=topic.writable,
            accepts_consumers=topic.readable,
            groups=len(groups),
            lag_records=largest.records,
            lag_s=max((lag.age_s for lag in groups.values()), default=0.0),
        )


_NO_LAG: Final = _Lag()


def _largest(groups: dict[str, _Lag]) -> _Lag:
    return max(groups.values(), key=lambda lag: lag.records, default=_NO_LAG)


def _bytes(topic: BrokerTopic) -> int:
    return sum(store.durable_data_end - store.min_data_offset for store in topic.stores.values())


def _digest(moves: Sequence[OffsetMove]) -> str:
    """Return a digest of the offsets before ``moves``: their ends may grow between a preview and the reset."""
    before = sorted((move.topic, move.partition, move.from_offset) for move in moves)
    return blake2b(repr(before).encode(), digest_size=16).hexdigest()


def _stored(store: LogStore, offset: int) -> int:
    """Return ``offset`` if the store has it. Raises LocalProtocolError."""
    if offset % INDEX_RECORD_BYTES or not store.min_offset <= offset <= store.durable_end:
        raise LocalProtocolError(
            f"offset {offset} is not stored",
            why=f"offsets are multiples of {INDEX_RECORD_BYTES} from {store.min_offset} to {store.durable_end}",
            hint="choose one of them",
        )
    return offset
