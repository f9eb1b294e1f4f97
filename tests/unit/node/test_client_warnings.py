"""Log lines and warnings that name slow and noisy clients."""

from __future__ import annotations

import logging

import pytest

from penstock.mqtt.engine.model.client_events import MAX_CLIENTS, OTHERS, QUEUE_FULL, ClientEvents
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.node.client_warnings import MAX_INCIDENTS, PERIOD_S, STORE_DENIED, ClientWarnings


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> ClientEvents:
    caplog.set_level(logging.INFO, "penstock.mqtt")
    return ClientEvents()


def test_a_slow_client_is_named_once_a_minute_with_its_total(
    events: ClientEvents, caplog: pytest.LogCaptureFixture
) -> None:
    watch = ClientWarnings(events.collect, BrokerLimits())
    now = 0.0
    for _ in range(90):
        events.count(QUEUE_FULL, "slow-reader", "user:ann", 2)
        watch.look(now)
        now += 1
    first, second = lines(caplog)
    assert first.startswith("queue of client 'slow-reader' (user ann) is full: 2 messages dropped since ")
    assert second.startswith("queue of client 'slow-reader' (user ann) is full: 122 messages dropped since ")
    assert "; hint: " in second
    assert [warning.what.split(" since ")[0] for warning in watch.warnings()] == [
        "queue of client 'slow-reader' (user ann) is full: 180 messages dropped"
    ]
    watch.look(120.0)
    assert ": 180 messages dropped" in lines(caplog)[0]
    watch.look(now - 1 + PERIOD_S)
    assert (lines(caplog), watch.warnings()) == ([], []), "it keeps up again"


def test_denied_commands_name_client_permission_and_key(events: ClientEvents, caplog: pytest.LogCaptureFixture) -> None:
    watch = ClientWarnings(events.collect)
    for key in ("'a'", "'b'"):
        events.count(STORE_DENIED, "press-9", "certificate:press-9", 1, f"Write on {key}")
    watch.look(0.0)
    (record,) = caplog.records
    told = record.getMessage()
    assert record.levelname == "WARNING"
    assert told.startswith(
        "2 state store commands of client 'press-9' (certificate press-9) denied by the policies since "
    )
    assert told.endswith("hint: if it needs them, grant Write on 'b' in the policy file, then SIGHUP")
    assert watch.warnings() == [], "a denial does not make the node worse"


def test_thousands_of_slow_clients_take_a_few_lines(events: ClientEvents, caplog: pytest.LogCaptureFixture) -> None:
    watch = ClientWarnings(events.collect, BrokerLimits())
    for number in range(5_000):
        events.count(QUEUE_FULL, f"c{number}", "", 1)
    found = events.collect()
    assert len(found) == MAX_CLIENTS + 1
    assert (found[-1].client_id, found[-1].count) == (OTHERS, 5_000 - MAX_CLIENTS)
    for event in found:
        events.count(event.kind, event.client_id, "", event.count)
    watch.look(0.0)
    told = lines(caplog)
    assert len(told) == MAX_INCIDENTS + 1
    assert f"queue of further clients is full: {5_000 - MAX_INCIDENTS} messages dropped" in told[-1]
