"""Requests that are put together by hand read as protobuf's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.engine.broker.send_decoder import SendDecoder
from penstock.tube.engine.client.producer_state import SendEncoder, Token

TARGET = Partition(BrokerInfo(1, "h", 1), "demo", 10_002)


@pytest.mark.parametrize("size", [1, 127, 128, 20_000, 3_000_000])
@pytest.mark.parametrize(("msg_type", "msg_time"), [(None, None), ("flow", None), ("flow", "202401010101")])
def test_one(size: int, msg_type: str | None, msg_time: str | None) -> None:
    payload = SendEncoder("p1", -5).one(TARGET, bytes(size), 1, msg_type, msg_time, (77, ""))
    expected = pb.SendMessageRequestP2B(
        clientId="p1", topicName="demo", partitionId=10_002, data=bytes(size), flag=1, checkSum=-1, sentAddr=-5,
        msgType=msg_type, msgTime=msg_time,
    )  # fmt: skip
    expected.authInfo.visitAuthorizedToken = 77
    assert payload == expected.SerializeToString()
    reader = SendDecoder()
    for _ in range(2):  # the second time from what it remembers
        found = reader.read(payload)
        assert isinstance(found, tuple)
        send, data = found
        assert (send.client_id, send.place, data) == ("p1", ("demo", 10_002), bytes(size))
        assert (send.flag, send.checksum, send.msg_type, send.token, send.user_token) == (1, -1, msg_type or "", 77, "")


def test_many() -> None:
    writer = SendEncoder("p1", 1)
    request = pb.SendMessageRequestP2B.FromString(
        writer.encode_batch(TARGET, [b"a", b"b"], [1, 1], ["t", "t"], (7, ""))
    )
    assert list(request.batch.datas) == [b"a", b"b"]
    assert (request.data, request.flag, request.msgType) == (b"", 1, "t")
    assert not request.batch.flags
    assert not request.batch.msgTypes
    request = pb.SendMessageRequestP2B.FromString(
        writer.encode_batch(TARGET, [b"a", b"b"], [0, 1], [None, "t"], (7, "user"))
    )
    assert list(request.batch.flags) == [0, 1]
    assert list(request.batch.msgTypes) == ["", "t"]
    assert request.authInfo.authAuthorizedToken == "user"


def test_numbers_and_question() -> None:
    writer = SendEncoder("p1", 1)
    numbered = pb.SendMessageRequestP2B.FromString(
        writer.numbered(writer.one(TARGET, b"x", 0, None, None, (7, "")), 99, 4, 2)
    )
    assert (numbered.producer.producerId, numbered.producer.sequence, numbered.producer.oldest) == (99, 4, 2)
    assert numbered.data == b"x"
    question = pb.SendMessageRequestP2B.FromString(writer.probe(TARGET, (7, "")))
    assert question.HasField("batch")
    assert not question.batch.datas


TEXTS = st.text(max_size=5)
MESSAGES = st.tuples(st.binary(max_size=300), st.integers(0, 3), st.none() | TEXTS, st.none() | TEXTS)
TOKENS = st.tuples(st.integers(-(2**63), 2**63 - 1), TEXTS)


def expected(
    target: Partition, datas: list[bytes], flags: list[int], types: list[str | None], time: str | None, token: Token
) -> pb.SendMessageRequestP2B:
    request = pb.SendMessageRequestP2B(
        clientId="p1", topicName=target.topic, partitionId=target.id, flag=flags[0], checkSum=-1, sentAddr=-5,
        msgType=types[0], msgTime=time, data=datas[0] if len(datas) == 1 else b"",
    )  # fmt: skip
    request.authInfo.visitAuthorizedToken = token[0]
    if token[1]:
        request.authInfo.authAuthorizedToken = token[1]
    if len(datas) > 1:
        request.batch.datas.extend(datas)
        if len(set(flags)) > 1:
            request.batch.flags.extend(flags)
        if len(set(types)) > 1:
            request.batch.msgTypes.extend([text or "" for text in types])
    return request


@given(
    st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), st.integers(0, 20_000), TEXTS, TOKENS), max_size=4)
)
def test_any_requests_one_after_the_other(
    requests: list[tuple[list[tuple[bytes, int, str | None, str | None]], int, str, Token]],
) -> None:
    """Whatever the encoder remembers of earlier requests, each reads as the one that protobuf would have written."""
    encoder = SendEncoder("p1", -5)
    for messages, partition, topic, token in requests:
        target = Partition(BrokerInfo(1, "h", 1), topic, partition)
        datas, flags, types, times = map(list, zip(*messages, strict=True))
        if len(datas) == 1:
            payload = encoder.one(target, datas[0], flags[0], types[0], times[0], token)
        else:
            payload = encoder.encode_batch(target, datas, flags, types, token)
            times = [None]
        found = pb.SendMessageRequestP2B.FromString(payload)
        assert found == expected(target, datas, flags, types, times[0], token)
        numbered = pb.SendMessageRequestP2B.FromString(encoder.numbered(payload, 9, 4, 2))
        assert (numbered.producer.producerId, numbered.producer.sequence, numbered.producer.oldest) == (9, 4, 2)
        numbered.ClearField("producer")
        assert numbered == found
