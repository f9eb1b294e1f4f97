"""Checks that protobuf's Python runtime leaves out."""

from __future__ import annotations

import pytest

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.schema import decode


def test_missing_required_field_is_named() -> None:
    data = broker_pb2.CommitOffsetRequestC2B(clientId="c", topicName="t").SerializePartialToString()
    with pytest.raises(RemoteProtocolError, match="partitionId"):
        decode(broker_pb2.CommitOffsetRequestC2B, data)


def test_nested_message_lacking_a_required_field() -> None:
    good = broker_pb2.CommitOffsetRequestC2B(clientId="c", topicName="t", partitionId=0, groupName="g")
    assert decode(broker_pb2.CommitOffsetRequestC2B, good.SerializeToString()) == good
    with pytest.raises(RemoteProtocolError, match="required"):
        decode(broker_pb2.GetMessageResponseB2C, bytes.fromhex("080110c801") + b"\x22\x02\x08\x01")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (master_pb2.CloseResponseM2P, bytes.fromhex("080110c8011a02fffe")),
        (broker_pb2.HeartBeatResponseB2C, bytes.fromhex("080110c8011a002a02fffe")),
        # authInfo { authorizedToken: not UTF-8 }
        (master_pb2.CloseRequestP2M, bytes.fromhex("0a0170120412 02fffe".replace(" ", ""))),
    ],
    ids=["plain", "repeated", "nested"],
)
def test_text_that_is_not_utf_8(kind: type[master_pb2.CloseResponseM2P], data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="UTF-8"):
        decode(kind, data)


def test_bytes_that_are_not_protobuf_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        decode(master_pb2.CloseResponseM2P, b"\x0a\xff")


def test_unknown_fields_are_ignored() -> None:
    plain = broker_pb2.GetMessageRequestC2B(clientId="c", partitionId=1, groupName="g", topicName="t")
    assert decode(broker_pb2.GetMessageRequestC2B, plain.SerializeToString() + b"\xc2\xbb\x01\x01x").clientId == "c"
