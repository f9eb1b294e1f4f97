"""The state store next to Redis: SET, GET and both, of 64 bytes, by the same generator, over MQTT with the properties
that the SDKs send, and over Redis's own protocol; and the memory and start-up time of many keys."""

from __future__ import annotations

import socket
import tempfile
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings, alternate
from penstock.runtime.io.files import Durability
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.storage import NODE, Storage

__all__ = ["many_keys", "own_memory", "state_store"]

KEYS: Final = 1000
"""Number of keys in the requests."""
LONGEST_S: Final = 0.6
"""Maximum seconds of one run: there are 144 runs by default, which must take less than three minutes."""
_BATCH: Final = 20_000


def state_store(settings: Settings) -> list[Figure]:
    """Measure requests per second, one in flight per client; with the default durability also in memory.

    Redis has the same guarantee: fsync after every command (durable), or never (memory).
    """
    durabilities = ["memory", "durable"] if settings.durability == "durable" else [settings.durability]
    seconds = min(settings.seconds, LONGEST_S)
    figures: list[Figure] = []
    for durability in durabilities:
        with servers.penstock(durability) as ready, servers.redis_process(durability) as (port, pid):
            ours = partial(generator.measure, str(ready["mqtt"]), "statestore", pid=ready["pid"], keys=KEYS)
            theirs = partial(generator.measure, f"127.0.0.1:{port}", "resp", pid=pid, keys=KEYS)
            for fill in (ours, theirs):
                fill(op="fill", clients=10, window=10)
            for op, words in (("set", "SET"), ("get", "GET"), ("mix", "9 GET : 1 SET")):
                for clients in (1, 10, 50, 200):
                    options = {"op": op, "clients": clients, "seconds": seconds}
                    runners = {"penstock": partial(ours, **options), "redis": partial(theirs, **options)}
                    case = f"state store {words}, {clients} client{'s' * (clients > 1)}, {durability}"
                    figures += alternate(settings, case, "requests/s", runners)
    return figures


def many_keys(settings: Settings) -> list[Figure]:
    """Measure the additional start-up time for ``settings.keys`` keys of 64 bytes, and the private memory of the
    process per key; each run uses a new process."""
    count = settings.keys
    with tempfile.TemporaryDirectory() as folder:
        full, empty = Path(folder) / "full", Path(folder) / "empty"
        for data in (full, empty):
            data.mkdir()
            _start(servers.penstock_in(str(data), "memory"))  # creates the data directory
        _fill_store(full / "data" / "statestore", count)
        with servers.redis_process("memory", folder) as (port, _):
            generator.measure(f"127.0.0.1:{port}", "resp", op="fill", clients=4, window=100, keys=count)
            _ask_redis(port, b"SAVE\r\n")
        runs: dict[str, list[tuple[float, float]]] = {"penstock": [], "redis": []}
        for _ in range(settings.repeats):
            seconds, size = _start(servers.penstock_in(str(full), "memory"))
            least, without = _start(servers.penstock_in(str(empty), "memory"))
            runs["penstock"].append((seconds - least, (size - without) / count))
            seconds, size = _start(servers.redis_process("memory", folder))
            runs["redis"].append((seconds, size / count))
    figures = []
    for server, found in runs.items():
        figures.append(Figure(f"start with {count:,} keys", server, "ms", [1000 * seconds for seconds, _ in found]))
        figures.append(Figure(f"memory of {count:,} keys", server, "bytes/key", [size for _, size in found]))
    return figures


def _fill_store(path: Path, count: int) -> None:
    """Create a store with this number of keys, like the server."""
    storage = Storage(path, Durability.MEMORY)
    storage.open()
    for first in range(0, count, _BATCH):
        records = [
            Record(b"load/key/%07d" % n, b"v" * 64, Hlc(1_700_000_000_000, n, NODE))
            for n in range(first, min(count, first + _BATCH))
        ]
        storage.commit([Change(record.key, record, record.version) for record in records])
    storage.close()


def _start(server: AbstractContextManager[dict[str, str] | tuple[int, int]]) -> tuple[float, int]:
    """Return the seconds until the server answers, and its private memory in bytes at that time."""
    began = time.perf_counter()
    with server as ready:
        if isinstance(ready, tuple):
            port, pid = ready
            while _ask_redis(port, b"PING\r\n") != b"+PONG\r\n":
                time.sleep(0.01)
        else:
            pid = int(ready["pid"])
        return time.perf_counter() - began, own_memory(pid)


def own_memory(pid: int) -> int:
    """Return the resident memory of a process without pages of files, so that the kernel's cache of the store is not
    counted."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/status has no RssAnon")


def _ask_redis(port: int, command: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.sendall(command)
        return s.recv(4096)
