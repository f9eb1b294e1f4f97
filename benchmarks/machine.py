"""The machine, interpreter and versions of a measurement, which are stored with each figure."""

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

__all__ = ["cpu_of_tree", "describe", "family"]

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
    ticks = sum(int(ticks) for fields in family(os.getpid()).values() for ticks in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


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
