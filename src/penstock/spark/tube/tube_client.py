"""The client of a TubeMQ cluster that sources use: its partitions, how far they reach, the messages of a range.

Blocking, for one thread: the driver's planning process and the tasks in executors each make their own. Failures of the
network are retried here, up to a deadline, and then raised; an empty answer always means that there was no data.
Connections are kept per broker and never shared between processes. penstock's brokers and Apache's, which have no exact
ranges, are read alike."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from penstock.errors import ConfigError, DataLossError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.spark.tube.offsets import (
    Bounds,
    Positions,
    Slice,
    Times,
    TopicPartition,
    Wanted,
    by_partition,
    check_kept,
    from_json,
    resolve,
    slices,
)
from penstock.spark.tube.options import ConnectionOptions, SourceOptions
from penstock.tube.codec.message import HAS_ATTRIBUTES, MSG_TYPE

if TYPE_CHECKING:
    from penstock.tube.reader import BrokerReader, MessageBatch, PartitionInfo

__all__ = ["ALL_MESSAGES", "BrokerAddress", "ServerAccess", "TubeClient", "count_rows", "explain_missing_topic", "only"]

ALL_MESSAGES = 2**31 - 1
"""As many as one plan can ask for (int32 on the wire)."""

_ATTEMPT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


class BrokerAddress(NamedTuple):
    """Address of a broker. ``http``: its administration if it has no ranges; "" for penstock's, None if unknown."""

    host: str
    port: int
    http: str | None = None


class TubeClient:
    """A blocking client of the masters and brokers of one cluster. Close it, or use it in a ``with`` block.

    ``connection``: masters and login, or just the masters. Files of the login are read here; ConfigError: one cannot be
    used. ``types``: read only messages of these types; none: all.
    """

    def __init__(
        self,
        connection: ConnectionOptions | str,
        timeout_ms: int,
        *,
        types: Collection[str] = (),
        servers: ServerAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        connection = ConnectionOptions(connection) if isinstance(connection, str) else connection
        self._masters = connection.masters
        self._types = frozenset(types)
        self._timeout_s = timeout_ms / 1000
        # A broker may have moved: its address is asked for again long before the deadline.
        self._servers = servers if servers is not None else ServerAccess(connection, min(self._timeout_s, _ATTEMPT_S))
        self._clock = clock
        self._sleep = sleep
        self._addresses: dict[tuple[str, int], BrokerAddress] = {}
        self._found: dict[tuple[str, ...], tuple[float, list[TopicPartition]]] = {}
        self._readers: dict[tuple[str, int], BrokerReader] = {}
        self._https: dict[tuple[str, int], str] = {}
        self._topics: tuple[float, list[str]] | None = None

    @classmethod
    def from_options(
        cls,
        options: SourceOptions,
        *,
        timeout_ms: int | None = None,
        servers: ServerAccess | None = None,
    ) -> Self:
        """The client of the cluster that ``options`` name; ``timeout_ms`` instead of theirs."""
        return cls(options.connection, timeout_ms or options.timeout_ms, types=options.types, servers=servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The object can be used again; it opens new ones."""
        while self._readers:
            _, reader = self._readers.popitem()
            with suppress(OSError, UnavailableError):
                reader.close()

    def topics(self, *, max_age_s: float = 0.0) -> list[str]:
        """The names of all topics. An answer not older than ``max_age_s`` is used again.

        Raises:
            UnavailableError: the masters' administration does not answer.
        """
        if self._topics is None or self._clock() - self._topics[0] >= max_age_s:
            found = self._again(lambda: list(self._servers.topics()))
            self._topics = (self._clock(), found)
        return self._topics[1]

    def partitions(
        self,
        topics: Iterable[str],
        *,
        required: Collection[TopicPartition] = (),
        max_age_s: float = 0.0,
        announced: bool = True,
    ) -> list[TopicPartition]:
        """All partitions of ``topics``, sorted.

        ``required`` were there before: while one of them is missing (its broker restarts and has not registered
        again) the question is repeated up to the deadline. A topic that nothing is required of must exist at once,
        unless ``announced`` is false: it may have been created a moment ago.
        An answer that is not older than ``max_age_s`` is used again, unless a broker failed since.

        Raises:
            UnavailableError: no master answered, or a required partition stayed away.
            ConfigError: a topic does not exist.
        """
        wanted = tuple(topics)
        asked_at, known = self._found.get(wanted, (0.0, []))
        if known and self._clock() - asked_at < max_age_s and set(required) <= set(known):
            return known

        def ask() -> list[TopicPartition]:
            from penstock.tube.reader import TopicUnavailableError

            found: list[TopicPartition] = []
            for topic in wanted:
                known_before = any(partition.topic == topic for partition in required)
                try:
                    partitions = self._discover(topic)
                except TopicUnavailableError:
                    if announced or known_before:
                        raise  # its brokers register in a moment
                    continue
                if announced and not partitions and not known_before:
                    raise ConfigError(
                        f"topic {topic!r} does not exist at tube master {self._masters}",
                        option="subscribe",
                        do=f"create it (penstock tube topic create {topic}), or correct the name",
                    )
                found.extend(partitions)
            missing = sorted(set(required) - set(found))
            if missing:
                raise UnavailableError(
                    f"{', '.join(map(str, missing[:5]))}: not offered by tube master {self._masters}",
                    applied=False,
                    why="the broker is down or has not registered again, or the topic was made smaller",
                    do="start the broker, or name what is left in subscribe or assign",
                )
            return sorted(found)

        found = self._again(ask)
        self._found[wanted] = (self._clock(), found)
        return found

    def address(self, partition: TopicPartition) -> BrokerAddress | None:
        """Return the last known address of the broker of ``partition``, which saves tasks a request to a master."""
        found = self._addresses.get((partition.topic, partition.broker_id))
        return None if found is None else BrokerAddress(*found[:2], self._https.get(found[:2]))

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Oldest kept position and durable end of each of ``partitions``; partitions of one store are asked once."""
        of_store: dict[tuple[str, int, int], Bounds] = {}
        result: dict[TopicPartition, Bounds] = {}
        for partition in partitions:
            if partition.store not in of_store:
                of_store[partition.store] = Bounds(*self._ask(partition, _bounds_of(partition)))
            result[partition] = of_store[partition.store]
        return result

    def offset_at(self, partition: TopicPartition, time_ms: int) -> int:
        """Return the offset of the store's first message received at ``time_ms`` or later; its end if there is none."""
        topic, _, number = partition
        return self._ask(partition, lambda reader: reader.offset_at(topic, number, time_ms))

    def positions(self, wanted: Wanted, bounds: Mapping[TopicPartition, Bounds], option: str) -> Positions:
        """Resolve ``wanted``, the value of the option ``option``, for exactly the partitions in ``bounds``.

        Raises:
            ConfigError: as :func:`resolve`; or a partition has no message that new.
        """
        if not isinstance(wanted, Times):
            return resolve(wanted, bounds, option)
        if isinstance(wanted.at, int):
            times = dict.fromkeys(bounds, wanted.at)
        else:
            times = by_partition(wanted.at, bounds.keys(), option.replace("Offsets", "OffsetsByTimestamp"))
        positions: Positions = {}
        for partition, time_ms in times.items():
            found = self.offset_at(partition, time_ms)
            if found >= bounds[partition].end and not wanted.or_latest:
                raise ConfigError(
                    f"{partition}: nothing was written at {time_ms} ms or later",
                    option="startingTimestamp",
                    do="choose an earlier time, or set startingOffsetsByTimestampStrategy=latest",
                )
            positions[partition] = min(found, bounds[partition].end)
        return positions

    def plan(self, piece: Slice, max_messages: int) -> tuple[int, int]:
        """``(end, count)``: the longest range from ``piece.start`` with at most ``max_messages`` own messages.

        It does not reach past ``piece.end``; ``count`` is the number of own messages in it.
        """
        (topic, _, number), start, end = piece
        return self._ask(piece.partition, lambda reader: reader.plan(topic, number, start, end, max_messages))

    def count(self, piece: Slice) -> int:
        """The messages in ``piece`` that :meth:`read` gives, counted by the broker where it can."""
        if self._types or not self.has_ranges(piece.partition):
            return sum(len(batch.offsets) for batch in self.read(piece))
        return self.weigh(piece)

    def weigh(self, piece: Slice) -> int:
        """At most how many messages are in ``piece``: filters do not count, and Apache's count the whole store."""
        position, total = piece.start, 0
        while position < piece.end:
            reached, count = self.plan(piece._replace(start=position), ALL_MESSAGES)
            if reached <= position:
                raise _stuck(piece, position)
            position, total = reached, total + count
        return total

    def read(
        self,
        piece: Slice,
        *,
        address: BrokerAddress | None = None,
        fail_on_data_loss: bool = True,
        mark: int | None = None,
    ) -> Iterator[MessageBatch]:
        """Exactly the messages of ``piece``, in order, each time the same; resumes where a connection broke.

        ``address`` is where the broker was when the range was planned; a master is asked if it is no longer there.
        ``mark`` is that of the start, see ``offsets``.

        Raises:
            UnavailableError: nothing came for as long as the deadline says.
            DataLossError: something in ``piece`` is gone. With ``fail_on_data_loss`` false reading continues at the
                oldest position that is kept, or after the gap.
        """
        partition, position, end = piece
        if address is not None:
            self._addresses.setdefault((partition.topic, partition.broker_id), address)
            if address.http is not None:
                self._https.setdefault(address[:2], address.http)
        data_start = mark if fail_on_data_loss else None
        choose = self._filter()
        retries: _Retries | None = None
        while position < end:
            try:
                batches = self._reader(partition).read(
                    partition.topic, partition.partition, position, end, types=self._types, data_start=data_start
                )
                for batch in batches:
                    wanted = batch if choose is None else choose(batch)
                    if len(wanted.offsets):
                        yield wanted
                    position = batch.reached
                    retries = None  # the deadline and the pauses begin anew with the next failure
                return
            except UnavailableError as error:
                self._forget(partition)
                retries = retries or _Retries(self._timeout_s, self._clock, self._sleep)
                retries.failed(error)
            except DataLossError as error:
                position, end = self._what_is_left(
                    error, Slice(partition, position, end), fail_on_data_loss=fail_on_data_loss
                )

    def _what_is_left(self, error: DataLossError, piece: Slice, *, fail_on_data_loss: bool) -> tuple[int, int]:
        """Start and end of the range to continue with after ``error``; raises it if there is none or none is wanted."""
        partition, position, end = piece
        bounds = self.bounds([partition])[partition]
        if fail_on_data_loss:
            check_kept(position, bounds, partition)
            raise error
        start, stop = max(position, bounds.oldest, error.end or 0), min(end, bounds.end)
        if (start, stop) == (position, end):
            # What is missing lies inside the log: to skip it would leave out nobody knows how much.
            raise error
        _log.warning(
            "%s: of [%d, %d) only [%d, %d) is left, going on (failOnDataLoss=false)",
            partition, position, end, start, max(start, stop),
        )  # fmt: skip
        return start, stop

    def _discover(self, topic: str) -> list[TopicPartition]:
        found = []
        for info in self._servers.partitions(topic):
            self._addresses[topic, info.broker_id] = BrokerAddress(info.host, info.port)
            found.append(TopicPartition(topic, info.broker_id, info.partition))
        return found

    def _reader(self, partition: TopicPartition) -> BrokerReader:
        """The connection to the broker of ``partition``, whose address the master is asked for if it is not known."""
        key = (partition.topic, partition.broker_id)
        if key not in self._addresses:
            self._discover(partition.topic)
        address = self._addresses.get(key)
        if address is None:
            raise UnavailableError(
                f"{partition}: tube master {self._masters} names no broker {partition.broker_id} for it",
                applied=False,
                why="the broker is down or has not registered again",
                do=f"start broker {partition.broker_id}",
            )
        place = address[:2]
        reader = self._readers.get(place)
        if reader is None:
            reader = self._servers.connect(BrokerAddress(*place, self._https.get(place)), partition)
            self._readers[place] = reader
            self._https[place] = reader.http
        return reader

    def has_ranges(self, partition: TopicPartition) -> bool:
        """Return True if the broker of the partition serves exact ranges: penstock's do, Apache's do not."""
        return self._ask(partition, lambda reader: not reader.http)

    def _forget(self, partition: TopicPartition) -> None:
        """Drop what may be stale after a failure: the connection, the address, what there was."""
        self._found.clear()
        address = self._addresses.pop((partition.topic, partition.broker_id), None)
        if address is None:
            return
        self._https.pop(address[:2], None)  # another server may listen there now
        reader = self._readers.pop(address[:2], None)
        if reader is not None:
            with suppress(OSError, UnavailableError):
                reader.close()

    def _filter(self) -> Callable[[MessageBatch], MessageBatch] | None:
        if not self._types:
            return None
        from penstock.spark.tube.tube_client import only

        return only(self._types)

    def commit_offset(self, partition: TopicPartition, group: str, offset: int) -> None:
        """Store ``offset`` as the offset of ``group`` in ``partition``, without a retry.

        Raises:
            PenstockError: it could not be done.
        """
        address = self.address(partition)
        if address is not None:
            self._servers.commit_offset(address, partition, group, offset)

    def _ask(self, partition: TopicPartition, question: Callable[[BrokerReader], T]) -> T:
        def ask() -> T:
            try:
                return question(self._reader(partition))
            except UnavailableError:
                self._forget(partition)
                raise

        return self._again(ask)

    def _again(self, ask: Callable[[], T]) -> T:
        retries: _Retries | None = None
        while True:
            try:
                return ask()
            except UnavailableError as error:
                retries = retries or _Retries(self._timeout_s, self._clock, self._sleep)
                retries.failed(error)


class ServerAccess:
    """Single requests to masters, their administration and brokers, without retries.

    The client modules are imported on first use, so that the data source can be imported without them.
    """

    def __init__(self, connection: ConnectionOptions, timeout_s: float) -> None:
        self._options = connection
        self._timeout_s = timeout_s
        self._login = connection.login.client()
        self._webs: dict[int, str] = {}

    def partitions(self, topic: str) -> Sequence[PartitionInfo]:
        """All partitions of ``topic``; none if it does not exist.

        Raises:
            UnavailableError: no master answers, or no broker that has the topic is registered at it yet.
        """
        from penstock.tube import reader

        return reader.partitions(self._options.masters, topic, timeout_s=self._timeout_s, **self._login)

    def topics(self) -> Sequence[str]:
        """The names of all topics, from the masters' administration, without the system's own."""
        from penstock.tube.client import web

        http = self._options.administration
        user, password, tls = self._login["user"], self._login["password"], self._login["tls"]
        login = web.WebLogin(user=user, password=password or "", tls=tls)
        rows = web.call(
            http, "admin_query_topic_info", {}, option="tubemq.http", timeout_s=self._timeout_s, login=login
        )
        return sorted(row["topicName"] for row in rows if not row["topicName"].startswith("__"))

    def connect(self, address: BrokerAddress, partition: TopicPartition) -> BrokerReader:
        """A reader for the broker at ``address``, which holds ``partition``.

        If ``address`` does not tell whether the broker has ranges, ask it.

        Raises:
            UnavailableError: the broker does not answer, or a master's administration that is needed.
            RefusedError: the broker refuses.
        """
        from penstock.tube import reader
        from penstock.tube.client import apache_range_reader

        host, port, http = address
        if not http:
            size = {} if self._options.batch_bytes is None else {"batch_bytes": self._options.batch_bytes}
            ranges = reader.RangeReader(host, port, timeout_s=self._timeout_s, **size, **self._login)
            if http is not None or _has_ranges(ranges, partition):
                return ranges
            http = self._web_of(partition.broker_id)
        return apache_range_reader.ApacheRangeReader(
            host,
            port,
            http=http,
            group=self._options.group,
            token=self._visit_token,
            timeout_s=self._timeout_s,
            **self._login,
        )

    def commit_offset(self, address: BrokerAddress, partition: TopicPartition, group: str, offset: int) -> None:
        """Store ``offset`` as the offset of ``group`` in ``partition``, for monitoring."""
        from penstock.tube.client.apache_range_reader import DirectConsumer

        host, port, _ = address
        with DirectConsumer(host, port, token=self._visit_token, timeout_s=self._timeout_s, **self._login) as consumer:
            consumer.commit_offset(group, partition.topic, partition.partition, offset)

    def _visit_token(self) -> int:
        from penstock.tube import reader

        return reader.visit_token(self._options.masters, timeout_s=self._timeout_s, **self._login)

    def _web_of(self, broker_id: int) -> str:
        from penstock.tube.client.apache_range_reader import broker_webs

        if broker_id not in self._webs:
            try:
                self._webs = broker_webs(self._options.administration, timeout_s=self._timeout_s)
            except (UnavailableError, ConfigError) as error:
                raise UnavailableError(
                    f"broker {broker_id} has no exact ranges, and {error.what}",
                    applied=False,
                    why="Apache's brokers do not say on the wire what retention removed; their administration does",
                    do="set tubemq.http to HOST:PORT of the master's administration (webPort in its master.ini)",
                ) from error
        http = self._webs.get(broker_id)
        if http is None:
            raise RefusedError(
                f"the administration at {self._options.administration} knows no broker {broker_id}, or not its HTTP "
                "port",
                do="set tubemq.http to the administration of the masters in tubemq.master",
            )
        return http


class _Retries:
    """Retries of one question until ``timeout_s`` after its first failure, when this object is made."""

    def __init__(self, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        self._failing_since = clock()

    def failed(self, error: UnavailableError) -> None:
        """Wait, or raise ``error`` again when the deadline has passed."""
        pause_s = self._backoff.failed()
        if self._clock() - self._failing_since + pause_s > self._timeout_s:
            raise UnavailableError(
                f"{error.what} (tried for {self._timeout_s:g} s)",
                applied=error.applied,
                why=error.why,
                do=error.do or "start TubeMQ, check tubemq.master, or raise tubemq.timeoutMs",
            ) from error
        self._sleep(pause_s)


def count_rows(
    options: Mapping[str, str],
    start: Mapping[str, Mapping[str, int]] | str,
    end: Mapping[str, Mapping[str, int]] | str,
    servers: ServerAccess | None = None,
    *,
    exact: bool = True,
) -> int:
    """Count the messages of a batch from ``start`` to ``end``; the brokers count them.

    ``options`` are those of the source; ``start`` and ``end`` are its offsets, as dictionaries or as the JSON text
    that progress reports and checkpoints hold. Partitions that only one of them has are not counted, except that
    partitions new in ``end`` hold nothing up to it (the source notes a new partition one batch before it reads it).
    With ``exact`` false the filter is not looked at, and on Apache's brokers the whole store is counted: never too few,
    and nothing has to be read.

    Raises:
        ConfigError: options or offsets are not of this source.
        UnavailableError: TubeMQ did not answer in time.
        DataLossError: part of the range is no longer kept.
    """
    begin, stop = _offset(start), _offset(end)
    pieces = slices({partition: begin.get(partition, position) for partition, position in stop.items()}, stop)
    with TubeClient.from_options(SourceOptions.parse(options), servers=servers) as tube:
        return sum(tube.count(piece) if exact else tube.weigh(piece) for piece in pieces)


def _offset(offset: Mapping[str, Mapping[str, int]] | str) -> Positions:
    return from_json(json.loads(offset) if isinstance(offset, str) else offset)


def _bounds_of(partition: TopicPartition) -> Callable[[BrokerReader], tuple[int, ...]]:
    return lambda reader: reader.bounds(partition.topic, partition.partition)


def _stuck(piece: Slice, position: int) -> DataLossError:
    return DataLossError(
        f"{piece.partition}: nothing between position {position} and {piece.end} can be counted",
        why="the log ends before that position: the broker lost its newest messages",
        do="check the broker's data directory; set failOnDataLoss=false to continue",
    )


def _has_ranges(ranges: BrokerReader, partition: TopicPartition) -> bool:
    from penstock.tube.reader import NO_RANGES

    try:
        ranges.bounds(partition.topic, partition.partition)
    except RefusedError as error:
        ranges.close()
        if error.code == NO_RANGES:
            return False
        raise
    except BaseException:
        ranges.close()
        raise
    return True


_TYPE = MSG_TYPE.encode() + b"="


def only(types: Collection[str]) -> Callable[[MessageBatch], MessageBatch]:
    """Return a filter of batches that keeps messages of ``types``; messages without a type are dropped."""
    from penstock.tube.record import encode_msg_type

    wanted = frozenset(encode_msg_type(text).encode() for text in types)
    return lambda batch: _chosen(wanted, batch)


def _chosen(wanted: frozenset[bytes], batch: MessageBatch) -> MessageBatch:
    chosen = [
        place
        for place, (payload, flag) in enumerate(zip(batch.payloads, batch.flags, strict=True))
        if flag & HAS_ATTRIBUTES and _type_of(payload) in wanted
    ]
    return batch if len(chosen) == len(batch.payloads) else batch.select(chosen)


def _type_of(payload: bytes) -> bytes | None:
    end = min(4 + int.from_bytes(payload[:4], signed=True), len(payload))
    # Writers put the type first; a reader takes it wherever it stands.
    start = 4 if payload.startswith(_TYPE, 4) else payload.find(b"," + _TYPE, 4, end) + 1
    if start == 0:
        return None
    start += len(_TYPE)
    stop = payload.find(b",", start, end)
    return payload[start : end if stop < 0 else stop].strip()


@contextmanager
def explain_missing_topic(then: str, *, why: str, do: str, option: str = "tubemq.topic") -> Iterator[None]:
    """``then``: what follows where the topic of ``option`` does not exist, ``why`` it may not, what to ``do``.

    Raises:
        ConfigError: the one that was raised inside, with that; others as they are.
    """
    try:
        yield
    except ConfigError as error:
        if "does not exist" not in error.what:
            raise
        raise ConfigError(f"{error.what}: {then}", option=option, why=why, do=do) from error
