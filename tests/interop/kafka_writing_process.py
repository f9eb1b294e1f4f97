"""A program that writes batches until it is killed: ``python -m tests.interop.kafka_writing_process``.

Arguments: address, topic, number of this run, first and last batch. It prints the number of each batch that it has
written, as a run writes its ledger.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

from penstock.errors import UnavailableError
from penstock.runtime.kafka.client import KafkaConnection, KafkaTopic
from penstock.spark.kafka.writes import TopicBatch, write_batch
from penstock.statestore.hlc import Hlc

__all__ = ["ROWS", "batch_of", "main", "rows"]

ROWS = 500
_PAIR = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_FIELDS: list[pa.Field[Any]] = [
    pa.field("key", pa.string()),
    pa.field("value", pa.binary()),
    pa.field("headers", pa.list_(_PAIR)),
]


def rows(first: int, count: int, size: int = 0) -> pa.RecordBatch:
    """``count`` messages with the numbers from ``first`` on as keys, values and ids, and ``size`` more bytes."""
    return pa.RecordBatch.from_pylist(
        [
            {"key": f"{n}", "value": f"{n}".encode() + b"." * size, "headers": [{"key": "id", "value": b"r%d" % n}]}
            for n in range(first, first + count)
        ],
        schema=pa.schema(_FIELDS),
    )


def batch_of(target: KafkaTopic, batch: int, run: int = 1) -> TopicBatch:
    """``batch`` of the run ``run``."""
    return TopicBatch(target, "plant", "out", "q", batch, str(Hlc(run, 0, "n")))


def main(address: str, topic: str, run: int, first: int, last: int) -> None:
    """Write the batches ``[first, last]`` as the run ``run``, and print the number of each."""
    target = KafkaTopic(KafkaConnection([address]), topic, max_bytes=90_000)
    for batch in range(first, last + 1):
        while True:
            try:
                write_batch(batch_of(target, batch, run), [rows(batch * ROWS, ROWS)])
                break
            except UnavailableError as error:  # as a run does
                print(error.line(), file=sys.stderr, flush=True)
        print(batch, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
