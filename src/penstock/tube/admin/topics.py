"""Topics in the master's administration: made, changed, deleted, removed with their data, shown."""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import RefusedError
from penstock.tube.admin.brokers import defaults_on, known
from penstock.tube.admin.common import (
    MAX_PARTITIONS,
    MAX_STORES,
    NOT_USED,
    Answer,
    Change,
    delete_policy,
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
from penstock.tube.engine.settings import Status

__all__ = ["add", "delete", "deployed", "info", "modify", "places", "redo", "remove"]


def _names(params: Params) -> list[str]:
    names = params.items("topicName")
    if not names:
        raise BadParameter("topicName is required")
    return names


def _rows(engine: MasterEngine, broker_ids: list[int], name: str, code: int, text: str) -> list[Answer]:
    ids = broker_ids or sorted(engine.cluster.brokers) or [0]
    return [item(code, text, brokerId=broker_id, topicName=name) for broker_id in ids]


def _left_out(engine: MasterEngine, topic: Topic, broker_ids: list[int]) -> str | None:
    """What to say where ``broker_ids`` are some of the topic's brokers only: it is the same on all of them."""
    there = [number for number in known(engine) if topic.on(number)]
    if not broker_ids or set(there) <= set(broker_ids):
        return None
    text = ",".join(map(str, there))
    return f"topic {topic.name} is the same on all of its brokers ({text}): name all of them in brokerId, or none"


def add(engine: MasterEngine, params: Params, now: int) -> Change:
    """Make topics, or give topics further brokers."""
    params.required("createUser", "cur")
    names = _names(params)
    broker_ids = params.numbers("brokerId")
    default = defaults_on(engine, broker_ids)
    partitions = params.number("numPartitions", "numPart", default=default.partitions)
    stores = params.number("numTopicStores", "numStore", default=default.stores)
    publish = params.flag("acceptPublish", "accPub", default=default.accept_publish is not False)
    subscribe = params.flag("acceptSubscribe", "accSub", default=default.accept_subscribe is not False)
    size, policy = message_bytes(params), delete_policy(params) or default.delete_policy
    if policy == engine.config.default.delete_policy:
        policy = None
    topics: list[Topic] = []
    rows: list[Answer] = []
    for name in names:
        present = engine.cluster.topics.get(name) if name not in engine.storing else None
        wanted = Topic(
            name, partitions, stores, tuple(sorted(broker_ids)) or None, publish, subscribe, size, delete_policy=policy
        )
        code, text = 200, "Ok!"
        if present is not None and present.brokers is not None and not all(map(present.on, broker_ids)):
            # The topic gets further brokers.
            topics.append(present._replace(brokers=tuple(sorted({*present.brokers, *broker_ids}))))
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
    broker_ids = params.numbers("brokerId")
    changed: list[Topic] = []
    rows: list[Answer] = []
    for name in _names(params):
        topic = engine.cluster.topics.get(name)
        if topic is None or name in engine.storing:
            rows += _rows(engine, broker_ids, name, 401, f"topic {name} does not exist")
            continue
        if (text := _left_out(engine, topic, broker_ids)) is not None:
            rows += _rows(engine, broker_ids, name, 405, text)
            continue
        wanted = topic._replace(
            partitions=params.number(
                "numPartitions", "numPart", default=topic.partitions, least=1, most=MAX_PARTITIONS
            ),
            stores=params.number("numTopicStores", "numStore", default=topic.stores, least=1, most=MAX_STORES),
            accept_publish=params.flag("acceptPublish", "accPub", default=topic.accept_publish),
            accept_subscribe=params.flag("acceptSubscribe", "accSub", default=topic.accept_subscribe),
            max_message_bytes=message_bytes(params) or topic.max_message_bytes,
            delete_policy=delete_policy(params) or topic.delete_policy,
        )
        if wanted.partitions < topic.partitions or wanted.stores < topic.stores:
            text = f"{topic.partitions} partitions in {topic.stores} stores: fewer are not possible"
            rows += _rows(engine, broker_ids, name, 407, text)
        elif topic.status:
            rows += _rows(engine, broker_ids, name, 406, "the topic is deleted: redo it first")
        elif wanted == topic:
            rows += _rows(engine, broker_ids, name, 201, "nothing to change")
        else:
            changed.append(wanted)
            rows += _rows(engine, broker_ids, name, 200, "Ok!")
    return Change([*changed], success(rows))


def _status(engine: MasterEngine, params: Params, status: int, needed: tuple[int, ...], hint: str) -> Change:
    params.required("modifyUser", "mur")
    broker_ids = params.numbers("brokerId")
    changed: list[Topic] = []
    rows: list[Answer] = []
    for name in _names(params):
        topic = engine.cluster.topics.get(name)
        code, text = 200, "Ok!"
        if topic is None or name in engine.storing:
            code, text = 401, f"topic {name} does not exist"
        elif (left_out := _left_out(engine, topic, broker_ids)) is not None:
            code, text = 405, left_out
        elif topic.status == status:
            code, text = 201, "nothing to change"
        elif topic.status not in needed:
            code, text = 406, hint
        elif status == TOPIC_DELETED and (topic.accept_publish or topic.accept_subscribe):
            code, text = 405, "stop it first: acceptPublish=false and acceptSubscribe=false"
        else:
            changed.append(topic._replace(status=status))
        rows += _rows(engine, broker_ids, name, code, text)
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
    for topic, numbers in _asked(engine, params):
        control = who_may(engine, topic.name)
        del control["topicName"]
        control["enableAuthControl"] = control.pop("isEnable")
        sums, places = _sums(engine, topic, numbers), _places(engine, topic, numbers)
        rows.append({**sums, "topicStatusId": topic.status, "topicInfo": places, "authData": control})
    return success(rows)


def deployed(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics, where they are and whether they are usable, in the newer form."""
    return success(
        [
            {
                **_sums(engine, topic, numbers),
                "topicNameId": UNDEFINED,
                **who_and_when(),
                "deployInfo": _places(engine, topic, numbers),
            }
            for topic, numbers in _asked(engine, params)
        ]
    )


def places(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics as they are configured, a row for each broker."""
    rows = [row for topic, numbers in _asked(engine, params) for row in _places(engine, topic, numbers)]
    return success([{name: value for name, value in row.items() if name != "runInfo"} for row in rows])


def _asked(engine: MasterEngine, params: Params) -> list[tuple[Topic, list[int]]]:
    """The topics that are asked for, each with its brokers, as far as these are asked for."""
    wanted, numbers = set(params.items("topicName")), set(params.numbers("brokerId"))
    status = params.given_number("topicStatusId", "tStsId", least=0, most=TOPIC_REMOVED + 1)
    found = []
    for name, topic in sorted(engine.cluster.topics.items()):
        there = [number for number in known(engine) if topic.on(number) and (not numbers or number in numbers)]
        if (not wanted or name in wanted) and (there or not numbers) and status in {None, topic.status}:
            found.append((topic, there))
    return found


def _places(engine: MasterEngine, topic: Topic, numbers: Collection[int]) -> list[Answer]:
    """A row for each of these brokers, by its configuration."""
    cluster = engine.cluster
    rows: list[Answer] = []
    brokers = known(engine)
    for broker_id in numbers:
        broker = cluster.brokers.get(broker_id)
        config = None if broker is None else broker.serving.get(topic.name)
        run: Answer = dict.fromkeys(
            ["acceptPublish", "acceptSubscribe", "numPartitions", "numTopicStores", "brokerManageStatus"], "-"
        )
        if config is not None:
            run = {
                "acceptPublish": bool(config.accept_publish),
                "acceptSubscribe": bool(config.accept_subscribe),
                "numPartitions": config.partitions or 1,
                "numTopicStores": config.stores or 1,
                "brokerManageStatus": Status(brokers[broker_id].status).text,
            }
        rows.append(
            {
                "topicName": topic.name,
                "topicNameId": UNDEFINED,
                "topicStatusId": topic.status,
                "brokerId": broker_id,
                "brokerIp": brokers[broker_id].host,
                "brokerPort": brokers[broker_id].port,
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


def _sums(engine: MasterEngine, topic: Topic, numbers: Collection[int]) -> Answer:
    """The topic as a whole, on these brokers."""
    cluster = engine.cluster
    on = [cluster.brokers[number] for number in numbers if number in cluster.brokers]
    running = [broker.serving[topic.name] for broker in on if topic.name in broker.serving]
    control = engine.controls.topics.get(topic.name)
    return {
        "topicName": topic.name,
        "maxMsgSizeInMB": (topic.max_message_bytes or engine.max_message_bytes) // MIN_MESSAGE_BYTES,
        "infoCount": len(numbers),
        "totalCfgNumPart": len(numbers) * topic.partitions * topic.stores,
        "totalRunNumPartCount": sum((config.partitions or 1) * (config.stores or 1) for config in running),
        "isSrvAcceptPublish": cluster.topic_info(topic.name) is not None,
        "isSrvAcceptSubscribe": bool(cluster.partitions([topic.name])),
        "enableAuthControl": control is not None and control.enabled,
    }
