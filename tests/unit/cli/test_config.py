"""`penstock config`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.node.config.node import load_config
from penstock.node.doctor import Level, diagnose
from penstock.runtime.observability import logs
from tests.docs.pages import ROOT, blocks
from tests.unit.cli.conftest import Command

FILE = """\
data_dir: data
mqtt: 127.0.0.1:1999
http:
  bind: ${HTTP:-127.0.0.1:8099}
tube:
  admin_token: a-long-secret
  topics:
    telemetry: {partitions: 4}
rules:
  - {filter: "plant/#", topic: telemetry}
  - {filter: "line/+", topic: telemetry, attributes: {"the line": "{level.1}"}, overflow: refuse}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.yaml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_the_output_is_a_file_with_the_same_configuration(penstock: Command, file: Path, tmp_path: Path) -> None:
    file.write_text(FILE.replace("  admin_token: a-long-secret\n", ""), encoding="utf-8")
    for options in ([], ["--changed"]):
        shown = penstock("config", "show", str(file), *options)
        assert shown.status == 0
        other = tmp_path / "other.yaml"
        other.write_text(shown.out, encoding="utf-8")
        assert load_config(other, {}, {}) == load_config(file, {}, {})
    assert "max_packet_size" not in shown.out


def test_each_setting_has_its_origin(penstock: Command, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DURABILITY", "flushed")
    rows = [json.loads(line) for line in penstock("config", "show", str(file), "--json").out.splitlines()]
    found = {row["name"]: (row["value"], row["origin"]) for row in rows}
    assert found["durability"] == ("flushed", "PENSTOCK_DURABILITY")
    assert found["mqtt.bind"] == ("127.0.0.1:1999", f"{file}:2:7")
    assert found["mqtt.limits.max_inflight"] == (1024, "default")
    assert found["mqtt.transport"] == ("tcp", "default")
    assert found["http.bind"] == ("127.0.0.1:8099", f"{file}:4:9")
    assert found["tube.topics.telemetry.partitions"] == (4, f"{file}:8:29")
    assert found["rules[0].overflow"] == ("wait", "default")
    assert found["rules[1].overflow"][1].startswith(f"{file}:11:")
    table = penstock("config", "show", str(file), "--changed", "--origin").out
    assert "SETTING" in table.splitlines()[0]
    assert " default" not in table


def test_secrets_are_not_shown(penstock: Command, file: Path) -> None:
    for options in ([], ["--origin"], ["--json"], ["--changed"]):
        shown = penstock("config", "show", str(file), *options)
        assert shown.status == 0
        assert "a-long-secret" not in shown.out + shown.err
        assert "***" in shown.out


def test_without_a_file_everything_has_its_default(
    penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_MQTT", raising=False)
    assert penstock("config", "show", "--changed") == (0, "", "every setting has its default value\n")
    assert penstock("config", "check") == (0, "", "the configuration is valid\n")


def test_a_missing_file_of_a_pipeline_is_a_warning(penstock: Command, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("pipelines: {water: {file: water.yaml}}\n", encoding="utf-8")
    checked = penstock("config", "check", str(file))
    assert checked.status == 0
    assert f"warning: the file of pipeline 'water' does not exist: {tmp_path}/water.yaml" in checked.err
    found = [each for each in diagnose(file, {}, {}) if each.part == "configuration"]
    assert [(each.level, each.what.split(":")[0]) for each in found] == [
        (Level.OK, "valid"),
        (Level.WARNING, "the file of pipeline 'water' does not exist"),
    ]
    (tmp_path / "water.yaml").touch()
    assert penstock("config", "check", str(file)).err == "the configuration is valid\n"


def test_a_configuration_that_a_node_would_refuse(penstock: Command, file: Path, tmp_path: Path) -> None:
    assert penstock("config", "check", str(file)).status == 0
    file.write_text("mqtt: {bindd: 127.0.0.1:1883}\n", encoding="utf-8")
    wrong = penstock("config", "check", str(file))
    assert wrong.status == 2
    assert f"{file}:1:8: option 'mqtt.bindd'" in wrong.err
    assert penstock("config", "show", str(file)).err == wrong.err
    file.write_text("security: {passwords: missing}\n", encoding="utf-8")
    assert str(tmp_path / "missing") in penstock("config", "check", str(file)).err
    file.write_text(
        "mqtt: {bind: 127.0.0.1:1883, transport: tls, tls: {certificate: no.pem, key: no.key}}\n", encoding="utf-8"
    )
    refused = penstock("config", "check", str(file))
    assert refused.status == 2
    assert str(tmp_path / "no.pem") in refused.err
    file.write_text("tracing: {endpoint: 'https://127.0.0.1:4318', ca: no-ca.pem}\n", encoding="utf-8")
    refused = penstock("config", "check", str(file))
    assert refused.status == 2
    assert str(tmp_path / "no-ca.pem") in refused.err
    oidc = "{token_url: 'https://id/token', client_id: c, client_secret_file: no-secret}"
    for name, settings in {
        "no-secret": f"sasl: {{mechanism: OAUTHBEARER, oidc: {oidc}}}",
        "no-kafka.pem": "tls: {ca: no-kafka.pem}",
    }.items():
        kafka = f"{{bootstrap: ['127.0.0.1:1'], topic: t, {settings}}}"
        file.write_text(f"rules: [{{filter: '#', to: {{kafka: {kafka}}}}}]\n", encoding="utf-8")
        assert str(tmp_path / name) in penstock("config", "check", str(file)).err
    file.write_text("mqtt: 0.0.0.0:1883\n", encoding="utf-8")
    assert "other machines could use these listeners" in penstock("config", "check", str(file)).err


@pytest.mark.parametrize(
    ("module", "setting", "extra"),
    [
        ("grpc", "cluster: {name: plant, node: a, etcd: ['127.0.0.1:1']}", "cluster"),
        ("confluent_kafka", "rules: [{filter: '#', to: {kafka: {bootstrap: ['127.0.0.1:1'], topic: t}}}]", "kafka"),
        ("opentelemetry.sdk.trace", "tracing: {endpoint: 'http://127.0.0.1:4318'}", "otel"),
    ],
)
def test_a_missing_extra_is_found_before_the_start(
    penstock: Command, file: Path, monkeypatch: pytest.MonkeyPatch, module: str, setting: str, extra: str
) -> None:
    for importer in (
        "penstock.cluster.client",
        "penstock.cluster.grpc_import",
        "penstock.runtime.observability.tracing",
    ):
        monkeypatch.delitem(sys.modules, importer, raising=False)
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # for the whole process
    file.write_text(f"{setting}\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, module, None)
    refused = penstock("config", "check", str(file))
    assert refused.status == 2
    assert "not installed" in refused.err
    assert f"[{extra}]" in refused.err
    assert penstock("up", "--config", str(file)).err == refused.err
    assert f'"penstock[{extra}]"' in penstock("doctor", str(file)).out


def test_the_schema_names_every_option_of_the_example_in_the_reference(penstock: Command) -> None:
    schema = json.loads(penstock("config", "schema").out)
    example = next(b for b in blocks(ROOT / "docs" / "reference" / "configuration.md") if b.language == "yaml")
    top = {line.split(":")[0] for line in example.text.splitlines() if line[:1].isalpha()}
    assert len(top) > 5
    assert top <= set(schema["properties"])
