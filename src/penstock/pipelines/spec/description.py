"""Describe a pipeline as text, as data and as a diagram, without Spark: ``penstock pipeline plan``."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan, plan, query_groups, reads_of, sink_reads
from penstock.pipelines.spec.registered_values import ProtobufValue, RegisteredValue
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.sources import (
    SOURCE,
    DeltaSource,
    FilesSource,
    KafkaSource,
    MqttSource,
    RateSource,
    Source,
    StateStoreSource,
)
from penstock.pipelines.spec.steps import (
    LOOKUP_BYTES,
    LOOKUP_DATASETS,
    LOOKUP_VALUES,
    Deadband,
    Enrich,
    Expectation,
    Join,
    Step,
    Window,
)
from penstock.pipelines.spec.value_schemas import planned_schema
from penstock.pipelines.spec.values import late_of, lease_key, sink_letter, template_parts
from penstock.runtime.io.network import without_secret

__all__ = ["SINK_DESCRIPTIONS", "WIDTH", "SinkDescription", "as_data", "as_mermaid", "as_text", "graph", "query_path"]

WIDTH: Final = 110
"""Columns of a plan that is not printed on a terminal."""


def as_data(pipeline: Pipeline, letters: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return the plan as data: sources, and for each sink its steps, the fate of its records, and its query.

    ``letters``: sinks that have taken over the dead letters of steps, by step; by default the first sink in the file
    writes them.
    """
    return {
        "pipeline": pipeline.name,
        "sources": [{"name": name, **source.model_dump(exclude_none=True)} for name, source in pipeline.inputs.items()],
        "trigger": pipeline.trigger,
        "dead_letters": None if pipeline.dead_letters is None else pipeline.dead_letters.path,
        "lease": {"broker": without_secret(pipeline.statestore.broker), "key": lease_key(pipeline.name)},
        "queries": [
            {**_query(pipeline, sink_plan), "shares_with": _others(pipeline, sink_plan)}
            for sink_plan in _with_writers(plan(pipeline), letters)
        ],
    }


def _with_writers(plans: Sequence[SinkPlan], letters: Mapping[str, str]) -> Sequence[SinkPlan]:
    """Return ``plans`` in which the sinks of ``letters`` write the dead letters of their steps, if they have them."""
    for step, sink in letters.items():
        if any(each.sink.name == sink and step in each.makes_dead_letters for each in plans):
            plans = [
                each._replace(
                    dead_letters_of=each.dead_letters_of | {step}
                    if each.sink.name == sink
                    else each.dead_letters_of - {step}
                )
                for each in plans
            ]
    return plans


def as_text(pipeline: Pipeline, letters: Mapping[str, str] = MappingProxyType({}), width: int = WIDTH) -> str:
    """Return the plan as text, folded at ``width`` columns; ``letters``: see :func:`as_data`."""
    found = as_data(pipeline, letters)
    lines = [
        ("", f"pipeline {pipeline.name}, every {pipeline.trigger}"),
        *((f"  {_called(name)}: ", _source(source)) for name, source in pipeline.inputs.items()),
        ("  dead letters: ", found["dead_letters"] or "counted, not kept"),
        ("  lease: ", f"{found['lease']['key']} at {found['lease']['broker']}"),
    ]
    for sink_plan, query in zip(plan(pipeline), found["queries"], strict=True):
        lines += [("", ""), (f"query {query['sink']}: ", f"{query_path(sink_plan)} -> sink")]
        if others := query["shares_with"]:
            lines.append(("  shared: ", f"reads and parses each record once for this sink and {', '.join(others)}"))
        for step in query["steps"]:
            lines.append((f"  {step['name']}: ", f"{step['kind']} {step['does']}"))
            lines += [(f"      {what}: ", fate) for what, fate in step["leaves"].items()]
        lines.append(("  sink: ", f"{query['kind']} {query['does']}"))
        if "schema" in query:
            lines.append(("      schema: ", _schema(query["schema"])))
        lines += [(f"      {what}: ", fate) for what, fate in query["leaves"].items()]
        lines.append(("      delivery: ", query["delivery"]))
        lines.append(("      a run that lost its lease: ", query["fencing"]))
    return "".join(f"{line}\n" for start, text in lines for line in _wrapped(start, text, width))


def _others(pipeline: Pipeline, sink_plan: SinkPlan) -> list[str]:
    """Return the other sinks of the query of a sink."""
    groups = [[found.sink.name for found in group] for group in query_groups(pipeline)]
    name = sink_plan.sink.name
    return [other for group in groups if name in group for other in group if other != name]


def _called(name: str) -> str:
    return "source" if name == SOURCE else f"source {name}"


def _source(source: Source) -> str:
    """Describe a source in one line."""
    if isinstance(source, FilesSource):
        skip = f", without the first {source.skip_lines} lines" if source.skip_lines else ""
        if source.content == "delta":
            left_out = ", without versions that change rows" if source.changes == "skip" else ""
            return f"Delta table {source.path}{left_out}, {source.max_files} files a batch"
        return f"files {source.path}, {source.content}{skip}, {source.max_files} a batch"
    if isinstance(source, DeltaSource):
        start = {"snapshot": "its rows, then their changes", "latest": "changes after the newest version"}.get(
            str(source.start), f"changes from version {source.start}"
        )
        old = ", with old rows of updates" if source.preimages else ""
        return f"Delta table {source.path}: {start}{old}, {source.max_versions} versions a batch"
    if isinstance(source, KafkaSource):
        how = [] if source.tls is None else ["TLS"]
        how += [] if source.sasl is None else [source.sasl.mechanism.value]
        shown = f" ({', '.join(how)})" if how else ""
        topics = ", ".join(source.topics)
        connection = source.read_options.connection.shown
        redrive = ", may be redriven to" if source.redrive else ""
        return (
            f"{connection}{shown}: topics {topics}, {source.isolation}, {source.max_records} offsets a batch{redrive}"
        )
    if isinstance(source, RateSource):
        return f"rate {f'{source.rows} records' if source.rows else f'{source.rows_per_second} records a second'}"
    options = ", ".join(f"{name} {value}" for name, value in source.options.items())
    wanted = f"messages {source.topic_filter} of " if isinstance(source, MqttSource) else ""
    if isinstance(source, StateStoreSource):
        wanted = f"changes{'' if source.deletes else ' but deletes'} of keys {source.keys} out of "
    topics = f"{wanted}topics {', '.join(source.tube_topics())}"
    return f"{source.format} {source.master}, {topics}" + (f" ({options})" if options else "")


def query_path(sink_plan: SinkPlan) -> str:
    """Return the names of the steps in order, with their inputs where a step does not read the previous one."""
    sources = list(dict.fromkeys(sink_plan.inputs))
    shown = sources if len(sources) == 1 else [f"({', '.join(sources)})"]
    before = (sources[0],)
    for step, reads in sink_plan.nodes:
        shown.append(step.name if reads == before else f"{step.name} ({' + '.join(reads)})")
        before = (step.name,)
    return " -> ".join(shown)


def _wrapped(start: str, text: str, width: int) -> list[str]:
    whole = " ".join(text.split())
    if len(start) + len(whole) <= width:
        return [start + whole]
    return textwrap.wrap(
        whole,
        width,
        initial_indent=start,
        subsequent_indent=" " * (len(start) - len(start.lstrip()) + 4),
        # Names, which a reader may copy, are on one line.
        break_long_words=False,
        break_on_hyphens=False,
    )


def _query(pipeline: Pipeline, sink_plan: SinkPlan) -> dict[str, Any]:
    sink = sink_plan.sink
    described = _described(sink)
    fencing = described.fencing
    if sink.statestore is not None and sink.statestore.fence_prefixes:
        fencing += f", and under {', '.join(sink.statestore.fence_prefixes)}"
    kept = pipeline.dead_letters is not None
    leaves: dict[str, str] = {}
    if sink.messages is not None:
        if sink.messages.when != "true":
            leaves[f"rows for which {sink.messages.when} is not true"] = (
                "not sent" if sink_plan.windowed else f"counted as filtered by {sink_letter(sink.name)}"
            )
        leaves["rows that cannot be sent"] = _fate(sink_plan, sink_letter(sink.name), kept=kept)
    if sink.postgresql is not None:
        leaves["rows without a key, or with a value that PostgreSQL does not store"] = _fate(
            sink_plan, sink_letter(sink.name), kept=kept
        )
    if sink.statestore is not None:
        leaves["rows whose key or value cannot be written"] = _fate(sink_plan, sink_letter(sink.name), kept=kept)
    if sink.table is not None and sink.table.partition_by:
        leaves["rows whose value cannot be a partition"] = _fate(sink_plan, sink_letter(sink.name), kept=kept)
    if sink.table is not None and sink.table.delete_when is not None:
        leaves["rows on which delete_when fails"] = _fate(sink_plan, sink_letter(sink.name), kept=kept)
    schema = {} if sink.registered is None else {"schema": _value_schema(pipeline, sink, sink.registered)}
    return {
        "sink": sink.name,
        "definition": _definition(sink, _schema_files(sink)),
        "reads": sink_plan.reads,
        "sources": list(dict.fromkeys(sink_plan.inputs)),
        "kind": sink.kind,
        "does": described.target(pipeline, sink),
        "delivery": described.delivery,
        "fencing": fencing,
        **schema,
        "leaves": leaves,
        "steps": [
            {
                "name": s.name,
                "definition": _step_definition(s),
                "kind": s.kind,
                "reads": list(reads),
                "does": _step_details(s) if s.join is None else _join(s.join, reads),
                "leaves": _leaves(sink_plan, s, kept=kept),
            }
            for s, reads in sink_plan.nodes
        ],
    }


def _step_definition(step: Step) -> str:
    files = [
        b"" if step.parse is None else step.parse.message_schema,
        b"" if step.python is None else step.python.code.encode(),
    ]
    return _definition(step, files)


def _schema_files(sink: Sink) -> list[bytes]:
    if sink.registered is None:
        return []
    texts = [file.text for file in sink.registered.files] or [sink.registered.text or ""]
    return [text.encode() for text in texts]


def _definition(part: Step | Sink, files: Sequence[bytes]) -> str:
    """Return a digest of the options of ``part``, without its name and the stream that it reads, and of the content of
    the ``files`` that they name.

    Other versions of penstock may describe the same options in other words, or have further ones. The same stream can
    be named, or be the one that is read by default.
    """
    options = part.model_dump(mode="json", exclude={"name", "source"}, exclude_defaults=True)
    digests = [hashlib.sha256(content).hexdigest() for content in files]
    return hashlib.sha256(json.dumps([options, digests], sort_keys=True).encode()).hexdigest()[:16]


def _value_schema(pipeline: Pipeline, sink: Sink, registered: RegisteredValue) -> dict[str, Any]:
    found = {
        "subject": sink.subject,
        "type": registered.schema_type,
        "text": planned_schema(pipeline, sink),
    }
    if isinstance(registered, ProtobufValue):
        found["message"] = registered.message_schema.message
    return found


def _schema(schema: Mapping[str, Any]) -> str:
    if "message" in schema:
        return f"message {schema['message']}; --json has its file as a descriptor in base64"
    if schema["text"] is None:
        return "derived from the columns by the run: only Spark knows their types"
    return json.dumps(json.loads(schema["text"]))


def _step_details(step: Step) -> str:
    """Describe the details of a step, without its kind."""
    if step.parse is not None:
        where = f" of {step.parse.schema_file}" if step.parse.schema_file else ""
        if step.parse.registry is not None:
            where += f", messages with the schemas of {step.parse.registry.url}"
        chosen = [each.expression for each in step.parse.policies]
        chosen += ["unknown_enums: add"] if step.parse.unknown_enums == "add" else []
        return "; ".join([f"{step.parse.format}{where}: {step.parse.ddl}", *chosen])
    if step.explode is not None:
        into = f" as {step.explode.into}" if step.explode.into else ""
        position = f", index in {step.explode.position}" if step.explode.position else ""
        return f"a row for each element of {step.explode.column}{into}{position}"
    if step.flatten is not None:
        given = step.flatten
        what = "all struct columns" if given.columns is None else ", ".join(given.columns)
        return f"the fields of {what} as columns, names {'with' if given.prefix else 'without'} that of the column"
    if step.python is not None:
        called = step.python
        of = f" of {', '.join(called.input)}" if called.input else ""
        digest = hashlib.sha256(called.code.encode()).hexdigest()[:12]
        fails = "; an error stops the run" if called.on_error == "fail" else ""
        return f"{called.function}{of} in {called.file} (SHA-256 {digest}): {called.columns}{fails}"
    if step.enrich is not None:
        policies = {"pass": "null", "fail": "an error of the run", "dead_letter": "a dead letter"}
        if (as_of := step.enrich.as_of) is not None:
            kept = "all changes are kept" if as_of.history is None else f"changes of {as_of.history} are kept"
            return (
                f"with the value that key {step.enrich.key} had at {as_of.time} as {step.enrich.into} "
                f"({step.enrich.columns}), by as-of join, since rows need earlier values: each worker has the changes "
                f"in {as_of.topic} from before the batch in memory; {kept}; a missing one is "
                f"{policies[step.enrich.missing]}"
            )
        match = " and ".join(f"{field} = {column}" for field, column in step.enrich.match.items())
        what = f"the object with {match} under key" if match else "the value of key"
        return (
            f"with {what} {step.enrich.key} as {step.enrich.into} ({step.enrich.columns}), "
            f"{_lookup_method(step.enrich)}, refreshed every {step.enrich.refresh}; a missing one is "
            f"{policies[step.enrich.missing]}, while the store is unavailable {policies[step.enrich.unavailable]}"
        )
    if step.dedupe is not None:
        if step.dedupe.on == "event":
            return f"by {step.dedupe.key}, with the time and watermark of the window"
        return f"by {step.dedupe.key}, copies that arrive within {step.dedupe.within}"
    if step.deadband is not None:
        return _deadband(step.deadband)
    if step.window is not None:
        return _window(step.window)
    if step.concat is not None:
        return f"of {', '.join(step.concat)}"
    if step.expect is not None:
        return "; ".join(f"{each.name}: {each.expression}, {_action(each)}" for each in step.expect)
    if step.map is not None:
        renamed = [f"{old} renamed to {new}" for old, new in step.map.rename.items()]
        computed = [f"{path} = {expression}" for path, expression in step.map.compute.items()]
        return ", ".join([*renamed, *computed, *(f"without {path}" for path in step.map.drop)])
    return str(step.sql or step.filter)


def _action(expectation: Expectation) -> str:
    """Describe what happens to rows that violate ``expectation``."""
    limit = expectation.limit
    stops = "" if limit is None else f"a batch with more than {100 * limit:g} % stops the run"
    if expectation.on_violation == "fail":
        return f"otherwise kept, but {stops}" if limit else "otherwise the run stops before the batch is written"
    words = {
        "keep": "otherwise kept and counted",
        "drop": "otherwise dropped",
        "dead_letter": "otherwise a dead letter",
    }
    return words[expectation.on_violation] + (f", and {stops}" if stops else "")


def _lookup_method(enrich: Enrich) -> str:
    """Describe how the values reach the rows, why in this way, and what bounds the memory of a worker."""
    if any(part.column for part in template_parts(enrich.key)):
        if enrich.match:
            return (
                "by an index of each dataset in each worker, since the key depends on the row and a row needs one "
                f"object; a worker keeps the last {LOOKUP_DATASETS} datasets"
            )
        return (
            "by key lookup: each worker reads the distinct keys of its rows, since the key depends on the row; it "
            f"caches up to {LOOKUP_VALUES:,} values of together {LOOKUP_BYTES >> 20} MiB"
        )
    if enrich.match:
        return (
            "by an index of the dataset in each worker, since one key has all objects and a row needs one; the dataset "
            "must fit in the memory of a worker"
        )
    return "by key lookup: each worker reads the key once, since all rows have the same key; it keeps one value"


def _deadband(deadband: Deadband) -> str:
    limits = [
        f"another {column}" if most is None else f"{column} more than {deadband.columns[column]} away"
        for column, (most, _) in deadband.limits.items()
    ]
    due = "" if deadband.max_interval is None else f", or {deadband.max_interval} after the last report"
    kept = "all keys are kept" if deadband.expire is None else f"keys without a row for {deadband.expire} are forgotten"
    return f"of each {', '.join(deadband.by)}: {' or '.join(limits)}{due}, by {deadband.time}; {kept}"


def _window(window: Window) -> str:
    if window.gap is not None:
        kind = f"sessions with gaps of {window.gap}"
    elif window.slide is not None:
        kind = f"sliding, {window.duration} every {window.slide}"
    else:
        kind = f"tumbling, {window.duration}"
    by = f" by {', '.join(window.by)}" if window.by else ""
    emit = "once, when closed" if window.only_closed else "whenever they change"
    aggregates = ", ".join(f"{name} = {expression}" for name, expression in window.aggregates.items())
    bounds = f"watermark {window.watermark}, max_ahead {window.max_ahead}"
    return f"{kind}, in {window.time}{by}: {aggregates}; emitted {emit}; {bounds}"


def _join(join: Join, reads: Sequence[str]) -> str:
    """Describe a join of the streams ``reads``, and for how long each row is in its state."""
    left, right = reads
    before, after = join.within.before or "0 seconds", join.within.after or "0 seconds"
    unmatched = "left out" if join.kind == "inner" else "kept, with null"
    return (
        f"{left} with {right} as {join.into}, on {', '.join(join.on)}, {join.right_time} from {before} before to "
        f"{after} after {join.left_time}; rows of {left} without one are {unmatched}; watermark {join.watermark} "
        f"behind the slower stream, max_ahead {join.max_ahead}; state: each row of {left} until the "
        f"watermark is {after} past it, each row of {right} until it is {before} past it"
    )


def _leaves(sink_plan: SinkPlan, step: Step, *, kept: bool) -> dict[str, str]:
    """Return the records that do not continue after the step, and their fate."""
    found: dict[str, str] = {}
    makes_letters = step.name in sink_plan.makes_dead_letters
    if step.filter is not None:
        found |= {"the other records": "counted as filtered"} if makes_letters else {"the other windows": "left out"}
    if any(each.on_violation == "drop" for each in step.expect or ()):
        found["rows that violate an expectation with drop"] = "counted as filtered"
    if step.explode is not None and step.explode.empty == "drop":
        found["records without elements"] = "counted as filtered"
    if makes_letters:
        what = {
            "explode": "records without elements"
            if step.explode is not None and step.explode.empty == "dead_letter"
            else "redriven records without the element that failed",
            "expect": "rows that violate an expectation with dead_letter",
            "parse": "invalid records",
            "enrich": "invalid records",
            "window": "events that cannot be aggregated",
            "join": "rows without a valid time",
            "deadband": "rows without a time",
        }
        found[what.get(step.kind, "records on which it fails")] = _fate(sink_plan, step.name, kept=kept)
    if step.dedupe is not None:
        found["copies"] = "counted as duplicates" if not sink_plan.windowed else "left out"
    if step.deadband is not None:
        found["rows that report no change"] = "counted as filtered"
    if step.window is not None:
        late = ", ".join(sink.name for sink in sink_plan.late_sinks)
        found["late records"] = f"counted as late, and sent to {late}" if late else "counted as late"
    if step.join is not None:
        left_out = "rows of either stream" if step.join.kind == "inner" else "rows of the right stream"
        found[f"{left_out} that are joined with none"] = "counted as filtered, once the watermark has passed them"
        kept_late = "counted as dead, kept as dead letters by this query" if kept else "counted as dead, not kept"
        found["late rows"] = kept_late if step.join.late == "dead_letter" else "counted as late"
    return found


def _fate(sink_plan: SinkPlan, name: str, *, kept: bool) -> str:
    if not kept:
        return "counted as dead, not kept"
    if name in sink_plan.dead_letters_of:
        return "counted as dead, kept as dead letters by this query"
    return "counted as dead, kept as dead letters by another query"


def _table(_pipeline: Pipeline, sink: Sink) -> str:
    assert sink.table is not None
    merged = f", merged by {', '.join(sink.table.keys)}" if sink.table.keys else ""
    if sink.table.delete_when is not None:
        merged += f", deleted when {sink.table.delete_when}"
    partitioned = (
        f", partitioned by {', '.join(f.text for f in sink.table.partitions)}" if sink.table.partitions else ""
    )
    maintained = "" if sink.table.maintenance is None else f", maintained every {sink.table.maintenance.every}"
    by_jars = ", written by Spark with Delta's jars" if sink.table.is_remote else ""
    return f"{sink.table.format} {sink.table.path}{merged}{partitioned}{maintained}{by_jars}"


def _keys(pipeline: Pipeline, sink: Sink) -> str:
    assert sink.statestore is not None
    entries = "; ".join(
        entry.key if entry.when == "true" else f"{entry.key} while {entry.when}, else deleted"
        for entry in sink.statestore.entries
    )
    order = f", in the order of {sink.statestore.order_by}" if sink.statestore.order_by else ""
    return f"{without_secret(pipeline.statestore.broker)}: {entries}{order}"


def _records(pipeline: Pipeline, sink: Sink) -> str:
    assert sink.tubemq is not None
    key = f", key {sink.tubemq.key}" if sink.tubemq.key else ""
    return f"{sink.tubemq.master or pipeline.master}: topic {sink.tubemq.topic}{key}"


def _publishes(pipeline: Pipeline, sink: Sink) -> str:
    assert sink.mqtt is not None
    retain = ", retained" if sink.mqtt.retain else ""
    broker = without_secret(sink.mqtt.broker or pipeline.statestore.broker)
    return f"{broker}: topic {sink.mqtt.topic}, QoS {sink.mqtt.qos}{retain}"


def _committed(_pipeline: Pipeline, sink: Sink) -> str:
    assert sink.kafka is not None
    key = f", key {sink.kafka.key}" if sink.kafka.key else ""
    how = [] if sink.kafka.tls is None else ["TLS"]
    how += [] if sink.kafka.sasl is None else [sink.kafka.sasl.mechanism.value]
    shown = f" ({', '.join(how)})" if how else ""
    value = ""
    if (given := sink.registered) is not None:
        registers = "registered by the run" if given.auto_register else "which must be registered"
        value = f", {given.shown} with the subject {sink.subject} of {given.registry.url}, {registers}"
    return f"{sink.kafka.target.connection.shown}{shown}: topic {sink.kafka.topic}{key}{value}"


def _stored(_pipeline: Pipeline, sink: Sink) -> str:
    assert sink.postgresql is not None
    target, server = sink.postgresql, sink.postgresql.server
    key = f", one row per {', '.join(target.key)}" if target.key else ""
    deleted = f", deleted if {target.delete_when}" if target.delete_when is not None else ""
    tls = dict(server.options)["sslmode"]
    return f"{server.shown} (sslmode {tls}): table {'.'.join(target.table_name)}{key}{deleted}"


def _filed(_pipeline: Pipeline, sink: Sink) -> str:
    assert sink.files is not None
    compressed = "" if sink.files.compression == "none" else f", {sink.files.compression}"
    return f"{sink.files.path}: a file of {sink.files.format.upper()} for each batch with rows{compressed}"


def _printed(_pipeline: Pipeline, sink: Sink) -> str:
    assert sink.console is not None
    return f"the first {sink.console.rows} rows of each batch"


class SinkDescription(NamedTuple):
    """Texts about one kind of sink.

    ``target`` describes where it writes, ``delivery`` is its guarantee, ``fencing`` is the effect that a run that lost
    its lease can still have there.
    """

    target: Callable[[Pipeline, Sink], str]
    delivery: str
    fencing: str


SINK_DESCRIPTIONS: Mapping[str, SinkDescription] = {
    "table": SinkDescription(
        _table,
        "exactly once for readers of its commit log",
        "can still write files, but each batch is committed once",
    ),
    "statestore": SinkDescription(
        _keys,
        "exactly once: a batch that is written again sets the same values",
        "is rejected for every key that a later run has written",
    ),
    "tubemq": SinkDescription(
        _records,
        "exactly once with penstock's brokers; at least once with others, where duplicates have the same id",
        "is rejected by penstock's brokers; other brokers accept its records, which are duplicates with the same ids",
    ),
    "mqtt": SinkDescription(
        _publishes,
        "at least once; duplicates have the same user property id",
        "is not fenced: messages that it still sends are duplicates with the same ids",
    ),
    "kafka": SinkDescription(
        _committed,
        "exactly once for consumers with isolation.level=read_committed: the batch and its number are committed in one "
        "transaction; the header id is the same in copies that other consumers read",
        "is refused once a later run has begun a batch; until then it may commit a batch, which is not written again",
    ),
    "postgresql": SinkDescription(
        _stored,
        "exactly once: the batch and its number are committed in one transaction",
        "is refused once a later run has begun a batch; until then it may commit a batch, which is not written again",
    ),
    "files": SinkDescription(
        _filed,
        "exactly once: each batch is one file, which appears whole; in a bucket, an object that was removed may appear "
        "again after a crash",
        "can still write files under hidden names; a file of a batch that a later run has written does not appear",
    ),
    "console": SinkDescription(_printed, "none: rows are printed for tests", "can still print rows"),
}
"""An entry for each kind in ``SINK_KINDS``."""
_DELTA = SinkDescription(
    _table,
    "exactly once, by transaction id",
    "cannot write: Delta already has the transactions of its batches, or rejects one of two concurrent commits",
)


def _described(sink: Sink) -> SinkDescription:
    is_delta = sink.table is not None and sink.table.format == "delta"
    return _DELTA if is_delta else SINK_DESCRIPTIONS[sink.kind]


def graph(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return the sources, steps and sinks as the nodes of a graph, in an order in which each follows its inputs.

    ``reads``: ids of the inputs, for late records (``late``) the window; ``role``: source, step or sink;
    ``dead_letters``: it can reject records.
    """
    dying = {name for sink_plan in plan(pipeline) for name in sink_plan.makes_dead_letters}

    def node(name: str, role: str, kind: str, reads: Iterable[str], *, late: bool = False) -> dict[str, Any]:
        # A sink may have the name of a step.
        key = sink_letter(name) if role == "sink" else name
        return {
            "id": key, "name": name, "role": role, "kind": kind, "reads": list(reads), "late": late,
            "dead_letters": key in dying,
        }  # fmt: skip

    return [
        *(node(name, "source", source.format, ()) for name, source in pipeline.inputs.items()),
        *(node(step.name, "step", step.kind, reads_of(pipeline, i)) for i, step in enumerate(pipeline.steps)),
        *(
            node(
                sink.name,
                "sink",
                sink.kind if sink.table is None else f"{sink.table.format} table",
                [sink_reads(pipeline, sink)],
                late=late_of(sink.source or "") is not None,
            )
            for sink in pipeline.sinks
        ),
    ]


def as_mermaid(pipeline: Pipeline) -> str:
    """Return the graph as a Mermaid flowchart: sources, steps, sinks, late events and dead letters."""
    nodes = graph(pipeline)
    labels: dict[str, str] = {}
    edges: list[tuple[str, str, str]] = []
    for node in nodes:
        before, after = _SHAPES[node["role"]]
        labels[node["id"]] = f'{before}"{_label(node["name"], node["kind"])}"{after}'
        edges += [(read, "-- late -->" if node["late"] else "-->", node["id"]) for read in node["reads"]]
    dying = [node["id"] for node in nodes if node["dead_letters"]]
    if dying:
        kept = "counted, not kept" if pipeline.dead_letters is None else pipeline.dead_letters.path
        labels[_LETTERS] = f'(["{_label(_LETTERS, kept)}"])'
        edges += [(name, "-.->", _LETTERS) for name in dying]
    ids = {name: f"n{number}" for number, name in enumerate(labels)}
    lines = [
        "flowchart LR",
        *(f"    {ids[name]}{label}" for name, label in labels.items()),
        *(f"    {ids[start]} {arrow} {ids[end]}" for start, arrow, end in edges),
    ]
    return "\n".join(lines) + "\n"


_LETTERS = "dead letters"
_SHAPES: Mapping[str, tuple[str, str]] = {"source": ("[(", ")]"), "step": ("[", "]"), "sink": ("([", "])")}
"""Brackets of a node of a flowchart, by role."""
_ENTITIES = str.maketrans({"&": "#amp;", "<": "#lt;", ">": "#gt;", '"': "#quot;", "#": "#35;"})


def _label(name: str, kind: str) -> str:
    return f"{name.translate(_ENTITIES)}<br>{kind.translate(_ENTITIES)}"
