"""The state store at its broker under mutated requests: payloads, time stamps, properties and packets.

Broker and store are whole, with their disks; bytes go straight into a connection of the engine, so that whatever is
raised fails the test. Inputs come from fixed seeds.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import operator
import random
from pathlib import Path
from typing import Final

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Publish, Subscribe, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.persistence import Persistence
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import INVOKE
from penstock.statestore.codec.commands import Extension, Verb
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.service import StateStoreService
from tests.mutations import mutated

VECTORS: Final = Path(__file__).parents[1] / "vectors" / "statestore"
REQUESTS: Final = [bytes.fromhex(row["hex"]) for row in json.loads((VECTORS / "payloads.json").read_text())["requests"]]
VERBS: Final = [verb.encode() for verb in Verb]
OPTIONS: Final = b"NX NEX PX EX STOP PREFIX AT COUNT MATCH CURSOR KEEPTTL FENCE VALUES SINCE FROM LIMIT".split()
VALUES: Final = b"k v 0 -1 2 10 100 9223372036854775807 9223372036854775808 1e3 * [ [a- \\ 0:0:c".split()
WORDS: Final = [*VERBS, *OPTIONS, *VALUES, b"", b"\xff\xfe", b"1755374730776:1:x"]
STAMPS: Final = (
    "0:0:c", "1755374730776:00000:c", "1755374730776:1:ä", "x", "", "9" * 30 + ":0:c", "-1:0:c", "0:-1:c", "1:2:3:4",
    "0:0:", "٣:0:c", "1_0:0:c", "+1:0:c", " 1:0:c", "0:0:" + "y" * 65_000, "18446744073709551616:0:c",
    "0:99999999999:c",
)  # fmt: skip
USER_PROPERTIES: Final = ("__protVer", "__ts", "__ft", "__srcId", "__invId", "__apiv", "$partition", "aio-persistence")
TOPICS: Final = (INVOKE, INVOKE, INVOKE, "$services/statestore/_any_/command/invoke/request", "a", "x" * 700)
RESPONSE_TOPICS: Final = (None, "a", "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/x", INVOKE, "x" * 500)


def payload(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return encode_array([rng.choice(WORDS) for _ in range(rng.randrange(1, 8))])
    return mutated(rng, rng.choice(REQUESTS), times=(0, 0, 1, 2))


def request(rng: random.Random, packet_id: int, response_topic: str) -> bytes:
    """A PUBLISH as a client of the state store sends it, with anything in it."""
    values = {"__protVer": ("1.0", "2.0", "0.1", "x", ""), "__ts": STAMPS, "__ft": STAMPS}
    user = [(name, rng.choice(values.get(name, ("z",)))) for name in USER_PROPERTIES if rng.random() < 0.6]
    properties = Properties(
        user_properties=user,
        correlation_data=rng.choice((None, b"", b"1" * 16, bytes(200))),
        response_topic=response_topic if rng.random() < 0.6 else rng.choice(RESPONSE_TOPICS),
        payload_format_indicator=rng.choice((None, 0, 1)),
        message_expiry_interval=rng.choice((None, 0, 5, 2**32 - 1)),
        content_type=rng.choice((None, "x")),
    )
    qos, retain = rng.choice((0, 1, 1, 1, 2)), rng.random() < 0.1
    packet = Publish(rng.choice(TOPICS), payload(rng), qos, retain=retain, packet_id=packet_id, properties=properties)
    data = encode(packet)
    return mutated(rng, data) if rng.random() < 0.03 else data


async def visit(server: MqttServer, seed: int) -> None:
    """One connection."""
    rng = random.Random(seed)
    broker = server._broker
    connection = broker.open("fuzzed", server.now())
    assert connection is not None
    client_id = rng.choice(("c", f"c{seed % 5}", "ö/+", "x" * 600, ""))
    response_topic = f"clients/{client_id.replace('+', '') or 'q'}/response"
    expiry = Properties(session_expiry_interval=rng.choice((None, 1_000)), topic_alias_maximum=rng.choice((None, 3)))
    will = rng.choice((None, Will(rng.choice(("w", INVOKE, "x" * 600)), b"p", rng.randrange(3), rng.random() < 0.5)))
    pieces = [
        encode(Connect(client_id, rng.random() < 0.6, 0, rng.choice((None, "u")), None, will, expiry)),
        encode(Subscribe(1, [Subscription(response_topic), Subscription("#")])),
        *(request(rng, number, response_topic) for number in range(1, rng.randrange(2, 25))),
    ]
    for piece in pieces:
        connection.receive(piece, server.now(), 1_755_374_730_776)
        while connection.unread:
            connection.proceed(server.now(), 1_755_374_730_776)
        broker.flush(server.now())
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    connection.lost(server.now())


async def run(path: Path, seeds: range, caplog: pytest.LogCaptureFixture) -> None:
    options = StoreOptions(extensions=functools.reduce(operator.or_, Extension))
    service = StateStoreService(path / "store", Durability.FLUSHED, options=options)
    server = MqttServer(services=[service], limits=BrokerLimits(max_keep_alive_s=0))
    await server.recover(Persistence(path / "mqtt", Durability.FLUSHED))
    await service.start(server.outlet)
    address = await server.start("127.0.0.1", 0)
    for seed in seeds:
        try:
            await visit(server, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    async with asyncio.timeout(30), MqttClient(*address, client_id="after") as client:
        assert await client.publish("a", b"still served", qos=1) in (0, 0x10)
    assert server.persistence is not None
    assert not server.persistence.journal.failure
    await server.close()
    await service.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_mutated_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await run(tmp_path, range(150), caplog)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
async def test_many_mutated_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture, part: int) -> None:
    await run(tmp_path, range(1_000 + part * 1_000, 2_000 + part * 1_000), caplog)
