"""The state store, simulated with many seeds: no seed breaks a rule, and planted bugs do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.runtime.io import wal
from penstock.runtime.io.wal_frames import decode_operations
from penstock.statestore.service.storage import Storage
from tests.simulation.history import Violation
from tests.simulation.node import SimulatedNode
from tests.simulation.run import OPERATIONS, Failure, failure, report, simulate
from tests.unit.runtime.recorded_disk import MemoryFile

ROOT = Path(__file__).resolve().parents[2]
SEEDS = int(os.environ.get("SIMULATION_SEEDS", "16"))
ONE_SEED = "from tests.simulation.run import simulate; print(simulate(7).trace)"


def test_no_seed_breaks_a_rule() -> None:
    told: list[str] = []
    assert report(range(SEEDS), tell=told.append), told


def test_a_seed_has_the_same_trace_in_two_processes() -> None:
    # Sets of strings have another order in each.
    traces = {
        subprocess.run(
            [sys.executable, "-c", ONE_SEED],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert traces == {simulate(7).trace + "\n"}
    assert simulate(8).trace not in traces


def test_a_seed_does_what_it_should() -> None:
    results = [simulate(seed) for seed in range(8)]
    for result in results:
        assert result.answered > OPERATIONS * 0.9
        assert result.notified > 100
        assert result.cuts > 0
    assert {fault for result in results for fault in result.faults} == {"slow", "full", "failing"}


def answered_early(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Storage.commit

    def later(self: Storage, *args: Any, **options: Any) -> None:
        def commit_now() -> None:
            with suppress(StorageError):  # a full or failed disk, which is not the bug
                commit(self, *args, **options)

        asyncio.get_running_loop().call_later(0.02, commit_now)

    monkeypatch.setattr(Storage, "commit", later)


def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFile, "sync", lambda _self: None)


def recovered_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "decode_operations", lambda body: list(decode_operations(body))[1:])


def log_released_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that LMDB does not contain are taken for applied."""
    monkeypatch.setattr(wal.LoggedEnvironment, "_write", lambda *_args: None)


def expired_early(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its clock runs at twice the speed.
    def fast(self: SimulatedNode) -> int:
        return 2 * self.loop.wall_ms()

    monkeypatch.setattr(SimulatedNode, "steady_ms", fast)


@pytest.mark.parametrize(
    ("plant", "seeds"),
    [(answered_early, 8), (without_sync, 8), (recovered_in_part, 8), (log_released_early, 8), (expired_early, 8)],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(seeds):
        try:
            simulate(seed)
        except Violation:
            return
    pytest.fail(f"{seeds} seeds did not find it")


def test_a_failing_seed_is_reported_with_a_short_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sync(monkeypatch)
    failed = next(found for seed in range(8) if (found := failure(seed, search_s=10.0)) is not None)
    assert isinstance(failed, Failure)
    assert failed.operations < OPERATIONS // 2
    with pytest.raises(Violation):
        simulate(failed.seed, failed.operations)
    told: list[str] = []
    assert not report([failed.seed], tell=told.append)
    assert told[0].startswith(f"seed {failed.seed}, the first {failed.operations} operations of its schedule: ")
