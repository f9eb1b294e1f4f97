"""The Kubernetes manifests: valid for the API's schemas, consistent with each other and with the image."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from penstock.node.config.node import load_config
from tests.kustomize import prepare
from tests.unit.deploy.test_container import DEPLOY, PORTS, listeners

FOLDER = DEPLOY / "kubernetes"
OLDEST, NEWEST = "1.30", "1.36"
"""Versions of the Kubernetes API that the manifests are checked against."""


def manifests() -> dict[str, Any]:
    """The manifests by kind."""
    paths = YAML(typ="safe").load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert set(paths) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    found = [YAML(typ="safe").load((FOLDER / path).read_text(encoding="utf-8")) for path in paths]
    return {each["kind"]: each for each in found}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("kind", ["ConfigMap", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"])
def test_a_manifest_is_valid(kind: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[kind], version, strict=True)


def test_a_wrong_manifest_is_refused() -> None:
    """The schemas refuse unknown names, so that the test above means something."""
    wrong = manifests()["StatefulSet"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_names_ports_and_labels_agree() -> None:
    found = manifests()
    stateful = found["StatefulSet"]["spec"]
    pod = stateful["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(ports.values()) == PORTS
    assert {port["targetPort"]: port["port"] for port in found["Service"]["spec"]["ports"]} == ports
    assert stateful["serviceName"] == found["Service"]["metadata"]["name"]
    labels = stateful["template"]["metadata"]["labels"]
    assert labels == stateful["selector"]["matchLabels"] == found["Service"]["spec"]["selector"]
    assert labels == found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert labels == found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    permitted = [port["port"] for rule in found["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
    assert set(permitted) == set(ports)
    for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in stateful["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_configuration_is_valid_and_has_the_ports(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(manifests()["ConfigMap"]["data"]["penstock.yaml"])
    config = load_config(file, {}, {})
    assert listeners(config) == PORTS
    assert str(config.tube_broker.advertise) == "penstock-0.penstock:8123"


def test_kustomize_renders_valid_manifests_with_the_image_of_a_registry(tmp_path: Path) -> None:
    """As the page says: the image's name is set in kustomization.yaml. The labels must not change the selectors, which
    cannot be updated in a cluster."""
    kustomize = prepare(download=False)
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "kustomization.yaml"
    page = (DEPLOY.parent / "docs" / "operations" / "deploy.md").read_text(encoding="utf-8")
    assert "(`newName: REGISTRY/penstock`)" in page
    before, image = file.read_text(encoding="utf-8"), "{name: penstock, newTag: latest}"
    assert before.count(image) == 1
    file.write_text(before.replace(image, "{name: penstock, newName: registry.invalid/penstock, newTag: '1'}"))
    done = subprocess.run([kustomize, "build", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rendered = {each["kind"]: each for each in YAML(typ="safe").load_all(done.stdout)}
    assert rendered.keys() == manifests().keys()
    for manifest in rendered.values():
        kubernetes_validate.validate(manifest, NEWEST, strict=True)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/name"] == "penstock"
    pod = rendered["StatefulSet"]["spec"]["template"]["spec"]
    assert [container["image"] for container in pod["containers"]] == ["registry.invalid/penstock:1"]
    for kind, source in manifests().items():
        assert rendered[kind].get("spec", {}).get("selector") == source.get("spec", {}).get("selector")
