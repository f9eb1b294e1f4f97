"""The producer's rules: where a message goes, what a failed one may do.

Two parts. ``Routes`` is what the master told: brokers, topics, partitions, who is avoided. A ``Lane`` is the way to
one partition: messages leave in order, many in flight, and a failed one is sent again only while that cannot change
their order in the log.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from penstock.errors import RefusedError
from penstock.tube.codec.proto import master_pb2, shared_pb2
from penstock.tube.codec.strings import UNDEFINED, BrokerInfo, Partition, TopicInfo, partition_ids

__all__ = ["AVOID_MS", "Lane", "Routes"]

AVOID_MS = 50_000  # a broker that answered 503
DEFAULT_MAX_BYTES = 1 << 20

T = TypeVar("T")


class Routes:
    """Brokers and partitions as the master last told them. ``start`` spreads the round robins of many producers."""

    def __init__(self, client_id: str, host: str, *, start: int = 0) -> None:
        self.client_id = client_id
        self.host = host
        self.topics: set[str] = set()
        self.brokers: dict[int, BrokerInfo] = {}
        self.token = UNDEFINED
        self._check_sum = -1
        self._config_id = UNDEFINED
        self._max_bytes = DEFAULT_MAX_BYTES
        self._infos: dict[str, TopicInfo] = {}
        self._partitions: dict[str, list[Partition]] = {}
        self._turn: dict[str, int] = {}
        self._start = start
        self._avoid: dict[int, int] = {}

    def register(self) -> master_pb2.RegisterRequestP2M:
        return master_pb2.RegisterRequestP2M(
            clientId=self.client_id,
            topicList=sorted(self.topics),
            brokerCheckSum=-1,
            hostName=self.host,
            appdConfig=shared_pb2.ApprovedClientConfig(configId=UNDEFINED),
        )

    def registered(self, answer: master_pb2.RegisterResponseM2P) -> None:
        """The master's answer to ``register``, a success."""
        self._take(answer.brokerCheckSum, answer.brokerInfos, answer.authorizedInfo, answer.appdConfig)

    def heartbeat(self) -> master_pb2.HeartRequestP2M:
        return master_pb2.HeartRequestP2M(
            clientId=self.client_id,
            brokerCheckSum=self._check_sum,
            hostName=self.host,
            topicList=sorted(self.topics),
            appdConfig=shared_pb2.ApprovedClientConfig(configId=self._config_id),
        )

    def heard(self, answer: master_pb2.HeartResponseM2P) -> None:
        """The master's answer to ``heartbeat``, a success: brokers first, then the whole topic map anew."""
        self._take(answer.brokerCheckSum, answer.brokerInfos, answer.authorizedInfo, answer.appdConfig)
        if answer.errCode == 201:
            return  # "not ready": keep what is known
        self._infos = {info.topic: info for info in map(TopicInfo.parse, answer.topicInfos)}
        self._partitions = {}

    def partitions(self, topic: str) -> list[Partition]:
        """All partitions of ``topic``, in order; empty when the master announced none."""
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
        """The largest body that brokers take for ``topic``."""
        info = self._infos.get(topic)
        return info.max_message_bytes if info is not None and info.max_message_bytes else self._max_bytes

    def choose(self, topic: str, key: bytes | None, partition: int | None, now: int) -> Partition | None:
        """Where a message goes: the partition named, the one of its key, else the next in turn. None: topic unknown.

        A key keeps its partition while the topic's partitions stay the same, even if that broker is avoided: messages
        of one key stay in order. Round robin leaves out avoided brokers while there are others.

        Raises:
            RefusedError: the topic has no such partition.
        """
        known = self.partitions(topic)
        if not known:
            return None
        if partition is not None:
            for candidate in known:
                if candidate.id == partition:
                    return candidate
            ids = sorted({candidate.id for candidate in known})
            raise RefusedError(f"tube: topic {topic!r} has no partition {partition}", code=403, why=f"it has {ids}")
        if key is not None:
            return known[zlib.crc32(key) % len(known)]
        turn = self._turn.get(topic, self._start) + 1
        if self._avoid:
            for ahead in range(len(known)):
                candidate = known[(turn + ahead) % len(known)]
                if not self.avoided(candidate.broker.id, now):
                    turn += ahead
                    break
        self._turn[topic] = turn
        return known[turn % len(known)]

    def avoid(self, broker_id: int, until: int) -> None:
        """Round robin leaves this broker out until then."""
        self._avoid[broker_id] = until

    def avoided(self, broker_id: int, now: int) -> bool:
        until = self._avoid.get(broker_id)
        if until is None:
            return False
        if until <= now:
            del self._avoid[broker_id]
            return False
        return True

    def _take(
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
        infos = [BrokerInfo.parse(text) for text in brokers]
        if check_sum != self._check_sum and infos:
            self._check_sum = check_sum
            self.brokers = {info.id: info for info in infos}
            self._partitions = {}


class Lane(Generic[T]):
    """The way to one partition: ``push`` messages, send what ``ready`` gives, tell what came of it.

    After a failure that may be retried nothing more leaves until all that is in flight has an outcome. Then ``again``
    says which messages go first, and which cannot be retried because a later one is in the log already.
    """

    def __init__(self, target: Partition, *, window: int) -> None:
        self.target = target
        self.window = window
        self._waiting: deque[T] = deque()
        self._flight: dict[int, T] = {}  # in the order of sending
        self._failed: list[tuple[int, T]] = []
        self._sent = 0
        self._overtaken = -1  # number of the latest message that succeeded
        self.held = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flight) + len(self._failed)

    def push(self, message: T) -> None:
        self._waiting.append(message)

    def ready(self) -> tuple[int, T] | None:
        """The next message to send, with the number under which to tell its outcome; None: not now."""
        if self.held or self._failed or not self._waiting or len(self._flight) >= self.window:
            return None
        self._sent += 1
        message = self._waiting.popleft()
        self._flight[self._sent] = message
        return self._sent, message

    def succeeded(self, number: int) -> T | None:
        """The message is in the log (or refused for good: it is through either way). None: not known any more."""
        message = self._flight.pop(number, None)
        if message is not None:
            self._overtaken = max(self._overtaken, number)
        return message

    def refused(self, number: int) -> T | None:
        """The message can never be stored: it is given up and nothing waits for it."""
        return self._flight.pop(number, None)

    def failed(self, number: int) -> T | None:
        """The message may be tried again."""
        message = self._flight.pop(number, None)
        if message is not None:
            self._failed.append((number, message))
        return message

    def again(self) -> tuple[list[T], list[T]] | None:
        """Once nothing is in flight after a failure: messages to send again, which now wait first, and those given up.

        Given up are those that a later one has overtaken: stored now they would stand behind it. None while in flight,
        or when nothing failed.
        """
        if not self._failed or self._flight:
            return None
        failed = sorted(self._failed, key=lambda item: item[0])
        self._failed = []
        retry = [message for number, message in failed if number > self._overtaken]
        given_up = [message for number, message in failed if number < self._overtaken]
        self._waiting.extendleft(reversed(retry))
        return retry, given_up

    def drop(self, message: T) -> bool:
        """Take a waiting message out (its time is over); False when it is not waiting."""
        try:
            self._waiting.remove(message)
        except ValueError:
            return False
        return True

    def waiting(self) -> list[T]:
        """Messages that have not been sent, or wait to be sent again."""
        return list(self._waiting)

    def messages(self) -> list[T]:
        """All messages without an outcome."""
        return [*self._flight.values(), *(message for _, message in self._failed), *self._waiting]

    def take_waiting(self) -> list[T]:
        """All waiting messages, which leave this lane."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting
