"""Draw the graph of a pipeline as a self-contained SVG.

Sources stand left, sinks right; each step as far right as its longest way from a source is long. A line that goes over
columns has a place of its own in each of them. Columns are sorted so that lines cross little: each box stands where the
boxes that it reads stand on the average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Final

from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.plan import plan, reads_of, sink_reads
from penstock.pipelines.spec.values import late_of, sink_letter

__all__ = ["as_svg"]

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _EDGE = 176, 46, 56, 18, 16
_TITLE = 30
_SVG: Final = "http://www.w3.org/2000/svg"
_LETTERS: Final = "dead letters"
_MOST = 24
"""Characters that fit into a box."""
_STYLE: Final = """
  text { font: 13px system-ui, sans-serif; fill: #1c2430; }
  .kind { font-size: 11px; fill: #5a6675; }
  .title { font-weight: 600; }
  rect { fill: #ffffff; stroke: #8793a3; rx: 6; }
  .page { fill: none; stroke: none; }
  .source rect { fill: #e8f1fb; stroke: #4a7fb5; }
  .sink rect { fill: #e9f6ec; stroke: #4c9a5e; }
  .letters rect { fill: #fdeeee; stroke: #b95c5c; }
  path { fill: none; stroke: #8793a3; }
  path.letters { stroke: #b95c5c; stroke-width: 2; stroke-dasharray: 4 3; }
  path.late { stroke: #a67c1a; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e9f0; } .kind { fill: #9aa7b8; }
    rect { fill: #212934; } .page { fill: #151a21; } .source rect { fill: #1c3148; }
    .sink rect { fill: #1b3a24; } .letters rect { fill: #452324; }
  }
"""


@dataclass(slots=True)
class _Box:
    """One thing of the picture. ``reads``: the names of boxes to its left, with the class of the line.

    A line that passes by has boxes of the look ``way`` on its way. ``makes_letters``: records may die there.
    """

    name: str
    kind: str
    look: str
    reads: dict[str, str] = field(default_factory=dict)
    makes_letters: bool = False
    column: int = 0
    row: int = 0

    @property
    def x(self) -> int:
        return _EDGE + self.column * (_WIDTH + _GAP_X)

    @property
    def y(self) -> int:
        return _EDGE + _TITLE + self.row * (_HEIGHT + _GAP_Y)


def as_svg(pipeline: Pipeline) -> str:
    """The graph: sources, steps, sinks, and where records go that do not go on."""
    boxes = _boxes(pipeline)
    _place(boxes)
    width = max(box.x for box in boxes.values()) + _WIDTH + _EDGE
    height = max(box.y for box in boxes.values()) + _HEIGHT + _EDGE
    title = escape(f"pipeline {pipeline.name}, every {pipeline.trigger}")
    lines = [
        f'<svg xmlns="{_SVG}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="{_EDGE}" y="{_EDGE + 12}">{title}</text>',
        *(_line(boxes[name], box, look) for box in boxes.values() for name, look in box.reads.items()),
        *(_drawn(box) for box in boxes.values() if box.look != "way"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _boxes(pipeline: Pipeline) -> dict[str, _Box]:
    """All boxes, those that are read before those that read them. Sinks may be called as steps are."""
    boxes = {name: _Box(name, source.format, "source") for name, source in pipeline.inputs.items()}
    for index, step in enumerate(pipeline.steps):
        boxes[step.name] = _Box(step.name, step.kind, "step", dict.fromkeys(reads_of(pipeline, index), ""))
    for sink in pipeline.sinks:
        late = late_of(sink.source or "")
        kind = sink.kind if sink.table is None else f"{sink.table.format} table"
        boxes[sink_letter(sink.name)] = _Box(
            sink.name, kind, "sink", {sink_reads(pipeline, sink): "" if late is None else "late"}
        )
    makes = {name for sink_plan in plan(pipeline) for name in sink_plan.makes_dead_letters}
    for name in makes:
        boxes[name].makes_letters = True
    if makes:
        kept = "counted, not kept" if pipeline.dead_letters is None else pipeline.dead_letters.path
        boxes[_LETTERS] = _Box(_LETTERS, kept, "letters", makes_letters=True)
    return boxes


def _place(boxes: dict[str, _Box]) -> None:
    for box in boxes.values():
        box.column = max((boxes[name].column for name in box.reads), default=-1) + 1
    last = max(box.column for box in boxes.values())
    for box in boxes.values():
        if box.look in ("sink", "letters"):
            box.column = last
    for box in list(boxes.values()):
        _lead_by(boxes, box)
    columns: dict[int, list[_Box]] = {}
    for box in boxes.values():
        columns.setdefault(box.column, []).append(box)
    for number in sorted(columns):
        members = columns[number]
        # Dead letters, which nothing leads to, stand below.
        members.sort(key=lambda box: (box.look == "letters", _mean(boxes, box)))
        for row, box in enumerate(members):
            box.row = row


def _lead_by(boxes: dict[str, _Box], box: _Box) -> None:
    """Give the lines to ``box`` a place in each column that they go over."""
    reads = {}
    for name, look in box.reads.items():
        before = name
        for column in range(boxes[name].column + 1, box.column):
            way = f"{name}|{box.look}|{box.name}|{column}"
            boxes[way] = _Box(way, "", "way", {before: look}, column=column)
            before = way
        reads[before] = look
    box.reads = reads


def _mean(boxes: Mapping[str, _Box], box: _Box) -> float:
    return sum(boxes[name].row for name in box.reads) / len(box.reads) if box.reads else 0.0


def _drawn(box: _Box) -> str:
    bottom = box.y + _HEIGHT
    letters = f'<path class="letters" d="M{box.x + 8} {bottom} H{box.x + _WIDTH - 8}"/>' if box.makes_letters else ""
    return (
        f'<g class="{box.look}"><title>{escape(f"{box.name}: {box.kind}")}</title>'
        f'<rect x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{_HEIGHT}"/>'
        f'<text x="{box.x + 10}" y="{box.y + 19}">{escape(_short(box.name))}</text>'
        f'<text class="kind" x="{box.x + 10}" y="{box.y + 36}">{escape(_short(box.kind))}</text>{letters}</g>'
    )


def _line(start: _Box, end: _Box, look: str) -> str:
    x, y, to_x, to_y = start.x + _WIDTH, start.y + _HEIGHT // 2, end.x, end.y + _HEIGHT // 2
    bend = _GAP_X // 2
    straight = f" H{to_x + _WIDTH}" if end.look == "way" else ""
    return f'<path class="{look}" d="M{x} {y} C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}{straight}"/>'


def _short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
