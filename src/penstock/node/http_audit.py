"""The audit trail of the administration by HTTP: each change, and each reading of message bodies, with its caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from penstock.errors import StorageError
from penstock.node.http import Administer
from penstock.runtime.observability.audit import AuditTrail
from penstock.runtime.observability.logs import error_fields
from penstock.tube.admin.caller import UNAUTHORIZED, Caller

__all__ = ["audited"]

_log = logging.getLogger("penstock.audit")

MAX_VALUE: Final = 2000
"""Characters of a parameter that are kept: a batch of a thousand objects must not fill the trail."""
MAX_FAILURES: Final = 10
_NOT_KEPT: Final = frozenset({"confModAuthToken", "callback", "method", "type"})


def audited(
    administer: Administer, server: str, trail: AuditTrail, token: str, recorded: Callable[[str], bool]
) -> Administer:
    """``administer`` with a row in ``trail`` for each request of a method that is ``recorded``.

    The row is durable before the answer leaves. Requests without a valid credential change nothing: they are counted
    and not recorded, since a flood of them would push the changes out of the bounded trail.
    """

    async def answer(params: Mapping[str, str], caller: Caller) -> Mapping[str, object]:
        reply = await administer(params, caller)
        method = params.get("method", "")
        if not recorded(method):
            return reply
        if reply.get("errMsg") == UNAUTHORIZED:
            fields = {"server": server, "method": method, "address": caller.address, "user": caller.user}
            trail.refused += 1
            _log.debug("administration refused: no valid credential", extra={"fields": fields})
            return reply
        row = _row(server, method, params, caller.showing(params, token), reply)
        try:
            await asyncio.get_running_loop().run_in_executor(None, trail.append, row)
        except StorageError as error:
            _log.error("a change is missing in the audit trail", extra={"fields": {**row, **error_fields(error)}})
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
