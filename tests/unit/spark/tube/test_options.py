from __future__ import annotations

import json

import pytest

from penstock.errors import ConfigError
from penstock.spark.tube.offsets import TimeSpec
from penstock.spark.tube.options import COLUMNS, HEADERS, READ_OPTIONS, UNSUPPORTED, SourceOptions

BASE = {"tubemq.master": "127.0.0.1:8715", "subscribe": "a"}


def test_defaults() -> None:
    options = SourceOptions.parse(BASE)
    assert options == SourceOptions(masters="127.0.0.1:8715", topics=("a",), group=options.group)
    assert options.group.startswith("spark-tubemq-")
    assert options.fail_on_data_loss
    assert options.timeout_ms == 60_000
    assert options.for_batch() == ("earliest", "latest")
    assert options.for_stream() == "latest"


def test_every_option_as_spark_hands_it_over() -> None:
    options = SourceOptions.parse(
        {
            "tubemq.master": "h1:1, [::1]:8715",
            "tubemq.timeoutms": "500",
            "assign": '{"b": ["1:10000", 2], "a": ["0"]}',
            "startingoffsets": '{"a": {"0": -2}, "b": {"1:10000": 28, "2": 56}}',
            "endingoffsets": "latest",
            "maxoffsetspertrigger": " 10 ",
            "minpartitions": "4",
            "failondataloss": "False",
            "includeheaders": "TRUE",
            "tubemq.group": "lake",
        }
    )
    assert options == SourceOptions(
        masters="h1:1,[::1]:8715",
        topics=("b", "a"),
        assigned={"b": ("1:10000", "2"), "a": ("0",)},
        starting={"a": {"0": -2}, "b": {"1:10000": 28, "2": 56}},
        ending="latest",
        max_messages=10,
        min_partitions=4,
        fail_on_data_loss=False,
        timeout_ms=500,
        columns=(*COLUMNS, HEADERS),
        group="lake",
    )


def test_times_come_before_positions() -> None:
    each = '{"a": {"0": 5}}'
    given = {"startingoffsets": "latest", "startingoffsetsbytimestamp": each, "endingTimestamp": " 9 "}
    options = SourceOptions.parse(BASE | given)
    assert options.starting == TimeSpec({"a": {"0": 5}}, or_latest=False)
    assert options.ending == TimeSpec(9, or_latest=True)
    given |= {"startingTimestamp": "7", "startingOffsetsByTimestampStrategy": "Latest"}
    assert SourceOptions.parse(BASE | given).starting == TimeSpec(7, or_latest=True)


def test_topics_are_trimmed_and_not_repeated() -> None:
    assert SourceOptions.parse(BASE | {"subscribe": " a, b ,a"}).topics == ("a", "b")


@pytest.mark.parametrize(
    ("changed", "option", "words"),
    [
        ({"subscribe": None}, "subscribe", "none of subscribe, subscribePattern, assign"),
        ({"assign": '{"a": ["0"]}'}, "subscribe", "subscribe and assign are set"),
        ({"subscribe": "a,,b"}, "subscribe", "empty topic"),
        ({"subscribe": "a,line-3"}, "subscribe", "'line-3' is not a valid topic name"),
        ({"subscribe": None, "assign": '{"a.b": ["0"]}'}, "assign", "'a.b' is not a valid topic name"),
        ({"tubemq.master": None}, "tubemq.master", "not set"),
        ({"tubemq.master": "localhost"}, "tubemq.master", "'localhost' is not HOST:PORT"),
        ({"tubemq.master": "a:1,b:70000"}, "tubemq.master", "'b:70000' is not HOST:PORT"),
        ({"startingOffsets": "first"}, "startingOffsets", "neither a keyword nor JSON"),
        ({"endingOffsets": "earliest"}, "endingOffsets", "would select nothing"),
        ({"startingTimestamp": "2024-01-01"}, "startingTimestamp", "is not a time in ms"),
        ({"startingOffsetsByTimestamp": "5"}, "startingOffsetsByTimestamp", "not a JSON object with topics"),
        ({"endingOffsetsByTimestamp": '{"a": {"x": 5}}'}, "endingOffsetsByTimestamp", "'x' of topic 'a' is not a"),
        ({"endingOffsetsByTimestamp": '{"a": {"0": -2}}'}, "endingOffsetsByTimestamp", "-2 of topic 'a' partition 0"),
        ({"startingOffsetsByTimestampStrategy": "no"}, "startingOffsetsByTimestampStrategy", "neither error nor"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger", "'0' is not a number above 0"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger", "'many' is not a number above 0"),
        ({"minPartitions": "-1"}, "minPartitions", "'-1' is not a number above 0"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss", "'no' is neither true nor false"),
        ({"includeHeaders": ""}, "includeHeaders", "'' is neither true nor false"),
        ({"maxOffsetPerTrigger": "5"}, "maxOffsetPerTrigger", "did you mean maxOffsetsPerTrigger?"),
        ({"startingofsets": "latest"}, "startingofsets", "did you mean startingOffsets?"),
        ({"tubemq.timeout": "5"}, "tubemq.timeout", "did you mean tubemq.timeoutMs?"),
        ({"zzz": "5"}, "zzz", "Known options: tubemq.master,"),
        ({"fetchoffset.numretries": "5"}, "fetchOffset.numRetries", "not supported by the tubemq source"),
        ({"minOffsetsPerTrigger": "0"}, "minOffsetsPerTrigger", "'0' is not a number above 0"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "minOffsetsPerTrigger", "more than max"),
        (
            {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"},
            "maxTriggerDelay",
            "'soon' is not a duration",
        ),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "0s"}, "maxTriggerDelay", "'0s' is not a duration above 0"),
        ({"maxTriggerDelay": "5s"}, "maxTriggerDelay", "without minOffsetsPerTrigger"),
        ({"maxRecordsPerPartition": "none"}, "maxRecordsPerPartition", "'none' is not a number above 0"),
        ({"subscribePattern": "b.*"}, "subscribe", "subscribe and subscribePattern are set"),
        ({"subscribe": None, "subscribePattern": "b("}, "subscribePattern", "is not a regular expression"),
        ({"columns": "value,ofset"}, "columns", "'ofset' is not a column"),
        ({"columns": "value,,key"}, "columns", "empty name"),
        ({"filter": "a,"}, "filter", "empty name"),
        ({"groupIdPrefix": " "}, "groupIdPrefix", "is empty"),
        ({"tubemq.batchBytes": "0"}, "tubemq.batchBytes", "not a number above 0"),
        ({"kafka.bootstrap.servers": "h:1"}, "kafka.bootstrap.servers", "set tubemq.master"),
        ({"kafka.security.protocol": "SSL"}, "kafka.security.protocol", "remove it"),
        ({"topic": "b"}, "topic", "set subscribe"),
        ({"subscribe": "line_.*"}, "subscribe", "use subscribePattern for a pattern of names"),
    ],
)
def test_errors_name_option_value_and_remedy(changed: dict[str, str | None], option: str, words: str) -> None:
    options = {name: value for name, value in (BASE | changed).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        SourceOptions.parse(options)
    assert caught.value.option == option
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "a",
        pytest.param("[" * 100_000, id="deep"),
        '{"a": [0], "a": [1]}',
        "[]",
        "{}",
        '{"a": []}',
        '{"a": "0"}',
        '{"a": ["x"]}',
        '{"a": [true]}',
        '{"a": ["1:2:3"]}',
    ],
)
def test_assign_must_be_topics_with_partitions(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a JSON object of topics with lists of partitions"):
        SourceOptions.parse({"tubemq.master": "h:1", "assign": text})


@pytest.mark.parametrize("starting", ["latest", '{"a": {"0": -1}}'])
def test_a_batch_cannot_start_at_the_latest(starting: str) -> None:
    options = SourceOptions.parse(BASE | {"startingOffsets": starting})
    with pytest.raises(ConfigError, match="a batch cannot start at latest"):
        options.for_batch()
    assert options.for_stream()


def test_a_stream_ends_at_positions_only() -> None:
    ending = {"a": {"1:0": 28}}
    options = SourceOptions.parse(BASE | {"endingOffsets": json.dumps(ending)})
    assert (options.for_stream(), options.stop_offsets()) == ("latest", ending)
    assert SourceOptions.parse(BASE).stop_offsets() is None
    with pytest.raises(ConfigError, match="must be explicit offsets"):
        SourceOptions.parse(BASE | {"endingOffsets": '{"a": {"1:0": -1}}'}).for_stream()


def test_a_stream_has_no_end() -> None:
    with pytest.raises(ConfigError, match="availableNow"):
        SourceOptions.parse(BASE | {"endingOffsets": "latest"}).for_stream()


KAFKA = {
    "assign": True, "subscribe": True, "subscribePattern": True, "startingTimestamp": True,
    "startingOffsetsByTimestamp": True, "startingOffsets": True, "startingOffsetsByTimestampStrategy": True,
    "endingTimestamp": True, "endingOffsetsByTimestamp": True, "endingOffsets": True, "failOnDataLoss": True,
    "maxOffsetsPerTrigger": True, "minPartitions": True, "groupIdPrefix": True, "includeHeaders": True,
    "minOffsetsPerTrigger": True, "maxTriggerDelay": True, "maxRecordsPerPartition": True,
    "fetchOffset.numRetries": False, "fetchOffset.retryIntervalMs": False, "kafkaConsumer.pollTimeoutMs": False,
}  # fmt: skip
"""Every option of Spark's Kafka source (4.2), and whether ours has it; else it must say what to do instead."""


@pytest.mark.parametrize(("option", "known"), KAFKA.items())
def test_every_option_of_kafkas_source_has_an_answer(option: str, known: bool) -> None:
    assert (option in READ_OPTIONS) is known
    if not known:
        with pytest.raises(ConfigError) as caught:
            SourceOptions.parse(BASE | {option.lower(): "1"})
        assert caught.value.hint == UNSUPPORTED[option]


def test_the_group_is_the_same_for_the_same_topics() -> None:
    group = SourceOptions.parse(BASE).group
    assert SourceOptions.parse(BASE | {"maxOffsetsPerTrigger": "3", "startingOffsets": "earliest"}).group == group
    assert SourceOptions.parse(BASE | {"subscribe": "b"}).group != group
    assert SourceOptions.parse(BASE | {"groupIdPrefix": "plant"}).group == "plant" + group.removeprefix("spark-tubemq")
    named = SourceOptions.parse(BASE | {"tubemq.group": "lake"})
    assert named.connection.group == "lake"
    assert SourceOptions.parse(BASE | {"tubemq.group": ""}).group == ""


def test_the_administration_address_defaults_to_the_first_master() -> None:
    assert SourceOptions.parse(BASE | {"tubemq.master": "[::1]:1,h:2"}).connection.administration == "[::1]:8080"
    assert SourceOptions.parse(BASE | {"tubemq.http": "h:9"}).connection.administration == "h:9"


def test_columns_in_their_order() -> None:
    assert SourceOptions.parse(BASE | {"columns": "OFFSET, value,offset"}).columns == ("offset", "value")
    chosen = SourceOptions.parse(BASE | {"columns": "VALUE, header.Site,header.mqtt.topic"}).columns
    assert chosen == ("value", "header.Site", "header.mqtt.topic")
    assert SourceOptions.parse(BASE | {"columns": "value", "includeHeaders": "true"}).columns == ("value", "headers")
    assert SourceOptions.parse(BASE | {"filter": "flow, heat"}).types == ("flow", "heat")


def test_the_tables_do_not_overlap() -> None:
    assert not {name.lower() for name in READ_OPTIONS} & {name.lower() for name in UNSUPPORTED}


@pytest.mark.parametrize(
    ("text", "ms"), [("1500", 1500), ("250ms", 250), (" 30 S", 30_000), ("15m", 900_000), ("2h", 7_200_000)]
)
def test_delays_are_written_as_sparks(text: str, ms: int) -> None:
    options = SourceOptions.parse(BASE | {"minOffsetsPerTrigger": "5", "maxTriggerDelay": text})
    assert (options.min_messages, options.max_delay_ms) == (5, ms)
    assert SourceOptions.parse(BASE | {"minOffsetsPerTrigger": "5"}).max_delay_ms == 900_000
