"""Messages by type: what is left of a batch. Brokers choose by a hash of the type, or not at all; this is exact."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from penstock.tube.codec.message import HAS_ATTRIBUTES, MSG_TYPE
from penstock.tube.record import encode_msg_type

if TYPE_CHECKING:
    from penstock.tube.reader import MessageBatch

__all__ = ["only"]

_TYPE = MSG_TYPE.encode() + b"="


def only(types: Collection[str]) -> Callable[[MessageBatch], MessageBatch]:
    """What leaves of a batch the messages whose type is one of ``types``; those without a type are not."""
    wanted = frozenset(encode_msg_type(text).encode() for text in types)
    return lambda batch: _chosen(wanted, batch)


def _chosen(wanted: frozenset[bytes], batch: MessageBatch) -> MessageBatch:
    chosen = [
        place
        for place, (payload, flag) in enumerate(zip(batch.payloads, batch.flags, strict=True))
        if flag & HAS_ATTRIBUTES and _type_of(payload) in wanted
    ]
    return batch if len(chosen) == len(batch.payloads) else batch.select(chosen)


def _type_of(payload: bytes) -> bytes | None:
    end = min(4 + int.from_bytes(payload[:4], signed=True), len(payload))
    # Writers put the type first; a reader takes it wherever it stands.
    start = 4 if payload.startswith(_TYPE, 4) else payload.find(b"," + _TYPE, 4, end) + 1
    if start == 0:
        return None
    start += len(_TYPE)
    stop = payload.find(b",", start, end)
    return payload[start : end if stop < 0 else stop].strip()
