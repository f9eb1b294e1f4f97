"""`penstock pipeline validate`, `plan`, `schema` and `test`: a pipeline file, without a node."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.options import Json
from penstock.cli.output import escape, print_error, print_json, use_colour
from penstock.cli.pipeline.options import File, Into, StateDir, needs_spark, run_of
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pipelines.ledger.plan_changes import PlanChange
    from penstock.pipelines.testing.runner import Outcome

__all__ = ["run_cases", "schema", "show_plan", "validate"]


CASES = ".test.yaml"
"""Suffix of test files."""
_PROBLEM = re.compile(r".*?:(?P<line>\d+):(?P<column>\d+): (?:option '(?P<option>.*?)': )?(?P<text>.*)")


def validate(
    files: Annotated[
        list[Path],
        typer.Argument(help="Pipeline files (YAML) and test files (NAME.test.yaml).", metavar="FILE..."),
    ],
    as_json: Json = False,
) -> None:
    """Check pipeline files without Spark.

    Options, values, names, references, schemas and columns are checked; errors have line and column. SQL, and the
    columns of sql steps, are checked when the pipeline runs. A test file is checked against its pipeline. Exit status 2
    if a file is not valid.
    """
    refused = 0
    for file in files:
        try:
            found = _valid(file)
        except ConfigError as error:
            if as_json:
                print_json(_as_json(error, file))
            elif len(files) == 1:
                raise
            else:
                print_error(error)
            refused += 1
        else:
            if as_json:
                print_json({"ok": True, "file": str(file), **found.data})
            else:
                sys.stdout.write("\n  ".join([f"{file}: {found.words}", *found.lines]) + "\n")
    if len(files) > 1 and not as_json:
        sys.stdout.write(f"{len(files) - refused} valid, {refused} not\n")
    if refused:
        raise typer.Exit(2)


class _Valid(NamedTuple):
    """Report about a valid file."""

    words: str
    lines: list[str]
    data: dict[str, object]


def _valid(file: Path) -> _Valid:
    """Check one file.

    Raises:
        ConfigError: it is not valid.
    """
    from penstock.pipelines.spec.description import way
    from penstock.pipelines.spec.loader import load
    from penstock.pipelines.spec.plan import plan

    if file.name.endswith(CASES):
        from penstock.pipelines.testing.cases import load_cases

        pipeline = load(file.with_name(file.name.removesuffix(CASES) + file.suffix))
        names = [case.name for case in load_cases(file, pipeline)]
        count = "1 case" if len(names) == 1 else f"{len(names)} cases"
        return _Valid(f"{count} of pipeline {pipeline.name!r}", names, {"pipeline": pipeline.name, "cases": names})
    pipeline = load(file)
    plans = plan(pipeline)
    return _Valid(
        f"pipeline {pipeline.name!r} is valid",
        [f"{way(sink_plan)} -> {sink_plan.sink.name}" for sink_plan in plans],
        {"pipeline": pipeline.name, "sinks": {p.sink.name: [step.name for step in p.steps] for p in plans}},
    )


def show_plan(
    file: File,
    state_dir: StateDir = None,
    into: Into = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the graph as a Mermaid flowchart.")] = False,
    as_json: Json = False,
) -> None:
    """Show the plan of a pipeline, without Spark.

    For each sink: its steps from the source on, what happens to records that fail, the delivery guarantee, and the
    effect of a run that lost its lease. With --mermaid: the graph.

    For a pipeline that has run, also the changes since: + new, ~ changed, - removed, = continues, ! cannot continue
    from its checkpoint. In the last case a run would fail, and the exit status is 1.
    """
    from penstock.pipelines.ledger.plan_changes import REFUSED, changes
    from penstock.pipelines.spec.description import as_data, as_mermaid, as_text

    pipeline, state, _ = run_of(file, state_dir, into)
    if mermaid:
        sys.stdout.write(as_mermaid(pipeline))
        return
    found = changes(pipeline, state)
    if as_json:
        print_json({**as_data(pipeline), "changes": None if found is None else [each._asdict() for each in found]})
    else:
        sys.stdout.write(as_text(pipeline))
        if found is not None:
            sys.stdout.write(f"\ncompared with the last run, state in {state}\n")
            sys.stdout.writelines(f"{line}\n" for change in found for line in _wrapped(change))
    if any(change.mark == REFUSED for change in found or ()):
        raise typer.Exit(1)


_COLOURS = {"+": 32, "~": 33, "-": 31, "!": 31}
_WIDTH = 110


def _wrapped(change: PlanChange) -> list[str]:
    """Format a change as lines of a diff."""
    text = escape(f"{change.mark} {change.what}: {change.text}")
    made = textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 8, break_long_words=False)
    colour = _COLOURS.get(change.mark) if use_colour(sys.stdout) else None
    return made if colour is None else [f"\x1b[{colour}m{line}\x1b[0m" for line in made]


def schema() -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from penstock.pipelines.spec.loader import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def _as_json(error: ConfigError, file: Path) -> dict[str, object]:
    """Errors of a pipeline file for programs, one per line of the error."""
    problems = []
    for line in error.what.split("\n"):
        match = _PROBLEM.fullmatch(line)
        problems.append(
            {"line": None, "column": None, "option": None, "text": line}
            if match is None
            else {
                "line": int(match["line"]),
                "column": int(match["column"]),
                "option": match["option"],
                "text": match["text"],
            }
        )
    return {"ok": False, "file": str(file), "problems": problems, "why": error.why, "do": error.do}


def run_cases(
    file: File,
    cases: Annotated[
        Path | None,
        typer.Option(help="Test file. Default: FILE with .test.yaml.", metavar="FILE", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--case", help="Run only this case; repeatable.", metavar="NAME", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the test cases of a pipeline: input records, and the expected rows of each sink and dead letters.

    No node is needed: cases contain the data of lookups, and the output of sinks is compared. Differences are printed
    as a diff, expected rows with -, actual rows with +. Exit status 1 if a case fails.
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
