from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.errors import PenstockError
from penstock.node.capture import record_of
from penstock.spark.statestore.rows import KeyRow, change_batches, key_batch, version_at
from penstock.spark.statestore.source import StateStoreDataSource
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.record import Record as KeyRecord
from penstock.statestore.hlc import Hlc
from penstock.tube.reader import MessageBatch
from penstock.tube.record import Record

T0 = 1_700_000_000_000


def version(number: int) -> Hlc:
    return Hlc(T0 + number, number, "StateStore")


def change(key: bytes, value: bytes | None, number: int, writer: str = "me", expires_at: int = 0) -> Change:
    record = None if value is None else KeyRecord(key, value, version(number), None, expires_at)
    return Change(key, record, version(number), writer=writer)


def columns(*records: Record) -> MessageBatch:
    encoded = [record.encode() for record in records]
    numbers = range(len(records))
    return MessageBatch.from_payloads(
        [28 * n for n in numbers], [T0] * len(records), [f for _, f, _ in encoded], [d for d, _, _ in encoded]
    )


def read(*records: Record, keys: str = "*") -> list[dict[str, Any]]:
    batches = list(change_batches("changes", [columns(*records)], keys))
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def test_the_schema_is_sparks() -> None:
    expected = to_arrow_schema(StateStoreDataSource({}).schema(), timezone="UTC")
    (changes,) = change_batches("changes", [columns(record_of(change(b"k", b"v", 1)))], "*")
    assert changes.schema == expected
    assert key_batch([KeyRow(b"k", b"v", version(1))]).schema == expected
    assert key_batch([]).schema == expected


def test_a_key_as_it_is() -> None:
    rows = key_batch([KeyRow(b"k", b"", version(1)), KeyRow(b"l", b"v", version(2), T0)]).to_pylist()
    assert rows[0] == {
        "key": b"k",
        "value": b"",
        "operation": "SNAPSHOT",
        "version": str(version(1)),
        "writer": None,
        "timestamp": at(T0 + 1),
        "expires_at": None,
        "omitted_bytes": None,
    }
    assert rows[1]["expires_at"] == at(T0)


def test_changes_of_a_key_become_rows() -> None:
    large = change(b"big", b"x" * 100, 4)
    found = read(
        record_of(change(b"k", b"", 1)),
        record_of(change(b"k", b"v", 2, "other", T0 + 500)),
        record_of(change(b"k", None, 3, "")),
        record_of(large, with_value=False),
    )
    assert [(row["value"], row["operation"], row["writer"]) for row in found] == [
        (b"", "SET", "me"),
        (b"v", "SET", "other"),
        (None, "DELETE", None),
        (None, "SET", "me"),
    ]
    assert [row["version"] for row in found] == [str(version(n)) for n in (1, 2, 3, 4)]
    assert [row["timestamp"] for row in found] == [at(T0 + n) for n in (1, 2, 3, 4)]
    assert [row["expires_at"] for row in found] == [None, at(T0 + 500), None, None]
    assert [row["omitted_bytes"] for row in found] == [None, None, None, 100]


def test_only_keys_that_match() -> None:
    records = [record_of(change(key, b"v", 1)) for key in (b"a/1", b"b/1", b"a/\xff,=%")]
    assert [row["key"] for row in read(*records, keys="a/*")] == [b"a/1", b"a/\xff,=%"]
    assert read(*records, keys="c/*") == []


@pytest.mark.parametrize(
    "record",
    [
        Record(b"v"),
        Record(b"v", b"k", [("operation", "SET")]),
        Record(b"v", None, [("operation", "SET"), ("version", str(version(1)))]),
        Record(b"v", b"k", [("operation", "SET"), ("version", "now")]),
        Record(b"v", b"k", [("operation", "SET"), ("version", str(version(1))), ("expires-at", "never")]),
    ],
)
def test_a_record_of_another_writer_is_an_error(record: Record) -> None:
    with pytest.raises(PenstockError, match="'changes', offset 28: the record is not a change"):
        read(record_of(change(b"k", b"v", 1)), record)


def test_the_version_of_a_change() -> None:
    assert version_at("changes", columns(record_of(change(b"k", None, 7)))) == version(7)
    with pytest.raises(PenstockError, match="not a change"):
        version_at("changes", columns(Record(b"v", b"k")))


@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=6), st.one_of(st.none(), st.binary(max_size=6)), st.text(max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_any_captured_change_is_read(changes: list[tuple[bytes, bytes | None, str]]) -> None:
    found = read(*(record_of(change(k, value, n, w)) for n, (k, value, w) in enumerate(changes)))
    assert [(row["key"], row["value"], row["writer"]) for row in found] == [(k, v, w or None) for k, v, w in changes]
