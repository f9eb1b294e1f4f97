"""The published JSON Schema: every pipeline of the examples and of the documentation fits it, broken ones do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.demo.data import example
from penstock.pipelines.spec.loader import json_schema
from penstock.runtime.config.yaml_document import parse_document
from tests.unit.pipelines.files import FILE

ROOT = Path(__file__).resolve().parents[4]
VALIDATOR = Draft202012Validator(json_schema())
ADDRESSES = {"PENSTOCK_TUBE_MASTER": "127.0.0.1:8715", "PENSTOCK_BROKER": "mqtt://127.0.0.1:1883"}
_BLOCK = re.compile(r"```yaml\n(name: .*?)```", re.DOTALL)


def errors_of(value: object) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(value)]


def errors(text: str) -> list[str]:
    return errors_of(parse_document(text, "p.yaml", ADDRESSES).data)


def test_the_schema_is_valid_json_schema() -> None:
    Draft202012Validator.check_schema(json_schema())


def pipelines() -> Iterator[Any]:
    yield pytest.param(example("pipeline.yaml").read_text(encoding="utf-8"), id="example")
    yield pytest.param(FILE, id="FILE")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, block in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8"))):
            if "sinks:" in block:
                yield pytest.param(block, id=f"{page.stem}-{number}")


@pytest.mark.parametrize("text", list(pipelines()))
def test_pipelines_are_of_the_schema(text: str) -> None:
    assert errors(text) == []


def test_environment_placeholders_match_the_schema() -> None:
    """An editor sees the file before that."""
    file = {
        "name": "${NAME}",
        "source": {"format": "rate", "rows": "${ROWS:-5}"},
        "statestore": {"broker": "${BROKER:-mqtt://127.0.0.1:1883}"},
        "steps": [{"name": "once", "dedupe": {"within": "${WITHIN}"}}],
        "sinks": [{"name": "out", "mqtt": {"topic": "${TOPIC}", "retain": "${RETAIN}"}}],
    }
    assert errors_of(file) == []


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("name: water\n", "", "$: 'name' is a required"),
        ("name: water\n", "name: Water!\n", "$.name: 'Water!'"),
        ("dedupe: {within: 1 day}", "dedupe: {witihn: 1 day}", "$.steps[2]"),
        ("dedupe: {within: 1 day}", "dedupe: {within: 1 moon}", "$.steps[2]"),
        ("topics: [water_flow]", "topics: []", "$.source: "),
        ("{topics: [water_flow]}", "{format: kafka, topics: [a]}", "$.source: "),
        ("{topics: [water_flow]}", "{format: rate, rows: none}", "$.source: "),
        ("aggregates: {n: count(*)}", "aggregates: {}", "$.steps["),
        ("path: lake/rows", "path: ''", "$.sinks["),
        ("sinks:", "sinks: []\nmore:", "'more' was unexpected"),
    ],
)
def test_invalid_pipelines_do_not_match_the_schema(old: str, new: str, place: str) -> None:
    assert old in FILE
    text = FILE.replace(old, new, 1)
    assert any(place in found for found in errors(text)), errors(text)
