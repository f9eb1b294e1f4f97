"""Names and small values of data source options: found without regard to case, as Spark hands them over."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from penstock.errors import ConfigError

__all__ = ["boolean", "canonical", "positive"]


def canonical(
    source: str, options: Mapping[str, str], known: Mapping[str, str], unsupported: Mapping[str, str]
) -> dict[str, str]:
    """``options`` of the format ``source`` with every name as documented in ``known``.

    ``unsupported`` are options that users of the format would expect, with what to do instead.

    Raises:
        ConfigError: a name that is not known or not supported; it says what was meant, perhaps.
    """
    names = {name.lower(): name for name in (*known, *unsupported)}
    return {_canonical(source, name, names, known, unsupported): value for name, value in options.items()}


def _canonical(
    source: str, name: str, names: Mapping[str, str], known: Mapping[str, str], unsupported: Mapping[str, str]
) -> str:
    found = names.get(name.lower())
    if found is not None and found in known:
        return found
    if found is not None:
        raise ConfigError(
            f"option {found} is not supported by the {source} source", option=found, do=unsupported[found]
        )
    close = difflib.get_close_matches(name.lower(), [each.lower() for each in known], n=1)
    meant = f"did you mean {names[close[0]]}? " if close else ""
    raise ConfigError(
        f"option {name!r} is not known to the {source} source",
        option=name,
        do=f"{meant}Known options: {', '.join(known)}",
    )


def positive(option: str, text: str, meaning: str) -> int:
    """``text`` as a number above 0."""
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdecimal()) or int(stripped) == 0:
        raise ConfigError(f"{option} {text!r} is not a number above 0", option=option, do=meaning)
    return int(stripped)


def boolean(option: str, text: str, meaning: str) -> bool:
    """``text`` as true or false."""
    value = {"true": True, "false": False}.get(text.strip().lower())
    if value is None:
        raise ConfigError(f"{option} {text!r} is neither true nor false", option=option, do=meaning)
    return value
