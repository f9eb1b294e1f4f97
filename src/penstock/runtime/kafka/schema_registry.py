"""Client of a schema registry with the REST API of Confluent's."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from penstock.errors import ConfigError, RefusedError, UnavailableError, shortened
from penstock.runtime.io.network import ConnectionFailure, connection_failure
from penstock.runtime.io.tls import TlsOptions, read_password
from penstock.runtime.kafka.config import SchemaRegistry

__all__ = [
    "ImportedSchema",
    "NewSchema",
    "RegisteredSchema",
    "SubjectVersion",
    "check_compatible",
    "check_registry",
    "find_schema",
    "register_schema",
    "schema_by_id",
    "schema_of_subject",
]

_TIMEOUT_S: Final = 10.0
"""Seconds until a connection is established, and between two parts of a response."""
_MOST_BYTES: Final = 4 << 20
"""Maximum size of a response: a schema has some kilobytes."""
_LONGEST_REASON: Final = 600
_UNKNOWN_SCHEMA: Final = 40403
"""Error code of an id that no schema has, and of a schema that a subject does not have [Confluent's API; the HTTP
status is that of any wrong path]."""
_UNKNOWN_SUBJECT: Final = 40401
_UNKNOWN_VERSION: Final = 40402
_MOST_REFERENCES: Final = 200
"""Maximum number of schemas that a schema refers to, also through others."""
_CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_ACCEPT: Final = "application/vnd.schemaregistry.v1+json, application/json"


class RegisteredSchema(NamedTuple):
    """A schema: its text, its ``kind`` (``AVRO``, ``PROTOBUF``, ``JSON``), and the texts of those that it refers to.

    Each of ``references`` is behind those that it refers to itself; ``names`` are what the schemas call them. Those of
    JSON are not requested. Protobuf is a FileDescriptorProto in base64, if it is requested so, and otherwise text
    without references.
    """

    text: str
    kind: str
    references: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class SubjectVersion(NamedTuple):
    """A version of a subject, the id of its schema, and the schema."""

    version: int
    schema_id: int
    schema: RegisteredSchema


@dataclass(frozen=True)
class _Response:
    status: int
    body: bytes

    @cached_property
    def data(self) -> Any:
        """The JSON of the body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def value_of(self, name: str) -> Any:
        """Return a field of the JSON; None if it has none, or is not an object."""
        return self.data.get(name) if isinstance(self.data, dict) else None

    def lacks(self, *codes: int) -> bool:
        """Return True if the registry says, with one of its own ``codes``, that it does not have what is requested."""
        return self.status == HTTPStatus.NOT_FOUND and self.value_of("error_code") in codes


def schema_by_id(registry: SchemaRegistry, schema_id: int, *, serialized: bool = False) -> RegisteredSchema | None:
    """Return the schema with the id ``schema_id``; None if the registry says that it has none.

    ``serialized``: return schemas of Protobuf as descriptors.

    Raises:
        UnavailableError: the registry did not answer, or could not for now.
        RefusedError: it refused the request.
        ConfigError: the URL is not that of a registry, or of one that cannot serialize schemas of Protobuf, or a file
            cannot be read.
    """
    path = f"/schemas/ids/{schema_id}"
    found = _get(registry, path)
    if found.lacks(_UNKNOWN_SCHEMA):
        return None
    return _registered(registry, path, found, serialized=serialized)


def schema_of_subject(registry: SchemaRegistry, subject: str, version: int | None = None) -> SubjectVersion:
    """Return a ``version`` of ``subject``, by default the latest; Protobuf as descriptors.

    Raises:
        RefusedError: the registry has no such subject or version, or refused the request.
        UnavailableError, ConfigError: see :func:`schema_by_id`.
    """
    path = f"/subjects/{quote(subject, safe='')}/versions/{version or 'latest'}"
    found = _get(registry, path)
    if found.lacks(_UNKNOWN_SUBJECT, _UNKNOWN_VERSION):
        what = f"version {version} of the subject {subject!r}" if version else f"the subject {subject!r}"
        raise RefusedError(
            f"the schema registry {registry.url} does not have {what}",
            code=found.status,
            peer=registry.url,
            why=_refusal(found),
            hint=f"list what it has: GET {registry.url}/subjects, and versions of one at /subjects/SUBJECT/versions",
        )
    schema, data = _registered(registry, path, found, serialized=True), found.data
    if not isinstance(data.get("id"), int) or not isinstance(data.get("version"), int):
        raise _no_registry(registry, path, found)
    return SubjectVersion(data["version"], data["id"], schema)


def _registered(registry: SchemaRegistry, path: str, found: _Response, *, serialized: bool) -> RegisteredSchema:
    """Return the schema in the response to a request of ``path``, with those that it refers to."""
    _check_schema(registry, path, found)
    kind = str(found.data.get("schemaType") or "AVRO")
    is_descriptor = serialized and kind == "PROTOBUF"
    if is_descriptor:
        # Only now: registries refuse the format for other schemas.
        found = _serialized(registry, path)
    data, references = found.data, dict[str, _Reference]()
    if is_descriptor or kind == "AVRO":
        try:
            _add_references(registry, data, references, (path,), serialized=is_descriptor)
        except (KeyError, TypeError, ValueError) as error:
            raise _no_registry(registry, path, found) from error
    texts = tuple(each.text for each in references.values())
    names = tuple(each.name for each in references.values()) if is_descriptor else ()
    return RegisteredSchema(data["schema"], kind, texts, names)


class _Reference(NamedTuple):
    text: str
    name: str


def _add_references(
    registry: SchemaRegistry, data: Any, known: dict[str, _Reference], inside: tuple[str, ...], *, serialized: bool
) -> None:
    """Add the texts of the schemas that the schema ``data`` refers to, to ``known`` by path.

    ``inside``: the paths from the first schema to ``data``. A registry accepts a reference only to a version that
    exists, so references have no cycles; the check is for one that is not what it should be.
    """
    for each in data.get("references") or ():
        path = f"/subjects/{quote(str(each['subject']), safe='')}/versions/{int(each['version'])}"
        if path in inside:
            raise _wrong_references(registry, inside[0], f"{path} refers to itself")
        if path in known:
            continue
        if len(known) + len(inside) > _MOST_REFERENCES:
            raise _wrong_references(registry, inside[0], f"it refers to more than {_MOST_REFERENCES} schemas")
        found = _serialized(registry, path) if serialized else _get(registry, path)
        _check_schema(registry, path, found)
        _add_references(registry, found.data, known, (*inside, path), serialized=serialized)
        known[path] = _Reference(found.data["schema"], str(each["name"]) if serialized else "")


def _serialized(registry: SchemaRegistry, path: str) -> _Response:
    """Return the response to a request of a schema of Protobuf as a descriptor.

    Raises:
        ConfigError: the registry returned another form, or does not know this one.
    """
    found = _get(registry, f"{path}?format=serialized")
    if found.status in (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        raise _not_serialized(registry, path, _refusal(found))
    _check_schema(registry, path, found)
    try:
        base64.b64decode(found.data["schema"], validate=True)
    except ValueError:
        raise _not_serialized(registry, path, "it answered with the text of the schema") from None
    return found


def _not_serialized(registry: SchemaRegistry, path: str, why: str) -> ConfigError:
    return ConfigError(
        f"the schema registry {registry.url} does not return schemas of Protobuf as descriptors",
        option="registry.url",
        why=f"{path}?format=serialized: {why}",
        hint="use a version of the registry with this parameter (Redpanda: 25.2 or later), or set schema_id instead of "
        "registry, with a descriptor set of protoc for each schema",
    )


def _wrong_references(registry: SchemaRegistry, path: str, why: str) -> ConfigError:
    return ConfigError(
        f"the schema {path} of {registry.url} cannot be read",
        option="registry.url",
        why=f"{why}: a registry with the API of Confluent's has no such references",
        hint="check the registry, and its version; messages with this schema cannot be read",
    )


def _check_schema(registry: SchemaRegistry, path: str, found: _Response) -> None:
    if found.status != HTTPStatus.OK or not isinstance(found.value_of("schema"), str):
        raise _no_registry(registry, path, found)


def check_registry(registry: SchemaRegistry) -> None:
    """Check that ``registry`` answers requests, with the credentials. Raises the errors of :func:`schema_by_id`."""
    path = "/schemas/types"
    found = _get(registry, path)
    if found.status != HTTPStatus.OK or not isinstance(found.data, list):
        raise _no_registry(registry, path, found)


class ImportedSchema(NamedTuple):
    """A file that a schema of Protobuf imports, and what it imports itself."""

    name: str
    text: str
    imports: tuple[str, ...] = ()


class NewSchema(NamedTuple):
    """A schema that is registered, or looked up: its text, its ``kind``, and the ``imports`` of Protobuf.

    ``files`` have the schemas that it imports, also through others, each behind those that it imports itself. They are
    in subjects with their names, as with the default of Confluent's serializers.
    """

    text: str
    kind: str = "AVRO"
    imports: tuple[str, ...] = ()
    files: tuple[ImportedSchema, ...] = ()


def find_schema(registry: SchemaRegistry, subject: str, schema: NewSchema) -> int | None:
    """Return the id of ``schema`` if a version of ``subject`` has it, otherwise None.

    Raises the errors of :func:`schema_by_id`.
    """
    path = f"/subjects/{quote(subject, safe='')}"
    body = _body(registry, schema)
    found = None if body is None else _request(registry, "POST", path, body)
    if found is None or found.lacks(_UNKNOWN_SUBJECT, _UNKNOWN_SCHEMA):
        return None
    return _schema_id(registry, subject, path, found)


def register_schema(registry: SchemaRegistry, subject: str, schema: NewSchema) -> int:
    """Register ``schema`` as a version of ``subject``, unless it is one, after what it imports; return its id.

    Raises:
        RefusedError: the registry refused the schema: it is incompatible with an earlier version, or invalid; or it
            refused the client.
        UnavailableError, ConfigError: see :func:`schema_by_id`.
    """
    body = _body(registry, schema, registers=True)
    assert body is not None, "what it imports is registered"
    return _register(registry, subject, body)


def check_compatible(registry: SchemaRegistry, subject: str, schema: NewSchema) -> None:
    """Check that ``subject`` accepts ``schema`` after its latest version, if what it imports is registered.

    The errors are those of :func:`register_schema`, which may refuse it because of an older version.
    """
    path = f"/compatibility/subjects/{quote(subject, safe='')}/versions/latest"
    body = _body(registry, schema)
    found = None if body is None else _request(registry, "POST", f"{path}?verbose=true", body)
    if found is None or found.lacks(_UNKNOWN_SUBJECT, _UNKNOWN_VERSION):
        return
    compatible = found.value_of("is_compatible")
    if found.status == HTTPStatus.OK and isinstance(compatible, bool):
        if not compatible:
            messages = found.value_of("messages")
            why = "; ".join(map(str, messages)) if isinstance(messages, list) else ""
            raise _refused(registry, subject, found.status, why or "it is incompatible with the latest version")
        return
    _schema_id(registry, subject, path, found)


def _body(registry: SchemaRegistry, schema: NewSchema, *, registers: bool = False) -> _SchemaBody | None:
    """Return ``schema`` with references to what it imports; None if that is not registered, and not now."""
    versions: dict[str, int] = {}

    def body(text: str, imports: Iterable[str]) -> _SchemaBody:
        return _SchemaBody(text, schema.kind, tuple((name, versions[name]) for name in imports))

    for file in schema.files:
        given, path = body(file.text, file.imports), f"/subjects/{quote(file.name, safe='')}"
        if registers:
            _register(registry, file.name, given)
        found = _request(registry, "POST", path, given)
        if found.lacks(_UNKNOWN_SUBJECT, _UNKNOWN_SCHEMA) and not registers:
            return None
        _schema_id(registry, file.name, path, found)
        version = found.value_of("version")
        if not isinstance(version, int):
            raise _no_registry(registry, path, found)
        versions[file.name] = version
    return body(schema.text, schema.imports)


def _register(registry: SchemaRegistry, subject: str, body: _SchemaBody) -> int:
    path = f"/subjects/{quote(subject, safe='')}/versions"
    return _schema_id(registry, subject, path, _request(registry, "POST", path, body))


def _schema_id(registry: SchemaRegistry, subject: str, path: str, found: _Response) -> int:
    """Return the id in the response to a request with a schema for ``subject``."""
    if found.status in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
        raise _refused(registry, subject, found.status, str(found.value_of("message") or "it gives no reason"))
    schema_id = found.value_of("id")
    if found.status != HTTPStatus.OK or not isinstance(schema_id, int) or not 0 <= schema_id < 1 << 32:
        raise _no_registry(registry, path, found)
    return schema_id


def _refused(registry: SchemaRegistry, subject: str, status: int, why: str) -> RefusedError:
    return RefusedError(
        f"the schema registry {registry.url} refused the schema of the subject {subject!r}",
        code=status,
        text=why,
        peer=registry.url,
        why=shortened(" ".join(why.split()), _LONGEST_REASON),
        hint="keep the columns of the subject and their types, or write to another subject; new columns are compatible "
        "if the schema is derived from the columns",
    )


def _get(registry: SchemaRegistry, path: str) -> _Response:
    return _request(registry, "GET", path)


class _SchemaBody(NamedTuple):
    """A schema, as a request has it; ``imports`` are subjects, which have the names of the imports, and versions."""

    text: str
    kind: str
    imports: tuple[tuple[str, int], ...] = ()

    def encoded(self) -> bytes:
        found: dict[str, object] = {"schema": self.text}
        # Not for Avro, which registries without other formats have no name for.
        if self.kind != "AVRO":
            found["schemaType"] = self.kind
        if self.imports:
            found["references"] = [{"name": name, "subject": name, "version": n} for name, n in self.imports]
        return json.dumps(found).encode()


def _request(registry: SchemaRegistry, method: str, path: str, schema: _SchemaBody | None = None) -> _Response:
    """Return the response to a request with ``schema``, unless it refuses the client, or is one of a busy server."""
    url = urlsplit(registry.url)
    host = url.hostname or ""
    # Not urllib, which would send the password to a proxy set in the environment, and to where a response redirects it.
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        tls = TlsOptions(ca_file=registry.ca).context()
        connection = http.client.HTTPSConnection(host, url.port, timeout=_TIMEOUT_S, context=tls)
    else:
        connection = http.client.HTTPConnection(host, url.port, timeout=_TIMEOUT_S)
    try:
        headers, body = _headers(registry), None
        if schema is not None:
            headers["Content-Type"], body = _CONTENT_TYPE, schema.encoded()
        connection.request(method, f"{url.path}{path}", body=body, headers=headers)
        with connection.getresponse() as response:
            found = _Response(response.status, response.read(_MOST_BYTES + 1))
    except (OSError, http.client.HTTPException) as error:
        why = ConnectionFailure(f"the connection broke: {error!r}")
        if isinstance(error, OSError):
            why = connection_failure(error, host, tls=url.scheme == "https")
        raise UnavailableError(
            f"the schema registry {registry.url} does not answer",
            applied=False,
            why=why.why,
            hint=why.hint or "start it, or correct `registry`",
        ) from error
    finally:
        connection.close()
    if found.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or (
        found.status >= HTTPStatus.INTERNAL_SERVER_ERROR and found.status != HTTPStatus.NOT_IMPLEMENTED
    ):
        raise UnavailableError(
            f"the schema registry {registry.url} does not answer",
            applied=False,
            why=_refusal(found),
            hint="read the log of the registry",
        )
    if found.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise RefusedError(
            f"the schema registry {registry.url} refused the request {path}",
            code=found.status,
            peer=registry.url,
            why=_refusal(found),
            hint="check `registry.user` and `password_file`, and the rights of this user",
        )
    return found


def _headers(registry: SchemaRegistry) -> dict[str, str]:
    headers = {"Accept": _ACCEPT}
    if registry.user is not None and registry.password_file is not None:
        password = read_password(registry.password_file, "registry.password_file")
        token = base64.b64encode(f"{registry.user}:{password}".encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    return headers


def _refusal(found: _Response) -> str:
    """Return the status, and the message of the registry."""
    message = found.value_of("message")
    return f"it answered with status {found.status}" + (f": {str(message)[:200]!r}" if message else "")


def _no_registry(registry: SchemaRegistry, path: str, found: _Response) -> ConfigError:
    return ConfigError(
        f"{registry.url} is not a schema registry with the API of Confluent's",
        option="registry.url",
        why=f"{path}: {_refusal(found)}",
        hint="correct the URL, with the path of the API: Apicurio's is /apis/ccompat/v7",
    )
