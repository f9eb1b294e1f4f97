"""The servers that TLS connections are compared with answer what the benchmark sends, with and without a ticket."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import servers
from benchmarks.floor import tls_floor
from benchmarks.tls import Server, connections


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["tls", "loop-tls"])
def test_connections_are_accepted(way: str, tmp_path: Path) -> None:
    made = servers.certificates(str(tmp_path))
    with tls_floor(way, made.server) as found:
        for resumed in (False, True):
            assert connections(Server(*found), made.authority, 0.1, resumed=resumed) >= 0
