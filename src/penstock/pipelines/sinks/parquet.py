"""Parquet files of tables: those of an attempt to write a batch; Spark's schema of a file, and the statistics by which
readers of Delta tables skip files, both from its footer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.pipelines.state_dir.layout import remove_tree, sync_directory, sync_file
from penstock.spark.files.object_storage import (
    ObjectPath,
    StoragePath,
    object_storage_errors,
    spark_path,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import DataFrame

__all__ = [
    "ROW_GROUP_BYTES",
    "SPARKS_SCHEMA",
    "FileTarget",
    "FileWriter",
    "new_attempt",
    "read_file",
    "read_footer",
    "spark_schema",
    "statistics",
    "write_attempt",
    "write_file",
    "write_staged",
]

SPARKS_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
"""Key of Spark's own column types in the metadata of a Parquet file."""
_LONGEST_BOUND = 128
"""Maximum number of characters of a string in the statistics: the log of the table has them for each file."""


def spark_schema(file: StoragePath) -> dict[str, Any] | None:
    """Return the schema that Spark, or penstock for Spark, stored in ``file``, as JSON; None if it has none."""
    stored = (read_footer(file).metadata or {}).get(SPARKS_SCHEMA)
    return None if stored is None else dict(json.loads(stored))


def read_footer(file: StoragePath) -> pq.FileMetaData:
    """Return the footer of ``file``.

    Raises:
        StorageError, UnavailableError: the file is in a bucket and cannot be read.
    """
    import pyarrow.parquet as pq

    if not isinstance(file, ObjectPath):
        return pq.read_metadata(file)
    with object_storage_errors(file), file.open_input() as source:
        return pq.read_metadata(source)


def read_file(file: StoragePath) -> pa.Table:
    """Return the rows of ``file``.

    Raises:
        StorageError, UnavailableError: the file is in a bucket and cannot be read.
    """
    import pyarrow.parquet as pq

    if not isinstance(file, ObjectPath):
        return pq.ParquetFile(file).read()
    with object_storage_errors(file), file.open_input() as source:
        return pq.ParquetFile(source).read()


def write_file(rows: pa.Table, file: StoragePath) -> None:
    """Write ``rows`` to the new ``file``, durably; raises as :func:`read_file`."""
    import pyarrow.parquet as pq

    if isinstance(file, ObjectPath):
        with object_storage_errors(file), file.open_output() as target:
            pq.write_table(rows, target)
        return
    # Readers of the directory neither find a part of a file nor what a crash leaves.
    hidden = file.with_name(f".{file.name}.tmp")
    pq.write_table(rows, hidden)
    sync_file(hidden)
    hidden.rename(file)
    sync_directory(file.parent)


def new_attempt(table: Path, writer: str, batch: int) -> Path:
    """Return a directory, which does not exist, for the files of one attempt of ``writer`` to write ``batch``."""
    return table / "_attempts" / f"{writer}-{batch}-{uuid.uuid4().hex[:12]}"


def write_attempt(rows: DataFrame, attempt: Path) -> list[str]:
    """Write ``rows`` as one file in the directory ``attempt``, synced; return the names of its files."""
    rows.coalesce(1).write.parquet(str(attempt))
    names = [path.name for path in sorted(attempt.glob("*.parquet"))]
    for name in names:
        sync_file(attempt / name)
    return names


def write_staged(rows: DataFrame, staging: StoragePath) -> tuple[Path, list[str]]:
    """Write ``rows`` as one file with Spark to the new directory ``staging``, and return a local directory with it.

    From a bucket the file is copied to a temporary directory, and ``staging`` is removed.

    Raises:
        StorageError, UnavailableError: the file in the bucket cannot be read.
    """
    if not isinstance(staging, ObjectPath):
        return staging, write_attempt(rows, staging)
    rows.coalesce(1).write.parquet(spark_path(staging))
    local = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        names = [name for name in staging.names() if name.endswith(".parquet")]
        for name in names:
            (staging / name).download(local / name)
    except BaseException:
        shutil.rmtree(local, ignore_errors=True)
        raise
    finally:
        remove_tree(staging)
    return local, names


ROW_GROUP_BYTES = 32 << 20
"""Size in memory of the rows of a row group. Spark passes batches of at most 10,000 rows: row groups of this size would
compress less, and readers would open more of them."""


@dataclass(frozen=True, slots=True)
class FileTarget:
    """Directory of Parquet files, their metadata (Spark's schema), and the size in bytes of a full one."""

    directory: StoragePath
    metadata: Mapping[bytes, bytes]
    file_bytes: int | None = None


class FileWriter:
    """Parquet files, created with their first rows. ``directory`` is relative to that of the target."""

    def __init__(self, target: FileTarget, directory: str = "") -> None:
        self.count = 0
        self.names: list[str] = []
        self.waiting_bytes = 0
        self._target = target
        self._directory = directory
        self._writer: Any = None
        self._output: pa.NativeFile | None = None
        self._waiting: list[pa.RecordBatch] = []

    @property
    def is_open(self) -> bool:
        """True if a file is open."""
        return self._writer is not None

    def write(self, rows: pa.RecordBatch) -> None:
        """Append ``rows``."""
        self._waiting.append(rows)
        self.waiting_bytes += rows.nbytes
        self.count += len(rows)
        if self.waiting_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def _write_row_group(self) -> None:
        import pyarrow as pa

        rows = pa.Table.from_batches(self._waiting)
        with object_storage_errors(self._target.directory):
            if self._writer is None:
                self._open(rows.schema)
            self._writer.write_table(rows)
        self._waiting, self.waiting_bytes = [], 0
        largest = self._target.file_bytes
        if largest is not None and self._size() >= largest:
            self.close()

    def _open(self, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        name = f"part-{uuid.uuid4().hex}.parquet"
        self.names.append(f"{self._directory}/{name}" if self._directory else name)
        file = self._file
        if isinstance(file, ObjectPath):
            self._output = file.open_output()
            self._writer = pq.ParquetWriter(self._output, schema, store_schema=False)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(file, schema, store_schema=False)
        self._writer.add_key_value_metadata(dict(self._target.metadata))

    @property
    def _file(self) -> StoragePath:
        """The path of the current file."""
        return self._target.directory / self.names[-1]

    def _size(self) -> int:
        file = self._file
        if isinstance(file, ObjectPath):
            assert self._output is not None
            return self._output.tell()
        return file.stat().st_size

    def close(self) -> None:
        """Complete the current file and sync it to disk. Rows that follow are in another file.

        Raises:
            StorageError, UnavailableError: the file is in a bucket and was not stored.
        """
        if self._waiting:
            self._write_row_group()
        if self._writer is None:
            return
        writer, output, self._writer, self._output = self._writer, self._output, None, None
        with object_storage_errors(self._target.directory):
            writer.close()
            if output is not None:
                # The object exists after this.
                output.close()
        file = self._file
        if not isinstance(file, ObjectPath):
            sync_file(file)


def statistics(footer: pq.FileMetaData) -> dict[str, Any]:
    """Return the statistics of the file with ``footer`` as a Delta log stores them.

    ``numRecords`` is the number of rows. ``nullCount``, ``minValues`` and ``maxValues`` have only columns whose values
    are certain: no nested columns, and no bounds of

    * floating-point columns: their footer does not count NaN, which Spark considers larger than all numbers, and a NaN
      or an infinity in the log would make the table unreadable for ``deltalake``;
    * strings that are longer than 128 characters, binary values and decimals;
    * timestamps that a Python datetime cannot represent.
    """
    nulls: dict[str, int] = {}
    bounds: dict[str, tuple[Any, Any] | None] = {}
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path
        # A path with a dot is a nested column, or a name that looks like one.
        if "." in name:
            continue
        chunks = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
        counts = [chunk.statistics.null_count if chunk.statistics is not None else None for chunk in chunks]
        if all(count is not None for count in counts):
            nulls[name] = sum(cast("list[int]", counts))
            bounds[name] = _bounds(chunks)
    found = {name: pair for name, pair in bounds.items() if pair is not None}
    return {
        "numRecords": footer.num_rows,
        "minValues": {name: _as_json(low) for name, (low, _) in found.items()},
        "maxValues": {name: _as_json(high) for name, (_, high) in found.items()},
        "nullCount": nulls,
    }


def _bounds(chunks: list[pq.ColumnChunkMetaData]) -> tuple[Any, Any] | None:
    """Return the smallest and the largest value of a column; None if unknown, or if there is no value."""
    pairs = list(_pairs(chunks))
    if not pairs or None in pairs:
        return None
    known = [pair for pair in pairs if pair is not None]
    return min(low for low, _ in known), max(high for _, high in known)


def _pairs(chunks: list[pq.ColumnChunkMetaData]) -> Iterator[tuple[Any, Any] | None]:
    """Yield the bounds of each chunk that has values, None for unknown ones."""
    for chunk in chunks:
        stats = chunk.statistics
        assert stats is not None
        if stats.null_count == chunk.num_values:
            continue
        try:
            pair = (stats.min, stats.max) if stats.has_min_max else None
        except (ValueError, OverflowError):
            # Not a date of Python, or not UTF-8.
            pair = None
        yield pair if pair is not None and all(map(_is_usable, pair)) else None


def _is_usable(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_BOUND
    return isinstance(value, int | date) and not isinstance(value, bool)


def _as_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value
