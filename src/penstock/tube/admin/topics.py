"""Topics in the master's administration: creation, changes, deletion, removal with their data, queries."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from penstock.errors import RefusedError
from penstock.tube.admin.brokers import all_brokers, defaults_on
from penstock.tube.admin.changes import (
    MAX_PARTITIONS,
    MAX_STORES,
    NOT_USED,
    Answer,
    SettingChange,
    delete_policy,
    has_properties,
    item,
    message_bytes,
    modification,
    refuse_unchangeable,
    success,
)
from penstock.tube.admin.groups import access_of
from penstock.tube.admin.request import BadParameter, Params
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.engine.master.context import DEFAULTS
from penstock.tube.engine.master.master import MIN_MESSAGE_BYTES, MasterEngine
from penstock.tube.engine.master.settings import (
    TOPIC_DELETED,
    TOPIC_KIND,
    TOPIC_REMOVED,
    BrokerStatus,
    TopicDefaults,
    TopicDeployment,
    TopicSetting,
)

__all__ = ["add", "delete", "deployed", "info", "modify", "redo", "remove", "topic_rows"]


OK = 200
UNCHANGED = 201


def _names(params: Params) -> list[str]:
    names = params.items("topicName")
    if not names:
        raise BadParameter("topicName is required")
    return names


def _rows(engine: MasterEngine, broker_ids: list[int], name: str, code: int, text: str) -> list[Answer]:
    # Tools read the result from a row, so there is one even before a broker has registered.
    ids = broker_ids or sorted(engine.cluster.brokers) or [0]
    return [item(code, text, brokerId=broker_id, topicName=name) for broker_id in ids]


def _current_topic(engine: MasterEngine, params: Params, name: str) -> TopicSetting | None:
    """Return the topic, including changes by earlier objects of the same batch; None if it does not exist."""
    changed = params.before.get((TOPIC_KIND, name))
    if isinstance(changed, TopicSetting):
        return changed
    # While a change of the topic is stored, a second one would be based on the state before it, and replace it.
    return engine.cluster.topics.get(name) if name not in engine.storing else None


def _new_topic(params: Params, default: TopicDefaults, engine: MasterEngine) -> TopicDeployment:
    """Return a new topic with the requested properties, on a broker with these defaults."""
    policy = delete_policy(params) or default.delete_policy
    return TopicDeployment(
        params.number("numPartitions", "numPart", default=default.partitions),
        params.number("numTopicStores", "numStore", default=default.stores),
        params.flag("acceptPublish", "accPub", default=default.accept_publish is not False),
        params.flag("acceptSubscribe", "accSub", default=default.accept_subscribe is not False),
        delete_policy=None if policy == DEFAULTS.delete_policy else policy,
    )


def add(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Create topics, or add brokers to topics; each with the given properties, otherwise with the broker's defaults."""
    params.required("createUser", "cur")
    refuse_unchangeable(params)
    names, broker_ids, size = _names(params), params.numbers("brokerId"), message_bytes(params)
    common = _new_topic(params, defaults_on(engine), engine)
    own = {
        number: _new_topic(params, defaults_on(engine, number), engine) for number in broker_ids or all_brokers(engine)
    }
    topics: list[TopicSetting] = []
    rows: list[Answer] = []
    for name in names:
        topic = _current_topic(engine, params, name)
        # Without broker ids an existing topic is not extended: check_new_topic reports 402.
        if topic is None or not broker_ids:
            brokers = tuple(sorted(broker_ids)) or None
            wanted = TopicSetting(name, brokers=brokers, max_message_bytes=size).changed(own, common)
            code, text = _error_of(partial(engine.check_new_topic, wanted))
            topics += [wanted] if code == OK else []
            rows += _rows(engine, broker_ids, name, code, text)
            continue
        before = topic
        for number in broker_ids:
            if topic.on(number):
                code, text = 402, f"topic {name} is on broker {number}"
            else:
                code, text = _error_of(partial(engine.check_topic, name, own[number]))
                topic = topic.joined(number, own[number]) if code == OK else topic
            rows += _rows(engine, [number], name, code, text)
        topics += [topic] if topic != before else []
    return SettingChange([*topics], success(rows))


def _error_of(check: Callable[[], None]) -> tuple[int, str]:
    try:
        check()
    except RefusedError as error:
        return error.code, error.what if error.why is None else f"{error.what}: {error.why}"
    return OK, "Ok!"


Edit = Callable[[TopicDeployment], tuple[TopicDeployment, int, str]]
"""A function that changes a topic on one broker; its result has code 200 if it changed something."""


def _edit(engine: MasterEngine, params: Params, edit: Edit, size: int | None = None) -> SettingChange:
    """Change topics on the named brokers. Without names, or with all brokers, the change also applies to new
    brokers."""
    params.required("modifyUser", "mur")
    broker_ids = params.numbers("brokerId")
    changed: list[TopicSetting] = []
    rows: list[Answer] = []
    for name in _names(params):
        topic = _current_topic(engine, params, name)
        if topic is None:
            storing = 512, f"topic {name} is being changed by another request: try again"
            refusal = storing if name in engine.storing else (401, f"topic {name} does not exist")
            rows += _rows(engine, broker_ids, name, *refusal)
            continue
        sized = topic._replace(max_message_bytes=size or topic.max_message_bytes)
        # Offline brokers also have the topic, and apply the change when they register.
        ids = {*all_brokers(engine), *engine.controls.seen, *(topic.brokers or dict(topic.own))}
        there = sorted(number for number in ids if topic.on(number))
        outcomes = {number: edit(topic.at(number)) for number in there if not broker_ids or number in broker_ids}
        left_out = [n for n in there if n not in outcomes and topic.at(n).status < TOPIC_REMOVED]
        # Naming all brokers is the same as naming none: brokers that register later get the change as well.
        common = None
        if not broker_ids or (outcomes and not left_out):
            common, code, text = edit(topic.common)
            rows += [] if there else _rows(engine, [0], name, code, text)
            common = _common_deployment([outcomes[n][0] if n in outcomes else topic.at(n) for n in there], common)
        for number in broker_ids or there:
            _, code, text = outcomes.get(number, (None, 401, f"topic {name} is not on broker {number}"))
            # The size belongs to the topic as a whole, so a broker without other changes also reports success.
            unlike = code == UNCHANGED and sized != topic
            rows += _rows(engine, [number], name, *((OK, "Ok!") if unlike else (code, text)))
        wanted = sized.changed({number: each for number, (each, _, _) in outcomes.items()}, common)
        changed += [wanted] if wanted != topic else []
    return SettingChange([*changed], success(rows))


def _common_deployment(there: list[TopicDeployment], common: TopicDeployment) -> TopicDeployment:
    """Return the properties for new brokers: those that all brokers share, otherwise ``common``."""
    columns = zip(common, *there, strict=True)
    return TopicDeployment._make(column[-1] if len(set(column[1:])) == 1 else column[0] for column in columns)


def modify(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Change the given properties of topics, on the named brokers or on all.

    Partitions and stores can only be added: offsets keep their meaning.
    """
    refuse_unchangeable(params)
    policy = delete_policy(params)

    def edit(here: TopicDeployment) -> tuple[TopicDeployment, int, str]:
        wanted = TopicDeployment(
            params.number("numPartitions", "numPart", default=here.partitions, least=1, most=MAX_PARTITIONS),
            params.number("numTopicStores", "numStore", default=here.stores, least=1, most=MAX_STORES),
            params.flag("acceptPublish", "accPub", default=here.accept_publish),
            params.flag("acceptSubscribe", "accSub", default=here.accept_subscribe),
            here.status,
            policy or here.delete_policy,
        )
        if wanted.partitions < here.partitions or wanted.stores < here.stores:
            stores = "1 store" if here.stores == 1 else f"{here.stores} stores"
            return here, 407, f"the topic has {here.partitions} partitions in {stores}; they can only be increased"
        if here.status:
            return here, 406, "the topic is deleted: redo it first"
        return (here, UNCHANGED, "nothing to change") if wanted == here else (wanted, OK, "Ok!")

    return _edit(engine, params, edit, message_bytes(params))


def _status(engine: MasterEngine, params: Params, status: int, needed: int, hint: str) -> SettingChange:
    def edit(here: TopicDeployment) -> tuple[TopicDeployment, int, str]:
        if here.status == status:
            return here, UNCHANGED, "nothing to change"
        if here.status != needed:
            return here, 406, hint
        if status == TOPIC_DELETED and (here.accept_publish or here.accept_subscribe):
            return here, 405, "stop it first: acceptPublish=false and acceptSubscribe=false"
        return here._replace(status=status), OK, "Ok!"

    return _edit(engine, params, edit)


def delete(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Disable topics on the named brokers or on all; their data stay until they are removed."""
    return _status(engine, params, TOPIC_DELETED, 0, "the topic is being removed")


def redo(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Undo a deletion, on the named brokers or on all."""
    return _status(engine, params, 0, TOPIC_DELETED, "the topic is being removed")


def remove(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Remove deleted topics with their data, on the named brokers or on all.

    Brokers remove the data with their next heartbeat; once no broker has the topic, its name may be used again.
    """
    return _status(engine, params, TOPIC_REMOVED, TOPIC_DELETED, "delete the topic first")


def info(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics, their brokers, and whether they are usable."""
    rows = []
    for topic, numbers in _selected(engine, params):
        control = access_of(engine, topic.name)
        # Names of the reference's response to this method, which differ from its queries of access control.
        del control["topicName"]
        control["enableAuthControl"] = control.pop("isEnable")
        sums, topic_rows = _sums(engine, topic, numbers), _broker_rows(engine, topic, numbers)
        status = min((row["topicStatusId"] for row in topic_rows), default=topic.status)
        rows.append({**sums, "topicStatusId": status, "topicInfo": topic_rows, "authData": control})
    return success(rows)


def deployed(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics, their brokers, and whether they can be used, in the newer format."""
    return success(
        [
            {
                **_sums(engine, topic, numbers),
                "topicNameId": UNDEFINED,
                **modification(engine, TopicSetting, topic.name),
                "deployInfo": _broker_rows(engine, topic, numbers),
            }
            for topic, numbers in _selected(engine, params)
        ]
    )


def topic_rows(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Topics as configured, one row per broker."""
    rows = [row for topic, numbers in _selected(engine, params) for row in _broker_rows(engine, topic, numbers)]
    return success([{name: value for name, value in row.items() if name != "runInfo"} for row in rows])


def _selected(engine: MasterEngine, params: Params) -> list[tuple[TopicSetting, list[int]]]:
    """Return the topics that a query selects, each with its selected brokers."""
    wanted, numbers = set(params.items("topicName")), set(params.numbers("brokerId"))
    status = params.given_number("topicStatusId", "tStsId", least=0, most=TOPIC_REMOVED + 1)
    found = []
    for name, topic in sorted(engine.cluster.topics.items()):
        if wanted and name not in wanted:
            continue
        on = [number for number in all_brokers(engine) if topic.on(number)]
        there = [
            number
            for number in on
            if (not numbers or number in numbers)
            and status in {None, topic.at(number).status}
            and has_properties(_properties(engine, topic.at(number)), params)
        ]
        # A topic whose brokers are not known yet is shown with the properties that they will have.
        nowhere = not on and not numbers and status in {None, topic.status}
        if there or (nowhere and has_properties(_properties(engine, topic.common), params)):
            found.append((topic, there))
    return found


def _broker_rows(engine: MasterEngine, topic: TopicSetting, numbers: Collection[int]) -> list[Answer]:
    """Return one row for each of these brokers, from its configuration."""
    cluster = engine.cluster
    rows: list[Answer] = []
    brokers = all_brokers(engine)
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
                "brokerManageStatus": BrokerStatus(brokers[broker_id].status).text,
            }
        rows.append(
            {
                "topicName": topic.name,
                "topicNameId": UNDEFINED,
                "topicStatusId": topic.at(broker_id).status,
                "brokerId": broker_id,
                "brokerIp": brokers[broker_id].host,
                "brokerPort": brokers[broker_id].port,
                **_properties(engine, topic.at(broker_id)),
                **modification(engine, TopicSetting, topic.name),
                "runInfo": run,
            }
        )
    return rows


def _properties(engine: MasterEngine, here: TopicDeployment) -> Answer:
    return {
        "numPartitions": here.partitions,
        "numTopicStores": here.stores,
        "acceptPublish": here.accept_publish,
        "acceptSubscribe": here.accept_subscribe,
        "deletePolicy": here.delete_policy or DEFAULTS.delete_policy,
        **NOT_USED,
    }


def _sums(engine: MasterEngine, topic: TopicSetting, numbers: Collection[int]) -> Answer:
    """Return the totals of a topic on these brokers."""
    cluster = engine.cluster
    on = [cluster.brokers[number] for number in numbers if number in cluster.brokers]
    running = [broker.serving[topic.name] for broker in on if topic.name in broker.serving]
    control = engine.controls.topics.get(topic.name)
    return {
        "topicName": topic.name,
        "maxMsgSizeInMB": (topic.max_message_bytes or engine.max_message_bytes) // MIN_MESSAGE_BYTES,
        "infoCount": len(numbers),
        "totalCfgNumPart": sum(topic.at(number).partition_count for number in numbers),
        "totalRunNumPartCount": sum((config.partitions or 1) * (config.stores or 1) for config in running),
        "isSrvAcceptPublish": cluster.topic_info(topic.name) is not None,
        "isSrvAcceptSubscribe": bool(cluster.partitions([topic.name])),
        "enableAuthControl": control is not None and control.enabled,
    }
