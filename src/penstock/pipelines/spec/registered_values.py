"""Values of messages with a schema in a registry, as Avro, Protobuf or JSON: options of a sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from penstock.payloads.avro_schema import is_avro_name, parse_avro_schema, record_name
from penstock.payloads.protobuf_schema import ProtobufSchema, SchemaFile, files_to_register, message_type
from penstock.pipelines.spec.values import Part, schema_content
from penstock.runtime.kafka.config import SchemaRegistry

__all__ = ["AvroValue", "JsonValue", "ProtobufValue", "RegisteredValue"]


class RegisteredValue(Part):
    """Options of values with the id that their schema has in a registry."""

    option: ClassVar[str]
    """Name of the option of a sink."""
    schema_type: ClassVar[str]
    """Type of the schema, as the registry names it."""
    shown: ClassVar[str]
    """Name of the format in texts."""

    registry: SchemaRegistry = Field(description="schema registry with the schemas of the topic")
    subject_name_strategy: Literal["topic", "record", "topic_record"] = Field(
        default="topic",
        description="subject of the schema: `TOPIC-value`, the full name of the record, or `TOPIC-RECORD`, as with "
        "Confluent's TopicNameStrategy, RecordNameStrategy and TopicRecordNameStrategy",
    )
    auto_register: bool = Field(
        default=True,
        description="register the schema; otherwise it must be registered in the subject, as with "
        "`auto.register.schemas=false`",
    )

    @property
    def text(self) -> str | None:
        """The given schema, as it is registered; None: it is derived from the columns."""
        return None

    @property
    def fields(self) -> Sequence[str] | None:
        """Names of the fields of the given schema; None: the columns."""
        return None

    @property
    def files(self) -> Sequence[SchemaFile]:
        """The files of the given schema, which is the last one, if it may import others."""
        return ()

    def record_of(self, topic: str) -> str:
        """Return the full name of the record."""
        raise NotImplementedError

    def subject_of(self, topic: str) -> str:
        """Return the subject of the schema for values of ``topic``."""
        names = {
            "topic": f"{topic}-value",
            "record": self.record_of(topic),
            "topic_record": f"{topic}-{self.record_of(topic)}",
        }
        return names[self.subject_name_strategy]


class AvroValue(RegisteredValue):
    """Send values as Avro: a byte 0, the id that their schema has in a registry, the record, as Confluent's serializers
    write them. The driver registers the schema before the first batch is sent."""

    option: ClassVar[str] = "avro"
    schema_type: ClassVar[str] = "AVRO"
    shown: ClassVar[str] = "Avro"

    record: str | None = Field(
        default=None,
        description="full name of the record that is derived from the columns; default: the topic",
    )
    given: Annotated[str | None, Field(alias="schema", description="Avro schema, a record, in JSON")] = None
    schema_file: str | None = Field(
        default=None,
        min_length=1,
        description="file with the Avro schema, relative to the pipeline file; default: it is derived from the columns",
    )

    _text: str = PrivateAttr(default="")

    @property
    def text(self) -> str | None:
        """The given schema; None: it is derived from the columns."""
        return self._text or None

    @property
    def fields(self) -> Sequence[str] | None:
        """Names of the fields of the given schema; None: the columns."""
        return None if self.text is None else [field.name for field in parse_avro_schema(self.text).record.fields]

    def record_of(self, topic: str) -> str:
        """Return the full name of the record."""
        return self.record or topic if self.text is None else record_name(self.text)

    @model_validator(mode="after")
    def _read_schema(self) -> AvroValue:
        if self.given is not None and self.schema_file is not None:
            raise ValueError("expected at most one of schema, schema_file")
        if self.record is not None:
            if self.given is not None or self.schema_file is not None:
                raise ValueError("expected record only without a schema, which has a name")
            if not is_avro_name(self.record):
                raise ValueError(f"expected a name of Avro, such as plant.Alarm, as record, found {self.record!r}")
        if self.given is None and self.schema_file is None:
            return self
        given = (self.given or "").encode() if self.schema_file is None else schema_content(self.schema_file)
        try:
            text = given.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"expected a readable schema_file: {error}") from None
        parse_avro_schema(text)
        made = self.model_copy()
        made._text = text  # noqa: SLF001 - an attribute of this class
        return made


class ProtobufValue(RegisteredValue):
    """Send values as Protobuf: a byte 0, the id that their schema has in a registry, the indexes of the message in it,
    the message, as Confluent's serializers write them. The driver registers the schema before the first batch is
    sent."""

    option: ClassVar[str] = "protobuf"
    schema_type: ClassVar[str] = "PROTOBUF"
    shown: ClassVar[str] = "Protobuf"

    schema_file: str = Field(
        min_length=1, description="file with a descriptor set of `protoc`, relative to the pipeline file"
    )
    message: str = Field(min_length=1, description="name of the Protobuf message; the package may be omitted")

    _schema: ProtobufSchema | None = PrivateAttr(default=None)
    _files: Sequence[SchemaFile] = PrivateAttr(default=())

    @property
    def message_schema(self) -> ProtobufSchema:
        """The message with its full name."""
        assert self._schema is not None, "set when the file was read"
        return self._schema

    @property
    def text(self) -> str | None:
        """The file of the message as a descriptor in base64."""
        return self._files[-1].text

    @property
    def files(self) -> Sequence[SchemaFile]:
        """The file of the message, after those that it imports."""
        return self._files

    @property
    def fields(self) -> Sequence[str] | None:
        """Names of the fields of the message."""
        found = self.message_schema
        return [field.name for field in message_type(found.descriptors, found.message).fields]

    def record_of(self, topic: str) -> str:  # noqa: ARG002 - the message has a name
        """Return the full name of the message."""
        return self.message_schema.message

    @model_validator(mode="after")
    def _read_schema(self) -> ProtobufValue:
        descriptors = schema_content(self.schema_file)
        # Messages that no columns can hold are refused.
        ProtobufSchema(descriptors, self.message).ddl()
        found = message_type(descriptors, self.message)
        made = self.model_copy()
        made._schema = ProtobufSchema(descriptors, found.full_name)  # noqa: SLF001 - attributes of this class
        made._files = files_to_register(found)  # noqa: SLF001
        return made


class JsonValue(RegisteredValue):
    """Send values as JSON: a byte 0, the id that their JSON Schema, which is derived from the columns, has in a
    registry, the JSON, as Confluent's serializers write them. The driver registers the schema before the first batch is
    sent."""

    option: ClassVar[str] = "json_schema"
    schema_type: ClassVar[str] = "JSON"
    shown: ClassVar[str] = "JSON"

    title: str | None = Field(
        default=None,
        min_length=1,
        description="title of the schema, which is the name of the record; default: the topic",
    )

    def record_of(self, topic: str) -> str:
        """Return the title."""
        return self.title or topic
