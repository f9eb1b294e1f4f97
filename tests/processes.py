"""Processes that tests have started, by id."""

from __future__ import annotations

from pathlib import Path

__all__ = ["has_ended"]


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie that waits to be collected, by init if it has no parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
    except OSError:  # also if it ends between open and read
        return True
