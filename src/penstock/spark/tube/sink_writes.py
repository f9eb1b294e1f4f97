"""Writes of the ``tubemq`` sink: transactions of staged batches, plain sends, and the check of a topic before a job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from penstock.errors import PenstockError, RefusedError
from penstock.spark.tube.options import DeliveryGuarantee, SinkOptions
from penstock.statestore.hlc import Hlc
from penstock.tube import exactly_once
from penstock.tube.exactly_once import BatchId, Staged, Stager
from penstock.tube.producer import Producer, SendResult
from penstock.tube.record import Record

__all__ = ["BATCH", "QUERY", "TOPIC_S", "batch_of", "check_topic", "finish", "write"]

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties of a task: the query's id, the number of its micro-batch."""
_RUN = "spark.jobGroup.id"
_COUNTER_BITS = 20

Row = tuple[str, int | None, Record, str]
"""Topic, partition (None: by key), record, and an id for a record that has none of its own."""


def batch_of(options: SinkOptions, properties: Callable[[str], str | None], job: str, *, streaming: bool) -> BatchId:
    """Return the id of the batch that a task writes: from ``properties`` of the task, or from ``job`` without them."""
    epoch = _epoch(options.token)
    run = job if options.token is None else str(options.token)[-128:]
    if streaming:
        query, number = properties(QUERY), properties(BATCH)
        if query is not None and number is not None:
            return BatchId(query, properties(_RUN) or run, int(number), epoch)
    if options.transaction is not None:
        return BatchId(options.transaction.app_id, run, options.transaction.version, epoch)
    return BatchId(job, job, 0, once=True)


def _epoch(token: Hlc | None) -> int:
    """Return the epoch of a fencing token: a number with the same order as the tokens."""
    return 0 if token is None else token.wall_ms << _COUNTER_BITS | min(token.counter, (1 << _COUNTER_BITS) - 1)


async def write(options: SinkOptions, batch: BatchId, task: int, rows: Iterator[Sequence[Row]]) -> tuple[int, Staged]:
    """Stage the rows of one task attempt, or send rows of topics that cannot be staged.

    Returns the number of rows and the staged rows. ``rows`` is iterated in parts, one of which is in memory at a time.

    Raises:
        UnavailableError: the brokers are unavailable; the task must run again.
        RefusedError: a broker refused the rows.
    """
    written = 0
    async with (
        Producer(options.masters, delivery_timeout_s=options.timeout_s, **options.login.client()) as producer,
        Stager(producer, batch, task=task, timeout_s=options.timeout_s) as stager,
    ):
        stages: dict[str, bool] = {}
        if options.topic is not None:
            # Also without rows: an empty batch is committed, too.
            stages[options.topic] = await _stages(options, stager, options.topic)
        for piece in rows:
            sent: list[asyncio.Future[SendResult]] = []
            for topic, partition, record, identity in piece:
                if topic not in stages:
                    stages[topic] = await _stages(options, stager, topic)
                if stages[topic]:
                    if not stager.decided:
                        stager.add(topic, record, partition)
                    continue
                if record.id is None:
                    record.id = identity
                sent.append(await producer.queue(topic, record, partition))
            written += len(piece)
            await stager.room()
            for future in sent:
                await future
        return written, await stager.finish()


async def _stages(options: SinkOptions, stager: Stager, topic: str) -> bool:
    if options.delivery is DeliveryGuarantee.AT_LEAST_ONCE:
        return False
    able = await stager.stages(topic)
    if not able and options.delivery is DeliveryGuarantee.EXACTLY_ONCE:
        raise RefusedError(
            f"tube: topic {topic!r} cannot be written with deliveryGuarantee exactly-once",
            code=400,
            why="a broker of the topic does not support staged rows: it is Apache's, or an older penstock",
            hint="use penstock's brokers, or remove the option and drop duplicates by the record's id when reading",
        )
    return able


async def finish(options: SinkOptions, batch: BatchId, staged: Sequence[Staged], *, commit: bool) -> None:
    """Commit or abort the staged rows of the successful task attempts.

    Raises:
        RefusedError, UnavailableError: as :func:`.exactly_once.commit`; an abort raises nothing.
    """
    if not any(item.brokers for item in staged):
        return
    async with contextlib.AsyncExitStack() as stack:
        producer = Producer(options.masters, **options.login.client())
        if commit:
            await stack.enter_async_context(producer)
            await exactly_once.commit(producer, batch, staged, timeout_s=options.timeout_s)
            return
        # The user must see the error of the write, not an error of the abort.
        with contextlib.suppress(PenstockError):
            await stack.enter_async_context(producer)
            await exactly_once.abort(producer, batch, staged)


TOPIC_S = 10.0
"""Maximum time in seconds until the masters announce an existing topic."""


def check_topic(options: SinkOptions, timeout_s: float) -> None:
    """Check that the login is accepted and that the topic in ``options``, if set, can be written.

    Raises:
        UnavailableError: no master responds.
        RefusedError: the login was refused, the topic does not exist, or it had no broker within ``timeout_s``.
        ConfigError: a file of the login is invalid.
    """
    asyncio.run(_check_topic(options, timeout_s))


async def _check_topic(options: SinkOptions, timeout_s: float) -> None:
    async with Producer(options.masters, topic_timeout_s=timeout_s, **options.login.client()) as producer:
        if options.topic is not None:
            await producer.publish(options.topic)
