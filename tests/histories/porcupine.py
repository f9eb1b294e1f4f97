"""The checker of state store histories: Go and Porcupine, built once into the user's cache folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.go_programs import prepare_program

__all__ = ["check", "prepare"]

SOURCE = Path(__file__).parent / "checker"
CHECK_S = 60.0


def prepare(*, download: bool = True) -> Path:
    """The program, built if its sources have changed; without ``download`` skips the test where Go is missing."""
    return prepare_program("the checker of histories", "histories", SOURCE, "checker", download=download)


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
