"""`penstock pipeline`: check and run pipeline files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import pipeline_books, pipeline_cases, pipeline_run, pipeline_submit
from penstock.cli.groups import command_group
from penstock.cli.output import print_json
from penstock.cli.pipeline_options import File, Json
from penstock.errors import ConfigError

__all__ = ["app"]

app = command_group("Check and run pipelines.")


_PROBLEM = re.compile(r".*?:(?P<line>\d+):(?P<column>\d+): (?:option '(?P<option>.*?)': )?(?P<text>.*)")


@app.command()
def validate(file: File, as_json: Json = False) -> None:
    """Check a pipeline file without Spark.

    Options, values, names, references, schemas, columns, and the step that a statement reads; a mistake is reported
    with line and column. SQL, and which columns come out of a sql step, are checked when the pipeline is run. Exit
    status 2 where the file cannot be used; with --json its problems are on standard output, too.
    """
    from penstock.pipelines.model import load
    from penstock.pipelines.model.plan import plan

    try:
        pipeline = load(file)
    except ConfigError as error:
        if not as_json:
            raise
        print_json(_as_json(error, file))
        raise typer.Exit(2) from None
    plans = plan(pipeline)
    if as_json:
        sinks = {p.sink.name: [step.name for step in p.steps] for p in plans}
        print_json({"ok": True, "file": str(file), "pipeline": pipeline.name, "sinks": sinks})
        return
    sys.stdout.write(f"{file}: pipeline {pipeline.name!r} is valid\n")
    for sink_plan in plans:
        chain = " -> ".join(["source", *(step.name for step in sink_plan.steps), sink_plan.sink.name])
        sys.stdout.write(f"  {chain}\n")


@app.command("plan")
def show_plan(
    file: File,
    svg: Annotated[
        bool, typer.Option("--svg", help="The graph as a picture: penstock pipeline plan FILE --svg > plan.svg.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a pipeline will do, without Spark.

    For each sink: its steps from the source on, what becomes of the records that do not go on, what the sink promises,
    and what a run that lost its lease can still do there. With --svg: its graph.
    """
    from penstock.pipelines.model import load
    from penstock.pipelines.model.describe import as_data, as_text
    from penstock.pipelines.model.picture import as_svg

    pipeline = load(file)
    if svg:
        sys.stdout.write(as_svg(pipeline))
        return
    if as_json:
        print_json(as_data(pipeline))
        return
    sys.stdout.write(as_text(pipeline))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from penstock.pipelines.model import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


app.command("test")(pipeline_cases.run_cases)
app.command()(pipeline_run.run)
app.command()(pipeline_run.stop)
app.command()(pipeline_submit.submit)
app.command()(pipeline_books.status)
app.command()(pipeline_books.reconcile)
app.add_typer(pipeline_books.dead, name="dead")


def _as_json(error: ConfigError, file: Path) -> dict[str, object]:
    """What is wrong with a pipeline file, for programs: each line of the error taken apart."""
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
