"""Parsing of data source options: case-insensitive names, as Spark passes them, simple values, and the login."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Literal

from penstock.errors import ConfigError
from penstock.mqtt.url import parse_broker_url
from penstock.runtime.config.values import duration_ms as parse_duration
from penstock.runtime.config.values import nearest
from penstock.runtime.io.tls import Login, TlsOptions

__all__ = [
    "LOGIN_OPTIONS",
    "MOST",
    "MOST_MS",
    "boolean",
    "broker_url",
    "canonical",
    "duration_ms",
    "json_value",
    "parse_login",
    "positive",
]


_OF_SPARK = {"checkpointlocation", "queryname"}
"""Spark's own options of a stream, which it also passes to the sink."""


def canonical(
    format_name: str,
    options: Mapping[str, str],
    known: Mapping[str, str],
    unsupported: Mapping[str, str],
    *,
    kind: Literal["source", "sink"] = "source",
) -> dict[str, str]:
    """Return the ``options`` of a source or sink of ``format_name`` with the spelling of their names in ``known``.

    ``unsupported`` has options that users of the format may expect, with their replacement; ``a.*`` matches all other
    names that begin with ``a.``.

    Raises:
        ConfigError: an option is unknown or not supported; the error suggests a similar name.
    """
    names = {name.lower(): name for name in (*known, *unsupported)}
    found: dict[str, str] = {}
    for given, value in options.items():
        if kind == "sink" and given.lower() in _OF_SPARK:
            continue
        name = names.get(given.lower()) or names.get(f"{given.lower().partition('.')[0]}.*")
        if name is None:
            close = nearest(given, known)
            meant = f"did you mean {close}? " if close else ""
            raise ConfigError(
                f"the {format_name} {kind} has no option {given!r}",
                option=given,
                hint=f"{meant}Known options: {', '.join(known)}",
            )
        if name not in known:
            named = given if name.endswith(".*") else name
            raise ConfigError(
                f"option {named} is not supported by the {format_name} {kind}", option=named, hint=unsupported[name]
            )
        found[name] = value
    return found


MOST = (1 << 63) - 1
"""Maximum of a number: Spark's long."""
MOST_MS = (1 << 31) - 1
"""Maximum of a timeout in ms, 24 days: the limit of timers."""
_MOST_DIGITS = 19


def positive(option: str, text: str, meaning: str, *, most: int = MOST) -> int:
    """Parse ``text`` as a number from 1 to ``most``; ConfigError if it is not."""
    stripped = text.strip()
    digits = stripped.lstrip("0")
    if not (stripped.isascii() and stripped.isdecimal() and digits):
        raise ConfigError(f"{option} {text!r} is not a number above 0", option=option, hint=meaning)
    if len(digits) > _MOST_DIGITS or int(digits) > most:
        raise ConfigError(f"{option} {text!r} is more than {most}", option=option, hint=meaning)
    return int(digits)


def duration_ms(option: str, text: str, meaning: str) -> int:
    """Parse a duration above 0 in Spark's format: 500ms, 30s, 15m (or min), 2h, 1d; without a unit in ms."""
    try:
        found = parse_duration(text, unit="ms")
    except ValueError:
        found = 0
    if not found:
        raise ConfigError(f"{option} {text!r} is not a duration above 0", option=option, hint=meaning)
    return found


def broker_url(given: Mapping[str, str], option: str) -> str:
    """Return the URL of an MQTT broker in ``option``; ConfigError if it is not set or invalid."""
    broker = given.get(option, "")
    if not broker:
        raise ConfigError(
            f"{option} is not set", option=option, hint="set it to mqtt://HOST:PORT, for example mqtt://127.0.0.1:1883"
        )
    try:
        parse_broker_url(broker)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error.what}", option=option, why=error.why, hint=error.hint) from None
    return broker


def boolean(option: str, text: str, meaning: str) -> bool:
    """Parse ``text`` as true or false; ConfigError if it is neither."""
    value = {"true": True, "false": False}.get(text.strip().lower())
    if value is None:
        raise ConfigError(f"{option} {text!r} is neither true nor false", option=option, hint=meaning)
    return value


def json_value(text: str, *, parse_float: Callable[[str], object] | None = None) -> object:
    """Parse JSON; ValueError if it is invalid, nested too deeply, or ambiguous because an object contains a name
    twice."""
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number, parse_float=parse_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"it contains {name!r} twice")
            seen.add(name)
    return found


LOGIN_OPTIONS: Mapping[str, str] = {
    "tubemq.user": "user name, with tubemq.passwordFile (none)",
    "tubemq.passwordFile": "file whose first line is the password, on driver and executors (none)",
    "tubemq.tls": "true: connect with TLS; tubemq.master has the TLS ports (false, or true with tubemq.tlsCa)",
    "tubemq.tlsCa": "PEM file with trusted authorities, on driver and executors (those of the system)",
    "tubemq.tlsCert": "PEM file with the client certificate (none)",
    "tubemq.tlsKey": "PEM file with the private key (in tubemq.tlsCert)",
}
"""Description of each option, by its documented name."""


def parse_login(given: Mapping[str, str]) -> Login:
    """Parse the login options in ``given``, whose names have the documented spelling. Files are not read.

    Raises:
        ConfigError: only one of user and password file is set, or tubemq.tls is neither true nor false.
    """
    ca, cert, key = (given.get(f"tubemq.tls{name}") or None for name in ("Ca", "Cert", "Key"))
    named = any(file is not None for file in (ca, cert, key))
    text = given.get("tubemq.tls", "true" if named else "false")
    tls = boolean("tubemq.tls", text, LOGIN_OPTIONS["tubemq.tls"])
    return Login(
        given.get("tubemq.user") or None,
        given.get("tubemq.passwordFile") or None,
        TlsOptions(ca, cert, key) if tls else None,
    )
