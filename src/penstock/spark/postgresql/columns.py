"""Columns of a PostgreSQL table: the type for each type of Spark, and which columns a table needs.

``STORED`` has the type of a column that penstock creates, and ``_ACCEPTED`` the other types that hold every value.
Types of Spark are texts as in DDL: ``BIGINT``, ``DECIMAL(10,2)``, ``ARRAY<STRING>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.spark.postgresql.connection import identifier

if TYPE_CHECKING:
    import psycopg

__all__ = ["LONGEST_NAME", "TableColumn", "TableName", "TableShape", "family", "stored_type", "table_columns"]

LONGEST_NAME = 63
"""Maximum length of a name in bytes; the server cuts off the rest [PostgreSQL: NAMEDATALEN]."""

_ALIASES = {
    **dict.fromkeys(("BYTE", "TINYINT", "SHORT"), "SMALLINT"),
    "INTEGER": "INT",
    "LONG": "BIGINT",
    "REAL": "FLOAT",
    **dict.fromkeys(("DEC", "NUMERIC"), "DECIMAL"),
    **dict.fromkeys(("CHAR", "CHARACTER", "VARCHAR"), "STRING"),
    "TIMESTAMP_LTZ": "TIMESTAMP",
    **dict.fromkeys(("ARRAY", "MAP", "STRUCT"), "JSON"),
}
STORED = {
    "BOOLEAN": "boolean",
    "SMALLINT": "smallint",
    "INT": "integer",
    "BIGINT": "bigint",
    "FLOAT": "real",
    "DOUBLE": "double precision",
    "DECIMAL": "numeric",
    "STRING": "text",
    "BINARY": "bytea",
    "DATE": "date",
    "TIMESTAMP": "timestamp with time zone",
    "TIMESTAMP_NTZ": "timestamp without time zone",
    "JSON": "jsonb",
}
_ACCEPTED: Mapping[str, frozenset[str]] = {
    "SMALLINT": frozenset(("integer", "bigint", "real", "double precision")),
    "INT": frozenset(("bigint", "double precision")),
    "FLOAT": frozenset(("double precision",)),
    # A value that these do not accept is refused by the server.
    "STRING": frozenset(("character varying", "character", "citext", "uuid", "json", "jsonb", "inet")),
    "JSON": frozenset(("json", "text")),
}
_DIGITS = {"SMALLINT": 5, "INT": 10, "BIGINT": 19}
_CAST = frozenset(("uuid", "json", "jsonb", "inet"))
"""Types that need an explicit cast of a text. Others have none: it would cut off texts that are too long."""
_COMPARED = {
    "character": "{}::bpchar",
    "citext": "{}::citext",
    "uuid": "lower(translate({}, '{{}}-', ''))",
    "inet": "lower({})",
}
"""Types that consider different texts equal, and the SQL of a staged text that does so, too, and fails for none.

Two texts of one ``inet`` with another prefix length or other zeros (``::1``, ``0:0::1``), or of one ``jsonb``, are
different here, as are texts that only a nondeterministic collation considers equal.
"""


class TableName(NamedTuple):
    """Name of a table in its schema, unquoted."""

    schema: str
    table: str

    @property
    def quoted(self) -> str:
        """The name in SQL."""
        return f"{identifier(self.schema)}.{identifier(self.table)}"


class TableShape(NamedTuple):
    """Requirements of the sink named ``sink`` on its table: ``key`` identifies a row and needs a unique index.

    ``create``: the sink may create the table."""

    sink: str
    table: TableName
    key: tuple[str, ...] = ()
    create: bool = False


class TableColumn(NamedTuple):
    """A column of a table. ``type`` as the server prints it, for a domain the type below it; ``is_enum``: its values
    are listed. ``is_required``: not null without a default; ``is_generated``: it cannot be written."""

    name: str
    type: str
    is_required: bool
    is_generated: bool
    is_enum: bool

    def expression(self, text: str, kind: str) -> str:
        """Return in SQL how the staged value ``text`` of a column of Spark's type ``kind`` becomes one of this."""
        base = self.type.partition("(")[0]
        if self.is_enum or (family(kind) in ("STRING", "JSON") and base in _CAST):
            return f"{text}::{self.type}"
        return text

    def compared(self, text: str, kind: str) -> str:
        """Return in SQL what the staged value ``text`` of a key is compared by: equal for values that the unique index
        considers equal. It fails for no value; the insert does, whose error names the row."""
        base = self.type.partition("(")[0]
        return _COMPARED.get(base, "{}").format(text) if family(kind) == "STRING" else text

    def accepts(self, kind: str) -> bool:
        """Return True if the column can hold values of Spark's type ``kind``."""
        of, base = family(kind), self.type.partition("(")[0]
        if of is None:
            return False
        if base == "numeric" and (of in _DIGITS or of == "DECIMAL"):
            return self._holds_digits(*((_DIGITS[of], 0) if of in _DIGITS else _precision(kind)))
        is_text = of == "STRING" and self.is_enum
        return base == STORED[of] or base in _ACCEPTED.get(of, ()) or is_text

    def _holds_digits(self, precision: int, scale: int) -> bool:
        if self.type == "numeric":
            return True
        own = [int(number) for number in re.findall(r"-?[0-9]+", self.type)]
        own_scale = own[1] if len(own) > 1 else 0
        return own_scale >= scale and own[0] - own_scale >= precision - scale


def family(kind: str) -> str | None:
    """Return the key of ``STORED`` for a type of Spark; None if it cannot be stored."""
    base = re.split(r"[(<]", kind.strip().upper(), maxsplit=1)[0].strip()
    found = _ALIASES.get(base, base)
    return found if found in STORED else None


def _precision(kind: str) -> tuple[int, int]:
    numbers = [int(number) for number in re.findall(r"[0-9]+", kind)]
    return (numbers[0] if numbers else 10), (numbers[1] if len(numbers) > 1 else 0)


def stored_type(kind: str) -> str:
    """Return the type of a new column for Spark's type ``kind``.

    Raises:
        ConfigError: PostgreSQL has none.
    """
    found = family(kind)
    if found is None:
        raise ConfigError(
            f"a column of type {kind} cannot be written to PostgreSQL", hint="convert or drop it in a map or sql step"
        )
    return f"numeric({','.join(map(str, _precision(kind)))})" if found == "DECIMAL" else STORED[found]


_COLUMNS = """\
SELECT a.attname, format_type(CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.oid END,
                              CASE t.typtype WHEN 'd' THEN t.typtypmod ELSE a.atttypmod END),
       (a.attnotnull OR t.typnotnull) AND NOT a.atthasdef AND a.attidentity = '' AND t.typdefault IS NULL,
       a.attgenerated <> '' OR a.attidentity = 'a', t.typtype = 'e'
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""
_UNIQUE = """\
SELECT array_agg(a.attname::text) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL GROUP BY i.indexrelid"""


def _read_columns(connection: psycopg.Connection[Any], table: TableName) -> dict[str, TableColumn]:
    """Return the columns of ``table`` by name; empty if it does not exist."""
    return {row[0]: TableColumn(*row) for row in connection.execute(_COLUMNS, table)}


def _create_table(table: TableName, kinds: Mapping[str, str], key: Sequence[str]) -> str:
    columns = [f"{identifier(name)} {stored_type(kind)}" for name, kind in kinds.items()]
    if key:
        columns.append(f"PRIMARY KEY ({', '.join(map(identifier, key))})")
    return f"CREATE TABLE {table.quoted} ({', '.join(columns)})"


def table_columns(
    connection: psycopg.Connection[Any], shape: TableShape, kinds: Mapping[str, str], *, known: bool = True
) -> dict[str, TableColumn]:
    """Check that the table can hold columns of Spark's types ``kinds``; return its columns by name.

    A table that ``shape`` says to create is created. Unless all types are ``known``, nothing is created, and ``kinds``
    lacks some columns.

    Raises:
        ConfigError: it cannot; the error has the statement that changes the table.
    """
    table, sink = shape.table, shape.sink
    for name, kind in kinds.items():
        if len(name.encode()) > LONGEST_NAME:
            raise _unfit(sink, f"the name of column {name!r} is longer than {LONGEST_NAME} bytes", "rename it in a map")
        stored_type(kind)
    missing = next((name for name in shape.key if name not in kinds), None) if known else None
    if missing is not None:
        raise _unfit(sink, f"the key has no column {missing!r}, only {', '.join(kinds)}", "use the same case in key")
    found = _read_columns(connection, table)
    if not found and shape.create:
        if not known:
            return {}
        statement = _create_table(table, kinds, shape.key)
        connection.execute(statement.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
        found = _read_columns(connection, table)
    if not found:
        hint = f"{_create_table(table, kinds, shape.key)}, or set create: true" if known else "set create: true"
        raise _unfit(sink, f"table {table.quoted} does not exist", hint)
    for name, kind in kinds.items():
        _check_column(shape, found.get(name), name, kind)
    required = next((name for name, column in found.items() if column.is_required and name not in kinds), None)
    if required is not None and known:
        hint = f"ALTER TABLE {table.quoted} ALTER COLUMN {identifier(required)} DROP NOT NULL"
        raise _unfit(
            sink, f"column {required!r} of {table.quoted} is not null, and the stream has no such column", hint
        )
    if shape.key and not _is_unique(connection, table, shape.key):
        names = ", ".join(map(identifier, shape.key))
        why = f"table {table.quoted} has no unique index of {', '.join(shape.key)}"
        raise _unfit(sink, why, f"CREATE UNIQUE INDEX ON {table.quoted} ({names})")
    return found


def _check_column(shape: TableShape, column: TableColumn | None, name: str, kind: str) -> None:
    table, sink = shape.table, shape.sink
    if column is None:
        hint = f"ALTER TABLE {table.quoted} ADD COLUMN {identifier(name)} {stored_type(kind)}"
        raise _unfit(sink, f"table {table.quoted} has no column {name!r}", hint)
    if column.is_generated:
        raise _unfit(sink, f"column {name!r} of {table.quoted} is generated", "drop it in a map step")
    if not column.accepts(kind):
        hint = f"ALTER TABLE {table.quoted} ALTER COLUMN {identifier(name)} TYPE {stored_type(kind)}"
        why = f"column {name!r} of {table.quoted} is {column.type}, which does not hold each {kind}"
        raise _unfit(sink, why, f"{hint}, or cast it in the pipeline")


def _is_unique(connection: psycopg.Connection[Any], table: TableName, key: Iterable[str]) -> bool:
    return any(set(row[0]) == set(key) for row in connection.execute(_UNIQUE, table))


def _unfit(sink: str, why: str, hint: str) -> ConfigError:
    return ConfigError(
        f"sink {sink!r}: the table of PostgreSQL does not fit", option=f"sinks.{sink}.postgresql", why=why, hint=hint
    )
