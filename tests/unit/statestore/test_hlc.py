"""Hybrid logical clock: text, order, the update rule of the clients and the version rule of the store."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import RemoteProtocolError
from penstock.statestore import hlc
from penstock.statestore.hlc import (
    MAX_COUNTER,
    MAX_DRIFT_MS,
    MAX_LEAD_MS,
    Hlc,
    StoreClock,
    parse,
)
from tests.vectors.statestore import vectors

NOW = 1_696_374_425_000
HLC = vectors()["hlc"]


def known(text: str) -> Hlc:
    value = parse(text)
    assert value is not None
    return value


@pytest.mark.parametrize("case", HLC["print"], ids=lambda case: str(case["text"]))
def test_printed_as_the_sdks_print_it(case: dict[str, Any]) -> None:
    value = Hlc(case["wall"], case["counter"], case["node"])
    assert value.padded() == case["text"]
    assert parse(case["text"]) == value
    assert parse(str(value)) == value


def test_printed_as_the_document_prints_it() -> None:
    assert str(Hlc(NOW, 1, "StateStore")) == "1696374425000:1:StateStore"


@pytest.mark.parametrize("text", [*HLC["read_ok"], "1:1:ü", f"{2**64 - 1}:{2**64 - 1}:n", "0" * 5000 + "7:0:n"])
def test_read(text: str) -> None:
    assert parse(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        *HLC["read_bad"],
        *("-1:0:n", "1:-1:n", "+1:0:n", " 1:0:n", "1 :0:n", "1:0:", "1::n", ":0:n", "1e3:0:n", "0x1:0:n", "1_0:0:n"),
        *(f"{2**64}:0:n", f"0:{2**64}:n", "1" * 5000 + ":0:n", "\u0661:0:n", "1:\u00b2:n", "1:0:n:", "1:0\n:n"),
    ],
)
def test_invalid_versions_are_refused(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize("case", [c for c in HLC["compare"] if isinstance(c, dict)], ids=str)
def test_order(case: dict[str, Any]) -> None:
    assert (known(case["a"]) < known(case["b"])) is case["a<b"]


def test_node_ids_compare_byte_by_byte() -> None:
    nodes = ["a", "Z", "é", "\uffff", "\U00010000", "aa"]
    by_value = sorted(nodes, key=lambda node: Hlc(1, 1, node))
    assert by_value == sorted(nodes, key=str.encode)


@pytest.mark.parametrize("case", HLC["update_cases_seconds_relative_to_now_drift_60"], ids=str)
def test_update_rule_of_the_clients(case: dict[str, Any]) -> None:
    own = Hlc(NOW + case["self"] * 1000, 3, "me")
    other = Hlc(NOW + case["other"] * 1000, 5, "them")
    if not case["ok"]:
        with pytest.raises(RemoteProtocolError, match="ahead of the local clock"):
            own.merged(other, NOW)
        return
    merged = own.merged(other, NOW)
    counters = {"self+1": own.counter + 1, "other+1": other.counter + 1, "max+1": 6}
    expected = case["counter"][0]
    assert merged == Hlc(max(own.wall_ms, other.wall_ms, NOW), counters.get(expected, expected), "me")


def test_a_value_of_the_same_node_changes_nothing() -> None:
    own = Hlc(5, 5, "me")
    assert own.merged(Hlc(NOW * 2, 0, "me"), NOW) is own


def test_a_counter_that_would_overflow_is_refused_by_clients() -> None:
    with pytest.raises(RemoteProtocolError, match="overflow"):
        Hlc(NOW, 0, "me").merged(Hlc(NOW, MAX_COUNTER, "them"), NOW)


def test_drift_of_a_minute_is_allowed_and_a_millisecond_more_is_not() -> None:
    assert MAX_DRIFT_MS == 60_000
    assert not Hlc(NOW + 60_000, 0, "c").is_too_far_ahead(NOW)
    assert Hlc(NOW + 60_001, 0, "c").is_too_far_ahead(NOW)


def following(clock: Hlc, seen: Hlc | None, now_ms: int) -> Hlc:
    """The version that a store with that clock gives to a request with that time stamp."""
    store = StoreClock(clock)
    version = store.next(now_ms) if seen is None else store.next(now_ms, seen.wall_ms, seen.counter)
    assert store.value == version
    return version


def test_the_example_of_the_document() -> None:
    case = HLC["set_example_from_doc"]
    version = following(Hlc(0, 0, "StateStore"), known(case["request_ts"]), case["store_clock"])
    assert str(version) == case["response_ts"]


def test_versions_of_the_store_exceed_every_request() -> None:
    clock = Hlc(NOW, 7, "StateStore")
    behind = NOW - MAX_LEAD_MS
    assert following(clock, clock, behind) == Hlc(NOW, 8, "StateStore")
    assert following(clock, Hlc(NOW, 9, "zzz"), behind) == Hlc(NOW, 10, "StateStore")
    assert following(clock, None, NOW + 1) == Hlc(NOW + 1, 1, "StateStore")
    assert following(clock, None, NOW - 50_000) == Hlc(NOW, 8, "StateStore")
    assert following(clock, Hlc(NOW, MAX_COUNTER, "c"), behind) == Hlc(NOW + 1, 1, "StateStore")
    assert following(clock, Hlc(NOW, 2**64 - 1, "c"), behind) == Hlc(NOW + 1, 1, "StateStore")


@pytest.mark.parametrize("late_ms", [0, 1, 700])
def test_a_lone_request_gets_counter_1_however_long_it_was_on_its_way(late_ms: int) -> None:
    """A test of the Rust SDK compares the counters of two renewals of a lease."""
    clock = Hlc(NOW - 2000, 1, "StateStore")
    assert following(clock, Hlc(NOW, 0, "c"), NOW + late_ms) == Hlc(NOW + late_ms, 1, "StateStore")


def test_a_few_versions_within_a_millisecond_have_counter_1_and_a_burst_counts() -> None:
    clock = Hlc(NOW - 1, 1, "StateStore")
    given = [clock := following(clock, Hlc(NOW, 0, "c"), NOW) for _ in range(2 * MAX_LEAD_MS)]
    assert given[: MAX_LEAD_MS + 1] == [Hlc(NOW + lead, 1, "StateStore") for lead in range(MAX_LEAD_MS + 1)]
    assert given[MAX_LEAD_MS + 1 :] == [
        Hlc(NOW + MAX_LEAD_MS, counter, "StateStore") for counter in range(2, MAX_LEAD_MS + 1)
    ]


def test_stamps_of_a_client_count_within_a_millisecond() -> None:
    clock = Hlc(NOW, 0, "c")
    assert clock.ticked(NOW) == clock.ticked(NOW - 5) == Hlc(NOW, 1, "c")
    assert clock.ticked(NOW + 1) == Hlc(NOW + 1, 0, "c")


walls = st.integers(0, 50)
values = st.builds(Hlc, walls, st.integers(0, 3) | st.just(MAX_COUNTER), st.sampled_from(["StateStore", "a", "z"]))


@given(values, st.none() | values, walls)
def test_following_is_greater_than_both_and_stays_printable(own: Hlc, other: Hlc | None, now_ms: int) -> None:
    version = following(own, other, now_ms)
    assert (version.wall_ms, version.counter) > (own.wall_ms, own.counter)
    if other is not None:
        assert (version.wall_ms, version.counter) > (other.wall_ms, other.counter)
    assert version.wall_ms >= now_ms
    assert version.counter <= MAX_COUNTER
    assert version.node == own.node


def test_the_position_is_wall_clock_and_counter_whoever_asks() -> None:
    assert Hlc(5, 2, "a").position == Hlc(5, 2, "z").position == (5, 2)
    assert Hlc(5, 2, "z").position < Hlc(5, 10, "a").position < Hlc(6, 0, "a").position


@given(
    st.one_of(
        st.binary(max_size=30),
        st.from_regex(rb"\A[0-9]{0,21}:[0-9]{0,21}:[a-z:]{0,3}\Z"),
        st.tuples(
            st.text("0123456789/:", min_size=15, max_size=15),
            st.text("0123456789/:", min_size=5, max_size=5),
            st.binary(max_size=18) | st.text(max_size=18).map(str.encode) | st.just(b"a-client-of-the-store"),
        ).map(lambda parts: b"%b:%b:%b" % (parts[0].encode(), parts[1].encode(), parts[2])),
        values.map(lambda value: value.padded_wire()),
    )
)
def test_both_forms_read_the_same_values(raw: bytes) -> None:
    """Interpreted, they are one; compiled, a loop over bytes is compared with bulk methods."""
    assert hlc._read(raw) == hlc._read_in_bulk(raw)
    value = hlc.parse_wire(raw)
    assert hlc.parse_position(raw) == ((-1, 0) if value is None else value.position)


class _Interrupted(str):
    """A node id during whose encoding another thread prints a value, as may happen at that moment."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        Hlc(NOW + 5000, 1, "other").padded()
        return super().encode(encoding, errors)


def test_values_that_threads_print_at_the_same_time_are_not_mixed() -> None:
    """What was printed last is remembered for all threads."""
    assert Hlc(NOW, 1, _Interrupted("mine")).padded() == f"{NOW:015d}:00001:mine"
    assert Hlc(NOW, 1, "other").padded() == f"{NOW:015d}:00001:other"


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.text(st.characters(exclude_characters=":"), min_size=1))
def test_every_value_is_printed_with_its_digits(wall: int, counter: int, node: str) -> None:
    assume(node.isprintable())
    assert Hlc(wall, counter, node).padded() == f"{wall:015d}:{counter:05d}:{node}"
