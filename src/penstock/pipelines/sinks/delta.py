"""Write Delta tables without Delta's jars: executors write Parquet files, the driver commits them by ``deltalake``.

    <table>/_delta_log/<version>.json             the transactions of the table
    <table>/data/<name>.parquet                   files with rows
    <table>/<column>=<value>/<name>.parquet       those of a table with partitions
    <table>/_attempts/<sink>-<batch>-<id>/        files of an attempt that is not committed yet

A table in a bucket (``ObjectPath``) has no ``_attempts``: objects cannot be renamed, so executors write them at their
final path, and Spark writes the rows of a merge in the state directory. A version is an object that is created only if
it does not exist (``If-None-Match``), which every writer of the table must do.

A batch is a transaction with an application id, which is that of the query (``transaction_id``), and a version, which
is the number of the batch. ``deltalake`` writes such a transaction again if it is asked to, so the check is here: the
table is loaded, its last version of the application id is compared with the batch, and the commit is made with the same
object. If another client commits with this application id after the table was loaded, the commit fails. A repeated
batch and a run that lost its lease therefore change nothing. delta-spark uses the same transactions, so tables that
were written with Delta's jars continue.

``deltalake`` lists the whole log several times for a commit, so its time grows with the log. A batch that only adds
files is therefore written without it: the version after the newest one that is known is created, which fails if any
other client has committed since. If what was committed is files only, it is read, and the next version is tried.
Otherwise the table is loaded, checked and committed to as above, as it is for merges, changes of the schema, every
100th version, for which ``deltalake`` writes a checkpoint, unknown features, and after several failures.

Before the commit the files are complete, on disk or stored, and at their final path: a crash leaves files that no
version names, which ``vacuum`` removes. Before the batch is in the ledger, the log is synced to disk, after the commit
if ``deltalake`` made it, which does not call fsync; first the files that a merge wrote, and their directories.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import penstock
from penstock.errors import ConfigError, PenstockError, StorageError
from penstock.pipelines.sinks.parquet import (
    new_attempt,
    read_footer,
    spark_schema,
    statistics,
    write_attempt,
    write_staged,
)
from penstock.pipelines.sinks.partitions import partition_values, split_file
from penstock.pipelines.spec.sinks import PartitionField
from penstock.pipelines.spec.values import transaction_id
from penstock.pipelines.state_dir.layout import create_text, listed, sync_directory, sync_file, sync_parents
from penstock.spark.files.delta_log import CHANGE_FEED, DeltaLog, lines, version_path
from penstock.spark.files.object_storage import (
    ObjectPath,
    StoragePath,
    absolute_path,
    object_storage_error,
    object_storage_errors,
)

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, WriterProperties
    from deltalake.transaction import AddAction, RemoveAction
    from pyspark.sql import DataFrame

__all__ = [
    "DELETES",
    "DeltaWriter",
    "add_action",
    "certain_bounds",
    "check_fields",
    "check_partitions",
    "delta_files",
    "delta_partitions",
    "delta_schema",
    "delta_writers",
    "discard",
    "is_delta_table",
    "load",
    "nullable",
    "other_type",
    "storage_errors",
    "sync_versions",
]

# deltalake has an allocator of its own, jemalloc, which reads this when deltalake is imported. By default it keeps
# freed pages of each of its arenas for ten seconds: in 3,000 commits the memory of the process grew by 30 MB.
os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")

DELETES = "_delete"
"""Column of the rows of a merge: True for a row that deletes the row with its keys."""
_ATTEMPTS = 10
"""Maximum number of commits of one batch: another writer may change the schema or the same rows between them."""
_CREATIONS = 5
"""Number of them without ``deltalake``, which finds a free version itself while many writers commit."""
_FILES_ONLY = frozenset(("add", "cdc", "commitInfo", "remove", "txn"))
"""Actions of versions that change neither the schema nor the rules of a table."""
_SIMPLE = frozenset(
    ("binary", "boolean", "byte", "date", "double", "float", "integer", "long", "short", "string", "timestamp")
)
_BOUNDED = frozenset(("byte", "date", "integer", "long", "short", "string", "timestamp", "timestamp_ntz"))
"""Types of columns that have bounds in the log."""
_DECIMAL = re.compile(r"decimal\(\d+,\s*\d+\)")
_FORBIDDEN = re.compile(r"[ ,;{}()\n\t=]")
"""Characters that Delta does not accept in names of columns."""
_PLAIN = frozenset(("appendOnly", "changeDataFeed", "invariants", "timestampNtz"))
"""Features of a table that change nothing in a version that adds files."""
_FEATURES_WRITER = 7
"""Writer version from which the protocol of a table lists its features; 2 and less have appends without rules."""
_CHECKPOINT_EVERY = 100
"""Number of versions between two checkpoints that ``deltalake`` writes, unless the table has another one."""
_KNOWN_S = 600.0
"""Time after which a table is loaded again: the versions that were read then are kept for an hour at least."""


def is_delta_table(path: StoragePath) -> bool:
    """Return True if ``path`` is a Delta table."""
    return DeltaLog(path).exists()


def delta_schema(path: StoragePath) -> dict[str, Any]:
    """Return the schema of the table at ``path``, in Spark's JSON."""
    return dict(json.loads(load(path).schema().to_json()))


def delta_partitions(path: StoragePath) -> list[str]:
    """Return the partition columns of the table at ``path``."""
    return list(load(path).metadata().partition_columns)


def delta_files(path: Path) -> list[Path]:
    """Return the files with the rows of the table at ``path``."""
    return [Path(file.path) for file in DeltaLog(path).snapshot()[1]]


def delta_writers(path: StoragePath) -> dict[str, dict[str, int]]:
    """Return the last batch that each sink committed to the table at ``path``, by sink and id of its query."""
    found: dict[str, dict[str, int]] = {}
    for name, batch in DeltaLog(path).transactions().items():
        application, _, rest = name.partition("/")
        sink, separator, query = rest.rpartition("/")
        if application == "penstock" and separator:
            found.setdefault(sink, {})[query] = batch
    return found


def check_fields(path: StoragePath, writer: str, fields: Sequence[Mapping[str, Any]]) -> None:
    """Check that a Delta table can have the columns ``fields``, in Spark's JSON.

    Raises:
        ConfigError: a column has a type or a name that Delta does not support, or differs from a column of the table
            in upper and lower case only.
    """
    stored = {field["name"]: field for field in delta_schema(path)["fields"]} if is_delta_table(path) else {}
    folded = {name.lower(): name for name in stored}
    for field in fields:
        name = field["name"]
        if name in stored:
            continue
        if (other := folded.get(name.lower())) is not None:
            what = f"column {name!r} is {other!r} in {str(path)!r}"
            why = "names of columns in a Delta table must not differ in upper and lower case only"
        elif _FORBIDDEN.search(name):
            what = f"column {name!r} cannot be a column of a Delta table"
            why = "the name has a space or one of the characters ,;{}()= and line breaks"
        elif not _is_supported(field["type"]):
            kind = field["type"] if isinstance(field["type"], str) else field["type"]["type"]
            what = f"column {name!r} cannot be a column of a Delta table"
            why = f"Delta has no type for {kind.upper()}"
        else:
            continue
        raise ConfigError(
            f"sink {writer!r}: {what}",
            option=f"sinks.{writer}",
            why=why,
            hint="rename or cast it in a map step, or write a new table with `format: parquet`",
        )


class DeltaWriter:
    """The Delta table at ``path``, for one writer. ``query`` is the id in the writer's checkpoint.

    With ``keys``, the rows of a batch replace rows of the table with the same keys; a row whose column ``DELETES`` is
    true deletes them, and the table does not have this column. With ``partitions``, a file has the rows of one value of
    each, and its last directories have the values (``partition_directory``).

    Create one object for a run: it removes what earlier attempts of the writer left, and keeps the table loaded.

    ``staging`` returns a new directory for files that Spark writes, if the table is in a bucket. ``change_data_feed``:
    set the property of the table, also of one that exists. ``check_new`` is called before a batch creates the table,
    and raises an error if it must not.

    Raises:
        PenstockError: the table has batches that this writer appended with another checkpoint.
        UnavailableError: the storage of a bucket does not answer; so do all functions.
    """

    def __init__(
        self,
        path: StoragePath,
        writer: str,
        query: str,
        keys: Sequence[str] = (),
        partitions: Sequence[PartitionField] = (),
        staging: Callable[[], StoragePath] | None = None,
        *,
        change_data_feed: bool = False,
        check_new: Callable[[], None] = lambda: None,
    ) -> None:
        # Relative paths refer to the working directory of this process, not of the JVM, which writes the files.
        self.path = path = absolute_path(path)
        self._staging = staging
        self._change_data_feed = change_data_feed
        self._check_new = check_new
        self.writer = writer
        self._id = transaction_id(writer, query)
        self._keys = tuple(keys)
        self._partitions = tuple(partitions)
        self._known: _KnownTable | None = None
        if is_delta_table(path):
            committed = delta_writers(path).get(writer, {})
            if committed and query not in committed and not keys:
                other, batch = next(iter(committed.items()))
                raise PenstockError(
                    f"table {str(path)!r} has batches that {writer!r} wrote with another checkpoint",
                    why=f"batch {batch} was written by query {other}, this run is query {query}, "
                    "which would append the same rows again",
                    hint="use the previous state directory, or set another path for the sink",
                )
        if isinstance(path, ObjectPath):
            return
        for match in listed(path / "_attempts", re.compile(re.escape(writer) + r"-\d+-[0-9a-f]{12}")):
            shutil.rmtree(path / "_attempts" / match[0], ignore_errors=True)

    def new_attempt(self, batch: int) -> StoragePath:
        """Return the directory for the files of one attempt to write ``batch``: a new one, or their final path."""
        if isinstance(self.path, ObjectPath):
            return self.path if self._partitions else self.path / "data"
        return new_attempt(self.path, self.writer, batch)

    def write(self, batch: int, rows: DataFrame, count: int) -> int:
        """Write the ``count`` ``rows``, with unique keys, as ``batch`` and commit; return ``count``.

        A batch that is already committed does not change.
        """
        if not count or (self._known is not None and batch <= self._refresh(self._known).last_batch()):
            return count
        attempt, names = self._written_by_spark(batch, rows)
        if self._partitions and not self._keys:
            # A merge writes other files.
            names = [part for name in names for part in split_file(attempt / name, self._partition_columns)]
        return self.commit(batch, attempt, names, count)

    def _written_by_spark(self, batch: int, rows: DataFrame) -> tuple[Path, list[str]]:
        if isinstance(self.path, ObjectPath):
            assert self._staging is not None
            return write_staged(rows, self._staging())
        attempt = new_attempt(self.path, self.writer, batch)
        return attempt, write_attempt(rows, attempt)

    @property
    def _partition_columns(self) -> list[str]:
        return [field.name for field in self._partitions]

    def commit(self, batch: int, attempt: StoragePath, names: Sequence[str], count: int) -> int:
        """Commit the files ``names`` of ``attempt``, synced, with ``count`` rows; return ``count``.

        The files have Spark's schema in their metadata. A batch that is already committed does not change. The
        directory of the attempt is removed; files in a bucket stay until the table is maintained.

        Raises:
            ConfigError: a column has another type than in the table, or none that Delta supports.
            StorageError: the table cannot be read or written.
        """
        try:
            if count:
                files = [attempt / name for name in names]
                schema = spark_schema(files[0])
                assert schema is not None
                fields = [field for field in nullable(schema)["fields"] if field["name"] != DELETES]
                self._commit(batch, files, fields)
        finally:
            discard(attempt)
        return count

    def _commit(self, batch: int, files: Sequence[StoragePath], fields: list[dict[str, Any]]) -> None:
        from deltalake.exceptions import CommitFailedError

        written: list[StoragePath] | None = None
        for attempt in range(_ATTEMPTS):
            if attempt == _CREATIONS and self._known is not None:
                self._known.forget()
            with storage_errors(self.path):
                known = self._open(fields)
                if batch <= known.last_batch():
                    self._sync_again(known, batch)
                    return
                _check_partitions(known.table, self.path, self.writer, self._partitions)
                before = known.version
                try:
                    if self._alter(known, fields):
                        self._sync(before)
                        continue
                    if self._keys:
                        self._merge(known, batch, files)
                    else:
                        if written is None:
                            written = self._place(files)
                        if attempt < _CREATIONS and self._can_create(known, before + 1):
                            if self._create_version(known, batch, written):
                                return
                            continue
                        self._append(known, batch, written)
                except CommitFailedError:
                    # Another writer has changed the schema or the rows to replace, or has committed this batch. The
                    # files stay even then: this error does not prove that no version names them.
                    self._known = None
                    continue
                self._sync(before)
                return
        raise StorageError(
            f"batch {batch} of {self.writer!r} could not be committed to {str(self.path)!r}",
            path=str(self.path),
            why=f"other writers changed the same table during {_ATTEMPTS} attempts",
            hint="stop other programs that change the schema or the rows of the table",
        )

    def _open(self, fields: list[dict[str, Any]]) -> _KnownTable:
        """Return the table as it is now; create it with ``fields`` if it does not exist."""
        if self._known is not None:
            return self._refresh(self._known)
        check_fields(self.path, self.writer, fields)
        if not is_delta_table(self.path):
            self._check_new()
            _create(self.path, fields, self._partitions, change_data_feed=self._change_data_feed)
            self._sync(-1)
        return self._load()

    def _load(self) -> _KnownTable:
        self._known = _KnownTable(self.path, self._id, load(self.path))
        return self._known

    def _refresh(self, known: _KnownTable) -> _KnownTable:
        """Load what was committed since, unless the next version can be created without that; return the table."""
        if not known.is_valid():
            # deltalake reads versions again that it has loaded, and these may have been removed.
            if not is_delta_table(self.path):
                self._check_new()
            return self._load()
        if not self._can_create(known, known.version + 1):
            known.table.update_incremental()
        return known

    def _can_create(self, known: _KnownTable, version: int) -> bool:
        """Return True if ``version`` can be created without ``deltalake``."""
        protocol = known.table.protocol()
        is_plain = protocol.min_writer_version <= 2 or (
            protocol.min_writer_version == _FEATURES_WRITER and _PLAIN.issuperset(protocol.writer_features or ())
        )
        return not self._keys and is_plain and not self._is_due(known, version)

    @staticmethod
    def _is_due(known: _KnownTable, version: int) -> bool:
        """Return True if ``deltalake`` writes a checkpoint after ``version``."""
        given = known.table.metadata().configuration.get("delta.checkpointInterval") or ""
        # deltalake takes the default for a number that it does not understand, and for 0.
        every = int(given) if given.isdecimal() else 0
        return (version + 1) % (every or _CHECKPOINT_EVERY) == 0

    def _alter(self, known: _KnownTable, fields: list[dict[str, Any]]) -> bool:
        """Add the columns that the table lacks, which are null in its other rows, and the change data feed.

        Return True if the table was changed or loaded, so that the batch has to be checked again.
        """
        from deltalake import Field

        table = known.table
        stored = {field["name"]: field["type"] for field in json.loads(table.schema().to_json())["fields"]}
        new = [field for field in fields if field["name"] not in stored]
        for field in fields:
            if field["name"] in stored and not _same_type(field["type"], stored[field["name"]]):
                raise other_type(
                    self.path, self.writer, field["name"], _shown(stored[field["name"]]), _shown(field["type"])
                )
        lacks_feed = self._change_data_feed and table.metadata().configuration.get(CHANGE_FEED) != "true"
        if not new and not lacks_feed:
            return False
        if table.version() == known.version:
            check_fields(self.path, self.writer, new)
            if lacks_feed:
                table.alter.set_table_properties({CHANGE_FEED: "true"})
            else:
                table.alter.add_columns([Field.from_json(json.dumps(field)) for field in new])
        table.update_incremental()
        return True

    def _place(self, files: Sequence[StoragePath]) -> list[StoragePath]:
        """Move the files to their final path, where no version of the table names them yet."""
        if isinstance(self.path, ObjectPath):
            return [self._upload(self.path, file) for file in files]
        placed: list[StoragePath] = []
        changed: set[Path] = set()
        depth = len(self._partitions)
        for file in files:
            assert isinstance(file, Path)
            directory = self.path.joinpath(*file.parts[-1 - depth : -1]) if depth else self.path / "data"
            directory.mkdir(parents=True, exist_ok=True)
            # Spark and deltalake escape other characters than ASCII in paths differently.
            final = file.rename(directory / f"{uuid.uuid4().hex}.parquet")
            placed.append(final)
            changed.update(_directories(self.path, final))
        _sync_directories(changed)
        return placed

    def _upload(self, table: ObjectPath, file: StoragePath) -> StoragePath:
        """Upload a local file to its final path; files in the bucket are there."""
        if isinstance(file, ObjectPath):
            return file
        depth = len(self._partitions)
        directory = "/".join(file.parts[-1 - depth : -1]) if depth else "data"
        placed = table / directory / f"{uuid.uuid4().hex}.parquet"
        placed.upload(file)
        return placed

    def _create_version(self, known: _KnownTable, batch: int, files: list[StoragePath]) -> bool:
        """Create the next version with ``files``; return False if another client has created it, or may have."""
        now = time.time_ns() // 1_000_000
        parameters = {
            "mode": "Append",
            "partitionBy": json.dumps(known.table.metadata().partition_columns, separators=(",", ":")),
        }
        made: list[dict[str, Any]] = [
            {
                "commitInfo": {
                    "timestamp": now,
                    "operation": "WRITE",
                    "operationParameters": parameters,
                    "engineInfo": f"penstock:{penstock.__version__}",
                }
            },
            *({"add": self._added(file)} for file in files),
            # With a time, it would expire if the table has delta.setTransactionRetentionDuration.
            {"txn": {"appId": self._id, "version": batch}},
        ]
        text = "".join(f"{json.dumps(action)}\n" for action in made)
        version = known.version + 1
        if known.is_expired():
            return False
        if not create_text(version_path(self.path, version), text, exclusively=True):
            if not known.read_on():
                known.forget()
            return False
        if not known.is_valid():
            # This process was paused between the last check and this version, which may have been removed before.
            known.forget()
            return False
        known.add(version, batch)
        return True

    def _added(self, file: StoragePath) -> dict[str, Any]:
        action = self._add_action(file)
        return {
            "path": quote(action.path, safe="/="),
            "partitionValues": dict(action.partition_values),
            "size": action.size,
            "modificationTime": action.modification_time,
            "dataChange": True,
            "stats": action.stats,
        }

    def _add_action(self, file: StoragePath) -> AddAction:
        name = _relative(file, self.path)
        return add_action(self.path, name, partition_values(str(Path(name).parent)) if self._partitions else {})

    def _append(self, known: _KnownTable, batch: int, files: list[StoragePath]) -> None:
        table = known.table
        actions: list[AddAction | RemoveAction] = [self._add_action(file) for file in files]
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            self._partition_columns,
            commit_properties=self._transaction(batch),
            post_commithook_properties=self._after_commit(known),
        )

    def _merge(self, known: _KnownTable, batch: int, files: Sequence[StoragePath]) -> None:
        import pyarrow.dataset as ds

        table = known.table
        equal = " AND ".join(f"(old.{_quoted(key)} IS NOT DISTINCT FROM new.{_quoted(key)})" for key in self._keys)
        found = ds.dataset(list(map(str, files)), format="parquet")
        merge = table.merge(
            found.scanner().to_reader(),
            equal,
            "new",
            "old",
            writer_properties=certain_bounds(table),
            commit_properties=self._transaction(batch),
            post_commithook_properties=self._after_commit(known),
        )
        is_new = None
        if DELETES in found.schema.names:
            merge, is_new = merge.when_matched_delete(f"new.{DELETES}"), f"NOT new.{DELETES}"
        # Not `when_matched_update_all`, which does not quote a backtick in a name.
        columns = {_quoted(name): f"new.{_quoted(name)}" for name in found.schema.names if name != DELETES}
        merge.when_matched_update(columns).when_not_matched_insert(columns, is_new).execute()
        if batch > known.last_batch():
            # Only rows that do not exist were deleted: deltalake commits nothing, but the batch has to be known.
            self._append(known, batch, [])

    def _after_commit(self, known: _KnownTable) -> PostCommitHookProperties:
        """Return what ``deltalake`` does after a commit: it removes old versions after a checkpoint only, because that
        lists the log, and not at all if a property of the table forbids it."""
        from deltalake import PostCommitHookProperties

        return PostCommitHookProperties(cleanup_expired_logs=None if self._is_due(known, known.version + 1) else False)

    def _transaction(self, batch: int) -> CommitProperties:
        from deltalake import CommitProperties, Transaction

        return CommitProperties(app_transactions=[Transaction(self._id, batch)])

    def _sync(self, version: int) -> None:
        """Sync what versions after ``version`` added; files with rows are on disk already, but for a merge."""
        sync_versions(self.path, version, files=bool(self._keys))

    def _sync_again(self, known: _KnownTable, batch: int) -> None:
        """Sync the version of ``batch`` and those after it: the run that committed it may have been killed before."""
        if isinstance(self.path, ObjectPath):
            return
        for version in range(known.version, -1, -1):
            entry = version_path(self.path, version)
            if not entry.exists():
                # Maintenance has removed it, long after it was written.
                return
            made = (json.loads(line).get("txn") or {} for line in lines(entry))
            if any((txn.get("appId"), txn.get("version")) == (self._id, batch) for txn in made):
                self._sync(version - 1)
                return


class _KnownTable:
    """Known state of a writer's table: ``table`` as it was loaded last, and later versions, which added files only.

    ``transaction``: the application id of the writer. What is known is valid for a time, see :meth:`is_valid`.
    """

    def __init__(self, path: StoragePath, transaction: str, table: DeltaTable) -> None:
        self.table = table
        self._path = path
        self._transaction = transaction
        self._read = -1
        """The newest version that was read or created after that of ``table``."""
        self._batch = -1
        """The last batch of the writer in these versions, and in ``table`` if its version is ``_checked``."""
        self._checked = -1
        self._until = time.monotonic() + _KNOWN_S

    @property
    def version(self) -> int:
        """The newest version that is known."""
        return max(self.table.version(), self._read)

    def is_expired(self) -> bool:
        """Return True if the table must be loaded again: versions may have been removed since."""
        return time.monotonic() >= self._until

    def forget(self) -> None:
        """Let the table be loaded again before the next commit."""
        self._until = 0.0

    def is_valid(self) -> bool:
        """Return True if a version after the newest known one, if there is any, exists in the log.

        One that was removed with other old versions could be created again, and no reader would see it. Only older ones
        are removed with it, and only after an hour.
        """
        return not self.is_expired() and version_path(self._path, self.version).exists()

    def last_batch(self) -> int:
        """Return the last batch that the writer has committed, as far as it is known; -1 if there is none."""
        if self._checked != self.table.version():
            # Only once: deltalake reads it from a checkpoint each time, which may have been removed with old versions.
            last = self.table.transaction_version(self._transaction)
            self._batch = max(self._batch, -1 if last is None else last)
            self._checked = self.table.version()
        return self._batch

    def add(self, version: int, batch: int) -> None:
        """Add the next ``version``, which the writer has created for ``batch``."""
        self._read, self._batch = version, batch

    def read_on(self) -> bool:
        """Read what other clients have committed since; return False if the table must be loaded."""
        while (entry := version_path(self._path, version := self.version + 1)).exists():
            try:
                actions = [json.loads(line) for line in lines(entry)]
            except (FileNotFoundError, ValueError):
                # It was removed, or is damaged: deltalake reports it.
                return False
            if not all(isinstance(action, dict) and _FILES_ONLY.issuperset(action) for action in actions):
                return False
            made = (action["txn"] for action in actions if "txn" in action)
            batches = [int(txn["version"]) for txn in made if txn["appId"] == self._transaction]
            self._read, self._batch = version, max(self._batch, *batches, -1)
        return True


def discard(attempt: StoragePath) -> None:
    """Remove the directory of an attempt. Objects in a bucket stay until the table is maintained."""
    if isinstance(attempt, Path):
        shutil.rmtree(attempt, ignore_errors=True)


def _relative(file: StoragePath, table: StoragePath) -> str:
    if isinstance(file, ObjectPath):
        assert isinstance(table, ObjectPath)
        return file.relative_to(table)
    assert isinstance(table, Path)
    return str(file.relative_to(table))


def sync_versions(path: StoragePath, version: int, *, files: bool = False) -> None:
    """Sync the versions of the table at ``path`` after ``version`` to disk, and its directories.

    Objects in a bucket are stored when they exist. ``files``: also the files with rows that they added, and their
    directories, which may be new partitions.
    """
    if isinstance(path, ObjectPath):
        return
    log = path / "_delta_log"
    for number in itertools.count(version + 1):
        entry = version_path(path, number)
        if not entry.exists():
            break
        if files:
            _sync_added(path, entry)
        sync_file(entry)
        checkpoint = log / f"{number:020}.checkpoint.parquet"
        if checkpoint.exists():
            for file in (checkpoint, log / "_last_checkpoint"):
                with suppress(FileNotFoundError):
                    sync_file(file)
    for directory in (log, path, path.parent):
        sync_directory(directory)


def certain_bounds(table: DeltaTable) -> WriterProperties:
    """Return options for files that ``deltalake`` writes: bounds of the columns of which ``statistics`` has some.

    ``deltalake`` has no option for a field of a struct, whose bounds would ignore a NaN, so all columns that are not
    named here have none.
    """
    from deltalake import ColumnProperties, WriterProperties

    fields = json.loads(table.schema().to_json())["fields"]
    bounded = [field["name"] for field in fields if isinstance(field["type"], str) and field["type"] in _BOUNDED]
    return WriterProperties(
        default_column_properties=ColumnProperties(statistics_enabled="NONE"),
        column_properties={name: ColumnProperties(statistics_enabled="CHUNK") for name in bounded},
    )


def add_action(table: StoragePath, name: str, values: Mapping[str, str | None] = MappingProxyType({})) -> AddAction:
    """Return the action that adds the Parquet file ``name``, relative to the directory ``table``, with statistics.

    ``values``: those of the partition columns.
    """
    import pyarrow.parquet as pq
    from deltalake.transaction import AddAction

    file = table / name
    if isinstance(file, ObjectPath):
        with object_storage_errors(file), file.open_input() as source:
            size, found = source.size(), statistics(pq.read_metadata(source))
    else:
        size, found = file.stat().st_size, statistics(read_footer(file))
    # The name is not escaped: deltalake does that.
    return AddAction(
        name,
        size,
        dict(values),
        time.time_ns() // 1_000_000,
        data_change=True,
        stats=json.dumps(found),
    )


def load(path: StoragePath) -> DeltaTable:
    """Return the newest version of the table at ``path``.

    Raises:
        StorageError: it cannot be read.
    """
    from deltalake import DeltaTable

    with storage_errors(path):
        if isinstance(path, ObjectPath):
            return DeltaTable(str(path), storage_options=path.options())
        return DeltaTable(path)


_PARTITION_BY = "penstock.partitionBy"
"""Property of a table: the entries of ``partition_by`` as JSON. Buckets of other numbers have other rows."""


def check_partitions(path: StoragePath, writer: str, partitions: Sequence[PartitionField]) -> None:
    """Check that the table at ``path``, if it exists, has ``partitions``.

    Raises:
        ConfigError: it has other ones.
    """
    if is_delta_table(path):
        _check_partitions(load(path), path, writer, partitions)


def _check_partitions(table: DeltaTable, path: StoragePath, writer: str, partitions: Sequence[PartitionField]) -> None:
    metadata = table.metadata()
    stored = metadata.configuration.get(_PARTITION_BY)
    # Another program may have created it.
    found = list(metadata.partition_columns) if stored is None else list(json.loads(stored))
    wanted = [field.text for field in partitions]
    if found != wanted:
        what = f"partitioned by {', '.join(found)}" if found else "not partitioned"
        given = f"partition_by: [{', '.join(wanted)}]" if wanted else "no partition_by"
        raise ConfigError(
            f"sink {writer!r} has {given}, the table {str(path)!r} is {what}",
            option=f"sinks.{writer}.partition_by",
            why="the partitions of a table cannot change",
            hint=(f"set partition_by: [{', '.join(found)}]" if found else "remove partition_by")
            + ", or set another path for the sink and a new name, which write a new table from the start",
        )


def _create(
    path: StoragePath, fields: list[dict[str, Any]], partitions: Sequence[PartitionField], *, change_data_feed: bool
) -> None:
    from deltalake import DeltaTable, Schema
    from deltalake.exceptions import DeltaError

    configuration: dict[str, str | None] = {CHANGE_FEED: "true"} if change_data_feed else {}
    if partitions:
        configuration[_PARTITION_BY] = json.dumps([field.text for field in partitions])
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)
        sync_parents(path)
    try:
        DeltaTable.create(
            str(path),
            Schema.from_json(json.dumps({"type": "struct", "fields": fields})),
            partition_by=[field.name for field in partitions],
            configuration=configuration or None,
            raise_if_key_not_exists=False,
            storage_options=path.options() if isinstance(path, ObjectPath) else None,
        )
    except DeltaError:
        # Another sink may have created it just now.
        if not is_delta_table(path):
            raise


def _sync_added(table: Path, entry: Path) -> None:
    """Sync the files of the table that the version ``entry`` added, then the directories that have their names."""
    changed: set[Path] = set()
    for line in lines(entry):
        action = json.loads(line)
        added = action.get("add") or action.get("cdc")
        if added is not None:
            file = table / unquote(added["path"])
            # Another writer may have removed it again.
            with suppress(FileNotFoundError):
                sync_file(file)
                changed.update(_directories(table, file))
    _sync_directories(changed)


def _directories(table: Path, file: Path) -> list[Path]:
    """Return the directories of ``file`` in ``table``, and that of the table."""
    return [table, *(each for each in file.parents if table in each.parents)]


def _sync_directories(directories: Collection[Path]) -> None:
    for each in sorted(directories, key=lambda path: len(path.parts), reverse=True):
        sync_directory(each)


@contextmanager
def storage_errors(path: StoragePath) -> Iterator[None]:
    """Translate errors of ``deltalake`` inside the block to StorageError, or to UnavailableError for a bucket."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError) as error:
        if isinstance(path, ObjectPath) and (isinstance(error, OSError) or "S3 error" in str(error)):
            raise object_storage_error(path, error) from error
        if isinstance(error, OSError):
            raise
        raise StorageError(
            f"the Delta table {str(path)!r} cannot be read or written",
            path=str(path),
            why=str(error),
            hint="check the table and its features with another reader; restore it, or set another path for the sink",
        ) from error


def nullable(kind: Any) -> Any:
    """Return a type in Spark's JSON without NOT NULL and comments.

    Delta calls NOT NULL an invariant, and delta-spark refuses a table that has it next to other table features.
    """
    if isinstance(kind, Mapping):
        free = ("nullable", "containsNull", "valueContainsNull")
        return {
            name: True if name in free else {} if name == "metadata" else nullable(value)
            for name, value in kind.items()
        }
    return [nullable(each) for each in kind] if isinstance(kind, list) else kind


def _is_supported(kind: Any) -> bool:
    """Return True if Delta has the type ``kind``, in Spark's JSON."""
    if isinstance(kind, str):
        return kind in _SIMPLE or kind == "timestamp_ntz" or _DECIMAL.fullmatch(kind) is not None
    match kind["type"]:
        case "struct":
            return bool(kind["fields"]) and all(_is_supported(field["type"]) for field in kind["fields"])
        case "array":
            return _is_supported(kind["elementType"])
        case "map":
            return _is_supported(kind["keyType"]) and _is_supported(kind["valueType"])
        case _:
            return False


def _same_type(one: Any, other: Any) -> bool:
    def plain(kind: Any) -> str:
        return json.dumps(nullable(kind), sort_keys=True)

    return plain(one) == plain(other)


def _shown(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(kind)


def other_type(path: StoragePath, writer: str, column: str, was: str, now: str) -> ConfigError:
    """Return the error for a ``column`` of another type than in the table at ``path``."""
    return ConfigError(
        f"sink {writer!r}: column {column!r} is {now.upper()} now, in {str(path)!r} it is {was.upper()}",
        option=f"sinks.{writer}",
        why="no reader of the table can read both types",
        hint="cast it in a map step, rename the column, or give the sink a new name and a new table",
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
