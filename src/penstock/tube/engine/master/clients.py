"""Clients at the master: producers (methods 1 to 3), consumers of a group (4 to 6, and 20 to 22).

A producer requests the brokers that accept its topics. The partitions of a consumer group are assigned by the master
(:mod:`.balance`), or chosen by its members: then the master only reports which partitions exist. Such members agree on
topics, filters and the number of instances; each has its own instance number. The master keeps a version of the group's
partition metadata and sends it to members that hold another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import (
    OFFSET_HISTORY_TOPIC,
    UNDEFINED,
    Partition,
    Subscribed,
    java_trim,
    parse_bound,
    parse_condition,
    valid_topic,
)
from penstock.tube.engine.access import AuthenticationResult
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
from penstock.tube.engine.sessions import RequestContext, SessionOrigin, session_of

__all__ = [
    "ClientBalanceHandler",
    "ClientGroup",
    "ClientMember",
    "ConsumerHandler",
    "ProducerHandler",
    "RegisteredProducer",
    "subscription_of",
]

# --- producers ---


class RegisteredProducer:
    """A producer and the topics that it sends to."""

    __slots__ = ("last_seen", "origin", "topics")

    def __init__(self, now: int, origin: SessionOrigin) -> None:
        self.origin = origin
        self.last_seen = now
        self.topics: list[str] = []


class ProducerHandler:
    """Answers producers. ``known``: producers with a session, by client id."""

    def __init__(self, master: MasterContext) -> None:
        self.known: dict[str, RegisteredProducer] = {}
        self._master = master

    def tick(self, now: int) -> None:
        """Remove producers whose sessions expired."""
        session_ms = self._master.config.limits.producer_session_ms
        for client_id in [c for c, producer in self.known.items() if producer.last_seen + session_ms <= now]:
            del self.known[client_id]

    def register(self, request: pb.RegisterRequestP2M, context: RequestContext) -> Message:
        """Register a producer and return the brokers. Raises RefusedRequest for wrong credentials."""
        client_id = client_id_of(request.clientId, request.hostName)
        passed = self._master.admit(request, None, context)
        self._update(client_id, request.topicList, context)
        answer = pb.RegisterResponseM2P(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            brokerCheckSum=self._master.cluster.version,
            brokerInfos=self._master.broker_infos(context),
            authorizedInfo=self._master.authorized(passed, context.now_ms),
        )
        self._master.client_config(request, answer)
        return answer

    def heartbeat(self, request: pb.HeartRequestP2M, context: RequestContext) -> Message:
        """Renew the session of a producer, and return the partitions of its topics.

        Raises:
            RefusedRequest: its credentials are wrong, or another client uses its id.
        """
        client_id = client_id_of(request.clientId, request.hostName)
        passed = self._master.admit(request, None, context)
        # An unknown producer is registered by its heartbeat, because C++ and Go producers never register again.
        producer = self._update(client_id, request.topicList, context)
        cluster = self._master.cluster
        found = {name: cluster.topic_info(name) for name in producer.topics}
        infos = [info.format() for info in found.values() if info is not None]
        # The Java producer drops all topics after a heartbeat response without topics, and fails its messages until the
        # next heartbeat, 13 s later. Shortly after a start of master or brokers it should keep its topics.
        waits = not infos and any(cluster.awaits_broker(name, reads=request.wantServed) for name in producer.topics)
        answer = pb.HeartResponseM2P(
            success=True,
            errCode=ErrCode.NOT_READY if waits else ErrCode.SUCCESS,
            errMsg="no broker that serves these topics is registered" if waits else OK,
            brokerCheckSum=self._master.cluster.version,
            topicInfos=infos,
            authorizedInfo=self._master.authorized(passed, context.now_ms),
            unavailable=[f"{name}#{cluster.unavailable(name)}" for name, info in found.items() if info is None],
        )
        if request.wantServed:
            answer.served.extend(cluster.served(name).format() for name in producer.topics)
        if passed.renew:
            answer.requireAuth = True
        if request.brokerCheckSum != self._master.cluster.version:
            answer.brokerInfos.extend(self._master.broker_infos(context))
        self._master.client_config(request, answer)
        return answer

    def close(self, request: pb.CloseRequestP2M, context: RequestContext) -> Message:
        """End the session of a producer.

        Raises:
            RefusedRequest: its credentials are wrong, or another client uses its id.
        """
        self._master.admit(request, None, context)
        client_id = java_trim(request.clientId)
        self._master.check_origin(self.known.get(client_id), client_id, context)
        self.known.pop(client_id, None)
        return pb.CloseResponseM2P(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)

    def _update(self, client_id: str, topics: Iterable[str], context: RequestContext) -> RegisteredProducer:
        """Register an unknown producer, renew its session and set its topics."""
        names = sorted({java_trim(name) for name in topics} - {""})
        if len(names) > MAX_TOPICS:
            raise RefusedRequest(ErrCode.BAD_REQUEST, f"{len(names)} topics; at most {MAX_TOPICS} are accepted")
        if OFFSET_HISTORY_TOPIC in names:
            raise RefusedRequest(ErrCode.BAD_REQUEST, f"{OFFSET_HISTORY_TOPIC} is only written by brokers")
        producer = self.known.get(client_id)
        if producer is None:
            if len(self.known) >= self._master.config.limits.max_producers:
                raise RefusedRequest(
                    ErrCode.INTERNAL_SERVER_ERROR, f"the limit of {len(self.known)} producers is reached"
                )
            producer = self.known[client_id] = RegisteredProducer(
                context.now_ms, self._master.origins.origin_of(context)
            )
        elif producer.origin.may_be_continued_by(origin := self._master.origins.origin_of(context)):
            producer.origin = origin
        # Heartbeats over other connections are answered as well: brokers and topics are not secret, and C++ clients
        # stop after an error.
        producer.last_seen = context.now_ms
        producer.topics = [
            name for name in names if valid_topic(name)
        ]  # other names cannot exist, and may have any length
        return producer


# --- groups that the master balances ---


Filters = dict[str, frozenset[str]]


AnyGroup = TypeVar("AnyGroup", Group, "ClientGroup")


def _registered(
    master: MasterContext, groups: Mapping[str, AnyGroup], request: Any, context: RequestContext
) -> tuple[AnyGroup, str, AuthenticationResult]:
    """Authenticate a member of one of ``groups``; return its group, its id and the authentication.

    Raises RefusedRequest if it is not registered, or registered by another connection.
    """
    client_id = client_id_of(request.clientId, None)
    group_name = group_name_of(request.groupName)
    passed = master.admit(request, group_name, context)
    group = groups.get(group_name)
    member = group.members.get(client_id) if group is not None else None
    if group is None or member is None:
        raise RefusedRequest(ErrCode.HB_NO_NODE, f"{client_id} is not registered, register again")
    master.check_origin(member, client_id, context)
    return group, client_id, passed


class ConsumerHandler:
    """Answers consumers. ``taken_elsewhere(group)`` returns True if the group balances by itself."""

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
        """Add a consumer to its group, which is created if necessary; its heartbeats receive partitions.

        Raises:
            RefusedRequest: its credentials or topics are wrong, its subscription differs from that of its group, its id
                is in use, or a limit is reached.
        """
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
                # The consumer holds partitions that this master did not assign: the master was restarted. Other members
                # will report theirs.
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
        """Renew the session of a consumer, record the partitions that it holds, and return those to take or release.

        Raises:
            RefusedRequest: its credentials are wrong, or it is not registered.
        """
        group, client_id, passed = _registered(self._master, self.groups, request, context)
        member = group.members[client_id]
        reported = None
        if request.reportSubscribeInfo:
            reported = self._held(request.subscribeInfo)
        event = member.processing
        # A repeated report (the response to the first one was lost) does not refer to the next order.
        done = event is not None and request.HasField("event") and request.event.rebalanceId == event.rebalance_id
        group.heartbeat(member, context.now_ms, done=done, reported=reported)
        self._rebalance(group, context.now_ms)
        answer = pb.HeartResponseM2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)
        if passed.renew:
            answer.requireAuth = True
        event = group.next_order(member, self._rebalance_id + 1)
        if event is not None:
            # Set only if there is an order: the Go client treats every event as one.
            self._rebalance_id = max(self._rebalance_id, event.rebalance_id)
            answer.event.rebalanceId = event.rebalance_id
            answer.event.opType = event.op
            answer.event.subscribeInfo.extend(
                self._subscribed(client_id, group.name, event.partitions, tls=context.tls)
            )
        self._consumer_answer(request, answer, group, passed, context.now_ms)
        return answer

    def _held(self, texts: Iterable[str]) -> list[Partition]:
        """Return the partitions that a consumer reports as held. Over TLS they have the brokers' TLS ports."""
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
        """Revoke all partitions of a member for ``rounds`` of its heartbeats; returns whether it is a member."""
        group = self.groups.get(group_name)
        member = group.members.get(client_id) if group is not None else None
        if group is None or member is None:
            return False
        group.expel(member, rounds)
        self._rebalance(group, now)
        return True

    def leave(self, group_name: str, client_id: str, now: int) -> bool:
        """Remove a member that closed its session; returns whether it was a member."""
        group = self.groups.get(group_name)
        if group is None or not group.leave(client_id):
            return False
        self._rebalance(group, now)
        return True

    def _consumer_answer(self, request: Any, answer: Any, group: Group, passed: AuthenticationResult, now: int) -> None:
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
        """Assign the partitions of every group again."""
        for group in list(self.groups.values()):
            self._rebalance(group, now)


def subscription_of(master: MasterContext, user: str, group: str, request: Any) -> tuple[frozenset[str], Filters]:
    """Return the requested topics and filters of a consumer of either kind, which ``user`` may read. Raises
    RefusedRequest."""
    topics = frozenset({java_trim(name) for name in request.topicList} - {""})
    if not topics or len(topics) > MAX_TOPICS:
        raise RefusedRequest(ErrCode.BAD_REQUEST, f"{len(topics)} topics; 1 to {MAX_TOPICS} are accepted")
    forbidden = sorted(name for name in topics if not master.may_consume(user, name, group))
    if forbidden:
        text = f"{master.user_label(user)} may not consume topics {', '.join(forbidden)} as group {group}"
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


# --- groups whose members choose ---


META_PUSH_MS = 180_000
"""Time after fetching metadata after which a member gets changes with a heartbeat."""


class ClientMember:
    """One consumer: the partitions it reports to read, and its instance number."""

    __slots__ = ("assigned_at", "id", "last_seen", "node_id", "origin", "partitions", "session_ms")

    def __init__(self, client_id: str, node_id: int, now: int, origin: SessionOrigin) -> None:
        self.origin = origin
        self.id = client_id
        self.node_id = node_id
        self.last_seen = now
        self.session_ms = 0  # set by the handler
        self.assigned_at: int | None = None
        self.partitions: list[str] = []


class ClientGroup:
    """A group whose members balance by themselves. ``source_count`` <= 0: instances have no numbers."""

    def __init__(
        self, name: str, topics: frozenset[str], filters: Mapping[str, frozenset[str]], source_count: int
    ) -> None:
        self.name = name
        self.topics = topics
        self.filters = dict(filters)
        self.source_count = source_count
        self.members: dict[str, ClientMember] = {}
        self.meta: list[str] = []
        self.meta_id = UNDEFINED
        self.from_max_id = UNDEFINED
        """Time (ms) of an administrator's request to continue at the newest messages."""

    def refuse(
        self,
        client_id: str,
        topics: frozenset[str],
        filters: Mapping[str, frozenset[str]],
        source_count: int,
        node_id: int,
    ) -> tuple[int, str] | None:
        """Return the reason why a member cannot join, as error code and text: its subscription must be that of the
        first member."""
        if topics != self.topics:
            return ErrCode.CLIENT_INCONSISTENT_TOPICSET, f"topics {sorted(topics)}, not {sorted(self.topics)}"
        if dict(filters) != self.filters:
            return ErrCode.CLIENT_INCONSISTENT_FILTERSET, "other filter conditions than the group's first member"
        if source_count > 0 or self.source_count > 0:
            if source_count != self.source_count:
                text = f"{source_count} instances, the group's first member said {self.source_count}"
                return ErrCode.CLIENT_INCONSISTENT_SOURCECOUNT, text
            if any(m.node_id == node_id and m.id != client_id for m in self.members.values()):
                return ErrCode.CLIENT_DUPLICATE_INDEXID, f"instance {node_id} is another member"
        return None

    def join(self, client_id: str, node_id: int, now: int, origin: SessionOrigin) -> ClientMember:
        """Register a member, possibly again."""
        member = self.members[client_id] = ClientMember(client_id, node_id, now, origin)
        return member

    def leave(self, client_id: str) -> bool:
        """Remove a member; returns whether it was a member."""
        return self.members.pop(client_id, None) is not None

    def update_meta(self, meta: Iterable[str], now: int) -> None:
        """Set the existing partitions; a change increments the version."""
        fresh = sorted(meta)
        if self.meta_id == UNDEFINED or fresh != self.meta:
            self.meta = fresh
            self.meta_id = max(now, self.meta_id + 1)

    def wants_meta(self, member: ClientMember, meta_id: int, now: int) -> bool:
        """Return True if a heartbeat's response contains the metadata: it changed, and the member was assigned long
        ago."""
        if meta_id == self.meta_id or not member.partitions:
            return False
        return member.assigned_at is not None and now - member.assigned_at > META_PUSH_MS


class ClientBalanceHandler:
    """Answers consumers that balance by themselves. ``taken_elsewhere(group)`` returns True if the master balances the
    group."""

    def __init__(self, master: MasterContext) -> None:
        self.groups: dict[str, ClientGroup] = {}
        self.taken_elsewhere: Callable[[str], bool] = lambda _: False
        self._master = master

    def deadlines(self) -> Iterable[int]:
        """Times at which sessions may expire."""
        for group in self.groups.values():
            for member in group.members.values():
                yield member.last_seen + member.session_ms

    def tick(self, now: int) -> None:
        """Remove members whose sessions expired."""
        for group in list(self.groups.values()):
            for member_id in [m.id for m in group.members.values() if m.last_seen + m.session_ms <= now]:
                self.leave(group.name, member_id)

    def leave(self, group_name: str, client_id: str) -> bool:
        """Remove a member; returns whether it was a member."""
        group = self.groups.get(group_name)
        if group is None or not group.leave(client_id):
            return False
        if not group.members:
            del self.groups[group_name]
        return True

    def register(self, request: pb.RegisterRequestC2MV2, context: RequestContext) -> Message:
        """Answer method 20."""
        client_id = client_id_of(request.clientId, request.hostName)
        group_name = group_name_of(request.groupName)
        passed = self._master.admit(request, group_name, context)
        if request.sourceCount > 0 and not 0 <= request.nodeId < request.sourceCount:
            text = f"instance {request.nodeId} of {request.sourceCount}: expected 0 to {request.sourceCount - 1}"
            raise RefusedRequest(ErrCode.BAD_REQUEST, text)
        topics, filters = subscription_of(self._master, passed.user, group_name, request)
        if self.taken_elsewhere(group_name):
            text = f"[Inconsistency subscribe] {client_id}: the master balances this group"
            raise RefusedRequest(ErrCode.CLIENT_INCONSISTENT_CONSUMETYPE, text)
        group = self.groups.get(group_name)
        self._master.check_free(None if group is None else group.members.get(client_id), client_id, context)
        if group is None:
            if sum(len(g.members) for g in self.groups.values()) >= self._master.config.limits.max_consumers:
                raise RefusedRequest(ErrCode.INTERNAL_SERVER_ERROR, "the limit of registered consumers is reached")
            group = self.groups[group_name] = ClientGroup(group_name, topics, filters, request.sourceCount)
        refusal = group.refuse(client_id, topics, filters, request.sourceCount, request.nodeId)
        if refusal is not None:
            raise RefusedRequest(refusal[0], f"[Inconsistency subscribe] {client_id}: {refusal[1]}")
        member = group.join(client_id, request.nodeId, context.now_ms, self._master.origins.origin_of(context))
        member.session_ms = session_of(request.sessionTimeoutMs, self._master.config.consumer_session_ms)
        _report(member, request)
        answer = pb.RegisterResponseM2CV2(errCode=ErrCode.SUCCESS, errMsg=OK)
        self._common(request, answer, group, request.subRepInfo.brokerConfigId, passed, context)
        return answer

    def heartbeat(self, request: pb.HeartRequestC2MV2, context: RequestContext) -> Message:
        """Answer method 21."""
        group, member, passed = self._known(request, context)
        _report(member, request)
        answer = pb.HeartResponseM2CV2(errCode=ErrCode.SUCCESS, errMsg=OK)
        self._common(request, answer, group, request.subRepInfo.brokerConfigId, passed, context)
        self._refresh(group, context.now_ms)
        answer.topicMetaInfoId = group.meta_id
        if group.wants_meta(member, request.subRepInfo.topicMetaInfoId, context.now_ms):
            answer.topicMetaInfoList.extend(group.meta)
        return answer

    def metadata(self, request: pb.GetPartMetaRequestC2M, context: RequestContext) -> Message:
        """Answer method 22."""
        group, _, _ = self._known(request, context)
        self._refresh(group, context.now_ms)
        cluster = self._master.cluster
        answer = pb.GetPartMetaResponseM2C(
            errCode=ErrCode.SUCCESS, errMsg=OK, brokerConfigId=cluster.version, topicMetaInfoId=group.meta_id
        )
        if request.brokerConfigId != cluster.version:
            answer.brokerConfigList.extend(self._master.broker_infos(context))
        if request.topicMetaInfoId != group.meta_id:
            answer.topicMetaInfoList.extend(group.meta)
        return answer

    def _known(self, request: Any, context: RequestContext) -> tuple[ClientGroup, ClientMember, AuthenticationResult]:
        group, client_id, passed = _registered(self._master, self.groups, request, context)
        member = group.members[client_id]
        member.last_seen = context.now_ms
        return group, member, passed

    def _refresh(self, group: ClientGroup, now: int) -> None:
        controls = self._master.controls
        names = [name for name in sorted(group.topics) if controls.may_consume(group.name, name)]
        group.update_meta([meta.format() for meta in self._master.cluster.topic_metas(names)], now)

    def _common(
        self,
        request: Any,
        answer: Any,
        group: ClientGroup,
        broker_config_id: int,
        passed: AuthenticationResult,
        context: RequestContext,
    ) -> None:
        cluster, controls = self._master.cluster, self._master.controls
        answer.brokerConfigId = cluster.version
        if broker_config_id != cluster.version:
            answer.brokerConfigList.extend(self._master.broker_infos(context))
        ops = answer.opsTaskInfo
        ops.SetInParent()  # set even if it is empty, as in the reference
        known = request.opsTaskInfo
        default_id, default_rules = controls.default_flow(known.defFlowCheckId)
        group_id, group_rules = controls.group_flow(group.name, known.groupFlowCheckId)
        if default_id != UNDEFINED:
            ops.defFlowCheckId = default_id
            if known.defFlowCheckId != default_id:
                ops.defFlowControlInfo = default_rules
        if group_id != UNDEFINED:
            ops.groupFlowCheckId = group_id
            if known.groupFlowCheckId != group_id:
                ops.groupFlowControlInfo = group_rules
        setting = controls.groups.get(group.name)
        if setting is not None and setting.query_priority != UNDEFINED:
            ops.qryPriorityId = setting.query_priority
        if group.from_max_id != UNDEFINED:
            ops.csmFrmMaxOffsetCtrlId = group.from_max_id
        if passed.renew:
            ops.requireAuth = True
        answer.authorizedInfo.CopyFrom(self._master.authorized(passed, context.now_ms))


def _report(member: ClientMember, request: Any) -> None:
    """Update a member from its report."""
    info = request.subRepInfo
    if info.HasField("lstAssignedTime"):
        member.assigned_at = info.lstAssignedTime
    if info.reportSubInfo:
        member.partitions = list(info.partSubInfo)
