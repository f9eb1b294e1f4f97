"""A schema registry with the part of Confluent's API that penstock uses, on loopback."""

from __future__ import annotations

import base64
import json
import ssl
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Registry", "framed"]


def framed(schema_id: int, record: bytes) -> bytes:
    """A message as Confluent's serializers write it."""
    return struct.pack(">bI", 0, schema_id) + record


class Registry:
    """A registry with ``schemas`` by id. A context manager. ``user``: name and password that it requires."""

    def __init__(self, user: tuple[str, str] | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        """Versions of subjects by path."""
        self.requests: list[str] = []
        """Paths of the requests, in their order."""
        self.answer: Callable[[str], tuple[int, bytes] | None] = lambda _path: None
        """Answers instead of the registry, if it is not None."""
        registry = self
        known = None if user is None else base64.b64encode(":".join(user).encode()).decode()

        class Handler(BaseHTTPRequestHandler):
            timeout = 60

            def do_GET(self) -> None:
                registry.requests.append(self.path)
                if known is not None and self.headers["Authorization"] != f"Basic {known}":
                    self._respond(401, {"error_code": 40101, "message": "Unauthorized"})
                elif (instead := registry.answer(self.path)) is not None:
                    self._respond(*instead)
                elif self.path == "/schemas/types":
                    self._respond(200, ["JSON", "PROTOBUF", "AVRO"])
                elif self.path.startswith("/subjects/"):
                    unknown = {"error_code": 40402, "message": "Version not found"}
                    known_version = registry.versions.get(self.path)
                    self._respond(404 if known_version is None else 200, known_version or unknown)
                elif (found := registry.schemas.get(int(self.path.rpartition("/")[2]))) is not None:
                    self._respond(200, found)
                else:
                    self._respond(404, {"error_code": 40403, "message": "Schema not found"})

            def _respond(self, status: int, body: object) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing: the tests look at ``requests``."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def register(self, schema_id: int, schema: object, **more: object) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.schemas[schema_id] = {"schema": text, **more}

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
