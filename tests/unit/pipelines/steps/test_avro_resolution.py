"""Avro messages of other schemas: what becomes of each difference between the writer's and the reader's."""

from __future__ import annotations

import json
from contextlib import suppress
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from penstock.payloads.avro_resolution import ResolvedMessages, check_defaults, resolve
from penstock.payloads.avro_schema import AvroType, parse_avro_schema
from penstock.payloads.errors import PayloadError
from tests.mutations import mutated
from tests.unit.pipelines.spec.test_avro_schema import VECTORS
from tests.unit.pipelines.steps.test_avro import MESSAGE, VALUES

EVERYTHING = (VECTORS / "everything.avsc").read_text()


def fields(*given: dict[str, Any]) -> AvroType:
    return parse_avro_schema(json.dumps({"type": "record", "name": "R", "fields": given})).record


def one(kind: Any, **more: Any) -> AvroType:
    return fields({"name": "f", "type": kind, **more})


def read(writer: Any, reader: Any, message: str, **options: Any) -> object:
    made = resolve(one(writer), one(reader), enums=options.pop("enums", "dead_letter"), **options)
    return made.decode(bytes.fromhex(message), 0)["f"]


def test_a_schema_reads_its_own_messages() -> None:
    schema = parse_avro_schema(EVERYTHING).record
    assert resolve(schema, schema, enums="dead_letter").decode(b"head." + MESSAGE, 5) == VALUES


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": symbols, **more}


def decimal(precision: int, scale: int = 0) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def long(logical: str) -> dict[str, str]:
    return {"type": "long", "logicalType": logical}


@pytest.mark.parametrize(
    ("writer", "reader", "message", "expected"),
    [
        ("int", "long", "05", -3),
        ("int", "double", "05", -3.0),
        ("long", "float", "80808010", float(1 << 24)),
        ("long", "float", "82808010", float(1 << 24)),  # the nearest value of 32 bits
        ("float", "double", "0000c03f", 1.5),
        ("string", "bytes", "0261", b"a"),
        ("bytes", "string", "0261", "a"),
        ("int", ["null", "long"], "05", -3),
        (["null", "int"], ["double", "null"], "0205", -3.0),
        (["null", "int"], ["double", "null"], "00", None),
        (["null", "int"], "long", "0205", -3),
        (enum("A", "B"), enum("B", "A"), "02", "B"),
        (enum("A", "C"), enum("A", "B", default="A"), "02", "A"),
        ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, "020500", [-3]),
        ({"type": "map", "values": "int"}, {"type": "map", "values": "double"}, "02026b0500", [("k", -3.0)]),
        (decimal(4, 2), decimal(9, 2), "0205", Decimal("0.05")),
        ("bytes", decimal(4, 2), "0205", Decimal("0.05")),
        (long("timestamp-millis"), long("timestamp-micros"), "06", 3000),
        (long("timestamp-micros"), long("timestamp-millis"), "06", 3),
        (long("timestamp-millis"), "long", "06", 3),
        ("int", long("timestamp-millis"), "06", 3000),
        ("long", "long", "06", 3),
    ],
)
def test_values_are_converted(writer: Any, reader: Any, message: str, expected: object) -> None:
    found = read(writer, reader, message)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("writer", "reader", "shown"),
    [
        ("long", "int", "long in the schema of the message, and int"),
        ("double", "float", "double in"),
        ("string", "int", "string in"),
        ("boolean", "int", "boolean in"),
        (enum("A"), "string", "enum in"),
        ("int", {"type": "array", "items": "int"}, "and array"),
        ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3}, "fixed(2) in"),
        (decimal(4, 2), decimal(4, 1), "decimal(4, 2) in the schema of the message, and decimal(4, 1)"),
        (decimal(9, 2), decimal(4, 2), "decimal(9, 2) in"),
        (decimal(9, 2), "string", "decimal(9, 2) in"),
        (long("timestamp-millis"), long("local-timestamp-millis"), "timestamp-millis in"),
    ],
)
def test_other_types_are_changed_types(writer: Any, reader: Any, shown: str) -> None:
    with pytest.raises(PayloadError) as caught:
        resolve(one(writer), one(reader), enums="dead_letter")
    assert caught.value.code == "schema.mismatch"
    assert caught.value.reason.startswith(f"the field 'f' is {shown}" if " in" in shown else "the field 'f' is")
    assert shown in caught.value.reason


def test_null_and_unknown_symbols_concern_single_messages() -> None:
    made = resolve(one(["null", "int"]), one("int"), enums="dead_letter")
    assert made.decode(b"\x02\x05", 0) == {"f": -3}
    with pytest.raises(PayloadError, match="null, which the schema of the columns does not permit") as caught:
        made.decode(b"\0", 0)
    assert caught.value.code == "schema.mismatch"
    with pytest.raises(PayloadError, match="lacks the symbol 'C' in the field 'f'") as unknown:
        read(enum("A", "C"), enum("A"), "02")
    assert unknown.value.code == "schema.unknown_enum"
    assert read(enum("A", "C"), enum("A"), "02", enums="add") == "C"
    with pytest.raises(PayloadError, match="2 is no index of an enum with 2 symbols"):
        read(enum("A", "C"), enum("A"), "04", enums="add")


DEFAULTS = [
    ("boolean", True, True),
    ("long", -5, -5),
    ("double", 1.5, 1.5),
    ("double", 1, 1.0),
    ("bytes", "\u00ff", b"\xff"),
    ({"type": "fixed", "name": "F", "size": 2}, "ab", b"ab"),
    ("string", "\u00e4", "\u00e4"),
    (["null", "int"], None, None),
    (["int", "null"], 3, 3),
    (enum("A", "B"), "B", "B"),
    ({"type": "array", "items": ["null", "int"]}, [1, None], [1, None]),
    ({"type": "array", "items": "int"}, [], []),
    ({"type": "map", "values": "string"}, {"k": "v"}, [("k", "v")]),
    (decimal(4, 2), "\u0005", Decimal("0.05")),
    (long("timestamp-millis"), 3, 3000),
    (
        {"type": "record", "name": "S", "fields": [{"name": "x", "type": "int", "default": 7}]},
        {},
        {"x": 7},
    ),
]


@pytest.mark.parametrize(("kind", "default", "expected"), DEFAULTS)
def test_fields_that_the_writer_lacks_have_their_defaults(kind: Any, default: Any, expected: object) -> None:
    reader = fields({"name": "f", "type": "int"}, {"name": "g", "type": kind, "default": default})
    check_defaults(reader)
    assert resolve(one("int"), reader, enums="dead_letter").decode(b"\x05", 0) == {"f": -3, "g": expected}


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("int", "1"),
        ("int", None),
        ("int", True),
        ("int", 1 << 31),
        ("boolean", 1),
        ("string", 5),
        (enum("A"), "B"),
        ({"type": "fixed", "name": "F", "size": 2}, "abc"),
        ({"type": "array", "items": "int"}, ["a"]),
        (decimal(1), "ab"),
        ({"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]}, {}),
        ({"type": "array", "items": {"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]}}, [{}]),
    ],
)
def test_wrong_defaults_are_refused(kind: Any, default: Any) -> None:
    with pytest.raises(
        ValueError, match=r"expected a default of the type .* for the field 'f' of the Avro schema, not"
    ):
        check_defaults(one(kind, default=default))


def test_fields_without_default_are_required_and_found_by_aliases() -> None:
    writer = fields({"name": "old", "type": "int"}, {"name": "f", "type": "string"})
    with pytest.raises(PayloadError, match="lacks the field 'g', without default"):
        resolve(writer, fields({"name": "g", "type": "int"}), enums="dead_letter")
    renamed = fields(
        {"name": "f", "type": "string", "aliases": ["old"]}, {"name": "g", "type": "int", "aliases": ["old"]}
    )
    assert resolve(writer, renamed, enums="dead_letter").decode(b"\x05\x02a", 0) == {"g": -3, "f": "a"}


SITE = {
    "type": "record",
    "name": "Site",
    "fields": [{"name": "hall", "type": "int"}, {"name": "dock", "type": "bytes"}],
}
HALL = {**SITE, "fields": SITE["fields"][:1]}


def newer(policy: str, new_fields_as: str | None = None) -> ResolvedMessages:
    writer = fields(
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "site", "type": SITE},
        {"name": "all", "type": {"type": "array", "items": "Site"}},
        {"name": "bar", "type": ["null", "double"]},
        {"name": "price", "type": {"type": "map", "values": decimal(4, 2)}},
        {"name": "at", "type": ["null", long("timestamp-millis")]},
        {"name": "s", "type": "string"},
    )
    reader = fields({"name": "site", "type": HALL}, {"name": "all", "type": {"type": "array", "items": "Site"}})
    return resolve(writer, reader, policy, new_fields_as, enums="dead_letter")


NEW = bytes.fromhex(
    "00" + "0202ff" + "04" + "040261" + "060262" + "00" + "00" + "02" + "026b0205" + "00" + "0206" + "0278"
)
OLD = {"site": {"hall": 1}, "all": [{"hall": 2}, {"hall": 3}]}


def test_new_fields_have_a_policy() -> None:
    assert newer("ignore").decode(NEW, 0) == OLD
    made = newer("add", "more")
    for _ in range(2):
        assert made.decode(NEW, 0) == {
            **OLD,
            "more": [
                ("day", "1970-01-01"),
                ("site.dock", "/w=="),
                ("all[].dock", '["YQ==", "Yg=="]'),
                ("bar", None),
                ("price", '{"k": "0.05"}'),
                ("at", "1970-01-01T00:00:00.003000+00:00"),
                ("s", "x"),
            ],
        }
    with pytest.raises(PayloadError) as caught:
        newer("dead_letter").decode(NEW, 0)
    assert (caught.value.code, caught.value.reason) == (
        "schema.new_field",
        "the payload has fields that the schema lacks: day, site.dock, all[].dock, bar, price, at, s",
    )
    same = resolve(one("int"), one("int"), "add", "more", enums="dead_letter")
    assert same.decode(b"\x05", 0) == {"f": -3, "more": None}


def test_broken_messages_have_the_codes_of_their_own_schema() -> None:
    for message, reason in (("", "ends within the field 'f'"), ("0505", "its record ends after 1 of 2 bytes")):
        with pytest.raises(PayloadError, match=reason) as caught:
            read("int", "long", message)
        assert caught.value.code == "parse.not_avro"


def test_mutated_messages_are_decoded_or_refused() -> None:
    random, made = Random(7), newer("add", "more")
    found = 0
    for _ in range(2_000):
        with suppress(PayloadError):
            made.decode(mutated(random, NEW), 0)
            found += 1
    assert 50 < found < 1_950
