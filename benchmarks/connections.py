"""Memory of an idle connection in a broker: resident memory before and after many clients connected."""

from __future__ import annotations

import resource
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Subscribe, Subscription

__all__ = ["connections_possible", "memory_of_connections", "resident_bytes"]

SPARE_DESCRIPTORS = 200
"""Descriptors that this process and the broker need in addition to the connections."""


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/status does not say VmRSS")


def connections_possible(wanted: int) -> int:
    """Return ``wanted``, or the number of connections that this process may open if it is smaller."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + SPARE_DESCRIPTORS and (hard == resource.RLIM_INFINITY or hard > soft):
        soft = wanted + SPARE_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, soft - SPARE_DESCRIPTORS)


def memory_of_connections(
    address: str, pid: int, count: int, *, subscribe: bool = False, tls: ssl.SSLContext | None = None
) -> float:
    """Return the bytes of resident memory per connection of ``count`` idle clients.

    With ``subscribe`` each has a separate subscription. They disconnect before this returns.
    """
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        warm = _connect(stack, host, int(port), "warm", subscribe=subscribe, tls=tls)
        before = resident_bytes(pid)
        for number in range(count):
            _connect(stack, host, int(port), f"idle-{number:05d}", subscribe=subscribe, tls=tls)
        used = resident_bytes(pid) - before
        warm.sendall(b"\xc0\x00")
        if warm.recv(2) != b"\xd0\x00":
            raise SystemExit("the broker does not answer PINGREQ any more")
    return used / count


def _connect(
    stack: ExitStack, host: str, port: int, client_id: str, *, subscribe: bool, tls: ssl.SSLContext | None
) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=30)
    if tls is not None:
        connection = tls.wrap_socket(connection, server_hostname=host)
    stack.enter_context(connection)
    connection.sendall(encode(Connect(client_id, keep_alive=3600)))
    if connection.recv(256)[:1] != b"\x20":
        raise SystemExit(f"the broker did not accept connection {client_id}")
    if subscribe:
        connection.sendall(encode(Subscribe(1, [Subscription(f"idle/{client_id}/+")])))
        if connection.recv(256)[:1] != b"\x90":
            raise SystemExit(f"the broker did not accept the subscription of {client_id}")
    return connection
