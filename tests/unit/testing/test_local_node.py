"""The node for tests of applications: start, data that stays, and the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import LocalProtocolError
from penstock.statestore.blocking import Client
from penstock.statestore.errors import QuotaExceededError
from penstock.testing import LocalNode


def test_a_node_of_its_own_directory_goes_with_it() -> None:
    with LocalNode() as node:
        store = node.client("a")
        store.set("k", "v")
        assert (node.host, node.keys, node.url) == ("127.0.0.1", 1, f"mqtt://127.0.0.1:{node.port}")
        assert node.environment["AIO_BROKER_TCP_PORT"] == str(node.port)
        with pytest.raises(LocalProtocolError, match="is already running"):
            node.start()
        own = Path(node._own.name) if node._own is not None else Path()
        assert own.is_dir()
    assert not own.exists()
    with pytest.raises(LocalProtocolError, match="not open"):
        store.get("k")


def test_data_and_port_stay_over_a_restart(tmp_path: Path) -> None:
    with LocalNode(tmp_path, durability="durable") as node:
        port = node.port
        store = node.client()
        store.set("k", "v")
        with store.observe("k") as changes:
            assert node.observations == 1
            node.restart()
            assert node.port == port
            store.set("k", "w")
            assert next(changes).value == b"w"


def test_options_reach_the_store(tmp_path: Path) -> None:
    now = [1_000_000]
    with LocalNode(tmp_path, max_keys=1, clock=lambda: now[0]) as node, Client(node.url, server_clock=True) as store:
        store.set("k", "v", ttl_ms=5_000)
        with pytest.raises(QuotaExceededError):
            store.set("other", "v")
        now[0] += 5_000
        assert store.get("k") is not None  # a key lives for at least its time to live
        now[0] += 1
        assert store.get("k") is None


def test_an_observer_is_notified_once_the_clock_of_the_test_has_moved(tmp_path: Path) -> None:
    now = [1_000_000]
    with LocalNode(tmp_path, clock=lambda: now[0]) as node, node.client().observe("k") as changes:
        node.client("writer").set("k", "v", ttl_ms=3_600_000)
        assert next(changes).value == b"v"
        assert changes.next(timeout_s=0.05) is None
        now[0] += 3_600_001
        expired = changes.next(timeout_s=60)
        assert expired is not None
        assert expired.operation == "DELETE"
        assert expired.version is not None
        assert expired.version.wall_ms == now[0]


def test_a_node_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "statestore").write_text("a file")
    node = LocalNode(tmp_path)
    with pytest.raises(Exception, match="statestore"):
        node.start()
    node.close()
