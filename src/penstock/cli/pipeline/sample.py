"""`penstock pipeline sample`: rows of the steps of a pipeline for the newest records of its sources."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Json
from penstock.cli.output import escape, print_json, print_table
from penstock.cli.pipeline.completion import complete_step
from penstock.cli.pipeline.options import File, needs_spark
from penstock.runtime.io.process_end import end_at_sigterm

if TYPE_CHECKING:
    from penstock.pipelines.testing.sample import StepSample

__all__ = ["sample"]

MAX_TEXT = 40
"""Characters of a value in a table; --json prints all."""


def sample(
    file: File,
    step: Annotated[
        list[str] | None,
        typer.Option(
            help="Show only this step; repeatable.",
            metavar="STEP",
            show_default=False,
            autocompletion=complete_step,
        ),
    ] = None,
    records: Annotated[
        int,
        typer.Option(help="Read this many of the newest records of each partition.", min=1, max=10_000, metavar="N"),
    ] = 100,
    limit: Annotated[int, typer.Option(help="Show this many rows of each step.", min=0, metavar="N")] = 5,
    as_json: Json = False,
) -> None:
    """Show rows after each step of a pipeline, for the newest records of its sources.

    The steps run once, in a local Spark session, whether or not the pipeline runs; lookups read the state store.
    Nothing is written, and no group's offsets change. Windows and dedupes have only these records.
    """
    from penstock.pipelines.spec.loader import load

    pipeline = load(file)
    with needs_spark():
        from penstock.pipelines.testing.runner import session_for_cases
        from penstock.pipelines.testing.sample import check_steps, sample_steps

    steps = check_steps(pipeline, step or [])
    end_at_sigterm()  # so the console cancels a sample
    with session_for_cases(pipeline.name) as spark:
        for number, found in enumerate(sample_steps(spark, pipeline, steps, records, limit)):
            if as_json:
                rejections = [each._asdict() for each in found.rejections]
                print_json({**found._asdict(), "rejections": rejections})
            else:
                sys.stdout.write("\n" if number else "")
                _show(found)


def _show(found: StepSample) -> None:
    counts = [f"{found.live} rows"]
    counts += [f"{count} {what}" for what, count in (("filtered", found.filtered), ("dead", found.dead)) if count]
    sys.stdout.write(f"{escape(found.step)} ({found.kind}): {', '.join(counts)}\n")
    if found.rows:
        print_table(
            [{name: _text(value) for name, value in row.items()} for row in found.rows],
            list(found.rows[0]),
            as_json=False,
        )
    for each in found.rejections:
        sys.stdout.write(f"  {each.rows} dead: {escape(each.reason)} ({each.code})\n")
    sys.stdout.flush()


def _text(value: object) -> str | int | float | bool | None:
    """Return a value for a cell: nested data as JSON, long texts shortened."""
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
