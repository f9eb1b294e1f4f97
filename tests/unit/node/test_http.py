"""Health, metrics and the administration pages over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from html import unescape

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

import penstock.node.http
from penstock.errors import UnavailableError
from penstock.node.http import HttpConnection, HttpServer, LeaseGate, broker_app, master_app, names_of
from penstock.runtime.io.network import Address
from penstock.runtime.observability.metrics import MetricHelp, Metrics
from penstock.tube.admin.request import Caller

LOOPBACK = Address("127.0.0.1", 0)


async def echo(parameters: Mapping[str, str], _: Caller) -> Mapping[str, object]:
    return dict(parameters)


class Node:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.metrics = Metrics()
        self.metrics.add("mqtt", lambda: {"packets": 3}, {"packets": MetricHelp("Packets.", "counter")})
        self.server = HttpServer(master_app(lambda: self.problems, self.metrics, self.administer))
        self.address = LOOPBACK

    async def administer(self, parameters: Mapping[str, str], _: Caller) -> Mapping[str, object]:
        return {"result": True, "data": [dict(parameters)]}


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    node.address = await node.server.start("http", LOOPBACK)
    yield node
    await node.server.close()


async def ask(
    address: Address, target: str, body: str | None = None, extra: str = "", *, host: str = "x"
) -> tuple[int, dict[str, str], str]:
    """One request; the status, the headers and the body of its answer."""
    reader, writer = await asyncio.open_connection(*address)
    head = f"{'GET' if body is None else 'POST'} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{extra}"
    data = (body or "").encode()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    first, _, text = answer.decode().partition("\r\n\r\n")
    status, *lines = first.split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, text


async def test_health(node: Node) -> None:
    assert (await ask(node.address, "/livez"))[::2] == (200, "ok\n")
    status, _, text = await ask(node.address, "/readyz")
    assert (status, json.loads(text)) == (200, {"ready": True, "reasons": [], "warnings": []})
    node.problems.append("statestore: the disk failed")
    status, _, text = await ask(node.address, "/readyz")
    assert (status, json.loads(text)) == (
        503,
        {"ready": False, "reasons": ["statestore: the disk failed"], "warnings": []},
    )
    assert (await ask(node.address, "/livez"))[0] == 200


async def test_metrics_and_other_paths(node: Node) -> None:
    status, headers, text = await ask(node.address, "/metrics")
    assert (status, "penstock_mqtt_packets_total 3.0" in text) == (200, True)
    assert headers["content-type"].startswith("text/plain; version=")
    _, headers, text = await ask(node.address, "/metrics", extra="Accept: application/openmetrics-text\r\n")
    assert headers["content-type"].startswith("application/openmetrics-text; version=")
    assert text.endswith("# EOF\n")
    status, _, text = await ask(node.address, "/nothing%3Cb%3E")
    assert (status, text) == (404, "nothing is at '/nothing<b>'; see / for the list\n")
    assert (await ask(node.address, "/livez", ""))[0] == 405
    status, _, text = await ask(node.address, "/api/v1/nothing")
    assert (status, json.loads(text)["error"]["what"]) == (404, "the API has no path '/api/v1/nothing'")


async def test_the_first_page_links_to_all_pages(node: Node) -> None:
    for accept, found in (("", r"^(/\S+) +\w"), ("Accept: text/html,*/*\r\n", r'<a href="(/[^"]+)">')):
        status, headers, text = await ask(node.address, "/", extra=accept)
        assert (status, "text/html" in headers["content-type"]) == (200, bool(accept))
        places = re.findall(found, text, re.MULTILINE)
        assert "/metrics" in places
        for place in places:
            assert (await ask(node.address, unescape(place)))[0] == 200


async def test_unsupported_upgrade_requests_are_not_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    await ask(node.address, "/livez", extra=upgrade)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_administration_takes_a_query_or_a_form(node: Node) -> None:
    _, headers, text = await ask(node.address, "/webapi.htm?method=m&type=op_query&a=%C3%BC")
    assert json.loads(text)["data"] == [{"method": "m", "type": "op_query", "a": "ü"}]
    assert headers["content-type"] == "application/json"
    _, _, text = await ask(node.address, "/webapi.htm?method=m", "topicName=x&empty=")
    assert json.loads(text)["data"] == [{"method": "m", "topicName": "x", "empty": ""}]


async def test_a_reply_with_half_a_surrogate_pair_is_sent() -> None:
    """Settings that an earlier version stored may have one."""
    stored: Mapping[str, object] = json.loads('{"reason": "\\ud800 ü"}')

    async def administer(_parameters: Mapping[str, str], _caller: Caller) -> Mapping[str, object]:
        return stored

    server = HttpServer(master_app(list, Metrics(), administer))
    address = await server.start("http", LOOPBACK)
    status, _, text = await ask(address, "/webapi.htm?method=m")
    await server.close()
    assert (status, json.loads(text)) == (200, stored)


async def test_a_callback_wraps_the_reply_and_only_a_plain_name_does(node: Node) -> None:
    _, headers, text = await ask(node.address, "/webapi.htm?callback=cb_1")
    assert text.startswith('cb_1({"result":true')
    assert headers["content-type"].startswith("application/javascript")
    assert (await ask(node.address, "/webapi.htm?callback=alert(1)"))[2].startswith('{"result"')


async def test_cross_site_requests_are_refused(node: Node) -> None:
    assert (await ask(node.address, "/webapi.htm?method=m", extra="Sec-Fetch-Site: cross-site\r\n"))[0] == 403
    assert (await ask(node.address, "/webapi.htm?method=m", extra="Sec-Fetch-Site: same-origin\r\n"))[0] == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Origin: http://evil.example", 403),
        ("Origin: null", 403),
        ("Origin: http://x:8080", 403),
        ("Origin: http://x", 200),
        ("Referer: http://evil.example/page", 403),
        ("Referer: http://x/", 200),
        # What the browser itself says of the site goes before the names that a proxy may have changed.
        ("Sec-Fetch-Site: same-origin\r\nOrigin: https://tube.example", 200),
    ],
)
async def test_origin_and_referer_are_checked_if_the_browser_does_not_name_the_site(
    node: Node, header: str, status: int
) -> None:
    assert (await ask(node.address, "/webapi.htm?method=m", extra=f"{header}\r\n"))[0] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:8080", 403),
        ("evil.example.", 403),
        ("[::1", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("localhost:8080", 200),
        ("tube.localhost", 200),
        ("plant-3:8080", 200),
        ("Tube.Example:8080", 200),
        ("console.plant.example", 200),
        ("", 200),
    ],
)
async def test_requests_with_a_foreign_host_name_are_refused(host: str, status: int) -> None:
    names = names_of(
        Address("127.0.0.1", 0), Address("tube.example", 8080), url="https://console.plant.example/penstock/"
    )
    for path, app in (
        ("/webapi.htm", master_app(list, Metrics(), echo, names=names)),
        ("/broker.htm", broker_app(echo, names=names)),
    ):
        server = HttpServer(app)
        address = await server.start("http", LOOPBACK)
        try:
            found, _, text = await ask(address, f"{path}?method=m", host=host)
        finally:
            await server.close()
        assert (found, json.loads(text).get("errCode")) == (status, 400 if status == 403 else None)


async def test_forms_are_bounded_and_bad_ones_refused(node: Node) -> None:
    _, _, text = await ask(node.address, "/webapi.htm", "a=" + "x" * 1_100_000)
    assert json.loads(text)["errMsg"] == "the form is longer than 1048576 bytes"
    _, _, text = await ask(node.address, "/webapi.htm", "&".join(f"a{n}=1" for n in range(2000)))
    assert json.loads(text)["errMsg"].startswith("the form cannot be read")


POST = b"POST /webapi.htm HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


@pytest.mark.parametrize(
    "sent", [b"", b"GET /livez HTT", b"GET /livez HTTP/1.1\r\nHost: x\r\n", POST, POST + b"method="]
)
@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "later"])
async def test_a_request_that_does_not_come_whole_is_cut_off(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: bytes, sent: bytes
) -> None:
    monkeypatch.setattr(penstock.node.http, "REQUEST_S", 0.05)
    reader, writer = await asyncio.open_connection(*node.address)
    writer.write(before + sent)
    with contextlib.suppress(ConnectionError):  # where it is over before all of it was sent
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.endswith(b"ok\n") if before else answer == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    monkeypatch.undo()
    assert (await ask(node.address, "/livez"))[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_whole_request_may_take_its_time_to_be_answered() -> None:
    async def administer(_: Mapping[str, str], __: Caller) -> Mapping[str, object]:
        assert server._server is not None
        (connection,) = server._server.server_state.connections
        assert isinstance(connection, penstock.node.http.HttpConnection)
        connection._close_if_incomplete()  # as its timer would now
        return {"result": True}

    server = HttpServer(broker_app(administer))
    address = await server.start("tube-broker-http", LOOPBACK)
    try:
        assert (await ask(address, "/broker.htm", "method=m"))[2] == '{"result":true}'
    finally:
        await server.close()


async def test_connections_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.node.http, "MAX_CONNECTIONS", 2)
    held = [await asyncio.open_connection(*node.address) for _ in range(2)]
    for _, writer in held:
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    for reader, _ in held:
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok\n"), 60)
    reader, writer = await asyncio.open_connection(*node.address)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    for _, each in [*held, (reader, writer)]:
        each.close()
        await each.wait_closed()
    async with asyncio.timeout(60):
        while True:
            try:
                status, _, _ = await ask(node.address, "/livez")
            except (ConnectionError, ValueError):
                continue  # the server has not seen their ends yet
            break
    assert status == 200


async def test_the_broker_page_answers_under_any_path() -> None:
    server = HttpServer(broker_app(echo))
    address = await server.start("tube-broker-http", LOOPBACK)
    try:
        for path in ("/broker.htm?method=m", "/any/path?method=m", "/?method=m"):
            _, _, text = await ask(address, path)
            assert json.loads(text) == {"method": "m"}
    finally:
        await server.close()


async def test_a_port_in_use_is_reported(node: Node) -> None:
    with pytest.raises(UnavailableError, match=f"http: cannot listen on {node.address}"):
        await HttpServer(broker_app(echo)).start("http", node.address)


async def test_closing_ends_it_and_can_be_repeated(node: Node) -> None:
    await node.server.close()
    await node.server.close()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection(*node.address)


async def test_a_compressed_form_is_not_unpacked(node: Node) -> None:
    reader, writer = await asyncio.open_connection(*node.address)
    body = gzip.compress(b"method=" + b"x" * 1_000_000)
    head = "POST /webapi.htm HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: gzip\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    assert "the form cannot be read" in json.loads(answer.partition(b"\r\n\r\n")[2])["errMsg"]


async def test_running_requests_finish_before_the_server_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not finish in time are cancelled."""
    asked, go_on, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def administer(_: Mapping[str, str], __: Caller) -> Mapping[str, object]:
        asked.set()
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return {"result": True}

    for finishes in (True, False):
        server = HttpServer(broker_app(administer))
        address = await server.start("tube-broker-http", LOOPBACK)
        for each in (asked, go_on):
            each.clear()
        request = asyncio.create_task(ask(address, "/broker.htm", "method=m"))
        await asked.wait()
        if not finishes:
            monkeypatch.setattr(penstock.node.http, "CLOSE_S", 0.0)
        closing = asyncio.create_task(server.close())
        if finishes:
            await asyncio.sleep(0)
            go_on.set()
            assert (await request)[0] == 200
        else:
            await asyncio.wait_for(cancelled.wait(), 60)
            await asyncio.wait([request])
            assert request.exception() is not None or (await request)[0] == 500
        await closing


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_made_while_the_server_is_closed_is_ended(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its request is read before the loop's call that connected it has returned."""
    server = HttpServer(broker_app(echo))
    made = HttpConnection.connection_made

    def close_now(connection: HttpConnection, transport: asyncio.Transport) -> None:
        made(connection, transport)
        assert server._server is not None
        server._server.stop()

    async def connect() -> None:
        address = await server.start("tube-broker-http", LOOPBACK)
        with socket.create_connection(address, timeout=60) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert server._task is not None
            await asyncio.wait_for(server._task, 60)
            await server.close()
            with contextlib.suppress(ConnectionResetError):
                await asyncio.to_thread(peer.recv, 1000)

    monkeypatch.setattr(HttpConnection, "connection_made", close_now)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(connect())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_node_without_its_lease_answers_that_it_is_not_active() -> None:
    """Also if it loses the lease between the request and the response."""
    active = True

    async def administer(parameters: Mapping[str, str], _: Caller) -> Mapping[str, object]:
        nonlocal active
        active = parameters["method"] == "a"
        return {"result": True}

    pages = broker_app(administer)
    pages.add_middleware(LeaseGate, holds=lambda: active)
    server = HttpServer(pages)
    address = await server.start("http", LOOPBACK)
    try:
        assert (await ask(address, "/broker.htm?method=a"))[0] == 200
        for _ in range(2):
            status, headers, text = await ask(address, "/broker.htm?method=b")
            assert (status, headers["retry-after"]) == (503, "1")
            answer = json.loads(text)
            assert answer["errMsg"].startswith("this node is not active any more: it lost its lease in etcd")
            assert (answer["result"], answer["errCode"], answer["error"]["code"]) == (False, 503, "not_active")
    finally:
        await server.close()


async def test_a_response_that_has_begun_is_cut_off_with_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    active = True

    async def pages(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal active
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        active = False
        await send({"type": "http.response.body", "body": b"cd"})

    app = Starlette(routes=[Mount("/", pages)], middleware=[Middleware(LeaseGate, holds=lambda: active)])
    server = HttpServer(app)
    address = await server.start("http", LOOPBACK)
    try:
        status, _, text = await ask(address, "/")
        assert (status, text) == (200, "ab")
    finally:
        await server.close()
    assert not any(record.exc_info for record in caplog.records), "it is not an error of the application"
