"""Write the rows and the dead letters of a batch, for one sink or several, and count them, in one pass over the batch.

The tasks of one Spark job write Parquet files with pyarrow and return names and counts; the driver commits the files
(``table``), or reads them to send them elsewhere.

Counting, writing rows and writing dead letters as three jobs would need the batch in Spark's cache, which costs more
than all other work on a row, or would compute it three times, which is not possible for a batch with a dedupe.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    MapType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.pipelines.rows import alive
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA, FileTarget, FileWriter
from penstock.pipelines.sinks.partitions import PartitionFiles
from penstock.spark.files.object_storage import StoragePath

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "SHARED",
    "Outcomes",
    "PassResult",
    "WrittenFiles",
    "is_supported",
    "outcome",
    "type_of_rows",
    "write_in_one_pass",
]

_SIMPLE = (BinaryType, BooleanType, DateType, NumericType, DecimalType, TimestampNTZType, TimestampType)
_RESULT = (
    "sink LONG, out LONG, dead LONG, filtered LONG, exploded LONG, letters LONG, rows_files STRING, "
    "letters_files STRING, checks STRING"
)


class WrittenFiles(NamedTuple):
    """Files of one table in the directory ``attempt``, not committed yet, and their number of rows."""

    attempt: StoragePath
    names: tuple[str, ...]
    rows: int


class PassResult(NamedTuple):
    """Counts of a batch by state, and the files of its rows and of its dead letters; None without a directory.

    ``checks``: number of rows for each name in the column ``_checks``; ``exploded``: rows that explode steps added.
    """

    out: int
    dead: int
    filtered: int
    exploded: int
    rows: WrittenFiles
    letters: WrittenFiles | None
    checks: Mapping[str, int]


def is_supported(kind: DataType) -> bool:
    """Return True if a Parquet file of pyarrow and one of Spark have the same contents for columns of type ``kind``."""
    if isinstance(kind, StructType):
        return bool(kind.fields) and all(is_supported(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return is_supported(kind.elementType)
    if isinstance(kind, MapType):
        return is_supported(kind.keyType) and is_supported(kind.valueType)
    # A string with a collation has another type.
    return isinstance(kind, _SIMPLE) or kind == StringType()


SHARED = "column:"
"""Prefix of the columns of a batch that several sinks write unchanged, before their names."""


def outcome(
    own: list[Column], letter: list[Column], is_letter: Column, counted: Mapping[str, Column] = MappingProxyType({})
) -> Column:
    """Return what becomes of a row in a sink, as a struct: ``alive``, ``dead``, ``filtered``, ``letters`` and ``row``.

    ``row`` has the columns ``own`` that only this sink writes, and does not exist if there are none. ``letters`` is an
    array: of a struct of the columns ``letter`` if ``is_letter``, otherwise empty. ``counted`` are further fields,
    which only exist if a step makes them: ``checks``, the row's column ``_checks``, and ``more``, the rows that explode
    steps added.
    """
    # Not a struct that is null for most rows: Spark determines the size of the Arrow batch after each row, for which
    # Arrow visits all nulls at the end of an array, such as the headers in this struct.
    fields = [
        alive().alias("alive"),
        sf.col("_dead").isNotNull().alias("dead"),
        (sf.col("_dead").isNull() & sf.col("_filtered").isNotNull()).alias("filtered"),
        sf.when(is_letter, sf.array(sf.struct(*letter))).otherwise(sf.array()).alias("letters"),
    ]
    fields += [column.alias(name) for name, column in counted.items()]
    return sf.struct(*fields, *([sf.when(alive(), sf.struct(*own)).alias("row")] if own else []))


class Outcomes(NamedTuple):
    """A column of outcomes (``outcome``), and the directories for the files of its rows and of its dead letters.

    ``names`` are the columns of the files, in order: fields of ``row``, or columns of the batch with the prefix
    ``SHARED``. Both directories are new, on a file system that all executors share, or ``rows`` is a path in a bucket.
    None: dead letters are not written.
    """

    column: str
    names: tuple[str, ...]
    rows: StoragePath
    letters: Path | None
    partitions: tuple[str, ...] = ()
    """Columns in ``names``: a file has the rows of one value of each, and lacks these columns."""
    file_bytes: int | None = None
    """Size at which a task begins another file with rows."""


def type_of_rows(batch: StructType, column: str, names: Sequence[str]) -> StructType:
    """Return the type of the rows that a sink writes; for the arguments see :class:`Outcomes`."""
    own = _own(batch, column)
    found = (own[name] if name in own.names else batch[SHARED + name] for name in names)
    return StructType(
        [StructField(name, field.dataType, field.nullable) for name, field in zip(names, found, strict=True)]
    )


def _outcome_fields(batch: StructType, column: str) -> StructType:
    kind = batch[column].dataType
    assert isinstance(kind, StructType)
    return kind


def _own(batch: StructType, column: str) -> StructType:
    kind = _outcome_fields(batch, column)
    own = kind["row"].dataType if "row" in kind.names else StructType([])
    assert isinstance(own, StructType)
    return own


def write_in_one_pass(batch: DataFrame, sinks: Sequence[Outcomes]) -> list[PassResult]:
    """Write the rows and dead letters of columns ``sinks`` of ``batch``; the caller commits or removes the files."""
    own = [_own(batch.schema, sink.column).names for sink in sinks]
    used = dict.fromkeys(name for sink, mine in zip(sinks, own, strict=True) for name in sink.names if name not in mine)
    columns = [sf.col(f"`{(SHARED + name).replace('`', '``')}`") for name in used]
    for n, sink in enumerate(sinks):
        # Fields of structs, not columns of a struct, and only those in use: Spark would fill the others for each row.
        fields = ["alive", "dead", "filtered", *(["row"] if own[n] else []), *(["letters"] if sink.letters else [])]
        existing = _outcome_fields(batch.schema, sink.column).names
        fields += [name for name in ("checks", "more") if name in existing]
        columns += [sf.col(f"{sink.column}.{field}").alias(f"{field}{n}") for field in fields]
    marked = batch.select(*columns)
    version = batch.sparkSession.version
    targets = [
        _SinkTargets(
            tuple((name, name in own[n]) for name in sink.names),
            _target(type_of_rows(batch.schema, sink.column, sink.names), sink.rows, version, sink.file_bytes),
            None if sink.letters is None else _target(_letter_type(marked.schema, n), sink.letters, version),
            sink.partitions,
        )
        for n, sink in enumerate(sinks)
    ]
    results = marked.mapInArrow(partial(_write_task, targets), _RESULT).collect()
    return [_result(sink, [row for row in results if row["sink"] == n]) for n, sink in enumerate(sinks)]


def _letter_type(batch: StructType, n: int) -> DataType:
    kind = batch[f"letters{n}"].dataType
    assert isinstance(kind, ArrayType)
    return kind.elementType


def _result(sink: Outcomes, results: list[Row]) -> PassResult:
    checks: Counter[str] = Counter()
    for result in results:
        checks.update(json.loads(result["checks"]))
    out, dead, filtered, exploded = (
        sum(int(result[name]) for result in results) for name in ("out", "dead", "filtered", "exploded")
    )
    return PassResult(
        out,
        dead,
        filtered,
        exploded,
        _files(sink.rows, results, "rows_files", "out"),
        None if sink.letters is None else _files(sink.letters, results, "letters_files", "letters"),
        checks,
    )


def _files(attempt: StoragePath, results: list[Row], file: str, count: str) -> WrittenFiles:
    names = tuple(sorted(str(name) for result in results for name in json.loads(result[file])))
    return WrittenFiles(attempt, names, sum(int(result[count]) for result in results))


class _SinkTargets(NamedTuple):
    """Files of one sink: ``columns`` are names, and whether they are fields of the sink's ``row``."""

    columns: tuple[tuple[str, bool], ...]
    rows: FileTarget
    letters: FileTarget | None
    partitions: tuple[str, ...]


def _target(kind: DataType, directory: StoragePath, version: str, file_bytes: int | None = None) -> FileTarget:
    # Readers determine by the version how dates before 1582 are stored.
    metadata = {SPARKS_SCHEMA: kind.json().encode(), b"org.apache.spark.version": version.encode()}
    return FileTarget(directory, metadata, file_bytes)


def _write_task(sinks: Sequence[_SinkTargets], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the files of one task. Runs in an executor; a repeated task writes other files."""
    import pyarrow as pa

    written = [_SinkFiles(targets) for targets in sinks]
    try:
        for batch in batches:
            for n, sink in enumerate(written):
                sink.write(batch, n)
    finally:
        for sink in written:
            sink.close()
    results = [{"sink": n, **sink.result()} for n, sink in enumerate(written)]
    types = {name: pa.string() if name.endswith(("files", "checks")) else pa.int64() for name in results[0]}
    yield pa.RecordBatch.from_arrays(
        [pa.array([result[name] for result in results], kind) for name, kind in types.items()], names=list(types)
    )


class _SinkFiles:
    """The files of one sink in one task, and its counts."""

    def __init__(self, targets: _SinkTargets) -> None:
        self._dead = self._filtered = self._exploded = 0
        self._checks: Counter[str] = Counter()
        self._columns = targets.columns
        self._rows = (
            PartitionFiles(targets.rows, targets.partitions) if targets.partitions else FileWriter(targets.rows)
        )
        self._letters = None if targets.letters is None else FileWriter(targets.letters)

    def write(self, batch: pa.RecordBatch, n: int) -> None:
        """Write what ``batch`` has for this sink, which is number ``n``."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self._dead += cast("pa.BooleanArray", batch.column(f"dead{n}")).true_count
        self._filtered += cast("pa.BooleanArray", batch.column(f"filtered{n}")).true_count
        if f"more{n}" in batch.schema.names:
            self._exploded += int(pc.sum(batch.column(f"more{n}")).as_py() or 0)
        if f"checks{n}" in batch.schema.names:
            names = cast("pa.ListArray[pa.StringScalar]", batch.column(f"checks{n}")).flatten()
            found = pc.value_counts(names)
            for name, count in zip(found.field("values"), found.field("counts"), strict=True):
                self._checks[str(name.as_py())] += int(count.as_py())
        is_alive = cast("pa.BooleanArray", batch.column(f"alive{n}"))
        if is_alive.true_count:
            rows = self._rows_of(batch, n)
            self._rows.write(rows if is_alive.true_count == len(rows) else rows.filter(is_alive))
        if self._letters is not None:
            letters = cast("pa.ListArray[Any]", batch.column(f"letters{n}")).flatten()
            if len(letters):
                self._letters.write(pa.RecordBatch.from_struct_array(cast("pa.StructArray", letters)))

    def _rows_of(self, batch: pa.RecordBatch, n: int) -> pa.RecordBatch:
        """Return the columns of the sink, with rows that are not alive."""
        import pyarrow as pa

        arrays, fields = [], []
        for name, is_own in self._columns:
            if is_own:
                row = cast("pa.StructArray", batch.column(f"row{n}"))
                arrays.append(row.field(name))
                fields.append(row.type.field(name))
            else:
                arrays.append(batch.column(SHARED + name))
                fields.append(batch.schema.field(SHARED + name).with_name(name))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def close(self) -> None:
        """Complete the files."""
        self._rows.close()
        if self._letters is not None:
            self._letters.close()

    def result(self) -> dict[str, int | str | None]:
        """Return counts and names of files."""
        rows, letters = self._rows, self._letters
        return {
            "out": rows.count,
            "dead": self._dead,
            "filtered": self._filtered,
            "exploded": self._exploded,
            "letters": 0 if letters is None else letters.count,
            "rows_files": json.dumps(rows.names),
            "letters_files": json.dumps([] if letters is None else letters.names),
            "checks": json.dumps(self._checks),
        }
