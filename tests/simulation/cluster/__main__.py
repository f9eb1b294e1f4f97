"""Simulate two nodes with seeds: ``python -m tests.simulation.cluster [NUMBER | FIRST-LAST]``."""

from __future__ import annotations

import sys

from tests.simulation.__main__ import seeds
from tests.simulation.cluster.run import report
from tests.simulation.run import processes

if __name__ == "__main__":
    with processes() as pool:
        sys.exit(not report(seeds(sys.argv[1] if len(sys.argv) > 1 else "100"), pool))
