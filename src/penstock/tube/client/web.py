"""Requests to the administration of master (``/webapi.htm``) and broker (``/broker.htm``)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.runtime.addresses import parse_address
from penstock.runtime.unreachable import unreachable

__all__ = ["call", "call_broker"]

TIMEOUT_S = 10.0
_MASTER = ("master", "/webapi.htm")
_BROKER = ("broker", "/broker.htm")

_UNAUTHORIZED = "illegal access, unauthorized request!"
_DO_AUTHORIZE = (
    "give the token for changes: --admin-token, or PENSTOCK_ADMIN_TOKEN; "
    "a node that does not listen on loopback keeps it in tube/admin-token of its data directory"
)


def call(
    address: str, method: str, parameters: Mapping[str, str], *, option: str = "--http", timeout_s: float = TIMEOUT_S
) -> list[dict[str, Any]]:
    """The rows of the answer of the master at ``address`` (HOST:PORT) to ``method``. Errors name ``option``.

    Raises:
        ConfigError: the address is none.
        UnavailableError: nobody answers there, or something that is no master.
        RefusedError: the master refused; carries its code and words.
    """
    return _ask(address, _MASTER, option, method, parameters, timeout_s)


def call_broker(
    address: str,
    method: str,
    parameters: Mapping[str, str],
    *,
    option: str = "--broker-http",
    timeout_s: float = TIMEOUT_S,
) -> list[dict[str, Any]]:
    """As :func:`call`, of a broker."""
    return _ask(address, _BROKER, option, method, parameters, timeout_s)


def _ask(
    address: str, asked: tuple[str, str], option: str, method: str, parameters: Mapping[str, str], timeout_s: float
) -> list[dict[str, Any]]:
    server, path = asked
    try:
        host, port = parse_address(address.removeprefix("http://").rstrip("/"))
    except ValueError as error:
        raise ConfigError(f"{option}: got {address!r}, {error}", option=option) from error
    # A connection of our own: a proxy of the environment must not get in between.
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request(
            "POST",
            path,
            urlencode({"method": method, **parameters}),
            {"Content-Type": "application/x-www-form-urlencoded"},
        )
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise _absent(
            server,
            address,
            option,
            unreachable(error, host, tls=False).why if isinstance(error, OSError) else "what answers there is no HTTP",
            applied=False if isinstance(error, ConnectionRefusedError) else None,
        ) from error
    finally:
        connection.close()
    try:
        answer = json.loads(body)
        rows: list[Any] = answer.get("dataSet" if "dataSet" in answer else "data", [])
        ok: bool = answer["result"]
    except (ValueError, KeyError, AttributeError) as error:
        why = f"what answers there has no such thing (HTTP status {response.status})"
        raise _absent(server, address, option, why) from error
    if not ok:
        raise _refusal(server, address, option, int(answer.get("errCode", 0)), str(answer.get("errMsg", "")))
    for row in rows:
        if isinstance(row, dict) and row.get("success") is False:  # some rows are bare names
            raise _refusal(server, address, option, int(row.get("errCode", 0)), str(row.get("errInfo", "")))
    return rows


def _absent(
    server: str, address: str, option: str, why: str | None, *, applied: bool | None = None
) -> UnavailableError:
    return UnavailableError(
        f"no administration of a tube {server} answers at {address}",
        applied=applied,
        why=why,
        do=f"start a node (penstock up), or name its HTTP listener: {option} HOST:PORT",
    )


def _refusal(server: str, address: str, option: str, code: int, text: str) -> RefusedError:
    """The words are the server's; the names of its methods mean nothing to who gave a command."""
    what, do = f"the {server} refuses: {text.removeprefix('tube: ')}", None
    if text.endswith(_UNAUTHORIZED):  # Apache's has words before it
        what, do = f"the {server} refuses: the token is wrong", _DO_AUTHORIZE
    elif text.startswith("Unsupported method"):
        what, do = (
            f"what answers at {address} is not the administration of a tube {server}, or an older one",
            (f"name that of a {server}: {option} HOST:PORT"),
        )
    return RefusedError(what, code=code, text=text, peer=address, do=do)
