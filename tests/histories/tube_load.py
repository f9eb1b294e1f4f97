"""Producers and a consumer group of TubeMQ on brokers that are killed and paused, for histories (``tube.py``).

One producer is idempotent: its records are stored once, in order. The other one sends a record without an answer again,
perhaps to the other broker. The members of the group store their offsets with their results, so they read each record
once.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock.tube.codec.strings import Partition
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from tests.histories.tube import Sent, TubeRecorder, check

__all__ = ["TubeLoad"]

GROUP = "group"
MEMBERS = 2
DEADLINE_S = 120
PAUSE_S = 0.02
"""Between two records of a producer."""
ROW_BYTES = 28
"""Of the index, per record: offsets are multiples of it."""


class TubeLoad:
    """Clients of the ``masters`` that send and read ``topic``, recorded to ``path`` until they are closed."""

    def __init__(self, path: Path, masters: str, topic: str) -> None:
        self.read: Counter[int] = Counter()
        """Number of records that the group has read, by broker."""
        self._history = TubeRecorder(path)
        self._masters = masters
        self._topic = topic
        self._offsets: dict[str, int] = {}
        self.acknowledged: set[Sent] = set()
        self._found: set[Sent] = set()
        self._ending = asyncio.Event()
        self._producers: list[asyncio.Task[None]] = []
        self._members: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._members = [asyncio.create_task(self._consume()) for _ in range(MEMBERS)]
        self._producers = [
            asyncio.create_task(self._produce(name, idempotent=name == "once")) for name in ("once", "repeats")
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in (*self._producers, *self._members):
            task.cancel()
        results = await asyncio.gather(*self._producers, *self._members, return_exceptions=True)
        self._history.close()
        if error is None:
            for result in results:
                if isinstance(result, Exception):
                    raise result

    async def more(self, records: int, *brokers: int) -> None:
        """Return when the group has read so many more records of each of ``brokers``."""
        wanted = {broker: self.read[broker] + records for broker in brokers}
        await self._until(lambda: all(self.read[broker] >= least for broker, least in wanted.items()))

    async def finish(self) -> str:
        """Send nothing more, wait until every acknowledged record was read, and check the history."""
        self._ending.set()
        await asyncio.gather(*self._producers)
        await self._until(lambda: self.acknowledged <= self._found)
        for task in self._members:
            task.cancel()
        await asyncio.gather(*self._members, return_exceptions=True)
        self._history.close()
        return check(self._history.path, GROUP)

    async def _until(self, holds: Callable[[], bool]) -> None:
        tasks = [*self._producers, *self._members]
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                for task in tasks:
                    if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
                        raise failure
                await asyncio.sleep(0.02)

    async def _produce(self, name: str, *, idempotent: bool) -> None:
        async with Producer(self._masters, idempotent=idempotent, heartbeat_s=0.5) as producer:
            for number in count():
                if self._ending.is_set():
                    return
                self._history.send(name, number, repeats=not idempotent)
                try:
                    value = json.dumps({"producer": name, "number": number})
                    result = await producer.send(self._topic, value.encode())
                except PenstockError:
                    continue  # it may be stored
                # An attempt without an answer may have stored the record: then its offset is not known.
                offset = result.append_offset if result.append_offset >= 0 else None
                key = _key(result.broker_id, self._topic, result.partition)
                self._history.acknowledge(name, number, key, offset)
                self.acknowledged.add((name, number))
                await asyncio.sleep(PAUSE_S)

    async def _consume(self) -> None:
        async with Consumer(
            self._masters, GROUP, [self._topic],
            start_offsets=self._offset, with_offsets=True, heartbeat_s=0.5,
        ) as consumer:  # fmt: skip
            async for messages in consumer.batches():
                for message in messages:
                    value = json.loads(message.data)
                    name, number = value["producer"], value["number"]
                    key = _key(message.broker_id, message.topic, message.partition)
                    assert message.offset is not None
                    self._history.read(GROUP, key, message.offset, name, number)
                    self._offsets[key] = message.offset + ROW_BYTES
                    self._found.add((name, number))
                    self.read[message.broker_id] += 1

    def _offset(self, partition: Partition) -> int | None:
        return self._offsets.get(partition.key)


def _key(broker: int, topic: str, partition: int) -> str:
    return f"{broker}:{topic}:{partition}"
