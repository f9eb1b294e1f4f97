"""Fast decoding of send requests: the bytes around the payload repeat, so they are decoded once.

A producer sends the same client id, topic, partition, flag and token with every message; only the payload differs. The
bytes around the payload are cached with their decoded fields, and compared. If the bytes are unknown, or the fields are
in another order, the request is decoded and checked with protobuf. This takes 1 us instead of 9. Whole requests
including the envelope are recognized in the same way, by their length, with one comparison.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.tube.codec.envelope import PROTOCOL_VERSION, Request, response_head
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.varint import RisingVarints, encode_varint

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["NO_SUM", "SendCollector", "SendDecoder", "SendFields", "SendRun", "encode_sent"]

NO_SUM: Final = -1
"""Value of checkSum without a checksum."""
_REMEMBERED: Final = 2048
_LONGEST: Final = 1024  # maximum bytes of one entry; with the number of entries this limits memory
_SHAPES: Final = 8192  # entries for whole requests: requests of a partition with data of equal length share one
_STARTS: Final = 4  # maximum offsets of the data that are tried for requests of one length
_STORED: Final = b"\x08\x01\x10\xc8\x01\x1a"  # success, errCode 200, errMsg
_DIGITS: Final = [b"%03d" % number for number in range(1000)]
_FIXED_BYTES: Final = 10  # the same, with the length of errMsg, requireAuth false and the tag of messageId


class SendFields:
    """Fields of a send request except its payload. ``place``: topic and wire id of the partition.

    Requests of a client that differ in the payload alone share one object. ``timeout``, ``version``: of the envelope.
    """

    __slots__ = ("checksum", "client_id", "flag", "msg_type", "place", "timeout", "token", "user_token", "version")

    def __init__(self, request: pb.SendMessageRequestP2B, timeout: int | None, version: int) -> None:
        self.timeout = timeout
        self.version = version
        self.client_id = request.clientId
        self.place = (request.topicName, request.partitionId)
        self.flag = request.flag
        self.checksum = request.checkSum
        self.msg_type = request.msgType
        self.token = request.authInfo.visitAuthorizedToken
        self.user_token = request.authInfo.authAuthorizedToken


class _RequestTemplate:
    """A whole request: its fields, the end of its data, and the bytes after the data."""

    __slots__ = ("end", "rest", "send")

    def __init__(self, send: SendFields, end: int, rest: bytes) -> None:
        self.send = send
        self.end: i64 = end
        self.rest = rest


class SendDecoder:
    """Decodes SendMessageRequestP2B. The number of entries is limited, because clients choose them."""

    def __init__(self) -> None:
        self._known: dict[bytes, SendFields] = {}
        self._shapes: dict[bytes, _RequestTemplate] = {}
        """Whole requests, by the bytes up to the data."""
        self._starts: dict[int, list[int]] = {}
        """Offsets at which the data begin, by the length of the frame body; the latest first."""

    def recognise(self, body: bytes) -> tuple[SendFields, bytes] | None:
        """Return fields and data of the request in a frame body if a request that differs only in the data was read
        before."""
        starts = self._starts.get(len(body))
        if starts is None:
            return None
        for start in starts:
            shape = self._shapes.get(body[:start])
            if shape is not None and body[shape.end :] == shape.rest:
                return shape.send, body[start : shape.end]
        return None

    def read_request(self, request: Request, body: bytes) -> tuple[SendFields, bytes] | pb.SendMessageRequestP2B:
        """Read ``request``, decoded from ``body``, like :meth:`read`; `recognise` then recognizes similar bodies."""
        found = self.read(request.payload, request.timeout, request.version)
        if isinstance(found, tuple) and request.start >= 0:
            self._learn(body, request, found[0])
        return found

    def read(
        self, payload: bytes, timeout: int | None = None, version: int = PROTOCOL_VERSION
    ) -> tuple[SendFields, bytes] | pb.SendMessageRequestP2B:
        """Return fields and data of a request; the request itself if it is a batch, numbered by its producer, or
        staged.

        Raises RemoteProtocolError like `codec.schema.decode`.
        """
        place = _data_at(payload)
        if place is not None:
            start, begin, end = place
            send = self._known.get(payload[:start] + payload[end:])
            if send is not None and send.timeout == timeout and send.version == version:
                return send, payload[begin:end]
        request = decode(pb.SendMessageRequestP2B, payload)
        if request.HasField("batch") or request.HasField("producer") or request.HasField("transaction"):
            return request
        send = SendFields(request, timeout, version)
        if place is not None and send.checksum == NO_SUM:  # requests with a checksum are never equal
            self._remember(payload, place, send)
        return send, request.data

    def _remember(self, payload: bytes, place: tuple[int, int, int], send: SendFields) -> None:
        start, _, end = place
        if start + len(payload) - end > _LONGEST:
            return
        # Each part must decode to the same values separately: no field may be in both parts (protobuf uses the last
        # one).
        first, last = pb.SendMessageRequestP2B(), pb.SendMessageRequestP2B()
        first.MergeFromString(payload[:start])
        last.MergeFromString(payload[end:])
        if {field.number for field, _ in first.ListFields()} != {1, 2, 3}:
            return
        if not {field.number for field, _ in last.ListFields()} <= {5, 6, 7, 8, 9, 10}:
            return
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[payload[:start] + payload[end:]] = send

    def _learn(self, body: bytes, request: Request, send: SendFields) -> None:
        place = _data_at(request.payload)
        if place is None:
            return
        field, begin, end = place
        if self._known.get(request.payload[:field] + request.payload[end:]) is not send:
            return  # too large to be cached
        begin, end = request.start + begin, request.start + end
        if begin + len(body) - end > _LONGEST:
            return
        if len(self._shapes) >= _SHAPES:
            self._shapes.clear()
            self._starts.clear()
        self._shapes[body[:begin]] = _RequestTemplate(send, end, body[end:])
        starts = self._starts.get(len(body), [])
        if begin not in starts:
            self._starts[len(body)] = [begin, *starts[: _STARTS - 1]]


def _data_at(payload: bytes) -> tuple[int, int, int] | None:
    """Return the start of field 4 and the start and end of its bytes; None unless clientId, topicName and partitionId
    precede it."""
    size = len(payload)
    if size < 12 or payload[0] != 0x0A or payload[1] > 0x7F:
        return None
    at = 2 + payload[1]
    if at + 4 > size or payload[at] != 0x12 or payload[at + 1] > 0x7F:
        return None
    at += 2 + payload[at + 1]
    if at + 4 > size or payload[at] != 0x18:
        return None
    at += 2 if payload[at + 1] < 0x80 else 3
    if at + 4 > size or payload[at - 1] > 0x7F or payload[at] != 0x22:
        return None
    start = at
    length = payload[at + 1]
    at += 2
    if length > 0x7F:
        length = length & 0x7F | (payload[at] & 0x7F) << 7
        if payload[at] > 0x7F:
            length |= (payload[at + 1] & 0x7F) << 14
            if payload[at + 1] > 0x7F:
                return None  # 2 MiB and more: copying costs more than decoding
            at += 1
        at += 1
    return (start, at, at + length) if at + length <= size else None


class SendRun:
    """Sends to one partition, in the order of their arrival."""

    __slots__ = ("datas", "sends", "serials")

    def __init__(self) -> None:
        self.serials: list[int] = []
        self.sends: list[SendFields] = []
        self.datas: list[bytes] = []


class SendCollector:
    """Sends of one connection, received in this turn and not stored yet, by partition.

    Storing messages together costs a fraction of storing each separately.
    """

    __slots__ = ("_by_send", "_decoder", "_runs", "timeout")

    def __init__(self, decoder: SendDecoder) -> None:
        self._runs: dict[tuple[str, int], SendRun] = {}
        self._by_send: dict[SendFields, SendRun] = {}
        """The same runs by the fields of the send: an object, whose lookup is faster than that of a partition."""
        self.timeout: int | None = None
        """The timeout of all collected sends; changed only while there are none."""
        self._decoder = decoder

    def collect(self, frames: deque[tuple[int, bytes]], most: int) -> int:
        """Collect at most ``most`` recognized sends with this timeout from the front of ``frames``; returns their
        number."""
        count = 0
        for serial, body in frames:
            if count == most:
                break
            found = self._decoder.recognise(body)
            if found is None or found[0].timeout != self.timeout:
                break
            self.add(serial, found[0], found[1])
            count += 1
        if count == len(frames):
            frames.clear()
        else:
            for _ in range(count):
                frames.popleft()
        return count

    def add(self, serial: int, send: SendFields, data: bytes) -> None:
        """Add a send with the timeout of the others."""
        run = self._by_send.get(send)
        if run is None:
            run = self._runs.get(send.place)
            if run is None:
                run = self._runs[send.place] = SendRun()
            self._by_send[send] = run
        run.serials.append(serial)
        run.sends.append(send)
        run.datas.append(data)

    def drain(self) -> list[SendRun]:
        """Return and remove the collected sends."""
        runs = list(self._runs.values())
        if runs:
            self._runs.clear()
            self._by_send.clear()
        return runs


def encode_sent(first_id: i64, time_ms: int, first_offset: i64, count: int) -> list[bytes]:
    """Encode the responses to ``count`` sends whose messages were stored consecutively, as bodies of frames.

    Each contains a SendMessageResponseB2P; old clients read the id from errMsg.
    """
    time = b"\x30%b\x38" % encode_varint(time_ms)
    numbers, offsets = RisingVarints(), RisingVarints()
    bodies: list[bytes] = []
    before: i64 = -1
    head = upper = b""
    thousands: i64 = -1
    message_id, message_offset = first_id, first_offset
    for _ in range(count):
        # Usually only the last three digits change.
        if message_id < 1000:
            upper, digits = str(message_id).encode(), b""
        else:
            digits = _DIGITS[message_id % 1000]
            if message_id // 1000 != thousands:
                thousands = message_id // 1000
                upper = str(thousands).encode()
        number = numbers.encode(message_id)
        offset = offsets.encode(message_offset)
        size: i64 = (
            len(upper) + len(digits) + len(number) + len(offset)
        )  # the parts never become shorter, so the sum of their lengths detects every change
        if size != before:
            before = size
            head = response_head(MethodId.SEND_MESSAGE, _FIXED_BYTES + len(time) + size)
            head = b"%b%b%b" % (head, _STORED, encode_varint(len(upper) + len(digits)))
        bodies.append(b"%b%b%b\x20\x00\x28%b%b%b" % (head, upper, digits, number, time, offset))
        message_id += 1
        message_offset += INDEX_RECORD_BYTES
    return bodies
