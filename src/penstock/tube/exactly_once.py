"""Exactly-once writes: tasks stage the rows of a batch at the brokers, then the driver commits the batch once.

    batch = BatchId("orders", run, 17)
    async with Producer(masters) as producer, Stager(producer, batch, task=3) as stager:   # in each task
        if await stager.stages("line3"):
            stager.add("line3", record)
            ...
        staged = await stager.finish()
    committed = await commit(producer, batch, [staged, ...])                               # in the driver

The rows of a batch are not readable before its commit. Only penstock's brokers stage rows; `Stager.stages` checks this.

:func:`commit` first resolves in-doubt transactions of an earlier run of the query. A batch on several brokers is
prepared at all of them, then published (two-phase commit). A transaction is committed once every participant has
prepared it: if its driver then fails, the next run of the query finds it prepared everywhere and publishes it. If a
participant has not prepared it, nothing was published, and a newer run aborts it. A newer run first begins at every
participant, which prevents the older run from preparing further transactions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.tube.client.arguments import empty_record, too_large
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.producer import Producer
from penstock.tube.record import Record

__all__ = [
    "BatchId",
    "CommitResult",
    "InDoubtTransaction",
    "ParticipantState",
    "Staged",
    "Stager",
    "TransactionClient",
    "abort",
    "commit",
    "in_doubt",
    "resolve",
    "should_commit",
    "transaction_id",
]

# --- outcome of a transaction, from the states of its participants ---


class ParticipantState(NamedTuple):
    """State of a query at one broker. ``committed`` is -1 and ``transaction`` empty if there is none."""

    committed: int = -1
    transaction: str = ""
    batch: int = -1
    publishing: bool = False
    participants: tuple[str, ...] = ()


class InDoubtTransaction(NamedTuple):
    """A transaction prepared at the brokers ``holders``. ``participants``: all its brokers; empty: one broker."""

    transaction: str
    batch: int
    participants: tuple[str, ...]
    holders: tuple[int, ...]


def in_doubt(states: Mapping[int, ParticipantState]) -> list[InDoubtTransaction]:
    """Return every prepared transaction in ``states``, oldest batch first."""
    found: dict[str, InDoubtTransaction] = {}
    for broker, state in states.items():
        if state.transaction:
            before = found.get(state.transaction)
            holders = (broker,) if before is None else (*before.holders, broker)
            found[state.transaction] = InDoubtTransaction(state.transaction, state.batch, state.participants, holders)
    return sorted(found.values(), key=lambda item: item.batch)


def should_commit(
    item: InDoubtTransaction, participants: Iterable[int], states: Mapping[int, ParticipantState]
) -> bool:
    """Return True if ``item`` must be committed, False if aborted, from the states of all participants."""
    everywhere = True
    for broker in participants:
        state = states[broker]
        if state.committed >= item.batch:
            return True
        if state.transaction != item.transaction:
            everywhere = False
        elif state.publishing:
            return True
    return everywhere


def transaction_id(run: str, batch: int, winners: Iterable[tuple[int, str, int]]) -> str:
    """Return the id of a transaction, derived from the run, the batch and the committed attempts."""
    text = f"{run}\n{batch}\n" + "\n".join(f"{task} {attempt} {rows}" for task, attempt, rows in sorted(winners))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --- staging ---


REQUEST_ROWS = 4_000
REQUEST_BYTES = 1 << 20
"""Size at which a request of one attempt to one broker is sent."""
CROWDED_BYTES = 8 << 20
"""Bytes in flight to a broker at which `Stager.room` waits."""
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_RETRIED = frozenset({ErrCode.SERVICE_UNAVAILABLE, ErrCode.SERVER_RECEIVE_OVERFLOW, ErrCode.CERTIFICATE_FAILURE})


@dataclass(frozen=True, slots=True)
class BatchId:
    """Identifies a batch of a query, and the run of the query that writes it.

    ``epoch`` orders runs: the highest is the newest. With 0, a run that is unknown to the brokers is the newest.
    ``once``: the query has only this batch.
    """

    query: str
    run: str
    number: int
    epoch: int = 0
    once: bool = False

    def ask(self, step: pb.Transaction.Step) -> pb.Transaction:
        """Build a request that concerns this batch."""
        return pb.Transaction(
            step=step, query=self.query, run=self.run, batch=self.number, epoch=self.epoch, once=self.once
        )


@dataclass(frozen=True, slots=True)
class Staged:
    """Result of one task attempt.

    ``rows`` has the number of staged rows by broker id, ``brokers`` the addresses of all brokers that stage rows, as
    ``id:host:port``. ``decided``: the batch was already committed, so nothing was staged.
    """

    task: int
    attempt: str
    rows: Mapping[int, int]
    brokers: Mapping[int, str]
    decided: bool = False


class TransactionClient:
    """Sends the transaction requests of one batch to brokers; retries for ``timeout_s`` seconds."""

    def __init__(self, producer: Producer, batch: BatchId, timeout_s: float) -> None:
        self.producer = producer
        self.batch = batch
        self._timeout_s = timeout_s

    async def ask(self, broker: BrokerInfo, asked: pb.Transaction) -> pb.SendMessageResponseB2P | None:
        """Send ``asked`` and return the successful response; None if the broker does not support transactions.

        Raises:
            RefusedError: the broker refused; with `code` 403 and a newer run, this run is fenced.
            UnavailableError: no response in time.
        """
        deadline = time.monotonic() + self._timeout_s
        backoff = Backoff(_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        while True:
            left = deadline - time.monotonic()
            pause_s = backoff.failed()
            try:
                answer = await self._attempt(broker, asked, left)
            except RefusedError:
                return None  # Apache's broker, which fails on a send without a message
            except UnavailableError as error:
                if left <= pause_s:
                    raise UnavailableError(
                        f"tube: broker {broker.address} did not answer query {asked.query!r}, batch {asked.batch}, "
                        f"within {self._timeout_s:g} s",
                        why=error.what,
                        hint="check that the broker runs and is reachable, then run the batch again",
                    ) from error
            else:
                if not answer.HasField("transaction") and answer.errCode != ErrCode.CERTIFICATE_FAILURE:
                    return None
                if answer.success:
                    return answer
                again = answer.errCode in _RETRIED and answer.transaction.refusal != pb.TransactionResult.FULL
                if not again or left <= pause_s:
                    raise _refused(broker, asked, answer)
                if answer.errCode == ErrCode.CERTIFICATE_FAILURE:
                    await self.producer.sign_again()  # the token expired: a heartbeat requests the next one
            await asyncio.sleep(pause_s)

    async def _attempt(self, broker: BrokerInfo, asked: pb.Transaction, left: float) -> pb.SendMessageResponseB2P:
        # The broker's address may have changed.
        broker = self.producer.brokers.get(broker.id, broker)
        connection = await self.producer.connections.connect((broker.host, broker.port), user=self)
        request = self.producer.stamped(asked)
        try:
            payload = await connection.exchange(
                ServiceType.BROKER_WRITE,
                MethodId.SEND_MESSAGE,
                request.SerializeToString(),
                timeout_s=max(min(left, self.producer.request_timeout_s), 0.1),
            )
        except UnavailableError:
            connection.abort()  # the next attempt uses another connection
            raise
        return decode(pb.SendMessageResponseB2P, payload)

    async def close(self) -> None:
        """Release the connections."""
        await self.producer.connections.leave(self)


@dataclass(slots=True)
class _Request:
    """Rows of one request; ``first`` is the number of rows that the attempt staged at this broker before them."""

    first: int
    parts: dict[tuple[str, int], pb.StagedRows] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0


class _BrokerQueue:
    """Requests to one broker, one at a time, so that its rows stay in order."""

    __slots__ = ("broker", "bytes", "filling", "requests", "rows", "task")

    def __init__(self, broker: BrokerInfo) -> None:
        self.broker = broker
        self.requests: deque[_Request] = deque()
        self.filling = _Request(0)
        self.rows = 0
        self.bytes = 0
        self.task: asyncio.Task[None] | None = None


class Stager:
    """Stages the rows of one attempt of ``task`` (its number) in ``batch``; each attempt has a unique name."""

    def __init__(self, producer: Producer, batch: BatchId, *, task: int, timeout_s: float = 60.0) -> None:
        self.decided = False
        """True if a broker reported that the batch is committed: then its rows may be omitted."""
        self._client = TransactionClient(producer, batch, timeout_s)
        self._producer = producer
        self._batch = batch
        self._task = task
        self._attempt = uuid.uuid4().hex
        self._topics: dict[str, bool] = {}
        self._brokers: dict[int, BrokerInfo] = {}
        self._unable: set[int] = set()
        self._queues: dict[int, _BrokerQueue] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # also if this is cancelled
            await self._client.close()

    async def stages(self, topic: str) -> bool:
        """Return True if all brokers of ``topic`` stage rows; the batch's run becomes the current run at these brokers.

        Raises:
            RefusedError: the topic is unknown, or a newer run exists. UnavailableError: a broker does not respond.
        """
        known = self._topics.get(topic)
        if known is None:
            brokers = {target.broker.id: target.broker for target in await self._producer.partitions(topic)}
            new = [broker for broker in brokers.values() if broker.id not in self._brokers]
            for broker, able in zip(new, await asyncio.gather(*map(self._begin, new)), strict=True):
                self._brokers[broker.id] = broker
                if not able:
                    self._unable.add(broker.id)
            known = self._topics[topic] = not self._unable & brokers.keys()
        return known

    async def _begin(self, broker: BrokerInfo) -> bool:
        answer = await self._client.ask(broker, self._batch.ask(pb.Transaction.BEGIN))
        if answer is not None:
            self._take(answer.transaction)
        return answer is not None

    def _take(self, result: pb.TransactionResult) -> None:
        committed = result.committed if result.HasField("committed") else -1
        if result.publishing:  # the commit is final and cannot be aborted
            committed = max(committed, result.transactionBatch)
        self.decided = self.decided or committed >= self._batch.number

    def add(self, topic: str, record: Record, partition: int | None = None) -> None:
        """Stage ``record`` in ``partition``, by its key, or round-robin. `stages` must be true for ``topic``.

        Raises:
            RefusedError: the topic has no such partition. LocalProtocolError: the record is empty or too large.
        """
        target = self._producer.choose(topic, record.key, partition)
        data, flag, msg_type = record.encode()
        if not data:
            raise empty_record()
        most = self._producer.max_bytes(topic)
        if len(record.value) > most:
            raise too_large(topic, len(record.value), most)
        queue = self._queues.get(target.broker.id)
        if queue is None:
            queue = self._queues[target.broker.id] = _BrokerQueue(target.broker)
        self._fill(queue, target, data, flag, msg_type or "")

    def _fill(self, queue: _BrokerQueue, target: Partition, data: bytes, flag: int, msg_type: str) -> None:
        filling = queue.filling
        # A row above the limit is sent in a separate request: it may be as large as the topic allows.
        if filling.rows and (filling.rows >= REQUEST_ROWS or filling.bytes + len(data) > REQUEST_BYTES):
            self._send(queue)
            filling = queue.filling
        part = filling.parts.get((target.topic, target.id))
        if part is None:
            part = pb.StagedRows(topicName=target.topic, partitionId=target.id)
            filling.parts[target.topic, target.id] = part
        batch = part.batch
        batch.datas.append(data)
        batch.flags.append(flag)
        batch.msgTypes.append(msg_type)
        filling.rows += 1
        filling.bytes += len(data)
        queue.rows += 1
        queue.bytes += len(data)

    def _send(self, queue: _BrokerQueue) -> None:
        if queue.filling.rows:
            queue.requests.append(queue.filling)
            queue.filling = _Request(queue.rows)
        self._start(queue)

    def _start(self, queue: _BrokerQueue) -> None:
        if queue.task is None and queue.requests:
            queue.task = asyncio.create_task(self._deliver(queue), name=f"tube-staging-{queue.broker.id}")

    async def _deliver(self, queue: _BrokerQueue) -> None:
        while queue.requests:
            request = queue.requests.popleft()
            asked = self._batch.ask(pb.Transaction.STAGE)
            asked.attempt.task, asked.attempt.attempt, asked.attempt.rows = self._task, self._attempt, request.first
            asked.rows.extend(request.parts.values())
            answer = await self._client.ask(queue.broker, asked)
            queue.bytes -= request.bytes
            if answer is None:
                raise UnavailableError(
                    f"tube: broker {queue.broker.address} no longer stages rows",
                    why="another server is listening at its address",
                    hint="check the server at this address, then run the batch again",
                )
            self._take(answer.transaction)

    async def room(self) -> None:
        """Return when there is room for more rows; call it regularly between calls of `add`.

        Raises:
            RefusedError, UnavailableError: earlier rows cannot be staged.
        """
        for queue in self._queues.values():
            # A finished task is awaited as well, which raises the error of the rows that it sent.
            if queue.task is not None and (queue.task.done() or queue.bytes >= CROWDED_BYTES):
                await queue.task
                queue.task = None
                self._start(queue)

    async def finish(self) -> Staged:
        """Return when all rows are staged durably; the result is for :func:`commit`.

        Raises:
            RefusedError, UnavailableError: rows cannot be staged: run the task again.
        """
        for queue in self._queues.values():
            self._send(queue)
        for queue in self._queues.values():
            while queue.task is not None:
                await queue.task
                queue.task = None
                self._start(queue)
        able = {number: broker.address for number, broker in self._brokers.items() if number not in self._unable}
        rows = {} if self.decided else {number: queue.rows for number, queue in self._queues.items() if queue.rows}
        return Staged(self._task, self._attempt, rows, able, self.decided)


def _refused(broker: BrokerInfo, asked: pb.Transaction, answer: pb.SendMessageResponseB2P) -> RefusedError:
    about = f"query {asked.query!r}, batch {asked.batch}"
    why, hint = answer.errMsg, None
    match answer.transaction.refusal:
        case pb.TransactionResult.FENCED:
            what = f"tube: {about}: run {asked.run!r} was replaced by run {answer.transaction.run!r}"
            hint = "stop this run; if both must write, use different query names"
        case pb.TransactionResult.FULL:
            what = f"tube: {about}: broker {broker.address} accepts no more staged rows"
            hint = "write smaller batches, or raise tube.staging.max_bytes of the broker; uncommitted rows are deleted "
            hint += "after tube.staging.keep, or by penstock tube staged delete"
        case pb.TransactionResult.NOT_STAGED:
            what = f"tube: {about}: broker {broker.address} does not have these rows staged"
            hint = "run the batch again"
        case _:
            what = f"tube: {about}: broker {broker.address} refused"
            if answer.errCode == ErrCode.CERTIFICATE_FAILURE:
                hint = "set the user and the password"
    return RefusedError(what, code=answer.errCode, text=answer.errMsg, peer=broker.address, why=why, hint=hint)


# --- commit ---


class CommitResult(NamedTuple):
    """Result of a commit: number of published ``rows``; ``before``: an earlier attempt already committed the batch."""

    rows: int
    before: bool


async def commit(
    producer: Producer, batch: BatchId, staged: Sequence[Staged], *, timeout_s: float = 60.0
) -> CommitResult:
    """Publish the rows of the successful task attempts. A repeated call has no further effect.

    Raises:
        RefusedError: a newer run exists, or rows are no longer staged: nothing was published.
        UnavailableError: a broker does not respond; the next run of the batch determines whether it is committed.
    """
    brokers = {number: address for item in staged for number, address in item.brokers.items()}
    driver = _TwoPhaseCommit(producer, batch, timeout_s)
    try:
        await driver.begin(brokers.values())
        await driver.decide()
        if driver.committed >= batch.number:
            await driver.drop(staged)
            return CommitResult(0, before=True)
        await driver.commit(staged)
        return CommitResult(sum(sum(item.rows.values()) for item in staged), before=False)
    finally:
        await driver.close()


async def abort(producer: Producer, batch: BatchId, staged: Sequence[Staged], *, timeout_s: float = 10.0) -> None:
    """Delete the staged rows of a batch that will not be committed. A decided transaction is not changed.

    Brokers that do not respond delete them later (``tube.staging.keep``).
    """
    brokers = {number: address for item in staged for number, address in item.brokers.items()}
    driver = _TwoPhaseCommit(producer, batch, timeout_s)
    try:
        for address in brokers.values():
            with contextlib.suppress(PenstockError):
                await driver.ask(BrokerInfo.parse(address), batch.ask(pb.Transaction.ABORT))
    finally:
        await driver.close()


async def resolve(producer: Producer, batch: BatchId, brokers: Iterable[BrokerInfo], *, timeout_s: float = 60.0) -> int:
    """Commit or abort the in-doubt transactions of a failed run of the query, like its next run.

    Returns the last committed batch, -1 for none. The run of ``batch`` becomes the current run of the query.

    Raises:
        RefusedError, UnavailableError: as :func:`commit`.
    """
    driver = _TwoPhaseCommit(producer, batch, timeout_s)
    try:
        await driver.begin(broker.address for broker in brokers)
        await driver.decide()
        return driver.committed
    finally:
        await driver.close()


class _TwoPhaseCommit:
    """Coordinator of one commit. ``states`` has the last reported state of each broker."""

    def __init__(self, producer: Producer, batch: BatchId, timeout_s: float) -> None:
        self.states: dict[int, ParticipantState] = {}
        self._batch = batch
        self._client = TransactionClient(producer, batch, timeout_s)
        self._brokers: dict[int, BrokerInfo] = {}

    async def close(self) -> None:
        await self._client.close()

    @property
    def committed(self) -> int:
        """Number of the last batch that any broker has committed."""
        return max((state.committed for state in self.states.values()), default=-1)

    async def ask(self, broker: BrokerInfo, asked: pb.Transaction) -> None:
        """Send ``asked`` and store the state that the broker reports."""
        answer = await self._client.ask(broker, asked)
        if answer is None:
            raise UnavailableError(
                f"tube: broker {broker.address} does not know query {asked.query!r}",
                why="another server is listening at its address",
                hint="check the server at this address, then run the batch again",
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
        """Make this run the current run at these brokers, and at the participants of their transactions."""
        # A participant of an older transaction may have no rows of this batch, but its state is needed to resolve it.
        new = {broker.id: broker for broker in map(BrokerInfo.parse, addresses) if broker.id not in self.states}
        while new:
            await _all(self._begin(broker) for broker in new.values())
            named = [BrokerInfo.parse(text) for state in self.states.values() for text in state.participants]
            new = {broker.id: broker for broker in named if broker.id not in self.states}

    async def _begin(self, broker: BrokerInfo) -> None:
        try:
            await self.ask(broker, self._batch.ask(pb.Transaction.BEGIN))
        except UnavailableError as error:
            # Resolving without this broker could lose rows that it has published, or publish rows twice.
            left = [state for state in self.states.values() if broker.address in state.participants]
            if not left:
                raise
            query = self._batch.query
            raise UnavailableError(
                f"tube: batch {left[0].batch} of query {query!r} waits for its participant, broker {broker.address}",
                why=error.why or error.what,
                hint=f"restart the broker; if it is lost: penstock tube staged delete {query} --force",
            ) from error

    async def decide(self) -> None:
        """Commit or abort the transactions that earlier runs prepared."""
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
        """Publish the staged rows; with several brokers, prepare the transaction at all of them first."""
        ordered = sorted(staged, key=lambda item: item.task)
        name = transaction_id(
            self._batch.run,
            self._batch.number,
            [(item.task, item.attempt, sum(item.rows.values())) for item in ordered],
        )
        participants = [broker.address for broker in self._brokers.values()]
        # One broker publishes its batch atomically; PREPARE would only add a round trip.
        several = len(participants) > 1
        if several:
            try:
                await _all(self._prepare(broker, name, ordered, participants) for broker in self.states)
            except RefusedError:
                # Nothing is published before all brokers have prepared, so the prepared ones can abort now.
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
        """Delete rows that a repeated attempt staged for a batch that was already committed."""
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
    """Wait for all calls, even if one fails; then raise the first failure, preferably a RefusedError."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for failure in sorted(failures, key=lambda failure: not isinstance(failure, RefusedError)):
        raise failure
