"""The way to one partition: messages leave in order, and a failed one is sent again only where that is harmless.

    queue.push(message)
    queue.ready() -> a request's number and messages     # to send now; None: not now
    queue.succeeded(number) | refused(number) | failed(number)
    queue.again() -> messages to send again, messages given up

A request holds one message, or many where the broker takes batches. Without ``producer_id`` a failed message goes again
only while nothing later is in the log. With one, messages are numbered and the broker stores each number once and in
order, so everything can go again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from penstock.tube.codec.strings import Partition

__all__ = ["PartitionQueue", "Sendable"]


class Sendable(Protocol):
    """A message in a queue. ``sequence`` is set by the queue: -1 until the message is first sent."""

    data: bytes
    sequence: int

    @property
    def abandoned(self) -> bool:
        """Nobody waits for it any more."""
        ...


T = TypeVar("T", bound=Sendable)


class PartitionQueue(Generic[T]):
    """Messages of one partition. ``batch`` (messages, bytes) and ``requests`` in flight may be changed at any time.

    ``new_producer_id`` gives ids > 0 at random for numbered messages; None: they are not numbered. ``reorder``: a
    failed message goes again even behind later ones.
    """

    def __init__(
        self,
        target: Partition,
        *,
        requests: int,
        batch: tuple[int, int] = (1, 0),
        reorder: bool = False,
        new_producer_id: Callable[[], int] | None = None,
    ) -> None:
        self.target = target
        self.requests = requests
        self.batch = batch
        self.held = False
        self.scheduled = False  # the shell's: will be looked at in this loop turn
        self.producer_id = 0
        self.abandoned: list[T] = []
        """Messages that were left out because nobody waits for them; the shell takes them away."""
        self._reorder = reorder
        self._new_producer_id = new_producer_id
        self._renumber = new_producer_id is not None
        self._next_sequence = 0
        self._waiting: deque[T] = deque()
        self._flight: dict[int, list[T]] = {}  # in the order of sending
        self._failed: list[tuple[int, list[T]]] = []
        self._sent = 0
        self._overtaken = -1  # number of the latest request that succeeded

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._flight.values())) + sum(len(batch) for _, batch in self._failed)

    @property
    def empty(self) -> bool:
        """Whether no message is without an outcome."""
        return not (self._waiting or self._flight or self._failed)

    def knows(self, number: int) -> bool:
        """Whether the request of that number has no outcome yet."""
        return number in self._flight

    @property
    def oldest_sequence(self) -> int:
        """The lowest number without an answer."""
        for batch in self._flight.values():
            return batch[0].sequence
        return self._next_sequence

    def push(self, message: T) -> None:
        """Send ``message`` behind all that came before."""
        self._waiting.append(message)

    def ready(self) -> tuple[int, list[T]] | None:
        """The messages of the next request, with the number under which to tell its outcome; None: not now."""
        if self.held or self._failed or not self._waiting or len(self._flight) >= self.requests:
            return None
        if self._renumber and not self._renumbered():
            return None
        waiting = self._waiting
        most, most_bytes = self.batch
        size = 0
        messages: list[T] = []
        while waiting and len(messages) < most:
            message = waiting[0]
            size += len(message.data)
            if messages and size > most_bytes:
                break
            waiting.popleft()
            if message.sequence < 0:
                if message.abandoned:
                    self.abandoned.append(message)
                    size -= len(message.data)
                    continue
                if self.producer_id:
                    message.sequence = self._next_sequence
                    self._next_sequence += 1
            messages.append(message)
        if not messages:
            return None
        self._sent += 1
        self._flight[self._sent] = messages
        return self._sent, messages

    def succeeded(self, number: int) -> list[T]:
        """The messages are in the log. Empty: not known any more."""
        messages = self._flight.pop(number, None)
        if messages is None:
            return []
        self._overtaken = max(self._overtaken, number)
        return messages

    def refused(self, number: int) -> list[T]:
        """The messages can never be stored: they are given up and nothing waits for them."""
        messages = self._flight.pop(number, None) or []
        if self.producer_id and messages:
            self._renumber = True  # their numbers are missing now: what follows gets new ones
        return messages

    def failed(self, number: int) -> list[T]:
        """The messages may be tried again."""
        messages = self._flight.pop(number, None)
        if messages is None:
            return []
        self._failed.append((number, messages))
        return messages

    def again(self) -> tuple[list[T], list[T]] | None:
        """Once nothing is in flight after a failure: messages to send again, which now wait first, and those given up.

        Given up are those that a later one has overtaken: stored now they would stand behind it. None while in flight,
        or when nothing failed.
        """
        if not self._failed or self._flight:
            return None
        retry: list[T] = []
        given_up: list[T] = []
        for number, messages in sorted(self._failed, key=lambda item: item[0]):
            keep = number > self._overtaken or self._reorder or self.producer_id
            (retry if keep else given_up).extend(messages)
        self._failed = []
        self._waiting.extendleft(reversed(retry))
        return retry, given_up

    def take(self, leaves: Callable[[T], bool]) -> list[T]:
        """Remove waiting messages for which ``leaves`` is true. Numbered ones stay: they may be stored already."""
        taken: list[T] = []
        kept: deque[T] = deque()
        for message in self._waiting:
            (taken if message.sequence < 0 and leaves(message) else kept).append(message)
        if taken:
            self._waiting = kept
        return taken

    def numbered(self) -> list[T]:
        """Waiting messages that were sent with a number before."""
        return [message for message in self._waiting if message.sequence >= 0]

    def messages(self) -> list[T]:
        """All messages without an outcome."""
        sent = [*self._flight.values(), *(batch for _, batch in self._failed)]
        return [*(message for batch in sent for message in batch), *self._waiting]

    def _renumbered(self) -> bool:
        """Begin a new row of numbers, once nothing of the old one is in flight."""
        assert self._new_producer_id is not None
        if self._flight:
            return False
        self.producer_id = self._new_producer_id()
        self._next_sequence = 0
        for message in self._waiting:
            message.sequence = -1
        self._renumber = False
        return True
