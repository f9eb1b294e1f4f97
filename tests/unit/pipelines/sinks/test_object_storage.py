"""Delta tables in a bucket: each batch once after lost responses, cuts and lost leases; maintenance; errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from penstock.errors import ConfigError, DataLossError, PenstockError, StorageError, UnavailableError
from penstock.pipelines.ledger.reconcile import _delta
from penstock.pipelines.sinks import maintenance as maintaining
from penstock.pipelines.sinks.delta import DeltaWriter, check_partitions, delta_writers, is_delta_table, load
from penstock.pipelines.sinks.maintenance import maintain, maintained_at
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA, FileTarget, FileWriter
from penstock.pipelines.sinks.partitions import PartitionFiles
from penstock.pipelines.sinks.table import check_types, writers
from penstock.pipelines.spec.sinks import TableSink
from penstock.spark.files.change_feed import ChangeFeed, count_changes, read_changes
from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.object_storage import ObjectPath, object_storage_error, storage_path
from tests.object_storage import ObjectStorage

TYPES = {"int64": "long", "string": "string"}


def table_in(storage: ObjectStorage, **options: Any) -> ObjectPath:
    found = TableSink(path=f"{storage.url}/t", **options).location
    assert isinstance(found, ObjectPath)
    return found


def commit(writer: DeltaWriter, batch: int, rows: pa.Table | None = None, attempt: Path | None = None) -> int:
    """Write the files of a batch, as a task of an executor does, to ``attempt`` or where they stay; commit them."""
    rows = pa.table({"n": [batch]}) if rows is None else rows
    fields = [{"name": c.name, "type": TYPES[str(c.type)], "nullable": True, "metadata": {}} for c in rows.schema]
    metadata = {SPARKS_SCHEMA: json.dumps({"type": "struct", "fields": fields}).encode()}
    target = FileTarget(attempt or writer.new_attempt(batch), metadata)
    partitions = [field.name for field in writer._partitions]
    files = PartitionFiles(target, partitions) if partitions else FileWriter(target)
    for each in rows.to_batches():
        files.write(each)
    files.close()
    return writer.commit(batch, target.directory, files.names, len(rows))


def numbers(path: ObjectPath, column: str = "n") -> list[Any]:
    return sorted(load(path).to_pyarrow_table()[column].to_pylist())


def objects(path: ObjectPath) -> list[str]:
    return [file.name for file in path.iterdir()]


def test_each_batch_is_in_the_table_once(object_storage: ObjectStorage) -> None:
    path = table_in(object_storage)
    assert not is_delta_table(path)
    assert writers(path) == {}
    writer = DeltaWriter(path, "rows", "q")
    for batch in (0, 0, 1, 0):
        assert commit(writer, batch) == 1
    again = DeltaWriter(path, "rows", "q")
    for batch in (1, 2):
        commit(again, batch)
    assert numbers(path) == [0, 1, 2]
    assert delta_writers(path) == {"rows": {"q": 2}}
    assert writers(path) == {"rows": 3}
    found = _delta(path, "append", "penstock/rows/q", dict.fromkeys(range(4), 1), {})
    assert found.off == [f"{path} lacks batch 3, which has 1 rows in the ledger"]
    with pytest.raises(PenstockError, match="wrote with another checkpoint"):
        DeltaWriter(path, "rows", "q2")
    with pytest.raises(ConfigError, match="column 'n' is STRING now"):
        check_types(path, "rows", {"n": "STRING"})
    # Any reader with these options reads it.
    assert pl.read_delta(str(path), storage_options=path.options())["n"].sort().to_list() == [0, 1, 2]


def test_columns_are_added_and_partitions_are_kept(object_storage: ObjectStorage) -> None:
    path = table_in(object_storage, partition_by=["k"])
    partitions = TableSink(path=str(path), partition_by=["k"]).partitions
    writer = DeltaWriter(path, "rows", "q", partitions=partitions)
    commit(writer, 0, pa.table({"n": [1, 2, 3], "k": ["a", "b", "ä/ö"]}))
    commit(writer, 1, pa.table({"n": [4], "k": ["a"], "m": [5]}))
    assert sorted(load(path).to_pyarrow_table().select(["n", "k", "m"]).to_pylist(), key=lambda row: row["n"]) == [
        {"n": 1, "k": "a", "m": None},
        {"n": 2, "k": "b", "m": None},
        {"n": 3, "k": "ä/ö", "m": None},
        {"n": 4, "k": "a", "m": 5},
    ]
    check_partitions(path, "rows", partitions)
    with pytest.raises(ConfigError, match="partitioned by k"):
        check_partitions(path, "rows", ())


def test_rows_are_merged_by_key(object_storage: ObjectStorage, tmp_path: Path) -> None:
    path = table_in(object_storage)
    writer = DeltaWriter(path, "rows", "q", keys=["k"], change_data_feed=True)
    for batch, rows in enumerate(({"k": ["a", "b"], "n": [1, 2]}, {"k": ["b", "c"], "n": [3, 4]})):
        for each in (writer, DeltaWriter(path, "rows", "q", keys=["k"])):
            commit(each, batch, pa.table(rows), tmp_path / "attempt")
            assert not (tmp_path / "attempt").exists()
    assert numbers(path) == [1, 3, 4]
    # The changes are read with the same credentials.
    feed, name = ChangeFeed(path), load(path).metadata().id
    files = feed.files({str(name): {"version": 0}}, feed.latest({str(name): {"version": 0}}))
    changes = [record for batch in read_changes(path, files) for record in batch.to_pylist()]
    assert sorted((json.loads(each["value"])["n"], each["header.change_type"]) for each in changes) == [
        (1, "insert"),
        (2, "insert"),
        (2, "update_preimage"),
        (3, "update_postimage"),
        (4, "insert"),
    ]
    assert count_changes(path, files) == 5
    (path / "_change_data").remove_tree()
    with pytest.raises(DataLossError, match="no longer exists"):
        list(read_changes(path, files))


@pytest.mark.parametrize("partition_by", [[], ["k"]])
def test_files_that_spark_wrote_are_uploaded(
    object_storage: ObjectStorage, tmp_path: Path, partition_by: list[str]
) -> None:
    sink = TableSink(path=f"{object_storage.url}/t", partition_by=partition_by)
    writer = DeltaWriter(sink.location, "rows", "q", partitions=sink.partitions)
    commit(writer, 0, pa.table({"n": [1, 2], "k": ["a", "b"]}), tmp_path / "attempt")
    assert load(sink.location).to_pyarrow_table().sort_by("n").to_pydict() == {"n": [1, 2], "k": ["a", "b"]}


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("lost", "_delta_log"),
        ("cut", "/data/"),
        pytest.param("busy", "_delta_log", marks=pytest.mark.nightly),
        pytest.param("cut", "_delta_log", marks=pytest.mark.nightly),
        pytest.param("busy", "/data/", marks=pytest.mark.nightly),
        pytest.param("lost", "/data/", marks=pytest.mark.nightly),
    ],
)
def test_a_failed_request_neither_loses_nor_repeats_a_batch(
    object_storage: ObjectStorage, kind: str, part: str
) -> None:
    """Also if the storage has committed the batch, but its response was lost."""
    path = table_in(object_storage)
    writer = DeltaWriter(path, "rows", "q")
    commit(writer, 0)
    for batch in (1, 2):
        object_storage.fail(kind, path=part)
        commit(writer, batch)
        assert object_storage.repair() == 1
    # A run that starts again repeats its last batch.
    commit(DeltaWriter(path, "rows", "q"), 2)
    assert numbers(path) == [0, 1, 2]


def test_a_run_that_lost_its_lease_during_a_commit_changes_nothing(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table_in(object_storage)
    paused, later = DeltaWriter(path, "rows", "q"), DeltaWriter(path, "rows", "q")
    commit(paused, 0)
    append = DeltaWriter._create_version

    def pause(self: DeltaWriter, *arguments: Any) -> None:
        # The later run commits between the check and the commit of the paused one.
        monkeypatch.setattr(DeltaWriter, "_create_version", append)
        commit(later, 1)
        append(self, *arguments)

    monkeypatch.setattr(DeltaWriter, "_create_version", pause)
    commit(paused, 1)
    commit(later, 2)
    commit(paused, 2)
    assert numbers(path) == [0, 1, 2]


def test_maintenance_combines_files_while_batches_continue(object_storage: ObjectStorage) -> None:
    path = table_in(object_storage)
    assert maintained_at(path) == 0
    writer = DeltaWriter(path, "rows", "q")
    for batch in range(5):
        commit(writer, batch)
    with (path / "data" / "part-orphan.parquet").open_output() as file:
        file.write(b"left by a task that failed")
    found = maintain(path, retention_h=0, target_bytes=1 << 20)
    assert (found.combined, found.written) == (5, 1)
    maintain(path, retention_h=0, target_bytes=1 << 20)
    # The files of the batches are gone, and the one without a version.
    assert len(objects(path)) + len(objects(path / "data")) == 1
    assert maintained_at(path) > 0
    for batch in (4, 5):
        commit(writer, batch)
    assert numbers(path) == list(range(6))
    assert DeltaLog(path).transactions() == {"penstock/rows/q": 5}


def test_of_two_processes_that_maintain_a_table_one_combines_its_files(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the property, both compactions would succeed and each row would be in the table twice."""
    path = table_in(object_storage)
    writer = DeltaWriter(path, "rows", "q")
    for batch in range(3):
        commit(writer, batch)
    compact = maintaining._compact

    def pause(table: DeltaTable, *arguments: Any) -> dict[str, Any]:
        # The other process begins and ends while this one is about to combine the files.
        monkeypatch.setattr(maintaining, "_compact", compact)
        assert maintain(path, retention_h=1, target_bytes=1 << 20).combined == 3
        return compact(table, *arguments)

    monkeypatch.setattr(maintaining, "_compact", pause)
    with pytest.raises(PenstockError, match="is being maintained by another process"):
        maintain(path, retention_h=1, target_bytes=1 << 20)
    assert numbers(path) == [0, 1, 2]


def test_the_check_before_a_run_leaves_nothing(object_storage: ObjectStorage) -> None:
    path = table_in(object_storage)
    path.check_writable("sink 'rows'")
    assert objects(path) == []
    # Nor the empty object by which pyarrow marks a directory, which a vacuum would count each time.
    commit(DeltaWriter(path, "rows", "q"), 0)
    assert maintain(path, retention_h=0, target_bytes=1 << 20).removed == 0


def _wrong_bucket(storage: ObjectStorage, _: pytest.MonkeyPatch) -> ObjectPath:
    return ObjectPath("nowhere", "t", storage.endpoint, "us-east-1")


def _wrong_key(storage: ObjectStorage, _: pytest.MonkeyPatch) -> ObjectPath:
    storage.check_credentials(enabled=True)
    return table_in(storage)


def _unreachable(_: ObjectStorage, __: pytest.MonkeyPatch) -> ObjectPath:
    return ObjectPath("lake", "t", "http://127.0.0.1:1", "us-east-1")


@pytest.mark.parametrize(
    ("broken", "why", "hint"),
    [
        (_wrong_bucket, "the bucket does not exist", "create the bucket"),
        (_wrong_key, "does not know the access key", "set AWS_ACCESS_KEY_ID"),
        (_unreachable, "http://127.0.0.1:1: ", "start the storage, or correct endpoint"),
    ],
)
def test_the_check_before_a_run_says_what_is_wrong(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, broken: Any, why: str, hint: str
) -> None:
    path = broken(object_storage, monkeypatch)
    with pytest.raises(StorageError, match=f"sink 'rows': cannot write to '{path}'") as refused:
        path.check_writable("sink 'rows'")
    assert why in str(refused.value.why)
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("AWS Error ACCESS_DENIED during PutObject operation", StorageError, "do not permit the access, or none"),
        ("AWS Error SIGNATURE_DOES_NOT_MATCH during PutObject operation", StorageError, "the secret key does not"),
        ("Error performing PUT http://169.254.169.254/latest/api/token", StorageError, "no credentials were found"),
        ("400 Bad Request: <Code>InvalidToken</Code><Token-0>secret</Token-0>", StorageError, "token is not valid"),
        ("AWS Error UNKNOWN (HTTP status 301) during X: PermanentRedirect", StorageError, "in another region"),
        ("\x1b[31m↳\x1b[0m Error performing GET\n  503 Slow Down", UnavailableError, "Error performing GET 503 Slow"),
    ],
)
def test_errors_of_the_storage(text: str, kind: type[PenstockError], why: str) -> None:
    found = object_storage_error(ObjectPath("lake", "t", None, "eu-west-1"), OSError(text))
    assert type(found) is kind
    assert why in str(found.why)


def test_a_batch_is_repeated_after_a_temporary_failure_only(object_storage: ObjectStorage) -> None:
    """The error decides whether a run waits for the storage, or ends."""
    path = table_in(object_storage)
    commit(DeltaWriter(path, "rows", "q"), 0)
    with pytest.raises(UnavailableError, match="cannot be read or written"):
        DeltaLog(ObjectPath(path.bucket, path.key, "http://127.0.0.1:1", path.region)).transactions()
    object_storage.check_credentials(enabled=True)
    with pytest.raises(StorageError, match="cannot be read or written") as refused:
        load(path)
    assert refused.value.why == "the storage does not know the access key"


def test_files_of_a_batch_that_were_removed_are_written_again(object_storage: ObjectStorage) -> None:
    path = table_in(object_storage)
    writer = DeltaWriter(path, "rows", "q")
    commit(writer, 0)
    with pytest.raises(UnavailableError) as refused:
        writer.commit(1, path / "data", ["part-removed.parquet"], 1)
    assert refused.value.why == "the object does not exist any more"
    commit(writer, 1)
    assert numbers(path) == [0, 1]


def test_endpoint_and_region_are_those_of_the_file_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert storage_path("lake/t") == Path("lake/t")
    assert storage_path("s3a://lake/a/t/") == ObjectPath("lake", "a/t", None, "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host:9000")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert storage_path("s3://lake/t") == ObjectPath("lake", "t", "http://host:9000", "eu-west-1")
    sink = TableSink(path="s3://lake/t", endpoint="https://other/", region="us-west-2")
    assert sink.location == ObjectPath("lake", "t", "https://other", "us-west-2")
    for endpoint, shown in (
        ("host:9000", "host:9000"),
        ("http://host/path", "http://host/path"),
        ("https://me:hidden@host", "https://...@host"),
        ("me:hidden@host", "...@host"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(ConfigError) as refused:
            storage_path("s3://lake/t")
        assert refused.value.what == f"{shown!r} is not the URL of an endpoint"
        assert TableSink(path="s3://lake/t", endpoint="https://other").region is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"path": "s3://lake"}, "is not a path in a bucket"),
        ({"path": "s3:///t"}, "is not a path in a bucket"),
        ({"path": "s3://lake/a//t"}, "is not a path in a bucket"),
        ({"path": "s3://lake/a/../t"}, "is not a path in a bucket"),
        ({"path": "s3://lake/a%20b"}, "is not a path in a bucket"),
        ({"path": "s3a://key:hidden@lake/t"}, r"'s3a://\.\.\.@lake/t' is not a path in a bucket"),
        ({"path": "lake/t", "endpoint": "http://host:9000"}, "expected endpoint and region only with"),
        ({"path": "s3://lake/t", "endpoint": "http://user:word@host"}, "expected a URL such as"),
        ({"path": "s3://lake/t", "format": "parquet"}, "expected `format: delta`"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TableSink.model_validate(options)
