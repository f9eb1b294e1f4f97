"""The section ``console``: how the web console shows data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from penstock.console.payload_schemas import PayloadSchema, PayloadSchemas
from penstock.mqtt.codec.topics import SHARE_PREFIX, filter_problem
from penstock.node.config.listeners import Section
from penstock.node.config.tube_cluster import TopicName
from penstock.payloads.avro import AvroMessages
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_schema import message_type

__all__ = ["ConsoleSection", "FilterText", "PayloadSchemaSection"]


def _filter(value: str) -> str:
    problem = filter_problem(value)
    if problem is not None:
        raise ValueError(f"expected a topic filter: {problem}")
    if value.startswith(SHARE_PREFIX):
        raise ValueError("expected a topic filter without a shared subscription")
    return value


FilterText = Annotated[str, BeforeValidator(lambda value: _filter(value) if isinstance(value, str) else value)]


class PayloadSchemaSection(Section):
    """Schema of the payloads of the MQTT topics that match ``filter``, or of the TubeMQ topic ``topic``."""

    filter: FilterText | None = Field(
        default=None,
        description="MQTT topic filter, also of records that a rule copied from MQTT. Set either this or `topic`",
    )
    topic: TopicName | None = Field(default=None, description="TubeMQ topic")
    format: Literal["avro", "protobuf"] = Field(description="format of the payloads")
    schema_file: Path = Field(
        description="file with the Avro schema, a record, in JSON; for `protobuf` a descriptor set of `protoc`. It is "
        "read at the start"
    )
    message: str | None = Field(
        default=None, min_length=1, description="name of the Protobuf message; the package may be omitted"
    )
    encoding: Literal["plain", "single_object", "confluent"] = Field(
        default="plain",
        description="what precedes the record or message: nothing, the fingerprint of the schema (`single_object`, "
        "Avro only), or a byte 0 and the id of the schema in a registry (`confluent`)",
    )
    schema_id: int | None = Field(
        default=None, ge=0, lt=1 << 32, description="id of the schema with `encoding: confluent`"
    )
    _messages: AvroMessages | ProtobufMessages = PrivateAttr()

    @model_validator(mode="after")
    def _read(self) -> PayloadSchemaSection:
        if (self.filter is None) == (self.topic is None):
            raise ValueError("set either `filter` (MQTT topics) or `topic` (a TubeMQ topic)")
        if (self.format == "protobuf") != (self.message is not None):
            raise ValueError("expected message with `format: protobuf`, and only there")
        if self.format == "protobuf" and self.encoding == "single_object":
            raise ValueError("expected `encoding: single_object` only with `format: avro`")
        if (self.encoding == "confluent") != (self.schema_id is not None):
            raise ValueError("expected a schema_id with `encoding: confluent`, and only there")
        try:
            given = self.schema_file.read_bytes()
            text = given.decode() if self.format == "avro" else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a readable schema_file: {error}") from None
        if self.message is None:
            parse_avro_schema(text)
            self._messages = AvroMessages(text, self.encoding, self.schema_id)
        else:
            message_type(given, self.message)
            self._messages = ProtobufMessages(given, self.message, self.encoding, self.schema_id)
        return self

    @property
    def schema_of_topics(self) -> PayloadSchema:
        """The schema, read from its file."""
        return PayloadSchema(self.filter, self._messages, self.topic)


class ConsoleSection(Section):
    """Web console."""

    payloads: list[PayloadSchemaSection] = Field(
        default_factory=list,
        description="schemas of payloads by MQTT or TubeMQ topic; the first that matches is used",
    )

    @property
    def schemas(self) -> PayloadSchemas:
        """Schemas of payloads by topic."""
        return PayloadSchemas([each.schema_of_topics for each in self.payloads])
