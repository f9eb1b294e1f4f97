"""Write the rows and the dead letters of a batch, and count them, in one pass over the batch.

The tasks of one Spark job write Parquet files with pyarrow and return names and counts; the driver commits the files
(``table``). Counting, writing rows and writing dead letters as three jobs would need the batch in Spark's cache, which
costs more than all other work on a row, or would compute it three times, which is not possible for a batch with a
dedupe.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.pipelines.rows import alive
from penstock.pipelines.sinks.table import SPARKS_SCHEMA
from penstock.pipelines.state_dir.layout import sync_file

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PassResult", "WrittenFiles", "is_supported", "write_in_one_pass"]

_SIMPLE = (BinaryType, BooleanType, DateType, NumericType, DecimalType, TimestampNTZType, TimestampType)
_RESULT = "out LONG, dead LONG, filtered LONG, letters LONG, rows_file STRING, letters_file STRING"


class WrittenFiles(NamedTuple):
    """Files of one table in the directory ``attempt``, not committed yet, and their number of rows."""

    attempt: Path
    names: tuple[str, ...]
    rows: int


class PassResult(NamedTuple):
    """Counts of a batch by state, and the files of its rows and of its dead letters; None without a directory."""

    out: int
    dead: int
    filtered: int
    rows: WrittenFiles
    letters: WrittenFiles | None


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


def write_in_one_pass(
    rows: DataFrame, columns: list[Column], attempt: Path, letter: list[Column], is_letter: Column, letters: Path | None
) -> PassResult:
    """Write ``columns`` of live ``rows`` below ``attempt``, and ``letter`` of rows for which ``is_letter`` below
    ``letters``.

    Both are new directories for this attempt, on a file system that all executors share; the caller commits their
    files, or removes them.
    """
    row, found = sf.struct(*columns), sf.struct(*letter)
    is_written = is_letter if letters is not None else sf.lit(False)
    marked = rows.select(
        sf.when(alive(), row).alias("row"),
        sf.when(is_written, found).alias("letter"),
        sf.col("_dead").isNotNull().alias("dead"),
        (sf.col("_dead").isNull() & sf.col("_filtered").isNotNull()).alias("filtered"),
    )
    targets = {"row": _target(marked, "row", attempt)}
    if letters is not None:
        targets["letter"] = _target(marked, "letter", letters)
    results = marked.mapInArrow(partial(_write_task, targets), _RESULT).collect()
    out, dead, filtered = (sum(int(result[name]) for result in results) for name in ("out", "dead", "filtered"))
    return PassResult(
        out,
        dead,
        filtered,
        _files(attempt, results, "rows_file", "out"),
        None if letters is None else _files(letters, results, "letters_file", "letters"),
    )


def _files(attempt: Path, results: list[Row], file: str, count: str) -> WrittenFiles:
    names = tuple(sorted(str(result[file]) for result in results if result[file] is not None))
    return WrittenFiles(attempt, names, sum(int(result[count]) for result in results))


@dataclass(frozen=True, slots=True)
class _Target:
    """Directory of the files of one column of structs, and Spark's metadata for these files."""

    directory: str
    metadata: Mapping[bytes, bytes]


def _target(marked: DataFrame, column: str, directory: Path) -> _Target:
    kind = marked.schema[column].dataType
    assert isinstance(kind, StructType)
    # Readers determine by the version how dates before 1582 are stored.
    version = marked.sparkSession.version.encode()
    return _Target(str(directory), {SPARKS_SCHEMA: kind.json().encode(), b"org.apache.spark.version": version})


def _write_task(targets: Mapping[str, _Target], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the files of one task. Runs in an executor; a repeated task writes other files."""
    import pyarrow as pa

    dead = filtered = 0
    writers = {name: _FileWriter(target) for name, target in targets.items()}
    try:
        for batch in batches:
            dead += cast("pa.BooleanArray", batch.column("dead")).true_count
            filtered += cast("pa.BooleanArray", batch.column("filtered")).true_count
            for name, writer in writers.items():
                writer.write(cast("pa.StructArray", batch.column(name)))
    finally:
        for writer in writers.values():
            writer.close()
    rows, letters = writers["row"], writers.get("letter")
    result = {
        "out": rows.count,
        "dead": dead,
        "filtered": filtered,
        "letters": 0 if letters is None else letters.count,
        "rows_file": rows.name,
        "letters_file": None if letters is None else letters.name,
    }
    types = {name: pa.string() if name.endswith("file") else pa.int64() for name in result}
    yield pa.RecordBatch.from_arrays(
        [pa.array([value], types[name]) for name, value in result.items()], names=list(result)
    )


class _FileWriter:
    """A Parquet file of the structs that are not null, created with the first one."""

    def __init__(self, target: _Target) -> None:
        self.count = 0
        self.name: str | None = None
        self._target = target
        self._writer: Any = None

    def write(self, structs: pa.StructArray) -> None:
        """Append the structs that are not null."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if structs.null_count == len(structs):
            return
        if structs.null_count:
            structs = structs.drop_null()
        rows = pa.RecordBatch.from_struct_array(structs)
        if self._writer is None:
            directory = Path(self._target.directory)
            directory.mkdir(parents=True, exist_ok=True)
            self.name = f"part-{uuid.uuid4().hex}.parquet"
            self._writer = pq.ParquetWriter(directory / self.name, rows.schema, store_schema=False)
            self._writer.add_key_value_metadata(dict(self._target.metadata))
        self._writer.write_batch(rows)
        self.count += len(rows)

    def close(self) -> None:
        """Complete the file and sync it to disk."""
        if self._writer is not None:
            self._writer.close()
            sync_file(Path(self._target.directory) / str(self.name))
