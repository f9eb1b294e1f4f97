"""File permissions in errors: as which user a command can use a path."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

__all__ = ["permission_hint"]


def permission_hint(path: Path) -> str:
    """Return what to do after access to ``path`` was denied: run the command as the owner, or change permissions.

    The owner is that of ``path``, or of the nearest directory above it that can be inspected.
    """
    place, owner = _inspected(path)
    if owner == os.geteuid():
        return f"change the permissions: ls -ld {place}"
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:  # a user of another machine or container
        user = f"'#{owner}'"
    return f"run the command as the owner of {place}: sudo {f'-u {user} ' if owner else ''}..."


def _inspected(path: Path) -> tuple[Path, int]:
    """Return ``path`` or the nearest directory above it whose owner can be read, and the id of that user."""
    path = path.absolute()
    for place in (path, *path.parents):
        try:
            return place, place.stat().st_uid
        except OSError:  # missing, or in a directory that this user may not search
            continue
    return path, os.geteuid()
