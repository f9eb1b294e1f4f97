"""`penstock kv` against a real node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.nodes import RunningNode


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with RunningNode(tmp_path_factory.mktemp("node")) as node:
        yield node


def test_set_get_del(node: RunningNode) -> None:
    version = node.out("kv", "set", "line-3/limit", "42").strip()
    assert node.out("kv", "get", "line-3/limit") == "42"
    assert node.rows("kv", "get", "line-3/limit") == [
        {"key": "line-3/limit", "found": True, "value": "42", "version": version}
    ]
    assert node.penstock("kv", "set", "line-3/limit", "43", "--nx").returncode == 1
    assert node.out("kv", "get", "line-3/limit") == "42"
    assert node.penstock("kv", "del", "line-3/limit").returncode == 0
    gone = node.penstock("kv", "get", "line-3/limit")
    assert (gone.returncode, gone.stdout) == (1, b"")
    assert node.penstock("kv", "del", "line-3/limit").returncode == 1


def test_values_are_bytes(node: RunningNode, tmp_path: Path) -> None:
    value = bytes(range(256)) * 40
    (tmp_path / "value").write_bytes(value)
    assert node.penstock("kv", "set", "from-file", "--file", str(tmp_path / "value")).returncode == 0
    assert node.penstock("kv", "set", "from-stdin", stdin=value).returncode == 0
    assert node.penstock("kv", "get", "from-file").stdout == value
    assert node.penstock("kv", "get", "from-stdin").stdout == value


def test_a_fencing_token_protects_a_key(node: RunningNode) -> None:
    token = node.out("kv", "set", "lock", "holder-1").strip()
    newer = node.out("kv", "set", "lock", "holder-2").strip()
    assert node.penstock("kv", "set", "guarded", "b", "--fencing-token", newer).returncode == 0
    refused = node.penstock("kv", "set", "guarded", "a", "--fencing-token", token)
    assert refused.returncode == 1
    assert b"fencing token" in refused.stderr
    assert node.penstock("kv", "set", "guarded", "c").returncode == 1
    assert node.out("kv", "get", "guarded") == "b"


def test_watch_prints_changes_as_they_happen(node: RunningNode) -> None:
    with node.running("kv", "watch", "seen", "--json", said="watching 'seen'") as lines:
        first = node.rows("kv", "set", "seen", "1")[0]["version"]
        assert json.loads(next(lines)) == {
            "key": "seen",
            "operation": "SET",
            "value": "1",
            "version": first,
            "missed": False,
        }
        node.out("kv", "set", "seen", "2", "--ttl", "300ms")
        assert json.loads(next(lines))["value"] == "2"
        expired = json.loads(next(lines))
        assert (expired["operation"], expired["value"]) == ("DELETE", None)
        assert expired["version"] > first


def test_a_watch_survives_a_restart_of_the_node(tmp_path: Path) -> None:
    with RunningNode(tmp_path) as node, node.running("kv", "watch", "seen", "--json", said="watching") as lines:
        node.out("kv", "set", "seen", "before")
        assert json.loads(next(lines))["value"] == "before"
        node.kill()
        node.start()
        node.out("kv", "set", "seen", "after")
        assert json.loads(next(lines))["value"] == "after"


def test_an_unreachable_broker_is_exit_status_1(node: RunningNode) -> None:
    done = node.penstock("kv", "get", "x", "--broker", "mqtt://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"127.0.0.1:1" in done.stderr
    assert b"Traceback" not in done.stderr
    assert node.penstock("kv", "get", "x", "--broker", "http://127.0.0.1").returncode == 2
