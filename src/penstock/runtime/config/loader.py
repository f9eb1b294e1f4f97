"""Load YAML configuration files into typed models; errors have the line and column.

All YAML files of penstock are loaded here (``penstock.yaml``, pipelines). Models are pydantic models; their errors
become one ConfigError with file, line and column, path of the option, value, accepted values, and the nearest known
name for an unknown one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from penstock.errors import ConfigError
from penstock.runtime.config.values import did_you_mean, nearest
from penstock.runtime.config.yaml_document import Document, Location, Value, parse_document, path_text, read_document
from penstock.runtime.io.network import without_secret

__all__ = ["has_secret_name", "load", "parse", "validate"]

Model = TypeVar("Model", bound=BaseModel)

SHOWN_ERRORS = 10
SHOWN_NAMES = 20
"""Known options that an error lists if none is similar to the unknown one."""
_SYNONYMS = {"listen": "bind", "listener": "bind", "port": "bind", "host": "bind", "address": "bind"}
"""Names of options in other servers, with penstock's name."""
_SECRET = re.compile(r"password|passwd|secret|credential|api_?key|admin_token|sha256", re.IGNORECASE)
"""Options whose values are never shown in errors. ``sha256`` is the digest of a token: a user may have written the
token itself by mistake."""
_PLACE = re.compile(r":(\d+):(\d+)$")

_UNITS = {
    "_ms": "milliseconds",
    "_s": "seconds",
    "_bytes": "bytes",
    "_kib": "KiB",
    "_mib": "MiB",
    "_percent": "percent",
}
"""Units of numbers, by the suffix of the option's name."""

_EXPECTED = {
    "string_type": "text (quote a value that looks like a number)",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a mapping of names to values",
    "path_type": "a path",
    "model_type": "a mapping of options",
    "model_attributes_type": "a mapping of options",
}


def load(path: Path | str, model: type[Model], *, environment: Mapping[str, str] | None = None) -> Model:
    """Read the YAML file at ``path`` into a ``model``.

    ``environment`` replaces ``${NAME}`` (default: that of the process).

    Raises:
        ConfigError: the file cannot be read or is not YAML, or an option is invalid.
    """
    return validate(read_document(Path(path), _environment(environment)), model)


def parse(text: str, model: type[Model], *, name: str, environment: Mapping[str, str] | None = None) -> Model:
    """Like :func:`load`, but of a text; ``name`` is the file name in errors."""
    return validate(parse_document(text, name, _environment(environment)), model)


def validate(
    document: Document, model: type[Model], check: Callable[[Model], ValidationError | None] | None = None
) -> Model:
    """Validate a document against ``model``, and then the model with ``check``."""
    try:
        found = model.model_validate(document.data)
        error = None if check is None else check(found)
        if error is not None:
            raise error
        return found
    except ValidationError as error:
        raise _config_error(error, document, model) from None


def _environment(environment: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environment is None else environment


def _config_error(error: ValidationError, document: Document, model: type[BaseModel]) -> ConfigError:
    schema = _Schema(model)
    found: dict[str, tuple[str, str, str | None]] = {}
    for detail in error.errors(include_url=False):
        where, option, text, hint = _explain(detail, document, schema)
        text = document.without_secrets(text)
        # Branches of a union repeat errors: each line is shown once.
        found.setdefault(f"{where}: option {option!r}: {text}" if option else f"{where}: {text}", (where, option, hint))
    # In the order of the file.
    lines = sorted(found, key=lambda line: _line_and_column(found[line][0]))
    where, option, hint = found[lines[0]]
    if len(lines) > 1:
        # With several errors, each hint is on the line of its error.
        lines = [line + (f" ({found[line][2]})" if found[line][2] else "") for line in lines]
        hint = None
    shown = lines[:SHOWN_ERRORS]
    if len(lines) > SHOWN_ERRORS:
        shown.append(f"and {len(lines) - SHOWN_ERRORS} more")
    return ConfigError("\n".join(shown), option=option, where=where, hint=hint)


def _line_and_column(where: str) -> tuple[int, ...]:
    place = _PLACE.search(where)
    return () if place is None else tuple(map(int, place.groups()))


def _explain(detail: Any, document: Document, schema: _Schema) -> tuple[str, str, str, str | None]:
    """``(where, option, error, hint or None)`` of one pydantic error."""
    kind: str = detail["type"]
    location = _in_data(detail["loc"], document.data)
    option = path_text(location)
    context: dict[str, Any] = detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = schema.names(detail["loc"][:-1])
        name = str(location[-1])
        hint = (
            _put_under(name, schema.below(detail["loc"][:-1]))
            or _similar(name.replace("-", "_"), known)
            or _put_deeper(name, path_text(location[:-1]), schema.inside_mappings(detail["loc"][:-1]))
        )
        text = "is not known"
        if hint is None:
            shown = (
                known if len(known) <= SHOWN_NAMES else [*known[:SHOWN_NAMES], f"and {len(known) - SHOWN_NAMES} more"]
            )
            text += f"; known here: {', '.join(shown)}" if known else " here"
        return document.where_key(location), option, text, hint
    if kind == "missing":
        option = path_text((*location, detail["loc"][-1]))
        return document.where(location), option, "is missing", "add it"
    got = _show(detail["input"], location)
    where = document.where(location)
    if kind in {"literal_error", "enum", "union_tag_invalid", "union_tag_not_found"}:
        accepted = str(context.get("expected") or context.get("expected_tags") or context.get("discriminator"))
        if kind == "union_tag_not_found":
            name = accepted.strip("'")
            return where, option, f"{name!r} is missing: it selects the kind", f"add `{name}: ...`"
        if kind == "union_tag_invalid":
            tag_name = str(context["discriminator"]).strip("'")
            location = (*location, tag_name)
            where, option, got = document.where(location), path_text(location), repr(context["tag"])
        choices = re.findall(r"'([^']*)'", accepted)
        return where, option, f"got {got}, expected {accepted}", did_you_mean(got.strip("'").replace("-", "_"), choices)
    if kind in {"value_error", "assertion_error"} and isinstance(context.get("error"), Exception):
        expected = str(context["error"])
        return where, option, f"got {got}, {expected}" if location else expected, None
    expected = _EXPECTED.get(kind) or str(detail["msg"])
    return where, option, f"got {got}, expected {_expected(expected)}{_unit(location)}", None


def _unit(location: Location) -> str:
    name = next((part for part in reversed(location) if isinstance(part, str)), "")
    return next((f", in {unit}" for end, unit in _UNITS.items() if name.endswith(end)), "")


def _expected(text: str) -> str:
    text = text.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    for start in ("Input should be ", "Value should be ", "Value should ", "String should ", "List should "):
        if text.startswith(start):
            return text.removeprefix(start)
    return text[:1].lower() + text[1:]


def _in_data(loc: tuple[str | int, ...], data: Value) -> Location:
    """The part of a pydantic location that exists in the file: pydantic adds the names of union branches and
    validators."""
    location: list[str | int] = []
    node = data
    for part in loc:
        inner = _inner(node, part)
        if inner is not None:
            location.append(part)
            node = inner[0]
    return tuple(location)


def _inner(node: Value, part: str | int) -> tuple[Value] | None:
    if isinstance(node, dict):
        return (node[part],) if isinstance(part, str) and part in node else None
    if isinstance(node, list):
        return (node[part],) if isinstance(part, int) and part < len(node) else None
    return None


def has_secret_name(location: Location) -> bool:
    """True if the value at ``location`` may be a secret, by the name of the option or of a section around it."""
    return any(isinstance(part, str) and _SECRET.search(part) is not None for part in location)


def _show(value: object, location: Location) -> str:
    if has_secret_name(location):
        return "a value that is not shown"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else without_secret(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _put_under(name: str, below: Mapping[str, list[str]]) -> str | None:
    """Neighbouring options that have an option ``name``."""
    wanted = name.lower().replace("-", "_")
    places = [repr(option) for option, names in below.items() if wanted in map(str.lower, names)]
    return f"put it under {' or '.join(places)}" if places else None


def _similar(name: str, known: list[str]) -> str | None:
    """A question with the most similar known name, or with penstock's name if ``name`` is used by another server."""
    synonyms = {other: ours for other, ours in _SYNONYMS.items() if ours in known}
    near = nearest(name, [*known, *synonyms])
    return None if near is None else f"did you mean {synonyms.get(near, near)!r}?"


def _put_deeper(name: str, option: str, inside: Mapping[str, list[str]]) -> str | None:
    """Neighbouring mappings of names to options, in which ``name`` is one of the options."""
    wanted = name.lower().replace("-", "_")
    places = [f"{option}.{mapping}.NAME.{wanted}" for mapping, names in inside.items() if wanted in names]
    return f"did you mean {' or '.join(places)}?" if places else None


class _QuietSchema(GenerateJsonSchema):
    """JSON Schema without warnings: only its names are used, so defaults need not be JSON."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {  # noqa: RUF012 - declared so by pydantic
        "skipped-choice",
        "non-serializable-default",
    }


class _Schema:
    """Names of the options of a model by location, from its JSON Schema, which resolves unions and aliases."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._root: dict[str, Any] = model.model_json_schema(by_alias=True, schema_generator=_QuietSchema)
        self._defs: dict[str, Any] = self._root.get("$defs", {})

    def names(self, loc: tuple[str | int, ...]) -> list[str]:
        """Options at a pydantic location, sorted; empty if any name is accepted."""
        return sorted({name for node in self._at(loc) for name in node.get("properties", ())})

    def below(self, loc: tuple[str | int, ...]) -> dict[str, list[str]]:
        """Options at ``loc``, each with its own options."""
        return {name: self.names((*loc, name)) for name in self.names(loc)}

    def inside_mappings(self, loc: tuple[str | int, ...]) -> dict[str, list[str]]:
        """Options of the entries of each mapping at ``loc``."""
        return {
            name: self.names((*loc, name, "NAME"))
            for name in self.names(loc)
            if any(isinstance(node.get("additionalProperties"), dict) for node in self._at((*loc, name)))
        }

    def _at(self, loc: tuple[str | int, ...]) -> list[dict[str, Any]]:
        nodes = list(self._unfold(self._root))
        for part in loc:
            inner = [schema for node in nodes for schema in self._children(node, part)]
            if inner:
                nodes = inner
        return nodes

    def _children(self, node: dict[str, Any], part: str | int) -> Iterator[dict[str, Any]]:
        if isinstance(part, int):
            if "items" in node:
                yield from self._unfold(node["items"])
        elif part in node.get("properties", ()):
            yield from self._unfold(node["properties"][part])
        elif isinstance(node.get("additionalProperties"), dict):
            yield from self._unfold(node["additionalProperties"])
        elif node.get("patternProperties"):
            for inner in node["patternProperties"].values():
                yield from self._unfold(inner)
        elif node.get("title") == part or part in self._tags(node):
            # A part of the location that names the branch of a union, by class or by tag.
            yield node

    def _tags(self, node: dict[str, Any]) -> set[str]:
        return {value["const"] for value in node.get("properties", {}).values() if isinstance(value.get("const"), str)}

    def _unfold(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "$ref" in node:
            yield from self._unfold(self._defs[node["$ref"].rsplit("/", 1)[-1]])
            return
        branches = [branch for how in ("anyOf", "oneOf", "allOf") for branch in node.get(how, ())]
        if not branches:
            yield node
        for branch in branches:
            yield from self._unfold(branch)
