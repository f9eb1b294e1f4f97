"""A refused connection: what is read of its CONNECT, in pieces of any size."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect
from penstock.mqtt.transport.link import RefusingLink

VERSION_5 = encode(Connect("c" * 200))
OLDER = {
    b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0f\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0d\x00\x04MQTT\x84\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0d\x00\x04MQTT\x09\x02\x00\x3c\x00\x01c": b"",
}


class Wire:
    """Stands in for a transport."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed


async def refused(*pieces: bytes) -> Wire:
    ended: list[None] = []
    link, wire = RefusingLink(0x97, lambda: ended.append(None)), Wire()
    link.connection_made(cast(asyncio.Transport, wire))
    for piece in pieces:
        link.data_received(piece)
    link.connection_lost(None)
    assert ended == [None]
    return wire


@pytest.mark.parametrize(("sent", "said"), [(VERSION_5, b"\x20\x03\x00\x97\x00"), *OLDER.items()])
async def test_whole_and_byte_by_byte(sent: bytes, said: bytes) -> None:
    for wire in (await refused(sent), await refused(*(bytes((byte,)) for byte in sent)), await refused(sent + b"more")):
        assert (wire.written, wire.closed) == (said, True)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_anything_else_ends_or_waits(pieces: list[bytes]) -> None:
    wire = asyncio.run(refused(*pieces))
    assert len(wire.written) <= 5
    assert wire.closed or len(b"".join(pieces)) < 15
