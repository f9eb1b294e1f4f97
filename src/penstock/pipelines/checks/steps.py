"""What the schemas and statements of single steps may say, read without Spark."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator

from penstock.pipelines.checks import ddl
from penstock.pipelines.checks.problem import Problem
from penstock.pipelines.model import Enrich, Parse, Pipeline, Step
from penstock.pipelines.model.plan import reads_of

__all__ = ["RESERVED", "read_in", "step_texts"]

RESERVED = "_"
"""Names that start with it belong to the pipeline."""
_SELECT = re.compile(r"\s*select\b(?!\s+distinct\b)", re.IGNORECASE)
_SQL = re.compile(
    r"(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<note>--[^\n]*|/\*.*?\*/)|(?P<name>`(?:[^`]|``)*`)"
    r"|(?P<word>\w+)|(?P<mark>[^\s\w])",
    re.DOTALL,
)


def step_texts(pipeline: Pipeline) -> Iterator[Problem]:
    """What is wrong with schemas, statements and names of columns."""
    for index, step in enumerate(pipeline.steps):
        where = ("steps", index, step.kind)
        if step.parse is not None:
            yield from _parse(step.parse, where)
        elif step.enrich is not None:
            yield from _schema(step.enrich, step.enrich.columns, where)
        elif step.sql is not None:
            yield from _statement(pipeline, index, step.sql)
        for name in _made_by(step):
            if name.startswith(RESERVED):
                yield Problem(where, name, "expected names of columns that do not start with '_'")


def read_in(statement: str) -> str | None:
    """The step that a statement reads: what follows the last FROM that stands outside parentheses; None: no such."""
    depth = 0
    found: str | None = None
    before = ["", ""]
    for match in _SQL.finditer(statement):
        kind, text = match.lastgroup, match[0]
        if kind == "note":
            continue
        depth += {"(": 1, ")": -1}.get(text, 0)
        # `a IS DISTINCT FROM b` compares.
        if depth == 0 and before[1].upper() == "FROM" and before[0].upper() != "DISTINCT" and kind in ("name", "word"):
            found = text[1:-1].replace("``", "`") if kind == "name" else text
        before = [before[1], text if kind == "word" else ""]
    return found


def _statement(pipeline: Pipeline, index: int, statement: str) -> Iterator[Problem]:
    where = ("steps", index, "sql")
    (reads,) = reads_of(pipeline, index)
    if not _SELECT.match(statement):
        yield Problem(where, statement, _expected(reads))
        return
    named = read_in(statement)
    # Spark compares names without case.
    if named is None or named.lower() != reads.lower():
        found = "no FROM" if named is None else f"FROM {named}"
        yield Problem(where, statement, f"{_expected(reads)}, the step that it reads; it has {found}")


def _expected(reads: str) -> str:
    return f"expected SELECT <expressions> FROM {reads}"  # noqa: S608 - words of an error


def _parse(parse: Parse, where: tuple[str | int, ...]) -> Iterator[Problem]:
    found = yield from _schema(parse, parse.ddl, where)
    if found is None:
        return
    field, value = _where_from(parse)
    if parse.format == "raw" and (len(found) != 1 or found[0].type not in ("STRING", "BINARY")):
        yield Problem((*where, field), value, "expected one column, STRING or BINARY, with `format: raw`")
    nested = [column.name for column in found if "<" in column.type or column.type in ("BINARY", "VARIANT")]
    if parse.format == "csv" and nested:
        yield Problem((*where, field), value, f"expected simple columns with `format: csv`; {nested[0]!r} is not")


def _schema(
    part: Parse | Enrich, text: str, where: tuple[str | int, ...]
) -> Generator[Problem, None, list[ddl.Column] | None]:
    """The columns, or None where they cannot be read."""
    field, value = _where_from(part)
    try:
        found = ddl.columns(text)
    except ValueError as error:
        yield Problem((*where, field), value, str(error))
        return None
    for column in found:
        if column.name.startswith(RESERVED):
            yield Problem(
                (*where, field), value, f"expected names of columns that do not start with '_', as {column.name}"
            )
    return found


def _where_from(part: Parse | Enrich) -> tuple[str, str]:
    """The option that holds the schema, and what stands there."""
    if isinstance(part, Parse) and part.schema_file is not None:
        return "schema_file", part.schema_file
    return "schema", part.columns or ""


def _made_by(step: Step) -> list[str]:
    if step.enrich is not None:
        return [step.enrich.into]
    if step.map is not None:
        return [*step.map.rename.values(), *step.map.compute]
    return list(step.window.aggregates) if step.window is not None else []
