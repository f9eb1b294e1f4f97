"""A YAML 1.2 file as plain values with their positions.

The events of the parser are read directly, for two reasons: every value keeps its line and column for later errors; and
scalars have exactly the types of YAML 1.2's core schema (no dates, no ``yes``, no base 60), which no available loader
provides.

``${NAME}`` and ``${NAME:-default}`` in a value are replaced from the environment, ``$${`` is a literal ``${``. The type
is determined after the replacement, so that ``port: ${PORT:-1883}`` is a number unless it is quoted. The replacement is
always one scalar: a variable cannot add keys or lists.

``${file:PATH}`` is the first line of a file, for secrets: always text, and never shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from penstock.errors import ConfigError

__all__ = ["Document", "Location", "Value", "parse_document", "path_text", "read_document"]

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
Location = tuple[str | int, ...]

MAX_VALUES = 100_000
"""Limit of values in a file, with aliases expanded, so that nested aliases cannot fill the memory."""
MAX_DEPTH = 64

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}]*)?\}|\$\{file:(?P<file>[^}]+)\}|\$\{"
)
_VARIABLE_FILE = "${file:"
MAX_SECRET_BYTES = 65_536
_TAGS = {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null", "map", "seq")}


@dataclass(slots=True)
class Document:
    """The values of a file and their positions.

    ``places`` maps the path of a value to ``file:line:column``, ``keys`` maps it to the position of its key.
    ``secrets`` are texts read from files, which messages must not contain.
    """

    name: str
    data: dict[str, Value]
    places: dict[Location, str] = field(default_factory=dict)
    keys: dict[Location, str] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)

    def without_secrets(self, text: str) -> str:
        """Remove secrets from a message."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def where(self, location: Location) -> str:
        """Position of the value at ``location``, or of the nearest enclosing value in the file."""
        while location and location not in self.places:
            location = location[:-1]
        return self.places.get(location, self.name)

    def where_key(self, location: Location) -> str:
        """Position of the key at ``location``, or of its value if there is no key."""
        return self.keys.get(location) or self.where(location)

    def put(self, location: tuple[str, ...], value: Value, where: str) -> None:
        """Set the value at ``location`` (keys only) and create missing mappings; later errors have the position
        ``where``."""
        node = self.data
        for depth, key in enumerate(location[:-1], start=1):
            inner = node.get(key)
            if not isinstance(inner, dict):
                inner = node[key] = {}
                self.places[location[:depth]] = self.keys[location[:depth]] = where
            node = inner
        node[location[-1]] = value
        self.places[location] = self.keys[location] = where


def read_document(path: Path, environment: Mapping[str, str]) -> Document:
    """Read and parse the file at ``path``.

    Raises:
        ConfigError: the file is unreadable, not UTF-8 or not YAML, has a duplicate key or an unset variable.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}", where=str(path), hint="check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8", where=str(path), hint="save the file as UTF-8"
        ) from error
    return parse_document(text, str(path), environment, path.parent)


def parse_document(text: str, name: str, environment: Mapping[str, str], directory: Path = Path()) -> Document:
    """Parse ``text``; ``name`` is the file name in errors. An empty text is an empty mapping.

    Paths of ``${file:PATH}`` are relative to ``directory``.
    """
    document = Document(name, {})
    try:
        # Event by event, so that the limits below also stop the parser, whose time is quadratic in the depth.
        root = _Builder(document, iter(YAML(typ="safe", pure=True).parse(text)), environment, directory).document()
    except MarkedYAMLError as error:
        raise _syntax_error(name, error, text) from error
    except (YAMLError, RecursionError) as error:
        raise ConfigError(
            f"{name}: is not YAML: {str(error).strip().splitlines()[0] if str(error) else 'nested too deeply'}",
            where=name,
            hint="write it as a plain text file of `option: value` lines",
        ) from error
    if root is None:
        root = {}
    if not isinstance(root, dict):
        place = document.places.get((), name)
        raise ConfigError(
            f"{place}: the file is {_kind(root)}, expected options",
            where=place,
            hint="write one `option: value` a line",
        )
    document.data = root
    return document


class _Builder:
    """Converts the events of a document to values. The recursion is limited by ``MAX_DEPTH``."""

    def __init__(
        self, document: Document, events: Iterator[Any], environment: Mapping[str, str], directory: Path
    ) -> None:
        self.out = document
        self.directory = directory
        self.events = events
        self.environment = environment
        self.anchors: dict[str, Value] = {}
        self.open_anchors: set[str] = set()
        self.count = 0

    def document(self) -> Value:
        """Value of the document; None for an empty file."""
        root: Value = None
        seen = False
        for event in self.events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent" and seen:
                place = self._place(event)
                raise ConfigError(
                    f"{place}: a second document begins here", where=place, hint="remove the `---`, or use two files"
                )
            if kind in {"StreamStartEvent", "DocumentStartEvent", "DocumentEndEvent", "StreamEndEvent"}:
                continue
            root = self.value(event, ())
            seen = True
        return root

    def value(self, event: Any, at: Location) -> Value:
        """Value that begins with ``event``, at the path ``at``; consumes its events."""
        place = self._place(event)
        self.count += 1
        if self.count > MAX_VALUES or len(at) > MAX_DEPTH:
            raise ConfigError(f"{place}: more than {MAX_VALUES} values or {MAX_DEPTH} levels", where=place)
        self.out.places[at] = place
        kind = type(event).__name__
        if kind == "AliasEvent":
            return self._alias(event, at)
        anchor: str | None = event.anchor
        if anchor:
            self.open_anchors.add(anchor)
        if kind == "ScalarEvent":
            result = self._scalar(event, at)
        elif kind == "SequenceStartEvent":
            self._check_tag(event, "seq", at)
            result = self._sequence(at)
        else:
            self._check_tag(event, "map", at)
            result = self._mapping(at)
        if anchor:
            self.open_anchors.discard(anchor)
            self.anchors[anchor] = result
        return result

    def _sequence(self, at: Location) -> list[Value]:
        result: list[Value] = []
        for event in self.events:
            if type(event).__name__ == "SequenceEndEvent":
                break
            result.append(self.value(event, (*at, len(result))))
        return result

    def _mapping(self, at: Location) -> dict[str, Value]:
        result: dict[str, Value] = {}
        for event in self.events:
            kind = type(event).__name__
            if kind == "MappingEndEvent":
                break
            place = self._place(event)
            if kind != "ScalarEvent":
                raise ConfigError(f"{place}: an option's name must be plain text", where=place)
            key: str = event.value
            here = (*at, key)
            if key in result:
                raise ConfigError(
                    f"{place}: option {path_text(here)!r} is given twice (first at {self.out.keys[here]})",
                    option=path_text(here),
                    where=place,
                    hint="remove one of the two",
                )
            self.out.keys[here] = place
            result[key] = self.value(next(self.events), here)
        return result

    def _alias(self, event: Any, at: Location) -> Value:
        name: str = event.anchor
        place = self._place(event)
        if name in self.open_anchors:
            raise ConfigError(f"{place}: *{name} refers to a value that contains it", where=place)
        if name not in self.anchors:
            raise ConfigError(
                f"{place}: *{name} refers to nothing", where=place, hint=f"write &{name} before the value it repeats"
            )
        return self._copy(self.anchors[name], at, place)

    def _copy(self, value: Value, at: Location, place: str) -> Value:
        """Copy an anchored value, with the positions of the alias."""
        self.count += 1
        if self.count > MAX_VALUES or len(at) > MAX_DEPTH:
            raise ConfigError(f"{place}: aliases unfold to more than {MAX_VALUES} values", where=place)
        self.out.places[at] = place
        if isinstance(value, dict):
            return {key: self._copy(inner, (*at, key), place) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._copy(inner, (*at, index), place) for index, inner in enumerate(value)]
        return value

    def _scalar(self, event: Any, at: Location) -> Value:
        text = self._substitute(event.value, self._place(event), at)
        tag = self._check_tag(event, "scalar", at)
        if tag is None:
            is_text = event.style is not None or _VARIABLE_FILE in event.value
            return text if is_text else _plain(text)
        if tag == "str":
            return text
        value = _plain(text)
        if tag == "float" and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        fits = {"int": int, "float": float, "bool": bool, "null": type(None)}[tag]
        if type(value) is not fits:
            place = self._place(event)
            shown = self.out.without_secrets(repr(text))
            raise ConfigError(f"{place}: {shown} is not of the type !!{tag} written before it", where=place)
        return value

    def _check_tag(self, event: Any, kind: str, at: Location) -> str | None:
        if event.tag is None or event.tag == "!":
            return None
        name = _TAGS.get(str(event.tag))
        fits = name == kind if kind in {"seq", "map"} else name not in {None, "seq", "map"}
        if not fits:
            place = self._place(event)
            raise ConfigError(
                f"{place}: option {path_text(at)!r}: the type !{str(event.tag).lstrip('!')} is not known here",
                option=path_text(at),
                where=place,
                hint="remove it: penstock knows the type of its options",
            )
        return name

    def _substitute(self, text: str, place: str, at: Location) -> str:
        if "${" not in text:
            return text

        def replace(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name, default = match["name"], match["default"]
            if match["file"] is not None:
                return self._secret(match["file"], place, at)
            if name is None:
                raise ConfigError(
                    f"{place}: option {path_text(at)!r}: '${{' begins no ${{NAME}} or ${{NAME:-default}}",
                    option=path_text(at),
                    where=place,
                    hint="write $${ where a literal ${ is meant",
                )
            # As in a shell, `:-` applies to an empty variable as well.
            value = self.environment.get(name)
            if value is None and default is None:
                raise ConfigError(
                    f"{place}: option {path_text(at)!r}: the environment variable {name} is not set",
                    option=path_text(at),
                    where=place,
                    hint=f"set {name}, or give a default: ${{{name}:-value}}",
                )
            return value or (default[2:] if default else "")

        return _VARIABLE.sub(replace, text)

    def _secret(self, name: str, place: str, at: Location) -> str:
        """First line of the file ``name``."""
        why: str | None = None
        try:
            with (self.directory / name).open("rb") as file:
                content = file.read(MAX_SECRET_BYTES + 1)
            if len(content) > MAX_SECRET_BYTES:
                why = f"it has more than {MAX_SECRET_BYTES} bytes"
            else:
                text = content.partition(b"\n")[0].removesuffix(b"\r").decode()
                if not text:
                    why = "its first line is empty"
        except OSError as error:
            why = error.strerror
        except UnicodeDecodeError:
            why = "it is not UTF-8"
        if why is not None:
            raise ConfigError(
                f"{place}: option {path_text(at)!r}: the file {str(self.directory / name)!r} cannot be used: {why}",
                option=path_text(at),
                where=place,
                hint="write the secret to its first line; a relative path is relative to this file",
            )
        self.out.secrets.add(text)
        return text

    def _place(self, event: Any) -> str:
        mark = event.start_mark
        return f"{self.out.name}:{mark.line + 1}:{mark.column + 1}"


def path_text(location: Location) -> str:
    """Name of an option in messages: ``rules[0].filter``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _plain(text: str) -> Value:
    """Value of an unquoted scalar by the core schema of YAML 1.2."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        # Very long numbers stay text: int() takes quadratic time, and Python rejects them.
        return int(text, 0 if text[:2] in {"0o", "0x"} else 10) if len(text) < 100 else text
    if _FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1) if text.lstrip("+-").lower() in {".inf", ".nan"} else text)
    return text


def _kind(value: Value) -> str:
    return "a list" if isinstance(value, list) else f"the single value {value!r}"


def _syntax_error(name: str, error: MarkedYAMLError, text: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
    problem = str(error.problem or error.context or "it is not YAML")
    hint = "check the indentation and the quotes of this line and the one before"
    if "'\\t'" in problem:
        hint = "indent with blanks: YAML does not permit tabs there"
    elif "mapping values are not allowed" in problem:
        hint = "give neighbouring options the same indentation, and quote a value that has ': ' in it"
    elif "flow" in str(error.context) and mark is not None and mark.index >= len(text.rstrip()):
        hint = "close the bracket, or the brace, that is still open at the end of the file"
    elif "flow" in str(error.context) and mark is not None and "${" in text.splitlines()[mark.line]:
        hint = 'quote ${...} inside [ ] and { }: "${NAME}"'
    context = str(error.context) if error.context and error.context_mark is not None else ""
    why = f"{context}, begun at line {error.context_mark.line + 1}" if context else None
    return ConfigError(f"{place}: {problem}", where=place, why=why, hint=hint)
