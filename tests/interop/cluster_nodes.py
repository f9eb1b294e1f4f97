"""Nodes of a cluster as processes of their own, which are killed, paused and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from penstock.cluster.client import EtcdClient
from penstock.cluster.log import LogKeys, read_head
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.console.snapshots import ClusterMember
from penstock.node.cluster.state import logs_of, read_cluster, read_reports
from penstock.node.config.node import load_config
from tests.interop.etcd import EtcdCluster
from tests.ports import free_ports

__all__ = ["DEADLINE_S", "LASTING_S", "NodeProcess", "command", "environment", "until_pair"]

DEADLINE_S = 120
LASTING_S = 60
"""Lease for tests in which no node is killed: on a busy machine the active node keeps its role."""
PENSTOCK = str(Path(sys.executable).with_name("penstock"))
ROOT = Path(__file__).resolve().parents[2]


class NodeProcess:
    """A node of a cluster as a process of its own, started by :meth:`start`."""

    def __init__(self, folder: Path, name: str, cluster: str, etcd: EtcdCluster, broker_id: int = 0) -> None:
        """``broker_id``: that of its TubeMQ broker; 0: a cluster without TubeMQ."""
        self.name = name
        self.broker_id = broker_id
        self.mqtt, self.http, self.tube_master, self.tube_broker, self.tube_broker_http = free_ports(5)
        self.data_dir = folder / name
        self.config = folder / f"{name}.yaml"
        self.more: dict[str, object] = {}
        """More settings."""
        self.program = [PENSTOCK]
        """The command that runs ``penstock``."""
        self.tls: ssl.SSLContext | None = None
        """For the HTTP listener, if it has TLS."""
        self._cluster, self._etcd = cluster, etcd
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.mqtt}"

    @property
    def web(self) -> str:
        """URL of the HTTP listener, without a slash."""
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.http}"

    def write_config(self, **cluster: object) -> None:
        settings: dict[str, object] = {
            "data_dir": str(self.data_dir),
            "mqtt": f"127.0.0.1:{self.mqtt}",
            "http": f"127.0.0.1:{self.http}",
            "statestore": {"extensions": ["ttl"]},
        }
        if self._cluster:
            own = {"name": self._cluster, "node": self.name, "etcd": self._etcd.endpoints}
            settings["cluster"] = {**own, "tubemq": self.broker_id > 0, **cluster}
            if self.broker_id:
                settings["tube"] = {"broker_id": self.broker_id, "admin_token": "administer"}
        if self.broker_id or not self._cluster:
            names = ("tube_master", "tube_broker", "tube_broker_http")
            settings |= {name: f"127.0.0.1:{getattr(self, name)}" for name in names}
        settings |= self.more
        self.config.write_text(json.dumps(settings))

    def start(self) -> None:
        if not self.config.exists():
            self.write_config()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.program, "up", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        assert self._process is not None
        status = self._process.wait(DEADLINE_S)
        self._process = None
        return status

    def end(self) -> None:
        if self._process is not None:
            for number in (signal.SIGCONT, signal.SIGKILL):
                self.signal(number)
            self.wait()

    def health(self) -> dict[str, Any]:
        """The body of ``/readyz``; empty without an answer."""
        try:
            try:
                answer = urllib.request.urlopen(f"{self.web}/readyz", timeout=5, context=self.tls)
            except urllib.error.HTTPError as refused:  # 503
                answer = refused
            with answer:
                return dict(json.load(answer))
        except (OSError, HTTPException, ValueError):  # the process ends, perhaps while it answers
            return {}

    def metrics(self) -> dict[str, float]:
        """The metrics of the cluster, without their prefix."""
        with urllib.request.urlopen(f"{self.web}/metrics", timeout=DEADLINE_S, context=self.tls) as answer:
            lines = answer.read().decode().splitlines()
        found = [line.partition(" ") for line in lines if line.startswith("penstock_cluster_")]
        return {name.removeprefix("penstock_cluster_"): float(value) for name, _, value in found}

    async def until_metrics(self, wanted: dict[str, float]) -> None:
        """Wait until these metrics of the cluster have these values; the process may be starting."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(OSError):
                    if wanted.items() <= (await asyncio.to_thread(self.metrics)).items():
                        return
                await asyncio.sleep(0.1)

    def cluster(self) -> dict[str, Any]:
        """The cluster as the console API shows it."""
        return self._api("cluster")

    def overview(self) -> dict[str, Any]:
        """The overview as the console API shows it."""
        return self._api("overview")

    def _api(self, path: str) -> dict[str, Any]:
        token = (self.data_dir / "tube" / "admin-token").read_text().strip()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/api/v1/{path}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return dict(json.load(answer))

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until ``/readyz`` is as wanted."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not holds(await asyncio.to_thread(self.health)):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{self.name}: {self.health()}\n{self.log()}") from None

    async def until_active(self) -> None:
        await self.until(lambda health: bool(health.get("ready")))

    async def until_standby(self, active: NodeProcess) -> None:
        await self.until(lambda health: _is_standby(health, active))

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def delete_prefix(self) -> None:
        """Delete all keys of the cluster from etcd."""
        section = load_config(self.config, {}, {}).cluster
        assert section is not None
        first = section.prefix.encode()
        request = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=first, range_end=first[:-1] + b"0"))
        client = EtcdClient(section.etcd, section.login())
        try:
            client.call("KV/Txn", pb.TxnRequest(success=[request]), pb.TxnResponse)
        finally:
            client.close()

    def delete_commits(self) -> None:
        """Delete all commits of the cluster from etcd, as the active node does if there are too many."""
        section = load_config(self.config, {}, {}).cluster
        assert section is not None
        client = EtcdClient(section.etcd, section.login())
        try:
            for name in logs_of(section):
                keys = LogKeys(section.prefix, name)
                head = read_head(client, keys)
                assert head is not None
                request = pb.DeleteRangeRequest(key=keys.frame(0), range_end=keys.frame(head.sequence + 1))
                deletion = pb.RequestOp(request_delete_range=request)
                client.call("KV/Txn", pb.TxnRequest(success=[deletion]), pb.TxnResponse)
        finally:
            client.close()

    async def until_followed(self) -> None:
        """Wait until a standby reports that it has the commits that etcd has now. Nodes report once a second."""
        section = load_config(self.config, {}, {}).cluster
        assert section is not None
        client = EtcdClient(section.etcd, section.login())
        reports: list[dict[str, Any]] = []
        try:
            heads = (await asyncio.to_thread(read_cluster, section, client)).commits
            async with asyncio.timeout(DEADLINE_S):
                while not any(
                    all(report.get("applied", {}).get(name, 0) >= head for name, head in heads.items())
                    for report in reports
                ):
                    await asyncio.sleep(0.05)
                    reports = await asyncio.to_thread(read_reports, client, section.prefix)
        except TimeoutError:
            raise AssertionError(f"{heads}: {reports}\n{self.log()}") from None
        finally:
            client.close()

    async def until_members(self, hold: Callable[[dict[str, ClusterMember]], bool]) -> None:
        """Wait until the members of the cluster, by name, are as wanted. Nodes report themselves once a second."""
        section = load_config(self.config, {}, {}).cluster
        assert section is not None
        client = EtcdClient(section.etcd, section.login())
        found: dict[str, ClusterMember] = {}
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    state = await asyncio.to_thread(read_cluster, section, client)
                    found = {member.node: member for member in state.members}
                    if hold(found):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{found}\n{self.log()}") from None
        finally:
            client.close()


def _is_standby(health: dict[str, Any], active: NodeProcess) -> bool:
    wanted = f"standby: the active node is {active.name} (mqtt 127.0.0.1:{active.mqtt}"
    return any(each.startswith(wanted) for each in health.get("reasons", []))


async def until_pair(nodes: Sequence[NodeProcess]) -> tuple[NodeProcess, NodeProcess]:
    """Wait until one of two running nodes is active and the other its standby; returns them in this order.

    On a busy machine the first one may lose its lease while the second one starts.
    """
    one, other = nodes
    found: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = [await asyncio.to_thread(node.health) for node in nodes]
                if found[0].get("ready") and _is_standby(found[1], one):
                    return one, other
                if found[1].get("ready") and _is_standby(found[0], other):
                    return other, one
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{found}\n{one.log()}\n{other.log()}") from None


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths}


async def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command of ``penstock``."""
    process = await asyncio.create_subprocess_exec(
        PENSTOCK, *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()
