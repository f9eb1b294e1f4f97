"""The log in files next to an LMDB environment, and the commits of any log that LMDB does not contain yet.

The files are segments of one size, filled with zeros before their first use, and used repeatedly. Writing into blocks
that the file already has changes neither its size nor its blocks, so a commit is one operation of the disk instead of
three, and the write can bypass the page cache: a small commit then writes one sector instead of a page. Segments are
added when the load needs them, up to a limit, and are not removed.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mypy_extensions import mypyc_attr

from penstock.errors import StorageError
from penstock.runtime.io.commit_log import CommitLog, LogPosition
from penstock.runtime.io.files import File, Files
from penstock.runtime.io.wal_frames import Frame, encode_frame, frame_bytes, frames_in

__all__ = ["SEGMENTS", "PendingCommits", "SegmentLog", "Segments"]

SEGMENTS: Final = 8

_NAME: Final = re.compile(r"log-(\d{4})")
_ZEROS: Final = bytes(1 << 20)


class _Segment:
    __slots__ = ("end", "file", "last")

    def __init__(self, file: File) -> None:
        self.file = file
        self.end = 0
        """Byte position of the next frame."""
        self.last = 0
        """Sequence of the last frame in the segment."""


class Segments:
    """The segments in ``directory``: at most ``most`` of ``size`` bytes each.

    One thread appends; another one may release and grow meanwhile. Methods raise the OSError of the operating system.
    """

    def __init__(self, files: Files, directory: Path, *, size: int, most: int = SEGMENTS) -> None:
        self._files = files
        self._directory = directory
        self._size = size
        self._most = most
        self._lock = threading.Lock()
        self._current: _Segment | None = None
        self._full: list[_Segment] = []
        self._free: list[_Segment] = []
        self._released = 0

    def read(self, identity: bytes) -> Iterator[Frame]:
        """Read every complete frame of the log ``identity`` from the existing files, in no particular order."""
        for path in self._paths():
            file = self._files.open(path)
            try:
                yield from frames_in(file.read(0, file.size()), identity)
            finally:
                file.close()

    def start(self) -> None:
        """Reuse the existing files, whose frames are not needed any more. Sequences restart at 1."""
        self._released = 0
        for path in self._paths():
            file = self._files.open_unbuffered(path)
            if file.size() == self._size:
                self._free.append(_Segment(file))
            else:  # written by another version, or incomplete
                file.close()
                self._files.remove(path)

    def append(self, frame: bytes, sequence: int) -> bool:
        """Write ``frame`` and make it durable; False, and nothing is written, if it does not fit."""
        segment = self._current
        if segment is None or segment.end + len(frame) > self._size:
            segment = self._next(len(frame))
            if segment is None:
                return False
        segment.file.write_durably(segment.end, frame)
        segment.end += len(frame)
        segment.last = sequence
        return True

    def _next(self, wanted: int) -> _Segment | None:
        if wanted > self._size:
            return None
        with self._lock:
            if self._current is not None:
                self._full.append(self._current)
                self._current = None
                self._sort_out()
            if not self._free:
                return None
            segment = self._current = self._free.pop()
            segment.end = 0
            return segment

    def release(self, sequence: int) -> None:
        """Free the segments that have no frame after ``sequence``."""
        with self._lock:
            self._released = sequence
            self._sort_out()

    def _sort_out(self) -> None:
        self._free += [segment for segment in self._full if segment.last <= self._released]
        self._full = [segment for segment in self._full if segment.last > self._released]

    def is_scarce(self) -> bool:
        """True if a new segment is needed soon: the last one is half full."""
        return not self._free and (self._current is None or self._current.end > self._size // 2)

    def grow(self) -> None:
        """Add a segment, unless there are enough."""
        if len(self._full) + len(self._free) + (self._current is not None) >= self._most:
            return
        taken = {path.name for path in self._paths()}
        name = next(name for number in range(self._most + len(taken)) if (name := f"log-{number:04}") not in taken)
        path = self._directory / name
        file = self._files.create(path)
        try:
            for start in range(0, self._size, len(_ZEROS)):
                file.write(start, _ZEROS[: self._size - start])
            file.sync()
            self._files.sync_dir(self._directory)
            filled, file = file, self._files.open_unbuffered(path)
            filled.close()
        except OSError:
            file.close()
            self._files.remove(path)
            raise
        with self._lock:
            self._free.append(_Segment(file))

    def exist(self) -> bool:
        """True if any segment file exists."""
        return bool(self._paths())

    def remove(self) -> None:
        """Remove all files; not after :meth:`start`."""
        for path in self._paths():
            self._files.remove(path)
        self._files.sync_dir(self._directory)

    def close(self) -> None:
        """Close the files without deleting them."""
        segments = [*self._full, *self._free, *([self._current] if self._current is not None else [])]
        for segment in segments:
            segment.file.close()
        self._current, self._full, self._free = None, [], []

    def _paths(self) -> list[Path]:
        return [self._directory / name for name in self._files.names(self._directory) if _NAME.fullmatch(name)]


class SegmentLog(CommitLog):
    """A log in the segments of ``directory``. ``name``: of the environment, for errors."""

    def __init__(self, files: Files, directory: Path, name: str, *, size: int) -> None:
        self._segments = Segments(files, directory, size=size)
        self._directory = directory
        self._name = name
        self._position = LogPosition(b"", 0, 0)

    def recover(self, applied: LogPosition | None) -> tuple[list[bytes], LogPosition]:
        """Read the frames after ``applied``, and begin a new epoch [CommitLog]."""
        if applied is None:
            # Files of the log are created after the first transaction, which writes the position.
            if self._segments.exist():
                raise self._damaged(
                    "the files log-* exist, and data.mdb has no position of a log",
                    "; or move log-* away to start without them",
                )
            applied = LogPosition(secrets.token_bytes(8), 0, 0)
            frames = []
        else:
            found = self._segments.read(applied.identity)
            last = (applied.epoch, applied.sequence)
            frames = sorted(frame for frame in found if (frame.epoch, frame.sequence) > last)
        for number, frame in enumerate(frames, applied.sequence + 1):
            if (frame.epoch, frame.sequence) != (applied.epoch, number):
                raise self._damaged(
                    f"commit {number} of epoch {applied.epoch} is missing in its log, which continues with commit "
                    f"{frame.sequence} of epoch {frame.epoch}",
                    "; or move its files log-* away to start without their content",
                )
        # Earlier frames cannot be mistaken for frames of this epoch.
        self._position = LogPosition(applied.identity, applied.epoch + 1, 0)
        return [frame.body for frame in frames], self._position

    def start(self) -> None:
        """Reuse the existing files [CommitLog]."""
        self._segments.start()

    def append(self, sequence: int, body: bytes) -> bool:
        """Append a frame [CommitLog]."""
        position = self._position
        return self._segments.append(encode_frame(position.identity, position.epoch, sequence, body), sequence)

    def release(self, sequence: int) -> None:
        """Free segments [CommitLog]."""
        self._segments.release(sequence)

    def may_wait(self) -> bool:
        """True if the next commit may have to be applied to LMDB [CommitLog]."""
        return self._segments.is_scarce()

    def is_scarce(self) -> bool:
        """True if a new segment is needed soon [CommitLog]."""
        return self._segments.is_scarce()

    def grow(self) -> None:
        """Add a segment [CommitLog]."""
        self._segments.grow()

    def exists(self) -> bool:
        """True if there are segments [CommitLog]."""
        return self._segments.exist()

    def remove(self) -> None:
        """Remove the segments [CommitLog]."""
        self._segments.remove()

    def close(self) -> None:
        """Close the segments [CommitLog]."""
        self._segments.close()

    def _damaged(self, what: str, way: str) -> StorageError:
        return StorageError(
            f"{self._name} {self._directory}: {what}",
            path=str(self._directory),
            why="acknowledged changes cannot be read any more, or files of different copies were mixed",
            hint="restore the whole directory from one copy" + way,
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class PendingCommits:
    """Appends commits to ``log``, and keeps their bodies until LMDB contains them.

    One thread at a time appends; another one may take the pending bodies meanwhile. There is no lock, which would cost
    as much as encoding a row: appending to a list and removing its beginning are atomic, and each number is changed by
    one thread only. ``hasty_bytes``: size of pending frames above which they are to be applied.
    """

    def __init__(self, log: CommitLog, hasty_bytes: int) -> None:
        self._log = log
        self._hasty_bytes = hasty_bytes
        self.sequence = 0
        """Sequence of the last commit."""
        self.pending: list[bytes] = []
        """Bodies of the commits that LMDB does not contain yet."""
        self._taken = 0
        """Sequence of the last commit that is not pending."""
        self._appended_bytes = 0
        self._taken_bytes = 0

    def start(self, sequence: int) -> None:
        """Continue after ``sequence``, the last commit that LMDB contains."""
        self.sequence = self._taken = sequence

    def append(self, body: bytes) -> bool:
        """Make a commit durable. Returns False and writes nothing if the log has no room."""
        sequence = self.sequence + 1
        if not self._log.append(sequence, body):
            return False
        self.sequence = sequence
        self._appended_bytes += frame_bytes(len(body))
        self.pending.append(body)
        return True

    @property
    def hasty(self) -> bool:
        """True if the pending operations should be applied to LMDB soon."""
        return self._appended_bytes - self._taken_bytes > self._hasty_bytes or self._log.is_scarce()

    def take(self) -> tuple[list[bytes], int]:
        """Remove and return the pending bodies, with the sequence of the last one."""
        bodies = self.pending[:]
        del self.pending[: len(bodies)]
        self._taken += len(bodies)
        self._taken_bytes += _frames_bytes(bodies)
        return bodies, self._taken

    def put_back(self, bodies: list[bytes]) -> None:
        """Undo :meth:`take` for commits that could not be applied."""
        self._taken -= len(bodies)
        self._taken_bytes -= _frames_bytes(bodies)
        self.pending[:0] = bodies

    def skip(self) -> None:
        """Count a commit that LMDB contains without a frame; nothing is pending."""
        self.sequence += 1
        self._taken += 1


def _frames_bytes(bodies: list[bytes]) -> int:
    size = 0
    for body in bodies:
        size += frame_bytes(len(body))
    return size
