from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataLossError
from penstock.spark.tube.offsets import (
    Bounds,
    TopicPartition,
    check_offset_in_range,
    from_json,
    is_selected,
    parse_offset_spec,
    resolve,
    round_down,
    select,
    to_json,
)
from penstock.tube.codec.message import INDEX_RECORD_BYTES

A0, A1 = TopicPartition("a", 1, 0), TopicPartition("a", 1, 1)
STORE1 = TopicPartition("a", 1, 10_000)
OTHER = TopicPartition("a", 2, 0)

partitions = st.builds(
    TopicPartition, st.text(min_size=1, max_size=5), st.integers(0, 3), st.sampled_from([0, 1, 2, 10_000, 10_001])
)
positions = st.integers(0, 10**6).map(lambda record: record * INDEX_RECORD_BYTES)


@given(st.dictionaries(partitions, positions))
def test_json_round_trip_is_sorted_and_survives_text(given_positions: dict[TopicPartition, int]) -> None:
    offset = to_json(given_positions)
    text = json.dumps(offset)
    assert from_json(json.loads(text)) == given_positions
    assert json.dumps(to_json(dict(reversed(given_positions.items())))) == text


def test_json_names_partitions_by_broker_and_id() -> None:
    assert to_json({STORE1: 56, A0: 28}) == {"a": {"1:0": 28, "1:10000": 56}}


@pytest.mark.parametrize(
    "offset", [{"a": 3}, {"a": {"0": 28}}, {"a": {"1:0": -1}}, {"a": {"1:0": "28"}}, {"a": {"x": 1}}]
)
def test_an_offset_of_another_source_is_refused(offset: dict[str, dict[str, int]]) -> None:
    with pytest.raises(ConfigError, match="not an offset of the tubemq source"):
        from_json(offset)


@given(st.integers(0, 2**40))
def test_positions_are_rounded_down_as_servers_do(position: int) -> None:
    rounded = round_down(position)
    assert rounded % INDEX_RECORD_BYTES == 0
    assert 0 <= position - rounded < INDEX_RECORD_BYTES


def test_wanted_words() -> None:
    assert parse_offset_spec(" Earliest ", "startingOffsets") == "earliest"
    assert parse_offset_spec("latest", "endingOffsets", earliest=False) == "latest"
    with pytest.raises(ConfigError, match="'earliest' would select nothing"):
        parse_offset_spec("earliest", "endingOffsets", earliest=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("newest", "neither a keyword nor JSON"),
        pytest.param("[" * 100_000, "neither a keyword nor JSON: it is nested too deeply", id="deep"),
        ('{"a": {"1:0": 28, "1:0": 56}}', "contains '1:0' twice"),
        ('{"a": {"1:0": NaN}}', "NaN is not valid JSON"),
        ('{"a": {"1:0": 1e400}}', "inf of topic 'a' partition 1:0 is not an offset"),
        ("[]", "not a JSON object with topics"),
        ("{}", "not a JSON object with topics"),
        ('{"a": 3}', "topic 'a' has no object with partitions"),
        ('{"a": {}}', "topic 'a' has no object with partitions"),
        ('{"a": {"1-0": 3}}', "'1-0' of topic 'a' is not a partition"),
        ('{"a": {"1:2:3": 3}}', "'1:2:3' of topic 'a' is not a partition"),
        ('{"a": {"": 3}}', "'' of topic 'a' is not a partition"),
        ('{"a": {"1:0": -3}}', "-3 of topic 'a' partition 1:0 is not an offset"),
        ('{"a": {"1:0": true}}', "True of topic 'a' partition 1:0 is not an offset"),
        ('{"a": {"1:0": 2.5}}', "2.5 of topic 'a' partition 1:0 is not an offset"),
        ('{"a": {"1:0": "28"}}', "'28' of topic 'a' partition 1:0 is not an offset"),
    ],
)
def test_wanted_errors_name_the_part(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_offset_spec(text, "startingOffsets")
    assert message in str(caught.value)
    assert caught.value.option == "startingOffsets"
    # Spark prints long traces: the remedy is the last line.
    assert str(caught.value).splitlines()[-1].startswith("  hint: use ")


def test_wanted_refuses_a_code_that_selects_nothing() -> None:
    with pytest.raises(ConfigError, match="-2 of topic 'a' partition 0 means earliest"):
        parse_offset_spec('{"a": {"0": -2}}', "endingOffsets", earliest=False)


BOUNDS = {A0: Bounds(28, 280), A1: Bounds(28, 280)}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("earliest", {A0: 28, A1: 28}),
        ("latest", {A0: 280, A1: 280}),
        ({"a": {"1:0": -2, "1:1": -1}}, {A0: 28, A1: 280}),
        ({"a": {"0": 57, "1": 83}}, {A0: 56, A1: 56}),
    ],
)
def test_resolve(wanted: str | dict[str, dict[str, int]], expected: dict[TopicPartition, int]) -> None:
    assert resolve(wanted, BOUNDS, "startingOffsets") == expected


@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        ({"a": {"0": 28}}, "lacks topic 'a' partition 1:1", '{"a": {"1:1": -2}}'),
        ({"a": {"0": 28, "1:0": 28, "1": 0}}, "contains topic 'a' partition 1:0 twice", "'1:0'"),
        ({"a": {"7": 28}}, "contains topic 'a' partition 7, which the query does not read", "1:0, 1:1"),
        ({"b": {"0": 28}}, "contains topic 'b' partition 0, which the query does not read", "use the topics a"),
        ({"a": {"2:0": 28}}, "contains topic 'a' partition 2:0, which the query does not read", "1:0, 1:1"),
    ],
)
def test_resolve_errors(wanted: dict[str, dict[str, int]], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(wanted, BOUNDS, "startingOffsets")
    assert message in caught.value.what
    assert hint in str(caught.value.hint)


def test_a_bare_partition_needs_a_single_broker() -> None:
    bounds = {A0: Bounds(0, 0), OTHER: Bounds(0, 0)}
    with pytest.raises(ConfigError, match="without a broker") as caught:
        resolve({"a": {"0": 28}}, bounds, "startingOffsets")
    assert caught.value.hint == 'write "<brokerId>:0"; the brokers are 1, 2'
    assert resolve({"a": {"1:0": 28, "2:0": 56}}, bounds, "startingOffsets") == {A0: 28, OTHER: 56}


def test_selection() -> None:
    existing = [OTHER, A1, A0, TopicPartition("b", 1, 0)]
    assert select(existing, ["a"], None) == [A0, A1, OTHER]
    assert select(existing, ["a"], {"a": ("1:1", "2:0")}) == [A1, OTHER]
    assert select(existing, ["b"], {"b": ("0",)}) == [TopicPartition("b", 1, 0)]
    assert is_selected(A0, ["a"], {"a": ("0",)})
    assert not is_selected(A0, ["b"], None)
    with pytest.raises(ConfigError, match="assign contains topic 'a' partition 0 without a broker"):
        select(existing, ["a"], {"a": ("0",)})
    with pytest.raises(ConfigError, match="assign contains topic 'a' partition 3:0, which the query does not read"):
        select(existing, ["a"], {"a": ("3:0",)})


def test_an_offset_out_of_range_is_reported_with_the_bound() -> None:
    check_offset_in_range(28, Bounds(28, 280), A0)
    check_offset_in_range(280, Bounds(28, 280), A0)
    with pytest.raises(DataLossError) as caught:
        check_offset_in_range(0, Bounds(28, 280), A0)
    assert caught.value.what == "topic 'a' partition 1:0: offset 0 is no longer stored (oldest: 28)"
    assert "failOnDataLoss=false" in str(caught.value).splitlines()[-1]
    with pytest.raises(DataLossError, match=r"offset 308 is beyond the end of the log \(280\)"):
        check_offset_in_range(308, Bounds(28, 280), A0)
