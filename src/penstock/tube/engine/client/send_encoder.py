"""Writing send requests quickly: what stands before and behind the payload repeats, so it is encoded once.

The counterpart of `broker.send_decoder.SendDecoder`. Fields are in the order of their numbers, as protobuf writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import Partition
from penstock.tube.codec.varint import encode_varint

__all__ = ["SendEncoder", "Token"]

Token = tuple[int, str]
"""The master's visit token, and the user's; blank without a user."""

_REMEMBERED = 1024


class SendEncoder:
    """Encodes SendMessageRequestP2B of one client; ``address`` is its IPv4 as a number."""

    def __init__(self, client_id: str, address: int) -> None:
        self._client_id = client_id
        self._address = address
        self._heads: dict[tuple[str, int], bytes] = {}
        self._tails: dict[tuple[int, str | None, str | None, Token], bytes] = {}

    def one(
        self, target: Partition, data: bytes, flag: int, msg_type: str | None, msg_time: str | None, token: Token
    ) -> bytes:
        """A request with one message."""
        place = (target.topic, target.id)
        head = self._heads.get(place)
        if head is None:
            head = self._heads[place] = self._head(target).SerializePartialToString()
        kind = (flag, msg_type, msg_time, token)
        tail = self._tails.get(kind)
        if tail is None:
            if len(self._tails) >= _REMEMBERED:
                self._tails.clear()
            tail = self._tails[kind] = self._tail(*kind).SerializePartialToString()
        return b"%b\x22%b%b%b" % (head, encode_varint(len(data)), data, tail)

    def numbered(self, request: bytes, producer_id: int, sequence: int, oldest: int) -> bytes:
        """``request`` with the producer's number for its message."""
        extension = pb.SendMessageRequestP2B()
        extension.producer.producerId = producer_id
        extension.producer.sequence = sequence
        extension.producer.oldest = oldest
        return request + extension.SerializePartialToString()

    def many(
        self, target: Partition, datas: Sequence[bytes], flags: Sequence[int], types: Sequence[str | None], token: Token
    ) -> bytes:
        """A batch."""
        head = self._head(target)
        head.data = b""
        first_flag, first_type = flags[0], types[0]
        tail = self._tail(first_flag, first_type, None, token)
        tail.batch.datas.extend(datas)
        if any(flag != first_flag for flag in flags):
            tail.batch.flags.extend(flags)
        if any(text != first_type for text in types):
            tail.batch.msgTypes.extend([text or "" for text in types])
        return head.SerializePartialToString() + tail.SerializePartialToString()

    def question(self, target: Partition, token: Token) -> bytes:
        """A batch without messages: which extensions has the broker?"""
        request = self._tail(0, None, None, token)
        request.MergeFrom(self._head(target))
        request.data = b""
        request.batch.SetInParent()
        return request.SerializeToString()

    def transaction(self, asked: pb.Transaction, token: Token) -> pb.SendMessageRequestP2B:
        """A request that stages rows or commits them: it has no message of its own."""
        request = self._tail(0, None, None, token)
        request.clientId, request.topicName, request.partitionId, request.data = self._client_id, "", 0, b""
        request.transaction.CopyFrom(asked)
        return request

    def _head(self, target: Partition) -> pb.SendMessageRequestP2B:
        return pb.SendMessageRequestP2B(clientId=self._client_id, topicName=target.topic, partitionId=target.id)

    def _tail(self, flag: int, msg_type: str | None, msg_time: str | None, token: Token) -> pb.SendMessageRequestP2B:
        tail = pb.SendMessageRequestP2B(flag=flag, checkSum=-1, sentAddr=self._address, msgType=msg_type)
        if msg_time is not None:
            tail.msgTime = msg_time
        tail.authInfo.visitAuthorizedToken = token[0]
        if token[1]:
            tail.authInfo.authAuthorizedToken = token[1]
        return tail
