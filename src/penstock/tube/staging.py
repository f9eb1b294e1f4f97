"""Staging rows of a task attempt at the brokers, so that the commit of their batch publishes them once.

    batch = BatchId("orders", run, 17)
    async with Producer(masters) as producer, Stager(producer, batch, task=3) as stager:
        if await stager.stages("line3"):
            stager.add("line3", record)
            ...
        staged = await stager.finish()          # for the driver: penstock.tube.client.transaction_commit

Nothing that is staged is seen by a reader before that. Only penstock's brokers stage; `Stager.stages` asks them.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from penstock.errors import LocalProtocolError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.producer import Producer
from penstock.tube.record import Record

__all__ = ["Asker", "BatchId", "Staged", "Stager"]

REQUEST_ROWS = 4_000
REQUEST_BYTES = 1 << 20
"""A request of one attempt to one broker is sent at this size."""
CROWDED_BYTES = 8 << 20
"""Adding waits while this many bytes are in flight to a broker."""
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_RETRIED = frozenset({ErrCode.SERVICE_UNAVAILABLE, ErrCode.SERVER_RECEIVE_OVERFLOW, ErrCode.CERTIFICATE_FAILURE})


@dataclass(frozen=True, slots=True)
class BatchId:
    """Identifies a batch of a query, and the run of the query that writes it.

    ``epoch``: orders runs, the highest is the newest; 0: a run that the brokers have not seen before is newer than the
    query's. ``once``: the query has this one batch only.
    """

    query: str
    run: str
    number: int
    epoch: int = 0
    once: bool = False

    def ask(self, step: pb.Transaction.Step) -> pb.Transaction:
        """A request about this batch."""
        return pb.Transaction(
            step=step, query=self.query, run=self.run, batch=self.number, epoch=self.epoch, once=self.once
        )


@dataclass(frozen=True, slots=True)
class Staged:
    """The result of one attempt: staged ``rows`` by broker id; all ``brokers`` that may take part, as ``id:host:port``.

    ``decided``: the batch had been committed before, so nothing was staged.
    """

    task: int
    attempt: str
    rows: Mapping[int, int]
    brokers: Mapping[int, str]
    decided: bool = False


class Asker:
    """Sends the transaction requests of one batch to brokers; retries until ``timeout_s`` is over."""

    def __init__(self, producer: Producer, batch: BatchId, timeout_s: float) -> None:
        self.producer = producer
        self.batch = batch
        self._timeout_s = timeout_s

    async def ask(self, broker: BrokerInfo, asked: pb.Transaction) -> pb.SendMessageResponseB2P | None:
        """The broker's answer, a success; None: it does not know transactions.

        Raises:
            RefusedError: it refuses; `code` 403 with a newer run named: this one is fenced.
            UnavailableError: no answer in time.
        """
        deadline = time.monotonic() + self._timeout_s
        backoff = Backoff(_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        while True:
            left = deadline - time.monotonic()
            pause_s = backoff.failed()
            try:
                answer = await self._once(broker, asked, left)
            except RefusedError:
                return None  # an exception: one of the reference's that cannot make anything of an empty message
            except UnavailableError as error:
                if left <= pause_s:
                    raise UnavailableError(
                        f"tube: broker {broker.address} did not answer query {asked.query!r}, batch {asked.batch}, "
                        f"within {self._timeout_s:g} s",
                        why=error.what,
                        do="look whether the broker runs and is reached, then run it again",
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
                    await self.producer.sign_again()
            await asyncio.sleep(pause_s)

    async def _once(self, broker: BrokerInfo, asked: pb.Transaction, left: float) -> pb.SendMessageResponseB2P:
        # The address may have changed since it was noted.
        broker = self.producer.brokers.get(broker.id, broker)
        connection = await self.producer.connections.connect((broker.host, broker.port), user=self)
        request = self.producer.stamped(asked)
        try:
            payload = await connection.exchange(
                Service.BROKER_WRITE,
                MethodId.SEND_MESSAGE,
                request.SerializeToString(),
                timeout_s=max(min(left, self.producer.request_timeout_s), 0.1),
            )
        except UnavailableError:
            connection.abort()  # what is silent on one connection is asked on another
            raise
        return decode(pb.SendMessageResponseB2P, payload)

    async def close(self) -> None:
        """Release the connections."""
        await self.producer.connections.leave(self)


@dataclass(slots=True)
class _Request:
    """Rows of one request; ``first``: how many the attempt has at this broker before them."""

    first: int
    parts: dict[tuple[str, int], pb.StagedRows] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0


class _BrokerQueue:
    """Requests to one broker: one at a time, so that its rows stay in order."""

    __slots__ = ("broker", "bytes", "filling", "requests", "rows", "task")

    def __init__(self, broker: BrokerInfo) -> None:
        self.broker = broker
        self.requests: deque[_Request] = deque()
        self.filling = _Request(0)
        self.rows = 0
        self.bytes = 0
        self.task: asyncio.Task[None] | None = None


class Stager:
    """See the module. ``task``: number of the task; the name of the attempt is made here and is never used again."""

    def __init__(self, producer: Producer, batch: BatchId, *, task: int, timeout_s: float = 60.0) -> None:
        self.decided = False
        """Whether a broker said that the batch is committed: then its rows may be left out."""
        self._asker = Asker(producer, batch, timeout_s)
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
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._asker.close()

    async def stages(self, topic: str) -> bool:
        """Whether all brokers of ``topic`` stage; asked once a topic. Makes the batch's run the query's run there.

        Raises:
            RefusedError: the topic is unknown, or a newer run has taken over. UnavailableError: a broker is silent.
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
        answer = await self._asker.ask(broker, self._batch.ask(pb.Transaction.BEGIN))
        if answer is not None:
            self._take(answer.transaction)
        return answer is not None

    def _take(self, result: pb.TransactionResult) -> None:
        committed = result.committed if result.HasField("committed") else -1
        if result.publishing:
            committed = max(committed, result.transactionBatch)
        self.decided = self.decided or committed >= self._batch.number

    def add(self, topic: str, record: Record, partition: int | None = None) -> None:
        """Stage ``record`` in the partition named, that of its key, or the next in turn, of a topic that `stages`.

        Raises:
            RefusedError: the topic has no such partition. LocalProtocolError: the record is empty or too large.
        """
        target = self._producer.choose(topic, record.key, partition)
        data, flag, msg_type = record.encode()
        if not data:
            raise LocalProtocolError("tube: a message without body and attributes cannot be stored")
        most = self._producer.max_bytes(topic)
        if len(record.value) > most:
            raise LocalProtocolError(
                f"tube: a body of {len(record.value)} bytes is too large for topic {topic!r}",
                why=f"its limit is {most} bytes",
                do="send less, or raise the topic's largest message",
            )
        queue = self._queues.get(target.broker.id)
        if queue is None:
            queue = self._queues[target.broker.id] = _BrokerQueue(target.broker)
        self._fill(queue, target, data, flag, msg_type or "")

    def _fill(self, queue: _BrokerQueue, target: Partition, data: bytes, flag: int, msg_type: str) -> None:
        filling = queue.filling
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
            answer = await self._asker.ask(queue.broker, asked)
            queue.bytes -= request.bytes
            if answer is None:
                raise UnavailableError(
                    f"tube: broker {queue.broker.address} does not stage any more",
                    why="another server answers there than before",
                    do="look what runs there",
                )
            self._take(answer.transaction)

    async def room(self) -> None:
        """Return when there is room for more; call it now and then between `add`.

        Raises:
            RefusedError, UnavailableError: what was added before cannot be staged.
        """
        for queue in self._queues.values():
            if queue.task is not None and (queue.task.done() or queue.bytes >= CROWDED_BYTES):
                await queue.task
                queue.task = None
                self._start(queue)

    async def finish(self) -> Staged:
        """Return when all is staged durably; what the commit of the batch needs to know.

        Raises:
            RefusedError, UnavailableError: it cannot be staged: let the task run again.
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
    why, do = answer.errMsg, None
    match answer.transaction.refusal:
        case pb.TransactionResult.FENCED:
            what = f"tube: {about}: run {asked.run!r} was replaced by run {answer.transaction.run!r}"
            do = "let the newer run continue, and end this one; if both shall write, give each a query of its own"
        case pb.TransactionResult.FULL:
            what = f"tube: {about}: broker {broker.address} takes no more staged rows"
            do = "write smaller batches, or raise tube.staging.max_bytes of the broker; what nobody commits goes after "
            do += "tube.staging.keep, or by penstock tube staged delete"
        case pb.TransactionResult.NOT_STAGED:
            what = f"tube: {about}: broker {broker.address} does not have these rows staged"
            do = "run the batch again"
        case _:
            what = f"tube: {about}: broker {broker.address} refused"
            if answer.errCode == ErrCode.CERTIFICATE_FAILURE:
                do = "give the user and the password"
    return RefusedError(what, code=answer.errCode, text=answer.errMsg, peer=broker.address, why=why, do=do)
