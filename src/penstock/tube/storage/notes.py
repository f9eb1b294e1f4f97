"""Notes about a store, stored with the group offsets: the epochs of its log, and the sequences of producers.

An epoch identifies a part of a log's history by a random number. The first one begins with the log: a topic that is
deleted and created again has another log, and so has a broker with another data directory. A further one begins with a
restart that may have lost messages which consumers had already read: after a restore from a backup, and after a crash
of a topic with a durability weaker than "durable" ("memory" after any crash, "flushed" after a crash of the machine).
An offset that was learned in an epoch is valid if no later epoch began below it. A log that was written by a version
without a first epoch gets it when it is opened, at its end, and readers have 0 as the epoch of their offsets before.

The note of a new log is durable before its first message is written. Until then its epoch may change, which does not
matter: offset 0 is valid in every log.

A second note has the last sequence of each idempotent producer up to an offset of the log. Sequences of later messages
are read from the log, where the first message of each send has a marker (`codec.message.Marker`). The note of a store
is durable before its first such message is written, and rewritten at intervals to limit the part of the log to read.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.tube.codec.message import decode_marker
from penstock.tube.storage.index import INDEX_RECORD_BYTES
from penstock.tube.storage.store import Store

__all__ = [
    "RESTORED",
    "SEQUENCES_PREFIX",
    "SequenceRow",
    "begin_epoch",
    "decode_epochs",
    "decode_sequences",
    "encode_epochs",
    "encode_sequences",
    "epochs_note",
    "may_have_lost",
    "read_sequences",
    "sequences_note",
]

RESTORED = "restored"
"""Key of the state of the last process that a restore from a backup leaves."""

Epochs = list[tuple[int, int]]
_KEPT = 1000
_LEAST_EPOCH = 1 << 30
"""Epochs are below the double of this (int32 on the wire); versions before random epochs counted from 1."""


def epochs_note(topic: str, store: int) -> str:
    """Return the name of a store's note about epochs."""
    return f"epochs/{topic}-{store}"


def encode_epochs(epochs: Epochs) -> bytes:
    """Encode the epochs of a store: each with its first offset."""
    return json.dumps(epochs).encode()


def decode_epochs(note: bytes) -> Epochs:
    """Decode the result of :func:`encode_epochs`."""
    return [(int(epoch), int(start)) for epoch, start in json.loads(note)]


def may_have_lost(previous: Mapping[str, Any] | None, durability: str, boot: str) -> bool:
    """Return True if a log of ``durability`` may have lost readable messages. ``previous``: `BrokerStorage.unclean`.

    A log that was restored from a backup has lost those after the backup.
    """
    if previous is None:
        return False
    if previous.get(RESTORED):
        return True
    if durability == "durable":
        return False
    return durability == "memory" or not boot or previous.get("boot") != boot


def begin_epoch(epochs: Epochs, end: int) -> Epochs:
    """Add an epoch to ``epochs`` for a log that ends at ``end``: it is new, or later messages are lost."""
    # All numbers have the same length, so that a repeated simulation writes the same number of bytes.
    return [*epochs, (_LEAST_EPOCH + secrets.randbelow(_LEAST_EPOCH), end)][-_KEPT:]


SEQUENCES_PREFIX = "producers/"
SequenceRow = tuple[int, int, int, int]
"""Partition id, producer, last stored sequence, and its time (ms)."""

_OFFSET = struct.Struct(">q")
_ROW = struct.Struct(">iqqq")


def sequences_note(topic: str, store: int) -> str:
    """Return the name of a store's note about producer sequences."""
    return f"{SEQUENCES_PREFIX}{topic}-{store}"


def encode_sequences(offset: int, rows: Iterable[SequenceRow]) -> bytes:
    """Encode ``rows``, the sequences after all messages below ``offset``."""
    return _OFFSET.pack(offset) + b"".join(_ROW.pack(*row) for row in rows)


def decode_sequences(note: bytes) -> tuple[int, list[SequenceRow]]:
    """Decode a note into ``(offset, rows)`` of `encode_sequences`."""
    (offset,) = _OFFSET.unpack_from(note)
    return offset, [(p, producer, last, time) for p, producer, last, time in _ROW.iter_unpack(note[_OFFSET.size :])]


def read_sequences(store: Store, offset: int) -> Iterator[SequenceRow]:
    """Return the sequences of the messages from ``offset``, oldest first. Raises OSError if the disk fails."""
    partition = producer = first = begin = stop = -1
    for at, of_partition, time_ms, message in store.stored(offset):
        marker = decode_marker(message)
        if marker is not None:
            partition, producer, first = of_partition, marker.producer, marker.sequence
            begin, stop = at, at + marker.size * INDEX_RECORD_BYTES
        if at < stop and of_partition == partition:
            yield partition, producer, first + (at - begin) // INDEX_RECORD_BYTES, time_ms
