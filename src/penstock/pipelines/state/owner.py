"""Whose state directory it is: two pipelines in one would go on from each other's checkpoints.

Each holds a lease of its own, so nothing else would keep them apart.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.pipelines.state import layout
from penstock.pipelines.state.durable import create_json, read_json

__all__ = ["check_owner", "claim"]


def claim(state: Path, pipeline: str) -> None:
    """Make the directory ``state`` that of the pipeline ``pipeline``, if it is nobody's yet.

    Raises:
        ConfigError: it is another's.
    """
    create_json(layout.owner(state), {"pipeline": pipeline})
    check_owner(state, pipeline)


def check_owner(state: Path, pipeline: str) -> None:
    """Refuse the directory ``state`` where it is known to be another pipeline's.

    Raises:
        ConfigError: it is.
    """
    try:
        owner = read_json(layout.owner(state))["pipeline"]
    except FileNotFoundError:
        return
    if owner != pipeline:
        raise ConfigError(
            f"{str(state)!r} is the state directory of the pipeline {owner!r}, not of {pipeline!r}",
            option="state-dir",
            why="it holds the checkpoints and the ledger of that pipeline",
            do=f"name another directory; or where this is that pipeline, call it {owner!r} again in its file",
        )
