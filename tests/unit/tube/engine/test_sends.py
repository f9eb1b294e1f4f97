"""The quick way of reading sends says what the careful one says, in whatever order and however often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.envelope import decode_request
from penstock.tube.codec.framing import FrameDecoder
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.sends import Send, SendReader, encode_sent
from tests.unit.tube.vectors import frames


def plain(payload: bytes) -> tuple[object, ...]:
    m = pb.SendMessageRequestP2B.FromString(payload)
    auth = m.authInfo
    tokens = (auth.visitAuthorizedToken, auth.authAuthorizedToken)
    return (m.clientId, m.topicName, m.partitionId, m.data, m.flag, m.checkSum, m.msgType, *tokens)


def encoded(data: bytes = b"data", partition: int = 10002, **fields: object) -> bytes:
    base: dict[str, object] = {"clientId": "client", "topicName": "demo", "partitionId": partition, "data": data}
    request = pb.SendMessageRequestP2B(**{**base, "flag": 1, "checkSum": -1, "sentAddr": -5, **fields})  # type: ignore[arg-type]
    return request.SerializeToString()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_lengths(length: int) -> None:
    reader = SendReader()
    payload = encoded(b"x" * length)
    for _ in range(2):
        assert reader.read(payload) == plain(payload)


def test_recorded_sends_of_all_clients() -> None:
    reader = SendReader()
    seen = 0
    for frame in frames():
        if frame.direction == "request" and frame.row.get("method") == 13:
            ((_, body),) = FrameDecoder().feed(frame.data)
            payload = decode_request(frame.serial, body).payload
            for _ in range(2):
                assert reader.read(payload) == plain(payload)
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
    reader = SendReader()
    for client, partition, data, kind, checksum in sends:
        payload = encoded(data, partition, clientId=client, msgType=kind, checkSum=checksum)
        assert reader.read(payload) == plain(payload)


@given(st.data())
def test_changed_bytes_never_give_what_protobuf_would_not(data: st.DataObject) -> None:
    reader = SendReader()
    payload = encoded()
    reader.read(payload)
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    try:
        found = reader.read(damaged)
    except RemoteProtocolError:
        return
    assert found == plain(damaged)


def read_plain(reader: SendReader, payload: bytes) -> Send:
    found = reader.read(payload)
    assert isinstance(found, tuple)
    return found


def test_fields_in_unusual_places_are_not_remembered() -> None:
    reader = SendReader()
    usual = encoded()
    reader.read(usual)
    # A second topicName behind the payload: the last one counts.
    doubled = usual + b"\x12\x05other"
    for _ in range(2):
        assert read_plain(reader, doubled)[1] == "other"
    tail = usual[usual.index(b"data") + 4 :]
    lacking = pb.SendMessageRequestP2B(clientId="client", topicName="demo", partitionId=1).SerializePartialToString()
    with pytest.raises(RemoteProtocolError):
        reader.read(lacking)
    assert read_plain(reader, lacking + b"\x22\x01x" + tail)[3] == b"x"


def test_what_is_remembered_is_bounded() -> None:
    reader = SendReader()
    for n in range(3000):
        reader.read(encoded(clientId=f"client-{n}", msgType=f"type-{n}"))
    assert len(reader._before) <= 1024
    assert len(reader._behind) <= 1024


def test_the_answer_is_protobuf_s() -> None:
    for message_id, time_ms, offset in [(1 << 60, 1_700_000_000_000, 28), (42, 0, 0), ((1 << 63) - 1, 1, 1 << 50)]:
        expected = pb.SendMessageResponseB2P(
            success=True,
            errCode=200,
            errMsg=str(message_id),
            requireAuth=False,
            messageId=message_id,
            appendTime=time_ms,
            appendOffset=offset,
        )
        assert encode_sent(message_id, time_ms, offset) == expected.SerializeToString()
