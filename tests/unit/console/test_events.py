"""The ring of events."""

from __future__ import annotations

import logging

from penstock.console.events import MAX_TEXT, EventRing


def test_log_lines_become_events_with_their_fields() -> None:
    ring = EventRing()
    log = logging.getLogger("penstock.mqtt.test_events")
    log.setLevel(logging.DEBUG)
    log.addHandler(ring)
    log.info("client %s closed", "a", extra={"fields": {"why": "no reason"}})
    log.debug("not kept")
    log.error("disk failed")
    log.removeHandler(ring)
    newest, oldest = ring.since(0, 10)
    assert (oldest.part, oldest.level, oldest.text) == ("mqtt.test_events", "info", "client a closed why=no reason")
    assert (newest.number, newest.text) == (2, "disk failed")
    assert ring.since(1, 10) == [newest]
    assert ring.since(0, 1) == [newest]
    assert ring.since(0, 10, least="error") == [newest]


def test_repeated_events_are_counted_and_the_ring_is_bounded() -> None:
    ring = EventRing(3)
    for _ in range(5):
        ring.add("info", "mqtt", "again")
    assert [(event.number, event.count) for event in ring.since(0, 10)] == [(5, 5)]
    for name in "abcde":
        ring.add("info", "mqtt", name)
    assert [event.text for event in ring.since(0, 10)] == ["e", "d", "c"]
    ring.add("info", "mqtt", "x" * 1000)
    assert len(ring.since(0, 1)[0].text) == MAX_TEXT
