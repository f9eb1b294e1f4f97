"""`penstock pipeline`: check and run pipeline files."""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Annotated, Any

import typer

from penstock.cli import pipeline_books
from penstock.cli.output import note, print_json
from penstock.cli.pipeline_books import File, Json, StateDir, state_of
from penstock.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="Check and run pipelines.")


@app.command()
def validate(file: File, as_json: Json = False) -> None:
    """Check a pipeline file without Spark.

    Options, values, names, references, schemas, and the step that a statement reads; a mistake is reported with line
    and column. SQL and the columns that it names are checked when the pipeline is run.
    """
    from penstock.pipelines.model import load
    from penstock.pipelines.plan import plan

    pipeline = load(file)
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
def show_plan(file: File, as_json: Json = False) -> None:
    """Show what a pipeline will do, without Spark.

    For each sink: its steps from the source on, what becomes of the records that do not go on, what the sink promises,
    and what a run that lost its lease can still do there.
    """
    from penstock.pipelines.describe import as_data, as_text
    from penstock.pipelines.model import load

    pipeline = load(file)
    if as_json:
        print_json(as_data(pipeline))
        return
    sys.stdout.write(as_text(pipeline))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from penstock.pipelines.model import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


@app.command()
def run(
    file: File,
    spark_master: Annotated[
        str, typer.Option(help="Spark's master: local[N], spark://HOST:PORT, yarn ...", metavar="MASTER")
    ] = "local[2]",
    conf: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of Spark's; repeatable.", show_default=False),
    ] = None,
    state_dir: StateDir = None,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Process what the log holds now, then end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a pipeline until it is told to stop.

    SIGTERM and Ctrl-C end it between two batches, with exit status 0; a second one ends it at once.

    One run at a time: it holds a lease in the state store, and everything it writes there is fenced with it.
    """
    from penstock.pipelines.model import load

    pipeline = load(file)
    try:
        from penstock.pipelines.run import run as run_pipeline
    except ImportError as error:
        raise ConfigError(
            f"Spark is not installed: {error}", do='pip install "penstock[spark]" (and [java] where Java is missing)'
        ) from error

    stop = _stop_on_signals()
    emit = print_json if as_json else _tell
    run_pipeline(
        pipeline,
        state=state_of(pipeline.name, state_dir),
        spark_master=spark_master,
        spark_conf=_options(conf or []),
        available_now=available_now,
        emit=emit,
        stop=stop,
    )


app.command()(pipeline_books.status)
app.command()(pipeline_books.reconcile)
app.add_typer(pipeline_books.dead, name="dead")


def _options(given: list[str]) -> dict[str, str]:
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise ConfigError(
                f"--conf {text!r} is not an option of Spark's", option="conf", do="write spark.NAME=VALUE"
            )
        options[name] = value
    return options


def _stop_on_signals() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one ends the process as usual."""
    stop = threading.Event()

    def handle(number: int, _frame: Any) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


def _tell(event: dict[str, Any]) -> None:
    """An event of a run as a line for people."""
    match event["event"]:
        case "starting":
            note(f"pipeline {event['pipeline']}: starting Spark, state in {event['state_dir']}")
        case "started":
            note(f"pipeline {event['pipeline']}: running {', '.join(event['sinks'])}; lease {event['fencing_token']}")
            for prefix in event["not_fenced"]:
                note(f"{prefix}: this state store fences no prefixes; keys are fenced as they are written")
        case "batch":
            left = ", ".join(
                f"{event[name]} {name}" for name in ("dead", "filtered", "duplicates", "late") if event[name]
            )
            lag = "" if event["lag"] is None else f", lag {event['lag']}"
            sys.stdout.write(
                f"{event['sink']} batch {event['batch']}: {event['read']} read, {event['out']} out"
                f"{', ' + left if left else ''}{lag}\n"
            )
            sys.stdout.flush()
        case "rows":
            sys.stdout.writelines(f"{event['sink']}: {row}\n" for row in event["rows"])
            sys.stdout.flush()
        case "retry":
            note(f"{event['sink']}: trying again in {event['in_s']:g} s: {event['why']}")
        case "stopped":
            note(f"pipeline {event['pipeline']}: stopped")
