"""Answers of a standby: the address of the active node, to MQTT clients, browsers and administration requests."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.model.access import Answer, Credentials, Refused
from penstock.node.api_access import API
from penstock.node.cluster.state import ActiveNode
from penstock.node.http import api_error

__all__ = ["RedirectingAccess", "Redirection"]


class RedirectingAccess:
    """Access of a standby: refuses every client, with the address of the active node's ``listener``."""

    def __init__(self, listener: str, active: Callable[[], ActiveNode | None]) -> None:
        self._listener = listener
        self._active = active

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        """Refuse the client [Access]."""
        active = self._active()
        if active is None:
            answer(Refused(ReasonCode.SERVER_UNAVAILABLE, "no node of the cluster is active at present"), now)
            return
        text = f"this node is a standby; the active node is {active.node}"
        reference = active.mqtt.get(self._listener, "")
        # MQTT 3.1.1 has no such code: "server unavailable".
        code = ReasonCode.USE_ANOTHER_SERVER if credentials.protocol_version == 5 else ReasonCode.SERVER_UNAVAILABLE
        answer(Refused(code, text, reference), now)

    def allowed(self, *_: object, **__: object) -> bool:
        """Permit nothing [Access]."""
        return False


class Redirection:
    """The HTTP pages of a standby. ``active`` returns the active node, ``problems`` the reasons why the standby is not
    ready; ``scheme``: of the HTTP listeners, which all nodes have in common."""

    def __init__(self, active: Callable[[], ActiveNode | None], problems: Callable[[], list[str]], scheme: str) -> None:
        self._active = active
        self._problems = problems
        self._scheme = scheme

    def routes(self) -> list[Route]:
        """The paths that the active node serves."""
        return [
            Route("/", self._to_console),
            Route(f"{API}/{{path:path}}", self._refuse_console, methods=["GET", "POST", "PUT", "DELETE"]),
            Route("/webapi.htm", self._to_master, methods=["GET", "POST"]),
        ]

    def _url_of(self, active: ActiveNode) -> str:
        return active.url or f"{self._scheme}://{active.http}/"

    async def _to_master(self, request: Request) -> Response:
        """Redirect an administration request to the active node."""
        active = self._active()
        if active is None:
            text = "no node of the cluster is active at present"
            return JSONResponse({"result": False, "errCode": 503, "errMsg": text}, status_code=503)
        url = self._url_of(active) + "webapi.htm" + (f"?{request.url.query}" if request.url.query else "")
        # Apache's master sends 302, with which clients repeat a POST as a GET without its parameters.
        return RedirectResponse(url, status_code=302 if request.method == "GET" else 307)

    async def _to_console(self, _: Request) -> Response:
        """Redirect a browser to the console of the active node; it keeps the part of the URL after #."""
        active = self._active()
        if active is None:
            text = "\n".join([*self._problems(), "see the log of this node, and: penstock cluster status"])
            return PlainTextResponse(f"{text}\n", status_code=503)
        return RedirectResponse(self._url_of(active), status_code=307, headers={"Cache-Control": "no-store"})

    async def _refuse_console(self, _: Request) -> Response:
        """Refuse a request to the console API: a standby has nothing to show, and changes nothing."""
        active = self._active()
        hint = f"use the active node: {self._url_of(active)}" if active else "see: penstock cluster status"
        body = api_error("standby", "this node is a standby", why="; ".join(self._problems()), hint=hint)
        return JSONResponse(body, status_code=503, headers={"Cache-Control": "no-store"})
