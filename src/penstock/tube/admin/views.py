"""What the master's administration shows across brokers, topics and groups, and what it has nothing to do for."""

from __future__ import annotations

from penstock.tube.admin.common import Answer, Change, failure, item, success
from penstock.tube.admin.params import Params
from penstock.tube.engine.balance import Group
from penstock.tube.engine.client_groups import ClientGroup
from penstock.tube.engine.master import MasterEngine

__all__ = [
    "booked_consume",
    "booked_resources",
    "brokers_of_topics",
    "cluster_view",
    "groups_by_topic",
    "release",
    "self_balancing",
    "statistics",
    "topics_of_brokers",
    "transfer",
]


def topics_of_brokers(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001 - the table's form
    """Topics by broker."""
    wanted = set(params.numbers("brokerId"))
    return success(
        [
            {"brokerId": number, "topicName": [t.name for t in sorted(engine.cluster.topics.values()) if t.on(number)]}
            for number in sorted(engine.cluster.brokers)
            if not wanted or number in wanted
        ]
    )


def brokers_of_topics(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
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


def cluster_view(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Topics as a whole: how many brokers and partitions, whether they can be used."""
    wanted, numbers = set(params.items("topicName")), set(params.numbers("brokerId"))
    cluster = engine.cluster
    rows: list[Answer] = []
    for name, topic in sorted(cluster.topics.items()):
        on = [broker for number, broker in cluster.brokers.items() if topic.on(number)]
        if (wanted and name not in wanted) or (numbers and not numbers & {broker.info.id for broker in on}):
            continue
        running = [broker.serving[name] for broker in on if broker.online and name in broker.serving]
        control = engine.controls.topics.get(name)
        rows.append(
            {
                "topicName": name,
                "totalCfgBrokerCnt": len(on),
                "totalCfgNumPart": len(on) * topic.partitions * topic.stores,
                "totalRunNumPartCount": sum((config.partitions or 1) * (config.stores or 1) for config in running),
                "isSrvAcceptPublish": cluster.topic_info(name) is not None,
                "isSrvAcceptSubscribe": bool(cluster.partitions([name])),
                "enableAuthControl": control is not None and control.enabled,
            }
        )
    return success(rows)


def groups_by_topic(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Groups that consume topics now."""
    wanted = set(params.items("topicName"))
    known: dict[str, Group | ClientGroup] = {**engine.groups, **engine.client_groups}
    rows: list[Answer] = []
    for topic in sorted(engine.cluster.topics):
        if wanted and topic not in wanted:
            continue
        names = sorted(name for name, group in known.items() if topic in group.topics)
        rows.append({"topicName": topic, "groupInfo": names, "groupCount": len(names)})
    return success(rows)


def booked_resources(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Names of the groups that have resources of their own."""
    return success([{"groupName": name} for name in sorted(engine.controls.groups)])


def booked_consume(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Names of the groups of which it is said what they may consume."""
    return success([{"groupName": name} for name in sorted({group for group, _ in engine.controls.consume})])


def self_balancing(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Groups that balance by themselves."""
    wanted = set(params.items("groupName", "group", "consumeGroup"))
    return success([{"groupName": name} for name in sorted(engine.client_groups) if not wanted or name in wanted])


def statistics(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Nothing to switch: counters are always on, see `admin_get_metrics_info`."""
    return success([])


def release(engine: MasterEngine, params: Params, now: int) -> Change:  # noqa: ARG001
    """Nothing to release: a broker whose disk failed serves again once it was started again."""
    params.required("modifyUser", "mur")
    known = engine.cluster.brokers
    return Change(
        [],
        success(
            [
                item(201 if number in known else 401, "Ok!" if number in known else "not known", brokerId=number)
                for number in params.numbers("brokerId")
            ]
        ),
    )


def transfer(engine: MasterEngine, params: Params, now: int) -> Answer:  # noqa: ARG001
    """Refused: there is one master."""
    return failure(f"{engine.address} is the only master of this cluster: there is none to hand over to")
