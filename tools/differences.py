"""Reference page of the differences from Mosquitto, from the cases of the differential test."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

__all__ = ["page"]


def page(note: str) -> str:
    """Return the page: a summary, then the differences by reason."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.interop.differential import load

    version, cases = load()
    differing = [case for case in cases if case.why is not None]
    alike = len(cases) - len(differing)
    words = (
        f"`tests/interop/test_differential.py` sends {len(cases)} sequences of valid and invalid packets to penstock"
        f" and to Mosquitto {version}, and compares the responses, closed connections and reason codes."
        f" {alike} results are equal. This page lists the other {len(differing)}, by reason."
    )
    lines = ["# Differences from Mosquitto", "", note, "", words, ""]
    for why, group in groupby(
        sorted(differing, key=lambda case: (case.why or "", case.name)), key=lambda case: case.why
    ):
        lines += [why or "", "", "| packets | penstock | Mosquitto |", "| --- | --- | --- |"]
        lines += [f"| {_cell(case.name)} | {_cell(case.penstock)} | {_cell(case.mosquitto)} |" for case in group]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
