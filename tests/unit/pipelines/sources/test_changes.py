from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.pipelines.rows import glob_pattern
from penstock.pipelines.sources.readers import explain_missing_changes
from penstock.statestore.codec.glob import Glob


def matches(glob: str, key: str) -> bool:
    # Python writes Java's end of the text with a capital letter.
    return re.search(glob_pattern(glob).removesuffix(r"\z") + r"\Z", key) is not None


@pytest.mark.parametrize(
    ("glob", "key", "expected"),
    [
        ("device/*/state", "device/1/2/state", True),
        ("device/?", "device/12", False),
        ("a.c", "abc", False),
        ("[!0-9]x", "ax", True),
        ("[!0-9]x", "5x", False),
        ("[]]", "]", True),
        ("[z-a]", "b", False),
        ("[a", "[a", True),
        ("*", "", True),
        ("a*", "a\nb", True),
        ("a\\*", "a\\x", True),
    ],
)
def test_patterns(glob: str, key: str, expected: bool) -> None:
    assert matches(glob, key) is expected


@given(st.text("ab-[]!*?^\\\n&", min_size=1, max_size=8), st.text("ab-[]!^\\\n&", max_size=8))
def test_the_store_matches_the_same_keys(glob: str, key: str) -> None:
    assert matches(glob, key) == Glob(glob.encode()).matches(key.encode())


def test_a_topic_that_is_not_there() -> None:
    missing, other = ConfigError("topic 'changes' does not exist at tube master h:1"), ConfigError("something else")
    with pytest.raises(ConfigError) as told, explain_missing_changes("changes"):
        raise missing
    assert told.value.option == "tube_topic"
    assert told.value.hint is not None
    assert "set statestore.capture_topic: changes" in told.value.hint
    with pytest.raises(ConfigError) as raised, explain_missing_changes("changes"):
        raise other
    assert raised.value is other
