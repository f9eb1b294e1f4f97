"""The same bytes to two brokers: what each of them answers, in a form that can be compared.

A case is a list of pieces of bytes, sent in order on one connection, each once the broker was silent for a moment. What
comes back is decoded into a line: packets with their reason codes, and whether the broker closed the connection.

A slow machine only makes it wait longer: the broker has ``DEADLINE_S`` for the expected answer, and a moment of silence
decides only whether more follows, or whether it closes a connection that is expected to stay open.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Disconnect,
    Packet,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    SubAck,
    UnsubAck,
)

__all__ = ["VECTORS", "Case", "answer", "load"]

VECTORS: Final = Path(__file__).resolve().parents[1] / "vectors" / "mqtt5" / "differential.json"
SILENCE_S: Final = 0.25
"""Seconds of silence after which the broker has nothing more to say."""
DEADLINE_S: Final = 30.0


class Case(NamedTuple):
    """One case of the file: what is sent, what each broker answers, and why that differs, where it does."""

    name: str
    pieces: list[bytes]
    penstock: str
    mosquitto: str
    why: str | None


def load() -> tuple[str, list[Case]]:
    """The version of Mosquitto that the file speaks of, and the cases."""
    content: dict[str, Any] = json.loads(VECTORS.read_text(encoding="utf-8"))
    cases = [
        Case(
            row["name"],
            [_bytes(piece) for piece in row["bytes"]],
            row["penstock"] if "why" in row else row["answer"],
            row["mosquitto"] if "why" in row else row["answer"],
            row.get("why"),
        )
        for row in content["cases"]
    ]
    return content["mosquitto"], cases


def _bytes(text: str) -> bytes:
    """Hexadecimal digits, in which ``{74*9}`` stands for nine bytes 0x74."""
    return bytes.fromhex(re.sub(r"\{(..)\*(\d+)\}", lambda found: found[1] * int(found[2]), text))


async def answer(host: str, port: int, case: Case, expected: str) -> str:
    """What the broker answers to the case, as one line; waits for ``expected``."""
    reader, writer = await asyncio.open_connection(host, port)
    decoder = Decoder()
    words: list[str] = []
    closed = False

    def line() -> str:
        return ", ".join([*words, "closed" if closed else "open"])

    try:
        for number, piece in enumerate(case.pieces, 1):
            writer.write(piece)
            while not closed:
                # A piece that is no last one needs no answer of its own, but the first one is CONNECT.
                arrived = line() == expected if number == len(case.pieces) else bool(words)
                try:
                    data = await asyncio.wait_for(reader.read(65_536), SILENCE_S if arrived else DEADLINE_S)
                except TimeoutError:
                    break
                except ConnectionError:
                    data = b""
                if not data:
                    closed = True
                    break
                if data[:2] == b"\x20\x02" and not words:
                    words.append(f"CONNACK of MQTT 3.1.1 0x{data[3]:02X}")
                    continue
                try:
                    words += [_word(packet) for packet in decoder.feed(data)]
                except RemoteProtocolError as error:
                    words.append(f"undecodable ({error.what})")
                    closed = True
            if closed:
                break
    finally:
        writer.transport.abort()
    return line()


def _word(packet: Packet) -> str:
    name = type(packet).__name__.upper()
    match packet:
        case ConnAck() | Disconnect() | Auth() | PubAck() | PubRec() | PubComp():
            return f"{name} 0x{packet.reason_code:02X}"
        case SubAck() | UnsubAck():
            return f"{name} {' '.join(f'0x{code:02X}' for code in packet.reason_codes)}"
        case Publish():
            return f"PUBLISH q{packet.qos}{' retain' if packet.retain else ''} {len(packet.payload)} B"
        case _:
            return name
