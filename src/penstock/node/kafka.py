"""Kafka as the target of a rule: an idempotent producer with ``acks=all``.

The client library, librdkafka, batches, retries and keeps the order of each partition in its own threads. The event
loop passes messages to it, and gets their results in portions, so that a backlog that is sent after an outage does not
delay clients. While Kafka is unavailable, messages stay in the producer without a time limit, bounded by
``max_pending_bytes`` of the rule.

The producer stores each message once, except if it had to be replaced after a fatal error: then messages without a
result are sent again, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.node.config.kafka import KafkaSection
from penstock.node.rules import PORTION, Done, return_result
from penstock.runtime.kafka.client import LARGEST_BYTES, FatalErrors, KafkaConnection
from penstock.runtime.kafka.config import needs_kafka
from penstock.tube.record import Record

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

__all__ = ["KafkaTarget"]

_log = logging.getLogger("penstock.kafka")

FLUSH_S: Final = 5.0
"""Maximum seconds that a node which stops waits for the results of messages."""
POLL_S: Final = 0.5


class _Prepared(NamedTuple):
    """A record as a message of Kafka. ``timestamp``: ms since 1970, 0 = now."""

    key: bytes | None
    value: bytes
    headers: list[tuple[str, bytes]]
    timestamp: int


class KafkaTarget:
    """The topic ``section.topic`` as a target of rules; call :meth:`start` and the rest in the event loop.

    ``max_bytes``: maximum bytes of messages in the producer. ``partition`` None: selected by the key, as Java's
    producers do.

    Raises:
        ConfigError: the library is not installed, or a setting or file cannot be used.
    """

    name = "Kafka"

    def __init__(self, section: KafkaSection, *, max_bytes: int, partition: int | None = None) -> None:
        self._section = section
        self._partition = partition
        self._settings = _settings(section, max_bytes) | {"error_cb": self._on_error}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending = 0
        """Messages in the producer."""
        self._results: deque[tuple[Done, object]] = deque()
        self._scheduled = False
        """True while :meth:`_deliver` is going to be called."""
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Held while a message is passed to the producer, and while that is replaced."""
        self._returning = False
        """True after the producer was replaced, until all messages of the old one have been returned: a new message
        would overtake them."""
        self._closed = threading.Event()
        self._replaced = threading.Event()
        """Set after a fatal error: the producer must be replaced."""
        self._error: PenstockError | None = None
        """The last error since the last stored message."""
        self._producer = self._new_producer()
        self._thread = threading.Thread(target=self._poll, name=f"kafka {section.topic}", daemon=True)

    def start(self) -> None:
        """Begin to return results."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Wait some seconds for the results of messages, return them, and close. Messages without a result may have
        been stored."""
        self._closed.set()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(_flush, self._producer)
        while self._results:
            self._deliver()

    def prepare(self, record: Record) -> _Prepared:
        """Return the record as a message of Kafka.

        Raises:
            LocalProtocolError: the record cannot be encoded.
        """
        headers = [(name, text if isinstance(text, bytes) else text.encode()) for name, text in record.headers]
        more = (("mqtt.topic", record.topic), ("id", record.id), ("content-type", record.content_type))
        headers += [(name, text.encode()) for name, text in more if text is not None]
        return _Prepared(record.key, record.value, headers, record.event_time_ms or 0)

    def append(self, prepared: Any, done: Done) -> None:
        """Send the message; ``done`` gets None or a PenstockError later.

        Raises:
            RefusedError: the message can never be stored.
            UnavailableError: the producer is full.
        """
        from confluent_kafka import KafkaException

        def delivered(error: KafkaError | None, _message: Message) -> None:  # in the thread of poll()
            self._add(done, None if error is None else self._translated(error))

        try:
            with self._sending:
                if self._returning and self._pending:
                    raise self._unavailable("the producer was replaced")
                self._returning = False
                self._producer.produce(
                    self._section.topic,
                    prepared.value,
                    prepared.key,
                    -1 if self._partition is None else self._partition,  # -1: selected by the key
                    headers=prepared.headers,
                    timestamp=prepared.timestamp,
                    on_delivery=delivered,
                )
                self._pending += 1
        except BufferError as error:
            raise self._unavailable("the producer is full") from error
        except KafkaException as failure:
            raise self._translated(failure.args[0]) from failure

    def retries(self, error: PenstockError) -> bool:
        """Return True if the message may be stored later."""
        return isinstance(error, UnavailableError)

    def warning(self) -> PenstockError | None:
        """Return the reason why messages wait; None if none do."""
        return self._error if self._pending else None

    def _new_producer(self) -> Producer:
        with needs_kafka("rules"):
            from confluent_kafka import KafkaException, Producer
        try:
            return Producer(self._settings, logger=_log)
        except KafkaException as error:
            raise ConfigError(
                f"rules: the producer of Kafka topic {self._section.topic!r} cannot be created",
                option="rules",
                why=str(error.args[0].str()),
                hint="check `to.kafka`",
            ) from error

    def _poll(self) -> None:
        """Call the callbacks of the producer; runs in the thread."""
        while not self._closed.is_set():
            if self._replaced.is_set():
                self._replace()
            fatal = FatalErrors()
            with fatal:
                self._producer.poll(POLL_S)
            if fatal.why is not None and not self._replaced.is_set():
                _log.warning("the producer of Kafka topic %s is replaced: %s", self._section.topic, fatal.why)
                self._replaced.set()

    def _replace(self) -> None:
        """Replace the producer, and return the results of the messages in the old one."""
        try:
            producer = self._new_producer()
        except ConfigError as error:  # for example while certificates are exchanged
            self._error = self._unavailable(f"{error.what}: {error.why}")
            return
        self._replaced.clear()
        with self._sending:
            old, self._producer = self._producer, producer
            self._returning = True
        # Every message of it gets a result, and is sent again by the new one, in order.
        old.purge()
        while len(old) and not self._closed.is_set():
            _flush(old)
        old.close()

    def _add(self, done: Done, result: object) -> None:
        if result is None:
            self._error = None
        with self._lock:
            self._results.append((done, result))
            if self._scheduled:
                return
            self._scheduled = True
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed without close()
            _log.warning("results of Kafka arrived after the end of the node")

    def _deliver(self) -> None:
        """Return a portion of the results."""
        for _ in range(PORTION):
            with self._lock:
                if not self._results:
                    self._scheduled = False
                    return
                done, result = self._results.popleft()
            self._pending -= 1
            return_result(done, result)
        assert self._loop is not None
        self._loop.call_soon(self._deliver)

    def _on_error(self, error: KafkaError) -> None:
        """Register an error of the connections; messages wait meanwhile."""
        first, self._error = self._error is None, self._unavailable(error.str())
        if first:
            _log.warning("%s", self._error.line())

    def _translated(self, error: KafkaError) -> PenstockError:
        from confluent_kafka import KafkaError

        permanent = {
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.INVALID_MSG,
            KafkaError.INVALID_MSG_SIZE,
            KafkaError.INVALID_RECORD,
            KafkaError.INVALID_TIMESTAMP,
            KafkaError.POLICY_VIOLATION,
        }
        if error.code() in permanent:
            return RefusedError(f"Kafka topic {self._section.topic!r} refused the message: {error.str()}")
        found = self._error = self._unavailable(error.str())
        return found

    def _unavailable(self, why: str) -> UnavailableError:
        section = self._section
        oidc = None if section.sasl is None else section.sasl.oidc
        hint = f"check {', '.join(section.bootstrap)}, the topic and the permissions of the user"
        if oidc is not None and "OAUTHBEARER token" in why:  # librdkafka's text for a token that was not issued
            hint = f"check {oidc.token_url}, client id, client secret and scope"
        return UnavailableError(f"kafka: messages for topic {section.topic!r} wait", applied=None, why=why, hint=hint)


def _flush(producer: Producer) -> None:
    """Wait for the results of the messages in ``producer``, also if it reports its fatal error meanwhile."""
    ends = time.monotonic() + FLUSH_S
    while len(producer) and time.monotonic() < ends:
        with FatalErrors():
            producer.flush(FLUSH_S)


def _settings(section: KafkaSection, max_bytes: int) -> dict[str, Any]:
    """Return the settings of the producer. Raises ConfigError: the password file cannot be read."""
    return {
        **KafkaConnection(section.bootstrap, section.tls, section.sasl).settings(),
        "enable.idempotence": True,
        "acks": "all",
        "message.timeout.ms": 0,  # no limit
        "message.max.bytes": LARGEST_BYTES,
        "queue.buffering.max.messages": 0,  # no limit: the bytes are limited
        "queue.buffering.max.kbytes": max_bytes // 1024 + 1024,
        "partitioner": "murmur2_random",
        "compression.type": section.compression.value,
    }
