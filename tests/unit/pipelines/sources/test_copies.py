"""Copies of redriven records that a replay leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.pipelines.sources.sources import Sources
from penstock.pipelines.state_dir.replay import RecordPart, RedrivenCopy
from tests.unit.pipelines.files import parse

FILE = """\
name: p
sources:
  a: {format: kafka, bootstrap: ["h:1"], topics: [t]}
  b: {format: kafka, bootstrap: ["h:2"], topics: [t]}
sinks: [{name: one, from: a, console: {}}, {name: two, from: b, console: {}}]
"""


def test_copies_of_a_topic_with_the_same_name_are_not_those_of_another_source(tmp_path: Path) -> None:
    copies = {
        RecordPart(("t", 0, 0, offset), None, source): RedrivenCopy(("t", 0, 0, offset + 100))
        for offset, source in enumerate(("a", "b", "", "former"))
    }
    sources: Any = Sources(parse(FILE), tmp_path, redriven=copies)
    known = {name: [place.record[3] for place in reader._redriven] for name, reader in sources._readers.items()}
    # Older versions stored no source; one that was renamed is not known any more.
    assert known == {"a": [0, 2, 3], "b": [1, 2, 3]}
