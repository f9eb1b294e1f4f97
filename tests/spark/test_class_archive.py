"""`penstock pipeline warm-up`: sessions map the classes of Spark instead of loading them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from penstock.spark import session
spark = session("t", conf={"spark.driver.extraJavaOptions": f"-Xlog:class+load:file={sys.argv[1]}"})
assert spark.range(5).count() == 5
spark.stop()
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_session_loads_its_classes_from_the_archive(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("SPARK_HOME", "SPARK_SUBMIT_OPTS")}
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    warm_up = [sys.executable, "-m", "penstock.cli", "pipeline", "warm-up"]
    done = subprocess.run(warm_up, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
    for options in ("", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"):
        log = tmp_path / f"classes-{len(options)}.log"
        given = environ | {"SPARK_SUBMIT_OPTS": options}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, log], env=given, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stdout
        # "shared objects file" alone: Java's own classes, which are mapped anyway.
        mapped = log.read_text().count("source: shared objects file (top)")
        assert mapped > 3_000, f"{mapped} classes of the archive with {options!r}"
