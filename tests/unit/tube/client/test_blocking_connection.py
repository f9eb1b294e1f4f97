from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from penstock.errors import RemoteProtocolError, UnavailableError
from penstock.tube.client.connection import BlockingConnection
from penstock.tube.codec.envelope import decode_request, encode_response
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2

GET = MethodId.GET_MESSAGES
LONG = bytes(range(256)) * 5000
TIMEOUT_S = 20.0


@contextmanager
def answering(*answers: Sequence[bytes]) -> Iterator[BlockingConnection]:
    """A connection to a server that sends the next of ``answers``, piece by piece, for each question."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        decoder = FrameDecoder()
        with connection:
            for pieces in answers:
                while not (frames := decoder.feed(connection.recv(1 << 16))):
                    pass
                assert decode_request(*frames[0]).method == GET
                for piece in pieces:
                    connection.sendall(piece)

    server = threading.Thread(target=serve)
    server.start()
    port: int = listening.getsockname()[1]
    with listening, BlockingConnection(("127.0.0.1", port)) as connection:
        yield connection
    server.join(TIMEOUT_S)


def ask(connection: BlockingConnection) -> bytes:
    return connection.exchange(ServiceType.BROKER_READ, GET, broker_pb2.RangeRequest(), timeout_s=TIMEOUT_S)


def frame(serial: int, payload: bytes, *, one_block: bool) -> bytes:
    return encode_frame(serial, encode_response(GET, payload), one_block=one_block)


def test_answers_of_any_length_and_form_follow_each_other() -> None:
    long, cut, short = (frame(n, data, one_block=n != 2) for n, data in enumerate((LONG, LONG[:-1], b"short"), 1))
    with answering([long[:10], long[10:300_000], long[300_000:]], [cut[:9000], cut[9000:]], [short]) as connection:
        first = ask(connection)
        assert [ask(connection), ask(connection)] == [LONG[:-1], b"short"]
        assert first == LONG, "an answer stays as it was when the next has come"


def test_answers_to_others_are_passed_over() -> None:
    late = frame(7, LONG, one_block=True)
    with answering(
        [late, frame(1, b"first", one_block=True)], [late + frame(2, b"second", one_block=True)]
    ) as connection:
        assert [ask(connection), ask(connection)] == [b"first", b"second"]


def test_an_answer_that_ends_early() -> None:
    with (
        answering([frame(1, LONG, one_block=True)[:-1]]) as connection,
        pytest.raises(UnavailableError, match="closed the"),
    ):
        ask(connection)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "it answered with HTTP: 'HTTP/1.1 400 Bad Request'"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "begins with"),
    ],
)
def test_a_peer_with_another_protocol_is_an_error(data: bytes, message: str) -> None:
    with (
        answering([data]) as connection,
        pytest.raises(RemoteProtocolError, match=message),
    ):
        ask(connection)
