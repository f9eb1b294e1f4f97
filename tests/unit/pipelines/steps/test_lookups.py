from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.errors import PenstockError, UnavailableError
from penstock.pipelines.steps import dataset, lookups
from penstock.pipelines.steps.lookups import NOT_JSON, UNAVAILABLE, UNKNOWN, Get, found_in
from penstock.pipelines.steps.stages import Lookup

LINES = b'{"id":"a","low":1}\n{"id":"b","low":2}'
STORED: dict[str | None, bytes] = {"plain": b"{}", "data": LINES, "broken": b"[1"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is indexed yet."""
    monkeypatch.setattr(lookups, "_indexes", {})


def get(keys: list[str | None], _lookup: Lookup) -> list[bytes | None]:
    return [STORED.get(key) for key in keys]


def away(_keys: list[str | None], _lookup: Lookup) -> list[bytes | None]:
    raise UnavailableError("the state store did not answer")


def look(*keys: str | None, get: Get = get, wanted: list[str | None] | None = None, **policy: Any) -> list[Any]:
    asked = Lookup("k", "f", 5, **policy)
    return found_in(get, "here", asked, list(keys), [wanted or []] * len(keys))


def test_values_of_keys() -> None:
    assert look("plain", "none", None) == [(b"{}", None, None), (None, None, None), (None, None, None)]


@pytest.mark.parametrize(("name", "value"), [("b", b'{"id":"b","low":2}'), ("c", None), (None, None)])
def test_an_object_of_a_dataset(name: str | None, value: bytes | None) -> None:
    assert look("data", wanted=[name], fields=("id",)) == [(value, None, None)]


def test_a_dataset_is_indexed_again_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def counted(data: bytes, fields: Sequence[str]) -> dataset.Index:
        made.append(data)
        return dataset.index(data, fields)

    monkeypatch.setattr(lookups, "index", counted)
    for data in (LINES, LINES, LINES + b'\n{"id":"c"}'):
        monkeypatch.setitem(STORED, "data", bytes(bytearray(data)))
        look("data", "data", wanted=["c"], fields=("id",))
    assert len(made) == 2
    assert look("data", wanted=["c"], fields=("id",)) == [(b'{"id":"c"}', None, None)]


def test_a_dataset_that_is_none_is_told() -> None:
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
def test_a_store_that_is_away(policy: str, code: str) -> None:
    found = look("plain", None, get=away, unavailable=policy, missing="fail")
    assert found == [(None, code, "the state store did not answer"), (None, None, None)]
    with pytest.raises(UnavailableError):
        look("plain", get=away, unavailable="fail")
