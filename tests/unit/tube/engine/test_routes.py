"""Routes of a producer: whose partitions take turns, who is avoided."""

from __future__ import annotations

import pytest

from penstock.errors import RefusedError
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import BrokerInfo
from penstock.tube.engine.client.producer_state import Routes


def routes(*infos: str) -> Routes:
    known = Routes("p", "h", start=-1)
    known.registered(
        pb.RegisterResponseM2P(success=True, errCode=200, errMsg="", brokerCheckSum=5, brokerInfos=["1:h:1", "2:h:2"])
    )
    known.heartbeat_answered(heard(*infos))
    return known


def heard(*infos: str, code: int = 200, check_sum: int = 5, brokers: tuple[str, ...] = ()) -> pb.HeartResponseM2P:
    return pb.HeartResponseM2P(
        success=True, errCode=code, errMsg="", brokerCheckSum=check_sum, topicInfos=infos, brokerInfos=brokers
    )


def picks(known: Routes, count: int, *, now: int = 0) -> list[tuple[int, int]]:
    chosen = [known.choose("demo", None, None, now) for _ in range(count)]
    return [(target.broker.id, target.id) for target in chosen if target is not None]


def test_partitions_take_turns() -> None:
    known = routes("demo#1:2:1,2:1:2#")
    assert picks(known, 5) == [(1, 0), (1, 1), (2, 0), (2, 10000), (1, 0)]


def test_avoided_broker_is_left_out_while_there_are_others() -> None:
    known = routes("demo#1:2:1,2:1:1#")
    known.exclude(1, 100)
    assert picks(known, 2) == [(2, 0), (2, 0)]
    assert {broker for broker, _ in picks(known, 3, now=100)} == {1, 2}
    known.exclude(1, 200)
    known.exclude(2, 200)
    assert len(picks(known, 3, now=150)) == 3


def test_key_and_number_decide() -> None:
    known = routes("demo#1:3:1#")
    target = known.choose("demo", b"key", None, 0)
    assert target is not None
    known.exclude(1, 100)
    assert known.choose("demo", b"key", None, 0) == target
    named = known.choose("demo", b"key", 2, 0)
    assert named is not None
    assert named.id == 2
    for place in known.partitions("demo"):
        moved = place._replace(broker=place.broker._replace(host="10.0.0.9"))  # named by its ids, wherever it is now
        assert known.choose("demo", b"key", moved, 0) == place
    with pytest.raises(RefusedError, match="no partition 9:0"):
        known.choose("demo", None, place._replace(broker=place.broker._replace(id=9), id=0), 0)
    with pytest.raises(RefusedError, match="no partition 7"):
        known.choose("demo", None, 7, 0)
    assert known.choose("other", None, None, 0) is None


def test_heartbeat_replaces_the_map_unless_the_master_is_not_ready() -> None:
    known = routes("demo#1:1:1#1024")
    assert known.max_bytes("demo") == 1024
    known.heartbeat_answered(heard(code=201))
    assert known.partitions("demo")
    known.heartbeat_answered(heard())
    assert not known.partitions("demo")
    assert known.max_bytes("demo") == 1 << 20


def test_brokers_are_taken_when_their_list_has_a_new_version() -> None:
    known = routes("demo#1:1:1,3:1:1#")
    assert [p.broker.id for p in known.partitions("demo")] == [1], "3 is not in the list"
    assert known.heartbeat().brokerCheckSum == 5
    known.heartbeat_answered(heard("demo#1:1:1,3:1:1#", check_sum=6, brokers=("1:h:9", "3:h:3")))
    assert [p.broker for p in known.partitions("demo")] == [BrokerInfo(1, "h", 9), BrokerInfo(3, "h", 3)]
    assert known.heartbeat().brokerCheckSum == 6
