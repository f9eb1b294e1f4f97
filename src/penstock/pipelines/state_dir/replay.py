"""Replay a range of the log into new tables: ``run --from --to --into``.

    <into>/tables/<sink>     tables of the pipeline's table sinks
    <into>/dead_letters      dead letters
    <into>/state             checkpoints, ledger, and the range, which is resolved once

A replay reads the same pipeline file. It holds a separate lease, so that the live run continues, and omits the sinks
with external readers (state store, messages) unless ``--live`` is set. With ``--live`` it needs the pipeline's own
lease, since the two runs would fence each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.values import is_uri
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import read_json, write_json
from penstock.spark.files.object_storage import StoragePath
from penstock.spark.tube.offsets import OffsetSpec, TimeSpec, parse_offset_spec

__all__ = [
    "Coordinates",
    "Copies",
    "RecordPart",
    "RedrivenCopy",
    "Replay",
    "ReplayRange",
    "RunLocation",
    "existing_replay",
    "parse_point",
    "plan_replay",
    "retargeted",
    "state_of_replay",
]


Coordinates = tuple[str, int, int, int]
"""Topic, broker, partition and offset of a record."""


class RecordPart(NamedTuple):
    """A record, or the part of it that an explode step made; None: the whole record.

    ``source`` is the name of its source, because topics of two clusters may have the same name. It is empty if unknown:
    older versions did not store it. ``at_us`` is the time at which the source received the record, in µs since 1970,
    because a topic that is deleted and created again has other records with the same offsets. It is None if the record
    has no time, or if unknown.
    """

    record: Coordinates
    part: str | None = None
    source: str = ""
    at_us: int | None = None

    def less_specific(self) -> tuple[RecordPart, ...]:
        """Return this place as older versions knew it, with the most specific one first, which is this place."""
        return tuple(
            dict.fromkeys(
                self._replace(source=source, at_us=at_us)
                for source in (self.source, "")
                for at_us in (self.at_us, None)
            )
        )


class RedrivenCopy(NamedTuple):
    """Coordinates of the newest copy of a redriven dead letter, the letter's step, and the id of the copy's topic of
    Kafka; these two are empty if unknown."""

    record: Coordinates
    step: str = ""
    topic_id: str = ""


Copies = Mapping[RecordPart, RedrivenCopy]


class ReplayRange(NamedTuple):
    """Requested begin and end of a replay; the end is exclusive."""

    begin: OffsetSpec
    end: OffsetSpec


class Replay(NamedTuple):
    """A replay to run: the pipeline with its new targets, state directory, and name of the lease."""

    pipeline: Pipeline
    span: ReplayRange
    state: Path
    lease: str
    left_out: tuple[str, ...]


class RunLocation(NamedTuple):
    """A pipeline, its state directory, and the name of its lease: of a run, or of a replay with other targets."""

    pipeline: Pipeline
    state: StoragePath
    lease: str


def parse_point(text: str, option: str) -> OffsetSpec:
    """Parse a point in the log: ``earliest``, ``latest``, offsets as JSON, or a time at which TubeMQ received records.

    Times are ISO 8601 (a date means midnight; UTC if no zone is given), or milliseconds since 1970.

    Raises:
        ConfigError: the text is none of these.
    """
    given = text.strip()
    if given.lower() in {"earliest", "latest"} or given.startswith("{"):
        return parse_offset_spec(given, option, earliest=option == "--from", latest=option == "--to")
    if given.isascii() and given.isdecimal() and len(given) > len("20240501"):
        return TimeSpec(int(given), or_latest=True)
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is not an offset or time",
            option=option,
            hint="write a time (2024-05-01, 2024-05-01T06:00Z, ms since 1970), "
            'offsets ({"topic": {"<brokerId>:<partitionId>": offset}}), earliest or latest',
        ) from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return TimeSpec(round(at.timestamp() * 1000), or_latest=True)


def retargeted(pipeline: Pipeline, into: Path, *, live: bool = False) -> tuple[Pipeline, tuple[str, ...]]:
    """Return ``pipeline`` with its tables and dead letters under ``into``, and the names of omitted sinks.

    Raises:
        ConfigError: no sink remains.
    """
    sinks, left_out = [], []
    for sink in pipeline.sinks:
        if sink.path is not None:
            sinks.append(sink.with_path(str(into / "tables" / sink.name)))
        elif live or sink.console is not None:
            sinks.append(sink)
        else:
            left_out.append(sink.name)
    if not sinks:
        raise ConfigError(
            f"pipeline {pipeline.name!r} has no table to replay into",
            why=f"its sinks ({', '.join(left_out)}) have external readers",
            hint="add --live to write to them again, after stopping the pipeline's run",
        )
    dead = None
    if pipeline.dead_letters is not None:
        dead = pipeline.dead_letters.model_copy(update={"path": str(into / "dead_letters")})
    return pipeline.model_copy(update={"sinks": sinks, "dead_letters": dead}), tuple(left_out)


def state_of_replay(into: Path) -> Path:
    """Return the state directory of the replay into ``into``."""
    return into / "state"


def plan_replay(pipeline: Pipeline, into: Path, begin: str | None, end: str | None, *, live: bool) -> Replay:
    """Create or continue the replay of ``[begin, end)`` (default: the whole log) into ``into``.

    Raises:
        ConfigError: an invalid ``begin`` or ``end``, ``into`` is a URI, or contains another replay or a target of
            the pipeline.
    """
    into = _local(into)
    span = ReplayRange(parse_point(begin or "earliest", "--from"), parse_point(end or "latest", "--to"))
    times = [wanted.at for wanted in span if isinstance(wanted, TimeSpec) and isinstance(wanted.at, int)]
    if len(times) == 2 and times[0] >= times[1]:
        raise ConfigError(
            f"--to {end!r} is not after --from {begin!r}",
            option="--to",
            why="the end of the range is exclusive, so the range would be empty",
            hint="use a later end, or omit --to",
        )
    for sink in pipeline.sinks:
        if sink.path is not None and _is_within(Path(sink.path).resolve(), into):
            raise ConfigError(
                f"--into {str(into)!r}: sink {sink.name!r} of the pipeline itself writes there",
                option="--into",
                why="a replay must not change the output of the pipeline",
                hint="use a new directory",
            )
    changed, left_out = retargeted(pipeline, into, live=live)
    state = state_of_replay(into)
    _remember(state, {"pipeline": pipeline.name, "from": begin, "to": end, "live": live})
    return Replay(changed, span, state, _lease(pipeline, into, live=live), left_out)


def existing_replay(pipeline: Pipeline, into: Path) -> RunLocation:
    """Return the existing replay in ``into``.

    Raises:
        ConfigError: the directory contains no replay, or ``into`` is a URI.
    """
    into = _local(into)
    try:
        asked = read_json(layout.replay(state_of_replay(into)))
    except FileNotFoundError:
        raise ConfigError(
            f"{str(into)!r} contains no replay", option="--into", hint="use the directory of run --into"
        ) from None
    live = bool(asked.get("live"))
    return RunLocation(
        retargeted(pipeline, into, live=live)[0], state_of_replay(into), _lease(pipeline, into, live=live)
    )


def _local(into: Path) -> Path:
    """Return the absolute path of ``into``.

    Raises:
        ConfigError: it is a URI, which would be a directory below the working directory.
    """
    if is_uri(str(into)):
        raise ConfigError(
            f"--into {str(into).replace(':/', '://', 1)!r} is a URI",
            option="--into",
            why="the tables and the state of a replay need a local or mounted file system",
            hint="set a directory that all executors share",
        )
    return into.resolve()


def _lease(pipeline: Pipeline, into: Path, *, live: bool) -> str:
    """Return the name of the lease: a replay may run next to the pipeline, unless it writes to the same targets."""
    digest = hashlib.sha256(str(into).encode()).hexdigest()[:12]
    return pipeline.name if live else f"{pipeline.name}-replay-{digest}"


def _is_within(path: Path, directory: Path) -> bool:
    return path == directory or directory in path.parents or path in directory.parents


def _remember(state: Path, asked: dict[str, object]) -> None:
    """Store the options of a replay: the same options continue it; others would mix two replays in one table."""
    path = layout.replay(state)
    try:
        before = read_json(path)
    except FileNotFoundError:
        write_json(path, asked)
        return
    if before != asked:
        raise ConfigError(
            f"{str(state.parent)!r} contains another replay: {json.dumps(before)}",
            option="--into",
            hint="use a new directory, or repeat the same options to continue that replay",
        )
