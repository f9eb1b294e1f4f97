"""The picture of a pipeline: every part in it, nothing over another, and no text of the file as markup."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from xml.etree import ElementTree as ET

import pytest

from penstock.pipelines.spec.picture import as_svg
from tests.unit.pipelines.files import FILE, parse

SVG = "{http://www.w3.org/2000/svg}"
GRAPH = """\
name: graph
sources:
  a: {topics: [a]}
  b: {format: files, path: "in/<b> & 'c'/*.csv"}
steps:
  - {name: low, from: a, map: {compute: {b: value, t: now()}}}
  - {name: high, from: a, filter: "true"}
  - {name: both, concat: [low, high, b]}
  - name: hours
    window: {time: t, duration: 1 hour, watermark: 1 hour, aggregates: {n: count(*)}, emit: closed}
sinks:
  - {name: hours, table: {path: x}}
  - {name: late, from: hours.late, table: {path: y}}
  - {name: sent, from: low, mqtt: {topic: "a/{b}"}}
dead_letters: {path: "a <&> path that is much too long for a box"}
"""


def boxes(svg: str) -> dict[str, tuple[int, int]]:
    """Where the box of each name and kind stands."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        assert rect is not None
        assert title is not None
        found[str(title.text)] = (int(rect.get("x", "")), int(rect.get("y", "")))
    return found


@pytest.mark.parametrize("text", [FILE, GRAPH])
def test_boxes_do_not_stand_on_each_other(text: str) -> None:
    placed = boxes(as_svg(parse(text)))
    for (x, y), (other_x, other_y) in itertools.combinations(placed.values(), 2):
        assert x != other_x or abs(y - other_y) > 46


def test_everything_is_in_it_from_the_left_to_the_right() -> None:
    svg = as_svg(parse(GRAPH))
    placed = boxes(svg)
    assert list(placed) == [
        *("a: tubemq", "b: files", "low: map", "high: filter", "both: concat", "hours: window"),
        *("hours: parquet table", "late: parquet table", "sent: mqtt"),
        "dead letters: a <&> path that is much too long for a box",
    ]
    chain = ["a: tubemq", "low: map", "both: concat", "hours: window", "hours: parquet table"]
    assert [placed[name][0] for name in chain] == sorted({placed[name][0] for name in chain})
    assert {placed[name][0] for name in list(placed)[6:]} == {placed["hours: parquet table"][0]}
    looks = Counter(re.findall(r'<path class="(\w*)"', svg))
    # low, high, both three times (b over one column), hours, its sink, sent over two; the late ones. Letters: low,
    # high, hours, sent, and the box that says where they are.
    assert looks == {"": 8 + 1 + 2, "late": 1, "letters": 5}
    assert "a &lt;&amp;&gt; path that is much…" in svg
