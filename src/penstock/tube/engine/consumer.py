"""The consumer's rules: what it says to the master, and each partition's way from order to registration to release.

``Membership`` is the group's side: register, heartbeat, events. ``Reading`` is one partition's state: what to ask its
broker next and what an answer means. Both are told the time and never wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from penstock.errors import LocalProtocolError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import broker_pb2, master_pb2, shared_pb2
from penstock.tube.codec.strings import UNDEFINED, Partition, Subscribed, format_condition, valid_group, valid_topic
from penstock.tube.engine.balance import Op
from penstock.tube.record import encode_msg_type

__all__ = ["Membership", "Orders", "Reading", "Start", "Step"]

DONE = 2  # EventProto.status: always reported, even where a partition could not be taken
REPORT_EVERY = 6  # heartbeats between full reports of what is held
REGISTER, UNREGISTER = 31, 32


class Start(Enum):
    """Where a group without a position begins; the value is readStatus of the first registration."""

    EARLIEST = 0
    LATEST = 1


class Orders(NamedTuple):
    """What the master's answer wants: partitions to take, to give up, whether to register again."""

    take: tuple[Partition, ...] = ()
    release: tuple[Partition, ...] = ()
    register: bool = False


class Membership:
    """One member of a group at the master. ``filters``: topic -> message types, for topics that have any."""

    def __init__(
        self,
        client_id: str,
        host: str,
        group: str,
        topics: Iterable[str],
        filters: Mapping[str, Iterable[str]],
        now: int,
    ) -> None:
        self.client_id = client_id
        self.group = group
        self.topics = sorted(set(topics))
        self.filters = {topic: frozenset(map(encode_msg_type, items)) for topic, items in filters.items() if items}
        self.token = UNDEFINED
        self.held: set[Partition] = set()
        self._host = host
        self._now = now
        self._event: shared_pb2.EventProto | None = None  # being carried out
        self._finished: shared_pb2.EventProto | None = None
        self._beats = 0
        self._report = False
        if not valid_group(group):
            raise LocalProtocolError(f"tube: {group!r} cannot be a group: a letter, then letters, digits, '_' and '-'")
        wrong = [topic for topic in self.topics if not valid_topic(topic) and topic != "__offset_history__"]
        if wrong or not self.topics:
            raise LocalProtocolError(f"tube: topics {wrong or self.topics} cannot be consumed")
        if not set(self.filters) <= set(self.topics):
            raise LocalProtocolError(
                f"tube: filters for {sorted(set(self.filters) - set(self.topics))}, not subscribed"
            )

    def register(self) -> master_pb2.RegisterRequestC2M:
        """Also after a 411: with what is held."""
        self._event = self._finished = None
        return master_pb2.RegisterRequestC2M(
            clientId=self.client_id,
            groupName=self.group,
            hostName=self._host,
            topicList=self.topics,
            subscribeInfo=self._subscribed(self.held),
            topicCondition=[format_condition(topic, items) for topic, items in sorted(self.filters.items())],
            requireBound=False,
            sessionTime=self._now,
            groupFlowCheckId=UNDEFINED,
            defFlowCheckId=UNDEFINED,
            qryPriorityId=UNDEFINED,
        )

    def registered(self, answer: master_pb2.RegisterResponseM2C) -> None:
        self._take_token(answer.authorizedInfo)

    def heartbeat(self) -> master_pb2.HeartRequestC2M:
        """Carries a finished event, and what is held if an event is finished, it changed, or it is time to say so."""
        self._beats += 1
        request = master_pb2.HeartRequestC2M(
            clientId=self.client_id,
            groupName=self.group,
            reportSubscribeInfo=False,
            defFlowCheckId=UNDEFINED,
            groupFlowCheckId=UNDEFINED,
            qryPriorityId=UNDEFINED,
        )
        if self._finished is not None or self._report or self._beats % REPORT_EVERY == 0:
            request.reportSubscribeInfo = True
            request.subscribeInfo.extend(self._subscribed(self.held))
        if self._finished is not None:
            request.event.CopyFrom(self._finished)
        return request

    def heard(self, request: master_pb2.HeartRequestC2M, answer: master_pb2.HeartResponseM2C) -> Orders:
        """What the answer to ``request`` wants. After carrying orders out call :meth:`finished`."""
        if answer.errCode == ErrCode.HB_NO_NODE:
            return Orders(register=True)
        if answer.errCode != ErrCode.SUCCESS:
            return Orders()
        self._take_token(answer.authorizedInfo)
        if request.HasField("event"):
            self._finished = None
        if request.reportSubscribeInfo:
            self._report = False
        event = answer.event
        if not answer.HasField("event") or event.rebalanceId <= 0:
            return Orders()
        partitions = tuple(item.partition for item in map(Subscribed.parse, event.subscribeInfo))
        if event.opType in {Op.CONNECT, Op.ONLY_CONNECT}:
            orders = Orders(take=partitions)
        elif event.opType in {Op.DISCONNECT, Op.ONLY_DISCONNECT}:
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
        """The event is carried out as far as possible: the next heartbeat says so, with what is held."""
        if self._event is not None:
            self._event.status = DONE
            self._finished, self._event = self._event, None

    def lost(self, partition: Partition) -> None:
        """The partition is not held any more: the next heartbeat says so, and the master gives it to somebody."""
        self.held.discard(partition)
        self._report = True

    def close(self) -> master_pb2.CloseRequestC2M:
        return master_pb2.CloseRequestC2M(clientId=self.client_id, groupName=self.group)

    def partition_heartbeat(self, partitions: Iterable[Partition]) -> broker_pb2.HeartBeatRequestC2B:
        """The heartbeat to the broker of ``partitions``."""
        return broker_pb2.HeartBeatRequestC2B(
            clientId=self.client_id,
            groupName=self.group,
            readStatus=0,
            partitionInfo=[partition.full for partition in sorted(partitions)],
            qryPriorityId=UNDEFINED,
            authInfo=self._authorized(),
        )

    def partition_register(
        self, partition: Partition, read_status: int, *, leave: bool
    ) -> broker_pb2.RegisterRequestC2B:
        """Registers at the partition's broker, or (``leave``) takes the registration back."""
        return broker_pb2.RegisterRequestC2B(
            opType=UNREGISTER if leave else REGISTER,
            clientId=self.client_id,
            groupName=self.group,
            topicName=partition.topic,
            partitionId=partition.id,
            readStatus=read_status,
            filterCondStr=() if leave else sorted(self.filters.get(partition.topic, ())),
            qryPriorityId=UNDEFINED,
            authInfo=self._authorized(),
        )

    def _authorized(self) -> shared_pb2.AuthorizedInfo:
        return shared_pb2.AuthorizedInfo(visitAuthorizedToken=self.token)

    def _take_token(self, info: shared_pb2.MasterAuthorizedInfo) -> None:
        if info.visitAuthorizedToken:
            self.token = info.visitAuthorizedToken

    def _subscribed(self, partitions: Iterable[Partition]) -> list[str]:
        return [Subscribed(self.client_id, self.group, partition).format() for partition in sorted(partitions)]


class Step(Enum):
    """What a partition needs next."""

    REGISTER = "register"
    GET = "get"
    WAIT = "wait"  # until ``ready_at``
    DELIVER = "deliver"  # messages came: hand them out, then confirm
    DROP = "drop"  # it is not ours any more


class Reading:
    """One partition: registered or not, what the last get brought, when to ask again.

    An idle partition is asked after 5 ms, then ever later up to ``most_wait_ms``; the first message ends that.
    """

    FIRST_WAIT_MS = 5

    def __init__(self, partition: Partition, start: Start, *, most_wait_ms: int = 400) -> None:
        self.partition = partition
        self.registered = False
        self.ready_at = 0
        self.offset = -1  # where the last read began
        self.max_offset = -1
        self._start = start
        self._known = False  # was registered before in this process
        self._verdict = False  # what becomes of the batch before the next get
        self._attempts = 0
        self._most_wait_ms = most_wait_ms
        self._wait_ms = self.FIRST_WAIT_MS

    @property
    def read_status(self) -> int:
        """Where to begin without a stored position; a later registration never skips what came in between."""
        return 0 if self._known else self._start.value

    def next_step(self, now: int) -> Step:
        if now < self.ready_at:
            return Step.WAIT
        return Step.GET if self.registered else Step.REGISTER

    def register_answer(self, answer: broker_pb2.RegisterResponseB2C, now: int) -> Step:
        if answer.errCode == ErrCode.SUCCESS:
            self.registered = self._known = True
            self._verdict = False
            self._attempts = 0
            self.offset = answer.currOffset
            self.max_offset = answer.maxOffset
            return Step.GET
        if answer.errCode in {ErrCode.PARTITION_OCCUPIED, ErrCode.CERTIFICATE_FAILURE}:
            # Occupied: the last owner's session is not over yet, or it just was and the next try succeeds.
            self._attempts += 1
            if self._attempts > 3 or answer.errCode == ErrCode.CERTIFICATE_FAILURE:
                return Step.DROP
            return self._later(100 * self._attempts, now)
        if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            return self._later(500, now)
        return Step.DROP

    def get_request(self, client_id: str, group: str) -> broker_pb2.GetMessageRequestC2B:
        """The next get; it carries what became of the batch before."""
        return broker_pb2.GetMessageRequestC2B(
            clientId=client_id,
            partitionId=self.partition.id,
            groupName=group,
            topicName=self.partition.topic,
            lastPackConsumed=self._verdict,
            manualCommitOffset=False,
            escFlowCtrl=False,
        )

    def get_answer(self, answer: broker_pb2.GetMessageResponseB2C, now: int) -> Step:
        code = answer.errCode
        if code == ErrCode.SUCCESS:
            self.offset = answer.currOffset
            self.max_offset = max(self.max_offset, answer.maxOffset)
            if answer.messages:
                self._wait_ms = self.FIRST_WAIT_MS
                self._verdict = False
                return Step.DELIVER
            self._verdict = True  # nothing matched; the broker has moved on by itself
            return Step.GET if answer.maxOffset > answer.currOffset else self._idle(now)
        if code == ErrCode.NOT_FOUND:
            self._verdict = True
            return self._idle(now)
        if code in {ErrCode.HB_NO_NODE, ErrCode.UNAUTHORIZED}:
            # The broker forgot us (it restarted, the session ended): register again, it knows the position.
            self.disconnected()
            return Step.REGISTER
        if code in {ErrCode.DUPLICATE_PARTITION, ErrCode.CERTIFICATE_FAILURE}:
            return Step.DROP
        if code == ErrCode.SERVER_CONSUME_SPEED_LIMIT:
            return self._later(max(answer.minLimitTime, 10), now)
        return self._later(_WAITS_MS.get(code, 300), now)

    def confirmed(self) -> None:
        """The batch is done with: the next get (or the release) commits it."""
        self._verdict = True

    def disconnected(self) -> None:
        """The registration is void; what was not confirmed will come again."""
        self.registered = False
        self._verdict = False

    @property
    def leave_status(self) -> int:
        """readStatus of the release: 0 commits the last batch, 1 gives it back."""
        return 0 if self._verdict else 1

    def _idle(self, now: int) -> Step:
        wait = self._wait_ms
        self._wait_ms = min(wait * 2, self._most_wait_ms)
        return self._later(wait, now)

    def _later(self, ms: int, now: int) -> Step:
        self.ready_at = now + ms
        return Step.WAIT


# The reference's waits after an answer that brings nothing.
_WAITS_MS: dict[int, int] = {ErrCode.FORBIDDEN: 2000, ErrCode.MOVED: 200, ErrCode.SERVICE_UNAVAILABLE: 200}
