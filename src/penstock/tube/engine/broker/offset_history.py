"""History of committed offsets: one message per group and minute in the system topic, in the reference's format.

Consumers may read the topic; `penstock tube offset` and existing tools find the offset of a group at a given time in
it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

from penstock.tube.codec.message import MSG_TIME, MSG_TYPE, encode_data, fits_attribute, format_attributes, java_hash
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, PARTITIONS_PER_STORE
from penstock.tube.engine.broker.group_offsets import GroupOffsets
from penstock.tube.engine.broker.registrations import Registrations
from penstock.tube.engine.broker.topics import (
    Topics,
)

__all__ = ["HistoryMessage", "group_history", "history_partition"]

_VERSION = 3
_PARTITIONS = 10
_INT_MIN = -(1 << 31)


class HistoryMessage(NamedTuple):
    """A message for the system topic. Readers of the history filter by ``msg_type``."""

    partition: int
    data: bytes
    flag: int
    msg_type: str


def history_partition(group: str) -> tuple[int, str]:
    """Return the partition of a group's history, and the message type of its messages."""
    number = java_hash(group)
    # Java's abs() returns the smallest integer unchanged; no known group hashes to it.
    return (0 if number == _INT_MIN else abs(number)) % _PARTITIONS, str(number)


def group_history(
    topics: Topics, offsets: GroupOffsets, registrations: Registrations, broker_id: int, now_ms: int, minute: str
) -> list[HistoryMessage]:
    """Return one message for each group with an offset on this broker, without offsets in the system topic itself.

    ``minute``: the current time as yyyyMMddHHmm.
    """
    groups: dict[str, dict[str, dict[int, list[tuple[int, int]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for (group, name, partition), offset in offsets.items():
        topic = topics.by_name.get(name)
        if name != OFFSET_HISTORY_TOPIC and topic is not None and topic.has(partition):
            groups[group][name][partition // PARTITIONS_PER_STORE].append((partition, offset))
    out = []
    for group, by_topic in sorted(groups.items()):
        clients: dict[str, int] = {}
        filtered = False
        records = []
        for name, by_store in sorted(by_topic.items()):
            rows = []
            for number, parts in sorted(by_store.items()):
                store = topics.store(topics.by_name[name], parts[0][0])
                items = []
                for partition, offset in sorted(parts):
                    key = (group, name, partition)
                    registration = registrations.get(key)
                    record = -1 if registration is None else clients.setdefault(registration.client_id, len(clients))
                    filtered = filtered or (registration is not None and registration.keys is not None)
                    items.append({"partId": partition, "iCfm": offset, "iFlt": offsets.in_flight(key), "recId": record})
                rows.append(
                    {
                        "storeId": number,
                        "iMin": store.min_offset,
                        "iMax": store.durable_end,
                        "dMin": store.min_data_offset,
                        "dMax": store.durable_data_end,
                        "parts": items,
                    }
                )
            records.append({"topic": name, "offsets": rows})
        body: dict[str, Any] = {
            "dt": now_ms,
            "bId": broker_id,
            "ver": _VERSION,
            "group": group,
            "on": bool(clients),
            "flt": filtered,
            "clients": [{"recId": number, "cltId": client, "lstTm": now_ms} for client, number in clients.items()],
            "records": records,
        }
        partition, msg_type = history_partition(group)
        attributes = [(MSG_TYPE, msg_type), (MSG_TIME, minute)]
        if fits_attribute(group):  # group names are arbitrary; the body has the name in any case
            attributes.append(("$groupName$", group))
        text = format_attributes(attributes)
        data, flag = encode_data(json.dumps(body, separators=(",", ":")).encode(), text)
        out.append(HistoryMessage(partition, data, flag, msg_type))
    return out
