"""Reader of a Delta table's transaction log, without Spark: the table's files, and the changes of each version.

The layout is Delta's transaction protocol. ``_delta_log/<version>.json`` has one action per line (``add`` and
``remove`` of a file, ``txn`` of a writer, ``metaData``, ``protocol``). The Parquet file
``<version>.checkpoint[.<part>.<parts>].parquet`` has the state of the table at its version, so that older versions can
be removed. Files are added and removed, but never changed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError, DataLossError, StorageError
from penstock.spark.files.object_storage import ObjectPath, StoragePath, object_storage_errors, open_input

__all__ = ["CHANGE_FEED", "LIST_S", "DeltaFile", "DeltaLog", "DeltaVersion", "lines", "version_path"]

Location = TypeVar("Location", Path, ObjectPath, StoragePath)

_VERSION = re.compile(r"(?P<version>\d{20})\.json")
_CHECKPOINT = re.compile(r"(?P<version>\d{20})\.checkpoint(?:\.(?P<part>\d{10})\.(?P<parts>\d{10}))?\.parquet")
_FEATURES = frozenset({"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
"""Supported reader features. Features that change how rows are read are checked separately."""
LIST_S: Final = 60.0
"""Time after which a stream lists the log: older versions may have been removed, also the next one."""
CHANGE_FEED = "delta.enableChangeDataFeed"
"""Property of a table whose versions have a change data feed."""
_NUMBERS = {"byte": int, "short": int, "integer": int, "long": int, "float": float, "double": float}


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A Parquet file of the table. ``columns`` has the values of the partition columns, which the file lacks."""

    path: str
    modified_ms: int
    columns: dict[str, Any]
    records: int | None
    """Number of rows, if the log has it."""
    size: int = 0
    """Size in bytes, if the log has it."""


@dataclass(slots=True)
class DeltaVersion:
    """Changes of one transaction."""

    number: int
    added: list[DeltaFile] = field(default_factory=list)
    """Files with new rows. Files that only rewrite rows of other files are omitted."""
    removes_rows: bool = False
    """True if rows were deleted or replaced: files with these rows were removed."""
    transactions: dict[str, int] = field(default_factory=dict)
    """The version that a writer gave this transaction, by the writer's ``appId``."""
    removed: list[DeltaFile] = field(default_factory=list)
    """Files with rows that were deleted or replaced."""
    removed_columns: tuple[str, ...] = ()
    """Partition columns of the table before this version, whose values files in ``removed`` have."""
    has_vectors: bool = False
    """True if such a file has a deletion vector: some of its rows had been deleted before."""
    changes: list[DeltaFile] = field(default_factory=list)
    """Files of the change data feed. If there are any, they have all changes of the version."""
    committed_ms: int = 0
    """Time of the transaction in ms since 1970; 0 if the log does not have it."""


def version_path(table: Location, version: int) -> Location:
    """Return the path of the file with the actions of ``version`` of ``table``."""
    return table / "_delta_log" / f"{version:020}.json"


class DeltaLog:
    """The transaction log of the table in the directory ``path``, or in a bucket.

    Raises StorageError and UnavailableError if a bucket cannot be read.
    """

    def __init__(self, path: str | StoragePath) -> None:
        self.path = Path(path) if isinstance(path, str) else path
        self._types: dict[str, str] = {}
        self._is_known = False
        self.table_id = ""
        """Id of the table in the version that was read last, as are the following."""
        self.has_change_feed = False
        self.partition_columns: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that the directory has a Delta table.

        Raises:
            ConfigError: it has none.
        """
        if not self.exists():
            raise ConfigError(
                f"{str(self.path)!r} is not a Delta table: it has no _delta_log",
                option="path",
                hint="set path to the directory of a table that has been written at least once",
            )

    def check_change_feed(self) -> int:
        """Check that the table has a change data feed; return its newest version.

        Raises:
            ConfigError: it has none, or does not exist.
        """
        newest, _ = self.snapshot()
        if not self.has_change_feed:
            raise ConfigError(
                f"the Delta table {str(self.path)!r} has no change data feed",
                option="path",
                why=f"its property {CHANGE_FEED} is not true",
                hint="set change_data_feed: true in the sink that writes it; elsewhere "
                f"DeltaTable({str(self.path)!r}).alter.set_table_properties({{{CHANGE_FEED!r}: 'true'}}) of deltalake, "
                f"or ALTER TABLE ... SET TBLPROPERTIES ({CHANGE_FEED} = true) of Spark",
            )
        return newest

    def exists(self) -> bool:
        """Return True if the directory has a Delta table."""
        return bool(self._names(_VERSION) or self._names(_CHECKPOINT))

    def transactions(self) -> dict[str, int]:
        """Return the newest version of each writer's transactions, by its ``appId``.

        Raises:
            DataLossError, StorageError: the log has gaps or is damaged.
        """
        found: dict[str, int] = {}
        checkpoint = self._newest_checkpoint()
        newest, actions = (
            self._checkpoint() if checkpoint is None else (checkpoint[0], self._rows(*checkpoint, ["txn"]))
        )
        for _, entries in itertools.chain([(newest, actions)], self._after(newest)):
            for action in entries:
                if (txn := action.get("txn")) is not None:
                    found[txn["appId"]] = int(txn["version"])
        return found

    def snapshot(self, version: int | None = None) -> tuple[int, list[DeltaFile]]:
        """Return the newest version, or ``version``, and the files with its rows, oldest first.

        Raises:
            ConfigError: the table does not exist or uses a feature that is not supported.
            DataLossError: ``version`` is not in the log any more.
            StorageError: the log has gaps or is damaged.
        """
        self.check()
        files: dict[str, DeltaFile] = {}
        newest, actions = self._checkpoint(version)
        for action in actions:
            self._apply(action, files)
        for number, actions in self._after(newest):
            if version is not None and number > version:
                break
            newest = number
            for action in actions:
                self._apply(action, files)
        if version is not None and newest != version:
            raise self.lost(version, f"its newest version is {newest}: it was created again, or an older copy restored")
        self._is_known = True
        return newest, sorted(files.values(), key=lambda file: (file.modified_ms, file.path))

    def versions(self, after: int, *, is_listed: bool = True) -> Iterator[DeltaVersion]:
        """Yield the changes of each version after ``after``, in order.

        Without ``is_listed`` the log is not listed, which takes a time that grows with it: there are no versions if the
        next one does not exist, whatever the reason.

        Raises:
            DataLossError: a version is no longer in the log.
            ConfigError, StorageError: as for ``snapshot``.
        """
        if not self._is_known:
            self.snapshot()  # reads the types of the columns
        for number, actions in self._after(after) if is_listed else self._following(after):
            version = DeltaVersion(number, removed_columns=self.partition_columns)
            types, found = self._types, list(actions)
            for action in found:
                self._read_schema(action)
            for action in found:
                if (added := action.get("add")) is not None:
                    file = self._file(added)
                    if added.get("dataChange", True):
                        version.added.append(file)
                elif (removed := action.get("remove")) is not None:
                    if removed.get("dataChange", True):
                        version.removes_rows = True
                        version.has_vectors |= bool(removed.get("deletionVector"))
                        values = {"modificationTime": 0, **removed, "deletionVector": None}
                        if (found_values := removed.get("partitionValues")) is not None:
                            # delta-spark leaves out those that are null.
                            values["partitionValues"] = dict.fromkeys(version.removed_columns) | found_values
                        version.removed.append(self._file(values, types))
                elif (changed := action.get("cdc")) is not None:
                    version.changes.append(self._file({"modificationTime": 0, **changed}))
                elif (info := action.get("commitInfo")) is not None:
                    version.committed_ms = int(info.get("inCommitTimestamp") or info.get("timestamp") or 0)
                elif (txn := action.get("txn")) is not None:
                    version.transactions[txn["appId"]] = int(txn["version"])
            yield version

    @property
    def first(self) -> int | None:
        """Return the oldest version whose commit file exists; None if there is none."""
        return min(map(_number, self._names(_VERSION)), default=None)

    @property
    def newest(self) -> int:
        """The newest version in the log; -1 if there is none."""
        return max(map(_number, (*self._names(_VERSION), *self._names(_CHECKPOINT))), default=-1)

    def oldest_id(self) -> str:
        """Return the id of the table in version 0, or in the newest checkpoint if older versions were removed.

        It differs after the table was deleted and created again. The log is listed if it has no version 0.

        Raises:
            DataLossError: the log has neither.
        """
        if (found := self.first_id()) is not None:
            return found
        checkpoint = self._newest_checkpoint()
        return _id_in(self._actions(0) if checkpoint is None else self._rows(*checkpoint, ["metaData"]))

    def first_id(self) -> str | None:
        """Return the id of the table in version 0; None if it was removed. A table that was created again has one."""
        with suppress(DataLossError):
            return _id_in(self._actions(0))
        return None

    def _names(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for name in self._listed() if (match := pattern.fullmatch(name))]

    def _listed(self) -> list[str]:
        try:
            with object_storage_errors(self.path):
                return [entry.name for entry in (self.path / "_delta_log").iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _after(self, after: int) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
        """Yield each version after ``after`` with its actions; a gap raises DataLossError."""
        expected = after + 1
        for number in sorted(found for match in self._names(_VERSION) if (found := _number(match)) > after):
            if number != expected:
                raise self.lost(
                    expected,
                    f"the log continues with version {number}: older versions were removed (logRetentionDuration)",
                )
            yield number, self._actions(number)
            expected += 1

    def _following(self, after: int) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
        for number in itertools.count(after + 1):
            path = version_path(self.path, number)
            with object_storage_errors(path):
                if not path.exists():
                    return
            yield number, self._actions(number)

    def _actions(self, version: int) -> Iterator[dict[str, Any]]:
        path = version_path(self.path, version)
        with object_storage_errors(path), self._removed_meanwhile(version):
            found = lines(path)
        for line in found:
            try:
                action = json.loads(line)
            except ValueError as error:
                raise StorageError(f"{path} is not a Delta log: {error}", path=str(path)) from error
            if isinstance(action, dict):
                yield action

    def _checkpoint(self, last: int | None = None) -> tuple[int, Iterator[dict[str, Any]]]:
        """Return the version and the actions of the newest complete checkpoint, up to the version ``last``; -1 if none
        is needed."""
        if self.first == 0:
            return -1, iter(())
        checkpoint = self._newest_checkpoint(last)
        if checkpoint is None and last is not None and self._newest_checkpoint() is not None:
            raise self.lost(last, "older versions were removed (logRetentionDuration)")
        if checkpoint is None:
            raise StorageError(
                f"the log of the Delta table {str(self.path)!r} has neither version 0 nor a checkpoint",
                path=str(self.path),
                why="older versions were removed, and checkpoints in the v2 format are not supported",
                hint="write a classic checkpoint: set delta.checkpointPolicy=classic",
            )
        newest, names = checkpoint
        # Schema and protocol are needed to read the file actions.
        return newest, itertools.chain(
            self._rows(newest, names, ["metaData", "protocol"]), self._rows(newest, names, ["add"])
        )

    def _newest_checkpoint(self, last: int | None = None) -> tuple[int, list[str]] | None:
        """Return the version and the file names of the newest complete checkpoint, up to the version ``last``."""
        parts: dict[int, list[str]] = {}
        wanted: dict[int, int] = {}
        for match in self._names(_CHECKPOINT):
            parts.setdefault(_number(match), []).append(match[0])
            wanted[_number(match)] = int(match["parts"] or 1)
        whole = [
            number
            for number, names in parts.items()
            if len(names) == wanted[number] and (last is None or number <= last)
        ]
        return (max(whole), sorted(parts[max(whole)])) if whole else None

    def _rows(self, version: int, names: list[str], wanted: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the actions of the kinds ``wanted`` in the files ``names`` of the checkpoint at ``version``."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for name in names:
            path = self.path / "_delta_log" / name
            with (
                object_storage_errors(path),
                self._removed_meanwhile(version),
                open_input(path) as source,
            ):
                try:
                    file = pq.ParquetFile(source)
                except pa.ArrowInvalid as error:
                    raise StorageError(f"{path} is not a checkpoint: {error}", path=str(path)) from error
                columns = [column for column in wanted if column in file.schema_arrow.names]
                for batch in file.iter_batches(columns=columns):
                    yield from batch.to_pylist()

    @contextmanager
    def _removed_meanwhile(self, version: int) -> Iterator[None]:
        """Report a file of the log that was removed after it was listed."""
        try:
            yield
        except FileNotFoundError as error:
            raise self.lost(version, "it was removed while the log was read (logRetentionDuration)") from error

    def _apply(self, action: Mapping[str, Any], files: dict[str, DeltaFile]) -> None:
        self._read_schema(action)
        if (added := action.get("add")) is not None:
            file = self._file(added)
            files[file.path] = file
        elif (removed := action.get("remove")) is not None:
            files.pop(self._absolute(removed["path"]), None)

    def _read_schema(self, action: Mapping[str, Any]) -> None:
        """Store the column types of a ``metaData`` action; raise ConfigError for features that are not supported."""
        if (meta := action.get("metaData")) is not None:
            configuration = dict(meta.get("configuration") or {})
            self.table_id = str(meta.get("id") or "")
            self.partition_columns = tuple(meta.get("partitionColumns") or ())
            self.has_change_feed = str(configuration.get(CHANGE_FEED, "false")).lower() == "true"
            mode = configuration.get("delta.columnMapping.mode", "none")
            if mode != "none":
                raise self._unsupported(
                    f"it uses column mapping by {mode}", "rewrite it without delta.columnMapping.mode"
                )
            fields = json.loads(meta["schemaString"])["fields"]
            self._types = {column["name"]: column["type"] for column in fields if isinstance(column["type"], str)}
        elif (protocol := action.get("protocol")) is not None:
            unknown = sorted(set(protocol.get("readerFeatures") or ()) - _FEATURES)
            if unknown:
                raise self._unsupported(
                    f"it uses the feature {', '.join(unknown)}", "write the table without this feature"
                )

    def _file(self, added: Mapping[str, Any], types: Mapping[str, str] | None = None) -> DeltaFile:
        """Return the file of an action. ``types``: those of the columns when it was added; default: of this version."""
        if added.get("deletionVector"):
            raise self._unsupported(
                "it has deletion vectors: rows that are marked as deleted in its files",
                "remove these rows from the files: REORG TABLE ... APPLY (PURGE)",
            )
        stats = json.loads(added.get("stats") or "{}")
        types = self._types if types is None else types
        columns = {
            name: _value(types.get(name, "string"), text)
            for name, text in dict(added.get("partitionValues") or {}).items()
        }
        return DeltaFile(
            self._absolute(added["path"]),
            int(added["modificationTime"]),
            columns,
            stats.get("numRecords"),
            int(added.get("size") or 0),
        )

    def _absolute(self, path: str) -> str:
        """Return the absolute path of a file in an action: a URI, usually relative to the table."""
        relative = unquote(urlsplit(path).path if path.startswith("file:") else path)
        if isinstance(self.path, ObjectPath):
            return relative if "://" in relative else str(self.path / relative)
        return os.path.realpath(self.path / relative)

    def lost(self, version: int, why: str) -> DataLossError:
        """Return the error for a ``version`` that the log does not have."""
        return DataLossError(
            f"version {version} of the Delta table {str(self.path)!r} is no longer in its log",
            why=why,
            hint="start with a new state directory, and increase logRetentionDuration of the table",
        )

    def _unsupported(self, what: str, hint: str) -> ConfigError:
        return ConfigError(f"the Delta table {str(self.path)!r} cannot be read: {what}", option="path", hint=hint)


def lines(path: StoragePath) -> list[str]:
    """Return the lines of a version of the log: texts in it may have other line breaks, such as U+2028."""
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


def _value(kind: str, text: str | None) -> Any:
    """Convert the value of a partition column of the type ``kind``, which the log stores as text, to its JSON type."""
    if text is None or text == "":
        return None
    if kind == "boolean":
        return text == "true"
    return _NUMBERS[kind](text) if kind in _NUMBERS else text


def _id_in(actions: Iterator[dict[str, Any]]) -> str:
    return next((str(meta.get("id") or "") for each in actions if (meta := each.get("metaData"))), "")


def _number(match: re.Match[str]) -> int:
    return int(match["version"])
