from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "source"),
    [("pyspark_tubemq", "tubemq"), ("pyspark_statestore", "aio-statestore"), ("pyspark_mqtt", "mqtt")],
)
def test_the_shim_is_light_and_names_the_source(module: str, source: str) -> None:
    """Spark imports every ``pyspark_*`` module of the environment for every user of a data source."""
    code = (
        f"import json, sys; import pyspark.sql.datasource; before = set(sys.modules); import {module} as shim;"
        "print(json.dumps([shim.DefaultSource.name(), sorted(set(sys.modules) - before)]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, imported = json.loads(result.stdout)
    assert name == source
    heavy = {"pyarrow", "pandas", "numpy", "google", "uvloop", "asyncio", "pydantic"}
    assert not heavy & {module.partition(".")[0] for module in imported}
    tube = {module for module in imported if module.startswith("penstock.tube.")}
    assert tube <= {"penstock.tube.codec"} | {
        f"penstock.tube.codec.{name}" for name in ("message", "strings", "varint")
    }
    assert not [module for module in imported if module.startswith("penstock.mqtt.codec")]
