"""Spark's daemon of Python workers, with connections that acknowledge at once; ``spark.python.daemon.module`` names it.

Spark sends a task to a Python worker in several small writes over TCP. By Nagle's algorithm the second one leaves when
the first one is acknowledged, and the worker's kernel may delay an acknowledgement by 40 ms, for data to send with it.
Without the pause a micro-batch with one task in Python took 215 instead of 280 ms (busy machine). Each worker therefore
asks for immediate acknowledgements before it waits for a task; the kernel forgets this when the worker sends data.

Spark can use Unix domain sockets instead (``spark.python.unix.domain.socket.enabled``), which have no such pause. But
then the driver keeps the path of each socket in memory until it ends, and each ``collect`` creates one.

A worker whose connection Spark has closed, because a query was stopped, ends. Spark's daemon would print a traceback
into the output of the run.
"""

from __future__ import annotations

import os
import socket

from pyspark import daemon

__all__ = ["worker"]

_carry_out = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:  # noqa: FBT001 - the signature is Spark's
    """Wait for a task on ``sock`` and carry it out; acknowledge its parts at once. Returns 0 if it can be reused."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    try:
        return _carry_out(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        # Errors of a task are sent to Spark; only those of this connection are raised.
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    # Raise a failure to send a result, which would otherwise be printed.
    os.environ.setdefault("PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE", "true")
    daemon.manager()
