"""The broker's HTTP methods (``/broker.htm?method=…``) as functions of their parameters, shaped as the reference's.

Success is ``dataSet`` with ``totalCnt``. A change is made in the engine; the caller makes it durable and then answers.
Offsets are index positions, 28 bytes a message of the store. Times are ``yyyyMMddHHmmss`` in UTC.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import penstock
from penstock.errors import RemoteProtocolError
from penstock.tube.admin.params import BadParameter, Params, format_time
from penstock.tube.codec.message import MSG_TIME, MSG_TYPE, filter_key, parse_attributes, split_data
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import partition_ids
from penstock.tube.engine.broker import BrokerEngine
from penstock.tube.engine.history import history_place
from penstock.tube.engine.offsets import Key
from penstock.tube.engine.topics import HISTORY_TOPIC, LogStore, Topic

__all__ = ["METHODS", "Desk", "Method", "handle"]

Answer = dict[str, Any]
MAX_SNAPSHOT = 500
_RECORD = 28


class Desk(NamedTuple):
    """What an administration method works on."""

    engine: BrokerEngine
    broker_id: int
    stats: Callable[[], Mapping[str, int]]
    now_ms: int


def handle(desk: Desk, params: Mapping[str, str]) -> tuple[Answer, bool]:
    """The answer to a request and whether something was changed that has to be made durable first."""
    name = params.get("method", "")
    method = METHODS.get(name)
    if method is None:
        return _failure(f"Unsupported method: {name!r}; known: {', '.join(sorted(METHODS))}"), False
    try:
        given = Params(params)
        if method.changes:
            given.user("modifyUser", "mur")
        rows = method.run(desk, given)
    except (BadParameter, RemoteProtocolError) as error:
        return _failure(str(error)), False
    except OSError as error:
        return _failure(f"the disk failed: {error.strerror}"), False
    return {"result": True, "errCode": 0, "errMsg": "OK", "dataSet": rows, "totalCnt": len(rows)}, method.changes


def _failure(text: str) -> Answer:
    return {"result": False, "errCode": 400, "errMsg": text}


# Which partitions there are.


def _topics(desk: Desk, params: Params) -> list[Topic]:
    wanted = params.items("topicName")
    topics = desk.engine.topics.by_name
    return [topics[name] for name in sorted(wanted or topics) if name in topics]


def _partitions(topic: Topic) -> Iterator[int]:
    return iter(partition_ids(topic.config.partitions or 1, topic.config.stores or 1))


def _topic(desk: Desk, name: str) -> Topic:
    topic = desk.engine.topics.by_name.get(name)
    if topic is None:
        raise BadParameter(f"topicName {name!r} is not on this broker")
    return topic


def _place(desk: Desk, params: Params) -> tuple[Key, LogStore]:
    """One partition of one group, which all three parameters name."""
    topic = _topic(desk, params.required("topicName"))
    group = params.required("groupName")
    partition = params.number("partitionId")
    if not topic.has(partition):
        raise BadParameter(f"topic {topic.name} has no partition {partition} on this broker")
    return (group, topic.name, partition), desk.engine.topics.store(topic, partition)


def _keys(desk: Desk, params: Params) -> list[tuple[Key, int]]:
    groups, topics = set(params.items("groupName")), set(params.items("topicName"))
    rows = [
        (key, offset)
        for key, offset in desk.engine.offsets.items()
        if (not groups or key[0] in groups) and (not topics or key[1] in topics)
    ]
    return sorted((key, offset) for key, offset in rows if _served(desk, key))


def _served(desk: Desk, key: Key) -> bool:
    topic = desk.engine.topics.by_name.get(key[1])
    return topic is not None and topic.has(key[2])


def _store_of(desk: Desk, key: Key) -> LogStore:
    return desk.engine.topics.store(desk.engine.topics.by_name[key[1]], key[2])


# Queries.


def _consumers(desk: Desk, params: Params) -> list[Answer]:
    wanted = set(params.items("groupName"))
    rows = []
    for key, holder in desk.engine.holdings:
        if wanted and key[0] not in wanted:
            continue
        store = _store_of(desk, key)
        committed = desk.engine.offsets.committed(key) or 0
        flight = desk.engine.offsets.in_flight(key)
        rows.append(
            {
                "groupName": key[0],
                "topicName": key[1],
                "partitionId": key[2],
                "consumerId": holder.client_id,
                "isRegOk": True,
                "isFilterConsume": holder.keys is not None,
                "filterConds": list(holder.filters),
                "qryPriorityId": holder.priority,
                "lastRegTime": format_time(holder.since),
                "tmpOffset": committed + flight,
                "zkOffset": committed,
                "minOffset": store.min_offset,
                "maxOffset": store.durable_end,
                "minDataOffset": store.min_data_offset,
                "maxDataOffset": store.durable_data_end,
            }
        )
    return rows


def _stores(desk: Desk, params: Params) -> list[Answer]:
    rows = []
    for topic in _topics(desk, params):
        stores = []
        for number in range(topic.config.stores or 1):
            store = desk.engine.topics.store(topic, number * 10_000)
            stores.append(
                {
                    "storeId": number,
                    "numPartitions": topic.config.partitions or 1,
                    "indexMinOffset": store.min_offset,
                    "indexMaxOffset": store.durable_end,
                    "dataMinOffset": store.min_data_offset,
                    "dataMaxOffset": store.durable_data_end,
                    "indexSize": store.durable_end - store.min_offset,
                    "dataSize": store.durable_data_end - store.min_data_offset,
                    "unwrittenSize": store.unwritten_bytes,
                }
            )
        rows.append({"topicName": topic.name, "storeInfo": stores})
    return rows


def _pubinfo(desk: Desk, params: Params) -> list[Answer]:
    rows = []
    for topic in _topics(desk, params):
        parts = []
        for partition in _partitions(topic):
            store = desk.engine.topics.store(topic, partition)
            parts.append(
                {
                    "partitionId": partition,
                    "offsetMin": store.min_offset,
                    "offsetMax": store.durable_end,
                    "dataMin": store.min_data_offset,
                    "dataMax": store.durable_data_end,
                }
            )
        rows.append({"topicName": topic.name, "offsetInfo": parts, "partCount": len(parts)})
    return rows


def _group_offset(desk: Desk, params: Params) -> list[Answer]:
    key, store = _place(desk, params)
    offsets = desk.engine.offsets
    committed = offsets.committed(key)
    here = store.min_offset if committed is None else committed
    reading = min(max(here + offsets.in_flight(key), store.min_offset), store.durable_end)
    position = store.data_position(reading)
    return [
        {
            "groupName": key[0],
            "topicName": key[1],
            "partitionId": key[2],
            "tmpOffset": here + offsets.in_flight(key),
            "zkOffset": -1 if committed is None else committed,
            "minOffset": store.min_offset,
            "maxOffset": store.durable_end,
            "minDataOffset": store.min_data_offset,
            "maxDataOffset": store.durable_data_end,
            "curReadDataOffset": position,
            "curRdDltDataOffset": store.durable_data_end - position,
        }
    ]


def _offsets(desk: Desk, params: Params) -> list[Answer]:
    groups: dict[str, dict[str, list[Answer]]] = {}
    for key, offset in _keys(desk, params):
        store = _store_of(desk, key)
        position = store.data_position(min(max(offset, store.min_offset), store.durable_end))
        groups.setdefault(key[0], {}).setdefault(key[1], []).append(
            {
                "partitionId": key[2],
                "curOffset": offset,
                "flightOffset": desk.engine.offsets.in_flight(key),
                "curDataOffset": position,
                "offsetLag": store.durable_end - offset,
                "dataLag": store.durable_data_end - position,
                "offsetMin": store.min_offset,
                "offsetMax": store.durable_end,
                "dataMax": store.durable_data_end,
            }
        )
    return [
        {
            "groupName": group,
            "subInfo": [{"topicName": topic, "offsets": parts} for topic, parts in sorted(topics.items())],
            "topicCount": len(topics),
        }
        for group, topics in sorted(groups.items())
    ]


def _groups(desk: Desk, params: Params) -> list[Answer]:
    divide = params.flag("divide", default=False)
    known = {key[0] for key, _ in desk.engine.offsets.items()}
    online = {key[0] for key, _ in desk.engine.holdings}
    if not divide:
        return [{"groupName": name} for name in sorted(known | online)]
    return [{"online": sorted(online), "offline": sorted(known - online)}]


def _registrations(desk: Desk, params: Params) -> list[Answer]:
    wanted = set(params.items("groupName"))
    return [
        {
            "partition": f"{key[0]}:{key[1]}:{key[2]}",
            "consumer": holder.client_id,
            "index": number,
            "lastRegTime": format_time(holder.since),
        }
        for number, (key, holder) in enumerate(desk.engine.holdings)
        if not wanted or key[0] in wanted
    ]


def _metrics(desk: Desk, params: Params) -> list[Answer]:  # noqa: ARG001 - the counters are never reset
    return [dict(desk.stats())]


def _snapshot(desk: Desk, params: Params) -> list[Answer]:
    """The newest messages of a partition; this is how the InLong manager previews a topic."""
    topic = _topic(desk, params.required("topicName"))
    partition = params.number("partitionId", default=0)
    if not topic.has(partition):
        raise BadParameter(f"topic {topic.name} has no partition {partition} on this broker")
    most = params.number("msgCount", default=3, least=1, most=MAX_SNAPSHOT)
    filters = params.items("filterConds", most=500)
    store = desk.engine.topics.store(topic, partition)
    messages = _newest(store, partition, most, frozenset(map(filter_key, filters)) if filters else None)
    rows = []
    for offset, message in messages:
        found = split_data(message.payLoadData, message.flag)
        attributes, body = ("", message.payLoadData) if found is None else found
        pairs = dict(parse_attributes(attributes))
        rows.append(
            {
                "messageId": message.messageId,
                "indexOffset": offset,
                "msgType": pairs.get(MSG_TYPE, ""),
                "msgTime": pairs.get(MSG_TIME, ""),
                "attr": base64.b64encode(attributes.encode()).decode(),
                "data": base64.b64encode(body).decode(),
            }
        )
    return rows


def _newest(
    store: LogStore, partition: int, most: int, keys: frozenset[int] | None
) -> list[tuple[int, pb.TransferedMessage]]:
    """At most ``most`` of the newest messages, oldest first: look further and further back until there are enough."""
    back = most * _RECORD * 4
    while True:
        start = max(store.min_offset, (store.durable_end - back) // _RECORD * _RECORD)
        offsets: list[int] = []
        encoded: list[bytes] = []
        at = start
        while at < store.durable_end:
            read = store.read(partition, at, keys=keys)
            offsets = (offsets + read.offsets)[-most:]
            encoded = (encoded + read.messages)[-most:]
            at = read.next_offset
        if len(offsets) >= most or start == store.min_offset:
            answer = pb.GetMessageResponseB2C.FromString(b"\x08\x01\x10\x01" + b"".join(encoded))
            return list(zip(offsets, answer.messages, strict=True))
        back *= 8


def _history(desk: Desk, params: Params) -> list[Answer]:
    """What the system topic says of groups, from a time on."""
    topic = desk.engine.topics.by_name[HISTORY_TOPIC]
    most = params.number("msgCount", default=1, least=1, most=MAX_SNAPSHOT)
    rows = []
    for group in params.items("groupName") or [params.required("groupName")]:
        partition, kind = history_place(group)
        store = desk.engine.topics.store(topic, partition)
        start = store.offset_at(params.time_ms("recordTime")) if params.text("recordTime") else store.min_offset
        read = store.read(partition, start, keys=frozenset([filter_key(kind)]), max_messages=most)
        answer = pb.GetMessageResponseB2C.FromString(b"\x08\x01\x10\x01" + b"".join(read.messages))
        bodies = [split_data(message.payLoadData, message.flag) for message in answer.messages]
        records = [json.loads(found[1]) for found in bodies if found is not None]
        rows.append({"groupName": group, "records": [record for record in records if record["group"] == group]})
    return rows


# Changes.


def _set_current(desk: Desk, params: Params) -> list[Answer]:
    key, store = _place(desk, params)
    wanted = params.number("manualOffset")
    if not store.min_offset <= wanted <= store.durable_end:
        raise BadParameter(f"manualOffset {wanted}: {store.min_offset} to {store.durable_end} are possible")
    old = desk.engine.offsets.committed(key)
    desk.engine.offsets.set(key, wanted - wanted % _RECORD)
    return [{"oldOffset": -1 if old is None else old, "newOffset": wanted - wanted % _RECORD}]


def _set_offset(desk: Desk, params: Params) -> list[Answer]:
    groups = params.items("groupName") or [params.required("groupName")]
    targets: list[tuple[str, int, int | None]] = []
    if params.flag("manualSet", default=False):
        targets = list(_manual(desk, params.required("offsetJsonInfo")))
    else:
        for name in params.items("topicName") or [params.required("topicName")]:
            targets += [(name, partition, None) for partition in _partitions(_topic(desk, name))]
    rows = []
    for group in groups:
        for name, partition, wanted in targets:
            store = _store_of(desk, (group, name, partition))
            target = store.durable_end if wanted is None else max(store.min_offset, min(wanted, store.durable_end))
            rows.append(_move(desk, (group, name, partition), target - target % _RECORD))
    return rows


def _manual(desk: Desk, text: str) -> Iterator[tuple[str, int, int]]:
    try:
        wanted = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise BadParameter('offsetJsonInfo: an object {"brokerId:topic:partitionId": offset} is expected') from None
    for name, offset in wanted.items():
        pieces = str(name).split(":")
        if len(pieces) != 3 or isinstance(offset, bool) or not isinstance(offset, int):
            raise BadParameter(f"offsetJsonInfo {name!r}: brokerId:topic:partitionId with a number is expected")
        if pieces[0] != str(desk.broker_id):
            continue  # of another broker of the cluster
        partition = int(pieces[2]) if pieces[2].isdecimal() else -1
        if not _topic(desk, pieces[1]).has(partition):
            raise BadParameter(f"topic {pieces[1]} has no partition {pieces[2]} on this broker")
        yield pieces[1], partition, offset


def _move(desk: Desk, key: Key, offset: int) -> Answer:
    old = desk.engine.offsets.committed(key)
    desk.engine.offsets.set(key, offset)
    return {
        "groupName": key[0],
        "topicName": key[1],
        "partitionId": key[2],
        "oldOffset": -1 if old is None else old,
        "newOffset": offset,
    }


def _set_by_time(desk: Desk, params: Params) -> list[Answer]:
    """To the first message appended at ``recordTime`` or later; the reference looks into its history instead."""
    time_ms = params.time_ms("recordTime")
    rows = []
    for group in params.items("groupName") or [params.required("groupName")]:
        known = {key[1] for key, _ in desk.engine.offsets.items() if key[0] == group}
        for name in params.items("topicName") or sorted(known):
            topic = _topic(desk, name)
            for partition in _partitions(topic):
                target = desk.engine.topics.store(topic, partition).offset_at(time_ms)
                rows.append(_move(desk, (group, name, partition), target))
    return rows


def _clone(desk: Desk, params: Params) -> list[Answer]:
    source = params.required("sourceGroupName")
    targets = params.items("targetGroupName") or [params.required("targetGroupName")]
    topics = set(params.items("topicName"))
    positions = [
        (key, offset)
        for key, offset in desk.engine.offsets.items()
        if key[0] == source and _served(desk, key) and (not topics or key[1] in topics)
    ]
    if not positions:
        raise BadParameter(f"sourceGroupName {source!r} has no position in these topics")
    return [_move(desk, (group, key[1], key[2]), offset) for group in targets for key, offset in sorted(positions)]


def _remove(desk: Desk, params: Params) -> list[Answer]:
    groups = set(params.items("groupName") or [params.required("groupName")])
    topics = set(params.items("topicName"))
    memory_only = params.flag("onlyMemory", default=False)
    rows = []
    for key, offset in desk.engine.offsets.items():
        if key[0] not in groups or (topics and key[1] not in topics):
            continue
        if desk.engine.holdings.of(key) is not None:
            rows.append({**_named(key), "success": False, "errInfo": "a consumer holds the partition"})
        elif not memory_only:
            # There is one set of positions here, memory and disk never differ for long: nothing is to be done then.
            desk.engine.offsets.remove(key)
            rows.append({**_named(key), "success": True, "oldOffset": offset})
    return rows


def _named(key: Key) -> Answer:
    return {"groupName": key[0], "topicName": key[1], "partitionId": key[2]}


def _version(desk: Desk, params: Params) -> list[Answer]:  # noqa: ARG001 - the table's form
    return [{"serverVersion": f"penstock-{penstock.__version__}"}]


def _methods(desk: Desk, params: Params) -> list[Any]:  # noqa: ARG001 - the table's form
    return sorted(METHODS)


class Method(NamedTuple):
    """One row: what runs, whether it changes something, and a line for the reference page."""

    run: Callable[[Desk, Params], list[Any]]
    about: str
    changes: bool = False


_CONSUMERS = Method(_consumers, "who holds which partition, and where it stands")
_GROUPS = Method(_groups, "names of the groups; `divide`: those with a consumer and those without")
_REGISTERED = Method(_registrations, "which consumer holds which partition")
METHODS: dict[str, Method] = {
    "admin_query_broker_all_consumer_info": _CONSUMERS,
    "admin_get_group_detail_info": _CONSUMERS,
    "admin_query_broker_all_store_info": Method(_stores, "bounds and sizes of the stores"),
    "admin_query_broker_memstore_info": Method(_stores, "the same; `unwrittenSize` waits for its commit"),
    "admin_get_msgstore_stats": Method(_metrics, "counters of the broker"),
    "admin_get_metrics_info": Method(_metrics, "counters of the broker"),
    "admin_query_group_offset": Method(_group_offset, "where a group stands in one partition"),
    "admin_query_offset": Method(_offsets, "where groups stand, and their lag"),
    "admin_query_pubinfo": Method(_pubinfo, "bounds of all partitions"),
    "admin_get_booked_groupname": _GROUPS,
    "admin_query_group": _GROUPS,
    "admin_get_partition_reginfo": _REGISTERED,
    "admin_query_consumer_regmap": _REGISTERED,
    "admin_snapshot_message": Method(_snapshot, "the newest messages of a partition, in base64"),
    "admin_get_group_history_offset": Method(_history, "what the offset history says of a group, from a time on"),
    "admin_manual_set_current_offset": Method(_set_current, "put a group at an offset of one partition", changes=True),
    "admin_set_offset": Method(_set_offset, "put groups at given offsets, or at the end of topics", changes=True),
    "admin_set_offset_by_time": Method(_set_by_time, "put groups at the first message of a time", changes=True),
    "admin_clone_offset": Method(_clone, "put groups where another one stands", changes=True),
    "admin_rmv_offset": Method(_remove, "forget the positions of groups that are not consuming", changes=True),
    "admin_query_server_version": Method(_version, "version of the server"),
    "admin_get_methods": Method(_methods, "names of the methods"),
}
