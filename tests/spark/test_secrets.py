"""Passwords in options do not reach Spark's event log and errors, which more people can read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.node import Node

PASSWORD = "hunter2-xyz"

PROGRAM = """
import sys
import penstock.spark

url, log = sys.argv[1:]
session = penstock.spark.session("secrets", "local[1]", {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.dir": log,
    "spark.eventLog.compress": "false",
    "spark.executorEnv.PLANT_BROKER": url,
    "spark.python.authenticate.socketTimeout": "60s",
}, log_level="OFF")
rows = session.range(2).selectExpr("concat('secret/', id) AS key", "cast(id AS string) AS value")
rows.write.format("aio-statestore").mode("append").option("statestore.broker", url).save()
read = session.read.format("aio-statestore").option("statestore.broker", url).option("keys", "secret/*").load()
assert read.count() == 2
session.stop()
"""


def with_password(address: str) -> str:
    return f"mqtt://ann:{PASSWORD}@{address.removeprefix('mqtt://')}"


def test_errors_do_not_show_the_password_of_a_broker(spark: SparkSession) -> None:
    rows = spark.range(2).selectExpr("cast(id AS string) AS key", "cast(id AS string) AS value")
    write = rows.write.format("aio-statestore").mode("append").option("statestore.timeoutMs", "500")
    with pytest.raises(PySparkException) as raised:
        write.option("statestore.broker", with_password("127.0.0.1:1")).save()
    assert "127.0.0.1:1" in str(raised.value)
    assert PASSWORD not in str(raised.value)


@pytest.mark.nightly
@pytest.mark.timeout(600)  # a JVM of its own
def test_the_event_log_has_no_password(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "events"
    log.mkdir()
    program = [sys.executable, "-c", PROGRAM, with_password(node.mqtt), str(log)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    texts = [path.read_text() for path in log.rglob("events_*") if path.is_file()]
    assert any('"spark.executorEnv.PLANT_BROKER":"*********(redacted)"' in text for text in texts)
    assert not any(PASSWORD in text for text in texts)
