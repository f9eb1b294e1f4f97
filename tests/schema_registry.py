"""A schema registry with the part of Confluent's API that penstock uses, on loopback."""

from __future__ import annotations

import base64
import json
import ssl
import struct
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.http_server import Handler, HttpThread

__all__ = ["Registry", "framed"]


def framed(schema_id: int, record: bytes) -> bytes:
    """A message as Confluent's serializers write it."""
    return struct.pack(">bI", 0, schema_id) + record


def _protobuf(file: FileDescriptorProto, references: Sequence[str]) -> dict[str, Any]:
    # As Confluent's registry, which does not know the name of the file.
    unnamed = FileDescriptorProto.FromString(file.SerializeToString())
    unnamed.ClearField("name")
    return {
        "schema": f"// {file.name}, as text",
        "schemaType": "PROTOBUF",
        "references": [{"name": name, "subject": name, "version": 1} for name in references],
        "serialized": base64.b64encode(unnamed.SerializeToString()).decode(),
    }


def _in_form(schema: dict[str, Any], *, is_serialized: bool) -> dict[str, Any]:
    """The response with ``schema``: Protobuf as a descriptor, other schemas as they are."""
    found = {name: value for name, value in schema.items() if name != "serialized"}
    return {**found, "schema": schema["serialized"]} if is_serialized and "serialized" in schema else found


class Registry(HttpThread):
    """A registry with ``schemas`` by id. A context manager. ``user``: name and password that it requires."""

    def __init__(self, user: tuple[str, str] | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        """Versions of subjects by path."""
        self.subjects: dict[str, list[int]] = {}
        """Ids of the registered schemas, by subject."""
        self.refuse: Callable[[str, str], str | None] = lambda _subject, _schema: None
        """The reason why a subject does not accept a schema."""
        self.requests: list[str] = []
        """Paths of the requests, in their order."""
        self.answer: Callable[[str], tuple[int, bytes] | None] = lambda _path: None
        """Answers instead of the registry, if it is not None."""
        registry = self
        known = None if user is None else base64.b64encode(":".join(user).encode()).decode()

        class _Handler(Handler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self._is_answered():
                    return
                assert self.headers["Content-Type"] == "application/vnd.schemaregistry.v1+json"
                self._respond(*registry.posted(self.path, **json.loads(body)))

            def _is_answered(self) -> bool:
                registry.requests.append(self.path)
                if known is not None and self.headers["Authorization"] != f"Basic {known}":
                    self._respond(401, {"error_code": 40101, "message": "Unauthorized"})
                elif (instead := registry.answer(self.path)) is not None:
                    self._respond(*instead)
                else:
                    return False
                return True

            def do_GET(self) -> None:
                if self._is_answered():
                    return
                path, _, query = self.path.partition("?")
                is_serialized = query == "format=serialized"
                if path == "/schemas/types":
                    self._respond(200, ["JSON", "PROTOBUF", "AVRO"])
                elif path.startswith("/subjects/"):
                    if path not in registry.versions and not registry.has_subject(path):
                        self._respond(404, {"error_code": 40401, "message": "Subject not found."})
                        return
                    unknown = {"error_code": 40402, "message": "Version not found"}
                    known_version = registry.versions.get(path)
                    if known_version is not None:
                        known_version = _in_form(known_version, is_serialized=is_serialized)
                    self._respond(404 if known_version is None else 200, known_version or unknown)
                elif (found := registry.schemas.get(int(path.rpartition("/")[2]))) is not None:
                    self._respond(200, _in_form(found, is_serialized=is_serialized))
                else:
                    self._respond(404, {"error_code": 40403, "message": "Schema not found"})

            def _respond(self, status: int, body: object) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.respond(status, data, "application/vnd.schemaregistry.v1+json")

        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        super().__init__(server)

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self.address}"

    def register(self, schema_id: int, schema: object, **more: object) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.schemas[schema_id] = {"schema": text, **more}

    def register_protobuf(self, schema_id: int, file: FileDescriptorProto, *references: str) -> None:
        """Register a file that imports ``references``, which are registered as the first version of these subjects."""
        self.schemas[schema_id] = _protobuf(file, references)

    def refer_to(self, file: FileDescriptorProto, *references: str) -> None:
        """Register a file as the first version of the subject with its name."""
        self.versions[f"/subjects/{quote(file.name, safe='')}/versions/1"] = _protobuf(file, references)

    def has_subject(self, path: str) -> bool:
        """Whether versions of the subject in ``path`` are registered."""
        subject = path.removeprefix("/subjects/").partition("/")[0]
        return any(each.startswith(f"/subjects/{subject}/") for each in self.versions)

    def posted(self, path: str, schema: str, **more: object) -> tuple[int, object]:
        """Status and body of the response to a request with a schema."""
        if more.get("schemaType") == "PROTOBUF":
            FileDescriptorProto.FromString(base64.b64decode(schema, validate=True))
            # Requested in the other form, see `_in_form`.
            more["serialized"] = schema
        else:
            json.loads(schema)
        checks = path.startswith("/compatibility")
        registers = path.endswith("/versions")
        subject = unquote(path.partition("/subjects/")[2].partition("/")[0])
        ids = self.subjects.get(subject)
        if ids is None and not registers:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        kind = more.get("schemaType", "AVRO")
        known = ((each, self.schemas[each]) for each in ids or ())
        found = next(
            (each for each, of in known if (of["schema"], of.get("schemaType", "AVRO")) == (schema, kind)), None
        )
        if found is not None and not checks:
            return 200, {"subject": subject, "id": found, "version": (ids or []).index(found) + 1, "schema": schema}
        why = self.refuse(subject, schema)
        if checks:
            return 200, {"is_compatible": why is None, "messages": [] if why is None else [why]}
        if not registers:
            return 404, {"error_code": 40403, "message": "Schema not found"}
        if why is not None:
            return 409, {"error_code": 409, "message": f"incompatible with an earlier schema, details: [{why}]"}
        made = max(self.schemas, default=0) + 1
        self.register(made, schema, **more)
        versions = self.subjects.setdefault(subject, [])
        versions.append(made)
        self.versions[f"/subjects/{quote(subject, safe='')}/versions/{len(versions)}"] = self.schemas[made]
        return 200, {"id": made}
