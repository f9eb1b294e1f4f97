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
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Self, TypedDict, Unpack

from penstock.errors import LocalProtocolError
from penstock.runtime.io.loop import LoopThread
from penstock.tube import consumer, producer
from penstock.tube.addresses import Address
from penstock.tube.codec.strings import Partition
from penstock.tube.consumer import Bound, Message, Position
from penstock.tube.producer import SendResult
from penstock.tube.record import Record

__all__ = ["Consumer", "ConsumerOptions", "Producer", "ProducerOptions"]


class ProducerOptions(TypedDict, total=False):
    """The options of :class:`penstock.tube.producer.Producer`."""

    client_id: str | None
    idempotent: bool
    reorder: bool
    max_in_flight: int
    max_in_flight_bytes: int
    batch_messages: int
    batch_bytes: int
    request_timeout_s: float
    delivery_timeout_s: float
    topic_timeout_s: float
    heartbeat_s: float
    retry_s: float
    idle_s: float
    availability_timeout_s: float
    user: str | None
    password: str | None
    tls: ssl.SSLContext | None


class ConsumerOptions(TypedDict, total=False):
    """The options of :class:`penstock.tube.consumer.Consumer`."""

    filters: Mapping[str, Iterable[str]] | Iterable[str]
    start: str
    start_offsets: Mapping[str, int] | Callable[[Partition], int | None] | None
    balance: str
    source_count: int
    node_id: int
    bound: Bound | None
    auto_confirm: bool
    confirm_timeout_s: float
    with_offsets: bool
    client_id: str | None
    heartbeat_s: float
    session_timeout_s: float | None
    request_timeout_s: float
    most_wait_ms: int
    long_poll_ms: int
    query_priority: int
    user: str | None
    password: str | None
    tls: ssl.SSLContext | None


class Producer:
    """:class:`penstock.tube.producer.Producer` for scripts; made with the same arguments."""

    def __init__(self, masters: str | Sequence[Address], **options: Unpack[ProducerOptions]) -> None:
        self._make = partial(producer.Producer, masters, **options)
        self._make()  # says now what is wrong with the arguments
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
        client = self._make()
        thread = LoopThread("tube-producer")
        try:
            thread.run(client.start())
        except BaseException:
            thread.close()
            raise
        self._thread, self._producer = thread, client

    def partitions(self, topic: str) -> list[Partition]:
        """As :meth:`penstock.tube.producer.Producer.partitions`."""
        thread, client = self._running()
        return thread.run(client.partitions(topic))

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

    def __init__(
        self, masters: str | Sequence[Address], group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]
    ) -> None:
        names = topics if isinstance(topics, str) else list(topics)  # the client refuses one text
        self._make = partial(consumer.Consumer, masters, group, names, **options)
        self._make()  # says now what is wrong with the arguments
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
        client = self._make()
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
            LocalProtocolError: there was none for ``timeout_s``, and a partition waits for :meth:`confirm`.
            PenstockError: what the asyncio consumer's iterator raises.
        """
        thread, client = self._running()
        while (message := client.take()) is None:
            try:
                if not thread.run(_within(client, timeout_s)):
                    return None
            except TimeoutError:
                if client.blocked and timeout_s is not None:
                    raise client.unconfirmed(timeout_s) from None
                return None
        return message

    def confirm(self, *, wait: bool = True) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.confirm`."""
        thread, client = self._running()
        thread.run(client.confirm(wait=wait))

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.seek`."""
        thread, client = self._running()
        thread.run(client.seek(offsets))

    def seek_to_time(self, time_ms: int) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.seek_to_time`."""
        thread, client = self._running()
        thread.run(client.seek_to_time(time_ms))

    def seek_to_start(self) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.seek_to_start`."""
        thread, client = self._running()
        thread.run(client.seek_to_start())

    def seek_to_end(self) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.seek_to_end`."""
        thread, client = self._running()
        thread.run(client.seek_to_end())

    def available(self) -> dict[Partition, bool]:
        """As :meth:`penstock.tube.consumer.Consumer.available`."""
        thread, client = self._running()
        return thread.run(client.available())

    def assign(self, partitions: Iterable[str] | None) -> None:
        """As :meth:`penstock.tube.consumer.Consumer.assign`."""
        thread, client = self._running()
        thread.run(client.assign(partitions))

    @property
    def blocked(self) -> frozenset[Partition]:
        """As :attr:`penstock.tube.consumer.Consumer.blocked`."""
        return self._running()[1].blocked

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
