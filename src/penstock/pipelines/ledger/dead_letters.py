"""Read the dead letters in the table of a pipeline, and redrive them to their sources.

A dead letter stores the unchanged record: value, key and headers. A redriven record has the same id, and a header with
the number of redrives, so that a dedupe accepts it. A TubeMQ record is sent to its topic; a record of a file is written
to a file in the source's inbox, which is read like the others. Redriven records are listed in files next to the table
after TubeMQ or the disk has acknowledged them: a crash in between may redrive a record twice, but never loses it.

    <table>/_redriven/<time>.json   coordinates of redriven records, and of their copies
    <table>/_states/<time>.json     other changes of state: corrected, resolved, discarded, reopened
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.pipelines.sinks.table import delete_rows, files
from penstock.pipelines.spec.sources import FilesSource, Source, StateStoreSource, TubeOptions
from penstock.pipelines.spec.values import MASTER_VARIABLE, REDRIVE, REDRIVE_STEP, names_setting
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import listed, read_json, sync_directory, write_json
from penstock.pipelines.state_dir.replay import Coordinates, ReplayRange
from penstock.spark.tube.arrow import record_of
from penstock.spark.tube.offsets import OffsetSpec, TimeSpec
from penstock.spark.tube.options import SourceOptions
from penstock.tube.producer import Producer
from penstock.tube.record import Record

__all__ = [
    "DeadLetter",
    "LetterState",
    "LetterStatus",
    "letter_states",
    "letters",
    "purge",
    "redrive",
    "redriven",
    "redriven_copies",
    "set_state",
    "warning_of_copies",
]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NOTE = re.compile(r"[0-9]+\.json")
_REDRIVEN, _STATES = "_redriven", "_states"
"""Directories with the changes of letters, one file per change."""


class LetterState(StrEnum):
    """State of a dead letter. A corrected letter has another payload, and is redriven with it."""

    OPEN = "open"
    CORRECTED = "corrected"
    REDRIVEN = "redriven"
    RESOLVED = "resolved"
    DISCARDED = "discarded"

    @property
    def is_closed(self) -> bool:
        """True if the letter needs no further action."""
        return self not in (LetterState.OPEN, LetterState.CORRECTED)


class LetterStatus(NamedTuple):
    """State of a letter, and the corrected payload."""

    state: LetterState
    value: bytes | None = None


class DeadLetter(NamedTuple):
    """One record that a step could not process.

    ``code`` is the kind of failure (``parse.not_json``), ``source`` the name of the source; both are empty in dead
    letters of older versions.
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
    timestamp: datetime
    key: bytes | None
    headers: list[tuple[str, bytes]]
    value: bytes

    @property
    def coordinates(self) -> Coordinates:
        """Topic, broker, partition and offset of the record."""
        return self.topic, self.broker, self.partition, self.offset


def letters(path: Path) -> Iterator[DeadLetter]:
    """Yield the dead letters in the table at ``path``, in write order.

    Raises:
        StorageError: a committed file is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files(path):
        table = pq.ParquetFile(file).read()
        # pyarrow imports pandas to convert timestamps, which takes longer than everything else.
        at = table.schema.get_field_index("timestamp")
        times = table.column(at).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        for row in table.set_column(at, "timestamp", times).to_pylist():
            yield _letter(row | {"timestamp": _EPOCH + timedelta(microseconds=row["timestamp"])})


def _letter(row: dict[str, Any]) -> DeadLetter:
    headers = [(header["key"], header["value"] or b"") for header in row["headers"] or ()]
    # Tables of older versions lack key, code and source.
    values = {name: row.get(name) for name in DeadLetter._fields} | {"headers": headers}
    return DeadLetter(**values | {name: values[name] or "" for name in ("code", "source")})


def letter_states(path: Path) -> dict[Coordinates, LetterStatus]:
    """Return the states of the dead letters in the table at ``path`` that are no longer open, or were corrected."""
    notes = [(int(match[0].removesuffix(".json")), _REDRIVEN, match[0]) for match in listed(path / _REDRIVEN, _NOTE)]
    notes += [(int(match[0].removesuffix(".json")), _STATES, match[0]) for match in listed(path / _STATES, _NOTE)]
    found: dict[Coordinates, LetterStatus] = {}
    # File names are the times of the changes: the last one is valid.
    for _, directory, name in sorted(notes):
        note = read_json(path / directory / name)
        state = LetterState(note.get("state", LetterState.REDRIVEN))
        value = None if note.get("value") is None else base64.b64decode(note["value"])
        for place in map(_coordinates, note["places"]):
            before = found.get(place)
            # A corrected letter that was redriven is redriven again with the same payload.
            kept = before.value if before is not None and state is LetterState.REDRIVEN else None
            found[place] = LetterStatus(state, kept if value is None else value)
    return {place: status for place, status in found.items() if status.state is not LetterState.OPEN}


def set_state(path: Path, chosen: Sequence[DeadLetter], state: LetterState, value: bytes | None = None) -> None:
    """Store that the letters ``chosen`` have ``state``; ``value`` is the payload of a corrected letter."""
    if not chosen:
        return
    note: dict[str, Any] = {"state": state, "places": [letter.coordinates for letter in chosen]}
    if value is not None:
        note["value"] = base64.b64encode(value).decode()
    write_json(path / _STATES / f"{time.time_ns()}.json", note)


def redriven(path: Path) -> set[Coordinates]:
    """Return the coordinates of the redriven records."""
    return {coordinates for coordinates, _, _ in _redrives(path)}


def redriven_copies(path: Path) -> dict[Coordinates, Coordinates]:
    """Map the coordinates of redriven records to those of their newest copies, if known."""
    return {coordinates: copy for coordinates, _, copy in _redrives(path) if copy is not None}


def _redrives(path: Path) -> Iterator[tuple[Coordinates, int, Coordinates | None]]:
    """Yield the coordinates of redriven records, the time (ms since 1970) after which the source has a copy, and the
    coordinates of the copy, in the order of the redrives."""
    for name in sorted((match[0] for match in listed(path / _REDRIVEN, _NOTE)), key=lambda name: (len(name), name)):
        note = read_json(path / _REDRIVEN / name)
        # Notes of older versions lack the time; their file name is the time at which all copies were acknowledged.
        since_ms = int(note.get("since_ms", int(name.removesuffix(".json")) // 1_000_000))
        # They also lack the copies, like redrives of files.
        copies = note.get("copies") or [None] * len(note["places"])
        for place, copy in zip(note["places"], copies, strict=True):
            yield _coordinates(place), since_ms, None if copy is None else _coordinates(copy)


def _coordinates(place: Sequence[Any]) -> Coordinates:
    topic, broker, partition, offset = place
    return str(topic), int(broker), int(partition), int(offset)


def warning_of_copies(path: Path, inputs: Mapping[str, Source], span: ReplayRange) -> str | None:
    """Return a warning if a replay of ``span`` reads records together with copies that cannot be recognized; otherwise
    None.

    A replay omits redriven records whose copies it reads (:func:`redriven_copies`). The coordinates of the copies are
    unknown if an older version or an Apache broker stored them: the replay then writes two rows, because a dedupe
    deliberately accepts the copy. Dead letters of files have no copies in a replay, which has its own inbox.
    """
    since: dict[Coordinates, int] = {}
    for coordinates, since_ms, copy in _redrives(path):
        if copy is None:
            since.setdefault(coordinates, since_ms)
    if not since:
        return None
    repeated = [
        since[letter.coordinates]
        for letter in letters(path)
        if letter.coordinates in since
        and isinstance(inputs.get(letter.source or next(iter(inputs))), TubeOptions)
        and not _is_before(letter, span.begin)
        and (span.end == "latest" or _is_before(letter, span.end))
        and not (
            isinstance(span.end, TimeSpec) and isinstance(span.end.at, int) and span.end.at <= since[letter.coordinates]
        )
    ]
    if not repeated:
        return None
    first = datetime.fromtimestamp(min(repeated) / 1000, UTC).isoformat(timespec="milliseconds")
    records = "1 record" if len(repeated) == 1 else f"{len(repeated)} records"
    return (
        f"{records} in this range became dead letters and were redriven (pipeline dead-letter redrive), so the range "
        f"may contain each twice, and the replay writes both; to omit the copies, replay --to {first} or earlier"
    )


def purge(path: Path, chosen: Sequence[DeadLetter]) -> int:
    """Delete the letters ``chosen`` from the table at ``path``; return their number.

    The coordinates of redriven letters are not deleted, because replays need them. A run may write to the table at the
    same time.
    """
    gone = {(letter.coordinates, letter.step) for letter in chosen}
    return delete_rows(path, lambda row: (_letter(row).coordinates, str(row["step"])) in gone)


def _is_before(letter: DeadLetter, coordinates: OffsetSpec) -> bool:
    """Return True if the record of ``letter`` is known to precede ``coordinates``."""
    if isinstance(coordinates, TimeSpec):
        at = coordinates.at
        return isinstance(at, int) and letter.timestamp.timestamp() * 1000 < at
    if isinstance(coordinates, str):
        return False
    named = coordinates.get(letter.topic, {})
    offset = named.get(f"{letter.broker}:{letter.partition}", named.get(str(letter.partition)))
    return offset is not None and offset >= 0 and letter.offset < offset


async def redrive(path: Path, chosen: Sequence[DeadLetter], inputs: Mapping[str, Source], state: Path) -> int:
    """Send ``chosen`` to their sources ``inputs`` again, with unchanged ids; return the number of acknowledged and
    listed records.

    Raises:
        ConfigError: the file no longer has the source of a dead letter, or the source is read-only; nothing was sent.
        PenstockError: a record was not acknowledged; none is listed as redriven, so all of them may be sent again.
    """
    if not chosen:
        return 0
    by_source: dict[str, list[DeadLetter]] = {}
    for letter in chosen:
        by_source.setdefault(letter.source or next(iter(inputs)), []).append(letter)
    for name in by_source:
        _check_writable(name, inputs)
    since_ms = time.time_ns() // 1_000_000
    states = letter_states(path)
    by_source = {name: [_corrected(letter, states) for letter in mine] for name, mine in by_source.items()}
    copies: dict[Coordinates, Coordinates] = {}
    for name, mine in by_source.items():
        source = inputs[name]
        if isinstance(source, TubeOptions):
            with names_setting(f"master of the source {name!r}", MASTER_VARIABLE):
                copies |= await _into_topics(source, mine)
        else:
            _into_inbox(layout.inbox(state, name), mine)
    places = [letter.coordinates for letter in chosen]
    note = {"places": places, "copies": [copies.get(place) for place in places], "since_ms": since_ms}
    write_json(path / _REDRIVEN / f"{time.time_ns()}.json", note)
    return len(chosen)


def _corrected(letter: DeadLetter, states: Mapping[Coordinates, LetterStatus]) -> DeadLetter:
    """Return ``letter`` with its corrected payload, if it has one."""
    status = states.get(letter.coordinates)
    return letter if status is None or status.value is None else letter._replace(value=status.value)


def _check_writable(name: str, inputs: Mapping[str, Source]) -> None:
    source = inputs.get(name)
    if source is None:
        raise ConfigError(
            f"the source {name!r} of a dead letter is not in the file",
            option="sources",
            do=f"add it again, or select dead letters of {', '.join(inputs)}",
        )
    if isinstance(source, StateStoreSource):
        raise ConfigError(
            f"records cannot be redriven to the source {name!r}: only the node may write to the topic of its changes",
            do="set the key again (penstock kv set), which creates a new change",
        )
    if not isinstance(source, TubeOptions | FilesSource):
        raise ConfigError(f"records cannot be redriven to the source {name!r}: its format is {source.format}")


async def _into_topics(source: TubeOptions, letters: Sequence[DeadLetter]) -> dict[Coordinates, Coordinates]:
    """Send ``letters`` to their topics; return the coordinates of the copies that the brokers reported."""
    login = SourceOptions.parse(source.all_options()).login
    copies: dict[Coordinates, Coordinates] = {}
    async with Producer(source.master, **login.client()) as producer:
        by_topic: dict[str, list[DeadLetter]] = {}
        for letter in letters:
            by_topic.setdefault(letter.topic, []).append(letter)
        for topic, mine in by_topic.items():
            results = await producer.send_all(topic, map(_redriven_record, mine))
            for letter, result in zip(mine, results, strict=True):
                if result.append_offset >= 0:
                    copies[letter.coordinates] = (topic, result.broker_id, result.partition, result.append_offset)
    return copies


def _into_inbox(directory: Path, letters: Sequence[DeadLetter]) -> None:
    """Write one file of JSON lines and rename it when it is complete, because the source reads every file with this
    suffix."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{time.time_ns()}.jsonl"
    temporary = directory / f".{name}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        for letter in letters:
            headers = [("id", letter.id.encode()), *((n, v) for n, v in _marked(letter) if n != "id")]
            line = {
                "headers": [(header, base64.b64encode(value).decode()) for header, value in headers],
                "value": base64.b64encode(letter.value).decode(),
            }
            file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / name)
    sync_directory(directory)


def _marked(letter: DeadLetter) -> list[tuple[str, bytes]]:
    """Return the headers of ``letter``, with the number of redrives and the step that rejected it."""
    times = [int(value) for name, value in letter.headers if name == REDRIVE and value.isdigit()]
    kept = [(name, value) for name, value in letter.headers if name not in (REDRIVE, REDRIVE_STEP)]
    return [*kept, (REDRIVE, b"%d" % (max(times, default=0) + 1)), (REDRIVE_STEP, letter.step.encode())]


def _redriven_record(letter: DeadLetter) -> Record:
    record = record_of(letter.value, letter.key, _marked(letter))
    record.id = letter.id
    return record
