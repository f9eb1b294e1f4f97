"""The model of a pipeline file, and the plan of its queries, without Spark.

``plan`` returns a query for each sink: the steps from the sources to the sink, and the dead letters that the query
writes. ``loader.load`` checks that the references of a ``Pipeline`` are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from penstock.errors import ConfigError
from penstock.mqtt.url import parse_broker_url, with_credentials
from penstock.pipelines.spec.registered_values import AvroValue, ProtobufValue
from penstock.pipelines.spec.sinks import Sink, TubeSink
from penstock.pipelines.spec.sources import SOURCE, KafkaSource, Source, TubeOptions, as_texts
from penstock.pipelines.spec.steps import AsOf, Enrich, Expectation, Join, Step, Window
from penstock.pipelines.spec.values import BrokerUrl, Duration, Name, Part, is_uri, late_of, sink_letter
from penstock.runtime.io.tls import read_password
from penstock.spark.files.object_storage import StoragePath, is_object_url, storage_path

__all__ = [
    "MAKES_DEAD_LETTERS",
    "STATEFUL",
    "DeadLetters",
    "NamedFile",
    "Pipeline",
    "PlanNode",
    "SinkPlan",
    "StateStore",
    "StreamPath",
    "labels",
    "named_files",
    "path_to",
    "plan",
    "query_groups",
    "reads_of",
    "sink_reads",
    "steps_after",
    "written_paths",
]


class StateStore(Part):
    """The MQTT broker of the state store."""

    broker: BrokerUrl = Field(
        default="mqtt://127.0.0.1:1883",
        description="without this key, the environment variable `PENSTOCK_BROKER` has precedence over the default",
    )
    username: str | None = Field(default=None, min_length=1, description="user of the pipeline")
    password_file: str | None = Field(
        default=None, min_length=1, description="file on the driver whose first line is the password of `username`"
    )

    @model_validator(mode="after")
    def _complete(self) -> StateStore:
        if (self.username is None) != (self.password_file is None):
            raise ValueError("username and password_file belong together: set both, or none of them")
        if self.username is not None and parse_broker_url(self.broker).username is not None:
            raise ValueError("broker has a user, and so has username: set one of them")
        return self

    @property
    def url(self) -> str:
        """The URL of the broker, with the credentials.

        Raises:
            ConfigError: the password file cannot be read.
        """
        if self.username is None or self.password_file is None:
            return self.broker
        password = read_password(Path(self.password_file), "statestore.password_file")
        return with_credentials(self.broker, self.username, password)


def _local_or_bucket_path(path: str) -> str:
    if is_object_url(path):
        try:
            storage_path(path)
        except ConfigError as error:
            raise ValueError(f"{error.what}; {error.hint}") from None
    elif is_uri(path):
        raise ValueError("expected a local path, that of a mounted file system, or s3://bucket/key")
    return path


class DeadLetters(Part):
    """The Parquet table of records that could not be processed: reason, coordinates, headers, original bytes."""

    path: Annotated[str, AfterValidator(_local_or_bucket_path)] = Field(
        min_length=1, description="directory of the table: local, or `s3://bucket/key`"
    )

    @property
    def location(self) -> StoragePath:
        """The path of the table.

        Raises:
            ConfigError: it is in a bucket, and AWS_ENDPOINT_URL is not a URL.
        """
        return storage_path(self.path)


class Pipeline(Part):
    """One pipeline file."""

    name: Name = Field(
        description="name of the pipeline: lease, default state directory and consumer group depend on it"
    )
    source: Source | None = Field(default=None, description="the source, if there is one; its stream is named `source`")
    sources: dict[Name, Source] = Field(
        default_factory=dict, description="several sources by name; steps select one with `from`"
    )
    statestore: StateStore = Field(
        default=StateStore(), description="the state store: lease of the run, lookups, write-back"
    )
    trigger: Duration = Field(
        default="500 milliseconds", description="how often a batch is started if there are new records"
    )
    steps: list[Step] = Field(default_factory=list, description="transformations, in order")
    sinks: list[Sink] = Field(min_length=1, description="targets; each has its own checkpoint")
    dead_letters: DeadLetters | None = Field(
        default=None, description="table of records that could not be processed; without it they are counted only"
    )

    @property
    def inputs(self) -> dict[str, Source]:
        """The sources by the names that steps use."""
        return dict(self.sources) if self.source is None else {SOURCE: self.source}

    @property
    def has_remote_table(self) -> bool:
        """True if a sink writes a table at a URI, for which Spark needs the jars of Delta Lake."""
        return any(sink.table is not None and sink.table.is_remote for sink in self.sinks)

    @property
    def master(self) -> str | None:
        """Masters of the first source that reads TubeMQ: the default of sinks."""
        return next((source.master for source in self.inputs.values() if isinstance(source, TubeOptions)), None)

    def tube_options(self, sink: TubeSink) -> dict[str, str]:
        """Return the address and login options for ``sink``, by default those of the source with the same master.

        They have no master if neither the sink nor a source has one.
        """
        master = sink.master or self.master
        given = as_texts(sink.options) if sink.options else self._login(master)
        return given if master is None else {"tubemq.master": master, **given}

    def change_options(self, as_of: AsOf) -> dict[str, str]:
        """Return the options of the TubeMQ source with the changes for ``as_of``; without a master if there is none."""
        master = as_of.master or self.master
        address = {} if master is None else {"tubemq.master": master}
        return {**address, **self._login(master), "subscribe": as_of.topic}

    def _login(self, master: str | None) -> dict[str, str]:
        """Return the login options of the first source with ``master``."""
        same = (s.login() for s in self.inputs.values() if isinstance(s, TubeOptions) and s.master == master)
        return next(same, {})

    @model_validator(mode="after")
    def _check_source_or_sources(self) -> Pipeline:
        if (self.source is None) == (not self.sources):
            raise ValueError("expected exactly one of source, sources")
        return self


MAKES_DEAD_LETTERS = frozenset(
    {"parse", "explode", "enrich", "sql", "map", "python", "filter", "window", "join", "deadband"}
)


def _makes_dead_letters(step: Step) -> bool:
    return step.kind in MAKES_DEAD_LETTERS or any(each.on_violation == "dead_letter" for each in step.expect or ())


STATEFUL = frozenset({"dedupe", "deadband", "window", "join"})
"""Kinds of steps that keep state."""
_MAKES_ROWS = frozenset({"concat", "explode"})


class PlanNode(NamedTuple):
    """A step and the streams that it reads: one, for a join left and right, or several for a concat."""

    step: Step
    reads: tuple[str, ...]


class SinkPlan(NamedTuple):
    """One streaming query.

    ``nodes`` are in topological order; ``reads`` is the stream that the sink reads; ``inputs`` are the names of the
    sources in the order of the query, a source several times if its records take several paths. ``late_sinks`` receive
    the late records of the window.
    """

    sink: Sink
    nodes: tuple[PlanNode, ...]
    reads: str
    inputs: tuple[str, ...]
    dead_letters_of: frozenset[str]
    late_sinks: tuple[Sink, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, without their inputs."""
        return tuple(node.step for node in self.nodes)

    @property
    def window(self) -> Window | None:
        """The window step, if there is one."""
        return next((step.window for step in self.steps if step.window is not None), None)

    @property
    def window_name(self) -> str:
        """Name of the window step; empty without one."""
        return next((step.name for step in self.steps if step.window is not None), "")

    @property
    def join(self) -> Join | None:
        """The join of two streams, if there is one."""
        return next((step.join for step in self.steps if step.join is not None), None)

    @property
    def keeps_late_rows(self) -> bool:
        """True if late rows of its join are dead letters; of this query, as others have watermarks of their own."""
        return self.join is not None and self.join.late == "dead_letter"

    @property
    def changes_windows(self) -> bool:
        """True if a window is emitted whenever it changes."""
        return self.window is not None and not self.window.only_closed

    @property
    def makes_dead_letters(self) -> frozenset[str]:
        """Step names of the dead letters that this query may find, even if another query writes them."""
        last = next((n for n, step in enumerate(self.steps, 1) if step.kind == "window"), len(self.steps))
        found = {step.name for step in self.steps[:last] if _makes_dead_letters(step)}
        refusing = {sink_letter(sink.name) for sink in (self.sink, *self.late_sinks) if sink.refuses}
        return frozenset(found | refusing)

    @property
    def expectations(self) -> dict[str, Expectation]:
        """The expectations and policies of its steps, by ``<step>.<name>``."""
        return {f"{step.name}.{each.name}": each for step in self.steps for each in step.checks}

    @property
    def has_dedupe(self) -> bool:
        """True if one of its steps drops duplicates."""
        return any(step.dedupe is not None for step in self.steps)

    @property
    def as_of_joins(self) -> dict[str, Enrich]:
        """Its as-of joins, by the name of the step."""
        found = ((step.name, step.enrich) for step in self.steps)
        return {name: enrich for name, enrich in found if enrich is not None and enrich.as_of is not None}

    @property
    def windowed(self) -> bool:
        """True if rows are windows, so that single records never reach the sink."""
        return self.window is not None

    @property
    def is_stateless(self) -> bool:
        """True if no step keeps state, so that the sink can share a query with others."""
        return all(step.kind not in STATEFUL for step in self.steps)


def written_paths(pipeline: Pipeline) -> list[tuple[str, str]]:
    """Return the paths of the tables that ``pipeline`` writes, each with the name of the sink, or ``dead_letters``."""
    dead = pipeline.dead_letters
    return [
        *([] if dead is None else [(dead.path, "dead_letters")]),
        *((sink.path, sink.name) for sink in pipeline.sinks if sink.path is not None),
    ]


class NamedFile(NamedTuple):
    """A schema, descriptor or Python file that a pipeline names: the part (``step 'x'``), the option, and the path."""

    part: str
    option: str
    path: str


def named_files(pipeline: Pipeline) -> list[NamedFile]:
    """Return the schema, descriptor and Python files that ``pipeline`` names."""
    found: list[tuple[str, str, str | None]] = []
    for step in pipeline.steps:
        part, option = f"step {step.name!r}", f"steps.{step.name}"
        if step.parse is not None:
            found.append((part, f"{option}.parse.schema_file", step.parse.schema_file))
        if step.python is not None:
            found.append((part, f"{option}.python.file", step.python.file))
    for sink in pipeline.sinks:
        if isinstance(registered := sink.registered, AvroValue | ProtobufValue):
            option = f"sinks.{sink.name}.kafka.{registered.option}.schema_file"
            found.append((f"sink {sink.name!r}", option, registered.schema_file))
    return [NamedFile(part, option, path) for part, option, path in found if path is not None]


def query_groups(pipeline: Pipeline) -> list[tuple[SinkPlan, ...]]:
    """Return the plans of the sinks by query, in file order: plans without state that read the same source share one.

    A row of a shared query is one row for all its sinks: sinks behind a concat or an explode share it only with sinks
    behind the same one. Offsets of TubeMQ and Kafka are the same for all sinks. Sources of files and generated records
    have offsets of their own for each sink, and so have the first rows of a change data feed; they are not shared.
    """
    groups: dict[object, list[SinkPlan]] = {}
    for sink_plan in plan(pipeline):
        is_shared = sink_plan.is_stateless and all(
            isinstance(pipeline.inputs[name], TubeOptions | KafkaSource) for name in sink_plan.inputs
        )
        key: object = (sink_plan.inputs, _up_to_new_rows(sink_plan)) if is_shared else sink_plan.sink.name
        groups.setdefault(key, []).append(sink_plan)
    return [tuple(group) for group in groups.values()]


def _up_to_new_rows(sink_plan: SinkPlan) -> tuple[str, ...]:
    """Return the names of the steps up to the last one that makes rows, a concat or an explode; empty without one."""
    names = [step.name for step in sink_plan.steps]
    last = max((place for place, step in enumerate(sink_plan.steps, 1) if step.kind in _MAKES_ROWS), default=0)
    return tuple(names[:last])


def labels(inputs: Sequence[str]) -> tuple[str, ...]:
    """Return a label for each of ``inputs``: the source's name, with ``#2``, ``#3`` for further inputs from it."""
    seen: dict[str, int] = {}
    made = []
    for name in inputs:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(made)


def reads_of(pipeline: Pipeline, index: int) -> tuple[str, ...]:
    """Return the inputs of step ``index``: those in the file, otherwise the previous step, otherwise the only
    source."""
    step = pipeline.steps[index]
    if step.concat is not None:
        return tuple(step.concat)
    first = step.source or _before(pipeline, index)
    return (first,) if step.join is None else (first, step.join.other)


def sink_reads(pipeline: Pipeline, sink: Sink) -> str:
    """Return the step or source that ``sink`` reads; for late records the window."""
    name = sink.source or _before(pipeline, len(pipeline.steps))
    return late_of(name) or name


def _before(pipeline: Pipeline, index: int) -> str:
    # The first step reads the only source; with several sources, `from` is required.
    return pipeline.steps[index - 1].name if index else SOURCE


def plan(pipeline: Pipeline) -> list[SinkPlan]:
    """Plan one query for each sink, in file order; the first query of a window also writes its late records.

    Several queries that share a step find the same invalid record. Its dead letter is written by the first of them
    whose sink receives single rows, otherwise by the first one; the others only count it.
    """
    late: dict[str, list[Sink]] = {}
    plans: list[SinkPlan] = []
    for sink in pipeline.sinks:
        window = late_of(sink.source or "")
        if window is None:
            plans.append(_plan(pipeline, sink))
        else:
            late.setdefault(window, []).append(sink)
    for place, found in enumerate(plans):
        plans[place] = found._replace(late_sinks=tuple(late.pop(found.window_name, ())))
    owned: set[str] = set()
    for found in sorted(plans, key=lambda each: each.windowed):
        mine = found.makes_dead_letters - owned
        owned |= mine
        plans[plans.index(found)] = found._replace(dead_letters_of=mine)
    return plans


def steps_after(pipeline: Pipeline) -> dict[str, set[str]]:
    """Map each source and step to the step names of dead letters that may occur after it, those of sinks included."""
    after: dict[str, set[str]] = {name: set() for name in (*pipeline.inputs, *(step.name for step in pipeline.steps))}
    for found in plan(pipeline):
        before: dict[str, set[str]] = {}
        for step, reads in found.nodes:
            before[step.name] = {*reads}.union(*(before.get(read, ()) for read in reads))
            for name in before[step.name] & after.keys():
                after[name].add(step.name)
        for name in (*before, *found.inputs):
            after[name] |= {sink_letter(sink.name) for sink in (found.sink, *found.late_sinks)}
    return after


def _plan(pipeline: Pipeline, sink: Sink) -> SinkPlan:
    reads = sink_reads(pipeline, sink)
    return SinkPlan(sink, *path_to(pipeline, reads), frozenset())


class StreamPath(NamedTuple):
    """The steps from the sources to the stream ``reads``; the fields are those of :class:`SinkPlan`."""

    nodes: tuple[PlanNode, ...]
    reads: str
    inputs: tuple[str, ...]


def path_to(pipeline: Pipeline, reads: str) -> StreamPath:
    """Collect the steps from the step or source ``reads`` back to the sources, in topological order: that of the file.

    References must be valid.
    """
    position = {step.name: index for index, step in enumerate(pipeline.steps)}
    inputs: list[str] = []
    needed: set[int] = set()

    def visit(name: str) -> None:
        index = position.get(name)
        if index is None:
            inputs.append(name)
            return
        needed.add(index)
        for other in reads_of(pipeline, index):
            visit(other)

    visit(reads)
    nodes = tuple(PlanNode(pipeline.steps[index], reads_of(pipeline, index)) for index in sorted(needed))
    return StreamPath(nodes, reads, tuple(inputs))
