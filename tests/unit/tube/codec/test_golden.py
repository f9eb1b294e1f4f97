"""Every recorded frame decodes to what was recorded and encodes to the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from penstock.tube.codec import envelope, framing, methods, schema
from penstock.tube.codec.proto import envelope_pb2 as pb
from tests.unit.tube.vectors import Frame, frames

FRAMES = frames()


def split(frame: Frame) -> bytes:
    decoder = framing.FrameDecoder()
    [(serial, body)] = decoder.feed(frame.data)
    assert serial == frame.serial % (1 << 32)
    return body


def same(message: Message, recorded: dict[str, Any]) -> None:
    """Each recorded field has the value recorded (bytes were recorded in part: they are compared as whole frames)."""
    names = {field.name for field, _ in message.ListFields()}
    for name, value in recorded.items():
        if name not in message.DESCRIPTOR.fields_by_name:
            continue
        ours = getattr(message, name)
        if isinstance(value, (bool, int, str)) and not isinstance(ours, bytes):
            assert str(ours) == str(value) or ours == value, name
            assert name in names
        elif isinstance(value, dict) and isinstance(ours, Message):
            same(ours, value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            assert list(ours) == value, name


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.name)
def test_frame_decodes_and_encodes_to_the_same_bytes(frame: Frame) -> None:
    body = split(frame)
    if frame.direction == "request":
        request = envelope.decode_request(frame.serial, body)
        row = methods.METHODS.get(request.method)
        if row is not None:
            message = schema.decode(row.request, request.payload)
            assert message.DESCRIPTOR.name == frame.row.get("type", message.DESCRIPTOR.name)
            same(message, frame.row["decoded"])
            request.payload = message.SerializeToString()
        again = envelope.encode_request(request)
    else:
        response = envelope.decode_response(frame.serial, body)
        if response.status:
            again = encode_failure(response)
        else:
            message = schema.decode(methods.METHODS[response.method].response, response.payload)
            assert message.DESCRIPTOR.name == frame.row.get("type", message.DESCRIPTOR.name)
            same(message, frame.row["decoded"])
            again = envelope.encode_response(response.method, message.SerializeToString()) + response.trailing
    assert again == body
    assert framing.encode_frame(frame.serial % (1 << 32), again) == frame.data


def encode_failure(response: envelope.Response) -> bytes:
    assert response.text is not None
    fatal = response.status == pb.ResponseHeader.FATAL
    return envelope.encode_error(response.exception, response.text, fatal=fatal)


def test_the_recording_has_what_peers_do_differently() -> None:
    by_name = {frame.name: frame for frame in FRAMES}
    trailing = [f for f in FRAMES if f.direction == "request" and f.row.get("envelope", {}).get("trailing")]
    assert trailing
    assert all("cpp" in frame.name for frame in trailing)
    method_0 = envelope.decode_request(0, split(by_name["cpp-client-028-none-request"]))
    assert method_0.method == 0
    answer = envelope.decode_response(0, split(by_name["cpp-client-030-none-response"]))
    assert answer.status == envelope.FATAL
    large = [frame for frame in FRAMES if len(frame.row.get("chunks", [])) > 1]
    assert large
    assert all(frame.row["chunks"][0] == framing.BLOCK_SIZE for frame in large)


def cuts(frame: Frame) -> range | list[int]:
    """Every place in a frame of a block; in longer ones those round the heads of the blocks."""
    if len(frame.data) < 8192:
        return range(1, len(frame.data))
    borders = [12, *range(16, len(frame.data), 8196), len(frame.data)]
    return sorted({cut for border in borders for cut in range(border - 8, border + 9) if 0 < cut < len(frame.data)})


def test_every_frame_cut_at_every_place() -> None:
    for frame in FRAMES:
        whole = framing.FrameDecoder().feed(frame.data)
        for cut in cuts(frame):
            decoder = framing.FrameDecoder()
            assert decoder.feed(frame.data[:cut]) == [], frame.name
            assert decoder.feed(frame.data[cut:]) == whole, (frame.name, cut)


@pytest.mark.parametrize("frame", [f for f in FRAMES if len(f.data) > 8192][:2], ids=lambda frame: frame.name)
def test_large_frame_cut_at_every_size_round_the_block_borders(frame: Frame) -> None:
    expected = framing.FrameDecoder().feed(frame.data)
    for border in (12, 16, 16 + 8192, 20 + 8192, 20 + 16384, 24 + 16384, len(frame.data)):
        for cut in range(border - 5, border + 6):
            decoder = framing.FrameDecoder()
            assert decoder.feed(frame.data[:cut]) + decoder.feed(frame.data[cut:]) == expected
