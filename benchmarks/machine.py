"""What a figure was measured on: without this it means nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from benchmarks import servers
from penstock import compiled
from tools.core import is_release

__all__ = ["cpu_of_tree", "describe"]

PACKAGES = ("penstock", "uvloop", "lmdb", "protobuf", "numpy", "pyspark", "pyarrow")
PEERS = {"mosquitto": "-h", "redis-server": "--version"}
"""Peers that are programs, and the flag that has each say its version."""


def cpu_of_tree() -> float:
    """Processor seconds of this process and of all that came from it: load on the machine changes them little."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile; its parent counts it
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")


def cpu_model() -> str:
    """The processor's name as Linux tells it, or what Python knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that processes have taken until now, in user and kernel (Linux)."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, object]:
    """Machine, interpreter and versions, as one JSON-able object."""
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
    """The form of penstock's core in this checkout, and how it was built."""
    if compiled.form() == "compiled":
        return "compiled as released" if is_release() else "compiled without a profile"
    return "interpreted"


def is_optimised() -> bool:
    """Whether the interpreter was built with profile-guided optimisation, as distributions do and pyenv does not."""
    return "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS"))


def peer_version(program: str, flag: str) -> str:
    """The first version number that ``program`` prints, or ``absent``."""
    path = servers.find(program)
    if path is None:
        return "absent"
    said = subprocess.run([path, flag], capture_output=True, text=True, check=False)
    found = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
    return found[0] if found else "unknown"


def version(package: str) -> str:
    """The installed version, or ``absent``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
