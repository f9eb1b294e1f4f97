"""What a request claims of time and fences: its time stamp, its token and the prefix it fences, read and checked.

Source: state store protocol, "Versioning and hybrid logical clocks", "Fencing Token Algorithm".
"""

from __future__ import annotations

from penstock.statestore.codec.commands import Command, Extension
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.engine.answer import Context
from penstock.statestore.engine.fences import MAX_PREFIX_BYTES, Fences
from penstock.statestore.engine.record import Record
from penstock.statestore.hlc import Hlc, parse_wire

__all__ = ["fence_error", "fence_prefix", "read_preconditions"]


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


def read_preconditions(command: Command, context: Context, now_ms: int) -> StoreError | None:
    """Set ``context.time`` and ``context.token`` to the time stamp and token; return the first error in them.

    The clock has not been touched before: a client with a fast clock must not push it.
    """
    spec = command.spec
    context.time = context.token = None
    if context.timestamp is not None:
        time = parse_wire(context.timestamp)
        if time is None:
            return StoreError.TIMESTAMP_MALFORMED
        if time.is_too_far_ahead(now_ms):
            return StoreError.TIMESTAMP_TOO_FAR_AHEAD
        context.time = time
    elif spec.needs_timestamp:
        return StoreError.TIMESTAMP_MISSING
    if spec.checks_fence and context.fencing_token is not None:
        token = parse_wire(context.fencing_token)
        if token is None:
            return StoreError.TIMESTAMP_MALFORMED
        if token.is_too_far_ahead(now_ms):
            return StoreError.FENCE_TOO_FAR_AHEAD
        context.token = token
    return None


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
