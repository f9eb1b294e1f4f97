"""One page of metrics served from a thread, for programs that have no event loop."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import ConfigError

__all__ = ["page_at"]

_log = logging.getLogger("penstock.metrics")

CLIENT_S = 10.0
"""Seconds that a client may be silent: each has a thread."""
PATHS = frozenset({"/", "/metrics"})


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - given by the server
        """A client that went away in the middle of an answer is no news; the server would print a traceback."""
        _log.debug("a scrape of %s failed", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


@contextmanager
def page_at(address: tuple[str, int], page: Callable[[], bytes], content_type: str) -> Iterator[str]:
    """Serve ``page`` as ``/metrics`` at ``address`` inside the block; gives ``HOST:PORT`` as bound.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in PATHS:
                self.send_error(404)
                return
            body = page()
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """A scrape every few seconds is no news."""

    host, port = address
    shown = f"[{host}]" if ":" in host else host
    try:
        server = (_Server6 if ":" in host else _Server)(address, Handler)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {shown}:{port}: {error.strerror}",
            option="metrics",
            do="choose a free port, or port 0 for any",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="penstock-metrics", daemon=True)
    thread.start()
    try:
        yield f"{shown}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
