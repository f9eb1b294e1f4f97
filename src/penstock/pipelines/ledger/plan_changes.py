"""Compare a pipeline file with the last run: the changes that ``penstock pipeline plan`` shows.

Each run stores its plan in the state directory. The file is compared with this plan, and with the changes that the
checkpoints support. Spark is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.missing_tables import missing_tables
from penstock.pipelines.sinks.registered_values import check_value_schema
from penstock.pipelines.sinks.table import check_partitions, check_types, writers
from penstock.pipelines.spec.columns import sink_types
from penstock.pipelines.spec.description import as_data
from penstock.pipelines.spec.pipeline import STATEFUL, Pipeline, plan
from penstock.pipelines.spec.sources import DeltaSource
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import START_OVER, incompatible_sinks
from penstock.pipelines.state_dir.layout import read_json, write_json
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.object_storage import StoragePath
from penstock.spark.kafka.writes import check_topic
from penstock.spark.postgresql.columns import table_columns
from penstock.spark.postgresql.connection import connected

__all__ = [
    "ADDED",
    "ASKED",
    "CHANGED",
    "KEPT",
    "REFUSED",
    "REMOVED",
    "PlanChange",
    "changes",
    "check_applicable",
    "check_feeds",
    "check_new_sinks",
    "check_table_types",
    "check_topics",
    "remember",
]

ADDED, CHANGED, REMOVED, REFUSED, KEPT, ASKED = "+", "~", "-", "!", "=", "?"


_TextOf = Callable[[Any], str]
_IsSame = Callable[[Any, Any], bool]


class PlanChange(NamedTuple):
    """Change of one part of a pipeline. ``mark`` is one of the constants above, ``what`` is the name of the part."""

    mark: str
    what: str
    text: str
    why: str | None = None
    hint: str | None = None
    question: str | None = None
    """The question that agrees to the change, if the mark is ``ASKED``."""

    def as_json(self) -> dict[str, str]:
        """Return the change for programs."""
        return {"mark": self.mark, "what": self.what, "text": self.text}

    def refusal(self) -> RefusedError:
        """Return the error of a command for a change that the user has not agreed to."""
        return RefusedError(f"{self.what}: {self.text}", why=self.why, hint=self.hint)


def remember(pipeline: Pipeline, state: StoragePath) -> None:
    """Store the plan of ``pipeline`` before a run."""
    write_json(layout.plan(state), as_data(pipeline))


def changes(pipeline: Pipeline, state: StoragePath) -> list[PlanChange] | None:
    """Compare ``pipeline`` with the last run in the directory ``state``; None if there was no run.

    Raises:
        StorageError: the directory has unexpected contents.
    """
    now = as_data(pipeline)
    try:
        before = read_json(layout.plan(state))
    except FileNotFoundError:
        # There was no run yet, or the version of the last run stored no plan: only the sinks are compared, with their
        # checkpoints.
        if not layout.owner(state).exists():
            return None
        before = now
    return [*_parts(before, now), *_steps(before, now), *_sinks(pipeline, state, before, now)]


def _parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[PlanChange]:
    were, are = ({source["name"]: source for source in each.get("sources", ())} for each in (before, now))
    yield from _compared("source", were, are, lambda source: _text({k: v for k, v in source.items() if k != "name"}))
    for name in ("trigger", "dead_letters", "lease"):
        if before.get(name) != now[name]:
            yield PlanChange(CHANGED, name.replace("_", " "), _was_and_is(_text(before.get(name)), _text(now[name])))


def _steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[PlanChange]:
    were, are = (
        {step["name"]: step for query in each.get("queries", ()) for step in query["steps"]} for each in (before, now)
    )
    yield from _compared(
        "step", were, are, lambda step: f"of {', '.join(step['reads'])}: {step['kind']} {step['does']}", _is_same_step
    )


def _is_same_step(was: Mapping[str, Any], is_: Mapping[str, Any]) -> bool:
    """Return True if a step of the last run has the streams and options of that in the file, in whatever words.

    Plans of older versions have descriptions only; those of enrich steps give reasons that have been worded anew.
    """
    if "definition" in was:
        return bool((was["reads"], was["definition"]) == (is_["reads"], is_["definition"]))
    first, second = ((each["reads"], each["kind"], _REASON.sub("", each["does"])) for each in (was, is_))
    return first == second


_REASON = re.compile(r", by (?:key lookup|an index).*?(?=, refreshed every)|, since rows need earlier values")


def _compared(
    kind: str, were: Mapping[str, Any], are: Mapping[str, Any], text_of: _TextOf, is_same: _IsSame | None = None
) -> Iterator[PlanChange]:
    """Yield the differences of parts by name; by default parts are the same if their texts are."""
    for name in {**were, **are}:
        if name not in were:
            yield PlanChange(ADDED, f"{kind} {name}", text_of(are[name]))
        elif name not in are:
            yield PlanChange(REMOVED, f"{kind} {name}", text_of(were[name]))
        else:
            was, is_ = text_of(were[name]), text_of(are[name])
            if not (was == is_ if is_same is None else is_same(were[name], are[name])):
                yield PlanChange(CHANGED, f"{kind} {name}", _was_and_is(was, is_))


def _sinks(
    pipeline: Pipeline, state: StoragePath, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[PlanChange]:
    ledger = Ledger(layout.ledger(state))
    refused = incompatible_sinks(pipeline, state) | _incompatible_tables(pipeline) | _written_tables(pipeline, state)
    missing = missing_tables(pipeline, state)
    were = {query["sink"]: query for query in before.get("queries", ())}
    for query in now["queries"]:
        name = query["sink"]
        last = ledger.last(name)
        if name in refused:
            what = refused[name].what.removeprefix(f"sink {name!r}: ")
            yield PlanChange(REFUSED, f"sink {name}", f"{what}; {refused[name].why}")
        elif (lost := missing.get(name)) is not None:
            error = lost.error()
            yield PlanChange(ASKED, f"sink {name}", error.what, error.why, error.hint, "Create a new table?")
        elif not layout.checkpoint(state, name).exists():
            renamed = _renamed_from(query, were, now)
            if renamed is None:
                yield PlanChange(ADDED, f"sink {name}", "starts with the first record of its sources")
            else:
                hint = "keep the previous name, or add --yes to write the records again"
                text, question = _repetition(pipeline, name, renamed), "Write the records again?"
                yield PlanChange(ASKED, f"sink {name}", text, hint=hint, question=question)
        else:
            text = "continues where it ended" if last is None else f"continues after batch {last.batch}"
            was = were.get(name, query)
            # Plans of older versions have neither.
            options, stream = (was.get(key, query[key]) for key in ("definition", "reads"))
            differences = []
            if stream != query["reads"]:
                differences.append(f"read {stream}; reads {query['reads']}")
            if not _writes_like(was, query) or options != query["definition"]:
                differences.append(_was_and_is(*(f"{each['kind']} {each['does']}" for each in (was, query))))
            yield PlanChange(CHANGED if differences else KEPT, f"sink {name}", "; ".join([text, *differences]))
    for name in sorted(were.keys() - {query["sink"] for query in now["queries"]}):
        yield PlanChange(
            REMOVED,
            f"sink {name}",
            "is not written any more; its data is not deleted, and a sink with this name continues where it ended",
        )


def check_applicable(before: Pipeline, after: Pipeline, state: StoragePath, *, repeats: bool = False) -> None:
    """Check that a run of ``before`` can continue as ``after`` without a new start.

    ``repeats``: a sink with a new name may write again what another one has written, and a sink whose table does not
    exist any more may create a new one.

    Raises:
        RefusedError: it cannot, or the checkpoints or the tables of the sinks do not support the change.
    """
    restart = "stop the run (penstock pipeline stop), and start it with the changed file (penstock pipeline run)"
    for what, was, is_ in (
        ("name", before.name, after.name),
        ("sources", before.inputs, after.inputs),
        ("state store", before.statestore, after.statestore),
    ):
        if was != is_:
            raise RefusedError(
                f"the {what} of pipeline {before.name!r} cannot change while it runs",
                why="its lease, its offsets and the settings of Spark belong to them",
                hint=restart,
            )
    found_changes = changes(after, state) or ()
    # First what a new start would not accept, either.
    for change in found_changes:
        if change.mark == REFUSED:
            raise RefusedError(f"{change.what}: {change.text}", hint=START_OVER)
    for pipeline in (before, after):
        for found in plan(pipeline):
            kept = next((step.name for step in found.steps if step.kind in STATEFUL), None)
            if (step := kept or next(iter(found.as_of_joins), None)) is not None:
                raise RefusedError(
                    f"pipeline {before.name!r} cannot change while it runs: step {step!r} of sink {found.sink.name!r} "
                    "keeps state",
                    why="only flows without dedupe, window, join and as-of steps are changed while they run",
                    hint=restart,
                )
    if after.has_remote_table and not before.has_remote_table:
        raise RefusedError(
            "a table at a URI cannot be added to a run that has none",
            why="the jars of Delta Lake are loaded when Spark starts",
            hint=restart,
        )
    for change in found_changes:
        if change.mark == ASKED and not repeats:
            raise change.refusal()


def check_table_types(pipeline: Pipeline) -> None:
    """Check that the types of columns, if the file determines them, are those in the tables of the sinks.

    Raises:
        ConfigError: a column has another type.
    """
    for error in _incompatible_tables(pipeline).values():
        raise error


def check_new_sinks(pipeline: Pipeline, state: StoragePath) -> None:
    """Check that tables have no batches of sinks that have no checkpoint in the state directory ``state``.

    Raises:
        ConfigError: a table has: the sink would write the same rows again.
    """
    for error in _written_tables(pipeline, state).values():
        raise error


_KAFKA_S = 3.0
"""Seconds to wait for Kafka's answer."""


def check_topics(pipeline: Pipeline) -> None:
    """Check topics of Kafka and schemas of their values, as a run does before it starts. A run reports a server that
    does not answer.

    Raises:
        PenstockError: Kafka refuses the connection, or has no such topic; a schema registry refuses the schema.
    """
    for sink in pipeline.sinks:
        if sink.kafka is None:
            continue
        try:
            with suppress(UnavailableError):
                check_topic(sink.kafka.target, _KAFKA_S)
            with suppress(UnavailableError):
                check_value_schema(pipeline, sink)
        except PenstockError as error:
            raise PenstockError(f"sink {sink.name!r}: {error.what}", why=error.why, hint=error.hint) from error


def check_feeds(pipeline: Pipeline) -> None:
    """Check that tables whose changes are read have a change data feed, as a run does before it starts.

    A run reports a table that does not exist, and a storage that does not answer.

    Raises:
        PenstockError: a table has none, or cannot be read.
    """
    for name, source in pipeline.inputs.items():
        if isinstance(source, DeltaSource):
            table = source.read_options.table
            try:
                with suppress(UnavailableError):
                    if (log := DeltaLog(table)).exists():
                        log.check_change_feed()
            except PenstockError as error:
                raise PenstockError(f"source {name!r}: {error.what}", why=error.why, hint=error.hint) from error


def _incompatible_tables(pipeline: Pipeline) -> dict[str, ConfigError]:
    """Return an error for each sink that writes a column of another type than its table has."""
    found = {}
    for sink in pipeline.sinks:
        if sink.postgresql is not None:
            try:
                # A run reports a server that does not answer.
                with suppress(UnavailableError), connected(sink.postgresql.server, "penstock plan") as connection:
                    kinds = sink_types(pipeline, sink)
                    table_columns(connection, sink.postgresql.shape(sink.name), kinds, known=False)
            except ConfigError as error:
                found[sink.name] = error
        if sink.table is None or sink.table.is_remote:
            continue
        try:
            check_types(sink.table.location, sink.name, sink_types(pipeline, sink))
            check_partitions(sink.table.location, sink.name, sink.table.partitions)
        except ConfigError as error:
            found[sink.name] = error
    return found


def _written_tables(pipeline: Pipeline, state: StoragePath) -> dict[str, ConfigError]:
    """Return an error for each sink that has written its table, and whose query has no checkpoint in ``state``."""
    found = {}
    # Late records are written by the query of their window.
    new = [query for query in plan(pipeline) if not layout.checkpoint(state, query.sink.name).exists()]
    for sink in (sink for query in new for sink in (query.sink, *query.late_sinks)):
        table = sink.table
        # A merge replaces the rows.
        if table is None or table.is_remote or table.keys:
            continue
        if writers(table.location).get(sink.name):
            found[sink.name] = ConfigError(
                f"sink {sink.name!r}: table {str(table.location)!r} has batches that it wrote with another checkpoint",
                why=f"the state directory {state} has none of this sink, which would write the same rows again",
                hint="use the previous state directory (--state-dir), or set another path for the sink",
            )
    return found


def _renamed_from(query: Mapping[str, Any], were: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the sink of the last run that wrote what the new sink of ``query`` writes, and is not in the file now."""
    kept = {each["sink"] for each in now["queries"]}
    return next((old for old, was in were.items() if old not in kept and _writes_like(was, query)), None)


def _writes_like(was: Mapping[str, Any], query: Mapping[str, Any]) -> bool:
    return bool((was["kind"], was["does"]) == (query["kind"], query["does"]))


def _repetition(pipeline: Pipeline, name: str, old: str) -> str:
    sink = next(sink for sink in pipeline.sinks if sink.name == name)
    text = f"starts with the first record of its sources, and writes again what sink {old} has written"
    if sink.table is not None and not sink.table.is_remote:
        count = writers(sink.table.location).get(old, 0)
        batches = "1 batch" if count == 1 else f"{count} batches"
        text += f": {sink.table.path} has {batches} of it, and would have these rows twice"
    return f"{text}; to continue, keep the name {old}"


def _was_and_is(was: str, is_: str) -> str:
    return f"was: {was}; is: {is_}" if was != is_ else f"other options than before, is: {is_}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
