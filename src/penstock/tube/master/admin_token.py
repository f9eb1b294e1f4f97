"""The administration token of a master that other machines can reach: random, made once, kept in a file."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from penstock.errors import StorageError
from penstock.runtime.files import DirectFiles

__all__ = ["KNOWN_TOKENS", "kept_token"]

KNOWN_TOKENS = frozenset({"abc", "ASDFGHJKL"})
"""Tokens that stand in the reference's code and samples: no secret."""


def kept_token(path: Path) -> str:
    """The token in ``path``, which is made, for its owner only, where it is missing.

    Raises StorageError when the file cannot be read or written.
    """
    try:
        if not path.exists():
            DirectFiles().make_dir(path.parent)
            fresh = path.with_name(f"{path.name}.new")
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(24) + "\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            DirectFiles().sync_dir(path.parent)
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"tube: the administration token {path} cannot be used: {error}", path=str(path)) from error
    if not token:
        raise StorageError(
            f"tube: the administration token in {path} is blank",
            path=str(path),
            do="remove the file, a new one is made",
        )
    return token
