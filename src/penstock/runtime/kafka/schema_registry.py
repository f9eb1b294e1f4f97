"""Client of a schema registry with the REST API of Confluent's."""

from __future__ import annotations

import base64
import http.client
import json
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.runtime.io.network import ConnectionFailure, connection_failure
from penstock.runtime.io.tls import TlsOptions, read_password
from penstock.runtime.kafka.config import SchemaRegistry

__all__ = ["RegisteredSchema", "check_registry", "schema_by_id"]

_TIMEOUT_S: Final = 10.0
"""Seconds until a connection is established, and between two parts of a response."""
_MOST_BYTES: Final = 4 << 20
"""Maximum size of a response: a schema has some kilobytes."""
_UNKNOWN_ID: Final = 40403
"""Error code of an id that no schema has [Confluent's API; the HTTP status is that of any wrong path]."""
_ACCEPT: Final = "application/vnd.schemaregistry.v1+json, application/json"


class RegisteredSchema(NamedTuple):
    """A schema: its text, its ``kind`` (``AVRO``, ``PROTOBUF``, ``JSON``), and the texts of those that it refers to.

    Each of ``references`` is behind those that it refers to itself.
    """

    text: str
    kind: str
    references: tuple[str, ...] = ()


class _Response(NamedTuple):
    status: int
    body: bytes

    @property
    def data(self) -> Any:
        """The JSON of the body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def schema_by_id(registry: SchemaRegistry, schema_id: int) -> RegisteredSchema | None:
    """Return the schema with the id ``schema_id``; None if the registry says that it has none.

    Raises:
        UnavailableError: the registry did not answer, or could not for now.
        RefusedError: it refused the request.
        ConfigError: the URL is not that of a registry, or a file cannot be read.
    """
    path = f"/schemas/ids/{schema_id}"
    found = _get(registry, path)
    data = found.data
    if found.status == HTTPStatus.NOT_FOUND and isinstance(data, dict) and data.get("error_code") == _UNKNOWN_ID:
        return None
    _check_schema(registry, path, found)
    kind, references = str(data.get("schemaType") or "AVRO"), dict[str, str]()
    if kind == "AVRO":
        try:
            _add_references(registry, data, references)
        except (KeyError, TypeError, ValueError) as error:
            raise _no_registry(registry, path, found) from error
    return RegisteredSchema(data["schema"], kind, tuple(references.values()))


def _add_references(registry: SchemaRegistry, data: Any, known: dict[str, str]) -> None:
    """Add the texts of the schemas that the schema ``data`` refers to, which have no cycles, to ``known`` by path."""
    for each in data.get("references") or ():
        path = f"/subjects/{quote(str(each['subject']), safe='')}/versions/{int(each['version'])}"
        if path not in known:
            found = _get(registry, path)
            _check_schema(registry, path, found)
            _add_references(registry, found.data, known)
            known[path] = found.data["schema"]


def _check_schema(registry: SchemaRegistry, path: str, found: _Response) -> None:
    data = found.data
    if found.status != HTTPStatus.OK or not isinstance(data, dict) or not isinstance(data.get("schema"), str):
        raise _no_registry(registry, path, found)


def check_registry(registry: SchemaRegistry) -> None:
    """Check that ``registry`` answers requests, with the credentials. Raises the errors of :func:`schema_by_id`."""
    path = "/schemas/types"
    found = _get(registry, path)
    if found.status != HTTPStatus.OK or not isinstance(found.data, list):
        raise _no_registry(registry, path, found)


def _get(registry: SchemaRegistry, path: str) -> _Response:
    """Return the response to a GET of ``path``, unless it is one that refuses the client, or one of a busy server."""
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
        connection.request("GET", f"{url.path}{path}", headers=_headers(registry))
        with connection.getresponse() as response:
            status, body = response.status, response.read(_MOST_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        why = ConnectionFailure(f"the connection broke: {error!r}")
        if isinstance(error, OSError):
            why = connection_failure(error, host, tls=url.scheme == "https")
        raise UnavailableError(
            f"the schema registry {registry.url} does not answer",
            applied=False,
            why=why.why,
            do=why.do or "start it, or correct `registry`",
        ) from error
    finally:
        connection.close()
    if (
        status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    ):
        raise UnavailableError(
            f"the schema registry {registry.url} does not answer",
            applied=False,
            why=_refusal(status, body),
            do="read the log of the registry",
        )
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise RefusedError(
            f"the schema registry {registry.url} refused the request {path}",
            code=status,
            peer=registry.url,
            why=_refusal(status, body),
            do="check `registry.user` and `password_file`, and the rights of this user",
        )
    return _Response(status, body)


def _headers(registry: SchemaRegistry) -> dict[str, str]:
    headers = {"Accept": _ACCEPT}
    if registry.user is not None and registry.password_file is not None:
        password = read_password(registry.password_file, "registry.password_file")
        token = base64.b64encode(f"{registry.user}:{password}".encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    return headers


def _refusal(status: int, body: bytes) -> str:
    """Return the status, and the message of the registry."""
    data = _Response(status, body).data
    message = data.get("message") if isinstance(data, dict) else None
    return f"it answered with status {status}" + (f": {str(message)[:200]!r}" if message else "")


def _no_registry(registry: SchemaRegistry, path: str, found: _Response) -> ConfigError:
    return ConfigError(
        f"{registry.url} is not a schema registry with the API of Confluent's",
        option="registry.url",
        why=f"{path}: {_refusal(found.status, found.body)}",
        do="correct the URL, with the path of the API: Apicurio's is /apis/ccompat/v7",
    )
