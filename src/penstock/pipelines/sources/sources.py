"""The sources of a pipeline for its queries: streams of all inputs, rereading of ranges, counts.

The offsets of a query are those of all its inputs in one mapping: stream -> partition -> offset. Streams of a single
source have their own names (topics); otherwise they are named ``<label>/<name>``. If records of a source reach a sink
on several paths, Spark reads the source once for each path, with separate offsets, so each of these inputs has a label:
the name of its source, with ``#2``, ``#3`` for further inputs from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.sources.lag import Lag, SourceMeter, query_of
from penstock.pipelines.sources.readers import (
    DeltaSourceReader,
    FilesSourceReader,
    KafkaSourceReader,
    QueryInput,
    RateSourceReader,
    SourceReader,
    TubeSourceReader,
)
from penstock.pipelines.spec.pipeline import Pipeline, labels, plan
from penstock.pipelines.spec.sources import (
    SOURCE,
    DeltaSource,
    FilesSource,
    KafkaSource,
    RateSource,
    Source,
    TubeOptions,
)
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.layout import create_json, first_json, read_json
from penstock.pipelines.state_dir.replay import Copies, ReplayRange
from penstock.spark.files.object_storage import StoragePath

__all__ = ["Sources", "reader_of"]


def reader_of(
    name: str,
    source: Source,
    state: StoragePath,
    span: ReplayRange | None = None,
    *,
    group: str = "",
    headers: bool = True,
    redriven: Copies = MappingProxyType({}),
) -> SourceReader:
    """Create the reader of one source; a replay reads a ``span``. ``group``: prefix of groups that show its progress.

    ``headers``: True if rows contain all headers of a record, which dead letters and CloudEvents need. ``redriven``:
    see ``Sources``.
    """
    if isinstance(source, FilesSource):
        return FilesSourceReader(name, source, layout.local_directory(state, name), span)
    if isinstance(source, DeltaSource):
        return DeltaSourceReader(name, source, span)
    if isinstance(source, KafkaSource):
        return KafkaSourceReader(name, source, layout.starts(state), span, redriven=redriven)
    if isinstance(source, RateSource):
        return RateSourceReader(name, source, span)
    assert isinstance(source, TubeOptions)
    return TubeSourceReader(name, source, layout.starts(state), span, group=group, headers=headers, redriven=redriven)


class Sources:
    """The sources of ``pipeline``; its state directory ``state`` stores the start offsets of each query.

    A ``span`` has an end, whose offsets are resolved once and stored as well. ``redriven`` has the coordinates of
    redriven dead letters and of their copies: a record whose copy is in the span as well is counted as filtered.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        state: StoragePath,
        span: ReplayRange | None = None,
        redriven: Copies = MappingProxyType({}),
    ) -> None:
        self._readers = {
            name: reader_of(
                name,
                source,
                state,
                span,
                group=f"pipeline-{pipeline.name}",
                headers=pipeline.dead_letters is not None
                or any(step.parse is not None and step.parse.needs_headers for step in pipeline.steps),
                # Letters of a source that is not in the file (any more) match by their coordinates only.
                redriven={
                    place: copy
                    for place, copy in redriven.items()
                    if place.source == name or place.source not in pipeline.inputs
                },
            )
            for name, source in pipeline.inputs.items()
        }
        self._inputs = {found.sink.name: found.inputs for found in plan(pipeline)}
        self._state = state

    @property
    def doubts(self) -> list[str]:
        """Data that a replay may lack, found when it starts."""
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

        A checkpoint stores the end of each batch, but not the start of the first one. "earliest" would resolve to other
        offsets once retention deletes data, and the first batch could not be reread or counted.
        """
        path = self._start_file(query)
        try:
            return dict(read_json(path))
        except FileNotFoundError:
            pass
        start: Offsets = {}
        places = {name: self._readers[name].start(self._input(query, name)) for name in self._names(query)}
        for name, label in self._labelled(query):
            start |= _named(label, places[name])
        # Not replaced: a run that was paused and has lost its lease must not change the start of a later one.
        return first_json(path, start)

    def align_starts(self, queries: Sequence[str]) -> None:
        """Give those of ``queries`` that have no start offsets the same ones, so that they can share a stream.

        "latest" would resolve to other offsets for each of them.
        """
        new = [query for query in queries if not self._start_file(query).exists()]
        for query in new:
            create_json(self._start_file(query), self.start(new[0]))

    def _start_file(self, query: str) -> StoragePath:
        return layout.starts(self._state) / f"{query}.json"

    def streams(self, spark: SparkSession, query: str) -> Callable[[str], DataFrame]:
        """Return a function from the name of a source to its stream for ``query``.

        Inputs from the same source share a stream, since each stream has its own process next to the driver.
        """
        start = self.start(query)
        made: dict[str, DataFrame] = {}

        def stream(name: str) -> DataFrame:
            if name not in made:
                made[name] = self._readers[name].stream(spark, self._input(query, name), _source_offsets(name, start))
            return made[name]

        return stream

    def batches(
        self, spark: SparkSession, query: str, start: Offsets, end: Offsets
    ) -> Callable[[str], DataFrame] | None:
        """Like ``streams``, for the records in ``[start, end)``, the same each time; None if there are none.

        All inputs from a source have the same offsets, because they share a stream.
        """
        found = {
            name: self._readers[name].batch(
                spark, self._input(query, name), _source_offsets(name, start), _source_offsets(name, end)
            )
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
        """Return the number of records of all inputs in ``[start, end)``, counted by the sources."""
        return sum(
            self._readers[name].count(
                self._input(query, name), _source_offsets(label, start), _source_offsets(label, end)
            )
            for name, label in self._labelled(query)
        )

    def size(self, query: str, start: Offsets, end: Offsets) -> int:
        """Like ``count``, without reading records: of Kafka the number of offsets, which may be larger."""
        return sum(
            self._readers[name].size(
                self._input(query, name), _source_offsets(label, start), _source_offsets(label, end)
            )
            for name, label in self._labelled(query)
        )

    def header_values(self, query: str, start: Offsets, end: Offsets, name: str, max_records: int) -> list[str]:
        """Return the values of the header ``name`` of the first ``max_records`` records of each partition of TubeMQ.

        Raises:
            UnavailableError, DataLossError: the records could not be read.
        """
        return [
            value
            for source, label in self._labelled(query)
            if isinstance(reader := self._readers[source], TubeSourceReader)
            for value in reader.header_values(
                _source_offsets(label, start), _source_offsets(label, end), name, max_records
            )
        ]

    def publish(self, query: str, end: Offsets) -> None:
        """Publish ``end`` as the offsets that the query has reached, where sources show them. Returns immediately."""
        for name, label in dict(self._labelled(query)).items():
            self._readers[name].publish(self._input(query, name), _source_offsets(label, end))

    def close(self) -> None:
        """Publish the last offsets."""
        for reader in self._readers.values():
            reader.close()

    def meter(self, clock: Callable[[], int]) -> SourceMeter:
        """Return a meter of the lag behind all sources; ``clock`` returns ms since 1970."""
        meters = {name: reader.meter(clock) for name, reader in self._readers.items()}
        if list(meters) == [SOURCE]:
            return meters[SOURCE]
        return _Meters(meters, self._inputs)

    def lag(self, ends: Mapping[str, Offsets], clock: Callable[[], int]) -> dict[str, Lag]:
        """Measure once the lag of queries that have reached ``ends``, without those that cannot be measured."""
        meter = self.meter(clock)
        meter.start()
        meter.close(ends)
        found = {name: meter.lag_of(name) for name in ends}
        return {name: lag for name, lag in found.items() if lag is not None}

    def _names(self, query: str) -> list[str]:
        return list(dict.fromkeys(self._inputs[query]))

    def _labelled(self, query: str) -> list[tuple[str, str]]:
        inputs = self._inputs[query]
        return list(zip(inputs, labels(inputs), strict=True))

    def _input(self, query: str, name: str) -> QueryInput:
        return QueryInput(query, name, self._state)


class _Meters:
    """Lag of queries with several sources: the sum of records, the largest number of seconds and unread share."""

    def __init__(self, meters: Mapping[str, SourceMeter], inputs: Mapping[str, Sequence[str]]) -> None:
        self._meters = meters
        self._inputs = inputs

    def start(self) -> None:
        for meter in self._meters.values():
            meter.start()

    def request(self, ends: Mapping[str, Offsets]) -> None:
        for name, meter in self._meters.items():
            meter.request(self._ends_of(name, ends))

    def lag_of(self, sink: str) -> Lag | None:
        found = [self._meters[name].lag_of(sink) for name in dict.fromkeys(self._inputs[query_of(sink)])]
        known = [lag for lag in found if lag is not None]
        if len(known) < len(found):
            return None
        seconds = [lag.seconds for lag in known]
        dated = [each for each in seconds if each is not None]
        oldest_s = max(dated) if len(dated) == len(seconds) else None
        return Lag(sum(lag.records for lag in known), oldest_s, max(lag.unread for lag in known))

    def close(self, ends: Mapping[str, Offsets]) -> None:
        for name, meter in self._meters.items():
            meter.close(self._ends_of(name, ends))

    def _ends_of(self, name: str, ends: Mapping[str, Offsets]) -> dict[str, Offsets]:
        return {sink: _source_offsets(name, end) for sink, end in ends.items() if name in self._inputs[query_of(sink)]}


def _named(label: str, offsets: Offsets) -> Offsets:
    return offsets if label == SOURCE else {f"{label}/{stream}": places for stream, places in offsets.items()}


def _source_offsets(label: str, offsets: Offsets) -> Offsets:
    """Return the offsets of the input ``label``, whose streams have no label in it."""
    if label == SOURCE:
        return {stream: places for stream, places in offsets.items() if not stream.startswith(f"{SOURCE}#")}
    return {
        stream.removeprefix(f"{label}/"): places for stream, places in offsets.items() if stream.startswith(f"{label}/")
    }
