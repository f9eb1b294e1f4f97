"""Files of JSON or CSV for other programs: each batch with rows is one file, which appears whole and once.

    <path>/<pipeline>-<sink>-<query>-<batch>.json       the rows of a batch
    <path>/.penstock/<query>-<sink>-<batch>-<id>/       files of one attempt to write a batch
    <state>/file_batches/<sink>/<query>-<batch>.json    the attempt that is the file of a batch, and its rows

A program may take a file away as soon as it appears, so the directory cannot tell whether a batch was written. An
attempt is therefore noted in the state directory before its file is moved: the first note is valid, and a batch that
has one moves the file of this attempt, if that has not happened yet, and writes nothing.

With a path in a bucket, where there is no rename, the attempts are below ``<state>/file_batches/<sink>``: Spark writes
to the state directory without further jars. The driver copies the file.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, VariantType

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.rows import data_columns
from penstock.pipelines.spec.sinks import FilesSink
from penstock.pipelines.state_dir.layout import (
    file_batches,
    first_json,
    listed,
    make_directory,
    read_json,
    remove_tree,
    sync_directory,
    sync_file,
)
from penstock.pipelines.steps.expressions import quoted_column
from penstock.spark.files.object_storage import (
    ObjectPath,
    StoragePath,
    absolute_path,
    object_storage_errors,
    open_input,
    spark_path,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["FileBatches", "check_flat", "write_lines"]

ATTEMPTS = ".penstock"
"""Directory of the attempts, below that of the files, so that a rename moves them. Programs skip hidden names."""
KEPT_NOTES = 100
"""Number of batches whose notes are kept. A run that was paused between two calls, and has lost its lease, finds them;
it can be further behind only if 100 batches were written in this pause."""
_BLOCK_BYTES = 8 << 20
_NOTE = re.compile(r"(?P<query>.+)-(?P<batch>[0-9]+)\.json")


class _Note(NamedTuple):
    """The attempt whose file is that of a batch: the name of its directory, the names of the file in it and as it
    appears, and the number of rows.

    ``path``: the directory of the files then, another one than now if the pipeline file has changed; empty: a bucket.
    """

    attempt: str
    written: str
    name: str
    rows: int
    path: str


class FileBatches:
    """The files of one sink in the directory ``path``.

    ``name``: of the pipeline and the sink, ``query``: the id in the checkpoint; ``state``: the state
    directory, which has the notes.
    """

    def __init__(self, path: StoragePath, name: tuple[str, str], query: str, state: StoragePath, suffix: str) -> None:
        # Relative paths refer to the working directory of this process, not of the JVM, which writes the files.
        self.path = absolute_path(path)
        self._pipeline, self._sink = name
        self._query = query
        self._notes = absolute_path(file_batches(state, self._sink))
        self._suffix = suffix

    def write(self, batch: int, count: int, write: Callable[[StoragePath], None]) -> int:
        """Make the file of ``batch``, with ``count`` rows, unless an attempt has; return the number of its rows.

        ``write`` writes one file, whose name ends like that of the batch, to a directory that does not exist.
        """
        note = self._notes / f"{self._query}-{batch}.json"
        found = _read(note)
        if found is None:
            if not count:
                return 0
            found = self._attempt(batch, count, write, note)
            self._forget(batch - KEPT_NOTES)
        self._place(found)
        return found.rows

    def _attempt(self, batch: int, count: int, write: Callable[[StoragePath], None], note: StoragePath) -> _Note:
        path = "" if isinstance(self.path, ObjectPath) else str(self.path)
        attempts = self._attempts(path)
        attempt = attempts / f"{self._query}-{self._sink}-{batch}-{uuid.uuid4().hex[:12]}"
        if not isinstance(attempts, ObjectPath):
            make_directory(attempts)
        try:
            write(attempt)
            written = [match[0] for match in listed(attempt, re.compile(f"part-.*{re.escape(self._suffix)}"))]
            if len(written) != 1:
                raise StorageError(
                    f"sink {self._sink!r}: batch {batch} was written as {len(written)} files instead of one",
                    path=str(attempt),
                )
            _sync(attempt, written[0])
        except Exception:
            # A batch is repeated until it succeeds: the attempts would fill a disk.
            remove_tree(attempt)
            raise
        # A query is recognized by a few of its digits: files of another checkpoint are not replaced.
        name = f"{self._pipeline}-{self._sink}-{self._query[:8]}-{batch:010}{self._suffix}"
        mine = _Note(attempt.name, written[0], name, count, path)
        found = _parsed(note, first_json(note, mine._asdict()))
        if found != mine:
            # A later run has noted its attempt: this run was paused and has lost its lease.
            remove_tree(attempt)
        else:
            self._remove_attempts(attempts, batch, mine)
        return found

    def _attempts(self, path: str) -> StoragePath:
        """Return the directory of the attempts to write files to the directory ``path``; empty: to a bucket."""
        return Path(path) / ATTEMPTS if path else self._notes

    def _remove_attempts(self, attempts: StoragePath, batch: int, noted: _Note) -> None:
        """Remove the attempts up to ``batch``, in which runs were killed, or could not make the note.

        The file of an earlier batch was moved before this batch began. In a bucket they stay.
        """
        names = re.compile(re.escape(f"{self._query}-{self._sink}-") + "([0-9]+)-[0-9a-f]{12}")
        for match in listed(attempts, names):
            if int(match[1]) <= batch and match[0] != noted.attempt:
                remove_tree(attempts / match[0])

    def _place(self, found: _Note) -> None:
        """Give the file of the attempt its name, unless this was done before."""
        attempt = self._attempts(found.path) / found.attempt
        file = attempt / found.written
        if found.path:
            assert isinstance(file, Path)
            target = Path(found.path) / found.name
            with suppress(FileNotFoundError):
                file.rename(target)
            sync_directory(target.parent)
        elif file.exists():
            _copy(file, self.path / found.name)
        remove_tree(attempt)

    def _forget(self, newest: int) -> None:
        """Remove the notes of the batches up to ``newest``, and those of other checkpoints."""
        for match in listed(self._notes, _NOTE):
            if match["query"] != self._query or int(match["batch"]) <= newest:
                (self._notes / match[0]).unlink(missing_ok=True)


def _read(note: StoragePath) -> _Note | None:
    try:
        return _parsed(note, read_json(note))
    except FileNotFoundError:
        return None


def _parsed(note: StoragePath, value: dict[str, Any]) -> _Note:
    try:
        texts = {name: str(value[name]) for name in ("attempt", "written", "name", "path")}
        return _Note(rows=int(value["rows"]), **texts)
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{note} is not the note of a file: {error!r}", path=str(note)) from error


def _sync(attempt: StoragePath, name: str) -> None:
    """Sync the file and its directories: after a note of the attempt nothing of it may be lost."""
    if isinstance(attempt, ObjectPath):
        return
    sync_file(attempt / name)
    sync_directory(attempt)
    sync_directory(attempt.parent)


def _copy(file: StoragePath, target: StoragePath) -> None:
    """Copy ``file`` to ``target``, which appears whole; ``target`` is a local one only if the path was in a bucket."""
    with object_storage_errors(file), open_input(file) as source:
        blocks = iter(lambda: source.read(_BLOCK_BYTES), b"")
        if isinstance(target, ObjectPath):
            target.write_blocks(blocks)
            return
        make_directory(target.parent)
        hidden = target.with_name(f".{target.name}")
        with hidden.open("wb") as made:
            made.writelines(blocks)
        sync_file(hidden)
        hidden.replace(target)
        sync_directory(target.parent)


def write_lines(rows: DataFrame, sink: FilesSink, directory: StoragePath) -> None:
    """Write ``rows`` as one file of lines to the new ``directory``, with Spark."""
    names = sink.columns or data_columns(rows)
    lines = rows.coalesce(1)
    if sink.order_by is not None:
        lines = lines.sortWithinPartitions(quoted_column(sink.order_by))
    writer = lines.select(*map(quoted_column, names)).write.format(sink.format).options(**sink.spark_options)
    if sink.format == "csv" and len(names) == 1:
        # The line of a null would be empty, and Spark leaves it out.
        writer = writer.option("nullValue", '""')
    writer.save(spark_path(directory))


def check_flat(name: str, sink: FilesSink, columns: StructType) -> None:
    """Check that the columns of the sink ``name`` can be fields of CSV.

    Raises:
        ConfigError: one of them has no form in CSV.
    """
    if sink.format != "csv":
        return
    chosen = {column.lower() for column in sink.columns}
    for field in columns.fields:
        if field.name.startswith("_") or (chosen and field.name.lower() not in chosen):
            continue
        if isinstance(field.dataType, (ArrayType, BinaryType, MapType, StructType, VariantType)):
            raise ConfigError(
                f"sink {name!r}: column {field.name!r} cannot be a field of CSV",
                option=f"sinks.{name}.files.format",
                why=f"it is {field.dataType.simpleString().upper()}",
                hint="convert it in a map step (to_json, base64), select other columns, or use format: json",
            )
