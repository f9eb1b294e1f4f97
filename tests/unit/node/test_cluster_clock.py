"""Clocks of a standby: how they continue those of the active node."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.cluster.client import EtcdClient
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.node.cluster import clock
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.cluster.state import ActiveNode
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.node import NodeConfig
from penstock.runtime.io.clock import wall_clock_ms

ACTIVE = ActiveNode("other", "", {}, 7)


class Machine:
    """A machine whose clocks run when :meth:`wait` is called; in the end its system clock is that of this machine."""

    def __init__(self, seconds: float) -> None:
        self.boot_ms = 50_000
        self.step_ms = 0
        self._begin_ms = wall_clock_ms() - self.boot_ms - int(seconds * 1000)

    @property
    def right_ms(self) -> int:
        """The right time."""
        return self._begin_ms + self.boot_ms

    @property
    def wall_ms(self) -> int:
        """The system clock."""
        return self.right_ms + self.step_ms

    def wait(self, seconds: float) -> None:
        self.boot_ms += int(seconds * 1000)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(100)
    monkeypatch.setattr(clock, "boot_ms", lambda: machine.boot_ms)
    monkeypatch.setattr(clock, "wall_clock_ms", lambda: machine.wall_ms)
    return machine


def put_clock(monkeypatch: pytest.MonkeyPatch, time_ms: int, term: int = 7) -> None:
    stamp = {"term": term, "time_ms": time_ms, "boot": "another", "offset_ms": 0, "versions_ms": time_ms}
    answer = pb.RangeResponse(kvs=[pb.KeyValue(key=b"clock", value=json.dumps(stamp).encode())])
    monkeypatch.setattr(EtcdClient, "call", lambda *_args, **_options: answer)


async def member_at(path: Path) -> ClusterMembership:
    section = ClusterSection(name="c", node="n", etcd=["127.0.0.1:1"])
    return ClusterMembership(NodeConfig(data_dir=path, cluster=section), lambda _: None)


@asynccontextmanager
async def following(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterMembership]:
    """A standby that has read the clock of the active node, which is right."""
    member = await member_at(path)
    put_clock(monkeypatch, machine.wall_ms)
    member._read_clock(ACTIVE)
    yield member
    member._client.close()


async def test_without_an_active_node_the_system_clock_does_not_seem_to_step(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, machine, monkeypatch) as member:
        for _ in range(5):  # etcd has no majority for some time, or no node was elected
            machine.wait(60)
            member._read_clock(None)
        member._set_clock()
        assert member.clock.now() == machine.wall_ms
        versions = member.clock.version_clock(hold_s=300)
        versions.check()
        assert versions.problem() is None


async def test_a_system_clock_that_differs_from_that_of_the_active_node_has_stepped(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, machine, monkeypatch) as member:
        machine.wait(100)
        put_clock(monkeypatch, machine.wall_ms + 3_600_000)  # of a node whose system clock is ahead
        member._read_clock(ACTIVE)
        member._set_clock()
        versions = member.clock.version_clock(hold_s=300)
        versions.check()
        assert "versions and deadlines still follow" in str(versions.problem())


async def test_the_clock_of_a_later_term_is_late_never_early(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, machine, monkeypatch) as member:
        # This node did not reach etcd for an hour, in which another one was active for some time.
        machine.wait(3_600)
        machine.step_ms = 3_600_000
        put_clock(monkeypatch, machine.right_ms - 600_000, term=9)
        member._read_clock(None)
        member._set_clock()
        assert member.clock.now() == machine.right_ms - 600_000, "late by the time without an active node"
