"""The targets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final, cast

__all__ = ["TARGETS", "Fuzz", "load"]

Fuzz = Callable[[bytes], object]
"""Runs any bytes; returns the outcome, whose repr is the same in every process. Raises where a rule is broken."""

TARGETS: Final[Mapping[str, tuple[str, str]]] = {
    "mqtt_decoder": ("mqtt", "fuzz_decoder"),
    "mqtt_properties": ("mqtt", "fuzz_properties"),
    "mqtt_topics": ("mqtt", "fuzz_topics"),
    "mqtt_broker": ("mqtt", "fuzz_broker"),
    "statestore_requests": ("statestore", "fuzz_requests"),
    "statestore_replies": ("statestore", "fuzz_replies"),
    "hlc": ("statestore", "fuzz_hlc"),
    "tube_frames": ("tube", "fuzz_frames"),
    "tube_envelopes": ("tube", "fuzz_envelopes"),
    "tube_messages": ("tube", "fuzz_messages"),
    "tube_broker": ("tube", "fuzz_broker"),
    "tube_records": ("tube", "fuzz_records"),
    "wal": ("wal", "fuzz_frames"),
    "node_yaml": ("configuration", "fuzz_node"),
    "pipeline_yaml": ("configuration", "fuzz_pipeline"),
    "avro": ("payloads", "fuzz_avro"),
    "protobuf": ("payloads", "fuzz_protobuf"),
    "sparkplug": ("payloads", "fuzz_sparkplug"),
    "cbor": ("payloads", "fuzz_cbor"),
    "policies": ("configuration", "fuzz_policies"),
    "credentials": ("security", "fuzz_credentials"),
    "http": ("http", "fuzz_requests"),
    "tls": ("tls", "fuzz_handshake"),
}
"""Name to module and function."""


def load(name: str) -> Fuzz:
    """Import the target ``name``; only its own module, since atheris instruments what is imported."""
    module, function = TARGETS[name]
    return cast(Fuzz, getattr(import_module(f"tests.fuzz.{module}"), function))
