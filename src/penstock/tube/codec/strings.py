"""Structures encoded as text in messages. ``#`` separates segments, ``:`` fields, ``,`` items, ``@`` the group.

Each has a parser and a formatter; the parser raises RemoteProtocolError and accepts documented deviations of deployed
peers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeGuard

from penstock.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "DEFAULT_BROKER_PORT",
    "DEFAULT_BROKER_TLS_PORT",
    "GROUP_RULE",
    "OFFSET_HISTORY_TOPIC",
    "PARTITIONS_PER_STORE",
    "TOPIC_RULE",
    "UNDEFINED",
    "BrokerInfo",
    "BrokerTopic",
    "DefaultConfig",
    "Partition",
    "Subscribed",
    "TopicConfig",
    "TopicInfo",
    "TopicMeta",
    "check_client_id",
    "conf_check_sum",
    "format_bound",
    "format_condition",
    "format_failure",
    "ipv4_to_int",
    "java_trim",
    "parse_bound",
    "parse_condition",
    "parse_failure",
    "partition_id",
    "partition_ids",
    "query_of_group",
    "valid_group",
    "valid_topic",
]

DEFAULT_BROKER_PORT = 8123
DEFAULT_BROKER_TLS_PORT = 8124
OFFSET_HISTORY_TOPIC = "__offset_history__"
"""The system topic of consumed offsets: exists on every broker, read-only for clients."""
PARTITIONS_PER_STORE: Final = 10_000
UNDEFINED = -2  # "not set" in all fields of this protocol

_BLANK = "".join(map(chr, range(0x21)))
_TOPIC = re.compile(r"[a-zA-Z]\w+", re.ASCII)
_GROUP = re.compile(r"[a-zA-Z][\w-]+", re.ASCII)
TOPIC_RULE = "a letter, then letters, digits and '_': 2 to 64 in all"
GROUP_RULE = "a letter, then letters, digits, '_' and '-': 2 to 1,024 in all"
"""The rule of `valid_group`, for error messages."""


def java_trim(text: str) -> str:
    """``String.trim()``: removes characters up to U+0020 at both ends, and no others."""
    return text.strip(_BLANK)


def valid_topic(name: object) -> TypeGuard[str]:
    """Return True if ``name`` is a valid topic name: a letter, then 1 to 63 word characters."""
    return isinstance(name, str) and len(name) <= 64 and _TOPIC.fullmatch(name) is not None


def valid_group(name: object) -> TypeGuard[str]:
    """Return True if ``name`` is a valid group name: a letter, then 1 to 1023 word characters or ``-``."""
    return isinstance(name, str) and len(name) <= 1024 and _GROUP.fullmatch(name) is not None


def partition_ids(partitions: int, stores: int) -> list[int]:
    """Return the wire ids of a topic's partitions on one broker, which has so many ``partitions`` in each store."""
    return [partition_id(index, partitions) for index in range(partitions * stores)]


def partition_id(index: int, partitions: int) -> int:
    """Return the wire id at ``index`` of :func:`partition_ids`: store * 10000 + partition."""
    store, number = divmod(index, partitions)
    return store * PARTITIONS_PER_STORE + number


def ipv4_to_int(address: str) -> int:
    """Return a dotted IPv4 address as the signed int32 of ``sentAddr``; 0 for other text (a host name, IPv6)."""
    pieces = address.split(".")
    if len(pieces) != 4 or not all(piece.isascii() and piece.isdigit() and int(piece) < 256 for piece in pieces):
        return 0
    value = int.from_bytes(bytes(map(int, pieces)), "big")
    return value - (1 << 32) if value >= 1 << 31 else value


class BrokerInfo(NamedTuple):
    """An entry of brokerInfos and brokerConfigList: ``id:host:port``; a blank means the default port."""

    id: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """Format as ``id:host:port``, always with the port."""
        return f"{self.id}:{self.host}:{self.port}"

    def format(self) -> str:
        """Format the text in messages, with a blank for port 8123."""
        # The blank is written because the Java client requires three items.
        return f"{self.id}:{self.host}: " if self.port == DEFAULT_BROKER_PORT else self.address

    @classmethod
    def parse(cls, text: str, default_port: int = DEFAULT_BROKER_PORT) -> BrokerInfo:
        """Parse the text, also without the last item; ``default_port`` replaces a blank."""
        pieces = text.split(":")
        if len(pieces) not in {2, 3} or not pieces[1].strip():
            raise RemoteProtocolError(f"tube: {text!r} is not brokerId:host:port")
        port = pieces[2].strip() if len(pieces) == 3 else ""
        return cls(_int(pieces[0], text), pieces[1].strip(), _int(port, text) if port else default_port)


class Partition(NamedTuple):
    """One partition of a topic on one broker, in the sort order of the master's balancing."""

    broker: BrokerInfo
    topic: str
    id: int

    @property
    def key(self) -> str:
        """``brokerId:topic:partitionId``."""
        return f"{self.broker.id}:{self.topic}:{self.id}"

    @property
    def full(self) -> str:
        """``brokerId:host:port#topic:partitionId``; the port is always written."""
        return f"{self.broker.address}#{self.topic}:{self.id}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Parse the full form."""
        broker, separator, rest = text.partition("#")
        topic, colon, number = rest.rpartition(":")
        if not separator or not colon or not topic.strip():
            raise RemoteProtocolError(f"tube: {text!r} is not brokerId:host:port#topic:partitionId")
        return cls(BrokerInfo.parse(broker), topic.strip(), _int(number, text))


class Subscribed(NamedTuple):
    """subscribeInfo: ``consumerId@group#partition``, the partition in full form."""

    consumer: str
    group: str
    partition: Partition

    def format(self) -> str:
        """The text in messages."""
        return f"{self.consumer}@{self.group}#{self.partition.full}"

    @classmethod
    def parse(cls, text: str) -> Subscribed:
        """Parse that text."""
        owner, separator, rest = text.partition("#")
        consumer, at, group = owner.partition("@")
        if not separator or not at:
            raise RemoteProtocolError(f"tube: {text!r} is not consumerId@group#brokerId:host:port#topic:partitionId")
        return cls(consumer.strip(), group.strip(), Partition.parse(rest))


class BrokerTopic(NamedTuple):
    """Partitions and stores of a topic on one broker."""

    broker_id: int
    partitions: int
    stores: int


class TopicInfo(NamedTuple):
    """topicInfos of the producer: ``topic#id:partitions:stores,...#maxMsgSize``, partitions before stores."""

    topic: str
    brokers: tuple[BrokerTopic, ...]
    max_message_bytes: int | None

    def format(self) -> str:
        """The text in messages."""
        brokers = ",".join(f"{b.broker_id}:{b.partitions}:{b.stores}" for b in self.brokers)
        return f"{self.topic}#{brokers}#{'' if self.max_message_bytes is None else self.max_message_bytes}"

    @classmethod
    def parse(cls, text: str) -> TopicInfo:
        """Parse the text, with or without a size."""
        pieces = text.split("#")
        if len(pieces) not in {2, 3} or not pieces[0].strip():
            raise RemoteProtocolError(f"tube: {text!r} is not topic#brokerId:partitions:stores#maxMsgSize")
        size = pieces[2].strip() if len(pieces) == 3 else ""
        return cls(pieces[0].strip(), tuple(_broker_topics(pieces[1], text)), _int(size, text) if size else None)


def _broker_topics(segment: str, text: str) -> Iterable[BrokerTopic]:
    for item in segment.split(","):
        if item.strip():
            numbers = [_int(piece, text) for piece in item.split(":")]
            if len(numbers) != 3 or numbers[1] < 0 or numbers[2] < 0:
                raise RemoteProtocolError(f"tube: {item!r} in {text!r} is not brokerId:partitions:stores")
            yield BrokerTopic(*numbers)


class TopicMeta(NamedTuple):
    """topicMetaInfoList of client balance: ``topic#id:stores:partitions:status,...``, stores before partitions.

    ``brokers``: the topic on each broker, and whether it may be subscribed there.
    """

    topic: str
    brokers: tuple[tuple[BrokerTopic, bool], ...]

    def format(self) -> str:
        """The text in messages."""
        brokers = ",".join(f"{b.broker_id}:{b.stores}:{b.partitions}:{int(open_)}" for b, open_ in self.brokers)
        return f"{self.topic}#{brokers}"

    @classmethod
    def parse(cls, text: str) -> TopicMeta:
        """Parse that text."""
        topic, separator, rest = text.partition("#")
        if not separator or not topic.strip():
            raise RemoteProtocolError(f"tube: {text!r} is not topic#brokerId:stores:partitions:status")
        brokers = []
        for item in filter(str.strip, rest.split(",")):
            numbers = [_int(piece, text) for piece in item.split(":")]
            if len(numbers) != 4:
                raise RemoteProtocolError(f"tube: {item!r} in {text!r} is not brokerId:stores:partitions:status")
            brokers.append((BrokerTopic(numbers[0], numbers[2], numbers[1]), numbers[3] == 1))
        return cls(topic.strip(), tuple(brokers))


def format_condition(topic: str, filters: Iterable[str]) -> str:
    """topicCondition: ``topic#filter,filter``; only topics with filters are listed."""
    return f"{topic}#{','.join(sorted(filters))}"


def parse_condition(text: str) -> tuple[str, frozenset[str]]:
    """Topic and its filters. ``topic#`` (the Go client sends it) and ``topic`` mean no filter."""
    topic, _, items = text.partition("#")
    if not topic.strip():
        raise RemoteProtocolError(f"tube: {text!r} is not topic#filter,filter")
    return java_trim(topic), frozenset(filter(None, map(java_trim, items.split(","))))


def format_bound(offsets: Mapping[str, int]) -> str:
    """requiredPartition of bound consumption: partition key -> offset as ``key=offset,key=offset``."""
    return ",".join(f"{key}={offset}" for key, offset in offsets.items())


def parse_bound(text: str) -> dict[str, int]:
    """Partition key -> offset."""
    found = {}
    for item in filter(str.strip, text.split(",")):
        key, separator, offset = item.partition("=")
        if not separator or key.count(":") != 2:
            raise RemoteProtocolError(f"tube: {item!r} is not brokerId:topic:partitionId=offset")
        found[key.strip()] = _int(offset, item)
    return found


def format_failure(code: int, partition: str) -> str:
    """failureInfo of a broker heartbeat: ``errCode:`` and the partition in full form."""
    return f"{code}:{partition}"


def parse_failure(text: str) -> tuple[int, Partition]:
    """Error code and partition."""
    code, separator, partition = text.partition(":")
    if not separator:
        raise RemoteProtocolError(f"tube: {text!r} is not errCode:brokerId:host:port#topic:partitionId")
    return _int(code, text), Partition.parse(partition)


class DefaultConfig(NamedTuple):
    """brokerDefaultConfInfo: defaults of topics, in the reference's order and units.

    The reference's broker multiplies ``mem_cache_size_mb`` by 512 KiB and ``mem_cache_count_k`` by 512.
    """

    partitions: int = 1
    accept_publish: bool = True
    accept_subscribe: bool = True
    unflush_threshold: int = 1000
    unflush_interval_ms: int = 10_000
    delete_policy: str = "delete,168h"
    stores: int = 1
    unflush_data_hold: int = 0
    mem_cache_size_mb: int = 3
    mem_cache_count_k: int = 10
    mem_cache_flush_ms: int = 20_000

    def format(self) -> str:
        """The text in messages: 12 items."""
        items = _items(self)
        return ":".join([*items[:5], " ", *items[5:]])  # a blank in the place of the removed deleteWhen

    @classmethod
    def parse(cls, text: str) -> DefaultConfig:
        """Parse the text; no item may be blank."""
        items = text.split(":")
        if len(items) != 12:
            raise RemoteProtocolError(f"tube: {text!r} has {len(items)} items, a broker's default setting has 12")
        values = _typed([*items[:5], *items[6:]], text)
        if None in values:
            raise RemoteProtocolError(f"tube: {text!r} leaves an item of the broker's default setting blank")
        return cls._make(values)


class TopicConfig(NamedTuple):
    """brokerTopicSetConfInfo: a topic's setting on a broker; None: the broker's default."""

    topic: str
    partitions: int | None = None
    accept_publish: bool | None = None
    accept_subscribe: bool | None = None
    unflush_threshold: int | None = None
    unflush_interval_ms: int | None = None
    delete_policy: str | None = None
    stores: int | None = None
    status: int = 0  # 0 normal, 1 soft deleted, 2 soft removed
    unflush_data_hold: int | None = None
    mem_cache_size_mb: int | None = None
    mem_cache_count_k: int | None = None
    mem_cache_flush_ms: int | None = None
    max_message_bytes: int | None = None

    def format(self) -> str:
        """The text in messages: 15 items, a blank for the broker's default."""
        items = _items(self)
        return ":".join([*items[:6], " ", *items[6:]])

    @classmethod
    def parse(cls, text: str) -> TopicConfig:
        """Parse 15 items; old masters omit the last one."""
        items = text.split(":")
        if len(items) not in {14, 15} or not items[0].strip():
            raise RemoteProtocolError(f"tube: {text!r} has {len(items)} items, a topic's setting has 15")
        items += [" "] * (15 - len(items))
        values = _typed([*items[1:6], *items[7:9], *items[10:]], text)
        return cls._make([items[0].strip(), *values[:7], _int(items[9], text), *values[7:]])

    def with_default(self, default: DefaultConfig) -> TopicConfig:
        """Return the complete setting: blanks are replaced by the broker's default."""
        own = self._asdict()
        return self._replace(**{k: v for k, v in default._asdict().items() if own[k] is None})


def _items(config: Iterable[object]) -> list[str]:
    return [" " if item is None else str(item).lower() if isinstance(item, bool) else str(item) for item in config]


_KINDS = ["int", "bool", "bool", "int", "int", "policy", "int", "int", "int", "int", "int", "int"]


def _typed(items: list[str], text: str) -> list[int | str | None]:
    """Parse items in the common order of both settings; a blank item is None."""
    typed: list[int | str | None] = []
    for kind, item in zip(_KINDS, items, strict=False):
        value = item.strip()
        if not value:
            typed.append(None)
        elif kind == "bool":
            typed.append(value.lower() == "true")
        elif kind == "policy":
            typed.append(value)
        else:
            typed.append(_int(value, text))
    return typed


def conf_check_sum(default: str, topics: Iterable[str]) -> int:
    """confCheckSumId: CRC-32 & 0x7fffffff of default and sorted topic texts, zero-padded to twice their characters."""
    texts = [default, *sorted(topics)]
    data = "".join(texts).encode()
    return zlib.crc32(data.ljust(2 * sum(map(len, texts)), b"\0")) & 0x7FFFFFFF


def _int(text: str, whole: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise RemoteProtocolError(f"tube: {text!r} in {whole!r} is not a number") from None
    if not -(1 << 63) <= value < 1 << 63:
        raise RemoteProtocolError(f"tube: {text!r} in {whole!r} is beyond 64 bits")
    return value


def check_client_id(client_id: str) -> str:
    """Check ``client_id`` and return it.

    Raises:
        LocalProtocolError: it is blank, longer than 1024, or contains ``@`` or ``#`` (separators of the master's keys).
    """
    if not client_id.strip() or len(client_id) > 1024 or "@" in client_id or "#" in client_id:
        raise LocalProtocolError(f"tube: {client_id!r} cannot be a client id (1 to 1024 characters, no '@', no '#')")
    return client_id


_QUERY_GROUP: Final = re.compile(r"spark-tubemq-[0-9a-f]{8}")


def query_of_group(group: str) -> str | None:
    """Return "a pipeline" or "a Spark query" if ``group`` has the name of a group of these; else None.

    They publish their offsets in the group, but continue from their checkpoints. The group of a Spark query has such a
    name if ``tubemq.group`` is not set.
    """
    if group.startswith("pipeline-"):
        return "a pipeline"
    return "a Spark query" if _QUERY_GROUP.fullmatch(group) else None
