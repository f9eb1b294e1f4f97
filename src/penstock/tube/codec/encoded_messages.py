"""Messages of a get response that are decoded together on their first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.range_columns import messages_start
from penstock.tube.codec.schema import check, decode
from penstock.tube.codec.varint import decode_varint, encode_varint

__all__ = ["EncodedMessages", "decode_get"]

_MESSAGES = 0x22


class EncodedMessages:
    """Messages of ``answer``, one after the other: message k, with its tag, is ``answer[edges[k]:edges[k + 1]]``."""

    __slots__ = ("answer", "edges")

    def __init__(self, answer: bytes, edges: Sequence[int]) -> None:
        self.answer = answer
        self.edges = edges

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[bytes]:
        for start, end in pairwise(self.edges):
            yield self.answer[start:end]

    def first_messages(self, count: int) -> EncodedMessages:
        """The first ``count`` messages."""
        return EncodedMessages(self.answer, self.edges[: count + 1])

    def parsed(self) -> Sequence[broker_pb2.TransferedMessage]:
        """Decode the messages with protobuf.

        Raises:
            RemoteProtocolError: one is not a message.
        """
        # This part does not have the required fields of a response.
        around = broker_pb2.GetMessageResponseB2C(success=True, errCode=0).SerializeToString()
        return decode(broker_pb2.GetMessageResponseB2C, around + self.answer[self.edges[0] : self.edges[-1]]).messages


def decode_get(answer: bytes) -> tuple[broker_pb2.GetMessageResponseB2C, EncodedMessages]:
    """Split the get response in ``answer`` into the response without messages, and the encoded messages.

    Raises:
        RemoteProtocolError: not a get response. Of its messages only the lengths are checked.
    """
    start = messages_start(answer)
    edges = _message_bounds(answer, start)
    if edges is not None:
        rest = decode(broker_pb2.GetMessageResponseB2C, answer[:start] + answer[edges[-1] :])
        if not rest.messages:
            return rest, EncodedMessages(answer, edges)
    # The fields are not in the order of known servers.
    whole = decode(broker_pb2.GetMessageResponseB2C, answer)
    parts: list[bytes] = []
    edges = [0]
    for message in whole.messages:
        check(message)
        inner = message.SerializeToString()
        parts.append(b"\x22%b%b" % (encode_varint(len(inner)), inner))
        edges.append(edges[-1] + len(parts[-1]))
    del whole.messages[:]
    return whole, EncodedMessages(b"".join(parts), edges)


def _message_bounds(answer: bytes, start: int) -> list[int] | None:
    """Return the offsets of the consecutive messages from ``start`` on, and the end of the last one; None if one is
    incomplete."""
    edges = [start]
    position, end = start, len(answer)
    try:
        while position < end and answer[position] == _MESSAGES:
            size = answer[position + 1]
            position += 2
            if size >= 0x80:
                more = answer[position]
                position += 1
                if more < 0x80:
                    size += (more - 1) << 7
                else:
                    size, position = decode_varint(answer, position - 2)
            position += size
            edges.append(position)
    except (IndexError, RemoteProtocolError):
        return None
    return edges if position <= end else None
