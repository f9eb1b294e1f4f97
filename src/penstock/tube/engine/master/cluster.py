"""Brokers and topics of a cluster: the configuration, and the topics that each broker reported.

A topic can be used on a broker as soon as the broker has reported it. The reference waits 30 s between opening a topic
for consumers and for producers; penstock does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_TLS_PORT,
    OFFSET_HISTORY_TOPIC,
    BrokerInfo,
    BrokerTopic,
    DefaultConfig,
    Partition,
    TopicConfig,
    TopicInfo,
    TopicMeta,
    conf_check_sum,
    partition_ids,
)
from penstock.tube.engine.master.settings import TOPIC_REMOVED, TopicSetting

__all__ = ["Cluster", "RegisteredBroker", "parse_broker_id"]

_MOST_NAMED = 3
_SYSTEM = TopicConfig(OFFSET_HISTORY_TOPIC, partitions=10)


class RegisteredBroker:
    """A broker that registered since the master started. ``serving``: its last reported topics."""

    __slots__ = (
        "check_sum",
        "config_id",
        "connection",
        "disconnected_at",
        "failure",
        "info",
        "interval_ms",
        "last_seen",
        "need_report",
        "online",
        "overdue",
        "push",
        "read_status",
        "removed",
        "rivals",
        "serving",
        "stop_read",
        "stop_write",
        "tls",
        "tls_port",
        "topics",
        "web_address",
        "write_status",
        "yields_until",
    )

    def __init__(self, info: BrokerInfo, config_id: int) -> None:
        self.info = info
        self.tls = False
        self.tls_port = 0
        self.web_address = ""  # of its administration; blank if not reported
        self.online = False  # True if it has a session: registered, and neither closed nor expired
        self.connection: object = None  # connection on which it registered
        self.disconnected_at: int | None = None  # time when that connection ended; None if it is open
        self.last_seen = 0
        self.interval_ms = 0  # largest recent time between two heartbeats; 0 before the first one
        self.overdue = False  # True if its next heartbeat is late: producers use other brokers
        self.rivals: dict[tuple[str, int], int] = {}  # other addresses that were refused, with the first time
        self.yields_until = 0  # time until which a broker that had this id at an earlier master may take it
        self.config_id = config_id
        self.check_sum = 0
        self.topics: list[str] = []  # configuration texts to send
        self.need_report = False
        self.push = False  # True if its configuration must be sent with the next heartbeat
        self.read_status = 0
        self.write_status = 0
        self.failure = ""  # reason of a write status of -1, if the broker reports it
        self.serving: dict[str, TopicConfig] = {}
        self.stop_read = False  # requested by the administrator
        self.stop_write = False
        self.removed: set[str] = set()  # topics whose data the broker has removed

    @property
    def tls_info(self) -> BrokerInfo:
        """The broker's address for clients that use TLS."""
        return self.info._replace(port=self.tls_port or DEFAULT_BROKER_TLS_PORT)


class Cluster:
    """Configuration and reports of the brokers. ``version`` is the brokerCheckSum: a new one for each broker list."""

    def __init__(self, topics: Iterable[TopicSetting], default: DefaultConfig, now: int) -> None:
        self.default = default
        self.default_text = default.format()
        self.topics = {topic.name: topic for topic in topics}
        self._removing = {topic.name for topic in self.topics.values() if topic.removing}
        self.brokers: dict[int, RegisteredBroker] = {}
        self.version = now
        self._started = now

    def register(self, info: BrokerInfo, now: int) -> RegisteredBroker:
        """Register a broker, possibly again and with another address."""
        broker = self.brokers.get(info.id)
        if broker is None:
            broker = self.brokers[info.id] = RegisteredBroker(info, self._started)
            self._configure(broker)
            self._new_version(now)
        elif broker.info != info:
            broker.info = info
            broker.rivals = {}
            self._new_version(now)
        broker.online = True
        broker.last_seen = now
        broker.interval_ms = 0
        broker.overdue = False
        broker.serving = {}
        return broker

    def seen(self, broker: RegisteredBroker, now: int) -> None:
        """Register a heartbeat, and how often they come.

        After an interruption the interval falls by an eighth per heartbeat.
        """
        broker.interval_ms = max(now - broker.last_seen, broker.interval_ms * 7 // 8, 1)
        broker.last_seen = now
        broker.overdue = False

    def lost(self, broker: RegisteredBroker) -> None:
        """End a broker's session. It stays in the broker list, like configured brokers."""
        broker.online = False
        broker.serving = {}
        broker.rivals = {}

    def forget(self, broker_id: int, now: int) -> None:
        """Remove a broker from the list unless it is online. It may register again."""
        broker = self.brokers.get(broker_id)
        if broker is not None and not broker.online:
            del self.brokers[broker_id]
            self._new_version(now)

    def put_topic(self, topic: TopicSetting) -> None:
        """Create or change a topic; brokers get it with their next heartbeat."""
        self.topics[topic.name] = topic
        if topic.removing:
            self._removing.add(topic.name)
        else:
            self._removing.discard(topic.name)
        for broker in self.brokers.values():
            if topic.at(broker.info.id).status != TOPIC_REMOVED:
                broker.removed.discard(topic.name)
            self._configure(broker)

    def drop_topic(self, name: str) -> None:
        """Remove a topic; a topic of the same name may be created."""
        self.topics.pop(name, None)
        self._removing.discard(name)
        for broker in self.brokers.values():
            broker.removed.discard(name)
            self._configure(broker)

    def removals(self, broker: RegisteredBroker) -> list[str]:
        """removeTopicConfInfo: topics whose data the broker must remove."""
        number = broker.info.id
        return [
            topic.config(self.default, number).format()
            for topic in map(self.topics.__getitem__, sorted(self._removing))
            if topic.on(number) and topic.at(number).status == TOPIC_REMOVED and topic.name not in broker.removed
        ]

    def removed_on(self, broker: RegisteredBroker, names: Iterable[str]) -> None:
        """Register that the broker has removed the data of these topics."""
        for name in names:
            topic = self.topics.get(name)
            if topic is not None and topic.at(broker.info.id).status == TOPIC_REMOVED:
                broker.removed.add(name)
                broker.serving.pop(name, None)

    def cleared(self) -> list[TopicSetting]:
        """Return the topics that are being removed, without the brokers that have removed their data.

        ``brokers`` is empty if no online broker has the topic any more: the topic can be deleted.
        """
        found = []
        for topic in map(self.topics.__getitem__, sorted(self._removing)):
            here = [broker for number, broker in self.brokers.items() if topic.on(number)]
            gone = [broker.info.id for broker in here if topic.name in broker.removed]
            if topic.status == TOPIC_REMOVED:
                if len(gone) == len(here):
                    found.append(topic._replace(brokers=()))
            elif gone:
                found.append(functools.reduce(TopicSetting.left, gone, topic))
        return found

    def report(self, broker: RegisteredBroker, default: str, topics: Iterable[str]) -> bool:
        """Set the topics that the broker reports; returns whether they changed.

        Raises:
            RemoteProtocolError: a text does not have the expected format.
        """
        if not default.strip():
            return False
        base = DefaultConfig.parse(default)
        serving = {}
        for text in topics:
            config = TopicConfig.parse(text).with_default(base)
            serving[config.topic] = config
        changed = serving != broker.serving
        broker.serving = serving
        return changed

    def in_sync(self, broker: RegisteredBroker, config_id: int, check_sum: int) -> bool:
        """Return True if the broker has its current configuration."""
        return (config_id, check_sum) == (broker.config_id, broker.check_sum)

    def broker_infos(self, *, tls: bool = False) -> list[str]:
        """Return brokerInfos: all brokers, online or not. With ``tls`` their TLS ports.

        Ports are always written: for a blank, Java clients use 8124 over TLS, Go and C++ clients 8123.
        """
        brokers = [self.brokers[broker_id] for broker_id in sorted(self.brokers)]
        return [b.tls_info.address if tls else b.info.format() for b in brokers]

    def deployed(self, topic: str) -> bool:
        """Return True if the topic is in use on a broker, or is that of the history of offsets."""
        known = self.topics.get(topic)
        return (known is not None and known.in_use) or topic == OFFSET_HISTORY_TOPIC

    def served(self, name: str) -> TopicInfo:
        """Return the brokers that serve ``name``, whether or not they accept records."""
        found = []
        for broker_id in sorted(self.brokers):
            config = self._served(self.brokers[broker_id], name)
            if config is not None:
                found.append(BrokerTopic(broker_id, config.partitions or 1, config.stores or 1))
        return TopicInfo(name, tuple(found), None)

    def topic_info(self, name: str) -> TopicInfo | None:
        """Return the brokers that accept records for ``name``; None if no broker does.

        Brokers whose heartbeat is overdue are included only if there are no others.
        """
        found: list[BrokerTopic] = []
        overdue: list[BrokerTopic] = []
        for broker_id in sorted(self.brokers):
            broker = self.brokers[broker_id]
            config = self._served(broker, name)
            if config is not None and config.accept_publish and not broker.write_status and not broker.stop_write:
                place = BrokerTopic(broker_id, config.partitions or 1, config.stores or 1)
                (overdue if broker.overdue else found).append(place)
        found = found or overdue
        topic = self.topics.get(name)
        if not found or name == OFFSET_HISTORY_TOPIC:
            return None
        return TopicInfo(name, tuple(found), topic.max_message_bytes if topic is not None else None)

    def unavailable(self, name: str) -> str:
        """Return the reason why ``name`` does not accept records, if `topic_info` is None."""
        topic = self.topics.get(name)
        if topic is None or not topic.deployments:
            return "the master has no such topic"
        if not topic.in_use:
            return "it is deleted"
        if not topic.writable:
            return "it is closed for producers"
        numbers = [number for number in sorted({*self.brokers, *(topic.brokers or ())}) if topic.on(number)]
        if not numbers:
            return "no broker is registered"
        others = [f"and {len(numbers) - _MOST_NAMED} more"] if len(numbers) > _MOST_NAMED else []
        return "; ".join([*(self._unwritable(number, topic) for number in numbers[:_MOST_NAMED]), *others])

    def _unwritable(self, number: int, topic: TopicSetting) -> str:
        broker = self.brokers.get(number)
        if broker is None or not broker.online:
            return f"broker {number} is not registered"
        who = f"broker {number} ({broker.info.host}:{broker.info.port})"
        here = topic.at(number)
        if here.status or not here.accept_publish:
            return f"on {who} it is {'deleted' if here.status else 'closed for producers'}"
        if broker.stop_write:
            return f"{who} does not accept records: an administrator stopped it"
        if broker.write_status:
            return f"{who} does not store records: {broker.failure or 'its disk failed'}"
        return f"{who} does not serve it yet"

    def _served(self, broker: RegisteredBroker, name: str) -> TopicConfig | None:
        """Return the configuration of a topic on ``broker``, limited by the topic's setting; None if the broker does
        not serve it."""
        config = broker.serving.get(name)
        if config is None or config.status:
            return None
        topic = self.topics.get(name)
        if topic is None:
            return config
        here = topic.at(broker.info.id)
        if here.status:
            return None
        # Clients avoid closed topics before the broker rejects their requests.
        return config._replace(
            accept_publish=bool(config.accept_publish and here.accept_publish),
            accept_subscribe=bool(config.accept_subscribe and here.accept_subscribe),
        )

    def awaits_broker(self, name: str, *, reads: bool = False) -> bool:
        """Return True if producers (``reads``: consumers) may use the topic, but none of its brokers is registered
        yet."""
        topic = self.topics.get(name)
        if topic is None or not (topic.in_use if reads else topic.writable):
            return False
        return not any(name in broker.serving for broker in self.brokers.values())

    def taken_up(self, name: str) -> bool:
        """Return True if every online penstock broker on which the topic is configured serves it.

        Only penstock's brokers report their administration address, and they serve a new topic within a second;
        Apache's brokers take half a minute.
        """
        topic = self.topics.get(name)
        here = [broker for broker in self.brokers.values() if broker.online and broker.web_address]
        return topic is None or all(name in broker.serving for broker in here if _is_configured(topic, broker.info.id))

    def partitions(self, topics: Iterable[str]) -> list[Partition]:
        """Return the partitions of ``topics`` that can currently be consumed, in order."""
        found = []
        for broker in self.brokers.values():
            if broker.online and not broker.read_status and not broker.stop_read:
                for name in topics:
                    config = self._served(broker, name)
                    if config is not None and config.accept_subscribe:
                        ids = partition_ids(config.partitions or 1, config.stores or 1)
                        found += [Partition(broker.info, name, number) for number in ids]
        return sorted(found)

    def topic_metas(self, names: Iterable[str]) -> list[TopicMeta]:
        """Return topicMetaInfoList for consumers that balance by themselves: partitions of ``names`` on online
        brokers."""
        found = []
        for name in names:
            brokers = []
            for broker_id in sorted(self.brokers):
                broker = self.brokers[broker_id]
                config = broker.serving.get(name)
                if config is not None and broker.online:
                    readable = bool(config.accept_subscribe) and not config.status
                    readable = readable and not broker.read_status and not broker.stop_read
                    brokers.append((BrokerTopic(broker_id, config.partitions or 1, config.stores or 1), readable))
            if brokers:
                found.append(TopicMeta(name, tuple(brokers)))
        return found

    def reporting(self) -> set[int]:
        """Return the online brokers that have reported their topics: unlisted topics do not exist there."""
        return {broker.info.id for broker in self.brokers.values() if broker.online and broker.serving}

    def _configure(self, broker: RegisteredBroker) -> None:
        number = broker.info.id
        topics = [
            topic.config(self.default, number).format()
            for topic in self.topics.values()
            if _is_configured(topic, number)
        ]
        topics.append(_SYSTEM.format())
        check_sum = conf_check_sum(self.default_text, topics)
        if check_sum != broker.check_sum:
            broker.topics = topics
            broker.check_sum = check_sum
            broker.config_id += 1
            broker.need_report = True

    def _new_version(self, now: int) -> None:
        self.version = max(now, self.version + 10)


def _is_configured(topic: TopicSetting, broker_id: int) -> bool:
    """Return True if the topic is configured on the broker and not being removed from it."""
    return topic.on(broker_id) and topic.at(broker_id).status < TOPIC_REMOVED


def parse_broker_id(text: str) -> int:
    """Parse the brokerId of a broker's heartbeat and close, a number written as text."""
    try:
        return int(text)
    except ValueError:
        raise RemoteProtocolError(f"tube: broker id {text!r} is not a number") from None
