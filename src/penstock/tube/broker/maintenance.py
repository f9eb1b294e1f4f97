"""Recovery and periodic maintenance of a broker's logs: retention, offset history, state for the next start.

`open_logs` runs in a thread before the broker listens. `Maintenance` runs in the loop and fills the next commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from penstock.errors import StorageError
from penstock.runtime.io.clock import boot_id
from penstock.runtime.io.files import Durability, Files
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC
from penstock.tube.engine.broker.group_offsets import GroupOffsets, Key
from penstock.tube.engine.broker.offset_history import group_history
from penstock.tube.engine.broker.topics import (
    Topics,
)
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.engine.interfaces import LogStore
from penstock.tube.engine.transactions.handler import Publication
from penstock.tube.engine.transactions.staging import InDoubtWatch, Staging, StagingLimits
from penstock.tube.storage.broker_storage import BrokerStorage, StorageCommit
from penstock.tube.storage.meta import MetaStore
from penstock.tube.storage.notes import (
    SEQUENCES_PREFIX,
    SequenceRow,
    begin_epoch,
    decode_epochs,
    decode_sequences,
    encode_epochs,
    encode_sequences,
    epochs_note,
    may_have_lost,
    read_sequences,
    sequences_note,
)
from penstock.tube.storage.recovery import Loss
from penstock.tube.storage.retention import Retention, parse_policy
from penstock.tube.storage.store import Store, StoreLimits

__all__ = ["Maintenance", "OpenedLogs", "TopicDurability", "newest_message", "open_logs"]

_log = logging.getLogger("penstock.tube.broker.broker")

UNDECIDED = (
    "start the query or the missing broker again, or penstock tube staged resolve QUERY; if a broker is lost"
    " permanently, penstock tube staged delete QUERY --force"
)


@dataclass(frozen=True, slots=True)
class TopicDurability:
    """Durability of acknowledged messages, by topic."""

    default: Durability = Durability.DURABLE
    topics: Mapping[str, Durability] = field(default_factory=dict)

    def __call__(self, topic: str) -> Durability:
        return self.topics.get(topic, self.default)

    def state(self) -> dict[str, object]:
        """Return the argument of `BrokerStorage.run`: the durabilities of this process, for recovery by the next
        one."""
        return {"default": str(self.default), "topics": {name: str(kind) for name, kind in self.topics.items()}}


@dataclass(slots=True)
class OpenedLogs:
    """An opened directory, with recovered producer sequences, epochs and staged rows."""

    storage: BrokerStorage
    producers: list[tuple[str, list[SequenceRow]]]
    staging: Staging


def newest_message(topics: Topics, topic: str, partition: int) -> tuple[bytes, int] | None:
    """Return data and flag of the last durable message of a partition; None if there is none. Raises StorageError."""
    served = topics.by_name.get(topic)
    if served is None or not served.has(partition):
        return None
    store = topics.store(served, partition)
    assert isinstance(store, Store)
    _, count = store.plan(partition, store.min_offset, None, 1 << 62)
    if not count:
        return None
    start, _ = store.plan(partition, store.min_offset, None, count - 1)
    found = store.read(partition, start, max_messages=1)
    if not found.messages:
        raise StorageError(
            f"tube: the last message of topic {topic!r}, partition {partition}, cannot be read",
            path=str(store.directory),
            hint="run penstock tube broker fsck on the data directory",
        )
    (message,) = pb.GetMessageResponseB2C.FromString(found.messages[0]).messages
    return message.payLoadData, message.flag


def open_logs(
    directory: Path,
    durability: TopicDurability,
    *,
    files: Files | None,
    limits: StoreLimits,
    staging_limits: StagingLimits,
    on_loss: Callable[[object], None],
    open_meta: Callable[[Path], MetaStore] | None = None,
) -> OpenedLogs:
    """Open the directory and every store in it. Blocks: reads the newest segment of each store.

    Raises StorageError when the directory is in use or cannot be read.
    """

    def lost(loss: Loss) -> None:
        on_loss(loss)

    storage = BrokerStorage(directory, files=files, limits=limits, on_loss=lost, open_meta=open_meta)
    try:
        producers = []
        notes: dict[str, bytes | None] = {}
        for topic, number in storage.existing_stores():
            store = storage.open_store(topic, number)
            name = epochs_note(topic, number)
            if name in storage.notes:
                store.epochs = decode_epochs(storage.notes[name])
            if not store.epochs or (storage.unclean is not None and _cut(storage, topic)):
                store.epochs = begin_epoch(store.epochs, store.end_offset)
                notes[name] = encode_epochs(store.epochs)
            name = sequences_note(topic, number)
            note = storage.notes.get(name)
            if note is not None:
                offset, rows = decode_sequences(note)
                if offset <= store.end_offset:
                    rows += read_sequences(store, offset)
                else:
                    # A crash of the machine took messages of a log that is not synced. Their numbers are forgotten:
                    # a producer that sends them again would get an acknowledgement, and they would not be stored.
                    found = {(row[0], row[1]): row for row in read_sequences(store, store.min_offset)}
                    rows = list(found.values())
                    notes[name] = encode_sequences(store.end_offset, rows)
                producers.append((topic, rows))
        storage.meta.commit([], notes=notes)
        staging = Staging(storage.staging_files, staging_limits)
        for text in staging.restore(storage.notes, storage.staging_files.recover()):
            on_loss(text)
        storage.run(durability.state())
    except OSError as error:
        storage.close(clean=False)
        raise StorageError(
            f"tube: staged rows in {storage.staging_files.directory} cannot be read: {error.strerror}",
            path=str(error.filename or storage.staging_files.directory),
        ) from error
    except BaseException:
        storage.close(clean=False)
        raise
    return OpenedLogs(storage, producers, staging)


def _cut(storage: BrokerStorage, topic: str) -> bool:
    previous = storage.unclean or {}
    durability = previous.get("topics", {}).get(topic, previous.get("default", str(Durability.DURABLE)))
    return may_have_lost(previous, durability, boot_id() or "")


class Maintenance:
    """Periodic work of a broker. ``max_store_bytes``: size limit of each store, None: no limit."""

    def __init__(
        self, storage: BrokerStorage, engine: BrokerEngine, broker_id: int, max_store_bytes: int | None
    ) -> None:
        self._storage = storage
        self._engine = engine
        self._broker_id = broker_id
        self._max_store_bytes = max_store_bytes
        self.undecided = InDoubtWatch()
        self._noted = {name for name in storage.notes if name.startswith(SEQUENCES_PREFIX)}
        self.new_logs: dict[LogStore, str] = {}
        """New logs and the name of the note about their epoch, which is not stored yet."""

    def retain(self, commit: StorageCommit, now_ms: int) -> bool:
        """Remove expired segments with ``commit``; returns whether there are any."""
        changed = False
        for (name, _), store in self._storage.stores.items():
            topic = self._engine.topics.by_name.get(name)
            if topic is None:
                continue
            policy = topic.config.delete_policy or ""
            gone = store.expire(Retention(parse_policy(policy), self._max_store_bytes), now_ms)
            if gone:
                commit.expired.append((store, gone))
            if gone or store.dirty:
                self._engine.dirty_stores[store] = None
                changed = True
        return changed

    def opened(self, topic: str, number: int, store: Store) -> None:
        """Begin the first epoch of ``store`` if its log is new."""
        if not store.epochs:
            store.epochs = begin_epoch([], store.end_offset)
            self.new_logs[store] = epochs_note(topic, number)

    def note_epochs(self, commit: StorageCommit) -> None:
        """Before the first message of a log, store the log's epoch. Call before the dirty stores are taken."""
        for store in self._engine.dirty_stores:
            name = self.new_logs.pop(store, None)
            if name is not None:
                commit.early_notes[name] = encode_epochs(store.epochs)

    def note_producers(self, commit: StorageCommit) -> None:
        """Before the first numbered message of a log, store the offset from which recovery scans for such messages."""
        for topic, number in self._engine.produce.producers.changed:
            name = sequences_note(topic, number)
            store = self._storage.stores.get((topic, number))
            if name not in self._noted and store is not None:
                self._noted.add(name)
                commit.early_notes[name] = encode_sequences(store.written_end, [])

    def snapshot_producers(self, commit: StorageCommit, now_ms: int) -> None:
        """Store the producer sequences of all messages up to and including ``commit``."""
        producers = self._engine.produce.producers
        producers.expire(now_ms)
        for topic, number in producers.changed:
            store = self._storage.stores.get((topic, number))
            if store is not None:
                note = encode_sequences(store.end_offset, producers.snapshot(topic, number))
                commit.notes[sequences_note(topic, number)] = note
        producers.changed.clear()

    def take_staged(self, commit: StorageCommit) -> list[Publication]:
        """Pass staged rows and decisions to ``commit``; returns the decisions to apply after it."""
        transactions = self._engine.transactions
        staging = transactions.staging
        assert staging is not None, "a broker has one"
        if self._storage.staging_files.dirty:
            commit.staged, commit.unstaged = self._storage.staging_files.take_unwritten()
        if staging.notes:
            commit.notes.update(staging.notes)
            staging.notes = {}
        return transactions.take_decided()

    def staged(self, commit: StorageCommit, decided: list[Publication]) -> None:
        """Mark the rows of ``commit`` as durable, and start to publish its decisions."""
        self._storage.staging_files.written(commit.staged)
        publishing = self._engine.transactions.publishing
        assert publishing is not None, "a broker has one"
        for publication in decided:
            publishing.begin(publication)

    def expire_staged(self, now_ms: int) -> bool:
        """Remove expired staged rows; returns whether the next commit has work."""
        transactions = self._engine.transactions
        assert transactions.staging is not None, "a broker has one"
        assert transactions.publishing is not None, "a broker has one"
        transactions.staging.tick(now_ms)
        for late in self.undecided.check(transactions.staging.queries.values(), now_ms):
            about = late._asdict() | {"broker_id": self._broker_id, "participants": ",".join(late.participants)}
            _log.warning("tube transaction undecided", extra={"fields": {**about, "hint": UNDECIDED}})
        # Rows that wait for an unknown topic are tried again, or given up, by a commit.
        return transactions.dirty or transactions.publishing.held or self._storage.staging_files.dirty

    def staged_stats(self) -> dict[str, int]:
        """Counters and gauges of staging and publishing."""
        transactions = self._engine.transactions
        staging, publishing = transactions.staging, transactions.publishing
        assert staging is not None, "a broker has one"
        assert publishing is not None, "a broker has one"
        return {
            "staged_bytes": staging.bytes,
            "staged_attempts": staging.attempts,
            "staged_expired": staging.expired,
            "undecided_transactions": len(self.undecided.late),
            "committed_batches": publishing.batches,
            "committed_messages": publishing.published,
        }

    def forget(self, topic: str, commit: StorageCommit) -> None:
        """Remove the notes of a topic that is removed: they do not apply to a later topic of the same name."""
        for (name, number), store in self._storage.stores.items():
            if name == topic:
                self.new_logs.pop(store, None)
                commit.notes[epochs_note(topic, number)] = None
                commit.notes[sequences_note(topic, number)] = None
                self._noted.discard(sequences_note(topic, number))

    def write_history(self, now_ms: int) -> int:
        """Append the offsets of every group to the system topic; returns the number of messages."""
        engine = self._engine
        if engine.checks.failure is not None or engine.checks.write_stopped:
            return 0
        minute = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y%m%d%H%M")
        found = group_history(engine.topics, engine.offsets, engine.registrations, self._broker_id, now_ms, minute)
        topic = engine.topics.by_name[OFFSET_HISTORY_TOPIC]
        for item in found:
            engine.produce.append_system(topic, item.partition, item.data, item.flag, item.msg_type, now_ms)
        return len(found)

    def reset_beyond_end(self, offsets: GroupOffsets) -> list[tuple[Key, int, int]]:
        """Reset offsets beyond the end of their log to it; returns (key, offset, end) of each."""
        found = []
        for key, offset in offsets.items():
            store = self._storage.stores.get((key[1], key[2] // 10000))
            end = 0 if store is None else store.durable_end  # a store without files has no messages
            if offset > end:
                found.append((key, offset, end))
                offsets.set(key, end)
        return found
