"""A broker's side of the protocol: who holds which partition, what a get returns, what a send stores.

    answer = broker.receive(request, now_ms)      # an Answer, or None: drop the request unanswered
    deadline = broker.next_deadline()             # ms or None; then broker.tick(now_ms)

An answer with ``wait`` set may leave once everything appended and every position changed until now is committed; the
others leave at once. Stores with something to write and positions to keep are taken by the shell (`dirty_stores`,
`offsets.take_dirty`).

Differences from the reference, none visible to its clients: messages are readable as soon as their commit returned,
also through filters (its filtered readers wait for its flush); a get walks over any number of other partitions' records
in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from penstock.errors import PenstockError, RefusedError, RemoteProtocolError, StorageError, UnavailableError
from penstock.tube.codec import exceptions
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, encode_error, encode_response
from penstock.tube.codec.message import check_sum, filter_key
from penstock.tube.codec.methods import METHODS, RESERVED, MethodId, Role, Service
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import Partition, format_failure, java_trim
from penstock.tube.engine.fetch import GET_BYTES, answer_range, get_failure, get_success
from penstock.tube.engine.offsets import GroupOffsets, Key
from penstock.tube.engine.sends import SendReader, encode_sent
from penstock.tube.engine.topics import LogStore, Topic, Topics

__all__ = ["Answer", "AppendResult", "BrokerEngine", "Identity"]

_REGISTER = 31
_UNREGISTER = 32
_OK = "OK!"
_MAX_CLIENT_ID = 1024
_TOKENS_KEPT = 6
_KEYS_CACHED = 4096
_MAX_FILTERS = 500
_MAX_FILTER_CHARS = 1024
"""Longest message type: hashing walks over it. The reference's clients send up to 256 characters."""
_MAX_GROUP = 1024


class Answer:
    """The body of a response frame; ``wait``: it may leave only after the commit of what happened so far."""

    __slots__ = ("body", "wait")

    def __init__(self, body: bytes, *, wait: bool = False) -> None:
        self.body = body
        self.wait = wait


class AppendResult(NamedTuple):
    """Where a message landed. ``append_offset``: its position in the index of its store, 28 bytes a message."""

    message_id: int
    append_time_ms: int
    append_offset: int
    partition: int


class Identity(NamedTuple):
    """The broker as its partitions name it."""

    id: int
    host: str
    port: int


class _Registration:
    """A consumer holds a partition; ``keys`` None = no filter."""

    __slots__ = ("client_id", "deadline", "keys", "priority")

    def __init__(self, client_id: str, keys: frozenset[int] | None, priority: int, deadline: int) -> None:
        self.client_id = client_id
        self.keys = keys
        self.priority = priority
        self.deadline = deadline


class _Refusal(NamedTuple):
    code: int
    text: str


class BrokerEngine:
    """See the module. One instance per broker; not thread-safe.

    ``session_ms``: a partition whose consumer neither got nor heartbeat for so long is free again (reference: 30 s).
    ``unwritten_bytes``: bytes a store may hold that no commit has written yet; beyond, sends are answered 419.
    ``max_registrations`` and ``max_positions`` bound what consumers make the broker remember. ``last_time``: newest
    append time in the stores; message ids go on behind it, even if the clock went back since.
    """

    def __init__(
        self,
        topics: Topics,
        offsets: GroupOffsets,
        *,
        session_ms: int = 30_000,
        unwritten_bytes: int = 64 << 20,
        max_registrations: int = 100_000,
        max_positions: int = 1_000_000,
        last_time: int = 0,
    ) -> None:
        self.topics = topics
        self.offsets = offsets
        self.dirty_stores: dict[LogStore, None] = {}
        self.read_stopped = False
        self.write_stopped = False
        self.failure: StorageError | None = None
        """Set by the shell after a failed commit: nothing is acknowledged any more."""
        self.tokens: list[int] = []
        self.check_tokens = False
        self.produced_messages = 0
        self.produced_bytes = 0
        self.fetched_messages = 0
        self.gets = 0
        self.refused = 0
        self.dropped_late = 0
        self._session_ms = session_ms
        self._unwritten_bytes = unwritten_bytes
        self._registered: dict[Key, _Registration] = {}
        self._next_check: int | None = None
        self._last_id = last_time + 1 << 20
        self._max_registrations = max_registrations
        self._max_positions = max_positions
        self._keys: dict[str, int] = {}
        self._sends = SendReader()
        self._handlers: dict[int, Callable[[bytes, int], Answer]] = {
            MethodId.SEND_MESSAGE: self._send,
            MethodId.PARTITION_REGISTER: self._register,
            MethodId.PARTITION_HEARTBEAT: self._heartbeat,
            MethodId.GET_MESSAGES: self._get,
            MethodId.COMMIT_OFFSET: self._commit,
        }

    @property
    def registrations(self) -> int:
        """Partitions held by consumers."""
        return len(self._registered)

    def receive(self, request: Request, arrived_ms: int, now_ms: int) -> Answer | None:
        """The answer to ``request``, which came at ``arrived_ms``; None when it waited longer than it is worth."""
        if request.timeout and now_ms - arrived_ms > request.timeout:
            self.dropped_late += 1
            return None
        handler = self._handlers.get(request.method)
        if handler is None or request.service not in METHODS[request.method].services:
            return self._unknown(request)
        try:
            return handler(request.payload, now_ms)
        except RemoteProtocolError as error:
            self.refused += 1
            text = f"{error.what} {error.why or ''}".strip()
            return Answer(encode_error(exceptions.EXCEPTION, text, version=request.version, fatal=True))
        except (OSError, PenstockError) as error:
            self.refused += 1
            return Answer(encode_error(exceptions.EXCEPTION, str(error), version=request.version))

    def _unknown(self, request: Request) -> Answer:
        self.refused += 1
        method = METHODS.get(request.method)
        if method is None and request.method not in RESERVED:
            # The C++ client sends a method 0 when it closes; the connection goes on.
            text = f"method {request.method} does not exist"
            return Answer(encode_error(exceptions.UNKNOWN_PROTOCOL, text, version=request.version, fatal=True))
        if request.service not in set(Service):
            text = f"service type {request.service} does not exist"
        elif method is not None and method.answers is Role.BROKER:
            text = f"{method.name} is not a method of service type {request.service}"
        elif method is not None:
            text = f"{method.name} is answered by a master, this is a broker"
        else:
            text = f"method {request.method} is reserved and not implemented"
        return Answer(encode_error(exceptions.EXCEPTION, text, version=request.version))

    # Sending (method 13)

    def _send(self, payload: bytes, now_ms: int) -> Answer:
        client_id, name, partition_id, data, flag, checksum, msg_type, token = self._sends.read(payload)
        name = name.strip()
        topic = self.topics.by_name.get(name)
        refusal = self._refuse_send(client_id, name, topic, partition_id, token)
        if refusal is None and topic is not None:
            stored = self._store(topic, partition_id, data, flag, checksum, msg_type, now_ms)
            if isinstance(stored, AppendResult):
                body = encode_sent(stored.message_id, stored.append_time_ms, stored.append_offset)
                wait = not self.topics.store(topic, partition_id).immediate
                return Answer(encode_response(MethodId.SEND_MESSAGE, body), wait=wait)
            refusal = stored
        assert refusal is not None
        self.refused += 1
        failed = pb.SendMessageResponseB2P(success=False, errCode=refusal.code, errMsg=refusal.text)
        return _answer(MethodId.SEND_MESSAGE, failed.SerializeToString())

    def _refuse_send(
        self, client_id: str, name: str, topic: Topic | None, partition_id: int, token: int
    ) -> _Refusal | None:
        if self.failure is not None:
            return _Refusal(ErrCode.SERVICE_UNAVAILABLE, f"the broker stores nothing any more: {self.failure.what}")
        if self.write_stopped:
            return _Refusal(ErrCode.SERVICE_UNAVAILABLE, "writing is stopped on this broker")
        refusal = self._refuse_token(token) or _refuse_client(client_id)
        if refusal is not None:
            return refusal
        if not name:
            return _Refusal(ErrCode.BAD_REQUEST, "topicName is blank")
        if topic is None or not topic.writable:
            state = "is unknown on this broker" if topic is None else "does not accept messages"
            return _Refusal(ErrCode.FORBIDDEN, f"topic {name} {state}")
        if not topic.has(partition_id):
            return _Refusal(ErrCode.FORBIDDEN, f"topic {name} has no partition {partition_id} on this broker")
        return None

    def _store(
        self, topic: Topic, partition_id: int, data: bytes, flag: int, checksum: int, msg_type: str, now_ms: int
    ) -> AppendResult | _Refusal:
        if not 0 < len(data) <= topic.max_data_bytes:
            limit = topic.max_data_bytes
            return _Refusal(ErrCode.BAD_REQUEST, f"data has {len(data)} bytes; 1 to {limit} are accepted")
        own_sum = check_sum(data)
        if checksum not in (-1, own_sum):
            return _Refusal(ErrCode.FORBIDDEN, f"checkSum {checksum} does not fit the data ({own_sum})")
        store = self.topics.store(topic, partition_id)
        if store.unwritten_bytes > self._unwritten_bytes:
            return _Refusal(ErrCode.SERVER_RECEIVE_OVERFLOW, "the disk does not keep up with what is sent")
        key = self._keys.get(msg_type)
        if key is None:
            if len(msg_type) > _MAX_FILTER_CHARS:
                text = f"msgType has {len(msg_type)} characters, at most {_MAX_FILTER_CHARS} are possible"
                return _Refusal(ErrCode.BAD_REQUEST, text)
            if len(self._keys) >= _KEYS_CACHED:
                self._keys.clear()
            key = self._keys[msg_type] = filter_key(msg_type)
        # Rises with time, also over restarts; nine bytes as a varint for the next centuries.
        message_id = self._last_id = max(self._last_id + 1, now_ms << 20)
        offset, time_ms = store.append(partition_id, data, flag, own_sum, key, message_id, now_ms)
        self.dirty_stores[store] = None
        self.produced_messages += 1
        self.produced_bytes += len(data)
        return AppendResult(message_id, time_ms, offset, partition_id)

    def append(
        self, topic_name: str, partition_id: int | None, data: bytes, flag: int, msg_type: str | None, now_ms: int
    ) -> AppendResult:
        """Store a message of the node itself; durable after the next commit. ``partition_id`` None: in turn.

        Raises:
            RefusedError: with the error code a client would get. UnavailableError: not now (419, 503).
        """
        topic = self.topics.by_name.get(topic_name)
        refusal: _Refusal | None = None
        if self.failure is not None or self.write_stopped:
            why = "writing is stopped" if self.failure is None else self.failure.what
            refusal = _Refusal(ErrCode.SERVICE_UNAVAILABLE, why)
        elif topic is None or not topic.writable:
            refusal = _Refusal(ErrCode.FORBIDDEN, "it is unknown" if topic is None else "it does not accept messages")
        elif partition_id is not None and not topic.has(partition_id):
            refusal = _Refusal(ErrCode.FORBIDDEN, f"it has no partition {partition_id}")
        else:
            partition = topic.next_partition_id() if partition_id is None else partition_id
            stored = self._store(topic, partition, data, flag, -1, msg_type or "", now_ms)
            if isinstance(stored, AppendResult):
                return stored
            refusal = stored
        what = f"tube: a message for topic {topic_name!r} was not stored"
        if refusal.code in {ErrCode.SERVICE_UNAVAILABLE, ErrCode.SERVER_RECEIVE_OVERFLOW}:
            raise UnavailableError(what, applied=False, why=refusal.text)
        raise RefusedError(what, code=refusal.code, text=refusal.text, peer="broker", why=refusal.text)

    # Holding partitions (methods 15, 16)

    def _register(self, payload: bytes, now_ms: int) -> Answer:
        request = decode(pb.RegisterRequestC2B, payload)
        refusal = self._refuse_reader(request.authInfo.visitAuthorizedToken, request.clientId)
        if refusal is None:
            key = (java_trim(request.groupName), java_trim(request.topicName), request.partitionId)
            topic = self.topics.by_name.get(key[1])
            if not key[0] or not key[1]:
                refusal = _Refusal(ErrCode.BAD_REQUEST, "groupName or topicName is blank")
            elif len(key[0]) > _MAX_GROUP or "\0" in key[0]:
                refusal = _Refusal(ErrCode.BAD_REQUEST, f"groupName is longer than {_MAX_GROUP} or holds a zero")
            elif topic is None or not topic.readable:
                state = "is unknown on this broker" if topic is None else "does not accept readers"
                refusal = _Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} {state}")
            elif not topic.has(request.partitionId):
                refusal = _Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} has no partition {key[2]} on this broker")
            elif request.opType == _REGISTER:
                refusal = self._refuse_more(key, request.filterCondStr) or self._occupied(
                    key, request.clientId.strip(), now_ms
                )
                if refusal is None:
                    return self._take(key, topic, request, now_ms)
            elif request.opType == _UNREGISTER:
                refusal = self._not_held(key, request.clientId.strip())
                if refusal is None:
                    return self._release(key, consumed=request.readStatus == 0)
            else:
                refusal = _Refusal(ErrCode.BAD_REQUEST, f"opType {request.opType} is unknown")
        self.refused += 1
        failed = pb.RegisterResponseB2C(success=False, errCode=refusal.code, errMsg=refusal.text, currOffset=-1)
        return _answer(MethodId.PARTITION_REGISTER, failed.SerializeToString())

    def _refuse_more(self, key: Key, filters: Sequence[str]) -> _Refusal | None:
        """What a consumer may make the broker remember is bounded."""
        if len(filters) > _MAX_FILTERS or any(len(text) > _MAX_FILTER_CHARS for text in filters):
            text = f"at most {_MAX_FILTERS} filters of {_MAX_FILTER_CHARS} characters are possible"
            return _Refusal(ErrCode.BAD_REQUEST, text)
        if key not in self._registered and len(self._registered) >= self._max_registrations:
            return _Refusal(ErrCode.INTERNAL_SERVER_ERROR, f"{len(self._registered)} partitions are held: no more")
        if self.offsets.committed(key) is None and len(self.offsets) >= self._max_positions:
            return _Refusal(ErrCode.INTERNAL_SERVER_ERROR, f"{len(self.offsets)} positions are kept: no more")
        return None

    def _occupied(self, key: Key, client_id: str, now_ms: int) -> _Refusal | None:
        holder = self._registered.get(key)
        if holder is None or holder.client_id == client_id:
            return None
        text = f"partition {key[2]} of {key[1]} is held by {holder.client_id}"
        if holder.deadline <= now_ms:
            # Gone, but the answer is 410 all the same: the caller retries and then succeeds (tubemq.md 10.2).
            self._expire(key)
        return _Refusal(ErrCode.PARTITION_OCCUPIED, text)

    def _take(self, key: Key, topic: Topic, request: pb.RegisterRequestC2B, now_ms: int) -> Answer:
        store = self.topics.store(topic, key[2])
        filters = [text for text in map(java_trim, request.filterCondStr) if text]
        keys = frozenset(map(filter_key, filters)) if filters else None
        wanted = request.currOffset if request.HasField("currOffset") else None
        offset = self.offsets.register(key, request.readStatus, wanted, store.min_offset, store.durable_end)
        deadline = now_ms + self._session_ms
        self._registered[key] = _Registration(request.clientId.strip(), keys, request.qryPriorityId, deadline)
        if self._next_check is None or deadline < self._next_check:
            self._next_check = deadline
        done = pb.RegisterResponseB2C(
            success=True, errCode=ErrCode.SUCCESS, errMsg=_OK, currOffset=offset, maxOffset=store.durable_end
        )
        return _answer(MethodId.PARTITION_REGISTER, done.SerializeToString())

    def _release(self, key: Key, *, consumed: bool) -> Answer:
        self.offsets.commit(key, consumed=consumed)
        del self._registered[key]
        done = pb.RegisterResponseB2C(success=True, errCode=ErrCode.SUCCESS, errMsg=_OK, currOffset=-1)
        return _answer(MethodId.PARTITION_REGISTER, done.SerializeToString(), wait=consumed)

    def _heartbeat(self, payload: bytes, now_ms: int) -> Answer:
        request = decode(pb.HeartBeatRequestC2B, payload)
        refusal = self._refuse_reader(request.authInfo.visitAuthorizedToken, request.clientId)
        group = java_trim(request.groupName)
        if refusal is None and not group:
            refusal = _Refusal(ErrCode.BAD_REQUEST, "groupName is blank")
        if refusal is not None:
            self.refused += 1
            failed = pb.HeartBeatResponseB2C(
                success=False, errCode=refusal.code, errMsg=refusal.text, hasPartFailure=False
            )
            return _answer(MethodId.PARTITION_HEARTBEAT, failed.SerializeToString())
        failures = []
        for text in request.partitionInfo:
            if not text.strip():
                continue
            partition = Partition.parse(text)
            key = (group, partition.topic, partition.id)
            lost = self._not_held(key, request.clientId.strip())
            if lost is not None:
                failures.append(format_failure(lost.code, text.strip()))
                continue
            holder = self._registered[key]
            holder.deadline = now_ms + self._session_ms
            if request.HasField("qryPriorityId"):
                holder.priority = request.qryPriorityId
        done = pb.HeartBeatResponseB2C(
            success=True,
            errCode=ErrCode.SUCCESS,
            errMsg=_OK,
            hasPartFailure=bool(failures),
            failureInfo=failures,
            requireAuth=False,
        )
        return _answer(MethodId.PARTITION_HEARTBEAT, done.SerializeToString())

    def _not_held(self, key: Key, client_id: str) -> _Refusal | None:
        holder = self._registered.get(key)
        if holder is None:
            return _Refusal(ErrCode.HB_NO_NODE, f"partition {key[2]} of {key[1]} is not registered by group {key[0]}")
        if holder.client_id != client_id:
            text = f"partition {key[2]} of {key[1]} is held by {holder.client_id}"
            return _Refusal(ErrCode.DUPLICATE_PARTITION, text)
        return None

    # Reading (methods 17, 18)

    def _get(self, payload: bytes, now_ms: int) -> Answer:
        request = decode(pb.GetMessageRequestC2B, payload)
        self.gets += 1
        if request.HasField("range"):
            return self._get_range(request)
        refusal = self._refuse_reader(None, request.clientId)
        key = (java_trim(request.groupName), java_trim(request.topicName), request.partitionId)
        if refusal is None and (not key[0] or not key[1]):
            refusal = _Refusal(ErrCode.BAD_REQUEST, "groupName or topicName is blank")
        refusal = refusal or self._not_held(key, request.clientId.strip())
        if refusal is None:
            holder = self._registered[key]
            topic = self.topics.by_name.get(key[1])
            if holder.deadline <= now_ms:
                self._expire(key)
                refusal = _Refusal(ErrCode.HB_NO_NODE, "the session has ended: no get and no heartbeat for too long")
            elif topic is None or not topic.has(key[2]) or topic.removing:
                refusal = _Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} is not served here (any more)")
            else:
                holder.deadline = now_ms + self._session_ms
                return self._fetch(key, topic, holder, request)
        self.refused += 1
        return _answer(MethodId.GET_MESSAGES, get_failure(refusal.code, refusal.text))

    def _fetch(self, key: Key, topic: Topic, holder: _Registration, request: pb.GetMessageRequestC2B) -> Answer:
        store = self.topics.store(topic, key[2])
        end = store.durable_end
        manual = request.manualCommitOffset
        start, more = self.offsets.begin_get(
            key, store.min_offset, end, consumed=request.lastPackConsumed, manual=manual
        )
        if not more:
            return _answer(
                MethodId.GET_MESSAGES, get_failure(ErrCode.NOT_FOUND, "The request offset reached maxOffset!")
            )
        read = store.read(key[2], start, keys=holder.keys, max_bytes=GET_BYTES)
        self.offsets.end_get(key, read.next_offset - start, empty=not read.messages, manual=manual)
        self.fetched_messages += len(read.messages)
        body = get_success(
            read.messages,
            start=start,
            end=end,
            behind_bytes=store.durable_data_end - read.data_end,
            slow=holder.keys is not None and _near_the_head(topic, end - read.next_offset),
        )
        return _answer(MethodId.GET_MESSAGES, body)

    def _get_range(self, request: pb.GetMessageRequestC2B) -> Answer:
        """The exact range read for batch readers: no registration, no position."""
        refusal = self._refuse_reader(None, request.clientId)
        name = java_trim(request.topicName)
        topic = self.topics.by_name.get(name)
        if refusal is None and (topic is None or topic.removing or not topic.has(request.partitionId)):
            refusal = _Refusal(ErrCode.FORBIDDEN, f"topic {name} has no partition {request.partitionId} on this broker")
        if refusal is not None or topic is None:
            self.refused += 1
            assert refusal is not None
            return _answer(MethodId.GET_MESSAGES, get_failure(refusal.code, refusal.text))
        body, count = answer_range(self.topics.store(topic, request.partitionId), request.partitionId, request.range)
        self.fetched_messages += count
        return _answer(MethodId.GET_MESSAGES, body)

    def _commit(self, payload: bytes, now_ms: int) -> Answer:  # noqa: ARG002 - the commit does not refresh the session
        request = decode(pb.CommitOffsetRequestC2B, payload)
        refusal = self._refuse_reader(None, request.clientId)
        if refusal is None and self.failure is not None:
            refusal = _Refusal(ErrCode.SERVICE_UNAVAILABLE, f"positions cannot be stored: {self.failure.what}")
        if refusal is None:
            key = (java_trim(request.groupName), java_trim(request.topicName), request.partitionId)
            topic = self.topics.by_name.get(key[1])
            holder = self._registered.get(key)
            if topic is None or not topic.has(key[2]):
                refusal = _Refusal(ErrCode.FORBIDDEN, f"topic {key[1]} has no partition {key[2]} on this broker")
            elif holder is None or holder.client_id != request.clientId.strip():
                refusal = _Refusal(ErrCode.UNAUTHORIZED, "the partition is not registered by this client")
            else:
                consumed = request.lastPackConsumed if request.HasField("lastPackConsumed") else True
                offset = self.offsets.commit(key, consumed=consumed)
                done = pb.CommitOffsetResponseB2C(
                    success=True,
                    errCode=ErrCode.SUCCESS,
                    errMsg=_OK,
                    currOffset=offset,
                    maxOffset=self.topics.store(topic, key[2]).durable_end,
                )
                return _answer(MethodId.COMMIT_OFFSET, done.SerializeToString(), wait=consumed)
        self.refused += 1
        failed = pb.CommitOffsetResponseB2C(success=False, errCode=refusal.code, errMsg=refusal.text, currOffset=-1)
        return _answer(MethodId.COMMIT_OFFSET, failed.SerializeToString())

    # Common

    def _refuse_reader(self, token: int | None, client_id: str) -> _Refusal | None:
        if self.read_stopped:
            return _Refusal(ErrCode.SERVICE_UNAVAILABLE, "reading is stopped on this broker")
        refusal = None if token is None else self._refuse_token(token)
        return refusal or _refuse_client(client_id)

    def _refuse_token(self, token: int) -> _Refusal | None:
        if self.check_tokens and token not in self.tokens:
            return _Refusal(ErrCode.CERTIFICATE_FAILURE, "the visit token is not one of this cluster (any more)")
        return None

    def add_tokens(self, tokens: Iterable[int]) -> None:
        """Visit tokens the master announced; the last six stay valid."""
        for token in tokens:
            if token in self.tokens:
                self.tokens.remove(token)
            self.tokens.append(token)
        del self.tokens[:-_TOKENS_KEPT]

    def _expire(self, key: Key) -> None:
        del self._registered[key]
        self.offsets.discard(key)

    def next_deadline(self) -> int | None:
        """When `tick` has to be called next: no session ends before."""
        return self._next_check

    def tick(self, now_ms: int) -> None:
        """Free the partitions of consumers that were silent for too long."""
        if self._next_check is None or now_ms < self._next_check:
            return
        for key in [key for key, holder in self._registered.items() if holder.deadline <= now_ms]:
            self._expire(key)
        self._next_check = min((holder.deadline for holder in self._registered.values()), default=None)

    def remove_topic(self, name: str) -> list[LogStore]:
        """Forget a topic, its readers and their positions; the stores that were open, for the shell to delete."""
        for key in [key for key in self._registered if key[1] == name]:
            del self._registered[key]
        self.offsets.forget_topic(name)
        stores = self.topics.remove(name)
        for store in stores:
            self.dirty_stores.pop(store, None)
        return stores


def _answer(method: int, payload: bytes, *, wait: bool = False) -> Answer:
    return Answer(encode_response(method, payload), wait=wait)


def _refuse_client(client_id: str) -> _Refusal | None:
    if not client_id.strip() or len(client_id) > _MAX_CLIENT_ID:
        return _Refusal(ErrCode.BAD_REQUEST, f"clientId is blank or longer than {_MAX_CLIENT_ID}")
    return None


def _near_the_head(topic: Topic, left: int) -> bool:
    """Whether a filtered reader has less than ten of the reference's filter reads before it: it should slow down."""
    records = max(8000, min(1000 * (topic.config.partitions or 1), 13_500)) * 3
    return left < 10 * records * 28
