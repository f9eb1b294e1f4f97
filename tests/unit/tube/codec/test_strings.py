"""String formats: what deployed peers were recorded to send, parsed and formatted back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.tube.codec import strings
from penstock.tube.codec.strings import (
    BrokerInfo,
    BrokerTopic,
    DefaultConfig,
    Partition,
    Subscribed,
    TopicConfig,
    TopicInfo,
    TopicMeta,
)
from tests.unit.tube.vectors import frames

DEFAULT = "1:true:true:1000:10000: :delete,168h:1:0:3:10:20000"
INHERITING = "demo: : : : : : : : :0: : : : : "

FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "brokerInfos": (BrokerInfo.parse, BrokerInfo.format),
    "brokerConfigList": (BrokerInfo.parse, BrokerInfo.format),
    "topicInfos": (TopicInfo.parse, TopicInfo.format),
    "topicMetaInfoList": (TopicMeta.parse, TopicMeta.format),
    "subscribeInfo": (Subscribed.parse, Subscribed.format),
    "partitionInfo": (Partition.parse, lambda partition: partition.full),
    "topicCondition": (strings.parse_condition, lambda pair: strings.format_condition(*pair)),
    "brokerDefaultConfInfo": (DefaultConfig.parse, DefaultConfig.format),
    "brokerTopicSetConfInfo": (TopicConfig.parse, TopicConfig.format),
}


def recorded() -> list[tuple[str, str]]:
    found = set()

    def walk(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(key, item)
        elif isinstance(value, list):
            for item in value:
                walk(name, item)
        elif isinstance(value, str) and name in FORMATS and value:
            found.add((name, value))

    for frame in frames():
        walk("", frame.row["decoded"])
    return sorted(found)


@pytest.mark.parametrize(("name", "text"), recorded())
def test_recorded_text_round_trip(name: str, text: str) -> None:
    parse, form = FORMATS[name]
    if name == "topicCondition":
        topic, filters = parse(text)
        assert parse(form((topic, filters))) == (topic, filters)
    else:
        assert form(parse(text)) == text


def test_recording_covers_the_formats() -> None:
    assert {name for name, _ in recorded()} == set(FORMATS)


def test_partition() -> None:
    partition = Partition.parse("3:10.0.0.1:8123#demo:10001")
    assert partition == Partition(BrokerInfo(3, "10.0.0.1", 8123), "demo", 10001)
    assert partition.key == "3:demo:10001"
    assert Subscribed.parse("c@g#" + partition.full) == Subscribed("c", "g", partition)


def test_default_port_is_one_blank() -> None:
    assert BrokerInfo(1, "h", 8123).format() == "1:h: "
    assert BrokerInfo(1, "h", 8124).format() == "1:h:8124"
    assert BrokerInfo.parse("1:h: ", 8124).port == 8124
    assert BrokerInfo.parse("1:h: ") == BrokerInfo.parse("1:h") == BrokerInfo(1, "h", 8123)


def test_topic_info_without_size_and_order_of_numbers() -> None:
    info = TopicInfo("demo", (BrokerTopic(1, 3, 2),), None)
    assert info.format() == "demo#1:3:2#"
    assert TopicInfo.parse("demo#1:3:2") == TopicInfo.parse("demo#1:3:2#") == info
    assert TopicMeta("demo", ((BrokerTopic(1, 3, 2), True),)).format() == "demo#1:2:3:1"


def test_condition_without_filters_is_no_filter() -> None:
    assert strings.parse_condition("demo#") == strings.parse_condition("demo") == ("demo", frozenset())
    assert strings.parse_condition("demo# b ,a") == ("demo", frozenset({"a", "b"}))


def test_bound_and_failure() -> None:
    text = "1:demo:0=280,1:demo:1=0"
    assert strings.parse_bound(text) == {"1:demo:0": 280, "1:demo:1": 0}
    assert strings.format_bound(strings.parse_bound(text)) == text
    code, partition = strings.parse_failure("412:1:h:8123#demo:0")
    assert (code, partition.full) == (412, "1:h:8123#demo:0")
    assert strings.format_failure(412, partition.full) == "412:1:h:8123#demo:0"


def test_settings() -> None:
    default = DefaultConfig.parse(DEFAULT)
    assert default == DefaultConfig()
    topic = TopicConfig.parse(INHERITING)
    assert topic == TopicConfig("demo")
    assert TopicConfig.parse(INHERITING.rpartition(":")[0]) == topic
    full = topic.with_default(default)
    assert (full.partitions, full.accept_publish, full.delete_policy) == (1, True, "delete,168h")
    assert full.max_message_bytes is None


def test_conf_check_sum_of_the_hand_made_example() -> None:
    assert strings.conf_check_sum(DEFAULT, [INHERITING]) == 735210742


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (BrokerInfo.parse, "x:h:1"),
        (BrokerInfo.parse, "1"),
        (BrokerInfo.parse, "1::1"),
        (Partition.parse, "1:h:1#demo"),
        (Partition.parse, "1:h:1"),
        (Partition.parse, "1:h:1#demo:99999999999999999999"),
        (Subscribed.parse, "c#1:h:1#demo:0"),
        (TopicInfo.parse, "demo"),
        (TopicInfo.parse, "demo#1:2"),
        (TopicMeta.parse, "demo#1:2:3"),
        (TopicMeta.parse, "#"),
        (strings.parse_condition, "#a"),
        (strings.parse_bound, "1:demo:0"),
        (strings.parse_failure, "411"),
        (DefaultConfig.parse, "1:2"),
        (DefaultConfig.parse, DEFAULT.replace("1000:", " :", 1)),
        (TopicConfig.parse, "demo:1"),
        (TopicConfig.parse, INHERITING.replace(":0:", ":x:")),
    ],
)
def test_text_that_is_not_of_the_format(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse(text)


@given(st.text(max_size=30), st.sampled_from([parse for parse, _ in FORMATS.values()]))
def test_any_text_gives_a_value_or_our_error(text: str, parse: Callable[[str], object]) -> None:
    try:
        parse(text)
    except RemoteProtocolError:
        return


@pytest.mark.parametrize(
    ("address", "value"), [("10.0.0.1", 167772161), ("192.168.0.1", -1062731775), ("::1", 0), ("1.2.3.999", 0)]
)
def test_ipv4(address: str, value: int) -> None:
    assert strings.ipv4_to_int(address) == value


def test_names_and_ids() -> None:
    assert strings.partition_ids(3, 2) == [0, 1, 2, 10000, 10001, 10002]
    assert strings.valid_topic("t1")
    assert not any(map(strings.valid_topic, ["t", "1t", "a-b", "a" * 65, "tä", "", "../t", "t/t", "t\0"]))
    assert strings.valid_group("g-1")
    assert not any(map(strings.valid_group, ["g", "1g", "g:1", "a" * 1025, "../g", "g/g", "g\n"]))
    assert strings.java_trim("\x01 a\u00a0\t") == "a\u00a0"
    assert strings.check_client_id("a-1") == "a-1"
    for bad in ("", " ", "a@b", "a#b", "a" * 1025):
        with pytest.raises(LocalProtocolError):
            strings.check_client_id(bad)
