"""Rows enriched from a real state store, in real workers."""

from __future__ import annotations

from pyspark.sql import SparkSession

from penstock.spark.statestore.lookup import with_lookup
from tests.spark.node import Node


def test_values_are_added_and_read_anew(spark: SparkSession, node: Node) -> None:
    node.set_keys({f"limits/{number}": b"v%d" % number for number in range(20)})
    keys = spark.range(30).selectExpr("id", "if(id = 7, null, concat('limits/', id % 25)) AS `a.key`")
    df = with_lookup(keys, "a.key", "limit", node.mqtt)
    assert df.schema["limit"].dataType.simpleString() == "binary"

    def found() -> list[bytes | None]:
        rows = df.filter("id < 100").orderBy("id").collect()
        return [None if row.limit is None else bytes(row.limit) for row in rows]

    expected = [None if n == 7 or n % 25 >= 20 else b"v%d" % (n % 25) for n in range(30)]
    assert found() == expected
    node.set_keys({"limits/3": b"changed"})
    assert found()[3] == b"changed"
