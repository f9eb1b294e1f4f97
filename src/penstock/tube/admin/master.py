"""The master's HTTP methods (``/webapi.htm?method=…``) as functions of their parameters, shaped as the reference's.

A query answers at once. A change answers with the settings to store first: the caller makes them durable, tells the
engine and then sends the answer. Every parameter has a long and often a short name.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import NamedTuple

import penstock
from penstock.tube.admin import brokers, groups, topics
from penstock.tube.admin.common import Answer, Change, failure, success
from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.engine.master import MasterEngine

__all__ = ["METHODS", "Change", "Method", "handle"]

MAX_TOKEN = 128


def handle(engine: MasterEngine, params: Mapping[str, str], token: str | None, now: int) -> Answer | Change:
    """Answer a request. ``token`` is what changes must bring as ``confModAuthToken``; None: no change is allowed."""
    name = params.get("method", "")
    method = METHODS.get(name)
    if method is None:
        return failure(f"Unsupported method: {name}")
    try:
        if method.changes:
            given = params.get("confModAuthToken", "")[: MAX_TOKEN + 1]
            if token is None or not hmac.compare_digest(given.encode(), token.encode()):
                return failure("illegal access, unauthorized request!")
        return method.run(engine, Params(params), now)
    except BadParameter as error:
        return failure(str(error))


def _master_group(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001 - the table's form
    """The master and its state."""
    host, _, port = engine.address.rpartition(":")
    status = "Master" if engine.active else "Standby"
    return success(
        [{"index": 1, "name": "master", "hostName": host, "port": port, "statusInfo": {"nodeStatus": status}}]
    )


def _version(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Version of the server."""
    return success([{"serverVersion": f"penstock-{penstock.__version__}"}])


def _methods(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Names of the methods."""
    return success([{"id": number, "method": name} for number, name in enumerate(sorted(METHODS), 1)])


def _metrics(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Counters of the master."""
    figures = {
        "requests": engine.requests,
        "producers": len(engine.producers),
        "groups": len(engine.groups) + len(engine.client_groups),
        "brokers": sum(broker.online for broker in engine.cluster.brokers.values()),
        "topics": len(engine.cluster.topics),
        "rebalances": engine.rebalances,
    }
    return success([figures])


class Method(NamedTuple):
    """One row: what runs, and whether it changes something. The docstring of ``run`` is the reference page's line."""

    run: Callable[[MasterEngine, Params, int], Answer | Change]
    changes: bool = False


def _change(run: Callable[[MasterEngine, Params, int], Change], *names: str) -> dict[str, Method]:
    return dict.fromkeys(names, Method(run, changes=True))


def _query(run: Callable[[MasterEngine, Params, int], Answer], *names: str) -> dict[str, Method]:
    return dict.fromkeys(names, Method(run))


METHODS: dict[str, Method] = {
    **_query(topics.info, "admin_query_topic_info", "admin_query_topic_deploy_info"),
    **_query(topics.deployed, "admin_query_broker_topic_config_info"),
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
    **_change(brokers.reload, "admin_reload_broker_configure"),
    **_change(brokers.read_or_write, "admin_set_broker_read_or_write"),
    **_query(groups.sub_info, "admin_query_sub_info"),
    **_query(groups.detail, "admin_query_consume_group_detail"),
    **_change(groups.rebalance, "admin_rebalance_group_allocate"),
    **_change(groups.consume_from_max, "admin_set_client_balance_group_consume_from_max"),
    **_query(groups.topic_controls, "admin_query_topic_control_info", "admin_query_topic_authorize_control"),
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
    **_query(_master_group, "admin_query_master_group_info"),
    **_query(_version, "admin_query_server_version"),
    **_query(_methods, "admin_get_methods"),
    **_query(_metrics, "admin_get_metrics_info"),
}
