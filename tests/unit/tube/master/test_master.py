"""The master over sockets: durable topics, sessions that expire, requests by HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.errors import RefusedError, StorageError, UnavailableError
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.client.connection import ClientConnection
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.consumer import Consumer
from penstock.tube.engine.client.producer_state import Routes
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.engine.master.settings import TopicSetting
from penstock.tube.master.master import TubeMaster
from penstock.tube.master.metadata import SettingStore
from penstock.tube.producer import Producer
from tests.unit.tube.servers import tube, until


async def test_topics_survive_a_restart(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path)
    await master.start("127.0.0.1", 0)
    await master.create_topic("demo", 5, 2, max_message_bytes=1 << 21)
    with pytest.raises(RefusedError) as caught:
        await master.create_topic("demo")
    assert caught.value.code == 402
    await master.close()
    again = TubeMaster(tmp_path)
    await again.start("127.0.0.1", 0)
    assert again.topics() == [TopicSetting("demo", 5, 2, max_message_bytes=1 << 21)]
    await again.close()
    await again.close()


async def test_a_directory_has_one_master(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path)
    await master.start("127.0.0.1", 0)
    with pytest.raises(UnavailableError, match="in use by process"):
        await TubeMaster(tmp_path).start("127.0.0.1", 0)
    await master.close()
    await master.start("127.0.0.1", 0)
    await master.close()


async def test_a_topic_is_created_once_by_those_who_ask_at_the_same_time(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path, admin_token="token")
    await master.start("127.0.0.1", 0)
    params = {"method": "admin_add_new_topic_record", "confModAuthToken": "token", "createUser": "me"}
    outcomes = await asyncio.gather(
        master.create_topic("demo", 5),
        master.create_topic("demo", 1),
        master.webapi({**params, "topicName": "demo,other", "numPartitions": "2"}),
        master.webapi({**params, "topicName": "other", "numPartitions": "9"}),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], RefusedError)
    assert [(topic.name, topic.partitions) for topic in master.topics()] == [("demo", 5), ("other", 2)]
    assert isinstance(outcomes[2], dict)
    assert isinstance(outcomes[3], dict)
    assert [row["errCode"] for row in outcomes[2]["data"]] == [402, 200]
    assert [row["errCode"] for row in outcomes[3]["data"]] == [402]
    assert not master.engine.storing
    await master.close()


async def test_changes_at_the_same_time_do_not_undo_each_other(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path, admin_token="token")
    await master.start("127.0.0.1", 0)
    await master.create_topic("demo")
    change = {"confModAuthToken": "token", "modifyUser": "me"}
    limits = {"method": "admin_update_group_resctrl_info", "groupName": "lake", **change}
    access = {"method": "admin_update_group_csmctrl_info", "groupName": "lake", "topicName": "demo", **change}
    asked = [
        {**limits, "alwdBrokerClientRate": "3"},
        {**limits, "qryPriorityId": "202"},
        {**access, "filterEnable": "true"},
        {**access, "filterConds": "aa,bb"},
        {"method": "admin_update_cluster_default_setting", "maxMsgSizeInMB": "2", **change},
        {"method": "admin_update_cluster_default_setting", "numPartitions": "7", **change},
    ]
    outcomes = await asyncio.gather(*map(master.webapi, asked), master.change_retention("demo", "delete,5h"))
    assert [row["success"] for outcome in outcomes if outcome is not None for row in outcome["data"]] == [True] * 6
    controls = master.engine.controls
    assert (controls.groups["lake"].rate, controls.groups["lake"].query_priority) == (3, 202)
    rule = controls.consume["lake", "demo"]
    assert (rule.filter_enabled, rule.filters) == (True, ("aa", "bb"))
    assert (controls.cluster.max_message_bytes, controls.cluster.topic_defaults.partitions) == (2 << 20, 7)
    assert master.engine.cluster.topics["demo"].delete_policy == "delete,5h"
    await master.close()


async def test_a_change_waits_for_that_of_a_cancelled_request(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path, admin_token="token")
    await master.start("127.0.0.1", 0)
    change = {"confModAuthToken": "token", "modifyUser": "me"}
    limits = {"method": "admin_update_group_resctrl_info", "groupName": "lake", **change}
    cancelled = asyncio.create_task(master.webapi({**limits, "alwdBrokerClientRate": "3"}))
    await asyncio.sleep(0)
    cancelled.cancel()
    await master.webapi({**limits, "qryPriorityId": "202"})
    assert cancelled.cancelled()
    lake = master.engine.controls.groups["lake"]
    assert (lake.rate, lake.query_priority) == (3, 202)
    await master.close()


async def test_topic_without_a_broker_is_created_but_not_ready(tmp_path: Path) -> None:
    async with tube(tmp_path, brokers=0) as running:
        assert running.master is not None
        with pytest.raises(UnavailableError, match="no broker serves"):
            await running.master.create_topic("demo", ready_s=0.02)
        assert [topic.name for topic in running.master.topics()] == ["demo"]


async def test_a_new_topic_is_usable_once_a_broker_has_it(tmp_path: Path) -> None:
    async with tube(tmp_path) as running:
        assert running.master is not None
        await running.master.create_topic("demo", ready_s=60)
        await running.master.wait_topic("demo", 0)


async def test_sessions_expire(tmp_path: Path) -> None:
    config = MasterConfig(limits=TubeLimits(producer_session_ms=60))
    master = TubeMaster(tmp_path, config=config)
    address = await master.start("127.0.0.1", 0)
    link = await ClientConnection.connect(address)
    answer = await link.call(1, MethodId.PRODUCER_REGISTER, Routes("p", "h").register(), pb.RegisterResponseM2P)
    assert answer.errCode == 200
    await until(lambda: not master.engine.producers)
    await link.close()
    await master.close()


async def test_a_later_session_may_end_earlier(tmp_path: Path) -> None:
    config = MasterConfig(consumer_session_ms=3_600_000, limits=TubeLimits(producer_session_ms=60))
    master = TubeMaster(tmp_path, config=config)
    link = await ClientConnection.connect(await master.start("127.0.0.1", 0))
    await master.create_topic("demo")
    request = pb.RegisterRequestC2M(clientId="c", groupName="lake", hostName="h", topicList=["demo"])
    await link.call(1, MethodId.CONSUMER_REGISTER, request, pb.RegisterResponseM2C)
    answer = await link.call(1, MethodId.PRODUCER_REGISTER, Routes("p", "h").register(), pb.RegisterResponseM2P)
    assert answer.errCode == 200
    await until(lambda: not master.engine.producers)
    assert "lake" in master.engine.groups
    await link.close()
    await master.close()


async def test_a_killed_broker_registers_from_another_port_at_once_or_goes_offline(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path, config=MasterConfig(limits=TubeLimits(broker_reconnect_ms=100)))
    address = await master.start("127.0.0.1", 0)

    async def register(link: ClientConnection, port: int) -> pb.RegisterResponseM2B:
        request = pb.RegisterRequestB2M(
            clientId=f"1:127.0.0.1:{port}:2.4.0", brokerOnline=False, enableTls=False, readStatusRpt=0,
            writeStatusRpt=0, curBrokerConfId=0, confCheckSumId=0, brokerDefaultConfInfo="",
        )  # fmt: skip
        return await link.call(1, MethodId.BROKER_REGISTER, request, pb.RegisterResponseM2B)

    first, second = await ClientConnection.connect(address), await ClientConnection.connect(address)
    assert (await register(first, 1)).success
    assert "registered from 127.0.0.1:1" in (await register(second, 2)).errMsg
    await first.close()  # nobody said goodbye: the process is gone
    await until(lambda: master.engine.cluster.brokers[1].disconnected_at is not None)
    assert (await register(second, 2)).success
    assert master.engine.cluster.brokers[1].online
    await second.close()
    await until(lambda: not master.engine.cluster.brokers[1].online)
    await master.close()


async def test_webapi_stores_before_it_answers(tmp_path: Path) -> None:
    async with tube(tmp_path) as running:
        assert running.master is not None
        added = await running.master.webapi(
            {"method": "admin_add_new_topic_record", "topicName": "web", "createUser": "u", "confModAuthToken": "token"}
        )
        assert added["data"][0]["errCode"] == 200
        await running.master.wait_topic("web", 5)
        assert (await running.master.webapi({"method": "admin_query_topic_info"}))["count"] == 1


async def test_webapi_answers_when_a_new_topic_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = {"method": "admin_add_new_topic_record", "createUser": "u", "confModAuthToken": "token"}
    async with tube(tmp_path) as running:
        master = running.master
        assert master is not None
        # It would heartbeat once in ten minutes: only that it is told makes the topic usable.
        broker = TubeBroker(
            tmp_path / "slow", broker_id=7, masters=[running.masters], heartbeat_s=600, web_address="127.0.0.1:1"
        )
        await broker.start("127.0.0.1", 0)
        assert broker.registered is not None
        await broker.registered.wait()
        try:
            master.on_change = broker.heartbeat_now
            await master.webapi({**add, "topicName": "told"})
            info = master.engine.cluster.topic_info("told")
            assert info is not None
            assert 7 in [place.broker_id for place in info.brokers]
            master.on_change = lambda: None
            monkeypatch.setattr("penstock.tube.master.master.TAKEN_UP_S", 0.05)
            answer = await master.webapi({**add, "topicName": "late"})
            assert answer["data"][0]["errCode"] == 200, "it is created, whoever has taken it up"
            assert not master.engine.cluster.taken_up("late")
        finally:
            await broker.close()


async def test_taken_address_leaves_nothing_open(tmp_path: Path) -> None:
    first = TubeMaster(tmp_path / "a")
    _, port = await first.start("127.0.0.1", 0)
    second = TubeMaster(tmp_path / "b")
    with pytest.raises(OSError, match="address"):
        await second.start("127.0.0.1", port)
    await second.start("127.0.0.1", 0)
    await second.close()
    await first.close()


async def test_a_broker_is_drained_while_clients_continue(tmp_path: Path) -> None:
    """Closed for producers, read to the end, closed for consumers, deleted, removed: on broker 2 alone."""
    sent: list[int] = []
    read: list[int] = []
    stop = asyncio.Event()
    async with tube(tmp_path, "demo", brokers=2) as running:
        master = running.master
        assert master is not None

        async def produce(producer: Producer) -> None:
            while not stop.is_set():
                await producer.send("demo", str(len(sent)).encode())
                sent.append(len(sent))

        async def consume(consumer: Consumer) -> None:
            async for batch in consumer.batches():
                read.extend(int(message.record.value) for message in batch)

        async def on_broker_2(method: str, **params: str) -> None:
            told = {"modifyUser": "me", "confModAuthToken": "token", "topicName": "demo", "brokerId": "2"}
            answer = await master.webapi({"method": method, **told, **params})
            assert [(row["brokerId"], row["errCode"]) for row in answer["data"]] == [(2, 200)]

        def log(number: int) -> list[Path]:
            return list((tmp_path / str(number) / "tube" / f"broker-{number}" / "log").glob("demo-*/*"))

        async with (
            Producer(running.masters, heartbeat_s=0.05) as producer,
            Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.05) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            producing = tasks.create_task(produce(producer))
            consuming = tasks.create_task(consume(consumer))
            await until(lambda: len(read) > 100)
            stores = running.brokers[2].engine.topics.by_name["demo"].stores
            await on_broker_2("admin_modify_topic_info", acceptPublish="false")
            await until(lambda: not running.brokers[2].engine.topics.by_name["demo"].writable)
            ends = [store.durable_end for store in stores.values()]
            further = len(sent) + 50
            await until(lambda: len(sent) > further)
            assert [store.durable_end for store in stores.values()] == ends
            await until(lambda: len(set(read)) > further)
            await on_broker_2("admin_modify_topic_info", acceptSubscribe="false")
            await on_broker_2("admin_delete_topic_info")
            await on_broker_2("admin_remove_topic_info")
            await until(lambda: not master.engine.cluster.topics["demo"].on(2))
            await until(lambda: not log(2))
            further = len(sent) + 50
            await until(lambda: len(sent) > further)
            stop.set()
            await producing
            await until(lambda: len(set(read)) == len(sent))
            consuming.cancel()
        assert log(1)
        assert sorted(set(read)) == sent


async def test_authors_of_topics_are_stored_with_the_topic(tmp_path: Path) -> None:
    change = {"confModAuthToken": "token", "topicName": "made"}
    for created in (True, False):
        master = TubeMaster(tmp_path, admin_token="token")
        await master.start("127.0.0.1", 0)
        try:
            if created:
                add = {**change, "method": "admin_add_new_topic_record", "createUser": "ann"}
                assert (await master.webapi(add))["result"]
                modify = {**change, "method": "admin_modify_topic_info", "modifyUser": "bob", "numPartitions": "5"}
                assert (await master.webapi(modify))["result"]
            shown = await master.webapi({"method": "admin_query_topic_deploy_info", "topicName": "made"})
            (row,) = shown["data"]
            assert (row["createUser"], row["modifyUser"]) == ("ann", "bob")
        finally:
            await master.close()


async def test_nothing_is_acknowledged_after_lmdb_could_not_be_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = TubeMaster(tmp_path)
    await master.start("127.0.0.1", 0)
    await master.create_topic("before")

    def fail(*_: object, **__: object) -> None:
        raise StorageError("tube settings: Input/output error")

    monkeypatch.setattr(LmdbEnvironment, "transact", fail)
    assert master._store is not None
    assert master._queue is not None
    master._store._environment._haste.set()
    while master._queue.failure is None:
        await asyncio.sleep(0.01)
    with pytest.raises(StorageError, match="Input/output error"):
        await master.create_topic("later")
    await master.close()
    monkeypatch.undo()
    store = SettingStore(tmp_path)
    assert [setting.name for setting in store.load() if isinstance(setting, TopicSetting)] == ["before"]
    store.close()
