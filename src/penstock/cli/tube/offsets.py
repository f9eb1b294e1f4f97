"""Offsets: the ways to write one on the command line, and `penstock tube offset` and `penstock tube group lag`.

One grammar for all commands: ``earliest``, ``latest``, a time or how long ago, ``+N`` or ``-N`` messages, an offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.options import Watch, command_group, given_bytes, watched
from penstock.cli.output import Cell, note, print_table
from penstock.cli.tube.access import (
    UNKNOWN_USER,
    WEB,
    BrokerHttp,
    BrokerRow,
    Json,
    LoginOptions,
    Web,
    administers,
    ask_each,
    brokers,
    call_broker,
    complete_group,
    complete_topic,
    identifies,
    logs_in,
)
from penstock.cli.tube.groups import members
from penstock.errors import ConfigError, PenstockError, RefusedError

if TYPE_CHECKING:
    from penstock.tube.reader import RangeReader

__all__ = [
    "ENTRY",
    "MOST",
    "WHERE",
    "Counted",
    "Log",
    "Part",
    "Where",
    "app",
    "counting",
    "lag",
    "parse_part",
    "parse_where",
    "pick",
]

ENTRY = 28
"""Offsets are bytes of a store's index, so many a message; the partitions of a store share it."""
MOST = (1 << 31) - 1
WHERE = "earliest, latest, a time (2026-01-31T12:00, or 90s, 15m, 2h, 3d ago), +N or -N messages, an offset"

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d{1,12})([smhd])", re.ASCII)
_SHIFT = re.compile(r"[+-]\d{1,18}", re.ASCII)
_OFFSET = re.compile(r"\d{1,19}", re.ASCII)
_PART = re.compile(r"(?:(\d{1,10}):)?(\d{1,10})", re.ASCII)


class Log(NamedTuple):
    """What one partition holds now, of the half-open range of its store; ``source`` answers questions about it."""

    source: RangeReader
    broker_id: int
    topic: str
    partition: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Where:
    """A place in every log. Exactly one of the fields is set; :func:`parse_where` makes it."""

    option: str
    text: str
    word: str | None = None
    time_ms: int | None = None
    shift: int | None = None
    exact: int | None = None

    def offset(self, log: Log, here: int | None = None) -> int:
        """The offset that is meant in ``log``. Messages are counted from ``here``; else from the log's first or end.

        Raises:
            ConfigError: an offset that the log does not have; a time, and the broker keeps none.
            PenstockError: the broker does not answer, or refuses.
        """
        if self.word is not None:
            return log.first if self.word == "earliest" else log.end
        if self.shift is not None:
            start = here if here is not None else log.first if self.shift >= 0 else log.end
            return _shifted(log, start, self.shift)
        if self.time_ms is not None:
            return self._at_time(log, self.time_ms)
        assert self.exact is not None
        if not log.first <= self.exact <= log.end:
            raise ConfigError(
                f"{self.option}: partition {log.broker_id}:{log.partition} of {log.topic} has no offset {self.exact}",
                option=self.option,
                why=f"it holds {log.first} to {log.end}",
                do="choose the partition that is meant with --partition",
            )
        return self.exact

    def _at_time(self, log: Log, time_ms: int) -> int:
        try:
            return log.source.offset_at(log.topic, log.partition, time_ms)
        except RefusedError as error:
            if error.code == UNKNOWN_USER:
                raise
            raise ConfigError(
                f"{self.option}: broker {log.broker_id} does not find offsets by time",
                option=self.option,
                why=error.why or error.text,
                do="on Apache's broker use its own: broker.htm?method=admin_set_offset_by_time",
            ) from error


def parse_where(text: str, option: str) -> Where:
    """What ``text`` says, the value of ``option``. Times are local unless they say otherwise. Raises ConfigError."""
    if text in {"earliest", "latest"}:
        return Where(option, text, word=text)
    if _SHIFT.fullmatch(text):
        return Where(option, text, shift=int(text))
    if _OFFSET.fullmatch(text):
        offset = int(text)
        if offset % ENTRY:
            raise ConfigError(
                f"{option}: {offset} is no offset",
                option=option,
                why=f"offsets count {ENTRY} a message",
                do=f"write a multiple of {ENTRY}; for a number of messages +N or -N",
            )
        return Where(option, text, exact=offset)
    try:
        if ago := _AGO.fullmatch(text):
            found = datetime.now().astimezone() - timedelta(seconds=int(ago[1]) * _UNITS_S[ago[2]])
        else:
            found = datetime.fromisoformat(text)
        return Where(option, text, time_ms=int(found.timestamp() * 1000))
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}: got {text!r}", option=option, do=f"write one of: {WHERE}") from None


class Part(NamedTuple):
    """Partitions by number: of one broker, or (None) of each."""

    broker_id: int | None
    partition: int

    def __str__(self) -> str:
        return str(self.partition) if self.broker_id is None else f"{self.broker_id}:{self.partition}"

    def means(self, broker_id: int, partition: int) -> bool:
        return partition == self.partition and self.broker_id in {None, broker_id}


def parse_part(text: str, option: str = "--partition") -> Part:
    """What ``[BROKER:]N`` means. Raises ConfigError."""
    match = _PART.fullmatch(text)
    if match is None:
        do = "write a partition, 0, or with its broker, 1:0, as consume shows it"
        raise ConfigError(f"{option}: got {text!r}", option=option, do=do)
    return Part(None if match[1] is None else int(match[1]), int(match[2]))


def pick(parts: Iterable[Part], topic: str, places: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of ``places`` (broker id, partition) that ``parts`` mean; without parts all.

    Raises:
        RefusedError: one means none.
    """
    there, chosen = sorted(places), set[tuple[int, int]]()
    for part in parts:
        meant = {place for place in there if part.means(*place)}
        if not meant:
            names = ", ".join(f"{broker}:{number}" for broker, number in there)
            raise RefusedError(f"topic {topic!r} has no partition {part}", why=f"it has {names}")
        chosen |= meant
    return chosen or set(there)


Counted = Callable[[int, int, int], tuple[int, int]]
"""(start, end, most) to (end of the longest range with at most so many messages, how many it has)."""


def counting(log: Log) -> Counted:
    """Counts a partition's own messages; of a broker that cannot, those of the store."""

    def count(start: int, end: int, most: int) -> tuple[int, int]:
        if start >= end:
            return end, 0
        try:
            return log.source.plan(log.topic, log.partition, start, end, most)
        except RefusedError as error:
            if error.code == UNKNOWN_USER:
                raise
            there = min((end - start) // ENTRY, most)
            return start + there * ENTRY, there

    return count


def _shifted(log: Log, here: int, by: int) -> int:
    """The offset ``by`` messages from ``here``, within what is kept."""
    count = counting(log)
    if by > 0:
        return count(here, log.end, by)[0]
    before = count(log.first, here, MOST)[1]
    return log.first if -by >= before else count(log.first, here, before + by)[0]


app = command_group("Show where a group stands, or move it.", alone=False)
PIPELINE_GROUP = "pipeline-"
"""How the groups begin under which pipelines show their offsets."""
_QUERY_GROUP = re.compile(r"spark-tubemq-[0-9a-f]{8}")
"""The groups under which Spark queries without ``tubemq.group`` show theirs."""
Group = Annotated[str, typer.Argument(help="The consumer group.", metavar="GROUP", autocompletion=complete_group)]
OnlyTopic = Annotated[str | None, typer.Option(help="Only this topic.", metavar="TOPIC", autocompletion=complete_topic)]
OnlyPartitions = Annotated[
    list[str] | None,
    typer.Option(help="Only this partition, of each broker or of one; may be repeated.", metavar="[BROKER:]N"),
]


class Standing(NamedTuple):
    """A group in one partition: where it reads next, and what the log holds. Index offsets; None: not known."""

    broker: BrokerRow
    topic: str
    partition: int
    offset: int | None
    first: int
    end: int
    bytes_behind: int | None

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.broker.id, self.partition

    @property
    def key(self) -> str:
        return f"{self.broker.id}:{self.topic}:{self.partition}"


@app.command("show")
@administers
@identifies
def offsets_show(
    group: Group, topic: OnlyTopic = None, http: Web = WEB, broker_http: BrokerHttp = None, as_json: Json = False
) -> None:
    """Show where GROUP stands in every partition."""
    rows: list[dict[str, Cell]] = [
        {**_place(s), "offset": s.offset, "first": s.first, "end": s.end}
        for s in _standings(group, topic, ask_each(http, broker_http, _asking(group, topic)))
    ]
    print_table(rows, ["topic", "broker", "partition", "offset", "first", "end"], as_json=as_json)


@app.command("reset")
@logs_in
@administers
def offsets_reset(
    group: Group,
    login: LoginOptions,
    to: Annotated[
        str | None,
        typer.Option(help=f"{WHERE}. +N and -N count from where the group stands.", metavar="WHERE"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Where to: positions as `offsets show --json` printed them, of this group or another; -: stdin.",
            metavar="FILE",
        ),
    ] = None,
    topic: OnlyTopic = None,
    partition: OnlyPartitions = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, do nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also a group that has the name of a pipeline or of a Spark query.")
    ] = False,
    http: Web = WEB,
    broker_http: BrokerHttp = None,
    as_json: Json = False,
) -> None:
    """Move GROUP to other positions.

    Best while no member of the group runs: what a running one has in hand is counted on top of the new position.

    Pipelines and Spark queries are refused: they only show their offsets as those of a group, and continue from their
    checkpoints.

    Messages are those of the partition; on Apache's brokers those of its store, which its other partitions share.
    """
    if (to is None) == (file is None):
        raise ConfigError("offsets reset: where to?", option="--to", do="give --to WHERE, or --file FILE")
    where = None if to is None else parse_where(to, "--to")
    saved = {} if file is None else _saved(file)
    parts = [parse_part(text) for text in partition or ()]
    ask = _asking(group, topic)
    told = [(broker, ask(broker)) for broker in brokers(http, broker_http)]  # each has to answer: none is left behind
    standings = _standings(group, topic, told, new=topic is not None or bool(saved))
    targets = [(s, where or saved.get(s.place)) for s in standings if _chosen(s, parts)]
    moves = [_move(s, target, login) for s, target in targets if target is not None]
    absent = saved.keys() - {s.place for s in standings} if topic is None else ()
    if not moves or absent:
        name = "" if not absent else " {1}:{2} of {0}".format(*min(absent))
        raise RefusedError(
            f"there is no partition{name} to move group {group!r} in",
            do="look at its positions: penstock tube offsets show",
        )
    there = members(http, group)
    if not there and not force:
        _refuse_query(group)
    if there:
        note(f"group {group} has members ({there}): what they have in hand is counted on top of the new positions")
    if not dry_run:
        _set(group, moves)
    rows: list[dict[str, Cell]] = [
        {**_place(s), "from": s.offset, "to": offset, "messages": messages} for s, offset, messages in moves
    ]
    print_table(rows, ["topic", "broker", "partition", "from", "to", "messages"], as_json=as_json)
    note("nothing was changed: --dry-run" if dry_run else f"group {group} is moved in {_partitions(len(rows))}")


def _refuse_query(group: str) -> None:
    """Raises RefusedError: ``group`` has the name under which a pipeline or a Spark query shows its offsets."""
    if group.startswith(PIPELINE_GROUP):
        who, do = (
            "a pipeline",
            "penstock pipeline run FILE --from PLACE [--to PLACE] --into DIRECTORY reads records again",
        )
    elif _QUERY_GROUP.fullmatch(group):
        who, do = "a Spark query", "give the query a new checkpointLocation, and startingOffsets"
    else:
        return
    raise RefusedError(
        f"group {group!r} is that of {who}, and is not moved",
        why="its offsets are only shown; where it continues is in its checkpoint",
        do=f"{do}; --force if consumers use this name",
    )


def _chosen(standing: Standing, parts: Sequence[Part]) -> bool:
    return not parts or any(part.means(standing.broker.id, standing.partition) for part in parts)


def _saved(file: Path) -> dict[tuple[str, int, int], Where]:
    """Positions in a file, by topic, broker and partition. Raises ConfigError: it holds something else."""
    found = {}
    for number, line in enumerate(given_bytes("offsets reset", "WHERE", None, file).splitlines(), start=1):
        try:
            row = json.loads(line)
            place = str(row["topic"]), int(row["broker"]), int(row["partition"])
            if row["offset"] is not None:
                found[place] = parse_where(str(int(row["offset"])), "--file")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"--file: line {number} of {file} is no position",
                option="--file",
                why=f"{type(error).__name__}: {error}",
                do="make it with: penstock tube offsets show GROUP --json",
            ) from error
    if not found:
        raise ConfigError(f"--file: {file} has no position", option="--file")
    return found


def _set(group: str, moves: Sequence[tuple[Standing, int, int | None]]) -> None:
    for broker in {s.broker.id: s.broker for s, _, _ in moves}.values():
        wanted = {s.key: offset for s, offset, _ in moves if s.broker.id == broker.id}
        parameters = {
            "groupName": group,
            "modifyUser": "penstock",
            "manualSet": "true",
            "offsetJsonInfo": json.dumps(wanted, separators=(",", ":")),
        }
        call_broker(broker.web, "admin_set_offset", parameters)


@logs_in
@administers
def lag(
    login: LoginOptions,
    group: Annotated[
        str | None,
        typer.Argument(help="The consumer group; else all.", metavar="[GROUP]", autocompletion=complete_group),
    ] = None,
    topic: OnlyTopic = None,
    watch: Watch = None,
    fail_above: Annotated[
        int | None,
        typer.Option(help="Exit status 1 where more messages wait in all, or a broker is away.", min=0, metavar="N"),
    ] = None,
    http: Web = WEB,
    broker_http: BrokerHttp = None,
    as_json: Json = False,
) -> None:
    """Show how far GROUP, or each group, is behind: messages, bytes and seconds (how long the next message has waited).

    While watching, what cannot be asked is said on standard error and asked again.

    Penstock's brokers count a partition's own messages; of Apache's, those of the store are shown, and no seconds.
    Bytes are those of the store.
    """
    away: list[int] = []

    def look() -> list[dict[str, Cell]]:
        told = ask_each(http, broker_http, _asking(group, topic), away)
        names = _groups(told) if group is None else [group]
        return [{"group": name, **row} for name in names for row in _lag_rows(_standings(name, topic, told), login)]

    def show(rows: list[dict[str, Cell]]) -> None:
        _print_lag(rows, many=group is None, as_json=as_json)
        too_much = fail_above is not None and (away or sum(int(row["messages"] or 0) for row in rows) > fail_above)
        if too_much and watch is None:
            raise typer.Exit(1)

    watched(look, show, watch, as_json=as_json)


def _print_lag(rows: Sequence[dict[str, Cell]], *, many: bool, as_json: bool) -> None:
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    shown: list[dict[str, Cell]] = [{"time": now, **row} for row in rows]
    if len(rows) > 1 and not as_json:  # bytes are those of stores, which partitions share: they have no sum
        waits = [float(row["seconds"]) for row in rows if row["seconds"] is not None]
        messages = sum(int(row["messages"] or 0) for row in rows)
        name = "group" if many else "topic"
        shown.append({name: "(all)", "messages": messages, "seconds": max(waits, default=None)})
    columns = ["topic", "broker", "partition", "messages", "bytes", "seconds"]
    print_table(shown, ["group", *columns] if many else columns, as_json=as_json)


class Told(NamedTuple):
    """Rows of a broker's administration: its topics, and where a group stands."""

    topics: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def _groups(told: Iterable[tuple[BrokerRow, Told]]) -> list[str]:
    """The groups that have a position in what brokers told."""
    return sorted({entry["groupName"] for _, rows in told for entry in rows.groups if entry["subInfo"]})


def _asking(group: str | None, topic: str | None) -> Callable[[BrokerRow], Told]:
    narrowed = {} if topic is None else {"topicName": topic}
    named = {} if group is None else {"groupName": group}

    def ask(broker: BrokerRow) -> Told:
        return Told(
            call_broker(broker.web, "admin_query_pubinfo", narrowed),
            call_broker(broker.web, "admin_query_offset", {**named, **narrowed}),
        )

    return ask


def _standings(
    group: str, topic: str | None, told: Iterable[tuple[BrokerRow, Told]], *, new: bool = False
) -> list[Standing]:
    """Where ``group`` stands, by topic, broker and partition; ``new``: also in partitions where it has no position."""
    found: list[Standing] = []
    topics: set[str] = set()
    for broker, rows in told:
        firsts: dict[tuple[str, int], tuple[int, int]] = {}
        for entry in rows.topics:
            topics.add(entry["topicName"])
            for part in entry["offsetInfo"]:
                firsts[entry["topicName"], part["partitionId"]] = (part["offsetMin"], part["offsetMax"])
        known: dict[tuple[str, int], Any] = {}
        for entry in rows.groups:
            for sub in entry["subInfo"] if entry["groupName"] == group else ():
                for part in sub["offsets"]:
                    known[sub["topicName"], part["partitionId"]] = part
        for place in sorted({*known, *(firsts if new else ())}):
            part = known.get(place)
            first, end = firsts.get(place, (0, part["offsetMax"] if part else 0))
            behind = part["dataLag"] if part and part["dataLag"] >= 0 else None
            offset = part["curOffset"] if part else None
            found.append(Standing(broker, place[0], place[1], offset, first, end, behind))
    if not found and topic is not None and topic not in topics:
        raise RefusedError(f"no broker has topic {topic!r}", do="look at the names (penstock tube topics)")
    if not found:
        raise RefusedError(
            f"group {group!r} has no position" + (f" in topic {topic!r}" if topic else ""),
            do="look at the groups (penstock tube groups); Apache's brokers tell of a new one after some seconds",
        )
    return sorted(found, key=lambda s: (s.topic, s.broker.id, s.partition))


def _partitions(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _place(standing: Standing) -> dict[str, Cell]:
    return {"topic": standing.topic, "broker": standing.broker.id, "partition": standing.partition}


def _move(standing: Standing, where: Where, login: LoginOptions) -> tuple[Standing, int, int | None]:
    """Where the group stands in a partition, the offset that is meant there, and how many messages lie between."""
    from penstock.tube.reader import RangeReader

    s = standing
    here = s.first if s.offset is None else min(max(s.offset, s.first), s.end)
    with RangeReader(*s.broker.address(tls=login.over_tls), **login.client()) as source:
        log = Log(source, s.broker.id, s.topic, s.partition, s.first, s.end)
        target = where.offset(log, here)
        if s.offset is None:
            return s, target, None
        try:
            between = counting(log)(min(here, target), max(here, target), MOST)[1]
        except PenstockError:
            return s, target, None  # the move needs no count, and may be asked for without a login
        return s, target, between if target >= here else -between


def _lag_rows(standings: Iterable[Standing], login: LoginOptions) -> Iterator[dict[str, Cell]]:
    from penstock.runtime.io.clock import wall_clock_ms
    from penstock.tube.reader import RangeReader

    client = login.client()
    for s in standings:
        offset = s.first if s.offset is None else max(s.offset, s.first)
        messages = max(0, s.end - offset) // ENTRY
        bytes_behind = s.bytes_behind
        seconds: float | None = None if messages else 0.0
        if messages:
            try:
                with RangeReader(*s.broker.address(tls=login.over_tls), **client) as source:
                    _, messages = source.plan(s.topic, s.partition, offset, s.end, MOST)
                    oldest = source.first(s.topic, s.partition, offset, s.end) if messages else None
                seconds = 0.0 if oldest is None else max(0.0, round((wall_clock_ms() - oldest[1]) / 1000, 1))
            except RefusedError as error:
                if error.code == UNKNOWN_USER:
                    raise
                # Not one of ours: the store's messages are all that is known.
            except PenstockError as error:
                note(f"{s.key}: {error}")
        yield {**_place(s), "messages": messages, "bytes": bytes_behind if messages else 0, "seconds": seconds}
