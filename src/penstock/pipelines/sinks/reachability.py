"""Check that the sinks of a pipeline can be written to, before Spark takes a minute to find out.

What will stay wrong (a topic that does not exist, a password, a file where a directory should be) is an error now. A
broker that does not answer may be back when there is something to send, and its query tries again: that is told.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import PenstockError, StorageError, UnavailableError
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.values import pieces
from penstock.spark.mqtt import reach as mqtt
from penstock.spark.tube import reach as tube
from penstock.spark.tube.sink_options import SinkOptions

__all__ = ["LOOK_S", "check_sinks"]

LOOK_S = 10.0
"""Seconds that a broker may take to answer."""


def check_sinks(pipeline: Pipeline) -> list[str]:
    """Look whether sinks can be written to; of what may be so later, words for people.

    Topics and brokers that come out of data are not known here.

    Raises:
        StorageError: a table, or that of the dead letters, has no place where it could be.
        PenstockError: a broker refuses: there is no such topic, or who the pipeline is may not write there.
    """
    for sink in pipeline.sinks:
        if sink.table is not None:
            _check_directory(f"sink {sink.name!r}", Path(sink.table.path))
    if pipeline.dead_letters is not None:
        _check_directory("dead_letters", Path(pipeline.dead_letters.path))
    doubts = [_doubt(pipeline, sink) for sink in pipeline.sinks]
    return [doubt for doubt in doubts if doubt is not None]


def _check_directory(whose: str, path: Path) -> None:
    """The directory itself is not made: a table begins with its first batch."""
    why = None
    try:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if not there.is_dir():
            why = f"{str(there)!r} is a file"
        elif not os.access(there, os.W_OK | os.X_OK):
            why = f"this user may not write to {str(there)!r}"
    except OSError as error:
        why = str(error.strerror)
    if why is not None:
        raise StorageError(
            f"{whose}: nothing can be written to {str(path)!r}",
            path=str(path),
            why=why,
            do="name another path in the pipeline file, or give this user the right to write there",
        )


def _doubt(pipeline: Pipeline, sink: Sink) -> str | None:
    """The reason why nothing can be written to ``sink`` at the moment."""
    try:
        if sink.tubemq is not None:
            named = {"topic": topic} if (topic := _fixed(sink.tubemq.topic)) is not None else {}
            tube.look(SinkOptions.parse(pipeline.tube_options(sink.tubemq) | named), LOOK_S)
        elif sink.mqtt is not None and sink.mqtt.broker not in (None, pipeline.statestore.broker):
            assert sink.mqtt.broker is not None
            mqtt.look(sink.mqtt.broker, LOOK_S)
    except UnavailableError as error:
        return f"sink {sink.name!r}: {error.what}; what is for it is tried again when it comes"
    except PenstockError as error:
        raise PenstockError(f"sink {sink.name!r}: {error.what}", why=error.why, do=error.do) from error
    return None


def _fixed(template: str) -> str | None:
    """The topic, where it is the same for all rows."""
    parts = pieces(template)
    return None if any(part.column for part in parts) else "".join(part.text for part in parts)
