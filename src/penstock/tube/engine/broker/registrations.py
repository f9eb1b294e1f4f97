"""Registrations of consumers for partitions (methods 15, 16), and the sessions that end them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.codes import EXTENSIONS, ErrCode
from penstock.tube.codec.message import filter_key
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import Partition, format_failure, java_trim
from penstock.tube.engine.broker.flow_control import ReadWindow
from penstock.tube.engine.broker.group_offsets import GroupOffsets, Key
from penstock.tube.engine.broker.request_checks import (
    OK,
    BrokerResponse,
    Refusal,
    RequestChecks,
    make_response,
)
from penstock.tube.engine.broker.topics import Topic, Topics
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.sessions import RequestContext, SessionOrigin, session_of

__all__ = ["Registration", "Registrations"]

_REGISTER = 31
_UNREGISTER = 32
_MAX_FILTERS = 500
_MAX_FILTER_CHARS = 1024
_MAX_GROUP = 1024


class Registration:
    """A consumer's registration for a partition. ``keys`` None: no filter; ``since``: time of the registration (ms).

    ``user``: the user who registered, empty for an anonymous client. ``origin``: the connection that owns it.
    """

    __slots__ = ("client_id", "deadline", "filters", "keys", "meter", "origin", "priority", "session_ms", "since",
                 "user")  # fmt: skip

    def __init__(
        self, client_id: str, origin: SessionOrigin, filters: Sequence[str], priority: int, now_ms: int, session_ms: int
    ) -> None:
        self.client_id = client_id
        self.origin = origin
        self.filters = filters
        self.keys = frozenset(map(filter_key, filters)) if filters else None
        self.priority = priority
        self.since = now_ms
        self.session_ms = session_ms
        self.deadline = now_ms + session_ms
        self.meter = ReadWindow()
        self.user = ""


class Registrations:
    """Registrations by group, topic and partition. ``next_check``: lower bound of the next end of a session."""

    def __init__(
        self,
        checks: RequestChecks,
        topics: Topics,
        offsets: GroupOffsets,
        limits: TubeLimits,
        *,
        session_ms: int,
    ) -> None:
        self.session_ms = session_ms
        self.next_check: int | None = None
        self._grace_until = 0
        """Time (ms) before which no session expires."""
        self._checks = checks
        self._topics = topics
        self._offsets = offsets
        self._held: dict[Key, Registration] = {}
        self._limits = limits

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[Key, Registration]]:
        return iter(list(self._held.items()))

    def get(self, key: Key) -> Registration | None:
        """Return the registration of a group for a partition, if any."""
        return self._held.get(key)

    def register(self, payload: bytes, context: RequestContext) -> BrokerResponse:
        """Answer method 15: register (31) or unregister (32)."""
        request = decode(pb.RegisterRequestC2B, payload)
        refusal = self._checks.refuse_member(
            context, request.clientId, java_trim(request.groupName), request.authInfo, java_trim(request.topicName)
        )
        if refusal is None:
            key = (java_trim(request.groupName), java_trim(request.topicName), request.partitionId)
            topic = self._topics.by_name.get(key[1])
            if not key[0] or not key[1]:
                refusal = Refusal(ErrCode.BAD_REQUEST, "groupName or topicName is blank")
            elif len(key[0]) > _MAX_GROUP or "\0" in key[0]:
                refusal = Refusal(
                    ErrCode.BAD_REQUEST, f"groupName is longer than {_MAX_GROUP} characters or contains a NUL"
                )
            elif topic is None or not topic.readable:
                state = "is unknown on this broker" if topic is None else "does not accept consumers"
                refusal = Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} {state}")
            elif not topic.has(request.partitionId):
                refusal = Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} has no partition {key[2]} on this broker")
            elif request.opType == _REGISTER:
                refusal = self._refuse_more(key, request.filterCondStr) or self._occupied(
                    key, request.clientId.strip(), context
                )
                if refusal is None:
                    return self._register_consumer(key, topic, request, context)
            elif request.opType == _UNREGISTER:
                refusal = self.not_held(key, request.clientId.strip(), context)
                if refusal is None:
                    return self._release(key, consumed=request.readStatus == 0)
            else:
                refusal = Refusal(ErrCode.BAD_REQUEST, f"opType {request.opType} is unknown")
        self._checks.refused += 1
        failed = pb.RegisterResponseB2C(success=False, errCode=refusal.code, errMsg=refusal.text, currOffset=-1)
        return make_response(MethodId.PARTITION_REGISTER, failed.SerializeToString())

    def _refuse_more(self, key: Key, filters: Sequence[str]) -> Refusal | None:
        """Return the reason why no further filter, registration or offset is accepted, if any."""
        if len(filters) > _MAX_FILTERS or any(len(text) > _MAX_FILTER_CHARS for text in filters):
            text = f"at most {_MAX_FILTERS} filters of {_MAX_FILTER_CHARS} characters are accepted"
            return Refusal(ErrCode.BAD_REQUEST, text)
        if key not in self._held and len(self._held) >= self._limits.max_registrations:
            return Refusal(ErrCode.INTERNAL_SERVER_ERROR, f"the limit of {len(self._held)} registrations is reached")
        if self._offsets.committed(key) is None and len(self._offsets) >= self._limits.max_group_offsets:
            return Refusal(ErrCode.INTERNAL_SERVER_ERROR, f"the limit of {len(self._offsets)} group offsets is reached")
        return None

    def _occupied(self, key: Key, client_id: str, context: RequestContext) -> Refusal | None:
        registration = self._held.get(key)
        if registration is None or (
            registration.client_id == client_id
            and registration.origin.may_be_continued_by(self._checks.origins.origin_of(context))
        ):
            return None
        text = f"partition {key[2]} of {key[1]} is registered by another consumer{_address_of(registration)}"
        if self.has_expired(registration, context.now_ms):
            # The session has expired, but the answer is still 410: the client retries and then succeeds.
            self.expire(key)
        return Refusal(ErrCode.PARTITION_OCCUPIED, text)

    def _register_consumer(
        self, key: Key, topic: Topic, request: pb.RegisterRequestC2B, context: RequestContext
    ) -> BrokerResponse:
        store = self._topics.store(topic, key[2])
        filters = [text for text in map(java_trim, request.filterCondStr) if text]
        wanted = request.currOffset if request.HasField("currOffset") else None
        offset = self._offsets.register(key, request.readStatus, wanted, store.min_offset, store.durable_end)
        session_ms = session_of(request.sessionTimeoutMs, self.session_ms)
        registration = self._held[key] = Registration(
            request.clientId.strip(),
            self._checks.origins.origin_of(context),
            filters,
            request.qryPriorityId,
            context.now_ms,
            session_ms,
        )
        self._held[key].user = self._checks.user_of(context, request.authInfo.authAuthorizedToken, key[0])
        self.schedule_check(registration.deadline)
        done = pb.RegisterResponseB2C(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            currOffset=offset,
            maxOffset=store.durable_end,
        )
        if request.HasField("extensions"):
            done.extensions = EXTENSIONS
        return make_response(MethodId.PARTITION_REGISTER, done.SerializeToString())

    def _release(self, key: Key, *, consumed: bool) -> BrokerResponse:
        self._offsets.commit(key, consumed=consumed)
        del self._held[key]
        done = pb.RegisterResponseB2C(success=True, errCode=ErrCode.SUCCESS, errMsg=OK, currOffset=-1)
        return make_response(MethodId.PARTITION_REGISTER, done.SerializeToString(), wait=consumed)

    def heartbeat(self, payload: bytes, context: RequestContext) -> BrokerResponse:
        """Answer method 16."""
        request = decode(pb.HeartBeatRequestC2B, payload)
        group = java_trim(request.groupName)
        refusal = self._checks.refuse_member(context, request.clientId, group, request.authInfo)
        if refusal is None and not group:
            refusal = Refusal(ErrCode.BAD_REQUEST, "groupName is blank")
        reported: list[tuple[str, Partition]] = []
        try:
            reported = [(text.strip(), Partition.parse(text)) for text in request.partitionInfo if text.strip()]
        except RemoteProtocolError as error:
            refusal = refusal or Refusal(ErrCode.BAD_REQUEST, error.what)
        if refusal is not None:
            self._checks.refused += 1
            failed = pb.HeartBeatResponseB2C(
                success=False, errCode=refusal.code, errMsg=refusal.text, hasPartFailure=False
            )
            if refusal.code == ErrCode.CERTIFICATE_FAILURE and self._checks.access is not None:
                failed.requireAuth = True
            return make_response(MethodId.PARTITION_HEARTBEAT, failed.SerializeToString())
        failures = []
        for text, partition in reported:
            key = (group, partition.topic, partition.id)
            lost = self.not_held(key, request.clientId.strip(), context)
            if lost is not None:
                failures.append(format_failure(lost.code, text))
                continue
            registration = self._held[key]
            registration.deadline = context.now_ms + registration.session_ms
            if request.HasField("qryPriorityId"):
                registration.priority = request.qryPriorityId
        done = pb.HeartBeatResponseB2C(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=OK,
            hasPartFailure=bool(failures),
            failureInfo=failures,
            requireAuth=False,
        )
        return make_response(MethodId.PARTITION_HEARTBEAT, done.SerializeToString())

    def not_held(self, key: Key, client_id: str, context: RequestContext) -> Refusal | None:
        """Return the reason why ``client_id`` may not use the partition over the connection of the request, if any."""
        registration = self._held.get(key)
        if registration is None:
            return Refusal(ErrCode.HB_NO_NODE, f"partition {key[2]} of {key[1]} is not registered by group {key[0]}")
        if registration.client_id != client_id:
            text = f"partition {key[2]} of {key[1]} is registered by another consumer{_address_of(registration)}"
            return Refusal(ErrCode.DUPLICATE_PARTITION, text)
        origin = self._checks.origins.origin_of(context)
        if registration.origin is not origin:
            if not registration.origin.may_be_continued_by(origin):
                text = (
                    f"partition {key[2]} of {key[1]} was registered over another connection: register it over this one"
                )
                return Refusal(ErrCode.HB_NO_NODE, text)
            registration.origin = origin
        return None

    def schedule_check(self, deadline: int) -> None:
        """Schedule a call of `tick` at ``deadline``."""
        if self.next_check is None or deadline < self.next_check:
            self.next_check = deadline

    def expire(self, key: Key) -> None:
        """End the session of a registration; its messages in flight are delivered again."""
        del self._held[key]
        self._offsets.discard(key)

    def access_changed(self) -> None:
        """End the registrations of consumers that may no longer read their partitions."""
        access = self._checks.access
        if access is None:
            return
        for key in [
            key
            for key, registration in self._held.items()
            if not access.still_accepts(registration.user, key[1], key[0])
        ]:
            self.expire(key)

    def has_expired(self, registration: Registration, now_ms: int) -> bool:
        """Return True if the session has expired: no get and no heartbeat for too long."""
        return registration.deadline <= now_ms >= self._grace_until

    def stalled(self, now_ms: int, grace_ms: int) -> None:
        """Extend all sessions to at least ``grace_ms`` from now after a pause of the process: gets and heartbeats may
        be in transit."""
        self._grace_until = max(self._grace_until, now_ms + grace_ms)

    def tick(self, now_ms: int) -> None:
        """End the registrations whose sessions have expired."""
        for key in [key for key, registration in self._held.items() if self.has_expired(registration, now_ms)]:
            self.expire(key)
        first = min((registration.deadline for registration in self._held.values()), default=None)
        self.next_check = None if first is None else max(first, self._grace_until)

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove registrations whose topic or group was removed."""
        for key in keys:
            self._held.pop(key, None)


def _address_of(registration: Registration) -> str:
    """Return the address of a consumer for error texts, without its client id, which is confidential."""
    return f" at {registration.origin.host}" if registration.origin.host else ""
