"""Real files of simulated machines, in virtual time: each step takes time, and the process may be killed before it.

Files survive the end of a process, as written; a loss of power is tested without virtual time
(``tests/unit/node/test_replacement.py``). A data directory is real, with a directory for each environment, but the rows
are tables of :mod:`tests.simulation.disk`. They move with the directory and are removed with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import lmdb

from penstock.runtime.io.files import DirectFiles, Durability, replace_file
from tests.simulation.cluster.threads import Killed, Process, Simulator
from tests.simulation.disk import SimulatedDisk, TableEnvironment

__all__ = ["HostDisk", "HostFiles", "HostTables", "host_disk", "remove_tree", "replace_on_host"]

T = TypeVar("T")


class HostDisk(SimulatedDisk):
    """The disk of the machine ``name``."""

    of_process: dict[str, HostDisk]
    """The disks of the simulation that runs, by the name of the machine's process."""

    def __init__(self, random: Random, name: str) -> None:
        super().__init__(random)
        self.name = name
        self.step_s = 0.0005
        """Maximum time of a step."""
        self.steps = 0
        """Number of steps of the load that runs."""
        self.on_step: Callable[[str], None] = lambda _kind: None
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when a file was replaced."""

    def step(self, kind: str) -> None:
        """Let time pass before a step of the thread that runs; it does not return if the process has ended."""
        simulator = Simulator.running
        self.steps += 1
        self.on_step(kind)
        simulator.wait(self.step_s * simulator.random.random())

    def move(self, old: Path, new: Path) -> None:
        """Move a directory with its tables."""
        old.replace(new)
        for path in [path for path in self.tables if path.is_relative_to(old)]:
            self.tables[new / path.relative_to(old)] = self.tables.pop(path)

    def remove(self, path: Path) -> None:
        """Remove a directory with its tables."""
        shutil.rmtree(path, ignore_errors=True)
        for each in [each for each in self.tables if each.is_relative_to(path)]:
            del self.tables[each]


def _process() -> Process:
    thread = Simulator.running.thread
    assert thread is not None
    return thread.process


def host_disk() -> HostDisk:
    """The disk of the thread that runs."""
    return HostDisk.of_process[_process().name]


class HostFiles(DirectFiles):
    """The files of the machine whose thread runs [Files]; syncs take time only."""

    def make_dir(self, path: Path) -> None:
        host_disk().step("make_dir")
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        disk = host_disk()
        disk.step("rename")
        disk.move(old, new)

    def remove(self, path: Path) -> None:
        host_disk().step("remove")
        path.unlink(missing_ok=True)

    def sync_dir(self, path: Path) -> None:
        host_disk().step("sync_dir")
        if not path.is_dir():
            raise FileNotFoundError(path)


def replace_on_host(path: Path, content: bytes, *, mode: int) -> None:
    """[penstock.runtime.io.files.replace_file]."""
    host_disk().step("replace_file")
    replace_file(path, content, mode=mode)
    host_disk().on_replaced()
    host_disk().step("replaced")


def remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """[shutil.rmtree], one environment after the other. Nothing happens in a process that was killed."""
    if not _process().is_alive:
        return
    disk = host_disk()
    for part in sorted((each for each in path.rglob("*") if each.is_dir()), reverse=True):
        disk.step("remove_tree")
        disk.remove(part)
    disk.step("remove_tree")
    disk.remove(path)


class HostTables(TableEnvironment):
    """Tables whose directory is real."""

    def __init__(
        self, path: Path, tables: Sequence[str], *, schema: int, durability: Durability = Durability.DURABLE
    ) -> None:
        super().__init__(host_disk(), path, tables, schema=schema)
        self.durability = durability

    def open(self, load: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "data.mdb").touch()
        return super().open(load)

    def _carry_out(self, write: Callable[[Any], T]) -> T:
        if not _process().is_alive:
            raise Killed
        return super()._carry_out(write)
