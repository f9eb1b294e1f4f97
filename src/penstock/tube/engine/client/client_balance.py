"""A consumer that chooses its partitions itself ("client balance"): the master only tells which there are.

    request = member.register();  member.registered(answer)
    request = member.question();  member.told(answer)            # which partitions there are
    request = member.heartbeat(now);  orders = member.heard(answer, now)

With ``source_count`` members (each with its own ``node_id``) every one takes the partitions of its turn; without, all.
Brokers still serve a partition to one member at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.errors import ConfigError, RefusedError
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.proto import master_pb2
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_PORT,
    UNDEFINED,
    BrokerInfo,
    Partition,
    TopicMeta,
    format_condition,
    partition_ids,
)
from penstock.tube.engine.client.consumer_group import FRESH, GroupMember, Orders
from penstock.tube.engine.client.credentials import ClientCredentials

__all__ = ["ClientBalance"]

REPORT_EVERY = 60  # heartbeats between full reports of what is held


class ClientBalance(GroupMember):
    """One member that balances itself. ``assigned``: what the application chose; None: its share of all."""

    def __init__(
        self,
        client_id: str,
        host: str,
        group: str,
        topics: Iterable[str],
        filters: Mapping[str, Iterable[str]],
        *,
        source_count: int = 0,
        node_id: int = 0,
        priority: int = FRESH,
        credentials: ClientCredentials | None = None,
        session_ms: int = 0,
        default_port: int = DEFAULT_BROKER_PORT,
    ) -> None:
        super().__init__(
            client_id, host, group, topics, filters, priority=priority, credentials=credentials, session_ms=session_ms
        )
        self._default_port = default_port
        if source_count and not 0 <= node_id < source_count:
            raise ConfigError(
                f"tube: node_id {node_id} is not possible", option="node_id", do=f"choose 0 to {source_count - 1}"
            )
        self.assigned: frozenset[str] | None = None
        self._source_count = source_count
        self._node_id = node_id
        self._brokers: dict[int, BrokerInfo] = {}
        self._brokers_id = UNDEFINED
        self._topics: dict[str, TopicMeta] = {}
        self._topics_id = UNDEFINED
        self._assigned_at = 0
        self._beats = 0
        self._report = False

    def register(self) -> master_pb2.RegisterRequestC2MV2:
        """Also after a 411: with what is held."""
        self._brokers_id = self._topics_id = UNDEFINED
        return master_pb2.RegisterRequestC2MV2(
            clientId=self.client_id,
            groupName=self.group,
            hostName=self.host,
            sourceCount=self._source_count or UNDEFINED,
            nodeId=self._node_id,
            topicList=self.topics,
            topicCondition=[format_condition(topic, items) for topic, items in sorted(self.filters.items())],
            subRepInfo=self._holding(report=bool(self.held)),
            authInfo=self._certificate(),
            sessionTimeoutMs=self.session_ms or None,
        )

    def registered(self, answer: master_pb2.RegisterResponseM2CV2) -> None:
        """The master's answer to ``register``, a success."""
        self._take_token(answer.authorizedInfo)
        self._take_brokers(answer.brokerConfigId, answer.brokerConfigList)

    def question(self) -> master_pb2.GetPartMetaRequestC2M:
        """The request for the partitions that exist."""
        return master_pb2.GetPartMetaRequestC2M(
            clientId=self.client_id,
            groupName=self.group,
            brokerConfigId=self._brokers_id,
            topicMetaInfoId=self._topics_id,
            authInfo=self._certificate(),
        )

    def told(self, answer: master_pb2.GetPartMetaResponseM2C, now: int) -> Orders:
        """The answer to :meth:`question`, and what it asks for."""
        if answer.errCode == ErrCode.HB_NO_NODE:
            return Orders(register=True)
        _accepted(answer.errCode, answer.errMsg)
        self._take_brokers(answer.brokerConfigId, answer.brokerConfigList)
        self._take_topics(answer.topicMetaInfoId, answer.topicMetaInfoList, now)
        return self.orders()

    def heartbeat(self) -> master_pb2.HeartRequestC2MV2:
        """The next heartbeat to the master; now and then with all that is held."""
        self._beats += 1
        return master_pb2.HeartRequestC2MV2(
            clientId=self.client_id,
            groupName=self.group,
            subRepInfo=self._holding(report=self._report or self._beats % REPORT_EVERY == 1),
            authInfo=self._certificate(),
        )

    def heard(self, answer: master_pb2.HeartResponseM2CV2, now: int) -> Orders:
        """The answer to :meth:`heartbeat`, and what it asks for."""
        if answer.errCode == ErrCode.HB_NO_NODE:
            return Orders(register=True)
        _accepted(answer.errCode, answer.errMsg)
        self._report = False
        self._take_token(answer.authorizedInfo, again=answer.opsTaskInfo.requireAuth)
        self._take_brokers(answer.brokerConfigId, answer.brokerConfigList)
        if answer.topicMetaInfoList:
            self._take_topics(answer.topicMetaInfoId, answer.topicMetaInfoList, now)
        return self.orders()

    def partitions(self) -> dict[Partition, bool]:
        """Every partition of the group's topics, in order, and whether it may be consumed now."""
        found = {}
        for topic, meta in sorted(self._topics.items()):
            for item, open_ in meta.brokers:
                broker = self._brokers.get(item.broker_id)
                for number in partition_ids(item.partitions, item.stores) if broker is not None else ():
                    assert broker is not None
                    found[Partition(broker, topic, number)] = open_
        return dict(sorted(found.items()))

    def orders(self) -> Orders:
        """The partitions to take and to release, so that the chosen ones are held."""
        known = self.partitions()
        if self.assigned is not None:
            wanted = {partition for partition in known if partition.key in self.assigned}
        else:
            count = self._source_count or 1
            wanted = {partition for turn, partition in enumerate(known) if turn % count == self._node_id % count}
        take = tuple(sorted(partition for partition in wanted - self.held if known[partition]))
        return Orders(take, tuple(sorted(self.held - wanted)) if known else ())

    def lost(self, partition: Partition) -> None:
        """The partition is not held any more; the master hears of it."""
        super().lost(partition)
        self._report = True

    def changed(self) -> None:
        """The held partitions changed: report it with the next heartbeat."""
        self._report = True

    def _holding(self, *, report: bool) -> master_pb2.ClientSubRepInfo:
        info = master_pb2.ClientSubRepInfo(
            brokerConfigId=self._brokers_id, topicMetaInfoId=self._topics_id, reportSubInfo=report
        )
        if self._assigned_at:
            info.lstAssignedTime = self._assigned_at
        if report:
            by_topic: dict[str, list[str]] = {}
            for partition in sorted(self.held):
                by_topic.setdefault(partition.topic, []).append(f"{partition.broker.id}:{partition.id}")
            info.partSubInfo.extend(f"{topic}#{','.join(items)}" for topic, items in by_topic.items())
        return info

    def _take_brokers(self, number: int, texts: Iterable[str]) -> None:
        brokers = [BrokerInfo.parse(text, self._default_port) for text in texts]
        if brokers:
            self._brokers_id = number
            self._brokers = {broker.id: broker for broker in brokers}

    def _take_topics(self, number: int, texts: Iterable[str], now: int) -> None:
        topics = [TopicMeta.parse(text) for text in texts]
        if topics:
            self._topics_id = number
            self._topics = {meta.topic: meta for meta in topics}
        self._assigned_at = now


def _accepted(code: int, text: str) -> None:
    if code != ErrCode.SUCCESS:
        raise RefusedError(f"tube: the master refuses: {text}", code=code, text=text, do=remedy(code))
