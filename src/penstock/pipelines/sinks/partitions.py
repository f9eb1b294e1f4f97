"""Partitions of a Delta table: columns that are computed for them, and directories of their files.

A file has the rows of one value of each partition column. The log has the values, and so do the names of the
directories, ``<column>=<value>``, as Hive writes them: Polars reads them there. Names are escaped to ASCII, as
``deltalake`` escapes them when it combines files. The files themselves lack the partition columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from penstock.errors import ConfigError
from penstock.pipelines.spec.sinks import Sink, TableSink
from penstock.pipelines.spec.values import sink_letter
from penstock.pipelines.state_dir.layout import sync_file

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = [
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
"""Maximum length of an escaped value, in bytes: a name in a directory has at most 255 with that of the column."""


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

    # One number for each combination of values; at most four columns with 10,000 values each fit into 64 bits.
    codes = np.zeros(len(rows), dtype=np.int64)
    texts: list[list[str | None]] = []
    for name in names:
        column = rows.column(name).cast(pa.string()).dictionary_encode(null_encoding="encode")
        codes = codes * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
        texts.append(column.dictionary.to_pylist())
    rest = rows.drop_columns(list(names))
    found = np.unique(codes)
    for code in found:
        values: list[str | None] = []
        left = int(code)
        for text in reversed(texts):
            left, index = divmod(left, len(text))
            values.append(text[index])
        directory = partition_directory(dict(zip(names, reversed(values), strict=True)))
        yield directory, rest if len(found) == 1 else rest.filter(pa.array(codes == code))


def split_file(file: Path, names: Sequence[str]) -> list[str]:
    """Write the rows of ``file`` again, for each value of ``names`` to a file in a directory next to it, and sync them.

    Returns their names, relative to the directory of ``file``, which is removed. The metadata are those of ``file``.
    """
    import pyarrow.parquet as pq

    writers: dict[str, pq.ParquetWriter] = {}
    # By default Spark writes timestamps as INT96, which Arrow reads as nanoseconds.
    with pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as source:
        found = source.metadata.metadata or {}
        metadata = {key.decode(): value.decode() for key, value in found.items() if key != b"ARROW:schema"}
        for batch in source.iter_batches():
            for directory, rows in split(batch, names):
                name = f"{directory}/{file.name}"
                if name not in writers:
                    (file.parent / directory).mkdir(parents=True, exist_ok=True)
                    schema = rows.schema.remove_metadata()
                    writers[name] = pq.ParquetWriter(file.parent / name, schema, store_schema=False)
                    writers[name].add_key_value_metadata(metadata)
                writers[name].write_batch(rows.replace_schema_metadata(None))
    for name, writer in writers.items():
        writer.close()
        sync_file(file.parent / name)
    file.unlink()
    return list(writers)


def computed_columns(table: TableSink) -> dict[str, tuple[Column, str]]:
    """Return the columns that are computed for partitions, by name, and the column that each reads.

    Days and hours are those of the session's time zone, which is UTC unless it is set.
    """
    from pyspark.sql import functions as sf

    found: dict[str, tuple[Column, str]] = {}
    for field in table.partitions:
        quoted = "`" + field.column.replace("`", "``") + "`"
        column, read = (
            (sf.col("_source.timestamp"), "_source") if field.is_coordinate else (sf.col(quoted), field.column)
        )
        match field.transform:
            case "day":
                found[field.name] = column.cast("date"), read
            case "hour":
                found[field.name] = sf.date_format(column, "yyyy-MM-dd-HH"), read
            case "bucket":
                found[field.name] = sf.pmod(sf.hash(column), sf.lit(field.buckets)), read
    return found


def mark_unpartitionable(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark rows as dead whose partition has no valid value: a text that no directory can have, or a year after 9999.

    Raises:
        ConfigError: see :func:`check_partition_columns`.
    """
    from pyspark.sql import functions as sf
    from pyspark.sql.types import DateType, StringType

    from penstock.pipelines.rows import mark_dead

    check_partition_columns(sink, rows.schema)
    table, failures = sink.table, []
    assert table is not None
    computed = computed_columns(table)
    for field in table.partitions:
        if field.is_coordinate:
            continue
        column = computed[field.name][0] if field.name in computed else sf.col("`" + field.name + "`")
        kind = rows.select(column).schema[0].dataType
        if isinstance(kind, DateType):
            wrong = (sf.year(column) < 1) | (sf.year(column) > 9999)
            said = sf.format_string(f"%s of {field.text} is not a day from year 1 to 9999", column.cast("string"))
        elif isinstance(kind, StringType) and field.transform == "identity":
            plain = sf.length(sf.regexp_replace(column, "[^A-Za-z0-9_.-]", ""))
            size = sf.octet_length(column) * 3 - plain * 2
            # Programs do not find files whose directory has a ~, and read the name for null as null.
            wrong = (size > _LONGEST) | column.contains("~") | (column == _NULL)
            said = sf.lit(
                f"the value of {field.column} cannot be a partition: it has a ~, is {_NULL}, "
                f"or is longer than {_LONGEST} characters as the name of a directory"
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
        if field.is_coordinate:
            problem = None if "_source" in kinds else "windows have no time of a record; use a column of the window"
        else:
            problem = field.problem(kinds)
        if problem is not None:
            raise ConfigError(
                f"sink {sink.name!r}: partition_by {field.text!r}: {problem}", option=f"sinks.{sink.name}.partition_by"
            )
