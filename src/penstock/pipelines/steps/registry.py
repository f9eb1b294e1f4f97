"""Messages whose schemas are in a registry, read into the columns of the schema in the pipeline file: Avro, Protobuf,
and JSON, of which only the id is read here.

Tasks look up a schema when they meet its id for the first time; ``state_dir.schemas`` explains how attempts of a batch
agree about ids that the registry does not know.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError
from penstock.payloads.avro_resolution import ResolvedMessages, resolve
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.payloads.confluent import AFTER_ID, schema_id_of
from penstock.payloads.errors import NOT_AVRO, NOT_JSON, NOT_PROTOBUF, OTHER_SCHEMA, UNKNOWN_SCHEMA, PayloadError
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_resolution import RegisteredProtobuf
from penstock.payloads.protobuf_schema import registered_files
from penstock.pipelines.spec.steps import Parse
from penstock.pipelines.state_dir.schemas import MOST_UNKNOWN, SCHEMAS, BatchSchemas, StoredSchema
from penstock.runtime.kafka.config import SchemaRegistry
from penstock.runtime.kafka.schema_registry import schema_by_id

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["UNKNOWN_SCHEMA", "RegistryMessages"]

_CODES = {"avro": NOT_AVRO, "protobuf": NOT_PROTOBUF, "json": NOT_JSON}
"""Code of a payload without an id, by format."""
_LIMITED = f"lacks more than {MOST_UNKNOWN} ids of the batch, and was not asked for others"
_MOST_SCHEMAS = 1_000
_stored: dict[tuple[str, int], StoredSchema] = {}
"""Schemas of this process by registry and id, which never change."""


class _Decoder(Protocol):
    """Decoder of the messages of one registered schema."""

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the columns of ``payload``, which begins with the id. Raises PayloadError."""


@dataclass(slots=True)
class RegistryMessages:
    """Decoder of messages for the columns of ``schema``, the content of the file; the other fields: see ``Parse``."""

    format: str
    schema: bytes
    registry: SchemaRegistry
    stored_as: str
    message: str = ""
    new_fields: str = "ignore"
    new_fields_as: str | None = None
    unknown_enums: str = "dead_letter"
    _batch: tuple[str, BatchSchemas] | None = field(default=None, init=False)
    _decoders: dict[int, _Decoder | PayloadError] = field(default_factory=dict, init=False)
    _unknown: int = field(default=0, init=False)
    """Number of ids that the registry did not know when this process asked for the batch."""

    @classmethod
    def of(cls, parse: Parse) -> RegistryMessages:
        """Return the decoder of a parse step with a registry."""
        assert parse.registry is not None
        policies = parse.new_fields, parse.new_fields_as, parse.unknown_enums
        return cls(
            parse.format, parse.message_schema, parse.registry, parse.registry_name, parse.message or "", *policies
        )

    @property
    def accepts_empty(self) -> bool:
        """False: the id precedes each message."""
        return False

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the columns of ``payload``.

        Raises:
            PayloadError: it is not a message of its schema, or this one cannot be read into the columns.
            UnavailableError: the registry does not answer, or the batch has too many unknown ids.
            RefusedError, ConfigError: it refused the request, or is none.
        """
        schema_id = schema_id_of(payload, _CODES[self.format])
        batch = self._known()
        found = self._decoders.get(schema_id)
        if found is None:
            if len(self._decoders) >= _MOST_SCHEMAS:
                self._decoders.clear()
            found = self._decoders[schema_id] = self._decoder(schema_id, batch)
        if isinstance(found, PayloadError):
            # Another one: each would add its traceback to the same object.
            raise PayloadError(found.code, found.reason)
        return found.decode(payload)

    def failures(self, payloads: pa.Array[Any]) -> pa.StructArray:
        """Return ``code`` and ``reason`` for each payload, null if it is empty or has the id of a schema of the format.

        Raises the errors of :meth:`decode`, except PayloadError.
        """
        import pyarrow as pa

        codes: list[str | None] = []
        reasons: list[str | None] = []
        for payload in payloads.to_pylist():
            code = reason = None
            try:
                if payload:
                    self.decode(payload)
            except PayloadError as error:
                code, reason = error.code, error.reason
            codes.append(code)
            reasons.append(reason)
        return pa.StructArray.from_arrays(
            [pa.array(codes, pa.string()), pa.array(reasons, pa.string())], ["code", "reason"]
        )

    def _known(self) -> BatchSchemas:
        """Return what the batch of this task knows."""
        from pyspark import TaskContext

        context = TaskContext.get()
        text = None if context is None else context.getLocalProperty(SCHEMAS)
        assert text is not None, "the driver sets it before it starts a job"
        if self._batch is None or self._batch[0] != text:
            self._batch = text, BatchSchemas.parse(text)
            self._decoders.clear()
            self._unknown = 0
        return self._batch[1]

    def _decoder(self, schema_id: int, batch: BatchSchemas) -> _Decoder | PayloadError:
        key = self.stored_as, schema_id
        if f"{key[0]}-{key[1]}" not in batch.known or (schema := _stored.get(key)) is None:
            schema = batch.find(*key, partial(self._looked_up, schema_id, batch))
            if schema.text is not None and batch.fixed is None:
                if len(_stored) >= _MOST_SCHEMAS:
                    _stored.clear()
                _stored[key] = schema
        if schema.text is None:
            reason = f"the schema registry has no schema with the id {schema_id}"
            if batch.limited:
                reason = f"the schema id {schema_id} is unknown: the registry {_LIMITED}"
            return PayloadError(UNKNOWN_SCHEMA, reason)
        wanted = self.format.upper()
        if schema.kind != wanted and batch.fixed is None:
            return PayloadError(OTHER_SCHEMA, f"the schema with the id {schema_id} is {schema.kind}, not {wanted}")
        try:
            return self._decoder_of(
                schema.text if batch.fixed is None else _stored_text(schema.text, self.format), schema
            )
        except ValueError as error:
            code = error.code if isinstance(error, PayloadError) else OTHER_SCHEMA
            return PayloadError(code, f"schema id {schema_id}: {error}")

    def _decoder_of(self, text: str, schema: StoredSchema) -> _Decoder:
        """Return the decoder of a schema with ``text``. Raises ValueError: no columns can hold it, or it is none."""
        policies = self.new_fields, self.new_fields_as, self.unknown_enums
        if self.format == "avro":
            return _AvroDecoder(_resolved((text, schema.references), self.schema.decode(), *policies))
        if self.format == "protobuf":
            return _registered_protobuf(base64.b64decode(text), self.schema, self.message, *policies)
        try:
            is_schema = isinstance(json.loads(text), dict | bool)
        except RecursionError:
            is_schema = False
        if not is_schema:
            raise ValueError("expected a JSON Schema, which is an object, or true or false")
        return _JsonDecoder()

    def _looked_up(self, schema_id: int, batch: BatchSchemas) -> StoredSchema:
        found = schema_by_id(self.registry, schema_id, serialized=self.format == "protobuf")
        if found is None:
            if self._unknown >= MOST_UNKNOWN:
                raise batch.limit()
            self._unknown += 1
            return StoredSchema(None)
        if found.kind != "PROTOBUF" or self.format != "protobuf":
            return StoredSchema(found.text, found.kind, found.references)
        try:
            files = registered_files(found.text, zip(found.names, found.references, strict=True))
        except ValueError as error:
            raise ConfigError(
                f"the schema with the id {schema_id} of the schema registry {self.registry.url} cannot be read",
                option="registry.url",
                why=str(error),
                hint="check the registry, and its version",
            ) from error
        return StoredSchema(base64.b64encode(files).decode(), found.kind)


def _stored_text(content: str, kind: str) -> str:
    """Return the schema of a test case, whose ``content`` is in base64, as it is stored."""
    return content if kind == "protobuf" else base64.b64decode(content).decode()


class _AvroDecoder:
    def __init__(self, resolved: ResolvedMessages) -> None:
        self._resolved = resolved

    def decode(self, payload: bytes) -> dict[str, object]:
        return self._resolved.decode(payload, AFTER_ID)


class _JsonDecoder:
    """Spark parses the JSON: a message of a schema only needs to have one."""

    def decode(self, payload: bytes) -> dict[str, object]:
        del payload
        return {}


@lru_cache(maxsize=256)
def _registered_protobuf(
    writer: bytes, reader: bytes, message: str, new_fields: str, new_fields_as: str | None, unknown_enums: str
) -> RegisteredProtobuf:
    columns = ProtobufMessages(
        reader, message, new_fields=new_fields, new_fields_as=new_fields_as, unknown_enums=unknown_enums
    )
    return RegisteredProtobuf(writer, columns)


@lru_cache(maxsize=256)
def _resolved(
    writer: tuple[str, tuple[str, ...]], reader: str, new_fields: str, new_fields_as: str | None, unknown_enums: str
) -> ResolvedMessages:
    return resolve(
        parse_avro_schema(*writer).record,
        parse_avro_schema(reader).record,
        new_fields,
        new_fields_as,
        enums=unknown_enums,
    )
