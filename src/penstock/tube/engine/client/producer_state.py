"""State of a producer: brokers and partitions, the messages that wait for each partition, encoded requests.

:class:`Routes` has the brokers and partitions, and chooses a partition for a record. A :class:`PartitionQueue` holds
the messages of one partition until they have an outcome. :class:`SendEncoder` encodes them.

    queue.push(message)
    queue.ready() -> number and messages of a request    # to send now; None: not now
    queue.succeeded(number) | refused(number) | failed(number)
    queue.retries() -> messages to send again, messages given up; None: not now

Messages of a partition are sent in order. A request has one message, or many if the broker accepts batches. Without
``producer_id`` a failed message is sent again only while no later one is in the log. With one, messages are numbered
and the broker stores each number once and in order, so every failed message can be sent again.

No IO: time is an argument.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from penstock.errors import RefusedError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.proto import master_pb2, shared_pb2
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_PORT,
    UNDEFINED,
    BrokerInfo,
    Partition,
    TopicInfo,
    partition_ids,
)
from penstock.tube.codec.varint import encode_varint
from penstock.tube.engine.client.request_session import ClientCredentials

__all__ = ["EXCLUDED_MS", "UNTIL_RESTORED", "PartitionQueue", "QueuedMessage", "Routes", "SendEncoder", "Token"]

# --- brokers and partitions ---


EXCLUDED_MS = 50_000
"""Time for which round robin excludes a broker that answered SERVICE_UNAVAILABLE."""
UNTIL_RESTORED = 1 << 62
"""A time that never comes: a broker is excluded until it responds again."""
DEFAULT_MAX_BYTES = 1 << 20


class Routes:
    """Brokers and partitions as the master last reported them. ``start`` is the first partition of round robin,
    different for each producer.

    ``reads``: for a reader; includes partitions that currently do not accept records.
    """

    def __init__(
        self,
        client_id: str,
        host: str,
        *,
        start: int = 0,
        credentials: ClientCredentials | None = None,
        default_port: int = DEFAULT_BROKER_PORT,
        reads: bool = False,
    ) -> None:
        self.client_id = client_id
        self.host = host
        self.credentials = credentials
        self._default_port = default_port
        self._reads = reads
        self.topics: set[str] = set()
        self.unavailable: dict[str, str] = {}
        """Reason why a topic has no partition, if the master reports one."""
        self.brokers: dict[int, BrokerInfo] = {}
        self.token = UNDEFINED
        self._check_sum = -1
        self._config_id = UNDEFINED
        self._max_bytes = DEFAULT_MAX_BYTES
        self._infos: dict[str, TopicInfo] = {}
        self._partitions: dict[str, list[Partition]] = {}
        self._turn: dict[str, int] = {}
        self._start = start
        self._excluded_until: dict[int, int] = {}

    def register(self) -> master_pb2.RegisterRequestP2M:
        """Return a registration with the published topics."""
        return master_pb2.RegisterRequestP2M(
            clientId=self.client_id,
            topicList=sorted(self.topics),
            brokerCheckSum=-1,
            hostName=self.host,
            appdConfig=shared_pb2.ApprovedClientConfig(configId=UNDEFINED),
            authInfo=self._certificate(),
        )

    def registered(self, answer: master_pb2.RegisterResponseM2P) -> None:
        """Process the successful response to :meth:`register`."""
        if self.credentials is not None:
            self.credentials.authorized(answer.authorizedInfo)
        self._update(answer.brokerCheckSum, answer.brokerInfos, answer.authorizedInfo, answer.appdConfig)

    def heartbeat(self) -> master_pb2.HeartRequestP2M:
        """Return the next heartbeat to the master."""
        request = master_pb2.HeartRequestP2M(
            clientId=self.client_id,
            brokerCheckSum=self._check_sum,
            hostName=self.host,
            topicList=sorted(self.topics),
            appdConfig=shared_pb2.ApprovedClientConfig(configId=self._config_id),
            authInfo=self._certificate(),
        )
        if self._reads:
            request.wantServed = True
        return request

    def heartbeat_answered(self, answer: master_pb2.HeartResponseM2P) -> None:
        """Process the successful response to :meth:`heartbeat`: it has changed brokers, and the whole topic map."""
        if self.credentials is not None:
            self.credentials.authorized(answer.authorizedInfo, sign_again=answer.requireAuth)
        self._update(answer.brokerCheckSum, answer.brokerInfos, answer.authorizedInfo, answer.appdConfig)
        self.unavailable = dict(text.partition("#")[::2] for text in answer.unavailable)
        if answer.errCode == ErrCode.NOT_READY:
            return  # keep the known topics
        self._infos = {info.topic: info for info in map(TopicInfo.parse, answer.served or answer.topicInfos)}
        self._partitions = {}

    def close(self) -> master_pb2.CloseRequestP2M:
        """Return the request that ends the session at the master."""
        return master_pb2.CloseRequestP2M(clientId=self.client_id, authInfo=self._certificate())

    def partitions(self, topic: str) -> list[Partition]:
        """Return all partitions of ``topic``, in order; empty if the master announced none."""
        found = self._partitions.get(topic)
        if found is None:
            info = self._infos.get(topic)
            found = []
            for item in info.brokers if info is not None else ():
                broker = self.brokers.get(item.broker_id)
                if broker is not None:
                    found += [
                        Partition(broker, topic, number) for number in partition_ids(item.partitions, item.stores)
                    ]
            found.sort()
            self._partitions[topic] = found
        return found

    def max_bytes(self, topic: str) -> int:
        """Return the size in bytes of the largest value that brokers accept for ``topic``."""
        info = self._infos.get(topic)
        return info.max_message_bytes if info is not None and info.max_message_bytes else self._max_bytes

    def choose(self, topic: str, key: bytes | None, partition: int | Partition | None, now: int) -> Partition | None:
        """Choose a partition: the given one, the key's, or round-robin. None: the topic is unknown.

        A number without broker is the partition of the first broker that has it.

        A key keeps its partition while the topic's partitions stay the same, even if that broker is excluded: messages
        of one key stay in order. Round robin skips excluded brokers while there are others.

        Raises:
            RefusedError: the topic has no such partition.
        """
        known = self.partitions(topic)
        if not known:
            return None
        if partition is not None:
            broker, number = (None, partition) if isinstance(partition, int) else (partition.broker.id, partition.id)
            for candidate in known:
                if candidate.id == number and broker in {None, candidate.broker.id}:
                    return candidate
            name = number if broker is None else f"{broker}:{number}"
            there = ", ".join(f"{candidate.broker.id}:{candidate.id}" for candidate in known)
            raise RefusedError(
                f"tube: topic {topic!r} has no partition {name}",
                code=403,
                why=f"it has {there}",
                hint="choose one of these, or none: records are then distributed over all partitions",
            )
        if key is not None:
            return known[zlib.crc32(key) % len(known)]
        turn = self._turn.get(topic, self._start) + 1
        if self._excluded_until:
            for ahead in range(len(known)):
                candidate = known[(turn + ahead) % len(known)]
                if not self.excluded(candidate.broker.id, now):
                    turn += ahead
                    break
        self._turn[topic] = turn
        return known[turn % len(known)]

    def exclude(self, broker_id: int, until: int) -> None:
        """Exclude a broker from round robin until a time in ms, or :data:`UNTIL_RESTORED`."""
        self._excluded_until[broker_id] = until

    def restore(self, broker_id: int) -> None:
        """Include a broker that responds again in round robin, unless it is excluded until a certain time."""
        if self._excluded_until.get(broker_id) == UNTIL_RESTORED:
            del self._excluded_until[broker_id]

    def excluded(self, broker_id: int, now: int) -> bool:
        """Return True if round robin excludes this broker at ``now``."""
        until = self._excluded_until.get(broker_id)
        if until is None:
            return False
        if until <= now:
            del self._excluded_until[broker_id]
            return False
        return True

    def broker_token(self) -> str:
        """Return authAuthorizedToken of requests to brokers; blank without a user."""
        return "" if self.credentials is None else self.credentials.broker_token()

    def _certificate(self) -> shared_pb2.MasterCertificateInfo | None:
        return None if self.credentials is None else self.credentials.certificate()

    def _update(
        self,
        check_sum: int,
        brokers: Iterable[str],
        authorized: shared_pb2.MasterAuthorizedInfo,
        config: shared_pb2.ApprovedClientConfig,
    ) -> None:
        if authorized.visitAuthorizedToken:
            self.token = authorized.visitAuthorizedToken
        if config.HasField("maxMsgSize"):
            self._max_bytes = config.maxMsgSize
        self._config_id = config.configId or UNDEFINED
        infos = [BrokerInfo.parse(text, self._default_port) for text in brokers]
        if check_sum != self._check_sum and infos:
            self._check_sum = check_sum
            self.brokers = {info.id: info for info in infos}
            self._partitions = {}


# --- messages of one partition ---


class QueuedMessage(Protocol):
    """A message in a queue. ``sequence`` is set by the queue: -1 before the message is first sent."""

    data: bytes
    sequence: int

    @property
    def abandoned(self) -> bool:
        """True if the caller no longer waits for the message."""
        ...


T = TypeVar("T", bound=QueuedMessage)


class PartitionQueue(Generic[T]):
    """Messages of one partition. ``batch`` (messages, bytes) and ``requests`` in flight may be changed at any time.

    ``new_producer_id`` returns random ids > 0 for numbered messages; None: they are not numbered. ``reorder``: send a
    failed message again even after later ones are stored.
    """

    def __init__(
        self,
        target: Partition,
        *,
        requests: int,
        batch: tuple[int, int] = (1, 0),
        reorder: bool = False,
        new_producer_id: Callable[[], int] | None = None,
    ) -> None:
        self.target = target
        self.requests = requests
        self.batch = batch
        self.held = False
        self.scheduled = False  # set by the shell: sending is scheduled in this loop turn
        self.producer_id = 0
        self.abandoned: list[T] = []
        """Skipped messages that no caller waits for; the shell removes them."""
        self._reorder = reorder
        self._new_producer_id: Callable[[], int] | None = None
        self._renumber = False
        self._next_sequence = 0
        self._waiting: deque[T] = deque()
        self._flight: dict[int, list[T]] = {}  # in the order of sending
        self._failed: list[tuple[int, list[T]]] = []
        self._sent = 0
        self._overtaken = -1  # number of the latest request that succeeded
        self.number_with(new_producer_id)

    def number_with(self, new_producer_id: Callable[[], int] | None) -> None:
        """Number the messages from now on, or no longer (None). Changes nothing if that is so already."""
        if (new_producer_id is None) != (self._new_producer_id is None):
            self._new_producer_id = new_producer_id
            self._renumber = new_producer_id is not None
            self.producer_id = 0
            for message in self._waiting:
                message.sequence = -1

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._flight.values())) + sum(len(batch) for _, batch in self._failed)

    @property
    def in_flight(self) -> bool:
        """True if the outcome of a request is not known yet."""
        return bool(self._flight)

    @property
    def empty(self) -> bool:
        """True if every message has an outcome."""
        return not (self._waiting or self._flight or self._failed)

    @property
    def oldest_sequence(self) -> int:
        """Return the lowest sequence number without a response."""
        for batch in self._flight.values():
            return batch[0].sequence
        return self._next_sequence

    def push(self, message: T) -> None:
        """Append ``message``."""
        self._waiting.append(message)

    def ready(self) -> tuple[int, list[T]] | None:
        """Return the number and the messages of the next request; None: nothing can be sent now."""
        if self.held or self._failed or not self._waiting or len(self._flight) >= self.requests:
            return None
        if self._renumber and not self._renumbered():
            return None
        waiting = self._waiting
        most, most_bytes = self.batch
        size = 0
        messages: list[T] = []
        while waiting and len(messages) < most:
            message = waiting[0]
            size += len(message.data)
            if messages and size > most_bytes:
                break
            waiting.popleft()
            if message.sequence < 0:
                if message.abandoned:
                    self.abandoned.append(message)
                    size -= len(message.data)
                    continue
                if self.producer_id:
                    message.sequence = self._next_sequence
                    self._next_sequence += 1
            messages.append(message)
        if not messages:
            return None
        self._sent += 1
        self._flight[self._sent] = messages
        return self._sent, messages

    def succeeded(self, number: int) -> list[T]:
        """Return the messages of a request that are stored now; empty if the request is not known."""
        messages = self._flight.pop(number, None)
        if messages is None:
            return []
        self._overtaken = max(self._overtaken, number)
        return messages

    def refused(self, number: int) -> list[T]:
        """Return the messages of a request that the broker refused permanently; they leave the queue."""
        messages = self._flight.pop(number, None) or []
        if self.producer_id and messages:
            self._renumber = True  # their numbers are missing: later messages get new numbers
        return messages

    def failed(self, number: int) -> list[T]:
        """Mark the messages of a request to be sent again, and return them."""
        messages = self._flight.pop(number, None)
        if messages is None:
            return []
        self._failed.append((number, messages))
        return messages

    def retries(self) -> tuple[list[T], list[T]] | None:
        """Return the messages to send again, now at the front of the queue, and the abandoned messages.

        A message is abandoned if a later one is stored, because it would be stored out of order. None while requests
        are in flight, or if none failed.
        """
        if not self._failed or self._flight:
            return None
        retry: list[T] = []
        given_up: list[T] = []
        for number, messages in sorted(self._failed, key=lambda item: item[0]):
            keep = number > self._overtaken or self._reorder or self.producer_id
            (retry if keep else given_up).extend(messages)
        self._failed = []
        self._waiting.extendleft(reversed(retry))
        return retry, given_up

    def remove_waiting(self, leaves: Callable[[T], bool]) -> list[T]:
        """Remove and return waiting messages for which ``leaves`` is true, except numbered ones, which may be
        stored."""
        taken: list[T] = []
        kept: deque[T] = deque()
        for message in self._waiting:
            (taken if message.sequence < 0 and leaves(message) else kept).append(message)
        if taken:
            self._waiting = kept
        return taken

    def take_all(self, since: int = 0) -> list[T]:
        """Remove and return all messages, in order, but those of requests before ``since``; outcomes of requests in
        flight are then ignored.

        Numbered messages lose their numbers: later ones begin a new sequence.
        """
        sent = [item for item in (*self._flight.items(), *self._failed) if item[0] >= since]
        sent.sort(key=lambda item: item[0])
        taken = [*(message for _, batch in sent for message in batch), *self._waiting]
        self._flight = {number: batch for number, batch in self._flight.items() if number < since}
        self._failed = [item for item in self._failed if item[0] < since]
        self._waiting.clear()
        for message in taken:
            message.sequence = -1
        self._renumber = self._new_producer_id is not None
        return taken

    def numbered(self) -> list[T]:
        """Return waiting messages that were sent with a number before."""
        return [message for message in self._waiting if message.sequence >= 0]

    def messages_of(self, number: int) -> list[T]:
        """Return the messages of a request in flight; empty if the request is not known."""
        return self._flight.get(number, [])

    def messages(self) -> list[T]:
        """Return all messages without an outcome."""
        sent = [*self._flight.values(), *(batch for _, batch in self._failed)]
        return [*(message for batch in sent for message in batch), *self._waiting]

    def _renumbered(self) -> bool:
        """Begin a new sequence once no message of the old one is in flight; False until then."""
        assert self._new_producer_id is not None
        if self._flight:
            return False
        self.producer_id = self._new_producer_id()
        self._next_sequence = 0
        for message in self._waiting:
            message.sequence = -1
        self._renumber = False
        return True


# --- requests ---


Token = tuple[int, str]
"""Visit token of the master, and token of the user; blank without a user."""

_REMEMBERED = 1024


class SendEncoder:
    """Encodes SendMessageRequestP2B of one client; ``address`` is its IPv4 address as a number.

    The fields before and after the payload repeat, so each combination is encoded once. Fields are in the order of
    their numbers, as protobuf writes them. The counterpart is `broker.send_decoder.SendDecoder`.
    """

    def __init__(self, client_id: str, address: int) -> None:
        self._client_id = client_id
        self._address = address
        self._heads: dict[tuple[str, int], bytes] = {}
        self._tails: dict[tuple[int, str | None, str | None, Token], bytes] = {}

    def one(
        self, target: Partition, data: bytes, flag: int, msg_type: str | None, msg_time: str | None, token: Token
    ) -> bytes:
        """Encode a request with one message."""
        place = (target.topic, target.id)
        head = self._heads.get(place)
        if head is None:
            head = self._heads[place] = self._head(target).SerializePartialToString()
        kind = (flag, msg_type, msg_time, token)
        tail = self._tails.get(kind)
        if tail is None:
            if len(self._tails) >= _REMEMBERED:
                self._tails.clear()
            tail = self._tails[kind] = self._tail(*kind).SerializePartialToString()
        return b"%b\x22%b%b%b" % (head, encode_varint(len(data)), data, tail)

    def numbered(self, request: bytes, producer_id: int, sequence: int, oldest: int) -> bytes:
        """Append the producer's sequence number to ``request``."""
        extension = pb.SendMessageRequestP2B()
        extension.producer.producerId = producer_id
        extension.producer.sequence = sequence
        extension.producer.oldest = oldest
        return request + extension.SerializePartialToString()

    def encode_batch(
        self, target: Partition, datas: Sequence[bytes], flags: Sequence[int], types: Sequence[str | None], token: Token
    ) -> bytes:
        """Encode a request with a batch of messages."""
        head = self._head(target)
        head.data = b""
        first_flag, first_type = flags[0], types[0]
        tail = self._tail(first_flag, first_type, None, token)
        tail.batch.datas.extend(datas)
        if any(flag != first_flag for flag in flags):
            tail.batch.flags.extend(flags)
        if any(text != first_type for text in types):
            tail.batch.msgTypes.extend([text or "" for text in types])
        return head.SerializePartialToString() + tail.SerializePartialToString()

    def probe(self, target: Partition, token: Token) -> bytes:
        """Encode a batch without messages: the response shows which extensions the broker has."""
        request = self._tail(0, None, None, token)
        request.MergeFrom(self._head(target))
        request.data = b""
        request.batch.SetInParent()
        return request.SerializeToString()

    def transaction(self, asked: pb.Transaction, token: Token) -> pb.SendMessageRequestP2B:
        """Build a request that stages rows or commits them: it has no message of its own."""
        request = self._tail(0, None, None, token)
        request.clientId, request.topicName, request.partitionId, request.data = self._client_id, "", 0, b""
        request.transaction.CopyFrom(asked)
        return request

    def _head(self, target: Partition) -> pb.SendMessageRequestP2B:
        return pb.SendMessageRequestP2B(clientId=self._client_id, topicName=target.topic, partitionId=target.id)

    def _tail(self, flag: int, msg_type: str | None, msg_time: str | None, token: Token) -> pb.SendMessageRequestP2B:
        tail = pb.SendMessageRequestP2B(flag=flag, checkSum=-1, sentAddr=self._address, msgType=msg_type)
        if msg_time is not None:
            tail.msgTime = msg_time
        tail.authInfo.visitAuthorizedToken = token[0]
        if token[1]:
            tail.authInfo.authAuthorizedToken = token[1]
        return tail
