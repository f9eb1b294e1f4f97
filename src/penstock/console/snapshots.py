"""Types of the HTTP API below ``/api/v1``, which the command line and the web console show.

Times ``_at`` are milliseconds since 1970, durations ``_s`` seconds, sizes ``_bytes`` bytes; None: not known or not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum

__all__ = [
    "BrokerSnapshot",
    "ClientDetail",
    "ClientSnapshot",
    "ClusterMember",
    "ClusterSnapshot",
    "EtcdSnapshot",
    "Event",
    "GroupDetail",
    "GroupPartition",
    "GroupSnapshot",
    "Header",
    "Health",
    "Hop",
    "JobError",
    "Key",
    "KeyChangeSnapshot",
    "KeyVersion",
    "LedgerSink",
    "ListenerSnapshot",
    "Load",
    "MemberSnapshot",
    "MessageSnapshot",
    "NodeSnapshot",
    "OffsetMove",
    "OffsetReset",
    "Overview",
    "PartitionSnapshot",
    "PipelineDetail",
    "PipelineExpectation",
    "PipelineJob",
    "PipelineNode",
    "PipelineSink",
    "PipelineSnapshot",
    "Reason",
    "ReconciledSink",
    "RecordPage",
    "RecordSnapshot",
    "RetainedSnapshot",
    "Rule",
    "SampledRejection",
    "SampledStep",
    "Severity",
    "SubscriptionSnapshot",
    "TopicDetail",
    "TopicSnapshot",
    "as_json",
]


class Severity(StrEnum):
    """Severity of a reason. ``problem``: the node is not ready; ``warning``: a part does not work as configured."""

    PROBLEM = "problem"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Reason:
    """A problem or a warning. ``code`` is stable, for programs; ``hint`` is the next action."""

    severity: Severity
    part: str
    code: str
    what: str
    why: str | None = None
    hint: str | None = None
    since_at: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the node: whether it is ready, and all reasons why not. ``state``: starting, ready or shutting down."""

    ready: bool
    state: str
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class ListenerSnapshot:
    """A listener. ``max_connections`` 0: no limit of its own. ``refused``: connections refused since the start."""

    name: str
    protocol: str
    address: str
    connections: int | None = None
    max_connections: int | None = None
    refused: int | None = None
    anonymous: bool | None = None


@dataclass(frozen=True, slots=True)
class Hop:
    """A hop on the path of the data. ``rate``, ``error_rate``: per second, of the last seconds.

    ``lag_records`` wait after it, the oldest for ``lag_s``; ``lag_exact``: True if the lag was counted, False if it was
    estimated. ``to``: ids of the hops that follow. ``total`` and ``errors`` count since the start.
    """

    id: str
    title: str
    unit: str
    rate: float
    total: int
    errors: int = 0
    error_rate: float = 0.0
    lag_records: int | None = None
    lag_s: float | None = None
    lag_exact: bool = True
    to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the process. ``cpu``: cores in use; ``loop_delay_s``: lateness of a timer of the event loop."""

    cpu: float
    memory_bytes: int
    loop_delay_s: float
    disk_used_bytes: int
    disk_free_bytes: int
    commit_s: Mapping[str, float]
    """Longest duration of the last commits, by part."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The node, and the settings that operators need first."""

    version: str
    core: str
    pid: int
    data_dir: str
    durability: str
    started_at: int
    uptime_s: float
    now_at: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The data of the first page."""

    node: NodeSnapshot
    health: Health
    listeners: tuple[ListenerSnapshot, ...]
    load: Load
    hops: tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class ClientSnapshot:
    """An MQTT session and its connection. ``limits``: names of the limits that it has currently reached.

    ``owner``: the principal that may resume the session; "" without access control. ``ends_at``: expiry of a
    disconnected session.
    """

    client_id: str
    owner: str
    username: str | None
    connected: bool
    address: str | None
    protocol: str | None
    connected_s: float | None
    silent_s: float | None
    keep_alive_s: float | None
    persistent: bool
    subscriptions: int
    queued: int
    queued_bytes: int
    inflight: int
    inflight_limit: int | None
    unacknowledged: int
    ends_in_s: float | None
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubscriptionSnapshot:
    """A subscription of a session. ``group``: the name of a shared subscription."""

    client_id: str
    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    connected: bool
    group: str | None = None


@dataclass(frozen=True, slots=True)
class ClientDetail:
    """A client, its will, and the first ``MAX_LIMIT`` subscriptions: more are in the list of subscriptions."""

    client: ClientSnapshot
    will_topic: str | None
    subscriptions: tuple[SubscriptionSnapshot, ...]


@dataclass(frozen=True, slots=True)
class RetainedSnapshot:
    """A retained message, without its payload. ``expires_in_s`` None: it does not expire."""

    topic: str
    bytes: int
    qos: int
    age_s: float
    expires_in_s: float | None


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the state store. ``key`` None: it is not UTF-8, see ``key_base64``; likewise ``value`` with
    ``value_base64``.

    ``value`` is set only if values were requested. ``value_bytes`` is its whole size; a value longer than
    ``MAX_VALUE_BYTES`` of ``console/statestore.py`` is truncated in lists, and complete in the response for one key.
    """

    key: str | None
    key_base64: str
    value_bytes: int
    version: str
    version_age_s: float
    expires_in_s: float | None
    fencing_token: str | None
    owner: str
    value: str | None = None
    value_base64: str | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class KeyVersion:
    """An earlier or current version of a key: ``value``, or ``value_base64`` if it is not text; ``at`` by its clock."""

    version: str
    at: int
    value_bytes: int
    format: str
    value: str | None
    value_base64: str | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class KeyChangeSnapshot:
    """A change of an observed key, or its entry at the beginning; ``at``: its arrival in ms.

    ``operation``: ``ENTRY``, ``SET``, ``DELETE`` or ``EXPIRE``. ``value``, or ``value_base64`` if it is not text, is
    None for the last two. ``truncated``: only the beginning is shown. ``owner`` is the user that created the key, ""
    for an anonymous client; it is None for the last two, and if the key had changed again when the change arrived: then
    ``expires_in_s`` and ``fencing_token`` are not known either.
    """

    at: int
    key: str | None
    key_base64: str
    operation: str
    version: str | None
    expires_in_s: float | None
    fencing_token: str | None
    owner: str | None
    value_bytes: int | None
    format: str | None
    value: str | None
    value_base64: str | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class MessageSnapshot:
    """An MQTT message. ``format``: ``json``, ``text``, ``binary``, or one whose ``value`` is JSON: ``cbor``,
    ``msgpack``, ``sparkplug``, ``avro`` or ``protobuf``.

    ``value_base64`` has the bytes of payloads other than text and JSON. ``truncated``: only the beginning is shown.
    ``problem``: the reason why the payload was not decoded with the schema of its topic.
    """

    at: int
    topic: str
    retain: bool
    bytes: int
    format: str
    value: str | None
    value_base64: str | None
    truncated: bool
    content_type: str | None = None
    response_topic: str | None = None
    correlation_base64: str | None = None
    expires_in_s: int | None = None
    text_payload: bool = False
    """Payload Format Indicator 1: the publisher says that the payload is UTF-8."""
    user_properties: tuple[Header, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionSnapshot:
    """A partition. Offsets count 28 bytes for each record of its store. ``records_exact`` False: an upper bound."""

    partition: int
    records: int
    records_exact: bool
    first_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A TubeMQ topic on this node. ``lag_records``: of the group with the largest lag. ``rate``: records/s."""

    topic: str
    partitions: int
    bytes: int
    rate: float | None
    last_at: int | None
    retention: str | None
    accepts_records: bool
    accepts_consumers: bool
    groups: int
    lag_records: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """The offset of a group in a partition. ``lag_exact`` False: ``lag_records`` is an upper bound.

    ``lag_s``: age of the oldest record that the group has not consumed.
    """

    topic: str
    partition: int
    offset: int
    first_offset: int
    end_offset: int
    lag_records: int
    lag_s: float
    lag_exact: bool
    member: str | None = None


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """A consumer group. The numbers are sums over its partitions on this node; ``lag_s`` is the age of the oldest
    record."""

    group: str
    state: str
    members: int
    topics: tuple[str, ...]
    partitions: int
    lag_records: int
    lag_s: float
    lag_exact: bool


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """A TubeMQ broker that the master of this node knows.

    ``state``: ``running``, ``offline`` (it has registered before) or ``never registered``. ``tls_port`` and ``http``
    (the address of its administration): None if it has none. ``topics``: those that it serves; ``silent_s``: seconds
    since its last heartbeat. ``failure``: why it accepts no records, if it reports a reason.
    """

    broker: int
    address: str
    tls_port: int | None
    http: str | None
    state: str
    accepts_records: bool
    accepts_consumers: bool
    topics: int
    silent_s: float | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """A member of a group. ``silent_s``: seconds since its last heartbeat to the master."""

    member: str
    address: str
    partitions: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class GroupDetail:
    """A group with its partitions and members, the first ``MAX_LIMIT`` of each; the counts are those of ``group``."""

    group: GroupSnapshot
    partitions: tuple[GroupPartition, ...]
    members: tuple[MemberSnapshot, ...]


@dataclass(frozen=True, slots=True)
class OffsetMove:
    """A change of a committed offset. ``records``: read again if positive, skipped if negative."""

    topic: str
    partition: int
    from_offset: int
    to_offset: int
    records: int
    exact: bool


@dataclass(frozen=True, slots=True)
class OffsetReset:
    """A reset of the offsets of a group, or its preview (``dry_run``). The numbers are sums over all partitions on this
    node.

    ``moves``: the first ``MAX_LIMIT`` of ``partitions``. ``digest``: of all partitions and their offsets before it.
    """

    group: str
    to: str
    dry_run: bool
    partitions: int
    read_again: int
    skipped: int
    exact: bool
    moves: tuple[OffsetMove, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class TopicDetail:
    """A topic with its partitions, and the groups that have offsets in it."""

    topic: TopicSnapshot
    partitions: tuple[PartitionSnapshot, ...]
    groups: tuple[GroupPartition, ...]
    group_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """A header of a record. ``value`` None: it is not UTF-8, see ``value_base64``."""

    name: str
    value: str | None
    value_base64: str | None = None


@dataclass(frozen=True, slots=True)
class RecordSnapshot:
    """A record of a TubeMQ partition. ``at``: when the broker appended it.

    ``format``: ``json``, ``text`` or ``binary`` by its value, ``avro`` or ``protobuf`` by the schema of its topic, or
    ``undecodable``: its attributes do not fit its length. ``key`` and ``value`` that are not text are in ``key_base64``
    and ``value_base64``; with a schema, ``value`` is JSON, and a whole record has its bytes in ``value_base64``.
    ``value_bytes`` is the whole size; ``truncated``: the value is cut, see the record alone. ``problem``: the reason
    why the schema was not used.
    """

    partition: int
    offset: int
    at: int
    format: str
    value_bytes: int
    key: str | None = None
    key_base64: str | None = None
    value: str | None = None
    value_base64: str | None = None
    truncated: bool = False
    topic: str | None = None
    id: str | None = None
    msg_type: str | None = None
    content_type: str | None = None
    event_time_at: int | None = None
    headers: tuple[Header, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Records that pass a filter. ``next``: the cursor of the next page; None: there are no more in this direction.

    A page may be short or empty although it has a cursor: the work of one request is bounded. ``newer``: the cursor of
    the records that arrive later; None on later pages of a list that begins with the newest record. ``total``: records
    of the partitions, an upper bound where old indexes are not in memory. ``examined``: records that the filter was
    compared with. ``unsearched``: those of them whose value is too long for a JSON path. ``damaged``: records that
    cannot be read. ``expired``: the retention has deleted records between the requested start and the first one.
    """

    rows: tuple[RecordSnapshot, ...]
    next: str | None
    total: int
    newer: str | None
    examined: int
    unsearched: int = 0
    damaged: int = 0
    expired: bool = False


@dataclass(frozen=True, slots=True)
class PipelineSnapshot:
    """A pipeline, as its last run reported itself. Counts are those of this run, over all sinks.

    ``state``: ``running``, ``stopped``, ``failed``, ``lost`` (its lease has expired, but it did not report its end), or
    ``never run``. ``why``: the error that ended it, or those of sinks without which it continues. Lags are those of the
    sink that is farthest behind, None unless it runs. ``dead``: dead letters that were written; records of each sink if
    none were. ``managed``: its dead letters are in the configuration of this node. ``spark_ui``: address of Spark's web
    interface, None unless it runs and has one. ``open_letters``: dead letters of all runs that were open or corrected
    when this node last listed them, and those written since; None: it has not listed them since its start.
    """

    pipeline: str
    state: str
    run: str | None
    host: str | None
    pid: int | None
    since_at: int | None
    status_age_s: float | None
    why: str | None
    sinks: int
    rows_per_s: float
    lag_records: int | None
    lag_s: float | None
    read: int
    out: int
    dead: int
    restarts: int
    managed: bool
    spark_ui: str | None = None
    open_letters: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineSink:
    """A sink of a pipeline. ``behind_s``: of the watermark behind the clock; ``state_*``: for dedupes and windows.

    ``dead``: records that a step or the sink could not process; ``letters``: dead letters that the sink's query wrote.
    ``failing_s``: since the first failure after the last finished batch, 0 without one. ``rows_per_s``: records read
    per second of batch time; ``written_per_s``: rows, messages or requests written per second; 0 in runs of versions
    that do not report it.
    """

    sink: str
    batch: int | None
    batches: int
    read: int
    out: int
    dead: int
    letters: int
    filtered: int
    duplicates: int
    exploded: int
    late: int
    restarts: int
    failing_s: float
    rows_per_s: float
    written_per_s: float
    batch_s: float | None
    lag_records: int | None
    lag_s: float | None
    in_batch_records: int | None
    in_batch_s: float | None
    behind_s: float | None
    state_rows: int | None
    state_bytes: int | None
    state_disk_bytes: int | None


@dataclass(frozen=True, slots=True)
class PipelineNode:
    """A node in the graph of a pipeline file. ``role``: source, step or sink; ``kind``: as in the file.

    ``reads``: ids of the nodes that it reads; ``late``: it reads the late records of a window. ``dead_letters``: it can
    reject records. Of a source: the largest ``rows_per_s`` and ``lag_*`` of the sinks that read no other source. Of a
    step with state: ``state_*``, the sum over the queries with this step, and ``behind_s``, the largest of these. These
    values are None in graphs of more than 150 nodes, which the console does not draw.
    """

    id: str
    name: str
    role: str
    kind: str
    reads: tuple[str, ...]
    late: bool
    dead_letters: bool
    rows_per_s: float | None = None
    lag_records: int | None = None
    lag_s: float | None = None
    behind_s: float | None = None
    state_rows: int | None = None
    state_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineExpectation:
    """Counts of an expectation: rows that the step checked for a sink, and rows that violate it."""

    sink: str
    step: str
    expectation: str
    rows: int
    violations: int


@dataclass(frozen=True, slots=True)
class LedgerSink:
    """Counts of a sink in the ledger, over all batches of all runs. ``batch``: the last one, None before the first.

    ``version``: version of the pipeline file that computed the last batch, None if it is not known.
    """

    sink: str
    batch: int | None
    version: int | None
    batches: int
    read: int
    exploded: int
    out: int
    dead: int
    filtered: int
    duplicates: int
    late: int


@dataclass(frozen=True, slots=True)
class ReconciledSink:
    """The ledger of a sink, compared with source and target: the differences are in ``off``, values that cannot be
    checked in ``unknown``."""

    sink: str
    ok: bool
    batches: int
    read: int
    exploded: int
    out: int
    dead: int
    filtered: int
    duplicates: int
    late: int
    off: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampledRejection:
    """Rows of a sample that a step rejected for one reason."""

    code: str
    reason: str
    rows: int


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Rows after a step, of a sample of the newest records. ``live``: all that passed; ``rows`` has the first of them.

    A value is text, or JSON if it is not text; None is null. ``filtered`` and ``dead`` count the rows that this step or
    one before it excluded; ``rejections`` are its own.
    """

    step: str
    kind: str
    live: int
    filtered: int
    dead: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    rejections: tuple[SampledRejection, ...]


@dataclass(frozen=True, slots=True)
class JobError:
    """The error with which a job failed."""

    what: str
    why: str | None
    hint: str | None


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """A command for a pipeline that may take minutes: ``reconcile`` or ``sample``, with its results so far.

    ``state``: ``running``, ``done``, ``failed`` (see ``error``) or ``cancelled``. ``parameters``: those of the request.
    """

    pipeline: str
    job: str
    state: str
    started_at: int
    duration_s: float
    parameters: Mapping[str, str]
    sinks: tuple[ReconciledSink, ...] = ()
    steps: tuple[SampledStep, ...] = ()
    error: JobError | None = None


@dataclass(frozen=True, slots=True)
class PipelineDetail:
    """A pipeline with its sinks. ``graph``: empty for runs of earlier versions, which do not report it."""

    pipeline: PipelineSnapshot
    sinks: tuple[PipelineSink, ...]
    graph: tuple[PipelineNode, ...] = ()
    expectations: tuple[PipelineExpectation, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that copies an MQTT topic into the log; counters since the start; ``waiting`` is the current number."""

    filter: str
    topic: str
    received: int
    logged: int
    refused: int
    dropped: int
    waiting: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """A node of a cluster. ``role``: ``active``, ``standby``, ``loading``: a standby that loads a snapshot of the
    active node, or ``blocked``: a standby that cannot become active.

    ``ready``: it is active, or follows so closely that the active node would hand over to it. ``mqtt``, ``http``: its
    addresses for clients. ``lag_commits``, ``lag_s`` None: not known, as of a node that does not follow. ``problem``:
    the reason why it is blocked, or how much of the snapshot was loaded. ``differs``: settings that are not those of
    the active node.
    """

    node: str
    role: str
    ready: bool
    version: str
    mqtt: str
    http: str
    lag_commits: int | None
    lag_s: float | None
    problem: str | None
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EtcdSnapshot:
    """A member of etcd at ``endpoint``; ``leads``: it is the leader of etcd. ``alarms``: errors that it reports.

    ``used_bytes``: size of its database; ``quota_bytes`` None: not known, as before etcd 3.6. ``problem``, ``hint``:
    why it did not answer; then nothing else is known. Nor is it if only root may read its status.
    """

    endpoint: str
    version: str | None = None
    leads: bool | None = None
    used_bytes: int | None = None
    quota_bytes: int | None = None
    alarms: tuple[str, ...] = ()
    problem: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster. ``active``: name of the active node, with its ``term``; ``commits``: last commit of each log.

    ``commit_wait_s``: time for which the oldest commit has been waiting for etcd; only the active node knows it.
    ``reasons``: what needs attention.
    """

    name: str
    active: str | None
    term: int
    members: tuple[ClusterMember, ...]
    commits: Mapping[str, int]
    etcd: tuple[EtcdSnapshot, ...]
    commit_wait_s: float | None = None
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """An event. ``number`` increases by one per event; ``count``: number of consecutive repetitions."""

    number: int
    at: int
    level: str
    part: str
    text: str
    count: int = 1


def as_json(value: object) -> object:
    """Return ``value`` as JSON data: snapshots become objects with the names of their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [as_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float):
        return round(value, 3)
    return value
