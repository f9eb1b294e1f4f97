"""Arguments of TubeMQ clients: addresses of masters, client ids, credentials, and checks of the values.

Clients check their arguments when they are created, so that a mistake is reported at once.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import ssl
from collections.abc import Iterable, Sequence
from functools import cache
from numbers import Integral, Real

from penstock import __version__
from penstock.errors import ConfigError, LocalProtocolError
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.network import parse_address
from penstock.security.tube_key import tube_key
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.strings import TOPIC_RULE, valid_topic
from penstock.tube.engine.client.request_session import ClientCredentials

__all__ = [
    "Address",
    "check_login",
    "check_offsets",
    "check_seconds",
    "check_topic",
    "check_whole",
    "credentials",
    "empty_record",
    "local_ipv4",
    "new_client_id",
    "parse_masters",
    "too_large",
]

# --- addresses ---


Address = tuple[str, int]


def parse_masters(text: str | Sequence[Address]) -> list[Address]:
    """Parse ``host:port,host:port`` as addresses; each may have the scheme ``tubemq://``, as ``penstock status`` prints
    it.

    Raises:
        ConfigError: an item is not host:port.
    """
    if not isinstance(text, str):
        given: object = text
        if isinstance(given, Sequence) and given and all(map(_is_address, given)):
            return list(text)
        raise ConfigError(
            f"tube: masters: got {text!r}, expected addresses",
            option="masters",
            hint="write '127.0.0.1:8715', or [('127.0.0.1', 8715)]",
        )
    found = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            address = parse_address(item.removeprefix("tubemq://"))
            if address.port == 0:
                raise ValueError("expected a port from 1 to 65535")
        except ValueError as error:
            raise ConfigError(
                f"tube: master {item!r} is not an address",
                option="masters",
                why=str(error),
                hint="write HOST:PORT; the port of a TubeMQ master is 8715 by default, 8716 with TLS",
            ) from None
        found.append((address.host, address.port))
    if not found:
        raise ConfigError(
            "tube: no address of a master", option="masters", hint="write HOST:PORT, as in 127.0.0.1:8715"
        )
    return found


def _is_address(item: object) -> bool:
    match item:
        case (str(), int(port)):
            return 0 < port < 1 << 16
    return False


def local_ipv4() -> str:
    """An IPv4 address of this machine: the address of its host name, otherwise loopback. Sends no packets."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


# --- client ids and credentials ---


_COUNTER = itertools.count(1)


def new_client_id(kind: str, group: str | None = None) -> str:
    """Return a unique client id ``[group_]ip-pid-ms-number-kind-penstock-version``."""
    # Random bits, because executors of one machine image may have equal address, pid and time.
    number = f"{next(_COUNTER)}{random.randrange(1 << 32):08x}"  # noqa: S311 - distinct, not secret
    tail = f"{_address()}-{os.getpid()}-{wall_clock_ms()}-{number}-{kind}-penstock-{__version__}"
    return tail if group is None else f"{group}_{tail}"


def credentials(username: str | None, password: str | None) -> ClientCredentials | None:
    """Return the credentials of the user ``username``; None without one."""
    if username is None:
        return None
    key = tube_key(username, (password or "").encode())
    return ClientCredentials(username, key, wall_clock_ms, lambda: random.randrange(1 << 31))  # noqa: S311 - the protocol's


@cache
def _address() -> str:
    """Cached: each Spark task creates an id, and the resolver may be slow."""
    return local_ipv4()


# --- checks ---


def check_seconds(**given: object) -> None:
    """Raise ConfigError unless all are times in seconds above 0."""
    for option, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
            raise ConfigError(f"tube: {option}: got {value!r}", option=option, hint="set a number of seconds above 0")


def check_whole(least: int, most: int, **given: object) -> None:
    """Raise ConfigError unless all are whole numbers from ``least`` to ``most``."""
    for option, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
            hint = f"set a whole number from {least:,} to {most:,}"
            raise ConfigError(f"tube: {option}: got {value!r}", option=option, hint=hint)


def check_login(username: object, password: object, tls: object) -> None:
    """Raise ConfigError unless username and password are both set or both missing."""
    if (username is None) != (password is None):
        raise ConfigError(
            "tube: only one of username and password is set",
            option="username",
            hint="set both, or neither if the cluster has no users",
        )
    if not isinstance(username, str | None) or not isinstance(password, str | None):
        raise ConfigError("tube: username or password is not text", option="username", hint="set both to a str")
    if tls is not None and not isinstance(tls, ssl.SSLContext):
        raise ConfigError(
            f"tube: tls: got {tls!r}, expected an ssl.SSLContext",
            option="tls",
            hint="create one: ssl.create_default_context(cafile='ca.pem')",
        )


def check_topic(topic: object) -> None:
    """Raise LocalProtocolError unless ``topic`` is a valid topic name."""
    if not valid_topic(topic):
        raise LocalProtocolError(
            f"tube: {topic!r} is not a valid topic name", why=f"a topic name is {TOPIC_RULE}", hint="correct the name"
        )


def empty_record() -> LocalProtocolError:
    """Create the error for an empty record, which brokers cannot store."""
    return LocalProtocolError(
        "tube: an empty record cannot be stored",
        why="it has no value, key, headers or other attributes",
        hint="set a value",
    )


def too_large(topic: str, size: int, most: int) -> LocalProtocolError:
    """Create the error for a record whose value exceeds the topic's limit; sizes in bytes."""
    return LocalProtocolError(
        f"tube: a value of {size} bytes is too large for topic {topic!r}",
        why=f"its limit is {most} bytes",
        hint=f"send smaller values, or raise the limit: penstock tube topic alter {topic} --max-message-size SIZE",
    )


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
                f"tube: {option}: {value!r} is not an index offset",
                option=option,
                hint=f"set a multiple of {INDEX_RECORD_BYTES}, such as the offset of a message or of Consumer.offsets",
            )
