"""The options with which a command connects to an MQTT broker: one list for every command that does."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.grouped import grouped
from penstock.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from penstock.mqtt.client import EnhancedAuthentication, TlsOptions
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.hlc import Hlc

__all__ = ["BrokerOptions", "Token", "connects", "parse_token"]

DEFAULT = "mqtt://127.0.0.1:1883"

_START = "start a node (penstock up), or name its MQTT listener: --broker mqtt://HOST:PORT"

Token = Annotated[
    str | None,
    typer.Option(
        help="Write under this token: the version of the SET that acquired the lock.",
        envvar="PENSTOCK_FENCING_TOKEN",
        metavar="HLC",
    ),
]


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Where the broker is, and how to get in."""

    broker: Annotated[
        str,
        typer.Option(
            help="The broker: mqtt://HOST[:PORT], mqtts://, ws:// or wss://.", envvar="PENSTOCK_BROKER", metavar="URL"
        ),
    ] = DEFAULT
    username: Annotated[str | None, typer.Option(help="User name.", envvar="PENSTOCK_USERNAME", metavar="NAME")] = None
    password_file: Annotated[
        Path | None,
        typer.Option(help="File whose first line is the password.", envvar="PENSTOCK_PASSWORD_FILE", metavar="PATH"),
    ] = None
    scram: Annotated[
        bool, typer.Option("--scram", help="Prove the password by SCRAM-SHA-256 instead of sending it.")
    ] = False
    ca_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM of the authorities to trust; default: the system's.", envvar="PENSTOCK_CA_FILE", metavar="PATH"
        ),
    ] = None
    cert_file: Annotated[
        Path | None,
        typer.Option(help="PEM of the client's certificate.", envvar="PENSTOCK_CERT_FILE", metavar="PATH"),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(help="PEM of its key; default: in --cert-file.", envvar="PENSTOCK_KEY_FILE", metavar="PATH"),
    ] = None
    client_id: Annotated[
        str | None, typer.Option(help="MQTT client identifier, default: the command's own.", metavar="ID")
    ] = None
    timeout: Annotated[
        float,
        typer.Option("--timeout-s", "--timeout", help="Seconds to wait for an answer.", min=0.001, metavar="S"),
    ] = 10.0

    def tls(self) -> TlsOptions | None:
        """What TLS needs to know; None: the URL decides alone."""
        from penstock.mqtt.client import TlsOptions

        if self.ca_file is None and self.cert_file is None and self.key_file is None:
            return None
        return TlsOptions(self.ca_file, self.cert_file, self.key_file)

    def authentication(self) -> EnhancedAuthentication | None:
        """The method of enhanced authentication that was asked for."""
        if not self.scram:
            return None
        from penstock.mqtt.client import ScramAuthentication
        from penstock.mqtt.url import parse_broker_url

        url = parse_broker_url(self.broker)
        username, password = self.username or url.username, self.password() or url.password
        if not username or not password:
            raise ConfigError(
                "--scram: it needs a user name and a password",
                option="--scram",
                do="give --username and --password-file, or write both into the URL",
            )
        return ScramAuthentication(username, password)

    def password(self) -> str | None:
        """The password in the file.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.password_file is None:
            return None
        try:
            return self.password_file.read_text(encoding="utf-8").split("\n", 1)[0].removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"--password-file {self.password_file}: {why}", option="--password-file") from error

    @asynccontextmanager
    async def store(self) -> AsyncIterator[StateStoreClient]:
        """The state store at the broker.

        Raises:
            UnavailableError: nobody answers there; it says what to do.
        """
        from penstock.statestore.client.client import StateStoreClient

        client = StateStoreClient.connect(
            self.broker,
            client_id=self.client_id or f"penstock-kv-{secrets.token_hex(6)}",
            timeout_s=self.timeout,
            username=self.username,
            password=self.password(),
            authentication=self.authentication(),
            tls=self.tls(),
        )
        async with self.explained():
            store = await client.__aenter__()
        try:
            yield store
        finally:
            await client.__aexit__(None, None, None)

    @asynccontextmanager
    async def explained(self, do: str = _START) -> AsyncIterator[None]:
        """Say in terms of the command line what to do where nobody answers at the broker."""
        try:
            yield
        except UnavailableError as error:
            if error.do is not None and "penstock up" not in error.do:
                raise  # it knows better: TLS, the name of the host, another protocol
            raise UnavailableError(error.what, applied=False, why=error.why, do=do) from error

    @property
    def shown(self) -> str:
        """The broker's address without what is secret."""
        from penstock.mqtt.url import parse_broker_url

        url = parse_broker_url(self.broker)
        return f"{url.scheme}://{url.authority}{url.path}"


connects = grouped(BrokerOptions, "options")
"""Give a command the options of :class:`BrokerOptions`; it takes them as its argument ``options``."""


def parse_token(text: str | None) -> Hlc | None:
    """The fencing token that ``text`` is.

    Raises:
        ConfigError: it is none.
    """
    if text is None:
        return None
    from penstock.statestore.hlc import parse

    token = parse(text)
    if token is None:
        raise ConfigError(
            f"--fencing-token: got {text!r}, expected a version as `kv set` prints it: MILLISECONDS:COUNTER:NODE",
            option="--fencing-token",
        )
    return token
