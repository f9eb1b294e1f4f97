"""The load generator: a native program (``benchmarks/load``), built by cargo into the user's cache folder.

It is the same for penstock and for its peers, and reports the share of a core that it used itself: above ``BOUND`` a
figure is limited by the generator instead of the server, and is marked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["BOUND", "Load", "command", "measure", "missing"]

BOUND: Final = 0.8
"""Share of a core above which the generator counts as the bottleneck."""

SOURCE: Final = Path(__file__).resolve().parent / "load"


class Load(NamedTuple):
    """Result of one run; latencies in microseconds, None if the mode has none.

    ``server_us``: processor time of the server per operation, None if its process was not given.
    """

    per_s: float
    p50_us: float | None
    p99_us: float | None
    cpu: float
    server_us: float | None = None
    p999_us: float | None = None


def missing() -> str | None:
    """Return the reason why there is no generator, or None."""
    return None if shutil.which("cargo") else "cargo is not installed; rustup or the package cargo has it"


@cache
def command() -> str:
    """Return the path of the program, which is built if it is not up to date."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "load"
    cargo = shutil.which("cargo")
    if cargo is None:
        raise SystemExit(f"no load generator: {missing()}")
    subprocess.run(
        [cargo, "build", "--release", "--quiet"],
        cwd=SOURCE,
        env=os.environ | {"CARGO_TARGET_DIR": str(folder)},
        check=True,
    )
    return str(folder / "release" / "penstock-load")


def measure(address: str, mode: str, **options: object) -> Load:
    """Run one load to its end; ``options`` are those of the program.

    Raises:
        SystemExit: the run failed, or the server sent a wrong answer: there is no figure.
    """
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run([command(), address, mode, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{mode} on {address}: {done.stderr}")
    result = json.loads(done.stdout)
    if result["bad"]:
        raise SystemExit(f"{mode} on {address}: {result['bad']} wrong answers")
    latencies = result["p50_us"], result["p99_us"]
    return Load(result["per_s"], *latencies, result["cpu"], result.get("server_us"), result.get("p999_us"))
