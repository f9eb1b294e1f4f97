"""`penstock cluster` without etcd: its output, wrong configurations, and an installation without the extra."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.console.snapshots import ClusterMember
from penstock.node.cluster.state import MOST_LAG
from tests.unit.cli.conftest import Command
from tests.unit.node.test_cluster_snapshot import SECTION, etcd, report


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


@pytest.mark.parametrize("active", ["one", None])
def test_the_command_prints_members_and_what_to_do(
    active: str | None, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = etcd(report("one", None), report("two", 0, "no log"), active=active)
    monkeypatch.setattr("penstock.cli.cluster._connected", lambda _: nullcontext((SECTION, fake)))
    done = penstock("cluster", "status")
    head = "one is active" if active else "no node is active"
    assert done.status == (0 if active else 1)
    assert done.out.startswith(f"cluster plant: {head}\netcd: 0.0 MiB, last commits: mqtt {MOST_LAG + 10}\nNODE")
    assert "warning cluster: two cannot become active\n  why: no log\n  hint: remove the cause" in done.out
    assert ("problem cluster: no node is active" in done.out) is (active is None)
    done = penstock("cluster", "status", "--json")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [(row["node"], row["role"], row["ready"]) for row in rows][1] == ("two", "blocked", False)
    assert set(rows[0]) == set(ClusterMember.__dataclass_fields__)
