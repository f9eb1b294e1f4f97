"""The options with which a command connects to an MQTT broker: one list for every command that does."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, TypeVar

import typer

from penstock.cli.options import grouped
from penstock.errors import ConfigError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.mqtt.client import EnhancedAuthentication, TlsOptions
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.hlc import Hlc

__all__ = ["BrokerAccess", "BrokerOptions", "Credentials", "Token", "connects", "parse_token", "reaches"]

T = TypeVar("T")

DEFAULT = "mqtt://127.0.0.1:1883"

_NOT_AUTHORIZED = 0x87
_LOGIN_REFUSED = (0x86, _NOT_AUTHORIZED)
"""Reason codes of CONNACK: Bad User Name or Password, Not authorized [MQTT 5.0 section 3.2.2.2]."""
_LOG_IN = (
    "give a user and password that the broker accepts: --username and --password-file (PENSTOCK_USERNAME, "
    "PENSTOCK_PASSWORD_FILE), or a client certificate: --cert-file"
)
_GRANT = (
    "check the credentials, and that the broker's policy grants Connect to this user or certificate with the client "
    "identifier that the command uses: --client-id"
)

_START = "start a node (penstock up), or name its MQTT listener: --broker mqtt://HOST:PORT"

Token = Annotated[
    str | None,
    typer.Option(
        help="Write under this token: the version of the SET that acquired the lock.",
        envvar="PENSTOCK_FENCING_TOKEN",
        metavar="HLC",
    ),
]


class Credentials(TypedDict):
    """The arguments of an MQTT client that say who it is and whom it trusts."""

    username: str | None
    password: str | None
    authentication: EnhancedAuthentication | None
    tls: TlsOptions | None


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """Where the broker is, and how to get in."""

    broker: Annotated[
        str,
        typer.Option(
            help="The broker: HOST:PORT, mqtt://HOST[:PORT], mqtts://, ws:// or wss://.",
            envvar="PENSTOCK_BROKER",
            metavar="URL",
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
    client_id: Annotated[str | None, typer.Option(help="MQTT client identifier, default: a new one.", metavar="ID")] = (
        None
    )

    def credentials(self) -> Credentials:
        """What a client is made with, beside its address. The password is sent, or proved where that was asked for.

        Raises:
            ConfigError: the password file cannot be read, or a user name or a password is given without the other.
        """
        from penstock.mqtt.url import parse_broker_url

        username, password = self.username, self._password()
        url = parse_broker_url(self.broker)
        if not self.scram:
            self._check_login(username or url.username, password or url.password)
            return Credentials(username=username, password=password, authentication=None, tls=self._tls())
        from penstock.mqtt.client import ScramAuthentication

        username, password = username or url.username, password or url.password
        if not username or not password:
            raise ConfigError(
                "--scram: it needs a user name and a password",
                option="--scram",
                do="give --username and --password-file, or write both into the URL",
            )
        proof = ScramAuthentication(username, password)
        return Credentials(username=None, password=None, authentication=proof, tls=self._tls())

    def _check_login(self, username: str | None, password: str | None) -> None:
        if username is not None and password is None:
            raise ConfigError(
                f"--username {username!r}: there is no password",
                option="--username",
                do="set --password-file (PENSTOCK_PASSWORD_FILE), or omit the user name if the broker has no users",
            )
        if password is not None and username is None:
            raise ConfigError(
                "--password-file: there is no user name",
                option="--password-file",
                do="set --username (PENSTOCK_USERNAME), or omit the password if the broker has no users",
            )

    def _tls(self) -> TlsOptions | None:
        """What TLS needs to know; None: the URL decides alone."""
        from penstock.mqtt.client import TlsOptions

        if self.ca_file is None and self.cert_file is None and self.key_file is None:
            return None
        return TlsOptions(self.ca_file, self.cert_file, self.key_file)

    def _password(self) -> str | None:
        if self.password_file is None:
            return None
        from penstock.runtime.io.credentials import read_password

        return read_password(self.password_file, "--password-file")

    @asynccontextmanager
    async def opened(self, client: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """``client``, connected.

        Raises:
            UnavailableError: nobody answers there; it says what to do.
            RefusedError: the broker refused the login; it names the options.
        """
        async with AsyncExitStack() as stack:
            async with self.explained():
                entered = await stack.enter_async_context(client)
            yield entered

    @asynccontextmanager
    async def explained(self, do: str = _START) -> AsyncIterator[None]:
        """Say in terms of the command line what to do if the broker does not answer or refuses the login."""
        try:
            yield
        except RefusedError as error:
            if error.code in _LOGIN_REFUSED:
                error.do = _GRANT if error.code == _NOT_AUTHORIZED and self._identified else _LOG_IN
            raise
        except UnavailableError as error:
            if error.do is not None and "penstock up" not in error.do:
                raise  # it knows better: TLS, the name of the host, another protocol
            raise UnavailableError(error.what, applied=False, why=error.why, do=do) from error

    @property
    def _identified(self) -> bool:
        """Whether the command presents credentials to the broker."""
        from penstock.mqtt.url import parse_broker_url

        return bool(self.username or self.cert_file or parse_broker_url(self.broker).username)

    @property
    def shown(self) -> str:
        """The broker's address without what is secret."""
        from penstock.mqtt.url import parse_broker_url

        url = parse_broker_url(self.broker)
        return f"{url.scheme}://{url.authority}{url.path}"


@dataclass(frozen=True, slots=True)
class BrokerOptions(BrokerAccess):
    """The same, of a command that asks the state store there."""

    timeout: Annotated[
        float,
        typer.Option("--timeout-s", "--timeout", help="Seconds to wait for an answer.", min=0.001, metavar="S"),
    ] = 10.0

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
            **self.credentials(),
        )
        async with self.opened(client) as store:
            yield store


reaches = grouped(BrokerAccess, "access")
"""Give a command the options of :class:`BrokerAccess`; it takes them as its argument ``access``."""

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
