"""`penstock demo`: real telemetry from MQTT into a lake table, and the proof of delivery."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Commands
from penstock.cli.output import note, print_json, use_colour
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.demo.stack import DemoOptions
    from penstock.demo.story import DemoResult

__all__ = ["app"]

app = Commands()

PLOT_WIDTH = 110


@app.add("penstock demo", "penstock demo --chaos --keep --dir demo")
def demo(
    attach: Annotated[
        bool,
        typer.Option(
            "--attach",
            help="Use a running node with the rule of examples/water/penstock.yaml: --broker, --tube-master.",
        ),
    ] = False,
    broker: Annotated[
        str, typer.Option(envvar="PENSTOCK_BROKER", metavar="URL", help="With --attach: MQTT broker of the node.")
    ] = "mqtt://127.0.0.1:1883",
    tube_master: Annotated[
        str,
        typer.Option(
            envvar="PENSTOCK_TUBE_MASTER", metavar="HOST:PORT", help="With --attach: TubeMQ master of the node."
        ),
    ] = "127.0.0.1:8715",
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Kill the Spark driver and the node (SIGKILL) during the run.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the data of the node and the logs.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Working directory, empty or new. Default: a temporary one.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON lines; the last line is the result.")
    ] = False,
) -> None:
    """Send 1,268 real measurements through MQTT, TubeMQ and Spark into a lake table, with alarms in the state store.

    One message is malformed and one is late. At the end the log, the table, the ledger and the alarms are compared.
    Exit status 1 if a record is missing or duplicated.
    """
    if chaos and attach:
        raise ConfigError("--chaos and --attach exclude each other", why="--chaos kills the node", do="use one of them")
    try:
        from penstock.demo.stack import Addresses, DemoOptions
        from penstock.demo.story import tell
    except ImportError as error:
        raise ConfigError(
            f"the demo lacks a package: {error}",
            do='pip install ".[all]" in a clone of penstock, or make demo in a checkout',
        ) from error
    from penstock.demo.progress import display

    place = _directory(directory)
    options = DemoOptions(place, Addresses(broker, tube_master) if attach else None, chaos=chaos)
    with display(as_json=as_json) as screen:
        screen.say(f"working in {place}")
        try:
            outcome = asyncio.run(_interruptible(tell(options, screen)))
        except asyncio.CancelledError:
            screen.say(f"stopped by SIGTERM; what there is so far is in {place}")
            raise typer.Exit(128 + signal.SIGTERM) from None
    _report(outcome, options, as_json=as_json)
    if outcome.proof.holds and not keep:
        _tidy(options)
    raise typer.Exit(0 if outcome.proof.holds else 1)


async def _interruptible(work: Coroutine[Any, Any, DemoResult]) -> DemoResult:
    """As ``work``, cancelled by SIGTERM as it is by Ctrl-C: what it started must not outlive it."""
    task = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _directory(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    try:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise ConfigError(f"--dir {str(given)!r} is not an empty directory", option="dir", do="name a new one")
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--dir {str(given)!r} cannot be made: {error.strerror}",
            option="dir",
            do="name a directory that this user may write",
        ) from error
    return given.resolve()


def _report(outcome: DemoResult, options: DemoOptions, *, as_json: bool) -> None:
    from penstock.demo.plot import draw_png, draw_text
    from penstock.demo.proof import last_line

    plot = options.directory / "flow.png"
    text = ""
    try:
        draw_png(plot, outcome.readings, outcome.limits, outcome.segments)
        if not as_json:
            text = draw_text(outcome.readings, outcome.segments, width=_width())
    except ImportError as error:
        note(f'no plot: {error} (pip install ".[console]" in a clone of penstock)')
    if as_json:
        print_json(last_line(outcome.proof, outcome.segments, outcome.seconds))
        return
    sys.stdout.write(_account(outcome) + f"\n{text}\n{_where(outcome, plot)}")
    sys.stdout.flush()


def _width() -> int:
    return min(shutil.get_terminal_size().columns, PLOT_WIDTH)


def _account(outcome: DemoResult) -> str:
    """The counts, the checks and the segments, for people."""
    counts = outcome.proof.counts
    colour = use_colour(sys.stdout)
    lines = ["", "The proof, read from the log, the table, the ledger and the state store:", ""]
    lines += [f"  {name.replace('_', ' '):<14}{count:>6}" for name, count in counts.items()]
    lines.append("")
    for check in outcome.proof.checks:
        mark = "ok  " if check.holds else "FAIL"
        if colour:
            mark = f"\x1b[{32 if check.holds else 31}m{mark}\x1b[0m"
        lines.append(f"  {mark} {check.claim}" + ("" if check.holds else f" ({check.found})"))
    lines += ["", "Abnormal segments (UTC):"]
    for segment in outcome.segments:
        extreme = "lowest" if segment.kind == "low" else "highest"
        lines.append(
            f"  {segment.kind:<5}{segment.start:%Y-%m-%d %H:%M} to {segment.end:%Y-%m-%d %H:%M}"
            f"{segment.readings:>4} readings, {extreme} {segment.extreme:g} l/s"
        )
    return "\n".join(lines)


def _where(outcome: DemoResult, plot: Path) -> str:
    query = (
        "from penstock.spark import session; from penstock.pipelines.sinks.table import read; "
        f'read(session("query"), {json.dumps(str(outcome.table))}).groupBy("abnormal").count().show()'
    )
    verdict = "Everything adds up." if outcome.proof.holds else "SOMETHING IS OFF: see the lines marked FAIL."
    return (
        f"{verdict} ({outcome.seconds:.1f} s)\n\n"
        f"  table  {outcome.table}\n"
        f"  plot   {plot}\n"
        f"  query  {shlex.join([sys.executable, '-c', query])}\n"
    )


def _tidy(options: DemoOptions) -> None:
    """Leave the table, the ledger and the plot; the node's data and the logs have done their work."""
    shutil.rmtree(options.directory / "node", ignore_errors=True)
    for name in ("node.log", "pipeline.log"):
        (options.directory / name).unlink(missing_ok=True)
