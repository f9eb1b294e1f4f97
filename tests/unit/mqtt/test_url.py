"""URLs of MQTT servers."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.mqtt.url import parse_url


def test_urls() -> None:
    assert parse_url("mqtt://127.0.0.1:1884") == ("127.0.0.1", 1884)
    assert parse_url("mqtt://host") == ("host", 1883)
    assert parse_url("mqtt://[::1]:9/") == ("::1", 9)
    for bad in ("mqtts://h", "h:1883", "mqtt://", "mqtt://h:x", "mqtt://h:99999", "mqtt://h/path", "mqtt://u:p@h"):
        with pytest.raises(ConfigError):
            parse_url(bad)
