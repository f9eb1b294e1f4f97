"""Values that people write: durations and sizes with a unit, and the nearest known name for a misspelt one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

__all__ = ["DURATIONS", "SIZES", "did_you_mean", "duration_ms", "nearest", "size_bytes"]

DURATIONS: Final = "500ms, 10s, 5m, 2h or 1d"
"""Examples of durations, for messages."""
SIZES: Final = "512KiB, 64MiB or 4GiB"
"""Examples of sizes, for messages."""

_DURATION: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?(ms|s|m|min|h|d|)", re.ASCII)
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE: Final = re.compile(r"(\d{1,15}) ?(B|KiB|MiB|GiB|TiB|)", re.ASCII | re.IGNORECASE)
_UNITS_BYTES: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def duration_ms(text: str, *, unit: str) -> int:
    """Milliseconds of a duration such as ``500ms``, ``10s``, ``1.5h`` or ``1d``; ``unit`` is that of a bare number.

    Pipeline files have the durations of Spark instead (:func:`penstock.pipelines.spec.values.duration_ms`).

    Raises:
        ValueError: ``text`` is not a duration.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a duration: write {DURATIONS}")
    return round(float(found[1]) * _UNITS_MS[found[2] or unit])


def size_bytes(text: str) -> int:
    """Bytes of a size such as ``512KiB``, ``64MiB`` or ``4GiB``; a bare number is bytes.

    Raises:
        ValueError: ``text`` is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write {SIZES}")
    return int(found[1]) * _UNITS_BYTES[found[2].lower()]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to ``name``, regardless of case; None if none is similar."""
    names = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return names[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """The question ``did you mean 'NAME'?`` with the most similar known name; None if none is similar."""
    near = nearest(name, known)
    return None if near is None else f"did you mean {near!r}?"
