"""Sessions and retained messages on disk: one LMDB environment behind a log, one writer, every value checksummed.

Databases: ``sessions``, ``subscriptions``, ``messages`` (those that several deliveries share), ``deliveries``,
``progress`` (packet identifiers of what waited before it was sent, and what is past PUBREC), ``incoming`` (QoS 2
messages of clients without PUBREL), ``retained``, ``meta`` (``schema``) and ``quarantine`` (records with a wrong
checksum). Deliveries are numbered over all sessions, so that new ones go to the end of their database and one page
takes many. A commit is all of it or nothing.

What a commit promises depends on the durability: ``durable`` = fsynced, in the write-ahead log of
:mod:`penstock.runtime.io.wal`; ``flushed`` and ``memory`` = a transaction of LMDB, written to the page cache, fsynced
when the kernel decides, when a change requires it, and on :meth:`SessionStore.close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from struct import Struct
from typing import Final, TypeVar

import lmdb

from penstock.errors import StorageError
from penstock.mqtt.engine.model.journal import (
    Batch,
    DeliveryRow,
    MessageRow,
    ProgressRow,
    Recovered,
    SessionRow,
    SubscriptionRow,
)
from penstock.mqtt.storage.records import (
    decode_delivery,
    decode_message,
    decode_progress,
    decode_session,
    decode_subscription,
    digest_of,
    encode_delivery,
    encode_message,
    encode_progress,
    encode_retained,
    encode_session,
    encode_subscription,
    incoming_key,
    number_key,
    shared_of,
    subscription_key,
)
from penstock.runtime.io.files import Durability, Files
from penstock.runtime.io.lmdb_environment import INITIAL_MAP_BYTES, LmdbEnvironment
from penstock.runtime.io.wal.frames import DELETE, PUT, Operation
from penstock.runtime.io.wal.logged_environment import LoggedEnvironment
from penstock.runtime.io.wal.segments import SEGMENT_BYTES

__all__ = ["SCHEMA", "SessionStore"]

SCHEMA: Final = 3
"""Layout of the databases; a newer one is refused. From 2 on there may be commits in a log next to them, from 3 on
retained messages may have their publisher."""

_NUMBER: Final = Struct(">Q")
_INCOMING: Final = Struct(">QH")
_TABLES: Final = (
    *("sessions", "subscriptions", "messages", "deliveries", "progress", "incoming", "retained"),
    *("meta", "quarantine"),
)
"""Frames of the log name a table by its index here: new tables go to the end."""

T = TypeVar("T")


class SessionStore:
    """The LMDB environment in the directory ``path``, created if it does not exist."""

    def __init__(
        self,
        path: Path,
        durability: Durability = Durability.DURABLE,
        *,
        map_bytes: int = INITIAL_MAP_BYTES,
        files: Files | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.stored_bytes = 0
        """Bytes in use, as of the last commit."""
        self._durability = durability
        self._environment = LoggedEnvironment(
            LmdbEnvironment(
                path,
                "mqtt sessions",
                "broker that has them",
                _TABLES,
                schema=SCHEMA,
                durability=durability,
                map_bytes=map_bytes,
                many=True,
            ),
            files=files,
            segment_bytes=segment_bytes,
        )
        self.path = self._environment.path
        self._tables = self._environment.tables

    def open(self, wall_offset: int) -> Recovered:
        """Open, check the schema and load everything; instants become those of a clock ``wall_offset`` behind.

        Raises:
            StorageError: already open in this process, written by a newer version, or not readable as a whole.
        """
        return self._environment.open(lambda transaction: _Loader(transaction, self._tables, wall_offset).load())

    def commit(self, batch: Batch) -> None:
        """Write the changes, all of them or none.

        Raises:
            StorageError: nothing is known to be on disk.
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
        """Call ``tell``, in another thread, after a failure of the write-back to LMDB."""
        self._environment.on_failure = tell

    def reusable_bytes(self) -> int:
        """Bytes that can be stored without growing the file; from any thread."""
        return self._environment.reusable_bytes()

    def close(self) -> None:
        """Make everything durable and close; may be called twice."""
        self._environment.close()


def _operations(batch: Batch) -> list[Operation]:
    """Encode the batch as rows to put and to delete; runs where the commit runs."""
    operations: list[Operation] = []
    offset = batch.wall_offset

    def add(name: str, changes: Iterable[tuple[bytes, T | None]], encode: Callable[[T], bytes]) -> None:
        table = _TABLES.index(name)
        operations.extend(
            (DELETE, table, key, b"") if value is None else (PUT, table, key, encode(value)) for key, value in changes
        )

    numbered = number_key
    add("sessions", ((numbered(n), row) for n, row in batch.sessions.items()), lambda row: encode_session(row, offset))
    add(
        "subscriptions",
        ((subscription_key(*key), row) for key, row in batch.subscriptions.items()),
        encode_subscription,
    )
    add("messages", ((numbered(n), m) for n, m in batch.messages.items()), lambda m: encode_message(m, offset))
    add("deliveries", ((numbered(n), d) for n, d in batch.deliveries.items()), lambda d: encode_delivery(*d, offset))
    add("progress", ((numbered(n), p) for n, p in batch.progress.items()), lambda p: encode_progress(*p))
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
