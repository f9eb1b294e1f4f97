"""Alert rules and dashboards: valid PromQL over metrics that a node or a pipeline run has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from ruamel.yaml import YAML

from penstock.node.metric_help import METRICS
from penstock.pipelines.run.progress import COUNTERS, MEANINGS
from tests.unit.deploy.test_container import DEPLOY
from tools.dashboards import DASHBOARDS, render


def exported() -> set[str]:
    """The names of all metrics, as they are scraped; tests compare both tables with running nodes and runs."""
    node = {
        f"penstock_{part}_{figure.name or name}{suffix}"
        for part, table in METRICS.items()
        for name, figure in table.items()
        for suffix in figure.suffixes
    }
    return node | {f"penstock_pipeline_{name}{'_total' if name in COUNTERS else ''}" for name in MEANINGS}


def rules() -> list[dict[str, Any]]:
    document = YAML(typ="safe").load((DEPLOY / "prometheus" / "penstock.rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def targets(name: str) -> Iterator[str]:
    for panel in json.loads(render(name))["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m")


def check(expression: str) -> None:
    """The expression can be parsed, and its metrics exist."""
    promql_parser.parse(expression)  # raises ValueError
    names = set(re.findall(r"\bpenstock_\w+", expression))
    assert names <= exported(), f"unknown: {names - exported()}"


def test_a_wrong_expression_or_name_is_found() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        promql_parser.parse("rate(penstock_node_ready[5m]")
    with pytest.raises(AssertionError, match="penstock_node_readi"):
        check("penstock_node_readi == 0")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_has_an_expression_over_existing_metrics(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "runbook"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_generated_and_has_existing_metrics(name: str) -> None:
    file: Path = DEPLOY / "grafana" / f"{name}.json"
    assert file.read_text(encoding="utf-8") == render(name), "run tools/dashboards.py"
    for expression in targets(name):
        check(expression)
    model = json.loads(render(name))
    assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])
    for panel in model["panels"]:
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(legends) == len(panel["targets"])


def test_every_dashboard_is_in_the_folder() -> None:
    assert {path.stem for path in (DEPLOY / "grafana").iterdir()} == set(DASHBOARDS)
