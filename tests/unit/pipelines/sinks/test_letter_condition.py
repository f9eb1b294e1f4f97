"""The condition for the dead letters of a sink, of which another sink writes some; Spark's part: ``test_one_pass``."""

from __future__ import annotations

import json
import re

from penstock.pipelines.sinks.delivery import letter_condition
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.state_dir.letter_writers import LetterRange
from tests.unit.pipelines.files import parse

FILE = """\
name: p
source: {topics: [t]}
dead_letters: {path: dead}
steps:
  - {name: parsed, parse: {schema: n INT}}
  - {name: more, map: {compute: {m: n + 1}}}
sinks:
  - {name: a, table: {path: a}}
  - {name: b, table: {path: b}}
"""
(PLAN, _) = plan(parse(FILE))
COUNT = 10_000
AT = {"t": {f"1:{n}": 5 for n in range(COUNT)}}
LITERAL = re.compile(r"CAST\(X'([0-9a-f]*)' AS STRING\)")


def condition(*ranges: LetterRange, **others: tuple[LetterRange, ...]) -> str:
    """The condition with texts instead of literals."""
    found = letter_condition(PLAN, {"parsed": ranges, "more": (), **others})
    assert found is not None
    return LITERAL.sub(lambda match: f"<{bytes.fromhex(match[1]).decode()}>", found)


def test_partitions_at_equal_offsets_are_left_out() -> None:
    # Another sink has written what one partition has had, and nothing of the others.
    moved = AT | {"t": AT["t"] | {"1:7": 9}}
    texts = set(re.findall(r"<(\{.*?\})>", condition(LetterRange({}, AT), LetterRange(moved, None))))
    assert [json.loads(text) for text in texts] == [{"t/1:7": [{"first": 0, "end": 5}, {"first": 9, "end": None}]}]
    assert condition(LetterRange({}, AT), LetterRange(AT, None)) == (
        "coalesce((CASE WHEN _dead.step IN (<parsed>) THEN true END) AND NOT _dead.again, false)"
    )
    assert condition(LetterRange({}, None)) == "coalesce((_dead.step IN (<parsed>)) AND NOT _dead.again, false)"
    # Nothing lies between.
    assert letter_condition(PLAN, {"parsed": [LetterRange(AT, AT)], "more": ()}) is None


def test_the_number_of_expressions_does_not_depend_on_the_partitions() -> None:
    few, many = ({"t": {f"1:{n}": n + 1 for n in range(count)}} for count in (2, COUNT))
    found = [condition(LetterRange(at, None), more=(LetterRange(at, None),)) for at in (few, many)]
    shapes = [re.sub(r"<\{.*?\}>", "", text) for text in found]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) < 600
    assert "_dead.step IN (<more>, <parsed>)" in shapes[0]
