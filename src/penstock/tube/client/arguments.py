"""Checks of a client's arguments, made where it is created, so that a mistake is an error at once."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from numbers import Integral, Real

from penstock.errors import ConfigError, LocalProtocolError
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.strings import TOPIC_RULE, valid_topic

__all__ = ["check_login", "check_offsets", "check_seconds", "check_topic", "check_whole"]


def check_seconds(**given: object) -> None:
    """Raise ConfigError unless all are times in seconds above 0."""
    for option, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
            raise ConfigError(f"tube: {option} {value!r} is not possible", option=option, do="give seconds above 0")


def check_whole(least: int, most: int, **given: object) -> None:
    """Raise ConfigError unless all are whole numbers from ``least`` to ``most``."""
    for option, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
            do = f"choose {least:,} to {most:,}"
            raise ConfigError(f"tube: {option} {value!r} is not possible", option=option, do=do)


def check_login(user: object, password: object, tls: object) -> None:
    """Raise ConfigError unless these are the credentials of a client, or none."""
    if (user is None) != (password is None):
        raise ConfigError(
            "tube: a user needs a password, and a password its user",
            option="user",
            do="give both, or neither where the cluster has no users",
        )
    if not isinstance(user, str | None) or not isinstance(password, str | None):
        raise ConfigError("tube: user and password are texts", option="user")
    if tls is not None and not isinstance(tls, ssl.SSLContext):
        raise ConfigError(
            f"tube: tls {tls!r} is no ssl.SSLContext",
            option="tls",
            do="make one: ssl.create_default_context(cafile='ca.pem')",
        )


def check_topic(topic: object) -> None:
    """Raise LocalProtocolError unless ``topic`` is a valid topic name."""
    if not valid_topic(topic):
        raise LocalProtocolError(f"tube: {topic!r} cannot be a topic: {TOPIC_RULE}")


def check_offsets(option: str, offsets: Iterable[object]) -> None:
    """Raise ConfigError unless all are valid index offsets."""
    for value in offsets:
        if (
            isinstance(value, bool)
            or not isinstance(value, Integral)
            or int(value) < 0
            or int(value) % INDEX_RECORD_BYTES
        ):
            raise ConfigError(
                f"tube: {option}: {value!r} is no index offset",
                option=option,
                do=f"give a multiple of {INDEX_RECORD_BYTES}, as messages (with_offsets) and positions tell them",
            )
