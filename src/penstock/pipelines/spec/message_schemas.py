"""Message schemas as columns: JSON Schema, as schema registries have it, and Delta 1.0 (a struct of Spark in JSON) of
Azure IoT Operations.

Constraints of values (patterns, limits, lists of values) are not checked. Properties that the schema does not name are
new fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.pipelines.spec.values import quoted_name

__all__ = ["is_message_schema", "message_schema_ddl"]

_DELTA = "Delta/1.0"
_JSON_SCHEMA = re.compile(r"https?://json-schema\.org/(?:draft-0[467]|draft/2019-09|draft/2020-12)/schema#?")
_STRINGS = {"date-time": "TIMESTAMP", "date": "DATE"}
_JSON_TYPES = {"integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}
_DELTA_TYPES = {
    "string": "STRING",
    "long": "BIGINT",
    "integer": "INT",
    "short": "SMALLINT",
    "byte": "TINYINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "binary": "BINARY",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "timestamp_ntz": "TIMESTAMP_NTZ",
}
_DECIMAL = re.compile(r"decimal\(\s*[0-9]+\s*,\s*[0-9]+\s*\)")


def is_message_schema(text: str) -> bool:
    """Return True for JSON, which no list of columns begins as."""
    return text.lstrip().startswith("{")


def message_schema_ddl(text: str) -> str:
    """Return the columns of the message schema ``text`` as DDL.

    Raises:
        ValueError: it is no message schema, or one that no columns can hold; the text begins with "expected".
    """
    try:
        given = json.loads(text)
        kind = given.get("$schema")
        if kind == _DELTA:
            properties = given.get("properties")
            fields = _fields(properties, "properties") if isinstance(properties, dict) else []
        elif kind is None or (isinstance(kind, str) and _JSON_SCHEMA.fullmatch(kind)):
            fields = _JsonSchema(given).columns()
        else:
            raise ValueError(
                f"expected a message schema with `$schema`: {_DELTA} or http://json-schema.org/draft-07/schema# (also "
                f"draft 4, 6, 2019-09, 2020-12), not {_shown(kind)}"
            )
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a message schema in JSON: {error}") from None
    except RecursionError:
        raise ValueError("expected a message schema that is not nested so deeply") from None
    if not fields:
        raise ValueError("expected a message schema with properties")
    return ", ".join(
        f"{quoted_name(name)} {type_}{'' if nullable else ' NOT NULL'}" for name, type_, nullable in fields
    )


_Field = tuple[str, str, bool]
"""Name, type in DDL, and whether it may be null."""


def _struct(fields: Sequence[_Field], where: str) -> str:
    if not fields:
        raise ValueError(f"expected fields of {where} in the message schema")
    return f"STRUCT<{', '.join(f'{quoted_name(name)}: {type_}' for name, type_, _ in fields)}>"


def _is_null(given: object) -> bool:
    return isinstance(given, dict) and given.get("type") == "null"


def _shown(value: object) -> str:
    return json.dumps(value)[:60]


class _JsonSchema:
    """Columns of a JSON Schema. Definitions are found by local references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._open: list[str] = []
        """References that are being resolved."""

    def columns(self) -> list[_Field]:
        """Return the properties of the object."""
        if self._root.get("type") != "object":
            raise ValueError(f"expected `type`: object of the message schema, not {_shown(self._root.get('type'))}")
        return self._properties(self._root, "the message")

    def _properties(self, given: Mapping[str, Any], where: str) -> list[_Field]:
        properties, required = given.get("properties", {}), given.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError(f"expected an object of properties, and a list of required ones, of {where}")
        fields = []
        for name, each in properties.items():
            type_, nullable = self._type(each, f"property {name!r}")
            fields.append((name, type_, nullable or name not in required))
        return fields

    def _type(self, given: Any, where: str) -> tuple[str, bool]:
        """Return the type of a schema, and whether it permits null."""
        if not isinstance(given, dict):
            raise ValueError(f"expected a schema of {where}, not {_shown(given)}")
        if "$ref" in given:
            return self._referenced(given["$ref"], where)
        for key in ("anyOf", "oneOf"):
            if key in given:
                return self._one_of(given[key], where)
        kinds = given.get("type")
        named = kinds if isinstance(kinds, list) else [kinds]
        values = [each for each in named if each != "null"]
        if len(values) != 1 or not isinstance(values[0], str):
            raise ValueError(f"expected one type other than null of {where}, not {_shown(kinds)}")
        return self._value_type(values[0], given, where), len(values) < len(named)

    def _referenced(self, name: Any, where: str) -> tuple[str, bool]:
        if not isinstance(name, str) or not name.startswith("#/"):
            raise ValueError(f"expected a reference within the message schema in {where}, not {_shown(name)}")
        if name in self._open:
            raise ValueError(f"expected no recursive schema: {name!r} contains itself in {where}")
        found: Any = self._root
        for part in name[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if found is None:
            raise ValueError(f"expected a reference within the message schema in {where}: {name!r} does not exist")
        self._open.append(name)
        made = self._type(found, where)
        self._open.pop()
        return made

    def _one_of(self, given: Any, where: str) -> tuple[str, bool]:
        # Some serializers give the schema of null a title.
        others = [each for each in given if not _is_null(each)] if isinstance(given, list) else []
        if len(others) != 1:
            raise ValueError(f"expected one type other than null of {where}: a column has one")
        type_, nullable = self._type(others[0], where)
        return type_, nullable or len(others) < len(given)

    def _value_type(self, kind: str, given: Mapping[str, Any], where: str) -> str:
        if kind == "string":
            if given.get("contentEncoding") == "base64":
                return "BINARY"
            return _STRINGS.get(str(given.get("format")), "STRING")
        if kind == "array":
            return f"ARRAY<{self._type(given.get('items'), f'the items of {where}')[0]}>"
        if kind == "object":
            if "properties" not in given:
                others = given.get("additionalProperties", True)
                values = "STRING" if isinstance(others, bool) else self._type(others, f"the values of {where}")[0]
                return f"MAP<STRING, {values}>"
            return _struct(self._properties(given, where), where)
        if kind not in _JSON_TYPES:
            raise ValueError(f"expected a type of {where}, not {_shown(kind)}")
        return _JSON_TYPES[kind]


def _fields(given: Mapping[str, Any], where: str) -> list[_Field]:
    """Return the fields of a struct of Spark in JSON."""
    fields = given.get("fields")
    if given.get("type") != "struct" or not isinstance(fields, list):
        raise ValueError(f"expected `type`: struct, and fields, of {where} of the message schema")
    made = []
    for each in fields:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            raise ValueError(f"expected fields with a name in {where} of the message schema")
        name = each["name"]
        made.append((name, _delta_type(each.get("type"), f"field {name!r}"), each.get("nullable", True) is not False))
    return made


def _delta_type(given: Any, where: str) -> str:
    if isinstance(given, str):
        if given in _DELTA_TYPES or _DECIMAL.fullmatch(given):
            return _DELTA_TYPES.get(given) or given.upper()
    elif isinstance(given, dict):
        if given.get("type") == "struct":
            return _struct(_fields(given, where), where)
        if given.get("type") == "array":
            return f"ARRAY<{_delta_type(given.get('elementType'), where)}>"
        if given.get("type") == "map":
            key, value = (_delta_type(given.get(name), where) for name in ("keyType", "valueType"))
            return f"MAP<{key}, {value}>"
    raise ValueError(f"expected a type of {where} of the message schema, not {_shown(given)}")
