"""TubeMQ's ports under mutated requests: those of recorded clients, changed field by field and byte by byte.

Every request goes to a real master or broker, once as it was recorded and once changed, in either order, so that the
changed ones meet clients that are registered. Inputs come from fixed seeds.
"""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from penstock.tube.codec.envelope import decode_request, encode_request
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.codec.methods import METHODS
from penstock.tube.producer import Producer
from tests.conformance.tubemq.test_recorded_requests import CLIENTS, Servers, adapted, pairs
from tests.mutations import mutated

SCENARIOS: Final = [name for name in CLIENTS if name != "refused" and not name.startswith("user")]
TEXTS: Final = (
    "", "x", "vectors:1", "a#b", "1:127.0.0.1:1:vectors:0", "{}", "\0", "ö", "x" * 300, "1", "-1", "9" * 20, "c@g@1",
    "1#2#3", ",", ";", ":", "vectors#1:0", "-", "127.0.0.1-1-1-1-Pull-1", "c@g#1:h:1#vectors:9", "topic=a&",
)  # fmt: skip
NUMBERS: Final = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 100, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 100, 2**62, 2**63 - 1, -(2**63)),
}
SILENCE_S: Final = 0.3
"""A changed request may have no answer: its frame is not complete, or a get waits."""


def value(rng: random.Random, field: Any, old: Any) -> Any:
    """Another value of the field: for texts mostly the old one with a separator more or less."""
    if field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(NUMBERS[field.cpp_type])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.randrange(60))
    if not old or rng.random() < 0.4:
        return rng.choice(TEXTS)
    at = rng.randrange(len(old))
    return old[:at] + rng.choice(("", ":", "#", "@", ",", "-", ";", "1", " ", "\0")) + old[at + rng.randrange(2) :]


def change(rng: random.Random, message: Message) -> None:
    """Another value in one field of the message, or of a message within it."""
    field: Any = rng.choice(message.DESCRIPTOR.fields)
    there: Any = getattr(message, field.name)
    if field.message_type is not None:
        if not field.is_repeated:
            there.SetInParent()
            change(rng, there)
        else:
            change(rng, rng.choice(there) if len(there) and rng.random() < 0.7 else there.add())
    elif not field.is_repeated:
        setattr(message, field.name, value(rng, field, there))
    elif len(there) and rng.random() < 0.7:
        at = rng.randrange(len(there))
        there[at] = value(rng, field, there[at])
    else:
        there.append(value(rng, field, None))


def changed(rng: random.Random, data: bytes) -> bytes:
    """The frame ``data`` with another request in it, or with other bytes."""
    if rng.random() < 0.1:
        return mutated(rng, data)
    [(serial, body)] = FrameDecoder().feed(data)
    request = decode_request(serial, body)
    if request.method not in METHODS or rng.random() < 0.3:
        return encode_frame(serial, mutated(rng, body))
    message: Message = METHODS[request.method].request()
    message.ParseFromString(request.payload)
    change(rng, message)
    request.payload = message.SerializePartialToString()
    return encode_frame(serial, encode_request(request))


async def replay(servers: Servers, seed: int) -> None:
    """One recorded scenario; a connection that the server closed is not used again."""
    rng = random.Random(seed)
    peers: dict[tuple[str, int], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
    for recorded, _ in pairs(rng.choice(SCENARIOS)):
        where = recorded.row["to"], recorded.row["connection"]
        if where not in peers:
            peers[where] = await asyncio.open_connection("127.0.0.1", servers.ports[where[0]])
        reader, writer = peers[where]
        data = adapted(recorded, servers.ports["broker"], None)
        pieces = [data]
        if rng.random() < 0.5:
            pieces.insert(rng.randrange(2), changed(rng, data))
        for piece in pieces:
            if reader.at_eof():
                break
            writer.write(piece)
            try:
                await asyncio.wait_for(reader.read(1 << 16), SILENCE_S)
            except (TimeoutError, ConnectionError):
                break
    for _, writer in peers.values():
        writer.transport.abort()


async def run(path: Path, seeds: range, caplog: pytest.LogCaptureFixture) -> None:
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(repr(context)))
    servers = Servers(path)
    await servers.start()
    for seed in seeds:
        await replay(servers, seed)
        servers.broker.retain(servers.broker.clock())  # the maintenance of once a minute meets what was sent
        assert not raised, f"seed {seed}: {raised}"
    async with asyncio.timeout(30), Producer(f"127.0.0.1:{servers.ports['master']}") as producer:
        await producer.send("vectors", b"still served")
    await servers.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_mutated_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await run(tmp_path, range(12), caplog)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
async def test_many_mutated_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture, part: int) -> None:
    await run(tmp_path, range(1_000 + part * 200, 1_200 + part * 200), caplog)
