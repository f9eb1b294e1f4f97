"""The envelope: usual shapes, unusual shapes, what lacks something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.tube.codec import envelope, exceptions
from penstock.tube.codec.envelope import Request, decode_request, decode_response, encode_request
from penstock.tube.codec.proto import envelope_pb2 as pb


def fields(request: Request) -> dict[str, object]:
    names = ("flag", "method", "payload", "serial", "service", "timeout", "trailing", "version")
    return {name: getattr(request, name) for name in names}


@given(
    st.builds(
        Request,
        st.integers(0, 2**32 - 1),
        st.integers(0, 5),
        st.integers(0, 300),
        st.binary(max_size=300),
        timeout=st.none() | st.integers(-1, 2**40),
        version=st.integers(1, 3),
        flag=st.sampled_from([0, 10]),
        trailing=st.binary(max_size=9),
    )
)
def test_request_round_trip(request: Request) -> None:
    body = encode_request(request)
    for _ in range(2):  # the second time the start of the body is known
        decoded = decode_request(request.serial, body)
        assert fields(decoded) == fields(request)
        if decoded.start >= 0:
            assert body[decoded.start : len(body) - len(request.trailing)] == request.payload


@given(
    st.binary(max_size=80), st.sampled_from([b"", bytes.fromhex("0208000408011003"), bytes.fromhex("0208010408001803")])
)
def test_any_bytes_give_an_envelope_or_our_error(data: bytes, start: bytes) -> None:
    for decode in (decode_request, decode_response):
        try:
            decode(1, start + data)
        except RemoteProtocolError:
            continue


def test_fields_in_another_order_and_unknown_fields_are_read_by_protobuf() -> None:
    known = encode_request(Request(1, 3, 13, b"abc"))
    # RequestBody with an unknown field 100 first, request before method
    body = bytes.fromhex("a00601") + b"\x1a\x03abc" + b"\x08\x0d"
    strange = decode_request(1, known[:8] + bytes([len(body)]) + body)
    assert (strange.method, strange.payload, strange.timeout) == (13, b"abc", None)


def test_missing_required_field() -> None:
    with pytest.raises(RemoteProtocolError, match="required"):
        decode_request(1, bytes.fromhex("0208000408011003") + b"\x02\x10\x05")
    with pytest.raises(RemoteProtocolError, match="required"):
        decode_request(1, bytes.fromhex("0004080110030308010a"))


def test_response_without_trailing_and_with_method_above_127() -> None:
    assert decode_response(9, envelope.encode_response(17, b"xyz")).payload == b"xyz"
    large = decode_response(9, envelope.encode_response(300, b"xyz") + b"\0\0")
    assert (large.method, large.payload, large.trailing) == (300, b"xyz", b"\0\0")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (3, "org.apache.inlong.tubemq.corerpc.exception.StandbyException"),
        (2, "com.apache.tubemq.corerpc.exception.StandbyException"),
        (1, "com.tencent.tubemq.corerpc.exception.StandbyException"),
        (7, "org.apache.inlong.tubemq.corerpc.exception.StandbyException"),
    ],
)
def test_error_names_its_class_as_the_requester_knows_it(version: int, name: str) -> None:
    answer = decode_response(1, envelope.encode_error(exceptions.STANDBY, "not #1 now", version=version))
    assert answer.exception == name
    assert answer.text == "not  1 now"
    assert answer.status == envelope.ERROR
    assert exceptions.is_standby(answer.exception)
    assert not exceptions.is_standby(exceptions.EXCEPTION)


def test_fatal_has_only_a_status_in_its_header() -> None:
    body = envelope.encode_error(exceptions.EXCEPTION, "bad", fatal=True)
    assert body.startswith(bytes.fromhex("02080102") + b"\x08\x02")
    assert decode_response(1, body).status == pb.ResponseHeader.FATAL
    assert decode_response(1, body).version is None
