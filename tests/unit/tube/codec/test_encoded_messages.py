"""The messages of a get response as they stand in it are those that the protobuf parser finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.encoded_messages import decode_get
from penstock.tube.codec.proto.broker_pb2 import GetMessageResponseB2C, TransferedMessage

LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([100, 101, 110, 126, 127, 16_360, 16_370, 16_384, 2_097_160]))


def response(sizes: list[int], position: int | None = None) -> GetMessageResponseB2C:
    messages = [
        TransferedMessage(messageId=number << 40, checkSum=number, payLoadData=bytes([number]) * size, flag=0)
        for number, size in enumerate(sizes)
    ]
    return GetMessageResponseB2C(success=True, errCode=200, errMsg="OK!", messages=messages, currOffset=position)


@given(st.lists(LENGTHS, max_size=6), st.integers(0, 6))
def test_each_is_what_the_parser_finds(sizes: list[int], count: int) -> None:
    made = response(sizes, 28)
    said, messages = decode_get(made.SerializeToString())
    assert (said.errCode, said.errMsg, said.currOffset, len(said.messages)) == (200, "OK!", 28, 0)
    assert list(messages.parsed()) == list(made.messages)
    one_by_one = [GetMessageResponseB2C(success=True, errCode=0, messages=[m]) for m in made.messages]
    assert [b"\x08\x01\x10\x00" + message for message in messages] == [m.SerializeToString() for m in one_by_one]
    part = messages.first_messages(count)
    assert (len(part), list(part)) == (len(made.messages[:count]), list(messages)[:count])
    assert list(part.parsed()) == list(made.messages[:count])


def test_other_orders_are_left_to_the_parser() -> None:
    first, second = response([3, 200]).messages
    head = GetMessageResponseB2C(success=True, errCode=200, messages=[first], currOffset=28).SerializeToString()
    tail = GetMessageResponseB2C(success=True, errCode=200, messages=[second]).SerializeToString()
    said, messages = decode_get(head + tail)
    assert (said.currOffset, len(said.messages)) == (28, 0)
    assert list(messages.parsed()) == [first, second]


@given(st.data())
def test_truncated_or_changed_bytes_are_refused_or_mean_the_same(data: st.DataObject) -> None:
    whole = bytearray(response([3, 200, 0]).SerializeToString())
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        said, messages = decode_get(cut)
        parsed = list(messages.parsed())
    except RemoteProtocolError:
        return
    expected = GetMessageResponseB2C.FromString(cut)
    assert parsed == list(expected.messages)
    assert (said.errCode, said.currOffset) == (expected.errCode, expected.currOffset)
