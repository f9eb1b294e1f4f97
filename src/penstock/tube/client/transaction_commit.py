"""Commits a batch that its tasks staged: all of it is published, once, or nothing.

Transactions that an earlier run left in doubt are decided first. A batch that spans several brokers is prepared at all
of them, then published; the driver may die at any moment, and the next run of the query continues
(:mod:`penstock.tube.engine.transactions.outcome`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import BrokerInfo
from penstock.tube.engine.transactions.outcome import (
    InDoubtTransaction,
    ParticipantState,
    in_doubt,
    should_commit,
    transaction_id,
)
from penstock.tube.producer import Producer
from penstock.tube.staging import Asker, BatchId, Staged

__all__ = ["Committed", "abort", "commit", "settle"]


class Committed(NamedTuple):
    """``rows`` were published; ``before``: none now, since the batch had been committed by an earlier attempt."""

    rows: int
    before: bool


async def commit(producer: Producer, batch: BatchId, staged: Sequence[Staged], *, timeout_s: float = 60.0) -> Committed:
    """Publish what the winning attempts staged. Repeating it does no harm.

    Raises:
        RefusedError: a newer run has taken over, or rows are not staged any more: nothing was published.
        UnavailableError: a broker is silent; the batch is committed or not, and the next run of it finds out.
    """
    brokers = {number: address for item in staged for number, address in item.brokers.items()}
    driver = _Driver(producer, batch, timeout_s)
    try:
        await driver.begin(brokers.values())
        await driver.decide()
        if driver.committed >= batch.number:
            await driver.drop(staged)
            return Committed(0, before=True)
        await driver.commit(staged)
        return Committed(sum(sum(item.rows.values()) for item in staged), before=False)
    finally:
        await driver.close()


async def abort(producer: Producer, batch: BatchId, staged: Sequence[Staged], *, timeout_s: float = 10.0) -> None:
    """Let go what the run staged for the batch and nobody commits. What was decided stays: it cannot be undone.

    Brokers that do not answer let it go by themselves after a while.
    """
    brokers = {number: address for item in staged for number, address in item.brokers.items()}
    driver = _Driver(producer, batch, timeout_s)
    try:
        for address in brokers.values():
            with contextlib.suppress(PenstockError):
                await driver.ask(BrokerInfo.parse(address), batch.ask(pb.Transaction.ABORT))
    finally:
        await driver.close()


async def settle(producer: Producer, batch: BatchId, brokers: Iterable[BrokerInfo], *, timeout_s: float = 60.0) -> int:
    """Decide what a dead run of the query left undecided, as its next run would; the last batch committed, -1 none.

    The run of ``batch`` becomes the query's.

    Raises:
        RefusedError, UnavailableError: as :func:`commit`.
    """
    driver = _Driver(producer, batch, timeout_s)
    try:
        await driver.begin(broker.address for broker in brokers)
        await driver.decide()
        return driver.committed
    finally:
        await driver.close()


class _Driver:
    """One attempt to commit. ``states``: what each broker last answered."""

    def __init__(self, producer: Producer, batch: BatchId, timeout_s: float) -> None:
        self.states: dict[int, ParticipantState] = {}
        self._batch = batch
        self._asker = Asker(producer, batch, timeout_s)
        self._brokers: dict[int, BrokerInfo] = {}

    async def close(self) -> None:
        await self._asker.close()

    @property
    def committed(self) -> int:
        """The last batch that any broker has committed."""
        return max((state.committed for state in self.states.values()), default=-1)

    async def ask(self, broker: BrokerInfo, asked: pb.Transaction) -> None:
        """Ask, and note what the broker knows then."""
        answer = await self._asker.ask(broker, asked)
        if answer is None:
            raise UnavailableError(
                f"tube: broker {broker.address} does not know query {asked.query!r}",
                why="another server answers there than before",
                do="look what runs there",
            )
        known = answer.transaction
        self._brokers[broker.id] = broker
        self.states[broker.id] = ParticipantState(
            known.committed if known.HasField("committed") else -1,
            known.transactionId,
            known.transactionBatch if known.transactionId else -1,
            known.publishing,
            tuple(known.participants),
        )

    async def begin(self, addresses: Iterable[str]) -> None:
        """Make this run the query's at these brokers, and at those that their transactions name."""
        new = {broker.id: broker for broker in map(BrokerInfo.parse, addresses) if broker.id not in self.states}
        while new:
            await _all(self._begin(broker) for broker in new.values())
            named = [BrokerInfo.parse(text) for state in self.states.values() for text in state.participants]
            new = {broker.id: broker for broker in named if broker.id not in self.states}

    async def _begin(self, broker: BrokerInfo) -> None:
        try:
            await self.ask(broker, self._batch.ask(pb.Transaction.BEGIN))
        except UnavailableError as error:
            # Decided without it, what it may have published would be missing elsewhere, or be there a second time.
            left = [state for state in self.states.values() if broker.address in state.participants]
            if not left:
                raise
            query = self._batch.query
            raise UnavailableError(
                f"tube: batch {left[0].batch} of query {query!r} waits for broker {broker.address}, which holds a part",
                why=error.why or error.what,
                do=f"start that broker again; if it is gone for good: penstock tube staged delete {query} --force",
            ) from error

    async def decide(self) -> None:
        """Commit or let go what earlier runs prepared."""
        for item in in_doubt(self.states):
            participants = [BrokerInfo.parse(text).id for text in item.participants] or list(item.holders)
            step = pb.Transaction.COMMIT if should_commit(item, participants, self.states) else pb.Transaction.ABORT
            await _all(self._decide(broker, item, step) for broker in item.holders)

    async def _decide(self, broker: int, item: InDoubtTransaction, step: pb.Transaction.Step) -> None:
        asked = self._batch.ask(step)
        asked.batch = item.batch
        asked.transactionId = item.transaction
        asked.participants.extend(item.participants)
        await self.ask(self._brokers[broker], asked)

    async def commit(self, staged: Sequence[Staged]) -> None:
        """Prepare at all brokers if there are several, then publish."""
        ordered = sorted(staged, key=lambda item: item.task)
        name = transaction_id(
            self._batch.run,
            self._batch.number,
            [(item.task, item.attempt, sum(item.rows.values())) for item in ordered],
        )
        participants = [broker.address for broker in self._brokers.values()]
        several = len(participants) > 1
        if several:
            try:
                await _all(self._prepare(broker, name, ordered, participants) for broker in self.states)
            except RefusedError:
                for broker in self.states:
                    with contextlib.suppress(PenstockError):
                        item = InDoubtTransaction(name, self._batch.number, tuple(participants), ())
                        await self._decide(broker, item, pb.Transaction.ABORT)
                raise
        await _all(self._publish(broker, name, ordered, participants if several else []) for broker in self.states)

    async def _prepare(self, broker: int, name: str, staged: Sequence[Staged], participants: Sequence[str]) -> None:
        asked = self._batch.ask(pb.Transaction.PREPARE)
        asked.transactionId = name
        asked.participants.extend(participants)
        asked.winners.extend(_winners(staged, broker))
        await self.ask(self._brokers[broker], asked)

    async def _publish(self, broker: int, name: str, staged: Sequence[Staged], participants: Sequence[str]) -> None:
        asked = self._batch.ask(pb.Transaction.COMMIT)
        asked.transactionId = name
        asked.participants.extend(participants)
        if not participants:
            asked.winners.extend(_winners(staged, broker))
        await self.ask(self._brokers[broker], asked)

    async def drop(self, staged: Sequence[Staged]) -> None:
        """The batch was committed by others: what was staged for it again is needed no more."""
        for item in staged:
            for number in item.rows:
                asked = self._batch.ask(pb.Transaction.ABORT)
                asked.winners.add(task=item.task, attempt=item.attempt)
                with contextlib.suppress(PenstockError):
                    await self.ask(self._brokers[number], asked)


def _winners(staged: Sequence[Staged], broker: int) -> list[pb.StagedAttempt]:
    return [
        pb.StagedAttempt(task=item.task, attempt=item.attempt, rows=item.rows[broker])
        for item in staged
        if item.rows.get(broker)
    ]


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait for all calls, also when one fails; then raise the first failure, a refusal before others."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for failure in sorted(failures, key=lambda failure: not isinstance(failure, RefusedError)):
        raise failure
