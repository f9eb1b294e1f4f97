"""A server while passwords are checked: who is connected is answered, and who waits beyond the bound is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.mqtt import password_checks
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, PingReq
from penstock.mqtt.codec.version311 import encode_311
from penstock.mqtt.listener_access import AccessRules, AccessStats, AuthenticationMethod, ListenerAccess
from penstock.mqtt.password_checks import PasswordChecks
from penstock.mqtt.server import BrokerLimits, MqttServer
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.security.passwords import Credential, make_credential

DEADLINE_S = 30
ANN = make_credential("ann", b"secret")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Blocked:
    """Stands in for the hash: each check ends when the test allows it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.started = threading.Event()
        self.count = 0

    def __call__(self, credential: Credential | None, password: bytes) -> bool:
        self.count += 1
        self.started.set()
        assert self.may_end.wait(DEADLINE_S)
        return credential is not None and password == b"secret"


class Node:
    """A server whose listener accepts passwords and anonymous clients."""

    def __init__(self, limits: BrokerLimits) -> None:
        self.checks, self.stats = PasswordChecks(limits), AccessStats()
        self.server = MqttServer(limits=limits)
        self.address = ("", 0)
        self.access = ListenerAccess(
            frozenset({AuthenticationMethod.PASSWORD, AuthenticationMethod.ANONYMOUS}),
            AccessRules(users={"ann": ANN}),
            self.checks,
            self.stats,
            now=self.server.now,
        )

    async def open(self, data: bytes) -> Streams:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(data)
        return reader, writer

    async def reach(self, waiting: int) -> None:
        """Wait until so many checks wait."""
        async with asyncio.timeout(DEADLINE_S):
            while self.checks.waiting != waiting:
                await asyncio.sleep(0.005)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Blocked:
    made = Blocked()
    monkeypatch.setattr(password_checks, "verify_password", made)
    return made


@asynccontextmanager
async def node(limits: BrokerLimits, blocked: Blocked) -> AsyncIterator[Node]:
    made = Node(limits)
    made.address = await made.server.listen(ListenerSettings(port=0, access=made.access))
    try:
        yield made
    finally:
        blocked.may_end.set()
        await made.server.close()
        made.checks.close()


async def read(streams: Streams, size: int) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        return await streams[0].readexactly(size)


async def connack(streams: Streams) -> int:
    """The code of CONNACK."""
    return (await read(streams, 4))[3]


async def test_connected_clients_are_served_while_passwords_are_checked(blocked: Blocked) -> None:
    async with node(BrokerLimits(), blocked) as made:
        inside = await made.open(encode(Connect("inside")))
        assert await connack(inside) == 0
        clients = [
            await made.open(encode(Connect(f"c{n}", username="ann", password=b"secret" if n % 2 else b"wrong")))
            for n in range(50)
        ]
        await made.reach(50 - made.checks.workers)
        inside[1].write(encode(PingReq()))
        async with asyncio.timeout(DEADLINE_S):
            assert await inside[0].readuntil(b"\xd0\x00")
        assert not blocked.may_end.is_set(), "no check had ended"
        blocked.may_end.set()
        assert [await connack(client) for client in clients] == [0x86, 0] * 25
        assert (made.stats.granted, made.stats.refused_credentials, made.stats.refused_busy) == (26, 25, 0)
        for _, writer in (inside, *clients):
            writer.close()


async def test_beyond_the_bound_the_server_is_busy(blocked: Blocked) -> None:
    async with node(BrokerLimits(max_pending_passwords=2), blocked) as made:
        taken = made.checks.workers + 2
        data = encode(Connect("c", username="ann", password=b"wrong"))
        waiting = [await made.open(data) for _ in range(taken)]
        await made.reach(2)
        busy = [
            await made.open(data),
            await made.open(encode_311(Connect("d", username="ann", password=b"wrong", protocol_version=4))),
        ]
        assert [await connack(client) for client in busy] == [0x89, 3]
        assert made.stats.refused_busy == 2
        blocked.may_end.set()
        assert [await connack(client) for client in waiting] == [0x86] * taken
        for _, writer in (*waiting, *busy):
            writer.close()


async def test_one_that_runs_out_of_time_frees_its_place(blocked: Blocked) -> None:
    async with node(BrokerLimits(connect_timeout_ms=300), blocked) as made:
        clients = [await made.open(encode(Connect("c", username="ann", password=b"wrong"))) for _ in range(5)]
        for client in clients:
            async with asyncio.timeout(DEADLINE_S):
                assert await client[0].read() == b""
        await made.reach(0)
        async with asyncio.timeout(DEADLINE_S):
            while made.checks.withdrawn < 5 - made.checks.workers:
                await asyncio.sleep(0.005)
        assert blocked.count == made.checks.workers
        for _, writer in clients:
            writer.close()


async def test_the_server_closes_while_passwords_are_checked(blocked: Blocked) -> None:
    async with node(BrokerLimits(), blocked) as made:
        clients = [await made.open(encode(Connect(f"c{n}", username="ann", password=b"secret"))) for n in range(5)]
        await made.reach(5 - made.checks.workers)
        async with asyncio.timeout(DEADLINE_S):
            await made.server.close()
        made.checks.close()
        assert made.checks.waiting == 0
        for reader, writer in clients:
            async with asyncio.timeout(DEADLINE_S):
                assert await reader.read() == b""
            writer.close()
        assert made.server.stats.sessions == 0
