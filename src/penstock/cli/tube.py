"""`penstock tube`: topics, records in, records out."""

from __future__ import annotations

import contextlib
import heapq
import secrets
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import Cell, bytes_fields, escape, note, print_json, print_raw, print_table, shown
from penstock.errors import ConfigError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.tube.reader import PartitionInfo
    from penstock.tube.record import Record

__all__ = ["app"]

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="List topics, produce records, consume records.",
)
topics = typer.Typer(rich_markup_mode=None, help="List topics (the default), or create one.")
app.add_typer(topics, name="topics", invoke_without_command=True)

Master = Annotated[
    str,
    typer.Option(
        help="Master of the tube; several, separated by commas.", envvar="PENSTOCK_TUBE_MASTER", metavar="HOST:PORT"
    ),
]
Web = Annotated[str, typer.Option(help="Administration of the master.", envvar="PENSTOCK_HTTP", metavar="HOST:PORT")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Topic = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC")]
MASTER = "127.0.0.1:8715"
WEB = "127.0.0.1:8080"
TOKEN = "abc"  # noqa: S105 - the reference's sample, which a node takes on loopback only

IDLE_S = 2.0
"""How long a group that does not follow waits for another record before it ends."""
WINDOW = 1000
"""Records of standard input that may be on their way at once."""


class Start(StrEnum):
    """Where a consumer begins that has no position yet."""

    EARLIEST = "earliest"
    LATEST = "latest"


@topics.callback()
def topics_default(ctx: typer.Context, http: Web = WEB, as_json: Json = False) -> None:
    """List topics (the default), or create one."""
    if ctx.invoked_subcommand is None:
        _list_topics(http, as_json=as_json)


@topics.command("list")
def topics_list(http: Web = WEB, as_json: Json = False) -> None:
    """List the topics of a tube."""
    _list_topics(http, as_json=as_json)


@topics.command("create")
def topics_create(
    topic: Topic,
    partitions: Annotated[int, typer.Option(help="Partitions in each store.", min=1, max=9999, metavar="N")] = 3,
    stores: Annotated[int, typer.Option(help="Stores, each with files of its own.", min=1, max=100, metavar="N")] = 1,
    http: Web = WEB,
    admin_token: Annotated[
        str, typer.Option(help="Token for changes.", envvar="PENSTOCK_ADMIN_TOKEN", metavar="TEXT")
    ] = TOKEN,
    as_json: Json = False,
) -> None:
    """Create TOPIC on every broker."""
    from penstock.cli.webapi import call

    rows = call(
        http,
        "admin_add_new_topic_record",
        {
            "topicName": topic,
            "numPartitions": str(partitions),
            "numTopicStores": str(stores),
            "createUser": "penstock",
            "confModAuthToken": admin_token,
        },
    )
    row: dict[str, Cell] = {"topic": topic, "partitions": partitions, "stores": stores, "brokers": len(rows)}
    print_table([row], ["topic", "partitions", "stores", "brokers"], as_json=as_json)


@app.command()
def produce(
    topic: Topic,
    values: Annotated[
        list[str] | None,
        typer.Argument(help="Values, one record each; without any, each line of stdin is one.", metavar="VALUE"),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Key of every record: equal keys stay in order.", metavar="TEXT")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Header of every record; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    partition: Annotated[int | None, typer.Option(help="Partition of every record.", min=0, metavar="N")] = None,
    msg_type: Annotated[
        str | None, typer.Option(help="$msgType$ of every record, for filters.", metavar="TEXT")
    ] = None,
    tube_master: Master = MASTER,
    as_json: Json = False,
) -> None:
    """Append records to TOPIC.

    Ends when the log has them all. With --json, the place of each record is a line.
    """
    headers = [_header(text) for text in header or []]
    if not values and sys.stdin.isatty():
        raise ConfigError("tube produce: no values", do="give values, or pipe lines in")
    data = (value.encode("utf-8", "surrogateescape") for value in values) if values else _lines()

    def record(value: bytes) -> Record:
        from penstock.tube.record import Record

        return Record(value, None if key is None else key.encode(), list(headers), msg_type=msg_type)

    if not _partitions(tube_master, topic):
        # The producer waits for it a while: it may just have been created, or its broker may be starting.
        note(f"waiting for topic {escape(topic)}: the master announces none (penstock tube topics create makes one)")
    from penstock.runtime.loop import run

    count = run(_produce(tube_master, topic, (record(value) for value in data), partition, as_json=as_json))
    if not as_json:
        note(f"{count} {'record' if count == 1 else 'records'} produced to {escape(topic)}")


@app.command()
def consume(
    topic: Topic,
    group: Annotated[
        str | None,
        typer.Option(help="Consumer group: its position is kept, its members share the partitions.", metavar="NAME"),
    ] = None,
    start: Annotated[
        Start,
        typer.Option(
            "--from",
            help="Where to begin: earliest or latest; a group that has a position goes on there.",
            metavar="WORD",
        ),
    ] = Start.EARLIEST,
    count: Annotated[int | None, typer.Option(help="End after so many records.", min=1, metavar="N")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Only the values, byte for byte, a line end after each.")] = False,
    tube_master: Master = MASTER,
    as_json: Json = False,
) -> None:
    """Print the records of TOPIC.

    Without --group and --follow: what the log holds now, in the order of arrival. With one of them: as a member of a
    consumer group (one of its own, if none is named), which confirms what was printed.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if group is None and not follow:
            _print_all(_held(tube_master, topic) if start is Start.EARLIEST else (), count, raw=raw, as_json=as_json)
            return
        _announced(tube_master, topic)
        from penstock.runtime.loop import run

        name = group or f"penstock_cli_{secrets.token_hex(6)}"
        run(_consume(tube_master, topic, name, start, count, follow=follow, raw=raw, as_json=as_json))


def _list_topics(http: str, *, as_json: bool) -> None:
    from penstock.cli.webapi import call

    rows: list[dict[str, Cell]] = []
    for entry in call(http, "admin_query_topic_info", {}):
        brokers: list[dict[str, Any]] = entry["topicInfo"]
        rows.append(
            {
                "topic": entry["topicName"],
                "partitions": max((broker["numPartitions"] for broker in brokers), default=0),
                "stores": max((broker["numTopicStores"] for broker in brokers), default=0),
                "brokers": len(brokers),
                "publish": entry["isSrvAcceptPublish"],
                "subscribe": entry["isSrvAcceptSubscribe"],
            }
        )
    print_table(rows, ["topic", "partitions", "stores", "brokers", "publish", "subscribe"], as_json=as_json)


def _header(text: str) -> tuple[str, str | bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--header: got {text!r}, expected NAME=VALUE", option="--header")
    return name, value


def _lines() -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


async def _produce(masters: str, topic: str, records: Iterable[Record], partition: int | None, *, as_json: bool) -> int:
    import asyncio

    from penstock.tube.producer import Producer

    count = 0
    pending: list[asyncio.Task[Any]] = []

    async def settle(most: int) -> None:
        while len(pending) > most:
            result = await pending.pop(0)
            row: dict[str, Cell] = {
                "topic": topic,
                "broker_id": result.broker_id,
                "partition": result.partition,
                "offset": result.append_offset,
                "message_id": result.message_id,
                "append_time_ms": result.append_time_ms,
            }
            if as_json:
                print_json(row)

    async with Producer(masters) as producer:
        try:
            for record in records:
                count += 1
                pending.append(asyncio.ensure_future(producer.send(topic, record, partition=partition)))
                # Lets the sends leave while standard input is read, which blocks. The first is waited for: until the
                # topic is known, sends wait side by side and would not stay in order.
                await asyncio.sleep(0)
                await settle(WINDOW if count > 1 else 0)
            await settle(0)
        finally:
            for task in pending:
                task.cancel()
    return count


def _held(masters: str, topic: str) -> Iterator[dict[str, Any]]:
    """What the log holds now, merged over the partitions by the time of arrival."""
    from penstock.tube.reader import RangeReader

    def of_partition(info: PartitionInfo) -> Iterator[dict[str, Any]]:
        with RangeReader(info.host, info.port) as source:
            low, high = source.bounds(topic, info.partition)
            for offsets, times, flags, payloads in source.read(topic, info.partition, low, high):
                for offset, time_ms, flag, data in zip(offsets, times, flags, payloads, strict=True):
                    yield _row(topic, info.broker_id, info.partition, int(offset), int(time_ms), bytes(data), int(flag))

    parts = [of_partition(info) for info in _announced(masters, topic)]
    return heapq.merge(*parts, key=lambda row: row["append_time_ms"])


def _announced(masters: str, topic: str) -> list[PartitionInfo]:
    """The partitions of ``topic``; refused where there are none."""
    found = _partitions(masters, topic)
    if not found:
        raise RefusedError(
            f"the master announces no topic {topic!r}",
            peer=masters,
            do="look at the names (penstock tube topics), or create it (penstock tube topics create)",
        )
    return found


def _partitions(masters: str, topic: str) -> list[PartitionInfo]:
    from penstock.tube.reader import partitions

    try:
        return partitions(masters, topic)
    except UnavailableError as error:
        raise UnavailableError(
            error.what,
            applied=False,
            why=error.why,
            do="start a node (penstock up), or name its TubeMQ master: --tube-master HOST:PORT",
        ) from error


async def _consume(
    masters: str, topic: str, group: str, start: Start, count: int | None, *, follow: bool, raw: bool, as_json: bool
) -> None:
    import asyncio

    from penstock.tube.consumer import Consumer

    seen = 0
    async with Consumer(masters, group, [topic], start=start.value) as consumer:
        note(f"consuming {escape(topic)} as group {escape(group)}" + (", Ctrl-C ends" if follow else ""))
        try:
            async for message in _until_idle(consumer, follow=follow):
                row = _fields(message.topic, message.broker_id, message.partition, None, None, message.record)
                _print_one(row, raw=raw, as_json=as_json)
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

    messages = aiter(consumer)
    while True:
        try:
            yield await asyncio.wait_for(anext(messages), None if follow else IDLE_S)
        except (TimeoutError, StopAsyncIteration):
            return


def _row(
    topic: str, broker_id: int, partition: int, offset: int, time_ms: int, data: bytes, flag: int
) -> dict[str, Any]:
    from penstock.tube.record import Record

    return _fields(topic, broker_id, partition, offset, time_ms, Record.decode(data, flag))


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


def _print_all(rows: Iterable[dict[str, Any]], count: int | None, *, raw: bool, as_json: bool) -> None:
    for number, row in enumerate(rows, start=1):
        _print_one(row, raw=raw, as_json=as_json)
        if number == count:
            return


def _print_one(row: dict[str, Any], *, raw: bool, as_json: bool) -> None:
    record: Record = row.pop("_record")
    if as_json:
        print_json(row)
    elif raw:
        print_raw(record.value + b"\n")
    else:
        key = "-" if record.key is None else shown(record.key)
        sys.stdout.write(f"{row['broker_id']}:{row['partition']}  {key}  {shown(record.value)}\n")
        sys.stdout.flush()
