"""Accepted sockets: like those of ``socket.accept``, with numbers for family and type."""

from __future__ import annotations

import socket

import pytest

from penstock.runtime.io.network import accept

DEADLINE_S = 60


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_an_accepted_socket_does_not_block_and_knows_its_peer(family: socket.AddressFamily, host: str) -> None:
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening:
        listening.settimeout(0)
        with pytest.raises(BlockingIOError):
            accept(listening, family)
        listening.settimeout(DEADLINE_S)
        with socket.create_connection(listening.getsockname()[:2], DEADLINE_S) as client:
            accepted, address, port = accept(listening, family)
            with accepted:
                assert (address, port) == client.getsockname()[:2]
                assert (accepted.family, accepted.type) == (family, socket.SOCK_STREAM)
                assert not accepted.get_inheritable()
                with pytest.raises(BlockingIOError):
                    accepted.recv(1)
                accepted.sendall(b"x")
                assert client.recv(1) == b"x"
