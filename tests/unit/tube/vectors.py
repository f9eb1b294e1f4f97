"""The recorded frames of tests/vectors/tubemq as rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "vectors" / "tubemq"


class Frame(NamedTuple):
    """One recorded frame; ``row`` is its whole line."""

    name: str
    direction: str
    serial: int
    data: bytes
    row: dict[str, Any]


def frames(*scenarios: str) -> list[Frame]:
    """Frames of the named scenarios (all of them without names), in the order in which they were recorded."""
    found = []
    for path in sorted(FOLDER.glob("*.jsonl")):
        if scenarios and path.stem not in scenarios:
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines[1:]:
            row = json.loads(line)
            found.append(Frame(row["name"], row["direction"], row["serial"], bytes.fromhex(row["hex"]), row))
    return found
