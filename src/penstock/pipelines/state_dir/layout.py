"""Paths inside the state directory of a pipeline, and the pipeline that owns it.

<state>/checkpoints/<sink>/             Spark's checkpoint of the sink's query
<state>/ledger/<sink>/<batch>.json      what became of the records of each batch
<state>/starts/<sink>.json              start offsets of each query, and the end offsets of a replay
<state>/files/<sink>-<source>.jsonl     which files a query has found, in order
<state>/clocks/<sink>-<source>.json     since when a source makes records
<state>/inbox/<source>/                 dead letters of files, put there to be read again
<state>/shapes/<sink>.json              what the checkpoint of the sink's query depends on
<state>/failures/<sink>.txt             Spark's last error of the sink's query, with its Java stacks
<state>/pipeline.json                   whose state it is
<state>/plan.json                       description of the last run's plan
<state>/replay.json                     what a replay was asked for
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.pipelines.state_dir.durable import create_json, read_json

__all__ = [
    "check_owner",
    "checkpoint",
    "claim",
    "clock",
    "failure",
    "file_log",
    "inbox",
    "ledger",
    "owner",
    "plan",
    "replay",
    "shape",
    "starts",
]


def checkpoint(state: Path, sink: str) -> Path:
    """Spark's checkpoint of the query of ``sink``."""
    return state / "checkpoints" / sink


def ledger(state: Path) -> Path:
    """Ledger entries of a query, one file per batch."""
    return state / "ledger"


def starts(state: Path) -> Path:
    """Start offsets of each query."""
    return state / "starts"


def file_log(state: Path, query: str, source: str) -> Path:
    """Files of ``source`` that ``query`` has found."""
    return state / "files" / f"{query}-{source}.jsonl"


def clock(state: Path, query: str, source: str) -> Path:
    """Time since which ``source`` generates records for ``query``."""
    return state / "clocks" / f"{query}-{source}.json"


def inbox(state: Path, source: str) -> Path:
    """Directory of dead letters from the files of ``source`` that are to be read again."""
    return state / "inbox" / source


def shape(state: Path, sink: str) -> Path:
    """Properties that the checkpoint of ``sink`` depends on."""
    return state / "shapes" / f"{sink}.json"


def failure(state: Path, sink: str) -> Path:
    """Last error of the query of ``sink``, with its Java stacks."""
    return state / "failures" / f"{sink}.txt"


def owner(state: Path) -> Path:
    """Name of the pipeline that owns the directory."""
    return state / "pipeline.json"


def plan(state: Path) -> Path:
    """Description of the last run's plan."""
    return state / "plan.json"


def replay(state: Path) -> Path:
    """Options of a replay."""
    return state / "replay.json"


def claim(state: Path, pipeline: str) -> None:
    """Make the directory ``state`` that of the pipeline ``pipeline``, if it is nobody's yet.

    Raises:
        ConfigError: it is another's.
    """
    create_json(owner(state), {"pipeline": pipeline})
    check_owner(state, pipeline)


def check_owner(state: Path, pipeline: str) -> None:
    """Refuse the directory ``state`` where it is known to be another pipeline's.

    Raises:
        ConfigError: it is.
    """
    try:
        found = read_json(owner(state))["pipeline"]
    except FileNotFoundError:
        return
    if found != pipeline:
        raise ConfigError(
            f"{str(state)!r} is the state directory of the pipeline {found!r}, not of {pipeline!r}",
            option="state-dir",
            why="it holds the checkpoints and the ledger of that pipeline",
            do=f"name another directory; or where this is that pipeline, call it {found!r} again in its file",
        )
