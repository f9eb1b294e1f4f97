"""Consumers that choose their partitions themselves (methods 20 to 22): the master only says which partitions exist.

Members of a group agree on topics, filters and the number of instances; each has its own instance number. The master
keeps a version of the group's partition metadata and sends it to members that hold another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.message import Message

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.engine.access import Passed
from penstock.tube.engine.master.consumers import subscription_of
from penstock.tube.engine.master.context import OK, MasterContext, RefusedRequest, client_id_of, group_name_of
from penstock.tube.engine.sessions import RequestContext, SessionOrigin, session_of

__all__ = ["ClientBalanceHandler", "ClientGroup", "ClientMember"]

META_PUSH_MS = 180_000
"""A member that fetched metadata this long ago gets changes with a heartbeat."""


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
        """Reason why a member cannot join, as error code and text; the first member sets what all must agree on."""
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
        """Remove a member; returns whether it was one."""
        return self.members.pop(client_id, None) is not None

    def update_meta(self, meta: Iterable[str], now: int) -> None:
        """Set the existing partitions; a change gets a new version."""
        fresh = sorted(meta)
        if self.meta_id == UNDEFINED or fresh != self.meta:
            self.meta = fresh
            self.meta_id = max(now, self.meta_id + 1)

    def wants_meta(self, member: ClientMember, meta_id: int, now: int) -> bool:
        """Whether a heartbeat's response contains the metadata: it changed, and the member was assigned long ago."""
        if meta_id == self.meta_id or not member.partitions:
            return False
        return member.assigned_at is not None and now - member.assigned_at > META_PUSH_MS


class ClientBalanceHandler:
    """Answers consumers that balance by themselves. ``taken_elsewhere(group)``: the master balances that group."""

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
        """Remove a member; returns whether it was one."""
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

    def _known(self, request: Any, context: RequestContext) -> tuple[ClientGroup, ClientMember, Passed]:
        client_id = client_id_of(request.clientId, None)
        group_name = group_name_of(request.groupName)
        passed = self._master.admit(request, group_name, context)
        group = self.groups.get(group_name)
        member = group.members.get(client_id) if group is not None else None
        if group is None or member is None:
            raise RefusedRequest(ErrCode.HB_NO_NODE, f"{client_id} is not registered, register again")
        self._master.check_origin(member, client_id, context)
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
        passed: Passed,
        context: RequestContext,
    ) -> None:
        cluster, controls = self._master.cluster, self._master.controls
        answer.brokerConfigId = cluster.version
        if broker_config_id != cluster.version:
            answer.brokerConfigList.extend(self._master.broker_infos(context))
        ops = answer.opsTaskInfo
        ops.SetInParent()  # present even if it is empty, as in the reference
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
