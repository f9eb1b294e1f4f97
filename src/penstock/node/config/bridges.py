"""The section ``bridges``: topics that are forwarded to and from other MQTT brokers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from penstock.errors import ConfigError
from penstock.mqtt.bridge import BridgeSettings, BridgeTopic, Direction
from penstock.mqtt.codec.topics import SHARE_PREFIX, filter_problem, name_problem
from penstock.mqtt.url import parse_broker_url
from penstock.node.config.client_files import check_client_files
from penstock.node.config.client_tls import NamedClientTls
from penstock.node.config.listeners import Section
from penstock.runtime.io.tls import read_password

__all__ = ["BridgeEntry", "BridgeTopicEntry"]


def _url(value: str) -> str:
    try:
        url = parse_broker_url(value)
    except ConfigError as error:
        raise ValueError(error.hint or error.what) from error
    if url.password is not None:
        raise ValueError("expected a URL without a password: use password_file")
    return value


def _topic(value: str) -> str:
    problem = name_problem(value)
    if problem is not None:
        raise ValueError(f"expected a topic name: {problem}")
    return value


class BridgeTopicEntry(Section):
    """Topics of a bridge: ``local_prefix`` + ``filter`` on this node corresponds to ``remote_prefix`` + ``filter``
    on the other."""

    filter: str = Field(description="topic filter, without the prefixes")
    direction: Direction = Field(default=Direction.OUT, description="direction of the messages")
    qos: int = Field(default=1, ge=0, le=2, description="maximum quality of service")
    local_prefix: str = Field(default="", description="prefix of the topics on this node")
    remote_prefix: str = Field(default="", description="prefix of the topics at the other broker")

    @model_validator(mode="after")
    def _filters(self) -> BridgeTopicEntry:
        topic = self.topic()
        for topic_filter in (topic.local_filter, topic.remote_filter):
            problem = filter_problem(topic_filter)
            if problem is not None or topic_filter.startswith(SHARE_PREFIX):
                raise ValueError(
                    f"filter {topic_filter!r} cannot be used: {problem or 'a bridge has no shared subscriptions'}"
                )
        for prefix in (self.local_prefix, self.remote_prefix):
            if "+" in prefix or "#" in prefix:
                raise ValueError(f"prefix {prefix!r} cannot be used: it is part of a topic name, without wildcards")
        return self

    def topic(self) -> BridgeTopic:
        """Settings of the bridge."""
        return BridgeTopic(self.filter, self.direction, self.qos, self.local_prefix, self.remote_prefix)


class BridgeEntry(Section):
    """Bridge to another MQTT 5 broker. Outgoing messages are queued while it is unavailable; incoming ones are
    acknowledged once accepted."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="name in metrics, in the state topic and in the name of the session",
    )
    url: Annotated[str, AfterValidator(_url)] = Field(description="mqtt://, mqtts://, ws:// or wss://HOST[:PORT]")
    topics: list[BridgeTopicEntry] = Field(
        min_length=1, description="topics to bridge; the first matching entry applies"
    )
    acts_as: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="user whose permissions the bridge has on this node; default: all permissions",
    )
    client_id: str = Field(
        default="", description="client identifier at the other broker; default: `penstock-` and the name"
    )
    username: str | None = Field(default=None, description="user name at the other broker")
    password_file: Path | None = Field(default=None, description="file whose first line is the password")
    tls: NamedClientTls | None = Field(default=None, description="certificates of the connection")
    keep_alive_s: int = Field(default=30, ge=1, le=65_535, description="Keep Alive in seconds")
    session_expiry_s: int = Field(
        default=7 * 24 * 3600,
        ge=0,
        le=0xFFFFFFFF,
        description="Session Expiry Interval at the other broker, in seconds",
    )
    clean_start: bool = Field(
        default=False,
        description="start with a new session at the other broker, needed once after topics were removed from the list",
    )
    window: int = Field(default=200, ge=1, le=65_535, description="maximum number of messages in flight per direction")
    max_hops: int = Field(default=3, ge=1, le=100, description="maximum number of bridges that a message may cross")
    status_topic: Annotated[str, AfterValidator(lambda v: _topic(v) if v else v)] = Field(
        default="",
        description="topic on this node with the retained state (1 or 0); default: `$SYS/broker/bridge/<name>/state`",
    )
    remote_status_topic: Annotated[str, AfterValidator(_topic)] | None = Field(
        default=None, description="topic at the other broker with the retained state (1 or 0)"
    )

    def check_files(self) -> None:
        """Read the password and the certificates. Raises ConfigError if a file cannot be used."""
        if (tls := self.settings().tls) is not None:
            check_client_files(tls, f"bridge {self.name!r}")

    def settings(self) -> BridgeSettings:
        """Settings of the bridge.

        Raises:
            ConfigError: the password file cannot be read.
        """
        password = None
        if self.password_file is not None:
            password = read_password(self.password_file, f"bridge {self.name!r}: password_file")
        return BridgeSettings(
            self.name,
            self.url,
            [entry.topic() for entry in self.topics],
            client_id=self.client_id,
            username=self.username,
            password=password,
            tls=None if self.tls is None else self.tls.options,
            keep_alive_s=self.keep_alive_s,
            session_expiry_s=self.session_expiry_s,
            clean_start=self.clean_start,
            window=self.window,
            max_hops=self.max_hops,
            status_topic=self.status_topic,
            remote_status_topic=self.remote_status_topic,
        )
