"""The administration token of a data directory: random, created at the first start, readable by its owner only."""

from __future__ import annotations

import secrets
from pathlib import Path

from penstock.errors import StorageError
from penstock.runtime.io.files import DirectFiles, replace_file

__all__ = ["KNOWN_TOKENS", "load_or_create_token", "read_token"]

KNOWN_TOKENS = frozenset({"abc", "ASDFGHJKL"})
"""Tokens in the reference's code and sample configuration, which are rejected because they are public."""


def load_or_create_token(path: Path) -> str:
    """Return the token in ``path``; a missing file is created with a random token and mode 0600.

    Raises:
        StorageError: the file cannot be read or written, it is empty, or it is a token of TubeMQ's samples.
    """
    try:
        if not path.exists():
            DirectFiles().make_dir(path.parent)
            replace_file(path, f"{secrets.token_urlsafe(24)}\n".encode(), mode=0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    return read_token(path)


def read_token(path: Path) -> str:
    """Return the token in ``path``.

    Raises:
        StorageError: the file cannot be read, it is empty, or it is a token of TubeMQ's samples.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from error
    if not token:
        raise StorageError(
            f"tube: the administration token in {path} is blank",
            path=str(path),
            hint="remove the file: the next start creates a new one",
        )
    if token in KNOWN_TOKENS:
        raise StorageError(
            f"tube: the administration token in {path} is one of TubeMQ's samples",
            path=str(path),
            why="it is public",
            hint="remove the file: the next start creates a new one",
        )
    return token


def _unusable(path: Path, error: OSError | UnicodeDecodeError) -> StorageError:
    return StorageError(
        f"tube: the administration token file {str(path)!r} cannot be used",
        path=str(path),
        why=error.strerror if isinstance(error, OSError) else str(error),
        hint="set a file that this user can read, with the token in its first line",
    )
