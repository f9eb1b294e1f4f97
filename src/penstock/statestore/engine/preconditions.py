"""What a request claims of time and fences: its time stamp, its token and the prefix it fences, read and checked.

Source: state store protocol, "Versioning and hybrid logical clocks", "Fencing Token Algorithm".
"""

from __future__ import annotations

from typing import final

from mypy_extensions import mypyc_attr

from penstock.statestore.codec.commands import Command, Extension
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.engine.answer import Context
from penstock.statestore.engine.fences import MAX_PREFIX_BYTES, Fences
from penstock.statestore.engine.record import Record
from penstock.statestore.hlc import Hlc, parse_wire

__all__ = ["Preconditions", "fence_error", "fence_prefix", "read_preconditions"]


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Preconditions:
    """None where the request has none; none of the instants is too far ahead."""

    __slots__ = ("timestamp", "token")

    def __init__(self, timestamp: Hlc | None, token: Hlc | None) -> None:
        self.timestamp = timestamp
        self.token = token


def fence_prefix(command: Command, context: Context, extensions: Extension) -> bytes | StoreError | None:
    """The prefix whose floor a SET raises (extension); a BATCH raises none, and is refused as it would not."""
    prefix = context.fence_prefix
    if prefix is None or not command.spec.needs_timestamp:
        return None
    if command.writes or not extensions & Extension.PREFIX_FENCE:
        return StoreError.SYNTAX
    if not 0 < len(prefix) <= MAX_PREFIX_BYTES or context.fencing_token is None:
        return StoreError.FENCE_PREFIX
    return prefix


def read_preconditions(command: Command, context: Context, now_ms: int) -> Preconditions | StoreError:
    """Time stamp and token, or the first error in them.

    The clock has not been touched before: a client with a fast clock must not push it.
    """
    spec = command.spec
    timestamp: Hlc | None = None
    token: Hlc | None = None
    if context.timestamp is not None:
        timestamp = parse_wire(context.timestamp)
        if timestamp is None:
            return StoreError.TIMESTAMP_MALFORMED
        if timestamp.is_too_far_ahead(now_ms):
            return StoreError.TIMESTAMP_TOO_FAR_AHEAD
    elif spec.needs_timestamp:
        return StoreError.TIMESTAMP_MISSING
    if spec.checks_fence and context.fencing_token is not None:
        token = parse_wire(context.fencing_token)
        if token is None:
            return StoreError.TIMESTAMP_MALFORMED
        if token.is_too_far_ahead(now_ms):
            return StoreError.FENCE_TOO_FAR_AHEAD
    return Preconditions(timestamp, token)


def fence_error(
    key: bytes, record: Record | None, token: Hlc | None, fences: Fences, prefix: bytes | None
) -> StoreError | None:
    """Why the fence of ``key``, or a floor above it, keeps out who has ``token``; None where nothing does."""
    fence = record.fence if record is not None else None
    if fences.floors:
        floor = fences.floor_of(key)
        if prefix is not None and (lifted := fences.floors.get(prefix)) is not None:
            floor = lifted if floor is None else max(floor, lifted)
        if floor is not None and (fence is None or floor > fence):
            fence = floor
    if fence is None:
        return None
    if token is None:
        return StoreError.FENCE_REQUIRED
    return StoreError.FENCE_LOWER if token.is_before(fence) else None
