"""Blocking producer and consumer: the methods of the asyncio clients, for programs without an event loop.

    with Producer("127.0.0.1:8715") as producer:
        producer.send("line3", b"42")
    with Consumer("127.0.0.1:8715", "lake", ["line3"]) as consumer:
        for message in consumer:
            ...

Each runs the asyncio client of the same name in a thread of its own, with the same arguments. An object may be used by
several threads, but only one may read from a consumer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypedDict, TypeVar, Unpack

from penstock.errors import LocalProtocolError
from penstock.runtime.io.loop import LoopThread, blocking
from penstock.tube import consumer, producer
from penstock.tube.client.arguments import Address
from penstock.tube.codec.strings import Partition
from penstock.tube.consumer import BoundConsumption, ConsumerOffset, Message
from penstock.tube.producer import SendResult
from penstock.tube.record import Record

__all__ = ["Consumer", "ConsumerOptions", "Producer", "ProducerOptions"]


class ProducerOptions(TypedDict, total=False):
    """The options of :class:`penstock.tube.producer.Producer`."""

    client_id: str | None
    idempotent: bool
    reorder: bool
    ordered: bool
    max_in_flight: int
    max_in_flight_bytes: int
    batch_messages: int
    batch_bytes: int
    request_timeout_s: float
    delivery_timeout_s: float
    topic_timeout_s: float
    await_topic: bool
    heartbeat_s: float
    retry_s: float
    idle_s: float
    availability_timeout_s: float
    username: str | None
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
    bound: BoundConsumption | None
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
    username: str | None
    password: str | None
    tls: ssl.SSLContext | None


C = TypeVar("C", producer.Producer, consumer.Consumer)


class _BlockingClient(Generic[C]):
    """An asyncio client in a thread of its own: created by ``make`` in :meth:`start`, until :meth:`close`."""

    def __init__(self, name: str, make: Callable[[], C]) -> None:
        make()  # invalid arguments raise here
        self._name = name
        self._make: Callable[[], C] = make
        self._running: tuple[LoopThread, C] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            thread, client = self._running
            self._running = None
            try:
                thread.run(client.__aexit__(kind, error, trace))
            finally:
                thread.close()

    def start(self) -> None:
        """Register at the master; raises the errors of the asyncio client's ``start``."""
        if self._running is not None:
            raise LocalProtocolError(f"tube: the {self._name} is running already")
        client = self._make()
        thread = LoopThread(f"tube-{self._name}")
        try:
            thread.run(client.start())
        except BaseException:
            thread.close()
            raise
        self._running = thread, client

    def close(self) -> None:
        """Close like the asyncio client's ``close``; does nothing if it is closed."""
        self.__exit__(None, None, None)

    def _opened(self) -> tuple[LoopThread, C]:
        if self._running is None:
            raise LocalProtocolError(f"tube: the {self._name} is not running: use it between start() and close()")
        return self._running


class Producer(_BlockingClient[producer.Producer]):
    """Blocking :class:`penstock.tube.producer.Producer`, with the same arguments."""

    def __init__(self, masters: str | Sequence[Address], **options: Unpack[ProducerOptions]) -> None:
        super().__init__("producer", partial(producer.Producer, masters, **options))

    partitions = blocking(producer.Producer.partitions)
    publish = blocking(producer.Producer.publish)
    unpublish = blocking(producer.Producer.unpublish)
    send = blocking(producer.Producer.send)
    send_all = blocking(producer.Producer.send_all)  # the records are read in the producer's thread
    flush = blocking(producer.Producer.flush)

    def queue(
        self,
        topic: str,
        record: Record | bytes | str,
        partition: int | Partition | None = None,
        key: bytes | str | None = None,
    ) -> Future[SendResult]:
        """Send without waiting; the future has the acknowledgement. The caller limits the number of pending records."""
        thread, client = self._opened()
        return thread.submit(client.send(topic, record, partition, key))


class Consumer(_BlockingClient[consumer.Consumer]):
    """Blocking :class:`penstock.tube.consumer.Consumer`, with the same arguments; an iterator of messages."""

    def __init__(
        self, masters: str | Sequence[Address], group: str, topics: Iterable[str], **options: Unpack[ConsumerOptions]
    ) -> None:
        names = topics if isinstance(topics, str) else list(topics)  # the client rejects a single string
        super().__init__("consumer", partial(consumer.Consumer, masters, group, names, **options))

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        message = self.poll(None)
        if message is None:
            raise StopIteration
        return message

    def poll(self, timeout_s: float | None) -> Message | None:
        """Return the next message; None after ``timeout_s`` without a message, or if the consumer is closed.

        Raises:
            LocalProtocolError: no message for ``timeout_s``, and a partition waits for :meth:`confirm`. PenstockError:
            an error of the asyncio consumer's iterator.
        """
        thread, client = self._opened()
        while (message := client.next_message()) is None:
            try:
                if not thread.run(_fetch_within(client, timeout_s)):
                    return None
            except TimeoutError:
                if client.blocked and timeout_s is not None:
                    raise client.unconfirmed(timeout_s) from None
                return None
        return message

    confirm = blocking(consumer.Consumer.confirm)
    seek = blocking(consumer.Consumer.seek)
    seek_to_time = blocking(consumer.Consumer.seek_to_time)
    seek_to_start = blocking(consumer.Consumer.seek_to_start)
    seek_to_end = blocking(consumer.Consumer.seek_to_end)
    available = blocking(consumer.Consumer.available)
    assign = blocking(consumer.Consumer.assign)

    @property
    def blocked(self) -> frozenset[Partition]:
        """See :attr:`penstock.tube.consumer.Consumer.blocked`."""
        return self._opened()[1].blocked

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that this member currently holds."""
        return self._opened()[1].assignment

    @property
    def offsets(self) -> dict[Partition, ConsumerOffset]:
        """The next offset of each partition, and the end of its log at the last fetch."""
        return self._opened()[1].offsets


async def _fetch_within(client: consumer.Consumer, timeout_s: float | None) -> bool:
    async with asyncio.timeout(timeout_s):
        return await client.fetch()
