"""The machine, interpreter and versions of a measurement, which are stored with each figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks import servers
from penstock import compiled
from tools.core import is_release

__all__ = ["CpuByKind", "cpu_of_tree", "describe", "family", "kind_of"]

PACKAGES = ("penstock", "uvloop", "lmdb", "protobuf", "numpy", "pyspark", "pyarrow")
PEERS = {"mosquitto": "-h", "redis-server": "--version"}
"""Peers that are programs, and the option with which each prints its version."""


def family(root: int) -> dict[int, list[str]]:
    """Return the fields of ``/proc/PID/stat`` from the state on, by process, of a process and its descendants."""
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # the process has ended; its parent includes it
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                found[int(entry.name)] = text.rpartition(")")[2].split()
    ours = {root}
    while more := {pid for pid, fields in found.items() if int(fields[1]) in ours} - ours:
        ours |= more
    return {pid: found[pid] for pid in ours if pid in found}


def cpu_of_tree() -> float:
    """Return the processor seconds of this process and its descendants, which depend little on the load of the
    machine."""
    return _seconds(family(os.getpid()).values())


def kind_of(process: int, driver: int) -> str:
    """Return the kind of a process of a Spark application that ``driver`` started: ``driver``, ``JVM`` or ``workers``.

    Raises:
        OSError: it has ended.
    """
    if process == driver:
        return "driver"
    program = Path(f"/proc/{process}/cmdline").read_bytes().partition(b"\0")[0].decode()
    return "JVM" if Path(program).name == "java" else "workers"


class CpuByKind:
    """The processor seconds of this process, or another ``driver``, and of its descendants since the creation, by kind
    (:func:`kind_of`).

    ``servers``: names of processes that are none of Spark's, each with its descendants. Of a process that ends, the
    time after the last :meth:`sample` is lost.
    """

    def __init__(self, driver: int, servers: Mapping[int, str]) -> None:
        self._driver = driver
        self._servers = servers
        self._kinds: dict[int, str] = {}
        self._last: dict[int, float] = {}
        self.sample()
        self._first = dict(self._last)

    def sample(self) -> None:
        """Read the times of all processes."""
        spark = family(self._driver)
        for root, name in self._servers.items():
            for process, fields in family(root).items():
                self._kinds[process], self._last[process] = name, _seconds([fields], 11, 13)
                spark.pop(process, None)
        for process, fields in spark.items():
            with suppress(OSError):  # it has ended
                self._kinds[process] = kind_of(process, self._driver)
                self._last[process] = _seconds([fields], 11, 13)

    def spent(self) -> dict[str, float]:
        """Return the seconds up to the last sample."""
        found: dict[str, float] = {}
        for process, seconds in self._last.items():
            kind = self._kinds[process]
            found[kind] = found.get(kind, 0.0) + seconds - self._first.get(process, 0.0)
        return found


def _seconds(processes: Iterable[list[str]], begin: int = 11, end: int = 15) -> float:
    """Return the processor seconds of processes: 11 to 13 their own, 13 to 15 those of their children that have
    ended."""
    return sum(int(ticks) for fields in processes for ticks in fields[begin:end]) / os.sysconf("SC_CLK_TCK")


def cpu_model() -> str:
    """Return the processor's name from Linux, otherwise from Python."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time used by processes, user and kernel (Linux)."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, object]:
    """Return machine, interpreter and versions as an object for JSON."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": f"{platform.python_version()} ({'' if is_optimised() else 'not '}built with its profile)",
        "core": core(),
        "versions": {name: version(name) for name in PACKAGES},
        "peers": {name: peer_version(name, flag) for name, flag in PEERS.items()},
    }


def core() -> str:
    """Return the form of penstock's core in this checkout, and the kind of build."""
    if compiled.form() == "compiled":
        return "compiled as released" if is_release() else "compiled without a profile"
    return "interpreted"


def is_optimised() -> bool:
    """Return True if the interpreter was built with profile-guided optimization, as in distributions, but not by
    pyenv."""
    return "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS"))


def peer_version(program: str, flag: str) -> str:
    """Return the first version number that ``program`` prints, or ``absent``."""
    path = servers.find(program)
    if path is None:
        return "absent"
    said = subprocess.run([path, flag], capture_output=True, text=True, check=False)
    found = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
    return found[0] if found else "unknown"


def version(package: str) -> str:
    """Return the installed version, or ``absent``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
