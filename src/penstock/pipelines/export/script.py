"""A pipeline as a program for PySpark: plain Structured Streaming, or a project of Spark Declarative Pipelines.

Each source and step becomes a function that returns a DataFrame, each sink a streaming query (or a dataset of the
project). Rows have the columns of the pipeline, and `_record`, a struct with the coordinates and the payload of the
source's record; after an explode step also `_part`, after a concat of branches `_path`; windows have `_id`. A step that
rejects rows has a second function with the column `_reason`, from which the dead letters are written.

A sink that cannot be exported, or that needs a step that cannot, is left out and marked with the reason. The texts of
variables (`${NAME}`) stay variables of the program, so that it contains no passwords.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.pipelines.export.code import docstring, literal_text, statement
from penstock.pipelines.export.helpers import HELPERS
from penstock.pipelines.export.program import Function, NotExportable, Program, commented
from penstock.pipelines.export.sinks import Sinks
from penstock.pipelines.export.streams import Streams
from penstock.pipelines.spec.pipeline import Pipeline, plan
from penstock.runtime.config.yaml_document import Document, Value, parse_document
from penstock.spark.environment.jars import delta_artefact

__all__ = ["Exported", "declarative_project", "raw_document", "streaming_script"]


class Exported(NamedTuple):
    """Files by name, relative to the directory of the program, and the sinks that are left out, with the reason."""

    files: dict[str, str]
    left_out: dict[str, str]


def raw_document(file: Path) -> Document:
    """Return the document of the pipeline ``file`` with its variables as they are written."""
    text = file.read_text(encoding="utf-8-sig")
    return parse_document(text.replace("${", "$${"), str(file), {}, file.parent)


def streaming_script(pipeline: Pipeline, raw: Mapping[str, Value], *, table_format: str | None = None) -> Exported:
    """Return ``pipeline`` as a program of Structured Streaming, with the Python files of its steps.

    ``raw``: the values of the file before its variables were replaced. ``table_format``: that of all tables, instead of
    their own.

    Raises:
        ConfigError: no sink can be exported.
    """
    return _Script(Program(pipeline, raw, table_format, is_declarative=False)).exported()


def declarative_project(
    pipeline: Pipeline, raw: Mapping[str, Value], *, storage: str, table_format: str | None = None
) -> Exported:
    """Return ``pipeline`` as a project of Spark Declarative Pipelines, with its checkpoints in the URI ``storage``.

    For ``raw`` and ``table_format`` see :func:`streaming_script`.

    Raises:
        ConfigError: no sink can be exported.
    """
    script = _Script(Program(pipeline, raw, table_format, is_declarative=True)).exported()
    ((name, text), *others) = script.files.items()
    assert not others, "a project has no Python steps"
    project = f"name: {pipeline.name}\nstorage: {storage}\nlibraries:\n  - glob:\n      include: transformations/**\n"
    return Exported({"spark-pipeline.yml": project, f"transformations/{name}": text}, script.left_out)


_LOST = """\
It has no lease and no ledger: a second instance is not refused, and messages are sent at least once. Writes
to the state store are fenced only if FENCING_TOKEN is set. Dead letters are rows of a table: they cannot be
redriven. Each sink is a query that reads the source for itself. If an expression fails on a row (a cast, a
division by zero), the query stops; write try_cast and try_divide where the data may be wrong."""

_DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""Settings of a session that writes Delta tables."""


class _Script:
    """Builds the program of one pipeline."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._streams = Streams(program)
        self._sinks = Sinks(program, self._streams)
        self._left_out: dict[str, str] = {}

    def exported(self) -> Exported:
        """Return the program."""
        queries: list[Function] = []
        plans = {found.sink.name: found for found in plan(self._program.pipeline)}
        for sink in self._program.pipeline.sinks:
            try:
                queries.append(self._sinks.sink(sink, plans.get(sink.name)))
            except NotExportable as error:
                self._left_out[sink.name] = str(error)
        if not queries:
            name, why = next(iter(self._left_out.items()))
            raise ConfigError(
                f"no sink of pipeline {self._program.pipeline.name!r} can be exported",
                option=f"sinks.{name}",
                why=why,
                hint="see the page on exporting pipelines for what programs can have",
            )
        if self._program.pipeline.dead_letters is not None and self._program.rejecting:
            queries.append(self._sinks.dead_letters())
        text = self._text(queries)
        name = f"{self._program.pipeline.name.replace('-', '_')}.py"
        return Exported({name: text, **self._program.python_files}, self._left_out)

    # -- text of the program --

    def _text(self, queries: Sequence[Function]) -> str:
        pipeline = self._program.pipeline
        functions = [each for found in self._streams.functions.values() for each in found]
        helpers = [HELPERS[name] for name in HELPERS if name in self._program.helpers]
        body = "\n\n".join([*helpers, *(each.source() for each in (*functions, *queries))])
        marks = [
            line
            for name, why in self._left_out.items()
            for line in commented(f"Left out: sink {name}. {why[0].upper()}{why[1:]}.")
        ]
        what = "a project of Spark Declarative Pipelines" if self._program.is_declarative else "Structured Streaming"
        about = f"Pipeline {pipeline.name} as {what}, written by `penstock pipeline export`."
        lines = [*docstring(f"{about}\n\n{self._usage()}\n\n{_LOST}"), "", "from __future__ import annotations", ""]
        lines += self._import_lines(body)
        lines += [""]
        if self._program.is_declarative:
            lines += ["spark = SparkSession.active()"]
        else:
            lines += self._session()
        for name, value in self._program.constants.items():
            lines += statement(f"{name} = {value}", 0)
        lines += [""] + (["", *marks] if marks else [])
        text = "\n".join(lines) + "\n" + ("" if marks else "\n") + body
        return text if self._program.is_declarative else text + "\n\n" + _main(queries)

    @property
    def _has_delta(self) -> bool:
        formats = [
            self._program.table_format or sink.table.format
            for sink in self._program.pipeline.sinks
            if sink.table is not None
        ]
        return "delta" in formats

    def _usage(self) -> str:
        packages = f" --packages {delta_artefact()}" if self._has_delta else ""
        if self._program.is_declarative:
            catalog = "--conf spark.sql.catalogImplementation=hive"
            return f"Run it in the directory of spark-pipeline.yml: spark-pipelines run {catalog}"
        name = self._program.pipeline.name.replace("-", "_")
        return (
            f"Run it with: spark-submit{packages} {name}.py\n"
            "With --once it processes the existing records, and ends. The environment variables TABLES and\n"
            "CHECKPOINTS name the directories of its tables and checkpoints: new ones, since a table of a pipeline\n"
            "has one writer."
        )

    def _session(self) -> list[str]:
        name = self._program.pipeline.name
        settings = {"spark.sql.session.timeZone": "UTC", **(_DELTA if self._has_delta else {})}
        chain = "".join(f".config({literal_text(key)}, {literal_text(value)})" for key, value in settings.items())
        lines = statement(f"spark = SparkSession.builder.appName({literal_text(name)}){chain}.getOrCreate()", 0)
        lines += [f'TABLES = os.environ.get("TABLES", os.path.abspath("exported/{name}"))']
        lines += ['CHECKPOINTS = os.environ.get("CHECKPOINTS", f"{TABLES}/_checkpoints")']
        trigger = literal_text(self._program.pipeline.trigger)
        lines += ['TRIGGER = {"availableNow": True} if "--once" in sys.argv else {"processingTime": ' + trigger + "}"]
        for file in self._program.python_files:
            lines += [f'spark.sparkContext.addPyFile(str(Path(__file__).with_name("{file}")))']
        return lines

    def _import_lines(self, body: str) -> list[str]:
        constants = " ".join(self._program.constants.values())
        everything = f"{body} {constants}"
        standard = set()
        if not self._program.is_declarative:
            standard |= {"import os", "import sys"}
        if "os.environ" in everything:
            standard.add("import os")
        if "Path(" in everything or self._program.python_files:
            standard.add("from pathlib import Path")
        from_abc = [name for name in ("Callable", "Iterator") if f"{name}[" in body]
        if from_abc:
            standard.add(f"from collections.abc import {', '.join(from_abc)}")
        if "Any]" in body:
            standard.add("from typing import Any")
        third = {"from pyspark.sql import functions as sf"} if "sf." in body else set()
        if "pa." in body and "with_columns_of" in self._program.helpers:
            third.add("import pyarrow as pa")
            third.add("from pyspark.sql.pandas.types import to_arrow_schema")
        if self._program.is_declarative:
            third.add("from pyspark import pipelines as dp")
        names = [name for name in ("Column", "DataFrame", "SparkSession", "Window") if re.search(rf"\b{name}\b", body)]
        names = sorted({*names, "SparkSession"})
        third.add(f"from pyspark.sql import {', '.join(names)}")
        if not self._program.is_declarative:
            third.add("from pyspark.sql.streaming.query import StreamingQuery")
        types = [name for name in ("DataType", "StructType", "TimestampType") if re.search(rf"\b{name}\b", body)]
        if types:
            third.add(f"from pyspark.sql.types import {', '.join(types)}")
        before = [*_sorted_imports(standard), ""] if standard else []
        return [*before, *_sorted_imports(third | self._program.imports)]


def _sorted_imports(lines: set[str]) -> list[str]:
    """Return import lines in the order of common formatters."""
    return sorted(lines, key=lambda line: (line.startswith("from"), line.split()[1].lower(), line))


def _main(queries: Sequence[Function]) -> str:
    """Return the main program."""
    lines = [
        "def started(query: StreamingQuery) -> StreamingQuery:",
        '    """Wait for the first batch, or with --once for the end.',
        "",
        "    Queries that start at the same time share the Python data sources of Spark, which are not thread-safe.",
        '    """',
        '    while query.isActive and ("--once" in sys.argv or query.lastProgress is None):',
        "        query.awaitTermination(1)",
        "    return query",
        "",
        "",
        "def main() -> None:",
        '    """Start a query for each sink, and wait until they end or one fails."""',
        *statement(f"queries = [{', '.join(f'started({each.name}())' for each in queries)}]"),
        '    if "--once" not in sys.argv:',
        "        spark.streams.awaitAnyTermination()",
        "    for query in queries:",
        "        query.awaitTermination()",
    ]
    return "\n".join(lines) + '\n\n\nif __name__ == "__main__":\n    main()\n'
