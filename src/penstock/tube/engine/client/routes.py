"""The producer's routes: brokers, topics and partitions as the master told them, and who is avoided."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from penstock.errors import RefusedError
from penstock.tube.codec.proto import master_pb2, shared_pb2
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_PORT,
    UNDEFINED,
    BrokerInfo,
    Partition,
    TopicInfo,
    partition_ids,
)
from penstock.tube.engine.client.credentials import ClientCredentials

__all__ = ["AVOID_MS", "UNTIL_RESTORED", "Routes"]

AVOID_MS = 50_000  # a broker that answered 503
UNTIL_RESTORED = 1 << 62
DEFAULT_MAX_BYTES = 1 << 20


class Routes:
    """Brokers and partitions as the master last told them. ``start`` spreads the round robins of many producers.

    ``reads``: not to produce but to read; what takes no records at present counts as well.
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
        """The reason why a topic has no partition, if the master reports it."""
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
        """Registers at the master, with the topics that are published."""
        return master_pb2.RegisterRequestP2M(
            clientId=self.client_id,
            topicList=sorted(self.topics),
            brokerCheckSum=-1,
            hostName=self.host,
            appdConfig=shared_pb2.ApprovedClientConfig(configId=UNDEFINED),
            authInfo=self._certificate(),
        )

    def registered(self, answer: master_pb2.RegisterResponseM2P) -> None:
        """The master's answer to ``register``, a success."""
        if self.credentials is not None:
            self.credentials.take(answer.authorizedInfo, again=False)
        self._take(answer.brokerCheckSum, answer.brokerInfos, answer.authorizedInfo, answer.appdConfig)

    def heartbeat(self) -> master_pb2.HeartRequestP2M:
        """The next heartbeat to the master."""
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

    def heard(self, answer: master_pb2.HeartResponseM2P) -> None:
        """The master's answer to ``heartbeat``, a success: brokers first, then the whole topic map anew."""
        if self.credentials is not None:
            self.credentials.take(answer.authorizedInfo, again=answer.requireAuth)
        self._take(answer.brokerCheckSum, answer.brokerInfos, answer.authorizedInfo, answer.appdConfig)
        self.unavailable = dict(text.partition("#")[::2] for text in answer.unavailable)
        if answer.errCode == 201:
            return  # "not ready": keep what is known
        self._infos = {info.topic: info for info in map(TopicInfo.parse, answer.served or answer.topicInfos)}
        self._partitions = {}

    def close(self) -> master_pb2.CloseRequestP2M:
        """Goodbye to the master."""
        return master_pb2.CloseRequestP2M(clientId=self.client_id, authInfo=self._certificate())

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

    def choose(self, topic: str, key: bytes | None, partition: int | Partition | None, now: int) -> Partition | None:
        """Choose a partition: the one named, that of the key, else the next in turn. None: the topic is unknown.

        A number alone means that partition of the first broker that has it.

        A key keeps its partition while the topic's partitions stay the same, even if that broker is avoided: messages
        of one key stay in order. Round robin leaves out avoided brokers while there are others.

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
            raise RefusedError(f"tube: topic {topic!r} has no partition {name}", code=403, why=f"it has {there}")
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
        """Round robin leaves this broker out until then, or :data:`UNTIL_RESTORED`."""
        self._avoid[broker_id] = until

    def restore(self, broker_id: int) -> None:
        """The broker answers again: round robin uses it, unless it is left out until a certain time."""
        if self._avoid.get(broker_id) == UNTIL_RESTORED:
            del self._avoid[broker_id]

    def avoided(self, broker_id: int, now: int) -> bool:
        """Whether round robin leaves this broker out at ``now``."""
        until = self._avoid.get(broker_id)
        if until is None:
            return False
        if until <= now:
            del self._avoid[broker_id]
            return False
        return True

    def broker_token(self) -> str:
        """authAuthorizedToken of requests to brokers; blank without a user."""
        return "" if self.credentials is None else self.credentials.broker_token()

    def _certificate(self) -> shared_pb2.MasterCertificateInfo | None:
        return None if self.credentials is None else self.credentials.certificate()

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
        infos = [BrokerInfo.parse(text, self._default_port) for text in brokers]
        if check_sum != self._check_sum and infos:
            self._check_sum = check_sum
            self.brokers = {info.id: info for info in infos}
            self._partitions = {}
