"""A broker's connection to its masters: standby and dead ones are passed over, refusals retried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UnavailableError
from penstock.runtime.observability.logs import TextFormatter
from penstock.tube.broker.master_connection import MasterConnection
from penstock.tube.client.connection import ClientConnection
from penstock.tube.engine.broker.membership import BrokerMembership, MasterUpdate
from penstock.tube.master.master import TubeMaster
from penstock.tube.master.standby import StandbyMaster
from penstock.tube.reader import partitions
from tests.ports import free_port
from tests.unit.tube.servers import until


async def test_a_dead_master_is_passed_over(tmp_path: Path) -> None:
    dead = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    master = TubeMaster(tmp_path)
    address = await master.start("127.0.0.1", 0)
    seen: list[MasterUpdate] = []
    membership = BrokerMembership(1, "127.0.0.1:1", "v")
    member = MasterConnection(
        membership,
        lambda: [dead.sockets[0].getsockname(), address],
        seen.append,
        lambda: (0, 0, None),
        heartbeat_s=0.05,
    )
    member.start()
    async with asyncio.timeout(60):
        await member.registered.wait()
    assert seen[0].config is not None
    beats = member.heartbeats
    member.heartbeat_now()
    async with asyncio.timeout(60):
        while member.heartbeats <= beats:
            await asyncio.sleep(0.01)
    await member.close()
    # Closed in order: the master knows at once.
    assert not master.engine.cluster.brokers[1].online
    await master.close()
    dead.close()
    await dead.wait_closed()


async def test_an_absent_master_is_one_line_until_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tube.broker.master_connection._RETRY_MOST_S", 0.02)
    address = ("127.0.0.1", free_port())
    tries = 0

    def status() -> tuple[int, int, None]:
        return 0, 0, None

    async def connect(*args: Any, **options: Any) -> ClientConnection:
        nonlocal tries
        tries += 1
        return await made(*args, **options)

    made = ClientConnection.connect
    monkeypatch.setattr(ClientConnection, "connect", connect)
    membership = BrokerMembership(4, "127.0.0.1:1", "v")
    member = MasterConnection(membership, lambda: [address], lambda _: None, status, heartbeat_s=0.05)
    member.start()
    await until(lambda: tries > 3)
    (record,) = caplog.records
    line = TextFormatter().format(record)
    place = f"{address[0]}:{address[1]}"
    assert "\n" not in line
    assert f'tube broker has no master broker_id=4 master={place} error="tube: no connection to {place}" why=' in line
    assert line.endswith(' hint="check that the server runs and listens there"')
    master = TubeMaster(tmp_path)
    await master.start(*address)
    async with asyncio.timeout(60):
        await member.registered.wait()
    await master.close()
    await until(lambda: "tube broker lost its master" in caplog.text)
    await member.close()


async def test_a_broker_leaves_a_master_that_is_not_active_any_more(tmp_path: Path) -> None:
    """It does not wait for the old one, whose connections may be open and silent."""
    active = True
    first, second = TubeMaster(tmp_path / "a", may_answer=lambda: active), TubeMaster(tmp_path / "b")
    current = [await first.start("127.0.0.1", 0)]
    member = MasterConnection(
        BrokerMembership(1, "127.0.0.1:1", "v"), lambda: current, lambda _: None, lambda: (0, 0, None), heartbeat_s=60
    )
    member.start()
    async with asyncio.timeout(60):
        await member.registered.wait()
    current.clear()
    member.masters_changed()
    await until(lambda: not member.membership.registered)
    current.append(await second.start("127.0.0.1", 0))
    member.masters_changed()
    await until(lambda: member.membership.registered)
    assert second.engine.cluster.brokers[1].online
    active = False  # the first one, whose lease has expired, refuses
    with pytest.raises(UnavailableError, match="is not master now"):
        await asyncio.to_thread(partitions, first.engine.address, "demo")
    await member.close()
    await first.close()
    await second.close()


async def test_a_standby_refuses_every_request() -> None:
    standby = StandbyMaster()
    host, port = await standby.start("127.0.0.1", 0)
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{port} is not master now"):
        await asyncio.to_thread(partitions, f"{host}:{port}", "demo")
    await standby.close()
