"""Sources, sinks and steps on the oldest and the newest Spark that are supported: the core of their tests, there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from tests.spark.versions import ROOT, python_with_spark
from tests.tools import skip_or_fail

CORE = [
    "tests/spark/test_tube_batch.py",
    "tests/spark/test_tube_stream.py",
    "tests/spark/test_statestore.py",
    # Expressions are tried with classes of Spark's own, which may change from one version to the next.
    "tests/spark/test_pipeline_steps.py",
]


STREAM = "tests/spark/test_tube_stream.py"
LACKS = {
    # There `availableNow` reads one batch and leaves the rest to the next run, and sources tell no latest offsets:
    # docs/reference/spark-versions.md says so.
    "4.1": [
        f"{STREAM}::test_available_now_drains_all_records_in_limited_batches_and_continues",
        f"{STREAM}::test_a_first_batch_from_the_latest_survives_a_restart",
        f"{STREAM}::test_a_running_query_sees_what_comes_and_where_the_log_ends",
    ],
    "4.3": [],
}


@pytest.mark.nightly
def test_a_source_without_admission_control_is_told_where_its_query_continues(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark 4.1 runs all sources so, and later versions those whose ``latestOffset`` has no parameters.

    The readers depend on it: ``tests/unit/spark/kafka/test_source.py::test_spark_4_1_gives_no_start``.
    """
    calls = tmp_path / "calls"

    class Reader(DataSourceStreamReader):
        def _called(self, *call: object) -> None:
            with calls.open("a", encoding="utf-8") as file:
                file.write(json.dumps(call) + "\n")

        def initialOffset(self) -> dict[str, int]:  # noqa: N802 - of PySpark
            return {"n": 0}

        def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802 - as of Spark 4.1
            self._called("latest")
            return {"n": 5}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
            self._called(start["n"], end["n"])
            return [InputPartition(end["n"])]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            yield (partition.value,)

        def commit(self, end: dict[str, int]) -> None:
            pass

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "without-start"

        def schema(self) -> str:
            return "n INT"

        def streamReader(self, schema: StructType) -> Reader:  # noqa: N802 - of PySpark
            return Reader()

    spark.dataSource.register(Source)

    def run() -> list[object]:
        calls.write_text("")
        stream = spark.readStream.format("without-start").load().writeStream.format("noop")
        query = stream.trigger(availableNow=True).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.awaitTermination()
        return [json.loads(line) for line in calls.read_text().splitlines()]

    assert run()[:2] == [["latest"], [0, 5]]
    assert run()[:2] == [[5, 5], ["latest"]]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", LACKS)
def test_the_core_holds_on(version: str) -> None:
    try:
        python = python_with_spark(version)
    except subprocess.CalledProcessError as error:
        skip_or_fail(f"Spark {version} cannot be installed: {error.stderr.strip().splitlines()[-1:]}")
        raise
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    found = subprocess.run(
        [str(python), "-c", "import pyspark; print(pyspark.__version__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.startswith(version + ".")
    done = subprocess.run(
        # PySpark 4.1 leaves sockets open, which is not ours to answer for.
        [
            *(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly"),
            *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
            *(f"--deselect={test}" for test in LACKS[version]),
            *CORE,
        ],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
