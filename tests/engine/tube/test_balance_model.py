"""Model of a whole master: members and brokers join, beat, lose answers, leave, vanish and expire; it restarts.

A member counts as the owner of what it believes to hold while its session lasts: from its last request on, for as long
as the master keeps it. Brokers keep registrations for as long; after that they tell a member that comes back which
partitions another has taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.master.balance import Group, Member, RebalanceOrder
from penstock.tube.engine.master.context import SETTLE_MS
from penstock.tube.engine.master.master import MasterConfig, MasterEngine
from penstock.tube.engine.master.settings import TopicSetting
from tests.engine.tube.master_harness import NOW, ask, broker_beat, join_broker, master

T = TypeVar("T")

CONFIG = MasterConfig()
SESSION = CONFIG.consumer_session_ms
TOPICS = (TopicSetting("demo"), TopicSetting("side", 2))
EACH = 5  # partitions of a broker
BROKERS = (1, 2, 3)
MOST = 5
ROUND_MS = 9_000
ROUNDS = 12


class Client:
    """A well-behaved member. ``contact``: when the master last heard of it; ``readers``: who took what last."""

    def __init__(self, name: str, now: int, readers: dict[Partition, Client]) -> None:
        self.readers = readers
        self.member = Membership(name, "h", "lake", [topic.name for topic in TOPICS], {}, now)
        self.contact = now
        self.lease_ms = SESSION
        self.took = 0

    @property
    def held(self) -> set[Partition]:
        return self.member.held

    def register(self, engine: MasterEngine, now: int) -> None:
        self.contact, self.lease_ms = now, SESSION
        self.member.registered(ask(engine, MethodId.CONSUMER_REGISTER, self.member.register(), now))

    def beat(self, engine: MasterEngine, now: int, *, lost: bool = False) -> bool:
        """A heartbeat, the answer to which may be lost; whether it was told something."""
        request = self.member.heartbeat()
        answer = ask(engine, MethodId.CONSUMER_HEARTBEAT, request, now)
        if answer.errCode == 200:
            self.contact, self.lease_ms = now, SESSION
        if lost:
            return True
        orders = self.member.heartbeat_answered(request, answer)
        if orders.register:
            self.register(engine, now)
            return True
        self.took += len(set(orders.take) - self.held)
        for partition in orders.take:
            last = self.readers.get(partition)
            if last is not None and last is not self and now >= last.contact + last.lease_ms:
                last.member.lost(partition)
            self.readers[partition] = self
        self.held.update(orders.take)
        self.held.difference_update(orders.release)
        self.member.finished()
        return bool(orders.take or orders.release)


class Model:
    """What can happen are the methods in ``EVENTS``; each does nothing where it cannot happen just then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self.now = NOW
        self.topics = {topic.name: topic for topic in TOPICS}  # they outlast the master
        self.engine = master(*TOPICS, config=CONFIG)
        self.clients: dict[str, Client] = {}
        self.gone: list[Client] = []  # they ended or hang: nobody told the master
        self.readers: dict[Partition, Client] = {}
        self.names = 0
        self.joined: set[int] = set()
        self.most_moves = 0
        self.broker_joins()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            event = self.random.choice(EVENTS)
            self.trace.append(event.__name__)
            event(self)
            self.nobody_holds_what_another_holds()
        self.gets_quiet()

    # What happens

    def joins(self) -> None:
        if len(self.clients) < MOST:
            self.names += 1
            client = self.clients[f"c{self.names}"] = Client(f"c{self.names}", self.now, self.readers)
            client.register(self.engine, self.now)
            self.most_moves += self._share()

    def beats(self) -> None:
        for client in self._one_of(self.clients.values()):
            client.beat(self.engine, self.now)

    def loses_an_answer(self) -> None:
        """What it was told may be told again, or to another."""
        for client in self._one_of(self.clients.values()):
            self.most_moves += len(client.held) + self._share()
            client.beat(self.engine, self.now, lost=True)

    def leaves(self) -> None:
        for client in self._one_of(self.clients.values()):
            del self.clients[client.member.client_id]
            self.most_moves += len(client.held) + self._share()
            ask(self.engine, MethodId.CONSUMER_CLOSE, client.member.close(), self.now)

    def vanishes(self) -> None:
        for client in self._one_of(self.clients.values()):
            del self.clients[client.member.client_id]
            self.most_moves += len(client.held) + self._share()
            self.gone.append(client)

    def loses_a_partition(self) -> None:
        """The broker has a registration no more."""
        for client in self._one_of(self.clients.values()):
            for partition in self._one_of(sorted(client.held)):
                client.member.lost(partition)
                self.most_moves += 1

    def is_expelled(self) -> None:
        """By an administrator: it gives everything up, and takes part again later."""
        for client in self._one_of(self.clients.values()):
            self.most_moves += len(client.held) + 2 * self._share()
            self.engine.expel("lake", client.member.client_id, self.random.choice([0, 0, 1, 3]), self.now)

    def time_passes(self) -> None:
        """With ``silent`` members do not beat meanwhile, so that their sessions may end."""
        silent = self.random.random() < 0.5
        self.now += self.random.choice([1_000, 10_000, 29_000])
        for number in sorted(self.joined):
            broker_beat(self.engine, self.now, number=number)
        self.engine.tick(self.now)
        for client in self.clients.values():
            if not silent:
                client.beat(self.engine, self.now)
            if silent or client.contact < self.now:
                self.most_moves += len(client.held) + self._share()

    def broker_joins(self) -> None:
        number = self.random.choice(BROKERS)
        join_broker(self.engine, self.now, number=number)
        if number not in self.joined:
            self.most_moves += EACH + self._share()
        self.joined.add(number)
        self._register_brokers()

    def broker_is_lost(self) -> None:
        """It ends without a word: its session ends with time."""
        for number in self._one_of(sorted(self.joined)):
            self.joined.discard(number)
            self.most_moves += self._share()

    def changes_on_a_broker(self) -> None:
        """A topic is closed for consumers on one of its brokers, or opened again."""
        for number in self._one_of(sorted(self.joined)):
            topic = self.topics["side"]
            here = topic.at(number)
            changed = topic.changed({number: here._replace(accept_subscribe=not here.accept_subscribe)})
            self.topics["side"] = changed
            self.engine.stored(changed, self.now)
            if self.engine.cluster.brokers[number].online:
                join_broker(self.engine, self.now, number=number)
                self.most_moves += EACH + self._share()

    def master_restarts(self) -> None:
        """It knows nobody; members have a while to say what they hold before anything is given out.

        Of one that hangs it cannot know: brokers refuse others what that one registered, for as long as they keep it.
        """
        self.engine = master(*self.topics.values(), config=CONFIG)
        for number in sorted(self.joined):
            join_broker(self.engine, self.now, number=number)
        for client in self.gone:
            client.lease_ms = 0
        for client in self.clients.values():
            client.lease_ms = min(client.lease_ms, SETTLE_MS)
        self.most_moves += EACH * len(BROKERS)
        for client in self.clients.values():
            client.beat(self.engine, self.now)

    # What always holds

    def nobody_holds_what_another_holds(self) -> None:
        living = [c for c in (*self.clients.values(), *self.gone) if self.now < c.contact + c.lease_ms]
        held = [partition for client in living for partition in client.held]
        assert len(held) == len(set(held)), sorted(held)

    def gets_quiet(self) -> None:
        """Every partition that is there has one owner, shares are even, and nothing moves any more."""
        for _ in range(ROUNDS):
            self._round()
        told = [self._round() for _ in range(3)]
        assert not any(told), "orders without a reason"
        wanted = set(self.engine.cluster.partitions([topic.name for topic in TOPICS]))
        opened = [topic.at(number) for topic in self.topics.values() for number in self.joined]
        assert len(wanted) == sum(here.partitions for here in opened if here.accept_subscribe)
        held = {p for client in self.clients.values() for p in client.held}
        if self.clients:
            assert wanted <= held
        if self.clients and wanted == held:
            shares = sorted(len(client.held) for client in self.clients.values())
            assert shares[-1] - shares[0] <= 1
        moves = sum(client.took for client in (*self.clients.values(), *self.gone))
        assert moves <= self.most_moves, "more moves than what happened since needs"
        for client in (*self.clients.values(), *self.gone):
            client.took = 0
        self.most_moves = 0

    # Means

    def _one_of(self, things: Iterable[T]) -> list[T]:
        """One of them, or none where there is none."""
        found = list(things)
        return [self.random.choice(found)] if found else []

    def _round(self) -> bool:
        self.now += ROUND_MS
        for number in sorted(self.joined):
            broker_beat(self.engine, self.now, number=number)
        self.engine.tick(self.now)
        self._register_brokers()
        told = [client.beat(self.engine, self.now) for client in self.clients.values()]
        return any(told)

    def _register_brokers(self) -> None:
        for number in sorted(self.joined):
            if not self.engine.cluster.brokers[number].online:
                join_broker(self.engine, self.now, number=number)
                self.most_moves += EACH

    def _share(self) -> int:
        """Most that has to move to, or from, one member for shares to be even."""
        return EACH * len(BROKERS) // max(len(self.clients), 1) + 1


EVENTS: list[Callable[[Model], None]] = [
    *[Model.joins] * 2, *[Model.beats] * 4, Model.loses_an_answer, Model.leaves, Model.vanishes,
    Model.loses_a_partition, Model.is_expelled, Model.time_passes, Model.broker_joins, Model.broker_is_lost,
    Model.master_restarts, Model.changes_on_a_broker, Model.gets_quiet,
]  # fmt: skip


def run(seeds: Iterable[int]) -> None:
    for seed in seeds:
        model = Model(seed)
        try:
            model.run(model.random.randint(3, 16))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {', '.join(model.trace)}: {error}") from error


@pytest.mark.parametrize("block", range(4))
def test_random_events_keep_the_invariants(block: int) -> None:
    run(range(block * 75, block * 75 + 75))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_random_events_keep_the_invariants_for_longer() -> None:
    run(range(300, 10_000))


def test_the_model_sees_a_partition_given_before_it_was_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away = Group._revoke

    def too_early(group: Group, partition: Partition, member: Member) -> int:
        orders = take_away(group, partition, member)
        group.owned.pop(partition, None)
        return orders

    monkeypatch.setattr(Group, "_revoke", too_early)
    with pytest.raises(AssertionError, match="seed"):
        run(range(300))


def test_the_model_sees_an_order_that_is_lost_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    next_order = Group.next_order

    def only_once(group: Group, member: Member, rebalance_id: int) -> RebalanceOrder | None:
        return None if member.processing is not None else next_order(group, member, rebalance_id)

    monkeypatch.setattr(Group, "next_order", only_once)
    with pytest.raises(AssertionError, match="seed"):
        run(range(300))
