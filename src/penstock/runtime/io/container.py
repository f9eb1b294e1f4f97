"""Limits of the container in which this process runs."""

from __future__ import annotations

from pathlib import Path

__all__ = ["memory_limit"]

_UNLIMITED = 1 << 60
"""cgroup version 1 has a number near 2**63 for no limit."""


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the limit of memory in bytes of the container's cgroup, version 2 or 1; None without one.

    ``root``: the directory with ``sys``.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / "sys/fs/cgroup" / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < _UNLIMITED:
            return int(text)
    return None
