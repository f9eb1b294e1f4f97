"""Columns of samples in JSON: types, null, conflicts with their lines, and names that columns cannot have."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli.main import main
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.inference import infer


def lines(*values: object) -> list[str]:
    return [json.dumps(value) for value in values]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, False], "BOOLEAN"),
        ([1, -5], "BIGINT"),
        ([1, 1 << 63], "DECIMAL(38, 0)"),
        ([1, 10**38], "DOUBLE"),
        ([1, 2.5], "DOUBLE"),
        ([1 << 63, 0.5], "DOUBLE"),
        (["2024-05-01"], "DATE"),
        (["2024-05-01T06:00:00Z", "2024-05-01T06:00:00.250+02:00"], "TIMESTAMP"),
        (["2024-05-01T06:00:00"], "TIMESTAMP_NTZ"),
        (["2024-05-01", "2024-05-01T06:00:00Z"], "STRING"),
        (["2024-13-01", "20240501ab", "2024-W01-1"], "STRING"),
        # Forms of ISO 8601 that Spark cannot read.
        (["2024-W01-1"], "STRING"),
        (["2024-W01-1T06:00:00Z"], "STRING"),
        (["2024-05-01T06:00:00,250"], "STRING"),
        (["2024-05-01T06:00:00+02:00:30"], "STRING"),
        (["2024-05-01T06:00:00.123456789-0330", "2024-05-01T06:00:00+05"], "TIMESTAMP"),
        (["a", ""], "STRING"),
        ([[1, None], []], "ARRAY<BIGINT>"),
        ([[[1.5]]], "ARRAY<ARRAY<DOUBLE>>"),
        ([{"a": 1}, {"b": [{"c": "x"}]}], "STRUCT<a: BIGINT, b: ARRAY<STRUCT<c: STRING>>>"),
        ([{"a b": 1}], "STRUCT<`a b`: BIGINT>"),
    ],
)
def test_types(values: list[object], kind: str) -> None:
    found = infer(lines(*({"x": value} for value in values)))
    (column,) = found.columns
    assert (column.type, column.nullable, column.notes) == (kind, False, ())
    assert [each.name for each in parse_ddl(found.ddl(nullable=False))] == ["x"]


def test_a_column_that_a_sample_lacks_or_has_null_in_is_nullable() -> None:
    found = infer(["", *lines({"a": 1, "b": 1, "c": None}, {"a": 2, "c": 1}, {"a": 3, "b": None, "c": 2})])
    assert [(column.name, column.nullable) for column in found.columns] == [("a", False), ("b", True), ("c", True)]
    assert found.ddl(nullable=False) == "a BIGINT NOT NULL,\nb BIGINT,\nc BIGINT\n"
    assert found.ddl(nullable=True) == "a BIGINT,\nb BIGINT,\nc BIGINT\n"


def test_conflicts_and_guesses_are_explained() -> None:
    samples = lines(
        {"v": 12, "n": None, "e": [], "s": {"k": 1}, "o": {}},
        {"v": "n/a", "n": None, "e": [], "s": {"k": {"x": 1}}, "o": {}},
        {"v": 13, "n": None, "e": [], "s": {"k": [1]}, "o": {}},
    )
    found = infer(samples)
    assert [column.type for column in found.columns] == [
        "STRING",
        "STRING",
        "ARRAY<STRING>",
        "STRUCT<k: STRING>",
        "STRING",
    ]
    several = "has values of several kinds, so it is STRING: an integer in"
    assert [note for column in found.columns for note in column.notes] == [
        f'v {several} 2 (line 1: 12); a text in 1 (line 2: "n/a")',
        "n is always null; STRING is a guess",
        "e is always empty; the type of its elements is a guess",
        f's.k {several} 1 (line 1: 1); an object in 1 (line 2: {{"x": 1}}); an array in 1 (line 3: [1])',
        "o has no fields; it is read as text",
    ]
    assert "-- n is always null; STRING is a guess\nn STRING,\n" in found.ddl(nullable=False)
    assert [column.name for column in parse_ddl(found.ddl(nullable=False))] == ["v", "n", "e", "s", "o"]


def test_names_that_columns_cannot_have_are_left_out() -> None:
    found = infer(lines({"a": 1, "A": 2, "_id": 3, "": 4, "s": {"x": 1, "X": 2, "_y": 3}}))
    assert [(column.name, column.type) for column in found.columns] == [
        ("a", "BIGINT"),
        ("s", "STRUCT<x: BIGINT, _y: BIGINT>"),
    ]
    assert found.notes == (
        "'A' is left out: Spark does not distinguish it from 'a'",
        "'_id' is left out: names of columns are not empty, and do not start with '_'",
        "'' is left out: names of columns are not empty, and do not start with '_'",
    )
    assert found.columns[1].notes == ("'s.X' is left out: Spark does not distinguish it from 'x'",)


def test_lines_that_are_no_json_object_are_counted() -> None:
    found = infer(['{"a": 1}', "{", "[1]", '{"a": 1, "a": 2}', "[" * 100_000])
    assert (found.samples, found.refused) == (1, 4)
    assert found.example.startswith("line 2: Expecting property name")


def test_values_below_many_levels_are_text() -> None:
    value: object = 1
    for _ in range(300):
        value = {"a": value}
    (column,) = infer(lines(value)).columns
    assert column.type.count("STRUCT") == 19
    assert "a: STRING" in column.type


def test_a_line_break_in_a_name_does_not_end_a_comment() -> None:
    """In a field of a struct too: the note names it."""
    found = infer(['{"a": {"b\\nc": null}}'])
    comment, column = found.ddl(nullable=False).split("\n", 1)
    assert comment == "-- a.b c is always null; STRING is a guess"
    assert column.startswith("a STRUCT<")


def test_the_command_prints_a_schema_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"machine": "press\u2028", "celsius": 93.5}\nnot JSON\n{"machine": "pump"}\n', encoding="utf-8")
    assert main(["pipeline", "infer", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "machine STRING NOT NULL,\ncelsius DOUBLE\n"
    assert "1 of 3 lines left out, the first: line 2: " in printed.err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b'{"a": 1}\n')))
    assert main(["pipeline", "infer", "-", "--nullable", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "columns": [{"name": "a", "type": "BIGINT", "nullable": True, "notes": []}],
        "notes": [],
        "samples": 1,
        "refused": 0,
    }


def test_files_without_samples_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").write_text("[1, 2]\n")
    assert main(["pipeline", "infer", str(tmp_path / "none.jsonl")]) == 2
    printed = capsys.readouterr().err
    assert "has no JSON object with columns" in printed
    assert "line 1 is not a JSON object" in printed
    assert main(["pipeline", "infer", str(tmp_path / "missing.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
