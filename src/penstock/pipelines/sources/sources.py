"""The sources of a pipeline as its queries use them: streams for each input, ranges read again, counts.

The offsets of a query are those of all its inputs in one mapping: stream -> partition -> position. The streams of the
only source have their own names (topics); those of others are ``<label>/<name>``. Where records of a source go several
ways to one sink, Spark reads them once for each and notes a position for each, so each way has a label: the name of
its source, and ``#2``, ``#3`` for further ways from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.sources.readers import (
    FilesSourceReader,
    Lag,
    QueryInput,
    RateSourceReader,
    SourceMeter,
    SourceReader,
    TubeSourceReader,
    query_of,
)
from penstock.pipelines.spec.pipeline import Pipeline, labels, plan
from penstock.pipelines.spec.sources import SOURCE, FilesSource, RateSource, Source, TubeOptions
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.layout import read_json, write_json
from penstock.pipelines.state_dir.replay import Span

__all__ = ["Sources", "reader_of"]


def reader_of(
    name: str, source: Source, state: Path, span: Span | None = None, *, group: str = "", headers: bool = True
) -> SourceReader:
    """Create the reader of one source; a replay reads a ``span``. ``group``: prefix of groups that show its progress.

    ``headers``: whether the rows keep all headers of a record, which dead letters are written with.
    """
    if isinstance(source, FilesSource):
        return FilesSourceReader(name, source, state, span)
    if isinstance(source, RateSource):
        return RateSourceReader(name, source, span)
    assert isinstance(source, TubeOptions)
    return TubeSourceReader(name, source, layout.starts(state), span, group=group, headers=headers)


class Sources:
    """The sources of ``pipeline``; its state directory ``state`` stores the start offsets of each query.

    With a ``span`` they end, at offsets that are resolved once and stored, too.
    """

    def __init__(self, pipeline: Pipeline, state: Path, span: Span | None = None) -> None:
        self._readers = {
            name: reader_of(
                name,
                source,
                state,
                span,
                group=f"pipeline-{pipeline.name}",
                headers=pipeline.dead_letters is not None,
            )
            for name, source in pipeline.inputs.items()
        }
        self._ways = {found.sink.name: found.ways for found in plan(pipeline)}
        self._state = state

    @property
    def doubts(self) -> list[str]:
        """Data that a replay may lack, found when it begins."""
        return [text for reader in self._readers.values() for text in reader.doubts]

    def check(self) -> None:
        """Check that all sources can be read.

        Raises:
            UnavailableError: no master answers.
            ConfigError: a topic or a directory does not exist, or a source does not support the replay's options.
        """
        for reader in self._readers.values():
            reader.check()

    def start(self, query: str) -> Offsets:
        """Return the start offsets of the query of the sink ``query``: resolved once and stored.

        A checkpoint stores where batches end, not where the first one starts. "earliest" would change its meaning as
        soon as retention deletes data, and the first batch could not be read or counted again.
        """
        path = layout.starts(self._state) / f"{query}.json"
        try:
            return dict(read_json(path))
        except FileNotFoundError:
            pass
        start: Offsets = {}
        places = {name: self._readers[name].start(self._way(query, name)) for name in self._names(query)}
        for name, label in self._labelled(query):
            start |= _named(label, places[name])
        write_json(path, start)
        return start

    def streams(self, spark: SparkSession, query: str) -> Callable[[str], DataFrame]:
        """The streams of ``query`` by the names of their sources.

        Inputs from the same source share a stream: each stream has a process of its own next to the driver.
        """
        start = self.start(query)
        made: dict[str, DataFrame] = {}

        def stream(name: str) -> DataFrame:
            if name not in made:
                made[name] = self._readers[name].stream(spark, self._way(query, name), _of(name, start))
            return made[name]

        return stream

    def batches(
        self, spark: SparkSession, query: str, start: Offsets, end: Offsets
    ) -> Callable[[str], DataFrame] | None:
        """As ``streams``, for the records in ``[start, end)``, the same each time; None if there are none.

        All inputs from a source are at the same offsets: they are one stream.
        """
        found = {
            name: self._readers[name].batch(spark, self._way(query, name), _of(name, start), _of(name, end))
            for name in self._names(query)
        }
        if all(rows is None for rows in found.values()):
            return None

        def batch(name: str) -> DataFrame:
            rows = found[name]
            # A source without records in this range still has its columns.
            return self._readers[name].empty(spark) if rows is None else rows

        return batch

    def count(self, query: str, start: Offsets, end: Offsets) -> int:
        """Number of records of all inputs in ``[start, end)``, counted by the sources."""
        return sum(
            self._readers[name].count(self._way(query, name), _of(label, start), _of(label, end))
            for name, label in self._labelled(query)
        )

    def meter(self, clock: Callable[[], int]) -> SourceMeter:
        """Measures how far queries are behind all their sources; ``clock`` gives ms since 1970."""
        meters = {name: reader.meter(clock) for name, reader in self._readers.items()}
        if list(meters) == [SOURCE]:
            return meters[SOURCE]
        return _Meters(meters, self._ways)

    def _names(self, query: str) -> list[str]:
        return list(dict.fromkeys(self._ways[query]))

    def _labelled(self, query: str) -> list[tuple[str, str]]:
        ways = self._ways[query]
        return list(zip(ways, labels(ways), strict=True))

    def _way(self, query: str, name: str) -> QueryInput:
        return QueryInput(query, name, self._state)


class _Meters:
    """Lag of queries with several sources: the sum of records, and the seconds of the slowest."""

    def __init__(self, meters: Mapping[str, SourceMeter], ways: Mapping[str, Sequence[str]]) -> None:
        self._meters = meters
        self._ways = ways

    def start(self) -> None:
        for meter in self._meters.values():
            meter.start()

    def request(self, ends: Mapping[str, Offsets]) -> None:
        for name, meter in self._meters.items():
            meter.request(self._ends_of(name, ends))

    def lag_of(self, sink: str) -> Lag | None:
        found = [self._meters[name].lag_of(sink) for name in dict.fromkeys(self._ways[query_of(sink)])]
        known = [lag for lag in found if lag is not None]
        if len(known) < len(found):
            return None
        seconds = [lag.seconds for lag in known]
        dated = [each for each in seconds if each is not None]
        return Lag(sum(lag.records for lag in known), max(dated) if len(dated) == len(seconds) else None)

    def close(self, ends: Mapping[str, Offsets]) -> None:
        for name, meter in self._meters.items():
            meter.close(self._ends_of(name, ends))

    def _ends_of(self, name: str, ends: Mapping[str, Offsets]) -> dict[str, Offsets]:
        return {sink: _of(name, end) for sink, end in ends.items() if name in self._ways[query_of(sink)]}


def _named(label: str, offsets: Offsets) -> Offsets:
    return offsets if label == SOURCE else {f"{label}/{stream}": places for stream, places in offsets.items()}


def _of(label: str, offsets: Offsets) -> Offsets:
    if label == SOURCE:
        return {stream: places for stream, places in offsets.items() if not stream.startswith(f"{SOURCE}#")}
    return {
        stream.removeprefix(f"{label}/"): places for stream, places in offsets.items() if stream.startswith(f"{label}/")
    }
