"""The broker's HTTP methods (``/broker.htm?method=…``): queries (consumers, offsets, stores, staged rows), changes,
the table of methods, authorization and the response.

A successful response has ``dataSet`` with ``totalCnt``. A change is applied to the engine; the caller makes it durable
and then answers. Offsets are index offsets, 28 bytes per message of the store. Times are ``yyyyMMddHHmmss`` in UTC.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import penstock
from penstock.errors import RemoteProtocolError
from penstock.tube.admin.request import UNAUTHORIZED, UNKNOWN, BadParameter, Caller, Params, as_number, format_time
from penstock.tube.codec.message import INDEX_RECORD_BYTES, MSG_TIME, MSG_TYPE, filter_key, parse_attributes, split_data
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import GROUP_RULE, OFFSET_HISTORY_TOPIC, partition_ids, valid_group
from penstock.tube.engine.broker.group_offsets import Key
from penstock.tube.engine.broker.offset_history import history_partition
from penstock.tube.engine.broker.topics import (
    Topic,
)
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.engine.interfaces import LogStore
from penstock.tube.engine.transactions.staging import Query, Staging

__all__ = ["METHODS", "Answer", "BrokerAdmin", "BrokerMethod", "handle", "is_protected"]

# --- methods ---


Answer = dict[str, Any]


class BrokerAdmin(NamedTuple):
    """A broker's engine with its id, counters and the current time, for the methods below."""

    engine: BrokerEngine
    broker_id: int
    stats: Callable[[], Mapping[str, int]]
    now_ms: int

    def topic(self, name: str) -> Topic:
        """Return the topic of that name. Raises BadParameter if it is not on this broker."""
        topic = self.engine.topics.by_name.get(name)
        if topic is None:
            raise BadParameter(f"topicName {name!r} is not on this broker")
        return topic

    def topics(self, params: Params) -> list[Topic]:
        """Return the named topics that are on this broker; without names, all topics."""
        wanted = params.items("topicName")
        topics = self.engine.topics.by_name
        return [topics[name] for name in sorted(wanted or topics) if name in topics]

    def partitions(self, topic: Topic) -> list[int]:
        """Return the wire ids of the partitions of ``topic`` on this broker."""
        return list(partition_ids(topic.config.partitions or 1, topic.config.stores or 1))

    def partition_of(self, params: Params) -> tuple[Key, LogStore]:
        """Return the group and partition in the parameters, and the partition's store. Raises BadParameter."""
        topic = self.topic(params.required("topicName"))
        group = params.required("groupName")
        partition = params.number("partitionId")
        if not topic.has(partition):
            raise BadParameter(f"topic {topic.name} has no partition {partition} on this broker")
        return (group, topic.name, partition), self.engine.topics.store(topic, partition)

    def positions(self, params: Params) -> list[tuple[Key, int]]:
        """Return the offsets of the named groups in the named topics; without names, of all."""
        groups, topics = set(params.items("groupName")), set(params.items("topicName"))
        rows = [
            (key, offset)
            for key, offset in self.engine.offsets.items()
            if (not groups or key[0] in groups) and (not topics or key[1] in topics)
        ]
        return sorted((key, offset) for key, offset in rows if self.serves(key))

    def serves(self, key: Key) -> bool:
        """Return True if the partition is on this broker."""
        topic = self.engine.topics.by_name.get(key[1])
        return topic is not None and topic.has(key[2])

    def store(self, key: Key) -> LogStore:
        """Return the store of a partition that is on this broker."""
        return self.engine.topics.store(self.engine.topics.by_name[key[1]], key[2])


MAX_SNAPSHOT = 500


def _consumers(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Registrations of consumers with their filters and offsets; filtered by ``groupName``."""
    wanted = set(params.items("groupName"))
    rows: list[Answer] = []
    for key, registration in admin.engine.registrations:
        if wanted and key[0] not in wanted:
            continue
        store = admin.store(key)
        committed = admin.engine.offsets.committed(key) or 0
        rows.append(
            {
                "index": len(rows) + 1,
                "groupName": key[0],
                "topicName": key[1],
                "partitionId": key[2],
                "consumerId": params.shown_id(registration.client_id),
                "isRegOk": True,
                "isFilterConsume": registration.keys is not None,
                "filterConds": list(registration.filters),
                "qryPriorityId": registration.priority,
                "lastRegTime": registration.since,
                "isMessageStoreOk": True,
                "tmpOffset": admin.engine.offsets.in_flight(key),
                "zkOffset": committed,  # the reference's name: it stored offsets in ZooKeeper
                "minOffset": store.min_offset,
                "maxOffset": store.durable_end,
                "minDataOffset": store.min_data_offset,
                "maxDataOffset": store.durable_data_end,
            }
        )
    return rows


def _stores(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """First and last offsets and sizes in bytes of each store of the topics (``topicName``)."""
    rows: list[Answer] = []
    for topic in admin.topics(params):
        stores = []
        for number in range(topic.config.stores or 1):
            store = admin.engine.topics.store(topic, number * 10_000)  # wire id of the first partition of a store
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


def _store_stats(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Sizes of the stores, by topic."""
    details = ("storeId", "sizeInBytes", "unwrittenSize")
    return [
        {
            "topicName": row["topicName"],
            "details": [{name: store[name] for name in details} for store in row["storeInfo"]],
        }
        for row in _stores(admin, params)
    ]


def _pubinfo(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """First and last index and data offsets of each partition of the topics."""
    rows = []
    for topic in admin.topics(params):
        parts = []
        for partition in admin.partitions(topic):
            store = admin.engine.topics.store(topic, partition)
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


def _group_offset(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Offset of one group in one partition; ``zkOffset`` is the committed offset, -1 for none."""
    key, store = admin.partition_of(params)
    offsets = admin.engine.offsets
    committed = offsets.committed(key)
    here = store.min_offset if committed is None else committed
    reading = min(max(here + offsets.in_flight(key), store.min_offset), store.durable_end)
    position = store.data_offset(reading)
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


def _group_offsets(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Offsets of groups in each partition, and their lag in bytes of index and data."""
    groups: dict[str, dict[str, list[Answer]]] = {}
    for key, offset in admin.positions(params):
        store = admin.store(key)
        position = store.data_offset(min(max(offset, store.min_offset), store.durable_end))
        groups.setdefault(key[0], {}).setdefault(key[1], []).append(
            {
                "partitionId": key[2],
                "curOffset": offset,
                "flightOffset": admin.engine.offsets.in_flight(key),
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


def _groups(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Names of the groups; ``divide``: groups with a consumer and groups without."""
    divide = params.flag("divide", default=False)
    known = {key[0] for key, _ in admin.engine.offsets.items()}
    online = {key[0] for key, _ in admin.engine.registrations}
    kinds = {"online": online, "offline": known - online} if divide else {"all": known | online}
    return [{"type": kind, "groupName": sorted(names), "groupCount": len(names)} for kind, names in kinds.items()]


def _registrations(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Registrations of consumers; filtered by ``groupName``."""
    wanted = set(params.items("groupName"))
    return [
        {
            "Partition": f"{key[0]}:{key[1]}:{key[2]}",
            "Consumer": params.shown_id(registration.client_id),
            "index": number,
        }
        for number, (key, registration) in enumerate(admin.engine.registrations, 1)
        if not wanted or key[0] in wanted
    ]


def _metrics(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """The counters of the broker."""
    return [{"probeTime": format_time(admin.now_ms), "nodeRole": "Broker", "metrics": dict(admin.stats())}]


def _backup(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Committed offsets of groups, in the format of ``admin_set_offset``."""
    # The broker does not write to a path that a client chooses.
    if params.text("backupPath"):
        raise BadParameter(
            "backupPath: nothing is written on the broker's machine; omit it, the response contains the offsets"
        )
    found: dict[str, dict[str, int]] = {}
    for key, offset in admin.positions(params):
        found.setdefault(key[0], {})[f"{admin.broker_id}:{key[1]}:{key[2]}"] = offset
    return [{"groupName": group, "offsetJsonInfo": json.dumps(parts)} for group, parts in sorted(found.items())]


def _snapshot(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """The newest messages of a partition; the InLong manager previews a topic with it."""
    topic = admin.topic(params.required("topicName"))
    partition = params.number("partitionId", default=0)
    if not topic.has(partition):
        raise BadParameter(f"topic {topic.name} has no partition {partition} on this broker")
    most = params.number("msgCount", default=3, least=1, most=MAX_SNAPSHOT)
    filters = params.items("filterConds", most=500)
    store = admin.engine.topics.store(topic, partition)
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
    """Return at most ``most`` of the newest messages, oldest first; reads backwards until there are enough."""
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
            # success and errCode, which the message requires; the encoded messages follow as they are stored.
            answer = pb.GetMessageResponseB2C.FromString(b"\x08\x01\x10\x01" + b"".join(encoded))
            return list(zip(offsets, answer.messages, strict=True))
        back *= 8  # the filter matches few messages, or most messages are of other partitions


def _history(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Entries of the offset history of groups, from a time on."""
    topic = admin.engine.topics.by_name[OFFSET_HISTORY_TOPIC]
    most = params.number("msgCount", default=1, least=1, most=MAX_SNAPSHOT)
    rows = []
    for group in params.items("groupName") or [params.required("groupName")]:
        partition, kind = history_partition(group)
        store = admin.engine.topics.store(topic, partition)
        start = store.offset_at(params.time_ms("recordTime")) if params.text("recordTime") else store.min_offset
        read = store.read(partition, start, keys=frozenset([filter_key(kind)]), max_messages=most)
        answer = pb.GetMessageResponseB2C.FromString(b"\x08\x01\x10\x01" + b"".join(read.messages))
        bodies = [split_data(message.payLoadData, message.flag) for message in answer.messages]
        records = [json.loads(found[1]) for found in bodies if found is not None]
        rows.append({"groupName": group, "records": [record for record in records if record["group"] == group]})
    return rows


def _set_current(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Set a group's offset in one partition to the record that contains ``manualOffset``."""
    key, store = admin.partition_of(params)
    _check_group("groupName", key[0])
    wanted = params.number("manualOffset")
    if not store.min_offset <= wanted <= store.durable_end:
        raise BadParameter(f"manualOffset {wanted}: {store.min_offset} to {store.durable_end} are possible")
    old = admin.engine.offsets.committed(key)
    admin.engine.offsets.set(key, wanted - wanted % INDEX_RECORD_BYTES)
    return [{"oldOffset": -1 if old is None else old, "newOffset": wanted - wanted % INDEX_RECORD_BYTES}]


def _set_offset(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Set groups to given offsets (``manualSet``, ``offsetJsonInfo``), within limits, or to the end of topics."""
    groups = _groups_to_set(params, "groupName")
    targets: list[tuple[str, int, int | None]] = []
    if params.flag("manualSet", default=False):
        targets = list(_manual(admin, params.required("offsetJsonInfo")))
    else:
        for name in params.items("topicName") or [params.required("topicName")]:
            targets += [(name, partition, None) for partition in admin.partitions(admin.topic(name))]
    rows = []
    for group in groups:
        for name, partition, wanted in targets:
            store = admin.store((group, name, partition))
            target = store.durable_end if wanted is None else max(store.min_offset, min(wanted, store.durable_end))
            rows.append(_move(admin, (group, name, partition), target - target % INDEX_RECORD_BYTES))
    return rows


def _groups_to_set(params: Params, name: str) -> list[str]:
    """Return the groups that get an offset. Raises BadParameter for a name with which no consumer can register."""
    groups = params.items(name) or [params.required(name)]
    for group in groups:
        _check_group(name, group)
    return groups


def _check_group(name: str, group: str) -> None:
    if not valid_group(group):
        raise BadParameter(f"{name} {group!r:.100}: {GROUP_RULE}")


def _manual(admin: BrokerAdmin, text: str) -> Iterator[tuple[str, int, int]]:
    try:
        wanted = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise BadParameter('offsetJsonInfo: an object {"brokerId:topic:partitionId": offset} is expected') from None
    for name, offset in wanted.items():
        pieces = str(name).split(":")
        if len(pieces) != 3 or isinstance(offset, bool) or not isinstance(offset, int):
            raise BadParameter(f"offsetJsonInfo {name!r}: brokerId:topic:partitionId with a number is expected")
        if pieces[0] != str(admin.broker_id):
            continue  # belongs to another broker of the cluster
        partition = as_number(pieces[2], f"offsetJsonInfo {name:.100}: the partition")
        if not admin.topic(pieces[1]).has(partition):
            raise BadParameter(f"topic {pieces[1]} has no partition {partition} on this broker")
        yield pieces[1], partition, offset


def _move(admin: BrokerAdmin, key: Key, offset: int) -> Answer:
    old = admin.engine.offsets.committed(key)
    admin.engine.offsets.set(key, offset)
    return {
        "groupName": key[0],
        "topicName": key[1],
        "partitionId": key[2],
        "oldOffset": -1 if old is None else old,
        "newOffset": offset,
    }


def _set_by_time(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Set offsets to the first message appended at ``recordTime`` or later; the reference uses its offset history."""
    time_ms = params.time_ms("recordTime")
    targets: list[tuple[Key, int]] = []
    for group in _groups_to_set(params, "groupName"):
        # Without a topic, change the topics that the group has consumed, not all topics of the broker.
        known = {key[1] for key, _ in admin.engine.offsets.items() if key[0] == group}
        for name in params.items("topicName") or sorted(known):
            topic = admin.topic(name)
            for partition in admin.partitions(topic):
                target = admin.engine.topics.store(topic, partition).offset_at(time_ms)
                targets.append(((group, name, partition), target))
    return [_move(admin, key, offset) for key, offset in targets]  # all are valid: a refused request changes nothing


def _clone_offsets(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Copy the offsets of ``sourceGroupName`` to the groups of ``targetGroupName``."""
    source = params.required("sourceGroupName")
    targets = _groups_to_set(params, "targetGroupName")
    topics = set(params.items("topicName"))
    positions = [
        (key, offset)
        for key, offset in admin.engine.offsets.items()
        if key[0] == source and admin.serves(key) and (not topics or key[1] in topics)
    ]
    if not positions:
        raise BadParameter(f"sourceGroupName {source!r} has no offsets in these topics")
    return [_move(admin, (group, key[1], key[2]), offset) for group in targets for key, offset in sorted(positions)]


def _remove_offsets(admin: BrokerAdmin, params: Params) -> list[Answer]:
    """Remove offsets of groups; partitions with a registered consumer keep theirs, and the response reports it."""
    groups = set(params.items("groupName") or [params.required("groupName")])
    topics = set(params.items("topicName"))
    if params.flag("onlyMemory", default=False):
        raise BadParameter("onlyMemory: offsets in memory and on disk are the same; omit it")
    rows = []
    for key, offset in admin.engine.offsets.items():
        if key[0] not in groups or (topics and key[1] not in topics):
            continue
        if admin.engine.registrations.get(key) is not None:
            rows.append({**_partition_row(key), "success": False, "errInfo": "a consumer holds the partition"})
        else:
            admin.engine.offsets.remove(key)
            rows.append({**_partition_row(key), "success": True, "oldOffset": offset})
    return rows


def _partition_row(key: Key) -> Answer:
    return {"groupName": key[0], "topicName": key[1], "partitionId": key[2]}


def _staged_rows(admin: BrokerAdmin, params: Params) -> list[dict[str, Any]]:
    """Staged attempts, and transactions that are prepared or being published without staged rows on this broker."""
    staging = _staging(admin)
    wanted = set(params.items("queryName"))
    found: list[dict[str, Any]] = [
        {
            "queryName": row.query,
            "run": row.run,
            "batchId": row.batch,
            "taskId": row.task,
            "attempt": row.attempt,
            "rows": row.rows,
            "bytes": row.bytes,
            "state": row.state,
            "ageMs": row.age_ms,
        }
        for row in staging.rows(admin.now_ms)
        if not wanted or row.query in wanted
    ]
    # A transaction whose rows are on other brokers only is shown as well.
    shown = {(row["queryName"], row["attempt"]) for row in found}
    for query in staging.queries.values():
        decision = query.decision
        if decision is None or (wanted and query.name not in wanted):
            continue
        if not any((query.name, name) in shown for name, _ in decision.winners):
            found.append(_decided(query, admin.now_ms))
    return found


def _decided(query: Query, now_ms: int) -> dict[str, Any]:
    assert query.decision is not None
    return {
        "queryName": query.name,
        "run": query.run,
        "batchId": query.decision.batch,
        "taskId": None,
        "attempt": None,
        "rows": 0,
        "bytes": 0,
        "state": "publishing" if query.decision.publishing else "prepared",
        "ageMs": max(now_ms - query.changed_ms, 0),
    }


def _remove_staged(admin: BrokerAdmin, params: Params) -> list[dict[str, Any]]:
    """Remove the uncommitted rows of a query; with ``force`` also prepared ones."""
    staging = _staging(admin)
    name = params.required("queryName")
    query = staging.queries.get(name)
    if query is None:
        return []
    decision, before = query.decision, len(query.attempts)
    if decision is not None and not decision.publishing:
        if not params.flag("force", default=False):
            raise BadParameter(
                f"batch {decision.batch} of query {name} is prepared: other brokers may have published their part; "
                "resolve it (penstock tube staged resolve), or delete it with force=true"
            )
        staging.undo(query, admin.now_ms)
    # Attempts that a publication reads are kept until it has ended.
    held = query.held
    staging.drop(query, [attempt for attempt in query.attempts if attempt not in held])
    return [{"queryName": name, "attempts": before - len(query.attempts)}]


def _staging(admin: BrokerAdmin) -> Staging:
    staging = admin.engine.transactions.staging
    if staging is None:
        raise BadParameter("this broker does not stage rows")
    return staging


# --- table and requests ---


def handle(
    admin: BrokerAdmin, params: Mapping[str, str], token: str | None, caller: Caller = UNKNOWN
) -> tuple[Answer, bool]:
    """Return the response to a request of ``caller``, and whether a change must be made durable first.

    ``token`` is the administration token, which a request contains as ``confModAuthToken``; None: only users may make
    changes or read messages.
    """
    name = params.get("method", "")
    method = METHODS.get(name)
    if method is None:
        return _failure(f"Unsupported method: {name!r}; known: {', '.join(sorted(METHODS))}"), False
    caller = caller.showing(params, token)
    if not (caller.administers if method.protected else caller.reads):
        return _failure(UNAUTHORIZED), False
    try:
        given = Params(params, identified=caller.identified)
        if method.changes:
            given.user("modifyUser", "mur")
            given.check_unused(method.only)
        rows = method.run(admin, given)
    except (BadParameter, RemoteProtocolError) as error:
        return _failure(str(error)), False
    except OSError as error:
        return _failure(f"the disk failed: {error.strerror}"), False
    answer: Answer = {"result": True, "errCode": 0, "errMsg": "OK", method.rows: rows, method.total: len(rows)}
    if method.single and rows:
        answer |= rows[0]
    return answer, method.changes


def is_protected(name: str) -> bool:
    """Return True if the method of that name makes a change or shows the contents of messages."""
    method = METHODS.get(name)
    return method is not None and method.protected


def _failure(text: str) -> Answer:
    return {"result": False, "errCode": 400, "errMsg": text}


def _version(admin: BrokerAdmin, params: Params) -> list[Answer]:
    return [{"version": f"penstock-{penstock.__version__}"}]


def _statistics_on(admin: BrokerAdmin, params: Params) -> list[Answer]:
    return []


def _statistics_off(admin: BrokerAdmin, params: Params) -> list[Answer]:
    raise BadParameter("counters are always on: they cannot be disabled")


def _methods(admin: BrokerAdmin, params: Params) -> list[Any]:
    return [{"method": name, "needAuth": method.protected} for name, method in sorted(METHODS.items())]


class BrokerMethod(NamedTuple):
    """One method: the function, whether it makes a change, and a line for the reference page.

    ``rows`` and ``total`` are the names of the rows and of their number in the response, which differ between the
    reference's methods. ``single``: the row's fields are in the response itself as well. ``bodies``: the response has
    the contents of messages. ``only``: all parameters of a change; others are rejected.
    """

    run: Callable[[BrokerAdmin, Params], list[Any]]
    about: str
    changes: bool = False
    rows: str = "dataSet"
    total: str = "totalCnt"
    single: bool = False
    bodies: bool = False
    only: frozenset[str] = frozenset()

    @property
    def protected(self) -> bool:
        """True if the method needs the administration token, or a user with the right to administer."""
        return self.changes or self.bodies

    def with_data(self) -> BrokerMethod:
        """Return the method with its rows as `data`."""
        return self._replace(rows="data", total="count")


_CONSUMERS = BrokerMethod(_consumers, "registrations of consumers, with their offsets")
_GROUPS = BrokerMethod(
    _groups, "names of the groups; `divide`: those with a consumer and those without", total="dataCount"
)
_METRICS = BrokerMethod(_metrics, "counters of the broker").with_data()
_REGISTERED = BrokerMethod(_registrations, "registrations of consumers")
_STATISTICS_OFF = BrokerMethod(_statistics_off, "refused: counters are always on").with_data()
_POSITION = frozenset({"groupName", "topicName", "partitionId"})
METHODS: dict[str, BrokerMethod] = {
    "admin_query_broker_all_consumer_info": _CONSUMERS,
    "admin_get_group_detail_info": _CONSUMERS,
    "admin_query_broker_all_store_info": BrokerMethod(_stores, "first and last offsets and sizes of the stores"),
    "admin_query_broker_memstore_info": BrokerMethod(_stores, "the same; `unwrittenSize` waits for its commit"),
    "admin_get_msgstore_stats": BrokerMethod(_store_stats, "sizes of the stores, by topic").with_data(),
    "admin_get_metrics_info": _METRICS,
    "admin_enable_stats": BrokerMethod(_statistics_on, "succeeds without effect: counters are always on").with_data(),
    "admin_disable_stats": _STATISTICS_OFF,
    "admin_disable_all_stats": _STATISTICS_OFF,
    "admin_query_group_offset": BrokerMethod(_group_offset, "offset of a group in one partition", single=True),
    "admin_query_offset": BrokerMethod(_group_offsets, "offsets of groups, and their lag"),
    "admin_query_pubinfo": BrokerMethod(_pubinfo, "first and last offsets of all partitions", total="dataCount"),
    "admin_get_booked_groupname": _GROUPS,
    "admin_query_group": _GROUPS,
    "admin_get_partition_reginfo": _REGISTERED,
    "admin_query_consumer_regmap": _REGISTERED,
    "admin_snapshot_message": BrokerMethod(
        _snapshot, "the newest messages of a partition, in base64; needs the administration token", bodies=True
    ),
    "admin_get_group_history_offset": BrokerMethod(
        _history, "entries of a group in the offset history, from a time on"
    ).with_data(),
    "admin_backup_group_offsets": BrokerMethod(
        _backup,
        "offsets of all groups, each as `offsetJsonInfo` of `admin_set_offset`; the response is the backup, nothing is"
        " written on the broker's machine",
    ).with_data(),
    "admin_manual_set_current_offset": BrokerMethod(
        _set_current,
        "set the offset of a group in one partition",
        changes=True,
        single=True,
        only=_POSITION | {"manualOffset"},
    ),
    "admin_set_offset": BrokerMethod(
        _set_offset,
        "set groups to given offsets, or to the end of topics",
        changes=True,
        only=frozenset({"groupName", "topicName", "manualSet", "offsetJsonInfo"}),
    ),
    "admin_set_offset_by_time": BrokerMethod(
        _set_by_time,
        "set groups to the first message of a time",
        changes=True,
        only=frozenset({"groupName", "topicName", "recordTime"}),
    ),
    "admin_clone_offset": BrokerMethod(
        _clone_offsets,
        "copy the offsets of a group to others",
        changes=True,
        only=frozenset({"sourceGroupName", "targetGroupName", "topicName"}),
    ),
    "admin_rmv_offset": BrokerMethod(
        _remove_offsets,
        "remove offsets of groups that are not consuming",
        changes=True,
        only=frozenset({"groupName", "topicName", "onlyMemory"}),
    ).with_data(),
    "admin_query_staged_rows": BrokerMethod(_staged_rows, "staged rows that are not committed yet; an extension"),
    "admin_rmv_staged_rows": BrokerMethod(
        _remove_staged,
        "remove the staged rows of a query (`queryName`, `force`); an extension",
        changes=True,
        only=frozenset({"queryName", "force"}),
    ),
    "admin_query_server_version": BrokerMethod(_version, "version of the server").with_data(),
    "admin_get_methods": BrokerMethod(_methods, "names of the methods"),
}
