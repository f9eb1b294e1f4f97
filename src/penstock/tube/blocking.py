"""Producer and consumer for scripts: the same names without ``await``.

    with Producer("127.0.0.1:8715") as producer:
        producer.send("line3", b"42")
    with Consumer("127.0.0.1:8715", "lake", ["line3"]) as consumer:
        for message in consumer:
            ...

Each has a thread with an event loop, in which the asyncio client of the same name works; the arguments are its own. An
object may be used by several threads, but only one may read from a consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from penstock.errors import LocalProtocolError
from penstock.runtime.loop_thread import LoopThread
from penstock.tube import consumer, producer
from penstock.tube.addresses import Address
from penstock.tube.codec.strings import Partition
from penstock.tube.consumer import Message, Position
from penstock.tube.producer import SendResult
from penstock.tube.record import Record

__all__ = ["Consumer", "Producer"]


class Producer:
    """:class:`penstock.tube.producer.Producer` for scripts; made with the same arguments."""

    def __init__(self, masters: str | Sequence[Address], **options: Any) -> None:
        self._arguments = (masters, options)
        self._thread: LoopThread | None = None
        self._producer: producer.Producer | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """As :meth:`penstock.tube.producer.Producer.start`."""
        masters, options = self._arguments
        client = producer.Producer(masters, **options)
        thread = LoopThread("tube-producer")
        try:
            thread.run(client.start())
        except BaseException:
            thread.close()
            raise
        self._thread, self._producer = thread, client

    def publish(self, *topics: str) -> None:
        """As :meth:`penstock.tube.producer.Producer.publish`."""
        thread, client = self._running()
        thread.run(client.publish(*topics))

    def unpublish(self, *topics: str) -> None:
        """As :meth:`penstock.tube.producer.Producer.unpublish`."""
        thread, client = self._running()
        thread.run(client.unpublish(*topics))

    def send(
        self, topic: str, record: Record | bytes, partition: int | Partition | None = None, key: bytes | None = None
    ) -> SendResult:
        """As :meth:`penstock.tube.producer.Producer.send`: one record, acknowledged when this returns."""
        thread, client = self._running()
        return thread.run(client.send(topic, record, partition, key))

    def queue(
        self, topic: str, record: Record | bytes, partition: int | Partition | None = None, key: bytes | None = None
    ) -> Future[SendResult]:
        """Send without waiting for the acknowledgement, which the future has; bounded only by who waits for those."""
        thread, client = self._running()
        return thread.submit(client.send(topic, record, partition, key))

    def send_all(
        self,
        topic: str,
        records: Iterable[Record | bytes],
        partition: int | Partition | None = None,
        key: bytes | None = None,
    ) -> list[SendResult]:
        """As :meth:`penstock.tube.producer.Producer.send_all`: many records, much faster than one by one.

        ``records`` is read in the producer's thread.
        """
        thread, client = self._running()
        return thread.run(client.send_all(topic, records, partition, key))

    def flush(self) -> None:
        """Return when everything sent so far has an outcome."""
        thread, client = self._running()
        thread.run(client.flush())

    def close(self) -> None:
        """As :meth:`penstock.tube.producer.Producer.close`; does nothing when it is closed."""
        if self._thread is not None and self._producer is not None:
            thread, client, self._thread, self._producer = self._thread, self._producer, None, None
            try:
                thread.run(client.close())
            finally:
                thread.close()

    def _running(self) -> tuple[LoopThread, producer.Producer]:
        if self._thread is None or self._producer is None:
            raise LocalProtocolError("tube: the producer is not running: use it between start() and close()")
        return self._thread, self._producer


class Consumer:
    """:class:`penstock.tube.consumer.Consumer` for scripts; made with the same arguments."""

    def __init__(self, masters: str | Sequence[Address], group: str, topics: Iterable[str], **options: Any) -> None:
        self._arguments = (masters, group, list(topics), options)
        self._thread: LoopThread | None = None
        self._consumer: consumer.Consumer | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None and self._consumer is not None:
            thread, client, self._thread, self._consumer = self._thread, self._consumer, None, None
            try:
                thread.run(client.__aexit__(kind, error, trace))
            finally:
                thread.close()

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        message = self.poll(None)
        if message is None:
            raise StopIteration
        return message

    def start(self) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.start`."""
        masters, group, topics, options = self._arguments
        client = consumer.Consumer(masters, group, topics, **options)
        thread = LoopThread("tube-consumer")
        try:
            thread.run(client.start())
        except BaseException:
            thread.close()
            raise
        self._thread, self._consumer = thread, client

    def poll(self, timeout_s: float | None) -> Message | None:
        """The next message; None: there was none for ``timeout_s``, or the consumer is closed.

        Raises:
            PenstockError: what the asyncio consumer's iterator raises.
        """
        thread, client = self._running()
        while (message := client.take()) is None:
            try:
                if not thread.run(_within(client, timeout_s)):
                    return None
            except TimeoutError:
                return None
        return message

    def confirm(self) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.confirm`."""
        thread, client = self._running()
        thread.run(client.confirm())

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.seek`."""
        thread, client = self._running()
        thread.run(client.seek(offsets))

    def seek_to_time(self, time_ms: int) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.seek_to_time`."""
        thread, client = self._running()
        thread.run(client.seek_to_time(time_ms))

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that this member holds now."""
        return self._running()[1].assignment

    @property
    def positions(self) -> dict[Partition, Position]:
        """How far each partition was read."""
        return self._running()[1].positions

    def close(self) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.close`; does nothing when it is closed."""
        self.__exit__(None, None, None)

    def _running(self) -> tuple[LoopThread, consumer.Consumer]:
        if self._thread is None or self._consumer is None:
            raise LocalProtocolError("tube: the consumer is not running: use it between start() and close()")
        return self._thread, self._consumer


async def _within(client: consumer.Consumer, timeout_s: float | None) -> bool:
    async with asyncio.timeout(timeout_s):
        return await client.fetch()
