from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.pipelines.store import control, writeback
from penstock.pipelines.store.writeback import Change, WriteBack, collapse
from penstock.runtime.loop_thread import LoopThread
from penstock.statestore.errors import FencingError, InvalidRequestError
from penstock.statestore.hlc import Hlc


class Store:
    """Takes what is set; refuses prefixes with ``error``."""

    def __init__(self, error: RefusedError | None = None) -> None:
        self.error = error
        self.prefixes: list[str] = []

    async def set(self, _key: str, _value: str, *, fencing_token: Hlc, fence_prefix: str) -> None:
        assert fencing_token == Hlc(1, 0, "n")
        if self.error is not None:
            raise self.error
        self.prefixes.append(fence_prefix)


Held = Callable[[Store], WriteBack]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Makes runs that hold their lease."""

    def make(store: Store) -> WriteBack:
        run = WriteBack("mqtt://127.0.0.1:1", "p")
        monkeypatch.setattr(run, "_client", store)
        monkeypatch.setattr(run, "_token", Hlc(1, 0, "n"))
        return run

    return make


def fence(run: WriteBack, *prefixes: str) -> Any:
    return asyncio.run(run._fence(prefixes))


def test_prefixes_are_fenced_with_the_token_of_the_run(held: Held) -> None:
    store = Store()
    assert fence(held(store), "a/", "b/") == ["a/", "b/"] == store.prefixes


def test_a_store_that_fences_no_prefixes_is_told_and_a_later_run_is_an_error(held: Held) -> None:
    assert fence(held(Store(InvalidRequestError("refused", text="syntax error"))), "a/") == []
    with pytest.raises(FencingError):
        fence(held(Store(FencingError("refused", text="an older token"))), "a/")


def test_who_holds_the_lease_is_unknown_where_nobody_answers() -> None:
    with pytest.raises(PenstockError):
        control.lease_holder("mqtt://127.0.0.1:1", "p", 0.3)


def test_deletes_that_follow_a_delete_are_left_out() -> None:
    changes = [Change("k", None), Change("k", None), Change("k", b"1"), Change("j", None), Change("k", None)]
    assert collapse(changes) == {
        "k": [Change("k", None), Change("k", b"1"), Change("k", None)],
        "j": [Change("j", None)],
    }


def test_a_large_batch_has_more_time(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a millisecond a change, all one after the other: more than the time of a small batch."""
    monkeypatch.setattr(writeback, "WRITE_TIMEOUT_S", 0.02)

    async def slowly(_store: object, by_key: dict[str, list[Change]], _token: Hlc) -> int:
        await asyncio.sleep(0.0005 * len(by_key))
        return len(by_key)

    monkeypatch.setattr(writeback, "write_changes", slowly)
    run = held(Store())
    monkeypatch.setattr(run, "_thread", thread := LoopThread("test"))
    try:
        assert run.write([Change(f"k{number}", b"1") for number in range(200)]) == 200
        monkeypatch.setattr(writeback, "SLOW_CHANGE_S", 0.0)
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.02 s"):
            run.write([Change(f"k{number}", b"1") for number in range(200)])
    finally:
        thread.close()
