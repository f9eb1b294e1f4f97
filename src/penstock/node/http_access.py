"""Authentication and audit of HTTP requests.

Users of the node's password file authenticate by HTTP Basic, the administration token as bearer token. The audit trail
gets each change, and each request that reads message bodies, with its caller.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from penstock.errors import StorageError
from penstock.mqtt.password_checks import PasswordChecks
from penstock.node.http import Administer, Denied
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.logs import error_fields
from penstock.security.passwords import Credential
from penstock.tube.admin.request import UNAUTHORIZED, Caller

__all__ = ["HttpAccess", "audited"]

MAX_HEADER: Final = 4096
"""Longest Authorization header in characters; valid ones are shorter."""


class HttpAccess:
    """Finds the caller of a request. ``token``: the administration token.

    ``users`` returns the current users of the password file; None without a file, then queries need no credentials.
    ``administers(user)``: whether the user may make changes. ``anonymous``: queries need no credentials although there
    are users.
    """

    def __init__(
        self,
        token: str,
        checks: PasswordChecks | None = None,
        users: Callable[[], Mapping[str, Credential] | None] = lambda: None,
        administers: Callable[[str], bool] = lambda _: False,
        *,
        anonymous: bool = False,
    ) -> None:
        self._token = token
        self._checks = checks
        self._users = users
        self._administers = administers
        self._anonymous = anonymous

    async def __call__(self, authorization: str, address: str) -> Caller:
        """Return the caller that sent an ``Authorization`` header ("": none) from ``address``.

        Raises:
            Denied: the credentials are wrong, or cannot be checked at present.
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
            return Caller(address=address, administers=True, token=True)
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
        return Caller(user, address, administers=self._administers(user))


def _basic(credentials: str) -> tuple[str, bytes]:
    """Name and password of HTTP Basic (RFC 7617), which is UTF-8 here. Raises Denied."""
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

    checks.check(address, user, credential, password, done)
    return await future


_log = logging.getLogger("penstock.audit")

MAX_VALUE: Final = 2000
"""Longest recorded parameter in characters: a batch of a thousand objects must not fill the audit trail."""
MAX_FAILURES: Final = 10
_NOT_KEPT: Final = frozenset({"confModAuthToken", "callback", "method", "type"})


def audited(
    administer: Administer, server: str, trail: AuditTrail, token: str, recorded: Callable[[str], bool]
) -> Administer:
    """Wrap ``administer`` so that each request of a method that is ``recorded`` has an entry in ``trail``.

    The entry is durable before the response is sent. Requests without valid credentials change nothing: they are
    counted and not recorded, since a flood of them would push changes out of the bounded trail.
    """

    async def answer(params: Mapping[str, str], caller: Caller) -> Mapping[str, object]:
        reply = await administer(params, caller)
        method = params.get("method", "")
        if not recorded(method):
            return reply
        if reply.get("errMsg") == UNAUTHORIZED:
            fields = {"server": server, "method": method, "address": caller.address, "user": caller.user}
            trail.refused += 1
            _log.debug("administration refused: no valid credentials", extra={"fields": fields})
            return reply
        row = _row(server, method, params, caller.showing(params, token), reply)
        try:
            await asyncio.get_running_loop().run_in_executor(None, trail.append, row)
        except StorageError as error:
            _log.error("the audit trail lacks a change", extra={"fields": {**row, **error_fields(error)}})
        return reply

    return answer


def _row(
    server: str, method: str, params: Mapping[str, str], caller: Caller, reply: Mapping[str, Any]
) -> dict[str, Any]:
    rows = reply.get("data", reply.get("dataSet", []))
    failed = [str(row.get("errInfo", "")) for row in rows if isinstance(row, dict) and row.get("success") is False]
    found: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
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
