"""Partitions of a Delta table: columns that are computed for them, and directories of their files.

A file has the rows of one value of each partition column. The log has the values, and so do the names of the
directories, ``<column>=<value>``, as Hive writes them: Polars reads them there. Names are escaped to ASCII, as
``deltalake`` escapes them when it combines files. The files themselves lack the partition columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from penstock.errors import ConfigError
from penstock.pipelines.sinks.parquet import ROW_GROUP_BYTES, FileTarget, FileWriter
from penstock.pipelines.spec.sinks import Sink, TableSink
from penstock.pipelines.spec.values import sink_letter

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = [
    "PartitionFiles",
    "check_partition_columns",
    "computed_columns",
    "mark_unpartitionable",
    "partition_directory",
    "partition_values",
    "split",
    "split_file",
]

_NULL = "__HIVE_DEFAULT_PARTITION__"
_LONGEST = 200
"""Maximum length of an escaped value in bytes."""
_LONGEST_NAME = 255
"""Maximum length of a name in a directory: that of the column, an equals sign and the value."""


def partition_directory(values: Mapping[str, str | None]) -> str:
    """Return the directory, relative to the table, of files with ``values``. An empty text is null, as in Delta."""
    return "/".join(f"{_escaped(name)}={_escaped(value) if value else _NULL}" for name, value in values.items())


def _escaped(text: str) -> str:
    return quote(text, safe="")


def partition_values(directory: str) -> dict[str, str | None]:
    """Return the values of the files in ``directory``, relative to the table."""
    pairs = (name.split("=", 1) for name in directory.split("/") if name)
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}


def split(rows: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the ``rows`` of each value of the columns ``names``, without these columns, and the directory for them."""
    import numpy as np
    import pyarrow as pa

    if not len(rows):
        return
    # One number for each combination of values.
    codes = np.zeros(len(rows), dtype=np.int64)
    columns: list[tuple[list[str | None], Any]] = []
    for name in names:
        column = rows.column(name).cast(pa.string()).dictionary_encode(null_encoding="encode")
        indices = column.indices.to_numpy(zero_copy_only=False)
        if len(column.dictionary) > 1:
            # Small again, so that the product of several columns fits into 64 bits.
            codes = np.unique(codes * len(column.dictionary) + indices, return_inverse=True)[1]
        columns.append((column.dictionary.to_pylist(), indices))
    rest = rows.drop_columns(list(names))
    order = np.argsort(codes, kind="stable")
    chosen_by_value = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    for chosen in chosen_by_value:
        values = [texts[indices[chosen[0]]] for texts, indices in columns]
        directory = partition_directory(dict(zip(names, values, strict=True)))
        yield directory, rest if len(chosen_by_value) == 1 else rest.take(chosen)


_WAITING_BYTES = 256 << 20
"""Maximum size in memory of the rows of all partitions that are not written yet."""
_MAX_OPEN = 100
"""Maximum number of files that are open at a time: a process has a limit, often 1024."""


class PartitionFiles:
    """Parquet files with the rows of one value each of the columns ``partitions``."""

    def __init__(self, target: FileTarget, partitions: Sequence[str]) -> None:
        self.count = 0
        self._target = target
        self._partitions = partitions
        self._files: dict[str, FileWriter] = {}
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._parts_bytes = 0

    @property
    def names(self) -> list[str]:
        """The files, relative to the directory of the target."""
        return [name for file in self._files.values() for name in file.names]

    def write(self, rows: pa.RecordBatch) -> None:
        """Append ``rows``."""
        self.count += len(rows)
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
        # Small batches would become many with a few rows each, whose objects are much larger than the rows.
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._split()

    def _split(self) -> None:
        import pyarrow as pa

        if not self._waiting:
            return
        rows = pa.Table.from_batches(self._waiting).combine_chunks()
        self._waiting, self._waiting_bytes = [], 0
        for batch in rows.to_batches():
            for directory, part in split(batch, self._partitions):
                self._write_part(directory, part)

    def _write_part(self, directory: str, rows: pa.RecordBatch) -> None:
        if directory not in self._files:
            self._files[directory] = FileWriter(self._target, directory)
        file = self._files[directory]
        before = file.waiting_bytes
        file.write(rows)
        self._parts_bytes += file.waiting_bytes - before
        if file.is_open:
            opened = [each for each in self._files.values() if each.is_open]
            if len(opened) > _MAX_OPEN:
                self._close(min(opened, key=lambda each: each.waiting_bytes))
        while self._parts_bytes > _WAITING_BYTES:
            self._close(max(self._files.values(), key=lambda each: each.waiting_bytes))

    def _close(self, file: FileWriter) -> None:
        self._parts_bytes -= file.waiting_bytes
        file.close()

    def close(self) -> None:
        """Complete the files and sync them to disk."""
        self._split()
        for file in self._files.values():
            file.close()


def split_file(file: Path, names: Sequence[str]) -> list[str]:
    """Write the rows of ``file`` again, for each value of ``names`` to files in a directory next to it, and sync them.

    Returns their names, relative to the directory of ``file``, which is removed. The metadata are those of ``file``.
    """
    import pyarrow.parquet as pq

    # By default Spark writes timestamps as INT96, which Arrow reads as nanoseconds.
    with pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as source:
        found = source.metadata.metadata or {}
        metadata = {key: value for key, value in found.items() if key != b"ARROW:schema"}
        files = PartitionFiles(FileTarget(file.parent, metadata), names)
        try:
            for batch in source.iter_batches():
                files.write(batch.replace_schema_metadata(None))
        finally:
            files.close()
    file.unlink()
    return files.names


def computed_columns(table: TableSink) -> dict[str, tuple[str, str]]:
    """Return the columns that are computed for partitions in SQL, by name, and the column that each reads.

    Days and hours are those of the session's time zone, which is UTC unless it is set.
    """
    from penstock.pipelines.steps.expressions import quoted

    found: dict[str, tuple[str, str]] = {}
    for field in table.partitions:
        column, read = (
            ("_source.`timestamp`", "_source") if field.is_coordinate else (quoted(field.column), field.column)
        )
        match field.transform:
            case "day":
                found[field.name] = f"CAST({column} AS DATE)", read
            case "hour":
                found[field.name] = f"date_format({column}, 'yyyy-MM-dd-HH')", read
            case "bucket":
                found[field.name] = f"pmod(hash({column}), {field.buckets})", read
    return found


def mark_unpartitionable(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark rows as dead whose partition has no valid value: a text that no directory can have, or a year after 9999.

    Raises:
        ConfigError: see :func:`check_partition_columns`.
    """
    from pyspark.sql import functions as sf
    from pyspark.sql.types import DateType, StringType

    from penstock.pipelines.rows import mark_dead
    from penstock.pipelines.steps.expressions import quoted_column

    check_partition_columns(sink, rows.schema)
    table, failures = sink.table, []
    assert table is not None
    computed = computed_columns(table)
    for field in table.partitions:
        if field.is_coordinate:
            continue
        column = sf.expr(computed[field.name][0]) if field.name in computed else quoted_column(field.name)
        kind = rows.select(column).schema[0].dataType
        if isinstance(kind, DateType):
            wrong = (sf.year(column) < 1) | (sf.year(column) > 9999)
            said = sf.format_string(f"%s of {field.text} is not a day from year 1 to 9999", column.cast("string"))
        elif isinstance(kind, StringType) and field.transform == "identity":
            plain = sf.length(sf.regexp_replace(column, "[^A-Za-z0-9_.-]", ""))
            size = sf.octet_length(column) * 3 - plain * 2
            longest = min(_LONGEST, _LONGEST_NAME - 1 - len(_escaped(field.name)))
            # Programs do not find files whose directory has a ~, and read the name for null as null.
            wrong = (size > longest) | column.contains("~") | (column == _NULL) | ~sf.is_valid_utf8(column)
            said = sf.lit(
                f"the value of {field.column} cannot be a partition: it is not UTF-8, has a ~, is {_NULL}, "
                f"or is longer than {longest} characters as the name of a directory"
            )
        else:
            continue
        failures.append(("sink.partition", sf.when(wrong, said)))
    return mark_dead(rows, sink_letter(sink.name), failures) if failures else rows


def check_partition_columns(sink: Sink, columns: StructType) -> None:
    """Check that the columns of ``partition_by`` exist in ``columns`` of a stream, and have types that it supports.

    Raises:
        ConfigError: one does not, or a computed column has the name of another one.
    """
    assert sink.table is not None
    kinds = {field.name: field.dataType.simpleString().upper() for field in columns.fields}
    for field in sink.table.partitions:
        problem = field.problem(kinds, reads_windows="_source" not in kinds)
        if problem is not None:
            raise ConfigError(
                f"sink {sink.name!r}: partition_by {field.text!r}: {problem}", option=f"sinks.{sink.name}.partition_by"
            )
