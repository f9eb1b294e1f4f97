"""`penstock tube consume`: records out."""

from __future__ import annotations

import contextlib
import heapq
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import bytes_fields, escape, note, print_json, print_raw, shown
from penstock.cli.record_reader import LENGTH
from penstock.cli.tube.access import (
    MASTER,
    NOT_DEPLOYED,
    WEB,
    BrokerHttp,
    Json,
    LoginOptions,
    Master,
    Topic,
    Web,
    announced,
    brokers,
    call_broker,
    complete_group,
    logs_in,
    no_topic,
    partitions,
    run_client,
)
from penstock.cli.tube.offsets import WHERE, Log, Part, Where, parse_part, parse_where, pick
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.runtime.io.credentials import ClientOptions
    from penstock.tube.reader import PartitionInfo, RangeReader
    from penstock.tube.record import Record

__all__ = ["consume"]

IDLE_S = 2.0
"""How long a group that does not follow waits for another record before it ends."""
ASSIGNED_S = 75.0
"""How long it waits for its first partition: Apache's master gives them out once a minute."""
HEARTBEAT_S = 1.0
"""What it is given comes with a heartbeat."""
LOOK_S = 0.02
ANSWER_S = 5.0
"""A broker that does not answer for so long is left out."""


class Format(StrEnum):
    """How values stand in a stream of bytes: each on a line, or each behind its length (4 bytes, big-endian)."""

    LINES = "lines"
    LENGTH = "length"


@logs_in
def consume(
    topic: Topic,
    login: LoginOptions,
    group: Annotated[
        str | None,
        typer.Option(
            help="Consumer group: its position is kept, its members share the partitions.",
            metavar="NAME",
            autocompletion=complete_group,
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help=f"Where to begin: {WHERE}. -N: the last N of each partition. With --group earliest or latest; "
            "a group that has a position goes on there.",
            metavar="WHERE",
        ),
    ] = "earliest",
    until: Annotated[
        str | None,
        typer.Option(
            help="Where to end (without --group and --follow), written as --from is; what is there is not shown.",
            metavar="WHERE",
        ),
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this partition (without --group), of each broker or of one; may be repeated.",
            metavar="[BROKER:]N",
        ),
    ] = None,
    msg_filter: Annotated[
        list[str] | None, typer.Option("--filter", help="Only this $msgType$; may be repeated.", metavar="TEXT")
    ] = None,
    count: Annotated[int | None, typer.Option(help="End after so many records.", min=1, metavar="N")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Only the values, byte for byte, a line end after each.")] = False,
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="With --raw: lines, or length: 4 bytes (big-endian) before each value.", metavar="WORD"
        ),
    ] = Format.LINES,
    key_separator: Annotated[
        str | None, typer.Option(help="With --raw: the key and this text before each value.", metavar="TEXT")
    ] = None,
    tube_master: Master = MASTER,
    http: Web = WEB,
    broker_http: BrokerHttp = None,
    as_json: Json = False,
) -> None:
    """Print the records of TOPIC.

    Without --group and --follow: what the log holds now, in the order of arrival; where a broker does not answer, what
    the others hold, and exit status 1. With one of them: as a member of a consumer group (one of its own, if none is
    named, which is forgotten at the end), which confirms what was printed.

    Apache's brokers are read as a group in any case; they begin at earliest, at latest, or at an offset.
    """
    wanted = Wanted(
        tube_master,
        topic,
        parse_where(start, "--from"),
        None if until is None else parse_where(until, "--until"),
        tuple(parse_part(text) for text in partition or ()),
        tuple(sorted(set(msg_filter or ()))),
        count,
        login.client(),
    )
    _check(wanted, group, follow=follow)
    show = _Show(raw=raw, as_json=as_json, form=form, separator=key_separator)
    with contextlib.suppress(KeyboardInterrupt):
        if group is None and not follow and _show_held(wanted, show):
            return
        from penstock.tube.reader import TopicUnavailableError

        # A group may be accepted where producers are not, and it waits for brokers that have not registered yet.
        with contextlib.suppress(RefusedError, TopicUnavailableError):
            partitions(tube_master, topic, wanted.client)  # reports best that no master answers
        name = group or f"penstock_cli_{secrets.token_hex(6)}"
        try:
            run_client(_consume(wanted, name, show, follow=follow))
        except RefusedError as error:
            raise (no_topic(tube_master, topic) if error.code == NOT_DEPLOYED else error) from None
        finally:
            if group is None and (http != WEB or tube_master == MASTER):
                # Beside a master elsewhere the default names this machine, where something else may listen.
                _forget(name, http, broker_http)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a topic is to be shown."""

    masters: str
    topic: str
    start: Where
    until: Where | None
    parts: tuple[Part, ...]
    types: tuple[str, ...]
    count: int | None
    client: ClientOptions

    def places(self) -> list[PartitionInfo]:
        """The partitions that are meant. Raises RefusedError: there is no such topic, or partition."""
        infos = announced(self.masters, self.topic, self.client)
        chosen = pick(self.parts, self.topic, ((info.broker_id, info.partition) for info in infos))
        return [info for info in infos if (info.broker_id, info.partition) in chosen]


def _check(wanted: Wanted, group: str | None, *, follow: bool) -> None:
    """Raise ConfigError where options do not go together."""
    if group is not None and wanted.start.word is None:
        raise ConfigError(
            "--from: with --group it is earliest or latest", do="move the group: penstock tube offsets reset"
        )
    if group is not None and wanted.parts:
        raise ConfigError("--partition goes without --group", why="a group's partitions are shared out by the master")
    if wanted.until is not None and (group is not None or follow):
        raise ConfigError("--until goes without --group and --follow", do="end it after so many records: --count")


def _show_held(wanted: Wanted, show: _Show) -> bool:
    """Show what the log holds now; False: its brokers serve groups only.

    Raises:
        Exit: some broker did not answer.
    """
    from penstock.tube.reader import NO_RANGES

    away: dict[int, UnavailableError] = {}
    rows = _held(wanted, away) if wanted.start.word != "latest" else iter(())
    chosen = (row for row in rows if not wanted.types or row["msg_type"] in wanted.types)
    shown = 0
    try:
        for row in chosen:
            show(row)
            shown += 1
            if shown == wanted.count:
                break
    except RefusedError as error:
        if error.code != NO_RANGES or shown or wanted.until is not None:
            raise
        return False
    if away:
        raise typer.Exit(1)
    return True


def _offsets(wanted: Wanted) -> dict[str, int] | None:
    """Offsets to begin at, by partition key, where no word says it."""
    from penstock.tube.reader import NO_RANGES, RangeReader

    if wanted.start.word is not None:
        return None
    found = {}
    for info in wanted.places():
        if wanted.start.exact is not None:
            found[_key(info, wanted.topic)] = wanted.start.exact  # also for brokers that are not asked without a group
            continue
        try:
            with RangeReader(info.host, info.port, timeout_s=ANSWER_S, **wanted.client) as source:
                found[_key(info, wanted.topic)] = wanted.start.offset(_log(source, info, wanted.topic))
        except RefusedError as error:
            if error.code != NO_RANGES:
                raise
            raise ConfigError(
                f"--from: broker {info.broker_id} does not tell where {wanted.start.text} is",
                option="--from",
                why=error.why,
                do="write earliest, latest or an offset (penstock tube topics describe shows which there are)",
            ) from error
    return found


def _key(info: PartitionInfo, topic: str) -> str:
    return f"{info.broker_id}:{topic}:{info.partition}"


def _log(source: RangeReader, info: PartitionInfo, topic: str) -> Log:
    return Log(source, info.broker_id, topic, info.partition, *source.bounds(topic, info.partition))


def _forget(group: str, http: str, broker_http: str | None) -> None:
    """Have the brokers forget a group that nobody can name again. Where they cannot be asked, it stays listed."""
    with contextlib.suppress(PenstockError):
        for broker in brokers(http, broker_http):
            call_broker(broker.web, "admin_rmv_offset", {"groupName": group, "modifyUser": "penstock"})


def _held(wanted: Wanted, away: dict[int, UnavailableError]) -> Iterator[dict[str, Any]]:
    """What the log holds now, merged over the partitions by the time of arrival.

    A broker that does not answer is told of, noted in ``away`` and left out, unless there is no other.
    """
    from penstock.tube.reader import RangeReader
    from penstock.tube.record import Record

    topic, infos = wanted.topic, wanted.places()
    holders = {info.broker_id for info in infos}

    def of_partition(info: PartitionInfo) -> Iterator[dict[str, Any]]:
        if info.broker_id in away:
            return
        try:
            yield from held(info)
        except UnavailableError as error:
            if info.broker_id in away:
                return
            away[info.broker_id] = error
            if len(away) == len(holders):
                raise
            left_out = [other.partition for other in infos if other.broker_id == info.broker_id]
            which = f"partition{'s' if len(left_out) > 1 else ''} {', '.join(map(str, left_out))}"
            where, why = f"{info.host}:{info.port}", error.why or error.what
            note(f"broker {info.broker_id} at {where} does not answer ({why}): {which} of {escape(topic)} left out")

    def held(info: PartitionInfo) -> Iterator[dict[str, Any]]:
        with RangeReader(info.host, info.port, timeout_s=ANSWER_S, **wanted.client) as source:
            log = _log(source, info, topic)
            end = log.end if wanted.until is None else wanted.until.offset(log)
            for batch in source.read(topic, info.partition, wanted.start.offset(log), end):
                columns = (batch.offsets, batch.append_times, batch.flags, batch.payloads)
                for offset, time_ms, flag, data in zip(*columns, strict=True):
                    record = Record.decode(data, int(flag))
                    yield _fields(topic, info.broker_id, info.partition, int(offset), int(time_ms), record)

    return heapq.merge(*map(of_partition, infos), key=lambda row: row["append_time_ms"])


async def _consume(wanted: Wanted, group: str, show: _Show, *, follow: bool) -> None:
    import asyncio

    from penstock.tube.consumer import Consumer

    seen = 0
    options: dict[str, Any] = {"filters": list(wanted.types)} if wanted.types else {}
    options |= {"heartbeat_s": HEARTBEAT_S, "start": wanted.start.word or "earliest"}
    if (offsets := _offsets(wanted)) is not None:
        options["start_offsets"] = offsets
    if wanted.parts:
        options["balance"] = "client"
    member = Consumer(wanted.masters, group, [wanted.topic], with_offsets=True, **options, **wanted.client)
    if wanted.parts:
        await member.assign(_key(info, wanted.topic) for info in wanted.places())
    async with member as consumer:
        note(f"consuming {escape(wanted.topic)} as group {escape(group)}" + (", Ctrl-C ends" if follow else ""))
        try:
            async for m in _until_idle(consumer, follow=follow):
                show(_fields(m.topic, m.broker_id, m.partition, m.offset, m.append_time_ms, m.record))
                seen += 1
                if seen == wanted.count:
                    break
        except asyncio.CancelledError:
            # Ctrl-C: what was printed is confirmed all the same.
            await consumer.confirm()
            raise
        await consumer.confirm()


async def _until_idle(consumer: Any, *, follow: bool) -> AsyncIterator[Any]:
    import asyncio

    if not follow:
        await _assigned(consumer)
    messages = aiter(consumer)
    while True:
        try:
            yield await asyncio.wait_for(anext(messages), None if follow else IDLE_S)
        except (TimeoutError, StopAsyncIteration):
            return


async def _assigned(consumer: Any) -> None:
    """Return when the master has given it a partition: before that, that nothing comes means nothing."""
    import asyncio

    begun = time.monotonic()
    told = False
    while not consumer.assignment:
        waited = time.monotonic() - begun
        if waited > ASSIGNED_S:
            raise UnavailableError(
                f"the group got no partition within {ASSIGNED_S:g} s",
                applied=False,
                why="its other members have them all, or no broker serves the topic",
                do="look at them: penstock tube groups, penstock tube topics describe",
            )
        if waited > IDLE_S and not told:
            told = True
            note("waiting for the master to give out partitions")
        await asyncio.sleep(LOOK_S)


def _fields(
    topic: str, broker_id: int, partition: int, offset: int | None, time_ms: int | None, record: Record
) -> dict[str, Any]:
    """One record as the JSON line shows it; ``_record`` is for the other forms."""
    return {
        "topic": topic,
        "broker_id": broker_id,
        "partition": partition,
        "offset": offset,
        "append_time_ms": time_ms,
        **bytes_fields("key", record.key),
        **bytes_fields("value", record.value),
        "headers": [[name, value if isinstance(value, str) else shown(value)] for name, value in record.headers],
        "mqtt_topic": record.topic,
        "content_type": record.content_type,
        "event_time_ms": record.event_time_ms,
        "id": record.id,
        "msg_type": record.msg_type,
        "_record": record,
    }


class _Show:
    """Prints one row in the form that was asked for."""

    def __init__(self, *, raw: bool, as_json: bool, form: Format, separator: str | None) -> None:
        self._raw = raw
        self._as_json = as_json
        self._form = form
        self._separator = None if separator is None else separator.encode()

    def __call__(self, row: dict[str, Any]) -> None:
        record: Record = row.pop("_record")
        if self._as_json:
            print_json(row)
        elif self._raw:
            value = record.value
            if self._separator is not None and record.key is not None:
                value = record.key + self._separator + value
            print_raw(LENGTH.pack(len(value)) + value if self._form is Format.LENGTH else value + b"\n")
        else:
            key = "-" if record.key is None else shown(record.key)
            sys.stdout.write(f"{row['broker_id']}:{row['partition']}  {key}  {shown(record.value)}\n")
            sys.stdout.flush()
