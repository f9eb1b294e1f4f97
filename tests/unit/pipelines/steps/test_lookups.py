from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from penstock.errors import PenstockError, UnavailableError
from penstock.pipelines.steps import lookups
from penstock.pipelines.steps.lookups import NOT_JSON, UNAVAILABLE, UNKNOWN, GetValues, Lookup, look_up_keys

LINES = b'{"id":"a","low":1}\n{"id":"b","low":2}'
STORED: dict[str, bytes | None] = {"plain": b"{}", "data": LINES, "broken": b"[1"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known yet."""
    monkeypatch.setattr(lookups, "_indexes", {})
    monkeypatch.setattr(lookups, "_json", set())


def get(keys: Collection[str], _lookup: Lookup) -> Mapping[str, bytes | None]:
    assert len(set(keys)) == len(keys) > 0
    return STORED


def away(_keys: Collection[str], _lookup: Lookup) -> Mapping[str, bytes | None]:
    raise UnavailableError("the state store did not answer")


def look(*keys: str | None, get: GetValues = get, wanted: list[str | None] | None = None, **policy: Any) -> list[Any]:
    asked = Lookup("k", "f", 5, **policy)
    return look_up_keys(get, "here", asked, list(keys), [wanted or []] * len(keys))


def test_values_of_keys() -> None:
    assert look("plain", "none", None) == [(b"{}", None, None), (None, None, None), (None, None, None)]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b'{"low": 1} 2',
        b'{"low": 1, "low": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'\xef\xbb\xbf{"low": 1}',
        b'{"low": "\xff"}',
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_value_that_is_not_exactly_json(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second Spark would take the first value, of the third the last: both without a word."""
    monkeypatch.setitem(STORED, "bad", value)
    wrong = (None, NOT_JSON, "the value of key bad is not JSON")
    assert look("bad", "plain", "bad", missing="fail") == [wrong, (b"{}", None, None), wrong]


def test_the_cache_of_parsed_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_MOST_VALUES", 2)
    for number in range(5):
        monkeypatch.setitem(STORED, "plain", b"%d" % number)
        assert look("plain") == [(b"%d" % number, None, None)]
    assert len(lookups._json) <= 2


@pytest.mark.parametrize(("name", "value"), [("b", b'{"id":"b","low":2}'), ("c", None), (None, None)])
def test_an_object_of_a_dataset(name: str | None, value: bytes | None) -> None:
    assert look("data", wanted=[name], fields=("id",)) == [(value, None, None)]


def test_a_dataset_is_indexed_again_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    index = lookups.index_dataset

    def counted(data: bytes, fields: Sequence[str]) -> lookups.DatasetIndex:
        made.append(data)
        return index(data, fields)

    monkeypatch.setattr(lookups, "index_dataset", counted)
    for data in (LINES, LINES, LINES + b'\n{"id":"c"}'):
        monkeypatch.setitem(STORED, "data", bytes(bytearray(data)))
        look("data", "data", wanted=["c"], fields=("id",))
    assert len(made) == 2
    assert look("data", wanted=["c"], fields=("id",)) == [(b'{"id":"c"}', None, None)]


def test_an_invalid_dataset_is_reported() -> None:
    ((value, code, reason),) = look("broken", wanted=["a"], fields=("id",))
    assert (value, code) == (None, NOT_JSON)
    assert "the dataset under key broken cannot be read" in reason


def test_a_missing_key_may_end_the_run() -> None:
    assert look("plain", None, missing="fail")[0] == (b"{}", None, None)
    with pytest.raises(PenstockError, match="the state store has no key 'none'"):
        look("none", missing="fail")
    with pytest.raises(PenstockError, match="nothing under key 'data' has id 'x'"):
        look("data", wanted=["x"], fields=("id",), missing="fail")


@pytest.mark.parametrize(("policy", "code"), [("pass", UNKNOWN), ("dead_letter", UNAVAILABLE)])
def test_an_unavailable_state_store_is_an_error(policy: str, code: str) -> None:
    found = look("plain", None, get=away, unavailable=policy, missing="fail")
    assert found == [(None, code, "the state store did not answer"), (None, None, None)]
    with pytest.raises(UnavailableError):
        look("plain", get=away, unavailable="fail")


def test_rows_share_the_objects_of_a_dataset() -> None:
    """A dataset of 1 MB and 10,000 rows, the largest Arrow batch of Spark: each row has only its object."""
    objects = [{"id": str(number), "text": "x" * 1000} for number in range(1000)]
    asked: list[Collection[str]] = []

    def large(keys: Collection[str], _lookup: Lookup) -> Mapping[str, bytes | None]:
        asked.append(keys)
        return {"large": json.dumps(objects).encode()}

    wanted: list[list[str | None]] = [[str(number % 1001)] for number in range(10_000)]
    found = look_up_keys(large, "here", Lookup("k", "f", 5, fields=("id",)), ["large"] * 10_000, wanted)
    assert asked == [["large"]]
    assert json.loads(found[7][0] or b"") == objects[7]
    assert found[1000] == (None, None, None)
    assert len({id(value) for value, _, _ in found if value is not None}) == 1000, "no copies"


def test_rows_that_arrow_cannot_carry_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups._check_size(look("plain", "plain", "none", None))
    monkeypatch.setattr(lookups, "_MOST_BYTES", 3)
    with pytest.raises(PenstockError, match=r"adds 4 bytes to 4 rows; the maximum is 3 bytes") as caught:
        lookups._check_size(look("plain", "plain", "none", None))
    assert "match" in str(caught.value.hint)
