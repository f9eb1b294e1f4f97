"""Log levels of the parts of a running node. A part is a logger ``penstock.<part>``."""

from __future__ import annotations

import logging

from penstock.errors import LocalProtocolError
from penstock.runtime.observability.logs import LogLevel

__all__ = ["ALL_PARTS", "check_level", "levels", "set_level"]

ALL_PARTS = "all"
"""Name that stands for every part without a level of its own."""
_ROOT = "penstock"


def levels() -> dict[str, str]:
    """Return the effective level of each part that can log, and of `ALL_PARTS`."""
    parts = sorted(
        name
        for name, logger in list(logging.root.manager.loggerDict.items())  # other threads may add loggers
        if name.startswith(f"{_ROOT}.") and isinstance(logger, logging.Logger)
    )
    found = {ALL_PARTS: logging.getLogger(_ROOT)} | {
        name.removeprefix(f"{_ROOT}."): logging.getLogger(name) for name in parts
    }
    return {part: logging.getLevelName(logger.getEffectiveLevel()).lower() for part, logger in found.items()}


def set_level(part: str, level: LogLevel | None) -> None:
    """Set the level of ``part`` and of the parts below it that have none of their own; None: that of the part above it.

    The level lasts until the process ends.

    Raises:
        LocalProtocolError: as `check_level`.
    """
    check_level(part, level)
    name = _ROOT if part == ALL_PARTS else f"{_ROOT}.{part}"
    logging.getLogger(name).setLevel(logging.NOTSET if level is None else level.value.upper())


def check_level(part: str, level: LogLevel | None) -> None:
    """Check the arguments of `set_level`.

    Raises:
        LocalProtocolError: there is no such part, or ``level`` is None for `ALL_PARTS`.
    """
    if part not in (known := levels()):
        raise LocalProtocolError(f"there is no part {part[:80]!r} of the log", hint=f"use one of {', '.join(known)}")
    if part == ALL_PARTS and level is None:
        raise LocalProtocolError(f"{ALL_PARTS!r} needs a level", hint=f"use one of {', '.join(LogLevel)}")
