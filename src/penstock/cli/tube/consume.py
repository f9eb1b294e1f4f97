"""`penstock tube consume`: print the records of a topic."""

from __future__ import annotations

import contextlib
import heapq
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Json
from penstock.cli.output import bytes_fields, escape, note, print_json, print_raw, shown, shown_payload
from penstock.cli.record_reader import LENGTH
from penstock.cli.tube.access import (
    NOT_DEPLOYED,
    Topic,
    TubeConnectionOptions,
    announced,
    complete_group,
    connects,
    no_topic,
    partitions,
    run_client,
)
from penstock.cli.tube.offset_spec import OFFSETS, LogRange, OffsetSpec, PartitionSpec, parse_offset, parse_part, pick
from penstock.errors import ConfigError, PenstockError, RefusedError, RemoteProtocolError, UnavailableError

if TYPE_CHECKING:
    from penstock.runtime.io.tls import ClientOptions
    from penstock.tube.reader import PartitionInfo, RangeReader
    from penstock.tube.record import Record

__all__ = ["ConsumeRequest", "consume", "newest_records", "place_of", "print_record", "stored_records"]

IDLE_S = 2.0
"""Seconds without a record after which a group without --follow ends."""
ASSIGNED_S = 75.0
"""Time limit in seconds for the first partition: Apache's master assigns partitions once a minute."""
HEARTBEAT_S = 1.0
"""Interval of heartbeats in seconds; assignments arrive with their responses."""
POLL_S = 0.02
REQUEST_S = 5.0
"""Timeout in seconds of requests to a broker without a group."""


class RawFormat(StrEnum):
    """Format of raw output: lines, or values with a length prefix (4 bytes, big-endian)."""

    LINES = "lines"
    LENGTH = "length"


@connects
def consume(
    topic: Topic,
    tube: TubeConnectionOptions,
    group: Annotated[
        str | None,
        typer.Option(
            help="Consume as a member of this group: its offsets are committed, its members share the partitions.",
            metavar="NAME",
            autocompletion=complete_group,
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help=f"First offset: {OFFSETS}. -N: the last N of each partition. With --group: earliest or latest, for a "
            "group without committed offsets.",
            metavar="OFFSET",
        ),
    ] = "earliest",
    until: Annotated[
        str | None,
        typer.Option(
            help="Stop before this offset, written like --from (without --group and --follow).",
            metavar="OFFSET",
        ),
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this partition, of each broker or of one (without --group); repeatable.",
            metavar="[BROKER:]N",
        ),
    ] = None,
    msg_type: Annotated[
        list[str] | None, typer.Option(help="Only this message type ($msgType$); repeatable.", metavar="TEXT")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-c", help="Exit after N records.", min=1, metavar="N")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new records until interrupted (Ctrl-C).")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the values only, unchanged, each with a line end.")] = False,
    form: Annotated[
        RawFormat,
        typer.Option(
            "--format", help="With --raw: lines, or length: 4 bytes (big-endian) before each value.", metavar="WORD"
        ),
    ] = RawFormat.LINES,
    key_separator: Annotated[
        str | None, typer.Option(help="With --raw: print the key and this separator before each value.", metavar="TEXT")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the records of TOPIC.

    Without --group and --follow: the records that are stored now, by time of arrival. If a broker does not respond,
    the records of the others are printed and the exit status is 1. So it is if a record is damaged, which is reported
    and left out.

    With --group or --follow: as a member of a consumer group, which commits the offsets of printed records. Without
    --group a temporary group is used and deleted at the end.

    Apache's brokers are always read as a group, from earliest, latest or an offset.
    """
    request = ConsumeRequest.of(
        tube, topic, start, until, partition, types=tuple(sorted(set(msg_type or ()))), count=count
    )
    _check(request, group, follow=follow)
    if raw and as_json:
        raise ConfigError("--raw and --json exclude each other", option="--raw", hint="use one of them")
    if not raw and (form is not RawFormat.LINES or key_separator is not None):
        option = "--format" if key_separator is None else "--key-separator"
        raise ConfigError(f"{option} is set without --raw", option=option, hint=f"add --raw, or omit {option}")
    show = _Printer(raw=raw, as_json=as_json, form=form, separator=key_separator)
    undecodable: list[str] = []
    try:
        with contextlib.suppress(KeyboardInterrupt):
            if group is None and not follow and _show_stored(request, show, undecodable):
                return
            from penstock.tube.reader import TopicUnavailableError

            # Not for groups: a group may be accepted where producers are not, and it waits for brokers that have not
            # registered yet.
            with contextlib.suppress(RefusedError, TopicUnavailableError):
                partitions(tube.tube_master, topic, request.client)  # raises the best error if no master responds
            name = group or f"penstock_cli_{secrets.token_hex(6)}"
            try:
                run_client(_consume(request, name, show, undecodable, follow=follow))
            except RefusedError as error:
                if error.code != NOT_DEPLOYED:
                    raise
                raise no_topic(tube.tube_master, topic, known=tube.topics()) from None
            finally:
                if group is None and tube.http:
                    _forget(name, tube)
            if undecodable:
                raise typer.Exit(1)
    finally:
        if undecodable:
            note_undecodable(undecodable)


def note_undecodable(places: Sequence[str]) -> None:
    """Report the records at ``places``, which cannot be decoded."""
    note(f"{len(places):,} left out that cannot be decoded, the first: {places[0]}")


def newest_records(
    masters: str, topic: str, client: ClientOptions, count: int, undecodable: list[str]
) -> Iterator[tuple[str, Record]]:
    """Yield the newest ``count`` records of each partition of ``topic``, each with its place, by time of arrival.

    A broker that does not respond is reported and skipped, unless it is the only one. The places of records that cannot
    be decoded are added to ``undecodable``.

    Raises:
        RefusedError: the topic does not exist, or the brokers serve consumer groups only.
    """
    request = ConsumeRequest(masters, topic, parse_offset(f"-{count}", "--records"), None, (), (), None, client)
    for row in stored_records(request, {}, undecodable):
        yield place_of(row), row["_record"]


def place_of(row: dict[str, Any]) -> str:
    """Return the place of a row of :func:`stored_records`: BROKER:PARTITION@OFFSET."""
    return f"{row['broker_id']}:{row['partition']}@{row['offset']}"


def print_record(place: str, record: Record) -> None:
    """Print a record as a line for people: its place, key and value."""
    key = "-" if record.key is None else shown(record.key)
    sys.stdout.write(f"{place}  {key}  {shown_payload(record.value, record.content_type)}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class ConsumeRequest:
    """The records to print."""

    masters: str
    topic: str
    start: OffsetSpec
    until: OffsetSpec | None
    parts: tuple[PartitionSpec, ...]
    types: tuple[str, ...]
    count: int | None
    client: ClientOptions
    topics: Callable[[], Sequence[str]] = tuple
    """Returns the names of the topics, for the error of an unknown one."""

    @classmethod
    def of(
        cls,
        tube: TubeConnectionOptions,
        topic: str,
        start: str,
        until: str | None,
        partition: Sequence[str] | None,
        *,
        types: tuple[str, ...] = (),
        count: int | None = None,
    ) -> ConsumeRequest:
        """Parse the options of a command. Raises ConfigError if one has an invalid value."""
        return cls(
            tube.tube_master,
            topic,
            parse_offset(start, "--from"),
            None if until is None else parse_offset(until, "--until"),
            tuple(parse_part(text) for text in partition or ()),
            types,
            count,
            tube.client(),
            tube.topics,
        )

    def partitions(self) -> list[PartitionInfo]:
        """Return the selected partitions. Raises RefusedError if the topic or a partition does not exist."""
        infos = announced(self.masters, self.topic, self.client, self.topics)
        chosen = pick(self.parts, self.topic, ((info.broker_id, info.partition) for info in infos))
        return [info for info in infos if (info.broker_id, info.partition) in chosen]


def _check(request: ConsumeRequest, group: str | None, *, follow: bool) -> None:
    """Raise ConfigError for options that exclude each other."""
    if group is not None and request.start.word is None:
        raise ConfigError(
            f"--from: got {request.start.text!r}; a group starts at its committed offsets, or at earliest or latest",
            option="--from",
            hint=f"reset the offsets of the group first: penstock tube offset reset {group} --to {request.start.text}",
        )
    if group is not None and request.parts:
        raise ConfigError(
            "--partition and --group exclude each other",
            option="--partition",
            why="the master assigns the partitions of a group",
            hint="omit one of them",
        )
    if request.until is not None and (group is not None or follow):
        raise ConfigError(
            "--until excludes --group and --follow", option="--until", hint="limit the number of records: --count"
        )


def _show_stored(request: ConsumeRequest, show: _Printer, undecodable: list[str]) -> bool:
    """Print the currently stored records; returns False if the brokers serve consumer groups only.

    Raises:
        Exit: a broker did not respond, or a record is damaged.
    """
    from penstock.tube.reader import NO_RANGES

    unavailable: dict[int, UnavailableError] = {}
    # From latest, without --follow: there are no records after the end.
    rows = stored_records(request, unavailable, undecodable) if request.start.word != "latest" else iter(())
    chosen = (row for row in rows if not request.types or row["msg_type"] in request.types)
    shown = 0
    try:
        for row in chosen:
            show(row)
            shown += 1
            if shown == request.count:
                break
    except RefusedError as error:
        if error.code != NO_RANGES or shown or request.until is not None:
            raise
        return False
    if unavailable or undecodable:
        raise typer.Exit(1)
    if not shown and not request.types and request.start.time_ms is not None:
        start = datetime.fromtimestamp(request.start.time_ms / 1000).astimezone().isoformat(timespec="seconds")
        note(f"no records: --from ({start}) is later than the last record")
    return True


def _offsets(request: ConsumeRequest) -> dict[str, int] | None:
    """Return the first offsets by partition key; None for earliest and latest."""
    from penstock.tube.reader import NO_RANGES, RangeReader

    if request.start.word is not None:
        return None
    found = {}
    for info in request.partitions():
        if request.start.exact is not None:
            found[_key(info, request.topic)] = request.start.exact  # works also with brokers that serve groups only
            continue
        try:
            with RangeReader(info.host, info.port, timeout_s=REQUEST_S, **request.client) as source:
                found[_key(info, request.topic)] = request.start.offset(_log(source, info, request.topic))
        except RefusedError as error:
            if error.code != NO_RANGES:
                raise
            raise ConfigError(
                f"--from: broker {info.broker_id} cannot find the offset of {request.start.text}",
                option="--from",
                why=error.why,
                hint="write earliest, latest or an offset (penstock tube topic describe shows the stored ones)",
            ) from error
    return found


def _key(info: PartitionInfo, topic: str) -> str:
    return f"{info.broker_id}:{topic}:{info.partition}"


def _log(source: RangeReader, info: PartitionInfo, topic: str) -> LogRange:
    return LogRange(source, info.broker_id, topic, info.partition, *source.bounds(topic, info.partition))


def _forget(group: str, tube: TubeConnectionOptions) -> None:
    """Delete a group with a random name. If the brokers do not respond, the group remains listed."""
    with contextlib.suppress(PenstockError):
        for broker in tube.brokers():
            tube.call_broker(broker.web, "admin_rmv_offset", {"groupName": group, "modifyUser": "penstock"})


def stored_records(
    request: ConsumeRequest, unavailable: dict[int, UnavailableError], undecodable: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the currently stored records, merged over the partitions by time of arrival.

    A broker that does not respond is reported, added to ``unavailable`` and skipped, unless it is the only one. The
    place of a record that cannot be decoded is added to ``undecodable``; without it, such a record is an error.
    """
    from penstock.tube.reader import RangeReader
    from penstock.tube.record import Record

    topic, infos = request.topic, request.partitions()
    holders = {info.broker_id for info in infos}

    def of_partition(info: PartitionInfo) -> Iterator[dict[str, Any]]:
        if info.broker_id in unavailable:
            return
        try:
            yield from held(info)
        except UnavailableError as error:
            if info.broker_id in unavailable:
                return
            unavailable[info.broker_id] = error
            if len(unavailable) == len(holders):
                raise
            left_out = [other.partition for other in infos if other.broker_id == info.broker_id]
            which = f"partition{'s' if len(left_out) > 1 else ''} {', '.join(map(str, left_out))}"
            where, why = f"{info.host}:{info.port}", error.why or error.what
            note(f"broker {info.broker_id} at {where} does not respond ({why}): {which} of {escape(topic)} skipped")

    def held(info: PartitionInfo) -> Iterator[dict[str, Any]]:
        with RangeReader(info.host, info.port, timeout_s=REQUEST_S, **request.client) as source:
            log = _log(source, info, topic)
            end = log.end if request.until is None else request.until.offset(log)
            for batch in source.read(topic, info.partition, request.start.offset(log), end):
                columns = (batch.offsets, batch.append_times, batch.flags, batch.payloads)
                for offset, time_ms, flag, data in zip(*columns, strict=True):
                    try:
                        record = Record.decode(data, int(flag))
                    except RemoteProtocolError:
                        if undecodable is None:
                            raise
                        undecodable.append(f"{info.broker_id}:{info.partition}@{offset}")
                        continue
                    yield _fields(topic, info.broker_id, info.partition, int(offset), int(time_ms), record)

    return heapq.merge(*map(of_partition, infos), key=lambda row: row["append_time_ms"])


async def _consume(
    request: ConsumeRequest, group: str, show: _Printer, undecodable: list[str], *, follow: bool
) -> None:
    import asyncio

    from penstock.tube.consumer import Consumer

    seen = 0
    options: dict[str, Any] = {"filters": list(request.types)} if request.types else {}
    options |= {"heartbeat_s": HEARTBEAT_S, "start": request.start.word or "earliest"}
    if (offsets := _offsets(request)) is not None:
        options["start_offsets"] = offsets
    if request.parts:
        options["balance"] = "client"  # only with client balance can a member choose partitions
    member = Consumer(request.masters, group, [request.topic], with_offsets=True, **options, **request.client)
    if request.parts:
        await member.assign(_key(info, request.topic) for info in request.partitions())
    async with member as consumer:
        note(
            f"consuming {escape(request.topic)} as group {escape(group)}"
            + (", interrupt with Ctrl-C" if follow else "")
        )
        try:
            async for m in _until_idle(consumer, follow=follow):
                try:
                    row = _fields(m.topic, m.broker_id, m.partition, m.offset, m.append_time_ms, m.record)
                except RemoteProtocolError:
                    # Its offset is committed: otherwise the group would never get past it.
                    undecodable.append(f"{m.broker_id}:{m.partition}@{m.offset}")
                    continue
                show(row)
                seen += 1
                if seen == request.count:
                    break
        except asyncio.CancelledError:
            # Ctrl-C: the offsets of printed records are committed nevertheless.
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
    """Wait until the consumer has a partition: before that, a lack of records does not mean the end."""
    import asyncio

    begun = time.monotonic()
    told = False
    while not consumer.assignment:
        waited = time.monotonic() - begun
        if waited > ASSIGNED_S:
            raise UnavailableError(
                f"the group got no partition within {ASSIGNED_S:g} s",
                applied=False,
                why="other members have all partitions, or no broker serves the topic",
                hint="check the group and the topic: penstock tube group describe, penstock tube topic describe",
            )
        if waited > IDLE_S and not told:
            told = True
            note("waiting for the master to assign partitions")
        await asyncio.sleep(POLL_S)


def _fields(
    topic: str, broker_id: int, partition: int, offset: int | None, time_ms: int | None, record: Record
) -> dict[str, Any]:
    """Return one record as a row of JSON; ``_record`` is for the other formats."""
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


class _Printer:
    """Prints rows in the selected format."""

    def __init__(self, *, raw: bool, as_json: bool, form: RawFormat, separator: str | None) -> None:
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
            print_raw(LENGTH.pack(len(value)) + value if self._form is RawFormat.LENGTH else value + b"\n")
        else:
            print_record(f"{row['broker_id']}:{row['partition']}", record)
