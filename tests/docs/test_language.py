"""Rejected words: their number may only fall."""

from __future__ import annotations

import json

import pytest

from tests.docs.pages import ROOT
from tools import language


def test_the_number_of_rejected_words_does_not_grow() -> None:
    """After a change that removes some, ``python -m tools.language --write`` stores the lower numbers."""
    allowed = json.loads(language.BASELINE.read_text(encoding="utf-8"))
    found = language.counts(language.hits())
    grown = {area: (allowed.get(area, 0), count) for area, count in found.items() if count > allowed.get(area, 0)}
    assert not grown, f"more rejected words than before (before, now): {grown}; python -m tools.language --list"


def test_the_glossary_has_each_term_once() -> None:
    terms = [term.term for term in language.glossary()]
    assert len(terms) >= 60
    assert len(terms) == len(set(terms))
    assert {term.section for term in language.glossary()} == set(language.AREAS)
    for line in language.GLOSSARY.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            assert line.count("|") == 5, line


def test_no_synonym_is_a_term_of_its_own_or_belongs_to_two_terms() -> None:
    for section in language.AREAS:
        terms = [term for term in language.glossary() if term.section == section]
        synonyms = [synonym for term in terms for synonym in term.synonyms]
        assert len(synonyms) == len(set(synonyms)), section
        assert not {term.term.lower() for term in terms} & set(synonyms), section


@pytest.mark.parametrize(
    ("place", "name", "term"),
    [
        ("src/penstock/tube/storage/positions.py", "positions", "offset"),
        ("src/penstock/tube/consumer.py", "ConsumerPosition", "offset"),
        ("docs/tubemq/offsets.md", "Reset the cursors of a group", "offset"),
        ("cli penstock tube produce", "queue", "topic"),
        ("configuration `tube.topics.NAME`", "shards", "partition"),
        ("pipeline-file `sinks[]`", "output", "sink"),
        ("pipeline-file `steps[]`", "operator", "step"),
        ("spark-options `tubemq`, reading", "startingPositions", "offset"),
        ("metrics penstock tube backlog", "penstock_tube_backlog", "lag"),
        ("src/penstock/mqtt/acl.py", "acl", "policy"),
        ("docs/mqtt/mirror.md", "mirror", "bridge"),
        ("src/penstock/statestore/codec/commands.py", "KeyRevision", "version"),
    ],
)
def test_a_name_with_a_synonym_is_rejected_in_the_area_of_its_term(place: str, name: str, term: str) -> None:
    assert [hit.instead for hit in language.in_name("names", place, name)] == [term]


def test_a_synonym_is_accepted_in_another_area() -> None:
    """A session of MQTT has a queue, and a codec of packets has positions."""
    assert not list(language.in_name("names", "src/penstock/mqtt/engine/sessions/message_queue.py", "MessageQueue"))
    assert not list(language.in_name("names", "configuration `mqtt.limits`", "queue_overflow"))


def test_the_names_that_users_see_are_read_from_the_reference_pages() -> None:
    places = dict.fromkeys(place.split()[0] for place, _ in language.user_names())
    assert list(places) == ["cli", "configuration", "pipeline-file", "spark-options", "metrics"]
    names = set(language.user_names())
    assert {
        ("cli penstock tube topic create", "partitions"),
        ("configuration `mqtt.limits`", "queue_overflow"),
        ("pipeline-file `steps[].window`", "watermark"),
        ("spark-options `tubemq`, reading", "startingOffsets"),
    } <= names


def test_each_exception_is_still_used() -> None:
    """A name that does not exist any more needs no exception."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    for name in language.EXCEPTIONS:
        assert any(name in text for text in texts), name
