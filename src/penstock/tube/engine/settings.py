"""What an administrator configures at a master beside topics, and what follows from it for consumer groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from enum import IntEnum
from typing import NamedTuple

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.strings import DEFAULT_BROKER_PORT, DEFAULT_BROKER_TLS_PORT, UNDEFINED
from penstock.tube.engine.deployment import Topic

__all__ = [
    "Authorship",
    "BrokerSeen",
    "BrokerSetting",
    "ClusterSetting",
    "ConsumeControl",
    "Controls",
    "GroupSetting",
    "Removal",
    "Setting",
    "Status",
    "TopicControl",
    "TopicDefaults",
    "key_of",
]


DEFAULT_BROKER_WEB_PORT = 8081


class Status(IntEnum):
    """manageStatus of a broker; its text is the name in small letters, with hyphens."""

    DRAFT = 1
    ONLINE = 5
    ONLY_READ = 6
    ONLY_WRITE = 7
    OFFLINE = 9

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", "-")


class TopicDefaults(NamedTuple):
    """What a topic gets that is made without saying so; None: nothing is said here either."""

    partitions: int | None = None
    stores: int | None = None
    delete_policy: str | None = None
    accept_publish: bool | None = None
    accept_subscribe: bool | None = None

    def over(self, other: TopicDefaults) -> TopicDefaults:
        """These, and ``other`` where nothing is said here."""
        return TopicDefaults._make(b if a is None else a for a, b in zip(self, other, strict=True))


class ClusterSetting(NamedTuple):
    """The cluster's defaults. ``serial`` changes with each change: peers hold it and compare.

    The ports are those of a broker that is configured without.
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
    """With ``enabled`` only groups with a `ConsumeControl` for the topic may consume it."""

    topic: str
    enabled: bool = False


class GroupSetting(NamedTuple):
    """Resources of a group. ``rate``: brokers of a topic that one member may have, with ``check_rate``."""

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
    """A broker that was configured by name. Brokers that were not are taken as they come.

    ``topic_defaults`` are for topics that are made on it.
    """

    id: int
    host: str
    port: int
    tls_port: int
    web_port: int
    status: int = Status.DRAFT
    topic_defaults: TopicDefaults = TopicDefaults()


class BrokerSeen(NamedTuple):
    """A broker that came once, until it is deleted: what all brokers have of a topic it has, also while it is away."""

    id: int


class Authorship(NamedTuple):
    """Who made and who last changed the setting of that kind and key (`key_of`), and when (ms since 1970)."""

    setting_kind: str
    setting_key: str
    create_user: str
    create_ms: int
    modify_user: str
    modify_ms: int


class Removal(NamedTuple):
    """Take a setting away: the class it was of, and its key."""

    kind: str
    key: str


Setting = (
    Topic | ClusterSetting | TopicControl | GroupSetting | ConsumeControl | BrokerSetting | BrokerSeen | Authorship
)


def key_of(setting: Setting | Removal) -> tuple[str, str]:
    """Kind and key under which a setting is kept."""
    if isinstance(setting, Removal):
        return setting.kind, setting.key
    kind = type(setting).__name__
    if isinstance(setting, Topic):
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


class Controls:
    """The settings in force."""

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
        """A setting is durable: it is in force. Topics are the cluster's."""
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
        """Whether ``group`` may consume ``topic``."""
        control = self.consume.get((group, topic))
        if control is not None:
            return control.enabled
        needed = self.topics.get(topic)
        return needed is None or not needed.enabled

    def refuse(self, group: str, topics: Iterable[str], filters: Mapping[str, Set[str]]) -> tuple[int, str] | None:
        """Why a consumer of ``group`` cannot subscribe like this, as error code and text."""
        for topic in sorted(topics):
            control = self.consume.get((group, topic))
            if not self.may_consume(group, topic):
                reason = f": {control.reason}" if control is not None and control.reason else ""
                return ErrCode.CONSUME_GROUP_FORBIDDEN, f"group {group} may not consume topic {topic}{reason}"
            if control is None or not control.filter_enabled:
                continue
            given = filters.get(topic, frozenset())
            if not given:
                text = f"group {group} has to filter topic {topic}: {', '.join(control.filters)}"
                return ErrCode.CONSUME_CONTENT_FORBIDDEN, text
            foreign = sorted(given - set(control.filters))
            if foreign:
                text = f"group {group} may not have {', '.join(foreign)} of topic {topic}"
                return ErrCode.CONSUME_CONTENT_FORBIDDEN, text
        return None

    def too_few(self, group: str, brokers: int, members: int) -> bool:
        """Whether ``members`` are too few for a topic on so many ``brokers``: then nothing is assigned."""
        setting = self.groups.get(group)
        return setting is not None and setting.check_rate and brokers // max(members, 1) > max(setting.rate, 1)

    def default_flow(self, held: int) -> tuple[int, str]:
        """Version and text of the cluster's flow control rules, for somebody who holds version ``held``."""
        return _flow(self.cluster, held)

    def group_flow(self, group: str, held: int) -> tuple[int, str]:
        """Version and text of a group's flow control rules, for somebody who holds version ``held``."""
        return _flow(self.groups.get(group), held)


def _flow(setting: ClusterSetting | GroupSetting | None, held: int) -> tuple[int, str]:
    if setting is not None and setting.serial != UNDEFINED:
        return setting.serial, setting.flow_info if setting.flow_enabled else "[]"
    # Rules that were deleted end for who still has them: Java clients pass over a negative version, C++ and Go clients
    # keep what they have where the text of another version is not JSON.
    return (0 if held > 0 else UNDEFINED), "[]"
