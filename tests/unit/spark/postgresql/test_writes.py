"""A batch is written to PostgreSQL once, whatever happens between its steps."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError
from penstock.spark.postgresql.columns import TableName, TableShape, table_columns
from penstock.spark.postgresql.connection import Server, connected, identifier, parse_url
from penstock.spark.postgresql.writes import (
    BatchCommit,
    BatchWriter,
    StagedPart,
    StagingTable,
    copy_rows,
    written_batches,
)
from penstock.spark.written_batches import WrittenBatches
from penstock.statestore.hlc import Hlc
from tests.postgresql import Postgres

KINDS = {"place": "STRING", "flow": "DOUBLE"}
_numbers = itertools.count()


class Table:
    """A table of the sink ``sink`` of the pipeline ``p``, in a schema of its own."""

    def __init__(self, postgres: Postgres, kinds: dict[str, str], key: Sequence[str] = (), schema: str = "") -> None:
        self.postgres, self.kinds, self.key = postgres, kinds, tuple(key)
        self.name = TableName(schema or f"s{next(_numbers)}", "rows")
        self.server: Server = parse_url(postgres.url, str(postgres.password_file))
        postgres.execute(f"CREATE SCHEMA {identifier(self.name.schema)}")

    def writer(self, run: int = 1, query: str = "q") -> BatchWriter:
        return BatchWriter(self.server, self.name, self.name.schema, "p", "sink", query, str(Hlc(run, 0, "n")))

    def rows_of(
        self, rows: Sequence[Sequence[Any]], types: Sequence[Any] | None = None, deleted: Sequence[int] = ()
    ) -> Any:
        types = types or [pa.string() if kind == "STRING" else pa.float64() for kind in self.kinds.values()]
        count = len(rows)
        columns = [
            pa.array([f"r{n}" for n in range(count)]),
            pa.nulls(count, pa.string()),
            pa.array([n in deleted for n in range(count)]),
            *(pa.array([row[n] for row in rows], kind) for n, kind in enumerate(types)),
        ]
        return pa.RecordBatch.from_arrays(columns, names=["_id", "_part", "_delete", *self.kinds])

    def begin(self, batch: int, writer: BatchWriter) -> StagingTable:
        staged = writer.open(batch, self.kinds)
        assert isinstance(staged, StagingTable)
        return staged

    def finish(
        self,
        batch: int,
        writer: BatchWriter,
        staged: StagingTable,
        parts: Sequence[StagedPart],
        order_by: str | None = None,
    ) -> int:
        with connected(self.server, "test") as connection:
            shape = TableShape("sink", self.name, self.key, create=True)
            columns = table_columns(connection, shape, self.kinds)
        return writer.commit(batch, staged, parts, columns, BatchCommit(self.kinds, self.key, order_by))

    def write(
        self, batch: int, *rows: Sequence[Any], run: int = 1, order_by: str | None = None, deleted: Sequence[int] = ()
    ) -> int:
        writer = self.writer(run)
        staged = writer.open(batch, self.kinds)
        if isinstance(staged, int):
            return staged
        part = copy_rows(staged, [self.rows_of(rows, deleted=deleted)])
        return self.finish(batch, writer, staged, [part], order_by)

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(self.postgres.rows(f"SELECT * FROM {self.name.quoted}"), key=repr)

    def tables(self) -> list[str]:
        found = self.postgres.rows(
            f"SELECT tablename FROM pg_tables WHERE schemaname = '{self.name.schema}' ORDER BY tablename"
        )
        return [name for (name,) in found]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("character(8)", "north", "north  "),
        ("citext", "north", "North"),
        ("uuid", "2f1c8a3e-0000-4000-8000-00000000000a", "2F1C8A3E-0000-4000-8000-00000000000A"),
        ("uuid", "2f1c8a3e-0000-4000-8000-00000000000a", "{2f1c8a3e-0000-4000-8000-00000000000a}"),
        ("uuid", "2F1C8A3E00004000800000000000000A", "2f1c-8a3e0000-4000-8000-00000000000a"),
        ("inet", "2001:db8::a", "2001:DB8::A"),
    ],
)
def test_keys_that_only_the_table_considers_equal_are_one_row(
    postgres: Postgres, kind: str, first: str, second: str
) -> None:
    table = Table(postgres, KINDS, ["place"])
    postgres.execute("CREATE EXTENSION IF NOT EXISTS citext")
    postgres.execute(f"CREATE TABLE {table.name.quoted} (place {kind} PRIMARY KEY, flow double precision)")
    table.write(0, (first, 1.0), (second, 2.0), order_by="flow")
    table.write(1, (second, 4.0), (first, 3.0), order_by="flow")
    assert [flow for _, flow in table.rows()] == [4.0]
    with pytest.raises(PenstockError, match="2 rows of one batch have the key"):
        table.write(2, (first, 5.0), (second, 6.0))
    assert [flow for _, flow in table.rows()] == [4.0]
    table.write(2, (second, 7.0), deleted=[0])
    assert table.rows() == []


def test_values_of_each_type_arrive_unchanged(postgres: Postgres) -> None:
    texts = ["plain", "", None, 'a "quoted" text', "lines\n\\.\nof\ttext\\N", "ü€😀", "NULL"]
    kinds = {
        "text": "STRING", 'Upper %s "quoted"': "STRING", "flag": "BOOLEAN", "small": "SMALLINT", "number": "INT",
        "big": "BIGINT", "single": "FLOAT", "double": "DOUBLE", "exact": "DECIMAL(38,10)", "raw": "BINARY",
        "day": "DATE", "at": "TIMESTAMP", "local": "TIMESTAMP_NTZ", "nested": "STRUCT<A: ARRAY<INT>>",
    }  # fmt: skip
    table = Table(postgres, kinds, schema='odd "%s" schema')
    day, moment = dt.date(1, 2, 3), dt.datetime(2022, 3, 27, 1, 30, 0, 5, tzinfo=dt.UTC)
    fixed: list[Any] = [
        "x", True, -32_768, 2**31 - 1, -(2**63), "1.5", "Infinity", "1234567890123456789012345678.0000000001",
        "\\x00FF", day, moment, dt.datetime(9999, 12, 31, 23, 59, 59, 999_999), '{"a":[1,null]}',  # noqa: DTZ001
    ]  # fmt: skip
    types = [
        pa.string(), pa.string(), pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.string(), pa.string(), pa.string(),
        pa.string(), pa.date32(), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us"), pa.string(),
    ]  # fmt: skip
    empty = [None] * len(fixed)
    writer = table.writer()
    staged = table.begin(0, writer)
    part = copy_rows(staged, [table.rows_of([*([text, *fixed] for text in texts), ["nulls", *empty]], types)])
    assert table.finish(0, writer, staged, [part]) == 8

    found = {row[0]: row[1:] for row in table.rows()}
    assert set(found) == {*texts, "nulls"}
    assert found["nulls"] == tuple(empty)
    assert found["plain"] == (
        "x", True, -32_768, 2**31 - 1, -(2**63), 1.5, float("inf"), Decimal("1234567890123456789012345678.0000000001"),
        b"\x00\xff", day, moment, fixed[11], {"a": [1, None]},
    )  # fmt: skip
    assert table.tables() == ["penstock_batches", "rows"]


def test_a_batch_is_written_once(postgres: Postgres) -> None:
    table = Table(postgres, KINDS)
    assert table.write(3, ["a", 1.0], ["b", 2.0]) == 2
    # The driver died after the commit: the batch is repeated, also by a later run.
    assert table.write(3, ["a", 1.0], ["b", 2.0], run=2) == 2
    assert table.write(4, ["c", 3.0], run=2) == 1
    assert table.rows() == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
    assert written_batches(table.server, table.name.schema, "p", "sink", "q") == WrittenBatches(4, 1, 3)
    assert written_batches(table.server, table.name.schema, "p", "sink", "other") is None
    # A batch that has no rows when it is repeated has been written, too.
    assert [table.writer(run=2).written(batch) for batch in (3, 4, 5)] == [0, 1, 0]
    assert table.writer(query="other").written(4) == 0
    with pytest.raises(StorageError, match="cannot repeat batch 3") as old:
        table.write(3, ["a", 1.0], run=2)
    assert "has its batch 4" in str(old.value)


def test_a_run_that_was_replaced_changes_nothing(postgres: Postgres) -> None:
    table = Table(postgres, KINDS)
    assert table.write(0, ["a", 1.0]) == 1
    zombie = table.writer(run=1)
    staged = table.begin(1, zombie)
    part = copy_rows(staged, [table.rows_of([["zombie", 0.0]])])
    # The later run opens the batch, and the first one, which still runs, tries to commit its own.
    later = table.writer(run=2)
    mine = table.begin(1, later)
    with pytest.raises(RefusedError, match="refused a batch of sink 'sink'") as refused:
        table.finish(1, zombie, staged, [part])
    assert "a later run has written under" in str(refused.value)
    with pytest.raises(RefusedError):
        zombie.open(2, KINDS)
    # The same with another state directory, whose query has another id.
    with pytest.raises(RefusedError):
        table.writer(run=1, query="other").open(0, KINDS)
    assert table.finish(1, later, mine, [copy_rows(mine, [table.rows_of([["b", 2.0]])])]) == 1
    assert table.rows() == [("a", 1.0), ("b", 2.0)]


def test_a_replaced_run_that_commits_first_has_written_the_batch(postgres: Postgres) -> None:
    """It read the same records: the later run, which copied its rows already, must not add them."""
    table = Table(postgres, KINDS)
    writer = table.writer()
    first, second = table.begin(0, writer), table.begin(0, writer)
    parts = [copy_rows(staged, [table.rows_of([["a", 1.0]])]) for staged in (second,)]
    assert table.tables() == ["penstock_batches", second.table.table]
    assert table.finish(0, writer, second, parts) == 1
    assert table.finish(0, writer, first, [StagedPart(1, 1)]) == 1
    assert table.rows() == [("a", 1.0)]


def test_rows_of_replaced_task_attempts_are_left_out(postgres: Postgres) -> None:
    table = Table(postgres, KINDS)
    writer = table.writer()
    staged = table.begin(0, writer)
    rows = table.rows_of([["a", 1.0], ["b", 2.0]])
    copy_rows(staged, [rows])  # its result was lost, so Spark repeats the task
    parts = [copy_rows(staged, [rows, rows.slice(0, 0)]), copy_rows(staged, [rows.slice(0, 0)]), StagedPart(7, 0)]

    def breaks() -> Any:
        yield rows
        raise RuntimeError("the task failed in the middle")

    with pytest.raises(RuntimeError):
        copy_rows(staged, breaks())
    assert table.finish(0, writer, staged, parts) == 2
    assert table.rows() == [("a", 1.0), ("b", 2.0)]


def test_a_crash_of_the_server_between_copy_and_commit_loses_nothing(postgres: Postgres) -> None:
    table = Table(postgres, KINDS)
    assert table.write(0, ["a", 1.0]) == 1
    writer = table.writer()
    staged = table.begin(1, writer)
    part = copy_rows(staged, [table.rows_of([["b", 2.0]])])
    postgres.stop("immediate")
    with pytest.raises(UnavailableError, match="is not available"):
        table.finish(1, writer, staged, [part])
    postgres.start()
    with pytest.raises(UnavailableError, match="has 0 of 1 staged rows"):
        table.finish(1, writer, staged, [part])
    assert table.rows() == [("a", 1.0)]
    assert table.write(1, ["b", 2.0]) == 1
    assert table.rows() == [("a", 1.0), ("b", 2.0)]
    assert table.tables() == ["penstock_batches", "rows"]


def test_a_connection_that_breaks_is_retried(postgres: Postgres) -> None:
    table = Table(postgres, KINDS)
    staged = table.begin(0, table.writer())

    def breaks() -> Any:
        yield table.rows_of([["a", 1.0]])
        postgres.stop("immediate")
        yield table.rows_of([["b", 1.0]] * 100_000)

    try:
        with pytest.raises(UnavailableError, match="did not complete a statement"):
            copy_rows(staged, breaks())
    finally:
        postgres.start()
    assert table.write(0, ["a", 1.0]) == 1


def test_staging_tables_of_crashed_runs_are_dropped_unless_they_are_in_use(postgres: Postgres) -> None:
    table = Table(postgres, KINDS)
    crashed, in_use = table.begin(0, table.writer()), table.begin(0, table.writer())
    assert crashed.table.table not in table.tables()
    with postgres.connect() as connection, connection.transaction():
        connection.execute(f"LOCK TABLE {in_use.table.quoted} IN ROW EXCLUSIVE MODE")
        assert table.write(0, ["a", 1.0]) == 1
        assert table.tables() == ["penstock_batches", in_use.table.table, "rows"]
    assert table.write(1, ["b", 2.0]) == 1
    assert table.tables() == ["penstock_batches", "rows"]


def test_upserts_replace_and_delete_rows_by_key(postgres: Postgres) -> None:
    table = Table(postgres, {**KINDS, "n": "DOUBLE"}, key=("place",))
    assert table.write(0, ["a", 1.0, 1.0], ["b", 2.0, 1.0]) == 2
    rows = (["a", 3.0, 2.0], ["a", 4.0, 3.0], ["a", 5.0, None], ["b", None, 1.0], ["c", 6.0, 1.0], ["c", 7.0, 2.0])
    assert table.write(1, *rows, order_by="n", deleted=[3, 5]) == 6
    assert table.rows() == [("a", 4.0, 3.0)]
    with pytest.raises(PenstockError, match="2 rows of one batch have the key place 'd'"):
        table.write(2, ["d", 1.0, 1.0], ["d", 2.0, 1.0])
    assert table.rows() == [("a", 4.0, 3.0)]
    # Only columns of the key: nothing is left to replace.
    keys = Table(postgres, {"place": "STRING"}, key=("place",))
    assert (keys.write(0, ["a"]), keys.write(1, ["a"], ["b"])) == (1, 2)
    assert keys.rows() == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("constraint", "cause"),
    [
        ("CHECK (flow < 5)", 'violates check constraint "rows_check": Failing row contains (r6, 9). [SQLSTATE 23514]'),
        (
            "UNIQUE (place) DEFERRABLE INITIALLY DEFERRED",
            'constraint "rows_check": Key (place)=(r6) already exists. [SQLSTATE 23505]',
        ),
    ],
)
def test_a_refused_row_is_named_and_nothing_is_written(postgres: Postgres, constraint: str, cause: str) -> None:
    table = Table(postgres, KINDS)
    assert table.write(0, ["r6", 1.0]) == 1
    postgres.execute(f"ALTER TABLE {table.name.quoted} ADD CONSTRAINT rows_check {constraint}")
    with pytest.raises(PenstockError, match="refused a row of record 'r6' of sink 'sink'") as refused:
        table.write(1, *([f"r{n}", 9.0 if n in (6, 8) else 2.0] for n in range(10)))
    assert cause in str(refused.value)
    assert not isinstance(refused.value, UnavailableError)
    assert table.rows() == [("r6", 1.0)]
    assert table.write(1, ["x", 2.0]) == 1


def test_the_error_of_a_trigger_and_of_a_user_without_temporary_tables_is_the_cause(postgres: Postgres) -> None:
    table = Table(postgres, KINDS)
    assert table.write(0, ["a", 1.0]) == 1
    schema = identifier(table.name.schema)
    postgres.execute(
        f"CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.flow > 5 THEN RAISE 'too much flow'; END IF; RETURN NEW; END $$"
    )
    postgres.execute(
        f"CREATE TRIGGER low BEFORE INSERT ON {table.name.quoted} FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    )
    rows = (["b", 1.0], ["c", 9.0])
    with pytest.raises(PenstockError, match=r"(?s)of record 'r1' of sink.*too much flow \[SQLSTATE P0001\]"):
        table.write(1, *rows)
    postgres.execute("REVOKE TEMPORARY ON DATABASE plant FROM PUBLIC, writer")
    try:
        with pytest.raises(PenstockError, match=r"(?s)refused a row of sink 'sink'.*too much flow"):
            table.write(1, *rows)
    finally:
        postgres.execute("GRANT TEMPORARY ON DATABASE plant TO PUBLIC, writer")
    assert table.rows() == [("a", 1.0)]


def test_a_value_that_does_not_fit_is_refused_not_cut_off(postgres: Postgres) -> None:
    table = Table(postgres, {"place": "STRING", "nested": "STRING"})
    postgres.execute(f"CREATE TABLE {table.name.quoted} (place varchar(3), nested jsonb)")
    assert table.write(0, ["abc", json.dumps({"a": 1})]) == 1
    for row, why in ((["abcd", "1"], "too long"), (["x", "{"], "invalid input syntax for type json")):
        with pytest.raises(PenstockError, match=f"(?s)of record 'r0'.*{why}"):
            table.write(1, row)
    assert table.rows() == [("abc", {"a": 1})]
