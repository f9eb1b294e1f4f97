"""Histories of clients while the active node of a cluster changes: those of the state store are linearizable, and those
of MQTT and TubeMQ clients obey the delivery rules.

Two nodes and three members of etcd. Clients of MQTT are connected through one proxy, which leads to the active node;
those of TubeMQ know both masters. The advertised address of a master is a proxy, which only the broker of the other
node uses.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from penstock.errors import PenstockError, RefusedError
from penstock.node.cluster.state import LOGS
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.client import web
from tests.histories.lock_load import LockLoad
from tests.histories.lock_load import check as check_locks
from tests.histories.machine import Machine
from tests.histories.pipeline_load import PipelineLoad
from tests.histories.porcupine import check
from tests.histories.proxy import Proxy
from tests.histories.store import DEADLINE_S, Load, record
from tests.histories.test_mqtt import record as record_messages
from tests.histories.tube_load import TubeLoad
from tests.interop.cluster_nodes import NodeProcess, until_pair
from tests.interop.etcd import EtcdCluster
from tests.interop.takeover_probes import deliver, first, set_key
from tests.interop.test_cluster_tube import LOGIN, PARTITIONS, create_topic, masters, until_partitions
from tools.nightly import measurements

TAKEOVERS = ("kill", "kill-both", "ahead", "pause", "behind", "cut", "handover", "pause-60")
"""Faults of the active node after which the standby is active. It is killed: alone, together with the leader of etcd,
or after its clock has stepped by an hour. It is paused: as long as the standby needs, or for a minute. It is cut off
from etcd. It hands over."""
OTHERS = "etcd-follower", "etcd-leader", "etcd-majority", "clients", "nodes", "full", "restore", "restarts"
FAULTS = *TAKEOVERS, *OTHERS
ROUNDS, BLOCK = 210, 10
"""Nightly rounds, with the kinds of fault in turn, and those of one test, which takes about three minutes."""
LONG = [pytest.mark.nightly, pytest.mark.timeout(1200)]
PIPELINE = "pipeline"
"""The test in which a pipeline reads the topic, too. Spark takes more processor time than everything else."""
BY_DAY, PAUSE_S = "3", 0.02
"""The test by day, and the pause of its clients after each answer. At night they send as fast as they can."""
KINDS = [
    pytest.param(("kill-both", "pause", "cut"), id=BY_DAY),
    *(
        pytest.param(
            tuple(FAULTS[number % len(FAULTS)] for number in range(start, start + BLOCK)),
            id=f"{start + 1}-{start + BLOCK}",
            marks=LONG,
        )
        for start in range(0, ROUNDS, BLOCK)
    ),
    pytest.param(
        ("kill-both", "pause", "handover"), id=PIPELINE, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)]
    ),
]
LEASE_S = 3
MEMBERS = 3
PAUSES_S = {"pause": 0, "pause-60": 60}
MAJORITY_S = 20
GOAL_S = 6
GOALS_S = {"kill-both": 10, "handover": 1}
BUSY = 15
"""How many times as long as its goal a takeover may take, because other work delays the clients and both nodes. The
summary of the nightly rounds has the seconds."""
UNANSWERED = 0.02
"""Largest share of requests to the state store without an answer: each makes the check harder."""
DIVERGED = "ends with"
"""Why a node has more commits than etcd, in ``/readyz``."""
STEPS_S = {"ahead": 3600, "behind": -3600}
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
    """Two nodes, each with a connection of its own to etcd, the proxy of the clients and those of the masters.

    :meth:`watch` leads clients to the active node: on a busy machine, a node may lose its lease without a fault, too.
    """

    def __init__(
        self,
        nodes: list[NodeProcess],
        machines: list[Machine],
        links: list[list[Proxy]],
        clients: Proxy,
        peers: list[Proxy],
        etcd: EtcdCluster,
    ) -> None:
        self.active = nodes[0]
        self.nodes = nodes
        self._etcd = etcd
        self.clients = clients
        self.masters = masters(nodes)
        self._machines = dict(zip(nodes, machines, strict=True))
        self._links = dict(zip(nodes, links, strict=True))
        self._masters = dict(zip(nodes, peers, strict=True))
        self.measured: list[tuple[str, dict[str, float]]] = []
        """The faults that were applied, with what was measured."""

    async def watch(self, node: NodeProcess) -> None:
        """Lead the clients to ``node`` whenever it becomes active."""
        ready = node is self.active
        while True:
            before, ready = ready, bool((await asyncio.to_thread(node.health)).get("ready"))
            if ready and not before:
                self.active = node
                self.clients.lead_to(("127.0.0.1", node.mqtt))
                self.clients.cut()
            await asyncio.sleep(0.05)

    async def apply(self, fault: str, load: Load, tube: TubeLoad, messages: Path) -> None:
        """Apply a fault, wait until clients are served, then end it. ``messages``: the history of MQTT."""
        begun = load.recorder.answered, load.recorder.open
        figures = dict[str, float]()
        if fault in TAKEOVERS:
            figures = await self._take_over(fault, load, tube)
        elif fault in ("etcd-follower", "etcd-leader"):
            figures = await self._lose_member(fault, load, tube)
        elif fault == "etcd-majority":
            figures = await self._lose_majority(load, messages)
        elif fault == "clients":
            await self._cut_clients()
        elif fault == "nodes":
            await self._cut_nodes(tube)
        elif fault == "full":
            await self._fill_etcd(load)
        elif fault == "restore":
            await self._restore(load)
        elif fault == "restarts":
            await self._restart_in_turn(load, tube)
        await self.until_complete()
        await load.more(20)
        await tube.more(10, *(node.broker_id for node in self.nodes))
        load.change_keys()
        answered, unanswered = load.recorder.answered - begun[0], load.recorder.open - begun[1]
        figures["unanswered %"] = 100 * unanswered / (answered + unanswered)
        # Those that wait for the end of the lease have one goal.
        waits = fault in TAKEOVERS and fault not in GOALS_S
        self.measured.append((f"takeover/{fault}" if waits else fault, figures))

    async def _take_over(self, fault: str, load: Load, tube: TubeLoad) -> dict[str, float]:
        """Let the standby become active while the active node is faulty; returns what the probes have measured.

        A node that was paused has requests in a socket that were sent after the others had changed the keys. A node
        whose clock has stepped keeps that clock, also after its next start, until the next step of a clock.
        """
        old = self.active
        (new,) = (node for node in self.nodes if node is not old)
        if fault in STEPS_S:
            self._machines[new].set_clock(0)
            self._machines[old].set_clock(STEPS_S[fault])
            await load.more(10)
        leader = await asyncio.to_thread(self._etcd.leader)
        async with AsyncExitStack() as stack:
            direct = await asyncio.wait_for(self._connect(old, stack), DEADLINE_S)
            began = time.perf_counter()
            if fault == "handover":
                await self._hand_over(old)
            elif fault in PAUSES_S:
                old.signal(signal.SIGSTOP)
            elif fault == "cut":  # the network between the node and etcd, and nothing else
                for link in self._links[old]:
                    link.hold()
            else:
                if fault == "kill-both":
                    self._etcd.kill(leader)
                old.signal(signal.SIGKILL)
                old.wait()
            expected = self.active is old
            probes = first(partial(set_key, new)), first(partial(deliver, new))
            write, message = [at - began for at in await asyncio.gather(*probes)]
            await self._until_active(new)
            await tube.more(5, new.broker_id)  # records flow with one broker
            await load.more(10)
            recorder = load.recorder
            late = [
                asyncio.create_task(recorder.ask(direct, next(_readers), ["GET", key]))
                for key in list(recorder.keys)[-5:]
                if direct is not None
            ]
            await asyncio.sleep(0)
            if fault in PAUSES_S:
                load.change_keys()
                await asyncio.sleep(began + PAUSES_S[fault] - time.perf_counter())
                old.signal(signal.SIGCONT)
            elif fault == "cut":
                for link in self._links[old]:
                    link.release()
            elif fault != "handover":
                await asyncio.to_thread(self._etcd.start)
                old.start()
            assert not any(await asyncio.gather(*late)), "only the active node answers"
        if not expected:  # its lease had ended before, on a busy machine
            return {}
        assert max(write, message) < BUSY * GOALS_S.get(fault, GOAL_S)
        return {"first write s": write, "first message s": message}

    async def _lose_member(self, fault: str, load: Load, tube: TubeLoad) -> dict[str, float]:
        """Kill a member of etcd, the leader or another one: no takeover."""
        leader = await asyncio.to_thread(self._etcd.leader)
        began = time.perf_counter()
        self._etcd.kill(leader if fault == "etcd-leader" else (leader + 1) % MEMBERS)
        write = await self._first_write() - began
        await load.more(20)
        await tube.more(5, *(node.broker_id for node in self.nodes))
        await asyncio.to_thread(self._etcd.start)
        return {"first write s": write}

    async def _lose_majority(self, load: Load, messages: Path) -> dict[str, float]:
        """Kill two members of etcd for 20 s. Nothing is answered once the lease has ended, and nothing is changed."""

        def count() -> tuple[int, int]:
            history = messages.read_text(encoding="utf-8")
            return load.recorder.answered, history.count('"acknowledge"') + history.count('"receive"')

        leader = await asyncio.to_thread(self._etcd.leader)
        self._etcd.kill(leader, (leader + 1) % MEMBERS)
        ends = time.perf_counter() + MAJORITY_S
        probe = asyncio.create_task(self._first_write())
        await asyncio.sleep(LEASE_S + 2)  # what a node has sent before arrives, on a busy machine too
        before = await asyncio.to_thread(count)
        while time.perf_counter() < ends:
            assert not probe.done(), "a change was acknowledged without a majority of etcd"
            load.change_keys()
            await asyncio.sleep(2)
        assert await asyncio.to_thread(count) == before, "clients were answered without a lease"
        began = time.perf_counter()
        await asyncio.to_thread(self._etcd.start)
        return {"first write s": await probe - began}

    async def _first_write(self) -> float:
        """When the first of the nodes acknowledges a change."""
        probes = [asyncio.create_task(first(partial(set_key, node))) for node in self.nodes]
        done, others = await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)
        for probe in others:
            probe.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return min(probe.result() for probe in done)

    async def _cut_clients(self) -> None:
        """Cut the network between the clients and the node: no takeover."""
        self.clients.hold()
        await asyncio.sleep(1)  # longer than half of the clients wait
        self.clients.cut()
        self.clients.release()

    async def _cut_nodes(self, tube: TubeLoad) -> None:
        """Cut the network between the broker of the standby and the active master: no takeover."""
        link = self._masters[self.active]
        link.hold()
        await tube.more(20, *(node.broker_id for node in self.nodes))
        link.cut()
        link.release()

    async def _fill_etcd(self, load: Load) -> None:
        """Let etcd be full for a while: no takeover."""
        load.recorder.may_be_full = True
        await asyncio.to_thread(self._etcd.set_full, full=True)
        await self.active.until(lambda health: "etcd is full" in str(health))
        await asyncio.sleep(2)  # longer than half of the clients wait
        await asyncio.to_thread(self._etcd.set_full, full=False)

    async def _restore(self, load: Load) -> None:
        """Restore a backup of etcd that lacks acknowledged commits: both nodes have them, and neither becomes active.
        Then do what the documentation says."""
        copy = await asyncio.to_thread(self._etcd.back_up)
        await self.until_complete()
        await load.more(10)
        await self.active.until_followed()
        load.hold()
        old = self.active
        (new,) = (node for node in self.nodes if node is not old)
        await asyncio.to_thread(self._etcd.restore, copy)
        for node in self.nodes:
            await node.until(lambda health: DIVERGED in str(health))
        for node in self.nodes:
            node.signal(signal.SIGTERM)
        for node in self.nodes:
            await asyncio.to_thread(node.wait)
        await asyncio.to_thread(old.delete_prefix)
        old.write_config(new_log=True)
        old.start()
        await old.until_active()
        old.signal(signal.SIGTERM)
        await asyncio.to_thread(old.wait)
        old.write_config()
        copy_data(old, new)
        old.start()
        await old.until_active()
        new.start()
        await self.until_complete()
        load.release()

    async def _restart_in_turn(self, load: Load, tube: TubeLoad) -> None:
        """Restart both nodes as for an upgrade: the standby, and, after a handover, the one that was active."""
        old = self.active
        (new,) = (node for node in self.nodes if node is not old)
        for node, other in ((new, old), (old, new)):
            if self.active is node:
                async with asyncio.timeout(DEADLINE_S):
                    while True:
                        try:
                            await self._hand_over(node)
                            break
                        except RefusedError:  # the standby that has just started is not up to date
                            await asyncio.sleep(0.1)
                await self._until_active(other)
                await self.until_complete()
            node.signal(signal.SIGTERM)
            assert await asyncio.to_thread(node.wait) == 0
            await tube.more(5, other.broker_id)
            await load.more(10)
            node.start()
            await self.until_complete()

    async def _hand_over(self, node: NodeProcess) -> None:
        """Tell the active node to hand over. Raises RefusedError if no standby is up to date."""
        url = f"127.0.0.1:{node.http}"
        await asyncio.to_thread(web.call, url, "admin_transfer_current_master", {}, login=LOGIN)

    async def _connect(self, node: NodeProcess, stack: AsyncExitStack) -> StateStoreClient | None:
        """Connect to ``node`` itself; None if it is not active any more."""
        try:
            return await stack.enter_async_context(StateStoreClient.connect(node.url, reconnect=False))
        except PenstockError:
            if self.active is node:
                raise
            return None

    async def _until_active(self, node: NodeProcess) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.active is not node:
                await asyncio.sleep(0.01)

    async def until_complete(self) -> None:
        """Wait until the node that is not active follows the active one."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                active = self.active
                (other,) = (node for node in self.nodes if node is not active)
                reasons = (await asyncio.to_thread(other.health)).get("reasons", [])
                if any(reason.startswith(f"standby: the active node is {active.name} ") for reason in reasons):
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def pair(folder: Path, three: EtcdCluster) -> AsyncIterator[Pair]:
    name = f"h{next(_names)}"
    async with AsyncExitStack() as stack:
        nodes: list[NodeProcess] = []
        machines: list[Machine] = []
        links: list[list[Proxy]] = []
        peers: list[Proxy] = []
        for broker, own in enumerate(("one", "other"), 1):
            link = [await stack.enter_async_context(Proxy(address_of(at))) for at in three.endpoints]
            links.append(link)
            nodes.append(NodeProcess(folder, own, name, Behind(link), broker))
            master = "127.0.0.1", nodes[-1].tube_master
            peers.append(await stack.enter_async_context(Proxy(master)))
            addresses = {"bind": f"127.0.0.1:{master[1]}", "advertise": f"127.0.0.1:{peers[-1].port}"}
            nodes[-1].more = {"tube_master": addresses}
            (folder / f"{own} machine").mkdir()
            machines.append(Machine(folder / f"{own} machine", cluster=True))
            nodes[-1].program = machines[-1].program
            stack.callback(nodes[-1].end)
        clients = await stack.enter_async_context(Proxy(("127.0.0.1", nodes[0].mqtt)))
        for node in nodes:
            node.write_config()
            node.start()
            if node is nodes[0]:
                await node.until_active()
        active, _ = await until_pair(nodes)
        await asyncio.to_thread(create_topic, active)
        await until_partitions(nodes, 2 * PARTITIONS)
        found = Pair(nodes, machines, links, clients, peers, three)
        watches = [asyncio.create_task(found.watch(node)) for node in nodes]
        try:
            yield found
        finally:
            for watch in watches:
                watch.cancel()
            for result in await asyncio.gather(*watches, return_exceptions=True):
                assert isinstance(result, asyncio.CancelledError), result


def copy_data(source: NodeProcess, target: NodeProcess) -> None:
    """Give the node ``target`` the replicated data of ``source``, and leave it the records of its own broker."""
    for name in LOGS.values():
        shutil.rmtree(target.data_dir / name)
        shutil.copytree(source.data_dir / name, target.data_dir / name)


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("faults", KINDS)
async def test_takeovers(
    tmp_path: Path, three: EtcdCluster, faults: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """Faults of the active node, of etcd and of the network between them and to the clients."""
    history = tmp_path / "history.jsonl"
    messages = tmp_path / "mqtt"
    messages.mkdir()
    delivered = read = ""
    pause_s = PAUSE_S if request.node.callspec.id == BY_DAY else 0.0
    async with (
        pair(tmp_path, three) as nodes,
        TubeLoad(tmp_path / "tube.jsonl", nodes.masters, "demo") as tube,
        LockLoad(f"mqtt://127.0.0.1:{nodes.clients.port}") as locks,
        AsyncExitStack() as more,
    ):
        pipeline = None
        if request.node.callspec.id == PIPELINE:
            pipeline = await more.enter_async_context(
                PipelineLoad(tmp_path, nodes.masters, "demo", f"mqtt://127.0.0.1:{nodes.clients.port}")
            )
            await pipeline.more()
        brokers = [node.broker_id for node in nodes.nodes]
        await tube.more(10, *brokers)

        async def fault(load: Load) -> None:
            async def apply(number: int) -> None:
                await nodes.apply(faults[number], load, tube, messages / "history.jsonl")
                if pipeline is not None:
                    await pipeline.more()

            nonlocal delivered
            may_be_full = "full" in faults
            delivered = await record_messages(
                messages,
                nodes.clients.port,
                apply,
                len(faults),
                window=1,
                may_be_full=may_be_full,
                pause_s=pause_s,
            )
            while load.recorder.open > UNANSWERED * load.recorder.answered:
                await load.more(20)

        recorder = await record(history, f"mqtt://127.0.0.1:{nodes.clients.port}", fault, pause_s=pause_s)
        read = await tube.finish()
        if pipeline is not None:
            read += f"; pipeline {await pipeline.finish(tube.acknowledged)}"
    assert recorder.answered > 300
    assert recorder.refused == []
    held = check_locks(locks.held, locks.written)
    text = f"{check(history, tmp_path)}; locks {held}; MQTT {delivered}; TubeMQ {read}; {measurements(nodes.measured)}"
    request.node.user_properties.append(("summary", text))
