"""Sources without a broker: files of a directory, and records generated at a rate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.catalyst import make_thread_safe
from penstock.pipelines.sources.reader import Lag, QueryInput, query_of
from penstock.pipelines.sources.rows import source_rows
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.durable import read_json, write_json
from penstock.pipelines.state_dir.replay import Span
from penstock.spark import local_sources
from penstock.spark.files import source as files
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.source import FileLog, check_unchanged, count_records
from penstock.spark.tube.options import WITH_HEADERS
from penstock.spark.tube.source import spark_schema

if TYPE_CHECKING:
    from penstock.pipelines.spec.sources import FilesSource, RateSource
    from penstock.pipelines.state_dir.checkpoint import Offsets

__all__ = ["FilesSourceReader", "RateSourceReader"]


class FilesSourceReader:
    """Files of a directory under the name ``name``; ``state`` is the pipeline's state directory."""

    def __init__(self, name: str, source: FilesSource, state: Path, span: Span | None = None) -> None:
        self.doubts: list[str] = []
        self._span = span
        self._name = name
        self._source = source
        self._state = state
        self._inbox = layout.inbox(state, name)
        self._path = str(Path(source.path).absolute())

    def check(self) -> None:
        """Look whether the directory is there.

        Raises:
            ConfigError: it is not, is no Delta table where it should be, or a part of the files is asked for.
            StorageError: it may not be looked into.
        """
        _refuse_part(self._name, self._span)
        path = Path(self._path)
        if self._source.content == "delta":
            DeltaLog(path).check()
            return
        directory = path.parent if any(mark in path.name for mark in "*?[") else path
        if not directory.is_dir():
            raise ConfigError(
                f"the source {self._name!r} cannot read {str(directory)!r}: there is no such directory",
                option="path",
                do="make it, or correct the path (it is taken from the directory in which the run is started)",
            )
        if not os.access(directory, os.R_OK | os.X_OK):
            raise StorageError(
                f"the source {self._name!r} cannot read {str(directory)!r}",
                path=str(directory),
                why="this user may not look into it",
                do="give this user the right to, or start the run as another one",
            )

    def start(self, input_: QueryInput) -> Offsets:
        """Before the first file."""
        return {files.STREAM: {"0": 0}}

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Files as they come."""
        self._inbox.mkdir(parents=True, exist_ok=True)
        spark.dataSource.register(files.FilesDataSource)
        make_thread_safe(spark, files.FilesDataSource.name())
        options = {
            "path": self._path,
            "content": self._source.content,
            "skipLines": str(self._source.skip_lines),
            "changes": self._source.changes,
            "maxFiles": str(self._source.max_files),
            "inbox": str(self._inbox),
            "log": str(_log(input_)),
        }
        return self._rows(spark.readStream.format("penstock-files").options(**options).load())

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """The records of the files in ``[start, end)``."""
        first, last = _range(files.STREAM, start, end)
        if first == last:
            return None
        options = {"log": str(_log(input_)), "start": str(first), "end": str(last)}
        return self._rows(spark.read.format("penstock-files").options(**options).load())

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""
        return self._rows(spark.createDataFrame([], spark_schema(WITH_HEADERS)))

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """Count the records of those files by reading them.

        Raises:
            DataLossError: a file has changed.
        """
        entries = FileLog(_log(input_)).entries()[slice(*_range(files.STREAM, start, end))]
        for entry in entries:
            check_unchanged(entry)
        return sum(
            entry.records if entry.content == "letters" else count_records(entry.path, entry.content, entry.skip)
            for entry in entries
        )

    def meter(self, clock: Callable[[], int]) -> _FileMeter:
        """Measures what was found and not yet read."""
        return _FileMeter(lambda query: FileLog(_log(QueryInput(query, self._name, self._state))), clock)

    def _rows(self, records: DataFrame) -> DataFrame:
        return source_rows(self._name, self._source, records)


class RateSourceReader:
    """Records of the clock under the name ``name``."""

    def __init__(self, name: str, source: RateSource, span: Span | None = None) -> None:
        self.doubts: list[str] = []
        self._span = span
        self._name = name
        self._source = source

    def check(self) -> None:
        """There is always a clock."""
        _refuse_part(self._name, self._span)

    def start(self, input_: QueryInput) -> Offsets:
        """Before the first row."""
        return {local_sources.STREAM: {"0": 0}}

    def stream(self, spark: SparkSession, input_: QueryInput, start: Offsets) -> DataFrame:
        """Rows as they come due."""
        spark.dataSource.register(local_sources.RateDataSource)
        make_thread_safe(spark, local_sources.RateDataSource.name())
        return self._rows(spark.readStream.format("penstock-rate").options(**self._options(input_)).load())

    def batch(self, spark: SparkSession, input_: QueryInput, start: Offsets, end: Offsets) -> DataFrame | None:
        """The same rows again."""
        first, last = _range(local_sources.STREAM, start, end)
        if first == last:
            return None
        options = self._options(input_) | {"start": str(first), "end": str(last)}
        return self._rows(spark.read.format("penstock-rate").options(**options).load())

    def empty(self, spark: SparkSession) -> DataFrame:
        """Return no rows, with the same columns."""
        return self._rows(spark.createDataFrame([], spark_schema(WITH_HEADERS)))

    def count(self, input_: QueryInput, start: Offsets, end: Offsets) -> int:
        """The rows of the range."""
        first, last = _range(local_sources.STREAM, start, end)
        return last - first

    def meter(self, clock: Callable[[], int]) -> _NoMeter:
        """Nothing waits for a clock."""
        return _NoMeter()

    def _rows(self, records: DataFrame) -> DataFrame:
        return source_rows(self._name, self._source, records)

    def _options(self, input_: QueryInput) -> dict[str, str]:
        options = {"rowsPerSecond": str(self._source.rows_per_second), "startMs": str(_clock(input_))}
        return options if self._source.rows is None else options | {"rows": str(self._source.rows)}


def _clock(input_: QueryInput) -> int:
    """The instant, ms since 1970, from which the rows of ``way`` are counted: decided once and kept."""
    path = layout.clock(input_.directory, input_.query, input_.name)
    try:
        return int(read_json(path)["start_ms"])
    except FileNotFoundError:
        now = time.time_ns() // 1_000_000
        write_json(path, {"start_ms": now})
        return now


def _log(input_: QueryInput) -> Path:
    return layout.file_log(input_.directory, input_.query, input_.name)


def _range(stream: str, start: Offsets, end: Offsets) -> tuple[int, int]:
    # A source that has given nothing yet has no position.
    last = end.get(stream, {}).get("0", 0)
    return min(start.get(stream, {}).get("0", 0), last), last


class _NoMeter:
    """Of a source that nothing is ever behind."""

    def start(self) -> None:
        """Nothing to begin."""

    def ask(self, ends: Mapping[str, Offsets]) -> None:
        """Nothing to measure."""

    def of(self, sink: str) -> Lag | None:
        return Lag(0, 0.0)

    def end(self, ends: Mapping[str, Offsets]) -> None:
        """Nothing to end."""


class _FileMeter(_NoMeter):
    """Counts the records of files that were found and not read; the oldest file tells the seconds."""

    def __init__(self, log_of: Callable[[str], FileLog], clock: Callable[[], int]) -> None:
        self._log_of = cache(log_of)
        self._clock = clock
        self._found: dict[str, Lag] = {}

    def ask(self, ends: Mapping[str, Offsets]) -> None:
        for name, end in ends.items():
            waiting = self._log_of(query_of(name)).entries()[end.get(files.STREAM, {}).get("0", 0) :]
            oldest_ms = min((entry.mtime_ns // 1_000_000 for entry in waiting), default=self._clock())
            records = sum(entry.records for entry in waiting)
            self._found[name] = Lag(records, max(self._clock() - oldest_ms, 0) / 1000)

    def of(self, sink: str) -> Lag | None:
        return self._found.get(sink)

    def end(self, ends: Mapping[str, Offsets]) -> None:
        self.ask(ends)


def _refuse_part(name: str, span: Span | None) -> None:
    if span is not None and (span.begin, span.end) != ("earliest", "latest"):
        raise ConfigError(
            f"the source {name!r} cannot be replayed in part: it has no places in time",
            option="--from",
            do="leave --from and --to out, which replays all of it",
        )
