"""Copies of the tree that tests change, and programs that run in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def copy_tree(target: Path, *folders: str) -> None:
    """Copy folders of the project, without compiled files, to ``target``."""
    for folder in folders:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))


def run_in(copy: Path, program: str) -> str:
    """Run a Python program in a copy; return its output. An error of the program fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=copy,
        env={"PYTHONPATH": f"{copy / 'src'}:{copy}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
