"""Limits of the memory that consumers occupy in a broker; message ids increase even if the clock is set back."""

from __future__ import annotations

from typing import Any

from penstock.tube.engine.broker.group_offsets import GroupOffsets
from penstock.tube.engine.broker.topics import Topics
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.engine.limits import TubeLimits
from tests.engine.tube.broker_harness import NOW, SESSION_MS, Talk


def bounded(talk: Talk, **bounds: Any) -> None:
    talk.offsets = GroupOffsets()
    talk.engine = BrokerEngine(Topics(talk._open), talk.offsets, session_ms=SESSION_MS, **bounds)
    talk.topic("demo", partitions=3, stores=2)


def test_registrations_are_bounded_and_free_again() -> None:
    talk = Talk()
    bounded(talk, limits=TubeLimits(max_registrations=2))
    assert talk.register(0).success
    assert talk.register(1).success
    refused = talk.register(2)
    assert (refused.success, refused.errCode, refused.currOffset) == (False, 500, -1)
    assert talk.register(1).success, "again is not more"
    assert talk.register(0, opType=32).success
    assert talk.register(2).success


def test_positions_are_bounded() -> None:
    talk = Talk()
    bounded(talk, limits=TubeLimits(max_group_offsets=2))
    for n in range(2):
        assert talk.register(0, groupName=f"group{n}").success
    assert talk.register(0, groupName="group2").errCode == 500
    assert talk.register(1, groupName="group1").errCode == 500
    assert talk.register(0, groupName="group1").success
    assert len(talk.offsets) == 2


def test_message_ids_rise_although_the_clock_went_back() -> None:
    talk = Talk()
    talk.fill(b"one", b"two")
    last = talk.send(b"three")
    talk.commit()
    talk.now -= 3_600_000  # and the broker starts anew
    store = talk.stores["demo", 0]
    assert store.last_time == NOW
    bounded(talk, last_time=store.last_time)
    sent = talk.send(b"four")
    assert sent.messageId > last.messageId
    assert sent.messageId.bit_length() <= 63
