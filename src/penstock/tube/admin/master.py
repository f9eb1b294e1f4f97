"""The master's HTTP methods (``/webapi.htm?method=…``): overviews across brokers, topics and groups, the table of
methods, authorization and the response. Topics, brokers and groups have modules of their own.

A query is answered immediately. A change returns the settings to store first: the caller makes them durable, applies
them and then sends the response. Every parameter has a long and often a short name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import penstock
from penstock.errors import RefusedError
from penstock.tube.admin import brokers, groups, topics
from penstock.tube.admin.changes import Answer, MakeChange, SettingChange, batch, failure, item, success
from penstock.tube.admin.request import UNAUTHORIZED, UNKNOWN, BadParameter, Caller, Params, format_time
from penstock.tube.engine.master.balance import Group
from penstock.tube.engine.master.clients import ClientGroup
from penstock.tube.engine.master.master import MasterEngine, MasterPeer
from penstock.tube.engine.master.settings import Authorship, BrokerStatus, Removal, Setting, TopicDeployment, key_of

__all__ = ["METHODS", "BadParameter", "MasterMethod", "SettingChange", "authors", "failure", "handle", "is_protected"]

# --- overviews, and methods without effect ---


def _topics_of_brokers(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics by broker."""
    wanted = set(params.numbers("brokerId"))
    found = {
        number: [topic.name for topic in sorted(engine.cluster.topics.values()) if topic.on(number)]
        for number in sorted(engine.cluster.brokers)
        if not wanted or number in wanted
    }
    return success(
        [{"brokerId": number, "topicName": names, "topicCount": len(names)} for number, names in found.items()]
    )


def _loads_of_brokers(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Number of topics, stores and partitions of each broker, and how many of them can be used."""
    wanted, numbers = set(params.items("topicName")), set(params.numbers("brokerId"))
    rows: list[Answer] = []
    for number, broker in sorted(engine.cluster.brokers.items()):
        if numbers and number not in numbers:
            continue
        topics = [t for name, t in engine.cluster.topics.items() if t.on(number) and (not wanted or name in wanted)]
        setting = engine.controls.brokers.get(number)
        writes, reads = broker.online and not broker.stop_write, broker.online and not broker.stop_read
        served = [topic.at(number) for topic in topics if topic.name in broker.serving]
        rows.append(
            {
                "brokerId": number,
                "brokerIp": broker.info.host,
                "brokerPort": broker.info.port,
                "manageStatus": "online" if setting is None else BrokerStatus(setting.status).text,
                "acceptPublish": not broker.stop_write,
                "acceptSubscribe": not broker.stop_read,
                "nodeRunInfo": "running" if broker.online else "notRegister",
                **_counted("topicTotalCfgCnt", [topic.at(number) for topic in topics]),
                **_counted("topicAccPubTotalCnt", [here for here in served if writes and here.accept_publish]),
                **_counted("topicAccSubTotalCnt", [here for here in served if reads and here.accept_subscribe]),
            }
        )
    return success(rows)


def _counted(name: str, places: list[TopicDeployment]) -> Answer:
    """Return the number of topics of a broker, or brokers of a topic, under ``name``, with their stores and
    partitions."""
    what = name.removeprefix("topic").removeprefix("broker")
    return {
        name: len(places),
        f"store{what}": sum(here.stores for here in places),
        f"part{what}": sum(here.partition_count for here in places),
    }


def _spread_of_topics(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Number of brokers, stores and partitions of each topic, and how many of them can be used."""
    wanted = set(params.items("topicName"))
    cluster = engine.cluster
    rows: list[Answer] = []
    for name, topic in sorted(cluster.topics.items()):
        if wanted and name not in wanted:
            continue
        on = [broker for number, broker in cluster.brokers.items() if topic.on(number)]
        running = [broker for broker in on if broker.online and name in broker.serving]
        places = [(broker, topic.at(broker.info.id)) for broker in running]
        control = engine.controls.topics.get(name)
        rows.append(
            {
                "topicName": name,
                **_counted("brokerTotalCfgCnt", [topic.at(broker.info.id) for broker in on]),
                **_counted("brokerTotalRunCnt", [here for _, here in places]),
                **_counted("brokerAccPubTotalCnt", [p for b, p in places if p.accept_publish and not b.stop_write]),
                **_counted("brokerAccSubTotalCnt", [p for b, p in places if p.accept_subscribe and not b.stop_read]),
                "topicSrvAccPubStatus": cluster.topic_info(name) is not None,
                "topicSrvAccSubStatus": bool(cluster.partitions([name])),
                "enableAuthControl": control is not None and control.enabled,
            }
        )
    return success(rows)


def _brokers_of_topics(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Brokers by topic; `withIp` with their addresses."""
    wanted, with_ip = set(params.items("topicName")), params.flag("withIp", "ip", default=False)
    cluster = engine.cluster
    rows: list[Answer] = []
    for name, topic in sorted(cluster.topics.items()):
        if wanted and name not in wanted:
            continue
        found = [(number, broker.info.host) for number, broker in sorted(cluster.brokers.items()) if topic.on(number)]
        rows.append(
            {
                "topicName": name,
                "brokerInfo": [{"brokerId": number, "brokerIp": host} for number, host in found]
                if with_ip
                else [number for number, _ in found],
                "brokerCnt": len(found),
            }
        )
    return success(rows)


def _cluster_view(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics as a whole: number of brokers and partitions, and whether they can be used."""
    wanted, numbers = set(params.items("topicName")), set(params.numbers("brokerId"))
    cluster = engine.cluster
    rows: list[Answer] = []
    for name, topic in sorted(cluster.topics.items()):
        on = [broker for number, broker in cluster.brokers.items() if topic.on(number)]
        if (wanted and name not in wanted) or (numbers and not numbers & {broker.info.id for broker in on}):
            continue
        configured = [topic.at(broker.info.id) for broker in on]
        running = [broker.serving[name] for broker in on if broker.online and name in broker.serving]
        control = engine.controls.topics.get(name)
        rows.append(
            {
                "topicName": name,
                "totalCfgBrokerCnt": len(on),
                "totalCfgNumStore": sum(here.stores for here in configured),
                "totalRunNumStore": sum(config.stores or 1 for config in running),
                "totalCfgNumPart": sum(here.partition_count for here in configured),
                "totalRunNumPartCount": sum((config.partitions or 1) * (config.stores or 1) for config in running),
                "isSrvAcceptPublish": cluster.topic_info(name) is not None,
                "isSrvAcceptSubscribe": bool(cluster.partitions([name])),
                "enableAuthControl": control is not None and control.enabled,
            }
        )
    return success(rows)


def _groups_by_topic(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups that consume topics now."""
    wanted = set(params.items("topicName"))
    known: dict[str, Group | ClientGroup] = {**engine.groups, **engine.client_groups}
    rows: list[Answer] = []
    for topic in sorted(engine.cluster.topics):
        if wanted and topic not in wanted:
            continue
        names = sorted(name for name, group in known.items() if topic in group.topics)
        rows.append({"topicName": topic, "groupSet": names, "groupCnt": len(names)})
    return success(rows)


def _groups_with_resources(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Names of the groups with their own resources."""
    return success(sorted(engine.controls.groups))


def _groups_with_rules(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Names of the groups with access rules."""
    return success(sorted({group for group, _ in engine.controls.consume}))


def _self_balancing(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups that balance by themselves."""
    wanted = set(params.items("groupName", "group", "consumeGroup"))
    return success([name for name in sorted(engine.client_groups) if not wanted or name in wanted])


def _statistics_on(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Succeeds without effect: counters are always on."""
    return success([])


def _statistics_off(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Refused: counters are always on."""
    return failure("counters are always on: they cannot be disabled")


def _release(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Refused for each broker: this master never disables one; restart a broker whose disk failed."""
    params.required("modifyUser", "mur")
    rows = []
    for number in params.numbers("brokerId"):
        broker = engine.cluster.brokers.get(number)
        if broker is None:
            rows.append(item(401, "not known", brokerId=number))
        elif broker.read_status < 0 or broker.write_status < 0:
            failure = broker.failure or "it reports a failure"
            rows.append(item(405, f"the master cannot release it, start the broker again: {failure}", brokerId=number))
        else:
            rows.append(item(405, "it is not disabled: this master never disables a broker", brokerId=number))
    return SettingChange([], success(rows))


def _transfer(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Hand over to another master; refused if there is one master."""
    if engine.hand_over is None:
        text = f"{engine.address} is the only master of this cluster: no other can take over"
        return SettingChange([], failure(text))
    try:
        engine.hand_over()
    except RefusedError as refused:
        return SettingChange([], failure(refused.what))
    return SettingChange([], success([]))


# --- table and requests ---


def handle(
    engine: MasterEngine, params: Mapping[str, str], token: str | None, now: int, caller: Caller = UNKNOWN
) -> Answer | SettingChange:
    """Answer a request of ``caller``.

    ``token`` is the administration token, which a request contains as ``confModAuthToken``; None: only users may make
    changes.
    """
    name = params.get("method", "")
    method = METHODS.get(name)
    if method is None:
        return failure(f"Unsupported method: {name}")
    try:
        caller = caller.showing(params, token)
        if not (caller.administers if method.changes else caller.reads):
            return failure(UNAUTHORIZED)
        given = Params(params, identified=caller.identified)
        if method.only is not None:
            given.check_unused(method.only)
        outcome = method.run(engine, given, now)
        if isinstance(outcome, SettingChange) and outcome.settings and not method.batch:
            given.check_unused()
        return outcome
    except BadParameter as error:
        return failure(str(error))


def is_protected(name: str) -> bool:
    """Return True if the method of that name makes a change."""
    method = METHODS.get(name)
    return method is not None and method.changes


def _master_group(engine: MasterEngine, params: Params, now: int) -> Answer:
    """The masters and their states."""
    peers = [MasterPeer("master", engine.address, engine.active)] if engine.peers is None else engine.peers()
    rows = []
    for index, peer in enumerate(peers, 1):
        host, _, port = peer.address.rpartition(":")
        status = {"nodeStatus": "MASTER" if peer.active else "REPLICA"}
        rows.append({"index": index, "name": peer.name, "hostName": host, "port": port, "statusInfo": status})
    return success(rows) | {
        "groupName": "penstock",
        "isPrimaryNodeActive": False,
        "groupStatus": "Running-ReadWrite" if engine.active else "Running-ReadOnly",
    }


def _version(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Version of the server."""
    return success([{"version": f"penstock-{penstock.__version__}"}])


def _methods(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Names of the methods."""
    return success([{"method": name, "needAuth": method.changes} for name, method in sorted(METHODS.items())])


def _metrics(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Counters of the master."""
    figures = {
        "requests": engine.requests,
        "producers": len(engine.producers),
        "groups": len(engine.groups) + len(engine.client_groups),
        "brokers": sum(broker.online for broker in engine.cluster.brokers.values()),
        "topics": len(engine.cluster.topics),
        "rebalances": engine.rebalances,
    }
    node = {"probeTime": format_time(now), "nodeName": engine.address.rpartition(":")[0], "nodeRole": "Master"}
    return success([{**node, "metrics": figures}])


def authors(
    engine: MasterEngine, settings: Sequence[Setting | Removal], params: Mapping[str, str], now: int
) -> list[Setting | Removal]:
    """Return the authors of each of ``settings``, to be stored with them.

    Names and dates are taken from the request, as in the reference; the audit trail has the authenticated user and the
    time. Raises BadParameter.
    """
    given = Params(params)
    user = given.text("modifyUser", "mur") or given.text("createUser", "cur") or "-"
    found: list[Setting | Removal] = []
    for setting in settings:
        key = key_of(setting)
        if isinstance(setting, Removal):
            found.append(Removal(Authorship.__name__, "\0".join(key)))
            continue
        before = engine.controls.authors.get(key)
        made = before or Authorship(*key, user, _date(given, now, "createDate", "cDate"), user, now)
        found.append(made._replace(modify_user=user, modify_ms=_date(given, now, "modifyDate", "mDate")))
    return found


def _date(params: Params, now: int, *names: str) -> int:
    return params.time_ms(*names) if params.text(*names) else now


class MasterMethod(NamedTuple):
    """One method. The docstring of ``run`` is its line on the reference page.

    ``only``: all parameters of a change that takes effect immediately; others are rejected before it runs. Any other
    change is rejected afterwards if a parameter was not used. ``batch``: its objects are checked one by one.
    """

    run: Callable[[MasterEngine, Params, int], Answer | SettingChange]
    changes: bool = False
    only: frozenset[str] | None = None
    batch: bool = False


def _change(run: Callable[[MasterEngine, Params, int], SettingChange], *names: str) -> dict[str, MasterMethod]:
    return dict.fromkeys(names, MasterMethod(run, changes=True))


def _immediate_change(
    run: Callable[[MasterEngine, Params, int], SettingChange], name: str, *only: str
) -> dict[str, MasterMethod]:
    """Wrap a change that takes effect immediately and is not stored."""
    return {name: MasterMethod(run, changes=True, only=frozenset(only))}


def _query(run: Callable[[MasterEngine, Params, int], Answer], *names: str) -> dict[str, MasterMethod]:
    return dict.fromkeys(names, MasterMethod(run))


def _batches(names: tuple[str, ...], *rows: tuple[MakeChange | str, ...]) -> dict[str, MasterMethod]:
    """Return rows of the method table: the function for each object of the array in one of ``names``, and the methods
    that call it."""
    found: dict[str, MasterMethod] = {}
    for run, *methods in rows:
        assert not isinstance(run, str)
        found |= dict.fromkeys(
            (str(name) for name in methods), MasterMethod(batch(run, *names), changes=True, batch=True)
        )
    return found


_GROUP = ("groupName", "group", "consumeGroup")
METHODS: dict[str, MasterMethod] = {
    **_query(topics.info, "admin_query_topic_info"),
    **_query(topics.deployed, "admin_query_topic_deploy_info"),
    **_query(topics.topic_rows, "admin_query_topic_deploy_configure"),
    **_query(_topics_of_brokers, "admin_query_deployed_topics"),
    **_query(_loads_of_brokers, "admin_query_broker_topic_config_info"),
    **_query(_brokers_of_topics, "admin_query_deployed_broker_ids"),
    **_query(_spread_of_topics, "admin_query_topic_broker_config_info"),
    **_query(_cluster_view, "admin_query_cluster_topic_view"),
    **_change(topics.add, "admin_add_new_topic_record", "admin_add_topic_deploy_info"),
    **_change(topics.modify, "admin_modify_topic_info", "admin_update_topic_deploy_info"),
    **_change(topics.delete, "admin_delete_topic_info", "admin_delete_topic_deploy_info"),
    **_change(topics.redo, "admin_redo_deleted_topic_info", "admin_redo_deleted_topic_deploy_info"),
    **_change(topics.remove, "admin_remove_topic_info", "admin_remove_topic_deploy_info"),
    **_query(brokers.configured, "admin_query_broker_configure"),
    **_query(brokers.run_status, "admin_query_broker_run_status"),
    **_change(brokers.add, "admin_add_broker_configure"),
    **_change(brokers.update, "admin_update_broker_configure"),
    **_change(brokers.delete, "admin_delete_broker_configure"),
    **_change(brokers.online, "admin_online_broker_configure"),
    **_change(brokers.offline, "admin_offline_broker_configure"),
    **_immediate_change(brokers.reload, "admin_reload_broker_configure", "brokerId"),
    **_change(brokers.read_or_write, "admin_set_broker_read_or_write"),
    **_query(groups.sub_info, "admin_query_sub_info"),
    **_query(groups.detail, "admin_query_consume_group_detail"),
    **_immediate_change(groups.rebalance, "admin_rebalance_group_allocate", *_GROUP, "consumerId", "reJoinWait"),
    **_immediate_change(groups.consume_from_max, "admin_set_client_balance_group_consume_from_max", *_GROUP),
    **_query(groups.topic_controls, "admin_query_topic_control_info"),
    **_query(groups.topic_authorization, "admin_query_topic_authorize_control"),
    **_change(
        groups.set_topic_control,
        "admin_add_topic_control_info",
        "admin_update_topic_control_info",
        "admin_set_topic_authorize_control",
    ),
    **_change(groups.delete_topic_control, "admin_delete_topic_control_info", "admin_delete_topic_authorize_control"),
    **_query(groups.consume_controls, "admin_query_group_csmctrl_info"),
    **_change(groups.set_consume, "admin_add_group_csmctrl_info", "admin_update_group_csmctrl_info"),
    **_change(groups.delete_consume, "admin_delete_group_csmctrl_info"),
    **_query(groups.resources, "admin_query_group_resctrl_info"),
    **_change(groups.set_resources, "admin_add_group_resctrl_info", "admin_update_group_resctrl_info"),
    **_change(groups.delete_resources, "admin_delete_group_resctrl_info"),
    **_query(groups.cluster_setting, "admin_query_cluster_default_setting"),
    **_change(groups.set_cluster, "admin_set_cluster_default_setting", "admin_update_cluster_default_setting"),
    **_batches(
        ("brokerJsonSet", "brokerSet"),
        (brokers.add, "admin_batch_add_broker_configure", "admin_bath_add_broker_configure"),
        (brokers.update, "admin_batch_update_broker_configure"),
    ),
    **_batches(
        ("topicJsonSet", "topicSet"),
        (topics.add, "admin_bath_add_topic_deploy_info", "admin_bath_add_new_topic_record"),
        (topics.modify, "admin_batch_update_topic_deploy_info"),
    ),
    **_batches(
        ("topicCtrlJsonSet", "tCtrlSet", "topicJsonSet"),
        (
            groups.set_topic_control,
            "admin_batch_add_topic_control_info",
            "admin_batch_update_topic_control_info",
            "admin_bath_add_topic_authorize_control",
        ),
    ),
    **_batches(
        ("groupResCtrlJsonSet", "gResCtrlSet"),
        (groups.set_resources, "admin_batch_add_group_resctrl_info", "admin_batch_update_group_resctrl_info"),
    ),
    **_batches(
        ("groupCsmJsonSet", "csmJsonSet"),
        (groups.set_consume, "admin_batch_add_group_csmctrl_info", "admin_batch_update_group_csmctrl_info"),
        (groups.delete_consume, "admin_batch_delete_group_csmctrl_info"),
    ),
    **_query(groups.allowed, "admin_query_allowed_consumer_group_info"),
    **_change(groups.allow, "admin_add_authorized_consumergroup_info"),
    **_query(groups.forbidden, "admin_query_black_consumer_group_info"),
    **_change(groups.forbid, "admin_add_black_consumergroup_info"),
    **_change(groups.withdraw, "admin_delete_allowed_consumer_group_info", "admin_delete_black_consumergroup_info"),
    **_batches(
        ("groupNameJsonSet", "gJsonSet"),
        (groups.allow, "admin_bath_add_authorized_consumergroup_info"),
        (groups.forbid, "admin_bath_add_black_consumergroup_info"),
        (
            groups.withdraw,
            "admin_batch_del_authorized_consumergroup_info",
            "admin_batch_delete_black_consumergroup_info",
        ),
        (groups.set_group, "admin_bath_add_consume_group_setting"),
    ),
    **_query(groups.filters, "admin_query_group_filtercond_info"),
    **_change(groups.bind_filters, "admin_add_group_filtercond_info", "admin_mod_group_filtercond_info"),
    **_change(groups.free_filters, "admin_del_group_filtercond_info"),
    **_batches(
        ("filterCondJsonSet", "filterJsonSet"),
        (groups.bind_filters, "admin_bath_add_group_filtercond_info", "admin_bath_mod_group_filtercond_info"),
    ),
    **_query(groups.group_settings, "admin_query_consume_group_setting"),
    **_change(groups.set_group, "admin_add_consume_group_setting", "admin_upd_consume_group_setting"),
    **_change(groups.delete_resources, "admin_del_consume_group_setting"),
    **_query(groups.group_rules, "admin_query_group_flow_control_rule"),
    **_change(groups.set_rules, "admin_set_group_flow_control_rule", "admin_upd_group_flow_control_rule"),
    **_change(groups.forget_rules, "admin_rmv_group_flow_control_rule"),
    **_query(groups.cluster_rules, "admin_query_def_flow_control_rule"),
    **_change(groups.set_cluster_rules, "admin_set_def_flow_control_rule", "admin_upd_def_flow_control_rule"),
    **_change(groups.reset_cluster_rules, "admin_rmv_def_flow_control_rule"),
    **_query(_groups_with_resources, "admin_query_booked_resctrl_groups"),
    **_query(_groups_with_rules, "admin_query_booked_csmctrl_groups"),
    **_query(_groups_by_topic, "admin_query_group_info_by_topic"),
    **_query(_self_balancing, "admin_query_client_balance_group_set"),
    **_immediate_change(_release, "admin_release_broker_autoforbidden_status", "brokerId", "relReason"),
    **_query(_statistics_on, "admin_enable_stats"),
    **_query(_statistics_off, "admin_disable_stats", "admin_disable_all_stats"),
    **_immediate_change(_transfer, "admin_transfer_current_master"),
    **_query(_master_group, "admin_query_master_group_info"),
    **_query(_version, "admin_query_server_version"),
    **_query(_methods, "admin_get_methods"),
    **_query(_metrics, "admin_get_metrics_info"),
}
