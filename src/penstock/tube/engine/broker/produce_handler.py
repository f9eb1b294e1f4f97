"""Produce requests (method 13): single messages, batches, and messages of idempotent producers.

The response waits for the commit of its messages, except in topics of durability "memory".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from penstock.errors import RefusedError, UnavailableError
from penstock.tube.codec.codes import EXTENSIONS, ErrCode
from penstock.tube.codec.message import check_sum, encode_marker, filter_key
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import java_trim
from penstock.tube.engine.broker.producer_sequences import ProducerSequences
from penstock.tube.engine.broker.request_checks import (
    OK,
    BrokerResponse,
    Refusal,
    RequestChecks,
    make_response,
)
from penstock.tube.engine.broker.send_decoder import NO_SUM, SendDecoder, SendFields, encode_sent
from penstock.tube.engine.broker.topics import (
    Topic,
    Topics,
)
from penstock.tube.engine.interfaces import LogStore
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.sessions import RequestContext

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["MAX_BATCH", "MAX_BATCH_BYTES", "OVERFLOW", "AppendResult", "ProduceHandler", "partition_refusal"]

MAX_BATCH = 8192
MAX_BATCH_BYTES = 4 << 20
_KEYS_CACHED = 4096
_MAX_TYPE_CHARS = 1024
"""Maximum length of a message type, which bounds the time of its hash. The reference's clients send up to 256
characters."""


class AppendResult:
    """Result of an append. ``append_offset``: offset in the index of the store, 28 bytes per message."""

    __slots__ = ("append_offset", "append_time_ms", "message_id", "partition")

    def __init__(self, message_id: int, append_time_ms: int, append_offset: int, partition: int) -> None:
        self.message_id = message_id
        self.append_time_ms = append_time_ms
        self.append_offset = append_offset
        self.partition = partition


class _Sequence:
    __slots__ = ("first", "producer")

    def __init__(self, producer: int, first: int) -> None:
        self.producer = producer
        self.first = first


class ProduceHandler:
    """Stores the messages of producers. ``dirty_stores``: stores with unwritten messages, for the shell."""

    def __init__(self, checks: RequestChecks, topics: Topics, limits: TubeLimits, last_time: int) -> None:
        self.dirty_stores: dict[LogStore, None] = {}
        self.producers = ProducerSequences(limits.max_idempotent_producers)
        self.messages = 0
        self.bytes = 0
        self.duplicates = 0
        self.transactions: Callable[[pb.SendMessageRequestP2B, RequestContext], BrokerResponse] | None = None
        """Handles requests that stage rows or commit batches (`engine.transactions`)."""
        self._checks = checks
        self._topics = topics
        self.max_unwritten_bytes = limits.max_unwritten_bytes
        self._last_id = last_time + 1 << 20
        self._keys: dict[str, int] = {}
        self.reader = SendDecoder()

    def send(self, payload: bytes, context: RequestContext) -> BrokerResponse:
        """Answer method 13."""
        found = self.reader.read(payload)
        if isinstance(found, pb.SendMessageRequestP2B):
            if found.HasField("transaction") and self.transactions is not None:
                return self.transactions(found, context)
            return self._send_extended(found, context)
        send, data = found
        bodies, wait = self.send_all([send], [data], context)
        return BrokerResponse(bodies[0], wait=wait)

    def send_all(
        self, sends: list[SendFields], datas: list[bytes], context: RequestContext
    ) -> tuple[list[bytes], bool]:
        """Store the messages of requests for one partition in order; return the responses, and whether they wait for a
        commit."""
        kinds = _distinct(sends)
        name, partition_id = sends[0].place
        name = name.strip()
        topic = self._topics.by_name.get(name)
        refusal = partition_refusal(name, topic, partition_id)
        for send in kinds:
            refusal = (
                self._checks.refuse_writer(context, send.client_id, send.token, send.user_token, (name,)) or refusal
            )
            if refusal is not None:
                break
        if refusal is None and topic is not None:
            stored = self._store(topic, partition_id, sends, datas, context.now_ms)
            if isinstance(stored, AppendResult):
                bodies = encode_sent(stored.message_id, stored.append_time_ms, stored.append_offset, len(datas))
                return bodies, not self._topics.store(topic, partition_id).immediate
            refusal = stored
        assert refusal is not None
        if len(datas) == 1:
            return [self._refused(refusal).body], False
        # At least one message is rejected: each request is handled separately.
        each = [self.send_all([send], [data], context) for send, data in zip(sends, datas, strict=True)]
        return [bodies[0] for bodies, _ in each], any(wait for _, wait in each)

    def _refused(self, refusal: Refusal, result: pb.SendResult | None = None) -> BrokerResponse:
        self._checks.refused += 1
        failed = pb.SendMessageResponseB2P(success=False, errCode=refusal.code, errMsg=refusal.text, result=result)
        return make_response(MethodId.SEND_MESSAGE, failed.SerializeToString())

    def _store(
        self,
        topic: Topic,
        partition_id: int,
        sends: list[SendFields],
        datas: list[bytes],
        now_ms: int,
    ) -> AppendResult | Refusal:
        """Store all of ``datas`` or none; returns the result of the first message."""
        full = self.refuse_space(topic, partition_id)
        if full is not None:
            return full
        most = topic.max_data_bytes
        sums: list[int] = []
        flags: list[int] = []
        keys: list[int] = []
        last: SendFields | None = None
        key = 0
        for index in range(len(datas)):
            data, send = datas[index], sends[index]
            if not 0 < len(data) <= most:
                return _refuse_size(topic, len(data))
            if send is not last:
                last = send
                known = self._keys.get(send.msg_type)
                if known is None:
                    found = self._key(send.msg_type)
                    if isinstance(found, Refusal):
                        return found
                    known = found
                key = known
            crc = crc32(data)
            if send.checksum != NO_SUM and send.checksum != crc & 0x7FFFFFFF:
                text = f"checkSum {send.checksum} does not match the data ({crc & 0x7FFFFFFF})"
                return Refusal(ErrCode.FORBIDDEN, text)
            sums.append(crc)
            flags.append(send.flag)
            keys.append(key)
        return self._append(topic, partition_id, datas, sums, flags, keys, now_ms)

    def _store_node_message(
        self, topic: Topic, partition_id: int, data: bytes, flag: int, msg_type: str, now_ms: int
    ) -> AppendResult | Refusal:
        """Store a message of the node itself."""
        if not 0 < len(data) <= topic.max_data_bytes:
            return _refuse_size(topic, len(data))
        full = self.refuse_space(topic, partition_id)
        if full is not None:
            return full
        key = self._key(msg_type)
        if isinstance(key, Refusal):
            return key
        return self._append(topic, partition_id, [data], [crc32(data)], [flag], [key], now_ms)

    def refuse_space(self, topic: Topic, partition_id: int) -> Refusal | None:
        """Return the reason why no message can currently be stored, if any: a full disk, or too many unwritten
        messages."""
        if self._checks.out_of_space:
            return Refusal(ErrCode.SERVER_RECEIVE_OVERFLOW, self._checks.out_of_space)
        if self._topics.store(topic, partition_id).unwritten_bytes > self.max_unwritten_bytes:
            return OVERFLOW
        return None

    def _append(
        self,
        topic: Topic,
        partition_id: int,
        datas: list[bytes],
        sums: list[int],
        flags: list[int],
        keys: list[int],
        now_ms: int,
        marker: bytes = b"",
    ) -> AppendResult:
        """Append messages to the log of a partition; returns the result of the first message."""
        store = self._topics.store(topic, partition_id)
        # Message ids increase with time, also across restarts, and have nine bytes as a varint for centuries.
        message_id = max(self._last_id + 1, now_ms << 20)
        offset, time_ms = store.append_many(partition_id, datas, sums, flags, keys, message_id, now_ms, marker)
        self._last_id = message_id + len(datas) - 1
        self.dirty_stores[store] = None
        self.messages += len(datas)
        size: i64 = 0
        for data in datas:
            size += len(data)
        self.bytes += size
        return AppendResult(message_id, time_ms, offset, partition_id)

    def _key(self, msg_type: str) -> int | Refusal:
        key = self._keys.get(msg_type)
        if key is not None:
            return key
        if len(msg_type) > _MAX_TYPE_CHARS:
            text = f"msgType has {len(msg_type)} characters, at most {_MAX_TYPE_CHARS} are accepted"
            return Refusal(ErrCode.BAD_REQUEST, text)
        if len(self._keys) >= _KEYS_CACHED:
            self._keys.clear()
        key = self._keys[msg_type] = filter_key(msg_type)
        return key

    # The extensions: batches, and messages numbered by their producer.

    def _send_extended(self, request: pb.SendMessageRequestP2B, context: RequestContext) -> BrokerResponse:
        name = java_trim(request.topicName)
        topic = self._topics.by_name.get(name)
        auth = request.authInfo
        refusal = self._checks.refuse_writer(
            context, request.clientId, auth.visitAuthorizedToken, auth.authAuthorizedToken, (name,)
        ) or partition_refusal(name, topic, request.partitionId)
        if refusal is not None or topic is None:
            assert refusal is not None
            return self._refused(refusal)
        batch = request.batch
        datas = list(batch.datas) if request.HasField("batch") else [request.data]
        known = self.producers.expected(
            (name, request.partitionId), request.producer.producerId, request.producer.oldest
        )
        if not datas:
            return self._sequence_state(known if request.HasField("producer") else None)
        refusal = self._refuse_batch(request, topic, datas)
        if refusal is not None:
            return self._refused(refusal)
        sequence: _Sequence | None = None
        duplicates = 0
        if request.HasField("producer"):
            sequence = _Sequence(request.producer.producerId, request.producer.sequence)
            if sequence.producer <= 0 or sequence.first < 0:
                return self._refused(Refusal(ErrCode.BAD_REQUEST, "producerId must be > 0 and sequence >= 0"))
            if sequence.first > known:
                text = f"sequence {sequence.first} of producer {sequence.producer}: expected {known}"
                result = pb.SendResult(extensions=EXTENSIONS, expectedSequence=known)
                return self._refused(Refusal(ErrCode.BAD_REQUEST, text), result)
            duplicates = min(known - sequence.first, len(datas))
        return self._append_batch(topic, request, datas, sequence, duplicates, context.now_ms)

    def _sequence_state(self, expected: int | None) -> BrokerResponse:
        result = pb.SendResult(extensions=EXTENSIONS, count=0, expectedSequence=expected)
        done = pb.SendMessageResponseB2P(
            success=True, errCode=ErrCode.SUCCESS, errMsg=OK, requireAuth=False, result=result
        )
        return make_response(MethodId.SEND_MESSAGE, done.SerializeToString())

    def _refuse_batch(self, request: pb.SendMessageRequestP2B, topic: Topic, datas: Sequence[bytes]) -> Refusal | None:
        if not request.HasField("batch") and request.checkSum not in (-1, check_sum(datas[0])):
            return Refusal(ErrCode.FORBIDDEN, f"checkSum {request.checkSum} does not match the data")
        refusal = self.refuse_messages(topic, request.batch, datas, request.msgType)
        return refusal or self.refuse_space(topic, request.partitionId)

    def refuse_messages(
        self, topic: Topic, batch: pb.SendBatch, datas: Sequence[bytes], msg_type: str = ""
    ) -> Refusal | None:
        """Return the reason why ``topic`` does not accept ``datas`` with the flags and types of ``batch``, if any."""
        count = len(datas)
        if count > MAX_BATCH:
            return Refusal(ErrCode.BAD_REQUEST, f"a batch of {count} messages; at most {MAX_BATCH} are accepted")
        size = sum(map(len, datas))
        if count > 1 and size > MAX_BATCH_BYTES:
            return Refusal(ErrCode.BAD_REQUEST, f"a batch of {size} bytes; at most {MAX_BATCH_BYTES} are accepted")
        if len(batch.flags) not in (0, count) or len(batch.msgTypes) not in (0, count):
            text = f"{len(batch.flags)} flags and {len(batch.msgTypes)} types for {count} messages"
            return Refusal(ErrCode.BAD_REQUEST, text)
        for length in (min(map(len, datas)), max(map(len, datas))):
            if not 0 < length <= topic.max_data_bytes:
                return _refuse_size(topic, length)
        for text in {msg_type, *batch.msgTypes}:
            found = self._key(text)
            if isinstance(found, Refusal):
                return found
        return None

    def append_staged(
        self, topic: Topic, partition_id: int, batch: pb.SendBatch, number: int, first: int, now_ms: int
    ) -> int:
        """Store staged messages, numbered from ``first``, of publication ``number``; returns the number of stored
        messages.

        Messages that were stored before a crash are skipped.
        """
        place = (topic.name, partition_id)
        count = len(batch.datas)
        skip = min(max(self.producers.expected(place, number, 0) - first, 0), count)
        if skip == count:
            return 0
        fresh: list[bytes] = list(batch.datas)[skip:]
        flags: list[int] = list(batch.flags)[skip:] if batch.flags else [0] * len(fresh)
        keys = [filter_key(text) for text in batch.msgTypes[skip:]] or [filter_key("")] * len(fresh)
        marker = encode_marker(number, first + skip, len(fresh))
        self._append(topic, partition_id, fresh, list(map(crc32, fresh)), flags, keys, now_ms, marker)
        self.producers.stored(place, number, first + count - 1, now_ms)
        return len(fresh)

    def _append_batch(
        self,
        topic: Topic,
        request: pb.SendMessageRequestP2B,
        datas: list[bytes],
        sequence: _Sequence | None,
        duplicates: int,
        now_ms: int,
    ) -> BrokerResponse:
        partition = request.partitionId
        count = len(datas)
        flags = list(request.batch.flags) or [request.flag] * count
        types = request.batch.msgTypes
        keys = [filter_key(text) for text in types] if types else [filter_key(request.msgType)] * count
        first = AppendResult(0, now_ms, -1, partition)
        stored = count - duplicates
        if stored:
            fresh = datas[duplicates:]
            marker = b""
            if sequence is not None:
                marker = encode_marker(sequence.producer, sequence.first + duplicates, stored)
            first = self._append(
                topic,
                partition,
                fresh,
                [crc32(data) for data in fresh],
                flags[duplicates:],
                keys[duplicates:],
                now_ms,
                marker,
            )
        self.duplicates += duplicates
        if sequence is not None:
            self.producers.stored((topic.name, partition), sequence.producer, sequence.first + count - 1, now_ms)
        done = pb.SendMessageResponseB2P(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=str(first.message_id),
            requireAuth=False,
            messageId=first.message_id,
            appendTime=first.append_time_ms,
            appendOffset=first.append_offset,
            result=pb.SendResult(extensions=EXTENSIONS, count=count, duplicates=duplicates),
        )
        # Responses to duplicates wait as well: the commit of the original may still be running.
        wait = not self._topics.store(topic, partition).immediate
        return make_response(MethodId.SEND_MESSAGE, done.SerializeToString(), wait=wait)

    def append_system(
        self, topic: Topic, partition_id: int, data: bytes, flag: int, msg_type: str, now_ms: int
    ) -> AppendResult | Refusal:
        """Store a message in a system topic."""
        return self._store_node_message(topic, partition_id, data, flag, msg_type, now_ms)

    # Messages of the node itself

    def append(
        self, topic_name: str, partition_id: int | None, data: bytes, flag: int, msg_type: str | None, now_ms: int
    ) -> AppendResult:
        """Store a message of the node itself; it is durable after the next commit. ``partition_id`` None: round robin.

        Raises:
            RefusedError: with the error code that a client would get. UnavailableError: temporarily refused (419, 503).
        """
        checks = self._checks
        topic = self._topics.by_name.get(topic_name)
        refusal: Refusal | None = None
        if checks.failure is not None or checks.write_stopped:
            why = "writing is stopped" if checks.failure is None else checks.failure.what
            refusal = Refusal(ErrCode.SERVICE_UNAVAILABLE, why)
        elif topic is None or not topic.writable:
            refusal = Refusal(ErrCode.FORBIDDEN, "it is unknown" if topic is None else "it does not accept messages")
        elif partition_id is not None and not topic.has(partition_id):
            refusal = Refusal(ErrCode.FORBIDDEN, f"it has no partition {partition_id}")
        else:
            partition = topic.next_partition_id() if partition_id is None else partition_id
            stored = self._store_node_message(topic, partition, data, flag, msg_type or "", now_ms)
            if isinstance(stored, AppendResult):
                return stored
            refusal = stored
        what = f"tube: a message for topic {topic_name!r} was not stored"
        if refusal.code in {ErrCode.SERVICE_UNAVAILABLE, ErrCode.SERVER_RECEIVE_OVERFLOW}:
            raise UnavailableError(what, applied=False, why=refusal.text)
        raise RefusedError(what, code=refusal.code, text=refusal.text, peer="broker", why=refusal.text)


def _distinct(sends: list[SendFields]) -> list[SendFields]:
    """Return the distinct items of ``sends``: usually one, because a client repeats the same fields."""
    kinds: list[SendFields] = []
    last: SendFields | None = None
    for send in sends:
        if send is not last:
            last = send
            if send not in kinds:
                kinds.append(send)
    return kinds


OVERFLOW = Refusal(ErrCode.SERVER_RECEIVE_OVERFLOW, "the disk is slower than the producers")


def _refuse_size(topic: Topic, size: int) -> Refusal:
    return Refusal(ErrCode.BAD_REQUEST, f"data has {size} bytes; 1 to {topic.max_data_bytes} are accepted")


def partition_refusal(name: str, topic: Topic | None, partition_id: int) -> Refusal | None:
    """Return the reason why messages cannot be stored in a partition of the topic ``name``, if any."""
    if not name:
        return Refusal(ErrCode.BAD_REQUEST, "topicName is blank")
    if topic is None or not topic.writable:
        state = "is unknown on this broker" if topic is None else "does not accept messages"
        return Refusal(ErrCode.FORBIDDEN, f"topic {name} {state}")
    if not topic.has(partition_id):
        return Refusal(ErrCode.FORBIDDEN, f"topic {name} has no partition {partition_id} on this broker")
    return None
