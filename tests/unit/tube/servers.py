"""Servers for tests, on free ports of loopback: the real master and broker, and a scripted one."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.security.tube_key import tube_key
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.envelope import Request, decode_request
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.engine.access import ClientAccess
from penstock.tube.master.master import TubeMaster
from penstock.tube.reader import PartitionInfo, TopicUnavailableError, partitions
from tests.ports import free_port

BROKER_USER = ("brokers", "of the cluster")


class Tube:
    """A master and brokers over one directory; each can be stopped and started again on its port.

    ``tls``: each listens with it too. ``users``: who may come in, and ``groups`` whose members need not sign.
    """

    def __init__(
        self,
        path: Path,
        *,
        tls: ssl.SSLContext | None = None,
        users: Mapping[str, str] | None = None,
        groups: Iterable[str] = (),
        networks: Iterable[str] = (),
        anonymous: bool = False,
    ) -> None:
        self.path = path
        self.tls = tls
        self.users = users
        self.groups = groups
        self.networks = networks
        self.anonymous = anonymous
        self.port = free_port()
        self.master: TubeMaster | None = None
        self.brokers: dict[int, TubeBroker] = {}
        self.ports: dict[int, int] = {}

    @property
    def masters(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def tls_masters(self) -> str:
        assert self.master is not None
        assert self.master.tls_bound is not None
        return f"127.0.0.1:{self.master.tls_bound[1]}"

    async def start_master(self) -> TubeMaster:
        self.master = TubeMaster(self.path / "master", admin_token="token", access=self._access())
        _, self.port = await self.master.start("127.0.0.1", self.port, tls=self.tls, tls_port=0)
        return self.master

    async def start_broker(self, number: int = 1, *, advertise: str | None = None) -> TubeBroker:
        broker = TubeBroker(
            self.path / str(number), broker_id=number, masters=[self.masters], heartbeat_s=0.05,
            access=self._access(), master_user=None if self.users is None else BROKER_USER, advertise=advertise,
        )  # fmt: skip
        port = self.ports.setdefault(number, free_port())
        await broker.start("127.0.0.1", port, tls=self.tls, tls_port=0)
        self.brokers[number] = broker
        return broker

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, on all brokers and at the master."""
        assert self.master is not None
        closed = {"acceptPublish": "false", "acceptSubscribe": "false"}
        for step, change in (("modify", closed), ("delete", {}), ("remove", {})):
            told = {"modifyUser": "me", "confModAuthToken": "token", "topicName": name, **change}
            answer = await self.master.webapi({"method": f"admin_{step}_topic_info", **told})
            assert answer["result"], answer
        topics = self.master.engine.cluster.topics
        await until(lambda: name not in topics)

    async def stop_master(self) -> None:
        if self.master is not None:
            await self.master.close()
            self.master = None

    async def stop_broker(self, number: int = 1) -> None:
        broker = self.brokers.pop(number, None)
        if broker is not None:
            await broker.close()

    def _access(self) -> ClientAccess | None:
        if self.users is None:
            return None
        keys = keys_of({**self.users, BROKER_USER[0]: BROKER_USER[1]})
        return ClientAccess(keys, groups=self.groups, networks=self.networks, anonymous=self.anonymous)

    async def close(self) -> None:
        for number in list(self.brokers):
            await self.stop_broker(number)
        await self.stop_master()


def keys_of(users: Mapping[str, str]) -> dict[str, str]:
    """Signing keys of users, by their passwords."""
    return {name: tube_key(name, password.encode()) for name, password in users.items()}


@asynccontextmanager
async def tube(
    path: Path,
    *topics: str,
    brokers: int = 1,
    partitions: int = 3,
    tls: ssl.SSLContext | None = None,
    users: Mapping[str, str] | None = None,
    groups: Iterable[str] = (),
    networks: Iterable[str] = (),
    anonymous: bool = False,
) -> AsyncIterator[Tube]:
    """A running tube whose ``topics`` can be used."""
    running = Tube(path, tls=tls, users=users, groups=groups, networks=networks, anonymous=anonymous)
    try:
        master = await running.start_master()
        for number in range(1, brokers + 1):
            await running.start_broker(number)
        for topic in topics:
            await master.create_topic(topic, partitions, ready_s=60)
            await until(lambda: _serving(master, topic) == brokers)
        yield running
    finally:
        await running.close()


def _serving(master: TubeMaster, topic: str) -> int:
    info = master.engine.cluster.topic_info(topic)
    return len(info.brokers) if info is not None else 0


def announced(masters: str, topic: str, timeout_s: float = 60.0) -> list[PartitionInfo]:
    """The partitions of a topic, as soon as a broker that has it is registered (again)."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return partitions(masters, topic)
        except TopicUnavailableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


Answer = Callable[[Request], bytes | None]


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[tuple[int, list[asyncio.Transport]]]:
    """A server that answers each request as ``answer`` says (None: not at all); its port and open connections."""
    transports: list[asyncio.Transport] = []

    class Peer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport
            self.decoder = FrameDecoder()
            transports.append(transport)

        def data_received(self, data: bytes) -> None:
            for serial, body in self.decoder.feed(data):
                reply = answer(decode_request(serial, body))
                if reply is not None and not self.transport.is_closing():
                    self.transport.write(encode_frame(serial, reply))

    server = await asyncio.get_running_loop().create_server(Peer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], transports
    finally:
        server.close()
        for transport in transports:
            transport.abort()
        await server.wait_closed()


def names_of_tasks(*prefixes: str) -> set[str]:
    """Names of the running tasks that begin with one of ``prefixes``."""
    return {name for task in asyncio.all_tasks() if (name := task.get_name()).startswith(prefixes)}


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return when ``condition()`` holds; fails after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
