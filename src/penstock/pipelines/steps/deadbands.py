"""The deadband step: rows whose values differ little from what was last reported of their key are filtered.

Rows are distributed by their key to a fixed number of buckets, each with a state of its own in the checkpoint of the
sink (``state_dir.deadbands``). A task has all rows of its buckets in a batch, and compares them in the order of their
times and coordinates, so that the result does not depend on the order in which Spark reads them. Without a checkpoint,
as in test cases, the state is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampType,
    VariantType,
)

from penstock.errors import ConfigError
from penstock.pipelines.rows import alive, mark_dead, record_identity, rejected_after
from penstock.pipelines.spec.steps import Deadband
from penstock.pipelines.spec.values import duration_ms
from penstock.pipelines.state_dir.deadbands import Bucket, Comparison, Limit, Reading, stored_buckets
from penstock.pipelines.steps.arrow_functions import map_in_arrow
from penstock.pipelines.steps.expressions import quoted_column
from penstock.pipelines.steps.windows import NO_TIME
from penstock.spark.files.object_storage import StoragePath

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = ["CompareRows", "deadband_step"]

NO_TEXT = "deadband.value"
"""Code of rows with a text that cannot be compared."""
_MARKS = "_deadband"
"""Column with what the comparison needs of a row."""
_BATCH = "streaming.sql.batchId"
"""Property of a Spark job: number of the batch."""
_COORDINATES = ("source", "topic", "broker", "partition", "offset")
_NESTED = (ArrayType, MapType, StructType, VariantType)


def deadband_step(
    rows: DataFrame, name: str, deadband: Deadband, after: Sequence[str], directory: StoragePath | None
) -> DataFrame:
    """Mark rows as filtered that report no change.

    ``after``: later steps, whose redriven dead letters were reported before and pass. ``directory``: that of the state
    of all deadbands of the sink; None for an empty state.

    Raises:
        ConfigError: a column has a type that cannot be compared.
    """
    kinds = _types_of(rows, [deadband.time, *deadband.by, *deadband.columns])
    _check_types(name, deadband, kinds)
    time = quoted_column(deadband.time)
    state = None if directory is None or not rows.isStreaming else directory / name
    buckets = int(rows.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    if state is not None:
        buckets = stored_buckets(state, buckets)
    without = sf.lit(f"column {deadband.time!r} is null, so it has no place in the order of rows")
    texts = [each for each in (*deadband.by, *deadband.columns) if isinstance(kinds[each], StringType)]
    invalid = (
        sf.when(~sf.is_valid_utf8(quoted_column(each)), sf.lit(f"column {each!r} is not UTF-8, so it is not compared"))
        for each in texts
    )
    failures = [(NO_TIME, sf.when(time.isNull(), without)), *((NO_TEXT, reason) for reason in invalid)]
    rows = mark_dead(rows, name, failures)
    # Apache's brokers do not return the append time of a record; in a stream the current time is that of the batch.
    arrived = sf.coalesce(sf.col("_source.timestamp"), sf.current_timestamp())
    marks = sf.struct(
        sf.pmod(sf.xxhash64(*map(quoted_column, deadband.by)), sf.lit(buckets)).cast("int").alias("bucket"),
        (alive() & ~rejected_after(after)).alias("compared"),
        sf.unix_micros(time).alias("time_us"),
        sf.unix_micros(arrived).alias("arrived_us"),
        sf.struct(
            *(sf.col(f"_source.{field}").alias(f"at{n}") for n, field in enumerate(_COORDINATES)),
            *(sf.col(each).alias(f"id{n}") for n, each in enumerate(record_identity(rows))),
        ).alias("order"),
        sf.struct(*(quoted_column(each).alias(f"key{n}") for n, each in enumerate(deadband.by))).alias("key"),
        sf.struct(*(quoted_column(each).alias(f"value{n}") for n, each in enumerate(deadband.columns))).alias("value"),
    )
    marked = rows.withColumn(_MARKS, marks).repartitionById(buckets, sf.col(f"{_MARKS}.bucket"))
    return map_in_arrow(marked, CompareRows(name, _comparison(deadband, kinds), state), rows.schema)


def _types_of(rows: DataFrame, columns: Sequence[str]) -> dict[str, DataType]:
    found = rows.select(*map(quoted_column, columns)).schema
    return {column: field.dataType for column, field in zip(columns, found, strict=True)}


def _check_types(name: str, deadband: Deadband, kinds: Mapping[str, DataType]) -> None:
    if not isinstance(kinds[deadband.time], TimestampType):
        raise _wrong_type(name, "time", deadband.time, kinds, "cast it to TIMESTAMP in a map or sql step")
    for column in deadband.by:
        if isinstance(kinds[column], (*_NESTED, FloatType, DoubleType)):
            raise _wrong_type(name, "by", column, kinds, "use columns of text, integers, dates or times as the key")
    for column, (most, _) in deadband.limits.items():
        if isinstance(kinds[column], _NESTED):
            raise _wrong_type(name, "columns", column, kinds, "compare its fields, after a flatten or map step")
        if most is not None and not isinstance(kinds[column], NumericType):
            raise _wrong_type(name, "columns", column, kinds, f"write `{column}: change`, or cast it to a number")


def _wrong_type(step: str, option: str, column: str, kinds: Mapping[str, DataType], hint: str) -> ConfigError:
    return ConfigError(
        f"step {step!r}: column {column!r} is {kinds[column].simpleString()}, which a deadband cannot compare",
        option=option,
        hint=hint,
    )


def _comparison(deadband: Deadband, kinds: Mapping[str, DataType]) -> Comparison:
    limits: list[Limit | None] = []
    for column, (most, relative) in deadband.limits.items():
        if most is None:
            limits.append(None)
        else:
            limits.append(Limit(most if isinstance(kinds[column], DecimalType) else float(most), relative))
    return Comparison(tuple(limits), _micros(deadband.max_interval), _micros(deadband.expire))


def _micros(duration: str | None) -> int | None:
    return None if duration is None else duration_ms(duration) * 1000


def _batch_number() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    text = None if context is None else context.getLocalProperty(_BATCH)
    assert text is not None, "Spark sets it before it starts the jobs of a batch"
    return int(text)


@dataclass(frozen=True, slots=True)
class CompareRows:
    """Marks the rows of whole buckets as filtered by ``step`` that report no change.

    ``directory``: that of the state; None for an empty state that is not stored. ``batch`` returns the number of the
    batch of a task.
    """

    step: str
    comparison: Comparison
    directory: StoragePath | None
    batch: Callable[[], int] = _batch_number

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return ``batches`` without the column of marks, after the state of their buckets is stored."""
        import numpy as np
        import pyarrow as pa

        # All of them: the rows of a bucket are compared in order. Only the marks are copied and sorted.
        given = [batch for batch in batches if batch.num_rows]
        if not given:
            return
        marks = pa.Table.from_struct_array(pa.chunked_array([batch.column(_MARKS) for batch in given]))
        is_filtered = np.zeros(len(marks), dtype=bool)
        for places, rows in _in_order(marks.combine_chunks()):
            is_filtered[places] = ~np.asarray(self._reported(rows), dtype=bool)
        start = 0
        for batch in given:
            own = is_filtered[start : start + batch.num_rows]
            start += batch.num_rows
            yield _with_filtered(batch, own, self.step)

    def _reported(self, rows: pa.Table) -> list[bool]:
        """Return for each of ``rows``, those of one bucket in order, if it is reported, after its state is stored."""
        keys, values = (list(map(_as_numbers, _fields(rows[name]))) for name in ("key", "value"))
        columns: list[Any] = [
            zip(*(column.to_pylist() for column in keys), strict=True),
            rows["time_us"].to_pylist(),
            rows["arrived_us"].to_pylist(),
            zip(*(column.to_pylist() for column in values), strict=True),
        ]
        readings = map(Reading._make, zip(*columns, strict=True))
        if self.directory is None:
            return self.comparison.reported({}, readings)
        key_kinds, kinds = ([column.type for column in found] for found in (keys, values))
        bucket = self.directory / str(rows["bucket"][0].as_py())
        state = Bucket(bucket, self.batch(), key_kinds, kinds, self.comparison)
        state.read()
        reported = state.comparison.reported(state.state, readings)
        state.write()
        return reported


def _in_order(marks: pa.Table) -> Iterator[tuple[np.ndarray[Any, Any], pa.Table]]:
    """Yield for each bucket the places of its rows that are compared, in their order, and their marks."""
    import numpy as np
    import pyarrow as pa

    keyed = pa.table(
        {
            "bucket": marks["bucket"],
            "time_us": marks["time_us"],
            **{f"order{n}": column for n, column in enumerate(_fields(marks["order"]))},
            "place": np.arange(len(marks)),
        }
    ).filter(marks["compared"])
    if not keyed.num_rows:
        return
    keyed = keyed.sort_by([(name, "ascending") for name in keyed.column_names if name != "place"])
    ordered, places = marks.take(keyed["place"]), np.asarray(keyed["place"])
    starts = np.flatnonzero(np.diff(np.asarray(keyed["bucket"]))) + 1
    for first, last in pairwise([0, *starts.tolist(), len(places)]):
        yield places[first:last], ordered.slice(first, last - first)


def _as_numbers(column: pa.Array[Any]) -> pa.Array[Any]:
    """Return dates and times as numbers.

    Python has no years after 9999, and Arrow's type of a TIMESTAMP has the time zone of the session.
    """
    import pyarrow as pa

    number = {32: pa.int32(), 64: pa.int64()}.get(column.type.bit_width) if pa.types.is_temporal(column.type) else None
    return column if number is None else column.view(number)


def _fields(column: pa.ChunkedArray[Any]) -> list[pa.Array[Any]]:
    """Return the fields of a column of structs."""
    import pyarrow as pa

    made = column.combine_chunks()
    assert isinstance(made, pa.StructArray)
    return list(made.flatten())


def _with_filtered(batch: pa.RecordBatch, is_filtered: np.ndarray[Any, Any], step: str) -> pa.RecordBatch:
    """Return ``batch`` with the name of the ``step`` in ``_filtered`` where ``is_filtered``, without marks."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kept = batch.drop_columns([_MARKS])
    place = kept.schema.get_field_index("_filtered")
    before = kept.column(place)
    made = pc.if_else(pa.array(is_filtered), pa.scalar(step, before.type), before)
    return kept.set_column(place, kept.schema.field(place), made)
