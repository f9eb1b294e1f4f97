"""Fetches (methods 17, 18): gets of group members, exact ranges of batch readers, and commits of offsets.

A get with ``maxWaitMs`` (an extension) waits if there is no message. A get without it waits only while a running commit
may make messages readable, so that it is answered after the commit instead of being repeated by the client. The shell
calls `FetchHandler.wake` when a store has new readable messages, and `FetchHandler.tick`; both process the waiting
requests again, with all checks, and append their answers to ``ready``.

Read-ahead: a client with one thread alternates between fetching and processing. Reading and verifying half a megabyte
from disk takes as long as processing it, so the shell performs the next read of a consumer of old messages after the
response was sent (`ReadAhead`).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, response_parts
from penstock.tube.codec.message import INDEX_RECORD_BYTES, filter_key
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.range_columns import describe, describe_records, records_head
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import java_trim
from penstock.tube.engine.broker.flow_control import FlowRules
from penstock.tube.engine.broker.group_offsets import GroupOffsets, Key
from penstock.tube.engine.broker.registrations import Registration, Registrations
from penstock.tube.engine.broker.request_checks import OK, BrokerResponse, Refusal, RequestChecks, make_response
from penstock.tube.engine.broker.topics import (
    Topic,
    Topics,
)
from penstock.tube.engine.interfaces import LogRead, LogStore
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.sessions import RequestContext

__all__ = [
    "GET_BYTES",
    "DelayedAnswer",
    "FetchHandler",
    "PendingRead",
    "ReadAhead",
    "answer_range",
    "get_failure",
    "get_success",
    "range_extension",
]

_MAX_WAIT_MS = 30_000
_COMMIT_WAIT_MS = 100
"""Maximum wait for a commit of a get from a client without the extension."""
_MAX_LAG_BYTES = 14 << 30
"""Lag in bytes above which a consumer gets half as much per response, as in the reference."""


_READS_AHEAD = 16
"""Maximum prepared reads, half a megabyte each; other consumers are served on request."""
_EXPECTED_MS = 2_000
"""Time in ms after which another prepared read may replace an unused one."""


class PendingRead(NamedTuple):
    """A read of a store from offset ``start``: messages with key codes in ``keys`` (None: all), ``room`` bytes."""

    store: LogStore
    partition_id: int
    start: int
    keys: frozenset[int] | None
    room: int

    def read(self) -> LogRead:
        """Perform the read. Raises OSError for a temporary failure, like `LogStore.read`."""
        return self.store.read(self.partition_id, self.start, keys=self.keys, max_bytes=self.room, joined=True)


class ReadAhead:
    """Prepared reads, and reads that are ``due``. Stored messages never change, so no result becomes stale."""

    def __init__(self) -> None:
        self.due: deque[PendingRead] = deque()
        self._held: dict[PendingRead, tuple[LogRead | None, int]] = {}
        """Results of reads (None while they are due) and the time when they were scheduled, oldest first."""

    def pop(self, pending: PendingRead) -> LogRead | None:
        """Remove and return the result of a prepared read; None if the caller must read."""
        found = self._held.pop(pending, None)
        return None if found is None else found[0]

    def expect(self, pending: PendingRead, now_ms: int) -> None:
        """Schedule the read-ahead of ``pending``. Ignored at the maximum of prepared reads."""
        held = self._held
        if len(held) >= _READS_AHEAD:
            oldest = next(iter(held))
            if now_ms - held[oldest][1] < _EXPECTED_MS:
                return
            del held[oldest]
        if pending not in held:
            held[pending] = (None, now_ms)
            self.due.append(pending)

    def work(self) -> None:
        """Perform the oldest due read, unless its consumer has fetched in the meantime."""
        pending = self.due.popleft()
        read, expected_at = self._held.get(pending, (None, None))
        # A read may be due twice: its consumer fetched early, and a read at the same offset was scheduled again.
        if expected_at is not None and read is None and pending.start >= pending.store.min_offset:
            # A temporary failure is reported in the response to the consumer.
            with contextlib.suppress(OSError):
                self._held[pending] = (pending.read(), expected_at)

    def forget(self, store: LogStore) -> None:
        """Drop the reads of ``store``, which is removed with its files."""
        for pending in [pending for pending in self._held if pending.store is store]:
            del self._held[pending]


class DelayedAnswer(NamedTuple):
    """The response to a fetch that waited, with the connection and serial number of its request."""

    connection: object
    serial: int
    answer: BrokerResponse


class _WaitingFetch:
    """A get that waits until ``deadline``; ``registration`` is its registration, None for a range, which needs none."""

    __slots__ = ("context", "deadline", "message", "registration")

    def __init__(
        self,
        context: RequestContext,
        message: pb.GetMessageRequestC2B,
        deadline: int,
        registration: Registration | None,
    ) -> None:
        self.context = context
        self.message = message
        self.deadline = deadline
        self.registration = registration


class FetchHandler:
    """Answers fetches and commits of offsets. ``rules``: the cluster's flow control."""

    def __init__(
        self,
        checks: RequestChecks,
        topics: Topics,
        offsets: GroupOffsets,
        registrations: Registrations,
        limits: TubeLimits,
    ) -> None:
        self.rules = FlowRules()
        self.ready: list[DelayedAnswer] = []
        self.ahead = ReadAhead()
        """Reads that the shell performs ahead of requests when it is idle."""
        self.gets = 0
        self.messages = 0
        self._checks = checks
        self._topics = topics
        self._offsets = offsets
        self._registrations = registrations
        self._parked: dict[LogStore, list[_WaitingFetch]] = {}
        self._parked_count = 0
        self._max_waiting = limits.max_waiting_fetches

    @property
    def waiting_count(self) -> int:
        """Number of fetches that wait for messages."""
        return self._parked_count

    def get(self, request: Request, context: RequestContext) -> BrokerResponse | None:
        """Answer method 17. None: the get waits for messages, which is possible only for a request over a
        connection."""
        message = decode(pb.GetMessageRequestC2B, request.payload)
        self.gets += 1
        found = self._try(message, context)
        if isinstance(found, BrokerResponse):
            return found
        wait_ms = (
            0 if context.connection is None or self._parked_count >= self._max_waiting else _patience_ms(message, found)
        )
        if request.timeout:
            wait_ms = min(wait_ms, request.timeout * 3 // 4)  # the response must arrive within the request's timeout
        if wait_ms <= 0:
            return _empty_response(message, found)
        deadline = context.now_ms + wait_ms
        registration = None if message.HasField("range") else self._registrations.get(_key(message))
        self._parked.setdefault(found, []).append(_WaitingFetch(context, message, deadline, registration))
        self._parked_count += 1
        self._registrations.schedule_check(deadline)
        return None

    def wake(self, store: LogStore, now_ms: int) -> None:
        """Answer the gets that wait for ``store``, which has new readable messages, unless they must wait longer."""
        waiting = self._parked.pop(store, None)
        if waiting is None:
            return
        still = []
        for parked in waiting:
            found = (
                _REPLACED
                if self._has_new_registration(parked)
                else self._try(parked.message, parked.context.at(now_ms))
            )
            if isinstance(found, BrokerResponse):
                self._finish(parked, found)
            else:
                still.append(parked)
        if still:
            self._parked[store] = still

    def tick(self, now_ms: int) -> None:
        """Answer the gets whose waiting time has passed."""
        for store, waiting in list(self._parked.items()):
            still = [parked for parked in waiting if parked.deadline > now_ms]
            if len(still) < len(waiting):
                for parked in waiting:
                    if parked.deadline <= now_ms:
                        found = _REPLACED if self._has_new_registration(parked) else self._answer(parked, now_ms)
                        self._finish(parked, found)
                if still:
                    self._parked[store] = still
                else:
                    del self._parked[store]
            for parked in still:
                self._registrations.schedule_check(parked.deadline)

    def forget(self, connection: object) -> None:
        """Drop the waiting gets of a connection that was closed."""
        for store, waiting in list(self._parked.items()):
            still = [parked for parked in waiting if parked.context.connection is not connection]
            self._parked_count -= len(waiting) - len(still)
            if still:
                self._parked[store] = still
            else:
                del self._parked[store]

    def release(self, store: LogStore, now_ms: int) -> None:
        """Answer the waiting gets of ``store``, which is removed."""
        self.ahead.forget(store)
        for parked in self._parked.pop(store, []):
            self._finish(parked, self._answer(parked, now_ms))

    def _has_new_registration(self, parked: _WaitingFetch) -> bool:
        """Return True if the client has registered again: messages would count as delivered without being received."""
        if parked.registration is None:
            return False
        registration = self._registrations.get(_key(parked.message))
        return (
            registration is not None
            and registration is not parked.registration
            and registration.client_id == parked.registration.client_id
        )

    def _finish(self, parked: _WaitingFetch, found: BrokerResponse) -> None:
        self._parked_count -= 1
        self.ready.append(DelayedAnswer(parked.context.connection, parked.context.serial, found))

    def _answer(self, parked: _WaitingFetch, now_ms: int) -> BrokerResponse:
        found = self._try(parked.message, parked.context.at(now_ms))
        return found if isinstance(found, BrokerResponse) else _empty_response(parked.message, found)

    def _try(self, message: pb.GetMessageRequestC2B, context: RequestContext) -> BrokerResponse | LogStore:
        """Return the response, or the store if it has no message to read yet."""
        if message.HasField("range"):
            return self._range(message, context)
        refusal = self._checks.refuse_reader(None, message.clientId)
        key = _key(message)
        if refusal is None and (not key[0] or not key[1]):
            refusal = Refusal(ErrCode.BAD_REQUEST, "groupName or topicName is blank")
        refusal = refusal or self._registrations.not_held(key, message.clientId.strip(), context)
        if refusal is None:
            registration = self._registrations.get(key)
            topic = self._topics.by_name.get(key[1])
            assert registration is not None
            if self._registrations.has_expired(registration, context.now_ms):
                self._registrations.expire(key)
                refusal = Refusal(ErrCode.HB_NO_NODE, "the session has ended: no get and no heartbeat for too long")
            elif topic is None or not topic.has(key[2]) or topic.removing:
                refusal = Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} is not served by this broker")
            else:
                registration.deadline = context.now_ms + registration.session_ms
                return self._fetch(key, topic, registration, message, context.now_ms)
        self._checks.refused += 1
        return _failed(refusal)

    def _fetch(
        self, key: Key, topic: Topic, registration: Registration, message: pb.GetMessageRequestC2B, now_ms: int
    ) -> BrokerResponse | LogStore:
        store = self._topics.store(topic, key[2])
        end = store.durable_end
        manual = message.manualCommitOffset
        consumed = message.lastPackConsumed
        start, more = self._offsets.begin_get(key, store.min_offset, end, consumed=consumed, manual=manual)
        if not more:
            return store
        if self.rules.limits and not message.escFlowCtrl:
            behind = store.durable_data_end - store.data_offset(start)
            wait_ms = registration.meter.wait_ms(self.rules, behind, now_ms)
            if wait_ms:
                text = "The consumer is limited by a flow control rule"
                return _failed(Refusal(ErrCode.SERVER_CONSUME_SPEED_LIMIT, text), wait_ms)
        room = GET_BYTES
        if end - start > _MAX_LAG_BYTES // 1024 and store.durable_data_end - store.data_offset(start) > _MAX_LAG_BYTES:
            room //= 2
        pending = PendingRead(store, key[2], start, registration.keys, room)
        read = self.ahead.pop(pending) or pending.read()
        if read.from_disk and read.next_offset < end:
            self.ahead.expect(pending._replace(start=read.next_offset), now_ms)
        delivered = read.offsets[-1] + INDEX_RECORD_BYTES if manual and read.count else 0
        self._offsets.end_get(key, read.next_offset - start, empty=not read.count, manual=manual, delivered=delivered)
        if not read.count and read.next_offset >= end and message.maxWaitMs > 0:
            return store  # no message matches the filter: the offset has moved, the get still waits
        self.messages += read.count
        if self.rules.limits:
            registration.meter.count(sum(map(len, read.messages)))
        body = get_success(
            read.messages,
            start=start,
            end=end,
            behind_bytes=store.durable_data_end - read.data_end,
            slow=registration.keys is not None and _has_little_lag(topic, end - read.next_offset),
        )
        if message.wantOffsets:
            body.append(self._offsets_of(store, read))
        return BrokerResponse(*response_parts(MethodId.GET_MESSAGES, body))

    def _offsets_of(self, store: LogStore, read: LogRead) -> bytes:
        offsets = read.offsets
        return range_extension(
            pb.RangeResponse(
                nextOffset=read.next_offset,
                messageOffsets=offsets,
                appendTimes=store.times(offsets),
                minOffset=store.min_offset,
                maxOffset=store.durable_end,
                logEpoch=store.epochs[-1][0] if store.epochs else 0,
            )
        )

    def _range(self, message: pb.GetMessageRequestC2B, context: RequestContext) -> BrokerResponse | LogStore:
        """Read an exact range for a batch reader, without a registration, and without changing an offset."""
        name = java_trim(message.topicName)
        refusal = self._checks.refuse_range_reader(
            context, message.clientId, java_trim(message.groupName), message.authInfo.authAuthorizedToken, name
        )
        topic = self._topics.by_name.get(name)
        if refusal is None and (topic is None or topic.removing or not topic.has(message.partitionId)):
            refusal = Refusal(ErrCode.FORBIDDEN, f"topic {name} has no partition {message.partitionId} on this broker")
        if refusal is not None or topic is None:
            self._checks.refused += 1
            assert refusal is not None
            return _failed(refusal)
        store = self._topics.store(topic, message.partitionId)
        wanted = message.range
        at_end = wanted.HasField("startOffset") and wanted.startOffset == store.durable_end
        if message.maxWaitMs > 0 and at_end and not wanted.planOnly:
            return store
        body, count = answer_range(store, message.partitionId, wanted)
        self.messages += count
        # Only penstock's clients read ranges, and they accept blocks of any length.
        return BrokerResponse(*response_parts(MethodId.GET_MESSAGES, body), one_block=True)

    def commit(self, payload: bytes, context: RequestContext) -> BrokerResponse:
        """Answer method 18."""
        request = decode(pb.CommitOffsetRequestC2B, payload)
        refusal = self._checks.refuse_reader(None, request.clientId)
        if refusal is None and self._checks.failure is not None:
            text = f"offsets cannot be stored: {self._checks.failure.what}"
            refusal = Refusal(ErrCode.SERVICE_UNAVAILABLE, text)
        if refusal is None:
            key = (java_trim(request.groupName), java_trim(request.topicName), request.partitionId)
            topic = self._topics.by_name.get(key[1])
            registration = self._registrations.get(key)
            if topic is None or not topic.has(key[2]):
                refusal = Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} has no partition {key[2]} on this broker")
            elif (
                registration is None or self._registrations.not_held(key, request.clientId.strip(), context) is not None
            ):
                refusal = Refusal(ErrCode.UNAUTHORIZED, "the partition is not registered by this client")
            else:
                consumed = request.lastPackConsumed if request.HasField("lastPackConsumed") else True
                offset = self._commit(key, request, consumed=consumed)
                if offset is not None:
                    store = self._topics.store(topic, key[2])
                    done = pb.CommitOffsetResponseB2C(
                        success=True,
                        errCode=ErrCode.SUCCESS,
                        errMsg=OK,
                        currOffset=offset,
                        maxOffset=store.durable_end,
                    )
                    # The offset of messages that are in memory only need not be more durable than the messages.
                    wait = consumed and not store.immediate
                    return make_response(MethodId.COMMIT_OFFSET, done.SerializeToString(), wait=wait)
                text = f"offset {request.confirmedOffset} was not delivered since the registration"
                refusal = Refusal(ErrCode.BAD_REQUEST, text)
        self._checks.refused += 1
        failed = pb.CommitOffsetResponseB2C(success=False, errCode=refusal.code, errMsg=refusal.text, currOffset=-1)
        return make_response(MethodId.COMMIT_OFFSET, failed.SerializeToString())

    def _commit(self, key: Key, request: pb.CommitOffsetRequestC2B, *, consumed: bool) -> int | None:
        """Commit and return the offset; None if the requested offset cannot be committed."""
        if not request.HasField("confirmedOffset"):
            return self._offsets.commit(key, consumed=consumed)
        offset = request.confirmedOffset
        return None if offset < 0 or offset % INDEX_RECORD_BYTES else self._offsets.commit_to(key, offset)


def _key(message: pb.GetMessageRequestC2B) -> Key:
    return (java_trim(message.groupName), java_trim(message.topicName), message.partitionId)


def _patience_ms(message: pb.GetMessageRequestC2B, store: LogStore) -> int:
    """Return the maximum time that a get may wait for messages."""
    if message.maxWaitMs > 0:
        return min(message.maxWaitMs, _MAX_WAIT_MS)
    # The running commit makes messages readable long before this client would fetch again.
    return _COMMIT_WAIT_MS if store.unwritten_bytes and not store.immediate else 0


def _empty_response(message: pb.GetMessageRequestC2B, store: LogStore) -> BrokerResponse:
    """The response to a get for which ``store`` has no message."""
    if message.HasField("range"):
        body, _ = answer_range(store, message.partitionId, message.range)
        return BrokerResponse(*response_parts(MethodId.GET_MESSAGES, body))
    return _AT_END


def _failed(refusal: Refusal, wait_ms: int = -1) -> BrokerResponse:
    return make_response(MethodId.GET_MESSAGES, get_failure(refusal.code, refusal.text, wait_ms))


def _has_little_lag(topic: Topic, left: int) -> bool:
    """Return True if a consumer with filters lags less than ten filtered reads of the reference, so that it should slow
    down."""
    records = max(8000, min(1000 * (topic.config.partitions or 1), 13_500)) * 3
    return left < 10 * records * 28


GET_BYTES = 512 << 10
"""Maximum bytes of a get response, the reference's transferSize. A single larger message is sent alone."""

_RANGE_BYTES = 4 << 20
"""Maximum bytes of a range response, which every reader of frames accepts."""


def _head(code: int, text: str, *, success: bool) -> bytes:
    return pb.GetMessageResponseB2C(success=success, errCode=code, errMsg=text).SerializeToString()


_OK_HEAD = _head(ErrCode.SUCCESS, "OK!", success=True)


def get_failure(code: int, text: str, wait_ms: int = -1) -> bytes:
    """Encode a get response without messages, with the fields that the reference's clients read.

    ``wait_ms``: time after which the client should send the next get.
    """
    return pb.GetMessageResponseB2C(
        success=False,
        errCode=code,
        errMsg=text,
        currOffset=-1,
        minLimitTime=wait_ms,
        escFlowCtrl=False,
        currDataDlt=-1,
    ).SerializeToString()


def get_success(messages: list[bytes], *, start: int, end: int, behind_bytes: int, slow: bool) -> list[bytes]:
    """Encode a get response, in parts. ``messages`` are encoded fields 4, read from ``start``."""
    tail = pb.GetMessageResponseB2C(
        currOffset=start, minLimitTime=0, escFlowCtrl=False, currDataDlt=behind_bytes, requireSlow=slow, maxOffset=end
    ).SerializePartialToString()
    return [_OK_HEAD, *messages, tail]


def answer_range(store: LogStore, partition_id: int, wanted: pb.RangeRequest) -> tuple[list[bytes], int]:
    """Answer a get with ``range`` (see the .proto file): the response in parts, and its number of messages."""
    low, high = store.min_offset, store.durable_end
    epoch = store.epochs[-1][0] if store.epochs else 0
    answer = pb.RangeResponse(minOffset=low, maxOffset=high, logEpoch=epoch)
    if not wanted.HasField("startOffset"):
        if wanted.HasField("timeMs"):
            answer.timeOffset = store.offset_at(wanted.timeMs)
        return _with_range([], answer), 0
    start = wanted.startOffset
    reached = max(start, wanted.endOffset)
    cut = _truncated(store, reached, wanted.logEpoch) if wanted.HasField("logEpoch") else None
    if cut is not None:
        answer.lostStart, answer.lostEnd, answer.truncatedTo = cut, reached, cut
        text = f"the messages from offset {cut} on, which were readable before, are lost"
        return _range_failure(ErrCode.INTERNAL_SERVER_ERROR, text, answer), 0
    end = min(wanted.endOffset, high) if wanted.HasField("endOffset") else high
    if start < low:
        text = f"offset {start} is no longer stored (earliest: {low})"
        return _range_failure(ErrCode.MOVED, text, answer), 0
    if start > high or start % INDEX_RECORD_BYTES or end % INDEX_RECORD_BYTES:
        text = f"offsets {start} to {end} are not valid in this store: multiples of 28 from 0 to {high}"
        return _range_failure(ErrCode.BAD_REQUEST, text, answer), 0
    most = wanted.maxMessages if wanted.HasField("maxMessages") and wanted.maxMessages > 0 else 1 << 31
    if wanted.planOnly:
        answer.nextOffset, answer.messageCount = store.plan(partition_id, start, end, most)
        return _with_range([], answer), 0
    room = min(wanted.maxBytes, _RANGE_BYTES) if wanted.maxBytes > 0 else GET_BYTES
    keys = frozenset(map(filter_key, wanted.filterCondStr)) if wanted.filterCondStr else None
    if wanted.asStored and wanted.asColumns and keys is None:
        found = store.records(partition_id, start, end=end, max_bytes=room, max_messages=most)
        if found is not None:
            answer.nextOffset = found.next_offset
            answer.columns.CopyFrom(describe_records(found.offsets, found.times, found.positions, found.sizes))
            return _with_range([records_head(len(found.data)), found.data], answer), len(found.offsets)
    read = store.read(partition_id, start, end=end, keys=keys, max_bytes=room, max_messages=most)
    messages, offsets = read.messages, read.offsets
    answer.nextOffset = read.next_offset
    gap = _first_loss(store, read, start)
    if gap is not None:
        # A batch reader must get every message of its range: the messages before the loss are returned first.
        answer.nextOffset = gap[0]
        if gap[0] == start:
            answer.lostStart, answer.lostEnd = gap
            text = f"messages at offsets {gap[0]} to {gap[1]} are damaged or lost"
            return _range_failure(ErrCode.INTERNAL_SERVER_ERROR, text, answer), 0
        count = bisect_left(offsets, gap[0])
        messages, offsets = messages[:count], offsets[:count]
    if wanted.asColumns:
        joined = b"".join(messages)
        answer.columns.CopyFrom(describe(joined, map(len, messages), offsets, store.times(offsets)))
        messages = [joined]
    else:
        answer.messageOffsets.extend(offsets)
        answer.appendTimes.extend(store.times(offsets))
    return _with_range(messages, answer), len(offsets)


def _truncated(store: LogStore, reached: int, epoch: int) -> int | None:
    """Return the offset below ``reached`` at which the log was truncated since ``epoch``; None if it was not.

    An unknown epoch is of another log. 0 is the time before the first one, in a log of a version without epochs.
    """
    cuts = [begin for _, begin in store.epochs]
    numbers = [number for number, _ in store.epochs]
    if epoch in numbers:
        cuts = cuts[numbers.index(epoch) + 1 :]
    elif epoch:
        cuts = [0]
    lowest = min(cuts, default=reached)
    return lowest if lowest < reached else None


def _first_loss(store: LogStore, read: LogRead, start: int) -> tuple[int, int] | None:
    """Return the first offsets ``[from, to)`` that ``read``, which began at ``start``, should have returned but did
    not."""
    gap = store.first_gap(start, read.next_offset)
    if not read.damaged or (gap is not None and gap[0] < read.damaged[0]):
        return gap
    first = read.damaged[0]
    offsets = read.offsets
    behind = bisect_left(offsets, first)
    good = offsets[behind] if behind < len(offsets) else read.next_offset
    return first, read.damaged[bisect_left(read.damaged, good) - 1] + INDEX_RECORD_BYTES


def _range_failure(code: int, text: str, answer: pb.RangeResponse) -> list[bytes]:
    return [get_failure(code, text), range_extension(answer)]


def _with_range(messages: list[bytes], answer: pb.RangeResponse) -> list[bytes]:
    # The extension comes first, so that a client with the extension decodes the messages together.
    return [_OK_HEAD, range_extension(answer), *messages]


def range_extension(answer: pb.RangeResponse) -> bytes:
    """Encode ``answer`` as the field that follows an encoded get response."""
    return pb.GetMessageResponseB2C(range=answer).SerializePartialToString()


_AT_END = _failed(Refusal(ErrCode.NOT_FOUND, "The request offset reached maxOffset!"))
_REPLACED = _failed(Refusal(ErrCode.NOT_FOUND, "The client has registered the partition again since this request"))
