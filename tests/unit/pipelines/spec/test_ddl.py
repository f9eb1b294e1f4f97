from __future__ import annotations

import pytest

from penstock.pipelines.spec.columns import Column, parse_ddl


def test_names_types_and_nulls() -> None:
    text = "a string NOT NULL, `b c` Decimal(10,2) -- why\n, c STRUCT<x: INT, `y``z` ARRAY<MAP<STRING, LONG>> NOT NULL>"
    assert parse_ddl(text + " COMMENT 'its', d varchar(3) /* no */ not null") == [
        Column("a", "STRING", nullable=False),
        Column("b c", "DECIMAL(10, 2)", nullable=True),
        Column("c", "STRUCT<x: INT, `y``z`: ARRAY<MAP<STRING, LONG>>>", nullable=True),
        Column("d", "VARCHAR(3)", nullable=False),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the name of a column .*, found the end at character 1"),
        ("flow DUBLE", r"expected a type \(did you mean DOUBLE\?\), found 'DUBLE' at character 6"),
        ("flow", "expected a type: STRING.* found the end at character 5"),
        ("a INT,", "expected the name of a column .*found the end"),
        ("a INT b INT", "expected a comma, NOT NULL, or the end, found 'b' at character 7"),
        ("a INT, A LONG", "expected a unique name: 'a' is already used, found 'A' at character 8"),
        ("s STRUCT<x: INT, x: INT>", "'x' is already used, found 'x' at character 18"),
        ("a INT NOT", "expected NULL, found the end"),
        ("a DECIMAL(39, 2)", "expected 1 to 38 digits"),
        ("a DECIMAL(2, 3)", "a scale of at most the number of digits"),
        ("a DECIMAL(2; 3)", r"expected '\)', found ';' at character 12"),
        ("a VARCHAR", r"expected the length of VARCHAR, as in VARCHAR\(20\)"),
        ("a ARRAY", "expected '<', found the end"),
        ("a MAP<STRING>", "expected ',', found '>'"),
        ("a ARRAY<INT", "expected '>', found the end"),
        ("a-b INT", "expected a type.*found '-' at character 2"),
        ("`` INT", "expected the name of a column"),
        ("a " + "ARRAY<" * 500 + "INT" + ">" * 500, "at most 100 levels of nested types"),
        ("a INT; DROP TABLE x", "found ';' at character 6"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ddl(text)
