"""What the broker's administration shows: who consumes, where groups stand, what the stores hold."""

from __future__ import annotations

import base64
import json

from penstock.tube.admin.broker_desk import Answer, Desk
from penstock.tube.admin.params import BadParameter, Params, format_time
from penstock.tube.codec.message import INDEX_RECORD_BYTES, MSG_TIME, MSG_TYPE, filter_key, parse_attributes, split_data
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC
from penstock.tube.engine.broker.offset_history import history_place
from penstock.tube.engine.broker.topics import (
    LogStore,
)

__all__ = [
    "backup",
    "consumers",
    "group_offset",
    "groups",
    "history",
    "metrics",
    "offsets",
    "pubinfo",
    "registrations",
    "snapshot",
    "store_stats",
    "stores",
]

MAX_SNAPSHOT = 500


def consumers(desk: Desk, params: Params) -> list[Answer]:
    """Who holds which partition, since when, by which filters, and where it stands; ``groupName`` narrows it down."""
    wanted = set(params.items("groupName"))
    rows: list[Answer] = []
    for key, holder in desk.engine.registrations:
        if wanted and key[0] not in wanted:
            continue
        store = desk.store(key)
        committed = desk.engine.offsets.committed(key) or 0
        rows.append(
            {
                "index": len(rows) + 1,
                "groupName": key[0],
                "topicName": key[1],
                "partitionId": key[2],
                "consumerId": params.shown_id(holder.client_id),
                "isRegOk": True,
                "isFilterConsume": holder.keys is not None,
                "filterConds": list(holder.filters),
                "qryPriorityId": holder.priority,
                "lastRegTime": holder.since,
                "isMessageStoreOk": True,
                "tmpOffset": desk.engine.offsets.in_flight(key),
                "zkOffset": committed,
                "minOffset": store.min_offset,
                "maxOffset": store.durable_end,
                "minDataOffset": store.min_data_offset,
                "maxDataOffset": store.durable_data_end,
            }
        )
    return rows


def stores(desk: Desk, params: Params) -> list[Answer]:
    """Bounds and sizes of each store of the topics asked for (``topicName``), offsets and sizes in bytes."""
    rows: list[Answer] = []
    for topic in desk.topics(params):
        stores = []
        for number in range(topic.config.stores or 1):
            store = desk.engine.topics.store(topic, number * 10_000)
            count = topic.config.partitions or 1
            index_bytes = store.durable_end - store.min_offset
            bounds = {"minOffset": store.min_offset, "maxOffset": store.durable_end, "sizeInBytes": index_bytes}
            stores.append(
                {
                    "storeId": number,
                    "numPartition": count,
                    "minDataOffset": store.min_data_offset,
                    "maxDataOffset": store.durable_data_end,
                    "sizeInBytes": store.durable_data_end - store.min_data_offset,
                    "partitionInfo": [{"partitionId": number * 10_000 + part, **bounds} for part in range(count)],
                    "unwrittenSize": store.unwritten_bytes,
                }
            )
        rows.append({"index": len(rows) + 1, "topicName": topic.name, "storeInfo": stores})
    return rows


def store_stats(desk: Desk, params: Params) -> list[Answer]:
    """Sizes of the stores alone, by topic."""
    details = ("storeId", "sizeInBytes", "unwrittenSize")
    return [
        {
            "topicName": row["topicName"],
            "details": [{name: store[name] for name in details} for store in row["storeInfo"]],
        }
        for row in stores(desk, params)
    ]


def pubinfo(desk: Desk, params: Params) -> list[Answer]:
    """Bounds of each partition of the topics asked for, in the index and in the data."""
    rows = []
    for topic in desk.topics(params):
        parts = []
        for partition in desk.partitions(topic):
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
        rows.append({"topicName": topic.name, "offsetInfo": parts, "itemCount": len(parts)})
    return rows


def group_offset(desk: Desk, params: Params) -> list[Answer]:
    """Where one group stands in one partition; ``zkOffset`` is what it confirmed, -1 = nothing."""
    key, store = desk.place(params)
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
            "tmpOffset": offsets.in_flight(key),
            "zkOffset": -1 if committed is None else committed,
            "minOffset": store.min_offset,
            "maxOffset": store.durable_end,
            "minDataOffset": store.min_data_offset,
            "maxDataOffset": store.durable_data_end,
            "curReadDataOffset": position,
            "curRdDltDataOffset": store.durable_data_end - position,
        }
    ]


def offsets(desk: Desk, params: Params) -> list[Answer]:
    """Where groups stand in each partition, and how far behind its end, in bytes of index and of data."""
    groups: dict[str, dict[str, list[Answer]]] = {}
    for key, offset in desk.positions(params):
        store = desk.store(key)
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


def groups(desk: Desk, params: Params) -> list[Answer]:
    """Names of the groups; ``divide``: those with a consumer now apart from those without."""
    divide = params.flag("divide", default=False)
    known = {key[0] for key, _ in desk.engine.offsets.items()}
    online = {key[0] for key, _ in desk.engine.registrations}
    kinds = {"online": online, "offline": known - online} if divide else {"all": known | online}
    return [{"type": kind, "groupName": sorted(names), "groupCount": len(names)} for kind, names in kinds.items()]


def registrations(desk: Desk, params: Params) -> list[Answer]:
    """Which consumer holds which partition; ``groupName`` narrows it down."""
    wanted = set(params.items("groupName"))
    return [
        {
            "Partition": f"{key[0]}:{key[1]}:{key[2]}",
            "Consumer": params.shown_id(holder.client_id),
            "index": number,
        }
        for number, (key, holder) in enumerate(desk.engine.registrations, 1)
        if not wanted or key[0] in wanted
    ]


def metrics(desk: Desk, params: Params) -> list[Answer]:
    """The counters of the broker, as they are now."""
    return [{"probeTime": format_time(desk.now_ms), "nodeRole": "Broker", "metrics": dict(desk.stats())}]


def backup(desk: Desk, params: Params) -> list[Answer]:
    """The confirmed positions of groups, in the form that ``admin_set_offset`` takes."""
    if params.text("backupPath"):
        raise BadParameter("backupPath: nothing is written on the broker's machine; leave it out, the answer has it")
    found: dict[str, dict[str, int]] = {}
    for key, offset in desk.positions(params):
        found.setdefault(key[0], {})[f"{desk.broker_id}:{key[1]}:{key[2]}"] = offset
    return [{"groupName": group, "offsetJsonInfo": json.dumps(parts)} for group, parts in sorted(found.items())]


def snapshot(desk: Desk, params: Params) -> list[Answer]:
    """The newest messages of a partition; this is how the InLong manager previews a topic."""
    topic = desk.topic(params.required("topicName"))
    partition = params.number("partitionId", default=0)
    if not topic.has(partition):
        raise BadParameter(f"topic {topic.name} has no partition {partition} on this broker")
    most = params.number("msgCount", default=3, least=1, most=MAX_SNAPSHOT)
    filters = params.items("filterConds", most=500)
    store = desk.engine.topics.store(topic, partition)
    messages = _newest(store, partition, most, frozenset(map(filter_key, filters)) if filters else None)
    rows: list[Answer] = []
    for offset, message in messages:
        found = split_data(message.payLoadData, message.flag)
        attributes, body = ("", message.payLoadData) if found is None else found
        pairs = dict(parse_attributes(attributes))
        rows.append(
            {
                "index": len(rows),
                "messageId": message.messageId,
                "indexOffset": offset,
                "msgType": pairs.get(MSG_TYPE, ""),
                "msgTime": pairs.get(MSG_TIME, ""),
                "attr": attributes,
                "data": base64.b64encode(body).decode(),
            }
        )
    return rows


def _newest(
    store: LogStore, partition: int, most: int, keys: frozenset[int] | None
) -> list[tuple[int, pb.TransferedMessage]]:
    """At most ``most`` of the newest messages, oldest first: look further and further back until there are enough."""
    back = most * INDEX_RECORD_BYTES * 4
    while True:
        start = max(store.min_offset, (store.durable_end - back) // INDEX_RECORD_BYTES * INDEX_RECORD_BYTES)
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


def history(desk: Desk, params: Params) -> list[Answer]:
    """What the system topic says of groups, from a time on."""
    topic = desk.engine.topics.by_name[OFFSET_HISTORY_TOPIC]
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
