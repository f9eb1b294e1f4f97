"""Master and broker whose loop did not run: requests that wait in sockets are read before sessions are judged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.runtime.io.loop import loop_factory
from penstock.tube.client.connection import BlockingConnection
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.master.master import TubeMaster
from tests.unit.tube.broker_client import running
from tests.unit.tube.servers import until

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(loop_factory(), id="usual")]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@pytest.mark.parametrize("factory", LOOPS)
def test_a_heartbeat_that_waits_is_read_before_the_session_ends(tmp_path: Path, factory: LoopFactory) -> None:
    async def main() -> None:
        config = MasterConfig(consumer_session_ms=1000)
        master = TubeMaster(tmp_path, config=config)
        address = await master.start("127.0.0.1", 0)
        await master.create_topic("demo")
        member = Membership("c", "h", "lake", ["demo"], {}, 0)
        try:
            with BlockingConnection(address) as connection:
                kind = pb.RegisterResponseM2C
                register = partial(connection.call, 1, MethodId.CONSUMER_REGISTER, member.register(), kind)
                member.registered(await asyncio.to_thread(register, timeout_s=20.0))
                pending = connection.send(1, MethodId.CONSUMER_HEARTBEAT, member.heartbeat(), timeout_s=20.0)
                time.sleep(1.2)  # noqa: ASYNC251 - the loop does not run
                answer = await asyncio.to_thread(connection.receive, pending, timeout_s=20.0)
                assert pb.HeartResponseM2C.FromString(answer).errCode == 200
                await until(lambda: "lake" not in master.engine.groups)  # who is silent from now on is gone
        finally:
            await master.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("factory", LOOPS)
def test_a_consumer_of_a_broker_that_stood_still_keeps_its_partition(tmp_path: Path, factory: LoopFactory) -> None:
    async def main() -> None:
        async with running(tmp_path, session_ms=500) as (broker, client):
            await client.register()
            get = asyncio.create_task(client.get())
            await asyncio.sleep(0)
            time.sleep(1.6)  # noqa: ASYNC251 - the loop does not run, for longer than a stall is
            assert (await get).errCode == 404, "nothing to read, of a partition that it still has"
            async with asyncio.timeout(60):
                while broker.stats["registrations"]:
                    await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
