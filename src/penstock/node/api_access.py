"""Callers of the HTTP API (``/api/v1``), refusals, and the backup, which a broker in its own process has as well."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.errors import LocalProtocolError, PenstockError, RefusedError
from penstock.node.backup import Backups, Item, encode_item, error_item
from penstock.node.http import Denied, Identify, api_error, cross_site_reason, write_audit_entry
from penstock.runtime.observability.audit import AuditTrail
from penstock.tube.admin.request import Caller, Role

__all__ = [
    "API",
    "HEADERS",
    "ApiAccess",
    "ApiFailure",
    "backup_route",
    "body_of",
    "number_of",
    "respond_to",
    "streamed",
]

_log = logging.getLogger("penstock.node")

API: Final = "/api/v1"
HEADERS: Final = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}

_MAX_BODY: Final = 64 << 20
"""Limit of a request's body: the list of the files that the receiver of a backup has."""
_NEEDED: Final = "this request needs credentials"
_LOGIN: Final = "send the administration token (tube/admin-token in the data directory), or name and password of a user"
_ROLES: Final = {Role.VIEWER: "a viewer", Role.OPERATOR: "an operator", Role.ADMINISTRATOR: "an administrator"}
_SETTINGS: Final = {
    Role.VIEWER: "security.viewers",
    Role.OPERATOR: "security.operators",
    Role.ADMINISTRATOR: "security.administrators",
}


class ApiFailure(Exception):
    """A response other than the data: status, code, and what, why and hint."""

    def __init__(self, status: int, code: str, what: str, hint: str | None = None, why: str | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.body = api_error(code, what, why=why, hint=hint)

    @classmethod
    def of(cls, error: PenstockError, status: int, code: str) -> ApiFailure:
        """The response for an ``error`` of the node."""
        return cls(status, code, error.what, error.hint, error.why)


class ApiAccess:
    """Roles of callers, and the audit trail of what they do.

    ``server``: its name in the audit trail. ``names``: further host names for requests over loopback. ``promotion``:
    what gives a user the role that a request needs; None for the settings of a node.
    """

    def __init__(
        self, server: str, identify: Identify, trail: AuditTrail, names: Collection[str], promotion: str | None = None
    ) -> None:
        self._server = server
        self._identify = identify
        self._trail = trail
        self._names = names
        self._promotion = promotion

    async def caller(self, request: Request, needs: Role) -> Caller:
        """Return the caller of a request. Raises ApiFailure: the role is below ``needs``, or credentials are wrong."""
        if (refused := cross_site_reason(request, self._names)) is not None:
            raise ApiFailure(403, "cross_site", refused, "open the console at the address of the node")
        try:
            address = request.client.host if request.client is not None else ""
            authorization = request.headers.get("authorization", "")
            caller = await self._identify(authorization, address)
        except Denied as denied:
            raise ApiFailure(denied.status, "unauthorized", str(denied), _LOGIN) from None
        if not caller.reads or (needs > Role.NONE and not caller.identified):
            # The credentials of a node without users are not checked.
            what = "this node has no users: sign in with its administration token" if authorization else _NEEDED
            raise ApiFailure(401, "unauthorized", what, _LOGIN)
        if caller.role < needs:
            what = f"user {caller.user!r} is not {_ROLES[needs]}"
            promotion = self._promotion or f"add the user to {_SETTINGS[needs]}"
            raise ApiFailure(403, "forbidden", what, f"{promotion}, or use the administration token")
        return caller

    async def record(
        self, method: str, caller: Caller, parameters: Mapping[str, object], failure: PenstockError | None = None
    ) -> None:
        """Write an entry of the audit trail, for a ``failure`` with its text; it is durable when this returns."""
        row: dict[str, object] = {
            "server": self._server,
            "method": method,
            "credential": caller.credential,
            "address": caller.address,
            "user": caller.user,
            "parameters": dict(parameters),
            "result": failure is None,
        }
        if failure is not None:
            row["failed"] = [failure.line()]
        await write_audit_entry(self._trail, row)


async def respond_to(request: Request, respond: Callable[[Request], Awaitable[Response]]) -> Response:
    """Return the response of ``respond``, or that to a request that it refuses."""
    try:
        return await respond(request)
    except LocalProtocolError as error:
        failure = ApiFailure.of(error, 400, "bad_parameter")
    except ClientDisconnect:  # the response is not received
        failure = ApiFailure(400, "incomplete", "the client disconnected before the end of its request")
    except ApiFailure as found:
        failure = found
    more = {} if failure.status != 401 else {"WWW-Authenticate": 'Bearer realm="penstock"'}
    return JSONResponse(failure.body, status_code=failure.status, headers={**HEADERS, **more})


def backup_route(access: ApiAccess, backups: Callable[[], Backups | None]) -> Route:
    """The path of the backup, for administrators; ``backups`` returns None before the process has started."""

    async def respond(request: Request) -> Response:
        caller = await access.caller(request, Role.ADMINISTRATOR)
        if (process := backups()) is None:
            raise ApiFailure(503, "starting", "this part has not started yet", "wait until /readyz returns 200")
        have = await _files_of_receiver(request)
        response = await streamed(process.items(have, number_of(request, "rate", 0) or None))
        await access.record("backup", caller, {})
        return response

    async def backup(request: Request) -> Response:
        return await respond_to(request, respond)

    return Route(f"{API}/backup", backup, methods=["POST"])


async def streamed(items: AsyncGenerator[Item], stall_s: float | None = None) -> Response:
    """Return the response with a backup, which ends if the client reads nothing for ``stall_s``. Raises ApiFailure: it
    cannot begin."""
    try:
        first = await anext(items)
    except RefusedError as error:
        raise ApiFailure.of(error, error.code, "refused") from None
    except PenstockError as error:
        raise ApiFailure.of(error, 503, "backup_failed") from None
    return _BackupResponse(first, items, stall_s)


class _BackupResponse(StreamingResponse):
    """A backup: items, each with the lengths of header and payload (4 bytes each) before them."""

    def __init__(self, first: Item, items: AsyncGenerator[Item], stall_s: float | None) -> None:
        self._items = items
        self._stall_s = stall_s
        self._limit = asyncio.timeout(stall_s)
        self._encoded_items = self._encoded(first)
        super().__init__(self._encoded_items, media_type="application/octet-stream", headers=HEADERS)

    async def _encoded(self, first: Item) -> AsyncGenerator[bytes]:
        yield encode_item(first)
        try:
            async for item in self._items:
                if self._stall_s is not None:
                    self._limit.reschedule(asyncio.get_running_loop().time() + self._stall_s)
                yield encode_item(item)
        except PenstockError as error:
            yield encode_item(error_item(error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; when the client disconnects, the backup ends at once."""
        async with aclosing(self._items), aclosing(self._encoded_items):
            try:
                async with self._limit:
                    await super().__call__(scope, receive, send)
            except TimeoutError:  # without the end of the response the server closes the connection
                _log.warning("a snapshot was ended: the member has read nothing for %g s", self._stall_s)


async def _files_of_receiver(request: Request) -> dict[str, list[int]]:
    """Names of files with size and time, which the receiver of a backup has: a JSON object."""
    body = await body_of(request, _MAX_BODY, "the list of files")
    try:
        found: Any = json.loads(body or b"{}")
        return {str(name): [int(size), int(time)] for name, (size, time) in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise LocalProtocolError("the list of files is not a JSON object of names with size and time") from error


async def body_of(request: Request, most: int, name: str) -> bytes:
    """Return the body of a request. Raises LocalProtocolError if it is longer than ``most``."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise LocalProtocolError(f"{name} is longer than {most} bytes")
    return bytes(body)


def number_of(request: Request, name: str, default: int, least: int = 0, most: int = 1 << 53) -> int:
    """Return a parameter that is a number from ``least`` to ``most``. Raises LocalProtocolError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 16 or not least <= int(text) <= most:
        raise LocalProtocolError(f"{name}={text[:40]!r}", hint=f"use a number from {least} to {most}")
    return int(text)
