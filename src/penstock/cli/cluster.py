"""`penstock cluster`: the members of a cluster, and handover to a standby."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Commands, Json, duration_option
from penstock.cli.output import Cell, escape, note, print_json, print_reason, print_table
from penstock.errors import ConfigError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.cluster.client import EtcdClient
    from penstock.console.snapshots import ClusterSnapshot
    from penstock.node.config.cluster import ClusterSection

__all__ = ["app"]

app = Commands("Show the members of a cluster, and hand over to a standby.")

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Configuration file of a node of the cluster.",
        envvar="PENSTOCK_CONFIG",
        metavar="FILE",
        show_default="penstock.yaml",
    ),
]
_COLUMNS = ["node", "role", "lag_commits", "lag_s", "mqtt", "http", "version"]
_LOOK_S = 0.02
"""Seconds between two reads of the active node."""


@contextmanager
def _connected(config: Path | None) -> Iterator[tuple[ClusterSection, EtcdClient]]:
    from penstock.node.config.cluster import needs_cluster
    from penstock.node.config.node import load_config

    section = load_config(config, {}, os.environ).cluster
    if section is None:
        raise ConfigError(
            "the configuration has no section `cluster`",
            option="--config",
            hint="set the configuration file of a node of the cluster: --config FILE",
        )
    with needs_cluster():
        from penstock.cluster.client import EtcdClient
    client = EtcdClient(section.etcd, section.login())
    try:
        yield section, client
    finally:
        client.close()


@app.add("penstock cluster status", "penstock cluster status --config /etc/penstock/penstock.yaml --json")
def status(config: Config = None, as_json: Json = False) -> None:
    """List the members with their lag, the size of the database of etcd, and what needs attention.

    It reads etcd, so no node need run. The exit status is 1 if no node is active. --json prints one object per member.
    """
    with _connected(config) as (section, client):
        from penstock.node.cluster.state import read_cluster  # needs the extra

        state = read_cluster(section, client)
    rows: list[dict[str, Cell]] = [asdict(member) for member in state.members]
    if as_json:
        for row in rows:
            print_json(row)
    else:
        _print(state, rows)
    if state.active is None:
        raise typer.Exit(1)


def _print(state: ClusterSnapshot, rows: list[dict[str, Cell]]) -> None:
    sizes = [member.used_bytes for member in state.etcd if member.used_bytes is not None]
    size = f"{max(sizes) / (1 << 20):.1f} MiB" if sizes else "size not known"
    quota_bytes = max((member.quota_bytes or 0 for member in state.etcd), default=0)
    quota = f" of {quota_bytes >> 20} MiB" if quota_bytes else ""
    commits = ", ".join(f"{name} {count}" for name, count in state.commits.items()) or "none"
    sys.stdout.write(
        f"cluster {escape(state.name)}: "
        + ("no node is active" if state.active is None else f"{escape(state.active)} is active")
        + f"\netcd: {size}{quota}, last commits: {commits}\n"
    )
    print_table(rows, _COLUMNS, as_json=False)
    for reason in state.reasons:
        print_reason(reason)


@app.add("penstock cluster handover", "penstock cluster handover --config penstock.yaml --timeout 30s")
def handover(
    config: Config = None,
    timeout_s: Annotated[float, duration_option("--timeout", text="Time to wait for the new active node.")] = 10.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print which standby would become active.")] = False,
) -> None:
    """Hand over from the active node to a standby, and wait until the standby is active.

    The active node ends the connections of its clients, writes an entry of its audit trail and becomes a standby. It is
    refused if no standby is up to date.
    """
    with _connected(config) as (section, client):
        from penstock.node.cluster.handover import request_handover  # needs the extra
        from penstock.node.cluster.state import ActiveNode, read_cluster

        state = read_cluster(section, client)
        if state.active is None:
            raise UnavailableError("cluster: no node is active", applied=False, hint="see penstock cluster status")
        ready = [member for member in state.members if member.role == "standby" and member.ready]
        if not ready:
            raise RefusedError(
                "cluster: no standby is up to date, so nothing was changed",
                hint="start a standby and wait until its lag is small: penstock cluster status",
            )
        if dry_run:
            names = " or ".join(f"{escape(member.node)} (lag: {member.lag_commits} commits)" for member in ready)
            sys.stdout.write(f"{escape(state.active)} would hand over to {names}\n")
            return
        started = time.monotonic()
        request_handover(section, client, state.term)
        while time.monotonic() - started < timeout_s:
            active = ActiveNode.read(client, section.prefix)
            if active is not None and active.term != state.term:
                note(f"{escape(active.node)} is active after {time.monotonic() - started:.2f} s")
                return
            time.sleep(_LOOK_S)
    raise UnavailableError(
        f"cluster: no other node became active within {timeout_s:g} s",
        applied=True,
        hint="see penstock cluster status, and the logs of the nodes",
    )
