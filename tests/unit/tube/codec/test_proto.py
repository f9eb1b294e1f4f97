"""The generated messages say what their definitions say: `make proto` was run after the last change."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.tube.codec import proto
from penstock.tube.codec.proto import broker_pb2, envelope_pb2, master_pb2, shared_pb2

FOLDER = Path(str(proto.__file__)).parent
TYPES = {3: "int64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32", 4: "uint64", 6: "fixed64",
         7: "fixed32", 15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64"}  # fmt: skip
MESSAGE = re.compile(r"^message (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (optional|required|repeated) ([\w.]+) (\w+) = (\d+)", re.MULTILINE)


def named(field: Any) -> str:
    other = field.message_type or field.enum_type
    return str(other.name) if other is not None else TYPES[field.type]


def label(field: Any) -> str:
    if field.is_repeated:
        return "repeated"
    return "required" if field.is_required else "optional"


@pytest.mark.parametrize("module", [broker_pb2, envelope_pb2, master_pb2, shared_pb2], ids=lambda m: m.__name__[-12:])
def test_generated_code_says_what_the_definitions_say(module: ModuleType) -> None:
    stem = module.__name__.rpartition(".")[2].removesuffix("_pb2")
    text = (FOLDER / f"{stem}.proto").read_text(encoding="utf-8")
    written = {
        name: {(number, kind, of.rpartition(".")[2], field) for kind, of, field, number in FIELD.findall(body)}
        for name, body in MESSAGE.findall(text)
    }
    generated = {
        name: {(str(field.number), label(field), named(field), field.name) for field in message.fields}
        for name, message in module.DESCRIPTOR.message_types_by_name.items()
    }
    assert written
    assert generated == written
