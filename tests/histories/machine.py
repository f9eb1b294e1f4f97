"""A node on a machine whose clock steps, whose disk becomes full or slow and whose power fails.

The node is a process like any other, whose standard library was changed before the node's modules were loaded. The
system clock has an offset that the test writes to a file, and the disk is full or slow while others exist. Before each
write of a log the bytes that it replaces are noted until the next ``fdatasync``; after ``kill -9``
:meth:`Machine.lose_power` puts replaced sectors back, as a disk may that had a write cache. LMDB writes in C, so its
transactions count as durable when they return, as in ``tests/faults/test_statestore_power_loss.py``. New names of files
are kept.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import struct
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from penstock.runtime.io.files import SECTOR

__all__ = ["Machine", "boot"]

ROOT = Path(__file__).resolve().parents[2]
CLOCK, CACHE, FULL, SLOW = "clock", "write-cache", "full", "slow"
OFFSET = struct.Struct("<q")
NOTE = struct.Struct("<BQQI")
"""Kind, inode, position, size of the bytes that follow."""
WRITE, SYNC = 0, 1
SLOW_S = 0.004
"""How long a sync waits, so that power fails during many of them."""


class Machine:
    """The machine of a node whose files are below ``directory``. ``cluster``: the node uses etcd."""

    def __init__(self, directory: Path, *, cluster: bool = False) -> None:
        self.directory = directory
        start = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.histories.machine import boot\nboot({str(directory)!r}, cluster={cluster})\n"
            "from penstock.cli.main import main\nsys.exit(main())"
        )
        self.program = [sys.executable, "-c", start]
        self.set_clock(0)

    def set_clock(self, offset_s: float) -> None:
        """Set the machine's clock to ``offset_s`` seconds after the right time."""
        draft = self.directory / f"{CLOCK}.new"
        draft.write_bytes(OFFSET.pack(round(offset_s * 1e9)))
        draft.replace(self.directory / CLOCK)

    def fill_disk(self, *, full: bool) -> None:
        """Let no log be written to, or again."""
        if full:
            (self.directory / FULL).touch()
        else:
            (self.directory / FULL).unlink()

    def slow_disk(self, seconds: float) -> None:
        """Let each sync of a log take so many seconds more, from the next one on; 0: no longer."""
        if seconds:
            draft = self.directory / f"{SLOW}.new"
            draft.write_text(str(seconds))
            draft.replace(self.directory / SLOW)
        else:
            (self.directory / SLOW).unlink()

    def lose_power(self, random: Random, chance: float, *, obeys_sync: bool = True) -> int:
        """After the node was killed: lose each sector that was not synced with ``chance``; how many were lost.

        Without ``obeys_sync`` the disk has ignored every sync since the node was started.
        """
        lost = 0
        files = {path.stat().st_ino: path for path in self.directory.rglob("*") if path.is_file()}
        for inode, sectors in unsynced((self.directory / CACHE).read_bytes(), obeys_sync=obeys_sync).items():
            if inode not in files:
                continue
            with files[inode].open("r+b") as file:
                for sector, content in sectors.items():
                    if random.random() < chance:
                        file.seek(sector * SECTOR)
                        file.write(content)
                        lost += 1
        (self.directory / CACHE).unlink()
        return lost


def unsynced(notes: bytes, *, obeys_sync: bool) -> dict[int, dict[int, bytes]]:
    """Of each inode the sectors that no sync made durable, with what the disk has in their place."""
    found: dict[int, dict[int, bytes]] = {}
    at = 0
    while at + NOTE.size <= len(notes):
        kind, inode, position, size = NOTE.unpack_from(notes, at)
        at += NOTE.size
        if kind == SYNC:
            if obeys_sync:
                found.pop(inode, None)
            continue
        old = notes[at : at + size]
        at += size
        for start in range(0, len(old), SECTOR):
            found.setdefault(inode, {}).setdefault((position + start) // SECTOR, old[start : start + SECTOR])
    return found


def boot(directory: str, *, cluster: bool) -> None:
    """Change this process, in which a node will run."""
    if cluster:
        # gRPC's C code, which gets deadlines as times of the system clock, does not see the stepped one.
        grpc_channel = importlib.import_module("grpc._channel")
        grpc_channel.time = SimpleNamespace(time=time.time, perf_counter=time.perf_counter)  # type: ignore[attr-defined]
    _step_clock(f"{directory}/{CLOCK}")  # before anything else is loaded
    notes = os.open(f"{directory}/{CACHE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    pwrite, pwritev, fdatasync = os.pwrite, os.pwritev, os.fdatasync

    full = f"{directory}/{FULL}"

    def note(fd: int, position: int, size: int) -> None:
        if os.access(full, os.F_OK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        start = position - position % SECTOR
        end = -(-(position + size) // SECTOR) * SECTOR
        old = os.pread(fd, end - start, start)
        if old:
            os.write(notes, NOTE.pack(WRITE, os.fstat(fd).st_ino, start, len(old)) + old)

    readable: dict[int, int] = {}

    def reader_of(fd: int) -> int:
        # A descriptor of O_DIRECT is for writing only.
        inode = os.fstat(fd).st_ino
        if inode not in readable:
            readable[inode] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        return readable[inode]

    def noted_pwrite(fd: int, data: bytes | memoryview, position: int) -> int:
        note(reader_of(fd), position, memoryview(data).nbytes)
        return pwrite(fd, data, position)

    def noted_pwritev(fd: int, data: Any, position: int) -> int:
        note(reader_of(fd), position, sum(memoryview(part).nbytes for part in data))
        return pwritev(fd, data, position)

    slow = Path(directory, SLOW)

    def noted_fdatasync(fd: int) -> None:
        delay_s = SLOW_S
        with contextlib.suppress(FileNotFoundError):
            delay_s += float(slow.read_text())
        time.sleep(delay_s)
        fdatasync(fd)
        os.write(notes, NOTE.pack(SYNC, os.fstat(fd).st_ino, 0, 0))

    os.pwrite, os.pwritev, os.fdatasync = noted_pwrite, noted_pwritev, noted_fdatasync  # type: ignore[assignment]


def _step_clock(path: str) -> None:
    time_ns = time.time_ns

    def stepped_ns() -> int:
        with open(path, "rb") as file:  # noqa: PTH123 - on the path of every request
            return time_ns() + int(OFFSET.unpack(file.read())[0])

    time.time_ns = stepped_ns
    time.time = lambda: stepped_ns() / 1e9
