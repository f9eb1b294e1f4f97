"""A disk in memory that records every operation, and what it may hold after power was lost at any of them.

Contents become durable by ``sync`` of the file, names by ``sync_dir`` of the directory. Everything since then may have
reached the disk or not, in any order; the last write may have reached it in part.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from penstock.runtime.io.files import File


class Op(NamedTuple):
    kind: str  # create write truncate sync rename remove sync_dir make_dir note
    path: Path
    position: int = 0
    data: bytes = b""
    other: Path | None = None
    inode: int = 0
    value: object = None


class MemoryFile(File):
    def __init__(self, disk: RecordedDisk, path: Path, inode: int) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode

    def read(self, position: int, size: int) -> bytes:
        return bytes(self._disk.contents[self._inode][position : position + size])

    def write(self, position: int, data: bytes) -> None:
        self._disk.before("write")
        self._disk.record(Op("write", self._path, position, data, inode=self._inode))

    def allocate(self, position: int, size: int) -> None:
        self._disk.before("write")
        end = max(position, self.size())
        self._disk.record(Op("write", self._path, end, bytes(max(position + size - end, 0)), inode=self._inode))

    def truncate(self, size: int) -> None:
        self._disk.before("truncate")
        self._disk.record(Op("truncate", self._path, size, inode=self._inode))

    def sync(self) -> None:
        self._disk.before("sync")
        self._disk.record(Op("sync", self._path, inode=self._inode))

    def size(self) -> int:
        return len(self._disk.contents[self._inode])

    def close(self) -> None:
        pass


class RecordedDisk:
    """Implements ``Files``. ``fail`` is asked before each changing operation and may raise OSError."""

    def __init__(self, files: dict[Path, bytes] | None = None) -> None:
        self.ops: list[Op] = []
        self.contents: dict[int, bytearray] = {}
        self.entries: dict[Path, int] = {}
        self.fail: Callable[[str], None] | None = None
        self._inodes = 0
        for path, data in (files or {}).items():
            self.entries[path] = self._inode()
            self.contents[self.entries[path]] = bytearray(data)

    def _inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def before(self, kind: str) -> None:
        if self.fail is not None:
            self.fail(kind)

    def record(self, op: Op) -> None:
        self.ops.append(op)
        apply(op, self.contents, self.entries)

    def note(self, value: object) -> None:
        """Mark this moment, for example "acknowledged"."""
        self.ops.append(Op("note", Path(), value=value))

    def make_dir(self, path: Path) -> None:
        self.before("make_dir")

    def create(self, path: Path) -> MemoryFile:
        self.before("create")
        inode = self._inode()
        self.record(Op("create", path, inode=inode))
        return MemoryFile(self, path, inode)

    def open(self, path: Path) -> MemoryFile:
        if path not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return MemoryFile(self, path, self.entries[path])

    def open_unbuffered(self, path: Path) -> MemoryFile:
        return self.open(path)

    def names(self, path: Path) -> list[str]:
        return sorted(entry.name for entry in self.entries if entry.parent == path)

    def rename(self, old: Path, new: Path) -> None:
        self.before("rename")
        self.record(Op("rename", old, other=new))

    def remove(self, path: Path) -> None:
        self.before("remove")
        self.record(Op("remove", path))

    def sync_dir(self, path: Path) -> None:
        self.before("sync_dir")
        self.record(Op("sync_dir", path))

    def files(self) -> dict[Path, bytes]:
        return {path: bytes(self.contents[inode]) for path, inode in self.entries.items()}


def apply(op: Op, contents: dict[int, bytearray], entries: dict[Path, int]) -> None:
    if op.kind == "create":
        contents[op.inode] = bytearray()
        entries[op.path] = op.inode
    elif op.kind == "write":
        content = contents[op.inode]
        if len(content) < op.position:
            content.extend(bytes(op.position - len(content)))
        content[op.position : op.position + len(op.data)] = op.data
    elif op.kind == "truncate":
        content = contents[op.inode]
        del content[op.position :]
        content.extend(bytes(op.position - len(content)))
    elif op.kind == "rename":
        assert op.other is not None
        entries[op.other] = entries.pop(op.path)
    elif op.kind == "remove":
        entries.pop(op.path, None)


def after_power_loss(ops: list[Op], base: dict[Path, bytes], random: Random) -> Iterator[tuple[str, RecordedDisk]]:
    """Disks that may be found when power was lost right after ``ops``."""
    pending = unsynced(ops)
    yield "unsynced lost", disk_after(ops, base, drop=pending)
    if not pending:
        return
    yield "unsynced kept", disk_after(ops, base, drop=set())
    last = max((n for n in pending if ops[n].kind == "write"), default=None)
    if last is not None:
        data = ops[last].data
        for size in {1, len(data) // 2, len(data) - 1, random.randrange(len(data))}:
            yield f"last write cut at {size}", disk_after(ops, base, drop=set(), cut={last: size})
            yield f"last write begun at {size}", disk_after(ops, base, drop=set(), begin={last: size})
    for _ in range(3):
        drop = {n for n in pending if random.random() < 0.5}
        cut = {n: random.randrange(len(ops[n].data)) for n in pending - drop if ops[n].data and random.random() < 0.3}
        yield f"dropped {sorted(drop)} cut {cut}", disk_after(ops, base, drop=drop, cut=cut)


def unsynced(ops: list[Op]) -> set[int]:
    """The numbers of the operations that no sync has made durable."""
    pending: set[int] = set()
    for number, op in enumerate(ops):
        if op.kind in {"write", "truncate"} or op.kind in {"create", "rename", "remove"}:
            pending.add(number)
        elif op.kind == "sync":
            pending -= {n for n in pending if ops[n].kind in {"write", "truncate"} and ops[n].inode == op.inode}
        elif op.kind == "sync_dir":
            names = {"create", "rename", "remove"}
            pending -= {n for n in pending if ops[n].kind in names and ops[n].path.parent == op.path}
    return pending


def disk_after(
    ops: list[Op],
    base: dict[Path, bytes],
    *,
    drop: set[int],
    cut: dict[int, int] | None = None,
    begin: dict[int, int] | None = None,
) -> RecordedDisk:
    """The disk after ``ops`` without those in ``drop``, and with the first or last bytes of some writes only."""
    disk = RecordedDisk(base)
    for number, op in enumerate(ops):
        if op.kind in {"note", "sync", "sync_dir"}:
            continue
        if op.kind == "create":
            disk.contents[op.inode] = bytearray()
        if number in drop or (op.kind in {"rename", "remove"} and op.path not in disk.entries):
            continue
        done = op
        if cut is not None and number in cut:
            done = op._replace(data=op.data[: cut[number]])
        if begin is not None and number in begin:  # only its later pages reached the disk
            done = op._replace(position=op.position + begin[number], data=op.data[begin[number] :])
        if done.kind == "create":
            disk.entries[done.path] = done.inode
        else:
            apply(done, disk.contents, disk.entries)
    return RecordedDisk(disk.files())
