"""Requests of commands to the HTTP API of a node (``/api/v1``), and the options for its address and credentials."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from urllib.parse import quote, urlencode

import typer

from penstock.cli.options import (
    DATA_DIR,
    CaFile,
    CertFile,
    KeyFile,
    PasswordFile,
    Username,
    local_data_dir,
    local_token,
    shared_options,
)
from penstock.cli.parameters import source_of
from penstock.errors import ConfigError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from http.client import HTTPResponse

__all__ = ["NodeApi", "NodeOptions", "connects_to_node", "data_dir_option"]

DEFAULT_HTTP: Final = "127.0.0.1:8080"
TIMEOUT_S: Final = 10.0
STREAM_S: Final = 60.0
"""Longest silence of a stream: commits of the node may wait for its disk for some time."""

T = TypeVar("T")


def _unless_a_directory_is_given(ctx: typer.Context, value: str | None) -> str | None:
    """Ignore PENSTOCK_HTTP if the command line has a data directory, which names a node, too; likewise a context."""
    order = ("DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")
    http, data_dir = (order.index(source_of(ctx, name)) for name in ("http", "data_dir"))
    return None if data_dir > http else value


def data_dir_option(text: str) -> Any:
    """Return the option --data-dir with the help ``text``; its default is that of a node that was started here."""
    return typer.Option(
        help=text,
        callback=_given_or_local,
        envvar="PENSTOCK_DATA_DIR",
        metavar="DIR",
        readable=False,  # the command says more about a directory that it may not read
        show_default="data_dir of penstock.yaml, otherwise penstock-data",
    )


def _given_or_local(ctx: typer.Context, value: Path) -> Path:
    return local_data_dir() if source_of(ctx, "data_dir") == "DEFAULT" else value


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of commands that query the state of a node."""

    http: Annotated[
        str | None,
        typer.Option(
            help="HTTP address of the node; https://HOST:PORT with TLS. Default: that of the local data directory, "
            "without one 127.0.0.1:8080. --data-dir overrides the variable.",
            callback=_unless_a_directory_is_given,
            envvar="PENSTOCK_HTTP",
            metavar="HOST:PORT",
            show_default=False,
        ),
    ] = None
    data_dir: Annotated[
        Path,
        data_dir_option(
            "Data directory of a node on this machine: it contains the address and the administration token."
        ),
    ] = DATA_DIR
    admin_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the administration token.", envvar="PENSTOCK_ADMIN_TOKEN_FILE", metavar="FILE"),
    ] = None
    username: Username = None
    password_file: PasswordFile = None
    ca_file: CaFile = None
    cert_file: CertFile = None
    key_file: KeyFile = None

    def connect(self, *, also_broker: bool = False) -> NodeApi:
        """Return the API of the node. ``also_broker``: the directory may be that of a broker in its own process.

        Raises:
            ConfigError: an option or a file of credentials cannot be used.
        """
        from penstock.node.data_dir import running_broker, running_node, why_unused
        from penstock.runtime.io.network import parse_address, without_secret
        from penstock.runtime.io.tls import Login, TlsOptions
        from penstock.tube.master.admin_token import read_token

        found = running_node(self.data_dir) if self.http is None else None
        address = self.http
        if address is None and found is None and also_broker:
            address = running_broker(self.data_dir)
        # Without a directory: a node that was started elsewhere has the default address.
        if address is None and found is None and (self.data_dir != DATA_DIR or self.data_dir.is_dir()):
            raise UnavailableError(
                f"no node runs in the data directory {self.data_dir}",
                applied=False,
                why=why_unused(self.data_dir),
                hint=f"start the node: penstock up --data-dir {self.data_dir}; or set its address: --http HOST:PORT",
            )
        if address is None and found is not None:
            address = ("https://" if found.get("http_tls") else "") + str(found.get("http_local", found.get("http")))
        if address is None:
            address = DEFAULT_HTTP
        scheme, _, place = address.rpartition("://")
        try:
            if scheme not in {"", "http", "https"}:
                raise ValueError("expected HOST:PORT, or a URL with http or https")
            if "@" in place:
                raise ValueError("expected an address without credentials: set --username and --password-file")
            host, port = parse_address(place.rstrip("/"))
        except ValueError as error:
            raise ConfigError(f"--http: got {without_secret(address)!r}", option="--http", why=str(error)) from error
        if (self.username is None) != (self.password_file is None):
            raise ConfigError(
                "--username and --password-file belong together", option="--username", hint="set both, or none of them"
            )
        files = (self.ca_file, self.cert_file, self.key_file)
        login = Login(self.username, self.password_file, TlsOptions(*files) if any(files) else None).client()
        token = "" if self.admin_token_file is None else read_token(self.admin_token_file)
        if not token and self.username is None:
            token = local_token(address, self.data_dir)
        authorization = f"Bearer {token}" if token else ""
        if self.username is not None:
            credentials = f"{self.username}:{login['password'] or ''}".encode()
            authorization = "Basic " + base64.b64encode(credentials).decode()
        tls = (login["tls"] or ssl.create_default_context()) if scheme == "https" else None
        return NodeApi(host, port, authorization, tls, self.data_dir)


connects_to_node = shared_options(NodeOptions, "node")
"""Decorator: give a command the options of :class:`NodeOptions`, as its argument ``node``."""


class NodeApi:
    """The API at ``host`` and ``port``. ``authorization``: header of each request; "" for none."""

    def __init__(
        self, host: str, port: int, authorization: str, tls: ssl.SSLContext | None, data_dir: Path | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._authorization = authorization
        self._tls = tls
        self._data_dir = data_dir

    @property
    def address(self) -> str:
        """URL of the node."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self._port}"

    def get(self, path: str, parameters: Mapping[str, object] | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the JSON data of a query; ``parameters`` that are None are left out.

        Raises:
            UnavailableError: there is no node at the address.
            RefusedError: the node refused the request; has the reason.
        """
        with self._response("GET", path, parameters, timeout_s=timeout_s) as response:
            return self._json(response)

    def put(self, path: str, parameters: Mapping[str, object]) -> Any:
        """Make a change and return the JSON data of the response. Raises the errors of :meth:`get`."""
        with self._response("PUT", path, parameters, b"") as response:
            return self._json(response)

    def post(self, path: str) -> Any:
        """Request a change and return the JSON data of the response. Raises the errors of :meth:`get`."""
        with self._response("POST", path, None, b"") as response:
            return self._json(response)

    def metrics(self) -> str:
        """Return the metrics of the node in Prometheus' text format. Raises the errors of :meth:`get`."""
        with self._response("GET", "/metrics", None) as response:
            if response.status != http.client.OK:
                self._json(response)
            return response.read().decode()

    @contextmanager
    def stream(self, path: str, body: bytes, parameters: Mapping[str, object] | None = None) -> Iterator[HTTPResponse]:
        """Send a POST; the response is read in the block. Raises as :meth:`get`, also if the connection breaks."""
        with self._response("POST", path, parameters, body, STREAM_S) as response:
            if response.status != http.client.OK:
                self._json(response)
            yield response

    @contextmanager
    def _response(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, object] | None,
        body: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[HTTPResponse]:
        from penstock.runtime.io.network import ConnectionFailure, connection_failure

        given = {name: value for name, value in (parameters or {}).items() if value not in (None, "")}
        target = ("" if path.startswith("/") else "/api/v1/") + quote(path) + ("?" + urlencode(given) if given else "")
        # Not urllib, which would send the token to a proxy set in the environment.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        if self._tls is not None:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        try:
            headers = {"Authorization": self._authorization} if self._authorization else {}
            connection.request(method, target, body=body, headers=headers)
            # A response without keep-alive owns the socket: closing the connection does not close it.
            with connection.getresponse() as response:
                yield response
        except (OSError, http.client.HTTPException) as error:
            failure = ConnectionFailure("the response is not HTTP")
            if isinstance(error, OSError):
                failure = connection_failure(error, self._host, tls=self._tls is not None)
            raise self._absent(failure.why, failure.hint if isinstance(error, ssl.SSLError) else None) from error
        finally:
            connection.close()

    def _json(self, response: HTTPResponse) -> Any:
        try:
            found = json.loads(response.read())
        except ValueError:
            raise self._absent(f"the server has no such API (HTTP status {response.status})") from None
        if isinstance(found, dict) and "errCode" in found:
            raise self._absent("the administration of a TubeMQ broker answers there, which has no such API")
        if response.status != http.client.OK:
            problem = found.get("error", {}) if isinstance(found, dict) else {}
            raise RefusedError(
                f"the node at {self.address} refused the request: {problem.get('what') or response.reason}",
                code=response.status,
                peer=self.address,
                why=problem.get("why"),
                hint=_LOGIN if response.status in {401, 403} else problem.get("hint"),
            )
        return found

    def snapshot(self, kind: type[T], path: str) -> T:
        """Return a query's data as a snapshot. Raises the errors of :meth:`get`."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(kind).validate_python(self.get(path))
        except ValidationError as error:
            raise UnavailableError(
                f"the node at {self.address} is of another version",
                applied=False,
                why=f"its {path} differs: {'.'.join(map(str, error.errors()[0]['loc']))}",
                hint="use the command of that version",
            ) from error

    def _absent(self, why: str | None, hint: str | None = None) -> UnavailableError:
        where = "" if self._data_dir is None else f", or set its data directory: --data-dir DIR (now {self._data_dir})"
        return UnavailableError(
            f"no node is reachable at {self.address}",
            applied=False,
            why=why,
            hint=hint or f"start a node: penstock up; or set its address: --http HOST:PORT{where}",
        )


_LOGIN: Final = (
    "set a file with the administration token (--admin-token-file), or a user who may administer the node "
    "(--username, --password-file); commands on the node's machine read the token of the data directory (--data-dir), "
    "unless `tube.admin_token` of the configuration is another one"
)
