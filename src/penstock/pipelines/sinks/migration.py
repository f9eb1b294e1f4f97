"""Migrate a Parquet table to a Delta table, in place: its files stay where they are.

A Delta log that names the committed files is written to another directory and then renamed to ``_delta_log``. The table
is a Parquet table until this rename, and a Delta table afterwards, so a crash neither loses nor doubles a row. The log
has a transaction for each query with its newest batch, so the pipeline continues with the next one.

The commit log of the Parquet table remains, because ``reconcile`` counts the rows of its batches.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.sinks.delta import add_action, check_fields, is_delta_table, nullable, other_type
from penstock.pipelines.sinks.parquet import spark_schema
from penstock.pipelines.sinks.table import Commit, commits, files
from penstock.pipelines.spec.values import transaction_id
from penstock.pipelines.state_dir.layout import sync_directory, sync_file

if TYPE_CHECKING:
    from deltalake.transaction import AddAction, RemoveAction

__all__ = ["Migration", "migrate"]


class Migration(NamedTuple):
    """A migrated table, or one to migrate: numbers of committed batches, files and rows."""

    batches: int
    files: int
    rows: int


def migrate(path: Path, *, dry_run: bool = False) -> Migration:
    """Make a Delta table of the Parquet table at ``path``, which no run may write meanwhile; return what it has.

    With ``dry_run`` nothing is changed.

    Raises:
        ConfigError: there is no Parquet table, or it has a column of two types or of a type that Delta does not have.
        StorageError: a committed file is missing or has no schema.
    """
    path = path.absolute()
    found = commits(path)
    if is_delta_table(path) or not found:
        what = "is a Delta table already" if is_delta_table(path) else "has no Parquet table with a committed batch"
        raise ConfigError(f"{str(path)!r} cannot be migrated: it {what}", option="path")
    names = [str(file.relative_to(path)) for file in files(path)]
    result = Migration(len(found), len(names), sum(commit.rows - commit.deleted for commit in found))
    fields = _fields(path, found)
    check_fields(path, found[0].writer, fields)
    if not dry_run:
        _write_log(path, found, names, fields)
    return result


def _fields(path: Path, found: list[Commit]) -> list[dict[str, Any]]:
    """Return the columns of all committed files, in Spark's JSON."""
    fields: dict[str, dict[str, Any]] = {}
    for commit in found:
        for name in commit.files:
            schema = spark_schema(path / name)
            if schema is None:
                raise StorageError(
                    f"table {str(path)!r}: the file {name!r} has no schema of Spark in its metadata",
                    path=str(path / name),
                    why="another program has written it again",
                )
            for field in nullable(schema)["fields"]:
                known = fields.setdefault(field["name"].lower(), field)
                if known["name"] != field["name"]:
                    raise ConfigError(
                        f"table {str(path)!r} has the columns {known['name']!r} and {field['name']!r}",
                        option="path",
                        why="names of columns in a Delta table must not differ in upper and lower case only",
                    )
                if known["type"] != field["type"]:
                    raise other_type(path, commit.writer, field["name"], str(known["type"]), str(field["type"]))
    return list(fields.values())


def _write_log(path: Path, found: list[Commit], names: list[str], fields: list[dict[str, Any]]) -> None:
    from deltalake import CommitProperties, DeltaTable, Schema, Transaction

    draft = path / "_migration"
    # Left by a migration that was interrupted.
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    schema = Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
    table = DeltaTable.create(draft, schema)
    newest: dict[str, int] = {}
    for commit in found:
        key = transaction_id(commit.writer, commit.query)
        newest[key] = max(newest.get(key, -1), commit.batch)
    actions: list[AddAction | RemoveAction] = [add_action(path, name) for name in names]
    table.create_write_transaction(
        actions,
        "append",
        schema,
        [],
        commit_properties=CommitProperties(app_transactions=[Transaction(key, n) for key, n in newest.items()]),
    )
    log = draft / "_delta_log"
    for entry in log.iterdir():
        sync_file(entry)
    sync_directory(log)
    log.rename(path / "_delta_log")
    sync_directory(path)
    shutil.rmtree(draft)
