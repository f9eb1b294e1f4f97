"""`penstock pipeline infer --registry`: the schema of a subject as a file for a parse step."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import fastavro
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from penstock.payloads.avro_schema import inlined, parse_avro_schema
from penstock.pipelines.spec.loader import load
from tests.schema_registry import Registry
from tests.unit.cli.conftest import Command
from tests.unit.pipelines.steps.test_registry import MAIN
from tests.unit.pipelines.steps.test_registry import SITE as SITE_FILE

READING = {
    "type": "record",
    "name": "Reading",
    "namespace": "plant",
    "fields": [
        {"name": "machine", "type": "string"},
        {"name": "celsius", "type": ["null", "double"], "default": None},
        {"name": "site", "type": "Site"},
    ],
}
SITE = {
    "type": "record",
    "name": "Site",
    "namespace": "plant",
    "fields": [{"name": "hall", "type": "string"}, {"name": "last", "type": ["null", "other.State"]}],
}
STATE = {"type": "enum", "name": "other.State", "symbols": ["ON", "OFF"]}
PIPELINE = """\
name: p
source: {topics: [t]}
steps:
  - name: readings
    parse: {format: avro, encoding: confluent, schema_file: reading.avsc, registry: {url: "URL"}}
sinks: [{name: shown, console: {}}]
"""


def registered(registry: Registry) -> None:
    def version(schema: object, number: int, *references: str, **more: object) -> None:
        subject = more.pop("subject", "plant-value")
        named = [{"name": each, "subject": each, "version": 1} for each in references]
        data = {"schema": json.dumps(schema), "version": number, "id": 6 + number, "references": named, **more}
        registry.versions[f"/subjects/{subject}/versions/{number}"] = data

    version(STATE, 1, subject="other.State")
    version(SITE, 1, "other.State", subject="Site")
    version({**READING, "fields": READING["fields"][:2]}, 1)
    version(READING, 2, "Site")
    registry.versions["/subjects/plant-value/versions/latest"] = registry.versions["/subjects/plant-value/versions/2"]
    version("syntax", 3, subject="proto", schemaType="PROTOBUF")
    version("int", 4, subject="number")
    version("syntax", 5, subject="xml", schemaType="XML")
    version({}, 6, subject="any", schemaType="JSON")


def test_the_schema_of_a_subject_is_a_file_for_a_parse_step(penstock: Command, tmp_path: Path) -> None:
    with Registry() as registry:
        registered(registry)
        done = penstock("pipeline", "infer", "--registry", registry.url, "--subject", "plant-value")
        columns = "machine STRING, celsius DOUBLE, site STRUCT<hall: STRING, last: STRING>"
        about = f"version 2 of the subject 'plant-value', schema id 8, has the columns {columns}"
        assert (done.status, " ".join(done.err.split())) == (0, about)
        (tmp_path / "reading.avsc").write_text(done.out)
        (tmp_path / "p.yaml").write_text(PIPELINE.replace("URL", registry.url))
        parse = load(tmp_path / "p.yaml").steps[0].parse
        assert parse is not None
        assert parse.ddl == columns

        done = penstock(
            *("pipeline", "infer", "--registry", registry.url, "--subject", "plant-value"),
            *("--subject-version", "1", "--json"),
        )
        found = json.loads(done.out)
        assert (done.status, found["version"], found["id"]) == (0, 1, 7)
        assert found["columns"] == [
            {"name": "machine", "type": "STRING", "nullable": False},
            {"name": "celsius", "type": "DOUBLE", "nullable": True},
        ]
        assert json.loads(found["schema"]) == {**READING, "fields": READING["fields"][:2]}


def test_a_schema_of_protobuf_is_a_descriptor_set(penstock: Command, tmp_path: Path) -> None:
    with Registry() as registry:
        registry.refer_to(SITE_FILE)
        registry.register_protobuf(8, MAIN, SITE_FILE.name)
        latest = {**registry.schemas[8], "id": 8, "version": 3}
        registry.versions["/subjects/line-value/versions/latest"] = latest
        done = penstock("pipeline", "infer", "--registry", registry.url, "--subject", "line-value", "--json")
        found = json.loads(done.out)
        assert (done.status, found["id"], found["version"]) == (0, 8, 3)
        assert [each["message"] for each in found["messages"]] == ["plant.Alarm", "plant.Reading"]
        assert found["messages"][0]["columns"] == [{"name": "machine", "type": "STRING", "nullable": True}]
        (tmp_path / "line.desc").write_bytes(base64.b64decode(found["schema"]))
        (tmp_path / "p.yaml").write_text(
            PIPELINE.replace("format: avro", "format: protobuf, message: Reading")
            .replace("reading.avsc", "line.desc")
            .replace("URL", registry.url)
        )
        parse = load(tmp_path / "p.yaml").steps[0].parse
        assert parse is not None
        assert parse.ddl.startswith("machine STRING, celsius DOUBLE, at TIMESTAMP, site STRUCT<hall: STRING>")

        # As a file, for which the shell has replaced standard output.
        command = [sys.executable, "-m", "penstock.cli", "pipeline", "infer", "--registry", registry.url]
        with (tmp_path / "other.desc").open("wb") as file:
            done_alone = subprocess.run(
                [*command, "--subject", "line-value"], stdout=file, stderr=subprocess.PIPE, check=True, timeout=120
            )
        assert (tmp_path / "other.desc").read_bytes() == (tmp_path / "line.desc").read_bytes()
        assert b"message plant.Alarm, has the columns machine STRING" in done_alone.stderr

        empty = FileDescriptorProto(name="empty.proto")
        registry.register_protobuf(9, empty)
        registry.versions["/subjects/empty/versions/latest"] = {**registry.schemas[9], "id": 9, "version": 1}
        done = penstock("pipeline", "infer", "--registry", registry.url, "--subject", "empty")
        assert (done.status, "expected a schema with a message" in " ".join(done.err.split())) == (2, True)


def test_a_json_schema_is_a_file_for_a_parse_step(penstock: Command, tmp_path: Path) -> None:
    optional = {"oneOf": [{"type": "null", "title": "Not included"}, {"type": "number"}]}
    schema = {"type": "object", "properties": {"machine": {"type": "string"}, "celsius": optional}, "title": "Reading"}
    with Registry() as registry:
        latest = {"schema": json.dumps(schema), "schemaType": "JSON", "id": 9, "version": 1}
        registry.versions["/subjects/json-value/versions/latest"] = latest
        done = penstock("pipeline", "infer", "--registry", registry.url, "--subject", "json-value")
        assert (done.status, json.loads(done.out)) == (0, schema)
        assert "schema id 9, has the columns machine STRING, celsius DOUBLE" in " ".join(done.err.split())
        (tmp_path / "reading.json").write_text(done.out)
        (tmp_path / "p.yaml").write_text(
            PIPELINE.replace("format: avro", "format: json")
            .replace("reading.avsc", "reading.json")
            .replace("URL", registry.url)
        )
        parse = load(tmp_path / "p.yaml").steps[0].parse
        assert parse is not None
        assert parse.ddl == "machine STRING, celsius DOUBLE"


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (("--subject", "nothing"), 1, "does not have the subject 'nothing'"),
        (("--subject", "plant-value", "--subject-version", "9"), 1, "version 9 of the subject 'plant-value'"),
        (("--subject", "proto"), 2, "does not return schemas of Protobuf as descriptors"),
        (("--subject", "xml"), 2, "is a schema of XML, not of Avro, Protobuf or JSON"),
        (("--subject", "any"), 2, "cannot be read into columns why: expected `type`: object"),
        (("--subject", "number"), 2, "cannot be read into columns"),
        ((), 2, "--registry is set without --subject"),
        (("--subject", "plant-value", "--nullable"), 2, "--nullable is for samples"),
        (("--subject", "plant-value", "--registry-user", "a"), 2, "user and password_file belong together"),
        (("--subject", "plant-value", "--topic", "t"), 2, "only one of them"),
    ],
)
def test_wrong_subjects_and_options(penstock: Command, arguments: tuple[str, ...], status: int, expected: str) -> None:
    with Registry() as registry:
        registered(registry)
        for name, version in (("proto", 3), ("number", 4), ("xml", 5), ("any", 6)):
            latest = registry.versions[f"/subjects/{name}/versions/{version}"]
            registry.versions[f"/subjects/{name}/versions/latest"] = latest
        done = penstock("pipeline", "infer", "--registry", registry.url, *arguments)
        assert (done.status, expected in " ".join(done.err.split())) == (status, True), done.err


def test_options_of_a_registry_need_one(penstock: Command) -> None:
    done = penstock("pipeline", "infer", "-", "--subject", "plant-value")
    assert (done.status, "--subject is set without --registry" in done.err) == (2, True)
    done = penstock("pipeline", "infer", "--registry", "ftp://x", "--subject", "a")
    assert (done.status, "expected http://HOST:PORT" in " ".join(done.err.split())) == (2, True), done.err


def test_a_password_in_the_url_of_a_registry_is_not_printed(penstock: Command) -> None:
    done = penstock("pipeline", "infer", "--registry", "https://ann:s3cret@registry.example", "--subject", "a")
    assert (done.status, "https://***@registry.example" in done.err, "s3cret" in done.err) == (2, True, False)
    assert "--registry-password-file" in done.err


def test_types_of_other_schemas_are_written_where_they_are_first_used() -> None:
    twice = {
        "type": "record",
        "name": "Twice",
        "fields": [
            {"name": "a", "type": {"type": "array", "items": "plant.Site"}},
            {"name": "b", "type": {"type": "map", "values": ["null", "plant.Site"]}},
            {"name": "c", "type": "other.State"},
        ],
    }
    given = json.dumps(twice), (json.dumps(STATE), json.dumps(SITE))
    text = inlined(*given)
    assert parse_avro_schema(text).record == parse_avro_schema(*given).record
    fastavro.parse_schema(json.loads(text))
    assert text.count('"symbols"') == text.count('"hall"') == 1
    assert json.loads(inlined(json.dumps(SITE | {"fields": SITE["fields"][:1]}), ())) == {
        **SITE,
        "fields": SITE["fields"][:1],
    }


@pytest.mark.parametrize("first", ["plant.Hall", {"type": "plant.Hall"}, ["null", "plant.Hall"]])
def test_a_type_inside_a_type_that_is_used_later_is_written_once(first: object) -> None:
    hall = {"type": "record", "name": "Hall", "fields": [{"name": "number", "type": "int"}]}
    site = {"type": "record", "name": "plant.Site", "fields": [{"name": "hall", "type": hall}]}
    both = [{"name": "a", "type": first}, {"name": "b", "type": "plant.Site"}, {"name": "c", "type": "plant.Hall"}]
    given = json.dumps({"type": "record", "name": "Both", "fields": both}), (json.dumps(site),)
    text = inlined(*given)
    assert parse_avro_schema(text).record == parse_avro_schema(*given).record
    fastavro.parse_schema(json.loads(text))
