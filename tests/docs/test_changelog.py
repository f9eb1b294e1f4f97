"""The changelog: its sections, and its tables of renamed things, whose new names exist and whose old ones do not."""

from __future__ import annotations

import re
from collections import Counter
from importlib import import_module

import pytest

from tests.docs.pages import ROOT
from tools import language

TABLE = re.compile(r"^\| ([a-z]+) before \| \1 now \|\n\| --- \| --- \|\n((?:\|.*\n)+)", re.MULTILINE)
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
ROWS = [
    (kind, before, now)
    for kind, rows in TABLE.findall(CHANGELOG)
    for before, now in (row.strip("| ").split(" | ") for row in rows.splitlines())
]
CLI = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
COMMANDS = set(re.findall(r"^## (penstock.*)$", CLI, re.MULTILINE))
OPTIONS = set(re.findall(r"^`(?:-\w, )?(--[a-z-]+)", CLI, re.MULTILINE))
KEYS = {name for place, name in language.user_names() if place.startswith(("configuration", "pipeline-file"))}
METRICS = {name for place, name in language.user_names() if place.startswith("metrics")}


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def python_name_exists(name: str) -> bool:
    """``module.Class`` or ``Class.member`` of the clients; a class alone belongs to the module of its table row."""
    classes = {
        "MqttClient": "penstock.mqtt.client",
        "Consumer": "penstock.tube",
        "TransactionClient": "penstock.tube.exactly_once",
    }
    parts = name.removesuffix("()").split(".")
    if parts[0] in classes:
        parts = [*classes[parts[0]].split("."), *parts]
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def exists(kind: str, name: str) -> bool:
    if kind == "metric":
        return name in METRICS
    if kind == "command":
        return name.partition(" [")[0] in COMMANDS
    if kind == "name":
        return python_name_exists(name)
    if name.startswith("--"):
        return name.partition(" ")[0] in OPTIONS
    return name.rpartition(".")[2] in KEYS


@pytest.mark.parametrize(("kind", "before", "now"), ROWS, ids=[f"{kind}-{before}" for kind, before, _ in ROWS])
def test_a_renamed_thing_has_its_new_name(kind: str, before: str, now: str) -> None:
    """The first name of a cell has its whole path; the others of a row may be short."""
    new = quoted(now)[0]
    if new.startswith(("penstock", "--", "mqtt.", "window.")) or kind not in {"option", "command"}:
        assert exists(kind, new), f"{new}: CHANGELOG.md"
    old = quoted(before)[0]
    if kind in {"metric", "name"} or (kind == "option" and re.fullmatch(r"[a-z_.]+", old)):
        assert not exists(kind, old), f"{old}: CHANGELOG.md"


def test_each_kind_of_name_has_a_table() -> None:
    assert {kind for kind, _, _ in ROWS} == {"command", "metric", "name", "option"}
    assert len(ROWS) > 80


def test_a_release_has_each_section_and_line_once() -> None:
    """A merge that keeps the lines of both sides would repeat them."""
    for release in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        texts = [line for line in release.splitlines() if line.startswith(("#", "* "))]
        assert [text for text, count in Counter(texts).items() if count > 1] == []


def test_the_changelog_of_the_first_release_says_what_it_has() -> None:
    """Nobody has an earlier release, so nothing is changed or fixed in it."""
    first = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[-1]
    assert re.findall(r"^### (.*)$", first, re.MULTILINE) == ["Added", "Upgrade from an earlier commit"]
