"""Values of messages as Avro with a schema in a registry: options of a sink."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from penstock.payloads.avro_schema import is_avro_name, parse_avro_schema, record_name
from penstock.pipelines.spec.values import Part, schema_content
from penstock.runtime.kafka.config import SchemaRegistry

__all__ = ["AvroValue"]


class AvroValue(Part):
    """Send values as Avro: a byte 0, the id that their schema has in a registry, the record, as Confluent's serializers
    write them. The driver registers the schema before the first batch is sent."""

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

    def record_of(self, topic: str) -> str:
        """Return the full name of the record."""
        return self.record or topic if self.text is None else record_name(self.text)

    def subject_of(self, topic: str) -> str:
        """Return the subject of the schema for values of ``topic``."""
        names = {
            "topic": f"{topic}-value",
            "record": self.record_of(topic),
            "topic_record": f"{topic}-{self.record_of(topic)}",
        }
        return names[self.subject_name_strategy]

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
