"""A table must hold the columns of a stream; the error of one that does not has the statement that changes it."""

from __future__ import annotations

import itertools

import pytest

from penstock.errors import ConfigError
from penstock.spark.postgresql.columns import TableColumn, TableName, TableShape, stored_type, table_columns
from penstock.spark.postgresql.connection import connected, parse_url
from tests.postgresql import Postgres

_numbers = itertools.count()


@pytest.mark.parametrize(
    ("kind", "stored", "accepted", "refused"),
    [
        ("BOOLEAN", "boolean", (), ("text", "integer")),
        ("BYTE", "smallint", ("integer", "numeric", "numeric(5,0)"), ("numeric(4,0)",)),
        ("INT", "integer", ("bigint", "numeric(12,2)", "double precision"), ("smallint", "numeric(11,2)", "real")),
        ("LONG", "bigint", ("numeric",), ("integer", "double precision")),
        ("REAL", "real", ("double precision",), ("numeric",)),
        ("DOUBLE", "double precision", (), ("real", "numeric")),
        ("DECIMAL(10,2)", "numeric(10,2)", ("numeric", "numeric(12,4)"), ("numeric(10,4)", "numeric(12,1)", "bigint")),
        ("VARCHAR(9)", "text", ("character varying(3)", "uuid", "jsonb"), ("bytea", "integer")),
        ("BINARY", "bytea", (), ("text",)),
        ("TIMESTAMP", "timestamp with time zone", (), ("timestamp without time zone", "date")),
        ("TIMESTAMP_NTZ", "timestamp without time zone", (), ("timestamp with time zone",)),
        ("MAP<STRING, INT>", "jsonb", ("json", "text"), ("hstore",)),
    ],
)
def test_a_type_is_held_by_types_with_all_of_its_values(
    kind: str, stored: str, accepted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    assert stored_type(kind) == stored

    def holds(name: str) -> bool:
        return TableColumn("c", name, is_required=False, is_generated=False, is_enum=False).accepts(kind)

    assert all(map(holds, (stored, *accepted)))
    assert not any(map(holds, refused))


def test_a_column_without_a_type_of_postgresql_is_refused() -> None:
    with pytest.raises(ConfigError, match="INTERVAL DAY cannot be written"):
        stored_type("INTERVAL DAY")


KINDS = {"place": "STRING", "n": "BIGINT"}


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ("place text", "has no column 'n'"),
        ("place text, n integer", "column 'n' of .* is integer, which does not hold each BIGINT"),
        ("place text, n bigint, other int NOT NULL", "column 'other' of .* is not null"),
        ("place text, n bigint", "has no unique index of place"),
    ],
)
def test_the_hint_makes_the_table_fit(postgres: Postgres, columns: str, why: str) -> None:
    name = TableName("public", f"Fit {next(_numbers)}")
    shape = TableShape("sink", name, ("place",) if "unique" in why else ())
    server = parse_url(postgres.url, str(postgres.password_file))
    with connected(server, "test") as connection:
        with pytest.raises(ConfigError, match="does not exist") as missing:
            table_columns(connection, shape, KINDS)
        assert missing.value.hint is not None
        assert missing.value.hint.startswith(f'CREATE TABLE "public"."{name.table}" ("place" text, "n" bigint')
        connection.execute(f"CREATE TABLE {name.quoted} ({columns})")
        with pytest.raises(ConfigError, match=why) as unfit:
            table_columns(connection, shape, KINDS)
        connection.execute(str(unfit.value.hint).partition(", or cast")[0])
        assert set(KINDS) <= set(table_columns(connection, shape, KINDS))


def test_further_columns_may_have_defaults_or_be_generated(postgres: Postgres) -> None:
    name = TableName("public", f"more{next(_numbers)}")
    with connected(parse_url(postgres.url, str(postgres.password_file)), "test") as connection:
        connection.execute("CREATE TYPE level AS ENUM ('low', 'high')")
        connection.execute("CREATE DOMAIN short AS varchar(5)")
        connection.execute(
            f"CREATE TABLE {name.quoted} (id bigint GENERATED ALWAYS AS IDENTITY, "
            "at timestamptz NOT NULL DEFAULT now(), "
            "place short NOT NULL, n bigint, level level, twice bigint GENERATED ALWAYS AS (n * 2) STORED, "
            "UNIQUE (place, n), UNIQUE (level) INCLUDE (n))"
        )
        connection.execute(f"CREATE UNIQUE INDEX ON {name.quoted} (n) WHERE n > 1")
        kinds = {**KINDS, "level": "STRING"}
        found = table_columns(connection, TableShape("sink", name, ("n", "place")), kinds)
        assert (found["place"].type, found["place"].is_required) == ("character varying(5)", True)
        assert found["level"].expression("c2", "STRING") == "c2::level"
        assert table_columns(connection, TableShape("sink", name, ("level",)), kinds)
        for key in (("n",), ("place",)):
            with pytest.raises(ConfigError, match="no unique index"):
                table_columns(connection, TableShape("sink", name, key), kinds)
        for generated in ("id", "twice"):
            with pytest.raises(ConfigError, match=f"column '{generated}' of .* is generated"):
                table_columns(connection, TableShape("sink", name), {**kinds, generated: "BIGINT"})
        with pytest.raises(ConfigError, match="longer than 63 bytes"):
            table_columns(connection, TableShape("sink", name), {"x" * 64: "STRING"})
        # Without the types of all columns, what is missing is not known.
        assert table_columns(connection, TableShape("sink", name), {"n": "BIGINT"}, known=False)
        missing = TableShape("sink", TableName("public", "nothing"), (), create=True)
        assert table_columns(connection, missing, {"n": "BIGINT"}, known=False) == {}
