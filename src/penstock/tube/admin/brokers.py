"""Brokers in the master's administration: configuration, status, queries."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from penstock.tube.admin.changes import (
    NOT_USED,
    Answer,
    SettingChange,
    has_properties,
    item,
    modification,
    refuse_unchangeable,
    success,
    topic_defaults,
)
from penstock.tube.admin.request import BadParameter, Params
from penstock.tube.codec.strings import ipv4_to_int
from penstock.tube.engine.master.cluster import RegisteredBroker
from penstock.tube.engine.master.context import DEFAULTS
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import (
    BrokerSeen,
    BrokerSetting,
    BrokerStatus,
    Removal,
    Setting,
    TopicDefaults,
    TopicSetting,
)

__all__ = [
    "add",
    "all_brokers",
    "configured",
    "defaults_on",
    "delete",
    "offline",
    "online",
    "read_or_write",
    "reload",
    "run_status",
    "update",
]

_READABLE = {BrokerStatus.ONLINE, BrokerStatus.ONLY_READ}
_WRITABLE = {BrokerStatus.ONLINE, BrokerStatus.ONLY_WRITE}
SYNCHRONISING = 3
"""Value of stepOp: the broker has not yet reported its new configuration."""


def _ids(params: Params) -> list[int]:
    ids = params.numbers("brokerId")
    if not ids:
        raise BadParameter("brokerId is required")
    return ids


def add(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Configure a broker; it is a draft, which may not register, until it is set online."""
    params.required("createUser", "cur")
    refuse_unchangeable(params)
    host = params.required("brokerIp")
    cluster = engine.controls.cluster
    port = params.number("brokerPort", default=cluster.broker_port, least=1, most=65535)
    number = params.number("brokerId", default=0, least=0, most=(1 << 31) - 1)
    if not number:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise BadParameter(f"brokerIp {host!r} is not an IPv4 address: brokerId is required") from None
        number = abs(ipv4_to_int(host))  # the id that the reference derives from the address
    setting = BrokerSetting(
        number,
        host,
        port,
        params.number("brokerTLSPort", default=cluster.broker_tls_port, least=1, most=65535),
        params.number("brokerWebPort", default=cluster.broker_web_port, least=1, most=65535),
        _status(params, BrokerStatus.DRAFT),
        topic_defaults(params, TopicDefaults()),
    )
    configured = engine.controls.brokers
    # The reference allows one broker per host; penstock allows several with different ports.
    taken = next((b.id for b in configured.values() if (b.host, b.port) == (host, port) and b.id != number), None)
    if number in configured:
        return SettingChange([], success([item(402, f"broker {number} exists", brokerId=number, brokerIp=host)]))
    if taken is not None:
        return SettingChange(
            [], success([item(402, f"{host}:{port} is broker {taken}", brokerId=number, brokerIp=host)])
        )
    return SettingChange([setting], success([item(brokerId=number, brokerIp=host)]))


def _status(params: Params, present: int) -> int:
    """Return the status in the parameters, a name as in the reference, or a number."""
    text = params.text("manageStatus", "mSts")
    if not text:
        return present
    found = next((status for status in BrokerStatus if text in {status.text, str(status.value)}), None)
    if found is None:
        raise BadParameter(
            f"manageStatus {text!r}: {', '.join(f'{s.value} {s.text}' for s in BrokerStatus)} are possible"
        )
    return found


def update(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Change ports, status and topic defaults of brokers."""
    params.required("modifyUser", "mur")
    refuse_unchangeable(params)
    changed: list[Setting | Removal] = []
    rows = []
    for number in _ids(params):
        old = engine.controls.brokers.get(number)
        if old is None:
            rows.append(item(401, f"broker {number} is not configured", brokerId=number))
            continue
        wanted = old._replace(
            port=params.number("brokerPort", default=old.port, least=1, most=65535),
            tls_port=params.number("brokerTLSPort", default=old.tls_port, least=1, most=65535),
            web_port=params.number("brokerWebPort", default=old.web_port, least=1, most=65535),
            status=_status(params, old.status),
            topic_defaults=topic_defaults(params, old.topic_defaults),
        )
        changed += [] if wanted == old else [wanted]
        rows.append(item(201 if wanted == old else 200, brokerId=number))
    return SettingChange(changed, success(rows))


def _switch(engine: MasterEngine, params: Params, wanted: Callable[[int], int | None]) -> SettingChange:
    """Set the status of brokers. ``wanted`` maps the current status to the new one; None: not possible for a draft."""
    params.required("modifyUser", "mur")
    changed: list[Setting | Removal] = []
    rows = []
    brokers = all_brokers(engine)
    for number in _ids(params):
        old = brokers.get(number)
        if old is None:
            rows.append(item(401, f"broker {number} is not known", brokerId=number))
            continue
        status = wanted(old.status)
        if status is None:
            rows.append(item(405, f"broker {number} is a draft: set it online first", brokerId=number))
            continue
        changed += [] if old.status == status else [old._replace(status=status)]
        rows.append(item(201 if old.status == status else 200, brokerId=number))
    return SettingChange(changed, success(rows))


def all_brokers(engine: MasterEngine) -> dict[int, BrokerSetting]:
    """Brokers by id: configured ones, and registered ones without configuration, which are online."""
    cluster = engine.controls.cluster
    found = {
        number: BrokerSetting(
            number,
            broker.info.host,
            broker.info.port,
            broker.tls_port or cluster.broker_tls_port,
            cluster.broker_web_port,
            BrokerStatus.ONLINE,
        )
        for number, broker in engine.cluster.brokers.items()
    }
    # The configuration has precedence: a broker that differs from it could not have registered.
    return dict(sorted({**found, **engine.controls.brokers}.items()))


def defaults_on(engine: MasterEngine, number: int | None = None) -> TopicDefaults:
    """Return the defaults of topics that are created on this broker; None: on brokers that are not known yet."""
    config = DEFAULTS
    cluster = engine.controls.cluster.topic_defaults.with_fallback(
        TopicDefaults(
            config.partitions, config.stores, config.delete_policy, accept_publish=True, accept_subscribe=True
        )
    )
    setting = engine.controls.brokers.get(number) if number is not None else None
    return cluster if setting is None else setting.topic_defaults.with_fallback(cluster)


def online(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Let brokers register, and allow reading and writing."""
    return _switch(engine, params, lambda _: BrokerStatus.ONLINE)


def offline(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Stop reading and writing on brokers."""
    return _switch(engine, params, lambda _: BrokerStatus.OFFLINE)


def read_or_write(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Allow or stop reading and writing on brokers; a missing parameter changes nothing."""
    write = params.given_flag("acceptPublish", "accPub", "isAcceptPublish")
    read = params.given_flag("acceptSubscribe", "accSub", "isAcceptSubscribe")
    if write is None and read is None:
        raise BadParameter("acceptPublish or acceptSubscribe is required")

    def wanted(present: int) -> int | None:
        if present == BrokerStatus.DRAFT:
            return None  # online first, which allows both reading and writing
        reads = present in _READABLE if read is None else read
        writes = present in _WRITABLE if write is None else write
        if reads:
            return BrokerStatus.ONLINE if writes else BrokerStatus.ONLY_READ
        return BrokerStatus.ONLY_WRITE if writes else BrokerStatus.OFFLINE

    return _switch(engine, params, wanted)


def reload(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Send brokers their whole configuration with the next heartbeat, and request a report of the topics that they
    serve."""
    params.required("modifyUser", "mur")
    rows = []
    for number in _ids(params):
        sent = engine.send_configuration(number)
        text = "Ok!" if sent else f"broker {number} is not registered: it gets its configuration when it registers"
        rows.append(item(200 if sent else 401, text, brokerId=number))
    return SettingChange([], success(rows))


def delete(engine: MasterEngine, params: Params, now: int) -> SettingChange:
    """Delete brokers that are offline or drafts, or not configured and not online.

    No topic may be configured specifically on them, unless `isReservedData` is set: such topics then remain.
    """
    params.required("modifyUser", "mur")
    reserved = params.flag("isReservedData", default=False)
    changed: list[Setting | Removal] = []
    rows = []
    for number in _ids(params):
        old = engine.controls.brokers.get(number)
        broker = engine.cluster.brokers.get(number)
        named = [name for name, topic in sorted(engine.cluster.topics.items()) if number in (topic.brokers or ())]
        if old is None and broker is None and number not in engine.controls.seen:
            rows.append(item(401, f"broker {number} is not known", brokerId=number))
        elif old is None and broker is not None and broker.online:
            rows.append(item(406, f"broker {number} is running: stop it first", brokerId=number))
        elif old is not None and old.status not in {BrokerStatus.DRAFT, BrokerStatus.OFFLINE}:
            rows.append(
                item(406, f"broker {number} is {BrokerStatus(old.status).text}: set it offline first", brokerId=number)
            )
        elif named and not reserved:
            rows.append(item(404, f"remove its topics first: {', '.join(named)}", brokerId=number))
        else:
            # Remove BrokerSeen as well: otherwise topics would count it as an offline broker.
            changed += [Removal(kind.__name__, str(number)) for kind in (BrokerSeen, BrokerSetting)]
            rows.append(item(brokerId=number))
    return SettingChange(changed, success(rows))


def configured(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Brokers, including registered ones without configuration; `withTopic` with their topics."""
    names, has_them = set(params.items("topicName")), params.flag("isInclude", default=True)
    with_topic = params.flag("withTopic", default=False)
    rows = []
    for number, setting in _selected(engine, params):
        broker = engine.cluster.brokers.get(number)
        topics = [topic for _, topic in sorted(engine.cluster.topics.items()) if topic.on(number)]
        # isInclude=false selects the brokers that have none of the topics.
        if names and has_them is names.isdisjoint(topic.name for topic in topics):
            continue
        behind = broker is not None and broker.need_report
        defaults = defaults_on(engine, number)
        row: Answer = {
            "brokerId": number,
            "brokerIp": setting.host,
            "brokerPort": setting.port,
            "brokerTLSPort": setting.tls_port,
            "brokerWebPort": setting.web_port,
            "manageStatus": BrokerStatus(setting.status).text,
            "isConfChanged": behind,
            "isConfLoaded": not behind,
            "regionId": 0,
            "groupId": 1,
            "numPartitions": defaults.partitions,
            "numTopicStores": defaults.stores,
            "deletePolicy": defaults.delete_policy,
            "acceptPublish": setting.status in _WRITABLE,
            "acceptSubscribe": setting.status in _READABLE,
            **NOT_USED,
            **modification(engine, BrokerSetting, str(number)),
        } | ({"topicSet": [_topic(topic, number) for topic in topics]} if with_topic else {})
        rows += [row] if has_properties(row, params) else []
    return success(rows)


def _selected(engine: MasterEngine, params: Params) -> list[tuple[int, BrokerSetting]]:
    numbers, hosts = set(params.numbers("brokerId")), set(params.items("brokerIp"))
    return [
        (number, setting)
        for number, setting in all_brokers(engine).items()
        if (not numbers or number in numbers) and (not hosts or setting.host in hosts)
    ]


def _topic(topic: TopicSetting, number: int) -> Answer:
    here = topic.at(number)
    return {
        "topicName": topic.name,
        "brokerId": number,
        "topicStatusId": here.status,
        "numPartitions": here.partitions,
        "numTopicStores": here.stores,
        "acceptPublish": here.accept_publish,
        "acceptSubscribe": here.accept_subscribe,
    }


def run_status(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Status of brokers; `withDetail` with the configuration that was sent and reported."""
    only_abnormal = params.flag("onlyAbnormal", default=False)
    only_forbidden = params.flag("onlyAutoForbidden", default=False)
    only_tls = params.flag("onlyEnableTLS", default=False)
    with_detail = params.flag("withDetail", default=False)
    rows: list[Answer] = []
    for number, setting in _selected(engine, params):
        broker = engine.cluster.brokers.get(number)
        running = _unregistered_status(setting) if broker is None else _running(broker)
        broken = broker is not None and (not broker.online or broker.read_status < 0 or broker.write_status < 0)
        # This master never disables a broker automatically, so onlyAutoForbidden selects none.
        if (only_abnormal and not broken) or only_forbidden or (only_tls and running["enableTLS"] is not True):
            continue
        rows.append(
            {
                "brokerId": number,
                "brokerIp": setting.host,
                "brokerPort": setting.port,
                "brokerTLSPort": setting.tls_port,
                "manageStatus": BrokerStatus(setting.status).text,
                "isAutoForbidden": False,
                "brokerVersion": "-",
                **running,
            }
            | _web(broker, engine.controls.brokers.get(number))
            | (_detail(broker, engine) if with_detail and broker is not None else {})
        )
    return success(rows)


def _unregistered_status(setting: BrokerSetting) -> Answer:
    """Status of a configured broker that has not registered."""
    names = ("subStatus", "isConfChanged", "isConfLoaded", "isBrokerOnline", "acceptPublish", "acceptSubscribe")
    return {
        "enableTLS": "-",
        "isRepAbnormal": False,
        "runStatus": "-" if setting.status == BrokerStatus.DRAFT else "unRegister",
        **dict.fromkeys(names, "-"),
    }


def _running(broker: RegisteredBroker) -> Answer:
    settled = broker.serving and not broker.need_report
    return {
        "enableTLS": broker.tls,
        "isRepAbnormal": broker.read_status < 0 or broker.write_status < 0,
        "runStatus": "running" if broker.online else "notRegister",
        **({"subStatus": "idle"} if settled else {"subStatus": "processing_event", "stepOp": SYNCHRONISING}),
        "isConfChanged": _text(broker.need_report),
        "isConfLoaded": _text(not broker.need_report),
        "isBrokerOnline": _text(broker.online),
        "acceptPublish": _text(not broker.stop_write and not broker.write_status),
        "acceptSubscribe": _text(not broker.stop_read and not broker.read_status),
    }


def _detail(broker: RegisteredBroker, engine: MasterEngine) -> Answer:
    """Details under the field names of the messages; the reference shows its synchronization steps here."""
    return {
        "curBrokerConfId": broker.config_id,
        "confCheckSumId": broker.check_sum,
        "brokerDefaultConfInfo": engine.cluster.default_text,
        "brokerTopicSetConfInfo": broker.topics,
        "removeTopicConfInfo": engine.cluster.removals(broker),
        "topicsServed": [broker.serving[name].format() for name in sorted(broker.serving)],
        "readStatusRpt": broker.read_status,
        "writeStatusRpt": broker.write_status,
        "failure": broker.failure,
    }


def _text(flag: object) -> str:
    """Return a flag as the reference writes it in this response, in quotes."""
    return "true" if flag else "false"


def _web(broker: RegisteredBroker | None, setting: BrokerSetting | None) -> Answer:
    """Return the administration address of ``broker``: as reported, otherwise as configured; blank if unknown."""
    address = "" if broker is None else broker.web_address
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        return {"brokerWebAddress": address, "brokerWebPort": int(port)}
    return {} if setting is None else {"brokerWebPort": setting.web_port}
