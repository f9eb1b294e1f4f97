"""Alert rules in promtool: each fires on the series of its fault, and is silent on those of a healthy node."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.tools import require_tool
from tests.unit.deploy.test_container import DEPLOY
from tests.unit.deploy.test_monitoring import rules

RULES = DEPLOY / "prometheus" / "penstock.rules.yaml"
NODE = 'job="penstock",instance="n1"'
SINK = 'pipeline="water",sink="lake"'


class Case(NamedTuple):
    """Series with one value a minute that make an alert fire after 45 minutes, and series that do not."""

    fault: dict[str, str]
    healthy: dict[str, str]
    labels: dict[str, str]
    summary: str


def node(metric: str, fault: str, healthy: str, summary: str, more: str = "", **labels: str) -> Case:
    name = f"{metric}{{{NODE}{more}}}"
    return Case({name: fault}, {name: healthy}, {"job": "penstock", "instance": "n1", **labels}, summary)


def sink(metric: str, fault: str, healthy: str, summary: str) -> Case:
    name = f"penstock_pipeline_{metric}{{{SINK}}}"
    return Case({name: fault}, {name: healthy}, {"pipeline": "water", "sink": "lake"}, summary)


STUCK = {f"penstock_pipeline_lag_records{{{SINK}}}": "10x60"}
BATCHES = f"penstock_pipeline_batches_total{{{SINK}}}"
BEHIND = "n1 is 1m 0s behind the active node"
CASES = {
    "PenstockDown": node("up", "0x60", "1x60", "n1 does not answer"),
    "PenstockNotReady": node("penstock_node_ready", "0x60", "1x60", "n1 is not ready: /readyz has the reasons"),
    "PenstockStorageFailed": node(
        "penstock_statestore_failed", "1x60", "0x60", "n1: a write or fsync failed, and nothing more is acknowledged"
    ),
    "PenstockOutOfSpace": node("penstock_disk_out_of_space", "1x60", "0x60", "n1 refuses writes for lack of space"),
    "PenstockDiskFillsUp": node(
        "penstock_disk_free_bytes", "1000000-1000x60", "1000000x60",
        "n1: the disk is full in less than a day at the rate of the last six hours",
    ),
    "PenstockCertificateExpires": node(
        "penstock_listener_certificate_expiry_timestamp_seconds", "90000x60", "9000000x60",
        "n1: the certificate of http expires in 1d 0h 15m 0s", ',listener="http"', listener="http",
    ),
    "PenstockClockStepped": node(
        "penstock_node_clock_offset_seconds", "-60x60", "0x60", "n1: the system clock stepped"
    ),
    "PenstockVersionsAheadOfTheClock": node(
        "penstock_statestore_version_lead_seconds", "3600x60", "0x60",
        "n1: versions lead the clock by 1h 0m 0s, clients refuse responses",
    ),
    "PenstockDamagedData": node(
        "penstock_tube_damaged_reads_total", "0+1x60", "7x60", "n1: stored data are damaged"
    ),
    "PenstockStateStoreDenies": node(
        "penstock_statestore_denied_requests_total", "0+2x60", " ".join(str(minute // 2) for minute in range(61)),
        "n1: the policies deny commands of a client of the state store; the log names it", ',verb="GET"',
    ),
    "PenstockMessagesDropped": node(
        "penstock_mqtt_dropped_queue_full_total", "0+5x60", "7x60",
        "n1: a client does not keep up, and its queue is full",
    ),
    "PenstockRuleWaits": node(
        "penstock_rule_waiting_messages", "5x60", "0x60", "n1: the log refuses messages of plant/#",
        ',filter="plant/#"', filter="plant/#",
    ),
    "PenstockBridgeDisconnected": node(
        "penstock_bridge_connected", "0x60", "1x60", "n1: the bridge hq is not connected", ',bridge="hq"', bridge="hq"
    ),
    "PenstockReloadFailed": node(
        "penstock_access_reload_failed", "1x60", "0x60",
        "n1: the last reload changed nothing, because a file is invalid",
    ),
    "PenstockAuditNotWritten": node(
        "penstock_audit_failed_writes_total", "0+1x60", "3x60", "n1: changes by HTTP are not in the audit trail"
    ),
    "PenstockGroupLags": node(
        "penstock_group_lag_seconds", "600x60", "200x60", "n1: group lake is 10m 0s behind",
        ',group="lake"', group="lake",
    ),
    "PenstockTransactionInDoubt": node(
        "penstock_tube_in_doubt_transactions", "1x60", "0x60",
        "n1: a batch of an exactly-once write is neither committed nor aborted",
    ),
    "PenstockClusterNotActive": Case(
        {f"penstock_cluster_active{{{NODE}}}": "0x60"}, {f"penstock_cluster_active{{{NODE}}}": "1x60"},
        {"job": "penstock"}, "0 nodes of the cluster are active instead of one",
    ),
    "PenstockClusterWithoutStandby": Case(
        {f"penstock_cluster_active{{{NODE}}}": "1x60", f"penstock_cluster_ready_standbys{{{NODE}}}": "0x60"},
        {f"penstock_cluster_active{{{NODE}}}": "1x60", f"penstock_cluster_ready_standbys{{{NODE}}}": "1x60"},
        {"job": "penstock", "instance": "n1"}, "n1 is active, and no standby could take over",
    ),
    "PenstockStandbyBlocked": node(
        "penstock_cluster_blocked", "1x60", "0x60", "n1 cannot become active: /readyz has the reason"
    ),
    "PenstockStandbyLags": node("penstock_cluster_lag_seconds", "60x60", "1x60", BEHIND),
    "PenstockClusterCommitsWait": node(
        "penstock_cluster_commit_wait_seconds", "9x60", "0x60",
        "n1: commits wait for etcd, and nothing more is acknowledged",
    ),
    "PenstockEtcdMemberDown": node(
        "penstock_etcd_up", "0x60", "1x60",
        "n1: etcd 10.0.0.1:2379 does not answer, /readyz has the action",
        ',endpoint="10.0.0.1:2379"', endpoint="10.0.0.1:2379",
    ),
    "PenstockPipelineLags": sink("lag_seconds", "600x60", "20x60", "water/lake is 10m 0s behind"),
    "PenstockPipelineStuck": Case(
        STUCK | {BATCHES: "7x60"}, STUCK | {BATCHES: "7+1x60"}, {"pipeline": "water", "sink": "lake"},
        "water/lake has records to read and completed no batch for 15 minutes",
    ),
    "PenstockPipelineRestarts": sink("restarts_total", "0+1x60", "1x60", "water/lake restarts after errors"),
    "PenstockPipelineDeadLetters": sink(
        "dead_total", "0+1x60", "1x60", "water/lake: records could not be processed"
    ),
}  # fmt: skip


def unit_test(rule: dict[str, Any], series: dict[str, str], *, fires: bool) -> dict[str, Any]:
    """A test of promtool: what the rule does after 45 minutes."""
    name, case = rule["alert"], CASES[rule["alert"]]
    alert = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": case.summary},
    }
    return {
        "name": f"{name}{'' if fires else ' of a healthy node'}",
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "alert_rule_test": [{"eval_time": "45m", "alertname": name, "exp_alerts": [alert] if fires else []}],
    }


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [require_tool("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documented_scrape_configuration_with_credentials_is_valid(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs" / "operations" / "monitor.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(scrape_configs:\n.*?)```", page, re.DOTALL)
    assert block is not None
    (tmp_path / "prometheus.yml").write_text(block[1])
    for name in ("ca.pem", "password"):
        (tmp_path / name).touch()
    promtool("check", "config", "--syntax-only", str(tmp_path / "prometheus.yml"))


def test_each_alert_fires_on_its_fault_and_is_silent_otherwise(tmp_path: Path) -> None:
    found = {rule["alert"]: rule for rule in rules()}
    assert set(CASES) == set(found), "each rule has a case"
    tests = [unit_test(found[name], case.fault, fires=True) for name, case in CASES.items()]
    tests += [unit_test(found[name], case.healthy, fires=False) for name, case in CASES.items()]
    file = tmp_path / "alerts.test.yaml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )  # JSON is YAML
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(file))


def test_a_wrong_summary_is_found(tmp_path: Path) -> None:
    rule = next(rule for rule in rules() if rule["alert"] == "PenstockDown")
    wrong = unit_test({**rule, "annotations": {"runbook": "elsewhere"}}, CASES["PenstockDown"].fault, fires=True)
    file = tmp_path / "alerts.test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [wrong]}))
    with pytest.raises(AssertionError, match="elsewhere"):
        promtool("test", "rules", str(file))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_the_runbook_of_an_alert_exists(rule: dict[str, Any]) -> None:
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    page = (DEPLOY.parent / path).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
