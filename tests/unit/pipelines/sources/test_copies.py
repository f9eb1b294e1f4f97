"""Copies of redriven records that a replay leaves out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.pipelines.sources import readers
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


def test_copies_in_a_topic_that_was_created_again_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [RecordPart((topic, 0, 0, 1), None, "a") for topic in ("t", "old", "u")]
    ids = ["second", "", "first"]
    copies = {place: RedrivenCopy(place.record, "", known) for place, known in zip(places, ids, strict=True)}
    monkeypatch.setattr(readers, "KafkaLog", lambda _: nullcontext(SimpleNamespace(topic_ids=dict)))
    sources: Any = Sources(parse(FILE), tmp_path, redriven=copies)
    assert list(sources._readers["a"]._copies) == [places[1]]
    answer = SimpleNamespace(topic_ids=lambda: {"t": "second", "u": "second"})
    monkeypatch.setattr(readers, "KafkaLog", lambda _: nullcontext(answer))
    sources = Sources(parse(FILE), tmp_path, redriven=copies)
    # The id of the second one is not known.
    assert list(sources._readers["a"]._copies) == places[:2]
