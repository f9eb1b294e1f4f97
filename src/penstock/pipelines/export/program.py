"""State of a program that is generated: its functions, constants and imports, and texts of the pipeline in Python."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.pipelines.export.code import docstring, literal_text, statement
from penstock.pipelines.spec.columns import RESERVED, stream_columns
from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.sources import (
    TubeOptions,
)
from penstock.pipelines.spec.values import Part, quoted_name, template_parts
from penstock.runtime.config.yaml_document import Value

__all__ = [
    "COORDINATES",
    "Function",
    "NotExportable",
    "Program",
    "commented",
    "identifier",
    "joined",
    "refuse_other_options",
]

_ANALYSING = ("data_columns", "text_of", "flattened")
"""Helpers that ask Spark for the schema of rows, which functions of declarative projects must not do."""
COORDINATES = ("topic", "broker", "partition", "offset", "timestamp")
"""Coordinates of a record of TubeMQ, which tables store as well."""


class NotExportable(Exception):
    """The reason for which a step or a sink cannot be exported."""


def refuse_other_options(what: str, part: Part, known: Collection[str]) -> None:
    """Refuse options of ``part`` that are set and not ``known``, so that no option is left out silently.

    Raises:
        NotExportable: there is such an option.
    """
    for name, option in type(part).model_fields.items():
        if name not in known and getattr(part, name) != option.get_default(call_default_factory=True):
            raise NotExportable(f"{what} has the option {option.alias or name}, which programs cannot have")


@dataclass
class Function:
    """A function of the program: decorators, the line of its definition, and the lines of its body."""

    name: str
    text: str
    lines: list[str] = field(default_factory=list)
    decorators: list[str] = field(default_factory=list)
    result: str = "DataFrame"

    def add(self, *statements: str) -> None:
        """Add statements, each as one text."""
        for each in statements:
            self.lines += statement(each)

    def source(self) -> str:
        """Return the text of the function."""
        head = [*self.decorators, f"def {self.name}() -> {self.result}:", *docstring(self.text, 4)]
        return "\n".join([*head, *self.lines]) + "\n"


class Program:
    """The program of ``pipeline``; ``raw``: the values of its file before variables were replaced."""

    def __init__(
        self, pipeline: Pipeline, raw: Mapping[str, Value], table_format: str | None, *, is_declarative: bool
    ) -> None:
        self.pipeline = pipeline
        self.raw = raw
        self.table_format = table_format
        self.is_declarative = is_declarative
        self.rejecting: dict[str, str] = {}
        """Names of the functions with a column `_reason`, by step."""
        self.helpers: set[str] = set()
        self.imports: set[str] = set()
        self.python_files: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        self._columns = stream_columns(pipeline)
        self._names: dict[str, str] = {}

    def function(self, prefix: str, name: str, text: str) -> Function:
        """Return a new function; its name is unique, and no word of Python."""
        made = f"{prefix}_{name}".replace("-", "_")
        owner = f"{prefix}:{name}"
        while self._names.setdefault(made, owner) != owner:
            made += "_"
        return Function(made, text)

    def given(self, place: Sequence[str | int], value: str) -> str:
        """Return Python for the text ``value`` at ``place`` of the file, with its variables."""
        found: Value = dict(self.raw)
        for key in place:
            if isinstance(found, dict) and isinstance(key, str):
                found = found.get(key)
            elif isinstance(found, list) and isinstance(key, int):
                found = found[key]
            else:
                return literal_text(value)
        return _with_variables(found) if isinstance(found, str) and "${" in found else literal_text(value)

    def sink_place(self, sink: Sink) -> tuple[str | int, ...]:
        """Return the place of ``sink`` in the file, for :meth:`given`."""
        return ("sinks", next(n for n, each in enumerate(self.pipeline.sinks) if each.name == sink.name))

    def broker(self) -> str:
        """Return the name of the constant with the state store's broker."""
        if self.pipeline.statestore.password_file is not None:
            raise NotExportable("it needs the password in `statestore.password_file`; with a URL in a variable it can")
        store = self.raw.get("statestore")
        given = isinstance(store, dict) and "broker" in store
        value = self.given(("statestore", "broker"), self.pipeline.statestore.broker)
        self.constants["BROKER"] = value if given else 'os.environ.get("PENSTOCK_BROKER", "mqtt://127.0.0.1:1883")'
        return "BROKER"

    def helper(self, name: str) -> str:
        """Define the helper ``name`` (:mod:`penstock.pipelines.export.helpers`) in the program, and return its name.

        Raises:
            NotExportable: it looks at the columns of its rows, which a declarative project cannot do.
        """
        if self.is_declarative and name in _ANALYSING:
            raise NotExportable("it needs the columns of its rows or their types, which a project cannot look up")
        self.helpers.add(name)
        if name == "state_store_keys":
            self.broker()
        return name

    def column(self, stream: str, name: str) -> str:
        """Return Python for the text with which Spark finds the column ``name`` of ``stream``, or a field of a struct.

        Raises:
            NotExportable: only Spark knows which of both it is.
        """
        if "." not in name or name.startswith(RESERVED):
            return literal_text(name)
        columns = self._columns[stream]
        if columns is None:
            raise NotExportable(
                f"only Spark knows if {name!r} in {stream} is a column or a field of a struct; give it a name without "
                "dots in the sql step before"
            )
        is_column = name.lower() in (column.name.lower() for column in columns)
        return literal_text(quoted_name(name) if is_column else name)

    def template(self, stream: str, template: str) -> str:
        """Return Python for a column: a key or a topic with the values of columns of ``rows``, those of ``stream``."""
        parts = []
        for text, is_column in template_parts(template):
            if is_column:
                self.helper("text_of")
                parts.append(f"text_of(rows, {self.column(stream, text)})")
            else:
                parts.append(f"sf.lit({literal_text(text)})")
        return parts[0] if len(parts) == 1 else f"sf.concat({', '.join(parts)})"

    def json_of(self, stream: str, columns: Sequence[str] | None) -> str:
        """Return Python for a column: ``columns`` of ``stream``, by default the data columns, as a JSON object."""
        self.helper("json_text")
        if columns:
            return f"json_text({', '.join(self.column(stream, name) for name in columns)})"
        self.helper("data_columns")
        return "json_text(*data_columns(rows))"

    def at(self, place: Sequence[str]) -> Value:
        """Return the value at ``place`` of the file before variables were replaced; None if it does not exist."""
        found: Value = dict(self.raw)
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def has_coordinates(self, plan_: SinkPlan | None) -> bool:
        """Return True if the records of a sink have the coordinates of TubeMQ."""
        inputs = () if plan_ is None else plan_.inputs
        return all(isinstance(self.pipeline.inputs[name], TubeOptions) for name in inputs)


_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{file:(?P<file>[^}]+)\}"
)


def _with_variables(text: str) -> str:
    """Return Python for ``text``, whose variables are read when the program starts."""
    pieces: list[str] = []
    place = 0
    for match in _VARIABLE.finditer(text):
        if match.start() > place:
            pieces.append(literal_text(text[place : match.start()]))
        place = match.end()
        if match["file"] is not None:
            pieces.append(f"Path({literal_text(match['file'])}).read_text().splitlines()[0]")
        elif match["name"] is None:
            pieces.append(literal_text("${"))
        elif match["default"] is None:
            pieces.append(f"os.environ[{literal_text(match['name'])}]")
        else:
            pieces.append(f"os.environ.get({literal_text(match['name'])}, {literal_text(match['default'])})")
    if place < len(text):
        pieces.append(literal_text(text[place:]))
    return " + ".join(pieces)


def joined(text: str) -> str:
    """Return SQL on one line, if this cannot change it."""
    return text if re.search(r"['\"`]|--|/\*", text) and "\n" in text.strip() else " ".join(text.split("\n")).strip()


def identifier(name: str) -> str:
    """Return ``name`` as a name in Python."""
    return name.replace("-", "_")


def commented(text: str) -> list[str]:
    """Return the lines of a comment with ``text``."""
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")
