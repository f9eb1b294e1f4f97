"""Stored messages as protobuf writes them, the expected output of the log's own encoder."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.varint import encode_varint

__all__ = ["encode_stored"]


def encode_stored(
    first_id: int, checksums: Sequence[int], datas: Sequence[bytes], flags: Sequence[int], marker: bytes = b""
) -> list[bytes]:
    """Messages as fields 4 of a get response; ids rise from ``first_id``, ``marker`` is of the first."""
    encoded = []
    for number, (total, data, flag) in enumerate(zip(checksums, datas, flags, strict=True)):
        message = broker_pb2.TransferedMessage(
            messageId=first_id + number, checkSum=total, payLoadData=data, flag=flag
        ).SerializeToString() + (b"" if number else marker)
        encoded.append(b"\x22%b%b" % (encode_varint(len(message)), message))
    return encoded
