"""Schemas of values in a registry: derived from the columns, or given, and then compared with the columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.pipelines.spec.avro_columns import check_record, derived_record
from penstock.pipelines.spec.columns import sink_columns
from penstock.pipelines.spec.json_columns import derived_object
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.protobuf_columns import check_message
from penstock.pipelines.spec.registered_values import AvroValue, ProtobufValue
from penstock.pipelines.spec.sinks import KafkaSink, Sink

__all__ = ["planned_schema", "value_fields", "value_problem", "value_schema"]

_ANY_TYPE = "STRING"
"""Type that each format has, of columns whose names are checked."""


def value_fields(kafka: KafkaSink, columns: Iterable[str]) -> list[str]:
    """Return the names of the fields of the values of ``kafka`` for a stream with ``columns``."""
    assert kafka.registered is not None
    given = kafka.registered.fields
    return list(given if given is not None else kafka.value or columns)


def value_schema(kafka: KafkaSink, columns: Mapping[str, str]) -> str:
    """Return the schema of the values of ``kafka``, as it is registered, for a stream with ``columns``, types by name.

    Raises:
        ValueError: a column has no type of the format, or not that of the given schema; the text begins with
            "expected".
    """
    found = {name.lower(): kind for name, kind in columns.items()}
    return _schema(kafka, {name: found[name.lower()] for name in value_fields(kafka, columns)})


def _schema(kafka: KafkaSink, types: Mapping[str, str]) -> str:
    """Return the schema for ``types`` by field, of which some may be missing if it is given."""
    registered = kafka.registered
    assert registered is not None
    if isinstance(registered, ProtobufValue):
        check_message(registered.message_schema, types)
    elif registered.text is not None:
        check_record(registered.text, types)
    if registered.text is not None:
        return registered.text
    derived = derived_record if isinstance(registered, AvroValue) else derived_object
    return derived(registered.record_of(kafka.topic), types.items())


def planned_schema(pipeline: Pipeline, sink: Sink) -> str | None:
    """Return the schema of the values of ``sink``, which has one; None if only Spark knows the types of its columns."""
    kafka = sink.kafka
    assert kafka is not None
    assert kafka.registered is not None
    if kafka.registered.text is not None:
        return kafka.registered.text
    columns = sink_columns(pipeline, sink)
    if columns is None:
        return None
    types = {column.name: column.type for column in columns}
    chosen = {name.lower() for name in kafka.value or types}
    known = {name: kind for name, kind in types.items() if kind is not None and name.lower() in chosen}
    return value_schema(kafka, known) if len(known) == len(chosen) else None


def value_problem(pipeline: Pipeline, sink: Sink) -> str | None:
    """Return what is wrong with the columns that ``sink`` writes with a schema, as far as the file determines them."""
    kafka = sink.kafka
    assert kafka is not None
    assert kafka.registered is not None
    columns = sink_columns(pipeline, sink)
    if columns is None:
        return None
    types = {column.name.lower(): column.type for column in columns}
    fields = value_fields(kafka, [column.name for column in columns])
    try:
        if kafka.registered.fields is None:
            _schema(kafka, {name: types.get(name.lower()) or _ANY_TYPE for name in fields})
            return None
        for name in fields:
            if name.lower() not in types:
                shown = ", ".join(column.name for column in columns)
                raise ValueError(f"expected a column for the field {name!r} of the schema, found {shown}")
        _schema(kafka, {name: kind for name in fields if (kind := types[name.lower()]) is not None})
    except ValueError as error:
        return str(error)
    return None
