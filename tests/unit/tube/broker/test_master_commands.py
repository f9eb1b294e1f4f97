"""Commands of a master to a broker."""

from __future__ import annotations

from pathlib import Path

from penstock.tube.broker.broker import TubeBroker
from penstock.tube.broker.master_connection import TOKENS_KNOWN_MS
from penstock.tube.codec.strings import TopicConfig
from penstock.tube.engine.broker.membership import MasterUpdate
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.master.master import TubeMaster
from tests.ports import free_port
from tests.unit.tube.broker_client import Client
from tests.unit.tube.servers import until


async def test_visit_tokens_count_once_clients_can_have_heard_of_them(tmp_path: Path) -> None:
    """Not for two minutes after a registration, and not without a master; the same again after the next one."""
    clock = [1_000_000]
    broker = TubeBroker(tmp_path, clock=lambda: clock[0])
    await broker.start("127.0.0.1", 0)
    commands = broker.commands

    def counts(after_ms: int, orders: MasterUpdate) -> bool:
        clock[0] += after_ms
        commands.apply(orders)
        return broker.engine.checks.check_tokens

    assert not counts(0, MasterUpdate(tokens=[7, 8], check_tokens=True))
    assert not counts(TOKENS_KNOWN_MS - 1, MasterUpdate(tokens=[8, 9]))
    assert counts(1, MasterUpdate())
    assert broker.engine.checks.tokens == [7, 8, 9]
    commands.without_master()
    assert not broker.engine.checks.check_tokens
    assert not counts(0, MasterUpdate(check_tokens=True))
    assert counts(TOKENS_KNOWN_MS, MasterUpdate())
    assert not counts(0, MasterUpdate(check_tokens=False))
    await broker.close()


async def test_the_message_size_of_the_cluster_applies_to_existing_topics(tmp_path: Path) -> None:
    """Also after a restart, when the stored configuration is the current one."""
    broker = TubeBroker(tmp_path)
    await broker.start("127.0.0.1", 0)
    topics = broker.engine.topics
    topics.apply(topics.default, [TopicConfig("demo"), TopicConfig("own", max_message_bytes=2 << 20)])
    broker.commands.apply(MasterUpdate(max_message_bytes=3 << 20))
    assert [topics.by_name[name].max_data_bytes >> 20 for name in ("demo", "own")] == [3, 2]
    broker.commands.apply(MasterUpdate())
    assert topics.by_name["demo"].max_data_bytes >> 20 == 3
    await broker.close()


async def test_a_client_continues_over_restarts_of_broker_and_master(tmp_path: Path) -> None:
    """With a token of before, or none: a Java producer hears of another one only after 13 s."""
    config, port = MasterConfig(check_visit_tokens=True), free_port()

    async def start_master() -> TubeMaster:
        master = TubeMaster(tmp_path / "master", config=config)
        await master.start("127.0.0.1", port)
        return master

    master = await start_master()
    for number in range(3):
        broker = TubeBroker(tmp_path / "broker", masters=[f"127.0.0.1:{port}"], heartbeat_s=0.02)
        client = await Client.connect(await broker.start("127.0.0.1", 0))
        if number == 0:
            await master.create_topic("demo", ready_s=60)
        await until(lambda: broker.engine.checks.tokens and "demo" in broker.engine.topics.by_name)
        assert (await client.answer(client.send(b"x"))).success
        await master.close()
        assert (await client.answer(client.send(b"x"))).success
        master = await start_master()
        await client.close()
        await broker.close()
    await master.close()
