"""The sections ``mqtt`` and ``security``: defaults are the code's, mistakes are named, paths lie beside the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.listener_settings import ConnectionLimits
from penstock.mqtt.transport.tls import ClientCertificates
from penstock.node.config.mqtt import MqttLimits, Tls, broker_limits, network_limits
from penstock.node.config.node import NodeConfig, load_config


def test_limits_are_those_of_the_code() -> None:
    section = NodeConfig().mqtt.limits
    assert broker_limits(section) == BrokerLimits()
    assert network_limits(section) == ConnectionLimits()
    changed = NodeConfig.model_validate(
        {"mqtt": {"limits": {"max_packet_size": 5000, "queue_overflow": "drop_oldest", "max_unauthenticated": 5}}}
    ).mqtt.limits
    assert broker_limits(changed).max_packet_size == 5000
    assert broker_limits(changed).queue_overflow == "drop_oldest"
    assert network_limits(changed).max_unauthenticated == 5
    texts = {name: field.description for name, field in MqttLimits.model_fields.items()}
    assert str(texts["max_packet_size"]).startswith("Maximum Packet Size in bytes, announced in CONNACK; a larger")


def test_client_certificates_are_asked_for_where_there_is_an_authority() -> None:
    tls = {"certificate": "c", "key": "k"}
    assert Tls.model_validate(tls).files().client_certificates is ClientCertificates.NONE
    assert Tls.model_validate({**tls, "client_ca": "a"}).files().client_certificates is ClientCertificates.REQUIRE


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mqtt": {"transport": "tls"}}, "needs `tls`"),
        ({"mqtt": {"tls": {"certificate": "a", "key": "b"}}}, "add `transport: tls`"),
        ({"mqtt": {"authentication": []}}, "at least one method"),
        ({"mqtt": {"authentication": ["certificate"]}}, "needs `tls.client_ca`"),
        ({"mqtt": {"authentication": ["password"]}}, "mqtt.authentication: `password` needs `security.passwords`"),
        (
            {"mqtt": {"listeners": {"x": {"bind": "127.0.0.1:0", "authentication": ["token"]}}}},
            "mqtt.listeners.x.authentication: `token` needs `security.tokens`",
        ),
        ({"mqtt": {"authentication": ["magic"]}}, "anonymous"),
        ({"mqtt": {"path": "mqtt"}}, "begins with /"),
        ({"mqtt": {"listeners": {"mqtt": {"bind": "127.0.0.1:0"}}}}, "is reserved for the default listener"),
        ({"mqtt": {"listeners": {"x": {}}}}, "bind"),
        ({"mqtt": {"listeners": {"x": {"bind": "a:1", "advertise": "0.0.0.0:1"}}}}, "no client can connect"),
        ({"mqtt": {"limits": {"max_conections": 1}}}, "max_conections"),
        ({"mqtt": {"limits": {"max_connections": 0}}}, "max_connections"),
        ({"mqtt": {"limits": {"subscription_denied_code": 1}}}, "subscription_denied_code"),
    ],
)
def test_settings_that_cannot_be(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NodeConfig.model_validate(config)


def test_paths_of_the_file_start_at_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "penstock.yaml"
    path.parent.mkdir()
    path.write_text(
        """
mqtt:
  transport: tls
  tls: {certificate: server.pem, key: /keys/server.key}
  listeners:
    web:
      bind: 127.0.0.1:0
      transport: wss
      tls: {certificate: web.pem, key: web.key, client_ca: ../ca.pem}
security: {passwords: passwords, tokens: tokens.yaml, policies: sub/policies.yaml}
"""
    )
    config = load_config(path, {}, {})
    here = path.parent
    assert config.mqtt.tls is not None
    assert (config.mqtt.tls.certificate, config.mqtt.tls.key) == (here / "server.pem", Path("/keys/server.key"))
    web = config.mqtt.listeners["web"].tls
    assert web is not None
    assert (web.certificate, web.client_ca) == (here / "web.pem", here / "../ca.pem")
    assert config.security.passwords == here / "passwords"
    assert config.security.policies == here / "sub" / "policies.yaml"


def test_mistakes_are_shown_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text("mqtt:\n  limits:\n    max_packet_sise: 5\n")
    with pytest.raises(ConfigError, match="did you mean 'max_packet_size'") as caught:
        load_config(path, {}, {})
    assert str(caught.value).startswith(f"{path}:3:5")
