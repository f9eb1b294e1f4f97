"""Filters of stored records: by key, attribute or header, a path in a JSON value, and text.

A filter is four texts, each optional; a record passes if it passes all of them.

    key         plant/a       the key; plant/* for a prefix
    attribute   unit=bar      a header with this value, unit=b* for a prefix, unit for any value; so are
                              topic, id, msg_type and content_type, the attributes of a record
    json        temp.c > 21   a path in the value, and = != < <= > >= or ~ (contains) with a JSON value or a word;
                              without an operator: the path exists. items[0].name, a["b c"]
    text        pump          in the key, a header or the value, in any case
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.errors import LocalProtocolError
from penstock.tube.record import Record

__all__ = ["MAX_JSON_BYTES", "NO_FILTER", "RecordFilter", "parsed_json"]

MAX_JSON_BYTES: Final = 256 << 10
"""Longest value that is parsed as JSON: the parser stops the event loop for about a millisecond per 100 KiB."""
MAX_FILTER: Final = 1000
"""Longest text of a filter."""

_CONDITION: Final = re.compile(r"\s*(?P<path>(?:\[\"(?:[^\"\\]|\\.)*\"\]|\[[0-9]+\]|[^=!<>~\s\[\]])+)\s*"
                               r"(?:(?P<operator>!=|<=|>=|=|<|>|~)\s*(?P<value>.*?)\s*)?", re.DOTALL)  # fmt: skip
_STEP: Final = re.compile(r'\.?(?P<name>[^.\[\]=!<>~\s]+)|\[(?P<index>[0-9]{1,9})\]|\["(?P<quoted>(?:[^"\\]|\\.)*)"\]')
_ATTRIBUTES: Final = ("topic", "id", "msg_type", "content_type")
_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class _Condition:
    """A path in a JSON value, and a comparison; ``operator`` "": the path exists."""

    path: tuple[str | int, ...]
    operator: str
    value: object
    word: str
    """The value as it was written."""

    def holds(self, found: object) -> bool:
        for step in self.path:
            if isinstance(found, dict):
                found = found.get(str(step), _MISSING)
            elif isinstance(found, list) and isinstance(step, int) and step < len(found):
                found = found[step]
            else:
                return False
        if found is _MISSING:
            return False
        if not self.operator:
            return True
        if self.operator == "~":
            return self.word.casefold() in (found if isinstance(found, str) else json.dumps(found)).casefold()
        if self.operator in {"=", "!="}:
            same = found == self.word if isinstance(found, str) and self.value != found else _equal(found, self.value)
            return same == (self.operator == "=")
        wanted = self.word if isinstance(found, str) and not isinstance(self.value, str) else self.value
        return _is_ordered(found, wanted) and _ORDERS[self.operator](found, wanted)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """A filter of records; without arguments all records pass. Raises LocalProtocolError if a text is not valid."""

    key: str = ""
    attribute: str = ""
    json: str = ""
    text: str = ""
    _condition: _Condition | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Parse the path."""
        for name in ("key", "attribute", "json", "text"):
            if len(getattr(self, name)) > MAX_FILTER:
                raise LocalProtocolError(f"{name}: longer than {MAX_FILTER} characters", hint="use a shorter filter")
        object.__setattr__(self, "_condition", _condition(self.json) if self.json.strip() else None)

    @property
    def needs_json(self) -> bool:
        """True if a value must be JSON to pass."""
        return self._condition is not None

    @property
    def without_value(self) -> RecordFilter:
        """The part of the filter that does not look at the value."""
        return RecordFilter(self.key, self.attribute) if self.json or self.text else self

    def passes(self, record: Record | None) -> bool:
        """Return whether ``record`` passes; None, an undecodable one, if there is no filter.

        A value longer than :data:`MAX_JSON_BYTES` does not pass a JSON path.
        """
        if record is None:
            return not (self.key or self.attribute or self.text or self._condition)
        if self.key and not (record.key is not None and _fits(self.key, record.key)):
            return False
        if self.attribute and not _has(record, self.attribute):
            return False
        if self.text and not _contains(record, self.text.casefold()):
            return False
        if self._condition is None:
            return True
        found = parsed_json(record.value)
        return found is not None and self._condition.holds(found[0])


NO_FILTER: Final = RecordFilter()


def parsed_json(value: bytes) -> tuple[object] | None:
    """Return the parsed JSON value, as a tuple; None if it is not JSON or longer than :data:`MAX_JSON_BYTES`."""
    if not value or len(value) > MAX_JSON_BYTES:
        return None
    try:
        return (json.loads(value),)
    except (ValueError, RecursionError):
        return None


def _condition(text: str) -> _Condition:
    found = _CONDITION.fullmatch(text)
    path: list[str | int] = []
    if found is not None:
        names = found["path"].removeprefix("$")
        at = 0
        while at < len(names) and (step := _STEP.match(names, at)) is not None:
            at = step.end()
            if step["quoted"] is not None:
                path.append(str(json.loads(f'"{step["quoted"]}"')))
            else:
                path.append(int(step["index"]) if step["index"] else step["name"])
        if at == len(names) and (path or found["path"] == "$"):
            word = found["value"] or ""
            return _Condition(tuple(path), found["operator"] or "", _value(word), _unquoted(word))
    raise LocalProtocolError(
        f"{text[:80]!r} is not a path in JSON with a comparison",
        hint='write for example temperature.value > 21.5, items[0].id = "a", or error',
    )


def _value(word: str) -> object:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _unquoted(word: str) -> str:
    value = _value(word)
    return value if isinstance(value, str) else word


def _equal(found: object, value: object) -> bool:
    return found == value and isinstance(found, bool) == isinstance(value, bool)


def _is_ordered(found: object, value: object) -> bool:
    """Whether both are numbers or both texts."""
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (found, value))
    return numbers or (isinstance(found, str) and isinstance(value, str))


def _fits(pattern: str, data: bytes) -> bool:
    """Compare with a text, or a prefix before ``*``."""
    if pattern.endswith("*"):
        return data.startswith(pattern[:-1].encode("utf-8", "surrogatepass"))
    return data == pattern.encode("utf-8", "surrogatepass")


def _has(record: Record, wanted: str) -> bool:
    name, equals, pattern = wanted.partition("=")
    name = name.strip()
    values = [value for header, value in record.headers if header == name]
    if name in _ATTRIBUTES and (own := getattr(record, name)) is not None:
        values.append(own)
    return any(not equals or _fits(pattern.strip(), _bytes(value)) for value in values)


def _contains(record: Record, text: str) -> bool:
    parts = [record.value, record.key or b"", *(_bytes(part) for header in record.headers for part in header)]
    parts += [value.encode() for name in _ATTRIBUTES if (value := getattr(record, name)) is not None]
    if text.isascii():
        return any(text.encode() in part.lower() for part in parts)
    return any(text in part.decode("utf-8", "replace").casefold() for part in parts)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
