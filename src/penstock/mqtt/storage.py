"""Sessions and retained messages on disk: one LMDB environment behind a log, one writer, every value checksummed.

Databases: ``sessions``, ``subscriptions``, ``messages`` (shared by several deliveries), ``deliveries``, ``progress``
(packet identifiers of messages that were queued before they were sent, and of messages after PUBREC), ``incoming`` (QoS
2 messages of clients without PUBREL), ``retained``, ``meta`` (``schema``) and ``quarantine`` (records with a wrong
checksum). Deliveries of all sessions share one sequence of numbers, so new ones are appended to the end of their
database, many to a page. A commit is applied completely or not at all.

A commit depends on the durability: ``durable`` = fsynced, in the write-ahead log of :mod:`penstock.runtime.io.wal`;
``flushed`` and ``memory`` = a transaction of LMDB, written to the page cache, fsynced when the kernel decides, when a
change requires it, and on :meth:`SessionStore.close`.

Every value is big-endian and begins with the CRC-32 of the rest. Times on disk are wall clock (ms since 1970); the
engine's clock has an arbitrary start: ``offset`` is wall clock minus that clock; 0 stays 0. A message is stored as it
is sent: topic and property block with their lengths, then the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from struct import Struct, error
from typing import Final, TypeVar
from zlib import crc32

import lmdb

from penstock.errors import RemoteProtocolError, StorageError
from penstock.mqtt.codec.packets import Will
from penstock.mqtt.codec.properties import WILL
from penstock.mqtt.codec.property_blocks import decode_properties, encode_properties
from penstock.mqtt.engine.model.journal import (
    Batch,
    DeliveryRow,
    MessageRow,
    ProgressRow,
    Recovered,
    SessionRow,
    Source,
    SubscriptionRow,
)
from penstock.mqtt.engine.model.message import Message
from penstock.runtime.io.commit_log import CommitLog
from penstock.runtime.io.files import Durability, Files
from penstock.runtime.io.lmdb_environment import INITIAL_MAP_BYTES, LmdbEnvironment
from penstock.runtime.io.wal import SEGMENT_BYTES, LoggedEnvironment
from penstock.runtime.io.wal_frames import DELETE, PUT, Operation

__all__ = [
    "SCHEMA",
    "TABLES",
    "SessionStore",
    "checked",
    "decode_delivery",
    "decode_message",
    "decode_progress",
    "decode_session",
    "decode_subscription",
    "digest_of",
    "encode_delivery",
    "encode_message",
    "encode_progress",
    "encode_retained",
    "encode_session",
    "encode_subscription",
    "environment_at",
    "incoming_key",
    "number_key",
    "shared_of",
    "subscription_key",
]

SCHEMA: Final = 3
"""Schema version of the databases; a newer one is refused. Since 2 commits may be in a log next to them, since 3
retained messages may have a publisher."""
TABLES: Final = (
    *("sessions", "subscriptions", "messages", "deliveries", "progress", "incoming", "retained"),
    *("meta", "quarantine"),
)
"""Frames of the log refer to a table by its index here: add new tables at the end."""

_CHECKSUM: Final = Struct(">I")
_SESSION: Final = Struct(">IQQBB")  # expiry, ends at, will at, protocol version, flags
_SUBSCRIPTION: Final = Struct(">QBI")  # session, options, length of the identifier block
_MESSAGE: Final = Struct(">Bq")  # flags, accepted at
_DELIVERY: Final = Struct(">QQHBIH")  # session, shared message or 0, packet id, flags, lengths: identifiers, share
_PROGRESS: Final = Struct(">QHB")  # session, packet identifier, stage
_NUMBER: Final = Struct(">Q")
_INCOMING: Final = Struct(">QH")  # session, packet identifier
_LENGTH: Final = Struct(">I")

_HAS_SOURCE: Final = 8
"""Flag of a stored message: its publisher precedes the topic."""
_NEVER_BEFORE: Final = 1
"""Stored instead of instants before the clock's zero; 0 means none."""

T = TypeVar("T")


def digest_of(text: str) -> bytes:
    """Return the key of a topic or filter: a digest if it exceeds the 511 bytes of an LMDB key."""
    return blake2b(text.encode(), digest_size=16).digest()


def number_key(number: int) -> bytes:
    """Return the key of a session, message, delivery or its progress, in the order of creation."""
    return _NUMBER.pack(number)


def subscription_key(session: int, topic_filter: str) -> bytes:
    """Return the key of a session's subscription."""
    return _NUMBER.pack(session) + digest_of(topic_filter)


def incoming_key(session: int, packet_id: int) -> bytes:
    """Return the key of a received QoS 2 message before its PUBREL."""
    return _INCOMING.pack(session, packet_id)


def encode_session(row: SessionRow, offset: int) -> bytes:
    """Encode a session with its will."""
    will = row.will
    flags = row.awaited | (row.username is not None) << 1 | (will is not None) << 2
    parts = [
        _SESSION.pack(
            row.expiry_s, _wall(row.ends_at, offset), _wall(row.will_at, offset), row.protocol_version, flags
        ),
        _sized(row.client_id.encode()),
        _sized(row.owner.encode()),
    ]
    if row.username is not None:
        parts.append(_sized(row.username.encode()))
    if will is not None:
        parts += (
            bytes((will.qos | will.retain << 2,)),
            _sized(will.topic.encode()),
            _sized(will.payload),
            _sized(encode_properties(will.properties, WILL)),
        )
    return checked(b"".join(parts))


def decode_session(number: int, stored: bytes, offset: int) -> SessionRow | None:
    """Decode a session; None if the checksum does not match."""
    if not _is_intact(stored):
        return None
    try:
        expiry_s, ends_at, will_at, version, flags = _SESSION.unpack_from(stored, 4)
        client_id, at = _text(stored, 4 + _SESSION.size)
        owner, at = _text(stored, at)
        username = will = None
        if flags & 2:
            username, at = _text(stored, at)
        if flags & 4:
            options = stored[at]
            topic, at = _text(stored, at + 1)
            payload, at = _read_part(stored, at)
            properties, at = _read_part(stored, at)
            start, end = _block(properties, 0)
            will = Will(topic, payload, options & 3, bool(options & 4), decode_properties(properties, start, end, WILL))
    except (error, IndexError, UnicodeDecodeError, RemoteProtocolError):
        return None
    return SessionRow(
        number,
        client_id,
        owner,
        username,
        version,
        expiry_s,
        _clock(ends_at, offset),
        will,
        _clock(will_at, offset),
        bool(flags & 1),
    )


def encode_subscription(row: SubscriptionRow) -> bytes:
    """Encode a subscription with its options."""
    options = row.qos | row.no_local << 2 | row.retain_as_published << 3
    head = _SUBSCRIPTION.pack(row.session, options, len(row.identifier))
    return checked(b"".join((head, row.identifier, row.topic_filter.encode())))


def decode_subscription(stored: bytes) -> SubscriptionRow | None:
    """Decode a subscription; None if the checksum does not match."""
    if not _is_intact(stored):
        return None
    try:
        session, options, size = _SUBSCRIPTION.unpack_from(stored, 4)
        at = 4 + _SUBSCRIPTION.size
        topic_filter = stored[at + size :].decode()
    except (error, UnicodeDecodeError):
        return None
    identifier = stored[at : at + size]
    return SubscriptionRow(session, topic_filter, options & 3, bool(options & 4), bool(options & 8), identifier)


def encode_message(message: Message, offset: int) -> bytes:
    """Encode a message that is stored by itself: retained, or shared by several deliveries."""
    return checked(_message(message, offset))


def encode_retained(message: Message, source: Source | None, offset: int) -> bytes:
    """Encode a retained message with its publisher. Without one it is stored as before schema 3."""
    if source is None:
        return encode_message(message, offset)
    head = _MESSAGE.pack(message.qos | message.retain << 2 | _HAS_SOURCE, message.accepted_at + offset)
    parts = (_sized(source.owner.encode()), _sized(source.client_id.encode()))
    return checked(b"".join((head, *parts, message.topic_wire, message.properties_wire, message.payload)))


def decode_message(stored: bytes, offset: int, number: int = 0) -> MessageRow | None:
    """Decode a message; None if the checksum does not match."""
    row = _decode_message(stored, 4, offset) if _is_intact(stored) else None
    return row._replace(number=number) if number and row is not None else row


def encode_delivery(
    session: int,
    shared: int,
    qos: int,
    retain: int,
    identifiers: bytes,
    packet_id: int,
    share: str,
    message: Message,
    offset: int,
) -> bytes:
    """Encode a delivery, with its message or with the number of a ``shared`` one."""
    group = share.encode()
    head = _DELIVERY.pack(session, shared, packet_id, qos | retain << 2, len(identifiers), len(group))
    if shared:
        return checked(b"".join((head, identifiers, group)))
    return checked(b"".join((head, identifiers, group, _message(message, offset))))


def decode_delivery(number: int, stored: bytes, offset: int, shared: dict[int, MessageRow]) -> DeliveryRow | None:
    """Decode a delivery; None if the checksum does not match or its message is missing."""
    if not _is_intact(stored):
        return None
    try:
        session, at_message, packet_id, flags, size, share_size = _DELIVERY.unpack_from(stored, 4)
        at = 4 + _DELIVERY.size
        share_at = at + size
        body_at = share_at + share_size
        share = stored[share_at:body_at].decode()
    except (error, UnicodeDecodeError):
        return None
    message = shared.get(at_message) if at_message else _decode_message(stored, body_at, offset)
    if message is None:
        return None
    return DeliveryRow(number, session, message, flags & 3, flags >> 2 & 1, stored[at:share_at], packet_id, share)


def shared_of(stored: bytes) -> int:
    """Return the number of the shared message of a delivery; 0 if the message is stored with it."""
    return int(_DELIVERY.unpack_from(stored, 4)[1])


def encode_progress(session: int, packet_id: int, stage: int) -> bytes:
    """Encode the progress of a delivery."""
    return checked(_PROGRESS.pack(session, packet_id, stage))


def decode_progress(number: int, stored: bytes) -> ProgressRow | None:
    """Decode the progress of a delivery; None if the checksum does not match."""
    if len(stored) != 4 + _PROGRESS.size or not _is_intact(stored):
        return None
    return ProgressRow(number, *_PROGRESS.unpack_from(stored, 4))


def _message(message: Message, offset: int) -> bytes:
    head = _MESSAGE.pack(message.qos | message.retain << 2, message.accepted_at + offset)
    return b"".join((head, message.topic_wire, message.properties_wire, message.payload))


def _decode_message(stored: bytes, at: int, offset: int) -> MessageRow | None:
    try:
        flags, accepted_at = _MESSAGE.unpack_from(stored, at)
        at += _MESSAGE.size
        source = None
        if flags & _HAS_SOURCE:
            owner, at = _text(stored, at)
            client_id, at = _text(stored, at)
            source = Source(owner, client_id)
        topic_end = at + 2 + (stored[at] << 8 | stored[at + 1])
        _, end = _block(stored, topic_end)
    except (error, IndexError, UnicodeDecodeError):
        return None
    if end > len(stored):
        return None
    topic, properties, payload = stored[at:topic_end], stored[topic_end:end], stored[end:]
    return MessageRow(topic, properties, payload, flags & 3, bool(flags & 4), accepted_at - offset, source=source)


def _block(data: bytes, at: int) -> tuple[int, int]:
    """Return start and end of the property block whose length is at ``at``."""
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return at, at + size
        shift += 7


def checked(body: bytes) -> bytes:
    """Prefix ``body`` with its checksum."""
    return _CHECKSUM.pack(crc32(body)) + body


def _is_intact(stored: bytes) -> bool:
    return len(stored) > 4 and crc32(memoryview(stored)[4:]) == _CHECKSUM.unpack_from(stored)[0]


def _sized(raw: bytes) -> bytes:
    return _LENGTH.pack(len(raw)) + raw


def _read_part(stored: bytes, at: int) -> tuple[bytes, int]:
    end = at + 4 + int(_LENGTH.unpack_from(stored, at)[0])
    return stored[at + 4 : end], end


def _text(stored: bytes, at: int) -> tuple[str, int]:
    raw, end = _read_part(stored, at)
    return raw.decode(), end


def _wall(at: int, offset: int) -> int:
    return at + offset if at else 0


def _clock(wall: int, offset: int) -> int:
    return max(_NEVER_BEFORE, wall - offset) if wall else 0


def environment_at(path: Path, durability: Durability, map_bytes: int = INITIAL_MAP_BYTES) -> LmdbEnvironment:
    """Return the environment of the sessions in the directory ``path``, which is not open yet."""
    return LmdbEnvironment(
        path,
        "mqtt sessions",
        "broker that has them",
        TABLES,
        schema=SCHEMA,
        durability=durability,
        map_bytes=map_bytes,
        many=True,
    )


class SessionStore:
    """The LMDB environment in the directory ``path``, created if it does not exist.

    ``log``: the log of its commits; default: files next to it.
    """

    def __init__(
        self,
        path: Path,
        durability: Durability = Durability.DURABLE,
        *,
        map_bytes: int = INITIAL_MAP_BYTES,
        files: Files | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        log: CommitLog | None = None,
    ) -> None:
        self.stored_bytes = 0
        """Bytes in use, as of the last commit."""
        self._durability = durability
        self._environment = LoggedEnvironment(
            environment_at(path, durability, map_bytes), files=files, segment_bytes=segment_bytes, log=log
        )
        self.path = self._environment.path
        self._tables = self._environment.tables

    @property
    def environment(self) -> LoggedEnvironment:
        """The environment, for backups."""
        return self._environment

    def open(self, wall_offset: int) -> Recovered:
        """Open, check the schema and load everything; instants are converted to the clock that is ``wall_offset``
        behind.

        Raises:
            StorageError: already open in this process, written by a newer version, or unreadable.
        """
        return self._environment.open(lambda transaction: _Loader(transaction, self._tables, wall_offset).load())

    def commit(self, batch: Batch) -> None:
        """Write the changes, all of them or none.

        Raises:
            StorageError: it is unknown whether anything was written.
        """
        if not batch:
            return
        self._environment.commit(
            _operations(batch),
            f"commit of {len(batch)} changes",
            sync=batch.awaited and self._durability is Durability.MEMORY,
        )
        self.stored_bytes = self._environment.stored_bytes()

    def when_failed(self, tell: Callable[[StorageError], None]) -> None:
        """Register ``tell``, which is called in another thread after a failure of the write-back to LMDB."""
        self._environment.on_failure = tell

    def reusable_bytes(self) -> int:
        """Bytes that can be stored without growing the file; from any thread."""
        return self._environment.reusable_bytes()

    def close(self) -> None:
        """Make everything durable and close; may be called twice."""
        self._environment.close()


def _operations(batch: Batch) -> list[Operation]:
    """Encode the batch as rows to put and to delete; runs in the thread of the commit."""
    operations: list[Operation] = []
    offset = batch.wall_offset

    def add(name: str, changes: Iterable[tuple[bytes, T | None]], encode: Callable[[T], bytes]) -> None:
        table = TABLES.index(name)
        operations.extend(
            (DELETE, table, key, b"") if value is None else (PUT, table, key, encode(value)) for key, value in changes
        )

    add(
        "sessions", ((number_key(n), row) for n, row in batch.sessions.items()), lambda row: encode_session(row, offset)
    )
    add(
        "subscriptions",
        ((subscription_key(*key), row) for key, row in batch.subscriptions.items()),
        encode_subscription,
    )
    add("messages", ((number_key(n), m) for n, m in batch.messages.items()), lambda m: encode_message(m, offset))
    add("deliveries", ((number_key(n), d) for n, d in batch.deliveries.items()), lambda d: encode_delivery(*d, offset))
    add("progress", ((number_key(n), p) for n, p in batch.progress.items()), lambda p: encode_progress(*p))
    add("incoming", ((incoming_key(*key), state) for key, state in batch.incoming.items()), lambda s: bytes((s,)))
    add("retained", ((digest_of(t), m) for t, m in batch.retained.items()), lambda m: encode_retained(*m, offset))
    return operations


class _Loader:
    """Reads every database once; moves damaged records to the quarantine, removes those without a session."""

    def __init__(self, transaction: lmdb.Transaction[bytes], tables: dict[str, lmdb._Database], offset: int) -> None:
        self._transaction = transaction
        self._tables = tables
        self._offset = offset
        self._quarantined: list[str] = []
        self._next = 1

    def load(self) -> Recovered:
        """Load everything; records with a wrong checksum are quarantined and counted."""
        offset = self._offset
        sessions: dict[int, SessionRow] = self._numbered("sessions", lambda n, raw: decode_session(n, raw, offset))
        shared: dict[int, MessageRow] = self._numbered("messages", lambda n, raw: decode_message(raw, offset, n))
        referred: set[int] = set()

        def delivery(number: int, raw: bytes) -> DeliveryRow | None:
            row = decode_delivery(number, raw, offset, shared)
            if row is not None:
                referred.add(shared_of(raw))
            return row

        deliveries = self._numbered("deliveries", delivery)
        progress: dict[int, ProgressRow] = self._numbered("progress", decode_progress)
        subscriptions: list[SubscriptionRow] = self._values("subscriptions", decode_subscription)
        retained: list[MessageRow] = self._values("retained", lambda raw: decode_message(raw, offset))
        incoming = [
            (*_INCOMING.unpack(key), state[0])
            for key, state in self._items("incoming")
            if len(key) == _INCOMING.size and state
        ]
        # Rows of a session whose record is lost are removed; the report of the quarantine names the record.
        for number in [n for n, row in deliveries.items() if row.session not in sessions]:
            del deliveries[number]
            self._delete("deliveries", number_key(number))
        for number in [n for n, p in progress.items() if p.session not in sessions]:
            del progress[number]
            self._delete("progress", number_key(number))
        for number in shared.keys() - referred:
            self._delete("messages", number_key(number))
        for row in [row for row in subscriptions if row.session not in sessions]:
            self._delete("subscriptions", subscription_key(row.session, row.topic_filter))
        for session, packet_id, _ in [row for row in incoming if row[0] not in sessions]:
            self._delete("incoming", incoming_key(session, packet_id))
        return Recovered(
            list(sessions.values()),
            [row for row in subscriptions if row.session in sessions],
            list(deliveries.values()),
            list(progress.values()),
            [row for row in incoming if row[0] in sessions],
            retained,
            self._next,
            self._quarantined,
        )

    def _items(self, name: str) -> list[tuple[bytes, bytes]]:
        return [(bytes(key), bytes(value)) for key, value in self._transaction.cursor(db=self._tables[name])]

    def _numbered(self, name: str, decode: Callable[[int, bytes], T | None]) -> dict[int, T]:
        found: dict[int, T] = {}
        for key, stored in self._items(name):
            number = int(_NUMBER.unpack(key)[0])
            self._next = max(self._next, number + 1)
            row = decode(number, stored)
            if row is None:
                self._quarantine(name, key, stored)
            else:
                found[number] = row
        return found

    def _values(self, name: str, decode: Callable[[bytes], T | None]) -> list[T]:
        found: list[T] = []
        for key, stored in self._items(name):
            row = decode(stored)
            if row is None:
                self._quarantine(name, key, stored)
            else:
                found.append(row)
        return found

    def _quarantine(self, name: str, key: bytes, stored: bytes) -> None:
        self._quarantined.append(f"{name}/{key.hex()}")
        self._transaction.put(name.encode() + b"/" + key, stored, db=self._tables["quarantine"])
        self._delete(name, key)

    def _delete(self, name: str, key: bytes) -> None:
        self._transaction.delete(key, db=self._tables[name])
