"""Producers at the master (methods 1 to 3): they ask which brokers accept their topics."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, java_trim, valid_topic
from penstock.tube.engine.master.context import MAX_TOPICS, OK, MasterContext, RefusedRequest, client_id_of
from penstock.tube.engine.sessions import RequestContext, SessionOrigin

__all__ = ["ProducerHandler", "RegisteredProducer"]


class RegisteredProducer:
    """A producer and the topics that it sends to."""

    __slots__ = ("last_seen", "origin", "topics")

    def __init__(self, now: int, origin: SessionOrigin) -> None:
        self.origin = origin
        self.last_seen = now
        self.topics: list[str] = []


class ProducerHandler:
    """Answers producers. ``known``: those with a session, by client id."""

    def __init__(self, master: MasterContext) -> None:
        self.known: dict[str, RegisteredProducer] = {}
        self._master = master

    def tick(self, now: int) -> None:
        """Remove producers whose sessions expired."""
        session_ms = self._master.config.limits.producer_session_ms
        for client_id in [c for c, producer in self.known.items() if producer.last_seen + session_ms <= now]:
            del self.known[client_id]

    def register(self, request: pb.RegisterRequestP2M, context: RequestContext) -> Message:
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
        client_id = client_id_of(request.clientId, request.hostName)
        passed = self._master.admit(request, None, context)
        # An unknown producer is registered by its heartbeat: C++ and Go producers never register a second time.
        producer = self._update(client_id, request.topicList, context)
        cluster = self._master.cluster
        found = {name: cluster.topic_info(name) for name in producer.topics}
        infos = [info.format() for info in found.values() if info is not None]
        # The Java producer forgets every topic after a heartbeat response that names none, and fails its messages until
        # the next one, 13 s later. While master or brokers have just started it should keep what it knows.
        waits = not infos and any(cluster.awaited(name, reads=request.wantServed) for name in producer.topics)
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
        elif producer.origin.passes_to(origin := self._master.origins.origin_of(context)):
            producer.origin = origin
        # Heartbeats over other connections are answered too: brokers and topics are no secret, and C++ clients give up
        # after an error.
        producer.last_seen = context.now_ms
        producer.topics = [
            name for name in names if valid_topic(name)
        ]  # other names cannot exist, and may have any length
        return producer
