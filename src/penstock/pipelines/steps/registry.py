"""Avro messages whose schemas are in a registry, read into the columns of the schema in the pipeline file.

Tasks look up a schema when they meet its id for the first time; ``state_dir.schemas`` explains how attempts of a batch
agree about ids that the registry does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial

from penstock.payloads.avro import schema_id_of
from penstock.payloads.avro_resolution import ResolvedMessages, resolve
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.payloads.errors import OTHER_SCHEMA, UNKNOWN_SCHEMA, PayloadError
from penstock.pipelines.spec.steps import Parse
from penstock.pipelines.state_dir.schemas import MOST_UNKNOWN, SCHEMAS, BatchSchemas, StoredSchema
from penstock.runtime.kafka.config import SchemaRegistry
from penstock.runtime.kafka.schema_registry import schema_by_id

__all__ = ["UNKNOWN_SCHEMA", "RegistryMessages"]

_AFTER_ID = 5
"""Place of the record in a message, after a byte 0 and four bytes of the id."""
_LIMITED = f"lacks more than {MOST_UNKNOWN} ids of the batch, and was not asked for others"
_MOST_SCHEMAS = 1_000
_stored: dict[tuple[str, int], StoredSchema] = {}
"""Schemas of this process by registry and id, which never change."""


@dataclass(slots=True)
class RegistryMessages:
    """Decoder of messages for the columns of the Avro schema ``text``; the other fields: see ``Parse``."""

    text: str
    registry: SchemaRegistry
    new_fields: str = "ignore"
    new_fields_as: str | None = None
    unknown_enums: str = "dead_letter"
    _batch: tuple[str, BatchSchemas] | None = field(default=None, init=False)
    _decoders: dict[int, ResolvedMessages | PayloadError] = field(default_factory=dict, init=False)
    _unknown: int = field(default=0, init=False)
    """Number of ids that the registry did not know when this process asked for the batch."""

    @classmethod
    def of(cls, parse: Parse) -> RegistryMessages:
        """Return the decoder of a parse step with a registry."""
        assert parse.registry is not None
        return cls(
            parse.message_schema.decode(), parse.registry, parse.new_fields, parse.new_fields_as, parse.unknown_enums
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
        schema_id = schema_id_of(payload)
        batch = self._known()
        found = self._decoders.get(schema_id)
        if found is None:
            if len(self._decoders) >= _MOST_SCHEMAS:
                self._decoders.clear()
            found = self._decoders[schema_id] = self._decoder(schema_id, batch)
        if isinstance(found, PayloadError):
            # Another one: each would add its traceback to the same object.
            raise PayloadError(found.code, found.reason)
        return found.decode(payload, _AFTER_ID)

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

    def _decoder(self, schema_id: int, batch: BatchSchemas) -> ResolvedMessages | PayloadError:
        key = self.registry.digest, schema_id
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
        if schema.kind != "AVRO":
            return PayloadError(OTHER_SCHEMA, f"the schema with the id {schema_id} is {schema.kind}")
        try:
            writer = schema.text, schema.references
            return _resolved(writer, self.text, self.new_fields, self.new_fields_as, self.unknown_enums)
        except ValueError as error:
            code = error.code if isinstance(error, PayloadError) else OTHER_SCHEMA
            return PayloadError(code, f"schema id {schema_id}: {error}")

    def _looked_up(self, schema_id: int, batch: BatchSchemas) -> StoredSchema:
        found = schema_by_id(self.registry, schema_id)
        if found is not None:
            return StoredSchema(*found)
        if self._unknown >= MOST_UNKNOWN:
            raise batch.limit()
        self._unknown += 1
        return StoredSchema(None)


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
