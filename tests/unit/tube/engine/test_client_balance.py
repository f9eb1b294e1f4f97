"""A member that chooses its partitions: its share, what the application says, what is reported."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from penstock.errors import ConfigError, RefusedError
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.client.consumer_state import ClientBalance, PartitionOrders


def member(source_count: int = 0, node_id: int = 0) -> ClientBalance:
    ours = ClientBalance("c", "h", "lake", ["demo"], {"demo": ["a"]}, source_count=source_count, node_id=node_id)
    ours.registered(
        pb.RegisterResponseM2CV2(errCode=200, errMsg="", brokerConfigId=4, brokerConfigList=["1:h:1", "2:h:2"])
    )
    return ours


def told(ours: ClientBalance, *topics: str, code: int = 200) -> PartitionOrders:
    answer = pb.GetPartMetaResponseM2C(errCode=code, errMsg="", topicMetaInfoId=9, topicMetaInfoList=topics)
    return ours.metadata(answer, 1000)


def keys(partitions: Iterable[Partition]) -> list[str]:
    return [partition.key for partition in partitions]


def test_all_or_a_share() -> None:
    assert keys(told(member(), "demo#1:1:2:1,2:2:1:1").take) == ["1:demo:0", "1:demo:1", "2:demo:0", "2:demo:10000"]
    shares = [keys(told(member(source_count=3, node_id=node), "demo#1:1:4:1").take) for node in range(3)]
    assert shares == [["1:demo:0", "1:demo:3"], ["1:demo:1"], ["1:demo:2"]]
    with pytest.raises(ConfigError, match="node_id: got 3"):
        member(source_count=3, node_id=3)


def test_unreadable_partitions_are_not_taken_and_missing_ones_are_released() -> None:
    ours = member()
    assert keys(told(ours, "demo#1:1:1:1,2:1:1:0").take) == ["1:demo:0"]
    ours.held = set(told(ours, "demo#1:1:1:1,2:1:1:1").take)
    assert told(ours, "demo#1:1:1:1") == PartitionOrders(release=(sorted(ours.held)[1],))
    assert told(ours) == PartitionOrders(release=(sorted(ours.held)[1],)), "no list: nothing new"


def test_the_application_chooses() -> None:
    ours = member()
    ours.assigned = frozenset({"2:demo:0", "2:demo:7"})
    assert keys(told(ours, "demo#1:1:2:1,2:1:2:1").take) == ["2:demo:0"]


def test_reports_and_ids() -> None:
    ours = member()
    ours.held = set(told(ours, "demo#1:1:2:1,2:1:1:1").take)
    request = ours.heartbeat()
    assert request.IsInitialized()
    assert (request.subRepInfo.brokerConfigId, request.subRepInfo.topicMetaInfoId) == (4, 9)
    assert request.subRepInfo.lstAssignedTime == 1000
    assert list(request.subRepInfo.partSubInfo) == ["demo#1:0,1:1,2:0"]
    heard = pb.HeartResponseM2CV2(errCode=200, errMsg="")
    assert ours.heartbeat_answered(heard, 2000) == PartitionOrders()
    assert not ours.heartbeat().subRepInfo.partSubInfo
    ours.changed()
    assert ours.heartbeat().subRepInfo.partSubInfo
    assert ours.register().subRepInfo.reportSubInfo
    assert ours.register().IsInitialized()
    assert ours.metadata_request().topicMetaInfoId == -2


def test_forgotten_and_refused() -> None:
    ours = member()
    assert told(ours, code=411).register
    assert ours.heartbeat_answered(pb.HeartResponseM2CV2(errCode=411, errMsg=""), 0).register
    with pytest.raises(RefusedError):
        ours.heartbeat_answered(pb.HeartResponseM2CV2(errCode=450, errMsg="no"), 0)
