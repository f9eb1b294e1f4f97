"""Sequence numbers of idempotent producers, so that a message that is sent again is not stored again.

A producer numbers its messages per partition, from 0 and without gaps. The broker stores the last number of each
producer. The log contains the numbers too, so that they are restored from it after a crash (`storage.notes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["ProducerSequences", "TopicPartition"]

TopicPartition = tuple[str, int]
"""Topic and partition id."""

FORGOTTEN_MS = 7 * 24 * 3_600_000


class _ProducerState:
    __slots__ = ("last", "time_ms")

    def __init__(self, last: int, time_ms: int) -> None:
        self.last = last
        self.time_ms = time_ms


class ProducerSequences:
    """The last sequence of up to ``most`` producers in partitions; the producers idle for longest are removed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: dict[TopicPartition, dict[int, _ProducerState]] = {}
        self._count = 0
        self.changed: set[tuple[str, int]] = set()
        """Topic and store number of entries that differ from the snapshot on disk; the shell clears it."""

    def __len__(self) -> int:
        return self._count

    def expected(self, partition: TopicPartition, producer: int, oldest: int) -> int:
        """Return the next sequence of ``producer``: the last stored one plus one, ``oldest`` if the producer is
        unknown."""
        states = self._states.get(partition)
        state = states.get(producer) if states else None
        return max(oldest, 0) if state is None else state.last + 1

    def stored(self, partition: TopicPartition, producer: int, last: int, now_ms: int) -> None:
        """Set the highest stored sequence of ``producer`` to ``last``, unless a higher one is stored."""
        states = self._states.setdefault(partition, {})
        state = states.get(producer)
        if state is None:
            if self._count >= self._most:
                self._drop_oldest()
                states = self._states.setdefault(partition, {})
            states[producer] = _ProducerState(last, now_ms)
            self._count += 1
        else:
            state.last = max(state.last, last)
            state.time_ms = max(state.time_ms, now_ms)
        self.changed.add((partition[0], partition[1] // 10000))

    def snapshot(self, topic: str, store: int) -> list[tuple[int, int, int, int]]:
        """Return (partition id, producer, last sequence, time) of every producer in a store."""
        return [
            (partition[1], producer, state.last, state.time_ms)
            for partition, states in self._states.items()
            if partition[0] == topic and partition[1] // 10000 == store
            for producer, state in states.items()
        ]

    def restore(self, topic: str, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Restore entries of `snapshot`, or of messages in the log."""
        for partition, producer, last, time_ms in rows:
            self.stored((topic, partition), producer, last, time_ms)

    def forget(self, partition: TopicPartition, producer: int) -> None:
        """Remove ``producer``, which sends no more messages to the partition."""
        states = self._states.get(partition)
        if states is not None and states.pop(producer, None) is not None:
            self._count -= 1
            self.changed.add((partition[0], partition[1] // 10000))
            if not states:
                del self._states[partition]

    def forget_topic(self, topic: str) -> None:
        for partition in [partition for partition in self._states if partition[0] == topic]:
            self._count -= len(self._states.pop(partition))
        self.changed = {name for name in self.changed if name[0] != topic}

    def expire(self, now_ms: int) -> None:
        """Remove producers that have stored no message for seven days."""
        self._drop(lambda state: state.time_ms < now_ms - FORGOTTEN_MS)

    def _drop_oldest(self) -> None:
        times = sorted(state.time_ms for states in self._states.values() for state in states.values())
        limit = times[len(times) // 10]
        self._drop(lambda state: state.time_ms <= limit)

    def _drop(self, gone: Callable[[_ProducerState], bool]) -> None:
        for partition, states in list(self._states.items()):
            for producer in [producer for producer, state in states.items() if gone(state)]:
                del states[producer]
                self._count -= 1
                self.changed.add((partition[0], partition[1] // 10000))
            if not states:
                del self._states[partition]
