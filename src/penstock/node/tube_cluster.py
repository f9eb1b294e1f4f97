"""A TubeMQ cluster as the target of a rule: a producer that finds the brokers through the masters.

Messages wait in order until the producer accepts them, which is bounded by its messages in flight. A turn of the event
loop passes a portion to the producer and handles a portion of its results, so a backlog that is sent after an outage
does not delay clients. A message that the producer returns is sent again, with the same id and
before all later ones; the producer returns later messages of the same partition with it. So a key's records are in the
order of the publishers in each partition, except that an earlier attempt may have stored copies of some.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.node.config.tube_cluster import TubeClusterSection
from penstock.node.rules import PORTION, Done, return_result
from penstock.runtime.backoff import Backoff
from penstock.tube.codec.codes import ErrCode
from penstock.tube.producer import Producer, SendResult
from penstock.tube.record import Record

__all__ = ["TubeClusterTarget"]

_log = logging.getLogger("penstock.rules")

DELIVERY_S: Final = 5.0
"""Maximum seconds of a message in the producer; after that the rule chooses its partition again."""
_HEARTBEAT_S: Final = 1.0
"""Interval in which the producer learns of lost and returned brokers."""
_IN_FLIGHT: Final = 512
_BATCH: Final = 64
"""Maximum number of messages in the producer, and in a request."""
_RETRY_S, _RETRY_MOST_S = 0.2, 2.0


class _Message(NamedTuple):
    """A message without a result. ``number``: unique, in the order of arrival. ``sent``: the producer had it."""

    number: int
    record: Record
    done: Done
    sent: bool = False


class TubeClusterTarget:
    """The topic ``section.topic`` as a target of rules; call :meth:`start` and the rest in the event loop.

    ``partition`` None: selected by the key, as producers do.

    Raises:
        ConfigError: a file cannot be used.
    """

    name = "TubeMQ"

    def __init__(self, section: TubeClusterSection, *, partition: int | None = None) -> None:
        self._section = section
        self._partition = partition
        login = section.login()
        self._producer = Producer(
            ",".join(section.masters), ordered=True, max_in_flight=_IN_FLIGHT, batch_messages=_BATCH,
            request_timeout_s=DELIVERY_S, delivery_timeout_s=DELIVERY_S, topic_timeout_s=DELIVERY_S,
            heartbeat_s=_HEARTBEAT_S, username=login.user, password=login.password, tls=login.tls,
        )  # fmt: skip
        self._queue: list[_Message] = []
        """Messages that are not in the producer: a heap in the order of arrival."""
        self._arrived = asyncio.Event()
        self._numbers = 0
        self._pending = 0
        """Messages without a result."""
        self._backoff = Backoff(_RETRY_S, _RETRY_MOST_S)
        self._paused = False
        """True if the producer has returned messages: the next ones are sent after a pause."""
        self._results: deque[tuple[_Message, asyncio.Future[SendResult]]] = deque()
        self._returned = 0
        """Messages that the producer has returned. If it has failed more, they are about to be handled."""
        self._error: PenstockError | None = None
        """The last error since the last stored message."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Register at the master and send messages, in the background."""
        self._task = asyncio.create_task(self._run(), name=f"rule to topic {self._section.topic}")

    async def close(self) -> None:
        """Wait some seconds for the results of messages, return them, and close. Messages without a result may have
        been stored."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._producer.close()
        await asyncio.sleep(0)  # the last results are added by callbacks
        self._deliver(len(self._results))
        while self._queue:  # also with messages that the rule sent again meanwhile
            message = heappop(self._queue)
            self._ended(message, self._waits("the node is shutting down", applied=None if message.sent else False))

    def prepare(self, record: Record) -> Record:
        """Return the record; the producer encodes it [RuleTarget]."""
        return record

    def append(self, prepared: Any, done: Done) -> None:
        """Send the message; ``done`` gets the result or a PenstockError later [RuleTarget]."""
        self._pending += 1
        self._numbers += 1
        self._push(_Message(self._numbers, prepared, done))

    def retries(self, error: PenstockError) -> bool:
        """Return True if the message may be stored later, as when the topic is created or the user gets a right
        [RuleTarget]."""
        if isinstance(error, RefusedError):
            return error.code != ErrCode.BAD_REQUEST
        return isinstance(error, UnavailableError)

    def warning(self) -> PenstockError | None:
        """Return the reason why messages wait; None if none do."""
        return self._error if self._pending else None

    async def _run(self) -> None:
        while True:
            try:
                await self._producer.start()
                break
            except PenstockError as error:
                self._failed(error)
                await asyncio.sleep(self._backoff.failed())
        self._backoff.reset()
        topic = self._section.topic
        sent = 0
        while True:
            self._arrived.clear()
            while self._queue:
                if self._paused:
                    await asyncio.sleep(self._backoff.failed())
                    self._paused = False
                await self._producer.wait_for_room(topic)
                try:
                    # Last, and known when it returns: a message that waits in the producer for partitions would not
                    # return with earlier ones.
                    await self._producer.partitions(topic)
                except PenstockError as error:
                    self._ended(heappop(self._queue), error)
                    continue
                if self._producer.failed != self._returned:
                    await asyncio.sleep(0)
                elif not self._paused:
                    await self._send_oldest()
                    sent += 1
                    if sent % PORTION == 0:
                        await asyncio.sleep(0)
            await self._arrived.wait()

    async def _send_oldest(self) -> None:
        """Pass the oldest message to the producer, which has room."""
        message = heappop(self._queue)
        try:
            future = await self._producer.queue(self._section.topic, message.record, self._partition)
        except PenstockError as error:
            self._ended(message, error)
        else:
            future.add_done_callback(lambda stored: self._add(message._replace(sent=True), stored))

    def _add(self, message: _Message, stored: asyncio.Future[SendResult]) -> None:
        if not self._results:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._results.append((message, stored))

    def _deliver(self, most: int = PORTION) -> None:
        """Handle a portion of the results."""
        for _ in range(min(len(self._results), most)):
            message, stored = self._results[0]
            error = stored.exception()
            if error is not None:
                self._returned += 1
            self._ended(message, error or stored.result())
            self._results.popleft()
        if self._results:
            asyncio.get_running_loop().call_soon(self._deliver)

    def _push(self, message: _Message) -> None:
        heappush(self._queue, message)
        self._arrived.set()

    def _ended(self, message: _Message, result: object) -> None:
        """Return the result of a message, or let it wait if it may be stored later."""
        if not isinstance(result, PenstockError):
            self._error = None
            self._backoff.reset()
        elif self.retries(result):
            self._failed(result)
            if self._task is not None and not self._task.done():
                self._paused = True
                self._push(message)
                return
        self._pending -= 1
        return_result(message.done, result)

    def _failed(self, error: PenstockError) -> None:
        first, self._error = self._error is None, self._waits(f"{error.what}: {error.why}" if error.why else error.what)
        if first:
            _log.warning("%s", self._error.line())

    def _waits(self, why: str, *, applied: bool | None = None) -> UnavailableError:
        section = self._section
        hint = f"check the masters {', '.join(section.masters)}, their brokers, the topic and the rights of the user"
        return UnavailableError(f"tube: messages for topic {section.topic!r} wait", applied=applied, why=why, hint=hint)
