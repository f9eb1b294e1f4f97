"""Reference pages whose source is the code match the code, and their examples load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.node.config.mqtt import MqttLimits
from penstock.node.config.node import load_config
from penstock.node.metric_help import METRICS
from penstock.pipelines.spec.loader import load
from penstock.statestore.codec.commands import COMMANDS, Access, Verb
from tests.docs.pages import ROOT, blocks, page_paths

EXAMPLES = ROOT / "examples" / "reference"


def test_reference_pages_match_the_code() -> None:
    """The generator also fails if a key of the configuration or of the pipeline file has no description."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_feature_page_names_every_command() -> None:
    features = (ROOT / "docs" / "reference" / "features.md").read_text(encoding="utf-8")
    missing = [verb for verb in Verb if not re.search(rf"\b{verb}\b", features)]
    assert missing == [], "run `make reference`"


def test_the_page_on_authorization_names_every_command() -> None:
    page = (ROOT / "docs" / "security" / "authorization.md").read_text(encoding="utf-8")
    for permission in Access:
        commands = re.search(rf"`{str(permission.name).capitalize()}` covers <!-- commands: [a-z]+ -->([^<]*)<", page)
        assert commands is not None
        expected = {spec.verb for spec in COMMANDS.values() if permission in spec.access}
        assert set(re.findall(r"[A-Z]+", commands[1])) == expected, "run `make reference`; access is in COMMANDS"


def test_the_page_on_the_broker_has_every_limit_of_mqtt_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "mqtt.md").read_text(encoding="utf-8")
    limits = page[page.index("## Limits") : page.index("## `$SYS` topics")]
    assert set(re.findall(r"`([a-z_]+)`", limits)) >= set(MqttLimits.model_fields)
    assert set(re.findall(r"`(max_[a-z_]+)`", page)) <= set(MqttLimits.model_fields)


def test_the_example_configuration_loads() -> None:
    config = load_config(EXAMPLES / "penstock.yaml", {}, {})
    assert config.rules
    assert config.bridges


def test_the_example_pipeline_loads() -> None:
    assert load(EXAMPLES / "pipeline.yaml", {}).sinks


NODE_KEY = re.compile(r"^(?:mqtt|tube|security|rules|statestore|bridges|http|data_dir):", re.MULTILINE)
OTHER_FILE = re.compile(r"^(?:name|sinks|source):|brokerResources|tubeResources", re.MULTILINE)


@pytest.mark.parametrize("page", page_paths(), ids=lambda page: str(page.relative_to(ROOT)))
def test_configurations_of_pages_load(page: Path, tmp_path: Path) -> None:
    """Also those that no command of the page uses."""
    for block in blocks(page):
        if block.language == "yaml" and NODE_KEY.search(block.text) and not OTHER_FILE.search(block.text):
            file = tmp_path / "penstock.yaml"
            file.write_text(block.text, encoding="utf-8")
            load_config(file, {}, {})


def test_tests_that_pages_name_exist() -> None:
    """Pages name tests by path, or by file name after a path of the same folder."""
    known = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for page in page_paths():
        text = page.read_text(encoding="utf-8")
        for named in re.findall(r"`(tests/[\w/.]+\.py)`|covered by (tests/[\w/.]+\.py)", text):
            assert (ROOT / (named[0] or named[1])).exists(), f"{page.relative_to(ROOT)}: {named}"
        for name in re.findall(r"`(test_\w+\.py)`", text):
            assert name in known, f"{page.relative_to(ROOT)}: {name}"


def test_metrics_that_pages_name_exist() -> None:
    known = {
        f"penstock_{source}_{metric.name or attribute}{suffix}"
        for source, entries in METRICS.items()
        for attribute, metric in entries.items()
        for suffix in (*metric.suffixes, *([""] if metric.type == "histogram" else []))
    }
    sources = "|".join(METRICS)
    for page in page_paths():
        for name in re.findall(rf"`(penstock_(?:{sources})_\w*[a-z])`", page.read_text(encoding="utf-8")):
            assert name in known, f"{page.relative_to(ROOT)}: {name}"
