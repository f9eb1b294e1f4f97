"""Rules: what matches an MQTT topic filter becomes a record of a tube topic, and is acknowledged once the log has it.

The PUBACK leaves after the tube's own acknowledgement, so a publisher that has it can forget the message. What the log
does not take is answered by its kind: a limit or a record that can never be taken is a PUBACK with a failure code and
the reason; a log that is not there is no answer at all, but the end of the connection (Server unavailable), because a
publisher keeps what has no PUBACK and sends it again, and drops what has one. MQTT 3.1.1 has no failure codes: there
every refusal is the end of the connection.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import LocalProtocolError, PenstockError, RefusedError
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import Inbound
from penstock.node.config import Rule
from penstock.tube.codec.codes import ErrCode
from penstock.tube.record import Record

__all__ = ["Append", "Identities", "RuleService", "Stats"]

_log = logging.getLogger("penstock.rules")

_RECORD_OVERHEAD = 512
"""Bytes that a waiting message is counted with beside its payload and topic: the objects that hold it."""

Done = Callable[[object], None]


class Append(Protocol):
    """The tube broker's in-process path; ``done`` gets the result or a PenstockError, later, in the loop."""

    def __call__(
        self, topic: str, partition: int | None, data: bytes, flag: int, msg_type: str | None, done: Done
    ) -> None: ...


class Identities:
    """Ids for messages that bring none: ``<client id>/<run>-<number>``.

    ``run`` is unique to this run of the node (the shell makes it from clock and entropy) and the number is counted over
    all clients, so an id repeats neither after a reconnect nor after a restart. A publisher that resends gets a second
    id, since nothing in MQTT tells the copy from a new message: whoever wants copies dropped sends a property ``id``.
    """

    __slots__ = ("_number", "_run")

    def __init__(self, run: str) -> None:
        self._run = run
        self._number = 0

    def next(self, client_id: str) -> str:
        """The id of the next message of ``client_id``."""
        self._number += 1
        return f"{client_id}/{self._run}-{self._number}"


class Stats:
    """Counters of one rule since the start; ``pending`` and ``pending_bytes`` fall again."""

    __slots__ = ("bytes_received", "dropped", "logged", "pending", "pending_bytes", "received", "refused")

    def __init__(self) -> None:
        self.received = 0
        self.bytes_received = 0
        self.logged = 0
        self.refused = 0
        """QoS 1 messages that the log did not take; their publishers were told."""
        self.dropped = 0
        """QoS 0 messages that the log did not take; nobody can be told."""
        self.pending = 0
        self.pending_bytes = 0


class RuleService:
    """One rule as a service of the MQTT broker.

    Bound: ``rule.max_pending_bytes`` of messages that wait for the log; beyond, messages are refused (Quota exceeded).
    Each connection is bounded before that by its receive maximum.
    """

    exclusive = False

    def __init__(
        self,
        rule: Rule,
        append: Append,
        *,
        partitions: Sequence[int],
        identities: Identities,
    ) -> None:
        self.rule = rule
        self.filters: Sequence[str] = (rule.filter,)
        self.stats = Stats()
        self._append = append
        self._partitions = list(partitions)
        self._identities = identities
        self._key = None if rule.key.is_topic else rule.key
        self._msg_type = None if rule.msg_type.text == "{level.-1}" else rule.msg_type
        self._failing = False

    def receive(self, message: Inbound) -> None:
        """Append the message; settle it when the log answers."""
        publish, stats = message.publish, self.stats
        size = len(publish.payload) + len(publish.topic) + _RECORD_OVERHEAD
        stats.received += 1
        stats.bytes_received += len(publish.payload)
        if stats.pending_bytes + size > self.rule.max_pending_bytes:
            self._refuse(
                message,
                ReasonCode.QUOTA_EXCEEDED,
                f"rule {self.rule.name or self.rule.topic}: {stats.pending} messages wait for the log",
            )
            return
        try:
            record = self._record(message)
            data, flag, msg_type = record.encode()
        except LocalProtocolError as error:
            self._refuse(message, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, error.what)
            return
        partition = self.rule.partition
        if partition is None:
            partition = self._partitions[zlib.crc32(record.key or b"") % len(self._partitions)]
        stats.pending += 1
        stats.pending_bytes += size

        def done(result: object) -> None:
            stats.pending -= 1
            stats.pending_bytes -= size
            if isinstance(result, PenstockError):
                self._failed(message, result)
                return
            stats.logged += 1
            self._failing = False
            message.settle()

        try:
            self._append(self.rule.topic, partition, data, flag, msg_type, done)
        except PenstockError as error:
            done(error)

    def disconnected(self, client_id: str) -> None:
        """Nothing: what was appended stays appended, and settling a message of a gone connection does nothing."""

    def _record(self, message: Inbound) -> Record:
        publish = message.publish
        properties = publish.optional_properties
        user = properties.user_properties if properties is not None else ()
        key = self._key
        msg_type = self._msg_type
        return Record.from_mqtt(
            publish.topic,
            publish.payload,
            default_id=self._identities.next(message.client_id),
            key=None if key is None else key.expand(publish.topic, message.client_id, user).encode(),
            content_type=properties.content_type if properties is not None else None,
            msg_type=None if msg_type is None else msg_type.expand(publish.topic, message.client_id, user),
            user_properties=user,
        )

    def _failed(self, message: Inbound, error: PenstockError) -> None:
        if not self._failing:
            # Once for a series: a log that is away fails every message.
            self._failing = True
            _log.warning(
                "the tube did not take a message: %s",
                error.what,
                extra={"fields": {"rule": self.rule.name or self.rule.topic, "topic": message.publish.topic}},
            )
        if isinstance(error, RefusedError):
            full = error.code in {ErrCode.SERVER_RECEIVE_OVERFLOW, ErrCode.SERVER_CONSUME_SPEED_LIMIT}
            code = ReasonCode.QUOTA_EXCEEDED if full else ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
            self._refuse(message, code, error.what)
        elif isinstance(error, LocalProtocolError):
            self._refuse(message, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, error.what)
        else:
            self._refuse(message, ReasonCode.SERVER_UNAVAILABLE, error.what)

    def _refuse(self, message: Inbound, code: ReasonCode, reason: str) -> None:
        if message.publish.qos == 0:
            self.stats.dropped += 1
            message.settle()
            return
        self.stats.refused += 1
        if code is ReasonCode.SERVER_UNAVAILABLE or message.protocol_version < 5:
            # Nothing where the client came back on another connection: it sends this message again there.
            message.disconnect(code, reason)
        else:
            message.settle(code, reason)
