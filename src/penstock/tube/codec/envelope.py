"""The envelope: three length-prefixed protobuf messages in a frame body.

    request    RpcConnHeader, RequestHeader, RequestBody
    response   RpcConnHeader, ResponseHeader, RspResponseBody or (status ERROR, FATAL) RspExceptionBody

Bytes after the third message are ignored (the C++ client sends up to 9 zero bytes); they are kept in ``trailing`` so
that a recorded frame can be encoded again unchanged. The usual form is parsed in place for speed; other forms are
decoded with protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from penstock.errors import RefusedError, RemoteProtocolError, UnavailableError
from penstock.tube.codec.exceptions import is_standby, kind_of, name_for
from penstock.tube.codec.methods import METHODS, PeerRole
from penstock.tube.codec.proto import envelope_pb2 as pb
from penstock.tube.codec.schema import check
from penstock.tube.codec.varint import decode_varint, encode_varint

__all__ = [
    "PROTOCOL_VERSION",
    "Request",
    "Response",
    "decode_request",
    "decode_response",
    "encode_error",
    "encode_request",
    "encode_response",
    "payload_of",
    "response_head",
    "response_parts",
]

PROTOCOL_VERSION = 3

_M = TypeVar("_M", bound=Message)

SUCCESS = 0
ERROR = 1
FATAL = 2


class Request:
    """A decoded request. ``timeout`` in ms, None if absent (the Java server then never answers, penstock's servers do).

    ``payload`` is the encoded message of ``method``; ``version`` and ``service`` are 0 if absent. ``start``: offset of
    the payload in the frame body, -1 if the body does not have the usual form.
    """

    __slots__ = ("flag", "method", "payload", "serial", "service", "start", "timeout", "trailing", "version")

    def __init__(
        self,
        serial: int,
        service: int,
        method: int,
        payload: bytes,
        *,
        timeout: int | None = 10_000,
        version: int = PROTOCOL_VERSION,
        flag: int = 0,
        trailing: bytes = b"",
        start: int = -1,
    ) -> None:
        self.serial = serial
        self.service = service
        self.start = start
        self.method = method
        self.payload = payload
        self.timeout = timeout
        self.version = version
        self.flag = flag
        self.trailing = trailing

    def __repr__(self) -> str:
        return f"Request(serial={self.serial}, method={self.method}, {len(self.payload)} bytes)"


class Response:
    """A decoded response: ``status`` 0: success, with ``method`` and ``payload``; otherwise with ``exception`` and
    ``text``."""

    __slots__ = ("exception", "flag", "method", "payload", "serial", "service", "status", "text", "trailing", "version")

    def __init__(
        self,
        serial: int,
        *,
        status: int = SUCCESS,
        method: int = 0,
        payload: bytes = b"",
        exception: str = "",
        text: str | None = None,
        version: int | None = PROTOCOL_VERSION,
        service: int | None = None,
        flag: int = 1,
        trailing: bytes = b"",
    ) -> None:
        self.serial = serial
        self.status = status
        self.method = method
        self.payload = payload
        self.exception = exception
        self.text = text
        self.version = version
        self.service = service
        self.flag = flag
        self.trailing = trailing

    def __repr__(self) -> str:
        what = f"method={self.method}, {len(self.payload)} bytes" if not self.status else self.exception
        return f"Response(serial={self.serial}, {what})"


def decode_request(serial: int, body: bytes) -> Request:
    """Decode the request in a frame body.

    Raises:
        RemoteProtocolError: not three messages, or one lacks a required field. Answer FATAL.
    """
    heads = _HEADS.get(body[:8])
    if heads is not None:
        usual = _usual_request(body)
        if usual is not None:
            flag, service, version = heads
            method, timeout, start, end, after = usual
            return Request(
                serial, service, method, body[start:end],
                timeout=timeout, version=version, flag=flag, trailing=body[after:], start=start,
            )  # fmt: skip
    connection, position = _message(pb.RpcConnHeader, body, 0)
    header, position = _message(pb.RequestHeader, body, position)
    if position == 8 and not (connection.HasField("traceId") or connection.HasField("spanId")):
        if len(_HEADS) >= 64:
            _HEADS.clear()
        _HEADS[body[:8]] = (connection.flag, header.serviceType, header.protocolVer)
    request, position = _message(pb.RequestBody, body, position)
    return Request(
        serial,
        header.serviceType,
        request.method,
        request.request,
        timeout=request.timeout if request.HasField("timeout") else None,
        version=header.protocolVer,
        flag=connection.flag,
        trailing=body[position:],
    )


def encode_request(request: Request) -> bytes:
    """Encode ``request`` as a frame body, as the reference's clients do."""
    timeout = request.timeout
    payload = request.payload
    size = len(payload)
    if timeout is not None and timeout >= 0 and 0 <= request.method < 0x80:
        inner = b"\x08%c\x10%b\x1a%b" % (request.method, encode_varint(timeout), encode_varint(size))
    else:
        third = pb.RequestBody(method=request.method)
        if timeout is not None:
            third.timeout = timeout
        inner = b"%b\x1a%b" % (third.SerializeToString(), encode_varint(size))
    head = _request_head(request.flag, request.service, request.version)
    return b"%b%b%b%b%b" % (head, encode_varint(len(inner) + size), inner, payload, request.trailing)


@cache
def _request_head(flag: int, service: int, version: int) -> bytes:
    """Encode the first two messages, cached because there are few different ones."""
    header = pb.RequestHeader(serviceType=service, protocolVer=version)
    return _delimited(pb.RpcConnHeader(flag=flag)) + _delimited(header)


def decode_response(serial: int, body: bytes | memoryview) -> Response:
    """Decode the response in a frame body, without keeping a reference to it.

    Raises:
        RemoteProtocolError: not three messages, or one lacks a required field. Close the connection.
    """
    if body[:8] == _OK_HEAD:
        start, end = _prefix(body, 8)
        # 08 method 12 length data, which must fill the message
        if end - start > 3 and body[start] == 8 and body[start + 1] < 0x80 and body[start + 2] == 0x12:
            data, after = _prefix(body, start + 3)
            if after == end:
                return Response(
                    serial, method=body[start + 1], payload=bytes(body[data:after]), trailing=bytes(body[end:])
                )
    body = bytes(body)
    connection, position = _message(pb.RpcConnHeader, body, 0)
    header, position = _message(pb.ResponseHeader, body, position)
    common = Response(
        serial,
        status=header.status,
        version=header.protocolVer if header.HasField("protocolVer") else None,
        service=header.serviceType if header.HasField("serviceType") else None,
        flag=connection.flag,
    )
    if header.status == SUCCESS:
        answer, position = _message(pb.RspResponseBody, body, position)
        common.method = answer.method
        common.payload = answer.data
    else:
        failure, position = _message(pb.RspExceptionBody, body, position)
        common.exception = failure.exceptionName
        common.text = failure.stackTrace if failure.HasField("stackTrace") else None
    common.trailing = body[position:]
    return common


def payload_of(response: Response, method: int, peer: str) -> bytes:
    """Return the payload of a response to ``method`` from ``peer``.

    Raises:
        UnavailableError: the peer is a standby master. RefusedError: the response is an exception.
        RemoteProtocolError: the response is for another method.
    """
    if response.status != SUCCESS:
        text = response.text or ""
        if is_standby(response.exception):
            raise UnavailableError(f"tube: {peer} is not the active master", applied=False, why=text)
        if METHODS[method].answers is PeerRole.MASTER:
            raise RefusedError(
                f"tube: {peer} does not answer as a master",
                text=text,
                peer=peer,
                why=text or kind_of(response.exception),
                hint="set the address of a TubeMQ master: its default port is 8715 (8716 with TLS)",
            )
        what = f"tube: {peer} failed on {METHODS[method].name}"
        raise RefusedError(what, text=text, peer=peer, why=text or kind_of(response.exception))
    if response.method != method:
        raise RemoteProtocolError(f"tube: {peer} answered method {response.method} to method {method}")
    return response.payload


def encode_response(method: int, payload: bytes) -> bytes:
    """Encode a successful response as a frame body, as the Java server does: version 3, no service type."""
    return response_head(method, len(payload)) + payload


def response_parts(method: int, parts: Sequence[bytes]) -> list[bytes]:
    """:func:`encode_response` of a payload in ``parts``, in parts."""
    return [response_head(method, sum(map(len, parts))), *parts]


@lru_cache(4096)
def response_head(method: int, size: int) -> bytes:
    """Return the frame body of a successful response up to a payload of ``size`` bytes."""
    inner = b"\x08%b\x12%b" % (encode_varint(method), encode_varint(size))
    return b"%b%b%b" % (_OK_HEAD, encode_varint(len(inner) + size), inner)


def encode_error(exception: str, text: str, *, version: int = PROTOCOL_VERSION, fatal: bool = False) -> bytes:
    """Encode an ERROR (or FATAL) response for a requester of protocol ``version``.

    ``#`` is removed from the text, because the Java client truncates the text there.
    """
    header = pb.ResponseHeader(status=pb.ResponseHeader.FATAL if fatal else pb.ResponseHeader.ERROR)
    if not fatal:
        header.protocolVer = PROTOCOL_VERSION
    body = pb.RspExceptionBody(exceptionName=name_for(version, exception), stackTrace=text.replace("#", " "))
    return b"".join([_delimited(pb.RpcConnHeader(flag=1)), _delimited(header), _delimited(body)])


# First eight bytes of a request (connection header and request header) -> flag, service type, protocol version. Limited
# in number, because clients choose them.
_HEADS: dict[bytes, tuple[int, int, int]] = {}
# RpcConnHeader{flag 1}, ResponseHeader{SUCCESS, protocolVer 3}
_OK_HEAD = bytes.fromhex("0208010408001803")


def _usual_request(body: bytes) -> tuple[int, int | None, int, int, int] | None:
    """Return method, timeout, start and end of the payload, end of RequestBody; None: decode it with protobuf.

    Requires that RequestBody, at byte 8, has only the fields method, timeout and request, in this order.
    """
    length, at = decode_varint(body, 8)
    end = at + length
    if end > len(body) or length < 2 or body[at] != 8 or body[at + 1] >= 0x80:
        return None
    method = body[at + 1]
    at += 2
    timeout = None
    if at < end and body[at] == 0x10:
        timeout, at = decode_varint(body, at + 1)
        if timeout >= 1 << 31:
            return None
    if at == end:
        return method, timeout, end, end, end
    if at > end or body[at] != 0x1A:
        return None
    length, at = decode_varint(body, at + 1)
    return (method, timeout, at, end, end) if at + length == end else None


def _prefix(body: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return start and end of the length-prefixed message at ``position``."""
    length, start = decode_varint(body, position)
    end = start + length
    if end > len(body):
        raise RemoteProtocolError(f"tube: the envelope announces {length} bytes, {len(body) - start} follow")
    return start, end


def _message(kind: type[_M], body: bytes, position: int) -> tuple[_M, int]:
    start, end = _prefix(body, position)
    try:
        message = kind.FromString(body[start:end])
    except DecodeError as error:
        raise RemoteProtocolError(
            f"tube: the envelope's {kind.DESCRIPTOR.name} cannot be read", why=str(error)
        ) from None
    check(message)
    return message, end


def _delimited(message: Message) -> bytes:
    data = message.SerializeToString()
    return encode_varint(len(data)) + data
