from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from penstock.cli.demo import draw_png, draw_text
from penstock.demo import data
from penstock.demo.data import expected_segments

READINGS = data.read(data.example("water-flow.csv"))
LIMITS = data.limits(READINGS)
SEGMENTS = expected_segments(READINGS, LIMITS, timedelta(hours=3))


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "flow.png"
    draw_png(path, READINGS, LIMITS, SEGMENTS)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_text_fits_the_width_and_marks_the_segments() -> None:
    text = draw_text(READINGS, SEGMENTS, width=70)
    assert max(map(len, text.splitlines())) <= 70
    assert "\x1b" not in text
    plot = text.splitlines()[1:]
    assert sum(line.count("v") for line in plot) == 3
    assert sum(line.count("^") for line in plot) == 1
