"""Overviews of the master's administration across brokers, topics and groups, and methods without effect."""

from __future__ import annotations

from penstock.tube.admin.changes import Answer, SettingChange, failure, item, success
from penstock.tube.admin.parameters import Params
from penstock.tube.engine.master.balance import Group
from penstock.tube.engine.master.client_balance import ClientGroup
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import Status, TopicDeployment

__all__ = [
    "booked_consume",
    "booked_resources",
    "brokers_of_topics",
    "cluster_view",
    "groups_by_topic",
    "loads_of_brokers",
    "release",
    "self_balancing",
    "spread_of_topics",
    "statistics_off",
    "statistics_on",
    "topics_of_brokers",
    "transfer",
]


def topics_of_brokers(engine: MasterEngine, params: Params, now: int) -> Answer:
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


def loads_of_brokers(engine: MasterEngine, params: Params, now: int) -> Answer:
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
                "manageStatus": "online" if setting is None else Status(setting.status).text,
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
    """Number of topics of a broker, or brokers of a topic, under ``name``, with their stores and partitions."""
    what = name.removeprefix("topic").removeprefix("broker")
    return {
        name: len(places),
        f"store{what}": sum(here.stores for here in places),
        f"part{what}": sum(here.partition_count for here in places),
    }


def spread_of_topics(engine: MasterEngine, params: Params, now: int) -> Answer:
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


def brokers_of_topics(engine: MasterEngine, params: Params, now: int) -> Answer:
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


def cluster_view(engine: MasterEngine, params: Params, now: int) -> Answer:
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


def groups_by_topic(engine: MasterEngine, params: Params, now: int) -> Answer:
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


def booked_resources(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Names of the groups with their own resources."""
    return success(sorted(engine.controls.groups))


def booked_consume(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Names of the groups with access rules."""
    return success(sorted({group for group, _ in engine.controls.consume}))


def self_balancing(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Groups that balance by themselves."""
    wanted = set(params.items("groupName", "group", "consumeGroup"))
    return success([name for name in sorted(engine.client_groups) if not wanted or name in wanted])


def statistics_on(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Succeeds without effect: counters are always on."""
    return success([])


def statistics_off(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Refused: counters are always on, and cost next to nothing."""
    return failure("counters are always on: they cannot be disabled")


def release(engine: MasterEngine, params: Params, now: int) -> SettingChange:
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
            rows.append(item(405, "it is not forbidden: this master forbids no broker by itself", brokerId=number))
    return SettingChange([], success(rows))


def transfer(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Refused: there is one master."""
    return failure(f"{engine.address} is the only master of this cluster: there is none to hand over to")
