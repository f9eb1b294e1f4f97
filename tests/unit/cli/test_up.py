"""`penstock up`: what reaches the configuration, and what a ready node prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.node import process as run
from penstock.node.config.node import OPTIONS, NodeConfig
from penstock.node.node import ReadyNode
from penstock.runtime.io.network import Address
from tests.unit.cli.conftest import Command

READY = ReadyNode("0.1.0", 7, "/d\x1b", "durable", "a:1", "b:2", "c:3", "d:4", "e:5")
DEFAULTS = ReadyNode("0.1.0", 7, "/d", "durable", "127.0.0.1:1883", "127.0.0.1:8715", "c:3", "d:4", "127.0.0.1:8080")


class Node:
    def __init__(self) -> None:
        self.config = NodeConfig()
        self.ready = READY

    def run(
        self, config: NodeConfig, *, on_ready: Callable[[ReadyNode], None], read_again: Callable[[], NodeConfig]
    ) -> None:
        self.config = config
        assert read_again() == config, "a reload without changes changes nothing"
        on_ready(self.ready)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    node = Node()
    monkeypatch.setattr(run, "run_node", node.run)
    monkeypatch.chdir(tmp_path)
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    return node


def test_every_option_of_the_configuration_is_a_flag(node: Node, penstock: Command) -> None:
    help_text = penstock("up", "--help").out
    for option in OPTIONS:
        assert f"--{option.flag} " in help_text
        assert option.variable in help_text.replace("\n", " ").replace("  ", "")


def test_a_flag_goes_before_its_variable_and_errors_name_the_one_in_force(
    node: Node, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MQTT", "127.0.0.1:1")
    assert penstock("up", "--http", "127.0.0.1:2", "--tube-broker-advertise", "edge:3").status == 0
    assert node.config.mqtt.bind == Address("127.0.0.1", 1)
    assert node.config.http.bind == Address("127.0.0.1", 2)
    assert node.config.tube_broker.advertise == Address("edge", 3)
    assert penstock("up", "--mqtt", "127.0.0.1:9").status == 0
    assert node.config.mqtt.bind == Address("127.0.0.1", 9)
    done = penstock("up", "--mqtt", "x")
    assert (done.status, done.out) == (2, "")
    assert "--mqtt: option 'mqtt.bind': got 'x'" in done.err
    monkeypatch.setenv("PENSTOCK_MQTT", "y")
    assert "PENSTOCK_MQTT: option 'mqtt.bind': got 'y'" in penstock("up").err


def test_the_file_is_the_one_here_or_the_one_named(node: Node, penstock: Command, tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("durability: memory\n")
    other = tmp_path / "other.yaml"
    other.write_text("durability: flushed\n")
    assert penstock("up").status == 0
    assert node.config.durability == "memory"
    assert penstock("up", "--config", str(other)).status == 0
    assert node.config.durability == "flushed"
    assert penstock("up", "--config", "absent.yaml").status == 2


def test_the_ready_line(node: Node, penstock: Command) -> None:
    done = penstock("up", "--json")
    assert done.out.count("\n") == 1
    assert json.loads(done.out) == {
        "event": "ready",
        "version": "0.1.0",
        "pid": 7,
        "data_dir": "/d\x1b",
        "durability": "durable",
        "mqtt": "a:1",
        "tube_master": "b:2",
        "tube_broker": "c:3",
        "tube_broker_http": "d:4",
        "http": "e:5",
        "listeners": {},
    }


def test_the_banner_lists_addresses_and_example_commands(node: Node, penstock: Command) -> None:
    out = penstock("up").out
    for text in (
        "penstock 0.1.0 is ready",
        "/d\\x1b",
        "durable",
        "mqtt://a:1",
        "b:2",
        "c:3",
        "d:4",
        "http://e:5/readyz",
    ):
        assert text in out
    assert "penstock kv set --broker mqtt://a:1 greeting hello" in out
    assert "penstock tube produce --tube-master b:2 events hello" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 80
    node.ready = DEFAULTS
    out = penstock("up").out
    assert "  penstock kv set greeting hello\n" in out
    assert "  penstock tube topic create events\n" in out
    assert "Try in another terminal:\n" in out
    assert "penstock aio" not in out
    node.ready = replace(DEFAULTS, http_url="https://console.plant.example/")
    assert "  console         https://console.plant.example/\n" in penstock("up").out
    node.ready = replace(DEFAULTS, listeners={"mqtt": "mqtt://a:1", "aio": "mqtts://a:2"})
    assert "  penstock aio env --data-dir /d --client-id my-app " in penstock("up").out
    node.ready = replace(DEFAULTS, listeners={"mqtt": "mqtts://a:1"}, http_tls=True)
    out = penstock("up").out
    assert "(in a terminal: penstock status or top, with --ca-file FILE)\n" in out
    assert "  penstock kv set --broker mqtts://a:1 --ca-file FILE greeting hello\n" in out
    assert "  penstock tube topic create --http https://127.0.0.1:8080 --ca-file FILE events\n" in out
    assert "  penstock tube consume events\n" in out
    assert max(map(len, out.splitlines())) <= 80
    assert (
        "Try in another terminal (add --username NAME --password-file FILE):\n"
        in penstock("up", "--passwords", "users").out
    )
