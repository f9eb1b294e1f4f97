"""Pages of keys: in order, each key once, and no page that costs more than it may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.statestore.codec.glob import Glob
from penstock.statestore.engine import scan
from penstock.statestore.engine.scan import BUCKET_KEYS, INDEXED_AT_ONCE, PAGE_LOOKED_AT, KeyIndex, Page


def pages(index: KeyIndex, pattern: bytes, gone: frozenset[bytes] = frozenset()) -> Iterator[Page]:
    after: bytes | None = None
    while True:
        page = index.page(Glob(pattern), after, lambda key: key not in gone)
        yield page
        if page.last is None:
            return
        assert after is None or page.last > after or not page.last, "every page gets on"
        after = page.last


def test_a_page_has_the_keys_in_order_new_ones_too_and_removed_ones_not() -> None:
    stored = {b"b", b"a", b"x/1"}
    index = KeyIndex(stored)
    stored.add(b"x/0")
    index.add(b"x/0")
    (page,) = pages(index, b"x/*", frozenset([b"x/1"]))
    assert page == Page([b"x/0"], None)
    (page,) = pages(index, b"*")
    assert page.keys == [b"a", b"b", b"x/0", b"x/1"]


def test_an_index_of_many_keys_is_built_in_bounded_shares() -> None:
    """No SCAN indexes more than its share, and none compares more keys than a page may, however many there are."""
    stored = {b"%06d" % (number * 7919 % 1_000_003) for number in range(10 * INDEXED_AT_ONCE)}
    index = KeyIndex(stored)
    asked = 0

    def present(key: bytes) -> bool:
        nonlocal asked
        asked += 1
        return key in stored

    left = len(index._unread)
    page = index.page(Glob(b"*"), None, present)
    while not page.keys:
        assert page.last == b""
        assert left - len(index._unread) <= INDEXED_AT_ONCE
        left = len(index._unread)
        page = index.page(Glob(b"*"), page.last, present)
    assert left <= INDEXED_AT_ONCE
    found = list(page.keys)
    while page.last is not None:
        asked = 0
        page = index.page(Glob(b"*"), page.last, present)
        assert asked <= PAGE_LOOKED_AT
        found += page.keys
    assert found == sorted(stored)


def test_keys_that_come_and_go_while_the_index_is_built_are_listed_once() -> None:
    stored = {b"%06d" % number for number in range(2 * INDEXED_AT_ONCE + 1)}
    index = KeyIndex(stored)
    assert index.page(Glob(b"*"), None, stored.__contains__) == Page([], b"")
    for number in range(0, 2 * INDEXED_AT_ONCE, 2):
        stored.discard(b"%06d" % number)
    for number in range(0, 2 * INDEXED_AT_ONCE, 4):
        stored.add(b"%06d" % number)
        index.add(b"%06d" % number)
    found = [key for page in pages(index, b"*") for key in page.keys if key in stored]
    assert found == sorted(stored)


def test_removed_keys_leave_the_index_with_the_next_pages() -> None:
    stored = {b"%05d" % number for number in range(4 * BUCKET_KEYS)}
    index = KeyIndex(stored)
    list(pages(index, b"*"))
    stored.clear()
    for after in (None, b""):
        assert [key for page in pages(index, b"*") for key in page.keys if key in stored] == [], after
    asked: list[bytes] = []

    def present(key: bytes) -> bool:
        asked.append(key)
        return False

    assert index.page(Glob(b"*"), None, present) == Page([], None)
    assert asked == []


@pytest.mark.parametrize(("pattern", "keys_of_a_page"), [(b"*" + b"a" * 99 + b"*", 1), (b"*aaa*", 5), (b"*a", 20)])
def test_long_keys_and_long_pieces_make_pages_shorter_and_lose_no_key(
    monkeypatch: pytest.MonkeyPatch, pattern: bytes, keys_of_a_page: int
) -> None:
    monkeypatch.setattr(scan, "PAGE_EFFORT", 2000)
    keys = [b"%02d" % number + b"a" * 98 for number in range(40)]
    found = list(pages(KeyIndex(keys), pattern))
    assert len(found) == 40 // keys_of_a_page
    assert [key for page in found for key in page.keys] == [key for key in keys if Glob(pattern).matches(key)]


def test_the_effort_of_a_pattern_is_its_longest_piece_between_two_stars() -> None:
    efforts = {pattern: Glob(pattern).effort for pattern in (b"plant/3/*", b"*x", b"a*bcd*e", b"*ab?[c-e]*f*g", b"k")}
    assert efforts == {b"plant/3/*": 1, b"*x": 1, b"a*bcd*e": 4, b"*ab?[c-e]*f*g": 5, b"k": 1}


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_pages_of_a_count_lose_no_key(limit: int) -> None:
    keys = [b"k%02d" % number for number in range(20)]
    index = KeyIndex(keys)
    found: list[bytes] = []
    after: bytes | None = None
    for _ in range(30):
        page = index.page(Glob(b"k*"), after, lambda key: key != b"k07", limit)
        assert len(page.keys) <= limit
        found += page.keys
        after = page.last
        if after is None:
            break
    assert found == [key for key in keys if key != b"k07"]
