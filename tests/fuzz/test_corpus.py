"""Every target runs its corpus and fixed mutations of it, on both forms of the core with the same outcomes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from penstock import compiled
from tests.fuzz.__main__ import CORPUS, ROOT, guided, outcomes
from tests.fuzz.targets import TARGETS

MUTATIONS = {"node_yaml": 10, "pipeline_yaml": 10, "policies": 30}
"""Of other targets 100 run; these take 20 to 50 ms each."""
SECONDS = 120

CORE = [
    "mqtt_decoder",
    "mqtt_properties",
    "mqtt_topics",
    "mqtt_broker",
    "statestore_requests",
    "statestore_replies",
    "hlc",
    "tube_frames",
    "tube_messages",
    "tube_broker",
    "tube_records",
    "wal",
]
"""Targets whose code is compiled."""


@pytest.mark.parametrize("target", TARGETS)
def test_corpus_and_mutations(target: str) -> None:
    outcomes(target, MUTATIONS.get(target, 100))


def test_corpus_is_small() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 200 * 1024


@pytest.mark.skipif(compiled.form() != "compiled", reason="there is no compiled core to compare with")
def test_compiled_and_interpreted_core_agree() -> None:
    command = [sys.executable, "-m", "tests.fuzz", ",".join(CORE), "--outcomes", "100"]
    environment = {**os.environ, "PENSTOCK_CORE": "interpreted"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [f"{target} {outcomes(target, 100)}" for target in CORE]


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(target: str, record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: it has wheels for Linux and CPython 3.11 to 3.13")
    status, summary, output = guided(target, SECONDS)
    record_property("summary", str(summary))
    assert not status, output[-4000:]
    assert summary.executions
