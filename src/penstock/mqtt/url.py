"""Addresses of MQTT servers as URLs."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from penstock.errors import ConfigError

__all__ = ["DEFAULT_PORT", "parse_url"]

DEFAULT_PORT: Final = 1883


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of ``mqtt://host[:port]``.

    Raises:
        ConfigError: another scheme, no host, a port that is none.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ConfigError(f"broker URL {url!r} cannot be read", option="broker", why=str(e)) from e
    if parts.scheme != "mqtt" or not host or parts.path not in ("", "/") or parts.username is not None:
        raise ConfigError(
            f"broker URL {url!r} cannot be used", option="broker", do="write mqtt://HOST or mqtt://HOST:PORT"
        )
    return host, port or DEFAULT_PORT
