"""Messages by type: what is left of a batch. Brokers choose by a hash of the type, or not at all; this is exact."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from penstock.spark.tube.client import Batch
from penstock.tube.codec.message import HAS_ATTRIBUTES, MSG_TYPE
from penstock.tube.record import encode_msg_type

__all__ = ["only"]

_TYPE = MSG_TYPE.encode() + b"="


class _Chosen(NamedTuple):
    offsets: Sequence[int]
    append_times: Sequence[int]
    flags: Sequence[int]
    payloads: Sequence[bytes]
    message_ids: Sequence[int] | None
    reached: int

    @property
    def spans(self) -> None:
        """What is left does not stand together."""
        return


def only(types: Collection[str]) -> Callable[[Batch], Batch]:
    """What leaves of a batch the messages whose type is one of ``types``; those without a type are not."""
    wanted = frozenset(encode_msg_type(text).encode() for text in types)
    return lambda batch: _chosen(wanted, batch)


def _chosen(wanted: frozenset[bytes], batch: Batch) -> Batch:
    chosen = [
        place
        for place, (payload, flag) in enumerate(zip(batch.payloads, batch.flags, strict=True))
        if flag & HAS_ATTRIBUTES and _type_of(payload) in wanted
    ]
    if len(chosen) == len(batch.payloads):
        return batch
    ids = batch.message_ids
    return _Chosen(
        [batch.offsets[place] for place in chosen],
        [batch.append_times[place] for place in chosen] if len(batch.append_times) else (),
        [batch.flags[place] for place in chosen],
        [batch.payloads[place] for place in chosen],
        None if ids is None else [ids[place] for place in chosen],
        batch.reached,
    )


def _type_of(payload: bytes) -> bytes | None:
    end = min(4 + int.from_bytes(payload[:4], signed=True), len(payload))
    # Writers put the type first; a reader takes it wherever it stands.
    start = 4 if payload.startswith(_TYPE, 4) else payload.find(b"," + _TYPE, 4, end) + 1
    if start == 0:
        return None
    start += len(_TYPE)
    stop = payload.find(b",", start, end)
    return payload[start : end if stop < 0 else stop].strip()
