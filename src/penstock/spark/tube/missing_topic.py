"""A topic of the tube that somebody else must fill: where it does not exist, the error says who and how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import ConfigError

__all__ = ["telling_of_topic"]


@contextmanager
def telling_of_topic(then: str, *, why: str, do: str, option: str = "tubemq.topic") -> Iterator[None]:
    """``then``: what follows where the topic of ``option`` does not exist, ``why`` it may not, what to ``do``.

    Raises:
        ConfigError: the one that was raised inside, with that; others as they are.
    """
    try:
        yield
    except ConfigError as error:
        if "does not exist" not in error.what:
            raise
        raise ConfigError(f"{error.what}: {then}", option=option, why=why, do=do) from error
