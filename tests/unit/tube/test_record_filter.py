"""Filters of stored records: what passes, and what is refused."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError
from penstock.tube.record import Record
from penstock.tube.record_filter import MAX_JSON_BYTES, RecordFilter, parsed_json

RECORD = Record(
    b'{"temp": {"c": 21.5}, "items": [{"id": "a"}], "ok": true, "none": null, "a b": 1, "text": "Pump 7", "n": "7"}',
    key=b"plant/a",
    headers=[("unit", "bar"), ("raw", b"\xff\x00")],
    topic="plant/a",
    id="17",
)


@pytest.mark.parametrize(
    ("name", "text", "passes"),
    [
        ("key", "plant/a", True),
        ("key", "plant/*", True),
        ("key", "plant", False),
        ("attribute", "unit", True),
        ("attribute", "unit=bar", True),
        ("attribute", "unit = b*", True),
        ("attribute", "unit=ba", False),
        ("attribute", "raw", True),
        ("attribute", "other", False),
        ("attribute", "topic=plant/*", True),
        ("attribute", "id=18", False),
        ("attribute", "content_type", False),
        ("text", "PUMP", True),
        ("text", "BAR", True),
        ("text", "plant/A", True),
        ("text", "pümp", False),
        ("json", "temp.c", True),
        ("json", "$.temp.c > 21", True),
        ("json", "temp.c>=21.5", True),
        ("json", "temp.c < 21.5", False),
        ("json", "temp.d", False),
        ("json", 'items[0].id = "a"', True),
        ("json", "items[0].id = a", True),
        ("json", "items[1].id", False),
        ("json", "items.id", False),
        ("json", '["a b"] = 1', True),
        ("json", "ok = true", True),
        ("json", "ok = 1", False),
        ("json", "ok > 0", False),
        ("json", "none = null", True),
        ("json", "none != null", False),
        ("json", "text ~ pump", True),
        ("json", "items ~ id", True),
        ("json", "text > 5", True),  # a text is compared with a text
        ("json", "n = 7", True),
        ("json", "$ ~ temp", True),
    ],
)
def test_a_record_passes_what_it_fits(name: str, text: str, passes: bool) -> None:
    assert RecordFilter(**{name: text}).passes(RECORD) is passes


def test_all_conditions_must_hold() -> None:
    assert RecordFilter(key="plant/a", json="ok = true", text="pump").passes(RECORD)
    assert not RecordFilter(key="plant/b", json="ok = true", text="pump").passes(RECORD)


@pytest.mark.parametrize("value", [b"", b"text", b"\xff", b"[" * 100_000, b"1" * 5000, b"{", b'{"a": 1} x'])
def test_values_that_are_not_json_do_not_pass_a_path(value: bytes) -> None:
    assert not RecordFilter(json="a").passes(Record(value))
    assert RecordFilter().passes(Record(value))


def test_a_long_value_is_not_parsed() -> None:
    text = b'{"a": "%s"}' % (b"x" * MAX_JSON_BYTES)
    assert parsed_json(text) is None
    assert RecordFilter(text="XXX").passes(Record(text))


def test_undecodable_records_pass_no_filter_only() -> None:
    assert RecordFilter().passes(None)
    assert not RecordFilter(text="x").passes(None)


@pytest.mark.parametrize("text", ["a..b", "a[", "a[-1]", "> 5", "a b", 'a["x', "x" * 1001])
def test_a_path_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(LocalProtocolError, match=r"not a path in JSON|^json: longer"):
        RecordFilter(json=text)
