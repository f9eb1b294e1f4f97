"""The tube as a source sees it: which partitions there are, how far they reach, what is in a range.

Blocking, for one thread: the driver's planning process and the tasks in executors each make their own. What the
network does wrong is tried again here, up to a deadline, and then raised; an empty answer always means that there was
no data. Connections are kept per broker and never shared between processes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

from penstock.errors import ConfigError, DataLossError, UnavailableError
from penstock.runtime.login import ANYBODY, Login
from penstock.spark.offsets import (
    INDEX_RECORD_BYTES,
    Bounds,
    Partition,
    Positions,
    Slice,
    Times,
    Wanted,
    by_partition,
    check_kept,
    from_json,
    resolve,
    slices,
)
from penstock.spark.options import SourceOptions

__all__ = ["ALL_MESSAGES", "Address", "Batch", "Client", "Tube", "count_rows"]

ALL_MESSAGES = 2**31 - 1
"""As many as one plan can ask for (int32 on the wire)."""

_ATTEMPT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_STORE_STEP = 10_000  # partition id = store * 10,000 + number

_log = logging.getLogger(__name__)

T = TypeVar("T")
Address = tuple[str, int]


class Batch(Protocol):
    """Messages of one partition in order, as columns of equal length."""

    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def append_times(self) -> Sequence[int]: ...
    @property
    def flags(self) -> Sequence[int]: ...
    @property
    def payloads(self) -> Sequence[bytes]: ...


class _PartitionInfo(Protocol):
    @property
    def broker_id(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def partition(self) -> int: ...


class _RangeReader(Protocol):
    def bounds(self, topic: str, partition: int) -> tuple[int, int]: ...
    def offset_at(self, topic: str, partition: int, time_ms: int) -> int: ...
    def plan(self, topic: str, partition: int, start: int, end: int, max_messages: int) -> tuple[int, int]: ...
    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Batch]: ...
    def close(self) -> None: ...


class Client(Protocol):
    """What is needed of :mod:`penstock.tube.reader`."""

    def partitions(self, masters: str, topic: str) -> Sequence[_PartitionInfo]: ...
    def connect(self, host: str, port: int) -> _RangeReader: ...


class _TubeClient:
    """The real one. Imported on first use: the data source must be importable without a trace of the tube."""

    def __init__(self, timeout_s: float, login: Login) -> None:
        self._timeout_s = timeout_s
        self._login = login.client()

    def partitions(self, masters: str, topic: str) -> Sequence[_PartitionInfo]:
        from penstock.tube import reader

        return reader.partitions(masters, topic, timeout_s=self._timeout_s, **self._login)

    def connect(self, host: str, port: int) -> _RangeReader:
        from penstock.tube import reader

        return reader.RangeReader(host, port, timeout_s=self._timeout_s, **self._login)


class Tube:
    """Masters and brokers behind one face. Close it, or use it in a ``with`` block.

    ``login``: who asks; its files are read here, so ConfigError says that one cannot be used.
    """

    def __init__(
        self,
        masters: str,
        timeout_ms: int,
        *,
        login: Login = ANYBODY,
        client: Client | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._masters = masters
        self._timeout_s = timeout_ms / 1000
        # A broker may have moved: its address is asked for again long before the deadline.
        self._client = client if client is not None else _TubeClient(min(self._timeout_s, _ATTEMPT_S), login)
        self._clock = clock
        self._sleep = sleep
        self._addresses: dict[tuple[str, int], Address] = {}
        self._found: dict[tuple[str, ...], tuple[float, list[Partition]]] = {}
        self._readers: dict[tuple[str, int], _RangeReader] = {}

    @classmethod
    def of(cls, options: SourceOptions, *, timeout_ms: int | None = None, client: Client | None = None) -> Self:
        """The tube that ``options`` name; ``timeout_ms`` instead of theirs."""
        return cls(options.masters, timeout_ms or options.timeout_ms, login=options.login, client=client)

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

    def partitions(
        self, topics: Iterable[str], *, required: Collection[Partition] = (), max_age_s: float = 0.0
    ) -> list[Partition]:
        """All partitions of ``topics``, sorted.

        ``required`` were there before: while one of them is missing (its broker restarts and has not registered
        again) the question is repeated up to the deadline. A topic that nothing is required of must exist at once.
        An answer that is not older than ``max_age_s`` is used again, unless a broker failed since.

        Raises:
            UnavailableError: no master answered, or a required partition stayed away.
            ConfigError: a topic does not exist.
        """
        wanted = tuple(topics)
        asked_at, known = self._found.get(wanted, (0.0, []))
        if known and self._clock() - asked_at < max_age_s and set(required) <= set(known):
            return known

        def ask() -> list[Partition]:
            found: list[Partition] = []
            for topic in wanted:
                partitions = self._discover(topic)
                if not partitions and not any(partition.topic == topic for partition in required):
                    raise ConfigError(
                        f"topic {topic!r} does not exist at tube master {self._masters}",
                        option="subscribe",
                        do="create it (penstock tube topics lists what there is), or correct subscribe or assign",
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

    def address(self, partition: Partition) -> Address | None:
        """Where the broker of ``partition`` was seen last; a task that is told need not ask a master."""
        return self._addresses.get((partition.topic, partition.broker_id))

    def bounds(self, partitions: Iterable[Partition]) -> dict[Partition, Bounds]:
        """Oldest kept position and durable end of each of ``partitions``; partitions of one store are asked once."""
        of_store: dict[tuple[str, int, int], Bounds] = {}
        result: dict[Partition, Bounds] = {}
        for partition in partitions:
            store = (partition.topic, partition.broker_id, partition.partition // _STORE_STEP)
            if store not in of_store:
                of_store[store] = Bounds(*self._ask(partition, _bounds_of(partition)))
            result[partition] = of_store[store]
        return result

    def offset_at(self, partition: Partition, time_ms: int) -> int:
        """Where the first message stands that the partition's store took at ``time_ms`` or later; its end if none."""
        topic, _, number = partition
        return self._ask(partition, lambda reader: reader.offset_at(topic, number, time_ms))

    def positions(self, wanted: Wanted, bounds: Mapping[Partition, Bounds], option: str) -> Positions:
        """What ``wanted``, of the option ``option``, means for exactly the partitions in ``bounds``.

        Raises:
            ConfigError: as :func:`resolve`; or a partition has nothing so new as is asked for.
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
        """The partition's own messages in ``piece``."""
        position, total = piece.start, 0
        while position < piece.end:
            reached, count = self.plan(piece._replace(start=position), ALL_MESSAGES)
            if reached <= position:
                raise _stuck(piece, position)
            position, total = reached, total + count
        return total

    def read(self, piece: Slice, *, address: Address | None = None, fail_on_data_loss: bool = True) -> Iterator[Batch]:
        """Exactly the messages of ``piece``, in order, each time the same; resumes where a connection broke.

        ``address`` is where the broker was when the range was planned; a master is asked if it is not there now.

        Raises:
            UnavailableError: nothing came for as long as the deadline says.
            DataLossError: something in ``piece`` is gone. With ``fail_on_data_loss`` false reading goes on at the
                oldest position that is kept, or behind the gap.
        """
        partition, position, end = piece
        if address is not None:
            self._addresses.setdefault((partition.topic, partition.broker_id), address)
        attempts = _Attempts(self._timeout_s, self._clock, self._sleep)
        while position < end:
            try:
                for batch in self._reader(partition).read(partition.topic, partition.partition, position, end):
                    if len(batch.offsets):
                        yield batch
                        position = int(batch.offsets[-1]) + INDEX_RECORD_BYTES
                    attempts.progress()
                return
            except UnavailableError as error:
                self._forget(partition)
                attempts.failed(error)
            except DataLossError as error:
                position, end = self._what_is_left(
                    error, Slice(partition, position, end), fail_on_data_loss=fail_on_data_loss
                )

    def _what_is_left(self, error: DataLossError, piece: Slice, *, fail_on_data_loss: bool) -> tuple[int, int]:
        """Start and end of what to go on with after ``error``; raises it where that is not wanted or gains nothing."""
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

    def _discover(self, topic: str) -> list[Partition]:
        found = []
        for info in self._client.partitions(self._masters, topic):
            self._addresses[topic, info.broker_id] = (info.host, info.port)
            found.append(Partition(topic, info.broker_id, info.partition))
        return found

    def _reader(self, partition: Partition) -> _RangeReader:
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
        reader = self._readers.get(address)
        if reader is None:
            reader = self._readers[address] = self._client.connect(*address)
        return reader

    def _forget(self, partition: Partition) -> None:
        """Drop what may be stale after a failure: the connection, the address, what there was."""
        self._found.clear()
        address = self._addresses.pop((partition.topic, partition.broker_id), None)
        reader = self._readers.pop(address, None) if address is not None else None
        if reader is not None:
            with suppress(OSError, UnavailableError):
                reader.close()

    def _ask(self, partition: Partition, question: Callable[[_RangeReader], T]) -> T:
        def ask() -> T:
            try:
                return question(self._reader(partition))
            except UnavailableError:
                self._forget(partition)
                raise

        return self._again(ask)

    def _again(self, ask: Callable[[], T]) -> T:
        attempts = _Attempts(self._timeout_s, self._clock, self._sleep)
        while True:
            try:
                return ask()
            except UnavailableError as error:
                attempts.failed(error)


def count_rows(
    options: Mapping[str, str],
    start: Mapping[str, Mapping[str, int]] | str,
    end: Mapping[str, Mapping[str, int]] | str,
    client: Client | None = None,
) -> int:
    """How many messages the source gives for a batch from ``start`` to ``end``, counted by the brokers.

    ``options`` are those of the source; ``start`` and ``end`` are its offsets, as dictionaries or as the JSON text
    that progress reports and checkpoints hold. Partitions that only one of them has are not counted, except that
    partitions new in ``end`` hold nothing up to it (the source notes a new partition one batch before it reads it).

    Raises:
        ConfigError: options or offsets are not of this source.
        UnavailableError: the tube did not answer in time.
        DataLossError: part of the range is no longer kept.
    """
    begin, stop = _offset(start), _offset(end)
    pieces = slices({partition: begin.get(partition, position) for partition, position in stop.items()}, stop)
    with Tube.of(SourceOptions.parse(options), client=client) as tube:
        return sum(tube.count(piece) for piece in pieces)


def _offset(offset: Mapping[str, Mapping[str, int]] | str) -> Positions:
    return from_json(json.loads(offset) if isinstance(offset, str) else offset)


class _Attempts:
    """Pauses between attempts, growing, until a deadline that starts with the first failure after progress."""

    def __init__(self, timeout_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._failing_since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def progress(self) -> None:
        self._failing_since = None
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, error: UnavailableError) -> None:
        """Wait, or raise ``error`` again when the deadline has passed."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since + self._pause_s > self._timeout_s:
            raise UnavailableError(
                f"{error.what} (tried for {self._timeout_s:g} s)",
                applied=error.applied,
                why=error.why,
                do=error.do or "start the tube, check tubemq.master, or raise tubemq.timeoutMs",
            ) from error
        self._sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)


def _bounds_of(partition: Partition) -> Callable[[_RangeReader], tuple[int, int]]:
    return lambda reader: reader.bounds(partition.topic, partition.partition)


def _stuck(piece: Slice, position: int) -> DataLossError:
    return DataLossError(
        f"{piece.partition}: nothing between position {position} and {piece.end} can be counted",
        why="the log ends before that position: the broker lost its newest messages",
        do="check the broker's data directory; set failOnDataLoss=false to go on",
    )
