"""The format of a table: Delta for a new one, that of the table otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.pipelines.spec.pipeline import DeadLetters
from penstock.pipelines.spec.sinks import TableSink, stored_format


@pytest.mark.parametrize(("log", "stored"), [(None, None), ("_delta_log", "delta"), ("_commits", "parquet")])
def test_a_table_keeps_its_format(tmp_path: Path, log: str | None, stored: str | None) -> None:
    if log is not None:
        (tmp_path / log).mkdir()
    assert stored_format(str(tmp_path)) == stored
    assert TableSink(path=str(tmp_path)).format == (stored or "delta")
    for given in ("delta", "parquet"):
        options = {"path": str(tmp_path), "format": given}
        if stored in (None, given):
            assert TableSink.model_validate(options).format == given
        else:
            with pytest.raises(ValidationError, match=f"expected `format: {stored}`, which the table"):
                TableSink.model_validate(options)


def test_rows_of_a_parquet_table_are_not_merged(tmp_path: Path) -> None:
    (tmp_path / "_commits").mkdir()
    with pytest.raises(ValidationError, match="expected `format: delta` with `mode: merge`"):
        TableSink(path=str(tmp_path), mode="merge", keys=["k"])
    assert TableSink(path=str(tmp_path / "new"), mode="merge", keys=["k"]).format == "delta"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "only with `mode: merge`"),
        ({"format": "parquet", "order_by": "_offset"}, "expected `format: delta` with `mode: merge`"),
        ({"mode": "merge", "keys": ["k"]}, "expected order_by with delete_when"),
        ({"mode": "merge", "keys": ["k"], "order_by": "n", "path": "hdfs://host/t"}, "in a local directory or"),
    ],
)
def test_deletes_need_a_merge_with_an_order(tmp_path: Path, options: dict[str, object], expected: str) -> None:
    given = {"path": str(tmp_path / "t"), "delete_when": "gone"}
    if options.get("format") == "parquet":
        options = {**options, "mode": "merge", "keys": ["k"]}
    with pytest.raises(ValidationError, match=expected):
        TableSink.model_validate(given | options)
    TableSink.model_validate(given | {"mode": "merge", "keys": ["k"], "order_by": "_offset"})


def test_a_table_at_a_uri_is_a_delta_table() -> None:
    for path, remote in (("s3a://bucket/table", False), ("hdfs://host/table", True)):
        sink = TableSink(path=path)
        assert (sink.format, sink.is_remote) == ("delta", remote)
        with pytest.raises(ValidationError, match="expected `format: delta` for a table at a URI"):
            TableSink(path=path, format="parquet")


@pytest.mark.parametrize("path", ["file:/lake/dead", "file:dead", "hdfs:/dead"])
def test_dead_letters_have_a_local_path(path: str) -> None:
    """Python would create the directory `s3a:` in the working directory."""
    with pytest.raises(ValidationError, match="expected a local path"):
        DeadLetters(path=path)


@pytest.mark.parametrize("path", ["lake/dead", "/lake/dead", "./a:b", "a:b/c", "C:/dead"])
def test_other_paths_are_local(path: str) -> None:
    assert DeadLetters(path=path).path == path
