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

_DO = {
    "illegal access, unauthorized request!": "give the token for changes: --admin-token, or PENSTOCK_ADMIN_TOKEN; "
    "a node that does not listen on loopback keeps it in tube/admin-token of its data directory"
}


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
        answer = json.loads(connection.getresponse().read())
        rows: list[Any] = answer.get("dataSet" if "dataSet" in answer else "data", [])
        ok: bool = answer["result"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, AttributeError) as error:
        raise UnavailableError(
            f"no administration of a tube {server} answers at {address}",
            applied=False if isinstance(error, ConnectionRefusedError) else None,
            why=unreachable(error, host, tls=False).why if isinstance(error, OSError) else str(error) or repr(error),
            do=f"start a node (penstock up), or name its HTTP listener: {option} HOST:PORT",
        ) from error
    finally:
        connection.close()
    if not ok:
        text = str(answer.get("errMsg", ""))
        do = _DO.get(text)
        if text.startswith("Unsupported method"):
            text = text.partition(";")[0]  # what else it knows helps nobody here
            do = f"name the administration of a {server}: {option} HOST:PORT"
        raise RefusedError(
            f"the {server} refused {method}: {text}",
            code=int(answer.get("errCode", 0)),
            text=text,
            peer=address,
            do=do,
        )
    for row in rows:
        if isinstance(row, dict) and row.get("success") is False:  # some rows are bare names
            raise RefusedError(
                f"the {server} refused {method}: {row.get('errInfo')}",
                code=int(row.get("errCode", 0)),
                text=str(row.get("errInfo", "")),
                peer=address,
            )
    return rows
