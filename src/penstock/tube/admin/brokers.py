"""Brokers in the master's administration: configured, switched, shown."""

from __future__ import annotations

import ipaddress

from penstock.tube.admin.common import NOT_USED, Answer, Change, item, success, who_and_when
from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.codec.strings import DEFAULT_BROKER_PORT, ipv4_to_int
from penstock.tube.engine.cluster import Broker, Cluster
from penstock.tube.engine.master import MasterEngine
from penstock.tube.engine.settings import BrokerSetting, Removal, Setting, Status

__all__ = ["add", "configured", "delete", "offline", "online", "read_or_write", "reload", "run_status", "update"]

DEFAULT_TLS_PORT = 8124
DEFAULT_WEB_PORT = 8081
SYNCHRONISING = 3
"""stepOp: the broker has not yet said that it has what it was given."""


def _ids(params: Params) -> list[int]:
    ids = params.numbers("brokerId")
    if not ids:
        raise BadParameter("brokerId is required")
    return ids


def add(engine: MasterEngine, params: Params, now: int) -> Change:
    """Configure a broker by name; it is a draft, which may not register, until it is set online."""
    params.required("createUser", "cur")
    host = params.required("brokerIp")
    port = params.number("brokerPort", default=DEFAULT_BROKER_PORT, least=1, most=65535)
    number = params.number("brokerId", default=0, least=0, most=(1 << 31) - 1)
    if not number:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise BadParameter(f"brokerIp {host!r} is no IPv4 address: brokerId is required") from None
        number = abs(ipv4_to_int(host))
    setting = BrokerSetting(
        number,
        host,
        port,
        params.number("brokerTLSPort", default=DEFAULT_TLS_PORT, least=1, most=65535),
        params.number("brokerWebPort", default=DEFAULT_WEB_PORT, least=1, most=65535),
        _status(params, Status.DRAFT),
    )
    known = engine.controls.brokers
    # The reference allows one broker a host; several on one host differ in their ports here.
    taken = next((b.id for b in known.values() if (b.host, b.port) == (host, port) and b.id != number), None)
    if number in known:
        return Change([], success([item(402, f"broker {number} exists", brokerId=number, brokerIp=host)]))
    if taken is not None:
        return Change([], success([item(402, f"{host}:{port} is broker {taken}", brokerId=number, brokerIp=host)]))
    return Change([setting], success([item(brokerId=number, brokerIp=host)]))


def _status(params: Params, present: int) -> int:
    value = params.number("manageStatus", "mSts", default=present)
    if value not in set(Status):
        raise BadParameter(f"manageStatus {value}: {', '.join(f'{s.value} {s.text}' for s in Status)} are possible")
    return value


def update(engine: MasterEngine, params: Params, now: int) -> Change:
    """Change ports and state of brokers."""
    params.required("modifyUser", "mur")
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
        )
        changed += [] if wanted == old else [wanted]
        rows.append(item(201 if wanted == old else 200, brokerId=number))
    return Change(changed, success(rows))


def _switch(engine: MasterEngine, params: Params, status: int) -> Change:
    params.required("modifyUser", "mur")
    changed: list[Setting | Removal] = []
    rows = []
    for number in _ids(params):
        old = engine.controls.brokers.get(number) or _as_it_came(engine.cluster, number)
        if old is None:
            rows.append(item(401, f"broker {number} is not known", brokerId=number))
            continue
        changed += [] if old.status == status else [old._replace(status=status)]
        rows.append(item(201 if old.status == status else 200, brokerId=number))
    return Change(changed, success(rows))


def _as_it_came(cluster: Cluster, number: int) -> BrokerSetting | None:
    """The setting of a broker that registered without one: it is online."""
    broker = cluster.brokers.get(number)
    if broker is None:
        return None
    tls = broker.tls_port or DEFAULT_TLS_PORT
    return BrokerSetting(number, broker.info.host, broker.info.port, tls, DEFAULT_WEB_PORT, Status.ONLINE)


def online(engine: MasterEngine, params: Params, now: int) -> Change:
    """Let brokers register, be read and be written."""
    return _switch(engine, params, Status.ONLINE)


def offline(engine: MasterEngine, params: Params, now: int) -> Change:
    """Stop reading and writing on brokers."""
    return _switch(engine, params, Status.OFFLINE)


def read_or_write(engine: MasterEngine, params: Params, now: int) -> Change:
    """Stop or allow reading and writing on brokers, each apart."""
    write = params.flag("acceptPublish", "isAcceptPublish", default=True)
    read = params.flag("acceptSubscribe", "isAcceptSubscribe", default=True)
    status = {
        (True, True): Status.ONLINE,
        (True, False): Status.ONLY_READ,
        (False, True): Status.ONLY_WRITE,
        (False, False): Status.OFFLINE,
    }[read, write]
    return _switch(engine, params, status)


def reload(engine: MasterEngine, params: Params, now: int) -> Change:
    """Nothing to do: brokers get every change with their next heartbeat. Older tools call it all the same."""
    params.required("modifyUser", "mur")
    return Change([], success([item(brokerId=number) for number in _ids(params)]))


def delete(engine: MasterEngine, params: Params, now: int) -> Change:
    """Forget the setting of brokers that are offline or drafts, and the brokers."""
    params.required("modifyUser", "mur")
    changed: list[Setting | Removal] = []
    rows = []
    for number in _ids(params):
        old = engine.controls.brokers.get(number)
        if old is None:
            rows.append(item(401, f"broker {number} is not configured", brokerId=number))
        elif old.status not in {Status.DRAFT, Status.OFFLINE}:
            rows.append(
                item(406, f"broker {number} is {Status(old.status).text}: set it offline first", brokerId=number)
            )
        else:
            changed.append(Removal(BrokerSetting.__name__, str(number)))
            rows.append(item(brokerId=number))
    return Change(changed, success(rows))


def configured(engine: MasterEngine, params: Params, now: int) -> Answer:
    """Brokers, those that came unconfigured as well."""
    wanted = set(params.numbers("brokerId"))
    cluster = engine.cluster
    rows = []
    for number in sorted({*engine.controls.brokers, *cluster.brokers}):
        setting = engine.controls.brokers.get(number) or _as_it_came(cluster, number)
        if setting is None or (wanted and number not in wanted):
            continue
        broker = cluster.brokers.get(number)
        behind = broker is not None and broker.need_report
        rows.append(
            {
                "brokerId": number,
                "brokerIp": setting.host,
                "brokerPort": setting.port,
                "brokerTLSPort": setting.tls_port,
                "brokerWebPort": setting.web_port,
                "manageStatus": Status(setting.status).text,
                "isConfChanged": behind,
                "isConfLoaded": not behind,
                "regionId": 0,
                "groupId": 1,
                "numPartitions": cluster.default.partitions,
                "numTopicStores": cluster.default.stores,
                "deletePolicy": cluster.default.delete_policy,
                "acceptPublish": setting.status in {Status.ONLINE, Status.ONLY_WRITE},
                "acceptSubscribe": setting.status in {Status.ONLINE, Status.ONLY_READ},
                **NOT_USED,
                **who_and_when(),
            }
        )
    return success(rows)


def run_status(engine: MasterEngine, params: Params, now: int) -> Answer:
    """What brokers do at present."""
    wanted = set(params.numbers("brokerId"))
    only_abnormal = params.flag("onlyAbnormal", default=False)
    rows = []
    for number, broker in sorted(engine.cluster.brokers.items()):
        abnormal = not broker.online or broker.read_status < 0 or broker.write_status < 0
        if (wanted and number not in wanted) or (only_abnormal and not abnormal):
            continue
        setting = engine.controls.brokers.get(number)
        settled = broker.serving and not broker.need_report
        rows.append(
            {
                "brokerId": number,
                "brokerIp": broker.info.host,
                "brokerPort": broker.info.port,
                "brokerTLSPort": broker.tls_port,
                "manageStatus": "online" if setting is None else Status(setting.status).text,
                "enableTLS": bool(broker.tls_port),
                "isRepAbnormal": broker.read_status < 0 or broker.write_status < 0,
                "isAutoForbidden": False,
                "runStatus": "running" if broker.online else "notRegister",
                **({"subStatus": "idle"} if settled else {"subStatus": "processing_event", "stepOp": SYNCHRONISING}),
                "isConfChanged": _text(broker.need_report),
                "isConfLoaded": _text(not broker.need_report),
                "isBrokerOnline": _text(broker.online),
                "brokerVersion": "-",
                "acceptPublish": _text(not broker.stop_write and not broker.write_status),
                "acceptSubscribe": _text(not broker.stop_read and not broker.read_status),
            }
            | _web(broker, setting)
        )
    return success(rows)


def _text(flag: object) -> str:
    """A flag as the reference writes it here: in quotes."""
    return "true" if flag else "false"


def _web(broker: Broker, setting: BrokerSetting | None) -> Answer:
    """Where the administration of ``broker`` answers: what it says, else what is configured; nothing if nobody did."""
    host, _, port = broker.web_address.rpartition(":")
    if host and port.isdecimal():
        return {"brokerWebAddress": broker.web_address, "brokerWebPort": int(port)}
    return {} if setting is None else {"brokerWebPort": setting.web_port}
