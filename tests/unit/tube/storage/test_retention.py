"""Retention policies: age and size of segments, and the texts of the options."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tube.storage.retention import Retention, expired, parse_policy
from penstock.tube.storage.segment import Segment

HOUR = 3_600_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("delete,168h", 168 * HOUR),
        ("delete,30s", 30_000),
        ("delete,5m", 300_000),
        ("delete,2", 2 * HOUR),
        (" delete,7H ", 7 * HOUR),
        ("compact,1h", 168 * HOUR),
        ("", 168 * HOUR),
    ],
)
def test_policies(text: str, ms: int) -> None:
    assert parse_policy(text) == ms


def segment(last_time: int, size: int) -> Segment:
    made = Segment(Path("/log"), 0, 0)
    made.last_time, made.data_bytes = last_time, size
    return made


def test_age_and_size() -> None:
    closed = [segment(100, 10), segment(200, 10), segment(300, 10)]
    newest = segment(400, 10)
    assert expired(closed, newest, Retention(1000), 1000) == 0
    assert expired(closed, newest, Retention(750), 1000) == 2
    assert expired(closed, newest, Retention(10), 1000) == 3
    assert expired(closed, newest, Retention(10_000, max_bytes=25), 1000) == 2
    assert expired(closed, newest, Retention(10_000, max_bytes=1), 1000) == 3
