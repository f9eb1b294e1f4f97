"""TubeMQ offsets in Spark's checkpoints and options. This module uses neither sockets nor Spark.

An **offset** is the byte position of a message's entry in the index of its store: a multiple of 28, shared by all
partitions of the store. The difference of two offsets is therefore not the number of messages of one partition; the
broker counts those. Ranges are half-open: ``[start, end)``.

A partition is identified by broker and partition id together: ids repeat across brokers, and increase by 10,000 from
store to store. The JSON in Spark's checkpoint is ``{topic: {"<brokerId>:<partitionId>": n}}``. Users may omit the
broker if only one broker has the topic, and may write -2 for the earliest and -1 for the latest offset; checkpoints
contain neither.

A **mark** detects records whose data was deleted but whose index entries remain. Apache's brokers delete segments of
index and data separately, and omit a message without data from a response silently. The source therefore stores, with
each end offset that it plans, the end of the data file that the broker reported in the same response. The data of all
messages from that offset on begins at or after this byte: a range that starts there is complete if the broker still
has the byte after the range was read. An offset between two planned ends uses the mark of the lower one. This is safe,
but may report a loss that did not affect the range, if retention removed data between the two. In JSON a mark is stored
next to its offset: ``{"topic": {"1:0": 280, "1:0@data": 4000}}``. Penstock's brokers report such a loss themselves and
need no marks.

An **epoch** identifies the log of an offset (``storage/notes.py`` of TubeMQ): ``{"topic": {"1:0": 280, "1:0@epoch":
1234567890}}``. If the topic was deleted and created again, its log has another epoch, and the offset is in a log that
no longer exists, although the new one may be long enough to have the offset. Apache's brokers have no epochs, and
checkpoints of versions without epochs continue: there only an offset beyond the end of the log is detected.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import ConfigError, DataLossError
from penstock.spark.option_parsing import json_value
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.strings import PARTITIONS_PER_STORE

__all__ = [
    "EARLIEST",
    "EPOCH",
    "LATEST",
    "MARK",
    "Assigned",
    "Bounds",
    "Epochs",
    "LogEnds",
    "Marks",
    "OffsetSpec",
    "PartitionOffsets",
    "PartitionValues",
    "Slice",
    "TimeSpec",
    "TopicPartition",
    "before_end",
    "by_partition",
    "check_data_stored",
    "check_not_replaced",
    "check_offset_in_range",
    "epochs_at",
    "epochs_of",
    "from_json",
    "group_for_counting",
    "is_selected",
    "marks_of",
    "pack_tasks",
    "parse_offset_spec",
    "parse_times",
    "replaced_log",
    "resolve",
    "round_down",
    "select",
    "share_limit",
    "slices",
    "split",
    "split_key",
    "stop_offsets",
    "to_json",
    "with_epochs",
    "with_marks",
]

EARLIEST = -2
LATEST = -1

MARK = "@data"
"""Suffix of a partition's key in the offset JSON: the value is the partition's mark, not its offset."""

EPOCH = "@epoch"
"""Suffix of a partition's key in the offset JSON: the value is the epoch of the log that the offset belongs to."""


class TopicPartition(NamedTuple):
    """One partition of a topic on one broker."""

    topic: str
    broker_id: int
    partition: int

    @property
    def key(self) -> str:
        """The partition's key under its topic in the offset JSON."""
        return f"{self.broker_id}:{self.partition}"

    @property
    def store(self) -> tuple[str, int, int]:
        """The store of the partition. Partitions of one store share its offsets."""
        return self.topic, self.broker_id, self.partition // PARTITIONS_PER_STORE

    def __str__(self) -> str:
        return f"topic {self.topic!r} partition {self.key}"


class Bounds(NamedTuple):
    """Oldest stored offset and durable end of the log of a partition's store.

    ``oldest_data`` and ``end_data`` are byte positions in the store's data. Only brokers that delete index and data
    separately report them. ``epoch`` is the current epoch of the log; None if the broker has no epochs.
    """

    oldest: int
    end: int
    oldest_data: int | None = None
    end_data: int | None = None
    epoch: int | None = None


class Slice(NamedTuple):
    """The messages of ``partition`` with offsets in ``[start, end)``."""

    partition: TopicPartition
    start: int
    end: int


PartitionOffsets = dict[TopicPartition, int]
"""The offset of the next message to read, per partition."""

PartitionValues = dict[str, dict[str, int]]
"""An offset or time for each partition, by topic and partition key in the user's spelling."""


class TimeSpec(NamedTuple):
    """The offset of the first message that the broker received at a time (ms since 1970) or later.

    ``at`` is one time for all partitions, or one for each. If no such message exists, ``or_latest`` selects the latest
    offset; without it, resolving the offset fails.
    """

    at: int | PartitionValues
    or_latest: bool


OffsetSpec = str | PartitionValues | TimeSpec
"""Value of an offset option: ``"earliest"``, ``"latest"``, offsets, or times."""


def round_down(offset: int) -> int:
    """Round ``offset`` down to the start of its index entry, as TubeMQ servers do."""
    return offset - offset % INDEX_RECORD_BYTES


def before_end(bounds: Mapping[TopicPartition, Bounds], records: int) -> PartitionOffsets:
    """Return the offsets ``records`` index entries before the ends of the stores, or the oldest ones."""
    return {
        partition: max(found.oldest, round_down(found.end) - records * INDEX_RECORD_BYTES)
        for partition, found in bounds.items()
    }


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Convert ``offsets`` to the JSON object of a checkpoint, sorted so that equal offsets have equal JSON text."""
    result: dict[str, dict[str, int]] = {}
    for partition in sorted(offsets):
        result.setdefault(partition.topic, {})[partition.key] = offsets[partition]
    return result


def from_json(document: Mapping[str, Mapping[str, int]]) -> PartitionOffsets:
    """Parse offsets that :func:`to_json` created.

    Raises:
        ConfigError: ``document`` has another format; the checkpoint belongs to another source.
    """
    offsets: PartitionOffsets = {}
    try:
        for topic, named in document.items():
            for key, offset in named.items():
                name, suffix = _split_suffix(key)
                broker_id, partition = split_key(name)
                if broker_id is None or not _is_whole(offset) or offset < 0:
                    raise ValueError(key)
                if not suffix:
                    offsets[TopicPartition(topic, broker_id, partition)] = offset
    except (AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{_short(document)} is not an offset of the tubemq source",
            why="the checkpoint was written by another source, or edited",
            hint="use a separate checkpoint location for this query",
        ) from error
    return offsets


def parse_offset_spec(text: str, option: str, *, earliest: bool = True, latest: bool = True) -> str | PartitionValues:
    """Validate the syntax of an offsets option. Whether its partitions exist is checked later, by the server.

    ``earliest`` and ``latest``: True if the option accepts these values: a batch cannot start at the latest offset
    or end at the earliest one.

    Raises:
        ConfigError: the value is invalid; the error contains the option, the invalid part and the accepted values.
    """
    allowed = {"earliest": earliest, "latest": latest}
    word = text.strip().lower()
    if word in allowed:
        if not allowed[word]:
            raise _bad_offsets(option, text, f"{word!r} would select nothing", allowed)
        return word
    try:
        parsed = json_value(text)
    except ValueError as error:
        raise _bad_offsets(option, text, f"neither a keyword nor JSON: {error}", allowed) from error
    if not isinstance(parsed, dict) or not parsed:
        raise _bad_offsets(option, text, "not a JSON object with topics", allowed)
    for topic, named in parsed.items():
        if not isinstance(named, dict) or not named:
            raise _bad_offsets(option, text, f"topic {topic!r} has no object with partitions", allowed)
        for key, offset in named.items():
            _check_offset(text, option, topic, key, offset, allowed)
    return parsed


def parse_times(text: str, option: str) -> PartitionValues:
    """Validate the syntax of a ``...ByTimestamp`` option: JSON with a time in ms for each partition.

    Raises:
        ConfigError: the value is invalid; the error contains the option, the invalid part and the accepted values.
    """

    def bad(why: str) -> ConfigError:
        hint = 'use JSON as {"topic": {"<brokerId>:<partitionId>": <ms since 1970>}}'
        return ConfigError(f"{option} {_short(text)}: {why}", option=option, hint=hint)

    try:
        parsed = json_value(text)
    except ValueError as error:
        raise bad(f"not JSON: {error}") from None
    if not isinstance(parsed, dict) or not parsed:
        raise bad("not a JSON object with topics")
    for topic, named in parsed.items():
        if not isinstance(named, dict) or not named:
            raise bad(f"topic {topic!r} has no object with partitions")
        for key, time_ms in named.items():
            try:
                split_key(key)
            except ValueError:
                raise bad(f"{key!r} of topic {topic!r} is not a partition") from None
            if not _is_whole(time_ms) or time_ms < 0:
                raise bad(f"{time_ms!r} of topic {topic!r} partition {key} is not a time in ms")
    return parsed


def _check_offset(text: str, option: str, topic: str, key: str, offset: object, allowed: Mapping[str, bool]) -> None:
    try:
        split_key(_split_suffix(key)[0])
    except ValueError as error:
        raise _bad_offsets(option, text, f"{key!r} of topic {topic!r} is not a partition", allowed) from error
    if not _is_whole(offset) or (isinstance(offset, int) and offset < EARLIEST):
        raise _bad_offsets(option, text, f"{offset!r} of topic {topic!r} partition {key} is not an offset", allowed)
    if (offset == EARLIEST and not allowed["earliest"]) or (offset == LATEST and not allowed["latest"]):
        word = "earliest" if offset == EARLIEST else "latest"
        why = f"{offset} of topic {topic!r} partition {key} means {word}, which would select nothing"
        raise _bad_offsets(option, text, why, allowed)


def _bad_offsets(option: str, text: str, why: str, allowed: Mapping[str, bool]) -> ConfigError:
    words = [f'"{word}"' for word, is_allowed in allowed.items() if is_allowed]
    codes = [f"{code} for {word}" for word, code in (("earliest", EARLIEST), ("latest", LATEST)) if allowed[word]]
    return ConfigError(
        f"{option} {_short(text)}: {why}",
        option=option,
        hint=f'use {" or ".join(words)}, or JSON as {{"topic": {{"<brokerId>:<partitionId>": offset}}}} '
        f"({', '.join(codes)})",
    )


def split_key(key: str) -> tuple[int | None, int]:
    """Parse ``"1:0"`` or ``"0"`` into broker id (None if omitted) and partition id; ValueError for other text."""
    parts = key.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(key)
    return (int(parts[0]) if len(parts) == 2 else None), int(parts[-1])


def _split_suffix(key: str) -> tuple[str, str]:
    """Split a key of the offset JSON into the partition's key and MARK, EPOCH or ""; ValueError for other suffixes."""
    name, sign, kind = key.partition("@")
    if sign + kind not in ("", MARK, EPOCH):
        raise ValueError(key)
    return name, sign + kind


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 200 else text[:197] + "..."


Assigned = Mapping[str, Sequence[str]]
"""Partition keys in the user's spelling, by topic."""


def is_selected(partition: TopicPartition, topics: Collection[str], assigned: Assigned | None) -> bool:
    """Return True if a source that reads ``topics``, or only ``assigned`` of them, reads ``partition``."""
    if assigned is None:
        return partition.topic in topics
    names = assigned.get(partition.topic, ())
    return partition.key in names or str(partition.partition) in names


def select(
    existing: Collection[TopicPartition], topics: Collection[str], assigned: Assigned | None
) -> list[TopicPartition]:
    """Return the ``existing`` partitions that the options select, sorted.

    Raises:
        ConfigError: ``assigned`` contains a partition that does not exist, or omits the broker although several
            brokers have the topic.
    """
    for topic, names in (assigned or {}).items():
        for name in names:
            _find(topic, name, existing, "assign")
    return sorted(partition for partition in existing if is_selected(partition, topics, assigned))


def resolve(wanted: str | PartitionValues, bounds: Mapping[TopicPartition, Bounds], option: str) -> PartitionOffsets:
    """Resolve ``wanted`` to one offset for each of the partitions in ``bounds``.

    Explicit offsets are rounded down to an index entry but not clamped; :func:`check_offset_in_range` detects offsets
    that are no longer stored or not written yet.

    Raises:
        ConfigError: ``wanted`` contains a partition that does not exist, lacks one of the partitions, or omits a
            partition's broker although several brokers have the topic.
    """
    if isinstance(wanted, str):
        return {partition: bound.oldest if wanted == "earliest" else bound.end for partition, bound in bounds.items()}
    offsets: PartitionOffsets = {}
    for partition, offset in by_partition(wanted, bounds, option).items():
        bound = bounds[partition]
        codes = {EARLIEST: bound.oldest, LATEST: bound.end}
        offsets[partition] = codes[offset] if offset in codes else round_down(offset)
    return offsets


def by_partition(named: PartitionValues, known: Collection[TopicPartition], option: str) -> dict[TopicPartition, int]:
    """Look up the value of each of the ``known`` partitions in ``named``.

    Raises:
        ConfigError: as :func:`resolve`.
    """
    found: dict[TopicPartition, int] = {}
    for topic, of_topic in named.items():
        for key, number in of_topic.items():
            if _split_suffix(key)[1]:
                continue
            partition = _find(topic, key, known, option)
            if partition in found:
                raise ConfigError(
                    f"{option} contains {partition} twice", option=option, hint=f"list it once, as {partition.key!r}"
                )
            found[partition] = number
    missing = sorted(set(known) - found.keys())
    if missing:
        if option.endswith("ByTimestamp"):
            add = "times for these partitions"
        else:
            code = EARLIEST if option == "startingOffsets" else LATEST
            add = f"{_short(to_json(dict.fromkeys(missing, code)))}, or other offsets"
        raise ConfigError(
            f"{option} lacks {', '.join(map(str, missing[:5]))}",
            option=option,
            why="it must contain every partition that the query reads",
            hint=f"add {add}, or select fewer partitions with assign",
        )
    return found


def stop_offsets(named: PartitionValues, known: Collection[TopicPartition], option: str) -> PartitionOffsets:
    """Return the end offsets of the ``known`` partitions that ``named`` contains, rounded down to an index entry.

    Raises:
        ConfigError: ``named`` omits the broker of a partition although several brokers have the topic.
    """
    offsets: PartitionOffsets = {}
    for partition in known:
        of_topic, bare = named.get(partition.topic, {}), str(partition.partition)
        offset = of_topic.get(partition.key)
        if offset is None and bare in of_topic:
            _find(partition.topic, bare, known, option)
            offset = of_topic[bare]
        if offset is not None:
            offsets[partition] = round_down(offset)
    return offsets


def _find(topic: str, key: str, known: Collection[TopicPartition], option: str) -> TopicPartition:
    broker_id, number = split_key(key)
    found = [
        partition
        for partition in known
        if partition.topic == topic and partition.partition == number and broker_id in (None, partition.broker_id)
    ]
    brokers = {partition.broker_id for partition in known if partition.topic == topic}
    if not found:
        existing = sorted(partition for partition in known if partition.topic == topic)
        raise ConfigError(
            f"{option} contains topic {topic!r} partition {key}, which the query does not read",
            option=option,
            hint=f"use its partitions {', '.join(partition.key for partition in existing)}"
            if existing
            else f"use the topics {', '.join(sorted({partition.topic for partition in known}))}",
        )
    if broker_id is None and len(brokers) > 1:
        raise ConfigError(
            f"{option} contains topic {topic!r} partition {key} without a broker",
            option=option,
            why=f"{len(brokers)} brokers have the topic",
            hint=f'write "<brokerId>:{number}"; the brokers are {", ".join(map(str, sorted(brokers)))}',
        )
    return found[0]


def check_offset_in_range(offset: int, bounds: Bounds, partition: TopicPartition) -> None:
    """Check that every message from ``offset`` on is still stored.

    Raises:
        DataLossError: ``offset`` is before the oldest stored offset, or beyond the end of the log.
    """
    if offset < bounds.oldest:
        raise DataLossError(
            f"{partition}: offset {offset} is no longer stored (oldest: {bounds.oldest})",
            why="retention removed the records in between before they were read",
            hint="increase the retention time, or set the source option failOnDataLoss=false to continue at the oldest"
            " record and accept the gap",
        )
    if offset > round_down(bounds.end):
        raise DataLossError(
            f"{partition}: offset {offset} is beyond the end of the log ({bounds.end})",
            why="the broker lost its newest messages (a crash without durable acknowledgements, or an older copy of its"
            " data directory), or the offset belongs to another cluster",
            hint="check the offset and the master, or set the source option failOnDataLoss=false to wait until the log"
            " reaches it",
        )


def replaced_log(partition: TopicPartition, offset: int, begin: int) -> DataLossError:
    """Return the error about an ``offset`` whose log was replaced from the offset ``begin`` on."""
    return DataLossError(
        f"{partition}: offset {offset} belongs to a log that was replaced from offset {begin} on",
        why="the topic was deleted and created again, the data directory of its broker was replaced or restored from a"
        " backup, or the broker lost its newest messages in a crash",
        hint=f"set the source option failOnDataLoss=false to continue at offset {begin} of the present log and accept"
        " the loss of unread records, or start with a new checkpoint",
    )


def check_not_replaced(offsets: PartitionOffsets, replaced: PartitionOffsets) -> None:
    """Check that no log of ``offsets`` was replaced; ``replaced`` is the result of ``TubeClient.replaced``.

    Raises:
        DataLossError: one was.
    """
    for partition in sorted(replaced):
        raise replaced_log(partition, offsets[partition], replaced[partition])


def slices(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> list[Slice]:
    """Return the nonempty ranges from ``start`` to ``end``, at most one per partition, sorted.

    Partitions that only ``start`` contains are skipped: ``end`` defines the batch.

    Raises:
        KeyError: ``end`` has a partition that ``start`` lacks; the caller must choose its start.
    """
    return [
        Slice(partition, start[partition], end[partition])
        for partition in sorted(end)
        if start[partition] < end[partition]
    ]


def group_for_counting(
    ranges: Sequence[Slice], counts_own: Callable[[TopicPartition], bool]
) -> list[tuple[Slice, list[Slice]]]:
    """Group ``ranges`` into one count request each: ``(range to count, ranges that the count covers)``.

    If ``counts_own`` is True for a partition, the broker counts that partition's messages and the range is requested
    alone. Otherwise the broker counts the messages of the whole store, so the ranges of one store become one request,
    whose count is an upper limit of their total.
    """
    by_request: dict[tuple[str, int, int], list[Slice]] = {}
    for piece in ranges:
        key = piece.partition if counts_own(piece.partition) else piece.partition.store
        by_request.setdefault(key, []).append(piece)
    return [
        (Slice(pieces[0].partition, min(piece.start for piece in pieces), max(piece.end for piece in pieces)), pieces)
        for pieces in by_request.values()
    ]


def split(ranges: Sequence[Slice], minimum: int, most: int | None = None) -> list[Slice]:
    """Split ``ranges`` into at least ``minimum`` ranges if possible; longer ranges are split into more parts.

    No part contains more than ``most`` messages. Ranges are split by offset, which needs no request to a server. If
    the partitions of a store have similar traffic, the parts contain similar numbers of messages: with n partitions,
    one n-th of the store's messages between the offsets. The order is kept: parts of a partition are adjacent.
    """
    records = [_records(piece) for piece in ranges]
    pieces = share_limit(minimum, records) if len(ranges) < minimum else [1] * len(ranges)
    if most is not None:
        pieces = [max(count, -(-among // most)) for count, among in zip(pieces, records, strict=True)]
    result: list[Slice] = []
    for piece, count, parts in zip(ranges, records, pieces, strict=True):
        edges = [piece.start + INDEX_RECORD_BYTES * (count * part // parts) for part in range(parts)] + [piece.end]
        result.extend(Slice(piece.partition, edges[part], edges[part + 1]) for part in range(parts))
    return result


def pack_tasks(ranges: Sequence[Slice], most: int) -> list[list[Slice]]:
    """Group ``ranges``, one per partition, into tasks of about ``most`` messages or fewer.

    The order is kept; a range with more messages is a task of its own.
    """
    sharing = Counter(piece.partition.store for piece in ranges)
    tasks: list[list[Slice]] = []
    held = 0
    for piece in ranges:
        count = _records(piece) // sharing[piece.partition.store]
        if not tasks or held + count > most:
            tasks.append([])
            held = 0
        tasks[-1].append(piece)
        held += count
    return tasks


def _records(piece: Slice) -> int:
    return (piece.end - piece.start + INDEX_RECORD_BYTES - 1) // INDEX_RECORD_BYTES


def share_limit(limit: int, waiting: Sequence[int]) -> list[int]:
    """Divide ``limit`` messages over partitions with ``waiting`` messages; return the number for each partition.

    The shares are proportional to the backlog, so that the partitions of a stream advance at the same pace in event
    time: with equal shares, a partition with a small backlog would advance the watermark and make records of the others
    late. Each partition with a backlog gets at least one message if ``limit`` is large enough.

    The sum is the smaller of ``limit`` and the total backlog; no share exceeds its backlog. Deterministic.
    """
    total = sum(waiting)
    if total <= limit:
        return list(waiting)
    exact = [limit * count for count in waiting]  # in units of 1 / total
    granted = [amount // total for amount in exact]
    by_fraction = sorted(range(len(waiting)), key=lambda index: (-(exact[index] % total), index))
    for index in by_fraction[: limit - sum(granted)]:
        granted[index] += 1
    left_out = [index for index, count in enumerate(waiting) if count > 0 and granted[index] == 0]
    if limit >= sum(count > 0 for count in waiting):
        for index in left_out:
            granted[granted.index(max(granted))] -= 1
            granted[index] = 1
    return granted


Marks = dict[TopicPartition, int]
"""Per partition, a byte of its store's data: the data of all messages from its offset on begins at or after it."""

MOST_ENDS = 1024
"""Ends of the log that :class:`LogEnds` keeps per partition; if there are more, every second one is dropped."""


def marks_of(document: Mapping[str, Mapping[str, int]]) -> Marks:
    """Return the marks in an offset JSON object; partitions without a broker are skipped."""
    return _values(document, MARK)


def with_marks(document: dict[str, dict[str, int]], marks: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Add the ``marks`` of its partitions to ``document`` and return it."""
    return _with_values(document, marks, MARK)


Epochs = dict[TopicPartition, int]
"""Per partition, the epoch of the log that its offset belongs to."""


def epochs_of(document: Mapping[str, Mapping[str, int]]) -> Epochs:
    """Return the epochs in an offset JSON object; partitions without a broker are skipped."""
    return _values(document, EPOCH)


def with_epochs(document: dict[str, dict[str, int]], epochs: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Add the ``epochs`` of its partitions to ``document`` and return it."""
    return _with_values(document, epochs, EPOCH)


def epochs_at(
    offsets: PartitionOffsets, bounds: Mapping[TopicPartition, Bounds], begin: PartitionOffsets, before: Epochs
) -> Epochs:
    """Return the epochs of ``offsets``, which were learned with ``bounds``.

    ``before`` are the epochs of ``begin``: an equal offset keeps its own, or has none, because Spark compares the JSON
    to detect new data.
    """
    epochs: Epochs = {}
    for partition, offset in offsets.items():
        known = bounds.get(partition)
        epoch = before.get(partition) if known is None or begin.get(partition) == offset else known.epoch
        if epoch is not None:
            epochs[partition] = epoch
    return epochs


def _values(document: Mapping[str, Mapping[str, int]], suffix: str) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for topic, named in document.items():
        for key, number in named.items():
            if key.endswith(suffix):
                broker_id, partition = split_key(key.removesuffix(suffix))
                if broker_id is not None:
                    found[TopicPartition(topic, broker_id, partition)] = number
    return found


def _with_values(
    document: dict[str, dict[str, int]], values: Mapping[TopicPartition, int], suffix: str
) -> dict[str, dict[str, int]]:
    for partition in sorted(values):
        named = document.get(partition.topic, {})
        if partition.key in named:
            named[partition.key + suffix] = values[partition]
    return document


def check_data_stored(offset: int, mark: int | None, bounds: Bounds, partition: TopicPartition) -> None:
    """Check that the data of the messages from ``offset`` on is still stored; ``mark`` is the mark of ``offset``.

    Raises:
        DataLossError: the broker no longer stores the byte at ``mark``, so data may be missing.
    """
    if mark is not None and bounds.oldest_data is not None and bounds.oldest_data > mark:
        raise DataLossError(
            f"{partition}: data from offset {offset} on is no longer stored (oldest offset {bounds.oldest}): "
            f"it begins at byte {mark} or later, and the oldest stored byte is {bounds.oldest_data}",
            why="retention removed the data before it was read",
            hint="increase the retention time, or set the source option failOnDataLoss=false to skip the missing"
            " records and accept the gap",
        )


class LogEnds:
    """Ends of the log that brokers reported during a query, with the ends of the data: MOST_ENDS per partition."""

    def __init__(self) -> None:
        self._seen: dict[TopicPartition, list[tuple[int, int]]] = {}

    def record(self, bounds: Mapping[TopicPartition, Bounds]) -> None:
        """Add the ends that the brokers reported."""
        for partition, bound in bounds.items():
            if bound.end_data is not None:
                seen = self._seen.setdefault(partition, [])
                if not seen or seen[-1][0] < bound.end:
                    seen.append((bound.end, bound.end_data))
                if len(seen) > MOST_ENDS:
                    del seen[1::2]

    def marks(
        self,
        offsets: PartitionOffsets,
        bounds: Mapping[TopicPartition, Bounds],
        *,
        begin: PartitionOffsets | None = None,
        before: Marks | None = None,
    ) -> Marks:
        """Return the marks of ``offsets``; ``before`` are the marks of the earlier or equal offsets ``begin``.

        An offset that is equal to the one in ``begin`` keeps its mark, because Spark compares the JSON to detect new
        data. An offset without an earlier reported end gets the oldest stored byte.
        """
        begin, before = begin or {}, before or {}
        marks: Marks = {}
        for partition, offset in offsets.items():
            if partition in before and begin.get(partition) == offset:
                marks[partition] = before[partition]
                continue
            seen = self._seen.get(partition, [])
            index = bisect_right(seen, offset, key=lambda pair: pair[0])
            known = [seen[index - 1][1]] if index else []
            if partition in before:
                known.append(before[partition])
            oldest = bounds[partition].oldest_data if partition in bounds else None
            if known:
                marks[partition] = max(known)
            elif oldest is not None:
                marks[partition] = oldest
        return marks
