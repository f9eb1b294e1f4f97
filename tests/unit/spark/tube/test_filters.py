from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.tube.filters import only
from penstock.tube.record import Record
from tests.unit.spark.fake_tube import Columns

TYPES = ("flow", "a b", "x=1,y", "%", "größe")


def batch(records: list[Record | bytes]) -> Columns:
    data = [(r, 0) if isinstance(r, bytes) else r.encode()[:2] for r in records]
    numbers = list(range(len(data)))
    return Columns(numbers, numbers, [f for _, f in data], [d for d, _ in data], 28 * len(data), list(numbers))


@given(st.lists(st.sampled_from([None, *TYPES, "flo", "flow2"])), st.sets(st.sampled_from(TYPES), min_size=1))
def test_exactly_the_messages_of_the_types(kinds: list[str | None], wanted: set[str]) -> None:
    records: list[Record | bytes] = [Record(b"%d" % n, b"k", msg_type=kind) for n, kind in enumerate(kinds)]
    found = only(wanted)(batch(records))
    assert list(found.offsets) == [n for n, kind in enumerate(kinds) if kind in wanted]
    assert found.message_ids == list(found.offsets) == list(found.append_times)
    assert len(found.flags) == len(found.payloads) == len(found.offsets)
    assert found.reached == 28 * len(kinds)


def test_messages_without_attributes_and_broken_ones_have_no_type() -> None:
    made = batch([b"$msgType$=flow", Record(b"v", msg_type="flow"), Record(b"v", headers=[("h", "$msgType$=flow")])])
    made.flags += [1, 1]
    made.payloads += [b"\0\0", b"\0\0\0\x63$msgType$=flow"]
    for column in (made.offsets, made.append_times, made.message_ids):
        assert column is not None
        column += [3, 4]
    assert list(only({"flow"})(made).offsets) == [1, 4]


@pytest.mark.parametrize("attributes", [b"k=v,$msgType$=flow", b"k=v,$msgType$= flow ,x=y"])
def test_the_type_is_found_wherever_it_stands(attributes: bytes) -> None:
    data = len(attributes).to_bytes(4) + attributes + b"body"
    assert list(only({"flow"})(Columns([5], [], [1], [data])).offsets) == [5]
