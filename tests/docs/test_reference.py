"""Reference pages whose source is the code match the code, and their examples load."""

from __future__ import annotations

import subprocess
import sys

from penstock.node.config.node import load_config
from penstock.pipelines.spec.loader import load
from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples" / "reference"


def test_reference_pages_match_the_code() -> None:
    """The generator also fails if a key of the configuration or of the pipeline file has no description."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_configuration_loads() -> None:
    config = load_config(EXAMPLES / "penstock.yaml", {}, {})
    assert config.rules
    assert config.bridges


def test_the_example_pipeline_loads() -> None:
    assert load(EXAMPLES / "pipeline.yaml", {}).sinks
