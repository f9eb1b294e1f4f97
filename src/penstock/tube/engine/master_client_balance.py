"""Consumers that balance among themselves, at the master: methods 20 to 22. See `engine.client_groups`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.engine.access import Passed
from penstock.tube.engine.client_groups import ClientGroup, ClientMember
from penstock.tube.engine.master_common import OK, Hall, RefusedRequest, client_id_of, group_name_of
from penstock.tube.engine.master_consumers import subscription_of
from penstock.tube.engine.sessions import session_of

__all__ = ["ClientBalanceDesk"]


class ClientBalanceDesk:
    """Answers such consumers. ``taken_elsewhere(group)``: whether a group of that name has its partitions given out."""

    def __init__(self, hall: Hall) -> None:
        self.groups: dict[str, ClientGroup] = {}
        self.taken_elsewhere: Callable[[str], bool] = lambda _: False
        self._hall = hall

    def deadlines(self) -> Iterable[int]:
        """When sessions may end."""
        for group in self.groups.values():
            for member in group.members.values():
                yield member.last_seen + member.session_ms

    def tick(self, now: int) -> None:
        """Forget members whose session ended."""
        for group in list(self.groups.values()):
            for member_id in [m.id for m in group.members.values() if m.last_seen + m.session_ms <= now]:
                self.leave(group.name, member_id)

    def leave(self, group_name: str, client_id: str) -> bool:
        """A member is gone; whether it was one."""
        group = self.groups.get(group_name)
        if group is None or not group.leave(client_id):
            return False
        if not group.members:
            del self.groups[group_name]
        return True

    def register(self, request: pb.RegisterRequestC2MV2, now: int) -> Message:
        """Answer method 20."""
        client_id = client_id_of(request.clientId, request.hostName)
        group_name = group_name_of(request.groupName)
        passed = self._hall.admit(request, group_name, now)
        if request.sourceCount > 0 and not 0 <= request.nodeId < request.sourceCount:
            text = f"instance {request.nodeId} of {request.sourceCount}: 0 to {request.sourceCount - 1} are possible"
            raise RefusedRequest(ErrCode.BAD_REQUEST, text)
        topics, filters = subscription_of(self._hall, passed.user, group_name, request)
        if self.taken_elsewhere(group_name):
            text = f"[Inconsistency subscribe] {client_id}: the master balances this group"
            raise RefusedRequest(ErrCode.CLIENT_INCONSISTENT_CONSUMETYPE, text)
        group = self.groups.get(group_name)
        self._hall.check_free(None if group is None else group.members.get(client_id), client_id)
        if group is None:
            if sum(len(g.members) for g in self.groups.values()) >= self._hall.config.max_consumers:
                raise RefusedRequest(ErrCode.INTERNAL_SERVER_ERROR, "too many consumers are registered")
            group = self.groups[group_name] = ClientGroup(group_name, topics, filters, request.sourceCount)
        refusal = group.refuse(client_id, topics, filters, request.sourceCount, request.nodeId)
        if refusal is not None:
            raise RefusedRequest(refusal[0], f"[Inconsistency subscribe] {client_id}: {refusal[1]}")
        member = group.join(client_id, request.nodeId, now, self._hall.origin)
        member.session_ms = session_of(request.sessionTimeoutMs, self._hall.config.consumer_session_ms)
        _report(member, request)
        answer = pb.RegisterResponseM2CV2(errCode=ErrCode.SUCCESS, errMsg=OK)
        self._common(request, answer, group, request.subRepInfo.brokerConfigId, passed, now)
        return answer

    def heartbeat(self, request: pb.HeartRequestC2MV2, now: int) -> Message:
        """Answer method 21."""
        group, member, passed = self._known(request, now)
        _report(member, request)
        answer = pb.HeartResponseM2CV2(errCode=ErrCode.SUCCESS, errMsg=OK)
        self._common(request, answer, group, request.subRepInfo.brokerConfigId, passed, now)
        self._refresh(group, now)
        answer.topicMetaInfoId = group.meta_id
        if group.wants_meta(member, request.subRepInfo.topicMetaInfoId, now):
            answer.topicMetaInfoList.extend(group.meta)
        return answer

    def metadata(self, request: pb.GetPartMetaRequestC2M, now: int) -> Message:
        """Answer method 22."""
        group, _, _ = self._known(request, now)
        self._refresh(group, now)
        cluster = self._hall.cluster
        answer = pb.GetPartMetaResponseM2C(
            errCode=ErrCode.SUCCESS, errMsg=OK, brokerConfigId=cluster.version, topicMetaInfoId=group.meta_id
        )
        if request.brokerConfigId != cluster.version:
            answer.brokerConfigList.extend(self._hall.broker_infos())
        if request.topicMetaInfoId != group.meta_id:
            answer.topicMetaInfoList.extend(group.meta)
        return answer

    def _known(self, request: Any, now: int) -> tuple[ClientGroup, ClientMember, Passed]:
        client_id = client_id_of(request.clientId, None)
        group_name = group_name_of(request.groupName)
        passed = self._hall.admit(request, group_name, now)
        group = self.groups.get(group_name)
        member = group.members.get(client_id) if group is not None else None
        if group is None or member is None:
            raise RefusedRequest(ErrCode.HB_NO_NODE, f"{client_id} is not registered, register again")
        self._hall.check_origin(member, client_id)
        member.last_seen = now
        return group, member, passed

    def _refresh(self, group: ClientGroup, now: int) -> None:
        controls = self._hall.controls
        names = [name for name in sorted(group.topics) if controls.may_consume(group.name, name)]
        group.update_meta([meta.format() for meta in self._hall.cluster.topic_metas(names)], now)

    def _common(
        self, request: Any, answer: Any, group: ClientGroup, broker_config_id: int, passed: Passed, now: int
    ) -> None:
        cluster, controls = self._hall.cluster, self._hall.controls
        answer.brokerConfigId = cluster.version
        if broker_config_id != cluster.version:
            answer.brokerConfigList.extend(self._hall.broker_infos())
        ops = answer.opsTaskInfo
        ops.SetInParent()  # there even with nothing in it, as in the reference
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
        answer.authorizedInfo.CopyFrom(self._hall.authorized(passed, now))


def _report(member: ClientMember, request: Any) -> None:
    """Take over what a member says of itself."""
    info = request.subRepInfo
    if info.HasField("lstAssignedTime"):
        member.assigned_at = info.lstAssignedTime
    if info.reportSubInfo:
        member.partitions = list(info.partSubInfo)
