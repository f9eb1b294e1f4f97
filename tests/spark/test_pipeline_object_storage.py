"""Pipelines whose tables are in a bucket: executors write objects, the driver commits them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.errors import StorageError
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.delta import load
from penstock.spark.files.object_storage import storage_path
from tests.object_storage import CREDENTIALS, ObjectStorage
from tests.spark.pipelines import Setup

PIPELINE = """
name: {{name}}
source: {{{{topics: [{{topic}}], master: "{{master}}"}}}}
statestore: {{{{broker: "{{broker}}"}}}}
steps:
  - {{{{name: parsed, parse: {{{{schema: "k STRING NOT NULL, n INT"}}}}}}}}
sinks:
  - {{{{name: rows, table: {{{{path: {url}/rows, partition_by: [k]}}}}}}}}
  - {{{{name: newest, table: {{{{path: {url}/newest, mode: merge, keys: [k], order_by: n}}}}}}}}
dead_letters: {{{{path: "{{lake}}/dead"}}}}
"""


@pytest.fixture(autouse=True)
def executors_have_credentials(
    spark: SparkSession, object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `spark.executorEnv` sets: the session of the tests was started before."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)


def rows_of(url: str) -> list[tuple[Any, ...]]:
    found = load(storage_path(url)).to_pyarrow_table().select(["k", "n"]).to_pylist()
    return sorted(tuple(row.values()) for row in found)


def record(key: str, n: int) -> bytes:
    return f'{{"k": "{key}", "n": {n}}}'.encode()


def test_tables_in_a_bucket_have_each_row_once(
    setup_of: Callable[..., Setup], object_storage: ObjectStorage, spark: SparkSession
) -> None:
    setup = setup_of(PIPELINE.format(url=object_storage.url))
    setup.send(record("a", 1), b"broken", record("b", 2), record("a", 3))
    setup.run()
    # The next run repeats the last batch. The storage performs commits of new ones, but their responses are lost.
    for sink in ("rows", "newest"):
        setup.forget_the_last_commit(sink)
    setup.send(record("a", 4), record("c", 5))
    object_storage.fail("lost", path="_delta_log", count=2)
    setup.run()
    assert object_storage.repair() == 2
    assert rows_of(f"{object_storage.url}/rows") == [("a", 1), ("a", 3), ("a", 4), ("b", 2), ("c", 5)]
    assert rows_of(f"{object_storage.url}/newest") == [("a", 4), ("b", 2), ("c", 5)]
    assert len(setup.dead()) == 1
    for found in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (found.off, found.unknown) == ((), ())


def test_a_missing_bucket_is_reported_before_the_first_batch(
    setup_of: Callable[..., Setup], object_storage: ObjectStorage
) -> None:
    setup = setup_of(PIPELINE.format(url="s3://nowhere/t"))
    setup.send(record("a", 1))
    with pytest.raises(StorageError, match="cannot write to 's3://nowhere/t/rows'") as refused:
        setup.run()
    assert refused.value.why == "the bucket does not exist"
