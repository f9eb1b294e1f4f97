"""Histories of the state store while the active node of a cluster changes are linearizable.

Two nodes and three members of etcd. Clients are connected through one proxy, which leads to the active node.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from penstock.statestore.client.client import StateStoreClient
from tests.histories.porcupine import check
from tests.histories.proxy import Proxy
from tests.histories.store import Load, record
from tests.interop.cluster_nodes import NodeProcess
from tests.interop.etcd import EtcdCluster

FAULTS = ("kill", "pause", "cut")
KINDS = [
    pytest.param(FAULTS, id="3"),
    pytest.param(FAULTS * 66 + FAULTS[:2], id="200", marks=[pytest.mark.nightly, pytest.mark.timeout(2600)]),
]
_names = itertools.count(1)
_readers = itertools.count(1_000_000_000)


class Behind(EtcdCluster):
    """An etcd cluster as a node sees it through a proxy for each member."""

    def __init__(self, proxies: list[Proxy]) -> None:
        self._seen = [f"127.0.0.1:{proxy.port}" for proxy in proxies]

    @property
    def endpoints(self) -> list[str]:
        return self._seen


class Pair:
    """Two nodes, each with a connection of its own to etcd, and the proxy of the clients."""

    def __init__(self, nodes: list[NodeProcess], links: list[list[Proxy]], clients: Proxy) -> None:
        self.active, self.standby = nodes
        self.clients = clients
        self._links = dict(zip(nodes, links, strict=True))

    async def apply(self, fault: str, load: Load) -> None:
        """Apply a fault to the active node until the standby has taken over, then end it.

        A node that was paused has requests in a socket that were sent after the others had changed the keys.
        """
        old, new = self.active, self.standby
        direct = await asyncio.wait_for(StateStoreClient.connect(old.url, reconnect=False).__aenter__(), 60)
        if fault == "kill":
            old.signal(signal.SIGKILL)
            old.wait()
        elif fault == "pause":
            old.signal(signal.SIGSTOP)
        else:  # the network between the node and etcd, and nothing else
            for link in self._links[old]:
                link.hold()
        await new.until_active()
        self.clients.lead_to(("127.0.0.1", new.mqtt))
        self.clients.cut()
        await load.more(10)
        recorder = load.recorder
        late = [
            asyncio.create_task(recorder.ask(direct, next(_readers), ["GET", key])) for key in list(recorder.keys)[-5:]
        ]
        await asyncio.sleep(0)
        if fault == "kill":
            old.start()
        elif fault == "pause":
            old.signal(signal.SIGCONT)
        else:
            for link in self._links[old]:
                link.release()
        assert not any(await asyncio.gather(*late)), "only the active node answers"
        await direct.__aexit__(None, None, None)
        await old.until_standby(new)
        self.active, self.standby = new, old


@asynccontextmanager
async def pair(folder: Path, three: EtcdCluster) -> AsyncIterator[Pair]:
    name = f"h{next(_names)}"
    async with AsyncExitStack() as stack:
        nodes: list[NodeProcess] = []
        links: list[list[Proxy]] = []
        for own in ("one", "other"):
            link = [await stack.enter_async_context(Proxy(address_of(at))) for at in three.endpoints]
            links.append(link)
            nodes.append(NodeProcess(folder, own, name, Behind(link)))
            stack.callback(nodes[-1].end)
        clients = await stack.enter_async_context(Proxy(("127.0.0.1", nodes[0].mqtt)))
        for node in nodes:
            node.write_config(lease_s=2)
            node.start()
            await (node.until_active() if node is nodes[0] else node.until_standby(nodes[0]))
        yield Pair(nodes, links, clients)


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("faults", KINDS)
async def test_takeovers(
    tmp_path: Path, three: EtcdCluster, faults: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """The active node is killed, paused, or cut off from etcd, in turn."""
    history = tmp_path / "history.jsonl"
    async with pair(tmp_path, three) as nodes:

        async def fault(load: Load) -> None:
            for kind in faults:
                await nodes.apply(kind, load)
                await load.more(20)
                load.change_keys()

        recorder = await record(history, f"mqtt://127.0.0.1:{nodes.clients.port}", fault)
    assert recorder.answered > 300
    assert recorder.refused == []
    request.node.user_properties.append(("summary", check(history, tmp_path)))
