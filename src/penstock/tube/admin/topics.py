"""Topics in the master's administration: made, changed, deleted, removed with their data, shown."""

from __future__ import annotations

from penstock.errors import RefusedError
from penstock.tube.admin.common import (
    DELETE_POLICY,
    NOT_USED,
    Answer,
    Change,
    item,
    message_bytes,
    success,
    who_and_when,
)
from penstock.tube.admin.groups import who_may
from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.engine.cluster import TOPIC_DELETED, TOPIC_REMOVED, Topic
from penstock.tube.engine.master import MIN_MESSAGE_BYTES, MasterEngine

__all__ = ["add", "delete", "deployed", "info", "modify", "places", "redo", "remove"]

_MAX_HOURS = 168
_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 3600}


def _names(params: Params) -> list[str]:
    names = params.items("topicName")
    if not names:
        raise BadParameter("topicName is required")
    return names


def _policy(params: Params) -> str | None:
    text = params.text("deletePolicy", "delPolicy")
    if not text:
        return None
    match = DELETE_POLICY.fullmatch(text)
    if match is None or not 0 < int(match[1]) * _SECONDS[match[2].lower()] <= _MAX_HOURS * 3600:
        raise BadParameter(f"deletePolicy {text!r}: delete,<number>[s|m|h] of at most {_MAX_HOURS} hours is possible")
    return text


def _rows(engine: MasterEngine, broker_ids: list[int], name: str, code: int, text: str) -> list[Answer]:
    ids = broker_ids or sorted(engine.cluster.brokers) or [0]
    return [item(code, text, brokerId=broker_id, topicName=name) for broker_id in ids]


def add(engine: MasterEngine, params: Params, now: int) -> Change:
    """Make topics, or give topics further brokers."""
    params.required("createUser", "cur")
    names = _names(params)
    broker_ids = params.numbers("brokerId")
    default = engine.config.default
    partitions = params.number("numPartitions", "numPart", default=default.partitions)
    stores = params.number("numTopicStores", "numStore", default=default.stores)
    publish = params.flag("acceptPublish", "accPub", default=True)
    subscribe = params.flag("acceptSubscribe", "accSub", default=True)
    size, policy = message_bytes(params), _policy(params)
    topics: list[Topic] = []
    rows: list[Answer] = []
    for name in names:
        known = engine.cluster.topics.get(name) if name not in engine.storing else None
        wanted = Topic(
            name, partitions, stores, tuple(sorted(broker_ids)) or None, publish, subscribe, size, delete_policy=policy
        )
        code, text = 200, "Ok!"
        if known is not None and known.brokers is not None and not all(map(known.on, broker_ids)):
            # The topic gets further brokers.
            topics.append(known._replace(brokers=tuple(sorted({*known.brokers, *broker_ids}))))
        else:
            try:
                engine.check_new_topic(wanted)
                topics.append(wanted)
            except RefusedError as error:
                code, text = error.code, error.what if error.why is None else f"{error.what}: {error.why}"
        rows += _rows(engine, broker_ids, name, code, text)
    return Change([*topics], success(rows))


def modify(engine: MasterEngine, params: Params, now: int) -> Change:
    """Change what is given of topics. Partitions and stores can only become more: offsets stay where they are."""
    params.required("modifyUser", "mur")
    changed: list[Topic] = []
    rows: list[Answer] = []
    for name in _names(params):
        topic = engine.cluster.topics.get(name)
        if topic is None or name in engine.storing:
            rows += _rows(engine, [], name, 401, f"topic {name} does not exist")
            continue
        wanted = topic._replace(
            partitions=params.number("numPartitions", "numPart", default=topic.partitions, least=1, most=9999),
            stores=params.number("numTopicStores", "numStore", default=topic.stores, least=1, most=1000),
            accept_publish=params.flag("acceptPublish", "accPub", default=topic.accept_publish),
            accept_subscribe=params.flag("acceptSubscribe", "accSub", default=topic.accept_subscribe),
            max_message_bytes=message_bytes(params) or topic.max_message_bytes,
            delete_policy=_policy(params) or topic.delete_policy,
        )
        if wanted.partitions < topic.partitions or wanted.stores < topic.stores:
            text = f"{topic.partitions} partitions in {topic.stores} stores: fewer are not possible"
            rows += _rows(engine, [], name, 407, text)
        elif topic.status:
            rows += _rows(engine, [], name, 406, "the topic is deleted: redo it first")
        elif wanted == topic:
            rows += _rows(engine, [], name, 201, "nothing to change")
        else:
            changed.append(wanted)
            rows += _rows(engine, [], name, 200, "Ok!")
    return Change([*changed], success(rows))


def _status(engine: MasterEngine, params: Params, status: int, needed: tuple[int, ...], hint: str) -> Change:
    params.required("modifyUser", "mur")
    changed: list[Topic] = []
    rows: list[Answer] = []
    for name in _names(params):
        topic = engine.cluster.topics.get(name)
        if topic is None or name in engine.storing:
            rows += _rows(engine, [], name, 401, f"topic {name} does not exist")
        elif topic.status == status:
            rows += _rows(engine, [], name, 201, "nothing to change")
        elif topic.status not in needed:
            rows += _rows(engine, [], name, 406, hint)
        elif status == TOPIC_DELETED and (topic.accept_publish or topic.accept_subscribe):
            rows += _rows(engine, [], name, 405, "stop it first: acceptPublish=false and acceptSubscribe=false")
        else:
            changed.append(topic._replace(status=status))
            rows += _rows(engine, [], name, 200, "Ok!")
    return Change([*changed], success(rows))


def delete(engine: MasterEngine, params: Params, now: int) -> Change:
    """Take topics out of service; their data stay until they are removed."""
    return _status(engine, params, TOPIC_DELETED, (0,), "the topic is being removed")


def redo(engine: MasterEngine, params: Params, now: int) -> Change:
    """Take back a deletion."""
    return _status(engine, params, 0, (TOPIC_DELETED,), "the topic is being removed")


def remove(engine: MasterEngine, params: Params, now: int) -> Change:
    """Remove deleted topics with their data: brokers do it with their next heartbeat, then the name is free."""
    return _status(engine, params, TOPIC_REMOVED, (TOPIC_DELETED,), "delete the topic first")


def info(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics, where they are and whether they are usable."""
    rows = []
    for topic in _asked(engine, params):
        places, sums = _places(engine, topic), _sums(engine, topic)
        control = who_may(engine, topic.name)
        del control["topicName"]
        control["enableAuthControl"] = control.pop("isEnable")
        rows.append({**sums, "topicStatusId": topic.status, "topicInfo": places, "authData": control})
    return success(rows)


def deployed(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics, where they are and whether they are usable, in the newer form."""
    return success(
        [
            {**_sums(engine, topic), "topicNameId": UNDEFINED, **who_and_when(), "deployInfo": _places(engine, topic)}
            for topic in _asked(engine, params)
        ]
    )


def places(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics as they are configured, a row for each broker."""
    rows = [row for topic in _asked(engine, params) for row in _places(engine, topic)]
    return success([{name: value for name, value in row.items() if name != "runInfo"} for row in rows])


def _asked(engine: MasterEngine, params: Params) -> list[Topic]:
    wanted = set(params.items("topicName"))
    return [topic for name, topic in sorted(engine.cluster.topics.items()) if not wanted or name in wanted]


def _places(engine: MasterEngine, topic: Topic) -> list[Answer]:
    """A row for each broker that has the topic, by its configuration."""
    cluster = engine.cluster
    rows: list[Answer] = []
    for broker_id, broker in sorted(cluster.brokers.items()):
        if not topic.on(broker_id):
            continue
        config = broker.serving.get(topic.name)
        run: Answer = dict.fromkeys(
            ["acceptPublish", "acceptSubscribe", "numPartitions", "numTopicStores", "brokerManageStatus"], "-"
        )
        if config is not None:
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
                "topicNameId": UNDEFINED,
                "topicStatusId": topic.status,
                "brokerId": broker_id,
                "brokerIp": broker.info.host,
                "brokerPort": broker.info.port,
                "numPartitions": topic.partitions,
                "numTopicStores": topic.stores,
                "acceptPublish": topic.accept_publish,
                "acceptSubscribe": topic.accept_subscribe,
                "deletePolicy": topic.delete_policy or engine.config.default.delete_policy,
                **NOT_USED,
                **who_and_when(),
                "runInfo": run,
            }
        )
    return rows


def _sums(engine: MasterEngine, topic: Topic) -> Answer:
    """The topic as a whole."""
    cluster = engine.cluster
    on = [broker for broker_id, broker in cluster.brokers.items() if topic.on(broker_id)]
    running = [broker.serving[topic.name] for broker in on if topic.name in broker.serving]
    control = engine.controls.topics.get(topic.name)
    return {
        "topicName": topic.name,
        "maxMsgSizeInMB": (topic.max_message_bytes or engine.max_message_bytes) // MIN_MESSAGE_BYTES,
        "infoCount": len(on),
        "totalCfgNumPart": len(on) * topic.partitions * topic.stores,
        "totalRunNumPartCount": sum((config.partitions or 1) * (config.stores or 1) for config in running),
        "isSrvAcceptPublish": cluster.topic_info(topic.name) is not None,
        "isSrvAcceptSubscribe": bool(cluster.partitions([topic.name])),
        "enableAuthControl": control is not None and control.enabled,
    }
