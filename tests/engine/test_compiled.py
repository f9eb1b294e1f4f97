"""Codecs and engines compiled by mypyc pass the tests that they pass as Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import require_tool

ROOT = Path(__file__).resolve().parents[2]
SUITES = (
    "tests/engine",
    "tests/unit/mqtt/codec",
    "tests/unit/mqtt/engine",
    "tests/unit/statestore/codec",
    "tests/unit/statestore/engine",
    "tests/unit/statestore/service",
    "tests/unit/statestore/test_binding.py",
    "tests/unit/statestore/test_hlc.py",
    "tests/unit/tube/codec",
    "tests/unit/tube/engine",
)
MOST_SKIPPED = 40
"""Tests that change a constant or inherit from an engine's class cannot run; more than a few would hide the rest."""


@pytest.mark.nightly
@pytest.mark.timeout(900)  # compiling takes two to five minutes of it
def test_compiled_modules_pass_the_same_tests() -> None:
    require_tool("cc")
    built = subprocess.run(
        [sys.executable, "tools/compile.py"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    folder = built.stdout.splitlines()[-1]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not nightly", "-p", "tests.compiled"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--timeout-method=thread", *SUITES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    skipped = re.search(r"\b(\d+) skipped", run.stdout.splitlines()[-1])
    assert skipped is None or int(skipped[1]) <= MOST_SKIPPED, run.stdout[-4000:]
