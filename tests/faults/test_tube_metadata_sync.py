"""What master and broker keep in LMDB: fsynced before the acknowledgement; after a failed fsync none is given.

The programs run under strace, which records their fsyncs and lets one of them fail.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock.tube.broker.broker import TubeBroker
from penstock.tube.master.metadata import SettingStore
from tests.tools import require_tool

MASTER = """
import asyncio, os, sys
from pathlib import Path
from penstock.errors import PenstockError
from penstock.tube.master.master import TubeMaster

async def main():
    master = TubeMaster(Path(sys.argv[1]))
    await master.start("127.0.0.1", 0)
    for n in range(16):
        try:
            await master.create_topic(f"topic{n}")
            print(f"acknowledged {n}", flush=True)
        except PenstockError as error:
            print(f"refused {n}", error.what, flush=True)
    os._exit(0)

asyncio.run(main())
"""
BROKER = """
import asyncio, os, sys
from pathlib import Path
from penstock.errors import PenstockError
from penstock.tube.broker.broker import TubeBroker

async def main():
    broker = TubeBroker(Path(sys.argv[1]))
    await broker.start("127.0.0.1", 0)
    broker.commits.queue.inline_s = 0.0  # every commit in its thread: strace counts the fsyncs of each
    broker.create_topic("demo")
    for n in range(16):
        broker.engine.offsets.set((f"group{n}", "demo", 0), 28 * n)
        try:
            await broker.committed()
            print(f"acknowledged {n}", flush=True)
        except PenstockError as error:
            print(f"refused {n}", error.what, flush=True)
    os._exit(0)

asyncio.run(main())
"""
COUNT = 16
FSYNC = re.compile(r"(?:fdatasync|fsync|msync)\(.*\) += 0")


def traced(program: str, directory: Path, *, fail: int | None) -> tuple[list[str], list[str]]:
    """What the program printed, and the system calls; the ``fail``-th fsync of a thread gives EIO."""
    record = directory / "calls"
    inject = [] if fail is None else ["-e", f"inject=fdatasync:error=EIO:when={fail}"]
    command = [
        require_tool("strace"),
        "-f",
        "-qq",
        "-e",
        "trace=fdatasync,fsync,msync,write",
        *inject,
        "-o",
        str(record),
    ]
    done = subprocess.run(
        [*command, sys.executable, "-c", program, str(directory / "data")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "Operation not permitted" in done.stderr and not done.stdout:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines(), record.read_text(encoding="utf-8", errors="replace").splitlines()


def place_to_fail(calls: list[str]) -> tuple[int, int]:
    """Which fsync of a thread only the commits reach, after the fourth acknowledgement; the one acknowledged before it.

    strace counts for each thread: the commits have one of their own, opening has others.
    """
    counts: Counter[str] = Counter()
    acknowledged = -1
    thread = ""
    for call in calls:
        if "fdatasync(" in call and "resumed" not in call:
            thread = call.split()[0]
            counts[thread] += 1
        elif 'write(1, "acknowledged' in call:
            acknowledged += 1
            others = max((count for other, count in counts.items() if other != thread), default=0)
            if acknowledged >= 3 and counts[thread] >= others:
                return counts[thread] + 1, acknowledged
    raise AssertionError("the opening syncs more often than all the commits")


def groups_of(data: Path) -> set[int]:
    async def look() -> set[int]:
        broker = TubeBroker(data)
        await broker.start("127.0.0.1", 0)
        found = {int(key[0].removeprefix("group")) for key, _ in broker.engine.offsets.items()}
        await broker.close()
        return found

    return asyncio.run(look())


def topics_of(data: Path) -> set[int]:
    store = SettingStore(data)
    found = {int(setting.name.removeprefix("topic")) for setting in store.load()}  # type: ignore[union-attr]
    store.close()
    return found


@pytest.mark.parametrize("program", [MASTER, BROKER], ids=["master", "broker"])
def test_an_fsync_before_each_acknowledgement(program: str, tmp_path: Path) -> None:
    said, calls = traced(program, tmp_path, fail=None)
    assert said == [f"acknowledged {n}" for n in range(COUNT)]
    synced = False
    acknowledged = 0
    for call in calls:
        if FSYNC.search(call):
            synced = True
        elif 'write(1, "acknowledged' in call:
            assert synced, "acknowledged without an fsync since the one before"
            synced = False
            acknowledged += 1
    assert acknowledged == COUNT


@pytest.mark.parametrize("program", [MASTER, BROKER], ids=["master", "broker"])
def test_after_a_failed_fsync_nothing_is_acknowledged(program: str, tmp_path: Path) -> None:
    before, failing = (tmp_path / name for name in ("before", "failing"))
    before.mkdir()
    failing.mkdir()
    _, calls = traced(program, before, fail=None)
    nth, last = place_to_fail(calls)
    said, _ = traced(program, failing, fail=nth)
    acknowledged = {int(line.split()[1]) for line in said if line.startswith("acknowledged")}
    refused = {int(line.split()[1]) for line in said if line.startswith("refused")}
    assert acknowledged == set(range(last + 1))
    assert refused == set(range(last + 1, COUNT)), "also those that came when the disk was well again"
    assert "Input/output error" in next(line for line in said if line.startswith("refused"))
    found = (topics_of if program is MASTER else groups_of)(failing / "data")
    assert acknowledged <= found
    assert found <= acknowledged | {last + 1}, (
        "the one that failed may have reached the disk, later ones were not written"
    )
