"""Many writes of one client: many with one request where the store has BATCH, else one with each.

A store without it refuses the command, and nothing of that request was done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self, TypeVar

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.statestore.client.exchange import Exchange
from penstock.statestore.codec.arguments import MAX_TTL_MS
from penstock.statestore.codec.commands import Condition
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

__all__ = ["ManyWrites", "Write", "as_bytes", "as_key"]

T = TypeVar("T")

WRITES_A_REQUEST: Final = 256
"""Writes of one BATCH: the request itself costs little beside so many, which keep the store for some milliseconds."""
REQUEST_BYTES: Final = 256 * 1024
"""How large a BATCH shall be at most; a write that is larger goes alone."""
CONCURRENT_BATCHES: Final = 4
"""Requests under way at once: enough to have one written while another is carried out."""
CONCURRENT_WRITES: Final = 256
"""The same where each write is a request: enough to fill the store's group commit. Where the broker's receive maximum
allows fewer, the client waits."""

_ROOM: Final = 4096
"""Of the broker's packet size, for topic and properties."""
_WORD_BYTES: Final = 16
"""What a word takes beside itself at most."""
_OF_ONE_KEY: Final = (StoreError.NOT_AUTHORIZED, StoreError.FENCE_REQUIRED, StoreError.FENCE_LOWER, StoreError.QUOTA)
"""Refusals that say nothing of the next key."""


def as_bytes(text: bytes | str) -> bytes:
    """``text`` as it goes on the wire; what the command line could not decode comes out as it came in."""
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def as_key(key: bytes | str) -> bytes:
    """The same for a key.

    Raises:
        LocalProtocolError: it is empty.
    """
    if not key:
        raise LocalProtocolError("state store: the key is empty", why="keys have at least one byte")
    return as_bytes(key)


class Write(NamedTuple):
    """One command that changes a key: :meth:`set`, :meth:`delete` or :meth:`vdelete`; ``words`` is how it is sent."""

    words: list[bytes]

    @classmethod
    def set(
        cls,
        key: bytes | str,
        value: bytes | str,
        *,
        condition: Condition = Condition.ALWAYS,
        ttl_ms: int | None = None,
    ) -> Self:
        """Set ``key`` to ``value``, for ``ttl_ms`` milliseconds or for good, where ``condition`` holds."""
        words = [b"SET", as_key(key), as_bytes(value)]
        if condition is not Condition.ALWAYS:
            words.append(condition.value.encode())
        if ttl_ms is not None:
            if not 1 <= ttl_ms <= MAX_TTL_MS:
                raise LocalProtocolError(
                    f"state store: SET {as_text(words[1])}: ttl_ms is {ttl_ms}",
                    do=f"give 1 to {MAX_TTL_MS} (1,000 years), or no ttl_ms for a key that does not expire",
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
        """The key that it changes."""
        return self.words[1]


class ManyWrites:
    """The writes of one client. ``packet_bytes`` tells the largest packet that the broker takes, where it says so."""

    def __init__(self, exchange: Exchange, packet_bytes: Callable[[], int | None]) -> None:
        self._exchange = exchange
        self._packet_bytes = packet_bytes
        self._offered = True
        """Whether the store has BATCH, as far as is known."""

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
        work = _Work(self._exchange, writes, token, extra, stop, timeout_s)
        left = [range(len(writes))]
        if self._offered and len(writes) > 1:
            largest = self._packet_bytes()
            limit = REQUEST_BYTES if largest is None else min(REQUEST_BYTES, largest - _ROOM)
            pieces = _pieces(writes, limit)
            # Where a key comes twice its writes must not be under way at once.
            unique = len({write.key for write in writes}) == len(writes)
            left = await work.batches(pieces, CONCURRENT_BATCHES if unique else 1)
            self._offered = not left
        await work.singly(left)
        return work.result()


class _Work:
    """One call: what came of each write so far."""

    def __init__(
        self,
        exchange: Exchange,
        writes: Sequence[Write],
        token: Hlc | None,
        extra: Mapping[str, str],
        stop: bool,  # noqa: FBT001 - from a keyword
        timeout_s: float | None,
    ) -> None:
        self._exchange = exchange
        self._writes = writes
        self._token = token
        self._extra = extra
        self._stop = stop
        self._timeout_s = timeout_s
        self._applied = [False] * len(writes)
        self._refused: dict[int, str] = {}
        self._failed = False

    async def batches(self, pieces: Iterable[range], at_once: int) -> list[range]:
        """Have ``pieces`` carried out, ``at_once`` under way; those that are left where the store has no BATCH."""
        waiting = iter(pieces)
        left: list[range] = []

        async def work() -> None:
            for piece in self._until_over(waiting):
                if not left and len(piece) == 1:
                    await self._single(piece.start)
                elif left or not await self._batch(piece):
                    left.append(piece)

        await self._side_by_side(work, at_once)
        return sorted(left, key=lambda piece: piece.start)

    async def singly(self, pieces: Iterable[range]) -> None:
        """Have each write of ``pieces`` carried out by itself, those of one key in their order."""
        by_key: dict[bytes, list[int]] = {}
        for piece in pieces:
            for place in piece:
                by_key.setdefault(self._writes[place].key, []).append(place)
        waiting = iter(by_key.values())

        async def work() -> None:
            for places in self._until_over(waiting):
                for place in self._until_over(iter(places)):
                    await self._single(place)

        await self._side_by_side(work, min(CONCURRENT_WRITES, len(by_key)))

    def result(self) -> list[bool]:
        """Whether each write was applied.

        Raises:
            WritesRefusedError: the store refused some.
        """
        if not self._refused:
            return self._applied
        place = min(self._refused)
        write = self._writes[place]
        first = refusal(write.words[0].decode(), write.key, self._refused[place], token=self._token)
        refused = {self._writes[place].key: text for place, text in sorted(self._refused.items())}
        raise WritesRefusedError(first, refused, self._applied) from first

    async def _batch(self, piece: range) -> bool:
        """Send one BATCH; False: the store has none."""
        words = [b"BATCH"]
        for place in piece:
            one = self._writes[place].words
            words.append(b"%d" % len(one))
            words += one
        named = f"BATCH of {len(piece)} writes from", self._writes[piece.start].key
        try:
            payload, _ = await self._exchange.call(
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
            payload, _ = await self._exchange.call(
                self._writes[place].words, self._token, timeout_s=self._timeout_s, extra=self._extra
            )
        except StateStoreError as error:
            if error.error not in _OF_ONE_KEY:
                raise
            self._refused[place] = error.text
        else:
            self._applied[place] = _is_applied(decode_reply(payload))

    def _until_over(self, waiting: Iterator[T]) -> Iterator[T]:
        """What is still to be begun; shared by workers, each takes the next."""
        for piece in waiting:
            if self._failed or (self._stop and self._refused):
                return
            yield piece

    async def _side_by_side(self, work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
        """Run ``count`` workers; all end before an error is raised: nothing may be under way when it is repeated."""

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
    """``writes`` cut into requests of at most ``WRITES_A_REQUEST`` and about ``limit`` bytes, by their places."""
    start = size = 0
    for place, write in enumerate(writes):
        bytes_ = sum(map(len, write.words)) + _WORD_BYTES * (1 + len(write.words))
        if place > start and (size + bytes_ > limit or place - start >= WRITES_A_REQUEST):
            yield range(start, place)
            start, size = place, 0
        size += bytes_
    yield range(start, len(writes))


def _is_applied(reply: Reply) -> bool:
    if reply.kind not in (ReplyKind.OK, ReplyKind.INTEGER):
        raise RemoteProtocolError(
            f"state store: answer to a write was {reply.kind} {reply.data[:100]!r}",
            why="what answers on the state store's topic does not speak its protocol",
        )
    return reply.kind is ReplyKind.OK or reply.number > 0
