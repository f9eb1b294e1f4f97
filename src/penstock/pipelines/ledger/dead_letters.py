"""Read the dead letters in the table of a pipeline, and redrive them to their sources.

A dead letter stores the unchanged record: value, key and headers. A redriven record has the same id, and a header with
the number of redrives, so that a dedupe accepts it. If only parts of a record (rows of an explode step) are dead
letters, another header names them, and the redriven record makes only these rows. A record that several sinks rejected
is sent once, with the steps of all of them: each dedupe accepts it for the steps that the header names. A TubeMQ record
is sent to its topic; a record of a file is written to a file in the source's inbox, which is read like the others.
Redriven records are listed in files next to the table after TubeMQ or the disk has acknowledged them: a crash in
between may redrive a record twice, but never loses it.

A record of Kafka is appended to its partition, if the source permits it. Each copy has a header with an id of its own,
which is stored before, with the ends of the partitions: after a crash, the next redrive looks for the ids behind these
ends, lists the copies that it finds, and sends the others. So a letter is redriven once, if no other redrive of the
table is active. If records behind these ends were deleted, it stops: the user decides.

    <table>/_redriven/<time>.json     coordinates of redriven records, with their times, parts and sources, the steps of
                                      their letters, and their copies, with the ids of the copies' topics of Kafka
    <table>/_sending/<source>.json    records that are being appended to Kafka; removed when they are listed

A redrive changes the states of the letters that it has sent (:mod:`penstock.pipelines.ledger.letter_states`). A letter
that another step writes later for the same record is open.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.errors import ConfigError, DataLossError
from penstock.pipelines.ledger.letter_states import (
    NOTE,
    REDRIVEN,
    LetterKey,
    LetterState,
    LetterStates,
    letter_states,
    place_of,
    places_as_json,
    places_in,
)
from penstock.pipelines.sinks.parquet import read_file
from penstock.pipelines.sinks.table import delete_rows, files
from penstock.pipelines.spec.pipeline import Pipeline, steps_after
from penstock.pipelines.spec.sources import DeltaSource, FilesSource, KafkaSource, Source, StateStoreSource, TubeOptions
from penstock.pipelines.spec.values import (
    MASTER_VARIABLE,
    REDRIVE,
    REDRIVE_ID,
    REDRIVE_PARTS,
    REDRIVE_STEP,
    SOURCE_LOGIN,
    names_setting,
    sink_letter,
)
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import (
    listed,
    make_directory,
    read_each,
    read_json,
    sync_directory,
    sync_names,
    write_json,
)
from penstock.pipelines.state_dir.replay import Coordinates, RecordPart, RedrivenCopy, ReplayRange
from penstock.spark.files.object_storage import StoragePath
from penstock.spark.kafka.source import KafkaLog
from penstock.spark.kafka.writes import AppendedRecord, append_records
from penstock.spark.tube.arrow import record_of
from penstock.spark.tube.offsets import OffsetSpec, TimeSpec
from penstock.spark.tube.options import SourceOptions
from penstock.tube.producer import Producer
from penstock.tube.record import Record

__all__ = [
    "DeadLetter",
    "failed_again",
    "letters",
    "of_same_records",
    "purge",
    "redrive",
    "redriven",
    "redriven_copies",
    "warning_of_copies",
]

Key = TypeVar("Key")
Known = TypeVar("Known")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SOURCE = re.compile(r".+\.json")
_SENDING = "_sending"
"""Directory with the redrives to Kafka that have not ended, a file for each source."""


class DeadLetter(NamedTuple):
    """One record that a step could not process.

    ``code`` is the kind of failure (``parse.not_json``), ``source`` the name of the source; both are empty in dead
    letters of older versions. ``part``: the part of the record that failed after an explode step, otherwise None.
    ``timestamp`` is None for a record of Kafka in a format without one.
    """

    step: str
    code: str
    reason: str
    id: str
    source: str
    topic: str
    broker: int
    partition: int
    offset: int
    timestamp: datetime | None
    key: bytes | None
    headers: list[tuple[str, bytes]]
    value: bytes
    part: str | None = None

    @property
    def coordinates(self) -> Coordinates:
        """Topic, broker, partition and offset of the record."""
        return self.topic, self.broker, self.partition, self.offset

    @property
    def place(self) -> RecordPart:
        """The record and the part of it."""
        at = self.timestamp
        # Rows of a table have times without a zone.
        at_us = None if at is None else (at.replace(tzinfo=at.tzinfo or UTC) - _EPOCH) // timedelta(microseconds=1)
        return RecordPart(self.coordinates, self.part, self.source, at_us)


def letters(path: StoragePath) -> Iterator[DeadLetter]:
    """Yield the dead letters in the table at ``path``, in write order.

    Raises:
        StorageError: a committed file is missing.
    """
    import pyarrow as pa

    for file in files(path):
        table = read_file(file)
        # pyarrow imports pandas to convert timestamps, which takes longer than everything else.
        column = table.schema.get_field_index("timestamp")
        times = table.column(column).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        for row in table.set_column(column, "timestamp", times).to_pylist():
            at_us = row["timestamp"]
            yield _letter(row | {"timestamp": None if at_us is None else _EPOCH + timedelta(microseconds=at_us)})


def _letter(row: dict[str, Any]) -> DeadLetter:
    headers = [(header["key"], header["value"] or b"") for header in row["headers"] or ()]
    # Tables of older versions lack key, code and source.
    values = {name: row.get(name) for name in DeadLetter._fields} | {"headers": headers}
    return DeadLetter(**values | {name: values[name] or "" for name in ("code", "source")})


def _known(found: Mapping[Key, Known], keys: Iterable[Key]) -> Known | None:
    """Return what is known of the first of ``keys`` of which something is known."""
    return next((found[key] for key in keys if key in found), None)


def of_same_records(chosen: Sequence[DeadLetter], others: Iterable[DeadLetter]) -> list[DeadLetter]:
    """Return ``chosen``, and those of ``others`` that are letters of the same records or parts.

    Several steps and sinks can reject a record. It is redriven once, for all of them.
    """
    places = {letter.place for letter in chosen}
    known = {(letter.place, letter.step) for letter in chosen}
    return [*chosen, *(each for each in others if each.place in places and (each.place, each.step) not in known)]


def failed_again(every: Iterable[DeadLetter], after: Mapping[str, Collection[str]]) -> set[tuple[RecordPart, str]]:
    """Return place and step of the letters of which ``every`` has a newer one: that of the redriven record, which has
    the same id, and failed in the same step or before it. ``after``: see :func:`steps_after`."""
    by_id: dict[tuple[str, str], dict[int, list[DeadLetter]]] = {}
    for letter in every:
        by_id.setdefault((letter.source, letter.id), {}).setdefault(_redrives_of(letter), []).append(letter)
    found: set[tuple[RecordPart, str]] = set()
    for by_redrives in by_id.values():
        # Steps of the newer letters: by their part, and by each part that contains it.
        of: dict[str | None, set[str]] = {}
        inside: dict[str | None, set[str]] = {}
        for number in sorted(by_redrives, reverse=True):
            for letter in by_redrives[number] if of else ():
                newer = inside.get(letter.part, set()).union(*(of.get(part, ()) for part in _containing(letter.part)))
                if any(letter.step == step or letter.step in after.get(step, ()) for step in newer):
                    found.add((letter.place, letter.step))
            for letter in by_redrives[number]:
                of.setdefault(letter.part, set()).add(letter.step)
                for part in _containing(letter.part):
                    inside.setdefault(part, set()).add(letter.step)
    return found


def _containing(part: str | None) -> list[str | None]:
    """Return ``part`` and the parts that contain it; None is the whole record."""
    names = [] if part is None else part.split(".")
    return [None, *(".".join(names[:end]) for end in range(1, len(names) + 1))]


def redriven(path: StoragePath) -> set[Coordinates]:
    """Return the coordinates of the redriven records."""
    return {place.record for place, _, _ in _redrives(path)}


def redriven_copies(path: StoragePath) -> dict[RecordPart, RedrivenCopy]:
    """Map redriven records and parts to their newest copies, if their coordinates are known."""
    return {place: copy for place, _, copy in _redrives(path) if copy is not None}


def _redrives(path: StoragePath) -> Iterator[tuple[RecordPart, int, RedrivenCopy | None]]:
    """Yield redriven records and parts, the time (ms since 1970) after which the source has a copy, and the copy, in
    the order of the redrives."""
    names = sorted((match[0] for match in listed(path / REDRIVEN, NOTE)), key=lambda name: (len(name), name))
    for name, note in zip(names, read_each(read_json, [path / REDRIVEN / name for name in names]), strict=True):
        # Notes of older versions lack the time; their file name is the time at which all copies were acknowledged.
        since_ms = int(note.get("since_ms", int(name.removesuffix(".json")) // 1_000_000))
        # They also lack the copies, like redrives of files.
        copies = note.get("copies") or [None] * len(note["places"])
        # Notes of older versions lack the steps, which only parts of records need, and the ids of topics.
        steps = note.get("steps") or [""] * len(note["places"])
        topic_ids = note.get("topic_ids") or [""] * len(note["places"])
        for place, copy, step, topic_id in zip(places_in(note), copies, steps, topic_ids, strict=True):
            yield place, since_ms, None if copy is None else RedrivenCopy(place_of(copy).record, step, topic_id)


def warning_of_copies(path: StoragePath, inputs: Mapping[str, Source], span: ReplayRange) -> str | None:
    """Return a warning if a replay of ``span`` reads records together with copies that cannot be recognized; otherwise
    None.

    A replay omits redriven records whose copies it reads (:func:`redriven_copies`). The coordinates of the copies are
    unknown if an older version or an Apache broker stored them: the replay then writes two rows, because a dedupe
    deliberately accepts the copy. Dead letters of files have no copies in a replay, which has its own inbox.
    """
    if interrupted := listed(path / _SENDING, _SOURCE):
        return (
            f"a redrive to {interrupted[0][0].removesuffix('.json')} was interrupted (pipeline dead-letter redrive), so"
            " the replay may write its records twice; to omit the copies, redrive again before the replay"
        )
    since: dict[RecordPart, int] = {}
    for place, since_ms, copy in _redrives(path):
        if copy is None:
            since.setdefault(place, since_ms)
    if not since:
        return None
    repeated = [
        copied_ms
        for letter in letters(path)
        if (copied_ms := _known(since, letter.place.less_specific())) is not None
        and isinstance(inputs.get(letter.source or next(iter(inputs))), TubeOptions | KafkaSource)
        and not _is_before(letter, span.begin)
        and (span.end == "latest" or _is_before(letter, span.end))
        and not (isinstance(span.end, TimeSpec) and isinstance(span.end.at, int) and span.end.at <= copied_ms)
    ]
    if not repeated:
        return None
    first = datetime.fromtimestamp(min(repeated) / 1000, UTC).isoformat(timespec="milliseconds")
    records = "1 record" if len(repeated) == 1 else f"{len(repeated)} records"
    return (
        f"{records} in this range became dead letters and were redriven (pipeline dead-letter redrive), so the range "
        f"may contain each twice, and the replay writes both; to omit the copies, replay --to {first} or earlier"
    )


def purge(path: StoragePath, chosen: Sequence[DeadLetter]) -> int:
    """Delete the letters ``chosen`` from the table at ``path``; return their number.

    The coordinates of redriven letters are not deleted, because replays need them. A run may write to the table at the
    same time.
    """
    gone = {(letter.place, letter.step) for letter in chosen}
    return delete_rows(path, lambda row: (_letter(row).place, str(row["step"])) in gone)


def _is_before(letter: DeadLetter, coordinates: OffsetSpec) -> bool:
    """Return True if the record of ``letter`` is known to precede ``coordinates``."""
    if isinstance(coordinates, TimeSpec):
        at = coordinates.at
        return isinstance(at, int) and letter.timestamp is not None and letter.timestamp.timestamp() * 1000 < at
    if isinstance(coordinates, str):
        return False
    named = coordinates.get(letter.topic, {})
    offset = named.get(f"{letter.broker}:{letter.partition}", named.get(str(letter.partition)))
    return offset is not None and offset >= 0 and letter.offset < offset


async def redrive(
    path: StoragePath,
    chosen: Sequence[DeadLetter],
    pipeline: Pipeline,
    state: StoragePath,
    tell: Callable[[str], object] = lambda _: None,
) -> int:
    """Send ``chosen`` to their sources again, with unchanged ids; return the number of acknowledged and listed letters.

    Letters of Kafka that an interrupted redrive has sent are listed, and not sent again unless they were corrected
    since. ``tell`` is called with remarks.

    Raises:
        ConfigError: ``pipeline`` no longer has the source, the topic or the explode step of a dead letter, or its step
            after a dedupe or deadband, the source is read-only, a topic is compacted, or the source reads files and
            ``state`` is in a bucket; nothing was sent.
        DataLossError: it is unknown what an interrupted redrive has sent; nothing was sent.
        PenstockError: a record was not acknowledged; none is listed as redriven, so all of them may be sent again.
    """
    inputs = pipeline.inputs
    before = {
        key
        for name, source in inputs.items()
        if isinstance(source, KafkaSource)
        for key in _end_interrupted(path, name, source)
    }
    if not chosen:
        return 0
    by_source: dict[str, list[DeadLetter]] = {}
    for letter in chosen:
        by_source.setdefault(letter.source or next(iter(inputs)), []).append(letter)
    for name, found in by_source.items():
        _check_writable(name, inputs)
        source = inputs[name]
        if isinstance(source, FilesSource):
            layout.local_directory(state, name)
        elif isinstance(source, KafkaSource):
            _check_topics(name, source, {letter.topic for letter in found}, tell)
    _check_parts(chosen, pipeline)
    after = steps_after(pipeline)
    _check_steps(chosen, pipeline, after)
    since_ms = time.time_ns() // 1_000_000
    states = letter_states(path)
    copies: dict[RecordPart, RedrivenCopy] = {}
    sent: list[DeadLetter] = []
    for name, found in by_source.items():
        source = inputs[name]
        open_ = [letter for letter in found if before.isdisjoint(LetterKey(letter.place, letter.step).less_specific())]
        mine = _records([_corrected(letter, states) for letter in open_], after)
        if isinstance(source, TubeOptions):
            with names_setting(f"master of the source {name!r}", MASTER_VARIABLE, SOURCE_LOGIN):
                copies |= await _into_topics(source, mine)
        elif isinstance(source, KafkaSource):
            copies |= _into_partitions(path, name, source, open_, mine)
        else:
            _into_inbox(layout.inbox(layout.local_directory(state, name), name), mine)
        sent += open_
    if sent:
        listed_ = [(letter.place, letter.step, copies.get(letter.place)) for letter in sent]
        _list_redriven(path, listed_, since_ms)
    for name in by_source:
        if isinstance(inputs[name], KafkaSource):
            _forget_sending(path, name)
    return len(chosen)


def _list_redriven(
    path: StoragePath,
    letters: Sequence[tuple[RecordPart, str, RedrivenCopy | None]],
    since_ms: int,
    at_ns: int | None = None,
    *,
    by_step: bool = True,
) -> None:
    """Store that ``letters`` (place, step, copy) were redriven after ``since_ms``; ``at_ns``: time of the change
    (default: now). Unless ``by_step``, all letters of their records are redriven."""
    copies = [copy for _, _, copy in letters]
    note = {
        **places_as_json([place for place, _, _ in letters]),
        "copies": [None if copy is None else copy.record for copy in copies],
        "topic_ids": ["" if copy is None else copy.topic_id for copy in copies],
        "steps": [step for _, step, _ in letters],
        "by_step": by_step,
        "since_ms": since_ms,
    }
    write_json(path / REDRIVEN / f"{at_ns or time.time_ns()}.json", note)


def _corrected(letter: DeadLetter, states: LetterStates) -> DeadLetter:
    """Return ``letter`` with the corrected payload of its record, if there is one."""
    value = states.correction(LetterKey(letter.place, letter.step))
    return letter if value is None else letter._replace(value=value)


class _RedrivenRecord(NamedTuple):
    """A record to send: that of ``letter``, its places (more than one for several parts), and the steps that rejected
    it."""

    letter: DeadLetter
    places: tuple[RecordPart, ...]
    steps: tuple[str, ...]

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """The headers of the record, with the number of redrives, the steps that rejected it, and its parts."""
        letter = self.letter
        kept = [(name, value) for name, value in letter.headers if name not in _REDRIVE_HEADERS]
        marks = [(REDRIVE, b"%d" % (_redrives_of(letter) + 1)), (REDRIVE_STEP, ",".join(self.steps).encode())]
        parts = [part for place in self.places for part in _parts_to_make(letter, place.part)]
        return [*kept, *marks, *([(REDRIVE_PARTS, ",".join(parts).encode())] if parts else [])]

    @property
    def headers_with_id(self) -> list[tuple[str, bytes]]:
        """The headers, after one with the id of the record."""
        return [("id", self.letter.id.encode()), *((n, v) for n, v in self.headers if n != "id")]

    def as_record(self) -> Record:
        """Return the record as a producer sends it."""
        record = record_of(self.letter.value, self.letter.key, self.headers)
        record.id = self.letter.id
        return record


_REDRIVE_HEADERS = frozenset({REDRIVE, REDRIVE_STEP, REDRIVE_PARTS, REDRIVE_ID})


def _redrives_of(letter: DeadLetter) -> int:
    """Return how often the record of ``letter`` had been redriven."""
    return max((int(value) for name, value in letter.headers if name == REDRIVE and value.isdigit()), default=0)


def _listed(letter: DeadLetter, header: str) -> list[str]:
    """Return the comma-separated values of ``header`` of the record of ``letter``."""
    text = next((value.decode(errors="replace") for name, value in letter.headers if name == header), "")
    return [each for each in text.split(",") if each]


def _parts_to_make(letter: DeadLetter, failed: str | None) -> list[str]:
    """Return the parts of the record of ``letter`` to make if the part ``failed`` is redriven; empty for all.

    If the record was redriven for parts inside ``failed`` (all are inside None), the others have been written.
    """
    wanted = _listed(letter, REDRIVE_PARTS)
    inside = [part for part in wanted if failed is None or part.startswith(f"{failed}.")]
    return inside or ([] if failed is None else [failed])


def _records(letters: Sequence[DeadLetter], after: Mapping[str, Collection[str]]) -> list[_RedrivenRecord]:
    """Return the records to send for ``letters``: one for all parts of a record that the same steps rejected.

    With one for each part or step, a dedupe would drop all but the first, which have the same id, and without a dedupe
    each sink would write all of them. ``after``: see :func:`steps_after`.
    """
    by_place: dict[RecordPart, list[DeadLetter]] = {}
    for letter in letters:
        by_place.setdefault(letter.place, []).append(letter)
    found: dict[object, tuple[tuple[str, ...], list[DeadLetter]]] = {}
    for same in by_place.values():
        letter, steps = same[0], _steps_of(same, after)
        key = (letter.place._replace(part=None), letter.part is None, letter.value, frozenset(steps))
        found.setdefault(key, (steps, []))[1].append(letter)
    return [_RedrivenRecord(mine[0], tuple(each.place for each in mine), steps) for steps, mine in found.values()]


def _steps_of(letters: Sequence[DeadLetter], after: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return the steps that rejected the record of ``letters``, so that dedupes before them accept it once more.

    If the record had been redriven, and now failed before a step that had rejected it, this step still waits for it.
    """
    steps = dict.fromkeys(each.step for each in letters)
    later = {name for step in steps for name in after.get(step, ())}
    before = (name for each in letters for name in _listed(each, REDRIVE_STEP) if name in later)
    return tuple(steps | dict.fromkeys(before))


def _check_parts(letters: Sequence[DeadLetter], pipeline: Pipeline) -> None:
    """Refuse a part that no step of ``pipeline`` would make: all of them would count it as filtered."""
    known = {step.name for step in pipeline.steps if step.explode is not None}
    for letter in letters:
        # Parts of earlier versions are indices only, without steps.
        if letter.part is not None and letter.part[:1].isdigit():
            raise ConfigError(
                f"the part {letter.part} of a dead letter does not name its explode step",
                option="steps",
                why=f"an earlier version has stored the part of the record {letter.id!r}",
                hint="close the letter (penstock pipeline dead-letter resolve), and send the rest of the record "
                "yourself",
            )
        for name in (letter.part or "").split(".")[:-1:2]:
            if name not in known:
                raise ConfigError(
                    f"the explode step {name!r} of a dead letter is not in the file",
                    option="steps",
                    why=f"it made the part {letter.part} of the record {letter.id!r}",
                    hint="give the step its former name, or close the letter (penstock pipeline dead-letter resolve)",
                )


def _check_steps(letters: Sequence[DeadLetter], pipeline: Pipeline, after: Mapping[str, Collection[str]]) -> None:
    """Refuse a step that is not in the file, if its records may be dropped as those that were seen before.

    A parse step precedes dedupes and deadbands. A sink with a new name has read the record itself. ``after``: see
    :func:`steps_after`.
    """
    for letter in letters:
        from_source = after.get(letter.source or next(iter(pipeline.inputs)), ())
        # A column of a Python step may be NOT NULL, too.
        precedes = letter.code != "schema.null" and letter.code.startswith(("parse.", "schema.", "sparkplug."))
        if not (precedes or _is_in_file(letter.step, pipeline)):
            _refuse_if_seen(letter, letter.step, from_source, letters, pipeline)
        # A step after this one that rejected the record before, and waits for it. None is after a sink.
        later = () if letter.step.startswith(sink_letter("")) else after.get(letter.step, from_source)
        for name in _listed(letter, REDRIVE_STEP):
            if name != letter.step and not _is_in_file(name, pipeline):
                _refuse_if_seen(letter, name, later, letters, pipeline)


def _is_in_file(step: str, pipeline: Pipeline) -> bool:
    return step.startswith(sink_letter("")) or any(each.name == step for each in pipeline.steps)


def _refuse_if_seen(
    letter: DeadLetter, name: str, passed: Collection[str], letters: Sequence[DeadLetter], pipeline: Pipeline
) -> None:
    """Refuse ``letter``, whose record the unknown step ``name`` rejected, if one of the steps ``passed`` is a dedupe or
    deadband."""
    seen_by = next(
        (each for each in pipeline.steps if each.name in passed and each.kind in {"dedupe", "deadband"}), None
    )
    if seen_by is None:
        return
    other = next((each.step for each in letters if each.place == letter.place and each.step != letter.step), None)
    same = "" if other is None else f"; it is redriven with the letter of {other!r}, which belongs to the same record"
    raise ConfigError(
        f"the step {name!r} of a dead letter is not in the file",
        option="steps",
        why=f"the {seen_by.kind} step {seen_by.name!r} may have seen the record {letter.id!r}, and accepts it again "
        f"only for a step that rejected it{same}",
        hint="give the step its former name until the redriven records have been processed, or close the letter "
        f"(penstock pipeline dead-letter resolve --step {letter.step} --id {letter.id})",
    )


def _check_writable(name: str, inputs: Mapping[str, Source]) -> None:
    source = inputs.get(name)
    if source is None:
        raise ConfigError(
            f"the source {name!r} of a dead letter is not in the file",
            option="sources",
            hint=f"add it again, or select dead letters of {', '.join(inputs)}",
        )
    if isinstance(source, StateStoreSource):
        raise ConfigError(
            f"records cannot be redriven to the source {name!r}: only the node may write to the topic of its changes",
            hint="set the key again (penstock kv set), which creates a new change",
        )
    if isinstance(source, DeltaSource):
        raise ConfigError(
            f"records cannot be redriven to the source {name!r}: the table belongs to other programs",
            hint="correct the row in the table, which is a new change, and close the letter (penstock pipeline "
            "dead-letter resolve)",
        )
    if isinstance(source, KafkaSource) and not source.redrive:
        raise ConfigError(
            f"records cannot be redriven to the source {name!r}: it does not permit writing to its topics",
            option="redrive",
            why="all consumers of a topic would read the records again",
            hint="set redrive: true in the source, or send the corrected record yourself and close the letter (penstock"
            " pipeline dead-letter resolve)",
        )
    if not isinstance(source, TubeOptions | FilesSource | KafkaSource):
        raise ConfigError(f"records cannot be redriven to the source {name!r}: its format is {source.format}")


def _check_topics(name: str, source: KafkaSource, topics: Collection[str], tell: Callable[[str], object]) -> None:
    """Check that the source ``name`` reads ``topics``, and that they are not compacted.

    Compaction may remove copies that an interrupted redrive has sent, and keeps a copy instead of newer records with
    its key.
    """
    for topic in topics:
        if topic not in source.topics:
            raise ConfigError(
                f"records cannot be redriven to the topic {topic!r}: the source {name!r} does not read it",
                option="topics",
                hint="add it again, or send the records yourself and close the letters (penstock pipeline dead-letter"
                " resolve)",
            )
    with _everything(source) as log:
        policies = {topic: log.setting(topic, "cleanup.policy") for topic in topics}
    for topic, policy in policies.items():
        if policy is None:
            tell(
                f"topic {topic!r} must not be compacted, which was not checked: the user lacks the permission"
                " DescribeConfigs"
            )
        elif "compact" in policy:
            raise ConfigError(
                f"records cannot be redriven to the topic {topic!r}: its cleanup.policy is {policy}",
                option="redrive",
                why="compaction keeps the last record of each key, which the redriven one would be",
                hint="send the corrected record yourself and close the letter (penstock pipeline dead-letter resolve)",
            )


async def _into_topics(source: TubeOptions, records: Sequence[_RedrivenRecord]) -> dict[RecordPart, RedrivenCopy]:
    """Send ``records`` to their topics; return the copies whose coordinates the brokers reported."""
    login = SourceOptions.parse(source.all_options()).login
    copies: dict[RecordPart, RedrivenCopy] = {}
    async with Producer(source.master, **login.client()) as producer:
        by_topic: dict[str, list[_RedrivenRecord]] = {}
        for record in records:
            by_topic.setdefault(record.letter.topic, []).append(record)
        for topic, mine in by_topic.items():
            results = await producer.send_all(topic, [record.as_record() for record in mine])
            for record, result in zip(mine, results, strict=True):
                if result.append_offset >= 0:
                    copy = (topic, result.broker_id, result.partition, result.append_offset)
                    copies |= dict.fromkeys(record.places, RedrivenCopy(copy))
    return copies


def _into_partitions(
    path: StoragePath,
    name: str,
    source: KafkaSource,
    letters: Sequence[DeadLetter],
    records: Sequence[_RedrivenRecord],
) -> dict[RecordPart, RedrivenCopy]:
    """Append ``records`` of ``letters`` to the partitions of their topics; return the copies with known coordinates.

    A copy has the partition of its record, where its order among those of its key is decided, and its time.
    """
    if not records:
        return {}
    sent_as = {letter.place: letter.value for letter in letters}
    # The letter of an empty value and that of none are the same, unless the user has corrected it.
    empty = [each for each in records if not each.letter.value and not sent_as[each.places[0]]]
    with _everything(source) as log:
        _, ends = log.bounds()
        topic_ids = log.topic_ids()
        no_value = log.without_value({_offset_of(each.letter) for each in empty})
    start: dict[str, dict[str, int]] = {}
    for letter in letters:
        end = ends[letter.topic].get(str(letter.partition))
        if end is None:
            raise ConfigError(
                f"a record cannot be redriven to the partition {letter.partition} of topic {letter.topic!r}",
                option="topics",
                why="the topic has no such partition: it was created again with fewer",
                hint="add partitions with kafka-topics.sh --alter, or send the record yourself and close the letter"
                f" (penstock pipeline dead-letter resolve --id {letter.id})",
            )
        start.setdefault(letter.topic, {})[str(letter.partition)] = end
    begun = time.time_ns()
    marked = [(f"{begun}-{number}", record) for number, record in enumerate(records)]
    marks = {place: mark for mark, record in marked for place in record.places}
    intent = {
        "start": start,
        "topic_ids": {topic: topic_ids[topic] for topic in start},
        "begun_ns": begun,
        "marks": [marks[letter.place] for letter in letters],
        "steps": [letter.step for letter in letters],
        "by_step": True,
        "ids": [letter.id for letter in letters],
        **places_as_json([letter.place for letter in letters]),
    }
    write_json(path / _SENDING / f"{name}.json", intent)
    copies: dict[RecordPart, RedrivenCopy] = {}
    for topic in dict.fromkeys(record.letter.topic for record in records):
        mine = [(mark, record) for mark, record in marked if record.letter.topic == topic]
        appended = [_appended(record, mark, no_value) for mark, record in mine]
        offsets = append_records(source.target(topic), appended)
        for (_, record), offset in zip(mine, offsets, strict=True):
            if offset >= 0:
                copy = (topic, 0, record.letter.partition, offset)
                copies |= dict.fromkeys(record.places, RedrivenCopy(copy, topic_id=topic_ids[topic]))
    return copies


def _offset_of(letter: DeadLetter) -> tuple[str, int, int]:
    return letter.topic, letter.partition, letter.offset


def _appended(record: _RedrivenRecord, mark: str, no_value: Container[tuple[str, int, int]]) -> AppendedRecord:
    letter = record.letter
    has_value = letter.value or _offset_of(letter) not in no_value
    return AppendedRecord(
        letter.partition,
        letter.key,
        letter.value if has_value else None,
        [*record.headers_with_id, (REDRIVE_ID, mark.encode())],
        # A record in a format without a time gets that of the redrive, which is what the client writes for 0.
        0 if letter.timestamp is None else round(letter.timestamp.timestamp() * 1000),
    )


def _end_interrupted(path: StoragePath, name: str, source: KafkaSource) -> set[LetterKey]:
    """List the letters that an interrupted redrive to the source ``name`` has sent; return their places and steps,
    without those that were corrected since.

    They are listed with the time at which the redrive began, so that later changes of their states stay valid. In the
    file of an older version a letter is one of all steps.

    Raises:
        DataLossError: records that may be copies were deleted, and the letters were neither corrected nor closed since.
    """
    try:
        intent = read_json(path / _SENDING / f"{name}.json")
    except FileNotFoundError:
        return set()
    with _everything(source) as log:
        found, deleted = log.find(intent["start"], REDRIVE_ID)
        topic_ids = log.topic_ids()
    created_again = {topic for topic, known in intent["topic_ids"].items() if topic_ids.get(topic) != known}
    begun = int(intent["begun_ns"])
    later = letter_states(path, begun)
    by_step = bool(intent.get("by_step", False))
    sent: list[tuple[RecordPart, str, RedrivenCopy | None]] = []
    opened: list[tuple[RecordPart, str, RedrivenCopy | None]] = []
    finished: set[LetterKey] = set()
    unknown: dict[str, None] = {}
    for mark, step, id_, place in zip(intent["marks"], intent["steps"], intent["ids"], places_in(intent), strict=True):
        topic, _, partition, _ = place.record
        state = later.state_at_any_time(LetterKey(place, step))
        if (copy := found.get(str(mark).encode())) is not None:
            letter = (place, step, RedrivenCopy((copy[0], 0, *copy[1:]), topic_id=intent["topic_ids"][topic]))
            # Opening a letter again does not recall its copy.
            (opened if state is LetterState.OPEN else sent).append(letter)
        elif ((topic, partition) in deleted or topic in created_again) and state in (None, LetterState.OPEN):
            unknown[id_] = None
        is_sent = copy is not None or state is LetterState.REDRIVEN
        if is_sent and state is not LetterState.CORRECTED:
            finished.add(LetterKey(place, step if by_step else ""))
    if unknown:
        raise DataLossError(
            f"it is unknown whether an interrupted redrive to the source {name!r} has sent {next(iter(unknown))!r}"
            + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""),
            why="its topic was created again, or records were deleted from it since, of which one may be the copy",
            hint="look for the record in the tables of the pipeline; if it is there, close the letter: penstock "
            "pipeline dead-letter resolve --id ID; if not, store its payload: penstock pipeline dead-letter correct "
            "--id ID; then redrive again",
        )
    if sent:
        _list_redriven(path, sent, begun // 1_000_000, begun, by_step=by_step)
    if opened:
        _list_redriven(path, opened, begun // 1_000_000, by_step=by_step)
    _forget_sending(path, name)
    return finished


def _forget_sending(path: StoragePath, name: str) -> None:
    """Remove the file of a redrive whose letters are listed."""
    (path / _SENDING / f"{name}.json").unlink(missing_ok=True)
    sync_names(path / _SENDING)


def _everything(source: KafkaSource) -> KafkaLog:
    """Return a client that also reads behind open transactions of other producers, where copies may be."""
    return KafkaLog(source.read_options._replace(isolation="read_uncommitted"))


def _into_inbox(directory: Path, records: Sequence[_RedrivenRecord]) -> None:
    """Write one file of JSON lines and rename it when it is complete, because the source reads every file with this
    suffix."""
    make_directory(directory)
    name = f"{time.time_ns()}.jsonl"
    temporary = directory / f".{name}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        for record in records:
            line = {
                "headers": [(name, base64.b64encode(value).decode()) for name, value in record.headers_with_id],
                "value": base64.b64encode(record.letter.value).decode(),
            }
            file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / name)
    sync_directory(directory)
