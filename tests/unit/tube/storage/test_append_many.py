"""A batch is stored as its messages one by one would be: the same bytes, the same state."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from penstock.tube.codec.message import encode_marker
from penstock.tube.storage.segment import Segment
from penstock.tube.storage.store import Store, StoreLimits
from tests.unit.runtime.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_store import LOG, commit

MESSAGE = st.tuples(
    st.binary(min_size=1, max_size=400),
    st.one_of(st.integers(0, 1), st.integers(-(2**31), 2**31 - 1)),
    st.integers(-(2**31), 2**31 - 1),
)
BATCH = st.tuples(
    st.integers(0, 2),
    st.one_of(st.integers(0, 300), st.integers(1 << 50, (1 << 50) + 500)),
    st.integers(1, 1 << 41),
    st.one_of(st.none(), st.tuples(st.integers(1, 1 << 62), st.integers(0, 1 << 40))),
    st.lists(MESSAGE, min_size=1, max_size=12),
    st.booleans(),
)
LIMITS = st.sampled_from(
    [
        StoreLimits(segment_bytes=900, fill_bytes_least=256, fill_bytes_most=1024, tail_bytes=0),
        StoreLimits(segment_records=5, fill_bytes_least=256, fill_bytes_most=1024),
        StoreLimits(),
    ]
)


def state(store: Store) -> dict[str, Any]:
    names = [
        "end_offset",
        "data_end",
        "durable_end",
        "durable_data_end",
        "unwritten_bytes",
        "last_time",
        "_unmarked",
        "_pending_bytes",
    ]
    segments = [of_segment(segment) for segment in store._segments]
    return {name: getattr(store, name) for name in (*names, "_unmarked", "_pending_bytes")} | {"segments": segments}


def of_segment(segment: Segment) -> dict[str, Any]:
    names = ["start", "data_start", "count", "data_bytes", "last_time", "wire_bytes"]
    parts = {
        number: (list(part.ordinals), list(part.ends), list(part.keys), part.wire)
        for number, part in (segment._parts or {}).items()
    }
    return {name: getattr(segment, name) for name in names} | {"parts": parts, "index": bytes(segment._index or b"")}


@given(LIMITS, st.booleans(), st.lists(BATCH, min_size=1, max_size=5))
def test_a_batch_is_stored_as_its_messages_are(limits: StoreLimits, immediate: bool, batches: list[Any]) -> None:
    one, many = RecordedDisk(), RecordedDisk()
    single, batched = Store(one, LOG, 0, limits=limits), Store(many, LOG, 0, limits=limits)
    single.immediate = batched.immediate = immediate
    for partition, first_id, now, producer, messages, committed in batches:
        datas, flags, keys = (list(column) for column in zip(*messages, strict=True))
        sums = [crc32(data) for data in datas]
        marker = b"" if producer is None else encode_marker(producer[0], producer[1], len(datas))
        found = [
            single.append(partition, data, flag, code, key, first_id + k, now, b"" if k else marker)
            for k, (data, flag, code, key) in enumerate(zip(datas, flags, sums, keys, strict=True))
        ]
        assert batched.append_many(partition, datas, sums, flags, keys, first_id, now, marker) == found[0]
        assert state(batched) == state(single)
        if committed:
            commit(single)
            commit(batched)
    commit(single)
    commit(batched)
    assert state(batched) == state(single)
    for path in (path for segment in single._segments for path in (segment.data_path, segment.index_path)):
        a, b = one.open(path), many.open(path)
        assert a.read(0, 1 << 20) == b.read(0, 1 << 20)
