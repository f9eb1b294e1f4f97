from __future__ import annotations

import socket
import sys

import pytest

from penstock.spark.environment import worker_daemon

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can acknowledge at once")


def test_a_worker_acknowledges_at_once_while_it_waits_for_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def carry_out(sock: socket.socket, authenticated: bool) -> int:
        assert authenticated
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1
        return sock.recv(1)[0]

    monkeypatch.setattr(worker_daemon, "_carry_out", carry_out)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as spark:
        sock, _ = server.accept()
        with sock:
            # As after a result: acknowledgements wait for data.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            spark.send(b"\x03")
            assert worker_daemon.worker(sock, authenticated=True) == 3


def test_a_unix_domain_socket_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_daemon, "_carry_out", lambda sock, _: sock.recv(1)[0])
    one, other = socket.socketpair()
    with one, other:
        other.send(b"\x05")
        assert worker_daemon.worker(one, authenticated=False) == 5
