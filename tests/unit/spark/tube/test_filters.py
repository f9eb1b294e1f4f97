from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.tube.tube_client import filter_by_type
from penstock.tube.reader import MessageBatch
from penstock.tube.record import Record

TYPES = ("flow", "a b", "x=1,y", "%", "größe")


def batch(records: list[Record | bytes]) -> MessageBatch:
    data = [(r, 0) if isinstance(r, bytes) else r.encode()[:2] for r in records]
    numbers = list(range(len(data)))
    flags, payloads = [f for _, f in data], [d for d, _ in data]
    return MessageBatch.from_payloads(numbers, numbers, flags, payloads, reached=28 * len(data), message_ids=numbers)


@given(st.lists(st.sampled_from([None, *TYPES, "flo", "flow2"])), st.sets(st.sampled_from(TYPES), min_size=1))
def test_exactly_the_messages_of_the_types(kinds: list[str | None], wanted: set[str]) -> None:
    records: list[Record | bytes] = [Record(b"%d" % n, b"k", msg_type=kind) for n, kind in enumerate(kinds)]
    found = filter_by_type(wanted)(batch(records))
    assert list(found.offsets) == [n for n, kind in enumerate(kinds) if kind in wanted]
    assert found.message_ids == list(found.offsets) == list(found.append_times)
    assert len(found.flags) == len(found.payloads) == len(found.offsets)
    assert found.reached == 28 * len(kinds)


def test_messages_without_attributes_and_broken_ones_have_no_type() -> None:
    whole = batch([b"$msgType$=flow", Record(b"v", msg_type="flow"), Record(b"v", headers=[("h", "$msgType$=flow")])])
    flags, payloads = [*whole.flags, 1, 1], [*whole.payloads, b"\0\0", b"\0\0\0\x63$msgType$=flow"]
    made = MessageBatch.from_payloads(range(5), range(5), flags, payloads)
    assert list(filter_by_type({"flow"})(made).offsets) == [1, 4]


@pytest.mark.parametrize("attributes", [b"k=v,$msgType$=flow", b"k=v,$msgType$= flow ,x=y"])
def test_the_type_is_found_wherever_it_stands(attributes: bytes) -> None:
    data = len(attributes).to_bytes(4) + attributes + b"body"
    assert list(filter_by_type({"flow"})(MessageBatch.from_payloads([5], [], [1], [data])).offsets) == [5]
