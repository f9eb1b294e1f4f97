"""MQTT addresses as URLs."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.mqtt.url import BrokerUrl, broker_url, parse_broker_url


def test_plain_urls() -> None:
    assert parse_broker_url("mqtt://127.0.0.1:1884") == BrokerUrl("mqtt", "127.0.0.1", 1884)
    assert parse_broker_url("mqtt://host") == BrokerUrl("mqtt", "host", 1883)
    assert parse_broker_url("mqtt://[::1]:9/") == BrokerUrl("mqtt", "::1", 9)
    assert parse_broker_url("host:1884") == parse_broker_url("mqtt://host:1884")
    assert parse_broker_url("[::1]:9") == parse_broker_url("mqtt://[::1]:9")
    for bad in (
        "",
        "u:p@host",
        "host:x",
        "host/path",
        "http://host",
        "mqtt://",
        "mqtt:/host",
        "mqtt://host:x",
        "mqtt://host/path",
    ):
        with pytest.raises(ConfigError):
            parse_broker_url(bad)


def test_every_transport() -> None:
    assert parse_broker_url("mqtts://h") == BrokerUrl("mqtts", "h", 8883)
    assert parse_broker_url("ws://h/mqtt?x=1") == BrokerUrl("ws", "h", 80, "/mqtt?x=1")
    assert parse_broker_url("wss://h:1") == BrokerUrl("wss", "h", 1, "/")
    given = parse_broker_url("mqtts://us%40er:p%3Aw@[::1]:9")
    assert given == BrokerUrl("mqtts", "::1", 9, "", "us@er", "p:w")
    assert [str(parse_broker_url(u)) for u in ("mqtt://h", "mqtts://u:p@h", "ws://[::1]/m")] == [
        "h:1883",
        "mqtts://h:8883",
        "ws://[::1]:80/m",
    ]


@pytest.mark.parametrize(
    "bad", ["u:secret@h:x", "mqtt://u:secret@h/path", "mqtt://u:secret@h:x", "ftp://u:secret@h", "ws://u:secret@#"]
)
def test_passwords_are_not_shown(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker_url(bad)
    assert "secret" not in str(caught.value)


def test_a_name_or_a_url_leads_to_a_server() -> None:
    assert broker_url("h", None, tls=False) == parse_broker_url("mqtt://h")
    assert broker_url("h", 7, tls=True) == parse_broker_url("mqtts://h:7")
    assert broker_url("h", None, tls=True).port == 8883
    assert broker_url("wss://h/x", None, tls=True) == parse_broker_url("wss://h/x")
    for host, port, tls, option in (
        ("mqtt://h", 7, False, "port"),
        ("mqtt://h", None, True, "tls"),
        ("a..b", None, False, "broker"),
        ("mqtt://a..b", None, False, "broker"),
    ):
        with pytest.raises(ConfigError) as caught:
            broker_url(host, port, tls=tls)
        assert caught.value.option == option
    assert broker_url("127.0.0.1:1884", None, tls=False) == parse_broker_url("mqtt://127.0.0.1:1884")
    assert broker_url("[::1]:1884", None, tls=True) == parse_broker_url("mqtts://[::1]:1884")


@pytest.mark.parametrize("url", [None, 1883])
def test_a_url_is_text(url: Any) -> None:
    with pytest.raises(ConfigError, match=f"broker URL {url} is not text"):
        parse_broker_url(url)


@pytest.mark.parametrize("url", ["mqtt://host:x", "mqtt://host:99999"])
def test_an_invalid_port_is_explained_in_our_words(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker_url(url)
    assert caught.value.why == "the port is not a number from 0 to 65535"
