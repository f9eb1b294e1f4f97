"""URLs of MQTT servers."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from penstock.errors import ConfigError
from penstock.runtime.io.network import is_host, without_secret

__all__ = ["DEFAULT_PORT", "SCHEMES", "BrokerUrl", "broker_url", "parse_broker_url", "with_credentials"]

DEFAULT_PORT: Final = 1883

_PORTS: Final = {"mqtt": DEFAULT_PORT, "mqtts": 8883, "ws": 80, "wss": 443}

SCHEMES: Final = tuple(_PORTS)


class BrokerUrl(NamedTuple):
    """Address and transport of a server: ``mqtt`` (TCP), ``mqtts`` (TLS), ``ws`` and ``wss`` (WebSocket).

    ``path`` (with its query) applies to WebSocket only. ``username`` and ``password`` come from ``user:password@``.
    """

    scheme: str
    host: str
    port: int
    path: str = ""
    username: str | None = None
    password: str | None = None

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in ("mqtts", "wss")

    @property
    def websocket(self) -> bool:
        """Whether MQTT uses WebSocket."""
        return self.scheme in ("ws", "wss")

    @property
    def authority(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        """Return the URL without password; HOST:PORT for plain TCP."""
        return self.authority if self.scheme == "mqtt" else f"{self.scheme}://{self.authority}{self.path}"


def parse_broker_url(url: str) -> BrokerUrl:
    """Parse ``mqtt://``, ``mqtts://``, ``ws://`` or ``wss://`` ``[user[:password]@]host[:port][/path]``.

    Without a scheme, as in ``HOST:PORT``, it is ``mqtt://``.

    Raises:
        ConfigError: another scheme, no host, an invalid port, a path without WebSocket.
    """
    given: object = url
    if not isinstance(given, str):
        raise ConfigError(f"broker URL {given!r:.60} is not text", option="broker", hint="write 'mqtt://HOST:PORT'")
    try:
        parts = urlsplit(url if "://" in url or "@" in url else f"mqtt://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ConfigError(f"broker URL {without_secret(url)!r} cannot be read", option="broker", why=_problem(e)) from e
    websocket = parts.scheme in ("ws", "wss")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    if parts.scheme not in _PORTS or not host or parts.fragment or (path not in ("", "/") and not websocket):
        raise ConfigError(
            f"broker URL {without_secret(url)!r} cannot be used",
            option="broker",
            hint="write HOST:PORT, mqtt://HOST, mqtts://HOST:PORT, ws://HOST:PORT/PATH or wss://HOST:PORT/PATH",
        )
    _check_host(host)
    return BrokerUrl(
        parts.scheme,
        host,
        port or _PORTS[parts.scheme],
        (path or "/") if websocket else "",
        None if parts.username is None else unquote(parts.username),
        None if parts.password is None else unquote(parts.password),
    )


def with_credentials(url: str, username: str, password: str) -> str:
    """Return ``url``, which has no user, with these credentials."""
    scheme, _, place = url.rpartition("://")
    return f"{scheme or 'mqtt'}://{quote(username, safe='')}:{quote(password, safe='')}@{place}"


def _problem(error: ValueError) -> str:
    """The reason why a URL cannot be split, without the library's error text."""
    text = str(error)
    if text.startswith("Port"):
        return "the port is not a number from 0 to 65535"
    return "the brackets of an IPv6 address do not match" if "IPv6" in text else text


def broker_url(host: str, port: int | None, *, tls: bool) -> BrokerUrl:
    """Return the address for ``host`` (a name, ``HOST:PORT`` or a URL), ``port`` and ``tls``.

    Raises:
        ConfigError: the URL is invalid, or contradicts ``port`` or ``tls``.
    """
    if "://" not in host and (host.count(":") == 1 or host.startswith("[")):  # an IPv6 address has more colons
        host = f"{'mqtts' if tls else 'mqtt'}://{host}"
    if "://" not in host:
        _check_host(host)
        return BrokerUrl("mqtts" if tls else "mqtt", host, port or _PORTS["mqtts" if tls else "mqtt"])
    url = parse_broker_url(host)
    if port is not None:
        raise ConfigError(
            "mqtt: a URL and a port exclude each other", option="port", hint="write the port into the URL"
        )
    if tls and not url.tls:
        raise ConfigError(
            f"mqtt: {url.scheme}://{url.authority} has no TLS",
            option="tls",
            hint=f"write {url.scheme}s:// instead of {url.scheme}://",
        )
    return url


def _check_host(host: str) -> None:
    if not is_host(host):
        raise ConfigError(
            f"broker: {host!r} is not a host name",
            option="broker",
            why="the parts of a name between its dots have 1 to 63 characters",
            hint="correct the address",
        )
