"""`penstock tube topic search`: print the stored records of a topic that pass a filter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Json
from penstock.cli.output import note, print_json
from penstock.cli.tube.access import Topic, TubeConnectionOptions, connects
from penstock.cli.tube.consume import ConsumeRequest, place_of, print_record, stored_records
from penstock.cli.tube.offset_spec import OFFSETS
from penstock.errors import ConfigError, LocalProtocolError, RefusedError

if TYPE_CHECKING:
    from penstock.errors import UnavailableError
    from penstock.tube.record import Record

__all__ = ["search"]


@connects
def search(
    topic: Topic,
    tube: TubeConnectionOptions,
    key: Annotated[str, typer.Option(help="The key is this text, or begins with it: 'pump/*'.", metavar="TEXT")] = "",
    attribute: Annotated[
        str,
        typer.Option(
            help="A header or one of topic, id, msg_type and content_type has this value: 'unit=bar', 'unit=b*' for a "
            "prefix, 'unit' for any.",
            metavar="NAME[=VALUE]",
        ),
    ] = "",
    path: Annotated[
        str,
        typer.Option(
            help="The value is JSON (up to 256 KiB) with this path, compared by = != < <= > >= or ~ (contains): "
            "'temp.c > 21', 'items[0].name = pump', 'error'.",
            metavar="CONDITION",
        ),
    ] = "",
    text: Annotated[
        str,
        typer.Option(help="Key, a header or the value contains this text, in any case.", metavar="TEXT"),
    ] = "",
    start: Annotated[
        str,
        typer.Option("--from", help=f"First offset: {OFFSETS}. -N: the last N of each partition.", metavar="OFFSET"),
    ] = "earliest",
    until: Annotated[
        str | None, typer.Option(help="Stop before this offset, written like --from.", metavar="OFFSET")
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(help="Only this partition, of each broker or of one; repeatable.", metavar="[BROKER:]N"),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-c", help="Exit after N records were found.", min=1, metavar="N")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the stored records of TOPIC that pass all given filters, by time of arrival.

    A line has the place of the record (BROKER:PARTITION@OFFSET), its key and its value. The records are read from the
    brokers and compared here; --from and --until limit how many. If a broker does not respond, the records of the
    others are searched and the exit status is 1. Records that cannot be decoded pass no filter, and are counted.
    """
    from penstock.tube.reader import NO_RANGES
    from penstock.tube.record_filter import RecordFilter

    if not (key or attribute or path.strip() or text):
        raise ConfigError(
            "no filter is set",
            option="--text",
            hint="set --key, --attribute, --path or --text; penstock tube consume prints all records",
        )
    try:
        wanted = RecordFilter(key=key, attribute=attribute, json=path, text=text)
    except LocalProtocolError as error:
        raise ConfigError(error.what, hint=error.hint) from None
    request = ConsumeRequest.of(tube, topic, start, until, partition)
    unavailable: dict[int, UnavailableError] = {}
    undecodable: list[str] = []
    found = compared = 0
    try:
        for row in stored_records(request, unavailable, undecodable):
            record: Record = row.pop("_record")
            compared += 1
            if not wanted.passes(record):
                continue
            found += 1
            if as_json:
                print_json(row)
            else:
                print_record(place_of(row), record)
            if found == count:
                break
    except KeyboardInterrupt:
        note(f"interrupted: {found:,} of {compared:,} records so far")
        raise  # unlike those of `consume`, the result is not complete
    except RefusedError as error:
        if error.code != NO_RANGES:
            raise
        raise RefusedError(
            f"the brokers of {topic!r} cannot be searched",
            peer=tube.tube_master,
            why=error.why or "they serve consumer groups only",
            hint=f"read the records as a group: penstock tube consume {topic} --json",
        ) from error
    note(f"{found:,} of {compared:,} records")
    if undecodable:
        note(f"{len(undecodable):,} more cannot be decoded, the first: {undecodable[0]}")
    if unavailable:
        raise typer.Exit(1)
