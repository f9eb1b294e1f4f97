"""`penstock status` against a running node."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.status import _advice
from penstock.console.cluster import member_reasons
from penstock.console.snapshots import Hop
from penstock.errors import StorageError
from penstock.node.config.mqtt import Security
from penstock.node.data_dir import ADDRESSES, running_node
from penstock.node.node import Node
from tests.unit.console.test_cluster import ACTIVE, STANDBY
from tests.unit.node.test_http_access import users
from tests.unit.node.test_node import config


async def run(*args: object) -> int:
    return await asyncio.to_thread(main, [str(arg) for arg in args])


async def test_a_node_is_found_by_its_data_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    node = Node(config(tmp_path))
    ready = await node.start()
    try:
        assert await run("status", "--data-dir", tmp_path) == 0
        shown = capfd.readouterr().out
        for text in (f"http://{ready.http}", "ready", "MQTT publishers", f"mqtt://{ready.mqtt}", "event loop delay"):
            assert text in shown
        assert max(map(len, shown.splitlines())) <= 80 + len(str(tmp_path))
        assert await run("status", "--http", f"https://{ready.http}") == 1
        assert "hint: use the port with TLS" in capfd.readouterr().err
        assert await run("status", "--http", ready.tube_broker_http) == 1
        assert "why: the administration of a TubeMQ broker answers there" in capfd.readouterr().err
        assert await run("status", "--http", ready.http, "--json") == 0
        found = json.loads(capfd.readouterr().out)
        assert found["node"]["pid"] == ready.pid
        failure = StorageError("the disk failed", why="input/output error", hint="replace it")
        node.health.add_problem("tube", lambda: failure)
        assert await run("status", "--data-dir", tmp_path) == 1
        shown = capfd.readouterr().out
        assert "problem tube: the disk failed\n  why: input/output error\n  hint: replace it\n" in shown
    finally:
        await node.close()
    assert running_node(tmp_path) is None
    assert not (tmp_path / ADDRESSES).exists()


async def test_without_a_node_the_error_says_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert await run("status", "--http", "127.0.0.1:1", "--data-dir", tmp_path) == 1
    error = capfd.readouterr().err
    assert "no node is reachable at http://127.0.0.1:1" in error
    assert "penstock up" in error


async def test_a_data_directory_without_a_node_does_not_select_another_node(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent"
    for command in (("status",), ("status", "--json")):
        assert await run(*command, "--data-dir", absent) == 1
        shown = capfd.readouterr()
        assert shown.out == ""
        if "--json" in command:
            error = json.loads(shown.err)["error"]
            assert (error["what"], error["why"]) == (
                f"no node runs in the data directory {absent}",
                "it does not exist",
            )
        else:
            assert f"no node runs in the data directory {absent}\n  why: it does not exist\n" in shown.err
        assert f"penstock up --data-dir {absent}" in shown.err


async def test_the_problems_of_a_cluster_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    node = Node(config(tmp_path))
    await node.start()
    members = [ACTIVE, STANDBY]
    node.health.members = lambda: member_reasons(members)
    shown = []
    try:
        for _ in range(2):
            assert await run("status", "--data-dir", tmp_path) == 0
            shown.append(capfd.readouterr().out)
            members[1:] = []
    finally:
        await node.close()
    healthy, unprotected = shown
    assert " cluster: " not in healthy
    assert "warning cluster: no standby can take over\n  why: " in unprotected


async def test_users_are_authenticated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    node = Node(config(tmp_path / "data", security=Security(passwords=users(tmp_path, "ann"))))
    ready = await node.start()
    try:
        elsewhere = tmp_path / "elsewhere"
        assert await run("status", "--http", ready.http, "--data-dir", elsewhere) == 1
        assert "--admin-token-file" in capfd.readouterr().err
        (tmp_path / "password").write_text("password of ann")
        login = ("--username", "ann", "--password-file", tmp_path / "password")
        assert await run("status", "--http", ready.http, "--data-dir", elsewhere, *login) == 0
        token = tmp_path / "data" / "tube" / "admin-token"
        assert await run("status", "--http", ready.http, "--data-dir", elsewhere, "--admin-token-file", token) == 0
    finally:
        await node.close()


def test_the_addresses_of_a_killed_node_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1\n")
    (tmp_path / ADDRESSES).write_text('{"http": "127.0.0.1:1"}')
    assert running_node(tmp_path) is None


def test_the_next_command_is_that_of_the_hop_with_a_problem() -> None:
    def advice(**changed: Any) -> list[str]:
        hop = Hop("pipelines", "Pipelines", "records", 1.0, 100, **changed)
        return _advice([hop, replace(hop, id="tables", errors=0)])

    assert advice() == advice(lag_records=5, lag_s=3.0) == []
    (errors,) = advice(errors=2)
    assert "pipelines have failed, were lost, or have dead letters: penstock pipeline status FILE" in errors
    (behind,) = advice(lag_records=5, lag_s=61.0)
    assert behind.startswith("pipelines are behind: ")
