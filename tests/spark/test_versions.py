"""The sources and sinks on the oldest and the newest Spark that are supported: the core of their tests, over there."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.spark.versions import ROOT, python_with_spark
from tests.tools import skip_or_fail

CORE = ["tests/spark/test_tube_batch.py", "tests/spark/test_tube_stream.py", "tests/spark/test_statestore.py"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["4.1", "4.3"])
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
