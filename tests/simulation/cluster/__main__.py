"""Simulate two nodes with seeds: ``python -m tests.simulation.cluster [--whole | --loading] [NUMBER | FIRST-LAST]``."""

from __future__ import annotations

import sys

from tests.simulation.__main__ import seeds
from tests.simulation.cluster.mqtt_run import TWO_WHOLE_NODES
from tests.simulation.cluster.run import TWO_NODES
from tests.simulation.cluster.snapshot_run import LOADING_NODES
from tests.simulation.run import processes

KINDS = {"--whole": TWO_WHOLE_NODES, "--loading": LOADING_NODES}

if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument not in KINDS]
    simulation = next((KINDS[argument] for argument in sys.argv[1:] if argument in KINDS), TWO_NODES)
    with processes() as pool:
        sys.exit(not simulation.report(seeds(arguments[0] if arguments else "100"), pool))
