"""What a power loss leaves of files that a program has written: strace records which of them it synced, or for code in
the process of the test, functions in place of those of ``os``.

Files of state directories get their names by a link or a rename, when their contents are complete. A name is on the
disk after an fsync of its directory, contents after an fsync of the file; everything else is lost.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

from tests.tools import require_tool

__all__ = ["Unsynced", "recorded"]

_CALLS = "trace=fsync,fdatasync,link,linkat,rename,renameat,renameat2,mkdir,mkdirat"
_PATHS = re.compile(r'"([^"]*)"')
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_BEGUN = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")


def recorded(log: Path) -> list[str]:
    """The beginning of the command line of a program whose calls are recorded in ``log``."""
    options = ["-f", "--seccomp-bpf", "-y", "-s", "4096", "-e", "signal=none", "-e", _CALLS]
    return [require_tool("strace"), *options, "-o", str(log)]


class Unsynced:
    """The names and contents below ``root`` that are not on the disk after the calls in ``log``.

    ``synced``: paths of files and directories that were synced, with the number of syncs.
    """

    def __init__(self, root: Path, log: Path | None = None) -> None:
        self._root = str(root)
        self.names: set[str] = set()
        self.contents: set[str] = set()
        self.synced: Counter[str] = Counter()
        begun: dict[str, str] = {}
        if log is None:
            return
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if (found := _BEGUN.fullmatch(line)) is not None:
                begun[found[1]] = f"{found[1]} {found[2]}"
                continue
            resumed = _RESUMED.fullmatch(line)
            call = line if resumed is None else begun.pop(resumed[1], "") + resumed[2]
            if (found := _CALL.match(call)) is not None and not found[4].startswith("-"):
                self._apply(found[2], found[3])

    def _apply(self, call: str, arguments: str) -> None:
        if call in {"fsync", "fdatasync"}:
            self.sync(arguments.partition("<")[2].removesuffix(">"))
            return
        source, *_, path = _PATHS.findall(arguments) * 2
        self.name(path, None if call.startswith("mkdir") else source)

    def sync(self, path: str) -> None:
        """The file or directory ``path`` was synced."""
        self.synced[path] += 1
        self.contents.discard(path)
        self.names -= {name for name in self.names if os.path.dirname(name) == path}  # noqa: PTH120 - quicker

    def name(self, path: str, source: str | None) -> None:
        """The name ``path`` was created: that of the file ``source``, or of a directory (None)."""
        if not path.startswith(self._root):
            return
        self.names.add(path)
        if source is not None and (source not in self.synced or source in self.contents):
            self.contents.add(path)

    def lose(self) -> None:
        """Remove the names that are not on the disk, and empty the files whose contents are not."""
        for path in self.names | self.contents:
            if not os.path.lexists(path):
                continue
            if path not in self.names:
                os.truncate(path, 0)
            elif os.path.isdir(path):  # noqa: PTH112
                shutil.rmtree(path)
            else:
                Path(path).unlink()
