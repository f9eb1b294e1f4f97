"""Options of commands that connect to an MQTT broker: address, credentials, TLS, client identifier."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, TypeVar

import typer

from penstock.cli.options import duration_option, shared_options
from penstock.errors import ConfigError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.mqtt.client import EnhancedAuthentication, TlsOptions
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.hlc import Hlc

__all__ = [
    "BrokerOptions",
    "MqttCredentials",
    "StateStoreOptions",
    "Token",
    "connects_to_broker",
    "connects_to_store",
    "parse_token",
]

T = TypeVar("T")

DEFAULT = "mqtt://127.0.0.1:1883"

_NOT_AUTHORIZED = 0x87
_LOGIN_REFUSED = (0x86, _NOT_AUTHORIZED)
"""Reason codes of CONNACK: Bad User Name or Password, Not authorized [MQTT 5.0 section 3.2.2.2]."""
_LOG_IN = (
    "set a user name and password that the broker accepts: --username and --password-file (PENSTOCK_USERNAME, "
    "PENSTOCK_PASSWORD_FILE), or a client certificate: --cert-file"
)
_GRANT = (
    "check the credentials, and that the broker's policy grants Connect to this user or certificate with the client "
    "identifier that the command uses: --client-id"
)

_START = "start a node (penstock up), or set the address of its MQTT listener: --broker mqtt://HOST:PORT"

Token = Annotated[
    str | None,
    typer.Option(
        help="Fencing token: the version of the SET that acquired the lock.",
        envvar="PENSTOCK_FENCING_TOKEN",
        metavar="VERSION",
    ),
]


class MqttCredentials(TypedDict):
    """Credentials and TLS arguments of an MQTT client."""

    username: str | None
    password: str | None
    authentication: EnhancedAuthentication | None
    tls: TlsOptions | None


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Address of the broker, credentials, TLS and client identifier."""

    broker: Annotated[
        str,
        typer.Option(
            help="MQTT broker: mqtt://HOST[:PORT], mqtts://, ws://, wss:// or HOST:PORT.",
            envvar="PENSTOCK_BROKER",
            metavar="URL",
        ),
    ] = DEFAULT
    username: Annotated[str | None, typer.Option(help="User name.", envvar="PENSTOCK_USERNAME", metavar="NAME")] = None
    password_file: Annotated[
        Path | None,
        typer.Option(help="File whose first line is the password.", envvar="PENSTOCK_PASSWORD_FILE", metavar="FILE"),
    ] = None
    scram: Annotated[
        bool, typer.Option("--scram", help="Authenticate with SCRAM-SHA-256 instead of sending the password.")
    ] = False
    ca_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the trusted authorities. Default: the system's.",
            envvar="PENSTOCK_CA_FILE",
            metavar="FILE",
        ),
    ] = None
    cert_file: Annotated[
        Path | None,
        typer.Option(help="PEM file of the client certificate.", envvar="PENSTOCK_CERT_FILE", metavar="FILE"),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(help="PEM file of its key. Default: in --cert-file.", envvar="PENSTOCK_KEY_FILE", metavar="FILE"),
    ] = None
    client_id: Annotated[
        str | None, typer.Option(help="MQTT client identifier. Default: a random one.", metavar="ID")
    ] = None

    def credentials(self) -> MqttCredentials:
        """Arguments of a client.

        Raises:
            ConfigError: the password file cannot be read, or only one of user name and password is set.
        """
        from penstock.mqtt.url import parse_broker_url

        username, password = self.username, self._password()
        url = parse_broker_url(self.broker)
        if not self.scram:
            self._check_login(username or url.username, password or url.password)
            return MqttCredentials(username=username, password=password, authentication=None, tls=self._tls())
        from penstock.mqtt.client import ScramAuthentication

        username, password = username or url.username, password or url.password
        if not username or not password:
            raise ConfigError(
                "--scram needs a user name and a password",
                option="--scram",
                do="set --username and --password-file, or put both into the URL",
            )
        proof = ScramAuthentication(username, password)
        return MqttCredentials(username=None, password=None, authentication=proof, tls=self._tls())

    def _check_login(self, username: str | None, password: str | None) -> None:
        if username is not None and password is None:
            raise ConfigError(
                f"--username {username!r} is set without a password",
                option="--username",
                do="set --password-file (PENSTOCK_PASSWORD_FILE), or omit the user name if the broker has no users",
            )
        if password is not None and username is None:
            raise ConfigError(
                "--password-file is set without a user name",
                option="--password-file",
                do="set --username (PENSTOCK_USERNAME), or omit the password if the broker has no users",
            )

    def _tls(self) -> TlsOptions | None:
        """TLS options; None: the URL scheme alone decides."""
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
            UnavailableError: the broker does not respond.
            RefusedError: the broker rejected the credentials.
        """
        async with AsyncExitStack() as stack:
            async with self.explained():
                entered = await stack.enter_async_context(client)
            yield entered

    @asynccontextmanager
    async def explained(self, do: str = _START) -> AsyncIterator[None]:
        """Add a hint with command line options to errors of the connection."""
        try:
            yield
        except RefusedError as error:
            if error.code in _LOGIN_REFUSED:
                error.do = _GRANT if error.code == _NOT_AUTHORIZED and self._identified else _LOG_IN
            raise
        except UnavailableError as error:
            if error.do is not None and "penstock up" not in error.do:
                raise  # its hint is more specific: TLS, host name, another protocol
            raise UnavailableError(error.what, applied=False, why=error.why, do=do) from error

    @property
    def _identified(self) -> bool:
        """True if the command has credentials."""
        from penstock.mqtt.url import parse_broker_url

        return bool(self.username or self.cert_file or parse_broker_url(self.broker).username)

    @property
    def shown(self) -> str:
        """URL of the broker without credentials."""
        from penstock.mqtt.url import parse_broker_url

        url = parse_broker_url(self.broker)
        return f"{url.scheme}://{url.authority}{url.path}"


@dataclass(frozen=True, slots=True)
class StateStoreOptions(BrokerOptions):
    """The same, and the timeout of requests to the state store."""

    timeout: Annotated[float, duration_option(text="Timeout of each request.", at_least_s=0.001, default="10s")] = 10.0

    @asynccontextmanager
    async def store(self) -> AsyncIterator[StateStoreClient]:
        """Client of the state store, connected.

        Raises:
            UnavailableError: the broker does not respond.
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


connects_to_broker = shared_options(BrokerOptions, "access")
"""Give a command the options of :class:`BrokerOptions`, as its argument ``access``."""

connects_to_store = shared_options(StateStoreOptions, "options")
"""Give a command the options of :class:`StateStoreOptions`, as its argument ``options``."""


def parse_token(text: str | None) -> Hlc | None:
    """Parse a fencing token.

    Raises:
        ConfigError: ``text`` is not a version.
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
