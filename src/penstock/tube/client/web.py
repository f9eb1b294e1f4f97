"""Requests to the administration of master (``/webapi.htm``) and broker (``/broker.htm``)."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.runtime.io.network import ConnectionFailure, connection_failure, parse_address

__all__ = ["WebLogin", "call", "call_broker"]

TIMEOUT_S = 10.0
_MASTER = ("master", "/webapi.htm")
_BROKER = ("broker", "/broker.htm")

_UNAUTHORIZED = "illegal access, unauthorized request!"
_DO_AUTHORIZE = (
    "set a user with the right to administer (--username, --password-file), or the administration token (--admin-token "
    "or PENSTOCK_ADMIN_TOKEN); without --username, commands read the token of a node on loopback from tube/admin-token "
    "of the data directory: PENSTOCK_DATA_DIR, else ./penstock-data"
)

_WRONG_CREDENTIALS = 401
_REDIRECT = 307
_DO_LOG_IN = "set a user of security.passwords and its password: --username, --password-file"


@dataclass(frozen=True, slots=True)
class WebLogin:
    """Credentials of an administration request. ``token``: the administration token, blank for none.

    ``username`` and ``password``: of the password file, if the server has one; None for none.
    """

    token: str = ""
    username: str | None = None
    password: str = ""
    tls: ssl.SSLContext | None = None
    """Verifies servers at ``https://`` addresses; None: with the authorities of the system."""

    def headers(self) -> dict[str, str]:
        """Return the ``Authorization`` header of a request; the token is a parameter, as TubeMQ requires."""
        if self.username is None:
            return {}
        credentials = base64.b64encode(f"{self.username}:{self.password}".encode()).decode("ascii")
        return {"Authorization": f"Basic {credentials}"}


_NO_LOGIN = WebLogin()


def call(
    address: str,
    method: str,
    parameters: Mapping[str, str],
    *,
    option: str = "--http",
    timeout_s: float = TIMEOUT_S,
    login: WebLogin = _NO_LOGIN,
) -> list[dict[str, Any]]:
    """Call ``method`` of the master at ``address`` (HOST:PORT); return the rows of its response.

    Errors contain ``option``, with which the user sets the address.

    Raises:
        ConfigError: ``address`` is not an address.
        UnavailableError: the server is not reachable, or not a master.
        RefusedError: the master refused the request; has its code and text.
    """
    return _ask(address, _MASTER, option, method, parameters, timeout_s, login)


def call_broker(
    address: str,
    method: str,
    parameters: Mapping[str, str],
    *,
    option: str = "--broker-http",
    timeout_s: float = TIMEOUT_S,
    login: WebLogin = _NO_LOGIN,
) -> list[dict[str, Any]]:
    """Like :func:`call`, for a broker."""
    return _ask(address, _BROKER, option, method, parameters, timeout_s, login)


def _ask(
    address: str,
    asked: tuple[str, str],
    option: str,
    method: str,
    parameters: Mapping[str, str],
    timeout_s: float,
    login: WebLogin,
    *,
    redirected: bool = False,
) -> list[dict[str, Any]]:
    server, path = asked
    try:
        scheme, _, place = address.rpartition("://")
        if scheme not in {"", "http", "https"}:
            raise ValueError("expected HOST:PORT, or a URL with http or https")
        host, port = parse_address(place.rstrip("/"))
    except ValueError as error:
        raise ConfigError(
            f"{option}: got {address!r}",
            option=option,
            why=str(error),
            hint=f"write the HTTP address of a {server}: HOST:PORT, or https://HOST:PORT",
        ) from error
    # Not urllib, which would send the token to a proxy set in the environment.
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    if scheme == "https":
        context = login.tls or ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    try:
        connection.request(
            "POST",
            path,
            urlencode({"method": method, **parameters, **({"confModAuthToken": login.token} if login.token else {})}),
            {"Content-Type": "application/x-www-form-urlencoded", **login.headers()},
        )
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        failure = ConnectionFailure("the response is not HTTP")
        if isinstance(error, OSError):
            failure = connection_failure(error, host, tls=scheme == "https")
        raise _not_administration(
            server,
            address,
            option,
            failure.why,
            hint=failure.hint if isinstance(error, ssl.SSLError) else None,
            # After any other failure the server may have executed the request.
            applied=False if isinstance(error, ConnectionRefusedError) else None,
        ) from error
    finally:
        connection.close()
    if response.status == _REDIRECT and not redirected:  # a standby of a cluster names the active node
        scheme, _, rest = response.getheader("Location", "").partition("://")
        active = f"{scheme}://{rest.partition('/')[0]}"
        return _ask(active, asked, option, method, parameters, timeout_s, login, redirected=True)
    try:
        answer = json.loads(body)
        rows: list[Any] = answer.get("dataSet" if "dataSet" in answer else "data", [])
        ok: bool = answer["result"]
    except (ValueError, KeyError, AttributeError) as error:
        why = f"the server at this address has no such administration (HTTP status {response.status})"
        raise _not_administration(server, address, option, why) from error
    if not ok:
        raise _refusal(server, address, option, int(answer.get("errCode", 0)), str(answer.get("errMsg", "")))
    for row in rows:
        if isinstance(row, dict) and row.get("success") is False:  # some rows are only names
            raise _refusal(server, address, option, int(row.get("errCode", 0)), str(row.get("errInfo", "")))
    return rows


def _not_administration(
    server: str, address: str, option: str, why: str | None, *, hint: str | None = None, applied: bool | None = None
) -> UnavailableError:
    return UnavailableError(
        f"the administration of a TubeMQ {server} is not reachable at {address}",
        applied=applied,
        why=why,
        hint=hint or f"start a node (penstock up), or set the HTTP address of the {server}: {option} HOST:PORT",
    )


def _refusal(server: str, address: str, option: str, code: int, text: str) -> RefusedError:
    """Return the server's refusal as an error, without the names of HTTP methods, which users of the commands do not
    see."""
    what, hint = f"the {server} refused the request: {text.removeprefix('tube: ')}", None
    if code == _WRONG_CREDENTIALS:
        hint = _DO_LOG_IN
    if text.endswith(_UNAUTHORIZED):  # Apache's text has a prefix
        what, hint = (
            f"the {server} refused the request: no valid administration token, and no user with this permission",
            _DO_AUTHORIZE,
        )
    elif text.startswith("Unsupported method"):
        what, hint = (
            f"the server at {address} is not the administration of a TubeMQ {server}, or is an older version",
            f"set the HTTP address of a {server}: {option} HOST:PORT",
        )
    return RefusedError(what, code=code, text=text, peer=address, hint=hint)
