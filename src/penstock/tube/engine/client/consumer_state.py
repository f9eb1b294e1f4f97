"""State of a consumer: its membership in a group at the master, and each partition that it reads from a broker.

:class:`Membership` holds the partitions that the master assigns. :class:`ClientBalance` chooses its partitions itself;
the master only reports the existing partitions:

    request = member.register();  member.registered(answer)
    request = member.metadata_request();  orders = member.metadata(answer, now)   # the partitions that exist
    request = member.heartbeat();  orders = member.heard(answer, now)

With ``source_count`` members and a different ``node_id`` each, each member holds its share of the partitions; without
it, all partitions. In both cases brokers serve a partition to one member at a time.

:class:`PartitionConsumer` is one partition from its assignment to its release: it creates requests and handles
responses. No IO: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from penstock.errors import ConfigError, LocalProtocolError, RefusedError
from penstock.tube.codec.codes import EXTENSIONS, ErrCode, RebalanceOp, remedy
from penstock.tube.codec.proto import broker_pb2, master_pb2, shared_pb2
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_PORT,
    GROUP_RULE,
    OFFSET_HISTORY_TOPIC,
    TOPIC_RULE,
    UNDEFINED,
    BrokerInfo,
    Partition,
    Subscribed,
    TopicMeta,
    format_bound,
    format_condition,
    partition_ids,
    valid_group,
    valid_topic,
)
from penstock.tube.engine.client.request_session import ClientCredentials
from penstock.tube.record import encode_msg_type

__all__ = [
    "FRESH",
    "LATEST_OFFSET",
    "BoundConsumption",
    "ClientBalance",
    "FetchStep",
    "GroupMember",
    "GroupStart",
    "Membership",
    "PartitionConsumer",
    "PartitionOrders",
]

# --- members of a group ---


REGISTER, UNREGISTER = 31, 32
FRESH = 303
"""qryPriorityId: also read messages that are not on disk yet. Without it filtered consumers of Apache's brokers receive
a message up to 20 seconds late."""


class GroupMember:
    """One member of ``group``. ``filters``: topic -> message types. ``held``: partitions registered at brokers.

    ``session_ms``: session timeout that servers apply to this member; 0: their default.
    """

    def __init__(
        self,
        client_id: str,
        host: str,
        group: str,
        topics: Iterable[str],
        filters: Mapping[str, Iterable[str]],
        *,
        priority: int = FRESH,
        credentials: ClientCredentials | None = None,
        session_ms: int = 0,
    ) -> None:
        names = list(topics)
        if not valid_group(group):
            raise LocalProtocolError(
                f"tube: {group!r} is not a valid group name",
                why=f"a group name is {GROUP_RULE}",
                hint="correct the name",
            )
        if not names:
            raise LocalProtocolError("tube: a consumer needs a topic", hint="set at least one")
        for name in names:
            if not valid_topic(name) and name != OFFSET_HISTORY_TOPIC:
                raise LocalProtocolError(
                    f"tube: {name!r} is not a valid topic name",
                    why=f"a topic name is {TOPIC_RULE}",
                    hint="correct the name",
                )
        self.credentials = credentials
        self.session_ms = session_ms
        self.client_id = client_id
        self.group = group
        self.topics = sorted(set(names))
        self.filters = {topic: frozenset(map(encode_msg_type, items)) for topic, items in filters.items() if items}
        self.token = UNDEFINED
        self.held: set[Partition] = set()
        self.host = host
        self.priority = priority
        if not set(self.filters) <= set(self.topics):
            raise LocalProtocolError(
                f"tube: filters for topics that are not subscribed: {sorted(set(self.filters) - set(self.topics))}",
                hint="subscribe to these topics, or remove the filters",
            )

    def lost(self, partition: Partition) -> None:
        """Remove a partition that is no longer held."""
        self.held.discard(partition)

    def close(self) -> master_pb2.CloseRequestC2M:
        """Return the request that ends the session at the master."""
        return master_pb2.CloseRequestC2M(clientId=self.client_id, groupName=self.group, authInfo=self._certificate())

    def partition_heartbeat(self, partitions: Iterable[Partition]) -> broker_pb2.HeartBeatRequestC2B:
        """Return the heartbeat to the broker of ``partitions``."""
        return broker_pb2.HeartBeatRequestC2B(
            clientId=self.client_id,
            groupName=self.group,
            readStatus=0,
            partitionInfo=[partition.full for partition in sorted(partitions)],
            qryPriorityId=self.priority,
            authInfo=self._authorized(),
        )

    def partition_register(
        self, partition: Partition, read_status: int, *, leave: bool, offset: int | None = None
    ) -> broker_pb2.RegisterRequestC2B:
        """Return a registration at the partition's broker, or with ``leave`` its end.

        ``offset``: start there instead of at the group's offset.
        """
        return broker_pb2.RegisterRequestC2B(
            opType=UNREGISTER if leave else REGISTER,
            clientId=self.client_id,
            groupName=self.group,
            topicName=partition.topic,
            partitionId=partition.id,
            readStatus=read_status,
            filterCondStr=() if leave else sorted(self.filters.get(partition.topic, ())),
            currOffset=offset,
            qryPriorityId=self.priority,
            authInfo=self._authorized(),
            extensions=None if leave else EXTENSIONS,
            sessionTimeoutMs=None if leave else self.session_ms or None,
        )

    def _authorized(self) -> shared_pb2.AuthorizedInfo:
        info = shared_pb2.AuthorizedInfo(visitAuthorizedToken=self.token)
        if self.credentials is not None:
            info.authAuthorizedToken = self.credentials.broker_token()
        return info

    def _certificate(self) -> shared_pb2.MasterCertificateInfo | None:
        return None if self.credentials is None else self.credentials.certificate()

    def _take_token(self, info: shared_pb2.MasterAuthorizedInfo, *, again: bool = False) -> None:
        if self.credentials is not None:
            self.credentials.authorized(info, sign_again=again)
        if info.visitAuthorizedToken:
            self.token = info.visitAuthorizedToken


DONE = 2  # EventProto.status of a finished event, also if a partition could not be registered
REPORT_EVERY = 6  # heartbeats between full reports of what is held


class PartitionOrders(NamedTuple):
    """Orders of the master: partitions to acquire, partitions to release, whether to register again."""

    take: tuple[Partition, ...] = ()
    release: tuple[Partition, ...] = ()
    register: bool = False


class BoundConsumption(NamedTuple):
    """Bound consumption: the ``members`` of ``session`` start together, each at its ``offsets``.

    Offsets are by partition key (``brokerId:topic:partition``). If two members set an offset for a partition, the
    larger one is used (``select_big``), otherwise the smaller one.
    """

    session: str
    members: int
    offsets: Mapping[str, int]
    select_big: bool = True


class Membership(GroupMember):
    """One member of a group at the master; ``now`` (ms) is the time of its subscription."""

    def __init__(
        self,
        client_id: str,
        host: str,
        group: str,
        topics: Iterable[str],
        filters: Mapping[str, Iterable[str]],
        now: int,
        *,
        bound: BoundConsumption | None = None,
        priority: int = FRESH,
        credentials: ClientCredentials | None = None,
        session_ms: int = 0,
    ) -> None:
        super().__init__(
            client_id, host, group, topics, filters, priority=priority, credentials=credentials, session_ms=session_ms
        )
        self.bound = bound
        self._now = now
        self._not_allocated = True
        self._event: shared_pb2.EventProto | None = None  # being executed
        self._finished: shared_pb2.EventProto | None = None
        self._beats = 0
        self._report = False

    def register(self) -> master_pb2.RegisterRequestC2M:
        """Return a registration; after code 411 with the held partitions."""
        self._event = self._finished = None
        request = master_pb2.RegisterRequestC2M(
            clientId=self.client_id,
            groupName=self.group,
            hostName=self.host,
            topicList=self.topics,
            subscribeInfo=self._subscribed(self.held),
            topicCondition=[format_condition(topic, items) for topic, items in sorted(self.filters.items())],
            requireBound=self.bound is not None,
            sessionTime=self._now,
            groupFlowCheckId=UNDEFINED,
            defFlowCheckId=UNDEFINED,
            qryPriorityId=UNDEFINED,
            authInfo=self._certificate(),
            sessionTimeoutMs=self.session_ms or None,
        )
        if self.bound is not None:
            request.sessionKey = self.bound.session
            request.totalCount = self.bound.members
            request.selectBig = self.bound.select_big
            request.requiredPartition = format_bound(self.bound.offsets)
            request.notAllocated = self._not_allocated
        return request

    def registered(self, answer: master_pb2.RegisterResponseM2C) -> None:
        """Process the successful response to :meth:`register`."""
        self._not_allocated = answer.notAllocated
        self._take_token(answer.authorizedInfo)

    def heartbeat(self) -> master_pb2.HeartRequestC2M:
        """Return the next heartbeat: a finished event, and the held partitions after an event, a change or some
        heartbeats."""
        self._beats += 1
        request = master_pb2.HeartRequestC2M(
            clientId=self.client_id,
            groupName=self.group,
            reportSubscribeInfo=False,
            defFlowCheckId=UNDEFINED,
            groupFlowCheckId=UNDEFINED,
            qryPriorityId=UNDEFINED,
            authInfo=self._certificate(),
        )
        if self._finished is not None or self._report or self._beats % REPORT_EVERY == 0:
            request.reportSubscribeInfo = True
            request.subscribeInfo.extend(self._subscribed(self.held))
        if self._finished is not None:
            request.event.CopyFrom(self._finished)
        return request

    def heartbeat_answered(
        self, request: master_pb2.HeartRequestC2M, answer: master_pb2.HeartResponseM2C
    ) -> PartitionOrders:
        """Return the orders in the response to ``request``. Call :meth:`finished` after executing them."""
        if answer.errCode == ErrCode.HB_NO_NODE:
            return PartitionOrders(register=True)
        if answer.errCode == ErrCode.CERTIFICATE_FAILURE and self.credentials is not None:
            self.credentials.refused()
            return PartitionOrders(register=True)
        if answer.errCode != ErrCode.SUCCESS:
            return PartitionOrders()
        self._take_token(answer.authorizedInfo, again=answer.requireAuth)
        if request.HasField("event"):
            self._finished = None
        if request.reportSubscribeInfo:
            self._report = False
        event = answer.event
        if not answer.HasField("event") or event.rebalanceId <= 0:
            return PartitionOrders()
        partitions = tuple(item.partition for item in map(Subscribed.parse, event.subscribeInfo))
        if event.opType in {RebalanceOp.CONNECT, RebalanceOp.ONLY_CONNECT}:
            orders = PartitionOrders(take=partitions)
        elif event.opType in {RebalanceOp.DISCONNECT, RebalanceOp.ONLY_DISCONNECT}:
            orders = PartitionOrders(release=partitions)
        else:
            # REPORT: the next heartbeat reports all held partitions. An unknown operation is reported as done without
            # effect.
            self._report = True
            orders = PartitionOrders()
        self._event = shared_pb2.EventProto()
        self._event.CopyFrom(event)
        if orders == PartitionOrders():
            self.finished()
        return orders

    def finished(self) -> None:
        """Register that the event was executed as far as possible: the next heartbeat reports it and the held
        partitions."""
        if self._event is not None:
            self._event.status = DONE
            self._finished, self._event = self._event, None

    def lost(self, partition: Partition) -> None:
        """Register that the partition is no longer held: the next heartbeat reports it, and the master assigns it to a
        member."""
        super().lost(partition)
        self._report = True

    def _subscribed(self, partitions: Iterable[Partition]) -> list[str]:
        return [Subscribed(self.client_id, self.group, partition).format() for partition in sorted(partitions)]


# --- members that choose their partitions ---


OWN_REPORT_EVERY = 60  # heartbeats between full reports of what is held


class ClientBalance(GroupMember):
    """One member that chooses its partitions. ``assigned``: partitions set by the application; None: its share of
    all."""

    def __init__(
        self,
        client_id: str,
        host: str,
        group: str,
        topics: Iterable[str],
        filters: Mapping[str, Iterable[str]],
        *,
        source_count: int = 0,
        node_id: int = 0,
        priority: int = FRESH,
        credentials: ClientCredentials | None = None,
        session_ms: int = 0,
        default_port: int = DEFAULT_BROKER_PORT,
    ) -> None:
        super().__init__(
            client_id, host, group, topics, filters, priority=priority, credentials=credentials, session_ms=session_ms
        )
        self._default_port = default_port
        if source_count and not 0 <= node_id < source_count:
            raise ConfigError(
                f"tube: node_id: got {node_id}", option="node_id", hint=f"set a number from 0 to {source_count - 1}"
            )
        self.assigned: frozenset[str] | None = None
        self._source_count = source_count
        self._node_id = node_id
        self._brokers: dict[int, BrokerInfo] = {}
        self._brokers_id = UNDEFINED
        self._topics: dict[str, TopicMeta] = {}
        self._topics_id = UNDEFINED
        self._assigned_at = 0
        self._beats = 0
        self._report = False

    def register(self) -> master_pb2.RegisterRequestC2MV2:
        """Return a registration; after code 411 with the held partitions."""
        self._brokers_id = self._topics_id = UNDEFINED
        return master_pb2.RegisterRequestC2MV2(
            clientId=self.client_id,
            groupName=self.group,
            hostName=self.host,
            sourceCount=self._source_count or UNDEFINED,
            nodeId=self._node_id,
            topicList=self.topics,
            topicCondition=[format_condition(topic, items) for topic, items in sorted(self.filters.items())],
            subRepInfo=self._holding(report=bool(self.held)),
            authInfo=self._certificate(),
            sessionTimeoutMs=self.session_ms or None,
        )

    def registered(self, answer: master_pb2.RegisterResponseM2CV2) -> None:
        """Process the successful response to :meth:`register`."""
        self._take_token(answer.authorizedInfo)
        self._take_brokers(answer.brokerConfigId, answer.brokerConfigList)

    def metadata_request(self) -> master_pb2.GetPartMetaRequestC2M:
        """Return the request for the existing partitions."""
        return master_pb2.GetPartMetaRequestC2M(
            clientId=self.client_id,
            groupName=self.group,
            brokerConfigId=self._brokers_id,
            topicMetaInfoId=self._topics_id,
            authInfo=self._certificate(),
        )

    def metadata(self, answer: master_pb2.GetPartMetaResponseM2C, now: int) -> PartitionOrders:
        """Process the response to :meth:`metadata_request`; return the orders that follow."""
        if answer.errCode == ErrCode.HB_NO_NODE:
            return PartitionOrders(register=True)
        _accepted(answer.errCode, answer.errMsg)
        self._take_brokers(answer.brokerConfigId, answer.brokerConfigList)
        self._take_topics(answer.topicMetaInfoId, answer.topicMetaInfoList, now)
        return self.orders()

    def heartbeat(self) -> master_pb2.HeartRequestC2MV2:
        """Return the next heartbeat to the master; at intervals it reports all held partitions."""
        self._beats += 1
        return master_pb2.HeartRequestC2MV2(
            clientId=self.client_id,
            groupName=self.group,
            subRepInfo=self._holding(report=self._report or self._beats % OWN_REPORT_EVERY == 1),
            authInfo=self._certificate(),
        )

    def heartbeat_answered(self, answer: master_pb2.HeartResponseM2CV2, now: int) -> PartitionOrders:
        """Process the response to :meth:`heartbeat`; return the orders that follow."""
        if answer.errCode == ErrCode.HB_NO_NODE:
            return PartitionOrders(register=True)
        _accepted(answer.errCode, answer.errMsg)
        self._report = False
        self._take_token(answer.authorizedInfo, again=answer.opsTaskInfo.requireAuth)
        self._take_brokers(answer.brokerConfigId, answer.brokerConfigList)
        if answer.topicMetaInfoList:
            self._take_topics(answer.topicMetaInfoId, answer.topicMetaInfoList, now)
        return self.orders()

    def partitions(self) -> dict[Partition, bool]:
        """Return every partition of the group's topics, in order, and whether it may currently be consumed."""
        found = {}
        for topic, meta in sorted(self._topics.items()):
            for item, open_ in meta.brokers:
                broker = self._brokers.get(item.broker_id)
                for number in partition_ids(item.partitions, item.stores) if broker is not None else ():
                    assert broker is not None
                    found[Partition(broker, topic, number)] = open_
        return dict(sorted(found.items()))

    def orders(self) -> PartitionOrders:
        """Return the partitions to acquire and to release."""
        known = self.partitions()
        if self.assigned is not None:
            wanted = {partition for partition in known if partition.key in self.assigned}
        else:
            count = self._source_count or 1
            wanted = {partition for turn, partition in enumerate(known) if turn % count == self._node_id % count}
        take = tuple(sorted(partition for partition in wanted - self.held if known[partition]))
        return PartitionOrders(take, tuple(sorted(self.held - wanted)) if known else ())

    def lost(self, partition: Partition) -> None:
        """Register that the partition is no longer held; the next heartbeat reports it."""
        super().lost(partition)
        self._report = True

    def changed(self) -> None:
        """Report the held partitions with the next heartbeat, because they changed."""
        self._report = True

    def _holding(self, *, report: bool) -> master_pb2.ClientSubRepInfo:
        info = master_pb2.ClientSubRepInfo(
            brokerConfigId=self._brokers_id, topicMetaInfoId=self._topics_id, reportSubInfo=report
        )
        if self._assigned_at:
            info.lstAssignedTime = self._assigned_at
        if report:
            by_topic: dict[str, list[str]] = {}
            for partition in sorted(self.held):
                by_topic.setdefault(partition.topic, []).append(f"{partition.broker.id}:{partition.id}")
            info.partSubInfo.extend(f"{topic}#{','.join(items)}" for topic, items in by_topic.items())
        return info

    def _take_brokers(self, number: int, texts: Iterable[str]) -> None:
        brokers = [BrokerInfo.parse(text, self._default_port) for text in texts]
        if brokers:
            self._brokers_id = number
            self._brokers = {broker.id: broker for broker in brokers}

    def _take_topics(self, number: int, texts: Iterable[str], now: int) -> None:
        topics = [TopicMeta.parse(text) for text in texts]
        if topics:
            self._topics_id = number
            self._topics = {meta.topic: meta for meta in topics}
        self._assigned_at = now


def _accepted(code: int, text: str) -> None:
    if code != ErrCode.SUCCESS:
        raise RefusedError(
            f"tube: the master refused the consumer: {text}", code=code, text=text, hint=remedy(code, text)
        )


# --- one partition ---


LATEST_OFFSET = (1 << 63) - 28
"""A start offset beyond every log, for which brokers start at the end."""
COMMITS_AT_OFFSETS = 2
"""Version of the extensions since which brokers commit at any offset."""


class GroupStart(Enum):
    """Start of a group without a stored offset; the value is readStatus of the first registration."""

    EARLIEST = 0
    LATEST = 1


class FetchStep(Enum):
    """The next step of a partition."""

    REGISTER = "register"
    GET = "get"
    WAIT = "wait"  # until ``ready_at``
    DELIVER = "deliver"  # messages were received: deliver, then confirm them
    DROP = "drop"  # the partition is no longer held


class PartitionConsumer:
    """One partition: its registration, the result of the last get, and the time of the next request.

    penstock's brokers answer a get when there is a message, or after ``long_poll_ms``. Another broker is polled again
    after 5 ms, then at growing intervals up to ``most_wait_ms``, until it returns a message.

    ``explicit``: a get does not confirm the previous batch. A broker that commits at offsets then delivers messages
    after the unconfirmed ones; with another broker the next get waits until the batch is confirmed.
    """

    FIRST_WAIT_MS = 5

    def __init__(
        self,
        partition: Partition,
        start: GroupStart,
        *,
        most_wait_ms: int = 400,
        long_poll_ms: int = 0,
        want_offsets: bool = False,
        explicit: bool = False,
        offset: int | None = None,
    ) -> None:
        self.partition = partition
        self.registered = False
        self.ready_at = 0
        self.offset = -1  # offset at which the last read began
        self.max_offset = -1
        self.extensions = 0
        self.moves = 0
        """Incremented by each seek: the response to an earlier get is ignored."""
        self._start = start
        self._seek = offset
        self._long_poll_ms = long_poll_ms
        self._want_offsets = want_offsets
        self._explicit = explicit
        self._known = False  # whether it was registered before in this process
        self._verdict = False  # whether the previous batch was processed
        self._asked = False  # whether a get has no response yet
        self._attempts = 0
        self._most_wait_ms = most_wait_ms
        self._wait_ms = self.FIRST_WAIT_MS

    @property
    def read_status(self) -> int:
        """Start offset of a group without a stored offset; a later registration does not skip messages that arrived in
        between."""
        return 0 if self._known else self._start.value

    @property
    def commits_at_offsets(self) -> bool:
        """Whether the broker commits up to any offset; others commit the whole last batch or nothing."""
        return self.extensions >= COMMITS_AT_OFFSETS

    @property
    def reads_ahead(self) -> bool:
        """Whether the next get may be sent before the last batch is confirmed."""
        return self._explicit and self.commits_at_offsets

    @property
    def start_offset(self) -> int | None:
        """Start offset of the next registration; None: the group's stored offset."""
        return self._seek

    def seek(self, offset: int) -> None:
        """Continue at ``offset``: the partition registers again."""
        self.disconnected()
        self._seek = offset
        self.moves += 1
        self.ready_at = 0

    def next_step(self, now: int) -> FetchStep:
        """Return the next step at ``now``: register, get, or wait."""
        if now < self.ready_at:
            return FetchStep.WAIT
        return FetchStep.GET if self.registered else FetchStep.REGISTER

    def register_answer(self, answer: broker_pb2.RegisterResponseB2C, now: int) -> FetchStep:
        """Process the response to a registration: get, register again later, or drop the partition."""
        if answer.errCode == ErrCode.SUCCESS:
            self.registered = self._known = True
            self._verdict = False
            self._attempts = 0
            self._seek = None
            self.extensions = answer.extensions
            self.offset = answer.currOffset
            self.max_offset = answer.maxOffset
            return FetchStep.GET
        if answer.errCode in {ErrCode.PARTITION_OCCUPIED, ErrCode.CERTIFICATE_FAILURE}:
            # Occupied: the last owner's session has not ended yet, or just ended and the next attempt succeeds.
            # Certificate: the token expired, and the next heartbeat to the master returns a new one.
            self._attempts += 1
            if self._attempts > 3:
                return FetchStep.DROP
            return self._retry_after(100 * self._attempts, now)
        if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            return self._retry_after(500, now)
        return FetchStep.DROP

    def get_request(self, client_id: str, group: str) -> broker_pb2.GetMessageRequestC2B:
        """Return the next get, which confirms the previous batch."""
        self._asked = True
        request = broker_pb2.GetMessageRequestC2B(
            clientId=client_id,
            partitionId=self.partition.id,
            groupName=group,
            topicName=self.partition.topic,
            lastPackConsumed=self._verdict and not self.reads_ahead,
            manualCommitOffset=self.reads_ahead,
            escFlowCtrl=False,
        )
        if self.extensions:
            if self._long_poll_ms:
                request.maxWaitMs = self._long_poll_ms
            if self._want_offsets or self.reads_ahead:
                request.wantOffsets = True
        return request

    def get_answer(self, answer: broker_pb2.GetMessageResponseB2C, now: int) -> FetchStep:
        """Process the response to a get: deliver its messages, get again (immediately or later), register again, or
        drop the partition."""
        self._asked = False
        code = answer.errCode
        if code == ErrCode.SUCCESS:
            self.offset = answer.currOffset
            self.max_offset = max(self.max_offset, answer.maxOffset)
            if answer.messages:
                self._wait_ms = self.FIRST_WAIT_MS
                self._verdict = False
                return FetchStep.DELIVER
            self._verdict = True  # no message matched the filter; the broker has moved the offset
            return FetchStep.GET if answer.maxOffset > answer.currOffset else self._idle(now)
        if code == ErrCode.NOT_FOUND:
            self._verdict = True
            # The broker has waited (long poll); if it waited less than requested, pause before the next get.
            return FetchStep.GET if self.extensions and self._long_poll_ms >= 100 else self._idle(now)
        if code in {ErrCode.HB_NO_NODE, ErrCode.UNAUTHORIZED}:
            # The broker has no registration (it restarted, or the session ended): register again at its stored offset.
            self.disconnected()
            return FetchStep.REGISTER
        if code in {ErrCode.DUPLICATE_PARTITION, ErrCode.CERTIFICATE_FAILURE}:
            return FetchStep.DROP
        if code == ErrCode.SERVER_CONSUME_SPEED_LIMIT:
            return self._retry_after(max(answer.minLimitTime, 10), now)
        return self._retry_after(_WAITS_MS.get(code, 300), now)

    def confirmed(self) -> None:
        """Register that the batch was processed: the next get or the release commits it."""
        self._verdict = True

    def disconnected(self) -> None:
        """Register that the registration ended; unconfirmed messages are delivered again."""
        self.registered = False
        self._verdict = False
        self._asked = False

    @property
    def leave_status(self) -> int:
        """Return readStatus of the release: 0 commits the last batch, 1 does not.

        A get without a response has confirmed the last batch. Its response may be in transit: then the last batch of
        the broker is one that this consumer has not received.
        """
        return 0 if self._verdict and not self._asked and not self.reads_ahead else 1

    def _idle(self, now: int) -> FetchStep:
        wait = self._wait_ms
        self._wait_ms = min(wait * 2, self._most_wait_ms)
        return self._retry_after(wait, now)

    def _retry_after(self, ms: int, now: int) -> FetchStep:
        self.ready_at = now + ms
        return FetchStep.WAIT


# Waits of the reference after a response without messages.
_WAITS_MS: dict[int, int] = {ErrCode.FORBIDDEN: 2000, ErrCode.MOVED: 200, ErrCode.SERVICE_UNAVAILABLE: 200}
