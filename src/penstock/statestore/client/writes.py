"""Many writes of a client: batches if the store has BATCH, otherwise one request per write.

A store without BATCH rejects the command without executing any of its writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self, TypeVar

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.statestore.client.requests import RequestSender
from penstock.statestore.codec.commands import MAX_TTL_MS, Condition
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import Reply, ReplyKind, decode_replies, decode_reply
from penstock.statestore.errors import (
    InvalidRequestError,
    StateStoreError,
    UnknownStoreError,
    WritesRefusedError,
    as_text,
    refusal,
)
from penstock.statestore.hlc import Hlc

__all__ = ["BatchWriter", "Write", "as_bytes", "as_key"]

T = TypeVar("T")

BATCH_WRITES: Final = 256
"""Writes per BATCH: enough to make the fixed cost of a request small; they occupy the store for some milliseconds."""
BATCH_BYTES: Final = 256 * 1024
"""Size limit of a BATCH; a larger write is sent alone."""
CONCURRENT_BATCHES: Final = 4
"""Batches in flight: enough to send one while another is executed."""
CONCURRENT_WRITES: Final = 256
"""Requests in flight without BATCH: enough to fill the store's group commit. The broker's Receive Maximum may limit
them further."""

_RESERVED_BYTES: Final = 4096
"""Part of the broker's packet size that is reserved for topic and properties."""
_ARGUMENT_OVERHEAD: Final = 16
"""Maximum overhead of an argument in bytes."""
_SINGLE_KEY_ERRORS: Final = (
    StoreError.NOT_AUTHORIZED,
    StoreError.FENCE_REQUIRED,
    StoreError.FENCE_LOWER,
    StoreError.QUOTA,
)
"""Errors that concern a single key."""


def as_bytes(text: bytes | str, argument: str = "value") -> bytes:
    """Encode text as UTF-8; bytes that the command line could not decode are restored.

    Raises:
        LocalProtocolError: ``text`` is neither bytes nor str; the error contains ``argument``.
    """
    if isinstance(text, bytes):
        return text
    given: object = text
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    if not isinstance(given, str):
        raise LocalProtocolError(
            f"state store: {argument} is {given!r:.60}, expected bytes or str, not {type(given).__name__}",
            hint=f"encode the {argument}, for example with str() or json.dumps()",
        )
    return given.encode("utf-8", "surrogateescape")


def as_key(key: bytes | str, argument: str = "key") -> bytes:
    """Encode a key.

    Raises:
        LocalProtocolError: the key is empty, or neither bytes nor str; the error contains ``argument``.
    """
    data = as_bytes(key, argument)
    if not data:
        raise LocalProtocolError(f"state store: the {argument} is empty", why="keys have at least one byte")
    return data


class Write(NamedTuple):
    """A command that changes a key: :meth:`set`, :meth:`delete` or :meth:`vdelete`; ``words``: the command as sent."""

    words: list[bytes]

    @classmethod
    def set(
        cls,
        key: bytes | str,
        value: bytes | str,
        *,
        condition: Condition = Condition.ALWAYS,
        expected: bytes | str | None = None,
        ttl_ms: int | None = None,
    ) -> Self:
        """Set ``key`` to ``value`` if ``condition`` holds; it expires after ``ttl_ms`` milliseconds if given.

        ``expected``: the value that NEX requires of an existing key, instead of ``value``.
        """
        words = [b"SET", as_key(key), as_bytes(value)]
        if condition is not Condition.ALWAYS:
            words.append(condition.value.encode())
        if expected is not None:
            if condition is not Condition.NEX:
                raise LocalProtocolError(
                    f"state store: SET {as_text(words[1])}: an expected value without the condition NEX",
                    hint="pass condition=Condition.NEX",
                )
            words.append(as_bytes(expected))
        if ttl_ms is not None:
            whole: object = ttl_ms
            if not isinstance(whole, int) or not 1 <= whole <= MAX_TTL_MS:
                raise LocalProtocolError(
                    f"state store: SET {as_text(words[1])}: ttl_ms is {ttl_ms!r}",
                    hint=f"use a whole number from 1 to {MAX_TTL_MS} (1,000 years), or omit ttl_ms for a key that does "
                    "not expire",
                )
            words += (b"PX", b"%d" % ttl_ms)
        return cls(words)

    @classmethod
    def delete(cls, key: bytes | str) -> Self:
        """Delete ``key``."""
        return cls([b"DEL", as_key(key)])

    @classmethod
    def vdelete(cls, key: bytes | str, value: bytes | str) -> Self:
        """Delete ``key`` if it has ``value``."""
        return cls([b"VDEL", as_key(key), as_bytes(value)])

    @property
    def key(self) -> bytes:
        """The changed key."""
        return self.words[1]


class BatchWriter:
    """Executes many writes. ``packet_bytes`` returns the broker's Maximum Packet Size; None: no limit."""

    def __init__(self, requests: RequestSender, packet_bytes: Callable[[], int | None]) -> None:
        self._requests = requests
        self._packet_bytes = packet_bytes
        self._has_batch = True
        """Whether the store may have BATCH."""

    async def write(
        self,
        writes: Sequence[Write],
        token: Hlc | None,
        *,
        extra: Mapping[str, str],
        stop: bool,
        timeout_s: float | None,
    ) -> list[bool]:
        """See :meth:`penstock.statestore.client.client.StateStoreClient.write_many`."""
        work = _WriteCall(self._requests, writes, token, extra, stop, timeout_s)
        left = [range(len(writes))]
        if self._has_batch and len(writes) > 1:
            largest = self._packet_bytes()
            limit = BATCH_BYTES if largest is None else min(BATCH_BYTES, largest - _RESERVED_BYTES)
            pieces = _pieces(writes, limit)
            # Writes of the same key must not be in flight at the same time.
            unique = len({write.key for write in writes}) == len(writes)
            left = await work.batches(pieces, CONCURRENT_BATCHES if unique else 1)
            self._has_batch = not left
        await work.singly(left)
        return work.result()


class _WriteCall:
    """One call of :meth:`BatchWriter.write`, with the results so far."""

    def __init__(
        self,
        requests: RequestSender,
        writes: Sequence[Write],
        token: Hlc | None,
        extra: Mapping[str, str],
        stop: bool,  # noqa: FBT001 - from a keyword
        timeout_s: float | None,
    ) -> None:
        self._requests = requests
        self._writes = writes
        self._token = token
        self._extra = extra
        self._stop = stop
        self._timeout_s = timeout_s
        self._applied = [False] * len(writes)
        self._refused: dict[int, str] = {}
        self._failed = False

    async def batches(self, pieces: Iterable[range], at_once: int) -> list[range]:
        """Execute ``pieces`` as batches, ``at_once`` in flight; return the remaining ones if the store has no BATCH."""
        waiting = iter(pieces)
        left: list[range] = []

        async def work() -> None:
            for piece in self._until_stopped(waiting):
                if not left and len(piece) == 1:
                    await self._single(piece.start)
                elif left or not await self._batch(piece):
                    left.append(piece)

        await self._run_workers(work, at_once)
        return sorted(left, key=lambda piece: piece.start)

    async def singly(self, pieces: Iterable[range]) -> None:
        """Execute each write of ``pieces`` as a request, in order for each key."""
        by_key: dict[bytes, list[int]] = {}
        for piece in pieces:
            for place in piece:
                by_key.setdefault(self._writes[place].key, []).append(place)
        waiting = iter(by_key.values())

        async def work() -> None:
            for places in self._until_stopped(waiting):
                for place in self._until_stopped(iter(places)):
                    await self._single(place)

        await self._run_workers(work, min(CONCURRENT_WRITES, len(by_key)))

    def result(self) -> list[bool]:
        """Return for each write whether it was applied.

        Raises:
            WritesRefusedError: the store rejected some.
        """
        if not self._refused:
            return self._applied
        place = min(self._refused)
        write = self._writes[place]
        first = refusal(write.words[0].decode(), write.key, self._refused[place], token=self._token)
        refused = {self._writes[place].key: text for place, text in sorted(self._refused.items())}
        raise WritesRefusedError(first, refused, self._applied) from first

    async def _batch(self, piece: range) -> bool:
        """Send a BATCH; return False if the store does not have it."""
        words = [b"BATCH"]
        for place in piece:
            one = self._writes[place].words
            words.append(b"%d" % len(one))
            words += one
        named = f"BATCH of {len(piece)} writes from", self._writes[piece.start].key
        try:
            payload, _ = await self._requests.call(
                words, self._token, timeout_s=self._timeout_s, extra=self._extra, named=named
            )
        except (InvalidRequestError, UnknownStoreError):
            return False
        replies = decode_replies(payload)
        if len(replies) != len(piece):
            raise RemoteProtocolError(
                f"state store: answer to {named[0]} {as_text(named[1])} has {len(replies)} elements"
            )
        for place, reply in zip(piece, replies, strict=True):
            if reply.kind is ReplyKind.ERROR:
                self._refused[place] = reply.text
            else:
                self._applied[place] = _is_applied(reply)
        return True

    async def _single(self, place: int) -> None:
        try:
            payload, _ = await self._requests.call(
                self._writes[place].words, self._token, timeout_s=self._timeout_s, extra=self._extra
            )
        except StateStoreError as error:
            if error.error not in _SINGLE_KEY_ERRORS:
                raise
            self._refused[place] = error.text
        else:
            self._applied[place] = _is_applied(decode_reply(payload))

    def _until_stopped(self, waiting: Iterator[T]) -> Iterator[T]:
        """Yield the next items until the call fails or stops; the workers share ``waiting``."""
        for piece in waiting:
            if self._failed or (self._stop and self._refused):
                return
            yield piece

    async def _run_workers(self, work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
        """Run ``count`` workers; all end before an error is raised, so that the caller may retry."""

        async def guarded() -> None:
            try:
                await work()
            except BaseException:
                self._failed = True
                raise

        for result in await asyncio.gather(*(guarded() for _ in range(count)), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


def _pieces(writes: Sequence[Write], limit: int) -> Iterator[range]:
    """Split ``writes`` into ranges of at most ``BATCH_WRITES`` writes and about ``limit`` bytes."""
    start = size = 0
    for place, write in enumerate(writes):
        bytes_ = sum(map(len, write.words)) + _ARGUMENT_OVERHEAD * (1 + len(write.words))
        if place > start and (size + bytes_ > limit or place - start >= BATCH_WRITES):
            yield range(start, place)
            start, size = place, 0
        size += bytes_
    yield range(start, len(writes))


def _is_applied(reply: Reply) -> bool:
    if reply.kind not in (ReplyKind.OK, ReplyKind.INTEGER):
        raise RemoteProtocolError(
            f"state store: answer to a write was {reply.kind} {reply.data[:100]!r}",
            why="the responder on the state store's topic does not implement its protocol",
        )
    return reply.kind is ReplyKind.OK or reply.number > 0
