"""`penstock pipeline test`: the cases of a pipeline, in one local Spark session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import escape, print_json, use_colour
from penstock.cli.pipeline_options import File, Json, needs_spark
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipelines.testing.runner import Outcome

__all__ = ["run_cases"]


def run_cases(
    file: File,
    cases: Annotated[
        Path | None,
        typer.Option(help="The file of cases. Default: FILE with .test.yaml.", metavar="PATH", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--case", help="Only the case of this name; repeatable.", metavar="NAME", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the cases beside a pipeline file: input records, and what each sink and the dead letters must hold.

    No node is needed: what enrich steps look up stands in the case, what sinks get is compared. Differences are shown
    as a diff, expected with -, found with +. Exit status 0 where all cases hold, 1 where one does not.
    """
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.testing.cases import cases_beside, load_cases

    pipeline = load(file)
    chosen = load_cases(cases or cases_beside(file), pipeline)
    if only:
        unknown = set(only) - {case.name for case in chosen}
        if unknown:
            raise ConfigError(
                f"--case {min(unknown)!r} is none of the cases",
                option="case",
                do="name one of " + ", ".join(repr(case.name) for case in chosen),
            )
        chosen = [case for case in chosen if case.name in only]
    with needs_spark():
        from penstock.pipelines.testing.runner import session_for_cases, try_case

    failed = 0
    with session_for_cases(pipeline.name) as spark:
        for case in chosen:
            outcome = try_case(spark, pipeline, case)
            failed += bool(outcome.differences)
            _show(case.name, outcome, as_json=as_json)
    if not as_json:
        sys.stdout.write(f"{len(chosen) - failed} ok, {failed} off\n")
    if failed:
        raise typer.Exit(1)


def _show(name: str, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "case": name,
                "ok": not outcome.differences,
                "differences": [difference.model_dump() for difference in outcome.differences],
                "found": outcome.found,
                "dead_letters": outcome.dead_letters,
            }
        )
        return
    from penstock.pipelines.testing.cases import lines

    sys.stdout.write(f"{'off' if outcome.differences else 'ok '} {escape(name)}\n")
    for difference in outcome.differences:
        for line in lines(difference):
            sys.stdout.write(f"    {_coloured(escape(line))}\n")
    sys.stdout.flush()


def _coloured(line: str) -> str:
    colour = {"-": 31, "+": 32}.get(line.strip()[:1])
    return f"\x1b[{colour}m{line}\x1b[0m" if colour and use_colour(sys.stdout) else line
