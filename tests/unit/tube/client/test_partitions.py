"""Partitions of a topic, requested from a master over a blocking connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.errors import UnavailableError
from penstock.tube.reader import TopicUnavailableError, partitions
from tests.unit.tube.servers import announced, tube


async def test_partitions_of_a_topic(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2, partitions=2) as running:
        found = await asyncio.to_thread(lambda: partitions(running.masters, "demo"))
        assert [(info.broker_id, info.port, info.partition) for info in found] == [
            (number, running.ports[number], partition) for number in (1, 2) for partition in (0, 1)
        ]
        assert await asyncio.to_thread(lambda: partitions(f"127.0.0.1:1,{running.masters}", "none")) == []
        assert running.master is not None
        assert not running.master.engine.producers, "it says goodbye"
    with pytest.raises(UnavailableError):
        await asyncio.to_thread(lambda: partitions("127.0.0.1:1", "demo", timeout_s=1))


async def test_a_topic_whose_broker_has_not_registered_yet_is_no_topic_without_partitions(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", "closed") as running:
        assert running.master is not None
        closed = {"topicName": "closed", "brokerId": "1", "acceptPublish": "false", "modifyUser": "me"}
        method = {"type": "op_modify", "method": "admin_modify_topic_info", "confModAuthToken": "token"}
        assert (await running.master.webapi({**method, **closed}))["result"]
        await running.stop_broker()
        await running.stop_master()
        await running.start_master()
        for topic in ("demo", "closed"):
            with pytest.raises(TopicUnavailableError, match=f"topic '{topic}' are not known yet") as caught:
                await asyncio.to_thread(partitions, running.masters, topic)
            assert caught.value.why in {"no broker is registered", "it is closed for producers"}
            assert caught.value.retriable
        assert await asyncio.to_thread(lambda: partitions(running.masters, "none")) == []
        await running.start_broker()
        for topic in ("demo", "closed"):
            found = await asyncio.to_thread(announced, running.masters, topic)
            assert [info.partition for info in found] == [0, 1, 2]
