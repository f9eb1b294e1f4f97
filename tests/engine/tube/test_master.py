"""Conversations with the master: producers, consumers and brokers, without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import RefusedError
from penstock.tube.codec import envelope
from penstock.tube.codec.envelope import Request
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, BrokerInfo, Partition
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.client.producer_state import Routes
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.master.context import TOKEN_PERIOD_MS
from penstock.tube.engine.master.master import MasterConfig, MasterEngine
from penstock.tube.engine.master.settings import ClusterSetting, TopicSetting
from tests.engine.tube.master_harness import NOW, ask, broker_beat, join_broker, master, raw, report

PARTITIONS = {Partition(BrokerInfo(1, "10.0.0.1", 8123), "demo", number) for number in range(3)}


def consumer(engine: MasterEngine, name: str, *, now: int = NOW, **kind: Any) -> Membership:
    topics, filters, session_ms = kind.get("topics", ["demo"]), kind.get("filters", {}), kind.get("session_ms", 0)
    member = Membership(name, "h", "lake", topics, filters, now, session_ms=session_ms)
    answer = ask(engine, MethodId.CONSUMER_REGISTER, member.register(), now)
    assert answer.errCode == 200, answer.errMsg
    member.registered(answer)
    return member


def beat(engine: MasterEngine, member: Membership, now: int = NOW) -> Any:
    """One heartbeat; orders are carried out at once and reported with the next."""
    request = member.heartbeat()
    answer = ask(engine, MethodId.CONSUMER_HEARTBEAT, request, now)
    orders = member.heartbeat_answered(request, answer)
    member.held |= set(orders.take)
    member.held -= set(orders.release)
    member.finished()
    return answer


# --- producers ---


def test_producer_learns_brokers_then_partitions() -> None:
    engine = master(TopicSetting("demo", 3, 2))
    join_broker(engine)
    routes = Routes("p1", "h")
    routes.topics.add("demo")
    routes.registered(ask(engine, MethodId.PRODUCER_REGISTER, routes.register()))
    assert routes.brokers == {1: BrokerInfo(1, "10.0.0.1", 8123)}
    assert routes.token == NOW
    answer = ask(engine, MethodId.PRODUCER_HEARTBEAT, routes.heartbeat())
    assert list(answer.topicInfos) == ["demo#1:3:2#"]
    assert not answer.brokerInfos
    routes.heartbeat_answered(answer)
    assert [p.id for p in routes.partitions("demo")] == [0, 1, 2, 10000, 10001, 10002]


def test_a_producer_keeps_its_routes_while_the_brokers_are_unavailable() -> None:
    """A Java producer would forget its topics at one heartbeat without any, and fail sends until the next."""
    engine = master(TopicSetting("demo"), TopicSetting("closed", accept_publish=False), TopicSetting("gone", status=1))
    routes = Routes("p1", "h")
    routes.topics |= {"demo", "closed"}

    def beat() -> int:
        answer = ask(engine, MethodId.PRODUCER_HEARTBEAT, routes.heartbeat())
        assert answer.success
        routes.heartbeat_answered(answer)
        return int(answer.errCode)

    assert beat() == 201
    join_broker(engine)
    assert beat() == 200
    known = routes.partitions("demo")
    assert len(known) == 3
    engine = master(
        TopicSetting("demo"), TopicSetting("closed", accept_publish=False)
    )  # a new one, to which no broker has come yet
    assert beat() == 201
    assert routes.partitions("demo") == known
    join_broker(engine)
    ask(engine, MethodId.BROKER_CLOSE, pb.CloseRequestB2M(brokerId="1"))
    assert beat() == 201
    assert routes.partitions("demo") == known
    # What is not served on purpose is taken away.
    for topics in ({"closed"}, {"gone"}, {"none"}, set()):
        routes.topics = topics
        assert beat() == 200
        assert routes.partitions("demo") == []


def test_heartbeat_of_an_unknown_producer_registers_it() -> None:
    engine = master()
    join_broker(engine)
    request = pb.HeartRequestP2M(clientId="go", brokerCheckSum=1, hostName="m:1", topicList=["demo", " ", "none"])
    answer = ask(engine, MethodId.PRODUCER_HEARTBEAT, request)
    assert answer.errCode == 200
    assert list(answer.brokerInfos) == ["1:10.0.0.1: "]
    assert list(answer.topicInfos) == ["demo#1:3:1#"]
    assert "go" in engine.producers
    ask(engine, MethodId.PRODUCER_CLOSE, pb.CloseRequestP2M(clientId="go"))
    assert not engine.producers


def test_producer_may_not_write_the_system_topic_and_expires() -> None:
    engine = master()
    request = pb.HeartRequestP2M(clientId="p", brokerCheckSum=-1, hostName="h", topicList=[OFFSET_HISTORY_TOPIC])
    answer = ask(engine, MethodId.PRODUCER_HEARTBEAT, request)
    assert (answer.success, answer.errCode, answer.brokerCheckSum) == (False, 400, -1)
    del request.topicList[:]
    ask(engine, MethodId.PRODUCER_HEARTBEAT, request)
    assert engine.next_deadline() == NOW + 30_000
    engine.tick(NOW + 29_999)
    assert engine.producers
    engine.tick(NOW + 30_000)
    assert not engine.producers
    assert engine.next_deadline() is None


def test_the_largest_message_size_is_sent_to_clients_that_do_not_know_it() -> None:
    engine = MasterEngine([TopicSetting("demo"), ClusterSetting(max_message_bytes=2 << 20)], NOW)
    java = ask(engine, MethodId.PRODUCER_REGISTER, Routes("p", "h").register())
    assert java.appdConfig.maxMsgSize == 2 << 20
    go = ask(engine, MethodId.PRODUCER_REGISTER, pb.RegisterRequestP2M(clientId="g", brokerCheckSum=-1, hostName="h"))
    assert go.appdConfig.maxMsgSize == 2 << 20


# --- brokers ---


def test_broker_gets_its_configuration_and_a_new_topic_with_a_heartbeat() -> None:
    engine = master()
    join_broker(engine)
    quiet = broker_beat(engine)
    assert not quiet.takeConfInfo
    assert not quiet.needReportData
    engine.topic_stored(TopicSetting("more", 2))
    request = pb.HeartRequestB2M(
        brokerId="1", brokerOnline=True, readStatusRpt=0, writeStatusRpt=0, curBrokerConfId=quiet.curBrokerConfId,
        confCheckSumId=quiet.confCheckSumId, takeConfInfo=False, takeRemovedTopicInfo=False,
    )  # fmt: skip
    news = ask(engine, MethodId.BROKER_HEARTBEAT, request)
    assert news.takeConfInfo
    assert news.needReportData
    assert news.confCheckSumId != quiet.confCheckSumId
    assert list(news.brokerTopicSetConfInfo) == [
        "demo: : : : : : : : :0: : : : : ",
        "more:2: : : : : : : :0: : : : : ",
        "__offset_history__:10: : : : : : : :0: : : : : ",
    ]
    assert engine.cluster.topic_info("more") is None
    done = report(engine, news)
    assert not done.takeConfInfo
    assert not done.needReportData
    info = engine.cluster.topic_info("more")
    assert info is not None
    assert info.format() == "more#1:2:1#"


def test_an_unknown_or_expired_broker_must_register_again() -> None:
    engine = master()
    assert broker_beat(engine).errCode == 411
    join_broker(engine)
    engine.tick(NOW + 30_000)
    answer = broker_beat(engine, NOW + 30_000)
    assert (answer.errCode, answer.success, answer.curBrokerConfId) == (411, False, -2)
    assert engine.cluster.topic_info("demo") is None
    assert engine.cluster.broker_infos() == ["1:10.0.0.1: "], "it stays in the list"
    # Go and C++ clients take a blank for 8123 over TLS too.
    assert engine.cluster.broker_infos(tls=True) == ["1:10.0.0.1:8124"]
    join_broker(engine, NOW + 31_000)
    assert engine.cluster.topic_info("demo") is not None


def test_broker_that_moved_changes_the_version_of_the_list() -> None:
    engine = master()
    join_broker(engine)
    before = engine.cluster.version
    join_broker(engine)
    assert engine.cluster.version == before
    later = NOW + engine.config.limits.broker_session_ms
    engine.tick(later)
    join_broker(engine, later, port=9999)
    assert engine.cluster.version != before
    assert engine.cluster.broker_infos() == ["1:10.0.0.1:9999"]
    ask(engine, MethodId.BROKER_CLOSE, pb.CloseRequestB2M(brokerId="1"))
    assert engine.cluster.topic_info("demo") is None


def test_a_broker_that_was_cut_off_does_not_renew_its_successors_session() -> None:
    engine = master()
    join_broker(engine, connection="old")
    late = NOW + 30_000
    engine.tick(late)
    join_broker(engine, late, port=9999, connection="new")
    known = engine.cluster.brokers[1]
    # The cut is over: its heartbeat says no more than the number. It has to register, and is told that it is taken.
    assert broker_beat(engine, late + 5_000, connection="old").errCode == 411
    with pytest.raises(AssertionError):
        join_broker(engine, late + 5_000, connection="old")
    ask(engine, MethodId.BROKER_CLOSE, pb.CloseRequestB2M(brokerId="1"), late + 5_000, connection="old")
    assert (known.online, known.last_seen, known.info.port) == (True, late, 9999)
    # The successor itself over another connection registers again and is the same.
    assert broker_beat(engine, late + 6_000, connection="newer").errCode == 411
    join_broker(engine, late + 6_000, port=9999, connection="newer")
    assert broker_beat(engine, late + 7_000, connection="newer").errCode == 200
    engine.tick(late + 36_999)
    assert known.online
    engine.tick(late + 37_000)
    assert not known.online


def test_a_second_broker_with_a_number_that_is_taken_is_refused() -> None:
    engine = master()
    join_broker(engine)
    again = pb.RegisterRequestB2M(
        clientId="1:10.0.0.9:8123:2.4.0", brokerOnline=False, enableTls=False, readStatusRpt=0, writeStatusRpt=0,
        curBrokerConfId=0, confCheckSumId=0, brokerDefaultConfInfo="",
    )  # fmt: skip
    refused = ask(engine, MethodId.BROKER_REGISTER, again)
    assert (refused.success, refused.errCode) == (False, 400)
    assert "broker 1 is registered from 10.0.0.1:8123: give this broker another id" in refused.errMsg
    assert engine.cluster.broker_infos() == ["1:10.0.0.1: "], "the first one serves on"
    ask(engine, MethodId.BROKER_CLOSE, pb.CloseRequestB2M(brokerId="1"))
    assert ask(engine, MethodId.BROKER_REGISTER, again).success, "it said goodbye: nobody has the number"


def test_a_broker_that_was_killed_comes_back_at_another_address_at_once() -> None:
    engine = master()
    join_broker(engine, connection="old")
    engine.disconnected("some client's", NOW)
    with pytest.raises(AssertionError):
        join_broker(engine, port=9999, connection="new")
    engine.disconnected("old", NOW)
    assert engine.cluster.brokers[1].online, "a connection may break while the broker serves its clients"
    join_broker(engine, port=9999, connection="new")
    assert engine.cluster.broker_infos() == ["1:10.0.0.1:9999"]
    engine.disconnected("old", NOW)
    with pytest.raises(AssertionError):
        join_broker(engine, connection="third")


def test_a_broker_whose_machine_is_gone_comes_back_at_another_address_when_its_heartbeat_is_overdue() -> None:
    """No connection ended. Its records cannot be in two places: the first machine, if it lives, is refused."""
    engine = master()
    join_broker(engine, connection="old")
    for now in range(NOW + 500, NOW + 5001, 500):
        broker_beat(engine, now, connection="old")
        engine.tick(now)
    member = consumer(engine, "c1", now=NOW + 5000)
    beat(engine, member, NOW + 5000)
    assert {p.broker.port for p in member.held} == {8123}
    late = NOW + 5000 + 500 + 3000
    engine.tick(late - 1)
    with pytest.raises(AssertionError):
        join_broker(engine, late - 1, port=9999, connection="new")
    engine.tick(late)
    join_broker(engine, late, port=9999, connection="new")
    assert engine.cluster.broker_infos() == ["1:10.0.0.1:9999"]
    held: list[set[Partition]] = []
    for now in range(late, late + 3000, 500):
        broker_beat(engine, now, connection="new")
        beat(engine, member, now)
        held.append(set(member.held))
        assert len({(p.topic, p.id) for p in member.held}) == len(member.held), "no partition at both addresses"
    assert {p.broker.port for p in held[-1]} == {9999}

    # The cut is over: the first machine does not get the id back, neither at once nor at a pause of its successor.
    assert broker_beat(engine, late + 3000, connection="old").errCode == 411
    with pytest.raises(AssertionError):
        join_broker(engine, late + 3000, connection="old")
    broker_beat(engine, late + 3500, connection="new")
    engine.tick(late + 8000)
    assert engine.cluster.brokers[1].overdue
    with pytest.raises(AssertionError):
        join_broker(engine, late + 8000, connection="old")


def test_a_second_broker_with_the_same_id_waits_for_the_end_of_the_session_of_the_first() -> None:
    """Two machines have the same id by mistake, and the second one tries again every second."""
    engine = master()
    join_broker(engine, connection="first")

    def refused(now: int, port: int = 9999) -> bool:
        try:
            join_broker(engine, now, port=port, connection="second")
        except AssertionError:
            return True
        return False

    for now in range(NOW, NOW + 10_000, 500):
        broker_beat(engine, now, connection="first")
        engine.tick(now)
        assert refused(now)
    paused = NOW + 9500
    engine.tick(paused + 4000)
    assert engine.cluster.brokers[1].overdue
    assert refused(paused + 4000), "both lived at the same time, so this is another broker"
    engine.disconnected("first", paused + 4000)
    assert refused(paused + 4000), "the first one may register again for three seconds"
    join_broker(engine, paused + 5000, connection="first")
    assert refused(paused + 5000)
    for port in range(1, 40):
        assert refused(paused + 5000, port)
    assert len(engine.cluster.brokers[1].rivals) == 16, "of many addresses the last ones are remembered"
    engine.tick(paused + 35_000)
    assert not engine.cluster.brokers[1].online
    assert not refused(paused + 35_000)


@pytest.mark.parametrize("returns_ms", [500, 29_999, 30_000])
def test_at_a_takeover_of_the_master_the_broker_that_was_registered_keeps_its_id(returns_ms: int) -> None:
    """A second broker with the id, which the previous master refused, registers first at the new one."""
    engine = master()
    join_broker(engine, port=9999, connection="second")
    member = consumer(engine, "c1", session_ms=60_000)
    beat(engine, member)
    for now in range(NOW, NOW + returns_ms, 500):
        broker_beat(engine, now, connection="second")
    back = NOW + returns_ms
    if returns_ms == 30_000:
        with pytest.raises(AssertionError, match=r"broker 1 is registered from 10\.0\.0\.1:9999"):
            join_broker(engine, back, connection="first", was_registered=True)
        return
    join_broker(engine, back, connection="first", was_registered=True)
    assert engine.cluster.brokers[1].info.port == 8123
    assert broker_beat(engine, back, connection="second").errCode == 411
    for was_registered in (True, False):  # it was registered, but at this master only
        with pytest.raises(AssertionError, match=r"broker 1 is registered from 10\.0\.0\.1:8123"):
            join_broker(engine, back, port=9999, connection="second", was_registered=was_registered)
    for now in range(back, back + 3000, 500):
        broker_beat(engine, now, connection="first")
        beat(engine, member, now)
    assert {p.broker.port for p in member.held} == {8123}


def test_of_two_brokers_that_both_were_registered_the_first_one_has_the_id() -> None:
    engine = master()
    join_broker(engine, connection="first", was_registered=True)
    with pytest.raises(AssertionError, match="broker 1 is registered from"):
        join_broker(engine, port=9999, connection="second", was_registered=True)
    broker_beat(engine, NOW + 500, connection="first")


def test_a_killed_brokers_partitions_leave_the_routes_after_its_time_to_reconnect() -> None:
    engine = master(TopicSetting("demo", 3), config=MasterConfig(limits=TubeLimits(broker_reconnect_ms=2000)))
    for number in (1, 2):
        join_broker(engine, number=number, connection=f"broker {number}")
    member = consumer(engine, "c1", session_ms=60_000)
    for _ in range(2):
        beat(engine, member)
    assert {p.broker.id for p in member.held} == {1, 2}

    def routes() -> set[int]:
        answer = ask(engine, MethodId.PRODUCER_HEARTBEAT, producer.heartbeat())
        producer.heartbeat_answered(answer)
        assert answer.errCode == 200
        return {p.broker.id for p in producer.partitions("demo")}

    producer = Routes("p1", "h")
    producer.topics.add("demo")
    producer.registered(ask(engine, MethodId.PRODUCER_REGISTER, producer.register()))
    assert routes() == {1, 2}
    assert engine.disconnected("broker 2", NOW + 500), "the shell sets its timer to the new deadline"
    assert not engine.disconnected("broker 2", NOW + 900)
    assert engine.next_deadline() == NOW + 2500
    engine.tick(NOW + 2499)
    assert routes() == {1, 2}
    engine.tick(NOW + 2500)
    assert routes() == {1}
    held = set(member.held)
    assert not beat(engine, member, NOW + 2500).HasField("event"), "its owner may be reading the rest from it"
    second = consumer(engine, "c2", now=NOW + 2500)
    assert {p.broker.id for p in engine.cluster.partitions(["demo"])} == {1}
    ask(engine, MethodId.CONSUMER_CLOSE, second.close(), NOW + 2600)
    beat(engine, member, NOW + 2600)
    assert held >= member.held

    # It was only cut off: its heartbeat is refused, it registers again and is used again.
    assert broker_beat(engine, NOW + 5000, number=2, connection="again").errCode == 411
    join_broker(engine, NOW + 5000, number=2, connection="again")
    assert routes() == {1, 2}
    engine.disconnected("broker 2", NOW + 5000)
    engine.tick(NOW + 20_000)
    assert routes() == {1, 2}, "the end of the earlier connection came late"


def test_a_broker_that_reconnects_in_time_stays_in_the_routes() -> None:
    engine = master()
    join_broker(engine, connection="first")
    engine.disconnected("first", NOW)
    assert engine.next_deadline() == NOW + 3000
    join_broker(engine, NOW + 2900, connection="second")
    engine.tick(NOW + 3000)
    assert engine.cluster.topic_info("demo") is not None
    assert engine.next_deadline() == NOW + 5901, "its next heartbeat, 1 ms after the first, is overdue"


def test_a_broker_whose_heartbeat_is_overdue_leaves_the_routes_of_producers_only() -> None:
    """The cable of its machine is cut: no connection ends. Broker 1 is penstock's, broker 2 Apache's."""
    engine = master(TopicSetting("demo", 3))
    for number in (1, 2):
        join_broker(engine, number=number, connection=f"broker {number}")

    def routes() -> list[int]:
        info = engine.cluster.topic_info("demo")
        assert info is not None
        return [place.broker_id for place in info.brokers]

    def beats(number: int, interval: int, start: int, end: int) -> None:
        for now in range(start + interval, end + 1, interval):
            assert broker_beat(engine, now, number=number, connection=f"broker {number}").errCode == 200
            engine.tick(now)

    for number in (1, 2):
        broker_beat(engine, NOW + 20, number=number, connection=f"broker {number}")
    beats(2, 8000, NOW, NOW + 16_000)
    assert routes() == [2], "in this test broker 1 was silent meanwhile"
    beats(1, 500, NOW + 16_000, NOW + 30_000)  # its interval falls from the pause of 16 s to that of its heartbeats
    beats(2, 8000, NOW + 16_000, NOW + 24_000)
    assert routes() == [1, 2]
    assert engine.next_deadline() == NOW + 33_500
    engine.tick(NOW + 33_499)
    assert routes() == [1, 2]
    engine.tick(NOW + 33_500)
    assert routes() == [2]
    broker_beat(engine, NOW + 34_000, number=2, connection="broker 2")
    assert {p.broker.id for p in engine.cluster.partitions(["demo"])} == {1, 2}, "consumers keep its partitions"
    engine.stalled(NOW + 34_000, 20_000)
    engine.tick(NOW + 50_000)
    assert routes() == [2], "no heartbeat was read while the master was paused"
    engine.tick(NOW + 54_000)
    assert routes() == [1, 2], "if every broker is overdue, producers wait for them as before"
    assert broker_beat(engine, NOW + 55_000, connection="broker 1").errCode == 200, "it need not register again"
    assert routes() == [1]
    engine.tick(NOW + 64_000)
    assert routes() == [1]
    assert broker_beat(engine, NOW + 64_000, number=2, connection="broker 2").errCode == 411


def test_broker_that_stopped_writing_is_announced_to_consumers_only() -> None:
    engine = master()
    join_broker(engine)
    broker = engine.cluster.brokers[1]
    ask(
        engine,
        MethodId.BROKER_HEARTBEAT,
        pb.HeartRequestB2M(
            brokerId="1", brokerOnline=True, readStatusRpt=0, writeStatusRpt=-1, curBrokerConfId=broker.config_id,
            confCheckSumId=broker.check_sum, takeConfInfo=False, takeRemovedTopicInfo=False,
        ),
    )  # fmt: skip
    assert engine.cluster.topic_info("demo") is None
    assert len(engine.cluster.partitions(["demo"])) == 3


@pytest.mark.parametrize("text", ["x", "", "1.5"])
def test_broker_id_that_is_no_number(text: str) -> None:
    assert ask(master(), MethodId.BROKER_CLOSE, pb.CloseRequestB2M(brokerId=text)).errCode == 400


def test_tokens_change_and_brokers_hear_of_the_next_one_first() -> None:
    engine, period = master(), TOKEN_PERIOD_MS
    join_broker(engine)
    later = broker_beat(engine, NOW + period)
    assert later.brokerAuthorizedInfo.visitAuthorizedToken == f"{NOW},{NOW + period}"
    client = ask(engine, MethodId.PRODUCER_REGISTER, Routes("p", "h").register(), NOW + 2 * period)
    assert client.authorizedInfo.visitAuthorizedToken == NOW + period


# --- consumers ---


def test_first_heartbeat_after_registration_carries_the_partitions() -> None:
    engine = master()
    join_broker(engine)
    member = consumer(engine, "c1")
    answer = beat(engine, member)
    assert answer.event.opType == 10
    assert answer.event.rebalanceId > 0
    assert not answer.event.HasField("status"), "the master does not set it"
    assert answer.notAllocated
    assert member.held == PARTITIONS
    quiet = beat(engine, member)
    assert not quiet.HasField("event"), "Go takes a present event for an order"
    assert not quiet.notAllocated


def test_members_share_and_take_over() -> None:
    engine = master()
    join_broker(engine)
    first, second = consumer(engine, "c1"), consumer(engine, "c2")
    for _ in range(4):
        beat(engine, first)
        beat(engine, second)
    assert first.held | second.held == PARTITIONS
    assert not first.held & second.held
    ask(engine, MethodId.CONSUMER_CLOSE, first.close())
    beat(engine, second)
    assert second.held == PARTITIONS
    broker_beat(engine, NOW + 29_000)
    engine.tick(NOW + 30_000)
    assert not engine.groups, "the last member expired"
    assert ask(engine, MethodId.CONSUMER_HEARTBEAT, second.heartbeat()).errCode == 411


def test_a_member_may_ask_for_a_shorter_session() -> None:
    engine = master()
    join_broker(engine)
    first, second = consumer(engine, "c1", session_ms=10_000), consumer(engine, "c2")
    for _ in range(4):
        beat(engine, first)
        beat(engine, second)
    assert first.held
    engine.tick(NOW + 3_001)
    assert engine.next_deadline() == NOW + 10_000, "the broker is overdue already"
    assert engine.shortest_session_ms <= 3_000, "the shell looks early enough"
    engine.tick(NOW + 9_999)
    assert set(engine.groups["lake"].members) == {"c1", "c2"}
    engine.tick(NOW + 10_000)
    assert set(engine.groups["lake"].members) == {"c2"}
    broker_beat(engine, NOW + 10_000)
    for _ in range(2):
        beat(engine, second, NOW + 10_000)
    assert second.held == PARTITIONS


def test_members_keep_their_partitions_after_a_restart_of_the_master() -> None:
    old = master()
    join_broker(old)
    members = [consumer(old, "c1"), consumer(old, "c2")]
    for _ in range(4):
        for member in members:
            beat(old, member)
    before = [set(member.held) for member in members]
    new = master()
    for member in members:
        request = member.heartbeat()
        orders = member.heartbeat_answered(request, ask(new, MethodId.CONSUMER_HEARTBEAT, request))
        assert orders.register
        ask(new, MethodId.CONSUMER_REGISTER, member.register())
        beat(new, member)
    join_broker(new)
    for _ in range(4):
        for member in members:
            beat(new, member)
    assert [member.held for member in members] == before
    broker_beat(new, NOW + 14_000)
    for member in members:
        beat(new, member, NOW + 14_000)
    new.tick(NOW + 15_000)
    assert new.groups["lake"].settle_until == 0


def test_consumer_of_a_broker_that_comes_later_gets_it_then() -> None:
    engine = master()
    member = consumer(engine, "c1")
    assert not beat(engine, member).HasField("event")
    join_broker(engine)
    beat(engine, member)
    assert member.held == PARTITIONS


REGISTER = pb.RegisterRequestC2M(clientId="x", groupName="lake", hostName="h", topicList=["demo"])


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (400, pb.RegisterRequestC2M(clientId="a@b")),
        (400, pb.RegisterRequestC2M(clientId=" ")),
        (400, pb.RegisterRequestC2M(groupName="1")),
        (400, pb.RegisterRequestC2M(hostName=" ")),
        (400, pb.RegisterRequestC2M(topicCondition=["#x"])),
        (400, pb.RegisterRequestC2M(subscribeInfo=["nonsense"])),
        (400, pb.RegisterRequestC2M(requireBound=True)),
        (424, pb.RegisterRequestC2M(requireBound=True, sessionKey="k", totalCount=1)),
        (425, pb.RegisterRequestC2M(topicList=[OFFSET_HISTORY_TOPIC])),
        (426, pb.RegisterRequestC2M(topicCondition=["demo#a"])),
        (431, pb.RegisterRequestC2M(topicList=["none"])),
        (200, pb.RegisterRequestC2M(topicCondition=["demo#"])),
    ],
)
def test_registration_that_does_not_fit(code: int, change: pb.RegisterRequestC2M) -> None:
    engine = master()
    consumer(engine, "c1")
    request = pb.RegisterRequestC2M()
    request.CopyFrom(REGISTER)
    request.MergeFrom(change)
    answer = ask(engine, MethodId.CONSUMER_REGISTER, request)
    assert (answer.errCode, answer.success) == (code, code == 200), answer.errMsg


@pytest.mark.parametrize("separator", list("#:@,-;="))
def test_names_with_separators(separator: str) -> None:
    """Refused where they would be taken apart, else given back as they came; and the group's other members go on."""
    engine = master()
    join_broker(engine)
    other = consumer(engine, "c1")
    name = f"a{separator}b"
    for change in (
        pb.RegisterRequestC2M(groupName=name),
        pb.RegisterRequestC2M(topicList=[name]),
        pb.RegisterRequestC2M(topicCondition=[f"{name}#x"]),
        pb.RegisterRequestC2M(subscribeInfo=[f"c1@lake#1:h:8123#{name}:0"]),
    ):
        request = pb.RegisterRequestC2M()
        request.CopyFrom(REGISTER)
        request.MergeFrom(change)
        code = ask(engine, MethodId.CONSUMER_REGISTER, request).errCode
        assert code in {200, 400, 426, 431}, change
    if separator not in "@#":
        member = consumer(engine, name)
        for _ in range(3):
            beat(engine, other)
            answer = beat(engine, member)
        assert {text.partition("@")[0] for text in answer.event.subscribeInfo} <= {name}
        assert member.held
    assert beat(engine, other).errCode == 200


def test_bound_group_checks_its_members() -> None:
    engine = master()
    join_broker(engine)
    bound = pb.RegisterRequestC2M(requireBound=True, sessionKey="k", totalCount=2, selectBig=True)
    bound.requiredPartition = "1:demo:0=28"
    codes = []
    for number, change in enumerate(
        [
            pb.RegisterRequestC2M(),
            pb.RegisterRequestC2M(sessionKey="other"),
            pb.RegisterRequestC2M(selectBig=False),
            pb.RegisterRequestC2M(requiredPartition="1:else:0=28"),
            pb.RegisterRequestC2M(),
        ]
    ):
        request = pb.RegisterRequestC2M()
        for part in (REGISTER, bound, change, pb.RegisterRequestC2M(clientId=f"c{number}")):
            request.MergeFrom(part)
        codes.append(ask(engine, MethodId.CONSUMER_REGISTER, request).errCode)
    assert codes == [200, 427, 428, 400, 200]
    heartbeat = pb.HeartRequestC2M(clientId="c0", groupName="lake", reportSubscribeInfo=False)
    assert ask(engine, MethodId.CONSUMER_HEARTBEAT, heartbeat).event.subscribeInfo


# --- the envelope's side ---


def test_a_standby_master_answers_in_the_form_of_the_request() -> None:
    engine = master(active=False)
    request = Request(7, 1, MethodId.PRODUCER_CLOSE, pb.CloseRequestP2M(clientId="p").SerializeToString(), version=2)
    answer = raw(engine, request)
    assert answer.status == envelope.ERROR
    assert answer.exception == "com.apache.tubemq.corerpc.exception.StandbyException"


@pytest.mark.parametrize(
    ("service", "method", "payload", "status"),
    [
        (1, 0, b"", envelope.FATAL),
        (1, 23, b"", envelope.FATAL),
        (1, 11, b"", envelope.ERROR),
        (1, 13, b"", envelope.ERROR),
        (2, 1, b"", envelope.ERROR),
        (1, 1, b"", envelope.FATAL),
        (1, 3, b"\x0a\x01\xff", envelope.FATAL),
    ],
    ids=["method 0", "unknown", "reserved", "of a broker", "of a service", "required fields", "not UTF-8"],
)
def test_request_that_cannot_be_served(service: int, method: int, payload: bytes, status: int) -> None:
    assert raw(master(), Request(7, service, method, payload)).status == status


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (TopicSetting("demo"), 402),
        (TopicSetting("1x"), 407),
        (TopicSetting("../x"), 407),
        (TopicSetting(OFFSET_HISTORY_TOPIC), 407),
        (TopicSetting("more", 0), 407),
        (TopicSetting("more", 1, 0), 407),
        (TopicSetting("more", 10_000), 407),
    ],
)
def test_topic_that_cannot_be_created(topic: TopicSetting, code: int) -> None:
    with pytest.raises(RefusedError) as caught:
        master().check_new_topic(topic)
    assert caught.value.code == code


def test_brokers_and_filters_are_bounded_and_names_that_cannot_be_are_not_kept() -> None:
    engine = master(config=MasterConfig(limits=TubeLimits(max_brokers=2)))
    for number in (1, 2):
        join_broker(engine, number=number)
    request = pb.RegisterRequestB2M(
        clientId="3:10.0.0.3:8123:2.4.0", brokerOnline=False, enableTls=False, readStatusRpt=0, writeStatusRpt=0,
        curBrokerConfId=0, confCheckSumId=0, brokerDefaultConfInfo="", tlsPort=8124,
    )  # fmt: skip
    assert ask(engine, MethodId.BROKER_REGISTER, request).errCode == 500
    join_broker(engine, number=2)
    beat = pb.HeartRequestP2M(clientId="p", brokerCheckSum=-1, hostName="h", topicList=["demo", "x" * 1_000_000, "-"])
    assert ask(engine, MethodId.PRODUCER_HEARTBEAT, beat).success
    assert engine.producers["p"].topics == ["demo"]
    join = pb.RegisterRequestC2M(
        clientId="c", groupName="group", hostName="h", topicList=["demo"],
        topicCondition=["demo#" + ",".join(map(str, range(501)))],
    )  # fmt: skip
    assert ask(engine, MethodId.CONSUMER_REGISTER, join).errCode == 400
