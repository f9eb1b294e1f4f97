"""Reading (methods 17, 18): gets of consumers, exact ranges of batch readers, and gets that wait for messages.

A get that may wait (``maxWaitMs``, an extension) and finds nothing is parked; any other one too while a commit runs
that may bring it something, so that it is answered then and not when its client asks again. The shell calls `Gets.wake`
when a store shows more, and `Gets.tick`; both run the parked requests again, with every check, and put answers into
``ready``.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, join_response
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import java_trim
from penstock.tube.engine.ahead import Ahead, Place
from penstock.tube.engine.fetch import GET_BYTES, answer_range, get_failure, get_success, range_extension
from penstock.tube.engine.flow import FlowRules
from penstock.tube.engine.gate import OK, Answer, Gate, Refusal, answer
from penstock.tube.engine.holdings import Holder, Holdings
from penstock.tube.engine.offsets import GroupOffsets, Key
from penstock.tube.engine.topics import LogRead, LogStore, Topic, Topics

__all__ = ["Gets", "Ready"]

_MAX_WAIT_MS = 30_000
_COMMIT_WAIT_MS = 100
"""A get of a client without the extension waits for a commit at most so long."""
_MAX_PARKED = 20_000
_MAX_LAG_BYTES = 14 << 30
"""A consumer further behind gets half as much at a time, as in the reference."""


class Ready(NamedTuple):
    """The answer to a request that waited; ``address`` is what came with it."""

    address: object | None
    serial: int
    answer: Answer


class _Parked:
    __slots__ = ("address", "deadline", "holder", "message", "serial")

    def __init__(
        self,
        address: object,
        serial: int,
        message: pb.GetMessageRequestC2B,
        deadline: int,
        holder: Holder | None,
    ) -> None:
        self.address = address
        self.holder = holder  # as which it asked; None for a range, which nobody registers for
        self.serial = serial
        self.message = message
        self.deadline = deadline


class Gets:
    """Answers what readers ask. ``rules``: the cluster's flow control."""

    def __init__(self, gate: Gate, topics: Topics, offsets: GroupOffsets, holdings: Holdings) -> None:
        self.rules = FlowRules()
        self.ready: list[Ready] = []
        self.ahead = Ahead()
        """What the shell has read when there is nothing else to do."""
        self.gets = 0
        self.messages = 0
        self._gate = gate
        self._topics = topics
        self._offsets = offsets
        self._holdings = holdings
        self._parked: dict[LogStore, list[_Parked]] = {}
        self._parked_count = 0

    @property
    def parked(self) -> int:
        """Gets that wait for messages."""
        return self._parked_count

    def get(self, request: Request, now_ms: int, address: object | None) -> Answer | None:
        """Answer method 17; None: it waits for messages (only with an ``address``)."""
        message = decode(pb.GetMessageRequestC2B, request.payload)
        self.gets += 1
        found = self._try(message, now_ms)
        if isinstance(found, Answer):
            return found
        wait_ms = 0 if address is None or self._parked_count >= _MAX_PARKED else _patience_ms(message, found)
        if request.timeout:
            wait_ms = min(wait_ms, request.timeout * 3 // 4)  # the answer must be there within the timeout
        if wait_ms <= 0:
            return _nothing(message, found)
        deadline = now_ms + wait_ms
        holder = None if message.HasField("range") else self._holdings.of(_key(message))
        self._parked.setdefault(found, []).append(_Parked(address, request.serial, message, deadline, holder))
        self._parked_count += 1
        self._holdings.check_by(deadline)
        return None

    def wake(self, store: LogStore, now_ms: int) -> None:
        """Readers of ``store`` see more than before."""
        waiting = self._parked.pop(store, None)
        if waiting is None:
            return
        still = []
        for parked in waiting:
            self._gate.connection = parked.address
            found = _REPLACED if self._replaced(parked) else self._try(parked.message, now_ms)
            if isinstance(found, Answer):
                self._finish(parked, found)
            else:
                still.append(parked)
        if still:
            self._parked[store] = still

    def tick(self, now_ms: int) -> None:
        """Answer the gets that have waited long enough."""
        for store, waiting in list(self._parked.items()):
            still = [parked for parked in waiting if parked.deadline > now_ms]
            if len(still) < len(waiting):
                for parked in waiting:
                    if parked.deadline <= now_ms:
                        self._gate.connection = parked.address
                        found = _REPLACED if self._replaced(parked) else self._answer(parked.message, now_ms)
                        self._finish(parked, found)
                if still:
                    self._parked[store] = still
                else:
                    del self._parked[store]
            for parked in still:
                self._holdings.check_by(parked.deadline)

    def forget(self, address: object) -> None:
        """Whoever asked from ``address`` is gone."""
        for store, waiting in list(self._parked.items()):
            still = [parked for parked in waiting if parked.address is not address]
            self._parked_count -= len(waiting) - len(still)
            if still:
                self._parked[store] = still
            else:
                del self._parked[store]

    def release(self, store: LogStore, now_ms: int) -> None:
        """``store`` is removed: whoever waits for it is told."""
        self.ahead.forget(store)
        for parked in self._parked.pop(store, []):
            self._gate.connection = parked.address
            self._finish(parked, self._answer(parked.message, now_ms))

    def _replaced(self, parked: _Parked) -> bool:
        """Whether its client has registered anew since: what came for it then would count as delivered, unseen."""
        if parked.holder is None:
            return False
        holder = self._holdings.of(_key(parked.message))
        return holder is not None and holder is not parked.holder and holder.client_id == parked.holder.client_id

    def _finish(self, parked: _Parked, found: Answer) -> None:
        self._parked_count -= 1
        self.ready.append(Ready(parked.address, parked.serial, found))

    def _answer(self, message: pb.GetMessageRequestC2B, now_ms: int) -> Answer:
        found = self._try(message, now_ms)
        return found if isinstance(found, Answer) else _nothing(message, found)

    def _try(self, message: pb.GetMessageRequestC2B, now_ms: int) -> Answer | LogStore:
        """The answer, or the store that has nothing to read yet."""
        if message.HasField("range"):
            return self._range(message, now_ms)
        refusal = self._gate.refuse_reader(None, message.clientId)
        key = _key(message)
        if refusal is None and (not key[0] or not key[1]):
            refusal = Refusal(ErrCode.BAD_REQUEST, "groupName or topicName is blank")
        refusal = refusal or self._holdings.not_held(key, message.clientId.strip())
        if refusal is None:
            holder = self._holdings.of(key)
            topic = self._topics.by_name.get(key[1])
            assert holder is not None
            if self._holdings.is_over(holder, now_ms):
                self._holdings.expire(key)
                refusal = Refusal(ErrCode.HB_NO_NODE, "the session has ended: no get and no heartbeat for too long")
            elif topic is None or not topic.has(key[2]) or topic.removing:
                refusal = Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} is not served here (any more)")
            else:
                holder.deadline = now_ms + holder.session_ms
                return self._fetch(key, topic, holder, message, now_ms)
        self._gate.refused += 1
        return _failed(refusal)

    def _fetch(
        self, key: Key, topic: Topic, holder: Holder, message: pb.GetMessageRequestC2B, now_ms: int
    ) -> Answer | LogStore:
        store = self._topics.store(topic, key[2])
        end = store.durable_end
        manual = message.manualCommitOffset
        consumed = message.lastPackConsumed
        start, more = self._offsets.begin_get(key, store.min_offset, end, consumed=consumed, manual=manual)
        if not more:
            return store
        if self.rules.limits and not message.escFlowCtrl:
            behind = store.durable_data_end - store.data_position(start)
            wait_ms = holder.meter.wait_ms(self.rules, behind, now_ms)
            if wait_ms:
                text = "The consumer is limited by a flow control rule"
                return _failed(Refusal(ErrCode.SERVER_CONSUME_SPEED_LIMIT, text), wait_ms)
        room = GET_BYTES
        if (
            end - start > _MAX_LAG_BYTES // 1024
            and store.durable_data_end - store.data_position(start) > _MAX_LAG_BYTES
        ):
            room //= 2
        place = Place(store, key[2], start, holder.keys, room)
        read = self.ahead.take(place) or place.read()
        if read.from_disk and read.next_offset < end:
            self.ahead.expect(place._replace(start=read.next_offset), now_ms)
        delivered = read.offsets[-1] + INDEX_RECORD_BYTES if manual and read.messages else 0
        self._offsets.end_get(
            key, read.next_offset - start, empty=not read.messages, manual=manual, delivered=delivered
        )
        if not read.messages and read.next_offset >= end and message.maxWaitMs > 0:
            return store  # only what is not its own: the position has moved, nothing is to be told yet
        self.messages += len(read.messages)
        if self.rules.limits:
            holder.meter.count(sum(map(len, read.messages)))
        body = get_success(
            read.messages,
            start=start,
            end=end,
            behind_bytes=store.durable_data_end - read.data_end,
            slow=holder.keys is not None and _near_the_head(topic, end - read.next_offset),
        )
        if message.wantOffsets:
            body.append(self._offsets_of(store, read))
        return Answer(join_response(MethodId.GET_MESSAGES, body))

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

    def _range(self, message: pb.GetMessageRequestC2B, now_ms: int) -> Answer | LogStore:
        """The exact range read for batch readers: no registration, no position."""
        name = java_trim(message.topicName)
        refusal = self._gate.refuse_range_reader(
            message.clientId, java_trim(message.groupName), message.authInfo.authAuthorizedToken, now_ms, name
        )
        topic = self._topics.by_name.get(name)
        if refusal is None and (topic is None or topic.removing or not topic.has(message.partitionId)):
            refusal = Refusal(ErrCode.FORBIDDEN, f"topic {name} has no partition {message.partitionId} on this broker")
        if refusal is not None or topic is None:
            self._gate.refused += 1
            assert refusal is not None
            return _failed(refusal)
        store = self._topics.store(topic, message.partitionId)
        wanted = message.range
        at_end = wanted.HasField("startOffset") and wanted.startOffset == store.durable_end
        if message.maxWaitMs > 0 and at_end and not wanted.planOnly:
            return store
        body, count = answer_range(store, message.partitionId, wanted)
        self.messages += count
        # Readers of ranges are ours, and ours read blocks of any length.
        return Answer(join_response(MethodId.GET_MESSAGES, body), one_block=True)

    def commit(self, payload: bytes, _now_ms: int) -> Answer:
        """Answer method 18."""
        request = decode(pb.CommitOffsetRequestC2B, payload)
        refusal = self._gate.refuse_reader(None, request.clientId)
        if refusal is None and self._gate.failure is not None:
            text = f"positions cannot be stored: {self._gate.failure.what}"
            refusal = Refusal(ErrCode.SERVICE_UNAVAILABLE, text)
        if refusal is None:
            key = (java_trim(request.groupName), java_trim(request.topicName), request.partitionId)
            topic = self._topics.by_name.get(key[1])
            holder = self._holdings.of(key)
            if topic is None or not topic.has(key[2]):
                refusal = Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} has no partition {key[2]} on this broker")
            elif holder is None or self._holdings.not_held(key, request.clientId.strip()) is not None:
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
                    # A position among messages that are in memory only is worth no more than they.
                    wait = consumed and not store.immediate
                    return answer(MethodId.COMMIT_OFFSET, done.SerializeToString(), wait=wait)
                text = f"offset {request.confirmedOffset} was not delivered since the registration"
                refusal = Refusal(ErrCode.BAD_REQUEST, text)
        self._gate.refused += 1
        failed = pb.CommitOffsetResponseB2C(success=False, errCode=refusal.code, errMsg=refusal.text, currOffset=-1)
        return answer(MethodId.COMMIT_OFFSET, failed.SerializeToString())

    def _commit(self, key: Key, request: pb.CommitOffsetRequestC2B, *, consumed: bool) -> int | None:
        """The offset committed; None: the one asked for cannot be."""
        if not request.HasField("confirmedOffset"):
            return self._offsets.commit(key, consumed=consumed)
        offset = request.confirmedOffset
        return None if offset < 0 or offset % INDEX_RECORD_BYTES else self._offsets.commit_to(key, offset)


def _key(message: pb.GetMessageRequestC2B) -> Key:
    return (java_trim(message.groupName), java_trim(message.topicName), message.partitionId)


def _patience_ms(message: pb.GetMessageRequestC2B, store: LogStore) -> int:
    """How long a get that found nothing may wait for messages."""
    if message.maxWaitMs > 0:
        return min(message.maxWaitMs, _MAX_WAIT_MS)
    # What is being committed is readable in a moment, long before this reader would ask again.
    return _COMMIT_WAIT_MS if store.unwritten_bytes and not store.immediate else 0


def _nothing(message: pb.GetMessageRequestC2B, store: LogStore) -> Answer:
    """The answer to a get that found nothing in ``store``."""
    if message.HasField("range"):
        body, _ = answer_range(store, message.partitionId, message.range)
        return Answer(join_response(MethodId.GET_MESSAGES, body))
    return _AT_END


def _failed(refusal: Refusal, wait_ms: int = -1) -> Answer:
    return answer(MethodId.GET_MESSAGES, get_failure(refusal.code, refusal.text, wait_ms))


def _near_the_head(topic: Topic, left: int) -> bool:
    """Whether a filtered reader has less than ten of the reference's filter reads before it: it should slow down."""
    records = max(8000, min(1000 * (topic.config.partitions or 1), 13_500)) * 3
    return left < 10 * records * 28


_AT_END = _failed(Refusal(ErrCode.NOT_FOUND, "The request offset reached maxOffset!"))
_REPLACED = _failed(Refusal(ErrCode.NOT_FOUND, "The client has registered the partition again since this request"))
