"""Simulate seeds, and stop at the first that breaks a rule: ``python -m tests.simulation [NUMBER | FIRST-LAST]``."""

from __future__ import annotations

import sys

from tests.simulation.run import processes, report


def seeds(text: str) -> range:
    """The seeds that ``text`` names."""
    first, given, last = text.partition("-")
    return range(int(first), int(last) + 1) if given else range(int(first))


if __name__ == "__main__":
    with processes() as pool:
        sys.exit(not report(seeds(sys.argv[1] if len(sys.argv) > 1 else "200"), pool))
