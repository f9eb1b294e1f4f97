"""The diagram of a pipeline: every part in it, every edge, and no text of the file as markup."""

from __future__ import annotations

import re

from penstock.pipelines.spec.description import as_mermaid
from tests.unit.pipelines.files import parse

GRAPH = """\
name: graph
sources:
  a: {topics: [a]}
  b: {format: files, path: "in/<b> & 'c'/*.csv"}
steps:
  - {name: low, from: a, map: {compute: {b: now(), t: now()}}}
  - {name: high, from: a, filter: "true"}
  - {name: both, concat: [low, high, b]}
  - name: hours
    window: {time: t, duration: 1 hour, watermark: 1 hour, aggregates: {n: count(*)}, emit: closed}
sinks:
  - {name: hours, table: {path: x}}
  - {name: late, from: hours.late, table: {path: y, format: parquet}}
  - {name: sent, from: low, mqtt: {topic: "a/{b}"}}
dead_letters: {path: "a <&> path"}
"""


def test_every_part_and_every_edge_is_in_it() -> None:
    first, *lines = as_mermaid(parse(GRAPH)).splitlines()
    assert first == "flowchart LR"
    found = [re.fullmatch(r'    (n\d+)[(\[]+"(.+)<br>(.+)"[)\]]+', line) for line in lines]
    labels = {match[1]: f"{match[2]}: {match[3]}" for match in found if match is not None}
    assert list(labels.values()) == [
        *("a: tubemq", "b: files", "low: map", "high: filter", "both: concat", "hours: window"),
        *("hours: delta table", "late: parquet table", "sent: mqtt", "dead letters: a #lt;#amp;#gt; path"),
    ]
    edges = [line.split(maxsplit=1) for line in lines[len(labels) :]]
    drawn = [(labels[start], *rest.rsplit(maxsplit=1)) for start, rest in edges]
    assert [(start.split(":")[0], arrow, labels[end].split(":")[0]) for start, arrow, end in drawn] == [
        *(("a", "-->", "low"), ("a", "-->", "high")),
        *(("low", "-->", "both"), ("high", "-->", "both"), ("b", "-->", "both"), ("both", "-->", "hours")),
        *(("hours", "-->", "hours"), ("hours", "-- late -->", "late"), ("low", "-->", "sent")),
        *((name, "-.->", "dead letters") for name in ("low", "high", "hours", "sent")),
    ]
