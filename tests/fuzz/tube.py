"""Targets of TubeMQ: frames, envelopes and messages against protobuf, requests against the broker, stored records."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from penstock.errors import RemoteProtocolError, StorageError
from penstock.tube.codec import envelope
from penstock.tube.codec.encoded_messages import decode_get
from penstock.tube.codec.envelope import Request, decode_request, decode_response, encode_request
from penstock.tube.codec.framing import MAX_FRAME_BYTES, FrameDecoder, encode_frame
from penstock.tube.codec.message import decode_marker, encode_data, parse_attributes, split_data
from penstock.tube.codec.methods import METHODS, MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.proto import envelope_pb2 as pb
from penstock.tube.codec.schema import check, decode
from penstock.tube.codec.varint import decode_varint, encode_varint
from penstock.tube.engine.broker.send_decoder import SendDecoder
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.storage.record import scan
from penstock.tube.storage.store import Store
from tests.engine.tube.broker_harness import Talk
from tests.fuzz.data_provider import head, in_pieces, records
from tests.unit.runtime.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_recovery import ALL, SMALL, contents, filled
from tests.unit.tube.storage.test_store import LOG

BROKER_METHODS = [
    row.id for row in METHODS.values() if set(row.services) & {ServiceType.BROKER_READ, ServiceType.BROKER_WRITE}
]


def _frames(pieces: list[bytes]) -> tuple[list[tuple[int, bytes]], str]:
    decoder = FrameDecoder()
    frames: list[tuple[int, bytes]] = []
    for piece in pieces:
        try:
            frames += decoder.feed(piece)
        except RemoteProtocolError as error:
            return frames, str(error)
        if decoder.error is not None:
            return frames, str(decoder.error)
        assert decoder.held <= MAX_FRAME_BYTES
    return frames, ""


def fuzz_frames(data: bytes) -> object:
    """Sizes of the pieces (1 byte), a stream: in one piece and in several it means the same."""
    (seed,), stream = head(data, 1)
    whole = _frames([stream])
    in_parts = _frames(list(in_pieces(stream, seed)))
    assert in_parts[0] == whole[0]
    # A violation may be found before the data that it names are complete.
    assert bool(in_parts[1]) == bool(whole[1])
    for serial, body in whole[0]:
        if body:
            assert _frames([encode_frame(serial, body)]) == ([(serial, body)], "")
    return whole


def _reference(kinds: tuple[type[Message], ...], body: bytes) -> list[Message]:
    """Length-prefixed messages at the start of ``body``, read by protobuf alone."""
    found = []
    at = 0
    for kind in kinds:
        size, at = decode_varint(body, at)
        if at + size > len(body):
            raise RemoteProtocolError("cut")
        try:
            message = kind.FromString(body[at : at + size])
        except DecodeError as error:
            raise RemoteProtocolError(str(error)) from None
        check(message)
        found.append(message)
        at += size
    return found


def fuzz_envelopes(data: bytes) -> object:
    """The body of a frame, as a request and as a response: ours and protobuf read the same."""
    outcome: list[object] = []
    reference: list[Message] | None
    for _ in range(2):  # the second time its head is known
        try:
            reference = _reference((pb.RpcConnHeader, pb.RequestHeader, pb.RequestBody), data)
        except RemoteProtocolError:
            reference = None
        try:
            request = decode_request(1, data)
        except RemoteProtocolError:
            assert reference is None
            outcome.append("refused")
            continue
        assert reference is not None, "protobuf refuses it"
        _, header, body = reference
        assert isinstance(header, pb.RequestHeader)
        assert isinstance(body, pb.RequestBody)
        assert (request.service, request.version) == (header.serviceType, header.protocolVer)
        assert (request.method, request.payload) == (body.method, body.request)
        assert request.timeout == (body.timeout if body.HasField("timeout") else None)
        again = decode_request(1, encode_request(request))
        assert (again.method, again.payload, again.timeout) == (request.method, request.payload, request.timeout)
        outcome.append((request.method, request.payload, request.timeout, request.trailing))
    try:
        response = decode_response(1, data)
    except RemoteProtocolError:
        return [*outcome, "refused"]
    if response.status == envelope.SUCCESS:
        *_, answer = _reference((pb.RpcConnHeader, pb.ResponseHeader, pb.RspResponseBody), data)
        assert isinstance(answer, pb.RspResponseBody)
        assert (response.method, response.payload) == (answer.method, answer.data)
    return [*outcome, response.status, response.payload, response.exception, response.trailing]


def fuzz_messages(data: bytes) -> object:
    """Sends and get responses: what is read in place means what protobuf means. Numbers, attributes, markers too."""
    outcome: list[object] = []
    decoder = SendDecoder()
    for _ in range(2):  # the second time its shape is known
        try:
            whole = decode(broker_pb2.SendMessageRequestP2B, data)
        except RemoteProtocolError:
            whole = None
        try:
            read = decoder.read(data)
        except RemoteProtocolError:
            assert whole is None
            outcome.append("refused")
            continue
        assert whole is not None, "protobuf refuses it"
        if isinstance(read, tuple):
            send, content = read
            assert content == whole.data
            assert send.place == (whole.topicName, whole.partitionId)
            outcome.append(content)
        else:
            assert read == whole
    try:
        expected = decode(broker_pb2.GetMessageResponseB2C, data)
    except RemoteProtocolError:
        expected = None
    try:
        rest, messages = decode_get(data)
        parsed = list(messages.parsed())
    except RemoteProtocolError:
        assert expected is None
        outcome.append("refused")
    else:
        assert expected is not None, "protobuf refuses it"
        assert parsed == list(expected.messages)
        del expected.messages[:]
        assert rest == expected
        outcome.append(len(parsed))
    try:
        value, end = decode_varint(data, 0)
        assert decode_varint(encode_varint(value), 0)[0] == value & 0xFFFFFFFFFFFFFFFF
        outcome.append((value, end))
    except RemoteProtocolError:
        outcome.append("no number")
    with contextlib.suppress(RemoteProtocolError):
        decode_marker(data)
    text = data.decode("utf-8", "replace")
    pairs = parse_attributes(text)
    content, flag = encode_data(data, "a=1")
    assert split_data(content, flag) == ("a=1", data)
    return [*outcome, pairs, split_data(data, 0), split_data(data, 1)]


def fuzz_broker(data: bytes) -> object:
    """Records: method and payload of requests to a broker; its lowest bits choose the connection or let time pass.

    Each request has an answer or waits; none breaks the engine.
    """
    talk = Talk()
    answers: list[object] = []
    for number, payload in records(data, 24):
        if number >= 0xF0:
            talk.now += int.from_bytes(payload[:2], "big")
            talk.commit()
            continue
        method = MethodId(BROKER_METHODS[number % len(BROKER_METHODS)])
        request = Request(7, METHODS[method].services[0], method, payload)
        context = RequestContext(talk.now, "127.0.0.1", (talk, number >> 7), 7)
        answer = talk.engine.receive(request, context, talk.now)
        if answer is not None:
            response = decode_response(7, answer.body)
            answers.append((response.status, response.exception))
        talk.engine.ready.clear()
    talk.commit()
    return answers


def fuzz_records(data: bytes) -> object:
    """Which stored file (1 byte), then records of patches: position (low byte of the number and 1 byte), new bytes.

    A damaged store opens or says why not; what it reads was written, a second opening changes nothing, and it accepts
    new messages.
    """
    (which,), rest = head(data, 1)
    files = dict(_stored())
    path = sorted(files)[which % len(files)]
    content = bytearray(files[path])
    for number, patch in records(rest, 16):
        at = (number << 3 | len(patch)) % (len(content) + 1)
        if number & 1:
            content[at : at + len(patch)] = patch[:2000]
        else:
            del content[at:]
            content += patch[:2000]
    files[path] = bytes(content)
    list(scan(bytes(content), 0))
    list(scan(rest, 0))
    disk = RecordedDisk(files)
    try:
        store = Store(disk, LOG, 0, limits=SMALL)
    except StorageError as error:
        return str(error)
    found = contents(store)
    assert found.items() <= ALL.items()
    again = Store(RecordedDisk(disk.files()), LOG, 0, limits=SMALL)
    assert contents(again) == found
    return sorted(found.items())


@cache
def _stored() -> dict[Path, bytes]:
    return filled()
