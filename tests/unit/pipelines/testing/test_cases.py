"""Cases as data: what may be written, and how what came out is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.testing.cases import Input, cases_path, compare, lines, load_cases
from tests.unit.pipelines.files import parse

GOOD = """\
cases:
  - name: one
    input: [{value: {branch: main}}]
    expect: {rows: [{branch: main}], alarms: {alarm/main: {branch: main}}}
"""


def load(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "p.test.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cases(path, parse())


def test_schemas_of_a_case_are_files_next_to_it(tmp_path: Path) -> None:
    text = GOOD.replace("input:", "schemas: {7: a.avsc}\n    input:")
    with pytest.raises(ConfigError, match=r"case 'one': the schema '.*a\.avsc' cannot be read"):
        load(tmp_path, text)
    (tmp_path / "a.avsc").write_text('"int"')
    (case,) = load(tmp_path, text)
    assert case.schemas == {7: "ImludCI="}


def test_a_file_of_cases(tmp_path: Path) -> None:
    (case,) = load(tmp_path, GOOD)
    assert (case.name, case.dead_letters, case.expect["rows"]) == ("one", [], [{"branch": "main"}])
    assert cases_path(Path("a/pipeline.yaml")) == Path("a/pipeline.test.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("rows:", "rose:"), "has the key 'rose' in `expect`, which is not a sink"),
        (GOOD.replace("[{branch: main}], alarms", "{}, alarms"), "sink 'rows' has rows"),
        (GOOD.replace("{alarm/main: {branch: main}}", "[]"), "sink 'alarms' has keys"),
        (GOOD + GOOD.removeprefix("cases:\n"), "two cases have the name 'one'"),
        (GOOD.replace("input:", "inputs:"), r"p.test.yaml:3:5: option 'cases\[0\].inputs'.*input"),
        (GOOD.replace("value: {branch: main}}]", "at: noon}]"), "expected `at` to be a time with a time zone"),
        (GOOD.replace("value: {branch: main}}]", 'base64: "%"}]'), "expected valid base64"),
        (GOOD.replace("value: {branch: main}}]", "base64: AA==, value: x}]"), "expected value or base64, not both"),
        ("cases: []\n", "at least 1"),
    ],
)
def test_invalid_test_cases_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("given", "payload"),
    [
        ({"value": "not JSON"}, b"not JSON"),
        ({"value": {"a": [1, None], "b": "ü"}}, '{"a": [1, null], "b": "ü"}'.encode()),
        ({"value": 5}, b"5"),
        ({}, b""),
        ({"base64": "/wA="}, b"\xff\x00"),
    ],
)
def test_payloads(given: dict[str, Any], payload: bytes) -> None:
    assert Input.model_validate(given).payload == payload


def test_fields_that_are_not_named_and_the_order_do_not_count() -> None:
    found = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert compare("rows", [{"a": 2}, {"a": 1}], found) is None
    # The vague one leaves the other what it needs.
    assert compare("rows", [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]) is None
    off = compare("rows", [{"a": 1}, {"a": 3}], found)
    assert off is not None
    assert list(lines(off)) == ["rows:", '  - {"a": 3}', '  + {"a": 2, "b": "y"}']


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        (5, 5.0, True),
        (0.3, 0.1 + 0.2, True),
        (1, True, False),
        (None, None, True),
        (None, 0, False),
        ("2022-03-20T10:00:00Z", "2022-03-20T11:00:00.000+01:00", True),
        ("2022-03-20T10:00:00Z", "2022-03-20T10:00:01Z", False),
        ([1, {"a": 1}], [1, {"a": 1, "b": 2}], True),
        ([1], [1, 2], False),
        ("a", ["a"], False),
        ({"a": None}, {}, False),
    ],
)
def test_values(expected: object, found: object, same: bool) -> None:
    assert (compare("rows", [{"x": expected}], [{"x": found}]) is None) is same


def test_keys_that_are_not_there_are_null() -> None:
    assert compare("alarms", {"a": {"n": 1}, "b": None}, {"a": {"n": 1, "m": 2}, "c": None}) is None
    off = compare("alarms", {"a": {"n": 1}, "b": {"n": 1}, "d": None}, {"a": {"n": 2}, "c": {"n": 3}, "d": {"n": 4}})
    assert off is not None
    assert off.missing == ['a: {"n": 1}', 'b: {"n": 1}', "d: null"]
    assert off.more == ['a: {"n": 2}', "b: null", 'c: {"n": 3}', 'd: {"n": 4}']
