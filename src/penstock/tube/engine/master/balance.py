"""Assignment of partitions in a consumer group that the master balances: members, held partitions, pending orders.

The protocol does not have an assignment message. The master answers a heartbeat with at most one order (register for or
release these partitions), and a later heartbeat of the consumer reports its execution. The rules:

* A partition belongs to at most one member. The next member gets it after its owner reported the release, left or
  expired (release before take); an order to release it is not sufficient.
* The partitions that a member reports as held are authoritative, regardless of its orders.
* An event is sent with every response until it is reported done, because a response may be lost. Taking a partition
  that is held, or releasing one that is not, changes nothing in Java, Go, C++ and penstock clients.
* The assignment is computed when a member registers, so that its first heartbeat returns partitions.
* Partitions move only as far as needed for a difference of at most one partition between members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Final, NamedTuple

from penstock.tube.codec.codes import RebalanceOp
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.sessions import SessionOrigin

__all__ = ["BoundMember", "Group", "Member", "RebalanceOrder", "most_brokers"]


_RELEASES: Final = frozenset({RebalanceOp.DISCONNECT, RebalanceOp.ONLY_DISCONNECT})


class RebalanceOrder(NamedTuple):
    """One order to a member."""

    rebalance_id: int
    op: RebalanceOp
    partitions: tuple[Partition, ...]


class BoundMember(NamedTuple):
    """Bound consumption of a member: start offsets by partition key. Partitions are assigned after all members have
    joined."""

    session_key: str
    total: int
    select_big: bool
    offsets: Mapping[str, int]


class Member:
    """One consumer. ``held`` has the partitions that it reported; pending orders are in ``to_release`` and
    ``to_connect``.

    ``to_renew``: partitions it holds whose broker restarted and lost the registration. ``processing``: the event that
    was sent and not yet reported done.
    """

    __slots__ = (
        "bound", "held", "id", "last_seen", "origin", "out", "processing", "session_ms", "to_connect", "to_release",
        "to_renew", "yields",
    )  # fmt: skip

    def __init__(
        self, member_id: str, now: int, bound: BoundMember | None = None, origin: SessionOrigin | None = None
    ) -> None:
        self.id = member_id
        self.origin = SessionOrigin("") if origin is None else origin
        self.last_seen = now
        self.session_ms = 0  # set by the handler
        self.bound = bound
        self.held: set[Partition] = set()
        self.to_release: set[Partition] = set()
        self.to_connect: set[Partition] = set()
        self.to_renew: set[Partition] = set()
        self.processing: RebalanceOrder | None = None
        self.out = 0  # heartbeats for which it gets no partitions, requested by an administrator
        self.yields = False  # an administrator revoked its partitions: others get them first


class Group:
    """A consumer group: topics and filters of its first member, and the partitions of its members."""

    __slots__ = ("allocated", "bound", "filters", "members", "name", "owned", "settle_until", "topics")

    def __init__(
        self, name: str, topics: frozenset[str], filters: Mapping[str, frozenset[str]], *, bound: bool
    ) -> None:
        self.name = name
        self.topics = topics
        self.filters = dict(filters)
        self.bound = bound
        self.allocated = False
        self.members: dict[str, Member] = {}
        # Partitions that are held, ordered to be taken, or not yet released. All others are free.
        self.owned: dict[Partition, str] = {}
        self.settle_until = 0  # until then partitions are only recorded, not assigned (after a restart of the master)

    def join(
        self,
        member_id: str,
        held: Iterable[Partition],
        now: int,
        bound: BoundMember | None = None,
        origin: SessionOrigin | None = None,
    ) -> Member:
        """Register a member, possibly again: earlier orders are discarded, and its report of held partitions is
        used."""
        self.leave(member_id)
        member = self.members[member_id] = Member(member_id, now, bound, origin)
        self._report(member, set(held))
        # The master has restarted since the member registered, and the broker may have as well: both restart with their
        # node.
        member.to_renew = set(member.held)
        return member

    def leave(self, member_id: str) -> bool:
        """Remove a member and free its partitions; returns whether it was a member."""
        member = self.members.pop(member_id, None)
        if member is None:
            return False
        for partition in [p for p, owner in self.owned.items() if owner == member_id]:
            del self.owned[partition]
        return True

    def expel(self, member: Member, rounds: int) -> None:
        """Revoke all partitions of ``member``; it gets none for ``rounds`` heartbeats after the release.

        It is included again after the others were notified of their partitions, or immediately if it is the only member
        and ``rounds`` is 0.
        """
        member.out = rounds
        member.yields = True
        for partition in [p for p, owner in self.owned.items() if owner == member.id]:
            self._revoke(partition, member)

    def renew(self, broker_id: int) -> None:
        """Order members to register again for their partitions of a restarted broker.

        Members ignore partitions that they believe to hold. After a refused get they have dropped the partition, and
        the order makes them register immediately: Java, Go and C++ clients report held partitions only with every
        seventh heartbeat, and the partition would not be read until then.
        """
        for partition, owner in self.owned.items():
            member = self.members[owner]
            if partition.broker.id == broker_id and partition in member.held:
                member.to_renew.add(partition)

    def heartbeat(self, member: Member, now: int, *, done: bool, reported: Iterable[Partition] | None) -> None:
        """Process a heartbeat. ``done``: it reports a finished event; ``reported``: all held partitions, or None
        without a report."""
        member.last_seen = now
        event = member.processing
        if member.yields and not done and not _is_releasing(member):
            member.out = max(member.out - 1, 0)
            # Before the others were notified, balancing would return the released partitions to it.
            untold = any(other.to_connect for other in self.members.values() if other is not member)
            member.yields = member.out > 0 or untold
        if done and event is not None:
            member.processing = None
            self.allocated = True
            if event.op in _RELEASES:
                self._released(member, event.partitions)
            else:
                member.held.update(event.partitions)
        if reported is not None:
            self._report(member, set(reported))

    def next_order(self, member: Member, rebalance_id: int) -> RebalanceOrder | None:
        """Return the order to send with the response to this heartbeat; releases precede takes."""
        event = member.processing
        if event is not None and event.op not in _RELEASES:  # other members may hold its partitions
            own = tuple(p for p in event.partitions if self.owned.get(p) == member.id)
            event = member.processing = event._replace(partitions=own) if own else None
        if event is not None:
            return event
        if member.to_release:
            event = RebalanceOrder(rebalance_id, RebalanceOp.ONLY_DISCONNECT, tuple(sorted(member.to_release)))
            member.to_release = set()
        elif take := member.to_connect | {p for p in member.to_renew if self.owned.get(p) == member.id}:
            event = RebalanceOrder(rebalance_id, RebalanceOp.ONLY_CONNECT, tuple(sorted(take)))
            member.to_connect, member.to_renew = set(), set()
        else:
            return None
        member.processing = event
        return event

    def rebalance(self, partitions: Iterable[Partition], online: Set[int], now: int) -> int:
        """Assign free partitions and order releases until loads differ by at most one; returns the number of orders.

        ``partitions`` are all partitions of the group's topics on the brokers with the ids ``online``. Other owned
        partitions are released, but only if their broker is online: an offline broker may return with them (all brokers
        do after a restart of the master).
        """
        wanted = set(partitions)
        orders = 0
        for partition, owner in list(self.owned.items()):
            if partition not in wanted and partition.broker.id in online:
                orders += self._revoke(partition, self.members[owner])
        if not self._eligible_members() or now < self.settle_until:
            return orders
        free = sorted(wanted.difference(self.owned))
        if self.bound and not self.allocated:
            if not self._complete():
                return orders
            free = self._assign_required(free)
        load = self._load()
        for partition in free:
            member = min(
                self._eligible_members(), key=lambda m: (_count(load[m.id], partition.topic), len(load[m.id]), m.id)
            )
            self._assign(partition, member)
            load[member.id].add(partition)
            orders += 1
        if self.bound and not self.allocated:
            return orders
        return orders + self._balance_loads({m.id: load[m.id] for m in self._eligible_members()}, wanted)

    def _eligible_members(self) -> list[Member]:
        """Return the members that may get partitions; members that yield are included only if there are no others."""
        members = [member for member in self.members.values() if not member.out]
        return [member for member in members if not member.yields] or members

    def _balance_loads(self, load: dict[str, set[Partition]], wanted: set[Partition]) -> int:
        # Partitions that are being released will be assigned to the member with the fewest: count them for that member,
        # to avoid further orders.
        for partition in sorted(p for p in self._releasing() if p in wanted):
            load[min(load, key=lambda m: (len(load[m]), m))].add(partition)
        orders = 0
        while True:
            most = max(load, key=lambda m: (len(load[m]), m))
            least = min(load, key=lambda m: (len(load[m]), m))
            if len(load[most]) - len(load[least]) < 2:
                return orders
            giver = self.members[most]
            candidates = [p for p in load[most] if self.owned.get(p) == most and p not in giver.to_release]
            if not candidates:
                return orders
            partition = max(
                candidates,
                key=lambda p: (p in giver.to_connect, _count(load[most], p.topic) - _count(load[least], p.topic), p),
            )
            load[most].discard(partition)
            load[least].add(partition)
            orders += 1
            if self._revoke(partition, giver) and partition not in self.owned:
                self._assign(partition, self.members[least])  # the order was not sent yet

    def _load(self) -> dict[str, set[Partition]]:
        releasing = self._releasing()
        load: dict[str, set[Partition]] = {member_id: set() for member_id in self.members}
        for partition, owner in self.owned.items():
            if partition not in releasing:
                load[owner].add(partition)
        return load

    def _releasing(self) -> set[Partition]:
        found: set[Partition] = set()
        for member in self.members.values():
            found |= member.to_release
            event = member.processing
            if event is not None and event.op in _RELEASES:
                found.update(event.partitions)
        return {p for p in found if p in self.owned}

    def _assign(self, partition: Partition, member: Member) -> None:
        self.owned[partition] = member.id
        member.to_connect.add(partition)

    def _revoke(self, partition: Partition, member: Member) -> int:
        if partition in member.to_connect:
            member.to_connect.discard(partition)
            del self.owned[partition]
            return 1
        event = member.processing
        leaving = event is not None and event.op is RebalanceOp.ONLY_DISCONNECT and partition in event.partitions
        if leaving or partition in member.to_release:
            return 0
        member.to_release.add(partition)
        return 1

    def _released(self, member: Member, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            member.held.discard(partition)
            if self.owned.get(partition) == member.id:
                del self.owned[partition]

    def _report(self, member: Member, reported: set[Partition]) -> None:
        """Update ``owned`` from a member's report."""
        member.held = reported
        ordered = set(member.to_connect)
        if member.processing is not None:
            ordered.update(member.processing.partitions)
        lost = [p for p, owner in self.owned.items() if owner == member.id and p not in reported and p not in ordered]
        for partition in lost:
            del self.owned[partition]
            member.to_release.discard(partition)
        for partition in sorted(reported):
            owner = self.owned.get(partition)
            if owner is None:
                self.owned[partition] = member.id
            elif owner != member.id:
                self._resolve_conflict(partition, member, self.members[owner])
        # An order to release a partition that the member does not hold has no effect.
        member.to_release &= reported

    def _resolve_conflict(self, partition: Partition, reporter: Member, owner: Member) -> None:
        """Decide between two members that claim a partition: the one that reports it as held wins."""
        if partition in owner.held:
            reporter.to_release.add(partition)
            return
        if partition in owner.to_connect:
            owner.to_connect.discard(partition)
        else:
            owner.to_release.add(partition)
        self.owned[partition] = reporter.id

    def _complete(self) -> bool:
        return all(m.bound is not None and m.bound.total <= len(self.members) for m in self.members.values())

    def _assign_required(self, free: list[Partition]) -> list[Partition]:
        """Assign each required partition to the member that requires it; returns the other partitions."""
        left = []
        for partition in free:
            best: Member | None = None
            for member in self.members.values():
                named = member.bound is not None and partition.key in member.bound.offsets
                if named and (best is None or _is_preferred(partition.key, member, best)):
                    best = member
            if best is None:
                left.append(partition)
            else:
                self._assign(partition, best)
        return left


def _is_releasing(member: Member) -> bool:
    """Return True if the member was ordered to release partitions and has not reported the release."""
    event = member.processing
    return bool(member.to_release) or (event is not None and event.op in _RELEASES)


def _is_preferred(key: str, member: Member, best: Member) -> bool:
    assert member.bound is not None
    assert best.bound is not None
    ours, theirs = member.bound.offsets[key], best.bound.offsets[key]
    return ours >= theirs if member.bound.select_big else ours < theirs


def most_brokers(partitions: Iterable[Partition]) -> int:
    """Return the number of brokers of the topic with the most brokers."""
    return max(Counter(topic for _, topic in {(p.broker.id, p.topic) for p in partitions}).values(), default=0)


def _count(partitions: set[Partition], topic: str) -> int:
    return sum(1 for partition in partitions if partition.topic == topic)
