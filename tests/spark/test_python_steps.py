"""Python steps in Spark's workers: rows, dead letters, and errors that stop a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.errors import ConfigError
from penstock.pipelines.spec.steps import Step
from penstock.pipelines.spec.values import directory
from penstock.spark.error_causes import error_text, full_text, innermost_cause
from tests.spark.test_pipeline_steps import apply, no_lookup, rows, steps

CODE = """\
import datetime

import pyarrow as pa


def transform(batch):
    assert batch.schema.names == ["n", "at"], batch.schema
    hours = [at.astimezone(datetime.UTC).hour if at else None for at in batch["at"].to_pylist()]
    values = [{"half": 10 / n if n != 5 else None, "name": str(n)} if n != 3 else None for n in batch["n"].to_pylist()]
    return pa.table({"hour": pa.array(hours, pa.int64()), "part": values, "at": batch["at"]})
"""
PARSE = {"name": "parsed", "parse": {"schema": "n INT NOT NULL, at TIMESTAMP, kept STRING"}}
VALUES = [
    b'{"n":4,"at":"2022-03-20T10:00:00Z","kept":"k"}',
    b'{"n":0}',
    b"no JSON",
    b'{"n":3}',
    b'{"n":5}',
]
pytestmark = pytest.mark.timeout(300)


def made(directory_of_file: Path, **options: object) -> list[Step]:
    (directory_of_file / "half.py").write_text(CODE)
    schema = "hour INT, part STRUCT<half: DOUBLE NOT NULL, name: STRING> NOT NULL, at TIMESTAMP"
    function = {"file": "half.py", "input": ["n", "at"], "schema": schema, **options}
    before = directory.set(directory_of_file)
    try:
        return steps(PARSE, {"name": "computed", "python": function}, {"name": "high", "filter": "part.half > 2.2"})
    finally:
        directory.reset(before)


def test_columns_are_computed_and_a_row_on_which_it_fails_is_dead(spark: SparkSession, tmp_path: Path) -> None:
    found = apply(rows(spark, *VALUES), made(tmp_path), no_lookup).orderBy("_id").collect()
    assert [name for name in found[0].asDict() if not name.startswith("_")] == ["n", "kept", "hour", "part", "at"]
    assert (found[0]["hour"], found[0]["part"].asDict(), found[0]["kept"]) == (10, {"half": 2.5, "name": "4"}, "k")
    dead = [None if row["_dead"] is None else tuple(row["_dead"])[:3] for row in found]
    assert dead == [
        None,
        ("computed", "python.failed", "half.py, line 9: ZeroDivisionError: division by zero"),
        ("parsed", "parse.not_json", "the payload is not JSON"),
        ("computed", "schema.null", "column 'part' is missing or null"),
        None,
    ]
    assert [row["_filtered"] for row in found] == [None, None, None, None, "high"]


def test_an_error_that_stops_the_run_names_the_line_and_no_spark(spark: SparkSession, tmp_path: Path) -> None:
    query = apply(rows(spark, *VALUES), made(tmp_path, on_error="fail"), no_lookup)
    with pytest.raises(PySparkException) as caught:
        query.collect()
    kind, words = innermost_cause(full_text(caught.value))
    assert (kind, error_text(words)) == (
        "PenstockError",
        (
            "step 'computed': half.py, line 9: ZeroDivisionError: division by zero",
            "the step has `on_error: fail`",
            "correct half.py or the data, and start the pipeline again: it continues with this batch",
        ),
    )


def test_a_file_that_fails_when_it_is_loaded_stops_the_run_before_it_starts(
    spark: SparkSession, tmp_path: Path
) -> None:
    step = made(tmp_path)[1]
    (tmp_path / "half.py").write_text("import no_such_package\n" + CODE)
    before = directory.set(tmp_path)
    try:
        broken = Step.model_validate(step.model_dump(by_alias=True, exclude_none=True))
    finally:
        directory.reset(before)
    with pytest.raises(ConfigError, match=r"half\.py, line 1: ModuleNotFoundError"):
        apply(rows(spark, *VALUES), [*steps(PARSE), broken], no_lookup)
