from __future__ import annotations

import asyncio

import pytest

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.spark.statestore.writes import CONCURRENT_KEYS, Change, Row, last_of_each, write_changes
from penstock.statestore.hlc import Hlc

TOKEN = Hlc(1, 0, "run")


class Store:
    """Remembers what it was asked; refuses the key ``refused`` and does not answer for ``away``."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.under_way = self.most = 0

    async def _take(self, *request: object) -> None:
        self.asked.append(request)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if request[1] == "refused":
            raise RefusedError("no", text="ERR the request fencing token is a lower version")
        if request[1] == "away":
            raise UnavailableError("gone")

    async def set(self, key: str | bytes, value: bytes, /, *, ttl_ms: int | None, fencing_token: Hlc | None) -> None:
        await self._take("SET", key, value, ttl_ms, fencing_token)

    async def delete(self, key: str | bytes, /, *, fencing_token: Hlc | None) -> int:
        await self._take("DEL", key, fencing_token)
        return 1


def row(key: bytes, value: bytes | None, order: object = None) -> Row:
    return Row(Change(key, value), order)


def test_the_last_row_of_a_key_counts_wherever_it_stood() -> None:
    rows = [row(b"a", b"2", 2), row(b"b", None, 5), row(b"a", b"1", 1), row(b"a", b"2", 2)]
    assert last_of_each(rows, "time") == {b"a": [Change(b"a", b"2")], b"b": [Change(b"b", None)]}
    assert last_of_each([row(b"a", b"1"), row(b"b", b"1")], None) == {
        b"a": [Change(b"a", b"1")],
        b"b": [Change(b"b", b"1")],
    }


@pytest.mark.parametrize(
    ("rows", "order_by", "message"),
    [
        ([row(b"a", b"1"), row(b"a", b"1")], None, "two rows of key 'a'[\\s\\S]*no column says which"),
        ([row(b"a", b"1", 1), row(b"a", b"2", None)], "time", "time is null in one of them"),
        ([row(b"a", b"1", 1.0), row(b"a", b"2", float("nan"))], "time", "time is NaN in one of them"),
        ([row(b"a\xff", b"1", 1), row(b"a\xff", b"2", 1)], "time", r"'a\\\\xff' have the same time, 1"),
    ],
)
def test_two_rows_of_a_key_need_an_order(rows: list[Row], order_by: str | None, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        last_of_each(rows, order_by)


async def test_keys_are_written_at_once_and_the_changes_of_one_in_order() -> None:
    store = Store()
    many = {f"k{n}": [Change(f"k{n}", b"1", 10), Change(f"k{n}", None)] for n in range(CONCURRENT_KEYS * 2)}
    assert await write_changes(store, many, TOKEN) == len(many) * 2
    assert store.most == CONCURRENT_KEYS
    assert [request for request in store.asked if request[1] == "k7"] == [
        ("SET", "k7", b"1", 10, TOKEN),
        ("DEL", "k7", TOKEN),
    ]


async def test_an_error_comes_after_everything_was_answered() -> None:
    store = Store()
    keys = ["away", *(f"k{n}" for n in range(CONCURRENT_KEYS * 3))]
    with pytest.raises(UnavailableError):
        await write_changes(store, {key: [Change(key, b"1")] for key in keys}, None)
    assert store.under_way == 0
    assert len(store.asked) <= CONCURRENT_KEYS * 2, "what cannot succeed any more is not begun"


async def test_a_refusal_under_a_token_speaks_of_the_later_run() -> None:
    with pytest.raises(PenstockError, match="belongs to a later run"):
        await write_changes(Store(), {"refused": [Change("refused", None)]}, TOKEN)
    with pytest.raises(RefusedError):
        await write_changes(Store(), {"refused": [Change("refused", None)]}, None)
