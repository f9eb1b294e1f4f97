"""Offsets of TubeMQ in Spark's form. Pure: no sockets, no Spark.

A **position** is the byte offset of a message in its store's index on the wire: a multiple of 28, shared by all
partitions of the store. The difference of two positions is therefore not the number of messages of one partition; the
broker counts those. Ranges are half-open: ``[start, end)``.

A partition is identified by broker and partition id together: ids repeat across brokers, and increase by 10,000 from
store to store. In JSON, which Spark keeps in its checkpoint, offsets are ``{topic: {"<brokerId>:<partitionId>": n}}``.
Users may omit the broker if one broker has the topic, and may write -2 for the earliest and -1 for the latest;
checkpoints contain neither.

A **mark** is the byte of a store's data at or before which the messages after a position begin. Apache's brokers delete
segments of index and data separately, and a reader gets no sign of an index entry without data: the message is left
out. Therefore the source keeps, with each end that it plans, the end of the data from the same answer of the broker.
Every message from that position on has its data after that byte; a range that begins there is complete if the broker
still has the byte after the range was read. A position in the middle of the log has the mark of the last planned end
before it, which is safe: if retention removes data between the two, a loss may be reported that is none. In JSON a mark
is next to its position: ``{"topic": {"1:0": 280, "1:0@data": 4000}}``. Penstock's brokers report such a loss themselves
and have no marks.
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
    "LATEST",
    "MARK",
    "Assigned",
    "Bounds",
    "LogEnds",
    "Marks",
    "Named",
    "Positions",
    "Slice",
    "Times",
    "TopicPartition",
    "Wanted",
    "by_partition",
    "check_data",
    "check_kept",
    "counted",
    "from_json",
    "is_selected",
    "marks_of",
    "packed",
    "parse_times",
    "parse_wanted",
    "resolve",
    "round_down",
    "select",
    "share",
    "slices",
    "split",
    "split_key",
    "stops",
    "to_json",
    "with_marks",
]

EARLIEST = -2
LATEST = -1

MARK = "@data"
"""Ends the name of a partition in the offset JSON where its mark stands, not its position."""


class TopicPartition(NamedTuple):
    """One partition of a topic on one broker."""

    topic: str
    broker_id: int
    partition: int

    @property
    def key(self) -> str:
        """The partition's name below its topic in the offset JSON."""
        return f"{self.broker_id}:{self.partition}"

    @property
    def store(self) -> tuple[str, int, int]:
        """The store that holds it, and other partitions of the topic: positions are the store's."""
        return self.topic, self.broker_id, self.partition // PARTITIONS_PER_STORE

    def __str__(self) -> str:
        return f"topic {self.topic!r} partition {self.key}"


class Bounds(NamedTuple):
    """Oldest kept position and the end of what is durable, both of the partition's store.

    ``oldest_data`` and ``end_data`` are byte positions in its data, of brokers where index and data expire apart.
    """

    oldest: int
    end: int
    oldest_data: int | None = None
    end_data: int | None = None


class Slice(NamedTuple):
    """Range of one task: the messages of ``partition`` in ``[start, end)``."""

    partition: TopicPartition
    start: int
    end: int


Positions = dict[TopicPartition, int]
"""The next position to read, per partition."""

Named = dict[str, dict[str, int]]
"""A number for each partition, by topic and partition name as written."""


class Times(NamedTuple):
    """Offset of the first message that the broker received at a time (ms since 1970) or later.

    ``at`` is one time for all partitions, or one for each. If there is no such message yet, it is the latest offset
    with ``or_latest``, else an error.
    """

    at: int | Named
    or_latest: bool


Wanted = str | Named | Times
"""Value of an offset option: ``"earliest"``, ``"latest"``, offsets, or times."""


def round_down(position: int) -> int:
    """The index record that ``position`` falls into. TubeMQ servers round the same way."""
    return position - position % INDEX_RECORD_BYTES


def to_json(positions: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """``positions`` for a checkpoint, sorted, so that equal positions give equal text."""
    result: dict[str, dict[str, int]] = {}
    for partition in sorted(positions):
        result.setdefault(partition.topic, {})[partition.key] = positions[partition]
    return result


def from_json(offset: Mapping[str, Mapping[str, int]]) -> Positions:
    """The inverse of :func:`to_json`, for offsets that this source wrote.

    Raises:
        ConfigError: it is something else; the checkpoint belongs to another source.
    """
    positions: Positions = {}
    try:
        for topic, named in offset.items():
            for key, position in named.items():
                broker_id, partition = split_key(key.removesuffix(MARK))
                if broker_id is None or not _is_position(position) or position < 0:
                    raise ValueError(key)
                if not key.endswith(MARK):
                    positions[TopicPartition(topic, broker_id, partition)] = position
    except (AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{_short(offset)} is not an offset of the tubemq source",
            why="the checkpoint was written by another source, or edited",
            do="give the query a checkpoint location of its own",
        ) from error
    return positions


def parse_wanted(text: str, option: str, *, earliest: bool = True, latest: bool = True) -> str | Named:
    """Check what an offsets option says, as far as that is possible without asking a server.

    ``earliest`` and ``latest`` say whether the option may ask for these: a batch cannot start at the latest nor end
    at the earliest.

    Raises:
        ConfigError: names the option, the part that is wrong and what is accepted.
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
        raise _bad_offsets(option, text, f"neither such a word nor JSON: {error}", allowed) from error
    if not isinstance(parsed, dict) or not parsed:
        raise _bad_offsets(option, text, "not a JSON object with topics", allowed)
    for topic, named in parsed.items():
        if not isinstance(named, dict) or not named:
            raise _bad_offsets(option, text, f"topic {topic!r} has no object with partitions", allowed)
        for key, position in named.items():
            _check_wanted(text, option, topic, key, position, allowed)
    return parsed


def parse_times(text: str, option: str) -> Named:
    """Check a ``...ByTimestamp`` option: JSON with a time in ms for each partition.

    Raises:
        ConfigError: names the option, the part that is wrong and what is accepted.
    """

    def bad(why: str) -> ConfigError:
        do = 'use JSON as {"topic": {"<brokerId>:<partitionId>": <ms since 1970>}}'
        return ConfigError(f"{option} {_short(text)}: {why}", option=option, do=do)

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
                raise bad(f"{key!r} of topic {topic!r} names no partition") from None
            if not _is_position(time_ms) or time_ms < 0:
                raise bad(f"{time_ms!r} of topic {topic!r} partition {key} is no time in ms")
    return parsed


def _check_wanted(text: str, option: str, topic: str, key: str, position: object, allowed: Mapping[str, bool]) -> None:
    try:
        split_key(key.removesuffix(MARK))
    except ValueError as error:
        raise _bad_offsets(option, text, f"{key!r} of topic {topic!r} names no partition", allowed) from error
    if not _is_position(position) or (isinstance(position, int) and position < EARLIEST):
        raise _bad_offsets(option, text, f"{position!r} of topic {topic!r} partition {key} is no position", allowed)
    if (position == EARLIEST and not allowed["earliest"]) or (position == LATEST and not allowed["latest"]):
        word = "earliest" if position == EARLIEST else "latest"
        why = f"{position} of topic {topic!r} partition {key} means {word}, which would select nothing"
        raise _bad_offsets(option, text, why, allowed)


def _bad_offsets(option: str, text: str, why: str, allowed: Mapping[str, bool]) -> ConfigError:
    words = [f'"{word}"' for word, is_allowed in allowed.items() if is_allowed]
    codes = [f"{code} for the {word}" for word, code in (("earliest", EARLIEST), ("latest", LATEST)) if allowed[word]]
    return ConfigError(
        f"{option} {_short(text)}: {why}",
        option=option,
        do=f'use {" or ".join(words)}, or JSON as {{"topic": {{"<brokerId>:<partitionId>": position}}}} '
        f"({', '.join(codes)})",
    )


def split_key(key: str) -> tuple[int | None, int]:
    """Broker (None when left out) and partition id of ``"1:0"`` or ``"0"``; ValueError for anything else."""
    parts = key.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(key)
    return (int(parts[0]) if len(parts) == 2 else None), int(parts[-1])


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 200 else text[:197] + "..."


Assigned = Mapping[str, Sequence[str]]
"""Partition names as written, by topic."""


def is_selected(partition: TopicPartition, topics: Collection[str], assigned: Assigned | None) -> bool:
    """Return True if a source that reads ``topics``, or only ``assigned`` of them, reads ``partition``."""
    if assigned is None:
        return partition.topic in topics
    names = assigned.get(partition.topic, ())
    return partition.key in names or str(partition.partition) in names


def select(
    existing: Collection[TopicPartition], topics: Collection[str], assigned: Assigned | None
) -> list[TopicPartition]:
    """Those of ``existing`` that are read, sorted.

    Raises:
        ConfigError: ``assigned`` names a partition that does not exist, or leaves out the broker where several hold
            the topic.
    """
    for topic, names in (assigned or {}).items():
        for name in names:
            _find(topic, name, existing, "assign")
    return sorted(partition for partition in existing if is_selected(partition, topics, assigned))


def resolve(wanted: str | Named, bounds: Mapping[TopicPartition, Bounds], option: str) -> Positions:
    """The positions that ``wanted`` means for exactly the partitions in ``bounds``.

    Explicit positions are rounded down to an index record and not clamped: one that is no longer kept, or not yet
    written, is noticed by :func:`check_kept`.

    Raises:
        ConfigError: a partition is named that does not exist, is not named although others are, or is named without
            a broker while several brokers hold the topic.
    """
    if isinstance(wanted, str):
        return {partition: bound.oldest if wanted == "earliest" else bound.end for partition, bound in bounds.items()}
    positions: Positions = {}
    for partition, position in by_partition(wanted, bounds, option).items():
        bound = bounds[partition]
        codes = {EARLIEST: bound.oldest, LATEST: bound.end}
        positions[partition] = codes[position] if position in codes else round_down(position)
    return positions


def by_partition(named: Named, known: Collection[TopicPartition], option: str) -> dict[TopicPartition, int]:
    """The number that ``named`` has for each of the ``known`` partitions.

    Raises:
        ConfigError: as :func:`resolve`.
    """
    found: dict[TopicPartition, int] = {}
    for topic, of_topic in named.items():
        for key, number in of_topic.items():
            if key.endswith(MARK):
                continue
            partition = _find(topic, key, known, option)
            if partition in found:
                raise ConfigError(
                    f"{option} names {partition} twice", option=option, do=f"name it once, as {partition.key!r}"
                )
            found[partition] = number
    missing = sorted(set(known) - found.keys())
    if missing:
        if option.endswith("ByTimestamp"):
            add = "times of theirs"
        else:
            code = EARLIEST if option == "startingOffsets" else LATEST
            add = f"{_short(to_json(dict.fromkeys(missing, code)))} or positions of your own"
        raise ConfigError(
            f"{option} says nothing of {', '.join(map(str, missing[:5]))}",
            option=option,
            why="it must name every partition that is read",
            do=f"add {add}, or read fewer with assign",
        )
    return found


def stops(named: Named, known: Collection[TopicPartition], option: str) -> Positions:
    """Return the end offsets of the ``known`` partitions that ``named`` names, rounded down to an index record.

    Raises:
        ConfigError: a partition is named without a broker while several brokers have the topic.
    """
    positions: Positions = {}
    for partition in known:
        of_topic, bare = named.get(partition.topic, {}), str(partition.partition)
        position = of_topic.get(partition.key)
        if position is None and bare in of_topic:
            _find(partition.topic, bare, known, option)
            position = of_topic[bare]
        if position is not None:
            positions[partition] = round_down(position)
    return positions


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
            f"{option} names topic {topic!r} partition {key}, which is not read",
            option=option,
            do=f"use its partitions {', '.join(partition.key for partition in existing)}"
            if existing
            else f"use the topics {', '.join(sorted({partition.topic for partition in known}))}",
        )
    if broker_id is None and len(brokers) > 1:
        raise ConfigError(
            f"{option} names topic {topic!r} partition {key} without a broker",
            option=option,
            why=f"{len(brokers)} brokers hold the topic",
            do=f'write "<brokerId>:{number}"; the brokers are {", ".join(map(str, sorted(brokers)))}',
        )
    return found[0]


def check_kept(position: int, bounds: Bounds, partition: TopicPartition, option: str = "failOnDataLoss") -> None:
    """Raise if reading from ``position`` would leave something out.

    Raises:
        DataLossError: ``position`` is older than what is kept, or beyond the end of the log.
    """
    if position < bounds.oldest:
        raise DataLossError(
            f"{partition}: position {position} is no longer kept, the oldest is {bounds.oldest}",
            why="retention removed what lies between before it was read",
            do=f"keep data longer, or set {option}=false to continue at the oldest record and accept the gap",
        )
    if position > round_down(bounds.end):
        raise DataLossError(
            f"{partition}: position {position} is beyond the end of the log, which is {bounds.end}",
            why="the broker lost its newest messages (a crash without durable acknowledgements, or an older copy of its"
            " data directory), or the position is of another cluster",
            do=f"check the position and the master, or set {option}=false to wait until the log reaches it",
        )


def slices(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> list[Slice]:
    """The ranges between two positions, one a partition, sorted; none where nothing lies between.

    Partitions of ``start`` that ``end`` does not know are not read: ``end`` is what a batch promised.

    Raises:
        KeyError: ``end`` has a partition that ``start`` lacks; the caller decides where such a one begins.
    """
    return [
        Slice(partition, start[partition], end[partition])
        for partition in sorted(end)
        if start[partition] < end[partition]
    ]


def counted(ranges: Sequence[Slice], counts_own: Callable[[TopicPartition], bool]) -> list[tuple[Slice, list[Slice]]]:
    """``ranges`` by what their broker counts for them: the range to ask for, and those that the answer is of.

    Each alone where ``counts_own`` says that a partition's own messages are counted. Else what the store has is, so
    its partitions are asked for once, together: none of them has more, and all of them have no more.
    """
    together: dict[tuple[str, int, int], list[Slice]] = {}
    for piece in ranges:
        of = piece.partition if counts_own(piece.partition) else piece.partition.store
        together.setdefault(of, []).append(piece)
    return [
        (Slice(pieces[0].partition, min(piece.start for piece in pieces), max(piece.end for piece in pieces)), pieces)
        for pieces in together.values()
    ]


def split(ranges: Sequence[Slice], minimum: int, most: int | None = None) -> list[Slice]:
    """Cut ``ranges`` so that at least ``minimum`` remain where that is possible, longest ones first into most pieces.

    None of them holds more than ``most`` messages. Cut by position, which costs no question to a server; with
    partitions of similar traffic the pieces hold similar numbers of messages (of a store with n partitions, an n-th of
    what lies between the positions). Order is kept: pieces of one partition follow each other.
    """
    records = [_records(piece) for piece in ranges]
    pieces = share(minimum, records) if len(ranges) < minimum else [1] * len(ranges)
    if most is not None:
        pieces = [max(count, -(-among // most)) for count, among in zip(pieces, records, strict=True)]
    result: list[Slice] = []
    for piece, count, parts in zip(ranges, records, pieces, strict=True):
        edges = [piece.start + INDEX_RECORD_BYTES * (count * part // parts) for part in range(parts)] + [piece.end]
        result.extend(Slice(piece.partition, edges[part], edges[part + 1]) for part in range(parts))
    return result


def packed(ranges: Sequence[Slice], most: int) -> list[list[Slice]]:
    """``ranges``, one a partition, by tasks: neighbours share one while they hold about ``most`` messages or fewer.

    Order is kept, and a longer range has a task of its own.
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


def share(limit: int, waiting: Sequence[int]) -> list[int]:
    """Divide ``limit`` messages over partitions that have ``waiting`` messages of their own: how many each gives.

    In proportion to what waits, so that partitions of one stream drain at the same pace in event time: with equal
    shares a short partition would run ahead, drag the watermark with it and make the others' records late. Nobody
    with something waiting gets nothing while ``limit`` allows one each.

    Never more than ``limit`` in sum, never more than waits, all of ``limit`` if that much waits. Deterministic.
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
"""The byte of its store's data at or before which what follows a partition's position begins."""

MOST_ENDS = 1024


def marks_of(offset: Mapping[str, Mapping[str, int]]) -> Marks:
    """The marks in offset JSON; none for partitions that are named without a broker."""
    marks: Marks = {}
    for topic, named in offset.items():
        for key, byte in named.items():
            if key.endswith(MARK):
                broker_id, partition = split_key(key.removesuffix(MARK))
                if broker_id is not None:
                    marks[TopicPartition(topic, broker_id, partition)] = byte
    return marks


def with_marks(offset: dict[str, dict[str, int]], marks: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """``offset`` with the ``marks`` of its partitions."""
    for partition in sorted(marks):
        named = offset.get(partition.topic, {})
        if partition.key in named:
            named[partition.key + MARK] = marks[partition]
    return offset


def check_data(position: int, mark: int | None, bounds: Bounds, partition: TopicPartition) -> None:
    """Raise if data behind ``position``, whose mark is ``mark``, may be gone.

    Raises:
        DataLossError: the broker has no longer the byte where they began.
    """
    if mark is not None and bounds.oldest_data is not None and bounds.oldest_data > mark:
        raise DataLossError(
            f"{partition}: data from position {position} on are no longer kept (oldest position {bounds.oldest}): "
            f"they begin at byte {mark} or later, the oldest byte kept is {bounds.oldest_data}",
            why="retention removed data before they were read",
            do="keep data longer, or set failOnDataLoss=false to continue with the rest and accept the gap",
        )


class LogEnds:
    """Ends of the log seen while a query ran, each with the end of the data: at most MOST_ENDS per partition."""

    def __init__(self) -> None:
        self._seen: dict[TopicPartition, list[tuple[int, int]]] = {}

    def record(self, bounds: Mapping[TopicPartition, Bounds]) -> None:
        """An answer of the brokers."""
        for partition, bound in bounds.items():
            if bound.end_data is not None:
                seen = self._seen.setdefault(partition, [])
                if not seen or seen[-1][0] < bound.end:
                    seen.append((bound.end, bound.end_data))
                if len(seen) > MOST_ENDS:
                    del seen[1::2]

    def marks(
        self,
        positions: Positions,
        bounds: Mapping[TopicPartition, Bounds],
        *,
        begin: Positions | None = None,
        before: Marks | None = None,
    ) -> Marks:
        """The marks of ``positions``; ``before`` are those of ``begin``, which lies at or before them.

        A position that did not move keeps its mark: equal offsets mean that there is nothing new. One that nothing is
        known of gets the oldest byte there is now.
        """
        begin, before = begin or {}, before or {}
        marks: Marks = {}
        for partition, position in positions.items():
            if partition in before and begin.get(partition) == position:
                marks[partition] = before[partition]
                continue
            seen = self._seen.get(partition, [])
            place = bisect_right(seen, position, key=lambda pair: pair[0])
            known = [seen[place - 1][1]] if place else []
            if partition in before:
                known.append(before[partition])
            oldest = bounds[partition].oldest_data if partition in bounds else None
            if known:
                marks[partition] = max(known)
            elif oldest is not None:
                marks[partition] = oldest
        return marks
