"""Other people's clients over TLS and WebSocket: mosquitto_pub with a client certificate, paho as a browser does it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from penstock.mqtt.listener_access import AuthenticatedClient
from penstock.mqtt.server import MqttServer
from penstock.node.config.node import NodeConfig
from penstock.node.security import NodeSecurity
from penstock.security.passwords import edit_passwords, make_credential
from tests.certificates import Authority
from tests.interop.test_mosquitto import run

DEADLINE_S = 60
POLICY = """
rules:
  - principals: {certificates: ["press-7"]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["plant/{user}/#"]}]
  - principals: {clientIds: ["page"]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["page"]}, {method: Subscribe, topics: ["page"]}]
"""


class Setup:
    """A node's MQTT side with a listener of each kind."""

    def __init__(self, security: NodeSecurity, authority: Authority, ports: dict[str, int]) -> None:
        self.server: MqttServer = security.server
        self.authority = authority
        self.ports = ports


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", "127.0.0.1", "localhost")
    authority.issue("press-7")
    policies = tmp_path / "policies.yaml"
    policies.write_text(POLICY)
    tls = {"certificate": str(certificate), "key": str(key)}
    free = "127.0.0.1:0"
    listeners = {
        "secure": {"bind": free, "transport": "tls", "tls": {**tls, "client_ca": str(authority.file)}},
        "web": {"bind": free, "transport": "ws"},
        "secure-web": {"bind": free, "transport": "wss", "tls": tls},
    }
    config = {"mqtt": {"bind": free, "listeners": listeners}, "security": {"policies": str(policies)}}
    security = NodeSecurity(NodeConfig.model_validate(config))
    ports = {name: (await security.server.listen(security.settings(name)))[1] for name in security.listeners}
    yield Setup(security, authority, ports)
    await security.server.close()
    security.close()


async def test_mosquitto_pub_with_a_client_certificate(setup: Setup) -> None:
    directory = setup.authority.directory
    where = ["-V", "5", "-h", "127.0.0.1", "-p", str(setup.ports["secure"]), "--cafile", str(setup.authority.file)]
    mine = ["--cert", str(directory / "press-7.pem"), "--key", str(directory / "press-7.key")]
    code, _, err = await run("mosquitto_pub", *where, *mine, "-q", "1", "-t", "plant/press-7/x", "-m", "48.5")
    assert (code, err) == (0, "")
    _, _, err = await run("mosquitto_pub", *where, *mine, "-q", "1", "-t", "plant/press-8/x", "-m", "48.5")
    assert "Not authorized" in err
    code, _, _ = await run("mosquitto_pub", *where, "-q", "1", "-t", "plant/press-7/x", "-m", "48.5")
    assert code != 0, "without a certificate there is no connection"
    code, _, _ = await run(
        "mosquitto_pub", "-V", "311", *where[2:], *mine, "-q", "2", "-t", "plant/press-7/x", "-m", "1"
    )
    assert code == 0
    async with asyncio.timeout(DEADLINE_S):
        while setup.server.connection_limiter.connections:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("version", "alert"), [("-tls1_2", "alert handshake failure"), ("-tls1_3", "alert certificate required")]
)
async def test_openssl_s_client_receives_the_certificate_required_alert(setup: Setup, version: str, alert: str) -> None:
    where = ["-connect", f"127.0.0.1:{setup.ports['secure']}", "-CAfile", str(setup.authority.file)]
    _, _, err = await run("openssl", "s_client", *where, version, "-ign_eof")
    assert alert in err


@pytest.mark.parametrize("version", ["5", "311"])
async def test_mosquitto_pub_with_a_password(tmp_path: Path, version: str) -> None:
    passwords = tmp_path / "passwords"
    edit_passwords(passwords, lambda _: {"ann": make_credential("ann", b"secret")})
    config = {"mqtt": {"bind": "127.0.0.1:0"}, "security": {"passwords": str(passwords)}}
    security = NodeSecurity(NodeConfig.model_validate(config))
    _, port = await security.server.listen(security.settings("mqtt"))
    pub = ("mosquitto_pub", "-V", version, "-h", "127.0.0.1", "-p", str(port), "-q", "1", "-t", "a", "-m", "x")
    assert (await run(*pub, "-u", "ann", "-P", "secret"))[0] == 0
    code, _, err = await run(*pub, "-u", "ann", "-P", "wrong")
    assert code != 0
    assert "bad user" in err.lower(), err
    code, _, err = await run(*pub)
    assert code != 0
    assert "not authori" in err.lower(), err
    await security.server.close()
    security.close()


@pytest.mark.parametrize("listener", ["web", "secure-web"])
@pytest.mark.parametrize("version", [MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311])
async def test_paho_over_websocket(setup: Setup, listener: str, version: MQTTProtocolVersion) -> None:
    """As a page does it: connect, subscribe, publish to itself, in frames."""
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="page", transport="websockets", protocol=version)
    client.ws_set_options(path="/mqtt")
    if listener == "secure-web":
        client.tls_set(ca_certs=str(setup.authority.file))
    got: list[bytes] = []
    done = threading.Event()

    def connected(client: paho.Client, *_: object) -> None:
        client.subscribe("page", qos=2)

    def subscribed(client: paho.Client, *_: object) -> None:
        for payload in (b"small", bytes(300_000), b""):
            client.publish("page", payload, qos=2)

    def message(_client: paho.Client, _userdata: object, message: paho.MQTTMessage) -> None:
        got.append(bytes(message.payload))
        if len(got) == 3:
            done.set()

    client.on_connect = connected
    client.on_subscribe = subscribed
    client.on_message = message
    await asyncio.to_thread(client.connect, "127.0.0.1", setup.ports[listener])
    client.loop_start()
    assert await asyncio.to_thread(done.wait, DEADLINE_S)
    (link,) = setup.server._links.values()
    assert link.connection is not None
    assert link.connection.session is not None
    assert link.connection.session.rights is not None
    assert isinstance(link.connection.session.rights.principal, AuthenticatedClient)
    assert [len(payload) for payload in got] == [5, 300_000, 0]
    client.disconnect()
    await asyncio.to_thread(client.loop_stop)
