"""Building blocks of commands: groups, shared options, durations and sizes, input, confirmation, connections."""

from __future__ import annotations

import gc
import math
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict, TypeVar

from penstock.cli.context_file import defaults, read_contexts
from penstock.cli.declarations import Commands, Option, shared_options
from penstock.cli.output import note, print_error, repainted, unless_standard
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.mqtt.client import EnhancedAuthentication, TlsOptions
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.hlc import Hlc

__all__ = [
    "COMPLETION_S",
    "DATA_DIR",
    "DEFAULT",
    "DURATION",
    "IN_ANOTHER_DIRECTORY",
    "BrokerOptions",
    "CaFile",
    "CertFile",
    "Commands",
    "Count",
    "DryRun",
    "Json",
    "KeyFile",
    "MqttCredentials",
    "PasswordFile",
    "StateStoreOptions",
    "Token",
    "Username",
    "Watch",
    "Yes",
    "confirmed",
    "connects_to_broker",
    "connects_to_store",
    "context_values",
    "duration_option",
    "input_bytes",
    "local_addresses",
    "local_data_dir",
    "local_node",
    "local_token",
    "parse_token",
    "repeat",
    "shared_options",
    "size_option",
    "start_collecting",
    "stored_keys",
]


DATA_DIR: Final = Path("penstock-data")
"""Default of a node's data directory, in the working directory."""
COMPLETION_S: Final = 1.0
"""Timeout in seconds of the requests of shell completion, for which the shell waits."""


def stored_keys(store: StateStoreOptions, pattern: str) -> list[bytes]:
    """Return the first keys that match ``pattern`` for shell completion; none if the store does not answer."""
    import asyncio

    async def keys() -> list[bytes]:
        async with asyncio.timeout(COMPLETION_S), store.store() as opened:
            return (await opened.scan_page(pattern))[0]

    try:
        return asyncio.run(keys())
    except (PenstockError, TimeoutError):  # no store to ask
        return []


def context_values(
    selected: str | None, variables: Mapping[str, str], given: Mapping[str, bool], params: Mapping[str, Any]
) -> Mapping[str, str | bool]:
    """Return the values of options that are not set: those of the context ``selected`` or of the current one; without
    a context the addresses of the node that runs here.

    ``variables``: environment variables of the options by name; ``given``: whether an option is set; ``params``: values
    without these.

    Raises:
        ConfigError: the context does not exist, or the file of the contexts cannot be read.
    """
    context = read_contexts().selected(selected)
    if context:
        return defaults(context, variables, given)
    return {} if "data_dir" in variables else local_addresses(params, given)  # these commands find it by themselves


def start_collecting() -> None:
    """Start garbage collection, without which the process of a command starts; it leaves out all present objects."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def local_addresses(params: Mapping[str, Any], given: Mapping[str, bool]) -> dict[str, str]:
    """Return the addresses of the node that this user runs in the local data directory, by the names of the options.

    ``params``: values without these defaults; ``given``: options that are set. If a TubeMQ master is set, the HTTP
    address is that of the same node only, and the other way round.
    """
    wanted = [name for name in ("broker", "tube_master", "http") if given.get(name) is False]
    node = _own_node(local_data_dir()) if wanted else None
    if node is None:
        return {}
    over_tls = params.get("tls")
    if over_tls is None:
        over_tls = any(params.get(name) for name in ("ca_file", "cert_file", "key_file"))
    web = node.get("http_local", node.get("http"))
    addresses = {
        "broker": node.get("listeners", {}).get("mqtt"),
        "tube_master": node.get("tube_master_tls" if over_tls else "tube_master"),
        "http": f"https://{web}" if web and node.get("http_tls") else web,
    }
    if given.get("tube_master") and _loopback(params["tube_master"]) not in (
        node.get("tube_master"), node.get("tube_master_tls"),
    ):  # fmt: skip
        del addresses["http"]
    elif given.get("http") and _loopback(params["http"]) != addresses["http"]:
        del addresses["tube_master"]
    return {name: address for name in wanted if (address := addresses.get(name))}


def _loopback(address: str) -> str:
    """``address`` as a node on this machine announces it."""
    return address.removeprefix("http://").replace("localhost:", "127.0.0.1:")


def _own_node(data_dir: Path) -> dict[str, Any] | None:
    """Return the addresses of the node that runs in ``data_dir``.

    None if there is none, or if another user owns or may change the directory: that user could have passwords sent to
    any address.
    """
    try:
        found = data_dir.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return None
    from penstock.node.data_dir import running_node

    return running_node(data_dir)


def input_bytes(command: str, name: str, text: str | None, file: Path | None) -> bytes:
    """Return the argument ``name`` of ``command``: ``text``, or the content of ``file`` or standard input (``-``).

    Raises:
        ConfigError: both are given, the file cannot be read, or nothing is given and standard input is a terminal.
    """
    if text is not None and file is not None:
        raise ConfigError(
            f"{command}: a {name} and --file exclude each other", option="--file", hint="give one of the two"
        )
    if text is not None:
        return text.encode("utf-8", "surrogateescape")
    if (path := unless_standard(file)) is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{command}: --file {path}: {error.strerror}", option="--file") from error
    if file is None and sys.stdin.isatty():
        raise ConfigError(
            f"{command}: no {name.lower()}",
            hint=f"give a {name} ('' for an empty one), or --file PATH, or pipe it in",
        )
    return sys.stdin.buffer.read()


T = TypeVar("T")

DURATION: Final = "DURATION"
"""Metavar of durations: a number with a unit (ms, s, m, h, d); a bare number is seconds."""


def duration_option(
    *names: str,
    text: str,
    at_least_s: float = 0.0,
    default: str | None = None,
    or_forever: bool = False,
    **more: Any,
) -> Any:
    """Option whose value is a duration; the command gets seconds. The help shows ``default``.

    ``or_forever``: the value may be ``forever``, for which the command gets infinity.
    """

    def seconds(value: str | float) -> float:
        if isinstance(value, int | float):
            return value
        if or_forever and value == "forever":
            return math.inf
        from penstock.runtime.config.values import duration_ms

        found = duration_ms(value, unit="s") / 1000
        if found < at_least_s:
            raise ValueError(f"{value!r} is less than {at_least_s:g} s")
        return found

    more |= {"parser": seconds, "metavar": DURATION, "show_default": default or False}
    end = "; forever has no end." if or_forever else "."
    return Option(*names, help=f"{text} A bare number is seconds{end}", **more)


def size_option(*names: str, text: str, default: str | None = None, **more: Any) -> Any:
    """Option whose value is a size with a unit (KiB, MiB, GiB); the command gets bytes."""

    def size(value: str | int) -> int:
        from penstock.runtime.config.values import size_bytes

        return value if isinstance(value, int) else size_bytes(value)

    more |= {"parser": size, "metavar": "SIZE", "show_default": default or False}
    return Option(*names, help=text, **more)


Json = Annotated[bool, Option("--json", help="Print JSON, one object per line.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, Option("--dry-run", help="Show what would be done, and change nothing.")]
Count = Annotated[int | None, Option("--count", "-c", help="Stop after N.", min=1, metavar="N")]
Watch = Annotated[
    float | None, duration_option(text="Repeat at this interval until interrupted (Ctrl-C).", at_least_s=0.1)
]


def confirmed(question: str) -> bool:
    """Ask ``question`` on the terminal; True if the answer is yes.

    Raises:
        ConfigError: there is no answer.
    """
    import typer

    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # also after Ctrl-C, because nothing was done yet
        note("")  # the error begins a line
        raise ConfigError("nothing was changed: the question was not answered", hint="confirm with --yes") from None


def repeat(look: Callable[[], T], show: Callable[[T], None], every_s: float | None, *, as_json: bool) -> None:
    """Show the result of ``look``: once, or every ``every_s`` seconds with the current time until Ctrl-C.

    While watching, errors are printed to standard error and the next attempt follows. On a terminal, each output
    replaces the one before.

    Raises:
        ConfigError: the command is wrong, so repeating it cannot help.
        PenstockError: it failed, without ``every_s``.
    """
    if every_s is None:
        show(look())
        return
    in_place = not as_json and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    shown = 0

    def attempt() -> None:
        nonlocal shown
        try:
            found = look()
        except ConfigError:
            raise
        except PenstockError as error:
            print_error(error)
            return
        if not as_json:
            from datetime import datetime

            between = "\n" if shown and not in_place else ""
            sys.stdout.write(f"{between}{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}\n")
            sys.stdout.flush()
        shown += 1
        show(found)

    with suppress(KeyboardInterrupt), repainted() if in_place else nullcontext(lambda show: show()) as paint:
        while True:
            paint(attempt)
            time.sleep(every_s)


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
IN_ANOTHER_DIRECTORY: Final = ", or the data directory of a node that runs here: PENSTOCK_DATA_DIR=DIR"
"""End of hints to set the address of a node, if the command has used the default."""

Token = Annotated[
    str | None,
    Option(
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


Username = Annotated[
    str | None, Option(help="User name, if the server has users.", envvar="PENSTOCK_USERNAME", metavar="NAME")
]
PasswordFile = Annotated[
    Path | None,
    Option(help="File whose first line is the password.", envvar="PENSTOCK_PASSWORD_FILE", metavar="FILE"),
]
CaFile = Annotated[
    Path | None,
    Option(
        help="PEM file of the trusted authorities. Default: the system's.", envvar="PENSTOCK_CA_FILE", metavar="FILE"
    ),
]
CertFile = Annotated[
    Path | None,
    Option(help="PEM file of the client certificate.", envvar="PENSTOCK_CERT_FILE", metavar="FILE"),
]
KeyFile = Annotated[
    Path | None,
    Option(help="PEM file of its key. Default: in --cert-file.", envvar="PENSTOCK_KEY_FILE", metavar="FILE"),
]


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Address of the broker, credentials, TLS and client identifier."""

    broker: Annotated[
        str,
        Option(
            help="MQTT broker: mqtt://HOST[:PORT], mqtts://, ws://, wss:// or HOST:PORT. Default: that of the local "
            f"data directory, otherwise {DEFAULT}.",
            envvar="PENSTOCK_BROKER",
            metavar="URL",
            show_default=False,
        ),
    ] = DEFAULT
    username: Username = None
    password_file: PasswordFile = None
    scram: Annotated[
        bool, Option("--scram", help="Authenticate with SCRAM-SHA-256 instead of sending the password.")
    ] = False
    ca_file: CaFile = None
    cert_file: CertFile = None
    key_file: KeyFile = None
    client_id: Annotated[str | None, Option(help="MQTT client identifier. Default: a random one.", metavar="ID")] = None

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
                hint="set --username and --password-file, or put both into the URL",
            )
        proof = ScramAuthentication(username, password)
        return MqttCredentials(username=None, password=None, authentication=proof, tls=self._tls())

    def _check_login(self, username: str | None, password: str | None) -> None:
        if username is not None and password is None:
            raise ConfigError(
                f"--username {username!r} is set without a password",
                option="--username",
                hint="set --password-file (PENSTOCK_PASSWORD_FILE), or omit the user name if the broker has no users",
            )
        if password is not None and username is None:
            raise ConfigError(
                "--password-file is set without a user name",
                option="--password-file",
                hint="set --username (PENSTOCK_USERNAME), or omit the password if the broker has no users",
            )

    def _tls(self) -> TlsOptions | None:
        """Return the TLS options; None: only the URL scheme determines whether TLS is used."""
        if self.ca_file is None and self.cert_file is None and self.key_file is None:
            return None
        from penstock.mqtt.client import TlsOptions

        return TlsOptions(self.ca_file, self.cert_file, self.key_file)

    def _password(self) -> str | None:
        if self.password_file is None:
            return None
        from penstock.runtime.io.tls import read_password

        return read_password(self.password_file, "--password-file")

    @asynccontextmanager
    async def opened(self, client: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Connect ``client`` and return it.

        Raises:
            UnavailableError: the broker does not respond.
            RefusedError: the broker rejected the credentials.
        """
        async with AsyncExitStack() as stack:
            async with self.explained():
                entered = await stack.enter_async_context(client)
            yield entered

    @asynccontextmanager
    async def explained(self, hint: str = _START) -> AsyncIterator[None]:
        """Add a hint with command line options to errors of the connection."""
        try:
            yield
        except RefusedError as error:
            if error.code in _LOGIN_REFUSED and not error.needs_grant:  # CONNECT was refused, not a later request
                error.hint = _GRANT if error.code == _NOT_AUTHORIZED and self._identified else _LOG_IN
            raise
        except UnavailableError as error:
            if error.hint is not None and "penstock up" not in error.hint:
                raise  # the error has a more specific hint: TLS, host name, another protocol
            if hint == _START and self.broker == DEFAULT:
                hint += IN_ANOTHER_DIRECTORY
            raise UnavailableError(error.what, applied=False, why=error.why, hint=hint) from error

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
    """Options of :class:`BrokerOptions`, and the timeout of requests to the state store."""

    timeout: Annotated[float, duration_option(text="Timeout of each request.", at_least_s=0.001, default="10s")] = 10.0

    @asynccontextmanager
    async def store(self, *, keeps_session: bool = False) -> AsyncIterator[StateStoreClient]:
        """Return a connected client of the state store.

        A command with a few requests has no session, which a durable broker would have to store before CONNACK, and to
        delete: two commits more than the request itself, which etcd refuses when it is full. What a session brings is
        the answer to a request that the store executed, but whose answer was lost with the connection. Without it a
        read is sent again, and a write fails with an unknown outcome, as if the whole command is lost. Observations end
        with the connection in both cases, and are restored by reading the keys.

        A command has a session (``keeps_session``) if its answer says whether it was applied (SET NX, DEL, VDEL), or
        if it sends many requests for a long time and should survive a restart of the node.

        Raises:
            UnavailableError: the broker does not respond.
        """
        from penstock.statestore.client.client import SESSION_EXPIRY_S, StateStoreClient

        client = StateStoreClient.connect(
            self.broker,
            client_id=self.client_id or f"penstock-kv-{os.urandom(6).hex()}",
            timeout_s=self.timeout,
            session_expiry_s=SESSION_EXPIRY_S if keeps_session else 0,
            **self.credentials(),
        )
        async with self.opened(client) as store:
            yield store


connects_to_broker = shared_options(BrokerOptions, "access")
"""Decorator: give a command the options of :class:`BrokerOptions`, as its argument ``access``."""

connects_to_store = shared_options(StateStoreOptions, "options")
"""Decorator: give a command the options of :class:`StateStoreOptions`, as its argument ``options``."""


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


def local_data_dir() -> Path:
    """Return the data directory of a node that was started here: as `penstock up` finds it, if that exists.

    It is PENSTOCK_DATA_DIR, ``data_dir`` of the configuration file of the working directory, or ``penstock-data``.
    """
    standard = Path(os.environ.get("PENSTOCK_DATA_DIR") or DATA_DIR)
    file = Path(os.environ.get("PENSTOCK_CONFIG") or "penstock.yaml")
    if os.environ.get("PENSTOCK_DATA_DIR"):
        return standard
    try:
        if not file.is_file():
            return standard
        text = file.read_text(encoding="utf-8")
        if "data_dir" not in text:
            return standard
        # As most files have it: reading the whole configuration takes longer than a command such as `kv get`.
        if text.count("data_dir") == 1 and (line := re.search(_DATA_DIR_LINE, text)):
            configured = file.parent / line[1]
        else:
            from penstock.node.config.node import load_config

            configured = load_config(file, {}, os.environ).data_dir
    except (OSError, UnicodeDecodeError, ConfigError):  # reported by `penstock up` and `config check`
        return standard
    return configured if configured.is_dir() else standard


_DATA_DIR_LINE: Final = r"(?m)^data_dir: +([\w./-]+) *(?: #.*)?$(?!\s*\n[ \t])"
"""One word, which does not continue in an indented line."""


def local_node(url: str) -> dict[str, Any] | None:
    """Return the addresses of the node in the local data directory if it listens on ``url``; otherwise None."""
    from penstock.mqtt.url import parse_broker_url
    from penstock.node.data_dir import running_node

    found = running_node(local_data_dir())
    if found is None:
        return None
    broker = parse_broker_url(url)
    own = {parse_broker_url(str(each)) for each in dict(found.get("listeners") or {}).values()}
    return found if any((each.host, each.port) == (broker.host, broker.port) for each in own) else None


def local_token(address: str, data_dir: Path) -> str:
    """Return the administration token in ``data_dir``; "" if there is none, ``address`` is not on loopback, or no node
    uses the directory: another program may have its address."""
    from penstock.node.data_dir import is_in_use
    from penstock.runtime.io.network import parse_address

    try:
        if not parse_address(address.rpartition("//")[2].rstrip("/")).is_loopback or not is_in_use(data_dir):
            return ""  # the token is secret and must not be sent to other machines or users
        return (data_dir / "tube" / "admin-token").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
