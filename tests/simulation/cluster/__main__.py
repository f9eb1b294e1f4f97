"""Simulate two nodes with seeds: ``python -m tests.simulation.cluster [--whole] [NUMBER | FIRST-LAST]``."""

from __future__ import annotations

import sys

from tests.simulation.__main__ import seeds
from tests.simulation.cluster.mqtt_run import TWO_WHOLE_NODES
from tests.simulation.cluster.run import TWO_NODES
from tests.simulation.run import processes

if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--whole"]
    simulation = TWO_WHOLE_NODES if "--whole" in sys.argv else TWO_NODES
    with processes() as pool:
        sys.exit(not simulation.report(seeds(arguments[0] if arguments else "100"), pool))
