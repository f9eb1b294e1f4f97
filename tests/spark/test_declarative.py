"""The example project of Spark Declarative Pipelines, as its page shows it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from penstock.tube.record import Record
from tests.docs.pages import ROOT, blocks
from tests.spark.node import Node
from tests.spark.processes import spark_environment

PROJECT = ROOT / "examples" / "declarative"
TABLES = Path("transformations") / "telemetry.py"


def test_the_page_shows_the_example() -> None:
    page = blocks(ROOT / "docs" / "spark" / "declarative.md")
    assert (PROJECT / TABLES).read_text(encoding="utf-8") in [block.text for block in page]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_example_reads_each_record_of_a_topic_once(node: Node, tmp_path: Path) -> None:
    node.create_topic("telemetry", partitions=2)
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text(encoding="utf-8")
    assert "file:///tmp/penstock-declarative" in text
    spec.write_text(text.replace("file:///tmp/penstock-declarative", f"file://{tmp_path}/storage"), encoding="utf-8")
    sent = [("a", b"1"), ("b", b"2"), ("a", b"3")]
    for records in (sent, [("b", b"4")]):
        node.append("telemetry", [(0, Record(value, key.encode())) for key, value in records])
        run(project, node)
    rows = ds.dataset(project / "spark-warehouse" / "records", format="parquet").to_table().to_pylist()
    assert sorted((row["key"], row["value"]) for row in rows) == [("a", "1"), ("a", "3"), ("b", "2"), ("b", "4")]
    counts = ds.dataset(project / "spark-warehouse" / "counts", format="parquet").to_table().to_pylist()
    assert {row["key"]: row["count"] for row in counts} == {"a": 2, "b": 2}


def run(project: Path, node: Node) -> None:
    done = subprocess.run(
        ["spark-pipelines", "run", "--conf", "spark.sql.catalogImplementation=hive"],
        cwd=project, env=spark_environment(node), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Run is COMPLETED." in done.stdout + done.stderr
