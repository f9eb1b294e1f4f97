"""Arguments of clients: accepted, or refused with the accepted values."""

from __future__ import annotations

import ssl
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, LocalProtocolError
from penstock.tube.client.arguments import (
    check_login,
    check_offsets,
    check_seconds,
    check_topic,
    check_whole,
    parse_masters,
)
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer


def test_numbers() -> None:
    check_seconds(heartbeat_s=0.01, retry_s=np.float32(1), idle_s=600)
    check_whole(1, 9, few=1, many=np.int64(9))
    for value in (0, -1, float("nan"), "5", None, True):
        with pytest.raises(ConfigError, match=r"tube: idle_s: got .*") as caught:
            check_seconds(retry_s=1, idle_s=value)
        assert caught.value.hint == "set a number of seconds above 0"
    for whole in (0, 10_000, 1.5, "5", None, False):
        with pytest.raises(ConfigError, match=r"tube: batch_bytes: got .*") as caught:
            check_whole(1, 9_999, batch_bytes=whole)
        assert caught.value.hint == "set a whole number from 1 to 9,999"


def test_login() -> None:
    check_login(None, None, None)
    check_login("edge", "secret", ssl.create_default_context())
    wrong: list[tuple[object, object, object]] = [
        ("edge", None, None), (None, "secret", None), ("edge", b"secret", None), (1, "secret", None),
        (None, None, True), (None, None, "ca.pem"),
    ]  # fmt: skip
    for given in wrong:
        with pytest.raises(ConfigError) as caught:
            check_login(*given)
        assert "secret" not in str(caught.value)


def test_topics() -> None:
    check_topic("line3")
    for name in ("", "3", "a:b", "a" * 65, None, 3, b"line3"):
        with pytest.raises(LocalProtocolError, match="is not a valid topic name"):
            check_topic(name)


def test_offsets() -> None:
    check_offsets("start_offsets", [0, 2800, np.int64(28)])
    wrong: list[Any] = [-28, 1, 2.0, "28", None]
    for offset in wrong:
        with pytest.raises(ConfigError, match=r"start_offsets: .* is not an index offset"):
            check_offsets("start_offsets", [28, offset])


MASTER = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_in_flight", 0), ("max_in_flight_bytes", 0), ("batch_messages", 8193), ("batch_bytes", "1"),
        ("request_timeout_s", 0), ("delivery_timeout_s", -1), ("topic_timeout_s", None), ("heartbeat_s", 0),
        ("retry_s", -0.1), ("idle_s", "1"), ("username", "edge"), ("tls", True),
    ],
)  # fmt: skip
def test_a_producer_is_not_made_with_what_it_could_not_work_with(option: str, value: object) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError) as caught:
        Producer(MASTER, **given)
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("heartbeat_s", 0), ("request_timeout_s", 0), ("most_wait_ms", -1), ("long_poll_ms", 0.5),
        ("source_count", -1), ("start_offsets", {"1:line3:0": 5}), ("username", "edge"), ("tls", "ca.pem"),
        ("start", "now"), ("balance", "none"),
    ],
)  # fmt: skip
def test_a_consumer_is_not_made_with_what_it_could_not_work_with(option: str, value: object) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError) as caught:
        Consumer(MASTER, "lake", ["line3"], **given)
    assert caught.value.option == option


def test_masters_may_have_the_scheme_that_status_prints() -> None:
    assert parse_masters("tubemq://127.0.0.1:8715, h:1") == [("127.0.0.1", 8715), ("h", 1)]


@pytest.mark.parametrize("masters", ["", "h", "h:0", "h:70000", None, 8715, [], ["h:1"], [("h", "1")], [("h", 0)]])
def test_masters(masters: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Producer(masters)
    assert caught.value.option == "masters"


@pytest.mark.parametrize(("group", "topics"), [("", ["t1"]), (None, ["t1"]), ("a@b", ["t1"]), ("gg", []), ("gg", [3])])
def test_groups_and_topics(group: Any, topics: Any) -> None:
    with pytest.raises(LocalProtocolError, match=r"is not a valid|needs a topic"):
        Consumer(MASTER, group, topics)
