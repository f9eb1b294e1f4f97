from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
from typing import IO

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


def test_a_worker_whose_connection_spark_has_closed_ends_without_a_traceback() -> None:
    """As when a query is stopped while the process that reads its source starts."""
    source_runner = "pyspark.sql.streaming.python_streaming_source_runner"
    secret = b"secret"
    environ = {**os.environ, "PYTHON_WORKER_FACTORY_SECRET": secret.decode(), "SPARK_REUSE_WORKER": "1"}
    environ.pop("PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE", None)
    command = [sys.executable, "-m", worker_daemon.__name__, source_runner]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with socket.create_connection(("127.0.0.1", _integer(process.stdout)), timeout=60) as spark:
            received = spark.makefile("rb")
            worker = os.pidfd_open(_integer(received))
            spark.sendall(struct.pack(">i", len(secret)) + secret)
            assert received.read(_integer(received)) == b"ok"
            received.close()
            # The worker is reset when it reads, and cannot send the error.
            spark.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert select.select([worker], [], [], 60)[0], "the worker ends"
        os.close(worker)
        process.stdin.close()
        assert process.stderr.read() == b""


def _integer(stream: IO[bytes]) -> int:
    return int(struct.unpack(">i", stream.read(4))[0])
