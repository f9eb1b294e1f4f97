"""What the broker's administration changes: the positions of groups, in the engine; the caller makes them durable."""

from __future__ import annotations

import json
from collections.abc import Iterator

from penstock.tube.admin.broker_desk import Answer, Desk
from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.engine.broker.group_offsets import Key

__all__ = ["clone", "remove", "set_by_time", "set_current", "set_offset"]


def set_current(desk: Desk, params: Params) -> list[Answer]:
    """Put a group at ``manualOffset`` of one partition: the record that it falls into."""
    key, store = desk.place(params)
    wanted = params.number("manualOffset")
    if not store.min_offset <= wanted <= store.durable_end:
        raise BadParameter(f"manualOffset {wanted}: {store.min_offset} to {store.durable_end} are possible")
    old = desk.engine.offsets.committed(key)
    desk.engine.offsets.set(key, wanted - wanted % INDEX_RECORD_BYTES)
    return [{"oldOffset": -1 if old is None else old, "newOffset": wanted - wanted % INDEX_RECORD_BYTES}]


def set_offset(desk: Desk, params: Params) -> list[Answer]:
    """Put groups at given offsets (``manualSet``, ``offsetJsonInfo``), within bounds, or at the end of topics."""
    groups = params.items("groupName") or [params.required("groupName")]
    targets: list[tuple[str, int, int | None]] = []
    if params.flag("manualSet", default=False):
        targets = list(_manual(desk, params.required("offsetJsonInfo")))
    else:
        for name in params.items("topicName") or [params.required("topicName")]:
            targets += [(name, partition, None) for partition in desk.partitions(desk.topic(name))]
    rows = []
    for group in groups:
        for name, partition, wanted in targets:
            store = desk.store((group, name, partition))
            target = store.durable_end if wanted is None else max(store.min_offset, min(wanted, store.durable_end))
            rows.append(_move(desk, (group, name, partition), target - target % INDEX_RECORD_BYTES))
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
        if not desk.topic(pieces[1]).has(partition):
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


def set_by_time(desk: Desk, params: Params) -> list[Answer]:
    """To the first message appended at ``recordTime`` or later; the reference looks into its history instead."""
    time_ms = params.time_ms("recordTime")
    rows = []
    for group in params.items("groupName") or [params.required("groupName")]:
        known = {key[1] for key, _ in desk.engine.offsets.items() if key[0] == group}
        for name in params.items("topicName") or sorted(known):
            topic = desk.topic(name)
            for partition in desk.partitions(topic):
                target = desk.engine.topics.store(topic, partition).offset_at(time_ms)
                rows.append(_move(desk, (group, name, partition), target))
    return rows


def clone(desk: Desk, params: Params) -> list[Answer]:
    """Put the groups of ``targetGroupName`` where ``sourceGroupName`` stands."""
    source = params.required("sourceGroupName")
    targets = params.items("targetGroupName") or [params.required("targetGroupName")]
    topics = set(params.items("topicName"))
    positions = [
        (key, offset)
        for key, offset in desk.engine.offsets.items()
        if key[0] == source and desk.serves(key) and (not topics or key[1] in topics)
    ]
    if not positions:
        raise BadParameter(f"sourceGroupName {source!r} has no position in these topics")
    return [_move(desk, (group, key[1], key[2]), offset) for group in targets for key, offset in sorted(positions)]


def remove(desk: Desk, params: Params) -> list[Answer]:
    """Forget the positions of groups; a partition that a consumer holds keeps its own, and the answer says so."""
    groups = set(params.items("groupName") or [params.required("groupName")])
    topics = set(params.items("topicName"))
    if params.flag("onlyMemory", default=False):
        raise BadParameter("onlyMemory: there is one set of positions, memory and disk do not differ; leave it out")
    rows = []
    for key, offset in desk.engine.offsets.items():
        if key[0] not in groups or (topics and key[1] not in topics):
            continue
        if desk.engine.registrations.of(key) is not None:
            rows.append({**_named(key), "success": False, "errInfo": "a consumer holds the partition"})
        else:
            desk.engine.offsets.remove(key)
            rows.append({**_named(key), "success": True, "oldOffset": offset})
    return rows


def _named(key: Key) -> Answer:
    return {"groupName": key[0], "topicName": key[1], "partitionId": key[2]}
