"""Pages of keys: in order, each key once, and no page that costs more than it may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.statestore.codec.glob import Glob
from penstock.statestore.engine import scan
from penstock.statestore.engine.scan import KeyIndex, Page


def pages(index: KeyIndex, pattern: bytes, gone: frozenset[bytes] = frozenset()) -> Iterator[Page]:
    after: bytes | None = None
    while True:
        page = index.page(Glob(pattern), after, lambda key: key not in gone)
        yield page
        if page.last is None:
            return
        assert after is None or page.last > after, "every page gets on"
        after = page.last


def test_a_page_has_the_keys_in_order_new_ones_too_and_removed_ones_not() -> None:
    index = KeyIndex([b"b", b"a", b"x/1"])
    index.add(b"x/0")
    (page,) = pages(index, b"x/*", frozenset([b"x/1"]))
    assert page == Page([b"x/0"], None)
    (page,) = pages(index, b"*")
    assert page.keys == [b"a", b"b", b"x/0", b"x/1"]


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
