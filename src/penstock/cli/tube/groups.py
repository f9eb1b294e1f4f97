"""`penstock tube group` and `penstock tube offset`: consumer groups, their committed offsets and their lag."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.options import Commands, DryRun, Json, Watch, Yes, confirmed, input_bytes, repeat
from penstock.cli.output import Cell, escape, note, print_json, print_table, shown_duration
from penstock.cli.tube.access import (
    UNKNOWN_USER,
    BrokerRow,
    Group,
    TubeConnectionOptions,
    complete_group,
    complete_topic,
    connects,
)
from penstock.cli.tube.offset_spec import (
    ENTRY,
    MOST,
    OFFSETS,
    LogRange,
    OffsetSpec,
    PartitionSpec,
    counter,
    parse_offset,
    parse_part,
)
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.tube.reader import RangeReader

__all__ = ["app", "offset_app"]

app = Commands("List, describe and delete consumer groups; show their lag. `tube offset reset` resets their offsets.")


@app.add("penstock tube group list", name="list")
@connects
def groups_list(tube: TubeConnectionOptions, as_json: Json = False) -> None:
    """List the consumer groups that have members or committed offsets, with their lag.

    The lag is the number of messages that the group has not read in all partitions, and the time for which the oldest
    of them has been stored; - if it is not known. `tube group lag` shows it by partition.
    """
    groups: dict[str, dict[str, Any]] = {}

    def group(name: str) -> dict[str, Any]:
        return groups.setdefault(name, {"members": 0, "topics": set(), "brokers": set()})

    for entry in tube.call("admin_query_sub_info", {}):
        found = group(entry["consumeGroup"])
        found["members"] = int(entry["consumerNum"])
        found["topics"] |= set(entry["topicSet"])
    unavailable: list[int] = []
    rows_of = tube.ask_each(_offsets_query(tube, None, None), unavailable)
    for broker, answer in rows_of:
        for entry in answer.groups:
            found = group(entry["groupName"])
            found["topics"] |= {sub["topicName"] for sub in entry["subInfo"]}
            found["brokers"].add(broker.id)
    lags = _lags(tube, rows_of, unavailable)
    rows: list[dict[str, Cell]] = []
    for name, found in sorted(groups.items()):
        lag = lags.get(name, GroupLag(None, None))
        waits: dict[str, Cell] = (
            {"lag_messages": lag.messages, "lag_s": lag.seconds}
            if as_json
            else {"lag": lag.messages, "oldest": shown_duration(lag.seconds) if lag.messages else "-"}
        )
        topics, brokers = ",".join(sorted(found["topics"])), ",".join(map(str, sorted(found["brokers"])))
        rows.append({"group": name, "members": found["members"], **waits, "topics": topics, "brokers": brokers})
    print_table(rows, ["group", "members", "lag", "oldest", "topics", "brokers"], as_json=as_json)


class GroupLag(NamedTuple):
    """Lag of a group in all partitions. ``seconds``: since the oldest unread message was stored; None: not known."""

    messages: int | None
    seconds: float | None


def _lags(
    tube: TubeConnectionOptions, rows_of: Sequence[tuple[BrokerRow, AdminRows]], unavailable: Sequence[int]
) -> dict[str, GroupLag]:
    """Return the lag of each group with committed offsets; none if this user may not read the brokers' records."""
    found: dict[str, GroupLag] = {}
    try:
        with tube.readers() as reader:
            for name in _groups(rows_of):
                if not any(_offsets(answer.groups, name) for _, answer in rows_of):
                    continue
                rows = list(_lag_rows(_group_offsets(name, None, rows_of, unavailable), reader))
                seconds = [None if row["seconds"] is None else float(row["seconds"]) for row in rows]
                known = [each for each in seconds if each is not None]
                found[name] = GroupLag(
                    sum(int(row["messages"] or 0) for row in rows), max(known) if len(known) == len(rows) else None
                )
    except RefusedError as error:
        note(f"the lag is not shown: {error.what}: {error.why}" if error.why else f"the lag is not shown: {error.what}")
    return found


@app.add("penstock tube group describe lake", name="describe")
@connects
def groups_describe(group: Group, tube: TubeConnectionOptions, as_json: Json = False) -> None:
    """Show the members of GROUP and the partitions that are assigned to each."""
    rows: list[dict[str, Cell]] = []
    for member in tube.call("admin_query_consume_group_detail", {"consumeGroup": group}):
        parts: list[dict[str, Any]] = member.get("parInfo") or [{}]
        for part in parts:
            address = part.get("brokerAddr")
            rows.append(
                {
                    "member": member["consumerId"],
                    "topic": part.get("topicName"),
                    "broker": None if address is None else int(str(address).partition(":")[0]),
                    "partition": part.get("partId"),
                }
            )
    rows.sort(key=lambda row: (str(row["topic"]), row["broker"] or 0, row["partition"] or 0))
    if not rows and not _is_known(tube, group):
        raise RefusedError(
            f"group {group!r} does not exist",
            why="it has no members and no committed offsets",
            hint="list the groups: penstock tube group list",
        )
    print_table(rows, ["topic", "broker", "partition", "member"], as_json=as_json)
    if not rows:
        note(f"group {escape(group)} has no members; its offsets: penstock tube offset list {escape(group)}")


def _is_known(tube: TubeConnectionOptions, group: str) -> bool:
    """Return True if a broker has committed offsets of ``group``."""
    wanted = {"groupName": group}
    asked = tube.ask_each(lambda broker: tube.call_broker(broker.web, "admin_query_offset", wanted))
    return any(_offsets(rows, group) for _, rows in asked)


@app.add("penstock tube group delete lake", "penstock tube group delete lake --topic telemetry --yes", name="delete")
@connects
def groups_delete(
    group: Group,
    tube: TubeConnectionOptions,
    topic: Annotated[
        str | None,
        typer.Option(help="Only its offsets in this topic.", metavar="TOPIC", autocompletion=complete_topic),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete the committed offsets of GROUP, which must have no members. It then starts like a new group."""
    if there := tube.members(group):
        raise RefusedError(
            f"group {group!r} has {there} member{'s' if there > 1 else ''}",
            hint=f"stop them first; list them: penstock tube group describe {group}",
        )
    wanted = {"groupName": group} | ({} if topic is None else {"topicName": topic})
    known = tube.brokers()  # all must respond: no broker may keep its offsets
    committed = [
        (broker, _offsets(tube.call_broker(broker.web, "admin_query_offset", wanted), group)) for broker in known
    ]
    offsets = sum(count for _, count in committed)
    if not offsets:
        raise RefusedError(
            f"group {group!r} has no committed offsets", hint="list the groups: penstock tube group list"
        )
    if not (yes or confirmed(f"Delete {_committed(offsets)} of group {group}?")):
        note(f"group {escape(group)} was not deleted")
        raise typer.Exit(1)
    for broker, count in committed:
        if count:
            tube.call_broker(broker.web, "admin_rmv_offset", {**wanted, "modifyUser": "penstock"})
    if as_json:
        print_json({"group": group, "offsets": offsets})
    else:
        note(f"group {escape(group)} was deleted: {_committed(offsets)}")


def _committed(count: int) -> str:
    return "1 committed offset" if count == 1 else f"{count} committed offsets"


def _offsets(rows: list[dict[str, Any]], group: str) -> int:
    return sum(len(sub["offsets"]) for row in rows if row["groupName"] == group for sub in row["subInfo"])


# --- committed offsets ---


offset_app = Commands("List and reset the committed offsets of consumer groups.")
OnlyTopic = Annotated[str | None, typer.Option(help="Only this topic.", metavar="TOPIC", autocompletion=complete_topic)]
OnlyPartitions = Annotated[
    list[str] | None,
    typer.Option(help="Only this partition, of each broker or of one; repeatable.", metavar="[BROKER:]N"),
]


class PartitionOffsets(NamedTuple):
    """The committed offset of a group in one partition, and the range of stored offsets; None: not known."""

    broker: BrokerRow
    topic: str
    partition: int
    offset: int | None
    first: int
    end: int
    bytes_behind: int | None

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, broker id and partition: the key of stored offsets."""
        return self.topic, self.broker.id, self.partition

    @property
    def key(self) -> str:
        """The partition as text, ``BROKER:TOPIC:PARTITION``."""
        return f"{self.broker.id}:{self.topic}:{self.partition}"


@offset_app.add("penstock tube offset list lake", "penstock tube offset list lake --json > offsets.json", name="list")
@connects
def offsets_list(group: Group, tube: TubeConnectionOptions, topic: OnlyTopic = None, as_json: Json = False) -> None:
    """List the committed offset of GROUP in every partition, with the first and end offset that are stored."""
    unavailable: list[int] = []
    rows_of = tube.ask_each(_offsets_query(tube, group, topic), unavailable)
    rows: list[dict[str, Cell]] = [
        {**_place(s), "offset": s.offset, "first": s.first, "end": s.end}
        for s in _group_offsets(group, topic, rows_of, unavailable)
    ]
    print_table(rows, ["topic", "broker", "partition", "offset", "first", "end"], as_json=as_json)


@offset_app.add(
    "penstock tube offset reset lake --to earliest --dry-run",
    "penstock tube offset reset lake --to 2h --topic telemetry",
    "penstock tube offset reset lake --file offsets.json",
    name="reset",
)
@connects
def offsets_reset(
    group: Group,
    tube: TubeConnectionOptions,
    to: Annotated[
        str | None,
        typer.Option(help=f"{OFFSETS}. +N and -N count from the committed offset.", metavar="OFFSET"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Offsets as printed by `tube offset list --json`, of this or another group; - for standard input.",
            metavar="FILE",
        ),
    ] = None,
    topic: OnlyTopic = None,
    partition: OnlyPartitions = None,
    dry_run: DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also reset a group with the name of a pipeline or Spark query.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Reset the committed offsets of GROUP.

    Stop its members first: messages that a running member has fetched are added to the new offset.

    Groups of pipelines and Spark queries are refused: these only publish their offsets, and continue from their
    checkpoints.

    The number of messages is that of the partition; with Apache's brokers that of its store, which other partitions
    share.
    """
    if (to is None) == (file is None):
        raise ConfigError("tube offset reset: no target", option="--to", hint="set one of --to OFFSET and --file FILE")
    where = None if to is None else parse_offset(to, "--to")
    saved = {} if file is None else _saved(file)
    parts = [parse_part(text) for text in partition or ()]
    ask = _offsets_query(tube, group, topic)
    rows_of = [(broker, ask(broker)) for broker in tube.brokers()]  # all must respond: no broker may keep its offsets
    offsets = _group_offsets(group, topic, rows_of, (), new=topic is not None or bool(saved))
    targets = [(s, where or saved.get(s.place)) for s in offsets if _chosen(s, parts)]
    with tube.readers() as reader:
        moves = [_move(s, target, reader(s.broker)) for s, target in targets if target is not None]
    absent = saved.keys() - {s.place for s in offsets} if topic is None else ()
    if not moves or absent:
        name = "" if not absent else " {1}:{2} of {0}".format(*min(absent))
        raise RefusedError(
            f"group {group!r} has no committed offset in partition{name}"
            if absent
            else f"group {group!r} has no committed offset in the selected partitions",
            hint=f"list its offsets: penstock tube offset list {group}; --topic also resets partitions without one",
        )
    there = tube.members(group)
    if not there and not force:
        _refuse_query(group)
    if there:
        note(f"group {group} has members ({there}): messages that they have fetched are added to the new offsets")
    if not dry_run:
        _set(tube, group, moves)
    rows: list[dict[str, Cell]] = [
        {**_place(s), "from": s.offset, "to": offset, "messages": messages} for s, offset, messages in moves
    ]
    print_table(rows, ["topic", "broker", "partition", "from", "to", "messages"], as_json=as_json)
    counts = [messages for *_, messages in moves if messages is not None]
    effects = [
        f"{count} {'message' if count == 1 else 'messages'} {effect}"
        for count, effect in (
            (-sum(min(n, 0) for n in counts), "read again"),
            (sum(max(n, 0) for n in counts), "skipped"),
        )
        if count
    ]
    done = "nothing was changed: --dry-run" if dry_run else f"group {group} was reset in {_partitions(len(rows))}"
    note(f"{done}; {', '.join(effects)}" if effects else done)


def _refuse_query(group: str) -> None:
    """Raise RefusedError if ``group`` has the name of a group of pipelines or Spark queries."""
    from penstock.tube.codec.strings import query_of_group

    who = query_of_group(group)
    if who is None:
        return
    if who == "a pipeline":
        hint = "to process records again: penstock pipeline run FILE --from OFFSET [--to OFFSET] --into DIRECTORY"
    else:
        hint = "give the query a new checkpointLocation, and startingOffsets"
    raise RefusedError(
        f"group {group!r} belongs to {who} and was not reset",
        why="it continues from its checkpoint; the offsets of the group are published for information",
        hint=f"{hint}; --force if consumers use this name",
    )


def _chosen(offset: PartitionOffsets, parts: Sequence[PartitionSpec]) -> bool:
    return not parts or any(part.matches(offset.broker.id, offset.partition) for part in parts)


def _saved(file: Path) -> dict[tuple[str, int, int], OffsetSpec]:
    """Read offsets from a file, by topic, broker and partition. Raises ConfigError."""
    found = {}
    for number, line in enumerate(input_bytes("tube offset reset", "OFFSET", None, file).splitlines(), start=1):
        try:
            row = json.loads(line)
            place = str(row["topic"]), int(row["broker"]), int(row["partition"])
            if row["offset"] is not None:
                found[place] = parse_offset(str(int(row["offset"])), "--file")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"--file: line {number} of {file} is not an offset",
                option="--file",
                why=f"field {error} is missing" if isinstance(error, KeyError) else str(error),
                hint="create the file with: penstock tube offset list GROUP --json",
            ) from error
    if not found:
        raise ConfigError(
            f"--file: {file} has no offsets",
            option="--file",
            hint="create the file with: penstock tube offset list GROUP --json",
        )
    return found


def _set(tube: TubeConnectionOptions, group: str, moves: Sequence[tuple[PartitionOffsets, int, int | None]]) -> None:
    for broker in {s.broker.id: s.broker for s, _, _ in moves}.values():
        wanted = {s.key: offset for s, offset, _ in moves if s.broker.id == broker.id}
        parameters = {
            "groupName": group,
            "modifyUser": "penstock",
            "manualSet": "true",
            "offsetJsonInfo": json.dumps(wanted, separators=(",", ":")),
        }
        tube.call_broker(broker.web, "admin_set_offset", parameters)


@app.add("penstock tube group lag", "penstock tube group lag lake --watch 5s --fail-above 1000", name="lag")
@connects
def lag(
    tube: TubeConnectionOptions,
    group: Annotated[
        str | None,
        typer.Argument(help="Consumer group. Default: all.", metavar="[GROUP]", autocompletion=complete_group),
    ] = None,
    topic: OnlyTopic = None,
    watch: Watch = None,
    fail_above: Annotated[
        int | None,
        typer.Option(
            help="Exit with 1 if the total lag exceeds N messages, or a broker is unavailable.", min=0, metavar="N"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the lag of GROUP, or of each group: messages, bytes, and seconds since the next message was stored.

    With Apache's brokers the messages are those of the store, and seconds are not known. Bytes are those of the store.
    """
    unavailable: list[int] = []

    def look() -> list[dict[str, Cell]]:
        unavailable.clear()
        rows_of = tube.ask_each(_offsets_query(tube, group, topic), unavailable)
        names = _groups(rows_of) if group is None else [group]
        with tube.readers() as reader:
            return [
                {"group": name, **row}
                for name in names
                for row in _lag_rows(_group_offsets(name, topic, rows_of, unavailable), reader)
            ]

    def show(rows: list[dict[str, Cell]]) -> None:
        _print_lag(rows, many=group is None, as_json=as_json)
        if not as_json and watch is None:
            behind = {str(row["group"]) for row in rows if row["messages"]}
            for name in _without_members(tube, behind):
                note(f"group {escape(name)} has no members: its lag grows until a consumer joins it")
            if pipelines := sorted(name for name in behind if name.startswith("pipeline-")):
                note(
                    f"{escape(', '.join(pipelines))}: of pipelines, which may have stopped, failed or be slow: "
                    "penstock pipeline status FILE"
                )
        too_much = fail_above is not None and (
            unavailable or sum(int(row["messages"] or 0) for row in rows) > fail_above
        )
        if too_much and watch is None:
            raise typer.Exit(1)

    repeat(look, show, watch, as_json=as_json)


def _without_members(tube: TubeConnectionOptions, groups: Collection[str]) -> list[str]:
    """Return those of ``groups`` without a consumer; not groups of pipelines and queries, which never have one."""
    from penstock.tube.codec.strings import query_of_group

    if not groups:
        return []
    active = {row["consumeGroup"] for row in tube.call("admin_query_sub_info", {}) if int(row["consumerNum"])}
    return sorted(name for name in groups if name not in active and query_of_group(name) is None)


def _print_lag(rows: Sequence[dict[str, Cell]], *, many: bool, as_json: bool) -> None:
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    shown: list[dict[str, Cell]] = [{"time": now, **row} for row in rows]
    if len(rows) > 1 and not as_json:  # no sum of bytes: they are bytes of stores, which partitions share
        waits = [float(row["seconds"]) for row in rows if row["seconds"] is not None]
        messages = sum(int(row["messages"] or 0) for row in rows)
        name = "group" if many else "topic"
        shown.append({name: "(all)", "messages": messages, "seconds": max(waits, default=None)})
    columns = ["topic", "broker", "partition", "messages", "bytes", "seconds"]
    print_table(shown, ["group", *columns] if many else columns, as_json=as_json)


class AdminRows(NamedTuple):
    """Rows of a broker's administration: its topics, and the committed offsets of groups."""

    topics: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def _groups(rows_of: Iterable[tuple[BrokerRow, AdminRows]]) -> list[str]:
    """Return the groups that have committed offsets."""
    return sorted({entry["groupName"] for _, rows in rows_of for entry in rows.groups if entry["subInfo"]})


def _offsets_query(
    tube: TubeConnectionOptions, group: str | None, topic: str | None
) -> Callable[[BrokerRow], AdminRows]:
    narrowed = {} if topic is None else {"topicName": topic}
    named = {} if group is None else {"groupName": group}

    def ask(broker: BrokerRow) -> AdminRows:
        # In this order: an offset of a moment later could be beyond the end of the partition.
        offsets = tube.call_broker(broker.web, "admin_query_offset", {**named, **narrowed})
        return AdminRows(tube.call_broker(broker.web, "admin_query_pubinfo", narrowed), offsets)

    return ask


def _group_offsets(
    group: str,
    topic: str | None,
    rows_of: Iterable[tuple[BrokerRow, AdminRows]],
    unavailable: Sequence[int],
    *,
    new: bool = False,
) -> list[PartitionOffsets]:
    """Return the offsets of ``group`` by topic, broker and partition; ``new``: also for partitions without a committed
    offset.

    ``unavailable``: ids of brokers without rows, which may have the offsets.

    Raises:
        RefusedError: no broker has the topic, or committed offsets of the group.
        UnavailableError: as for RefusedError, but not all brokers respond.
    """
    found: list[PartitionOffsets] = []
    topics: set[str] = set()
    for broker, rows in rows_of:
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
            found.append(PartitionOffsets(broker, place[0], place[1], offset, first, end, behind))
    if not found and unavailable:
        ids = ", ".join(map(str, sorted(unavailable)))
        many = len(unavailable) > 1
        raise UnavailableError(
            f"the offsets and the lag of group {group!r} are not known",
            applied=False,
            why=f"brokers {ids} do not respond" if many else f"broker {ids} does not respond",
            hint="start them" if many else "start it",
        )
    if not found and topic is not None and topic not in topics:
        raise RefusedError(
            f"no broker has topic {topic!r}", hint="correct the name; list the topics: penstock tube topic list"
        )
    if not found:
        raise RefusedError(
            f"group {group!r} has no committed offsets" + (f" in topic {topic!r}" if topic else ""),
            hint="list the groups: penstock tube group list; Apache's brokers report a new one after some seconds",
        )
    return sorted(found, key=lambda s: (s.topic, s.broker.id, s.partition))


def _partitions(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _place(offset: PartitionOffsets) -> dict[str, Cell]:
    return {"topic": offset.topic, "broker": offset.broker.id, "partition": offset.partition}


def _move(offset: PartitionOffsets, where: OffsetSpec, source: RangeReader) -> tuple[PartitionOffsets, int, int | None]:
    """Return the current offset, the target offset in this partition, and the number of messages between them."""
    s = offset
    here = s.first if s.offset is None else min(max(s.offset, s.first), s.end)
    log = LogRange(source, s.broker.id, s.topic, s.partition, s.first, s.end)
    target = where.offset(log, here)
    if s.offset is None:
        return s, target, None
    try:
        between = counter(log)(min(here, target), max(here, target), MOST)[1]
    except PenstockError:
        return s, target, None  # the count is optional, and requires credentials that a reset does not
    return s, target, between if target >= here else -between


def _lag_rows(
    offsets: Iterable[PartitionOffsets], reader: Callable[[BrokerRow], RangeReader]
) -> Iterator[dict[str, Cell]]:
    from penstock.runtime.io.clock import wall_clock_ms

    for s in offsets:
        offset = s.first if s.offset is None else max(s.offset, s.first)
        messages = max(0, s.end - offset) // ENTRY
        bytes_behind = s.bytes_behind
        seconds: float | None = None if messages else 0.0
        if messages:
            try:
                source = reader(s.broker)
                _, messages = source.plan(s.topic, s.partition, offset, s.end, MOST)
                oldest = source.first(s.topic, s.partition, offset, s.end) if messages else None
                seconds = 0.0 if oldest is None else max(0.0, round((wall_clock_ms() - oldest[1]) / 1000, 1))
            except RefusedError as error:
                if error.code == UNKNOWN_USER:
                    raise
                # Apache's broker: only the number of messages of the store is known.
            except PenstockError as error:
                note(f"{s.key}: {error}")
        yield {**_place(s), "messages": messages, "bytes": bytes_behind if messages else 0, "seconds": seconds}
