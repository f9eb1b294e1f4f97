"""Balancing of one group: examples, then random joins, leaves, reports and broker losses against the invariants."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.tube.codec.codes import RebalanceOp
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.engine.master.balance import (
    BoundMember,
    Group,
    RebalanceOrder,
)

BROKERS = {number: BrokerInfo(number, "h", 8000 + number) for number in (1, 2, 3)}


def parts(count: int, topic: str = "demo", broker: int = 1) -> list[Partition]:
    return [Partition(BROKERS[broker], topic, number) for number in range(count)]


def group(*, bound: bool = False) -> Group:
    return Group("g", frozenset({"demo"}), {}, bound=bound)


class Consumer:
    """A well-behaved client: does what it is told at once, reports with its next heartbeat."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.held: set[Partition] = set()
        self.member = group.join(name, (), 0)
        self.done = False

    def beat(self, now: int = 0) -> RebalanceOrder | None:
        self.group.heartbeat(self.member, now, done=self.done, reported=self.held if self.done else None)
        self.done = False
        event = self.group.next_order(self.member, 1)
        if event is not None:
            self.done = True
            if event.op is RebalanceOp.ONLY_CONNECT:
                self.held |= set(event.partitions)
            else:
                self.held -= set(event.partitions)
        return event


def settle(group: Group, consumers: list[Consumer], wanted: list[Partition]) -> int:
    online = {partition.broker.id for partition in wanted}
    moves = 0
    for _ in range(8):
        for consumer in consumers:
            group.rebalance(wanted, online, 0)
            event = consumer.beat()
            moves += len(event.partitions) if event is not None else 0
    return moves


def test_first_heartbeat_after_registration_carries_all_partitions() -> None:
    g = group()
    consumer = Consumer(g, "a")
    g.rebalance(parts(3), {1}, 0)
    event = consumer.beat()
    assert event is not None
    assert event.op is RebalanceOp.ONLY_CONNECT
    assert event.partitions == tuple(parts(3))
    assert not g.allocated
    assert consumer.beat() is None
    assert g.allocated


def test_second_member_gets_its_share_only_after_the_first_let_go() -> None:
    g = group()
    first = Consumer(g, "a")
    g.rebalance(parts(4), {1}, 0)
    first.beat()
    first.beat()
    second = Consumer(g, "b")
    g.rebalance(parts(4), {1}, 0)
    assert second.beat() is None
    release = first.beat()
    assert release is not None
    assert release.op is RebalanceOp.ONLY_DISCONNECT
    assert len(release.partitions) == 2
    g.rebalance(parts(4), {1}, 0)
    assert second.beat() is None, "ordered, not reported"
    first.beat()
    g.rebalance(parts(4), {1}, 0)
    take = second.beat()
    assert take is not None
    assert take.partitions == release.partitions


def test_unannounced_partitions_move_without_a_release() -> None:
    g = group()
    first = Consumer(g, "a")
    g.rebalance(parts(4), {1}, 0)
    second = Consumer(g, "b")
    g.rebalance(parts(4), {1}, 0)
    for consumer in (first, second):
        event = consumer.beat()
        assert event is not None
        assert len(event.partitions) == 2


def test_member_that_left_or_expired_frees_its_partitions() -> None:
    g = group()
    first, second = Consumer(g, "a"), Consumer(g, "b")
    settle(g, [first, second], parts(4))
    assert g.leave("a")
    assert not g.leave("a")
    g.rebalance(parts(4), {1}, 0)
    event = second.beat()
    assert event is not None
    assert set(event.partitions) == first.held


def test_partition_that_a_member_lost_is_given_out_again() -> None:
    g = group()
    consumer = Consumer(g, "a")
    settle(g, [consumer], parts(2))
    g.heartbeat(consumer.member, 0, done=False, reported=parts(1))
    g.rebalance(parts(2), {1}, 0)
    event = g.next_order(consumer.member, 2)
    assert event is not None
    assert event.partitions == (parts(2)[1],)


def test_partitions_of_a_restarted_broker_are_given_to_their_owners_again() -> None:
    g = group()
    wanted = parts(2) + parts(2, broker=2)
    first = Consumer(g, "a")
    settle(g, [first], wanted)
    g.renew(1)
    assert first.beat() == RebalanceOrder(1, RebalanceOp.ONLY_CONNECT, tuple(parts(2)))
    assert settle(g, [first], wanted) == 0
    # What is given up, or to be, is not: the release goes first, and then it is another's.
    second = Consumer(g, "b")
    g.rebalance(wanted, {1, 2}, 0)
    g.renew(1)
    g.renew(2)
    released = first.beat()
    assert released is not None
    assert released.op is RebalanceOp.ONLY_DISCONNECT
    renewed = first.beat()
    assert renewed is not None
    assert set(renewed.partitions) == set(wanted) - set(released.partitions)
    assert settle(g, [first, second], wanted) == 2
    assert second.held == set(released.partitions)


def test_an_event_is_sent_with_every_answer_until_it_is_reported_done() -> None:
    g = group()
    consumer = Consumer(g, "a")
    g.rebalance(parts(2), {1}, 0)
    event = g.next_order(consumer.member, 1)
    for _ in range(3):  # the answer is lost, or the member is still at it
        g.heartbeat(consumer.member, 0, done=False, reported=None)
        g.rebalance(parts(2), {1}, 0)
        assert g.next_order(consumer.member, 2) == event
    g.heartbeat(consumer.member, 0, done=True, reported=parts(2))
    assert g.next_order(consumer.member, 3) is None


@pytest.mark.parametrize("done", [True, False])
def test_a_partition_that_is_occupied_at_its_broker_is_offered_with_the_next_answer(*, done: bool) -> None:
    """Its last reader's session there is not over. ``done``: whether the member says that it is done with the event."""
    g = group()
    consumer = Consumer(g, "a")
    g.rebalance(parts(2), {1}, 0)
    g.next_order(consumer.member, 1)
    for number in range(2, 5):
        g.heartbeat(consumer.member, 0, done=done, reported=parts(1))
        g.rebalance(parts(2), {1}, 0)
        event = g.next_order(consumer.member, number)
        assert event is not None
        assert event.op is RebalanceOp.ONLY_CONNECT
        assert parts(2)[1] in event.partitions


def test_an_expelled_members_partitions_go_to_the_others_as_soon_as_it_let_go() -> None:
    g = group()
    first, second = Consumer(g, "a"), Consumer(g, "b")
    settle(g, [first, second], parts(4))
    given_up = set(first.held)
    g.expel(first.member, 0)
    g.rebalance(parts(4), {1}, 0)
    for _ in range(5):  # learns it, reports it, and is not given it again
        first.beat()
        g.rebalance(parts(4), {1}, 0)
    take = second.beat()
    assert take is not None
    assert set(take.partitions) == given_up
    assert first.held == set()
    settle(g, [first, second], parts(4))
    assert (len(first.held), len(second.held)) == (2, 2), "it takes part again"


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_expelled_member_stays_out_for_its_heartbeats(rounds: int) -> None:
    g = group()
    first, second = Consumer(g, "a"), Consumer(g, "b")
    settle(g, [first, second], parts(4))
    g.expel(first.member, rounds)
    g.rebalance(parts(4), {1}, 0)
    for _ in range(2):
        first.beat()
        g.rebalance(parts(4), {1}, 0)
    for _ in range(2):
        second.beat()
    for _ in range(rounds):
        assert second.held == set(parts(4))
        assert not g.rebalance(parts(4), {1}, 0)
        first.beat()
    assert g.rebalance(parts(4), {1}, 0)


def test_the_only_member_gets_its_partitions_anew() -> None:
    g = group()
    alone = Consumer(g, "a")
    settle(g, [alone], parts(2))
    g.expel(alone.member, 0)
    g.rebalance(parts(2), {1}, 0)
    assert alone.beat() == RebalanceOrder(1, RebalanceOp.ONLY_DISCONNECT, tuple(parts(2)))
    g.heartbeat(alone.member, 0, done=True, reported=())
    g.rebalance(parts(2), {1}, 0)
    assert g.next_order(alone.member, 2) == RebalanceOrder(2, RebalanceOp.ONLY_CONNECT, tuple(parts(2)))


def test_a_topic_that_shrank_is_released_unless_its_broker_is_unavailable() -> None:
    g = group()
    consumer = Consumer(g, "a")
    settle(g, [consumer], parts(3))
    assert not g.rebalance([], set(), 0)
    assert g.rebalance(parts(2), {1}, 0)
    event = consumer.beat()
    assert event is not None
    assert (event.op, event.partitions) == (RebalanceOp.ONLY_DISCONNECT, (parts(3)[2],))


def test_registering_again_keeps_what_is_held_and_after_a_restart_others_may_speak_first() -> None:
    g = group()
    g.settle_until = 100
    g.join("a", parts(2), 0)
    g.rebalance(parts(4), {1}, 0)
    assert len(g.owned) == 2
    g.join("b", parts(4)[2:], 0)
    assert not g.rebalance(parts(4), {1}, 100)
    assert g.owned == {p: "a" if p.id < 2 else "b" for p in parts(4)}


def test_disputed_partition_stays_with_whom_holds_it() -> None:
    g = group()
    newcomer = g.join("n", (), 0)
    g.rebalance(parts(1), {1}, 0)
    g.next_order(newcomer, 1)
    g.join("old", parts(1), 0)
    assert g.owned[parts(1)[0]] == "old"
    g.heartbeat(newcomer, 0, done=True, reported=[])
    assert g.next_order(newcomer, 2) is None
    # Both say that they hold it: the one that had it first keeps it.
    g.heartbeat(newcomer, 0, done=False, reported=parts(1))
    event = g.next_order(newcomer, 3)
    assert event is not None
    assert event.op is RebalanceOp.ONLY_DISCONNECT
    assert g.owned[parts(1)[0]] == "old"


def test_loads_are_even_over_topics_too() -> None:
    g = Group("g", frozenset({"x", "y"}), {}, bound=False)
    wanted = parts(3, "x") + parts(3, "y")
    consumers = [Consumer(g, name) for name in "abc"]
    settle(g, consumers, wanted)
    for consumer in consumers:
        assert sorted(p.topic for p in consumer.held) == ["x", "y"]


def test_bound_group_waits_for_all_and_gives_what_each_named() -> None:
    g = group(bound=True)
    keys = [p.key for p in parts(2)]
    g.join("a", (), 0, BoundMember("s", 2, select_big=True, offsets={keys[0]: 28, keys[1]: 28}))
    g.rebalance(parts(3), {1}, 0)
    assert not g.owned
    g.join("b", (), 0, BoundMember("s", 2, select_big=True, offsets={keys[1]: 56}))
    g.rebalance(parts(3), {1}, 0)
    assert g.owned[parts(2)[0]] == "a"
    assert g.owned[parts(2)[1]] == "b"
    assert len(g.owned) == 3


@pytest.mark.parametrize(("members", "partitions"), [(1, 7), (3, 3), (3, 10), (4, 2)])
def test_moves_when_one_joins_are_no_more_than_needed(members: int, partitions: int) -> None:
    g = group()
    consumers = [Consumer(g, f"c{n}") for n in range(members)]
    settle(g, consumers, parts(partitions))
    consumers.append(Consumer(g, "new"))
    moves = settle(g, consumers, parts(partitions))
    share = partitions // (members + 1)
    assert moves <= 2 * (share + 1)
    loads = sorted(len(c.held) for c in consumers)
    assert loads[-1] - loads[0] <= 1


class Balancing(RuleBasedStateMachine):
    """Members join, leave, crash, lose partitions and answers; brokers come and go."""

    @initialize()
    def start(self) -> None:
        self.group = group()
        self.consumers: dict[str, Consumer] = {}
        self.serving = {1}
        self.names = 0

    def wanted(self) -> list[Partition]:
        return [p for broker in sorted(self.serving) for p in parts(3, broker=broker)]

    def balance(self) -> None:
        self.group.rebalance(self.wanted(), self.serving, 0)

    @precondition(lambda self: len(self.consumers) < 5)
    @rule()
    def join(self) -> None:
        self.names += 1
        self.consumers[f"c{self.names}"] = Consumer(self.group, f"c{self.names}")
        self.balance()

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        consumer = self.consumers[data.draw(st.sampled_from(sorted(self.consumers)))]
        consumer.beat()
        self.balance()

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.consumers)))
        del self.consumers[name]
        self.group.leave(name)
        self.balance()

    @precondition(lambda self: any(c.held for c in self.consumers.values()))
    @rule(data=st.data())
    def lose_partition(self, data: st.DataObject) -> None:
        consumer = self.consumers[data.draw(st.sampled_from(sorted(n for n, c in self.consumers.items() if c.held)))]
        consumer.held.discard(data.draw(st.sampled_from(sorted(consumer.held))))
        self.group.heartbeat(consumer.member, 0, done=consumer.done, reported=consumer.held)
        consumer.done = False
        self.balance()

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def register_again(self, data: st.DataObject) -> None:
        consumer = self.consumers[data.draw(st.sampled_from(sorted(self.consumers)))]
        consumer.member = self.group.join(consumer.member.id, consumer.held, 0)
        consumer.done = False
        self.balance()

    @rule(broker=st.sampled_from([1, 2, 3]))
    def broker_comes_or_goes(self, broker: int) -> None:
        self.serving ^= {broker}
        self.balance()

    @rule(broker=st.sampled_from([1, 2, 3]))
    def broker_restarts(self, broker: int) -> None:
        self.group.renew(broker)

    @invariant()
    def nobody_holds_what_another_holds(self) -> None:
        held = [p for consumer in self.consumers.values() for p in consumer.held]
        assert len(held) == len(set(held))

    @invariant()
    def owners_are_members(self) -> None:
        assert set(self.group.owned.values()) <= set(self.group.members)

    def teardown(self) -> None:
        if not self.consumers:
            return
        for _ in range(12):
            for consumer in self.consumers.values():
                consumer.beat()
                self.balance()
        held = {p for consumer in self.consumers.values() for p in consumer.held}
        assert set(self.wanted()) <= held, "once things are quiet every partition has an owner"
        loads = sorted(sum(p.broker.id in self.serving for p in c.held) for c in self.consumers.values())
        if held == set(self.wanted()):
            assert loads[-1] - loads[0] <= 1


TestBalancing = Balancing.TestCase
