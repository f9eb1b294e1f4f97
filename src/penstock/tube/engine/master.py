"""The master: producers, consumer groups and brokers, request by request.

Pure: ``answer(request, peer, now)`` gives the body of the answering frame, ``tick(now)`` lets sessions expire. Nothing
is pushed in this protocol; what somebody should know waits for its next heartbeat. Run-time state (sessions,
assignments) lives here only: after a restart everyone is told 411, registers again and says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from penstock.errors import RefusedError, RemoteProtocolError
from penstock.tube.codec import exceptions
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, encode_error, encode_response
from penstock.tube.codec.methods import METHODS, RESERVED, MethodId, Role, Service
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.proto import shared_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import (
    UNDEFINED,
    BrokerInfo,
    DefaultConfig,
    Partition,
    Subscribed,
    java_trim,
    parse_bound,
    parse_condition,
    valid_group,
    valid_topic,
)
from penstock.tube.engine.balance import Bound, Group
from penstock.tube.engine.cluster import SYSTEM_TOPIC, Broker, Cluster, Topic, parse_broker_id

__all__ = ["MasterConfig", "MasterEngine"]

OK = "OK!"
MAX_CLIENT_ID = 1024
MAX_TOPICS = 1024
MAX_FILTERS = 500
# The reference clamps message sizes to this range.
MIN_MESSAGE_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 20 << 20


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """Session times as the reference has them; ``settle_ms``: see :class:`Group`, a little over a Java heartbeat."""

    producer_session_ms: int = 30_000
    consumer_session_ms: int = 30_000
    broker_session_ms: int = 30_000
    settle_ms: int = 15_000
    token_period_ms: int = 240_000
    max_message_bytes: int = MIN_MESSAGE_BYTES
    query_priority: int = 301
    max_producers: int = 100_000
    max_consumers: int = 100_000
    max_brokers: int = 1000
    default: DefaultConfig = DefaultConfig(partitions=3)  # noqa: RUF009 - immutable


class _Refusal(Exception):  # noqa: N818 - an answer, not an error of ours
    """Ends a handler with an answer that refuses."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class _Producer:
    __slots__ = ("last_seen", "topics")

    def __init__(self, now: int) -> None:
        self.last_seen = now
        self.topics: list[str] = []


class MasterEngine:
    """See the module. ``address`` is its own name; ``active`` False: every answer is a StandbyException."""

    def __init__(
        self,
        topics: Iterable[Topic],
        now: int,
        *,
        config: MasterConfig | None = None,
        address: str = "",
        active: bool = True,
    ) -> None:
        self.config = config if config is not None else MasterConfig()
        self.address = address
        self.active = active
        self.cluster = Cluster(topics, self.config.default, now)
        self.producers: dict[str, _Producer] = {}
        self.groups: dict[str, Group] = {}
        self.storing: set[str] = set()
        """Topics on their way to the disk: another of the same name would replace them."""
        self.requests = 0
        self.rebalances = 0
        self._rebalance_id = 0
        self._token = self._fresh_token = now
        self._token_at = now
        self._handlers: dict[int, Callable[[Any, int], Message]] = {
            MethodId.PRODUCER_REGISTER: self._producer_register,
            MethodId.PRODUCER_HEARTBEAT: self._producer_heartbeat,
            MethodId.PRODUCER_CLOSE: self._producer_close,
            MethodId.CONSUMER_REGISTER: self._consumer_register,
            MethodId.CONSUMER_HEARTBEAT: self._consumer_heartbeat,
            MethodId.CONSUMER_CLOSE: self._consumer_close,
            MethodId.BROKER_REGISTER: self._broker_register,
            MethodId.BROKER_HEARTBEAT: self._broker_heartbeat,
            MethodId.BROKER_CLOSE: self._broker_close,
            MethodId.CONSUMER_REGISTER_V2: self._client_balance,
            MethodId.CONSUMER_HEARTBEAT_V2: self._client_balance,
            MethodId.GET_PARTITION_META: self._client_balance,
        }

    def answer(self, request: Request, now: int) -> bytes:
        """The body of the frame that answers ``request``; errors are answers too, nothing is raised."""
        self.requests += 1
        row = METHODS.get(request.method)
        if row is None and request.method not in RESERVED:
            # The C++ client sends a method 0 when it closes; the text is the reference's.
            text = f"IPC server handle request error :Unsupported method ID :{request.method}"
            return encode_error(exceptions.EXCEPTION, text, version=request.version, fatal=True)
        if (
            row is None
            or row.answers is not Role.MASTER
            or request.service not in {Service.MASTER, Service.MASTER_ADMIN}
        ):
            text = f"method {request.method} does not belong to service {request.service} of a master"
            return encode_error(exceptions.EXCEPTION, text, version=request.version)
        if not self.active:
            text = f"{self.address} is not master now"
            return encode_error(exceptions.STANDBY, text, version=request.version)
        try:
            message = decode(row.request, request.payload)
        except RemoteProtocolError as error:
            return encode_error(exceptions.EXCEPTION, error.what, version=request.version, fatal=True)
        try:
            answer = self._handlers[row.id](message, now)
        except _Refusal as refusal:
            answer = _refused(row.response, refusal.code, refusal.text)
        except RemoteProtocolError as error:
            answer = _refused(row.response, ErrCode.BAD_REQUEST, error.what)
        return encode_response(row.id, answer.SerializeToString())

    def next_deadline(self) -> int | None:
        """When a session may expire or a group has settled; None without any."""
        config = self.config
        times = [b.last_seen + config.broker_session_ms for b in self.cluster.brokers.values() if b.online]
        times += [p.last_seen + config.producer_session_ms for p in self.producers.values()]
        for group in self.groups.values():
            times += [m.last_seen + config.consumer_session_ms for m in group.members.values()]
            if group.settle_until:
                times.append(group.settle_until)
        return min(times) if times else None

    def tick(self, now: int) -> None:
        """Let sessions that ended by ``now`` expire and give their partitions to others."""
        config = self.config
        for client_id, producer in list(self.producers.items()):
            if producer.last_seen + config.producer_session_ms <= now:
                del self.producers[client_id]
        for broker in self.cluster.brokers.values():
            if broker.online and broker.last_seen + config.broker_session_ms <= now:
                self.cluster.lost(broker)
        for group in list(self.groups.values()):
            late = [m.id for m in group.members.values() if m.last_seen + config.consumer_session_ms <= now]
            for member_id in late:
                group.leave(member_id)
            settled = 0 < group.settle_until <= now
            if settled:
                group.settle_until = 0
            if late or settled:
                self._rebalance(group, now)

    # --- topics ---

    def check_new_topic(self, topic: Topic) -> None:
        """Raise RefusedError if ``topic`` cannot be created: its name, its numbers, or that it exists."""
        if not valid_topic(topic.name) or topic.name == SYSTEM_TOPIC:
            raise RefusedError(
                f"tube: {topic.name!r} cannot be a topic",
                code=407,
                why="a topic is a letter, then letters, digits or '_': 2 to 64 of them",
            )
        if not (1 <= topic.partitions <= 9999 and 1 <= topic.stores <= 1000):
            raise RefusedError(
                f"tube: {topic.partitions} partitions in {topic.stores} stores are not possible",
                code=407,
                why="a store has 1 to 9999 partitions, a topic 1 to 1000 stores on a broker",
            )
        if topic.name in self.cluster.topics or topic.name in self.storing:
            raise RefusedError(f"tube: topic {topic.name!r} exists", code=402)

    def topic_stored(self, topic: Topic) -> None:
        """The topic is durable: brokers get it with their next heartbeat, clients when a broker serves it."""
        self.cluster.put_topic(topic)

    # --- producers ---

    def _producer_register(self, request: pb.RegisterRequestP2M, now: int) -> Message:
        client_id = _client_id(request.clientId, request.hostName)
        self._produce(client_id, request.topicList, now)
        answer = pb.RegisterResponseM2P(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            brokerCheckSum=self.cluster.version,
            brokerInfos=self.cluster.broker_infos(),
            authorizedInfo=self._authorized(now),
        )
        self._client_config(request, answer)
        return answer

    def _producer_heartbeat(self, request: pb.HeartRequestP2M, now: int) -> Message:
        client_id = _client_id(request.clientId, request.hostName)
        # One that we do not know is registered by its heartbeat: C++ and Go producers never register a second time.
        producer = self._produce(client_id, request.topicList, now)
        infos = [info.format() for name in producer.topics if (info := self.cluster.topic_info(name)) is not None]
        answer = pb.HeartResponseM2P(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            brokerCheckSum=self.cluster.version,
            topicInfos=infos,
            authorizedInfo=self._authorized(now),
        )
        if request.brokerCheckSum != self.cluster.version:
            answer.brokerInfos.extend(self.cluster.broker_infos())
        self._client_config(request, answer)
        return answer

    def _producer_close(self, request: pb.CloseRequestP2M, _now: int) -> Message:
        self.producers.pop(java_trim(request.clientId), None)
        return pb.CloseResponseM2P(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)

    def _produce(self, client_id: str, topics: Iterable[str], now: int) -> _Producer:
        names = sorted({java_trim(name) for name in topics} - {""})
        if len(names) > MAX_TOPICS:
            raise _Refusal(ErrCode.BAD_REQUEST, f"{len(names)} topics, at most {MAX_TOPICS} are possible")
        if SYSTEM_TOPIC in names:
            raise _Refusal(ErrCode.BAD_REQUEST, f"{SYSTEM_TOPIC} is written by brokers only")
        producer = self.producers.get(client_id)
        if producer is None:
            if len(self.producers) >= self.config.max_producers:
                raise _Refusal(
                    ErrCode.INTERNAL_SERVER_ERROR, f"{len(self.producers)} producers are registered: no more"
                )
            producer = self.producers[client_id] = _Producer(now)
        producer.last_seen = now
        producer.topics = [
            name for name in names if valid_topic(name)
        ]  # others cannot exist; they may be of any length
        return producer

    # --- consumers ---

    def _consumer_register(self, request: pb.RegisterRequestC2M, now: int) -> Message:
        client_id = _client_id(request.clientId, request.hostName)
        group_name = _group_name(request.groupName)
        topics = frozenset({java_trim(name) for name in request.topicList} - {""})
        if not topics or len(topics) > MAX_TOPICS:
            raise _Refusal(ErrCode.BAD_REQUEST, f"{len(topics)} topics, 1 to {MAX_TOPICS} are possible")
        missing = sorted(name for name in topics if not self.cluster.deployed(name))
        if missing:
            raise _Refusal(ErrCode.TOPIC_NOT_DEPLOYED, f"Requested topic [{missing}] not deployed!")
        filters = {topic: items for topic, items in map(parse_condition, request.topicCondition) if items}
        if any(len(items) > MAX_FILTERS for items in filters.values()):
            raise _Refusal(ErrCode.BAD_REQUEST, f"at most {MAX_FILTERS} filters a topic are possible")
        bound = _bound(request, topics) if request.requireBound else None
        held = [item.partition for item in map(Subscribed.parse, request.subscribeInfo)]
        group = self.groups.get(group_name)
        if group is None or not group.members:
            if sum(len(g.members) for g in self.groups.values()) >= self.config.max_consumers:
                raise _Refusal(ErrCode.INTERNAL_SERVER_ERROR, "too many consumers are registered")
            allocated = group is not None and group.allocated and bound is None
            group = self.groups[group_name] = Group(group_name, topics, filters, bound=bound is not None)
            group.allocated = allocated or bool(held)
            if held:
                # It knows partitions, we do not: this master is new. Its companions will tell what they hold.
                group.settle_until = now + self.config.settle_ms
        else:
            _check_same(group, client_id, topics, filters, bound)
        group.join(client_id, held, now, bound)
        self._rebalance(group, now)
        answer = pb.RegisterResponseM2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)
        self._consumer_answer(request, answer, group, now)
        return answer

    def _consumer_heartbeat(self, request: pb.HeartRequestC2M, now: int) -> Message:
        client_id = _client_id(request.clientId, None)
        group = self.groups.get(_group_name(request.groupName))
        member = group.members.get(client_id) if group is not None else None
        if group is None or member is None:
            raise _Refusal(ErrCode.HB_NO_NODE, f"{client_id} is not registered, register again")
        reported = None
        if request.reportSubscribeInfo:
            reported = [item.partition for item in map(Subscribed.parse, request.subscribeInfo)]
        done = request.HasField("event") and request.event.rebalanceId > 0
        group.heartbeat(member, now, done=done, reported=reported)
        self._rebalance(group, now)
        answer = pb.HeartResponseM2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)
        event = group.next_event(member, self._rebalance_id + 1, now)
        if event is not None:
            # Only when there is one: the Go client takes a present event for an order.
            self._rebalance_id = max(self._rebalance_id, event.rebalance_id)
            answer.event.rebalanceId = event.rebalance_id
            answer.event.opType = event.op
            answer.event.subscribeInfo.extend(_subscribed(client_id, group.name, event.partitions))
        self._consumer_answer(request, answer, group, now)
        return answer

    def _consumer_close(self, request: pb.CloseRequestC2M, now: int) -> Message:
        group = self.groups.get(_group_name(request.groupName))
        if group is not None and group.leave(java_trim(request.clientId)):
            self._rebalance(group, now)
        return pb.CloseResponseM2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)

    def _consumer_answer(self, request: Any, answer: Any, group: Group, now: int) -> None:
        answer.notAllocated = not group.allocated
        if request.HasField("defFlowCheckId") or request.HasField("groupFlowCheckId"):
            answer.defFlowCheckId = answer.groupFlowCheckId = UNDEFINED
            answer.defFlowControlInfo = answer.groupFlowControlInfo = " "
        answer.ssdStoreId = UNDEFINED
        answer.qryPriorityId = UNDEFINED
        answer.authorizedInfo.CopyFrom(self._authorized(now))

    def _client_balance(self, request: Any, _now: int) -> Message:
        _client_id(request.clientId, None)
        raise _Refusal(ErrCode.BAD_REQUEST, "this master does not offer client balance: consume with server balance")

    def _rebalance(self, group: Group, now: int) -> None:
        if not group.members:
            del self.groups[group.name]
            return
        partitions = self.cluster.partitions(group.topics)
        if group.rebalance(partitions, self.cluster.reporting(), now):
            self._rebalance_id += 1
            self.rebalances += 1

    def _rebalance_all(self, now: int) -> None:
        for group in list(self.groups.values()):
            self._rebalance(group, now)

    # --- brokers ---

    def _broker_register(self, request: pb.RegisterRequestB2M, now: int) -> Message:
        pieces = request.clientId.split(":")
        if len(pieces) < 3:
            raise _Refusal(ErrCode.BAD_REQUEST, f"{request.clientId!r} is not id:host:port:version")
        info = BrokerInfo.parse(":".join(pieces[:3]))
        if info.id not in self.cluster.brokers and len(self.cluster.brokers) >= self.config.max_brokers:
            raise _Refusal(ErrCode.INTERNAL_SERVER_ERROR, f"{len(self.cluster.brokers)} brokers are known: no more")
        broker = self.cluster.register(info, now)
        broker.tls_port = request.tlsPort
        self._broker_report(
            broker, request.readStatusRpt, request.writeStatusRpt, request.brokerDefaultConfInfo,
            request.brokerTopicSetConfInfo if request.brokerOnline else (), now,
        )  # fmt: skip
        broker.need_report = True
        answer = pb.RegisterResponseM2B(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            stopRead=False,
            stopWrite=False,
            takeConfInfo=True,
            enableBrokerInfo=shared_pb2.EnableBrokerFunInfo(
                enableConsumeAuthenticate=False,
                enableConsumeAuthorize=False,
                enableProduceAuthenticate=False,
                enableProduceAuthorize=False,
                enableVisitTokenCheck=False,
            ),
            flowCheckId=UNDEFINED,
        )
        self._broker_answer(answer, broker, request.clsConfig.configId, now)
        return answer

    def _broker_heartbeat(self, request: pb.HeartRequestB2M, now: int) -> Message:
        broker = self.cluster.brokers.get(parse_broker_id(request.brokerId))
        if broker is None or not broker.online:
            raise _Refusal(ErrCode.HB_NO_NODE, f"broker {request.brokerId} is not registered, register again")
        broker.last_seen = now
        if request.takeConfInfo or request.readStatusRpt != broker.read_status:
            self._broker_report(
                broker, request.readStatusRpt, request.writeStatusRpt, request.brokerDefaultConfInfo,
                request.brokerTopicSetConfInfo, now,
            )  # fmt: skip
        broker.write_status = request.writeStatusRpt
        synced = self.cluster.in_sync(broker, request.curBrokerConfId, request.confCheckSumId)
        if synced and request.takeConfInfo:
            broker.need_report = False
        answer = pb.HeartResponseM2B(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            stopRead=False,
            stopWrite=False,
            needReportData=broker.need_report or not synced,
            takeConfInfo=not synced,
            takeRemoveTopicInfo=True,
            flowCheckId=UNDEFINED,
        )
        self._broker_answer(answer, broker, request.clsConfig.configId, now)
        return answer

    def _broker_close(self, request: pb.CloseRequestB2M, _now: int) -> Message:
        broker = self.cluster.brokers.get(parse_broker_id(request.brokerId))
        if broker is not None:
            self.cluster.lost(broker)
        return pb.CloseResponseM2B(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)

    def _broker_report(
        self, broker: Broker, read: int, write: int, default: str, topics: Iterable[str], now: int
    ) -> None:
        changed = broker.read_status != read
        broker.read_status = read
        broker.write_status = write
        if self.cluster.report(broker, default, topics) or changed:
            self._rebalance_all(now)

    def _broker_answer(self, answer: Any, broker: Broker, config_id: int, now: int) -> None:
        self._tokens(now)
        answer.curBrokerConfId = broker.config_id
        answer.confCheckSumId = broker.check_sum
        if answer.takeConfInfo:
            answer.brokerDefaultConfInfo = self.cluster.default_text
            answer.brokerTopicSetConfInfo.extend(broker.topics)
        answer.ssdStoreId = UNDEFINED
        answer.qryPriorityId = self.config.query_priority
        answer.authorizedInfo.visitAuthorizedToken = self._token
        answer.brokerAuthorizedInfo.visitAuthorizedToken = f"{self._token},{self._fresh_token}"
        answer.clsConfig.configId = UNDEFINED
        if config_id != UNDEFINED:
            answer.clsConfig.maxMsgSize = self.config.max_message_bytes

    # --- shared ---

    def _tokens(self, now: int) -> None:
        if now - self._token_at >= self.config.token_period_ms:
            self._token, self._fresh_token, self._token_at = self._fresh_token, now, now

    def _authorized(self, now: int) -> shared_pb2.MasterAuthorizedInfo:
        self._tokens(now)
        return shared_pb2.MasterAuthorizedInfo(visitAuthorizedToken=self._token)

    def _client_config(self, request: Any, answer: Any) -> None:
        answer.appdConfig.configId = UNDEFINED
        # A missing message reads as 0 in the reference: it differs, so the size is told.
        if request.appdConfig.configId != UNDEFINED or self.config.max_message_bytes != MIN_MESSAGE_BYTES:
            answer.appdConfig.maxMsgSize = self.config.max_message_bytes


def _client_id(text: str, host: str | None) -> str:
    client_id = java_trim(text)
    if not client_id or len(client_id) > MAX_CLIENT_ID or "@" in client_id or "#" in client_id:
        raise _Refusal(
            ErrCode.BAD_REQUEST, f"client id {client_id!r}: 1 to {MAX_CLIENT_ID} characters, no '@' and no hash"
        )
    if host is not None and not 0 < len(java_trim(host)) <= 256:
        raise _Refusal(ErrCode.BAD_REQUEST, f"host name {host!r}: 1 to 256 characters are possible")
    return client_id


def _group_name(text: str) -> str:
    name = java_trim(text)
    if not valid_group(name):
        raise _Refusal(ErrCode.BAD_REQUEST, f"{name!r} cannot be a group: a letter, then letters, digits, '_' and '-'")
    return name


def _bound(request: pb.RegisterRequestC2M, topics: frozenset[str]) -> Bound:
    session_key = java_trim(request.sessionKey)
    if not session_key or request.totalCount <= 0:
        raise _Refusal(ErrCode.BAD_REQUEST, "bound consumption needs a session key and the number of members")
    offsets = parse_bound(request.requiredPartition)
    foreign = sorted(key for key in offsets if key.split(":")[1] not in topics)
    if foreign:
        raise _Refusal(ErrCode.BAD_REQUEST, f"required partitions {foreign} are not of the topics subscribed")
    return Bound(session_key, request.totalCount, request.selectBig, offsets)


def _check_same(
    group: Group, client_id: str, topics: frozenset[str], filters: dict[str, frozenset[str]], bound: Bound | None
) -> None:
    """Refuse a member whose subscription is not the group's: the first member decides."""
    how = f"[Inconsistency subscribe] {client_id}"
    if group.bound != (bound is not None):
        raise _Refusal(ErrCode.CLIENT_INCONSISTENT_CONSUMETYPE, f"{how}: bound and not bound do not go together")
    if topics != group.topics:
        raise _Refusal(
            ErrCode.CLIENT_INCONSISTENT_TOPICSET, f"{how}: topics {sorted(topics)}, not {sorted(group.topics)}"
        )
    if filters != group.filters:
        raise _Refusal(
            ErrCode.CLIENT_INCONSISTENT_FILTERSET, f"{how}: other filter conditions than the group's first member"
        )
    if bound is None:
        return
    first = next((m.bound for m in group.members.values() if m.id != client_id), None)
    if first is None:
        return
    if bound.session_key != first.session_key or bound.total != first.total:
        raise _Refusal(ErrCode.CLIENT_INCONSISTENT_SESSIONKEY, f"{how}: other session key or number of members")
    if bound.select_big != first.select_big:
        raise _Refusal(
            ErrCode.CLIENT_INCONSISTENT_SELECTBIG, f"{how}: another choice between larger and smaller offset"
        )


def _subscribed(client_id: str, group: str, partitions: Iterable[Partition]) -> list[str]:
    return [Subscribed(client_id, group, partition).format() for partition in partitions]


# What a refusal must hold beside code and text: receivers do not read a message that lacks a required field.
_REQUIRED: dict[str, dict[str, int | bool]] = {
    "RegisterResponseM2P": {"brokerCheckSum": -1},
    "HeartResponseM2P": {"brokerCheckSum": -1},
    "RegisterResponseM2B": {"stopRead": False, "stopWrite": False, "takeConfInfo": False},
    "HeartResponseM2B": {
        "stopRead": False,
        "stopWrite": False,
        "curBrokerConfId": UNDEFINED,
        "confCheckSumId": UNDEFINED,
        "needReportData": False,
        "takeConfInfo": False,
        "takeRemoveTopicInfo": False,
    },
}


def _refused(kind: type[Message], code: int, text: str) -> Message:
    fields: dict[str, Any] = dict(_REQUIRED.get(kind.DESCRIPTOR.name, {}))
    if "success" in kind.DESCRIPTOR.fields_by_name:
        fields["success"] = False
    return kind(errCode=code, errMsg=text, **fields)
