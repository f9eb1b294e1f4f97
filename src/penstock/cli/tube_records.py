"""`penstock tube consume`: records out."""

from __future__ import annotations

import contextlib
import heapq
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.arriving import LENGTH
from penstock.cli.output import bytes_fields, escape, note, print_json, print_raw, shown
from penstock.cli.tube_common import (
    MASTER,
    NOT_DEPLOYED,
    Json,
    LoginOptions,
    Master,
    Topic,
    announced,
    logs_in,
    no_topic,
    partitions,
    run_client,
)
from penstock.errors import ConfigError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.runtime.login import ClientOptions
    from penstock.tube.reader import PartitionInfo
    from penstock.tube.record import Record

__all__ = ["consume", "parse_time"]

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
        typer.Option(help="Consumer group: its position is kept, its members share the partitions.", metavar="NAME"),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="Where to begin: earliest, latest, or (without --group) a time as 2026-01-31T12:00, or 90s, 15m, 2h, "
            "3d ago; a group that has a position goes on there.",
            metavar="WHEN",
        ),
    ] = "earliest",
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
    tube_master: Master = MASTER,
    as_json: Json = False,
) -> None:
    """Print the records of TOPIC.

    Without --group and --follow: what the log holds now, in the order of arrival; where a broker does not answer, what
    the others hold, and exit status 1. With one of them: as a member of a consumer group (one of its own, if none is
    named), which confirms what was printed.
    """
    since = None if start in {"earliest", "latest"} else parse_time(start, "--from")
    if since is not None and (group is not None or follow):
        raise ConfigError(
            "--from: a time goes without --group and --follow", do="move the group: penstock tube offsets reset"
        )
    types = frozenset(msg_filter or ())
    client = login.client()
    show = _Show(raw=raw, as_json=as_json, form=form)
    with contextlib.suppress(KeyboardInterrupt):
        if group is None and not follow:
            away: dict[int, UnavailableError] = {}
            rows = _held(tube_master, topic, since, client, away) if start != "latest" else iter(())
            chosen = (row for row in rows if not types or row["msg_type"] in types)
            for number, row in enumerate(chosen, start=1):
                show(row)
                if number == count:
                    break
            if away:
                raise typer.Exit(1)
            return
        with contextlib.suppress(RefusedError):  # a group may be let in, or may read, where producers are not
            partitions(tube_master, topic, client)  # says best that no master answers
        name = group or f"penstock_cli_{secrets.token_hex(6)}"
        try:
            run_client(_consume(tube_master, topic, name, start, sorted(types), count, show, client, follow=follow))
        except RefusedError as error:
            raise (no_topic(tube_master, topic) if error.code == NOT_DEPLOYED else error) from None


def parse_time(text: str, option: str, words: str = "earliest, latest") -> int:
    """Milliseconds since 1970 of an ISO 8601 time (local, unless it says otherwise) or of so long ago (``15m``).

    ``words``: what the option takes beside times; the error names it.
    """
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        if text[-1:] in units and text[:-1].isdigit():
            found = datetime.now().astimezone() - timedelta(seconds=int(text[:-1]) * units[text[-1]])
        else:
            found = datetime.fromisoformat(text)
        return int(found.timestamp() * 1000)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{option}: got {text!r}, which is no time",
            option=option,
            do=f"write {words}, 2026-01-31T12:00, or 90s, 15m, 2h, 3d (ago)",
        ) from None


def _held(
    masters: str, topic: str, since: int | None, client: ClientOptions, away: dict[int, UnavailableError]
) -> Iterator[dict[str, Any]]:
    """What the log holds now, merged over the partitions by the time of arrival.

    A broker that does not answer is told of, noted in ``away`` and left out, unless there is no other.
    """
    from penstock.tube.reader import RangeReader
    from penstock.tube.record import Record

    infos = announced(masters, topic, client)
    brokers = {info.broker_id for info in infos}

    def of_partition(info: PartitionInfo) -> Iterator[dict[str, Any]]:
        if info.broker_id in away:
            return
        try:
            yield from held(info)
        except UnavailableError as error:
            if info.broker_id in away:
                return
            away[info.broker_id] = error
            if len(away) == len(brokers):
                raise
            left_out = [other.partition for other in infos if other.broker_id == info.broker_id]
            which = f"partition{'s' if len(left_out) > 1 else ''} {', '.join(map(str, left_out))}"
            where, why = f"{info.host}:{info.port}", error.why or error.what
            note(f"broker {info.broker_id} at {where} does not answer ({why}): {which} of {escape(topic)} left out")

    def held(info: PartitionInfo) -> Iterator[dict[str, Any]]:
        with RangeReader(info.host, info.port, timeout_s=ANSWER_S, **client) as source:
            low, high = source.bounds(topic, info.partition)
            if since is not None:
                low = source.offset_at(topic, info.partition, since)
            for batch in source.read(topic, info.partition, low, high):
                columns = (batch.offsets, batch.append_times, batch.flags, batch.payloads)
                for offset, time_ms, flag, data in zip(*columns, strict=True):
                    record = Record.decode(data, int(flag))
                    yield _fields(topic, info.broker_id, info.partition, int(offset), int(time_ms), record)

    return heapq.merge(*map(of_partition, infos), key=lambda row: row["append_time_ms"])


async def _consume(
    masters: str,
    topic: str,
    group: str,
    start: str,
    types: list[str],
    count: int | None,
    show: _Show,
    client: ClientOptions,
    *,
    follow: bool,
) -> None:
    import asyncio

    from penstock.tube.consumer import Consumer

    seen = 0
    options: dict[str, Any] = {"filters": types} if types else {}
    options |= {"heartbeat_s": HEARTBEAT_S}
    async with Consumer(masters, group, [topic], start=start, with_offsets=True, **options, **client) as consumer:
        note(f"consuming {escape(topic)} as group {escape(group)}" + (", Ctrl-C ends" if follow else ""))
        try:
            async for m in _until_idle(consumer, follow=follow):
                show(_fields(m.topic, m.broker_id, m.partition, m.offset, m.append_time_ms, m.record))
                seen += 1
                if seen == count:
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

    def __init__(self, *, raw: bool, as_json: bool, form: Format) -> None:
        self._raw = raw
        self._as_json = as_json
        self._form = form

    def __call__(self, row: dict[str, Any]) -> None:
        record: Record = row.pop("_record")
        if self._as_json:
            print_json(row)
        elif self._raw and self._form is Format.LENGTH:
            print_raw(LENGTH.pack(len(record.value)) + record.value)
        elif self._raw:
            print_raw(record.value + b"\n")
        else:
            key = "-" if record.key is None else shown(record.key)
            sys.stdout.write(f"{row['broker_id']}:{row['partition']}  {key}  {shown(record.value)}\n")
            sys.stdout.flush()
