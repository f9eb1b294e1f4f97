"""Requests that stage rows and commit batches (the field ``transaction`` of a send, method 13), and the publication of
committed rows.

Every response, including errors, contains the broker's state of the query, so that a client recognizes a broker without
the extension, and a new run gets the in-doubt transaction of the previous run.

A commit is answered when all its rows are published and durable; until then its connection waits in `answered`. Every
row of a decision is published once, as a message of the log; each loop turn publishes a part. A decision is applied
only after its note is durable: after a crash either no row was published, or the note has the rows to publish. The
decision's number is stored with the messages in the log (like that of an idempotent producer), so that a publication
that is repeated after a crash skips the messages that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from penstock.errors import ShortageError, StorageError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import encode_response
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import java_trim
from penstock.tube.engine.broker.produce_handler import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    OVERFLOW,
    ProduceHandler,
    partition_refusal,
)
from penstock.tube.engine.broker.producer_sequences import TopicPartition
from penstock.tube.engine.broker.request_checks import LATER, OK, BrokerResponse, Refusal, RequestChecks
from penstock.tube.engine.broker.topics import Topic, Topics
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.engine.transactions.staging import Decision, Query, Staging

__all__ = ["FIRST_NUMBER", "Publication", "Publishing", "TransactionHandler"]

# --- publication ---


TURN_ROWS: Final = 20_000
TURN_BYTES: Final = 4 << 20
"""Bytes of rows that are published per loop turn, so that other work is done in between."""
UNKNOWN_MS: Final = 60_000
"""Time for which rows wait for an unknown topic: after a start the broker may not have the configuration yet."""


class Publication:
    """A decision that is being applied. ``waiters``: connection and serial of requests that wait for its end."""

    __slots__ = ("attempts", "held_since", "parts", "query", "seen", "waiters")

    def __init__(self, query: Query) -> None:
        self.query = query
        self.attempts = 0
        """Number of the attempts whose rows :attr:`parts` has returned completely."""
        self.parts: Iterator[pb.StagedRows] | None = None
        self.seen: dict[TopicPartition, int] = {}
        self.held_since = 0
        self.waiters: list[tuple[object, int]] = []


class Publishing:
    """Applies decisions, one after the other. ``lost``: messages about rows that could not be published."""

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
        """True if nothing can be published yet: the next rows have an unknown topic, or cannot be read yet."""
        self.stalled: ShortageError | None = None
        """The reason if the next rows cannot be read yet."""

    @property
    def waiting(self) -> bool:
        """True if there are rows that can be published."""
        return bool(self._queue) and not self.held

    def begin(self, publication: Publication) -> None:
        """Publish a decision whose note is durable."""
        self._queue.append(publication)

    def publish(self, now_ms: int) -> list[Publication]:
        """Append the rows of one loop turn; returns the completed publications."""
        ended = []
        rows = size = 0
        self.held = False
        self.stalled = None
        while self._queue and rows < TURN_ROWS and size < TURN_BYTES:
            publication = self._queue[0]
            try:
                part = self._next(publication)
            except ShortageError as error:
                publication.parts = None  # begins with the rows of the same attempt: it has returned none of them
                self.held, self.stalled = True, error
                break
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
            publication.parts = self._parts(publication)
        return next(publication.parts, None)

    def _parts(self, publication: Publication) -> Iterator[pb.StagedRows]:
        query = publication.query
        assert query.decision is not None
        for name, rows in query.decision.winners[publication.attempts :]:
            attempt = query.attempts.get(name)
            if attempt is not None:  # otherwise it was reported when the directory was opened
                left = rows
                try:
                    for body, count in attempt.file.read():
                        yield from pb.Transaction.FromString(body).rows
                        left -= count
                except ShortageError:
                    raise
                except StorageError as error:
                    self.lost.append(f"query {query.name}, batch {query.decision.batch}: {left} rows: {error.what}")
            publication.attempts += 1

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
            # The numbers stay in the log until its segment is deleted; after the end is stored, the broker does not
            # need them.
            self._produce.producers.forget(place, decision.number)
        self._staging.finish(publication.query, now_ms)
        self.batches += 1


# --- requests ---


FIRST_NUMBER: Final = 1 << 62
"""Minimum number of a publication; numbers of producers are smaller."""
_LONGEST_QUERY: Final = 512
_LONGEST_NAME: Final = 128
_MOST_PARTICIPANTS: Final = 1_000

_Step = pb.Transaction
_Why = pb.TransactionResult


class _ErrorResponse(NamedTuple):
    """An error response and its code."""

    why: int
    refusal: Refusal


Outcome = _ErrorResponse | bool | Publication
"""Outcome of a request: rejected; done (True: the response waits for the commit); or answered at the end of the
publication."""


class TransactionHandler:
    """Handles the requests of a broker. ``staging`` None: this broker does not stage rows."""

    def __init__(self, checks: RequestChecks, topics: Topics, produce: ProduceHandler, staging: Staging | None) -> None:
        self.staging = staging
        self.publishing: Publishing | None = None
        self.answered: list[tuple[object, int, bytes]] = []
        """Connection, serial and body of responses that are sent after the next commit; the shell clears it."""
        self._decided: list[Publication] = []
        self._open: dict[str, Publication] = {}
        self._checks = checks
        self._topics = topics
        self._produce = produce
        self._last_number = FIRST_NUMBER
        self._steps: dict[int, Callable[[Staging, pb.Transaction, Query, int], Outcome]] = {
            _Step.BEGIN: lambda *_: True,
            _Step.STAGE: self._stage,
            _Step.PREPARE: self._prepare,
            _Step.COMMIT: self._commit,
            _Step.ABORT: self._abort,
        }
        if staging is not None:
            self.publishing = Publishing(staging, produce, topics)
            for query in staging.queries.values():
                if query.decision is not None and query.decision.publishing:
                    # Started by an earlier process, so its note is durable.
                    self._last_number = max(self._last_number, query.decision.number)
                    self.publishing.begin(self._publication(query))

    # Called by the shell.

    @property
    def dirty(self) -> bool:
        """True if the next commit has notes to store or rows to publish."""
        staging, publishing = self.staging, self.publishing
        return staging is not None and (bool(staging.notes) or (publishing is not None and publishing.waiting))

    def publish(self, now_ms: int) -> None:
        """Publish the rows of one loop turn, before the commit collects the logs; responses are added to `answered`."""
        if self.staging is None or self.publishing is None:
            return
        for ended in self.publishing.publish(now_ms):
            self._open.pop(ended.query.name, None)
            body = self._result(ended.query, None)
            self.answered += [(address, serial, body) for address, serial in ended.waiters]

    def take_decided(self) -> list[Publication]:
        """Return the decisions that become durable with the next commit; afterwards they are passed to
        `Publishing.begin`."""
        decided, self._decided = self._decided, []
        return decided

    def restored(self, producer: int) -> bool:
        """Return True if a number found in the log belongs to a producer, or to a publication that has not ended."""
        return producer < FIRST_NUMBER or any(
            publication.query.decision is not None and publication.query.decision.number == producer
            for publication in self._open.values()
        )

    # Requests.

    def receive(self, request: pb.SendMessageRequestP2B, context: RequestContext) -> BrokerResponse:
        """Answer a send that has ``transaction``; `LATER` for a commit, whose response is added to `answered`."""
        now_ms = context.now_ms
        asked, auth, staging = request.transaction, request.authInfo, self.staging
        topics = {java_trim(part.topicName) for part in asked.rows}
        refusal = self._checks.refuse_writer(
            context, request.clientId, auth.visitAuthorizedToken, auth.authAuthorizedToken, topics
        )
        if refusal is None and staging is None:
            refusal = Refusal(ErrCode.BAD_REQUEST, "this broker does not stage rows")
        refusal = refusal or _refuse_names(asked)
        if refusal is not None or staging is None:
            assert refusal is not None
            return self._refused(None, _ErrorResponse(_Why.OTHER, refusal))
        found = self._query(staging, asked, now_ms)
        if isinstance(found, _ErrorResponse):
            return self._refused(staging.queries.get(asked.query), found)
        outcome = self._steps[asked.step](staging, asked, found, now_ms)
        if isinstance(outcome, _ErrorResponse):
            return self._refused(found, outcome)
        if isinstance(outcome, Publication):
            outcome.waiters.append((context.connection, context.serial))
            return LATER
        return BrokerResponse(self._result(found, asked), wait=outcome)

    def _query(self, staging: Staging, asked: pb.Transaction, now_ms: int) -> Query | _ErrorResponse:
        """Return the query if the request is from its current run; only BEGIN changes the run."""
        if asked.step == _Step.BEGIN:
            query = staging.enter(asked.query, asked.run, asked.epoch, now_ms, once=asked.once)
        else:
            query = staging.queries.get(asked.query)
            if query is None:
                text = f"query {asked.query} is unknown on this broker: begin its run first"
                return _ErrorResponse(_Why.NOT_STAGED, Refusal(ErrCode.NOT_FOUND, text))
            query = query if query.run == asked.run else None
        if query is None:
            text = f"run {asked.run} of query {asked.query} was replaced by run {staging.queries[asked.query].run}"
            return _ErrorResponse(_Why.FENCED, Refusal(ErrCode.FORBIDDEN, text))
        return query

    def _stage(self, staging: Staging, asked: pb.Transaction, query: Query, now_ms: int) -> Outcome:
        if query.decided(asked.batch):
            return True
        count = sum(len(part.batch.datas) for part in asked.rows)
        refusal = self._refuse_rows(asked, count)
        if refusal is not None:
            return refusal
        attempt = query.attempts.get(asked.attempt.attempt)
        there = 0 if attempt is None else attempt.file.rows
        if attempt is not None and (attempt.batch, attempt.task) != (asked.batch, asked.attempt.task):
            text = f"attempt {attempt.name} is of batch {attempt.batch}, task {attempt.task}"
            return _ErrorResponse(_Why.OTHER, Refusal(ErrCode.BAD_REQUEST, text))
        if asked.attempt.rows + count <= there:
            return True  # a repeated request; the commit of the first one may still be running
        if asked.attempt.rows != there:
            text = f"attempt {asked.attempt.attempt} has {there} rows on this broker, not {asked.attempt.rows}"
            return _ErrorResponse(_Why.NOT_STAGED, Refusal(ErrCode.NOT_FOUND, text))
        full = self._refuse_space(staging, asked.ByteSize(), new=attempt is None)
        if full is not None:
            return full
        if attempt is None:
            attempt = staging.add(query, asked.attempt.attempt, asked.attempt.task, asked.batch, now_ms)
        body = pb.Transaction(rows=asked.rows).SerializeToString()
        staging.append(attempt, body, count, now_ms)
        return True

    def _refuse_rows(self, asked: pb.Transaction, count: int) -> _ErrorResponse | None:
        refusal: Refusal | None = None
        if not asked.attempt.attempt or len(asked.attempt.attempt) > _LONGEST_NAME:
            refusal = Refusal(ErrCode.BAD_REQUEST, f"the name of an attempt has 1 to {_LONGEST_NAME} characters")
        elif not 0 < count <= MAX_BATCH:
            refusal = Refusal(ErrCode.BAD_REQUEST, f"{count} rows; 1 to {MAX_BATCH} are accepted in one request")
        elif count > 1 and asked.ByteSize() > 2 * MAX_BATCH_BYTES:
            refusal = Refusal(ErrCode.BAD_REQUEST, f"{asked.ByteSize()} bytes; {2 * MAX_BATCH_BYTES} are accepted")
        for part in asked.rows:
            # Everything that could prevent a publication is checked here: staged rows can always be committed.
            name = part.topicName = java_trim(part.topicName)
            topic = self._topics.by_name.get(name)
            refusal = refusal or partition_refusal(name, topic, part.partitionId)
            if refusal is None and topic is not None:
                datas = part.batch.datas
                if not datas:
                    refusal = Refusal(ErrCode.BAD_REQUEST, f"no rows for partition {part.partitionId} of {name}")
                else:
                    refusal = self._produce.refuse_messages(topic, part.batch, datas)
        return None if refusal is None else _ErrorResponse(_Why.OTHER, refusal)

    def _refuse_space(self, staging: Staging, size: int, *, new: bool) -> _ErrorResponse | None:
        limits = staging.limits
        if self._checks.out_of_space:
            text = self._checks.out_of_space
        elif staging.bytes + size > limits.max_bytes:
            text = f"{staging.bytes} bytes are staged on this broker, {limits.max_bytes} at most"
        elif new and staging.attempts >= limits.max_attempts:
            text = f"{staging.attempts} attempts are staged on this broker, {limits.max_attempts} at most"
        elif staging.files.unwritten_bytes > self._produce.max_unwritten_bytes:
            return _ErrorResponse(_Why.OTHER, OVERFLOW)
        else:
            return None
        return _ErrorResponse(_Why.FULL, Refusal(ErrCode.SERVER_RECEIVE_OVERFLOW, text))

    def _prepare(self, staging: Staging, asked: pb.Transaction, query: Query, now_ms: int) -> Outcome:
        if query.decided(asked.batch):
            return True
        if query.decision is not None:
            return True if query.decision.transaction == asked.transactionId else _in_doubt_text(query.decision)
        if not 1 < len(asked.participants) <= _MOST_PARTICIPANTS:
            text = f"{len(asked.participants)} participants; 2 to {_MOST_PARTICIPANTS} are accepted"
            return _ErrorResponse(_Why.OTHER, Refusal(ErrCode.BAD_REQUEST, text))
        return self._decide(staging, asked, query, now_ms, publish=False)

    def _commit(self, staging: Staging, asked: pb.Transaction, query: Query, now_ms: int) -> Outcome:
        if asked.batch <= query.committed:
            return True
        decision = query.decision
        if decision is not None and decision.transaction != asked.transactionId:
            return _in_doubt_text(decision)
        if decision is None:
            if asked.participants:
                text = f"transaction {asked.transactionId} is not prepared on this broker"
                return _ErrorResponse(_Why.NOT_STAGED, Refusal(ErrCode.NOT_FOUND, text))
            outcome = self._decide(staging, asked, query, now_ms, publish=True)
            if isinstance(outcome, _ErrorResponse):
                return outcome
        elif not decision.publishing:
            staging.decide(query, decision._replace(number=self._number(now_ms)), now_ms)
            self._decided.append(self._publication(query))
        return self._open[query.name]

    def _decide(
        self, staging: Staging, asked: pb.Transaction, query: Query, now_ms: int, *, publish: bool
    ) -> _ErrorResponse | bool:
        winners = tuple((winner.attempt, winner.rows) for winner in asked.winners)
        missing = staging.missing(query, asked.batch, winners)
        if missing is None and not asked.transactionId:
            return _ErrorResponse(_Why.OTHER, Refusal(ErrCode.BAD_REQUEST, "transactionId is blank"))
        if missing is not None:
            return _ErrorResponse(_Why.NOT_STAGED, Refusal(ErrCode.NOT_FOUND, missing))
        number = self._number(now_ms) if publish else 0
        decision = Decision(asked.transactionId, asked.batch, winners, tuple(asked.participants), number)
        staging.decide(query, decision, now_ms)
        if publish:
            self._decided.append(self._publication(query))
        return True

    def _abort(self, staging: Staging, asked: pb.Transaction, query: Query, now_ms: int) -> Outcome:
        decision = query.decision
        if asked.transactionId:
            if decision is not None and decision.transaction == asked.transactionId:
                if decision.publishing:
                    return _in_doubt_text(decision)
                staging.undo(query, now_ms)
            return True
        held = query.held
        named = {winner.attempt for winner in asked.winners}
        staging.drop(
            query,
            [
                name
                for name, attempt in query.attempts.items()
                if name not in held and (name in named if named else attempt.batch == asked.batch)
            ],
        )
        return True

    def _number(self, now_ms: int) -> int:
        self._last_number = max(self._last_number + 1, FIRST_NUMBER | now_ms << 16)
        return self._last_number

    def _publication(self, query: Query) -> Publication:
        publication = self._open[query.name] = Publication(query)
        return publication

    # Responses.

    def _result(
        self, query: Query | None, asked: pb.Transaction | None, why: int = 0, refusal: Refusal | None = None
    ) -> bytes:
        result = pb.TransactionResult()
        if why:
            result.refusal = why
        if query is not None:
            result.run = query.run
            if query.committed >= 0:
                result.committed = query.committed
            if asked is not None and asked.step == _Step.STAGE:
                attempt = query.attempts.get(asked.attempt.attempt)
                result.stagedRows = 0 if attempt is None else attempt.file.rows
            if query.decision is not None:
                result.transactionId = query.decision.transaction
                result.transactionBatch = query.decision.batch
                result.publishing = query.decision.publishing
                result.participants.extend(query.decision.participants)
        answer = pb.SendMessageResponseB2P(
            success=refusal is None,
            errCode=ErrCode.SUCCESS if refusal is None else refusal.code,
            errMsg=OK if refusal is None else refusal.text,
            requireAuth=False,
            transaction=result,
        )
        return encode_response(MethodId.SEND_MESSAGE, answer.SerializeToString())

    def _refused(self, query: Query | None, no: _ErrorResponse) -> BrokerResponse:
        self._checks.refused += 1
        return BrokerResponse(self._result(query, None, no.why, no.refusal))


def _in_doubt_text(decision: Decision) -> _ErrorResponse:
    state = "being published" if decision.publishing else "prepared"
    text = f"transaction {decision.transaction} of batch {decision.batch} is {state}: decide it first"
    return _ErrorResponse(_Why.UNDECIDED, Refusal(ErrCode.FORBIDDEN, text))


def _refuse_names(asked: pb.Transaction) -> Refusal | None:
    if not 0 < len(asked.query) <= _LONGEST_QUERY or not 0 < len(asked.run) <= _LONGEST_NAME:
        text = f"the name of a query has 1 to {_LONGEST_QUERY} characters, that of a run 1 to {_LONGEST_NAME}"
        return Refusal(ErrCode.BAD_REQUEST, text)
    if not _Step.BEGIN <= asked.step <= _Step.ABORT or asked.batch < 0 or asked.epoch < 0:
        return Refusal(ErrCode.BAD_REQUEST, f"step {asked.step}, batch {asked.batch}, epoch {asked.epoch}")
    return None
