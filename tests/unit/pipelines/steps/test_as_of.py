"""Values at the times of rows, and the reasons of those without one."""

from __future__ import annotations

import pytest

from penstock.errors import PenstockError
from penstock.pipelines.state_dir.changes import BEGINNING, Change, ChangeFile, KeyHistory, VisibleChanges, change_table
from penstock.pipelines.steps.lookups import MISSING, NOT_JSON, TOO_LARGE, Lookup, LookupResult, values_at

LOG = [
    Change("1:0", 0, b"a", 1_000, b"1", None),
    Change("1:0", 28, b"a", 2_000, b"{", None),
    Change("1:0", 56, b"a", 3_000, None, 9_999),
    Change("1:0", 84, b"a", 4_000, None, None),
    Change("1:0", 112, b"a", 5_000, b"5", None),
]
BEFORE_TOPIC = (
    "the value of key a at 1970-01-01T00:00:00.499Z is unknown: "
    "the topic with the changes begins at 1970-01-01T00:00:00.500Z"
)
KNOWN = VisibleChanges({"1:0": 112}, BEGINNING)


def found(
    key: str | None, time_ms: int | None, known: VisibleChanges = KNOWN, missing: str = "dead_letter"
) -> LookupResult:
    history = KeyHistory()
    history.add(ChangeFile({"1:0": 140}, 500, BEGINNING, change_table(LOG)))
    history.begin_ms = 500
    (result,) = values_at(history, known, Lookup("k", "v", 0, missing=missing), [key], [time_ms])
    return result


@pytest.mark.parametrize(
    ("key", "time_ms", "expected"),
    [
        (None, 1_000, (None, None, None)),
        ("a", 1_000, (b"1", None, None)),
        ("a", 1_999, (b"1", None, None)),
        ("a", 2_000, (None, NOT_JSON, "the value of key a is not JSON")),
        (
            "a",
            3_500,
            (None, TOO_LARGE, "the value of key a has 9999 bytes, too many for the topic with the changes"),
        ),
        (
            "a",
            # The change at 5,000 ms is not known to the batch.
            6_000,
            (
                None,
                MISSING,
                "the state store had no key a at 1970-01-01T00:00:06.000Z: it was deleted at 1970-01-01T00:00:04.000Z",
            ),
        ),
        ("a", 999, (None, MISSING, "the state store had no key a at 1970-01-01T00:00:00.999Z")),
        (
            "a",
            499,
            (
                None,
                MISSING,
                BEFORE_TOPIC,
            ),
        ),
        ("b", 1 << 60, (None, MISSING, f"the state store had no key b at {1 << 60} ms since 1970")),
        ("a", None, (None, MISSING, "the value of key a is unknown: the event time is null")),
    ],
)
def test_values(key: str | None, time_ms: int | None, expected: LookupResult) -> None:
    assert found(key, time_ms) == expected


def test_policies() -> None:
    assert found("b", 1, missing="pass") == (None, None, None)
    with pytest.raises(PenstockError, match=r"no key b at 1970-01-01T00:00:01\.000Z") as failed:
        found("b", 1_000, missing="fail")
    assert failed.value.hint is not None
    late = found("a", 1_500, VisibleChanges(KNOWN.ends, 1_600))
    assert late == (
        None,
        MISSING,
        "the value of key a at 1970-01-01T00:00:01.500Z is unknown: the history begins at 1970-01-01T00:00:01.600Z",
    )
