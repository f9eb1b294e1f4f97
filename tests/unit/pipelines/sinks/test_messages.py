"""Options of a write of messages, without Spark: address of the tube, credentials, batch."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.pipelines.sinks import messages
from penstock.pipelines.sinks.messages import WriteIdentity, send_messages
from tests.unit.pipelines.files import parse

HEAD = (
    "name: p\nsource: {topics: [t], master: 'a:1', options: {tubemq.user: edge, tubemq.passwordFile: secret}}\nsinks:\n"
)
OF_THE_BATCH = {"txnAppId": "p/s/query", "txnVersion": "7", "fencingToken": "1:2:n"}


class Rows:
    """Stands for a DataFrame: keeps the options of its write."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self.format_ = ""

    @property
    def write(self) -> Rows:
        return self

    def coalesce(self, _count: int) -> Rows:
        return self

    def format(self, name: str) -> Rows:
        self.format_ = name
        return self

    def mode(self, _mode: str) -> Rows:
        return self

    def options(self, **given: str) -> Rows:
        self.written = given
        return self

    def save(self) -> None:
        """Written."""


@pytest.mark.parametrize(
    ("sink", "format_", "told"),
    [
        (
            "tubemq: {topic: o}",
            "tubemq",
            {"tubemq.master": "a:1", "tubemq.user": "edge", "tubemq.passwordFile": "secret", **OF_THE_BATCH},
        ),
        ("tubemq: {topic: o, master: 'b:1'}", "tubemq", {"tubemq.master": "b:1", **OF_THE_BATCH}),
        (
            "mqtt: {topic: o, qos: 2, retain: true, broker: 'mqtt://c'}",
            "mqtt",
            {"mqtt.broker": "mqtt://c", "qos": "2", "retain": "true"},
        ),
    ],
)
def test_a_write_names_tube_user_and_batch(
    sink: str, format_: str, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "as_messages", lambda rows, *_, **__: rows)
    pipeline, rows = parse(f"{HEAD}  - {{name: s, {sink}}}\n"), Rows()
    send_messages(cast("Any", rows), pipeline.sinks[0], pipeline, 3, WriteIdentity("query", 7, "1:2:n"))
    assert (rows.format_, rows.written) == (format_, told)
    nothing = Rows()
    send_messages(cast("Any", nothing), pipeline.sinks[0], pipeline, 0, WriteIdentity("query", 8, "1:2:n"))
    assert nothing.format_ == ""
