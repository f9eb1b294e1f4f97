"""`penstock demo`: real telemetry from MQTT into a lake table, and the proof of delivery."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Commands
from penstock.cli.output import LiveTable, note, print_json, use_colour
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.demo.data import AbnormalSegment, Limits, Reading
    from penstock.demo.run import DemoDisplay, DemoResult, HopCounts
    from penstock.demo.stack import DemoOptions

__all__ = ["JsonDemoDisplay", "LineDemoDisplay", "LiveDemoDisplay", "app", "draw_png", "draw_text"]

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
    Exit status 1 if a record is missing or duplicated. `penstock demo plant` publishes live telemetry instead.
    """
    if chaos and attach:
        raise ConfigError(
            "--chaos and --attach exclude each other", why="--chaos kills the node", hint="use one of them"
        )
    try:
        from penstock.demo.run import run_demo
        from penstock.demo.stack import Addresses, DemoOptions
    except ImportError as error:
        raise ConfigError(
            f"the demo lacks a package: {error}",
            hint='pip install "penstock[all]", or make demo in a checkout',
        ) from error

    place = _directory(directory)
    options = DemoOptions(place, Addresses(broker, tube_master) if attach else None, chaos=chaos)
    with _display(as_json=as_json) as screen:
        screen.say(f"working in {place}")
        try:
            outcome = asyncio.run(_interruptible(run_demo(options, screen)))
        except asyncio.CancelledError:
            screen.say(f"stopped by SIGTERM; the results so far are in {place}")
            raise typer.Exit(128 + signal.SIGTERM) from None
    _report(outcome, options, as_json=as_json)
    if outcome.proof.holds and not keep:
        _tidy(options)
    raise typer.Exit(0 if outcome.proof.holds else 1)


PROGRESS_EVERY_S = 2.0


class _ProgressFilter:
    """Selects the progress that is printed: every few seconds, if it changed."""

    def __init__(self) -> None:
        self._printed_at = 0.0
        self._printed: list[tuple[str, int, int]] = []

    def is_due(self, rows: list[tuple[str, int, int]], *, at_once: bool) -> bool:
        """Return True if ``rows`` are to be printed, and store them."""
        now = time.monotonic()
        if rows == self._printed or not (at_once or now - self._printed_at >= PROGRESS_EVERY_S):
            return False
        self._printed_at, self._printed = now, rows
        return True


class LineDemoDisplay:
    """Prints lines with the seconds since the start to standard error, for logs and pipes."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._filter = _ProgressFilter()

    def say(self, text: str) -> None:
        note(_timed(self._start, text))

    def alarm(self, text: str) -> None:
        self.say(f"ALARM  {text}")

    def show(self, hops: HopCounts, *, at_once: bool = False) -> None:
        rows = hops.rows()
        if self._filter.is_due(rows, at_once=at_once):
            self.say(", ".join(f"{name} {count}" + (f" (lag {lag})" if lag else "") for name, count, lag in rows))


class JsonDemoDisplay:
    """Prints each event as a line of JSON; the result of the demo follows them."""

    def __init__(self) -> None:
        self._filter = _ProgressFilter()

    def say(self, text: str) -> None:
        print_json({"event": "step", "text": text})

    def alarm(self, text: str) -> None:
        print_json({"event": "alarm", "text": text})

    def show(self, hops: HopCounts, *, at_once: bool = False) -> None:
        rows = hops.rows()
        if self._filter.is_due(rows, at_once=at_once):
            print_json({"event": "progress", "hops": {name: {"messages": n, "lag": lag} for name, n, lag in rows}})


class LiveDemoDisplay:
    """A live table of the hops; other events are printed above it."""

    def __init__(self, live: LiveTable) -> None:
        self._start = time.monotonic()
        self._live = live

    def say(self, text: str) -> None:
        self._live.print_line(_timed(self._start, text))

    def alarm(self, text: str) -> None:
        self._live.print_line(_timed(self._start, f"ALARM  {text}"), "bold red")

    def show(self, hops: HopCounts, *, at_once: bool = False) -> None:  # noqa: ARG002 - the table is redrawn at intervals
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        table.add_column("hop", min_width=24)
        table.add_column("messages", justify="right")
        table.add_column("lag", justify="right")
        table.add_column("", width=40)
        for name, count, lag in hops.rows():
            table.add_row(name, str(count), str(lag), ProgressBar(total=hops.total, completed=count, width=40))
        self._live.update(table)


def _timed(start: float, text: str) -> str:
    return f"[{time.monotonic() - start:5.1f} s] {text}"


@contextmanager
def _display(*, as_json: bool) -> Iterator[DemoDisplay]:
    """Select the display by the type of output."""
    if as_json:
        yield JsonDemoDisplay()
    elif use_colour(sys.stderr):
        with LiveTable(redraws_per_s=8) as live:
            yield LiveDemoDisplay(live)
    else:
        yield LineDemoDisplay()


async def _interruptible(work: Coroutine[Any, Any, DemoResult]) -> DemoResult:
    """Run ``work``; SIGTERM cancels it like Ctrl-C, so that its child processes end with it."""
    task = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _directory(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    try:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise ConfigError(f"--dir {str(given)!r} is not an empty directory", option="dir", hint="use a new one")
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--dir {str(given)!r} cannot be created: {error.strerror}",
            option="dir",
            hint="use a directory that this user may write to",
        ) from error
    return given.resolve()


def _report(outcome: DemoResult, options: DemoOptions, *, as_json: bool) -> None:
    from penstock.demo.proof import last_line

    plot = options.directory / "flow.png"
    text = ""
    try:
        draw_png(plot, outcome.readings, outcome.limits, outcome.segments)
        if not as_json:
            text = draw_text(outcome.readings, outcome.segments, width=_width())
    except ImportError as error:
        note(f'no plot: {error} (pip install "penstock[plot]")')
    if as_json:
        print_json(last_line(outcome.proof, outcome.segments, outcome.seconds))
        return
    sys.stdout.write(_account(outcome) + f"\n{text}\n{_where(outcome, plot)}")
    sys.stdout.flush()


def _width() -> int:
    return min(shutil.get_terminal_size().columns, PLOT_WIDTH)


def _account(outcome: DemoResult) -> str:
    """Return the counts, the checks and the segments as text."""
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
    verdict = "All checks passed." if outcome.proof.holds else "Some checks failed: see the lines marked FAIL."
    return (
        f"{verdict} ({outcome.seconds:.1f} s)\n\n"
        f"  table  {outcome.table}\n"
        f"  plot   {plot}\n"
        f"  query  {shlex.join([sys.executable, '-c', query])}\n"
    )


def _tidy(options: DemoOptions) -> None:
    """Delete the node's data and the logs; keep the table, the ledger and the plot."""
    shutil.rmtree(options.directory / "node", ignore_errors=True)
    for name in ("node.log", "pipeline.log"):
        (options.directory / name).unlink(missing_ok=True)


COLOURS = {"low": "#c8553d", "high": "#7b4bb7"}
_PLOT_LINES = 16
LONGEST_STEP = timedelta(hours=1)
"""Readings farther apart than this are separated by a gap in the line."""


def draw_png(path: Path, readings: Sequence[Reading], limits: Limits, segments: Sequence[AbnormalSegment]) -> None:
    """Draw into the file at ``path``. Needs matplotlib (the extra ``plot``)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 4.5), layout="constrained")
    try:
        times, flows = _broken_at_gaps(readings)
        axes.plot(times, flows, color="#2a6f97", linewidth=0.9)
        axes.axhline(limits.low, color="#888888", linewidth=0.7, linestyle="--")
        axes.axhline(limits.high, color="#888888", linewidth=0.7, linestyle="--")
        pad = timedelta(hours=4)
        for segment in segments:
            start, end = _since_1970(segment.start - pad), _since_1970(segment.end + pad)
            axes.axvspan(start, end, color=COLOURS[segment.kind], alpha=0.25)
            label = f"{segment.kind} {segment.extreme:g}\n{segment.start:%d %b %H:%M}"
            above = segment.kind == "high"
            axes.annotate(
                label,
                (_since_1970(segment.start), segment.extreme),
                xytext=(6, 4 if above else 8),
                textcoords="offset points",
                fontsize=8,
                color=COLOURS[segment.kind],
            )
        axes.set_ylabel("flow, l/s")
        axes.set_ylim(0, 125)
        axes.set_title("Water flow of the branch, abnormal segments marked (UTC)")
        axes.xaxis_date()
        axes.grid(alpha=0.25)
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def draw_text(readings: Sequence[Reading], segments: Sequence[AbnormalSegment], *, width: int) -> str:
    """Draw with characters, ``width`` columns wide, without colours. Needs plotext (the extra ``plot``)."""
    import plotext

    ordered = sorted(readings)
    first = ordered[0].time
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _PLOT_LINES)
    flow = figure.signal([_days(r.time - first) for r in ordered], [r.flow for r in ordered], marker="braille")
    flow.lines()
    figure.draw(flow)
    for kind, marker in (("low", "v"), ("high", "^")):
        of_kind = [segment for segment in segments if segment.kind == kind]
        if of_kind:
            days = [_days(s.start - first) for s in of_kind]
            figure.draw(figure.signal(days, [s.extreme for s in of_kind], marker=marker))
    weeks = list(range(0, int(_days(ordered[-1].time - first)) + 1, 7))
    figure.ruler("x").ticks(weeks, [f"{first + timedelta(days=day):%d %b}" for day in weeks])
    figure.title("flow in l/s (v low, ^ high)")
    text: str = plotext.uncolorize(str(figure.build()))
    figure.clear()
    return text


def _days(span: timedelta) -> float:
    return span / timedelta(days=1)


def _since_1970(time: datetime) -> float:
    """Convert to days, as in matplotlib."""
    return _days(time - datetime(1970, 1, 1, tzinfo=UTC))


def _broken_at_gaps(readings: Sequence[Reading]) -> tuple[list[float], list[float]]:
    """Return days since 1970 and flows, with a NaN for each gap in the data."""
    times: list[float] = []
    flows: list[float] = []
    previous = None
    for taken_at, flow in sorted(readings):
        if previous is not None and taken_at - previous > LONGEST_STEP:
            times.append(_since_1970(previous + LONGEST_STEP / 2))
            flows.append(float("nan"))
        times.append(_since_1970(taken_at))
        flows.append(flow)
        previous = taken_at
    return times, flows
