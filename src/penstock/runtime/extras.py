"""Libraries of extras, which may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import ConfigError

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(extra: str, what: str, option: str = "") -> Iterator[None]:
    """Translate a failed import of the extra ``extra`` inside the block. ``what`` is the error, ``option`` its option.

    Raises:
        ConfigError: a library of the extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(what, option=option, why=str(error), hint=f'pip install "penstock[{extra}]"') from error
