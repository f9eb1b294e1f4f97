"""The fast decoder of send requests agrees with the protobuf parser, in any order and repetition."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.envelope import Request, decode_request, encode_request, encode_response
from penstock.tube.codec.framing import FrameDecoder
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker.send_decoder import SendDecoder, encode_sent
from tests.unit.tube.vectors import frames


def plain(payload: bytes) -> tuple[object, ...]:
    m = pb.SendMessageRequestP2B.FromString(payload)
    auth = m.authInfo
    tokens = (auth.visitAuthorizedToken, auth.authAuthorizedToken)
    return (m.clientId, (m.topicName, m.partitionId), m.flag, m.checkSum, m.msgType, *tokens, m.data)


def read(reader: SendDecoder, payload: bytes) -> tuple[object, ...]:
    found = reader.read(payload)
    assert isinstance(found, tuple)
    send, data = found
    tokens = (send.token, send.user_token)
    return (send.client_id, send.place, send.flag, send.checksum, send.msg_type, *tokens, data)


def encoded(data: bytes = b"data", partition: int = 10002, **fields: Any) -> bytes:
    base: dict[str, Any] = {"clientId": "client", "topicName": "demo", "partitionId": partition, "data": data}
    request = pb.SendMessageRequestP2B(**{**base, "flag": 1, "checkSum": -1, "sentAddr": -5, **fields})
    return request.SerializeToString()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_lengths(length: int) -> None:
    reader = SendDecoder()
    payload = encoded(b"x" * length)
    for _ in range(2):
        assert read(reader, payload) == plain(payload)


def test_recorded_sends_of_all_clients() -> None:
    reader = SendDecoder()
    seen = 0
    for frame in frames():
        if frame.direction == "request" and frame.row.get("method") == 13:
            ((_, body),) = FrameDecoder().feed(frame.data)
            payload = decode_request(frame.serial, body).payload
            for _ in range(2):
                assert read(reader, payload) == plain(payload)
            seen += 1
    assert seen > 5


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "client-2", "c" * 130]),
            st.sampled_from([0, 1, 127, 128, 10002, -1]),
            st.binary(max_size=200),
            st.sampled_from(["", "type", "ä"]),
            st.sampled_from([-1, 5]),
        )
    )
)
def test_any_mixture(sends: list[tuple[str, int, bytes, str, int]]) -> None:
    reader = SendDecoder()
    for client, partition, data, kind, checksum in sends:
        payload = encoded(data, partition, clientId=client, msgType=kind, checkSum=checksum)
        assert read(reader, payload) == plain(payload)


@given(st.data())
def test_changed_bytes_never_give_what_protobuf_would_not(data: st.DataObject) -> None:
    reader = SendDecoder()
    payload = encoded()
    reader.read(payload)
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    try:
        found = read(reader, damaged)
    except RemoteProtocolError:
        return
    assert found == plain(damaged)


def whole(reader: SendDecoder, body: bytes) -> tuple[object, ...]:
    """What `recognise` says, else the careful way; None counts as unknown, not as wrong."""
    found = reader.recognise(body) or reader.read_request(decode_request(1, body), body)
    assert isinstance(found, tuple)
    send, data = found
    return (send.timeout, send.version, send.client_id, send.place, send.flag, send.msg_type, send.token, data)


def careful(body: bytes) -> tuple[object, ...]:
    request = decode_request(1, body)
    client, place, flag, _, kind, token, _, data = plain(request.payload)
    return (request.timeout, request.version, client, place, flag, kind, token, data)


def request_with(payload: bytes, timeout: int | None = 3000, trailing: bytes = b"") -> bytes:
    return encode_request(Request(1, 3, 13, payload, timeout=timeout, trailing=trailing))


def test_recorded_sends_are_recognised_when_they_come_again() -> None:
    reader = SendDecoder()
    recognised = 0
    for frame in frames():
        if frame.direction == "request" and frame.row.get("method") == 13:
            ((_, body),) = FrameDecoder().feed(frame.data)
            assert whole(reader, body) == careful(body)
            recognised += reader.recognise(body) is not None
            assert whole(reader, body) == careful(body)
    assert recognised > 5


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "bb", "c" * 130]),
            st.sampled_from([1, 127, 128, 10002]),
            st.binary(max_size=3) | st.binary(min_size=120, max_size=140),
            st.sampled_from(["", "type"]),
            st.sampled_from([None, 5, 3000]),
            st.sampled_from([b"", bytes(9)]),
        )
    )
)
def test_any_mixture_of_requests(sends: list[tuple[str, int, bytes, str, int | None, bytes]]) -> None:
    reader = SendDecoder()
    for client, partition, data, kind, timeout, trailing in sends:
        payload = encoded(data, partition, clientId=client, msgType=kind)
        body = request_with(payload, timeout, trailing)
        for _ in range(2):
            assert whole(reader, body) == careful(body)


@given(st.data())
def test_a_changed_request_is_not_taken_for_the_known_one(data: st.DataObject) -> None:
    reader = SendDecoder()
    body = request_with(encoded(b"x" * 130))
    whole(reader, body)
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    found = reader.recognise(damaged)
    if found is not None:
        assert whole(reader, damaged) == careful(damaged)


def test_the_cache_of_request_shapes_is_bounded() -> None:
    reader = SendDecoder()
    for n in range(9000):
        whole(reader, request_with(encoded(clientId=f"client-{n}")))
    whole(reader, request_with(encoded(clientId="c" * 1100)))
    assert 0 < len(reader._shapes) <= 8192
    assert max(len(start) + len(shape.rest) for start, shape in reader._shapes.items()) <= 1024
    assert max(map(len, reader._starts.values())) <= 4


def test_requests_of_one_length_with_data_at_different_places() -> None:
    reader = SendDecoder()
    bodies = [request_with(encoded(b"d" * (20 - n), clientId="c" * (1 + n))) for n in range(4)]
    assert len(set(map(len, bodies))) == 1
    for body in bodies:
        whole(reader, body)
    assert all(reader.recognise(body) is not None for body in bodies)


def test_fields_in_unusual_places_are_not_remembered() -> None:
    reader = SendDecoder()
    usual = encoded()
    reader.read(usual)
    # A second topicName behind the payload: the last one counts.
    doubled = usual + b"\x12\x05other"
    for _ in range(2):
        assert read(reader, doubled)[1] == ("other", 10_002)
    tail = usual[usual.index(b"data") + 4 :]
    lacking = pb.SendMessageRequestP2B(clientId="client", topicName="demo", partitionId=1).SerializePartialToString()
    with pytest.raises(RemoteProtocolError):
        reader.read(lacking)
    assert read(reader, lacking + b"\x22\x01x" + tail)[-1] == b"x"


def test_the_cache_of_decoded_fields_is_bounded() -> None:
    reader = SendDecoder()
    for n in range(3000):
        reader.read(encoded(clientId=f"client-{n}", msgType=f"type-{n}"))
    assert 0 < len(reader._known) <= 2048
    assert max(map(len, reader._known)) <= 1024


def test_repeated_fields_are_one_object_and_checksums_are_not_cached() -> None:
    reader = SendDecoder()
    first, second = reader.read(encoded(b"a")), reader.read(encoded(b"other"))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert first[0] is second[0]
    reader.read(encoded(b"c", partition=7, checkSum=5))
    assert len(reader._known) == 1


@pytest.mark.parametrize(
    ("first_id", "time_ms", "offset"),
    [(1 << 60, 1_700_000_000_000, 28), (42, 0, 0), ((1 << 63) - 30_000, 1, 1 << 50), (16_300, 5, 16_300 * 28)],
)
def test_the_answers_are_protobuf_s(first_id: int, time_ms: int, offset: int) -> None:
    bodies = encode_sent(first_id, time_ms, offset, 20_000)
    assert len(bodies) == 20_000
    for number in [*range(300), *range(950, 970), *range(16_200, 16_500), 19_999]:
        expected = pb.SendMessageResponseB2P(
            success=True,
            errCode=200,
            errMsg=str(first_id + number),
            requireAuth=False,
            messageId=first_id + number,
            appendTime=time_ms,
            appendOffset=offset + 28 * number,
        )
        assert bodies[number] == encode_response(13, expected.SerializeToString())
