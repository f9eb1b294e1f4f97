"""Configuration of a node: ``penstock.yaml``, ``PENSTOCK_<OPTION>`` and the options of ``penstock up``.

Options override environment variables, these override the file. Validation, command line and reference pages are
generated from the models below.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Field, PlainSerializer, PlainValidator, model_validator

from penstock.errors import ConfigError
from penstock.mqtt.transport.listener_settings import Transport
from penstock.node.config.bridges import BridgeEntry
from penstock.node.config.cluster import ClusterSection
from penstock.node.config.console import ConsoleSection, FilterText
from penstock.node.config.kafka import KafkaSection
from penstock.node.config.listeners import AddressText, ListenerSection, Section, WebUrl, bind
from penstock.node.config.mqtt import MqttListener, Security, TlsSection
from penstock.node.config.profiles import AioFiles, Profile, add_profile
from penstock.node.config.statestore import StateStoreSection
from penstock.node.config.template import Template
from penstock.node.config.tracing import TelemetrySection, TracingSection
from penstock.node.config.tube import TubeAccess, TubeLimitOptions, TubeTls
from penstock.node.config.tube_cluster import TopicName, TubeClusterSection
from penstock.runtime.config.loader import validate
from penstock.runtime.config.yaml_document import Document, read_document
from penstock.runtime.io.clock import STEP_HOLD_S
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import Address
from penstock.runtime.observability.logs import LogFormat, LogLevel
from penstock.tube.engine.transactions.staging import StagingLimits
from penstock.tube.master.admin_token import KNOWN_TOKENS
from penstock.tube.storage.retention import parse_policy

__all__ = [
    "BROKER_OPTIONS",
    "DEFAULT_FILE",
    "LISTENERS",
    "OPTIONS",
    "Disk",
    "HttpListener",
    "HttpTls",
    "NodeConfig",
    "Option",
    "PipelineSection",
    "RuleOverflowPolicy",
    "RuleSection",
    "RuleTargets",
    "StagingSection",
    "TopicSection",
    "Tube",
    "TubeBrokerHttpListener",
    "TubeBrokerListener",
    "TubeMasterListener",
    "load_config",
    "read_settings",
    "setting_of",
    "tube_section",
]

DEFAULT_FILE = Path("penstock.yaml")


def _template(value: object) -> Template:
    if isinstance(value, Template):
        return value
    if not isinstance(value, str):
        raise ValueError("expected text, possibly with {topic}")
    return Template(value)


TemplateText = Annotated[
    Template,
    PlainValidator(_template, json_schema_input_type=str),
    PlainSerializer(lambda t: t.text, return_type=str),
]
AttributeName = Annotated[str, Field(min_length=1, max_length=256)]


class TubeMasterListener(ListenerSection):
    """TubeMQ master listener."""

    bind: AddressText = bind("127.0.0.1:8715")


class TubeBrokerListener(ListenerSection):
    """TubeMQ broker listener."""

    bind: AddressText = bind("127.0.0.1:8123")


class HttpTls(TlsSection):
    """Certificates of an HTTPS listener. SIGHUP reloads the files."""

    client_ca: Path | None = Field(
        default=None,
        description="PEM file: authorities of client certificates, which all clients and health probes then need",
    )


class TubeBrokerHttpListener(ListenerSection):
    """HTTP listener for TubeMQ broker administration."""

    tls: HttpTls | None = Field(default=None, description="certificates for HTTPS; default: plain HTTP")
    bind: AddressText = bind("127.0.0.1:8081")


class HttpListener(ListenerSection):
    """HTTP listener for health, metrics and TubeMQ master administration."""

    bind: AddressText = bind("127.0.0.1:8080")
    url: WebUrl | None = Field(
        default=None,
        description="URL at which browsers reach the console, if a proxy is in between, such as "
        "`https://console.plant.example/`: the host name is accepted, and standbys redirect to it. "
        "Default: `advertise` with the scheme of this listener",
    )
    tls: HttpTls | None = Field(default=None, description="certificates for HTTPS; default: plain HTTP")
    anonymous_metrics: bool = Field(
        default=False,
        description="serve `/metrics` without credentials if `security.passwords` is set",
    )


Retention = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}[smh]$")]


class TopicSection(Section):
    """TubeMQ topic that the node creates at its start."""

    partitions: int = Field(default=3, ge=1, le=9999, description="number of partitions per store")
    stores: int = Field(default=1, ge=1, le=100, description="number of stores, each with its own files")
    retention: Retention | None = Field(
        default=None,
        description="retention time, such as `90s`, `30m` or `12h`; also applied to an existing topic. "
        "Default: unchanged, initially `168h`",
    )
    durability: Durability | None = Field(
        default=None, description="durability of this topic; default: that of the node"
    )


class StagingSection(Section):
    """Rows that are staged for exactly-once writes."""

    max_bytes: int = Field(
        default=4 << 30, ge=1 << 20, description="maximum number of staged bytes; beyond it tasks are refused"
    )
    keep: Retention = Field(default="24h", description="how long uncommitted rows stay staged")

    max_attempts: int = Field(
        default=20_000, ge=1, description="maximum number of staged task attempts; beyond it tasks are refused"
    )
    max_queries: int = Field(
        default=100_000,
        ge=1,
        description="maximum number of queries whose state is kept; beyond it the longest idle one is removed",
    )
    forget: Retention = Field(
        default="720h",
        description="how long the state of an idle query is kept: its run and the number of its last batch",
    )

    @property
    def limits(self) -> StagingLimits:
        """Limits for the broker."""
        return StagingLimits(
            max_bytes=self.max_bytes,
            max_attempts=self.max_attempts,
            max_queries=self.max_queries,
            keep_ms=parse_policy(f"delete,{self.keep}"),
            forget_ms=parse_policy(f"delete,{self.forget}"),
        )


class Tube(Section):
    """TubeMQ master and broker of this node."""

    broker_id: int = Field(default=1, ge=1, le=2**31 - 1, description="number of the broker at the master")
    admin_token: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="administration token, which HTTP requests send as `confModAuthToken`; default: a "
        "random token, created at the first start in `tube/admin-token` of the data directory",
    )
    check_visit_tokens: bool = Field(
        default=False,
        description="refuse sends and registrations without a visit token of the master, as TubeMQ does "
        "with `startVisitTokenCheck`. Applies from two minutes after the registration of a "
        "broker, while it can reach its master",
    )
    topics: dict[TopicName, TopicSection] = Field(default_factory=dict, description="topics to create at the start")
    max_store_bytes: int | None = Field(
        default=None,
        ge=1 << 20,
        description="maximum size of each store in bytes: beyond it the oldest segments (64 MiB each) are "
        "deleted, independent of their age. Default: no limit",
    )
    consumer_session_s: int = Field(
        default=30,
        ge=3,
        le=3600,
        description="session timeout: seconds after which the partitions of a consumer without heartbeats "
        "go to other members of its group. A consumer may set less (`session_timeout_s`). Use "
        "more than two heartbeat periods of every client: 13 s for Java clients, 10 s for C++ "
        "and Go clients by default",
    )
    staging: StagingSection = Field(
        default_factory=StagingSection, description="staging of rows for exactly-once writes"
    )
    limits: TubeLimitOptions = Field(  # type: ignore[valid-type] # a model that is created from the fields of the limits
        default_factory=TubeLimitOptions, description="limits of master and broker"
    )
    access: TubeAccess = Field(
        default_factory=TubeAccess, description="clients that need not sign if `security.passwords` is set"
    )
    tls: TubeTls | None = Field(
        default=None, description="TLS listeners of master and broker, in addition to the plain ones"
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        # `topics: [a_topic]` and `a_topic:` without a body use the defaults.
        if isinstance(value, dict):
            topics = value.get("topics")
            if isinstance(topics, list) and all(isinstance(name, str) for name in topics):
                return {**value, "topics": {name: {} for name in topics}}
            if isinstance(topics, dict):
                return {**value, "topics": {name: {} if body is None else body for name, body in topics.items()}}
        return value


class Disk(Section):
    """Disk space limits of the data directory."""

    max_bytes: int = Field(
        default=0,
        ge=0,
        description="maximum size of the data directory in bytes; 0: no limit. Beyond it requests that "
        "need space are rejected: MQTT messages with 0x97, SETs with the quota error, TubeMQ "
        "sends with 419",
    )
    min_free_bytes: int | None = Field(
        default=None,
        ge=0,
        description="minimum free space of the file system in bytes, with the same effect; 0: no minimum. "
        "Default: 5 % of the file system, at most 256 MiB",
    )


class RuleOverflowPolicy(StrEnum):
    """Reaction of a rule to messages that exceed its limit while the log is unavailable."""

    WAIT = "wait"
    """Connections of publishers are not read, so publishers wait."""
    REFUSE = "refuse"
    """QoS 1 and 2 messages are rejected with 0x97 Quota exceeded, QoS 0 messages are dropped."""


class RuleTargets(Section):
    """Target of a rule outside the node."""

    kafka: KafkaSection | None = Field(default=None, description="topic of a Kafka cluster")
    tube: TubeClusterSection | None = Field(
        default=None, description="topic of a TubeMQ cluster, written to any of its brokers"
    )

    @model_validator(mode="after")
    def _one_target(self) -> RuleTargets:
        if (self.kafka is None) == (self.tube is None):
            raise ValueError("set either `kafka` or `tube`")
        return self

    @property
    def section(self) -> KafkaSection | TubeClusterSection:
        """The one that is set."""
        found = self.kafka or self.tube
        assert found is not None, "a rule has one target"
        return found


class RuleSection(Section):
    """Copy MQTT messages that match ``filter`` to the TubeMQ topic ``topic``, or to another target."""

    filter: FilterText = Field(description="MQTT topic filter")
    topic: TopicName | None = Field(
        default=None,
        description="TubeMQ topic; created with default settings if `tube.topics` does not list it. Set either this or "
        "`to`",
    )
    to: RuleTargets | None = Field(default=None, description="target outside the node; default: the TubeMQ topic")
    name: str = Field(default="", max_length=64, description="name in messages; default: the topic")
    key: TemplateText = Field(
        default_factory=lambda: Template("{topic}"),
        json_schema_extra={"default": "{topic}"},
        description="template of the record's key",
    )
    msg_type: TemplateText = Field(
        default_factory=lambda: Template("{level.-1}"),
        json_schema_extra={"default": "{level.-1}"},
        description="template of the record's message type (`$msgType$`), by which consumers filter",
    )
    partition: int | None = Field(
        default=None,
        ge=0,
        description="partition of all records; default: selected by the key",
    )
    attributes: dict[AttributeName, TemplateText] = Field(
        default_factory=dict,
        description="templates of additional attributes of the record; an empty attribute is omitted",
    )
    max_pending_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1, description="maximum number of bytes that wait for the log"
    )
    overflow: RuleOverflowPolicy = Field(
        default=RuleOverflowPolicy.WAIT,
        description="reaction beyond `max_pending_bytes`: `wait` stops reading from publishers, `refuse` "
        "rejects messages with 0x97",
    )

    @model_validator(mode="after")
    def _one_target(self) -> RuleSection:
        if (self.topic is None) == (self.to is None):
            raise ValueError("set either `topic` (the node's broker) or `to` (Kafka or a TubeMQ cluster)")
        if self.to is not None and self.to.kafka is not None and "msg_type" in self.model_fields_set:
            raise ValueError("`msg_type` is for TubeMQ: use `attributes`, which become headers, with `to.kafka`")
        return self

    @property
    def target(self) -> str:
        """The topic to which the rule writes."""
        if self.to is not None:
            return self.to.section.topic
        assert self.topic is not None, "a rule has one target"
        return self.topic

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.name or self.target


BucketUrl = Annotated[str, Field(pattern=r"^s3a?://")]
"""URL of a path in a bucket."""


class PipelineSection(Section):
    """Pipeline whose dead letters the web console shows and redrives."""

    file: Path = Field(description="pipeline file")
    directory: Path | None = Field(
        default=None,
        description="working directory of its runs, which relative paths in the file refer to; default: that of the "
        "file",
    )
    state_dir: Path | BucketUrl | None = Field(
        default=None,
        description="`--state-dir` of its runs: a directory, or `s3://BUCKET/KEY`; default: `penstock-pipelines/NAME` "
        "in `directory`",
    )


class NodeConfig(Section):
    """Configuration of a node."""

    profile: Profile | None = Field(
        default=None,
        description="settings to add: `aio` for [applications of Azure IoT Operations](../state-store/aio.md). Other "
        "settings override them. Default: none",
    )
    data_dir: Path = Field(default=Path("penstock-data"), description="directory of all data of the node")
    durability: Durability = Field(
        default=Durability.DURABLE,
        description="what an acknowledgement means: `durable` (fsynced), `flushed` (written to the "
        "operating system) or `memory`",
    )
    clock_step_hold_s: float = Field(
        default=STEP_HOLD_S,
        ge=0,
        le=86_400,
        description="seconds before versions and deadlines follow a step of the system clock of more than "
        "30 s; 0: follow at once",
    )
    disk: Disk = Field(default_factory=Disk, description="disk space limits of the data directory")
    mqtt: MqttListener = Field(default_factory=MqttListener, description="MQTT broker: listeners and limits")
    mqtt_faults: AddressText | None = Field(
        default=None,
        description="HOST:PORT of an additional MQTT listener with fault injection, for tests only",
    )
    security: Security = Field(default_factory=Security, description="authentication and authorization")
    tube_master: TubeMasterListener = Field(
        default_factory=TubeMasterListener, description="listener of the TubeMQ master"
    )
    tube_broker: TubeBrokerListener = Field(
        default_factory=TubeBrokerListener, description="listener of the TubeMQ broker"
    )
    tube_broker_http: TubeBrokerHttpListener = Field(
        default_factory=TubeBrokerHttpListener, description="HTTP administration of the TubeMQ broker"
    )
    http: HttpListener = Field(
        default_factory=HttpListener, description="health, metrics and administration of the TubeMQ master"
    )
    statestore: StateStoreSection = Field(
        default_factory=StateStoreSection, description="state store: quotas, extensions, change capture"
    )
    tube: Tube = Field(default_factory=Tube, description="TubeMQ master and broker: topics, retention, access")
    rules: list[RuleSection] = Field(default_factory=list, description="copy MQTT topics into TubeMQ topics")
    bridges: list[BridgeEntry] = Field(default_factory=list, description="bridges to other MQTT brokers")
    pipelines: dict[Annotated[str, Field(min_length=1)], PipelineSection] = Field(
        default_factory=dict, description="pipelines by name, whose dead letters the web console manages"
    )
    console: ConsoleSection = Field(default_factory=ConsoleSection, description="web console: schemas of payloads")
    cluster: ClusterSection | None = Field(
        default=None, description="cluster with standby nodes, which needs etcd; default: a single node"
    )
    tracing: TracingSection | None = Field(
        default=None,
        description="traces of messages that rules copy and of requests to the state store, exported by "
        "OpenTelemetry; default: none",
    )
    telemetry: TelemetrySection | None = Field(
        default=None, description="metrics and log lines over OTLP, exported by OpenTelemetry; default: none"
    )
    log_level: LogLevel = Field(default=LogLevel.INFO, description="minimum severity of log lines")
    log_format: LogFormat = Field(default=LogFormat.TEXT, description="format of log lines")

    @model_validator(mode="after")
    def _consistent(self) -> NodeConfig:
        advertised = self.tube_broker.advertise or self.tube_broker.bind
        if advertised.is_wildcard:
            raise ValueError(
                f"tube_broker: {advertised} means every interface; TubeMQ clients need an address that they can reach:"
                " set tube_broker.advertise (--tube-broker-advertise HOST:PORT)"
            )
        if self.tube.admin_token in KNOWN_TOKENS:
            raise ValueError(
                "tube.admin_token: this token is in TubeMQ's documentation, so it is not secret:"
                " set another one, or none (then a random one is created in tube/admin-token of the data directory)"
            )
        self.security.check({"mqtt": self.mqtt, **self.mqtt.listeners})
        for part in (self.mqtt, self.tube_master, self.tube_broker_http, self.http):
            if part.advertise is not None and part.advertise.is_wildcard:
                raise ValueError(f"advertise {part.advertise}: no client can connect to every interface")
        if self.mqtt_faults is not None and self.mqtt.transport is not Transport.TCP:
            raise ValueError("mqtt_faults forwards to `mqtt`, which needs the transport tcp")
        names = [bridge.name for bridge in self.bridges]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"bridges[{index}].name: {name!r} is the name of another bridge")
        for index, rule in enumerate(self.rules):
            if rule.to is not None:
                continue
            topic = self.tube.topics.get(rule.target, TopicSection())
            if rule.partition is not None and rule.partition % 10_000 >= topic.partitions:
                raise ValueError(
                    f"rules[{index}].partition: topic {rule.target!r} has partitions 0 to {topic.partitions - 1}"
                    " (plus 10000 for each further store)"
                )
        self._check_addresses()
        if self.cluster is not None:
            self._check_cluster()
        return self

    @property
    def creates_files(self) -> bool:
        """Whether the next start creates files that the configuration names: the first one with the profile aio."""
        return self.profile is Profile.AIO and not AioFiles(self.data_dir).certificate.exists()

    def _check_addresses(self) -> None:
        before: dict[str, Address] = {}
        for option, address in self.addresses().items():
            for other, taken in before.items():
                if address.port and address.port == taken.port and _overlap(address.host, taken.host):
                    raise ValueError(
                        f"{setting_of(option)}: {address} is in use by `{setting_of(other)}` ({taken}): each needs a"
                        " port of its own"
                    )
            before[option] = address

    def _check_cluster(self) -> None:
        """Refuse settings whose data would not be replicated, and addresses that are not known before the start."""
        if self.profile is Profile.AIO:
            raise ValueError("cluster: the profile aio has certificates of one node: remove `profile`")
        if self.durability is not Durability.DURABLE:
            raise ValueError(f"cluster: durability {self.durability.value} does not commit to etcd: use `durable`")
        if self.statestore.capture_topic:
            raise ValueError(
                "cluster: `statestore.capture_topic` does not work in a cluster: remove it, or set it on another node,"
                " without `cluster`"
            )
        listeners: dict[str, ListenerSection] = {"mqtt": self.mqtt, "http": self.http}
        if self.cluster is not None and self.cluster.tubemq:
            listeners |= {
                "tube_master": self.tube_master,
                "tube_broker": self.tube_broker,
                "tube_broker_http": self.tube_broker_http,
            }
            if "broker_id" not in self.tube.model_fields_set:
                raise ValueError("cluster: each broker of a cluster has its own id: set `tube.broker_id`")
        else:
            local = [rule for rule in self.rules if rule.to is None]
            for setting, asked in {"rules": local, "tube.topics": self.tube.topics, "tube.tls": self.tube.tls}.items():
                if asked:
                    raise ValueError(f"cluster: `{setting}` needs TubeMQ: set `cluster.tubemq: true`, or remove it")
        listeners |= {f"mqtt.listeners.{name}": entry for name, entry in self.mqtt.listeners.items()}
        ports = {name: listener.bind.port for name, listener in listeners.items()}
        if self.tube.tls is not None:
            ports |= {"tube.tls.master_port": self.tube.tls.master_port}
        for name, port in ports.items():
            if not port:
                raise ValueError(f"cluster: {name}: a port of 0 is not known to the other nodes: set a port")
        for name, listener in listeners.items():
            if listener.advertise is None and listener.bind.is_wildcard:
                raise ValueError(
                    f"cluster: {name}: {listener.bind} means every interface, and a standby names the address of the"
                    " active node: set `advertise`"
                )

    def addresses(self) -> dict[str, Address]:
        """Every address on which a node listens, by the option or setting that changes it."""
        found = {"mqtt": self.mqtt.bind}
        found |= {f"mqtt.listeners.{name}": entry.bind for name, entry in self.mqtt.listeners.items()}
        found["http"] = self.http.bind
        if self.cluster is None or self.cluster.tubemq:
            found["tube-broker-http"] = self.tube_broker_http.bind
            found["tube-master"] = self.tube_master.bind
            found["tube-broker"] = self.tube_broker.bind
        if self.tube.tls is not None:
            found["tube.tls.master_port"] = Address(self.tube_master.bind.host, self.tube.tls.master_port)
            found["tube.tls.broker_port"] = Address(self.tube_broker.bind.host, self.tube.tls.broker_port)
        if self.mqtt_faults is not None:
            found["mqtt-faults"] = self.mqtt_faults
        return found

    def topics(self) -> dict[str, TopicSection]:
        """Topics that are created at the start: configured ones, and those of rules."""
        capture = self.statestore.capture_topic
        captured = {} if capture is None else {capture: TopicSection(partitions=1)}
        rules = {rule.target: TopicSection() for rule in self.rules if rule.to is None}
        return {**captured, **rules, **self.tube.topics}


def setting_of(option: str) -> str:
    """Return the name in the file of a key of :meth:`NodeConfig.addresses`."""
    return option.replace("-", "_")


def _overlap(host: str, other: str) -> bool:
    """Return True if two listeners at the same port of these hosts cannot coexist: IPv4 and IPv6 are separate."""
    return host == other or ((":" in host) == (":" in other) and bool({host, other} & {"0.0.0.0", "::"}))  # noqa: S104 - compared only


class Option(NamedTuple):
    """A setting that has a command line option and an environment variable."""

    flag: str
    location: tuple[str, ...]

    @property
    def variable(self) -> str:
        """Environment variable: ``PENSTOCK_DATA_DIR`` for ``data-dir``."""
        return "PENSTOCK_" + self.flag.upper().replace("-", "_")


LISTENERS = ("mqtt", "tube-master", "tube-broker", "tube-broker-http", "http")

OPTIONS: tuple[Option, ...] = (
    Option("profile", ("profile",)),
    Option("data-dir", ("data_dir",)),
    Option("durability", ("durability",)),
    *(Option(name, (name.replace("-", "_"), "bind")) for name in LISTENERS),
    *(Option(f"{name}-advertise", (name.replace("-", "_"), "advertise")) for name in LISTENERS),
    *(Option(f"{name}-anonymous", (name.replace("-", "_"), "anonymous")) for name in LISTENERS),
    Option("passwords", ("security", "passwords")),
    Option("policies", ("security", "policies")),
    Option("mqtt-faults", ("mqtt_faults",)),
    Option("log-level", ("log_level",)),
    Option("log-format", ("log_format",)),
)

BROKER_OPTIONS: tuple[Option, ...] = (
    Option("max-store-size", ("max_store_bytes",)),
    Option("staging-max-size", ("staging", "max_bytes")),
    Option("staging-keep", ("staging", "keep")),
    Option("consumer-session", ("consumer_session_s",)),
)
"""Options of ``penstock tube broker run`` that are settings of the section `Tube`."""


def tube_section(flags: Mapping[str, str | int | None], limits: Mapping[str, str] = MappingProxyType({})) -> Tube:
    """The section `Tube` of a broker without a node; ``flags`` maps flags of ``BROKER_OPTIONS`` to values or None.

    ``limits`` maps names of `TubeLimits` to values.

    Raises:
        ConfigError: a value cannot be used; the error names the flag.
    """
    document = Document("defaults", {})
    for option in BROKER_OPTIONS:
        given = flags.get(option.flag)
        if given is not None:
            document.put(option.location, given, f"--{option.flag}")
    for name, value in limits.items():
        document.put(("limits", name), value, f"--set-limit {name}")
    return validate(document, Tube)


def load_config(path: Path | None, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> NodeConfig:
    """Load the configuration of a node.

    ``path`` is the file (None: ``./penstock.yaml`` if it exists), ``flags`` maps names of ``OPTIONS`` to values of the
    command line. Relative paths in the file are relative to the file, others to the working directory.

    Raises:
        ConfigError: a setting cannot be used; the error names the source of the setting.
    """
    return validate(read_settings(path, flags, environment), NodeConfig)


def read_settings(path: Path | None, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> Document:
    """Return the settings of a configuration with the source of each, not validated; otherwise as `load_config`."""
    if path is None and DEFAULT_FILE.exists():
        path = DEFAULT_FILE
    document = read_document(path, environment) if path is not None else Document("defaults", {})
    if path is not None:
        document.data = _beside_the_file(document.data, NodeConfig, path.parent)
    for option in OPTIONS:
        given = flags.get(option.flag)
        where = f"--{option.flag}"
        if given is None:
            # An empty variable counts as unset.
            given, where = environment.get(option.variable) or None, option.variable
        if given is None:
            continue
        if option.location == ("data_dir",) and not given.strip():
            raise ConfigError(f"{where}: the data directory is empty", option="data_dir", where=where)
        _put(document, option, given, where)
    add_profile(document)
    return document


def _beside_the_file(value: object, kind: Any, directory: Path) -> Any:
    """Resolve relative paths in ``value``, of type ``kind``, against the directory of the file."""
    inner = get_args(kind)
    if kind is Path and isinstance(value, str) and not value.startswith(("s3://", "s3a://")):
        return str(directory / Path(value).expanduser())
    if get_origin(kind) is list and isinstance(value, list):
        return [_beside_the_file(each, inner[0], directory) for each in value]
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: _beside_the_file(each, inner[1], directory) for name, each in value.items()}
    if get_origin(kind) in (Union, UnionType):
        for one in inner:
            value = _beside_the_file(value, one, directory)
    elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
        kinds = {name: field.annotation for name, field in kind.model_fields.items()}
        return {name: _beside_the_file(each, kinds.get(name), directory) for name, each in value.items()}
    return value


def _put(document: Document, option: Option, given: Any, where: str) -> None:
    head = option.location[0]
    short = document.data.get(head)
    if len(option.location) > 1 and isinstance(short, str):
        document.put((head, "bind"), short, document.where((head,)))
    document.put(option.location, given, where)
