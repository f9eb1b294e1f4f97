"""Small JSON files that are there whole or not at all, also after a crash."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import StorageError

__all__ = ["create_json", "read_json", "ready_directory", "sync_directory", "sync_file", "write_json"]


_PROBE_BYTES = 65_536
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


def ready_directory(path: Path) -> None:
    """Make the directory ``path`` if it is not there, and see that it can be written to.

    Raises:
        StorageError: it cannot.
    """
    probe = path / f".{uuid.uuid4().hex[:12]}.tmp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * _PROBE_BYTES)
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        raise StorageError(
            f"the directory {str(path)!r} cannot be written to: {error.strerror}",
            path=str(path),
            do="name another one, make room there, or give this user the right to write",
        ) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` beside ``path``, sync it, rename it into place, sync the directory. Replaces what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    _write(temporary, value)
    temporary.replace(path)
    sync_directory(path.parent)


def create_json(path: Path, value: Mapping[str, Any]) -> bool:
    """As :func:`write_json`, but only where there is nothing yet; whether it was this call that made the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: another process may be about to make the same file.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    _write(temporary, value)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Some mounted file systems know no links: there two that come at the same instant both think they were first.
        if path.exists():
            return False
        path.write_bytes(temporary.read_bytes())
        sync_file(path)
    finally:
        temporary.unlink()
    sync_directory(path.parent)
    return True


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        FileNotFoundError: there is none.
        StorageError: it is not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise StorageError(f"{path} is not JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} is not a JSON object", path=str(path))
    return value


def sync_file(path: Path) -> None:
    """Have the disk keep what was written to ``path``."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Have the disk keep the names in ``path``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
