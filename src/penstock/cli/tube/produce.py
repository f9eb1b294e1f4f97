"""`penstock tube produce`: append records to a topic."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.options import Json, duration_option
from penstock.cli.output import escape, note, print_json
from penstock.cli.record_reader import LengthSplitter, LineSplitter, Splitter, WholeSplitter, chunks
from penstock.cli.tube.access import (
    Topic,
    TubeConnectionOptions,
    check_topic,
    connects,
    no_topic,
    partitions,
    run_client,
)
from penstock.cli.tube.offset_spec import PartitionSpec, parse_part
from penstock.errors import ConfigError, LocalProtocolError

if TYPE_CHECKING:
    from asyncio import Future, Queue

    from penstock.tube.codec.strings import Partition
    from penstock.tube.producer import Producer, SendResult
    from penstock.tube.record import Record

__all__ = ["produce"]

TOPIC_S = 10.0
"""Seconds to wait for the brokers of a topic that exists."""
SILENT_S = 5.0
"""Seconds without an acknowledgement after which the user is notified."""


class InputFormat(StrEnum):
    """Format of the input: lines, one value, values with a length prefix, or JSON as printed by `consume --json`."""

    LINES = "lines"
    WHOLE = "whole"
    LENGTH = "length"
    JSON = "json"


_SPLITTERS: Final[Mapping[InputFormat, Callable[[], Splitter]]] = {
    InputFormat.LINES: LineSplitter,
    InputFormat.WHOLE: WholeSplitter,
    InputFormat.LENGTH: LengthSplitter,
    InputFormat.JSON: LineSplitter,
}


@connects
def produce(
    topic: Topic,
    tube: TubeConnectionOptions,
    values: Annotated[
        list[str] | None,
        typer.Argument(help="Values, one record each. Default: the lines of standard input.", metavar="VALUE"),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Read from a file instead of standard input.", exists=True, dir_okay=False, metavar="FILE"),
    ] = None,
    form: Annotated[
        InputFormat,
        typer.Option(
            "--format",
            help="lines; whole: the input is one record; length: 4 bytes (big-endian) before each value; json: as "
            "printed by consume --json.",
            metavar="WORD",
        ),
    ] = InputFormat.LINES,
    key: Annotated[
        str | None, typer.Option(help="Key of every record: records with the same key stay in order.", metavar="TEXT")
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(help="The text before this separator is the key of the record.", metavar="TEXT")
    ] = None,
    key_field: Annotated[
        str | None,
        typer.Option(
            help="The key is this field of the value, a JSON object; a.b: field b of field a.", metavar="NAME"
        ),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Header of every record; repeatable.", metavar="NAME=VALUE")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="Partition of every record, of the first broker that has it or of one.", metavar="[BROKER:]N"
        ),
    ] = None,
    msg_type: Annotated[
        str | None,
        typer.Option(help="Message type ($msgType$) of every record, which consumers can filter by.", metavar="TEXT"),
    ] = None,
    idempotent: Annotated[
        bool, typer.Option("--idempotent", help="Write each record once in spite of retries (penstock's brokers).")
    ] = False,
    wait: Annotated[
        float,
        duration_option(text="Wait this long for a topic that does not exist yet.", default="0s", or_forever=True),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Append records to TOPIC, as they are read.

    Exits when all records are acknowledged, on a terminal after Ctrl-D. With --json, the offset of each record is
    printed when it is acknowledged.
    """
    check_topic(topic)
    headers = [_header(text) for text in header or []]
    if values and file is not None:
        raise ConfigError("tube produce: values and --file exclude each other", hint="use one of them")
    typed = not values and file is None and sys.stdin.isatty()
    if typed and form is InputFormat.LENGTH:
        raise ConfigError("tube produce: no values", hint="write them to a --file, or to standard input")
    if form is InputFormat.JSON and any([values, headers, key, key_separator, key_field, msg_type]):
        raise ConfigError(
            "--format json: a line contains its key, headers and message type",
            option="--format",
            hint="omit VALUE, --key, --key-separator, --key-field, --header and --msg-type",
        )
    if sum(option is not None for option in (key, key_separator, key_field)) > 1:
        raise ConfigError(
            "--key, --key-separator and --key-field exclude each other", option="--key", hint="use one of them"
        )
    record = (
        _from_json if form is InputFormat.JSON else _record_factory(key, key_separator, key_field, headers, msg_type)
    )
    target = None if partition is None else _target(topic, parse_part(partition))

    client = tube.client()
    from penstock.tube.producer import Producer
    from penstock.tube.reader import TopicUnavailableError

    # A topic whose broker is starting is waited for.
    timeout_s, reason = max(wait, TOPIC_S), ""
    try:
        if not partitions(tube.tube_master, topic, client):
            if not wait:
                raise no_topic(tube.tube_master, topic, known=tube.topics())
            timeout_s, reason = wait, f"it does not exist (create it: penstock tube topic create {topic})"
    except TopicUnavailableError as error:
        reason = error.why or error.what
    if reason:
        limit = "" if math.isinf(timeout_s) else f" up to {timeout_s:g} s"
        note(f"waiting{limit} for topic {topic}: {escape(reason)}")

    if typed:
        record_of = "the input is one record" if form is InputFormat.WHOLE else "each line is a record, sent at its end"
        note(f"{record_of}; Ctrl-D ends the input")
    source = _values(values) if values else _read(file, _SPLITTERS[form]())
    show = _print_place if as_json else None
    count = run_client(
        _produce(
            partial(
                Producer,
                tube.tube_master,
                idempotent=idempotent,
                topic_timeout_s=timeout_s,
                await_topic=wait > 0,
                **client,
            ),
            topic,
            source,
            record,
            target,
            show,
            noted=bool(reason),
        )
    )
    if not as_json:
        note(f"{_records(count)} produced to {escape(topic)}")


def _header(text: str) -> tuple[str, str | bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--header: got {text!r}", option="--header", hint="write NAME=VALUE: --header unit=celsius")
    return name, value


def _target(topic: str, part: PartitionSpec) -> int | Partition:
    from penstock.tube.codec.strings import BrokerInfo, Partition

    if part.broker_id is None:
        return part.partition
    return Partition(BrokerInfo(part.broker_id, "", 0), topic, part.partition)  # the master has its address


def _record_factory(
    key: str | None,
    key_separator: str | None,
    key_field: str | None,
    headers: Sequence[tuple[str, str | bytes]],
    msg_type: str | None,
) -> Callable[[bytes], Record]:
    """Return a function that creates a record from a value, with the key determined by the options."""
    from penstock.tube.record import Record

    constant = None if key is None else key.encode()
    separator = key_separator.encode() if key_separator else None
    path = key_field.split(".") if key_field else None

    def record(value: bytes) -> Record:
        own = constant
        if path is not None:
            own = _field(value, path)
        elif separator is not None:
            front, found, rest = value.partition(separator)
            if found:
                own, value = front, rest
        return Record(value, own, list(headers), msg_type=msg_type)

    return record


def _field(value: bytes, path: Sequence[str]) -> bytes:
    """Return the field ``path`` of a JSON object, as text. Raises LocalProtocolError if it is missing or not a
    scalar."""
    try:
        found: Any = json.loads(value)
        for name in path:
            found = found[name]
    except ValueError as error:
        raise LocalProtocolError(
            f"--key-field {'.'.join(path)}: the value is not JSON",
            why=str(error),
            hint="produce JSON objects, or use --key",
        ) from error
    except (KeyError, TypeError) as error:
        raise LocalProtocolError(
            f"--key-field: the value has no field {'.'.join(path)}", hint="choose a field that every value has"
        ) from error
    if isinstance(found, dict | list | None):
        raise LocalProtocolError(
            f"--key-field: field {'.'.join(path)} is neither text nor a number",
            hint="choose a field with text or a number in every value",
        )
    return found.encode() if isinstance(found, str) else json.dumps(found).encode()


def _from_json(line: bytes) -> Record:
    """Return the record in a line printed by `consume --json`. Raises LocalProtocolError."""
    from penstock.tube.record import Record

    try:
        row = json.loads(line)
        value, key = _bytes(row, "value"), _bytes(row, "key")
        if value is None:
            raise ValueError("it has no value")
        return Record(
            value,
            key,
            [(str(name), str(text)) for name, text in row.get("headers") or []],
            row.get("mqtt_topic"),
            row.get("event_time_ms"),
            row.get("id"),
            row.get("msg_type"),
            row.get("content_type"),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise LocalProtocolError(
            "the line is not a record as printed by consume --json",
            why=str(error),
            hint='write at least {"value": "text"}',
        ) from error


def _bytes(row: dict[str, Any], name: str) -> bytes | None:
    encoded = row.get(f"{name}_base64")
    if encoded is not None:
        return base64.b64decode(encoded, validate=True)
    text = row.get(name)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} is not text")
    return None if text is None else text.encode()


async def _values(values: Iterable[str]) -> AsyncIterator[Iterator[bytes]]:
    yield (value.encode("utf-8", "surrogateescape") for value in values)


async def _read(file: Path | None, splitter: Splitter) -> AsyncIterator[Iterator[bytes]]:
    with contextlib.ExitStack() as stack:
        stream = sys.stdin.buffer if file is None else stack.enter_context(file.open("rb"))
        async for data in chunks(stream):
            yield splitter.feed(data)
        yield splitter.finish()


async def _produce(
    connect: Callable[[], Producer],
    topic: str,
    source: AsyncIterator[Iterator[bytes]],
    record: Callable[[bytes], Record],
    partition: int | Partition | None,
    show: Callable[[str, SendResult], None] | None,
    *,
    noted: bool,
) -> int:
    """Produce the records of ``source``; returns the number of acknowledged ones. After a failure, records that were
    read before are sent, and their number is reported.

    ``noted``: the user was already notified that the topic is not available yet.
    """
    import asyncio

    sent: Queue[Future[SendResult] | None] = asyncio.Queue()
    stored = taken = 0

    async def one_ended(*tasks: asyncio.Task[None]) -> None:
        nonlocal noted
        while True:
            before = stored
            done, _ = await asyncio.wait(tasks, timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if not noted and taken > stored == before:
                noted = True
                note(
                    f"no acknowledgement for {SILENT_S:g} s: still retrying. The broker may be unavailable, slow or "
                    "out of disk space: see /readyz of the node"
                )

    async def collect_results() -> None:
        nonlocal stored, taken
        while (future := await sent.get()) is not None:
            taken += 1
            result = await future
            stored += 1
            if show is not None:
                show(topic, result)

    try:
        async with connect() as producer:
            sending = asyncio.create_task(_send(producer, topic, source, record, partition, sent))
            collecting = asyncio.create_task(collect_results())
            try:
                await one_ended(sending, collecting)
                if sending.done():
                    await one_ended(collecting)
                    await collecting  # get the results of all sent records, then raise the error that ended the sending
                    await sending
                else:
                    collecting.result()  # raises the error: only a failed record ends it before the sending ends
            finally:
                sending.cancel()
                collecting.cancel()
                await asyncio.gather(sending, collecting, return_exceptions=True)
                while not sent.empty():
                    if (future := sent.get_nowait()) is not None:
                        future.cancel()
    except BaseException as error:  # also after Ctrl-C: the user continues after the stored records
        end = "failure" if isinstance(error, Exception) else "interrupt"
        note(f"{_records(stored)} produced to {topic} before the {end}")
        raise
    return stored


async def _send(
    producer: Producer,
    topic: str,
    source: AsyncIterator[Iterator[bytes]],
    record: Callable[[bytes], Record],
    partition: int | Partition | None,
    sent: Queue[Future[SendResult] | None],
) -> None:
    number = 0
    try:
        async for values in source:
            for value in values:
                number += 1
                sent.put_nowait(await producer.queue(topic, record(value), partition=partition))
    except LocalProtocolError as error:
        what = error.what.removeprefix("tube: ")
        raise LocalProtocolError(f"record {number}: {what}", why=error.why, hint=error.hint) from error
    finally:
        sent.put_nowait(None)


def _print_place(topic: str, result: SendResult) -> None:
    print_json(
        {
            "topic": topic,
            "broker_id": result.broker_id,
            "partition": result.partition,
            "offset": result.append_offset,
            "message_id": result.message_id,
            "append_time_ms": result.append_time_ms,
        }
    )


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"
