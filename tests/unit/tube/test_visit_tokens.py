"""Visit tokens: with the check a broker serves only clients that have been at the master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.node.config.node import TopicSection, Tube
from penstock.node.node import Node
from penstock.runtime.io.clock import steady_clock
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.broker.master_connection import TOKENS_KNOWN_MS
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from penstock.tube.reader import partitions
from tests.unit.node.test_node import config
from tests.unit.tube.broker_client import Client
from tests.unit.tube.servers import until


class Checked(NamedTuple):
    """A node, and a further broker of it that checks tokens as the node's master told it."""

    masters: str
    broker: TubeBroker
    address: tuple[str, int]


@asynccontextmanager
async def running(path: Path, *, check: bool) -> AsyncIterator[Checked]:
    node = Node(config(path / "node", tube=Tube(topics={"demo": TopicSection(partitions=1)}, check_visit_tokens=check)))
    steady, ahead = steady_clock(), [0]
    try:
        ready = await node.start()
        broker = TubeBroker(
            path / "broker", broker_id=2, masters=[ready.tube_master], heartbeat_s=0.02,
            clock=lambda: steady() + ahead[0],
        )  # fmt: skip
        address = await broker.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):  # clients learn of the broker once it has told the master what it serves
                while {part.broker_id for part in await asyncio.to_thread(partitions, ready.tube_master, "demo")} != {
                    1,
                    2,
                }:
                    await asyncio.sleep(0.01)
            ahead[0] = TOKENS_KNOWN_MS  # by then every client has heard from the master
            if check:
                await until(lambda: broker.engine.checks.check_tokens)
            yield Checked(ready.tube_master, broker, address)
        finally:
            await broker.close()
    finally:
        await node.close()


def a_send(token: int | None) -> pb.SendMessageRequestP2B:
    request = pb.SendMessageRequestP2B(
        clientId="p", topicName="demo", partitionId=0, data=b"x", flag=0, checkSum=-1, sentAddr=0
    )
    if token is not None:
        request.authInfo.visitAuthorizedToken = token
    return request


def a_registration(token: int | None) -> pb.RegisterRequestC2B:
    request = pb.RegisterRequestC2B(
        opType=31, clientId="c", groupName="g", topicName="demo", partitionId=0, readStatus=0
    )
    if token is not None:
        request.authInfo.visitAuthorizedToken = token
    return request


@pytest.mark.parametrize("check", [True, False])
async def test_tokens_that_the_master_did_not_give_are_refused_where_it_is_switched_on(
    tmp_path: Path, *, check: bool
) -> None:
    async with running(tmp_path, check=check) as tube:
        for method, request in ((MethodId.SEND_MESSAGE, a_send), (MethodId.PARTITION_REGISTER, a_registration)):
            for token in (None, 7, tube.broker.engine.checks.tokens[-1]):
                client = await Client.connect(tube.address)
                answer = await client.ask(method, request(token))
                refused = check and token in {None, 7}
                assert answer.errCode == (ErrCode.CERTIFICATE_FAILURE if refused else ErrCode.SUCCESS), (method, token)
                await client.close()


async def test_clients_that_ask_the_master_notice_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, check=True) as tube:
        async with Producer(tube.masters) as producer:
            places = {(await producer.send("demo", b"%d" % n)).broker_id for n in range(4)}
        assert places == {1, 2}
        found = []
        async with Consumer(tube.masters, "lake", ["demo"], start="earliest") as consumer:
            async for message in consumer:
                found.append(message.record.value)
                if len(found) == 4:
                    break
        assert sorted(found) == [b"0", b"1", b"2", b"3"]
