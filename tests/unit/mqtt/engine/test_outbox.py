"""Bytes that are about to leave."""

from __future__ import annotations

from penstock.mqtt.codec.packets import PingReq
from penstock.mqtt.engine.client.outbox import Outbox


def test_everything_in_one_piece_and_in_order() -> None:
    outbox = Outbox()
    outbox.send(PingReq(), 5)
    outbox.add(b"x", 7)
    assert (outbox.take_output(), outbox.last_sent) == (b"\xc0\x00x", 7)
    assert outbox.take_output() == b""
