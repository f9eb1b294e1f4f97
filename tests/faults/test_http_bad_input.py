"""Requests that are no HTTP, or HTTP with odd contents: answered or closed, without an internal error."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import pytest

from penstock.node.http import HttpServer, broker_app, master_app
from penstock.runtime.io.network import Address
from penstock.runtime.observability.metrics import Metrics
from penstock.tube.admin.request import Caller
from tests.mutations import mutated

DEADLINE_S = 60

REQUESTS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET http://[/x HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /%00%ff/../x?%=%&&=;method HTTP/1.1\r\nHost:\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /readyz HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost:80\r\nAccept: text/html\r\nOrigin: http://[::1\r\n\r\n",
    b"GET /webapi.htm?callback=abc HTTP/1.0\r\nReferer: http://[\r\nHost: a.b:99999\r\n\r\n",
    b"GET /webapi.htm?method=admin_query_topic_info&topicName=a%ED%A0%80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /webapi.htm HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 24\r\n\r\nmethod=admin_x&topic=%ff",
    b"POST /webapi.htm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
]

CHUNKED = b" /webapi.htm HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
BAD_CHUNKS = {
    "a chunk that is too long": b"POST" + CHUNKED + b"5\r\nabcdeXX\r\n",
    "a chunk that is too short": b"POST" + CHUNKED + b"5\r\nabc\r\n0\r\n\r\n",
    "a method that is not allowed": b"PATCH" + CHUNKED + b"5\r\nabc\r\n0\r\n\r\n",
    "after a good chunk": b"POST" + CHUNKED + b"1\r\na\r\n-1\r\n",
}


async def administer(parameters: Mapping[str, str], _: Caller) -> Mapping[str, object]:
    return {"result": True, **parameters}


@pytest.fixture
async def addresses() -> AsyncIterator[list[Address]]:
    """The listeners of a master and of a broker."""
    servers = [HttpServer(master_app(list, Metrics(), administer)), HttpServer(broker_app(administer))]
    yield [await server.start("http", Address("127.0.0.1", 0)) for server in servers]
    for server in servers:
        await server.close()


async def send(address: Address, *pieces: bytes) -> bytes:
    """The status code that came back; empty where the connection was closed without an answer."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
            return (await reader.read())[9:12]
        except OSError:  # closed before all was sent
            return b""
        finally:
            writer.transport.abort()


def no_internal_errors(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("data", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
async def test_a_malformed_body_is_refused_once(
    addresses: list[Address], caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    for address in addresses:
        head, _, body = data.partition(b"\r\n\r\n")
        whole = await send(address, data)
        split = await send(address, head + b"\r\n\r\n", body)
        assert {whole, split} <= {b"400", b"405", b"200"}
        assert await send(address, REQUESTS[0]) in (b"200", b"403")
    assert no_internal_errors(caplog)


async def test_a_client_of_another_protocol_is_answered_at_once(addresses: list[Address]) -> None:
    """The head of a TubeMQ frame has no end of a line, for which h11 would wait."""
    for address in addresses:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(bytes.fromhex("ff7ff4fe00000001"))
            assert (await reader.read())[9:12] == b"400"  # the time limit of a request closes without an answer
            writer.close()
            await writer.wait_closed()


async def run(addresses: list[Address], seeds: range) -> Counter[bytes]:
    codes: Counter[bytes] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        codes[await send(rng.choice(addresses), mutated(rng, rng.choice(REQUESTS)))] += 1
    return codes


async def test_mutated_requests(addresses: list[Address], caplog: pytest.LogCaptureFixture) -> None:
    codes = Counter([await send(address, request) for address in addresses for request in REQUESTS])
    codes += await run(addresses, range(400))
    assert set(codes) <= {b"", b"200", b"307", b"400", b"403", b"404", b"405"}, codes
    assert no_internal_errors(caplog)


@pytest.mark.nightly
async def test_many_mutated_requests(addresses: list[Address], caplog: pytest.LogCaptureFixture) -> None:
    codes = await run(addresses, range(1_000, 21_000))
    assert set(codes) <= {b"", b"200", b"307", b"400", b"403", b"404", b"405"}, codes
    assert no_internal_errors(caplog)
