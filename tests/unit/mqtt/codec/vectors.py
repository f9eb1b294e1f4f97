"""Reads the golden vectors of ``tests/vectors/mqtt5`` and ``tests/vectors/mqtt311``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.mqtt.codec import packets
from penstock.mqtt.codec.packets import Packet, Subscription, Will
from penstock.mqtt.codec.properties import Properties

__all__ = ["ROUND_TRIP_FILES", "Vector", "load", "parametrize"]

DIRECTORY = Path(__file__).parents[3] / "vectors"
ROUND_TRIP_FILES = ("connect", "publish", "acknowledgements", "subscribe", "control")


class Vector(NamedTuple):
    """One vector: its bytes, and either what they mean or the reason code of the refusal."""

    name: str
    data: bytes
    packet: Packet | None
    reason_code: int
    role: str


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "hex" in value:
        return bytes.fromhex(value["hex"])
    if isinstance(value, dict) and "text" in value:
        return value["text"].encode()
    return value


def _properties(given: dict[str, Any]) -> Properties:
    values = {name: _value(value) for name, value in given.items()}
    if "user_properties" in values:
        values["user_properties"] = [(name, value) for name, value in values["user_properties"]]
    return Properties(**values)


def _packet(meaning: dict[str, Any]) -> Packet:
    fields = {name: _value(value) for name, value in meaning.items() if name != "type"}
    if "properties" in fields:
        fields["properties"] = _properties(fields["properties"])
    if "will" in fields:
        will = {name: _value(value) for name, value in fields["will"].items()}
        fields["will"] = Will(**{**will, "properties": _properties(will.get("properties", {}))})
    if "subscriptions" in fields:
        fields["subscriptions"] = [Subscription(**wanted) for wanted in fields["subscriptions"]]
    packet: Packet = getattr(packets, meaning["type"])(**fields)
    return packet


def load(*names: str, version: str = "mqtt5") -> list[Vector]:
    """The vectors of the files called ``names`` of that version."""
    vectors = []
    for name in names:
        for case in json.loads((DIRECTORY / version / f"{name}.json").read_text()):
            packet = _packet(case["meaning"]) if "meaning" in case else None
            vectors.append(
                Vector(
                    case["name"],
                    bytes.fromhex(case["hex"]),
                    packet,
                    case.get("reason_code", 0),
                    case.get("role", "either"),
                )
            )
    return vectors


def parametrize(*names: str, version: str = "mqtt5") -> pytest.MarkDecorator:
    """Run a test once a vector, with the vector's name as id."""
    vectors = load(*names, version=version)
    return pytest.mark.parametrize("vector", vectors, ids=[vector.name for vector in vectors])
