"""A TubeMQ cluster as the target of a rule: a producer that finds the brokers through the masters.

Messages wait in order until the producer accepts them, which is bounded by its requests in flight: a backlog that is
sent after an outage does not delay clients. A message whose outcome is unknown is sent again, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.node.config.tube_cluster import TubeClusterSection
from penstock.node.rules import Done
from penstock.runtime.backoff import Backoff
from penstock.tube.codec.codes import ErrCode
from penstock.tube.producer import Producer
from penstock.tube.record import Record

__all__ = ["TubeClusterTarget"]

_log = logging.getLogger("penstock.rules")

DELIVERY_S: Final = 5.0
"""Maximum seconds of a message in the producer; after that the rule chooses its partition again."""
_HEARTBEAT_S: Final = 1.0
"""Interval in which the producer learns of lost and returned brokers."""
_IN_FLIGHT: Final = 1000
_BATCH: Final = 250
"""Maximum number of messages in the producer, and of results that one response has."""
_RETRY_S, _RETRY_MOST_S = 0.2, 2.0


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
            ",".join(section.masters), reorder=True, max_in_flight=_IN_FLIGHT, batch_messages=_BATCH,
            request_timeout_s=DELIVERY_S, delivery_timeout_s=DELIVERY_S, topic_timeout_s=DELIVERY_S,
            heartbeat_s=_HEARTBEAT_S, user=login.user, password=login.password, tls=login.tls,
        )  # fmt: skip
        self._queue: deque[tuple[Record, Done]] = deque()
        """Messages that the producer has not accepted."""
        self._arrived = asyncio.Event()
        self._pending = 0
        """Messages without a result."""
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
        await asyncio.sleep(0)  # the results of the last messages are returned by callbacks
        while self._queue:  # also with messages that the rule sent again meanwhile
            _, done = self._queue.popleft()
            self._ended(done, self._waits("the node is shutting down", applied=False))

    def prepare(self, record: Record) -> Record:
        """Return the record; the producer encodes it [RuleTarget]."""
        return record

    def append(self, prepared: Any, done: Done) -> None:
        """Send the message; ``done`` gets the result or a PenstockError later [RuleTarget]."""
        self._pending += 1
        self._queue.append((prepared, done))
        self._arrived.set()

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
        backoff = Backoff(_RETRY_S, _RETRY_MOST_S)
        while True:
            try:
                await self._producer.start()
                break
            except PenstockError as error:
                self._failed(error)
                await asyncio.sleep(backoff.failed())
        while True:
            self._arrived.clear()
            while self._queue:
                await self._send_next()
            await self._arrived.wait()

    async def _send_next(self) -> None:
        """Pass the oldest message to the producer when that has room."""
        record, done = self._queue[0]
        try:
            future = await self._producer.queue(self._section.topic, record, self._partition)
        except PenstockError as error:
            self._queue.popleft()
            self._ended(done, error)
            return
        self._queue.popleft()
        future.add_done_callback(self._returns(done))

    def _returns(self, done: Done) -> Callable[[asyncio.Future[Any]], None]:
        def stored(future: asyncio.Future[Any]) -> None:
            self._ended(done, future.exception() or future.result())

        return stored

    def _ended(self, done: Done, result: object) -> None:
        self._pending -= 1
        if not isinstance(result, PenstockError):
            self._error = None
        elif self.retries(result):
            self._failed(result)
        done(result)

    def _failed(self, error: PenstockError) -> None:
        first, self._error = self._error is None, self._waits(f"{error.what}: {error.why}" if error.why else error.what)
        if first:
            _log.warning("%s", self._error.line())

    def _waits(self, why: str, *, applied: bool | None = None) -> UnavailableError:
        section = self._section
        do = f"check the masters {', '.join(section.masters)}, their brokers, the topic and the rights of the user"
        return UnavailableError(f"tube: messages for topic {section.topic!r} wait", applied=applied, why=why, do=do)
