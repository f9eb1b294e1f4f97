"""Floods of connections: descriptors that run out, slow and silent peers, wrong passwords. Others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from penstock.errors import RefusedError
from penstock.mqtt import password_checks
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Subscribe, Subscription
from penstock.mqtt.listener_access import AccessRules, AccessStats, AuthenticationMethod, ListenerAccess
from penstock.mqtt.password_checks import PasswordChecks
from penstock.mqtt.server import BrokerLimits, MqttServer
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.security.passwords import Credential, make_credential, verify_password

DEADLINE_S = 30
DESCRIPTORS = 100

CHILD = f"""
import asyncio, json, resource, sys
from penstock.mqtt.server import BrokerLimits, MqttServer
from penstock.runtime.io.loop import run

resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))

async def main():
    server = MqttServer(limits=BrokerLimits(connect_timeout_ms=600_000))
    print(json.dumps(await server.start("127.0.0.1", 0)), flush=True)
    loop = asyncio.get_running_loop()
    asked = asyncio.Queue()
    loop.add_reader(0, lambda: asked.put_nowait(sys.stdin.readline()))
    while await asked.get():
        with open("/dev/null"):  # a file can be opened all the same
            stats = server.listeners[0].stats
            print(json.dumps([stats.paused, stats.pauses, stats.connections]), flush=True)
    await server.close()

run(main())
"""


class Child:
    """A broker in a process that may have few descriptors."""

    def __init__(self, loop: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env={**os.environ, "PENSTOCK_LOOP": loop},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        host, port = json.loads(self._process.stdout.readline())
        self.address = (str(host), int(port))

    def ask(self) -> tuple[int, int, int]:
        """Paused now, pauses so far, connections."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        paused, pauses, connections = json.loads(self._process.stdout.readline())
        return paused, pauses, connections

    def close(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(DEADLINE_S)
        self._process.stdout.close()
        return code


@pytest.fixture(params=["asyncio", "uvloop"])
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    made = Child(request.param)
    yield made
    assert made.close() == 0


async def test_descriptors_that_run_out(child: Child) -> None:
    """Accept pauses, who is in goes on, and the next one comes in as soon as somebody leaves."""
    async with MqttClient(*child.address, client_id="early") as early:
        silent = []
        for _ in range(DESCRIPTORS + 50):  # the kernel takes those that the broker does not
            peer = socket.socket()
            peer.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                peer.connect(child.address)
            silent.append(peer)
        async with asyncio.timeout(DEADLINE_S):
            while not (await asyncio.to_thread(child.ask))[0]:
                await asyncio.sleep(0.02)
        connections = (await asyncio.to_thread(child.ask))[2]
        assert DESCRIPTORS // 2 < connections < DESCRIPTORS
        for _ in range(20):
            assert await early.publish("still/here") in (0, 0x10)
        late = asyncio.create_task(connected_at_last(child.address))
        for peer in silent:
            peer.close()
        await asyncio.wait_for(late, DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while (await asyncio.to_thread(child.ask))[0]:
                await asyncio.sleep(0.02)
        assert early.connected


async def connected_at_last(address: tuple[str, int]) -> None:
    async with MqttClient(*address, client_id="late", connect_timeout_s=DEADLINE_S) as client:
        assert await client.publish("late") in (0, 0x10)


@asynccontextmanager
async def broker(limits: BrokerLimits, settings: ListenerSettings | None = None) -> AsyncIterator[MqttServer]:
    server = MqttServer(limits=limits)
    await server.listen(settings or ListenerSettings(port=0))
    try:
        yield server
    finally:
        await server.close()


def address_of(server: MqttServer) -> tuple[str, int]:
    host, port = server.listeners[0]._sockets[0].getsockname()
    return host, port


async def test_a_reader_of_one_byte_at_a_time() -> None:
    """It takes something now and then, but never what fills its transport: it goes, the publisher is not slowed."""
    async with broker(BrokerLimits(write_stall_ms=2500, max_queued_messages=100)) as server:
        address = address_of(server)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, encode(Connect("sip")) + encode(Subscribe(1, [Subscription("a")])))
        async with MqttClient(*address, client_id="fast") as fast, asyncio.timeout(DEADLINE_S):
            while server.stats.subscriptions < 1:
                await asyncio.sleep(0.01)
            for _ in range(100):
                await fast.publish("a", bytes(60_000), qos=0)
            answered = 0
            while server.stats.write_stalls == 0:
                await loop.sock_recv(sock, 1)
                await fast.publish("b", b"x", qos=1)
                answered += 1
                await asyncio.sleep(0.05)
            assert answered > 1, "nobody waited for the slow one"
            assert fast.connected
        sock.close()


async def rival(address: tuple[str, int]) -> None:
    """A client that comes back at once whenever it was thrown out."""
    while True:
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(encode(Connect("same", clean_start=False)))
            while await reader.read(1000):
                pass
        finally:
            writer.close()


async def test_two_that_take_over_from_each_other() -> None:
    """Two clients with one identifier that always come back: the broker and a third one do not mind."""
    async with broker(BrokerLimits()) as server:
        address = address_of(server)
        async with MqttClient(*address, client_id="third") as third:
            rivals = [asyncio.create_task(rival(address)) for _ in range(2)]
            async with asyncio.timeout(DEADLINE_S):
                while server.stats.connections_opened < 100:
                    assert await third.publish("a") in (0, 0x10)
            assert server.stats.sessions <= 2
            assert server.stats.connections <= 4
            for task in rivals:
                task.cancel()
            await asyncio.gather(*rivals, return_exceptions=True)


async def test_wrong_passwords_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many wrong passwords at once, whose hashes are not ready: the loop turns, and the right one comes in."""
    checks, stats = PasswordChecks(BrokerLimits(max_pending_passwords_per_address=20)), AccessStats()
    loop, ready = asyncio.get_running_loop(), threading.Event()

    def verify(credential: Credential | None, password: bytes) -> bool:
        return (password == b"secret" or ready.wait(DEADLINE_S)) and verify_password(credential, password)

    monkeypatch.setattr(password_checks, "verify_password", verify)
    access_rules = AccessRules(users={"ann": make_credential("ann", b"secret")})
    gate = ListenerAccess(
        frozenset({AuthenticationMethod.PASSWORD}), access_rules, checks, stats, now=lambda: int(loop.time() * 1000)
    )
    async with broker(BrokerLimits(), ListenerSettings(port=0, access=gate)) as server:
        address = address_of(server)
        async with MqttClient(*address, username="ann", password="secret") as inside:
            wrong = encode(Connect("flood", username="ann", password=b"wrong"))
            flood = [await asyncio.open_connection(*address) for _ in range(40)]
            for _, writer in flood:
                writer.write(wrong)
            async with asyncio.timeout(DEADLINE_S):
                while stats.refused_busy < 40 - 20 - checks.workers:
                    assert await inside.publish("a") in (0, 0x10)
                assert checks.waiting == 20
                # It was right before: no hash is computed for it, so it need not wait behind the flood either.
                async with MqttClient(*address, username="ann", password="secret"):
                    assert checks.remembered >= 1
                ready.set()
                answers = [await reader.read() for reader, _ in flood]
            codes = {answer[3] for answer in answers if answer}
            assert codes <= {0x86, 0x89}, "bad user name or password; server busy where the queue was full"
            assert stats.refused_busy + stats.refused_credentials == 40
            for _, writer in flood:
                writer.close()
    checks.close()


async def test_an_invalid_client_gets_an_error_and_is_counted() -> None:
    async with broker(BrokerLimits(), ListenerSettings(port=0, max_connections=1)) as server:
        address = address_of(server)
        async with MqttClient(*address):
            with pytest.raises(RefusedError, match="0x97"):
                async with MqttClient(*address, reconnect=False):
                    pass
            assert server.listeners[0].connection_limit_stats.refused_listener == 1
            assert server.listeners[0].stats.refused == 1
