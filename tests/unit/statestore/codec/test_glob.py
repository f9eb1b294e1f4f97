"""Patterns of SCAN: the cases that the SDKs' tests hold, the corners, and a matcher written the obvious way."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.statestore.codec.glob import Glob
from tests.vectors.statestore import vectors


@pytest.mark.parametrize("case", vectors()["scan_glob"]["cases"], ids=lambda case: str(case["pattern"]))
def test_patterns_of_the_sdks(case: dict[str, Any]) -> None:
    seeded = vectors()["scan_glob"]["seeded"]
    expected = seeded if case["keys"] == "all nine" else case["keys"]
    glob = Glob(case["pattern"].encode())
    assert [key for key in seeded if glob.matches(key.encode())] == expected


@pytest.mark.parametrize("key", ["scanke", "scankex00", "xscankey00"])
def test_the_whole_key_must_match(key: str) -> None:
    assert not Glob(b"scankey*").matches(key.encode())


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        (b"", b"", True),
        (b"*", b"", True),
        (b"a*a", b"a", False),
        (b"a*a", b"aa", True),
        (b"a**b", b"ab", True),
        (b"*ab*ab", b"ab", False),
        (b"*ab*ab", b"xabab", True),
        (b"[", b"[", True),
        (b"[a", b"[a", True),
        (b"[]]", b"]", True),
        (b"[]", b"[]", True),
        (b"[!]]", b"a", True),
        (b"[!]]", b"]", False),
        (b"[!!]", b"!", False),
        (b"[a-]", b"-", True),
        (b"x[z-a]", b"xm", False),
        (b"\\", b"\\", True),
        (b".+(|)$^{}", b".+(|)$^{}", True),
        (b"?", b"\n", True),
        (b"[\x80-\xff]*", b"\xe4\n\r\0", True),
    ],
)
def test_corners(pattern: bytes, key: bytes, matches: bool) -> None:
    assert Glob(pattern).matches(key) is matches


def test_the_prefix_is_what_every_match_begins_with() -> None:
    assert (Glob(b"plant/3/*").prefix, Glob(b"plant/3/*").exact) == (b"plant/3/", False)
    assert (Glob(b"plant").prefix, Glob(b"plant").exact) == (b"plant", True)
    assert (Glob(b"*plant").prefix, Glob(b"[p]lant").prefix, Glob(b"p?lant").prefix) == (b"", b"", b"p")


@pytest.mark.parametrize("pattern", [b"*a" * 200 + b"*b", b"*" + b"a?" * 100 + b"*[!a]?c", b"*a*a*a*a*a*a*c"])
def test_no_pattern_makes_matching_slow(pattern: bytes) -> None:
    started = time.process_time()
    Glob(pattern).matches(b"a" * 60_000)
    assert time.process_time() - started < 2


@given(
    pattern=st.lists(st.sampled_from(["*", "?", "a", "b", "[ab]", "[!a]"]), max_size=7), key=st.text("abc", max_size=8)
)
def test_against_the_obvious_matcher(pattern: list[str], key: str) -> None:
    members = {"?": "abc", "a": "a", "b": "b", "[ab]": "ab", "[!a]": "bc"}

    @cache
    def obvious(at: int, position: int) -> bool:
        if at == len(pattern):
            return position == len(key)
        if pattern[at] == "*":
            return any(obvious(at + 1, later) for later in range(position, len(key) + 1))
        return position < len(key) and key[position] in members[pattern[at]] and obvious(at + 1, position + 1)

    assert Glob("".join(pattern).encode()).matches(key.encode()) is obvious(0, 0)
