"""A package on a standalone cluster whose machines have Spark and Python, but not penstock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from deltalake import DeltaTable

from penstock.cli.main import main
from penstock.spark.environment.java import find_java
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.processes import Cluster
from tests.spark.test_installed_wheel import HIDDEN

FILE = """\
name: packed
source: {{topics: ["packed"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema_file: schemas/rows.ddl}}
  - name: located
    python: {{file: where.py, schema: place STRING}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows"}}
  - name: newest
    statestore: {{order_by: n, entries: [{{key: "packed/newest", value: [n]}}]}}
"""
FUNCTION = """\
import penstock
import pyarrow as pa


def transform(batch):
    return pa.RecordBatch.from_pydict({"place": [penstock.__file__] * len(batch)})
"""
RECORDS = 200
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_package_runs_where_penstock_is_not_installed(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.create_topic("packed", 2)
    messages = [b'{"n": %d}' % n if n % 50 else b"broken" for n in range(RECORDS)]
    node.append("packed", [(n % 2, Record(message)) for n, message in enumerate(messages)])
    source, there = tmp_path / "source", tmp_path / "there"
    (source / "schemas").mkdir(parents=True)
    there.mkdir()
    (source / "schemas" / "rows.ddl").write_text("n INT NOT NULL")
    (source / "where.py").write_text(FUNCTION)
    lake = tmp_path / "lake"
    (source / "p.yaml").write_text(FILE.format(master=node.master, broker=node.mqtt, lake=lake))
    environ = {name: value for name, value in os.environ.items() if name not in HIDDEN} | {
        "PATH": f"{PYTHON.parent}:{pyspark.__path__[0]}/bin:/usr/bin:/bin",
        "SPARK_HOME": pyspark.__path__[0],
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    assert subprocess.run([PYTHON, "-c", "import penstock"], env=environ, capture_output=True, check=False).returncode
    with Cluster(
        tmp_path, 1, python=str(PYTHON), hidden=[name for name in HIDDEN if name != "PYSPARK_PYTHON"]
    ) as cluster:
        monkeypatch.chdir(there)
        small = ("spark.sql.shuffle.partitions=1", "spark.executor.cores=1", "spark.executor.memory=512m",
                 "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1")  # fmt: skip
        command = [
            "package",
            str(source / "p.yaml"),
            "--spark-master",
            cluster.url,
            "--state-dir",
            str(tmp_path / "state"),
        ]
        assert main(["pipeline", *command, "--once", *(word for text in small for word in ("--conf", text))]) == 0
        # The two lines as a user has them, on a machine that has neither these sources nor the file.
        source.rename(tmp_path / "elsewhere")
        script = capsys.readouterr().out
        done = subprocess.run(
            ["sh", "-e", "-c", script], cwd=there, env=environ, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = DeltaTable(str(lake / "rows")).to_pyarrow_table().to_pylist()
    assert sorted(row["n"] for row in rows) == [n for n in range(RECORDS) if n % 50]
    places = {Path(row["place"]) for row in rows}
    assert all("environment/packages/penstock" in str(place) for place in places)
    assert any(place.is_relative_to(tmp_path / "work-0") for place in places), places
