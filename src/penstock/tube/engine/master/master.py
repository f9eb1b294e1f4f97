"""The master as a state machine: requests of producers, consumers and brokers.

``answer(request, context)`` returns the body of the response frame, ``tick(now)`` expires sessions. The server cannot
send messages: changes are sent with the response to the next heartbeat. Sessions and assignments exist in memory only:
after a restart every client is answered with 411, registers again and reports its held partitions. Topics and settings
are durable: the shell stores them, then calls `stored`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from penstock.errors import RefusedError, RemoteProtocolError
from penstock.tube.codec import exceptions
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, encode_error, encode_response
from penstock.tube.codec.methods import METHODS, RESERVED, MethodId, PeerRole, ServiceType
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, TOPIC_RULE, java_trim, valid_topic
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.master.brokers import BrokerHandler
from penstock.tube.engine.master.clients import ClientBalanceHandler, ConsumerHandler, ProducerHandler
from penstock.tube.engine.master.cluster import (
    Cluster,
)
from penstock.tube.engine.master.context import (
    DEFAULTS,
    MIN_MESSAGE_BYTES,
    OK,
    SETTLE_MS,
    MasterConfig,
    MasterContext,
    RefusedRequest,
    group_name_of,
    refused,
)
from penstock.tube.engine.master.settings import (
    TOPIC_KIND,
    Authorship,
    BrokerSeen,
    BrokerSetting,
    ClusterControls,
    Removal,
    Setting,
    TopicDeployment,
    TopicSetting,
)
from penstock.tube.engine.sessions import LEAST_SESSION_MS, RequestContext

__all__ = ["MIN_MESSAGE_BYTES", "MasterConfig", "MasterEngine", "MasterPeer"]


class MasterPeer(NamedTuple):
    """A master of the cluster. ``address``: ``host:port`` for clients."""

    name: str
    address: str
    active: bool


class MasterEngine:
    """One master. ``address`` is its own address in error texts; ``active`` False: every response is a
    StandbyException.

    ``settings`` are the stored topics and settings; ``access`` None: clients do not authenticate.

    :attr:`peers` returns the masters of the cluster, and :attr:`hand_over` begins to hand over to one of the others or
    raises RefusedError; both are None for a master without others.
    """

    def __init__(
        self,
        settings: Iterable[Setting],
        now: int,
        *,
        config: MasterConfig | None = None,
        address: str = "",
        active: bool = True,
        access: ClientAccess | None = None,
    ) -> None:
        self.config = config if config is not None else MasterConfig()
        self.address = address
        self.active = active
        self.peers: Callable[[], Sequence[MasterPeer]] | None = None
        self.hand_over: Callable[[], None] | None = None
        stored = list(settings)
        self.cluster = Cluster([s for s in stored if isinstance(s, TopicSetting)], DEFAULTS, now)
        self.controls = ClusterControls(s for s in stored if not isinstance(s, TopicSetting))
        self._master = MasterContext(self.config, self.cluster, self.controls, access, now)
        self._producers = ProducerHandler(self._master)
        self._consumers = ConsumerHandler(self._master)
        self._clients = ClientBalanceHandler(self._master)
        self._consumers.taken_elsewhere = self._clients.groups.__contains__
        self._clients.taken_elsewhere = self._consumers.groups.__contains__
        self._brokers = BrokerHandler(self._master, self._consumers.rebalance_all, self._consumers.broker_restarted)
        self.producers = self._producers.known
        self.groups = self._consumers.groups
        self.client_groups = self._clients.groups
        self.storing: set[str] = set()
        """Topics that are being stored, which another topic of the same name must not replace."""
        self._grace_until = 0
        """Time before which no session expires."""
        self.requests = 0
        self._handlers: dict[int, Callable[[Any, RequestContext], Message]] = {
            MethodId.PRODUCER_REGISTER: self._producers.register,
            MethodId.PRODUCER_HEARTBEAT: self._producers.heartbeat,
            MethodId.PRODUCER_CLOSE: self._producers.close,
            MethodId.CONSUMER_REGISTER: self._consumers.register,
            MethodId.CONSUMER_HEARTBEAT: self._consumers.heartbeat,
            MethodId.CONSUMER_CLOSE: self._consumer_close,
            MethodId.BROKER_REGISTER: self._brokers.register,
            MethodId.BROKER_HEARTBEAT: self._brokers.heartbeat,
            MethodId.BROKER_CLOSE: self._brokers.close,
            MethodId.CONSUMER_REGISTER_V2: self._clients.register,
            MethodId.CONSUMER_HEARTBEAT_V2: self._clients.heartbeat,
            MethodId.GET_PARTITION_META: self._clients.metadata,
        }

    @property
    def rebalances(self) -> int:
        """Number of rebalances that moved a partition."""
        return self._consumers.rebalances

    @property
    def max_message_bytes(self) -> int:
        """Message size of topics without their own."""
        return self._master.max_message_bytes

    def answer(self, request: Request, context: RequestContext) -> bytes:
        """Return the body of the response frame to ``request``; errors are responses, not exceptions.

        The session of a broker belongs to the connection on which it registered.
        """
        self.requests += 1
        row = METHODS.get(request.method)
        if row is None and request.method not in RESERVED:
            # The C++ client sends method 0 when it closes; the text is the reference's.
            text = f"IPC server handle request error :Unsupported method ID :{request.method}"
            return encode_error(exceptions.EXCEPTION, text, version=request.version, fatal=True)
        if (
            row is None
            or row.answers is not PeerRole.MASTER
            or request.service not in {ServiceType.MASTER, ServiceType.MASTER_ADMIN}
        ):
            text = f"method {request.method} does not belong to service {request.service} of a master"
            return encode_error(exceptions.EXCEPTION, text, version=request.version)
        if not self.active:
            return self.standby_answer(request)
        try:
            message = decode(row.request, request.payload)
        except RemoteProtocolError as error:
            text = f"{error.what} {error.why or ''}".strip()
            return encode_error(exceptions.EXCEPTION, text, version=request.version, fatal=True)
        try:
            answer = self._handlers[row.id](message, context)
        except RefusedRequest as refusal:
            answer = refused(row.response, refusal.code, refusal.text)
        except RemoteProtocolError as error:
            answer = refused(row.response, ErrCode.BAD_REQUEST, error.what)
        return encode_response(row.id, answer.SerializeToString())

    def standby_answer(self, request: Request) -> bytes:
        """Return the response of a master that is not active: clients then try the next master."""
        return encode_error(exceptions.STANDBY, f"{self.address} is not master now", version=request.version)

    def _consumer_close(self, request: pb.CloseRequestC2M, context: RequestContext) -> Message:
        # One method is used by both kinds of consumers.
        group = group_name_of(request.groupName)
        self._master.admit(request, group, context)
        client_id = java_trim(request.clientId)
        for groups in (self.groups, self.client_groups):
            known = groups.get(group)
            self._master.check_origin(None if known is None else known.members.get(client_id), client_id, context)
        if not self._consumers.leave(group, client_id, context.now_ms):
            self._clients.leave(group, client_id)
        return pb.CloseResponseM2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK)

    def disconnected(self, connection: object, now: int) -> bool:
        """Register that a connection ended: its broker and clients may reconnect.

        Returns True if a broker's session now ends earlier, see `next_deadline`.
        """
        self._master.origins.connection_closed(connection)
        return self._brokers.disconnected(connection, now)

    @property
    def shortest_session_ms(self) -> int:
        """Return the minimum time after which a new session or a waiting group needs `tick`."""
        limits = self.config.limits
        consumer_ms = min(self.config.consumer_session_ms, LEAST_SESSION_MS)
        sessions = (limits.broker_session_ms, limits.broker_overdue_ms, limits.producer_session_ms, consumer_ms)
        return min(*sessions, SETTLE_MS)

    def next_deadline(self) -> int | None:
        """Return the next time at which a session may expire or the waiting of a group ends; None if there is none."""
        limits = self.config.limits
        times = list(self._brokers.deadlines())
        times += [p.last_seen + limits.producer_session_ms for p in self.producers.values()]
        times += self._consumers.deadlines()
        times += self._clients.deadlines()
        return max(min(times), self._grace_until) if times else None

    def stalled(self, now: int, grace_ms: int) -> None:
        """Extend all sessions to at least ``grace_ms`` from now after a pause of the process: heartbeats may be in
        transit."""
        self._grace_until = max(self._grace_until, now + grace_ms)

    def tick(self, now: int) -> None:
        """Expire sessions that ended by ``now`` and assign their partitions to others."""
        if now < self._grace_until:
            return
        self._producers.tick(now)
        self._brokers.tick(now)
        self._consumers.tick(now)
        self._clients.tick(now)

    # --- topics and settings ---

    def check_topic(self, name: str, deployment: TopicDeployment) -> None:
        """Raise RefusedError if the name or a number of a topic is not valid."""
        if not valid_topic(name) or name == OFFSET_HISTORY_TOPIC:
            raise RefusedError(
                f"tube: {name!r} is not a valid topic name",
                code=407,
                why=f"a topic name is {TOPIC_RULE}",
            )
        if not (1 <= deployment.partitions <= 9999 and 1 <= deployment.stores <= 1000):
            raise RefusedError(
                f"tube: {deployment.partitions} partitions in {deployment.stores} stores are not supported",
                code=407,
                why="a store has 1 to 9999 partitions, a topic 1 to 1000 stores on a broker",
            )

    def check_new_topic(self, topic: TopicSetting) -> None:
        """Raise RefusedError if ``topic`` cannot be created: the name or a number is not valid, or it exists."""
        for deployment in topic.deployments:
            self.check_topic(topic.name, deployment)
        if topic.name in self.cluster.topics or topic.name in self.storing:
            raise RefusedError(f"tube: topic {topic.name!r} already exists", code=402)

    def topic_stored(self, topic: TopicSetting) -> None:
        """Use a topic after it was stored: brokers get it with their next heartbeat."""
        self.cluster.put_topic(topic)

    def send_configuration(self, broker_id: int) -> bool:
        """Send a broker its whole configuration with its next heartbeat; False: it is not online."""
        broker = self.cluster.brokers.get(broker_id)
        if broker is None or not broker.online:
            return False
        broker.push = broker.need_report = True
        return True

    def expel(self, group: str, member: str, rounds: int, now: int) -> bool:
        """Revoke all partitions of a member for ``rounds`` heartbeats; returns whether it is a member."""
        return self._consumers.expel(group, member, rounds, now)

    def take_unstored(self) -> list[Setting | Removal]:
        """Return changes by brokers that must be stored: new brokers, and removed data of topics. Each is returned
        once."""
        newcomers: list[Setting | Removal] = [BrokerSeen(number) for number in sorted(self._master.newcomers)]
        self._master.newcomers.clear()
        cleared = [topic for topic in self.cluster.cleared() if topic.name not in self.storing]
        self.storing.update(topic.name for topic in cleared)
        return newcomers + [topic if topic.brokers != () else Removal(TOPIC_KIND, topic.name) for topic in cleared]

    def stored(self, setting: Setting | Removal, now: int) -> None:
        """Apply a topic or setting after it was stored; peers get it with their next heartbeat."""
        if isinstance(setting, TopicSetting):
            self.topic_stored(setting)
            self._consumers.rebalance_all(now)
            return
        if isinstance(setting, Removal) and setting.kind == TOPIC_KIND:
            self.cluster.drop_topic(setting.key)
            return
        self.controls.put(setting)
        if isinstance(setting, BrokerSeen | Authorship) or (
            isinstance(setting, Removal) and setting.kind == Authorship.__name__
        ):
            return
        if isinstance(setting, Removal) and setting.kind == BrokerSetting.__name__:
            self.cluster.forget(int(setting.key), now)
        for broker in self.cluster.brokers.values():
            self._brokers.order(broker)
        self._consumers.rebalance_all(now)
