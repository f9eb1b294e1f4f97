"""The TubeMQ client of the Spark sources: partitions, offsets and the messages of a range.

Blocking and not thread-safe: the driver's planner process and each task create their own. Network failures are retried
up to a deadline and then raised, so an empty result always means that there is no data. Connections are kept per
broker and never shared between processes. Apache's brokers, which do not support exact ranges, are read through the
same interface as penstock's."""

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
    Epochs,
    OffsetSpec,
    PartitionOffsets,
    Slice,
    TimeSpec,
    TopicPartition,
    by_partition,
    check_offset_in_range,
    epochs_of,
    from_json,
    replaced_log,
    resolve,
    slices,
)
from penstock.spark.tube.options import ConnectionOptions, SourceOptions
from penstock.tube.codec.message import HAS_ATTRIBUTES, MSG_TYPE

if TYPE_CHECKING:
    from penstock.tube.reader import BrokerReader, MessageBatch, PartitionInfo

__all__ = [
    "ALL_MESSAGES",
    "BrokerAddress",
    "ServerAccess",
    "TubeClient",
    "count_rows",
    "explain_missing_topic",
    "filter_by_type",
    "header_values",
]

ALL_MESSAGES = 2**31 - 1
"""Maximum of one plan request (int32 on the wire)."""

_ATTEMPT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


class BrokerAddress(NamedTuple):
    """Address of a broker. ``http``: its administration, "" if it supports exact ranges, None if unknown."""

    host: str
    port: int
    http: str | None = None


class TubeClient:
    """A blocking client of the masters and brokers of one cluster. Close it, or use it in a ``with`` block.

    ``connection``: masters and login, or only the masters. The constructor reads the files of the login and raises
    ConfigError if one is invalid. ``types``: read only messages of these types; empty: all.
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
        # A broker may have moved: attempts are short, so that its address is requested again before the deadline.
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
        """Create the client of the cluster in ``options``; ``timeout_ms`` overrides their timeout."""
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
        """Return the names of all topics, from a cache if it is younger than ``max_age_s``.

        Raises:
            UnavailableError: the masters' administration does not respond.
        """
        if self._topics is None or self._clock() - self._topics[0] >= max_age_s:
            found = self._retry(lambda: list(self._servers.topics()))
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
        """Return all partitions of ``topics``, sorted; from a cache if it is younger than ``max_age_s``.

        ``required`` partitions existed before: while one is missing (its broker restarts and has not registered again),
        the request is repeated until the deadline. A topic without required partitions must exist, unless ``announced``
        is false: then it may have been created very recently. A broker failure clears the cache.

        Raises:
            UnavailableError: no master responded, or a required partition is still missing at the deadline.
            ConfigError: a topic does not exist.
        """
        wanted = tuple(topics)
        asked_at, known = self._found.get(wanted, (0.0, []))
        if known and self._clock() - asked_at < max_age_s and set(required) <= set(known):
            return known

        def discover() -> list[TopicPartition]:
            from penstock.tube.reader import TopicUnavailableError

            found: list[TopicPartition] = []
            for topic in wanted:
                known_before = any(partition.topic == topic for partition in required)
                try:
                    partitions = self._discover(topic)
                except TopicUnavailableError:
                    if announced or known_before:
                        raise  # retried: its brokers may register soon
                    continue
                if announced and not partitions and not known_before:
                    raise ConfigError(
                        f"topic {topic!r} does not exist at tube master {self._masters}",
                        option="subscribe",
                        hint=f"create it (penstock tube topic create {topic}), or correct the name",
                    )
                found.extend(partitions)
            missing = sorted(set(required) - set(found))
            if missing:
                raise UnavailableError(
                    f"{', '.join(map(str, missing[:5]))}: unknown to tube master {self._masters}",
                    applied=False,
                    why="the broker is down or has not registered again, or partitions of the topic were removed",
                    hint="start the broker, or select existing partitions with subscribe or assign",
                )
            return sorted(found)

        found = self._retry(discover)
        self._found[wanted] = (self._clock(), found)
        return found

    def address(self, partition: TopicPartition) -> BrokerAddress | None:
        """Return the last known address of the broker of ``partition``, which saves tasks a request to a master."""
        found = self._addresses.get((partition.topic, partition.broker_id))
        return None if found is None else BrokerAddress(*found[:2], self._https.get(found[:2]))

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Return the bounds of each of ``partitions``, with one request per store."""
        of_store: dict[tuple[str, int, int], Bounds] = {}
        result: dict[TopicPartition, Bounds] = {}
        for partition in partitions:
            if partition.store not in of_store:
                of_store[partition.store] = self._request(partition, _bounds_of(partition))
            result[partition] = of_store[partition.store]
        return result

    def replaced(
        self, offsets: PartitionOffsets, epochs: Epochs, bounds: Mapping[TopicPartition, Bounds]
    ) -> PartitionOffsets:
        """Return the partitions whose log was replaced below their offset, each with the offset to continue at.

        ``epochs`` are those of ``offsets``; a partition without one is not checked. The offset to continue at is the
        first one of the present log that was not read.
        """
        found: PartitionOffsets = {}
        for partition, bound in bounds.items():
            offset, epoch = offsets.get(partition), epochs.get(partition)
            if offset is not None and epoch is not None and bound.epoch not in (None, epoch):
                begin = self._truncated_to(partition, offset, epoch)
                if begin is not None:
                    found[partition] = begin
        return found

    def _truncated_to(self, partition: TopicPartition, offset: int, epoch: int) -> int | None:
        topic, _, number = partition
        return self._request(partition, lambda reader: reader.truncated_to(topic, number, offset, epoch))

    def offset_at(self, partition: TopicPartition, time_ms: int) -> int:
        """Return the offset of the store's first message received at ``time_ms`` or later; without one, the end."""
        topic, _, number = partition
        return self._request(partition, lambda reader: reader.offset_at(topic, number, time_ms))

    def resolve_offsets(
        self, wanted: OffsetSpec, bounds: Mapping[TopicPartition, Bounds], option: str
    ) -> PartitionOffsets:
        """Resolve ``wanted``, the value of the option ``option``, to one offset per partition in ``bounds``.

        Raises:
            ConfigError: as :func:`resolve`; or a partition has no message at the time or later.
        """
        if not isinstance(wanted, TimeSpec):
            return resolve(wanted, bounds, option)
        if isinstance(wanted.at, int):
            times = dict.fromkeys(bounds, wanted.at)
        else:
            times = by_partition(wanted.at, bounds.keys(), option.replace("Offsets", "OffsetsByTimestamp"))
        offsets: PartitionOffsets = {}
        for partition, time_ms in times.items():
            found = self.offset_at(partition, time_ms)
            if found >= bounds[partition].end and not wanted.or_latest:
                raise ConfigError(
                    f"{partition}: no message was written at {time_ms} ms or later",
                    option="startingTimestamp",
                    hint="choose an earlier time, or set startingOffsetsByTimestampStrategy=latest",
                )
            offsets[partition] = min(found, bounds[partition].end)
        return offsets

    def plan(self, piece: Slice, max_messages: int, epoch: int | None = None) -> tuple[int, int]:
        """Return ``(end, count)`` of the longest range from ``piece.start`` with at most ``max_messages``.

        The end is at most ``piece.end``. ``count`` is the number of messages of the partition in the range. ``epoch``
        is the epoch of ``piece``, see ``offsets``.
        """
        (topic, _, number), start, end = piece
        return self._request(
            piece.partition, lambda reader: reader.plan(topic, number, start, end, max_messages, epoch=epoch)
        )

    def count(self, piece: Slice, epoch: int | None = None) -> int:
        """Return the number of messages that :meth:`read` returns for ``piece``; the broker counts them if it can."""
        if self._types or not self.has_ranges(piece.partition):
            return sum(len(batch.offsets) for batch in self.read(piece, epoch=epoch))
        return self.weigh(piece, epoch)

    def weigh(self, piece: Slice, epoch: int | None = None) -> int:
        """Return an upper limit of the messages in ``piece``: unfiltered; Apache brokers count the whole store."""
        offset, total = piece.start, 0
        while offset < piece.end:
            reached, count = self.plan(piece._replace(start=offset), ALL_MESSAGES, epoch)
            if reached <= offset:
                raise _uncountable(piece, offset)
            offset, total = reached, total + count
        return total

    def read(
        self,
        piece: Slice,
        *,
        address: BrokerAddress | None = None,
        fail_on_data_loss: bool = True,
        mark: int | None = None,
        epoch: int | None = None,
    ) -> Iterator[MessageBatch]:
        """Read exactly the messages of ``piece``, in order; resumes after a connection failure.

        ``address`` is the broker's address when the range was planned; if it fails, a master is asked for the current
        one. ``mark`` is the mark of the start offset and ``epoch`` the epoch of ``piece``, see ``offsets``.

        Raises:
            UnavailableError: the broker returned nothing until the deadline.
            DataLossError: messages of ``piece`` are no longer stored. If ``fail_on_data_loss`` is false, reading
                continues at the oldest stored offset, or after the gap, and ends where the log was replaced.
        """
        partition, offset, end = piece
        if address is not None:
            self._addresses.setdefault((partition.topic, partition.broker_id), address)
            if address.http is not None:
                self._https.setdefault(address[:2], address.http)
        data_start = mark if fail_on_data_loss else None
        choose = self._filter()
        retries: _Retries | None = None
        while offset < end:
            try:
                batches = self._reader(partition).read(
                    partition.topic, partition.partition, offset, end, types=self._types, data_start=data_start,
                    epoch=epoch,
                )  # fmt: skip
                for batch in batches:
                    wanted = batch if choose is None else choose(batch)
                    if len(wanted.offsets):
                        yield wanted
                    offset = batch.reached
                    retries = None  # the next failure starts a new deadline and new pauses
                return
            except UnavailableError as error:
                self._forget(partition)
                retries = retries or _Retries(self._timeout_s, self._clock, self._sleep)
                retries.failed(error)
            except DataLossError as error:
                offset, end = self._remaining_range(
                    error, Slice(partition, offset, end), epoch, fail_on_data_loss=fail_on_data_loss
                )

    def _remaining_range(
        self, error: DataLossError, piece: Slice, epoch: int | None, *, fail_on_data_loss: bool
    ) -> tuple[int, int]:
        """Return start and end of the range to continue with after ``error``; raise an error if reading must stop."""
        partition, offset, end = piece
        bounds = self.bounds([partition])[partition]
        kept = None if epoch is None else self._truncated_to(partition, end, epoch)
        if fail_on_data_loss:
            if kept is not None:
                raise replaced_log(partition, end, kept) from error
            check_offset_in_range(offset, bounds, partition)
            raise error
        start, stop = max(offset, bounds.oldest, error.end or 0), min(end, bounds.end if kept is None else kept)
        if (start, stop) == (offset, end):
            # The gap is inside the log and its size is unknown, so it cannot be skipped.
            raise error
        _log.warning(
            "%s: records of [%d, %d) are missing; continuing with [%d, %d) (failOnDataLoss=false)",
            partition, offset, end, start, max(start, stop),
        )  # fmt: skip
        return start, stop

    def _discover(self, topic: str) -> list[TopicPartition]:
        found = []
        for info in self._servers.partitions(topic):
            self._addresses[topic, info.broker_id] = BrokerAddress(info.host, info.port)
            found.append(TopicPartition(topic, info.broker_id, info.partition))
        return found

    def _reader(self, partition: TopicPartition) -> BrokerReader:
        """Return the connection to the broker of ``partition``; asks a master for an unknown address."""
        key = (partition.topic, partition.broker_id)
        if key not in self._addresses:
            self._discover(partition.topic)
        address = self._addresses.get(key)
        if address is None:
            raise UnavailableError(
                f"{partition}: tube master {self._masters} does not list broker {partition.broker_id} for it",
                applied=False,
                why="the broker is down or has not registered again",
                hint=f"start broker {partition.broker_id}",
            )
        host_port = address[:2]
        reader = self._readers.get(host_port)
        if reader is None:
            reader = self._servers.connect(BrokerAddress(*host_port, self._https.get(host_port)), partition)
            self._readers[host_port] = reader
            self._https[host_port] = reader.http
        return reader

    def has_ranges(self, partition: TopicPartition) -> bool:
        """Return True if the broker of the partition serves exact ranges: penstock's do, Apache's do not."""
        return self._request(partition, lambda reader: not reader.http)

    def _forget(self, partition: TopicPartition) -> None:
        """Drop the connection, the address and the cached partitions, which may be stale after a failure."""
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

        return filter_by_type(self._types)

    def commit_offset(self, partition: TopicPartition, group: str, offset: int) -> None:
        """Store ``offset`` as the offset of ``group`` in ``partition``, without retries.

        Raises:
            PenstockError: the broker is unavailable or refused the request.
        """
        address = self.address(partition)
        if address is not None:
            self._servers.commit_offset(address, partition, group, offset)

    def _request(self, partition: TopicPartition, request: Callable[[BrokerReader], T]) -> T:
        def attempt() -> T:
            try:
                return request(self._reader(partition))
            except UnavailableError:
                self._forget(partition)
                raise

        return self._retry(attempt)

    def _retry(self, attempt: Callable[[], T]) -> T:
        retries: _Retries | None = None
        while True:
            try:
                return attempt()
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
        """Return all partitions of ``topic``; empty if it does not exist.

        Raises:
            UnavailableError: no master responds, or no broker of the topic is registered yet.
        """
        from penstock.tube import reader

        return reader.partitions(self._options.masters, topic, timeout_s=self._timeout_s, **self._login)

    def topics(self) -> Sequence[str]:
        """Return the names of all topics except system topics, from the masters' administration."""
        from penstock.tube.client import web

        http = self._options.administration
        username, password, tls = self._login["username"], self._login["password"], self._login["tls"]
        login = web.WebLogin(username=username, password=password or "", tls=tls)
        rows = web.call(
            http, "admin_query_topic_info", {}, option="tubemq.http", timeout_s=self._timeout_s, login=login
        )
        return sorted(row["topicName"] for row in rows if not row["topicName"].startswith("__"))

    def connect(self, address: BrokerAddress, partition: TopicPartition) -> BrokerReader:
        """Connect to the broker of ``partition`` at ``address`` and return a reader.

        If ``address.http`` is None, the broker is asked whether it supports exact ranges.

        Raises:
            UnavailableError: the broker does not respond, or the masters' administration, if it is needed.
            RefusedError: the broker refused the connection or the request.
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
        """Store ``offset`` as the offset of ``group`` in ``partition``."""
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
                    f"broker {broker_id} does not support exact ranges, and {error.what}",
                    applied=False,
                    why="Apache's brokers report removed records through their HTTP administration only",
                    hint="set tubemq.http to HOST:PORT of the master's administration (webPort in its master.ini)",
                ) from error
        http = self._webs.get(broker_id)
        if http is None:
            raise RefusedError(
                f"the administration at {self._options.administration} does not list broker {broker_id} or its HTTP "
                "port",
                hint="set tubemq.http to the administration of the masters in tubemq.master",
            )
        return http


class _Retries:
    """Retries of one request, until ``timeout_s`` after its first failure. Create it at the first failure."""

    def __init__(self, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        self._failing_since = clock()

    def failed(self, error: UnavailableError) -> None:
        """Wait before the next attempt, or raise ``error`` if the deadline has passed."""
        pause_s = self._backoff.failed()
        if self._clock() - self._failing_since + pause_s > self._timeout_s:
            raise UnavailableError(
                f"{error.what} (tried for {self._timeout_s:g} s)",
                applied=error.applied,
                why=error.why,
                hint=error.hint or "start TubeMQ, check tubemq.master, or raise tubemq.timeoutMs",
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
    """Return the number of messages of a batch from ``start`` to ``end``; the brokers count them.

    ``options`` are the options of the source; ``start`` and ``end`` are its offsets, as dictionaries or as the JSON
    text in progress reports and checkpoints. Partitions that only one of them has are not counted: a partition that is
    new in ``end`` has no messages in this batch (the source stores a new partition one batch before it reads it). With
    ``exact`` false, the filter is ignored and Apache's brokers count the whole store: an upper limit, for which no
    messages are read.

    Raises:
        ConfigError: the options or offsets do not belong to this source.
        UnavailableError: TubeMQ did not respond in time.
        DataLossError: part of the range is no longer stored.
    """
    last = _document(end)
    begin, stop, epochs = from_json(_document(start)), from_json(last), epochs_of(last)
    pieces = slices({partition: begin.get(partition, offset) for partition, offset in stop.items()}, stop)
    with TubeClient.from_options(SourceOptions.parse(options), servers=servers) as tube:
        count = tube.count if exact else tube.weigh
        return sum(count(piece, epochs.get(piece.partition)) for piece in pieces)


def header_values(
    options: SourceOptions,
    start: PartitionOffsets,
    end: PartitionOffsets,
    name: str,
    *,
    max_records: int,
    servers: ServerAccess | None = None,
) -> list[str]:
    """Return the values of the header ``name`` of the first ``max_records`` records of each partition of a batch.

    Apache's brokers, which cannot read a range without a group, have none.

    Raises:
        UnavailableError: TubeMQ did not respond in time.
        DataLossError: part of the range is no longer stored.
    """
    from penstock.tube.record import Record

    found: list[str] = []
    part = f"{name}=".encode()
    with TubeClient.from_options(options, servers=servers) as tube:
        for piece in slices({partition: start.get(partition, offset) for partition, offset in end.items()}, end):
            if not tube.has_ranges(piece.partition):
                continue
            stop, _ = tube.plan(piece, max_records)
            for batch in tube.read(piece._replace(end=stop)):
                for data, flag in zip(batch.payloads, batch.flags.tolist(), strict=True):
                    if part in data:  # most records have no such header, and need not be decoded
                        headers = Record.decode(data, flag).headers
                        found += [value for header, value in headers if header == name and isinstance(value, str)]
    return found


def _document(offset: Mapping[str, Mapping[str, int]] | str) -> Mapping[str, Mapping[str, int]]:
    return dict(json.loads(offset)) if isinstance(offset, str) else offset


def _bounds_of(partition: TopicPartition) -> Callable[[BrokerReader], Bounds]:
    def bounds(reader: BrokerReader) -> Bounds:
        found, epoch = reader.bounds_and_epoch(partition.topic, partition.partition)
        return Bounds(*found)._replace(epoch=epoch)

    return bounds


def _uncountable(piece: Slice, offset: int) -> DataLossError:
    return DataLossError(
        f"{piece.partition}: the messages between offset {offset} and {piece.end} cannot be counted",
        why="the log ends before the first of these offsets: the broker lost its newest messages",
        hint="check the broker's data directory; set the source option failOnDataLoss=false to continue",
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


def filter_by_type(types: Collection[str]) -> Callable[[MessageBatch], MessageBatch]:
    """Return a function that filters batches by message type; messages without a type are dropped."""
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
    # Writers put the type first; readers accept it anywhere in the attributes.
    start = 4 if payload.startswith(_TYPE, 4) else payload.find(b"," + _TYPE, 4, end) + 1
    if start == 0:
        return None
    start += len(_TYPE)
    stop = payload.find(b",", start, end)
    return payload[start : end if stop < 0 else stop].strip()


@contextmanager
def explain_missing_topic(then: str, *, why: str, hint: str, option: str = "tubemq.topic") -> Iterator[None]:
    """Add context to the error about a topic that does not exist.

    ``then`` is the consequence, ``why`` the cause, ``hint`` the remedy, and ``option`` the option with the topic.

    Raises:
        ConfigError: the error raised in the block, with this context if it is about a missing topic.
    """
    try:
        yield
    except ConfigError as error:
        if "does not exist" not in error.what:
            raise
        raise ConfigError(f"{error.what}: {then}", option=option, why=why, hint=hint) from error
