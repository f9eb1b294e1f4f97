"""Write the rows of a batch to a PostgreSQL table once, also if processes are killed and the batch is repeated.

A batch has four steps:

1. The driver opens it in a transaction (:meth:`BatchWriter.open`): it locks the rows of the sink in the table
   ``penstock_batches``, compares the fencing token and the batch, stores the token, and creates an unlogged staging
   table with a random name.
2. The tasks copy their rows into the staging table (:func:`copy_rows`), each in a transaction of its own, under a
   random number, and return number and count. Rows of a task whose result did not reach the driver (it was killed, or
   another attempt was faster) have a number that is not used.
3. The driver locks the rows of the sink again, compares again, moves the rows of the returned numbers into the table,
   and stores batch and counts in ``penstock_batches``, in one transaction (:meth:`BatchWriter.commit`).
4. It drops the staging table. What remains of it after a crash is dropped when the next batch is opened.

A driver that was replaced finds a later token in steps 1 and 3, and changes nothing. A batch that was committed before
its driver died is found in step 1. A server that crashes in between empties unlogged tables: the driver compares the
number of staged rows with those of its tasks. The rows of a batch never pass through the driver.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError, shortened
from penstock.spark.postgresql.columns import TableColumn, TableName, stored_type
from penstock.spark.postgresql.connection import (
    IDLE_TIMEOUT_S,
    LOCK_TIMEOUT_S,
    Server,
    connected,
    identifier,
)
from penstock.spark.written_batches import WrittenBatches
from penstock.statestore import hlc
from penstock.statestore.hlc import Hlc

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

__all__ = ["BatchCommit", "BatchWriter", "StagedPart", "StagingTable", "copy_rows", "written_batches"]

BATCHES = "penstock_batches"
_STAGING = "penstock_staging"
_META = ("_attempt", "_id", "_part", "_delete")
"""Columns of a staging table before those of the rows: number of the task's attempt, identity of the row, and whether
it deletes its key."""
_MOST_SHOWN = 300


class StagingTable(NamedTuple):
    """A staging table: where a task copies its rows to."""

    server: Server
    table: TableName
    columns: int
    application: str


class StagedPart(NamedTuple):
    """The rows of one task: the number of its attempt, and their count."""

    attempt: int
    rows: int


class BatchCommit(NamedTuple):
    """The rows of a batch: Spark's types by column, the key of an upsert, and the column that orders rows of a key."""

    kinds: Mapping[str, str]
    key: Sequence[str] = ()
    order_by: str | None = None


def copy_rows(staged: StagingTable, batches: Iterable[pa.RecordBatch]) -> StagedPart:
    """Copy the rows of a task into the staging table, in one transaction. Nothing is connected without rows.

    The columns are ``_id``, ``_part``, ``_delete`` and those of the rows, in formats that the server parses.

    Raises:
        UnavailableError: the server did not answer.
        PenstockError: the server refused the rows.
    """
    import pyarrow as pa
    from pyarrow import csv

    attempt, rows = random.SystemRandom().getrandbits(62), 0
    arrived = (batch for batch in batches if batch.num_rows)
    first = next(arrived, None)
    if first is None:
        return StagedPart(attempt, 0)
    names = [*_META, *(f"c{n}" for n in range(staged.columns))]
    copied = f"COPY {staged.table.quoted} ({', '.join(names)}) FROM STDIN (FORMAT csv)"
    # All values are quoted, nulls are not: this is how the server distinguishes null from an empty text.
    options = csv.WriteOptions(include_header=False, quoting_style="all_valid")

    def every() -> Iterator[pa.RecordBatch]:
        yield first
        yield from arrived

    with connected(staged.server, staged.application) as connection, connection.cursor().copy(copied) as copy:
        for batch in every():
            number = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
            sink = pa.BufferOutputStream()
            values = [number, *map(_in_utc, batch.columns)]
            csv.write_csv(pa.RecordBatch.from_arrays(values, names=names), sink, options)
            copy.write(memoryview(sink.getvalue()))
            rows += batch.num_rows
    return StagedPart(attempt, rows)


def _in_utc(values: pa.Array[Any]) -> pa.Array[Any]:
    """Return times with a time zone, that of the session, as the same times in UTC; others unchanged."""
    import pyarrow as pa

    kind = values.type
    return values.cast(pa.timestamp("us", "UTC")) if pa.types.is_timestamp(kind) and kind.tz is not None else values


class BatchWriter:
    """Writes batches of the query ``query`` of a sink. ``token``: the run's fencing token."""

    def __init__(
        self, server: Server, table: TableName, work_schema: str, pipeline: str, sink: str, query: str, token: str
    ) -> None:
        self._server = server
        self._table = table
        self._work = work_schema
        self._names = (pipeline, sink)
        self._query = query
        self._token = _parsed(token)
        self.application = f"penstock {pipeline}/{sink}"
        digest = hashlib.sha256(f"{pipeline}/{sink}".encode()).hexdigest()[:16]
        self._prefix = f"{_STAGING}_{digest}_"

    def open(self, batch: int, kinds: Mapping[str, str]) -> StagingTable | int:
        """Begin ``batch``: return its staging table, or the number of its rows if the server has it already.

        Raises:
            RefusedError: a later run has written.
            StorageError: the server has a later batch.
            UnavailableError: the server did not answer.
        """
        staging = TableName(self._work, f"{self._prefix}{batch}_{uuid.uuid4().hex[:8]}")
        with connected(self._server, self.application) as connection:
            _create_batches(connection, self._work)
            with _transaction(connection):
                written = self._compare(connection, batch)
                if written is not None:
                    return written
                self._drop_stale(connection)
                columns = [f"c{n} {_staged_type(kind)}" for n, kind in enumerate(kinds.values())]
                connection.execute(
                    f"CREATE UNLOGGED TABLE {staging.quoted} (_attempt bigint NOT NULL, _id text, _part text, "
                    f"_delete boolean, {', '.join(columns)})"
                )
        return StagingTable(self._server, staging, len(kinds), self.application)

    def written(self, batch: int) -> int:
        """Return the number of rows that the server has of ``batch``: 0 unless it is repeated.

        Raises:
            UnavailableError: the server did not answer.
        """
        found = written_batches(self._server, self._work, *self._names, self._query, application=self.application)
        return found.rows if found is not None and found.batch == batch else 0

    def commit(
        self,
        batch: int,
        staged: StagingTable,
        parts: Sequence[StagedPart],
        columns: Mapping[str, TableColumn],
        what: BatchCommit,
    ) -> int:
        """Move the staged rows of ``parts`` into the table, and store that ``batch`` is written; return their number.

        Raises:
            RefusedError: a later run has written.
            UnavailableError: the server did not answer, or lost the staged rows in a crash.
            PenstockError: the table refused a row, which the error names.
        """
        attempts = [part.attempt for part in parts if part.rows]
        expected = sum(part.rows for part in parts)
        with connected(self._server, self.application) as connection:
            with _transaction(connection):
                written = self._compare(connection, batch)
                if written is None:
                    self._check_staged(connection, staged, attempts, expected)
                    self._move(connection, _Move(staged.table, attempts, self._table, columns, what))
                    connection.execute(
                        f"UPDATE {self._batches} SET batch = %s, rows = %s, total_rows = total_rows + %s, "
                        "written_at = now() WHERE (pipeline, sink, query) = (%s, %s, %s)",
                        (batch, expected, expected, *self._names, self._query),
                    )
            self.discard(connection, staged)
        return expected if written is None else written

    def discard(self, connection: psycopg.Connection[Any], staged: StagingTable) -> None:
        """Drop the staging table unless a task that was replaced still writes to it; then the next batch drops it."""
        with _transaction(connection):
            _try_to_drop(connection, staged.table)

    @property
    def _batches(self) -> str:
        return _batches_in(self._work)

    def _compare(self, connection: psycopg.Connection[Any], batch: int) -> int | None:
        """Lock the rows of the sink until the end of the transaction; return the rows of ``batch`` if it is written."""
        connection.execute(
            f"INSERT INTO {self._batches} (pipeline, sink, query, fencing_token) VALUES (%s, %s, %s, %s) "
            "ON CONFLICT DO NOTHING",
            (*self._names, self._query, str(self._token)),
        )
        found = connection.execute(
            f"SELECT query, fencing_token, batch, rows FROM {self._batches} WHERE (pipeline, sink) = (%s, %s) "
            "ORDER BY query FOR UPDATE",
            self._names,
        ).fetchall()
        for _, text, _, _ in found:
            other = _parsed(text)
            if other > self._token:
                raise RefusedError(
                    f"{self._server.shown} refused a batch of sink {self._names[1]!r}",
                    why=f"the run writes under fencing token {self._token}; a later run has written under {other}",
                    hint="let the later run continue; to start over, stop it first",
                )
        last, rows = next((last, rows) for query, _, last, rows in found if query == self._query)
        connection.execute(
            f"UPDATE {self._batches} SET fencing_token = %s WHERE (pipeline, sink, query) = (%s, %s, %s)",
            (str(self._token), *self._names, self._query),
        )
        if last is not None and last > batch:
            raise StorageError(
                f"sink {self._names[1]!r} cannot repeat batch {batch}",
                why=f"{self._server.shown} has its batch {last}: the state directory is older than the table",
                hint="restore the newest state directory, or start over with a new one and an empty table",
            )
        return int(rows) if last == batch else None

    def _drop_stale(self, connection: psycopg.Connection[Any]) -> None:
        """Drop staging tables that crashed runs left."""
        names = connection.execute(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND starts_with(c.relname, %s)",
            (self._work, self._prefix),
        ).fetchall()
        for (name,) in names:
            _try_to_drop(connection, TableName(self._work, name))

    def _check_staged(
        self, connection: psycopg.Connection[Any], staged: StagingTable, attempts: list[int], expected: int
    ) -> None:
        row = connection.execute(f"SELECT count(*) {_rows_of(staged.table, attempts)}").fetchone()
        if row is None or row[0] != expected:
            raise UnavailableError(
                f"{self._server.shown} has {0 if row is None else row[0]} of {expected} staged rows",
                applied=False,
                why="it crashed and recovered while the rows of the batch were copied",
                hint="the pipeline repeats the batch",
            )

    def _move(self, connection: psycopg.Connection[Any], move: _Move) -> None:
        if move.what.key and move.what.order_by is None:
            self._check_distinct(connection, move)
        try:
            with connection.transaction():
                for statement in move.statements(move.selected):
                    connection.execute(statement)
        except _row_errors() as error:
            raise self._row_error(connection, move, error) from error

    def _check_distinct(self, connection: psycopg.Connection[Any], move: _Move) -> None:
        shown_keys = ", ".join(f"{key}::text" for key in move.compared_keys)
        twice = connection.execute(
            f"SELECT count(*), {shown_keys} {_rows_of(move.staging, move.attempts)} "
            f"GROUP BY {', '.join(move.compared_keys)} HAVING count(*) > 1 LIMIT 1"
        ).fetchone()
        if twice is not None:
            shown = ", ".join(f"{key} {value!r}" for key, value in zip(move.what.key, twice[1:], strict=True))
            raise PenstockError(
                f"{twice[0]} rows of one batch have the key {shown}",
                why=f"sink {self._names[1]!r} writes one row per key, and the order of these rows is undefined",
                hint="set order_by: <column> in the sink, or add a dedupe by that key before it",
            )

    def _row_error(self, connection: psycopg.Connection[Any], move: _Move, error: psycopg.Error) -> PenstockError:
        """Return the error that names the first row that the table refuses; the transaction must not be committed."""
        import psycopg

        try:
            row = _first_refused(connection, move)
        except psycopg.Error:
            # For example, the user may not create temporary tables.
            row = None
        detail = str(error) if row is None else row.why
        which = "" if row is None else f" of record {row.id!r}"
        return PenstockError(
            f"{self._server.shown}: table {self._table.quoted} refused a row{which} of sink {self._names[1]!r}",
            why=f"{shortened(' '.join(detail.split()), _MOST_SHOWN)} [SQLSTATE {error.sqlstate}]",
            hint="exclude such rows with an expect or filter step, or change the table; nothing of the batch is "
            "written",
        )


class _Move(NamedTuple):
    """The move of the rows of ``attempts`` from ``staging`` to ``table``."""

    staging: TableName
    attempts: list[int]
    table: TableName
    columns: Mapping[str, TableColumn]
    what: BatchCommit

    @property
    def compared_keys(self) -> list[str]:
        """Expressions in SQL that are equal for the staged rows of one key."""
        return [self.columns[key].compared(self._staged(key), self.what.kinds[key]) for key in self.what.key]

    @property
    def selected(self) -> str:
        """The rows to move: with a key, the last one of each."""
        chosen = _rows_of(self.staging, self.attempts)
        if not self.what.key:
            return f"SELECT * {chosen}"
        keys = ", ".join(self.compared_keys)
        order = [] if self.what.order_by is None else [f"{self._staged(self.what.order_by)} DESC NULLS LAST"]
        return f"SELECT DISTINCT ON ({keys}) * {chosen} ORDER BY {', '.join([keys, *order, '_id', '_part'])}"

    def statements(self, selected: str) -> list[str]:
        """Return the statements that move the rows ``selected``."""
        names = list(self.what.kinds)
        values = [self.columns[name].expression(self._staged(name), kind) for name, kind in self.what.kinds.items()]
        insert = (
            f"INSERT INTO {self.table.quoted} ({', '.join(map(identifier, names))}) "
            f"SELECT {', '.join(values)} FROM ({selected}) AS staged WHERE NOT _delete"
        )
        if not self.what.key:
            return [insert]
        keys = ", ".join(map(identifier, self.what.key))
        replaced = [f"{identifier(name)} = EXCLUDED.{identifier(name)}" for name in names if name not in self.what.key]
        action = f"UPDATE SET {', '.join(replaced)}" if replaced else "NOTHING"
        equal = " AND ".join(f"old.{identifier(key)} = {self._value_of_key(key)}" for key in self.what.key)
        delete = f"DELETE FROM {self.table.quoted} AS old USING ({selected}) AS staged WHERE _delete AND {equal}"
        return [delete, f"{insert} ON CONFLICT ({keys}) DO {action}"]

    def _value_of_key(self, name: str) -> str:
        """Return in SQL the staged key as its column has it: a text is compared with others by the rules of text."""
        staged, kind, column = self._staged(name), self.what.kinds[name], self.columns[name]
        value = column.expression(staged, kind)
        return column.compared(staged, kind) if value == staged else value

    def _staged(self, name: str) -> str:
        return f"c{list(self.what.kinds).index(name)}"


class _RefusedRow(NamedTuple):
    """A row that the table refused: id of its record, and the reason."""

    id: str
    why: str


def _first_refused(connection: psycopg.Connection[Any], move: _Move) -> _RefusedRow | None:
    """Find the first row, by id, that the table refuses after those before it: a binary search of inserts."""
    connection.execute(
        "CREATE TEMPORARY TABLE penstock_rows ON COMMIT DROP AS "
        f"SELECT row_number() OVER (ORDER BY _id, _part) AS _row, staged.* FROM ({move.selected}) AS staged"
    )
    counted = connection.execute("SELECT count(*) FROM penstock_rows").fetchone()
    first, last = 1, 0 if counted is None else int(counted[0])
    refused: _RefusedRow | None = None
    while first <= last:
        middle = (first + last) // 2
        try:
            with connection.transaction():
                selected = f"SELECT * FROM pg_temp.penstock_rows WHERE _row BETWEEN {first} AND {middle}"
                for statement in move.statements(selected):
                    connection.execute(statement)
        except _row_errors() as error:
            last = middle - 1
            found = connection.execute("SELECT _id FROM penstock_rows WHERE _row = %s", (middle,)).fetchone()
            why = f"{error.diag.message_primary}: {error.diag.message_detail or ''}".rstrip(": ")
            refused = _RefusedRow("" if found is None else str(found[0]), why)
        else:
            first = middle + 1
    return refused


def _row_errors() -> tuple[type[psycopg.Error], ...]:
    """Errors that a row causes: its values, a constraint, or a trigger."""
    from psycopg import DataError, IntegrityError
    from psycopg.errors import RaiseException

    return DataError, IntegrityError, RaiseException


def _parsed(token: str) -> Hlc:
    found = hlc.parse(token)
    if found is None:
        raise PenstockError(
            f"{token!r} is not a fencing token", why="it is not a version of the state store", hint=f"correct {BATCHES}"
        )
    return found


def written_batches(
    server: Server, work_schema: str, pipeline: str, sink: str, query: str, *, application: str = "penstock reconcile"
) -> WrittenBatches | None:
    """Return what the query ``query`` of a sink has written, as the server knows it; None if it has nothing.

    Raises:
        UnavailableError: the server did not answer.
        PenstockError: it refused the query.
    """
    with connected(server, application) as connection:
        if not _has_batches(connection, work_schema):
            return None
        row = connection.execute(
            f"SELECT batch, rows, total_rows FROM {_batches_in(work_schema)} "
            "WHERE (pipeline, sink, query) = (%s, %s, %s)",
            (pipeline, sink, query),
        ).fetchone()
        return None if row is None or row[0] is None else WrittenBatches(*row)


@contextmanager
def _transaction(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction that is durable when it is committed, and does not wait without a limit."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE")
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
        connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s'")
        # With off, a crash of the server would lose a batch that the checkpoint has.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
        )
        # A constraint that is checked at the end of the transaction would not say which row it refuses.
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        yield


def _batches_in(schema: str) -> str:
    """Return the name of the table in a statement with parameters, in which % has a meaning."""
    return TableName(schema, BATCHES).quoted.replace("%", "%%")


def _has_batches(connection: psycopg.Connection[Any], schema: str) -> bool:
    name = TableName(schema, BATCHES).quoted
    return connection.execute("SELECT to_regclass(%s)", (name,)).fetchone() != (None,)


def _rows_of(staging: TableName, attempts: Sequence[int]) -> str:
    """Return FROM and WHERE of the staged rows of ``attempts``, for a statement without parameters."""
    return f"FROM {staging.quoted} WHERE _attempt = ANY (ARRAY[{', '.join(map(str, attempts))}]::bigint[])"


def _create_batches(connection: psycopg.Connection[Any], schema: str) -> None:
    if _has_batches(connection, schema):
        return
    table = TableName(schema, BATCHES).quoted
    with _transaction(connection):
        # Two sinks may create it at the same time, which IF NOT EXISTS alone does not permit.
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (table,))
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {table} (pipeline text, sink text, query text, fencing_token text NOT NULL, "
            "batch bigint, rows bigint, total_rows bigint NOT NULL DEFAULT 0, written_at timestamptz, "
            "PRIMARY KEY (pipeline, sink, query))"
        )


def _try_to_drop(connection: psycopg.Connection[Any], table: TableName) -> None:
    import psycopg

    try:
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '1s'")
            connection.execute(f"DROP TABLE IF EXISTS {table.quoted}")
    except psycopg.errors.LockNotAvailable:
        return


def _staged_type(kind: str) -> str:
    """Return the type of a staged column, which accepts each value of Spark's type ``kind``."""
    found = stored_type(kind)
    # JSON with \u0000 is not jsonb: the move of the row refuses it, not the copy of all rows.
    return "text" if found == "jsonb" else found
