"""HTTP of a node: health, metrics and the administration of TubeMQ, with authentication and audit.

``/livez`` reports that the event loop runs, ``/readyz`` that every part works, or the reasons why not (503),
``/metrics`` is for Prometheus. ``/webapi.htm`` (master) and ``/broker.htm`` (broker, on a listener of its own) accept
the administration methods of TubeMQ.

Users of the node's password file authenticate by HTTP Basic, the administration token as bearer token. The audit trail
gets each change, and each request that reads message bodies, with its caller.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from ipaddress import ip_address
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

import penstock
from penstock.errors import StorageError
from penstock.mqtt.password_checks import PasswordChecks
from penstock.mqtt.transport.tls import ServerTls
from penstock.runtime.io.acceptor import Acceptor
from penstock.runtime.io.network import Address, bind_error
from penstock.runtime.io.tls import HANDSHAKE_FAILED, handshake_failure
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.logs import error_fields
from penstock.runtime.observability.metrics import Metrics
from penstock.security.passwords import Credential
from penstock.tube.admin.request import UNAUTHORIZED, Caller, Role

__all__ = [
    "Administer",
    "Denied",
    "HttpAccess",
    "HttpConnection",
    "HttpServer",
    "Identify",
    "LeaseGate",
    "api_error",
    "append_audit_entry",
    "audited",
    "broker_app",
    "cross_site_reason",
    "health_routes",
    "master_app",
    "names_of",
    "server_config",
    "write_audit_entry",
]

_log = logging.getLogger("penstock.http")

MAX_FORM_BYTES = 1024 * 1024
"""Limit of a POST form: TubeMQ's lists have at most 500 items."""

MAX_CONNECTIONS = 256
"""Limit of connections of a listener; scrapers, health checks and administrators need few."""

TLS_HANDSHAKE_S = 10.0
"""Time limit of a TLS handshake."""

CLOSE_S: Final = 2.0
"""Seconds for which running requests may continue, and responses be read, while a server is closed."""

_ABORT_S: Final = 1.0
"""Seconds within which the event loop ends connections that were aborted."""

_CLOSING_S: Final = 0.01
"""Seconds between two looks at the connections of a server that is being closed."""

REQUEST_S = 10.0
"""Seconds from the connection, or the previous response, to the end of a request, head and body."""

_PLACES: Final = {
    "/livez": "liveness: the event loop runs",
    "/readyz": "readiness, with reasons",
    "/metrics": "metrics in the text format of Prometheus",
    "/webapi.htm?method=admin_get_methods": "administration methods of TubeMQ",
    "/webapi.htm?method=admin_query_topic_info": "topics",
    "/webapi.htm?method=admin_query_broker_run_status": "brokers",
    "/webapi.htm?method=admin_query_sub_info": "consumer groups",
}
"""Links of the first page."""

_HIDDEN_SITE: Final = "the browser does not tell which site sent this request: send it by POST, or with the token"

_CALLBACK = re.compile(r"[_A-Za-z0-9]{1,128}")

Administer = Callable[[Mapping[str, str], Caller], Awaitable[Mapping[str, object]]]
"""Handles an administration request of a caller: takes the parameters, returns the JSON object of the response."""

Identify = Callable[[str, str], Awaitable[Caller]]
"""Finds the caller of a request by its ``Authorization`` header ("": none) and address. Raises Denied."""


class Denied(Exception):
    """The credentials of a request are wrong (401), or cannot currently be checked (503)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _anybody(_: str, address: str) -> Caller:
    return Caller(address=address)


def health_routes(
    problems: Callable[[], Sequence[str]],
    metrics: Metrics,
    *,
    warnings: Callable[[], Sequence[str]] = tuple,
    identify: Identify = _anybody,
    open_metrics: bool = True,
    opened_by: str = "http.anonymous_metrics: true",
    prepare: Callable[[], Awaitable[None]] | None = None,
) -> list[Route]:
    """The paths ``/livez``, ``/readyz`` and ``/metrics``.

    ``problems`` returns the reasons why the process is not ready, ``warnings`` the parts that do not work as
    configured. ``identify`` finds the caller of ``/metrics`` unless ``open_metrics``; health needs no credentials,
    because probes have none. ``opened_by``: the setting that opens ``/metrics``, for the refusal.
    ``prepare``: awaited before the metrics are read.
    """

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reasons = list(problems())
        body = {"ready": not reasons, "reasons": reasons, "warnings": list(warnings())}
        return JSONResponse(body, status_code=503 if reasons else 200)

    async def show_metrics(request: Request) -> Response:
        if not open_metrics:
            caller = await _caller(request, identify)
            if isinstance(caller, Response):
                return caller
            if not caller.reads:
                return _unauthorized(f"metrics need credentials: send a user (curl -u NAME), or start with {opened_by}")
        if prepare is not None:
            await prepare()
        page, content_type = metrics.render_accepted(request.headers.get("accept", ""))
        return Response(page, media_type=content_type)

    return [Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", show_metrics)]


def master_app(
    problems: Callable[[], Sequence[str]],
    metrics: Metrics,
    administer: Administer,
    *,
    warnings: Callable[[], Sequence[str]] = tuple,
    names: Collection[str] = (),
    identify: Identify = _anybody,
    open_metrics: bool = True,
    more: Sequence[BaseRoute] = (),
    front: Callable[[], Response] | None = None,
    prepare: Callable[[], Awaitable[None]] | None = None,
) -> Starlette:
    """The application of the node's HTTP listener: :func:`health_routes`, and the administration of the master.

    ``identify`` finds the caller of administration requests as well; ``names`` are further host names for these
    requests over loopback (an advertised name). ``more``: routes of the console; ``front``: its page for
    browsers, None for a list of links. ``prepare``: see :func:`health_routes`.
    """

    async def index(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(_index_page()) if front is None else front()
        rows = "".join(f"{path:<50} {text}\n" for path, text in _PLACES.items())
        return PlainTextResponse(f"penstock {penstock.__version__}\n{rows}")

    return Starlette(
        routes=[
            Route("/", index),
            *health_routes(
                problems, metrics, warnings=warnings, identify=identify, open_metrics=open_metrics, prepare=prepare
            ),
            Route("/webapi.htm", _administration(administer, names, identify), methods=["GET", "POST"]),
            *more,
        ],
        exception_handlers={404: _not_found},
    )


def _index_page() -> str:
    """The first page, with links."""
    rows = "".join(
        f'<tr><td><a href="{escape(path)}">{escape(path)}</a></td><td>{text}</td></tr>'
        for path, text in _PLACES.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>penstock</title>'
        "<style>body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:44rem;padding:0 1rem;"
        "color-scheme:light dark}td{padding:.2rem 1.5rem .2rem 0}</style>"
        f"<h1>penstock {penstock.__version__}</h1><table>{rows}</table></html>"
    )


def api_error(code: str, what: str, *, why: str | None = None, hint: str | None = None) -> dict[str, object]:
    """The JSON of an error of the HTTP API; ``code`` is for programs."""
    return {"error": {"code": code, "what": what, "why": why, "hint": hint}}


async def _not_found(request: Request, _: Exception) -> Response:
    if request.url.path.startswith("/api/"):  # errors of the API are JSON; this path matched no route of it
        what = f"the API has no path {request.url.path!r}"
        return JSONResponse(api_error("not_found", what, hint="use one of those in docs/reference/http.md"), 404)
    return PlainTextResponse(f"nothing is at {request.url.path!r}; see / for the list\n", status_code=404)


def broker_app(
    administer: Administer,
    *,
    health: Sequence[Route] = (),
    names: Collection[str] = (),
    identify: Identify = _anybody,
    more: Sequence[Route] = (),
) -> Starlette:
    """The application of the TubeMQ broker's HTTP listener. As with Apache's broker, administration is accepted at any
    path except those in ``health`` and ``more``."""
    answer = _administration(administer, names, identify)
    return Starlette(routes=[*health, *more, Route("/{path:path}", answer, methods=["GET", "POST"])])


async def _caller(request: Request, identify: Identify) -> Caller | Response:
    """Return the caller of ``request``, or the response to wrong credentials."""
    address = request.client.host if request.client is not None else ""
    try:
        return await identify(request.headers.get("authorization", ""), address)
    except Denied as denied:
        return _unauthorized(str(denied), denied.status)


def _unauthorized(text: str, status: int = 401) -> Response:
    asked = {"WWW-Authenticate": 'Basic realm="penstock", charset="UTF-8"'} if status == 401 else {}
    return JSONResponse({"result": False, "errCode": status, "errMsg": text}, status_code=status, headers=asked)


def _administration(
    administer: Administer, names: Collection[str], identify: Identify
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        if (refused := cross_site_reason(request, names)) is not None:
            return JSONResponse({"result": False, "errCode": 400, "errMsg": refused}, status_code=403)
        parameters = dict(request.query_params)
        if request.method == "POST":
            body = bytearray()
            try:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_FORM_BYTES:
                        return _failure(f"the form is longer than {MAX_FORM_BYTES} bytes")
            except ClientDisconnect:
                return _failure("the form is incomplete")  # the response is not received: the connection is closed
            try:
                parameters |= dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=1000))
            except ValueError as error:
                return _failure(f"the form cannot be read: {error}")
        caller = await _caller(request, identify)
        if isinstance(caller, Response):
            return caller
        hidden = bool(caller.user) and _hides_its_site(request)
        try:
            reply = await administer(parameters, caller._replace(role=Role.NONE) if hidden else caller)
        except StorageError as error:
            return JSONResponse(_storage_failed(error), status_code=500)
        if reply.get("errMsg") == UNAUTHORIZED and hidden and caller.administers:
            return JSONResponse({"result": False, "errCode": 400, "errMsg": _HIDDEN_SITE}, status_code=403)
        if reply.get("errMsg") == UNAUTHORIZED and not caller.reads:
            return _unauthorized(UNAUTHORIZED)  # browsers then prompt for name and password
        text = json.dumps(reply, ensure_ascii=False, separators=(",", ":"))
        callback = parameters.get("callback", "")
        kind = "json"
        if _CALLBACK.fullmatch(callback) and not hidden:  # a page of another site could execute it
            text, kind = f"{callback}({text})", "javascript"
        # Half a surrogate pair cannot be encoded; the escape is that of JSON.
        return Response(text.encode(errors="backslashreplace"), media_type=f"application/{kind}")

    return answer


def cross_site_reason(request: Request, names: Collection[str]) -> str | None:
    """Reason why a browser may have sent the request for a page of another site; None if not.

    Such a page could change TubeMQ through the browser of a user on the same machine: on loopback the token is not
    secret. A request without a valid host or URL in its headers is refused as well.
    """
    try:
        return _cross_site_reason(request, names)
    except ValueError as error:
        return f"the request's headers name no host: {error}"


def _cross_site_reason(request: Request, names: Collection[str]) -> str | None:
    headers = request.headers
    host = urlsplit(f"//{headers.get('host', '')}")
    # Browsers send Sec-Fetch-Site to loopback and over TLS only; otherwise Origin with forms and Referer with other
    # requests.
    if (site := headers.get("sec-fetch-site")) is not None:
        ours = site in {"none", "same-origin"}
    else:
        told = headers.get("origin") or headers.get("referer")
        ours = told is None or urlsplit(told).netloc == host.netloc
    if not ours:
        return "request of another site"
    # With DNS rebinding an attacker's own host name resolves to loopback, so browsers treat the node as the same site.
    # Such a name has a dot. Addresses, `localhost` and names of a local network cannot belong to an attacker.
    name = (host.hostname or "").rstrip(".")
    if not _loopback(request) or "." not in name or name.endswith(".localhost") or name in names or _is_address(name):
        return None
    return f"host {name!r} is not known here; ask by address, or announce the name: --http-advertise, or http.url"


def names_of(*addresses: Address | None, url: str | None = None) -> frozenset[str]:
    """Host names of the bound and advertised addresses, of the URL, and of the machine."""
    names = {each.host.lower() for each in addresses if each is not None}
    names |= {socket.gethostname().lower(), *([] if url is None else [urlsplit(url).hostname or ""])}
    return frozenset(names)


def _hides_its_site(request: Request) -> bool:
    """Whether a browser sent the request and does not tell for which site.

    A page can omit Referer, browsers send Origin with forms only, and Sec-Fetch-Site not over plain HTTP. They add the
    user's password, which they keep, to such a request too.
    """
    headers = request.headers
    return (
        request.method != "POST"
        and headers.get("user-agent", "").startswith("Mozilla/")
        and not any(name in headers for name in ("sec-fetch-site", "origin", "referer"))
    )


def _loopback(request: Request) -> bool:
    server = request.scope.get("server")
    return server is not None and _is_address(server[0]) and ip_address(server[0]).is_loopback


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _storage_failed(error: StorageError) -> dict[str, object]:
    """Reply to a change that may not be durable, because the disk failed."""
    return {"result": False, "errCode": 500, "errMsg": error.line()}


def _failure(message: str) -> Response:
    # Apache's servers respond to every failure with status 200, and report it in the body.
    return JSONResponse({"result": False, "errCode": 400, "errMsg": message})


class HttpConnection(H11Protocol):
    """A connection with a time limit for requests; uvicorn waits indefinitely for heads and bodies.

    File descriptors are shared with the MQTT and TubeMQ listeners, whose clients must not run out of them.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn types it
        """Close the connection if the limit is exceeded, otherwise start the time limit."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reject a connection whose first byte begins no request at once, such as that of a TubeMQ client.

        h11 rejects control characters at once, but waits for the end of a line that begins with other bytes.
        """
        if data[0] >= 0x80 and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.send_400_response("Invalid HTTP request received.")
        else:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not HTTP: send status 400 if no response has begun, then close.

        uvicorn responds twice to a malformed body: once here and once from the application, and h11 raises for the
        second response.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the application's response is dropped
            cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        self._expect_request()
        super().on_response_complete()

    def _expect_request(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(REQUEST_S, self._close_if_incomplete)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_incomplete(self) -> None:
        # A complete request has no time limit.
        if self.conn.their_state in {h11.IDLE, h11.SEND_BODY}:
            self.transport.close()


def server_config(app: Starlette) -> uvicorn.Config:
    """Settings of a server for ``app``."""
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # invalid requests are not events of the node
        access_log=False,
        server_header=False,
    )
    config.load()
    return config


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a TLS context that can be replaced: that of ``acceptor``."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        # Health checks and administration work while other clients use all descriptors that they may use.
        self.acceptor = Acceptor(
            self._connection, most=MAX_CONNECTIONS, tls=tls, handshake_s=TLS_HANDSHAKE_S, reserved_share=2
        )
        self.servers = []
        self._listener = listener
        self._stopped = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of the given socket."""
        assert sockets is None
        await self.lifespan.startup()
        HANDSHAKE_FAILED.set(_handshake_failed)  # the tasks of connections inherit the context variable
        self.acceptor.start([self._listener])
        self.started = True

    def stop(self) -> None:
        """Begin to close."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """Wait for :meth:`stop`, and keep the date of responses current; uvicorn's loop looks ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening; running requests finish within :data:`CLOSE_S`, then all connections are closed. uvicorn's
        takes 0.1 s without requests, and leaves connections open whose peers do not read."""
        assert sockets is None
        self.acceptor.stop()
        await self.acceptor.end_handshakes()
        state = self.server_state
        for connection in list(state.connections):
            if not connection.transport.is_closing():  # after a second close(), asyncio's abort() of TLS has no effect
                connection.shutdown()
        try:
            async with asyncio.timeout(CLOSE_S):
                while state.tasks or state.connections:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(_CLOSING_S)
        except TimeoutError:
            for request in list(state.tasks):
                request.cancel()
            for connection in list(state.connections):  # the peer does not read, or does not answer the end of TLS
                connection.transport.abort()
            try:
                async with asyncio.timeout(_ABORT_S):
                    while state.connections:  # noqa: ASYNC110 - see above
                        await asyncio.sleep(_CLOSING_S)
            except TimeoutError:  # also if the loop stalled for so long
                if state.connections:
                    _log.error("HTTP listener: the loop has not ended %d connections", len(state.connections))

    def _connection(self) -> HttpConnection:
        return HttpConnection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not handle signals."""
        yield


def _handshake_failed(error: ssl.SSLError) -> None:
    _log.info("HTTP listener: no connection: %s", handshake_failure(error))


class LeaseGate:
    """ASGI middleware of a node in a cluster: while ``holds`` returns False, it sends 503 instead of a response.

    What a response contains was read before that check, while no other node could be active. A response that has begun
    is cut off.
    """

    def __init__(self, app: ASGIApp, holds: Callable[[], bool]) -> None:
        self._app = app
        self._holds = holds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        begun = False

        async def send_if_active(message: Message) -> None:
            nonlocal begun
            if not self._holds():
                raise _LeaseLost
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_if_active)
        except _LeaseLost:
            if not begun:  # otherwise the server closes the connection
                await _not_active()(scope, receive, send)


class _LeaseLost(Exception):
    """The node has lost its lease while it answered a request."""


def _not_active() -> Response:
    """The response of a node that has lost its lease, in the form of TubeMQ's administration and of the console."""
    what = "this node is not active any more"
    why = "it lost its lease in etcd while it answered; a change of this request may have been stored"
    hint = "look at the active node (penstock cluster status), and repeat the request there if necessary"
    tube = {"result": False, "errCode": 503, "errMsg": f"{what}: {why}"}
    body = {**tube, **api_error("not_active", what, why=why, hint=hint)}
    return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})


class HttpServer:
    """An application on a listener, in the running loop; with ``tls`` it accepts HTTPS only."""

    def __init__(self, app: Starlette, tls: ServerTls | None = None) -> None:
        self._app = app
        self.tls = tls
        """Certificates that were read last; None for plain HTTP."""
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, option: str, address: Address) -> Address:
        """Listen; returns the bound address. ``option`` names the setting in errors.

        Raises:
            UnavailableError: the server cannot listen on the address.
        """
        listener = await _listen(option, address)
        bound = Address(address.host, listener.getsockname()[1])
        self._server = _Server(server_config(self._app), listener, None if self.tls is None else self.tls.context)
        self._task = asyncio.create_task(self._server.serve(), name=f"http-{option}")
        while not self._server.started:
            # uvicorn has no event for this; the listener is already bound, so this takes one or two loop turns.
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0)
        return bound

    def replace_tls(self, tls: ServerTls) -> None:
        """Use these certificates for new connections."""
        self.tls = tls
        if self._server is not None:
            self._server.acceptor.tls = tls.context

    async def close(self) -> None:
        """Stop listening and wait for running requests, for :data:`CLOSE_S` at most."""
        if self._server is None or self._task is None:
            return
        self._server.stop()
        await self._task
        self._server = self._task = None


async def _listen(option: str, address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise bind_error(error, option, address) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
        listener.settimeout(0)
    except OSError as error:
        listener.close()
        raise bind_error(error, option, address) from error
    return listener


MAX_HEADER: Final = 4096
"""Longest Authorization header in characters; valid ones are shorter."""


class HttpAccess:
    """Finds the caller of a request. ``token``: the administration token.

    ``users`` returns the current users of the password file; None without a file: queries then need no credentials.
    ``role`` returns the role of a user. ``anonymous``: queries need no credentials although there are users.
    """

    def __init__(
        self,
        token: str,
        checks: PasswordChecks | None = None,
        users: Callable[[], Mapping[str, Credential] | None] = lambda: None,
        role: Callable[[str], Role] = lambda _: Role.NONE,
        *,
        anonymous: bool = False,
    ) -> None:
        self._token = token
        self._checks = checks
        self._users = users
        self._role = role
        self._anonymous = anonymous

    async def __call__(self, authorization: str, address: str) -> Caller:
        """Return the caller that sent an ``Authorization`` header ("": none) from ``address``.

        Raises:
            Denied: the credentials are wrong, or cannot currently be checked.
        """
        users = self._users()
        scheme, _, credentials = authorization.strip().partition(" ")
        if not scheme:
            return Caller(address=address, reads=self._anonymous or users is None)
        if len(authorization) > MAX_HEADER:
            raise Denied(401, f"the Authorization header has {len(authorization)} characters, at most {MAX_HEADER}")
        if scheme.lower() == "bearer":
            if not hmac.compare_digest(credentials.strip().encode(), self._token.encode()):
                raise Denied(401, "the bearer token is not the administration token of this data directory")
            return Caller(address=address, role=Role.ADMINISTRATOR, token=True)
        if scheme.lower() != "basic":
            raise Denied(401, f"authorization scheme {scheme[:20]!r}: Basic and Bearer are supported")
        user, password = _basic(credentials)
        if users is None or self._checks is None:
            return Caller(address=address)  # without users there is no authentication
        right = await _check(self._checks, address, user, users.get(user), password)
        if right is None:
            raise Denied(503, "too many password checks are waiting; try again")
        if not right:
            raise Denied(401, f"user {user[:64]!r}: wrong name or password")
        return Caller(user, address, role=self._role(user))


def _basic(credentials: str) -> tuple[str, bytes]:
    """Return name and password of HTTP Basic (RFC 7617, in UTF-8). Raises Denied."""
    try:
        user, colon, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
        if colon:
            return user.decode(), password
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise Denied(401, "Basic credentials must be the base64 of name:password")


async def _check(
    checks: PasswordChecks, address: str, user: str, credential: Credential | None, password: bytes
) -> bool | None:
    future: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()

    def done(right: bool | None) -> None:  # noqa: FBT001 - as PasswordChecks calls it
        if not future.done():
            future.set_result(right)

    withdraw = checks.check(address, user, credential, password, done)
    try:
        return await future
    except asyncio.CancelledError:
        if withdraw is not None:
            withdraw()
        raise


_audit_log = logging.getLogger("penstock.audit")

MAX_VALUE: Final = 2000
"""Longest recorded parameter in characters: limited so that a batch of a thousand objects does not fill the audit
trail."""
MAX_FAILURES: Final = 10
_NOT_KEPT: Final = frozenset({"confModAuthToken", "callback", "method", "type"})


def audited(
    administer: Administer, server: str, trail: AuditTrail, token: str, recorded: Callable[[str], bool]
) -> Administer:
    """Wrap ``administer`` so that each request of a method that is ``recorded`` has an entry in ``trail``.

    The entry is durable before the response is sent. Requests without valid credentials change nothing: they are
    counted and not recorded, since many of them would displace changes from the trail, which has a limited size.
    """

    async def answer(params: Mapping[str, str], caller: Caller) -> Mapping[str, object]:
        method = params.get("method", "")
        try:
            reply = await administer(params, caller)
        except StorageError as error:
            if recorded(method):
                row = _row(server, method, params, caller.showing(params, token), _storage_failed(error))
                await write_audit_entry(trail, row)
            raise
        if not recorded(method):
            return reply
        if reply.get("errMsg") == UNAUTHORIZED:
            fields = {"server": server, "method": method, "address": caller.address, "user": caller.user}
            trail.refused += 1
            _audit_log.debug("administration refused: no valid credentials", extra={"fields": fields})
            return reply
        await write_audit_entry(trail, _row(server, method, params, caller.showing(params, token), reply))
        return reply

    return answer


async def write_audit_entry(trail: AuditTrail, fields: Mapping[str, object]) -> None:
    """Write an entry with the current time and ``fields``; it is durable when this returns. A failure is logged."""
    await asyncio.get_running_loop().run_in_executor(None, append_audit_entry, trail, fields)


def append_audit_entry(trail: AuditTrail, fields: Mapping[str, object]) -> None:
    """:func:`write_audit_entry` for a thread: it blocks."""
    row = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
    try:
        trail.append(row)
    except StorageError as error:
        _audit_log.error(
            "an entry of the audit trail could not be written", extra={"fields": {**row, **error_fields(error)}}
        )


def _row(
    server: str, method: str, params: Mapping[str, str], caller: Caller, reply: Mapping[str, Any]
) -> dict[str, Any]:
    rows = reply.get("data", reply.get("dataSet", []))
    failed = [str(row.get("errInfo", "")) for row in rows if isinstance(row, dict) and row.get("success") is False]
    found: dict[str, Any] = {
        "server": server,
        "method": method,
        "credential": caller.credential,
        "address": caller.address,
        "user": _first(params, "modifyUser", "mur", "createUser", "cur"),
        "parameters": {name: value[:MAX_VALUE] for name, value in params.items() if name not in _NOT_KEPT},
        "result": bool(reply.get("result")) and not failed,
        "errCode": reply.get("errCode"),
        "errMsg": reply.get("errMsg"),
    }
    return found | ({"failed": failed[:MAX_FAILURES]} if failed else {})


def _first(params: Mapping[str, str], *names: str) -> str:
    return next((params[name].strip() for name in names if params.get(name, "").strip()), "")
