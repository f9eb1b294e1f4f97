"""Rows and dead letters of a batch that are written and counted in one pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from penstock.pipelines.sinks.delivery import letter_condition
from penstock.pipelines.sinks.one_pass import (
    RECORD,
    SHARED,
    Outcomes,
    PassResult,
    flattened,
    is_supported,
    outcome,
    start_worker,
    structure,
    type_of_rows,
    write_in_one_pass,
)
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.letter_writers import LetterRange
from penstock.pipelines.steps.expressions import literal, quoted

PIPELINE = """\
name: p
source: {topics: [t]}
dead_letters: {path: dead}
steps:
  - {name: parsed, parse: {schema: n INT}}
  - {name: kept, filter: n > 0}
sinks:
  - {name: a, table: {path: a}}
  - {name: b, table: {path: b}}
"""
RANGES: list[tuple[LetterRange, ...]] = [
    (LetterRange({}, {"t": {"1:0": 5, "1:1": 0, "1:2": 7}}),),
    (LetterRange({"t": {"1:0": 5, "1:1": 4, "1:2": 7}}, None),),
    (LetterRange({"t": {"1:0": 2, "1:2": 3}}, {"t": {"1:0": 4, "1:2": 3}}), LetterRange({"t": {"1:0": 6}}, None)),
    (LetterRange({}, {"t": {"1:0": 4}}), LetterRange({"t": {"1:0": 4, "1:1": 0}}, None)),
    # Kafka has no brokers, and of several sources a stream has the name of its source.
    (LetterRange({"t": {"0": 3, "2": 1}}, {"t": {"0": 8, "2": 6}}),),
    (LetterRange({"it's/t": {"1:0": 3}}, {"it's/t": {"1:0": 8}}),),
    (),
]


def is_in(given: LetterRange, names: tuple[str, str], offset: int) -> bool:
    """Whether a record at ``offset`` of a partition, whose names with and without a broker are given, is in a range."""

    def is_before(offsets: Offsets) -> bool:
        found = [at for stream in ("t", "it's/t") for name in names if (at := offsets.get(stream, {}).get(name))]
        return bool(found) and offset < found[0]

    return not is_before(given.start) and (given.end is None or is_before(given.end))


def test_the_dead_letters_of_a_range_are_found_by_their_offsets(spark: SparkSession) -> None:
    rows = spark.sql(
        "SELECT struct(step, 'c' AS code, false AS again) AS _dead, struct('it''s' AS source, 't' AS topic, "
        "1 AS broker, partition, offset) AS _source FROM VALUES ('parsed'), ('other'), (NULL) AS a(step) "
        "CROSS JOIN VALUES (0), (1), (2), (3) AS b(partition) CROSS JOIN (SELECT id AS offset FROM range(10))"
    )
    (first, _) = plan(loader.parse(PIPELINE, name="p.yaml"))
    for ranges in RANGES:
        condition = letter_condition(first, {"parsed": ranges, "kept": ()})
        expected = {
            (partition, offset)
            for partition in range(4)
            for offset in range(10)
            if any(is_in(each, (f"1:{partition}", str(partition)), offset) for each in ranges)
        }
        found = [] if condition is None else rows.where(condition).selectExpr("_source.*", "_dead.step").collect()
        assert {(row["partition"], row["offset"]) for row in found} == expected
        assert len(found) == len(expected)
        assert {row["step"] for row in found} <= {"parsed"}


RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
COLUMNS = """
    id AS n, CAST(id % 100 AS TINYINT) AS tiny, CAST(id AS SMALLINT) AS small, CAST(id AS INT) AS int, id / 3 AS double,
    CAST(id / 3 AS FLOAT) AS float, id % 2 = 0 AS even, CAST(id / 7 AS DECIMAL(9, 4)) AS short_decimal,
    CAST(id / 7 AS DECIMAL(38, 10)) AS decimal, CAST(concat('ä', id) AS STRING) AS text,
    CAST(concat('b', id) AS BINARY) AS bytes,
    DATE'1582-01-01' + CAST(id AS INT) AS day, timestamp_micros(id * 1234567 - 99999999999999) AS at,
    CAST(timestamp_micros(id * 7) AS TIMESTAMP_NTZ) AS local,
    IF(id % 3 = 0, NULL, array(id, NULL, id + 1)) AS list, map(concat('k', id), struct(id AS v)) AS named,
    struct(id AS a, struct(IF(id % 5 = 0, NULL, 'x') AS c) AS b) AS nested, id + 1 AS `of.all`, id + 2 AS `of.one`
"""


def test_rows_of_every_type_are_those_that_spark_writes(spark: SparkSession, tmp_path: Path) -> None:
    data = spark.range(0, 1_000, numPartitions=3).selectExpr(*_columns())
    assert is_supported(data.schema)
    rows = data.select(
        "*",
        sf.when(sf.expr("n % 100 = 7"), sf.struct(sf.lit("step").alias("step"))).alias("_dead"),
        sf.when(sf.expr("n % 10 = 3"), sf.lit("filter")).alias("_filtered"),
        sf.struct(sf.col("bytes").alias("value")).alias("_source"),
    )
    letter = {"step": "_dead.step"}
    is_letter, is_other = "_dead IS NOT NULL AND n < 500", "_dead IS NOT NULL AND n < 200"
    # Some columns are those of one sink, the others those of all.
    shared = ("n", "text", "nested", "of.all")
    own = {name: quoted(name) for name in data.columns if name not in shared}
    both = flattened(
        rows.selectExpr(
            *(f"{quoted(name)} AS `{SHARED}{name}`" for name in shared),
            f"{outcome(own, letter, is_letter)} AS s0",
            f"{outcome({}, {}, 'false')} AS s1",
            f"{outcome({}, {'step': literal('other')}, is_other)} AS s2",
            f"{structure({'value': '_source.value'})} AS {RECORD}",
        ),
        3,
    )
    names = tuple(data.columns)
    assert type_of_rows(both.schema, 0, names) == data.schema
    # Several batches in one row group.
    spark.conf.set(RECORDS, "100")
    found, numbers, others = write_in_one_pass(
        both,
        [
            Outcomes(0, names, tmp_path / "rows", tmp_path / "letters"),
            Outcomes(1, ("n",), tmp_path / "numbers", None),
            Outcomes(2, ("n",), tmp_path / "others", tmp_path / "other letters"),
        ],
    )
    spark.conf.unset(RECORDS)
    assert (numbers.out, numbers.dead, numbers.filtered, numbers.letters) == (890, 10, 100, None)
    assert sum(pq.ParquetFile(tmp_path / "numbers" / name).metadata.num_rows for name in numbers.rows.names) == 890
    assert (found.out, found.dead, found.filtered) == (890, 10, 100)
    assert (found.rows.rows, len(found.rows.names)) == (890, 3)
    files = [pq.ParquetFile(tmp_path / "rows" / name) for name in found.rows.names]
    assert [file.metadata.num_row_groups for file in files] == [1, 1, 1]
    written = spark.read.parquet(*(str(tmp_path / "rows" / name) for name in found.rows.names))
    # Spark reads every column as nullable.
    assert written.schema.simpleString() == data.schema.simpleString()
    expected = data.where("n % 100 <> 7 AND n % 10 <> 3")
    assert sorted(written.collect(), key=lambda row: row["n"]) == expected.orderBy("n").collect()
    # Also without Spark's own schema in the file.
    plain = pq.read_schema(tmp_path / "rows" / found.rows.names[0])
    assert {field.name for field in plain} == set(data.columns)
    assert StructType.fromJson(json.loads((plain.metadata or {})[SPARKS_SCHEMA])) == data.schema
    assert _letters(tmp_path / "letters", found) == [
        {"step": "step", "value": b"b%d" % n} for n in (107, 207, 307, 407, 7)
    ]
    assert _letters(tmp_path / "other letters", others) == [{"step": "other", "value": b"b%d" % n} for n in (107, 7)]


def _letters(directory: Path, found: PassResult) -> list[dict[str, object]]:
    assert found.letters is not None
    rows = [row for name in found.letters.names for row in pq.ParquetFile(directory / name).read().to_pylist()]
    assert len(rows) == found.letters.rows
    assert found.letters_by_step == Counter(row["step"] for row in rows)
    return sorted(rows, key=lambda row: str(row["value"]))


def test_a_batch_without_rows_writes_no_file(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(0, 10, numPartitions=2).selectExpr(
        "id AS n", "CAST(NULL AS STRUCT<step: STRING>) AS _dead", "'all' AS _filtered"
    )
    rows = rows.selectExpr(f"{outcome({'n': 'n'}, {'n': 'n'}, 'false')} AS s0", f"{structure({'n': 'n'})} AS {RECORD}")
    (found,) = write_in_one_pass(flattened(rows, 1), [Outcomes(0, ("n",), tmp_path / "rows", None)])
    assert (found.out, found.filtered, found.rows.names, found.letters) == (0, 10, (), None)
    assert not (tmp_path / "rows").exists()


def test_types_that_arrow_cannot_carry_are_not_supported(spark: SparkSession) -> None:
    assert not is_supported(spark.sql("SELECT parse_json('1') AS v").schema)
    assert not is_supported(spark.sql("SELECT INTERVAL '1' DAY AS i").schema)
    assert not is_supported(spark.sql("SELECT array(struct('a' COLLATE UTF8_LCASE AS s)) AS i").schema)


def _columns() -> list[str]:
    """Split the list of columns at commas outside parentheses."""
    parts, depth = [""], 0
    for character in COLUMNS:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def test_a_worker_that_was_started_has_the_modules_of_a_batch(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def modules(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        import pyarrow as pa

        for _ in batches:
            # Before this function, which is not of a module, needs any of them.
            found = all(name in sys.modules for name in ("penstock.pipelines.sinks.one_pass", "pyarrow.parquet"))
            yield pa.RecordBatch.from_pydict({"found": [found]})

    # Workers with other variables are new ones.
    monkeypatch.setitem(spark.sparkContext.environment, "PENSTOCK_TEST", "new worker")
    rows = spark.range(1).coalesce(1).mapInArrow(modules, "found BOOLEAN")
    monkeypatch.setitem(spark.sparkContext.environment, "PENSTOCK_TEST", "started worker")
    start_worker(spark)
    started = spark.range(1).coalesce(1).mapInArrow(modules, "found BOOLEAN")
    assert [row.found for row in (*rows.collect(), *started.collect())] == [False, True]
