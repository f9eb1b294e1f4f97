"""Consumer groups in the master's administration: members, access control, filters, limits, flow control.

The reference has two generations of methods for the same settings. The newer ones (``…_csmctrl_info``,
``…_resctrl_info``) show a setting completely; each of the older ones is a view of it.
"""

from __future__ import annotations

from penstock.tube.admin.brokers import defaults_on
from penstock.tube.admin.changes import (
    AUTHOR,
    Answer,
    MakeChange,
    SettingChange,
    flow_rules,
    flow_text,
    item,
    message_bytes,
    modification,
    refuse_unchangeable,
    success,
    topic_defaults,
)
from penstock.tube.admin.request import BadParameter, Params
from penstock.tube.codec.strings import UNDEFINED, valid_group
from penstock.tube.engine.master.balance import Group, most_brokers
from penstock.tube.engine.master.clients import ClientGroup
from penstock.tube.engine.master.context import QUERY_PRIORITY
from penstock.tube.engine.master.master import MIN_MESSAGE_BYTES, MasterEngine
from penstock.tube.engine.master.settings import (
    ClusterSetting,
    ConsumeControl,
    GroupSetting,
    Removal,
    Setting,
    TopicControl,
)

__all__ = [
    "FILTERED",
    "FILTERED_AND_OFF",
    "access_of",
    "allow",
    "allowed",
    "bind_filters",
    "cluster_rules",
    "cluster_setting",
    "consume_controls",
    "consume_from_max",
    "delete_consume",
    "delete_resources",
    "delete_topic_control",
    "detail",
    "filters",
    "forbid",
    "forbidden",
    "forget_rules",
    "free_filters",
    "group_rules",
    "group_settings",
    "names_of",
    "rebalance",
    "reset_cluster_rules",
    "resources",
    "set_cluster",
    "set_cluster_rules",
    "set_consume",
    "set_group",
    "set_resources",
    "set_rules",
    "set_topic_control",
    "sub_info",
    "topic_authorization",
    "topic_controls",
    "withdraw",
]

Changed = list[Setting | Removal]

DEFAULT_RATE = 1000
"""The reference's limit of brokers per member for groups without a limit of their own. penstock does not enforce it."""

FILTERED_AND_OFF, FILTERED = 1, 2
"""condStatus: 0 no filter requested, 1 the rule exists but is disabled, 2 it is enabled."""


def names_of(params: Params) -> list[str]:
    """Return the groups of a change. Raises BadParameter without names or with invalid ones."""
    names = params.items("groupName", "group", "consumeGroup")
    if not names:
        raise BadParameter("groupName is required")
    for name in names:
        if not valid_group(name):
            raise BadParameter(f"groupName {name!r}: a letter, then letters, digits, '_' and '-'")
    return names


def _topics(params: Params) -> list[str]:
    names = params.items("topicName")
    if not names:
        raise BadParameter("topicName is required")
    return names


def _user(params: Params) -> None:
    params.required("modifyUser", "mur", "createUser", "cur")


# --- members ---


def sub_info(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups, their topics and number of members."""
    groups = set(params.items("groupName", "group", "consumeGroup"))
    topics = set(params.items("topicName"))
    known: dict[str, Group | ClientGroup] = {**engine.groups, **engine.client_groups}
    return success(
        [
            {"consumeGroup": name, "topicSet": sorted(group.topics), "consumerNum": len(group.members)}
            for name, group in sorted(known.items())
            if (not groups or name in groups) and (not topics or topics & group.topics)
        ]
    )


def detail(engine: MasterEngine, params: Params, now: int) -> Answer:
    """The members of a group and their partitions."""
    name = params.required("groupName", "group", "consumeGroup")
    client = engine.client_groups.get(name)
    if client is not None:
        rows: list[Answer] = [
            {
                "consumerId": params.shown_id(member.id),
                # Each text lists the partitions of one topic: topic#broker:partition,broker:partition
                "parCount": sum(text.count(",") + 1 for text in member.partitions),
                "parInfo": [{"partId": text, "status": "registered"} for text in member.partitions],
            }
            for member in client.members.values()
        ]
        return {
            **success(rows),
            "topicSet": sorted(client.topics),
            "consumeGroup": name,
            "isBandConsume": "client-rebalance",  # the reference's spelling
            "filterConds": {topic: sorted(items) for topic, items in sorted(client.filters.items())},
        }
    group = engine.groups.get(name)
    if group is None:
        return success([])
    rows = []
    for member in group.members.values():
        owned = sorted(p for p, owner in group.owned.items() if owner == member.id)
        parts = [
            {
                "partId": p.id,
                "brokerAddr": p.broker.address,
                "topicName": p.topic,
                "status": "registered" if p in member.held else "registering",
            }
            for p in owned
        ]
        rows.append({"consumerId": params.shown_id(member.id), "parCount": len(owned), "parInfo": parts})
    return {
        **success(rows),
        "topicSet": sorted(group.topics),
        "consumeGroup": name,
        "isBandConsume": "bound" if group.bound else "unbound",
        "re-rebalance": {params.shown_id(member.id): member.out for member in group.members.values() if member.out},
        "rebInfo": _balancing(engine, group),
        "filterConds": {topic: sorted(items) for topic, items in sorted(group.filters.items())},
    }


def _balancing(engine: MasterEngine, group: Group) -> Answer:
    """Return whether partitions were assigned to the group, and the number of brokers of a topic that a member must
    read."""
    setting = engine.controls.groups.get(group.name)
    most = most_brokers(engine.cluster.partitions(list(group.topics)))
    return {
        "isRebalanced": group.allocated,
        "checkPasted": not engine.controls.too_few(group.name, most, len(group.members)),
        "defBClientRate": DEFAULT_RATE,
        "confBClientRate": setting.rate if setting is not None and setting.check_rate else UNDEFINED,
        "curBClientRate": most // max(len(group.members), 1),
    }


def rebalance(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Move all partitions of members of a group to other members."""
    params.required("modifyUser", "mur")
    group_name = names_of(params)[0]
    members = params.items("consumerId")
    if not members:
        raise BadParameter("consumerId is required")
    wait = params.number("reJoinWait", default=0, least=0, most=20)
    rows = []
    for member in members:
        done = engine.expel(group_name, member, wait, now)
        rows.append(item(200 if done else 401, "Ok!" if done else "not a member of the group", consumerId=member))
    return SettingChange([], success(rows))


def consume_from_max(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Have groups that balance by themselves continue at the newest messages; in memory only, as in the reference."""
    params.required("modifyUser", "mur")
    rows = []
    for name in names_of(params):
        group = engine.client_groups.get(name)
        if group is not None:
            group.from_max_id = now
        rows.append(item(200 if group else 401, "Ok!" if group else "no member is registered", groupName=name))
    return SettingChange([], success(rows))


# --- access control ---


def consume_controls(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Access of groups to topics."""
    groups, topics = set(params.items("groupName", "group", "consumeGroup")), set(params.items("topicName"))
    return success(
        [
            {
                "groupName": control.group,
                "topicName": control.topic,
                "consumeEnable": control.enabled,
                "disableCsmRsn": control.reason,
                "filterEnable": control.filter_enabled,
                # With a comma at both ends, because tools search for ",item,".
                "filterConds": f",{','.join(control.filters)}," if control.filters else "",
                **modification(engine, ConsumeControl, f"{group}\0{topic}"),
            }
            for (group, topic), control in sorted(engine.controls.consume.items())
            if (not groups or group in groups) and (not topics or topic in topics)
        ]
    )


def set_consume(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Allow or deny groups the consumption of topics, or restrict them to filters."""
    _user(params)
    changed: Changed = []
    rows = []
    filters = tuple(params.items("filterConds", "flts", most=500))
    for group in names_of(params):
        for topic in _topics(params):
            if topic not in engine.cluster.topics:
                rows.append(item(401, f"topic {topic} does not exist", groupName=group, topicName=topic))
                continue
            old = engine.controls.consume.get((group, topic), ConsumeControl(group, topic))
            wanted = ConsumeControl(
                group,
                topic,
                params.flag("consumeEnable", "csmEn", default=old.enabled),
                params.text("disableCsmRsn") or old.reason,
                params.flag("filterEnable", "fltEn", default=old.filter_enabled),
                filters or old.filters,
            )
            changed.append(wanted)
            rows.append(item(groupName=group, topicName=topic))
    return SettingChange(changed, success(rows))


def delete_consume(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove rules of groups; the topic's access control then applies."""
    params.required("modifyUser", "mur")
    groups, topics = set(names_of(params)), set(params.items("topicName"))
    found = [key for key in sorted(engine.controls.consume) if key[0] in groups and (not topics or key[1] in topics)]
    rows = [item(groupName=group, topicName=topic) for group, topic in found]
    return SettingChange(
        [Removal(ConsumeControl.__name__, f"{group}\0{topic}") for group, topic in found], success(rows)
    )


def topic_controls(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics with access control."""
    wanted = set(params.items("topicName"))
    return success(
        [
            {
                "topicName": name,
                "topicNameId": UNDEFINED,
                "enableAuthControl": name in engine.controls.topics and engine.controls.topics[name].enabled,
                "maxMsgSizeInMB": (topic.max_message_bytes or engine.max_message_bytes) // MIN_MESSAGE_BYTES,
                **modification(engine, TopicControl, name),
            }
            for name, topic in sorted(engine.cluster.topics.items())
            if not wanted or name in wanted
        ]
    )


def topic_authorization(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics with access control, with their groups and filters."""
    wanted = set(params.items("topicName"))
    return success([access_of(engine, name) for name in sorted(engine.cluster.topics) if not wanted or name in wanted])


def access_of(engine: MasterEngine, topic: str) -> Answer:
    """Access control of ``topic``, the groups with rules for it, and their filters."""
    control = engine.controls.topics.get(topic)
    groups, filters = [], []
    for (group, name), said in sorted(engine.controls.consume.items()):
        if name != topic:
            continue
        author = modification(engine, ConsumeControl, f"{group}\0{name}")
        if said.enabled:
            groups.append({"topicName": name, "groupName": group, **author})
        text = f",{','.join(said.filters)}," if said.filters else ""
        status = FILTERED if said.filter_enabled else FILTERED_AND_OFF if said.filters else 0
        filters.append({"topicName": name, "groupName": group, "condStatus": status, "filterConds": text, **author})
    return {
        "topicName": topic,
        "isEnable": control is not None and control.enabled,
        **modification(engine, TopicControl, topic),
        "authConsumeGroup": groups,
        "groupCount": len(groups),
        "authFilterCondSet": filters,
        "filterCount": len(filters),
    }


def set_topic_control(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Enable or disable the access control of topics, and set their message size."""
    _user(params)
    changed: Changed = []
    rows = []
    size = message_bytes(params)
    for name in _topics(params):
        topic = engine.cluster.topics.get(name)
        # A change that is being stored must not be overwritten by a change based on the previous state.
        if topic is None or name in engine.storing:
            rows.append(item(401, f"topic {name} does not exist", topicName=name))
            continue
        old = engine.controls.topics.get(name, TopicControl(name))
        changed.append(TopicControl(name, params.flag("enableAuthControl", "acEn", "isEnable", default=old.enabled)))
        if size is not None and size != topic.max_message_bytes:
            changed.append(topic._replace(max_message_bytes=size))
        rows.append(item(topicName=name))
    return SettingChange(changed, success(rows))


def delete_topic_control(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove the access control of topics."""
    params.required("modifyUser", "mur")
    names = [name for name in _topics(params) if name in engine.controls.topics]
    return SettingChange(
        [Removal(TopicControl.__name__, name) for name in names], success([item(topicName=n) for n in names])
    )


# --- limits and flow control ---


def resources(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Resources of groups: flow control rules, priority, brokers per member."""
    wanted = set(params.items("groupName", "group", "consumeGroup"))
    return success(
        [
            {
                "groupName": name,
                "resCheckEnable": setting.check_rate,
                "alwdBrokerClientRate": setting.rate,
                "qryPriorityId": setting.query_priority,
                "flowCtrlEnable": setting.flow_enabled,
                **flow_rules(setting.flow_info),
                **modification(engine, GroupSetting, name, setting.serial),
            }
            for name, setting in sorted(engine.controls.groups.items())
            if not wanted or name in wanted
        ]
    )


def _priority(params: Params, present: int) -> int:
    value = params.number("qryPriorityId", "qryPriId", default=present)
    if value != present and not (1 <= value // 100 <= 3 and 1 <= value % 100 <= 3):
        raise BadParameter(f"qryPriorityId {value}: 101 to 303, with 1 to 3 as first and last digit")
    return value


def set_resources(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Set resources of groups."""
    _user(params)
    changed: Changed = []
    for name in names_of(params):
        old = engine.controls.groups.get(name, GroupSetting(name))
        changed.append(
            GroupSetting(
                name,
                params.flag("resCheckEnable", default=old.check_rate),
                params.number(
                    "alwdBrokerClientRate", "abcr", "allowedBClientRate", default=old.rate, least=0, most=1 << 20
                ),
                _priority(params, old.query_priority),
                params.flag("flowCtrlEnable", "fCtrlEn", default=old.flow_enabled),
                flow_text(params, old.flow_info),
                max(now, old.serial + 1),  # must increase: clients ignore a version that they have
            )
        )
    return SettingChange(changed, success([item(groupName=name) for name in names_of(params)]))


def delete_resources(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove settings of groups."""
    params.required("modifyUser", "mur")
    names = [name for name in names_of(params) if name in engine.controls.groups]
    return SettingChange(
        [Removal(GroupSetting.__name__, name) for name in names], success([item(groupName=n) for n in names])
    )


def cluster_setting(engine: MasterEngine, params: Params, now: int) -> Answer:
    """The cluster's defaults."""
    setting, default = engine.controls.cluster, defaults_on(engine)
    return success(
        [
            {
                "maxMsgSizeInMB": engine.max_message_bytes // MIN_MESSAGE_BYTES,
                "qryPriorityId": QUERY_PRIORITY if setting.query_priority is None else setting.query_priority,
                "flowCtrlEnable": setting.flow_enabled,
                **flow_rules(setting.flow_info),
                **modification(engine, ClusterSetting, "", setting.serial),
                "numPartitions": default.partitions,
                "numTopicStores": default.stores,
                "deletePolicy": default.delete_policy,
                "acceptPublish": default.accept_publish,
                "acceptSubscribe": default.accept_subscribe,
                "brokerPort": setting.broker_port,
                "brokerTLSPort": setting.broker_tls_port,
                "brokerWebPort": setting.broker_web_port,
            }
        ]
    )


def set_cluster(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Set the cluster's defaults."""
    _user(params)
    refuse_unchangeable(params)
    old = engine.controls.cluster
    priority = _priority(params, UNDEFINED if old.query_priority is None else old.query_priority)
    wanted = ClusterSetting(
        message_bytes(params) or old.max_message_bytes,
        None if priority == UNDEFINED else priority,
        params.flag("flowCtrlEnable", "fCtrlEn", default=old.flow_enabled),
        flow_text(params, old.flow_info),
        max(now, old.serial + 1),
        topic_defaults(params, old.topic_defaults),
        params.number("brokerPort", default=old.broker_port, least=1, most=65535),
        params.number("brokerTLSPort", default=old.broker_tls_port, least=1, most=65535),
        params.number("brokerWebPort", default=old.broker_web_port, least=1, most=65535),
    )
    return SettingChange([wanted], success([item()]))


# --- older methods: lists of allowed and denied groups, filters, flow rules ---


def _with(run: MakeChange, **fixed: str) -> MakeChange:
    def fixing(engine: MasterEngine, params: Params, now: int) -> SettingChange:
        return run(engine, params.fixed(fixed), now)

    return fixing


def allow(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Allow groups to consume topics with access control."""
    return _with(set_consume, consumeEnable="true")(engine, params, now)


def forbid(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Deny groups the consumption of topics."""
    return _with(set_consume, consumeEnable="false")(engine, params, now)


def withdraw(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove groups from the list of groups that may, or may not, consume topics."""
    return delete_consume(engine, params, now)


def allowed(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups that may consume topics."""
    return _listed(engine, params, now, enabled=True)


def forbidden(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups that may not consume topics."""
    return _listed(engine, params, now, enabled=False)


def _listed(engine: MasterEngine, params: Params, now: int, *, enabled: bool) -> Answer:
    rows = consume_controls(engine, params, now)["data"]
    return success([{**row, "reason": row["disableCsmRsn"]} for row in rows if row["consumeEnable"] is enabled])


def bind_filters(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Restrict the consumption of groups to message types of topics."""
    status = params.number("condStatus", default=0, least=0, most=FILTERED)
    fixed = {"filterEnable": "true" if status == FILTERED else "false"} if params.text("condStatus") else {}
    return _with(set_consume, **fixed)(engine, params, now)


def free_filters(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove restrictions of groups to message types."""
    params.required("modifyUser", "mur")
    changed: list[Setting | Removal] = []
    rows = []
    wanted, topics = set(names_of(params)), set(params.items("topicName"))
    for (group, topic), control in sorted(engine.controls.consume.items()):
        if group in wanted and (not topics or topic in topics):
            changed.append(control._replace(filter_enabled=False, filters=()))
            rows.append(item(groupName=group, topicName=topic))
    return SettingChange(changed, success(rows))


def filters(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Message types that groups may consume of topics."""
    rows = consume_controls(engine, params, now)["data"]
    wanted = params.number("condStatus", default=-1)
    found = [{**row, "condStatus": _condition(row)} for row in rows]
    return success([row for row in found if wanted in {-1, row["condStatus"]}])


def _condition(row: Answer) -> int:
    return FILTERED if row["filterEnable"] else FILTERED_AND_OFF if row["filterConds"] else 0


# Resources.


def group_settings(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Limits of clients of a group per broker."""
    rows = resources(engine, params, now)["data"]
    return success(
        [
            {
                "groupName": row["groupName"],
                "consumeGroupName": row["groupName"],
                "enableBind": int(row["resCheckEnable"]),
                "allowedBClientRate": row["alwdBrokerClientRate"],
                "attributes": "",
                "lastBindUsedDate": "-",
                **{name: row[name] for name in AUTHOR},
            }
            for row in rows
        ]
    )


def set_group(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Set limits of clients of a group per broker."""
    bind = params.text("enableBind")
    if bind not in {"", "0", "1"}:
        raise BadParameter(f"enableBind {bind!r}: 0 or 1 are possible")
    fixed = {"resCheckEnable": "true" if bind == "1" else "false"} if bind else {}
    return _with(set_resources, **fixed)(engine, params, now)


def group_rules(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Flow control rules of groups."""
    rows = resources(engine, params, now)["data"]
    return success([_rules(row["groupName"], row) for row in rows])


def _rules(name: str, row: Answer) -> Answer:
    return {
        "groupName": name,
        "statusId": int(row["flowCtrlEnable"]),
        "ruleCnt": row["flowCtrlRuleCount"],
        "flowCtrlInfo": row["flowCtrlInfo"],
        "qryPriorityId": row["qryPriorityId"],
        **{name: row[name] for name in AUTHOR},
    }


def set_rules(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Set flow control rules of groups; they are enabled unless `statusId` is 0."""
    return _with(set_resources, flowCtrlEnable=_status(params))(engine, params, now)


def _status(params: Params) -> str:
    return "true" if params.number("statusId", default=1, least=0, most=1) else "false"


def forget_rules(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove flow control rules of groups."""
    params.required("modifyUser", "mur")
    changed: list[Setting | Removal] = []
    rows = []
    for name in names_of(params):
        old = engine.controls.groups.get(name)
        if old is None:
            rows.append(item(401, f"group {name} has no rules", groupName=name))
            continue
        empty = GroupSetting(name)
        changed.append(
            old._replace(flow_enabled=empty.flow_enabled, flow_info=empty.flow_info, serial=max(now, old.serial + 1))
        )
        rows.append(item(groupName=name))
    return SettingChange(changed, success(rows))


def cluster_rules(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Flow control rules of all groups."""
    (row,) = cluster_setting(engine, params, now)["data"]
    return success([_rules("default_master_ctrl", row)])


def set_cluster_rules(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Set flow control rules of all groups; they are enabled unless `statusId` is 0."""
    return _with(set_cluster, flowCtrlEnable=_status(params))(engine, params, now)


def reset_cluster_rules(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove the flow control rules of all groups."""
    params.required("modifyUser", "mur")
    old, empty = engine.controls.cluster, ClusterSetting()
    wanted = old._replace(flow_enabled=empty.flow_enabled, flow_info=empty.flow_info, serial=max(now, old.serial + 1))
    return SettingChange([wanted], success([item()]))
