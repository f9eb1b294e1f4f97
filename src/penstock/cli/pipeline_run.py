"""`penstock pipeline run` and `stop`."""

from __future__ import annotations

import re
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import note, print_json
from penstock.cli.pipeline_books import File, Into, Json, StateDir, state_of
from penstock.cli.pipeline_display import display
from penstock.errors import ConfigError

__all__ = ["options_of_spark", "run", "stop"]

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_ADDRESS = re.compile(r"(?P<host>\[[^\]]+\]|[^:\s]+):(?P<port>\d{1,5})")

Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option of Spark's; repeatable.", show_default=False),
]


def run(
    file: File,
    spark_master: Annotated[
        str,
        typer.Option(
            help="Spark's master: local[N], spark://HOST:PORT, yarn; submitted: that of spark-submit.", metavar="MASTER"
        ),
    ] = "local[2]",
    conf: Conf = None,
    state_dir: StateDir = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", help="Replay from this place on; see above.", metavar="PLACE", show_default=False),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("--to", help="Replay up to this place, without it.", metavar="PLACE", show_default=False),
    ] = None,
    into: Into = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="The sinks that are not tables, too, where they are: needs the run to be stopped."),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", "--available-now", help="Process what the log holds now, then end.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(help="How long to wait for the lease that another run holds; inf: for ever.", metavar="SECONDS"),
    ] = 60.0,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Fail at once where another run holds the lease; as --wait 0.")
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(help="Serve metrics for Prometheus there while it runs.", metavar="HOST:PORT", show_default=False),
    ] = None,
    progress: Annotated[
        float | None,
        typer.Option(
            help="How often to tell of progress; 0: never. Default: 1 on a terminal, else 10.",
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a pipeline until it is told to stop.

    SIGTERM, Ctrl-C and `penstock pipeline stop` end it between two batches, with exit status 0; a second signal ends it
    at once.

    One run at a time: it holds a lease in the state store, and everything it writes there is fenced with it. A second
    run says who holds the lease, and waits for it.

    With --from, --to and --into it replays a stretch of the log into new tables beside the run, and ends. A place is a
    time at which the tube took records (2024-05-01, 2024-05-01T06:00Z, ms since 1970), offsets as JSON, earliest or
    latest.
    """
    from penstock.pipelines.model import load

    pipeline = load(file)
    spark_conf, address = options_of_spark(conf or []), _address(metrics)
    try:
        from penstock.pipelines.running.run import Options
        from penstock.pipelines.running.run import run as run_pipeline
    except ImportError as error:
        raise ConfigError(
            f"Spark is not installed: {error}", do='pip install "penstock[spark]" (and [java] where Java is missing)'
        ) from error

    state, lease, span = state_of(pipeline.name, state_dir), None, None
    if into is not None:
        from penstock.pipelines.state.replay import plan_replay

        if state_dir is not None:
            raise ConfigError(
                "--state-dir and --into are given", option="--into", do="leave --state-dir out: a replay has its own"
            )
        pipeline, span, state, lease, left_out = plan_replay(pipeline, into, begin, end, live=live)
        once = True
        if left_out and not as_json:
            note(f"pipeline {pipeline.name}: replay without {', '.join(left_out)}, which others look at (--live)")
    elif begin is not None or end is not None or live:
        raise ConfigError(
            "a replay needs a target of its own",
            option="--into",
            why="the tables of the pipeline have these records already",
            do="name a new directory with --into",
        )
    stop = _stop_on_signals()
    with display(as_json=as_json) as screen:
        run_pipeline(
            pipeline,
            state=state,
            options=Options(
                spark_master=spark_master,
                spark_conf=spark_conf,
                available_now=once,
                wait_s=0.0 if no_wait else wait,
                progress_s=screen.progress_s if progress is None else progress,
                metrics=address,
                span=span,
                lease=lease,
            ),
            emit=screen.tell,
            stop=stop,
        )


def stop(
    which: Annotated[
        str,
        typer.Argument(help="The pipeline file, or the name of a pipeline.", metavar="FILE|NAME", show_default=False),
    ],
    broker: Annotated[
        str,
        typer.Option(
            envvar="PENSTOCK_BROKER", metavar="URL", help="With a name: the broker of the pipeline's state store."
        ),
    ] = "mqtt://127.0.0.1:1883",
    timeout: Annotated[
        float, typer.Option(help="How long to wait until it has finished its batches.", metavar="SECONDS")
    ] = 120.0,
    as_json: Json = False,
) -> None:
    """Stop the run of a pipeline, wherever it runs: it finishes its batches, gives the lease back and exits with 0.

    The request goes through the state store. Exit status 0 when the run has stopped, also where none was running; 1
    when it ended otherwise, or not in time.
    """
    from penstock.pipelines.store import control

    name = which
    if not _NAME.fullmatch(which) or Path(which).exists():
        from penstock.pipelines.model import load

        pipeline = load(which)
        name, broker = pipeline.name, pipeline.statestore.broker

    def told(holder: control.Holder) -> None:
        if not as_json:
            note(f"pipeline {name}: asked {holder} to stop")

    stopped = control.stop_run(broker, name, timeout_s=timeout, answer_s=_ANSWER_S, told=told)
    if as_json:
        print_json({"pipeline": name, "run": stopped.run, "stopped": stopped.clean, "why": stopped.why})
    elif stopped.run is None:
        sys.stdout.write(f"pipeline {name}: no run holds the lease\n")
    elif stopped.clean:
        sys.stdout.write(f"pipeline {name}: run {stopped.run} has stopped\n")
    else:
        sys.stdout.write(f"pipeline {name}: run {stopped.run} has ended, but not because it was asked: {stopped.why}\n")
    if not stopped.clean:
        raise typer.Exit(1)


_ANSWER_S = 10.0


def options_of_spark(given: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` pairs as Spark's options."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise ConfigError(
                f"--conf {text!r} is not an option of Spark's", option="conf", do="write spark.NAME=VALUE"
            )
        options[name] = value
    return options


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(
            f"--metrics {text!r} is not HOST:PORT", option="metrics", do="write an address such as 127.0.0.1:9108"
        )
    return match["host"].strip("[]"), int(match["port"])


def _stop_on_signals() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one ends the process as usual."""
    stop = threading.Event()

    def handle(number: int, _frame: Any) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop
