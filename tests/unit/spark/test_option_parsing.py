from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from penstock.errors import ConfigError
from penstock.spark import option_parsing
from penstock.spark.mqtt import options as mqtt
from penstock.spark.statestore import options as store
from penstock.spark.tube import options as tube

KNOWN = {"startAt": "where to start", "limit": "how many"}
UNSUPPORTED = {"path": "leave it out", "other.start": "set startAt", "other.*": "we have none of these"}


def test_names_are_found_without_regard_to_case() -> None:
    assert option_parsing.canonical("x", {"STARTAT": "1", "limit": "2"}, KNOWN, UNSUPPORTED) == {
        "startAt": "1",
        "limit": "2",
    }


def test_a_sink_is_handed_options_of_the_stream_too() -> None:
    given = {"limit": "2", "checkpointLocation": "/c", "queryname": "q"}
    assert option_parsing.canonical("x", given, KNOWN, UNSUPPORTED, kind="sink") == {"limit": "2"}
    with pytest.raises(ConfigError, match="the x source has no option 'checkpointLocation'"):
        option_parsing.canonical("x", given, KNOWN, UNSUPPORTED)


def test_names_that_are_not_known() -> None:
    with pytest.raises(ConfigError, match=r"the x source has no option 'startt'[\s\S]*did you mean startAt\?"):
        option_parsing.canonical("x", {"startt": "1"}, KNOWN, UNSUPPORTED)
    with pytest.raises(ConfigError, match=r"path is not supported by the x source\n  hint: leave it out"):
        option_parsing.canonical("x", {"path": "1"}, KNOWN, UNSUPPORTED)
    with pytest.raises(ConfigError, match=r"other.start is not supported by the x source\n  hint: set startAt"):
        option_parsing.canonical("x", {"other.start": "1"}, KNOWN, UNSUPPORTED)
    with pytest.raises(ConfigError, match=r"Other.End is not supported by the x source\n  hint: we have none of these"):
        option_parsing.canonical("x", {"Other.End": "1"}, KNOWN, UNSUPPORTED)


@pytest.mark.parametrize("url", ["mqtt://h", "mqtts://h:1", "ws://h/path", "wss://user:secret@[::1]:1/p"])
def test_a_broker_is_a_url(url: str) -> None:
    assert option_parsing.broker_url({"x.broker": url}, "x.broker") == url


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "x.broker is not set"),
        (
            {"x.broker": "amqp://h:1883"},
            r"x.broker: broker URL 'amqp://h:1883' cannot be used[\s\S]*write HOST:PORT, mqtt://HOST",
        ),
        ({"x.broker": "mqtt://h:port"}, "x.broker: broker URL 'mqtt://h:port' cannot be read"),
        ({"x.broker": "mqtt://h/path"}, "cannot be used"),
    ],
)
def test_invalid_broker_urls_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        option_parsing.broker_url(given, "x.broker")
    assert raised.value.option == "x.broker"


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        option_parsing.broker_url({"x.broker": "http://user:secret@h"}, "x.broker")
    assert "secret" not in str(raised.value)


def test_numbers_and_booleans() -> None:
    assert option_parsing.positive("limit", " 12 ", "how many") == 12
    assert option_parsing.boolean("on", " TRUE ", "whether")
    for text in ("0", "-1", "\u0661", "1.5", ""):
        with pytest.raises(ConfigError, match="is not a number above 0"):
            option_parsing.positive("limit", text, "how many")
    with pytest.raises(ConfigError, match="neither true nor false"):
        option_parsing.boolean("on", "yes", "whether")


def test_numbers_have_an_end() -> None:
    assert option_parsing.positive("limit", "9223372036854775807", "how many") == option_parsing.MOST
    for text in ("9223372036854775808", "1" + "0" * 5_000):
        with pytest.raises(ConfigError, match="is more than 9223372036854775807"):
            option_parsing.positive("limit", text, "how many")
    with pytest.raises(ConfigError, match="'11' is more than 10"):
        option_parsing.positive("limit", "11", "how many", most=10)


@pytest.mark.parametrize(
    "table",
    [
        tube.READ_OPTIONS,
        tube.WRITE_OPTIONS,
        mqtt.READ_OPTIONS,
        mqtt.WRITE_OPTIONS,
        store.READ_OPTIONS,
        store.WRITE_OPTIONS,
    ],
)
def test_every_option_text_ends_with_its_default(table: Mapping[str, str]) -> None:
    for name, text in table.items():
        assert re.fullmatch(r"\S.* \([^()]+\)", text), name
