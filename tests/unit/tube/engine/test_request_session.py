"""The rules of a connection without its IO: which request a response answers, time limits, violations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError, UnavailableError
from penstock.tube.codec.envelope import Request, Response, decode_request, encode_request, encode_response
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.engine.client.request_session import Outcome, RequestSession

METHOD = 17
LONG = 300_000
"""More than the session's buffer holds."""


def session() -> RequestSession[str]:
    return RequestSession("127.0.0.1:8715")


def request(made: RequestSession[str], name: str, now: float | None = None, timeout_s: float = 10.0) -> int:
    serial, frame = made.request(5, METHOD, name.encode(), name, timeout_s, now)
    [(written, body)] = FrameDecoder().feed(frame)
    sent = decode_request(written, body)
    assert (sent.serial, sent.service, sent.method, sent.payload) == (serial, 5, METHOD, name.encode())
    assert sent.timeout == int(timeout_s * 1000)
    return serial


def response(serial: int, payload: bytes, *, one_block: bool = True) -> bytes:
    return encode_frame(serial, encode_response(METHOD, payload), one_block=one_block)


def payload(outcome: Outcome) -> bytes:
    assert isinstance(outcome, Response)
    return outcome.payload


def through_buffer(made: RequestSession[str], data: bytes) -> Iterator[tuple[str, Outcome]]:
    while data:
        buffer = made.buffer()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        yield from made.buffer_filled(count)


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 100, 20_000, LONG]), st.booleans()), min_size=1, max_size=5),
    st.permutations(range(5)),
    st.lists(st.integers(1, 400_000), max_size=8),
)
def test_responses_find_their_requests_however_they_arrive(
    sizes: list[tuple[int, bool]], order: list[int], cuts: list[int]
) -> None:
    stream, buffered = session(), session()
    expected: list[tuple[str, bytes]] = []
    data = b""
    for made in (stream, buffered):
        assert [request(made, f"r{n}") for n in range(len(sizes))] == list(range(1, len(sizes) + 1))
    for number in (n for n in order if n < len(sizes)):
        size, one_block = sizes[number]
        body = bytes([number]) * size
        data += response(number + 1, body, one_block=one_block)
        expected.append((f"r{number}", body))
    edges = sorted({cut for cut in cuts if cut < len(data)} | {0, len(data)})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    found = [pair for piece in pieces for pair in stream.receive(piece)]
    assert [(name, payload(outcome)) for name, outcome in found] == expected
    found = [pair for piece in pieces for pair in through_buffer(buffered, piece)]
    assert [(name, payload(outcome)) for name, outcome in found] == expected
    assert stream.error is buffered.error is None
    assert stream.has_received
    assert buffered.has_received


@pytest.mark.parametrize("size", [0, 1, 127, 128, 4_096, 4_097, 20_000])
@pytest.mark.parametrize("timeout_s", [0.0001, 0.5, 30.0])
def test_a_frame_is_that_of_the_codec_for_every_size(size: int, timeout_s: float) -> None:
    made = session()
    data = b"x" * size
    for serial in (1, 2):  # the second one finds the head of the first
        sent = Request(serial, 5, METHOD, data, timeout=max(1, int(timeout_s * 1000)))
        assert made.request(5, METHOD, data, "a", timeout_s) == (serial, encode_frame(serial, encode_request(sent)))


def test_a_payload_stays_as_it_is_when_the_buffer_is_used_again() -> None:
    made = session()
    request(made, "a")
    request(made, "b")
    [(_, first)] = through_buffer(made, response(1, b"x" * LONG))
    [(_, second)] = through_buffer(made, response(2, b"y" * LONG))
    assert (payload(first), payload(second)) == (b"x" * LONG, b"y" * LONG)


def test_a_request_expires_and_its_late_response_is_dropped() -> None:
    made = session()
    request(made, "late", now=100.0, timeout_s=10.0)
    request(made, "soon", now=101.0, timeout_s=2.0)
    request(made, "unlimited")
    assert made.next_deadline() == 103.0
    assert made.expire(102.9) == []
    [(name, error)] = made.expire(103.0)
    assert name == "soon"
    assert isinstance(error, UnavailableError)
    assert error.what == "tube: 127.0.0.1:8715 did not answer within 2 s"
    assert error.applied is None
    assert made.receive(response(2, b"too late")) == []
    assert made.next_deadline() == 110.0
    assert [name for name, _ in made.receive(response(1, b""))] == ["late"]
    assert made.next_deadline() is None
    assert made.expire(1e9) == []


def test_a_forgotten_request_has_no_outcome() -> None:
    made = session()
    serial = request(made, "a", now=0.0)
    made.forget(serial)
    made.forget(0)
    assert made.receive(response(serial, b"")) == []
    assert made.next_deadline() is None
    assert made.close(UnavailableError("over")) == []


def test_the_end_of_the_connection_fails_what_is_open() -> None:
    made = session()
    request(made, "a")
    request(made, "b", now=0.0)
    error = UnavailableError("over")
    assert made.close(error) == [("a", error), ("b", error)]
    assert made.close(error) == []
    assert made.next_deadline() is None


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(
    "broken",
    [b"HTTP/1.1 400 Bad Request\r\n", encode_frame(2, b"\xff"), encode_frame(2, b"\xff", one_block=True)],
    ids=["no frame", "no envelope", "no envelope, one block"],
)
def test_after_a_violation_what_came_before_counts(broken: bytes, buffered: bool) -> None:
    made = session()
    request(made, "a")
    request(made, "b")
    data = response(1, b"answer") + broken
    found = list(through_buffer(made, data)) if buffered else made.receive(data)
    assert [(name, payload(outcome)) for name, outcome in found] == [("a", b"answer")]
    assert isinstance(made.error, RemoteProtocolError)


def test_a_response_of_an_http_server_is_named() -> None:
    made = session()
    request(made, "a")
    assert made.receive(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n") == []
    assert made.error is not None
    assert made.error.why == "it answered with HTTP: 'HTTP/1.1 400 Bad Request'"


def test_a_frame_alone_that_is_no_response() -> None:
    made = session()
    request(made, "a")
    assert list(through_buffer(made, encode_frame(1, b"\xff", one_block=True))) == []
    assert isinstance(made.error, RemoteProtocolError)


def test_a_request_that_cannot_be_sent_is_not_open() -> None:
    made = session()
    with pytest.raises(Exception, match="cannot be sent"):
        made.request(5, METHOD, bytes(40 << 20), "a", 1.0, 0.0)
    assert made.close(UnavailableError("over")) == []
    assert made.next_deadline() is None
