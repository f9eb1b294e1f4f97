from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.errors import PenstockError
from penstock.spark.statestore.writes import KeyWrite, Row, collapse, last_of_each, write_changes
from penstock.statestore.client.client import Entry
from penstock.statestore.client.writes import Write
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.errors import WritesRefusedError, refusal
from penstock.statestore.hlc import Hlc

TOKEN = Hlc(1, 0, "run")


class Store:
    """Remembers what it was asked; refuses the key ``refused``."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.token: Hlc | None = None

    async def get(self, _key: str, /) -> Entry | None:
        return None

    async def write_many(self, writes: Sequence[Write], /, *, fencing_token: Hlc | None, stop: bool) -> list[bool]:
        assert stop, "a run that was replaced must not go on"
        self.token = fencing_token
        self.asked += [write.words for write in writes]
        if any(write.key == b"refused" for write in writes):
            raise WritesRefusedError(
                refusal("SET", b"refused", StoreError.FENCE_LOWER), {b"refused": StoreError.FENCE_LOWER}, [False]
            )
        return [True] * len(writes)


def row(key: bytes, value: bytes | None, order: object = None) -> Row:
    return Row(KeyWrite(key, value), order)


def test_the_last_row_of_a_key_counts_wherever_it_stood() -> None:
    rows = [row(b"a", b"2", 2), row(b"b", None, 5), row(b"a", b"1", 1), row(b"a", b"2", 2)]
    assert last_of_each(rows, "time") == {b"a": [KeyWrite(b"a", b"2")], b"b": [KeyWrite(b"b", None)]}
    assert last_of_each([row(b"a", b"1"), row(b"b", b"1")], None) == {
        b"a": [KeyWrite(b"a", b"1")],
        b"b": [KeyWrite(b"b", b"1")],
    }


@pytest.mark.parametrize(
    ("rows", "order_by", "message"),
    [
        ([row(b"a", b"1"), row(b"a", b"1")], None, "two rows of key 'a'[\\s\\S]*their order is undefined"),
        ([row(b"a", b"1", 1), row(b"a", b"2", None)], "time", "time is null in one of them"),
        ([row(b"a", b"1", 1.0), row(b"a", b"2", float("nan"))], "time", "time is NaN in one of them"),
        ([row(b"a\xff", b"1", 1), row(b"a\xff", b"2", 1)], "time", r"'a\\\\xff' have the same time, 1"),
    ],
)
def test_two_rows_of_a_key_need_an_order(rows: list[Row], order_by: str | None, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        last_of_each(rows, order_by)


async def test_all_changes_are_written_those_of_a_key_in_their_order() -> None:
    store = Store()
    changes = {"a": [KeyWrite("a", b"1", 10), KeyWrite("a", None)], b"b": [KeyWrite(b"b", b"")]}
    assert await write_changes(store, changes, TOKEN) == 3
    assert store.asked == [[b"SET", b"a", b"1", b"PX", b"10"], [b"DEL", b"a"], [b"SET", b"b", b""]]
    assert store.token == TOKEN


async def test_a_refusal_under_a_token_names_the_key_and_speaks_of_the_later_run() -> None:
    with pytest.raises(PenstockError, match=r"key 'refused': the request fencing[\s\S]*belongs to a later run"):
        await write_changes(Store(), {"refused": [KeyWrite("refused", None)]}, TOKEN)
    with pytest.raises(WritesRefusedError):
        await write_changes(Store(), {"refused": [KeyWrite("refused", None)]}, None)


def test_deletes_that_follow_a_delete_are_left_out() -> None:
    changes = [
        KeyWrite("k", None),
        KeyWrite("k", None),
        KeyWrite("k", b"1"),
        KeyWrite("j", None),
        KeyWrite("k", None),
    ]
    assert collapse(changes) == {
        "k": [KeyWrite("k", None), KeyWrite("k", b"1"), KeyWrite("k", None)],
        "j": [KeyWrite("j", None)],
    }
