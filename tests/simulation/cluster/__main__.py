"""Simulate two nodes with seeds: ``python -m tests.simulation.cluster [--whole] [NUMBER | FIRST-LAST]``."""

from __future__ import annotations

import sys

from tests.simulation.__main__ import seeds
from tests.simulation.cluster import mqtt_run, run
from tests.simulation.run import processes

if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--whole"]
    report = mqtt_run.report if "--whole" in sys.argv else run.report
    with processes() as pool:
        sys.exit(not report(seeds(arguments[0] if arguments else "100"), pool))
