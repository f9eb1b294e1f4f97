"""Pages of lists that change: order, cursors, filters, and shares of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from penstock.console.pages import SHARE_ROWS, Page, PageQuery, Pages
from penstock.errors import LocalProtocolError


class Row(NamedTuple):
    name: str
    size: int


COLUMNS: dict[str, Callable[[Row], str | int | float]] = {"name": lambda row: row.name, "size": lambda row: row.size}
ROWS = [Row(f"row-{i:03}", i % 7) for i in range(100)]


async def page(rows: list[Row], query: PageQuery, pages: Pages | None = None) -> Page[Row]:
    return await (pages or Pages()).page(rows, query, columns=COLUMNS, name=lambda row: row.name, row=lambda row: row)


async def every(rows: list[Row], query: PageQuery) -> list[Row]:
    found: list[Row] = []
    after = None
    for _ in range(100):
        one = await page(rows, PageQuery(query.text, query.sort, after, query.limit))
        found += one.rows
        after = one.next
        if after is None:
            return found
    raise AssertionError("the pages do not end")


@pytest.mark.parametrize("sort", ["", "name", "-name", "size", "-size"])
@pytest.mark.parametrize("limit", [1, 7, 99, 100, 101])
async def test_the_pages_together_are_the_sorted_list(sort: str, limit: int) -> None:
    column = sort.removeprefix("-") or "name"
    wanted = sorted(ROWS, key=lambda row: (getattr(row, column), row.name), reverse=sort.startswith("-"))
    assert await every(ROWS[::-1], PageQuery(sort=sort, limit=limit)) == wanted


async def test_rows_that_come_and_go_between_two_pages_do_not_move_others() -> None:
    first = await page(ROWS, PageQuery(limit=10))
    changed = [Row("row-000a", 1), *ROWS[5:9], *ROWS[10:]]  # one before the cursor is new, six are removed
    second = await page(changed, PageQuery(limit=10, after=first.next))
    assert [row.name for row in second.rows] == [f"row-{i:03}" for i in range(10, 20)]


async def test_a_page_tells_how_many_rows_there_are() -> None:
    found = await page(ROWS, PageQuery(text="ROW-01", limit=3))
    assert ([row.name for row in found.rows], found.total, found.matched) == (
        ["row-010", "row-011", "row-012"],
        100,
        10,
    )
    assert found.next is not None
    assert (await page([], PageQuery())) == Page((), None, 0, 0)


async def test_the_loop_runs_between_shares_and_one_list_is_read_at_a_time() -> None:
    shares: list[int] = []
    reading = 0

    async def pause() -> None:
        shares.append(reading)
        await asyncio.sleep(0)

    class Counted(list[Row]):
        def __iter__(self) -> Iterator[Row]:
            nonlocal reading
            reading += 1
            yield from super().__iter__()
            reading -= 1

    pages = Pages(pause)
    rows = Counted(Row(f"{i:05}", i) for i in range(4 * SHARE_ROWS))
    await asyncio.gather(*(page(rows, PageQuery(limit=5), pages) for _ in range(3)))
    assert len(shares) == 3 * 5
    assert max(shares) == 1


@pytest.mark.parametrize("cursor", ["", "x", "W10", "WyJhIl0", "WzEsMl0", "e30", "=====", "\u00e9", "W1tb" * 10_000])
async def test_a_cursor_that_is_none_is_refused(cursor: str) -> None:
    with pytest.raises(LocalProtocolError, match="is not a cursor of this list"):
        await page(ROWS, PageQuery(after=cursor))


async def test_a_cursor_of_another_column_is_refused() -> None:
    first = await page(ROWS, PageQuery(sort="size", limit=1))
    with pytest.raises(LocalProtocolError, match="the cursor is of another column"):
        await page(ROWS, PageQuery(sort="name", after=first.next))


@pytest.mark.parametrize("query", [{"sort": "colour"}, {"limit": 0}, {"limit": 1001}])
async def test_columns_and_limits_are_checked(query: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        await page(ROWS, PageQuery(**query))
    assert caught.value.hint is not None
