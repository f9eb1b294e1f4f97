"""What a figure was measured on: without this it means nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["describe"]

PACKAGES = ("penstock", "uvloop", "lmdb", "protobuf", "numpy", "pyspark", "pyarrow")


def cpu_model() -> str:
    """The processor's name as Linux tells it, or what Python knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def describe() -> dict[str, object]:
    """Machine, interpreter and versions, as one JSON-able object."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str:
    """The installed version, or ``absent``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
