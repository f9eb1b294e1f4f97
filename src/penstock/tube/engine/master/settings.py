"""Topics and settings of a cluster, as an administrator configures them, and their effect on groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from enum import IntEnum
from typing import NamedTuple

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_PORT,
    DEFAULT_BROKER_TLS_PORT,
    UNDEFINED,
    DefaultConfig,
    TopicConfig,
)

__all__ = [
    "TOPIC_DELETED",
    "TOPIC_GONE",
    "TOPIC_KIND",
    "TOPIC_REMOVED",
    "Authorship",
    "BrokerSeen",
    "BrokerSetting",
    "BrokerStatus",
    "ClusterControls",
    "ClusterSetting",
    "ConsumeControl",
    "GroupSetting",
    "Removal",
    "Setting",
    "TopicControl",
    "TopicDefaults",
    "TopicDeployment",
    "TopicSetting",
    "key_of",
    "kind_of",
]

TOPIC_KIND = "Topic"
"""Kind of topics among the settings (`key_of`). It is part of stored data, and therefore independent of the class
name."""
TOPIC_DELETED = 1
TOPIC_REMOVED = 2
TOPIC_GONE = 3


class TopicDeployment(NamedTuple):
    """Properties of a topic on one broker."""

    partitions: int = 3
    stores: int = 1
    accept_publish: bool = True
    accept_subscribe: bool = True
    status: int = 0
    """0 in use, 1 deleted (no service, data kept), 2 being removed with its data, 3 removed from the broker."""
    delete_policy: str | None = None

    @property
    def partition_count(self) -> int:
        """Number of partitions on the broker: each store has ``partitions``."""
        return self.partitions * self.stores


class TopicSetting(NamedTuple):
    """A configured topic. ``brokers``: their ids, None for all; sizes in bytes, None for the cluster's.

    The fields that `TopicDeployment` has as well apply to all brokers except those in ``own``.
    """

    name: str
    partitions: int = 3
    stores: int = 1
    brokers: tuple[int, ...] | None = None
    accept_publish: bool = True
    accept_subscribe: bool = True
    max_message_bytes: int | None = None
    status: int = 0
    delete_policy: str | None = None
    own: tuple[tuple[int, TopicDeployment], ...] = ()
    """Brokers with other properties, by id. A broker that was removed from a topic of all brokers has status 3."""

    @property
    def common(self) -> TopicDeployment:
        """Properties on brokers that are not in ``own``."""
        return TopicDeployment(
            self.partitions, self.stores, self.accept_publish, self.accept_subscribe, self.status, self.delete_policy
        )

    @property
    def deployments(self) -> list[TopicDeployment]:
        """Distinct properties on brokers, including brokers that may join."""
        own = dict(self.own)
        others = self.brokers is None or any(number not in own for number in self.brokers)
        return [self.common] * others + [each for each in own.values() if each.status < TOPIC_GONE]

    @property
    def in_use(self) -> bool:
        """True if the topic is in use on at least one broker."""
        return any(not each.status for each in self.deployments)

    @property
    def writable(self) -> bool:
        """True if a broker should accept records for the topic."""
        return any(each.accept_publish and not each.status for each in self.deployments)

    @property
    def removing(self) -> bool:
        """True if a broker should remove the topic's data."""
        return any(each.status == TOPIC_REMOVED for each in self.deployments)

    def at(self, broker_id: int) -> TopicDeployment:
        """Return the properties on a broker, if the topic is on it (`on`)."""
        return next((each for number, each in self.own if number == broker_id), self.common)

    def on(self, broker_id: int) -> bool:
        """Return True if the topic, or data of it, is on a broker."""
        return (self.brokers is None or broker_id in self.brokers) and self.at(broker_id).status < TOPIC_GONE

    def config(self, default: DefaultConfig, broker_id: int) -> TopicConfig:
        """Configuration that is sent to a broker; values that equal the default are blank."""
        here = self.at(broker_id)
        return TopicConfig(
            self.name,
            _override(here.partitions, default.partitions),
            None if here.accept_publish else False,
            None if here.accept_subscribe else False,
            delete_policy=None if here.delete_policy == default.delete_policy else here.delete_policy,
            stores=_override(here.stores, default.stores),
            status=here.status,
            max_message_bytes=self.max_message_bytes,
        )

    def changed(self, own: Mapping[int, TopicDeployment], common: TopicDeployment | None = None) -> TopicSetting:
        """Return a copy with the properties of ``own``, and with ``common`` if given."""
        base = self.common if common is None else common
        differing = {number: each for number, each in {**dict(self.own), **own}.items() if each != base}
        return self._replace(**base._asdict(), own=tuple(sorted(differing.items())))

    def with_change(self, change: Callable[[TopicDeployment], TopicDeployment]) -> TopicSetting:
        """Return a copy with ``change`` applied on every broker."""
        return self.changed({number: change(each) for number, each in self.own}, change(self.common))

    def joined(self, broker_id: int, deployment: TopicDeployment) -> TopicSetting:
        """Return a copy with an additional broker."""
        brokers = None if self.brokers is None else tuple(sorted({*self.brokers, broker_id}))
        return self._replace(brokers=brokers).changed({broker_id: deployment})

    def left(self, broker_id: int) -> TopicSetting:
        """Return a copy without the broker; ``brokers`` is empty after the last one."""
        if self.brokers is None:
            return self.changed({broker_id: self.common._replace(status=TOPIC_GONE)})
        return self._replace(
            brokers=tuple(number for number in self.brokers if number != broker_id),
            own=tuple(entry for entry in self.own if entry[0] != broker_id),
        )


def _override(value: int, inherited: int) -> int | None:
    return None if value == inherited else value


DEFAULT_BROKER_WEB_PORT = 8081


class BrokerStatus(IntEnum):
    """manageStatus of a broker; its text is the name in lower case with hyphens."""

    DRAFT = 1
    ONLINE = 5
    ONLY_READ = 6
    ONLY_WRITE = 7
    OFFLINE = 9

    @property
    def text(self) -> str:
        """The status as the HTTP API writes it."""
        return self.name.lower().replace("_", "-")


class TopicDefaults(NamedTuple):
    """Defaults of new topics; None: not set."""

    partitions: int | None = None
    stores: int | None = None
    delete_policy: str | None = None
    accept_publish: bool | None = None
    accept_subscribe: bool | None = None

    def with_fallback(self, other: TopicDefaults) -> TopicDefaults:
        """Return the defaults, with unset ones from ``other``."""
        return TopicDefaults._make(b if a is None else a for a, b in zip(self, other, strict=True))


class ClusterSetting(NamedTuple):
    """The cluster's defaults. ``serial`` changes with each change; peers compare it.

    The ports apply to brokers that are configured without ports.
    """

    max_message_bytes: int | None = None
    query_priority: int | None = None
    flow_enabled: bool = False
    flow_info: str = "[]"
    serial: int = UNDEFINED
    topic_defaults: TopicDefaults = TopicDefaults()
    broker_port: int = DEFAULT_BROKER_PORT
    broker_tls_port: int = DEFAULT_BROKER_TLS_PORT
    broker_web_port: int = DEFAULT_BROKER_WEB_PORT


class TopicControl(NamedTuple):
    """Access control of a topic: with ``enabled`` only groups with a `ConsumeControl` may consume it."""

    topic: str
    enabled: bool = False


class GroupSetting(NamedTuple):
    """Resources of a group. ``rate``: maximum brokers of a topic per member, if ``check_rate``."""

    group: str
    check_rate: bool = False
    rate: int = 0
    query_priority: int = UNDEFINED
    flow_enabled: bool = False
    flow_info: str = "[]"
    serial: int = UNDEFINED


class ConsumeControl(NamedTuple):
    """Whether a group may consume a topic, and which message types if ``filter_enabled``."""

    group: str
    topic: str
    enabled: bool = True
    reason: str = ""
    filter_enabled: bool = False
    filters: tuple[str, ...] = ()


class BrokerSetting(NamedTuple):
    """A broker that was configured by id. Other brokers are accepted when they register.

    ``topic_defaults`` apply to topics that are created on it.
    """

    id: int
    host: str
    port: int
    tls_port: int
    web_port: int
    status: int = BrokerStatus.DRAFT
    topic_defaults: TopicDefaults = TopicDefaults()


class BrokerSeen(NamedTuple):
    """A broker that has registered and was not deleted: it has the topics of all brokers, even while it is offline."""

    id: int


class Authorship(NamedTuple):
    """Authors of a setting, which kind and key identify (`key_of`), and times of its changes (ms since 1970)."""

    setting_kind: str
    setting_key: str
    create_user: str
    create_ms: int
    modify_user: str
    modify_ms: int


class Removal(NamedTuple):
    """Removal of a setting, which kind and key identify."""

    kind: str
    key: str


Setting = (
    TopicSetting
    | ClusterSetting
    | TopicControl
    | GroupSetting
    | ConsumeControl
    | BrokerSetting
    | BrokerSeen
    | Authorship
)


def kind_of(kind: type[Setting]) -> str:
    """Kind under which settings of a class are stored."""
    return TOPIC_KIND if kind is TopicSetting else kind.__name__


def key_of(setting: Setting | Removal) -> tuple[str, str]:
    """Kind and key under which a setting is stored."""
    if isinstance(setting, Removal):
        return setting.kind, setting.key
    kind = kind_of(type(setting))
    if isinstance(setting, TopicSetting):
        return kind, setting.name
    if isinstance(setting, TopicControl):
        return kind, setting.topic
    if isinstance(setting, GroupSetting):
        return kind, setting.group
    if isinstance(setting, ConsumeControl):
        return kind, f"{setting.group}\0{setting.topic}"
    if isinstance(setting, BrokerSetting | BrokerSeen):
        return kind, str(setting.id)
    if isinstance(setting, Authorship):
        return kind, f"{setting.setting_kind}\0{setting.setting_key}"
    return kind, ""


class ClusterControls:
    """The settings in effect."""

    def __init__(self, settings: Iterable[Setting] = ()) -> None:
        self.cluster = ClusterSetting()
        self.topics: dict[str, TopicControl] = {}
        self.groups: dict[str, GroupSetting] = {}
        self.consume: dict[tuple[str, str], ConsumeControl] = {}
        self.brokers: dict[int, BrokerSetting] = {}
        self.seen: set[int] = set()
        self.authors: dict[tuple[str, str], Authorship] = {}
        """By kind and key of the setting."""
        for setting in settings:
            self.put(setting)

    def put(self, setting: Setting | Removal) -> None:
        """Apply a setting after it was stored; `Cluster` has the topics."""
        if isinstance(setting, Removal):
            self._remove(setting)
        elif isinstance(setting, ClusterSetting):
            self.cluster = setting
        elif isinstance(setting, TopicControl):
            self.topics[setting.topic] = setting
        elif isinstance(setting, GroupSetting):
            self.groups[setting.group] = setting
        elif isinstance(setting, ConsumeControl):
            self.consume[setting.group, setting.topic] = setting
        elif isinstance(setting, BrokerSetting):
            self.brokers[setting.id] = setting
        elif isinstance(setting, BrokerSeen):
            self.seen.add(setting.id)
        elif isinstance(setting, Authorship):
            self.authors[setting.setting_kind, setting.setting_key] = setting

    def _remove(self, removal: Removal) -> None:
        if removal.kind == TopicControl.__name__:
            self.topics.pop(removal.key, None)
        elif removal.kind == GroupSetting.__name__:
            self.groups.pop(removal.key, None)
        elif removal.kind == ConsumeControl.__name__:
            group, _, topic = removal.key.partition("\0")
            self.consume.pop((group, topic), None)
        elif removal.kind == BrokerSetting.__name__:
            self.brokers.pop(int(removal.key), None)
        elif removal.kind == BrokerSeen.__name__:
            self.seen.discard(int(removal.key))
        elif removal.kind == Authorship.__name__:
            kind, _, key = removal.key.partition("\0")
            self.authors.pop((kind, key), None)

    def may_consume(self, group: str, topic: str) -> bool:
        """Return True if ``group`` may consume ``topic``."""
        # A rule of the group has precedence, even if the topic is open to all.
        control = self.consume.get((group, topic))
        if control is not None:
            return control.enabled
        needed = self.topics.get(topic)
        return needed is None or not needed.enabled

    def refuse(self, group: str, topics: Iterable[str], filters: Mapping[str, Set[str]]) -> tuple[int, str] | None:
        """Return the reason why a consumer of ``group`` cannot subscribe, as error code and text; None if it can."""
        for topic in sorted(topics):
            control = self.consume.get((group, topic))
            if not self.may_consume(group, topic):
                reason = f": {control.reason}" if control is not None and control.reason else ""
                return ErrCode.CONSUME_GROUP_FORBIDDEN, f"group {group} may not consume topic {topic}{reason}"
            if control is None or not control.filter_enabled:
                continue
            given = filters.get(topic, frozenset())
            if not given:
                text = f"group {group} must filter topic {topic} by: {', '.join(control.filters)}"
                return ErrCode.CONSUME_CONTENT_FORBIDDEN, text
            foreign = sorted(given - set(control.filters))
            if foreign:
                text = f"group {group} may not consume {', '.join(foreign)} of topic {topic}"
                return ErrCode.CONSUME_CONTENT_FORBIDDEN, text
        return None

    def too_few(self, group: str, brokers: int, members: int) -> bool:
        """Return True if ``members`` are too few for a topic on ``brokers`` brokers: then no partition is assigned."""
        setting = self.groups.get(group)
        return setting is not None and setting.check_rate and brokers // max(members, 1) > max(setting.rate, 1)

    def default_flow(self, held: int) -> tuple[int, str]:
        """Return version and text of the cluster's flow control rules, for a client that has version ``held``."""
        return _flow(self.cluster, held)

    def group_flow(self, group: str, held: int) -> tuple[int, str]:
        """Return version and text of a group's flow control rules, for a client that has version ``held``."""
        return _flow(self.groups.get(group), held)


def _flow(setting: ClusterSetting | GroupSetting | None, held: int) -> tuple[int, str]:
    if setting is not None and setting.serial != UNDEFINED:
        return setting.serial, setting.flow_info if setting.flow_enabled else "[]"
    # Clients must drop deleted rules: Java clients ignore a negative version, C++ and Go clients keep their rules if
    # the text of a new version is not JSON.
    return (0 if held > 0 else UNDEFINED), "[]"
