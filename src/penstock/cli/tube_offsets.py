"""`penstock tube offsets` and `lag`: where groups stand, how far behind, and moving them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.groups import command_group
from penstock.cli.output import Cell, note, print_table
from penstock.cli.tube_common import (
    UNKNOWN_USER,
    WEB,
    BrokerHttp,
    BrokerRow,
    Json,
    LoginOptions,
    Web,
    ask_each,
    brokers,
    logs_in,
)
from penstock.cli.tube_groups import members
from penstock.cli.tube_records import parse_time
from penstock.cli.watching import Watch, watched
from penstock.errors import ConfigError, PenstockError, RefusedError

if TYPE_CHECKING:
    from penstock.tube.reader import RangeReader

__all__ = ["ENTRY", "app", "lag"]

ENTRY = 28
"""Offsets are bytes of a store's index, so many a message; the partitions of a store share it."""
MOST = (1 << 31) - 1

app = command_group("Show where a group stands, or move it.", alone=False)
Group = Annotated[str, typer.Argument(help="The consumer group.", metavar="GROUP")]
OnlyTopic = Annotated[str | None, typer.Option(help="Only this topic.", metavar="TOPIC")]
OnlyPartition = Annotated[int | None, typer.Option(help="Only this partition of each broker.", min=0, metavar="N")]


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
    def key(self) -> str:
        return f"{self.broker.id}:{self.topic}:{self.partition}"


@app.command("show")
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
def offsets_reset(
    group: Group,
    login: LoginOptions,
    to: Annotated[
        str,
        typer.Option(
            help="earliest, latest, a time (2026-01-31T12:00, or 90s, 15m, 2h, 3d ago), +N or -N messages.",
            metavar="WHERE",
        ),
    ],
    topic: OnlyTopic = None,
    partition: OnlyPartition = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, do nothing.")] = False,
    http: Web = WEB,
    broker_http: BrokerHttp = None,
    as_json: Json = False,
) -> None:
    """Move GROUP to other positions.

    Best while no member of the group runs: what a running one has in hand is counted on top of the new position.

    Messages are those of the partition; on Apache's brokers those of its store, which its other partitions share.
    """
    from penstock.tube.client.web import call_broker

    ask = _asking(group, topic)
    told = [(broker, ask(broker)) for broker in brokers(http, broker_http)]  # each has to answer: none is left behind
    standings = _standings(group, topic, told, new=topic is not None)
    chosen = [s for s in standings if partition is None or s.partition == partition]
    if not chosen:
        raise RefusedError(
            f"group {group!r} has no such position", do="look at its positions: penstock tube offsets show"
        )
    moves = [_move(s, to, login) for s in chosen]
    if there := members(http, group):
        note(f"group {group} has members ({there}): what they have in hand is counted on top of the new positions")
    if not dry_run:
        for broker in {s.broker.id: s.broker for s, _, _ in moves}.values():
            wanted = {s.key: offset for s, offset, _ in moves if s.broker.id == broker.id}
            parameters = {
                "groupName": group,
                "modifyUser": "penstock",
                "manualSet": "true",
                "offsetJsonInfo": json.dumps(wanted, separators=(",", ":")),
            }
            call_broker(broker.web, "admin_set_offset", parameters)
    rows: list[dict[str, Cell]] = [
        {
            **_place(s),
            "from": s.offset,
            "to": offset,
            "messages": messages,
        }
        for s, offset, messages in moves
    ]
    print_table(rows, ["topic", "broker", "partition", "from", "to", "messages"], as_json=as_json)
    note("nothing was changed: --dry-run" if dry_run else f"group {group} is moved in {_partitions(len(rows))}")


@logs_in
def lag(
    group: Group,
    login: LoginOptions,
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
    """Show how far GROUP is behind: messages, bytes and seconds (how long the next message has waited).

    While watching, what cannot be asked is said on standard error and asked again.

    Penstock's brokers count a partition's own messages; of Apache's, those of the store are shown, and no seconds.
    Bytes are those of the store.
    """
    away: list[int] = []

    def look() -> list[dict[str, Cell]]:
        told = ask_each(http, broker_http, _asking(group, topic), away)
        return list(_lag_rows(_standings(group, topic, told), login))

    def show(rows: list[dict[str, Cell]]) -> None:
        _print_lag(rows, as_json=as_json)
        too_much = fail_above is not None and (away or sum(int(row["messages"] or 0) for row in rows) > fail_above)
        if too_much and watch is None:
            raise typer.Exit(1)

    watched(look, show, watch, as_json=as_json)


def _print_lag(rows: Sequence[dict[str, Cell]], *, as_json: bool) -> None:
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    columns = ["topic", "broker", "partition", "messages", "bytes", "seconds"]
    print_table([{"time": now, **row} for row in rows], columns, as_json=as_json)


class Told(NamedTuple):
    """Rows of a broker's administration: its topics, and where a group stands."""

    topics: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def _asking(group: str, topic: str | None) -> Callable[[BrokerRow], Told]:
    from penstock.tube.client.web import call_broker

    narrowed = {} if topic is None else {"topicName": topic}

    def ask(broker: BrokerRow) -> Told:
        return Told(
            call_broker(broker.web, "admin_query_pubinfo", narrowed),
            call_broker(broker.web, "admin_query_offset", {"groupName": group, **narrowed}),
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


def _move(standing: Standing, to: str, login: LoginOptions) -> tuple[Standing, int, int | None]:
    """Where the group stands in a partition, the offset that ``to`` means there, and how many messages lie between."""
    from penstock.tube.reader import RangeReader

    s = standing
    here = s.first if s.offset is None else min(max(s.offset, s.first), s.end)
    with RangeReader(*s.broker.address(tls=login.over_tls), **login.client()) as source:
        count = _counting(source, s)
        if to in {"earliest", "latest"}:
            target = s.first if to == "earliest" else s.end
        elif to[:1] in {"+", "-"} and to[1:].isdigit():
            target = _shifted(s, here, int(to), count)
        else:
            target = _at_time(source, s, parse_time(to, "--to", "earliest, latest, +N or -N (messages)"))
        if s.offset is None:
            return s, target, None
        try:
            between = count(min(here, target), max(here, target), MOST)[1]
        except PenstockError:
            return s, target, None  # the move needs no count, and may be asked for without a login
        return s, target, between if target >= here else -between


Counted = Callable[[int, int, int], tuple[int, int]]
"""(start, end, most) to (end of the longest range with at most so many messages, how many it has)."""


def _counting(source: RangeReader, standing: Standing) -> Counted:
    """Counts a partition's own messages; of a broker that cannot, those of the store."""

    def count(start: int, end: int, most: int) -> tuple[int, int]:
        if start >= end:
            return end, 0
        try:
            return source.plan(standing.topic, standing.partition, start, end, most)
        except RefusedError as error:
            if error.code == UNKNOWN_USER:
                raise
            there = min((end - start) // ENTRY, most)
            return start + there * ENTRY, there

    return count


def _shifted(standing: Standing, here: int, by: int, count: Counted) -> int:
    """The offset ``by`` messages from ``here``, within what is kept."""
    if by > 0:
        return count(here, standing.end, by)[0]
    before = count(standing.first, here, MOST)[1]
    return standing.first if -by >= before else count(standing.first, here, before + by)[0]


def _at_time(source: RangeReader, standing: Standing, time_ms: int) -> int:
    try:
        return source.offset_at(standing.topic, standing.partition, time_ms)
    except RefusedError as error:
        if error.code == UNKNOWN_USER:
            raise
        raise ConfigError(
            f"--to: broker {standing.broker.id} does not find offsets by time",
            option="--to",
            why=error.why or error.text,
            do="on Apache's broker use its own: broker.htm?method=admin_set_offset_by_time",
        ) from error


def _lag_rows(standings: Iterable[Standing], login: LoginOptions) -> Iterator[dict[str, Cell]]:
    from penstock.runtime.clock import wall_clock_ms
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
