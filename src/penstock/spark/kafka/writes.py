"""Write the rows of a batch to a topic of Kafka once, also if processes are killed and the batch is repeated.

One task writes a batch, in one transaction of Kafka:

1. It initializes a transactional producer. Its transactional id names pipeline, sink and query, so Kafka aborts an open
   transaction of an earlier attempt, and refuses all later requests of its producer.
2. It reads what the query has written: the offset that the consumer group of the same name has committed for partition
   0 of the topic is the number of the last batch plus one; its metadata has the fencing token and counts. No attempt
   can change it any more. A batch that is written is not written again, and a later token refuses the task.
3. It commits its own fencing token, if it is the first of its run, in a transaction of its own.
4. It sends the rows and the number of the batch, and commits both.

A task that was replaced fails in steps 3 and 4. A commit without an answer is decided by step 1 of the next attempt.
Consumers with ``isolation.level=read_committed`` read a batch whole, and once.

The offset of a group cannot be stored for a topic that does not exist, so the topic is fixed and must exist.

:func:`append_records` appends single records without a transaction, for redrives of dead letters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from penstock.errors import ConfigError, PenstockError, RefusedError, StorageError, UnavailableError
from penstock.runtime.io.tls import read_password
from penstock.runtime.kafka.client import LARGEST_BYTES, LARGEST_MESSAGE, FatalErrors, KafkaTopic
from penstock.runtime.kafka.config import needs_kafka
from penstock.spark.sink_rows import read_rows
from penstock.spark.written_batches import WrittenBatches
from penstock.statestore import hlc

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Consumer, KafkaError, Message, Producer

__all__ = ["AppendedRecord", "TopicBatch", "append_records", "check_topic", "write_batch", "written_batches"]

TIMEOUT_S: Final = 30.0
"""Maximum time of a request, with its repetitions."""
_SLICE_S: Final = 1.0
"""Time after which a call of the client returns, so that errors of connections are seen."""
MESSAGE_TIMEOUT_S: Final = 60.0
"""Maximum time in which a message is stored."""
_QUEUE_KB: Final = 32 << 10
"""Maximum size of waiting messages."""

Result = TypeVar("Result")


class TopicBatch(NamedTuple):
    """A batch of the query ``query`` of a sink. ``token``: the run's fencing token."""

    target: KafkaTopic
    pipeline: str
    sink: str
    query: str
    batch: int
    token: str

    @property
    def writer(self) -> str:
        """Transactional id of producers, and group that has the number of the last batch."""
        return _writer(self.pipeline, self.sink, self.query)


def _writer(pipeline: str, sink: str, query: str) -> str:
    return f"penstock/{pipeline}/{sink}/{query}"


class AppendedRecord(NamedTuple):
    """A record to append to a partition; ``timestamp_ms``: ms since 1970."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp_ms: int


class _CommittedBatch(NamedTuple):
    """Last batch of the query (-1: none), rows of it and of all since ``first``, and the fencing token of the last
    run."""

    batch: int
    rows: int
    total: int
    first: int
    token: str

    @classmethod
    def parse(cls, offset: int, metadata: str | None) -> _CommittedBatch | None:
        """Return what the committed ``offset`` with its ``metadata`` means; None if none is committed."""
        if offset < 0:
            return None
        try:
            found = json.loads(metadata or "")
            return cls(offset - 1, int(found["rows"]), int(found["total"]), int(found["first"]), str(found["token"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"Kafka has offset {offset} of the writer's group without the counts of its batch",
                why=f"another program has committed it, with the metadata {metadata!r}",
                hint="delete the offsets of the group, and start the pipeline with a new state directory",
            ) from error

    @property
    def metadata(self) -> str:
        return json.dumps({"rows": self.rows, "total": self.total, "first": self.first, "token": self.token})


def write_batch(write: TopicBatch, batches: Iterable[pa.RecordBatch]) -> int:
    """Write the rows (columns ``key``, ``value``, ``headers``) of ``write``; return the number that the topic has of
    it, which an earlier attempt may have written.

    Raises:
        UnavailableError: Kafka did not answer, or another attempt has begun; nothing is written, or all of the batch.
        RefusedError: a later run has written, or Kafka refuses the connection or a row; nothing is written.
        StorageError: the topic has a later batch.
    """
    target, session = write.target, _Session(write.target)
    with session.consumer(write.writer) as consumer, session.producer(write.writer) as producer:

        def begin(_: float) -> None:
            producer.begin_transaction()

        session.call(producer.poll, producer.init_transactions, "begin a transaction for")
        found = _read(session, consumer, target.topic)
        if found is not None and _is_written(write, found):
            return found.rows
        before = found or _CommittedBatch(-1, 0, 0, write.batch, write.token)
        if found is None or found.token != write.token:
            before = before._replace(token=write.token)
            session.call(producer.poll, begin, "begin a transaction for")
            _commit(session, producer, consumer, before)
        session.call(producer.poll, begin, "begin a transaction for")
        try:
            rows = _send(session, producer, batches)
            written = before._replace(batch=write.batch, rows=rows, total=before.total + rows)
            _commit(session, producer, consumer, written)
        except BaseException:
            with suppress(Exception), session.fatal:  # the next attempt aborts it, too
                producer.abort_transaction(_SLICE_S)
            raise
    return rows


def written_batches(target: KafkaTopic, pipeline: str, sink: str, query: str) -> WrittenBatches | None:
    """Return what the query ``query`` of a sink has written, as Kafka knows it; None if it has nothing.

    Raises:
        UnavailableError: Kafka did not answer.
        PenstockError: it refused the request.
    """
    session = _Session(target)
    with session.consumer(_writer(pipeline, sink, query)) as consumer:
        found = _read(session, consumer, target.topic)
    return (
        None if found is None or found.batch < 0 else WrittenBatches(found.batch, found.rows, found.total, found.first)
    )


def append_records(target: KafkaTopic, records: Sequence[AppendedRecord]) -> list[int]:
    """Append ``records``, each once, to all replicas; return their offsets, -1 if Kafka did not report one.

    Raises:
        UnavailableError: Kafka did not answer; some records may be stored.
        RefusedError: Kafka refuses the connection or a record; others may be stored.
    """
    session = _Session(target, purpose=_APPEND)
    deliveries = _Deliveries(session)
    offsets = [-1] * len(records)

    def delivered(index: int, headers: Headers, error: KafkaError | None, message: Message | None) -> None:
        deliveries.failed(headers, error, message)
        if error is None and message is not None:
            offset = message.offset()
            # Unknown if the message was stored by an attempt without an answer.
            offsets[index] = -1 if offset is None else offset

    with session.appender() as producer:
        for index, record in enumerate(records):
            _enqueue(
                session,
                producer,
                deliveries,
                record.headers,
                partial(delivered, index, record.headers),
                value=record.value,
                key=record.key,
                partition=record.partition,
                timestamp=record.timestamp_ms,
            )
        _wait_until_stored(session, producer, deliveries)
    return offsets


def check_topic(target: KafkaTopic, timeout_s: float) -> None:
    """Check that the topic exists and that the user may write to it, if Kafka reports permissions.

    Raises:
        UnavailableError: Kafka did not answer.
        RefusedError: the topic does not exist, or the connection was refused.
        ConfigError: a setting or file cannot be used.
    """
    session = _Session(target, timeout_s)
    with needs_kafka("kafka"):
        from confluent_kafka import TopicCollection
        from confluent_kafka.admin import AdminClient
    client = session.create(AdminClient, {})
    wanted = TopicCollection([target.topic])
    # Unlike a request for metadata, it never creates the topic.
    answer = client.describe_topics(wanted, include_authorized_operations=True, request_timeout=timeout_s)[target.topic]

    def wait(wait_s: float) -> Any:
        return answer.result(wait_s)

    found = session.call(client.poll, wait, "describe")
    # Empty if Kafka does not report them.
    operations = {operation.name for operation in found.authorized_operations or ()}
    if missing := {"READ", "WRITE"} - operations if operations else ():
        names = " and ".join(sorted(name.capitalize() for name in missing))
        raise session.refused(f"the user lacks the permission {names} of the topic", _ACLS)


def _is_written(write: TopicBatch, found: _CommittedBatch) -> bool:
    """Return True if the topic has the batch. Raises as :func:`write_batch`."""
    mine, other = hlc.parse(write.token), hlc.parse(found.token)
    if mine is None or other is None:
        raise PenstockError(f"{(found if mine else write).token!r} is not a fencing token")
    if other > mine:
        raise RefusedError(
            f"{write.target.shown} refused a batch of sink {write.sink!r}",
            why=f"the run writes under fencing token {mine}; a later run has written under {other}",
            hint="let the later run continue; to start over, stop it first",
        )
    if found.batch > write.batch:
        raise StorageError(
            f"sink {write.sink!r} cannot repeat batch {write.batch}",
            why=f"{write.target.shown} has its batch {found.batch}: the state directory is older than the topic",
            hint="restore the newest state directory, or start over with a new one and another topic",
        )
    return found.batch == write.batch


def _read(session: _Session, consumer: Consumer, topic: str) -> _CommittedBatch | None:
    from confluent_kafka import TopicPartition

    # With the isolation level of the consumer, Kafka answers after the transactions of the group have ended.
    (found,) = session.call(
        consumer.poll, lambda wait_s: consumer.committed([TopicPartition(topic, 0)], wait_s), "read the last batch of"
    )
    if found.error is not None:
        raise session.translated(found.error, "read the last batch of")
    return _CommittedBatch.parse(found.offset, found.metadata)


def _commit(session: _Session, producer: Producer, consumer: Consumer, written: _CommittedBatch) -> None:
    """Commit the open transaction with ``written``."""
    from confluent_kafka import TopicPartition

    offset = TopicPartition(session.target.topic, 0, written.batch + 1, written.metadata)
    group = consumer.consumer_group_metadata()
    session.call(
        producer.poll,
        # Not in slices: the client fails the transaction if the coordinator of the group answers later than that.
        lambda _: producer.send_offsets_to_transaction([offset], group, TIMEOUT_S),
        "store the batch's number for",
    )
    session.call(producer.poll, producer.commit_transaction, "commit a batch to")


def _send(session: _Session, producer: Producer, batches: Iterable[pa.RecordBatch]) -> int:
    """Send rows, and wait until all are stored; return their number."""
    deliveries, rows = _Deliveries(session), 0
    for batch in batches:
        for key, value, headers in read_rows(batch, ("key", "value", "headers")):
            pairs = [(pair["key"], pair["value"]) for pair in headers]
            _enqueue(session, producer, deliveries, pairs, partial(deliveries.failed, pairs), value=value, key=key)
            rows += 1
        session.serve(producer.poll, 0.0)
        deliveries.check()
    _wait_until_stored(session, producer, deliveries)
    return rows


Headers = list[tuple[str, bytes]]


class _Deliveries:
    """The first message that was not stored. It does not refer to the producer, which refers to it."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._failures: list[PenstockError] = []

    def failed(self, headers: Headers, error: KafkaError | None, _message: Message | None) -> None:
        """Remember ``error`` of the message with ``headers``, if it is one."""
        if error is not None and not self._failures:
            message = dict(headers).get("id", b"").decode()
            self._failures.append(self._session.translated(error, "write to", message))

    def check(self) -> None:
        """Raise PenstockError: a message was not stored."""
        if self._failures:
            # Not kept: its traceback refers to this list and the producer, whose threads would live on.
            raise self._failures.pop()


def _enqueue(
    session: _Session,
    producer: Producer,
    deliveries: _Deliveries,
    headers: Headers,
    on_delivery: Callable[[KafkaError | None, Message | None], None],
    **message: Any,
) -> None:
    """Give a message to the producer, when it has space for it."""
    from confluent_kafka import KafkaException

    while True:
        try:
            producer.produce(session.target.topic, headers=[*headers], on_delivery=on_delivery, **message)
        except BufferError:
            session.serve(producer.poll, _SLICE_S)
        except KafkaException as failure:
            deliveries.failed(headers, failure.args[0], None)
        else:
            return
        deliveries.check()


def _wait_until_stored(session: _Session, producer: Producer, deliveries: _Deliveries) -> None:
    # Each message is stored or fails within its timeout.
    while session.serve(producer.flush, _SLICE_S):
        deliveries.check()
        session.check()
    deliveries.check()


# Names of the client's errors, by cause
_TEMPORARY: Final = frozenset(
    (
        *("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_WAIT_COORD", "_RESOLVE", "REQUEST_TIMED_OUT"),
        *("NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "UNSTABLE_OFFSET_COMMIT"),
    )
)
_UNAUTHENTICATED: Final = frozenset({"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM"})
_DENIED: Final = frozenset(f"{name}_AUTHORIZATION_FAILED" for name in ("TOPIC", "GROUP", "TRANSACTIONAL_ID", "CLUSTER"))
_UNKNOWN: Final = frozenset({"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"})
_REPLACED: Final = frozenset({"_FATAL", "_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "_STATE"})
_TOO_LARGE: Final = frozenset({"MSG_SIZE_TOO_LARGE", "INVALID_MSG_SIZE"})
_ROW: Final = _TOO_LARGE | {"INVALID_MSG", "INVALID_RECORD", "INVALID_TIMESTAMP", "POLICY_VIOLATION"}
"""The message itself is at fault."""
_ACLS: Final = (
    "permit the user Write, Read and Describe of the topic, Read of groups and Write of transactional ids that begin"
    " with penstock/"
)


class _Purpose(NamedTuple):
    """Hints of errors, for one kind of writing.

    ``part``: the part of the file with the connection. ``permissions``: how to permit the user what it lacks.
    ``retry``: what follows after an outage. ``too_large`` and ``refused``: what to do about a message that Kafka
    refuses.
    """

    part: str
    permissions: str
    retry: str
    too_large: str
    refused: str


_BATCH: Final = _Purpose(
    "sink",
    _ACLS,
    "the pipeline repeats the batch",
    "set max_bytes of the sink below max.message.bytes of the topic, which makes dead letters of such rows, or increase"
    " that",
    "exclude such rows with an expect or filter step, or change the topic; nothing of the batch is written",
)
_APPEND: Final = _Purpose(
    "source",
    "permit the user Write, Read and Describe of the topic; before Kafka 3.0 also IdempotentWrite of the cluster",
    "run the command again, which does not send stored records twice",
    "increase max.message.bytes of the topic, or select other letters (--id)",
    "change the topic, or select other letters (--id)",
)


def _is_refused(error: KafkaError) -> bool:
    """Return True if the server refuses the user, or this client the server's certificate."""
    text = error.str()
    # An identity provider that does not answer is reported in the same way as a wrong password.
    refused = error.name() in _UNAUTHENTICATED and "OAUTHBEARER token" not in text
    return refused or "certificate verify failed" in text


class _Session:
    """Clients of one topic with the errors of their connections, which calls do not return."""

    def __init__(self, target: KafkaTopic, timeout_s: float | None = None, purpose: _Purpose = _BATCH) -> None:
        self.target = target
        self._purpose = purpose
        self._timeout_s = timeout_s or TIMEOUT_S
        self._errors: list[KafkaError] = []
        self.fatal = FatalErrors()

    def producer(self, name: str) -> AbstractContextManager[Producer]:
        """A producer of transactions, which reports messages that were not stored only."""
        return self._producer(
            {
                "transactional.id": name,
                "transaction.timeout.ms": int(self.target.transaction_s * 1000),
                "partitioner": "murmur2_random",
                "delivery.report.only.error": True,
            }
        )

    def appender(self) -> AbstractContextManager[Producer]:
        """A producer without transactions, whose own retries do not store a message twice."""
        return self._producer({"enable.idempotence": True, "acks": "all"})

    @contextmanager
    def _producer(self, settings: dict[str, Any]) -> Iterator[Producer]:
        with needs_kafka("kafka"):
            from confluent_kafka import Producer
        target = self.target
        producer = self.create(
            Producer,
            settings
            | {
                "message.timeout.ms": int(MESSAGE_TIMEOUT_S * 1000),
                "message.max.bytes": LARGEST_BYTES,
                # Kafka refuses a batch of messages that is larger than a message may be.
                "batch.size": min(target.max_bytes, LARGEST_MESSAGE),
                "queue.buffering.max.kbytes": _QUEUE_KB,
                "linger.ms": 5,
                "compression.type": target.compression,
            },
        )
        try:
            yield producer
        finally:
            with self.fatal:
                producer.purge()
            if self.fatal.why is not None:
                with self.fatal:
                    producer.close()

    @contextmanager
    def consumer(self, name: str) -> Iterator[Consumer]:
        with needs_kafka("kafka"):
            from confluent_kafka import Consumer
        settings = {"group.id": name, "isolation.level": "read_committed", "enable.auto.commit": False}
        consumer = self.create(Consumer, settings)
        try:
            yield consumer
        finally:
            consumer.close()

    def create(self, client: Callable[[dict[str, Any]], Result], settings: dict[str, Any]) -> Result:
        """Return a client. Raises ConfigError: a setting or file cannot be used."""
        from confluent_kafka import KafkaException

        sasl = self.target.connection.sasl
        if sasl is not None and sasl.token_file is not None:
            # The client would wait for the token, and would not report why there is none.
            read_password(sasl.token_file, "token_file")
        # Without lines on standard error; the errors are those of `error_cb`.
        own = {"error_cb": self._errors.append, "log_level": 0}
        settings = {**self.target.connection.settings(), **settings, **own}
        try:
            return client(settings)
        except KafkaException as error:
            raise ConfigError(
                f"a client of {self.target.connection.shown} cannot be created",
                option="kafka",
                why=str(error.args[0].str()),
                hint="check `tls`, `sasl` and their files, on the driver and on the executors",
            ) from error

    def call(self, poll: Callable[[float], object], request: Callable[[float], Result], what: str) -> Result:
        """Return the result of ``request``, which is repeated while it takes too long; ``what`` it does, for errors."""
        from confluent_kafka import KafkaException

        ends, wait_s = time.monotonic() + self._timeout_s, 0.0
        error: KafkaError | None = None
        while True:
            self.serve(poll, wait_s)
            self.check()
            if wait_s and time.monotonic() > ends:
                raise self._unavailable(what, self._last(error))
            wait_s = 0.1
            try:
                with self.fatal:
                    return request(_SLICE_S)
                raise self._fatal_error()
            except KafkaException as failure:
                error = failure.args[0]
                assert error is not None
                # A transaction that must be aborted cannot be continued, also if the cause was temporary.
                is_temporary = error.retriable() or error.name() in _TEMPORARY
                if error.txn_requires_abort() or not is_temporary:
                    raise self.translated(error, what) from failure
            except TimeoutError:
                error = None

    def serve(self, poll: Callable[[float], Result], wait_s: float) -> Result:
        """Return the result of ``poll``, which calls callbacks. Raises PenstockError: a fatal error of the client."""
        with self.fatal:
            return poll(wait_s)
        raise self._fatal_error()

    def _fatal_error(self) -> PenstockError:
        if self.fatal.error is None:
            why = self.fatal.why or ""
            return self._ended(why) if self._purpose is _BATCH else self._unavailable("write to", why)
        return self.translated(self.fatal.error, "write to")

    def check(self) -> None:
        """Raise RefusedError if the server refuses the user, or this client its certificate."""
        for error in self._errors:
            if _is_refused(error):
                raise self.translated(error, "connect to")

    def translated(self, error: KafkaError, what: str, message: str | None = None) -> PenstockError:
        """Return ``error`` of ``what`` as one of penstock; ``message``: id of the one that was refused."""
        code, why, shown = error.name(), error.str(), self.target.shown
        if code in _ROW and message is not None:
            return RefusedError(
                f"{shown} refused the message {message!r}",
                why=why,
                hint=self._purpose.too_large if code in _TOO_LARGE else self._purpose.refused,
            )
        if _is_refused(error):
            return self.refused(why, f"check `sasl` and `tls` of the {self._purpose.part}, and the user in Kafka")
        if code in _UNKNOWN:
            return RefusedError(
                f"{self.target.connection.shown} has no topic {self.target.topic!r}",
                why=why,
                hint=f"create it with kafka-topics.sh --create --topic {self.target.topic}, or correct topic",
            )
        if code in _DENIED:
            return self.refused(why, self._purpose.permissions)
        if code == "INVALID_TRANSACTION_TIMEOUT":
            return self.refused(why, "set transaction_timeout of the sink below transaction.max.timeout.ms of Kafka")
        if self._purpose is _BATCH and (code in _REPLACED or error.fatal()):
            return self._ended(why)
        return self._unavailable(what, why)

    def refused(self, why: str, hint: str) -> RefusedError:
        return RefusedError(f"{self.target.shown} cannot be written", why=why, hint=hint)

    def _ended(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{self.target.shown} ended the transaction of a batch",
            applied=False,
            why=f"{why}; another attempt to write it has begun, or it took longer than transaction_timeout",
            hint="the pipeline repeats the batch; if it continues, increase transaction_timeout",
        )

    def _unavailable(self, what: str, why: str) -> UnavailableError:
        return UnavailableError(
            f"could not {what} {self.target.shown}",
            why=why,
            hint=f"start the brokers, or correct bootstrap; {self._purpose.retry}",
        )

    def _last(self, error: KafkaError | None) -> str:
        """Return the last error of the connections, or ``error``."""
        named = [found.str() for found in self._errors if found.name() != "_ALL_BROKERS_DOWN"]
        return named[-1] if named else "no answer" if error is None else error.str()
