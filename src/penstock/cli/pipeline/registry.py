"""`penstock pipeline infer --registry`: the schema of a subject of a schema registry, as a file for a parse step."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.output import note, print_json
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.runtime.kafka.config import SchemaRegistry
    from penstock.runtime.kafka.schema_registry import RegisteredSchema

__all__ = ["RegistryOptions", "print_subject"]


@dataclass(frozen=True)
class RegistryOptions:
    """Address of a schema registry, its credentials, and a subject."""

    registry: Annotated[
        str | None,
        typer.Option(
            help="Print the schema of a subject of this schema registry, instead of reading samples.",
            metavar="URL",
            show_default=False,
        ),
    ] = None
    subject: Annotated[
        str | None, typer.Option(help="With --registry: the subject.", metavar="NAME", show_default=False)
    ] = None
    subject_version: Annotated[
        int | None,
        typer.Option(help="With --registry: the version; default: the latest.", min=1, metavar="N", show_default=False),
    ] = None
    registry_user: Annotated[
        str | None,
        typer.Option(help="User of the schema registry, or the key of an API key.", metavar="NAME", show_default=False),
    ] = None
    registry_password_file: Annotated[
        Path | None,
        typer.Option(
            help="File whose first line is the password of --registry-user.", metavar="FILE", show_default=False
        ),
    ] = None
    registry_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the trusted authorities of the schema registry.", metavar="FILE", show_default=False
        ),
    ] = None

    def check_unused(self) -> None:
        """Raise ConfigError if an option needs --registry, which is not set."""
        given = next((name for name, value in vars(self).items() if value is not None), None)
        if given is not None:
            option = f"--{given.replace('_', '-')}"
            raise ConfigError(
                f"{option} is set without --registry", option=option, hint="add --registry URL, or omit it"
            )

    def connection(self) -> SchemaRegistry:
        """Return the registry. Raises ConfigError: an option is not valid."""
        from pydantic import ValidationError

        from penstock.runtime.io.network import without_secret
        from penstock.runtime.kafka.config import SchemaRegistry

        options = {
            "url": self.registry,
            "user": self.registry_user,
            "password_file": self.registry_password_file,
            "ca": self.registry_ca,
        }
        try:
            return SchemaRegistry.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            name = "-".join(["--registry", *(str(part).replace("_", "-") for part in first["loc"] if part != "url")])
            why = first["msg"].removeprefix("Value error, ")
            raise ConfigError(
                f"the schema registry {without_secret(str(self.registry))} cannot be used",
                option=name,
                why=why,
                hint=f"correct {name}; `user`, `password_file` and `ca` are --registry-user, --registry-password-file "
                "and --registry-ca",
            ) from None


def print_subject(options: RegistryOptions, *, nullable: bool, as_json: bool) -> None:
    """Print the schema of a subject of the schema registry."""
    from penstock.runtime.kafka.schema_registry import schema_of_subject

    if options.subject is None or nullable:
        raise ConfigError(
            "--nullable is for samples: a schema of a registry says which columns may be null"
            if nullable
            else "--registry is set without --subject",
            option="--nullable" if nullable else "--subject",
            hint="omit it" if nullable else "add --subject NAME, for example --subject TOPIC-value",
        )
    found = schema_of_subject(options.connection(), options.subject, options.subject_version)
    named = f"version {found.version} of the subject {options.subject!r}"
    about = {"subject": options.subject, "version": found.version, "id": found.schema_id}
    try:
        data, text, columns = _SUBJECTS[found.schema.kind](found.schema)
    except KeyError:
        raise ConfigError(
            f"{named} is a schema of {found.schema.kind}, not of Avro, Protobuf or JSON",
            option="--subject",
            hint="name another subject",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{named} cannot be read into columns",
            option="--subject",
            why=str(error),
            hint="write a schema with the fields that are needed",
        ) from error
    if as_json:
        print_json({**data, **about})
        return
    for each in columns:
        note(f"{named}, schema id {found.schema_id}, {each}")
    if isinstance(text, str):
        sys.stdout.write(f"{text}\n")
    elif sys.stdout.isatty():
        raise ConfigError(
            "a descriptor set is not written to a terminal",
            option="--subject",
            hint="write it to a file: add > NAME.desc",
        )
    else:
        sys.stdout.buffer.write(text)


class _Subject(NamedTuple):
    """A schema of a registry: as JSON for programs, as a file for a parse step, and what its columns are."""

    data: dict[str, object]
    text: str | bytes
    columns: list[str]


def _avro_subject(schema: RegisteredSchema) -> _Subject:
    from penstock.payloads.avro_schema import inlined, parse_avro_schema
    from penstock.pipelines.spec.columns import parse_ddl

    parsed = parse_avro_schema(schema.text, schema.references)
    text = inlined(schema.text, schema.references)
    columns = [
        {"name": column.name, "type": column.type, "nullable": each.type.null is not None}
        for column, each in zip(parse_ddl(parsed.ddl), parsed.record.fields, strict=True)
    ]
    return _Subject({"columns": columns, "schema": text}, text, [f"has the columns {parsed.ddl}"])


def _json_subject(schema: RegisteredSchema) -> _Subject:
    from penstock.pipelines.spec.columns import parse_ddl
    from penstock.pipelines.spec.message_schemas import message_schema_ddl

    ddl = message_schema_ddl(schema.text)
    columns = [{"name": each.name, "type": each.type, "nullable": each.nullable} for each in parse_ddl(ddl)]
    return _Subject({"columns": columns, "schema": schema.text}, schema.text, [f"has the columns {ddl}"])


def _protobuf_subject(schema: RegisteredSchema) -> _Subject:
    from penstock.payloads.protobuf_schema import message_ddl, registered_files, registered_messages, with_imports
    from penstock.pipelines.spec.columns import parse_ddl

    files = with_imports(registered_files(schema.text, zip(schema.names, schema.references, strict=True)))
    messages: list[dict[str, object]] = []
    columns = []
    refused: ValueError | None = None
    for each in registered_messages(files):
        try:
            ddl = message_ddl(each)
        except ValueError as error:
            refused = error
            columns.append(f"message {each.full_name}, cannot be read into columns: {error}")
            continue
        columns.append(f"message {each.full_name}, has the columns {ddl}")
        found = [{"name": column.name, "type": column.type, "nullable": column.nullable} for column in parse_ddl(ddl)]
        messages.append({"message": each.full_name, "columns": found})
    if not messages:
        raise refused or ValueError("expected a schema with a message")
    return _Subject({"messages": messages, "schema": base64.b64encode(files).decode()}, files, columns)


_SUBJECTS: Mapping[str, Callable[[RegisteredSchema], _Subject]] = {
    "AVRO": _avro_subject,
    "JSON": _json_subject,
    "PROTOBUF": _protobuf_subject,
}
"""By the kind of the schema."""
