"""Members of a consumer group: what all of them say to brokers, and the member whose partitions the master assigns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.errors import LocalProtocolError
from penstock.tube.codec.codes import EXTENSIONS, ErrCode, RebalanceOp
from penstock.tube.codec.proto import broker_pb2, master_pb2, shared_pb2
from penstock.tube.codec.strings import (
    GROUP_RULE,
    OFFSET_HISTORY_TOPIC,
    TOPIC_RULE,
    UNDEFINED,
    Partition,
    Subscribed,
    format_bound,
    format_condition,
    valid_group,
    valid_topic,
)
from penstock.tube.engine.client.credentials import ClientCredentials
from penstock.tube.record import encode_msg_type

__all__ = ["FRESH", "Bound", "GroupMember", "Membership", "Orders"]

REGISTER, UNREGISTER = 31, 32
FRESH = 303
"""qryPriorityId: read also what is not on disk yet. Without it filtered consumers of Apache's brokers see a message
up to 20 seconds late (tubemq.md 10.5)."""


class GroupMember:
    """One member of ``group``. ``filters``: topic -> message types. ``held``: partitions registered at brokers.

    ``session_ms``: how long servers keep its partitions while it is silent; 0: as they do for everybody.
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
            raise LocalProtocolError(f"tube: {group!r} cannot be a group: {GROUP_RULE}")
        if not names:
            raise LocalProtocolError("tube: a consumer needs a topic", do="name one at least")
        for name in names:
            if not valid_topic(name) and name != OFFSET_HISTORY_TOPIC:
                raise LocalProtocolError(f"tube: {name!r} cannot be a topic: {TOPIC_RULE}")
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
                f"tube: filters for {sorted(set(self.filters) - set(self.topics))}, not subscribed"
            )

    def lost(self, partition: Partition) -> None:
        """The partition is not held any more."""
        self.held.discard(partition)

    def close(self) -> master_pb2.CloseRequestC2M:
        """Goodbye to the master."""
        return master_pb2.CloseRequestC2M(clientId=self.client_id, groupName=self.group, authInfo=self._certificate())

    def partition_heartbeat(self, partitions: Iterable[Partition]) -> broker_pb2.HeartBeatRequestC2B:
        """The heartbeat to the broker of ``partitions``."""
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
        """Registers at the partition's broker, or (``leave``) takes the registration back.

        ``offset``: begin there, whatever position the group has.
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
            self.credentials.take(info, again=again)
        if info.visitAuthorizedToken:
            self.token = info.visitAuthorizedToken


DONE = 2  # EventProto.status: always reported, even where a partition could not be taken
REPORT_EVERY = 6  # heartbeats between full reports of what is held


class Orders(NamedTuple):
    """Orders of the master: partitions to take, to release, whether to register again."""

    take: tuple[Partition, ...] = ()
    release: tuple[Partition, ...] = ()
    register: bool = False


class Bound(NamedTuple):
    """Bound consumption: the ``members`` of ``session`` start together, each at its ``offsets``.

    Those are by partition key (``brokerId:topic:partition``). Where two members name a partition the larger offset wins
    (``select_big``), else the smaller.
    """

    session: str
    members: int
    offsets: Mapping[str, int]
    select_big: bool = True


class Membership(GroupMember):
    """One member of a group at the master; ``now`` (ms) is when it subscribed."""

    def __init__(
        self,
        client_id: str,
        host: str,
        group: str,
        topics: Iterable[str],
        filters: Mapping[str, Iterable[str]],
        now: int,
        *,
        bound: Bound | None = None,
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
        self._event: shared_pb2.EventProto | None = None  # being carried out
        self._finished: shared_pb2.EventProto | None = None
        self._beats = 0
        self._report = False

    def register(self) -> master_pb2.RegisterRequestC2M:
        """Also after a 411: with what is held."""
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
        """The master's answer to ``register``, a success."""
        self._not_allocated = answer.notAllocated
        self._take_token(answer.authorizedInfo)

    def heartbeat(self) -> master_pb2.HeartRequestC2M:
        """The next heartbeat: a finished event, and the held partitions after an event, a change or some heartbeats."""
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

    def heard(self, request: master_pb2.HeartRequestC2M, answer: master_pb2.HeartResponseM2C) -> Orders:
        """The orders in the response to ``request``. After carrying them out call :meth:`finished`."""
        if answer.errCode == ErrCode.HB_NO_NODE:
            return Orders(register=True)
        if answer.errCode == ErrCode.CERTIFICATE_FAILURE and self.credentials is not None:
            self.credentials.refused()
            return Orders(register=True)
        if answer.errCode != ErrCode.SUCCESS:
            return Orders()
        self._take_token(answer.authorizedInfo, again=answer.requireAuth)
        if request.HasField("event"):
            self._finished = None
        if request.reportSubscribeInfo:
            self._report = False
        event = answer.event
        if not answer.HasField("event") or event.rebalanceId <= 0:
            return Orders()
        partitions = tuple(item.partition for item in map(Subscribed.parse, event.subscribeInfo))
        if event.opType in {RebalanceOp.CONNECT, RebalanceOp.ONLY_CONNECT}:
            orders = Orders(take=partitions)
        elif event.opType in {RebalanceOp.DISCONNECT, RebalanceOp.ONLY_DISCONNECT}:
            orders = Orders(release=partitions)
        else:
            # REPORT: the next heartbeat says all that is held. What is unknown is reported as done and not obeyed.
            self._report = True
            orders = Orders()
        self._event = shared_pb2.EventProto()
        self._event.CopyFrom(event)
        if orders == Orders():
            self.finished()
        return orders

    def finished(self) -> None:
        """The event is carried out as far as possible: report it, and the held partitions, with the next heartbeat."""
        if self._event is not None:
            self._event.status = DONE
            self._finished, self._event = self._event, None

    def lost(self, partition: Partition) -> None:
        """The partition is not held any more: the next heartbeat reports it, and the master assigns it to a member."""
        super().lost(partition)
        self._report = True

    def _subscribed(self, partitions: Iterable[Partition]) -> list[str]:
        return [Subscribed(self.client_id, self.group, partition).format() for partition in sorted(partitions)]
