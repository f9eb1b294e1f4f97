"""Requests that are put together by hand read as protobuf's."""

from __future__ import annotations

import pytest

from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.engine.broker.send_decoder import SendDecoder
from penstock.tube.engine.client.send_encoder import SendEncoder

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
    request = pb.SendMessageRequestP2B.FromString(writer.many(TARGET, [b"a", b"b"], [1, 1], ["t", "t"], (7, "")))
    assert list(request.batch.datas) == [b"a", b"b"]
    assert (request.data, request.flag, request.msgType) == (b"", 1, "t")
    assert not request.batch.flags
    assert not request.batch.msgTypes
    request = pb.SendMessageRequestP2B.FromString(writer.many(TARGET, [b"a", b"b"], [0, 1], [None, "t"], (7, "user")))
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
    question = pb.SendMessageRequestP2B.FromString(writer.question(TARGET, (7, "")))
    assert question.HasField("batch")
    assert not question.batch.datas
