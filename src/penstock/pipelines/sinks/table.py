"""A Parquet table with a commit log: each batch of each writer is in the table exactly once or not at all.

    <table>/writer=<sink>/batch=<n>/part-*.parquet    the rows of one batch
    <table>/_commits/<sink>-<n>.json                  written after the rows: committed files and number of rows
    <table>/_commits/closed/<sink>-<n>.json           the commits of 500 batches up to n, together: a segment

The newest 500 to 1,000 commits of a sink have files of their own, so that the number of files does not grow with that
of the batches; in a bucket all have. A batch that is in a segment is not read from a file, which a crash has left, or
a run that has lost its lease has written. A reader reads the files first: one that does not exist any more is in a
segment. Segments are written, and rows deleted, under the lock ``_commits/lock``.

A batch that is repeated after a crash finds its commit and does nothing, or writes its rows again and commits them: the
first commit is valid, later ones are ignored. Files without a commit are left over from failed attempts; in a bucket,
executors write objects at their final path, under names that are never used again. Readers that list the files of the
log (``files``, ``read``) therefore see each batch exactly once.

A reader that lists directories sees the files of a batch a moment before its commit, and those that a crash in this
moment has left until the batch has been repeated: it then removes them. In a bucket it may see those of failed
attempts.

Rows are deleted in three steps: new files without them, the commits with the new files, durably, and then the old files
are removed. Either the old files or the new ones are part of the table at any time. A crash leaves the others, until
rows are deleted again.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from penstock.errors import PenstockError, StorageError, UnavailableError
from penstock.pipelines.sinks.delta import (
    check_partitions,
    delta_files,
    delta_partitions,
    delta_schema,
    delta_writers,
    is_delta_table,
    other_type,
)
from penstock.pipelines.sinks.parquet import (
    new_attempt,
    read_file,
    spark_schema,
    write_attempt,
    write_file,
    write_staged,
)
from penstock.pipelines.state_dir.layout import (
    create_json,
    listed,
    locked,
    read_each,
    read_json,
    sync_directory,
    sync_parents,
    write_json,
    write_text,
)
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.object_storage import AnyPath, ObjectPath, StoragePath, absolute_path, object_storage_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = [
    "Commit",
    "Table",
    "check_columns",
    "check_partitions",
    "check_types",
    "commits",
    "delete_rows",
    "files",
    "has_table",
    "read",
    "writers",
]

_log = logging.getLogger(__name__)

_COMMIT_NAME = re.compile(r"(?P<writer>.+)-(?P<batch>[0-9]+)\.json")
SEGMENT = 500
"""Number of commits of a segment."""
_AT_ONCE = 10
"""Maximum number of segments that a batch writes: a table of an older version has files for thousands of them."""


class Commit(NamedTuple):
    """One committed batch. ``query`` is the id in the checkpoint of the query that wrote it; ``files`` are relative.

    ``rows`` is the number of rows at the time of the commit, ``deleted`` the number of rows deleted since.
    """

    writer: str
    batch: int
    query: str
    rows: int
    files: tuple[str, ...]
    deleted: int = 0


class Table:
    """The table at ``path``, for one writer. ``query`` is the id in the writer's checkpoint.

    Batch numbers are valid only together with their checkpoint, so a writer rejects a table in which its name committed
    batches of another checkpoint. Checking the newest commit is sufficient. The check lists all commits, so create one
    object for a run, not one for each batch.

    ``staging`` returns a new directory for files that Spark writes, if the table is in a bucket. ``check_new`` is
    called before a batch creates a local table, and raises an error if it must not.
    """

    def __init__(
        self,
        path: StoragePath,
        writer: str,
        query: str,
        staging: Callable[[], StoragePath] | None = None,
        check_new: Callable[[], None] = lambda: None,
    ) -> None:
        # Relative paths refer to the working directory of this process, not of the JVM, which writes the files.
        self.path = path = absolute_path(path)
        self._staging = staging
        self._check_new = check_new
        self.writer = writer
        self.query = query
        self._own = sorted(batch for of, batch in _named(path) if of == writer)
        """Batches whose commits have files of their own."""
        self._closed = _last_closed(path, writer)
        """The last batch that is in a segment; -1: none is."""
        self._close_at = 2 * SEGMENT
        """Number of files of commits at which a batch writes a segment."""
        commit = _newest(path, writer)
        if commit is not None and commit.query != query:
            raise PenstockError(
                f"table {str(path)!r} has batches that {writer!r} wrote with another checkpoint",
                why=f"batch {commit.batch} was written by query {commit.query}, this run is query {query}: "
                "batches with the same number would overwrite or hide each other's rows",
                hint="use the previous state directory, or set another path for the sink",
            )

    def write(self, batch: int, rows: DataFrame, count: int) -> int:
        """Write ``rows`` as ``batch`` and commit; return the number of rows of this batch in the table.

        ``count`` is the number of ``rows``. A batch that is already committed does not change.
        """
        found = self._committed(batch)
        if found is not None:
            return found.rows
        if count == 0:
            return 0
        if isinstance(self.path, ObjectPath):
            assert self._staging is not None
            local, names = write_staged(rows, self._staging())
            return self.commit(batch, local, names, count)
        attempt = new_attempt(self.path, self.writer, batch)
        return self.commit(batch, attempt, write_attempt(rows, attempt), count)

    def new_attempt(self, batch: int) -> StoragePath:
        """Return the directory for the files of one attempt to write ``batch``: a new one, or their final path."""
        if isinstance(self.path, ObjectPath):
            return self._directory(batch)
        return new_attempt(self.path, self.writer, batch)

    def _directory(self, batch: int) -> StoragePath:
        return _batch_directory(self.path, self.writer, batch)

    def commit(self, batch: int, attempt: StoragePath, names: Sequence[str], count: int) -> int:
        """Commit the files ``names`` of ``attempt``, synced, with ``count`` rows; return the rows of the batch.

        A batch that is already committed does not change. The directory of the attempt is removed.

        An attempt moves its own files only. Overwriting the directory of the batch would be simpler, but a run that
        resumes here after a pause would remove files that a later run has committed.
        """
        before = self._committed(batch)
        if before is not None or not count:
            self._remove(attempt, names)
            return 0 if before is None else before.rows
        if not isinstance(self.path, ObjectPath) and not (self.path / "_commits").exists():
            try:
                self._check_new()
            except PenstockError:
                self._remove(attempt, names)
                raise
        # The names of files are unique, so other attempts use other names.
        directory = self._place(batch, attempt, names)
        left = (
            []
            if isinstance(directory, ObjectPath)
            else [each for each in directory.iterdir() if each.name not in names]
        )
        is_ours = create_json(
            _commit_path(self.path, self.writer, batch),
            {
                "writer": self.writer,
                "batch": batch,
                "query": self.query,
                "rows": count,
                "files": [f"writer={self.writer}/batch={batch}/{name}" for name in names],
            },
        )
        # A run that was paused for many batches finds no file of the commit: a segment has it, and ``left`` its rows.
        found = self._in_segment(batch) if is_ours and left else None
        if is_ours and found is None:
            # Their attempt was killed, or it cannot commit them any more.
            for file in left:
                file.unlink(missing_ok=True)
            self._own.append(batch)
            if len(self._own) >= self._close_at and not isinstance(self.path, ObjectPath):
                self._close(self.path)
            return count
        # A later run has committed the batch: this run was paused and has lost its lease.
        for name in names:
            (directory / name).unlink(missing_ok=True)
        self._closed = max(self._closed, batch)
        found = found or self._committed(batch)
        assert found is not None
        return found.rows

    def _committed(self, batch: int) -> Commit | None:
        """Return the commit of ``batch``; None if it is not committed."""
        own = _existing_commit(_commit_path(self.path, self.writer, batch))
        # The segment counts: of two commits of a batch, it has the first one.
        return own if batch > self._closed else self._in_segment(batch) or own

    def _in_segment(self, batch: int) -> Commit | None:
        """Return the commit of ``batch`` in a segment; None if none has it."""
        segments = (_segment(path) for last, path in _segments(self.path, self.writer) if last >= batch)
        return next((found for each in segments for found in each if found.batch == batch), None)

    def _close(self, table: Path) -> None:
        """Replace the files of the oldest commits by segments."""
        self._own.sort()
        # If this fails, the next segment does it.
        self._close_at = len(self._own) + SEGMENT
        old = self._own[:-SEGMENT][: _AT_ONCE * SEGMENT]
        try:
            with _lock(table, wait=False):
                closed = {
                    commit.batch
                    for last, path in _segments(table, self.writer)
                    if last >= old[0]
                    for commit in _segment(path)
                }
                for part in (old[start : start + SEGMENT] for start in range(0, len(old), SEGMENT)):
                    paths = [_commit_path(table, self.writer, batch) for batch in part]
                    found = [commit for path in paths if (commit := _existing_commit(path)) is not None]
                    # A crash has left the files of others.
                    new = [commit for commit in found if commit.batch not in closed]
                    if new:
                        # No other segment has this name: it would have this batch.
                        name = f"{self.writer}-{new[-1].batch}.json"
                        _write_segment(_closed_directory(table) / name, new)
                    self._closed = max(self._closed, part[-1])
                    for path in paths:
                        path.unlink(missing_ok=True)
        except UnavailableError:
            # Another process closes them, or deletes rows.
            return
        except (StorageError, OSError) as error:
            # The batch is committed.
            _log.warning("old commits of table %s stay in files of their own until a later batch: %s", table, error)
            return
        self._own = self._own[len(old) :]
        self._close_at = 2 * SEGMENT

    @staticmethod
    def _remove(attempt: StoragePath, names: Sequence[str]) -> None:
        if isinstance(attempt, ObjectPath):
            for name in names:
                (attempt / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(attempt, ignore_errors=True)

    def _place(self, batch: int, attempt: StoragePath, names: Sequence[str]) -> StoragePath:
        """Move the files of ``attempt`` to the directory of the batch, and return it."""
        directory = self._directory(batch)
        if isinstance(attempt, ObjectPath):
            return directory
        if isinstance(directory, ObjectPath):
            with object_storage_errors(directory):
                for name in names:
                    (directory / name).upload(attempt / name)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            for name in names:
                (attempt / name).rename(directory / name)
            table = directory.parent.parent
            if not (log := table / "_commits").exists():
                sync_parents(table)
                log.mkdir(exist_ok=True)
            for parent in (directory, directory.parent, table):
                sync_directory(parent)
        shutil.rmtree(attempt, ignore_errors=True)
        return directory


def has_table(path: StoragePath) -> bool:
    """Return True if there is a Delta table, or a Parquet table with a committed batch, at ``path``."""
    return is_delta_table(path) or any(_named(path)) or bool(_segments(path))


def commits(path: StoragePath) -> list[Commit]:
    """Return the committed batches of the table at ``path``, by writer and batch; empty if there is no table."""
    own = read_each(_existing_commit, [_commit_path(path, writer, batch) for writer, batch in _named(path)])
    # Listed after the files were read: a file that was removed meanwhile is in a segment.
    closed = [commit for _, segment in _segments(path) for commit in _segment(segment)]
    by_batch = {(commit.writer, commit.batch): commit for commit in (*own, *closed) if commit is not None}
    return [by_batch[key] for key in sorted(by_batch)]


def _named(path: StoragePath) -> Iterator[tuple[str, int]]:
    """Yield writer and batch of each commit of the table at ``path`` with a file of its own."""
    for match in listed(path / "_commits", _COMMIT_NAME):
        yield match["writer"], int(match["batch"])


def _closed_directory(path: StoragePath) -> StoragePath:
    return path / "_commits" / "closed"


def _segments(path: StoragePath, writer: str | None = None) -> list[tuple[int, StoragePath]]:
    """Return last batch and path of each segment of ``writer``, or of all; none in a bucket."""
    if isinstance(path, ObjectPath):
        return []
    directory = _closed_directory(path)
    found = listed(directory, _COMMIT_NAME)
    return sorted((int(m["batch"]), directory / m[0]) for m in found if writer is None or m["writer"] == writer)


def _last_closed(path: StoragePath, writer: str) -> int:
    return max((last for last, _ in _segments(path, writer)), default=-1)


def _segment(path: StoragePath) -> list[Commit]:
    """Return the commits of a segment."""
    return [_commit_of(path, value) for value in read_json(path).get("commits", ())]


def _write_segment(path: StoragePath, found: Sequence[Commit]) -> None:
    write_text(path, json.dumps({"commits": [commit._asdict() for commit in found]}, separators=(",", ":")))


def _lock(table: Path, *, wait: bool) -> AbstractContextManager[int]:
    """Hold the lock of the commits of ``table``.

    Raises:
        UnavailableError: another process holds it, unless ``wait``.
    """

    def held(_: int) -> UnavailableError:
        return UnavailableError(
            f"the commits of table {table} are in use by another process",
            why="it writes a segment, or deletes rows",
            hint="try again",
        )

    return locked(table / "_commits" / "lock", held, wait=wait)


def check_columns(path: StoragePath, writer: str, columns: StructType) -> None:
    """Check that ``columns`` have the same types as in the newest rows that ``writer`` wrote to the table.

    Columns may be added and removed; they are null in other rows. A column of two types would be unreadable.

    Raises:
        ConfigError: a column has another type.
    """
    from pyspark.sql.types import StructType

    found = _newest_schema(path, writer)
    before = (
        {} if found is None else {field.name.lower(): field.dataType for field in StructType.fromJson(found).fields}
    )
    for field in columns.fields:
        was, now = before.get(field.name.lower(), field.dataType).simpleString(), field.dataType.simpleString()
        if was != now:
            raise other_type(path, writer, field.name, was, now)


def check_types(path: StoragePath, writer: str, types: Mapping[str, str]) -> None:
    """Like :func:`check_columns`, without Spark: for the simple ``types`` (column to type as in DDL) that are known.

    Raises:
        ConfigError: a column has another type.
    """
    found = _newest_schema(path, writer) if types else None
    kinds = {} if found is None else {field["name"].lower(): field["type"] for field in found["fields"]}
    for name, given in types.items():
        now, kind = _SPARKS_NAMES.get(given), kinds.get(name.lower())
        if now is None or kind is None or now == kind:
            continue
        # Types that are not simple are objects, or contain numbers.
        was = _SHOWN.get(kind, kind) if isinstance(kind, str) else str(kind["type"])
        raise other_type(path, writer, name, was, given)


_SPARKS_NAMES = {
    **{name: name.lower() for name in ("BOOLEAN", "FLOAT", "DOUBLE", "STRING", "BINARY", "DATE", "TIMESTAMP")},
    "TINYINT": "byte",
    "BYTE": "byte",
    "SMALLINT": "short",
    "SHORT": "short",
    "INT": "integer",
    "INTEGER": "integer",
    "BIGINT": "long",
    "LONG": "long",
    "REAL": "float",
    "TIMESTAMP_NTZ": "timestamp_ntz",
    "TIMESTAMP_LTZ": "timestamp",
    "VARIANT": "variant",
}
"""Names of simple types in DDL, and in the JSON of Spark's schemas."""
_SHOWN = {"byte": "TINYINT", "short": "SMALLINT", "integer": "INT", "long": "BIGINT"}


def _newest_schema(path: StoragePath, writer: str) -> dict[str, Any] | None:
    """Return Spark's schema, as JSON, of the newest rows that ``writer`` wrote to the table; None if unknown."""
    if is_delta_table(path):
        return delta_schema(path)
    if isinstance(path, ObjectPath):
        return None
    commit = _newest(path, writer)
    if commit is None or not commit.files or not (file := path / commit.files[0]).exists():
        return None
    return spark_schema(file)


def writers(path: StoragePath) -> dict[str, int]:
    """Return the number of committed batches of the table at ``path``, by writer.

    For a Delta table, whose log forgets batches, the number of the newest batch and one.
    """
    if is_delta_table(path):
        return {writer: max(queries.values()) + 1 for writer, queries in delta_writers(path).items()}
    if isinstance(path, ObjectPath):
        return {}
    closed = ((commit.writer, commit.batch) for _, segment in _segments(path) for commit in _segment(segment))
    return dict(Counter(writer for writer, _ in {*_named(path), *closed}))


def delete_rows(path: StoragePath, is_gone: Callable[[dict[str, Any]], bool]) -> int:
    """Delete the rows for which ``is_gone`` is true from the table at ``path``; return their number.

    The files of a batch are written again, then its commit is replaced, then the old files are removed, and those that
    an interrupted deletion has left. A reader in between has listed the old files: it fails, and finds the new ones in
    its next attempt.
    """
    if isinstance(path, ObjectPath):
        return _delete_rows(path, is_gone)
    if not (path / "_commits").is_dir():
        return 0
    with _lock(path, wait=True):
        return _delete_rows(path, is_gone)


def _delete_rows(path: StoragePath, is_gone: Callable[[dict[str, Any]], bool]) -> int:
    total = 0
    closed: set[tuple[str, int]] = set()
    for _, segment in _segments(path):
        before = _segment(segment)
        after = [_without(path, commit, is_gone) for commit in before]
        if after != before:
            _write_segment(segment, after)
        closed |= {(commit.writer, commit.batch) for commit in before}
        total += _deleted(path, before, after)
    for writer, batch in sorted(_named(path)):
        if (writer, batch) not in closed:
            place = _commit_path(path, writer, batch)
            commit = _commit(place)
            changed = _without(path, commit, is_gone)
            if changed != commit:
                write_json(place, changed._asdict())
            total += _deleted(path, [commit], [changed])
    return total


def _deleted(path: StoragePath, before: Sequence[Commit], after: Sequence[Commit]) -> int:
    """Return the number of rows deleted from the commits ``before``; ``after`` are stored.

    Other files of their batches are removed: what was replaced, now or by a deletion that did not end, and what an
    attempt has left that can no longer commit them.
    """
    for commit in after:
        directory = _batch_directory(path, commit.writer, commit.batch)
        kept = {name.rpartition("/")[2] for name in commit.files}
        for match in listed(directory, _ROWS):
            if match[0] not in kept:
                (directory / match[0]).unlink(missing_ok=True)
    return sum(now.deleted - was.deleted for was, now in zip(before, after, strict=True))


_ROWS = re.compile(r".+\.parquet(?:\.tmp)?")
"""Names of files with rows, also of those that are being written."""


def _without(path: StoragePath, commit: Commit, is_gone: Callable[[dict[str, Any]], bool]) -> Commit:
    """Write the files of ``commit`` that have rows for which ``is_gone`` is true again, without them; return the commit
    that has the new files."""
    kept: list[str] = []
    gone = 0
    for name in commit.files:
        rows = read_file(path / name)
        keeps = [not is_gone(row) for row in rows.to_pylist()]
        if all(keeps):
            kept.append(name)
            continue
        gone += keeps.count(False)
        if any(keeps):
            kept.append(f"{name.rpartition('/')[0]}/part-{uuid.uuid4().hex}.parquet")
            write_file(rows.filter(keeps), path / kept[-1])
    return commit._replace(files=tuple(kept), deleted=commit.deleted + gone)


def files(path: AnyPath) -> list[AnyPath]:
    """Return the committed Parquet files of a Parquet or Delta table, for any Parquet reader.

    They lack the partition columns of a Delta table, whose values are in the names of their directories.

    Raises:
        StorageError: a committed file is missing.
    """
    if isinstance(path, Path) and is_delta_table(path):
        return cast("list[AnyPath]", delta_files(path))
    return list(_files(path))


def read(spark: SparkSession, path: Path | str) -> DataFrame:
    """Read the committed batches of the Parquet or Delta table at ``path``."""
    found = files(Path(path))
    if not found:
        raise PenstockError(
            f"table {str(path)!r} has no committed batch yet",
            why=f"{str(Path(path) / '_commits')!r} is empty or does not exist",
            hint="check the path, or wait for the pipeline's first batch",
        )
    if is_delta_table(Path(path)) and delta_partitions(Path(path)):
        return _with_partitions(spark, Path(path))
    return spark.read.option("mergeSchema", "true").parquet(*map(str, found))


def _with_partitions(spark: SparkSession, path: Path) -> DataFrame:
    """Read a Delta table with partitions: its files lack these columns, whose values are in the log.

    Spark can read them in the names of the directories as well, but not characters other than ASCII.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as sf
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(delta_schema(path))
    by_values: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for file in DeltaLog(path).snapshot()[1]:
        by_values.setdefault(tuple(file.columns.items()), []).append(file.path)
    parts = []
    for values, names in by_values.items():
        stored = StructType([field for field in schema.fields if field.name not in dict(values)])
        columns = {name: sf.lit(value).cast(schema[name].dataType) for name, value in values}
        parts.append(
            spark.read.schema(stored)
            .parquet(*names)
            .withColumns(columns)
            .select(*(f"`{name}`" for name in schema.names))
        )
    return reduce(DataFrame.union, parts)


def _newest(path: StoragePath, writer: str) -> Commit | None:
    newest = max((batch for of, batch in _named(path) if of == writer), default=None)
    if newest is not None:
        # If it is in a segment since, there are newer ones.
        return _existing_commit(_commit_path(path, writer, newest)) or _newest(path, writer)
    segments = _segments(path, writer)
    return _segment(segments[-1][1])[-1] if segments else None


def _batch_directory(path: StoragePath, writer: str, batch: int) -> StoragePath:
    return path / f"writer={writer}" / f"batch={batch}"


def _commit_path(path: StoragePath, writer: str, batch: int) -> StoragePath:
    return path / "_commits" / f"{writer}-{batch}.json"


def _files(path: AnyPath) -> Iterator[AnyPath]:
    named = [(commit, name) for commit in commits(path) for name in commit.files]
    found = [cast("AnyPath", path / name) for _, name in named]
    for (commit, name), file, exists in zip(named, found, read_each(_exists, found), strict=True):
        if not exists:
            raise StorageError(
                f"table {str(path)!r}: batch {commit.batch} of {commit.writer!r} lacks its file {name!r}",
                path=str(file),
                why="the file was removed after the batch was committed",
                hint="restore the file, or replay the batch from TubeMQ into a new table",
            )
        yield file


def _exists(path: StoragePath) -> bool:
    return path.exists()


def _existing_commit(path: StoragePath) -> Commit | None:
    """Return the commit in the file ``path``; None if it does not exist."""
    try:
        return _commit(path)
    except FileNotFoundError:
        return None


def _commit(path: StoragePath) -> Commit:
    return _commit_of(path, read_json(path))


def _commit_of(path: StoragePath, value: Mapping[str, Any]) -> Commit:
    try:
        return Commit(
            str(value["writer"]),
            int(value["batch"]),
            str(value["query"]),
            int(value["rows"]),
            tuple(value["files"]),
            int(value.get("deleted", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path} is not a commit of a table: {error!r}", path=str(path)) from error
