"""The master's HTTP methods (``/webapi.htm?method=…``) as functions of their parameters, shaped as the reference's.

A query answers at once. A change answers with the topics to store first: the caller makes them durable, tells the
engine and then sends the answer. Every parameter has a long and a short name.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.errors import RefusedError
from penstock.tube.engine.cluster import Cluster, Topic
from penstock.tube.engine.master import MIN_MESSAGE_BYTES, MasterEngine

__all__ = ["METHODS", "Change", "Method", "handle"]

Answer = dict[str, Any]
MAX_ITEMS = 100


class Change(NamedTuple):
    """``topics`` to make durable, then to tell the engine; ``answer`` to send after that."""

    topics: list[Topic]
    answer: Answer


class _Bad(Exception):  # noqa: N818 - an answer
    pass


def handle(engine: MasterEngine, params: Mapping[str, str], token: str | None) -> Answer | Change:
    """Answer a request. ``token`` is what changes must bring as ``confModAuthToken``; None: no change is allowed."""
    name = params.get("method", "")
    method = METHODS.get(name)
    if method is None:
        return _failure(f"Unsupported method: {name}")
    try:
        if method.changes:
            given = params.get("confModAuthToken", "")
            if token is None or not hmac.compare_digest(given.encode(), token.encode()):
                return _failure("illegal access, unauthorized request!")
        return method.run(engine, params)
    except _Bad as error:
        return _failure(str(error))


def _add_topic(engine: MasterEngine, params: Mapping[str, str]) -> Change:
    if not _text(params, "createUser", "cur"):
        raise _Bad("createUser is required")
    names = _items(params, "topicName", "topicName")
    if not names:
        raise _Bad("topicName is required")
    broker_ids = [_number(item, "brokerId") for item in _items(params, "brokerId", "brokerId")]
    default = engine.config.default
    partitions = _number(_text(params, "numPartitions", "numPart") or str(default.partitions), "numPartitions")
    stores = _number(_text(params, "numTopicStores", "numStore") or str(default.stores), "numTopicStores")
    publish = _flag(_text(params, "acceptPublish", "accPub"))
    subscribe = _flag(_text(params, "acceptSubscribe", "accSub"))
    topics: list[Topic] = []
    rows: list[Answer] = []
    for name in names:
        known = engine.cluster.topics.get(name) if name not in engine.storing else None
        wanted = Topic(name, partitions, stores, tuple(sorted(broker_ids)) or None, publish, subscribe)
        if known is not None and known.brokers is not None and not all(map(known.on, broker_ids)):
            # The topic gets further brokers.
            wanted = known._replace(brokers=tuple(sorted({*known.brokers, *broker_ids})))
            code, text = 200, "Ok!"
            topics.append(wanted)
        else:
            try:
                engine.check_new_topic(wanted)
                code, text = 200, "Ok!"
                topics.append(wanted)
            except RefusedError as error:
                code, text = error.code, error.what
        rows += [
            {"brokerId": broker_id, "topicName": name, "success": code == 200, "errCode": code, "errInfo": text}
            for broker_id in broker_ids or sorted(engine.cluster.brokers) or [0]
        ]
    return Change(topics, _success(rows))


def _topic_info(engine: MasterEngine, params: Mapping[str, str]) -> Answer:
    wanted = set(_items(params, "topicName", "topicName"))
    rows = [
        _topic_row(engine, topic)
        for name, topic in sorted(engine.cluster.topics.items())
        if not wanted or name in wanted
    ]
    return _success(rows)


def _topic_row(engine: MasterEngine, topic: Topic) -> Answer:
    cluster = engine.cluster
    rows = []
    running = 0
    for broker_id, broker in sorted(cluster.brokers.items()):
        if not topic.on(broker_id):
            continue
        config = broker.serving.get(topic.name)
        run: Answer = dict.fromkeys(
            ["acceptPublish", "acceptSubscribe", "numPartitions", "numTopicStores", "brokerManageStatus"], "-"
        )
        if config is not None:
            running += (config.partitions or 1) * (config.stores or 1)
            run = {
                "acceptPublish": bool(config.accept_publish),
                "acceptSubscribe": bool(config.accept_subscribe),
                "numPartitions": config.partitions or 1,
                "numTopicStores": config.stores or 1,
                "brokerManageStatus": "online",
            }
        rows.append(
            {
                "topicName": topic.name,
                "topicStatusId": 0,
                "brokerId": broker_id,
                "brokerIp": broker.info.host,
                "brokerPort": broker.info.port,
                "numPartitions": topic.partitions,
                "numTopicStores": topic.stores,
                "acceptPublish": topic.accept_publish,
                "acceptSubscribe": topic.accept_subscribe,
                "runInfo": run,
            }
        )
    return {
        "topicName": topic.name,
        "maxMsgSizeInMB": (topic.max_message_bytes or engine.config.max_message_bytes) // MIN_MESSAGE_BYTES,
        "topicInfo": rows,
        "infoCount": len(rows),
        "totalCfgNumPart": len(rows) * topic.partitions * topic.stores,
        "totalRunNumPartCount": running,
        "isSrvAcceptPublish": cluster.topic_info(topic.name) is not None,
        "isSrvAcceptSubscribe": bool(cluster.partitions([topic.name])),
        "enableAuthControl": False,
    }


def _sub_info(engine: MasterEngine, params: Mapping[str, str]) -> Answer:
    groups = set(_items(params, "groupName", "group")) | set(_items(params, "consumeGroup", "consumeGroup"))
    topics = set(_items(params, "topicName", "topicName"))
    rows = [
        {"consumeGroup": name, "topicSet": sorted(group.topics), "consumerNum": len(group.members)}
        for name, group in sorted(engine.groups.items())
        if (not groups or name in groups) and (not topics or topics & group.topics)
    ]
    return _success(rows)


def _group_detail(engine: MasterEngine, params: Mapping[str, str]) -> Answer:
    name = _text(params, "groupName", "group") or _text(params, "consumeGroup", "consumeGroup")
    if not name:
        raise _Bad("groupName is required")
    group = engine.groups.get(name)
    if group is None:
        return {"result": True, "errCode": 0, "errMsg": "OK", "count": 0, "data": []}
    rows = []
    for member in group.members.values():
        owned = sorted(p for p, owner in group.owned.items() if owner == member.id)
        parts = [{"partId": p.key, "status": "registered" if p in member.held else "registering"} for p in owned]
        rows.append({"consumerId": member.id, "parCount": len(owned), "parInfo": parts})
    return {
        **_success(rows),
        "topicSet": sorted(group.topics),
        "consumeGroup": name,
        "isBandConsume": group.bound,
        "filterConds": {topic: sorted(items) for topic, items in sorted(group.filters.items())},
    }


def _broker_run_status(engine: MasterEngine, params: Mapping[str, str]) -> Answer:
    wanted = {_number(item, "brokerId") for item in _items(params, "brokerId", "brokerId")}
    return _success(
        [
            _broker_row(engine.cluster, number)
            for number in sorted(engine.cluster.brokers)
            if not wanted or number in wanted
        ]
    )


def _broker_row(cluster: Cluster, number: int) -> Answer:
    broker = cluster.brokers[number]
    return {
        "brokerId": number,
        "brokerIp": broker.info.host,
        "brokerPort": broker.info.port,
        "manageStatus": "online",
        "runStatus": "online" if broker.online else "offline",
        "subStatus": "idle" if broker.serving and not broker.need_report else "wait_sync",
        "isConfChanged": broker.need_report,
        "isConfLoaded": not broker.need_report,
    }


class Method(NamedTuple):
    """One row: what runs, and whether it changes something."""

    run: Callable[[MasterEngine, Mapping[str, str]], Answer | Change]
    changes: bool = False


METHODS: dict[str, Method] = {
    "admin_add_new_topic_record": Method(_add_topic, changes=True),
    "admin_add_topic_deploy_info": Method(_add_topic, changes=True),
    "admin_query_broker_run_status": Method(_broker_run_status),
    "admin_query_consume_group_detail": Method(_group_detail),
    "admin_query_sub_info": Method(_sub_info),
    "admin_query_topic_info": Method(_topic_info),
}


def _success(rows: list[Answer]) -> Answer:
    return {"result": True, "errCode": 0, "errMsg": "OK", "data": rows, "count": len(rows)}


def _failure(text: str) -> Answer:
    return {"result": False, "errCode": 400, "errMsg": text}


def _text(params: Mapping[str, str], long: str, short: str) -> str:
    return (params.get(long) or params.get(short) or "").strip()


def _items(params: Mapping[str, str], long: str, short: str) -> list[str]:
    items = list(dict.fromkeys(item.strip() for item in _text(params, long, short).split(",") if item.strip()))
    if len(items) > MAX_ITEMS:
        raise _Bad(f"{long} has {len(items)} items, at most {MAX_ITEMS} are possible")
    return items


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _Bad(f"{name} {text!r} is not a number") from None


def _flag(text: str) -> bool:
    return text.lower() != "false"
