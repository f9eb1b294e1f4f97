"""An HTTP server of a test, on loopback and in a thread of its own."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Self

__all__ = ["Handler", "HttpThread"]


class Handler(BaseHTTPRequestHandler):
    """A handler of requests without an access log."""

    timeout = 60

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def respond(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class HttpThread:
    """Runs ``server``. A context manager."""

    def __init__(self, server: HTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
