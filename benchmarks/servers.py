"""The servers under load, penstock and its peers, each in a separate process on a free loopback port."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import trustme

from tests.ports import free_port

__all__ = [
    "Certificates",
    "certificates",
    "find",
    "mosquitto",
    "mosquitto_process",
    "penstock",
    "penstock_in",
    "redis_process",
]


def find(program: str) -> str | None:
    """Return the path of a program, even if the user's PATH lacks the system folders."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


class Certificates(NamedTuple):
    """PEM files of a server on loopback: its certificate followed by the key, and the authority's certificate."""

    server: str
    authority: str


def certificates(folder: str) -> Certificates:
    """Create certificates for this run in ``folder``; clients use the server's certificate as well, as user
    ``benchmark``."""
    authority, names = trustme.CA(), Certificates(f"{folder}/server.pem", f"{folder}/ca.pem")
    authority.issue_cert("127.0.0.1", common_name="benchmark").private_key_and_cert_chain_pem.write_to_path(
        names.server
    )
    authority.cert_pem.write_to_path(names.authority)
    # Mosquitto reads them as its own user if it is started by root.
    Path(folder).chmod(0o755)
    for name in names:
        Path(name).chmod(0o644)
    return names


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} did not start on port {port}")
        time.sleep(0.05)


@contextmanager
def penstock(
    durability: str, topics: Sequence[str] = (), *, core: str = "", **sections: object
) -> Iterator[dict[str, str]]:
    """Run ``penstock up`` in a temporary data directory; yields its ready line (addresses as host:port).

    ``core``: the form of the core; default: compiled if it was built. ``sections``: further sections of the
    configuration.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        penstock_in(folder, durability, topics, core=core, addresses={}, **sections) as ready,
    ):
        yield ready


@contextmanager
def penstock_in(
    folder: str,
    durability: str,
    topics: Sequence[str] = (),
    *,
    core: str = "",
    addresses: Mapping[str, object] = MappingProxyType({}),
    **sections: object,
) -> Iterator[dict[str, str]]:
    """Like :func:`penstock`, with a folder that is not deleted: a second start finds the stored data.

    ``addresses``: of listeners, by option, that do not select a free port.
    """
    names = ("mqtt", "tube-master", "tube-broker", "tube-broker-http", "http")
    listeners = [f"--{name}={addresses.get(name, '127.0.0.1:0')}" for name in names]
    settings = Path(folder) / "penstock.yaml"
    tube: dict[str, dict[str, object]] = {"tube": {"topics": {topic: {} for topic in topics}}} if topics else {}
    settings.write_text(json.dumps({**tube, **sections}), encoding="utf-8")
    argv = [str(Path(sys.executable).parent / "penstock"), "up", "--json", f"--data-dir={folder}/data"]
    argv += [f"--config={settings}", "--log-level=warning"]
    argv += [f"--durability={durability}", *listeners]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PENSTOCK_CORE": core})
    with ended(process):
        assert process.stdout is not None
        with process.stdout:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("penstock up ended before it was ready")
            yield json.loads(line)


@contextmanager
def mosquitto() -> Iterator[str]:
    """Run Mosquitto like :func:`mosquitto_process`; yields host:port."""
    with mosquitto_process() as (address, _):
        yield address


@contextmanager
def mosquitto_process(listeners: str = "") -> Iterator[tuple[str, int]]:
    """Run Mosquitto without persistence, with TCP_NODELAY, without limits of queues; yields host:port and the process
    id.

    ``listeners``: additional listeners, in the syntax of its configuration file.
    """
    program = find("mosquitto")
    assert program is not None
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "mosquitto.conf"
        settings.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nset_tcp_nodelay true\n"
            f"max_queued_messages 0\nmax_inflight_messages 0\nlog_type none\n{listeners}",
            encoding="utf-8",
        )
        process = subprocess.Popen([program, "-c", str(settings)], stderr=subprocess.DEVNULL)
        with ended(process):
            wait_for(port, process)
            yield f"127.0.0.1:{port}", process.pid


@contextmanager
def redis_process(durability: str, folder: str | None = None) -> Iterator[tuple[int, int]]:
    """Run Redis with an append-only file: fsync on every write for ``durable``, by the kernel for ``flushed``, none for
    ``memory``; yields the port and the process id. Data in ``folder`` is available after a restart."""
    program = find("redis-server")
    assert program is not None
    port = free_port()
    aof = {"durable": ["yes", "always"], "flushed": ["yes", "no"], "memory": ["no", "no"]}[durability]
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder or temporary, "--save", ""]
        options += ["--appendonly", aof[0], "--appendfsync", aof[1]]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        with ended(process):
            wait_for(port, process)
            yield port, process.pid
