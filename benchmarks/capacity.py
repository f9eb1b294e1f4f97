"""Latency at half load: p50, p99 and p99.9, without other load, and while the node works in the background.

Half load is half of the maximum rate of this run: durable SETs of 50 clients, during which the log of the state store
is applied to LMDB constantly, and messages of QoS 1 to one receiver, one in flight.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings
from benchmarks.generator import Load

__all__ = ["capacity"]

CLIENTS: Final = 50
KEYS: Final = 100_000
RECORDS: Final = 100_000
"""Records of 1 KiB that a producer appends per command."""
STARTED_S: Final = 2.0
"""Seconds after which a background command has started its work."""
TUBE: Final = {"topics": {"background": {}}, "max_store_bytes": 32 << 20, "limits": {"segment_bytes": 8 << 20}}
"""Settings of a topic whose oldest segments are deleted constantly."""


def capacity(settings: Settings) -> list[Figure]:
    """Return rates, and latencies in ms at half of them; with durability ``memory`` next to Mosquitto, durable without
    a peer."""
    figures: dict[tuple[str, str, str], Figure] = {}

    def add(case: str, server: str, unit: str, value: float | None) -> None:
        assert value is not None
        figures.setdefault((case, server, unit), Figure(case, server, unit)).runs.append(value)

    def add_latencies(case: str, server: str, load: Load) -> None:
        for unit, value in (("p50 ms", load.p50_us), ("p99 ms", load.p99_us), ("p99.9 ms", load.p999_us)):
            add(case, server, unit, None if value is None else value / 1000)

    with tempfile.TemporaryDirectory() as folder, servers.penstock_in(folder, "durable", tube=TUBE) as ready:
        values = Path(folder) / "values"
        values.write_text((("x" * 1023) + "\n") * RECORDS, encoding="ascii")
        produce = ["tube", "produce", "background", "--file", str(values), "--tube-master", str(ready["tube_master"])]
        export = ["kv", "export", "*", "--file", f"{folder}/keys", "--broker", f"mqtt://{ready['mqtt']}"]
        backup = ["backup", f"{folder}/backups", "--data-dir", f"{folder}/data", "--keep-last", "2"]
        work: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "": nullcontext,
            ", while a log is written and its oldest segments are deleted": partial(_repeated, produce),
            ", while all keys are exported": partial(_repeated, export),
            ", while the node is backed up": partial(_repeated, backup),
        }
        sets = partial(generator.measure, str(ready["mqtt"]), "statestore", clients=CLIENTS, keys=KEYS)
        sets(op="fill", window=10)
        for _ in range(settings.repeats):
            reached = sets(op="set", seconds=settings.seconds).per_s
            add("durable SET, 50 clients", "penstock", "requests/s", reached)
            for what, background in work.items():
                with background():
                    load = sets(op="set", seconds=settings.seconds, rate=int(reached / 2))
                add_latencies(f"durable SET, half load{what}", "penstock", load)
    with servers.penstock("memory") as ready, servers.mosquitto() as theirs:
        for _ in range(settings.repeats):
            for server, address in (("penstock", str(ready["mqtt"])), ("mosquitto", theirs)):
                reached = generator.measure(address, "qos1", window=1, seconds=settings.seconds).per_s
                add("QoS 1, one in flight", server, "messages/s", reached)
                load = generator.measure(address, "rate", rate=int(reached / 2), seconds=settings.seconds)
                add_latencies("QoS 1, half load", server, load)
    return list(figures.values())


@contextmanager
def _repeated(arguments: Sequence[str]) -> Iterator[None]:
    """Run a command of penstock repeatedly."""
    command = [str(Path(sys.executable).parent / "penstock"), *arguments]
    ended = threading.Event()
    running: list[subprocess.Popen[bytes]] = []
    failed: list[int] = []

    def run() -> None:
        while not ended.is_set() and not failed:
            running[:] = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
            if running[0].wait() and not ended.is_set():
                failed.append(running[0].returncode)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        time.sleep(STARTED_S)
        yield
    finally:
        ended.set()
        for process in running:
            process.terminate()
        thread.join()
    if failed:
        raise SystemExit(f"{' '.join(command)} ended with status {failed[0]}")
