from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DataLossError
from penstock.pipelines.books.reconcile import reconcile
from penstock.pipelines.state.checkpoint import Offsets
from tests.unit.pipelines.bookkeeping import Books


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def ten(_sink: str, start: Offsets, end: Offsets) -> int:
    assert (start, end) == ({"t": {"1:0": 0}}, {"t": {"1:0": 560}})
    return 10


def test_books_that_balance(books: Books) -> None:
    (account,) = reconcile(books.pipeline, books.state, ten)
    assert (account.sink, account.off, account.unknown) == ("rows", (), ())
    assert (account.sums.batches, account.sums.read, account.sums.out, account.sums.dead) == (2, 10, 7, 2)


def test_a_pipeline_that_has_not_run(books: Books, tmp_path: Path) -> None:
    for table in ("rows", "dead"):
        for commit in (tmp_path / table / "_commits").iterdir():
            commit.unlink()
    (account,) = reconcile(books.pipeline, tmp_path / "elsewhere", ten)
    assert (account.sums.batches, account.off, account.unknown) == (0, (), ())


@pytest.mark.parametrize(
    ("spoil", "off"),
    [
        (lambda b: b.change(1, out=2), "batch 1: 4 read, but 2 out, 1 dead, 0 filtered, 0 duplicates"),
        (lambda b: b.change(1, duplicates=-1, out=4), "batch 1: 4 read, but 4 out"),
        (lambda b: b.change(1, start={"t": {"1:0": 252}}), "batch 1 does not begin where batch 0 ended"),
        (lambda b: b.change(1, batch=3), "after batch 1 comes batch 3"),
        (lambda b: b.change(1, read=5, out=4), "the source has 10 records in the range of the batches, 11 were read"),
        (lambda b: b.commit("rows", 1, [{"x": 1}]), "rows has 5 rows committed, the ledger has 7 out"),
        (lambda b: b.commit("rows", 1, [{"x": 1}], committed=3), "rows holds 5 rows, 7 were committed"),
        (lambda b: b.commit("rows", 1, [{"x": 1}]).unlink(), "lacks its file writer=rows/batch=1"),
        (
            lambda b: (b.root / "dead/_commits/rows-0.json").unlink(),
            "dead has 1 rows committed, the ledger has 2 dead letters",
        ),
    ],
)
def test_what_does_not_add_up_is_told(books: Books, spoil: Callable[[Books], object], off: str) -> None:
    spoil(books)
    (account,) = reconcile(books.pipeline, books.state, lambda *_: 10)
    assert any(off in text for text in account.off), account.off


def test_a_range_that_retention_removed_is_unknown_not_off(books: Books) -> None:
    def gone(*_: object) -> int:
        raise DataLossError("offset 0 is no longer kept")

    (account,) = reconcile(books.pipeline, books.state, gone)
    assert account.off == ()
    assert account.unknown == ("the source cannot be counted from the first batch on: offset 0 is no longer kept",)
