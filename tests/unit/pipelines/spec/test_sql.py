"""Names and types that are found in SQL without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlglot import exp

from penstock.pipelines.spec.sql import evident_type, parse_expression, parse_statement, references

EXAMPLES = Path(__file__).parents[3] / "vectors" / "spark_sql" / "examples.sql"


def test_every_example_of_spark_is_parsed_and_has_no_unknown_column() -> None:
    statements = [line for line in EXAMPLES.read_text(encoding="utf-8").splitlines() if line.startswith("SELECT")]
    assert len(statements) > 1_000
    for statement in statements:
        found = parse_statement(statement)
        if " FROM " in statement or found is not None:
            continue
        select = parse_expression(statement)
        assert isinstance(select, exp.Select)
        aliases = {projection.alias_or_name for projection in select.selects}
        names = [name for projection in select.selects for name in references(projection)]
        assert set(names) <= aliases, statement


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("celsius > 90 AND `a b`.c IS NULL", ["celsius", "a b.c"]),
        ("transform(items, (x, i) -> x.price + i + base)", ["items", "base"]),
        ("exists(a, x -> exists(x.y, z -> z > x.k))", ["a"]),
        ("timestampadd(HOUR, 1, at) + INTERVAL 1 DAY", ["at"]),
        ("extract(YEAR FROM at) = datediff(DAY, since, at)", ["at", "since"]),
        ("payload:price::double >>> 1", ["payload"]),
        ("cast(a AS STRUCT<b: INT>).b + a['k'][0].c", ["a"]),
        ("count(*) FILTER (WHERE x > current_time)", ["x"]),
        ("X '1F' <=> x'1F' OR \"text\" LIKE ANY ('a')", []),
        ("(SELECT max(b) FROM c) > a", []),
        ("`x.y` + _id", ["`x.y`", "_id"]),
    ],
)
def test_the_columns_of_an_expression(text: str, names: list[str]) -> None:
    assert sorted(references(parse_expression(text))) == sorted(names)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("celsius >", "line 1, character 9, near '>'"),
        ("(celsius > 1", "line 1, character 12, near '1'"),
        ("'open", "Error tokenizing"),
        ("celsius 90", "line 1, character 10, near '90'"),
    ],
)
def test_the_place_of_an_error(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_expression(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a > 1", "BOOLEAN"),
        ("(NOT a) OR b", "BOOLEAN"),
        ("cast(a AS int)", "INT"),
        ("try_cast(a AS STRING)", "STRING"),
        ("a + 1", None),
        ("upper(a)", None),
        ("cast(a AS DECIMAL(3, 2))", None),
    ],
)
def test_types_that_are_evident(text: str, kind: str | None) -> None:
    assert evident_type(parse_expression(text)) == kind
