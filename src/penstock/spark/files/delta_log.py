"""The log of a Delta table, read without Spark: which files hold its rows, and what each version did.

The layout is Delta's transaction protocol: ``_delta_log/<version>.json`` has one action a line (``add`` and ``remove``
of a file, ``txn`` of a writer, ``metaData``, ``protocol``); ``<version>.checkpoint[.<part>.<parts>].parquet`` has all
that holds up to its version, so that older versions may be removed. Files are never changed, only added and removed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError, DataLossError, StorageError

__all__ = ["DeltaFile", "DeltaLog", "DeltaVersion"]

_VERSION = re.compile(r"(?P<version>\d{20})\.json")
_CHECKPOINT = re.compile(r"(?P<version>\d{20})\.checkpoint(?:\.(?P<part>\d{10})\.(?P<parts>\d{10}))?\.parquet")
_FEATURES = frozenset({"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
"""Reader features that a table may have. Those that change how rows are read are looked at where they are used."""
_NUMBERS = {"byte": int, "short": int, "integer": int, "long": int, "float": float, "double": float}


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A Parquet file of the table. ``columns`` are those by which the table is partitioned: the file lacks them."""

    path: str
    modified_ms: int
    columns: dict[str, Any]
    records: int | None
    """Number of rows, if the log has it."""


@dataclass(slots=True)
class DeltaVersion:
    """Changes of one transaction."""

    number: int
    added: list[DeltaFile] = field(default_factory=list)
    """Files with rows that were not in the table before; those that only hold other files' rows anew are left out."""
    takes_away: bool = False
    """True if rows were deleted or replaced: files with these rows were removed."""
    transactions: dict[str, int] = field(default_factory=dict)
    """The writer's own number of this transaction, by the id of the writer."""


class DeltaLog:
    """The log of the table at ``path``, a directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._types: dict[str, str] = {}

    def check(self) -> None:
        """Look whether there is a table.

        Raises:
            ConfigError: there is none.
        """
        if not self._names(_VERSION) and not self._names(_CHECKPOINT):
            raise ConfigError(
                f"{str(self.path)!r} is no Delta table: it has no _delta_log",
                option="path",
                do="name the directory of the table; it must have been written once",
            )

    def snapshot(self) -> tuple[int, list[DeltaFile]]:
        """The newest version, and the files that hold its rows, oldest first.

        Raises:
            ConfigError: it cannot be read by us: a feature of the table, which is named.
            StorageError: the log has gaps, or something that is no action.
        """
        self.check()
        files: dict[str, DeltaFile] = {}
        newest, actions = self._checkpoint()
        for action in actions:
            self._apply(action, files)
        for number, actions in self._after(newest):
            newest = number
            for action in actions:
                self._apply(action, files)
        return newest, sorted(files.values(), key=lambda file: (file.modified_ms, file.path))

    def versions(self, after: int) -> Iterator[DeltaVersion]:
        """Yield the changes of each version after ``after``, in order.

        Raises:
            DataLossError: a version is no longer in the log.
            ConfigError, StorageError: as for ``snapshot``.
        """
        if not self._types:
            self.snapshot()  # which tells the types of the columns
        for number, actions in self._after(after):
            made = DeltaVersion(number)
            for action in actions:
                self._note(action)
                if (added := action.get("add")) is not None:
                    file = self._file(added)
                    if added.get("dataChange", True):
                        made.added.append(file)
                elif (removed := action.get("remove")) is not None:
                    made.takes_away |= removed.get("dataChange", True)
                elif (txn := action.get("txn")) is not None:
                    made.transactions[txn["appId"]] = int(txn["version"])
            yield made

    @property
    def first(self) -> int | None:
        """The oldest version whose own file is there."""
        return min(map(_number, self._names(_VERSION)), default=None)

    def _names(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [match for name in self._listed() if (match := pattern.fullmatch(name))]

    def _listed(self) -> list[str]:
        try:
            return [entry.name for entry in (self.path / "_delta_log").iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _after(self, after: int) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
        """The versions after ``after`` and their actions; they follow each other without a gap."""
        expected = after + 1
        for number in sorted(found for match in self._names(_VERSION) if (found := _number(match)) > after):
            if number != expected:
                raise DataLossError(
                    f"version {expected} of the Delta table {str(self.path)!r} is no longer in its log",
                    why=f"the log continues with version {number}: older versions were removed (logRetentionDuration)",
                    do="begin anew with a new state directory, and keep the log of the table for longer",
                )
            yield number, self._actions(self.path / "_delta_log" / f"{number:020}.json")
            expected += 1

    def _actions(self, path: Path) -> Iterator[dict[str, Any]]:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                action = json.loads(line)
            except ValueError as error:
                raise StorageError(f"{path} is no log of Delta's: {error}", path=str(path)) from error
            if isinstance(action, dict):
                yield action

    def _checkpoint(self) -> tuple[int, Iterator[dict[str, Any]]]:
        """The newest checkpoint that is there as a whole, and its actions; version -1 where none is needed."""
        if self.first == 0:
            return -1, iter(())
        parts: dict[int, list[str]] = {}
        wanted: dict[int, int] = {}
        for match in self._names(_CHECKPOINT):
            parts.setdefault(_number(match), []).append(match[0])
            wanted[_number(match)] = int(match["parts"] or 1)
        whole = [number for number, names in parts.items() if len(names) == wanted[number]]
        if not whole:
            raise StorageError(
                f"the log of the Delta table {str(self.path)!r} has no beginning and no checkpoint",
                path=str(self.path),
                why="older versions were removed, and checkpoints of the second kind (v2) are not read",
                do="have a classic checkpoint written: delta.checkpointPolicy=classic",
            )
        newest = max(whole)
        return newest, self._checkpointed(sorted(parts[newest]))

    def _checkpointed(self, names: list[str]) -> Iterator[dict[str, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # What says how files are read comes first.
        for wanted in (["metaData", "protocol"], ["add"]):
            for name in names:
                path = self.path / "_delta_log" / name
                try:
                    file = pq.ParquetFile(path)
                except pa.ArrowInvalid as error:
                    raise StorageError(f"{path} is no checkpoint: {error}", path=str(path)) from error
                columns = [column for column in wanted if column in file.schema_arrow.names]
                for batch in file.iter_batches(columns=columns):
                    yield from batch.to_pylist()

    def _apply(self, action: Mapping[str, Any], files: dict[str, DeltaFile]) -> None:
        self._note(action)
        if (added := action.get("add")) is not None:
            file = self._file(added)
            files[file.path] = file
        elif (removed := action.get("remove")) is not None:
            files.pop(self._absolute(removed["path"]), None)

    def _note(self, action: Mapping[str, Any]) -> None:
        """Keep the types of the columns; refuse what would have us read rows wrongly."""
        if (meta := action.get("metaData")) is not None:
            mode = dict(meta.get("configuration") or {}).get("delta.columnMapping.mode", "none")
            if mode != "none":
                raise self._unread(f"it maps columns by {mode}", "rewrite it without delta.columnMapping.mode")
            fields = json.loads(meta["schemaString"])["fields"]
            self._types = {column["name"]: column["type"] for column in fields if isinstance(column["type"], str)}
        elif (protocol := action.get("protocol")) is not None:
            unknown = sorted(set(protocol.get("readerFeatures") or ()) - _FEATURES)
            if unknown:
                raise self._unread(f"it has the feature {', '.join(unknown)}", "write a table without it")

    def _file(self, added: Mapping[str, Any]) -> DeltaFile:
        if added.get("deletionVector"):
            raise self._unread(
                "rows of its files are marked as deleted (deletion vectors)",
                "have them removed: REORG TABLE ... APPLY (PURGE)",
            )
        stats = json.loads(added.get("stats") or "{}")
        columns = {name: self._value(name, text) for name, text in dict(added.get("partitionValues") or {}).items()}
        return DeltaFile(
            self._absolute(added["path"]), int(added["modificationTime"]), columns, stats.get("numRecords")
        )

    def _value(self, column: str, text: str | None) -> Any:
        """A value by which the table is partitioned, as JSON has it; the log has them as text."""
        kind = self._types.get(column, "string")
        if text is None or text == "":
            return None
        if kind == "boolean":
            return text == "true"
        return _NUMBERS[kind](text) if kind in _NUMBERS else text

    def _absolute(self, path: str) -> str:
        """The file that an action names: a URI, mostly relative to the table."""
        place = unquote(urlsplit(path).path if path.startswith("file:") else path)
        return os.path.realpath(self.path / place)

    def _unread(self, what: str, do: str) -> ConfigError:
        return ConfigError(f"the Delta table {str(self.path)!r} cannot be read: {what}", option="path", do=do)


def _number(match: re.Match[str]) -> int:
    return int(match["version"])
