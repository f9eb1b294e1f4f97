"""Environments with other versions of Spark: a virtual environment each in the user's cache folder.

Only Spark is installed there, pinned by ``requirements/spark-<version>.txt``; everything else is seen through a path to
the packages of the environment that runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["ROOT", "python_with_spark"]

ROOT = Path(__file__).resolve().parents[2]


def python_with_spark(version: str) -> Path:
    """The interpreter of an environment with Spark ``version`` (as in the name of its requirements file).

    Raises:
        subprocess.CalledProcessError: it cannot be made; the output says why.
    """
    pins = ROOT / "requirements" / f"spark-{version}.txt"
    packages = sysconfig.get_paths()["purelib"]
    digest = hashlib.sha256(pins.read_bytes() + f"{packages} {sys.version}".encode()).hexdigest()[:16]
    configured = os.environ.get("XDG_CACHE_HOME", "")
    cache = (Path(configured) if configured.startswith("/") else Path.home() / ".cache") / "penstock"
    home = cache / f"spark-{version}-{digest}"
    python = home / "bin" / "python"
    if (home / ".whole").exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run(sys.executable, "-m", "venv", "--without-pip", str(home))
    inside = next(home.glob("lib/python*/site-packages"))
    # Behind the environment's own packages, so that its Spark is found first.
    (inside / "penstock-packages.pth").write_text(packages + "\n", encoding="utf-8")
    _run(
        sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--ignore-installed", "--no-build-isolation", "--require-hashes", "-r", str(pins),
    )  # fmt: skip
    (home / ".whole").touch()
    return python


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
