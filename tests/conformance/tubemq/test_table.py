"""The compatibility page's source: every method has tests, every test it names exists, every field it names as well."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest

from penstock.tube.codec.methods import METHODS, RESERVED
from tools.tubemq_table import messages

ROOT = Path(__file__).resolve().parents[3]
TABLE = json.loads((Path(__file__).parent / "methods.json").read_text(encoding="utf-8"))


def test_every_method_is_shown_by_tests() -> None:
    assert {int(number) for number in TABLE["methods"]} == set(METHODS)
    assert all(TABLE["methods"].values())
    assert TABLE["others"][0][0] == ", ".join(map(str, sorted(RESERVED)))


NAMED = {test for tests in TABLE["methods"].values() for test in tests} | {row[2] for row in TABLE["others"]}


@pytest.mark.parametrize("test", sorted(NAMED))
def test_named_tests_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).is_file()
    assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_fields_with_a_remark_exist() -> None:
    fields = {f"{message.name}.{field.name}" for message in messages() for field in message.fields}
    for pattern in TABLE["fields"]:
        assert any(fnmatch(name, pattern) for name in fields), pattern
