"""`penstock tube broker`: arguments to settings, and the line that says it is ready."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.node import broker as node_broker
from penstock.node.broker import BrokerSettings, ReadyBroker
from penstock.runtime.addresses import Address
from penstock.runtime.durability import Durability
from tests.unit.cli.conftest import Command


def test_arguments(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BrokerSettings] = []

    def run(settings: BrokerSettings, *, log_level: str, on_ready: Callable[[ReadyBroker], None]) -> None:
        given.append(settings)
        assert log_level == "info"
        on_ready(ReadyBroker(2, "127.0.0.1:8124", "127.0.0.1:8082", "b2", "memory"))

    monkeypatch.setattr(node_broker, "run_broker", run)
    args = ["--broker-id", "2", "--tube-master", "a:1,b:2", "--durability", "memory", "--data-dir", "b2"]
    done = penstock("tube", "broker", *args, "--json")
    assert json.loads(done.out)["tube_broker"] == "127.0.0.1:8124"
    zero = Address("127.0.0.1", 0)
    assert given == [
        BrokerSettings(2, [Address("a", 1), Address("b", 2)], Path("b2"), zero, zero, None, Durability.MEMORY)
    ]
    assert penstock("tube", "broker", *args).out.startswith("broker 2 is ready\n")


def test_users(penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[BrokerSettings] = []
    monkeypatch.setattr(node_broker, "run_broker", lambda settings, **_: given.append(settings))
    (tmp_path / "password").write_text("secret\n", encoding="utf-8")
    args = ["--broker-id", "2", "--users", "users", "--username", "b2"]
    assert penstock("tube", "broker", *args, "--password-file", str(tmp_path / "password")).status == 0
    assert (given[0].users, given[0].user) == (Path("users"), ("b2", "secret"))
    assert penstock("tube", "broker", *args).status == 2
    assert len(given) == 1


@pytest.mark.parametrize(
    "wrong", [["--durability", "never"], ["--log-level", "loud"], ["--bind", "x"], ["--advertise", ":"]]
)
def test_misuse(penstock: Command, wrong: list[str]) -> None:
    done = penstock("tube", "broker", "--broker-id", "2", *wrong)
    assert done.status == 2
    assert wrong[0] in done.err
