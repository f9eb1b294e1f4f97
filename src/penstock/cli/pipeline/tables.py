"""`penstock pipeline migrate` and `maintain`: the tables of a stopped pipeline, without Spark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import DryRun, Json, duration_option, size_option
from penstock.cli.output import note, print_json
from penstock.cli.pipeline.completion import complete_table_sink
from penstock.cli.pipeline.options import File, needs_spark, run_of
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.config.values import did_you_mean

if TYPE_CHECKING:
    from penstock.pipelines.spec.pipeline import Pipeline
    from penstock.pipelines.spec.sinks import TableSink

__all__ = ["maintain", "migrate"]

Sinks = Annotated[
    list[str] | None,
    typer.Option(
        "--sink",
        help="Only the table of this sink; repeatable.",
        metavar="NAME",
        show_default=False,
        autocompletion=complete_table_sink,
    ),
]


def migrate(file: File, only: Sinks = None, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Migrate the Parquet tables of a pipeline to Delta, in place; no row is copied.

    The run must be stopped: the command holds the lease of the pipeline meanwhile, and needs its state store. The next
    run continues with the next batch. The Parquet files remain, and must not be written by earlier versions any more.
    Remove `format: parquet` of these sinks from the file afterwards.
    """
    pipeline, name, parquet = _tables(file, only, "parquet")
    with needs_spark(), _lease(pipeline.statestore.url, name, dry_run=dry_run):
        from penstock.pipelines.sinks.migration import migrate as migrate_table

        for sink, table in parquet.items():
            found = migrate_table(Path(table.path), dry_run=dry_run)
            if as_json:
                print_json({"sink": sink, "table": table.path, **found._asdict(), "migrated": not dry_run})
                continue
            verb = "would be" if dry_run else "is"
            sys.stdout.write(
                f"{sink}: {table.path} {verb} a Delta table with {found.rows} rows "
                f"of {found.batches} batches in {found.files} files\n"
            )


def maintain(
    file: File,
    only: Sinks = None,
    retention: Annotated[
        float,
        duration_option(text="Keep files that versions of this time name, for readers.", default="7d", or_forever=True),
    ] = 7 * 86_400.0,
    log_retention: Annotated[
        float | None,
        duration_option(
            text="Set the table's delta.logRetentionDuration: remove versions of the log that are older.",
            default="that of the table, or 30d",
        ),
    ] = None,
    target: Annotated[
        int | None, size_option(text="Combine files that are smaller.", default="target_file_size of the table, 128MiB")
    ] = None,
    as_json: Json = False,
) -> None:
    """Combine small files of the Delta tables of a pipeline, and remove files that no version needs any more.

    The run must be stopped: the command holds the lease of the pipeline meanwhile, and needs its state store. No other
    program may compact the tables at the same time: rows would be doubled.
    """
    pipeline, name, tables = _tables(file, only, "delta")
    with needs_spark(), _lease(pipeline.statestore.url, name, dry_run=False):
        from penstock.pipelines.sinks.maintenance import maintain as maintain_table

        for sink, table in tables.items():
            found = maintain_table(
                table.location,
                retention_h=_hours(retention),
                target_bytes=target or table.file_bytes,
                log_retention_h=None if log_retention is None else _hours(log_retention),
            )
            if as_json:
                print_json({"sink": sink, "table": table.path, **found._asdict()})
                continue
            sys.stdout.write(
                f"{sink}: {table.path}: {found.combined} files combined into {found.written}, "
                f"{found.removed} old files removed\n"
            )


_LONGEST_S = 1e10
"""300 years: no file is older."""


def _hours(seconds: float) -> int:
    return int(min(seconds, _LONGEST_S) // 3600)


def _tables(file: Path, only: list[str] | None, stored: str) -> tuple[Pipeline, str, dict[str, TableSink]]:
    """Return the pipeline, the name of its lease and its tables of the format ``stored``, by sink."""
    from penstock.pipelines.spec.sinks import stored_format

    pipeline, _, name = run_of(file, None, None)
    tables = {sink.name: sink.table for sink in pipeline.sinks if sink.table is not None}
    for wanted in only or ():
        if wanted not in tables:
            raise ConfigError(
                f"--sink {wanted!r} is not a table of the pipeline",
                option="sink",
                hint=did_you_mean(wanted, tables) or f"use one of {', '.join(tables)}",
            )
    found = {
        sink: table
        for sink, table in tables.items()
        if sink in (only or tables) and (stored_format(table.path) or _format_in_bucket(table)) == stored
    }
    if not found:
        note(f"pipeline {name}: no table has the format {stored}")
        raise typer.Exit
    return pipeline, name, found


def _format_in_bucket(table: TableSink) -> str | None:
    """Return the format of a table in a bucket, None for a local directory or another URI."""
    return None if table.is_remote or isinstance(table.location, Path) else table.format


@contextmanager
def _lease(broker: str, name: str, *, dry_run: bool) -> Iterator[None]:
    """Hold the lease of the pipeline ``name``, so that no run writes its tables.

    Raises:
        PenstockError: a run holds the lease.
        UnavailableError: the state store does not answer.
    """
    if dry_run:
        yield
        return
    from penstock.pipelines.run.write_back import WriteBack

    store = WriteBack(broker, name)
    store.connect()
    try:
        if store.try_acquire() is None:
            raise PenstockError(
                f"the tables of pipeline {name!r} are in use",
                why=f"{store.holder()} holds the lease",
                hint=f"stop it first: penstock pipeline stop {name} --broker {broker}",
            )
        yield
    finally:
        store.close()
