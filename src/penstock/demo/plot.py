"""The flow over time with its abnormal segments: as a PNG, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.demo.data import Limits, Reading
from penstock.demo.segments import AbnormalSegment

__all__ = ["draw_png", "draw_text"]

COLOURS = {"low": "#c8553d", "high": "#7b4bb7"}
LONGEST_STEP = timedelta(hours=1)
"""Readings farther apart than this are a gap, and the line is broken there."""


def draw_png(path: Path, readings: Sequence[Reading], limits: Limits, segments: Sequence[AbnormalSegment]) -> None:
    """Draw into the file at ``path``. Needs matplotlib (the extra ``console``)."""
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


def draw_text(readings: Sequence[Reading], segments: Sequence[AbnormalSegment], *, width: int, height: int = 16) -> str:
    """The same in characters, ``width`` columns wide, without colours. Needs plotext (the extra ``console``)."""
    import plotext

    ordered = sorted(readings)
    first = ordered[0].time
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
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
    """Days, which is how matplotlib counts dates."""
    return _days(time - datetime(1970, 1, 1, tzinfo=UTC))


def _broken_at_gaps(readings: Sequence[Reading]) -> tuple[list[float], list[float]]:
    """Days since 1970 and flows, with a NaN where the data has a gap."""
    times: list[float] = []
    flows: list[float] = []
    previous = None
    for time, flow in sorted(readings):
        if previous is not None and time - previous > LONGEST_STEP:
            times.append(_since_1970(previous + LONGEST_STEP / 2))
            flows.append(float("nan"))
        times.append(_since_1970(time))
        flows.append(flow)
        previous = time
    return times, flows
