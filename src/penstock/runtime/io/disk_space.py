"""Disk space of a data directory: a size limit and a minimum of free space, checked once a second in a thread.

While the directory exceeds its limit, or its file system has less free space than the minimum, every part rejects
requests that need space. Reads, deletes, expiry, retention and stored offsets continue: they free space or are small,
and may use the minimum. Otherwise the first sign of a full disk would be a write that fails in the middle of a commit.

LMDB reuses freed space inside its file, which does not shrink. So a part with at least :data:`REUSABLE` bytes of free
pages may write even while the node is out of space, and deletes make room for it.

Rejection ends at 95 % of the limit, or 110 % of the minimum, so that the node does not alternate between the two
states. RabbitMQ (``disk_free_limit``) and Elasticsearch (flood-stage watermark) have the minimum, etcd
(``quota-backend-bytes``) and NATS (``max_file_store``) the limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import OutOfSpaceError

__all__ = ["REFUSAL", "REUSABLE", "DiskSpace", "FileSystem", "Writer", "default_floor", "file_system_of"]

_log = logging.getLogger("penstock.runtime")

REUSABLE: Final = 4 << 20
"""Bytes of free pages with which a part may write while the node is out of space: more than a commit needs."""

REFUSAL: Final = "out of disk space: until there is more, nothing is stored that needs space (see /readyz)"
"""Reason sent to clients; operators get one with paths and settings."""

_CHECK_S: Final = 1.0
_SIZE_EVERY: Final = 30
"""Without a limit the size is only a metric, measured at every thirtieth check."""
_SIZE_FIRST: Final = 5
"""And at the first five, while the parts of the node create their files."""
_LARGEST_FLOOR: Final = 256 << 20
_FLOOR_SHARE: Final = 20


class FileSystem(NamedTuple):
    """Bytes of a file system: total, and available to this process."""

    total: int
    free: int


class Writer(NamedTuple):
    """A part that stores data. ``writes`` describes the requests that it rejects without space, for messages.

    ``refuse`` is called in the loop with the reason to reject requests that need space, "" for none. ``reusable``
    returns the bytes that the part can write without growing its files; called in a thread.
    """

    writes: str
    refuse: Callable[[str], None]
    reusable: Callable[[], int]


def file_system_of(path: Path) -> FileSystem:
    """Size and free space of the file system of ``path``."""
    found = os.statvfs(path)
    return FileSystem(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def default_floor(total: int) -> int:
    """Default minimum of free space: 5 % of the file system, at most 256 MiB."""
    return min(_LARGEST_FLOOR, total // _FLOOR_SHARE)


class DiskSpace:
    """Watches the directory ``path``. ``max_bytes``: 0 for no limit; ``min_free_bytes``: None for
    :func:`default_floor`.

    All methods are called in the thread of the loop.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int = 0,
        min_free_bytes: int | None = None,
        *,
        file_system: Callable[[Path], FileSystem] = file_system_of,
    ) -> None:
        self._shortage: OutOfSpaceError | None = None
        """Reason why requests that need space are rejected, with the action; None if they are accepted."""
        self.used_bytes = 0
        self.free_bytes = 0
        self._path = path
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._file_system = file_system
        self._writers: list[Writer] = []
        self._checks = 0
        self._unmeasured = False
        """Whether the last check of :meth:`start` could not measure, which was logged."""
        self._task: asyncio.Task[None] | None = None

    def add(self, writer: Writer) -> None:
        """Register ``writer`` to be notified."""
        self._writers.append(writer)
        writer.refuse("" if self._shortage is None else REFUSAL)

    async def start(self) -> None:
        """Check once, then once a second until :meth:`close`."""
        await self.check()
        self._task = asyncio.create_task(self._watch(), name="disk space")

    async def close(self) -> None:
        """Stop checking; may be called twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def metric_values(self) -> dict[str, int]:
        """Values of the metrics."""
        return {
            "used_bytes": self.used_bytes,
            "free_bytes": self.free_bytes,
            "out_of_space": int(self._shortage is not None),
        }

    def warning(self) -> OutOfSpaceError | None:
        """The reason, for ``/readyz``; None if there is none."""
        return self._shortage

    async def check(self) -> None:
        """Measure, and notify the writers."""
        cause, hint, reusable = await asyncio.to_thread(self._measure)
        measured = list(zip(self._writers, reusable, strict=False))
        refused = [writer.writes for writer, room in measured if room < REUSABLE]
        before, self._shortage = self._shortage, None
        if cause:
            self._shortage = OutOfSpaceError(f"{cause}: {_refused(refused, measured)}", path=str(self._path), hint=hint)
            if before is None:
                _log.error("%s", self._shortage.line())
        elif before is not None:
            _log.warning("disk space: sufficient again, all requests are accepted path=%s", self._path)
        for writer, room in measured:
            writer.refuse(REFUSAL if cause and room < REUSABLE else "")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self.check()
                self._unmeasured = False
            except OSError as error:
                # Errors of the file system are reported by the parts that use it.
                if not self._unmeasured:
                    _log.warning("disk space cannot be measured path=%s: %s", self._path, error)
                self._unmeasured = True

    def _measure(self) -> tuple[str, str, list[int]]:
        """Return cause and hint, and the reusable bytes of each writer if there is a cause."""
        total, self.free_bytes = self._file_system(self._path)
        if self._max_bytes or self._checks < _SIZE_FIRST or self._checks % _SIZE_EVERY == 0:
            self.used_bytes = _size_of(self._path)
        self._checks += 1
        floor = default_floor(total) if self._min_free_bytes is None else self._min_free_bytes
        cause, hint = self._cause(floor)
        return cause, hint, [writer.reusable() if cause else REUSABLE for writer in self._writers]

    def _cause(self, floor: int) -> tuple[str, str]:
        limit, path = self._max_bytes, self._path
        if limit and self.used_bytes >= (limit if self._shortage is None else limit - limit // 20):
            cause = f"disk space: data directory {path} has {self.used_bytes} bytes, disk.max_bytes is {limit}"
            return cause, (
                "shorten the retention or raise disk.max_bytes; deleted keys and messages make room inside their file,"
                " which does not shrink"
            )
        if self.free_bytes < (floor if self._shortage is None else floor + floor // 10):
            free = f"the file system of {path} has {self.free_bytes} bytes free, disk.min_free_bytes is {floor}"
            return f"disk space: {free}", "free space on the file system, or lower disk.min_free_bytes"
        return "", ""


def _refused(refused: list[str], measured: list[tuple[Writer, int]]) -> str:
    """Text with the requests that are rejected now; parts with free pages reject nothing."""
    if refused or not measured:
        return f"{' and '.join(refused) or 'writes that need space'} are refused"
    return "nothing is refused while the files have free pages"


def _size_of(path: Path) -> int:
    """Disk usage of the files below ``path``; files deleted meanwhile are skipped."""
    size = 0
    directories = [str(path)]
    while directories:
        try:
            with os.scandir(directories.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    else:
                        size += _allocated(entry)
        except FileNotFoundError:
            continue
    return size


def _allocated(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0
