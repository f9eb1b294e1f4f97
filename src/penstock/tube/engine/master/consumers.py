"""Consumer groups that the master balances (methods 4 to 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import (
    UNDEFINED,
    Partition,
    Subscribed,
    java_trim,
    parse_bound,
    parse_condition,
)
from penstock.tube.engine.access import Passed
from penstock.tube.engine.master.balance import BoundMember, Group, most_brokers
from penstock.tube.engine.master.context import (
    MAX_FILTERS,
    MAX_TOPICS,
    OK,
    SETTLE_MS,
    MasterContext,
    RefusedRequest,
    client_id_of,
    group_name_of,
)
from penstock.tube.engine.sessions import RequestContext, session_of

__all__ = ["ConsumerHandler", "subscription_of"]

Filters = dict[str, frozenset[str]]


class ConsumerHandler:
    """Answers consumers. ``taken_elsewhere(group)``: that group balances by itself."""

    def __init__(self, master: MasterContext) -> None:
        self.groups: dict[str, Group] = {}
        self.rebalances = 0
        self.taken_elsewhere: Callable[[str], bool] = lambda _: False
        self._master = master
        self._rebalance_id = 0

    def deadlines(self) -> Iterable[int]:
        """Times at which sessions may expire and the waiting of new groups ends."""
        for group in self.groups.values():
            for member in group.members.values():
                yield member.last_seen + member.session_ms
            if group.settle_until:
                yield group.settle_until

    def tick(self, now: int) -> None:
        """End sessions that expired by ``now`` and assign their partitions to other members."""
        for group in list(self.groups.values()):
            late = [m.id for m in group.members.values() if m.last_seen + m.session_ms <= now]
            for member_id in late:
                group.leave(member_id)
            settled = 0 < group.settle_until <= now
            if settled:
                group.settle_until = 0
            if late or settled:
                self._rebalance(group, now)

    def register(self, request: pb.RegisterRequestC2M, context: RequestContext) -> Message:
        client_id = client_id_of(request.clientId, request.hostName)
        group_name = group_name_of(request.groupName)
        passed = self._master.admit(request, group_name, context)
        topics, filters = subscription_of(self._master, passed.user, group_name, request)
        bound = _bound(request, topics) if request.requireBound else None
        held = self._held(request.subscribeInfo)
        group = self.groups.get(group_name)
        self._master.check_free(None if group is None else group.members.get(client_id), client_id, context)
        if group is None or not group.members:
            if self.taken_elsewhere(group_name):
                text = f"[Inconsistency subscribe] {client_id}: the group balances by itself (client balance)"
                raise RefusedRequest(ErrCode.CLIENT_INCONSISTENT_CONSUMETYPE, text)
            if sum(len(g.members) for g in self.groups.values()) >= self._master.config.limits.max_consumers:
                raise RefusedRequest(ErrCode.INTERNAL_SERVER_ERROR, "the limit of registered consumers is reached")
            allocated = group is not None and group.allocated and bound is None
            group = self.groups[group_name] = Group(group_name, topics, filters, bound=bound is not None)
            group.allocated = allocated or bool(held)
            if held:
                # The consumer holds partitions that this master did not assign: the master is new. Other members will
                # report theirs.
                group.settle_until = context.now_ms + SETTLE_MS
        else:
            _check_same(group, client_id, topics, filters, bound)
        member = group.join(client_id, held, context.now_ms, bound, self._master.origins.origin_of(context))
        member.session_ms = session_of(request.sessionTimeoutMs, self._master.config.consumer_session_ms)
        self._rebalance(group, context.now_ms)
        answer = pb.RegisterResponseM2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)
        self._consumer_answer(request, answer, group, passed, context.now_ms)
        return answer

    def heartbeat(self, request: pb.HeartRequestC2M, context: RequestContext) -> Message:
        client_id = client_id_of(request.clientId, None)
        group_name = group_name_of(request.groupName)
        passed = self._master.admit(request, group_name, context)
        group = self.groups.get(group_name)
        member = group.members.get(client_id) if group is not None else None
        if group is None or member is None:
            raise RefusedRequest(ErrCode.HB_NO_NODE, f"{client_id} is not registered, register again")
        self._master.check_origin(member, client_id, context)
        reported = None
        if request.reportSubscribeInfo:
            reported = self._held(request.subscribeInfo)
        event = member.processing
        # A repeated report (the response to the first was lost) does not refer to the next order.
        done = event is not None and request.HasField("event") and request.event.rebalanceId == event.rebalance_id
        group.heartbeat(member, context.now_ms, done=done, reported=reported)
        self._rebalance(group, context.now_ms)
        answer = pb.HeartResponseM2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)
        if passed.renew:
            answer.requireAuth = True
        event = group.next_event(member, self._rebalance_id + 1)
        if event is not None:
            # Only if there is one: the Go client treats a present event as an order.
            self._rebalance_id = max(self._rebalance_id, event.rebalance_id)
            answer.event.rebalanceId = event.rebalance_id
            answer.event.opType = event.op
            answer.event.subscribeInfo.extend(
                self._subscribed(client_id, group.name, event.partitions, tls=context.tls)
            )
        self._consumer_answer(request, answer, group, passed, context.now_ms)
        return answer

    def _held(self, texts: Iterable[str]) -> list[Partition]:
        """Partitions that a consumer reports to hold. Over TLS it names brokers with their TLS ports."""
        brokers = self._master.cluster.brokers
        held = []
        for item in map(Subscribed.parse, texts):
            broker = brokers.get(item.partition.broker.id)
            named = item.partition.broker
            held.append(
                item.partition._replace(broker=broker.info)
                if broker is not None and named == broker.tls_info
                else item.partition
            )
        return held

    def _subscribed(self, client_id: str, group: str, partitions: Iterable[Partition], *, tls: bool) -> list[str]:
        if tls:
            brokers = self._master.cluster.brokers
            partitions = [
                p._replace(broker=brokers[p.broker.id].tls_info) if p.broker.id in brokers else p for p in partitions
            ]
        return [Subscribed(client_id, group, partition).format() for partition in partitions]

    def expel(self, group_name: str, client_id: str, rounds: int, now: int) -> bool:
        """Take all partitions from a member for ``rounds`` of its heartbeats; returns whether it is a member."""
        group = self.groups.get(group_name)
        member = group.members.get(client_id) if group is not None else None
        if group is None or member is None:
            return False
        group.expel(member, rounds)
        self._rebalance(group, now)
        return True

    def leave(self, group_name: str, client_id: str, now: int) -> bool:
        """Remove a member that closed its session; returns whether it was one."""
        group = self.groups.get(group_name)
        if group is None or not group.leave(client_id):
            return False
        self._rebalance(group, now)
        return True

    def _consumer_answer(self, request: Any, answer: Any, group: Group, passed: Passed, now: int) -> None:
        answer.notAllocated = not group.allocated
        controls = self._master.controls
        if request.HasField("defFlowCheckId") or request.HasField("groupFlowCheckId"):
            answer.defFlowCheckId, answer.defFlowControlInfo = controls.default_flow(request.defFlowCheckId)
            held = request.groupFlowCheckId
            answer.groupFlowCheckId, answer.groupFlowControlInfo = controls.group_flow(group.name, held)
        answer.ssdStoreId = UNDEFINED
        setting = controls.groups.get(group.name)
        answer.qryPriorityId = UNDEFINED if setting is None else setting.query_priority
        answer.authorizedInfo.CopyFrom(self._master.authorized(passed, now))

    def _rebalance(self, group: Group, now: int) -> None:
        if not group.members:
            del self.groups[group.name]
            return
        cluster, controls = self._master.cluster, self._master.controls
        partitions = cluster.partitions([name for name in group.topics if controls.may_consume(group.name, name)])
        if not group.bound and controls.too_few(group.name, most_brokers(partitions), len(group.members)):
            partitions = []
        if group.rebalance(partitions, self._master.cluster.reporting(), now):
            self._rebalance_id += 1
            self.rebalances += 1

    def broker_restarted(self, broker_id: int) -> None:
        """Renew registrations: the restarted broker has lost them."""
        for group in self.groups.values():
            group.renew(broker_id)

    def rebalance_all(self, now: int) -> None:
        for group in list(self.groups.values()):
            self._rebalance(group, now)


def subscription_of(master: MasterContext, user: str, group: str, request: Any) -> tuple[frozenset[str], Filters]:
    """Topics and filters that a consumer of either kind asks for and ``user`` may read. Raises RefusedRequest."""
    topics = frozenset({java_trim(name) for name in request.topicList} - {""})
    if not topics or len(topics) > MAX_TOPICS:
        raise RefusedRequest(ErrCode.BAD_REQUEST, f"{len(topics)} topics; 1 to {MAX_TOPICS} are accepted")
    forbidden = sorted(name for name in topics if not master.may_consume(user, name, group))
    if forbidden:
        text = f"{master.who(user)} may not consume topics {forbidden} as group {group}"
        raise RefusedRequest(ErrCode.CONSUME_GROUP_FORBIDDEN, text)
    missing = sorted(name for name in topics if not master.cluster.deployed(name))
    if missing:
        raise RefusedRequest(ErrCode.TOPIC_NOT_DEPLOYED, f"Requested topic [[{', '.join(missing)}]] not deployed!")
    filters = {topic: items for topic, items in map(parse_condition, request.topicCondition) if items}
    if any(len(items) > MAX_FILTERS for items in filters.values()):
        raise RefusedRequest(ErrCode.BAD_REQUEST, f"at most {MAX_FILTERS} filters per topic are accepted")
    refusal = master.controls.refuse(group, topics, filters)
    if refusal is not None:
        raise RefusedRequest(*refusal)
    return topics, filters


def _bound(request: pb.RegisterRequestC2M, topics: frozenset[str]) -> BoundMember:
    session_key = java_trim(request.sessionKey)
    if not session_key or request.totalCount <= 0:
        raise RefusedRequest(ErrCode.BAD_REQUEST, "bound consumption needs a session key and the number of members")
    offsets = parse_bound(request.requiredPartition)
    foreign = sorted(key for key in offsets if key.split(":")[1] not in topics)
    if foreign:
        raise RefusedRequest(ErrCode.BAD_REQUEST, f"required partitions {foreign} are not of the topics subscribed")
    return BoundMember(session_key, request.totalCount, request.selectBig, offsets)


def _check_same(
    group: Group, client_id: str, topics: frozenset[str], filters: dict[str, frozenset[str]], bound: BoundMember | None
) -> None:
    """Refuse a member whose subscription differs from that of the group's first member."""
    how = f"[Inconsistency subscribe] {client_id}"
    if group.bound != (bound is not None):
        raise RefusedRequest(
            ErrCode.CLIENT_INCONSISTENT_CONSUMETYPE, f"{how}: bound and unbound members cannot share a group"
        )
    if topics != group.topics:
        raise RefusedRequest(
            ErrCode.CLIENT_INCONSISTENT_TOPICSET, f"{how}: topics {sorted(topics)}, not {sorted(group.topics)}"
        )
    if filters != group.filters:
        raise RefusedRequest(
            ErrCode.CLIENT_INCONSISTENT_FILTERSET, f"{how}: other filter conditions than the group's first member"
        )
    if bound is None:
        return
    first = next((m.bound for m in group.members.values() if m.id != client_id), None)
    if first is None:
        return
    if bound.session_key != first.session_key or bound.total != first.total:
        raise RefusedRequest(ErrCode.CLIENT_INCONSISTENT_SESSIONKEY, f"{how}: other session key or number of members")
    if bound.select_big != first.select_big:
        raise RefusedRequest(
            ErrCode.CLIENT_INCONSISTENT_SELECTBIG, f"{how}: another choice between larger and smaller offset"
        )
