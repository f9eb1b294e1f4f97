"""Client of a schema registry, against a small one on loopback."""

from __future__ import annotations

import base64
import json
import ssl
from pathlib import Path

import pytest
import trustme
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from pydantic import ValidationError

from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.runtime.kafka.config import SchemaRegistry
from penstock.runtime.kafka.schema_registry import (
    ImportedSchema,
    NewSchema,
    RegisteredSchema,
    check_compatible,
    check_registry,
    find_schema,
    register_schema,
    schema_by_id,
    schema_of_subject,
)
from tests.ports import free_port
from tests.schema_registry import Registry

INT, LONG, STRING = (NewSchema(f'"{name}"') for name in ("int", "long", "string"))


def test_schemas_are_found_by_their_id() -> None:
    with Registry() as registry:
        registry.register(7, '"int"')
        registry.register(8, "syntax = ...", schemaType="PROTOBUF", references=[{"name": "other"}])
        options = SchemaRegistry(url=f"{registry.url}/")
        check_registry(options)
        assert schema_by_id(options, 7) == RegisteredSchema('"int"', "AVRO")
        assert schema_by_id(options, 8) == RegisteredSchema("syntax = ...", "PROTOBUF")
        assert schema_by_id(options, 9) is None
        assert registry.requests == ["/schemas/types", "/schemas/ids/7", "/schemas/ids/8", "/schemas/ids/9"]


def test_schemas_that_a_schema_refers_to_are_found(tmp_path: Path) -> None:
    """Each once, before those that refer to it."""
    with Registry() as registry:
        names = [{"name": name, "subject": name, "version": 2} for name in ("plant/Site", "Hall")]
        registry.register(7, '"top"', references=names)
        registry.versions["/subjects/plant%2FSite/versions/2"] = {"schema": '"site"', "references": names[1:]}
        registry.versions["/subjects/Hall/versions/2"] = {"schema": '"hall"'}
        options = SchemaRegistry(url=registry.url)
        assert schema_by_id(options, 7) == RegisteredSchema('"top"', "AVRO", ('"hall"', '"site"'))
        del registry.versions["/subjects/Hall/versions/2"]
        with pytest.raises(ConfigError) as caught:
            schema_by_id(options, 7)
        assert "/subjects/Hall/versions/2: it answered with status 404" in (caught.value.why or "")


def test_schemas_of_protobuf_are_returned_as_descriptors() -> None:
    site, hall = FileDescriptorProto(name="plant/site.proto"), FileDescriptorProto(name="hall.proto")
    with Registry() as registry:
        options = SchemaRegistry(url=registry.url)
        registry.refer_to(hall)
        registry.refer_to(site, hall.name)
        registry.register_protobuf(7, FileDescriptorProto(package="plant"), site.name)
        found = schema_by_id(options, 7, serialized=True)
        assert found == RegisteredSchema("EgVwbGFudA==", "PROTOBUF", ("", ""), ("hall.proto", "plant/site.proto"))
        # Other schemas in the usual form, which registries may not serialize.
        registry.register(8, '"int"')
        registry.requests.clear()
        assert schema_by_id(options, 8, serialized=True) == RegisteredSchema('"int"', "AVRO")
        assert registry.requests == ["/schemas/ids/8"]
        registry.versions["/subjects/a/versions/latest"] = {**registry.schemas[7], "id": 7, "version": 1}
        assert schema_of_subject(options, "a").schema == found
        # Older ones ignore the parameter.
        del registry.schemas[7]["serialized"]
        with pytest.raises(ConfigError, match="does not return schemas of Protobuf as descriptors") as caught:
            schema_by_id(options, 7, serialized=True)
        assert caught.value.why == "/schemas/ids/7?format=serialized: it answered with the text of the schema"
        for status, kind in ((501, ConfigError), (422, ConfigError), (500, UnavailableError), (503, UnavailableError)):
            registry.answer = lambda path, status=status: (status, b"{}") if "serialized" in path else None  # type: ignore[misc]  # bound now
            with pytest.raises(kind):
                schema_by_id(options, 7, serialized=True)
        registry.answer = lambda _path: (501, b"{}")
        with pytest.raises(ConfigError, match="is not a schema registry"):
            schema_by_id(options, 7)


def test_references_without_an_end_are_an_error() -> None:
    """Those that form a cycle, and a chain of ever new ones, of a registry that is not what it should be."""
    with Registry() as registry:
        options = SchemaRegistry(url=registry.url)
        others = [{"name": name, "subject": name, "version": 1} for name in ("a", "b")]
        registry.register(7, '"top"', references=others[:1])
        registry.versions["/subjects/a/versions/1"] = {"schema": '"a"', "references": others[1:]}
        registry.versions["/subjects/b/versions/1"] = {"schema": '"b"', "references": others[:1]}
        with pytest.raises(ConfigError, match=r"the schema /schemas/ids/7 of .* cannot be read") as caught:
            schema_by_id(options, 7)
        assert "/subjects/a/versions/1 refers to itself" in (caught.value.why or "")

        def endless(path: str) -> tuple[int, bytes] | None:
            if "versions" not in path:
                return None
            version = int(path.rpartition("/")[2]) + 1
            reference = {"name": "a", "subject": "a", "version": version}
            return 200, json.dumps({"schema": '"a"', "references": [reference]}).encode()

        registry.answer = endless
        registry.requests.clear()
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            schema_by_id(options, 7)
        assert "refers to more than 200 schemas" in (caught.value.why or "")
        assert len(registry.requests) == 201

        def wide(path: str) -> tuple[int, bytes] | None:
            names = [{"name": f"n{n}", "subject": f"n{n}", "version": 1} for n in range(250 * ("ids" in path))]
            return 200, json.dumps({"schema": '"a"', "references": names}).encode()

        registry.answer = wide
        with pytest.raises(ConfigError, match="cannot be read"):
            schema_by_id(options, 7)


def test_schemas_are_registered_once() -> None:
    with Registry() as registry:
        options = SchemaRegistry(url=registry.url)
        assert find_schema(options, "plant/a-value", INT) is None
        check_compatible(options, "plant/a-value", INT)
        assert registry.subjects == {}
        assert [register_schema(options, "plant/a-value", each) for each in (INT, LONG, INT)] == [1, 2, 1]
        assert registry.subjects == {"plant/a-value": [1, 2]}
        assert find_schema(options, "plant/a-value", LONG) == 2
        assert find_schema(options, "plant/a-value", STRING) is None
        assert registry.requests[:3] == [
            "/subjects/plant%2Fa-value",
            "/compatibility/subjects/plant%2Fa-value/versions/latest?verbose=true",
            "/subjects/plant%2Fa-value/versions",
        ]


def test_a_schema_is_registered_with_its_type() -> None:
    with Registry() as registry:
        options = SchemaRegistry(url=registry.url)
        text = base64.b64encode(FileDescriptorProto(name="a.proto").SerializeToString()).decode()
        json_schema, protobuf = NewSchema("{}", "JSON"), NewSchema(text, "PROTOBUF")
        assert [register_schema(options, "abc"[n], each) for n, each in enumerate((json_schema, protobuf, INT))] == [
            *(1, 2, 3)
        ]
        assert [registry.schemas[each].get("schemaType") for each in (1, 2, 3)] == ["JSON", "PROTOBUF", None]
        assert find_schema(options, "a", json_schema) == 1
        assert find_schema(options, "a", NewSchema("{}")) is None
        registry.refuse = lambda _subject, schema: f"{schema} is not compatible"
        with pytest.raises(RefusedError, match="refused the schema of the subject 'b'") as refused:
            check_compatible(options, "b", protobuf)
        assert refused.value.why == f"{text} is not compatible"


def test_what_a_schema_imports_is_registered_before_it() -> None:
    texts = [
        base64.b64encode(FileDescriptorProto(name=name).SerializeToString()).decode() for name in ("a", "b", "main")
    ]
    files = (ImportedSchema("a.proto", texts[0]), ImportedSchema("x/b.proto", texts[1], ("a.proto",)))
    schema = NewSchema(texts[2], "PROTOBUF", ("a.proto", "x/b.proto"), files)
    with Registry() as registry:
        options = SchemaRegistry(url=registry.url)
        assert find_schema(options, "t-value", schema) is None
        # What is not registered cannot be compared.
        check_compatible(options, "t-value", schema)
        assert registry.requests == ["/subjects/a.proto"] * 2
        # Another version of the same file.
        register_schema(options, "x/b.proto", NewSchema(texts[2], "PROTOBUF"))
        assert register_schema(options, "t-value", schema) == 4
        a, b = ({"name": name, "subject": name, "version": n} for name, n in (("a.proto", 1), ("x/b.proto", 2)))
        assert [registry.schemas[n].get("references") for n in (2, 3, 4)] == [None, [a], [a, b]]
        assert find_schema(options, "t-value", schema) == 4
        assert register_schema(options, "t-value", schema) == 4
        registry.answer = lambda _path: (200, b'{"id": 1}')
        with pytest.raises(ConfigError, match="is not a schema registry"):
            find_schema(options, "t-value", schema)


def test_a_refused_schema_is_an_error_with_the_reason_of_the_registry() -> None:
    with Registry() as registry:
        options = SchemaRegistry(url=registry.url)
        register_schema(options, "a", INT)
        registry.refuse = lambda subject, schema: f"{subject}: {schema} is not compatible"
        for ask in (register_schema, check_compatible):
            with pytest.raises(RefusedError, match="refused the schema of the subject 'a'") as refused:
                ask(options, "a", STRING)
            assert 'a: "string" is not compatible' in (refused.value.why or "")
            assert "another subject" in (refused.value.hint or "")
        assert registry.subjects == {"a": [1]}
        registry.answer = lambda _path: (422, b'{"error_code": 42201, "message": "Invalid schema"}')
        with pytest.raises(RefusedError) as refused:
            register_schema(options, "a", INT)
        assert refused.value.why == "Invalid schema"
        for status, body in ((200, b'{"id": "1"}'), (200, b"[]"), (404, b"<html>"), (404, b'{"error_code": 404}')):
            registry.answer = lambda _path, given=(status, body): given  # type: ignore[misc]  # bound now
            for request in (register_schema, check_compatible, find_schema):
                with pytest.raises(ConfigError, match="is not a schema registry"):
                    request(options, "a", INT)


def test_user_and_password_are_sent_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    (tmp_path / "password").write_text("secret\n")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trusted = {"ca": tmp_path / "ca.pem"}
    user = {"user": "app", "password_file": tmp_path / "password"}
    with Registry(("app", "secret"), context) as registry:
        registry.register(7, '"int"')
        assert schema_by_id(SchemaRegistry.model_validate({"url": registry.url, **trusted, **user}), 7) is not None
        with pytest.raises(RefusedError, match="refused the request /schemas/ids/7") as refused:
            schema_by_id(SchemaRegistry.model_validate({"url": registry.url, **trusted}), 7)
        assert refused.value.why == "it answered with status 401: 'Unauthorized'"
        assert "registry.user" in (refused.value.hint or "")
        with pytest.raises(UnavailableError, match="does not answer") as untrusted:
            schema_by_id(SchemaRegistry.model_validate({"url": registry.url, **user}), 7)
        assert "certificate" in (untrusted.value.why or "")
        (tmp_path / "password").unlink()
        with pytest.raises(ConfigError, match=r"registry\.password_file"):
            schema_by_id(SchemaRegistry.model_validate({"url": registry.url, **trusted, **user}), 7)


@pytest.mark.parametrize(
    ("status", "body", "kind", "why"),
    [
        (404, b'{"error_code": 404, "message": "HTTP 404 Not Found"}', ConfigError, "status 404: 'HTTP 404 Not Found'"),
        (404, b"<html>", ConfigError, "/schemas/ids/7: it answered with status 404"),
        (200, b"<html>", ConfigError, "/schemas/ids/7: it answered with status 200"),
        (200, b'{"schema": 5}', ConfigError, "status 200"),
        (200, b'{"schema": "", "references": [{"subject": "a"}]}', ConfigError, "status 200"),
        (302, b"", ConfigError, "status 302"),
        (403, b"{}", RefusedError, "it answered with status 403"),
        (429, b"", UnavailableError, "it answered with status 429"),
        (500, b'{"error_code": 50001, "message": "store"}', UnavailableError, "status 500: 'store'"),
    ],
)
def test_an_id_is_unknown_only_if_the_registry_says_so(
    status: int, body: bytes, kind: type[PenstockError], why: str
) -> None:
    with Registry() as registry:
        registry.answer = lambda _path: (status, body)
        with pytest.raises(kind) as caught:
            schema_by_id(SchemaRegistry(url=registry.url), 7)
        assert why in (caught.value.why or "")
        with pytest.raises(kind):
            check_registry(SchemaRegistry(url=registry.url))


def test_a_registry_that_is_down_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"the schema registry http://127.0.0.1:\d+ does not answer"):
        schema_by_id(SchemaRegistry(url=f"http://127.0.0.1:{free_port()}"), 7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"url": "registry:8081"}, "expected http://HOST:PORT or https://HOST/PATH"),
        ({"url": "https://"}, "expected http://HOST:PORT or https://HOST/PATH"),
        ({"url": "https://app:secret@registry"}, "expected a URL without credentials"),
        ({"url": "https://registry", "user": "app"}, "set both, or none of them"),
        ({"url": "http://registry", "user": "app", "password_file": "p"}, "expected https with user"),
        ({"url": "http://registry", "ca": "ca.pem"}, "expected ca only with https"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, str], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected) as caught:
        SchemaRegistry.model_validate(options)
    assert "secret" not in str(caught.value.errors(include_input=False))
