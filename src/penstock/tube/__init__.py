"""TubeMQ: master, broker, producer, consumer and a reader of exact ranges.

For programs: :class:`Producer`, :class:`Consumer`, :class:`RangeReader` and their argument and result types; blocking
producer and consumer are in :mod:`penstock.tube.blocking`. Names are imported on first use, so that the modules of this
package without IO do not load asyncio.

In this package "the reference" is Apache InLong's own implementation of TubeMQ in Java.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.tube.client.connection import ConnectionPool
    from penstock.tube.codec.strings import Partition
    from penstock.tube.consumer import BoundConsumption, Consumer, ConsumerOffset, Message
    from penstock.tube.producer import Producer, SendResult
    from penstock.tube.reader import MessageBatch, PartitionInfo, RangeReader, TopicUnavailableError, partitions
    from penstock.tube.record import Record

__all__ = [
    "BoundConsumption",
    "ConnectionPool",
    "Consumer",
    "ConsumerOffset",
    "Message",
    "MessageBatch",
    "Partition",
    "PartitionInfo",
    "Producer",
    "RangeReader",
    "Record",
    "SendResult",
    "TopicUnavailableError",
    "partitions",
]

_HOMES = {
    "BoundConsumption": "consumer",
    "ConnectionPool": "client.connection",
    "Consumer": "consumer",
    "Message": "consumer",
    "MessageBatch": "reader",
    "Partition": "codec.strings",
    "PartitionInfo": "reader",
    "ConsumerOffset": "consumer",
    "Producer": "producer",
    "RangeReader": "reader",
    "Record": "record",
    "SendResult": "producer",
    "TopicUnavailableError": "reader",
    "partitions": "reader",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
