"""A metrics page served by a program without an event loop."""

from __future__ import annotations

import socket
import struct
import urllib.request

import pytest

from penstock.errors import ConfigError
from penstock.runtime.observability.metrics import serve_page


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_that_disconnects_is_not_reported(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with serve_page((host, 0), lambda: b"x" * 1_000_000, "text/plain") as address:
            assert address.startswith("[::1]:" if host == "::1" else "127.0.0.1:")
            with socket.create_connection((host, int(address.rpartition(":")[2])), timeout=60) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                assert len(answer.read()) == 1_000_000
    except ConfigError as error:
        pytest.skip(f"no such address here: {error.what}")
    assert capsys.readouterr().err == ""
