"""The wheel without a checkout, locally, on a cluster and over Spark Connect: a script does not import penstock."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.spark.environment.java import SHORT_LIVED, find_java
from tests.spark.node import Node
from tests.spark.processes import Cluster

ROOT = Path(__file__).resolve().parents[2]

HIDDEN = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV", "SPARK_HOME")
"""Variables by which an interpreter or a module of the tests would be found."""

SCRIPT = """
import json, sys
from pyspark.sql import SparkSession

url, master, broker, topic, folder = sys.argv[1:]
builder = SparkSession.builder.config("spark.ui.enabled", "false")
connect = url.removeprefix("connect ")
spark = (builder.master(url) if connect == url else builder.remote(connect)).getOrCreate()
rows = spark.range(10).selectExpr("cast(id AS string) AS value")
rows.write.format("tubemq").mode("append").option("tubemq.master", master).option("topic", topic).save()
read = spark.read.format("tubemq").option("tubemq.master", master).option("subscribe", topic).load()

keys = spark.sql("SELECT 'installed/a' AS key, '1' AS value")
keys.write.format("aio-statestore").mode("append").option("statestore.broker", broker).save()
store = spark.read.format("aio-statestore").option("statestore.broker", broker).option("keys", "installed/*").load()

messages = spark.sql("SELECT 'installed/b' AS topic, '2' AS payload, true AS retain")
messages.write.format("mqtt").mode("append").option("mqtt.broker", broker).save()

stream = (
    spark.readStream.format("tubemq").option("tubemq.master", master).option("subscribe", topic)
    .option("startingOffsets", "earliest").load()
)
query = (
    stream.writeStream.format("parquet").option("path", folder + "/out")
    .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
)
query.awaitTermination(120)
print(json.dumps({
    "rows": sorted(int(row.value) for row in read.collect()),
    "keys": [[bytes(row.key).decode(), bytes(row.value).decode()] for row in store.collect()],
    "streamed": spark.read.parquet(folder + "/out").count(),
    "imported": "penstock" in sys.modules,
    "session": type(spark).__module__,
}))
spark.stop()
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The interpreter of an environment with penstock's wheel; all else comes from the environment of the tests.

    The wheel without compiled code, which takes a second to build; tests/end_to_end/test_wheel.py has the other one.
    """
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    pure = {**os.environ, "PENSTOCK_BUILD": "pure"}
    done = subprocess.run(build, cwd=ROOT, env=pure, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("penstock-*.whl")
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path in a .pth file is searched last, and .pth files found there are not read: no checkout gets in.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "on", [*(pytest.param(each, marks=pytest.mark.nightly) for each in ("local", "cluster")), "connect"]
)
def test_a_script_that_knows_only_the_formats(
    installed: Path, node: Node, new_topic: Callable[..., str], tmp_path: Path, on: str
) -> None:
    topic = new_topic(2)
    job = tmp_path / "job.py"
    job.write_text(SCRIPT, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name not in HIDDEN} | {
        "PATH": f"{installed.parent}:{os.environ['PATH']}",
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # A short life: Java's second compiler would cost more time than its code gives back.
        "JAVA_TOOL_OPTIONS": SHORT_LIVED,
    }
    where = subprocess.run(
        [str(installed), "-c", "import penstock; print(penstock.__file__)"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)
    with contextlib.ExitStack() as stack:
        url = "connect local[2]" if on == "connect" else "local[2]"
        if on == "cluster":
            hidden = [name for name in HIDDEN if name != "PYSPARK_PYTHON"]
            cluster = stack.enter_context(Cluster(tmp_path, python=str(installed), hidden=hidden))
            url = cluster.url
        done = subprocess.run(
            [str(installed), str(job), url, node.master, node.mqtt, topic, str(tmp_path)],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "rows": list(range(10)),
        "keys": [["installed/a", "1"]],
        "streamed": 10,
        "imported": False,
        "session": f"pyspark.sql{'.connect' if on == 'connect' else ''}.session",
    }
    (message,) = node.retained("installed/b", 1)
    assert message.payload == b"2"
