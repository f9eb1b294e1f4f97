"""Older methods for access control and flow control: lists of allowed and denied groups, filters, flow rules.

Each is a view of the settings that the newer methods show completely (``…_csmctrl_info``, ``…_resctrl_info``).
"""

from __future__ import annotations

from penstock.tube.admin import groups
from penstock.tube.admin.changes import AUTHOR, Answer, Run, SettingChange, item, success
from penstock.tube.admin.parameters import BadParameter, Params
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import ClusterSetting, GroupSetting, Removal, Setting

__all__ = [
    "allow",
    "allowed",
    "bind_filters",
    "cluster_rules",
    "filters",
    "forbid",
    "forbidden",
    "forget_rules",
    "free_filters",
    "group_rules",
    "group_settings",
    "reset_cluster_rules",
    "set_cluster_rules",
    "set_group",
    "set_rules",
    "withdraw",
]


def _with(run: Run, **fixed: str) -> Run:
    def fixing(engine: MasterEngine, params: Params, now: int) -> SettingChange:
        return run(engine, params.fixed(fixed), now)

    return fixing


def allow(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Allow groups to consume topics with access control."""
    return _with(groups.set_consume, consumeEnable="true")(engine, params, now)


def forbid(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Deny groups the consumption of topics."""
    return _with(groups.set_consume, consumeEnable="false")(engine, params, now)


def withdraw(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove groups from the list of those that may, or may not, consume topics."""
    return groups.delete_consume(engine, params, now)


def allowed(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups that may consume topics."""
    return _listed(engine, params, now, enabled=True)


def forbidden(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups that may not consume topics."""
    return _listed(engine, params, now, enabled=False)


def _listed(engine: MasterEngine, params: Params, now: int, *, enabled: bool) -> Answer:
    rows = groups.consume_controls(engine, params, now)["data"]
    return success([{**row, "reason": row["disableCsmRsn"]} for row in rows if row["consumeEnable"] is enabled])


def bind_filters(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Restrict the consumption of groups to message types of topics."""
    status = params.number("condStatus", default=0, least=0, most=groups.FILTERED)
    fixed = {"filterEnable": "true" if status == groups.FILTERED else "false"} if params.text("condStatus") else {}
    return _with(groups.set_consume, **fixed)(engine, params, now)


def free_filters(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove restrictions of groups to message types."""
    params.required("modifyUser", "mur")
    changed: list[Setting | Removal] = []
    rows = []
    wanted, topics = set(groups.names_of(params)), set(params.items("topicName"))
    for (group, topic), control in sorted(engine.controls.consume.items()):
        if group in wanted and (not topics or topic in topics):
            changed.append(control._replace(filter_enabled=False, filters=()))
            rows.append(item(groupName=group, topicName=topic))
    return SettingChange(changed, success(rows))


def filters(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Message types that groups may consume of topics."""
    rows = groups.consume_controls(engine, params, now)["data"]
    wanted = params.number("condStatus", default=-1)
    found = [{**row, "condStatus": _condition(row)} for row in rows]
    return success([row for row in found if wanted in {-1, row["condStatus"]}])


def _condition(row: Answer) -> int:
    return groups.FILTERED if row["filterEnable"] else groups.FILTERED_AND_OFF if row["filterConds"] else 0


# Resources.


def group_settings(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Limits of clients of a group per broker."""
    rows = groups.resources(engine, params, now)["data"]
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
    return _with(groups.set_resources, **fixed)(engine, params, now)


def group_rules(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Flow control rules of groups."""
    rows = groups.resources(engine, params, now)["data"]
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
    return _with(groups.set_resources, flowCtrlEnable=_status(params))(engine, params, now)


def _status(params: Params) -> str:
    return "true" if params.number("statusId", default=1, least=0, most=1) else "false"


def forget_rules(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove flow control rules of groups."""
    params.required("modifyUser", "mur")
    changed: list[Setting | Removal] = []
    rows = []
    for name in groups.names_of(params):
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
    (row,) = groups.cluster_setting(engine, params, now)["data"]
    return success([_rules("default_master_ctrl", row)])


def set_cluster_rules(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Set flow control rules of all groups; they are enabled unless `statusId` is 0."""
    return _with(groups.set_cluster, flowCtrlEnable=_status(params))(engine, params, now)


def reset_cluster_rules(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove the flow control rules of all groups."""
    params.required("modifyUser", "mur")
    old, empty = engine.controls.cluster, ClusterSetting()
    wanted = old._replace(flow_enabled=empty.flow_enabled, flow_info=empty.flow_info, serial=max(now, old.serial + 1))
    return SettingChange([wanted], success([item()]))
