"""Find rejected words in the texts of the project: pages, docstrings, comments, error texts, help and names.

Usage: python -m tools.language [--list] [--write]

The rules are those of docs/reference/glossary.md: the field's standard term, always the same one. Its column "not" has
the synonyms that no name in the area of its table may have. Some uses are correct, so words are not replaced
automatically; the number of hits of each area must not increase (tests/docs/language.json, compared by
tests/docs/test_language.py). ``--list`` prints each hit with its place; ``--write`` stores the current numbers.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "penstock"
BASELINE = ROOT / "tests" / "docs" / "language.json"

GENERATED = "Written by tools/reference.py"

REJECTED = {
    r"\b(?:is|are|was|were) not there\b": "does not exist, is not reachable",
    r"\b(?:is|are|was) told\b": "is notified, reports",
    r"\bgoes on\b|\bgo on\b": "continues",
    r"\bsays? so\b": "reports it",
    r"\bat first\b": "by default, initially",
    r"\bbeside\b": "next to, alongside",
    r"\bwhoever\b": "any client that",
    r"\blets? in\b|\b(?:is|are) let in\b": "accepts, is accepted",
    r"\bthe way of\b": "the path of",
    r"\bagain and again\b": "repeatedly",
    r"\bcomes? again\b": "is repeated, is sent again",
    r"\bmade anew\b": "created again",
    r"\bwithout a word\b": "silently",
    r"\bfor ever\b": "forever, indefinitely",
    r"\bin words\b": "as an error message",
    r"\bstands? (?:at|in|on|there)\b": "is",
    r"\bthe tube\b|\ba tube\b": "TubeMQ",
    r"\bplaces? in (?:a|the) log\b": "offset",
    r"\bfigures\b": "metrics",
}
"""Patterns of rejected words, and the terms to use instead."""

REJECTED_IN_CODE = {
    r"(?<!`)\b(?:nobody|somebody|anybody)\b": "no client, a client, any client",
    r"\bunder way\b": "in progress, active, in flight",
    r"\bcarr(?:y|ies|ied) out\b": "execute, run, apply",
    r"\bfor good\b": "permanently",
    r"\b(?:is|are|was|were) gone\b": "does not exist any more, was deleted, is disconnected",
    r"\bof (?:ours|theirs|hers)\b": "of penstock, of the broker, of the caller",
    r"\bas long as [a-z ]+ stands?\b": "while ... is valid",
    r"\bwhat (?:is|was) (?:there|left|kept)\b": "the existing ..., the remaining ..., the stored ...",
}
"""The same for docstrings, comments and other texts of the modules."""

OPENING = re.compile(r"(?:What|Where|How|Who|Whom|Which|Why|Whose)\b")
"""A docstring or title that begins with such a word: use a noun phrase or an imperative instead."""

MODULE_NAMES = frozenset(
    {"ahead", "books", "carrying", "dead", "encoded", "expected", "figures", "gets", "holdings", "kept", "lane", "made"}
    | {"pacing", "receiving", "running", "sends", "settling", "trial", "undecided", "unpromised", "upkeep", "waiting"}
    | {"ways", "words"}
)
"""Rejected names of modules."""


NAME_WORDS = frozenset(
    {"anew", "books", "figures", "lets", "nobody", "poke", "said", "unheard", "untold", "upkeep", "ways", "whoever"}
)
"""Rejected words of names of classes, functions and parameters."""

NAME_OPENING = re.compile(r"_*(?:what|whom|whose|who|tell|said|told|came|kept)_|_+of_")
"""Rejected starts of names of functions."""

CLASS_NAMES = frozenset(
    {
        "Answered",
        "Appended",
        "Asker",
        "Begun",
        "Books",
        "Chosen",
        "Came",
        "Durable",
        "HandedOut",
        "Kept",
        "Known",
        "Last",
    }
    | {
        "Later",
        "No",
        "Opened",
        "Orders",
        "Passed",
        "Passing",
        "Piece",
        "Planned",
        "Room",
        "Second",
        "Sendable",
        "Shape",
    }
    | {"Sendable", "Shape", "Shelf", "Show", "Slot", "Timed", "Way", "Work", "Written"}
)
"""Rejected names of classes, with or without a leading underscore."""

OPTION_WORDS = frozenset(
    {"books", "figures", "holdings", "kept", "lane", "pacing", "somebody", "told", "turned", "upkeep"}
    | {"ways", "whoever", "words"}
)
"""Rejected parts of names of options, keys and commands."""

PAGE_NAME = re.compile(r"(?:what|where|how|who|whom|which|why|whose|say|let|see)-")
"""Rejected starts of page file names."""

_CODE = REJECTED | REJECTED_IN_CODE


GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"

AREAS = {
    "State store": r"\b(?:statestore|state-store|kv)\b",
    "MQTT": r"\bmqtt\b|\b(?:bridges|rules)\b",
    "TubeMQ": r"\btube(?:mq)?(?![a-z])",
    "Pipelines and Spark": r"\b(?:pipelines?|spark)\b",
    "Durability and operations": r"",
}
"""Sections of the glossary, and patterns of the places whose names they concern."""

EXCEPTIONS = {
    "EventProto": "the Protobuf message of Apache TubeMQ",
    "PartitionQueue": "the records of a partition that are not sent yet: not a topic",
    "_BrokerQueue": "the staged rows that are not sent to a broker yet: not a topic",
}
"""Names that contain a synonym, with the reason."""


class Term(NamedTuple):
    """A row of the glossary: its section, the term, and the synonyms that are not used, as words in the singular."""

    section: str
    term: str
    synonyms: tuple[str, ...]


@cache
def glossary() -> tuple[Term, ...]:
    """Return the terms of the glossary, in the order of the page."""
    found: list[Term] = []
    section = ""
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(("| term |", "| --- |")):
            term, _, _, rejected = (cell.strip() for cell in line.strip("|").split("|"))
            found.append(Term(section, term, tuple(_singular(word) for word in rejected.split(","))))
    return tuple(found)


def _singular(name: str) -> str:
    """Return the words of a name, in lower case and in the singular, separated by spaces."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return " ".join(word.lower().removesuffix("s") if len(word) > 3 else word.lower() for word in words)


def in_name(area: str, place: str, name: str) -> Iterator[Hit]:
    """Yield synonyms of terms of the glossary in a name; ``place`` contains its file, its command or its key."""
    if name in EXCEPTIONS:
        return
    words = f" {_singular(name)} "
    for term in glossary():
        if re.search(AREAS[term.section], place):
            for synonym in term.synonyms:
                if f" {synonym} " in words:
                    yield Hit(area, f"{place}: {name}", synonym, term.term)


class Hit(NamedTuple):
    """A rejected word, its location, and the words to use instead."""

    area: str
    place: str
    word: str
    instead: str


def in_text(area: str, place: str, text: str, rejected: Mapping[str, str] = REJECTED) -> Iterator[Hit]:
    """Yield the rejected words of a text."""
    for pattern, instead in rejected.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            line = text.count("\n", 0, found.start()) + 1
            yield Hit(area, f"{place}:{line}", " ".join(found.group().split()), instead)


def pages() -> Iterator[Hit]:
    """Yield the hits in hand-written pages, without code blocks."""
    texts = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    for folder in ("benchmarks", "docs", "examples", "tests"):
        texts += [page for page in sorted((ROOT / folder).rglob("*.md")) if not {"_build", "results"} & set(page.parts)]
    for page in texts:
        text = page.read_text(encoding="utf-8")
        if GENERATED in text:
            continue
        text = re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL)
        place = str(page.relative_to(ROOT))
        yield from in_text("pages", place, text)
        for title in re.finditer(r"^#+ (.*)$", text, re.MULTILINE):
            if OPENING.match(title[1]):
                yield Hit("pages", f"{place}: {title[1]}", title[1].split()[0], "the task, in the imperative")


def names() -> Iterator[Hit]:
    """Yield the hits in file names, titles and headings of all pages, and in names of commands, options, keys and
    metrics."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if "_build" in page.parts:
            continue
        place = str(page.relative_to(ROOT))
        text = page.read_text(encoding="utf-8")
        title = re.search(r"^# (.*)$", text, re.MULTILINE)
        if PAGE_NAME.match(page.stem):
            yield Hit("names", place, page.stem, "the task or its subject")
        if title and OPENING.match(title[1]):
            yield Hit("names", place, title[1], "the task, in the imperative")
        yield from in_name("names", place, page.stem)
        for heading in re.finditer(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
            yield from in_name("names", place, heading[1])
    for place, name in user_names():
        if OPTION_WORDS & set(re.split(r"[ _-]", name)):
            yield Hit("names", place, name, "a term of the glossary")
        yield from in_name("names", place, name)


def user_names() -> Iterator[tuple[str, str]]:
    """Yield place and name of each command and its options, key of the configuration and of the pipeline file, option
    of the Spark formats, and metric, from the reference pages, which are generated from the code."""
    for reference, section, pattern in (
        ("cli.md", r"^##+ (?:Options of )?(penstock.*)$", r"^##+ penstock (.+)$|^`(?:-\w, )?--([a-z-]+)"),
        ("configuration.md", r"^## (.+)$", r"^`([a-z_]+)`$"),
        ("pipeline-file.md", r"^## (.+)$", r"^`([a-z_]+)`$"),
        ("spark-options.md", r"^## (.+)$", r"^\| `([A-Za-z.]+)` \|"),
        ("metrics.md", r"^## (.+)$", r"^\| `(penstock_[a-z_]+)` \|"),
    ):
        place = reference
        for line in (ROOT / "docs" / "reference" / reference).read_text(encoding="utf-8").splitlines():
            if heading := re.match(section, line):
                place = f"{reference.removesuffix('.md')} {heading[1]}"
            if found := re.match(pattern, line):
                name = next(group for group in found.groups() if group)
                yield f"metrics {name.replace('_', ' ')}" if reference == "metrics.md" else place, name


def code() -> Iterator[Hit]:
    """Yield the hits in docstrings, comments, other texts and names of the modules."""
    for path in sorted(SOURCE.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        if "/proto/" in place:
            continue
        if path.stem in MODULE_NAMES:
            yield Hit("modules", place, path.stem, "a noun of the field")
        yield from in_name("modules", place, path.stem if path.stem != "__init__" else path.parent.name)
        source = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
        docstrings = set(map(id, _docstrings(nodes)))
        for node in nodes:
            yield from _code_names(place, node)
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            where = f"{place}:{node.lineno}"
            if id(node) in docstrings:
                yield from (hit._replace(place=where) for hit in in_text("docstrings", place, node.value, _CODE))
                if OPENING.match(node.value):
                    yield Hit("docstrings", where, node.value.split()[0], "a noun phrase or an imperative")
            elif " " in node.value:
                yield from (hit._replace(place=where) for hit in in_text("texts", place, node.value, _CODE))
        # Tokens are the slowest part, and few modules have a rejected word in a line that may have a comment.
        if any(in_text("comments", place, "\n".join(line for line in source.splitlines() if "#" in line), _CODE)):
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                if token.type == tokenize.COMMENT:
                    where = f"{place}:{token.start[0]}"
                    yield from (hit._replace(place=where) for hit in in_text("comments", place, token.string, _CODE))


def _code_names(place: str, node: ast.AST) -> Iterator[Hit]:
    """Yield rejected names of classes, functions and their parameters."""
    if isinstance(node, ast.ClassDef):
        words = re.findall(r"[A-Z]+[a-z0-9]*|[a-z0-9]+", node.name)
        if node.name.lstrip("_") in CLASS_NAMES or NAME_WORDS & {word.lower() for word in words}:
            yield Hit("code names", f"{place}:{node.lineno}", node.name, "a noun of the field")
        yield from in_name("code names", place, node.name)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if NAME_OPENING.match(node.name) or NAME_WORDS & set(node.name.split("_")):
            yield Hit("code names", f"{place}:{node.lineno}", node.name, "a verb of the layer, or a noun of the field")
        for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if NAME_WORDS & set(parameter.arg.split("_")):
                yield Hit("code names", f"{place}:{parameter.lineno}", parameter.arg, "a noun of the field")


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Yield the string statements of modules, classes and functions, including those below an attribute."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def hits() -> list[Hit]:
    """Return every rejected word of the tree."""
    return [*pages(), *names(), *code()]


def counts(found: list[Hit]) -> dict[str, int]:
    """Return the number of hits of each area: pages, names, docstrings, comments, texts (errors, help, logs), modules,
    code."""
    return dict(sorted(Counter(hit.area for hit in found).items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every hit")
    parser.add_argument("--write", action="store_true", help="store the numbers")
    options = parser.parse_args()
    found = hits()
    if options.list:
        for hit in found:
            print(f"{hit.area:<10} {hit.place}: {hit.word!r}: {hit.instead}")
    print(json.dumps(counts(found), indent=1))
    if options.write:
        BASELINE.write_text(json.dumps(counts(found), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
