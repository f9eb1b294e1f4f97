"""`penstock pipeline run`, `stop` and `warm-up`."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Json, Yes, duration_option
from penstock.cli.output import note, print_json
from penstock.cli.pipeline.apply import agreed, file_to_run
from penstock.cli.pipeline.completion import complete_file_or_running_name
from penstock.cli.pipeline.display import display
from penstock.cli.pipeline.options import (
    Conf,
    Files,
    Into,
    Metrics,
    Once,
    StateDir,
    Traces,
    needs_spark,
    options_of_spark,
    pipeline_files,
    run_of,
    state_of,
)
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.pipelines.run.run import RunOptions
    from penstock.pipelines.spec.pipeline import Pipeline
    from penstock.pipelines.state_dir.replay import Copies, Replay
    from penstock.pipelines.state_dir.versions import PipelineFile
    from penstock.spark.files.object_storage import StoragePath

__all__ = ["run", "stop", "warm_up"]

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_ADDRESS = re.compile(r"(?P<host>\[[^\]]+\]|[^:\s]+):(?P<port>\d{1,5})")

SparkMaster = Annotated[
    str,
    typer.Option(
        help="Spark's master: local[N], spark://HOST:PORT, yarn; submitted: that of spark-submit.", metavar="MASTER"
    ),
]
Begin = Annotated[
    str | None,
    typer.Option("--from", help="Start of a replay.", metavar="OFFSET", show_default=False),
]
End = Annotated[
    str | None, typer.Option("--to", help="End of a replay, exclusive.", metavar="OFFSET", show_default=False)
]
Live = Annotated[
    bool,
    typer.Option("--live", help="Replay into sinks that are not tables as well; the pipeline must not run."),
]
Wait = Annotated[
    float,
    duration_option(text="Wait this long for the lease of another run.", default="60s", or_forever=True),
]
NoWait = Annotated[bool, typer.Option("--no-wait", "-n", help="Fail immediately if another run holds the lease.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the Java stack of each failure of a query.")]
ProgressEvery = Annotated[
    float | None,
    duration_option(text="Interval of progress reports; 0 for none. Default: 1s on a terminal, otherwise 10s."),
]


def run(
    files: Files,
    spark_master: SparkMaster = "local[2]",
    conf: Conf = None,
    state_dir: StateDir = None,
    begin: Begin = None,
    end: End = None,
    into: Into = None,
    live: Live = False,
    once: Once = False,
    wait: Wait = 60.0,
    no_wait: NoWait = False,
    metrics: Metrics = None,
    traces: Traces = None,
    progress: ProgressEvery = None,
    debug: Debug = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Run a pipeline until it is stopped.

    SIGTERM, Ctrl-C and `penstock pipeline stop` stop it after the batches in progress, with exit status 0; a second
    signal stops it immediately.

    A pipeline has one run at a time: the run holds a lease in the state store, which fences all its writes to the state
    store. A second run waits for the lease.

    Several files or a directory run in one process with one Spark driver. A pipeline that is refused or fails does not
    affect the others; the exit status is then 1. --state-dir is the directory that contains their state directories.

    With --from, --to and --into it replays a part of the log into new tables, and exits. OFFSET is a time at which
    TubeMQ stored records (2024-05-01, 2024-05-01T06:00Z, ms since 1970), offsets as JSON, earliest or latest.
    """
    from penstock.pipelines.spec.loader import load

    spark_conf, address = options_of_spark(conf or []), _address(metrics)
    if traces is not None:
        _check_traces(traces)
    if len(files) > 1 or files[0].is_dir():
        with needs_spark():
            from penstock.pipelines.run.run import RunOptions
        _refuse_for_several({"--into": into, "--from": begin, "--to": end, "--live": live}, spark_master)
        options = RunOptions(
            spark_master=spark_master,
            spark_conf=spark_conf,
            available_now=once,
            wait_s=0.0 if no_wait else wait,
            metrics=address,
            traces=traces,
            debug=debug,
        )
        _run_several(pipeline_files(files), state_dir, options, progress, yes=yes, as_json=as_json)
        return
    pipeline = load(files[0])
    replay = _replay(pipeline, state_dir, into, begin, end, live=live)
    version: PipelineFile | None = None
    warnings: tuple[str, ...]
    if replay is None:
        state = state_of(pipeline.name, state_dir)
        version, pipeline, warnings = file_to_run(files[0], pipeline, state)
        new_tables = _ask_about_changes(pipeline, state, yes=yes)
        running = pipeline
    else:
        warnings, new_tables = _warnings_of(pipeline, replay), yes
        running, state = replay.pipeline, replay.state
    with needs_spark():
        from penstock.pipelines.run.driver import jars_of, start_java_in_thread

        # Java needs seconds to start, as do the following imports and the checks of the run.
        java = start_java_in_thread(running.name, spark_master, spark_conf, **jars_of(running, state))

        from penstock.pipelines.run.run import RunOptions
        from penstock.pipelines.run.run import run as run_pipeline

    if replay is not None and replay.left_out and not as_json:
        left_out = ", ".join(replay.left_out)
        note(f"pipeline {pipeline.name}: replay without {left_out}, which other systems read (--live)")
    stop = _stop_on_signals()
    with display(as_json=as_json) as screen:
        options = RunOptions(
            spark_master=spark_master,
            spark_conf=spark_conf,
            available_now=once or replay is not None,
            wait_s=0.0 if no_wait else wait,
            progress_s=screen.progress_s if progress is None else progress,
            metrics=address,
            traces=traces,
            span=None if replay is None else replay.span,
            lease=None if replay is None else replay.lease,
            warnings=warnings,
            redriven={} if replay is None else _redriven(pipeline),
            debug=debug,
            file=version,
            java=java,
            new_tables=new_tables,
        )
        run_pipeline(running, state=state, options=options, emit=screen.show_event, stop=stop)
    if screen.has_dead and not as_json:
        where = f" --into {shlex.quote(str(into))}" if into is not None else ""
        shown = f"list them: penstock pipeline dead-letter list {shlex.quote(str(files[0]))}{where}"
        kept = "they were only counted: add dead_letters to the file to keep them"
        note(f"some records could not be processed (dead letters); {kept if pipeline.dead_letters is None else shown}")


def _refuse_for_several(given: Mapping[str, object], spark_master: str) -> None:
    """Refuse options that have no meaning for several pipelines.

    Raises:
        ConfigError: an option is set, or the process was started by ``spark-submit``.
    """
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{option} needs a single pipeline", option=option, hint="name one file: a replay has one pipeline"
            )
    if spark_master == "submitted":
        raise ConfigError(
            "several pipelines cannot be submitted together", option="--spark-master", hint="submit each file"
        )


def _run_several(
    files: Sequence[Path],
    state_dir: str | None,
    options: RunOptions,
    progress: float | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Run the pipelines in ``files`` that are valid; exit status 1 if one of them is not, or fails."""
    from penstock.pipelines.run.application import Member, run_all
    from penstock.pipelines.spec.loader import load

    members: dict[str, Member] = {}
    written: dict[str, str] = {}
    refused: dict[str, PenstockError] = {}
    new_tables = False
    for file in files:
        try:
            pipeline = load(file)
            if pipeline.name in members:
                raise ConfigError(
                    f"{file}: another file has the name {pipeline.name!r}", option="name", hint="give it another name"
                )
            state = state_of(pipeline.name, state_dir, is_parent=True)
            version, pipeline, warnings = file_to_run(file, pipeline, state)
            paths = _tables_of_its_own(file, pipeline, written)
            # Each of the others has all its tables, or is refused.
            new_tables |= _ask_about_changes(pipeline, state, yes=yes)
            written |= paths
            members[pipeline.name] = Member(pipeline, state, version, warnings)
        except PenstockError as error:
            refused[str(file)] = error
    stop = _stop_on_signals()
    errors: Mapping[str, Exception] = {}
    with display(as_json=as_json, several=True) as screen:
        for name, refusal in refused.items():
            screen.show_event({"event": "failed", "pipeline": name, "error": str(refusal)})
        if members:
            progress_s = screen.progress_s if progress is None else progress
            options = replace(options, progress_s=progress_s, new_tables=new_tables)
            errors = run_all(list(members.values()), options=options, emit=screen.show_event, stop=stop)
    stopped = [name for name in members if name not in errors]
    if as_json:
        print_json({"event": "ended", "stopped": stopped, "failed": list(errors), "refused": list(refused)})
    else:
        ends = {"stopped": stopped, "failed": list(errors), "refused": list(refused)}
        note("; ".join(f"{len(names)} {word}: {', '.join(names)}" for word, names in ends.items() if names))
    for failure in errors.values():
        if not isinstance(failure, PenstockError):
            raise failure
    if errors or refused:
        raise typer.Exit(1)


def _tables_of_its_own(file: Path, pipeline: Pipeline, written: Mapping[str, str]) -> dict[str, str]:
    """Return the tables of ``pipeline``, by absolute path, with the words for errors about them.

    Raises:
        ConfigError: one of the paths is in ``written``, the tables of other pipelines of this process.
    """
    from penstock.pipelines.spec.pipeline import written_paths
    from penstock.pipelines.spec.values import place_of

    found: dict[str, str] = {}
    for path, what in written_paths(pipeline):
        place = place_of(path)
        if place in written:
            raise ConfigError(
                f"{file}: {what} has the path {path!r}, like {written[place]}",
                option="path",
                why="rows and dead letters of the two pipelines could not be told apart",
                hint="give each table a directory of its own",
            )
        found[place] = f"{what} of pipeline {pipeline.name!r}"
    return found


def _ask_about_changes(pipeline: Pipeline, state: StoragePath, *, yes: bool) -> bool:
    """Ask before a run that writes again what a sink with another name has written, or creates a table again; return
    True if the answer is yes.

    Raises:
        RefusedError: the answer is no, or there is no terminal to ask at.
    """
    from penstock.pipelines.ledger.plan_changes import changes

    return agreed(changes(pipeline, state) or (), yes=yes)


def _warnings_of(pipeline: Pipeline, replay: Replay) -> tuple[str, ...]:
    """Return the warnings before ``replay`` of ``pipeline``."""
    if pipeline.dead_letters is None:
        return ()
    from penstock.pipelines.ledger.dead_letters import warning_of_copies

    warning = warning_of_copies(pipeline.dead_letters.location, pipeline.inputs, replay.span)
    return () if warning is None else (warning,)


def _redriven(pipeline: Pipeline) -> Copies:
    """Return the redriven dead letters of ``pipeline`` and their copies."""
    from penstock.pipelines.ledger.dead_letters import redriven_copies

    return {} if pipeline.dead_letters is None else redriven_copies(pipeline.dead_letters.location)


def _replay(
    pipeline: Pipeline, state_dir: str | None, into: Path | None, begin: str | None, end: str | None, *, live: bool
) -> Replay | None:
    """Return the requested replay; None to run the pipeline itself."""
    from penstock.pipelines.state_dir.replay import plan_replay

    if into is None:
        if begin is not None or end is not None or live:
            raise ConfigError(
                "a replay needs a separate target",
                option="--into",
                why="the tables of the pipeline already have these records",
                hint="set a new directory with --into",
            )
        return None
    if state_dir is not None:
        raise ConfigError(
            "--state-dir and --into exclude each other", option="--into", hint="omit --state-dir: a replay has its own"
        )
    return plan_replay(pipeline, into, begin, end, live=live)


def warm_up(as_json: Json = False) -> None:
    """Make an archive of Spark's classes, with which Java starts faster.

    Run it once after the installation, and again after an update of penstock, Spark or Java: it starts a session of
    Spark and writes about 190 MB to the user's cache directory. All commands that start Spark on this machine use it.
    """
    from penstock.spark.environment.class_archive import make_archive

    with needs_spark():
        path, is_new = make_archive()
    if as_json:
        print_json({"archive": str(path), "made": is_new})
    else:
        sys.stdout.write(f"{path}{'' if is_new else ' exists already'}\n")


def stop(
    which: Annotated[
        str,
        typer.Argument(
            help="The pipeline file, or the name of a pipeline.",
            metavar="FILE|NAME",
            show_default=False,
            autocompletion=complete_file_or_running_name,
        ),
    ],
    broker: Annotated[
        str,
        typer.Option(
            envvar="PENSTOCK_BROKER", metavar="URL", help="With a name: MQTT broker of the pipeline's state store."
        ),
    ] = "mqtt://127.0.0.1:1883",
    into: Into = None,
    timeout: Annotated[float, duration_option(text="Wait this long for the run to stop.", default="2m")] = 120.0,
    as_json: Json = False,
) -> None:
    """Stop the run of a pipeline on any machine, after its batches in progress.

    The request goes through the state store. Exit status 0 if the run has stopped or none was running, 1 if it ended
    with an error or not in time. With --into (and a file): stop that replay.
    """
    from penstock.pipelines.run import lease
    from penstock.runtime.io.network import without_secret

    name = which
    if into is not None or not _NAME.fullmatch(which) or Path(which).exists():
        pipeline, _, name = run_of(Path(which), None, into)
        broker = pipeline.statestore.url

    def show_request(holder: lease.LeaseHolder) -> None:
        if not as_json:
            note(f"pipeline {name}: asked {holder} to stop")

    stopped = lease.stop_run(broker, name, timeout_s=timeout, answer_s=_ANSWER_S, on_requested=show_request)
    if as_json:
        print_json({"pipeline": name, "run": stopped.run, "stopped": stopped.clean, "why": stopped.why})
    elif stopped.run is None:
        sys.stdout.write(f"pipeline {name}: no run holds the lease\n")
        if not stopped.known:
            place = without_secret(broker)
            note(f"no pipeline {name} has ever run with the state store at {place}: check the name and the broker")
    elif stopped.clean:
        sys.stdout.write(f"pipeline {name}: run {stopped.run} has stopped\n")
    else:
        sys.stdout.write(f"pipeline {name}: run {stopped.run} ended for another reason: {stopped.why}\n")
    if not stopped.clean:
        raise typer.Exit(1)


_ANSWER_S = 10.0
_SHOW_CURSOR = "\x1b[?25h\n"


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(
            f"--metrics {text!r} is not HOST:PORT", option="metrics", hint="write an address such as 127.0.0.1:9108"
        )
    return match["host"].strip("[]"), int(match["port"])


def _check_traces(url: str) -> None:
    from penstock.node.config.tracing import needs_otel, otlp_endpoint

    try:
        otlp_endpoint(url)
    except ValueError as error:
        shown = "" if "@" in url else f" {url!r}"  # it may contain a password
        raise ConfigError(f"--traces{shown}: {error}", option="traces") from None
    with needs_otel("tracing"):
        import_module("penstock.runtime.observability.tracing")  # an error is reported before Spark starts


def _stop_on_signals() -> threading.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second one ends the process."""
    stop = threading.Event()

    def handle(number: int, _frame: Any) -> None:
        stop.set()
        signal.signal(number, end)

    def end(number: int, _frame: Any) -> None:
        if sys.stderr.isatty():
            # Show the cursor again, which the live table has hidden.
            sys.stderr.write(_SHOW_CURSOR)
            sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop
