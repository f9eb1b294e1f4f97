"""The client side of a connection: many in flight, time limits, ends, several masters."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import RefusedError, RemoteProtocolError, UnavailableError
from penstock.tube.client.arguments import new_client_id
from penstock.tube.client.connection import ClientConnection
from penstock.tube.client.master_sessions import MasterClient
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import Request, encode_error, encode_response
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from tests.ports import free_port
from tests.unit.tube.servers import scripted

OK = pb.CloseResponseM2P(success=True, errCode=200, errMsg="OK!")
CLOSE = MethodId.PRODUCER_CLOSE


def echo(request: Request) -> bytes:
    name = pb.CloseRequestP2M.FromString(request.payload).clientId
    return encode_response(CLOSE, pb.CloseResponseM2P(success=True, errCode=200, errMsg=name).SerializeToString())


async def ask(connection: ClientConnection, name: str = "a", timeout_s: float = 10.0) -> str:
    request = pb.CloseRequestP2M(clientId=name)
    return (await connection.call(1, CLOSE, request, pb.CloseResponseM2P, timeout_s=timeout_s)).errMsg


async def test_many_in_flight_each_gets_its_answer() -> None:
    async with scripted(echo) as (port, transports):
        connection = await ClientConnection.connect(("127.0.0.1", port))
        assert await asyncio.gather(*(ask(connection, f"n{n}") for n in range(50))) == [f"n{n}" for n in range(50)]
        assert len(transports) == 1
        await connection.close()
        with pytest.raises(UnavailableError) as caught:
            await ask(connection)
        assert caught.value.applied is False


async def test_end_of_the_connection_ends_every_call() -> None:
    async with scripted(lambda _: None) as (port, transports):
        connection = await ClientConnection.connect(("127.0.0.1", port))
        calls = [asyncio.create_task(ask(connection)) for _ in range(3)]
        while not transports:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        transports[0].abort()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, UnavailableError)
            assert outcome.applied is None
        assert connection.closed


async def test_late_answer_is_dropped() -> None:
    requests: list[Request] = []

    def first_never(request: Request) -> bytes | None:
        requests.append(request)
        return None if len(requests) == 1 else echo(request)

    async with scripted(first_never) as (port, _):
        connection = await ClientConnection.connect(("127.0.0.1", port))
        with pytest.raises(UnavailableError, match="did not answer within"):
            await ask(connection, timeout_s=0.02)
        assert requests[0].timeout == 20
        assert await ask(connection, "b") == "b"
        await connection.close()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (encode_error(exceptions.STANDBY, "x"), UnavailableError),
        (encode_error(exceptions.EXCEPTION, "x"), RefusedError),
        (encode_response(4, OK.SerializeToString()), RemoteProtocolError),
        (encode_response(CLOSE, b"\x08\x01"), RemoteProtocolError),
    ],
    ids=["standby", "exception", "other method", "required fields"],
)
async def test_invalid_answers_are_refused(body: bytes, error: type[Exception]) -> None:
    async with scripted(lambda _: body) as (port, _):
        connection = await ClientConnection.connect(("127.0.0.1", port))
        with pytest.raises(error):
            await ask(connection)
        await connection.close()


async def test_bytes_that_are_no_frame_end_the_connection() -> None:
    async with scripted(lambda _: b"\xff") as (port, transports):
        connection = await ClientConnection.connect(("127.0.0.1", port))
        with pytest.raises(UnavailableError):
            await ask(connection)
        assert connection.closed
        assert transports


async def test_an_unreachable_server_raises_unavailable() -> None:
    with pytest.raises(UnavailableError) as caught:
        await ClientConnection.connect(("127.0.0.1", free_port()))
    assert caught.value.applied is False


async def test_masters_are_tried_until_the_active_one_answers() -> None:
    async with (
        scripted(lambda _: encode_error(exceptions.STANDBY, "x")) as (standby, asked),
        scripted(echo) as (active, _),
    ):
        addresses = [("127.0.0.1", port) for port in (standby, active, free_port())]
        masters = MasterClient(addresses)
        for _ in range(3):
            answer = await masters.call(CLOSE, pb.CloseRequestP2M(clientId="c"), pb.CloseResponseM2P)
            assert answer.errMsg == "c"
        assert len(asked) <= 1, "it stays with the one that answers"
        await masters.close()
        alone = MasterClient(addresses[:1])
        with pytest.raises(UnavailableError, match="not the active master"):
            await alone.call(CLOSE, pb.CloseRequestP2M(clientId="c"), pb.CloseResponseM2P)
        await alone.close()


def test_client_ids_differ_and_have_their_shape() -> None:
    first, second = new_client_id("producer"), new_client_id("consumer", "lake")
    assert first != new_client_id("producer")
    assert second.startswith("lake_")
    assert "@" not in first + second
    assert "-penstock-" in first
