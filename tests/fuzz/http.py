"""Target of the HTTP listener: requests on a connection without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from penstock.node.http import HttpAccess, HttpConnection, master_app, server_config
from penstock.runtime.observability.metrics import Metrics
from penstock.tube.admin.request import BadParameter, Caller, Params
from tests.fuzz.data_provider import head, in_pieces


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1234) if name in {"peername", "sockname"} else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _administer(given: Mapping[str, str], caller: Caller) -> Mapping[str, object]:
    params = Params(given, identified=caller.identified)
    try:
        params.number("number", default=1)
        params.items("items")
        params.time_ms("createDate")
        params.flag("flag", default=True)
        params.user("user")
        params.check_unused()
    except BadParameter as error:
        return {"result": False, "errCode": 400, "errMsg": str(error)}
    return {"result": caller.administers, "errCode": 0, "errMsg": "OK"}


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _config() -> uvicorn.Config:
    return server_config(master_app(list, Metrics(), _administer, identify=HttpAccess("token")))


async def _run(data: bytes) -> object:
    (seed,), stream = head(data, 1)
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    state = ServerState()
    connection = HttpConnection(config=_config(), server_state=state, app_state={})
    transport = _Transport()
    connection.connection_made(transport)
    for piece in in_pieces(stream, seed) if seed & 1 else [stream]:
        if transport.closed or not piece:  # a socket never delivers nothing
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(50):
        if not state.tasks:
            break
        await asyncio.sleep(0)
    if not transport.closed:
        connection.eof_received()
    connection.connection_lost(None)
    for _ in range(50):
        if not state.tasks:
            break
        await asyncio.sleep(0)
    assert not state.tasks, "a request has no end"
    assert not failures, failures
    statuses = []
    if transport.sent:
        reader = h11.Connection(h11.CLIENT)
        method = "HEAD" if stream.startswith(b"HEAD ") else "GET"
        reader.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(transport.sent)
        event = reader.next_event()
        assert isinstance(event, h11.Response), event
        assert event.status_code < 500, event
        statuses.append(event.status_code)
    return statuses


def fuzz_requests(data: bytes) -> object:
    """Sizes of the pieces (1 byte, even: one piece), a stream: it is answered as HTTP, and no task fails or stays."""
    return _loop().run_until_complete(_run(data))
