from __future__ import annotations

import json

import pytest

from penstock.pipelines.steps.lookups import index_dataset, text_of


@pytest.mark.parametrize(
    "data",
    [
        b'{"id":"a","n":1}\r\n\n{"id":"b","n":2}\n{"id":"a","n":3}',
        b' [{"id":"a","n":1},{"id":"b","n":2},{"id":"a","n":3}]',
    ],
)
def test_objects_are_found_by_a_field_and_the_last_one_counts(data: bytes) -> None:
    found = index_dataset(data, ["id"])
    assert {name: json.loads(text)["n"] for name, text in found.items()} == {("a",): 3, ("b",): 2}


def test_values_keep_all_digits() -> None:
    """A column may be a DECIMAL."""
    first, second = '{"id":"a","n":12345678901234567890.10}', '{"n": 1e400, "id": "b"}'
    found = {("a",): first.encode(), ("b",): second.encode()}
    assert index_dataset(f"{first}\n{second}".encode(), ["id"]) == found
    assert index_dataset(f" [ {first},\n\t{second} ] ".encode(), ["id"]) == found


def test_several_fields_are_compared_as_text() -> None:
    lines = [{"a": 1, "b": True}, {"a": "1", "b": None}, {"a": 1.5, "b": "x"}, {"b": "x"}, {"a": [1], "b": "x"}]
    found = index_dataset("\n".join(map(json.dumps, lines)).encode(), ["a", "b"])
    assert set(found) == {("1", "true"), ("1.5", "x")}
    scalars: list[object] = [5, 5.0, False, "é", None, {}]
    assert [text_of(value) for value in scalars] == ["5", "5.0", "false", "é", None, None]


@pytest.mark.parametrize(
    ("text", "of_spark"),
    [
        ("0.0", "0.0"),
        ("-0.001", "-0.001"),
        ("0.00099", "9.9E-4"),
        ("9999999.5", "9999999.5"),
        ("1e7", "1.0E7"),
        ("-12345678.5", "-1.23456785E7"),
        ("12000000000000000000000.0", "1.2E22"),
        ("1.7976931348623157e308", "1.7976931348623157E308"),
    ],
)
def test_a_number_has_the_text_that_spark_gives_a_double(text: str, of_spark: str) -> None:
    """Otherwise a column of this value would not match."""
    assert set(index_dataset(f'{{"n":{text}}}'.encode(), ["n"])) == {(of_spark,)}


def test_an_empty_dataset_has_no_objects() -> None:
    assert index_dataset(b"", ["id"]) == index_dataset(b"[]", ["id"]) == index_dataset(b"\n", ["id"]) == {}


@pytest.mark.parametrize(
    "data",
    [b"[1]", b"[{]", b"5\n", b'{"id":NaN}', b"\xff\xff", b"[" * 100_000, b'{"id":' * 100_000, b'[{"a":1}] [2]'],
)
def test_something_else_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        index_dataset(data, ["id"])


@pytest.mark.parametrize("data", [b'{"id":"a","n":1}\n{"id":"b","n":1,"n":2}', b'[{"id":"a","at":{"n":1,"n":2}}]'])
def test_an_object_with_a_name_twice_is_an_error(data: bytes) -> None:
    """Which of the two values is meant nobody knows."""
    with pytest.raises(ValueError, match="contains 'n' twice"):
        index_dataset(data, ["id"])


def test_names_with_quotes_and_line_breaks_are_names() -> None:
    line = json.dumps({"a;drop": "x\"\n'", "lone": "\ud800"})
    assert index_dataset(line.encode(), ["a;drop"]) == {("x\"\n'",): line.encode()}
    assert list(index_dataset(f"[{line}]".encode(), ["a;drop"])) == [("x\"\n'",)]
