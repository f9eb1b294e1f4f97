"""Rules: MQTT messages that match a topic filter become records of a log, acknowledged after the append.

The log is TubeMQ or Kafka. The PUBACK (PUBREC at QoS 2) is sent after its acknowledgement, so a publisher may delete a
message after its PUBACK. If the log rejects a message:

* A log that is full or unavailable: the message waits and is retried, in order. Beyond ``max_pending_bytes`` of waiting
  messages, the connections of their publishers are not read.
* A record that can never be accepted: the message gets a failure code with the reason.
* A log whose disk failed: the connection is closed without a response, because a publisher keeps an unacknowledged
  message and sends it again. With MQTT 3.1.1, which has no failure codes, every rejection closes the connection.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final, Protocol

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import Connection, Inbound, Service
from penstock.node.config.node import RuleOverflowPolicy, RuleSection
from penstock.node.config.template import Template
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.loop import CallLater
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.strings import partition_id
from penstock.tube.record import Record

__all__ = [
    "PORTION",
    "Append",
    "Done",
    "Identities",
    "RuleService",
    "RuleStats",
    "RuleTarget",
    "TubeTarget",
    "return_result",
]

_log = logging.getLogger("penstock.rules")

_RECORD_OVERHEAD: Final = 512
"""Overhead of a waiting message in bytes, in addition to payload and topic."""
_FIRST_RETRY_S: Final = 0.02
_LONGEST_RETRY_S: Final = 2.0
"""Shortest and longest pause before a retry, in seconds."""
PORTION: Final = 16
"""Messages of a backlog that one turn of the event loop passes on, and that it acknowledges. With 64, the median
latency of another client was 8 ms instead of 1.6, and the backlog was not sent faster."""
_HIGH_PRIORITY: Final = b"$high_priority"
"""User property of control messages, which backpressure of data messages must not delay."""

Done = Callable[[object], None]


def return_result(done: Done, result: object) -> None:
    """Call ``done``; an exception must not keep the results of other messages waiting."""
    try:
        done(result)
    except Exception:  # noqa: BLE001 - see above
        _log.exception("internal error after a message of a rule")


class Append(Protocol):
    """In-process append of the TubeMQ broker; ``done`` gets the result or a PenstockError later, in the loop."""

    def __call__(
        self, topic: str, partition: int | None, data: bytes, flag: int, msg_type: str | None, done: Done
    ) -> None: ...


class RuleTarget(Protocol):
    """A topic to which a rule appends records, in their order."""

    @property
    def name(self) -> str:
        """Name of the system, for the log."""
        ...

    def prepare(self, record: Record) -> Any:
        """Encode a record for :meth:`append`. Raises LocalProtocolError: it can never be stored."""
        ...

    def append(self, prepared: Any, done: Done) -> None:
        """Append an encoded record; ``done`` gets the result or a PenstockError later, in the loop. Raises
        PenstockError."""
        ...

    def retries(self, error: PenstockError) -> bool:
        """Return True if the append that failed with ``error`` may be repeated."""
        ...


class TubeTarget:
    """The topic of ``rule`` at the broker of the node. ``shape`` returns its current numbers of partitions per store
    and of stores."""

    name = "TubeMQ"

    def __init__(self, rule: RuleSection, append: Append, shape: Callable[[], tuple[int, int]]) -> None:
        self._topic = rule.target
        self._partition = rule.partition
        self._append = append
        self._shape = shape

    def prepare(self, record: Record) -> tuple[int, bytes, int, str | None]:
        """Return partition, data, flag and message type [RuleTarget]."""
        data, flag, msg_type = record.encode()
        partition = self._partition
        if partition is None:
            # The partition that producers choose, so that all writers use the same partition for a key.
            partitions, stores = self._shape()
            partition = partition_id(zlib.crc32(record.key or b"") % (partitions * stores), partitions)
        return partition, data, flag, msg_type

    def append(self, prepared: Any, done: Done) -> None:
        """Append in process [RuleTarget]."""
        partition, data, flag, msg_type = prepared
        self._append(self._topic, partition, data, flag, msg_type, done)

    def retries(self, error: PenstockError) -> bool:
        """Return True if the append was certainly not executed and may succeed later [RuleTarget]."""
        if isinstance(error, RefusedError):
            return error.code == ErrCode.SERVER_RECEIVE_OVERFLOW
        return isinstance(error, UnavailableError) and error.applied is False


class Identities:
    """Ids of messages without an id: ``<client id>/<run>-<number>``.

    ``run`` is unique to the run of the node (from clock and entropy), and numbers are counted over all clients, so an
    id is not repeated after a reconnect or restart. A message that is published again gets another id, since MQTT does
    not identify duplicates: for deduplication, publishers set the user property ``id``.
    """

    __slots__ = ("_number", "_run")

    def __init__(self, run: str) -> None:
        self._run = run
        self._number = 0

    def next(self, client_id: str) -> str:
        """Return the id of the next message of ``client_id``."""
        self._number += 1
        return f"{client_id}/{self._run}-{self._number}"


class RuleStats:
    """Counters of one rule since the start; ``pending``, ``pending_bytes``, ``waiting`` and ``held`` are gauges."""

    __slots__ = (
        "bytes_received",
        "dropped",
        "held",
        "logged",
        "pending",
        "pending_bytes",
        "received",
        "refused",
        "retried",
        "waiting",
    )

    def __init__(self) -> None:
        self.received = 0
        self.bytes_received = 0
        self.logged = 0
        self.refused = 0
        """QoS 1 and 2 messages that the log rejected; their publishers got a failure."""
        self.dropped = 0
        """QoS 0 messages and wills that the log rejected."""
        self.retried = 0
        """Retries of messages that the log had rejected temporarily."""
        self.pending = 0
        """Messages neither appended nor rejected."""
        self.pending_bytes = 0
        self.waiting = 0
        """Pending messages that the log rejected temporarily."""
        self.held = 0
        """Connections that are not read because of waiting messages."""


class _Item:
    """A message that is being appended."""

    __slots__ = ("message", "number", "prepared", "size")

    def __init__(self, number: int, message: Inbound, size: int, prepared: Any) -> None:
        self.number = number
        self.message = message
        self.size = size
        self.prepared = prepared


class RuleService(Service):
    """A rule as a service of the MQTT broker.

    At most ``rule.max_pending_bytes`` of messages wait for the log. Beyond this limit the connections of further
    publishers are not read, or messages are rejected with Quota exceeded, as set by ``rule.overflow``. At twice the
    limit every message is rejected. A ``$high_priority`` message may exceed the first limit without pausing its
    connection.
    """

    def __init__(
        self,
        rule: RuleSection,
        target: RuleTarget,
        *,
        identities: Identities,
        later: CallLater,
    ) -> None:
        self.rule = rule
        self.stats = RuleStats()
        self._target = target
        self._later = later
        self._identities = identities
        self._key = None if rule.key.is_topic else rule.key
        self._msg_type = None if rule.msg_type.text == "{level.-1}" else rule.msg_type
        self._attributes: Sequence[tuple[str, Template]] = tuple(rule.attributes.items())
        self._failing = False
        self._closed = False
        self._waiting: list[tuple[int, _Item]] = []
        """Messages that the log rejected temporarily: a heap in the order of arrival."""
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        """Last pause before a retry; 0 if no retry is scheduled."""
        self._probing: _Item | None = None
        self._probes = 0
        """Number of the last scheduled retry of the oldest message."""
        self._draining = False
        """True while the next portion of waiting messages is scheduled."""
        self._held: dict[Connection, None] = {}

    @property
    def filters(self) -> Sequence[str]:
        """The filter of the rule [Service]."""
        return (self.rule.filter,)

    @property
    def exclusive(self) -> bool:
        """False: subscribers receive the messages as well [Service]."""
        return False

    @property
    def reserved(self) -> Sequence[str]:
        """None: a rule publishes nothing [Service]."""
        return ()

    def receive(self, message: Inbound) -> None:
        """Append the message; acknowledge it when the log responds."""
        publish, stats = message.publish, self.stats
        block = publish.property_block()
        size = len(publish.payload) + len(publish.topic) + _RECORD_OVERHEAD
        if block is not None:  # user properties become headers
            size += len(block.wire)
        stats.received += 1
        stats.bytes_received += len(publish.payload)
        if stats.pending_bytes + size > self.rule.max_pending_bytes and not self._make_wait(message, size):
            self._refuse(
                message,
                ReasonCode.QUOTA_EXCEEDED,
                f"rule {self.rule.label}: {stats.pending} messages wait for the log",
            )
            return
        try:
            record = self._record(message)
            prepared = self._target.prepare(record)
        except LocalProtocolError as error:
            self._refuse(message, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, error.what)
            return
        stats.pending += 1
        stats.pending_bytes += size
        item = _Item(stats.received, message, size, prepared)
        if self._backoff.failures or self._waiting:  # after the messages that already wait
            self._push(item)
        else:
            self._submit(item)

    def disconnected(self, client_id: str) -> None:
        """Do nothing: accepted messages are appended even if their publisher has disconnected."""

    def close(self) -> None:
        """Shut down: waiting messages remain unacknowledged, so their publishers send them again."""
        self._closed = True
        while self._waiting:
            self.stats.waiting -= 1
            _, item = heappop(self._waiting)
            self._forget(item)
            self._disconnect(item.message, "the node is shutting down")

    def _submit(self, item: _Item) -> None:
        try:
            self._target.append(item.prepared, lambda result: self._answered(item, result))
        except PenstockError as error:
            if self._target.retries(error) and not self._closed:
                self._wait(item, error)  # now: the next message may be accepted, and must not overtake it
                return
            raised = error  # later, like every response, to keep the order of messages
            self._later(0.0, lambda: self._answered(item, raised))

    def _answered(self, item: _Item, result: object) -> None:
        """Handle the result of an append."""
        if isinstance(result, PenstockError) and self._target.retries(result) and not self._closed:
            self._wait(item, result)
            return
        self._forget(item)
        if isinstance(result, PenstockError):
            self._failed(item.message, result)
            if (
                self._probing is item
            ):  # rejected permanently: the log is available again, for the following messages as well
                self._log_is_back()
            return
        self.stats.logged += 1
        self._failing = False
        item.message.settle()
        if self._backoff.failures:
            self._log_is_back()

    def _wait(self, item: _Item, error: PenstockError) -> None:
        """Schedule a retry. The item has failed, or was sent before the failure was known."""
        self._warn(item.message, error)
        self._push(item)
        if self._backoff.failures and self._probing is not item:
            return
        self._probing = None
        self._probes += 1
        self._later(self._backoff.failed(), partial(self._probe, self._probes))

    def _probe(self, number: int) -> None:
        """Retry the oldest message; the others follow when it is accepted."""
        # Not by the timer of an earlier failure: two retries at the same time could change the order.
        is_due = number == self._probes and self._backoff.failures
        if is_due and self._waiting and not self._closed:
            self._probing = self._next()
            self._submit(self._probing)

    def _log_is_back(self) -> None:
        self._backoff.reset()
        self._probing = None
        if not self._draining:
            self._drain()

    def _drain(self) -> None:
        """Append waiting messages, a portion in each turn of the loop, so that other clients are served."""
        self._draining = False
        if self._backoff.failures or self._closed:
            return  # rejected again: the probe continues
        for _ in range(PORTION):
            if not self._waiting or self._backoff.failures:
                return
            self._submit(self._next())
        if self._waiting:
            self._draining = True
            self._later(0.0, self._drain)

    def _push(self, item: _Item) -> None:
        self.stats.waiting += 1
        heappush(self._waiting, (item.number, item))

    def _next(self) -> _Item:
        self.stats.waiting -= 1
        self.stats.retried += 1
        return heappop(self._waiting)[1]

    def _make_wait(self, message: Inbound, size: int) -> bool:
        """Return True if the message may exceed the limit; its connection is then not read for a while."""
        bound = self.rule.max_pending_bytes
        if self.rule.overflow is RuleOverflowPolicy.REFUSE or self.stats.pending_bytes + size > 2 * bound:
            return False
        connection = message.connection
        if connection is None or connection in self._held:
            return True
        properties = message.publish.property_block()
        if properties is None or properties.user_property(_HIGH_PRIORITY) is None:
            self._held[connection] = None
            self.stats.held = len(self._held)
            connection.hold()
        return True

    def _forget(self, item: _Item) -> None:
        stats = self.stats
        stats.pending -= 1
        stats.pending_bytes -= item.size
        if self._held and stats.pending_bytes <= self.rule.max_pending_bytes // 2:
            held, self._held = self._held, {}
            stats.held = 0
            for connection in held:
                connection.release()

    def _record(self, message: Inbound) -> Record:
        publish = message.publish
        properties = publish.property_block()
        key = self._key
        msg_type = self._msg_type
        record = Record.from_mqtt(
            publish.topic,
            publish.payload,
            default_id=self._identities.next(message.client_id),
            key=None if key is None else key.expand(message).encode(),
            content_type=properties.content_type() if properties is not None else None,
            msg_type=None if msg_type is None else msg_type.expand(message),
            user_properties=properties.user_properties() if properties is not None else (),
        )
        for name, template in self._attributes:
            text = template.expand(message)
            if text:
                record.headers.append((name, text))
        return record

    def _warn(self, message: Inbound, error: PenstockError) -> None:
        """Log the first failure of a series: an unavailable log rejects every message."""
        if not self._failing:
            self._failing = True
            _log.warning(
                "%s rejected a message: %s%s",
                self._target.name,
                error.what,
                f" ({error.why})" if error.why else "",
                extra={"fields": {"rule": self.rule.label, "topic": message.publish.topic}},
            )

    def _failed(self, message: Inbound, error: PenstockError) -> None:
        self._warn(message, error)
        if isinstance(error, RefusedError | LocalProtocolError):
            self._refuse(message, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, error.what)
        else:
            self._disconnect(message, error.what)

    def _refuse(self, message: Inbound, code: ReasonCode, reason: str) -> None:
        if message.publish.qos == 0 or message.connection is None:
            self.stats.dropped += 1
            message.settle()
            return
        self.stats.refused += 1
        if message.protocol_version < 5:
            # Not if the client has reconnected: it sends this message again.
            message.disconnect(code, reason)
        else:
            message.settle(code, reason)

    def _disconnect(self, message: Inbound, reason: str) -> None:
        """Close the connection without a response, so that the publisher sends the message again."""
        if message.publish.qos == 0 or message.connection is None:
            self.stats.dropped += 1
            message.settle()
            return
        self.stats.refused += 1
        message.disconnect(ReasonCode.SERVER_BUSY, reason)
