"""`penstock tube broker run`: arguments to settings, and the line that says it is ready."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import trustme

from penstock.cli.tube.broker import RetentionOptions
from penstock.node import tube_broker as node_broker
from penstock.node.config.node import BROKER_OPTIONS, Tube
from penstock.node.config.tube import TubeTls
from penstock.node.tube_broker import BrokerSettings, ReadyBroker
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import Address
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.transactions.staging import StagingLimits
from tests.unit.cli.conftest import Command


def test_arguments(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BrokerSettings] = []

    def run(settings: BrokerSettings, *, log_level: str, on_ready: Callable[[ReadyBroker], None]) -> None:
        given.append(settings)
        assert log_level == "info"
        on_ready(ReadyBroker(2, "127.0.0.1:8124", "127.0.0.1:8082", "b2", "memory"))

    monkeypatch.setattr(node_broker, "run_broker", run)
    args = ["--broker-id", "2", "--tube-master", "a:1,b:2", "--durability", "memory", "--data-dir", "b2"]
    done = penstock("tube", "broker", "run", *args, "--json")
    assert json.loads(done.out)["tube_broker"] == "127.0.0.1:8124"
    zero = Address("127.0.0.1", 0)
    assert given == [
        BrokerSettings(2, [Address("a", 1), Address("b", 2)], Path("b2"), zero, zero, None, Durability.MEMORY)
    ]
    assert penstock("tube", "broker", "run", *args).out.startswith("broker 2 is ready\n")


def test_storage_options_match_the_configuration_file(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BrokerSettings] = []
    monkeypatch.setattr(node_broker, "run_broker", lambda settings, **_: given.append(settings))
    args = ["--broker-id", "2"]
    assert penstock("tube", "broker", "run", *args).status == 0
    assert (given[0].max_store_bytes, given[0].staging) == (Tube().max_store_bytes, Tube().staging.limits)
    kept = ["--max-store-size", "1073741824", "--staging-max-size", "2097152", "--staging-keep", "90m"]
    assert penstock("tube", "broker", "run", *args, *kept).status == 0
    assert given[1].max_store_bytes == 1 << 30
    assert given[1].staging == StagingLimits(max_bytes=2 << 20, keep_ms=90 * 60_000)
    assert {field.name.replace("_", "-") for field in fields(RetentionOptions)} == {
        option.flag for option in BROKER_OPTIONS
    }


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-store-size", "5"), ("--staging-max-size", "0"), ("--staging-keep", "a while")]
)
def test_invalid_storage_options_name_their_flag(penstock: Command, flag: str, value: str) -> None:
    done = penstock("tube", "broker", "run", "--broker-id", "2", flag, value)
    assert done.status == 2
    assert flag in done.err


def test_limits_are_named_as_in_the_configuration_file(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BrokerSettings] = []
    monkeypatch.setattr(node_broker, "run_broker", lambda settings, **_: given.append(settings))
    flag = "--set-limit"
    args = ("--broker-id", "2", flag, "max_connections=500", flag, "segment_bytes=1048576")
    assert penstock("tube", "broker", "run", *args).status == 0
    assert given[0].limits == TubeLimits(max_connections=500, segment_bytes=1 << 20)
    for wrong in ("max_connections", "max_connections=0", "max_connections=many", "anything=5"):
        done = penstock("tube", "broker", "run", "--broker-id", "2", flag, wrong)
        assert done.status == 2
        assert flag in done.err


def test_single_topics_may_promise_something_else(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BrokerSettings] = []
    monkeypatch.setattr(node_broker, "run_broker", lambda settings, **_: given.append(settings))
    flag = "--topic-durability"
    done = penstock("tube", "broker", "run", "--broker-id", "2", flag, "metrics=memory", flag, "orders=durable")
    assert done.status == 0
    assert given[0].topic_durability == {"metrics": Durability.MEMORY, "orders": Durability.DURABLE}
    for wrong in ("metrics", "=memory", "a b=memory", "metrics=never"):
        done = penstock("tube", "broker", "run", "--broker-id", "2", flag, wrong)
        assert done.status == 2
        assert f"{flag}: got" in done.err


def test_users(penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[BrokerSettings] = []
    monkeypatch.setattr(node_broker, "run_broker", lambda settings, **_: given.append(settings))
    (tmp_path / "password").write_text("secret\n", encoding="utf-8")
    args = ["--broker-id", "2", "--passwords", "users", "--policies", "rules", "--username", "b2"]
    assert penstock("tube", "broker", "run", *args, "--password-file", str(tmp_path / "password")).status == 0
    assert (given[0].passwords, given[0].policies) == (Path("users"), Path("rules"))
    assert given[0].user == ("b2", "secret")
    assert penstock("tube", "broker", "run", *args).status == 2
    assert len(given) == 1


def test_tls_both_ways(penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Towards clients and towards the master."""
    given: list[BrokerSettings] = []

    def run(settings: BrokerSettings, *, log_level: str, on_ready: Callable[[ReadyBroker], None]) -> None:
        del log_level
        given.append(settings)
        on_ready(ReadyBroker(2, "127.0.0.1:8124", "127.0.0.1:8082", "b2", "memory", "127.0.0.1:9"))

    monkeypatch.setattr(node_broker, "run_broker", run)
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    args = ["--broker-id", "2", "--tls-certificate", "s.pem", "--tls-key", "s.key", "--tls-port", "9"]
    done = penstock("tube", "broker", "run", *args, "--tls-client-ca", "c.pem", "--ca-file", str(tmp_path / "ca.pem"))
    assert "TubeMQ broker   127.0.0.1:8124 (TLS 127.0.0.1:9)\n" in done.out
    (settings,) = given
    expected = TubeTls(certificate=Path("s.pem"), key=Path("s.key"), client_ca=Path("c.pem"), broker_port=9)
    assert settings.tls == expected
    assert settings.master_tls is not None
    for half in (["--tls-key", "s.key"], ["--tls-certificate", "s.pem"], ["--tls-client-ca", "c.pem"]):
        done = penstock("tube", "broker", "run", "--broker-id", "2", *half)
        assert done.status == 2
        assert "a TLS listener needs a certificate and its key" in done.err
    assert len(given) == 1


@pytest.mark.parametrize(
    "wrong",
    [["--durability", "never"], ["--log-level", "loud"], ["--tube-broker", "x"], ["--tube-broker-advertise", ":"]],
)
def test_misuse(penstock: Command, wrong: list[str]) -> None:
    done = penstock("tube", "broker", "run", "--broker-id", "2", *wrong)
    assert done.status == 2
    assert wrong[0] in done.err
