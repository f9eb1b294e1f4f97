"""``penstock-kafka``, the records of topics of Kafka as a source of pipelines, without jars.

Offsets are ``{topic: {"<partition>": n}}``, half-open ranges ``[start, end)``; they are in Spark's checkpoint only, no
group of Kafka is used. Compaction, aborted transactions and the markers of transactions leave gaps: the number of
offsets is not that of records, and a range ends at a record at or after its end, or at the end of the partition. With
``read_committed`` the end of a partition is its last stable offset, so a range has no open transaction, and is the same
each time. A partition that is new gets its offset 0 in one batch, and is read from there by the next one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from penstock.errors import ConfigError, DataLossError, PenstockError, RefusedError, UnavailableError
from penstock.runtime.io.tls import read_password
from penstock.runtime.kafka.client import KafkaTopics
from penstock.runtime.kafka.config import needs_kafka
from penstock.spark.local_sources import LocalSource
from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.offsets import share_limit
from penstock.spark.tube.options import WITH_HEADERS
from penstock.spark.tube.source import SupportsTriggerAvailableNow

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Consumer, KafkaError, Message
    from confluent_kafka.admin import AdminClient, TopicDescription
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = [
    "KafkaDataSource",
    "KafkaLog",
    "KafkaRange",
    "KafkaReader",
    "KafkaStreamReader",
    "next_offsets",
    "ranges",
    "record_batch",
]

Offsets = Mapping[str, Mapping[str, int]]
Key = TypeVar("Key")
Result = TypeVar("Result")

TIMEOUT_S: Final = 30.0
"""Maximum time without an answer."""
_LAST_MS: Final = (1 << 63) - 1
"""The last time that a request can have."""
_SLICE_S: Final = 1.0
"""Time after which a call of the client returns, so that errors of connections are seen."""
_PAUSE_S: Final = 0.1
"""Time between a request that fails temporarily and its repetition."""
_RECORDS: Final = 2_000
"""Maximum number of records in a record batch."""
_UNAUTHENTICATED: Final = frozenset({"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM"})
_DENIED: Final = frozenset({"TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"})
_UNKNOWN: Final = frozenset({"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"})
_NO_LEADER: Final = _UNKNOWN | {
    *("NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "REPLICA_NOT_AVAILABLE", "OFFSET_NOT_AVAILABLE"),
    *("FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "KAFKA_STORAGE_ERROR"),
}
"""Errors of a partition that exists while it has no leader, or its leader does not know it yet; the client of the
administration does not retry after them."""
_OUT_OF_RANGE: Final = frozenset({"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"})


class KafkaRange(InputPartition):
    """Input of one task: the records of a partition in ``[start, end)``."""

    def __init__(self, topic: str, partition: int, start: int, end: int) -> None:
        super().__init__(None)
        self.topic = topic
        self.partition = partition
        self.start = start
        self.end = end


def ranges(start: Offsets, end: Offsets) -> list[KafkaRange]:
    """Return the nonempty ranges between two offsets. A partition that is only in ``end`` has none: see the module."""
    return [
        KafkaRange(topic, int(partition), start[topic][partition], last)
        for topic, places in sorted(end.items())
        for partition, last in sorted(places.items(), key=lambda place: int(place[0]))
        if start.get(topic, {}).get(partition, last) < last
    ]


def next_offsets(start: Offsets, ends: Offsets, max_records: int) -> dict[str, dict[str, int]]:
    """Return the end of the batch after ``start``: at most ``max_records`` offsets of the partitions up to ``ends``."""
    found = {topic: dict(places) for topic, places in start.items()}
    waiting = ranges(start, ends)
    for place, share in zip(waiting, share_limit(max_records, [p.end - p.start for p in waiting]), strict=True):
        found[place.topic][str(place.partition)] = place.start + share
    for topic, places in ends.items():
        for partition in places:
            found.setdefault(topic, {}).setdefault(partition, 0)
    return found


class KafkaLog:
    """A client that reads topics; it connects when it is first used, and ``close`` ends it."""

    def __init__(self, options: KafkaTopics, timeout_s: float = TIMEOUT_S) -> None:
        self._options = options
        self._timeout_s = timeout_s
        self._errors: list[KafkaError] = []
        self._opened: Consumer | None = None
        self._asking: AdminClient | None = None

    def __enter__(self) -> KafkaLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        self._asking = None

    def bounds(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        """Return the earliest offset of each partition, and the end up to which records can be read.

        The number of requests depends on the number of brokers, not on that of partitions.

        Raises:
            UnavailableError: Kafka did not answer.
            ConfigError: a topic does not exist.
            RefusedError: the connection was refused.
        """
        # Before the imports: it reports a missing library.
        admin = self._admin
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        described = self._described()
        places = [
            TopicPartition(topic, partition.id)
            for topic in self._options.topics
            for partition in sorted(described[topic].partitions, key=lambda each: each.id)
        ]
        isolation = IsolationLevel[self._options.isolation.upper()]

        def offsets(at: OffsetSpec) -> dict[str, dict[str, int]]:
            asked = dict.fromkeys(places, at)
            answers = self._answers(
                lambda: admin.list_offsets(asked, isolation_level=isolation, request_timeout=self._timeout_s),
                _NO_LEADER,
            )
            found: dict[str, dict[str, int]] = {}
            for place in places:
                found.setdefault(place.topic, {})[str(place.partition)] = answers[place].offset
            return found

        first, last = OffsetSpec.earliest(), OffsetSpec.latest()
        return offsets(first), offsets(last)

    def at(self, time_ms: int, ends: Offsets) -> dict[str, dict[str, int]]:
        """Return for each partition in ``ends`` the offset of its first record with this timestamp or a later one.

        It is the end of the partition if there is none. ``time_ms``: ms since 1970. Raises as :meth:`bounds`.
        """
        from confluent_kafka import TopicPartition

        # Negative times are names of Kafka: -1 is the end of the partition.
        at_ms = min(max(time_ms, 0), _LAST_MS)
        asked = [TopicPartition(topic, int(n), at_ms) for topic, places in ends.items() for n in places]
        found: dict[str, dict[str, int]] = {}
        for place in self._call(partial(self._consumer.offsets_for_times, asked)):
            if place.error is not None:
                raise self._translated(place.error, place.topic)
            end = ends[place.topic][str(place.partition)]
            at = end if place.offset < 0 else min(place.offset, end)
            found.setdefault(place.topic, {})[str(place.partition)] = at
        return found

    def check(self, start: Offsets, lows: Offsets, ends: Offsets) -> None:
        """Raise DataLossError if records from ``start`` on were deleted."""
        for topic, places in start.items():
            for partition, offset in places.items():
                low, end = lows.get(topic, {}).get(partition), ends.get(topic, {}).get(partition)
                if low is None or end is None:
                    raise self._lost(topic, partition, offset, "the partition no longer exists")
                if not low <= offset <= end:
                    raise self._lost(topic, partition, offset, f"it has the offsets {low} to {end}")

    def read(self, place: KafkaRange, together: int = _RECORDS) -> Iterator[list[Message]]:
        """Yield the records of ``place`` in groups of at most ``together``, in order.

        Raises:
            DataLossError: offsets of the range were deleted.
            UnavailableError: Kafka did not answer.
            RefusedError: the connection was refused.
        """
        from confluent_kafka import TopicPartition

        consumer = self._consumer
        consumer.assign([TopicPartition(place.topic, place.partition, place.start)])
        seen = time.monotonic()
        while True:
            # With a time limit, the client waits for the number of records that is requested: at the end of a partition
            # until the limit.
            messages = consumer.consume(1, _SLICE_S)
            if messages and together > 1:
                messages += consumer.consume(together - 1, 0)
            self._check_connection()
            found: list[Message] = []
            is_done = False
            for message in messages:
                offset = message.offset()
                if (error := message.error()) is not None:
                    if error.name() == "_PARTITION_EOF" and offset is not None:
                        if offset < place.end:
                            raise self._lost(
                                place.topic, str(place.partition), place.end, f"the partition ends at offset {offset}"
                            )
                    elif _is_temporary(error):
                        continue
                    elif error.name() in _OUT_OF_RANGE:
                        raise self._lost(place.topic, str(place.partition), place.start, error.str())
                    else:
                        raise self._translated(error, place.topic)
                if error is not None or offset is None or offset >= place.end:
                    is_done = True
                    break
                found.append(message)
                if offset + 1 == place.end:
                    is_done = True
                    break
            if found:
                yield found
            if is_done:
                consumer.unassign()
                return
            if messages:
                seen = time.monotonic()
            elif time.monotonic() - seen > self._timeout_s:
                raise self._unavailable(f"no record of {place.topic}:{place.partition} in {self._timeout_s:g} s")

    def find(self, start: Offsets, header: str) -> tuple[dict[bytes, tuple[str, int, int]], set[tuple[str, int]]]:
        """Return topic, partition and offset of the records from ``start`` up to now, by their ``header``; and the
        partitions from which some of these records were deleted.

        Records without the header are left out. Raises as :meth:`read`, but for records that were deleted.
        """
        lows, ends = self.bounds()
        found: dict[bytes, tuple[str, int, int]] = {}
        deleted: set[tuple[str, int]] = set()
        for topic, places in start.items():
            for partition, offset in places.items():
                low, end = lows.get(topic, {}).get(partition), ends.get(topic, {}).get(partition, -1)
                if low is None or not low <= offset <= end:
                    deleted.add((topic, int(partition)))
                first = max(offset, low or 0)
                if first >= end:
                    continue
                try:
                    for message in chain.from_iterable(self.read(KafkaRange(topic, int(partition), first, end))):
                        marks = (pair["value"] for pair in _headers(message) if pair["key"] == header)
                        if isinstance(mark := next(marks, None), bytes):
                            found[mark] = (topic, int(partition), message.offset() or 0)
                except DataLossError:
                    deleted.add((topic, int(partition)))
        return found, deleted

    def without_value(self, places: Iterable[tuple[str, int, int]]) -> set[tuple[str, int, int]]:
        """Return those of ``places`` (topic, partition, offset) whose record has no value, or was deleted.

        An empty value is one. Raises as :meth:`read`, but for records that were deleted.
        """
        found = set()
        for topic, partition, offset in places:
            try:
                (message,) = next(self.read(KafkaRange(topic, partition, offset, offset + 1), 1), [None])
            except DataLossError:
                message = None
            if message is None or message.value() is None:
                found.add((topic, partition, offset))
        return found

    def topic_ids(self) -> dict[str, str]:
        """Return the ids of the topics; one that is created again has another. Raises as :meth:`bounds`."""
        return {topic: str(found.topic_id) for topic, found in self._described().items()}

    def setting(self, topic: str, name: str) -> str | None:
        """Return the setting ``name`` of ``topic``; None if the user may not know it.

        Raises:
            UnavailableError: Kafka did not answer.
            ConfigError: the topic does not exist.
            RefusedError: the connection was refused.
        """
        admin = self._admin
        from confluent_kafka.admin import ConfigResource

        wanted = ConfigResource(ConfigResource.Type.TOPIC, topic)
        try:
            (found,) = self._answers(lambda: admin.describe_configs([wanted], request_timeout=self._timeout_s)).values()
        except RefusedError:
            self._check_connection()
            return None
        entry = found.get(name)
        return None if entry is None else entry.value

    @property
    def _consumer(self) -> Consumer:
        if self._opened is None:
            self._opened = self._reader()
        return self._opened

    @property
    def _admin(self) -> AdminClient:
        if self._asking is None:
            with needs_kafka("source"):
                from confluent_kafka.admin import AdminClient
            self._asking = self._connected(AdminClient, {})
        return self._asking

    def _reader(self) -> Consumer:
        with needs_kafka("source"):
            from confluent_kafka import Consumer
        settings: dict[str, Any] = {
            # The client demands a name; nothing is committed, and partitions are assigned, so no group exists.
            "group.id": "penstock",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": self._options.isolation,
            "queued.max.messages.kbytes": 32 << 10,
            # Records of a range exist, so Kafka waits only before it reports the end of a partition, which is needed if
            # the range ends with a marker of a transaction [500].
            "fetch.wait.max.ms": 20,
            # Time without a fetch after the queue was full: a task would empty the queue in this time [1000].
            "fetch.queue.backoff.ms": 20,
        }
        return self._connected(Consumer, settings)

    def _connected(self, client: Callable[[dict[str, Any]], Result], settings: dict[str, Any]) -> Result:
        from confluent_kafka import KafkaException

        options = self._options
        if options.connection.sasl is not None and options.connection.sasl.token_file is not None:
            # The client would wait for the token, and would not report why there is none.
            read_password(options.connection.sasl.token_file, "token_file")
        own = {"error_cb": self._errors.append, "log_level": 0}
        try:
            return client({**options.connection.settings(), **settings, **own})
        except KafkaException as error:
            raise ConfigError(
                f"a client of {options.connection.shown} cannot be created",
                option="source",
                why=str(error.args[0].str()),
                hint="check `tls`, `sasl` and their files, on the driver and on the executors",
            ) from error

    def _described(self) -> dict[str, TopicDescription]:
        """Return the descriptions of the topics. Unlike a request for metadata, this never creates a topic."""
        admin = self._admin
        from confluent_kafka import TopicCollection

        wanted = TopicCollection(list(self._options.topics))
        return self._answers(lambda: admin.describe_topics(wanted, request_timeout=self._timeout_s))

    def _answers(
        self, request: Callable[[], dict[Key, Future[Result]]], temporary: Container[str] = ()
    ) -> dict[Key, Result]:
        """Return the results of ``request``, which is repeated while it fails temporarily: also with the errors
        ``temporary``. Raises as :meth:`bounds`."""
        from confluent_kafka import KafkaException

        ends = time.monotonic() + self._timeout_s
        while True:
            found: dict[Key, Result] = {}
            topic = ", ".join(self._options.topics)
            try:
                for key, answer in request().items():
                    # A topic, one of its partitions, or a resource with its name.
                    topic = key if isinstance(key, str) else getattr(key, "topic", getattr(key, "name", topic))
                    found[key] = self._result(answer)
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                is_temporary = _is_temporary(error) or error.name() in temporary
                if not is_temporary or time.monotonic() > ends:
                    raise self._translated(error, topic) from failure
                # Leaders change; until then each answer would be the same.
                self._admin.poll(_PAUSE_S)
            else:
                return found

    def _result(self, answer: Future[Result]) -> Result:
        """Wait for ``answer``, which has its own time limit, and report a refused connection before."""
        while True:
            self._admin.poll(0)
            self._check_connection()
            try:
                return answer.result(_SLICE_S)
            except TimeoutError:
                continue

    def _call(self, request: Callable[[float], Result]) -> Result:
        """Return the result of ``request``, which is repeated while it takes too long."""
        from confluent_kafka import KafkaException

        consumer = self._consumer
        ends = time.monotonic() + self._timeout_s
        while True:
            try:
                return request(_SLICE_S)
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if not _is_temporary(error):
                    raise self._translated(error, ", ".join(self._options.topics)) from failure
                consumer.poll(0)
                self._check_connection()
                if time.monotonic() > ends:
                    raise self._unavailable(error.str()) from failure

    def _check_connection(self) -> None:
        for error in self._errors:
            if error.name() in _UNAUTHENTICATED or "certificate verify failed" in error.str():
                raise self._translated(error, ", ".join(self._options.topics))

    def _translated(self, error: KafkaError, topic: str) -> PenstockError:
        code, why, shown = error.name(), error.str(), self._options.connection.shown
        if code in _UNKNOWN:
            return ConfigError(
                f"{shown} has no topic {topic!r}",
                option="topics",
                why=why,
                hint=f"create it with kafka-topics.sh --create --topic {topic}, or correct topics",
            )
        if code in _DENIED:
            return RefusedError(
                f"topic {topic!r} of {shown} cannot be read",
                why=why,
                hint="permit the user Read and Describe of the topic",
            )
        if code in _UNAUTHENTICATED or "certificate verify failed" in why:
            return RefusedError(
                f"{shown} cannot be read", why=why, hint="check `sasl` and `tls` of the source, and the user in Kafka"
            )
        return self._unavailable(why)

    def _unavailable(self, why: str) -> UnavailableError:
        named = [found.str() for found in self._errors if found.name() != "_ALL_BROKERS_DOWN"]
        return UnavailableError(
            f"{self._options.connection.shown} does not answer",
            why=named[-1] if named else why,
            hint="start the brokers, or correct bootstrap",
        )

    def _lost(self, topic: str, partition: str, offset: int, why: str) -> DataLossError:
        return DataLossError(
            f"{topic}:{partition} of {self._options.connection.shown} has no records from offset {offset} on any more",
            why=f"{why}; retention or another program deleted records, or the topic was created again",
            hint="increase retention.ms of the topic; to continue with the records that exist, give the sink that "
            "failed a new name: it reads from `start` of the source on, also what it has read of other partitions",
        )


def _is_temporary(error: KafkaError) -> bool:
    return error.retriable() or error.name() in ("_TRANSPORT", "_TIMED_OUT", "_ALL_BROKERS_DOWN")


def record_batch(topic: str, partition: int, messages: Sequence[Message]) -> pa.RecordBatch:
    """Return ``messages`` as a record batch of the source's columns. A record without a value has an empty one."""
    import pyarrow as pa

    from penstock.spark.tube.arrow import arrow_schema

    schema = arrow_schema(WITH_HEADERS)
    times = [message.timestamp() for message in messages]
    columns: dict[str, list[Any]] = {
        "key": [_bytes(message.key()) for message in messages],
        "value": [_bytes(message.value()) or b"" for message in messages],
        "topic": [topic] * len(messages),
        "partition": [partition] * len(messages),
        "broker": [0] * len(messages),
        "offset": [message.offset() for message in messages],
        "timestamp": [ms * 1000 if kind else None for kind, ms in times],
        # The client numbers types from 1 (created), Spark from 0.
        "timestampType": [max(kind - 1, -1) for kind, _ in times],
        "headers": [_headers(message) for message in messages],
    }
    arrays = [
        pa.array(columns[field.name], pa.int64()).cast(field.type)
        if field.name == "timestamp"
        else pa.array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _headers(message: Message) -> list[dict[str, str | bytes | None]]:
    pairs = message.headers() or []
    assert isinstance(pairs, list)  # a mapping only before a record is sent
    return [{"key": name, "value": _bytes(value)} for name, value in pairs]


def _bytes(given: str | bytes | None) -> bytes | None:
    return given.encode() if isinstance(given, str) else given


def _read(options: KafkaTopics, place: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(place, KafkaRange)
    with KafkaLog(options) as log:
        for messages in log.read(place):
            yield record_batch(place.topic, place.partition, messages)


@plain_errors
class KafkaReader(DataSourceReader):
    """Batch reader of the records between two offsets."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._read_options = KafkaTopics.parse(options)
        self._start: Offsets = json.loads(options["start"])
        self._end: Offsets = json.loads(options["end"])

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each partition with records in the range."""
        return ranges(self._start, self._end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the records of one task, in order."""
        return _read(self._read_options, partition)


@plain_errors
class KafkaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader. It runs in one process next to the driver; executors ``read`` with copies."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._read_options = KafkaTopics.parse(options)
        self._start: Offsets = json.loads(options["start"])
        self._reached: Offsets = self._start
        self._target: Offsets | None = json.loads(options["end"]) if "end" in options else None
        self._log: KafkaLog | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_log": None}

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the offsets that the pipeline has stored."""
        return {topic: dict(places) for topic, places in self._start.items()}

    def latestOffset(self, start: Offsets | None = None, limit: ReadLimit | None = None) -> dict[str, dict[str, int]]:
        """Return the end of the next batch: at most ``maxRecords`` offsets after ``start``.

        Spark 4.1 passes no ``start``. When it restarts a query, it first asks for the partitions of the empty range at
        the end of the last batch.
        """
        begin = self._reached if start is None else start
        log = self._opened()
        lows, ends = log.bounds()
        log.check(begin, lows, ends)
        if self._target is not None:
            # What was added since, and new partitions, belong to the next run.
            ends = {
                topic: {number: min(end, ends.get(topic, {}).get(number, 0)) for number, end in places.items()}
                for topic, places in self._target.items()
            }
        return next_offsets(begin, ends, self._read_options.max_records)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return no limit: ``latestOffset`` applies ``maxRecords``."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of the run, unless it has one: the records that exist now."""
        if self._target is None:
            _, self._target = self._opened().bounds()

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """Return a task for each partition with records in the range; the result depends on the arguments only."""
        self._reached = end
        return ranges(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the records of one task, in order."""
        return _read(self._read_options, partition)

    def commit(self, end: Offsets) -> None:
        """Do nothing: the query's checkpoint stores the offsets."""

    def stop(self) -> None:
        """End the connections."""
        if self._log is not None:
            self._log.close()

    def _opened(self) -> KafkaLog:
        if self._log is None:
            self._log = KafkaLog(self._read_options)
        return self._log


@plain_errors
class KafkaDataSource(LocalSource):
    """``penstock-kafka``. Options: those of :class:`KafkaTopics`, ``start``; for a batch and a replay also ``end``."""

    format_name = "penstock-kafka"
    readers = (KafkaReader, KafkaStreamReader)
