"""Keys of a cluster in etcd besides its logs: active node, reports of members; and the cluster as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from penstock.cluster.client import EtcdClient, EtcdStatus, EtcdUnavailableError
from penstock.cluster.log import LogKeys, clock_key, leader_key, read_head
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.console.cluster import cluster_reasons
from penstock.console.snapshots import ClusterMember, ClusterSnapshot, EtcdSnapshot
from penstock.errors import PenstockError
from penstock.node.config.cluster import ClusterSection

__all__ = [
    "LOGS",
    "MOST_LAG",
    "ActiveNode",
    "decode_object",
    "etcd_snapshot",
    "logs_of",
    "member_key",
    "members_of",
    "read_cluster",
    "read_reports",
    "snapshot_key",
]

LOGS: Final = {"statestore": "statestore", "mqtt": "mqtt", "tube-master": "tube/master"}
"""The logs by name, with the directories of their environments below the data directory."""
MOST_LAG: Final = 1000
"""Commits that a standby may lack at a handover."""


class ActiveNode(NamedTuple):
    """The active node, as its leadership key describes it. ``mqtt``: advertised addresses of its MQTT listeners;
    ``tube_master``: that of its TubeMQ master, "" without TubeMQ. ``url``: that of its console behind a proxy, or
    ""."""

    node: str
    http: str
    mqtt: Mapping[str, str]
    term: int
    tube_master: str = ""
    url: str = ""

    @classmethod
    def read(cls, client: EtcdClient, prefix: str) -> ActiveNode | None:
        """Read the leadership key; None if no node is active. Raises UnavailableError, RefusedError."""
        answer = client.call("KV/Range", pb.RangeRequest(key=leader_key(prefix)), pb.RangeResponse, within_s=1.0)
        if not answer.kvs:
            return None
        described = decode_object(answer.kvs[0].value)
        mqtt = described.get("mqtt")
        return cls(
            str(described.get("node", "?")),
            str(described.get("http", "")),
            {str(name): str(address) for name, address in mqtt.items()} if isinstance(mqtt, dict) else {},
            answer.kvs[0].mod_revision,
            str(described.get("tube_master", "")),
            str(described.get("url", "")),
        )


def read_cluster(section: ClusterSection, client: EtcdClient, commit_wait_s: float | None = None) -> ClusterSnapshot:
    """Read the state of a cluster from etcd; blocks. Raises UnavailableError, RefusedError."""
    prefix = section.prefix
    active = ActiveNode.read(client, prefix)
    heads = {name: read_head(client, LogKeys(prefix, name)) for name in logs_of(section)}
    commits = {name: head.sequence for name, head in heads.items() if head is not None}
    clock = client.call("KV/Range", pb.RangeRequest(key=clock_key(prefix)), pb.RangeResponse).kvs
    now_ms = int(decode_object(clock[0].value).get("time_ms", 0)) if clock else 0
    state = ClusterSnapshot(
        name=section.name,
        active=None if active is None else active.node,
        term=0 if active is None else active.term,
        members=members_of(read_reports(client, prefix), None if active is None else active.node, commits, now_ms),
        commits=commits,
        etcd=tuple(
            etcd_snapshot(endpoint, status)
            for endpoint, status in zip(client.endpoints, client.statuses(), strict=True)
        ),
        commit_wait_s=commit_wait_s,
    )
    return replace(state, reasons=cluster_reasons(state))


def logs_of(section: ClusterSection) -> list[str]:
    """Return the names of the logs of a cluster. Without TubeMQ no member applies that of a master, if one was left."""
    return [name for name in LOGS if section.tubemq or name != "tube-master"]


def members_of(
    reports: Sequence[Mapping[str, Any]], active: str | None, commits: Mapping[str, int], now_ms: int
) -> tuple[ClusterMember, ...]:
    """Return the members that sent ``reports``.

    ``active``: name of the active node; ``commits``: last commit of each log; ``now_ms``: time of the cluster's clock.
    """
    wanted = next((_checksums(each) for each in reports if each.get("node") == active), {})
    return tuple(_member(report, active, commits, now_ms, wanted) for report in reports)


def _checksums(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the checksums of settings in a report; empty of an earlier version."""
    found = report.get("settings")
    return found if isinstance(found, dict) else {}


def _member(
    report: Mapping[str, Any],
    active: str | None,
    commits: Mapping[str, int],
    now_ms: int,
    settings: Mapping[str, Any],
) -> ClusterMember:
    """Return the member that sent a report. ``settings``: checksums of the active node."""
    node = str(report.get("node", "?"))
    leads = active == node
    applied, problem = report.get("applied") or {}, report.get("problem")
    lag: int | None = 0 if leads else None
    lag_s: float | None = 0.0 if leads else None
    if not leads and applied:
        lag = sum(max(0, sequence - int(applied.get(name, 0))) for name, sequence in commits.items())
        lag_s = max(0, now_ms - int(report.get("seen_ms", 0))) / 1000 if lag else 0.0
    return ClusterMember(
        node=node,
        role="active" if leads else "standby" if problem is None else "loading" if report.get("loading") else "blocked",
        ready=leads or (problem is None and lag is not None and lag <= MOST_LAG),
        version=str(report.get("version", "?")),
        mqtt=str(report.get("mqtt", "")),
        http=str(report.get("http", "")),
        lag_commits=lag,
        lag_s=lag_s,
        problem=None if problem is None or leads else str(problem),
        differs=tuple(sorted(name for name, found in _checksums(report).items() if settings.get(name, found) != found)),
    )


def etcd_snapshot(endpoint: str, status: EtcdStatus | PenstockError) -> EtcdSnapshot:
    """Return the member at ``endpoint`` with its status, or the error that prevented it."""
    if isinstance(status, PenstockError):
        hint = status.member_hint if isinstance(status, EtcdUnavailableError) else status.hint
        return EtcdSnapshot(endpoint, problem=status.why or status.what, hint=hint)
    return EtcdSnapshot(
        endpoint, status.version, status.leads, status.used_bytes, status.quota_bytes or None, status.errors
    )


def read_reports(client: EtcdClient, prefix: str) -> list[dict[str, Any]]:
    """Read the reports of the members. Raises UnavailableError, RefusedError."""
    first = member_key(prefix, "")
    entries = client.call("KV/Range", pb.RangeRequest(key=first, range_end=first[:-1] + b"0"), pb.RangeResponse).kvs
    return [decode_object(entry.value) for entry in entries]


def snapshot_key(prefix: str) -> bytes:
    """Key of the credential for a snapshot of the active node."""
    return f"{prefix}snapshot".encode()


def member_key(prefix: str, node: str) -> bytes:
    """Key of the report of a member."""
    return f"{prefix}node/{node}".encode()


def decode_object(value: bytes) -> dict[str, Any]:
    """Decode a JSON object of etcd; empty if it is none."""
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
