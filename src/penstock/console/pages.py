"""Cursor pages over lists that change, read in shares of the event loop.

A page is sorted by one column and then by the id of the rows. The cursor has both values of the last row, so that the
next page begins after it even if rows were added or removed in between: a row that exists during the whole listing is
returned exactly once, unless its value of the sort column changes.

Each page reads the whole list, up to 100,000 rows, because it is sorted by values that change constantly. It is read in
shares of :data:`SHARE_ROWS` rows, about a millisecond, between which the loop serves clients. One list is read at a
time, regardless of the number of requests.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from penstock.errors import LocalProtocolError

__all__ = ["DEFAULT_LIMIT", "MAX_LIMIT", "SHARE_ROWS", "Page", "PageQuery", "Pages", "decode_cursor", "encode_cursor"]

SHARE_ROWS: Final = 250
"""Rows per share."""

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 1000
"""Largest number of rows of a page."""

R = TypeVar("R")
T = TypeVar("T")
Value = str | int | float


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """Rows, and the cursor of the next page; None on the last one.

    ``total``: number of rows of the whole list; ``matched``: number of rows that pass the filter, None if they were not
    counted. ``complete`` False: there are more rows than were read.
    """

    rows: tuple[R, ...]
    next: str | None
    total: int
    matched: int | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class PageQuery:
    """A request for a page. ``text``: part of the id, case-insensitive. ``sort``: a column, descending after ``-``."""

    text: str = ""
    sort: str = ""
    after: str | None = None
    limit: int = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        """Check the limit. Raises LocalProtocolError."""
        if not 1 <= self.limit <= MAX_LIMIT:
            raise LocalProtocolError(f"limit={self.limit}", hint=f"use a number from 1 to {MAX_LIMIT}")


def encode_cursor(*values: Value) -> str:
    """Return a cursor of ``values``, which fits into a URL."""
    return base64.urlsafe_b64encode(json.dumps(values, separators=(",", ":")).encode()).rstrip(b"=").decode()


def decode_cursor(cursor: str, *kinds: type | tuple[type, ...]) -> list[Value]:
    """Return the values of a cursor, which have these types.

    Raises:
        LocalProtocolError: it is not a cursor of this list.
    """
    try:
        found = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, list)
        or len(found) != len(kinds)
        or not all(isinstance(value, kind) for value, kind in zip(found, kinds, strict=True))
    ):
        raise LocalProtocolError(
            f"after={cursor[:80]!r} is not a cursor of this list",
            hint="use the value of `next` in the previous page, with the same `sort`",
        )
    return found


class Pages:
    """Reads lists, one at a time. ``pause``: awaited between two shares, so that the loop runs."""

    def __init__(self, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        self.lock = asyncio.Lock()
        """Held while a list is read."""
        self.pause = pause or _next_turn
        """Awaited between two shares, so that the loop runs."""

    async def page(
        self,
        items: Iterable[T],
        query: PageQuery,
        *,
        columns: dict[str, Callable[[T], Value]],
        name: Callable[[T], str],
        row: Callable[[T], R],
        wanted: Callable[[T], bool] = lambda _: True,
    ) -> Page[R]:
        """Return the page of ``items`` for ``query``.

        ``columns``: value of an item by the names of ``sort``, of which the first is the default; ``name``: the id of
        an item, unique; ``wanted``: filters items; ``row`` is called for the items of the page only.

        Raises:
            LocalProtocolError: the column or the cursor is not one of this list.
        """
        descending = query.sort.startswith("-")
        column = query.sort.removeprefix("-") or next(iter(columns))
        value = columns.get(column)
        if value is None:
            raise LocalProtocolError(
                f"sort={query.sort!r}", hint=f"use one of: {', '.join(columns)}; -NAME for descending"
            )
        last: tuple[Value, str] | None = None
        if query.after is not None:
            number, text = decode_cursor(query.after, (str, int, float), str)
            last = number, str(text)
        text = query.text.casefold()
        best: list[tuple[Value, str, T]] = []
        beyond: tuple[Value, str] | None = None  # the following rows are on a later page
        total = matched = 0
        choose = heapq.nlargest if descending else heapq.nsmallest
        try:
            async with self.lock:
                for share in _shares(items):
                    total += len(share)
                    for item in share:
                        identity = name(item)
                        if (text and text not in identity.casefold()) or not wanted(item):
                            continue
                        matched += 1
                        found = value(item), identity
                        if last is not None and (found >= last if descending else found <= last):
                            continue
                        if beyond is not None and (found < beyond if descending else found > beyond):
                            continue
                        best.append((*found, item))
                    if len(best) > 2 * query.limit:
                        best = choose(query.limit + 1, best, key=_order)
                        beyond = _order(best[-1])
                    await self.pause()
        except TypeError as error:
            raise LocalProtocolError("the cursor is of another column", hint="use it with the same `sort`") from error
        best = choose(query.limit + 1, best, key=_order)
        rows = best[: query.limit]
        more = encode_cursor(rows[-1][0], rows[-1][1]) if len(best) > query.limit else None
        return Page(tuple(row(item) for _, _, item in rows), more, total, matched)


def _order(entry: tuple[Value, str, T]) -> tuple[Value, str]:
    return entry[:2]


def _shares(items: Iterable[T]) -> Iterator[list[T]]:
    share: list[T] = []
    for item in items:
        share.append(item)
        if len(share) == SHARE_ROWS:
            yield share
            share = []
    yield share


async def _next_turn() -> None:
    await asyncio.sleep(0)
