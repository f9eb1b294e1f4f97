"""Publication of staged rows as messages of the log: every row of a decision, each once, some per loop turn.

A decision is carried out only when its note is durable. A crash therefore leaves either nothing published or a note of
what to publish. The decision's number is stored with the messages in the log (like that of an idempotent producer), so
that a publication that is repeated after a crash skips the messages that are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.errors import StorageError
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker.produce_handler import ProduceHandler
from penstock.tube.engine.broker.producer_sequences import TopicPartition
from penstock.tube.engine.broker.topics import Topic, Topics
from penstock.tube.engine.transactions.staging import Query, Staging

__all__ = ["Publication", "Publishing"]

TURN_ROWS: Final = 20_000
TURN_BYTES: Final = 4 << 20
"""Limit of one loop turn; other work is done between turns."""
UNKNOWN_MS: Final = 60_000
"""Time for which rows wait for an unknown topic: after a start the broker may not know it yet."""


class Publication:
    """A decision that is being carried out. ``waiters``: connection and serial of requests that wait for its end."""

    __slots__ = ("held_since", "parts", "query", "seen", "waiters")

    def __init__(self, query: Query) -> None:
        self.query = query
        self.parts: Iterator[pb.StagedRows] | None = None
        self.seen: dict[TopicPartition, int] = {}
        self.held_since = 0
        self.waiters: list[tuple[object, int]] = []


class Publishing:
    """Carries out decisions, one after the other. ``lost``: messages about rows that could not be published."""

    def __init__(self, staging: Staging, produce: ProduceHandler, topics: Topics) -> None:
        self.published = 0
        self.batches = 0
        self.lost: list[str] = []
        self._staging = staging
        self._produce = produce
        self._topics = topics
        self._queue: list[Publication] = []
        self._again: tuple[Publication, pb.StagedRows] | None = None
        self.held = False
        """Whether the next rows are of an unknown topic: nothing can be published now."""

    @property
    def waiting(self) -> bool:
        """Whether there is something to publish now."""
        return bool(self._queue) and not self.held

    def begin(self, publication: Publication) -> None:
        """Publish a decision whose note is durable."""
        self._queue.append(publication)

    def publish(self, now_ms: int) -> list[Publication]:
        """Append the rows of one loop turn; returns the publications that ended."""
        ended = []
        rows = size = 0
        self.held = False
        while self._queue and rows < TURN_ROWS and size < TURN_BYTES:
            publication = self._queue[0]
            part = self._next(publication)
            if part is None:
                self._end(publication, now_ms)
                ended.append(self._queue.pop(0))
                continue
            topic = self._topic(part)
            if topic is None and self._hold(publication, part, now_ms):
                break
            if topic is not None and self._full(topic, part.partitionId):
                self._again = (publication, part)
                break
            count = len(part.batch.datas)
            self._publish(publication, topic, part, now_ms)
            rows += count
            size += sum(map(len, part.batch.datas))
        return ended

    def _publish(self, publication: Publication, topic: Topic | None, part: pb.StagedRows, now_ms: int) -> None:
        decision = publication.query.decision
        assert decision is not None
        place = (part.topicName, part.partitionId)
        first = publication.seen.get(place, 0)
        count = len(part.batch.datas)
        publication.seen[place] = first + count
        if topic is None:
            self.lost.append(
                f"query {publication.query.name}, batch {decision.batch}: {count} rows for partition "
                f"{part.partitionId} of topic {part.topicName}, which does not exist any more"
            )
            return
        self.published += self._produce.append_staged(
            topic, part.partitionId, part.batch, decision.number, first, now_ms
        )

    def _next(self, publication: Publication) -> pb.StagedRows | None:
        again, self._again = self._again, None
        if again is not None:
            return again[1]
        if publication.parts is None:
            publication.parts = self._parts(publication.query)
        return next(publication.parts, None)

    def _parts(self, query: Query) -> Iterator[pb.StagedRows]:
        assert query.decision is not None
        for name, rows in query.decision.winners:
            attempt = query.attempts.get(name)
            if attempt is None:
                continue  # reported when the directory was opened
            left = rows
            try:
                for body, count in attempt.file.read():
                    yield from pb.Transaction.FromString(body).rows
                    left -= count
            except StorageError as error:
                self.lost.append(f"query {query.name}, batch {query.decision.batch}: {left} rows: {error.what}")

    def _topic(self, part: pb.StagedRows) -> Topic | None:
        topic = self._topics.by_name.get(part.topicName)
        return topic if topic is not None and topic.has(part.partitionId) else None

    def _hold(self, publication: Publication, part: pb.StagedRows, now_ms: int) -> bool:
        publication.held_since = publication.held_since or now_ms
        if now_ms - publication.held_since >= UNKNOWN_MS:
            return False
        self._again = (publication, part)
        self.held = True
        return True

    def _full(self, topic: Topic, partition_id: int) -> bool:
        return self._topics.store(topic, partition_id).unwritten_bytes > self._produce.max_unwritten_bytes

    def _end(self, publication: Publication, now_ms: int) -> None:
        decision = publication.query.decision
        assert decision is not None
        for place in publication.seen:
            # The numbers stay in the log until its segment is deleted; the broker needs them no more once the end is
            # noted.
            self._produce.producers.forget(place, decision.number)
        self._staging.finish(publication.query, now_ms)
        self.batches += 1
