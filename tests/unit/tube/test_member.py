"""A broker's connection to its masters: standby and dead ones are passed over, refusals retried."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.tube.engine.membership import Membership, Orders
from penstock.tube.master import TubeMaster
from penstock.tube.member import Member


async def test_a_dead_master_is_passed_over(tmp_path: Path) -> None:
    dead = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    master = TubeMaster(tmp_path)
    address = await master.start("127.0.0.1", 0)
    seen: list[Orders] = []
    membership = Membership(1, "127.0.0.1:1", "v")
    member = Member(membership, [dead.sockets[0].getsockname(), address], seen.append, lambda: (0, 0), heartbeat_s=0.05)
    member.start()
    async with asyncio.timeout(20):
        await member.registered.wait()
    assert seen[0].config is not None
    beats = member.heartbeats
    member.poke()
    async with asyncio.timeout(20):
        while member.heartbeats <= beats:
            await asyncio.sleep(0.01)
    await member.close()
    # Closed in order: the master knows at once.
    assert not master.engine.cluster.brokers[1].online
    await master.close()
    dead.close()
    await dead.wait_closed()
