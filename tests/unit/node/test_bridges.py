"""The section `bridges`: what it accepts, what it says, and a node whose bridge is up before its listeners."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.server import MqttServer
from penstock.node.config.bridges import BridgeEntry
from penstock.node.config.node import load_config
from penstock.node.node import Node
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.node.test_node import config, http

DEADLINE_S = 60

FILE = """
bridges:
  - name: cloud
    url: mqtts://broker.example:8883
    username: site-7
    password_file: cloud.password
    tls: {ca: ca.pem, certificate: /etc/site.pem}
    remote_status_topic: sites/7/state
    topics:
      - {filter: "line/#", remote_prefix: site-7/}
      - {filter: "#", direction: in, qos: 2, local_prefix: cloud/, remote_prefix: commands/site-7/}
"""


def test_a_whole_section(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(FILE)
    (tmp_path / "cloud.password").write_text("s3cret\n")
    (entry,) = load_config(path, {}, {}).bridges
    settings = entry.settings()
    assert (settings.name, settings.password, settings.username) == ("cloud", "s3cret", "site-7")
    assert settings.tls is not None
    assert (settings.tls.ca_file, str(settings.tls.cert_file)) == (tmp_path / "ca.pem", "/etc/site.pem")
    assert [(t.local_filter, t.remote_filter, t.qos) for t in settings.topics] == [
        ("line/#", "site-7/line/#", 1),
        ("cloud/#", "commands/site-7/#", 2),
    ]
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: a, url: 'http://h', topics: [{filter: x}]}", "write HOST:PORT, mqtt://HOST"),
        ("{name: a, url: 'mqtt://u:p@h', topics: [{filter: x}]}", "use password_file"),
        ("{name: a b, url: 'mqtt://h', topics: [{filter: x}]}", "name"),
        ("{name: a, url: 'mqtt://h', topics: []}", "topics"),
        ("{name: a, url: 'mqtt://h', topics: [{filter: 'a/#/b'}]}", "must be the whole last level"),
        ("{name: a, url: 'mqtt://h', topics: [{filter: '$share/g/a'}]}", "has no shared subscriptions"),
        ("{name: a, url: 'mqtt://h', topics: [{filter: x, local_prefix: '+/'}]}", "without wildcards"),
        ("{name: a, url: 'mqtt://h', topics: [{filter: x}], status_topic: 'a/#'}", "topic name"),
        (
            "{name: a, url: 'mqtt://h', topics: [{filter: x}]}, {name: a, url: 'mqtt://i', topics: [{filter: x}]}",
            "another",
        ),
    ],
)
def test_invalid_bridges_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(f"bridges: [{text}]\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path, {}, {})


def test_a_password_file_that_is_not_there(tmp_path: Path) -> None:
    entry = BridgeEntry.model_validate(
        {"name": "a", "url": "mqtt://h", "topics": [{"filter": "x"}], "password_file": tmp_path / "none"}
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        entry.settings()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ca": "none.pem"}, r"bridge 'cloud': tls\.ca '.*none\.pem' cannot be used"),
        ({"certificate": "site.pem"}, r"tls\.certificate '.*site\.pem' cannot be used\n.*no private key"),
        ({"certificate": "site.pem", "key": "other.key"}, r"tls\.key '.*other\.key' cannot be used\n.*not the key of"),
        ({"key": "site.key"}, "bridge 'cloud': a key without a certificate"),
    ],
)
async def test_certificate_files_are_checked_before_anything_starts(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    authority = Authority(tmp_path)
    for name in ("site", "other"):
        authority.issue(name)
    bridge = {
        "name": "cloud",
        "url": "mqtts://h",
        "topics": [{"filter": "x"}],
        "tls": {option: tmp_path / name for option, name in files.items()},
    }
    node = Node(config(tmp_path / "data", bridges=[bridge]))
    with pytest.raises(ConfigError, match=message):
        await node.start()
    await node.close()
    assert not (tmp_path / "data").exists(), "nothing was started"


async def test_a_node_with_a_bridge(tmp_path: Path) -> None:
    cloud = MqttServer()
    host, port = await cloud.start("127.0.0.1", 0)
    bridge = {
        "name": "cloud",
        "url": f"mqtt://{host}:{port}",
        "topics": [{"filter": "line/#", "remote_prefix": "site/"}],
    }
    node = Node(config(tmp_path, bridges=[bridge]))
    ready = await node.start()
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            MqttClient(host, port) as there,
            there.subscription("site/#") as messages,
            MqttClient(f"mqtt://{ready.mqtt}") as here,
        ):
            await here.publish("line/1", b"12.5")
            message = await anext(messages)
            assert (message.topic, message.payload) == ("site/line/1", b"12.5")
            async with here.subscription("$SYS/broker/bridge/cloud/state") as state:
                assert (await anext(state)).payload in {b"0", b"1"}
        _, page = await http(ready.http, "/metrics")
        assert 'penstock_bridge_sent_total{bridge="cloud"} 1.0' in page
        assert 'penstock_bridge_connected{bridge="cloud"} 1.0' in page
    finally:
        await node.close()
        await cloud.close()


async def test_messages_that_wait_for_the_remote_broker_survive_a_restart(tmp_path: Path) -> None:
    port = free_port()
    bridge = {"name": "cloud", "url": f"mqtt://127.0.0.1:{port}", "topics": [{"filter": "line/#"}]}
    node = Node(config(tmp_path, bridges=[bridge]))
    ready = await node.start()
    async with asyncio.timeout(DEADLINE_S), MqttClient(f"mqtt://{ready.mqtt}") as here:
        for n in range(20):
            assert await here.publish("line/1", str(n)) == 0
    await node.close()
    cloud = MqttServer()
    await cloud.start("127.0.0.1", port)
    async with asyncio.timeout(DEADLINE_S), MqttClient("127.0.0.1", port) as there, there.subscription("line/#") as got:
        node = Node(config(tmp_path, bridges=[bridge]))
        await node.start()
        try:
            assert [int((await anext(got)).payload) for _ in range(20)] == list(range(20))
        finally:
            await node.close()
    await cloud.close()


async def test_no_message_waits_for_a_bridge_that_was_removed(tmp_path: Path) -> None:
    bridge = {"name": "cloud", "url": f"mqtt://127.0.0.1:{free_port()}", "topics": [{"filter": "line/#"}]}
    for bridges, code in (([bridge], 0), ([], 0x10)):
        node = Node(config(tmp_path, bridges=bridges))
        ready = await node.start()
        try:
            async with asyncio.timeout(DEADLINE_S), MqttClient(f"mqtt://{ready.mqtt}") as here:
                assert await here.publish("line/1", b"1") == code
        finally:
            await node.close()
