"""Bytes that a command is given: as an argument, in a file, or on standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.cli.output import unless_standard
from penstock.errors import ConfigError

__all__ = ["given_bytes"]


def given_bytes(command: str, name: str, text: str | None, file: Path | None) -> bytes:
    """The argument ``name`` of ``command``: ``text``, or what is in ``file``, or on standard input (also for ``-``).

    Raises:
        ConfigError: both are given, the file cannot be read, or nothing is given and a person would have to type it.
    """
    if text is not None and file is not None:
        raise ConfigError(
            f"{command}: a {name} and --file exclude each other", option="--file", do="give one of the two"
        )
    if text is not None:
        return text.encode("utf-8", "surrogateescape")
    if (path := unless_standard(file)) is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{command}: --file {path}: {error.strerror}", option="--file") from error
    if file is None and sys.stdin.isatty():
        raise ConfigError(
            f"{command}: no {name.lower()}",
            do=f"give a {name} ('' for an empty one), or --file PATH, or pipe it in",
        )
    return sys.stdin.buffer.read()
