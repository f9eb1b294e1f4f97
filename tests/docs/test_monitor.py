"""The page about monitoring has every reason and warning of `/readyz`, and only those."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

SOURCES = ROOT / "src" / "penstock"
PAGE = (ROOT / "docs" / "operations" / "monitor.md").read_text(encoding="utf-8")

MEMBERSHIP = "node/cluster/membership.py"
COMMITS = "node/cluster/commit_state.py"
TEXTS = (
    ("node/health.py", '"starting"', "`starting`"),
    ("node/node.py", '"shutting down"', "`shutting down`"),
    ("runtime/io/commit_queue.py", "commit failed", "commit failed"),
    ("statestore/service/service.py", "statestore: the newest version (", "statestore: the newest version ("),
    ("node/tube_broker.py", "no master has accepted the broker yet", "no master has accepted the broker yet"),
    ("node/security.py", "the last reload changed nothing: ", "the last reload changed nothing: "),
    ("node/security.py", " was added after the start: ", " was added after the start: "),
    ("node/security.py", " was changed after the start: ", " was changed after the start: "),
    ("node/security.py", "'ended' if end <= now else 'ends'", "`FILE: ends on …`, `FILE: ended on …`"),
    ("runtime/io/disk_space.py", "disk space: ", "disk space: "),
    ("node/client_warnings.py", "queue of {client} is full: ", "queue of client … is full: "),
    ("runtime/io/clock.py", "clock: the system clock was set ", "clock: the system clock was set "),
    ("node/tube_broker.py", "is prepared, neither committed nor aborted", "is prepared, neither committed nor aborted"),
    ("node/capture.py", "has accepted no change of the state store", "has accepted no change of the state store"),
    ("runtime/observability/audit.py", "cannot be written: ", "the audit trail … cannot be written: "),
    ("runtime/observability/otlp.py", "{self._items} cannot be sent to ", "`spans cannot be sent to …`"),
    ("runtime/observability/telemetry.py", '"metrics", "metrics"', "`metrics cannot be sent to …`"),
    ("runtime/observability/telemetry.py", '"log lines"', "`log lines cannot be sent to …`"),
    (MEMBERSHIP, "standby: the active node is", "`standby: the active node is …`"),
    (
        MEMBERSHIP,
        "standby: no node of the cluster is active",
        "`standby: no node of the cluster is active",
    ),
    (COMMITS, "etcd is full, commits wait", "`cluster: etcd is full, commits wait`"),
    (COMMITS, "etcd denies requests, commits wait", "`cluster: etcd denies requests, commits wait`"),
    (
        COMMITS,
        "commits have been waiting for etcd for",
        "`commits have been waiting for etcd for … s`",
    ),
    (
        "mqtt/bridge.py",
        "bridges of another node are not configured on this one: ",
        "`bridges of another node are not configured on this one: …`",
    ),
    ("console/cluster.py", "etcd {member.endpoint} does not answer", "`etcd … does not answer`"),
    ("console/cluster.py", "uses {member.used_bytes} of {member.quota_bytes} bytes", "`etcd … uses … of … bytes`"),
    ("console/cluster.py", "etcd reports {", "`etcd reports …`"),
)
"""File, a part of the text in it, and the text of the page."""


@pytest.mark.parametrize(("file", "text", "shown"), TEXTS)
def test_the_page_has_the_texts_of_the_code(file: str, text: str, shown: str) -> None:
    assert text in (SOURCES / file).read_text(encoding="utf-8"), "the text changed: change the page as well"
    assert shown in PAGE


def test_every_part_that_reports_is_on_the_page() -> None:
    node = (SOURCES / "node" / "node.py").read_text(encoding="utf-8")
    parts = sorted(set(re.findall(r'health\.add_problem\("([^"]+)"', node)))
    assert parts == ["cluster", "mqtt sessions", "statestore", "tube"]
    for part in parts:
        assert f"`{part}: …" in PAGE
    assert sorted(re.findall(r'health\.add_warnings?\((f?"[^"]+")', node)) == [
        '"audit"',
        '"bridges"',
        '"capture"',
        '"clock"',
        '"cluster"',
        '"disk"',
        '"mqtt"',
        '"security"',
        '"telemetry"',
        '"tracing"',
        '"tube"',
        'f"rule {rule.label}"',
    ], "a new warning belongs into TEXTS and on the page"
    security = (SOURCES / "node" / "security.py").read_text(encoding="utf-8")
    told = security.partition("def warnings(self)")[2].partition("def ")[0]
    assert re.findall(r'yield "(\w+)"', told) == ["reload_failed", "restart_needed", "certificate_expires"]
