"""`penstock cluster` without etcd: wrong configurations, and an installation without the extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command


@pytest.mark.parametrize("verb", ["status", "handover"])
def test_a_configuration_without_cluster_is_named(verb: str, penstock: Command, tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("data_dir: data\n")
    done = penstock("cluster", verb, "--config", str(tmp_path / "penstock.yaml"))
    assert (done.status, done.out) == (2, "")
    assert "no section `cluster`" in done.err


@pytest.mark.parametrize("verb", ["status", "handover"])
def test_a_missing_extra_is_named(
    verb: str, penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "penstock.yaml").write_text("cluster: {name: plant, node: a, etcd: ['127.0.0.1:1']}\n")
    for name in [name for name in sys.modules if name.startswith(("penstock.cluster", "penstock.node.cluster"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    done = penstock("cluster", verb, "--config", str(tmp_path / "penstock.yaml"))
    assert (done.status, done.out) == (2, "")
    assert "cluster: a library is not installed\n" in done.err
    assert "[cluster]" in done.err
