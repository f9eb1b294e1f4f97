"""The change data feed of a table that delta-spark writes, compared with what delta-spark itself reads."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.spark.environment import jars
from penstock.spark.files.change_feed import ChangeFeed, count_changes, read_changes

COLUMNS = "k BIGINT, text STRING, amount DECIMAL(20, 2), at TIMESTAMP, day DATE, p STRING"
AMOUNT, DAY = "123456789012345678.91", "2026-03-01"


def changes(table: Path) -> Counter[tuple[Any, ...]]:
    """The changes of all versions as our source reads them."""
    feed = ChangeFeed(table)
    start = feed.start(0)
    files = feed.files(start, feed.latest(start))
    found: list[tuple[Any, ...]] = []
    for batch in read_changes(table, files):
        for record in batch.to_pylist():
            row = json.loads(record["value"], parse_float=Decimal)
            if row["at"] is not None:
                row["at"] = datetime.fromisoformat(row["at"])
            values = (row.get(name) for name in ("k", "text", "amount", "at", "day", "p", "more"))
            found.append((record["partition"], record["header.change_type"], *values))
    assert count_changes(table, files) == len(found)
    return Counter(found)


@pytest.mark.nightly
def test_changes_that_delta_spark_writes_are_those_that_it_reads(spark: SparkSession, tmp_path: Path) -> None:
    if not jars.is_set_up():
        pytest.skip("Delta Lake was never set up here: `make jars` does, which needs Maven")
    path = tmp_path / "ta ble ü"
    table = f"delta.`{path}`"

    def run(*statements: str) -> None:
        for statement in statements:
            spark.sql(statement)

    run(
        f"CREATE TABLE {table} ({COLUMNS}) "
        "USING delta PARTITIONED BY (p) TBLPROPERTIES (delta.enableChangeDataFeed = true)",
        f"INSERT INTO {table} SELECT id, concat('ö', id), {AMOUNT}, TIMESTAMP '{DAY} 06:00:00', DATE '{DAY}', "
        "if(id % 2 = 0, 'ä b/c', NULL) FROM range(20)",
        f"UPDATE {table} SET text = 'new', p = 'other' WHERE k IN (2, 3)",
        f"DELETE FROM {table} WHERE k BETWEEN 4 AND 7",
        f"DELETE FROM {table} WHERE p = 'other'",
        f"MERGE INTO {table} AS old USING (SELECT id AS k, 'merged' AS text FROM range(8, 30, 3)) AS new "
        "ON old.k = new.k WHEN MATCHED AND new.k < 12 THEN DELETE WHEN MATCHED THEN UPDATE SET text = new.text "
        "WHEN NOT MATCHED THEN INSERT (k, text) VALUES (new.k, new.text)",
        f"OPTIMIZE {table}",
        f"ALTER TABLE {table} ADD COLUMNS (more INT)",
        f"INSERT INTO {table} SELECT 100, 'more', NULL, NULL, NULL, 'x', 7",
        f"INSERT OVERWRITE {table} SELECT 200, 'all', NULL, NULL, NULL, 'x', 8",
    )
    read = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", "0").load(str(path))
    expected: Counter[tuple[Any, ...]] = Counter()
    for row in read.collect():
        at = None if row["at"] is None else row["at"].astimezone(UTC)
        day = None if row["day"] is None else row["day"].isoformat()
        place = row["_commit_version"], row["_change_type"]
        expected[*place, row["k"], row["text"], row["amount"], at, day, row["p"], row["more"]] += 1
    assert changes(path) == expected
    assert {kind for _, kind, *_ in expected} == {"insert", "delete", "update_preimage", "update_postimage"}
    # Files that are removed as a whole have their partition in the log only, which leaves out one that is null.
    assert {row[7] for row in expected if row[:2] == (9, "delete")} == {None, "x", "ä b/c"}
